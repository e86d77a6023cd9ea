package lb

import (
	"net/netip"
	"strings"
)

// Announcement says who answers for a VIP, and how. Its text form is the message of the condition
// landfall.dev/Announced, where people and landfallctl read it.
type Announcement struct {
	VIP  netip.Addr
	Node string // over BGP, several: "node-1, node-2"
	How  string // such as "ARP on eth0" or "BGP to tor-1, tor-2"; "" when only the owner itself knows
}

// ConditionServing on a Service: each of its addresses is answered for by a node whose kernel is
// confirmed to deliver it to a usable endpoint. It follows ConditionAnnounced, but for an address
// that its last node still answers for while it should not any more.
const ConditionServing = "landfall.dev/Serving"

// Reasons of ConditionServing and ConditionAnnounced.
const (
	ReasonServing Reason = "Serving" // the address is announced by a node that delivers it
	ReasonParting Reason = "Parting" // the node that answers should not any more, and there is no other
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

const announcedFrom = " is announced from "

// String returns "192.0.2.1 is announced from node-1 (ARP on eth0)".
func (a Announcement) String() string {
	s := a.VIP.String() + announcedFrom + a.Node
	if a.How != "" {
		s += " (" + a.How + ")"
	}
	return s
}

// ParseAnnouncements reads announcements back from a message that joins them by "; ". Parts of
// another form are left out.
func ParseAnnouncements(message string) []Announcement {
	var list []Announcement
	for part := range strings.SplitSeq(message, "; ") {
		vip, from, ok := strings.Cut(part, announcedFrom)
		node, how, _ := strings.Cut(from, " (")
		node, _, _ = strings.Cut(node, " for want of") // ReasonParting
		how = strings.TrimSuffix(how, ")")
		addr, err := netip.ParseAddr(vip)
		if ok && err == nil {
			list = append(list, Announcement{VIP: addr, Node: node, How: how})
		}
	}
	return list
}
