//go:build !race

// The race detector's runtime fails one of its own checks now and then, and ends the process, when so many goroutines
// come and go ("CHECK failed: tsan_rtl.cpp:346"). The other tests have it look at the same code.

package members

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// measured is what a part of a story took.
type measured struct {
	took time.Duration // simulated
	cpu  time.Duration // real, of all nodes together
	traffic
}

func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// measure does something that returns after which time it is done.
func (c *simCluster) measure(t *testing.T, what string, do func() time.Duration) measured {
	before, cpu := c.net.traffic(), cpuTime()
	m := measured{took: do()}
	m.cpu, m.traffic = cpuTime()-cpu, c.net.traffic().minus(before)
	n := len(c.nodes)
	t.Logf("| %s | %d | %.2f s | %.1f | %.1f KiB | %.1f | %.1f KiB | %.1f ms | %.1f | %d |", what, n, m.took.Seconds(),
		float64(m.packets)/float64(n), float64(m.bytes)/float64(n)/1024, float64(m.streams)/float64(n),
		float64(m.streamBytes)/float64(n)/1024, float64(m.cpu.Microseconds())/float64(n)/1000,
		float64(m.probes)/float64(n), m.lost)
	return m
}

// TestScale has a cluster start, serve new VIPs, lose a speaker and a node, and fall apart, and counts what
// its gossip sends: with LANDFALL_SCALE_NODES=300 and LANDFALL_SCALE_VIPS=50 as many as that.
func TestScale(t *testing.T) {
	size, vips := 24, 11
	if n, err := strconv.Atoi(os.Getenv("LANDFALL_SCALE_NODES")); err == nil {
		size = n
	}
	if n, err := strconv.Atoi(os.Getenv("LANDFALL_SCALE_VIPS")); err == nil {
		vips = n
	}
	synctest.Test(t, func(t *testing.T) { scale(t, size, vips) })
}

// atOnce is how many nodes start in the same moment; those of a larger cluster start one after another.
const atOnce = 300

func scale(t *testing.T, size, count int) {
	c := newSimCluster(size)
	defer c.end()
	var vips []netip.Addr
	for i := range count {
		vips = append(vips, address(i))
	}
	t.Log("| what | nodes | done after | packets | bytes | streams | bytes | CPU | probes | lost |  (each per node)")
	patience := 3*time.Minute + time.Duration(size)*time.Second // the nodes are rolled out one after the other
	within := func(what string, do func() time.Duration) measured {
		m := c.measure(t, what, do)
		if m.took >= patience || m.lost > 0 {
			t.Errorf("%s: it took %s, and %d packets found no room", what, m.took, m.lost)
		}
		return m
	}
	begun := within("start", func() time.Duration {
		began := time.Now()
		for _, n := range c.nodes {
			if c.start(n); size > atOnce {
				time.Sleep(10 * time.Millisecond)
			}
		}
		c.all(patience, func(n *simNode) bool { return n.sees(size - 1) })
		return time.Since(began)
	})
	if most := size * (joinsAtOnce + 2*seeksAtOnce); begun.streams > most {
		t.Errorf("%d nodes that start exchange states %d times, want at most %d", size, begun.streams, most)
	}
	within("5 s of settling", c.wait)
	within("5 s at rest", c.wait)
	within("one new VIP", func() time.Duration {
		c.say(100*time.Millisecond, vips[:1])
		return c.all(patience, func(n *simNode) bool { return n.hears(vips[:1]) })
	})
	within("5 s after it", c.wait)
	within(fmt.Sprintf("%d more VIPs, ten at a time", count-1), func() time.Duration {
		for from := 1; from < len(vips); from += 10 {
			c.say(100*time.Millisecond, vips[from:min(len(vips), from+10)])
		}
		return c.all(patience, func(n *simNode) bool { return n.hears(vips) })
	})
	within("5 s after them", c.wait)
	n := c.nodes[size-1]
	within("a speaker stops", func() time.Duration {
		n.stop()
		n.gone = true
		took := c.all(patience, func(n *simNode) bool { return n.sees(size - 2) })
		n.gone = false
		return took
	})
	again := within("it starts again", func() time.Duration {
		c.start(n)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 1) })
	})
	if again.streams > joinsAtOnce {
		t.Errorf("a speaker that starts beside %d others exchanges states %d times", size-1, again.streams)
	}
	within("5 s after that", c.wait)
	c.say(100*time.Millisecond, vips) // also the one that has started again
	for _, unavailable := range []int{1, max(2, size/10)} {
		rolled := within(fmt.Sprintf("a roll-out, %d at a time", unavailable), func() time.Duration {
			return c.rollOut(unavailable, patience, vips)
		})
		if most := size * (joinsAtOnce + 2*seeksAtOnce); rolled.streams > most {
			t.Errorf("%d nodes that start again, %d at a time, exchange states %d times, want at most %d", size, unavailable,
				rolled.streams, most)
		}
		within("5 s after it", c.wait)
	}
	within("a speaker crashes", func() time.Duration {
		c.kill(n)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 2) })
	})
	held := within("1 s in which its next one is waited for", func() time.Duration {
		time.Sleep(time.Second)
		return time.Second
	})
	if most := size * 6; held.probes > most || held.packets > size*30 {
		t.Errorf("while the kernel of a node answers whose speaker is waited for, %d nodes ask kernels %d times a second, "+
			"and send %d packets", size, held.probes, held.packets)
	}
	c.bury(n)
	within("it starts again", func() time.Duration {
		c.start(n)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 1) })
	})
	within("5 s after it", c.wait)
	within("a node crashes", func() time.Duration {
		c.crash(n)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 2) })
	})
	few := size / 3
	within("a third is cut off", func() time.Duration {
		c.part(few)
		return c.all(patience, func(n *simNode) bool {
			if n.addr.Less(c.nodes[few].addr) {
				return n.sees(few - 1)
			}
			return n.sees(size - few - 2)
		})
	})
	within("it is back", func() time.Duration {
		c.part(0)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 2) })
	})
}

// rollOut restarts the speakers of all nodes, some at a time: they stop, start half a second later and claim the VIPs,
// and the next ones follow when every node knows of it. It returns after which time all is done, or most if one step
// takes that long.
func (c *simCluster) rollOut(atOnce int, most time.Duration, vips []netip.Addr) time.Duration {
	began, claims := time.Now(), claimsOf(vips)
	for step := range slices.Chunk(c.nodes, atOnce) {
		var stopping sync.WaitGroup
		for _, n := range step {
			n.gone = true
			stopping.Go(n.stop)
		}
		stopping.Wait()
		time.Sleep(500 * time.Millisecond)
		for _, n := range step {
			c.start(n)
			n.gone = false
			n.Update(claims)
		}
		if c.all(most, func(n *simNode) bool { return n.sees(len(c.nodes)-1) && n.hears(vips) }) == most {
			return most
		}
	}
	return time.Since(began)
}
