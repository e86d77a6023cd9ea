package conntrack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// fake is a table of flows, written "client's destination answered by", with "sctp", "icmp" or
// "tcp" before those of other protocols than UDP.
type fake struct {
	mu    sync.Mutex // where an actor runs beside the test
	flows []string
	err   error
	asked []string
	wrong []string // flows that were in question although they may stay
	takes time.Duration
}

func flowOf(s string) Flow {
	words := strings.Fields(s)
	f := Flow{Protocol: unix.IPPROTO_UDP}
	if len(words) == 3 {
		f.Protocol = map[string]uint8{"sctp": unix.IPPROTO_SCTP, "icmp": unix.IPPROTO_ICMP, "tcp": unix.IPPROTO_TCP}[words[0]]
		words = words[1:]
	}
	f.To, f.From = netip.MustParseAddrPort(words[0]), netip.MustParseAddrPort(words[1])
	return f
}

func (f *fake) Delete(about About, gone func(Flow) bool) (int, error) {
	f.mu.Lock()
	takes := f.takes
	f.mu.Unlock()
	time.Sleep(takes)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, fmt.Sprint(about.Protocol, " ", about.To, " ", about.From))
	if f.err != nil {
		err := f.err
		f.err = nil
		return 0, err
	}
	before := len(f.flows)
	f.flows = slices.DeleteFunc(f.flows, func(s string) bool {
		flow := flowOf(s)
		if about.covers(flow) && !gone(flow) && about != (About{}) {
			f.wrong = append(f.wrong, s)
		}
		return about.covers(flow) && gone(flow)
	})
	return before - len(f.flows), nil
}

func newActor(table Table) *Actor {
	return New(Deps{
		Log: slog.New(slog.DiscardHandler), Table: table,
		Local: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("172.31.0.1")}, nil },
	})
}

// dns returns a UDP Service as the kernel holds it; each backend is address:port, or the same with
// an ! for one that terminates and gets no new connections, but still serves.
func dns(name string, vip string, backends ...string) plan.Service {
	key := lb.Key{Namespace: "default", Name: name}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports: []lb.ServicePort{
			{Name: "dns", Protocol: lb.UDP, Port: 53, NodePort: 30053}, {Name: "tcp", Protocol: lb.TCP, Port: 53},
			{Name: "sctp", Protocol: lb.SCTP, Port: 53},
		},
		Ingress: []lb.Ingress{{Addr: netip.MustParseAddr(vip)}},
	}
	var all []lb.Slice
	for _, b := range backends {
		at, terminating := strings.CutSuffix(b, "!")
		to := netip.MustParseAddrPort(at)
		all = append(all, lb.Slice{
			Service: key, Family: lb.IPv4,
			Ports: []lb.SlicePort{{Name: "dns", Protocol: lb.UDP, Port: to.Port()},
				{Name: "sctp", Protocol: lb.SCTP, Port: to.Port()}},
			Endpoints: []lb.Endpoint{{Addr: to.Addr(), Ready: !terminating, Serving: true, Terminating: terminating}},
		})
	}
	return plan.New(svc, all, plan.Node{})
}

func set(a *Actor, services ...plan.Service) {
	all := map[lb.Key]plan.Service{}
	for _, s := range services {
		all[s.Key] = s
	}
	a.Update(all)
}

var before = []string{
	"10.96.0.10:53 192.168.1.2:5353",    // at the cluster IP
	"10.96.0.10:53 192.168.1.3:5353",    // the other backend
	"192.0.2.1:53 192.168.1.3:5353",     // at the VIP
	"172.31.0.1:30053 192.168.1.3:5353", // at the node port
	"172.31.9.9:30053 192.168.1.3:5353", // the same port of another machine
	"10.96.0.99:53 10.96.0.99:53",       // nobody of ours
	"10.96.0.10:54 192.168.1.3:5353",    // another port
	"192.168.1.3:5353 192.168.1.3:5353", // straight to the pod
	"[fd00::10]:53 [fd00::99]:53",       // another family
	"sctp 10.96.0.10:53 192.168.1.3:5353",
	"tcp 10.96.0.10:53 192.168.1.3:5353", // TCP ends by itself
	"icmp 192.0.2.1:0 172.31.0.1:0",      // a ping that is answered
	"icmp 10.96.0.10:0 10.96.0.10:0",     // and one that never is
}

func TestContract9FlowsToGoneBackendsAreCut(t *testing.T) {
	for _, tt := range []struct {
		name string
		now  plan.Service
		cut  []int // of before
	}{
		{"nothing changed", dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353"), nil},
		{"a backend has come", dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353", "192.168.1.4:5353"), nil},
		{"a backend is gone", dns("dns", "192.0.2.1", "192.168.1.2:5353"), []int{1, 2, 3, 9}},
		{"a backend terminates and still serves", dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353!"), nil},
		{"all backends are gone", dns("dns", "192.0.2.1"), []int{0, 1, 2, 3, 9, 11}},
		{"the target port changed", dns("dns", "192.0.2.1", "192.168.1.2:5354", "192.168.1.3:5354"), []int{0, 1, 2, 3, 9}},
		{"the VIP changed", dns("dns", "192.0.2.2", "192.168.1.2:5353", "192.168.1.3:5353"), []int{2, 11}},
		{"the Service is gone", plan.Service{Key: lb.Key{Namespace: "default", Name: "dns"}}, []int{0, 1, 2, 3, 9, 11}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table := &fake{flows: []string{}}
			a := newActor(table)
			set(a, dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353"))
			if err := a.apply(); err != nil {
				t.Fatal(err)
			}
			a.Begin(nil)
			table.flows = slices.Clone(before)
			table.err = errors.New("interrupted")
			set(a, tt.now)
			if err := a.apply(); (err == nil) != (tt.cut == nil) {
				t.Fatalf("error %v: without one nothing is tried again, and nothing has to be where nothing can have to go", err)
			}
			if err := a.apply(); err != nil {
				t.Fatal(err)
			}
			var want []string
			for i, f := range before {
				if !slices.Contains(tt.cut, i) {
					want = append(want, f)
				}
			}
			if d := cmp.Diff(want, table.flows); d != "" {
				t.Errorf("flows left (-want +got):\n%s", d)
			}
			if len(table.wrong) > 0 {
				t.Errorf("in question were %q, which a large table would have lost", table.wrong)
			}
		})
	}
}

// A VIP that moves to another Service has that Service's backends, in whatever order the two are
// confirmed.
func TestFrontendMovesBetweenServices(t *testing.T) {
	one := dns("one", "192.0.2.1", "192.168.1.2:5353")
	two := dns("two", "192.0.2.1", "192.168.1.9:5353")
	for _, order := range [][]plan.Service{{{Key: one.Key}, two}, {two, {Key: one.Key}}} {
		table := &fake{}
		a := newActor(table)
		set(a, one)
		for _, s := range order {
			set(a, s)
		}
		table.flows = []string{"192.0.2.1:53 192.168.1.2:5353", "192.0.2.1:53 192.168.1.9:5353"}
		if err := a.apply(); err != nil {
			t.Fatal(err)
		}
		if want := []string{"192.0.2.1:53 192.168.1.9:5353"}; !slices.Equal(table.flows, want) {
			t.Errorf("left %q, want %q", table.flows, want)
		}
	}
}

// What came in while nobody answered went out as it was, and goes on doing so until it is cut.
func TestFlowsFromBeforeThereWasABackend(t *testing.T) {
	table := &fake{}
	a := newActor(table)
	for i, s := range []plan.Service{dns("dns", "192.0.2.1"), dns("dns", "192.0.2.1", "192.168.1.2:5353")} {
		table.flows = []string{"icmp 192.0.2.1:0 192.0.2.1:0", "10.96.0.10:53 10.96.0.10:53", "192.0.2.1:53 192.0.2.1:53",
			"192.0.2.2:53 192.0.2.2:53"}
		set(a, s)
		if err := a.apply(); err != nil {
			t.Fatal(err)
		}
		want := []string{"icmp 192.0.2.1:0 192.0.2.1:0", "192.0.2.2:53 192.0.2.2:53"}
		if i > 0 {
			want = want[1:] // pings are answered now
		}
		if !slices.Equal(table.flows, want) {
			t.Errorf("left %q, want %q", table.flows, want)
		}
	}
}

// What is asked about names the flows as long as they are few.
func TestQuestions(t *testing.T) {
	table := &fake{}
	a := newActor(table)
	pass := func(what string, want ...string) {
		t.Helper()
		table.asked = nil
		if err := a.apply(); err != nil {
			t.Fatal(err)
		}
		slices.Sort(table.asked)
		if d := cmp.Diff(want, table.asked); d != "" {
			t.Errorf("%s: asked (-want +got):\n%s", what, d)
		}
	}
	const all = "0 invalid AddrPort invalid AddrPort"
	set(a, dns("one", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353"))
	pass("at the start", all)
	a.Begin(nil)
	set(a, dns("one", "192.0.2.1", "192.168.1.2:5353"))
	pass("a backend is gone",
		"132 10.96.0.10:53 192.168.1.3:5353", "132 192.0.2.1:53 192.168.1.3:5353",
		"17 10.96.0.10:53 192.168.1.3:5353", "17 172.31.0.1:30053 192.168.1.3:5353", "17 192.0.2.1:53 192.168.1.3:5353")
	set(a, dns("one", "192.0.2.1", "192.168.1.2:5353"))
	pass("nothing changed")
	set(a, dns("one", "192.0.2.1"))
	pass("no backend is left",
		"1 192.0.2.1:0 invalid AddrPort", "132 10.96.0.10:53 192.168.1.2:5353", "132 192.0.2.1:53 192.168.1.2:5353",
		"17 10.96.0.10:53 192.168.1.2:5353", "17 172.31.0.1:30053 192.168.1.2:5353", "17 192.0.2.1:53 192.168.1.2:5353")
	set(a, dns("one", "192.0.2.1", "192.168.1.2:5353"))
	pass("the first backend",
		"1 192.0.2.1:0 invalid AddrPort", "132 10.96.0.10:53 10.96.0.10:53", "132 192.0.2.1:53 192.0.2.1:53",
		"17 10.96.0.10:53 10.96.0.10:53", "17 172.31.0.1:30053 172.31.0.1:30053", "17 192.0.2.1:53 192.0.2.1:53")
	for i := range 50 {
		set(a, dns(fmt.Sprint("many-", i), fmt.Sprint("192.0.2.", 10+i), "192.168.1.2:5353"))
	}
	pass("many at once", all)
}

// running returns an actor that runs over an empty table, and what ends it.
func running(t *testing.T) (table *fake, a *Actor, end func()) {
	table = &fake{}
	a = newActor(table)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	return table, a, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// While many Services are created, the passes that they need take a small part of a processor.
// Flows to a backend that has gone are cut soon in the meantime, and those to the new Services in
// the end.
func TestContract11NewServicesCostFewPasses(t *testing.T) {
	const passTakes, services = 50 * time.Millisecond, 1000
	synctest.Test(t, func(t *testing.T) {
		table, a, end := running(t)
		old := dns("old", "192.0.2.200", "192.168.1.2:5353", "192.168.1.3:5353")
		a.Begin(map[lb.Key]plan.Service{old.Key: old})
		time.Sleep(10 * time.Second)
		change := func(f func()) {
			table.mu.Lock()
			defer table.mu.Unlock()
			f()
		}
		change(func() { table.takes = passTakes })
		last := netip.MustParseAddr("192.0.3.0")
		for i := range services {
			last = last.Next()
			set(a, dns(fmt.Sprint("many-", i), last.String(), "192.168.1.9:5353"))
			time.Sleep(20 * time.Millisecond)
		}
		synctest.Wait()
		passes := 0
		change(func() {
			for _, asked := range table.asked {
				if strings.HasPrefix(asked, "0 invalid") {
					passes++
				}
			}
		})
		if passes > 6 { // 20 s, 5 s apart, one at the start
			t.Errorf("%d Services in 20 s: %d passes over the whole table, want 6 at most", services, passes)
		}
		change(func() {
			table.flows = []string{"192.0.2.200:53 192.168.1.3:5353", last.String() + ":53 " + last.String() + ":53"}
		})
		set(a, dns("old", "192.0.2.200", "192.168.1.2:5353"))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		change(func() {
			if slices.Contains(table.flows, "192.0.2.200:53 192.168.1.3:5353") {
				t.Error("a flow to a backend that has gone was not cut within 2 s")
			}
		})
		time.Sleep(8 * time.Second)
		synctest.Wait()
		change(func() {
			if len(table.flows) > 0 {
				t.Errorf("left %q, want nothing", table.flows)
			}
		})
		end()
	})
}

// A Service whose endpoints change all the time does not put off that flows to another one's new
// frontend are cut.
func TestContract11ChangesOfOneServiceDoNotPutOffOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table, a, end := running(t)
		flaps := func(i int) plan.Service {
			return dns("flaps", "192.0.2.200", fmt.Sprintf("192.168.1.%d:5353", 2+i%2))
		}
		start := flaps(1)
		a.Begin(map[lb.Key]plan.Service{start.Key: start})
		time.Sleep(10 * time.Second)
		table.mu.Lock()
		table.takes = 50 * time.Millisecond
		table.mu.Unlock()
		for round := range 5 {
			vip := fmt.Sprintf("192.0.3.%d", 1+round)
			table.mu.Lock()
			table.flows = []string{vip + ":53 " + vip + ":53"}
			table.mu.Unlock()
			set(a, dns(fmt.Sprint("new-", round), vip, "192.168.1.9:5353"))
			for i := range 8 { // 5 s and what passes take; the changes go on behind that
				time.Sleep(time.Second)
				set(a, flaps(i))
			}
			table.mu.Lock()
			if len(table.flows) > 0 {
				t.Errorf("round %d: left %q", round, table.flows)
			}
			table.mu.Unlock()
		}
		end()
	})
}

// A Service of UDP with many external IPs changes its selector: of each of its frontends all endpoints are others. What
// is noted does not grow with frontends times endpoints.
func TestContract11WhatIsInDoubtIsBounded(t *testing.T) {
	const frontends, endpoints = 300, 300
	version := func(n byte) map[lb.Key]plan.Service {
		key := lb.Key{Namespace: "default", Name: "dns"}
		p := plan.Port{Family: lb.IPv4, Protocol: lb.UDP}
		for i := range endpoints {
			p.Serving = append(p.Serving, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, n, byte(i >> 8), byte(i)}), 53))
		}
		for i := range frontends {
			p.Frontends = append(p.Frontends, plan.Frontend{Kind: plan.ExternalIP, Port: 53, Action: plan.Reject,
				Addr: netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)})})
		}
		return map[lb.Key]plan.Service{key: {Key: key, Ports: []plan.Port{p}}}
	}
	table := &fake{}
	a := newActor(table)
	a.Begin(version(1))
	if err := a.apply(); err != nil {
		t.Fatal(err)
	}
	table.flows = []string{"11.0.0.1:53 10.1.0.1:53", "11.0.0.1:53 10.3.0.1:53", "11.0.1.9:53 10.2.0.9:53"}
	for n := range byte(3) {
		a.Update(version(1 + n))
		noted := 0
		for _, by := range a.suspect {
			noted += len(by)
		}
		if noted > frontends*maxQuestions {
			t.Fatalf("%d answerers are noted of %d frontends", noted, len(a.suspect))
		}
	}
	if err := a.apply(); err != nil || !slices.Equal(table.flows, []string{"11.0.0.1:53 10.3.0.1:53"}) {
		t.Errorf("%v, left are %v", err, table.flows)
	}
}

// What is gone of a sorted list is found as if each endpoint were looked for.
func TestMissing(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	list := func() (addrs []netip.AddrPort) {
		for i := range 10 {
			if r.IntN(2) == 0 {
				addrs = append(addrs, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i / 2)}), uint16(i%2)))
			}
		}
		return addrs
	}
	for range 1000 {
		before, after := list(), list()
		lists := pairs{}
		var want []netip.AddrPort
		for _, by := range before {
			if !slices.Contains(after, by) {
				want = append(want, by)
			}
			if !contains(before, by) {
				t.Fatalf("%v is not in %v", by, before)
			}
		}
		for range 2 {
			if got := lists.missing(before, after); !slices.Equal(got, want) {
				t.Fatalf("%v and then %v: missing %v, want %v", before, after, got, want)
			}
		}
	}
}

// A frontend that two Services have has the endpoints of both, in whatever order they are.
func TestFrontendOfTwoServices(t *testing.T) {
	table := &fake{}
	a := newActor(table)
	set(a, dns("one", "192.0.2.1", "192.168.1.3:5353", "192.168.1.7:5353"),
		dns("two", "192.0.2.1", "192.168.1.2:5353", "192.168.1.5:5353"))
	table.flows = []string{"192.0.2.1:53 192.168.1.2:5353", "192.0.2.1:53 192.168.1.3:5353",
		"192.0.2.1:53 192.168.1.4:5353", "192.0.2.1:53 192.168.1.5:5353", "192.0.2.1:53 192.168.1.7:5353"}
	want := slices.Delete(slices.Clone(table.flows), 2, 3)
	if err := a.apply(); err != nil || !slices.Equal(table.flows, want) {
		t.Errorf("left %q, error %v", table.flows, err)
	}
}

// Services without UDP and SCTP cost nothing.
func TestTCPNeedsNoPass(t *testing.T) {
	s := dns("web", "192.0.2.1", "192.168.1.2:5353")
	s.Ports = s.Ports[1:2]
	s.Ports[0].Frontends = s.Ports[0].Frontends[:1]
	a := newActor(&fake{err: errors.New("not to be called")})
	set(a, s)
	if err := a.apply(); err != nil {
		t.Error(err)
	}
}

// relayedDNS is a Service whose port of UDP is relayed.
func relayedDNS(backends ...string) plan.Service {
	s := dns("dns", "203.0.113.1", backends...)
	s.Relay = true
	for i := range s.Ports {
		s.Ports[i].Relay = true
		for j := range s.Ports[i].Frontends {
			s.Ports[i].Frontends[j].Action = plan.ToCluster
		}
	}
	return s
}

// Flows that the node's relay answers are left alone while the frontend is relayed and the relay is there. As long
// as that is not known, all are that the node itself answers.
func TestContract9FlowsToTheRelay(t *testing.T) {
	const at, direct = "203.0.113.1:53 192.0.2.1:7484", "203.0.113.1:53 10.0.0.1:53"
	relays := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:7484")}
	for _, step := range []struct {
		name string
		do   func(*Actor)
		left []string
	}{
		{"a relay is there", func(a *Actor) { a.SetRelays(relays); set(a, relayedDNS("10.0.0.1:53")) }, []string{at, direct}},
		{"it is not known", func(a *Actor) { set(a, relayedDNS("10.0.0.1:53")) }, []string{at, direct}},
		{"none is there", func(a *Actor) { a.SetRelays(nil); set(a, relayedDNS("10.0.0.1:53")) }, []string{direct}},
		{"it turns out later", func(a *Actor) {
			set(a, relayedDNS("10.0.0.1:53"))
			_ = a.apply()
			a.SetRelays(nil)
		}, []string{direct}},
		{"it goes", func(a *Actor) {
			a.SetRelays(relays)
			set(a, relayedDNS("10.0.0.1:53"))
			_ = a.apply()
			a.SetRelays(nil)
		}, []string{direct}},
		{"the Service is relayed no more", func(a *Actor) {
			a.SetRelays(relays)
			set(a, relayedDNS("10.0.0.1:53"))
			_ = a.apply()
			set(a, dns("dns", "203.0.113.1", "10.0.0.1:53"))
		}, []string{direct}},
		{"the next proxy has none", func(a *Actor) { set(a, dns("dns", "203.0.113.1", "10.0.0.1:53")) }, []string{direct}},
		{"an endpoint goes", func(a *Actor) {
			a.SetRelays(relays)
			set(a, relayedDNS("10.0.0.1:53", "10.0.0.2:53"))
			_ = a.apply()
			set(a, relayedDNS("10.0.0.2:53"))
		}, []string{at}},
	} {
		table := &fake{flows: []string{at, direct}}
		a := newActor(table)
		a.deps.Local = func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil }
		step.do(a)
		if a.Settled() {
			t.Errorf("%s: it is settled before", step.name)
		}
		if err := a.apply(); err != nil {
			t.Fatal(err)
		}
		if !a.Settled() {
			t.Errorf("%s: it is not settled", step.name)
		}
		if !slices.Equal(table.flows, step.left) {
			t.Errorf("%s: left are %v", step.name, table.flows)
		}
	}
}
