package across

import (
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

var (
	self  = []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}
	near4 = netip.MustParseAddr("10.0.1.2")
	near6 = netip.MustParseAddr("fd01::2")
)

// A node counts as one that answers from its first answer on, as silent after three questions without one, and
// then again after three answers in a row.
func TestTally(t *testing.T) {
	for name, test := range map[string]struct {
		answers string // whether each question is answered
		want    State
	}{
		"never asked":              {"", Unknown},
		"answers":                  {"+", Answers},
		"no answer yet":            {"--", Unknown},
		"silent from the start":    {"---", Silent},
		"two are lost":             {"+--", Answers},
		"three are lost":           {"+---", Silent},
		"lost now and then":        {"+--+--+--", Answers},
		"back, but not for long":   {"+---++", Silent},
		"back":                     {"+---+++", Answers},
		"lost while it comes back": {"+---++-++", Silent},
		"late, at first":           {"--+", Answers},
		"diverted":                 {"+>", Diverted},
		"diverted, and then lost":  {"+>---", Silent},
		"free, but not for long":   {"+>++", Diverted},
		"free":                     {"+>+++", Answers},
	} {
		var node tally
		for i, answer := range test.answers {
			nonce := Nonce{byte(i + 1)}
			node.ask(nonce, time.Time{})
			if node.state != Answers && node.answer(Nonce{byte(i)}) {
				t.Errorf("%s: the answer to the question before counts", name)
			}
			if answer == '>' {
				if node.divert(); node.answer(nonce) {
					t.Errorf("%s: an answer to a question that was not sent counts", name)
				}
			}
			if answer == '+' && (!node.answer(nonce) || node.answer(nonce)) {
				t.Errorf("%s: an answer does not count, or twice", name)
			}
		}
		node.ask(Nonce{99}, time.Time{})
		if node.state != test.want {
			t.Errorf("%s: state %d, want %d", name, node.state, test.want)
		}
	}
}

// A node that answers is asked again before it is known that an answer is lost, so one to an earlier question counts as
// long as the node is not silent, once.
func TestAnswersMayTakeLong(t *testing.T) {
	var node tally
	ask := func(numbers ...byte) {
		for _, number := range numbers {
			node.ask(Nonce{number}, time.Time{})
		}
	}
	ask(1)
	node.answer(Nonce{1})
	ask(2, 3, 4)
	if !node.answer(Nonce{2}) || node.answer(Nonce{4}) || node.late() || node.row != 1 {
		t.Errorf("after a late answer: %+v", node)
	}
	if ask(5, 6, 7, 8); node.state != Silent || node.answer(Nonce{7}) || !node.answer(Nonce{8}) {
		t.Errorf("of a silent node other answers count than that to the last question: %+v", node)
	}
}

// A node that answers no more is found out soon, however the time of the next question falls, while others are asked no
// more often.
func TestASilentNodeIsAskedAgainSoon(t *testing.T) {
	now := time.Unix(0, 0)
	line := &fakeLine{answers: map[netip.Addr]bool{near4: true, near6: true}, asked: map[netip.Addr]int{}}
	a := New(Deps{Log: slog.New(slog.DiscardHandler), Line: line, Now: func() time.Time { return now }, Changed: func() {}})
	a.Set(Nodes{self, []netip.Addr{near4, near6}})
	step := func() {
		again, err := a.step(t.Context())
		if err != nil || again <= 0 {
			t.Fatalf("again in %v: %v", again, err)
		}
		now = now.Add(again)
	}
	for range 4 * rarely {
		step()
	}
	line.answers[near4] = false
	clear(line.asked)
	cut := now
	for a.States()[near4] == Answers && now.Sub(cut) < time.Minute {
		step()
	}
	if took, most := now.Sub(cut), every+(losses+1)*patience; took > most || line.asked[near6] > 3 {
		t.Errorf("a node is silent after %v, want %v at most; another was asked %d times", took, most, line.asked[near6])
	}
}

// fakeLine answers for nodes.
type fakeLine struct {
	answers  map[netip.Addr]bool
	diverted map[netip.Addr]bool
	forged   []Answer
	asked    map[netip.Addr]int
	waiting  []Answer
	fail     error
}

func (f *fakeLine) Ask(from, node netip.Addr, nonce Nonce) error {
	if lb.FamilyOf(from) != lb.FamilyOf(node) {
		return errors.New("from an address of the other family")
	}
	if f.diverted[node] {
		return errDiverted
	}
	if f.asked[node]++; f.answers[node] {
		f.waiting = append(f.waiting, Answer{node, nonce})
	}
	return f.fail
}

func (f *fakeLine) Answers(family lb.Family) (all []Answer, err error) {
	var left []Answer
	for _, a := range append(f.waiting, f.forged...) {
		if lb.FamilyOf(a.Node) == family {
			all = append(all, a)
		} else {
			left = append(left, a)
		}
	}
	f.waiting, f.forged = left, nil
	return all, nil
}

// A node that answers is asked four times a second and another once, whatever wakes the actor, and a change of what is
// known is told once.
func TestNodesAreAsked(t *testing.T) {
	now, changes := time.Unix(0, 0), 0
	line := &fakeLine{answers: map[netip.Addr]bool{near4: true, near6: true}, asked: map[netip.Addr]int{}}
	a := New(Deps{Log: slog.New(slog.DiscardHandler), Line: line, Now: func() time.Time { return now },
		Changed: func() { changes++ }})
	step := func() (again time.Duration) {
		t.Helper()
		again, err := a.step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return again
	}
	if again := step(); again != 0 || len(line.asked) > 0 {
		t.Errorf("without nodes it asks %v, and again in %v", line.asked, again)
	}
	now = now.Add(time.Second)
	a.Set(Nodes{self, []netip.Addr{near4, near6}})
	if again := step(); again != soon {
		t.Errorf("looks for the first answers in %v", again)
	}
	if again := step(); again != every || a.States()[near4] != Answers || a.States()[near6] != Answers {
		t.Errorf("%v, again in %v", a.States(), again)
	}
	for range 10 {
		step()
	}
	if line.asked[near4] != 1 || line.asked[near6] != 1 {
		t.Errorf("asked %v at one time", line.asked)
	}
	before := changes
	line.answers[near4] = false
	for range losses + 1 {
		line.forged = []Answer{{Node: near4, Nonce: Nonce{1}}, {Node: netip.MustParseAddr("10.0.1.9")}}
		now = now.Add(every)
		step()
	}
	if a.States()[near4] != Silent || a.States()[near6] != Answers || changes != before+1 {
		t.Errorf("%v after %d changes", a.States(), changes-before)
	}
	clear(line.asked)
	for range rarely {
		now = now.Add(every)
		step()
	}
	if line.asked[near4] != 1 || line.asked[near6] != rarely {
		t.Errorf("asked %v in one second", line.asked)
	}
	line.diverted = map[netip.Addr]bool{near6: true}
	now = now.Add(every)
	if step(); a.States()[near6] != Diverted || len(line.waiting) > 0 {
		t.Errorf("the way to a node leads elsewhere: %v, waiting %v", a.States(), line.waiting)
	}
	line.diverted = nil
	for range rarely * again {
		now = now.Add(every)
		step()
	}
	if step(); a.States()[near6] != Answers {
		t.Errorf("the way leads there again: %v", a.States())
	}
	a.Set(Nodes{self, []netip.Addr{near6}})
	if step(); len(a.States()) != 1 {
		t.Errorf("a node that is not asked any more is known as %v", a.States())
	}
	now = now.Add(time.Hour) // in which the program did not run
	step()
	if step(); a.States()[near6] != Answers {
		t.Errorf("a long pause counts against the other node: %v", a.States())
	}
}

// Of more nodes than are asked, the last ones get nothing; a question that cannot be sent is not an answer.
func TestContract11NodesThatAreAskedHaveABound(t *testing.T) {
	now := time.Unix(0, 0)
	line := &fakeLine{asked: map[netip.Addr]int{}, fail: errNoTunnel}
	a := New(Deps{Log: slog.New(slog.DiscardHandler), Line: line, Now: func() time.Time { return now },
		Changed: func() {}})
	var nodes []netip.Addr
	for addr := near4; len(nodes) < 2*MaxNodes; addr = addr.Next() {
		nodes = append(nodes, addr)
	}
	a.Set(Nodes{self, nodes})
	for range rarely * (losses + 1) {
		if _, err := a.step(t.Context()); err != nil {
			t.Fatal(err)
		}
		now = now.Add(every)
	}
	if len(line.asked) != MaxNodes || a.States()[nodes[0]] != Silent || a.States()[nodes[MaxNodes]] != Unknown {
		t.Errorf("%d nodes are asked; %v", len(line.asked), a.States())
	}
}

// What is no answer of ours is not read as one.
func FuzzParse(f *testing.F) {
	f.Add([]byte{0x45, 0, 0, 44}, true)
	f.Add(make([]byte, header+16), false)
	f.Fuzz(func(t *testing.T, packet []byte, v4 bool) {
		family := lb.IPv6
		if v4 {
			family = lb.IPv4
		}
		if a, ok := parse(family, packet, nil); ok && len(packet) < header+len(a.Nonce) {
			t.Errorf("%v is read from %d bytes", a, len(packet))
		}
	})
}
