package plan

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

var (
	web  = lb.Key{Namespace: "default", Name: "web"}
	here = Node{Name: "here", Addresses: []netip.Addr{addr("172.31.0.1")}}
)

func service(change ...func(*lb.Service)) lb.Service {
	s := lb.Service{
		Key: web, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster, HealthCheckNodePort: 32000,
		ClusterIPs: []netip.Addr{addr("10.96.0.1")},
		Ports:      []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080}},
		Ingress:    []lb.Ingress{{Addr: addr("192.0.2.1")}},
	}
	for _, f := range change {
		f(&s)
	}
	return s
}

func local(s *lb.Service) { s.ExternalPolicy = lb.Local }

// slice reads endpoints like "1 here, 2 there terminating, 3 here gone, 4 there unready": the last
// byte of the address, its node, and its condition.
func slice(endpoints string, ports ...lb.SlicePort) []lb.Slice {
	if ports == nil {
		ports = []lb.SlicePort{{Name: "http", Protocol: lb.TCP, Port: 8080}}
	}
	v4 := lb.Slice{Service: web, Family: lb.IPv4, Ports: ports}
	v6 := lb.Slice{Service: web, Family: lb.IPv6, Ports: ports}
	for word := range strings.SplitSeq(endpoints, ",") {
		f := append(strings.Fields(word), "ready")
		if len(f) < 3 {
			continue
		}
		ep := lb.Endpoint{Addr: addr("192.168.0." + f[0]), Node: f[1]}
		switch f[2] {
		case "ready":
			ep.Ready, ep.Serving = true, true
		case "terminating":
			ep.Serving, ep.Terminating = true, true
		case "gone":
			ep.Terminating = true
		}
		v4.Endpoints = append(v4.Endpoints, ep)
		ep.Addr = addr("fd00:10::" + f[0])
		v6.Endpoints = append(v6.Endpoints, ep)
	}
	return []lb.Slice{v4, v6}
}

// show writes a plan as "kind address:port action [backends]" lines.
func show(s Service) string {
	var lines []string
	for _, p := range s.Ports {
		for _, f := range p.Frontends {
			at := fmt.Sprint(f.Port)
			if f.Addr.IsValid() {
				at = netip.AddrPortFrom(f.Addr, f.Port).String()
			}
			words := []string{string(f.Kind), at + "/" + p.Protocol.Lower(), string(f.Action)}
			if f.Sources != nil {
				for _, source := range f.Sources.Networks {
					words = append(words, "from", source.String())
				}
			}
			if f.Lingering {
				words = append(words, "lingering")
			}
			lines = append(lines, strings.Join(words, " "))
		}
	}
	return strings.Join(lines, "\n")
}

func dual(s *lb.Service) {
	s.ClusterIPs = append(s.ClusterIPs, addr("fd00:96::1"))
	s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr("2001:db8::1")})
	s.ExternalIPs = []netip.Addr{addr("192.0.2.9"), addr("2001:db8::9")}
}

func TestNew(t *testing.T) {
	for _, tt := range []struct {
		name      string
		service   lb.Service
		endpoints string
		want      string
		health    uint16
	}{
		{"4 policy Cluster", service(), "1 here, 2 there",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Cluster\nNodePort 30080/tcp Cluster", 0},
		{"5 policy Local", service(local), "1 here, 2 there",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Local\nNodePort 30080/tcp Local", 32000},
		{"8 policy Local, none here", service(local), "2 there",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Drop\nNodePort 30080/tcp Drop", 32000},
		{"11 internal policy Local, none here", service(func(s *lb.Service) { s.InternalPolicy = lb.Local }), "2 there",
			"ClusterIP 10.96.0.1:80/tcp Drop\nLoadBalancer 192.0.2.1:80/tcp Cluster\nNodePort 30080/tcp Cluster", 0},
		{
			"16 no endpoints", service(local), "",
			"ClusterIP 10.96.0.1:80/tcp Reject\nLoadBalancer 192.0.2.1:80/tcp Reject\nNodePort 30080/tcp Reject", 32000},
		{"29 none serves", service(), "1 here gone, 2 there unready",
			"ClusterIP 10.96.0.1:80/tcp Reject\nLoadBalancer 192.0.2.1:80/tcp Reject\nNodePort 30080/tcp Reject", 0},
		{"20 source ranges", service(func(s *lb.Service) {
			s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8::/32"),
				netip.MustParsePrefix("172.31.0.0/16")}
		}), "1 here",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Cluster from 172.31.0.0/16 from 192.0.2.1/32 " +
				"from 198.51.100.0/24\nNodePort 30080/tcp Cluster", 0},
		{"22 a range of all", service(func(s *lb.Service) {
			s.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("0.0.0.0/0")}
		}), "1 here", "ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Cluster\nNodePort 30080/tcp Cluster",
			0},
		{"24 ipMode Proxy", service(func(s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy }), "1 here",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nNodePort 30080/tcp Cluster", 0},
		{"no node ports allocated", service(func(s *lb.Service) { s.Ports[0].NodePort = 0 }), "1 here",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Cluster", 0},
		{"42 headless", service(func(s *lb.Service) { s.ClusterIPs = nil }), "1 here", "", 0},
		{"42 ExternalName", service(func(s *lb.Service) { s.Type = lb.ExternalName }), "1 here", "", 0},
		{"a ClusterIP with what it was left from another type", service(func(s *lb.Service) { s.Type = lb.ClusterIP }),
			"1 here", "ClusterIP 10.96.0.1:80/tcp Cluster", 0},
		{"NodePort and Local has no health port", service(local, func(s *lb.Service) { s.Type = lb.NodePort }), "1 here",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nNodePort 30080/tcp Local", 0},
		{"45 dual stack", service(dual), "1 here",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nExternalIP 192.0.2.9:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp " +
				"Cluster\nNodePort 30080/tcp Cluster\n" +
				"ClusterIP [fd00:96::1]:80/tcp Cluster\nExternalIP [2001:db8::9]:80/tcp Cluster\nLoadBalancer " +
				"[2001:db8::1]:80/tcp Cluster\nNodePort 30080/tcp Cluster", 0},
		{"45 IPv6 only", service(dual, func(s *lb.Service) { s.ClusterIPs = s.ClusterIPs[1:] }), "1 here",
			"ClusterIP [fd00:96::1]:80/tcp Cluster\nExternalIP [2001:db8::9]:80/tcp Cluster\nLoadBalancer " +
				"[2001:db8::1]:80/tcp Cluster\nNodePort 30080/tcp Cluster", 0},
		{"17 protocols are apart", service(func(s *lb.Service) {
			s.Ports = append(s.Ports, lb.ServicePort{Name: "dns", Protocol: lb.UDP, Port: 80})
		}), "1 here",
			"ClusterIP 10.96.0.1:80/tcp Cluster\nLoadBalancer 192.0.2.1:80/tcp Cluster\nNodePort 30080/tcp Cluster\nClusterIP " +
				"10.96.0.1:80/udp Reject\nLoadBalancer 192.0.2.1:80/udp Reject", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := New(tt.service, slice(tt.endpoints), here)
			if d := cmp.Diff(tt.want, show(got)); d != "" {
				t.Errorf("frontends (-want +got):\n%s", d)
			}
			if got.HealthPort != tt.health {
				t.Errorf("health port %d, want %d", got.HealthPort, tt.health)
			}
		})
	}
}

// Endpoints that terminate get no new connections while others are ready, but flows to them may go
// on as long as they serve.
func TestServing(t *testing.T) {
	svc, endpoints := service(), slice("1 here, 2 there terminating, 3 here gone, 4 here unready")
	if tcp := New(svc, endpoints, here).Ports[0]; tcp.Serving != nil {
		t.Errorf("TCP: serving %v, and its flows are not cut", tcp.Serving)
	}
	svc.Ports[0].Protocol, endpoints[0].Ports[0].Protocol = lb.UDP, lb.UDP
	p := New(svc, endpoints, here).Ports[0]
	if want := []netip.AddrPort{netip.MustParseAddrPort("192.168.0.1:8080"),
		netip.MustParseAddrPort("192.168.0.2:8080")}; !slices.Equal(p.Serving, want) {
		t.Errorf("serving %v, want %v", p.Serving, want)
	}
	if len(p.Backends.Cluster) != 1 {
		t.Errorf("backends %v", p.Backends.Cluster)
	}
}

func TestContract3WithdrawnVIPsLinger(t *testing.T) {
	before := New(service(), slice("1 here"), here)
	gone := Service{Key: web}
	if got, want := show(gone.WithLingering(Withdrawn(before, gone))),
		"LoadBalancer 192.0.2.1:80/tcp Cluster lingering"; got != want {
		t.Errorf("Service gone: %q, want %q", got, want)
	}
	moved := New(service(func(s *lb.Service) { s.Ingress[0].Addr = addr("192.0.2.2") }), slice("2 here"), here)
	ports := Withdrawn(before, moved)
	got := moved.WithLingering(ports)
	if want := show(moved) + "\nLoadBalancer 192.0.2.1:80/tcp Cluster lingering"; show(got) != want {
		t.Errorf("VIP changed: %s\nwant %s", show(got), want)
	}
	if len(got.VIPs) != 1 || got.VIPs[0] != addr("192.0.2.2") {
		t.Errorf("VIPs %v: a lingering one must not be announced", got.VIPs)
	}
	if to := got.Ports[0].Backends.Cluster[0].Addr.Addr(); to != addr("192.168.0.2") {
		t.Errorf("the lingering VIP goes to %s, which is not the present backend", to)
	}
	if again := show(before.WithLingering(ports)); again != show(before) {
		t.Errorf("the VIP came back: %s", again)
	}
	other := New(service(func(s *lb.Service) { s.Key.Name = "other" }), slice("9 here"), here)
	if left := Yield(ports, other.Serves); len(left) != 0 {
		t.Errorf("another Service has the VIP, and these still linger: %v", left)
	}
	if left := Yield(ports, New(service(func(s *lb.Service) { s.Ports[0].Port = 443 }), nil,
		here).Serves); len(left) != 1 {
		t.Errorf("another Service has another port of the VIP: %v", left)
	}
	if ports := Withdrawn(before, New(service(func(s *lb.Service) { s.Ports[0].Port = 8080 }), slice("1 here"),
		here)); len(ports) != 0 {
		t.Errorf("a port that the Service gave up lingers: %v", ports)
	}
	twice := Withdrawn(Service{Key: web}.WithLingering(ports), Service{Key: web})
	if len(twice) != 0 {
		t.Errorf("what lingers is withdrawn again: %v", twice)
	}
}

// On a node without endpoints, what still comes while routers hear of the policy Local is delivered
// as before; the report says at once that nothing is to come.
func TestContract3PolicyLocalLingersAsCluster(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		now := New(service(dual, local), slice("2 there"), here)
		before := New(service(dual), slice("2 there"), here)
		kept := now.AsCluster()
		if d := cmp.Diff(before.Only(family).Ports, kept.Only(family).Ports, cmpopts.EquateComparable(netip.Addr{},
			netip.AddrPort{})); d != "" {
			t.Errorf("%s: ports (-policy Cluster +kept):\n%s", family, d)
		}
		for _, d := range Report(kept, kept, nil, Path{}) {
			if reason := d.Deliverable(); reason != lb.ReasonNoLocalBackends {
				t.Errorf("%s is deliverable: %q", d.VIP, reason)
			}
		}
		if h := Health(kept, kept, Path{}); h[family] != 0 || len(h) != 2 {
			t.Errorf("health %v", h)
		}
		if !Tightened(before, now) || Tightened(now, before) || Tightened(now, now) || Tightened(Service{}, now) {
			t.Error("wrong about whether the policy has changed")
		}
	}
	same := New(service(local), slice("1 here"), here)
	if d := cmp.Diff(same, same.AsCluster(), cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); d != "" {
		t.Errorf("a node with endpoints changes:\n%s", d)
	}
	none := New(service(local), nil, here)
	if d := cmp.Diff(none, none.AsCluster(), cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); d != "" {
		t.Errorf("a Service without endpoints changes:\n%s", d)
	}
}

func TestReport(t *testing.T) {
	plan := func(endpoints string, change ...func(*lb.Service)) Service {
		return New(service(change...), slice(endpoints), here)
	}
	type counts struct{ localReady, localServing, ready, serving int }
	failed := errors.New("no lock")
	secondPort := func(s *lb.Service) {
		s.Ports = append(s.Ports, lb.ServicePort{Name: "http", Protocol: lb.UDP, Port: 80})
	}
	for _, tt := range []struct {
		name             string
		desired, applied Service
		failure          error
		refused          bool
		want             counts
		deliverable      lb.Reason
		health           int
	}{
		{"confirmed", plan("1 here, 2 there, 3 there", local), plan("1 here, 2 there, 3 there", local), nil, false,
			counts{1, 0, 3, 0}, "", 1},
		{"Contract1: nothing confirmed yet", plan("1 here", local), Service{Key: web}, nil, true, counts{},
			lb.ReasonNotProgrammed, 0},
		{"Contract1: refused by the kernel", plan("1 here", local), Service{Key: web}, failed, true, counts{},
			lb.ReasonNotProgrammed, 0},
		{"a new backend is not there yet", plan("1 here, 2 here", local), plan("1 here", local), nil, false,
			counts{1, 0, 1, 0}, "", 1},
		{"a backend that went does not count although the kernel still has it", plan("1 here", local),
			plan("1 here, 2 here", local), nil, false, counts{1, 0, 1, 0}, "", 1},
		{"the only backend was replaced", plan("2 here", local), plan("1 here", local), nil, false, counts{},
			lb.ReasonNoBackends, 0},
		{"in flight: nothing flaps", plan("1 here, 2 there", local, secondPort), plan("1 here, 2 there", local), nil, false,
			counts{1, 0, 2, 0}, "", 1},
		{"newer rules failed", plan("1 here, 2 here", local), plan("1 here", local), failed, true, counts{},
			lb.ReasonNotProgrammed, 1},
		{"a failure elsewhere in the Service", plan("1 here", local), plan("1 here", local), failed, false,
			counts{1, 0, 1, 0}, "", 1},
		{"a new VIP is not there yet", plan("1 here"),
			plan("1 here", func(s *lb.Service) { s.Ingress[0].Addr = addr("192.0.2.7") }), nil, true, counts{},
			lb.ReasonNotProgrammed, 0},
		{"Contract2: nothing local", plan("2 there", local), plan("2 there", local), nil, false, counts{0, 0, 1, 0},
			lb.ReasonNoLocalBackends, 0},
		{"Contract2: local ones terminate while others are ready", plan("1 here terminating, 2 there", local),
			plan("1 here terminating, 2 there", local), nil, false, counts{0, 1, 1, 0}, lb.ReasonNoLocalBackends, 0},
		{"Contract2: all terminate", plan("1 here terminating, 2 there terminating", local),
			plan("1 here terminating, 2 there terminating", local), nil, false, counts{0, 1, 0, 2}, "", 0},
		{"a local one begins to terminate: same rules, other counts", plan("1 here terminating", local),
			plan("1 here", local), nil, false, counts{0, 1, 0, 1}, "", 0},
		{"policy Cluster", plan("2 there"), plan("2 there"), nil, false, counts{0, 0, 1, 0}, "", 0},
		{"no endpoints", plan(""), plan(""), nil, false, counts{}, lb.ReasonNoBackends, 0},
		{"from Local to Cluster: the kernel still drops", plan("2 there"), plan("2 there", local), nil, false, counts{},
			lb.ReasonNoBackends, 0},
		{"from Cluster to Local: it delivers, though not only here", plan("1 here, 2 there", local), plan("1 here, 2 there"),
			nil, false, counts{1, 0, 2, 0}, "", 0},
		{"no cluster IP of the VIP's family", plan("1 here",
			func(s *lb.Service) { s.ClusterIPs = []netip.Addr{addr("fd00:96::1")} }), Service{Key: web}, nil, true, counts{},
			lb.ReasonNotProgrammed, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := Report(tt.desired, tt.applied, tt.failure, Path{})
			if len(got) != 1 {
				t.Fatalf("%d deliveries", len(got))
			}
			d := got[0]
			if (d.Refusal != nil) != tt.refused || tt.refused && d.Refusal.Reason != lb.ReasonNotProgrammed {
				t.Errorf("refusal %v, want one: %v", d.Refusal, tt.refused)
			}
			if tt.failure != nil && tt.refused && !strings.Contains(d.Refusal.Message, tt.failure.Error()) {
				t.Errorf("refusal %q does not say why", d.Refusal.Message)
			}
			if c := (counts{d.LocalReady, d.LocalServing, d.Ready, d.Serving}); c != tt.want {
				t.Errorf("counts %+v, want %+v", c, tt.want)
			}
			if r := d.Deliverable(); r != tt.deliverable {
				t.Errorf("deliverable %q, want %q", r, tt.deliverable)
			}
			if h := Health(tt.desired, tt.applied, Path{})[lb.IPv4]; h != tt.health {
				t.Errorf("health count %d, want %d", h, tt.health)
			}
		})
	}
}

// A Service that does not get its VIP's port says so; the one that has it says nothing new.
func TestContract11ReportsOfAContest(t *testing.T) {
	claims := NewClaims()
	web, x := New(tenant("shop/web", 1, vip("192.0.2.1")), slice("1 here"), here), New(tenant("dev/x", 9,
		vip("192.0.2.1")), slice("2 here"), here)
	claims.Set(x)
	claims.Set(web)
	web, x = claims.Grant(web), claims.Grant(x)
	if d := Report(web, web, nil, Path{})[0]; d.Deliverable() != "" {
		t.Errorf("the winner: %+v", d)
	}
	d := Report(x, x, nil, Path{})[0]
	if d.Deliverable() != lb.ReasonFrontendInUse || !strings.Contains(d.Refusal.Message, "192.0.2.1:80/tcp") ||
		strings.Contains(d.Refusal.Message, "shop") {
		t.Errorf("the loser: %+v, %v", d, d.Refusal)
	}
}

// Endpoints count by address over all ports: two ports of a pod are one, and a pod that lacks a
// port counts.
func TestContract4HealthCountsPods(t *testing.T) {
	svc := service(local, func(s *lb.Service) {
		s.Ports = append(s.Ports, lb.ServicePort{Name: "https", Protocol: lb.TCP, Port: 443})
	})
	both := []lb.SlicePort{{Name: "http", Protocol: lb.TCP, Port: 8080}, {Name: "https", Protocol: lb.TCP, Port: 8443}}
	p := New(svc, append(slice("1 here, 2 here unready", both...), slice("3 here")...), here)
	if got := Health(p, p, Path{}); got[lb.IPv4] != 2 || len(got) != 1 {
		t.Errorf("counts %v, want 2 for IPv4", got)
	}
	if d := Report(p, p, nil, Path{})[0]; d.LocalReady != 2 || d.Ready != 2 {
		t.Errorf("delivery %+v", d)
	}
	if got := Health(New(service(), slice("1 here"), here), p, Path{}); got != nil {
		t.Errorf("policy Cluster has counts: %v", got)
	}
}

// One family's failure does not touch the other's VIPs.
func TestFamiliesAreReportedApart(t *testing.T) {
	desired := New(service(dual, local), slice("1 here"), here)
	got := Report(desired, desired.Only(lb.IPv4), errors.New("no IPv6"), Path{})
	want := []bool{false, true}
	for i, d := range got {
		if (d.Refusal != nil) != want[i] {
			t.Errorf("%s: refusal %v", d.VIP, d.Refusal)
		}
	}
	if h := Health(desired, desired.Only(lb.IPv4), Path{}); h[lb.IPv4] != 1 || h[lb.IPv6] != 0 || len(h) != 2 {
		t.Errorf("health %v", h)
	}
}

func TestSameRules(t *testing.T) {
	a, b := New(service(dual), slice("1 here"), here), New(service(dual), slice("1 here, 2 here"), here)
	if !SameRules(a, a, lb.IPv6) || SameRules(a, b, lb.IPv6) || SameRules(a, b, lb.IPv4) ||
		SameRules(a, Service{}, lb.IPv4) || !SameRules(a.Only(lb.IPv4), b.Only(lb.IPv4), lb.IPv6) {
		t.Error("wrong")
	}
}

// The order in which the API lists things does not matter.
func TestOrderDoesNotMatter(t *testing.T) {
	svc := service(func(s *lb.Service) {
		s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr("192.0.2.0")}, lb.Ingress{Addr: addr("192.0.2.1")})
	})
	one := New(svc, append(slice("1 here, 2 there"), slice("3 here")...), here)
	slices.Reverse(svc.Ingress)
	two := New(svc, append(slice("3 here, 2 there"), slice("2 there, 1 here")...), here)
	if d := cmp.Diff(one, two, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); d != "" {
		t.Error(d)
	}
}

func TestAffinity(t *testing.T) {
	with := New(service(func(s *lb.Service) { s.AffinityTimeout = time.Hour }), nil, here)
	without := New(service(), nil, here)
	if !with.Affinity || with.AffinityTimeout != time.Hour || SameRules(with, without, lb.IPv4) {
		t.Errorf("%+v, taken for the same as without affinity: %v", with, SameRules(with, without, lb.IPv4))
	}
}
