// Package ahead decides which addresses this node probes before a Service gets them, what it tells
// the others of that, and for which addresses it is known that no host uses them.
package ahead

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// linger is how long a node goes on listening for an address that no pool hands out next any more:
// the controller takes it out of the pool's status before it gives it to a Service, and a Service may
// wait a while for its pods. It ends sooner when a node of ours answers for the address.
const linger = 10 * time.Second

// Facts are what a step knows.
type Facts struct {
	Node plan.Facts
	// Held reports whether a Service has the address.
	Held func(netip.Addr) bool
	// Served reports whether a node of ours has answered for the address. Nodes do not ask then whether
	// another host uses it.
	Served func(netip.Addr) bool
	// Room is how many addresses may be told to the others beyond those of Services.
	Room int
	// Claims are what the other nodes say of an address.
	Claims func(netip.Addr) map[string]plan.Claim
	// Scouted names for each address, by interface, the node that has asked on that LAN lately, while
	// nobody is known to use it there.
	Scouted map[netip.Addr]map[string]string
	// Version is another one whenever Scouted says something else; 0 if that is not known.
	Version uint64
}

// State is what is remembered from one step to the next. The zero value is ready.
type State struct {
	scouts  map[netip.Addr]plan.Scout
	leaving map[netip.Addr]time.Time // addresses that are not handed out next any more, until when they stay
	scouted map[netip.Addr]map[string]string
	version uint64 // of scouted
	// said are the nodes that say of an address that nobody has answered them.
	said map[netip.Addr]map[string]bool
	own  map[netip.Addr]bool // what this node says itself
}

// Events are what may have changed since the step before.
type Events struct {
	All   bool                // what this node can do, or who else is there
	Next  bool                // which addresses pools hand out next
	Heard map[netip.Addr]bool // addresses of which other nodes say something else
}

// Step takes in what has changed. It returns the addresses of which this node says or knows something
// else now, and whether the actor has something else to do. again is when to call it next; 0 for not
// at all.
func (s *State) Step(now time.Time, f Facts, e Events) (
	touched map[netip.Addr]bool, changed bool, again time.Duration) {
	touched = map[netip.Addr]bool{}
	look := e.All || e.Next
	for _, until := range s.leaving {
		look = look || !now.Before(until)
	}
	for addr := range e.Heard {
		scout, known := s.scouts[addr]
		look = look || known && scout.Rank >= 0 && f.Held(addr)
	}
	moved := map[netip.Addr]bool{} // addresses of which this node may say something else
	if look {
		s.look(now, f, e.All, moved)
		changed = len(moved) > 0
	}
	for addr := range s.listening(moved, e) {
		free := s.Clear(f.Node.Self, addr)
		s.listen(f, addr)
		if e.Heard[addr] || !slices.Equal(free, s.Clear(f.Node.Self, addr)) {
			touched[addr] = true
		}
	}
	if f.Version == 0 || f.Version != s.version {
		unlike(s.scouted, f.Scouted, moved)
	}
	for addr := range moved {
		differs := !maps.Equal(s.scouted[addr], f.Scouted[addr])
		if free := s.foundFree(f, addr); free != s.own[addr] {
			differs = true
			s.note(addr, free)
		}
		if differs {
			touched[addr] = true
		}
	}
	s.scouted, s.version = f.Scouted, f.Version
	for _, until := range s.leaving {
		again = plan.Sooner(again, until.Sub(now))
	}
	return touched, changed, again
}

// listening returns the addresses of which others may say something else than when this node last
// listened, given which of them it probes or listens for otherwise than before.
func (s *State) listening(moved map[netip.Addr]bool, e Events) map[netip.Addr]bool {
	found := map[netip.Addr]bool{}
	if e.All {
		for addr := range s.scouts {
			found[addr] = true
		}
		return found
	}
	for _, addrs := range []map[netip.Addr]bool{moved, e.Heard} {
		for addr := range addrs {
			if _, scouts := s.scouts[addr]; scouts {
				found[addr] = true
			}
		}
	}
	return found
}

// look finds out which addresses to probe or to listen for, and adds to moved those for which that differs.
// Without all, only what pools hand out next is something else.
func (s *State) look(now time.Time, f Facts, all bool, moved map[netip.Addr]bool) {
	var known map[netip.Addr]plan.Scout
	if !all {
		known = s.scouts
	}
	next := plan.Ahead(f.Node, f.Held, min(f.Room, plan.MaxAhead), known)
	kept := 0 // addresses of before that are there still
	for addr, before := range s.scouts {
		if scout, stays := next[addr]; stays {
			if kept++; !scout.Equal(before) {
				moved[addr] = true
			}
			delete(s.leaving, addr)
			continue
		}
		if s.leaving == nil {
			s.leaving = map[netip.Addr]time.Time{}
		}
		if _, known := s.leaving[addr]; !known {
			s.leaving[addr] = now.Add(linger)
		}
		scout, listens := before, before.Rank < 0
		if all || !listens {
			scout, listens = plan.ScoutOf(f.Node, addr)
		}
		if listens && now.Before(s.leaving[addr]) && !f.Served(addr) {
			kept++
			next[addr] = scout
		} else {
			delete(s.leaving, addr)
			delete(s.said, addr)
		}
		if now, stays := next[addr]; !stays || !now.Equal(before) {
			moved[addr] = true
		}
	}
	if kept < len(next) {
		for addr := range next {
			if _, known := s.scouts[addr]; !known {
				moved[addr] = true
			}
		}
	}
	s.scouts = next
}

// listen takes in what the others say of an address. One that has found somebody says nothing of it
// any more, or that it is in conflict. What one has said goes on to count when it speaks of a Service
// that has the address, of which this node may not know yet.
func (s *State) listen(f Facts, addr netip.Addr) {
	claims := f.Claims(addr)
	for node, claim := range claims {
		if claim.Reason == lb.ReasonProbedAhead && !claim.Stale {
			if s.said == nil {
				s.said = map[netip.Addr]map[string]bool{}
			}
			if s.said[addr] == nil {
				s.said[addr] = map[string]bool{}
			}
			s.said[addr][node] = true
		}
	}
	maps.DeleteFunc(s.said[addr], func(node string, _ bool) bool {
		claim, says := claims[node]
		return !slices.Contains(f.Node.Live, node) || !says || claim.Reason == lb.ReasonAddressConflict
	})
}

// foundFree reports whether this node has asked for an address itself, and nobody is known to use it.
func (s *State) foundFree(f Facts, addr netip.Addr) bool {
	if _, scouts := s.scouts[addr]; !scouts {
		return false
	}
	for _, node := range f.Scouted[addr] {
		if node == f.Node.Self {
			return true
		}
	}
	return false
}

func (s *State) note(addr netip.Addr, free bool) {
	if !free {
		delete(s.own, addr)
		return
	}
	if s.own == nil {
		s.own = map[netip.Addr]bool{}
	}
	s.own[addr] = true
}

// Clear returns the interfaces on whose LANs nobody uses the address, as far as is known; sorted.
func (s *State) Clear(self string, addr netip.Addr) (clear []string) {
	for iface, node := range s.scouted[addr] {
		if node == self || s.said[addr][node] {
			clear = append(clear, iface)
		}
	}
	slices.Sort(clear)
	return clear
}

// Claim returns what this node says to the others of an address that no Service has; nil for nothing.
func (s *State) Claim(addr netip.Addr) *plan.Claim {
	if !s.own[addr] {
		return nil
	}
	return &plan.Claim{Reason: lb.ReasonProbedAhead}
}

// Desired returns the addresses to probe or to listen for. Do not change it.
func (s *State) Desired() map[netip.Addr]plan.Scout { return s.scouts }

// Own returns the addresses that this node says nobody uses. Do not change it.
func (s *State) Own() map[netip.Addr]bool { return s.own }

// Counts returns how many addresses pools hand out next that this node may announce, and how many of
// them it could announce at once.
func (s *State) Counts(self string) (wanted, clear int) {
	for addr, scout := range s.scouts {
		if scout.Rank < 0 {
			continue
		}
		wanted++
		if len(s.Clear(self, addr)) == len(scout.On) {
			clear++
		}
	}
	return wanted, clear
}

// unlike adds to found the addresses of which two maps say something else.
func unlike(a, b map[netip.Addr]map[string]string, found map[netip.Addr]bool) {
	kept := 0 // addresses of a that are in b
	for addr, now := range b {
		was, ok := a[addr]
		if ok {
			kept++
		}
		if !ok || !maps.Equal(was, now) {
			found[addr] = true
		}
	}
	if kept == len(a) {
		return
	}
	for addr := range a {
		if _, ok := b[addr]; !ok {
			found[addr] = true
		}
	}
}
