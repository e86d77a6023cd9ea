package plan

import (
	"cmp"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Shares bound what the Services of one namespace need together: of rules, or of whatever else Set counts. Who has
// a place keeps it, so a Service that grows or comes when its namespace has no room is refused what is new, and
// nobody else is. Services of other namespaces take no room, unless the node has a bound too.
//
// Shares is not safe for concurrent use.
type Shares struct {
	limit int
	// growth is how much more those may need together that have a place.
	growth int
	// node is what the Services of all namespaces may need together, 0 for any number, and used what they have.
	node, used int
	// whole says that Services are served whole or not at all, so the place of one that waits is idle.
	whole bool
	// loading is set while all have the room of those that have a place.
	loading bool
	// freed is set if a Service that waits may have room since Next was asked.
	freed      bool
	namespaces map[string]*share
}

// share is what the Services of one namespace have.
type share struct {
	used int
	// placed is what of this has come while the node had room for it as for what is new.
	placed int
	// held is what each may need at most; waiting are those that need more than there is room for.
	held    map[lb.Key]int
	waiting map[lb.Key]wish
	// idle are those that have places and wait, if they are served whole or not at all: the youngest first.
	idle []waiter
}

// wish is what a Service needs in all.
type wish struct {
	Age
	needs int
}

// Lack is what has no room for a Service; "" if there is room.
type Lack string

// What may have none.
const (
	Room          Lack = ""
	NamespaceFull Lack = "namespace"
	NodeFull      Lack = "node"
)

// partOfNew is how many times as much a namespace may have as is then left of the node's room for what is new. So
// however much some namespaces need, something is left for others.
const partOfNew = 4

// NewShares returns Shares of so much for each namespace; of any number for 0.
func NewShares(limit int) *Shares { return &Shares{limit: limit, namespaces: map[string]*share{}} }

// NewWholeShares returns Shares for what serves a Service whole or not at all, with a bound for each namespace and one
// of the node, 0 for none. Those that have a place may need a quarter more together, for which a fifth of the node is
// kept, so that each keeps its place while it changes, as in a rolling update. If that is too little for one, its place
// is idle until there is room for it: older Services that wait may take of it what they need, younger ones may not. A
// Service that needs more than the limit by itself has no place.
func NewWholeShares(limit, node int) *Shares {
	return &Shares{limit: limit, growth: limit / 4, node: node, whole: true, namespaces: map[string]*share{}}
}

// Limit returns what the Services of one namespace may need together; 0 for any number.
func (s *Shares) Limit() int { return s.limit }

// Loading gives all Services the room of those that have a place, or takes it back from those that have none. It is for
// the proxy's start: some of those that wait then had a place before, and it is unknown which.
func (s *Shares) Loading(is bool) { s.loading = is }

// Waits reports whether a Service waits for room.
func (s *Shares) Waits(key lb.Key) bool {
	of := s.namespaces[key.Namespace]
	if of == nil {
		return false
	}
	_, waits := of.waiting[key]
	return waits
}

// Held returns what a Service may need at most, as it has a place; 0 for one that has none.
func (s *Shares) Held(key lb.Key) int {
	if of := s.namespaces[key.Namespace]; of != nil {
		return of.held[key]
	}
	return 0
}

// Set takes what a Service needs, 0 for one that is gone, and returns what has no room for it. If something has none,
// the Service keeps the place that it has, and waits. Another one may have room by that: see Next.
func (s *Shares) Set(key lb.Key, age Age, needs int) Lack {
	if s.limit == 0 {
		return Room
	}
	of := s.namespaces[key.Namespace]
	if of == nil {
		of = &share{held: map[lb.Key]int{}, waiting: map[lb.Key]wish{}}
		s.namespaces[key.Namespace] = of
	}
	waited, used := s.stop(of, key), s.used
	if s.tooLarge(needs) {
		s.hold(of, key, 0)
	}
	held, one := of.held[key], waiter{age, key}
	if needs > held {
		lacking, lack := s.lacks(of, key, needs)
		if s.tooLarge(needs) || lacking > 0 && !of.spares(lacking, one) {
			s.wait(of, one, needs)
			return lack
		}
		s.take(of, lacking)
	}
	s.hold(of, key, needs)
	if len(of.held)+len(of.waiting) == 0 {
		delete(s.namespaces, key.Namespace)
	}
	s.freed = s.freed || waited || s.used < used
	return Room
}

// Next returns the oldest Service that has waited for room and has enough now, which should be set again; nil if there
// is none, or nothing has changed since it was last asked. It goes through all that wait.
func (s *Shares) Next() *lb.Key {
	if !s.freed {
		return nil
	}
	s.freed = false
	var next *waiter
	for _, of := range s.namespaces {
		spare := of.spare()
		for key, w := range of.waiting {
			one := waiter{w.Age, key}
			if next != nil && one.compare(*next) >= 0 || s.tooLarge(w.needs) {
				continue
			}
			if lacking, _ := s.lacks(of, key, w.needs); lacking <= 0 || lacking <= spare[of.younger(one)] {
				next = &one
			}
		}
	}
	if next == nil {
		return nil
	}
	return &next.key
}

func (s *Shares) tooLarge(needs int) bool { return s.whole && needs > s.limit }

// lacks returns how much too little room there is for all that a Service needs, without the idle places of others, and
// what has too little; there is enough if that is not positive.
func (s *Shares) lacks(of *share, key lb.Key, needs int) (lacking int, lack Lack) {
	room, left := s.limit-of.used, max((partOfNew*(s.forNew()-s.used)-of.used)/(partOfNew+1), 0)
	if of.held[key] > 0 || s.loading {
		room, left = room+s.growth, max(left, of.placed+of.placed/4-of.used)
	}
	lack = NamespaceFull
	if s.node > 0 && left < room {
		room, lack = left, NodeFull
	}
	return needs - of.held[key] - room, lack
}

// forNew returns how much of the node's bound is there for what is new. The rest is for namespaces that grow.
func (s *Shares) forNew() int { return s.node - s.node/5 }

// wait has a Service wait. If it has a place, older ones may have room by that.
func (s *Shares) wait(of *share, one waiter, needs int) {
	of.waiting[one.key] = wish{one.Age, needs}
	s.freed = true // also if it has waited before, and has grown
	if s.whole && of.held[one.key] > 0 {
		of.idle = slices.Insert(of.idle, of.younger(one), one)
	}
}

// stop has a Service wait no more, and reports whether it has waited.
func (s *Shares) stop(of *share, key lb.Key) (waited bool) {
	w, waited := of.waiting[key]
	if !waited {
		return false
	}
	delete(of.waiting, key)
	one := waiter{w.Age, key}
	if i := of.younger(one); i < len(of.idle) && of.idle[i] == one {
		of.idle = slices.Delete(of.idle, i, i+1)
	}
	return true
}

// hold has a Service hold so much.
func (s *Shares) hold(of *share, key lb.Key, n int) {
	more := n - of.held[key]
	of.used, s.used = of.used+more, s.used+more
	if of.held[key] = n; n == 0 {
		delete(of.held, key)
	}
	if placed := min(of.placed, of.used); of.used > partOfNew*(s.forNew()-s.used) {
		of.placed = placed
	} else if of.placed = of.used; of.placed > placed && len(of.waiting) > 0 {
		s.freed = true // one that waits may grow by a quarter of this
	}
}

// take takes so much from the idle places of the youngest.
func (s *Shares) take(of *share, n int) {
	for n > 0 && len(of.idle) > 0 {
		key := of.idle[0].key
		taken := min(n, of.held[key])
		s.hold(of, key, of.held[key]-taken)
		if n -= taken; of.held[key] == 0 {
			of.idle = of.idle[1:]
		}
	}
}

// waiter is a Service that waits.
type waiter struct {
	Age
	key lb.Key
}

// compare puts the older one first.
func (w waiter) compare(other waiter) int {
	return cmp.Or(w.Age.Compare(other.Age), w.key.Compare(other.key))
}

// younger returns how many of those with idle places are younger than a Service.
func (s *share) younger(one waiter) int {
	i, _ := slices.BinarySearchFunc(s.idle, one, func(a, b waiter) int { return b.compare(a) })
	return i
}

// spares reports whether younger Services have so much in idle places.
func (s *share) spares(n int, one waiter) bool {
	for _, other := range s.idle {
		if n <= 0 || one.compare(other) >= 0 {
			break
		}
		n -= s.held[other.key]
	}
	return n <= 0
}

// spare returns how much the idle places of the youngest have together: of none of them, of one, and so on.
func (s *share) spare() []int {
	sums := make([]int, 1, len(s.idle)+1)
	for i, one := range s.idle {
		sums = append(sums, sums[i]+s.held[one.key])
	}
	return sums
}
