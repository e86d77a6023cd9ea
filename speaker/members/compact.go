package members

import (
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
)

const (
	// maxPatterns is how many patterns there are before rows follow even one that does not suit well.
	maxPatterns = 8
	// maxCounts bounds the memory that the search for a pattern takes.
	maxCounts = 1 << 20
)

// compacted returns an update with a row in place of the entries up to its floor.
func (u update) compacted() update {
	if u.sheet != nil {
		return u
	}
	x := newIndex()
	var cells []uint32
	u.entries = slices.Clone(u.entries)
	u.entries = slices.DeleteFunc(u.entries, func(e entry) bool {
		if e.seq > u.floor || u.floor == 0 {
			return false
		}
		if !e.gone {
			x.position(e.vip)
			cells = append(cells, x.number(e.claim))
		}
		return true
	})
	if u.floor > 0 {
		u.sheet, u.row = &x.sheet, row{cells: cells}
	}
	return u
}

// encodeCompact returns the message that carries whole states in little space: what most nodes say
// alike is in it once. After the version come
//
//	varint count, strings: the reasons and lists of peers that occur
//	varint count, claims: as in an entry (see appendUpdate), flags first, with numbers of strings
//	varint count, runs of IPv4 addresses: varint distance from the end of the last run, varint length
//	varint count, runs of IPv6 addresses: 16 bytes, varint length
//	updates: string node, varint born, varint floor, row, varint count, entries
//
// An entry is a byte of flags, the address, the varint seq and the varint number of a claim. A row
// is the varint 0 for none; 1 and a new pattern: runs of a varint number of a claim and a varint
// length, until all addresses have one; or n+2 for the nth pattern of the message, a varint number
// for each of its kinds, the varint count of exceptions, and each as the varint distance from the
// last and a varint number.
func encodeCompact(updates ...update) []byte { return newCompactEncoder(updates).encode(updates) }

func (e *compactEncoder) encode(updates []update) []byte {
	b := e.appendDictionary([]byte{compactVersion})
	for _, u := range updates {
		b = appendString(b, u.node)
		b = binary.AppendUvarint(b, u.born)
		b = binary.AppendUvarint(b, u.floor)
		b = e.appendRow(b, u)
		b = binary.AppendUvarint(b, uint64(len(u.entries)))
		for _, entry := range u.entries {
			b = append(b, entry.flags())
			b = append(b, entry.vip.AsSlice()...)
			b = binary.AppendUvarint(b, entry.seq)
			b = binary.AppendUvarint(b, uint64(e.number(entry.claim)))
		}
	}
	return b
}

// compactEncoder numbers what occurs in a message.
type compactEncoder struct {
	*index
	known    map[*sheet]*translation
	patterns []*pattern
}

func newCompactEncoder(updates []update) *compactEncoder {
	e := &compactEncoder{index: newIndex(), known: map[*sheet]*translation{}}
	used := map[*sheet]*translation{} // 1 for what occurs
	for _, u := range updates {
		for _, entry := range u.entries {
			e.number(entry.claim)
		}
		if u.sheet == nil {
			continue
		}
		t := used[u.sheet]
		if t == nil {
			t = &translation{places: make([]uint32, len(u.sheet.vips)), numbers: make([]uint32, len(u.sheet.claims)+1)}
			used[u.sheet] = t
		}
		for i, number := range u.row.expand() {
			if number != 0 {
				t.places[i], t.numbers[number] = 1, 1
			}
		}
	}
	for s, t := range used {
		for i, is := range t.places {
			if is != 0 {
				e.vipAt[s.vips[i]] = 0
			}
		}
	}
	e.vips = slices.SortedFunc(maps.Keys(e.vipAt), netip.Addr.Compare)
	for i, vip := range e.vips {
		e.vipAt[vip] = i
	}
	for s, t := range used {
		for i, is := range t.places {
			if is != 0 {
				t.places[i] = uint32(e.vipAt[s.vips[i]])
			}
		}
		for n, is := range t.numbers {
			if is != 0 {
				t.numbers[n] = e.number(s.claim(uint32(n)))
			}
		}
		e.known[s] = t
	}
	return e
}

func (e *compactEncoder) appendDictionary(b []byte) []byte {
	var all update
	for _, claim := range e.claims {
		all.entries = append(all.entries, entry{claim: claim})
	}
	words := all.words()
	places := places(words)
	b = binary.AppendUvarint(b, uint64(len(words)))
	for _, w := range words {
		b = appendString(b, w)
	}
	b = binary.AppendUvarint(b, uint64(len(e.claims)))
	for _, entry := range all.entries {
		b = appendClaim(append(b, entry.flags()), entry.claim, places)
	}
	var four, six []byte
	fours, sixes, last := 0, 0, uint32(0)
	for _, run := range runs(e.vips) {
		if run.from.Is4() {
			from := run.from.As4()
			first := binary.BigEndian.Uint32(from[:])
			four = binary.AppendUvarint(four, uint64(first-last))
			four = binary.AppendUvarint(four, uint64(run.length))
			last = first + uint32(run.length)
			fours++
		} else {
			from := run.from.As16()
			six = binary.AppendUvarint(append(six, from[:]...), uint64(run.length))
			sixes++
		}
	}
	b = append(binary.AppendUvarint(b, uint64(fours)), four...)
	return append(binary.AppendUvarint(b, uint64(sixes)), six...)
}

// run is some addresses, each the next of the one before.
type run struct {
	from   netip.Addr
	length int
}

func runs(vips []netip.Addr) []run {
	var all []run
	for i, vip := range vips {
		if i > 0 && vips[i-1].Next() == vip {
			all[len(all)-1].length++
		} else {
			all = append(all, run{vip, 1})
		}
	}
	return all
}

func (e *compactEncoder) appendRow(b []byte, u update) []byte {
	if u.sheet == nil {
		return append(b, 0)
	}
	cells := make([]uint32, len(e.vips))
	t := e.known[u.sheet]
	for i, number := range u.row.expand() {
		if number != 0 {
			cells[t.places[i]] = t.numbers[number]
		}
	}
	number, best, ok := e.choose(cells)
	if !ok {
		e.patterns = append(e.patterns, newPattern(cells))
		b = append(b, 1)
		for i := 0; i < len(cells); {
			n := i + 1
			for n < len(cells) && cells[n] == cells[i] {
				n++
			}
			b = binary.AppendUvarint(b, uint64(cells[i]))
			b = binary.AppendUvarint(b, uint64(n-i))
			i = n
		}
		return b
	}
	b = binary.AppendUvarint(b, uint64(number+2))
	for _, n := range best.table {
		b = binary.AppendUvarint(b, uint64(n))
	}
	b = binary.AppendUvarint(b, uint64(len(best.except)))
	last := 0
	for _, c := range best.except {
		b = binary.AppendUvarint(b, uint64(c.at-last))
		b = binary.AppendUvarint(b, uint64(c.number))
		last = c.at
	}
	return b
}

// choose returns the pattern that cells follow best, and whether they are to follow one: they do if
// there is a good one, or if there are enough already.
func (e *compactEncoder) choose(cells []uint32) (number int, best row, ok bool) {
	good, tolerable := len(cells)/64, len(cells)/8
	for i, p := range e.patterns {
		if len(p.kinds)*(len(e.claims)+1) > maxCounts {
			continue
		}
		if r := p.follow(cells, len(e.claims)); !ok || len(r.except) < len(best.except) {
			number, best, ok = i, r, true
		}
		if len(best.except) <= good {
			return number, best, true
		}
	}
	return number, best, ok && (len(best.except) <= tolerable || len(e.patterns) >= maxPatterns)
}
