package main

import (
	"fmt"
	"hash/maphash"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/partition"
)

// The model is a cluster of three nodes with one VIP on one LAN, in which time goes by in ticks. Each
// speaker runs the loop of the program with all its plans; the world around it is modelled: who hears
// whom, what is under way, what clients listen to, and which kernel knows which connection. See
// docs/design/model.md.

const (
	size = 3
	tick = 500 * time.Millisecond
)

// hooks are what the tests of the model change, to see that it finds what is wrong then.
type hooks struct {
	restartHold, returnHold time.Duration

	otherNetwork bool // the API server is on another network, not on the LAN of the nodes
	noMajority   bool // each node takes itself for the majority
	noYield      bool // no node hears what the Lease says
	deafTellers  bool // who renews the Lease does not hear others who do
	unconfirmed  bool // the proxy's confirmation counts before it is there
	noRescue     bool // proxies do not learn where a VIP was before
	announceOnce bool // owners never announce themselves again
	noHandover   bool // a node that stops or drains ends at once
	neverStale   bool // what a node said before it was lost counts as new
	noWitness    bool // a silent kernel buries its node, whoever else is silent
	heedsNobody  bool // who answers does not hear what others claim
}

func usualHooks() *hooks {
	return &hooks{restartHold: 5 * time.Second, returnHold: partition.ReturnHold}
}

// world is one state of the model.
type world struct {
	hooks *hooks
	Now   time.Time
	Nodes []*modelNode
	Cut   [size][size]bool // no packet goes from one node to the other
	NoAPI bool
	Said  lb.Witness // the Lease
	lease int        // its version
	// Points is the node to which clients send, plus 1.
	Points int
	// Knows says what each kernel knows of a connection that began on each node: 0 for nothing, 1 for all
	// of it, and 2 and more for the node to which it moves its packets.
	Knows [size][size]int
	Begun [size]bool // connections
	Seen  sightings
	order [size]int

	found []violation // since the last look
	story *strings.Builder
	told  [size]string
}

// begin has the invariants look from now on.
func (w *world) begin() {
	w.Seen = sightings{Start: w.Now, Touched: w.Now, Planned: true}
	for i, n := range w.Nodes {
		w.Seen.Was[i] = n.answers()
	}
	w.found = nil
}

func (w *world) index(name string) int { return int(name[len(name)-1] - 'a') }

// newWorld returns a cluster at rest that node a, b or c serves: 0, 1 or 2.
func newWorld(h *hooks, owner int) *world {
	w := &world{hooks: h, Now: time.Unix(1_000_000, 0).UTC(), order: [size]int{0, 1, 2}}
	for i := range size {
		n := &modelNode{w: w, I: i, Name: "node-" + string(rune('a'+i)), Up: true, Plugged: true, Target: -1}
		n.Programmed = i == owner
		w.Nodes = append(w.Nodes, n)
	}
	for _, n := range w.Nodes {
		n.boot()
	}
	for range 60 {
		w.pass()
	}
	for _, n := range w.Nodes {
		n.Programmed, n.Dirty = true, true
	}
	for range 60 {
		w.pass()
	}
	w.begin()
	return w
}

func (w *world) copy() *world {
	c := *w
	c.Nodes, c.found, c.story = make([]*modelNode, size), nil, nil
	for i, n := range w.Nodes {
		next := copied(n)
		next.w = &c
		c.Nodes[i] = &next
	}
	return &c
}

var modelSeed = maphash.MakeSeed()

func (w *world) digest() uint64 {
	d := digest{now: w.Now, nodes: w.Nodes, lease: strconv.Itoa(w.lease)}
	d.SetSeed(modelSeed)
	for _, n := range w.Nodes {
		d.parts(reflect.ValueOf(n).Elem())
	}
	for _, part := range []any{&w.Cut, &w.NoAPI, &w.Said, &w.Points, &w.Knows, &w.Begun, &w.Seen} {
		d.parts(reflect.ValueOf(part).Elem())
	}
	return d.Sum64()
}

// one reports whether packets go from a node to another one.
func (w *world) one(i, j int) bool {
	a, b := w.Nodes[i], w.Nodes[j]
	return a.Up && b.Up && a.Plugged && b.Plugged && !a.Isolated && !b.Isolated && !a.Dumb && !b.Deaf && !w.Cut[i][j]
}

// both reports whether they go back and forth.
func (w *world) both(i, j int) bool { return w.one(i, j) && w.one(j, i) }

// gossips reports whether gossip finds that both are there: it asks over others, too.
func (w *world) gossips(i, j int) bool {
	direct := func(i, j int) bool {
		a, b := w.Nodes[i], w.Nodes[j]
		return w.both(i, j) && a.awake() && b.awake() && !a.Filtered && !b.Filtered
	}
	if direct(i, j) {
		return true
	}
	for k := range w.Nodes {
		if k != i && k != j && direct(i, k) && direct(k, j) {
			return true
		}
	}
	return false
}

// served reports whether packets of clients reach the kernel of a node, and its answers them.
func (w *world) served(i int) bool {
	n := w.Nodes[i]
	return n.Up && !n.Frozen && n.Plugged && !n.Isolated && !n.Deaf && !n.Dumb
}

// asks reports whether the node reaches the API server, which is on the LAN of the nodes.
func (w *world) asks(n *modelNode) bool {
	return !w.NoAPI && !n.NoAPI && n.Up && !n.Frozen && (w.served(n.I) || w.hooks.otherNetwork)
}

// useLease has a node read and renew the Lease as it is due.
func (w *world) useLease(n *modelNode) {
	version := strconv.Itoa(w.lease)
	switch d := n.Wants; {
	case !d.Heed && !d.Tell:
		n.Lease.Rest()
	case !w.asks(n):
		if d.Tell && n.Lease.Due(w.Now, d) == 0 {
			n.Lease.Tried(w.Now)
		}
	case d.Heed:
		n.Lease.Saw(w.Now, d, w.Said, version)
		n.Asked, n.Dirty = w.Now, true
	case n.Lease.Due(w.Now, d) == 0:
		n.Lease.Saw(w.Now, d, w.Said, version)
		n.Asked, n.Dirty = w.Now, true
		if n.Lease.Turn(w.Now, d) == 0 {
			w.lease++
			w.Said = d.Says
			n.Lease.Tried(w.Now)
			n.Lease.Wrote(w.Now, d.Says, strconv.Itoa(w.lease))
		}
	}
}

// announce sends what is due of a node's announcements.
func (w *world) announce(n *modelNode) {
	for n.answers() && n.Wire.Sent < len(bursts) && !w.Now.Before(n.Wire.Began.Add(bursts[n.Wire.Sent])) {
		if n.Wire.Rival > 0 && !n.Wire.Owned {
			return
		}
		n.Wire.Sent++
		for j, other := range w.Nodes {
			if j != n.I && w.one(n.I, j) && other.answers() {
				other.Wire.Rival, other.Wire.RivalAt, other.Dirty = n.I+1, w.Now, true
				if other.Wire.Owned && other.Wire.Reclaim.IsZero() {
					other.Wire.Reclaim = w.Now.Add(tick)
				}
			}
		}
		if w.served(n.I) {
			w.turn(n.I)
		}
	}
}

// turn has clients send to a node from now on.
func (w *world) turn(i int) {
	if w.Points != i+1 {
		w.tell("clients turn to %s", w.Nodes[i].Name)
	}
	w.Points = i + 1
	if !w.Begun[i] {
		w.Begun[i], w.Knows[i][i] = true, 1
	}
	w.flows()
}

// listen lets a tick pass on the LAN.
func (w *world) listen(n *modelNode) {
	if !n.Wire.Answering {
		n.Wire.Rival, n.Wire.Reclaim = 0, time.Time{}
	}
	if n.Wire.Rival > 0 && w.Now.Sub(n.Wire.RivalAt) >= rivalLasts {
		n.Wire.Rival, n.Dirty = 0, true
	}
	if due := n.Wire.Reclaim; !due.IsZero() && !w.Now.Before(due) {
		n.Wire.Reclaim = time.Time{}
		if n.Wire.Owned && !w.hooks.announceOnce {
			n.Wire.Began, n.Wire.Sent = w.Now, 0
		}
	}
	w.announce(n)
}

// pass lets a tick pass: what is under way arrives, and everybody does what is due.
func (w *world) pass() {
	w.Now = w.Now.Add(tick)
	w.gossip()
	for _, i := range w.order {
		n := w.Nodes[i]
		n.Dirty = true
		for j := range n.Gossip.Lost {
			n.Gossip.Lost[j] = max(0, n.Gossip.Lost[j]-1)
		}
		if !n.awake() {
			continue
		}
		n.Known = n.Known || w.asks(n)
		n.probe()
		w.useLease(n)
		w.listen(n)
	}
	w.settle()
	for _, n := range w.Nodes {
		n.Late, n.Prompt, n.OneByOne = false, false, false
		if n.awake() && n.Phase.stopping && (n.quiet() || !w.Now.Before(n.StopsAt)) {
			w.leave(n)
		}
	}
	w.settle()
	w.ask()
	w.order = [size]int{0, 1, 2}
	w.check()
}

// settle has all speakers step and hear one another until nothing is left to do.
func (w *world) settle() {
	for range 16 {
		news := false
		for _, i := range w.order {
			w.Nodes[i].step()
		}
		for _, i := range w.order {
			news = w.Nodes[i].deliver() || news
		}
		if !news {
			return
		}
	}
	w.violate("Settles", "the speakers still tell one another news after 16 rounds")
}

// leave ends a speaker that has stopped as planned.
func (w *world) leave(n *modelNode) {
	w.tell("the speaker of %s has stopped", n.Name)
	for j, other := range w.Nodes {
		if j != n.I && other.awake() && other.Gossip.Members[n.I] && w.gossips(n.I, j) {
			n.exchange(other)
			process := other.process(n.I)
			other.Live.Farewell(process.Node, process.Born, w.Now)
			other.Live.Lost(process, w.Now)
			other.Gossip.Members[n.I], other.Dirty = false, true
		}
	}
	n.Running = false
	w.answersChanged(n)
}

// ask has clients ask for the VIP whose node is silent.
func (w *world) ask() {
	if w.Points > 0 && w.served(w.Points-1) {
		return
	}
	for _, n := range w.Nodes {
		if n.answers() && w.served(n.I) {
			w.turn(n.I)
			return
		}
	}
}

// flows sends a packet of each connection, and notes those that nobody knows.
func (w *world) flows() {
	for flow, begun := range w.Begun {
		if begun && w.Points > 0 && w.served(w.Points-1) && !w.carry(flow, w.Points-1) {
			w.Begun[flow], w.Knows[flow] = false, [size]int{}
			w.dropped(flow)
		}
	}
}

// carry reports whether a packet of a connection that reaches a node gets to one that knows it.
func (w *world) carry(flow, at int) bool {
	for hops := 0; hops <= size; hops++ {
		n := w.Nodes[at]
		known := w.Knows[flow][at]
		switch {
		case known == 1:
			return n.Programmed
		case known > 1:
		case hops > 0 || n.Target < 0 || n.Target == at:
			return false // a node does not move on what another has moved and it does not know
		default:
			known = n.Target + 2
			w.Knows[flow][at] = known
		}
		if at = known - 2; !w.both(n.I, at) {
			return true // the packet is lost, and is sent again
		}
	}
	return false
}

// tell adds a line to the story, if one is told.
func (w *world) tell(format string, args ...any) {
	if w.story != nil {
		fmt.Fprintf(w.story, "%8s  %s\n", w.Now.Sub(w.Seen.Start).Truncate(time.Millisecond), fmt.Sprintf(format, args...))
	}
}
