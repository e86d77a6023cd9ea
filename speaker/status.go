package main

import (
	"encoding/json"
	"net/http"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// status is what /v1/status shows.
type status struct {
	Node string `json:"node"`
	// Waiting names what the speaker needs before it can plan anything; absent once it has it.
	Waiting    string            `json:"waiting,omitempty"`
	Stopping   bool              `json:"stopping,omitempty"`
	Gate       gateStatus        `json:"gate"`
	Members    membersStatus     `json:"members"`
	Interfaces []interfaceStatus `json:"interfaces"`
	VIPs       []vipStatus       `json:"vips"`
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
}

type interfaceStatus struct {
	Name      string         `json:"name"`
	MAC       string         `json:"mac,omitempty"`
	Up        bool           `json:"up"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	Problem   string         `json:"problem,omitempty"`
}

type vipStatus struct {
	VIP      netip.Addr `json:"vip"`
	Services []string   `json:"services"`
	Owner    string     `json:"owner,omitempty"`
	// Answering are this node's interfaces that answer for the VIP now.
	Answering []string        `json:"answering,omitempty"`
	Handover  bool            `json:"handover,omitempty"`
	Nodes     []plan.NodeWord `json:"nodes"`
}

func (s *speaker) status() status {
	interfaces, _ := s.from.interfaces()
	outcome := s.to.l2.Outcome()
	st := status{
		Node: s.self, Gate: s.gateStatus(), Members: membersStatus{Joined: s.from.members.Joined(), Live: s.from.members.Live()},
		Interfaces: []interfaceStatus{}, VIPs: []vipStatus{},
	}
	for _, i := range interfaces {
		st.Interfaces = append(st.Interfaces, interfaceStatus{
			Name: i.Name, MAC: i.MAC.String(), Up: i.Up, Addresses: i.Addresses, Problem: outcome.Problems[i.Name],
		})
	}
	for _, d := range s.snapshot() {
		v := vipStatus{VIP: d.VIP, Owner: d.Owner, Answering: outcome.Answering[d.VIP], Handover: d.Handover, Nodes: d.Nodes}
		for _, key := range d.Services {
			v.Services = append(v.Services, key.String())
		}
		st.VIPs = append(st.VIPs, v)
	}
	s.mu.Lock()
	st.Waiting, st.Stopping = s.waiting, s.stopping
	s.mu.Unlock()
	return st
}

func (s *speaker) gateStatus() gateStatus {
	if s.from.feed == nil {
		return gateStatus{Kind: "none", Checks: "endpoints only: whether the node's rules deliver the address is not known", Connected: true}
	}
	return gateStatus{
		Kind: "proxy", Checks: "the kernel of this node holds every rule of the address, as its proxy says",
		Reason: s.from.feed.Reason(), Connected: s.from.feed.Connected(),
	}
}

func (s *speaker) serveStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(s.status()) // the client has gone
}
