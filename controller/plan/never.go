package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// never is what no pool hands out.
type never struct {
	ranges []neverRange
	// theirs has the addresses that nodes and gateways have: a Service that holds one is in their way.
	// named has what the configuration keeps from newcomers only.
	theirs map[netip.Addr]string
	named  []neverRange
}

type neverRange struct {
	lb.Range
	what string
}

// newNever collects the addresses of nodes, what their speakers tell of their networks, and what
// the configuration names. A node would lose its own address to a Service, and all of a network its
// gateway.
func newNever(nodes map[string]lb.Node, named []lb.Range) never {
	n := never{theirs: map[netip.Addr]string{}}
	names := slices.Sorted(maps.Keys(nodes))
	for _, name := range names {
		for _, addr := range nodes[name].Addresses {
			n.add(addr, "an address of node "+name)
		}
	}
	for _, name := range names {
		for _, u := range nodes[name].Unassignable {
			n.add(u.Addr, u.What+" of node "+name)
		}
	}
	for _, r := range named {
		n.named = append(n.named, neverRange{r, "excluded by the controller's --never-assign"})
	}
	n.ranges = append(n.ranges, n.named...)
	return n
}

// add keeps the first word on an address: nodes have their gateway in common.
func (n *never) add(addr netip.Addr, what string) {
	if n.theirs[addr] == "" {
		n.theirs[addr] = what
		n.ranges = append(n.ranges, neverRange{lb.Range{From: addr, To: addr}, what})
	}
}

// what says what addr is that no pool hands out, or "".
func (n *never) what(addr netip.Addr) string {
	if what := n.theirs[addr]; what != "" {
		return what
	}
	for _, r := range n.named {
		if r.Contains(addr) {
			return r.what
		}
	}
	return ""
}

// among says what is among ranges, of many the lowest few; "" when nothing is.
func (n *never) among(ranges []lb.Range) string {
	const few = 3
	var found []neverRange
	for _, r := range n.ranges {
		if slices.ContainsFunc(ranges, r.Overlaps) {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(a, b neverRange) int { return a.From.Compare(b.From) })
	var words []string
	for _, r := range found[:min(few, len(found))] {
		written := r.Range.String()
		if r.From == r.To {
			written = r.From.String()
		}
		words = append(words, fmt.Sprintf("%s (%s)", written, r.what))
	}
	if more := len(found) - few; more > 0 {
		words = append(words, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(words, ", ")
}
