package lb

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// ConditionServing on a Service: for each of its addresses a node answers whose kernel is confirmed
// to deliver it to a usable endpoint. It follows ConditionAnnounced, except while the last node
// still answers for an address that it should withdraw.
const ConditionServing = "landfall.dev/Serving"

// Reasons of ConditionServing and ConditionAnnounced.
const (
	ReasonServing Reason = "Serving" // a node that delivers the address announces it
	ReasonParting Reason = "Parting" // the node that answers should withdraw, and no other node can answer
)

// Serving returns the condition Serving that goes with the condition Announced.
func Serving(announced Condition) Condition {
	c := announced
	c.Type = ConditionServing
	c.Status = announced.Status && announced.Reason == ReasonAnnounced
	if c.Status {
		c.Reason = ReasonServing
	}
	return c
}

// AnnotationAnnouncements on a Service says who announces its addresses, as data: see
// EncodeAnnouncements. The speakers write it together with the condition Announced.
const AnnotationAnnouncements = "landfall.dev/announcements"

// AnnouncedStatus is what a speaker writes to a Service: a condition for people, and the same as
// data for programs.
type AnnouncedStatus struct {
	Condition Condition
	// Announcements is the value of AnnotationAnnouncements; "" removes it.
	Announcements string
}

// ShownBy reports whether the Service shows the status and the condition Serving that goes with it.
func (a AnnouncedStatus) ShownBy(s Service) bool {
	return s.Announcements == a.Announcements && slices.Contains(s.Conditions, a.Condition) &&
		slices.Contains(s.Conditions, Serving(a.Condition))
}

// Announcement says which nodes announce one VIP, or why no node does.
type Announcement struct {
	VIP netip.Addr `json:"vip"`
	// Reason is ReasonAnnounced, ReasonParting or ReasonContested while the VIP is announced, else why
	// it is not.
	Reason Reason `json:"reason"`
	// Owner is the node that answers ARP or NDP; "" when none does. Interfaces are those that it
	// answers on, where the node that reports knows them, which is where it is the owner itself.
	Owner      string   `json:"owner,omitempty"`
	Protocol   string   `json:"protocol,omitempty"` // ARP or NDP
	Interfaces []string `json:"interfaces,omitempty"`
	// Routes say which BGP peers hear of the VIP from which nodes.
	Routes []RouteAnnouncement `json:"routes,omitempty"`
	// OtherNodes counts the nodes that announce a route and are in none of Routes.
	OtherNodes int `json:"otherNodes,omitempty"`
}

// RouteAnnouncement is a set of nodes that announce a VIP to the same BGP peers.
type RouteAnnouncement struct {
	Peers []string `json:"peers"`
	Nodes []string `json:"nodes"`
	// OtherNodes counts the nodes that are left out of Nodes.
	OtherNodes int `json:"otherNodes,omitempty"`
}

// Limits of the annotation: it is copied to every node with each change of its Service.
const (
	// MaxNamedNodes is how many nodes a route names, and how many routes an announcement has.
	MaxNamedNodes = 8
	// MaxAnnouncementsSize is the most bytes of the annotation. Names are left out of one that would
	// be larger.
	MaxAnnouncementsSize = 16 << 10
	// announcementsVersion changes when readers would misunderstand what is written.
	announcementsVersion = 1
)

// announcements is the annotation's form.
type announcements struct {
	Version int            `json:"version"`
	VIPs    []Announcement `json:"vips"`
}

// EncodeAnnouncements returns the annotation's value, "" for an empty list.
func EncodeAnnouncements(list []Announcement) string {
	if len(list) == 0 {
		return ""
	}
	for names := MaxNamedNodes; ; names /= 2 {
		written := announcements{Version: announcementsVersion}
		for _, a := range list {
			written.VIPs = append(written.VIPs, a.shortened(names))
		}
		encoded, err := json.Marshal(written)
		if err != nil {
			panic(err) // strings and numbers only
		}
		if len(encoded) <= MaxAnnouncementsSize || names == 0 {
			return string(encoded)
		}
	}
}

// shortened returns the announcement with at most that many routes, peers and names of nodes in
// each, and interfaces.
func (a Announcement) shortened(most int) Announcement {
	routes := a.Routes
	a.Routes, a.Interfaces = nil, a.Interfaces[:min(len(a.Interfaces), most)]
	for i, r := range routes {
		if i >= most {
			a.OtherNodes += len(r.Nodes) + r.OtherNodes
			continue
		}
		named := min(len(r.Nodes), most)
		a.Routes = append(a.Routes, RouteAnnouncement{Peers: r.Peers[:min(len(r.Peers), most)], Nodes: r.Nodes[:named],
			OtherNodes: r.OtherNodes + len(r.Nodes) - named})
	}
	return a
}

// DecodeAnnouncements reads the annotation's value. Whoever may edit a Service may write anything
// there, so what is no announcement of this version is refused as a whole.
func DecodeAnnouncements(value string) ([]Announcement, error) {
	if value == "" {
		return nil, nil
	}
	refuse := func(err error) ([]Announcement, error) {
		return nil, fmt.Errorf("annotation %s was not written by a speaker of this version: %w", AnnotationAnnouncements, err)
	}
	if len(value) > MaxAnnouncementsSize {
		return refuse(fmt.Errorf("it has %d bytes, more than %d", len(value), MaxAnnouncementsSize))
	}
	var read announcements
	if err := json.Unmarshal([]byte(value), &read); err != nil {
		return refuse(err)
	}
	if read.Version != announcementsVersion {
		return refuse(fmt.Errorf("its version is %d, not %d", read.Version, announcementsVersion))
	}
	for i, a := range read.VIPs {
		if !a.VIP.IsValid() || a.Reason == "" {
			return refuse(fmt.Errorf("vips[%d] lacks a vip or a reason", i))
		}
	}
	return read.VIPs, nil
}
