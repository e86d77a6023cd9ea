package ahead

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

var (
	addr = netip.MustParseAddr("192.0.2.1")
	eth0 = []string{"eth0"}
)

// scene is one step of the story of an address, as node b sees it.
type scene struct {
	what    string
	after   time.Duration
	next    bool   // the pool hands it out next
	held    bool   // a Service has it
	served  bool   // and a node of ours has answered for it
	scouted string // the node that has asked, as the actor says
	claims  string // of the others: "a:ahead c:conflict"
	gone    string // a node that has gone

	listens bool // the actor only listens
	claim   bool // this node tells the others that nobody uses it
	clear   bool
	again   time.Duration
}

func TestStory(t *testing.T) {
	for name, story := range map[string][]scene{
		"probed by this node": {
			{what: "unknown", next: true},
			{what: "nobody has answered", next: true, scouted: "b", claim: true, clear: true},
			{what: "a Service is about to get it", scouted: "b", listens: true, claim: true, clear: true, again: linger},
			{what: "and has it", after: time.Second, held: true, scouted: "b", listens: true, claim: true, clear: true,
				again: linger - time.Second},
			{what: "long ago", after: linger, held: true, scouted: "b"},
		},
		"a node answers for it": {
			{what: "nobody has answered", next: true, scouted: "b", claim: true, clear: true},
			{what: "a Service has it", held: true, scouted: "b", listens: true, claim: true, clear: true, again: linger},
			{what: "and a node answers", after: time.Second, held: true, served: true, scouted: "b"},
		},
		"somebody takes it": {
			{what: "nobody has answered", next: true, scouted: "b", claim: true, clear: true},
			{what: "seen", next: true},
			{what: "a Service gets it all the same", held: true, listens: true, again: linger},
		},
		"probed by another node": {
			{what: "it has asked", next: true, scouted: "a"},
			{what: "and says that nobody has answered", next: true, scouted: "a", claims: "a:ahead", clear: true},
			{what: "it speaks of a Service that has it", next: true, scouted: "a", claims: "a:", clear: true},
			{what: "a Service has it", held: true, scouted: "a", claims: "a: c:", listens: true,
				clear: true, again: linger},
		},
		"another node takes back what it said": {
			{what: "it says that nobody has answered", next: true, scouted: "a", claims: "a:ahead", clear: true},
			{what: "somebody has", next: true, scouted: "a"},
			{what: "again", next: true, scouted: "a", claims: "a:ahead", clear: true},
			{what: "it is gone", next: true, scouted: "a", claims: "a:ahead", gone: "a"},
		},
		"another node finds somebody when the Service has it": {
			{what: "it says that nobody has answered", next: true, scouted: "a", claims: "a:ahead", clear: true},
			{what: "a Service has it", held: true, scouted: "a", claims: "a:conflict", listens: true, again: linger},
		},
		"the word of a node on another LAN": {
			{what: "says that nobody has answered", next: true, claims: "c:ahead"},
			{what: "while a third one is heard here", next: true, scouted: "a", claims: "c:ahead"},
		},
		"nobody is asked any more": {
			{what: "nobody has answered", next: true, scouted: "b", claim: true, clear: true},
			{what: "it is not handed out next any more", scouted: "b", listens: true, claim: true, clear: true, again: linger},
			{what: "it is", after: time.Second, next: true, scouted: "b", claim: true, clear: true},
		},
	} {
		var s State
		now := time.Unix(1e9, 0)
		for _, c := range story {
			now = now.Add(c.after)
			before := state(&s)
			all := c.gone != "" // else no more than what has changed
			touched, _, again := s.Step(now, c.facts(), Events{All: all, Next: true, Heard: map[netip.Addr]bool{addr: true}})
			if differ := state(&s) != before; differ && !touched[addr] {
				t.Errorf("%s, %s: what is known has changed, and nobody is told", name, c.what)
			}
			scout, wanted := s.Desired()[addr]
			if wanted != (c.next && !c.held || c.listens) || wanted && (scout.Rank < 0) != c.listens {
				t.Errorf("%s, %s: the actor is told %+v", name, c.what, s.Desired())
			}
			if (s.Claim(addr) != nil) != c.claim || slices.Equal(s.Clear("b", addr), eth0) != c.clear && wanted {
				t.Errorf("%s, %s: claim %v, clear on %v", name, c.what, s.Claim(addr), s.Clear("b", addr))
			}
			if again != c.again {
				t.Errorf("%s, %s: again in %s, want %s", name, c.what, again, c.again)
			}
			if touched, changed, _ := s.Step(now, c.facts(), Events{All: true}); changed || len(touched) > 0 {
				t.Errorf("%s, %s: a second look gives the actor something to do, or the step: %v", name, c.what, touched)
			}
		}
	}
}

func state(s *State) [2]bool {
	return [2]bool{s.Claim(addr) != nil, len(s.Clear("b", addr)) > 0}
}

func (c scene) facts() Facts {
	node := plan.Facts{
		Self: "b", Node: &lb.Node{Name: "b"}, Joined: true, Live: []string{"a", "b", "c"},
		Pools:          map[string]lb.Pool{"lan": {Name: "lan", ProbeAhead: 1, Ranges: []lb.Range{{From: addr, To: addr}}}},
		Advertisements: map[string]lb.L2Advertisement{"lan": {Name: "lan"}},
		Interfaces: []lb.Interface{{Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Up: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.250/24")}}},
	}
	node.Live = slices.DeleteFunc(node.Live, func(n string) bool { return n == c.gone })
	if c.next {
		pool := node.Pools["lan"]
		pool.Status.Next = pool.Ranges
		node.Pools["lan"] = pool
	}
	f := Facts{Node: node, Held: func(netip.Addr) bool { return c.held },
		Served: func(netip.Addr) bool { return c.served }, Room: 10,
		Claims: func(netip.Addr) map[string]plan.Claim {
			claims := map[string]plan.Claim{}
			for word := range strings.FieldsSeq(c.claims) {
				node, what, _ := strings.Cut(word, ":")
				claims[node] = plan.Claim{Reason: map[string]lb.Reason{
					"ahead": lb.ReasonProbedAhead, "conflict": lb.ReasonAddressConflict}[what]}
			}
			maps.DeleteFunc(claims, func(node string, _ plan.Claim) bool { return node == c.gone })
			return claims
		}}
	if c.scouted != "" {
		f.Scouted = map[netip.Addr]map[string]string{addr: {"eth0": c.scouted}}
	}
	return f
}

// Where there is no room to tell of more addresses, none is probed.
func TestRoom(t *testing.T) {
	var s State
	f := scene{next: true}.facts()
	f.Room = 0
	if _, changed, _ := s.Step(time.Unix(0, 0), f, Events{All: true}); changed || len(s.Desired()) > 0 {
		t.Errorf("%v", s.Desired())
	}
}
