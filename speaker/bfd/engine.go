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
	worker *worker
	wire   wire

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
	strange string // what is, of how packets of the peer arrive
	stale   bool   // the link may know the way of before

	since         time.Time
	ups, failures uint64
	lastDown      *Loss
}

func newEngine(a *worker, w wire) *engine {
	return &engine{worker: a, wire: w, refused: map[Key]*lb.Refusal{}, listeners: map[listener]string{}}
}

// run returns after ctx has ended and the peers were told.
func (e *engine) run(ctx context.Context) {
	var until, end time.Time
	for {
		now := time.Now()
		e.worker.turn.Store(now.UnixNano())
		e.punctuality(now, until)
		switch desired := e.worker.desired.Load(); {
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
		e.worker.turn.Store(0)
		e.wire.wait(until)
	}
}

// punctuality notes how late the thread was for what it waited for.
func (e *engine) punctuality(now, until time.Time) {
	if until.IsZero() {
		return
	}
	if late := int64(now.Sub(until)); late > e.worker.stats.latestWake.Load() {
		e.worker.stats.latestWake.Store(late)
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
			m, p, send := s.machine.expired(now, e.worker.opts.random())
			e.take(s, m, p, send, now)
		}
		if at := s.machine.nextTx; !at.IsZero() && !at.After(now) {
			m, p, send := s.machine.due(now, e.worker.opts.random())
			e.take(s, m, p, send, now)
		}
		gone = gone || s.leaving && s.machine.quiet(now)
	}
	if gone {
		e.release(now)
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
		return // said again: nothing changes, and Changed is not called
	}
	e.applied = desired
	wanted := e.sift(desired)
	for _, s := range e.sessions {
		profile, stays := wanted[s.key]
		delete(wanted, s.key)
		switch {
		case !stays && !s.leaving:
			s.leaving = true
			m, p, send := s.machine.disabled(now, e.worker.opts.random())
			e.take(s, m, p, send, now)
		case stays && s.leaving:
			s.leaving = false
			s.machine.profile = profile
			e.take(s, s.machine.enabled(now), Packet{}, false, now)
		case stays && s.machine.profile != profile:
			s.strange = ""
			m, p, send := s.machine.configured(profile, now, e.worker.opts.random())
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

// discriminator returns one that is not in use, and that an outsider cannot guess.
func (e *engine) discriminator() uint32 {
	for {
		d := e.worker.opts.random()
		if d != 0 && !slices.ContainsFunc(e.sessions, func(s *session) bool { return s.machine.discr == d }) {
			return d
		}
	}
}

// release lets go of sessions that have told their peers that they are over.
func (e *engine) release(now time.Time) {
	e.sessions = slices.DeleteFunc(e.sessions, func(s *session) bool {
		if !s.leaving || !s.machine.quiet(now) {
			return false
		}
		s.hangUp()
		return true
	})
	e.connectAt = now
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
	e.worker.report(change{Key: s.key, From: was.state, To: m.state, Diagnostic: m.diag, RemoteDiagnostic: m.remoteDiag})
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
