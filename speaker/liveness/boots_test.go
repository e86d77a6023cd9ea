package liveness

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// A node has booted if it joins in another boot than before, whether it was missed meanwhile or taken out of the
// cluster. One that is taken out for an hour is forgotten: nobody remembers connections to it then.
func TestBooted(t *testing.T) {
	all := map[string][]netip.Addr{"a": nil, "b": nil}
	without := map[string][]netip.Addr{"b": nil}
	l := NewState("m", hold, probeInterval)
	now := time.Unix(1e9, 0)
	born := uint64(0)
	for _, c := range []struct {
		what  string
		after time.Duration
		nodes map[string][]netip.Addr
		boot  uint64 // of a when it joins; 0 for an older speaker
		want  map[string]uint64
	}{
		{"met", 0, all, 1, nil},
		{"its speaker is restarted", 0, all, 1, nil},
		{"by an older one", 0, all, 0, nil},
		{"a newer one", 0, all, 1, nil},
		{"booted", 0, all, 2, map[string]uint64{"a": 2}},
		{"its speaker is restarted", 0, all, 2, map[string]uint64{"a": 2}},
		{"booted while it was no node", lb.FlowMemory, without, 3, map[string]uint64{"a": 3}},
		{"in the cluster", 2 * lb.FlowMemory, all, 3, map[string]uint64{"a": 3}},
	} {
		now = now.Add(c.after)
		l.Keep(c.nodes, now)
		born++
		l.Joined(plan.Process{Node: "a", Born: born, Boot: c.boot}, now)
		l.Joined(plan.Process{Node: "a", Born: born, Boot: 9}, now) // somebody says so of the same process
		l.Joined(plan.Process{Node: "a", Born: born - 1, Boot: 8}, now)
		if got := l.Speakers(now).Booted; !maps.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
	}
	held := l.Speakers(now).Booted
	l.Lost(plan.Process{Node: "a"}, now)
	l.Keep(without, now)
	now = now.Add(lb.FlowMemory + 1)
	l.Keep(without, now)
	if got := l.Speakers(now).Booted; len(got) != 0 || len(l.boots.last) != 0 || held["a"] != 3 {
		t.Errorf("long after it was taken out: %v, %v; before: %v", got, l.boots.last, held)
	}
}
