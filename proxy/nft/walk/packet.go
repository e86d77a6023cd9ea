package walk

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// Where the addresses are in the header of a family.
func (w *Walker) addresses() (source, destination int) {
	if w.Family == lb.IPv6 {
		return 8, 24
	}
	return 12, 16
}

// network returns the packet's IP header (RFC 791, RFC 8200), without checksum and lengths.
func (w *Walker) network(p trace.Packet) []byte {
	ttl := cmp.Or(p.TTL, 64)
	source, destination := w.addresses()
	header := make([]byte, destination+nft.AddressBytes(w.Family))
	if header[0] = 0x45; w.Family == lb.IPv6 {
		header[0], header[6], header[7] = 0x60, p.Protocol, ttl
	} else {
		header[8], header[9] = ttl, p.Protocol
	}
	copy(header[source:], p.Source.Addr().AsSlice())
	copy(header[destination:], p.Destination.Addr().AsSlice())
	return header
}

// transport returns what matters of the transport header: the ports and the flag SYN, or the type of
// a ping's question.
func (w *Walker) transport(p trace.Packet) []byte {
	const flags, syn, echo, echo6 = 13, 2, 8, 128
	header := make([]byte, 20)
	switch p.Protocol {
	case unix.IPPROTO_ICMP:
		header[0] = echo
	case unix.IPPROTO_ICMPV6:
		header[0] = echo6
	default:
		binary.BigEndian.PutUint16(header, p.Source.Port())
		binary.BigEndian.PutUint16(header[2:], p.Destination.Port())
		if p.Protocol == unix.IPPROTO_TCP {
			header[flags] = syn
		}
	}
	return header
}

func (w *Walker) payload(e *expr.Payload, p way) ([]byte, bool) {
	var header []byte
	switch e.Base {
	case expr.PayloadBaseLLHeader: // of Ethernet
		header = append(make([]byte, len(p.Sender)), p.Sender[:]...)
	case expr.PayloadBaseNetworkHeader:
		header = w.network(p.Packet)
	case expr.PayloadBaseTransportHeader:
		header = w.transport(p.Packet)
		w.SourcePort = w.SourcePort || e.Offset < 2 && p.Protocol != unix.IPPROTO_ICMP && p.Protocol != unix.IPPROTO_ICMPV6
	}
	end := uint64(e.Offset) + uint64(e.Len)
	if end > uint64(len(header)) {
		return nil, false
	}
	return header[e.Offset:end], true
}

// write changes the packet's destination address or its TTL, and reports whether it could.
func (w *Walker) write(e *expr.Payload, p *way) bool {
	_, destination := w.addresses()
	ttl := map[lb.Family]uint32{lb.IPv4: 8, lb.IPv6: 7}[w.Family]
	if e.Base == expr.PayloadBaseNetworkHeader && e.Offset == ttl && e.Len <= 2 {
		p.TTL = p.load(e.SourceRegister, 1)[0]
		return true
	}
	size := nft.AddressBytes(w.Family)
	if e.Base != expr.PayloadBaseNetworkHeader || int(e.Offset) != destination || int(e.Len) != size || !e.PseudoHeader ||
		e.Checksum != (w.Family == lb.IPv4) {
		return false
	}
	to, _ := netip.AddrFromSlice(p.load(e.SourceRegister, size))
	p.Destination = netip.AddrPortFrom(to, p.Destination.Port())
	return true
}

// meta reads or changes what is known of a packet besides its bytes, and reports whether it could.
func (w *Walker) meta(e *expr.Meta, p *way, step func(p *way, does string)) bool {
	switch {
	case e.Key == expr.MetaKeyMARK && e.SourceRegister:
		mark := binary.NativeEndian.Uint32(p.load(e.Register, 4))
		if mark != p.Mark {
			step(p, fmt.Sprintf("set the mark 0x%x", mark))
		}
		p.Mark = mark
	case e.Key == expr.MetaKeyMARK:
		p.store(e.Register, expr.Host32(p.Mark))
	case e.Key == expr.MetaKeyPRIORITY && e.SourceRegister:
		p.Priority = binary.NativeEndian.Uint32(p.load(e.Register, 4))
	case e.Key == expr.MetaKeyPRIORITY:
		p.store(e.Register, expr.Host32(p.Priority))
	case e.Key == expr.MetaKeyL4PROTO:
		p.store(e.Register, []byte{p.Protocol})
	case e.Key == expr.MetaKeyNFPROTO:
		p.store(e.Register, []byte{nft.Family(w.Family)})
	case e.Key == expr.MetaKeyIIF:
		index := cmp.Or(w.Link, math.MaxInt32) // whichever it is
		if p.Interface == "" {
			index = 0
		}
		p.store(e.Register, expr.Host32(index))
	case e.Key == expr.MetaKeyIIFTYPE && p.Interface != "":
		p.store(e.Register, expr.Host16(unix.ARPHRD_ETHER))
	case e.Key == expr.MetaKeyIIFNAME && len(p.Interface) < unix.IFNAMSIZ:
		p.store(e.Register, append([]byte(p.Interface), make([]byte, unix.IFNAMSIZ-len(p.Interface))...))
	default:
		return false
	}
	return true
}

// Bits of the status of linux/netfilter/nf_conntrack_common.h.
const (
	statusSeenReply  = 1 << 1
	statusAssured    = 1 << 2
	statusTranslated = 1 << 5
)

// ct reads what conntrack knows of the connection.
func (w *Walker) ct(e *expr.Ct, p way) ([]byte, bool) {
	switch e.Key {
	case expr.CtKeySTATE:
		if p.Invalid {
			return expr.Host32(expr.CtStateBitINVALID), true
		}
		return expr.Host32(expr.CtStateBitNEW), true
	case expr.CtKeySTATUS:
		status := uint32(0)
		if p.Translated {
			status |= statusTranslated
		}
		if p.Established {
			status |= statusSeenReply | statusAssured
		}
		return expr.Host32(status), true
	case expr.CtKeyLABELS:
		return make([]byte, 16), true
	case unix.NFT_CT_SRC_IP, unix.NFT_CT_SRC_IP6:
		if e.Reply {
			return p.Destination.Addr().AsSlice(), true
		}
		return p.Source.Addr().AsSlice(), true
	case unix.NFT_CT_DST_IP, unix.NFT_CT_DST_IP6:
		return p.Sent.Addr().AsSlice(), !e.Reply
	case unix.NFT_CT_PROTO_DST:
		return binary.BigEndian.AppendUint16(nil, p.Sent.Port()), !e.Reply
	}
	return nil, false
}

// format prints a key or value by nft's number for its type.
func format(kind uint32, data []byte) string {
	const bitsOfType = 6
	var kinds []uint32
	for ; kind > 0; kind >>= bitsOfType {
		kinds = append([]uint32{kind & (1<<bitsOfType - 1)}, kinds...)
	}
	var parts []string
	for _, k := range kinds {
		size := map[uint32]int{nft.TypeAddress(lb.IPv6): 16, nft.TypeEther: 8}[k]
		if size = min(max(size, 4), len(data)); k == nft.TypeEther {
			size = min(6, size)
		}
		parts = append(parts, formatOne(k, data[:size]))
		data = data[min(len(data), (size+3)&^3):]
	}
	return strings.Join(parts, " . ")
}

func formatOne(kind uint32, data []byte) string {
	switch {
	case kind == nft.TypeAddress(lb.IPv4) && len(data) == 4, kind == nft.TypeAddress(lb.IPv6) && len(data) == 16:
		addr, _ := netip.AddrFromSlice(data)
		return addr.String()
	case kind == nft.TypePort && len(data) >= 2:
		return fmt.Sprint(binary.BigEndian.Uint16(data))
	case kind == nft.TypeProto && len(data) >= 1:
		return map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[data[0]]
	case (kind == nft.TypeClass || kind == nft.TypeInteger) && len(data) == 4:
		return fmt.Sprint(binary.NativeEndian.Uint32(data))
	case kind == nft.TypeEther:
		return net.HardwareAddr(data).String()
	}
	return "0x" + hex.EncodeToString(data)
}
