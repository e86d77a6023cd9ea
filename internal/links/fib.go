package links

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Way is the route by which the kernel sends packets to an address, over all tables and rules.
type Way struct {
	Kind lb.RouteKind
	// Local is set for the node's own addresses.
	Local bool
	// Link is the index of the interface that packets leave by; 0 if there are several, or none.
	Link int
	// Down is set if no interface of the route has a carrier.
	Down bool
}

// FIB asks the kernel for routes. It is not safe for concurrent use.
type FIB struct{ handle *netlink.Handle }

// OpenFIB opens the way to the routes of a network namespace. netns.None() is that of the calling
// process.
func OpenFIB(ns netns.NsHandle) (*FIB, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink for routes: %w", err)
	}
	return &FIB{handle}, nil
}

// Close closes it.
func (f *FIB) Close() { f.handle.Close() }

// Way returns the route to an address. A route that refuses or drops is none.
func (f *FIB) Way(addr netip.Addr) (Way, error) { return f.WayIn("", 0, addr) }

// WayIn returns the route to an address for packets in a VRF, with a mark.
func (f *FIB) WayIn(vrf string, mark uint32, addr netip.Addr) (Way, error) {
	routes, err := f.handle.RouteGetWithOptions(addr.AsSlice(),
		&netlink.RouteGetOptions{FIBMatch: true, VrfName: vrf, Mark: mark})
	refused := func(no error) bool { return errors.Is(err, no) }
	// EINVAL is how IPv4 says blackhole.
	if slices.ContainsFunc([]error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL}, refused) {
		return Way{Kind: lb.RouteNone}, nil
	}
	if err == nil && len(routes) == 0 {
		err = errors.New("the kernel returned no route")
	}
	if err != nil {
		return Way{}, fmt.Errorf("look up the route to %s: %w", addr, err)
	}
	return wayOf(routes[0]), nil
}

func wayOf(r netlink.Route) Way {
	switch r.Type {
	case unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT, unix.RTN_BLACKHOLE, unix.RTN_THROW:
		return Way{Kind: lb.RouteNone}
	case unix.RTN_LOCAL:
		return Way{Kind: lb.RouteOwn, Local: true, Link: r.LinkIndex}
	}
	const down = unix.RTNH_F_LINKDOWN | unix.RTNH_F_DEAD
	w := Way{Kind: lb.RouteOwn, Link: r.LinkIndex, Down: r.Flags&down != 0}
	if isDefault(r) {
		w.Kind = lb.RouteDefault
	}
	if len(r.MultiPath) > 0 {
		w.Link = 0
		w.Down = !slices.ContainsFunc(r.MultiPath, func(hop *netlink.NexthopInfo) bool { return hop.Flags&down == 0 })
	}
	return w
}

// RouteChange says to which addresses the kernel may take another route than before: those of a
// prefix, those that it reaches over a link, or all.
type RouteChange struct {
	Prefix netip.Prefix // zero unless a route came, went or changed
	Link   int          // index of an interface that has changed; 0 if none has
	All    bool
}

// groups are those of the kernel's messages about what may change a route.
var groups = []uint{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_NEXTHOP}

// WatchRoutes calls changed for each batch of changes until ctx ends or the subscription fails, and
// with All at first and where the kernel had to drop messages.
func WatchRoutes(ctx context.Context, ns netns.NsHandle, changed func([]RouteChange)) error {
	socket, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_ROUTE, groups...)
	if err != nil {
		return fmt.Errorf("subscribe to routes: %w", err)
	}
	stop := context.AfterFunc(ctx, socket.Close)
	defer func() {
		if stop() {
			socket.Close()
		}
	}()
	changed([]RouteChange{{All: true}})
	for {
		messages, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			changed([]RouteChange{{All: true}})
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("receive changes of routes: %w", err)
		}
		if changes := changesOf(messages); len(changes) > 0 {
			changed(changes)
		}
	}
}

func changesOf(messages []syscall.NetlinkMessage) (changes []RouteChange) {
	for _, m := range messages {
		if c, ok := changeOf(m.Header.Type, m.Data); ok {
			changes = append(changes, c)
		}
	}
	return changes
}

// changeOf reads a message of the kernel. What it cannot read may have changed all.
func changeOf(kind uint16, data []byte) (c RouteChange, ok bool) {
	switch kind {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		if prefix, ok := prefixOf(data); ok {
			return RouteChange{Prefix: prefix}, true
		}
		return RouteChange{All: true}, true
	case unix.RTM_NEWRULE, unix.RTM_DELRULE, unix.RTM_NEWNEXTHOP, unix.RTM_DELNEXTHOP:
		return RouteChange{All: true}, true
	case unix.RTM_NEWLINK, unix.RTM_DELLINK, unix.RTM_DELADDR:
		if len(data) < 8 {
			return RouteChange{All: true}, true
		}
		// struct ifinfomsg and ifaddrmsg have the index at the same place.
		return RouteChange{Link: int(int32(binary.NativeEndian.Uint32(data[4:8])))}, true
	}
	return c, false
}

// prefixOf reads the destination in a struct rtmsg and its attributes.
func prefixOf(data []byte) (netip.Prefix, bool) {
	if len(data) < unix.SizeofRtMsg {
		return netip.Prefix{}, false
	}
	addr := netip.IPv4Unspecified()
	switch data[0] {
	case unix.AF_INET:
	case unix.AF_INET6:
		addr = netip.IPv6Unspecified()
	default:
		return netip.Prefix{}, false
	}
	attrs, err := attributes(data[unix.SizeofRtMsg:])
	if err != nil {
		return netip.Prefix{}, false
	}
	for _, a := range attrs {
		if a.kind != unix.RTA_DST {
			continue
		}
		to, ok := netip.AddrFromSlice(a.value)
		if !ok || to.BitLen() != addr.BitLen() {
			return netip.Prefix{}, false
		}
		addr = to
	}
	prefix, err := addr.Prefix(int(data[1]))
	return prefix, err == nil
}
