package nftables

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// A need is a numbered set, which exists from when a Service needs it until it was not needed for a while. The rules
// ask each of those that exist. That of setDirect, which is always there, is for the rules that hand packets over.
type need struct {
	set    setID
	number uint32
}

func (n need) compare(other need) int {
	return cmp.Or(cmp.Compare(n.set, other.set), cmp.Compare(n.number, other.number))
}

func (n need) setName() string { return element{set: n.set, number: n.number}.setName() }

// needs are in order.
type needs []need

// of returns the numbers of the sets of one kind.
func (all needs) of(set setID) []uint32 {
	var numbers []uint32
	for _, n := range all {
		if n.set == set {
			numbers = append(numbers, n.number)
		}
	}
	return numbers
}

// with returns these and others.
func (all needs) with(others needs) needs {
	both := slices.Concat(all, others)
	slices.SortFunc(both, need.compare)
	return slices.Compact(both)
}

// direct reports whether there are rules for Services that are forwarded directly.
func (all needs) direct() bool { return len(all.of(setDirect)) > 0 }

// needed returns the numbered sets that some Service needs.
func (c *claims) needed() needs {
	return slices.SortedFunc(maps.Keys(c.needs), need.compare)
}

// prefixRanges begins the names of the sets of networks of one length.
const prefixRanges = "source-ranges-"

func rangesSet(length uint32) string { return fmt.Sprint(prefixRanges, length) }

// lengthNamed returns the prefix length for which a set has this name.
func lengthNamed(name string) (uint32, bool) {
	text, found := strings.CutPrefix(name, prefixRanges)
	length, err := strconv.ParseUint(text, 10, 8)
	return uint32(length), found && err == nil && length <= 128 && rangesSet(uint32(length)) == name
}
