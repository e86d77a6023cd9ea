package path

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// kernel is a fake: routes by address, and what it tells of them.
type kernel struct {
	guard      sync.Mutex
	ways       map[string]links.Way
	otherwise  links.Way // to other addresses
	looking    func()    // is called for each look
	fails      error     // the next looks
	looks      []string
	interfaces []lb.Interface
	count      int
	messages   chan []links.RouteChange
}

func (k *kernel) lookup(addr netip.Addr) (links.Way, error) {
	k.guard.Lock()
	defer k.guard.Unlock()
	k.looks = append(k.looks, addr.String())
	if k.looking != nil {
		k.looking()
	}
	way, is := k.ways[addr.String()]
	if !is {
		way = k.otherwise
	}
	return way, k.fails
}

func (k *kernel) watch(ctx context.Context, changed func([]links.RouteChange)) error {
	changed([]links.RouteChange{{All: true}})
	for {
		select {
		case <-ctx.Done():
			return nil
		case c, ok := <-k.messages:
			if !ok {
				return errors.New("closed")
			}
			changed(c)
		}
	}
}

func (k *kernel) set(f func()) {
	k.guard.Lock()
	defer k.guard.Unlock()
	f()
}

var (
	own  = links.Way{Kind: lb.RouteOwn, Link: 3}
	none = links.Way{Kind: lb.RouteNone}
	key  = lb.Key{Namespace: "default", Name: "web"}
)

// rig is an Actor over a fake kernel, in a bubble of synctest.
type rig struct {
	*kernel
	*Actor
	t    *testing.T
	lost plan.Lost
	off  *lb.Refusal
}

func run(t *testing.T, test func(*rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, lost: plan.Lost{}, kernel: &kernel{ways: map[string]links.Way{},
			messages: make(chan []links.RouteChange), interfaces: []lb.Interface{
				{Index: 2, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24"),
					netip.MustParsePrefix("2001:db8::1/64")}},
				{Index: 3, Name: "cni0"}}}}
		r.Actor = New(Deps{Log: slog.New(slog.DiscardHandler), Now: time.Now, Node: "here", Look: r.lookup, Watch: r.watch,
			Addresses: func() []netip.Addr {
				return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
			},
			Interfaces: func() ([]lb.Interface, bool) {
				r.guard.Lock()
				defer r.guard.Unlock()
				return slices.Clone(r.interfaces), true
			},
			Conntrack: func() (int, int) { r.guard.Lock(); defer r.guard.Unlock(); return r.count, 1000 },
			Changed:   func() {},
		})
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		test(r)
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestAReaderThatHangsIsSeen stops what takes in the kernel's messages.
func TestAReaderThatHangsIsSeen(t *testing.T) {
	a := New(Deps{})
	a.mu.Lock()
	done := make(chan struct{})
	go func() { defer close(done); a.note(nil) }()
	for range 1000 { // until it has begun
		if a.Busy() > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if a.Busy() == 0 {
		t.Error("it hangs, and is at rest")
	}
	a.mu.Unlock()
	<-done
	if busy := a.Busy(); busy != 0 {
		t.Errorf("it goes on, and is busy for %v", busy)
	}
}

func targets(addrs ...string) (all []plan.Target) {
	for _, a := range addrs {
		all = append(all, plan.Target{Addr: netip.MustParseAddr(a), Pod: true})
	}
	return all
}

// TestContract11NobodyDecidesWhatAnothersEndpointIs has a Service name another one's external endpoint as a pod of some
// node, and take that back: the other's verdict never changes, whoever came first.
func TestContract11NobodyDecidesWhatAnothersEndpointIs(t *testing.T) {
	external := netip.MustParseAddr("198.51.100.7")
	evil := lb.Key{Namespace: "evil", Name: "x"}
	for _, first := range []lb.Key{key, evil} {
		run(t, func(r *rig) {
			r.set(func() { r.ways[external.String()] = links.Way{Kind: lb.RouteDefault, Link: 2} })
			says := map[lb.Key][]plan.Target{key: {{Addr: external}}, evil: {{Addr: external, Pod: true}}}
			r.Begin(map[lb.Key][]plan.Target{first: says[first]})
			r.wait()
			r.Update(says)
			r.wait()
			if r.lost[says[key][0]] != nil || r.lost[says[evil][0]] == nil {
				t.Errorf("%s came first: lost are %v", first, r.lost)
			}
			r.Update(map[lb.Key][]plan.Target{evil: nil})
			r.wait()
			r.set(func() { r.ways[external.String()] = none })
			r.messages <- []links.RouteChange{{All: true}}
			r.wait()
			if r.lost[says[key][0]] == nil || r.lost[says[evil][0]] != nil {
				t.Errorf("the route is gone: lost are %v", r.lost)
			}
		})
	}
}

// wait has the actor do all that is due, and takes in its news.
func (r *rig) wait() News {
	synctest.Wait()
	time.Sleep(2 * time.Millisecond)
	synctest.Wait()
	news, _ := r.Take()
	maps.Copy(r.lost, news.Lost)
	r.off = news.Off
	return news
}

func (r *rig) expect(what string, want ...string) {
	r.t.Helper()
	r.wait()
	var got []string
	for target, why := range r.lost {
		if why != nil {
			got = append(got, target.Addr.String()+" "+string(why.Reason))
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		r.t.Errorf("%s: lost %q, want %q", what, got, want)
	}
}

func (r *rig) route(prefix string, way links.Way, addrs ...string) {
	r.set(func() {
		for _, a := range addrs {
			r.ways[a] = way
		}
	})
	r.messages <- []links.RouteChange{{Prefix: netip.MustParsePrefix(prefix)}}
}

func TestRoutesComeAndGo(t *testing.T) {
	run(t, func(r *rig) {
		if r.wait(); len(r.looks) > 0 {
			t.Error("looked before there was anything")
		}
		if _, known := r.Take(); known {
			t.Error("known before the endpoints are")
		}
		r.set(func() { r.ways["10.1.0.2"], r.ways["10.2.0.2"] = own, none })
		r.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2", "10.2.0.2")})
		r.expect("at first", "10.2.0.2 PodRouteMissing")
		if _, known := r.Take(); !known {
			t.Error("not known")
		}
		r.route("10.2.0.0/24", own, "10.2.0.2")
		r.expect("what was never there needs no hold")
		r.set(func() { r.looks = nil })
		r.route("10.1.0.0/24", none, "10.1.0.2")
		r.expect("lost", "10.1.0.2 PodRouteMissing")
		if !slices.Equal(r.looks, []string{"10.1.0.2"}) {
			t.Errorf("looked at %q: a route concerns its own addresses", r.looks)
		}
		r.route("10.1.0.2/32", own, "10.1.0.2")
		r.expect("back, and held", "10.1.0.2 PodRouteMissing")
		time.Sleep(hold)
		r.expect("back")
		r.route("10.1.0.2/32", none, "10.1.0.2")
		r.expect("lost again", "10.1.0.2 PodRouteMissing")
		r.route("10.1.0.2/32", own, "10.1.0.2")
		time.Sleep(hold)
		r.expect("a route that flaps is held longer", "10.1.0.2 PodRouteMissing")
		time.Sleep(hold)
		r.expect("back again")
		r.route("10.1.0.2/32", none, "10.1.0.2")
		other := lb.Key{Namespace: "default", Name: "other"}
		r.Update(map[lb.Key][]plan.Target{key: targets("10.1.0.2"), other: targets("10.1.0.2")})
		r.expect("endpoints that are told again stay lost", "10.1.0.2 PodRouteMissing")
		r.Update(map[lb.Key][]plan.Target{key: nil})
		r.expect("another Service has it", "10.1.0.2 PodRouteMissing")
		r.Update(map[lb.Key][]plan.Target{other: nil})
		r.expect("nobody has it")
		r.set(func() { r.looks = nil })
		r.messages <- []links.RouteChange{{All: true}}
		if r.wait(); len(r.looks) > 0 {
			t.Errorf("looked at %q of a Service that is gone", r.looks)
		}
	})
}

// TestTheDefaultRoute is no way to a pod, and concerns only those that have no other.
func TestTheDefaultRoute(t *testing.T) {
	run(t, func(r *rig) {
		r.set(func() { r.ways["10.1.0.2"], r.ways["10.2.0.2"], r.ways["fd00::2"] = own, none, none })
		r.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2", "10.2.0.2", "fd00::2")})
		r.expect("no route at all", "10.2.0.2 PodRouteMissing", "fd00::2 PodRouteMissing")
		r.set(func() { r.looks = nil })
		r.route("0.0.0.0/0", links.Way{Kind: lb.RouteDefault, Link: 2}, "10.2.0.2")
		r.expect("the default route", "10.2.0.2 PodRouteMissing", "fd00::2 PodRouteMissing")
		if !slices.Equal(r.looks, []string{"10.2.0.2"}) {
			t.Errorf("looked at %q", r.looks)
		}
		if why := r.lost[targets("10.2.0.2")[0]]; !strings.Contains(why.Message, "default route by eth0") {
			t.Errorf("message %q", why.Message)
		}
	})
}

// TestContract7AFailedLookHolds keeps what is known while the kernel does not answer, and asks again.
func TestContract7AFailedLookHolds(t *testing.T) {
	run(t, func(r *rig) {
		r.set(func() { r.ways["10.1.0.2"], r.fails = none, errors.New("no buffer") })
		r.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2")})
		r.expect("unknown is not absent")
		r.set(func() { r.fails = nil })
		time.Sleep(every)
		r.expect("known", "10.1.0.2 PodRouteMissing")
		r.route("10.1.0.0/24", own, "10.1.0.2")
		r.expect("there")
		r.set(func() { r.fails = errors.New("no buffer") })
		r.route("10.1.0.0/24", none, "10.1.0.2")
		r.expect("it stays")
		r.set(func() { r.fails = nil })
		time.Sleep(every)
		r.expect("lost", "10.1.0.2 PodRouteMissing")
	})
}

// TestLinks looks again soon after an interface has changed, and some time later: the kernel says so
// before it takes the routes away.
func TestLinks(t *testing.T) {
	run(t, func(r *rig) {
		r.set(func() { r.ways["10.1.0.2"], r.ways["10.2.0.2"] = own, links.Way{Kind: lb.RouteOwn, Link: 2} })
		r.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2", "10.2.0.2")})
		r.wait()
		time.Sleep(every) // until what the beginning of the watch has asked for is over
		r.expect("at first")
		r.messages <- []links.RouteChange{{Link: 3}, {Link: 9}}
		r.expect("not yet")
		r.set(func() { r.ways["10.1.0.2"] = links.Way{Kind: lb.RouteDefault, Link: 2}; r.looks = nil })
		r.expect("gone with its interface", "10.1.0.2 PodRouteMissing")
		for range 20 { // others change all the time
			r.messages <- []links.RouteChange{{Link: 9}}
			r.wait()
		}
		time.Sleep(settle)
		r.wait()
		if n := len(r.looks); slices.Contains(r.looks, "10.2.0.2") || n < 2 || n > 6 {
			t.Errorf("looked at %q", r.looks)
		}
		r.set(func() { r.looks = nil })
		time.Sleep(every)
		if r.wait(); len(r.looks) > 0 {
			t.Errorf("looked at %q when all had settled", r.looks)
		}
		r.set(func() { r.ways["10.1.0.2"] = own })
		r.messages <- []links.RouteChange{{Prefix: netip.MustParsePrefix("10.1.0.0/16")}}
		r.wait()
		time.Sleep(hold)
		r.expect("back")
		r.messages <- []links.RouteChange{{Link: 3}}
		time.Sleep(settle)
		r.set(func() { r.ways["10.1.0.2"] = links.Way{Kind: lb.RouteDefault, Link: 2} })
		time.Sleep(settle)
		r.expect("gone late", "10.1.0.2 PodRouteMissing")
		r.set(func() { r.ways["10.2.0.2"] = links.Way{Kind: lb.RouteOwn, Link: 2, Down: true} })
		r.messages <- []links.RouteChange{{Link: 2}}
		r.expect("no carrier", "10.1.0.2 PodRouteMissing", "10.2.0.2 NoCarrier")
	})
}

// TestLostMessages looks again some time after messages may have been lost: one of them may have been about an
// interface whose routes the kernel has yet to take away.
func TestLostMessages(t *testing.T) {
	run(t, func(r *rig) {
		r.set(func() { r.ways["10.1.0.2"] = own })
		r.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2")})
		r.wait()
		time.Sleep(every) // until what the beginning of the watch has asked for is over
		r.expect("at first")
		r.messages <- []links.RouteChange{{All: true}}
		r.expect("not yet")
		r.set(func() { r.ways["10.1.0.2"] = none })
		time.Sleep(settle)
		r.expect("gone", "10.1.0.2 PodRouteMissing")
		r.set(func() { r.looks = nil })
		time.Sleep(every)
		if r.wait(); len(r.looks) > 0 {
			t.Errorf("looked at %q when all had settled", r.looks)
		}
	})
}

// TestLinkAtResync looks again also after a message about an interface that comes when all is looked up in any case.
func TestLinkAtResync(t *testing.T) {
	a, pod := New(Deps{}), targets("10.1.0.2")[0]
	a.entries[pod] = &entry{way: own, known: true}
	a.changes = []links.RouteChange{{Link: own.Link}}
	due := map[plan.Target]bool{}
	if a.concerned(time.Now(), due); !due[pod] || !a.settling[pod] {
		t.Errorf("%v are due, and %v settle", due, a.settling)
	}
}

func TestForwarding(t *testing.T) {
	pods := map[lb.Family]string{lb.IPv4: "10.1.0.2", lb.IPv6: "fd00::2"}
	for _, test := range []struct {
		name   string
		family lb.Family
		at     int // the interface that does not forward; -1 for all
		change func(*lb.Interface)
		lost   bool
	}{
		{"at the node's own interface", lb.IPv4, 0, func(i *lb.Interface) { i.Unforwarded4 = true }, true},
		{"at the node's own interface", lb.IPv6, 0, func(i *lb.Interface) { i.Unforwarded6 = true }, true},
		{"at that of the pod", lb.IPv4, 1, func(i *lb.Interface) { i.Unforwarded4 = true }, true},
		{"at that of the pod", lb.IPv6, 1, func(i *lb.Interface) { i.Unforwarded6 = true }, true},
		// As with force_forwarding of the others.
		{"at lo, which has the node's address", lb.IPv6, 0,
			func(i *lb.Interface) { i.Unforwarded6, i.Loopback = true, true }, false},
		{"at a dummy, which has the node's address", lb.IPv6, 0,
			func(i *lb.Interface) { i.Unforwarded6, i.Dummy = true, true }, false},
		{"at lo, which has the node's address, and at all others", lb.IPv6, -1,
			func(i *lb.Interface) { i.Unforwarded6, i.Loopback = true, i.Name == "eth0" }, true},
	} {
		run(t, func(r *rig) {
			before := slices.Clone(r.interfaces)
			r.set(func() {
				for _, pod := range pods {
					r.ways[pod] = own
					if test.at < 0 { // by several ways, of which no interface is known
						r.ways[pod] = links.Way{Kind: lb.RouteOwn}
					}
				}
				r.ways["192.0.2.1"] = links.Way{Kind: lb.RouteOwn, Local: true, Link: 1}
			})
			r.Begin(map[lb.Key][]plan.Target{key: targets("10.1.0.2", "fd00::2", "192.0.2.1")})
			r.expect("at first")
			r.set(func() {
				r.interfaces = slices.Clone(before)
				for i := range r.interfaces {
					if test.at < 0 || test.at == i {
						test.change(&r.interfaces[i])
					}
				}
			})
			r.Poke()
			var lost []string
			if test.lost {
				lost = []string{pods[test.family] + " ForwardingOff"}
			}
			r.expect(fmt.Sprint(test.name, ", ", test.family), lost...)
			r.set(func() { r.interfaces = before })
			r.Poke()
			time.Sleep(hold)
			r.expect("on")
		})
	}
}

// TestConntrackFull takes some time for full, and room for an end of it.
func TestConntrackFull(t *testing.T) {
	run(t, func(r *rig) {
		r.Begin(nil)
		r.wait()
		r.set(func() { r.count = 999 })
		time.Sleep(every + every/2)
		if r.wait(); r.off != nil {
			t.Error("full at once")
		}
		time.Sleep(2 * every)
		if r.wait(); r.off == nil || r.off.Reason != lb.ReasonConntrackFull {
			t.Errorf("not full: %v", r.off)
		}
		r.set(func() { r.count = 950 })
		time.Sleep(10 * every)
		if r.wait(); r.off == nil {
			t.Error("there is no room yet")
		}
		r.set(func() { r.count = 500 })
		time.Sleep(3 * every)
		if r.wait(); r.off != nil {
			t.Errorf("still full: %v", r.off)
		}
	})
}

func TestFlap(t *testing.T) {
	var f flap
	now := time.Now()
	for i, want := range []time.Duration{0, hold, 2 * hold, 4 * hold, 8 * hold, 16 * hold, most, most} {
		now = now.Add(time.Minute)
		f.step(now, true)
		now = now.Add(time.Second)
		if got := f.step(now, false); got != want {
			t.Errorf("after %d losses it is held for %v, want %v", i, got, want)
		}
	}
	now = now.Add(memory + time.Minute)
	f.step(now, true)
	if got := f.step(now, false); got != hold {
		t.Errorf("a loss long after the others is held for %v", got)
	}
}
