package lb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"unicode"

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

	written := EncodeAnnouncements(slicesOf(1000, long))
	read, err := DecodeAnnouncements(written)
	if err != nil || len(read) == 0 || KeptAnnouncements(LoadBalancer, written) != written {
		t.Errorf("1000 VIPs: %d bytes with %d announcements, %v", len(written), len(read), err)
	}
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
		KeptAnnouncements(LoadBalancer, strings.Repeat(" ", 1<<20)):       "more than 16384",
		KeptAnnouncements(ClusterIP, "{}"):                                "no load balancer",
	} {
		got, err := DecodeAnnouncements(value)
		if got != nil || err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), AnnotationAnnouncements) {
			t.Errorf("%.40s is read as %v, %v, want an error with %q", value, got, err, want)
		}
	}
}

// TestNamesInAnnouncementsAreNames has a tenant write what would move the cursor of the terminal of
// an operator, or pass for something else.
func TestNamesInAnnouncementsAreNames(t *testing.T) {
	long := strings.Repeat("n", 254)
	for _, test := range []struct {
		fields string // after the vip and a valid reason, which a second one overrides
		want   string // in the error; "" for none
	}{
		{fields: `"owner":"node-1.example.com","protocol":"NDP","interfaces":["br-0.12_x:y@z"]`},
		{fields: `"routes":[{"peers":["tor-1.a"],"nodes":["n1"]},{"peers":[],"nodes":null,"otherNodes":3}]`},
		{`"owner":"\u001b[2Jnode-1"`, `vips[0].owner "\x1b[2Jnode-1" is not the name of a node`},
		{`"owner":"Node"`, `owner "Node" is not`},
		{`"owner":"node-1\nVIP"`, `owner "node-1\nVIP" is not`},
		{`"owner":"nod\u0435"`, `owner "nodе" is not`},
		{`"owner":"\u202e1-edon"`, `owner "\u202e1-edon" is not`},
		{`"owner":"` + long + `"`, `owner "` + long[:64] + `" is not`},
		{`"protocol":"BGP"`, `vips[0].protocol "BGP" is not ARP or NDP`},
		{`"interfaces":["eth0",""]`, `vips[0].interfaces[1] "" is not the name of an interface`},
		{`"interfaces":["eth0 up"]`, `interfaces[0] "eth0 up" is not`},
		{`"interfaces":["../eth0"]`, `interfaces[0] "../eth0" is not`},
		{`"interfaces":["eth\u007f"]`, `interfaces[0] "eth\x7f" is not`},
		{`"interfaces":["sixteen-bytes-xx"]`, `interfaces[0] "sixteen-bytes-xx" is not`},
		{`"routes":[{},{"peers":["tor\t1"]}]`, `vips[0].routes[1].peers[0] "tor\t1" is not the name of a peer`},
		{`"routes":[{"nodes":["n1","n\r2"]}]`, `vips[0].routes[0].nodes[1] "n\r2" is not the name of a node`},
		{`"reason":"all is well"`, `vips[0].reason "all is well" is not a reason`},
		{`"reason":"announced"`, `reason "announced" is not`},
		{`"reason":"` + strings.Repeat("R", 65) + `"`, `is not a reason`},
		{`"vip":"fe80::1%\u001b[2J"`, `vips[0].vip "fe80::1%\x1b[2J" is not an address without a zone`},
		{`"vip":"\u001b[2J"`, `\x1b[2J`},
		{`"vip":"` + strings.Repeat("a", 16000) + `"`, "ParseAddr"},
		{"\x1b", `'\x1b'`},
	} {
		_, err := DecodeAnnouncements(`{"version":1,"vips":[{"vip":"192.0.2.1","reason":"Announced",` + test.fields + `}]}`)
		if test.want == "" {
			if err != nil {
				t.Errorf("%s: %v", test.fields, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%.80s: error %v, want one with %s", test.fields, err, test.want)
			continue
		}
		if text := err.Error(); len(text) > 400 ||
			strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("%.80s: the error has %d bytes and is not for a terminal: %q", test.fields, len(text), text)
		}
	}
}

// FuzzDecodeAnnouncements checks that what is taken for announcements is written back the same.
func FuzzDecodeAnnouncements(f *testing.F) {
	f.Add(EncodeAnnouncements([]Announcement{{VIP: netip.MustParseAddr("192.0.2.1"), Reason: ReasonAnnounced, Owner: "n1",
		Protocol: "ARP", Interfaces: []string{"eth0"},
		Routes: []RouteAnnouncement{{Peers: []string{"tor"}, Nodes: []string{"n1", "n2"}, OtherNodes: 3}}}}))
	f.Add(`{"version":1,"vips":[{"vip":"fe80::1%eth0","reason":"x\u001b"}]}`)
	f.Add(announcementsLeftOver)
	f.Fuzz(func(t *testing.T, value string) {
		list, err := DecodeAnnouncements(value)
		if err != nil {
			if len(err.Error()) > 1000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		encoded := EncodeAnnouncements(list)
		if len(encoded) > MaxAnnouncementsSize {
			t.Fatalf("%d bytes", len(encoded))
		}
		if _, err := DecodeAnnouncements(encoded); err != nil {
			t.Fatalf("what was decoded cannot be read back: %v\n%s", err, encoded)
		}
	})
}
