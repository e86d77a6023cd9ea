package nftables

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// sourceList is a list of networks whose clients may connect to some of a Service's frontends. It
// is a group, with a number of the same kind as those of backends.
type sourceList struct {
	group    uint32
	of       []*plan.Sources
	networks []netip.Prefix
}

// sourceLists returns the lists of a Service. It has one, and others only while VIPs linger.
func (r renderer) sourceLists(key lb.Key, s plan.Service, taken map[uint32]bool) []sourceList {
	var lists []sourceList
	for _, p := range s.Ports {
		for _, f := range p.Frontends {
			if f.Sources == nil || listOf(lists, f.Sources) != 0 {
				continue
			}
			networks := split(f.Sources.Networks)
			same := func(l sourceList) bool { return slices.Equal(l.networks, networks) }
			if i := slices.IndexFunc(lists, same); i >= 0 {
				lists[i].of = append(lists[i].of, f.Sources)
				continue
			}
			lists = append(lists, sourceList{r.number(key, s.UID, fmt.Sprint("sources ", len(lists)), taken),
				[]*plan.Sources{f.Sources}, networks})
		}
	}
	return lists
}

// lengthStep divides each prefix length that the rules look up. So there are 8 lookups of IPv4 at most
// and 32 of IPv6, whatever lengths the Services of all tenants have, for at most 8 times as many networks.
const lengthStep = 4

// split returns networks that contain the same addresses, each of a length that lengthStep divides: in
// order, each once.
func split(networks []netip.Prefix) []netip.Prefix {
	if !slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Bits()%lengthStep != 0 }) {
		return networks
	}
	var parts []netip.Prefix
	for _, network := range networks {
		length := (network.Bits() + lengthStep - 1) / lengthStep * lengthStep
		bytes := network.Addr().AsSlice()
		last, shift := &bytes[(length-1)/8], (8-length%8)%8
		for range 1 << (length - network.Bits()) {
			addr, _ := netip.AddrFromSlice(bytes)
			parts = append(parts, netip.PrefixFrom(addr, length))
			*last += 1 << shift
		}
	}
	slices.SortFunc(parts, netip.Prefix.Compare)
	return slices.Compact(parts)
}

// listOf returns the group of a list; 0 if there is none.
func listOf(lists []sourceList, sources *plan.Sources) uint32 {
	for _, l := range lists {
		if slices.Contains(l.of, sources) {
			return l.group
		}
	}
	return 0
}

// sources renders a list.
func (s *service) sources(l sourceList) part {
	w := writer{at: frontend{group: l.group}}
	if s.refusal == nil {
		for _, network := range l.networks {
			w.entries = append(w.entries, entry{element: element{
				set: setSourceRanges, frontend: w.at, number: uint32(network.Bits()), source: addressOf(network.Addr()),
			}})
		}
	}
	return part{frontend: w.at, entries: w.entries}
}

// needsOf returns the numbered sets for a memory and for lists of networks.
func needsOf(m memory, lists []sourceList) []need {
	all := map[need]bool{}
	if m != 0 {
		all[need{setRemember, m}] = true
	}
	for _, l := range lists {
		for _, network := range l.networks {
			all[need{setSourceRanges, uint32(network.Bits())}] = true
		}
	}
	return slices.Collect(maps.Keys(all))
}
