package nftables

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
)

// drawnFrom returns the elements of a group that draws from backends with these numbers, at a port.
func drawnFrom(port uint16, numbers ...uint32) (entries []entry) {
	for i, n := range numbers {
		e := entry{element: element{set: mixedOf(tcp), number: uint32(i)}, to: target{port: port}}
		binary.BigEndian.PutUint32(e.to.addr[:], n+1)
		entries = append(entries, e)
	}
	return append(entries, entry{element: element{set: setRemember}})
}

// stays counts the elements that lead where they did.
func stays(have, now []entry) (n int) {
	for _, e := range now {
		if slices.Contains(have, e) {
			n++
		}
	}
	return n
}

// Backends keep their places, whatever comes and goes, and each of them has one. Ports that have the same
// backends do no worse with the places that were found for the one before.
func TestPlaces(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	some := func() []uint32 {
		var numbers []uint32
		for n := range uint32(12) {
			if r.IntN(3) > 0 {
				numbers = append(numbers, n)
			}
		}
		return append(numbers, 99)
	}
	for range 2000 {
		var p placing
		var first int
		numbers, before := some(), some()
		r.Shuffle(len(before), func(i, j int) { before[i], before[j] = before[j], before[i] })
		for port := range uint16(3) {
			if port == 2 { // of other backends
				numbers, before = some(), some()
			}
			want, have := drawnFrom(port, numbers...), drawnFrom(port, before...)
			given := slices.Clone(want)
			kept := p.keep(want, have)
			if !slices.Equal(want, given) {
				t.Fatalf("what was wanted has changed: %v", want)
			}
			var targets, all []target
			for i, e := range kept {
				if e.element != want[i].element {
					t.Fatalf("element %d is another: %v", i, e)
				}
				targets, all = append(targets, e.to), append(all, want[i].to)
			}
			for _, list := range [][]target{targets, all} {
				slices.SortFunc(list, func(a, b target) int { return slices.Compare(a.addr[:], b.addr[:]) })
			}
			if !slices.Equal(targets, all) {
				t.Fatalf("from %v to %v: %v", have, want, kept)
			}
			could := 1 // of setRemember
			for _, e := range have[:min(len(have), len(want))-1] {
				if slices.ContainsFunc(want, func(w entry) bool { return w.to == e.to }) {
					could++
				}
			}
			if n := stays(have, kept); n < could || port == 1 && n != first {
				t.Fatalf("%d stay, %d could, %d did at the first port: from %v to %v: %v", n, could, first, have, want, kept)
			} else if port == 0 {
				first = n
			}
		}
	}
	var p placing
	twice := drawnFrom(1, 7, 7, 8)
	if kept := p.keep(twice, drawnFrom(1, 9, 8, 7)); len(kept) != len(twice) || stays(twice, kept) == 0 {
		t.Errorf("a backend that is there twice: %v", kept)
	}
}

// Contract clause 11: what one endpoint costs at each further port is one list, and nothing if the port's
// backends are where they are wanted.
func TestContract11PlacesAreFoundOnce(t *testing.T) {
	var before []uint32
	for n := range uint32(500) {
		before = append(before, n)
	}
	after := append(slices.Clone(before[1:]), 501)
	for name, test := range map[string]struct {
		now  []uint32
		most float64
	}{"as it was": {before, 0}, "one is replaced": {after, 1}} {
		var p placing
		p.keep(drawnFrom(1, test.now...), drawnFrom(1, before...))
		want, have := drawnFrom(2, test.now...), drawnFrom(2, before...)
		if n := testing.AllocsPerRun(10, func() { p.keep(want, have) }); n > test.most {
			t.Errorf("%s: %v allocations", name, n)
		}
		if n := stays(have, p.keep(want, have)); n < 500 {
			t.Errorf("%s: %d stay", name, n)
		}
	}
}

// BenchmarkPlaces is one endpoint of 500 that is replaced, at 200 ports with numbers of their own.
func BenchmarkPlaces(b *testing.B) {
	var before []uint32
	for n := range uint32(500) {
		before = append(before, n)
	}
	after := append(slices.Clone(before[1:]), 501)
	var have, want [][]entry
	for port := range uint16(200) {
		have, want = append(have, drawnFrom(port, before...)), append(want, drawnFrom(port, after...))
	}
	b.ReportAllocs()
	for b.Loop() {
		var p placing
		for i := range want {
			p.keep(want[i], have[i])
		}
	}
}
