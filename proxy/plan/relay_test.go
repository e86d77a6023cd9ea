package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// relayable is a Service with a port of each protocol, node ports and two endpoints, one on the node.
func relayable() (lb.Service, []lb.Slice) {
	key := lb.Key{Namespace: "default", Name: "web"}
	svc := lb.Service{Key: key, Type: lb.LoadBalancer, Relay: "true", ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ingress:    []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.1")}},
		Ports: []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: lb.UDP, Port: 53, NodePort: 30053}}}
	slice := lb.Slice{Key: key, Service: key, Family: lb.IPv4,
		Ports: []lb.SlicePort{{Name: "http", Protocol: lb.TCP, Port: 8080}, {Name: "dns", Protocol: lb.UDP, Port: 53}},
		Endpoints: []lb.Endpoint{
			{Addr: netip.MustParseAddr("10.1.0.1"), Node: "here", Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.1.0.2"), Node: "there", Ready: true, Serving: true}}}
	return svc, []lb.Slice{slice}
}

func TestRelayTable(t *testing.T) {
	at := netip.MustParseAddrPort
	here, there := RelayedBackend{Addr: at("10.1.0.1:8080")}, RelayedBackend{Addr: at("10.1.0.2:8080")}
	here53, there53 := RelayedBackend{Addr: at("10.1.0.1:53")}, RelayedBackend{Addr: at("10.1.0.2:53")}
	all := []RelayedFrontend{{Addr: at("10.96.0.1:80")}, {Addr: at("192.0.2.1:80")}, {Addr: at("0.0.0.0:30080")}}
	all53 := []RelayedFrontend{{Addr: at("10.96.0.1:53")}, {Addr: at("192.0.2.1:53")}, {Addr: at("0.0.0.0:30053")}}
	node := Node{Name: "here", Relay: true}
	http := RelayedPort{Name: "http", Protocol: lb.TCP, Frontends: all, Cluster: []RelayedBackend{here, there}}
	dns := RelayedPort{Name: "dns", Protocol: lb.UDP, Frontends: all53, Cluster: []RelayedBackend{here53, there53}}
	for _, test := range []struct {
		name string
		tune func(*lb.Service, *[]lb.Slice, *Node)
		want *Relayed
	}{
		{"all frontends of TCP and UDP", func(*lb.Service, *[]lb.Slice, *Node) {}, &Relayed{Ports: []RelayedPort{http, dns}}},
		{"the same number in both", func(s *lb.Service, _ *[]lb.Slice, _ *Node) {
			s.Ports[1].Port, s.Ports[1].NodePort = 80, 30080
		}, &Relayed{Ports: []RelayedPort{http, {Name: "dns", Protocol: lb.UDP, Frontends: all,
			Cluster: dns.Cluster}}}},
		{"none of SCTP", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Ports[1].Protocol = lb.SCTP },
			&Relayed{Ports: []RelayedPort{http}}},
		{"not asked for", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Relay = "" }, nil},
		{"this port", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Relay = "http" },
			&Relayed{Ports: []RelayedPort{http}}},
		{"that of UDP", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Relay = "53" }, &Relayed{Ports: []RelayedPort{dns}}},
		{"another port", func(s *lb.Service, all *[]lb.Slice, _ *Node) {
			s.Relay = "8443"
			s.Ports = append(s.Ports, lb.ServicePort{Name: "https", Protocol: lb.TCP, Port: 8443})
			(*all)[0].Ports = append((*all)[0].Ports, lb.SlicePort{Name: "https", Protocol: lb.TCP, Port: 443})
		}, &Relayed{Ports: []RelayedPort{{Name: "https", Protocol: lb.TCP, Frontends: []RelayedFrontend{
			{Addr: at("10.96.0.1:8443")}, {Addr: at("192.0.2.1:8443")}},
			Cluster: []RelayedBackend{{Addr: at("10.1.0.1:443")}, {Addr: at("10.1.0.2:443")}}}}}},
		{"one port is unknown", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Relay = "http, htps" }, nil},
		{"refused by value", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Relay = "yes" }, nil},
		{"a node without a relay", func(_ *lb.Service, _ *[]lb.Slice, n *Node) { n.Relay = false }, nil},
		{"an unknown PROXY protocol", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.RelayProxyProtocol = "v3" }, nil},
		{"one that has no UDP", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.RelayProxyProtocol = "v1" },
			&Relayed{ProxyProtocol: 1, Ports: []RelayedPort{http}}},
		{"no endpoints: the rules refuse", func(_ *lb.Service, all *[]lb.Slice, _ *Node) { *all = nil }, nil},
		{"an endpoint that ends keeps flows of UDP", func(_ *lb.Service, all *[]lb.Slice, _ *Node) {
			(*all)[0].Endpoints[1].Ready = false
		}, &Relayed{Ports: []RelayedPort{
			{Name: "http", Protocol: lb.TCP, Frontends: http.Frontends, Cluster: []RelayedBackend{here}},
			{Name: "dns", Protocol: lb.UDP, Frontends: all53, Cluster: []RelayedBackend{here53},
				Ending: []netip.AddrPort{there53.Addr}}}}},
		{"policy Local", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.ExternalPolicy, s.Relay = lb.Local, "http" },
			&Relayed{Ports: []RelayedPort{{Name: "http", Protocol: lb.TCP, Frontends: []RelayedFrontend{{Addr: all[0].Addr},
				{Addr: all[1].Addr, Local: true}, {Addr: all[2].Addr, Local: true}},
				Cluster: []RelayedBackend{here, there}, Local: []RelayedBackend{here}}}}},
		{"policy Local, endpoints only elsewhere", func(s *lb.Service, all *[]lb.Slice, _ *Node) {
			s.ExternalPolicy, s.Relay = lb.Local, "http"
			(*all)[0].Endpoints = (*all)[0].Endpoints[1:]
		}, &Relayed{Ports: []RelayedPort{{Name: "http", Protocol: lb.TCP, Frontends: all[:1],
			Cluster: []RelayedBackend{there}}}}},
		{"internal policy Local", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.InternalPolicy, s.Relay = lb.Local, "http" },
			&Relayed{Ports: []RelayedPort{{Name: "http", Protocol: lb.TCP, Frontends: []RelayedFrontend{
				{Addr: all[0].Addr, Local: true}, all[1], all[2]}, Cluster: []RelayedBackend{here, there},
				Local: []RelayedBackend{here}}}}},
		{"affinity, weights and the PROXY protocol", func(s *lb.Service, _ *[]lb.Slice, _ *Node) {
			s.Relay, s.AffinityTimeout, s.Scheduler, s.RelayProxyProtocol = "http", time.Hour, "sh", "v2"
			s.Weights = lb.Weights{{Node: "there", Share: 7}}
		}, &Relayed{Affinity: time.Hour, Scheduler: SourceHash, ProxyProtocol: 2, Ports: []RelayedPort{{Name: "http",
			Protocol: lb.TCP, Frontends: all, Cluster: []RelayedBackend{{here.Addr, 1}, {there.Addr, 7}}}}}},
		{"affinity alone", func(s *lb.Service, _ *[]lb.Slice, _ *Node) { s.Relay, s.AffinityTimeout = "http", time.Hour },
			&Relayed{Affinity: time.Hour, Fresh: true, Scheduler: SourceHash, Ports: []RelayedPort{http}}},
	} {
		svc, endpoints := relayable()
		n := node
		test.tune(&svc, &endpoints, &n)
		got := RelayTable(New(svc, endpoints, n), Service{})
		if d := cmp.Diff(test.want, got, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); d != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, d)
		}
	}
}

// A frontend that goes is known to the relay until the kernel has confirmed that it is gone; one that
// comes is from the first.
func TestRelayTableOutlivesTheRules(t *testing.T) {
	svc, endpoints := relayable()
	node := Node{Name: "here", Relay: true}
	before := New(svc, endpoints, node)
	svc.Ingress = nil
	now := New(svc, endpoints, node)
	has := func(r *Relayed, addr string) string {
		if r == nil {
			return ""
		}
		for _, p := range r.Ports {
			for _, f := range p.Frontends {
				if f.Addr.String() == addr && len(p.Cluster) > 0 {
					return map[bool]string{true: "going", false: "wanted"}[f.Going]
				}
			}
		}
		return ""
	}
	for _, step := range []struct {
		name             string
		desired, applied Service
		vip, clusterIP   string
	}{
		{"it comes", before, Service{}, "wanted", "wanted"},
		{"a VIP goes", now, before, "going", "wanted"},
		{"it lingers", now.WithLingering(Withdrawn(before, now)), before, "going", "wanted"},
		{"it has gone", now, now, "", "wanted"},
		{"the Service goes", Service{}, now, "", "going"},
		{"that has gone", Service{}, Service{}, "", ""},
	} {
		r := RelayTable(step.desired, step.applied)
		if has(r, "192.0.2.1:80") != step.vip || has(r, "10.96.0.1:80") != step.clusterIP {
			t.Errorf("%s: %+v", step.name, r)
		}
		if any := AnyRelayed(step.desired, step.applied); any != (r != nil) {
			t.Errorf("%s: any relayed: %v", step.name, any)
		}
	}
}

// Rules differ where the relay does, so that an annotation that changes is written.
func TestRelayIsPartOfTheRules(t *testing.T) {
	svc, endpoints := relayable()
	node := Node{Name: "here", Relay: true}
	with := New(svc, endpoints, node)
	svc.Relay = ""
	if without := New(svc, endpoints, node); with.Equal(without) || SameRules(with, without, lb.IPv4) {
		t.Error("a relayed Service is the same as one that is not")
	}
	svc.Ports = append(svc.Ports, lb.ServicePort{Name: "https", Protocol: lb.TCP, Port: 443})
	svc.Relay = "http"
	one := New(svc, endpoints, node)
	svc.Relay = "https"
	if other := New(svc, endpoints, node); one.Equal(other) || SameRules(one, other, lb.IPv4) {
		t.Error("a Service with one relayed port is the same as one with another")
	}
}

func TestRefuseRelay(t *testing.T) {
	slice := func(addrs ...string) []lb.Slice {
		s := lb.Slice{Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 80}}}
		for _, a := range addrs {
			s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: addr(a), Ready: true})
		}
		return []lb.Slice{s}
	}
	var many []string
	for i := range maxRelayed + 1 {
		many = append(many, fmt.Sprintf("10.1.%d.%d", i/250, i%250+1))
	}
	for name, tc := range map[string]struct {
		addrs []string
		want  string
	}{
		"pods":          {[]string{"10.1.0.1", "2001:db8:1::1"}, ""},
		"none":          {nil, ""},
		"this node":     {[]string{"10.1.0.1", "10.99.0.1"}, "the endpoint 10.99.0.1 is a node's"},
		"another node":  {[]string{"192.0.2.9"}, "is a node's"},
		"an API server": {[]string{"203.0.113.6"}, "is an API server's"},
		"a cluster IP":  {[]string{"10.96.0.10"}, "is a cluster IP"},
		"a VIP":         {[]string{"198.51.100.7"}, "is in a pool"},
		"loopback":      {[]string{"127.0.0.1"}, "is no unicast address"},
		"too many":      {many, "the Service has 4097 pairs of port and endpoint, and at most 4096 are relayed"},
	} {
		if got := RefuseRelay(slice(tc.addrs...), scope); (got == "") != (tc.want == "") || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

func TestRelayIgnored(t *testing.T) {
	for _, test := range []struct {
		relay, proxyProtocol string
		hasRelay             bool
		tune                 func(*lb.Service)
		want                 string // a part of what is said; "" for nothing
	}{
		{relay: "true", hasRelay: true},
		{relay: "true", proxyProtocol: "v1", hasRelay: true},
		{relay: "false"},
		{},
		{relay: "true", want: "no relay"},
		{relay: "http", hasRelay: true},
		{relay: "80, http", proxyProtocol: "v2", hasRelay: true},
		{relay: "yes", hasRelay: true, want: `"yes" is neither true, false nor the name or number of a port of TCP or UDP`},
		{relay: "http,htps", hasRelay: true, want: `"htps" is neither`},
		{relay: "http,", hasRelay: true, want: `"http," has a comma too many`},
		{relay: strings.Repeat("http, ", 42), hasRelay: true, want: "longer than 250 bytes"},
		{relay: "http,dns", hasRelay: true},
		{relay: "http", hasRelay: true, tune: func(s *lb.Service) { s.Ports[0].Name = "" }, want: `"http" is neither`},
		{relay: "true", proxyProtocol: "v3", hasRelay: true, want: `"v3" is neither v1 nor v2`},
		{proxyProtocol: "v1", hasRelay: true, want: `needs annotation landfall.dev/relay: "true"`},
		{relay: "true", hasRelay: true, tune: func(s *lb.Service) { s.Ports = s.Ports[1:] }},
		{relay: "true", hasRelay: true, tune: func(s *lb.Service) {
			s.Ports = s.Ports[1:]
			s.Ports[0].Protocol = lb.SCTP
		}, want: "only TCP and UDP"},
		{relay: "53", hasRelay: true, tune: func(s *lb.Service) { s.Ports[1].Protocol = lb.SCTP }, want: `"53" is neither`},
	} {
		svc, _ := relayable()
		svc.Relay, svc.RelayProxyProtocol = test.relay, test.proxyProtocol
		if test.tune != nil {
			test.tune(&svc)
		}
		got := RelayIgnored(svc, test.hasRelay)
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%+v: %q", test, got)
		}
	}
}

// Version 1 of the PROXY protocol has no UDP, which is said where somebody asks for both.
func TestRelayLeavesUDP(t *testing.T) {
	for _, test := range []struct {
		relay, proxyProtocol string
		want                 bool
	}{{"true", "v1", true}, {"dns", "v1", true}, {"http", "v1", false}, {"true", "v2", false}, {"true", "", false},
		{"false", "v1", false}} {
		svc, endpoints := relayable()
		svc.Relay, svc.RelayProxyProtocol = test.relay, test.proxyProtocol
		got := RelayLeavesUDP(svc, New(svc, endpoints, Node{Relay: true}), false, false)
		if (got != "") != test.want {
			t.Errorf("%+v: %q", test, got)
		}
		tcpOnly := New(svc, endpoints, Node{Relay: true, RelayTCPOnly: true})
		asks := test.relay == "true" || test.relay == "dns"
		for _, iptables := range []bool{false, true} {
			got := RelayLeavesUDP(svc, tcpOnly, true, iptables)
			if (got != "") != asks || iptables && asks && !test.want && !strings.Contains(got, "nftables mode") {
				t.Errorf("%+v where TCP alone is relayed: %q", test, got)
			}
		}
		if slices.ContainsFunc(tcpOnly.Ports, func(p Port) bool { return p.Protocol == lb.UDP && p.Relay }) {
			t.Errorf("%+v: UDP is relayed where TCP alone is", test)
		}
		if got := RelayLeavesUDP(svc, New(svc, endpoints, Node{}), true, false); got != "" {
			t.Errorf("%+v without a relay: %q", test, got)
		}
	}
}

// What the relay needs of a Service is as much as it is told, and nothing without a relayed port.
func TestRelayNeeds(t *testing.T) {
	svc := service()
	svc.Relay = "true"
	for _, policy := range []lb.TrafficPolicy{lb.Cluster, lb.Local} {
		svc.ExternalPolicy = policy
		s := New(svc, slice("1 here, 2 there, 3 there"), Node{Name: "here", Scheduler: Random, Relay: true})
		told := 0
		for _, p := range RelayTable(s, Service{}).Ports {
			told += len(p.Frontends) + len(p.Cluster) + len(p.Local) + len(p.Ending)
		}
		if n := RelayNeeds(s); n != told || n == 0 {
			t.Errorf("policy %s: %d, and it is told %d", policy, n, told)
		}
		s.Relay = false
		if n := RelayNeeds(s); n != 0 {
			t.Errorf("policy %s, not relayed: %d", policy, n)
		}
	}
}
