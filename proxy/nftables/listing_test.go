package nftables

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// variety returns Services with elements in every set, in both families.
func variety() map[lb.Key]plan.Service {
	all := map[lb.Key]plan.Service{}
	for i, tweak := range []func(*cases.Case, *plan.Service){
		func(*cases.Case, *plan.Service) {},
		func(c *cases.Case, s *plan.Service) { c.Service, s.AffinityTimeout = etpLocal, 90*time.Second },
		func(c *cases.Case, s *plan.Service) { c.Service, c.Backends = etpLocal, twoHere },
		func(c *cases.Case, s *plan.Service) { c.Service, c.Backends = itpLocal, onlyThere },
		func(c *cases.Case, s *plan.Service) { c.Service, c.Backends = etpLocal, onlyThere },
		func(c *cases.Case, s *plan.Service) { c.Service = ranged },
		func(c *cases.Case, s *plan.Service) { c.Backends = []cases.Backend{} },
		func(c *cases.Case, s *plan.Service) { s.Scheduler, s.AffinityTimeout = plan.Maglev, 3*time.Hour },
		func(c *cases.Case, s *plan.Service) {
			s.Scheduler, c.Service, c.Backends = plan.RoundRobin, etpLocal, twoHere
		},
		func(c *cases.Case, s *plan.Service) { s.Scheduler = plan.SourceHash },
		func(c *cases.Case, s *plan.Service) {},
		func(c *cases.Case, s *plan.Service) { c.Service, c.Backends = passed, onlyThere },
		func(c *cases.Case, s *plan.Service) { s.Scheduler, s.Direct = plan.Maglev, true },
		func(c *cases.Case, s *plan.Service) { s.AffinityTimeout = 90 * time.Second },
	} {
		key := lb.Key{Namespace: "test", Name: fmt.Sprint("service-", i)}
		s := plan.Service{Key: key}
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			w := cases.WorldOf(family)
			c := cases.Case{}
			tweak(&c, &s)
			apart := func(a netip.Addr, by int) netip.Addr {
				b := a.AsSlice()
				b[len(b)-1] += byte(by)
				a, _ = netip.AddrFromSlice(b)
				return a
			}
			w.ClusterIP = apart(w.ClusterIP, i)
			w.VIP, w.VIP2, w.External = apart(w.VIP, 50+3*i), apart(w.VIP, 51+3*i), apart(w.VIP, 52+3*i)
			p, _ := c.Plan(w)
			for j := range p.Ports {
				for k := range p.Ports[j].Frontends {
					if f := &p.Ports[j].Frontends[k]; f.Kind == plan.NodePort {
						f.Port += uint16(i)
					}
				}
			}
			s.Ports, s.Sole = append(s.Ports, p.Ports...), append(s.Sole, p.VIPs...)
		}
		if i == 2 { // more backends than there is an exact draw for
			s.Ports[0].Backends.Cluster, s.Ports[3].Backends.Cluster = manyBackends(lb.IPv4, 6), manyBackends(lb.IPv6, 6)
			s.Ports[0].Backends.Local, s.Ports[3].Backends.Local = manyBackends(lb.IPv4, 5), manyBackends(lb.IPv6, 5)
		}
		if i == 10 || i == 13 {
			differ(&s)
		}
		if s.Relay = i == 0; s.Relay {
			for j := range s.Ports {
				s.Ports[j].Relay = s.Ports[j].Protocol != lb.SCTP
			}
		}
		if s.Direct {
			s.Handed, s.Senders = handedTo(s), []lb.MAC{{2, 0, 0, 0, 0, 1}}
		}
		all[key] = s
	}
	return all
}

// handedTo has packets for each endpoint elsewhere handed to a node at the next address.
func handedTo(s plan.Service) map[netip.Addr]netip.Addr {
	handed := map[netip.Addr]netip.Addr{}
	for _, p := range s.Ports {
		for _, b := range p.Backends.Cluster {
			if addr := b.Addr.Addr(); !b.Local {
				handed[addr] = addr.Next()
			}
		}
	}
	return handed
}

func bothAddresses(c plan.Config) plan.Config {
	w4, w6 := cases.WorldOf(lb.IPv4), cases.WorldOf(lb.IPv6)
	c.NodePortAddresses = map[lb.Family][]netip.Addr{lb.IPv4: {w4.Node, w4.Node2}, lb.IPv6: {w6.Node}}
	return c
}

// nft of Debian 12 prints our tables, reads them back where they are and where there are none, and
// what it makes of them is what they were.
func TestListingReadsBack(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.Configure(bothAddresses(seedConfig))
	a.settle(t, variety())
	listing := ns.Run(t, "nft", "list", "ruleset")
	for _, want := range []string{
		"dnat to meta priority . numgen random mod 2 offset 20000 map @backends:ip daddr . meta l4proto . tcp dport map " +
			"@ports",
		"dnat ip6 to meta priority . numgen random mod 2 offset 20000 map @udp-backends",
		"20000 : 192.168.1.2", "20000 : fd00:10:0:1::2",
		"ip daddr 10.96.0.0/12 fib daddr type != local drop", "ip6 daddr fd00:10:96::/112 fib daddr type != local drop",
		"10.96.0.44", "172.31.0.2", "set remember-90 {", "set remember-10800 {",
		"meta priority . ip saddr @source-ranges-32 return", "meta priority . ip6 saddr @source-ranges-128 return",
		"meta priority . ip saddr & 255.255.255.0 @source-ranges-24 return", "@source-ranges-120 return",
		"ct status assured,dnat / assured,dnat ct label ! 76 ct label set 76 jump affinity",
		"update @" + stickyMap + " { meta priority . jhash ct original ip saddr mod 262144 seed 0x4c46 offset 262144 " +
			"timeout 3h " +
			": ct reply ip saddr }",
		"update @" + stickyMap + " { meta priority . jhash ct original ip6 saddr mod 262144 seed 0x4c46 offset 262144 " +
			"timeout 3h : ct reply ip6 saddr }",
		"ip6 daddr set meta priority . jhash ip6 saddr mod 262144 seed 0x4c46 offset 262144 map @" + stickyMap +
			" jump known",
		"meta l4proto tcp meta priority . ip daddr @affinity dnat to ip daddr:ct original ip daddr . meta l4proto . tcp " +
			"dport map @ports",
		"meta l4proto udp dnat to ip6 daddr:meta priority . ip6 daddr map @affinity-ports",
		"ip daddr set ct original ip daddr",
		"ip daddr . meta l4proto . tcp dport @relayed fib saddr type != local dnat ip to meta l4proto map @relay",
		"ip daddr . meta l4proto . udp dport @relayed fib saddr type != local jump relay-udp",
		"meta priority set ip daddr . meta l4proto . udp dport map @relay-owners update @relay-shares { meta priority " +
			"timeout 10s limit rate 500/second burst 126 packets } limit rate 1000/second burst 251 packets dnat ip to meta l4proto " +
			"map @relay",
		"meta l4proto @relay-leased counter packets 0 bytes 0",
		"meta l4proto . udp dport @relay-ports ct state new ct original ip daddr . meta l4proto . ct original proto-dst != " +
			"@relayed counter packets 0 bytes 0 drop",
		"ip6 daddr . meta l4proto . tcp dport @relayed fib saddr type != local dnat ip6 to meta l4proto map @relay",
		"ip6 daddr . meta l4proto . udp dport @relayed fib saddr type != local jump relay-udp",
		"meta l4proto tcp ip ttl set 219 meta priority set none dup to meta priority . jhash ip saddr . tcp sport mod 1021 seed 0x4c46 offset " +
			"3010210000 map @handed drop",
		"meta l4proto udp ip6 hoplimit set 219 meta priority set none dup to meta priority . jhash ip6 saddr . udp sport mod 1021",
		"delete @" + stickyMap + " { meta priority . jhash ip saddr mod 262144 seed 0x4c46 offset 262144 : ip daddr }",
	} {
		if !strings.Contains(listing, want) {
			t.Errorf("the listing lacks %q", want)
		}
	}
	for id, set := range setNames {
		if setID(id).isNumbered() || setID(id) == setMixedSCTP {
			continue
		}
		for _, family := range []string{"ip", "ip6"} {
			kind := "set"
			if setID(id).isMap() {
				kind = "map"
			}
			if out := ns.Run(t, "nft", "list", kind, family, TableName, set); !strings.Contains(out, "elements") {
				t.Errorf("no Service brings an element of %s %s to the test", family, set)
			}
		}
	}
	dump := filepath.Join(t.TempDir(), "dump.nft")
	if err := os.WriteFile(dump, []byte(listing), 0o600); err != nil {
		t.Fatal(err)
	}
	ns.Run(t, "nft", "-c", "-f", dump)
	ns.Run(t, "nft", "-c", "add rule ip landfall forward accept")
	other := nstest.New(t)
	other.Run(t, "nft", "-c", "-f", dump)
	other.Run(t, "nft", "-f", dump)
	if d := cmp.Diff(listing, other.Run(t, "nft", "list", "ruleset")); d != "" {
		t.Errorf("read back it is something else (-was +is):\n%s", d)
	}
}
