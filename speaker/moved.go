package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// movedFor is for how long a Node has to show other addresses than the speaker's before it counts as moved. After etcd
// was restored from a backup, Nodes show those of that time until each kubelet has written its own, in 10 s or so.
const movedFor = 30 * time.Second

// moved ends the program once this node's addresses are others than the one at which the speaker takes part in gossip:
// the other speakers refuse it there, and only a new process can take another address.
type moved struct {
	self    string
	nodes   table[string, lb.Node]
	address func() netip.Addr // at which it takes part; the zero Addr while it does not
	log     *slog.Logger
}

// Run returns an error once that is so, and nil when ctx ends.
func (m moved) Run(ctx context.Context) error {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	var since time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-ticker.C:
			bound := m.address()
			node, _ := m.nodes.Get(m.self) // one without addresses, or without a Node, has not moved
			switch {
			case !bound.IsValid() || len(node.Addresses) == 0 || slices.Contains(node.Addresses, bound):
				since = time.Time{}
			case since.IsZero():
				since = now
			case now.Sub(since) >= movedFor:
				m.log.Error("the Node shows other addresses than the one at which this speaker takes part in gossip; ending, "+
					"so that the next one takes one of those", "address", bound, "shown", node.Addresses)
				return fmt.Errorf("the Node %s shows %v, and the speaker is bound to %s", m.self, node.Addresses, bound)
			}
		}
	}
}

// Busy returns 0: it is never at one thing.
func (moved) Busy() time.Duration { return 0 }
