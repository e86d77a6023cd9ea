package nftables

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/proxy/plan"
)

const (
	// stickyPlaces is how many places a group has in the map that remembers clients, as long as its
	// Service has no more than two groups. A client's place follows from its address' hash; clients
	// with the same place share a backend. So the clients of one Service, however many, take no more
	// than its share of the map.
	stickyPlaces = 1 << 18
	stickyShare  = 2 * stickyPlaces
	// stickyLimit is how many places are taken at most. Clients of others are served without affinity.
	stickyLimit = 8 * stickyShare
	// maxSplit is how often places are halved at most of a Service that has many. That is enough for the groups of any,
	// see MaxElements.
	maxSplit = 15
	// fewerSplit is how much more often they are halved of a Service with few, up to maxFewerSplit: then each group has
	// one.
	fewerSplit    = 5
	maxFewerSplit = 18
)

// A memory is how a group remembers clients: for how many seconds, and in how many places. It is
// one number, as elements are small: the seconds, and above them how often the places are halved.
// Zero is for none.
type memory = uint32

// secondsBits are enough for a day, the longest timeout of the Kubernetes API.
const (
	secondsBits = 20
	maxSeconds  = 1<<secondsBits - 1
	day         = 24 * 60 * 60
)

// maxMemories is how many memories there are at most. Each that is in use costs a rule, which
// connections with session affinity pass once. So timeouts are rounded.
const maxMemories = 210

// memoryOf returns the memory of each of the groups of one Service.
func memoryOf(timeout time.Duration, groups int, has plan.Places) memory {
	seconds := memory(min(timeout/time.Second, day))
	if seconds == 0 || has == plan.NoPlaces {
		return 0
	}
	split := splitFor(groups)
	if has == plan.FewPlaces {
		split = min(split+fewerSplit, maxFewerSplit)
	}
	if split > 0 {
		return nearest(seconds) | split<<secondsBits
	}
	return rounded(seconds)
}

// rounded rounds a timeout to a multiple of a step that is at most a sixth of it, or a second.
func rounded(seconds uint32) uint32 {
	for _, s := range []struct{ upTo, step uint32 }{
		{30, 1}, {60, 5}, {120, 10}, {300, 15}, {900, 30}, {1800, 60}, {7200, 300}, {21600, 900},
	} {
		if seconds <= s.upTo {
			return (seconds + s.step/2) / s.step * s.step
		}
	}
	const hour = 3600
	return (seconds + hour/2) / hour * hour
}

// nearest rounds a timeout of a Service with many groups, of which there are few.
func nearest(seconds uint32) uint32 {
	const minute, hour = 60, 3600
	few := []uint32{1, 2, 5, 10, 20, 30, minute, 2 * minute, 5 * minute, 10 * minute, 20 * minute, 30 * minute,
		hour, 3 * hour, 6 * hour, 12 * hour, day}
	distance := func(a uint32) uint32 { return max(a, seconds) - min(a, seconds) }
	return slices.MinFunc(few, func(a, b uint32) int { return cmp.Compare(distance(a), distance(b)) })
}

// splitFor returns how often places are halved so that the groups of a Service keep to its share.
// It changes in large steps: the clients of a group whose places change are forgotten, and the old
// places stay taken until their time is over, so that a Service has at most a share for each step.
func splitFor(groups int) uint32 {
	const step = 5
	split := uint32(0)
	for split < maxSplit && groups > 2<<split {
		split += step
	}
	return split
}

func secondsOf(m memory) time.Duration {
	return time.Duration(m&maxSeconds) * time.Second
}

func splitOf(m memory) uint32 { return m >> secondsBits }

// places returns how many places a group has when they are halved so often, and the number of the
// first: groups with fewer have others.
func places(split uint32) (n, first uint32) { return stickyPlaces >> split, stickyPlaces >> split }

// stickyMap is the map from group and place to backend. It is what packets write. A map keeps its
// size as long as it exists, so one of another size has another name.
var stickyMap = fmt.Sprint("clients-", stickyLimit)

// prefixRemember begins the names of the sets of groups with session affinity.
const prefixRemember = "remember-"

// rememberSet returns the name of the set of groups with this memory: with the timeout in seconds,
// and the number of places where that is not stickyPlaces.
func rememberSet(m memory) string {
	name := fmt.Sprint(prefixRemember, m&maxSeconds)
	if split := splitOf(m); split > 0 {
		n, _ := places(split)
		name += fmt.Sprint("-", n)
	}
	return name
}

// memoryNamed returns the memory for which a set has this name.
func memoryNamed(name string) (memory, bool) {
	rest, found := strings.CutPrefix(name, prefixRemember)
	if !found {
		return 0, false
	}
	timeout, share, split := strings.Cut(rest, "-")
	seconds, err := strconv.ParseUint(timeout, 10, secondsBits)
	m := memory(seconds)
	if split {
		n, err := strconv.ParseUint(share, 10, 32)
		if err != nil || n == 0 {
			return 0, false
		}
		m |= uint32(bits.Len32(stickyPlaces)-bits.Len32(uint32(n))) << secondsBits
	}
	return m, err == nil && seconds > 0 && rememberSet(m) == name
}
