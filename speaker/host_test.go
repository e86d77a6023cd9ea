package main

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// TestHostLooks has a speaker look at its node once it knows enough.
func TestHostLooks(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178)
		time.Sleep(3 * time.Second)
		running := r.nodes[w177].speaker
		s := &speaker{self: running.self, from: running.from} // the other one goes on with its own
		sets := kubetest.NewTable[string, lb.DaemonSet]()
		sets.SetSynced(false)
		s.from.daemonSet = sets
		var seen map[netip.Addr][]plan.ConflictingHost
		var cut error
		answering := map[netip.Addr][]string{}
		h := host{speaker: s, port: 7947, parameters: t.TempDir(),
			conflicts:   func() map[netip.Addr][]plan.ConflictingHost { return seen },
			unreachable: func() error { return cut }, holds: running.heldBy,
			answering: func() map[netip.Addr][]string { return answering }, uplink: func() string { return "eth0" }}
		now := time.Now()
		set := func(name, parameter, value string) {
			folder := filepath.Join(h.parameters, name)
			if err := errors.Join(os.MkdirAll(folder, 0o700),
				os.WriteFile(filepath.Join(folder, parameter), []byte(value+"\n"), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		set("all", "arp_ignore", "0")
		look := func(want ...lb.Reason) {
			t.Helper()
			now = now.Add(100 * time.Second)
			found, known := h.look(now)
			if known != sets.Synced() || len(found) != len(want) {
				t.Fatalf("found %v, %v; want %v", found, known, want)
			}
			for i := range want {
				if found[i].Reason != want[i] {
					t.Errorf("found %v, want %v", found, want)
				}
			}
		}
		look()
		sets.SetSynced(true)
		ready := func(n int) { sets.Set("landfall-node", lb.DaemonSet{Stays: true, Ready: n}) }
		ready(2)
		look()
		look() // it has met the other
		met := s.from.liveness
		alone := plan.Speakers{Live: []string{w177}}
		s.from.liveness = sees{met, alone}
		look()
		look(lb.ReasonGossipBlocked)
		ready(1) // the other node is down, or no speaker is to run there
		look()
		look()
		ready(2)
		look() // for a moment
		look(lb.ReasonGossipBlocked)
		cut = errors.New("no route to host")
		look(lb.ReasonAPIServerUnreachable, lb.ReasonGossipBlocked) // who is ready now is not known
		cut = nil
		s.from.daemonSet = nil // nobody knows
		look()
		look()
		s.from.daemonSet = sets

		// It has met the other, and hears it no longer.
		s.from.liveness = sees{met, plan.Speakers{Live: alone.Live, Missing: []string{w178}}}
		look()
		look(lb.ReasonGossipBlocked)
		s.from.liveness = met
		look()
		cut, s.from.liveness = errors.New("no route to host"), sees{met, alone}
		look(lb.ReasonAPIServerUnreachable)
		look(lb.ReasonAPIServerUnreachable)
		look(lb.ReasonAPIServerUnreachable) // the other may have died since
		cut = nil
		// Of those that hear one another, the first two tell of a node that they do not hear.
		many := plan.Speakers{Live: []string{"a", "b", w177}, Missing: []string{w178},
			Quorum: plan.Quorum{Majority: true, Rank: 1}}
		ready(4)
		s.from.liveness = sees{met, many}
		look()
		look(lb.ReasonGossipBlocked)
		many.Rank = 2
		s.from.liveness = sees{met, many}
		look()
		look()
		ready(2)
		s.from.liveness = met
		node, _ := r.api.nodes.Get(s.self)
		node.Labels = labels.Set{plan.LabelExclude: ""}
		r.api.nodes.Set(s.self, node)
		look(lb.ReasonNodeExcluded)
		h.ignoreExclude = true
		look()
		seen = map[netip.Addr][]plan.ConflictingHost{netip.MustParseAddr("192.0.2.9"): {{Interface: "eth0", MAC: "02::9"}}}
		look(lb.ReasonAddressConflict)
		cut = errors.New("no route to host")
		look(lb.ReasonAPIServerUnreachable, lb.ReasonAddressConflict)

		seen, cut = nil, nil
		set("eth1", "rp_filter", "1")
		answering[netip.MustParseAddr("192.0.2.9")] = []string{"eth0", "eth1"}
		answering[netip.MustParseAddr("2001:db8::9")] = []string{"eth2"}
		look(lb.ReasonStrictReversePath)
		set("all", "rp_filter", "2") // the greater one holds
		look()
	})
}

// sees is liveness with what a speaker sees of the others.
type sees struct {
	diagnosis
	speakers plan.Speakers
}

func (s sees) Sight() plan.Sight { return plan.Sight{Speakers: s.speakers} }
