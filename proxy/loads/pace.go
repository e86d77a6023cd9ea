package loads

import (
	"cmp"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// How often loads are told. Each has the kernel's tables for a Service written anew, so there is an end of it for each
// Service and for the node, by what it costs: 1 for each list of backends, whose table takes the kernel some 0.5 ms,
// and for each 64 backends and destinations.
const (
	// gap is the least time between two loads of one Service.
	gap = 200 * time.Millisecond
	// share is the time that a cost of 1 takes of the node's, burst how much of that may be saved up, and more
	// for a load that costs more.
	share = 20 * time.Millisecond
	burst = 10 * share
	// each is added to the cost where the loads of several Services wait: of eight small ones and a large one,
	// the large one may take half of the time.
	each = 7
)

// pace says when loads may be told. Among those that wait it is a fair queue by what Services have cost
// (self-clocked fair queueing, Golestani 1994). A load is told once its whole time has been saved up: until
// then others that come first are told, and none has to wait for the time that another one has taken.
type pace struct {
	free  time.Time // the node's time is taken until then
	clock int       // up to where Services had come when the last load was told
}

// due returns the loads that may be told now, and when to look again; zero if nothing waits.
func (p *pace) due(t *tally, now time.Time) (loads map[lb.Key]plan.Load, again time.Time) {
	var waiting []*service
	most := burst
	look := func(at time.Time) {
		if again.IsZero() || at.Before(again) {
			again = at
		}
	}
	for s := range t.changed {
		most = max(most, s.time())
		if at := s.ready(); at.After(now) {
			look(at)
		} else {
			p.queue(s)
			waiting = append(waiting, s)
		}
	}
	slices.SortFunc(waiting, func(a, b *service) int {
		return cmp.Or(cmp.Compare(a.finish, b.finish), a.ready().Compare(b.ready()))
	})
	if earliest := now.Add(-most); p.free.Before(earliest) {
		p.free = earliest
	}
	loads = map[lb.Key]plan.Load{}
	for _, s := range waiting {
		if at := p.free.Add(s.time()); at.After(now) {
			look(at)
			break
		}
		p.clock, s.queued = s.finish, false
		p.free = p.free.Add(s.time())
		loads[s.key] = t.load(s, now)
		if t.changed[s] {
			look(s.ready())
		}
	}
	return loads, again
}

// queue notes up to where a Service will have come once its next load is told. One that has told little starts
// where the others are.
func (p *pace) queue(s *service) {
	if !s.queued {
		s.queued, s.finish = true, max(p.clock, s.finish)+each+s.cost
	}
}

// time returns how much of the node's time a load takes.
func (s *service) time() time.Duration { return time.Duration(s.cost) * share }

// ready returns when the Service's next load may be told, by what it costs itself.
func (s *service) ready() time.Time { return s.told.Add(max(gap, s.time())) }
