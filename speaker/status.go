package main

import (
	"io"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// status is what /v1/status shows, ahead of the list "vips".
type status struct {
	Node string `json:"node"`
	// Waiting names what the speaker needs before it can plan anything; absent once it has it.
	Waiting    string            `json:"waiting,omitempty"`
	Stopping   bool              `json:"stopping,omitempty"`
	Gate       gateStatus        `json:"gate"`
	Members    membersStatus     `json:"members"`
	Interfaces []interfaceStatus `json:"interfaces"`
	// Answering counts the VIPs for which the node answers ARP or NDP now.
	Answering int         `json:"answering"`
	Ahead     aheadStatus `json:"ahead"`
	BGP       bgpStatus   `json:"bgp"`
	// Findings are what keeps announcements of this node from clients, beside the speaker.
	Findings []lb.Finding `json:"findings,omitempty"`
	// Withheld are VIPs that this node does not announce for a cause in the node itself, the first one for
	// each reason.
	Withheld []withheldStatus `json:"withheld,omitempty"`
	// Parting are the VIPs that this node announces although it should not, as no other node can.
	Parting partingStatus `json:"parting,omitzero"`
}

// partingStatus counts VIPs, and names the Services of the first ones.
type partingStatus struct {
	Count    int      `json:"count,omitempty"`
	Services []string `json:"services,omitempty"`
}

// maxParting is how many Services are named.
const maxParting = 8

func (p *partingStatus) add(d plan.Decision) {
	if !d.Parting() {
		return
	}
	p.Count++
	for _, key := range d.Services {
		if len(p.Services) < maxParting && !slices.Contains(p.Services, key.String()) {
			p.Services = append(p.Services, key.String())
		}
	}
}

type withheldStatus struct {
	VIP   netip.Addr `json:"vip"`
	Count int        `json:"count"` // of VIPs with this reason
	lb.Refusal
}

// aheadStatus counts the addresses that Services get next and that this node may announce.
type aheadStatus struct {
	Wanted int `json:"wanted"`
	// Clear are those that a node has probed lately without an answer.
	Clear int `json:"clear"`
}

type gateStatus struct {
	Kind string `json:"kind"`
	// Checks says what a claim of this node rests on.
	Checks string `json:"checks"`
	// Reason says why nothing is claimed: FeedUnknown or FeedLost.
	Reason    lb.Reason `json:"reason,omitempty"`
	Connected bool      `json:"connected"`
}

type membersStatus struct {
	Joined bool     `json:"joined"`
	Live   []string `json:"live"`
	// Missing have stopped answering without taking their leave; Dead are those of them whose kernels
	// do not answer either.
	Missing []string `json:"missing,omitempty"`
	Dead    []string `json:"dead,omitempty"`
	// Strange are nodes of the cluster on which no speaker has been met.
	Strange []string `json:"withoutSpeaker,omitempty"`
	// Majority is set while the live ones are most of those that are live or missing.
	Majority bool `json:"majority"`
	// Trouble says which others cannot be joined, and why.
	Trouble string `json:"trouble,omitempty"`
	// Elsewhere is what a majority that this node does not see says of itself over the API server.
	Elsewhere *lb.Witness `json:"elsewhere,omitempty"`
}

type interfaceStatus struct {
	Name      string         `json:"name"`
	MAC       string         `json:"mac,omitempty"`
	Up        bool           `json:"up"`
	MTU       int            `json:"mtu,omitempty"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	Problem   string         `json:"problem,omitempty"`
}

type vipStatus struct {
	VIP      netip.Addr `json:"vip"`
	Services []string   `json:"services"`
	Owner    string     `json:"owner,omitempty"`
	// Answering are this node's interfaces that answer for the VIP now.
	Answering []string `json:"answering,omitempty"`
	Handover  bool     `json:"handover,omitempty"`
	// Probing is set while this node probes for a conflicting host.
	Probing bool `json:"probing,omitempty"`
	// ConflictingHosts are the conflicting hosts that this node has seen lately.
	ConflictingHosts []plan.ConflictingHost `json:"conflictingHosts,omitempty"`
	Nodes            []plan.NodeStatus      `json:"nodes"`
	// Routes says how this node announces the VIP over BGP; absent if no BGPAdvertisement is for it.
	Routes *routeStatus `json:"routes,omitempty"`
}

// snapshot copies the decisions, sorted by VIP.
func (s *speaker) snapshot() []plan.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rooms.ownership.Decisions()
}

func (s *speaker) status() status {
	interfaces, _ := s.from.interfaces()
	outcome := s.to.l2.Outcome()
	st := status{
		Node: s.self, Gate: s.gateStatus(), Members: s.membersStatus(), Interfaces: []interfaceStatus{}, BGP: s.bgpStatus(),
		Answering: len(outcome.Answering),
	}
	st.Withheld, st.Parting = s.withheld()
	for _, i := range interfaces {
		st.Interfaces = append(st.Interfaces, interfaceStatus{
			Name: i.Name, MAC: i.MAC.String(), Up: i.Up, MTU: i.MTU, Addresses: i.Addresses, Problem: outcome.Problems[i.Name],
		})
	}
	if s.found != nil {
		st.Findings = s.found()
	}
	s.mu.Lock()
	st.Waiting, st.Stopping = s.phase.waiting, s.phase.stopping
	st.Ahead.Wanted, st.Ahead.Clear = s.rooms.ahead.Counts(s.self)
	s.mu.Unlock()
	if s.trouble != nil {
		st.Waiting = ops.Waiting(st.Waiting, s.trouble())
		st.BGP.Waiting = ops.Waiting(st.BGP.Waiting, s.trouble())
	}
	return st
}

// statusPiece is how many VIPs are described at a time: the loop waits no longer than that takes.
const statusPiece = 64

// vips describes all VIPs in their order. It looks at a few at a time, so that it neither copies
// all nor holds up the loop.
func (s *speaker) vips() iter.Seq[vipStatus] {
	return func(yield func(vipStatus) bool) {
		s.mu.Lock()
		vips := s.rooms.ownership.VIPs()
		s.mu.Unlock()
		slices.SortFunc(vips, netip.Addr.Compare)
		for piece := range slices.Chunk(vips, statusPiece) {
			for _, v := range s.describe(piece) {
				if !yield(v) {
					return
				}
			}
		}
	}
}

// withheld counts the VIPs that this node does not announce for a cause in the node itself, and those that it announces
// as no other node can. It too looks at a few at a time.
func (s *speaker) withheld() (all []withheldStatus, parting partingStatus) {
	s.mu.Lock()
	vips := s.rooms.ownership.VIPs()
	s.mu.Unlock()
	slices.SortFunc(vips, netip.Addr.Compare)
	look := func(vip netip.Addr) {
		d, _ := s.rooms.ownership.Decision(vip)
		parting.add(d)
		n, ok := d.Node(s.self)
		if !ok || !lb.OfNode(n.Reason) {
			return
		}
		if i := slices.IndexFunc(all, func(w withheldStatus) bool { return w.Reason == n.Reason }); i >= 0 {
			all[i].Count++
			return
		}
		all = append(all, withheldStatus{vip, 1, lb.Refusal{Reason: n.Reason, Message: n.Message}})
	}
	for piece := range slices.Chunk(vips, statusPiece) {
		s.mu.Lock()
		for _, vip := range piece {
			look(vip)
		}
		s.mu.Unlock()
	}
	return all, parting
}

// describe returns the status of those VIPs that are still there.
func (s *speaker) describe(vips []netip.Addr) []vipStatus {
	outcome := s.to.l2.Outcome()
	all := make([]vipStatus, 0, len(vips))
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, vip := range vips {
		d, ok := s.rooms.ownership.Decision(vip)
		if !ok {
			continue
		}
		v := vipStatus{VIP: d.VIP, Owner: d.Owner, Answering: outcome.Answering[d.VIP], Handover: d.Handover,
			Probing: len(d.Probe) > 0, ConflictingHosts: d.ConflictingHosts, Nodes: d.Nodes(), Routes: s.routeStatus(d.VIP)}
		for _, key := range d.Services {
			v.Services = append(v.Services, key.String())
		}
		all = append(all, v)
	}
	return all
}

func (s *speaker) membersStatus() membersStatus {
	seen := s.from.liveness.Sight()
	st := membersStatus{Joined: s.from.members.Joined(), Live: seen.Live, Missing: seen.Missing, Dead: seen.Dead,
		Majority: seen.Majority, Trouble: s.from.members.Trouble()}
	for node := range s.from.nodes.All() {
		if !slices.Contains(seen.Live, node) && !slices.Contains(seen.Missing, node) {
			st.Strange = append(st.Strange, node)
		}
	}
	slices.Sort(st.Strange)
	if said, heard := s.to.witness.Outcome(); heard && !st.Majority {
		st.Elsewhere = &said
	}
	return st
}

func (s *speaker) gateStatus() gateStatus {
	if s.from.feed == nil {
		return gateStatus{Kind: "none", Checks: "endpoints only: whether the node's rules deliver the address is not known",
			Connected: true}
	}
	return gateStatus{
		Kind: "proxy", Checks: "the kernel of this node holds every rule of the address, as its proxy says",
		Reason: s.from.feed.Reason(), Connected: s.from.feed.Connected(),
	}
}

// writeStatus writes the status, with all VIPs or only the one that is asked for.
func (s *speaker) writeStatus(w io.Writer, only string) error {
	vips := s.vips()
	if only != "" {
		var asked []netip.Addr
		for one := range strings.SplitSeq(only, ",") {
			vip, _ := netip.ParseAddr(one) // what is no address has no status
			asked = append(asked, vip)
		}
		vips = slices.Values(s.describe(asked))
	}
	return ops.WriteStatus(w, s.status(), "vips", vips)
}
