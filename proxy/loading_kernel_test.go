package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/loads"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// loadedSite is a node whose kernel serves a Service with three backends, which hold connections, and
// counts these.
type loadedSite struct {
	relaySite
	t      *testing.T
	family lb.Family
	loads  *loads.Actor
	open   [3][]net.Conn
}

var loadedWeights = []uint8{4, 2, 1}

func newLoadedSite(t *testing.T, family lb.Family, scheduler string) *loadedSite {
	s := &loadedSite{relaySite: newRelaySite(t), t: t, family: family}
	for i, ns := range s.backends {
		ns.Serve(t, ":8081", func(conn net.Conn) { hold(conn, byte('0'+i)) })
	}
	svc, all := s.objects()
	svc.Relay, svc.Scheduler = "", scheduler
	for i := range all {
		all[i].Ports[0].Port = 8081
		for j, e := range all[i].Endpoints {
			svc.Weights = append(svc.Weights, lb.Weight{Network: netip.PrefixFrom(e.Addr, e.Addr.BitLen()),
				Share: loadedWeights[j]})
		}
	}
	other := svc
	other.Key.Name, other.Scheduler = "other", "random"
	other.ClusterIPs = []netip.Addr{netip.MustParseAddr("10.96.0.2"), netip.MustParseAddr("fd00:96::2")}
	other.Ingress, other.Ports = nil, []lb.ServicePort{{Protocol: lb.TCP, Port: 80}}
	var way *nftables.Netlink
	s.node.Do(t, func() (err error) {
		way, err = nftables.Dial()
		return err
	})
	rules := dialect.New(dialect.Deps{Log: slog.New(slog.DiscardHandler), Rules: nftables.Rules(way, nil),
		Changed: func() {}})
	rules.Configure(plan.Config{MasqueradeBit: 14})
	services := map[lb.Key]plan.Service{svc.Key: plan.New(svc, all, plan.Node{}), other.Key: plan.New(other, all, plan.Node{})}
	rules.Begin(services)
	s.loads = loads.New(loads.Deps{Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: time.Now, Tell: rules.Weigh,
		Open: func() (w loads.Source, err error) {
			s.node.Do(t, func() error {
				w, err = conntrack.OpenWatch()
				return nil
			})
			return w, err
		}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- rules.Run(ctx) }()
	go func() { done <- s.loads.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		way.Close()
	})
	s.until("the rules are written", func() bool { _, all := rules.Outcomes(); return all })
	s.loads.Begin(services)
	s.until("connections are listed", func() bool { return s.loads.Counts().Listings > 0 })
	return s
}

// hold greets with a name and holds a connection until the client ends it.
func hold(conn net.Conn, name byte) {
	if _, err := conn.Write([]byte{name}); err == nil {
		_, _ = io.Copy(io.Discard, conn)
	}
}

func (s *loadedSite) until(what string, is func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("it never came that %s: %+v", what, s.loads.Counts())
		}
	}
}

// backendsInKernel returns which backends new connections may get.
func (s *loadedSite) backendsInKernel() (places string) {
	family := map[lb.Family]string{lb.IPv4: "ip", lb.IPv6: "ip6"}[s.family]
	listing := s.node.Run(s.t, "nft", "list", "map", family, nftables.TableName, "backends")
	for i := range s.backends {
		// The places of random draws, of the other Service, are below 1,000,000,000.
		for line := range strings.SplitSeq(strings.ReplaceAll(listing, ",", "\n"), "\n") {
			if s.isSlot(line) && strings.HasSuffix(strings.TrimRight(line, " }\t"), ": "+s.address(i)) {
				places += fmt.Sprint(i)
				break
			}
		}
	}
	return places
}

// isSlot reports whether a line of a listing is of a table's slot, and not of the other Service.
func (s *loadedSite) isSlot(line string) bool {
	_, number, ok := strings.Cut(line, " . ")
	number, _, _ = strings.Cut(number, " ")
	return ok && len(number) >= len("1000000000")
}

func (s *loadedSite) address(i int) string {
	return fmt.Sprintf(map[lb.Family]string{lb.IPv4: "10.0.%d.2", lb.IPv6: "fd00:%d::2"}[s.family], i+1)
}

// connect connects to a Service and returns the place of the backend.
func (s *loadedSite) connect(to netip.Addr) (conn net.Conn, backend int) {
	s.t.Helper()
	var name [1]byte
	s.client.Do(s.t, func() (err error) {
		if conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(to, 80).String(), 30*time.Second); err != nil {
			return err
		}
		_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
		_, err = io.ReadFull(conn, name[:])
		return err
	})
	s.t.Cleanup(func() { conn.Close() })
	return conn, int(name[0] - '0')
}

func (s *loadedSite) burdens(scheduler plan.Scheduler) []plan.Burden {
	all := make([]plan.Burden, len(s.open))
	for i, conns := range s.open {
		all[i].Open = uint32(len(conns))
		if scheduler.Weighted() {
			all[i].Weight = loadedWeights[i]
		}
	}
	return all
}

// next waits until new connections go only to the backends that the scheduler chooses for the next
// three, and connects.
func (s *loadedSite) next(scheduler plan.Scheduler) {
	s.t.Helper()
	want := ""
	for i, n := range scheduler.Next(s.burdens(scheduler), len(s.open)) {
		if n > 0 {
			want += fmt.Sprint(i)
		}
	}
	s.until(fmt.Sprintf("with %v open the next go to %s", s.burdens(scheduler), want),
		func() bool { return s.backendsInKernel() == want })
	conn, i := s.connect(s.vips[s.family])
	if !strings.Contains(want, fmt.Sprint(i)) {
		s.t.Errorf("with %v open, a connection went to %d, want one of %s", s.burdens(scheduler), i, want)
	}
	s.open[i] = append(s.open[i], conn)
}

// With real connections that stay open, the kernel sends each new one where the scheduler's definition
// allows it; once those on one backend end, the next go there.
func TestCountingSchedulersInTheKernel(t *testing.T) {
	for _, tt := range []struct {
		scheduler string
		family    lb.Family
		want      [3]int // of 14 connections, as with IPVS
	}{
		{"lc", lb.IPv4, [3]int{5, 5, 4}}, {"lc", lb.IPv6, [3]int{5, 5, 4}}, {"wlc", lb.IPv4, [3]int{8, 4, 2}},
		{"wlc", lb.IPv6, [3]int{8, 4, 2}}, {"sed", lb.IPv4, [3]int{9, 4, 1}}, {"nq", lb.IPv4, [3]int{8, 4, 2}},
	} {
		t.Run(fmt.Sprint(tt.scheduler, " ", tt.family), func(t *testing.T) {
			s := newLoadedSite(t, tt.family, tt.scheduler)
			scheduler, _ := plan.ParseScheduler(tt.scheduler)
			for range 14 {
				s.next(scheduler)
			}
			for i, conns := range s.open {
				if off := len(conns) - tt.want[i]; off < -2 || off > 2 {
					t.Errorf("%v open, with IPVS %v", s.burdens(scheduler), tt.want)
				}
			}
			for i := range s.open {
				for _, conn := range s.open[i] {
					conn.Close()
				}
				s.open[i] = nil
				for range 2 {
					s.next(scheduler)
				}
			}
		})
	}
}

// One Service harms nobody: what is no connection of both ends changes nothing, nor do connections to
// other Services, and the kernel does not even speak of them.
func TestContract11FloodsAreNotCounted(t *testing.T) {
	s := newLoadedSite(t, lb.IPv4, "lc")
	before := s.loads.Counts()
	s.client.Run(t, "nft", "add table ip flood; add chain ip flood in { type filter hook input priority 0; }; "+
		"add rule ip flood in tcp flags & (syn|ack) == syn|ack drop")
	const openings = 200
	var conns []net.Conn
	s.client.Do(t, func() error {
		for range openings {
			// The kernel sends the opening before the time is over, and gives up.
			conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(s.vips[lb.IPv4], 80).String(), 5*time.Millisecond)
			if err == nil {
				conns = append(conns, conn)
			}
		}
		return nil
	})
	if len(conns) > 0 {
		t.Fatalf("%d of the openings were answered", len(conns))
	}
	half := strings.Count(s.node.Run(t, "conntrack", "-L", "-p", "tcp", "--orig-dst", s.vips[lb.IPv4].String()), "SYN_")
	if half < openings/2 {
		t.Fatalf("the node has seen %d openings of %d", half, openings)
	}
	s.client.Run(t, "nft", "delete table ip flood")
	for range 20 {
		conn, _ := s.connect(netip.MustParseAddr("10.96.0.2"))
		conn.Close()
	}
	// What comes after all that is told after it.
	conn, i := s.connect(s.vips[lb.IPv4])
	s.open[i] = append(s.open[i], conn)
	s.until("one connection is counted", func() bool { return s.loads.Counts().Open == 1 })
	if got := s.loads.Counts(); got.Events-before.Events > 3 || got.Loads-before.Loads > 2 || got.Lost != 0 {
		t.Errorf("%+v, before a flood and one connection %+v", got, before)
	}
}
