package plan

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Contract clause 10: a Service that is too large says so, and how large it may be.
func TestContract10TooLarge(t *testing.T) {
	desired := New(service(), slice("1 here"), here)
	failure := errors.Join(TooLarge{Elements: 200_000, Limit: 131_072})
	d := Report(desired, Service{Key: web}, failure, Path{})[0]
	if d.Refusal == nil || d.Refusal.Reason != lb.ReasonNotProgrammed ||
		!strings.HasPrefix(d.Refusal.Message, "the Service is too large: ") ||
		!strings.Contains(d.Refusal.Message, "200000") || !strings.Contains(d.Refusal.Message, "131072") {
		t.Errorf("refusal %+v", d.Refusal)
	}
}

// Source ranges that are left out admit nobody, also if they are all of a family.
func TestSourceRangesLeftOutAdmitNobody(t *testing.T) {
	ranges := make([]netip.Prefix, maxSources, maxSources+1)
	for i := range ranges {
		ranges[i] = netip.PrefixFrom(netip.AddrFrom4([4]byte{13, 0, byte(i >> 8), byte(i)}), 32)
	}
	for last, want := range map[string]string{"2001:db8::/32": "[::/128]", "198.51.100.0/24": "everybody"} {
		svc := service(func(s *lb.Service) {
			s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr("fd00::1"))
			s.Ingress = append(s.Ingress, lb.Ingress{Addr: netip.MustParseAddr("2001:db8::1")})
			s.SourceRanges = append(ranges, netip.MustParsePrefix(last))
		})
		for _, p := range New(svc, nil, Node{Name: "here"}).Ports {
			for _, f := range p.Frontends {
				if f.Kind != LoadBalancer || p.Family != lb.IPv6 {
					continue
				}
				got := "everybody"
				if f.Sources != nil {
					got = fmt.Sprint(f.Sources.Networks)
				}
				if got != want {
					t.Errorf("with %s as the last of too many ranges, %s may connect over IPv6, want %s", last, got, want)
				}
			}
		}
	}
}

// Contract clause 11: what one Service costs has a bound in each direction, what is beyond is said,
// and the rest is served.
func TestContract11WhatAServiceCosts(t *testing.T) {
	addrs := func(first byte, n int) (all []netip.Addr) {
		for i := range n {
			all = append(all, netip.AddrFrom4([4]byte{first, byte(i >> 16), byte(i >> 8), byte(i)}))
		}
		return all
	}
	ports := func(n int) func(*lb.Service) {
		return func(s *lb.Service) {
			s.Ports = nil
			for i := range n {
				s.Ports = append(s.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.TCP, Port: uint16(i + 1)})
			}
		}
	}
	externals := func(n int) func(*lb.Service) {
		return func(s *lb.Service) { s.ExternalIPs = addrs(11, n) }
	}
	vips := func(n int) func(*lb.Service) {
		return func(s *lb.Service) {
			s.Ingress = nil
			for _, a := range addrs(12, n) {
				s.Ingress = append(s.Ingress, lb.Ingress{Addr: a})
			}
		}
	}
	ranges := func(n int) func(*lb.Service) {
		return func(s *lb.Service) {
			for _, a := range addrs(13, n) {
				s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(a, 32))
			}
		}
	}
	endpoints := func(ports, n int) []lb.Slice {
		s := lb.Slice{Family: lb.IPv4}
		for i := range ports {
			s.Ports = append(s.Ports, lb.SlicePort{Name: fmt.Sprint(i), Protocol: lb.TCP, Port: uint16(i + 1)})
		}
		for _, a := range addrs(14, n) {
			s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: a, Ready: true, Serving: true})
		}
		return []lb.Slice{s}
	}
	for _, test := range []struct {
		name      string
		tweaks    []func(*lb.Service)
		endpoints []lb.Slice
		frontends int
		said      string // of what is left out
		excess    string
	}{
		{"an ordinary Service", nil, nil, 3, "", ""},
		{"as many ports as there may be", []func(*lb.Service){ports(8192), vips(0)}, nil, 8192, "", ""},
		{"more ports", []func(*lb.Service){ports(8193), vips(0)}, nil, 0, "", "16386 frontends"},
		{"ports and external IPs", []func(*lb.Service){ports(1000), vips(1), externals(3000)}, nil, 1000 * 15,
			"spec.externalIPs: the last 2987 of 3000 are left out", ""},
		{"many external IPs", []func(*lb.Service){externals(60_000)}, nil, 1 << 14,
			"spec.externalIPs: the last 43619 of 60000 are left out", ""},
		{"many VIPs", []func(*lb.Service){vips(20_000)}, nil, 1 + 64 + 1,
			"status.loadBalancer: the last 19936 of 20000 are left out", ""},
		{"ports and VIPs", []func(*lb.Service){ports(4000), vips(40)}, nil, 3 * 4000,
			"status.loadBalancer: the last 38 of 40 are left out", ""},
		{"as many source ranges as there may be", []func(*lb.Service){ranges(10_000)}, nil, 3, "", ""},
		{"more source ranges", []func(*lb.Service){ranges(10_001)}, nil, 3,
			"spec.loadBalancerSourceRanges: the last 1 of 10001 are left out", ""},
		{"ports and endpoints", []func(*lb.Service){ports(200)}, endpoints(200, 500), 400, "", ""},
		{"many ports and endpoints", []func(*lb.Service){ports(4)}, endpoints(4, 65_000), 0, "",
			"260000 pairs of port and endpoint"},
		{"many slices", nil, append(endpoints(1, 1), lb.Slice{More: true}), 0, "", "more than the 4096 EndpointSlices"},
	} {
		t.Run(test.name, func(t *testing.T) {
			svc := service(test.tweaks...)
			s := New(svc, test.endpoints, here)
			frontends, said := 0, ""
			for _, p := range s.Ports {
				frontends += len(p.Frontends)
				for _, f := range p.Frontends {
					if f.Sources != nil && len(f.Sources.Networks) > 10_001 {
						t.Errorf("%d networks", len(f.Sources.Networks))
					}
				}
			}
			for _, d := range s.Denied {
				if said += d.Message; d.Reason != lb.ReasonTooLarge {
					t.Errorf("reason %s", d.Reason)
				}
			}
			if frontends != test.frontends || !strings.HasPrefix(said, test.said) || (said == "") != (test.said == "") {
				t.Errorf("%d frontends, said %q; want %d, %q", frontends, said, test.frontends, test.said)
			}
			if (s.Excess == nil) != (test.excess == "") || s.Excess != nil && !strings.Contains(s.Excess.Error(), test.excess) {
				t.Errorf("excess %v, want %q", s.Excess, test.excess)
			}
			for _, d := range Report(s, s, nil, Path{}) {
				if refused := d.Refusal != nil; refused != (test.excess != "") {
					t.Errorf("%s: %+v", d.VIP, d.Refusal)
				}
			}
		})
	}
}

// A Service that becomes too large keeps what it had of what it still asks for: the rest may be
// another Service's by now.
func TestFrozen(t *testing.T) {
	large := func(s *lb.Service) {
		for i := range 10_000 {
			s.Ports = append(s.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.UDP, Port: uint16(i + 1)})
		}
	}
	local := func(s *lb.Service) { s.ExternalPolicy, s.HealthCheckNodePort = lb.Local, 32000 }
	external := netip.MustParseAddr("192.0.2.99")
	externals := func(s *lb.Service) { s.ExternalIPs = []netip.Addr{external} }
	other := netip.MustParseAddr("192.0.2.98")
	all := []Kind{ClusterIP, ExternalIP, LoadBalancer, NodePort}
	for _, test := range []struct {
		name   string
		change func(*lb.Service)
		want   []Kind
		health uint16
	}{
		{"nothing else", func(*lb.Service) {}, all, 32000},
		{"another VIP", func(s *lb.Service) { s.Ingress = []lb.Ingress{{Addr: other}} },
			[]Kind{ClusterIP, ExternalIP, NodePort}, 32000},
		{"another cluster IP", func(s *lb.Service) { s.ClusterIPs = []netip.Addr{other} },
			[]Kind{ExternalIP, LoadBalancer, NodePort}, 32000},
		{"another external IP", func(s *lb.Service) { s.ExternalIPs = []netip.Addr{other} },
			[]Kind{ClusterIP, LoadBalancer, NodePort}, 32000},
		{"another node port", func(s *lb.Service) { s.Ports[0].NodePort++ },
			[]Kind{ClusterIP, ExternalIP, LoadBalancer}, 32000},
		{"another port", func(s *lb.Service) { s.Ports[0].Port = 9 }, []Kind{NodePort}, 32000},
		{"another protocol", func(s *lb.Service) { s.Ports[0].Protocol = lb.SCTP }, nil, 32000},
		{"another health check node port", func(s *lb.Service) { s.HealthCheckNodePort++ }, all, 0},
		{"policy Cluster", func(s *lb.Service) { s.ExternalPolicy = lb.Cluster }, all, 0},
		{"no load balancer", func(s *lb.Service) { s.Type = lb.ClusterIP }, []Kind{ClusterIP, ExternalIP}, 0},
		{"taken down", func(s *lb.Service) { s.Type, s.ClusterIPs, s.ExternalIPs = lb.ExternalName, nil, nil }, nil, 0},
		{"another Service with the same name", func(s *lb.Service) { s.UID = "another" }, nil, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := New(service(local, externals), slice("1 here"), here)
			svc := service(local, externals, large, test.change)
			endpoints := slice("1 here")
			now := New(svc, endpoints, here)
			if svc.Type == lb.ExternalName {
				now.Excess = &TooLarge{}
			}
			frozen := before.Frozen(now, svc, endpoints, here)
			var kinds []Kind
			for _, p := range frozen.Ports {
				for _, f := range p.Frontends {
					kinds = append(kinds, f.Kind)
				}
			}
			if !slices.Equal(kinds, test.want) || frozen.HealthPort != test.health {
				t.Errorf("frontends %v, health port %d; want %v, %d", kinds, frozen.HealthPort, test.want, test.health)
			}
			if frozen.Excess == nil || frozen.Equal(before) || !frozen.Equal(before.Frozen(now, svc, endpoints, here)) {
				t.Errorf("%+v", frozen)
			}
			if len(test.want) == len(all) && test.health != 0 && !SameRules(before, frozen, lb.IPv4) {
				t.Errorf("other rules: %+v", frozen)
			}
		})
	}
}

// Contract clause 11: a Service that is too large delivers to nothing that its slices do not list as
// usable, and lets nobody in whom its source ranges do not; and it gets no endpoint that it had not.
func TestContract11FrozenFollowsWhatItSays(t *testing.T) {
	large := func(s *lb.Service) {
		for i := range 10_000 {
			s.Ports = append(s.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.UDP, Port: uint16(i + 1)})
		}
	}
	ranges := func(text ...string) func(*lb.Service) {
		return func(s *lb.Service) {
			s.SourceRanges = nil
			for _, r := range text {
				s.SourceRanges = append(s.SourceRanges, netip.MustParsePrefix(r))
			}
		}
	}
	had := "1 here, 2 there, 3 there unready"
	for _, test := range []struct {
		name, endpoints string
		change          func(*lb.Service)
		want            string // the last bytes of the backends' addresses
		sources         string
	}{
		{"nothing else", had, large, "1 2", "203.0.113.0/24"},
		{"narrower ranges", had, ranges("203.0.113.128/25"), "1 2", "203.0.113.128/25"},
		{"other ranges", had, ranges("198.51.100.0/24", "198.18.0.0/15"), "1 2", "198.18.0.0/15 198.51.100.0/24"},
		{"an endpoint goes", "2 there, 3 there unready", large, "2", "203.0.113.0/24"},
		{"one is no longer ready", "1 here unready, 2 there", large, "2", "203.0.113.0/24"},
		{"one becomes terminating", "1 here terminating, 2 there", large, "2", "203.0.113.0/24"},
		{"all are terminating", "1 here terminating, 2 there terminating", large, "1 2", "203.0.113.0/24"},
		{"all go", "4 here", large, "", "203.0.113.0/24"},
		{"others come", had + ", 4 here, 5 there", large, "1 2", "203.0.113.0/24"},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := New(service(ranges("203.0.113.0/24")), slice(had), here)
			svc, endpoints := service(ranges("203.0.113.0/24"), large, test.change), slice(test.endpoints)
			frozen := before.Frozen(New(svc, endpoints, here), svc, endpoints, here)
			if len(frozen.Ports) != 1 || frozen.Excess == nil {
				t.Fatalf("%+v", frozen)
			}
			var backends, sources []string
			for _, b := range frozen.Ports[0].Backends.Cluster {
				backends = append(backends, fmt.Sprint(b.Addr.Addr().As4()[3]))
			}
			for _, f := range frozen.Ports[0].Frontends {
				if f.Kind == LoadBalancer {
					for _, network := range f.Sources.Networks {
						sources = append(sources, network.String())
					}
				}
				if refuses := f.Action == Reject; refuses != (test.want == "") {
					t.Errorf("%s: %s", f.Kind, f.Action)
				}
			}
			if got := strings.Join(backends, " "); got != test.want {
				t.Errorf("backends %q, want %q", got, test.want)
			}
			if got := strings.Join(sources, " "); got != test.sources {
				t.Errorf("sources %q, want %q", got, test.sources)
			}
		})
	}
}

// What is kept of a Service is bounded too, whatever its slices list by now.
func TestFrozenIsBounded(t *testing.T) {
	before := New(service(), slice("1 here"), here)
	svc := service(func(s *lb.Service) {
		for i := range 10_000 {
			s.Ports = append(s.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.UDP, Port: uint16(i + 1)})
		}
	})
	endpoints := slice("1 here")
	endpoints[0].Endpoints = slices.Repeat(endpoints[0].Endpoints, maxDeliveries+1)
	frozen := before.Frozen(New(svc, endpoints, here), svc, endpoints, here)
	if len(frozen.Ports) != 1 || len(frozen.Ports[0].Backends.Cluster) != 0 || frozen.Ports[0].Frontends[0].Action != Reject {
		t.Errorf("%+v", frozen.Ports)
	}
}

// Contract clause 11: a Service that gets more ports than are kept of it keeps what it had.
func TestFrozenKeepsItsPorts(t *testing.T) {
	before := New(service(), slice("1 here"), here)
	svc := service(func(s *lb.Service) { s.Unkept.Ports = maxFrontends })
	now := New(svc, slice("1 here"), here)
	frozen := before.Frozen(now, svc, slice("1 here"), here)
	if now.Excess == nil || !samePorts(frozen.Ports, before.Ports) {
		t.Errorf("excess %v, %+v", now.Excess, frozen.Ports)
	}
}

// Endpoints that a Service had count no more than it may have, however many slices list them.
func TestListedIsBounded(t *testing.T) {
	before := New(service(), slice("1 here, 2 here"), here)
	all := append(slice("1 here, 3 here"), slice("2 here")...)
	listed := before.Listed(all)
	if len(listed) != 2 || len(listed[0].Endpoints) != 1 || len(all[0].Endpoints) != 2 {
		t.Errorf("%+v", listed)
	}
	if listed := before.Listed(slices.Repeat(all, maxDeliveries/2+1)); listed != nil {
		t.Errorf("%d slices", len(listed))
	}
}

// BenchmarkNewWeighted plans a Service with as many weights, ports and endpoints as it may have, whose slices
// have different numbers for its ports.
func BenchmarkNewWeighted(b *testing.B) {
	for _, weights := range []int{0, 1, 256} {
		b.Run(fmt.Sprintf("weights=%d", weights), func(b *testing.B) {
			svc := service(func(s *lb.Service) { s.Scheduler, s.Ports = "wrr", nil })
			for i := range weights {
				svc.Weights = append(svc.Weights, lb.Weight{
					Network: netip.PrefixFrom(netip.AddrFrom4([4]byte{11, 0, byte(i), 0}), 24), Share: uint8(i%100 + 1)})
			}
			slices := []lb.Slice{{Family: lb.IPv4}, {Family: lb.IPv4}}
			for port := range 256 {
				name := fmt.Sprint(port)
				svc.Ports = append(svc.Ports, lb.ServicePort{Name: name, Protocol: lb.TCP, Port: uint16(port + 1)})
				for i := range slices {
					slices[i].Ports = append(slices[i].Ports,
						lb.SlicePort{Name: name, Protocol: lb.TCP, Port: uint16(port + 1 + i)})
				}
			}
			for i := range 500 {
				to := &slices[i%2]
				to.Endpoints = append(to.Endpoints, lb.Endpoint{Ready: true, Serving: true,
					Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Node: fmt.Sprint("node-", i%20)})
			}
			for b.Loop() {
				New(svc, slices, Node{Name: "node-1"})
			}
		})
	}
}

// Contract clause 11: a Service with few endpoints is large too if its tables are, whether or not its endpoints are
// ready, as they may all become that at once.
func TestContract11LargeTables(t *testing.T) {
	for _, test := range []struct {
		what                    string
		scheduler               string
		ports, slices, each     int
		weight                  uint8
		affinity, direct, apart bool
		want                    bool
	}{
		{what: "no tables", ports: 1, slices: 1, each: 100, weight: 100},
		{what: "two endpoints", scheduler: "maglev", ports: 1, slices: 1, each: 2},
		{what: "two with weights", scheduler: "maglev", ports: 1, slices: 1, each: 2, weight: 100, want: true},
		{what: "one with a weight", scheduler: "maglev", ports: 1, slices: 1, each: 1, weight: 100},
		{what: "a weight that does not count", scheduler: "rr", ports: 1, slices: 1, each: 2, weight: 100},
		{what: "many endpoints", scheduler: "rr", ports: 1, slices: 1, each: 52, want: true},
		{what: "many that are counted", scheduler: "lc", ports: 1, slices: 1, each: 1000},
		{what: "more that are counted", scheduler: "lc", ports: 1, slices: 1, each: 1022, want: true},
		{what: "ports that share a table", scheduler: "rr", ports: 40, slices: 2, each: 2},
		{what: "ports that share none", scheduler: "rr", ports: 40, slices: 2, each: 2, apart: true, want: true},
		{what: "counted at ports that share none", scheduler: "lc", ports: 40, slices: 2, each: 2, apart: true, want: true},
		{what: "clients that have no place", ports: 1, slices: 1, each: 52, affinity: true, want: true},
		{what: "nodes that hand over", scheduler: "maglev", ports: 3, slices: 2, each: 2, apart: true, direct: true,
			want: true},
		{what: "the node's scheduler", scheduler: "", ports: 1, slices: 1, each: 52},
	} {
		svc := lb.Service{Scheduler: test.scheduler, Ports: make([]lb.ServicePort, test.ports)}
		if test.affinity {
			svc.AffinityTimeout = time.Hour
		}
		if test.direct {
			svc.Forwarding = "direct"
		}
		var endpoints []lb.Slice
		for i := range test.slices {
			slice := lb.Slice{Weight: test.weight, Endpoints: make([]lb.Endpoint, test.each)}
			for j := range test.ports {
				number := 8000 + j
				if test.apart {
					number += 1000 * i
				}
				slice.Ports = append(slice.Ports, lb.SlicePort{Port: uint16(number)})
			}
			endpoints = append(endpoints, slice)
		}
		if got := IsLarge(svc, endpoints, Random); got != test.want {
			t.Errorf("%s: large is %v", test.what, got)
		}
		if got := IsLarge(svc, endpoints, RoundRobin); test.scheduler == "" && got != (test.each == 52 || test.each == 100) {
			t.Errorf("%s, with round-robin on the node: large is %v", test.what, got)
		}
	}
}
