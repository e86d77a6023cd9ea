package lb

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// conditionServing on a Service: for each of its addresses a node answers whose kernel is confirmed
// to deliver it to a usable endpoint. It follows ConditionAnnounced, except while the last node
// still answers for an address that it should withdraw.
const conditionServing = "landfall.dev/Serving"

// Reasons of conditionServing and ConditionAnnounced.
const (
	reasonServing Reason = "Serving" // a node that delivers the address announces it
	ReasonParting Reason = "Parting" // the node that answers should withdraw, and no other node can answer
)

// Serving returns the condition Serving that goes with the condition Announced.
func Serving(announced Condition) Condition {
	c := announced
	c.Type = conditionServing
	c.Status = announced.Status && announced.Reason == ReasonAnnounced
	if c.Status {
		c.Reason = reasonServing
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
	// be larger, and the last VIPs where that is not enough.
	MaxAnnouncementsSize = 16 << 10
	// MaxMessage is the most bytes of the message of ConditionAnnounced. The chart's policy for nodes has the same limit.
	MaxMessage = 16 << 10
	// announcementsVersion changes when readers would misunderstand what is written.
	announcementsVersion = 1
)

// Values that stand for an annotation which is there, but not worth being kept: see
// KeptAnnouncements.
const (
	announcementsTooLong  = "(too long)"
	announcementsLeftOver = "(left over)"
)

// KeptAnnouncements returns what a program keeps of the annotation's value of a Service, so that a
// tenant cannot fill the memory of every node with it: a word that DecodeAnnouncements refuses in
// place of what no speaker has written, so that it is seen and replaced; and a word in place of
// what is left on a Service that is no load balancer any more, so that it is seen and removed.
func KeptAnnouncements(kind ServiceType, value string) string {
	switch {
	case value == "":
		return ""
	case kind != LoadBalancer:
		return announcementsLeftOver
	case len(value) > MaxAnnouncementsSize:
		return announcementsTooLong
	}
	return value
}

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
	for names := MaxNamedNodes; ; {
		written := announcements{Version: announcementsVersion}
		for _, a := range list {
			written.VIPs = append(written.VIPs, a.shortened(names))
		}
		encoded, err := json.Marshal(written)
		if err != nil {
			panic(err) // strings and numbers only
		}
		switch {
		case len(encoded) <= MaxAnnouncementsSize:
			return string(encoded)
		case names > 0:
			names /= 2
		default:
			list = list[:len(list)/2]
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
// there, so what is no announcement of this version is refused as a whole. What is not refused can
// be printed: no name in it has a character that a terminal would obey. Neither has the error.
func DecodeAnnouncements(value string) ([]Announcement, error) {
	if value == "" {
		return nil, nil
	}
	refuse := func(err error) ([]Announcement, error) {
		return nil, fmt.Errorf("annotation %s was not written by a speaker of this version: %w", AnnotationAnnouncements, err)
	}
	switch {
	case len(value) > MaxAnnouncementsSize, value == announcementsTooLong:
		return refuse(fmt.Errorf("it has more than %d bytes", MaxAnnouncementsSize))
	case value == announcementsLeftOver:
		return refuse(errors.New("it is left on a Service that is no load balancer"))
	}
	var read announcements
	if err := json.Unmarshal([]byte(value), &read); err != nil {
		return refuse(fmt.Errorf("%.200s", err.Error())) // encoding/json and netip quote what they name
	}
	if read.Version != announcementsVersion {
		return refuse(fmt.Errorf("its version is %d, not %d", read.Version, announcementsVersion))
	}
	for i, a := range read.VIPs {
		if !a.VIP.IsValid() || a.Reason == "" {
			return refuse(fmt.Errorf("vips[%d] lacks a vip or a reason", i))
		}
		if err := a.check(); err != nil {
			return refuse(fmt.Errorf("vips[%d].%w", i, err))
		}
	}
	return read.VIPs, nil
}

// check returns an error for the first field that is not what a speaker writes there.
func (a Announcement) check() error {
	if a.VIP.Zone() != "" {
		return wrong("vip", a.VIP.String(), "an address without a zone")
	}
	if !a.Reason.IsWord() {
		return wrong("reason", string(a.Reason), "a reason")
	}
	if a.Owner != "" && !IsName(a.Owner) {
		return wrong("owner", a.Owner, "the name of a node")
	}
	if a.Protocol != "" && a.Protocol != "ARP" && a.Protocol != "NDP" {
		return wrong("protocol", a.Protocol, "ARP or NDP")
	}
	if err := each("interfaces", a.Interfaces, isInterface, "the name of an interface"); err != nil {
		return err
	}
	for i, r := range a.Routes {
		if err := each(fmt.Sprintf("routes[%d].peers", i), r.Peers, IsName, "the name of a peer"); err != nil {
			return err
		}
		if err := each(fmt.Sprintf("routes[%d].nodes", i), r.Nodes, IsName, "the name of a node"); err != nil {
			return err
		}
	}
	return nil
}

// each returns an error for the first value that is not what is wanted.
func each(field string, values []string, is func(string) bool, want string) error {
	for i, v := range values {
		if !is(v) {
			return wrong(fmt.Sprintf("%s[%d]", field, i), v, want)
		}
	}
	return nil
}

// wrong returns the error for a field, with as much of its value as a line has room for.
func wrong(field, value, want string) error {
	return fmt.Errorf("%s %.64q is not %s", field, value, want)
}

// IsName reports whether s can be the name of a node or of a BGPPeer.
func IsName(s string) bool {
	return consistsOf(s, 253, func(c byte) bool { return isLower(c) || isDigit(c) || c == '-' || c == '.' })
}

// isInterface reports whether s can be the name of a network interface.
func isInterface(s string) bool {
	return consistsOf(s, 15, func(c byte) bool { return c > ' ' && c <= '~' && c != '/' })
}

// IsWord reports whether the reason is a word in CamelCase, as all are that programs of any release know.
func (r Reason) IsWord() bool {
	s := string(r)
	return consistsOf(s, 64, func(c byte) bool { return isLower(c) || isUpper(c) || isDigit(c) }) && isUpper(s[0])
}

// consistsOf reports whether s has at least one byte and at most that many, all of them allowed.
func consistsOf(s string, most int, allowed func(byte) bool) bool {
	if s == "" || len(s) > most {
		return false
	}
	for i := range len(s) {
		if !allowed(s[i]) {
			return false
		}
	}
	return true
}

func isLower(c byte) bool { return 'a' <= c && c <= 'z' }
func isUpper(c byte) bool { return 'A' <= c && c <= 'Z' }
func isDigit(c byte) bool { return '0' <= c && c <= '9' }
