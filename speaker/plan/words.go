package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// NodeWord is why one node does or does not announce a VIP.
type NodeWord struct {
	Node string `json:"node"`
	// Reason is ReasonAnnounced, ReasonNotOwner, or why the node does not claim the VIP.
	Reason  lb.Reason `json:"reason"`
	Message string    `json:"message"`
	Claims  bool      `json:"claims"`
	// Answering is set while the node answers, or BGP peers hear of the VIP from it, which may also be
	// so during a handover.
	Answering bool `json:"answering"`
	// Peers are the BGP peers that hear of the VIP from the node, joined by ", ".
	Peers string `json:"peers,omitempty"`
	// Routed is set while peers hear of the VIP from the node and go on to.
	Routed bool `json:"routed,omitempty"`
}

// words explains a decision for each node that is live or missing. Of the others this node knows
// the reason only, not the details.
func words(f Facts, in Input, d Decision) []NodeWord {
	found := make([]NodeWord, 0, len(f.Live))
	for _, node := range f.Live {
		claim, told := in.Claims[node]
		if node == f.Self {
			claim, told = d.Claim(len(in.Answering) > 0), true
		}
		w := NodeWord{Node: node, Reason: claim.Reason, Claims: told && claim.Reason == "", Answering: claim.Answering}
		switch {
		case !told:
			w.Reason, w.Message = lb.ReasonUnheard, Describe(lb.ReasonUnheard)
		case claim.Reason != "" && node == f.Self:
			w.Message = d.Refusal.Message
		case claim.Reason != "":
			w.Message = Describe(claim.Reason)
		case node == d.Owner && claim.Held:
			w.Reason, w.Message = lb.ReasonAnnounced,
				"the node's speaker has ended a moment ago and is expected back; the node still forwards"
		case node == d.Owner && claim.Answering:
			w.Reason, w.Message = lb.ReasonAnnounced, Describe(lb.ReasonAnnounced)
			if node == f.Self && len(d.Conflicts) > 0 {
				w.Message += ", which " + named(d.Conflicts) + " uses too"
			}
		case node == d.Owner && len(d.Probe) > 0:
			w.Reason, w.Message = lb.ReasonProbing, Describe(lb.ReasonProbing)
		case node == d.Owner:
			w.Reason, w.Message = lb.ReasonAnnounceFailed, "the node owns the address and does not answer for it yet"
		default:
			w.Reason, w.Message = lb.ReasonNotOwner, fmt.Sprintf("the node can deliver; %s owns the address", d.Owner)
		}
		w.addRoutes(claim, node == d.Owner)
		if w.Reason == claim.Unrouted && node == f.Self && d.Routed.Refusal != nil {
			w.Message = d.Routed.Refusal.Message
		}
		found = append(found, w)
	}
	for _, node := range f.Missing {
		found = append(found, NodeWord{Node: node, Reason: lb.ReasonMissing, Message: Describe(lb.ReasonMissing)})
	}
	slices.SortFunc(found, func(a, b NodeWord) int { return strings.Compare(a.Node, b.Node) })
	return found
}

// addRoutes adds to the word of a node what it has said of BGP. Where no L2Advertisement is for the
// VIP, that is all there is to say.
func (w *NodeWord) addRoutes(claim lb.Claim, owner bool) {
	w.Peers, w.Routed = claim.Routes, claim.Routes != "" && claim.Unrouted == ""
	w.Answering = w.Answering || claim.Routes != ""
	switch {
	case w.Routed && owner:
		w.Message += ", and announces a route to it to " + claim.Routes
	case w.Routed:
		w.Claims = true
		w.Reason, w.Message = lb.ReasonAnnounced, "the node announces a route to the address to "+claim.Routes
	case claim.Reason == lb.ReasonNoAdvertisement && claim.Unrouted != "":
		w.Reason, w.Message = claim.Unrouted, Describe(claim.Unrouted)
	}
}

// Describe returns the sentence for a reason of which no details are known.
func Describe(reason lb.Reason) string {
	switch reason {
	case lb.ReasonNoAdvertisement:
		return "no advertisement selects the address on this node"
	case lb.ReasonNoInterface:
		return "no suitable interface has a subnet that contains the address"
	case lb.ReasonFeedUnknown:
		return "this node's proxy has not said yet what is programmed"
	case lb.ReasonFeedLost:
		return "this node's proxy has been away for longer than the hold"
	case lb.ReasonNotProgrammed:
		return "this node's kernel does not hold every rule for the address"
	case lb.ReasonNoBackends:
		return "no endpoint is usable on any node"
	case lb.ReasonNoLocalBackends:
		return "externalTrafficPolicy is Local and no endpoint on this node is usable"
	case lb.ReasonNodeLeaving:
		return "the node is about to go"
	case lb.ReasonNodeExcluded:
		return "the node carries the label " + LabelExclude
	case lb.ReasonNodeUnknown:
		return "the API server has no Node object of this node"
	case lb.ReasonStopping:
		return "the speaker is ending"
	case lb.ReasonNotJoined:
		return "the speaker has not met the others yet"
	case lb.ReasonFamilyUnspoken:
		return "the node's speaker does not announce addresses of this family"
	case lb.ReasonUnheard:
		return "the node has not said anything of the address yet"
	case lb.ReasonNotEstablished:
		return "no BGP session of the node is up over which a peer could hear of the address"
	case lb.ReasonMissing:
		return "the node's speaker has stopped answering the others"
	case lb.ReasonYielded:
		return "the node is cut off from a majority of the speakers, which answers for the address"
	case lb.ReasonProbing:
		return "the node asks whether somebody else uses the address before it announces it for the first time"
	case lb.ReasonAddressConflict:
		return "a device that is no node with a speaker uses the address"
	case lb.ReasonAnnounced:
		return "this node answers for the address"
	}
	return string(reason)
}

// Report is what the reporter of a Service writes about it, or nothing when this node is not the
// reporter or there is nothing certain to say.
type Report struct {
	Announced bool
	Reason    lb.Reason
	Message   string
}

// Condition returns the report as a condition.
func (r Report) Condition() lb.Condition {
	return lb.Condition{Type: lb.ConditionAnnounced, Status: r.Announced, Reason: r.Reason, Message: r.Message}
}

// Summarize reports on a Service from the decisions about its VIPs, in the order of its status. The
// first VIP's reporter speaks for all of them; ok is false on any other node.
func Summarize(self string, decisions []Decision) (report Report, ok bool) {
	if len(decisions) == 0 || decisions[0].Reporter != self {
		return Report{}, false
	}
	report = Report{Announced: true, Reason: lb.ReasonAnnounced}
	var messages []string
	for _, d := range decisions {
		reason, message := d.summary(self)
		messages = append(messages, message)
		switch {
		case reason == lb.ReasonAnnounced:
		case !report.Announced:
		case reason == lb.ReasonParting, reason == lb.ReasonContested:
			report.Reason = reason
		default:
			report.Announced, report.Reason = false, reason
		}
	}
	report.Message = strings.Join(messages, "; ")
	return report, true
}

// summary says in one sentence who announces the VIP, or why nobody does.
func (d Decision) summary(self string) (lb.Reason, string) {
	routes := d.routes()
	switch {
	case len(routes) == 0:
		return d.answers(self)
	case d.Owner == "":
		return lb.ReasonAnnounced, strings.Join(routes, "; ")
	}
	_, answers := d.answers(self)
	return lb.ReasonAnnounced, answers + "; " + strings.Join(routes, "; ")
}

// routes says from which nodes which peers hear of the VIP, for as long as it stays so.
func (d Decision) routes() []string {
	byPeers := map[string][]string{}
	for _, w := range d.Nodes {
		if w.Routed {
			byPeers[w.Peers] = append(byPeers[w.Peers], w.Node)
		}
	}
	var found []string
	for _, peers := range slices.SortedFunc(maps.Keys(byPeers), func(a, b string) int {
		return cmp.Or(len(byPeers[b])-len(byPeers[a]), strings.Compare(a, b))
	}) {
		found = append(found, lb.Announcement{VIP: d.VIP, Node: some(byPeers[peers], maxRouting),
			How: "BGP to " + peers}.String())
	}
	return found
}

// answers says who answers ARP and NDP for the VIP, or why nobody does.
func (d Decision) answers(self string) (lb.Reason, string) {
	for _, w := range d.Nodes {
		if w.Node != d.Owner {
			continue
		}
		if w.Reason == lb.ReasonAnnounced {
			announcement := lb.Announcement{VIP: d.VIP, Node: d.Owner, How: d.how(self)}.String()
			if d.Owner == self && len(d.Conflicts) > 0 {
				return lb.ReasonContested,
					fmt.Sprintf("%s; %s is in use by %s, too, which is no node that runs a speaker", announcement, d.VIP,
						named(d.Conflicts))
			}
			return lb.ReasonAnnounced, announcement
		}
		if w.Reason == lb.ReasonProbing {
			return w.Reason, fmt.Sprintf("%s is not announced yet: %s asks whether somebody else uses it", d.VIP, d.Owner)
		}
		return lb.ReasonAnnounceFailed,
			fmt.Sprintf("%s cannot be announced from its owner %s: it answers on no interface", d.VIP, d.Owner)
	}
	byReason := map[lb.Reason][]string{}
	for _, w := range d.Nodes {
		if w.Answering {
			return lb.ReasonParting,
				fmt.Sprintf("%s is announced from %s for want of another node, as this one should not: %s", d.VIP, w.Node, w.Reason)
		}
		byReason[w.Reason] = append(byReason[w.Reason], w.Node)
	}
	reasons := slices.SortedFunc(maps.Keys(byReason), func(a, b lb.Reason) int {
		return cmp.Or(len(byReason[b])-len(byReason[a]), strings.Compare(string(a), string(b)))
	})
	var parts []string
	for _, r := range reasons {
		parts = append(parts, fmt.Sprintf("%s on %s", r, some(byReason[r], 3)))
	}
	why := strings.Join(parts, ", ")
	reason := onlyObstacle(reasons)
	if reason != lb.ReasonNoOwner {
		why = d.sentence(self, reason)
		if len(reasons) > 1 {
			why += " (" + strings.Join(parts, ", ") + ")"
		}
	}
	return reason, fmt.Sprintf("no node announces %s: %s", d.VIP, why)
}

// onlyObstacle returns the one reason that stands in the way, or ReasonNoOwner if there are
// several. Nodes that are out by themselves, whatever the VIP, do not hide what keeps the others
// from announcing it.
func onlyObstacle(reasons []lb.Reason) lb.Reason {
	if len(reasons) == 1 {
		return reasons[0]
	}
	others := slices.DeleteFunc(slices.Clone(reasons), func(r lb.Reason) bool {
		return r == lb.ReasonNodeExcluded || r == lb.ReasonNodeLeaving || r == lb.ReasonStopping || r == lb.ReasonMissing
	})
	if len(others) == 1 {
		return others[0]
	}
	return lb.ReasonNoOwner
}

// how says over what the VIP is announced, which this node knows of itself only.
func (d Decision) how(self string) string {
	if d.Owner != self || len(d.Answer) == 0 {
		return ""
	}
	return fmt.Sprintf("%s on %s", protocol(d.VIP), strings.Join(d.Answer, ", "))
}

func protocol(vip netip.Addr) string {
	if vip.Is4() {
		return "ARP"
	}
	return "NDP"
}

// sentence prefers this node's own details for a reason that all nodes share.
func (d Decision) sentence(self string, reason lb.Reason) string {
	for _, w := range d.Nodes {
		if w.Node == self && w.Reason == reason {
			return w.Message
		}
	}
	return Describe(reason)
}

// maxRouting is how many nodes are named that announce routes.
const maxRouting = 8

// some names at most that many nodes.
func some(nodes []string, most int) string {
	if len(nodes) <= most {
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(nodes[:most-1], ", "), len(nodes)-most+1)
}
