package liveness

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

const hold = 5 * time.Second

// story tells a State what happens, in steps of a few words each, and says what it makes of it. The
// node of a story is "m"; processes of other nodes are named like "a1", the first of node a.
type story struct {
	*State
	now   time.Time
	heard map[string]plan.Process // what has arrived of each node's claims
}

func newStory() *story {
	return &story{State: NewState("m", hold, probeInterval), now: time.Unix(1e9, 0), heard: map[string]plan.Process{}}
}

func process(name string) plan.Process {
	return plan.Process{Node: name[:1], Born: uint64(name[1] - '0'),
		Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, name[0]}), 7947)}
}

// do takes one step: "a1 joins", "a1 speaks" (it announces addresses), "a1 starts" (it speaks, and
// announces none yet), "a1 lost", "a1 leaves", "a1 departs" (gossip tells that first), "a answers", "a silent",
// "3s", "recalled 1", "confirm", "cluster a b"; "a1 path" (this node's path to it is lost), "a1 from b" (b's is).
func (s *story) do(step string) Verdict {
	words := strings.Fields(step)
	if d, err := time.ParseDuration(words[0]); err == nil {
		s.now = s.now.Add(d)
		s.Expire(s.now)
		return Unchanged
	}
	verb := ""
	if len(words) > 1 {
		verb = words[1]
	}
	node := words[0][:1]
	event := func() plan.Process {
		p := process(words[0])
		p.Heard, p.Announces = s.heard[node].Heard, s.heard[node].Announces
		return p
	}
	switch {
	case words[0] == "cluster":
		nodes := map[string][]netip.Addr{}
		for _, name := range words[1:] {
			nodes[name] = nil
		}
		s.Keep(nodes, s.now)
	case words[0] == "confirm":
		s.ConfirmAfter(s.now)
	case words[0] == "recalled":
		s.Recalled(uint64(words[1][0]-'0'), s.now)
	case verb == "joins":
		s.Joined(event(), s.now)
	case verb == "speaks", verb == "starts":
		said := plan.Point{Born: process(words[0]).Born, Seq: 1}
		if heard := s.heard[node].Heard; heard.Born == said.Born {
			said.Seq = heard.Seq + 1
		} else if heard.Born > said.Born {
			break // gossip drops it: a later process has spoken
		}
		s.heard[node] = plan.Process{Heard: said, Announces: verb == "speaks"}
	case verb == "lost":
		s.Lost(event(), s.now)
	case verb == "leaves":
		s.Farewell(node, event().Born, s.now)
		s.Lost(event(), s.now)
	case verb == "departs": // gossip loses it first
		s.Lost(event(), s.now)
		s.Farewell(node, event().Born, s.now)
	case verb == "path", verb == "from":
		by := "m"
		if verb == "from" {
			by = words[2]
		}
		if s.Alarmed(node, event().Born, by, s.now) {
			return s.judge(s.nodes[node], s.now)
		}
	case verb == "answers", verb == "silent", verb == "alone": // the last: and so are all others that are asked
		var answers []Answer
		asked := false
		for _, p := range s.Probes(s.now) {
			switch {
			case p.Node == node && !p.witness:
				answers, asked = append(answers, Answer{p, verb == "answers"}), true
			case p.witness:
				answers = append(answers, Answer{p, verb != "alone"})
			}
		}
		if asked {
			return s.Probed(answers, s.now)[node]
		}
	case words[0] == "cut", words[0] == "heard": // all kernels are silent, or answer
		var answers []Answer
		for _, p := range s.Probes(s.now) {
			answers = append(answers, Answer{p, words[0] == "heard"})
		}
		s.Probed(answers, s.now)
	default:
		panic("no such step: " + step)
	}
	return Unchanged
}

// String says what the State makes of the story: "live a m, missing b, dead b, alone, a held 1, a
// stale 1.2".
func (s *story) String() string {
	seen := s.Speakers(s.now)
	parts := []string{"live " + strings.Join(seen.Live, " ")}
	if len(seen.Missing) > 0 {
		parts = append(parts, "missing "+strings.Join(seen.Missing, " "))
	}
	if len(seen.Dead) > 0 {
		parts = append(parts, "dead "+strings.Join(seen.Dead, " "))
	}
	if seen.Alone {
		parts = append(parts, "alone")
	}
	standings := s.Standings(s.now)
	for _, node := range slices.Sorted(maps.Keys(standings)) {
		standing := standings[node]
		if standing.Held != 0 {
			parts = append(parts, fmt.Sprintf("%s held %d", node, standing.Held))
		}
		if standing.Stale != (plan.Point{}) {
			parts = append(parts, fmt.Sprintf("%s stale %d.%d", node, standing.Stale.Born, standing.Stale.Seq))
		}
	}
	if previous := s.Previous(s.now); previous != 0 {
		parts = append(parts, fmt.Sprintf("previous %d", previous))
	}
	return strings.Join(parts, ", ")
}

func TestStories(t *testing.T) {
	const all = "a1 joins, b1 joins, a1 speaks, b1 speaks, "
	const five = all + "c1 joins, d1 joins, "
	const four = "n1 joins, o1 joins, p1 joins, " // this node is the first by name
	for _, c := range []struct{ name, story, want string }{
		{"alone", "", "live m"},
		{"three meet", all, "live a b m"},

		// A speaker that has crashed, and its node still forwards.
		{"suspect counts as live", all + "a1 lost", "live a b m"},
		{"its kernel answers", all + "a1 lost, a answers", "live a b m, a held 1"},
		{"as long as the hold", all + "a1 lost, a answers, 4999ms", "live a b m, a held 1"},
		{"not longer", all + "a1 lost, a answers, 5s", "live b m, missing a"},
		{"the next process is there", all + "a1 lost, a answers, 1s, a2 joins", "live a b m, a held 1"},
		{"and has spoken", all + "a1 lost, a answers, 1s, a2 joins, a2 speaks, 5s", "live a b m"},
		{"restarted before gossip missed it", all + "a2 joins", "live a b m, a held 1"},
		{"the hold of one process begins once", all + "a1 lost, a answers, 4s, a2 joins, 2s", "live a b m"},
		{"a crash loop", all + "a1 lost, a answers, 6s, a2 joins, a2 speaks, a2 lost, a answers", "live a b m, a held 2"},
		{"lost before it announced anything", all + "a2 joins, a2 starts, 1s, a2 lost, a answers, 3999ms",
			"live a b m, a held 1"},
		{"and not for longer", all + "a2 joins, a2 starts, 1s, a2 lost, a answers, 4s", "live b m, missing a"},
		{"restarted twice", all + "a2 joins, a2 starts, a3 joins", "live a b m, a held 1"},
		{"restarted twice, and it had announced", all + "a2 joins, a2 speaks, 1s, a3 joins, 4s", "live a b m, a held 2"},
		{"nothing was said, so nothing is held", "a1 joins, b1 joins, a1 lost, a answers", "live b m, missing a"},
		{"a false alarm", all + "a1 lost, a1 joins", "live a b m"},
		{"a false alarm that took longer", all + "a1 lost, a answers, a1 joins", "live a b m, a stale 1.1"},
		{"found again, for a second", all + "a1 lost, a answers, a1 joins, 1s", "live a b m"},

		// A node that dies.
		{"its kernel is silent", all + "a1 lost, a silent", "live b m, missing a, dead a"},
		{"down after its speaker", all + "a1 lost, a answers, 1s, a silent", "live b m, missing a, dead a"},
		{"down soon after its speaker has restarted", all + "a2 joins, a2 lost, a silent", "live b m, missing a, dead a"},
		{"dead for good", all + "a1 lost, a silent, 1h", "live b m, missing a, dead a"},
		{"back in the same process", all + "a1 lost, a silent, a1 joins", "live a b m, a stale 1.1"},
		{"back, and its speaker is lost later", all + "a1 lost, a silent, a1 joins, 2s, a1 lost, a answers",
			"live a b m, a held 1"},
		{"back as another one", all + "a1 lost, a silent, a2 joins", "live a b m"},
		{"removed from the cluster", all + "a1 lost, a silent, cluster b", "live b m"},
		{"still in the cluster", all + "a1 lost, a silent, cluster a b", "live b m, missing a, dead a"},
		{"the Node was deleted, the speaker runs", all + "cluster b", "live a b m"},
		{"and dies", all + "cluster b, a1 lost, a silent", "live b m, dead a"},
		{"and dies, and gossip has not lost it", all + "cluster b, a1 path, a1 from b, a silent", "live b m, dead a"},
		{"and crashes, while its node goes on", all + "cluster b, a1 lost, a answers, 5s", "live b m"},
		{"it is seen as dead until a Node changes", all + "cluster b, a1 lost, a silent, 59m", "live b m, dead a"},
		{"a Node changes", all + "cluster b, a1 lost, a silent, cluster b", "live b m"},
		{"or an hour later", all + "cluster b, a1 lost, a silent, 1h", "live b m"},
		{"its Node is back", all + "cluster b, a1 lost, a silent, cluster a b", "live b m, missing a, dead a"},
		{"it was back before", all + "cluster b, cluster a b, a1 lost, a silent", "live b m, missing a, dead a"},
		{"most were deleted, and die", five + "cluster a, b1 lost, b silent, c1 lost, c silent, d1 lost, d silent",
			"live a m, dead b c d"},
		{"and another dies after them", five + "cluster a, b1 lost, b silent, c1 lost, c silent, a1 lost, a silent",
			"live d m, missing a, dead a b c"},

		// A planned end.
		{"left", all + "a1 leaves", "live b m"},
		{"left soon after it has restarted", all + "a2 joins, a2 leaves", "live b m"},
		{"left and back", all + "a1 leaves, a2 joins", "live a b m"},
		{"left as a suspect", all + "a1 lost, a1 leaves, a answers", "live b m"},
		{"left, and told so late", all + "a1 departs", "live b m"},
		{"left, and told so later", all + "a1 lost, a answers, a1 departs, 1h", "live b m"},
		{"left, and its node goes on", all + "a1 leaves, a answers, 1h", "live b m"},
		{"left, and its node follows", all + "a1 leaves, 1s, a silent", "live b m, dead a"},
		{"left, and its node is back", all + "a1 leaves, a silent, a2 joins", "live a b m"},
		{"its node follows a minute later", all + "a1 leaves, 1m, a silent, 10s, a silent", "live b m, dead a"},
		{"one silence in a minute shows nothing", all + "a1 leaves, 1m, a silent, 10s, a answers, 10s, a silent",
			"live b m"},
		{"nor does that of all", all + "a1 leaves, 1m, cut, 10s, cut", "live b m"},
		{"nor while no majority is seen", all + "c1 joins, d1 joins, a1 leaves, b1 lost, b alone, c1 lost, c alone, " +
			"1m, a alone, 10s, a alone, 1s, b1 joins, c1 joins", "live b c d m, b stale 1.1"},
		{"after an hour nobody asks", all + "a1 leaves, 1h, a silent, 10s, a silent", "live b m"},
		{"its Node is deleted first", all + "cluster b, a1 leaves, 1m, a silent, 10s, a silent", "live b m, dead a"},
		{"and others change meanwhile", all + "cluster b, a1 leaves, cluster b, 1m, a silent, 10s, a silent",
			"live b m, dead a"},
		{"and once it is dead", all + "cluster b, a1 leaves, 1m, a silent, 10s, a silent, cluster b", "live b m"},
		{"crashed, and its node follows a minute later", all + "a1 lost, a answers, 1m, a silent, 10s, a silent",
			"live b m, missing a, dead a"},
		{"crashed, and its Node is deleted", all + "a1 lost, a answers, cluster b", "live b m"},
		{"all others have left", all + "a1 leaves, b1 leaves, 1h", "live m"},
		{"back, and lost", all + "a1 leaves, a2 joins, a2 lost, a silent", "live b m, missing a, dead a"},

		// The dead are asked once more.
		{"and are silent still", all + "a1 lost, a silent, confirm, a silent", "live b m, missing a, dead a"},
		{"one answers", all + "a1 lost, a silent, confirm, a answers", "live b m, missing a"},
		{"one that gossip has not lost", all + "a1 path, a1 from b, a silent, confirm, a answers",
			"live a b m, a stale 1.18446744073709551615"},

		// Who may call others dead.
		{"two of three are lost", all + "a1 lost, a silent, b1 lost, b silent", "live m, missing a b, alone"},
		{"of two, the first by name goes on", "z1 joins, z1 lost, z silent", "live m, missing z, dead z"},
		{"of two, the second does not", "a1 joins, a1 lost, a silent", "live m, missing a, alone"},
		{"of four, the half with the first", all + "z1 joins, b1 lost, b silent, z1 lost, z silent",
			"live a m, missing b z, dead b z"},
		{"of four, the other half", all + "z1 joins, a1 lost, a silent, b1 lost, b silent", "live m z, missing a b, alone"},
		{"who is waited for is seen", all + "a1 lost, a answers, b1 lost, b silent", "live a m, missing b, dead b, alone, a held 1"},
		{"but not heard", all + "a1 lost, a answers, b1 lost, b answers", "live a b m, alone, a held 1, b held 1"},
		{"nor is a suspect", all + "a1 lost, b1 lost", "live a b m, alone"},
		{"heard again", all + "a1 lost, a answers, b1 lost, b answers, a1 joins", "live a b m, a stale 1.1, b held 1"},
		{"who is missed and not dead counts, too", all + "a1 lost, a answers, 6s, b1 lost, b silent", "live m, missing a b, alone"},

		// Paths that are lost before gossip notices.
		{"a path alone shows nothing", all + "a1 path, a silent, 1s", "live a b m"},
		{"nor does another node's", all + "a1 from b, 1s", "live a b m"},
		{"two nodes, and a silent kernel", all + "a1 path, a1 from b, a silent", "live b m, missing a, dead a"},
		{"in another order", all + "a1 path, a silent, a1 from b", "live b m, missing a, dead a"},
		{"of a node that this one does not watch", all + "a1 from b, a silent", "live b m, missing a, dead a"},
		{"a kernel that answers", all + "a1 path, a1 from b, a answers, 1s", "live a b m"},
		{"and is silent later", all + "a1 from b, a answers, 1s, a1 from b, a silent", "live b m, missing a, dead a"},
		{"too far apart", all + "a1 path, a silent, 500ms, a1 from b", "live a b m"},
		{"who is lost itself is no witness", all + "b1 lost, a1 path, a1 from b, a silent", "live a b m"},
		{"nobody bears witness to itself", all + "a1 path, a1 from a, a silent", "live a b m"},
		{"a process that is gone", all + "a2 joins, a1 path, a1 from b, a silent", "live a b m, a held 1"},
		{"gossip comes to the same", all + "a1 path, a1 from b, a silent, a1 lost, a answers", "live b m, missing a, dead a"},
		{"nothing is held for it", all + "a1 path, a1 from b, a silent, a1 lost, a2 joins", "live a b m"},
		{"its kernel answers again, and gossip has not lost it", all + "a1 path, a1 from b, a silent, 200ms, a answers",
			"live a b m, a stale 1.18446744073709551615"},
		{"and is silent again", all + "a1 path, a1 from b, a silent, a answers, 2s, a1 path, a1 from b, a silent",
			"live b m, missing a, dead a"},
		{"and its speaker is lost later", all + "a1 path, a1 from b, a silent, a answers, 2s, a1 lost, a answers",
			"live a b m, a held 1"},
		{"a path is lost when gossip has noticed", all + "a1 lost, a1 path, a1 from b, a answers", "live a b m, a held 1"},
		{"gossip hears it again", all + "a1 path, a1 from b, a silent, a1 joins", "live a b m, a stale 1.1"},
		{"two of three by two paths", all + "a1 path, b1 path, a silent, b silent", "live a b m"},

		// This node itself may be cut off.
		{"one is silent, and so are the others", all + "a1 lost, a alone", "live a b m"},
		{"an answer counts all the same", all + "a1 lost, cut, a1 joins", "live a b m"},
		{"gossip finds most of them lost", all + "a1 lost, cut, b1 lost, cut", "live m, missing a b, alone"},
		{"of five, the third of whom", five + "a1 lost, cut, b1 lost, cut", "live a b c d m"},
		{"of five, none before the third", five + "a1 lost, cut, b1 lost, cut, c1 lost, cut",
			"live d m, missing a b c, alone"},
		{"no longer", five + "a1 lost, cut, 200ms, heard, a silent", "live b c d m, missing a, dead a"},
		{"it was a moment", five + "a1 lost, cut, 200ms, heard, a answers", "live a b c d m, a held 1"},
		{"cut off, and gossip has lost another meanwhile", five + "a1 lost, cut, 2s, b1 lost, cut, 2s, cut", "live a b c d m"},
		{"gossip loses no more of them: the paths are broken", five + "a1 lost, cut, 3s, cut", "live b c d m, missing a, dead a"},
		{"two of five die at once", five + "a1 lost, a silent, b1 lost, b silent", "live c d m, missing a b, dead a b"},
		{"the lesser half of a partition", five + "a1 lost, a alone", "live a b c d m"},
		{"the first of four sees a majority in half of them", four + "n1 lost, cut, o1 lost, cut", "live m n o p"},
		{"but not in itself", four + "n1 lost, cut, o1 lost, cut, p1 lost, cut", "live m, missing n o p, alone"},
		{"half of four die", four + "n1 lost, n silent, o1 lost, o silent", "live m p, missing n o, dead n o"},
		{"one of two", "n1 joins, n1 lost, cut", "live m, missing n, dead n"},
		{"down after its speaker", all + "a1 lost, a answers, cut", "live a b m, a held 1"},
		{"a path was lost before the cut", all + "a1 path, a1 from b, cut", "live a b m"},

		// This node's own earlier process.
		{"recalled", "recalled 1", "live m, previous 1"},
		{"the newest is", "recalled 2, recalled 1", "live m, previous 2"},
		{"for the hold", "recalled 1, 5s", "live m"},
		{"once", "recalled 1, 4s, recalled 1, 1s", "live m"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStory()
			for step := range strings.SplitSeq(strings.Trim(c.story, ", "), ", ") {
				if step != "" {
					s.do(step)
				}
			}
			if got := s.String(); got != c.want {
				t.Errorf("%s:\n got %s\nwant %s", c.story, got, c.want)
			}
		})
	}
}

// A probe that was asked about one suspicion must not settle another.
func TestAnOldAnswerSettlesNothing(t *testing.T) {
	s := newStory()
	for _, step := range []string{"a1 joins", "a1 speaks", "a1 lost"} {
		s.do(step)
	}
	probed := func(p Probe) Verdict { return s.Probed([]Answer{{p, false}}, s.now)[p.Node] }
	old := s.Probes(s.now)[0]
	s.do("a1 joins")
	if v := probed(old); v != Unchanged || s.String() != "live a m" {
		t.Errorf("back before the answer: %q, %s", v, s)
	}
	s.do("a1 lost")
	if v := probed(old); v != Unchanged || len(s.Probes(s.now)) != 1 {
		t.Errorf("lost again before the answer: %q, %s", v, s)
	}
	s.do("a answers")
	waiting := s.Probes(s.now)[0]
	s.do("a2 joins")
	if v := probed(waiting); v != Unchanged || s.String() != "live a m, a held 1" {
		t.Errorf("back while it was waited for: %q, %s", v, s)
	}
}

// With no hold nothing is reserved, and dead nodes are found all the same.
func TestWithoutAHold(t *testing.T) {
	s := newStory()
	s.State = NewState("m", 0, probeInterval)
	for _, step := range []string{"a1 joins", "a1 speaks", "b1 joins", "b1 speaks", "a1 lost", "a answers"} {
		s.do(step)
	}
	if got := s.String(); got != "live b m, missing a" {
		t.Errorf("a speaker that has crashed: %s", got)
	}
	s.do("a2 joins")
	s.do("b1 lost")
	s.do("b silent")
	if got := s.String(); got != "live a m, missing b, dead b" {
		t.Errorf("a node that has crashed: %s", got)
	}
}

// Whatever happens: a node is live, missing or unknown, never two of these; the dead are missing or have
// left; what is held was said; and everything that ends by itself ends when Next says so.
func TestRandomStories(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		s := newStory()
		var told []string
		for range 40 {
			node := string(rune('a' + random.IntN(3)))
			one := fmt.Sprint(node, 1+random.IntN(3))
			step := []string{one + " joins", one + " speaks", one + " starts", one + " lost", one + " leaves", one + " departs", node + " answers",
				node + " silent",
				"700ms", "2s", "cluster a b c", "cluster a b", one + " path", one + " from b"}[random.IntN(14)]
			told = append(told, step)
			s.do(step)
			before, next := s.String(), s.Next(s.now)
			seen := s.Speakers(s.now)
			for _, name := range seen.Missing {
				if slices.Contains(seen.Live, name) {
					t.Fatalf("%v: %s", told, s)
				}
			}
			for _, name := range seen.Dead {
				if n := s.nodes[name]; !slices.Contains(seen.Missing, name) && n.met && s.isNode(name) || !seen.Majority {
					t.Fatalf("%v: %s", told, s)
				}
			}
			for name, standing := range s.Standings(s.now) {
				if standing.Held > s.heard[name].Heard.Born || !slices.Contains(seen.Live, name) {
					t.Fatalf("%v: %s", told, s)
				}
			}
			still := s.now.Add(time.Hour)
			if !next.IsZero() {
				still = next.Add(-1)
			}
			early := *s
			early.now = still
			if got := early.String(); got != before {
				t.Fatalf("%v: %s becomes %s before it is due", told, before, got)
			}
		}
	}
}

// Names that follow one another are often of one rack. So the witnesses of a node in a large cluster are not
// those that come first. Nor are they the same as those of another node: all ask at the same time.
func TestWitnessesAreDrawn(t *testing.T) {
	const nodes, rack = 192, 48
	asked, sameRack := map[string]int{}, 0
	for self := range nodes {
		s := NewState(fmt.Sprintf("n%03d", self), hold, probeInterval)
		now := time.Unix(1e9, 0)
		for i := range nodes {
			p := plan.Process{Node: fmt.Sprintf("n%03d", i), Born: 1,
				Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 7947)}
			if i == self {
				continue
			}
			s.Joined(p, now)
			if i == (self+rack)%nodes {
				s.Lost(p, now)
			}
		}
		found, near := 0, 0
		for _, p := range s.Probes(now) {
			if !p.witness {
				continue
			}
			found++
			asked[p.Node]++
			if last := p.Addr.Addr().As4()[3]; int(last)/rack == self/rack {
				near++
			}
		}
		if found != witnesses {
			t.Errorf("%d witnesses of node %d", found, self)
		}
		if 2*near > witnesses {
			sameRack++
		}
	}
	// 32 of 190 are drawn: each is asked by 32 others or so, give or take 5, and 8 are of the same rack.
	if most := slices.Max(slices.Collect(maps.Values(asked))); most > nodes/3 || sameRack > 0 {
		t.Errorf("%d nodes ask one and the same; %d nodes ask their own rack", most, sameRack)
	}
}

// The dead count as asked after a moment once all were, by questions that were put after it.
func TestTheDeadAreAskedOnceMore(t *testing.T) {
	s := newStory()
	for _, step := range []string{"a1 joins", "b1 joins", "a1 lost", "a silent", "b1 lost", "b silent"} {
		s.do(step)
	}
	first, second := s.now, s.now.Add(time.Millisecond)
	if !s.ConfirmAfter(first) || s.ConfirmAfter(first) || len(s.Probes(s.now)) != 2 {
		t.Fatalf("asked: %v", s.Probes(s.now))
	}
	var answers []Answer
	for _, p := range s.Probes(s.now) {
		answers = append(answers, Answer{Probe: p})
	}
	s.ConfirmAfter(second) // meanwhile
	s.Probed(answers, s.now)
	if got := s.Speakers(s.now).Confirmed; !got.Equal(first) || len(s.Probes(s.now)) != 2 {
		t.Errorf("confirmed after %v, and asked are %v", got, s.Probes(s.now))
	}
	s.do("b silent")
	if got := s.Speakers(s.now).Confirmed; !got.Equal(second) || len(s.Probes(s.now)) > 0 || s.ConfirmAfter(first) {
		t.Errorf("confirmed after %v, and asked are %v", got, s.Probes(s.now))
	}
}
