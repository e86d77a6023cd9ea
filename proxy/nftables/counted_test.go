package nftables

import (
	"container/heap"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var countingSchedulers = []plan.Scheduler{plan.LeastConnections, plan.WeightedLeastConnections,
	plan.ShortestExpectedDelay, plan.NeverQueue}

// A table gives each backend the part that the scheduler gives it of the next connections, wherever in
// the table they begin.
func TestCountedSlots(t *testing.T) {
	for _, tt := range []struct {
		burdens []plan.Burden
		soon    uint32
		want    []int // of 127 slots
	}{
		{[]plan.Burden{{}, {}, {}}, 0, []int{43, 42, 42}},
		{[]plan.Burden{{Open: 9}, {}, {}}, 0, []int{0, 85, 42}},
		{[]plan.Burden{{Open: 9}, {}, {}}, 30, []int{17, 55, 55}}, // 4, 13 and 13 of 30
		{[]plan.Burden{{Open: 1 << 30}, {}}, 1 << 30, []int{0, 127}},
	} {
		got := make([]int, len(tt.burdens))
		for _, i := range countedSlots(plan.LeastConnections, tt.burdens, tt.soon, 127) {
			got[i]++
		}
		for i, n := range got {
			if n < tt.want[i]-1 || n > tt.want[i]+1 {
				t.Errorf("%v, %d soon: %v, want %v", tt.burdens, tt.soon, got, tt.want)
				break
			}
		}
	}
	// One after the other they follow each other as the scheduler has it, and not in blocks.
	if got := countedSlots(plan.LeastConnections, make([]plan.Burden, 3), 0, 127)[:6]; !slices.Equal(got,
		[]uint16{0, 1, 2, 0, 1, 2}) {
		t.Errorf("%v", got)
	}
}

// arrivals are connections that come and end: see play.
type arrivals struct {
	name string
	rate float64       // connections in a second
	hold time.Duration // how long one lasts, on average
	// gap is the time between two tables.
	gap time.Duration
}

// ends are when connections end, and at which backend.
type ends []end

type end struct {
	came, at float64
	backend  int
}

func (e ends) Len() int           { return len(e) }
func (e ends) Less(i, j int) bool { return e[i].at < e[j].at }
func (e ends) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *ends) Push(x any)        { *e = append(*e, x.(end)) }
func (e *ends) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

// play has 20,000 connections come at random times and end at random times. choose says where the next
// one goes. It returns by how many connections each backend is off, at each arrival and on average,
// from the part of all that are open which its weight says.
func (s arrivals) play(weights []uint8, choose func(now float64, backends []plan.Burden) int,
	ended func(came float64)) (off float64) {
	r := rand.New(rand.NewPCG(7, 7))
	backends, total := make([]plan.Burden, len(weights)), 0.0
	for i, weight := range weights {
		backends[i].Weight = weight
		total += float64(weight)
	}
	var leaving ends
	now, open, steps := 0.0, 0, 0
	for n := range 20_000 {
		now += r.ExpFloat64() / s.rate
		for len(leaving) > 0 && leaving[0].at <= now {
			end := heap.Pop(&leaving).(end)
			ended(end.came)
			backends[end.backend].Open--
			open--
		}
		i := choose(now, backends)
		backends[i].Open++
		open++
		heap.Push(&leaving, end{now, now + r.ExpFloat64()*s.hold.Seconds(), i})
		if n < 2000 { // until as many come as end
			continue
		}
		for _, b := range backends {
			fair := float64(open) * float64(b.Weight) / total
			off += max(fair-float64(b.Open), float64(b.Open)-fair)
		}
		steps += len(backends)
	}
	return off / float64(steps)
}

// For each scheduler, connections that come and end at random spread about as IPVS spreads them, which
// counts at each of them, although the table knows only what was so when it was written. Tables add the
// chance of what comes between two of them. Where connections last for longer than that, it is far more
// without counts.
func TestCountedTablesSpreadAsIPVS(t *testing.T) {
	weights := []uint8{4, 2, 1, 1}
	for _, s := range []arrivals{
		{"1 in a second for a minute", 1, time.Minute, 200 * time.Millisecond},
		{"50 in a second for 10 s", 50, 10 * time.Second, 200 * time.Millisecond},
		{"1000 in a second for 1 s", 1000, time.Second, 200 * time.Millisecond},
		{"1000 in a second for 50 ms", 1000, 50 * time.Millisecond, 200 * time.Millisecond},
		{"1000 in a second for 1 s, a table each 2 s", 1000, time.Second, 2 * time.Second},
	} {
		for _, scheduler := range countingSchedulers {
			weights := weights
			if !scheduler.Weighted() {
				weights = []uint8{1, 1, 1, 1}
			}
			exact := s.play(weights, func(_ float64, backends []plan.Burden) int {
				return slices.Index(scheduler.Next(backends, 1), 1)
			}, func(float64) {})
			table, place, fresh, written := []uint16(nil), 0, uint32(0), -s.gap.Seconds()
			ours := s.play(weights, func(now float64, backends []plan.Burden) int {
				if now-written >= s.gap.Seconds() {
					table, fresh, written = countedSlots(scheduler, backends, 2*fresh, 127), 0, now // as loads has it
				}
				fresh++
				place = (place + 1) % len(table)
				return int(table[place])
			}, func(came float64) {
				if came >= written {
					fresh--
				}
			})
			turns := plan.NewTurns(len(weights), weights)
			blind := s.play(weights, func(float64, []plan.Burden) int { return turns.Next() }, func(float64) {})
			t.Logf("%s, %s: a backend is off by %.2f connections, by %.2f in IPVS, by %.2f without counts",
				s.name, scheduler, ours, exact, blind)
			perTable := s.rate * s.gap.Seconds()
			if limit := exact + 1 + perTable/20; ours > limit {
				t.Errorf("%s, %s: off by %.2f, at most %.2f allowed", s.name, scheduler, ours, limit)
			}
			if s.hold > s.gap && s.rate > 1 && ours > 0.7*blind {
				t.Errorf("%s, %s: off by %.2f, without counts by %.2f", s.name, scheduler, ours, blind)
			}
		}
	}
}

// weigh writes what is known of a Service's connections in one round.
func (a *testActor) weigh(t *testing.T, key lb.Key, load plan.Load) dialect.Stats {
	t.Helper()
	a.Weigh(map[lb.Key]plan.Load{key: load})
	st, err := a.Apply(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// shares returns how many slots of the only group lead to each backend.
func (k *fakeKernel) shares() map[netip.Addr]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	shares := map[netip.Addr]int{}
	for e, to := range k.state.elements {
		if e.set == setBackends {
			shares[to.addr.ip(k.family)]++
		}
	}
	return shares
}

// Loads move the slots of their Service alone, are lost over no change of it and no repair, and nobody
// hears of them.
func TestWeigh(t *testing.T) {
	four := newFakeKernel(lb.IPv4)
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
	a.Configure(seedConfig)
	all := clusterServices(10)
	counted := slices.MinFunc(slices.Collect(maps.Keys(all)), lb.Key.Compare)
	s := all[counted]
	s.Scheduler = plan.LeastConnections
	for i := range s.Ports {
		s.Ports[i].Backends.Cluster = manyBackends(lb.IPv4, 3)
		s.Ports[i].Number = 0
	}
	others := maps.Clone(all)
	delete(others, counted)
	a.settle(t, others)
	elsewhere := four.shares()
	a.settle(t, map[lb.Key]plan.Service{counted: s})
	a.Outcomes()
	own := func() (places []int) {
		shares := four.shares()
		for _, b := range s.Ports[0].Backends.Cluster {
			places = append(places, shares[b.Addr.Addr()]-elsewhere[b.Addr.Addr()])
		}
		return places
	}
	first := s.Ports[0].Backends.Cluster[0].Addr.Addr()
	if got := own(); got[0] == 0 || got[1] == 0 {
		t.Fatalf("at first the backends have %v slots", got)
	}
	load := plan.Load{Open: map[netip.Addr]uint32{first: 9}}
	before := four.commits
	if st := a.weigh(t, counted, load); st.Changes == 0 || st.Changes > 2*127 || st.Transactions != 1 {
		t.Errorf("a load made %+v", st)
	}
	if got := own(); got[0] != 0 || got[1] == 0 {
		t.Errorf("with 9 connections on the first the backends have %v slots", got)
	}
	if outcomes := a.Outcomes(); len(outcomes) != 0 {
		t.Errorf("outcomes of a load: %v", outcomes)
	}
	if st := a.weigh(t, counted, load); st.Transactions != 0 || four.commits != before+1 {
		t.Errorf("the same load made %+v", st)
	}
	for key := range others { // not counted
		if st := a.weigh(t, key, load); st.Transactions != 0 {
			t.Errorf("a load of %s made %+v", key, st)
		}
	}
	if st := a.weigh(t, lb.Key{Namespace: "no", Name: "where"}, load); st.Transactions != 0 {
		t.Errorf("a load of no Service made %+v", st)
	}
	// A change of the Service, a repair, and a failure keep it.
	s.AffinityTimeout = time.Hour
	a.settle(t, map[lb.Key]plan.Service{counted: s})
	if got := own(); got[0] != 0 {
		t.Errorf("after a change the backends have %v slots", got)
	}
	four.wipe()
	if _, err := a.Apply(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	if got := own(); got[0] != 0 || got[1] == 0 {
		t.Errorf("after a repair the backends have %v slots", got)
	}
	four.refuse = func(c change) error {
		if len(c.remove) > 1 {
			return errPoison
		}
		return nil
	}
	a.Outcomes()
	a.Weigh(map[lb.Key]plan.Load{counted: {}})
	if _, err := a.Apply(t.Context(), false); err == nil {
		t.Error("a refusal is no error")
	}
	four.refuse = nil
	settled(t, a)
	if got := own(); got[0] == 0 {
		t.Errorf("after a failure the backends have %v slots", got)
	}
	if outcomes := a.Outcomes(); outcomes[counted].Err != nil || len(outcomes[counted].Applied.Ports) == 0 {
		t.Errorf("after a failure: %+v", outcomes[counted])
	}
	// Without the Service nothing is remembered of it.
	a.settle(t, map[lb.Key]plan.Service{counted: {Key: counted}})
	a.weigh(t, counted, load)
	if n := len(a.table(lb.IPv4).loads); n != 0 {
		t.Errorf("%d loads are kept", n)
	}
}

// A Service that is written in parts is finished although loads come all the time.
func TestLoadsHoldBackNoParts(t *testing.T) {
	four := newFakeKernel(lb.IPv4)
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
	a.Configure(seedConfig)
	s := mixedService(20, 300, 1)
	s.Scheduler = plan.LeastConnections
	a.table(lb.IPv4).limit = 50
	n := uint32(0)
	four.after = func() {
		n++
		load := plan.Load{Open: map[netip.Addr]uint32{}}
		for i, b := range s.Ports[0].Backends.Cluster {
			load.Open[b.Addr.Addr()] = n * uint32(i%7)
		}
		if n < 100_000 {
			a.Weigh(map[lb.Key]plan.Load{s.Key: load})
		}
	}
	a.Set(map[lb.Key]plan.Service{s.Key: s})
	for range 10_000 {
		if _, err := a.Apply(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		if o := a.Outcomes(); len(o[s.Key].Applied.Ports) > 0 && len(o[s.Key].Alone) == 0 {
			return
		}
	}
	t.Error("it is never finished")
}

// Contract clause 11: a load of a Service with many lists of backends makes no more than their tables take, in parts of
// bounded size, and what the next connections are is found out once for all lists that are alike.
func TestContract11ALoadOfManyLists(t *testing.T) {
	const lists = 500
	four := newFakeKernel(lb.IPv4)
	a := newActor(dialect.Deps{}, map[lb.Family]kernel{lb.IPv4: four})
	a.Configure(seedConfig)
	s := mixedService(lists, 2, 0)
	s.Scheduler = plan.LeastConnections
	a.settle(t, map[lb.Key]plan.Service{s.Key: s})
	load := plan.Load{Open: map[netip.Addr]uint32{s.Ports[0].Backends.Cluster[0].Addr.Addr(): 9}, Soon: 1000}
	four.largest = 0
	st := a.weigh(t, s.Key, load)
	if st.Changes < lists || st.Changes > lists*2*127 || four.largest > maxOperations {
		t.Errorf("%+v, the largest part has %d elements", st, four.largest)
	}
	filled := map[*counted]bool{}
	for _, c := range a.table(lb.IPv4).choices(s.Key, s, map[uint32]bool{}) {
		filled[c.cluster.counted] = true
	}
	if len(filled) != 1 {
		t.Errorf("%d tables are filled for %d lists that are alike", len(filled), lists)
	}
}
