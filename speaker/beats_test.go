package main

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/routes"
)

// Sessions with neighbors run beside those with routers; only the loss of a neighbor's path counts, and
// once.
func TestBeats(t *testing.T) {
	own, near, far := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::3")
	neighbors := map[netip.Addr]string{near: "b", far: "c"}
	b := newBeats(50*time.Millisecond, func() (netip.Addr, map[netip.Addr]string) { return own, neighbors })
	router := routes.Path{Peer: netip.MustParseAddr("10.0.0.9")}
	all, changed := b.sessions(map[routes.Path]lb.BFDProfile{router: {Multiplier: 5}}, true)
	session := routes.Path{Peer: near, Local: own, Multihop: true}
	if p := all[session]; !changed || len(all) != 2 || p.Transmit != 50*time.Millisecond || p.Multiplier != beatMultiplier ||
		all[router].Multiplier != 5 {
		t.Fatalf("%+v, changed %v", all, changed)
	}
	if again, changed := b.sessions(nil, false); changed || len(again) != 2 {
		t.Errorf("the same again: %+v, changed %v", again, changed)
	}
	outcomes := map[bfd.Key]bfd.Outcome{bfd.Key(session): {State: bfd.Up}, bfd.Key(router): {State: bfd.Up}}
	lost := func(what string, want ...string) {
		t.Helper()
		if got := b.lost(outcomes); !slices.Equal(got, want) {
			t.Errorf("%s: lost %v, want %v", what, got, want)
		}
	}
	lost("all are up")
	if watched, up := b.counts(outcomes); watched != 1 || up != 1 {
		t.Errorf("%d of %d are up", up, watched)
	}
	outcomes[bfd.Key(router)] = bfd.Outcome{Failures: 1}
	lost("a router fails")
	outcomes[bfd.Key(session)] = bfd.Outcome{State: bfd.Down, Failures: 1}
	lost("the neighbor fails", "b")
	lost("it is still down")
	outcomes[bfd.Key(session)] = bfd.Outcome{State: bfd.Down, Failures: 1, LastDown: &bfd.Loss{Administrative: true}}
	lost("an administrative end")

	neighbors = nil
	if all, changed := b.sessions(nil, false); !changed || len(all) != 1 {
		t.Errorf("the ring has changed: %+v, %v", all, changed)
	}
	if all, changed := b.sessions(nil, true); !changed || len(all) != 0 {
		t.Errorf("no router is left: %+v, %v", all, changed)
	}
}
