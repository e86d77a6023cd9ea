package main

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/routes"
)

// beats are the BFD sessions by which this node watches its neighbors on the ring of all nodes: see
// package liveness.
type beats struct {
	profile lb.BFDProfile
	// where returns where this node and its neighbors speak gossip.
	where func() (own netip.Addr, neighbors map[netip.Addr]string)

	mu       sync.Mutex
	routers  map[routes.Path]lb.BFDProfile // the sessions with routers
	ring     map[routes.Path]string        // the neighbors, by the session with each
	failures map[routes.Path]uint64        // of each session, as of the last look
}

// beatMultiplier is how many packets of a neighbor in a row are missed before its path counts as lost.
const beatMultiplier = 3

// newBeats returns beats without neighbors. A packet may pass any routers between two nodes: nobody
// gains from one that is made up, as what it says has to be confirmed by a kernel.
func newBeats(interval time.Duration, where func() (netip.Addr, map[netip.Addr]string)) *beats {
	return &beats{where: where, failures: map[routes.Path]uint64{}, profile: lb.BFDProfile{
		Transmit: interval, Receive: interval, Multiplier: beatMultiplier, MinimumTTL: 1}}
}

// sessions returns all sessions, with routers and with the present neighbors, and whether they differ
// since the last time. Those with routers are taken over if news is set.
func (b *beats) sessions(routers map[routes.Path]lb.BFDProfile, news bool) (
	all map[routes.Path]lb.BFDProfile, changed bool) {
	own, neighbors := b.where()
	ring := make(map[routes.Path]string, len(neighbors))
	for addr, node := range neighbors {
		if own.IsValid() && own.Is4() == addr.Is4() {
			ring[routes.Path{Peer: addr, Local: own, Multihop: true}] = node
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if news {
		b.routers = routers
	}
	changed = news || !maps.Equal(b.ring, ring)
	b.ring = ring
	maps.DeleteFunc(b.failures, func(path routes.Path, _ uint64) bool { _, stays := ring[path]; return !stays })
	all = make(map[routes.Path]lb.BFDProfile, len(b.routers)+len(ring))
	for path := range ring {
		all[path] = b.profile
	}
	maps.Copy(all, b.routers)
	return all, changed
}

// lost returns the neighbors to which the path was lost since the last look.
func (b *beats) lost(outcomes map[bfd.Key]bfd.Outcome) (nodes []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for key, o := range outcomes {
		node, neighbor := b.ring[routes.Path(key)]
		if !neighbor {
			continue
		}
		if o.Failures > b.failures[routes.Path(key)] {
			nodes = append(nodes, node)
		}
		b.failures[routes.Path(key)] = o.Failures
	}
	return nodes
}

// counts returns how many neighbors are watched, and to how many of them the path is up.
func (b *beats) counts(outcomes map[bfd.Key]bfd.Outcome) (watched, up int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for path := range b.ring {
		if outcomes[bfd.Key(path)].State == bfd.Up {
			up++
		}
	}
	return len(b.ring), up
}
