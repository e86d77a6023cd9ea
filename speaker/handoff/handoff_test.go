package handoff

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

var (
	vip1  = netip.MustParseAddr("192.0.2.1")
	vip2  = netip.MustParseAddr("192.0.2.2")
	vip6  = netip.MustParseAddr("2001:db8::1")
	epoch = time.Unix(1e9, 0)
)

// nodes are a to d, of which d has an IPv6 address only.
func nodes() map[string][]netip.Addr {
	all := map[string][]netip.Addr{"d": {netip.MustParseAddr("fd00::4")}}
	for i, name := range []string{"a", "b", "c"} {
		all[name] = []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}),
			netip.MustParseAddr(fmt.Sprint("fd00::", i+1))}
	}
	return all
}

// view reads what is known of a VIP: "a:arp b:bgp c owner=a own routable lacks=Backends".
func view(text string) *View {
	v := &View{Claims: map[string]plan.Claim{}}
	for word := range strings.FieldsSeq(text) {
		node, how, _ := strings.Cut(word, ":")
		owner, isOwner := strings.CutPrefix(word, "owner=")
		rival, isRival := strings.CutPrefix(word, "rival=")
		lacks, isUnannounced := strings.CutPrefix(word, "lacks=")
		switch {
		case isOwner:
			v.Owner = owner
		case isRival:
			v.Rival = rival
		case isUnannounced:
			v.Unannounced = &lb.Unannounced{Reason: lb.Reason(lacks)}
		case word == "own":
			v.Announced = true
		case word == "routable":
			v.Routable = true
		case how == "arp":
			v.Claims[node] = plan.Claim{Answering: true}
		case how == "held":
			v.Claims[node] = plan.Claim{Answering: true, Held: true}
		case how == "bgp":
			v.Claims[node] = plan.Claim{Reason: lb.ReasonNoAdvertisement, Routes: "tor"}
		default:
			v.Claims[node] = plan.Claim{}
		}
	}
	return v
}

// booted counts how often each node has booted.
func booted(words string) map[string]uint64 {
	all := map[string]uint64{}
	for node := range strings.FieldsSeq(words) {
		all[node]++
	}
	return all
}

// said writes what the proxy is told of a VIP: "a; ring c b", by the nodes' names.
func said(u lb.FeedUpdate, vip netip.Addr, all map[string][]netip.Addr) string {
	names := func(addrs []netip.Addr) string {
		var names []string
		for _, addr := range addrs {
			for name, own := range all {
				if slices.Contains(own, addr) {
					names = append(names, name)
				}
			}
		}
		return strings.Join(names, " ")
	}
	previous, known := u.Previous[vip]
	if !known {
		return "unknown"
	}
	text := names(previous)
	if ring, ok := u.Ring[vip]; ok {
		text += "; ring " + names(ring)
	}
	if why, ok := u.Unannounced[vip]; ok {
		text += "; lacks " + string(why.Reason)
	}
	return strings.TrimSpace(text)
}

// TestStory tells, from the view of b, what the proxy is told of vip1.
func TestStory(t *testing.T) {
	type scene struct {
		what  string
		after time.Duration
		view  string
		dead  string
		boots string // the nodes that have booted so far, one word for each time
		want  string
		same  bool // nothing is told
	}
	for name, story := range map[string][]scene{
		"over ARP": {
			{what: "nobody answers", view: "a c", want: ""},
			{what: "a answers", view: "a:arp c owner=a", want: "a"},
			{what: "nothing is new", view: "a:arp c owner=a", want: "a", same: true},
			{what: "a and c answer, and c owns", view: "a:arp c:arp owner=c", want: "c"},
			{what: "this node owns", view: "a c owner=b", want: "c", same: true},
			{what: "c is dead", view: "a owner=b", dead: "c", want: ""},
			{what: "a false alarm", view: "a c owner=b", want: "c"},
			{what: "one that does not own answers", view: "a:arp c owner=b", want: "a"},
			{what: "another one", view: "a c:arp owner=b", want: "c"},
			{what: "two that do not own answer", view: "a:arp c:arp owner=b", want: "c", same: true},
			{what: "of IPv6 only", view: "d:arp owner=d", want: ""},
		},
		"over BGP": {
			{what: "it may be announced", view: "a c routable", want: "; ring"},
			{what: "all announce it", view: "a:bgp c:bgp own routable", want: "; ring c a"},
			{what: "a is drained", after: time.Minute, view: "a c:bgp own routable", want: "; ring c a", same: true},
			{what: "a is gone", after: time.Minute, view: "c:bgp own routable", want: "; ring c a", same: true},
			{what: "a is dead", after: time.Minute, view: "c:bgp own routable", dead: "a", want: "; ring c"},
			{what: "a false alarm", view: "c:bgp own routable", want: "; ring c a"},
			{what: "an hour later", after: lb.FlowMemory, view: "c:bgp own routable", want: "; ring c"},
			{what: "announced no more", after: lb.FlowMemory, view: "c own", want: "; ring c", same: true},
			{what: "nor by this node", after: lb.FlowMemory, view: "c", want: "; ring c", same: true},
			{what: "and that is over", after: 1, view: "c", want: ""},
		},
		"over BGP, and nodes boot": {
			{what: "all announce it", view: "a:bgp c:bgp own routable", want: "; ring c a"},
			{what: "a is dead", view: "c:bgp own routable", dead: "a", want: "; ring c"},
			{what: "it has booted", view: "c:bgp own routable", boots: "a", want: "; ring c"},
			{what: "what it announced before is reserved", view: "a:held c:bgp own routable", boots: "a", want: "a; ring c"},
			{what: "it announces", view: "a:bgp c:bgp own routable", boots: "a", want: "a; ring c a"},
			{what: "its speaker is restarted", view: "a:held c:bgp own routable", boots: "a", want: "a; ring c a", same: true},
			{what: "it boots anew", view: "c:bgp own routable", boots: "a a", want: "a; ring c"},
			{what: "c too, before it was missed", view: "own routable", boots: "a a c", want: "a; ring"},
			{what: "both announce it", view: "a:bgp c:bgp own routable", boots: "a a c", want: "a; ring c a"},
			{what: "both stop", view: "own routable", boots: "a a c", want: "a; ring c a", same: true},
		},
		"over the LAN": {
			{what: "all claim", view: "a c owner=b", want: ""},
			{what: "cut off", view: "owner=b", want: "", same: true},
			{what: "a is heard to announce", view: "owner=b rival=a", want: "a"},
			{what: "and waited for", view: "c:arp owner=b rival=a", want: "c"},
			{what: "together again", view: "a:arp c owner=a rival=a", want: "a"},
			{what: "it owns again", view: "a c owner=b", want: "a", same: true},
			{what: "c is back, and announces", view: "a c owner=b rival=c", want: "c"},
			{what: "both are", view: "a:arp c owner=b rival=c", want: "a"},
			{what: "c announces no more", view: "a c owner=b", want: "a", same: true},
			{what: "and does once more", view: "a c owner=b rival=c", want: "c"},
			{what: "c dies, and a answers", view: "a:arp owner=a", dead: "c", want: "a"},
			{what: "somebody plays c", view: "a owner=b rival=c", dead: "c", want: "a", same: true},
			{what: "c is back, and goes on to announce", view: "a c owner=b rival=c", want: "c"},
			{what: "it dies again", view: "a owner=b rival=c", dead: "c", want: ""},
			{what: "a false alarm, in which a took over", view: "a:arp c owner=b rival=c", want: "a"},
		},
		"what a rollout waits for": {
			{what: "this node has no endpoint", view: "a:arp owner=a lacks=Backends", want: "a; lacks Backends"},
			{what: "nor a session", view: "a:arp owner=a lacks=Session", want: "a; lacks Session"},
			{what: "it claims", view: "a:arp owner=a", want: "a"},
			{what: "it does no more", view: "a:arp owner=a lacks=Backends", want: "a; lacks Backends"},
			{what: "a dies", view: "owner=b lacks=Backends", dead: "a", want: "; lacks Backends"},
		},
		"both ways": {
			{what: "over ARP", view: "a:arp c owner=a", want: "a"},
			{what: "BGP is for it", after: 1, view: "a:arp c owner=a routable", want: "a; ring"},
			{what: "c announces it", after: 1, view: "a:arp c:bgp owner=a routable", want: "a; ring c a"},
		},
	} {
		var s State
		all, now := nodes(), epoch
		var u lb.FeedUpdate
		for i, c := range story {
			now = now.Add(c.after)
			f := Facts{Self: "b", Dead: strings.Fields(c.dead), Booted: booted(c.boots)}
			if i == 0 {
				f.Addresses = all
			}
			events := map[netip.Addr]*View{vip1: view(c.view)}
			next, changed := s.Step(now, f, events)
			if changed {
				u.Apply(next)
			}
			if changed == c.same || said(u, vip1, all) != strings.TrimSpace(c.want) {
				t.Errorf("%s, %s: told %v %q, want %q", name, c.what, changed, said(u, vip1, all), c.want)
			}
			if _, again := s.Step(now, f, events); again {
				t.Errorf("%s, %s: told twice", name, c.what)
			}
		}
		if _, changed := s.Step(now, Facts{Self: "b"}, map[netip.Addr]*View{vip1: nil}); !changed || len(s.vips) > 0 {
			t.Errorf("%s: %v is left of what is gone; told: %v", name, s.vips, changed)
		}
	}
}

// TestFacts checks what follows from the nodes, whatever else happens.
func TestFacts(t *testing.T) {
	var s State
	all := nodes()
	events := map[netip.Addr]*View{vip1: view("a:bgp c:bgp own routable"), vip6: view("a:arp d:arp owner=d")}
	u, _ := s.Step(epoch, Facts{Self: "b", Addresses: all}, events)
	if got := said(u, vip6, all); got != "d" {
		t.Errorf("of IPv6: %q", got)
	}
	if _, changed := s.Step(epoch, Facts{Self: "b", Addresses: nodes()}, nil); changed {
		t.Error("the same nodes are told of again")
	}
	moved := nodes()
	moved["c"] = []netip.Addr{netip.MustParseAddr("10.0.0.0")}
	u, changed := s.Step(epoch, Facts{Self: "b", Addresses: moved}, nil)
	if got := said(u, vip1, moved); !changed || got != "; ring c a" || u.Ring[vip1][0] != moved["c"][0] {
		t.Errorf("another address: told %v %q %v", changed, got, u.Ring[vip1])
	}
	u, changed = s.Step(epoch, Facts{Self: "b", Dead: []string{"c", "d"}}, nil)
	gone := slices.Concat(moved["c"], moved["d"])
	if !changed || !slices.Equal(u.Dead, []string{"c", "d"}) || !slices.Equal(u.Gone, gone) || said(u, vip6, all) != "" {
		t.Errorf("dead: told %v %+v", changed, u)
	}
}

// A machine that comes back under another name has the address of a Node that is dead, and a Node may show any
// address. As long as one that is not dead shows it, connections of its node are still passed to it.
func TestAddressOfALiveNodeIsNotGone(t *testing.T) {
	var s State
	all := nodes()
	own := netip.MustParseAddr("10.0.0.9")
	all["x"] = []netip.Addr{own, all["b"][0], all["c"][0], all["a"][1]}
	events := map[netip.Addr]*View{vip1: view("a:bgp c:bgp own routable"), vip2: view("x:arp owner=x")}
	f := Facts{Self: "b", Addresses: all, Dead: []string{"a", "x"}}
	u, _ := s.Step(epoch, f, events)
	want := []netip.Addr{all["a"][0], all["a"][1], own}
	slices.SortFunc(u.Gone, netip.Addr.Compare)
	slices.SortFunc(want, netip.Addr.Compare)
	if got := slices.Compact(u.Gone); !slices.Equal(got, want) || said(u, vip1, nodes()) != "; ring c" {
		t.Errorf("gone: %v, want %v; told %q", got, want, said(u, vip1, nodes()))
	}
	all = maps.Clone(all)
	delete(all, "c")
	u, changed := s.Step(epoch, Facts{Self: "b", Addresses: all, Dead: f.Dead}, nil)
	if c := nodes()["c"][0]; !changed || !slices.Contains(u.Gone, c) {
		t.Errorf("only the dead one shows %s: told %v, gone %v", c, changed, u.Gone)
	}
}

// A node whose Node is deleted holds connections as one that drains does.
func TestContract5ADeletedNodeIsRemembered(t *testing.T) {
	without := func(names ...string) map[string][]netip.Addr {
		all := nodes()
		for _, name := range names {
			delete(all, name)
		}
		return all
	}
	reused := without("a")
	reused["new"] = nodes()["a"]
	for name, story := range map[string][]struct {
		what       string
		after      time.Duration
		addresses  map[string][]netip.Addr
		dead, left []string
		want       string
	}{
		"for as long as connections": {
			{what: "its Node is deleted", addresses: without("a"), want: "a; ring c a"},
			{what: "it leaves", after: lb.FlowMemory, left: []string{"a"}, want: "a; ring c a"},
			{what: "nothing more happens", after: lb.FlowMemory, left: []string{"a"}, want: "a; ring c a"},
			{what: "it is over", after: 1, left: []string{"a"}, want: "; ring c"},
		},
		"its speaker goes on": {
			{what: "its Node is deleted", addresses: without("a"), want: "a; ring c a"},
			{what: "it still announces", after: lb.FlowMemory, want: "a; ring c a"},
			{what: "it does after that", after: 1, want: "a; ring c a"},
			{what: "another Node changes", after: 2 * lb.FlowMemory, addresses: without("a"), want: "a; ring c a"},
			{what: "it leaves", after: 2 * lb.FlowMemory, left: []string{"a"}, want: "a; ring c a"},
			{what: "nothing more happens", after: lb.FlowMemory, left: []string{"a"}, want: "a; ring c a"},
			{what: "it is over", after: 1, left: []string{"a"}, want: "; ring c"},
		},
		"another one is deleted": {
			{what: "its Node is deleted", addresses: without("a"), want: "a; ring c a"},
			{what: "it leaves", left: []string{"a"}, want: "a; ring c a"},
			{what: "then another one", after: lb.FlowMemory, addresses: without("a", "c"), left: []string{"a"},
				want: "a; ring c a"},
			{what: "it is over", after: 1, left: []string{"a", "c"}, want: "; ring c"},
			{what: "its Node is back", after: 1, addresses: without("c"), left: []string{"c"}, want: "a; ring c a"},
			{what: "deleted again", after: lb.FlowMemory, addresses: without("a", "c"), left: []string{"c"},
				want: "a; ring a"},
		},
		"it dies": {
			{what: "its Node is deleted", addresses: without("a"), want: "a; ring c a"},
			{what: "it dies", dead: []string{"a"}, want: "; ring c"},
			{what: "a false alarm", want: "a; ring c a"},
		},
		"it was dead": {
			{what: "it dies", dead: []string{"a"}, want: "; ring c"},
			{what: "its Node is deleted, and so it is no dead one any more", addresses: without("a"), left: []string{"a"},
				want: "; ring c"},
			{what: "nothing more happens", left: []string{"a"}, want: "; ring c"},
		},
		"it was deleted, and died": {
			{what: "its Node is deleted", addresses: without("a"), want: "a; ring c a"},
			{what: "it dies", dead: []string{"a"}, want: "; ring c"},
			{what: "another Node changes", addresses: without("a"), left: []string{"a"}, want: "; ring c"},
		},
		"it had left": {{what: "its Node is deleted", addresses: without("a"), left: []string{"a"}, want: "; ring c"}},
		"somebody else's by now": {
			{what: "its Node is deleted", addresses: without("a"), want: "a; ring c a"},
			{what: "another Node shows its address", addresses: reused, want: "; ring c"},
		},
	} {
		var s State
		var u lb.FeedUpdate
		now := epoch
		first, _ := s.Step(now, Facts{Self: "b", Addresses: nodes()}, map[netip.Addr]*View{
			vip1: view("a:bgp c:bgp own routable"), vip2: view("a:arp owner=a")})
		u.Apply(first)
		for _, c := range story {
			now = now.Add(c.after)
			events := map[netip.Addr]*View{vip1: view("c own routable a:bgp c:bgp")}
			if c.addresses != nil {
				events = nil
			}
			live := slices.DeleteFunc([]string{"a", "c"}, func(node string) bool {
				return slices.Contains(c.dead, node) || slices.Contains(c.left, node)
			})
			next, changed := s.Step(now, Facts{Self: "b", Addresses: c.addresses, Dead: c.dead, Live: live}, events)
			if changed {
				u.Apply(next)
			}
			_, ring, _ := strings.Cut(said(u, vip1, nodes()), ";")
			if got := said(u, vip2, nodes()) + ";" + ring; got != c.want {
				t.Errorf("%s, %s: told %q, want %q", name, c.what, got, c.want)
			}
		}
	}
}

// TestCutOffIsTold has the node be cut off, and come back.
func TestCutOffIsTold(t *testing.T) {
	var s State
	f := Facts{Self: "b", Addresses: nodes()}
	s.Step(epoch, f, map[netip.Addr]*View{vip1: view("a:bgp c:bgp own routable")})
	for _, cutOff := range []bool{true, false} {
		u, changed := s.Step(epoch, Facts{Self: "b", CutOff: cutOff}, nil)
		if got := said(u, vip1, nodes()); !changed || u.CutOff != cutOff || got != "; ring c a" {
			t.Errorf("cut off %v: told %v %+v", cutOff, changed, u)
		}
		if _, again := s.Step(epoch, Facts{Self: "b", CutOff: cutOff}, nil); again {
			t.Errorf("cut off %v: told twice", cutOff)
		}
	}
}

// Once the views say what is unannounced, the proxy hears so, and of all VIPs: before that, a VIP of which the
// speaker said nothing may have been unannounced.
func TestThatTheViewsSayWhatIsUnannouncedIsTold(t *testing.T) {
	var s State
	events := map[netip.Addr]*View{vip1: view("a:arp owner=a"), vip2: view("a:arp owner=a")}
	s.Step(epoch, Facts{Self: "b", Addresses: nodes()}, events)
	for _, gates := range []bool{true, false} {
		u, changed := s.Step(epoch, Facts{Self: "b", Gates: gates}, events)
		if !changed || u.Changes || u.Gates != gates || len(u.Previous) != len(events) {
			t.Errorf("gates %v: told %v %+v", gates, changed, u)
		}
		if _, again := s.Step(epoch, Facts{Self: "b", Gates: gates}, events); again {
			t.Errorf("gates %v: told twice", gates)
		}
	}
}

// TestOnlyWhatChangesIsTold has one of many VIPs change, and end.
func TestOnlyWhatChangesIsTold(t *testing.T) {
	var s State
	many := map[netip.Addr]*View{}
	for i := range 100 {
		many[netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})] = view("a:arp owner=a")
	}
	f := Facts{Self: "b", Addresses: nodes()}
	if u, _ := s.Step(epoch, f, many); u.Changes || len(u.Previous) != len(many) {
		t.Errorf("at first: %+v", u)
	}
	one := netip.MustParseAddr("192.0.2.7")
	many[one] = view("c:arp owner=c")
	u, changed := s.Step(epoch, f, many)
	if !changed || !u.Changes || len(u.Previous) != 1 || len(u.Previous[one]) != 1 || len(u.Ended) != 0 {
		t.Errorf("told %v %+v, want a change of %s only", changed, u, one)
	}
	many[one] = nil
	u, changed = s.Step(epoch, f, many)
	if !changed || !u.Changes || len(u.Previous) != 0 || !slices.Equal(u.Ended, []netip.Addr{one}) {
		t.Errorf("told %v %+v, want the end of %s only", changed, u, one)
	}
	if u, _ = s.Step(epoch, Facts{Self: "b", Dead: []string{"c"}}, nil); u.Changes || len(u.Previous) != len(many)-1 {
		t.Errorf("when a node is dead: %+v", u)
	}
}

// TestRingIsBounded has more nodes announce a VIP than a packet may pass through.
func TestRingIsBounded(t *testing.T) {
	all := map[string][]netip.Addr{}
	v := &View{Claims: map[string]plan.Claim{}, Announced: true, Routable: true}
	for i := range 3 * lb.MaxRing {
		name := fmt.Sprint("n", i)
		all[name] = []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})}
		if i != 40 {
			v.Claims[name] = plan.Claim{Routes: "tor"}
		}
	}
	var s State
	u, _ := s.Step(epoch, Facts{Self: "n40", Addresses: all}, map[netip.Addr]*View{vip1: v})
	ring := u.Ring[vip1]
	if len(ring) != lb.MaxRing || ring[0] != all["n41"][0] || ring[lb.MaxRing-1] != all["n8"][0] {
		t.Errorf("%d nodes: %v", len(ring), ring)
	}
}

// TestOrderAndRepetition plays random events: what is told in the end does not depend on whether
// the VIPs came in one step, one by one, in reverse, or twice.
func TestOrderAndRepetition(t *testing.T) {
	words := []string{"a", "a:arp", "a:bgp", "a:held", "c", "c:arp", "c:bgp", "d:arp", "owner=a", "owner=b", "owner=c",
		"own", "rival=a", "lacks=Backends", "routable"}
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 2))
		var one, single, reversed, twice State
		now := epoch
		var u lb.FeedUpdate
		boots := ""
		for range 30 {
			now = now.Add(time.Duration(r.IntN(40)) * time.Minute)
			f := Facts{Self: "b", Addresses: nodes(), Dead: [][]string{nil, nil, nil, {"c"}}[r.IntN(4)]}
			if r.IntN(8) == 0 {
				boots += " a"
			}
			f.Booted = booted(boots)
			events := map[netip.Addr]*View{}
			for _, vip := range []netip.Addr{vip1, vip2, vip6} {
				var text []string
				for range 2 + r.IntN(4) {
					text = append(text, words[r.IntN(len(words))])
				}
				switch r.IntN(6) {
				case 0:
					events[vip] = nil
				default:
					events[vip] = view(strings.Join(text, " "))
				}
			}
			if next, changed := one.Step(now, f, events); changed {
				u.Apply(next)
			}
			twice.Step(now, f, events)
			if _, changed := twice.Step(now, f, events); changed {
				t.Fatalf("seed %d: said twice, told twice", seed)
			}
			order := slices.SortedFunc(maps.Keys(events), netip.Addr.Compare)
			for _, vip := range order {
				single.Step(now, f, map[netip.Addr]*View{vip: events[vip]})
			}
			slices.Reverse(order)
			for _, vip := range order {
				reversed.Step(now, f, map[netip.Addr]*View{vip: events[vip]})
			}
			for what, other := range map[string]*State{"one by one": &single, "reversed": &reversed, "twice": &twice} {
				if got := other.update(maps.Keys(other.vips)); !reflect.DeepEqual(got, u) {
					t.Fatalf("seed %d, %s: %+v, want %+v", seed, what, got, u)
				}
			}
		}
	}
}

// A node from which another product announces is in the ring of each VIP that BGP is for, and stays
// there for as long as it may hold silent connections.
func TestTheRingHasNodesOfAnotherProduct(t *testing.T) {
	var s State
	all, now := nodes(), epoch
	events := map[netip.Addr]*View{vip1: view("a c routable"), vip2: view("a:arp c owner=a")}
	var u lb.FeedUpdate
	for _, c := range []struct {
		what    string
		after   time.Duration
		foreign []string
		want    string
	}{
		{what: "all are MetalLB's", foreign: []string{"a", "b", "c"}, want: "; ring c a"},
		{what: "a is swapped", foreign: []string{"b", "c"}, want: "; ring c a"},
		{what: "it may hold connections", after: lb.FlowMemory, foreign: []string{"b", "c"}, want: "; ring c a"},
		{what: "an hour later", after: time.Second, foreign: []string{"b", "c"}, want: "; ring c"},
		{what: "all are swapped", want: "; ring c"},
		{what: "and an hour later", after: lb.FlowMemory + time.Second, want: "; ring"},
	} {
		now = now.Add(c.after)
		next, changed := s.Step(now, Facts{Self: "b", Addresses: all, Foreign: c.foreign}, events)
		if changed {
			u.Apply(next)
		}
		if got := said(u, vip1, all); got != c.want {
			t.Errorf("%s: told %q, want %q", c.what, got, c.want)
		}
		if got := said(u, vip2, all); got != "a" {
			t.Errorf("%s: of a VIP that is not routed: told %q", c.what, got)
		}
		events = nil
	}
}
