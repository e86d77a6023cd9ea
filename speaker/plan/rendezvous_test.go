package plan

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"
)

func vips(n int, first string) []netip.Addr {
	var all []netip.Addr
	for a := netip.MustParseAddr(first); len(all) < n; a = a.Next() {
		all = append(all, a)
	}
	return all
}

func names(format string, n, first int) []string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf(format, first+i))
	}
	return all
}

// The balance of rendezvous hashing is that of chance: 1,000 VIPs over 9 nodes are 111 each, give
// or take 10.
func TestRendezvousBalance(t *testing.T) {
	addresses := vips(1000, "172.26.240.0")
	nodes := names("k8s-worker-%d", 9, 177)
	won := map[string]int{}
	for _, a := range addresses {
		won[Winner(a, nodes)]++
	}
	even := float64(len(addresses)) / float64(len(nodes))
	for _, n := range nodes {
		if off := math.Abs(float64(won[n])-even) / even; off > 0.2 {
			t.Errorf("%s has %d of %d VIPs: %.0f %% from even", n, won[n], len(addresses), 100*off)
		}
	}
}

// Over many sets of names and addresses the spread is what a fair draw gives: a weak hash would
// show as a higher chi-square.
func TestRendezvousIsFair(t *testing.T) {
	const sets, nodes, addresses = 100, 9, 1000
	sum := 0.0
	for set := range sets {
		won := map[string]int{}
		all := names(fmt.Sprintf("rack%d-node-%%d.example.com", set), nodes, 0)
		for _, a := range vips(addresses, fmt.Sprintf("10.%d.0.0", set)) {
			won[Winner(a, all)]++
		}
		even := float64(addresses) / nodes
		for _, n := range all {
			sum += (float64(won[n]) - even) * (float64(won[n]) - even) / even
		}
	}
	// The mean of chi-square is its degrees of freedom, here 8, with a deviation of 4 for one set and
	// 0.4 for the mean of 100.
	if mean := sum / sets; mean < 6.5 || mean > 9.5 {
		t.Errorf("mean chi-square is %.2f, want about %d", mean, nodes-1)
	}
}

func TestRendezvousMovesOnlyWhatItMust(t *testing.T) {
	nodes := names("node-%d", 9, 0)
	for _, a := range vips(1000, "192.0.2.0") {
		before := Winner(a, nodes)
		for i, lost := range nodes {
			rest := slices.Delete(slices.Clone(nodes), i, i+1)
			if after := Winner(a, rest); after != before && lost != before {
				t.Fatalf("%s moved from %s to %s as %s went", a, before, after, lost)
			}
		}
		if after := Winner(a, append(slices.Clone(nodes), "newcomer")); after != before && after != "newcomer" {
			t.Fatalf("%s moved from %s to %s as a newcomer came", a, before, after)
		}
	}
}

func TestRendezvousDoesNotDependOnOrder(t *testing.T) {
	nodes := names("node-%d", 5, 0)
	reversed := slices.Clone(nodes)
	slices.Reverse(reversed)
	for _, a := range vips(100, "2001:db8::1") {
		if x, y := Winner(a, nodes), Winner(a, append(reversed, reversed...)); x != y {
			t.Fatalf("%s: %s or %s", a, x, y)
		}
	}
	if w := Winner(netip.MustParseAddr("192.0.2.1"), nil); w != "" {
		t.Errorf("%q wins among nobody", w)
	}
}

// Nodes of two versions share a cluster during an upgrade, so the weights are part of the protocol.
func TestRendezvousWeightsAreFixed(t *testing.T) {
	for _, c := range []struct {
		vip, node string
		want      uint64
	}{
		{"172.26.236.180", "k8s-worker-177", 0x1e74e3d1bee5c31c},
		{"172.26.236.180", "k8s-worker-178", 0xe4b6aeaaa2081541},
		{"2001:db8::1", "k8s-worker-178", 0xd950a0f0ee381f06},
	} {
		if got := weight(netip.MustParseAddr(c.vip), c.node); got != c.want {
			t.Errorf("weight of %s on %s is %#x, want %#x", c.vip, c.node, got, c.want)
		}
	}
}

func TestElect(t *testing.T) {
	nodes := []string{"n1", "n2", "n3"}
	winner := Winner(vip, nodes)
	for _, c := range []struct {
		name       string
		candidates []Candidate
		want       string
	}{
		{"nobody", nil, ""},
		{"the winner", []Candidate{{Node: "n1"}, {Node: "n2"}, {Node: "n3"}}, winner},
		{"one that answers stays", []Candidate{{Node: "n1", Answering: true}, {Node: "n2"}, {Node: "n3"}}, "n1"},
		{"of all that answer the winner", []Candidate{{Node: "n1", Answering: true}, {Node: "n2", Answering: true},
			{Node: "n3", Answering: true}}, winner},
		{"the heaviest takes over", []Candidate{{Node: "n1", Answering: true}, {Node: "n2"}, {Node: "n3", Weight: 1}}, "n3"},
		{"of the heaviest, the one that answers",
			[]Candidate{{Node: "n1", Weight: 5}, {Node: "n2", Weight: 5, Answering: true},
				{Node: "n3", Weight: 4, Answering: true}}, "n2"},
		{"of those that answer, one that was with the majority",
			[]Candidate{{Node: "n1", Answering: true, Parted: true}, {Node: "n2", Answering: true}, {Node: "n3"}}, "n2"},
		{"one that was not is better than none",
			[]Candidate{{Node: "n1"}, {Node: "n2"}, {Node: "n3", Answering: true, Parted: true}}, "n3"},
	} {
		reversed := slices.Clone(c.candidates)
		slices.Reverse(reversed)
		for _, candidates := range [][]Candidate{c.candidates, reversed} {
			if got := elect(vip, candidates); got != c.want {
				t.Errorf("%s: %s, want %s", c.name, got, c.want)
			}
		}
	}
}
