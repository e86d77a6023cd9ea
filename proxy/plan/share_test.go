package plan

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func of(namespace, name string) lb.Key { return lb.Key{Namespace: namespace, Name: name} }

// TestContract11AShareOfANamespace tells the story of a namespace with room for 10.
func TestContract11AShareOfANamespace(t *testing.T) {
	s := NewShares(10)
	for _, step := range []struct {
		what, namespace, name string
		created               int64
		needs                 int
		fits                  bool
		next                  string
	}{
		{"the first one", "shop", "web", 5, 6, true, ""},
		{"as much as there is room for", "shop", "api", 6, 4, true, ""},
		{"another namespace has its own room", "dev", "web", 7, 10, true, ""},
		{"no room", "shop", "new", 8, 1, false, ""},
		{"an older one takes it from nobody", "shop", "old", 1, 2, false, ""},
		{"one that has a place does not grow", "shop", "web", 5, 7, false, ""},
		{"and keeps what it has", "shop", "web", 5, 6, true, ""},
		{"one gets smaller, and the oldest that fits is next", "shop", "api", 6, 2, true, "old"},
		{"it gets the room", "shop", "old", 1, 2, true, ""},
		{"one goes, and a small one fits", "shop", "old", 1, 0, true, "new"},
		{"it gets the room", "shop", "new", 8, 1, true, ""},
		{"one waits that never fits", "shop", "giant", 2, 11, false, ""},
		{"it does not stand in the way", "shop", "late", 9, 5, false, ""},
		{"of others", "shop", "web", 5, 0, true, "late"},
		{"which gets the room", "shop", "late", 9, 5, true, ""},
		{"who has waited and goes leaves no room", "shop", "giant", 2, 0, true, ""},
		{"an old one waits", "shop", "old", 1, 3, false, ""},
		{"a younger one waits", "shop", "new", 8, 4, false, ""},
		{"one gets smaller", "shop", "late", 9, 2, true, "old"},
		{"the next one has grown meanwhile, and another one is next", "shop", "old", 1, 9, false, "new"},
		{"it gets the room", "shop", "new", 8, 4, true, ""},
		{"who has waited and goes", "shop", "old", 1, 0, true, ""},
	} {
		fits, next := s.Set(of(step.namespace, step.name), Age{Created: step.created}, step.needs)
		got := ""
		if next != nil {
			got = next.Name
		}
		if fits != step.fits || got != step.next {
			t.Errorf("%s: fits %v, next %q; want %v, %q", step.what, fits, got, step.fits, step.next)
		}
	}
	for _, name := range []string{"api", "new", "late"} {
		s.Set(of("shop", name), Age{}, 0)
	}
	if s.Set(of("dev", "web"), Age{}, 0); len(s.namespaces) > 0 {
		t.Errorf("%d namespaces are kept", len(s.namespaces))
	}
}

// TestContract11SharesHold has Services come, change and go at random. Nobody gets more than there is room for,
// no Service that has a place loses it, and none waits for room that there is.
func TestContract11SharesHold(t *testing.T) {
	const limit, services = 100, 12
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := NewShares(limit)
		got, asked := map[lb.Key]int{}, map[lb.Key]int{}
		age := func(key lb.Key) Age { return Age{UID: key.Name} }
		set := func(key lb.Key) *lb.Key {
			fits, next := s.Set(key, age(key), asked[key])
			if fits {
				got[key] = asked[key]
			} else if asked[key] <= got[key] {
				t.Fatalf("seed %d: %s has %d and is refused %d", seed, key, got[key], asked[key])
			}
			return next
		}
		for range 200 {
			key := of(fmt.Sprint("ns-", random.IntN(2)), fmt.Sprint(random.IntN(services)))
			if asked[key] = random.IntN(40); random.IntN(4) == 0 {
				asked[key] = 0
			}
			for next := set(key); next != nil; {
				next = set(*next)
			}
			used := map[string]int{}
			for key, n := range got {
				used[key.Namespace] += n
			}
			for namespace, n := range used {
				if n > limit {
					t.Fatalf("seed %d: %s has %d", seed, namespace, n)
				}
			}
			for key, n := range asked {
				if n > got[key] && used[key.Namespace]-got[key]+n <= limit {
					t.Fatalf("seed %d: %s waits for %d, of %d in use", seed, key, n, used[key.Namespace])
				}
			}
		}
	}
}

// Without a limit no Service is counted.
func TestSharesWithoutLimit(t *testing.T) {
	s := NewShares(0)
	if fits, next := s.Set(of("shop", "web"), Age{}, 1<<40); !fits || next != nil || len(s.namespaces) > 0 {
		t.Errorf("fits %v, next %v, %d namespaces", fits, next, len(s.namespaces))
	}
}
