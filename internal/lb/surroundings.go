package lb

import (
	"net/netip"
	"slices"
	"strings"
)

// SurroundingsConfigMap is where speakers tell, in an entry for each node, which addresses of the
// node's networks no Service can have.
const SurroundingsConfigMap = "landfall-surroundings"

// Unassignable is an address of a node's network that no Service can have.
type Unassignable struct {
	Addr netip.Addr
	What string // such as "the gateway"
}

// FormatUnassignable writes a line for each, by address: the address, a space and what it is.
func FormatUnassignable(all []Unassignable) string {
	sorted := slices.SortedFunc(slices.Values(all), func(a, b Unassignable) int { return a.Addr.Compare(b.Addr) })
	var text strings.Builder
	for _, n := range sorted {
		text.WriteString(n.Addr.String() + " " + n.What + "\n")
	}
	return text.String()
}

// ParseUnassignable reads what FormatUnassignable writes. Lines that name no address are left out.
func ParseUnassignable(text string) []Unassignable {
	var all []Unassignable
	for line := range strings.Lines(text) {
		first, what, _ := strings.Cut(strings.TrimSpace(line), " ")
		if addr, err := ParseAddr(first); err == nil {
			all = append(all, Unassignable{Addr: addr, What: what})
		}
	}
	return all
}
