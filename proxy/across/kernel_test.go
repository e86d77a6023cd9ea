package across

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// askSite is a node whose tunnel leads to nodes behind a router that do not answer.
func askSite(t testing.TB, nodes int) (line *Kernel, self netip.Addr, others []netip.Addr, ns *nstest.NS) {
	t.Helper()
	ns, router := nstest.New(t), nstest.New(t)
	nstest.Veth(t, ns, "eth0", "10.2.1.1/24", router, "eth0", "10.2.1.254/24")
	ns.Run(t, "ip", "route", "add", "default", "via", "10.2.1.254")
	self = netip.MustParseAddr("10.2.1.1")
	for i := range nodes {
		others = append(others, netip.MustParseAddr(fmt.Sprintf("10.3.%d.%d", i/200, i%200+1)))
	}
	ns.Do(t, func() error {
		kernel, err := tunnel.Open(tunnel.DefaultPort, lb.LeastMovedTTL, lb.HandedTTL)
		if err != nil {
			return err
		}
		defer kernel.Close()
		if _, err := kernel.Set(lb.IPv4, tunnel.Desired{Self: self, Nodes: others, Peers: others, MTU: 1500}); err != nil {
			return err
		}
		line, err = Open([]lb.Family{lb.IPv4})
		return err
	})
	t.Cleanup(line.Close)
	return line, self, others, ns
}

// BenchmarkAsk shows what a question to a node costs the one that asks, and what a look-up of the route does.
func BenchmarkAsk(b *testing.B) {
	line, self, nodes, _ := askSite(b, MaxNodes/2)
	for _, part := range []struct {
		name string
		do   func(node netip.Addr) error
	}{
		{"question", func(node netip.Addr) error { return line.Ask(self, node, Nonce{}) }},
		{"look-up", func(node netip.Addr) error { _, err := line.routes.Way(tunnel.Alias(node)); return err }},
	} {
		b.Run(part.name, func(b *testing.B) {
			before := cpu(b)
			for i := 0; b.Loop(); i++ {
				if err := part.do(nodes[i%len(nodes)]); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64((cpu(b)-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}

// cpu is the time that processors have spent on this program.
func cpu(b *testing.B) time.Duration {
	b.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		b.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// A way that the kernel is known to take is not looked up again, until it tells of a change that may concern it.
func TestWaysAreLookedUpAgainWhenTheyChange(t *testing.T) {
	line, self, nodes, ns := askSite(t, 3)
	want := func(what string, want error, known int) {
		t.Helper()
		for _, node := range nodes {
			if err := line.Ask(self, node, Nonce{}); !errors.Is(err, want) {
				t.Errorf("%s: ask %s: %v, want %v", what, node, err, want)
			}
		}
		if len(line.through) != known {
			t.Errorf("%s: the ways to %v are known, want %d", what, line.through, known)
		}
	}
	ip := func(args ...string) {
		t.Helper()
		ns.Run(t, "ip", args...)
	}
	want("at first", nil, 3)
	ip("link", "add", "pod", "type", "veth", "peer", "name", "peer")
	ip("link", "set", "pod", "up")
	ip("addr", "add", "10.9.0.1/24", "dev", "pod")
	ip("route", "add", "10.8.0.0/24", "via", "10.2.1.254")
	// Nothing leads there over no interface, and the other two are known as before.
	if _, err := line.leads(tunnel.Alias(nodes[0]), 0); err != nil || len(line.through) != 2 {
		t.Errorf("after changes elsewhere %v are known, %v", line.through, err)
	}
	ip("rule", "add", "priority", "5270", "table", "52")
	ip("route", "add", "default", "dev", "eth0", "table", "52")
	want("a rule ahead", errDiverted, 0)
	want("a rule ahead, later", errDiverted, 0)
	ip("rule", "del", "priority", "5270")
	want("the rule is gone", nil, 3)
	ip("link", "del", lb.TunnelName(lb.IPv4))
	want("the tunnel is gone", errNoTunnel, 3)
}
