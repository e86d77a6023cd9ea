package lb

import (
	"net/netip"
	"strings"
)

// Announcement says who answers for a VIP, and how. Its text form is the message of the condition landfall.dev/Announced, where
// people and landfallctl read it.
type Announcement struct {
	VIP  netip.Addr
	Node string
	How  string // such as "ARP on eth0"; "" when only the owner itself knows
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

// ParseAnnouncements reads announcements back from a message that joins them by "; ". Parts of another form are left out.
func ParseAnnouncements(message string) []Announcement {
	var list []Announcement
	for part := range strings.SplitSeq(message, "; ") {
		vip, from, ok := strings.Cut(part, announcedFrom)
		node, how, _ := strings.Cut(strings.TrimSuffix(from, ")"), " (")
		addr, err := netip.ParseAddr(vip)
		if ok && err == nil {
			list = append(list, Announcement{VIP: addr, Node: node, How: how})
		}
	}
	return list
}
