package members

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// A speaker takes itself for the only one soon where most of the nodes say that no speaker runs
// there, later where they are silent, and never where somebody is.
func TestLonely(t *testing.T) {
	p := pace{alone: time.Second, silent: time.Minute}
	for name, c := range map[string]struct {
		self  string
		calls map[string]finding
		wait  time.Duration
		ok    bool
	}{
		"the only node":                {"a", nil, p.alone, true},
		"the other refuses":            {"b", map[string]finding{"a": nobody}, p.alone, true},
		"the other is silent, first":   {"a", map[string]finding{"b": silent}, p.alone, true},
		"the other is silent, second":  {"b", map[string]finding{"a": silent}, p.silent, true},
		"most refuse":                  {"c", map[string]finding{"a": silent, "b": nobody}, p.alone, true},
		"most are silent":              {"c", map[string]finding{"a": silent, "b": silent}, p.silent, true},
		"half refuse, without first":   {"b", map[string]finding{"a": silent, "c": silent, "d": nobody}, p.silent, true},
		"half refuse, with the first":  {"b", map[string]finding{"a": nobody, "c": silent, "d": silent}, p.alone, true},
		"somebody is there":            {"a", map[string]finding{"b": nobody, "c": stranger}, 0, false},
		"somebody is there, alone too": {"a", map[string]finding{"b": stranger}, 0, false},
	} {
		if wait, ok := p.lonely(c.self, c.calls); wait != c.wait || ok != c.ok {
			t.Errorf("%s: %s, %v; want %s, %v", name, wait, ok, c.wait, c.ok)
		}
	}
}

// What a node says while it is alone is not kept for others to come.
func TestASingleNodeQueuesNothing(t *testing.T) {
	r := newRig(t, "a", "b")
	a := r.start("a")
	a.SetPeers(map[string][]netip.Addr{})
	r.eventually("a is joined", a.Joined)
	claims := map[netip.Addr]*plan.Claim{}
	for i := range 2000 {
		claims[netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})] = &plan.Claim{Weight: 1}
	}
	a.Update(claims)
	for i := range 200 {
		a.Update(map[netip.Addr]*plan.Claim{vip1: {Weight: uint16(i)}})
		time.Sleep(time.Millisecond)
	}
	a.Update(map[netip.Addr]*plan.Claim{vip1: {Weight: 7}})
	r.eventually("all is said", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return len(a.own.pending) == 0
	})
	r.eventually("nothing is queued", func() bool { return a.queue.NumQueued() == 0 })
	b := r.start("b")
	r.introduce("b")
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Weight: 7}})
	b.kill(t)
	b.stop()
	r.eventually("b is gone", func() bool { return slices.Equal(a.Live(), []string{"a"}) })
	for i := range 50 {
		a.Update(map[netip.Addr]*plan.Claim{vip1: {Weight: uint16(i)}})
		time.Sleep(time.Millisecond)
	}
	r.eventually("nothing is queued for those who have gone", func() bool { return a.queue.NumQueued() == 0 })
}

// A node that may have been cut off calls until it has heard somebody, live ones included.
func TestSeek(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster()
	a := r.members["a"]
	before := time.Now()
	if met := a.Met(); !met.Before(before) {
		t.Errorf("met at %s without being asked", met)
	}
	a.Seek(true)
	r.eventually("it has heard one of those that it sees", func() bool { return !a.Met().Before(before) })
	a.cable.pulled.Store(true)
	r.eventually("it sees nobody", func() bool { return slices.Equal(a.Live(), []string{"a"}) })
	cut := time.Now()
	time.Sleep(4 * a.opts.pace.silent)
	if !a.Met().Before(cut) || !a.Joined() {
		t.Error("it has heard somebody although its cable is pulled, or forgot that it had met the others")
	}
	a.cable.pulled.Store(false)
	r.eventually("it has heard one again", func() bool { return !a.Met().Before(cut) })
	r.eventually("it sees all", func() bool { return len(a.Live()) == 3 })
	a.Seek(false)
}
