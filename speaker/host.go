package main

import (
	"context"
	"maps"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// arpIgnore says for which of its addresses the kernel answers ARP on an interface.
const arpIgnore = "/proc/sys/net/ipv4/conf/all/arp_ignore"

// host looks at what decides on this node, beside the speaker, whether announcements make sense.
type host struct {
	speaker *speaker
	port    uint16
	// alone is since when it has met no other although others are ready; belongs to the actor that
	// looks.
	alone time.Time
	// ignoreExclude has the node announce although a label says not to.
	ignoreExclude bool
	arpIgnore     string // the file
	// conflicts are the conflicting hosts that were seen lately, by VIP.
	conflicts func() map[netip.Addr][]plan.ConflictingHost
	// unreachable says why the API server is not reached; nil if it is.
	unreachable func() error
}

// newPreflight returns the actor that looks.
func newPreflight(s *speaker, port uint16, client *kube.Client, events *kube.Events) *preflight.Preflight {
	h := host{speaker: s, port: port, ignoreExclude: s.opts.ignoreExclude, arpIgnore: arpIgnore,
		conflicts:   s.conflicts,
		unreachable: client.Unreachable}
	return preflight.New(preflight.Options{Log: s.log, Now: time.Now, Look: func(context.Context) ([]lb.Finding, bool) {
		return h.look(time.Now())
	}, Tell: func(f lb.Finding, gone bool) { events.Finding(s.self, f, gone) }})
}

// conflicts returns the conflicting hosts that were seen lately, by VIP. Addresses that no Service has
// are left out.
func (s *speaker) conflicts() map[netip.Addr][]plan.ConflictingHost {
	found := maps.Clone(s.to.l2.Outcome().ConflictingHosts)
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(found, func(vip netip.Addr, _ []plan.ConflictingHost) bool { return !s.rooms.holders.Held(vip) })
	return found
}

// look returns what keeps announcements of this node from clients; it knows nothing before the
// watches have all that it needs.
func (h *host) look(now time.Time) (found []lb.Finding, known bool) {
	s := h.speaker
	interfaces, listed := s.from.interfaces()
	if !listed || !s.from.nodes.Synced() || s.from.daemonSet != nil && !s.from.daemonSet.Synced() {
		return nil, false
	}
	facts := plan.Host{
		Self: s.self, Nodes: s.from.nodes.All(), IgnoreExclude: h.ignoreExclude, Interfaces: interfaces,
		Unmet: h.unmet(now), Port: h.port, Conflicts: h.conflicts(),
	}
	if err := h.unreachable(); err != nil {
		facts.Unreachable = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	if text, err := os.ReadFile(h.arpIgnore); err == nil {
		facts.AnswersAll = strings.TrimSpace(string(text)) == "0"
	}
	return plan.Findings(facts), true
}

// unmet returns for how long the speaker has met no other although others are ready: two or more
// are, and one of them may be this one.
func (h *host) unmet(now time.Time) time.Duration {
	seen := h.speaker.from.liveness.Speakers()
	if len(seen.Live)+len(seen.Missing) > 1 || h.speaker.from.ready() < 2 {
		h.alone = time.Time{}
		return 0
	}
	if h.alone.IsZero() {
		h.alone = now
	}
	return now.Sub(h.alone)
}
