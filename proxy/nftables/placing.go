package nftables

import "slices"

// placing is where the backends of a group are that are drawn at random. The ports of a Service whose
// endpoints listen at different numbers have a group each, mostly with the same backends in the same
// places: these are found out for the first of them, and tried for the next.
type placing struct {
	// of says for each place which of the wanted elements has its target there.
	of []int
	// moved are the wanted elements whose targets were nowhere, or beyond the last place.
	moved []int
}

// maxMoved is how many there may be for the places to be tried for another group: each is compared with
// each.
const maxMoved = 8

// keep returns the elements of a group with the backends that are drawn at random in the places that they
// have in the kernel, as far as there are such: then a change of one backend is one of few elements, and
// not of all whose address comes after it. Slots have places of their own.
func (p *placing) keep(want, have []entry) []entry {
	n := 0
	for n < len(want) && want[n].set <= setMixedSCTP {
		n++
	}
	if n == 0 || want[0].number >= methodNumbers {
		return want
	}
	have = drawn(have, want[0], n)
	if !p.fit(want[:n], have) {
		p.find(want[:n], have)
	}
	var kept []entry
	for place, i := range p.of {
		if place == i {
			continue
		}
		if kept == nil {
			kept = slices.Clone(want)
		}
		kept[place].to = want[i].to
	}
	if kept == nil {
		return want
	}
	return kept
}

// drawn returns those of the elements that are in the same set as the first wanted one, and in one of n
// places from there on.
func drawn(have []entry, first entry, n int) []entry {
	in := func(e entry) bool { return e.set == first.set && e.number-first.number < uint32(n) }
	from := max(0, slices.IndexFunc(have, in))
	to := from
	for to < len(have) && in(have[to]) {
		to++
	}
	return have[from:to]
}

// fit reports whether the places that were found last do as well for another group: as much as possible
// stays where it is.
func (p *placing) fit(want, have []entry) bool {
	if len(p.of) != len(want) || len(p.moved) > maxMoved {
		return false
	}
	for _, e := range have {
		i := p.of[e.number-want[0].number]
		if want[i].to == e.to {
			continue
		}
		elsewhere := func(i int) bool { return want[i].to == e.to }
		if !slices.Contains(p.moved, i) || slices.ContainsFunc(p.moved, elsewhere) {
			return false
		}
	}
	return true
}

// find finds places in which as much as possible stays where it is.
func (p *placing) find(want, have []entry) {
	const free = -1
	left, placed := make(map[target]int, len(want)), make([]bool, len(want))
	p.of, p.moved = make([]int, len(want)), p.moved[:0]
	for i, e := range want {
		left[e.to], p.of[i] = i, free
	}
	for _, e := range have {
		if i, ok := left[e.to]; ok {
			p.of[e.number-want[0].number], placed[i] = i, true
			delete(left, e.to)
		}
	}
	place := 0
	for i := range want {
		if placed[i] {
			continue
		}
		for p.of[place] != free {
			place++
		}
		p.of[place] = i
		p.moved = append(p.moved, i)
	}
}
