package ownership

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// When a node crashes whose cluster is too large for one step, its VIPs come first, then a VIP that changes
// meanwhile, and in the end all are decided as in one step.
func TestVIPsOfACrashedNodeComeFirst(t *testing.T) {
	const all, room = 40, 4
	nodes := []string{"a", "b", "c"}
	owners, vips := map[netip.Addr]string{}, map[netip.Addr]bool{}
	for i := range byte(all) {
		vip := netip.AddrFrom4([4]byte{192, 0, 2, i})
		owners[vip], vips[vip] = plan.Winner(vip, nodes), true
	}
	gone := map[netip.Addr]bool{}
	events := func(named map[netip.Addr]bool, live ...string) Events {
		e := Events{VIPs: named, Seen: Seen{Answering: map[netip.Addr][]string{}}}
		for vip, owner := range owners {
			if owner == "a" {
				e.Seen.Answering[vip] = eth0
			}
		}
		e.Input = func(vip netip.Addr) (plan.Input, bool) {
			claims := ""
			for _, node := range live {
				if claims += " " + node; owners[vip] == node {
					claims += ":answers"
				}
			}
			return input(vip, claims), !gone[vip]
		}
		return e
	}
	parts, whole := New(time.Second), New(time.Second)
	f, now := facts("a"), epoch
	for _, s := range []*State{&parts, &whole} {
		s.Step(now, f, events(vips, "b", "c"))
		now = now.Add(2 * FreshFor)
		s.Step(now, f, events(vips, "b", "c"))
	}

	f.Live = []string{"a", "c"}
	whole.Step(now, f, events(vips, "c"))
	parts.looks = room * len(f.Live)
	decided, _, again := parts.Step(now, f, events(maps.Clone(vips), "c"))
	var left []netip.Addr
	for vip, owner := range owners {
		if _, is := decided[vip]; is == (owner == "c") {
			t.Errorf("%s of %s: decided at once: %v", vip, owner, is)
		}
		if owner == "c" {
			left = append(left, vip)
		}
	}
	if again != time.Nanosecond || len(left) <= 2*room {
		t.Fatalf("again in %s, with %d left", again, len(left))
	}
	gone[left[0]] = true
	if decided, _, _ = parts.Step(now, f, events(map[netip.Addr]bool{left[0]: true}, "c")); len(decided) != room ||
		!decided[left[0]].Gone {
		t.Errorf("after %s has changed, %v are decided", left[0], slices.Collect(maps.Keys(decided)))
	}
	whole.Step(now, f, events(map[netip.Addr]bool{left[0]: true}, "c"))
	for steps := 0; again > 0; steps++ {
		if steps > all/room {
			t.Fatal("it does not end")
		}
		decided, _, again = parts.Step(now, f, events(nil, "c"))
		if len(decided) > room {
			t.Errorf("%d are decided in one step", len(decided))
		}
	}
	if !reflect.DeepEqual(parts.Decisions(), whole.Decisions()) {
		t.Errorf("decided in parts: %v\nin one step: %v", parts.Decisions(), whole.Decisions())
	}
}
