package nftables

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"time"
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
	// maxSplit is how often places are halved at most. That is enough for the groups of any Service,
	// see maxElements.
	maxSplit = 15
)

// A memory is how a group remembers clients: for how many seconds, and in how many places. It is
// one number, as elements are small: the seconds, and above them how often the places are halved.
// Zero is for none.
type memory = uint32

// maxSeconds is more than a day, the longest timeout of the Kubernetes API.
const (
	secondsBits = 20
	maxSeconds  = 1<<secondsBits - 1
)

// memoryOf returns the memory of each of the groups of one Service.
func memoryOf(timeout time.Duration, groups int) memory {
	seconds := memory(min(timeout/time.Second, maxSeconds))
	if seconds == 0 {
		return 0
	}
	return seconds | splitFor(groups)<<secondsBits
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
