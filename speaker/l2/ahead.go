package l2

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
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
	look  uint64    // when it was last gone through: see port.looks
	told  string    // what the last outcome says of the address
}

// compare orders errands that are due at the same time.
func (e errand) compare(other errand) int {
	switch {
	case e.seldom == other.seldom:
		return cmp.Or(cmp.Compare(e.rank, other.rank), e.addr.Compare(other.addr))
	case other.seldom:
		return -1
	}
	return 1
}

// stagger returns how long a node of a rank leaves an address to those before it.
func stagger(rank int) time.Duration { return time.Duration(min(rank, aheadRanks)) * aheadStagger }

// scout sends what is due of the questions, as far as is allowed, and returns when there is more to
// do; the zero time means never. While nothing else is desired, nothing was noticed and nothing is due,
// it goes through no address.
func (p *port) scout(w *work, noticed noticed, allowed *allowance, now time.Time) (next time.Time, err error) {
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
func (p *port) scoutAll(w *work, noticed noticed, allowed *allowance, now time.Time) (next time.Time, err error) {
	var due []errand
	p.looks++
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
		v.rank, v.look = e.rank, p.looks
		if node, ok := noticed.heard[e.addr]; ok {
			v.heard, v.by = now, node
			if v.step == 0 {
				v.next = now.Add(e.every())
			}
		}
		if len(noticed.seen[e.addr]) > 0 { // all that was found out before is over
			*v = scouting{next: now.Add(e.every()), rank: e.rank, look: p.looks, told: v.told}
		}
		if most := now.Add(e.every()); most.Before(v.next) {
			v.next = most // it was asked for seldom so far
		}
		if (e.rank >= 0 || v.step == probeCount) && !v.next.After(now) {
			due = append(due, e)
		} else {
			next = earlier(next, v.due(e, now))
		}
	}
	slices.SortFunc(due, errand.compare)
	for _, e := range due {
		v := p.ahead[e.addr]
		if err := p.ask(e, v, allowed, now); err != nil {
			return next, err
		}
		next = earlier(next, v.due(e, now))
	}
	if len(p.ahead) > len(w.ahead) {
		maps.DeleteFunc(p.ahead, func(addr netip.Addr, v *scouting) bool {
			gone := v.look != p.looks
			if gone && v.told != "" {
				p.left = append(p.left, addr)
			}
			return gone
		})
	}
	return next, nil
}

// due returns when there is something to do about an address: to ask for it, or to forget what was found
// out. The zero time means never.
func (v *scouting) due(e errand, now time.Time) (at time.Time) {
	if e.rank >= 0 || v.step == probeCount {
		at = v.next
	}
	for _, since := range [...]time.Time{v.clean, v.heard} {
		if end := since.Add(aheadFresh); !since.IsZero() && now.Before(end) {
			at = earlier(at, end)
		}
	}
	return at
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

// scouted returns what is known of the addresses that are probed ahead: see Outcome. It is the map of
// before where nothing differs, else a copy in which only what differs was set. It needs mu.
func (a *Actor) scouted(now time.Time) (found map[netip.Addr]map[string]string, differs bool) {
	found = a.outcome.Scouted
	used := map[netip.Addr]bool{}
	for _, vips := range a.seen {
		for vip := range vips {
			used[vip] = true
		}
	}
	set := func(addr netip.Addr, iface, node string) {
		if found[addr][iface] == node {
			return
		}
		if !differs {
			found, differs = maps.Clone(found), true
		}
		if found == nil {
			found = map[netip.Addr]map[string]string{}
		}
		nodes := map[string]string{} // those of before are shared
		maps.Copy(nodes, found[addr])
		if nodes[iface] = node; node == "" {
			delete(nodes, iface)
		}
		a.published.scouted += len(nodes) - len(found[addr])
		if found[addr] = nodes; len(nodes) == 0 {
			delete(found, addr)
		}
	}
	known := 0
	for at, p := range a.ports {
		for _, addr := range p.left {
			set(addr, at.iface, "")
		}
		p.left = nil
		for addr, v := range p.ahead {
			node := v.scouted(a.opts.Self, now)
			if node != "" && (p.problem != nil || len(used) > 0 && used[addr]) {
				node = ""
			}
			if node != "" {
				known++
			}
			if v.told != node {
				set(addr, at.iface, node)
				v.told = node
			}
		}
	}
	if known == a.published.scouted {
		return found, differs
	}
	for addr, nodes := range a.outcome.Scouted { // a port was closed, or has forgotten what it had found out
		for iface := range nodes {
			told := ""
			if p := a.ports[place{iface, lb.FamilyOf(addr)}]; p != nil && p.ahead[addr] != nil {
				told = p.ahead[addr].told
			}
			set(addr, iface, told)
		}
	}
	return found, differs
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
