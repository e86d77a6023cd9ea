package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/across"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// newDirectBench returns a proxy that can hand packets over, and a Service with policy Cluster that asks
// for it, with an endpoint here and one on each of three other nodes, of which the last is behind a router.
func newDirectBench(t *testing.T) *bench {
	b := newBench(t, func(s *settings) {
		s.direct, s.drain = map[lb.Family]bool{lb.IPv4: true}, 0
		s.pods = plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}}
	})
	b.put("web", "198.51.100.1", "10.0.0.1")
	all, _ := b.slices.Get(key("web"))
	for i, address := range []string{"172.31.0.2", "172.31.0.3", "172.32.0.4"} {
		node := fmt.Sprint("node-", i+2)
		b.nodes.Set(node, lb.Node{Name: node, Addresses: []netip.Addr{netip.MustParseAddr(address)}})
		all[0].Endpoints = append(all[0].Endpoints, lb.Endpoint{Addr: netip.MustParseAddr(fmt.Sprint("10.0.0.", i+2)),
			Node: node, Ready: true, Serving: true})
	}
	b.slices.Set(key("web"), all)
	b.direct("web", "direct")
	b.synced()
	return b
}

// direct sets the annotation of a Service, and policy Cluster.
func (b *bench) direct(name, value string) {
	svc, _ := b.services.Get(key(name))
	svc.Forwarding, svc.ExternalPolicy = value, lb.Cluster
	b.services.Set(key(name), svc)
	b.mark(key(name))
}

func (b *bench) wantRing(what, want string) {
	b.t.Helper()
	var got []string
	for _, addr := range b.rescue.wanted[netip.MustParseAddr("198.51.100.1")].Ring {
		got = append(got, addr.String())
	}
	if text := strings.Join(got, " "); text != want {
		b.t.Errorf("%s: the ring is %q, want %q", what, text, want)
	}
}

// The nodes with endpoints may hold connections to a VIP that is forwarded directly, beside those that the
// speaker names: they are its ring, as long as it is.
func TestDirectNodesAreInTheRing(t *testing.T) {
	b := newDirectBench(t)
	vip := netip.MustParseAddr("198.51.100.1")
	b.update = lb.FeedUpdate{Previous: map[netip.Addr][]netip.Addr{vip: {netip.MustParseAddr("172.31.0.9")}}, Number: 1}
	b.run()
	b.wantRing("at first", "172.31.0.2 172.31.0.3 172.31.0.9 172.32.0.4")
	if s := b.rules.wanted[key("web")]; !s.Direct || len(s.Handed) != 2 {
		t.Errorf("direct %v, handed %v", s.Direct, s.Handed)
	}
	all, _ := b.slices.Get(key("web"))
	all[0].Endpoints = append([]lb.Endpoint(nil), all[0].Endpoints...)
	all[0].Endpoints[1].Ready = false // its connections may go on
	all[0].Endpoints = append(all[0].Endpoints[:2], all[0].Endpoints[3])
	b.slices.Set(key("web"), all)
	b.mark(key("web"))
	b.runAlone()
	b.wantRing("without an endpoint on node 3", "172.31.0.2 172.31.0.3 172.31.0.9 172.32.0.4")
	b.clock = b.clock.Add(lb.FlowMemory)
	b.runAlone()
	b.wantRing("an hour later", "172.31.0.2 172.31.0.9 172.32.0.4")
	if !slices.Equal(b.rescue.handed, []int{7}) {
		t.Errorf("packets are handed over here from the interfaces %v", b.rescue.handed)
	}
	b.update = lb.FeedUpdate{Previous: map[netip.Addr][]netip.Addr{vip: {}}, Number: 2,
		Ring: map[netip.Addr][]netip.Addr{vip: {netip.MustParseAddr("172.31.0.0"), netip.MustParseAddr("172.31.0.8")}}}
	b.run()
	b.wantRing("with routers", "172.31.0.2 172.31.0.8 172.31.0.9 172.32.0.4 172.31.0.0")
	b.direct("web", "")
	b.runAlone()
	b.wantRing("not forwarded directly any more", "172.31.0.2 172.31.0.8 172.31.0.9 172.32.0.4 172.31.0.0")
	b.clock = b.clock.Add(lb.FlowMemory - time.Minute)
	b.direct("web", "direct")
	if b.runAlone(); len(b.proxy.direct.due) > 0 {
		t.Errorf("all nodes have endpoints again, and due is %+v", b.proxy.direct.due)
	}
	b.clock = b.clock.Add(time.Minute)
	b.runAlone()
	b.wantRing("again, in time", "172.31.0.2 172.31.0.8 172.31.0.9 172.32.0.4 172.31.0.0")
	all[0].Endpoints = append([]lb.Endpoint(nil), all[0].Endpoints...)
	for i := range all[0].Endpoints {
		all[0].Endpoints[i].ForZones = []string{"z"}
	}
	b.slices.Set(key("web"), all)
	b.mark(key("web"))
	b.runAlone()
	b.wantRing("hints", "172.31.0.2 172.31.0.8 172.31.0.9 172.32.0.4 172.31.0.0")
	if b.rules.wanted[key("web")].Direct {
		t.Error("it is forwarded directly with hints")
	}
	b.clock = b.clock.Add(lb.FlowMemory)
	b.runAlone()
	b.wantRing("hints for an hour", "172.31.0.0 172.31.0.8")
	if len(b.proxy.direct.holders)+len(b.proxy.direct.held)+len(b.proxy.direct.due)+len(b.rescue.handed) > 0 {
		t.Errorf("nothing is held, and there is %+v", b.proxy.direct)
	}
	b.rules.confirm()
	b.delete("web")
	b.run()
	if len(b.proxy.direct.holders)+len(b.proxy.direct.asking) > 0 {
		t.Errorf("a deleted Service leaves %+v", b.proxy.direct)
	}
}

// Contract clause 11: endpoints that come and go leave one deadline for each Service, and none with it.
func TestContract11FlappingEndpointsLeaveOneDeadline(t *testing.T) {
	b := newDirectBench(t)
	vip := netip.MustParseAddr("198.51.100.1")
	b.update = lb.FeedUpdate{Previous: map[netip.Addr][]netip.Addr{vip: {}}, Number: 1}
	b.run()
	all, _ := b.slices.Get(key("web"))
	there := all[0].Endpoints
	endpoints := func(list []lb.Endpoint) {
		slice := all[0]
		slice.Endpoints = list
		b.slices.Set(key("web"), []lb.Slice{slice})
		b.mark(key("web"))
		b.runAlone()
	}
	gone := b.clock
	for range 100 {
		b.clock = b.clock.Add(30 * time.Second)
		endpoints(there[:1])
		gone = b.clock
		b.clock = b.clock.Add(5 * time.Second)
		endpoints(there[1:2])
	}
	endpoints(there[:1])
	if due := b.proxy.direct.due; len(due) != 1 || !due[0].at.After(gone) {
		t.Errorf("due is %+v", due)
	}
	b.wantRing("while the nodes may hold connections", "172.31.0.2 172.31.0.3 172.32.0.4")
	b.clock = b.clock.Add(lb.FlowMemory)
	next := b.runAlone()
	b.wantRing("an hour later", "")
	if due := b.proxy.direct.due; len(due) > 0 {
		t.Errorf("an hour later due is %+v, the next step in %v", due, next)
	}
	endpoints(there)
	endpoints(there[:1])
	b.delete("web")
	b.run()
	b.rules.confirm()
	b.run()
	if due := b.proxy.direct.due; len(due) > 0 {
		t.Errorf("a deleted Service leaves %+v", due)
	}
}

// fakeSenders knows the MAC address of every node.
type fakeSenders struct {
	nodes []netip.Addr
	macs  map[netip.Addr]lb.MAC // of nodes with others than the test's
}

func (f *fakeSenders) Set(nodes []netip.Addr) { f.nodes = nodes }

func (f *fakeSenders) Known() (all []lb.MAC) {
	for _, node := range f.nodes {
		mac, is := f.macs[node]
		if !is {
			mac = lb.MAC{2, node.As16()[15]}
		}
		all = append(all, mac)
	}
	return all
}

// The rules get the MAC addresses of all other nodes, which are looked up while a Service asks for direct
// forwarding.
func TestDirectRulesKnowTheNodes(t *testing.T) {
	b := newDirectBench(t)
	senders := &fakeSenders{}
	b.to.senders = senders
	b.run()
	b.run()
	if got, want := b.rules.wanted[key("web")].Senders, []lb.MAC{{2, 2}, {2, 3}, {2, 4}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	b.direct("web", "")
	b.runAlone()
	if got := b.rules.wanted[key("web")].Senders; len(got)+len(senders.nodes) > 0 {
		t.Errorf("not forwarded directly, and there are %v of %v", got, senders.nodes)
	}
}

// A Service hears which of its connections are masqueraded all the same, and why; a node whose address
// becomes known is handed packets from then on.
func TestContract10DirectIsRefusedWithAReason(t *testing.T) {
	b := newDirectBench(t)
	b.run()
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "web DirectRefused ") ||
		!strings.Contains(b.warnings[0], "has an address of node-4; connections to endpoints there are masqueraded") {
		t.Errorf("told %q", b.warnings)
	}
	b.nodes.Set("node-4", lb.Node{Name: "node-4", Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.4")}})
	b.markNode("node-4")
	b.run()
	if s := b.rules.wanted[key("web")]; len(s.Handed) != 3 || len(b.records[key("web")].advice) > 0 {
		t.Errorf("handed %v, advice %v", s.Handed, b.records[key("web")].advice)
	}
	b.wantRing("the speaker has not named the VIP", "")
	b.own = append(b.own, lb.Interface{Name: "red", VRF: "red", Table: 100},
		lb.Interface{Name: "up0", VRF: "red", Enslaved: true}, lb.Interface{Name: "up1", VRF: "blue", Enslaved: true})
	b.routers.Set("tor", lb.Router{VRF: "red"})
	b.run()
	if advice := b.records[key("web")].advice; len(advice) != 1 || !strings.Contains(advice[0].Message, "through a VRF") ||
		!slices.Equal(b.rules.config.VRFInterfaces, []string{"red", "up0"}) {
		t.Errorf("a router in a VRF: advice %v, in VRFs %q", advice, b.rules.config.VRFInterfaces)
	}
	b.routers.Delete("tor")
	b.run()
	b.settings.direct = nil
	b.run()
	if s := b.rules.wanted[key("web")]; s.Direct || len(s.Ports) != 1 || len(b.warnings) != 3 ||
		!strings.Contains(b.warnings[2], "needs --direct-forwarding") {
		t.Errorf("direct %v, told %q", s.Direct, b.warnings)
	}
}

// fakeAcross knows of nodes behind routers what a test says.
type fakeAcross struct {
	nodes  across.Nodes
	states map[netip.Addr]across.State
}

func (f *fakeAcross) Set(nodes across.Nodes) { f.nodes = nodes }

func (f *fakeAcross) States() map[netip.Addr]across.State { return f.states }

// Packets are handed over through the tunnel to a node behind a router as long as it answers there, and the Service
// hears of a node that does not. This node takes what is handed over for what its kernel forwards directly.
func TestContract1DirectThroughTheTunnelToNodesThatAnswer(t *testing.T) {
	b := newDirectBench(t)
	asking, far := &fakeAcross{}, netip.MustParseAddr("172.32.0.4")
	macs := &fakeSenders{}
	b.to.across, b.to.senders = asking, macs
	vip := netip.MustParseAddr("198.51.100.1")
	want := func(what string, through, told bool) {
		t.Helper()
		b.run()
		to, handed := b.rules.wanted[key("web")].Handed[netip.MustParseAddr("10.0.0.4")]
		if handed != through || through && to != tunnel.Alias(far) {
			t.Errorf("%s: handed %v, to %v", what, handed, to)
		}
		if now := len(b.records[key("web")].advice) > 0; now != told {
			t.Errorf("%s: advice %v", what, b.records[key("web")].advice)
		}
	}
	want("not asked yet", false, false)
	if !slices.Equal(asking.nodes.Others, []netip.Addr{far}) || len(asking.nodes.Self) != 1 {
		t.Errorf("asked are %+v", asking.nodes)
	}
	if len(b.rescue.direct) > 0 {
		t.Errorf("it takes packets for %v, which the kernel has not confirmed", b.rescue.direct)
	}
	b.rules.confirm()
	asking.states = map[netip.Addr]across.State{far: across.Answers}
	want("it answers, and its frames are not known", false, false)
	macs.macs = map[netip.Addr]lb.MAC{far: tunnel.MAC(far)}
	want("it answers", true, false)
	if !slices.Equal(b.rescue.direct, []netip.Addr{vip}) || !slices.Equal(b.rescue.far, []netip.Addr{far}) {
		t.Errorf("it takes packets for %v, from %v", b.rescue.direct, b.rescue.far)
	}
	asking.states = map[netip.Addr]across.State{far: across.Silent}
	want("it is silent", false, true)
	if len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "without an answer through the tunnel: node-4") {
		t.Errorf("told %q", b.warnings)
	}
	asking.states = map[netip.Addr]across.State{far: across.Answers}
	want("it answers again", true, false)
	b.direct("web", "")
	b.runAlone()
	if len(asking.nodes.Others) > 0 {
		t.Errorf("not forwarded directly any more, and asked are %v", asking.nodes.Others)
	}
	b.rules.confirm()
	b.run()
	if len(b.rescue.direct)+len(b.rescue.far)+len(b.proxy.direct.asks)+len(b.proxy.direct.serves) > 0 {
		t.Errorf("not forwarded directly any more, and it takes packets for %v from %v", b.rescue.direct, b.rescue.far)
	}
}

// An address that a Service has lost is served for the drain time more, so packets that others hand over for it are
// taken as long: the rules of all nodes hand them over.
func TestContract3ALostAddressIsTakenThroughTheTunnelWhileItLingers(t *testing.T) {
	b := newDirectBench(t)
	b.proxy.settings.drain = time.Minute
	far := netip.MustParseAddr("172.32.0.4")
	b.to.across = &fakeAcross{states: map[netip.Addr]across.State{far: across.Answers}}
	b.to.senders = &fakeSenders{macs: map[netip.Addr]lb.MAC{far: tunnel.MAC(far)}}
	before, after := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("198.51.100.2")
	b.confirmAll()
	svc, _ := b.services.Get(key("web"))
	svc.Ingress[0].Addr = after
	b.services.Set(key("web"), svc)
	b.mark(key("web"))
	b.confirmAll()
	if !slices.Equal(b.rescue.direct, []netip.Addr{before, after}) {
		t.Errorf("it takes packets for %v, and its rules serve both addresses", b.rescue.direct)
	}
	b.clock = b.clock.Add(time.Hour)
	b.confirmAll()
	if !slices.Equal(b.rescue.direct, []netip.Addr{after}) {
		t.Errorf("after the drain time it takes packets for %v", b.rescue.direct)
	}
}

// Of more addresses behind routers than a node exchanges packets with, each family has its share, and a Service hears
// of the node that is left out, as it hears of one to which the kernel has another way than the tunnel.
func TestContract10NodesBeyondTheTunnelAreNamed(t *testing.T) {
	b := newDirectBench(t)
	asking, last := &fakeAcross{}, netip.MustParseAddr("172.32.0.4")
	b.to.across, b.to.senders = asking, &fakeSenders{macs: map[netip.Addr]lb.MAC{last: tunnel.MAC(last)}}
	addr, addr6 := netip.MustParseAddr("172.30.0.0"), netip.MustParseAddr("fd00::")
	for i := range across.MaxNodes {
		addr, addr6 = addr.Next(), addr6.Next()
		node := fmt.Sprint("other-", i)
		b.nodes.Set(node, lb.Node{Name: node, Addresses: []netip.Addr{addr, addr6}})
		b.markNode(node)
	}
	b.run()
	b.rules.confirm()
	b.run()
	want := func(what, told string, warnings int) {
		t.Helper()
		if len(b.warnings) != warnings || !strings.HasPrefix(b.warnings[warnings-1], "web DirectRefused ") ||
			!strings.Contains(b.warnings[warnings-1], told) {
			t.Errorf("%s: told %q", what, b.warnings)
		}
	}
	want("257 nodes", "that this node exchanges packets with through the tunnel: node-4;", 1)
	of6 := slices.IndexFunc(b.rescue.far, netip.Addr.Is6)
	if len(asking.nodes.Others) > 0 || of6 != across.MaxNodes/2 || len(b.rescue.far) != across.MaxNodes {
		t.Errorf("asked are %v; of %d addresses in the tunnel the first of IPv6 is number %d", asking.nodes.Others,
			len(b.rescue.far), of6)
	}
	for i := range across.MaxNodes {
		b.nodes.Delete(fmt.Sprint("other-", i))
		b.markNode(fmt.Sprint("other-", i))
	}
	asking.states = map[netip.Addr]across.State{last: across.Diverted}
	b.run()
	want("a rule ahead of the tunnel's", "that takes elsewhere what is for node-4;", 2)
	if !slices.Equal(asking.nodes.Others, []netip.Addr{last}) {
		t.Errorf("asked are %v", asking.nodes.Others)
	}
	asking.states = nil
	b.nodes.Set("twin", lb.Node{Name: "twin", Addresses: []netip.Addr{netip.MustParseAddr("10.32.0.4")}})
	b.markNode("twin")
	b.run()
	want("a node with the same alias", "in the first byte alone: node-4;", 3)
	first := netip.MustParseAddr("172.16.0.1")
	b.nodes.Set("node-4", lb.Node{Name: "node-4", Addresses: []netip.Addr{first}})
	b.markNode("node-4")
	for i := range across.MaxNodes {
		node := fmt.Sprint("before-", i)
		b.nodes.Set(node, lb.Node{Name: node, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{172, 17, byte(i), 1})}})
		b.markNode(node)
	}
	asking.states = map[netip.Addr]across.State{first: across.Silent}
	b.run()
	want("a node that leaves this one out", "this node is beyond the addresses that they exchange packets with", 4)
}

// Contract clause 11: nobody looks at the endpoints of a Service that has too many, but at those that it had: what it
// is told of direct forwarding concerns them.
func TestContract11TooManyEndpointsAreNotLookedAt(t *testing.T) {
	b := newDirectBench(t)
	b.confirmAll()
	had, _ := b.slices.Get(key("web"))
	before := b.records[key("web")].directRefused
	b.slices.Set(key("web"), append([]lb.Slice{tooMany("web")}, had...))
	b.markEndpoints(key("web"))
	b.confirmAll()
	r := b.records[key("web")]
	if r.planned.Excess == nil || !r.planned.Direct || len(r.planned.Handed) != 2 || r.directRefused != before {
		t.Errorf("excess %v, direct %v, handed %v, refused: %s", r.planned.Excess, r.planned.Direct, r.planned.Handed,
			r.directRefused)
	}
}

// Contract clause 11: that one Service is forwarded directly costs another one nothing, however many addresses there
// are of such.
func TestContract11DirectServicesCostEachOtherNothing(t *testing.T) {
	b := newDirectBench(t)
	b.run()
	other := map[lb.Key]holding{key("other"): {}}
	for i := range 1_000_000 {
		b.proxy.direct.holders[netip.AddrFrom4([4]byte{100, byte(i >> 16), byte(i >> 8), byte(i)})] = other
	}
	svc, _ := b.services.Get(key("web"))
	all, _ := b.slices.Get(key("web"))
	for range 20_000 {
		b.forward(b.records[key("web")], svc, all, b.clock)
	}
	if n := len(b.proxy.direct.holders); n != 1_000_001 {
		t.Errorf("%d addresses have holders", n)
	}
}
