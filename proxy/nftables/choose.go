package nftables

import (
	"encoding/binary"
	"hash/fnv"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// The backends of a group are numbered, and a rule draws a number. As the rules are constant, each
// knows only draws from a fixed range: a class. A number is the group's class times 10,000 plus a
// place in it, so that a rule of another class finds nothing. Numbers of schedulers other than
// Random are told apart by what they add:
//
//	30002        the third of exactly three
//	80004        the fifth of up to eight: draws of 5 to 7 find nothing and are repeated
//	30_1021_0007 slot 7 of the 1021 that Maglev fills
const (
	classFactor   = 10_000
	methodNumbers = 1_000_000_000
	// maxBackends is how many backends of a frontend can be reached.
	maxBackends = 8192
	// exactClasses are the classes that have a draw of exactly their size.
	exactClasses = 4
)

// drawClasses returns the sizes from which backends are drawn at random, smallest first.
func drawClasses() []uint32 {
	var sizes []uint32
	for n := uint32(1); n <= exactClasses; n++ {
		sizes = append(sizes, n)
	}
	for n := uint32(2 * exactClasses); n <= maxBackends; n *= 2 {
		sizes = append(sizes, n)
	}
	return sizes
}

// drawClass returns the class for n backends, 1 to maxBackends: a draw finds a backend with
// certainty or with more than even chance.
func drawClass(n int) uint32 {
	size := uint32(2 * exactClasses)
	if n <= exactClasses {
		return uint32(n)
	}
	for uint32(n) > size {
		size *= 2
	}
	return size
}

// slotClasses are the sizes of slot tables. They are primes, as Maglev's permutations need, and so
// that frontends that take turns at one round-robin counter do not always meet the same slots.
var slotClasses = []uint32{127, 1021, 8191}

// slotClass returns the table size for n backends, 2 or more: large enough to keep their shares
// within some 5 % of each other, as long as there are at most 400.
func slotClass(n int) uint32 {
	for _, size := range slotClasses {
		if uint32(20*n) <= size {
			return size
		}
	}
	return slotClasses[len(slotClasses)-1]
}

// countedClass returns the table size for n backends whose shares follow their connections. As the next
// table makes good what this one gets wrong, one slot for each backend is enough.
func countedClass(n int) uint32 {
	for _, size := range slotClasses {
		if uint32(n) <= size {
			return size
		}
	}
	return slotClasses[len(slotClasses)-1]
}

// method returns the digit by which numbers of a scheduler are told apart.
func method(s plan.Scheduler) uint32 {
	switch s {
	case plan.RoundRobin, plan.WeightedRoundRobin, plan.LeastConnections, plan.WeightedLeastConnections,
		plan.ShortestExpectedDelay, plan.NeverQueue:
		return 1
	case plan.SourceHash:
		return 2
	case plan.Maglev:
		return 3
	case plan.DestinationHash:
		return 4
	}
	return 0
}

// numbers returns the number of place 0 in a class.
func numbers(s plan.Scheduler, class uint32) uint32 {
	return method(s)*methodNumbers + class*classFactor
}

// slots fills a table of the given prime size with indexes of backends. How, depends on nothing but
// the backends and their weights.
func slots(s plan.Scheduler, backends []target, weights []uint8, size uint32) []uint16 {
	turns := newTurns(len(backends), weights)
	if method(s) == method(plan.RoundRobin) {
		return turns.fill(size)
	}
	table := make([]uint16, size)
	const free = ^uint16(0)
	for i := range table {
		table[i] = free
	}
	// A backend whose turn it is takes the next free slot of a permutation of its own, which starts at
	// offset and goes on by skip.
	type walk struct{ next, skip uint32 }
	walks := make([]walk, len(backends))
	for i, b := range backends {
		h := b.hash()
		walks[i] = walk{next: uint32(h % uint64(size)), skip: uint32(h>>32%uint64(size-1)) + 1}
	}
	for range table {
		w := &walks[turns.next()]
		for table[w.next] != free {
			w.next = (w.next + w.skip) % size
		}
		table[w.next] = uint16(turns.last)
	}
	return table
}

// countedSlots fills a table of the given size for a scheduler that counts, by how many of the next
// connections each backend gets. It takes as many of these as are expected, and at least one for each
// backend: a table for the very next one alone would send the whole of a burst to one backend.
func countedSlots(s plan.Scheduler, burdens []plan.Burden, soon, size uint32) []uint16 {
	n := min(max(uint32(len(burdens)), soon), slotClasses[len(slotClasses)-1])
	return newTurns(len(burdens), s.Next(burdens, int(n))).fill(size)
}

// hash is the same on every node and in every release: it decides where connections go.
func (b target) hash() uint64 {
	h := fnv.New64a()
	h.Write(binary.BigEndian.AppendUint16(append([]byte(nil), b.addr[:]...), b.port))
	return mix(h.Sum64())
}

// mix is the finalizer of MurmurHash3, as FNV alone hardly moves the high bits when only the last
// bytes differ.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
