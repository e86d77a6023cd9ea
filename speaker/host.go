package main

import (
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
	began   time.Time
	port    uint16
	// ignoreExclude has the node announce although a label says not to.
	ignoreExclude bool
	// around has the nodes on which speakers have run, as long as they are there.
	around    func() (map[string]string, bool)
	arpIgnore string // the file
}

// newPreflight returns the actor that looks.
func newPreflight(s *speaker, port uint16, around func() (map[string]string, bool),
	events *kube.Events) *preflight.Preflight {
	h := host{speaker: s, began: time.Now(), port: port, ignoreExclude: s.opts.ignoreExclude, around: around,
		arpIgnore: arpIgnore}
	return preflight.New(preflight.Options{Log: s.log, Now: time.Now, Look: func() ([]lb.Finding, bool) {
		return h.look(time.Now())
	}, Tell: func(f lb.Finding, gone bool) { events.Finding(s.self, f, gone) }})
}

// look returns what keeps announcements of this node from clients; it knows nothing before the
// watches have all that it needs.
func (h *host) look(now time.Time) (found []lb.Finding, known bool) {
	s := h.speaker
	interfaces, listed := s.from.interfaces()
	around, synced := h.around()
	if !listed || !synced || !s.from.nodes.Synced() {
		return nil, false
	}
	seen := s.from.liveness.Speakers()
	facts := plan.Host{
		Self: s.self, Nodes: s.from.nodes.All(), IgnoreExclude: h.ignoreExclude, Interfaces: interfaces,
		Met: len(seen.Live)+len(seen.Missing) > 1, Since: now.Sub(h.began), Port: h.port,
	}
	if text, err := os.ReadFile(h.arpIgnore); err == nil {
		facts.AnswersAll = strings.TrimSpace(string(text)) == "0"
	}
	for node := range around {
		if _, ok := facts.Nodes[node]; ok && node != s.self {
			facts.Others = append(facts.Others, node)
		}
	}
	return plan.Findings(facts), true
}
