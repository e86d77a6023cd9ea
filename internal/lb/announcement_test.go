package lb

import (
	"net/netip"
	"slices"
	"testing"
)

func TestAnnouncementsReadBack(t *testing.T) {
	list := []Announcement{
		{VIP: netip.MustParseAddr("192.0.2.1"), Node: "node-1", How: "ARP on eth0, eth1"},
		{VIP: netip.MustParseAddr("2001:db8::1"), Node: "node-2"},
	}
	message := list[0].String() + "; " + list[1].String()
	if want := "192.0.2.1 is announced from node-1 (ARP on eth0, eth1); 2001:db8::1 is announced from node-2"; message != want {
		t.Errorf("message %q, want %q", message, want)
	}
	if got := ParseAnnouncements(message); !slices.Equal(got, list) {
		t.Errorf("read back as %v", got)
	}
	if got := ParseAnnouncements("no node claims 192.0.2.1; nobody is announced from here"); got != nil {
		t.Errorf("prose was read as %v", got)
	}
	parting := ParseAnnouncements(
		"192.0.2.1 is announced from node-1 for want of another node, as this one should not: Stopping")
	if want := []Announcement{{VIP: netip.MustParseAddr("192.0.2.1"), Node: "node-1"}}; !slices.Equal(parting, want) {
		t.Errorf("the words after the node were read as %+v", parting)
	}
}
