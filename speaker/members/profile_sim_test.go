//go:build !race

// As in scale_test.go: the race detector's runtime may fail in the simulation.

package members

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestACrashIsFoundAsTheProfileSays has nodes crash on a network as slow as the profile is for. While all
// live, none loses another, and a crash is not found before a live node could have refuted it. It is found
// after about five intervals of probes, as the documentation says, and never much later.
func TestACrashIsFoundAsTheProfileSays(t *testing.T) {
	for name, c := range map[string]struct {
		profile Profile
		latency time.Duration // one way
	}{
		"lan": {LAN, 200 * time.Microsecond},
		"wan": {WAN, 100 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { crashes(t, c.profile, c.latency) })
		})
	}
}

func crashes(t *testing.T, profile Profile, latency time.Duration) {
	const nodes, times = 9, 9
	c := newSimCluster(nodes)
	c.profile, c.net.latency = profile, latency
	for _, n := range c.nodes {
		c.start(n)
	}
	defer c.end()
	together := func(n *simNode) bool { return n.sees(nodes - 1) }
	if took := c.all(time.Minute, together); took >= time.Minute {
		t.Fatal("they do not find one another")
	}
	// Whom gossip has lost for a moment, and whose kernel answers, is live all the same: a node that is back had found
	// others dead, and says so. See config.
	hasLost := func(n *simNode) bool {
		s := n.alive.Sight()
		return len(s.Live) != nodes || len(s.Dead) > 0
	}
	var found []time.Duration
	for turn := range times {
		for range 60 * 10 { // a minute
			time.Sleep(100 * time.Millisecond)
			for _, n := range c.nodes {
				if hasLost(n) {
					t.Fatalf("turn %d: all live, and %s has lost some: %+v", turn, n.name, n.alive.Sight())
				}
			}
		}
		lost := c.nodes[turn]
		time.Sleep(profile.ProbeInterval * time.Duration(turn) / times) // another phase each time
		c.crash(lost)
		first := c.any(time.Minute, hasLost)
		found = append(found, first+c.all(time.Minute, func(n *simNode) bool {
			return slices.Equal(n.alive.Sight().Dead, []string{lost.name})
		}))
		// A packet that was under way may have been answered, and its answer is lost.
		if least := profile.Unnoticed() - 2*latency; first < least {
			t.Errorf("a crash was found after %s, when a live node might still have refuted it until %s", first, least)
		}
		lost.stop()
		c.net.mu.Lock()
		delete(c.net.down, lost.addr)
		c.net.mu.Unlock()
		lost.gone = false
		c.start(lost)
		if took := c.all(time.Minute, together); took >= time.Minute {
			t.Fatalf("%s is back, and they do not find one another", lost.name)
		}
	}
	slices.Sort(found)
	t.Logf("crashes were found after %v", found)
	about := 5 * profile.ProbeInterval
	if half := found[times/2]; half > about+about/2 || found[times-1] > 3*about {
		t.Errorf("crashes were found after %v; want about %s", found, about)
	}
}

// any returns after which time something is so on a node whose machine is on, or most if it is not.
func (c *simCluster) any(most time.Duration, is func(n *simNode) bool) time.Duration {
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		took := time.Since(began)
		if took >= most || slices.ContainsFunc(c.nodes, func(n *simNode) bool { return !n.gone && is(n) }) {
			return took
		}
	}
}
