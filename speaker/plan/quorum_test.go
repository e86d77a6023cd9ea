package plan

import (
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestQuorum(t *testing.T) {
	for _, c := range []struct {
		self, live, known string
		want              Quorum
	}{
		{"a", "a", "a", Quorum{Majority: true}},
		{"b", "abc", "abc", Quorum{Majority: true, Rank: 1}},
		{"b", "bc", "abc", Quorum{Lost: true, Majority: true}},
		{"a", "a", "abc", Quorum{Lost: true}},
		{"a", "a", "ab", Quorum{Lost: true, Majority: true, Half: true}}, // of two halves, the one with the first
		{"b", "b", "ab", Quorum{Lost: true, Half: true}},
		{"c", "cd", "abcd", Quorum{Lost: true, Half: true}},
		{"d", "ad", "abcd", Quorum{Lost: true, Majority: true, Half: true, Rank: 1}},
	} {
		if got := QuorumOf(c.self, strings.Split(c.live, ""), strings.Split(c.known, "")); got != c.want {
			t.Errorf("%s sees %s of %s: %+v, want %+v", c.self, c.live, c.known, got, c.want)
		}
	}
}

// Whatever way a cluster falls apart, no two parts take themselves for the majority.
func TestAtMostOneMajority(t *testing.T) {
	known := strings.Split("abcdef", "")
	for split := range 1 << len(known) {
		var parts [2][]string
		for i, node := range known {
			parts[split>>i&1] = append(parts[split>>i&1], node)
		}
		majorities := 0
		for _, part := range parts {
			if len(part) > 0 && QuorumOf(part[0], part, known).Majority {
				majorities++
			}
		}
		if majorities != 1 {
			t.Errorf("%v: %d majorities", parts, majorities)
		}
	}
}

func TestYielding(t *testing.T) {
	in := input(func(in *Input) { in.Served, in.Answering, in.Elsewhere = true, []string{"eth0"}, true })
	f := facts(w178)
	f.Live = []string{w178}
	d := Decide(f, in)
	if d.Refusal == nil || d.Refusal.Reason != lb.ReasonYielded || len(d.Answer)+len(d.Probe) > 0 || d.Reporter != "" {
		t.Errorf("%+v", d)
	}
}

// Nodes count as dead only for a node that sees a majority: else it may be this one that is cut
// off.
func TestSpeakersOf(t *testing.T) {
	for _, c := range []struct{ live, known, dead, missing, wantDead string }{
		{"abc", "abc", "", "", ""},
		{"bc", "abc", "a", "a", "a"},
		{"c", "abc", "ab", "ab", ""},
		{"c", "abc", "a", "ab", ""}, // a missing node counts whether or not it is dead
		{"a", "ab", "b", "b", "b"},
		{"b", "ab", "a", "a", ""},
	} {
		live := strings.Split(c.live, "")
		s := SpeakersOf(c.live[:1], live, live, strings.Split(c.known, ""), strings.Split(c.dead, ""))
		if strings.Join(s.Missing, "") != c.missing || strings.Join(s.Dead, "") != c.wantDead {
			t.Errorf("%s sees %s of %s, dead %s: %+v", c.live[:1], c.live, c.known, c.dead, s)
		}
	}
}

// A node survives if it sees a majority of those that may be there.
func TestSurvives(t *testing.T) {
	for _, c := range []struct {
		self, live, known, silent string
		want                      bool
	}{
		{"a", "a", "a", "", true},
		{"b", "b", "ab", "", false}, // the other one's kernel answers
		{"b", "b", "ab", "a", true},
		{"c", "c", "abc", "ab", true},
		{"c", "c", "abc", "a", false}, // two that cannot tell which of them is cut off
		{"b", "b", "abc", "a", true},
		{"c", "c", "abc", "", false},
		{"e", "de", "abcde", "a", false},
		{"e", "de", "abcde", "abc", true},
	} {
		live := strings.Split(c.live, "")
		s := SpeakersOf(c.self, live, live, strings.Split(c.known, ""), strings.Split(c.silent, ""))
		if got := s.Survives(c.self); got != c.want {
			t.Errorf("%s sees %s of %s, %s are silent: %v", c.self, c.live, c.known, c.silent, got)
		}
	}
}

// A node is alone if it hears no majority, whomever it waits for.
func TestAlone(t *testing.T) {
	for _, c := range []struct {
		self, heard, live, known string
		alone, majority          bool
	}{
		{"a", "a", "a", "a", false, true},
		{"c", "abc", "abc", "abc", false, true},
		{"c", "bc", "abc", "abc", false, true},
		{"c", "c", "abc", "abc", true, true},
		{"c", "c", "c", "abc", true, false},
		{"a", "a", "ab", "ab", false, true}, // of two halves, the one with the first
		{"b", "b", "ab", "ab", true, true},
	} {
		split := func(names string) []string { return strings.Split(names, "") }
		s := SpeakersOf(c.self, split(c.heard), split(c.live), split(c.known), nil)
		if s.Alone != c.alone || s.Majority != c.majority {
			t.Errorf("%s hears %s, sees %s of %s: %+v", c.self, c.heard, c.live, c.known, s)
		}
	}
}
