package l2

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// Addresses that Services get next are probed ahead, with the same row of questions as a new one, so
// that a Service answers at once. On each LAN one node asks: a node that is less preferred for an
// address begins later, and leaves out what it has heard another of ours ask meanwhile.
const (
	// aheadEvery is the time between two rows of questions for one address, and aheadFresh how long
	// after a row without an answer nobody counts as using it. A host that comes up meanwhile says so
	// (RFC 5227 sections 2.1.1 and 2.3, RFC 4862 section 5.4), and each node listens.
	// Addresses that Services get only after many others are asked for every seldomEvery.
	aheadEvery  = 30 * time.Second
	seldomEvery = 10 * time.Minute
	aheadFresh  = 2 * seldomEvery
	// aheadStagger is how much later the next node begins, up to aheadRanks of them.
	aheadStagger = 250 * time.Millisecond
	aheadRanks   = 40
	// seldomApart is the time between the first questions for two addresses that follow each other, for
	// which nodes ask seldom: however many nodes share a LAN, they send no more than 30 a second of these.
	seldomApart, seldomPlaces = 100 * time.Millisecond, 512
)

// errand is one address to probe ahead on one port.
type errand struct {
	addr netip.Addr
	rank int // negative for one that is only listened for
	// seldom is set for one that is asked for after all others, and seldom.
	seldom bool
}

// every returns the time between two rows of questions that the node has for the address.
func (e errand) every() time.Duration {
	if e.seldom {
		return seldomEvery + stagger(e.rank)
	}
	return aheadEvery + stagger(e.rank)
}

// first returns how long to wait before the first question.
func (e errand) first() time.Duration {
	if !e.seldom {
		return stagger(e.rank)
	}
	bytes := e.addr.AsSlice()
	place := int(binary.BigEndian.Uint16(bytes[len(bytes)-2:])) % seldomPlaces
	return stagger(e.rank) + time.Duration(place)*seldomApart
}

// scouting is what is known of an address that no Service has yet on one interface.
type scouting struct {
	next  time.Time // when the next question is due, or the end of the row
	step  int       // how many questions of the row are out
	clean time.Time // when our last row without an answer ended; the zero time for none
	heard time.Time // when another node of ours last asked; the zero time for never
	by    string    // that node
	rank  int       // of this node, when it last looked
}

// errands returns what is to be probed ahead, by place and in the order in which it is.
func errands(ahead map[netip.Addr]plan.Scout, at func(name string, vip netip.Addr, e errand)) {
	all := make([]errand, 0, len(ahead))
	for addr, scout := range ahead {
		all = append(all, errand{addr, scout.Rank, scout.Seldom})
	}
	slices.SortFunc(all, func(a, b errand) int {
		switch {
		case a.seldom == b.seldom:
			return cmp.Or(cmp.Compare(a.rank, b.rank), a.addr.Compare(b.addr))
		case b.seldom:
			return -1
		}
		return 1
	})
	for _, e := range all {
		for _, name := range ahead[e.addr].On {
			at(name, e.addr, e)
		}
	}
}

// stagger returns how long a node of a rank leaves an address to those before it.
func stagger(rank int) time.Duration { return time.Duration(min(rank, aheadRanks)) * aheadStagger }

// scout sends what is due of the questions, as far as is allowed, and returns when there is more to
// do; the zero time means never. While nothing else is desired, nothing was noticed and nothing is due,
// it goes through no address.
func (p *port) scout(w work, noticed noticed, allowed *allowance, now time.Time) (next time.Time, err error) {
	due := !p.scoutAt.IsZero() && !now.Before(p.scoutAt)
	if p.scoutedFor != 0 && p.scoutedFor == p.heeds && len(noticed.heard)+len(noticed.seen) == 0 && !due {
		p.calm = true
		return p.scoutAt, nil
	}
	p.scoutedFor = 0
	if next, err = p.scoutAll(w, noticed, allowed, now); err == nil {
		p.scoutedFor, p.scoutAt = p.heeds, next
	}
	return next, err
}

// scoutAll goes through all addresses that are probed ahead or listened for.
func (p *port) scoutAll(w work, noticed noticed, allowed *allowance, now time.Time) (next time.Time, err error) {
	for _, e := range w.ahead {
		v := p.ahead[e.addr]
		if v == nil {
			v = &scouting{next: now.Add(e.first()), rank: e.rank}
			p.ahead[e.addr] = v
		}
		if e.rank == 0 && v.rank > 0 && v.step == 0 && !now.Before(v.clean.Add(aheadFresh)) {
			// The node that was preferred to this one, and so has asked, is gone. What it said counts no more.
			v.next = earlier(v.next, now.Add(e.first()))
		}
		v.rank = e.rank
		if node, ok := noticed.heard[e.addr]; ok {
			v.heard, v.by = now, node
			if v.step == 0 {
				v.next = now.Add(e.every())
			}
		}
		if len(noticed.seen[e.addr]) > 0 { // all that was found out before is over
			*v = scouting{next: now.Add(e.every()), rank: e.rank}
		}
		if most := now.Add(e.every()); most.Before(v.next) {
			v.next = most // it was asked for seldom so far
		}
		if err := p.ask(e, v, allowed, now); err != nil {
			return next, err
		}
		if e.rank >= 0 || v.step == probeCount {
			next = earlier(next, v.next)
		}
		for _, since := range []time.Time{v.clean, v.heard} {
			if end := since.Add(aheadFresh); now.Before(end) {
				next = earlier(next, end)
			}
		}
	}
	if len(p.ahead) > len(w.ahead) {
		wanted := make(map[netip.Addr]bool, len(w.ahead))
		for _, e := range w.ahead {
			wanted[e.addr] = true
		}
		maps.DeleteFunc(p.ahead, func(addr netip.Addr, _ *scouting) bool { return !wanted[addr] })
	}
	return next, nil
}

// ask sends what is due of the questions for one address.
func (p *port) ask(e errand, v *scouting, allowed *allowance, now time.Time) error {
	for !v.next.After(now) {
		switch {
		case v.step == probeCount: // and nobody has answered
			v.clean, v.step, v.next = now, 0, now.Add(e.every()-stagger(e.rank)-probeCount*probeEvery)
			continue
		case e.rank < 0 || !p.awake():
			return nil
		case !allowed.take(now):
			v.next = now.Add(allowed.wait())
			return nil
		}
		if err := p.responder.probe(e.addr); err != nil {
			return err
		}
		p.stat.Probe(p.i.Name, true)
		v.step++
		v.next = now.Add(probeEvery)
	}
	return nil
}

// scouted returns which node has found lately that nobody uses an address; "" if none has.
func (v *scouting) scouted(self string, now time.Time) string {
	switch {
	case v == nil:
		return ""
	case !v.clean.IsZero() && now.Before(v.clean.Add(aheadFresh)):
		return self
	case !v.heard.IsZero() && now.Before(v.heard.Add(aheadFresh)):
		return v.by
	}
	return ""
}

// calm reports whether nothing else is known of the addresses that are probed ahead than in the last
// outcome. It needs mu.
func (a *Actor) calm() bool {
	calm := len(a.seen) == 0 && a.published.quiet && a.published.ports == len(a.ports)
	a.published.quiet, a.published.ports = len(a.seen) == 0, len(a.ports)
	for _, p := range a.ports {
		calm = calm && p.calm
	}
	return calm
}

// scouted returns what is known of the addresses that are probed ahead: see Outcome. It needs mu.
func (a *Actor) scouted(now time.Time) map[netip.Addr]map[string]string {
	before := a.outcome.Scouted
	found := make(map[netip.Addr]map[string]string, len(before))
	used := map[netip.Addr]bool{}
	for _, vips := range a.seen {
		for vip := range vips {
			used[vip] = true
		}
	}
	for at, p := range a.ports {
		only := a.only(at)
		for addr, v := range p.ahead {
			node := v.scouted(a.opts.Self, now)
			if node == "" || used[addr] || p.problem != nil {
				continue
			}
			switch was := before[addr]; {
			case only && len(was) == 1 && was[at.iface] == node:
				found[addr] = was // nobody changes it
				continue
			case found[addr] == nil:
				found[addr] = map[string]string{}
			}
			found[addr][at.iface] = node
		}
	}
	return found
}

// overhear takes in that another node of ours has asked for an address that is probed ahead. It needs
// mu.
func (a *Actor) overhear(at place, addr netip.Addr, node string) {
	if _, ok := a.desired.Ahead[addr]; !ok {
		return
	}
	if len(a.heard) == 0 {
		time.AfterFunc(gatherFor, a.runner.Poke)
		a.heard = rivals{}
	}
	if a.heard[at] == nil {
		a.heard[at] = map[netip.Addr]string{}
	}
	a.heard[at][addr] = node
}
