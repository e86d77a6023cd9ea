package plan

import (
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ipvsInterface is where kube-proxy in mode ipvs puts the addresses of all Services.
const ipvsInterface = "kube-ipvs0"

// unmetFor is how long a speaker may look for the others before that is remarkable. It takes up to
// 40 s until the API server says of the pods on a node that is down that they are not ready.
const unmetFor = time.Minute

// Host is what a speaker sees of its node and its cluster that decides whether its announcements
// make sense.
type Host struct {
	Self          string
	Nodes         map[string]lb.Node
	IgnoreExclude bool
	Interfaces    []lb.Interface
	// AnswersAll is set while the kernel answers ARP for the addresses of all its interfaces on each
	// of them (arp_ignore=0).
	AnswersAll bool
	// Unmet is for how long this speaker has met no other although others are ready.
	Unmet time.Duration
	Port  uint16 // of gossip
}

// Findings says what keeps announcements of the node from clients.
func Findings(h Host) []lb.Finding {
	return slices.Concat(h.excluded(), h.answers(), h.unmet())
}

// excluded names the label that keeps the node from announcing: on purpose, unless no node is
// without it.
func (h Host) excluded() []lb.Finding {
	if _, has := h.Nodes[h.Self].Labels[LabelExclude]; !has || h.IgnoreExclude {
		return nil
	}
	free := 0
	for _, n := range h.Nodes {
		if _, has := n.Labels[LabelExclude]; !has {
			free++
		}
	}
	if free > 0 {
		f := lb.Find(lb.ReasonNodeExcluded, "%s announces no address, as it carries the label %s; other nodes do", h.Self,
			LabelExclude)
		f.Note = true
		return []lb.Finding{f}
	}
	return []lb.Finding{lb.Find(lb.ReasonNodeExcluded,
		"%s announces no address, and neither does any other node: all carry "+
			"the label %s, as kubeadm and Talos set it on control planes; remove the label, or set --ignore-exclude-lb (chart: "+
			"speaker.ignoreExcludeLB=true)", h.Self, LabelExclude)}
}

// answers finds a kernel that answers ARP for addresses of Services, whatever the speaker decides.
func (h Host) answers() []lb.Finding {
	i := slices.IndexFunc(h.Interfaces, func(i lb.Interface) bool { return i.Name == ipvsInterface })
	if i < 0 || len(h.Interfaces[i].Addresses) == 0 || !h.AnswersAll {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonARPNotStrict,
		"%s answers ARP for all addresses of Services, which kube-proxy in mode "+
			"ipvs has put on %s, so clients reach any node: set ipvs.strictARP=true in kube-proxy's configuration", h.Self,
		ipvsInterface)}
}

// unmet finds a speaker that hears no other although there are some.
func (h Host) unmet() []lb.Finding {
	if h.Unmet < unmetFor {
		return nil
	}
	return []lb.Finding{lb.Find(lb.ReasonGossipBlocked,
		"the speaker on %s has met no other, although speakers on other nodes are ready: open TCP and UDP port %d between "+
			"all nodes, and give all the same gossip key", h.Self, h.Port)}
}
