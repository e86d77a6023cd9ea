package probe

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var key = lb.Key{Namespace: "default", Name: "web"}

// backends is a network of fakes: those that are broken take no connection, until their question ends.
type backends struct {
	mu     sync.Mutex
	broken map[string]bool
	asked  map[string][]time.Time
	open   int
	most   int // open at once
}

func (b *backends) dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	b.mu.Lock()
	b.asked[to.String()] = append(b.asked[to.String()], time.Now())
	b.open++
	b.most = max(b.most, b.open)
	broken := b.broken[to.String()]
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.open--
	}()
	if broken {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	here, there := net.Pipe()
	there.Close()
	return here, nil
}

func (b *backends) breaks(is bool, all ...string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, one := range all {
		b.broken[one] = is
	}
}

func (b *backends) questions(to string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.asked[to])
}

// rig is an Actor over fakes, in a bubble of synctest.
type rig struct {
	*Actor
	*backends
	t       *testing.T
	left    map[lb.Key]plan.LeftOut
	changed time.Time
	counted map[Result]int
}

const interval = 100 * time.Millisecond

func run(t *testing.T, test func(*rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := &rig{t: t, backends: &backends{broken: map[string]bool{}, asked: map[string][]time.Time{}},
			left: map[lb.Key]plan.LeftOut{}, counted: map[Result]int{}}
		phase := time.Duration(0)
		r.Actor = New(Deps{Now: time.Now, Dial: r.dial, Interval: interval, Agent: "test",
			Phase: func(d time.Duration) time.Duration {
				phase += 7 * time.Millisecond
				return phase % d
			},
			Counted: func(result Result) {
				r.backends.mu.Lock()
				defer r.backends.mu.Unlock()
				r.counted[result]++
			},
			Changed: func() { r.changed = time.Now() },
		})
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- r.Run(ctx) }()
		test(r)
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if r.backends.open > 0 {
			t.Errorf("%d questions go on", r.backends.open)
		}
	})
}

func tcp(targets ...string) plan.Probing {
	p := plan.Probing{Probe: lb.Probe{Kind: lb.ProbeTCP}, Nodes: 3}
	for _, to := range targets {
		p.Targets = append(p.Targets, netip.MustParseAddrPort(to))
	}
	return p
}

// after lets time pass, and takes in the news.
func (r *rig) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
	maps.Copy(r.left, r.Take())
}

func (r *rig) expect(what string, want ...string) {
	r.t.Helper()
	var got []string
	for addr := range r.left[key] {
		got = append(got, addr.String())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		r.t.Errorf("%s: left out %q, want %q", what, got, want)
	}
}

const one, two, six = "10.1.0.1:80", "10.1.0.2:80", "[fd00::6]:80"

func TestLeavesOutAndTakesBack(t *testing.T) {
	run(t, func(r *rig) {
		r.breaks(true, two)
		r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two, six)})
		r.after(0)
		r.expect("at first")
		r.after(3 * interval)
		r.expect("it never answered", "10.1.0.2")
		if why := r.left[key][netip.MustParseAddr("10.1.0.2")]; why != "connect: no answer within 80ms" {
			t.Errorf("it is said %q", why)
		}
		r.breaks(false, two)
		r.breaks(true, six)
		r.after(3 * interval)
		r.expect("another breaks", "10.1.0.2", "fd00::6")
		r.after(3 * time.Second)
		r.expect("the first answers again", "fd00::6")
		for _, result := range []Result{Passed, TimedOut} {
			if r.counted[result] == 0 {
				t.Errorf("counted %v", r.counted)
			}
		}
	})
}

// A fault is found in less than three intervals, in whichever part of one it comes.
func TestFindsWithinThreeIntervals(t *testing.T) {
	for part := range 10 {
		run(t, func(r *rig) {
			r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two)})
			r.after(time.Second + time.Duration(part)*interval/10)
			broken := time.Now()
			r.breaks(true, two)
			r.after(3 * interval)
			r.expect("broken", "10.1.0.2")
			if took := r.changed.Sub(broken); took >= 3*interval {
				t.Errorf("found after %v", took)
			}
		})
	}
}

func TestAsksInTurn(t *testing.T) {
	run(t, func(r *rig) {
		r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two)})
		r.after(10*time.Second + interval/2)
		if n := r.questions(one); n < 99 || n > 101 {
			t.Errorf("asked %d times in 10 s", n)
		}
		r.breaks(true, two)
		r.after(time.Second)
		before := r.questions(two)
		r.after(10 * time.Second)
		if n := r.questions(two) - before; n < 9 || n > 11 {
			t.Errorf("asked one that is left out %d times in 10 s", n)
		}
		for i, at := range r.asked[one][1:] {
			if gap := at.Sub(r.asked[one][i]); gap < interval-2*gap || gap > interval+2*gap {
				t.Errorf("asked after %v", gap)
			}
		}
	})
}

func TestFollowsEndpoints(t *testing.T) {
	run(t, func(r *rig) {
		r.Begin(map[lb.Key]plan.Probing{})
		r.breaks(true, two)
		r.Update(map[lb.Key]plan.Probing{key: tcp(one, two)})
		r.after(3 * interval)
		r.expect("broken", "10.1.0.2")
		r.Update(map[lb.Key]plan.Probing{key: tcp(one, two, six)})
		r.after(interval)
		r.expect("another one comes", "10.1.0.2")
		r.Update(map[lb.Key]plan.Probing{key: tcp(one, six)})
		r.after(interval)
		r.expect("it is gone")
		before := r.questions(two)
		r.after(time.Second)
		if r.questions(two) != before {
			t.Error("one that is gone is asked")
		}
		r.Update(map[lb.Key]plan.Probing{key: tcp(one, two)})
		r.after(time.Millisecond)
		r.expect("it is back, and unknown")
		r.after(3 * interval)
		r.expect("and still broken", "10.1.0.2")
		moved := tcp(one, two)
		moved.Probe = lb.Probe{Kind: lb.ProbeHTTP, Path: "/"}
		r.Update(map[lb.Key]plan.Probing{key: moved})
		r.after(time.Millisecond)
		r.expect("another probe")
		r.Update(map[lb.Key]plan.Probing{key: {}})
		r.after(interval)
		r.expect("no probe")
		if len(r.services)+len(r.entries)+len(r.places) != 0 {
			t.Errorf("%d Services with %d endpoints at %d addresses are remembered", len(r.services), len(r.entries),
				len(r.places))
		}
	})
}

// An answer that comes when its Service is not asked any more is nobody's.
func TestAnswersComeTooLate(t *testing.T) {
	run(t, func(r *rig) {
		r.breaks(true, one)
		r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two)})
		r.after(interval / 2)
		r.Update(map[lb.Key]plan.Probing{key: {}})
		r.after(interval)
		if r.counted[TimedOut] != 1 || r.questions(one) != 1 {
			t.Errorf("counted %v of %d questions", r.counted, r.questions(one))
		}
		r.expect("nothing is asked")
	})
}

// Services do not disturb one another: one pod may be well by the probe of one and not by that of another.
func TestServicesAreApart(t *testing.T) {
	other := lb.Key{Namespace: "default", Name: "other"}
	run(t, func(r *rig) {
		r.breaks(true, two)
		elsewhere := tcp("10.1.0.2:81", one)
		r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two), other: elsewhere})
		r.after(3 * interval)
		r.expect("broken", "10.1.0.2")
		if len(r.left[other]) > 0 {
			t.Errorf("left out of the other: %v", r.left[other])
		}
		r.Update(map[lb.Key]plan.Probing{other: {}})
		r.after(interval)
		r.expect("the other goes", "10.1.0.2")
	})
}

// What several Services ask of one endpoint is asked once, and all of them hear of it.
func TestServicesShareQuestions(t *testing.T) {
	other := lb.Key{Namespace: "elsewhere", Name: "other"}
	run(t, func(r *rig) {
		r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two)})
		r.after(3 * interval)
		r.breaks(true, two)
		r.Update(map[lb.Key]plan.Probing{other: tcp(two)})
		r.after(3 * interval)
		r.expect("broken", "10.1.0.2")
		if len(r.left[other]) != 1 {
			t.Errorf("the other Service does not hear of it: %v", r.left)
		}
		third := lb.Key{Namespace: "elsewhere", Name: "third"}
		r.Update(map[lb.Key]plan.Probing{third: tcp(two)})
		r.after(time.Millisecond)
		if len(r.left[third]) != 1 {
			t.Errorf("a Service that comes later does not hear of it: %v", r.left)
		}
		r.Update(map[lb.Key]plan.Probing{key: {}, third: {}})
		r.after(time.Millisecond)
		r.breaks(false, two)
		r.after(3 * time.Second)
		if len(r.left[other]) != 0 {
			t.Errorf("the one that is left does not hear that it is back: %v", r.left)
		}
		before := r.questions(two)
		r.after(10 * time.Second)
		if n := r.questions(two) - before; n < 99 || n > 101 {
			t.Errorf("asked %d times in 10 s", n)
		}
	})
}

// Contract clause 11: however many Services ask something of one address, it is asked 100 times a second by
// all nodes, and those of another namespace have half of that.
func TestContract11BoundsOfAnAddress(t *testing.T) {
	run(t, func(r *rig) {
		all := map[lb.Key]plan.Probing{key: tcp("10.1.0.1:80")}
		for i := range 100 {
			p := tcp("10.1.0.1:81")
			p.Probe = lb.Probe{Kind: lb.ProbeHTTP, Path: "/" + strings.Repeat("x", i)}
			all[lb.Key{Namespace: "many", Name: p.Probe.Path}] = p
		}
		r.Begin(all)
		r.after(time.Minute)
		one, other := r.questions("10.1.0.1:80"), r.questions("10.1.0.1:81")
		r.after(time.Minute)
		one, other = r.questions("10.1.0.1:80")-one, r.questions("10.1.0.1:81")-other
		if nodes := 3; (one+other)*nodes > 6000*11/10 {
			t.Errorf("%d nodes asked the address %d times in a minute", nodes, (one+other)*nodes)
		}
		if one < 590 {
			t.Errorf("the other namespace leaves %d questions in a minute", one)
		}
	})
}

// TestBounds has all the endpoints that a node asks break at once.
func TestBounds(t *testing.T) {
	run(t, func(r *rig) {
		all := map[lb.Key]plan.Probing{}
		var broken []string
		for i := range plan.MaxProbedOfNode / plan.MaxProbed {
			p := tcp()
			for j := range plan.MaxProbed {
				to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i), byte(j)}), 80)
				p.Targets, broken = append(p.Targets, to), append(broken, to.String())
			}
			all[lb.Key{Name: strings.Repeat("x", i+1)}] = p
		}
		r.breaks(true, broken...)
		r.Begin(all)
		began := time.Now()
		r.after(10 * time.Second)
		if r.most > plan.MaxProbedOfNode {
			t.Errorf("%d questions at once", r.most)
		}
		n := 0
		for _, times := range r.asked {
			n += len(times)
		}
		if perSecond := float64(n) / time.Since(began).Seconds(); perSecond > 1100 {
			t.Errorf("asked %.0f a second", perSecond)
		}
		for i := range plan.MaxProbedOfNode / plan.MaxProbed {
			if left := r.left[lb.Key{Name: strings.Repeat("x", i+1)}]; len(left) != plan.MaxProbed {
				t.Errorf("found %d of %d", len(left), plan.MaxProbed)
			}
		}
	})
}

// A Service whose probe changes all the time has no more questions under way than endpoints, and no other
// Service waits for it.
func TestBoundsOfChanges(t *testing.T) {
	other := lb.Key{Name: "other"}
	run(t, func(r *rig) {
		r.Actor.deps.Dial = func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			if to.String() != one {
				time.Sleep(time.Minute)
			}
			return r.dial(ctx, to)
		}
		r.Begin(map[lb.Key]plan.Probing{other: tcp(one)})
		for i := range 50 {
			p := tcp(two, six)
			p.Probe = lb.Probe{Kind: lb.ProbeHTTP, Path: "/" + strings.Repeat("x", i)}
			r.Update(map[lb.Key]plan.Probing{key: p})
			r.after(time.Second)
			if n := r.underway[key]; n != 2 {
				t.Fatalf("%d questions are under way", n)
			}
		}
		if n := r.questions(one); n < 490 {
			t.Errorf("the other Service was asked %d times in 50 s", n)
		}
		r.Update(map[lb.Key]plan.Probing{key: {}, other: {}})
		r.after(2 * time.Minute)
		if len(r.underway) > 0 {
			t.Errorf("questions are under way: %v", r.underway)
		}
	})
}

// What this node cannot tell decides nothing, for however long.
func TestUnknownIsNotAbsent(t *testing.T) {
	run(t, func(r *rig) {
		late := errors.New("late")
		r.Actor.deps.Dial = func(context.Context, netip.AddrPort) (net.Conn, error) {
			time.Sleep(time.Second)
			return nil, late
		}
		r.Begin(map[lb.Key]plan.Probing{key: tcp(one, two)})
		r.after(time.Minute)
		r.expect("a node without time")
		if r.counted[Unclear] == 0 || len(r.counted) != 1 {
			t.Errorf("counted %v", r.counted)
		}
	})
}
