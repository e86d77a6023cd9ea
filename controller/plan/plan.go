// Package plan decides which Service holds which addresses, and says why one gets none.
//
// It is a pure function of the pools, the Services and our own writes that have not been seen back. What a Service holds is
// read from its status, so a pass can be repeated at any time, by any process: holders come first and keep what they have,
// newcomers are then served oldest first.
package plan

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Pending is a write of our own that the picture of the Services may not show yet.
type Pending struct {
	UID       string // of the Service
	Version   string // of the Service that the write was decided on
	Addresses []netip.Addr
}

// Covers tells whether s is still what the write was decided on, and so cannot show the write. As soon as the Service is seen in
// another version, that version is newer and shows whether the write took place.
func (p Pending) Covers(s lb.Service) bool { return p.UID == s.UID && p.Version == s.Version }

// Decision is what one Service shall hold and show.
type Decision struct {
	// Addresses are all that the Service shall hold.
	Addresses []netip.Addr
	// Condition says whether the Service has what it asks for; nil on a Service that is to lose all that is ours.
	Condition *lb.Condition
}

// Plan is the result of Assign.
type Plan struct {
	// Services holds a decision for each Service that is ours or was.
	Services map[lb.Key]Decision
	Pools    map[string]PoolPlan
}

// PoolPlan is what one pool shall show.
type PoolPlan struct {
	Status lb.PoolStatus
	// Families counts addresses by family, for each family that the pool has.
	Families map[lb.Family]Usage
}

// Ours tells whether a controller for class serves s: Services of exactly that class, and without a class those that have none.
func Ours(s *lb.Service, class string) bool { return s.Type == lb.LoadBalancer && s.Class == class }

// Assign decides for all Services at once. class is the loadBalancerClass served, "" for Services without one.
func Assign(class string, pools map[string]lb.Pool, services map[lb.Key]lb.Service, pending map[lb.Key]Pending) Plan {
	a := assigner{
		pools:   newPools(pools),
		holders: make(map[netip.Addr]lb.Key, len(services)),
		plan:    Plan{Services: make(map[lb.Key]Decision, len(services)), Pools: make(map[string]PoolPlan, len(pools))},
	}
	ordered := byAge(services)
	for _, c := range ordered {
		a.register(c, class, pending)
	}
	for _, c := range ordered {
		switch {
		case c.Deleting:
			// It holds what it has until it is gone, and nobody cares for its condition.
		case Ours(&c.Service, class):
			a.plan.Services[c.Key] = a.decide(c)
		case c.Type != lb.LoadBalancer && len(c.Conditions) > 0:
			// Once ours. A Service of another class is left alone, even one that shows our conditions: they may be those of
			// another controller like this one, and an API server does not let a class change.
			a.plan.Services[c.Key] = Decision{}
		}
	}
	for _, p := range a.pools.ordered {
		a.plan.Pools[p.Name] = p.plan()
	}
	return a.plan
}

// candidate is a Service with what it holds: all of its addresses, of whatever source.
type candidate struct {
	lb.Service
	held []netip.Addr
	// duplicate names an address of held that an older Service holds as well.
	duplicate netip.Addr
}

// byAge returns the Services oldest first.
func byAge(services map[lb.Key]lb.Service) []*candidate {
	all := make([]candidate, 0, len(services)) // one piece of memory for all of them
	ordered := make([]*candidate, 0, len(services))
	for _, s := range services {
		all = append(all, candidate{Service: s})
		ordered = append(ordered, &all[len(all)-1])
	}
	slices.SortFunc(ordered, func(a, b *candidate) int { return Older(&a.Service, &b.Service) })
	return ordered
}

// Older orders Services by age, then by name, which is the order in which they are served.
func Older(a, b *lb.Service) int {
	return cmp.Or(a.Created.Compare(b.Created), a.Key.Compare(b.Key))
}

// assigner is the state of one pass.
type assigner struct {
	pools *pools
	// holders has each address that must not be given to another Service, with the oldest Service that has it.
	holders map[netip.Addr]lb.Key
	plan    Plan
}

// register notes what a Service holds. Called in order of age.
func (a *assigner) register(c *candidate, class string, pending map[lb.Key]Pending) {
	if len(c.Ingress) > 0 {
		c.held = make([]netip.Addr, 0, len(c.Ingress))
	}
	for _, in := range c.Ingress {
		c.held = append(c.held, in.Addr)
	}
	shown := c.held
	if p, ok := pending[c.Key]; ok && p.Covers(c.Service) {
		// Whether the write took place is not known for sure, so what is shown stays taken as well.
		c.held = p.Addresses
	}
	for _, addr := range c.held {
		if holder := a.take(addr, c.Key); holder != c.Key && Ours(&c.Service, class) {
			c.duplicate = addr
		}
	}
	for _, addr := range shown {
		a.take(addr, c.Key)
	}
	for _, addr := range c.ExternalIPs {
		a.take(addr, c.Key)
	}
}

// take makes key the holder of addr unless it has one, and returns the holder.
func (a *assigner) take(addr netip.Addr, key lb.Key) lb.Key {
	if holder, ok := a.holders[addr]; ok {
		return holder
	}
	a.holders[addr] = key
	a.pools.count(addr)
	return key
}

// taken tells whether a Service holds addr.
func (a *assigner) taken(addr netip.Addr) bool {
	_, ok := a.holders[addr]
	return ok
}
