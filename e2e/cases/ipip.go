package cases

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// ThroughIPIP moves the remote pod to a node of its own, with a tunnel between the two as Calico's
// ipipMode Always has it: tunl0 with an address of the pod network, and routes to pods by the address
// of their node, on tunl0. It is for IPv4, and needs the kernel's module ipip, which gives each network
// namespace a tunl0. The function that it returns counts the packets that the tunnel has brought.
func (s *Site) ThroughIPIP(t *testing.T) (received func() int) {
	t.Helper()
	w, there, other := s.World, netip.MustParseAddr("172.31.0.5"), nstest.New(t)
	ours, theirs := netip.MustParseAddr("192.168.1.1"), netip.MustParseAddr("192.168.2.1") // of the tunnel
	s.Node.Run(t, "ip", "link", "set", "peer", "netns", other.Name)
	nstest.Veth(t, s.Node, "lan2", "", other, "eth0", Host(there).String())
	other.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	run := func(ns *nstest.NS, command string) {
		t.Helper()
		ns.Run(t, "ip", strings.Fields(command)...)
	}
	run(s.Node, "link set lan2 master eth0")
	run(s.Node, "route add "+there.String()+" dev eth0")
	run(s.Node, "addr add "+ours.String()+" dev tunl0")
	run(s.Node, "link set tunl0 mtu 1480 up")
	run(s.Node, "route add "+w.Remote.String()+" via "+there.String()+" dev tunl0 onlink")
	run(other, "link set peer up")
	run(other, "addr add 169.254.1.1 dev peer")
	run(other, "route add "+w.Remote.String()+" dev peer")
	run(other, "route add "+w.Node.String()+" dev eth0")
	run(other, "route add default via "+w.Node.String()+" dev eth0")
	run(other, "addr add "+theirs.String()+" dev tunl0")
	run(other, "link set tunl0 mtu 1480 up")
	for _, pod := range []netip.Addr{w.Pod, w.Local, w.Local2, ours} {
		run(other, "route add "+pod.String()+" via "+w.Node.String()+" dev tunl0 onlink")
	}
	return func() int {
		t.Helper()
		var links []struct {
			Stats64 struct{ RX struct{ Packets int } }
		}
		text := s.Node.Run(t, "ip", "-j", "-s", "link", "show", "tunl0")
		if err := json.Unmarshal([]byte(text), &links); err != nil || len(links) != 1 {
			t.Fatalf("%v: %s", err, text)
		}
		return links[0].Stats64.RX.Packets
	}
}

// Remote returns the cases whose packets end at the pod of another node, all or some of them.
func Remote(all []Case) []Case {
	return slices.DeleteFunc(slices.Clone(all), func(c Case) bool {
		return !slices.Contains(strings.Fields(c.Want), "remote")
	})
}
