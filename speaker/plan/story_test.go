package plan

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// cluster is a few speakers that plan one VIP, hear one another and answer as their plans say. Each
// hears in its own time.
type cluster struct {
	nodes map[string]*speaker
	// dark counts steps after which nobody answered, and doomed steps after which a node answered
	// without forwarding.
	dark, doomed int
}

type speaker struct {
	facts   Facts
	holders []Holder
	said    Claim
	on      []string         // interfaces that answer
	heard   map[string]Claim // the last word of each other node that is alive
	lost    map[string]bool  // those whose last word is from before they were out of sight
	alive   bool
	sees    func(node string) bool // which nodes it can see
}

func newCluster(names ...string) *cluster {
	c := &cluster{nodes: map[string]*speaker{}}
	for _, name := range names {
		c.nodes[name] = &speaker{
			facts: facts(name), holders: []Holder{{Service: nginx, Delivery: delivery(nginx)}}, heard: map[string]Claim{},
			lost: map[string]bool{}, alive: true, sees: func(string) bool { return true },
			said: Claim{Reason: lb.ReasonNotJoined},
		}
	}
	return c
}

// act lets one node plan and act on what it has heard; its answer is told after it is really given.
func (c *cluster) act(name string) {
	s := c.nodes[name]
	if !s.alive {
		return
	}
	s.facts.Live = nil
	claims := map[string]Claim{}
	for other, o := range c.nodes {
		switch {
		case !o.alive:
			delete(s.heard, other)
			continue
		case !s.sees(other):
			s.lost[other] = true
			continue
		}
		s.facts.Live = append(s.facts.Live, other)
		if claim, ok := s.heard[other]; ok && other != name {
			claim.Stale = s.lost[other]
			claims[other] = claim
		}
	}
	s.facts.Parted = s.facts.Parted || len(s.lost) > 0 && !c.majority(s)
	d := Decide(s.facts, Input{VIP: vip, Probed: true, Holders: s.holders, Claims: claims, Answering: s.on})
	s.on = d.Answer
	s.said = d.Claim(len(s.on) > 0)
	if len(s.on) > 0 && !forwards(s.holders) {
		c.doomed++
	}
	if len(c.answering()) == 0 {
		c.dark++
	}
}

// hear delivers the newest word of one node to another.
func (c *cluster) hear(to, from string) {
	if s, o := c.nodes[to], c.nodes[from]; s.alive && o.alive && to != from && s.sees(from) {
		s.heard[from] = o.said
		delete(s.lost, from)
	}
}

// majority reports whether a node sees most of those that are alive.
func (c *cluster) majority(s *speaker) bool {
	var known []string
	for name, o := range c.nodes {
		if o.alive {
			known = append(known, name)
		}
	}
	slices.Sort(known)
	return QuorumOf(s.facts.Self, slices.Sorted(slices.Values(s.facts.Live)), known).Majority
}

func (c *cluster) answering() []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(c.nodes)) {
		if s := c.nodes[name]; s.alive && len(s.on) > 0 {
			names = append(names, name)
		}
	}
	return names
}

// settle runs steps in the order given, often enough that each node has acted on all words.
func (c *cluster) settle(order []string) {
	for range 6 {
		for _, step := range order {
			to, from, ok := strings.Cut(step, "<")
			if ok {
				c.hear(to, from)
			} else {
				c.act(to)
			}
		}
	}
}

// orders are ways to interleave the steps of nodes: forth, back, each step twice, and some that are
// shuffled.
func orders(shuffles int, names ...string) map[string][]string {
	var steps []string
	for _, n := range names {
		steps = append(steps, n)
		for _, m := range names {
			steps = append(steps, n+"<"+m)
		}
	}
	reversed := slices.Clone(steps)
	slices.Reverse(reversed)
	var twice []string
	for _, s := range steps {
		twice = append(twice, s, s)
	}
	all := map[string][]string{"in order": steps, "reversed": reversed, "twice": twice}
	random := rand.New(rand.NewPCG(1, 2))
	for i := range shuffles {
		shuffled := slices.Clone(steps)
		random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		all[fmt.Sprintf("shuffled %d", i)] = shuffled
	}
	return all
}

func TestContractStories(t *testing.T) {
	owner, second, third := ranking()
	type step struct {
		what      string
		do        func(*cluster)
		answering []string
		// unplanned events may leave nobody answering for a while; planned ones may not.
		unplanned bool
	}
	each := func(f func(name string, s *speaker)) func(*cluster) {
		return func(c *cluster) {
			for name, s := range c.nodes {
				f(name, s)
			}
		}
	}
	crash := func(node string) func(*cluster) {
		return func(c *cluster) { s := c.nodes[node]; s.alive, s.on, s.heard = false, nil, map[string]Claim{} }
	}
	start := func(node string) func(*cluster) {
		return func(c *cluster) {
			s := c.nodes[node]
			s.alive, s.facts.Joined, s.facts.Stopping, s.said = true, true, false, Claim{Reason: lb.ReasonNotJoined}
		}
	}
	gate := func(node string, reason lb.Reason) func(*cluster) {
		return func(c *cluster) { c.nodes[node].facts.Gate = reason }
	}
	pods := func(localReady, localServing map[string]int) func(*cluster) {
		return each(func(name string, s *speaker) {
			ready, serving := 0, 0
			for _, n := range localReady {
				ready += n
			}
			for _, n := range localServing {
				serving += n
			}
			s.holders = []Holder{
				{Service: nginx, Delivery: delivery(nginx, local(localReady[name], localServing[name], ready, serving))}}
		})
	}
	for name, story := range map[string][]step{
		"5: crash and return": {
			{"crash", crash(owner), []string{second}, true},
			{"return, the feed not there yet", func(c *cluster) { start(owner)(c); gate(owner, lb.ReasonFeedUnknown)(c) },
				[]string{second}, false},
			{"the feed is there", gate(owner, ""), []string{second}, false},
		},
		"6: planned stop and start": {
			{"SIGTERM", func(c *cluster) { c.nodes[owner].facts.Stopping = true }, []string{second}, false},
			{"gone", crash(owner), []string{second}, false},
			{"started, not joined", func(c *cluster) { start(owner)(c); c.nodes[owner].facts.Joined = false }, []string{second},
				false},
			{"joined", func(c *cluster) { c.nodes[owner].facts.Joined = true }, []string{second}, false},
		},
		"5: drain of one node after the other": {
			{"drain", func(c *cluster) { c.nodes[owner].facts.Node.Leaving = lb.ReasonNodeLeaving }, []string{second}, false},
			{"label", func(c *cluster) { c.nodes[second].facts.Node.Labels = labels.Set{LabelExclude: ""} }, []string{third},
				false},
			{"label taken off", func(c *cluster) { c.nodes[second].facts.Node.Labels = nil }, []string{third}, false},
			{"drain over", func(c *cluster) { c.nodes[owner].facts.Node.Leaving = "" }, []string{third}, false},
			{"preferred again", func(c *cluster) {
				c.nodes[second].facts.Advertisements = map[string]lb.L2Advertisement{"lan": {Name: "lan",
					Preferred: []lb.Preference{{Weight: 1, Nodes: labels.Everything()}}}}
			}, []string{second}, false},
		},
		"1 and 6: proxy restarts within the hold and after it": {
			{"within the hold nothing changes", func(*cluster) {}, []string{owner}, false},
			{"hold is over", gate(owner, lb.ReasonFeedLost), []string{second}, true},
			{"proxy is back", gate(owner, ""), []string{second}, false},
		},
		"1: rules that are not there attract nothing": {
			{"rules deleted", func(c *cluster) {
				c.nodes[owner].holders = []Holder{{Service: nginx, Delivery: delivery(nginx, unprogrammed)}}
			}, []string{second}, true},
			{"repaired", func(c *cluster) { c.nodes[owner].holders = []Holder{{Service: nginx, Delivery: delivery(nginx)}} },
				[]string{second}, false},
		},
		"2: rolling update of a Local Service": {
			{"Local, a pod on the owner and the second", pods(map[string]int{owner: 1, second: 1}, nil), []string{owner}, false},
			{"the owner's pod terminates", pods(map[string]int{second: 1}, map[string]int{owner: 1}), []string{second}, false},
			{"and is gone", pods(map[string]int{second: 1}, nil), []string{second}, false},
			{"a new one on the third, the second's terminates", pods(map[string]int{third: 1}, map[string]int{second: 1}),
				[]string{third}, false},
			{"back on the owner", pods(map[string]int{owner: 1, third: 1}, nil), []string{third}, false},
			{"all terminating at once", pods(nil, map[string]int{owner: 1, third: 1}), []string{third}, false},
			{"none left", pods(nil, nil), nil, true},
			{"one comes", pods(map[string]int{second: 1}, nil), []string{second}, true},
		},
		"7: partition": {
			{"the second sees nobody", func(c *cluster) {
				for name, s := range c.nodes {
					s.sees = func(other string) bool { return other == name || name != second && other != second }
				}
			}, sorted(owner, second), false},
			{"healed", each(func(_ string, s *speaker) { s.sees = func(string) bool { return true } }), []string{owner}, false},
		},
		"7: partition around the owner": {
			{"the owner sees nobody", func(c *cluster) {
				for name, s := range c.nodes {
					s.sees = func(other string) bool { return other == name || name != owner && other != owner }
				}
			}, sorted(owner, second), false},
			{"healed", each(func(_ string, s *speaker) { s.sees = func(string) bool { return true } }), []string{second}, false},
			{"later", each(func(_ string, s *speaker) { s.facts.Parted = false }), []string{second}, false},
		},
	} {
		for kind, order := range orders(20, w177, w178, w179) {
			t.Run(name+"/"+kind, func(t *testing.T) {
				c := newCluster(w177, w178, w179)
				c.settle([]string{owner}) // the first to come stays
				c.settle(order)
				if got := c.answering(); !slices.Equal(got, []string{owner}) {
					t.Fatalf("at first %v answer, want %s", got, owner)
				}
				for _, s := range story {
					c.dark, c.doomed = 0, 0
					s.do(c)
					c.settle(order)
					if got := c.answering(); !slices.Equal(got, s.answering) {
						t.Fatalf("%s: %v answer, want %v", s.what, got, s.answering)
					}
					if c.dark > 0 && !s.unplanned {
						t.Errorf("%s: nobody answered after %d steps", s.what, c.dark)
					}
					if c.doomed > 0 {
						t.Errorf("%s: a node answered without forwarding after %d steps", s.what, c.doomed)
					}
				}
			})
		}
	}
}

// When the two sides of a partition meet again, the owner of the majority goes on, of two halves
// that of the first: whoever answered before they were parted, whichever way the hash goes, and
// without a word of the API server. At no moment does nobody answer.
func TestContract7HealKeepsTheOwnerOfTheMajority(t *testing.T) {
	names := []string{w177, w178, w179, "k8s-worker-180"}
	all := orders(7, names...)
	for split := 1; split < 1<<len(names)-1; split++ {
		side := map[string]bool{}
		for i, name := range names {
			side[name] = split>>i&1 == 1
		}
		for _, first := range names {
			for kind, order := range all {
				c := newCluster(names...)
				c.settle([]string{first})
				for _, name := range names {
					c.hear(name, first)
				}
				c.settle(order)
				for name, s := range c.nodes {
					s.sees = func(other string) bool { return side[other] == side[name] }
				}
				c.settle(order)
				apart := c.answering()
				if len(apart) != 2 || side[apart[0]] == side[apart[1]] || !slices.Contains(apart, first) {
					t.Fatalf("%v are on one side: %v answer, %s did before (%s)", side, apart, first, kind)
				}
				want := apart[0]
				if s := c.nodes[apart[1]]; c.majority(s) {
					want = apart[1]
				}
				for _, s := range c.nodes {
					s.sees = func(string) bool { return true }
				}
				c.dark = 0
				c.settle(order)
				for _, s := range c.nodes {
					s.facts.Parted = false // it was a moment ago
				}
				c.settle(order)
				if got := c.answering(); !slices.Equal(got, []string{want}) || c.dark > 0 {
					t.Fatalf("%v were on one side and %v answered: healed, %v answer, want %s; nobody did after %d steps (%s)", side,
						apart, got, want, c.dark, kind)
				}
			}
		}
	}
}

func sorted(names ...string) []string { return slices.Sorted(slices.Values(names)) }
