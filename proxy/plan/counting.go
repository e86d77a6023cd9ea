package plan

import (
	"container/heap"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Load is what is known of the connections that a Service has through this node.
type Load struct {
	// Open are the open connections of each backend by its address; a backend that is not there has
	// none.
	Open map[netip.Addr]uint32
	// Soon is how many new connections are expected until the next Load.
	Soon uint32
}

// Burden is what a scheduler that counts compares of a backend. A weight of 0 counts as 1.
type Burden struct {
	Open   uint32
	Weight uint8
}

// Lighter reports whether the scheduler, which must be one that counts, prefers a backend to another
// one. IPVS takes the first of its list to which it prefers no other:
//
//   - lc: the fewest connections (ip_vs_lc.c);
//   - wlc: the fewest connections / weight (ip_vs_wlc.c);
//   - sed: the least (connections + 1) / weight (ip_vs_sed.c);
//   - nq: one without connections, else as sed (ip_vs_nq.c).
func (s Scheduler) Lighter(a, b Burden) bool {
	weightA, weightB := uint64(max(a.Weight, 1)), uint64(max(b.Weight, 1))
	openA, openB := uint64(a.Open), uint64(b.Open)
	switch s {
	case WeightedLeastConnections:
		return openA*weightB < openB*weightA
	case NeverQueue:
		if idle := openA == 0; idle || openB == 0 {
			return idle && openB != 0
		}
		fallthrough
	case ShortestExpectedDelay:
		return (openA+1)*weightB < (openB+1)*weightA
	}
	return openA < openB
}

// Next returns how many of the next n connections each backend gets if the scheduler, which must be
// one that counts, chooses for one after the other, and none ends.
func (s Scheduler) Next(backends []Burden, n int) []uint32 {
	q := queue{scheduler: s, burdens: make([]Burden, len(backends)), order: make([]int, len(backends))}
	copy(q.burdens, backends)
	for i := range q.order {
		q.order[i] = i
	}
	heap.Init(&q)
	gets := make([]uint32, len(backends))
	for range n {
		first := q.order[0]
		gets[first]++
		q.burdens[first].Open++
		heap.Fix(&q, 0)
	}
	return gets
}

// queue has the backend first that the scheduler takes.
type queue struct {
	scheduler Scheduler
	burdens   []Burden
	order     []int // places in burdens
}

func (q *queue) Len() int { return len(q.order) }

func (q *queue) Less(i, j int) bool {
	a, b := q.order[i], q.order[j]
	switch {
	case q.scheduler.Lighter(q.burdens[a], q.burdens[b]):
		return true
	case q.scheduler.Lighter(q.burdens[b], q.burdens[a]):
		return false
	}
	return a < b
}

func (q *queue) Swap(i, j int) { q.order[i], q.order[j] = q.order[j], q.order[i] }

// Push and Pop are there for heap.Interface alone: nothing comes or goes.
func (q *queue) Push(any) {}
func (q *queue) Pop() any { return nil }

// Tracked is what the kernel's connection tracking says of a connection whose destination it
// translates.
type Tracked struct {
	Protocol lb.Protocol
	// To is where the Client sent, Backend who answers.
	Client, To, Backend netip.AddrPort
	// Open is set while data may go both ways, and no end has said that it sends no more.
	Open bool
}
