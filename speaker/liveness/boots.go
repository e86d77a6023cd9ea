package liveness

import (
	"cmp"
	"maps"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// boots knows which nodes have booted since this one met them. The kernel of such a node knows none of
// the connections that it knew before.
type boots struct {
	last map[string]boot
	// again are the boots of these nodes; never changed in place.
	again map[string]uint64
}

// boot is the last one of a node, the process that told of it, by its start, and until when it is known
// once the node is not in the cluster any more; the zero time before.
type boot struct {
	id, born uint64
	until    time.Time
}

// met takes in which boot a process tells of, if it does. One process has one boot, whatever is said later.
func (b *boots) met(p plan.Process) {
	before := b.last[p.Node]
	if p.Born <= before.born {
		return
	}
	if b.last == nil {
		b.last = map[string]boot{}
	}
	b.last[p.Node] = boot{id: cmp.Or(p.Boot, before.id), born: p.Born}
	if before.id != 0 && p.Boot != 0 && before.id != p.Boot {
		again := map[string]uint64{}
		maps.Copy(again, b.again)
		again[p.Node] = p.Boot
		b.again = again
	}
}

// keep forgets nodes that have not been in the cluster for as long as connections are remembered: one
// that is shut down may be taken out and back in.
func (b *boots) keep(nodes map[string][]netip.Addr, now time.Time) {
	for node, last := range b.last {
		_, is := nodes[node]
		switch {
		case is:
			last.until = time.Time{}
		case last.until.IsZero():
			last.until = now.Add(lb.FlowMemory)
		case now.After(last.until):
			delete(b.last, node)
			if _, again := b.again[node]; again {
				b.again = maps.Clone(b.again)
				delete(b.again, node)
			}
			continue
		}
		b.last[node] = last
	}
}
