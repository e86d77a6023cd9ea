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

// off reports whether the kernel says that it does not forward what comes in at an interface.
func (f forwarding) off(index int) bool {
	on, known := f[index]
	return known && !on
}

// markForwarding notes on interfaces where the kernel does not forward. IPv4 has a parameter for each
// interface, which ip_forward sets as well. IPv6 is forwarded everywhere by the parameter for all, and
// without that at the interfaces with force_forwarding, whatever their forwarding is.
func markForwarding(interfaces []lb.Interface, ipv4, ipv6 forwarding, forced map[int]bool) {
	for n := range interfaces {
		i := &interfaces[n]
		i.Unforwarded4 = ipv4.off(i.Index)
		i.Unforwarded6 = ipv6.off(netconfAll) && !forced[i.Index]
	}
}

// listForwarding asks for the parameters of one family.
func listForwarding(ns netns.NsHandle, family int) (forwarding, error) {
	messages, err := dump(ns, family, unix.RTM_GETNETCONF, unix.RTM_NEWNETCONF)
	if err != nil {
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

// dump asks for what the kernel has of one family. One without that family has nothing.
func dump(ns netns.NsHandle, family int, request, answer uint16) ([][]byte, error) {
	socket, err := nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer socket.Close()
	messages, err := complete(func() ([][]byte, error) {
		r := nl.NewNetlinkRequest(int(request), unix.NLM_F_DUMP)
		r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
		r.AddData(nl.NewIfInfomsg(family))
		return r.Execute(unix.NETLINK_ROUTE, answer)
	})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil
	}
	return messages, err
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
