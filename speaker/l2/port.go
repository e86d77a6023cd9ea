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
	heeds     uint64 // how often something had been desired when the responder was last told
	// heeded is what the responder was told: the addresses to listen for, and with true to answer for.
	heeded map[netip.Addr]bool
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
func (p *port) withdraw(w work) {
	maps.DeleteFunc(p.vips, func(vip netip.Addr, _ *announcement) bool {
		_, ok := w.rounds[vip]
		return !ok
	})
	heeded := make(map[netip.Addr]bool, len(w.rounds)+len(w.probes)+len(w.ahead))
	for _, e := range w.ahead {
		heeded[e.addr] = false
	}
	for vip := range w.probes {
		heeded[vip] = false
	}
	for vip := range w.rounds {
		heeded[vip] = true
	}
	p.responder.answer(heeded)
	p.forget(heeded)
	p.heeded = heeded
}

// forget ends the counts of the VIPs that were answered for and are no longer: there is no end to
// the addresses that Services had.
func (p *port) forget(heeded map[netip.Addr]bool) {
	for vip, answered := range p.heeded {
		if answered && !heeded[vip] {
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
func (p *port) announce(w work, now time.Time, repeat time.Duration) (next time.Time, err error) {
	for vip, round := range w.rounds {
		v := p.vips[vip]
		if v == nil && w.held[vip] {
			continue
		}
		if v == nil {
			v = &announcement{round: round, since: now}
		} else if v.round != round {
			v.round, v.since, v.sent, v.rival.node = round, now, 0, ""
		}
		if v.rival.node != "" && !w.owned[vip] {
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
		p.heeded = nil
	}
}
