package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func inSpace(space string) func(name string) lb.Key {
	return func(name string) lb.Key { return lb.Key{Namespace: space, Name: name} }
}

func TestProbeBudget(t *testing.T) {
	var b ProbeBudget
	k := inSpace("shop")
	for name, n := range map[string]int{"a": 256, "b": 256} {
		if !b.Ask(k(name), n) {
			t.Errorf("%s is refused", name)
		}
	}
	if b.Ask(k("c"), 64) || b.Ask(k("d"), 1) || b.Changed() != nil {
		t.Error("more than can be asked was taken")
	}
	if !b.Ask(k("b"), 250) || !slices.Equal(b.Changed(), []lb.Key{k("d")}) {
		t.Error("what is given up goes to nobody")
	}
	if b.Changed() != nil {
		t.Error("it is said twice")
	}
	if !b.Ask(k("d"), 6) || b.Ask(k("a"), 257) {
		t.Error("the share of a has grown beyond what is free")
	}
	if !slices.Equal(b.Changed(), []lb.Key{k("c")}) || !b.Ask(k("c"), 64) {
		t.Error("the share that a lost is not free")
	}
}

// Contract clause 11: the Services of one namespace that came first leave room for another's.
func TestContract11ProbesAreSharedOut(t *testing.T) {
	var b ProbeBudget
	shop, blog, wiki := inSpace("shop"), inSpace("blog"), inSpace("wiki")
	for i := range 8 {
		b.Ask(shop(fmt.Sprint(i)), 64)
	}
	if b.Ask(shop("8"), 1) {
		t.Error("a namespace takes from itself")
	}
	if !b.Ask(blog("a"), 10) || !slices.Equal(b.Changed(), []lb.Key{shop("0"), shop("8")}) {
		t.Error("the namespace with all gives nothing up")
	}
	if b.Ask(shop("0"), 64) || !b.Ask(shop("8"), 1) || b.Changed() != nil {
		t.Error("it takes back what it gave up")
	}
	for i := range 3 {
		if !b.Ask(wiki(fmt.Sprint(i)), 64) {
			t.Error("less than the others have is refused")
		}
	}
	if b.Ask(wiki("3"), 64) {
		t.Error("more than half is taken from one that has no more")
	}
	if b.Changed(); b.spaces["shop"] < b.spaces["wiki"] {
		t.Errorf("they have %v", b.spaces)
	}
}

// Whatever is asked, no more than the budget is given, and it comes to rest.
func TestProbeBudgetComesToRest(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var b ProbeBudget
		want := map[lb.Key]int{}
		for range 60 {
			key := lb.Key{Namespace: fmt.Sprint(random.IntN(6)), Name: fmt.Sprint(random.IntN(8))}
			want[key] = random.IntN(MaxProbed + 1)
			b.Ask(key, want[key])
			rounds := 0
			for again := b.Changed(); len(again) > 0; again = b.Changed() {
				if rounds++; rounds > 100 {
					t.Fatalf("seed %d: it goes on and on", seed)
				}
				for _, key := range again {
					b.Ask(key, want[key])
				}
			}
			sum, spaces := 0, map[string]int{}
			for key, n := range b.asked {
				sum += n
				spaces[key.Namespace] += n
			}
			if sum != b.total || sum > MaxProbedOfNode || fmt.Sprint(spaces) != fmt.Sprint(b.spaces) {
				t.Fatalf("seed %d: %d are asked, %d by its count; %v and %v", seed, sum, b.total, spaces, b.spaces)
			}
			for key, n := range b.refused {
				if sum+n <= MaxProbedOfNode {
					t.Fatalf("seed %d: %v waits for %d, and %d are free", seed, key, n, MaxProbedOfNode-sum)
				}
			}
		}
	}
}
