package nftables

import (
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// claims are the desired Services, and which of them has each frontend when several want it.
type claims struct {
	renderer
	want map[lb.Key]*service
	// owners are the Services that frontends belong to, waiting the others that want them.
	owners  map[frontend]*service
	waiting map[frontend][]*service
	// touch is told of the Services for which something has changed.
	touch func(lb.Key)
	// needs counts who needs a numbered set, recent are those that the last one has ceased to need since trim.
	needs  map[need]int
	recent map[need]bool
}

func newClaims(family lb.Family, touch func(lb.Key)) claims {
	c := claims{
		renderer: renderer{family: family, loads: map[lb.Key]plan.Load{}}, want: map[lb.Key]*service{},
		owners: map[frontend]*service{}, waiting: map[frontend][]*service{},
		touch: touch, needs: map[need]int{}, recent: map[need]bool{},
	}
	c.taken = func(group uint32) bool { return c.owners[frontend{group: group}] != nil }
	return c
}

// count counts the numbered sets that a Service needs, for so many more.
func (c *claims) count(s *service, by int) {
	if s == nil {
		return
	}
	for _, n := range s.needs {
		if c.needs[n] += by; c.needs[n] == 0 {
			delete(c.needs, n)
			c.recent[n] = true
		}
	}
}

// set takes what is wanted for one Service; a plan without ports of this family stands for nothing.
func (c *claims) set(key lb.Key, s plan.Service) {
	s = s.Only(c.family)
	c.touch(key)
	old := c.want[key]
	delete(c.want, key)
	c.count(old, -1)
	if old != nil {
		for _, p := range old.parts {
			c.unclaim(p.frontend, old)
		}
	}
	if !s.Scheduler.Counts() || len(s.Ports) == 0 {
		delete(c.loads, key)
	}
	if len(s.Ports) == 0 {
		return
	}
	now := c.service(key, s) // its own groups are free again
	c.want[key] = now
	c.count(now, 1)
	for _, p := range now.parts {
		c.claim(p.frontend, now)
	}
}

// render renders the Services again that bring other elements with another renderer: those with
// node ports, and those that are relayed.
func (c *claims) render(r renderer) {
	r.taken, r.loads = c.taken, c.loads
	c.renderer = r
	for key, s := range c.want {
		if s.input.Relay || s.hasNodePort() {
			c.set(key, s.input)
		}
	}
}

func (s *service) hasNodePort() bool {
	return slices.ContainsFunc(s.input.Ports, func(p plan.Port) bool {
		return slices.ContainsFunc(p.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
	})
}

// owns reports whether the frontend is the Service's.
func (c *claims) owns(key lb.Key, f frontend) bool {
	owner := c.owners[f]
	return owner != nil && owner.key == key
}

// claim notes that a Service wants a frontend. Plans contest only what depends on the node's own
// addresses, where node ports are served. One that lingers yields; else plan.Precedes decides.
func (c *claims) claim(f frontend, s *service) {
	owner := c.owners[f]
	if owner == nil {
		c.owners[f] = s
		return
	}
	if s.precedes(owner, f) {
		c.owners[f], s = s, owner
		c.touch(s.key)
	}
	c.waiting[f] = append(c.waiting[f], s)
}

func (c *claims) unclaim(f frontend, s *service) {
	waiting := c.waiting[f]
	if c.owners[f] == s {
		delete(c.owners, f)
		if len(waiting) == 0 {
			return
		}
		s = slices.MinFunc(waiting, func(a, b *service) int {
			if a.precedes(b, f) {
				return -1
			}
			return 1
		})
		c.owners[f] = s
		c.touch(s.key)
	}
	waiting = slices.DeleteFunc(waiting, func(other *service) bool { return other == s })
	if c.waiting[f] = waiting; len(waiting) == 0 {
		delete(c.waiting, f)
	}
}

func (s *service) precedes(other *service, f frontend) bool {
	mine, theirs := s.part(f), other.part(f)
	if mine.lingering != theirs.lingering {
		return theirs.lingering
	}
	return plan.Precedes(mine.kind, s.input.Age, theirs.kind, other.input.Age)
}

// part returns what the Service brings for a frontend, which it must have. The places are noted when they are
// first needed, as few frontends are contested, and a Service that is contested at all may be at thousands.
func (s *service) part(f frontend) part {
	if s.places == nil {
		s.places = make(map[frontend]int, len(s.parts))
		for i, p := range s.parts {
			s.places[p.frontend] = i
		}
	}
	return s.parts[s.places[f]]
}
