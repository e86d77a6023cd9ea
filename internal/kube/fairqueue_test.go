package kube

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// Contract clause 11: of a queue that one fills, the others get their share.
func TestContract11FairQueue(t *testing.T) {
	q := newFairQueue[string](6)
	add := func(of, item string, wantFrom string, wantLost bool) {
		t.Helper()
		if from, lost := q.add(of, item); from != wantFrom || lost != wantLost {
			t.Errorf("%s: of %q something was lost: %v, want %q, %v", item, from, lost, wantFrom, wantLost)
		}
	}
	for i := range 6 {
		add("a", fmt.Sprint("a", i), "", false)
	}
	add("a", "a6", "a", true)
	add("b", "b0", "a", true)
	add("b", "b1", "a", true)
	add("b", "b2", "a", true)
	add("b", "b3", "b", true) // both have as much
	add("c", "c0", "a", true)
	var got []string
	for len(got) < 6 {
		item, ok := q.next(t.Context())
		if !ok {
			t.Fatal("nothing waits")
		}
		got = append(got, item)
	}
	if want := []string{"a0", "b0", "c0", "a1", "b1", "b2"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if len(q.waiting) > 0 || len(q.turns) > 0 || q.length != 0 {
		t.Errorf("it still holds %v, %v, %d", q.waiting, q.turns, q.length)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if item, ok := q.next(ctx); ok {
		t.Errorf("after the end: %q", item)
	}
}

// As many as have a place each lose nothing of what they add first.
func TestFairQueueOfMany(t *testing.T) {
	const most = 50
	q := newFairQueue[int](most)
	for i := range 10 * most {
		q.add("flood", i)
	}
	for i := range most - 1 {
		if from, lost := q.add(fmt.Sprint(i), i); !lost || from != "flood" {
			t.Errorf("%d: lost %v, of %q", i, lost, from)
		}
	}
	if from, lost := q.add("one more", 0); !lost || from != "one more" {
		t.Errorf("all have one: lost %v, of %q", lost, from)
	}
	if q.length != most || len(q.turns) != most {
		t.Errorf("%d items of %d", q.length, len(q.turns))
	}
}

// Contract clause 11: one whose items are slow has a turn where nobody else has, or a quarter of the time.
func TestContract11FairQueueOfSlowOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newFairQueue[string](6)
		next := func(want string) {
			t.Helper()
			if got, ok := q.next(t.Context()); !ok || got != want {
				t.Errorf("the next is %q, want %q", got, want)
			}
		}
		for _, item := range []string{"a0", "a1", "b0", "b1", "b2", "b3"} {
			q.add(item[:1], item)
		}
		next("a0")
		q.putBack("a", "a0")
		q.took("a", 10*time.Second)
		next("b0")
		next("b1")
		time.Sleep(30 * time.Second)
		next("a0")
		q.took("a", 10*time.Second)
		next("b2")
		next("b3")
		next("a1")
		q.putBack("a", "a1")
		q.took("a", time.Millisecond)
		q.add("b", "b4")
		next("a1")
		next("b4")
		if len(q.waiting)+len(q.turns)+len(q.slow)+q.length > 0 {
			t.Errorf("it still holds %v, %v, %v, %d", q.waiting, q.turns, q.slow, q.length)
		}
	})
}
