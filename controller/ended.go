package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
)

const (
	// endTimeout is how long a cleanup waits for Landfall's pods to end: some begin to end only when
	// the garbage collector of the cluster has found them.
	endTimeout = 2 * time.Minute
	// awayAfter is how long after its grace period a pod that is still there is on a node that cannot
	// be reached.
	awayAfter = 15 * time.Second
	// silentAfter is how long a Lease that is not renewed is held; longer than the controller's default
	// --leader-elect-lease-duration.
	silentAfter = 20 * time.Second
)

// running is what has been seen of an installation that is about to end. All times are the
// observer's own, as the clocks of nodes and of the API server may differ.
type running struct {
	ending map[string]time.Time // pods, since when
	lease  string               // its version
	since  time.Time            // when the Lease had that version first
}

// look takes what runs now. It returns what there is to wait for, and which nodes have pods that
// ought to have ended.
func (r *running) look(now time.Time, pods []kube.InstalledPod, leader, version string) (waits, away []string) {
	if r.ending == nil {
		r.ending = map[string]time.Time{}
	}
	for _, p := range pods {
		if !p.Ending {
			waits = append(waits, fmt.Sprintf("pod %s runs", p.Name))
			continue
		}
		if _, seen := r.ending[p.Name]; !seen {
			r.ending[p.Name] = now
		}
		if now.Sub(r.ending[p.Name]) < p.Grace+awayAfter {
			waits = append(waits, fmt.Sprintf("pod %s has not ended", p.Name))
		} else {
			away = append(away, p.Node)
		}
	}
	if version != r.lease {
		r.lease, r.since = version, now
	}
	if leader != "" && now.Sub(r.since) < silentAfter {
		waits = append(waits, fmt.Sprintf("controller %s holds its Lease", leader))
	}
	slices.Sort(away)
	return waits, slices.Compact(away)
}

// awaitEnd waits until no controller and no speaker runs any more, except on nodes that cannot be
// reached.
func (c *cleaner) awaitEnd(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	var r running
	for {
		waits, away, err := c.look(ctx, &r)
		if err == nil && len(waits) == 0 {
			if len(away) > 0 {
				c.log.Warn("pods on these nodes did not end: once a node is back, run landfall-proxy cleanup on it, unless it "+
					"was rebooted", "nodes", strings.Join(away, " "))
			}
			return nil
		}
		select {
		case <-time.After(cleanupEvery):
			continue
		case <-ctx.Done():
		}
		switch {
		case errors.Is(ctx.Err(), context.Canceled):
			return ctx.Err() // somebody interrupts
		case err != nil:
			return fmt.Errorf("find out whether Landfall still runs: %w", err)
		}
		return fmt.Errorf("nothing was cleaned up, because Landfall still runs: %s", strings.Join(waits, ", "))
	}
}

func (c *cleaner) look(ctx context.Context, r *running) (waits, away []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	pods, err := c.installation.Pods(ctx)
	if err != nil {
		return nil, nil, err
	}
	leader, version, err := c.installation.Leader(ctx)
	if err != nil {
		return nil, nil, err
	}
	waits, away = r.look(time.Now(), pods, leader, version)
	return waits, away, nil
}
