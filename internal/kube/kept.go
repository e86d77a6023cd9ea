package kube

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	// maxKept is how many bytes of what a tenant writes into one annotation are kept: more than any value that
	// means something, and than any message quotes. Every node keeps all Services, and an object has room for
	// 256 KiB of annotations.
	maxKept = 256
	// maxKeptAddresses is how many different entries of a list of addresses are kept: more than a Service can
	// ask for.
	maxKeptAddresses = 64
	// maxKeptPorts, maxKeptExternalIPs and maxKeptRanges are how many of these are kept of a Service: no fewer than
	// proxies serve. An object of 1.5 MB has room for 100,000 of each.
	maxKeptPorts, maxKeptExternalIPs, maxKeptRanges = 1 << 13, 1 << 14, 10_000
	// maxKeptLabels is how many labels of a Service count.
	maxKeptLabels = 128
)

// kept returns a value as it is kept. What is too long to mean anything is cut.
func kept(value string) string {
	if len(value) <= maxKept {
		return value
	}
	return strings.Clone(value[:maxKept])
}

// keptLabels returns labels as they are kept. All programs keep the same of too many: the first by name.
func keptLabels(all map[string]string) map[string]string {
	if len(all) <= maxKeptLabels {
		return all
	}
	some := make(map[string]string, maxKeptLabels)
	for _, name := range slices.Sorted(maps.Keys(all))[:maxKeptLabels] {
		some[name] = all[name]
	}
	return some
}

// keptRanges returns source ranges as they are kept: the first ones, and of the rest the first of each family, since
// a family without any would be open to everybody.
func keptRanges(all []string) []string {
	if len(all) <= maxKeptRanges {
		return all
	}
	some, rest := slices.Clone(all[:maxKeptRanges]), all[maxKeptRanges:]
	for _, six := range []bool{false, true} {
		if i := slices.IndexFunc(rest, func(s string) bool { return strings.Contains(s, ":") == six }); i >= 0 {
			some = append(some, rest[i])
		}
	}
	return some
}

// keptKey is kept for values that may be anything, and are compared with one another: those that differ still
// do.
func keptKey(value string) string {
	if len(value) <= maxKept {
		return value
	}
	return fmt.Sprintf("%s...%x", value[:maxKept], sha256.Sum256([]byte(value)))
}
