package plan

import (
	"cmp"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Shares bound what the Services of one namespace need together: of rules, or of whatever else Set counts. Who has
// a place keeps it, so a Service that grows or comes when its namespace has no room is refused what is new, and
// nobody else is. Services of other namespaces take no room.
//
// Shares is not safe for concurrent use.
type Shares struct {
	limit int
	// growth is how much more those may need together that have a place.
	growth int
	// whole says that Services are served whole or not at all, so the place of one that waits is idle.
	whole      bool
	namespaces map[string]*share
}

// share is what the Services of one namespace have.
type share struct {
	used int
	// held is what each may need at most; waiting are those that need more than there is room for.
	held    map[lb.Key]int
	waiting map[lb.Key]wish
}

// wish is what a Service needs in all.
type wish struct {
	Age
	needs int
}

// NewShares returns Shares of so much for each namespace; of any number for 0.
func NewShares(limit int) *Shares { return &Shares{limit: limit, namespaces: map[string]*share{}} }

// NewWholeShares returns Shares for what serves a Service whole or not at all. Those that have a place may need a
// quarter more than the limit together, so that each keeps its place while it changes, as in a rolling update. If that
// is too little for one, its place is idle until there is room for it: older Services that wait may take of it what
// they need, younger ones may not. A Service that needs more than the limit by itself has no place.
func NewWholeShares(limit int) *Shares {
	return &Shares{limit: limit, growth: limit / 4, whole: true, namespaces: map[string]*share{}}
}

// Limit returns what the Services of one namespace may need together; 0 for any number.
func (s *Shares) Limit() int { return s.limit }

// Set takes what a Service needs, 0 for one that is gone, and reports whether there is room for it. If not, it keeps
// the place that it has. next is the oldest Service of the namespace that has waited for room and has enough now; it
// should be set again.
func (s *Shares) Set(key lb.Key, age Age, needs int) (fits bool, next *lb.Key) {
	if s.limit == 0 {
		return true, nil
	}
	of := s.namespaces[key.Namespace]
	if of == nil {
		of = &share{held: map[lb.Key]int{}, waiting: map[lb.Key]wish{}}
		s.namespaces[key.Namespace] = of
	}
	held := of.held[key]
	_, waited := of.waiting[key]
	delete(of.waiting, key)
	if needs > held {
		if s.whole && needs > s.limit {
			of.hold(key, 0)
		}
		wanted, idle := wish{age, needs}, s.idle(of)
		if s.lacks(of, key, wanted, idle) > 0 {
			of.waiting[key] = wanted
			return false, s.next(of) // it may have been the next one, and have grown
		}
		of.take(idle, s.lacks(of, key, wanted, nil))
	}
	of.hold(key, needs)
	if len(of.held)+len(of.waiting) == 0 {
		delete(s.namespaces, key.Namespace)
	}
	if waited || needs < held {
		next = s.next(of)
	}
	return true, next
}

// next returns the oldest Service that waits for no more than there is room for.
func (s *Shares) next(of *share) *lb.Key {
	var next waiter
	found := false
	idle := s.idle(of)
	for key, w := range of.waiting {
		one := waiter{w.Age, key}
		if (!found || one.compare(next) < 0) && s.lacks(of, key, w, idle) <= 0 {
			next, found = one, true
		}
	}
	if !found {
		return nil
	}
	return &next.key
}

// lacks returns how much too little room there is for all that a Service needs, with the idle places of younger ones;
// none if it is not positive.
func (s *Shares) lacks(of *share, key lb.Key, w wish, idle []waiter) int {
	held := of.held[key]
	lacking := w.needs - held - (s.limit - of.used)
	if held > 0 {
		lacking -= s.growth
	}
	for _, p := range idle { // the youngest first
		if lacking <= 0 || (waiter{w.Age, key}).compare(p) >= 0 {
			break
		}
		lacking -= of.held[p.key]
	}
	return lacking
}

// waiter is a Service that waits.
type waiter struct {
	Age
	key lb.Key
}

// compare puts the older one first.
func (w waiter) compare(other waiter) int {
	return cmp.Or(w.Age.compare(other.Age), w.key.Compare(other.key))
}

// idle returns the Services that have places and do not use them, the youngest first.
func (s *Shares) idle(of *share) (idle []waiter) {
	if !s.whole {
		return nil
	}
	for key, w := range of.waiting {
		if of.held[key] > 0 {
			idle = append(idle, waiter{w.Age, key})
		}
	}
	slices.SortFunc(idle, func(a, b waiter) int { return b.compare(a) })
	return idle
}

// hold has a Service hold so much.
func (s *share) hold(key lb.Key, n int) {
	s.used += n - s.held[key]
	if s.held[key] = n; n == 0 {
		delete(s.held, key)
	}
}

// take takes so much from what these hold, in their order.
func (s *share) take(from []waiter, n int) {
	for _, p := range from {
		if n <= 0 {
			return
		}
		taken := min(n, s.held[p.key])
		s.hold(p.key, s.held[p.key]-taken)
		n -= taken
	}
}
