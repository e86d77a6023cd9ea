package bfd

import "time"

// slow is the least Desired Min TX of a session that is not up (RFC 5880 section 6.8.3).
const slow = time.Second

// machine is the state of one session: the variables of RFC 5880 section 6.8.1 and its timers. Its
// methods are pure: they return the machine as it is after an event, and the packet that the event
// makes it send. What they need to know of the time and of chance is passed in.
type machine struct {
	profile Profile // complete

	state, remoteState State
	diag, remoteDiag   Diagnostic
	discr, remoteDiscr uint32
	remoteMinTx        time.Duration // what the peer's last packet said
	remoteMinRx        time.Duration
	remoteMult         uint8
	remoteDemand       bool

	// said is what our packets carry, used what we go by. They differ while a poll sequence runs: what
	// would surprise a peer that has not heard of it waits for the peer's answer (RFC 5880 section
	// 6.8.3).
	said, used timers
	polling    bool

	lastRx, lastTx time.Time
	// nextTx is when the next periodic packet is due, detectAt when the peer's silence ends the
	// session, quietAt when a session that was taken down on purpose has said so for long enough.
	// Zero: never.
	nextTx, detectAt, quietAt time.Time
}

// timers are bfd.DesiredMinTxInterval and bfd.RequiredMinRxInterval.
type timers struct{ tx, rx time.Duration }

// newMachine returns a session that is down and sends its first packet at once, unless it is
// passive.
func newMachine(p Profile, discr uint32, now time.Time) machine {
	m := machine{discr: discr, profile: p}
	return m.enabled(now)
}

// enabled restarts a session, with the discriminator that it has.
func (m machine) enabled(now time.Time) machine {
	m = machine{discr: m.discr, profile: m.profile, state: Down}.forget()
	m.said = m.wanted()
	m.used = m.said
	if m.periodic() {
		m.nextTx = now
	}
	return m
}

// forget sets what is known of the peer to what RFC 5880 section 6.8.1 begins with.
func (m machine) forget() machine {
	m.remoteState, m.remoteDiag, m.remoteDiscr = Down, NoDiagnostic, 0
	m.remoteMinTx, m.remoteMinRx, m.remoteMult, m.remoteDemand = 0, time.Microsecond, 0, false
	m.polling = false // there is nobody to answer
	m.detectAt = time.Time{}
	return m
}

// transition is the state machine of RFC 5880 section 6.8.6: what the state in a packet makes of a
// session that is not AdminDown.
func transition(local, received State) (State, Diagnostic) {
	switch {
	case received == AdminDown && local != Down:
		return Down, NeighborSignaledDown
	case local == Down && received == Down:
		return Init, NoDiagnostic
	case local == Down && received == Init, local == Init && (received == Init || received == Up):
		return Up, NoDiagnostic
	case local == Up && received == Down:
		return Down, NeighborSignaledDown
	}
	return local, NoDiagnostic
}

// received takes a packet that was found to be for this session (RFC 5880 section 6.8.6) and that
// arrived at the given time, which is earlier than now if we were late.
func (m machine) received(p Packet, at, now time.Time, random uint32) (machine, Packet, bool) {
	before := m.txInterval()
	if p.YourDiscriminator == 0 {
		p = p.unproven()
	}
	m.remoteDiscr, m.remoteState, m.remoteDiag = p.MyDiscriminator, p.State, p.Diagnostic
	m.remoteDemand, m.remoteMinTx, m.remoteMinRx, m.remoteMult = p.Demand, p.DesiredMinTx, p.RequiredMinRx,
		p.DetectMultiplier
	m.lastRx = at
	changed := false
	if m.polling && p.Final {
		m.polling, m.used = false, m.said
		m, changed = m.retime()
	}
	if m.state == AdminDown {
		return m.reschedule(now, random), Packet{}, false
	}
	if next, diag := transition(m.state, p.State); next != m.state {
		m, changed = m.enter(next, diag), true
	}
	m.detectAt = at.Add(m.detectionTime())
	switch {
	case changed:
		return m.announce(now, random, p.Poll)
	case m.txInterval() != before, m.nextTx.IsZero() == m.periodic():
		m = m.reschedule(now, random)
	}
	if p.Poll {
		return m, m.packet(true), true // beside the periodic ones (RFC 5880 section 6.8.7)
	}
	return m, Packet{}, false
}

// unproven returns a packet without a discriminator, which anybody may have made up, with bounds on what it says.
// Two of them, one to each end, would keep both ends silent, or have each speak to a discriminator that is not the
// other's, for a detection time of days.
func (p Packet) unproven() Packet {
	p.DesiredMinTx, p.RequiredMinRx = min(p.DesiredMinTx, slow), min(max(p.RequiredMinRx, time.Microsecond), slow)
	p.DetectMultiplier = min(p.DetectMultiplier, 3)
	return p
}

// expired is for when nothing was received until detectAt (RFC 5880 section 6.8.4). A session that
// goes down tells the peer at once: it may be that only the way to here is broken.
func (m machine) expired(now time.Time, random uint32) (machine, Packet, bool) {
	m = m.forget()
	if m.state != Init && m.state != Up {
		return m.reschedule(now, random), Packet{}, false
	}
	return m.enter(Down, DetectionExpired).announce(now, random, false)
}

// excused gives the peer a detection time from now, as packets of it may have been lost on this
// side of the wire.
func (m machine) excused(now time.Time) machine {
	if !m.detectAt.IsZero() {
		m.detectAt = now.Add(m.detectionTime())
	}
	return m
}

// due sends the periodic packet.
func (m machine) due(now time.Time, random uint32) (machine, Packet, bool) {
	if !m.periodic() {
		return m.reschedule(now, random), Packet{}, false
	}
	return m.announce(now, random, false)
}

// configured takes another profile, without a change of state.
func (m machine) configured(p Profile, now time.Time, random uint32) (machine, Packet, bool) {
	was := m.profile
	m.profile = p
	m, changed := m.retime()
	if !m.detectAt.IsZero() {
		m.detectAt = m.lastRx.Add(m.detectionTime())
	}
	if (changed || p.DetectMultiplier != was.DetectMultiplier) && m.periodic() {
		return m.announce(now, random, false)
	}
	return m.reschedule(now, random), Packet{}, false
}

// disabled takes the session down on purpose and tells the peer, so that it does not take it for a
// failure (RFC 5880 section 6.8.16). It goes on telling at the pace so far until the peer has
// answered or would have noticed our silence: see quiet.
func (m machine) disabled(now time.Time, random uint32) (machine, Packet, bool) {
	if m.state == AdminDown {
		return m, Packet{}, false
	}
	mute := m.profile.Passive && m.remoteDiscr == 0
	alive := m.state == Init || m.state == Up // which implies that the peer is known
	m.quietAt = now.Add(time.Duration(m.profile.DetectMultiplier) * m.txInterval())
	m.state, m.diag = AdminDown, AdministrativelyDown
	m.said = m.wanted()
	m.polling = alive
	m.detectAt = time.Time{}
	if mute {
		return m.reschedule(now, random), Packet{}, false
	}
	return m.announce(now, random, false)
}

// quiet reports whether the session is down on purpose and need not say so any more.
func (m machine) quiet(now time.Time) bool {
	return m.state == AdminDown && (!m.polling || !now.Before(m.quietAt))
}

// enter changes the state, and the timers with it.
func (m machine) enter(s State, d Diagnostic) machine {
	m.state = s
	if s != Init { // which is on the way: what ended the session is still worth telling
		m.diag = d
	}
	if want := m.wanted(); want != m.said {
		m.said = want
		m.polling = m.remoteDiscr != 0
	}
	// Not up: nothing has to wait. Going up: the pace only quickens.
	m.used = m.said
	return m
}

// wanted are the timers to tell the peer.
func (m machine) wanted() timers {
	tx := m.profile.TransmitInterval
	if m.state != Up {
		tx = max(tx, slow)
	}
	return timers{tx: tx, rx: m.profile.ReceiveInterval}
}

// retime begins a poll sequence if the profile wants timers other than those that the peer was
// told. While one runs it does nothing, as the answer to the second could not be told from that to
// the first.
func (m machine) retime() (_ machine, changed bool) {
	want := m.wanted()
	if want == m.said || m.state == AdminDown || m.state == Up && m.polling {
		return m, false
	}
	m.said = want
	if m.state != Up {
		m.used, m.polling = want, m.remoteDiscr != 0
		return m, true
	}
	m.used = timers{tx: min(m.used.tx, want.tx), rx: max(m.used.rx, want.rx)}
	m.polling = true
	return m, true
}

// txInterval is the time between our packets before jitter (RFC 5880 section 6.8.2).
func (m machine) txInterval() time.Duration { return max(m.used.tx, m.remoteMinRx) }

// detectionTime is how long the peer may be silent (RFC 5880 section 6.8.4).
func (m machine) detectionTime() time.Duration {
	return time.Duration(m.remoteMult) * max(m.used.rx, m.remoteMinTx)
}

// periodic reports whether packets go out at intervals (RFC 5880 section 6.8.7).
func (m machine) periodic() bool {
	switch {
	case m.remoteMinRx == 0: // the peer wants none
		return false
	case m.profile.Passive && m.remoteDiscr == 0:
		return false
	case m.state == AdminDown:
		return m.polling
	case m.remoteDemand && m.state == Up && m.remoteState == Up: // the peer is in Demand mode (section 6.6)
		return m.polling
	}
	return true
}

// reschedule sets when the next periodic packet is due.
func (m machine) reschedule(now time.Time, random uint32) machine {
	switch {
	case !m.periodic():
		m.nextTx = time.Time{}
	case m.lastTx.IsZero():
		m.nextTx = now
	default:
		m.nextTx = m.lastTx.Add(jitter(m.txInterval(), m.profile.DetectMultiplier, random))
	}
	return m
}

// announce sends a packet now instead of at the next interval.
func (m machine) announce(now time.Time, random uint32, final bool) (machine, Packet, bool) {
	m.lastTx = now
	return m.reschedule(now, random), m.packet(final), true
}

// packet is what the session has to say (RFC 5880 section 6.8.7). Poll and Final never go together;
// a poll waits for the next packet.
func (m machine) packet(final bool) Packet {
	return Packet{
		Diagnostic:        m.diag,
		State:             m.state,
		Poll:              m.polling && !final,
		Final:             final,
		DetectMultiplier:  m.profile.DetectMultiplier,
		MyDiscriminator:   m.discr,
		YourDiscriminator: m.remoteDiscr,
		DesiredMinTx:      m.said.tx,
		RequiredMinRx:     m.said.rx,
	}
}

// jitter takes up to a quarter off an interval, so that sessions do not fall into step; with a
// detect multiplier of 1 at least a tenth (RFC 5880 section 6.8.7). Random is even over its range.
func jitter(interval time.Duration, multiplier uint8, random uint32) time.Duration {
	span := 0.25
	if multiplier == 1 {
		span = 0.15
	}
	return interval*3/4 + time.Duration(float64(interval)*span*float64(random)/(1<<32))
}
