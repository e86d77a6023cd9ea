package nftables

import "github.com/landfall-lb/landfall/proxy/plan"

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

// slots fills a table of one of plan.SlotSizes with indexes of backends.
func slots(s plan.Scheduler, backends []target, weights []uint8, size uint32) []uint16 {
	hashes := make([]uint64, len(backends))
	for i, b := range backends {
		hashes[i] = plan.HashBackend(b.addr, b.port)
	}
	return plan.Slots(s, hashes, weights, size)
}

// countedSlots fills a table of the given size for a scheduler that counts, by how many of the next
// connections each backend gets. It takes as many of these as are expected, and at least one for each
// backend: a table for the very next one alone would send the whole of a burst to one backend.
func countedSlots(s plan.Scheduler, burdens []plan.Burden, soon, size uint32) []uint16 {
	n := min(max(uint32(len(burdens)), soon), plan.SlotSizes[len(plan.SlotSizes)-1])
	return plan.NewTurns(len(burdens), s.Next(burdens, int(n))).Fill(size)
}
