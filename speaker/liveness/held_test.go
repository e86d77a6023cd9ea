package liveness

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestAHeldNodeCostsLittle counts what one node sends while it waits for the speaker of another, whose kernel
// answers, in clusters of several sizes. When the kernel is silent at last, the node is buried as soon as if
// witnesses had been asked all the time, and only if they answer.
func TestAHeldNodeCostsLittle(t *testing.T) {
	for _, nodes := range []int{3, 21, 100, 1000} {
		for _, cut := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d nodes, cut off %v", nodes, cut), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { heldNode(t, nodes, cut) })
			})
		}
	}
}

func heldNode(t *testing.T, nodes int, cut bool) {
	const held = 1
	var toHeld, toOthers, pings atomic.Int64
	var silent, alone atomic.Bool
	heldAddr := processOf(held).Addr
	answers := func(isHeld bool) bool {
		if alone.Load() || isHeld && silent.Load() {
			time.Sleep(answerTimeout)
			return false
		}
		time.Sleep(time.Millisecond)
		return true
	}
	a := New(Options{Self: named(0), Hold: time.Hour, Log: slog.New(slog.DiscardHandler), Changed: func() {},
		Probe: func(_ context.Context, addr netip.AddrPort) bool {
			if addr == heldAddr {
				toHeld.Add(1)
			} else {
				toOthers.Add(1)
			}
			return answers(addr == heldAddr)
		},
		Ping: func(string, netip.AddrPort) bool { pings.Add(1); return answers(false) }})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- a.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
	}()
	for i := 1; i < nodes; i++ {
		a.Joined(processOf(i))
	}
	a.Lost(processOf(held))
	time.Sleep(time.Second)
	toHeld.Store(0)
	toOthers.Store(0)
	pings.Store(0)
	const seconds = 60
	time.Sleep(seconds * time.Second)
	each := func(n *atomic.Int64) float64 { return float64(n.Load()) / seconds }
	t.Logf("| %d | %.1f | %.0f | %.1f | %.1f |", nodes, each(&toHeld), each(&toHeld)*float64(nodes-1), each(&toOthers),
		each(&pings))
	if all := each(&toHeld) * float64(nodes-1); all < 1 || all > 1050 {
		t.Errorf("the held node is asked %.0f times a second", all)
	}
	if n := toOthers.Load() + pings.Load(); n > 0 {
		t.Errorf("others are asked %d times although the held node answers", n)
	}
	silent.Store(true)
	alone.Store(cut)
	time.Sleep(heldEvery(nodes-1) + 2*answerTimeout) // a round, and the pause before it
	synctest.Wait()
	if dead := slices.Contains(a.Sight().Dead, named(held)); dead == cut {
		t.Errorf("taken for dead: %v", dead)
	}
}

// TestANodeThatHasLeftIsAsked has a speaker end as planned. Its node is switched off minutes later, and others are to
// know within half a minute, also if its Node was deleted. That costs each of them a question in 10 s, for an hour.
func TestANodeThatHasLeftIsAsked(t *testing.T) {
	for _, deleted := range []bool{false, true} {
		t.Run(fmt.Sprintf("its Node is deleted %v", deleted), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { nodeThatHasLeft(t, deleted) })
		})
	}
}

func nodeThatHasLeft(t *testing.T, deleted bool) {
	const nodes, left, minutes = 5, 1, 10
	var asked, others atomic.Int64
	var silent atomic.Bool
	leftAddr := processOf(left).Addr
	a := New(Options{Self: named(0), Hold: hold, Log: slog.New(slog.DiscardHandler), Changed: func() {},
		Probe: func(_ context.Context, addr netip.AddrPort) bool {
			if addr != leftAddr {
				others.Add(1)
				return true
			}
			asked.Add(1)
			if silent.Load() {
				time.Sleep(answerTimeout)
			}
			return !silent.Load()
		}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- a.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
	}()
	cluster := map[string][]netip.Addr{}
	for i := 1; i < nodes; i++ {
		a.Joined(processOf(i))
		cluster[named(i)] = nil
	}
	a.Set(cluster)
	if deleted {
		delete(cluster, named(left))
		a.Set(cluster)
	}
	a.Farewell(named(left), processOf(left).Born)
	a.Lost(processOf(left))
	time.Sleep(2 * hold)
	a.Set(cluster) // another Node changes
	asked.Store(0)
	time.Sleep(minutes * time.Minute)
	if n := asked.Load(); n < 6*minutes-1 || n > 6*minutes+1 || others.Load() > 0 {
		t.Errorf("in %d minutes it is asked %d times, others %d times", minutes, n, others.Load())
	}
	silent.Store(true)
	time.Sleep(2*followEvery + time.Second)
	synctest.Wait()
	if s := a.Sight(); !slices.Equal(s.Dead, []string{named(left)}) || s.Lost {
		t.Errorf("switched off: dead are %v, somebody is missed: %v", s.Dead, s.Lost)
	}
	asked.Store(0)
	time.Sleep(time.Hour)
	if n := asked.Load(); n > 0 {
		t.Errorf("a dead node is asked %d times", n)
	}
	if dead := a.Sight().Dead; deleted == (len(dead) > 0) {
		t.Errorf("an hour later dead are %v", dead)
	}
}
