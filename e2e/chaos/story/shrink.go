package story

import "slices"

// Shrink returns the fewest of the events that still violate, by halving the story again and again (Zeller's ddmin).
// violates runs a part of the story; it is called at most tries times, and the least part found until then is
// returned. Of the whole it is known that it violates.
func Shrink(ids []int, tries int, violates func(part []int) bool) []int {
	try := func(part []int) bool {
		if tries == 0 || len(part) == 0 {
			return false
		}
		tries--
		return violates(part)
	}
	parts := 2
	for len(ids) > 1 && tries > 0 {
		chunks := split(ids, parts)
		smaller := false
		for i, chunk := range chunks {
			rest := slices.Concat(slices.Concat(chunks[:i]...), slices.Concat(chunks[i+1:]...))
			if try(chunk) {
				ids, parts, smaller = chunk, 2, true
				break
			}
			if len(chunks) > 2 && try(rest) { // of two, the rest is the other
				ids, parts, smaller = rest, max(parts-1, 2), true
				break
			}
		}
		if smaller {
			continue
		}
		if parts >= len(ids) {
			break
		}
		parts = min(2*parts, len(ids))
	}
	return ids
}

// split cuts a list into so many parts of about one length.
func split(ids []int, parts int) [][]int {
	parts = min(parts, len(ids))
	chunks := make([][]int, 0, parts)
	for i := range parts {
		chunks = append(chunks, ids[i*len(ids)/parts:(i+1)*len(ids)/parts])
	}
	return chunks
}
