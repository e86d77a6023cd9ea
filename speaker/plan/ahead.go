package plan

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Before a Service gets an address, speakers find out whether a host uses it: the controller writes
// into the status of each pool which addresses are handed out next. On each LAN one node asks, and
// the others listen: each node waits the longer the less it is preferred for the address, and does
// not ask itself what it has heard another ask. So nobody needs to know who shares a LAN with whom.

// MaxAhead is how many addresses a node probes ahead at most, of all pools together.
const MaxAhead = 1024

// Scout says how a node finds out whether a host uses an address that no Service has yet.
type Scout struct {
	On []string // the interfaces on which it would announce the address; sorted
	// Rank is the node's place among the live ones that may ask, 0 for the first; negative for one that
	// only listens.
	Rank int
	// Seldom is set for an address that Services get only after many others.
	Seldom bool
}

// Equal reports whether two Scouts are equal.
func (s Scout) Equal(other Scout) bool {
	return s.Rank == other.Rank && s.Seldom == other.Seldom && slices.Equal(s.On, other.On)
}

// Ahead returns the addresses that this node probes ahead, and how: those that pools hand out next
// and that it would announce over ARP or NDP. most bounds how many; those to be probed seldom come
// last. known has what was returned before as far as it still holds, which saves to find it out anew.
func Ahead(f Facts, held func(netip.Addr) bool, most int, known map[netip.Addr]Scout) map[netip.Addr]Scout {
	if !f.scouts() {
		return map[netip.Addr]Scout{}
	}
	scouts := make(map[netip.Addr]Scout, len(known))
	names := slices.Sorted(maps.Keys(f.Pools))
	for _, seldom := range []bool{false, true} {
		for _, name := range names {
			pool := f.Pools[name]
			ads := f.advertising(pool)
			if pool.ProbeAhead == 0 || len(ads) == 0 {
				continue
			}
			var place4, place6 int
			for addr := range addressesOf(pool.Status.Next) {
				place := &place6
				if addr.Is4() {
					place = &place4
				}
				*place++
				if (*place > pool.ProbeAhead) != seldom {
					continue
				}
				if len(scouts) >= most {
					break
				}
				if _, listed := scouts[addr]; listed || held(addr) {
					continue
				}
				s, ok := known[addr]
				if !ok || s.Rank < 0 {
					// Most nodes announce none of a pool's addresses, if it is for another rack: they hash and word nothing.
					if s.On, _, _ = answering(f, ads, addr); len(s.On) == 0 {
						continue
					}
					s.Rank = rankOf(addr, f.Self, f.Live)
				}
				s.Seldom = seldom
				scouts[addr] = s
			}
		}
	}
	return scouts
}

// advertising returns the advertisements that select a pool and this node.
func (f Facts) advertising(pool lb.Pool) (ads []lb.L2Advertisement) {
	for _, ad := range f.Advertisements {
		if ad.Selects(pool) && selectsNode(ad, *f.Node) {
			ads = append(ads, ad)
		}
	}
	return ads
}

// ScoutOf returns how this node listens for an address that no pool hands out next any more, as a
// Service is about to have it; ok is false where it would not announce it.
func ScoutOf(f Facts, addr netip.Addr) (s Scout, ok bool) {
	if !f.scouts() {
		return s, false
	}
	var ads []lb.L2Advertisement
	pools := poolsOf(f.Pools, addr)
	for _, ad := range f.Advertisements {
		if slices.ContainsFunc(pools, ad.Selects) && selectsNode(ad, *f.Node) {
			ads = append(ads, ad)
		}
	}
	on, _ := announcedOn(f, ads, addr)
	return Scout{On: on, Rank: -1}, len(on) > 0
}

// scouts reports whether this node may announce addresses, as far as that is not about one of them,
// and hears the others.
func (f Facts) scouts() bool {
	return f.Joined && !f.Stopping && !f.Estranged && f.Node != nil && f.Node.Leaving == "" && !f.excluded() &&
		(!f.CordonDrains || !f.Node.Cordoned)
}

// rankOf returns how many of the nodes the address prefers to this one.
func rankOf(addr netip.Addr, self string, nodes []string) (rank int) {
	own := weight(addr, self)
	for _, node := range nodes {
		if w := weight(addr, node); w > own || w == own && node < self {
			rank++
		}
	}
	return rank
}

// addressesOf goes through ranges.
func addressesOf(ranges []lb.Range) func(yield func(netip.Addr) bool) {
	return func(yield func(netip.Addr) bool) {
		for _, r := range ranges {
			for addr := r.From; r.Contains(addr); addr = addr.Next() {
				if !yield(addr) {
					return
				}
			}
		}
	}
}
