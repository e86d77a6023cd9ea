package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/preflight"
)

// world is the state of the cluster, as the API server has it.
type world struct {
	class          string
	services       map[lb.Key]lb.Service
	pools          map[string]lb.Pool
	advertisements map[string]lb.L2Advertisement
	routed         map[string]lb.BGPAdvertisement
	peers          map[string]lb.Peer
	// warnings are what the programs have found on Nodes.
	warnings []lb.Refusal
	// refused says what the user may not read.
	refused []string
}

// warningsLast is how long a program may take to repeat that something is wrong with a Node: see
// preflight.Repeat.
const warningsLast = preflight.Repeat + 5*time.Minute

// read lists the objects that the report needs.
func read(ctx context.Context, client *kube.Client, o options) (world, error) {
	ctx, cancel := context.WithCancel(ctx)
	synced := make(chan struct{}, 1)
	client.OnSync(func() {
		select {
		case synced <- struct{}{}:
		default:
		}
	})
	ignore := func(string) {}
	services := kube.LabelledServices(client, func(lb.Key) {})
	pools := kube.Pools(client, ignore, ignore)
	advertisements := kube.L2Advertisements(client, ignore)
	routed := kube.BGPAdvertisements(client, ignore, ignore)
	peers := kube.BGPPeers(client, ignore, ignore)

	ended := make(chan error, 1)
	go func() { ended <- client.Run(ctx) }()
	defer func() {
		cancel()
		<-ended
	}()
	deadline := time.After(o.timeout)
	var refused []string
	for !services.Synced() || !pools.Synced() || !advertisements.Synced() || !routed.Synced() || !peers.Synced() {
		if refused = nil; len(client.Refused()) > 0 {
			var err error
			if refused, err = without(client.Refused()); err != nil {
				return world{}, err
			}
			if services.Synced() && pools.Synced() && advertisements.Synced() && routed.Synced() {
				break
			}
		}
		select {
		case <-synced:
		case <-ctx.Done():
			return world{}, ctx.Err()
		case <-deadline:
			return world{}, fmt.Errorf("no answer from the API server %s within %s", client.Host(), o.timeout)
		}
	}
	warnings, err := client.NodeWarnings(ctx, time.Now().Add(-warningsLast))
	if err != nil {
		return world{}, err
	}
	return world{
		class: o.class, warnings: warnings, services: services.All(), pools: pools.All(),
		advertisements: advertisements.All(),
		routed:         routed.All(), peers: peers.All(), refused: refused,
	}, nil
}

// without says what is missing from the report, if it makes sense without what the API server
// refuses: the role view has no BGPPeers, as they may hold passwords.
func without(refused map[string]error) (missing []string, err error) {
	for _, name := range slices.Sorted(maps.Keys(refused)) {
		if name != "bgppeers" {
			return nil, fmt.Errorf("read %s: %w", name, refused[name])
		}
		missing = append(missing, fmt.Sprintf("BGPPeers and their sessions are not shown: %v; the ClusterRole "+
			"landfall-view-peers of the Helm chart allows it", refused[name]))
	}
	return missing, nil
}
