package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
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
		fits := s.Set(of(step.namespace, step.name), Age{Created: step.created}, step.needs) == Room
		got, next := "", s.Next()
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
			fits, next := s.Set(key, age(key), asked[key]) == Room, s.Next()
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
	if lack := s.Set(of("shop", "web"), Age{}, 1<<40); lack != Room || s.Next() != nil || len(s.namespaces) > 0 {
		t.Errorf("lack %q, next %v, %d namespaces", lack, s.Next(), len(s.namespaces))
	}
}

// step is one of a story about Shares that serve a Service whole or not at all.
type step struct {
	what, name string
	created    int64
	needs      int
	fits       bool
	next       string
}

// wholeStory tells the story of a namespace with room for 8, and for 2 more of those that have a place.
func wholeStory() []step {
	return []step{
		{"the first one", "web", 5, 4, true, ""},
		{"as much as there is room for", "api", 6, 4, true, ""},
		{"no room", "new", 8, 1, false, ""},
		{"one with a place rolls", "web", 5, 5, true, ""},
		{"and is as before", "web", 5, 4, true, ""},
		{"it gets smaller, and another one is next", "web", 5, 3, true, "new"},
		{"that gets the room", "new", 8, 1, true, ""},
		{"the first one is as before all the same", "web", 5, 4, true, ""},
		{"no room for a young one", "late", 9, 1, false, ""},
		{"two roll at once", "api", 6, 5, true, ""},
		{"the second has no room, and a younger one does not get its place", "web", 5, 5, false, ""},
		{"as it asks again", "late", 9, 1, false, ""},
		{"so the second has it when it is as before", "web", 5, 4, true, ""},
		{"the first that rolled is, too", "api", 6, 4, true, ""},
		{"the second grows too much", "web", 5, 6, false, ""},
		{"an older one takes what it needs of its place", "old", 1, 2, true, ""},
		{"an older one does not take less than it needs", "mid", 3, 3, false, ""},
		{"a part is too little for the one that grew", "web", 5, 4, false, ""},
		{"one goes, and the oldest is next", "api", 6, 0, true, "mid"},
		{"that gets the room, and the one with a part of its place is next", "mid", 3, 3, true, "web"},
		{"that is served again", "web", 5, 4, true, ""},
		{"by itself it is too large, so its place is for all", "web", 5, 9, false, "late"},
		{"also for the young one", "late", 9, 1, true, ""},
	}
}

// TestContract11APlaceGoesToOlderOnesOnly tells the story of Shares that serve a Service whole or not at all.
func TestContract11APlaceGoesToOlderOnesOnly(t *testing.T) {
	s := newWatched(t, 8, 0)
	for _, step := range wholeStory() {
		fits, next := s.set(of("shop", step.name), Age{Created: step.created}, step.needs)
		got := ""
		if next != nil {
			got = next.Name
		}
		if fits != step.fits || got != step.next {
			t.Errorf("%s: fits %v, next %q; want %v, %q", step.what, fits, got, step.fits, step.next)
		}
	}
}

// Whatever the order of the same story is, places hold.
func TestContract11APlaceGoesToOlderOnesOnlyInAnyOrder(t *testing.T) {
	story := wholeStory()
	backwards := slices.Clone(story)
	slices.Reverse(backwards)
	last := map[string]step{}
	for _, step := range story {
		last[step.name] = step
	}
	squashed := slices.DeleteFunc(slices.Clone(story), func(s step) bool { return s != last[s.name] })
	for _, steps := range [][]step{story, backwards, squashed, slices.Concat(story, story),
		slices.Concat(backwards, squashed)} {
		s := newWatched(t, 8, 0)
		for _, step := range steps {
			s.settle(of("shop", step.name), Age{Created: step.created}, step.needs)
		}
	}
	random := rand.New(rand.NewPCG(1, 1))
	for range 300 {
		random.Shuffle(len(story), func(i, j int) { story[i], story[j] = story[j], story[i] })
		s := newWatched(t, 8, 0)
		for _, step := range story {
			s.settle(of("shop", step.name), Age{Created: step.created}, step.needs)
		}
	}
}

// Services come, change and go at random, and places hold.
func TestContract11WholeSharesHold(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := newWatched(t, 100, 0)
		for range 200 {
			n := random.IntN(12)
			needs := random.IntN([]int{15, 40, 120}[random.IntN(3)])
			s.settle(of(fmt.Sprint("ns-", random.IntN(2)), fmt.Sprint(n)), Age{Created: int64(n % 7)}, needs)
		}
	}
}

// watched are Shares that serve a Service whole or not at all, with all that was asked of them.
type watched struct {
	*Shares
	t     *testing.T
	asked map[lb.Key]wish
}

func newWatched(t *testing.T, limit, node int) watched {
	return watched{NewWholeShares(limit, node), t, map[lb.Key]wish{}}
}

// settle has a Service need so much, and those that are next get their room. Then none waits for room that there is.
func (w watched) settle(key lb.Key, age Age, needs int) {
	w.t.Helper()
	for _, next := w.set(key, age, needs); next != nil; {
		fits, another := w.set(*next, w.asked[*next].Age, w.asked[*next].needs)
		if !fits {
			w.t.Fatalf("%s is next and finds no room", next)
		}
		next = another
	}
	for namespace, of := range w.namespaces {
		for key, one := range of.waiting {
			room, left := w.limit-of.used, max((4*(w.node*4/5-w.used)-of.used)/5, 0)
			if of.held[key] > 0 {
				room, left = room+w.growth, max(left, of.placed*5/4-of.used)
			}
			if w.node > 0 {
				room = min(room, left)
			}
			for other, o := range of.waiting {
				if (waiter{one.Age, key}).compare(waiter{o.Age, other}) < 0 {
					room += of.held[other]
				}
			}
			if one.needs-of.held[key] <= room {
				w.t.Fatalf("%s has %d in use: %s has %d and waits for %d", namespace, of.used, key, of.held[key], one.needs)
			}
		}
	}
}

// set has a Service need so much, and checks who has lost a place by that.
func (w watched) set(key lb.Key, age Age, needs int) (fits bool, next *lb.Key) {
	w.t.Helper()
	before, used, most := map[lb.Key]int{}, 0, w.limit+w.growth
	if of := w.namespaces[key.Namespace]; of != nil {
		before, used = maps.Clone(of.held), of.used
		if w.node > 0 {
			most = min(most, of.placed*5/4)
		}
	}
	w.asked[key] = wish{age, needs}
	fits, next = w.Set(key, age, needs) == Room, w.Next()
	of := w.namespaces[key.Namespace]
	if of == nil {
		of = &share{}
	}
	total := 0
	for _, n := range of.held {
		total += n
	}
	if total != of.used || total > w.limit+w.growth {
		w.t.Fatalf("%d are held of %d, and %d counted", total, w.limit, of.used)
	}
	for other, had := range before {
		one, waits := of.waiting[other]
		switch {
		case of.held[other] == had:
		case other != key && (!waits || (waiter{age, key}).compare(waiter{one.Age, other}) > 0):
			w.t.Fatalf("%s takes the place of %s", key, other)
		case other == key && !fits && needs <= w.limit:
			w.t.Fatalf("%s loses its place", key)
		}
	}
	if had := before[key]; had > 0 && !fits && needs <= w.limit && used-had+needs <= most {
		w.t.Fatalf("%s has %d and gets no %d, of %d in use", key, had, needs, used)
	}
	return fits, next
}

// TestContract11NamespacesShareANode tells the story of a node with room for 100 of what is new of all namespaces
// together, and 40 of each.
func TestContract11NamespacesShareANode(t *testing.T) {
	s := NewWholeShares(40, 125)
	for _, step := range []struct {
		what, namespace, name string
		created               int64
		needs                 int
		lack                  Lack
		next                  string
	}{
		{"the first namespace", "a", "web", 1, 40, Room, ""},
		{"is full", "a", "api", 2, 1, NamespaceFull, ""},
		{"the second one", "b", "web", 3, 40, Room, ""},
		{"the third one gets four fifths of what is left", "c", "web", 4, 17, NodeFull, ""},
		{"and no more", "c", "web", 4, 16, Room, ""},
		{"a fourth one gets four fifths of what that left", "d", "web", 5, 4, NodeFull, ""},
		{"and no more", "d", "web", 5, 3, Room, ""},
		{"one that comes later waits", "e", "web", 6, 1, NodeFull, ""},
		{"one with a place grows by a quarter", "c", "web", 4, 20, Room, ""},
		{"and no more", "c", "web", 4, 21, NodeFull, ""},
		{"it is as before", "c", "web", 4, 16, Room, ""},
		{"until another one needs less", "b", "web", 3, 20, Room, "e/web"},
		{"and gets room", "e", "web", 6, 1, Room, ""},
		{"but another one does not get all that is left", "b", "web", 3, 36, NodeFull, ""},
		{"and keeps its place", "b", "web", 3, 20, Room, ""},
		{"the first namespace needs nothing, and the oldest that waits is next", "a", "web", 1, 0, Room, "a/api"},
		{"it gets room", "a", "api", 2, 1, Room, ""},
	} {
		lack, got := s.Set(of(step.namespace, step.name), Age{Created: step.created}, step.needs), ""
		if next := s.Next(); next != nil {
			got = next.String()
		}
		if lack != step.lack || got != step.next {
			t.Errorf("%s: lack %q, next %q; want %q, %q", step.what, lack, got, step.lack, step.next)
		}
	}
}

// Services of many namespaces come, change and go at random. Places hold, and something is always left for others.
func TestContract11NamespacesShareANodeAtRandom(t *testing.T) {
	for seed := range uint64(100) {
		random := rand.New(rand.NewPCG(seed, 1))
		s := newWatched(t, 100, 300)
		for range 400 {
			n := random.IntN(8)
			needs := random.IntN([]int{15, 40, 120}[random.IntN(3)])
			s.settle(of(fmt.Sprint("ns-", random.IntN(10)), fmt.Sprint(n)), Age{Created: int64(n % 5)}, needs)
			used := 0
			for _, of := range s.namespaces {
				used += of.used
			}
			if used != s.used || used > s.node {
				t.Fatalf("seed %d: %d are held of %d, and %d counted", seed, used, s.node, s.used)
			}
		}
	}
}

// Who comes small and grows gets no more than who comes large, and a rolling update has room, however full a node is.
func TestContract11ComingSmallIsNoWayPastTheBound(t *testing.T) {
	s := NewWholeShares(1000, 5000)
	if lack := s.Set(of("shop", "web"), Age{Created: 1}, 20); lack != Room {
		t.Fatal(lack)
	}
	for i := range 12 {
		namespace := fmt.Sprint("ns-", i)
		for n := 1; n < 1000; n++ {
			if s.Set(of(namespace, "web"), Age{Created: 2}, n) != Room {
				break
			}
		}
		for n := range 10 {
			s.Set(of(namespace, fmt.Sprint(n)), Age{Created: 2}, 1)
		}
	}
	if lack := s.Set(of("shop", "web"), Age{Created: 1}, 25); lack != Room {
		t.Errorf("no %s has room for a rolling update, of which %d are left", lack, s.node-s.used)
	}
	if s.used > s.node {
		t.Errorf("%d are held of %d", s.used, s.node)
	}
}

// At the start Services get the room that they may have grown into, and then that is for those again that have a place.
func TestContract6WhatHadGrownIsLoaded(t *testing.T) {
	s := NewWholeShares(8, 0)
	s.Loading(true)
	for i, step := range []struct {
		name  string
		needs int
		want  Lack
	}{{"web", 6, Room}, {"api", 4, Room}, {"large", 9, NamespaceFull}, {"late", 1, NamespaceFull}} {
		if got := s.Set(of("shop", step.name), Age{Created: int64(i)}, step.needs); got != step.want {
			t.Errorf("%s at the start: lack %q, want %q", step.name, got, step.want)
		}
	}
	s.Loading(false)
	s.Set(of("shop", "api"), Age{}, 3)
	if next := s.Next(); next != nil {
		t.Errorf("%s is next, as what is left is for those that have a place", next)
	}
	if got := s.Set(of("shop", "api"), Age{}, 4); got != Room {
		t.Errorf("one that has a place does not grow as before: lack %q", got)
	}
}

// BenchmarkSharesOfOneSelector has all Services of a namespace grow at once, as those with one selector do, beyond what
// there is room for. One operation is all of them.
func BenchmarkSharesOfOneSelector(b *testing.B) {
	for _, services := range []int{500, 4000} {
		b.Run(fmt.Sprint(services), func(b *testing.B) {
			for range b.N {
				s := NewWholeShares(10*services, 0)
				for _, needs := range []int{10, 15, 15} {
					for i := range services {
						s.Set(of("shop", fmt.Sprint(i)), Age{Created: int64(i)}, needs)
					}
					s.Next()
				}
			}
		})
	}
}
