package plan

import (
	"cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Shares bound what the Services of one namespace need together: of rules, or of whatever else Set counts. Who has
// a place keeps it, so a Service that grows or comes when its namespace has no room is refused what is new, and
// nobody else is. Services of other namespaces take no room.
//
// Shares is not safe for concurrent use.
type Shares struct {
	limit      int
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

// Limit returns what the Services of one namespace may need together; 0 for any number.
func (s *Shares) Limit() int { return s.limit }

// Set takes what a Service needs, 0 for one that is gone, and reports whether there is room for it. If not, it keeps
// the room that it has. next is the oldest Service of the namespace that has waited for room and has enough now; it
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
	if needs > held && of.used-held+needs > s.limit {
		of.waiting[key] = wish{age, needs}
		return false, of.next(s.limit - of.used) // it may have been the next one, and have grown
	}
	of.used += needs - held
	of.held[key] = needs
	if needs == 0 {
		delete(of.held, key)
	}
	if len(of.held)+len(of.waiting) == 0 {
		delete(s.namespaces, key.Namespace)
	}
	if waited || needs < held {
		next = of.next(s.limit - of.used)
	}
	return true, next
}

// next returns the oldest Service that waits for no more than there is room for.
func (s *share) next(room int) (next *lb.Key) {
	var first Age
	for key, w := range s.waiting {
		if w.needs-s.held[key] > room {
			continue
		}
		if next == nil || cmp.Or(w.compare(first), key.Compare(*next)) < 0 {
			next, first = &key, w.Age
		}
	}
	return next
}
