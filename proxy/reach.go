package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

const (
	// maxReach is how many addresses are connected to, and how many packets are walked, at most.
	maxReach = 16
	// connectTime is how long a connection may take.
	connectTime = time.Second
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
	var group errgroup.Group
	group.Go(func() error {
		found.Connects = connectAll(ctx, new(net.Dialer).DialContext, addresses)
		return nil
	})
	var err error
	if found.Walks, err = walkAll(ctx, packets); err != nil {
		found.Unwalked = err.Error()
	}
	_ = group.Wait() // which never fails
	return found, nil
}

// walkAll walks the first packets of connections through the rules in the kernel.
func walkAll(ctx context.Context, packets []lb.TracePacket) (walks []lb.ReachWalk, err error) {
	for _, p := range packets {
		traced, err := traceKernel(ctx, nodeName(), p, false)
		if err != nil {
			return nil, err
		}
		walks = append(walks, lb.ReachWalk{Packet: traced.Packet, Dropped: droppedBy(traced),
			NoRoute: traced.Packet.Interface == unknownInterface})
	}
	return walks, nil
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

// dialer opens a connection, as that of package net does.
type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// connectAll opens a TCP connection to each address, all at once, sends nothing over them, and closes them.
func connectAll(ctx context.Context, dial dialer, to []netip.AddrPort) []lb.ReachConnect {
	ends := make([]lb.ReachConnect, len(to))
	var group errgroup.Group
	for i, address := range to {
		group.Go(func() error {
			ends[i] = connectOne(ctx, dial, address)
			return nil
		})
	}
	_ = group.Wait()
	return ends
}

func connectOne(ctx context.Context, dial dialer, to netip.AddrPort) lb.ReachConnect {
	end := lb.ReachConnect{Address: to}
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	conn, err := dial(ctx, "tcp", to.String())
	var errno syscall.Errno
	switch {
	case err == nil:
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // the kernel need not remember it
		}
		_ = conn.Close()
	case errors.Is(err, syscall.ECONNREFUSED):
		end.Error, end.Refused = syscall.ECONNREFUSED.Error(), true
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		end.Error = fmt.Sprintf("no answer within %s", connectTime)
	case errors.As(err, &errno):
		end.Error = errno.Error()
	default:
		end.Error = err.Error()
	}
	return end
}
