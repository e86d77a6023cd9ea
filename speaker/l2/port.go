package l2

import (
	"maps"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// port is what the actor has on one interface.
type port struct {
	i         lb.Interface
	family    lb.Family
	responder responder                    // nil while it cannot be opened
	vips      map[netip.Addr]*announcement // those that are answered for
	probes    map[netip.Addr]*probing
	ahead     map[netip.Addr]*scouting
	left      []netip.Addr          // gone from ahead since the last outcome, which says something of them
	heeds     uint64                // how often something had been desired when the responder was last told
	answered  map[netip.Addr]Answer // what the responder was last told to answer for
	looks     uint64                // how often all addresses ahead were gone through
	// scoutedFor is heeds when all addresses ahead were last gone through, or 0 where they have to be again,
	// and scoutAt when they have to be in any case; the zero time for never. calm is set while the last look
	// has not gone through them.
	scoutedFor uint64
	scoutAt    time.Time
	calm       bool
	stat       Stats
	awake      func() bool
	problem    error
	retryAt    time.Time
	backoff    loop.Backoff
}

// announcement is the state of one VIP on one interface.
type announcement struct {
	round int
	since time.Time // of the takeover
	sent  int       // how many are out, of the burst and after it
	last  time.Time // when the last one went out
	// defended is when it was last announced against a conflicting host.
	defended time.Time
	rival    rivalry
}

// due returns when the next announcement goes out.
func (v *announcement) due(repeat time.Duration) time.Time {
	if v.sent < len(burst) {
		return v.since.Add(burst[v.sent])
	}
	return v.last.Add(repeat)
}

// withdraw ends the answers that are no longer wanted and begins the new ones. Answering starts
// before the first announcement, so that a client that asks back at once is served.
func (p *port) withdraw(w *work) {
	maps.DeleteFunc(p.vips, func(vip netip.Addr, _ *announcement) bool {
		_, ok := w.answers[vip]
		return !ok
	})
	p.responder.answer(w)
	p.forget(w.answers)
	p.answered = w.answers
}

// forget ends the counts of the VIPs that were answered for and are no longer: there is no end to
// the addresses that Services had.
func (p *port) forget(answers map[netip.Addr]Answer) {
	for vip := range p.answered {
		if _, answered := answers[vip]; !answered {
			p.stat.Withdrawn(p.i.Name, vip)
		}
	}
}

// repeat begins the bursts of all VIPs anew.
func (p *port) repeat(now time.Time) {
	for _, v := range p.vips {
		v.since, v.sent = now, 0
	}
}

// announce sends what is due of the bursts and returns when the next part is; the zero time means
// never.
func (p *port) announce(w *work, now time.Time, repeat time.Duration) (next time.Time, err error) {
	for vip, answer := range w.answers {
		v := p.vips[vip]
		if v == nil && answer.Held {
			continue
		}
		if v == nil {
			v = &announcement{round: answer.Round, since: now}
		} else if v.round != answer.Round {
			v.round, v.since, v.sent, v.rival.node = answer.Round, now, 0, ""
		}
		if v.rival.node != "" && !answer.Owned {
			continue // it may be the other's by right, and clients listen to whoever spoke last
		}
		for v.sent < len(burst) || repeat > 0 {
			due := v.due(repeat)
			if due.After(now) {
				next = earlier(next, due)
				break
			}
			if !p.awake() {
				return next, nil
			}
			if err := p.responder.announce(vip); err != nil {
				return next, err
			}
			v.sent, v.last = v.sent+1, now
			p.vips[vip] = v // recorded after the effect
		}
	}
	return next, nil
}

// fail closes the port after an error, until it is tried again.
func (p *port) fail(now time.Time, err error) {
	p.shut()
	p.vips, p.probes, p.ahead = map[netip.Addr]*announcement{}, map[netip.Addr]*probing{}, map[netip.Addr]*scouting{}
	p.delay(now, err)
}

func (p *port) delay(now time.Time, err error) {
	p.problem, p.scoutedFor = err, 0
	p.retryAt = now.Add(p.backoff.Next())
}

func (p *port) shut() {
	if p.responder != nil {
		p.responder.close()
		p.responder = nil
		p.forget(nil)
		p.answered = nil
	}
}
