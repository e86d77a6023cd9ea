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

// NodeStatus is why one node does or does not announce a VIP.
type NodeStatus struct {
	Node string `json:"node"`
	// Reason is ReasonAnnounced, ReasonNotOwner, or why the node does not claim the VIP.
	Reason  lb.Reason `json:"reason"`
	Message string    `json:"message"`
	Claims  bool      `json:"claims"`
	// Answering is set while the node answers, or BGP peers hear of the VIP from it, which may also be
	// so during a handover.
	Answering bool `json:"answering"`
	// Peers are the BGP peers that hear of the VIP from the node.
	Peers PeerNames `json:"peers,omitempty"`
	// Routed is set while peers hear of the VIP from the node and go on to.
	Routed bool `json:"routed,omitempty"`
}

// sayings is what the nodes say of a VIP. In a large cluster most say one of a few things, so each of these is kept
// once: a status of each node for each VIP would fill the memory.
type sayings struct {
	self          string
	live, missing []string // shared with other decisions
	kinds         []saying // all differ; the first is what most live nodes say
	others        []other  // live nodes that say something else, in order
}

// other is a node that says something else than most, by its place in live, and what, by its place in kinds.
type other struct{ node, kind int32 }

// saying is what one node says; told is false for one that has said nothing yet.
type saying struct {
	claim Claim // as far as statuses show it
	told  bool
}

// sayingsOf keeps what is known of the nodes, with what this one has decided.
func sayingsOf(f Facts, in Input, d Decision) sayings {
	own := d.Claim(len(in.Answering) > 0)
	return sayingsBy(f, func(node string) saying {
		claim, told := in.Claims[node]
		if node == f.Self {
			claim, told = own, true
		}
		claim.Weight, claim.Parted, claim.Stale = 0, false, false
		return saying{claim, told}
	})
}

// sayingsBy keeps what each live node says.
func sayingsBy(f Facts, of func(node string) saying) sayings {
	usual, ahead := saying{}, 0
	for _, node := range f.Live { // what more than half of them say is left over
		switch one := of(node); {
		case ahead == 0:
			usual, ahead = one, 1
		case one == usual:
			ahead++
		default:
			ahead--
		}
	}
	s := sayings{self: f.Self, live: f.Live, missing: f.Missing, kinds: []saying{usual}}
	var kinds map[saying]int32
	for i, node := range f.Live {
		one := of(node)
		if one == usual {
			continue
		}
		kind, known := kinds[one]
		if !known {
			if kinds == nil {
				kinds = map[saying]int32{}
			}
			kind = int32(len(s.kinds))
			s.kinds, kinds[one] = append(s.kinds, one), kind
		}
		s.others = append(s.others, other{int32(i), kind})
	}
	return s
}

// of returns what the live node at this place says.
func (s sayings) of(place int) saying {
	i, found := slices.BinarySearchFunc(s.others, int32(place),
		func(o other, at int32) int { return cmp.Compare(o.node, at) })
	if found {
		return s.kinds[s.others[i].kind]
	}
	return s.kinds[0]
}

// Nodes returns the status of each live or missing node, sorted by name. Of the others this node
// knows the reason only, not the details.
func (d Decision) Nodes() []NodeStatus {
	found := make([]NodeStatus, 0, len(d.said.live)+len(d.said.missing))
	for place := range d.said.live {
		found = append(found, d.live(place))
	}
	for _, node := range d.said.missing {
		found = append(found, NodeStatus{Node: node, Reason: lb.ReasonMissing, Message: Describe(lb.ReasonMissing)})
	}
	slices.SortFunc(found, func(a, b NodeStatus) int { return strings.Compare(a.Node, b.Node) })
	return found
}

// Node returns the status of one live node; ok is false for any other.
func (d Decision) Node(name string) (status NodeStatus, ok bool) {
	place := slices.Index(d.said.live, name)
	if place < 0 {
		return NodeStatus{}, false
	}
	return d.live(place), true
}

// Served reports whether a live node answers, or BGP peers hear of the VIP from one.
func (d Decision) Served() bool {
	serves := func(s saying) bool { return s.claim.Answering || s.claim.Routes != "" }
	return slices.ContainsFunc(d.said.kinds, serves)
}

// Parting reports whether this node announces the VIP although it should not, as no other live node can, or goes on to
// once a BGP peer is back, and no node answers ARP or NDP meanwhile.
func (d Decision) Parting() bool {
	own, ok := d.Node(d.said.self)
	if !ok || own.Routed {
		return false
	}
	routed := func(s saying) bool { return s.claim.Routes != "" && s.claim.Unrouted == "" }
	parts := len(d.Routed.Peers) > 0 || d.Routed.Lingers && d.Owner == ""
	if parts && !slices.ContainsFunc(d.said.kinds, routed) {
		return true
	}
	return d.Owner == "" && d.said.of(slices.Index(d.said.live, d.said.self)).claim.Answering
}

// live returns the status of the live node at this place.
func (d Decision) live(place int) NodeStatus {
	node := d.said.live[place]
	said, self := d.said.of(place), node == d.said.self
	claim := said.claim
	w := NodeStatus{Node: node, Reason: claim.Reason, Claims: said.told && claim.Reason == "", Answering: claim.Answering}
	switch {
	case !said.told:
		w.Reason, w.Message = lb.ReasonUnheard, Describe(lb.ReasonUnheard)
	case claim.Reason != "" && self:
		w.Message = d.Refusal.Message
	case claim.Reason != "":
		w.Message = Describe(claim.Reason)
	case node == d.Owner && claim.Held:
		w.Reason, w.Message = lb.ReasonAnnounced,
			"the node's speaker stopped a moment ago and is expected back; the node still forwards"
	case node == d.Owner && claim.Answering:
		w.Reason, w.Message = lb.ReasonAnnounced, Describe(lb.ReasonAnnounced)
		if self && len(d.ConflictingHosts) > 0 {
			w.Message += fmt.Sprintf(", which %s uses too%s", d.ConflictingHosts[0],
				others(d.ConflictingHosts, ", and others do"))
		}
	case node == d.Owner && len(d.Probe) > 0:
		w.Reason, w.Message = lb.ReasonProbing, Describe(lb.ReasonProbing)
	case node == d.Owner && self && d.Flapping:
		w.Reason, w.Message = lb.ReasonFlapping, Describe(lb.ReasonFlapping)
	case node == d.Owner:
		w.Reason, w.Message = lb.ReasonAnnounceFailed, "the node owns the address and does not answer for it yet"
	default:
		w.Reason, w.Message = lb.ReasonNotOwner, fmt.Sprintf("the node can deliver; %s owns the address", d.Owner)
	}
	w.addRoutes(claim, node == d.Owner)
	if w.Reason == claim.Unrouted && self && d.Routed.Refusal != nil {
		w.Message = d.Routed.Refusal.Message
	}
	return w
}

// addRoutes adds to the status of a node what it says of BGP. Where no L2Advertisement is for the
// VIP, that is all there is to say.
func (w *NodeStatus) addRoutes(claim Claim, owner bool) {
	w.Peers, w.Routed = claim.Routes, claim.Routes != "" && claim.Unrouted == ""
	w.Answering = w.Answering || claim.Routes != ""
	switch {
	case w.Routed && owner:
		w.Message += ", and announces a route to it to " + claim.Routes.String()
	case w.Routed:
		w.Claims = true
		w.Reason, w.Message = lb.ReasonAnnounced, "the node announces a route to the address to "+claim.Routes.String()
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
		return "this node's proxy has not reported yet which rules its kernel holds"
	case lb.ReasonFeedLost:
		return "this node's proxy has been disconnected for longer than --hold"
	case lb.ReasonNotProgrammed:
		return "this node's kernel does not hold every rule for the address"
	case lb.ReasonFrontendInUse:
		return "another Service uses the address and port"
	case lb.ReasonNoBackends:
		return "no endpoint is usable on any node"
	case lb.ReasonNoLocalBackends:
		return "externalTrafficPolicy is Local and no endpoint on this node is usable"
	case lb.ReasonNodeLeaving:
		return "the node is leaving the cluster"
	case lb.ReasonNodeDrained:
		return "the node is drained: it carries the label " + lb.LabelDrain
	case lb.ReasonNodeExcluded:
		return "the node carries the label " + LabelExclude
	case lb.ReasonNetworkUnavailable:
		return "the Node has the condition NetworkUnavailable: its network plugin (CNI) has not set up the network"
	case lb.ReasonNodeNotReady:
		return "the Node is not ready, and speakers announce from ready nodes only (--require-ready)"
	case lb.ReasonNoCarrier:
		return "an interface that packets have to pass is down or has no carrier"
	case lb.ReasonForwardingOff:
		return "the node's kernel forwards no packets to endpoints"
	case lb.ReasonPodRouteMissing:
		return "the node's kernel has no route to an endpoint"
	case lb.ReasonConntrackFull:
		return "the node's table of connections is full"
	case lb.ReasonNodeUnknown:
		return "the API server has no Node object of this node"
	case lb.ReasonStopping:
		return "the speaker is stopping"
	case lb.ReasonNotJoined:
		return "the speaker has not met the others yet"
	case lb.ReasonFamilyUnspoken:
		return "the node's speaker does not announce addresses of this family"
	case lb.ReasonTooManyVIPs:
		return fmt.Sprintf("the Services of the cluster have more than the %d addresses that speakers announce", MaxVIPs)
	case lb.ReasonUnheard:
		return "the node has not reported on the address yet"
	case lb.ReasonNotEstablished:
		return "the node has no established BGP session that carries the address"
	case lb.ReasonMissing:
		return "the node's speaker has stopped answering the others"
	case lb.ReasonYielded:
		return "the node is cut off from a majority of the speakers, which answers for the address"
	case lb.ReasonCutOff:
		return "the node may have been cut off, and takes no address before it has heard another speaker"
	case lb.ReasonProbing:
		return "the node probes whether another device uses the address before it announces it for the first time"
	case lb.ReasonFlapping:
		return "the address was announced and withdrawn so often in a row that its next announcement waits (--flap-interval)"
	case lb.ReasonProbedAhead:
		return "the node has probed the address ahead, and has not reported on the Service yet"
	case lb.ReasonAddressConflict:
		return "a device that is not one of the speakers' nodes uses the address"
	case lb.ReasonAnnounced:
		return "this node answers for the address"
	}
	return string(reason)
}

// Report is what the reporter of a Service writes about it.
type Report struct {
	Announced     bool
	Reason        lb.Reason
	Message       string
	Announcements []lb.Announcement
}

// Status returns the report as it is written to the Service. It shortens the message about a Service with many VIPs
// that many nodes announce: the API server refuses a longer one.
func (r Report) Status() lb.AnnouncedStatus {
	return lb.AnnouncedStatus{
		Condition: lb.Condition{Type: lb.ConditionAnnounced, Status: r.Announced, Reason: r.Reason,
			Message: lb.Shortened(r.Message, lb.MaxMessage)},
		Announcements: lb.EncodeAnnouncements(r.Announcements),
	}
}

// Refused returns the report for a Service of which the nodes do not serve every frontend, whoever
// announces its addresses.
func (r Report) Refused(why *lb.Refusal) Report {
	r.Announced, r.Reason, r.Message = false, why.Reason, why.Message+"; "+r.Message
	return r
}

// Noting returns the report with a setting of the Service that the nodes do not follow, and why.
func (r Report) Noting(why *lb.Refusal) Report {
	r.Message += "; " + why.Message
	return r
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
		a, message := d.announcement(self)
		report.Announcements = append(report.Announcements, a)
		messages = append(messages, message)
		switch {
		case a.Reason == lb.ReasonAnnounced:
		case !report.Announced:
		case a.Reason == lb.ReasonParting, a.Reason == lb.ReasonContested:
			report.Reason = a.Reason
		default:
			report.Announced, report.Reason = false, a.Reason
		}
	}
	report.Message = strings.Join(messages, "; ")
	return report, true
}

// For returns the report for one of the Services on the VIPs. One that joined the address of
// another is announced from nodes that need not deliver it; the reporter tells of itself.
func (r Report) For(service lb.Key, self string, decisions []Decision) Report {
	for _, d := range decisions {
		refusal := d.Undelivered[service]
		if refusal == nil || d.Owner != self && len(d.Routed.Peers) == 0 {
			continue
		}
		r.Announced, r.Reason = false, refusal.Reason
		r.Message += fmt.Sprintf("; %s announces %s for another Service, and does not deliver this one: %s", self, d.VIP,
			refusal.Message)
	}
	return r
}

// announcement says who announces the VIP, or why nobody does: as data and in a sentence.
func (d Decision) announcement(self string) (lb.Announcement, string) {
	routed := slices.DeleteFunc(d.Nodes(), func(w NodeStatus) bool { return !w.Routed })
	routes := routesOf(routed)
	a := lb.Announcement{VIP: d.VIP, Routes: routes}
	var sentences []string
	if len(routes) == 0 || d.Owner != "" {
		sentences = append(sentences, d.answers(self, &a))
	}
	others := 0
	for i, r := range routes {
		if i >= lb.MaxNamedNodes {
			others += len(r.Nodes)
			continue
		}
		sentences = append(sentences, fmt.Sprintf("%s is announced from %s", d.VIP, routeText(r)))
	}
	if others > 0 {
		sentences = append(sentences, fmt.Sprintf("%s is announced from %d more nodes to other BGP peers", d.VIP, others))
	}
	// Routes announce the VIP whatever keeps ARP and NDP from it, but they do not end a conflict.
	if len(a.Routes) > 0 && a.Reason != lb.ReasonContested && a.Reason != lb.ReasonParting {
		a.Reason = lb.ReasonAnnounced
	}
	return a, strings.Join(sentences, "; ")
}

// routesOf says from which of the nodes which peers hear of the VIP: the peers that most nodes announce it to first.
func routesOf(nodes []NodeStatus) []lb.RouteAnnouncement {
	byPeers := map[PeerNames][]string{}
	for _, w := range nodes {
		byPeers[w.Peers] = append(byPeers[w.Peers], w.Node)
	}
	var found []lb.RouteAnnouncement
	for _, peers := range slices.SortedFunc(maps.Keys(byPeers), func(a, b PeerNames) int {
		return cmp.Or(len(byPeers[b])-len(byPeers[a]), cmp.Compare(a, b))
	}) {
		found = append(found, lb.RouteAnnouncement{Peers: peers.List(), Nodes: byPeers[peers]})
	}
	return found
}

// answers adds to an announcement who answers ARP and NDP for the VIP, or why nobody does, and says
// it in a sentence.
func (d Decision) answers(self string, a *lb.Announcement) string {
	if w, ok := d.Node(d.Owner); ok {
		return d.ownerAnswers(self, w, a)
	}
	nodes := d.Nodes()
	parting := slices.DeleteFunc(slices.Clone(nodes), func(w NodeStatus) bool { return !w.Answering })
	if len(parting) > 0 {
		return d.parts(parting, a)
	}
	byReason := map[lb.Reason][]string{}
	for _, w := range nodes {
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
	a.Reason = onlyObstacle(reasons)
	if a.Reason != lb.ReasonNoOwner {
		why = d.sentence(self, a.Reason)
		if len(reasons) > 1 {
			why += " (" + strings.Join(parts, ", ") + ")"
		}
	}
	return fmt.Sprintf("no node announces %s: %s", d.VIP, why)
}

// parts is answers where these nodes announce the VIP, and none of them should: the first that answers ARP or NDP, and
// those that BGP peers hear of it from.
func (d Decision) parts(nodes []NodeStatus, a *lb.Announcement) string {
	a.Reason = lb.ReasonParting
	var from, named []string
	reasons := map[string]bool{}
	for _, w := range nodes {
		answers := d.said.of(slices.Index(d.said.live, w.Node)).claim.Answering
		if answers && a.Owner == "" {
			a.Owner, a.Protocol = w.Node, protocol(d.VIP)
			from = append(from, w.Node)
		}
		if a.Owner == w.Node || w.Peers != "" {
			named, reasons[string(w.Reason)] = append(named, w.Node), true
		}
	}
	a.Routes = routesOf(slices.DeleteFunc(nodes, func(w NodeStatus) bool { return w.Peers == "" }))
	for _, r := range a.Routes[:min(len(a.Routes), lb.MaxNamedNodes)] {
		from = append(from, routeText(r))
	}
	which := "that node"
	if len(named) > 1 {
		which = "those nodes"
	}
	return fmt.Sprintf("%s is announced from %s, although %s should not announce it (%s): "+
		"no other node can take it over", d.VIP, strings.Join(from, " and from "), which,
		strings.Join(slices.Sorted(maps.Keys(reasons)), ", "))
}

// routeText says which nodes announce a route to which peers.
func routeText(r lb.RouteAnnouncement) string {
	return fmt.Sprintf("%s (BGP to %s)", some(r.Nodes, lb.MaxNamedNodes), some(r.Peers, lb.MaxNamedNodes))
}

// ownerAnswers is answers where the VIP has an owner, of which w is the status.
func (d Decision) ownerAnswers(self string, w NodeStatus, a *lb.Announcement) string {
	switch w.Reason {
	case lb.ReasonAnnounced:
	case lb.ReasonProbing:
		a.Reason = w.Reason
		return fmt.Sprintf("%s is not announced yet: %s probes whether another device uses it", d.VIP, d.Owner)
	case lb.ReasonFlapping:
		a.Reason = w.Reason
		return fmt.Sprintf("%s is not announced yet: %s", d.VIP, w.Message)
	default:
		a.Reason = lb.ReasonAnnounceFailed
		return fmt.Sprintf("%s cannot be announced from its owner %s: it answers on no interface", d.VIP, d.Owner)
	}
	a.Reason, a.Owner, a.Protocol = lb.ReasonAnnounced, d.Owner, protocol(d.VIP)
	sentence := fmt.Sprintf("%s is announced from %s", d.VIP, d.Owner)
	if d.Owner != self {
		return sentence // only the owner knows its interfaces
	}
	if len(d.Answer) > 0 {
		a.Interfaces = d.Answer
		sentence += fmt.Sprintf(" (%s on %s)", a.Protocol, strings.Join(d.Answer, ", "))
	}
	if len(d.ConflictingHosts) > 0 {
		a.Reason = lb.ReasonContested
		sentence += fmt.Sprintf("; %s is in use by %s, too, which is not one of the speakers' nodes%s", d.VIP,
			d.ConflictingHosts[0], others(d.ConflictingHosts, ", and by others"))
	}
	return sentence
}

// onlyObstacle returns the one reason that stands in the way, or ReasonNoOwner if there are
// several. Nodes that are out by themselves, whatever the VIP, do not hide what keeps the others
// from announcing it.
func onlyObstacle(reasons []lb.Reason) lb.Reason {
	if len(reasons) == 1 {
		return reasons[0]
	}
	others := slices.DeleteFunc(slices.Clone(reasons), func(r lb.Reason) bool {
		switch r {
		case lb.ReasonNodeExcluded, lb.ReasonNodeLeaving, lb.ReasonNodeDrained, lb.ReasonStopping, lb.ReasonMissing,
			lb.ReasonNetworkUnavailable, lb.ReasonNodeNotReady:
			return true
		}
		return false
	})
	if len(others) == 1 {
		return others[0]
	}
	return lb.ReasonNoOwner
}

func protocol(vip netip.Addr) string {
	if vip.Is4() {
		return "ARP"
	}
	return "NDP"
}

// sentence prefers this node's own details for a reason that all nodes share.
func (d Decision) sentence(self string, reason lb.Reason) string {
	if w, ok := d.Node(self); ok && w.Reason == reason {
		return w.Message
	}
	return Describe(reason)
}

// some names at most that many nodes.
func some(nodes []string, most int) string {
	if len(nodes) <= most {
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(nodes[:most-1], ", "), len(nodes)-most+1)
}
