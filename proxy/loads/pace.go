package loads

import (
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// How often loads are told. Each has the kernel's tables for a Service written anew, so there is an
// end of it for each Service and for the node, by what it costs: 1 for a Service with less than 64
// backends and destinations, which takes the kernel some 0.5 ms.
const (
	// gap is the least time between two loads of one Service.
	gap = 200 * time.Millisecond
	// share is the time that a cost of 1 takes of the node's, burst how much of that may be saved up.
	share = 20 * time.Millisecond
	burst = 10 * share
)

// pace says when loads may be told.
type pace struct {
	free time.Time // the node's time is taken until then
}

// due returns the loads that may be told now, those first that have waited longest, and when to look
// again; zero if nothing waits.
func (p *pace) due(t *tally, now time.Time) (loads map[lb.Key]plan.Load, again time.Time) {
	waiting := make([]*service, 0, len(t.changed))
	for s := range t.changed {
		waiting = append(waiting, s)
	}
	slices.SortFunc(waiting, func(a, b *service) int { return a.ready().Compare(b.ready()) })
	if earliest := now.Add(-burst); p.free.Before(earliest) {
		p.free = earliest
	}
	loads = map[lb.Key]plan.Load{}
	for _, s := range waiting {
		at := s.ready()
		if p.free.After(at) {
			at = p.free
		}
		if at.After(now) {
			return loads, at
		}
		loads[s.key] = t.load(s, now)
		p.free = p.free.Add(time.Duration(s.cost) * share)
		if t.changed[s] && (again.IsZero() || s.ready().Before(again)) {
			again = s.ready()
		}
	}
	return loads, again
}

// ready returns when the Service's next load may be told, by what it costs itself.
func (s *service) ready() time.Time { return s.told.Add(max(gap, time.Duration(s.cost)*share)) }
