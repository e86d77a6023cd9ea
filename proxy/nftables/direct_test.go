package nftables

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/trace"
)

var directVIP = map[lb.Family]netip.Addr{lb.IPv4: addr("198.51.100.1"), lb.IPv6: addr("2001:db8::1")}

// directMembers are n endpoints on as many nodes as there are, and the nodes.
func directMembers(family lb.Family, random *rand.Rand, n, nodes int) ([]lb.Endpoint, map[string]lb.Node) {
	first, node := addr("10.1.0.0"), addr("10.0.0.0")
	if family == lb.IPv6 {
		first, node = addr("fd00:1::"), addr("fd00::")
	}
	all := map[string]lb.Node{}
	for i := range nodes {
		node = node.Next()
		all[fmt.Sprint("node-", i)] = lb.Node{Addresses: []netip.Addr{node}}
	}
	var endpoints []lb.Endpoint
	for range n {
		for range 1 + random.IntN(5) {
			first = first.Next()
		}
		endpoints = append(endpoints, lb.Endpoint{Addr: first, Ready: true, Serving: true,
			Node: fmt.Sprint("node-", random.IntN(nodes))})
	}
	return endpoints, all
}

// directService plans a Service with these endpoints, in any order and in as many slices, for a node.
func directService(family lb.Family, random *rand.Rand, self string, endpoints []lb.Endpoint,
	nodes map[string]lb.Node) plan.Service {
	svc := lb.Service{Key: lb.Key{Namespace: "default", Name: "web"}, Type: lb.LoadBalancer, Forwarding: "direct",
		ClusterIPs:     []netip.Addr{cases.WorldOf(family).ClusterIP},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		Ports:   []lb.ServicePort{{Protocol: lb.TCP, Port: 80, NodePort: 30080}},
		Ingress: []lb.Ingress{{Addr: directVIP[family]}}}
	shuffled := slices.Clone(endpoints)
	random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	var all []lb.Slice
	for chunk := range slices.Chunk(shuffled, 1+random.IntN(20)) {
		all = append(all, lb.Slice{Key: lb.Key{Namespace: "default", Name: fmt.Sprint("web-", len(all))}, Service: svc.Key,
			Family: family, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}, Endpoints: chunk})
	}
	networks := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16"), netip.MustParsePrefix("fd00::/64")}
	near, _ := plan.Neighbors(self, nodes, networks)
	return plan.New(svc, all, plan.Node{Name: self, Direct: map[lb.Family]bool{family: true}, Neighbors: near})
}

// directTable returns what a node's kernel does with packets for the VIP, by number.
func directTable(t *testing.T, family lb.Family, s plan.Service) (backends, handed map[uint32]address,
	near map[address]bool) {
	t.Helper()
	backends, handed, near = map[uint32]address{}, map[uint32]address{}, map[address]bool{}
	at := frontend{addr: addressOf(directVIP[family]), port: 80, protocol: tcp}
	rendered := newRenderer(family, seedConfig).service(s.Key, s)
	var group uint32
	for _, p := range rendered.parts {
		for _, e := range p.entries {
			if e.set == setDirect && e.frontend == at {
				group = e.to.group
			} else if e.set == setDirect {
				t.Errorf("%+v is forwarded directly", e.frontend)
			}
		}
	}
	for _, p := range rendered.parts {
		for _, e := range p.entries {
			switch {
			case e.group != group || group == 0:
			case e.set == setBackends:
				backends[e.number] = e.to.addr
			case e.set == setHanded:
				handed[e.number] = e.to.addr
			case e.set == setNear:
				near[e.source] = true
			}
		}
	}
	return backends, handed, near
}

// Nodes with the same members have the same table, whatever order they have heard of these in, and each
// hands a packet to the node of its backend: all send what one client sends to one backend.
func TestDirectTablesAreEqual(t *testing.T) {
	t.Parallel()
	for seed := range uint64(seeds.Of(15, 60)) {
		random := rand.New(rand.NewPCG(seed, 1))
		family := []lb.Family{lb.IPv4, lb.IPv6}[seed%2]
		endpoints, nodes := directMembers(family, random, 1+random.IntN(60), 1+random.IntN(8))
		of := map[address]string{}
		for _, ep := range endpoints {
			of[addressOf(ep.Addr)] = ep.Node
		}
		var first map[uint32]address
		for self := range nodes {
			backends, handed, near := directTable(t, family, directService(family, random, self, endpoints, nodes))
			if first == nil {
				first = backends
			}
			if !maps.Equal(first, backends) || len(backends) == 0 {
				t.Fatalf("seed %d: %s has another table than the node before", seed, self)
			}
			for number, backend := range backends {
				to, is := handed[number]
				switch node := of[backend]; {
				case near[backend] != (node == self), is == (node == self):
					t.Fatalf("seed %d: on %s, number %d is for a backend on %s: handed %v, near %v", seed, self, number, node, is,
						near[backend])
				case is && to != addressOf(nodes[node].Addresses[0]):
					t.Fatalf("seed %d: on %s, number %d is handed to %s, and not to %s", seed, self, number, to.ip(family), node)
				}
			}
		}
	}
}

// When a backend comes or goes, its own share of the connections moves, and few of those of the others. The
// figures are those of docs/design/direct.md.
func TestDirectDisruption(t *testing.T) {
	t.Parallel()
	for _, n := range []int{3, 5, 10, 20, 50, 100, 400} {
		moved, size, gone, least, most := 0, 0, 0, 1.0, 0.0
		const rounds = 10
		for seed := range uint64(rounds) {
			random := rand.New(rand.NewPCG(seed, uint64(n)))
			endpoints, nodes := directMembers(lb.IPv4, random, n+1, 3)
			table := func(without ...int) map[uint32]address {
				var all []lb.Endpoint
				for i, ep := range endpoints {
					if !slices.Contains(without, i) {
						all = append(all, ep)
					}
				}
				backends, _, _ := directTable(t, lb.IPv4, directService(lb.IPv4, random, "node-0", all, nodes))
				return backends
			}
			before, after, fewer := table(n), table(n-1), table(n-1, n)
			counts := map[address]int{}
			for number, b := range before {
				counts[b]++
				if b == addressOf(endpoints[n-1].Addr) {
					continue
				}
				if after[number] != b {
					moved++
				}
				if fewer[number] != b {
					gone++
				}
			}
			size += len(before) - counts[addressOf(endpoints[n-1].Addr)]
			for _, count := range counts {
				share := float64(count) / float64(len(before)) * float64(n)
				least, most = min(least, share), max(most, share)
			}
		}
		left, part := float64(gone)/float64(size), float64(moved)/float64(size)
		t.Logf("of %d backends one goes: %.1f %% of the connections of the others move; one replaced: %.1f %%; shares are "+
			"%.3f to %.3f of an equal one", n, 100*left, 100*part, least, most)
		if left > 0.06 || part > 0.7/math.Sqrt(float64(n)) || least < 0.95 || most > 1.05 {
			t.Errorf("%d backends: %.1f %% of the connections of others move if one goes, %.1f %% if one is replaced; shares "+
				"are %.3f to %.3f", n, 100*left, 100*part, least, most)
		}
	}
}

// When two nodes crash at once, all others come to one table, in whatever order they hear of it: what is left of the
// backends has its old places, but for few, and each node hands to living ones only. The figures are those of
// docs/design/direct.md.
func TestDirectTwoNodesCrash(t *testing.T) {
	t.Parallel()
	for _, n := range []int{4, 5, 10, 17} {
		own, moved, size := 0, 0, 0
		for seed := range uint64(10) {
			random := rand.New(rand.NewPCG(seed, uint64(n)))
			family := []lb.Family{lb.IPv4, lb.IPv6}[seed%2]
			endpoints, nodes := directMembers(family, random, 3*n, n)
			of := map[address]string{}
			for i := range endpoints {
				endpoints[i].Node = fmt.Sprint("node-", i%n)
				of[addressOf(endpoints[i].Addr)] = endpoints[i].Node
			}
			table := func(self string, dead ...string) (backends, handed map[uint32]address) {
				lost := map[string]bool{}
				for _, node := range dead {
					lost[node] = true
				}
				left := plan.Without([]lb.Slice{{Family: family, Endpoints: endpoints}}, lost)[0].Endpoints
				backends, handed, _ = directTable(t, family, directService(family, random, self, left, nodes))
				return backends, handed
			}
			a, b := fmt.Sprint("node-", n-1), fmt.Sprint("node-", n-2)
			before, _ := table("node-0")
			after, _ := table("node-0", a, b)
			for i := range n - 2 {
				self := fmt.Sprint("node-", i)
				backends, handed := table(self, []string{a, b}[i%2], []string{b, a}[i%2])
				if !maps.Equal(backends, after) {
					t.Fatalf("seed %d: %s of %d nodes has another table than node-0", seed, self, n)
				}
				for number, backend := range backends {
					node := of[backend]
					to, is := handed[number]
					if node == a || node == b || is == (node == self) || is && to != addressOf(nodes[node].Addresses[0]) {
						t.Fatalf("seed %d: %s hands number %d, for a backend on %s, to %s", seed, self, number, node, to.ip(family))
					}
				}
			}
			for number, backend := range before {
				switch node := of[backend]; {
				case node == a || node == b:
					own++
				case after[number] != backend:
					moved++
					fallthrough
				default:
					size++
				}
			}
		}
		share, part := float64(own)/float64(own+size), float64(moved)/float64(size)
		t.Logf("of %d nodes with 3 backends each, 2 crash: %.1f %% of the connections were theirs, and %.1f %% of those of the "+
			"others move", n, 100*share, 100*part)
		if part > 0.15 || share < 1.9/float64(n) || share > 2.1/float64(n) {
			t.Errorf("of %d nodes, 2 crash: %.1f %% of the connections were theirs, %.1f %% of the others move", n, 100*share,
				100*part)
		}
	}
}

// What becomes of a packet for the VIP, by who sends it: clients' packets are handed to the backend's
// node, or translated, with the client's address where the backend is here; those of pods and of the node
// are masqueraded.
func TestDirectWalk(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		random := rand.New(rand.NewPCG(1, 1))
		endpoints, nodes := directMembers(family, random, 6, 3)
		for i := range endpoints {
			endpoints[i].Node = fmt.Sprint("node-", i%3)
		}
		far := maps.Clone(nodes)
		delete(far, "node-2") // no packet is handed there
		s := directService(family, random, "node-0", endpoints, far)
		rendered := newRenderer(family, seedConfig).service(s.Key, s)
		own := nodes["node-0"].Addresses
		config := seedConfig
		config.VRFInterfaces = []string{"up0"}
		walk := newWalker(t, newRuleset(family, config, neededBy(rendered)), own, rendered)
		client, pod := addr("203.0.113.1"), addr("192.168.3.3")
		if family == lb.IPv6 {
			client, pod = addr("2001:db8:1::1"), addr("fd00:10:0:3::3")
		}
		ends := map[string]int{}
		for port := uint16(40000); port < 40200; port++ {
			at := netip.AddrPortFrom(directVIP[family], 80)
			for who, src := range map[string]netip.Addr{"client": client, "in a VRF": client, "pod": pod, "node": own[0]} {
				p := packet{src: netip.AddrPortFrom(src, port), dst: at, in: "eth0", protocol: tcp}
				switch who {
				case "node":
					p.in = ""
				case "in a VRF":
					p.in = "up0"
				}
				shares, masqueraded := walk.fate(p)
				for end := range shares {
					if end != "drop" {
						i := slices.IndexFunc(endpoints, func(ep lb.Endpoint) bool {
							return netip.AddrPortFrom(ep.Addr, 8080).String() == end
						})
						end = "to an endpoint of " + endpoints[i].Node
					}
					ends[fmt.Sprintf("%s: %s, masqueraded %v", who, end, masqueraded)]++
				}
			}
		}
		var got []string
		for end, n := range ends {
			if n < 30 {
				t.Errorf("%s: only %d times %s", family, n, end)
			}
			got = append(got, end)
		}
		slices.Sort(got)
		want := []string{"client: drop, masqueraded false", // a copy is handed over
			"client: to an endpoint of node-0, masqueraded false", "client: to an endpoint of node-2, masqueraded true",
			"in a VRF: to an endpoint of node-0, masqueraded false", "in a VRF: to an endpoint of node-1, masqueraded true",
			"in a VRF: to an endpoint of node-2, masqueraded true",
			"node: to an endpoint of node-0, masqueraded true", "node: to an endpoint of node-1, masqueraded true",
			"node: to an endpoint of node-2, masqueraded true", "pod: to an endpoint of node-0, masqueraded true",
			"pod: to an endpoint of node-1, masqueraded true", "pod: to an endpoint of node-2, masqueraded true"}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: (-want +got)\n%s", family, d)
		}
	}
}

// A TTL by which nodes mark packets counts only in frames of nodes: a client that chooses one is handed on
// as others are, within its source ranges. What goes round between nodes that do not know one another ends,
// as each takes 1 from the TTL. Copies leave with the mark, and without a priority.
func TestDirectMarksAreOfNodes(t *testing.T) {
	t.Parallel()
	node, router := lb.MAC{2, 0, 0, 0, 0, 1}, lb.MAC{2, 0, 0, 0, 0, 2}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		random := rand.New(rand.NewPCG(1, 1))
		endpoints, nodes := directMembers(family, random, 6, 3)
		for i := range endpoints {
			endpoints[i].Node = fmt.Sprint("node-", 1+i%2)
		}
		s := directService(family, random, "node-0", endpoints, nodes)
		s.Senders = []lb.MAC{node}
		rendered := newRenderer(family, seedConfig).service(s.Key, s)
		walk := newWalker(t, newRuleset(family, seedConfig, neededBy(rendered)), nodes["node-0"].Addresses, rendered)
		client := addr("203.0.113.1")
		if family == lb.IPv6 {
			client = addr("2001:db8:1::1")
		}
		for _, test := range []struct {
			ttl    uint8
			sender lb.MAC
			want   trace.Verdict
			left   uint8
		}{
			{64, router, trace.Drop, lb.HandedTTL + 1},
			{64, node, trace.Drop, lb.HandedTTL + 1}, // a router that is a node
			{lb.HandedTTL + 1, router, trace.Drop, lb.HandedTTL + 1},
			{lb.LeastMovedTTL - 1, router, trace.Drop, lb.HandedTTL + 1},
			{lb.HandedTTL, router, trace.Drop, lb.HandedTTL},
			{200, router, trace.Drop, 200},
			{lb.LeastMovedTTL + 1, router, trace.Drop, lb.LeastMovedTTL + 1},
			{lb.HandedTTL, node, trace.Accept, lb.HandedTTL},
			{200, node, trace.Accept, 200},
			{lb.LeastMovedTTL, node, trace.Accept, lb.LeastMovedTTL},
			{1, router, trace.Accept, 1},
		} {
			p := trace.Packet{Source: netip.AddrPortFrom(client, 40000), Destination: netip.AddrPortFrom(directVIP[family], 80),
				Interface: "eth0", Protocol: uint8(tcp), TTL: test.ttl, Sender: test.sender}
			ends := walk.Hook(unix.NF_INET_PRE_ROUTING, "hand", trace.Way{Packet: p, Chance: 1})
			if len(ends) != 1 || ends[0].Verdict != test.want || ends[0].TTL != test.left || ends[0].Priority != 0 {
				t.Errorf("%s: TTL %d from %v: %+v", family, test.ttl, test.sender, ends)
				continue
			}
			steps := fmt.Sprint(ends[0].Steps())
			if copied := strings.Contains(steps, "send a copy"); copied != (test.want == trace.Drop) {
				t.Errorf("%s: TTL %d from %v: %s", family, test.ttl, test.sender, steps)
			}
		}
		p := trace.Packet{Source: netip.AddrPortFrom(client, 40000), Destination: netip.AddrPortFrom(directVIP[family], 80),
			Interface: "eth0", Protocol: uint8(tcp), TTL: lb.LeastMovedTTL, Sender: router}
		ends := walk.Hook(unix.NF_INET_PRE_ROUTING, "hand", trace.Way{Packet: p, Chance: 1})
		if len(ends) != 1 || ends[0].Verdict != trace.Drop || strings.Contains(fmt.Sprint(ends[0].Steps()), "send a copy") {
			t.Errorf("%s: what goes round does not end: %+v", family, ends)
		}
	}
}

// A ruleset has no rule for direct forwarding as long as no Service asks for it, and what is handed leaves
// with a TTL at which no node hands it on.
func TestDirectRulesAreThereWhenNeeded(t *testing.T) {
	without := newRuleset(lb.IPv4, seedConfig, nil)
	for _, c := range without.chains {
		for _, r := range c.rules {
			for _, e := range r.Exprs {
				if _, dup := e.(*expr.Dup); dup {
					t.Errorf("chain %s hands packets over", c.name)
				}
			}
		}
	}
	with := newRuleset(lb.IPv4, seedConfig, needs{{set: setDirect}})
	if _, ok := with.chain(chainHand); !ok || len(with.chains) != len(without.chains)+5 {
		t.Errorf("%d chains, %d without", len(with.chains), len(without.chains))
	}
}
