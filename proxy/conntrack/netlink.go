package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Netlink is the kernel's table of the network namespace in which it was opened. It belongs to one
// goroutine.
type Netlink struct{ sockets map[int]*nl.SocketHandle }

var _ Table = Netlink{}

// Open opens the table of the calling thread's network namespace.
func Open() (Netlink, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return Netlink{}, fmt.Errorf("open a netlink socket for conntrack: %w", err)
	}
	timeout := unix.NsecToTimeval(answerWithin.Nanoseconds())
	if err := errors.Join(s.SetSendTimeout(&timeout), s.SetReceiveTimeout(&timeout)); err != nil {
		s.Close()
		return Netlink{}, fmt.Errorf("prepare a netlink socket for conntrack: %w", err)
	}
	return Netlink{sockets: map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: s}}}, nil
}

// Close closes the socket.
func (n Netlink) Close() {
	for _, s := range n.sockets {
		s.Close()
	}
}

// Message and attribute types of linux/netfilter/nfnetlink_conntrack.h that nl does not have, or
// calls otherwise.
const (
	getFlow, deleteFlow, getStats = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1, unix.NFNL_SUBSYS_CTNETLINK<<8 | 2,
		unix.NFNL_SUBSYS_CTNETLINK<<8 | 5
	statsEntries            = 1  // CTA_STATS_GLOBAL_ENTRIES
	attrFilter              = 25 // CTA_FILTER
	filterOrig, filterReply = 1, 2
	bySource, byDestination = 1 << 0, 1 << 1
	byProtocol              = 1 << 3
	bySourcePort, byPort    = 1 << 4, 1 << 5
	attrProtocol, attrPort  = 1, 3 // CTA_PROTO_NUM, CTA_PROTO_DST_PORT
	attrSourcePort          = 2
)

// smallTable is how many flows are few. Through a large table the kernel is not sent to look for a
// few flows that it shall list: it goes through with soft interrupts off until it has filled a
// buffer, and no packet passes that core in the meantime (85 ms with 240,000 flows on a busy
// machine).
const smallTable = 10_000

// Delete implements Table. In a small table the kernel lists the flows in question, if it is Linux
// 5.8 or later, and each is deleted by its identity, so that one which came anew in between is not
// hit. In a large one, Linux 6.11 or later deletes by itself what matches, stopping for others at
// every step; it does not tell how many there were. Else all flows are listed.
func (n Netlink) Delete(about About, gone func(Flow) bool) (int, error) {
	size, err := n.size()
	if err != nil {
		return 0, err
	}
	if about == (About{}) {
		return n.deleteListed(nil, unix.AF_UNSPEC, about, gone)
	}
	inet := uint8(unix.AF_INET)
	if about.To.Addr().Is6() {
		inet = unix.AF_INET6
	}
	if size <= smallTable {
		return n.deleteListed(about.filter(), inet, about, gone)
	}
	if inet == unix.AF_INET { // see filter
		_, err := n.request(inet, deleteFlow, unix.NLM_F_ACK, about.filter()).Execute(unix.NETLINK_NETFILTER, 0)
		// An older kernel takes it for a flow's identity, and misses half of that.
		if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOENT) {
			return 0, err
		}
	}
	return n.deleteListed(nil, unix.AF_UNSPEC, about, gone)
}

// size returns how many flows there are.
func (n Netlink) size() (uint32, error) {
	answers, err := n.request(unix.AF_UNSPEC, getStats, unix.NLM_F_ACK, nil).Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil {
		return 0, fmt.Errorf("count flows: %w", err)
	}
	for _, msg := range answers {
		for kind, data := range attributes(msg[min(len(msg), nl.SizeofNfgenmsg):]) {
			if kind == statsEntries && len(data) == 4 {
				return binary.BigEndian.Uint32(data), nil
			}
		}
	}
	return 0, errors.New("count flows: the kernel did not say")
}

// deleteListed lists flows and deletes those that are gone.
func (n Netlink) deleteListed(filter []byte, inet uint8, about About, gone func(Flow) bool) (int, error) {
	type flow struct {
		inet uint8
		id   []byte // attributes
	}
	var found []flow
	err := n.request(inet, getFlow, unix.NLM_F_DUMP, filter).ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		if f, ok := decode(msg); ok && about.covers(f) && gone(f) {
			found = append(found, flow{msg[0], identity(msg)})
		}
		return true
	})
	if err != nil {
		return 0, fmt.Errorf("list flows: %w", err)
	}
	deleted := 0
	for _, f := range found {
		switch _, err := n.request(f.inet, deleteFlow, unix.NLM_F_ACK, f.id).Execute(unix.NETLINK_NETFILTER, 0); {
		case err == nil:
			deleted++
		case !errors.Is(err, unix.ENOENT): // it may have ended by itself
			return deleted, fmt.Errorf("delete a flow: %w", err)
		}
	}
	return deleted, nil
}

func (n Netlink) request(inet uint8, kind, flags int, attributes []byte) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = n.sockets
	r.AddData(&nl.Nfgenmsg{NfgenFamily: inet, Version: nl.NFNETLINK_V0})
	r.AddRawData(attributes)
	return r
}

// filter has the kernel look for the flows in question. It is not told addresses of IPv6: Linux up
// to 6.18 at least compares those the wrong way round, and finds all flows but the ones that are
// asked for.
func (q About) filter() []byte {
	tuple := func(kind int, addrKind int, at netip.AddrPort, portKind int) []byte {
		t := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
		ip := t.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil)
		if at.Addr().Is4() {
			ip.AddRtAttr(addrKind, at.Addr().AsSlice())
		}
		transport := t.AddRtAttr(nl.CTA_TUPLE_PROTO|unix.NLA_F_NESTED, nil)
		transport.AddRtAttr(attrProtocol, []byte{q.Protocol})
		if at.Port() != 0 {
			transport.AddRtAttr(portKind, binary.BigEndian.AppendUint16(nil, at.Port()))
		}
		return t.Serialize()
	}
	flags := func(at netip.AddrPort, addr, port uint32) []byte {
		f := uint32(byProtocol)
		if at.Addr().Is4() {
			f |= addr
		}
		if at.Port() != 0 {
			f |= port
		}
		return binary.NativeEndian.AppendUint32(nil, f)
	}
	all := tuple(nl.CTA_TUPLE_ORIG, nl.CTA_IP_V4_DST, q.To, attrPort)
	filter := nl.NewRtAttr(attrFilter|unix.NLA_F_NESTED, nil)
	filter.AddRtAttr(filterOrig, flags(q.To, byDestination, byPort))
	if q.From.IsValid() {
		all = append(all, tuple(nl.CTA_TUPLE_REPLY, nl.CTA_IP_V4_SRC, q.From, attrSourcePort)...)
		filter.AddRtAttr(filterReply, flags(q.From, bySource, bySourcePort))
	}
	return append(all, filter.Serialize()...)
}

// decode reads a flow from a message; ok is false for what is none.
func decode(msg []byte) (f Flow, ok bool) {
	if len(msg) < nl.SizeofNfgenmsg {
		return f, false
	}
	for kind, data := range attributes(msg[nl.SizeofNfgenmsg:]) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			f.Protocol, _, f.To = tuple(data)
		case nl.CTA_TUPLE_REPLY:
			_, f.From, _ = tuple(data)
		}
	}
	return f, f.To.IsValid() && f.From.IsValid()
}

// tuple reads one direction of a flow.
func tuple(b []byte) (protocol uint8, from, to netip.AddrPort) {
	var addrs [2]netip.Addr
	var ports [2]uint16
	for kind, data := range attributes(b) {
		for part, value := range attributes(data) {
			switch {
			case kind == nl.CTA_TUPLE_IP && (part == nl.CTA_IP_V4_SRC || part == nl.CTA_IP_V6_SRC):
				addrs[0], _ = netip.AddrFromSlice(value)
			case kind == nl.CTA_TUPLE_IP && (part == nl.CTA_IP_V4_DST || part == nl.CTA_IP_V6_DST):
				addrs[1], _ = netip.AddrFromSlice(value)
			case kind == nl.CTA_TUPLE_PROTO && part == attrProtocol && len(value) == 1:
				protocol = value[0]
			case kind == nl.CTA_TUPLE_PROTO && (part == attrSourcePort || part == attrPort) && len(value) == 2:
				ports[part-attrSourcePort] = binary.BigEndian.Uint16(value)
			}
		}
	}
	return protocol, netip.AddrPortFrom(addrs[0], ports[0]), netip.AddrPortFrom(addrs[1], ports[1])
}

// identity returns the attributes by which exactly this flow is deleted.
func identity(msg []byte) []byte {
	var id []byte
	for kind, data := range attributes(msg[nl.SizeofNfgenmsg:]) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			id = append(id, nl.NewRtAttr(int(kind)|unix.NLA_F_NESTED, data).Serialize()...)
		case nl.CTA_ID, nl.CTA_ZONE:
			id = append(id, nl.NewRtAttr(int(kind), data).Serialize()...)
		}
	}
	return id
}

// attributes goes through netlink attributes without their flags (linux/netlink.h).
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			size := int(binary.NativeEndian.Uint16(b))
			if size < unix.SizeofNlAttr || size > len(b) {
				return
			}
			if !yield(binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER),
				b[unix.SizeofNlAttr:size]) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}
