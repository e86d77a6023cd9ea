package relay

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// chooser chooses among backends for one connection. It is pure but for what draw returns, and the turns that it
// takes.
type chooser struct {
	choices
	scheduler        plan.Scheduler
	client, frontend netip.AddrPort
	// draw returns a number at random.
	draw func() uint64
	// first is the backend that session affinity remembers; it is tried first if it is there.
	first netip.AddrPort
	// isSuspect reports whether a backend did not answer lately: it is tried last. It is nil if there is none.
	isSuspect func(netip.AddrPort) bool
	// open and turns are the Service's.
	open  map[netip.AddrPort]uint32
	turns map[turn]float64
}

// turn is a backend among the choices of a name.
type turn struct {
	choices string
	backend netip.AddrPort
}

// remembers reports whether the choice goes by what became of others.
func (c chooser) remembers() bool { return c.scheduler.Counts() || c.scheduler.Turns() }

// anyWill reports whether no backend is to be preferred.
func (c chooser) anyWill() bool {
	return !c.remembers() && c.slots == nil && !c.first.IsValid() && c.isSuspect == nil
}

// Of the backends that may be tried, those of the highest class are.
const (
	classTried = iota
	classSuspect
	classUsual
	classRemembered
)

func (c chooser) class(b plan.RelayedBackend, tried []netip.AddrPort) int {
	switch {
	case slices.Contains(tried, b.Addr):
		return classTried
	case c.isSuspect != nil && c.isSuspect(b.Addr):
		return classSuspect
	case b.Addr == c.first:
		return classRemembered
	}
	return classUsual
}

// next returns the backend to try after those that were tried; ok is false if there is none. It is the one that the
// scheduler takes:
//
//   - by a hash, that of the slot; after it, those of the next slots;
//   - by counts, the first of the lightest, as with IPVS (see [plan.Scheduler.Lighter]);
//   - in turn, the one whose turn comes first: those of a backend are 1/weight apart, so of as many connections as all
//     weights together, each backend has as many as its weight. One that comes has none to catch up on;
//   - else any.
func (c chooser) next(tried []netip.AddrPort) (best netip.AddrPort, ok bool) {
	if c.anyWill() && len(tried) == 0 && len(c.backends) > 0 { // most connections
		return c.backends[c.draw()%uint64(len(c.backends))].Addr, true
	}
	class := classTried
	for _, b := range c.backends {
		class = max(class, c.class(b, tried))
	}
	if class == classTried {
		return best, false
	}
	if table := c.slots.table(); len(table) > 0 {
		at := c.scheduler.Slot(c.client, c.frontend, uint32(len(table)))
		for i := range table {
			if b := c.backends[table[(int(at)+i)%len(table)]]; c.class(b, tried) == class {
				return b.Addr, true
			}
		}
	}
	var least float64
	lightest, last := plan.Burden{}, turn{choices: c.name} // the turn that was taken last
	var apart float64
	for _, b := range c.backends {
		if c.class(b, tried) != class {
			continue
		}
		var better bool
		var score float64
		weight := float64(max(b.Weight, 1))
		burden := plan.Burden{Open: c.open[b.Addr], Weight: b.Weight}
		switch {
		case c.scheduler.Counts():
			better = c.scheduler.Lighter(burden, lightest)
		case c.scheduler.Turns():
			at := turn{c.name, b.Addr}
			had := false
			if score, had = c.turns[at]; !had || score < c.turns[last] { // it comes
				score = c.turns[last] + 0.5/weight
				c.turns[at] = score
			}
			better = score < least
		default:
			score = float64(c.draw())
			better = score < least
		}
		if !ok || better {
			best, ok, least, lightest, apart = b.Addr, true, score, burden, 1/weight
		}
	}
	if c.scheduler.Turns() && class != classRemembered {
		c.turns[turn{c.name, best}], c.turns[last] = least+apart, least
	}
	return best, ok
}
