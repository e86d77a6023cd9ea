package lb

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// SurroundingsConfigMap is the ConfigMap in which speakers list, with an entry for each node, the
// addresses of the node's networks that no Service can have.
const SurroundingsConfigMap = "landfall-surroundings"

// Unassignable is an address of a node's network that no Service can have.
type Unassignable struct {
	Addr netip.Addr
	What string // one of the words below
}

// What an address is that no Service can have.
const (
	TheGateway   = "the gateway"
	TheNetwork   = "the network address"
	TheBroadcast = "the broadcast address"
	otherAddress = "an address of the network"
)

// HostlessOf returns the network and the broadcast address of an IPv4 subnet; none of one where every address is a
// host's (RFC 3021).
func HostlessOf(subnet netip.Prefix) []Unassignable {
	if !subnet.Addr().Is4() || subnet.Bits() >= 31 {
		return nil
	}
	last := subnet.Addr().As4()
	for bit := subnet.Bits(); bit < 32; bit++ {
		last[bit/8] |= 0x80 >> (bit % 8)
	}
	return []Unassignable{{subnet.Masked().Addr(), TheNetwork}, {netip.AddrFrom4(last), TheBroadcast}}
}

// maxUnassignable is how many addresses count of one node: one that was taken over shall not keep whole pools
// from being assigned.
const maxUnassignable = 32

// FormatUnassignable returns one line for each, sorted by address: the address, a space and what it is. Of more than 32
// it takes gateways before others, and lower addresses before higher ones, in whatever order they come.
func FormatUnassignable(all []Unassignable) string {
	rank := func(u Unassignable) int {
		if u.What == TheGateway {
			return 0
		}
		return 1
	}
	sorted := slices.SortedFunc(slices.Values(all), func(a, b Unassignable) int {
		return cmp.Or(rank(a)-rank(b), a.Addr.Compare(b.Addr))
	})
	sorted = sorted[:min(len(sorted), maxUnassignable)]
	slices.SortFunc(sorted, func(a, b Unassignable) int { return a.Addr.Compare(b.Addr) })
	var text strings.Builder
	for _, n := range sorted {
		text.WriteString(n.Addr.String() + " " + n.What + "\n")
	}
	return text.String()
}

// ParseUnassignable parses the text of FormatUnassignable, which a node has written. It skips lines without an address,
// keeps no text of the node's own, which conditions would repeat, and ends after the first 32 addresses.
func ParseUnassignable(text string) []Unassignable {
	var all []Unassignable
	for line := range strings.Lines(text) {
		first, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		addr, err := ParseAddr(first)
		if err != nil {
			continue
		}
		if !slices.Contains([]string{TheGateway, TheNetwork, TheBroadcast}, what) {
			what = otherAddress
		}
		if all = append(all, Unassignable{Addr: addr, What: what}); len(all) == maxUnassignable {
			break
		}
	}
	return all
}
