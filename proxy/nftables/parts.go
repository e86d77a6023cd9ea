package nftables

import "slices"

// parts splits a change of elements into transactions of some limit elements. The rules deliver
// after each of them, as they did before or as they shall: first comes what is new, starting with
// what other elements lead to; then what changes its value, in one transaction each; and in the
// reverse order what goes. Ranges of sources that a frontend replaces are replaced at once, as the
// kernel refuses new ones that overlap with old ones.
func (c change) parts(limit int) []change {
	if len(c.add)+len(c.remove) <= limit && len(c.unknown) == 0 {
		if c.empty() {
			return nil
		}
		return []change{c}
	}
	replaced := make(map[element]int, len(c.remove)) // place in c.add, or -1
	ranges := map[frontend][]entry{}
	for _, e := range c.remove {
		replaced[e.element] = -1
		if e.set == setSourceRanges {
			ranges[e.frontend] = nil
		}
	}
	var additions []entry
	for i, e := range c.add {
		of, ranged := ranges[e.frontend]
		switch _, ok := replaced[e.element]; {
		case ranged && e.set == setSourceRanges:
			ranges[e.frontend] = append(of, e)
		case ok:
			replaced[e.element] = i
		default:
			additions = append(additions, e)
		}
	}
	var parts []change
	for batch := range slices.Chunk(additions, limit) {
		parts = append(parts, change{add: batch})
	}
	var part change
	flush := func() {
		if len(part.remove) > 0 {
			slices.SortFunc(part.add, inOrder)
			slices.SortFunc(part.remove, inOrder)
			parts = append(parts, part)
		}
		part = change{}
	}
	for i, e := range slices.Backward(c.remove) {
		within := e.set == setSourceRanges && i+1 < len(c.remove) && c.remove[i+1].set == e.set &&
			c.remove[i+1].frontend == e.frontend
		if !within && len(part.remove)+len(part.add) >= limit {
			flush()
		}
		part.remove = append(part.remove, e)
		if at := replaced[e.element]; at >= 0 {
			part.add = append(part.add, c.add[at])
		}
		if e.set == setSourceRanges && !within {
			part.add = append(part.add, ranges[e.frontend]...)
		}
	}
	flush()
	for batch := range slices.Chunk(c.unknown, limit) {
		parts = append(parts, change{unknown: batch})
	}
	return parts
}
