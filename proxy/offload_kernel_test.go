package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// offloading returns the configuration that has rules offload. It skips the test where the kernel cannot, as one
// without CONFIG_NF_FLOW_TABLE: there landfall-vm runs it.
func offloading(t testing.TB) plan.Config {
	config := siteConfig()
	config.Offload, config.OffloadUDP = map[lb.Family]bool{lb.IPv4: true, lb.IPv6: true}, !lb.KeepsOffloaded(release())
	var lacks error
	nstest.New(t).Do(t, func() error {
		way, err := nftables.Dial()
		if err != nil {
			return err
		}
		defer way.Close()
		for family := range config.Offload {
			lacks = errors.Join(lacks, nftables.ProbeOffload(way, family))
		}
		return nil
	})
	if lacks != nil {
		t.Skip(lacks)
	}
	return config
}

// planWith plans the Service for a node as one that is not forwarded directly, with the pods of some nodes.
func (s directSite) planWith(i int, pods ...int) plan.Service {
	p := s.planFor(i)
	p.Direct, p.Handed, p.Senders = false, nil, nil
	for j := range p.Ports {
		other := func(addr netip.Addr) bool {
			return !slices.ContainsFunc(pods, func(pod int) bool {
				return addr == netip.MustParseAddr(fmt.Sprintf("10.1.%d.2", pod)) ||
					addr == netip.MustParseAddr(fmt.Sprintf("fd01:%d::2", pod))
			})
		}
		for _, list := range []*[]lb.Backend{&p.Ports[j].Backends.Cluster, &p.Ports[j].Backends.Local} {
			*list = slices.DeleteFunc(slices.Clone(*list), func(b lb.Backend) bool { return other(b.Addr.Addr()) })
		}
		p.Ports[j].Serving = slices.DeleteFunc(slices.Clone(p.Ports[j].Serving),
			func(at netip.AddrPort) bool { return other(at.Addr()) })
	}
	return p
}

// devices has the flowtables of a node take packets from its interfaces.
func (s directSite) devices(t testing.TB, i int, names ...string) (errs []error) {
	t.Helper()
	var tables *nftables.Flowtables
	s.nodes[i-1].Do(t, func() (err error) {
		tables, err = nftables.OpenFlowtables()
		return err
	})
	defer tables.Close()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		there, err := tables.Set(family, names)
		if !there {
			t.Errorf("%s: there is no flowtable", family)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// isOffloaded reports whether a node's conntrack shows that a flow of the client is in a flowtable.
func (s directSite) isOffloaded(t testing.TB, i int, f flow) bool {
	t.Helper()
	from := netip.MustParseAddrPort(f.conn.LocalAddr().String())
	family := map[bool]string{true: "ipv4", false: "ipv6"}[from.Addr().Is4()]
	listing := s.nodes[i-1].Run(t, "conntrack", "-L", "-f", family, "-p", f.conn.LocalAddr().Network(), "--orig-src",
		from.Addr().String(), "--orig-port-src", fmt.Sprint(from.Port()))
	return strings.Contains(listing, "[OFFLOAD]")
}

// until asks over a flow until something is so.
func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not after a minute: %s", what)
		}
	}
}

// forwarded counts what passes the chains of a node's forward hook.
func (s directSite) forwarded(t testing.TB, i int) func() string {
	s.nodes[i-1].Run(t, "nft", "add table inet seen; "+
		"add chain inet seen forward { type filter hook forward priority 0; }; "+
		"add rule inet seen forward meta l4proto { tcp, udp } counter")
	return func() string { return s.nodes[i-1].Run(t, "nft", "list", "table", "inet", "seen") }
}

// offloaded opens a flow through node 1 and has it offloaded.
func (s directSite) offloaded(t testing.TB, network string, vip netip.Addr) flow {
	t.Helper()
	f := s.open(t, network, vip)
	until(t, fmt.Sprint(network, " to ", vip, " is offloaded"), func() bool {
		f.ask(t)
		return s.isOffloaded(t, 1, f)
	})
	return f
}

// Established flows pass no chain of the forward hook, to a pod of the node and to one of another, and keep all else:
// each packet loses one of its TTL, and the end of a connection takes it out of the flowtable.
func TestOffloadedFlowsPassNoChain(t *testing.T) {
	t.Parallel()
	config := offloading(t)
	s := newDirectSite(t)
	s.through(t, 1)
	s.client.Run(t, "nft", "add table inet seen; "+
		"add chain inet seen input { type filter hook input priority 0; }; "+
		"add rule inet seen input ip ttl != { 62, 63, 255 } counter; "+
		"add rule inet seen input ip6 hoplimit != { 62, 63, 255 } counter")
	forwarded := s.forwarded(t, 1)
	networks := []string{"tcp", "udp"}
	if !config.OffloadUDP {
		networks = networks[:1]
	}
	for _, pod := range []int{1, 2} {
		s.programAs(t, 1, s.planWith(1, pod), config)
		if errs := s.devices(t, 1, "eth0", "pod"); errs != nil {
			t.Fatal(errs)
		}
		for family, vip := range s.vips {
			for _, network := range networks {
				f := s.offloaded(t, network, vip)
				before := forwarded()
				for range 20 {
					if who, _ := f.ask(t); who != fmt.Sprint(pod) {
						t.Fatalf("%s %s: pod %s answers, want %d", family, network, who, pod)
					}
				}
				if after := forwarded(); after != before {
					t.Errorf("%s %s to pod %d: chains see packets: before %s after %s", family, network, pod, before, after)
				}
				if network == "tcp" {
					f.conn.Close()
					until(t, "a closed connection is not offloaded", func() bool { return !s.isOffloaded(t, 1, f) })
				}
			}
		}
	}
	listing := s.client.Run(t, "nft", "list", "table", "inet", "seen")
	if strings.Count(listing, "counter packets 0 ") != 2 {
		t.Errorf("answers with another TTL: %s", listing)
	}
}

// The pods' bridge is a device like others, without its ports.
func TestOffloadThroughABridge(t *testing.T) {
	t.Parallel()
	config := offloading(t)
	s := newDirectSite(t)
	s.through(t, 1)
	node := s.nodes[0]
	node.Run(t, "ip", "link", "add", "cni0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
	node.Run(t, "ip", "addr", "flush", "dev", "pod")
	node.Run(t, "ip", "link", "set", "pod", "master", "cni0")
	node.Run(t, "ip", "link", "set", "cni0", "up")
	node.Run(t, "ip", "addr", "add", "10.1.1.1/24", "dev", "cni0")
	node.Run(t, "ip", "addr", "add", "fd01:1::1/64", "dev", "cni0", "nodad")
	s.programAs(t, 1, s.planWith(1, 1), config)
	s.devices(t, 1, "eth0", "cni0", "pod")
	forwarded := s.forwarded(t, 1)
	for family, vip := range s.vips {
		f := s.offloaded(t, "tcp", vip)
		before := forwarded()
		for range 20 {
			f.ask(t)
		}
		if after := forwarded(); after != before {
			t.Errorf("%s: chains see packets: before %s after %s", family, before, after)
		}
	}
}

// What is not a Service's, or goes through an interface that is no device of the flowtable, is not offloaded; nor is
// what is forwarded directly.
func TestOffloadLeavesOut(t *testing.T) {
	t.Parallel()
	config := offloading(t)
	s := newDirectSite(t)
	s.through(t, 1)
	not := func(what string, f flow) {
		t.Helper()
		for range 20 {
			f.ask(t)
		}
		if s.isOffloaded(t, 1, f) {
			t.Errorf("%s: %s is offloaded", what, f.conn.LocalAddr())
		}
	}
	s.programAs(t, 1, s.planWith(1, 1), config)
	s.devices(t, 1, "eth0")
	for _, vip := range s.vips {
		not("one device", s.open(t, "tcp", vip))
		not("one device", s.open(t, "udp", vip))
	}
	s.devices(t, 1, "eth0", "pod")
	s.offloaded(t, "tcp", s.vips[lb.IPv4])
	if !config.OffloadUDP {
		not("UDP", s.open(t, "udp", s.vips[lb.IPv4]))
	}
	s.client.Run(t, "ip", "route", "add", "10.1.1.0/24", "via", "10.0.0.1")
	s.nodes[0].Run(t, "nft", "add table ip theirs; add chain ip theirs pre { type nat hook prerouting priority -110; }; "+
		"add rule ip theirs pre ip daddr 192.0.2.77 tcp dport 80 dnat to 10.1.1.2:8080")
	s.client.Run(t, "ip", "route", "add", "192.0.2.77", "via", "10.0.0.1")
	not("another program's", s.open(t, "tcp", netip.MustParseAddr("192.0.2.77")))
	direct := s.planFor(1)
	for i := range direct.Ports {
		direct.Ports[i].Backends.Cluster = s.planWith(1, 1).Ports[i].Backends.Cluster
	}
	s.programAs(t, 1, direct, config)
	for _, vip := range s.vips {
		not("direct", s.open(t, "tcp", vip))
		not("direct", s.open(t, "udp", vip))
	}
}

// A flow of UDP whose backend ends is cut, as one that passes the chains: the client gets another pod.
func TestOffloadedUDPIsCut(t *testing.T) {
	t.Parallel()
	config := offloading(t)
	if !config.OffloadUDP {
		t.Skip("this kernel deletes no flow that is offloaded, so flows of UDP are not")
	}
	s := newDirectSite(t)
	s.through(t, 1)
	s.programAs(t, 1, s.planWith(1, 1), config)
	s.devices(t, 1, "eth0", "pod")
	flows := []flow{}
	for _, vip := range s.vips {
		flows = append(flows, s.offloaded(t, "udp", vip))
	}
	var table conntrack.Netlink
	s.nodes[0].Do(t, func() (err error) {
		table, err = conntrack.Open()
		return err
	})
	defer table.Close()
	cuts := conntrack.New(conntrack.Deps{Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Table: table,
		Local: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.0.0.1")}, nil }})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- cuts.Run(ctx) }()
	defer func() {
		cancel()
		<-done
	}()
	planned := s.planWith(1, 1)
	cuts.Begin(map[lb.Key]plan.Service{planned.Key: planned})
	until(t, "settled", cuts.Settled)
	for _, f := range flows {
		if pod, _ := f.ask(t); pod != "1" || !s.isOffloaded(t, 1, f) {
			t.Fatalf("%s is answered by %s, or not offloaded", f.conn.LocalAddr(), pod)
		}
	}
	planned = s.planWith(1, 2)
	s.programAs(t, 1, planned, config)
	cuts.Update(map[lb.Key]plan.Service{planned.Key: planned})
	for _, f := range flows {
		until(t, fmt.Sprint(f.conn.LocalAddr(), " gets the other pod"), func() bool {
			pod, _ := f.ask(t)
			return pod == "2"
		})
	}
}

// An address whose connections are offloaded moves to another node, which does not know them, and back.
func TestOffloadedConnectionsMove(t *testing.T) {
	t.Parallel()
	config := offloading(t)
	s := newDirectSite(t)
	for i := 1; i <= 3; i++ {
		s.programAs(t, i, s.planWith(i, 1, 2, 3), config)
		s.devices(t, i, "eth0", "pod")
		s.rescue(t, i)
	}
	s.through(t, 1)
	flows := map[flow]string{}
	for _, vip := range s.vips {
		for range 10 {
			f := s.offloaded(t, "tcp", vip)
			flows[f], _ = f.ask(t)
		}
	}
	for _, node := range []int{2, 3, 1} {
		s.through(t, node)
		for f, pod := range flows {
			for range 5 {
				if now, _ := f.ask(t); now != pod {
					t.Errorf("through node %d, %s is answered by pod %s, before by %s", node, f.conn.LocalAddr(), now, pod)
				}
			}
		}
	}
}

// Devices come and go, also those that never were, and switching it off leaves nothing, while connections go on.
func TestOffloadDevicesComeAndGo(t *testing.T) {
	t.Parallel()
	config := offloading(t)
	s := newDirectSite(t)
	s.through(t, 1)
	s.programAs(t, 1, s.planWith(1, 1, 2, 3), config)
	node := s.nodes[0]
	listed := func(want string) {
		t.Helper()
		for _, family := range []string{"ip", "ip6"} {
			table := strings.Join(strings.Fields(node.Run(t, "nft", "list", "flowtable", family, nftables.TableName,
				"established")), " ")
			set := node.Run(t, "nft", "list", "set", family, nftables.TableName, "offload-devices")
			wanted := func(name string) bool { return slices.Contains(strings.Fields(want), name) }
			for _, name := range []string{"eth0", "pod", "more"} {
				if strings.Contains(table, name) != wanted(name) || strings.Contains(set, `"`+name+`"`) != wanted(name) {
					t.Errorf("%s: %s %s, want %s", family, table, set, want)
				}
			}
		}
	}
	if errs := s.devices(t, 1, "eth0", "gone", "pod"); errs != nil {
		t.Errorf("of a device that is not there: %v", errs)
	}
	listed("eth0 pod")
	node.Run(t, "ip", "link", "add", "more", "type", "dummy")
	if errs := s.devices(t, 1, "eth0", "more", "pod"); errs != nil {
		t.Error(errs)
	}
	node.Run(t, "ip", "link", "del", "more")
	if errs := s.devices(t, 1, "eth0", "pod"); errs != nil {
		t.Error(errs)
	}
	listed("eth0 pod")
	f := s.offloaded(t, "tcp", s.vips[lb.IPv4])
	s.devices(t, 1, "eth0")
	listed("eth0")
	f.ask(t)
	s.devices(t, 1, "eth0", "pod")
	f = s.offloaded(t, "tcp", s.vips[lb.IPv6])
	s.program(t, 1, s.planWith(1, 1, 2, 3))
	if listing := node.Run(t, "nft", "list", "ruleset"); strings.Contains(listing, "established {") ||
		strings.Contains(listing, "offload") {
		t.Errorf("switched off: %s", listing)
	}
	f.ask(t)
	s.programAs(t, 1, s.planWith(1, 1, 2, 3), config)
	s.devices(t, 1, "eth0", "pod")
	s.offloaded(t, "tcp", s.vips[lb.IPv6])
	adds := 4 // VIPs and cluster IPs, of both families
	if config.OffloadUDP {
		adds *= 2
	}
	if listing := node.Run(t, "nft", "list", "ruleset"); strings.Count(listing, "flow add @established") != adds {
		t.Errorf("not %d rules that offload: %s", adds, listing)
	}
	node.Do(t, func() error {
		way, err := nftables.Dial()
		if err != nil {
			return err
		}
		defer way.Close()
		return nftables.Cleanup(way)
	})
	if listing := node.Run(t, "nft", "list", "ruleset"); strings.Contains(listing, nftables.TableName) {
		t.Errorf("cleaned up: %s", listing)
	}
}
