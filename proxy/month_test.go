package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/leaktest"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// monthRules is a kernel that takes a moment for what it is told, and refuses now and then.
type monthRules struct {
	fakeRules
	changed func()
	mu      sync.Mutex
	refused int // how many of the next Services
}

func (m *monthRules) Begin(s map[lb.Key]plan.Service) { m.Update(s) }

// Update takes what is wanted. The kernel gets the newest that is, as the dialects' actor does.
func (m *monthRules) Update(s map[lb.Key]plan.Service) {
	m.mu.Lock()
	defer m.mu.Unlock()
	maps.Copy(m.wanted, s)
	for key := range s {
		time.AfterFunc(20*time.Millisecond, func() { m.write(key) })
	}
}

func (m *monthRules) write(key lb.Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := plan.Outcome{Applied: m.wanted[key]}
	if m.refused > 0 {
		m.refused--
		o = plan.Outcome{Err: errors.New("no memory"), Alone: []lb.Family{lb.IPv4}}
		time.AfterFunc(time.Minute, func() { m.write(key) })
	}
	m.outcomes[key], m.tried = o, true
	m.changed()
}

func (m *monthRules) Outcomes() (map[lb.Key]plan.Outcome, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.fakeRules.Outcomes()
}

// monthProber leaves nothing out of Services that ask for no probe any more.
type monthProber struct {
	fakeProber
	changed func()
}

func (m *monthProber) Begin(all map[lb.Key]plan.Probing) {
	m.asks = map[lb.Key]plan.Probing{}
	m.Update(all)
}

func (m *monthProber) Update(changes map[lb.Key]plan.Probing) {
	m.fakeProber.Update(changes)
	for key, p := range changes {
		if m.news == nil {
			m.news = map[lb.Key]plan.LeftOut{}
		}
		if len(p.Targets) == 0 {
			m.news[key] = nil
			m.changed()
		}
	}
}

// TestMonth has a proxy's loop run for a simulated month in which, each hour, Services of all kinds come and go, and
// with them endpoints, probes, gates, lingering frontends, dead nodes and what speakers say. All that it remembers is
// as much at the end as it was after the first day, when the cluster is the same.
func TestMonth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGateBench(t)
		b, steps := g.bench, 0
		b.clock, b.proxy.now = time.Now(), time.Now
		b.settings.direct, b.settings.relay = map[lb.Family]bool{lb.IPv4: true}, true
		b.settings.pods = plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.200.0.0/16")}}
		rules := &monthRules{fakeRules: *b.rules}
		prober := &monthProber{}
		b.to.rules, b.to.relay, b.to.probes = rules, &fakeRelay{all: map[lb.Key]*plan.Relayed{}}, prober
		b.from.probes = prober.take
		b.to.probed = func(lb.Service, lb.Reason, string) {}
		b.to.warn = func(lb.Service, lb.Reason, string) {}
		b.spans.add = func(lb.Span) {}
		b.runner = loop.New(func(ctx context.Context) (time.Duration, error) {
			steps++
			return b.step(ctx)
		}, loop.Options{Gap: gap, Every: interval, Burst: burst})
		rules.changed, prober.changed = b.runner.PokeNow, b.runner.PokeNow
		b.nodes.OnChange(b.markNode)
		m := &month{gateBench: g, rules: rules, prober: prober}
		b.from.update = m.news
		for n := range 3 {
			b.put(fmt.Sprint("always-", n), fmt.Sprint("198.51.100.", n+1), "10.200.1.2")
		}
		b.synced()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.runner.Run(ctx) }()
		b.markFacts()

		rest := func() (map[string]int, int) {
			m.calm()
			time.Sleep(3 * lb.FlowMemory)
			synctest.Wait()
			return m.entries(), leaktest.Goroutines()
		}
		for hour := range 24 {
			m.hour(hour)
		}
		before, goroutines := rest()
		for hour := 24; hour < seeds.Of(30, 365)*24; hour++ {
			m.hour(hour)
		}
		busy := m.entries()
		after, still := rest()
		leaktest.Compare(t, before, after)
		if still != goroutines {
			t.Errorf("%d goroutines, before %d", still, goroutines)
		}
		for _, path := range []string{".records", ".origins", ".lingers.services", ".direct.holders", ".direct.due",
			".probed", ".leftOut", ".gates.pods", ".gates.naming", ".dead", ".claims.waiting", ".spans.since"} {
			if _, there := before[path]; !there {
				t.Errorf("%s is not looked at", path)
			}
			if m.most[path] <= after[path] {
				t.Errorf("%s never held more than the %d entries of a calm cluster", path, after[path])
			}
		}
		t.Logf("%d steps; %d Services and %d addresses of rings amid churn, %d and %d at the end", steps, busy[".records"],
			busy[".origins"], after[".records"], after[".origins"])

		done := steps
		time.Sleep(30 * 24 * time.Hour) // in which nothing changes
		synctest.Wait()
		if steps > done {
			t.Errorf("%d steps in a month without any change", steps-done)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// month is what happens in it.
type month struct {
	*gateBench
	rules  *monthRules
	prober *monthProber
	hours  []int // whose Services are there
	most   map[string]int
	number uint64

	mu          sync.Mutex // the loop hears in a goroutine of its own
	said, heard lb.FeedUpdate
}

// say has the speaker say something else.
func (m *month) say(change func(*lb.FeedUpdate)) {
	m.mu.Lock()
	change(&m.said)
	m.mu.Unlock()
	m.markFacts()
}

// news is what the feed's actor offers.
func (m *month) news() (news lb.FeedUpdate, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	news = m.said.Since(m.heard)
	news.Number, m.heard = m.said.Number, m.said
	return news, true
}

const lives = 5 // hours of a Service

// address returns one that differs in each hour.
func address(a, b byte, hour int) netip.Addr {
	return netip.AddrFrom4([4]byte{a, b, byte(hour >> 8), byte(hour)})
}

// hour has Services come and go, and things happen to them.
func (m *month) hour(hour int) {
	if len(m.hours) == lives {
		m.gone(m.hours[0])
	}
	m.hours = append(m.hours, hour)
	node, pod := fmt.Sprint("node-", hour), fmt.Sprint("pod-", hour)
	vip, backend := address(192, 0, hour), address(10, 201, hour)
	m.nodes.Set(node, lb.Node{Name: node, Addresses: []netip.Addr{address(172, 16, hour)}})
	m.service(hour, "plain", vip, func(s *lb.Service) {
		s.SourceRanges = []netip.Prefix{netip.PrefixFrom(backend, 32)}
	})
	m.service(hour, "direct", vip, func(s *lb.Service) {
		s.Forwarding, s.ExternalPolicy = lb.ForwardingDirect, lb.Cluster
		s.Ports[0].Port = 81
	})
	m.service(hour, "probed", vip.Next(), func(s *lb.Service) {
		s.Probe, s.Ports[0].Port, s.ExternalPolicy = lb.Probe{Kind: lb.ProbeTCP}, 82, lb.Cluster
	})
	m.service(hour, "relayed", vip, func(s *lb.Service) { s.Relay, s.Ports[0].Port = "true", 83 })
	m.service(hour, "rival", vip, func(s *lb.Service) { // of what the first one has
		s.ExternalIPs, s.Ingress = []netip.Addr{vip}, nil
	})
	m.slices.Set(key(fmt.Sprint("orphan-", hour)), nil) // endpoints without a Service
	m.mark(key(fmt.Sprint("orphan-", hour)))
	m.number++
	m.hear(vip, hour)
	m.pods.Set(key(pod), lb.GatedPod{UID: pod, Addrs: []netip.Addr{netip.MustParseAddr("10.200.1.9")}, Ready: true})
	m.wait(time.Second)
	m.prober.fails(fmt.Sprint("probed-", hour), backend.String())
	m.say(func(u *lb.FeedUpdate) { u.Dead, u.Gone = []string{node}, []netip.Addr{address(172, 16, hour)} })
	m.wait(10 * time.Minute)
	m.say(func(u *lb.FeedUpdate) { u.Dead, u.Gone = nil, nil })
	m.rules.mu.Lock()
	m.rules.refused = hour % 3
	m.rules.mu.Unlock()
	for _, policy := range []lb.TrafficPolicy{lb.Cluster, lb.Local} {
		s, _ := m.services.Get(key(fmt.Sprint("plain-", hour)))
		s.ExternalPolicy = policy
		m.services.Set(s.Key, s)
		m.mark(s.Key)
		m.wait(time.Second)
	}
	m.pods.Set(key(pod), lb.GatedPod{UID: pod, Addrs: []netip.Addr{netip.MustParseAddr("10.200.1.9")}, Ready: true,
		Opened: true})
	m.nodes.Delete(node)
	m.wait(40 * time.Minute)
	m.pods.Delete(key(pod))
	m.wait(9 * time.Minute)
}

// entries returns how much is remembered. What steps change has the proxy's locks.
func (m *month) entries() map[string]int {
	m.proxy.mu.Lock()
	defer m.proxy.mu.Unlock()
	m.dirtyMu.Lock()
	defer m.dirtyMu.Unlock()
	return leaktest.Entries(m.proxy, "runner")
}

// wait lets time pass, and notes how much is remembered.
func (m *month) wait(d time.Duration) {
	if m.most == nil {
		m.most = map[string]int{}
	}
	note := func() {
		synctest.Wait()
		if len(m.hours) > 0 && m.hours[len(m.hours)-1] < 24 { // a day of it is enough
			for path, n := range m.entries() {
				m.most[path] = max(m.most[path], n)
			}
		}
	}
	time.Sleep(10 * time.Millisecond)
	note()
	time.Sleep(d)
	note()
}

// service has one of an hour come, with an endpoint on the node of that hour and one here.
func (m *month) service(hour int, kind string, vip netip.Addr, change func(*lb.Service)) {
	name := fmt.Sprint(kind, "-", hour)
	s := lb.Service{Key: key(name), UID: name, Type: lb.LoadBalancer, ExternalPolicy: lb.Local, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{clusterIP(name)}, Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
		Ingress: []lb.Ingress{{Addr: vip}}}
	change(&s)
	m.services.Set(s.Key, s)
	m.slices.Set(s.Key, []lb.Slice{{Service: s.Key, Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}},
		Endpoints: []lb.Endpoint{
			{Addr: address(10, 201, hour), Node: fmt.Sprint("node-", hour), Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.200.1.8"), Node: "here", Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.200.1.9"), Node: "here", Pod: fmt.Sprint("pod-", hour)}}}})
	m.mark(s.Key)
}

// hear has the speaker name who may know connections to a VIP.
func (m *month) hear(vip netip.Addr, hour int) {
	m.say(func(u *lb.FeedUpdate) {
		if u.Previous = maps.Clone(u.Previous); u.Previous == nil {
			u.Previous = map[netip.Addr][]netip.Addr{}
		}
		u.Previous[vip], u.Number = []netip.Addr{address(172, 16, hour)}, m.number
	})
}

// gone has the Services of an hour go.
func (m *month) gone(hour int) {
	m.hours = m.hours[1:]
	for _, kind := range []string{"plain", "direct", "probed", "relayed", "rival", "orphan"} {
		m.delete(fmt.Sprint(kind, "-", hour))
	}
	m.say(func(u *lb.FeedUpdate) {
		u.Previous = maps.Clone(u.Previous)
		delete(u.Previous, address(192, 0, hour))
	})
	m.wait(time.Millisecond)
}

// calm has all Services go that are not always there.
func (m *month) calm() {
	for len(m.hours) > 0 {
		m.gone(m.hours[0])
	}
}
