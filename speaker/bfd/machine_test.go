package bfd

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

const ms = time.Millisecond

// machineIn returns a session in a state, with its profile's timers agreed upon and no poll
// sequence running.
func machineIn(s State, tweaks ...func(*machine)) machine {
	m := newMachine(Profile{TransmitInterval: 50 * ms, ReceiveInterval: 60 * ms, DetectMultiplier: 3}.withDefaults(), 1,
		epoch)
	m.state = s
	if s != Down {
		m.remoteDiscr, m.remoteState, m.remoteMult, m.remoteMinTx, m.remoteMinRx = 2, s, 4, 40*ms, 30*ms
		m.detectAt = epoch.Add(m.detectionTime())
		m.lastRx, m.lastTx = epoch, epoch
	}
	m.said = m.wanted()
	m.used = m.said
	m.nextTx = epoch.Add(10 * ms)
	for _, tweak := range tweaks {
		tweak(&m)
	}
	return m
}

// from returns a packet of the peer that the machine of machineIn has.
func from(s State, tweaks ...func(*Packet)) Packet {
	p := Packet{State: s, DetectMultiplier: 4, MyDiscriminator: 2, YourDiscriminator: 1, DesiredMinTx: 40 * ms,
		RequiredMinRx: 30 * ms}
	for _, tweak := range tweaks {
		tweak(&p)
	}
	return p
}

// after gives the machine a packet.
func after(m machine, p Packet, at time.Time) (machine, Packet, bool) {
	return m.received(p, at, at, 0)
}

// TestTransitions is the state machine of RFC 5880 sections 6.2 and 6.8.6: each state, each
// received state.
func TestTransitions(t *testing.T) {
	for _, test := range []struct {
		local, received, want State
		diag                  Diagnostic // NoDiagnostic also where it does not change
		says                  bool       // tells the peer at once
	}{
		{AdminDown, AdminDown, AdminDown, NoDiagnostic, false},
		{AdminDown, Down, AdminDown, NoDiagnostic, false},
		{AdminDown, Init, AdminDown, NoDiagnostic, false},
		{AdminDown, Up, AdminDown, NoDiagnostic, false},

		{Down, AdminDown, Down, NoDiagnostic, false},
		{Down, Down, Init, NoDiagnostic, true},
		{Down, Init, Up, NoDiagnostic, true},
		{Down, Up, Down, NoDiagnostic, false},

		{Init, AdminDown, Down, NeighborSignaledDown, true},
		{Init, Down, Init, NoDiagnostic, false},
		{Init, Init, Up, NoDiagnostic, true},
		{Init, Up, Up, NoDiagnostic, true},

		{Up, AdminDown, Down, NeighborSignaledDown, true},
		{Up, Down, Down, NeighborSignaledDown, true},
		{Up, Init, Up, NoDiagnostic, false},
		{Up, Up, Up, NoDiagnostic, false},
	} {
		t.Run(fmt.Sprintf("%v receives %v", test.local, test.received), func(t *testing.T) {
			m, p, send := after(machineIn(test.local), from(test.received), epoch.Add(5*ms))
			if m.state != test.want || m.diag != test.diag || send != test.says {
				t.Errorf("became %v (%v), sends: %v", m.state, m.diag, send)
			}
			if send && (p.State != test.want || p.Diagnostic != test.diag || p.YourDiscriminator != 2) {
				t.Errorf("sends %+v", p)
			}
			if m.remoteState != test.received || m.remoteDiscr != 2 {
				t.Errorf("knows of the peer: %v, discriminator %d", m.remoteState, m.remoteDiscr)
			}
			wantTx := time.Second
			if test.want == Up {
				wantTx = 50 * ms
			}
			if m.said.tx != wantTx {
				t.Errorf("Desired Min TX %v, want %v (section 6.8.3)", m.said.tx, wantTx)
			}
			if send && p.Poll != (wantTx != machineIn(test.local).said.tx) {
				t.Errorf("poll %v (section 6.8.3: a poll sequence if Desired Min TX changed)", p.Poll)
			}
		})
	}
}

// TestSilence is what the end of the detection time does (section 6.8.4).
func TestSilence(t *testing.T) {
	for _, test := range []struct {
		state, want State
		diag        Diagnostic
		says        bool
	}{
		{AdminDown, AdminDown, NoDiagnostic, false},
		{Down, Down, NoDiagnostic, false},
		{Init, Down, DetectionExpired, true},
		{Up, Down, DetectionExpired, true},
	} {
		m := machineIn(test.state, func(m *machine) {
			m.polling, m.remoteDiscr, m.remoteMinRx, m.remoteDemand = true, 2, 0,
				true
		})
		m, p, send := m.expired(epoch.Add(time.Second), 0)
		if m.state != test.want || m.diag != test.diag || send != test.says {
			t.Errorf("%v: became %v (%v), sends: %v", test.state, m.state, m.diag, send)
		}
		if send && (p.YourDiscriminator != 0 || p.Poll || p.State != Down || p.Diagnostic != DetectionExpired) {
			t.Errorf("%v: sends %+v", test.state, p)
		}
		if m.remoteDiscr != 0 || m.remoteMinRx != time.Microsecond || m.remoteDemand || m.polling || !m.detectAt.IsZero() {
			t.Errorf("%v: still knows of the peer: %+v", test.state, m)
		}
		if test.state != AdminDown && m.nextTx.IsZero() {
			t.Errorf("%v: tries no more", test.state)
		}
	}
}

func TestHandshake(t *testing.T) {
	a, b := newMachine(Profile{TransmitInterval: 50 * ms}.withDefaults(), 1, epoch),
		newMachine(Profile{}.withDefaults(), 2, epoch)
	now := epoch
	a, p, send := a.due(now, 0)
	var story []string
	for to := &b; send && len(story) < 20; to = map[*machine]*machine{&a: &b, &b: &a}[to] {
		text := fmt.Sprintf("%v", p.State)
		if p.Poll {
			text += " P"
		}
		if p.Final {
			text += " F"
		}
		story = append(story, text)
		now = now.Add(ms)
		*to, p, send = after(*to, p, now)
	}
	if diff := cmp.Diff([]string{"Down", "Init", "Up P", "Up F"}, story); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if a.state != Up || b.state != Up {
		t.Errorf("%v, %v", a.state, b.state)
	}
	if a.nextTx.After(now.Add(300*ms)) || b.nextTx.After(now.Add(300*ms)) {
		t.Error("the first periodic packets of a session that is up wait as long as those of one that is down")
	}
}

func TestTimers(t *testing.T) {
	for _, test := range []struct {
		name          string
		remote        func(*Packet)
		tx, detection time.Duration
	}{
		{"as said", func(*Packet) {}, 50 * ms, 240 * ms}, // 4 × our 60 ms
		{"the peer sends slowly", func(p *Packet) { p.DesiredMinTx = 100 * ms }, 50 * ms, 400 * ms},
		{"the peer receives slowly", func(p *Packet) { p.RequiredMinRx = 70 * ms }, 70 * ms, 240 * ms},
		{"another multiplier", func(p *Packet) { p.DetectMultiplier = 1 }, 50 * ms, 60 * ms},
		{"all at their limit", func(p *Packet) {
			p.DetectMultiplier, p.DesiredMinTx, p.RequiredMinRx = 255, math.MaxUint32*time.Microsecond,
				math.MaxUint32*time.Microsecond
		}, math.MaxUint32 * time.Microsecond, 255 * math.MaxUint32 * time.Microsecond},
	} {
		at := epoch.Add(5 * ms)
		m, _, _ := after(machineIn(Up), from(Up, test.remote), at)
		if m.txInterval() != test.tx || m.detectionTime() != test.detection || !m.detectAt.Equal(at.Add(test.detection)) {
			t.Errorf("%s: sends every %v, detection time %v ending after %v; want %v, %v",
				test.name, m.txInterval(), m.detectionTime(), m.detectAt.Sub(at), test.tx, test.detection)
		}
		if got := m.nextTx.Sub(epoch); test.tx != 50*ms && got != test.tx*3/4 { // the random 0 takes off a quarter
			t.Errorf("%s: next packet %v after the last", test.name, got)
		}
	}
}

// TestLateArrival is about a packet that waited for us: its silence counts from when it arrived,
// our own next packet from now.
func TestLateArrival(t *testing.T) {
	at, now := epoch.Add(20*ms), epoch.Add(200*ms)
	m, _, _ := machineIn(Up).received(from(Down), at, now, 0)
	if !m.detectAt.Equal(at.Add(m.detectionTime())) || !m.lastTx.Equal(now) {
		t.Errorf("detection ends at %v, last sent at %v", m.detectAt, m.lastTx)
	}
}

func TestPeriodic(t *testing.T) {
	for _, test := range []struct {
		name string
		m    machine
		want bool
	}{
		{"down", machineIn(Down), true},
		{"up", machineIn(Up), true},
		{"taken down, the peer has not answered", machineIn(AdminDown, func(m *machine) { m.polling = true }), true},
		{"taken down, the peer knows", machineIn(AdminDown), false},
		{"the peer wants none", machineIn(Up, func(m *machine) { m.remoteMinRx = 0 }), false},
		{"the peer wants none, and there is a question",
			machineIn(Up, func(m *machine) { m.remoteMinRx, m.polling = 0, true }), false},
		{"passive, nothing heard", machineIn(Down, func(m *machine) { m.profile.Passive = true }), false},
		{"passive, heard", machineIn(Init, func(m *machine) { m.profile.Passive = true }), true},
		{"the peer is in Demand mode", machineIn(Up, func(m *machine) { m.remoteDemand = true }), false},
		{"the peer is in Demand mode, and there is a question",
			machineIn(Up, func(m *machine) { m.remoteDemand, m.polling = true, true }), true},
		{"the peer is in Demand mode but not up",
			machineIn(Up, func(m *machine) { m.remoteDemand, m.remoteState = true, Init }), true},
		{"the peer is in Demand mode, we are not up", machineIn(Init, func(m *machine) { m.remoteDemand = true }), true},
	} {
		m, p, send := test.m.due(epoch.Add(10*ms), 0)
		if send != test.want || m.nextTx.IsZero() == test.want {
			t.Errorf("%s: sends: %v, next at %v", test.name, send, m.nextTx)
		}
		if p.Demand || p.Final || p.ControlPlane || p.EchoRx != 0 {
			t.Errorf("%s: sends %+v", test.name, p)
		}
	}
}

func TestPeerStopsAndStartsPeriodicPackets(t *testing.T) {
	for name, stop := range map[string]func(*Packet){
		"zero receive interval": func(p *Packet) { p.RequiredMinRx = 0 },
		"Demand mode":           func(p *Packet) { p.Demand = true },
	} {
		m, _, _ := after(machineIn(Up), from(Up, stop), epoch.Add(5*ms))
		if !m.nextTx.IsZero() {
			t.Errorf("%s: sends on", name)
		}
		m, reply, send := after(m, from(Up, stop, func(p *Packet) { p.Poll = true }), epoch.Add(6*ms))
		if !send || !reply.Final || reply.Poll {
			t.Errorf("%s: no answer to a poll (section 6.8.7): %v", name, reply)
		}
		if m, _, _ = after(m, from(Up), epoch.Add(7*ms)); m.nextTx.IsZero() {
			t.Errorf("%s: does not begin again", name)
		}
		m, _, _ = after(m, from(Up, stop), epoch.Add(8*ms))
		if m, _, _ = m.expired(epoch.Add(time.Minute), 0); m.nextTx.IsZero() {
			t.Errorf("%s: holds beyond the end of the session", name)
		}
	}
}

func TestPollIsAnsweredBesideThePeriodicPackets(t *testing.T) {
	before := machineIn(Up, func(m *machine) { m.polling = true })
	m, p, send := after(before, from(Up, func(p *Packet) { p.Poll = true }), epoch.Add(5*ms))
	if !send || !p.Final || p.Poll {
		t.Errorf("answer: %v, %+v", send, p)
	}
	if !m.nextTx.Equal(before.nextTx) || !m.polling {
		t.Errorf("the answer changed the timer from %v to %v, or ended our own poll: %v", before.nextTx, m.nextTx, m.polling)
	}
	if m, p, send := after(machineIn(AdminDown), from(Up, func(p *Packet) { p.Poll = true }), epoch); send {
		t.Errorf("%v answers a poll with %v (section 6.8.6 discards before)", m.state, p)
	}
	if m, p, send := after(machineIn(Up), from(Down, func(p *Packet) { p.Poll = true }), epoch); !send || !p.Final ||
		p.Poll || p.State != Down || !m.polling {
		t.Errorf("a poll that takes us down: %+v, then polling: %v", p, m.polling)
	}
}

func TestFinalEndsPoll(t *testing.T) {
	final := func(p *Packet) { p.Final = true }
	m, _, send := after(machineIn(Up, func(m *machine) { m.polling = true }), from(Up, final), epoch)
	if m.polling || send {
		t.Errorf("polling: %v, sends: %v", m.polling, send)
	}
	if m, _, _ = after(m, from(Up, final), epoch); m.polling || m.state != Up {
		t.Errorf("a Final that nobody asked for: %+v", m)
	}
}

// TestProfileChanges follows the timers through changes of the profile while the session is up
// (section 6.8.3).
func TestProfileChanges(t *testing.T) {
	profile := func(tx, rx time.Duration, mult uint8) Profile {
		return Profile{TransmitInterval: tx, ReceiveInterval: rx, DetectMultiplier: mult}.withDefaults()
	}
	final := func(p *Packet) { p.Final = true }
	for _, test := range []struct {
		name                  string
		to                    Profile
		poll, says            bool
		before, afterwards    timers // used until the peer has answered, and then
		detection, detection2 time.Duration
	}{
		{"nothing", profile(50*ms, 60*ms, 3), false, false, timers{50 * ms, 60 * ms}, timers{50 * ms, 60 * ms}, 240 * ms,
			240 * ms},
		{"multiplier", profile(50*ms, 60*ms, 9), false, true, timers{50 * ms, 60 * ms}, timers{50 * ms, 60 * ms}, 240 * ms,
			240 * ms},
		{"sends faster", profile(40*ms, 60*ms, 3), true, true, timers{40 * ms, 60 * ms}, timers{40 * ms, 60 * ms}, 240 * ms,
			240 * ms},
		{"sends slower", profile(90*ms, 60*ms, 3), true, true, timers{50 * ms, 60 * ms}, timers{90 * ms, 60 * ms}, 240 * ms,
			240 * ms},
		{"receives faster", profile(50*ms, 50*ms, 3), true, true, timers{50 * ms, 60 * ms}, timers{50 * ms, 50 * ms},
			240 * ms, 200 * ms},
		{"receives slower", profile(50*ms, 90*ms, 3), true, true, timers{50 * ms, 90 * ms}, timers{50 * ms, 90 * ms},
			360 * ms, 360 * ms},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, p, send := machineIn(Up).configured(test.to, epoch.Add(5*ms), 0)
			if send != test.says || p.Poll != test.poll || m.polling != test.poll || m.state != Up {
				t.Errorf("sends: %v %+v, polling: %v, %v", send, p, m.polling, m.state)
			}
			if send &&
				(p.DesiredMinTx != test.to.TransmitInterval || p.RequiredMinRx != test.to.ReceiveInterval ||
					p.DetectMultiplier != test.to.DetectMultiplier) {
				t.Errorf("says %+v", p)
			}
			if m.used != test.before || m.detectionTime() != test.detection || !m.detectAt.Equal(epoch.Add(test.detection)) {
				t.Errorf("before the answer: %v, detection time %v", m.used, m.detectionTime())
			}
			if m, _, _ = after(m, from(Up), epoch.Add(6*ms)); m.used != test.before {
				t.Errorf("after a packet that is no answer: %v", m.used)
			}
			if m, _, _ = after(m, from(Up, final), epoch.Add(7*ms)); m.used != test.afterwards ||
				m.detectionTime() != test.detection2 || m.polling {
				t.Errorf("after the answer: %v, detection time %v, polling: %v", m.used, m.detectionTime(), m.polling)
			}
		})
	}

	t.Run("again while polling", func(t *testing.T) {
		m, _, _ := machineIn(Up).configured(profile(90*ms, 60*ms, 3), epoch, 0)
		m, _, send := m.configured(profile(80*ms, 70*ms, 3), epoch, 0)
		if send || m.said != (timers{90 * ms, 60 * ms}) {
			t.Errorf("says %v before the first answer", m.said)
		}
		m, p, send := after(m, from(Up, final), epoch)
		if !send || !p.Poll || m.said != (timers{80 * ms, 70 * ms}) || m.used != (timers{80 * ms, 70 * ms}) {
			t.Errorf("after the first answer: %v %+v, used %v", send, p, m.used)
		}
		if m, _, _ = after(m, from(Up, final), epoch); m.polling {
			t.Error("polls on after the second answer")
		}
	})
	t.Run("while down", func(t *testing.T) {
		m, _, send := machineIn(Down).configured(profile(2*time.Second, 60*ms, 3), epoch, 0)
		if !send || m.polling || m.said.tx != 2*time.Second || m.used != m.said {
			t.Errorf("sends: %v, polling: %v, says %v", send, m.polling, m.said)
		}
	})
	t.Run("passive and back", func(t *testing.T) {
		passive := machineIn(Down).profile
		passive.Passive = true
		m, _, send := machineIn(Down).configured(passive, epoch, 0)
		if send || !m.nextTx.IsZero() {
			t.Error("a session that became passive sends")
		}
		if m, _, _ = m.configured(machineIn(Down).profile, epoch, 0); m.nextTx.IsZero() {
			t.Error("a session that is active again does not send")
		}
	})
}

func TestDisabled(t *testing.T) {
	m, p, send := machineIn(Up).disabled(epoch.Add(5*ms), 0)
	if !send || p.State != AdminDown || p.Diagnostic != AdministrativelyDown || !p.Poll || p.DesiredMinTx < time.Second {
		t.Errorf("sends: %v, %+v", send, p)
	}
	if m.quiet(epoch.Add(6*ms)) || m.nextTx.Sub(epoch) > 60*ms {
		t.Errorf("quiet: %v, next packet %v later: the peer must hear of it within its detection time",
			m.quiet(epoch.Add(6*ms)), m.nextTx.Sub(epoch))
	}
	if !m.quiet(epoch.Add(155 * ms)) {
		t.Error("goes on after the peer's detection time (RFC 5880 section 6.8.16)")
	}
	if answered, _, _ := after(m, from(Down, func(p *Packet) { p.Final = true }),
		epoch.Add(7*ms)); !answered.quiet(epoch.Add(7*ms)) || answered.state != AdminDown {
		t.Errorf("goes on after the peer's answer: %+v", answered)
	}
	if _, _, send := m.disabled(epoch.Add(10*ms), 0); send {
		t.Error("says it twice")
	}
	if m, _, send := machineIn(Down).disabled(epoch, 0); !send || !m.quiet(epoch) {
		t.Errorf("a session that is down: sends: %v, quiet: %v", send, m.quiet(epoch))
	}
	if m, _, send := machineIn(Down, func(m *machine) { m.profile.Passive = true }).disabled(epoch, 0); send ||
		!m.quiet(epoch) {
		t.Errorf("a passive session that has heard nothing: sends: %v, quiet: %v", send, m.quiet(epoch))
	}
	if m = m.enabled(epoch.Add(time.Second)); m.state != Down || m.discr != 1 || m.remoteDiscr != 0 || m.nextTx.IsZero() {
		t.Errorf("enabled again: %+v", m)
	}
}

func TestJitter(t *testing.T) {
	for _, test := range []struct {
		mult      uint8
		low, high time.Duration
	}{{3, 75 * ms, 100 * ms}, {2, 75 * ms, 100 * ms}, {1, 75 * ms, 90 * ms}} {
		low, high := jitter(100*ms, test.mult, 0), jitter(100*ms, test.mult, math.MaxUint32)
		if low != test.low || high > test.high || high < test.high-time.Microsecond {
			t.Errorf("multiplier %d: %v to %v, want %v to %v", test.mult, low, high, test.low, test.high)
		}
	}
	if got := jitter(math.MaxUint32*time.Microsecond, 3, math.MaxUint32); got > math.MaxUint32*time.Microsecond ||
		got < 0 {
		t.Errorf("the longest interval becomes %v", got)
	}
}

func TestExcused(t *testing.T) {
	now := epoch.Add(200 * ms)
	if m := machineIn(Up).excused(now); !m.detectAt.Equal(now.Add(240 * ms)) {
		t.Errorf("detection ends at %v", m.detectAt)
	}
	if m := machineIn(Down).excused(now); !m.detectAt.IsZero() {
		t.Error("a detection time without a peer")
	}
}

func TestPassiveAnswersTheFirstPacket(t *testing.T) {
	m := newMachine(Profile{Passive: true}.withDefaults(), 1, epoch)
	if !m.nextTx.IsZero() {
		t.Fatal("begins by itself")
	}
	m, p, send := after(m, from(Down, func(p *Packet) { p.YourDiscriminator = 0 }), epoch.Add(time.Second))
	if !send || p.State != Init || m.nextTx.IsZero() {
		t.Errorf("sends: %v %+v, next at %v", send, p, m.nextTx)
	}
	m, _, send = m.expired(epoch.Add(time.Minute), 0)
	if !send || !m.nextTx.IsZero() {
		t.Errorf("when the peer is gone, says so: %v; next at %v", send, m.nextTx)
	}
}

func TestProfileCheck(t *testing.T) {
	for _, test := range []struct {
		name           string
		profile        Profile
		fatal, ignored bool
	}{
		{"defaults", Profile{}, false, false},
		{"limits", Profile{TransmitInterval: 10 * ms, ReceiveInterval: time.Minute, DetectMultiplier: 255, MinimumTTL: 1},
			false, false},
		{"too fast", Profile{TransmitInterval: 9 * ms}, true, false},
		{"too slow", Profile{ReceiveInterval: time.Minute + ms}, true, false},
		{"negative", Profile{ReceiveInterval: -ms}, true, false},
		{"nanoseconds", Profile{ReceiveInterval: 10*ms + 1}, true, false},
		{"multiplier", Profile{DetectMultiplier: 1}, true, false},
		{"TTL", Profile{MinimumTTL: 255}, true, false},
		{"echo", Profile{Echo: true}, false, true},
		{"echo and too fast", Profile{Echo: true, TransmitInterval: ms}, true, false},
	} {
		fatal, ignored := test.profile.Check()
		if (fatal != nil) != test.fatal || (ignored != nil) != test.ignored {
			t.Errorf("%s: %v, %v", test.name, fatal, ignored)
		}
	}
}

func TestKeyCheck(t *testing.T) {
	for _, test := range []struct {
		key     Key
		refused bool
	}{
		{Key{Peer: addr("192.0.2.1")}, false},
		{Key{Peer: addr("192.0.2.1"), Local: addr("192.0.2.2"), Interface: "eth0"}, false},
		{Key{Peer: addr("fe80::1%eth0"), Local: addr("fe80::2")}, false},
		{Key{Peer: addr("fe80::1"), Interface: "eth0"}, false},
		{Key{}, true},
		{Key{Peer: addr("0.0.0.0")}, true},
		{Key{Peer: addr("224.0.0.1")}, true},
		{Key{Peer: addr("::ffff:192.0.2.1")}, true},
		{Key{Peer: addr("192.0.2.1"), Local: addr("2001:db8::1")}, true},
		{Key{Peer: addr("fe80::1")}, true},
		{Key{Peer: addr("fe80::1%eth0"), Interface: "eth1"}, true},
		{Key{Peer: addr("fe80::1%eth0"), Multihop: true}, true},
	} {
		if refused := test.key.check(); (refused != nil) != test.refused {
			t.Errorf("%s: %v", test.key, refused)
		}
	}
}

// TestInvariants drives a machine through random events, of peers that keep to no rule.
func TestInvariants(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	durations := []time.Duration{0, 10 * ms, 50 * ms, time.Second, time.Minute, math.MaxUint32 * time.Microsecond}
	profile := func() Profile {
		return Profile{
			TransmitInterval: durations[1+random.IntN(4)], ReceiveInterval: durations[1+random.IntN(4)],
			DetectMultiplier: uint8(2 + random.IntN(4)), Passive: random.IntN(4) == 0,
		}.withDefaults()
	}
	flag := func() bool { return random.IntN(3) == 0 }
	for range 300 {
		now := epoch
		m := newMachine(profile(), 1, now)
		for range 300 {
			var p Packet
			var send bool
			was := m
			switch event := random.IntN(40); {
			case event == 0:
				m, p, send = m.configured(profile(), now, random.Uint32())
			case event == 1:
				m, p, send = m.disabled(now, random.Uint32())
			case event == 2 && m.state == AdminDown:
				m = m.enabled(now)
			case event < 5 && !m.detectAt.IsZero():
				now = m.detectAt
				m, p, send = m.expired(now, random.Uint32())
			case event < 20 && !m.nextTx.IsZero():
				if now.Before(m.nextTx) {
					now = m.nextTx
				}
				m, p, send = m.due(now, random.Uint32())
			default:
				now = now.Add(time.Duration(random.IntN(int(20 * ms))))
				m, p, send = after(m, Packet{
					State: State(random.IntN(4)), Poll: flag(), Final: flag(), Demand: flag(),
					DetectMultiplier: uint8(1 + random.IntN(255)),
					MyDiscriminator:  2, DesiredMinTx: durations[random.IntN(6)], RequiredMinRx: durations[random.IntN(6)],
				}, now)
			}
			for what, wrong := range map[string]bool{
				"up without a peer":                      (m.state == Up || m.state == Init) && m.remoteDiscr == 0,
				"up without an end":                      (m.state == Up || m.state == Init) && m.detectAt.IsZero(),
				"goes on after a stop":                   was.state == AdminDown && m.state != AdminDown && m.state != Down,
				"AdminDown without diagnostic":           m.state == AdminDown && m.diag != AdministrativelyDown,
				"fast while not up":                      m.state != Up && m.said.tx < slow,
				"not what the profile says, and no poll": m.said != m.wanted() && !m.polling && m.state != AdminDown,
				"used differs from said, and no poll":    m.used != m.said && !m.polling && m.state != AdminDown,
				"polls nobody":                           m.polling && m.remoteDiscr == 0,
				"periodic but never":                     m.periodic() == m.nextTx.IsZero(),
				"poll and final":                         send && p.Poll && p.Final,
				"says another state":                     send && p.State != m.state,
				"says other timers":                      send && (p.DesiredMinTx != m.said.tx || p.RequiredMinRx != m.said.rx),
				"asks for demand or echo":                send && (p.Demand || p.EchoRx != 0 || p.ControlPlane || p.Authenticated),
				"changes state and does not say so": m.state != was.state && !send && was.state != AdminDown &&
					(!m.profile.Passive || was.remoteDiscr != 0),
			} {
				if wrong {
					t.Fatalf("%s:\nwas %+v\nis  %+v\nsends %v %+v", what, was, m, send, p)
				}
			}
		}
	}
}
