package members

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// Limits of what a compact message may describe, as few bytes can describe much: how many VIPs of a
// node, how many cells in all, and how many of them for each byte of the message if it has more
// patterns than a speaker makes without need. A node that has just started knows of no VIPs, so
// that what it knows cannot be a limit. All nodes together may name maxIndexed: at the limit they
// may not agree for a moment which VIPs are within. Of what takes more memory than bytes of the message
// there is no more than states need: updates, claims, and the words of each update and of all claims.
const (
	maxVIPs      = plan.MaxVIPs
	maxUpdates   = 1 << 16
	maxStrings   = 3 * maxIndexed
	maxCells     = 1 << 24
	cellsOfAByte = 64
)

// compact reads the message that encodeCompact writes, after its version.
func (r *reader) compact() []update {
	words := r.words()
	s := &sheet{claims: make([]plan.Claim, 0, r.few(2, maxIndexed))}
	for range cap(s.claims) {
		flags := r.flags()
		s.claims = append(s.claims, r.claim(flags, words))
	}
	s.vips = r.vips()
	var updates []update
	var patterns []*pattern
	for len(r.rest) > 0 && r.err == nil {
		if !fits(len(updates)+1, len(s.vips)) {
			r.fail(fmt.Errorf("more than %d nodes with %d addresses", len(updates), len(s.vips)))
			break
		}
		u := update{node: r.string(), born: r.varint(), floor: r.varint()}
		u.row, patterns = r.row(s, patterns)
		if u.row.cells != nil || u.row.pattern != nil {
			u.sheet = s
		}
		u.entries = make([]entry, 0, r.entries())
		for range cap(u.entries) {
			u.entries = append(u.entries, r.compactEntry(s))
		}
		if r.err == nil && u.node == "" {
			r.err = errors.New("update without a node")
		}
		updates = append(updates, u)
	}
	return updates
}

// fits reports whether a compact message may describe so many nodes and VIPs.
func fits(nodes, vips int) bool { return nodes*vips <= maxCells && nodes <= maxUpdates }

// suits reports whether a compact message of this size may have so many patterns, for so many VIPs.
func suits(patterns, vips, size int) bool { return (patterns-maxPatterns)*vips <= size*cellsOfAByte }

func (r *reader) compactEntry(s *sheet) entry {
	flags := r.flags()
	e := entry{vip: r.vip(flags), seq: r.varint(), gone: flags&flagGone != 0}
	if n := r.number(s); n != 0 {
		e.claim = s.claim(n)
	}
	return e
}

// number reads the number of a claim.
func (r *reader) number(s *sheet) uint32 {
	n := r.varint()
	if n > uint64(len(s.claims)) {
		r.fail(fmt.Errorf("claim %d of %d", n, len(s.claims)))
		return 0
	}
	return uint32(n)
}

func (r *reader) vips() []netip.Addr {
	var vips []netip.Addr
	add := func(from netip.Addr, length uint64) {
		if length == 0 || uint64(len(vips))+length > maxIndexed {
			r.fail(fmt.Errorf("a run of %d addresses after %d, %d may be named", length, len(vips), maxIndexed))
			return
		}
		for range length {
			if !from.IsValid() {
				r.fail(errors.New("a run past the last address"))
				return
			}
			vips = append(vips, from)
			from = from.Next()
		}
	}
	last := uint64(0)
	for range r.count(2) {
		distance, length := r.varint(), r.varint()
		if r.err == nil && (distance > math.MaxUint32 || last+distance > math.MaxUint32) {
			r.fail(fmt.Errorf("an address %d after %d", distance, last))
		}
		if r.err != nil {
			return nil
		}
		last += distance
		var from [4]byte
		binary.BigEndian.PutUint32(from[:], uint32(last))
		add(netip.AddrFrom4(from), length)
		last += length
	}
	for range r.count(17) {
		from, _ := netip.AddrFromSlice(r.bytes(16))
		length := r.varint()
		if r.err != nil {
			return nil
		}
		add(from, length)
	}
	if r.err != nil {
		return nil
	}
	return vips
}

func (r *reader) row(s *sheet, patterns []*pattern) (row, []*pattern) {
	form := r.varint()
	switch {
	case form == 0:
		return row{}, patterns
	case form == 1:
		if !suits(len(patterns)+1, len(s.vips), r.size) {
			r.fail(fmt.Errorf("%d patterns for %d addresses", len(patterns)+1, len(s.vips)))
			return row{}, patterns
		}
		cells := make([]uint32, 0, len(s.vips))
		for len(cells) < len(s.vips) && r.err == nil {
			number, length := r.number(s), r.varint()
			if length == 0 || length > uint64(len(s.vips)-len(cells)) {
				r.fail(fmt.Errorf("a run of %d cells after %d of %d", length, len(cells), len(s.vips)))
				break
			}
			for range length {
				cells = append(cells, number)
			}
		}
		if r.err != nil {
			return row{}, patterns
		}
		return row{cells: cells}, append(patterns, newPattern(cells))
	case form-2 >= uint64(len(patterns)):
		r.fail(fmt.Errorf("pattern %d of %d", form-2, len(patterns)))
		return row{}, patterns
	}
	w := row{pattern: patterns[form-2]}
	w.table = make([]uint32, len(w.pattern.kinds))
	for i := range w.table {
		w.table[i] = r.number(s)
	}
	last := uint64(0)
	for range r.count(2) {
		distance, number := r.varint(), r.number(s)
		if distance >= uint64(len(s.vips)) || last+distance >= uint64(len(s.vips)) {
			r.fail(fmt.Errorf("an exception %d after the one at %d of %d", distance, last, len(s.vips)))
			return row{}, patterns
		}
		last += distance
		w.except = append(w.except, cell{int(last), number})
	}
	return w, patterns
}
