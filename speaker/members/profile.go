package members

import (
	"fmt"
	"time"
)

// Profile is how fast gossip finds a node that has died.
type Profile struct {
	// ProbeInterval is the time between two probes by one node, each of another node, and ProbeTimeout
	// how long it waits for a direct answer. Both decide how long a crash goes unnoticed, about five
	// intervals, and how slow a network may be.
	ProbeInterval, ProbeTimeout time.Duration
	// GossipInterval is the time between two rounds in which news is passed on.
	GossipInterval time.Duration
	// BeatInterval is the time between two BFD packets to a neighbor on the ring.
	BeatInterval time.Duration
}

// The profiles: for nodes on one network, and for nodes with up to 200 ms between them.
var (
	LAN = Profile{ProbeInterval: 100 * time.Millisecond, ProbeTimeout: 50 * time.Millisecond,
		GossipInterval: 50 * time.Millisecond, BeatInterval: 50 * time.Millisecond}
	WAN = Profile{ProbeInterval: 500 * time.Millisecond, ProbeTimeout: 300 * time.Millisecond,
		GossipInterval: 200 * time.Millisecond, BeatInterval: 200 * time.Millisecond}
)

// ParseProfile reads the name of a profile, and replaces its times of probes by those that are not
// 0.
func ParseProfile(name string, interval, timeout time.Duration) (Profile, error) {
	p, ok := map[string]Profile{"lan": LAN, "wan": WAN}[name]
	if !ok {
		return p, fmt.Errorf("--gossip-profile: %q is neither lan nor wan", name)
	}
	if interval != 0 {
		p.ProbeInterval = interval
	}
	if timeout != 0 {
		p.ProbeTimeout = timeout
	}
	const least, most = 10 * time.Millisecond, time.Minute
	switch {
	case p.ProbeTimeout < least:
		return p, fmt.Errorf("--probe-timeout: %s is less than %s", p.ProbeTimeout, least)
	case p.ProbeInterval > most:
		return p, fmt.Errorf("--probe-interval: %s is more than %s", p.ProbeInterval, most)
	case p.ProbeInterval <= p.ProbeTimeout:
		return p, fmt.Errorf("--probe-interval: %s is not longer than the timeout of a probe, %s", p.ProbeInterval,
			p.ProbeTimeout)
	}
	return p, nil
}

// Unnoticed is how long a node may be away before gossip can find it dead: the interval of probes and
// three of them in which it may refute. A process looks at the clock too rarely for less. Those who
// find it dead sooner, by BFD, tell it when it answers again.
func (p Profile) Unnoticed() time.Duration { return max(4*p.ProbeInterval, 400*time.Millisecond) }
