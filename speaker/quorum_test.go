package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/partition"
)

// part separates one node from the others, both ways.
func (r *rig) part(apart string) {
	for name, n := range r.nodes {
		n.set(func(n *fakeNode) {
			n.sees = func(other string) bool { return (other == apart) == (name == apart) }
		})
	}
	r.tellAll(nil)
	synctest.Wait()
}

func (r *rig) join() {
	for _, n := range r.nodes {
		n.set(func(n *fakeNode) { n.sees = nil })
	}
	r.tellAll(nil)
	synctest.Wait()
}

func TestMinorityYields(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute) // what it has just taken, it would give up
		order := ranked(vip1)
		apart := r.nodes[order[0]]
		apart.set(func(n *fakeNode) { n.apiless = true })
		r.part(order[0])
		// It cannot know better: two answer, and both forward.
		r.wantAnswers("while the minority does not reach the API server", vip1, sortedNames(order[0], order[1])...)

		apart.set(func(n *fakeNode) { n.apiless = false })
		r.tellAll(nil)
		synctest.Wait()
		r.wantAnswers("when it hears of the majority", vip1, order[1])
		if c, ok := apart.reported(nginx); ok {
			t.Errorf("who has yielded reports %+v", c)
		}

		time.Sleep(time.Minute) // in which nothing happens
		r.join()
		if d := apart.snapshot()[0]; d.Refusal == nil || d.Refusal.Reason != lb.ReasonYielded {
			t.Error("it does not wait for what the others have to say")
		}
		r.wantAnswers("when all see one another", vip1, order[1])
		time.Sleep(partition.Reunion)
		synctest.Wait()
		r.wantAnswers("after a while", vip1, order[1])
		if d := apart.snapshot()[0]; d.Refusal != nil {
			t.Errorf("%+v", d.Refusal)
		}
	})
}

// Without an API server to tell them, two answer; when they meet again the one goes on that was
// with the majority.
func TestHealWithoutAPIServer(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute) // what it has just taken, it would give up
		order := ranked(vip1)
		for _, n := range r.nodes {
			n.set(func(n *fakeNode) { n.apiless = true })
		}
		r.part(order[0])
		if got := r.wire.who(vip1); len(got) != 2 {
			t.Fatalf("%v answer", got)
		}
		time.Sleep(time.Minute) // in which nothing happens
		r.wire.watch(vip1)
		r.join()
		r.wantAnswers("when all see one another", vip1, order[1])
		time.Sleep(partition.Reunion)
		synctest.Wait()
		r.wantAnswers("after a while", vip1, order[1])
		if claim, ok := r.nodes[order[1]].claim(vip1); !ok || claim.Parted {
			t.Errorf("it says %+v", claim)
		}
		if least := r.wire.least[vip1]; least < 1 {
			t.Error("for a moment nobody answered")
		}
	})
}

// A node whose gossip is cut waits for the others longer than they wait for it: it has found them
// lost later. What it answers for it does not claim back from its heir then. It hears the heir
// announce it, and hands the heir what it does not know.
func TestContract11ANodeThatWaitsForAllClaimsNothingBack(t *testing.T) { claimsNothingBack(t, true) }

// With --restart-hold=0s nobody waits for anybody: the node has lost the others at once, and does
// not claim its address back either.
func TestContract11WithoutAHoldNothingIsClaimedBack(t *testing.T) { claimsNothingBack(t, false) }

func claimsNothingBack(t *testing.T, waits bool) {
	t.Helper()
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(time.Minute)
		order := ranked(vip1)
		apart := r.nodes[order[0]]
		owned := func() bool {
			apart.mu.Lock()
			defer apart.mu.Unlock()
			return apart.owned[vip1]
		}
		if !owned() {
			t.Error("it does not own its address")
		}
		apart.set(func(n *fakeNode) { n.waits, n.unheard, n.apiless = waits, true, !waits })
		r.part(order[0])
		if seen := apart.rooms.partition.Speakers(); seen.Majority != waits || !seen.Alone {
			t.Fatalf("it sees %+v", seen)
		}
		r.wantAnswers("when the others wait no more", vip1, sortedNames(order[0], order[1])...)
		heir, _ := r.api.nodes.Get(order[1])
		apart.set(func(n *fakeNode) { n.rivals = map[netip.Addr]string{vip1: order[1]} })
		apart.runner.Poke()
		synctest.Wait()
		apart.mu.Lock()
		previous := apart.update.Previous[vip1]
		apart.mu.Unlock()
		if owned() || !slices.Equal(previous, heir.Addresses) {
			t.Errorf("it claims its address back: %v; it asks %v for connections, want %v", owned(), previous, heir.Addresses)
		}
	})
}

// What the majority cannot deliver, the minority goes on with.
func TestMinorityKeepsWhatNobodyElseServes(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		for _, name := range order[1:] {
			r.nodes[name].deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1})
		}
		r.part(order[0])
		r.wantAnswers("a Local Service with its pod on the lonely node", vip1, order[0])
	})
}

// Without a majority that says so, those who are left go on: most of the nodes may really be gone.
func TestLastNodeGoesOn(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		r.die(order[0])
		r.die(order[1])
		// What the two said while they were a majority counts no more.
		r.leaseMu.Lock()
		r.lease = nil
		r.leaseMu.Unlock()
		r.tellAll(nil)
		synctest.Wait()
		r.wantAnswers("the last node", vip1, order[2])
	})
}

func TestMissingNodesAreNamed(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		r.crash(order[0])
		heir := r.nodes[order[1]]
		st := heir.whole(t)
		if len(st.Members.Missing) != 1 || st.Members.Missing[0] != order[0] || !st.Members.Majority {
			t.Errorf("members %+v", st.Members)
		}
		for _, w := range st.VIPs[0].Nodes {
			if want := map[string]lb.Reason{order[0]: lb.ReasonMissing, order[1]: lb.ReasonAnnounced,
				order[2]: lb.ReasonNotOwner}[w.Node]; w.Reason != want {
				t.Errorf("%s: %s, want %s", w.Node, w.Reason, want)
			}
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(newCollector(heir.speaker))
		want := `# HELP landfall_speaker_majority 1 while this node sees a majority of the speakers that it has met.
# TYPE landfall_speaker_majority gauge
landfall_speaker_majority 1
# HELP landfall_speaker_members_missing Nodes whose speaker disappeared without leaving.
# TYPE landfall_speaker_members_missing gauge
landfall_speaker_members_missing 1
# HELP landfall_speaker_vip_reason 1 for each VIP and why this node does or does not announce it.
# TYPE landfall_speaker_vip_reason gauge
landfall_speaker_vip_reason{reason="Announced",vip="172.26.236.180"} 1
`
		names := []string{"landfall_speaker_majority", "landfall_speaker_members_missing", "landfall_speaker_vip_reason"}
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), names...); err != nil {
			t.Error(err)
		}
	})
}
