package bfd

import (
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/seeds"
)

const left, right = "192.0.2.1", "192.0.2.2"

var toLeft, toRight = Key{Peer: addr(left)}, Key{Peer: addr(right)}

// inBubble runs a test with two nodes whose session is up.
func inBubble(t *testing.T, p Profile, test func(t *testing.T, c *cloud, a, b *node)) {
	synctest.Test(t, func(t *testing.T) {
		c := newCloud()
		a, b := c.node(t, left), c.node(t, right)
		a.Set(map[Key]Profile{toRight: p})
		b.Set(map[Key]Profile{toLeft: p})
		time.Sleep(5 * time.Second)
		for _, n := range []*node{a, b} {
			if o := n.one(t); o.State != Up || o.RemoteState != Up {
				t.Fatalf("not up: %+v", o)
			}
		}
		test(t, c, a, b)
	})
}

// steady fails the test if a session was ever anything but up.
func steady(t *testing.T, nodes ...*node) {
	t.Helper()
	for _, n := range nodes {
		for key, o := range n.Outcomes() {
			if o.State != Up || o.Ups != 1 || o.Failures != 0 {
				t.Errorf("%s: %v, %d times up, %d failures, last down %+v", key, o.State, o.Ups, o.Failures, o.LastDown)
			}
		}
	}
}

func TestLongWithoutAChange(t *testing.T) {
	long := seeds.Of(10*time.Minute, time.Hour)
	synctest.Test(t, func(t *testing.T) {
		c := newCloud()
		lostLast := map[uint32]bool{}
		c.fate = func(_, _ netip.Addr, p Packet) (time.Duration, bool) { // called under the cloud's lock
			lost := !lostLast[p.MyDiscriminator] && c.random.IntN(4) == 0 // a fifth of the packets, never two in a row
			lostLast[p.MyDiscriminator] = lost
			if p.State != Up { // a Down that overtakes an Init ends a session that has just come up: the protocol cannot tell
				return ms, lost
			}
			return time.Duration(c.random.IntN(int(5 * ms))), lost
		}
		a, b := c.node(t, left), c.node(t, right)
		sessions := func(peer Key) map[Key]Profile {
			several := peer
			several.Multihop = true
			return map[Key]Profile{peer: fast, several: {}}
		}
		a.Set(sessions(toRight))
		b.Set(sessions(toLeft))
		time.Sleep(long)
		synctest.Wait()
		steady(t, a, b)
		for key, o := range a.Outcomes() {
			if want := uint64(long / o.TransmitInterval); o.Sent < want || o.Sent > want*4/3+10 {
				t.Errorf("%s: sent %d packets in %v, want %d to a third more", key, o.Sent, long, want)
			}
			if since := time.Since(o.Since); since < long-10*time.Second {
				t.Errorf("%s: up only for %v", key, since)
			}
		}
		if h := a.Health(); len(h.Dropped) > 0 || h.LatestWake > 0 {
			t.Errorf("%+v", h)
		}
	})
}

// TestLoss loses packets in a row, one way: fewer than the multiplier do no harm.
func TestLoss(t *testing.T) {
	for lose := range 6 {
		inBubble(t, Profile{TransmitInterval: 50 * ms, ReceiveInterval: 50 * ms, DetectMultiplier: 3},
			func(t *testing.T, c *cloud, a, b *node) {
				left := lose
				c.mu.Lock()
				c.fate = func(from, _ netip.Addr, _ Packet) (time.Duration, bool) {
					if from == toLeft.Peer && left > 0 {
						left--
						return 0, true
					}
					return ms, false
				}
				c.mu.Unlock()
				time.Sleep(5 * time.Second)
				o, other := a.one(t), b.one(t)
				if lose < 3 {
					steady(t, a, b)
					return
				}
				if lose == 3 { // depends on the jitter
					return
				}
				if o.State != Up || o.Failures != 1 || other.Failures != 1 {
					t.Errorf("%d lost: %+v; %+v", lose, o, other)
				}
				// The end that has lost them says so without a discriminator, as anybody could: the other one waits
				// for the end of its own detection time.
				if o.LastDown == nil || o.LastDown.Diagnostic != DetectionExpired ||
					other.LastDown.Diagnostic != DetectionExpired {
					t.Errorf("%d lost: %+v; %+v", lose, o.LastDown, other.LastDown)
				}
			})
	}
}

func TestReordering(t *testing.T) {
	inBubble(t, Profile{TransmitInterval: 10 * ms, ReceiveInterval: 10 * ms, DetectMultiplier: 10},
		func(t *testing.T, c *cloud, a, b *node) {
			c.mu.Lock()
			c.fate = func(netip.Addr, netip.Addr, Packet) (time.Duration, bool) {
				return time.Duration(c.random.IntN(int(60 * ms))), false
			}
			c.mu.Unlock()
			for i := range 50 { // of which some change the timers, in the middle of it
				p := Profile{TransmitInterval: time.Duration(10+i%3*5) * ms, ReceiveInterval: time.Duration(10+i%4*5) * ms,
					DetectMultiplier: 10}
				a.Set(map[Key]Profile{toRight: p})
				time.Sleep(time.Second)
			}
			steady(t, a, b)
		})
}

func TestPartitionIsFoundAndHeals(t *testing.T) {
	for name, cut := range map[string]func(from netip.Addr) bool{
		"both ways": func(netip.Addr) bool { return true },
		"one way":   func(from netip.Addr) bool { return from == toLeft.Peer },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
				whole := c.fate
				c.mu.Lock()
				c.fate = func(from, _ netip.Addr, _ Packet) (time.Duration, bool) { return ms, cut(from) }
				c.mu.Unlock()
				time.Sleep(160 * ms)
				if o := b.one(t); o.State == Up {
					t.Errorf("%s after the detection time: %+v", b.wire.addr, o)
				}
				time.Sleep(160 * ms) // of one way, the other end hears from packets that anybody could send
				for _, n := range []*node{a, b} {
					if o := n.one(t); o.State == Up || o.Failures != 1 || o.LastDown.Administrative {
						t.Errorf("%s after the detection time: %+v", n.wire.addr, o)
					}
				}
				time.Sleep(time.Minute)
				if o := b.one(t); o.State != Down || o.RemoteDiscriminator != 0 || o.DetectionTime != 0 {
					t.Errorf("after a minute: %+v", o)
				}
				c.mu.Lock()
				c.fate = whole
				c.mu.Unlock()
				time.Sleep(3 * time.Second)
				for _, n := range []*node{a, b} {
					if o := n.one(t); o.State != Up || o.Failures != 1 || o.Ups != 2 || o.Diagnostic != NoDiagnostic {
						t.Errorf("%s healed: %+v", n.wire.addr, o)
					}
				}
			})
		})
	}
}

// spoof has both ends receive a packet that somebody else makes up, who knows no discriminator.
func spoof(a, b *node, p Packet) {
	p.MyDiscriminator, p.DetectMultiplier = 0xbad, 255
	a.wire.arrive(datagram{payload: p.append(nil), from: b.wire.addr, to: a.wire.addr, ttl: 255})
	b.wire.arrive(datagram{payload: p.append(nil), from: a.wire.addr, to: b.wire.addr, ttl: 255})
}

// A machine on the link can send from any address and with any TTL, but does not see the discriminators.
func TestPacketsMadeUpDoNotEndASession(t *testing.T) {
	inBubble(t, fast, func(t *testing.T, _ *cloud, a, b *node) {
		for range 1000 {
			for _, state := range []State{Down, AdminDown} {
				spoof(a, b, Packet{State: state, DesiredMinTx: time.Second, RequiredMinRx: time.Second})
			}
			time.Sleep(7 * ms)
		}
		steady(t, a, b)
		if dropped := a.Health().Dropped[dropUnproven]; dropped != 2000 {
			t.Errorf("%d packets counted, want 2000", dropped)
		}
	})
}

// While a session is down, its end cannot tell a packet that is made up from one of a peer that begins anew. Two such
// packets must not keep both ends silent until their intervals are over, which would be days.
func TestPacketsMadeUpDoNotSilenceASession(t *testing.T) {
	for name, interval := range map[string]time.Duration{"none wanted": 0, "one in an hour": time.Hour} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
				whole := c.fate
				fate := func(f func(netip.Addr, netip.Addr, Packet) (time.Duration, bool)) {
					c.mu.Lock()
					defer c.mu.Unlock()
					c.fate = f
				}
				fate(func(netip.Addr, netip.Addr, Packet) (time.Duration, bool) { return 0, true })
				time.Sleep(time.Second)
				spoof(a, b, Packet{State: AdminDown, DesiredMinTx: time.Hour, RequiredMinRx: interval})
				time.Sleep(10 * ms)
				fate(whole)
				time.Sleep(10 * time.Second)
				for _, n := range []*node{a, b} {
					if o := n.one(t); o.State != Up {
						t.Errorf("%s: %+v", n.wire.addr, o)
					}
				}
			})
		})
	}
}

// What anybody can bring about is not logged without a bound, and what was left out is counted.
func TestPacketsMadeUpDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCloud()
		a := c.node(t, left)
		noted, leftOut := 0, 0
		a.opts.note = func(c change) { noted, leftOut = noted+1, leftOut+c.LeftOut }
		a.Set(map[Key]Profile{toRight: fast})
		const changes = 1000
		for i := range changes {
			p := Packet{State: Down, DetectMultiplier: 3, MyDiscriminator: 9}
			if i%2 == 1 {
				p.State = AdminDown
			}
			a.wire.arrive(datagram{payload: p.append(nil), from: toRight.Peer, to: toLeft.Peer, ttl: 255})
			time.Sleep(ms)
		}
		time.Sleep(10 * time.Second) // Init ends, and another second has begun
		a.stop()
		if noted > 2*maxLines+1 || noted+leftOut < changes {
			t.Errorf("%d of %d changes were noted, and %d are said to be left out", noted, changes, leftOut)
		}
	})
}

func TestPeerCrashesAndRestarts(t *testing.T) {
	inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
		b.pull()
		again := c.node(t, right) // within the detection time, so that it is the newcomer that tells
		again.Set(map[Key]Profile{toLeft: fast})
		time.Sleep(3 * time.Second)
		o := a.one(t)
		if o.State != Up || o.Failures != 1 || o.LastDown.Administrative {
			t.Errorf("%+v, last down %+v", o, o.LastDown)
		}
	})
}

// TestPlannedStopIsNoFailure is the promise to the peer: what is taken down on purpose says nothing
// of the path.
func TestPlannedStopIsNoFailure(t *testing.T) {
	for name, end := range map[string]func(b *node){
		"end of the actor":  func(b *node) { b.stop() },
		"session taken out": func(b *node) { b.Set(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
				began := time.Now()
				end(b)
				if took := time.Since(began); took > 10*ms {
					t.Errorf("took %v, though the peer answered", took)
				}
				time.Sleep(time.Second)
				o := a.one(t)
				if o.State != Down || o.RemoteState != AdminDown || o.RemoteDiagnostic != AdministrativelyDown || o.Failures != 0 ||
					!o.LastDown.Administrative {
					t.Errorf("%+v, last down %+v", o, o.LastDown)
				}
				time.Sleep(time.Minute)
				if o := a.one(t); o.Failures != 0 {
					t.Errorf("a minute later: %+v", o)
				}
			})
		})
	}
}

func TestGoodbyeSurvivesLoss(t *testing.T) {
	inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
		first := true
		c.mu.Lock()
		c.fate = func(_, _ netip.Addr, p Packet) (time.Duration, bool) {
			lost := first && p.State == AdminDown
			first = first && !lost
			return ms, lost
		}
		c.mu.Unlock()
		b.stop()
		time.Sleep(time.Second)
		if o := a.one(t); o.Failures != 0 || o.RemoteState != AdminDown && o.RemoteState != Down {
			t.Errorf("%+v", o)
		}
		if first {
			t.Error("no goodbye was sent")
		}
	})
}

func TestStopDoesNotWaitForTheDead(t *testing.T) {
	inBubble(t, Profile{TransmitInterval: time.Minute, DetectMultiplier: 255}, func(t *testing.T, c *cloud, a, b *node) {
		b.pull()
		began := time.Now()
		a.stop()
		if took := time.Since(began); took > farewell {
			t.Errorf("took %v", took)
		}
	})
}

func TestSessionComesBackWhileItLeaves(t *testing.T) {
	inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
		c.mu.Lock()
		c.fate = func(netip.Addr, netip.Addr, Packet) (time.Duration, bool) { return 40 * ms, false }
		c.mu.Unlock()
		b.Set(nil)
		time.Sleep(ms)
		b.Set(map[Key]Profile{toLeft: fast})
		time.Sleep(5 * time.Second)
		for _, n := range []*node{a, b} {
			if o := n.one(t); o.State != Up || o.Failures > 0 {
				t.Errorf("%+v", o)
			}
		}
	})
}

// TestLateWakeUpIsNotThePeersFault lets the thread oversleep its peer's detection time. The packets
// that came meanwhile count.
func TestLateWakeUpIsNotThePeersFault(t *testing.T) {
	patient := Profile{TransmitInterval: 50 * ms, ReceiveInterval: 50 * ms, DetectMultiplier: 100}
	inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
		a.Set(map[Key]Profile{toRight: patient}) // so that b forgives the silence
		time.Sleep(time.Second)
		for range 20 {
			a.wire.set(func(w *fakeWire) { w.asleep = 700 * ms })
			time.Sleep(2 * time.Second)
		}
		steady(t, a, b)
		if late := a.Health().LatestWake; late < 600*ms {
			t.Errorf("was late by %v only: the test does not show anything", late)
		}
		b.pull()
		a.wire.set(func(w *fakeWire) { w.asleep = 700 * ms })
		time.Sleep(2 * time.Second)
		if o := a.one(t); o.Failures != 1 {
			t.Errorf("and a dead peer is not found: %+v", o)
		}
	})
}

func TestLossInOurOwnBufferIsNotThePeersFault(t *testing.T) {
	inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
		other := Key{Peer: addr("192.0.2.3")}
		third := c.node(t, "192.0.2.3")
		a.Set(map[Key]Profile{toRight: fast, other: fast})
		third.Set(map[Key]Profile{toLeft: fast})
		time.Sleep(5 * time.Second)
		steady(t, a)
		lost := 0
		c.mu.Lock()
		c.fate = func(from, to netip.Addr, _ Packet) (time.Duration, bool) {
			if from == other.Peer && lost < 4 { // as if there had been no room
				lost++
				return 0, true
			}
			return ms, false
		}
		c.mu.Unlock()
		for range 4 {
			time.Sleep(50 * ms)
			a.wire.set(func(w *fakeWire) { w.lost = true })
		}
		time.Sleep(time.Second)
		steady(t, a)
		if a.Health().Lost == 0 || lost < 4 {
			t.Errorf("the test does not show anything: %d lost", lost)
		}
	})
}

func TestTroubleIsShownAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCloud()
		a, b := c.node(t, left), c.node(t, right)
		a.wire.set(func(w *fakeWire) { w.fails = errors.New("no such interface") })
		a.Set(map[Key]Profile{toRight: fast})
		b.Set(map[Key]Profile{toLeft: fast})
		time.Sleep(3 * time.Second)
		if o := a.one(t); o.Problem != "no such interface" || o.State == Up {
			t.Errorf("%+v", o)
		}
		a.wire.set(func(w *fakeWire) { w.fails = nil })
		time.Sleep(3 * time.Second)
		if o := a.one(t); o.Problem != "" || o.State != Up {
			t.Errorf("later: %+v", o)
		}
		a.wire.set(func(w *fakeWire) { w.fails = errors.New("network is unreachable") })
		time.Sleep(3 * time.Second)
		if o := a.one(t); o.Problem == "" || o.State == Up && b.one(t).State == Up {
			t.Errorf("later still: %+v", o)
		}
	})
}

func TestRefusals(t *testing.T) {
	inBubble(t, fast, func(t *testing.T, c *cloud, a, b *node) {
		bad := Key{Peer: addr("192.0.2.9")}
		a.Set(map[Key]Profile{
			toRight: {TransmitInterval: 50 * ms, ReceiveInterval: 50 * ms, Echo: true},
			bad:     {TransmitInterval: ms},
			{}:      {},
		})
		time.Sleep(time.Second)
		synctest.Wait()
		all := a.Outcomes()
		if o := all[toRight]; o.State != Up || o.Ups != 1 || o.Refused != nil || o.Ignored == nil ||
			o.Ignored.Reason != ReasonEchoUnsupported {
			t.Errorf("echo: %+v", o)
		}
		if o := all[bad]; o.Refused == nil || o.Refused.Reason != ReasonProfileInvalid || o.State != AdminDown {
			t.Errorf("bad profile: %+v", o)
		}
		if o := all[Key{}]; o.Refused == nil || o.Refused.Reason != ReasonPeerInvalid {
			t.Errorf("bad key: %+v", o)
		}
		a.Set(map[Key]Profile{toRight: fast})
		time.Sleep(time.Second)
		if o := a.one(t); o.Ups != 1 || o.Ignored != nil {
			t.Errorf("%+v", o)
		}
	})
}

func TestChangedIsCalledForChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCloud()
		a, b := c.node(t, left), c.node(t, right)
		a.Set(map[Key]Profile{toRight: fast})
		b.Set(map[Key]Profile{toLeft: fast})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		before := a.changed.Load()
		for range 60 {
			time.Sleep(time.Second)
			a.Set(map[Key]Profile{toRight: fast}) // as a loop does that is called when something changed
		}
		synctest.Wait()
		if calls := a.changed.Load() - before; calls != 0 {
			t.Errorf("%d calls in a minute without a change", calls)
		}
		b.stop()
		synctest.Wait()
		if a.changed.Load() == before {
			t.Error("no call when the session went down")
		}
	})
}
