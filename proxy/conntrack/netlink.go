package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Netlink is the kernel's table of the network namespace in which it was opened. It belongs to one
// goroutine.
type Netlink struct{ conn *nfnetlink.Conn }

var _ Table = Netlink{}

// Open opens the table of the calling thread's network namespace.
func Open() (Netlink, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return Netlink{}, fmt.Errorf("conntrack: %w", err)
	}
	return Netlink{conn}, nil
}

// Close closes the socket.
func (n Netlink) Close() { n.conn.Close() }

// Message and attribute types (linux/netfilter/nfnetlink_conntrack.h).
const (
	getFlow    = unix.NFNL_SUBSYS_CTNETLINK<<8 | 1
	deleteFlow = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2
	getStats   = unix.NFNL_SUBSYS_CTNETLINK<<8 | 5

	statsEntries  = 1 // CTA_STATS_GLOBAL_ENTRIES
	tupleOriginal = 1 // CTA_TUPLE_ORIG
	tupleReply    = 2 // CTA_TUPLE_REPLY
	attrID        = 12
	attrZone      = 18
	attrFilter    = 25

	tupleIP, tupleProtocol   = 1, 2 // CTA_TUPLE_IP, CTA_TUPLE_PROTO
	sourceIPv4, destIPv4     = 1, 2 // CTA_IP_V4_SRC, CTA_IP_V4_DST
	sourceIPv6, destIPv6     = 3, 4
	attrProtocol             = 1 // CTA_PROTO_NUM
	attrSourcePort, attrPort = 2, 3

	filterOrig, filterReply = 1, 2 // CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS
	bySource, byDestination = 1 << 0, 1 << 1
	byProtocol              = 1 << 3
	bySourcePort, byPort    = 1 << 4, 1 << 5
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
		err := n.conn.Request(request(inet, deleteFlow, 0, about.filter()), nil)
		// An older kernel takes it for a flow's identity, and misses half of that.
		if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOENT) {
			return 0, err
		}
	}
	return n.deleteListed(nil, unix.AF_UNSPEC, about, gone)
}

// Original returns where the packets of a flow came from and went to before rules translated them, by who sends
// and receives them since. ok is false if there is no such flow.
func (n Netlink) Original(protocol uint8, client, at netip.AddrPort) (from, to netip.AddrPort, ok bool, err error) {
	inet, source, destination := uint8(unix.AF_INET), uint16(sourceIPv4), uint16(destIPv4)
	if at.Addr().Is6() {
		inet, source, destination = unix.AF_INET6, sourceIPv6, destIPv6
	}
	var id nfnetlink.Attributes
	id.Nested(tupleReply, func() {
		id.Nested(tupleIP, func() {
			id.Bytes(source, at.Addr().AsSlice())
			id.Bytes(destination, client.Addr().AsSlice())
		})
		id.Nested(tupleProtocol, func() {
			id.Bytes(attrProtocol, []byte{protocol})
			id.Bytes(attrSourcePort, binary.BigEndian.AppendUint16(nil, at.Port()))
			id.Bytes(attrPort, binary.BigEndian.AppendUint16(nil, client.Port()))
		})
	})
	err = n.conn.Request(request(inet, getFlow, 0, id), func(m nfnetlink.Message) {
		_, from, to = tuple(nfnetlink.Get(m.Attributes(), tupleOriginal))
		ok = from.IsValid() && to.IsValid()
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return from, to, false, nil
	case err != nil:
		return from, to, false, fmt.Errorf("find a flow: %w", err)
	}
	return from, to, ok, nil
}

// size returns how many flows there are.
func (n Netlink) size() (uint32, error) {
	var size uint32
	found := false
	err := n.conn.Request(request(unix.AF_UNSPEC, getStats, 0, nil), func(m nfnetlink.Message) {
		if m.Is(unix.NFNL_SUBSYS_CTNETLINK) {
			size, found = nfnetlink.GetNumber(m.Attributes(), statsEntries)
		}
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("count flows: %w", err)
	case !found:
		return 0, errors.New("count flows: the kernel did not say")
	}
	return size, nil
}

// deleteListed lists flows and deletes those that are gone.
func (n Netlink) deleteListed(
	filter nfnetlink.Attributes, inet uint8, about About, gone func(Flow) bool) (int, error) {
	type flow struct {
		inet uint8
		id   nfnetlink.Attributes
	}
	var found []flow
	err := n.conn.Dump(request(inet, getFlow, unix.NLM_F_DUMP, filter), func(m nfnetlink.Message) error {
		if f, ok := decode(m.Attributes()); ok && about.covers(f) && gone(f) {
			found = append(found, flow{m.Family(), identity(m.Attributes())})
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("list flows: %w", err)
	}
	deleted := 0
	for _, f := range found {
		switch err := n.conn.Request(request(f.inet, deleteFlow, 0, f.id), nil); {
		case err == nil:
			deleted++
		case !errors.Is(err, unix.ENOENT): // it may have ended by itself
			return deleted, fmt.Errorf("delete a flow: %w", err)
		}
	}
	return deleted, nil
}

func request(inet uint8, kind, flags uint16, attributes nfnetlink.Attributes) *nfnetlink.Messages {
	var m nfnetlink.Messages
	m.Add(kind, flags, inet, "conntrack", func() { m.Attributes = append(m.Attributes, attributes...) })
	return &m
}

// filter has the kernel look for the flows in question. It is not told addresses of IPv6: Linux up
// to 6.18 at least compares those the wrong way round, and finds all flows but the ones that are
// asked for.
func (q About) filter() (all nfnetlink.Attributes) {
	tuple := func(kind, addrKind uint16, at netip.AddrPort, portKind uint16) {
		all.Nested(kind, func() {
			all.Nested(tupleIP, func() {
				if at.Addr().Is4() {
					all.Bytes(addrKind, at.Addr().AsSlice())
				}
			})
			all.Nested(tupleProtocol, func() {
				all.Bytes(attrProtocol, []byte{q.Protocol})
				if at.Port() != 0 {
					all.Bytes(portKind, binary.BigEndian.AppendUint16(nil, at.Port()))
				}
			})
		})
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
	tuple(tupleOriginal, destIPv4, q.To, attrPort)
	if q.From.IsValid() {
		tuple(tupleReply, sourceIPv4, q.From, attrSourcePort)
	}
	all.Nested(attrFilter, func() {
		all.Bytes(filterOrig, flags(q.To, byDestination, byPort))
		if q.From.IsValid() {
			all.Bytes(filterReply, flags(q.From, bySource, bySourcePort))
		}
	})
	return all
}

// decode reads a flow from the attributes of a message; ok is false if they are of something else.
func decode(b []byte) (f Flow, ok bool) {
	f.Protocol, _, f.To = tuple(nfnetlink.Get(b, tupleOriginal))
	_, f.From, _ = tuple(nfnetlink.Get(b, tupleReply))
	return f, f.To.IsValid() && f.From.IsValid()
}

// tuple reads one direction of a flow.
func tuple(b []byte) (protocol uint8, from, to netip.AddrPort) {
	var addrs [2]netip.Addr
	var ports [2]uint16
	for part, value := range nfnetlink.All(nfnetlink.Get(b, tupleIP)) {
		switch part {
		case sourceIPv4, sourceIPv6:
			addrs[0], _ = netip.AddrFromSlice(value)
		case destIPv4, destIPv6:
			addrs[1], _ = netip.AddrFromSlice(value)
		}
	}
	for part, value := range nfnetlink.All(nfnetlink.Get(b, tupleProtocol)) {
		switch {
		case part == attrProtocol && len(value) == 1:
			protocol = value[0]
		case (part == attrSourcePort || part == attrPort) && len(value) == 2:
			ports[part-attrSourcePort] = binary.BigEndian.Uint16(value)
		}
	}
	return protocol, netip.AddrPortFrom(addrs[0], ports[0]), netip.AddrPortFrom(addrs[1], ports[1])
}

// identity returns the attributes by which exactly this flow is deleted.
func identity(b []byte) (id nfnetlink.Attributes) {
	for kind, data := range nfnetlink.All(b) {
		switch kind {
		case tupleOriginal:
			id.Bytes(kind|unix.NLA_F_NESTED, data)
		case attrID, attrZone:
			id.Bytes(kind, data)
		}
	}
	return id
}
