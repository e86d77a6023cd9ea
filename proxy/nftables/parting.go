package nftables

import (
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxPlanned is how many parts of a change are kept until they are written. What follows them is
// computed anew, so that large Services that change at once do not fill the memory.
const maxPlanned = 32

// parting is the change of a Service that is written in parts. It is computed once for many parts:
// computed for each of them, a change would cost the square of its size.
type parting struct {
	want *service
	// shares says by how many there are more users of shared elements after the change.
	shares map[common]int
	parts  []change
}

func newParting(want *service, shares map[common]int, parts []change) *parting {
	p := &parting{want: want, shares: maps.Clone(shares)}
	for _, part := range parts[:min(len(parts), maxPlanned)] {
		part.add, part.remove = slices.Clone(part.add), slices.Clone(part.remove) // they hold the whole change
		p.parts = append(p.parts, part)
	}
	return p
}

// next returns the next part that leaves something to do. It is empty when there is none, or when
// the Service wants something else by now.
func (t *table) next(key lb.Key) change {
	p := t.parted[key]
	if p == nil || p.want != t.want[key] {
		return change{}
	}
	for len(p.parts) > 0 {
		part := t.left(key, p, p.parts[0])
		p.parts = p.parts[1:]
		if !part.empty() {
			return part
		}
	}
	return change{}
}

// left returns what is still right of a part after other Services have been written: the kernel may
// have some of it by now, and frontends and shared elements may have become others'.
func (t *table) left(key lb.Key, p *parting, part change) change {
	used := func(e common) bool { return t.users[e]+p.shares[e] > 0 }
	removed := make(map[element]bool, len(part.remove))
	var left change
	for _, e := range part.remove {
		owner, has := t.owners[e.frontend], t.have.has(e)
		if shared := (common{e.addr, e.set}); e.isShared() {
			has, owner = has && !used(shared), nil
		}
		if has && (owner == nil || owner.key == key) {
			left.remove, removed[e.element] = append(left.remove, e), true
		}
	}
	for _, e := range part.add {
		wanted := t.owns(key, e.frontend)
		if e.isShared() {
			wanted = used(common{e.addr, e.set})
		}
		if wanted && (removed[e.element] || !t.have.hasElement(e.element)) {
			left.add = append(left.add, e)
		}
	}
	return left
}
