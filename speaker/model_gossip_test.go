package main

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// gossiping is what a process knows by gossip. How memberlist finds out who is there and passes on what
// they say is modelled; what follows is decided by packages liveness and plan.
type gossiping struct {
	Pages   [size]*modelPage
	Members [size]bool   // who takes part, for this node
	Borns   [size]uint64 // the process of each member
	Missed  [size]int    // for how many ticks gossip has not reached a member
	Called  [size]int    // for how many ticks one that takes part has not been met
	Owed    [size]bool   // members that have not heard the last change
	Lost    [size]int    // ticks until the next exchange of states has it, as the packet with it is lost
	Joined  bool
	Met     time.Time
	Seeks   time.Time
	Calling time.Time // since when a new process calls others, as it knows where they are
	Past    *modelPage
}

// modelPage is what a process of a node has said of the VIP last, as far as it was heard.
type modelPage struct {
	Point  plan.Point
	Claim  *plan.Claim
	Before *modelPage // of the last process before that announced
}

func (p *modelPage) announces() bool { return p != nil && p.Claim != nil && p.Claim.Announces() }

// life returns what the process born then has announced.
func (p *modelPage) life(born uint64) *plan.Claim {
	for ; p != nil && born != 0; p = p.Before {
		if p.Point.Born == born && p.announces() {
			return p.Claim
		}
	}
	return nil
}

type modelGossip struct{ *modelNode }

func (g modelGossip) Begin(all map[netip.Addr]*plan.Claim) { g.Update(all) }
func (g modelGossip) SetPeers(map[string][]netip.Addr)     {}
func (g modelGossip) Joined() bool                         { return g.Gossip.Joined }
func (g modelGossip) Met() time.Time                       { return g.Gossip.Met }
func (g modelGossip) Trouble() string                      { return "" }
func (g modelGossip) SetMACs([]string)                     {}
func (g modelGossip) MACs() map[string]string              { return nil }
func (g modelGossip) Seek(since time.Time)                 { g.Gossip.Seeks = since }

func (g modelGossip) Claims(netip.Addr, plan.Sight) map[string]plan.Claim { return g.claims() }

func (g modelGossip) Restarted(netip.Addr, plan.Sight) bool {
	previous := g.Live.Previous(g.w.Now)
	return previous != 0 && g.Gossip.Past != nil && g.Gossip.Past.Point.Born == previous
}

func (g modelGossip) Update(changes map[netip.Addr]*plan.Claim) {
	claim, ok := changes[modelVIP]
	if !ok || g.Said == nil && claim == nil || g.Said != nil && claim != nil && *g.Said == *claim {
		return
	}
	if g.seq, g.Said = g.seq+1, nil; claim != nil {
		said := *claim
		g.Said = &said
	}
	for j := range g.Gossip.Owed {
		g.Gossip.Owed[j] = j != g.I
	}
}

// page returns what the node says itself.
func (n *modelNode) page() *modelPage {
	at := plan.Point{Born: n.Born}
	if n.seq > seqs*uint64(n.I+1) {
		at.Seq = n.seq
	}
	return &modelPage{Point: at, Claim: n.Said}
}

// hear takes in what a node has said, by whomever it was told.
func (n *modelNode) hear(of int, p *modelPage) {
	if of == n.I {
		n.recall(p)
		return
	}
	known := n.Gossip.Pages[of]
	next := &modelPage{Point: p.Point, Claim: p.Claim}
	switch {
	case known == nil:
	case known.Point.Born > p.Point.Born, known.Point.Born == p.Point.Born && known.Point.Seq >= p.Point.Seq:
		return
	case known.Point.Born == p.Point.Born:
		next.Before = known.Before
	default:
		next.Before = &modelPage{Point: known.Point, Claim: known.Claim}
		if known.Before != nil && !known.announces() {
			next.Before = known.Before
		}
	}
	n.Gossip.Pages[of], n.Dirty = next, true
}

// recall takes in what an earlier process of the node has said.
func (n *modelNode) recall(p *modelPage) {
	if past := n.Gossip.Past; p.Point.Born >= n.Born || past != nil && p.Point.Born <= past.Point.Born {
		return
	}
	n.Live.Recalled(p.Point.Born, n.w.Now)
	if p.announces() {
		n.Gossip.Past = &modelPage{Point: p.Point, Claim: p.Claim}
	}
	n.Dirty = true
}

// process describes the process of a member.
func (n *modelNode) process(of int) plan.Process {
	p := plan.Process{Node: n.w.Nodes[of].Name, Addr: netip.AddrPortFrom(addressOf(of), 7946), Born: n.Gossip.Borns[of]}
	if page := n.Gossip.Pages[of]; page != nil {
		p.Heard, p.Announces = page.Point, page.announces()
	}
	return p
}

// exchange has a node tell another one all that it knows of those that count.
func (n *modelNode) exchange(to *modelNode) {
	to.hear(n.I, n.page())
	n.Gossip.Owed[to.I], n.Gossip.Lost[to.I] = false, 0
	for node, standing := range n.Live.Standings(n.w.Now) {
		of := n.w.index(node)
		p := n.Gossip.Pages[of]
		if p == nil || of == to.I && !p.announces() && p.Before == nil {
			continue
		}
		for life := p.Before; life != nil; life = life.Before {
			if life.Point.Born == standing.Held {
				to.hear(of, life)
			}
		}
		if standing.Live || p.Point.Born == standing.Held {
			to.hear(of, p)
		}
	}
	to.Gossip.Joined = true
	to.Dirty = true
}

// gossip lets half a second of gossip pass: who is there, and calls of those who seek others.
func (w *world) gossip() {
	for _, n := range w.Nodes {
		if !n.awake() {
			continue
		}
		lost := false
		for j, other := range w.Nodes {
			g := &n.Gossip
			together := j != n.I && n.awake() && w.gossips(n.I, j)
			switch {
			case j == n.I || n.Late || other.Late:
			case g.Members[j] && !together && lost && n.OneByOne:
			case g.Members[j] && !together:
				lost = true
				if g.Missed[j]++; g.Missed[j] >= noticed {
					g.Members[j], g.Missed[j] = false, 0
					n.Live.Lost(n.process(j), n.w.Now)
					n.Dirty = true
				}
			case together && (!g.Members[j] || g.Borns[j] != other.Born):
				if g.Called[j]++; g.Called[j] > calls || n.Prompt || other.Prompt {
					n.meet(other)
					other.meet(n)
				}
			default:
				g.Missed[j], g.Called[j] = 0, 0
			}
		}
	}
	for _, n := range w.Nodes {
		if n.awake() && !n.Late {
			n.call()
		}
	}
}

// noticed is after how many ticks gossip has lost a node for sure: see package members.
const noticed = 1

// calls is for how many ticks two nodes that reach one another again do not know it: calls are 0.2 s
// apart.
const calls = 1

// meet has a node hear of a process that takes part, and of all that it knows.
func (n *modelNode) meet(other *modelNode) {
	j := other.I
	g := &n.Gossip
	if g.Members[j] && g.Borns[j] == other.Born {
		return
	}
	g.Members[j], g.Borns[j], g.Missed[j], g.Called[j], n.Dirty = true, other.Born, 0, 0, true
	n.Live.Joined(n.process(j), n.w.Now)
	other.exchange(n)
	g.Met, n.w.Seen.Apart[n.I] = n.w.Now, false
}

// call exchanges states with the members while the node seeks one, with those that have missed a
// change, and finds out that there is nobody to meet.
func (n *modelNode) call() {
	g := &n.Gossip
	if g.Calling.IsZero() && n.Known {
		g.Calling = n.w.Now
	}
	alone, accounted := []string{n.Name}, []string{n.Name}
	for j, other := range n.w.Nodes {
		if j == n.I {
			continue
		}
		alone = append(alone, other.Name)
		switch {
		case g.Members[j] && n.w.gossips(n.I, j):
			if !g.Seeks.IsZero() {
				other.exchange(n)
				n.exchange(other)
				g.Met, n.w.Seen.Apart[n.I] = n.w.Now, false
			}
			return
		case other.Up && !other.Frozen && !other.Running && n.w.both(n.I, j):
			accounted = append(accounted, other.Name)
		}
	}
	slices.Sort(alone)
	slices.Sort(accounted)
	wait := n.w.hooks.returnHold
	most := plan.QuorumOf(n.Name, accounted, alone).Majority
	if most {
		wait = 2 * time.Second
	}
	waited := !g.Calling.IsZero() && n.w.Now.Sub(g.Calling) >= wait && !n.w.hearsAny(n.I) // the last call reaches nobody
	if !g.Joined && waited || g.Joined && !g.Seeks.IsZero() && most {
		g.Joined, g.Met, n.Dirty = true, n.w.Now, true
	}
}

// deliver passes on what the node has said, as far as packets arrive.
func (n *modelNode) deliver() (news bool) {
	for j, other := range n.w.Nodes {
		g := &n.Gossip
		if !g.Owed[j] || !n.awake() || !other.awake() || !g.Members[j] || n.Late || other.Late ||
			!n.w.gossips(n.I, j) || g.Lost[j] > 0 {
			continue
		}
		g.Owed[j] = false
		other.hear(n.I, n.page())
		news = true
	}
	return news
}

// probe has the node ask the kernels of those that gossip has lost.
func (n *modelNode) probe() {
	var answers []liveness.Answer
	for _, p := range n.Live.Probes(n.w.Now) {
		j := n.w.index(p.Node)
		other := n.w.Nodes[j]
		witness := n.Gossip.Members[j] // and its answer buries nobody
		answers = append(answers, liveness.Answer{Probe: p,
			Answered: other.Up && !other.Frozen && n.w.both(n.I, j) || witness && n.w.hooks.noWitness})
	}
	if len(answers) > 0 {
		n.Dirty = true
		n.Live.Probed(answers, n.w.Now)
	}
	n.Dirty = n.Live.Expire(n.w.Now) || n.Dirty
}
