package partition

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// moment is one step of the story of a node that may have been cut off.
type moment struct {
	what   string
	after  time.Duration
	live   string // of a, b and c, all of which are known; "only" for a cluster of one
	down   bool   // no carrier
	woke   bool   // the process has just gone on after it was frozen
	met    bool   // another speaker has just been heard
	asked  bool   // the API server has just answered
	slowly bool   // it has, but not promptly
	heard  bool   // a majority is heard of over the API server
	old    bool   // what is heard is from before that majority lost this node
	answer bool   // the kernels of those that are missing answer
	unsure bool   // they were not asked after the API server has answered
	state  string // "estranged", "mute" (which is estranged too), or ""
}

func TestEstranged(t *testing.T) {
	const soon = 10 * time.Millisecond
	minute := moment{what: "all are there", live: "a b c"}
	for name, c := range map[string]struct {
		self  string
		story []moment
	}{
		"survivor with a majority": {"a", []moment{minute, {what: "one dies", after: time.Minute, live: "a b"}}},
		"survivor that the API server answers": {"c", []moment{minute,
			{what: "two die", after: time.Minute, live: "c", state: "estranged"},
			{what: "the API server answers", after: soon, live: "c", asked: true},
			{what: "for ever", after: time.Hour, live: "c"}}},
		"a cut that ends while the API server is asked": {"c", []moment{minute,
			{what: "cut off", after: time.Minute, live: "c", state: "estranged"},
			{what: "the API server answers", after: soon, live: "c", asked: true, unsure: true, state: "estranged"},
			{what: "so do their kernels", after: soon, live: "c", answer: true, state: "estranged"},
			{what: "it has heard them", after: soon, live: "a b c", met: true, state: "estranged"},
			{what: "what was said before is over", after: Reunion, live: "a b c"}}},
		"their kernels are silent when asked once more": {"c", []moment{minute,
			{what: "two die", after: time.Minute, live: "c", state: "estranged"},
			{what: "the API server answers", after: soon, live: "c", asked: true, unsure: true, state: "estranged"},
			{what: "and again", after: time.Second, live: "c", asked: true, unsure: true, state: "estranged"},
			{what: "they do not", after: soon, live: "c"}}},
		"only gossip is cut": {"c", []moment{minute,
			{what: "the others' kernels answer", after: time.Minute, live: "c", answer: true, state: "estranged"},
			{what: "the API server too", after: soon, live: "c", answer: true, asked: true, state: "estranged"},
			{what: "hears of the majority", after: time.Second, live: "c", answer: true, asked: true, heard: true}}},
		"survivor without an API server": {"c", []moment{minute,
			{what: "two die", after: time.Minute, live: "c", state: "estranged"},
			{what: "not yet", after: silentHolds*ReturnHold - soon, live: "c", state: "estranged"},
			{what: "it has waited", after: soon, live: "c"}}},
		"survivor of a busy API server": {"c", []moment{minute,
			{what: "two die", after: time.Minute, live: "c", state: "estranged"},
			{what: "it answers late", after: soon, live: "c", asked: true, slowly: true, state: "estranged"},
			{what: "and again", after: 2 * time.Second, live: "c", asked: true, state: "estranged"},
			{what: "and again", after: 2 * time.Second, live: "c", asked: true, state: "estranged"},
			{what: "and again", after: 2 * time.Second, live: "c", asked: true, state: "estranged"},
			{what: "and again", after: 2 * time.Second, live: "c", asked: true, state: "estranged"},
			{what: "it has waited", after: 2 * time.Second, live: "c", asked: true}}},
		"the Lease is from before it was cut off": {"c", []moment{minute,
			{what: "cut off", after: time.Minute, live: "c", state: "estranged"},
			{what: "reads it", after: 20 * time.Second, live: "c", asked: true, heard: true, old: true, state: "estranged"},
			{what: "it is renewed", after: time.Second, live: "c", asked: true, heard: true}}},
		"the API server is back before the others": {"c", []moment{minute,
			{what: "cut off", after: time.Minute, live: "c", state: "estranged"},
			{what: "connected", after: 20 * time.Second, live: "c", asked: true, state: "estranged"},
			{what: "hears of the majority", after: 2 * time.Second, live: "c", asked: true, heard: true},
			{what: "sees all", after: time.Second, live: "a b c", met: true},
			{what: "long after", after: time.Hour, live: "a b c"}}},
		"the others are back first": {"c", []moment{minute,
			{what: "cut off", after: time.Minute, live: "c", state: "estranged"},
			{what: "sees one", after: 20 * time.Second, live: "b c", state: "estranged"},
			{what: "has heard one", after: soon, live: "b c", met: true, state: "estranged"},
			{what: "sees all", after: time.Second, live: "a b c", met: true, state: "estranged"},
			{what: "what was said before is over", after: Reunion, live: "a b c"}}},
		"a carrier that was away for a moment": {"b", []moment{minute,
			{what: "lost", after: time.Minute, live: "a b c", down: true, state: "estranged"},
			{what: "still", after: time.Hour, live: "a b c", down: true, state: "estranged"},
			{what: "back", after: soon, live: "a b c", state: "estranged"},
			{what: "has heard one", after: soon, live: "a b c", met: true}}},
		"a carrier that comes back before others are found": {"a", []moment{minute,
			{what: "lost", after: time.Minute, live: "a b c", down: true, state: "estranged"},
			{what: "back, and one is missing", after: time.Second, live: "a b", state: "estranged"},
			{what: "has heard the other", after: soon, live: "a b", met: true, state: "estranged"},
			{what: "the missing one is there", after: time.Second, live: "a b c"}}},
		"a carrier that comes back where one is dead": {"a", []moment{minute,
			{what: "one dies", after: time.Minute, live: "a b"},
			{what: "lost", after: time.Minute, live: "a b", down: true, state: "estranged"},
			{what: "back", after: time.Second, live: "a b", state: "estranged"},
			{what: "has heard the other", after: soon, live: "a b", met: true, state: "estranged"},
			{what: "and again", after: Reunion - soon, live: "a b", met: true, state: "estranged"},
			{what: "it knows of nobody else", after: soon, live: "a b", met: true}}},
		"the API server does not excuse a lost carrier": {"c", []moment{minute,
			{what: "lost", after: time.Minute, live: "a b c", down: true, state: "estranged"},
			{what: "the others are too", after: time.Second, live: "c", down: true, state: "estranged"},
			{what: "back", after: time.Second, live: "c", state: "estranged"},
			{what: "the API server answers", after: soon, live: "c", asked: true, state: "estranged"}}},
		"frozen": {"b", []moment{minute,
			{what: "wakes", after: time.Minute, live: "a b c", woke: true, state: "mute"},
			{what: "not yet", after: soon, live: "a b c", state: "mute"},
			{what: "has heard one", after: soon, live: "a b c", met: true}}},
		"frozen, and seen again before it has heard anybody": {"c", []moment{minute,
			{what: "wakes", after: time.Minute, live: "c", woke: true, state: "mute"},
			{what: "sees all", after: soon, live: "a b c", state: "mute"},
			{what: "has heard one", after: soon, live: "a b c", met: true, state: "estranged"},
			{what: "what was said before is over", after: Reunion, live: "a b c"}}},
		"frozen, and nobody is to be heard": {"b", []moment{minute,
			{what: "wakes", after: time.Minute, live: "a b c", woke: true, state: "mute"},
			{what: "it goes on with its own", after: MuteFor, live: "a b c", state: "estranged"}}},
		"the majority is heard of no more": {"c", []moment{minute,
			{what: "cut off", after: time.Minute, live: "c", state: "estranged"},
			{what: "heard of", after: time.Second, live: "c", asked: true, heard: true},
			{what: "the API server is silent", after: time.Minute, live: "c", state: "estranged"}}},
		"the majority has gone": {"c", []moment{minute,
			{what: "cut off", after: time.Minute, live: "c", state: "estranged"},
			{what: "heard of", after: time.Second, live: "c", asked: true, heard: true},
			{what: "the API server knows nothing of it", after: time.Minute, live: "c", asked: true}}},
		"the only node": {"a", []moment{{what: "it is there", live: "only"},
			{what: "no carrier", after: time.Minute, live: "only", down: true},
			{what: "back", after: time.Minute, live: "only"}, {what: "wakes", after: time.Minute, live: "only", woke: true}}},
	} {
		tell(t, name, c.self, c.story)
		var twice []moment
		for _, m := range c.story { // what is seen twice changes nothing
			again := m
			again.after, again.woke, again.met, again.asked = 0, false, false, false
			twice = append(twice, m, again)
		}
		tell(t, name+", each twice", c.self, twice)
	}
}

func without(all, some []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(some, s) })
}

func tell(t *testing.T, name, self string, story []moment) {
	t.Helper()
	var s State
	f := Facts{Self: self, ReturnHold: ReturnHold}
	now := time.Unix(1e9, 0)
	for _, m := range story {
		now = now.Add(m.after)
		live, known := strings.Fields(m.live), []string{"a", "b", "c"}
		if m.live == "only" {
			live, known = []string{self}, []string{self}
		}
		silent := without(known, live)
		if m.answer {
			silent = nil
		}
		f.Speakers, f.Others = plan.SpeakersOf(self, live, live, known, silent), m.live != "only"
		f.Carrier, f.Unplugged, f.Heard = []string{"eth0"}, m.down, m.heard
		if f.Said.Live = without(known, live); m.old {
			f.Said.Live = known
		}
		if m.down {
			f.Carrier = nil
		}
		if m.woke {
			f.Woke = now
		}
		if m.met {
			f.Contact.Met = now
		}
		if m.asked {
			f.Contact.Asked, f.Contact.Took = now, time.Millisecond
			if m.slowly {
				f.Contact.Took = time.Second
			}
		}
		if !m.unsure {
			f.Speakers.Confirmed = f.Contact.Asked.Add(f.Contact.Took)
		}
		s.Step(now, f)
		state := ""
		switch {
		case s.Mute():
			state = "mute"
		case s.Estranged():
			state = "estranged"
		}
		if state != m.state || s.Mute() && !s.Estranged() {
			t.Fatalf("%s, %s: %q, want %q", name, m.what, state, m.state)
		}
	}
}

// TestOfTwoHalves tells, from the view of a of two nodes and of a and b of four, what becomes of a
// node that counts as the majority by its name alone: it takes nothing before the API server shows
// that it is not cut off.
func TestOfTwoHalves(t *testing.T) {
	type view struct {
		after      time.Duration
		live       string
		asked, met bool
		estranged  bool
	}
	for name, c := range map[string]struct {
		known string
		story []view
	}{
		"the other one dies": {"a b", []view{{live: "a b"}, {after: time.Minute, live: "a", estranged: true},
			{after: 50 * time.Millisecond, live: "a", asked: true}, {after: time.Hour, live: "a"}}},
		"without an API server it waits": {"a b", []view{{live: "a b"}, {after: time.Minute, live: "a", estranged: true},
			{after: silentHolds*ReturnHold - 1, live: "a", estranged: true}, {after: 1, live: "a"}}},
		"its switch port is cut": {"a b", []view{{live: "a b"}, {after: time.Minute, live: "a", estranged: true},
			{after: 8 * time.Second, live: "a b", estranged: true}, {after: 1, live: "a b", met: true, estranged: true},
			{after: Reunion, live: "a b"}}},
		"half of four dies": {"a b c d", []view{{live: "a b c d"}, {after: time.Minute, live: "a b c"},
			{after: time.Second, live: "a b", estranged: true}, {after: 1, live: "a b", asked: true},
			{after: time.Second, live: "a b c"}, {after: time.Second, live: "a b", estranged: true}}},
		"half of four dies, without an API server": {"a b c d", []view{{live: "a b c d"},
			{after: time.Minute, live: "a b", estranged: true}, {after: time.Second, live: "a b", met: true, estranged: true},
			{after: Reunion, live: "a b", estranged: true}, {after: silentHolds * ReturnHold, live: "a b"}}},
		"cut off from one after the other": {"a b c d", []view{{live: "a b c d"},
			{after: time.Minute, live: "a b", estranged: true}, {after: 1, live: "a b", asked: true},
			{after: time.Second, live: "a", estranged: true}, {after: 5 * time.Second, live: "a b", estranged: true},
			{after: 1, live: "a b c d", met: true, estranged: true}, {after: Reunion, live: "a b c d"}}},
	} {
		var s State
		now, known := time.Unix(1e9, 0), strings.Fields(c.known)
		f := Facts{Self: "a", Others: true, ReturnHold: ReturnHold, Carrier: []string{"eth0"}}
		for i, v := range c.story {
			now = now.Add(v.after)
			live := strings.Fields(v.live)
			f.Speakers = plan.SpeakersOf("a", live, live, known, without(known, live))
			if v.asked {
				f.Contact.Asked, f.Contact.Took = now, time.Millisecond
			}
			if v.met {
				f.Contact.Met = now
			}
			f.Speakers.Confirmed = f.Contact.Asked.Add(f.Contact.Took)
			if s.Step(now, f); s.Estranged() != v.estranged {
				t.Errorf("%s, %d, seeing %s: estranged %v", name, i, v.live, s.Estranged())
			}
		}
	}
}

// However a small cluster falls apart, whoever sees no more than half takes nothing unless the API
// server answers it at once; and whoever comes back takes nothing before it has heard somebody,
// also when the API server is there first.
func TestEverySplitOfSmallClusters(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e"}
	for size := 2; size <= len(names); size++ {
		known := names[:size]
		for split := 1; split < 1<<size-1; split++ {
			var side []string
			for i, name := range known {
				if split>>i&1 == 1 {
					side = append(side, name)
				}
			}
			for _, reaches := range []bool{true, false} {
				what := fmt.Sprintf("%v of %v, API server %v", side, known, reaches)
				self := side[len(side)-1]
				most := 2*len(side) > size
				s, now := State{}, time.Unix(1e9, 0)
				f := Facts{Self: self, ReturnHold: ReturnHold, Others: true, Carrier: []string{"eth0"}}
				step := func(after time.Duration, live []string) bool {
					now = now.Add(after)
					f.Speakers = plan.SpeakersOf(self, live, live, known, without(known, live))
					f.Speakers.Confirmed = f.Contact.Asked.Add(f.Contact.Took)
					s.Step(now, f)
					return s.Estranged()
				}
				if step(0, known) {
					t.Fatalf("%s: estranged from the first", what)
				}
				if got := step(time.Minute, side); got == most {
					t.Fatalf("%s: estranged %v", what, got)
				}
				if reaches {
					f.Contact.Asked, f.Contact.Took = now, time.Millisecond
				}
				if got := step(0, side); got != (!most && !reaches) {
					t.Fatalf("%s: estranged %v after the API server was asked", what, got)
				}
				if most || reaches {
					continue
				}
				for range 8 {
					if !step(time.Second, side) {
						t.Fatalf("%s: it does not wait", what)
					}
				}
				f.Contact.Asked = now
				if !step(0, side) || !step(time.Second, side) {
					t.Fatalf("%s: the API server alone ends it", what)
				}
				for _, live := range [][]string{slices.Clone(known[:size-1]), known} {
					if !slices.Contains(live, self) {
						continue
					}
					if !step(0, live) {
						t.Fatalf("%s: seeing %v ends it", what, live)
					}
				}
				f.Contact.Met = now
				if !step(0, known) {
					t.Fatalf("%s: it does not wait for the newest claims", what)
				}
				if step(Reunion, known) {
					t.Fatalf("%s: it never ends", what)
				}
			}
		}
	}
}
