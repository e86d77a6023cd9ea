package witness

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

var vip = netip.MustParseAddr("192.0.2.1")

// lease is what the API server has.
type lease struct {
	mu      sync.Mutex
	said    lb.Witness
	version int
	writes  map[string]int
	reads   int
	down    bool
}

var errDown = errors.New("connection refused")

func (l *lease) Read(context.Context) (lb.Witness, string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		return lb.Witness{}, "", errDown
	}
	l.reads++
	if l.version == 0 {
		return lb.Witness{}, "", nil
	}
	return l.said, strconv.Itoa(l.version), nil
}

func (l *lease) Write(_ context.Context, says lb.Witness, version string) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		return "", errDown
	}
	if want := strconv.Itoa(l.version); version != want && (l.version > 0 || version != "") {
		return "", errors.New("conflict")
	}
	l.version++
	l.said = says
	l.writes[says.Node]++
	return strconv.Itoa(l.version), nil
}

// written returns how often each node has written since the last call.
func (l *lease) written() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.writes
	l.writes = map[string]int{}
	return was
}

func (l *lease) set(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
}

func tells(node string, rank int, unserved ...netip.Addr) Desired {
	return Desired{Tell: true, Rank: rank, Says: lb.Witness{Node: node, Live: []string{"a", "b"}, Unserved: unserved}}
}

func inBubble(t *testing.T, f func(l *lease, start func() *Actor)) {
	synctest.Test(t, func(t *testing.T) {
		l := &lease{writes: map[string]int{}}
		ctx, cancel := context.WithCancel(context.Background())
		var group sync.WaitGroup
		f(l, func() *Actor {
			a := New(Options{Lease: l, Log: slog.New(slog.DiscardHandler)})
			group.Go(func() {
				if err := a.Run(ctx); err != nil {
					t.Error(err)
				}
			})
			return a
		})
		cancel()
		group.Wait()
	})
}

func TestMinorityHearsOfTheMajority(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		majority, minority := start(), start()
		minority.Set(Desired{Heed: true})
		time.Sleep(10 * time.Second)
		if _, fresh := minority.Outcome(); fresh {
			t.Error("heard of somebody, while there is nobody")
		}
		majority.Set(tells("a", 0))
		time.Sleep(2 * time.Second)
		said, fresh := minority.Outcome()
		if !fresh || said.Node != "a" || !said.Serves("c", vip) {
			t.Errorf("after it has told: %+v, %v", said, fresh)
		}
		majority.Set(tells("a", 0, vip))
		time.Sleep(2 * time.Second)
		if said, _ := minority.Outcome(); said.Serves("c", vip) {
			t.Errorf("after it has lost the address: %+v", said)
		}
		time.Sleep(time.Minute)
		if _, fresh := minority.Outcome(); !fresh {
			t.Error("the majority is there still")
		}

		// The majority ends: what stays in the Lease counts no more.
		majority.Set(Desired{})
		time.Sleep(lasts + 2*heedEvery)
		if _, fresh := minority.Outcome(); fresh {
			t.Error("nobody is there any more")
		}
		// And one who comes to it now is not fooled by what it finds.
		late := start()
		late.Set(Desired{Heed: true})
		time.Sleep(10 * time.Second)
		if _, fresh := late.Outcome(); fresh {
			t.Error("an old Lease counts")
		}
	})
}

func TestTheAPIServerGoes(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		majority, minority := start(), start()
		majority.Set(tells("a", 0))
		minority.Set(Desired{Heed: true})
		time.Sleep(10 * time.Second)
		l.set(func() { l.down = true })
		time.Sleep(lasts + 2*heedEvery)
		if _, fresh := minority.Outcome(); fresh {
			t.Error("heard without an API server")
		}
		l.set(func() { l.down = false })
		time.Sleep(5 * time.Second)
		if _, fresh := minority.Outcome(); !fresh {
			t.Error("not heard, although it is back")
		}
	})
}

func TestOneTellsAndAnotherStepsIn(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		first, second := start(), start()
		first.Set(tells("a", 0))
		second.Set(tells("b", 1))
		time.Sleep(time.Minute + 50*time.Millisecond) // no timer of theirs ends just then
		if w := l.written(); w["b"] > 0 || w["a"] < 25 || w["a"] > 35 {
			t.Errorf("writes in a minute: %v", w)
		}
		first.Set(Desired{}) // it does not reach the API server
		time.Sleep(20 * time.Second)
		if w := l.written(); w["b"] < 5 || w["a"] > 0 {
			t.Errorf("writes in 20 s without the first: %v", w)
		}
		first.Set(tells("a", 0))
		time.Sleep(10 * time.Second)
		l.written()
		time.Sleep(time.Minute)
		if w := l.written(); w["b"] > 0 || w["a"] < 25 {
			t.Errorf("writes in a minute with the first again: %v", w)
		}
	})
}

// Two sides that both renew the Lease hear of one another, whatever their ranks are, for as long as both do.
func TestTwoSidesThatTellHearOfOneAnother(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		side := func(node string, rank int, live ...string) Desired {
			return Desired{Tell: true, Rank: rank, Says: lb.Witness{Node: node, Live: live}}
		}
		one, other := start(), start()
		one.Set(side("b", 0, "b"))
		other.Set(side("c", 1, "a", "c"))
		time.Sleep(10 * time.Second)
		if said, fresh := one.Outcome(); !fresh || said.Node != "c" {
			t.Errorf("the first in rank hears %+v, %v", said, fresh)
		}
		if said, fresh := other.Outcome(); !fresh || said.Node != "b" {
			t.Errorf("the other side hears %+v, %v", said, fresh)
		}
		one.Set(Desired{Heed: true}) // it yields
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			if said, fresh := one.Outcome(); !fresh || said.Node != "c" {
				t.Fatalf("after it has yielded it hears %+v, %v", said, fresh)
			}
		}
		// It may have seen the last renewal a turn late, and looks again a turn after that has ended.
		time.Sleep(2 * (tellEvery + stepIn))
		if _, fresh := other.Outcome(); fresh {
			t.Error("the side that has yielded is heard still")
		}
	})
}

// Who tells in turn with this node counts it, and is none whom it heeds.
func TestOneSideDoesNotHeedItself(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		first, second := start(), start()
		first.Set(tells("a", 0))
		second.Set(tells("b", 1))
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			for _, a := range []*Actor{first, second} {
				if said, fresh := a.Outcome(); fresh {
					t.Fatalf("it heeds %+v", said)
				}
			}
		}
	})
}

func TestTheLeaseIsLeftAloneWithoutNeed(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		a := start()
		a.Set(Desired{})
		time.Sleep(time.Minute)
		if l.reads > 0 || len(l.writes) > 0 {
			t.Errorf("%d reads, writes %v", l.reads, l.writes)
		}
	})
}

// Those before the last in rank lose the API server. The minority does not take the pause until the last
// steps in for the end of the majority.
func TestContract11APauseUntilAnotherTellsIsNoEnd(t *testing.T) {
	inBubble(t, func(l *lease, start func() *Actor) {
		tellers := []*Actor{start(), start(), start()}
		for rank, name := range []string{"a", "b", "c"} {
			time.Sleep(700 * time.Millisecond) // each reads at a time of its own
			tellers[rank].Set(tells(name, rank))
		}
		minority := start()
		minority.Set(Desired{Heed: true})
		time.Sleep(10 * time.Second)
		for pause := range 20 { // at any time between two renewals
			tellers[0].Set(Desired{})
			tellers[1].Set(Desired{})
			for range 120 {
				time.Sleep(100 * time.Millisecond)
				if _, fresh := minority.Outcome(); !fresh {
					t.Errorf("pause %d: hears of no majority, while c stands by", pause)
					return
				}
			}
			tellers[0].Set(tells("a", 0))
			tellers[1].Set(tells("b", 1))
			time.Sleep(10*time.Second + time.Duration(pause)*110*time.Millisecond)
		}
	})
}
