package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"

	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of router advertisements. A router advertises itself soon after it hears of us, whatever
// its own interval.
const (
	firstAdvertisements = 4
	quickInterval       = 500 * time.Millisecond
	slowInterval        = 10 * time.Second
	// askedInterval is the least time between two that answer solicitations (MIN_DELAY_BETWEEN_RAS, RFC 4861
	// section 10): each goes to all nodes on the link.
	askedInterval = 3 * time.Second
	// Of a flood, which anybody on the link can send, one message in heedEvery is read, after heedBurst at once.
	heedEvery = time.Millisecond
	heedBurst = 64
)

var allNodes, allRouters = netip.MustParseAddr("ff02::1"), netip.MustParseAddr("ff02::2")

// discover finds the router on an interface by its router advertisements, and makes this node known
// to it in the same way, as routers with unnumbered sessions expect. What is sent has a router
// lifetime of 0: no host takes this node as a default router.
func discover(ctx context.Context, iface string, found func(netip.Addr)) error {
	i, err := net.InterfaceByName(iface)
	if err != nil {
		return fmt.Errorf("interface %s: %w", iface, err)
	}
	conn, own, err := ndp.Listen(i, ndp.LinkLocal)
	if err != nil {
		return fmt.Errorf("interface %s: %w", iface, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unlink := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer unlink()
	var filter ipv6.ICMPFilter
	filter.SetAll(true)
	filter.Accept(ipv6.ICMPTypeRouterAdvertisement)
	filter.Accept(ipv6.ICMPTypeRouterSolicitation)
	if err := errors.Join(conn.SetICMPFilter(&filter), conn.SetControlMessage(ipv6.FlagHopLimit, true),
		conn.JoinGroup(allRouters)); err != nil {
		conn.Close()
		return fmt.Errorf("interface %s: join all routers: %w", iface, err)
	}
	found(netip.Addr{})
	asked := make(chan struct{}, 1)
	var sending sync.WaitGroup
	var failed error
	sending.Go(func() {
		failed = advertise(ctx, asked, func() error {
			return conn.WriteTo(&ndp.RouterAdvertisement{
				Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: i.HardwareAddr}}}, nil, allNodes)
		}, func() error { return conn.WriteTo(&ndp.RouterSolicitation{}, nil, allRouters) })
		cancel()
	})
	err = listen(conn, own, iface, asked, found)
	cancel()
	sending.Wait()
	conn.Close()
	if failed != nil {
		err = failed
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return fmt.Errorf("interface %s: %w", iface, err)
}

// advertise sends router advertisements until ctx ends: some quickly, then one in a while and one
// for what is asked meanwhile. With the first it solicits the router's.
func advertise(ctx context.Context, asked <-chan struct{}, send, solicit func() error) error {
	for n := 0; ; n++ {
		if err := send(); err != nil {
			return fmt.Errorf("send a router advertisement: %w", err)
		}
		interval := slowInterval
		if n < firstAdvertisements {
			interval = quickInterval
			// The router's answer to a solicitation tells its address without waiting for its own time.
			if err := solicit(); err != nil {
				return fmt.Errorf("send a router solicitation: %w", err)
			}
		}
		soonest := time.After(min(askedInterval, interval))
		select {
		case <-ctx.Done():
			return nil
		case <-asked:
			select {
			case <-ctx.Done():
				return nil
			case <-soonest:
			}
		case <-time.After(interval):
		}
	}
}

// advertisements are where router advertisements and solicitations come from.
type advertisements interface {
	ReadRaw(b []byte) (int, *ipv6.ControlMessage, netip.Addr, error)
}

// listen reports the senders of router advertisements until the connection's deadline passes.
func listen(conn advertisements, own netip.Addr, iface string, asked chan struct{}, found func(netip.Addr)) error {
	pace := loop.Allowance{Every: heedEvery, Burst: heedBurst}
	// Who sends is all that counts. Options are not looked at: there may be hundreds, and also what makes no sense
	// is read at the pace.
	var header [16]byte
	for {
		n, control, from, err := conn.ReadRaw(header[:])
		if err != nil {
			return err
		}
		time.Sleep(pace.Wait(time.Now()))
		if control == nil || control.HopLimit != ndp.HopLimit {
			continue // from beyond the link (RFC 4861 section 6.1)
		}
		from = from.WithZone("")
		if !from.IsLinkLocalUnicast() || from == own.WithZone("") {
			continue
		}
		switch kind := ipv6.ICMPType(header[0]); {
		case kind == ipv6.ICMPTypeRouterAdvertisement && n == len(header):
			found(from.WithZone(iface))
		case kind == ipv6.ICMPTypeRouterSolicitation && n >= 8:
			poke(asked)
		}
	}
}
