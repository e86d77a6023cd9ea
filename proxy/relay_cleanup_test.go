package main

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// After proxy and relay were killed, cleanup cuts the flows that lead to the relay's closed port, and leaves all others
// alone, among 100,000 with LANDFALL_LONG=1. Another proxy on the node then serves the clients at the ports that they
// have.
func TestContract9CleanupCutsFlowsToAKilledRelay(t *testing.T) {
	t.Parallel()
	s, to := cleanupSite(t)
	others := seeds.Of(20_000, 100_000)
	fillFlows(t, s, others)
	straight := s.dialUDP(t, to[0])
	if _, err := askUDP(straight, time.Minute); err != nil {
		t.Error(err)
	}
	asked := s.leadToRelay(t, to)
	s.beAnotherProxy(t)
	s.node.Do(t, func() error { return cleanup(t.Context(), kernelParameters{log: slog.New(slog.DiscardHandler)}) })
	if led := s.countFlows(t, " sport=7484 "); led != 0 {
		t.Errorf("%d flows lead to the relay's port", led)
	}
	if left := s.countFlows(t, " dst=10.96.0.9 "); left != others {
		t.Errorf("%d flows of others are left, want %d", left, others)
	}
	if left := s.countFlows(t, fmt.Sprintf(" sport=%d ", straight.LocalAddr().(*net.UDPAddr).Port)); left != 1 {
		t.Errorf("%d flows are left that went straight to an endpoint, want 1", left)
	}
	for i, conn := range append(asked, straight) {
		var err error
		for range 3 { // the first packet may meet an ICMP error that has come before
			if _, err = askUDP(conn, 10*time.Second); err == nil {
				break
			}
		}
		if err != nil {
			t.Errorf("client %d: %s does not answer after cleanup: %v", i, conn.RemoteAddr(), err)
		}
	}
}

// As long as a relay has its port open, cleanup leaves its flows alone.
func TestCleanupLeavesFlowsOfALivingRelay(t *testing.T) {
	t.Parallel()
	s, to := cleanupSite(t)
	s.node.Do(t, func() error {
		for _, network := range []string{"udp4", "udp6"} {
			conn, err := net.ListenPacket(network, ":7484")
			if err != nil {
				return err
			}
			t.Cleanup(func() { conn.Close() })
		}
		return nil
	})
	s.leadToRelay(t, to)
	s.node.Do(t, cleanupNftables)
	if led := s.countFlows(t, " sport=7484 "); led != len(to) {
		t.Errorf("%d flows lead to the relay, want %d", led, len(to))
	}
}

// cleanupSite returns a node that relays UDP of a Service with two backends, and its frontends.
func cleanupSite(t *testing.T) (s relaySite, to []netip.AddrPort) {
	s = newRelaySite(t)
	// No flow shall end by itself, however busy the machine is.
	s.node.Run(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_udp_timeout=3600",
		"net.netfilter.nf_conntrack_udp_timeout_stream=3600")
	svc, endpoints := s.udpObjects(t)
	for i := range endpoints {
		endpoints[i].Endpoints = endpoints[i].Endpoints[:2]
	}
	s.write(t, plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true}))
	for _, addr := range append(svc.ClusterIPs, s.vips[lb.IPv4], s.vips[lb.IPv6]) {
		to = append(to, netip.AddrPortFrom(addr, 53))
	}
	return s, append(to, netip.MustParseAddrPort("10.0.0.1:30053"), netip.MustParseAddrPort("[fd00::1]:30053"))
}

// leadToRelay has a question of a client to each frontend led to the relay's port.
func (s relaySite) leadToRelay(t *testing.T, frontends []netip.AddrPort) (clients []net.Conn) {
	t.Helper()
	renew, _ := s.lease(t)
	for family, addr := range map[lb.Family]string{lb.IPv4: "10.0.0.1", lb.IPv6: "fd00::1"} {
		way, to := plan.RelayWay{Family: family, Protocol: lb.UDP}, netip.AddrPortFrom(netip.MustParseAddr(addr), 7484)
		if err := renew(way, to, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range frontends {
		conn := s.dialUDP(t, f)
		if answer, err := askUDP(conn, 100*time.Millisecond); err == nil {
			t.Errorf("%s answers %q", f, answer)
		}
		clients = append(clients, conn)
	}
	if led := s.countFlows(t, " sport=7484 "); led != len(frontends) {
		t.Fatalf("%d flows lead to the relay, want %d", led, len(frontends))
	}
	return clients
}

// beAnotherProxy writes rules that would lead the same frontends to the first backend, as kube-proxy's.
func (s relaySite) beAnotherProxy(t *testing.T) {
	t.Helper()
	for family, backend := range map[string]string{"ip": "10.0.1.2", "ip6": "[fd00:1::2]"} {
		s.node.Run(t, "nft", fmt.Sprintf("add table %[1]s other; add chain %[1]s other pre "+
			"{ type nat hook prerouting priority dstnat + 50; }; add rule %[1]s other pre "+
			"udp dport { 53, 30053 } dnat to %[2]s:8080", family, backend))
	}
}

// fillFlows puts flows of others into the node's table.
func fillFlows(t *testing.T, s relaySite, flows int) {
	t.Helper()
	var lines strings.Builder
	for i := range flows {
		fmt.Fprintf(&lines, "-A -p udp -s 172.%d.%d.%d --sport 4000 -d 10.96.0.9 --dport 53 -r 192.168.1.9 --reply-port-src 53 "+
			"-q 172.%[1]d.%[2]d.%[3]d --reply-port-dst 4000 -t 3600\n", 16+i>>16, i>>8&255, i&255)
	}
	file := filepath.Join(t.TempDir(), "flows")
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	s.node.Run(t, "conntrack", "-R", file)
}

// countFlows returns how many flows of UDP the node's table has with something in their description.
func (s relaySite) countFlows(t *testing.T, with string) (n int) {
	t.Helper()
	for _, family := range []string{"ipv4", "ipv6"} {
		for line := range strings.Lines(s.node.Run(t, "conntrack", "-L", "-p", "udp", "-f", family)) {
			if strings.HasPrefix(line, "udp ") && strings.Contains(line, with) {
				n++
			}
		}
	}
	return n
}

// Only flows of UDP to a relayed frontend are cut, and only where the node itself has nothing that answers.
func TestLeadsNowhere(t *testing.T) {
	at := netip.MustParseAddrPort
	node := []net.Addr{&net.IPNet{IP: net.IPv4(10, 0, 0, 1), Mask: net.CIDRMask(24, 32)}}
	cuts := leadsNowhere([]netip.AddrPort{at("198.51.100.1:53")}, node,
		func(a netip.AddrPort) bool { return a.Port() == 7484 })
	to, other, closed := at("198.51.100.1:53"), at("198.51.100.1:54"), at("10.0.0.1:7484")
	for name, tt := range map[string]struct {
		flow conntrack.Flow
		want bool
	}{
		"to the closed port":        {conntrack.Flow{Protocol: unix.IPPROTO_UDP, To: to, From: closed}, true},
		"of TCP":                    {conntrack.Flow{Protocol: unix.IPPROTO_TCP, To: to, From: closed}, false},
		"to what is not relayed":    {conntrack.Flow{Protocol: unix.IPPROTO_UDP, To: other, From: closed}, false},
		"to a port that is open":    {conntrack.Flow{Protocol: unix.IPPROTO_UDP, To: to, From: at("10.0.0.1:7485")}, false},
		"straight to an endpoint":   {conntrack.Flow{Protocol: unix.IPPROTO_UDP, To: to, From: at("10.0.1.2:7484")}, false},
		"to another node's address": {conntrack.Flow{Protocol: unix.IPPROTO_UDP, To: to, From: at("10.0.0.2:7484")}, false},
	} {
		if got := cuts(tt.flow); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
