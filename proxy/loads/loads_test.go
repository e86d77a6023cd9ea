package loads

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var errTest = errors.New("the kernel is gone")

// kernel is connection tracking as tests play it. It has no locks that synctest would not see.
type kernel struct {
	mu     sync.Mutex
	open   map[plan.Tracked]bool
	events chan func(each func(plan.Tracked), lost func())
	// broken has Each end, unlisted has List fail halfway.
	broken, unlisted bool
	opened, closed   int
	addresses        []netip.Addr
	ports            []uint16
	listings         int
}

func newKernel() *kernel {
	return &kernel{open: map[plan.Tracked]bool{}, events: make(chan func(func(plan.Tracked), func()), 100_000)}
}

func (k *kernel) Each(ctx context.Context, each func(plan.Tracked), lost func()) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case tell := <-k.events:
			k.mu.Lock()
			broken := k.broken
			k.broken = false
			k.mu.Unlock()
			if broken {
				return errTest
			}
			tell(each, lost)
		}
	}
}

func (k *kernel) Filter(addresses []netip.Addr, ports []uint16) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.addresses, k.ports = addresses, ports
	return nil
}

func (k *kernel) List(each func(plan.Tracked)) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.listings++
	for c := range k.open {
		each(c)
		if k.unlisted {
			return errTest
		}
	}
	return nil
}

func (k *kernel) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed++
}

// say has a connection open or end; with silent, without an event.
func (k *kernel) say(c plan.Tracked, open, silent bool) {
	c.Open = true
	k.mu.Lock()
	defer k.mu.Unlock()
	if open {
		k.open[c] = true
	} else {
		delete(k.open, c)
	}
	if c.Open = open; !silent {
		k.events <- func(each func(plan.Tracked), _ func()) { each(c) }
	}
}

// rig is a running actor.
type rig struct {
	*Actor
	kernel *kernel
	mu     sync.Mutex
	told   map[lb.Key]plan.Load
	tells  []time.Time
}

func newRig(t *testing.T) *rig {
	g := &rig{kernel: newKernel(), told: map[lb.Key]plan.Load{}}
	g.Actor = New(Deps{Log: slog.New(slog.DiscardHandler), Now: time.Now,
		Open: func() (Source, error) {
			g.kernel.mu.Lock()
			defer g.kernel.mu.Unlock()
			g.kernel.opened++
			return g.kernel, nil
		},
		Tell: func(loads map[lb.Key]plan.Load) {
			g.mu.Lock()
			defer g.mu.Unlock()
			maps.Copy(g.told, loads)
			for range loads {
				g.tells = append(g.tells, time.Now())
			}
		}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		g.kernel.mu.Lock()
		defer g.kernel.mu.Unlock()
		if g.kernel.opened != g.kernel.closed {
			t.Errorf("opened %d times, closed %d times", g.kernel.opened, g.kernel.closed)
		}
	})
	return g
}

// TestAReaderThatHangsIsSeen stops what takes in the kernel's events, and what takes in that some were lost.
func TestAReaderThatHangsIsSeen(t *testing.T) {
	a := New(Deps{Now: time.Now})
	for name, hear := range map[string]func(){"an event": func() { a.take(plan.Tracked{}) }, "a loss": a.lost} {
		a.mu.Lock()
		done := make(chan struct{})
		go func() { defer close(done); hear() }()
		for range 1000 { // until it has begun
			if a.Busy() > 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if a.Busy() == 0 {
			t.Errorf("%s: it hangs, and is at rest", name)
		}
		a.mu.Unlock()
		<-done
		if busy := a.Busy(); busy != 0 {
			t.Errorf("%s: it goes on, and is busy for %v", name, busy)
		}
	}
}

// serviceOf returns a Service by its number, with so many backends.
func serviceOf(n, backends int, scheduler plan.Scheduler) plan.Service {
	p := plan.Port{Family: lb.IPv4, Protocol: lb.TCP, Number: 8080, Frontends: []plan.Frontend{
		{Kind: plan.ClusterIP, Addr: vip(n), Port: 80}, {Kind: plan.NodePort, Port: uint16(30000 + n)}}}
	for i := range backends {
		p.Backends.Cluster = append(p.Backends.Cluster, lb.Backend{Addr: netip.AddrPortFrom(pod(i), 0)})
	}
	return plan.Service{Key: key(n), Scheduler: scheduler, Ports: []plan.Port{p}}
}

func key(n int) lb.Key { return lb.Key{Namespace: "default", Name: fmt.Sprint("web", n)} }

func vip(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}) }

func pod(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)}) }

// conn is a client's connection to a Service that a backend answers.
func conn(client, n, backend int) plan.Tracked {
	return plan.Tracked{Protocol: lb.TCP,
		Client: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(client >> 16)}), uint16(client)),
		To:     netip.AddrPortFrom(vip(n), 80), Backend: netip.AddrPortFrom(pod(backend), 8080)}
}

// check compares what was told of a Service with how many connections its backends have.
func (g *rig) check(t *testing.T, when string, n int, want ...uint32) {
	t.Helper()
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	for i, w := range want {
		if got := g.told[key(n)].Open[pod(i)]; got != w {
			t.Errorf("%s: told of %v, want %v of each", when, g.told[key(n)].Open, want)
			return
		}
	}
}

// Each count is told at once, or as soon as the Service's next one may be.
func TestCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t)
		before, nodePort := conn(1, 1, 0), conn(2, 1, 1)
		g.kernel.say(before, true, true)
		nodePort.To = netip.MustParseAddrPort("172.31.0.1:30001")
		g.Begin(map[lb.Key]plan.Service{key(1): serviceOf(1, 3, plan.LeastConnections), key(2): serviceOf(2, 3, plan.Random)})
		g.check(t, "from before", 1, 1, 0, 0)
		if !slices.Equal(g.kernel.addresses, []netip.Addr{vip(1)}) || !slices.Equal(g.kernel.ports, []uint16{30001}) {
			t.Errorf("the kernel tells of %v, %v", g.kernel.addresses, g.kernel.ports)
		}
		time.Sleep(gap)
		g.kernel.say(nodePort, true, false)
		g.check(t, "at a node port", 1, 1, 1, 0)
		g.kernel.say(conn(3, 1, 2), true, false)
		g.kernel.say(conn(3, 1, 2), true, false) // said twice
		g.kernel.say(conn(4, 1, 7), true, false) // as to the relay
		g.kernel.say(conn(5, 2, 0), true, false) // of a Service that is not counted
		g.check(t, "too soon", 1, 1, 1, 0)
		time.Sleep(gap)
		g.check(t, "a moment later", 1, 1, 1, 1)
		time.Sleep(gap)
		g.kernel.say(before, false, false)
		g.kernel.say(before, false, false)
		g.kernel.say(conn(6, 1, 0), false, false) // never heard of
		g.check(t, "after an end", 1, 0, 1, 1)
		g.Update(map[lb.Key]plan.Service{key(2): serviceOf(2, 2, plan.NeverQueue)})
		time.Sleep(time.Second + gap)
		g.check(t, "another Service", 2, 1, 0)
		if n := g.Counts().Open; n != 3 {
			t.Errorf("%d are open, want 3", n)
		}
		// One backend leaves no choice, and no Service nothing to hear of.
		g.Update(map[lb.Key]plan.Service{key(1): serviceOf(1, 1, plan.LeastConnections), key(2): {Key: key(2)}})
		synctest.Wait()
		if g.kernel.closed != 1 || g.Counts().Open != 0 {
			t.Errorf("closed %d times, %d are open", g.kernel.closed, g.Counts().Open)
		}
		g.Update(map[lb.Key]plan.Service{key(1): serviceOf(1, 2, plan.LeastConnections)})
		time.Sleep(listAtOnce)
		g.check(t, "again", 1, 0, 1)
		if g.kernel.opened != 2 {
			t.Errorf("opened %d times", g.kernel.opened)
		}
	})
}

// What was missed is made good: after a loss, after a failure, and now and then in any case. A listing
// that fails changes no count.
// Contract clause 11: however many connections come and end, a bounded number of events is read a second, and
// what gets lost by that is made good.
func TestContract11EventsAreReadAtABoundedRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t)
		g.Begin(map[lb.Key]plan.Service{key(1): serviceOf(1, 2, plan.LeastConnections)})
		time.Sleep(time.Second)
		for i := range 20_000 {
			g.kernel.say(conn(i, 1, 0), true, false)
			g.kernel.say(conn(i, 1, 0), false, false)
		}
		g.kernel.say(conn(1, 1, 1), true, true)
		g.kernel.events <- func(_ func(plan.Tracked), lost func()) { lost() }
		for second := range 2 {
			time.Sleep(time.Second)
			if n := g.Counts().Events; n > uint64(second+1)*maxReads*11 {
				t.Errorf("%d events were read in %d s", n, second+1)
			}
		}
		time.Sleep(10 * time.Second)
		if n := g.Counts(); n.Events != 40_000 || n.Lost != 1 {
			t.Errorf("in the end %+v", n)
		}
		g.check(t, "in the end", 1, 0, 1)
	})
}

func TestWhatWasMissedIsMadeGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t)
		g.Begin(map[lb.Key]plan.Service{key(1): serviceOf(1, 2, plan.LeastConnections)})
		for i := range 10 {
			g.kernel.say(conn(i, 1, i%2), true, false)
		}
		time.Sleep(time.Second)
		g.check(t, "at first", 1, 5, 5)
		for i := range 4 {
			g.kernel.say(conn(2*i, 1, 0), false, true)
		}
		time.Sleep(10 * time.Second)
		g.check(t, "not heard of", 1, 5, 5)
		g.kernel.mu.Lock()
		g.kernel.unlisted = true
		g.kernel.mu.Unlock()
		g.kernel.events <- func(_ func(plan.Tracked), lost func()) { lost() }
		time.Sleep(5 * time.Second)
		g.check(t, "a listing fails", 1, 5, 5)
		g.kernel.mu.Lock()
		g.kernel.unlisted = false
		g.kernel.mu.Unlock()
		time.Sleep(20 * time.Second)
		g.check(t, "lost", 1, 1, 5)
		if n := g.Counts(); n.Lost != 1 {
			t.Errorf("%+v", n)
		}
		g.kernel.say(conn(1, 1, 1), false, true)
		time.Sleep(listEvery)
		g.check(t, "after a while", 1, 1, 4)
		g.kernel.say(conn(3, 1, 1), false, true)
		g.kernel.mu.Lock()
		g.kernel.broken = true
		g.kernel.mu.Unlock()
		g.kernel.events <- func(func(plan.Tracked), func()) {}
		time.Sleep(5 * time.Second)
		g.check(t, "the watch fails", 1, 1, 3)
		if g.kernel.opened != 2 {
			t.Errorf("opened %d times", g.kernel.opened)
		}
	})
}

// However many connections come, and to however many Services, loads are told at a bounded rate: for a
// Service, and for the node. Each Service has its turn.
func TestContract11LoadsAreToldAtABoundedRate(t *testing.T) {
	const seconds = 20
	for _, tt := range []struct {
		services, lists, backends int
		least, most               int // loads in the time
	}{
		{1, 1, 3, seconds * 4, seconds*5 + 1},
		{500, 1, 3, seconds * 48, seconds*50 + 11},
		{1, 1, 4000, seconds / 2, seconds}, // which are more to write
		{1, 500, 2, 2, seconds/10 + 1},     // and so are the tables of many lists
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newRig(t)
			all := map[lb.Key]plan.Service{}
			for n := range tt.services {
				s := serviceOf(n, tt.backends, plan.LeastConnections)
				s.Ports[0].Backends.Local = slices.Clone(s.Ports[0].Backends.Cluster) // which no frontend uses
				for i := range tt.lists - 1 {
					p := s.Ports[0]
					p.Number, p.Backends.Cluster = 0, slices.Clone(p.Backends.Cluster)
					p.Frontends = []plan.Frontend{{Kind: plan.ClusterIP, Addr: vip(n), Port: uint16(1000 + i)}}
					s.Ports = append(s.Ports, p)
				}
				all[key(n)] = s
			}
			g.Begin(all)
			for i := range seconds * 1000 {
				g.kernel.say(conn(i, i%tt.services, i%tt.backends), true, false)
				time.Sleep(time.Millisecond)
			}
			synctest.Wait()
			if n := len(g.tells); n < tt.least || n > tt.most {
				t.Errorf("%+v: %d loads", tt, n)
			}
			if len(g.told) != tt.services {
				t.Errorf("%+v: told of %d Services", tt, len(g.told))
			}
		})
	}
}

// A Service whose frontends choose from one backend has no table: its connections, however many, are not counted, as
// a load that costs nothing would be told without a bound.
func TestContract11NoLoadIsWithoutCost(t *testing.T) {
	backends := func(n int) []lb.Backend { return serviceOf(0, n, plan.LeastConnections).Ports[0].Backends.Cluster }
	frontend := func(kind plan.Kind, action plan.Action) plan.Frontend {
		return plan.Frontend{Kind: kind, Addr: vip(0), Port: 80, Action: action}
	}
	for name, tt := range map[string]struct {
		cluster, local int
		frontends      []plan.Frontend
		cost           int // 0 for a Service that is not counted
	}{
		"internalTrafficPolicy Local, one endpoint here": {2, 1, []plan.Frontend{frontend(plan.ClusterIP, plan.ToLocal)}, 0},
		"internalTrafficPolicy Local, two here":          {3, 2, []plan.Frontend{frontend(plan.ClusterIP, plan.ToLocal)}, 1},
		"one endpoint elsewhere, two here, policy Cluster": {1, 2,
			[]plan.Frontend{frontend(plan.ClusterIP, plan.ToCluster)}, 0},
		"policy Local, one here, pods reach all": {2, 1, []plan.Frontend{frontend(plan.LoadBalancer, plan.ToLocal)}, 1},
		"policy Local, two here, pods reach all": {3, 2, []plan.Frontend{frontend(plan.LoadBalancer, plan.ToLocal)}, 2},
		"rejected":                               {2, 2, []plan.Frontend{frontend(plan.ClusterIP, plan.Reject)}, 0},
		"no frontends":                           {2, 2, nil, 0},
	} {
		s := serviceOf(0, 0, plan.LeastConnections)
		s.Ports[0].Frontends = tt.frontends
		s.Ports[0].Backends = lb.Usable{Cluster: backends(tt.cluster), Local: backends(tt.local)}
		all := newTally()
		all.set(s.Key, s)
		cost := 0
		if of := all.services[s.Key]; of != nil {
			cost = of.cost
		}
		if counted := len(all.services) + len(all.at); cost != tt.cost || cost == 0 && counted > 0 {
			t.Errorf("%s: %d Services and destinations are counted, a load costs %d, want %d", name, counted, cost, tt.cost)
		}
	}
}

// A Service with thousands of endpoints and one with three, both busy: the large one does not take the small
// one's loads. And many small ones do not keep the large one from being told.
func TestContract11ALargeServiceTakesNoneOfAnothersLoads(t *testing.T) {
	const seconds = 30
	for _, tt := range []struct {
		large, small        int // backends of one, and how many others
		leastOfOne, atLarge int // loads in the time
	}{
		{4000, 1, 120, 10},
		{8000, 1, 120, 5},
		{4000, 50, 5, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := newRig(t)
			all := map[lb.Key]plan.Service{key(0): serviceOf(0, tt.large, plan.LeastConnections)}
			for n := range tt.small {
				all[key(n+1)] = serviceOf(n+1, 3, plan.LeastConnections)
			}
			g.Begin(all)
			for i := range seconds * 50 {
				for n := range tt.small + 1 {
					g.kernel.say(conn(i, n, i%3), true, false)
				}
				time.Sleep(20 * time.Millisecond)
			}
			synctest.Wait()
			large, one := g.tally.services[key(0)].loads, g.tally.services[key(1)].loads
			t.Logf("%+v: in %d s %d loads of the large one, %d of a small one", tt, seconds, large, one)
			if int(one) < tt.leastOfOne || int(large) < tt.atLarge {
				t.Errorf("%+v: %d loads of the large one, %d of a small one", tt, large, one)
			}
		})
	}
}

// How many more connections are expected follows from how many came, and is taken back when none does.
func TestSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t)
		g.Begin(map[lb.Key]plan.Service{key(1): serviceOf(1, 2, plan.LeastConnections)})
		soon := func(when string, want uint32) {
			t.Helper()
			synctest.Wait()
			g.mu.Lock()
			defer g.mu.Unlock()
			if got := g.told[key(1)].Soon; got != want {
				t.Errorf("%s: %d are expected, want %d", when, got, want)
			}
		}
		time.Sleep(gap)
		g.kernel.say(conn(0, 1, 0), true, false)
		soon("one", 2)
		for i := range 50 {
			g.kernel.say(conn(i+1, 1, 0), true, false)
		}
		time.Sleep(gap)
		soon("many", 100)
		time.Sleep(gap)
		soon("none", 0)
		for i := range 50 {
			g.kernel.say(conn(i+1, 1, 0), false, false)
			g.kernel.say(conn(i+100, 1, 0), true, false)
			g.kernel.say(conn(i+100, 1, 0), false, false)
		}
		g.kernel.say(conn(99, 1, 0), true, false)
		time.Sleep(gap)
		soon("many that have ended", 2)
		// Of many backends, a list may have few, as one of another family or policy has.
		g.Update(map[lb.Key]plan.Service{key(1): serviceOf(1, 50, plan.LeastConnections)})
		time.Sleep(gap)
		g.kernel.say(conn(200, 1, 0), true, false)
		g.kernel.say(conn(201, 1, 0), true, false)
		synctest.Wait()
		time.Sleep(gap)
		g.kernel.say(conn(202, 1, 0), true, false)
		g.kernel.say(conn(203, 1, 0), true, false)
		time.Sleep(2 * gap)
		soon("few, and then none", 0)
		n := len(g.tells)
		time.Sleep(50 * time.Second)
		if len(g.tells) != n {
			t.Errorf("%d loads of nothing new", len(g.tells)-n)
		}
	})
}

// One Service has an end of what is remembered of it, and takes nothing from others.
func TestContract11RememberedConnectionsAreBounded(t *testing.T) {
	tally := newTally()
	for n := range 2 {
		tally.set(key(n), serviceOf(n, 2, plan.LeastConnections))
	}
	for i := range maxServiceOpen + 1000 {
		c := conn(i, 0, 0)
		c.Open = true
		tally.take(c)
	}
	c := conn(0, 1, 1)
	c.Open = true
	tally.take(c)
	if a, b := tally.services[key(0)].open, tally.services[key(1)].open; a != maxServiceOpen || b != 1 {
		t.Errorf("counted are %d and %d", a, b)
	}
	if len(tally.open) != maxServiceOpen+1 {
		t.Errorf("remembered are %d", len(tally.open))
	}
}

// A backend that leaves takes its connections' ends with it, and has what is left of them if it comes
// back; a frontend that another Service has taken over counts there.
func TestBackendsAndFrontendsChange(t *testing.T) {
	tally := newTally()
	s := serviceOf(1, 2, plan.LeastConnections)
	tally.set(key(1), s)
	take := func(c plan.Tracked, open bool) {
		c.Open = open
		tally.take(c)
	}
	for i := range 3 {
		take(conn(i, 1, 1), true)
	}
	fewer := serviceOf(1, 3, plan.LeastConnections)
	fewer.Ports[0].Backends.Cluster = slices.Delete(fewer.Ports[0].Backends.Cluster, 1, 2)
	tally.set(key(1), fewer)
	take(conn(0, 1, 1), false)
	tally.set(key(1), s)
	if got := tally.load(tally.services[key(1)], time.Now()).Open; got[pod(1)] != 2 {
		t.Errorf("%v", got)
	}
	tally.set(key(1), fewer)
	take(conn(1, 1, 1), false)
	take(conn(2, 1, 1), false)
	if got := tally.services[key(1)].backends; len(got) != 2 {
		t.Errorf("%d backends are kept", len(got))
	}
	other := serviceOf(1, 2, plan.LeastConnections)
	other.Key = key(9)
	tally.set(other.Key, other)
	tally.set(key(1), plan.Service{Key: key(1)})
	take(conn(5, 1, 0), true)
	if n := tally.services[other.Key].open; n != 1 {
		t.Errorf("the other Service has %d", n)
	}
}
