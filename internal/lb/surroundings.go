package lb

import (
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
	What string // such as "the gateway"
}

// FormatUnassignable returns one line for each, sorted by address: the address, a space and what it
// is.
func FormatUnassignable(all []Unassignable) string {
	sorted := slices.SortedFunc(slices.Values(all), func(a, b Unassignable) int { return a.Addr.Compare(b.Addr) })
	var text strings.Builder
	for _, n := range sorted {
		text.WriteString(n.Addr.String() + " " + n.What + "\n")
	}
	return text.String()
}

// ParseUnassignable parses the text of FormatUnassignable. It skips lines without an address.
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
