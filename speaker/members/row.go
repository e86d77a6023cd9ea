package members

import (
	"maps"
	"slices"
)

// row is what a node says of the VIPs of a sheet, in their order: numbers of claims, 0 for nothing.
// Its cells are written out, or follow a pattern.
type row struct {
	cells   []uint32
	pattern *pattern
	table   []uint32 // the claim for each kind of the pattern
	except  []cell   // where the row differs from that
}

type cell struct {
	at     int
	number uint32
}

// pattern is a row that others resemble: where it has the same claim on two VIPs, they mostly have
// one claim too, though maybe another one. Nodes with other weights or other BGP peers so share a
// pattern.
type pattern struct {
	cells []uint32
	kinds []uint32 // the numbers that occur, sorted
	kind  []uint32 // of each cell, as an index of kinds
}

func newPattern(cells []uint32) *pattern {
	p := &pattern{cells: cells, kind: make([]uint32, len(cells))}
	index := map[uint32]uint32{}
	for _, number := range cells {
		index[number] = 0
	}
	p.kinds = slices.Sorted(maps.Keys(index))
	for i, number := range p.kinds {
		index[number] = uint32(i)
	}
	for i, number := range cells {
		p.kind[i] = index[number]
	}
	return p
}

// follow returns cells as a row that follows the pattern; claims is the largest number.
func (p *pattern) follow(cells []uint32, claims int) row {
	r := row{pattern: p, table: make([]uint32, len(p.kinds))}
	width := claims + 1
	counts := make([]int, len(p.kinds)*width)
	for i, number := range cells {
		counts[int(p.kind[i])*width+int(number)]++
	}
	for kind := range p.kinds {
		for number, most := 0, -1; number < width; number++ {
			if n := counts[kind*width+number]; n > most {
				most, r.table[kind] = n, uint32(number)
			}
		}
	}
	for i, number := range cells {
		if number != r.table[p.kind[i]] {
			r.except = append(r.except, cell{i, number})
		}
	}
	return r
}

// expand returns all cells.
func (r row) expand() []uint32 {
	if r.pattern == nil {
		return r.cells
	}
	cells := make([]uint32, len(r.pattern.kind))
	for i, kind := range r.pattern.kind {
		cells[i] = r.table[kind]
	}
	for _, c := range r.except {
		cells[c.at] = c.number
	}
	return cells
}
