package relay

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// chooser chooses among backends for one connection. It is pure but for what draw returns.
type chooser struct {
	backends []plan.RelayedBackend
	// draw returns a number above 0 and below 1 for a backend: at random, or always the same for one
	// client and backend.
	draw func(netip.AddrPort) float64
	// first is the backend that session affinity remembers; it is tried first if it is there.
	first netip.AddrPort
	// isSuspect reports whether a backend did not answer lately: it is tried last.
	isSuspect func(netip.AddrPort) bool
	// counting is the scheduler that chooses by open, the connections that each backend has here; "" if
	// draw decides.
	counting plan.Scheduler
	open     map[netip.AddrPort]uint32
}

// next returns the backend to try after those that were tried; ok is false if there is none.
//
// Where connections are counted, the first of the lightest wins, as with IPVS: see
// [plan.Scheduler.Lighter]. Else the greatest of draw^(1/weight) wins, so each backend wins as often as
// its weight says (Efraimidis and Spirakis, 2006), and with draws by the client's address that is
// rendezvous hashing.
func (c chooser) next(tried []netip.AddrPort) (best netip.AddrPort, ok bool) {
	class, greatest, lightest := -1, math.Inf(-1), plan.Burden{}
	for _, b := range c.backends {
		if slices.Contains(tried, b.Addr) {
			continue
		}
		now := 1
		switch {
		case c.isSuspect(b.Addr):
			now = 0
		case b.Addr == c.first:
			now = 2
		}
		var better bool
		var score float64
		burden := plan.Burden{Open: c.open[b.Addr], Weight: b.Weight}
		if c.counting != "" {
			better = c.counting.Lighter(burden, lightest)
		} else {
			score = math.Log(c.draw(b.Addr)) / float64(max(b.Weight, 1))
			better = score > greatest
		}
		if now > class || now == class && better {
			best, ok, class, greatest, lightest = b.Addr, true, now, score, burden
		}
	}
	return best, ok
}

// byClient draws by the client's address, the same on every node.
func byClient(client netip.Addr) func(netip.AddrPort) float64 {
	return func(backend netip.AddrPort) float64 {
		h := fnv.New64a()
		from, to := client.As16(), backend.Addr().As16()
		h.Write(from[:])
		h.Write(to[:])
		h.Write(binary.BigEndian.AppendUint16(nil, backend.Port()))
		return unit(mix(h.Sum64()))
	}
}

// unit returns a number above 0 and below 1.
func unit(n uint64) float64 { return (float64(n>>11) + 0.5) / (1 << 53) }

// mix is the finalizer of MurmurHash3, as FNV hardly moves the high bits when only the last bytes
// differ.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
