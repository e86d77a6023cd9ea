package main

import (
	"context"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// interfaceParameters is where the kernel has its parameters of interfaces, for IPv4. Of that of an
// interface and that of all, the greater one holds.
const interfaceParameters = "/proc/sys/net/ipv4/conf"

// host looks at what decides on this node, beside the speaker, whether announcements make sense.
type host struct {
	speaker *speaker
	port    uint16
	// unheardSince is since when more speakers are ready than it hears, and unheard for how long that was
	// so at the last look; both belong to the actor that looks.
	unheardSince time.Time
	unheard      time.Duration
	// ignoreExclude has the node announce although a label says not to.
	ignoreExclude bool
	parameters    string // the folder with those of interfaces
	// answering are the interfaces that answer for each VIP; uplink returns the way out, "" if that is
	// not certain.
	answering func() map[netip.Addr][]string
	uplink    func() string
	// conflicts are the conflicting hosts that were seen lately, by VIP.
	conflicts func() map[netip.Addr][]plan.ConflictingHost
	// holds returns the addresses of Services that interfaces have, by interface.
	holds func([]lb.Interface) map[string][]netip.Addr
	// unreachable says why the API server is not reached; nil if it is.
	unreachable func() error
}

// newPreflight returns the actor that looks.
func newPreflight(s *speaker, port uint16, client *kube.Client, events *kube.Events) *preflight.Preflight {
	h := host{speaker: s, port: port, ignoreExclude: s.opts.ignoreExclude, parameters: interfaceParameters,
		answering: func() map[netip.Addr][]string { return s.to.l2.Outcome().Answering }, uplink: links.Uplink,
		conflicts: s.conflicts, holds: s.heldBy,
		unreachable: client.Unreachable}
	return preflight.New(preflight.Options{Log: s.log, Now: time.Now,
		Look: func(context.Context) ([]lb.Finding, bool) { return h.look(time.Now()) },
		Tell: func(f lb.Finding, gone bool) { events.Finding(s.self, f, gone) },
		// All nodes would write two Events each to an API server that has just restarted.
		Brief: []lb.Reason{lb.ReasonAPIServerUnreachable}})
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

// heldBy returns the addresses of Services that interfaces have, in order, by interface.
func (s *speaker) heldBy(interfaces []lb.Interface) map[string][]netip.Addr {
	held := map[string][]netip.Addr{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range interfaces {
		for _, p := range i.Addresses {
			if s.rooms.holders.Held(p.Addr()) {
				held[i.Name] = append(held[i.Name], p.Addr())
			}
		}
		slices.SortFunc(held[i.Name], netip.Addr.Compare)
	}
	return held
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
		Speakers: s.from.liveness.Sight().Speakers, Ready: s.from.ready(), Port: h.port, Conflicts: h.conflicts(),
		Holds: h.holds(interfaces),
	}
	if err := h.unreachable(); err != nil {
		facts.Unreachable = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	h.hear(facts, now)
	facts.Unheard = h.unheard
	if text, err := os.ReadFile(filepath.Join(h.parameters, "all", "arp_ignore")); err == nil {
		facts.AnswersAll = strings.TrimSpace(string(text)) == "0"
	}
	if facts.Answering = h.interfaces(); len(facts.Answering) > 0 {
		facts.Uplink, facts.Strict = h.uplink(), map[string]bool{}
		for _, name := range facts.Answering {
			facts.Strict[name] = max(h.filter("all"), h.filter(name)) == strictFilter
		}
	}
	return plan.Findings(facts), true
}

// strictFilter is the value of rp_filter by which answers have to leave where the packet came in.
const strictFilter = 1

// filter reads the parameter rp_filter of an interface; what cannot be read drops nothing.
func (h *host) filter(name string) int {
	text, err := os.ReadFile(filepath.Join(h.parameters, name, "rp_filter"))
	if err != nil {
		return 0
	}
	value, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return value
}

// interfaces returns those that answer for IPv4 addresses, sorted.
func (h *host) interfaces() []string {
	var names []string
	for vip, on := range h.answering() {
		if vip.Is4() {
			names = append(names, on...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// tellers is how many nodes of a majority tell that they do not hear others: one node's firewall
// is no reason for an Event on every node. A node without a majority tells too.
const tellers = 2

// hear notes for how long more speakers were ready than this one hears. While the node does not reach the
// API server, who is ready is not known: what was so stays.
func (h *host) hear(facts plan.Host, now time.Time) {
	seen := facts.Speakers
	tells := !seen.Majority || seen.Rank < tellers
	switch {
	case !tells || facts.Ready <= len(seen.Live):
		h.unheardSince, h.unheard = time.Time{}, 0
	case facts.Unreachable != "":
	case h.unheardSince.IsZero():
		h.unheardSince = now
	default:
		h.unheard = now.Sub(h.unheardSince)
	}
}
