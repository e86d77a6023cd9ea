package l2

import (
	"context"
	"log/slog"
	"net"
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
	o.Log, o.Listen, o.ListenNDP, o.Stats = slog.New(slog.DiscardHandler), s.Listen, s.ListenNDP, noStats{}
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

// protocol is how VIPs of a family are announced.
type protocol struct {
	vip netip.Addr
	// forms is how many packets an announcement is.
	forms int
	// announce is how another node announces a VIP, ask how a client asks for it.
	announce func(mac net.HardwareAddr, vip netip.Addr) []byte
	ask      func(vip netip.Addr) []byte
}

// overBoth runs a test over ARP and over NDP, each in a time of its own.
func overBoth(t *testing.T, test func(t *testing.T, p protocol)) {
	t.Helper()
	for name, p := range map[string]protocol{
		"ARP": {
			vip: vip, forms: 2, // a request and a reply
			announce: func(mac net.HardwareAddr, vip netip.Addr) []byte {
				return ask(func(q *question) { q.sender, q.mac = vip, mac })
			},
			ask: func(vip netip.Addr) []byte { return ask(func(q *question) { q.target = vip }) },
		},
		"NDP": {
			vip: vip6, forms: 1,
			announce: func(mac net.HardwareAddr, vip netip.Addr) []byte {
				frame, err := advertise(mac, vip, false, allNodes, multicastMAC(allNodes))
				if err != nil {
					t.Fatal(err)
				}
				return frame
			},
			ask: func(vip netip.Addr) []byte {
				g := group(t, vip)
				return solicit{source: client6, destination: g, target: vip, to: multicastMAC(g), option: true}.frame(t)
			},
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { test(t, p) }) })
	}
}

// What this node owns it announces again, soon and some times more, when another node of ours
// announces it; seldom enough that nobody can have it flood the segment.
func TestContract11WhatAnotherNodeAnnouncesIsReclaimed(t *testing.T) {
	overBoth(t, func(t *testing.T, p protocol) {
		s := newSegment()
		a := started(t, s, Options{})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}, Owned: true}})
		d.Ours = map[string]string{theirs.String(): "other", own.String(): "self"}
		a.Set(d)
		time.Sleep(time.Hour)
		s.announced()
		use := p.announce(theirs, p.vip)
		key := "eth0 " + p.vip.String() + " " + own.String()
		s.open["eth0"].in <- use
		time.Sleep(100 * time.Millisecond)
		wantAnnounced(t, s, map[string]int{key: p.forms})
		time.Sleep(time.Minute)
		wantAnnounced(t, s, map[string]int{key: p.forms * (len(burst) - 1)})
		wantConflicts(t, "a node of ours", a, nil)

		// A rival that never ends, or somebody who plays one.
		for range 600 {
			s.open["eth0"].in <- use
			time.Sleep(100 * time.Millisecond)
		}
		if n := s.announced()[key]; n < p.forms*6 || n > p.forms*60 {
			t.Errorf("%d announcements in a minute", n)
		}

		// What it only answers for until the other does is the other's.
		time.Sleep(time.Hour)
		d.Answers = map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}}}
		a.Set(d)
		s.announced()
		s.open["eth0"].in <- use
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)

		// It gives the VIP up before it would have announced it again.
		d.Answers = map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}, Owned: true}}
		a.Set(d)
		time.Sleep(time.Hour)
		s.announced()
		s.open["eth0"].in <- use
		time.Sleep(reclaimAfter / 2)
		a.Set(Desired{Interfaces: d.Interfaces, Ours: d.Ours, Answers: map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}}}})
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)
	})
}

// Once another node of ours has announced a VIP, one that does not own it for sure says no more of
// it, neither the rest of its burst nor what it repeats: clients listen to whoever spoke last. It
// begins anew in the next round, or when it is sure.
func TestContract11WhoDoesNotOwnFallsSilent(t *testing.T) {
	overBoth(t, func(t *testing.T, p protocol) {
		s := newSegment()
		a := started(t, s, Options{Repeat: time.Minute})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, nil)
		d.Ours = map[string]string{theirs.String(): "other", own.String(): "self"}
		told := func(answer Answer) {
			answer.On = []string{"eth0"}
			d.Answers = map[netip.Addr]Answer{p.vip: answer}
			a.Set(d)
			synctest.Wait()
		}
		use := p.announce(theirs, p.vip)
		key := "eth0 " + p.vip.String() + " " + own.String()
		for _, c := range []struct{ unsure, then Answer }{
			{Answer{Round: 0}, Answer{Round: 1}},
			{Answer{Round: 2}, Answer{Round: 2, Owned: true}},
		} {
			told(c.unsure)
			time.Sleep(time.Second / 2)
			wantAnnounced(t, s, map[string]int{key: p.forms * 3}) // of the burst
			s.open["eth0"].in <- use
			time.Sleep(gatherFor)
			synctest.Wait()
			if rival := a.Outcome().Rivals[p.vip]; rival != "other" {
				t.Errorf("the rival is %q", rival)
			}
			time.Sleep(time.Hour)
			wantAnnounced(t, s, nil)
			told(c.then)
			if len(s.announced()) == 0 {
				t.Errorf("it says nothing when told %+v", c.then)
			}
			time.Sleep(time.Hour)
			s.announced()
		}
	})
}

// A node that was heard to announce a VIP is forgotten after a while, and two that announce it in
// turn change places once a second at most.
func TestRivalsComeAndGo(t *testing.T) {
	now := time.Unix(1e9, 0)
	var r rivalry
	often := &allowance{rate: 1000, most: 1000}
	if r.current(now) != "" {
		t.Error("there is a rival from the first")
	}
	r.announced("b", often, now)
	for range 5 {
		now = now.Add(sightingLasts - time.Millisecond)
		if r.current(now) != "b" {
			t.Error("the rival is forgotten while it is heard")
		}
		r.announced("b", often, now)
	}
	if now = now.Add(sightingLasts); r.current(now) != "" {
		t.Error("the rival is never forgotten")
	}
	changes, last := 0, ""
	for i := range 1000 {
		r.announced([]string{"b", "c"}[i%2], often, now)
		if r.current(now) != last {
			changes, last = changes+1, r.current(now)
		}
		now = now.Add(10 * time.Millisecond)
	}
	if changes < 2 || changes > 10+1 {
		t.Errorf("another rival %d times in ten seconds", changes)
	}

	overBoth(t, func(t *testing.T, p protocol) {
		s := newSegment()
		a := started(t, s, Options{})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}}})
		d.Ours = map[string]string{theirs.String(): "other", own.String(): "self"}
		a.Set(d)
		time.Sleep(time.Minute)
		synctest.Wait()
		for range 3 {
			s.open["eth0"].in <- p.announce(theirs, p.vip)
			time.Sleep(sightingLasts / 2)
			synctest.Wait()
			if rival := a.Outcome().Rivals[p.vip]; rival != "other" {
				t.Errorf("the rival is %q", rival)
			}
		}
		time.Sleep(sightingLasts)
		synctest.Wait()
		if rival := a.Outcome().Rivals[p.vip]; rival != "" {
			t.Errorf("the rival is %q, which was silent for long", rival)
		}
	})
}

// Another interface of this node on the same segment is no rival.
func TestAnotherInterfaceIsNoRival(t *testing.T) {
	overBoth(t, func(t *testing.T, p protocol) {
		s := newSegment()
		a := started(t, s, Options{})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78), {Name: "eth1", Index: 3, MAC: theirs, Up: true}},
			map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}, Owned: true}})
		d.Ours = map[string]string{theirs.String(): "other", own.String(): "self"}
		a.Set(d)
		time.Sleep(time.Hour)
		s.announced()
		s.open["eth0"].in <- p.announce(theirs, p.vip)
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)
	})
}

// All VIPs together are reclaimed a bounded number of times.
func TestReclaimingIsBounded(t *testing.T) {
	a := allowance{rate: reclaimRate, most: reclaimsKept}
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
	overBoth(t, func(t *testing.T, p protocol) {
		s := newSegment()
		var wakes atomic.Uint64
		a := started(t, s, Options{Wakes: wakes.Load, Repeat: time.Second})
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{p.vip: {On: []string{"eth0"}, Owned: true}})
		d.Ours = map[string]string{theirs.String(): "other"}
		a.Set(d)
		time.Sleep(time.Hour)
		question := p.ask(p.vip)
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

// Who lets VIPs be forgotten between two names for them has the same bound as who does not.
func TestContract11RivalsAfterAPause(t *testing.T) {
	now := time.Now()
	changes := allowance{rate: 1, most: 1}
	first, second := rivalry{}, rivalry{}
	first.announced("b", &changes, now)
	second.announced("b", &changes, now)
	now = now.Add(sightingLasts + time.Second)
	first.announced("c", &changes, now)
	second.announced("c", &changes, now)
	if first.node != "c" || second.node != "b" {
		t.Errorf("after a pause %q and %q announced them, want c and b", first.node, second.node)
	}
	second.announced("c", &changes, now.Add(time.Minute))
	if second.node != "c" {
		t.Errorf("after a calm %q announced it, want c", second.node)
	}
}
