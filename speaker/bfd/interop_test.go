package bfd

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// behindRouter returns a namespace, one two cables away, and has a third forward between them:
// 192.0.2.1 and 2001:db8:1::1 to 198.51.100.2 and 2001:db8:2::2.
func behindRouter(t *testing.T) (a, b *nstest.NS) {
	t.Helper()
	a, b = nstest.New(t), nstest.New(t)
	middle := nstest.New(t)
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", middle, "left", "192.0.2.254/24")
	nstest.Veth(t, b, "eth0", "198.51.100.2/24", middle, "right", "198.51.100.254/24")
	middle.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	for _, side := range []struct {
		ns           *nstest.NS
		addr, router string
		link, via    string
	}{{a, "2001:db8:1::1/64", "2001:db8:1::fe", "left", "192.0.2.254"},
		{b, "2001:db8:2::2/64", "2001:db8:2::fe", "right", "198.51.100.254"}} {
		side.ns.Run(t, "ip", "addr", "add", side.addr, "dev", "eth0", "nodad")
		middle.Run(t, "ip", "addr", "add", side.router+"/64", "dev", side.link, "nodad")
		side.ns.Run(t, "ip", "route", "add", "default", "via", side.via)
		side.ns.Run(t, "ip", "route", "add", "default", "via", side.router)
	}
	return a, b
}

// paths are the ways to a router, as seen from both ends.
var paths = []struct {
	name   string
	lay    func(*testing.T) (a, b *nstest.NS)
	key    Key
	router wanted
}{
	{"IPv4", cable, Key{Peer: addr("192.0.2.2")}, wanted{peer: "192.0.2.1", local: "192.0.2.2", device: "eth0"}},
	{"IPv6", cable, Key{Peer: addr("2001:db8::2"), Local: addr("2001:db8::1")},
		wanted{peer: "2001:db8::1", local: "2001:db8::2", device: "eth0"}},
	{"unnumbered", cable, Key{Peer: addr("fe80::2%eth0")}, wanted{peer: "fe80::1", local: "fe80::2", device: "eth0"}},
	{"multihop IPv4", behindRouter, Key{Peer: addr("198.51.100.2"), Multihop: true},
		wanted{peer: "192.0.2.1", local: "198.51.100.2", multihop: true}},
	{"multihop IPv6", behindRouter, Key{Peer: addr("2001:db8:2::2"), Local: addr("2001:db8:1::1"), Multihop: true},
		wanted{peer: "2001:db8:1::1", local: "2001:db8:2::2", multihop: true}},
}

// TestRouters has sessions with the programs that routers run. Theirs: transmit 100 ms, receive 150
// ms, multiplier 4.
func TestRouters(t *testing.T) {
	for kind, program := range kinds {
		for _, path := range paths {
			t.Run(kind+" "+path.name, func(t *testing.T) {
				t.Parallel()
				a, b := path.lay(t)
				r := program.start(t, b, path.router)
				us, _ := startProcess(t, a, Options{})
				profile := Profile{TransmitInterval: 125 * ms, ReceiveInterval: 175 * ms, DetectMultiplier: 5}
				if kind == "BIRD" && path.key.Multihop {
					profile.MinimumTTL = 63 // it sends with 64
				}
				us.Set(map[Key]Profile{path.key: profile})

				o := us.until(path.key, "up at the agreed timers",
					func(o Outcome) bool { return settled(o) && o.DetectionTime == 700*ms })
				if o.TransmitInterval != 150*ms || o.RemoteMultiplier != 4 || o.RemoteReceiveInterval != 150*ms {
					t.Errorf("what was agreed: %+v", o)
				}
				sees(t, r, kind, profile)

				// Slower, then faster, without going down: other timers must not end a session. A router that
				// gets no CPU time may, which does not repeat each time.
				for tries := 5; !survives(us, path.key, func() {
					for _, other := range []Profile{
						{TransmitInterval: 225 * ms, ReceiveInterval: 300 * ms, DetectMultiplier: 3},
						{TransmitInterval: 150 * ms, ReceiveInterval: 150 * ms, DetectMultiplier: 6},
					} {
						other.MinimumTTL = profile.MinimumTTL
						us.Set(map[Key]Profile{path.key: other})
						us.until(path.key, "at the new timers", func(o Outcome) bool {
							return o.State == Up && o.TransmitInterval == other.TransmitInterval &&
								o.DetectionTime == 4*other.ReceiveInterval
						})
						sees(t, r, kind, other)
					}
				}); tries-- {
					if tries == 1 {
						t.Fatalf("the session never stays up over other timers: %+v", us.Outcomes()[path.key])
					}
				}

				us.Set(nil)
				waitFor(t, "the router to see our goodbye", func() bool {
					seen := program.views(t, r)
					return len(seen) == 1 && !seen[0].Up && (kind != "FRR" || seen[0].Diagnostic == "administratively down")
				})
				waitFor(t, "the session to be gone", func() bool { return len(us.Outcomes()) == 0 })
				us.Set(map[Key]Profile{path.key: profile})
				us.until(path.key, "up again", settled)

				failures := us.until(path.key, "settled", settled).Failures
				r.Kill(program.program)
				o = us.until(path.key, "down", func(o Outcome) bool { return o.State == Down })
				if o.Diagnostic != DetectionExpired || o.Failures <= failures || o.LastDown.Administrative {
					t.Errorf("a killed router is seen as %+v", o)
				}
				if h := us.Health(); h.Lost > 0 || len(h.Dropped) > 0 {
					t.Errorf("%+v", h)
				}
			})
		}
	}
}

// TestRoutersTrouble has routers freeze, go on, and take the session down themselves. We are
// passive, which must not matter.
func TestRoutersTrouble(t *testing.T) {
	for kind, program := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			a, b := cable(t)
			session := wanted{peer: left, local: right, device: "eth0"}
			r := program.start(t, b, session)
			us, _ := startProcess(t, a, Options{})
			us.Set(map[Key]Profile{toRight: {TransmitInterval: 150 * ms, ReceiveInterval: 150 * ms, Passive: true}})
			failures := us.until(toRight, "settled", settled).Failures
			signal := func(sig syscall.Signal) {
				if err := r.Signal(sig); err != nil {
					t.Error(err)
				}
			}

			signal(unix.SIGSTOP)
			o := us.until(toRight, "down", func(o Outcome) bool { return o.State == Down })
			if o.Failures <= failures || o.LastDown.Diagnostic != DetectionExpired {
				t.Errorf("frozen: %+v", o)
			}
			signal(unix.SIGCONT)
			failures = us.until(toRight, "settled again", settled).Failures

			if kind == "BIRD" { // it cannot take a session down: it falls silent when it is told to end
				return
			}
			if err := r.Configure(t.Context(), "bfd", session.frr(), "shutdown"); err != nil {
				t.Error(err)
			}
			// One that the router has lost before, as it got no CPU time, it takes down all the same.
			o = us.until(toRight, "told", func(o Outcome) bool { return o.State == Down && o.RemoteState == AdminDown })
			if o.Failures == failures && !o.LastDown.Administrative {
				t.Errorf("shut down: %+v; %+v", o, o.LastDown)
			}
		})
	}
}

// survives reports whether a session stays up while f runs.
func survives(us *running, key Key, f func()) bool {
	before := us.until(key, "settled", settled)
	f()
	after := us.Outcomes()[key]
	return after.State == Up && after.Ups == before.Ups
}

// sees waits for the router to show our session up, with our profile.
func sees(t *testing.T, r *router.Router, kind string, p Profile) {
	t.Helper()
	want := view{
		Up: true, Diagnostic: "ok",
		Transmit: int(p.TransmitInterval.Milliseconds()), Receive: int(p.ReceiveInterval.Milliseconds()),
		Multiplier: int(p.DetectMultiplier),
	}
	if kind == "BIRD" { // which shows what comes of it
		want = view{Up: true, Interval: max(100*ms, p.ReceiveInterval),
			Timeout: time.Duration(p.DetectMultiplier) * max(150*ms, p.TransmitInterval)}
	}
	var seen []view
	defer func() {
		if t.Failed() {
			t.Logf("want %+v, last seen %+v", want, seen)
		}
	}()
	waitFor(t, fmt.Sprintf("%s to show what we said", kind), func() bool {
		seen = kinds[kind].views(t, r)
		return slices.Equal(seen, []view{want})
	})
}
