package plan

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// directWorld is a Service that is forwarded directly, its endpoints on three nodes, and the first node,
// which reaches the second one without a router.
func directWorld() (lb.Service, []lb.Slice, Node) {
	svc := lb.Service{Key: lb.Key{Namespace: "default", Name: "web"}, Type: lb.LoadBalancer, Forwarding: "direct",
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}, ExternalPolicy: lb.Cluster,
		Ports:   []lb.ServicePort{{Name: "t", Protocol: lb.TCP, Port: 80, NodePort: 30080}},
		Ingress: []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.1")}}}
	slice := lb.Slice{Family: lb.IPv4, Ports: []lb.SlicePort{{Name: "t", Protocol: lb.TCP, Port: 8080}}}
	for i, node := range []string{"a", "b", "c"} {
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i), 1}), Node: node,
			Ready: true, Serving: true})
	}
	node := Node{Name: "a", Direct: map[lb.Family]bool{lb.IPv4: true}, Neighbors: map[string][]netip.Addr{
		"b": {netip.MustParseAddr("fd00::2"), netip.MustParseAddr("10.0.0.2")}}}
	return svc, []lb.Slice{slice}, node
}

func TestDirectPlan(t *testing.T) {
	svc, endpoints, node := directWorld()
	s := New(svc, endpoints, node)
	want := map[netip.Addr]netip.Addr{netip.MustParseAddr("10.1.1.1"): netip.MustParseAddr("10.0.0.2")}
	if d := cmp.Diff(want, s.Handed, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" || !s.Direct {
		t.Errorf("direct %v, handed (-want +got):\n%s", s.Direct, d)
	}
	for _, f := range s.Ports[0].Frontends {
		if s.IsDirect(s.Ports[0], f) != (f.Kind == LoadBalancer) {
			t.Errorf("%s: direct %v", f.Kind, s.IsDirect(s.Ports[0], f))
		}
	}
	if s.Scheduler != Maglev {
		t.Errorf("scheduler %s", s.Scheduler)
	}
	other := s
	other.Handed = nil
	if s.Equal(other) || SameRules(s, other, lb.IPv4) {
		t.Error("a plan with which nothing is handed over counts as the same")
	}
	svc.Scheduler = "source-hash"
	if s := New(svc, endpoints, node); s.Scheduler != SourceHash || DirectDraws(svc, s) != "" {
		t.Errorf("scheduler %s: %s", s.Scheduler, DirectDraws(svc, s))
	}
	svc.Scheduler = "rr"
	s = New(svc, endpoints, node)
	if said := DirectDraws(svc, s); s.Scheduler != Maglev || !strings.Contains(said, "nodes use maglev") {
		t.Errorf("scheduler %s: %s", s.Scheduler, DirectDraws(svc, s))
	}
	if got := NotHanded(s, endpoints, node); !strings.Contains(got, "has an address of c; connections") {
		t.Errorf("not handed: %q", got)
	}
	for why, want := range map[Unhanded]string{Unasked: "", NoWay: "has an address of c;",
		Silent: "without an answer through the tunnel: c;", Diverted: "takes elsewhere what is for c;",
		SameAlias: "in the first byte alone: c;", TooMany: "exchanges packets with through the tunnel: c;"} {
		node.Far = map[FarNode]Unhanded{{"c", lb.IPv4}: why, {"c", lb.IPv6}: Silent, {"b", lb.IPv4}: Silent}
		got := NotHanded(s, endpoints, node)
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%d: not handed: %q", why, got)
		}
	}
	node.Neighbors["c"] = []netip.Addr{netip.MustParseAddr("10.0.0.3")}
	if got := NotHanded(New(svc, endpoints, node), endpoints, node); got != "" {
		t.Errorf("not handed: %q", got)
	}
}

// spread puts endpoints on so many nodes.
func spread(n int) func(*lb.Service, []lb.Slice, *Node) {
	return func(_ *lb.Service, all []lb.Slice, _ *Node) {
		first := all[0].Endpoints[0]
		all[0].Endpoints = nil
		for i := range n {
			first.Addr, first.Node = first.Addr.Next(), fmt.Sprint("n", i)
			all[0].Endpoints = append(all[0].Endpoints, first)
		}
	}
}

func TestDirectRefused(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*lb.Service, []lb.Slice, *Node)
		want   string
	}{
		"as it is":      {func(*lb.Service, []lb.Slice, *Node) {}, ""},
		"not asked for": {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.Forwarding = "" }, ""},
		"unknown value": {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.Forwarding = "dsr" }, `"dsr" is not direct`},
		"no VIPs": {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.Type = lb.NodePort },
			"only the addresses of Services of type LoadBalancer"},
		"policy Local": {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.ExternalPolicy = lb.Local },
			"it does nothing with externalTrafficPolicy Local"},
		"affinity": {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.AffinityTimeout = time.Hour },
			"landfall.dev/scheduler: source-hash keeps a client at its backend"},
		"relay": {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.Relay = "true" }, "connections end at the relay"},
		"SCTP":  {func(s *lb.Service, _ []lb.Slice, _ *Node) { s.Ports[0].Protocol = lb.SCTP }, "only TCP and UDP"},
		"a hint at one endpoint, which no node follows": {func(_ *lb.Service, all []lb.Slice, _ *Node) {
			all[0].Endpoints[1].ForZones = []string{"z"}
		}, ""},
		"hints of two kinds": {func(_ *lb.Service, all []lb.Slice, _ *Node) {
			for i := range all[0].Endpoints {
				all[0].Endpoints[i].ForZones = []string{"z"}
			}
			all[0].Endpoints[0].ForZones, all[0].Endpoints[0].ForNodes = nil, []string{"a"}
		}, ""},
		"hints": {func(_ *lb.Service, all []lb.Slice, _ *Node) {
			for i := range all[0].Endpoints {
				all[0].Endpoints[i].ForZones = []string{"z"}
			}
		}, "spec.trafficDistribution"},
		"hints for nodes, of one port": {func(_ *lb.Service, all []lb.Slice, _ *Node) {
			for i := range all[0].Endpoints {
				all[0].Endpoints[i].ForNodes = []string{"a"}
			}
		}, "spec.trafficDistribution"},
		"hints at one of two ports": {func(s *lb.Service, all []lb.Slice, _ *Node) {
			all[0].Ports = append(all[0].Ports, lb.SlicePort{Name: "u", Protocol: lb.UDP, Port: 53})
			for i := range all[0].Endpoints {
				all[0].Endpoints[i].ForZones = []string{"z"}
			}
		}, "spec.trafficDistribution"},
		"as many nodes as a ring has": {spread(lb.MaxRing + 1), ""},
		"one more":                    {spread(lb.MaxRing + 2), "endpoints are on 18 nodes"},
		"a proxy that cannot":         {func(_ *lb.Service, _ []lb.Slice, n *Node) { n.Direct = nil }, "needs --direct-forwarding, nftables mode"},
		"a proxy that cannot, whatever the endpoints are": {func(_ *lb.Service, all []lb.Slice, n *Node) {
			n.Direct = nil
			for i := range all[0].Endpoints {
				all[0].Endpoints[i].ForZones = []string{"z"}
			}
		}, "needs --direct-forwarding, nftables mode"},
		"not in the second family": {func(s *lb.Service, _ []lb.Slice, _ *Node) {
			s.ClusterIPs = append(s.ClusterIPs, netip.MustParseAddr("fd00::1"))
		}, "needs --direct-forwarding, nftables mode"},
	} {
		svc, endpoints, node := directWorld()
		test.change(&svc, endpoints, &node)
		got := DirectRefused(svc, endpoints, node)
		if (got == "") != (test.want == "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
		if s := New(svc, endpoints, node); s.Direct != (got == "" && svc.Forwarding != "") {
			t.Errorf("%s: direct %v", name, s.Direct)
		}
	}
}

// While its endpoints alone keep a Service from being forwarded directly, as those of a roll-out may for a moment, they
// are chosen as before: a flow of UDP has no other memory on the nodes that masquerade it then.
func TestContract1EndpointsThatRefuseDirectForwardingMoveNoFlow(t *testing.T) {
	for what, change := range map[string]func(*lb.Service, []lb.Slice, *Node){
		"too many nodes": spread(lb.MaxRing + 2),
		"hints": func(_ *lb.Service, all []lb.Slice, _ *Node) {
			for i := range all[0].Endpoints {
				all[0].Endpoints[i].ForZones = []string{"z"}
			}
		},
	} {
		svc, endpoints, node := directWorld()
		before := New(svc, endpoints, node)
		change(&svc, endpoints, &node)
		if s := New(svc, endpoints, node); !before.Direct || s.Direct || s.Scheduler != before.Scheduler {
			t.Errorf("%s: direct %v, then %v; by %s, then %s", what, before.Direct, s.Direct, before.Scheduler, s.Scheduler)
		}
	}
}

// Hints decide for each port over all slices that have it: one whose ready endpoints have none has all nodes choose
// among the same, and one without ready endpoints says nothing.
func TestHintsOfSeveralSlices(t *testing.T) {
	port := func(name string) lb.SlicePort { return lb.SlicePort{Name: name, Protocol: lb.TCP, Port: 80} }
	ready, gone := lb.Endpoint{Ready: true}, lb.Endpoint{}
	zoned, noded := lb.Endpoint{Ready: true, ForZones: []string{"z"}}, lb.Endpoint{Ready: true, ForNodes: []string{"n"}}
	of := func(ports []lb.SlicePort, endpoints ...lb.Endpoint) lb.Slice {
		return lb.Slice{Family: lb.IPv4, Ports: ports, Endpoints: endpoints}
	}
	a, b := []lb.SlicePort{port("a")}, []lb.SlicePort{port("a"), port("b")}
	other := of(a, ready)
	other.Family = lb.IPv6
	for name, test := range map[string]struct {
		slices []lb.Slice
		want   bool
	}{
		"none":                                    {nil, false},
		"no endpoint is ready":                    {[]lb.Slice{of(a, gone)}, false},
		"all":                                     {[]lb.Slice{of(a, zoned, gone), of(a), of(a, zoned)}, true},
		"not in one slice":                        {[]lb.Slice{of(a, zoned), of(a, zoned, ready)}, false},
		"not in one slice, the other way round":   {[]lb.Slice{of(a, ready), of(a, zoned)}, false},
		"of two kinds in two slices":              {[]lb.Slice{of(a, zoned), of(a, noded)}, false},
		"of one of two ports":                     {[]lb.Slice{of(b, noded), of(a, ready)}, true},
		"of the same port in another family":      {[]lb.Slice{of(a, zoned), other}, true},
		"a slice without a ready one does not do": {[]lb.Slice{of(a, gone), of(a, noded)}, true},
	} {
		if got := hinted(test.slices); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Contract clause 11: what a node asks of the slices of one Service grows with their ports and with their endpoints,
// and not with the one times the other. These have a billion pairs, in slices as the API server takes them.
func TestContract11HintsCostPortsAndEndpoints(t *testing.T) {
	svc, endpoints, node := directWorld()
	slice := endpoints[0]
	slice.Ports, slice.Endpoints = nil, nil
	for i := range 20_000 {
		slice.Ports = append(slice.Ports, lb.SlicePort{Name: fmt.Sprint("p", i), Protocol: lb.TCP, Port: uint16(i + 1)})
	}
	for i := range 1000 {
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}),
			Ready: true, ForZones: []string{"z"}})
	}
	got := DirectRefused(svc, slices.Repeat([]lb.Slice{slice}, 50), node)
	if !strings.Contains(got, "spec.trafficDistribution") {
		t.Errorf("refused for %q", got)
	}
}

func TestNeighbors(t *testing.T) {
	nodes := map[string]lb.Node{
		"self":        {Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
		"self before": {Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
		"near":        {Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")}},
		"far":         {Addresses: []netip.Addr{netip.MustParseAddr("10.0.1.2")}},
		"host":        {Addresses: []netip.Addr{netip.MustParseAddr("10.9.9.9")}},
	}
	near, far := Neighbors("self", nodes, []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24"),
		netip.MustParsePrefix("10.9.9.9/32")})
	addr := netip.MustParseAddr
	compare := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
	if d := cmp.Diff(map[string][]netip.Addr{"near": {addr("10.0.0.2")}}, near, compare); d != "" {
		t.Errorf("near (-want +got):\n%s", d)
	}
	if d := cmp.Diff(map[string][]netip.Addr{"near": {addr("fd00::2")}, "far": {addr("10.0.1.2")},
		"host": {addr("10.9.9.9")}}, far, compare); d != "" {
		t.Errorf("far (-want +got):\n%s", d)
	}
}

// Packets go to a neighbor as they are, to a node behind a router through the tunnel if it answers there, and to
// others not, nor to two that a node could not tell apart: each with its reason.
func TestReached(t *testing.T) {
	addr := netip.MustParseAddr
	near := map[string][]netip.Addr{"near": {addr("10.0.0.2")}}
	far := map[string][]netip.Addr{"near": {addr("fd00::2")}, "far": {addr("10.0.1.2"), addr("fd00::9"), addr("10.0.1.9")},
		"far before": {addr("10.0.1.2")}, "silent": {addr("10.0.1.3")}, "twin": {addr("10.0.1.4")},
		"other twin": {addr("11.0.1.4")}}
	states := map[netip.Addr]Unhanded{addr("10.0.1.3"): Silent, addr("10.0.1.4"): TooMany, addr("fd00::9"): Diverted,
		addr("10.0.1.9"): Unasked}
	got, left := Reached(near, far, func(a netip.Addr) Unhanded { return states[a] }, func(a netip.Addr) netip.Addr {
		if a.Is4() {
			last := a.As4()
			return netip.AddrFrom4([4]byte{255, last[1], last[2], last[3]})
		}
		return addr("fd11::" + strings.TrimPrefix(a.String(), "fd00::"))
	})
	want := map[string][]netip.Addr{"near": {addr("10.0.0.2"), addr("fd11::2")}, "far": {addr("255.0.1.2")},
		"far before": {addr("255.0.1.2")}}
	if d := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if d := cmp.Diff(map[FarNode]Unhanded{{"near", lb.IPv6}: Handed, {"far", lb.IPv4}: Handed, {"far", lb.IPv6}: Diverted,
		{"far before", lb.IPv4}: Handed, {"silent", lb.IPv4}: Silent, {"twin", lb.IPv4}: SameAlias,
		{"other twin", lb.IPv4}: SameAlias}, left); d != "" {
		t.Errorf("why not (-want +got):\n%s", d)
	}
	if len(near["near"]) != 1 {
		t.Errorf("it changes what it is given: %v", near)
	}
}

// Each family gets half of the places in the tunnel, and what the other leaves; always the first addresses.
func TestContract11FamiliesShareTheTunnel(t *testing.T) {
	for _, test := range []struct{ of4, of6, want4, want6 int }{
		{0, 0, 0, 0}, {3, 3, 3, 3}, {300, 0, 256, 0}, {0, 300, 0, 256}, {300, 300, 128, 128}, {300, 10, 246, 10},
		{10, 300, 10, 246}, {128, 300, 128, 128}, {127, 300, 127, 129},
	} {
		far := map[string][]netip.Addr{}
		add := func(name string, addr netip.Addr, n int) {
			for i := range n {
				node := fmt.Sprint(name, i)
				far[node] = append(far[node], addr)
				addr = addr.Next()
			}
		}
		first4, first6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
		add("n", first4, test.of4)
		add("n", first6, test.of6)
		var got4, got6 int
		for _, addr := range Share(far, 256) {
			switch addr {
			case first4:
				first4 = first4.Next()
				got4++
			case first6:
				first6 = first6.Next()
				got6++
			}
		}
		if n := len(Share(far, 256)); got4 != test.want4 || got6 != test.want6 || n != got4+got6 {
			t.Errorf("of %d and %d it takes %d and %d in order, %d in all", test.of4, test.of6, got4, got6, n)
		}
	}
}

// A node that knows the networks of another one knows whether that leaves it out.
func TestANodeKnowsWhoLeavesItOut(t *testing.T) {
	const most = 16
	draw := rand.New(rand.NewPCG(1, 2))
	out := 0
	for range 300 {
		nodes, networks := map[string]lb.Node{}, map[string][]netip.Prefix{}
		var all []netip.Addr
		for i := range 1 + draw.IntN(40) {
			rack, name := byte(draw.IntN(6)), fmt.Sprint("node-", i)
			of4 := netip.AddrFrom4([4]byte{10, 0, rack, byte(i)})
			of6 := netip.AddrFrom16([16]byte{0: 0xfd, 5: rack, 15: byte(i)})
			n := lb.Node{Name: name}
			networks[name] = []netip.Prefix{netip.PrefixFrom(of4, 24), netip.PrefixFrom(of6, 64)}
			if draw.IntN(4) > 0 {
				n.Addresses = append(n.Addresses, of4)
			}
			if draw.IntN(3) > 0 {
				n.Addresses = append(n.Addresses, of6)
			}
			nodes[name] = n
			all = append(all, n.Addresses...)
		}
		for name, node := range nodes {
			near, far := Neighbors(name, nodes, networks[name])
			share := Share(far, most)
			for other, of := range nodes {
				for _, self := range of.Addresses {
					at := slices.IndexFunc(node.Addresses, func(a netip.Addr) bool { return lb.FamilyOf(a) == lb.FamilyOf(self) })
					if other == name || at < 0 || slices.Contains(near[other], self) {
						continue
					}
					want := !slices.Contains(share, self)
					if got := IsLeftOut(self, networks[name], all, most); got != want {
						t.Fatalf("%s leaves %s out: %v, want %v; of %v", node.Addresses[at], self, got, want, all)
					} else if got {
						out++
					}
				}
			}
		}
	}
	if out == 0 {
		t.Error("no node is ever left out")
	}
}
