package l2

import (
	"context"
	"log/slog"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// started runs an actor on a segment until the test ends.
func started(t *testing.T, s *segment, o Options) *Actor {
	t.Helper()
	o.Log, o.Listen, o.Stats = slog.New(slog.DiscardHandler), s.Listen, noStats{}
	a := New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return a
}

// What this node owns it announces again, soon and some times more, when another node of ours
// announces it; seldom enough that nobody can have it flood the segment.
func TestContract11WhatAnotherNodeAnnouncesIsReclaimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := started(t, s, Options{})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}, Owned: true}})
		d.Ours = map[string]bool{theirs.String(): true, own.String(): true}
		a.Set(d)
		time.Sleep(time.Hour)
		s.announced()
		use := ask(func(q *question) { q.sender = vip })
		key := "eth0 " + vip.String() + " " + own.String()
		s.open["eth0"].in <- use
		time.Sleep(100 * time.Millisecond)
		wantAnnounced(t, s, map[string]int{key: 2}) // both forms
		time.Sleep(time.Minute)
		wantAnnounced(t, s, map[string]int{key: 2 * (len(burst) - 1)})
		wantConflicts(t, "a node of ours", a, nil)

		// A rival that never ends, or somebody who plays one.
		for range 600 {
			s.open["eth0"].in <- use
			time.Sleep(100 * time.Millisecond)
		}
		if n := s.announced()[key]; n < 2*6 || n > 2*60 {
			t.Errorf("%d announcements in a minute", n)
		}

		// What it only answers for until the other does is the other's.
		time.Sleep(time.Hour)
		d.Answers = map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}
		a.Set(d)
		s.announced()
		s.open["eth0"].in <- use
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)

		// It gives the VIP up before it would have announced it again.
		d.Answers = map[netip.Addr]Answer{vip: {On: []string{"eth0"}, Owned: true}}
		a.Set(d)
		time.Sleep(time.Hour)
		s.announced()
		s.open["eth0"].in <- use
		time.Sleep(reclaimAfter / 2)
		a.Set(Desired{Interfaces: d.Interfaces, Ours: d.Ours, Answers: map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}})
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)
	})
}

// Another interface of this node on the same segment is no rival.
func TestAnotherInterfaceIsNoRival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := started(t, s, Options{})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78), {Name: "eth1", Index: 3, MAC: theirs, Up: true}},
			map[netip.Addr]Answer{vip: {On: []string{"eth0"}, Owned: true}})
		d.Ours = map[string]bool{theirs.String(): true, own.String(): true}
		a.Set(d)
		time.Sleep(time.Hour)
		s.announced()
		s.open["eth0"].in <- ask(func(q *question) { q.sender = vip })
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)
	})
}

// All VIPs together are reclaimed a bounded number of times.
func TestReclaimingIsBounded(t *testing.T) {
	var a allowance
	now := time.Unix(1e9, 0)
	taken := 0
	for range 100 {
		for range 2 * reclaimsKept {
			if a.take(now) {
				taken++
			}
		}
		now = now.Add(100 * time.Millisecond)
	}
	if most := reclaimsKept + 10*reclaimRate; taken > most || taken < most-reclaimRate {
		t.Errorf("%d times in ten seconds, want at most %d", taken, most)
	}
	var r rivalry
	last := time.Duration(0)
	for range 10 {
		r.seen(now)
		if wait := r.due.Sub(now); wait < reclaimAfter || wait > defendInterval || wait < last {
			t.Errorf("waits %s after %s", wait, last)
		} else {
			last = wait
		}
		now = r.due
		r.reclaimed(now)
	}
	if last != defendInterval {
		t.Errorf("waits %s in the end", last)
	}
	now = now.Add(2 * reclaimCalm)
	r.seen(now)
	if wait := r.due.Sub(now); wait != reclaimAfter {
		t.Errorf("waits %s after a long calm", wait)
	}
}

// A process that was frozen sends nothing before it was told anew what to answer for; nor does one
// that is mute.
func TestContract11NothingIsSentAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		var wakes atomic.Uint64
		a := started(t, s, Options{Wakes: wakes.Load, Repeat: time.Second})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}, Owned: true}})
		d.Ours = map[string]bool{theirs.String(): true}
		a.Set(d)
		time.Sleep(time.Hour)
		question := ask(func(*question) {})
		answered := func(what string, want bool) {
			t.Helper()
			synctest.Wait()
			s.announced()
			s.open["eth0"].in <- question
			time.Sleep(10 * time.Second)
			got := len(s.open["eth0"].out) > 0
			for len(s.open["eth0"].out) > 0 {
				<-s.open["eth0"].out
			}
			if got != want {
				t.Errorf("%s: answered %v", what, got)
			}
			if announced := len(s.announced()) > 0; announced != want {
				t.Errorf("%s: announced %v", what, announced)
			}
		}
		answered("awake", true)
		wakes.Add(1)
		answered("just woken", false)
		d.Wakes, d.Mute = 1, true
		a.Set(d)
		answered("it has to hear the others", false)
		d.Mute = false
		a.Set(d)
		answered("it has", true)
	})
}
