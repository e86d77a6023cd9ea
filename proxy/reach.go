package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

const (
	// maxReach is how many addresses are connected to, and how many packets are walked, at most.
	maxReach = 16
	// connectTime is how long a connection may take. The kernel of a pod's node answers without waiting for the
	// pod, and a lost packet is sent again only after a second.
	connectTime = 150 * time.Millisecond
)

func lookReach(ctx context.Context, args []string) (any, error) {
	set := lookFlagSet("reach")
	connects := set.StringArray("connect", nil, "")
	from, to := set.StringArray("from", nil, ""), set.StringArray("to", nil, "")
	if err := parseLook(set, args); err != nil {
		return nil, err
	}
	if len(*connects)+len(*to) == 0 || len(*connects) > maxReach || len(*from)*len(*to) > maxReach {
		return nil, ops.Usagef("reach needs --connect or --to, and takes up to %d connections and packets", maxReach)
	}
	var addresses []netip.AddrPort
	for _, text := range *connects {
		address, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil, ops.Usagef("--connect: %q is not IP:PORT", text)
		}
		addresses = append(addresses, address)
	}
	var packets []lb.TracePacket
	for _, text := range *to {
		target, err := lb.ParseFlowTarget(text)
		if err != nil || !target.Addr.IsValid() {
			return nil, ops.Usagef("--to: %q is not IP:PORT[/PROTOCOL]", text)
		}
		for _, text := range *from {
			source, err := netip.ParseAddr(text)
			if err != nil {
				return nil, ops.Usagef("--from: %q is not an IP address", text)
			}
			if lb.FamilyOf(source) != lb.FamilyOf(target.Addr) {
				continue
			}
			p := lb.TracePacket{Source: netip.AddrPortFrom(source, 0), Protocol: cmp.Or(target.Protocol, lb.TCP),
				Destination: netip.AddrPortFrom(target.Addr, target.Port)}
			if err := p.Check(); err != nil {
				return nil, ops.Usagef("%w", err)
			}
			packets = append(packets, p)
		}
	}
	found := lb.Reach{Node: nodeName()}
	var connecting sync.WaitGroup
	connecting.Go(func() { found.Connects = connectAll(addresses) })
	err := tracePackets(ctx, found.Node, packets, false, func(t lb.Trace) {
		found.Walks = append(found.Walks, lb.ReachWalk{Packet: t.Packet, Dropped: droppedBy(t),
			NoRoute: t.Packet.Interface == unknownInterface})
	})
	if err != nil {
		found.Walks, found.Unwalked = nil, err.Error()
	}
	connecting.Wait()
	return found, nil
}

// droppedBy names the rule of another program that certainly ends a packet's way; "" if none does.
func droppedBy(t lb.Trace) string {
	if len(t.Ways) == 0 || slices.ContainsFunc(t.Ways, func(w lb.TraceWay) bool {
		ended := w.Verdict == lb.TraceDropped || w.Verdict == lb.TraceRefused
		return !ended || len(w.Steps) == 0 || !w.Steps[len(w.Steps)-1].Foreign
	}) {
		return ""
	}
	return t.Ways[0].Why
}

// connectAll opens a TCP connection to each address, all at once, sends nothing over them, and closes them. It asks
// the kernel once more when the time is over: a program that gets no CPU time is told late, and the
// connection is there.
func connectAll(to []netip.AddrPort) []lb.ReachConnect {
	ends := make([]lb.ReachConnect, len(to))
	waiting := map[int32]*lb.ReachConnect{}
	for i, address := range to {
		end := &ends[i]
		end.Address = address
		socket, err := beginConnect(address)
		if err != nil && !errors.Is(err, unix.EINPROGRESS) {
			ended(end, err)
		} else if err != nil {
			waiting[socket] = end
		}
		if socket >= 0 {
			defer func() { _ = unix.Close(int(socket)) }()
		}
	}
	for until := time.Now().Add(connectTime); len(waiting) > 0; {
		left := max(0, time.Until(until))
		var polled []unix.PollFd
		for socket := range waiting {
			polled = append(polled, unix.PollFd{Fd: socket, Events: unix.POLLOUT})
		}
		if _, err := unix.Poll(polled, int((left+time.Millisecond-1)/time.Millisecond)); errors.Is(err, unix.EINTR) {
			continue
		}
		for _, p := range polled {
			if p.Revents == 0 {
				continue
			}
			number, err := unix.GetsockoptInt(int(p.Fd), unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && number != 0 {
				err = unix.Errno(number)
			}
			ended(waiting[p.Fd], err)
			delete(waiting, p.Fd)
		}
		if left == 0 {
			break
		}
	}
	for _, end := range waiting {
		end.Error = fmt.Sprintf("no answer within %s", connectTime)
	}
	return ends
}

// beginConnect begins a connection. Its socket is to be closed, unless it is negative.
func beginConnect(to netip.AddrPort) (socket int32, err error) {
	family, address := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
	if to.Addr().Is4() {
		family, address = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	// Closed so, the kernel need not remember the connection.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return int32(fd), err
	}
	return int32(fd), unix.Connect(fd, address)
}

// ended notes how an attempt to connect has ended.
func ended(end *lb.ReachConnect, err error) {
	if err != nil {
		end.Error, end.Refused = err.Error(), errors.Is(err, unix.ECONNREFUSED)
	}
}
