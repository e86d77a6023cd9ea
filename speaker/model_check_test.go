package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// violation is a clause of the contract that does not hold, and how that shows.
type violation struct{ Invariant, What string }

// sightings are what the invariants remember.
type sightings struct {
	Start time.Time
	// Touched is when the last fault began or ended, or the last change was made.
	Touched time.Time
	// Planned is set while everything that has happened was planned, or the end of a speaker only.
	Planned bool
	// Two, Dark, Strays and Yields are since when each of these has been so.
	Two, Dark, Strays time.Time
	Yields            [size]time.Time
	// Apart is set for a node that was cut off from all others, or frozen, until it has heard one.
	Apart [size]bool
	// CutOff is since when a node has reached no other.
	CutOff [size]time.Time
	// Was are the nodes that answered at the last look.
	Was [size]bool
	// Ended is when the speaker of a node was killed while it answered, if nothing else has happened.
	Ended [size]time.Time
}

// Bounds of the invariants, counted from the last fault or change.
const (
	// oneWithin: gossip meets within a tick, and nodes that were parted yield for Reunion.
	oneWithin = 6 * time.Second
	// answeredWithin: what takes longest while nobody is cut off is a speaker that is waited for.
	answeredWithin = 9 * time.Second
	// outlivedWithin is for survivors that see no majority: the last word of one counts for 8 s, and the wait
	// after that is four times the return hold; and gossip.
	outlivedWithin = 54 * time.Second
	// yieldsWithin is three renewals of the Lease, and two nodes that may have to step in.
	yieldsWithin = 15 * time.Second
	// cutOffFor is how long a node that is cut off takes nothing for sure.
	cutOffFor = 5 * time.Second
	// listenedWithin leaves time for all announcements.
	listenedWithin = 13 * time.Second
)

func (w *world) violate(invariant, format string, args ...any) {
	w.found = append(w.found, violation{invariant, fmt.Sprintf(format, args...)})
	w.tell("VIOLATION of %s: %s", invariant, fmt.Sprintf(format, args...))
}

// check looks whether the contract holds after a tick.
func (w *world) check() {
	w.flows()
	w.parts()
	for _, n := range w.Nodes {
		w.answersChanged(n)
	}
	w.onlyDelivered()
	w.oneOwner()
	w.answered()
	w.cutOffYields()
	w.clientsFollow()
	w.tellStates()
}

// well reports whether every cable, kernel and speaker is as it should be.
func (w *world) well() bool {
	for i, n := range w.Nodes {
		if !n.awake() || n.Filtered {
			return false
		}
		for j := range w.Nodes {
			if i != j && !w.both(i, j) {
				return false
			}
		}
	}
	return true
}

func (w *world) answering() (names []string) {
	for _, n := range w.Nodes {
		if n.answers() {
			names = append(names, n.Name)
		}
	}
	return names
}

// lasts reports whether something that holds now has held for long, counted from the last fault.
func (w *world) lasts(since *time.Time, holds bool, bound time.Duration) bool {
	switch {
	case !holds:
		*since = time.Time{}
		return false
	case since.IsZero() || since.Before(w.Seen.Touched):
		*since = w.Now
	}
	return w.Now.Sub(*since) >= bound
}

// parts notes which nodes hear nobody.
func (w *world) parts() {
	for i, n := range w.Nodes {
		if n.Frozen || !n.Up || n.awake() && !w.hearsAny(i) {
			w.Seen.Apart[i] = true
		}
		switch since := &w.Seen.CutOff[i]; {
		case w.reachesAny(i):
			*since = time.Time{}
		case since.IsZero():
			*since = w.Now
		}
	}
}

// reachesAny reports whether packets go to another node and come back.
func (w *world) reachesAny(i int) bool {
	return slices.ContainsFunc(w.Nodes, func(j *modelNode) bool { return j.I != i && w.both(i, j.I) })
}

// hearsAny reports whether gossip of another node arrives.
func (w *world) hearsAny(i int) bool {
	return slices.ContainsFunc(w.Nodes, func(j *modelNode) bool { return j.I != i && w.gossips(i, j.I) })
}

// oneOwner holds the definition of an owner, on which clauses 1 and 5 stand: the one claiming node that
// answers. Two answer only while something is broken or under way.
func (w *world) oneOwner() {
	if answering := w.answering(); w.lasts(&w.Seen.Two, w.well() && len(answering) > 1, oneWithin) {
		w.violate("OneOwner", "%s answer, although all links are up", strings.Join(answering, " and "))
	}
}

// delivers reports whether a node can deliver to clients, and its speaker can say so.
func (w *world) delivers(n *modelNode) bool {
	return n.awake() && n.Programmed && !n.Draining && !n.Phase.stopping && n.Known && w.served(n.I)
}

// answered is the promise of the whole: an address with a node that delivers it is answered (clause 7,
// which names failover without the API server, and clause 1 the other way round).
func (w *world) answered() {
	some, served := false, false
	for _, n := range w.Nodes {
		some = some || w.delivers(n)
		served = served || n.answers() && w.served(n.I)
	}
	bound := outlivedWithin
	if w.majority() != nil {
		bound = answeredWithin
	}
	if w.lasts(&w.Seen.Dark, some && !served, bound) {
		w.violate("Answered", "no node has answered clients for %s", bound)
	}
}

// majority returns nodes that hear one another, are more than half, and one of which delivers; nil if
// there are none.
func (w *world) majority() []int {
	for i := range w.Nodes {
		var side []int
		delivers := false
		for j, n := range w.Nodes {
			if n.awake() && (i == j || w.gossips(i, j)) {
				side = append(side, j)
				delivers = delivers || w.delivers(n)
			}
		}
		if w.Nodes[i].awake() && len(side) > size/2 && delivers {
			return side
		}
	}
	return nil
}

// cutOffYields holds clause 11: a node that is cut off from a majority which answers leaves the address
// to it, if both reach the API server, and one of the majority has met the node before.
func (w *world) cutOffYields() {
	side := w.majority()
	told := slices.ContainsFunc(side, func(i int) bool { return w.Nodes[i].answers() }) &&
		!slices.ContainsFunc(side, func(i int) bool { return !w.asks(w.Nodes[i]) })
	for i, n := range w.Nodes {
		missed := slices.ContainsFunc(side, func(j int) bool {
			return slices.Contains(w.Nodes[j].Rooms.partition.Speakers().Missing, n.Name)
		})
		out := told && missed && !slices.Contains(side, i) && n.answers() && w.asks(n)
		if w.lasts(&w.Seen.Yields[i], out, yieldsWithin) {
			w.violate("CutOffYields", "%s answers still, cut off from the majority that answers", n.Name)
		}
	}
}

// clientsFollow holds clause 11 for clients: nodes that came back do not keep them.
func (w *world) clientsFollow() {
	answering := w.answering()
	astray := w.well() && len(answering) == 1 && w.Points > 0 && w.Nodes[w.Points-1].Name != answering[0]
	if w.lasts(&w.Seen.Strays, astray, listenedWithin) {
		w.violate("ClientsFollow", "clients send to %s, and %s answers", w.Nodes[w.Points-1].Name, answering[0])
	}
}

// answersChanged holds what has to be so at each moment at which a node begins or ends to answer.
func (w *world) answersChanged(n *modelNode) {
	is, was := n.answers(), w.Seen.Was[n.I]
	w.Seen.Was[n.I] = is
	if is == was {
		return
	}
	if is {
		w.tell("%s answers", n.Name)
		w.hearsFirst(n)
		w.takesNothing(n)
		w.restartsInvisible(n)
	} else {
		w.tell("%s answers no more", n.Name)
		w.makeBeforeBreak(n)
	}
}

// onlyDelivered holds clause 1: announce only what is delivered. The speakers have had the time to hear of
// all that has happened.
func (w *world) onlyDelivered() {
	for _, n := range w.Nodes {
		if n.answers() && !n.Programmed {
			w.violate("OnlyDelivered", "%s answers, and its kernel does not deliver", n.Name)
		}
	}
}

// hearsFirst holds clause 11: a node that was cut off hears the others before it announces what it did
// not own.
func (w *world) hearsFirst(n *modelNode) {
	for j, other := range w.Nodes {
		if w.Seen.Apart[n.I] && j != n.I && other.answers() && w.gossips(n.I, j) && w.served(n.I) && w.served(j) {
			w.violate("HearsFirst", "%s was cut off, and begins to answer before it has heard %s, which answers", n.Name,
				other.Name)
		}
	}
}

// takesNothing holds clause 11: a node that has been cut off from all others a moment ago takes nothing that
// one of them answers for. For longer it may be the only one that is left, as far as it can know, and at once
// if the API server answers it.
func (w *world) takesNothing(n *modelNode) {
	side := w.majority()
	answered := slices.ContainsFunc(side, func(i int) bool { return w.Nodes[i].answers() && w.served(i) })
	since := w.Seen.CutOff[n.I]
	lately := since.IsZero() || w.Now.Before(since.Add(cutOffFor))
	if answered && lately && !slices.Contains(side, n.I) && !w.reachesAny(n.I) && !w.asks(n) {
		w.violate("TakesNothing", "%s is cut off, and begins to answer while the others go on", n.Name)
	}
}

// restartsInvisible holds clause 6: a speaker that ends without its node keeps its addresses for as long
// as others wait for it.
func (w *world) restartsInvisible(n *modelNode) {
	for j, at := range w.Seen.Ended {
		if j != n.I && !at.IsZero() && w.Now.Before(at.Add(modelRestartHold)) && !w.Nodes[j].Running {
			w.violate("RestartsInvisible", "%s answers %s after the speaker of %s has ended, whose node is there",
				n.Name, w.Now.Sub(at), w.Nodes[j].Name)
		}
	}
}

// makeBeforeBreak holds clause 5: when an owner changes as planned, or because a node has come back, there
// is one at each moment.
func (w *world) makeBeforeBreak(n *modelNode) {
	others := slices.ContainsFunc(w.Nodes, func(o *modelNode) bool { return o != n && w.delivers(o) })
	mayNot := w.Seen.Planned && n.Up && w.Seen.Ended[n.I].IsZero() || w.well() && n.Programmed
	if mayNot && others && len(w.answering()) == 0 {
		w.violate("MakeBeforeBreak", "%s answers no more, and no other node does yet", n.Name)
	}
}

// dropped holds clauses 5 and 6: no planned change, and no end of a speaker, drops a connection.
func (w *world) dropped(flow int) {
	if w.Seen.Planned {
		w.violate("NoFlowDropped", "clients send to %s, and no node on the way knows a connection that began on %s",
			w.Nodes[w.Points-1].Name, w.Nodes[flow].Name)
	}
}

// modelRestartHold is how long addresses are reserved for a speaker that has ended.
const modelRestartHold = 5 * time.Second

// tellStates adds to the story what each speaker has decided, if that differs.
func (w *world) tellStates() {
	if w.story == nil {
		return
	}
	for _, n := range w.Nodes {
		text := n.state()
		if text != w.told[n.I] {
			w.told[n.I] = text
			w.tell("%s: %s", n.Name, text)
		}
	}
}

func (n *modelNode) state() string {
	if !n.awake() {
		return "no speaker is at work"
	}
	d, _ := n.Rooms.ownership.Decision(modelVIP)
	speakers := n.Rooms.partition.Speakers()
	text := fmt.Sprintf("owner %q, live %v", d.Owner, speakers.Live)
	for _, is := range []struct {
		so   bool
		text string
	}{{len(speakers.Missing) > 0, fmt.Sprintf("missing %v", speakers.Missing)},
		{n.Rooms.partition.Estranged(), "may have been cut off"}, {n.Rooms.partition.Parted(), "no majority"},
		{d.Handover, "hands over"}, {n.answers(), "answers"}, {d.Refusal != nil, refusalText(d)}} {
		if is.so {
			text += ", " + is.text
		}
	}
	return text
}

func refusalText(d plan.Decision) string {
	if d.Refusal == nil {
		return ""
	}
	return string(d.Refusal.Reason)
}
