package nftables

import "slices"

// parts splits a change of elements into transactions of some limit elements. The rules deliver
// after each of them, as they did before or as they shall: first comes what is new, starting with
// what other elements lead to; then what changes its value, in one transaction each; and in the
// reverse order what goes.
func (c change) parts(limit int) []change {
	if len(c.add)+len(c.remove) <= limit && len(c.unknown) == 0 {
		if c.empty() {
			return nil
		}
		return []change{c}
	}
	replaced := make(map[element]int, len(c.remove)) // place in c.add, or -1
	for _, e := range c.remove {
		replaced[e.element] = -1
	}
	var additions []entry
	for i, e := range c.add {
		if _, ok := replaced[e.element]; ok {
			replaced[e.element] = i
		} else {
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
	for _, e := range slices.Backward(c.remove) {
		if len(part.remove)+len(part.add) >= limit {
			flush()
		}
		part.remove = append(part.remove, e)
		if at := replaced[e.element]; at >= 0 {
			part.add = append(part.add, c.add[at])
		}
	}
	flush()
	for batch := range slices.Chunk(c.unknown, limit) {
		parts = append(parts, change{unknown: batch})
	}
	return parts
}
