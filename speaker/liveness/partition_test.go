package liveness

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// probeInterval is that of gossip.
const probeInterval = 100 * time.Millisecond

// view is a State in a cluster of n000, n001 and so on, and what it can reach. Gossip tells it whom it has
// lost, and kernels answer as the cables are.
type view struct {
	*State
	now     time.Time
	reaches func(node string) bool
	later   []int // whom gossip loses while others are asked
	buried  int   // nodes that it has ever taken for dead
	rounds  int   // questions since the last loss
}

func named(i int) string { return fmt.Sprintf("n%03d", i) }

func processOf(i int) plan.Process {
	addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
	return plan.Process{Node: named(i), Born: 1, Addr: netip.AddrPortFrom(addr, 7946), Announces: true,
		Heard: plan.Point{Born: 1, Seq: 1}}
}

func viewOf(self, nodes int, reaches func(node string) bool) *view {
	v := &view{State: NewState(named(self), hold, probeInterval), now: time.Unix(1e9, 0), reaches: reaches}
	for i := range nodes {
		if i != self {
			v.Joined(processOf(i), v.now)
		}
	}
	return v
}

// look asks those that are due, as long as there are some to be asked at once.
func (v *view) look() {
	v.rounds = 0
	for wait := time.Duration(1); wait > 0 && wait < probeEvery; wait = v.due(v.now) {
		var answers []Answer
		for _, p := range v.Probes(v.now) {
			answers = append(answers, Answer{p, v.reaches(p.Node)})
		}
		for _, i := range v.later {
			v.Lost(processOf(i), v.now)
		}
		v.later = nil
		v.now = v.now.Add(answerTimeout)
		v.rounds++
		for _, verdict := range v.Probed(answers, v.now) {
			if verdict == NodeDead && v.Speakers(v.now).Majority {
				v.buried++
			}
		}
	}
}

// TestContract11ACutOffSideBuriesNobody cuts off up to half of a cluster: no node of that side ever takes one of
// the other side for dead while it sees a majority, in whatever order gossip loses them.
func TestContract11ACutOffSideBuriesNobody(t *testing.T) {
	type cut struct{ side, nodes int }
	cuts := []cut{{1, 3}, {1, 5}, {2, 5}, {3, 7}, {4, 9}, {9, 21}, {10, 21}, {20, 51}, {25, 51}, {32, 66}}
	for _, c := range seeds.Of(cuts, append(cuts, cut{63, 128}, cut{149, 300})) {
		t.Run(fmt.Sprintf("%d of %d", c.side, c.nodes), func(t *testing.T) {
			seeds.Run(t, seeds.Of(2, 40), nil, func(t *testing.T, seed uint64) {
				random := rand.New(rand.NewPCG(seed, 0))
				places := random.Perm(c.nodes)
				side, others := places[:c.side], places[c.side:]
				inside := map[string]bool{}
				for _, i := range side {
					inside[named(i)] = true
				}
				self := side[random.IntN(len(side))]
				for story, order := range ordersOf(others) {
					v := viewOf(self, c.nodes, func(node string) bool { return inside[node] })
					for _, lost := range order {
						for _, i := range lost[:1+len(lost)/3] {
							v.Lost(processOf(i), v.now)
						}
						v.later = lost[1+len(lost)/3:]
						v.look()
						v.now = v.now.Add(time.Duration(random.IntN(300)) * time.Millisecond)
						if random.IntN(2) == 0 {
							v.look()
						}
					}
					if v.buried > 0 || v.Speakers(v.now).Majority {
						t.Errorf("%s: it takes %d for dead, and sees a majority in the end: %v", story, v.buried,
							v.Speakers(v.now).Majority)
					}
				}
			})
		})
	}
}

// ordersOf returns ways in which gossip loses nodes.
func ordersOf(nodes []int) map[string][][]int {
	var one, squashed, twice [][]int
	for _, i := range nodes {
		one, twice = append(one, []int{i}), append(twice, []int{i, i})
	}
	for chunk := range slices.Chunk(nodes, 4) {
		squashed = append(squashed, chunk)
	}
	reversed := slices.Clone(one)
	slices.Reverse(reversed)
	return map[string][][]int{"one by one": one, "reversed": reversed, "squashed": squashed, "duplicated": twice,
		"at once": {nodes}}
}

// A crash is found at once: that of one node with the first question, and those of more when enough others
// have been asked, which takes 50 ms for each 32 of them.
func TestACrashIsFoundAtOnce(t *testing.T) {
	for _, c := range []struct{ dead, nodes, rounds int }{
		{1, 2, 1}, {1, 3, 1}, {2, 5, 1}, {1, 21, 1}, {10, 21, 1}, {1, 51, 1}, {25, 51, 2}, {1, 1000, 1},
		{12, 300, 2}, {149, 300, 11}, {499, 1000, 33}, {40, 5000, 2},
	} {
		t.Run(fmt.Sprintf("%d of %d", c.dead, c.nodes), func(t *testing.T) {
			random := rand.New(rand.NewPCG(uint64(c.nodes), uint64(c.dead)))
			places := random.Perm(c.nodes)
			gone := map[string]bool{}
			for _, i := range places[:c.dead] {
				gone[named(i)] = true
			}
			self := slices.Min(places[c.dead:]) // of two nodes the first by name goes on
			v := viewOf(self, c.nodes, func(node string) bool { return !gone[node] })
			if c.dead == 1 && c.nodes == 2 {
				v = viewOf(0, 2, func(string) bool { return false })
				places = []int{1}
			}
			for _, i := range places[:c.dead] {
				v.Lost(processOf(i), v.now)
			}
			v.look()
			if v.buried != c.dead || v.rounds > c.rounds {
				t.Errorf("%d are lost, %d taken for dead after %d rounds of questions", c.dead, v.buried, v.rounds)
			}
		})
	}
}

// The path between this node and some others is broken, and gossip with them goes over the rest: a crash is found
// all the same.
func TestACrashIsFoundBesideABrokenPath(t *testing.T) {
	for _, c := range []struct {
		nodes             int
		dead, unreachable []int
	}{
		{4, []int{3}, []int{2}}, {5, []int{3}, []int{2}}, {6, []int{3}, []int{1, 2}}, {6, []int{3, 4}, []int{2}},
		{200, []int{3}, []int{2, 4, 5, 6, 7, 8, 9}},
	} {
		gone := map[string]bool{}
		for _, i := range slices.Concat(c.dead, c.unreachable) {
			gone[named(i)] = true
		}
		v := viewOf(0, c.nodes, func(node string) bool { return !gone[node] })
		for _, i := range c.dead {
			v.Lost(processOf(i), v.now)
		}
		for began := v.now; v.buried < len(c.dead) && v.now.Sub(began) < 15*time.Second; v.now = v.now.Add(probeEvery) {
			v.look()
		}
		if v.buried != len(c.dead) {
			t.Errorf("%+v: %d buried", c, v.buried)
		}
	}
}

// An alarm, and the end of a node that is waited for, count however many others are missing.
func TestACrashIsFoundBesideMissingNodes(t *testing.T) {
	crashes := map[string]func(v *view, node int, end func()){
		"an alarm": func(v *view, node int, end func()) {
			end()
			v.Alarmed(named(node), 1, named(98), v.now)
		},
		"during the hold": func(v *view, node int, end func()) {
			v.Lost(processOf(node), v.now)
			v.look()
			end()
		},
	}
	for name, crash := range crashes {
		for _, missing := range []int{0, 12, 20, 40} {
			gone := map[string]bool{}
			v := viewOf(0, 100, func(node string) bool { return !gone[node] })
			for i := 1; i <= missing; i++ {
				gone[named(i)] = true
				v.Lost(processOf(i), v.now)
			}
			v.look()
			v.now, v.buried = v.now.Add(time.Minute), 0
			crash(v, 99, func() { gone[named(99)] = true })
			for began := v.now; v.now.Sub(began) < alarmLasts; v.now = v.now.Add(probeEvery) {
				v.look()
			}
			if v.buried != 1 {
				t.Errorf("%s, %d are missing: %d buried", name, missing, v.buried)
			}
		}
	}
}
