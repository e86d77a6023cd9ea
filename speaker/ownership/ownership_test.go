package ownership

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
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
	epoch = time.Unix(1e9, 0)
	eth0  = []string{"eth0"}
)

func facts(self string) plan.Facts {
	return plan.Facts{
		Self: self, Node: &lb.Node{Name: self}, Joined: true, Live: []string{"a", "b", "c"},
		Pools: map[string]lb.Pool{"lan": {Name: "lan", Ranges: []lb.Range{{From: netip.MustParseAddr("192.0.2.0"),
			To: netip.MustParseAddr("192.0.2.255")}}}},
		Advertisements: map[string]lb.L2Advertisement{"lan": {Name: "lan"}},
		Interfaces: []lb.Interface{{Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Up: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.250/24")}}},
	}
}

// input is a VIP that this node can deliver, with what others say: "b:answers c:conflict", and
// "restarted" if this node's speaker was.
func input(vip netip.Addr, claims string) plan.Input {
	key := lb.Key{Namespace: "default", Name: "s" + vip.String()}
	in := plan.Input{VIP: vip, Claims: map[string]plan.Claim{},
		Holders: []plan.Holder{{Service: key, Delivery: &lb.Delivery{Service: key, VIP: vip, Policy: lb.Cluster, Ready: 1}}}}
	for word := range strings.FieldsSeq(claims) {
		if word == "restarted" {
			in.Restarted = true
			continue
		}
		node, what, _ := strings.Cut(word, ":")
		switch what {
		case "answers":
			in.Claims[node] = plan.Claim{Answering: true}
		case "conflict":
			in.Claims[node] = plan.Claim{Reason: lb.ReasonAddressConflict}
		case "withdraws":
			in.Claims[node] = plan.Claim{Reason: lb.ReasonAddressConflict, Answering: true}
		case "ahead":
			in.Claims[node] = plan.Claim{Reason: lb.ReasonProbedAhead}
		case "leaves":
			in.Claims[node] = plan.Claim{Reason: lb.ReasonNodeLeaving}
		default:
			in.Claims[node] = plan.Claim{}
		}
	}
	return in
}

// ranked are the nodes in the order in which they would own the VIP.
func ranked(vip netip.Addr) (order []string) {
	nodes := []string{"a", "b", "c"}
	for len(nodes) > 0 {
		winner := plan.Winner(vip, nodes)
		order = append(order, winner)
		nodes = slices.DeleteFunc(nodes, func(n string) bool { return n == winner })
	}
	return order
}

// scene is one step of the story of vip1. Nodes are written as 1, 2 and 3, in the order in which
// they would own it.
type scene struct {
	what     string
	after    time.Duration
	claims   string // of the others; "gone" when no Service holds the VIP
	seen     string // by the actor: answers, probed, conflicting
	stopping bool
	want     string // owner, and what the actor is to do
	again    time.Duration
	same     bool // the actor has nothing else to do
}

func TestStory(t *testing.T) {
	for name, story := range map[string]struct {
		self   string
		scenes []scene
	}{
		"the first probes, answers, and hands over": {"1", []scene{
			{what: "new", claims: "", want: "1 probes", again: FreshFor},
			{what: "the others claim too", claims: "2 3", want: "1 probes", again: FreshFor, same: true},
			{what: "nobody has it", claims: "2 3", seen: "probed", want: "1 answers", again: FreshFor},
			{what: "it takes a while", claims: "2 3", seen: "conflicting", want: "1 answers", again: FreshFor, same: true},
			{what: "it answers", claims: "2 3", seen: "probed answers", want: "1 answers", same: true},
			{what: "another answers too", claims: "2:answers 3", seen: "answers", want: "1 answers 1"},
			{what: "and does so no more", claims: "2 3", seen: "answers", want: "1 answers 2"},
			{what: "it is told to end", claims: "2 3", seen: "answers", stopping: true, want: "2 answers 2 to hand over"},
			{what: "the heir answers", claims: "2:answers 3", seen: "answers", stopping: true, want: "2"},
			{what: "over", claims: "2:answers 3", stopping: true, want: "2", same: true},
			{what: "gone", claims: "gone", stopping: true, want: "", same: true},
		}},
		"a fresh VIP waits for who will own it": {"2", []scene{
			{what: "new", claims: "", want: "1", again: FreshFor, same: true},
			{what: "half of the time", after: FreshFor / 2, claims: "3", want: "1", again: FreshFor / 2, same: true},
			{what: "nobody came", after: FreshFor / 2, claims: "3", want: "2 probes"},
			{what: "somebody has it", claims: "3", seen: "conflicting", want: "3 probes", same: true},
			{what: "so do the others say", claims: "3:conflict", seen: "conflicting", want: " probes", same: true},
			{what: "he has left", claims: "3:conflict", seen: "probed", want: "2 answers"},
			{what: "gone", claims: "gone", want: ""},
			{what: "anew", after: time.Hour, claims: "", want: "1", again: FreshFor, same: true},
		}},
		"what was served is taken over without a question": {"2", []scene{
			{what: "the first answers", claims: "1:answers 3", want: "1", same: true},
			{what: "and is lost", claims: "3", want: "2 answers"},
			{what: "it answers, and somebody else does", claims: "3", seen: "answers conflicting", want: "2 answers",
				same: true},
			{what: "the first is back", after: time.Minute, claims: "1 3", seen: "answers", want: "2 answers", same: true},
		}},
		"what was probed ahead is announced and probed side by side": {"1", []scene{
			{what: "new", claims: "2:ahead 3", want: "1 answers probes", again: FreshFor},
			{what: "it answers", claims: "2:ahead 3", seen: "answers", want: "1 answers probes", same: true},
			{what: "the others claim", claims: "2 3", seen: "answers", want: "1 answers probes", same: true},
			{what: "nobody has it", claims: "2 3", seen: "answers probed", want: "1 answers"},
			{what: "who comes now is too late", claims: "2 3", seen: "answers conflicting", want: "1 answers", same: true},
		}},
		"somebody has taken it since it was probed ahead": {"1", []scene{
			{what: "new", claims: "2:ahead 3", want: "1 answers probes", again: FreshFor},
			{what: "it answers", claims: "2 3", seen: "answers", want: "1 answers probes", same: true},
			{what: "so does he", claims: "2 3", seen: "answers conflicting", want: "2 probes"},
			{what: "withdrawn", claims: "2 3", seen: "conflicting probed", want: "2 probes", same: true},
			{what: "the others ask as well", claims: "2:conflict 3:conflict", seen: "conflicting probed", want: "probes",
				same: true},
			{what: "he has left", claims: "2:conflict 3:conflict", seen: "probed", want: "1 answers"},
		}},
		"the next one asks when the first has withdrawn": {"2", []scene{
			{what: "the first answers", claims: "1:answers 3", want: "1", same: true},
			{what: "and has found somebody", claims: "1:conflict 3", want: "2 probes"},
			{what: "so has this one", claims: "1:conflict 3", seen: "conflicting probed", want: "3 probes", same: true},
		}},
		"the next one asks while the first withdraws": {"2", []scene{
			{what: "the first answers", claims: "1:answers 3:ahead", want: "1", same: true},
			{what: "has found somebody, and answers still", claims: "1:withdraws 3:ahead", want: "2 probes"},
			{what: "answers no more", claims: "1:conflict 3:ahead", want: "2 probes", same: true},
			{what: "he is there", claims: "1:conflict 3:ahead", seen: "conflicting probed", want: "probes", same: true},
		}},
		"a speaker that was restarted goes on": {"2", []scene{
			{what: "new to it", claims: "3 restarted", want: "2 answers", again: FreshFor},
			{what: "nobody waits any more", after: FreshFor, claims: "1 3", seen: "answers", want: "2 answers", same: true},
		}},
	} {
		play(t, name, story.self, story.scenes)
	}
}

func play(t *testing.T, name, self string, story []scene) {
	t.Helper()
	order := ranked(vip1)
	node := strings.NewReplacer("1", order[0], "2", order[1], "3", order[2])
	number := strings.NewReplacer(order[0], "1", order[1], "2", order[2], "3")
	s, now := New(time.Second), epoch
	for i, c := range story {
		now = now.Add(c.after)
		f := facts(node.Replace(self))
		f.Stopping = c.stopping
		e := Events{VIPs: map[netip.Addr]bool{vip1: true}, Input: func(vip netip.Addr) (plan.Input, bool) {
			var words []string
			for word := range strings.FieldsSeq(c.claims) {
				words = append(words, node.Replace(word[:1])+word[1:])
			}
			in := input(vip, strings.Join(words, " "))
			if strings.Contains(c.claims, ":ahead") {
				in.Clear = eth0
			}
			return in, c.claims != "gone"
		}}
		if i > 0 && c.claims == story[i-1].claims && c.stopping == story[i-1].stopping {
			e.VIPs = nil // it is the actor that has news, or time has passed
		}
		for word := range strings.FieldsSeq(c.seen) {
			switch word {
			case "answers":
				e.Seen.Answering = map[netip.Addr][]string{vip1: eth0}
			case "probed":
				e.Seen.Probed = map[netip.Addr]bool{vip1: true}
			case "conflicting":
				e.Seen.ConflictingHosts = map[netip.Addr][]plan.ConflictingHost{
					vip1: {{Interface: "eth0", MAC: "02:00:00:00:00:99"}}}
			}
		}
		if c.claims == "gone" {
			e.Seen = Seen{}
		}
		_, changed, again := s.Step(now, f, e)
		got := state(s, number)
		if got != strings.TrimSpace(c.want) || changed == c.same || again != c.again {
			t.Errorf("%s, %s: %q, changed %v, again %s; want %q, %v, %s", name, c.what, got, changed, again, c.want,
				!c.same, c.again)
		}
		if _, changed, _ := s.Step(now, f, e); changed {
			t.Errorf("%s, %s: a second look gives the actor something to do", name, c.what)
		}
	}
}

// state writes what is decided of vip1: "a answers 2 to hand over".
func state(s State, number *strings.Replacer) string {
	d, _ := s.Decision(vip1)
	text := number.Replace(d.Owner)
	answers, probes := s.Desired()
	if answer, ok := answers[vip1]; ok {
		text += " answers"
		if answer.Round > 0 {
			text += fmt.Sprint(" ", answer.Round)
		}
	}
	if len(probes[vip1]) > 0 {
		text += " probes"
	}
	if d.Handover {
		text += " to hand over"
	}
	return strings.TrimSpace(text)
}

// TestRandom plays random events on several VIPs. What is remembered is bounded by what is held,
// what the actor and the others are told fits the decisions, and a VIP of which nothing has changed
// is not decided.
func TestRandom(t *testing.T) {
	words := []string{"", "b", "b:ahead", "b:answers", "c", "c:answers", "b:leaves", "c:conflict"}
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		s, split := New(time.Second), New(time.Second)
		now, f, moves := epoch, facts("a"), 0
		known, held := map[netip.Addr]plan.Input{}, map[netip.Addr]bool{}
		for range 40 {
			now = now.Add(time.Duration(r.IntN(700)) * time.Millisecond)
			e := Events{VIPs: map[netip.Addr]bool{}, Input: func(vip netip.Addr) (plan.Input, bool) {
				return known[vip], held[vip]
			}}
			e.Seen = Seen{Answering: map[netip.Addr][]string{}, Probed: map[netip.Addr]bool{}}
			answers, probes := s.Desired()
			for vip := range answers {
				if r.IntN(3) > 0 {
					e.Seen.Answering[vip] = eth0
				}
			}
			for vip := range probes {
				e.Seen.Probed[vip] = r.IntN(2) == 0
			}
			for range r.IntN(3) {
				vip := netip.AddrFrom4([4]byte{192, 0, 2, byte(r.IntN(5))})
				e.VIPs[vip], held[vip] = true, r.IntN(4) > 0
				in := input(vip, words[r.IntN(len(words))]+" "+words[r.IntN(len(words))])
				if r.IntN(3) == 0 {
					in.Clear = eth0
				}
				known[vip] = in
				if !held[vip] {
					delete(held, vip)
				}
			}
			decided, _, again := s.Step(now, f, e)
			for _, d := range decided {
				if !d.New && !d.Gone && d.Before.Owner != d.After.Owner {
					moves++
				}
			}
			if got := s.OwnerChanges(); got != moves {
				t.Fatalf("seed %d: %d changes of owners, want %d", seed, got, moves)
			}
			for _, vip := range slices.SortedFunc(maps.Keys(e.VIPs), netip.Addr.Compare) {
				if _, ok := decided[vip]; !ok {
					t.Fatalf("seed %d: %s was not decided", seed, vip)
				}
				one := e
				one.VIPs = map[netip.Addr]bool{vip: true}
				split.Step(now, f, one)
			}
			split.Step(now, f, Events{Seen: e.Seen, Input: e.Input})
			if !reflect.DeepEqual(s.Decisions(), split.Decisions()) {
				t.Fatalf("seed %d: one by one %v, want %v", seed, split.Decisions(), s.Decisions())
			}
			check(t, fmt.Sprint("seed ", seed), s, held)
			if again < 0 || again > FreshFor {
				t.Fatalf("seed %d: again in %s", seed, again)
			}
			if decided, changed, _ := s.Step(now, f, Events{Seen: e.Seen, Input: e.Input}); len(decided) > 0 || changed {
				t.Fatalf("seed %d: %v is decided although nothing has changed", seed, decided)
			}
		}
		e := Events{VIPs: held, Input: func(netip.Addr) (plan.Input, bool) { return plan.Input{}, false }}
		s.Step(now, f, e)
		check(t, fmt.Sprint("seed ", seed, ", at the end"), s, nil)
	}
}

func check(t *testing.T, what string, s State, held map[netip.Addr]bool) {
	t.Helper()
	if len(s.decisions) != len(held) {
		t.Fatalf("%s: %d decisions, want %d", what, len(s.decisions), len(held))
	}
	for name, vips := range map[string][]netip.Addr{
		"round": slices.Collect(maps.Keys(s.rounds)), "fresh": slices.Collect(maps.Keys(s.fresh)),
		"served": slices.Collect(maps.Keys(s.served)), "answer": slices.Collect(maps.Keys(s.answers)),
		"probe": slices.Collect(maps.Keys(s.probes)), "proof": slices.Collect(maps.Keys(s.proving)),
	} {
		for _, vip := range vips {
			if !held[vip] {
				t.Fatalf("%s: a %s of %s is left, which is gone", what, name, vip)
			}
		}
	}
	for vip := range s.unserved {
		if !held[vip] {
			t.Fatalf("%s: %s is unserved, and gone", what, vip)
		}
	}
	for vip, d := range s.decisions {
		answers := slices.ContainsFunc(d.Nodes(), func(n plan.NodeStatus) bool { return n.Answering })
		if s.unserved[vip] == answers {
			t.Fatalf("%s: unserved is %v of %s", what, s.unserved[vip], vip)
		}
		if !slices.Equal(s.answers[vip].On, d.Answer) || len(d.Answer) == 0 && !slices.Equal(s.probes[vip], d.Probe) {
			t.Fatalf("%s: the actor is told %v and %v of %+v", what, s.answers[vip], s.probes[vip], d)
		}
		if claim := s.Claim(vip); claim == nil || claim.Answering != (len(s.seen.Answering[vip]) > 0) {
			t.Fatalf("%s: the claim on %s is %v", what, vip, claim)
		}
	}
}

// When a node is back that was missing, whoever owns a VIP announces it again: that one may have
// announced it before it was heard.
func TestContract11OwnedVIPsAreAnnouncedAgainWhenANodeIsBack(t *testing.T) {
	order := ranked(vip1)
	for _, c := range []struct {
		what  string
		self  string
		round int
	}{{"the owner", order[0], 1}, {"another node", order[1], 0}} {
		s, now := New(time.Second), epoch
		f := facts(c.self)
		e := Events{VIPs: map[netip.Addr]bool{vip1: true}, Input: func(vip netip.Addr) (plan.Input, bool) {
			in := input(vip, order[1]+" "+order[2])
			if c.self != order[0] {
				in = input(vip, order[0]+":answers")
			}
			return in, true
		}}
		e.Seen.Probed = map[netip.Addr]bool{vip1: true}
		s.Step(now, f, e)
		round := func() int { return s.answers[vip1].Round }
		before := round()
		e.VIPs = nil
		f.Missing, f.Live = []string{order[2]}, []string{order[0], order[1]}
		s.Step(now, f, e)
		if round() != before {
			t.Errorf("%s: round %d when a node is lost, %d before", c.what, round(), before)
		}
		f.Missing, f.Live = nil, order
		_, changed, _ := s.Step(now, f, e)
		if got := round() - before; got != c.round || changed != (c.round > 0) {
			t.Errorf("%s: %d rounds more when it is back, changed %v; want %d", c.what, got, changed, c.round)
		}
		s.Step(now, f, e)
		if got := round() - before; got != c.round {
			t.Errorf("%s: %d rounds more after a second look", c.what, got)
		}
	}
}

// Of two nodes that answer in a partition, the one without a majority does not claim the VIP back
// from the other, also while it sees one only because it waits for speakers that it does not hear.
// When it hears a majority again, it announces what is still its own.
func TestContract11ANodeWithoutAMajorityClaimsNothingBack(t *testing.T) {
	order := ranked(vip1)
	s, now := New(time.Second), epoch
	f := facts(order[0])
	e := Events{VIPs: map[netip.Addr]bool{vip1: true}, Input: func(vip netip.Addr) (plan.Input, bool) {
		return input(vip, order[1]), true
	}}
	e.Seen.Probed = map[netip.Addr]bool{vip1: true}
	e.Seen.Answering = map[netip.Addr][]string{vip1: {"eth0"}}
	for i, c := range []struct {
		parted, alone bool
		rounds        int
	}{{false, false, 0}, {true, true, 0}, {false, false, 1}, {false, true, 1}, {true, true, 1}, {true, false, 1},
		{false, false, 2}} {
		f.Parted, f.Alone = c.parted, c.alone
		s.Step(now, f, e)
		a := s.answers[vip1]
		if len(a.On) == 0 || a.Owned == (c.parted || c.alone) || a.Round != c.rounds {
			t.Errorf("step %d, parted %v, alone %v: the actor is told %+v", i, c.parted, c.alone, a)
		}
	}
}
