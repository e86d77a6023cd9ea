package nftables

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// three is a case's Service with the named endpoints ready.
func three(w cases.World, scheduler plan.Scheduler, timeout time.Duration, at ...string) (plan.Service, plan.Config) {
	c := cases.Case{Backends: []cases.Backend{}}
	for _, name := range at {
		c.Backends = append(c.Backends, cases.Backend{At: name, Ready: true, Serving: true})
	}
	p, config := c.Plan(w)
	p.Scheduler, p.AffinityTimeout = scheduler, timeout
	return p, WithAddresses(config, []netip.Addr{w.Node, w.Node2})
}

// A client keeps its endpoint, at all frontends of the Service, over restarts and changes of
// others, until the endpoint goes or the time is over.
func TestSessionAffinity(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := cases.WorldOf(family)
			s := cases.NewSite(t, w)
			a := newTestActor(t, s.Node)
			everywhere := []string{"local", "local2", "remote"}
			apply := func(a *testActor, timeout time.Duration, at ...string) {
				service, config := three(w, plan.Random, timeout, at...)
				a.Configure(config)
				a.settle(t, map[lb.Key]plan.Service{service.Key: service})
			}
			apply(a, 3*time.Hour, everywhere...)
			table := []cases.Case{
				{From: "pod", To: "cluster"}, {From: "outside", To: "vip"}, {From: "outside", To: "nodeport"},
				{From: "stranger", To: "vip"},
				{From: "node", To: "external"}, {From: "pod", To: "cluster", Protocol: lb.UDP},
				{From: "outside", To: "vip", Protocol: lb.UDP},
			}
			has := map[int]string{}
			check := func(when string, stays func(i int) bool) {
				t.Helper()
				for i, c := range table {
					for n := range 6 {
						at, _, err := s.Ask(c, cases.Long)
						if err != nil {
							t.Fatalf("%s: %+v: %v", when, c, err)
						}
						if has[i] == "" || n == 0 && !stays(i) {
							has[i] = at
						}
						if at != has[i] {
							t.Fatalf("%s: %s to %s was sent to %s, before to %s", when, c.From, c.To, at, has[i])
						}
					}
				}
			}
			always := func(int) bool { return true }
			check("at first", always)
			a = newTestActor(t, s.Node)
			apply(a, 3*time.Hour, everywhere...)
			check("after a restart", always)
			gone := func(at string) bool { return netip.MustParseAddrPort(at).Addr() == w.Local2 }
			before := maps.Clone(has)
			apply(a, 3*time.Hour, "local", "remote")
			s.Node.Run(t, "conntrack", "-F")
			check("after an endpoint went", func(i int) bool { return !gone(before[i]) })
			for i := range table {
				if gone(has[i]) {
					t.Errorf("%+v is still sent to an endpoint that is gone", table[i])
				}
			}
			apply(a, 3*time.Hour, everywhere...)
			check("after one came", always)
			for i, c := range table {
				for j, other := range table {
					if c.From == other.From && netip.MustParseAddrPort(has[i]).Addr() != netip.MustParseAddrPort(has[j]).Addr() {
						t.Errorf("%s was sent to %s at %s, to %s at %s", c.From, has[i], c.To, has[j], other.To)
					}
				}
			}
			if known := a.clients(t, family); len(known) != 4 {
				t.Errorf("remembered are %v", known)
			}
			// Without affinity the rules remember no client, and send each one to all backends. Who connects then is
			// forgotten.
			apply(a, 0, everywhere...)
			ends := map[string]bool{}
			for n := 0; n < 100 && len(ends) < len(everywhere); n++ {
				at, _, err := s.Ask(table[0], cases.Long)
				if err != nil {
					t.Fatal(err)
				}
				ends[at] = true
			}
			if known := a.clients(t, family); len(known) != 3 || len(ends) != len(everywhere) {
				t.Errorf("without affinity a client ends at %v, and remembered are %v", ends, known)
			}
		})
	}
}

// When the time is over, a client gets another choice.
func TestSessionAffinityEnds(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) { testAffinityEnds(t, family, func(*plan.Service) {}) })
		t.Run(string(family)+"/ports that differ", func(t *testing.T) { testAffinityEnds(t, family, differ) })
	}
}

func testAffinityEnds(t *testing.T, family lb.Family, edit func(*plan.Service)) {
	w := cases.WorldOf(family)
	s := cases.NewSite(t, w)
	a := newTestActor(t, s.Node)
	service, config := three(w, plan.Random, time.Second, "local", "local2", "remote")
	edit(&service)
	table := map[lb.Family]string{lb.IPv4: "ip", lb.IPv6: "ip6"}[family]
	for _, rule := range [][]string{
		{"add", "table", table, "other"},
		{"add", "chain", table, "other", "in", "{ type nat hook prerouting priority dstnat ; }"},
		{"add", "rule", table, "other", "in", "tcp", "dport", "9999", "redirect", "to",
			fmt.Sprint(":", cases.BackendPort(lb.TCP))},
	} {
		s.At["local"].Run(t, "nft", rule...)
	}
	a.Configure(config)
	a.settle(t, map[lb.Key]plan.Service{service.Key: service})
	first := ""
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		known := a.clients(t, family)
		if time.Now().After(deadline) {
			t.Fatalf("after a minute it is still sent to %s; remembered are %v", first, known)
		}
		if len(known) > 0 {
			continue
		}
		at, _, err := s.Ask(cases.Case{From: "pod", To: "cluster"}, cases.Long)
		if err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = at
		}
		if at != first {
			break
		}
	}
}

// Contract clause 2: a client that was sent to another node before the policy became Local is not
// sent there any more; a pod is.
func TestContract2AffinityEndsWhereThePolicyBecomesLocal(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := cases.NewSite(t, w)
	a := newTestActor(t, s.Node)
	remote, local := netip.AddrPortFrom(w.Remote, cases.BackendPort(lb.TCP)).String(),
		netip.AddrPortFrom(w.Local, cases.BackendPort(lb.TCP)).String()
	for _, step := range []struct {
		at           []cases.Backend
		policy       func(cases.World, *lb.Service)
		outside, pod string
	}{
		{onlyThere, nil, remote, remote},
		{twoHere[:1], etpLocal, local, local},
		{onlyThere, nil, remote, remote},
		{[]cases.Backend{twoHere[0], onlyThere[0]}, etpLocal, local, remote},
	} {
		service, config := serviceOf(w, cases.Case{Backends: step.at, Service: step.policy})
		service.AffinityTimeout = time.Hour
		a.Configure(config)
		a.settle(t, map[lb.Key]plan.Service{service.Key: service})
		for range 4 {
			for from, want := range map[string]string{"outside": step.outside, "pod": step.pod} {
				got, _, err := s.Ask(cases.Case{From: from, To: "vip"}, cases.Long)
				if err != nil || got != want {
					t.Fatalf("%s with endpoints %v is sent to %s, %v; want %s", from, step.at, got, err, want)
				}
			}
		}
	}
}

func (a *testActor) table(family lb.Family) *table {
	return a.tables[slices.IndexFunc(a.tables, func(t *table) bool { return t.family == family })]
}

// Where the source decides, the kernel decides as the walker says: so all nodes decide the same,
// and so will the next release.
func TestHashesAreTheKernels(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, scheduler := range []plan.Scheduler{plan.SourceHash, plan.DestinationHash, plan.Maglev} {
			t.Run(fmt.Sprint(family, "/", scheduler), func(t *testing.T) {
				w := cases.WorldOf(family)
				s := cases.NewSite(t, w)
				a := newTestActor(t, s.Node)
				service, config := three(w, scheduler, 0, "local", "local2", "remote")
				a.Configure(config)
				a.settle(t, map[lb.Key]plan.Service{service.Key: service})
				c := cases.Case{From: "pod", To: "cluster", Scheduler: plan.Scheduler(scheduler), Backends: []cases.Backend{
					{At: "local", Ready: true, Serving: true}, {At: "local2", Ready: true, Serving: true},
					{At: "remote", Ready: true, Serving: true},
				}}
				walk := walkOf(t, w, c)
				seen := map[string]bool{}
				for port := range uint16(40) {
					p := packetOf(w, c)
					p.src = netip.AddrPortFrom(p.src.Addr(), 41000+port)
					shares, _ := walk.fate(p)
					got := dialFrom(t, s, "pod", p.src, p.dst)
					if shares[got] != 1 {
						t.Errorf("port %d was sent to %s, by the walker to %v", port, got, shares)
					}
					seen[got] = true
				}
				if want := map[plan.Scheduler]int{plan.SourceHash: 1, plan.DestinationHash: 1, plan.Maglev: 3}[scheduler]; len(seen) != want {
					t.Errorf("40 connections of one client reached %d endpoints, want %d", len(seen), want)
				}
			})
		}
	}
}

// dialFrom connects from an address and port and returns who answers.
func dialFrom(t *testing.T, s *cases.Site, from string, src, dst netip.AddrPort) string {
	t.Helper()
	var answer [256]byte
	n := 0
	s.At[from].Do(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), cases.Long)
		defer cancel()
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(src)}
		conn, err := d.DialContext(ctx, "tcp", dst.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		n, err = conn.Read(answer[:])
		return err
	})
	backend := answer[:n]
	return string(backend[:slices.Index(backend, ' ')])
}

// Round-robin takes turns.
func TestRoundRobinTakesTurns(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := cases.NewSite(t, w)
	a := newTestActor(t, s.Node)
	service, config := three(w, plan.RoundRobin, 0, "local", "local2", "remote")
	a.Configure(config)
	a.settle(t, map[lb.Key]plan.Service{service.Key: service})
	var order []string
	for i := range 30 {
		order = append(order, dialFrom(t, s, "pod", netip.AddrPortFrom(w.Pod, 42000+uint16(i)),
			netip.AddrPortFrom(w.ClusterIP, cases.ServicePort)))
	}
	for i := 3; i < len(order); i++ {
		if order[i] != order[i-3] || order[i] == order[i-1] {
			t.Fatalf("not in turn: %v", order)
		}
	}
}

// Contract clause 6: no connection is refused while endpoints that stay are joined and left by
// others, in any way of choosing. A packet may be looked at while a transaction happens: it must
// find an endpoint all the same.
func TestContract6NoConnectionIsRefusedWhileEndpointsChange(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := cases.NewSite(t, w)
	a := newTestActor(t, s.Node)
	apply := func(scheduler plan.Scheduler, at ...string) {
		service, config := three(w, scheduler, 0, at...)
		a.Configure(config)
		a.settle(t, map[lb.Key]plan.Service{service.Key: service})
	}
	apply(plan.Random, "local")
	stop := make(chan struct{})
	var connections, changes atomic.Int64
	var group sync.WaitGroup
	var failed sync.Once
	for _, to := range []netip.AddrPort{netip.AddrPortFrom(w.ClusterIP, cases.ServicePort),
		netip.AddrPortFrom(w.VIP, cases.ServicePort)} {
		group.Go(func() {
			s.At["pod"].Do(t, func() error {
				for {
					select {
					case <-stop:
						return nil
					default:
					}
					conn, err := net.DialTimeout("tcp", to.String(), cases.Long)
					if err != nil {
						failed.Do(func() { t.Errorf("after %d connections and %d changes: %v", connections.Load(), changes.Load(), err) })
						return nil
					}
					// A reset instead of a farewell leaves no port waiting.
					_ = conn.(*net.TCPConn).SetLinger(0)
					conn.Close()
					connections.Add(1)
				}
			})
		})
	}
	sets := [][]string{{"local"}, {"local", "local2"}, {"local", "local2", "remote"}, {"local", "remote"}}
	schedulers := []plan.Scheduler{plan.Random, plan.Maglev, plan.Random, plan.RoundRobin, plan.SourceHash,
		plan.DestinationHash, plan.LeastConnections}
	for i := 0; i < seeds.Of(240, 2000) && !t.Failed(); i++ {
		apply(schedulers[i/4%len(schedulers)], sets[i%len(sets)]...)
		changes.Add(1)
	}
	close(stop)
	group.Wait()
	t.Logf("%d connections during %d changes", connections.Load(), changes.Load())
}
