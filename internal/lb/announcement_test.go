package lb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var addrs = cmpopts.EquateComparable(netip.Addr{})

// routedFrom is an announcement by that many nodes, of which each rack of 20 has peers of its own.
func routedFrom(vip string, nodes int) Announcement {
	a := Announcement{VIP: netip.MustParseAddr(vip), Reason: ReasonAnnounced}
	for i := range nodes {
		if i%20 == 0 {
			a.Routes = append(
				a.Routes, RouteAnnouncement{Peers: []string{fmt.Sprintf("tor-%da", i/20), fmt.Sprintf("tor-%db", i/20)}})
		}
		r := &a.Routes[i/20]
		r.Nodes = append(r.Nodes, fmt.Sprintf("k8s-worker-%04d", i))
	}
	return a
}

func TestAnnouncementsReadBack(t *testing.T) {
	list := []Announcement{
		{VIP: netip.MustParseAddr("192.0.2.1"), Reason: ReasonAnnounced, Owner: "node-1", Protocol: "ARP",
			Interfaces: []string{"eth0", "eth1"},
			Routes:     []RouteAnnouncement{{Peers: []string{"tor"}, Nodes: []string{"node-2"}}}},
		{VIP: netip.MustParseAddr("2001:db8::1"), Reason: ReasonNoBackends},
	}
	written := EncodeAnnouncements(list)
	want := `{"version":1,"vips":[{"vip":"192.0.2.1","reason":"Announced","owner":"node-1","protocol":"ARP",` +
		`"interfaces":["eth0","eth1"],"routes":[{"peers":["tor"],"nodes":["node-2"]}]},` +
		`{"vip":"2001:db8::1","reason":"NoBackends"}]}`
	if written != want {
		t.Errorf("written as %s, want %s", written, want)
	}
	got, err := DecodeAnnouncements(written)
	if d := cmp.Diff(list, got, addrs); err != nil || d != "" {
		t.Errorf("read back (-want +got), error %v:\n%s", err, d)
	}
	if got, err := DecodeAnnouncements(EncodeAnnouncements(nil)); got != nil || err != nil {
		t.Errorf("no announcements are read as %v, %v", got, err)
	}
}

// TestAnnouncementsAreBounded checks that all nodes are counted, whatever their number, and that
// the annotation stays below its limit also where every name is as long as Kubernetes allows.
func TestAnnouncementsAreBounded(t *testing.T) {
	long := Announcement{VIP: netip.MustParseAddr("2001:db8::1"), Reason: ReasonAnnounced, Owner: strings.Repeat("o", 253)}
	for i := range 1000 {
		name := strings.Repeat("n", 249) + fmt.Sprintf("%04d", i)
		long.Routes = append(long.Routes, RouteAnnouncement{Peers: []string{name, name}, Nodes: []string{name}})
	}
	sizes := map[string]int{}
	for name, list := range map[string][]Announcement{
		"L2": {{VIP: netip.MustParseAddr("172.26.236.180"), Reason: ReasonAnnounced, Owner: "k8s-worker-0177",
			Protocol: "ARP", Interfaces: []string{"eth0"}}},
		"nobody":         {{VIP: netip.MustParseAddr("172.26.236.180"), Reason: ReasonNoLocalBackends}},
		"BGP, 3 nodes":   {routedFrom("172.26.236.180", 3)},
		"BGP, 1000":      {routedFrom("172.26.236.180", 1000)},
		"32 VIPs, BGP":   slicesOf(32, routedFrom("172.26.236.180", 1000)),
		"32 VIPs, names": slicesOf(32, long),
	} {
		written := EncodeAnnouncements(list)
		if sizes[name] = len(written); len(written) > MaxAnnouncementsSize {
			t.Errorf("%s: %d bytes, more than %d", name, len(written), MaxAnnouncementsSize)
		}
		read, err := DecodeAnnouncements(written)
		if err != nil || len(read) != len(list) {
			t.Fatalf("%s: %d announcements of %d, %v", name, len(read), len(list), err)
		}
		for i := range list {
			if got, want := nodesOf(read[i]), nodesOf(list[i]); got != want || read[i].Owner != list[i].Owner {
				t.Errorf("%s: VIP %d has %d nodes and owner %q, want %d", name, i, got, read[i].Owner, want)
			}
		}
	}
	t.Logf("bytes: %v", sizes)
}

func slicesOf(n int, a Announcement) []Announcement {
	var list []Announcement
	for range n {
		list = append(list, a)
	}
	return list
}

// nodesOf counts the nodes that announce a route.
func nodesOf(a Announcement) int {
	n := a.OtherNodes
	for _, r := range a.Routes {
		n += len(r.Nodes) + r.OtherNodes
	}
	return n
}

// TestNonsenseIsNoAnnouncement has a tenant write into the annotation.
func TestNonsenseIsNoAnnouncement(t *testing.T) {
	for value, want := range map[string]string{
		"node-1":                       "invalid character",
		`{"vips":[]}`:                  "its version is 0, not 1",
		`{"version":2,"vips":"later"}`: "cannot unmarshal",
		`{"version":2}`:                "its version is 2, not 1",
		`{"version":1,"vips":[{}]}`:    "vips[0] lacks a vip or a reason",
		`{"version":1,"vips":[{"vip":"300.1.1.1","reason":"Announced"}]}`: "300.1.1.1",
		`{"version":1,"vips":[` + strings.Repeat(" ", 1<<20) + `]}`:       "more than 16384",
	} {
		got, err := DecodeAnnouncements(value)
		if got != nil || err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), AnnotationAnnouncements) {
			t.Errorf("%.40s is read as %v, %v, want an error with %q", value, got, err, want)
		}
	}
}
