package l2

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// When another node of ours announces a VIP that this one owns, that one was cut off or frozen and
// does not know yet. It gives the VIP up when it hears of this one, without a word on the segment,
// and clients may have listened to it last. So this node announces the VIP again: soon, as clients
// send their packets there meanwhile, and some times more.
const (
	// reclaimAfter leaves time to hear over gossip that the other node owns the VIP by right.
	reclaimAfter = 40 * time.Millisecond
	// gatherFor bounds how often what others announce wakes the actor.
	gatherFor = 20 * time.Millisecond
	// A VIP is reclaimed again after reclaimWait at the soonest, and each time that this happens
	// within reclaimCalm after twice as long, up to the interval for conflicting hosts: whoever makes
	// up packets must not have us flood the segment.
	reclaimWait = time.Second
	reclaimCalm = time.Minute
	// rivalEvery is the least time between two other nodes that count as the last to have announced a
	// VIP: each change of that is told to the proxy.
	rivalEvery = time.Second
	// rivalCalm is for how long a change has the next one count for the bound of all VIPs, also when nobody has
	// announced the VIP between the two.
	rivalCalm = time.Minute
	// All VIPs together are reclaimed so many times a second, and so many at once. The same holds for what else a
	// neighbor may cause with made-up packets for every VIP.
	reclaimRate  = 50
	reclaimsKept = 500
)

// rivals are the VIPs that other nodes of ours were seen to announce since the last look, and who
// did so last.
type rivals map[place]map[netip.Addr]string

// note takes in that another node of ours uses a VIP, and has the actor look at it in a moment. It
// needs mu.
func (a *Actor) note(at place, vip netip.Addr, node string) {
	if _, ok := a.desired.Answers[vip]; !ok {
		return
	}
	if len(a.rivals) == 0 {
		time.AfterFunc(gatherFor, a.runner.Poke)
	}
	if a.rivals == nil {
		a.rivals = rivals{}
	}
	if a.rivals[at] == nil {
		a.rivals[at] = map[netip.Addr]string{}
	}
	a.rivals[at][vip] = node
}

// own reports whether the address is one of this node's.
func (d Desired) own(mac net.HardwareAddr) bool {
	return slices.ContainsFunc(d.Interfaces, func(i lb.Interface) bool { return bytes.Equal(i.MAC, mac) })
}

// rivalry is what is remembered of other nodes that announced a VIP.
type rivalry struct {
	node    string    // who did so last, in this round; "" if nobody has
	heard   time.Time // when it last did
	changed time.Time // when it was another node before
	due     time.Time // when the VIP is reclaimed next; the zero time for not
	last    time.Time // when it last was
	wait    time.Duration
}

// announced takes in which node announces the VIP. Of two that do so in turn, one counts for a while, and of many VIPs
// for longer.
func (r *rivalry) announced(node string, changes *allowance, now time.Time) {
	current := r.current(now)
	recent := current != "" || r.node != node && now.Before(r.changed.Add(rivalCalm))
	switch {
	case current == node:
	case current != "" && now.Before(r.changed.Add(rivalEvery)), recent && !changes.take(now):
		return
	default:
		r.node, r.changed = node, now
	}
	r.heard = now
}

// current returns the other node that announced the VIP last, unless that was long ago.
func (r *rivalry) current(now time.Time) string {
	if r.node != "" && now.Before(r.heard.Add(sightingLasts)) {
		return r.node
	}
	return ""
}

// seen takes in that another node announces the VIP.
func (r *rivalry) seen(now time.Time) {
	if !r.due.IsZero() {
		return
	}
	r.due = now.Add(reclaimAfter)
	if again := r.last.Add(r.wait); r.due.Before(again) {
		r.due = again
	}
}

// reclaimed notes that the VIP is announced again from now on.
func (r *rivalry) reclaimed(now time.Time) {
	if now.Sub(r.last) > reclaimCalm {
		r.wait = 0
	}
	r.due, r.last, r.wait = time.Time{}, now, min(max(reclaimWait, 2*r.wait), defendInterval)
}

// claimed takes in which VIPs other nodes announce.
func (p *port) claimed(vips map[netip.Addr]string, w *work, changes *allowance, now time.Time) {
	for vip, node := range vips {
		v := p.vips[vip]
		if v == nil {
			continue
		}
		v.rival.announced(node, changes, now)
		if w.answers[vip].Owned {
			v.rival.seen(now)
		}
	}
}

// reclaim begins to announce the VIPs again for which it is time, as far as is allowed.
func (p *port) reclaim(w *work, allowed *allowance, now time.Time) {
	for vip, v := range p.vips {
		switch {
		case v.rival.due.IsZero() || v.rival.due.After(now):
		case !w.answers[vip].Owned:
			v.rival.due = time.Time{} // it was the other's by right
		case allowed.take(now):
			v.rival.reclaimed(now)
			v.since, v.sent = now, 0
		default:
			v.rival.due = now.Add(time.Second / reclaimRate)
		}
	}
}

// rivalDue returns when the next VIP is to be reclaimed, or is nobody else's any more; the zero time
// means never.
func (p *port) rivalDue(now time.Time) (next time.Time) {
	for _, v := range p.vips {
		next = earlier(next, v.rival.due)
		if v.rival.current(now) != "" {
			next = earlier(next, v.rival.heard.Add(sightingLasts))
		}
	}
	return next
}

// allowance bounds how often something is done: rate times a second, and most times at once.
type allowance struct {
	rate, most float64
	left       float64
	at         time.Time
}

func (a *allowance) take(now time.Time) bool {
	if a.at.IsZero() {
		a.left = a.most
	} else {
		a.left = min(a.most, a.left+now.Sub(a.at).Seconds()*a.rate)
	}
	a.at = now
	if a.left < 1 {
		return false
	}
	a.left--
	return true
}

// wait returns when something is allowed again that was refused; a millisecond at least, as what is
// left may be so near to 1 that it makes no time.
func (a *allowance) wait() time.Duration {
	return max(time.Millisecond, time.Duration((1-a.left)/a.rate*float64(time.Second)))
}

// wakefulness says what a node that may have been frozen knew when it decided what it answers for.
type wakefulness struct {
	mute  bool
	wakes uint64
}

// isAwake reports whether the actor may send.
func (a *Actor) isAwake() bool {
	w := a.awake.Load()
	return !w.mute && a.opts.Wakes() == w.wakes
}
