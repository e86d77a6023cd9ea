package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/seeds"
)

// named returns the moves whose names contain one of the texts; all of them without texts.
func named(texts ...string) (some []move) {
	for _, m := range moves {
		if len(texts) == 0 || slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(m.name, text) }) {
			some = append(some, m)
		}
	}
	return some
}

// ofTwoNodes are what happens most to node-a and node-b: where node-a serves, what happens to node-b may as
// well happen to node-c.
func ofTwoNodes() []move {
	ofThird := func(m move) bool { return m.timing || strings.Contains(m.name, "node-c") }
	return slices.DeleteFunc(named("carrier", "switch", "gossip", "rules", "crashes", "starts", "freezes", "thaws",
		"loses its speaker", "stops", "drains", "API server"), ofThird)
}

// TestModelMoves goes through all worlds that a few moves lead to.
func TestModelMoves(t *testing.T) {
	type scope struct {
		name    string
		owners  int
		most    int
		choices []bool
		moves   []move
	}
	scopes := seeds.Of([]scope{
		{"one move", size, 1, choicesAt(0, 100), named()},
		{"two moves", 1, 2, choicesAt(0, 4, 100), ofTwoNodes()},
	}, []scope{
		{"one move", size, 1, choicesAt(0, 100), named()},
		{"two moves", size, 2, choicesAt(0, 1, 3, 8, 24, 31, 100), named()},
		{"three moves", 1, 3, choicesAt(0, 2, 31, 100), ofTwoNodes()},
	})
	for _, c := range scopes {
		t.Run(c.name, func(t *testing.T) {
			for owner := range c.owners {
				s := search{hooks: usualHooks(), choices: c.choices, moves: c.moves}
				if f := s.deepen(trace{Owner: owner}, c.most); f != nil {
					f.report(t, s.hooks)
				}
				t.Logf("node-%c serves: %d moves, %d worlds compared, %d ticks", 'a'+owner, len(c.moves), len(s.visited), s.ticks)
			}
		})
	}
}

// TestModelFindsWhatIsMissing takes out each guard in turn: the model finds out.
func TestModelFindsWhatIsMissing(t *testing.T) {
	for _, c := range []struct {
		name    string
		without func(*hooks)
		given   []modelStep // what has happened before
		choices []bool
		moves   []move
		want    string // the invariant that does not hold
	}{
		{name: "the majority", without: func(h *hooks) { h.noMajority, h.deafTellers, h.otherNetwork = true, true, true },
			moves: named("switch"), want: "CutOffYields"},
		{name: "yielding to what the Lease says", without: func(h *hooks) { h.noYield, h.otherNetwork = true, true },
			moves: named("switch"), want: "CutOffYields"},
		{name: "hearing others who renew the Lease", without: func(h *hooks) { h.deafTellers = true },
			given: []modelStep{{40, "node-a stops its speaker"}, {13, "node-b has its gossip filtered"},
				{40, "node-a loses its rules"}},
			choices: choicesAt(90, 140), moves: named("node-a starts its speaker"), want: "CutOffYields"},
		{name: "the proxy's confirmation", without: func(h *hooks) { h.unconfirmed = true }, moves: named("rules", "stops"),
			want: "OnlyDelivered"},
		{name: "the rescue of connections", without: func(h *hooks) { h.noRescue = true }, moves: named("stops", "drains"),
			want: "NoFlowDropped"},
		{name: "the handover", without: func(h *hooks) { h.noHandover = true }, moves: named("stops", "drains"),
			want: "MakeBeforeBreak"},
		{name: "the hold for a speaker that has ended", without: func(h *hooks) { h.restartHold = 0 },
			moves: named("its speaker"), want: "RestartsInvisible"},
		{name: "hearing the others after a return", without: func(h *hooks) { h.returnHold = 0 },
			moves: named("carrier"), want: "HearsFirst"},
		{name: "asking others when a kernel is silent", without: func(h *hooks) { h.noWitness = true },
			moves: named("is cut off by its switch", "one by one"), want: "TakesNothing"},
		{name: "announcing again", without: func(h *hooks) { h.announceOnce = true },
			given:   []modelStep{{0, "the API server goes away"}, {0, "node-c is cut off by its switch"}},
			choices: choicesAt(84, 120), moves: named("node-c is let in"), want: "ClientsFollow"},
		{name: "knowing which claims are stale", without: func(h *hooks) { h.neverStale = true },
			given: []modelStep{{0, "node-a freezes"}, {4, "node-a thaws"}},
			moves: named("meets others", "first to act"), want: "MakeBeforeBreak"},
		{name: "yielding to a claim of another", without: func(h *hooks) { h.heedsNobody = true },
			moves: named("switch"), want: "OneOwner"},
		{name: "taking over from a speaker that stays away", without: func(h *hooks) { h.restartHold = time.Hour },
			moves: named("loses its speaker"), want: "Answered"},
	} {
		t.Run(c.name, func(t *testing.T) {
			search := func(h *hooks) (f *failure) {
				s := search{hooks: h, choices: choicesAt(0, 2, 24, 30, 100), moves: c.moves}
				if s.whole = c.choices != nil; s.whole {
					s.choices = c.choices
				}
				for owner := 0; owner < size && f == nil; owner++ {
					f = s.deepen(trace{owner, c.given}, 2)
				}
				return f
			}
			h := usualHooks()
			c.without(h)
			f := search(h)
			switch {
			case f == nil:
				t.Fatal("not found")
			case f.Found[0].Invariant != c.want:
				f.report(t, h)
			}
			_, story := replay(h, f.trace, f.More+1)
			t.Log("\n" + story)
			with := usualHooks()
			with.otherNetwork = h.otherNetwork
			if found, story := replay(with, f.trace, f.More+1); len(found) > 0 {
				t.Errorf("it is so with the guard, too:\n%s", story)
			}
		})
	}
}

// TestModelMended replays what the model has found.
func TestModelMended(t *testing.T) {
	for name, c := range map[string]struct {
		trace
		more         int
		otherNetwork bool
	}{
		"a node that drains yields to the majority": {trace{0, []modelStep{
			{0, "node-a is cut off by its switch"}, {0, "node-a drains"}}}, 31, true},
		"a Lease from before the node was cut off says nothing new": {trace{2, []modelStep{
			{90, "node-c freezes"}, {3, "node-b loses its carrier"}, {1, "node-a drains"},
			{0, "node-b has a carrier again"}}}, 8, false},
		"a node that drains ends that without a carrier": {trace{0, []modelStep{
			{0, "node-a loses its carrier"}, {0, "node-a drains"}, {2, "node-a has a carrier again"}}}, 8, false},
		"a speaker calls others from when it knows them": {trace{0, []modelStep{
			{5, "node-b stops its speaker"}, {2, "node-b sends no packet"}, {5, "node-a hears no packet"},
			{27, "node-b starts its speaker"}, {75, "node-b sends packets again"}}}, 31, false},
		"the word of a majority counts until the wait begins": {trace{0, []modelStep{
			{8, "packets from node-b to node-a are lost"}, {5, "node-b and node-c are parted"}, {13, "node-a drains"},
			{3, "node-c freezes"}, {3, "the API server goes away"}, {1, "node-a and node-c are parted"}}}, 120, false},
		"half of the speakers heed more who have met another": {trace{0, []modelStep{
			{40, "node-a stops its speaker"}, {13, "node-b has its gossip filtered"}, {40, "node-a loses its rules"},
			{90, "node-a starts its speaker"}}}, 100, false},
		"a speaker that takes itself for the only one heeds the Lease": {trace{2, []modelStep{
			{0, "node-b freezes"}, {24, "node-c drains"}, {8, "node-b has its gossip filtered"},
			{2, "packets from node-b to node-a are lost"}, {3, "packets from node-b to node-c are lost"},
			{3, "node-b crashes"}, {14, "node-b starts up"}}}, 100, false},
		"a wait that ends as packets arrive again": {trace{0, []modelStep{
			{5, "node-b stops its speaker"}, {2, "node-b starts its speaker"}, {1, "node-b sends no packet"},
			{20, "node-b sends packets again"}}}, 31, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := usualHooks()
			h.otherNetwork = c.otherNetwork
			if found, story := replay(h, c.trace, c.more); len(found) > 0 {
				t.Errorf("%v\n%s", found, story)
			}
		})
	}
}

// TestModelWalks makes many moves at any time. What a walk finds belongs into TestModelMended: another move
// more or less makes other walks of the same seeds.
func TestModelWalks(t *testing.T) {
	seeds.Run(t, seeds.Of(20, 2000), nil, func(t *testing.T, seed uint64) {
		random := rand.New(rand.NewPCG(seed, 0))
		h, path := usualHooks(), trace{Owner: random.IntN(size)}
		w := newWorld(h, path.Owner)
		for range 30 {
			after := []int{0, 1, 2, 3, 5, 8, 13, 24, 40, 90}[random.IntN(10)]
			m := moves[random.IntN(len(moves))]
			for !m.may(w) {
				m = moves[random.IntN(len(moves))]
			}
			for passed := range after {
				if w.pass(); len(w.found) > 0 {
					(&failure{path, passed + 1, w.found}).report(t, h)
					return
				}
			}
			path = path.then(after, m.name)
			if w.play(m); len(w.found) > 0 {
				(&failure{path, 0, w.found}).report(t, h)
				return
			}
		}
	})
}
