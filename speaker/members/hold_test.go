package members

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// kill ends a member without a word, while its node stays: the port is closed.
func (m *rigged) kill(t *testing.T) {
	m.cable.hangs.Store(true)
	if err := m.cable.network.Shutdown(); err != nil {
		t.Fatal(err)
	}
}

func holding(d time.Duration) func(*setup) { return func(s *setup) { s.liveness.Hold = d } }

// What a killed speaker answered for is held for it, until it answers again.
func TestContract6AKilledSpeakerIsWaitedFor(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster(holding(time.Minute))
	r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true, Weight: 7}, vip2: {}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true, Weight: 7}})
	r.wantClaims("c", vip1, map[string]plan.Claim{"a": {Answering: true, Weight: 7}})
	r.members["a"].kill(t)
	waited := map[string]plan.Claim{"a": {Answering: true, Weight: 7, Held: true}}
	for _, name := range []string{"b", "c"} {
		r.wantClaims(name, vip1, waited)
		r.wantClaims(name, vip2, nil)
		if got := r.members[name].Live(); !slices.Equal(got, []string{"a", "b", "c"}) {
			t.Errorf("%s sees %v", name, got)
		}
	}
	r.members["a"].stop()
	a := r.start("a", holding(time.Minute))
	r.introduce("a")
	r.eventually("a knows what it answered for", func() bool { return a.Joined() && a.Restarted(vip1, a.opts.Liveness.Sight()) })
	if a.Restarted(vip2, a.opts.Liveness.Sight()) {
		t.Error("a believes that it answered for an address that it only claimed")
	}
	a.say(map[netip.Addr]plan.Claim{vip1: {Reason: lb.ReasonFeedUnknown}, vip2: {}})
	r.wantClaims("b", vip2, map[string]plan.Claim{"a": {}})
	r.wantClaims("b", vip1, waited)
	a.say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
	a.say(map[netip.Addr]plan.Claim{vip1: {Reason: lb.ReasonNodeLeaving}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Reason: lb.ReasonNodeLeaving}})
}

// A speaker that hangs is waited for like one that was killed, as its kernel still accepts
// connections; when it goes on, it was never gone.
func TestABusySpeakerIsWaitedFor(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster(holding(time.Minute))
	r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
	r.members["a"].cable.hangs.Store(true)
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true, Held: true}})
	if dead := r.members["b"].Dead(); len(dead) > 0 {
		t.Errorf("b takes %v for dead", dead)
	}
	r.members["a"].cable.hangs.Store(false)
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
}

// Nobody is waited for longer than the hold, nor at all when the node says nothing.
func TestTheHoldEnds(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster(holding(300 * time.Millisecond))
	for _, name := range []string{"a", "b"} {
		r.members[name].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	}
	r.wantClaims("c", vip1, map[string]plan.Claim{"a": {Answering: true}, "b": {Answering: true}})
	r.members["a"].cable.pulled.Store(true)
	r.wantClaims("c", vip1, map[string]plan.Claim{"b": {Answering: true}})
	r.eventually("c calls a dead", func() bool { return slices.Equal(r.members["c"].Dead(), []string{"a"}) })
	r.eventually("a, which sees no majority, calls nobody dead",
		func() bool { return len(r.members["a"].Live()) == 1 && r.members["a"].Dead() == nil })
	r.members["b"].kill(t) // it is waited for, but not for long
	r.wantClaims("c", vip1, nil)
	r.eventually("c sees itself only", func() bool { return slices.Equal(r.members["c"].Live(), []string{"c"}) })
	if seen := r.members["c"].alive.Sight(); len(seen.Missing) != 2 || len(seen.Dead) > 0 {
		t.Errorf("c, which sees no majority any more, sees %+v", seen)
	}
}

// A speaker that is not heard, while its kernel accepts connections to it, is not that of a dead
// node: it hangs, or is about to end.
func TestASpeakerThatHangsIsNotDead(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster(holding(500*time.Millisecond), func(s *setup) {
		s.liveness.Probe = func(context.Context, netip.AddrPort) bool { return true }
	})
	r.members["a"].cable.pulled.Store(true)
	r.eventually("c has lost a", func() bool { return slices.Equal(r.members["c"].Live(), []string{"b", "c"}) })
	if dead := r.members["c"].Dead(); dead != nil {
		t.Errorf("dead are %v", dead)
	}
}

// What a node said before it crashed is not held when it comes back: others have taken over long
// since.
func TestACrashedNodeThatReturnsIsNotWaitedFor(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster(holding(time.Minute))
	r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
	r.members["a"].cable.pulled.Store(true)
	r.wantClaims("b", vip1, nil)
	r.wantClaims("c", vip1, nil) // else it may tell b that the process before is live
	r.members["a"].stop()
	a := r.start("a", holding(time.Minute))
	r.introduce("a")
	r.eventually("a is back", func() bool {
		if got := r.members["b"].Claims(vip1, r.members["b"].opts.Liveness.Sight()); len(got) > 0 {
			t.Fatalf("b takes %v for what a says", got)
		}
		return a.Joined() && slices.Contains(r.members["b"].Live(), "a") && slices.Equal(a.Live(), r.names())
	})
	a.say(map[netip.Addr]plan.Claim{vip1: {}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {}})
}

// What a node said before it was lost counts as stale until it has spoken again.
func TestWhatALostNodeHasSaidIsStale(t *testing.T) {
	b := newBook()
	answers := plan.Claim{Answering: true}
	said := func(seq uint64, vip netip.Addr, claim plan.Claim) {
		b.merge(update{node: "a", born: 7, entries: []entry{{vip: vip, seq: seq, claim: claim}}})
	}
	standing := plan.Standing{Live: true, Born: 7}
	want := func(what string, first, second plan.Claim) {
		t.Helper()
		standings := map[string]plan.Standing{"a": standing}
		if one, two := b.claims(vip1, standings)["a"], b.claims(vip2, standings)["a"]; one != first || two != second {
			t.Errorf("%s: %+v and %+v", what, one, two)
		}
	}
	said(1, vip1, answers)
	said(2, vip2, answers)
	want("it has come", answers, answers)
	standing.Stale = b.pages["a"].newest()
	stale := plan.Claim{Answering: true, Stale: true}
	want("it has come back", stale, stale)
	said(2, vip2, answers) // by a node that has not heard more of it either
	want("an old claim comes late", stale, stale)
	said(3, vip1, plan.Claim{Reason: lb.ReasonYielded})
	want("it has spoken", plan.Claim{Reason: lb.ReasonYielded}, stale)
	standing.Stale = plan.Point{}
	want("after a while", plan.Claim{Reason: lb.ReasonYielded}, answers)
}

// What is reserved outlives the arrival of the next process's first claims, in either order.
func TestHeldClaimsOutliveTheNextProcess(t *testing.T) {
	b := newBook()
	b.merge(update{node: "a", born: 7, floor: 3, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Answering: true, Weight: 5}},
		{vip: vip2, seq: 2, claim: plan.Claim{Answering: true, Reason: lb.ReasonStopping}},
		{vip: vip6, seq: 3},
	}})
	held := plan.Claim{Answering: true, Weight: 5, Held: true}
	want := func(what string, standing plan.Standing, first, second plan.Claim) {
		t.Helper()
		standings := map[string]plan.Standing{"a": standing}
		for vip, want := range map[netip.Addr]plan.Claim{vip1: first, vip2: second, vip6: {}} {
			if got := b.claims(vip, standings)["a"]; got != want {
				t.Errorf("%s: %s: %+v, want %+v", what, vip, got, want)
			}
		}
	}
	want("the node is waited for", plan.Standing{Held: 7}, held, plan.Claim{})
	b.merge(update{node: "a", born: 8, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Reason: lb.ReasonFeedUnknown}},
		{vip: vip2, seq: 2, claim: plan.Claim{Reason: lb.ReasonFeedUnknown}},
	}})
	back := plan.Standing{Live: true, Born: 8, Held: 7}
	unknown := plan.Claim{Reason: lb.ReasonFeedUnknown}
	want("its next process has spoken", back, held, unknown)
	want("before that is known to have joined", plan.Standing{Live: true, Born: 7}, plan.Claim{Answering: true, Weight: 5},
		plan.Claim{Answering: true, Reason: lb.ReasonStopping})
	b.merge(
		update{node: "a", born: 8, entries: []entry{{vip: vip1, seq: 3, claim: plan.Claim{Reason: lb.ReasonNodeLeaving}}}})
	want("its next process gives the address away", back, plan.Claim{Reason: lb.ReasonNodeLeaving}, unknown)
	want("another process is held", plan.Standing{Live: true, Born: 8, Held: 6}, plan.Claim{Reason: lb.ReasonNodeLeaving},
		unknown)
	want("neither live nor held", plan.Standing{Born: 8}, plan.Claim{}, plan.Claim{})
	want("live, and only an earlier process has spoken", plan.Standing{Live: true, Born: 9}, plan.Claim{}, plan.Claim{})
	b.merge(
		update{node: "a", born: 10, entries: []entry{{vip: vip1, seq: 1, claim: plan.Claim{Reason: lb.ReasonFeedUnknown}}}})
	want("restarted once more before it announced anything", plan.Standing{Live: true, Born: 10, Held: 7}, held,
		plan.Claim{})
}

// recaller is a Liveness that waits for the last process that was recalled.
type recaller struct {
	Liveness
	born uint64
}

func (r *recaller) Recalled(born uint64) { r.born = max(r.born, born) }

func (r *recaller) Sight() plan.Sight { return plan.Sight{Previous: r.born} }

// TestTwoRestartsWithinTheHold checks that a speaker that was restarted twice knows what the first
// process announced, as the others wait for that, also if the second one announced nothing.
func TestTwoRestartsWithinTheHold(t *testing.T) {
	first := update{node: "a", born: 1, floor: 1, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}},
	}}
	silent := update{node: "a", born: 2, floor: 1, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Reason: lb.ReasonFeedUnknown}},
	}}
	second := update{node: "a", born: 2, floor: 1, entries: []entry{
		{vip: vip2, seq: 1, claim: plan.Claim{Answering: true}},
	}}
	// A process that has announced both, and then withdraws the first: as a whole, and change by
	// change.
	both := update{node: "a", born: 2, floor: 2, entries: []entry{
		{vip: vip1, seq: 1, claim: plan.Claim{Answering: true}}, {vip: vip2, seq: 2, claim: plan.Claim{Answering: true}},
	}}
	added := update{node: "a", born: 2, entries: both.entries[1:]}
	withdrawn := update{node: "a", born: 2, entries: []entry{{vip: vip1, seq: 3, gone: true}}}
	other := newBook()
	other.merge(first)
	other.merge(silent)
	told := other.updates(map[string]plan.Standing{"a": {Live: true, Born: 2, Held: 1}})
	if len(told) != 2 {
		t.Fatalf("others tell %+v, want what is live and what is held", told)
	}
	for _, c := range []struct {
		name       string
		told       []update
		vip1, vip2 bool
	}{
		{"as others tell it", told, true, false},
		{"a silent process, then the one before", []update{silent, first}, true, false},
		{"the one before, then a silent process", []update{first, silent}, true, false},
		{"an empty page, then the one before", []update{{node: "a", born: 2}, first}, true, false},
		{"two that announced, the newest first", []update{second, first}, false, true},
		{"two that announced, the newest last", []update{first, second}, false, true},
		{"a silent process alone", []update{silent}, false, false},
		{"a change, then the whole", []update{added, both}, true, true},
		{"the whole, then an old change", []update{both, added}, true, true},
		{"a change, the one before, then the whole", []update{added, first, both}, true, true},
		{"the whole, then the newest change", []update{both, withdrawn}, false, true},
		{"the newest change, then the whole", []update{withdrawn, both}, false, true},
		{"one change, and the other", []update{withdrawn, added}, false, true},
	} {
		for _, apart := range []bool{false, true} {
			m := New(Options{Self: "a", Born: time.Unix(0, 3), Liveness: &recaller{}, Log: slog.New(slog.DiscardHandler)})
			if apart {
				for _, u := range c.told {
					m.learn(encode(u))
				}
			} else {
				m.learn(encode(c.told...))
			}
			if one, two := m.Restarted(vip1, m.opts.Liveness.Sight()), m.Restarted(vip2, m.opts.Liveness.Sight()); one != c.vip1 || two != c.vip2 {
				t.Errorf("%s (apart: %v): announced before %v and %v, want %v and %v", c.name, apart, one, two, c.vip1, c.vip2)
			}
		}
	}
}

// TestOfManyProcessesAFewAreRemembered checks that a member that names any number of earlier
// processes of this node takes little memory, and hides none that announced.
func TestOfManyProcessesAFewAreRemembered(t *testing.T) {
	const many = 1000
	announced := func(born uint64, seq uint64, vip netip.Addr) update {
		return update{node: "a", born: born, entries: []entry{{vip: vip, seq: seq, claim: plan.Claim{Answering: true}}}}
	}
	for _, c := range []struct {
		name  string
		first func(m *Members)
	}{
		{"nothing is known yet", func(*Members) {}},
		{"one that announced is known", func(m *Members) { m.learn(encode(announced(1, 1, vip1))) }},
	} {
		m := New(Options{Self: "a", Born: time.Unix(0, many+1), Liveness: &recaller{},
			Log: slog.New(slog.DiscardHandler)})
		c.first(m)
		for born := many; born > 1; born-- { // the oldest last
			m.learn(encode(update{node: "a", born: uint64(born)}))
		}
		if n := len(m.past.pages); n > maxPast+1 {
			t.Errorf("%s: %d processes are remembered, want %d at most", c.name, n, maxPast+1)
		}
		// In two parts, of a process that is older than all that are remembered.
		m.learn(encode(announced(1, 1, vip1)))
		m.learn(encode(announced(1, 2, vip2)))
		if !m.Restarted(vip1, m.opts.Liveness.Sight()) || !m.Restarted(vip2, m.opts.Liveness.Sight()) {
			t.Errorf("%s: what the last process announced is not known", c.name)
		}
	}
}
