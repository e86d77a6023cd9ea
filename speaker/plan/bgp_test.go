package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// bgpWorld is a node with two routers, a pool and an advertisement, to be changed by each case.
type bgpWorld struct {
	facts Facts
	bgp   BGPFacts
	vips  []BGPInput
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func selector(s string) []labels.Selector {
	parsed, err := labels.Parse(s)
	if err != nil {
		panic(err)
	}
	return []labels.Selector{parsed}
}

func ranges(list ...string) []lb.Range {
	var all []lb.Range
	for _, s := range list {
		r, err := lb.ParseRange(s)
		if err != nil {
			panic(err)
		}
		all = append(all, r)
	}
	return all
}

func bgpPeer(name, address string, change ...func(*lb.Peer)) lb.Peer {
	p := lb.Peer{Name: name, LocalASN: 64500, PeerASN: 64501, Addr: addr(address), Port: 179, HoldTime: 90 * time.Second,
		ConnectTime: 10 * time.Second}
	for _, c := range change {
		c(&p)
	}
	return p
}

func bgpAd(name string, change ...func(*lb.BGPAdvertisement)) lb.BGPAdvertisement {
	a := lb.BGPAdvertisement{Name: name, AggregationLength: 32, AggregationLengthV6: 128}
	for _, c := range change {
		c(&a)
	}
	return a
}

// held makes a VIP of a Service with that many ready local backends, and two elsewhere.
func heldVIP(vip, service string, policy lb.TrafficPolicy, local int) BGPInput {
	key := lb.Key{Namespace: "default", Name: service}
	d := &lb.Delivery{Service: key, VIP: addr(vip), Policy: policy, LocalReady: local, Ready: local + 2}
	return BGPInput{VIP: addr(vip), Holders: []Holder{{Service: key, Labels: labels.Set{"app": service}, Delivery: d}}}
}

func newBGPWorld(changes ...func(*bgpWorld)) *bgpWorld {
	w := &bgpWorld{
		facts: Facts{
			Self: "node-1",
			Node: &lb.Node{Name: "node-1", Labels: labels.Set{"rack": "a"},
				Addresses: []netip.Addr{addr("10.0.0.1"), addr("fd00::1")}},
			Pools: map[string]lb.Pool{
				"web": {Name: "web", Labels: labels.Set{"tier": "gold"}, Ranges: ranges("192.0.2.0/28", "fd01::/120")},
				"dns": {Name: "dns", Ranges: ranges("198.51.100.10-198.51.100.20")},
			},
			Interfaces: []lb.Interface{{Name: "eth0", Up: true,
				Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.7/24"), netip.MustParsePrefix("fe80::7/64"),
					netip.MustParsePrefix("fd00::7/64")}}},
		},
		bgp: BGPFacts{
			Peers:          map[string]lb.Peer{"tor-1": bgpPeer("tor-1", "10.0.0.2"), "tor-2": bgpPeer("tor-2", "10.0.0.3")},
			Advertisements: map[string]lb.BGPAdvertisement{"all": bgpAd("all")},
			Namespace:      "landfall-system",
		},
		vips: []BGPInput{heldVIP("192.0.2.1", "web", lb.Cluster, 0)},
	}
	for _, c := range changes {
		c(w)
	}
	return w
}

func (w *bgpWorld) decide() bgpDecision { return decideBGP(w.facts, w.bgp, w.vips) }

// heard writes what each peer hears: "tor-1: 192.0.2.1/32 lp 100; …".
func heard(d bgpDecision) string {
	var peers []string
	for _, name := range slices.Sorted(maps.Keys(d.Sessions)) {
		var list []string
		for _, p := range slices.SortedFunc(maps.Keys(d.Sessions[name].Routes), netip.Prefix.Compare) {
			r := d.Sessions[name].Routes[p]
			var s strings.Builder
			s.WriteString(p.String())
			if r.LocalPref != DefaultLocalPref {
				fmt.Fprint(&s, " lp ", r.LocalPref)
			}
			if r.HasMED {
				fmt.Fprint(&s, " med ", r.MED)
			}
			if r.Prepend > 0 {
				fmt.Fprint(&s, " prepend ", r.Prepend)
			}
			for _, c := range r.Communities {
				fmt.Fprint(&s, " ", c)
			}
			list = append(list, s.String())
		}
		peers = append(peers, name+": "+strings.Join(list, ", "))
	}
	return strings.Join(peers, "; ")
}

func withAd(change func(*lb.BGPAdvertisement)) func(*bgpWorld) {
	return func(w *bgpWorld) {
		ad := w.bgp.Advertisements["all"]
		change(&ad)
		w.bgp.Advertisements["all"] = ad
	}
}

func also(ad lb.BGPAdvertisement) func(*bgpWorld) {
	return func(w *bgpWorld) { w.bgp.Advertisements[ad.Name] = ad }
}

func vipsOf(vips ...BGPInput) func(*bgpWorld) { return func(w *bgpWorld) { w.vips = vips } }

// What peers hear, and why they do not.
func TestBGPRoutes(t *testing.T) {
	young := func(a *lb.BGPAdvertisement) { a.Created = time.Unix(1000, 0) }
	for _, test := range []struct {
		name   string
		change []func(*bgpWorld)
		want   string
		reason lb.Reason // why the first VIP is not announced; "" when it is
		words  []string  // parts of the words about the first VIP
	}{
		{"plain", nil, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", "", nil},
		{"IPv6 over sessions of IPv4", []func(*bgpWorld){vipsOf(heldVIP("fd01::1", "web", lb.Cluster, 0))},
			"tor-1: ; tor-2: ", lb.ReasonFamilyNotOffered,
			[]string{"set dualStackAddressFamily"}},
		{"attributes", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) {
			a.LocalPref, a.MED, a.Prepend = new(uint32(200)), new(uint32(0)), 2
			a.Communities = []string{"no-export", "64500:1", "large:1:2:3", "64500:1"}
		})},
			"tor-1: 192.0.2.1/32 lp 200 med 0 prepend 2 64500:1 65535:65281 large:1:2:3; tor-2: 192.0.2.1/32 lp 200 med 0 " +
				"prepend 2 64500:1 65535:65281 large:1:2:3", "", nil},
		{"one peer", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Peers = []string{"tor-2"} })},
			"tor-1: ; tor-2: 192.0.2.1/32", "", nil},
		{"no such peer", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Peers = []string{"tor-9"} })},
			"tor-1: ; tor-2: ", lb.ReasonUnknownPeer,
			[]string{"BGPAdvertisement all names no BGPPeer that selects node node-1"}},
		{"no peer that is not refused", []func(*bgpWorld){
			withAd(func(a *lb.BGPAdvertisement) { a.Peers = []string{"tor-2", "tor-9"} }),
			func(w *bgpWorld) {
				w.bgp.Peers["tor-2"] = bgpPeer("tor-2", "10.0.0.3", func(p *lb.Peer) { p.VRF = "red" })
				w.bgp.Peers["tor-3"] = bgpPeer("tor-3", "10.0.0.2")
			}}, "tor-1: ", lb.ReasonVRFMissing, []string{"BGPPeer tor-2: node-1 has no VRF red"}},
		{"other pool", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Pools = []string{"dns"} })},
			"tor-1: ; tor-2: ", lb.ReasonNoAdvertisement, nil},
		{"pool by label", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.PoolSelectors = selector("tier=gold") })},
			"tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", "", nil},
		{"outside of pools", []func(*bgpWorld){vipsOf(heldVIP("203.0.113.1", "web", lb.Cluster, 0))}, "tor-1: ; tor-2: ",
			lb.ReasonNoAdvertisement, nil},
		{"other node", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.NodeSelectors = selector("rack=b") })},
			"tor-1: ; tor-2: ", lb.ReasonNoAdvertisement, nil},
		{
			"this node",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.NodeSelectors = selector("rack in (a, b)") })},
			"tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", "", nil},
		{
			"other Service",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.ServiceSelectors = selector("app=dns") })},
			"tor-1: ; tor-2: ", lb.ReasonNoAdvertisement, nil},
		{"this Service", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.ServiceSelectors = selector("app=web") })},
			"tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", "", nil},
		{"two advertisements: communities add up, the older one's other attributes hold", []func(*bgpWorld){
			withAd(func(a *lb.BGPAdvertisement) {
				a.LocalPref, a.Communities = new(uint32(200)), []string{"64500:1"}
			}),
			also(bgpAd("also", young, func(a *lb.BGPAdvertisement) {
				a.LocalPref, a.MED, a.Communities, a.Peers = new(uint32(300)), new(uint32(7)), []string{"64500:2"},
					[]string{"tor-1"}
			})),
		}, "tor-1: 192.0.2.1/32 lp 200 med 7 64500:1 64500:2; tor-2: 192.0.2.1/32 lp 200 64500:1", "", nil},
		{"address and aggregate", []func(*bgpWorld){also(bgpAd("wide", young, func(a *lb.BGPAdvertisement) {
			a.AggregationLength, a.Peers, a.Communities = 28, []string{"tor-1"}, []string{"64500:9"}
		}))}, "tor-1: 192.0.2.0/28 64500:9, 192.0.2.1/32; tor-2: 192.0.2.1/32", "", nil},
		{"aggregate beyond the pool", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = 24 })},
			"tor-1: ; tor-2: ", lb.ReasonAggregateOutside,
			[]string{"192.0.2.0/24, the aggregate for 192.0.2.1, reaches beyond the ranges of IPAddressPool web"}},
		{"aggregate within a range that is no prefix", []func(*bgpWorld){
			withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = 30 }),
			vipsOf(heldVIP("198.51.100.13", "dns", lb.Cluster, 0), heldVIP("198.51.100.11", "web", lb.Cluster, 0)),
		}, "tor-1: 198.51.100.12/30; tor-2: 198.51.100.12/30", "", nil},
		{"community by name", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Communities = []string{"gold"} }),
			func(w *bgpWorld) {
				w.bgp.Communities = map[string]lb.CommunityNames{"a": {Values: map[string]lb.Community{"gold": {A: 1, B: 2}}},
					"b": {Values: map[string]lb.Community{"gold": {A: 1, B: 2}}}}
			}}, "tor-1: 192.0.2.1/32 1:2; tor-2: 192.0.2.1/32 1:2", "", nil},
		{"a name that is not known stops the advertisement and no other", []func(*bgpWorld){
			withAd(func(a *lb.BGPAdvertisement) { a.Communities = []string{"gold"} }),
			also(bgpAd("plain", young, func(a *lb.BGPAdvertisement) { a.Peers = []string{"tor-2"} })),
		}, "tor-1: ; tor-2: 192.0.2.1/32", "", []string{"no Community object defines the name gold"}},
		{
			"a name that means two things",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Communities = []string{"gold"} }), func(w *bgpWorld) {
				w.bgp.Communities = map[string]lb.CommunityNames{"a": {Values: map[string]lb.Community{"gold": {A: 1, B: 2}}},
					"b": {Values: map[string]lb.Community{"gold": {A: 1, B: 3}}}}
			}}, "tor-1: ; tor-2: ", lb.ReasonCommunityAmbiguous, []string{"gold is 1:2 in Community a and 1:3 in Community b"}},
		{"not programmed", []func(*bgpWorld){func(w *bgpWorld) { w.vips[0].Holders[0].Delivery = nil }}, "tor-1: ; tor-2: ",
			lb.ReasonNotProgrammed, nil},
		{"gate unknown", []func(*bgpWorld){func(w *bgpWorld) { w.facts.Gate = lb.ReasonFeedUnknown }}, "tor-1: ; tor-2: ",
			lb.ReasonFeedUnknown, nil},
		{"Local without a local backend", []func(*bgpWorld){vipsOf(heldVIP("192.0.2.1", "web", lb.Local, 0))},
			"tor-1: ; tor-2: ", lb.ReasonNoLocalBackends, nil},
		{"excluded node", []func(*bgpWorld){func(w *bgpWorld) { w.facts.Node.Labels[LabelExclude] = "" }}, "tor-1: ; tor-2: ",
			lb.ReasonNodeExcluded, nil},
		{"node without an object", []func(*bgpWorld){func(w *bgpWorld) { w.facts.Node = nil }}, "tor-1: ; tor-2: ",
			lb.ReasonNodeUnknown, nil},
		{"an aggregate lives while one VIP inside is claimed", []func(*bgpWorld){
			withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = 28 }),
			vipsOf(heldVIP("192.0.2.1", "web", lb.Local, 0), heldVIP("192.0.2.2", "dns", lb.Local, 1)),
		}, "tor-1: 192.0.2.0/28; tor-2: 192.0.2.0/28", lb.ReasonNoLocalBackends, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newBGPWorld(test.change...)
			d := w.decide()
			if got := heard(d); got != test.want {
				t.Errorf("heard %q\nwant  %q", got, test.want)
			}
			v := d.VIPs[w.vips[0].VIP]
			var reason lb.Reason
			if v.Refusal != nil {
				reason = v.Refusal.Reason
			}
			if reason != test.reason || v.Leaving {
				t.Errorf("refused because of %q, leaving %v, want %q", reason, v.Leaving, test.reason)
			}
			for _, want := range test.words {
				if !slices.ContainsFunc(v.Obstacles, func(w BGPObstacle) bool { return strings.Contains(w.Message, want) }) {
					t.Errorf("obstacles %+v, want %q", v.Obstacles, want)
				}
			}
			slices.Reverse(w.vips)
			if diff := cmp.Diff(d, w.decide(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
				cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
				t.Errorf("in another order (-first +second):\n%s", diff)
			}
		})
	}
}

// TestContract5PlannedEndsOverBGPAreGraceful walks a VIP through planned and unplanned ends: a
// planned one is announced as about to go until the caller says that routers have had their time,
// an unplanned one ends at once.
func TestContract5PlannedEndsOverBGPAreGraceful(t *testing.T) {
	terminating := func(w *bgpWorld) {
		d := w.vips[0].Holders[0].Delivery
		d.Policy, d.LocalReady, d.LocalServing, d.Ready = lb.Local, 0, 1, 2
	}
	const going = "tor-1: 192.0.2.1/32 lp 0 65535:0; tor-2: 192.0.2.1/32 lp 0 65535:0"
	const none = "tor-1: ; tor-2: "
	for _, test := range []struct {
		name     string
		end      func(*bgpWorld)
		graceful bool
		reason   lb.Reason
	}{
		{"the speaker stops for good", func(w *bgpWorld) { w.facts.Stopping = true }, true, lb.ReasonStopping},
		{"the node leaves", func(w *bgpWorld) { w.facts.Node.Leaving = lb.ReasonNodeLeaving }, true, lb.ReasonNodeLeaving},
		{"the network is unavailable", func(w *bgpWorld) { w.facts.Node.NetworkUnavailable = true }, true,
			lb.ReasonNetworkUnavailable},
		{"the node is not ready", func(w *bgpWorld) { w.facts.Node.NotReady, w.facts.RequireReady = true, true }, true,
			lb.ReasonNodeNotReady},
		{"the node is drained", func(w *bgpWorld) { w.facts.Node.Leaving = lb.ReasonNodeDrained }, true, lb.ReasonNodeDrained},
		{"the node is excluded", func(w *bgpWorld) { w.facts.Node.Labels[LabelExclude] = "" }, true, lb.ReasonNodeExcluded},
		{"the last local backend terminates and still serves", terminating, true, lb.ReasonNoLocalBackends},
		{
			"the last local backend is gone",
			func(w *bgpWorld) { w.vips = []BGPInput{heldVIP("192.0.2.1", "web", lb.Local, 0)} }, false,
			lb.ReasonNoLocalBackends},
		{"the rules are gone", func(w *bgpWorld) { w.vips[0].Holders[0].Delivery = nil }, false, lb.ReasonNotProgrammed},
		{"the proxy is gone", func(w *bgpWorld) { w.facts.Gate = lb.ReasonFeedLost }, false, lb.ReasonFeedLost},
		{"the node leaves and cannot deliver", func(w *bgpWorld) {
			w.facts.Node.Leaving = lb.ReasonNodeLeaving
			w.vips[0].Holders[0].Delivery = nil
		}, false, lb.ReasonNodeLeaving},
		{"the advertisement is deleted", func(w *bgpWorld) { w.bgp.Advertisements = nil }, false, lb.ReasonNoAdvertisement},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newBGPWorld()
			test.end(w)
			elsewhere := true
			step := func(name string, announced, converged bool, want string, leaving bool) {
				t.Helper()
				w.vips[0].Announced, w.vips[0].Converged, w.vips[0].Elsewhere = announced, converged, elsewhere
				d := w.decide()
				v := d.VIPs[addr("192.0.2.1")]
				if got := heard(d); got != want || v.Leaving != leaving || v.Refusal == nil || v.Refusal.Reason != test.reason {
					t.Errorf("%s: heard %q, leaving %v, %v; want %q, %v, %s", name, got, v.Leaving, v.Refusal, want, leaving,
						test.reason)
				}
			}
			if test.graceful {
				step("at first", true, false, going, true)
			} else {
				step("at first", true, false, none, false)
			}
			step("when converged", true, true, none, false)
			step("never announced", false, false, none, false)
			elsewhere = false
			last := none
			switch test.reason {
			case lb.ReasonNodeLeaving, lb.ReasonNodeDrained, lb.ReasonNoLocalBackends: // as over ARP and NDP
				if test.graceful {
					last = going
				}
			}
			step("when converged, and no other node announces", true, true, last, last == going)
		})
	}
}

// A speaker that expects a successor leaves its routes with the peers that keep them, and takes
// them back gracefully from the others.
func TestContract6RestartsKeepRoutesAtGracefulPeers(t *testing.T) {
	for _, test := range []struct {
		name                           string
		change                         func(*bgpWorld)
		announced, converged, restarts bool
		want                           string
		leaving                        bool
	}{
		{"at first", nil, true, false, true, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32 lp 0 65535:0", true},
		{"converged", nil, true, true, true, "tor-1: 192.0.2.1/32; tor-2: ", false},
		{"for good", nil, true, false, false, "tor-1: 192.0.2.1/32 lp 0 65535:0; tor-2: 192.0.2.1/32 lp 0 65535:0", true},
		{"the node leaves too", func(w *bgpWorld) { w.facts.Node.Leaving = lb.ReasonNodeLeaving }, true, false, true,
			"tor-1: 192.0.2.1/32 lp 0 65535:0; tor-2: 192.0.2.1/32 lp 0 65535:0", true},
		{"what cannot be delivered goes", func(w *bgpWorld) { w.vips[0].Holders[0].Delivery = nil }, true, false, true,
			"tor-1: ; tor-2: ", false},
		{"only graceful peers: nothing to wait for", func(w *bgpWorld) { delete(w.bgp.Peers, "tor-2") }, true, false, true,
			"tor-1: 192.0.2.1/32", false},
	} {
		w := newBGPWorld(func(w *bgpWorld) {
			w.bgp.Peers["tor-1"] = bgpPeer("tor-1", "10.0.0.2", func(p *lb.Peer) { p.GracefulRestart = true })
		})
		if test.change != nil {
			test.change(w)
		}
		w.facts.Stopping, w.bgp.Restarting = true, test.restarts
		w.vips[0].Announced, w.vips[0].Converged = test.announced, test.converged
		d := w.decide()
		if got := heard(d); got != test.want || d.VIPs[addr("192.0.2.1")].Leaving != test.leaving {
			t.Errorf("%s: heard %q, leaving %v; want %q, %v", test.name, got, d.VIPs[addr("192.0.2.1")].Leaving, test.want,
				test.leaving)
		}
	}
}

// An aggregate is about to go only when all that it is announced for is.
func TestAggregatesLeaveWithTheirLastVIP(t *testing.T) {
	w := newBGPWorld(withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength, a.Peers = 28, []string{"tor-1"} }),
		vipsOf(heldVIP("192.0.2.1", "web", lb.Local, 0), heldVIP("192.0.2.2", "dns", lb.Local, 1)))
	for i := range w.vips {
		w.vips[i].Announced = true
	}
	w.vips[0].Holders[0].Delivery.LocalServing = 1
	if got, want := heard(w.decide()), "tor-1: 192.0.2.0/28; tor-2: "; got != want {
		t.Errorf("one leaves: %q, want %q", got, want)
	}
	w.facts.Node.Leaving = lb.ReasonNodeLeaving
	if got, want := heard(w.decide()), "tor-1: 192.0.2.0/28 lp 0 65535:0; tor-2: "; got != want {
		t.Errorf("both leave: %q, want %q", got, want)
	}
	w.vips[0].Converged, w.vips[0].Elsewhere = true, true
	if got, want := heard(w.decide()), "tor-1: 192.0.2.0/28 lp 0 65535:0; tor-2: "; got != want {
		t.Errorf("one is gone: %q, want %q", got, want)
	}
	w.vips[1].Converged, w.vips[1].Elsewhere = true, true
	if got, want := heard(w.decide()), "tor-1: ; tor-2: "; got != want {
		t.Errorf("both are gone: %q, want %q", got, want)
	}
}

// Which sessions a node has, with what, and why not.
func TestBGPSessions(t *testing.T) {
	one := func(change ...func(*lb.Peer)) func(*bgpWorld) {
		return func(w *bgpWorld) {
			w.bgp.Peers = map[string]lb.Peer{"tor-1": bgpPeer("tor-1", "10.0.0.2", change...)}
		}
	}
	describe := func(s BGPSession) string {
		return fmt.Sprintf("%d>%d%s %v%s id %v families %v hops %v %v password %q bfd %v", s.LocalASN, s.PeerASN, s.Dynamic,
			s.Addr, s.Interface, s.RouterID, s.Families, s.NextHop4, s.NextHop6, s.Password, s.BFDDown)
	}
	const none = "invalid IP"
	for _, test := range []struct {
		name     string
		change   []func(*bgpWorld)
		want     string
		refusal  lb.Reason
		warning  lb.Reason
		selected bool
	}{
		{"plain", []func(*bgpWorld){one()}, "64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none +
			` password "" bfd false`, "", "", true},
		{"IPv6", []func(*bgpWorld){one(func(p *lb.Peer) { p.Addr = addr("fd00::2") })},
			"64500>64501 fd00::2 id 10.0.0.1 families [IPv6] hops " + none + " " + none + ` password "" bfd false`, "", "",
			true},
		{"both families over IPv4: the next hop is on the link",
			[]func(*bgpWorld){one(func(p *lb.Peer) { p.DualStack = true })},
			"64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4 IPv6] hops " + none + ` fd00::7 password "" bfd false`, "", "",
			true},
		{"both families over IPv6", []func(*bgpWorld){one(func(p *lb.Peer) { p.DualStack, p.Addr = true, addr("fd00::2") })},
			"64500>64501 fd00::2 id 10.0.0.1 families [IPv4 IPv6] hops 10.0.0.7 " + none + ` password "" bfd false`, "", "",
			true},
		{"a router elsewhere: the next hop is the node's",
			[]func(*bgpWorld){one(func(p *lb.Peer) { p.DualStack, p.Addr = true, addr("172.16.0.2") })},
			"64500>64501 172.16.0.2 id 10.0.0.1 families [IPv4 IPv6] hops " + none + ` fd00::1 password "" bfd false`, "", "",
			true},
		{"a node without IPv6", []func(*bgpWorld){one(func(p *lb.Peer) { p.DualStack = true }), func(w *bgpWorld) {
			w.facts.Interfaces, w.facts.Node.Addresses = nil, w.facts.Node.Addresses[:1]
		}}, "64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4 IPv6] hops " + none + " " + none + ` password "" bfd false`, "",
			"", true},
		{"unnumbered", []func(*bgpWorld){one(func(p *lb.Peer) {
			p.Addr, p.Interface, p.PeerASN, p.Dynamic = netip.Addr{}, "eth0", 0, lb.ExternalASN
		})},
			"64500>0external " + none + "eth0 id 10.0.0.1 families [IPv4 IPv6] hops 10.0.0.7 " + none + ` password "" bfd false`,
			"", "", true},
		{"router ID given", []func(*bgpWorld){one(func(p *lb.Peer) { p.RouterID = addr("1.2.3.4") })},
			"64500>64501 10.0.0.2 id 1.2.3.4 families [IPv4] hops " + none + " " + none + ` password "" bfd false`, "", "",
			true},
		{"router ID of a node with IPv6 only", []func(*bgpWorld){one(),
			func(w *bgpWorld) { w.facts.Node.Addresses = w.facts.Node.Addresses[1:] }},
			"64500>64501 10.0.0.2 id 84.196.51.131 families [IPv4] hops " + none + " " + none + ` password "" bfd false`, "", "",
			true},
		{"other nodes", []func(*bgpWorld){one(func(p *lb.Peer) { p.NodeSelectors = selector("rack=b") })}, "", "", "", false},
		{"a selector that cannot be read, and other nodes", []func(*bgpWorld){one(func(p *lb.Peer) {
			p.NodeSelectors, p.BadSelector = append(selector("rack=b"), labels.Nothing()), badSelector
		})}, "", lb.ReasonSelectorInvalid, "", true},
		{"a selector that cannot be read, and this node", []func(*bgpWorld){one(func(p *lb.Peer) {
			p.NodeSelectors, p.BadSelector = append(selector("rack=a"), labels.Nothing()), badSelector
		})}, "64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "" bfd false`, "", "",
			true},
		{"this node", []func(*bgpWorld){one(func(p *lb.Peer) { p.NodeSelectors = selector("rack=a") })},
			"64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "" bfd false`, "", "",
			true},
		{"password", []func(*bgpWorld){one(func(p *lb.Peer) { p.Password = "x" })},
			"64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "x" bfd false`, "", "",
			true},
		{
			"Secret",
			[]func(*bgpWorld){one(func(p *lb.Peer) { p.PasswordSecret = &lb.Key{Namespace: "landfall-system", Name: "s"} }),
				func(w *bgpWorld) { w.bgp.Passwords = map[string]string{"s": "y"} }},
			"64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "y" bfd false`, "", "",
			true},
		{"no Secret", []func(*bgpWorld){one(func(p *lb.Peer) { p.PasswordSecret = &lb.Key{Name: "s"} })}, "",
			lb.ReasonSecretMissing, "", true},
		{"empty Secret", []func(*bgpWorld){one(func(p *lb.Peer) { p.PasswordSecret = &lb.Key{Name: "s"} }),
			func(w *bgpWorld) { w.bgp.Passwords = map[string]string{"s": ""} }}, "", lb.ReasonSecretMissing, "", true},
		{
			"Secret elsewhere",
			[]func(*bgpWorld){one(func(p *lb.Peer) { p.PasswordSecret = &lb.Key{Namespace: "default", Name: "s"} })}, "",
			lb.ReasonSecretElsewhere, "", true},
		{"BFD", []func(*bgpWorld){one(func(p *lb.Peer) { p.BFDProfile = "fast" }), func(w *bgpWorld) {
			w.bgp.Profiles = map[string]lb.BFDProfile{"fast": {Name: "fast"}}
			w.bgp.BFDDown = map[string]bool{"tor-1": true}
		}}, "64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "" bfd true`, "", "",
			true},
		{"no such BFD profile", []func(*bgpWorld){one(func(p *lb.Peer) { p.BFDProfile = "fast" })},
			"64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "" bfd false`, "",
			lb.ReasonProfileMissing, true},
		{
			"a problem of the object",
			[]func(*bgpWorld){one(func(p *lb.Peer) { p.Problem = lb.Refuse(lb.ReasonPeerInvalid, "x") })}, "",
			lb.ReasonPeerInvalid, "", true},
		{"a younger one for the same router", []func(*bgpWorld){one(func(p *lb.Peer) { p.Created = time.Unix(1000, 0) }),
			func(w *bgpWorld) {
				w.bgp.Peers["old"] = bgpPeer("old", "10.0.0.2")
			}}, "", lb.ReasonPeerDuplicate, "", true},
		{"another port is another router", []func(*bgpWorld){one(func(p *lb.Peer) { p.Created = time.Unix(1000, 0) }),
			func(w *bgpWorld) {
				w.bgp.Peers["old"] = bgpPeer("old", "10.0.0.2", func(p *lb.Peer) { p.Port = 1790 })
			}}, "64500>64501 10.0.0.2 id 10.0.0.1 families [IPv4] hops " + none + " " + none + ` password "" bfd false`, "", "",
			true},
	} {
		t.Run(test.name, func(t *testing.T) {
			d := newBGPWorld(test.change...).decide()
			s, ok := d.Sessions["tor-1"]
			got := ""
			if ok {
				got = describe(s)
			}
			if got != test.want {
				t.Errorf("session %s\nwant    %s", got, test.want)
			}
			p, selected := d.Peers["tor-1"]
			if reasonOf(p.Refusal) != test.refusal || reasonOf(p.Warning) != test.warning || selected != test.selected {
				t.Errorf("refusal %v, warning %v, selected %v", p.Refusal, p.Warning, selected)
			}
		})
	}
}

func reasonOf(r *lb.Refusal) lb.Reason {
	if r == nil {
		return ""
	}
	return r.Reason
}

// The Ready conditions of advertisements.
func TestCheckBGP(t *testing.T) {
	young := func(a *lb.BGPAdvertisement) { a.Created = time.Unix(1000, 0) }
	internal := func(w *bgpWorld) {
		w.bgp.Peers = map[string]lb.Peer{"tor-1": bgpPeer("tor-1", "10.0.0.2", func(p *lb.Peer) { p.PeerASN = 64500 })}
	}
	web, dns := lb.Key{Namespace: "default", Name: "web"}, lb.Key{Namespace: "default", Name: "dns"}
	two := []BGPHeld{{VIP: addr("192.0.2.1"), Service: web, Labels: labels.Set{"app": "web"}},
		{VIP: addr("192.0.2.2"), Service: dns, Labels: labels.Set{"app": "dns"}, Local: true}}
	for _, test := range []struct {
		name   string
		change []func(*bgpWorld)
		held   []BGPHeld
		ad     string
		status bool
		reason lb.Reason
		words  string
	}{
		{"well", nil, two, "all", true, lb.ReasonAdvertisementReady, ""},
		{"a selector that cannot be read", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) {
			a.BadSelector, a.Pools = badSelector, []string{"web", "x"}
		})}, two, "all", false, lb.ReasonSelectorInvalid, badSelector.Message + "; there is no IPAddressPool x"},
		{"unknown community", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Communities = []string{"gold"} })},
			two, "all", false, lb.ReasonUnknownCommunity, "no Community object defines the name gold"},
		{
			"unknown pool and peer",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.Pools, a.Peers = []string{"web", "x"}, []string{"y"} })},
			two, "all", false, lb.ReasonUnknownPool,
			"there is no IPAddressPool x; there is no BGPPeer y"},
		{"aggregate beyond the pool", []func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = 27 })},
			two[:1], "all", false, lb.ReasonAggregateOutside, "192.0.2.0/27"},
		{"aggregate with a Local Service beside others",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = 28 })}, two, "all", false,
			lb.ReasonAggregateLocal,
			"192.0.2.0/28 attracts traffic for 192.0.2.2 to nodes that cannot deliver it, as Service default/dns has " +
				"externalTrafficPolicy Local"},
		{"aggregate with a Local Service alone",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.AggregationLength = 28 })}, two[1:], "all", true,
			lb.ReasonAdvertisementReady, ""},
		{
			"localPref for external peers",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.LocalPref = new(uint32(1)) })}, two, "all", true,
			lb.ReasonAttributeUnsent, "speakers send localPref to internal peers only"},
		{"localPref for internal peers", []func(*bgpWorld){internal,
			withAd(func(a *lb.BGPAdvertisement) { a.LocalPref = new(uint32(1)) })}, two, "all", true,
			lb.ReasonAdvertisementReady, ""},
		{"prepending for internal peers", []func(*bgpWorld){internal, withAd(func(a *lb.BGPAdvertisement) { a.Prepend = 1 })},
			two, "all", true, lb.ReasonAttributeUnsent, "speakers apply asPathPrepend towards external peers only"},
		{
			"conflict: the younger one is marked",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.LocalPref = new(uint32(200)) }),
				also(bgpAd("young", young, func(a *lb.BGPAdvertisement) { a.LocalPref = new(uint32(300)) }))}, two, "young", false,
			lb.ReasonAttributeConflict,
			"localPref of 192.0.2.1/32 is 200 by the older BGPAdvertisement all, which holds, and 300 by this one"},
		{
			"conflict: the older one is not",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.MED = new(uint32(200)) }),
				also(bgpAd("young", young, func(a *lb.BGPAdvertisement) { a.MED = new(uint32(300)) }))}, two, "all", true,
			lb.ReasonAdvertisementReady, ""},
		{
			"no conflict: other peers",
			[]func(*bgpWorld){withAd(func(a *lb.BGPAdvertisement) { a.MED, a.Peers = new(uint32(200)), []string{"tor-1"} }),
				also(bgpAd("young", young, func(a *lb.BGPAdvertisement) { a.MED, a.Peers = new(uint32(300)), []string{"tor-2"} }))},
			two, "young", true, lb.ReasonAdvertisementReady, ""},
		{
			"no conflict: other nodes",
			[]func(*bgpWorld){
				withAd(func(a *lb.BGPAdvertisement) { a.MED, a.NodeSelectors = new(uint32(200)), selector("rack=a") }),
				also(
					bgpAd("young", young, func(a *lb.BGPAdvertisement) {
						a.MED, a.NodeSelectors = new(uint32(300)),
							selector("rack=b")
					}))}, two, "young", true, lb.ReasonAdvertisementReady, ""},
		{
			"no conflict: only one says",
			[]func(*bgpWorld){also(bgpAd("young", young, func(a *lb.BGPAdvertisement) { a.MED = new(uint32(300)) }))}, two,
			"young", true, lb.ReasonAdvertisementReady, ""},
		{
			"no conflict: other Services",
			[]func(*bgpWorld){
				withAd(func(a *lb.BGPAdvertisement) { a.MED, a.ServiceSelectors = new(uint32(200)), selector("app=web") }),
				also(
					bgpAd("young", young, func(a *lb.BGPAdvertisement) {
						a.MED, a.ServiceSelectors = new(uint32(300)),
							selector("app=dns")
					}))}, two, "young", true, lb.ReasonAdvertisementReady, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newBGPWorld(test.change...)
			got := CheckBGP(w.bgp, w.facts.Pools, test.held)
			c := got[test.ad]
			if c.Status != test.status || c.Reason != test.reason || !strings.Contains(c.Message, test.words) ||
				c.Type != lb.ConditionReady {
				t.Errorf("%+v", c)
			}
			backwards := slices.Clone(test.held)
			slices.Reverse(backwards)
			if diff := cmp.Diff(got, CheckBGP(w.bgp, w.facts.Pools, backwards)); diff != "" {
				t.Errorf("in another order:\n%s", diff)
			}
		})
	}
}

// A story of events on one node, told in any order and with repetitions, ends in the same routes.
func TestBGPStoryInAnyOrder(t *testing.T) {
	events := []func(*bgpWorld){
		func(w *bgpWorld) {
			w.bgp.Peers["tor-2"] = bgpPeer("tor-2", "10.0.0.3", func(p *lb.Peer) { p.DualStack = true })
		},
		also(bgpAd("wide", func(a *lb.BGPAdvertisement) { a.AggregationLength, a.Peers = 29, []string{"tor-2"} })),
		withAd(func(a *lb.BGPAdvertisement) { a.Communities = []string{"64500:1"} }),
		func(w *bgpWorld) { w.put(heldVIP("192.0.2.2", "a", lb.Cluster, 0)) },
		func(w *bgpWorld) { w.put(heldVIP("192.0.2.3", "b", lb.Local, 0)) },
		func(w *bgpWorld) { w.put(heldVIP("192.0.2.9", "c", lb.Local, 1)) },
		func(w *bgpWorld) { w.put(heldVIP("fd01::5", "d", lb.Cluster, 0)) },
	}
	const want = "tor-1: 192.0.2.1/32 64500:1, 192.0.2.2/32 64500:1, 192.0.2.9/32 64500:1; " +
		"tor-2: 192.0.2.0/29, 192.0.2.1/32 64500:1, 192.0.2.2/32 64500:1, 192.0.2.8/29, 192.0.2.9/32 64500:1, fd01::5/128 " +
		"64500:1"
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		w := newBGPWorld()
		told := append(slices.Clone(events), events[random.IntN(len(events))])
		random.Shuffle(len(told), func(i, j int) { told[i], told[j] = told[j], told[i] })
		for _, e := range told {
			e(w)
			w.decide()
		}
		if got := heard(w.decide()); got != want {
			t.Fatalf("heard %q\nwant  %q", got, want)
		}
	}
}

// put sets what is known of one VIP.
func (w *bgpWorld) put(in BGPInput) {
	w.vips = slices.DeleteFunc(w.vips, func(o BGPInput) bool { return o.VIP == in.VIP })
	w.vips = append(w.vips, in)
}

func manyVIPs(n int) *bgpWorld {
	w := newBGPWorld()
	w.facts.Pools["large"] = lb.Pool{Name: "large", Ranges: ranges("10.100.0.0/16")}
	w.vips = nil
	for i := range n {
		w.vips = append(w.vips, heldVIP(netip.AddrFrom4([4]byte{10, 100, byte(i >> 8), byte(i)}).String(), fmt.Sprint("s", i),
			lb.Cluster, 0))
	}
	return w
}

// BenchmarkDecideBGP plans 5,000 VIPs for two peers.
func BenchmarkDecideBGP(b *testing.B) {
	w := manyVIPs(5000)
	b.ReportAllocs()
	for b.Loop() {
		if d := w.decide(); len(d.Sessions["tor-2"].Routes) != 5000 {
			b.Fatal("routes are missing")
		}
	}
}

// TestContract1ARouterHearsNothingThatItsLinkDoesNotForward has the kernel forward nothing of a family
// that comes in at an uplink, which need not have an address of the Node.
func TestContract1ARouterHearsNothingThatItsLinkDoesNotForward(t *testing.T) {
	uplink := func(w *bgpWorld) {
		w.facts.CheckForwarding = true
		w.facts.Interfaces = append(w.facts.Interfaces, lb.Interface{Name: "up0", Up: true, Addresses: []netip.Prefix{
			netip.MustParsePrefix("172.16.0.9/24"), netip.MustParsePrefix("fe80::9/64")}})
		w.bgp.Peers["tor-2"] = bgpPeer("tor-2", "172.16.0.2", func(p *lb.Peer) { p.DualStack = true })
		w.vips = append(w.vips, heldVIP("fd01::1", "web", lb.Cluster, 0))
	}
	off := func(at int, families ...lb.Family) func(*bgpWorld) {
		return func(w *bgpWorld) {
			for _, family := range families {
				w.facts.Interfaces[at].Unforwarded4 = w.facts.Interfaces[at].Unforwarded4 || family == lb.IPv4
				w.facts.Interfaces[at].Unforwarded6 = w.facts.Interfaces[at].Unforwarded6 || family == lb.IPv6
			}
		}
	}
	unnumbered := func(w *bgpWorld) {
		w.bgp.Peers["tor-2"] = bgpPeer("tor-2", "172.16.0.2", func(p *lb.Peer) { p.Addr, p.Interface = netip.Addr{}, "up0" })
	}
	far := func(w *bgpWorld) { w.bgp.Peers["tor-2"] = bgpPeer("tor-2", "172.31.0.2") }
	from := func(w *bgpWorld, source string) {
		p := w.bgp.Peers["tor-2"]
		p.Source = addr(source)
		w.bgp.Peers["tor-2"] = p
	}
	dummy := func(w *bgpWorld) {
		w.facts.Interfaces = append(w.facts.Interfaces, lb.Interface{Name: "dummy0", Up: true, NoARP: true, Dummy: true,
			Unforwarded4: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.99.0.1/32")}})
	}
	session := func(w *bgpWorld, local string) {
		w.bgp.Locals = map[string]netip.Addr{"tor-2": addr(local)}
	}
	tunnel := func(w *bgpWorld) {
		w.facts.Interfaces[1].NoARP, w.facts.Interfaces[1].Addresses = true, []netip.Prefix{netip.MustParsePrefix("10.98.0.1/32")}
		far(w)
		off(1, lb.IPv4)(w)
	}
	join := func(w *bgpWorld, ready int, onNode bool) {
		h := heldVIP("192.0.2.1", "other", lb.Cluster, ready).Holders[0]
		h.Joined, h.Service.Namespace, h.Delivery.OnNode = true, "tenant", onNode
		w.vips[0].Holders = append(w.vips[0].Holders, h)
	}
	const v4, v6 = "192.0.2.1", "fd01::1"
	for _, c := range []struct {
		name     string
		change   func(*bgpWorld)
		want     string
		obstacle string // the VIP that tor-2 does not hear of
	}{
		{"forwarded", func(*bgpWorld) {}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"no IPv4", off(1, lb.IPv4), "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"no IPv4, and none is needed", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			w.vips[0].Holders[0].Delivery.OnNode = true
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"no IPv4, which another Service of the address needs", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			w.vips[0].Holders[0].Delivery.OnNode = true
			w.vips[0].Holders = append(w.vips[0].Holders, heldVIP(v4, "other", lb.Cluster, 1).Holders...)
		}, "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"no IPv4, which a Service that joined needs", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			w.vips[0].Holders[0].Delivery.OnNode = true
			join(w, 1, false)
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"no IPv4, and a Service that joined needs none", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			join(w, 1, true)
		}, "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"no IPv4, which a Service needs that joined one without endpoints", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			empty(w.vips[0].Holders[0].Delivery)
			join(w, 1, false)
		}, "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"no IPv4, and none is needed by a Service that joined one without endpoints", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			empty(w.vips[0].Holders[0].Delivery)
			join(w, 1, true)
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"no IPv4, and none is needed by endpoints that are terminating", func(w *bgpWorld) {
			off(1, lb.IPv4)(w)
			d := w.vips[0].Holders[0].Delivery
			local(0, 1, 1, 0)(d)
			d.OnNode, w.vips[0].Announced = true, true
		}, "tor-1: 192.0.2.1/32 lp 0 65535:0; tor-2: 192.0.2.1/32 lp 0 65535:0, fd01::1/128", ""},
		{"no IPv6", off(1, lb.IPv6), "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", v6},
		{"elsewhere", off(0, lb.IPv6), "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"unnumbered, no IPv4", func(w *bgpWorld) { unnumbered(w); off(1, lb.IPv4)(w) },
			"tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"unnumbered, elsewhere", func(w *bgpWorld) { unnumbered(w); off(0, lb.IPv6)(w) },
			"tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"a router that is not near", func(w *bgpWorld) { far(w); off(1, lb.IPv4, lb.IPv6)(w) },
			"tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", ""},
		{"a router that is not near, to an address of the uplink", func(w *bgpWorld) {
			w.bgp.Peers["tor-2"] = bgpPeer("tor-2", "172.31.0.2", func(p *lb.Peer) { p.Source = addr("172.16.0.9") })
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: ", v4},
		{"a near router, to an address of another interface", func(w *bgpWorld) {
			from(w, "10.0.0.7")
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"a near router, to an address of a dummy", func(w *bgpWorld) {
			from(w, "10.99.0.1")
			dummy(w)
			w.facts.Interfaces[2].Unforwarded4 = false
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"a router that is not near, to an address of a dummy", func(w *bgpWorld) {
			far(w)
			from(w, "10.99.0.1")
			dummy(w)
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", ""},
		{"a router that is not near, with a session from an address of the uplink", func(w *bgpWorld) {
			far(w)
			session(w, "172.16.0.9")
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: ", v4},
		{"a router that is not near, with a session from an address of another interface", func(w *bgpWorld) {
			far(w)
			session(w, "10.0.0.7")
			off(1, lb.IPv4, lb.IPv6)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", ""},
		{"a router that is not near, whose sourceAddress is not that of its last session", func(w *bgpWorld) {
			far(w)
			from(w, "172.16.0.9")
			session(w, "10.0.0.7")
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: ", v4},
		{"a near router, with a session from an address of another interface", func(w *bgpWorld) {
			session(w, "10.0.0.7")
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: fd01::1/128", v4},
		{"a router behind a tunnel, to its address", func(w *bgpWorld) { tunnel(w); from(w, "10.98.0.1") },
			"tor-1: 192.0.2.1/32; tor-2: ", v4},
		{"a router behind a tunnel, with a session from its address", func(w *bgpWorld) { tunnel(w); session(w, "10.98.0.1") },
			"tor-1: 192.0.2.1/32; tor-2: ", v4},
		{"a router that is not near, with a session from an address of a dummy", func(w *bgpWorld) {
			far(w)
			session(w, "10.99.0.1")
			dummy(w)
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32", ""},
		{"two interfaces in its subnet, of which one forwards", func(w *bgpWorld) {
			w.facts.Interfaces[0].Addresses = append(w.facts.Interfaces[0].Addresses, netip.MustParsePrefix("172.16.0.8/24"))
			off(1, lb.IPv4)(w)
		}, "tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
		{"no proxy that could know", func(w *bgpWorld) { w.facts.CheckForwarding = false; off(1, lb.IPv4)(w) },
			"tor-1: 192.0.2.1/32; tor-2: 192.0.2.1/32, fd01::1/128", ""},
	} {
		w := newBGPWorld(uplink, c.change)
		d := w.decide()
		if got := heard(d); got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if c.obstacle == "" {
			continue
		}
		obstacles := d.VIPs[addr(c.obstacle)].Obstacles
		if !slices.ContainsFunc(obstacles, func(o BGPObstacle) bool {
			return o.Reason == lb.ReasonForwardingOff && o.Peer == "tor-2" && strings.Contains(o.Message, "come in at up0")
		}) {
			t.Errorf("%s: %v", c.name, obstacles)
		}
		if r := d.VIPs[addr(c.obstacle)].Refusal; c.obstacle == v6 && (r == nil || r.Reason != lb.ReasonForwardingOff) {
			t.Errorf("%s, and a peer that never takes it: %v", c.name, r)
		}
		delete(w.bgp.Peers, "tor-1")
		if r := w.decide().VIPs[addr(c.obstacle)].Refusal; r == nil || r.Reason != lb.ReasonForwardingOff {
			t.Errorf("%s, and no other peer: %v", c.name, r)
		}
	}
}
