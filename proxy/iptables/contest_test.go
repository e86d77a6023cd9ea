package iptables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// A frontend that several Services ask for leads to the one that comes first, whatever their names
// and their order.
func TestContract11ContestsThroughTheRules(t *testing.T) {
	for _, c := range suite.Contests() {
		t.Run(c.Name, func(t *testing.T) {
			r := renderer{plan.Config{MasqueradeBit: 14, LoopbackNodePorts: true}, c.Family}
			var all []contribution
			for _, s := range c.Plans {
				all = append(all, r.service(s))
			}
			walk := walker{t: t, hooks: r.hooks(), rules: r.ruleset(all), local: []netip.Addr{c.Own}}
			client := netip.MustParseAddr("203.0.113.7")
			if c.Family == lb.IPv6 {
				client = netip.MustParseAddr("2001:db8:7::7")
			}
			ends, _ := walk.fate(packet{src: netip.AddrPortFrom(client, 40000), dst: c.To, in: "eth0", protocol: c.Protocol})
			ends = slices.DeleteFunc(ends, func(end string) bool { return end == "none" || end == "drop" || end == "reject" })
			want := []string{c.End}
			if c.End == "" {
				want = []string{}
			}
			if !slices.Equal(ends, want) {
				t.Errorf("ends at %v, want %v", ends, want)
			}
		})
	}
}

// A tenant chooses the last bits of its external IPs, and so which short chain they are in. Connections to VIPs and
// cluster IPs do not meet their rules, and none that is served meets those that refuse.
func TestContract11ExternalIPsLengthenNoOthersWay(t *testing.T) {
	tenant := func(name, clusterIP string, change func(*lb.Service)) plan.Service {
		s := lb.Service{Key: lb.Key{Namespace: "test", Name: name}, Type: lb.LoadBalancer,
			ClusterIPs: []netip.Addr{addr(clusterIP)}, Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
			ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster}
		change(&s)
		at := endpoints(s.Key, "", lb.TCP, 8080, map[string][]string{"here": {"10.1.0.1"}})
		if name == "refused" {
			at = nil
		}
		return plan.New(s, at, plan.Node{Name: "here"})
	}
	listing := func(s *lb.Service) {
		for i := range 100 {
			s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{1, 0, byte(i), 1}))
		}
	}
	kernel := newFakeKernel()
	a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
	a.Set(plans(tenant("many", "10.96.0.2", listing), tenant("refused", "10.96.0.3", listing),
		tenant("web", "10.96.0.1", func(s *lb.Service) { s.Ingress = []lb.Ingress{{Addr: addr("192.0.2.1")}} })))
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	nat := kernel.tables["nat"]
	if n := len(nat["LF-SERVICES-01"]); n != 2 { // web's cluster IP and VIP
		t.Errorf("%d rules at addresses that end in these bits", n)
	}
	jump := func(chain string) int {
		return slices.IndexFunc(nat["LF-SERVICES"], func(r string) bool { return target(r) == chain })
	}
	if first, then := jump("LF-SERVICES-01"), jump("LF-SERVICES-EXT-01"); first < 0 || then < first {
		t.Errorf("the jump at %d, and that to external IPs at %d, of %q", first, then, nat["LF-SERVICES"])
	}
	if refusals := kernel.tables["filter"]["LF-EXTERNAL-SERVICES"]; len(refusals) == 0 ||
		!strings.Contains(refusals[0], "--ctstate DNAT") || target(refusals[0]) != "RETURN" {
		t.Errorf("what is served goes by no refusal: %q", refusals)
	}
}
