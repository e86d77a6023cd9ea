package plan

import (
	"cmp"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ProbeBudget shares out which Services' endpoints a node asks. What is free goes to those that ask for it
// first. Where that is not enough, namespaces with more give Services up, as long as they keep as much as
// the one that asks has then. Its zero value is ready for use.
type ProbeBudget struct {
	asked, refused map[lb.Key]int // endpoints
	spaces         map[string]int // those that are asked of each namespace
	total          int
	freed          bool
	revoked        []lb.Key
}

// Ask takes that a Service wants so many endpoints asked in place of those before, and reports whether it
// gets that. If not it has none.
func (b *ProbeBudget) Ask(key lb.Key, n int) bool {
	if b.asked == nil {
		b.asked, b.refused, b.spaces = map[lb.Key]int{}, map[lb.Key]int{}, map[string]int{}
	}
	before := b.asked[key]
	b.give(key, 0)
	delete(b.refused, key)
	if b.total+n > MaxProbedOfNode {
		b.makeRoom(key.Namespace, n)
	}
	fits := b.total+n <= MaxProbedOfNode
	if fits {
		b.give(key, n)
	} else {
		b.refused[key] = n
	}
	b.freed = b.freed || b.asked[key] < before
	return fits
}

// give has so many endpoints of a Service asked.
func (b *ProbeBudget) give(key lb.Key, n int) {
	more := n - b.asked[key]
	b.total += more
	if b.asked[key] = n; n == 0 {
		delete(b.asked, key)
	}
	if b.spaces[key.Namespace] += more; b.spaces[key.Namespace] == 0 {
		delete(b.spaces, key.Namespace)
	}
}

// makeRoom takes what a Service of a namespace needs from namespaces that have more, those with the most
// and their largest Services first; nothing if that is not enough.
func (b *ProbeBudget) makeRoom(space string, n int) {
	least := b.spaces[space] + n // what others keep
	more := 0
	for other, has := range b.spaces {
		if other != space && has > least {
			more += has - least
		}
	}
	if room := MaxProbedOfNode - b.total; room+more < n {
		return
	}
	giving := slices.SortedFunc(maps.Keys(b.asked), func(x, y lb.Key) int {
		return cmp.Or(cmp.Compare(b.spaces[y.Namespace], b.spaces[x.Namespace]), cmp.Compare(b.asked[y], b.asked[x]),
			x.Compare(y))
	})
	left := maps.Clone(b.spaces)
	room := MaxProbedOfNode - b.total
	var revoked []lb.Key
	for _, other := range giving {
		if room < n && other.Namespace != space && left[other.Namespace]-b.asked[other] >= least {
			left[other.Namespace] -= b.asked[other]
			room += b.asked[other]
			revoked = append(revoked, other)
		}
	}
	if room < n {
		return
	}
	for _, other := range revoked {
		b.refused[other] = b.asked[other]
		b.give(other, 0)
	}
	b.revoked = append(b.revoked, revoked...)
	b.freed = true // it may be more than what is needed
}

// Changed returns the Services that have to Ask again: those that lost what they had, and those that were
// refused and for which endpoints were given up since its last call.
func (b *ProbeBudget) Changed() []lb.Key {
	changed := b.revoked
	b.revoked = nil
	if !b.freed {
		return changed
	}
	b.freed = false
	room := MaxProbedOfNode - b.total
	for _, key := range slices.SortedFunc(maps.Keys(b.refused), lb.Key.Compare) {
		if n := b.refused[key]; n <= room && !slices.Contains(changed, key) {
			room -= n
			changed = append(changed, key)
		}
	}
	return changed
}
