package liveness

import (
	"maps"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// boots knows which nodes have booted since this one met them. The kernel of such a node knows none of
// the connections that it knew before.
type boots struct {
	last map[string]boot
	// again are the boots of these nodes; never changed in place.
	again map[string]uint64
}

// boot is the last one of a node, and until when it is known once the node is not in the cluster any
// more; the zero time before.
type boot struct {
	id    uint64
	until time.Time
}

func (b *boots) met(node string, id uint64) {
	if id == 0 {
		return
	}
	if b.last == nil {
		b.last = map[string]boot{}
	}
	before := b.last[node].id
	b.last[node] = boot{id: id}
	if before != 0 && before != id {
		again := map[string]uint64{}
		maps.Copy(again, b.again)
		again[node] = id
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
