package path

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// concerned adds to what is due the targets that the kernel's messages concern, and those whose
// time has come. A message about all, and the minute, begin another round.
func (a *Actor) concerned(now time.Time, due map[plan.Target]bool) {
	a.mu.Lock()
	changes := a.changes
	a.changes = nil
	a.mu.Unlock()
	if len(a.settling) > 0 && !now.Before(a.settled) {
		maps.Copy(due, a.settling)
		if a.pause >= settle {
			clear(a.settling)
		}
		a.pause = min(2*a.pause, settle)
		a.settled = now.Add(a.pause)
	}
	for t := range a.held {
		if !now.Before(a.entries[t].flap.until) {
			due[t] = true
		}
	}
	if now.Sub(a.retried) >= every {
		a.retried = now
		maps.Copy(a.waiting, a.retry)
	}
	changed, all := map[int]bool{}, false
	for _, c := range changes {
		switch {
		case c.All:
			all = true
		case c.Link != 0:
			changed[c.Link] = true
		default:
			a.within(c.Prefix, due)
		}
	}
	if all || now.Sub(a.synced) >= resync {
		a.synced = now
		a.again()
	}
	if all { // messages may have been lost, those about interfaces too: one more look, or more if some are due already
		pause := settle
		if len(a.settling) > 0 {
			pause = soon
		}
		a.pause, a.settled = pause, now.Add(pause)
		a.hurried, a.unsettled = true, now.Add(settle)
	}
	if len(changed) == 0 {
		return
	}
	for t, e := range a.entries {
		// A route of several hops has no link of its own.
		if changed[e.way.Link] || e.known && e.way.Link == 0 && e.way.Kind != lb.RouteNone {
			due[t] = true
			a.settling[t] = true
			a.pause, a.settled = soon, now.Add(soon)
		}
	}
}

// within adds the targets to which a route of a prefix may lead. One to everywhere concerns only
// those that have no other.
func (a *Actor) within(prefix netip.Prefix, due map[plan.Target]bool) {
	if prefix.Bits() == 0 {
		for t, e := range a.entries {
			if e.way.Kind != lb.RouteOwn && t.Addr.Is4() == prefix.Addr().Is4() {
				due[t] = true
			}
		}
		return
	}
	if a.sorted == nil {
		a.sorted = slices.SortedFunc(maps.Keys(a.entries),
			func(one, two plan.Target) int { return one.Addr.Compare(two.Addr) })
	}
	at, _ := slices.BinarySearchFunc(a.sorted, prefix.Addr(),
		func(t plan.Target, addr netip.Addr) int { return t.Addr.Compare(addr) })
	for ; at < len(a.sorted) && prefix.Contains(a.sorted[at].Addr); at++ {
		due[a.sorted[at]] = true
	}
}

// again has all be looked up once more, and first what the round before has left.
func (a *Actor) again() {
	a.round = slices.DeleteFunc(a.round, func(e *entry) bool { return a.entries[e.target] != e })
	for _, e := range a.entries {
		if !e.inRound {
			a.round, e.inRound = append(a.round, e), true
		}
	}
}

// part returns what this step looks up: some of what messages name, some of what waits, and some of the round, so that
// none of these waits for all of another. What messages name beyond that waits.
func (a *Actor) part(now time.Time, named map[plan.Target]bool) (due map[plan.Target]bool) {
	due = map[plan.Target]bool{}
	move(named, due)
	maps.Copy(a.waiting, named)
	if move(a.waiting, due); len(a.waiting) == 0 {
		a.waiting = map[plan.Target]bool{} // to go through an old one costs what it once held
	}
	n := min(len(a.round), partOfAll)
	if a.hurries() {
		n = min(len(a.round), part)
	}
	for _, e := range a.round[:n] {
		if e.inRound = false; a.entries[e.target] != e {
			continue // gone
		}
		due[e.target] = true
		if now.Before(a.unsettled) {
			a.settling[e.target] = true
		}
	}
	a.round, a.first = a.round[n:], max(a.first-n, 0)
	if len(a.round) == 0 {
		a.round, a.hurried, a.first = nil, false, 0
	}
	return due
}

// hurries reports whether the round is more than the one of each minute.
func (a *Actor) hurries() bool { return a.hurried || !a.ready }

// move moves a part of some targets to others.
func move(from, to map[plan.Target]bool) {
	n := 0
	for t := range from {
		if n == part {
			return
		}
		n++
		delete(from, t)
		to[t] = true
	}
}

// look asks the kernel. What it does not answer stays as it was, and is asked again.
func (a *Actor) look(ctx context.Context, due map[plan.Target]bool) error {
	var errs []error
	for t := range due {
		loop.Progress(ctx)
		delete(a.waiting, t)
		e := a.entries[t]
		if e == nil {
			continue
		}
		way, err := a.deps.Look(t.Addr)
		if err != nil {
			a.retry[t] = true
			if len(errs) < 3 {
				errs = append(errs, err)
			}
			continue
		}
		delete(a.retry, t)
		e.way, e.known = way, true
	}
	return errors.Join(errs...)
}

// view is what of the interfaces decides.
type view struct {
	interfaces []lb.Interface
	own        []netip.Addr
	byIndex    map[int]lb.Interface
	// unforwarded has the families that are not forwarded at an interface with an address of the Node. One
	// where no packet comes in does not count while another interface forwards.
	unforwarded map[lb.Family]bool
}

// see takes in the interfaces, and reports whether they differ from before.
func (a *Actor) see() bool {
	interfaces, listed := a.deps.Interfaces()
	own := a.deps.Addresses()
	if !listed || slices.Equal(own, a.view.own) && slices.EqualFunc(interfaces, a.view.interfaces, lb.Interface.Equal) {
		return false
	}
	a.view = view{interfaces, slices.Clone(own), make(map[int]lb.Interface, len(interfaces)), map[lb.Family]bool{}}
	isInner := func(i lb.Interface) bool { return i.Loopback || i.Dummy }
	forwards := func(family lb.Family) bool {
		return slices.ContainsFunc(interfaces, func(i lb.Interface) bool { return !isInner(i) && i.Forwards(family) })
	}
	for _, i := range interfaces {
		a.view.byIndex[i.Index] = i
		for _, p := range i.Addresses {
			family := lb.FamilyOf(p.Addr())
			if i.Forwards(family) || !slices.Contains(own, p.Addr()) {
				continue
			}
			if isInner(i) && forwards(family) {
				continue // force_forwarding of the uplinks leaves it as it is
			}
			a.view.unforwarded[family] = true
		}
	}
	return true
}

// judge decides of endpoints whether they are reached, and tells what has changed.
func (a *Actor) judge(ctx context.Context, now time.Time, due map[plan.Target]bool, off *lb.Refusal) {
	if a.see() {
		for t := range a.entries {
			due[t] = true
		}
	}
	lost, services := plan.Lost{}, map[lb.Key]bool{}
	for t := range due {
		loop.Progress(ctx)
		e := a.entries[t]
		if e == nil || !e.known {
			continue
		}
		refusal := a.refuse(t, e)
		delete(a.held, t)
		if wait := e.flap.step(now, refusal != nil); wait > 0 && e.told != nil {
			refusal = e.told
			a.held[t] = true
		}
		if (refusal == nil) == (e.told == nil) && (refusal == nil || *refusal == *e.told) {
			continue
		}
		e.told = refusal
		lost[t] = refusal
		for key := range e.users {
			services[key] = true
		}
	}
	a.tell(lost, services, off)
}

func (a *Actor) refuse(t plan.Target, e *entry) *lb.Refusal {
	family := lb.FamilyOf(t.Addr)
	out, is := a.view.byIndex[e.way.Link]
	return plan.Way{Kind: e.way.Kind, Local: e.way.Local, Interface: out.Name, Down: e.way.Down,
		Unforwarded: a.view.unforwarded[family] || is && !out.Forwards(family),
	}.Refuse(t, a.deps.Node, a.deps.DefaultRoute)
}

func (a *Actor) tell(lost plan.Lost, services map[lb.Key]bool, off *lb.Refusal) {
	a.off = off
	a.mu.Lock()
	changed := !a.known || len(lost) > 0 || (off == nil) != (a.news.Off == nil)
	a.known, a.news.Off = true, off
	if a.news.Lost == nil {
		a.news.Lost, a.news.Services = lost, services
	} else {
		maps.Copy(a.news.Lost, lost)
		maps.Copy(a.news.Services, services)
	}
	a.mu.Unlock()
	if changed {
		a.deps.Changed()
	}
}

// full returns why the kernel's table of connections has no room; nil if it has.
func (a *Actor) full(now time.Time) *lb.Refusal {
	if now.Sub(a.looked) >= every {
		a.looked = now
		count, most := a.deps.Conntrack()
		a.table.step(now, count, most)
	}
	if !a.table.full {
		return nil
	}
	return lb.Refuse(lb.ReasonConntrackFull, "the table of connections of %s is full, so its kernel drops new ones",
		a.deps.Node)
}

// next returns when to step again. What has no hurry leaves as much time as it takes.
func (a *Actor) next(now time.Time) time.Duration {
	if len(a.waiting) > 0 || len(a.round) > 0 && a.hurries() {
		a.runner.PokeNow()
	}
	wait := every
	if len(a.round) > 0 {
		wait = soon
	}
	if len(a.settling) > 0 {
		wait = min(wait, a.settled.Sub(now))
	}
	for t := range a.held {
		wait = min(wait, a.entries[t].flap.until.Sub(now))
	}
	return max(wait, time.Millisecond)
}

// What becomes of an endpoint that was lost and is reached again.
const (
	// hold is how long it is left out at first, twice as long each time that it was lost again within
	// memory, and most at most.
	hold   = time.Second
	most   = 30 * time.Second
	memory = 2 * time.Minute
)

// flap remembers how often something was lost. What is not there at first was never lost.
type flap struct {
	begun, away bool
	losses      int
	lost, until time.Time
}

// step takes in whether it is away now, and returns how long it is left out although it is not.
func (f *flap) step(now time.Time, away bool) (wait time.Duration) {
	switch {
	case away && !f.away && f.begun:
		if now.Sub(f.lost) > memory {
			f.losses = 0
		}
		f.losses, f.lost = f.losses+1, now
	case !away && f.away && f.losses > 0:
		f.until = now.Add(min(hold<<min(f.losses-1, 10), most))
	}
	f.begun, f.away = true, away
	if away {
		return 0
	}
	return max(0, f.until.Sub(now))
}

// A table of connections counts as full when it has no room for two looks, and no more when a tenth
// of it is free.
type table struct {
	full  bool
	since time.Time // no room
	flap  flap
}

func (t *table) step(now time.Time, count, most int) {
	switch {
	case most == 0:
		return // unknown is not absent
	case count < most/100*99:
		t.since = time.Time{}
	case t.since.IsZero():
		t.since = now
	}
	bound := !t.since.IsZero() && now.Sub(t.since) >= every || t.full && count > most/10*9
	t.full = t.flap.step(now, bound) > 0 || bound
}
