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

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// variety returns Services with elements in every set, in both families.
func variety() map[lb.Key]Service {
	all := map[lb.Key]Service{}
	for i, tweak := range []func(*semantics, *Service){
		func(*semantics, *Service) {},
		func(c *semantics, s *Service) { c.service, s.AffinityTimeout = etpLocal, 90*time.Second },
		func(c *semantics, s *Service) { c.service, c.backends = etpLocal, twoHere },
		func(c *semantics, s *Service) { c.service, c.backends = itpLocal, onlyThere },
		func(c *semantics, s *Service) { c.service, c.backends = etpLocal, onlyThere },
		func(c *semantics, s *Service) { c.service = ranged },
		func(c *semantics, s *Service) { c.backends = []backend{} },
		func(c *semantics, s *Service) { s.Scheduler, s.AffinityTimeout = Maglev, 3*time.Hour },
		func(c *semantics, s *Service) { s.Scheduler, c.service, c.backends = RoundRobin, etpLocal, twoHere },
		func(c *semantics, s *Service) { s.Scheduler = SourceHash },
	} {
		key := lb.Key{Namespace: "test", Name: fmt.Sprint("service-", i)}
		s := Service{Service: plan.Service{Key: key}}
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			w := worldOf(family)
			c := semantics{}
			tweak(&c, &s)
			apart := func(a netip.Addr, by int) netip.Addr {
				b := a.AsSlice()
				b[len(b)-1] += byte(by)
				a, _ = netip.AddrFromSlice(b)
				return a
			}
			w.clusterIP = apart(w.clusterIP, i)
			w.vip, w.vip2, w.external = apart(w.vip, 50+3*i), apart(w.vip, 51+3*i), apart(w.vip, 52+3*i)
			p, _ := c.plan(w)
			for j := range p.Ports {
				for k := range p.Ports[j].Frontends {
					if f := &p.Ports[j].Frontends[k]; f.Kind == plan.NodePort {
						f.Port += uint16(i)
					}
				}
			}
			s.Ports = append(s.Ports, p.Ports...)
		}
		if i == 2 { // more backends than there is an exact draw for, and SCTP
			s.Ports[0].Backends.Cluster, s.Ports[2].Backends.Cluster = manyBackends(lb.IPv4, 6), manyBackends(lb.IPv6, 6)
			s.Ports[0].Backends.Local, s.Ports[2].Backends.Local = manyBackends(lb.IPv4, 5), manyBackends(lb.IPv6, 5)
			s.Ports[1].Protocol = lb.SCTP
		}
		all[key] = s
	}
	return all
}

func bothAddresses(c plan.Config) plan.Config {
	w4, w6 := worldOf(lb.IPv4), worldOf(lb.IPv6)
	c.NodePortAddresses = map[lb.Family][]netip.Addr{lb.IPv4: {w4.node, w4.node2}, lb.IPv6: {w6.node}}
	return c
}

// withoutIPv6Affinity leaves IPv6 to Services without session affinity. nft 1.0.6 prints the rule that remembers IPv6 clients, and
// aborts when it reads it, or any other such rule: it has no room for keys of more than 16 bytes in "update @map".
func withoutIPv6Affinity(services map[lb.Key]Service) map[lb.Key]Service {
	for key, s := range services {
		if s.AffinityTimeout != 0 {
			s.Service = s.Only(lb.IPv4)
			services[key] = s
		}
	}
	return services
}

// nft of Debian 12 prints our tables, reads them back where they are and where there are none, and what it makes of them is what
// they were.
func TestListingReadsBack(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.Configure(bothAddresses(seedConfig))
	a.settle(t, withoutIPv6Affinity(variety()))
	listing := ns.Run(t, "nft", "list", "ruleset")
	for _, want := range []string{
		"dnat ip to ip daddr . tcp dport . numgen random mod 2 offset 20000 map @tcp-backends", "192.168.1.2 . 8080", "fd00:10:0:1::2 . 8080",
		"10.96.0.5", "172.31.0.2", "tcp-affinity-90", "udp-affinity-10800",
	} {
		if !strings.Contains(listing, want) {
			t.Errorf("the listing lacks %q", want)
		}
	}
	for _, set := range plainSets {
		for _, family := range []string{"ip", "ip6"} {
			if out := ns.Run(t, "nft", "list", "set", family, TableName, set); !strings.Contains(out, "elements") {
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

// Rules for session affinity of IPv6 clients are printed.
func TestListingOfIPv6Affinity(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.settle(t, variety())
	want := "update @tcp-sticky { ct original ip6 saddr . ct original ip6 daddr . ct original proto-dst timeout 3h : ip6 daddr . tcp dport }"
	if out := ns.Run(t, "nft", "list", "ruleset"); !strings.Contains(out, want) {
		t.Errorf("the listing lacks %q", want)
	}
}
