package bfd

import (
	"net/netip"
	"slices"
	"testing"
	"time"
)

// still is a wire on which only what a test says arrives.
type still struct {
	arrived []datagram
	horizon time.Time // zero: all was taken
	sent    []Packet
	open    []listener
}

func (s *still) receive(now time.Time) ([]datagram, time.Time) {
	arrived := s.arrived
	s.arrived = nil
	if s.horizon.IsZero() {
		return arrived, now
	}
	return arrived, s.horizon
}

func (s *still) wait(time.Time) {}
func (s *still) wake()          {}
func (s *still) close()         {}

func (s *still) listen(l listener) error {
	s.open = append(s.open, l)
	return nil
}

func (s *still) unlisten(l listener) {
	s.open = slices.DeleteFunc(s.open, func(o listener) bool { return o == l })
}

func (s *still) dial(Key, uint16, func() uint32) (link, error) {
	return (*stillLink)(s), nil
}

type stillLink still

func (l *stillLink) send(b []byte) error {
	if p, drop := decode(b); drop == dropNone {
		l.sent = append(l.sent, p)
	}
	return nil
}
func (l *stillLink) sourcePort() uint16 { return minSourcePort }
func (l *stillLink) device() int        { return 7 }
func (l *stillLink) toward() []int      { return []int{7, 9} }
func (l *stillLink) close()             {}

// engineWith returns an engine with one session, and the session.
func engineWith(key Key, p Profile) (*engine, *still, *session) {
	w := &still{}
	discr := uint32(100)
	e := newEngine(newWorker(workerOptions{random: func() uint32 { discr++; return discr }}), w)
	e.apply(map[Key]Profile{key: p}, epoch)
	e.step(epoch)
	return e, w, e.sessions[0]
}

// TestSilenceIsJudgedOnlyAsFarAsPacketsWereTaken is for floods: a packet of the peer may be behind
// those that are still in the socket.
func TestSilenceIsJudgedOnlyAsFarAsPacketsWereTaken(t *testing.T) {
	e, w, s := engineWith(toRight, fast)
	s.machine = machineIn(Up)
	end := s.machine.detectAt
	w.horizon = end.Add(-ms)
	e.step(end.Add(time.Minute))
	if s.machine.state != Up {
		t.Error("down before all packets were taken")
	}
	w.horizon = end
	e.step(end.Add(time.Minute))
	if s.machine.state != Down {
		t.Error("not down though nothing came in time")
	}
}

func TestWhichSession(t *testing.T) {
	const discr = 101
	down := Packet{State: Down, DetectMultiplier: 3, MyDiscriminator: 9}
	up := Packet{State: Up, DetectMultiplier: 3, MyDiscriminator: 9, YourDiscriminator: discr}
	v4, v6 := listener{}, listener{v6: true}
	peer, other := addr("192.0.2.2"), addr("192.0.2.3")
	ll := addr("fe80::2")
	for _, test := range []struct {
		name string
		key  Key
		p    Packet
		d    datagram
		want Drop
	}{
		{"by address", Key{Peer: peer}, down, datagram{listener: v4, from: peer, ttl: 255}, dropNone},
		{"by discriminator", Key{Peer: peer}, up, datagram{listener: v4, from: peer, ttl: 255}, dropNone},
		{"by discriminator, from another address", Key{Peer: peer}, up, datagram{listener: v4, from: other, ttl: 255},
			dropNone},
		{"another address", Key{Peer: peer}, down, datagram{listener: v4, from: other, ttl: 255}, dropNoSession},
		{"another discriminator", Key{Peer: peer}, Packet{State: Up, YourDiscriminator: discr + 1},
			datagram{listener: v4, from: peer, ttl: 255}, dropNoSession},
		{"no discriminator, up", Key{Peer: peer}, Packet{State: Up}, datagram{listener: v4, from: peer, ttl: 255}, dropState},
		{"no discriminator, init", Key{Peer: peer}, Packet{State: Init}, datagram{listener: v4, from: peer, ttl: 255},
			dropState},
		{"no discriminator, held down", Key{Peer: peer}, Packet{State: AdminDown},
			datagram{listener: v4, from: peer, ttl: 255}, dropNone},
		{"to our address", Key{Peer: peer, Local: other}, down, datagram{listener: v4, from: peer, to: other, ttl: 255},
			dropNone},
		{"to another of our addresses", Key{Peer: peer, Local: other}, down,
			datagram{listener: v4, from: peer, to: peer, ttl: 255}, dropNoSession},
		{"on the interface", Key{Peer: peer, Interface: "eth0"}, down,
			datagram{listener: v4, from: peer, device: 7, ttl: 255}, dropNone},
		{"on another interface", Key{Peer: peer, Interface: "eth0"}, down,
			datagram{listener: v4, from: peer, device: 8, ttl: 255}, dropNoSession},
		{"by an interface that leads elsewhere", Key{Peer: peer}, down,
			datagram{listener: v4, from: peer, device: 8, ttl: 255}, dropInterface},
		{"by discriminator, by such an interface", Key{Peer: peer}, up,
			datagram{listener: v4, from: peer, device: 8, ttl: 255}, dropNone},
		{"multihop by such an interface", Key{Peer: peer, Multihop: true}, down,
			datagram{listener: listener{multihop: true}, from: peer, device: 8, ttl: 254}, dropNone},
		{"link-local", Key{Peer: ll.WithZone("eth0")}, down, datagram{listener: v6, from: ll, device: 7, ttl: 255}, dropNone},
		{"link-local on another interface", Key{Peer: ll.WithZone("eth0")}, down,
			datagram{listener: v6, from: ll, device: 8, ttl: 255}, dropNoSession},
		{"one hop too far", Key{Peer: peer}, down, datagram{listener: v4, from: peer, ttl: 254}, dropTTL},
		{"unknown TTL", Key{Peer: peer}, down, datagram{listener: v4, from: peer, ttl: -1}, dropTTL},
		{"multihop, one router", Key{Peer: peer, Multihop: true}, down,
			datagram{listener: listener{multihop: true}, from: peer, ttl: 254}, dropNone},
		{"multihop, too far", Key{Peer: peer, Multihop: true}, down,
			datagram{listener: listener{multihop: true}, from: peer, ttl: 253}, dropTTL},
		{"multihop packet for a session that is not", Key{Peer: peer}, up,
			datagram{listener: listener{multihop: true}, from: peer, ttl: 255}, dropNoSession},
		{"single-hop packet for a multihop session", Key{Peer: peer, Multihop: true}, up,
			datagram{listener: v4, from: peer, ttl: 255}, dropNoSession},
		{"authenticated", Key{Peer: peer}, Packet{State: Down, Authenticated: true},
			datagram{listener: v4, from: peer, ttl: 255}, dropAuthentication},
	} {
		e, _, want := engineWith(test.key, Profile{})
		if test.d.device == 0 {
			test.d.device = 9
		}
		got, drop := e.find(&test.p, &test.d, epoch)
		if drop != test.want || (got == want) != (drop == dropNone) {
			t.Errorf("%s: dropped because of %v, want %v", test.name, drop, test.want)
		}
	}
}

// TestListensInTheVRFThatIsThere has a VRF deleted and made anew: a socket stays bound to the interface of before.
func TestListensInTheVRFThatIsThere(t *testing.T) {
	key := Key{Peer: addr("192.0.2.2"), VRF: "red", VRFIndex: 7}
	e, w, _ := engineWith(key, Profile{})
	anew := key
	anew.VRFIndex = 9
	e.apply(map[Key]Profile{anew: {}}, epoch)
	e.step(epoch)
	if !slices.Contains(w.open, anew.listener()) {
		t.Errorf("listens at %v, not yet in the new VRF", w.open)
	}
	late := epoch.Add(time.Minute) // the session of before has ended
	e.step(late)
	e.step(late)
	if !slices.Equal(w.open, []listener{anew.listener()}) || len(e.sessions) != 1 {
		t.Errorf("%d sessions; listens at %v", len(e.sessions), w.open)
	}
	down := Packet{State: Down, DetectMultiplier: 3, MyDiscriminator: 9}
	for l, want := range map[listener]Drop{key.listener(): dropNoSession, anew.listener(): dropNone} {
		if _, drop := e.find(&down, &datagram{listener: l, from: key.Peer, device: 7, ttl: 255}, late); drop != want {
			t.Errorf("a packet that came in at %v: %v, want %v", l, drop, want)
		}
	}
}

func TestTooFarIsSaid(t *testing.T) {
	e, w, s := engineWith(Key{Peer: addr("192.0.2.2"), Multihop: true}, Profile{})
	packet := Packet{State: Down, DetectMultiplier: 3, MyDiscriminator: 9}.append(nil)
	d := datagram{payload: packet, listener: listener{multihop: true}, from: addr("192.0.2.2"), ttl: 64, at: epoch}
	w.arrived = []datagram{d}
	e.step(epoch)
	problem := func() string { return e.worker.Outcomes()[s.key].Problem }
	if got, want := problem(), "packets of the peer arrive with TTL 64, and the least that is heeded is 254"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if dropped := e.worker.Health().Dropped[dropTTL]; dropped != 1 {
		t.Errorf("%d packets dropped because of their TTL", dropped)
	}
	e.apply(map[Key]Profile{s.key: {MinimumTTL: 60}}, epoch)
	w.arrived = []datagram{d}
	e.step(epoch)
	if problem() != "" || s.machine.state != Init {
		t.Errorf("with a lower minimum: %q, %v", problem(), s.machine.state)
	}
}

func TestDiscriminatorsAreNotUsedTwice(t *testing.T) {
	numbers := []uint32{5, 0, 5, 5, 6, 6, 7}
	e := newEngine(newWorker(workerOptions{random: func() uint32 { n := numbers[0]; numbers = numbers[1:]; return n }}),
		&still{})
	e.apply(map[Key]Profile{{Peer: addr("192.0.2.1")}: {}, {Peer: addr("192.0.2.2")}: {}, {Peer: addr("192.0.2.3")}: {}},
		epoch)
	seen := map[uint32]bool{}
	for _, s := range e.sessions {
		seen[s.machine.discr] = true
	}
	if len(seen) != 3 || seen[0] {
		t.Errorf("%v", seen)
	}
}

// TestSteadyStateAllocatesNothing holds for a packet in and a packet out.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	e, w, s := engineWith(toRight, fast)
	s.machine = machineIn(Up)
	now, turn := epoch, steadyTurn(e, w, s)
	turn(&now)
	if allocs := testing.AllocsPerRun(1000, func() { turn(&now) }); allocs > 0 {
		t.Errorf("%v allocations", allocs)
	}
	if s.machine.state != Up || s.counters.received.Load() < 1000 || s.counters.sent.Load() < 1000 {
		t.Errorf("%v, %d packets in, %d out", s.machine.state, s.counters.received.Load(), s.counters.sent.Load())
	}
}

func BenchmarkPacketInAndOut(b *testing.B) {
	e, w, s := engineWith(toRight, fast)
	s.machine = machineIn(Up)
	now, turn := epoch, steadyTurn(e, w, s)
	b.ReportAllocs()
	for b.Loop() {
		turn(&now)
	}
}

// steadyTurn returns a function that lets a session that is up receive a packet and send one.
func steadyTurn(e *engine, w *still, s *session) func(now *time.Time) {
	packet := from(Up, func(p *Packet) { p.YourDiscriminator = s.machine.discr }).append(nil)
	arrived := []datagram{{payload: packet, from: netip.MustParseAddr(right), ttl: 255}}
	return func(now *time.Time) {
		*now = now.Add(50 * ms)
		arrived[0].at = *now
		w.arrived, w.sent = arrived, w.sent[:0]
		e.step(*now)
		e.next(time.Time{})
	}
}
