package members

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func simName(i int) string { return fmt.Sprintf("k8s-worker-%04d", i) }

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
	t.Logf("| %s | %d | %.2f s | %.1f | %.1f KiB | %.1f | %.1f KiB | %.1f ms | %d |", what, n, m.took.Seconds(),
		float64(m.packets)/float64(n), float64(m.bytes)/float64(n)/1024, float64(m.streams)/float64(n),
		float64(m.streamBytes)/float64(n)/1024, float64(m.cpu.Microseconds())/float64(n)/1000, m.lost)
	return m
}

func TestScale(t *testing.T) {
	size, vips := 24, 20
	if text := os.Getenv("LANDFALL_SCALE_NODES"); text != "" {
		size, _ = strconv.Atoi(text)
		vips, _ = strconv.Atoi(os.Getenv("LANDFALL_SCALE_VIPS"))
	}
	synctest.Test(t, func(t *testing.T) { story(t, size, vips) })
}

func story(t *testing.T, size, count int) {
	c := newSimCluster(size)
	defer c.end()
	var vips []netip.Addr
	for i := range count {
		vips = append(vips, address(i))
	}
	t.Log("| what | nodes | done after | packets | bytes | streams | bytes | CPU | lost |  (each per node)")
	const patience = 5 * time.Minute
	c.measure(t, "all start at once", func() time.Duration {
		for _, n := range c.nodes {
			c.start(n)
		}
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 1) })
	})
	c.measure(t, "10 s of settling", func() time.Duration { time.Sleep(10 * time.Second); return 10 * time.Second })
	c.measure(t, "10 s at rest", func() time.Duration { time.Sleep(10 * time.Second); return 10 * time.Second })
	c.measure(t, "one new VIP", func() time.Duration {
		c.say(100*time.Millisecond, vips[:1])
		return c.all(patience, func(n *simNode) bool { return n.hears(vips[:1]) })
	})
	time.Sleep(10 * time.Second)
	c.measure(t, fmt.Sprintf("%d more VIPs, ten at a time", count-1), func() time.Duration {
		for from := 1; from < len(vips); from += 10 {
			c.say(100*time.Millisecond, vips[from:min(len(vips), from+10)])
		}
		return c.all(patience, func(n *simNode) bool { return n.hears(vips) })
	})
	time.Sleep(20 * time.Second)
	n := c.nodes[size-1]
	c.measure(t, "a speaker stops", func() time.Duration {
		n.stop()
		n.gone = true
		took := c.all(patience, func(n *simNode) bool { return n.sees(size - 2) })
		n.gone = false
		return took
	})
	c.measure(t, "it starts again", func() time.Duration {
		c.start(n)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 1) })
	})
	c.measure(t, "settles", func() time.Duration { time.Sleep(10 * time.Second); return 10 * time.Second })
	c.measure(t, "a node crashes", func() time.Duration {
		c.crash(n)
		return c.all(patience, func(n *simNode) bool { return n.sees(size - 2) })
	})
}
