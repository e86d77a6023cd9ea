package bfd

import (
	"fmt"
	"slices"
	"time"
)

// receive takes all packets that are there, and returns until when all that came have been taken.
func (e *engine) receive(now time.Time) (horizon time.Time) {
	for range rounds {
		var arrived []datagram
		arrived, horizon = e.wire.receive(now)
		for i := range arrived {
			e.deliver(&arrived[i], now)
		}
		if !horizon.Before(now) {
			break
		}
	}
	return horizon
}

// deliver takes one packet to its session (RFC 5880 section 6.8.6).
func (e *engine) deliver(d *datagram, now time.Time) {
	if d.lost {
		e.excuse(d.listener, now)
	}
	p, drop := decode(d.payload)
	var s *session
	if drop == dropNone {
		s, drop = e.find(&p, d, now)
	}
	if drop != dropNone {
		e.worker.stats.dropped[drop].Add(1)
		return
	}
	s.counters.received.Add(1)
	if s.strange != "" {
		s.strange, e.changed = "", true
	}
	m, reply, send := s.machine.received(p, d.at, now, e.worker.opts.random())
	e.take(s, m, reply, send, now)
}

// excuse gives time to all peers whose packets may be among those that were lost in a full buffer.
func (e *engine) excuse(l listener, now time.Time) {
	e.worker.stats.lost.Add(1)
	for _, s := range e.sessions {
		if s.key.listener() == l {
			s.machine = s.machine.excused(now)
		}
	}
}

// find returns the session that a packet is for, or why it is for none.
func (e *engine) find(p *Packet, d *datagram, now time.Time) (*session, Drop) {
	if p.YourDiscriminator == 0 && p.State != Down && p.State != AdminDown {
		return nil, dropState
	}
	i := slices.IndexFunc(e.sessions, func(s *session) bool { return s.owns(p, d) })
	if i < 0 {
		return nil, dropNoSession
	}
	s := e.sessions[i]
	switch {
	case d.ttl < minTTL(s.key, s.machine.profile):
		e.wonder(s, fmt.Sprintf("packets of the peer arrive with TTL %d, and the least that is heeded is %d", d.ttl,
			minTTL(s.key, s.machine.profile)))
		return nil, dropTTL
	case p.YourDiscriminator == 0 && !s.expects(d.device):
		e.wonder(s, "packets of the peer arrive by another interface than those that lead to it")
		e.reopen(s, now)
		return nil, dropInterface
	case p.YourDiscriminator == 0 && s.machine.state == Up:
		return nil, dropUnproven
	case p.Authenticated:
		return nil, dropAuthentication
	}
	return s, dropNone
}

// wonder notes, while the session is not up, what is strange about its packets: that they travel further
// than they may, or start with less than 255, as BIRD's do on several hops; or that they come another way.
func (e *engine) wonder(s *session, what string) {
	if s.machine.state == Up || s.strange != "" {
		return
	}
	s.strange, e.changed = what, true
	e.worker.report(change{Key: s.key, Problem: what})
}

// reopen has the link of a session that is not up look for its way again, soon.
func (e *engine) reopen(s *session, now time.Time) {
	if s.machine.state == Up {
		return
	}
	s.stale = true
	if e.connectAt.IsZero() {
		e.connectAt = now.Add(retry)
	}
}

// expects reports whether packets of the peer may come in by an interface.
func (s *session) expects(device int) bool {
	if s.link == nil || s.key.Multihop {
		return true
	}
	toward := s.link.toward()
	return len(toward) == 0 || slices.Contains(toward, device)
}

// owns reports whether a packet is for the session: by its discriminator alone once the peer knows
// it, as the peer's address and interface may change then (RFC 5880 section 6.3); else by where it
// came from.
func (s *session) owns(p *Packet, d *datagram) bool {
	switch {
	case s.key.listener() != d.listener:
		return false
	case p.YourDiscriminator != 0:
		return p.YourDiscriminator == s.machine.discr
	case s.key.device() != "" && (s.link == nil || s.link.device() != d.device):
		return false
	}
	return s.peer == d.from && (!s.key.Local.IsValid() || s.key.Local.WithZone("") == d.to)
}
