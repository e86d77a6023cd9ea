package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/speaker/partition"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// cut takes a node off everything, with or without its carrier.
func (r *rig) cut(name string, carrier bool) {
	n := r.nodes[name]
	n.set(func(n *fakeNode) { n.apiless, n.cutOff = true, true })
	n.carrier(carrier)
	n.changes.markAll()
	synctest.Wait()
	time.Sleep(500 * time.Millisecond)
	r.part(name)
}

// reconnect undoes it: first the API server is there, and the others after a while.
func (r *rig) reconnect(name string, later time.Duration) {
	n := r.nodes[name]
	n.set(func(n *fakeNode) { n.apiless, n.cutOff, n.unheard = false, false, true })
	n.carrier(true)
	n.changes.markAll()
	synctest.Wait()
	time.Sleep(later)
	n.set(func(n *fakeNode) { n.unheard = false })
	r.join()
}

// die ends a speaker and its node.
func (r *rig) die(name string) {
	r.nodes[name].set(func(n *fakeNode) { n.cutOff = true })
	r.crash(name)
}

// A node that was cut off and comes back takes no address that it did not own, neither while it is
// away nor when it hears the API server before the others.
func TestContract11AReturningNodeTakesNothing(t *testing.T) {
	type returning struct {
		carrier bool
		away    time.Duration
		role    int
		vip     netip.Addr
	}
	var all []returning
	for _, carrier := range []bool{false, true} { // of a link, of a switch port
		for _, away := range []time.Duration{time.Second, 8 * time.Second, 35 * time.Second} {
			for _, role := range []int{1, 2} {
				for _, vip := range []netip.Addr{vip1, vip6} {
					all = append(all, returning{carrier, away, role, vip})
				}
			}
		}
	}
	for _, c := range all {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			inRig(t, func(r *rig) {
				r.start(w177, w178, w179)
				r.service(nginx, c.vip)
				time.Sleep(time.Minute)
				order := ranked(c.vip)
				lost := order[c.role]
				r.wire.forget()
				r.cut(lost, c.carrier)
				time.Sleep(c.away)
				r.reconnect(lost, 4*time.Second)
				time.Sleep(time.Minute)
				if r.wire.answered(lost, c.vip) {
					t.Errorf("%s answered for an address that it never owned", lost)
				}
				r.wantAnswers("in the end", c.vip, order[0])
			})
		})
	}
}

// A node that is cut off finds the others dead one by one. What it takes while it still sees a
// majority it gives up when it sees none.
func TestContract11WhatWasTakenFromTheFirstIsGivenUp(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute)
		order := ranked(vip1)
		lost := r.nodes[order[1]]
		lost.set(func(n *fakeNode) {
			n.apiless, n.cutOff = true, true
			n.sees = func(other string) bool { return other != order[0] }
		})
		lost.changes.markAll()
		synctest.Wait()
		r.wantAnswers("when the first is found dead", vip1, sortedNames(order[0], order[1])...)
		time.Sleep(500 * time.Millisecond)
		r.part(order[1])
		r.wantAnswers("when all are", vip1, order[0])
		time.Sleep(8 * time.Second)
		r.wire.forget()
		r.reconnect(order[1], 4*time.Second)
		time.Sleep(time.Minute)
		if r.wire.answered(order[1], vip1) {
			t.Error("it answered for an address that it did not own before")
		}
		r.wantAnswers("in the end", vip1, order[0])
	})
}

// Of two nodes the first by name counts as a majority. If it is the one that is cut off, it takes
// nothing either; if the other one dies, it takes over at once, as the API server answers it.
func TestContract11TheFirstOfTwoTakesNothingWhileCutOff(t *testing.T) {
	for name, cut := range map[string]bool{"cut off": true, "the other one dies": false} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(r *rig) {
				delete(r.nodes, w179)
				r.api.nodes.Delete(w179)
				r.start(w177, w178)
				vip := vip1
				for plan.Winner(vip, []string{w177, w178}) != w178 {
					vip = vip.Next()
				}
				r.service(nginx, vip)
				time.Sleep(time.Minute)
				r.wantAnswers("together", vip, w178)
				r.wire.forget()
				if !cut {
					r.die(w178)
					time.Sleep(time.Second)
					r.wantAnswers("the other one is dead", vip, w177)
					return
				}
				r.cut(w177, true)
				time.Sleep(8 * time.Second)
				r.wantAnswers("while it is away", vip, w178)
				r.reconnect(w177, 4*time.Second)
				time.Sleep(time.Minute)
				if r.wire.answered(w177, vip) {
					t.Error("it answered for an address that it never owned")
				}
				r.wantAnswers("in the end", vip, w178)
			})
		})
	}
}

// A node whose gossip alone is cut does not take what the others answer for, although the API
// server answers it: their kernels are there.
func TestContract11ANodeWithoutGossipTakesNothing(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute)
		order := ranked(vip1)
		r.nodes[order[1]].set(func(n *fakeNode) { n.unheard = true })
		r.part(order[1])
		time.Sleep(3 * time.Second)
		r.nodes[order[1]].set(func(n *fakeNode) { n.unheard = false })
		r.nodes[order[1]].changes.markAll()
		time.Sleep(time.Minute)
		r.join()
		time.Sleep(time.Minute)
		if r.wire.answered(order[1], vip1) {
			t.Error("it answered")
		}
		r.wantAnswers("in the end", vip1, order[0])
	})
}

// The owner that lost its carrier does not take its address back from its heir.
func TestContract11AReturningOwnerHearsItsHeir(t *testing.T) {
	for _, vip := range []netip.Addr{vip1, vip6} {
		t.Run(vip.String(), func(t *testing.T) {
			inRig(t, func(r *rig) {
				r.start(w177, w178, w179)
				r.service(nginx, vip)
				time.Sleep(time.Minute)
				order := ranked(vip)
				r.cut(order[0], false)
				r.wantAnswers("while it is away", vip, order[1])
				time.Sleep(8 * time.Second)
				r.wire.forget()
				round := r.nodes[order[1]].round(vip)
				r.reconnect(order[0], time.Second)
				time.Sleep(time.Minute)
				if r.wire.answered(order[0], vip) {
					t.Error("it answered although its heir did")
				}
				r.wantAnswers("in the end", vip, order[1])
				if r.nodes[order[1]].round(vip) == round {
					t.Error("the heir did not announce itself again when the other came back")
				}
			})
		})
	}
}

func (n *fakeNode) round(vip netip.Addr) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.rounds[vip]
}

// A process that was frozen answers for nothing before it has heard another speaker, and its heir
// goes on.
func TestContract11AFrozenProcessFindsOutFirst(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute)
		order := ranked(vip1)
		owner, heir := r.nodes[order[0]], r.nodes[order[1]]
		owner.cancel()
		if err := <-owner.done; err != nil {
			t.Error(err)
		}
		for _, name := range order[1:] { // they find it dead
			r.nodes[name].set(func(n *fakeNode) { n.sees = func(other string) bool { return other != order[0] } })
		}
		owner.set(func(n *fakeNode) { n.sees = func(other string) bool { return other == order[0] } })
		heir.changes.markAll()
		synctest.Wait()
		r.wantAnswers("while it is frozen", vip1, sortedNames(order[0], order[1])...)
		time.Sleep(8 * time.Second)
		r.wire.forget()
		owner.set(func(n *fakeNode) { n.wakes, n.woke, n.unheard = n.wakes+1, time.Now(), true })
		r.thaw(order[0])
		if !owner.isMute() {
			t.Error("it has woken up and answers")
		}
		r.join()
		time.Sleep(partition.MuteFor)
		synctest.Wait()
		if r.wire.answered(order[0], vip1) || owner.isMute() {
			t.Errorf("it answers for what its heir has: %v, mute %v", r.wire.answered(order[0], vip1), owner.isMute())
		}
		time.Sleep(time.Minute)
		r.wantAnswers("in the end", vip1, order[1])
	})
}

// thaw has the loop of a node go on that was ended.
func (r *rig) thaw(name string) {
	n := r.nodes[name]
	ctx, cancel := context.WithCancel(context.Background())
	n.set(func(n *fakeNode) { n.cancel = cancel })
	go func() { n.done <- n.runner.Run(ctx) }()
	n.changes.markAll()
	synctest.Wait()
}

// Where nobody is to be heard, a node that was frozen goes on with what it owned.
func TestAFrozenProcessThatIsAloneGoesOn(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		r.die(order[1])
		r.die(order[2])
		time.Sleep(time.Minute)
		owner := r.nodes[order[0]]
		owner.set(func(n *fakeNode) { n.wakes, n.woke, n.apiless = n.wakes+1, time.Now(), true })
		owner.changes.markAll()
		synctest.Wait()
		r.wantAnswers("it finds out", vip1)
		time.Sleep(partition.MuteFor)
		synctest.Wait()
		r.wantAnswers("it has heard nobody", vip1, order[0])
	})
}

// The last node takes what it did not own after a while, even if nobody at all is to be heard.
func TestTheLastNodeTakesOverWithoutTheAPIServer(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute)
		order := ranked(vip1)
		last := r.nodes[order[2]]
		last.set(func(n *fakeNode) { n.apiless = true })
		r.die(order[1])
		r.die(order[0])
		time.Sleep(4*partition.ReturnHold - time.Second)
		r.wantAnswers("it may be cut off", vip1)
		time.Sleep(time.Second)
		synctest.Wait()
		r.wantAnswers("it has waited for long enough", vip1, order[2])
	})
}

func (n *fakeNode) isMute() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.muted
}

// TestNodesThatRoutesWaitFor: the routes of a node that comes back wait for the nodes that it saw
// before it was cut off, as gossip finds them again later than routers do. They never wait for one
// that was dead before.
func TestNodesThatRoutesWaitFor(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		want := func(what string, names ...string) {
			t.Helper()
			var got []string
			r.nodes[w177].set(func(n *fakeNode) { got = n.awaited })
			if !slices.Equal(got, names) {
				t.Errorf("%s: routes wait for %v, want %v", what, got, names)
			}
		}
		time.Sleep(time.Minute)
		want("together", w178, w179)
		r.cut(w177, false)
		time.Sleep(8 * time.Second)
		r.reconnect(w177, 0)
		want("just back", w178, w179)
		time.Sleep(time.Minute)
		want("back for long", w178, w179)
		r.die(w179)
		time.Sleep(time.Minute)
		want("a node is dead", w178)
		r.cut(w177, false)
		time.Sleep(8 * time.Second)
		want("away", w178)
		r.reconnect(w177, time.Second)
		want("just back, with another node dead", w178)
	})
}
