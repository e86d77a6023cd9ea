package bfd

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	retry    = time.Second // between attempts to open sockets
	farewell = time.Second // how long the end of the actor waits for peers to hear of it
	rounds   = 16          // of receiving before the engine looks again at what is due
)

// engine runs the sessions. All of it belongs to one goroutine.
type engine struct {
	actor *Actor
	wire  wire

	looked    *map[Key]Profile // what was desired when it was last looked at
	applied   map[Key]Profile
	sessions  []*session
	refused   map[Key]*lb.Refusal
	listeners map[listener]string // those that are needed, and why they are not open, or ""
	connectAt time.Time           // when to look after sockets; zero is never
	changed   bool                // something that Outcomes show
	buf       [packetLen]byte
}

// session is a machine and what connects it to the world.
type session struct {
	key      Key
	peer     netip.Addr // of the key, without zone
	machine  machine
	counters counters
	leaving  bool // not desired any more

	link    link   // nil while it cannot be opened
	port    uint16 // that packets were sent from last
	trouble string // with the link
	tooFar  string // that the peer seems to be

	since         time.Time
	ups, failures uint64
	lastDown      *Loss
}

func newEngine(a *Actor, w wire) *engine {
	return &engine{actor: a, wire: w, refused: map[Key]*lb.Refusal{}, listeners: map[listener]string{}}
}

// run returns after ctx has ended and the peers were told.
func (e *engine) run(ctx context.Context) {
	var until, end time.Time
	for {
		now := e.actor.opts.now()
		e.punctuality(now, until)
		switch desired := e.actor.desired.Load(); {
		case ctx.Err() == nil:
			if desired != e.looked {
				e.looked = desired
				e.apply(*desired, now)
			}
		case end.IsZero():
			end = now.Add(farewell)
			e.apply(nil, now)
		}
		e.step(now)
		if !end.IsZero() && (len(e.sessions) == 0 || !now.Before(end)) {
			for _, s := range e.sessions {
				s.hangUp()
			}
			return
		}
		until = e.next(end)
		e.wire.wait(until)
	}
}

// punctuality notes how late the thread was for what it waited for.
func (e *engine) punctuality(now, until time.Time) {
	if until.IsZero() {
		return
	}
	if late := int64(now.Sub(until)); late > e.actor.stats.latestWake.Load() {
		e.actor.stats.latestWake.Store(late)
	}
}

// step does all that is due. Packets are taken before silence is judged: those that came in time
// while this thread was late count.
func (e *engine) step(now time.Time) {
	if !e.connectAt.IsZero() && !now.Before(e.connectAt) {
		e.connect(now)
	}
	horizon := e.receive(now)
	gone := false
	for _, s := range e.sessions {
		if at := s.machine.detectAt; !at.IsZero() && !at.After(horizon) {
			m, p, send := s.machine.expired(now, e.actor.opts.random())
			e.take(s, m, p, send, now)
		}
		if at := s.machine.nextTx; !at.IsZero() && !at.After(now) {
			m, p, send := s.machine.due(now, e.actor.opts.random())
			e.take(s, m, p, send, now)
		}
		gone = gone || s.leaving && s.machine.quiet(now)
	}
	if gone {
		e.bury(now)
	}
	if e.changed {
		e.changed = false
		e.show()
	}
}

// next is when something is due: the earliest of all timers.
func (e *engine) next(end time.Time) time.Time {
	next := earliest(end, e.connectAt)
	for _, s := range e.sessions {
		next = earliest(next, s.machine.nextTx)
		next = earliest(next, s.machine.detectAt)
		next = earliest(next, s.machine.quietAt)
	}
	return next
}

// earliest returns the one that comes first; the zero time never comes.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// apply makes the sessions those that are desired.
func (e *engine) apply(desired map[Key]Profile, now time.Time) {
	if maps.Equal(desired, e.applied) {
		return // said again: nothing changes, and nobody is told that it did
	}
	e.applied = desired
	wanted := e.sift(desired)
	for _, s := range e.sessions {
		profile, stays := wanted[s.key]
		delete(wanted, s.key)
		switch {
		case !stays && !s.leaving:
			s.leaving = true
			m, p, send := s.machine.disabled(now, e.actor.opts.random())
			e.take(s, m, p, send, now)
		case stays && s.leaving:
			s.leaving = false
			s.machine.profile = profile
			e.take(s, s.machine.enabled(now), Packet{}, false, now)
		case stays && s.machine.profile != profile:
			s.tooFar = ""
			m, p, send := s.machine.configured(profile, now, e.actor.opts.random())
			e.take(s, m, p, send, now)
		}
	}
	for key, profile := range wanted {
		e.sessions = append(e.sessions, &session{
			key: key, peer: key.Peer.WithZone(""), machine: newMachine(profile, e.discriminator(), now), since: now,
		})
	}
	e.changed, e.connectAt = true, now
}

// sift returns the sessions that can be, with complete profiles, and keeps why the others cannot.
func (e *engine) sift(desired map[Key]Profile) map[Key]Profile {
	clear(e.refused)
	wanted := make(map[Key]Profile, len(desired))
	for key, profile := range desired {
		refused := key.check()
		if fatal, _ := profile.Check(); refused == nil {
			refused = fatal
		}
		if refused != nil {
			e.refused[key] = refused
			continue
		}
		wanted[key] = profile.withDefaults()
	}
	return wanted
}

// discriminator returns one that is not in use, and that a stranger cannot guess.
func (e *engine) discriminator() uint32 {
	for {
		d := e.actor.opts.random()
		if d != 0 && !slices.ContainsFunc(e.sessions, func(s *session) bool { return s.machine.discr == d }) {
			return d
		}
	}
}

// bury lets go of sessions that have told their peers that they are over.
func (e *engine) bury(now time.Time) {
	e.sessions = slices.DeleteFunc(e.sessions, func(s *session) bool {
		if !s.leaving || !s.machine.quiet(now) {
			return false
		}
		s.hangUp()
		return true
	})
	e.connectAt = now
}

// connect opens the sockets that are missing or in trouble, and closes those that nobody needs.
func (e *engine) connect(now time.Time) {
	e.connectAt = time.Time{}
	needed := map[listener]bool{}
	for _, s := range e.sessions {
		needed[s.key.listener()] = true
		if s.link == nil || s.trouble != "" {
			e.dial(s, now)
		}
	}
	for l := range needed {
		if problem, ok := e.listeners[l]; !ok || problem != "" {
			e.listeners[l] = ""
			if err := e.wire.listen(l); err != nil {
				e.listeners[l] = err.Error()
				e.connectAt = now.Add(retry)
			}
			e.changed = e.changed || e.listeners[l] != problem
		}
	}
	for l, problem := range e.listeners {
		if !needed[l] {
			delete(e.listeners, l)
			if problem == "" {
				e.wire.unlisten(l)
			}
		}
	}
}

func (e *engine) dial(s *session, now time.Time) {
	s.hangUp()
	l, err := e.wire.dial(s.key, s.port, e.actor.opts.random)
	if err != nil {
		e.troubled(s, err, now)
		return
	}
	s.link, s.port = l, l.sourcePort()
}

func (s *session) hangUp() {
	if s.link != nil {
		s.link.close()
		s.link = nil
	}
}

// troubled notes what is wrong with a link. It is opened anew before long: its interface or address
// may have been replaced.
func (e *engine) troubled(s *session, err error, now time.Time) {
	if e.connectAt.IsZero() {
		e.connectAt = now.Add(retry)
	}
	if text := err.Error(); text != s.trouble {
		s.trouble, e.changed = text, true
		e.actor.report(change{Key: s.key, Problem: text})
	}
}

// problem says what keeps packets from coming and going.
func (e *engine) problem(s *session) string {
	if hearing := e.listeners[s.key.listener()]; hearing != "" {
		return hearing
	}
	if s.trouble != "" {
		return s.trouble
	}
	return s.tooFar
}

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
		s, drop = e.find(&p, d)
	}
	if drop != dropNone {
		e.actor.stats.dropped[drop].Add(1)
		return
	}
	s.counters.received.Add(1)
	if s.tooFar != "" {
		s.tooFar, e.changed = "", true
	}
	m, reply, send := s.machine.received(p, d.at, now, e.actor.opts.random())
	e.take(s, m, reply, send, now)
}

// excuse gives time to all peers whose packets may be among those that were lost in a full buffer.
func (e *engine) excuse(l listener, now time.Time) {
	e.actor.stats.lost.Add(1)
	for _, s := range e.sessions {
		if s.key.listener() == l {
			s.machine = s.machine.excused(now)
		}
	}
}

// find returns the session that a packet is for, or why it is for none.
func (e *engine) find(p *Packet, d *datagram) (*session, Drop) {
	if p.YourDiscriminator == 0 && p.State != Down && p.State != AdminDown {
		return nil, DropState
	}
	i := slices.IndexFunc(e.sessions, func(s *session) bool { return s.owns(p, d) })
	if i < 0 {
		return nil, DropNoSession
	}
	s := e.sessions[i]
	switch {
	case d.ttl < minTTL(s.key, s.machine.profile):
		e.far(s, d.ttl)
		return nil, DropTTL
	case p.Authenticated:
		return nil, DropAuthentication
	}
	return s, dropNone
}

// far notes, while the session is not up, that its packets travel further than they may; or start
// with less than 255, as BIRD's do on several hops.
func (e *engine) far(s *session, ttl int) {
	if s.machine.state == Up || s.tooFar != "" {
		return
	}
	s.tooFar = fmt.Sprintf("packets of the peer arrive with TTL %d, and the least that is heeded is %d", ttl,
		minTTL(s.key, s.machine.profile))
	e.changed = true
	e.actor.report(change{Key: s.key, Problem: s.tooFar})
}

// owns tells whether a packet is for the session: by its discriminator alone once the peer knows
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

// take makes what came out of an event the state of a session, and sends its packet.
func (e *engine) take(s *session, m machine, p Packet, send bool, now time.Time) {
	was := s.machine
	s.machine = m
	if send {
		e.send(s, p, now)
	}
	if m.face() != was.face() {
		e.changed = true
	}
	if m.state == was.state {
		return
	}
	s.since = now
	e.actor.report(change{Key: s.key, From: was.state, To: m.state, Diagnostic: m.diag, RemoteDiagnostic: m.remoteDiag})
	if m.state == Up {
		s.ups++
	}
	if was.state == Up {
		admin := m.state == AdminDown || m.remoteState == AdminDown
		s.lastDown = &Loss{At: now, Diagnostic: m.diag, RemoteDiagnostic: m.remoteDiag, Administrative: admin}
		if !admin {
			s.failures++
		}
	}
}

func (e *engine) send(s *session, p Packet, now time.Time) {
	if s.link == nil {
		return
	}
	if err := s.link.send(p.append(e.buf[:0])); err != nil {
		e.troubled(s, fmt.Errorf("send: %w", err), now)
		return
	}
	s.counters.sent.Add(1)
	if s.trouble != "" {
		s.trouble, e.changed = "", true
	}
}

// face is what Outcomes show of a machine.
type face struct {
	state, remoteState          State
	diag, remoteDiag            Diagnostic
	remoteDiscr                 uint32
	tx, detection, minTx, minRx time.Duration
	mult                        uint8
	demand                      bool
}

func (m *machine) face() face {
	return face{
		m.state, m.remoteState, m.diag, m.remoteDiag, m.remoteDiscr,
		m.txInterval(), m.detectionTime(), m.remoteMinTx, m.remoteMinRx, m.remoteMult, m.remoteDemand,
	}
}
