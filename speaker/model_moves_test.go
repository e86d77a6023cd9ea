package main

import (
	"fmt"
	"time"
)

// move is one thing that happens to the cluster: a fault, the end of one, a planned change, or an
// unusual way in which the next tick goes. Its name is what a story is replayed by.
type move struct {
	name    string
	may     func(*world) bool
	do      func(*world)
	planned bool // it is a change that somebody makes, or the end of a speaker: no connection may suffer
	timing  bool // it is no fault
}

// moves are all that can happen.
var moves = func() (all []move) {
	for i := range size {
		all = append(all, ofNode(i)...)
		for j := range size {
			if i != j {
				all = append(all, ofPair(i, j)...)
			}
		}
	}
	all = append(all,
		move{name: "the API server goes away", may: func(w *world) bool { return !w.NoAPI },
			do: func(w *world) { w.NoAPI = true }},
		move{name: "the API server is back", may: func(w *world) bool { return w.NoAPI },
			do: func(w *world) { w.NoAPI = false }},
		move{name: "the last node is the first to act", timing: true, may: always,
			do: func(w *world) { w.order = [size]int{2, 1, 0} }},
		move{name: "the second node is the first to act", timing: true, may: always,
			do: func(w *world) { w.order = [size]int{1, 2, 0} }})
	return all
}()

func always(*world) bool { return true }

// on makes a move of a node.
func on(i int, text string, may func(*modelNode) bool, do func(*world, *modelNode)) move {
	return move{name: fmt.Sprintf("node-%c %s", 'a'+i, text), may: func(w *world) bool { return may(w.Nodes[i]) },
		do: func(w *world) { do(w, w.Nodes[i]) }}
}

// ofNode are the moves of one node.
func ofNode(i int) (all []move) {
	for _, f := range []struct {
		is, isNot string
		of        func(*modelNode) *bool
		broken    bool
	}{
		{"loses its carrier", "has a carrier again", func(n *modelNode) *bool { return &n.Plugged }, false},
		{"is cut off by its switch", "is let in by its switch", func(n *modelNode) *bool { return &n.Isolated }, true},
		{"hears no packet", "hears packets again", func(n *modelNode) *bool { return &n.Deaf }, true},
		{"sends no packet", "sends packets again", func(n *modelNode) *bool { return &n.Dumb }, true},
		{"has its gossip filtered", "has its gossip let through", func(n *modelNode) *bool { return &n.Filtered }, true},
		{"loses the API server", "reaches the API server again", func(n *modelNode) *bool { return &n.NoAPI }, true},
	} {
		set := func(to bool) func(*world, *modelNode) {
			return func(_ *world, n *modelNode) { *f.of(n) = to }
		}
		all = append(all,
			on(i, f.is, func(n *modelNode) bool { return n.Up && *f.of(n) != f.broken }, set(f.broken)),
			on(i, f.isNot, func(n *modelNode) bool { return n.Up && *f.of(n) == f.broken }, set(!f.broken)))
	}
	all = append(all,
		on(i, "loses its rules", func(n *modelNode) bool { return n.Up && n.Programmed },
			func(_ *world, n *modelNode) { n.Programmed = false }),
		on(i, "has its rules again", func(n *modelNode) bool { return n.Up && !n.Programmed },
			func(_ *world, n *modelNode) { n.Programmed = true }),
		on(i, "crashes", func(n *modelNode) bool { return n.Up }, func(w *world, n *modelNode) {
			n.Up, n.Running, n.Frozen, n.Hung = false, false, false, false
		}),
		on(i, "starts up", func(n *modelNode) bool { return !n.Up }, func(w *world, n *modelNode) {
			n.Up, n.Target = true, -1
			n.Proxy.Previous = nil
			for flow := range w.Knows {
				w.Knows[flow][i] = 0
			}
			n.boot()
		}),
		on(i, "freezes", func(n *modelNode) bool { return n.Up && !n.Frozen && !n.Hung },
			func(_ *world, n *modelNode) { n.Frozen = true }),
		on(i, "thaws", func(n *modelNode) bool { return n.Frozen },
			func(w *world, n *modelNode) { n.Frozen = false; n.wake() }),
		on(i, "has a speaker that hangs", func(n *modelNode) bool { return n.awake() },
			func(_ *world, n *modelNode) { n.Hung = true }),
		on(i, "has a speaker that goes on", func(n *modelNode) bool { return n.Hung && !n.Frozen },
			func(_ *world, n *modelNode) { n.Hung = false; n.wake() }))
	planned := []move{
		on(i, "loses its speaker", func(n *modelNode) bool { return n.awake() }, func(w *world, n *modelNode) {
			if n.answers() && w.Seen.Planned {
				w.Seen.Ended[i] = w.Now
			}
			n.Running = false
		}),
		on(i, "starts its speaker", func(n *modelNode) bool { return n.Up && !n.Frozen && !n.Running },
			func(w *world, n *modelNode) { n.boot() }),
		on(i, "stops its speaker", func(n *modelNode) bool { return n.awake() && !n.Phase.stopping },
			func(w *world, n *modelNode) {
				n.Phase.stopping, n.Phase.restarting, n.StopsAt = true, true, w.Now.Add(5*time.Second)
				if w.hooks.noHandover {
					w.leave(n)
				}
			}),
		on(i, "drains", func(n *modelNode) bool { return !n.Draining && !n.w.NoAPI && !n.NoAPI },
			func(w *world, n *modelNode) {
				n.Draining = true
				if w.hooks.noHandover {
					n.Wire.Answering = false
					w.answersChanged(n)
				}
			}),
		on(i, "drains no more", func(n *modelNode) bool { return n.Draining && !n.w.NoAPI && !n.NoAPI },
			func(_ *world, n *modelNode) { n.Draining = false }),
	}
	for _, m := range planned {
		m.planned = true
		all = append(all, m)
	}
	late := on(i, "gossips half a second late", func(n *modelNode) bool { return n.awake() },
		func(_ *world, n *modelNode) { n.Late = true })
	prompt := on(i, "meets others at once", func(n *modelNode) bool { return n.awake() },
		func(_ *world, n *modelNode) { n.Prompt = true })
	slow := on(i, "loses others one by one", func(n *modelNode) bool { return n.awake() },
		func(_ *world, n *modelNode) { n.OneByOne = true })
	late.timing, prompt.timing, slow.timing = true, true, true
	return append(all, late, prompt, slow)
}

// wake has the process find out that it was frozen.
func (n *modelNode) wake() { n.Wire.Wakes, n.Woke, n.Dirty = n.Wire.Wakes+1, n.w.Now, true }

// ofPair are the moves of what goes from one node to another one.
func ofPair(i, j int) (all []move) {
	pair := fmt.Sprintf("node-%c and node-%c", 'a'+i, 'a'+j)
	way := fmt.Sprintf("packets from node-%c to node-%c", 'a'+i, 'a'+j)
	set := func(to bool, both bool) func(*world) {
		return func(w *world) {
			if w.Cut[i][j] = to; both {
				w.Cut[j][i] = to
			}
		}
	}
	if i < j {
		all = append(all,
			move{name: pair + " are parted", may: func(w *world) bool { return !w.Cut[i][j] }, do: set(true, true)},
			move{name: pair + " are together again", may: func(w *world) bool { return w.Cut[i][j] && w.Cut[j][i] },
				do: set(false, true)})
	}
	return append(all,
		move{name: way + " are lost", may: func(w *world) bool { return !w.Cut[i][j] && !w.Cut[j][i] },
			do: set(true, false)},
		move{name: way + " arrive again", may: func(w *world) bool { return w.Cut[i][j] && !w.Cut[j][i] },
			do: set(false, false)},
		move{name: fmt.Sprintf("node-%c does not hear node-%c's news for 2 s", 'a'+j, 'a'+i), timing: true,
			may: func(w *world) bool { return w.Nodes[i].awake() && w.Nodes[i].Gossip.Lost[j] == 0 },
			do:  func(w *world) { w.Nodes[i].Gossip.Lost[j] = 4 }})
}

// play makes a move.
func (w *world) play(m move) {
	w.tell("* %s", m.name)
	was := w.Seen.Planned
	if !m.timing {
		w.Seen.Touched, w.Seen.Planned = w.Now, was && m.planned
		if !m.planned {
			w.Seen.Ended = [size]time.Time{}
		}
	}
	m.do(w)
	for _, n := range w.Nodes {
		n.Dirty = true
		w.answersChanged(n)
	}
}
