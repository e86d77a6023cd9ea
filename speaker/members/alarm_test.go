package members

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// What gossip is too slow for, alarms find: a node to which two others have lost their paths, and
// whose kernel is silent. When it answers again it is told what it has missed.
func TestAlarms(t *testing.T) {
	r := newRig(t, "a", "b", "c", "d")
	r.cluster(func(s *setup) {
		s.Profile = Profile{ProbeInterval: time.Hour, ProbeTimeout: 50 * time.Millisecond,
			GossipInterval: 50 * time.Millisecond}
		s.liveness.Ring = 2
	})
	a, b, c, d := r.members["a"], r.members["b"], r.members["c"], r.members["d"]

	// All kernels answer, so no path that is lost shows anything.
	a.alive.PathLost("d")
	b.alive.PathLost("d")
	c.say(map[netip.Addr]plan.Claim{vip1: {}})
	r.wantClaims("a", vip1, map[string]plan.Claim{"c": {}})
	time.Sleep(2 * 50 * time.Millisecond) // as long as a kernel is asked
	for _, name := range []string{"a", "b", "c"} {
		r.eventually(name+" sees all", func() bool { return len(r.members[name].Live()) == 4 })
	}

	time.Sleep(time.Second) // of calm
	d.cable.pulled.Store(true)
	d.alive.PathLost("a") // who is cut off hears no other's alarm
	for _, name := range []string{"a", "b", "c"} {
		r.eventually(name+" has buried d", func() bool {
			a.alive.PathLost("d") // again: a busy machine may lose packets, or be late
			b.alive.PathLost("d")
			time.Sleep(100 * time.Millisecond)
			return slices.Equal(r.members[name].Dead(), []string{"d"})
		})
	}
	c.say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	if live := d.Live(); len(live) != 4 {
		t.Errorf("d, which is cut off, sees %v", live)
	}

	d.cable.pulled.Store(false)
	for _, name := range []string{"a", "b", "c"} {
		r.eventually(name+" sees d again", func() bool { return len(r.members[name].Live()) == 4 })
	}
	r.wantClaims("d", vip1, map[string]plan.Claim{"c": {Answering: true}})
}

func FuzzAlarm(f *testing.F) {
	f.Add(alarm{node: "n1", born: 300, by: "n2"}.encode())
	f.Add([]byte{alarmVersion})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == 0 || b[0] != alarmVersion {
			return
		}
		a, err := decodeAlarm(b)
		if err != nil {
			return
		}
		if again, err := decodeAlarm(a.encode()); err != nil || again != a {
			t.Fatalf("%+v becomes %+v, %v", a, again, err)
		}
	})
}

// A speaker is asked over gossip, too: a packet filter may drop what probes of kernels send.
func TestPing(t *testing.T) {
	r := newRig(t, "a", "b")
	r.cluster()
	a, b := r.members["a"], r.members["b"]
	addr := netip.AddrPortFrom(r.peers["b"][0], uint16(testPort()))
	r.eventually("b answers", func() bool { return a.Ping("b", addr) })
	if a.Ping("c", addr) {
		t.Error("b answers for another node")
	}
	b.cable.pulled.Store(true)
	r.eventually("b is silent", func() bool { return !a.Ping("b", addr) })
	a.stop()
	if a.Ping("b", addr) {
		t.Error("gossip has ended")
	}
}
