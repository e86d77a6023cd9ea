package partition

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

var (
	vip1 = netip.MustParseAddr("192.0.2.1")
	vip2 = netip.MustParseAddr("192.0.2.2")
)

// scene is one step of a story: what a node sees after some time, and what it makes of it.
type scene struct {
	what    string
	after   time.Duration
	live    string // of a, b, c, d and e, all of which are known
	said    *lb.Witness
	news    bool
	changed bool
	again   time.Duration
	parted  bool
	yields  string // the VIPs that a majority elsewhere answers for
	lease   string // what the node does with it
}

// The majority of the story is a, b and c; vip2 is one that they do not answer for.
var majority = &lb.Witness{Node: "a", Live: []string{"a", "b", "c"}, Unserved: []netip.Addr{vip2}}

// TestStory tells it from the view of e, which is cut off with d and comes back.
func TestStory(t *testing.T) {
	story := []scene{
		{what: "all are there", live: "a b c d e", lease: "nothing"},
		{what: "one is missing", after: time.Minute, live: "a b c e", lease: "stands by"},
		{what: "cut off", after: time.Minute, live: "d e", changed: true, parted: true, lease: "reads"},
		{what: "the majority is heard of", after: time.Second, live: "d e", said: majority, news: true, changed: true,
			parted: true, yields: "1", lease: "reads"},
		{what: "and again", after: time.Hour, live: "d e", said: majority, parted: true, yields: "1", lease: "reads"},
		{what: "together again, and yields yet", after: time.Hour, live: "a b c d e", changed: true, again: Reunion,
			parted: true, yields: "1", lease: "nothing"},
		{what: "half of the time is over", after: Reunion / 2, live: "a b c d e", again: Reunion / 2, parted: true,
			yields: "1", lease: "nothing"},
		{what: "all of it", after: Reunion / 2, live: "a b c d e", news: true, changed: true, lease: "nothing"},
		{what: "long after", after: time.Hour, live: "a b c d e", lease: "nothing"},
	}
	play(t, story)
	for i, s := range story { // what is seen twice changes nothing
		again := s
		again.after, again.news, again.changed, again.what = 0, false, false, s.what+", once more"
		play(t, slices.Concat(story[:i+1], []scene{again}, story[i+1:]))
	}
}

func play(t *testing.T, story []scene) {
	t.Helper()
	var s State
	now := time.Unix(1e9, 0)
	for _, c := range story {
		now = now.Add(c.after)
		f := Facts{Self: "e",
			Speakers: plan.SpeakersOf("e", strings.Fields(c.live), strings.Fields(c.live), strings.Fields("a b c d e"), nil)}
		if c.said != nil {
			f.Said, f.Heard = *c.said, true
		}
		news, changed, again := s.Step(now, f)
		if news != c.news || changed != c.changed || again != c.again || s.Parted() != c.parted {
			t.Errorf("%s: news %v, changed %v, again %s, parted %v; want %v, %v, %s, %v", c.what, news, changed, again,
				s.Parted(), c.news, c.changed, c.again, c.parted)
		}
		yields := ""
		for name, vip := range map[string]netip.Addr{"1": vip1, "2": vip2} {
			if s.Elsewhere(vip) {
				yields += name
			}
		}
		if yields != c.yields {
			t.Errorf("%s: yields %q, want %q", c.what, yields, c.yields)
		}
		if lease := lease(s); lease != c.lease {
			t.Errorf("%s: the node %s, want %s", c.what, lease, c.lease)
		}
	}
}

func lease(s State) string {
	switch d := s.Desired(func() []netip.Addr { return nil }); {
	case d.Heed && !d.Tell:
		return "reads"
	case d.Tell:
		return "renews"
	case len(s.Speakers().Missing) > 0:
		return "stands by"
	}
	return "nothing"
}

// TestDead tells, from the view of c of a to d, whom it takes for dead: nobody as long as it may be
// this node that was cut off, although it sees a majority before it has found all others again.
func TestDead(t *testing.T) {
	type view struct {
		after time.Duration
		live  string
		down  bool // no carrier
		met   bool // another speaker has just been heard
		gone  bool // d has no Node
		want  string
	}
	for name, story := range map[string][]view{
		"one dies": {{live: "a b c d"}, {after: time.Minute, live: "a b c", want: "d"},
			{after: time.Minute, live: "a b c d"}},
		"cut off, and back": {{live: "a b c d"}, {after: time.Minute, live: "b c d", want: "a"},
			{after: time.Second, live: "c"},
			{after: time.Minute, live: "a c"}, {live: "a c d", met: true}, {after: time.Millisecond, live: "a b c d"},
			{after: Reunion, live: "a b c d"}},
		"back, and one has died": {{live: "a b c d"}, {after: time.Minute, live: "c"}, {after: time.Minute, live: "a c"},
			{live: "a b c", met: true}, {after: Reunion - 1, live: "a b c"}, {after: 1, live: "a b c", want: "d"}},
		"dead for long when this one is cut off": {{live: "a b c d"}, {after: time.Minute, live: "a b c", want: "d"},
			{after: time.Minute, live: "a b c", down: true, want: "d"}, {after: time.Second, live: "c", want: "d"},
			{after: time.Second, live: "a c", want: "d"}, {after: time.Second, live: "a b c", met: true, want: "d"},
			{after: Reunion, live: "a b c d"}},
		"dead for long, and without a Node": {{live: "a b c d"}, {after: time.Minute, live: "a b c", want: "d"},
			{after: time.Minute, live: "a b c", gone: true, want: "d"}, {after: time.Minute, live: "c", gone: true, want: "d"},
			{after: time.Second, live: "a b c", met: true, gone: true, want: "d"}},
		"a link that flaps": {{live: "a b c d"}, {after: time.Minute, live: "a b c d", down: true},
			{after: time.Second, live: "a c d", down: true}, {after: time.Second, live: "a c d"},
			{after: time.Millisecond, live: "a b c d", met: true}},
	} {
		var s State
		now := time.Unix(1e9, 0)
		f := Facts{Self: "c", Others: true, ReturnHold: ReturnHold}
		known := strings.Fields("a b c d")
		for i, v := range story {
			now = now.Add(v.after)
			live := strings.Fields(v.live)
			missed := known
			if v.gone {
				missed = without(known, []string{"d"})
			}
			f.Speakers, f.Carrier = plan.SpeakersOf("c", live, live, missed, without(known, live)), []string{"eth0"}
			if f.Unplugged = v.down; v.down {
				f.Carrier = nil
			}
			if v.met {
				f.Contact.Met = now
			}
			s.Step(now, f)
			if got := strings.Join(s.Dead(), " "); got != v.want {
				t.Errorf("%s, %d, seeing %s: %q are dead, want %q", name, i, v.live, got, v.want)
			}
		}
	}
}

// Whoever has outlived all others is cut off for no longer than it cannot tell.
func TestASurvivorIsNotCutOffForEver(t *testing.T) {
	var s State
	now, f := time.Unix(1e9, 0), Facts{Self: "b", Others: true, ReturnHold: ReturnHold, Carrier: []string{"eth0"}}
	step := func(after time.Duration, live string, want bool) {
		t.Helper()
		now = now.Add(after)
		seen, known := strings.Fields(live), strings.Fields("a b")
		f.Speakers = plan.SpeakersOf("b", seen, seen, known, without(known, seen))
		f.Speakers.Confirmed = f.Contact.Asked.Add(f.Contact.Took)
		if s.Step(now, f); s.CutOff() != want {
			t.Errorf("seeing %s after %s: cut off %v", live, after, s.CutOff())
		}
	}
	step(0, "a b", false)
	step(time.Minute, "b", true)
	f.Contact.Asked, f.Contact.Took = now, time.Millisecond
	step(time.Millisecond, "b", false)
	step(time.Hour, "b", false)
	step(time.Hour, "a b", true) // until it has heard the newest
	step(Reunion, "a b", false)
}

// Of survivors that may be cut off all ask, as one that does not would wait for ReturnHold and
// more.
func TestEverySurvivorOfHalfAsks(t *testing.T) {
	known := strings.Fields("a b c d e f g h")
	for _, self := range known[:4] {
		var s State
		now, f := time.Unix(1e9, 0), Facts{Self: self, Others: true, ReturnHold: ReturnHold, Carrier: []string{"eth0"}}
		f.Speakers = plan.SpeakersOf(self, known, known, known, nil)
		s.Step(now, f)
		now = now.Add(time.Minute)
		f.Speakers = plan.SpeakersOf(self, known[:4], known[:4], known, known[4:])
		s.Step(now, f)
		if d := s.Desired(func() []netip.Addr { return nil }); !s.Estranged() || !d.Heed && !d.Tell {
			t.Errorf("%s: estranged %v, and asks: %+v", self, s.Estranged(), d)
		}
	}
}

// TestDesired checks who renews the Lease, and what it says.
func TestDesired(t *testing.T) {
	known := strings.Fields("a b c d e f g")
	for self, want := range map[string]Desired{
		"a": {Tell: true, Rank: 0}, "b": {Tell: true, Rank: 1}, "c": {Tell: true, Rank: 2}, "d": {},
	} {
		live := strings.Fields("a b c d e f")
		var s State
		s.Step(time.Unix(1e9, 0), Facts{Self: self, Speakers: plan.SpeakersOf(self, live, live, known, nil)})
		if want.Tell {
			want.Says = lb.Witness{Node: self, Live: live, Unserved: []netip.Addr{vip2}}
		}
		if got := s.Desired(func() []netip.Addr { return []netip.Addr{vip2} }); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", self, got, want)
		}
	}
}

// Two sides that hold themselves for the majority decide alike which one serves.
func TestTheLesserOfTwoMajoritiesYields(t *testing.T) {
	for name, c := range map[string]struct {
		self, live, known, theirs string
		yields, reads             bool
	}{
		"half, and more have met another":      {"b", "b", "b c", "a c", true, true},
		"those have":                           {"c", "a c", "a b c", "b", false, false},
		"started alone":                        {"b", "b", "b", "a c", true, true},
		"started alone, heard by nobody":       {"b", "b", "b", "", false, true},
		"as many as the others, the first":     {"a", "a d", "a b d", "b c", false, false},
		"as many as the others, not the first": {"b", "b c", "b c d", "a d", true, true},
		"they count this node":                 {"b", "b", "b c", "a b c", false, false},
		"nobody says anything":                 {"a", "a c", "a b c", "", false, false},
		"more than read the Lease":             {"b", "b c d e", "b c d e f", "a f g h i", false, false},
	} {
		var s State
		f := Facts{Self: c.self, Others: true, Said: lb.Witness{Node: "z", Live: strings.Fields(c.theirs)}, Heard: c.theirs != "",
			Speakers: plan.SpeakersOf(c.self, strings.Fields(c.live), strings.Fields(c.live), strings.Fields(c.known), nil)}
		_, _, _ = s.Step(time.Unix(1e9, 0), f)
		reads := s.Desired(func() []netip.Addr { return nil }).Heed
		if s.Elsewhere(vip1) != c.yields || reads != c.reads || s.Parted() != c.yields {
			t.Errorf("%s: yields %v, reads the Lease %v, sees no majority %v; want %v, %v, %[2]v", name, s.Elsewhere(vip1),
				reads, s.Parted(), c.yields, c.reads)
		}
	}
}

// TestContract11NamesWithoutANodeDoNotCount has somebody write a list that is made up. What counts on one side counts on
// the other, so that both come to the same.
func TestContract11NamesWithoutANodeDoNotCount(t *testing.T) {
	nodes := strings.Fields("a b c d e f")
	for name, c := range map[string]struct {
		self, live, theirs string
		yields             bool
	}{
		"Nodes":               {"b", "b c", "d e f", true},
		"one Node and others": {"b", "b c", "1 2 3 a", false},
		"one Node many times": {"b", "b c", "a a a a", false},
		"no Nodes, of which one would come first": {"b", "b c", "1 2", false},
		"as many Nodes, behind a name":            {"b", "b c", "1 d e", false},
		"as many Nodes, the first among them":     {"b", "b c", "1 a e", true},
		"a Node that is gone on this side":        {"b", "b x", "d e", true},
		"a Node that is gone on that side":        {"d", "d e", "b x", false},
	} {
		live := strings.Fields(c.live)
		f := Facts{Self: c.self, Others: true, Said: lb.Witness{Node: "a", Live: strings.Fields(c.theirs)}, Heard: true,
			IsNode:   func(name string) bool { return slices.Contains(nodes, name) },
			Speakers: plan.SpeakersOf(c.self, live, live, append(slices.Clone(live), "y"), nil)}
		var s State
		s.Step(time.Unix(1e9, 0), f)
		if s.Elsewhere(vip1) != c.yields || s.Parted() != c.yields {
			t.Errorf("%s: yields %v, sees no majority %v; want %v", name, s.Elsewhere(vip1), s.Parted(), c.yields)
		}
	}
}

// A node that hears none of the others, and waits for them, sees a majority and is alone: that
// changes what is decided.
func TestAloneWhileItWaits(t *testing.T) {
	var s State
	now, all := time.Unix(1e9, 0), []string{"a", "b", "c"}
	for _, c := range []struct {
		heard   []string
		changed bool
	}{{all, false}, {[]string{"c"}, true}, {[]string{"c"}, false}, {[]string{"b", "c"}, true}} {
		_, changed, _ := s.Step(now, Facts{Self: "c", Speakers: plan.SpeakersOf("c", c.heard, all, all, nil)})
		if changed != c.changed || s.Parted() {
			t.Errorf("it hears %v: changed %v, parted %v", c.heard, changed, s.Parted())
		}
	}
}
