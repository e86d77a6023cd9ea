//go:build !race

// As in scale_test.go: the race detector's runtime may fail in the simulation, here with a SIGSEGV.

package members

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestContract11ASideCutOffBuriesNobody cuts off nearly half of a cluster: no node of that side ever holds
// another one for dead, until gossip has lost so many that it sees no majority.
func TestContract11ASideCutOffBuriesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startedCluster(21)
		defer c.end()
		const side = 9
		c.part(side)
		for range 3000 { // half a minute
			for _, n := range c.nodes[:side] {
				if dead := n.alive.Sight().Dead; len(dead) > 0 {
					t.Fatalf("%s is cut off, and holds %v for dead", n.name, dead)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
		for _, n := range c.nodes[side:] {
			if dead := n.alive.Sight().Dead; len(dead) != side {
				t.Errorf("%s, one of the majority, holds %v for dead", n.name, dead)
			}
		}
	})
}

// A crash is found where packet filters drop all that is for kernels, as those who live answer gossip.
func TestACrashIsFoundBehindPacketFilters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startedCluster(21)
		defer c.end()
		c.filtered = true
		c.crash(c.nodes[3])
		took := c.all(time.Minute, func(n *simNode) bool { return len(n.alive.Sight().Dead) == 1 })
		t.Logf("after %s", took)
		if took >= 2*time.Second {
			t.Errorf("it took %s of simulated time", took)
		}
	})
}

// The path between two of four nodes is broken, and gossip goes over the others. A third one crashes: each that is
// left finds it.
func TestACrashIsFoundBesideABrokenPath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := startedCluster(4)
		defer c.end()
		c.net.mu.Lock()
		c.net.broken = map[[2]netip.Addr]bool{{c.nodes[1].addr, c.nodes[2].addr}: true}
		c.net.mu.Unlock()
		time.Sleep(time.Minute)
		c.crash(c.nodes[3])
		took := c.all(time.Minute, func(n *simNode) bool { return slices.Contains(n.alive.Sight().Dead, c.nodes[3].name) })
		t.Logf("after %s", took)
		for _, n := range c.nodes[:3] {
			if dead := n.alive.Sight().Dead; !slices.Equal(dead, []string{c.nodes[3].name}) {
				t.Errorf("%s takes %v for dead", n.name, dead)
			}
		}
	})
}

// startedCluster returns a cluster whose nodes have met.
func startedCluster(nodes int) *simCluster {
	c := newSimCluster(nodes)
	for _, n := range c.nodes {
		c.start(n)
	}
	c.all(time.Minute, func(n *simNode) bool { return n.sees(nodes - 1) })
	time.Sleep(5 * time.Second)
	return c
}
