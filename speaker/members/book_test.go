package members

import (
	"bytes"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// known is what a book says, without the means by which it knows.
func known(b book) map[string]map[netip.Addr]plan.Claim {
	all := map[string]map[netip.Addr]plan.Claim{}
	for node, p := range b.pages {
		all[node] = map[netip.Addr]plan.Claim{}
		for _, vip := range p.vips() {
			if claim, ok := b.claims(vip, map[string]plan.Standing{node: {Live: true}})[node]; ok {
				all[node][vip] = claim
			}
		}
	}
	return all
}

// update is all that the book says of a node.
func (b book) update(node string) update {
	return b.updates(map[string]plan.Standing{node: {Live: true}})[0]
}

// all points to the claims.
func all(claims map[netip.Addr]plan.Claim) map[netip.Addr]*plan.Claim {
	pointers := map[netip.Addr]*plan.Claim{}
	for vip, claim := range claims {
		pointers[vip] = &claim
	}
	return pointers
}

// A node's life as the messages that come of it: changes, full states, and a second process.
func history(t *testing.T) (updates []update, final map[netip.Addr]plan.Claim) {
	t.Helper()
	steps := []map[netip.Addr]plan.Claim{
		{vip1: {Reason: lb.ReasonFeedUnknown}, vip2: {Reason: lb.ReasonFeedUnknown}},
		{vip1: {}, vip2: {}},
		{vip1: {Answering: true}, vip2: {}},
		{vip1: {Answering: true}},
		{vip1: {Reason: lb.ReasonStopping, Answering: true}, vip6: {}},
		{},
		{vip2: {}, vip6: {Answering: true}},
	}
	for born := range 2 {
		j := newJournal("n1", uint64(born+1))
		for _, claims := range steps {
			j.set(j.whole(all(claims)))
			updates = append(updates, update{node: j.node, born: j.born, entries: j.take()})
			updates = append(updates, j.full())
		}
	}
	return updates, steps[len(steps)-1]
}

func TestBookDoesNotDependOnOrderOrRepetition(t *testing.T) {
	updates, final := history(t)
	want := map[string]map[netip.Addr]plan.Claim{"n1": final}
	random := rand.New(rand.NewPCG(7, 7))
	for i := range 500 {
		order := slices.Clone(updates)
		switch i {
		case 0:
		case 1:
			slices.Reverse(order)
		default:
			order = append(order, order...)
			random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		}
		b := newBook()
		for _, u := range order {
			b.merge(u)
		}
		if d := cmp.Diff(want, known(b), cmpopts.EquateComparable(netip.Addr{})); d != "" {
			t.Fatalf("order %d: %s", i, d)
		}
		// What is relayed by a third node gives the same, and nothing is left over from what is gone.
		relayed := newBook()
		relayed.merge(b.update("n1"))
		if d := cmp.Diff(want, known(relayed), cmpopts.EquateComparable(netip.Addr{})); d != "" {
			t.Fatalf("order %d, relayed: %s", i, d)
		}
	}
}

// Changes alone, without a full state, converge too, and two books that know different halves know
// all after an exchange.
func TestBooksConvergeByExchange(t *testing.T) {
	updates, final := history(t)
	var changes []update
	for _, u := range updates {
		if u.floor == 0 {
			changes = append(changes, u)
		}
	}
	want := map[string]map[netip.Addr]plan.Claim{"n1": final}
	random := rand.New(rand.NewPCG(8, 8))
	for i := range 500 {
		a, b := newBook(), newBook()
		random.Shuffle(len(changes), func(i, j int) { changes[i], changes[j] = changes[j], changes[i] })
		half := random.IntN(len(changes) + 1)
		for k, u := range changes {
			if k < half {
				a.merge(u)
			} else {
				b.merge(u)
			}
		}
		for range 2 {
			if a.pages["n1"] != nil {
				b.merge(a.update("n1"))
			}
			if b.pages["n1"] != nil {
				a.merge(b.update("n1"))
			}
		}
		for _, x := range []book{a, b} {
			if d := cmp.Diff(want, known(x), cmpopts.EquateComparable(netip.Addr{})); d != "" {
				t.Fatalf("exchange %d: %s", i, d)
			}
		}
	}
}

func TestMergeTellsWhatChanged(t *testing.T) {
	b := newBook()
	for i, c := range []struct {
		u     update
		want  []netip.Addr
		ended bool
	}{
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 1}, {vip: vip2, seq: 2}}}, []netip.Addr{vip1, vip2}, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 1}}}, nil, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 3, claim: plan.Claim{Answering: true}}}},
			[]netip.Addr{vip1}, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 2}}}, nil, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 4, claim: plan.Claim{Answering: true}}}}, nil, false},
		{update{node: "n1", born: 1, floor: 5, entries: []entry{{vip: vip1, seq: 4, claim: plan.Claim{Answering: true}}}},
			[]netip.Addr{vip2}, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip2, seq: 2}}}, nil, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 6, claim: plan.Claim{Answering: true,
			Reason: lb.ReasonNotProgrammed}}}}, []netip.Addr{vip1}, true},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 7, claim: plan.Claim{Reason: lb.ReasonNotProgrammed}}}},
			[]netip.Addr{vip1}, false},
		{update{node: "n1", born: 2}, []netip.Addr{vip1}, false},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip2, seq: 9}}}, nil, false},
	} {
		if got, ended := b.merge(c.u); !slices.Equal(got, c.want) || ended != c.ended {
			t.Errorf("update %d: changed %v, ended %v; want %v, %v", i, got, ended, c.want, c.ended)
		}
	}
}

// A clock that was set back must not make a restarted speaker mute: the others would take its words
// for old ones.
func TestContract6OutlivesAnEarlierProcessFromTheFuture(t *testing.T) {
	others := newBook()
	before := newJournal("n1", 1000)
	before.set(all(map[netip.Addr]plan.Claim{vip1: {Answering: true}}))
	others.merge(before.full())

	after := newJournal("n1", 500)
	after.set(all(map[netip.Addr]plan.Claim{vip2: {}}))
	after.take()
	if after.outlive(after.full()) {
		t.Error("a process fights its own words")
	}
	if !after.outlive(others.update("n1")) {
		t.Fatal("a process from the future is not outlived")
	}
	others.merge(update{node: "n1", born: after.born, entries: after.take()})
	want := map[string]map[netip.Addr]plan.Claim{"n1": {vip2: {}}}
	if d := cmp.Diff(want, known(others), cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Error(d)
	}
}

// What is told of a book stays as it is when the book changes: it is encoded while others go on.
func TestWhatIsToldStays(t *testing.T) {
	b, standings := newBook(), map[string]plan.Standing{}
	updates := manyAlike(4, 3000)
	b.merge(updates...)
	for _, u := range updates {
		standings[u.node] = plan.Standing{Live: true}
	}
	say := func(node int, seq uint64, vip netip.Addr, claim plan.Claim) {
		b.merge(update{node: updates[node].node, born: updates[node].born,
			entries: []entry{{vip: vip, seq: seq, claim: claim}}})
	}
	for name, change := range map[string]func(){
		"another claim": func() { say(0, 3001, address(7), plan.Claim{Weight: 77}) },
		"another VIP":   func() { say(1, 3001, address(50_000), plan.Claim{Answering: true}) },
		"another process": func() {
			b.merge(update{node: updates[2].node, born: updates[2].born + 1, floor: 1,
				entries: []entry{{vip: vip1, seq: 1}}})
		},
		"all of a node": func() {
			b.merge(update{node: updates[3].node, born: updates[3].born, floor: 4000,
				entries: []entry{{vip: address(3), seq: 4000, claim: plan.Claim{Weight: 9}}}}.compacted())
		},
		"an index that is tidied": func() { b.index.kept = 0; b.tidy() },
	} {
		told := b.updates(standings)
		slices.SortFunc(told, func(x, y update) int { return strings.Compare(x.node, y.node) })
		before := encodeCompact(told...)
		change()
		if !bytes.Equal(before, encodeCompact(told...)) {
			t.Errorf("%s: what was told has changed", name)
		}
		now := b.updates(standings)
		slices.SortFunc(now, func(x, y update) int { return strings.Compare(x.node, y.node) })
		if name != "an index that is tidied" && bytes.Equal(before, encodeCompact(now...)) {
			t.Errorf("%s: what is told next is the same", name)
		}
	}
}

// A state is encoded beside changes, which the race detector sees.
func TestAStateIsEncodedBesideChanges(t *testing.T) {
	m := New(Options{Self: "a", Born: time.Unix(0, 100), Liveness: everybody{}, Log: slog.New(slog.DiscardHandler),
		Changed: func([]netip.Addr) {}})
	updates := manyAlike(2, 500)
	m.learn(encodeCompact(updates...))
	var states sync.WaitGroup
	for range 2 {
		states.Go(func() {
			for range 20 {
				if _, err := decode(delegate{m}.LocalState(false)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for seq := range uint64(200) {
		vip := address(int(seq) * 7)
		m.learn(encode(update{node: updates[0].node, born: updates[0].born,
			entries: []entry{{vip: vip, seq: 501 + seq, claim: plan.Claim{Weight: uint16(seq)}}}}))
		m.Update(map[netip.Addr]*plan.Claim{vip: {Weight: uint16(seq)}})
	}
	states.Wait()
}

// everybody counts as live.
type everybody struct{ Liveness }

func (everybody) Sight() plan.Sight {
	return plan.Sight{Standings: map[string]plan.Standing{"k8s-worker-0000": {Live: true}, "k8s-worker-0001": {Live: true}}}
}
