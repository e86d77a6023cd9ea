package nftables

import (
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// held is what the kernel is known to hold.
type held struct {
	// parts are the elements that belong to one frontend or group, in order.
	parts map[frontend][]entry
	// shared are the elements that Services may share.
	shared map[common]bool
}

// newHeld sorts what was read.
func newHeld(elements map[element]target) held {
	h := held{parts: map[frontend][]entry{}, shared: map[common]bool{}}
	for e, to := range elements {
		if e.isShared() {
			h.shared[common{e.addr, e.set}] = true
			continue
		}
		h.parts[e.frontend] = append(h.parts[e.frontend], entry{e, to})
	}
	for _, entries := range h.parts {
		slices.SortFunc(entries, inOrder)
	}
	return h
}

// has reports whether the kernel holds an element that leads where e does.
func (h held) has(e entry) bool {
	if e.isShared() {
		return h.shared[common{e.addr, e.set}]
	}
	entries := h.parts[e.frontend]
	i, found := slices.BinarySearchFunc(entries, e, inOrder)
	return found && entries[i].to == e.to
}

// hasElement reports whether the kernel holds an element, wherever it leads.
func (h held) hasElement(e element) bool {
	if e.isShared() {
		return h.shared[common{e.addr, e.set}]
	}
	_, found := slices.BinarySearchFunc(h.parts[e.frontend], entry{element: e}, inOrder)
	return found
}

// patch notes a part of a change. Lists that others may hold too stay as they are.
func (h held) patch(c change) {
	type edit struct {
		remove map[element]bool
		add    []entry
	}
	edits := map[frontend]*edit{}
	of := func(e entry) *edit {
		x := edits[e.frontend]
		if x == nil {
			x = &edit{remove: map[element]bool{}}
			edits[e.frontend] = x
		}
		return x
	}
	for _, e := range c.remove {
		if e.isShared() {
			delete(h.shared, common{e.addr, e.set})
		} else {
			of(e).remove[e.element] = true
		}
	}
	for _, e := range c.add {
		if e.isShared() {
			h.shared[common{e.addr, e.set}] = true
		} else {
			x := of(e)
			x.add = append(x.add, e)
		}
	}
	for f, x := range edits {
		slices.SortFunc(x.add, inOrder)
		entries := make([]entry, 0, len(h.parts[f])+len(x.add))
		for _, e := range h.parts[f] {
			for len(x.add) > 0 && inOrder(x.add[0], e) < 0 {
				entries, x.add = append(entries, x.add[0]), x.add[1:]
			}
			if !x.remove[e.element] {
				entries = append(entries, e)
			}
		}
		entries = append(entries, x.add...)
		if h.parts[f] = entries; len(entries) == 0 {
			delete(h.parts, f)
		}
	}
}

// differences counts the elements that are in one of two, or lead elsewhere.
func (h held) differences(other held) int {
	n := 0
	for f, entries := range h.parts {
		there := make(map[element]target, len(entries))
		for _, e := range other.parts[f] {
			there[e.element] = e.to
		}
		for _, e := range entries {
			if to, ok := there[e.element]; !ok || to != e.to {
				n++
			}
			delete(there, e.element)
		}
		n += len(there)
	}
	for f, entries := range other.parts {
		if len(h.parts[f]) == 0 {
			n += len(entries)
		}
	}
	for _, pair := range [][2]map[common]bool{{h.shared, other.shared}, {other.shared, h.shared}} {
		for e := range pair[0] {
			if !pair[1][e] {
				n++
			}
		}
	}
	return n
}

// leaveOut forgets elements that are gone.
func (h held) leaveOut(gone func(element) bool) {
	for f, entries := range h.parts {
		if f.group == 0 || !slices.ContainsFunc(entries, func(e entry) bool { return gone(e.element) }) {
			continue
		}
		entries = slices.DeleteFunc(slices.Clone(entries), func(e entry) bool { return gone(e.element) })
		if h.parts[f] = entries; len(entries) == 0 {
			delete(h.parts, f)
		}
	}
}

func inOrder(a, b entry) int { return a.compare(b.element) }

// isShared reports whether an element can be several Services'.
func (e element) isShared() bool {
	return e.set.ofAddress() || e.set == setHairpin || e.set == setNodes
}

// diff collects what makes the kernel hold what is wanted, for some Services or frontends.
type diff struct {
	from held
	// users counts the Services, of those that are held, that share an element.
	users map[common]int

	add, remove []entry
	// What is so once that has happened:
	parts    map[frontend][]entry
	shares   map[common]int // by how many there are more users
	services map[lb.Key]*service
}

func newDiff(from held, users map[common]int) *diff {
	return &diff{from: from, users: users, parts: map[frontend][]entry{}, shares: map[common]int{},
		services: map[lb.Key]*service{}}
}

// operations returns how many elements there are to add and remove so far.
func (d *diff) operations() int { return len(d.add) + len(d.remove) }

// service adds what changes when a Service becomes what it shall be.
func (d *diff) service(key lb.Key, old, now *service, c *claims) {
	if old != nil {
		for _, p := range old.parts {
			if c.owners[p.frontend] == nil {
				d.part(p.frontend, nil)
			}
		}
		d.share(old.shared, -1)
	}
	if now != nil {
		var places placing
		for i, p := range now.parts {
			if c.owns(key, p.frontend) {
				now.parts[i].entries = places.keep(p.entries, d.from.parts[p.frontend])
				d.part(p.frontend, now.parts[i].entries)
			}
		}
		d.share(now.shared, 1)
	}
	d.services[key] = now
}

// part adds what makes a frontend's elements as wanted.
func (d *diff) part(f frontend, want []entry) {
	if _, done := d.parts[f]; done {
		return // two Services have lost it at once
	}
	have := d.from.parts[f]
	d.parts[f] = want
	for len(have) > 0 || len(want) > 0 {
		order := 0
		switch {
		case len(have) == 0:
			order = 1
		case len(want) == 0:
			order = -1
		default:
			order = inOrder(have[0], want[0])
		}
		switch {
		case order < 0:
			d.remove, have = append(d.remove, have[0]), have[1:]
		case order > 0:
			d.add, want = append(d.add, want[0]), want[1:]
		default:
			if have[0].to != want[0].to {
				d.remove, d.add = append(d.remove, have[0]), append(d.add, want[0])
			}
			have, want = have[1:], want[1:]
		}
	}
}

func (d *diff) share(elements []common, by int) {
	for _, e := range elements {
		d.shares[e] += by
	}
}

// change returns the transaction.
func (d *diff) change() change {
	c := change{add: slices.Clone(d.add), remove: slices.Clone(d.remove)}
	for e, by := range d.shares {
		switch used := d.users[e]+by > 0; {
		case used && !d.from.shared[e]:
			c.add = append(c.add, entry{element: e.element()})
		case !used && d.from.shared[e]:
			c.remove = append(c.remove, entry{element: e.element()})
		}
	}
	slices.SortFunc(c.add, inOrder)
	slices.SortFunc(c.remove, inOrder)
	return c
}

// happened notes in h and users what is so once the transaction has been confirmed.
func (d *diff) happened(h held, users map[common]int) {
	for f, entries := range d.parts {
		if h.parts[f] = entries; len(entries) == 0 {
			delete(h.parts, f)
		}
	}
	for e, by := range d.shares {
		if users[e] += by; users[e] > 0 {
			h.shared[e] = true
			continue
		}
		delete(users, e)
		delete(h.shared, e)
	}
}
