package members

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

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
		u    update
		want []netip.Addr
	}{
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 1}, {vip: vip2, seq: 2}}}, []netip.Addr{vip1, vip2}},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 1}}}, nil},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 3, claim: plan.Claim{Answering: true}}}},
			[]netip.Addr{vip1}},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 2}}}, nil},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip1, seq: 4, claim: plan.Claim{Answering: true}}}}, nil},
		{update{node: "n1", born: 1, floor: 5, entries: []entry{{vip: vip1, seq: 4, claim: plan.Claim{Answering: true}}}},
			[]netip.Addr{vip2}},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip2, seq: 2}}}, nil},
		{update{node: "n1", born: 2}, []netip.Addr{vip1}},
		{update{node: "n1", born: 1, entries: []entry{{vip: vip2, seq: 9}}}, nil},
	} {
		if got := b.merge(c.u); !slices.Equal(got, c.want) {
			t.Errorf("update %d: changed %v, want %v", i, got, c.want)
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
