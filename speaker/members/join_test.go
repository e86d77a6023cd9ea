package members

import (
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

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
		"the other is silent, first":   {"a", map[string]finding{"b": silent}, p.silent, true},
		"the other is silent, second":  {"b", map[string]finding{"a": silent}, p.silent, true},
		"most refuse":                  {"c", map[string]finding{"a": silent, "b": nobody}, p.alone, true},
		"most are silent":              {"c", map[string]finding{"a": silent, "b": silent}, p.silent, true},
		"half refuse, without first":   {"b", map[string]finding{"a": silent, "c": silent, "d": nobody}, p.silent, true},
		"half refuse, with the first":  {"b", map[string]finding{"a": nobody, "c": silent, "d": silent}, p.silent, true},
		"somebody is there":            {"a", map[string]finding{"b": nobody, "c": stranger}, 0, false},
		"somebody is there, alone too": {"a", map[string]finding{"b": stranger}, 0, false},
	} {
		if wait, ok := p.lonely(c.self, c.calls); wait != c.wait || ok != c.ok {
			t.Errorf("%s: %s, %v; want %s, %v", name, wait, ok, c.wait, c.ok)
		}
	}
}

// A speaker that does not know yet where the others are calls nobody: it cannot take itself for the only one.
func TestAWaitBeginsWithTheNodesKnown(t *testing.T) {
	r := newRig(t, "a", "b")
	a := r.start("a")
	r.eventually("gossip has begun", func() bool { a.mu.Lock(); defer a.mu.Unlock(); return a.ml != nil })
	began := func() bool { a.mu.Lock(); defer a.mu.Unlock(); return !a.calling.IsZero() }
	for range 20 {
		a.join.Poke()
		if _, err := a.joinStep(t.Context()); err != nil || began() || a.Joined() {
			t.Fatalf("it has called others: %v, joined %v, %v", began(), a.Joined(), err)
		}
	}
	r.introduce("a")
	r.eventually("it calls them", began)
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

// A node that hears itself has met nobody: another Node may show its address.
func TestANodeDoesNotMeetItself(t *testing.T) {
	r := newRig(t, "a", "b")
	a := r.start("a", func(s *setup) { s.pace = pace{every: time.Hour, alone: time.Hour, silent: time.Hour, soon: time.Hour} })
	own := r.peers["a"][0]
	r.eventually("gossip has begun", func() bool { a.mu.Lock(); defer a.mu.Unlock(); return a.ml != nil })
	a.SetPeers(map[string][]netip.Addr{"x": {own}, "y": {own, r.peers["b"][0]}})
	a.Seek(time.Now())
	for range 3 {
		if _, err := a.joinStep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if a.Joined() || !a.Met().IsZero() || a.understood.Load() > 0 {
		t.Errorf("joined %v, met %s, and read %d states of its own", a.Joined(), a.Met(), a.understood.Load())
	}
	a.SetPeers(map[string][]netip.Addr{"x": {own, r.peers["b"][0]}})
	r.start("b")
	r.introduce("b")
	r.eventually("it meets another one at the other address", func() bool { a.join.Poke(); return a.Joined() })

	// No speaker runs there, so that it is alone soon.
	p := pace{every: 50 * time.Millisecond, alone: 100 * time.Millisecond, silent: time.Hour, soon: 50 * time.Millisecond}
	r = &rig{t: t, members: map[string]*rigged{}, peers: map[string][]netip.Addr{"c": {own.Prev()}}}
	c := r.start("c", func(s *setup) { s.pace = p })
	c.SetPeers(map[string][]netip.Addr{"x": {own.Prev()}})
	r.eventually("it takes itself for the only one", c.Joined)
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
	a.Seek(before)
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
	a.Seek(time.Time{})
}

// swamp is a cable on which calls to one address hang.
type swamp struct {
	*cable
	addr    string
	stuck   chan struct{} // gets each call that hangs
	release chan struct{}
}

func (s *swamp) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if a.Addr == s.addr {
		select {
		case s.stuck <- struct{}{}:
		default:
		}
		<-s.release
		return nil, errPulled
	}
	return s.cable.DialAddressTimeout(a, timeout)
}

// A node that was frozen hears the live ones at once, although a call to a dead one is under way.
func TestACallToADeadNodeHoldsUpNobody(t *testing.T) {
	r := newRig(t, "a", "b", "dead")
	s := &swamp{addr: netip.AddrPortFrom(r.peers["dead"][0], uint16(testPort())).String(),
		stuck: make(chan struct{}, 1000), release: make(chan struct{})}
	a := r.start("a", func(s2 *setup) { s.cable = s2.transport.(*cable); s2.transport = s })
	t.Cleanup(func() { close(s.release) }) // before a is stopped, which waits for its calls
	r.start("b")
	r.introduce("b")
	a.SetPeers(map[string][]netip.Addr{"b": r.peers["b"]})
	r.eventually("a sees b", func() bool { return len(a.Live()) == 2 && a.Joined() })
	r.introduce("a")
	<-s.stuck
	woke := time.Now()
	a.Seek(woke)
	r.eventually("a has heard b", func() bool { return !a.Met().Before(woke) })
	again := time.Now()
	a.Seek(again)
	r.eventually("a has heard b again", func() bool { return !a.Met().Before(again) })
}

// Nor does a round of calls that began before the others could be reached, as with a link that
// comes back.
func TestARoundUnderWayHoldsUpNobody(t *testing.T) {
	r := newRig(t, "a", "b", "dead")
	s := &swamp{addr: netip.AddrPortFrom(r.peers["dead"][0], uint16(testPort())).String(),
		stuck: make(chan struct{}, 1000), release: make(chan struct{})}
	a := r.start("a", func(s2 *setup) { s.cable = s2.transport.(*cable); s2.transport = s })
	t.Cleanup(func() { close(s.release) })
	a.cable.pulled.Store(true)
	r.introduce("a")
	<-s.stuck
	b := r.start("b")
	b.SetPeers(map[string][]netip.Addr{})
	r.eventually("b is there", b.Joined)
	a.cable.pulled.Store(false)
	back := time.Now()
	r.eventually("a has heard b", func() bool {
		a.Seek(time.Now())
		return !a.Met().Before(back)
	})
}

// A node that has to hear another calls ever more seldom, and at once when it has to anew.
func TestSeekBacksOff(t *testing.T) {
	m := New(Options{Self: "a", Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler)})
	pause := func(after time.Duration) time.Duration {
		m.sought = time.Now().Add(-after)
		return m.pause(true)
	}
	m.Seek(time.Unix(1, 0))
	if got := pause(0); got != usualPace.soon {
		t.Errorf("at first it waits for %s", got)
	}
	if got := pause(16 * time.Second); got < 2*time.Second || got > usualPace.every {
		t.Errorf("after 16 s it waits for %s", got)
	}
	if got := pause(time.Hour); got != usualPace.every {
		t.Errorf("after an hour it waits for %s", got)
	}
	m.Seek(time.Unix(1, 0))
	if got := m.pause(true); got != usualPace.every {
		t.Errorf("as before, it waits for %s", got)
	}
	m.Seek(time.Unix(2, 0))
	if got := m.pause(true); got != usualPace.soon {
		t.Errorf("anew, it waits for %s", got)
	}
}

// foreign is a member that tells its state in a version of the future.
type foreign struct{ memberlist.Delegate }

func (foreign) NodeMeta(int) []byte             { return meta{born: 1, wire: 99}.encode(memberlist.MetaMaxSize) }
func (foreign) LocalState(bool) []byte          { return []byte{99, 1, 2, 3} }
func (foreign) MergeRemoteState([]byte, bool)   {}
func (foreign) NotifyMsg([]byte)                {}
func (foreign) GetBroadcasts(int, int) [][]byte { return nil }

// Whoever understood nothing of what it was told has met nobody.
func TestAStateThatCannotBeReadIsNoMeeting(t *testing.T) {
	r := newRig(t, "a", "b")
	addr := netip.AddrPortFrom(r.peers["b"][0], uint16(testPort()))
	c := (&Members{opts: Options{Self: "b", Port: int(addr.Port()), Profile: LAN, Log: slog.New(slog.DiscardHandler)}}).
		config(addr.Addr())
	c.Transport, c.Delegate, c.Events = newCable(t, addr), foreign{}, nil
	b, err := memberlist.Create(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	a := r.start("a")
	r.introduce("a")
	r.eventually("a has called b and says what is wrong",
		func() bool { return strings.Contains(a.Trouble(), "newer version") })
	if a.Joined() || !a.Met().IsZero() {
		t.Error("a has met b, of whose state it could read nothing")
	}
}

// In a large cluster a greeting brings the last changes only. A node that is known by no more than that is
// called, so that the rest does not wait for an exchange of states that may be a while off.
func TestANodeThatIsKnownInPartIsCalled(t *testing.T) {
	r := newRig(t, "a", "b")
	a, b := r.start("a"), r.start("b")
	b.say(map[netip.Addr]plan.Claim{vip1: {Weight: 1}, vip2: {Weight: 2}})
	r.introduce("a")
	r.introduce("b")
	knows := func(vip netip.Addr, weight uint16) bool {
		return a.Claims(vip, a.opts.Liveness.Sight())["b"].Weight == weight
	}
	r.eventually("a knows b's claims", func() bool { return knows(vip1, 1) && knows(vip2, 2) })

	r.eventually("b has told all", func() bool { return b.queue.NumQueued() == 0 })

	a.mu.Lock()
	newest := a.book.pages["b"].newest()
	delete(a.book.pages, "b")
	a.book.merge(update{node: "b", born: newest.Born, entries: []entry{{vip: vip2, seq: newest.Seq,
		claim: plan.Claim{Weight: 2}}}})
	a.mu.Unlock()
	r.eventually("a has called b", func() bool { // more than once, if an exchange was under way
		if _, err := a.joinStep(t.Context()); err != nil {
			t.Fatal(err)
		}
		return knows(vip1, 1) && knows(vip2, 2)
	})
}

// Gossip passes on the newest changes first. A node of which more is heard all the time is not called by everybody.
func TestANodeThatIsTellingIsNotCalled(t *testing.T) {
	m := New(Options{Self: "a", Log: slog.New(slog.DiscardHandler)})
	addrs := []netip.Addr{vip1}
	m.peers = map[string][]netip.Addr{"b": addrs, "c": addrs, "d": addrs}
	m.live["b"], m.live["d"] = &memberlist.Node{}, &memberlist.Node{} // c is not there, and d has said nothing
	hear := func(seq uint64) {
		m.book.merge(update{node: "b", born: 1, entries: []entry{{vip: address(int(seq)), seq: seq}}})
	}
	for _, step := range []struct {
		what string
		hear uint64
		want []string
	}{
		{"after a gap", 5, []string{"c", "d"}}, {"more", 4, []string{"c", "d"}}, {"no more", 4, []string{"b", "c", "d"}},
		{"again", 3, []string{"c", "d"}}, {"still nothing", 3, []string{"b", "c", "d"}}, {"all but one", 2, []string{"c", "d"}},
		{"all", 1, []string{"c", "d"}}, {"a gap that came later", 9, []string{"c", "d"}},
		{"and stays", 9, []string{"c", "d"}},
	} {
		hear(step.hear)
		missing, live := m.uncalled()
		if got := slices.Sorted(maps.Keys(missing)); !live || !slices.Equal(got, step.want) {
			t.Errorf("%s: %v are called, want %v; live %v", step.what, got, step.want, live)
		}
	}
}
