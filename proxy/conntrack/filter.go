package conntrack

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// statusTranslated is IPS_DST_NAT (linux/netfilter/nf_conntrack_common.h).
const statusTranslated = 1 << 5

// maxFiltered is how many addresses and ports a filter compares. With more it lets all pass.
const maxFiltered = 256

// Filter limits what the watch hears of to connections that were sent to some addresses, or to some
// ports at any address. Where they are many, it hears of all.
func (w *Watch) Filter(addresses []netip.Addr, ports []uint16) error {
	return w.events.Filter(eventFilter(addresses, ports))
}

// program is a filter in the making (linux/filter.h).
type program []unix.SockFilter

func (p *program) add(code uint16, k uint32) { *p = append(*p, unix.SockFilter{Code: code, K: k}) }

// attribute has the accumulator hold where an attribute of the message begins, by a path of kinds; 0
// if there is none.
func (p *program) attribute(path ...uint32) {
	const (
		ancillary    = ^uint32(0x1000) + 1            // SKF_AD_OFF
		find, findIn = ancillary + 12, ancillary + 16 // SKF_AD_NLATTR, SKF_AD_NLATTR_NEST
		headers      = unix.NLMSG_HDRLEN + 4
	)
	p.add(unix.BPF_LD|unix.BPF_IMM, headers)
	where := find
	for i, kind := range path {
		p.add(unix.BPF_LDX|unix.BPF_IMM, kind)
		p.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, where)
		if where = findIn; i < len(path)-1 { // in nothing there is nothing
			*p = append(*p, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: uint8(3*(len(path)-1-i) - 1)})
		}
	}
}

// load has the accumulator hold what is at an offset in the attribute that it points to.
func (p *program) load(size uint16, offset uint32) {
	p.add(unix.BPF_MISC|unix.BPF_TAX, 0)
	p.add(unix.BPF_LD|size|unix.BPF_IND, unix.SizeofNlAttr+offset)
}

// keepIf lets the message pass if the accumulator is k.
func (p *program) keepIf(k uint32) {
	*p = append(*p, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jf: 1})
	p.add(unix.BPF_RET|unix.BPF_K, nfnetlink.Keep)
}

// dropIf drops it if the accumulator is k.
func (p *program) dropIf(k uint32) {
	*p = append(*p, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jf: 1})
	p.add(unix.BPF_RET|unix.BPF_K, 0)
}

// unless has what body adds run only if the accumulator is not k.
func (p *program) unless(k uint32, body func(*program)) {
	var inner program
	body(&inner)
	*p = append(*p, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jf: 1},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(len(inner))})
	*p = append(*p, inner...)
}

// eventFilter returns what lets an event pass only if it is of a connection that is assured and
// translated, tells of its end or of a state at which its count may change, and, unless they are too
// many, of one of the destinations; of all with neither addresses nor ports.
func eventFilter(addresses []netip.Addr, ports []uint16) []unix.SockFilter {
	var p program
	p.attribute(attrStatus)
	p.dropIf(0)
	p.load(unix.BPF_W, 0)
	p.add(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, statusAssured|statusTranslated)
	p.unless(statusAssured|statusTranslated, func(p *program) { p.add(unix.BPF_RET|unix.BPF_K, 0) })
	// The kind is in this machine's byte order, which a filter reads as if it were the network's.
	p.add(unix.BPF_LD|unix.BPF_H|unix.BPF_ABS, 4)
	p.unless(uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, deleteFlow))), func(p *program) {
		p.attribute(protocolInfo, infoTCP, infoState)
		p.unless(0, func(p *program) { // else it is another protocol
			p.load(unix.BPF_B, 0)
			// Of TCP: established, the first farewell of either end, and a reset.
			states := []uint32{establishedTCP, 4, 5, 8}
			for i, state := range states {
				*p = append(*p, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: state,
					Jt: uint8(len(states) - i)})
			}
			p.add(unix.BPF_RET|unix.BPF_K, 0)
		})
	})
	if n := len(addresses) + len(ports); n == 0 || n > maxFiltered {
		p.add(unix.BPF_RET|unix.BPF_K, nfnetlink.Keep)
		return p
	}
	p.attribute(tupleOriginal, tupleProtocol, attrPort)
	p.dropIf(0)
	p.load(unix.BPF_H, 0)
	for _, port := range ports {
		p.keepIf(uint32(port))
	}
	p.destination(destIPv4, 0, addresses)
	p.destination(destIPv6, 12, addresses)
	p.add(unix.BPF_RET|unix.BPF_K, 0)
	return p
}

// destination lets a message pass whose destination is one of the addresses of a family, by the last
// word of each, which begins at offset.
func (p *program) destination(kind, offset uint32, addresses []netip.Addr) {
	p.attribute(tupleOriginal, tupleIP, kind)
	p.unless(0, func(p *program) {
		p.load(unix.BPF_W, offset)
		for _, addr := range addresses {
			if b := addr.AsSlice(); addr.Is4() == (kind == destIPv4) {
				p.keepIf(binary.BigEndian.Uint32(b[len(b)-4:]))
			}
		}
	})
}
