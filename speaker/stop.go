package main

import (
	"context"
	"time"
)

// stop makes the speaker hand over all VIPs. With restarting, a successor is expected on this node,
// for which BGP peers may keep routes.
func (s *speaker) stop(restarting bool) {
	s.mu.Lock()
	s.phase.stopping, s.phase.restarting = true, restarting
	s.mu.Unlock()
	s.changes.markAll()
}

// handOver stops the speaker and waits until the heirs answer, or nobody else claims, and routers
// have had the time to choose other routes; or until the time is over. At an end for good, it then
// ends all BGP sessions, so that no router waits for a successor.
func (s *speaker) handOver(ctx context.Context, timeout time.Duration) {
	forGood := s.forGood()
	s.stop(!forGood)
	if len(s.to.routes.bgp.Brief()) > 0 {
		timeout += s.opts.convergence
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if !until(ctx, s.quiet) {
		s.log.Warn("stopping although other nodes have not taken over every address", "still answering for",
			len(s.to.l2.Outcome().Answering))
	}
	if !forGood {
		return
	}
	s.log.Info("no speaker will follow on this node; closing all BGP sessions")
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), farewellTimeout)
	defer cancel()
	s.to.routes.bgp.Set(nil)
	until(ctx, func() bool { return len(s.to.routes.bgp.Brief()) == 0 && s.to.objects.Idle() })
}

// farewellTimeout bounds the end of sessions, and of what the API server shows of them.
const farewellTimeout = 2 * time.Second

// forGood reports whether no speaker will run on this node after this one, as far as can be known.
func (s *speaker) forGood() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if node := s.node(); node != nil && node.Leaving != "" {
		return true
	}
	return s.from.daemonSet != nil && s.from.daemonSet.Synced() && s.phase.installed && !s.from.stays()
}

// until waits for ok, and reports whether it came before the end of ctx.
func until(ctx context.Context, ok func() bool) bool {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
	return true
}

// quiet reports whether this node answers for nothing any more, after stop.
func (s *speaker) quiet() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.phase.stopping && s.rooms.routes.Stopped(s.to.routes.sessions()) && s.rooms.ownership.Stopped() &&
		len(s.to.l2.Outcome().Answering) == 0
}
