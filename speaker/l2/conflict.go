package l2

import (
	"cmp"
	"iter"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Before a VIP is announced for the first time this node asks on the segment whether a host uses it
// (RFC 5227 section 2.1, RFC 4862 section 5.4). The RFCs let a host that comes up ask for several
// seconds; the address of a new Service is asked for three times in a shorter row, which a device
// that is awake answers within milliseconds. One that was asleep is noticed later, by what it
// sends.
const (
	probeCount = 3
	probeEvery = 200 * time.Millisecond
	// probeAgain is how often a VIP with another holder is asked for, to learn of the end of that.
	probeAgain = 5 * time.Second
	// sightingLasts is how long a holder counts that does not show up any more: two of these
	// questions.
	sightingLasts = 12 * time.Second
	// defendInterval is the least time between two announcements against another holder:
	// DEFEND_INTERVAL of RFC 5227 section 1.1.
	defendInterval = 10 * time.Second
	// noticeEvery bounds how often a holder that sends all the time wakes the actor.
	noticeEvery = time.Second
	// hostsKept bounds how many conflicting hosts of one VIP are remembered: a device that makes up
	// MAC addresses must not fill the memory.
	hostsKept = 8
)

// work is what is to be done on one port.
type work struct {
	answers map[netip.Addr]Answer // the VIPs to be answered for
	probes  map[netip.Addr]bool   // VIPs to be probed
	ahead   []errand              // addresses to be probed that no Service has yet, in no order
	// on is the interface, and scouts are the addresses that no Service has yet, of all places.
	on     string
	scouts map[netip.Addr]plan.Scout
}

func (w *work) empty() bool { return w == nil || len(w.answers)+len(w.probes)+len(w.ahead) == 0 }

func (w *work) heeds(vip netip.Addr) bool {
	_, answered := w.answers[vip]
	return answered || w.probes[vip]
}

// listens reports whether the VIP is answered for, and whether the responder looks after it at all.
func (w *work) listens(vip netip.Addr) (answered, listens bool) {
	if _, answered := w.answers[vip]; answered {
		return true, true
	}
	scout, ahead := w.scouts[vip]
	return false, w.probes[vip] || ahead && slices.Contains(scout.On, w.on)
}

// all goes through what is answered for or looked after; through some addresses twice.
func (w *work) all() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for vip := range w.answers {
			if !yield(vip) {
				return
			}
		}
		for vip := range w.probes {
			if !yield(vip) {
				return
			}
		}
		for _, e := range w.ahead {
			if !yield(e.addr) {
				return
			}
		}
	}
}

// byPlace turns what is desired around: for each place its VIPs.
func byPlace(d Desired) map[place]*work {
	wanted := map[place]*work{}
	var last place // most are the same
	var w *work
	at := func(name string, vip netip.Addr) *work {
		where := place{name, lb.FamilyOf(vip)}
		if w != nil && where == last {
			return w
		}
		if last, w = where, wanted[where]; w == nil {
			w = &work{answers: map[netip.Addr]Answer{}, probes: map[netip.Addr]bool{},
				on: name, scouts: d.Ahead}
			wanted[where] = w
		}
		return w
	}
	for vip, answer := range d.Answers {
		for _, name := range answer.On {
			at(name, vip).answers[vip] = answer
		}
	}
	for vip, names := range d.Probes {
		for _, name := range names {
			at(name, vip).probes[vip] = true
		}
	}
	for addr, scout := range d.Ahead {
		for _, name := range scout.On {
			w := at(name, addr)
			w.ahead = append(w.ahead, errand{addr, scout.Rank, scout.Seldom})
		}
	}
	return wanted
}

// probing is a row of questions for one VIP on one interface, and the one after it.
type probing struct {
	since time.Time // the beginning of the row
	step  int       // how many questions are out; one more when the last of them could have been answered
	asked bool      // a row has come to its end
}

// due returns when the next step is.
func (v *probing) due() time.Time {
	if v.step > probeCount {
		return v.since.Add(probeAgain)
	}
	return v.since.Add(time.Duration(v.step) * probeEvery)
}

// bounds are for all VIPs together, beside those of each: whoever makes up packets for every VIP must not have us
// flood the segment, nor decide anew about all of them all the time.
type bounds struct {
	rivals    allowance // changes of the other node that was the last to announce a VIP
	defenses  allowance // announcements against conflicting hosts
	questions allowance // rows of questions for VIPs that this node answers for anyway
}

func newBounds() bounds {
	each := allowance{rate: reclaimRate, most: reclaimsKept}
	return bounds{each, each, each}
}

// probe sends what is due of the questions and returns when the next one is; the zero time means
// never. Questions for VIPs that this node does not announce have no common bound: before them nothing is announced.
func (p *port) probe(w *work, seen seenOn, rows *allowance, now time.Time) (next time.Time, err error) {
	due := maps.Clone(w.probes)
	for vip := range seen {
		if w.heeds(vip) {
			due[vip] = true
		}
	}
	maps.DeleteFunc(p.probes, func(vip netip.Addr, _ *probing) bool { return !due[vip] })
	for vip := range due {
		v := p.probes[vip]
		if v == nil {
			v = &probing{since: now, step: probeCount + 1}
			if w.probes[vip] {
				v.step = 0
			} else {
				v.since = now.Add(-probeAgain)
			}
			p.probes[vip] = v
		}
		for !v.due().After(now) {
			switch {
			case v.step > probeCount && !w.probes[vip] && !rows.take(now):
				v.since = now.Add(rows.wait() - probeAgain) // until then nothing is due
				continue
			case v.step > probeCount:
				v.since, v.step = now, 0
				continue
			case v.step == probeCount:
				v.asked = true
			default:
				if err := p.responder.probe(vip); err != nil {
					return next, err
				}
				p.stat.Probe(p.i.Name, false)
			}
			v.step++
		}
		next = earlier(next, v.due())
	}
	return next, nil
}

// defend announces the VIPs that a conflicting host has used since they were last defended, seldom
// enough that two who both defend do not flood the segment (RFC 5227 section 2.4, case c). A VIP that
// is still probed is not defended: whoever uses it was there first.
func (p *port) defend(w *work, seen seenOn, allowed *allowance, now time.Time) error {
	var due []netip.Addr
	for vip, holders := range seen {
		v := p.vips[vip]
		if v != nil && !w.probes[vip] && !now.Before(v.defended.Add(defendInterval)) &&
			slices.ContainsFunc(slices.Collect(maps.Values(holders)), func(h sighting) bool {
				return v.defended.Before(h.last)
			}) {
			due = append(due, vip)
		}
	}
	// First those that were not defended for longest: who makes up packets for many takes no VIP's turn.
	slices.SortFunc(due, func(a, b netip.Addr) int { return p.vips[a].defended.Compare(p.vips[b].defended) })
	for _, vip := range due {
		if !allowed.take(now) {
			break
		}
		v := p.vips[vip]
		if err := p.responder.announce(vip); err != nil {
			return err
		}
		v.defended = now
	}
	return nil
}

// sightings are the devices that were seen to use VIPs, by MAC address, and when last.
type sightings map[place]seenOn

type seenOn map[netip.Addr]map[string]sighting

// sighting is when a device was seen first and last.
type sighting struct{ first, last time.Time }

// end is when the first of the sightings counts no more, if nothing renews it; the zero time
// without any.
func (s sightings) end() (at time.Time) {
	for _, vips := range s {
		for _, holders := range vips {
			for _, h := range holders {
				at = earlier(at, h.last.Add(sightingLasts))
			}
		}
	}
	return at
}

// seenOn returns what takes note of a device that uses a VIP on the port. It is called from the
// responder's goroutine.
func (a *Actor) seenOn(p *port) func(netip.Addr, net.HardwareAddr) {
	at := place{p.i.Name, p.family}
	return func(vip netip.Addr, mac net.HardwareAddr) {
		now := time.Now()
		a.mu.Lock()
		node, ours := a.desired.Ours[mac.String()]
		news := !ours && a.seen.note(at, vip, mac.String(), now)
		if ours && !a.desired.own(mac) {
			a.note(at, vip, node)
			a.overhear(at, vip, node)
		}
		a.mu.Unlock()
		if news {
			a.runner.Poke()
		}
	}
}

// note takes in a sighting and reports whether the actor should look at it.
func (s sightings) note(at place, vip netip.Addr, mac string, now time.Time) bool {
	if s[at] == nil {
		s[at] = seenOn{}
	}
	if s[at][vip] == nil {
		s[at][vip] = map[string]sighting{}
	}
	holders := s[at][vip]
	h, known := holders[mac]
	if known && now.Before(h.last.Add(noticeEvery)) || !known && len(holders) >= hostsKept {
		return false
	}
	if !known {
		h.first = now
	}
	h.last = now
	holders[mac] = h
	return true
}

// forget leaves out what is too old, and devices that have turned out to be nodes of ours. A VIP that
// leaves this node for a moment keeps its conflicting hosts: it would be announced as if there were
// none when it is back.
func (s sightings) forget(now time.Time, ours map[string]string) {
	for at, vips := range s {
		for vip, holders := range vips {
			maps.DeleteFunc(holders, func(mac string, h sighting) bool {
				_, our := ours[mac]
				return our || !now.Before(h.last.Add(sightingLasts))
			})
			if len(holders) == 0 {
				delete(vips, vip)
			}
		}
		if len(vips) == 0 {
			delete(s, at)
		}
	}
}

func (s sightings) copy() sightings {
	c := sightings{}
	for at, vips := range s {
		c[at] = seenOn{}
		for vip, holders := range vips {
			c[at][vip] = maps.Clone(holders)
		}
	}
	return c
}

// conflicts lists the sightings by VIP, what was seen first first.
func (s sightings) conflicts() map[netip.Addr][]plan.ConflictingHost {
	found := map[netip.Addr][]plan.ConflictingHost{}
	for at, vips := range s {
		for vip, holders := range vips {
			for mac := range holders {
				found[vip] = append(found[vip], plan.ConflictingHost{Interface: at.iface, MAC: mac})
			}
		}
	}
	for vip, list := range found {
		first := func(h plan.ConflictingHost) time.Time {
			return s[place{h.Interface, lb.FamilyOf(vip)}][vip][h.MAC].first
		}
		slices.SortFunc(list, func(a, b plan.ConflictingHost) int {
			return cmp.Or(first(a).Compare(first(b)), strings.Compare(a.Interface, b.Interface), strings.Compare(a.MAC, b.MAC))
		})
	}
	return found
}

// probed tells which VIPs were probed in full. Where nothing can be sent nothing can be found out,
// and nothing be announced either.
func (a *Actor) probed(probes map[netip.Addr][]string) map[netip.Addr]bool {
	done := map[netip.Addr]bool{}
	for vip, names := range probes {
		open := slices.ContainsFunc(names, func(name string) bool {
			p := a.ports[place{name, lb.FamilyOf(vip)}]
			return p == nil || p.problem == nil && (p.probes[vip] == nil || !p.probes[vip].asked)
		})
		if !open {
			done[vip] = true
		}
	}
	return done
}

// earlier returns the earlier of two times, of which the zero one means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
