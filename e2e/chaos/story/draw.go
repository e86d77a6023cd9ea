package story

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Lengths, for each kind of round.
const (
	calmEvents  = 4
	stormLength = 6 * time.Second
	// mostFaults is how many faults a storm has at most. A third of the storms have a single one, which tells more
	// of what it does.
	mostFaults = 4
	// outage is how much longer than others a fault is that takes one node away alone: others take over in the midst of
	// it, on a busy machine too, and are seen to serve.
	outage = 15 * time.Second
	// kept is how many Services of churn there are at most.
	kept = 6
)

type generator struct {
	rand *rand.Rand
	// variant draws which of some like faults one is. A new variant leaves the other events of a seed as they are, unless
	// it touches another thing than the fault in whose place it is drawn: a storm then draws another fault instead.
	variant *rand.Rand
	cast    Cast
	last    int
	named   int      // Services of churn so far
	there   []string // those that were not removed
	idle    bool     // the pods of the idle Service are not ready
}

func pick[T any](r *rand.Rand, from []T) T { return from[r.IntN(len(from))] }

// between returns a time from least to most, in steps of 100 ms.
func (g *generator) between(least, most time.Duration) time.Duration {
	const step = 100 * time.Millisecond
	return least + step*time.Duration(g.rand.Int64N(int64((most-least)/step)+1))
}

// round draws a round. The number says which kind, and events get the numbers that follow those of the round before.
func (g *generator) round(n int) Round {
	r := Round{Number: n, Calm: n%2 == 1}
	if r.Calm {
		r.Events = g.calm()
	} else {
		r.Events = g.storm()
	}
	slices.SortStableFunc(r.Events, func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	for i := range r.Events {
		g.last++
		r.Events[i].ID = g.last
	}
	return r
}

// calm draws planned changes, in an order; a runner does one after the other, with the churn between them.
func (g *generator) calm() []Event {
	kinds := []func() Event{
		func() Event {
			return Event{Kind: DrainLabel, Node: pick(g.rand, g.cast.Nodes), For: g.between(1e9, 2e9)}
		},
		func() Event {
			return Event{Kind: DrainTaint, Node: pick(g.rand, g.cast.Nodes), For: g.between(1e9, 2e9)}
		},
		func() Event { return g.program(Stop) },
		func() Event { return g.program(Kill) },
		func() Event { return g.program(Kill) },
		func() Event {
			return Event{Kind: RollPod, Service: pick(g.rand, g.cast.Services), For: 2 * time.Second}
		},
		func() Event { return Event{Kind: StopAPI, For: g.between(1e9, 3e9)} },
		func() Event { return Event{Kind: FreezeAPI, For: g.between(1e9, 3e9)} },
		func() Event { return Event{Kind: FreezeEtcd, For: g.between(1e9, 3e9)} },
		func() Event { return Event{Kind: MalformedARP} },
		func() Event { return Event{Kind: EditPool, For: time.Second} },
		func() Event { return g.hung() },
		func() Event { return g.clock(ShiftClock) },
		func() Event { return Event{Kind: SlowAPI, For: g.between(1e9, 4e9)} },
		func() Event { return Event{Kind: AddPeer, For: g.between(1e9, 2e9)} },
		func() Event { return Event{Kind: ForeignRules, Node: pick(g.rand, g.cast.Nodes)} },
	}
	var events []Event
	at := time.Duration(0)
	add := func(e Event) {
		e.At = at
		at += e.For + 500*time.Millisecond
		events = append(events, e)
	}
	for range calmEvents {
		add(g.churn())
		add(pick(g.rand, kinds)())
	}
	return events
}

// program draws a program that ends and is back.
func (g *generator) program(kind Kind) Event {
	programs := g.cast.Programs
	if kind == Stop {
		programs = slices.Concat(programs, g.cast.Graceful)
	}
	return g.vary(Event{Kind: kind, Node: pick(g.rand, g.cast.Nodes), Program: pick(g.rand, programs),
		For: g.between(3e8, 1e9)})
}

// vary draws which of some like faults an event is, and takes the node off an event of the controller.
func (g *generator) vary(e Event) Event {
	if of := variants[e.Kind]; of != nil {
		e.Kind = pick(g.variant, of)
	}
	switch e.Kind {
	case NetlinkErrors:
		e.Program = "proxy"
	case KillRelay:
		e.Program = "relay"
	case StopLong: // for longer than five seconds, for which addresses are kept
		e.Program, e.For = "speaker", 6*time.Second+time.Duration(g.variant.IntN(20))*100*time.Millisecond
	}
	return onItsNode(e)
}

// clocksBy are what clocks are set wrong by: certificates are not valid yet, or tokens no longer, at the ends.
var clocksBy = []time.Duration{-48 * time.Hour, -30 * time.Minute, -10 * time.Second, 10 * time.Second,
	30 * time.Minute, 48 * time.Hour}

// clock draws a wall clock that is wrong for a while: in one of five cases the controller's, or else a node's.
func (g *generator) clock(kind Kind) Event {
	e := Event{Kind: kind, Node: pick(g.rand, g.cast.Nodes), By: pick(g.rand, clocksBy), For: g.between(1e9, 3e9)}
	if g.rand.IntN(5) == 0 {
		e.Program = "controller"
	}
	return onItsNode(e)
}

// onItsNode takes the node off an event of the controller, which runs where it runs.
func onItsNode(e Event) Event {
	if e.Program == "controller" {
		e.Node = ""
	}
	return e
}

// hung draws proxies that hang while a Service comes.
func (g *generator) hung() Event {
	nodes := slices.Clone(g.cast.Nodes)
	g.rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
	nodes = nodes[:max(1, len(nodes)/2)]
	slices.Sort(nodes)
	return Event{Kind: HungProxy, Nodes: nodes, Service: g.newService(), For: 3 * time.Second}
}

func (g *generator) newService() string {
	g.named++
	name := fmt.Sprintf("churn-%d", g.named)
	g.there = append(g.there, name)
	return name
}

// churn draws one change of Services or endpoints that others need not notice.
func (g *generator) churn() Event {
	switch n := g.rand.IntN(11); {
	case n == 10:
		return Event{Kind: Flood}
	case len(g.there) > 0 && (n < 3 || len(g.there) >= kept):
		at := g.rand.IntN(len(g.there))
		name := g.there[at]
		g.there = slices.Delete(g.there, at, at+1)
		return Event{Kind: RemoveService, Service: name}
	case n < 6:
		return Event{Kind: AddService, Service: g.newService()}
	case n < 8:
		g.idle = !g.idle
		if g.idle {
			return Event{Kind: Unready, Service: g.cast.Idle}
		}
		return Event{Kind: Ready, Service: g.cast.Idle}
	default:
		return Event{Kind: Burst, Service: g.cast.Idle}
	}
}

// storm draws faults that overlap, no two of the same thing at the same time, and churn.
func (g *generator) storm() []Event {
	n := 1
	if g.rand.IntN(3) > 0 {
		n = 2 + g.rand.IntN(mostFaults-1)
	}
	var events []Event
	for len(events) < n {
		e := g.fault()
		if !slices.ContainsFunc(events, func(o Event) bool { return touches(e) == touches(o) }) {
			events = append(events, e)
		}
	}
	if n == 1 && events[0].Kind.TakesNode() {
		events[0].For += outage
	}
	at := time.Duration(0)
	for range g.rand.IntN(4) { // in its order: what is removed was added before
		e := g.churn()
		at += g.between(0, stormLength/3)
		e.At = at
		events = append(events, e)
	}
	return events
}

// variants are faults in whose place others are drawn as well.
var variants = map[Kind][]Kind{
	Deaf: {Deaf, Mute}, DeleteRules: {DeleteRules, ForeignElements}, FreezeSpeaker: {FreezeSpeaker, FreezeRelay},
	FullDisk: {FullDisk, FillDisk}, NoDescriptors: {NoDescriptors, NetlinkErrors}, Stop: {Stop, Stop, StopLong},
	StormEtcd: {StormEtcd, KillEtcd}, StormKill: {StormKill, StormKill, KillRelay}, StormSlowAPI: {StormSlowAPI, SlowEtcd},
}

// fault draws one fault.
func (g *generator) fault() Event {
	kinds := []Kind{Cut, Cut, Unplug, Crash, FreezeNode, FreezeSpeaker, Lossy, DropGossipIn, DropGossipOut, DropGossip,
		Deaf, DeleteRules, FlushConntrack, Spoof, SpoofOn, ConntrackFull, NoDescriptors, FullDisk, RestoreEtcd, LeaveNode,
		StormStop, StormKill, StormKill, StormAPI, StormEtcd, StormClock, StormSlowAPI}
	if g.cast.Router {
		kinds = append(kinds, KillRouter, FreezeRouter, RemovePeer)
	}
	e := Event{Kind: pick(g.rand, kinds), At: g.between(0, 2e9), For: g.between(1e9, stormLength-2e9)}
	switch e.Kind {
	case StormAPI, StormEtcd, StormSlowAPI, RestoreEtcd, KillRouter, FreezeRouter, RemovePeer:
	case Spoof:
		e.Service, e.For = pick(g.rand, g.cast.Services), 0
	case SpoofOn:
		e.Service = pick(g.rand, g.cast.Services)
	case StormClock:
		at := e.At
		e = g.clock(e.Kind)
		e.At = at
	case StormStop, StormKill, NoDescriptors, FullDisk:
		e.Node, e.Program = pick(g.rand, g.cast.Nodes), pick(g.rand, g.cast.Programs)
		if e.Kind == FullDisk && e.Program == "controller" { // which makes no files
			e.Program = "speaker"
		}
	case DeleteRules, FlushConntrack:
		e.Node, e.For = pick(g.rand, g.cast.Nodes), 0
	default:
		e.Node = pick(g.rand, g.cast.Nodes)
	}
	return g.vary(e)
}

// touches names what a fault is done to; two faults of one thing would heal one another.
func touches(e Event) string {
	switch e.Kind {
	case StormAPI, StormEtcd, KillEtcd, StormSlowAPI, SlowEtcd, RestoreEtcd:
		return "control plane"
	case KillRouter, FreezeRouter, RemovePeer:
		return "router"
	case Spoof, SpoofOn:
		return "LAN"
	}
	if e.Node == "" {
		return e.Program
	}
	return e.Node
}
