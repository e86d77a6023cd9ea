package links

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Of linux/netconf.h.
const (
	netconfIndex      = 1 // NETCONFA_IFINDEX
	netconfForwarding = 2 // NETCONFA_FORWARDING
	netconfAll        = -1
)

// forwarding is what the kernel says of forwarding: by the index of the interface that packets come
// in at, and for all.
type forwarding map[int]bool

// markForwarding notes on interfaces where the kernel does not forward. IPv4 has a parameter for
// each interface, which ip_forward sets as well; what IPv6 forwards depends on that for all.
func markForwarding(interfaces []lb.Interface, ipv4, ipv6 forwarding) {
	for n := range interfaces {
		i := &interfaces[n]
		on, known := ipv4[i.Index]
		i.Unforwarded4 = known && !on
		on, known = ipv6[netconfAll]
		i.Unforwarded6 = known && !on
	}
}

// listForwarding asks for the parameters of one family. A kernel without that family has none.
func listForwarding(ns netns.NsHandle, family int) (forwarding, error) {
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	messages, err := complete(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETNETCONF, unix.NLM_F_DUMP)
		request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
		request.AddData(nl.NewIfInfomsg(family))
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNETCONF)
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list forwarding: %w", err)
	}
	found := forwarding{}
	for _, m := range messages {
		if index, on, ok := parseNetconf(m, family); ok {
			found[index] = on
		}
	}
	return found, nil
}

// parseNetconf reads a struct netconfmsg, which is one byte in a word, and its attributes.
func parseNetconf(message []byte, family int) (index int, on, ok bool) {
	const header = 4
	if len(message) < header || int(message[0]) != family {
		return 0, false, false
	}
	attrs, err := attributes(message[header:])
	if err != nil {
		return 0, false, false
	}
	indexed := false
	for _, a := range attrs {
		if len(a.value) < 4 {
			continue
		}
		value := int(int32(binary.NativeEndian.Uint32(a.value)))
		switch a.kind {
		case netconfIndex:
			index, indexed = value, true
		case netconfForwarding:
			on, ok = value != 0, true
		}
	}
	return index, on, ok && indexed
}

// attribute is one of a message of rtnetlink.
type attribute struct {
	kind  uint16
	value []byte
}

// attributes reads those of a message. Unlike nl.ParseRouteAttr, it takes a last one without its padding.
func attributes(b []byte) (all []attribute, err error) {
	for len(b) >= unix.SizeofRtAttr {
		size := int(binary.NativeEndian.Uint16(b))
		if size < unix.SizeofRtAttr || size > len(b) {
			return nil, unix.EINVAL
		}
		all = append(all, attribute{binary.NativeEndian.Uint16(b[2:]), b[unix.SizeofRtAttr:size]})
		b = b[min((size+unix.RTA_ALIGNTO-1)&^(unix.RTA_ALIGNTO-1), len(b)):]
	}
	return all, nil
}
