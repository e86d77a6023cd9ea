package lb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

// endpoint reads "node:state": states are ready, serving (and terminating), dead (terminating),
// unready.
func endpoint(i int, s string) Endpoint {
	node, state, _ := strings.Cut(s, ":")
	return Endpoint{
		Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Node: node,
		Ready: state == "ready", Serving: state == "ready" || state == "serving", Terminating: state == "serving" ||
			state == "dead",
	}
}

func describe(backends []Backend) string {
	var words []string
	for _, b := range backends {
		words = append(words, fmt.Sprint(b.Addr.Addr().As4()[3]))
	}
	return strings.Join(words, " ")
}

// The usable endpoints of node "here". Numbers are positions in the list of endpoints, from 1.
var usableCases = []struct {
	name           string
	endpoints      string
	cluster, local string
	deliverable    map[TrafficPolicy]Reason
}{
	{"none", "", "", "", map[TrafficPolicy]Reason{Cluster: ReasonNoBackends, Local: ReasonNoBackends}},
	{"ready here and there", "here:ready there:ready", "1 2", "1", nil},
	{"ready there only", "there:ready", "1", "", map[TrafficPolicy]Reason{Local: ReasonNoLocalBackends}},
	{"node unknown", ":ready", "1", "", map[TrafficPolicy]Reason{Local: ReasonNoLocalBackends}},
	{"terminating never joins ready", "here:ready here:serving there:ready", "1 3", "1", nil},
	{"serving anywhere when none is ready", "here:serving there:serving here:dead", "1 2", "1", nil},
	{"local set falls back on its own, and is forwarded to but not claimed", "here:serving there:ready", "2", "1",
		map[TrafficPolicy]Reason{Local: ReasonNoLocalBackends}},
	{"serving there only", "there:serving", "1", "", map[TrafficPolicy]Reason{Local: ReasonNoLocalBackends}},
	{"dead and unready only", "here:dead there:unready", "", "",
		map[TrafficPolicy]Reason{Cluster: ReasonNoBackends, Local: ReasonNoBackends}},
}

// TestContract2LocalMeansLocal runs the one decision by which proxies forward and speakers claim.
func TestContract2LocalMeansLocal(t *testing.T) {
	for _, test := range usableCases {
		t.Run(test.name, func(t *testing.T) {
			slice := Slice{Family: IPv4, Ports: []SlicePort{{Name: "http", Protocol: TCP, Port: 80}}}
			for i, s := range strings.Fields(test.endpoints) {
				slice.Endpoints = append(slice.Endpoints, endpoint(i, s))
			}
			// the same endpoints twice, as while slices are rewritten
			u := Choose([]Slice{slice, slice}, "http", TCP, IPv4, Place{Node: "here"})
			if got := describe(u.For(Cluster)); got != test.cluster {
				t.Errorf("Cluster: %q, want %q", got, test.cluster)
			}
			if got := describe(u.For(Local)); got != test.local {
				t.Errorf("Local: %q, want %q", got, test.local)
			}
			for _, policy := range []TrafficPolicy{Cluster, Local} {
				d := Delivery{Policy: policy}
				for _, b := range u.Cluster {
					if b.Ready {
						d.Ready++
					} else {
						d.Serving++
					}
				}
				for _, b := range u.Local {
					if b.Ready {
						d.LocalReady++
					} else {
						d.LocalServing++
					}
				}
				if got := d.Deliverable(); got != test.deliverable[policy] {
					t.Errorf("%s: refused because of %q, want %q", policy, got, test.deliverable[policy])
				}
				d.Refusal = Refuse(ReasonNotProgrammed, "the restore failed")
				if got := d.Deliverable(); got != ReasonNotProgrammed {
					t.Errorf("%s, not programmed: %q", policy, got)
				}
			}
		})
	}
}

// Topology hints: endpoints are "node:state:zones:nodes" with lists joined by a plus. The node that
// chooses is "here", in zone "a".
func TestChooseByHints(t *testing.T) {
	for _, test := range []struct {
		name, endpoints string
		at              Place
		cluster, local  string
	}{
		{"39 zone", "there:ready:a: there:ready:b:", Place{"here", "a"}, "1", ""},
		{"39 zone of several", "there:ready:b+a: there:ready:b:", Place{"here", "a"}, "1", ""},
		{"39 one ready endpoint without a hint", "there:ready:a: there:ready::", Place{"here", "a"}, "1 2", ""},
		{"39 an unready endpoint without a hint does not matter", "there:ready:a: there:ready:b: there:unready::",
			Place{"here", "a"}, "1", ""},
		{"39 zone unknown", "there:ready:a: there:ready:b:", Place{Node: "here"}, "1 2", ""},
		{"39 no endpoint for the zone", "there:ready:b: there:ready:c:", Place{"here", "a"}, "1 2", ""},
		{"39 only an unready endpoint for the zone", "there:unready:a: there:ready:b:", Place{"here", "a"}, "2", ""},
		{"39 only a terminating endpoint for the zone", "there:serving:a: there:ready:b:", Place{"here", "a"}, "2", ""},
		{"39 none is ready: all that serve", "there:serving:a: there:serving:b:", Place{"here", "a"}, "1 2", ""},
		{"40 node", "here:ready:a:here there:ready:a:there", Place{"here", "a"}, "1", "1"},
		{"40 none for the node: its zone", "there:ready:a:there there:ready:b:there", Place{"here", "a"}, "1", ""},
		{"40 one without a node hint: the zone", "here:ready:a:here there:ready:a: there:ready:b:there", Place{"here", "a"},
			"1 2", "1"},
		{"40 one without any hint: all", "here:ready:a:here there:ready::", Place{"here", "a"}, "1 2", "1"},
		{"40 node hints without zone hints, none for the node", "there:ready::there there:ready::other", Place{"here", "a"},
			"1 2", ""},
		{"41 the local set ignores hints", "here:ready:b:there there:ready:a:there", Place{"here", "a"}, "2", "1"},
		{"a place without names", "there:ready::x there:ready::y", Place{}, "1 2", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			slice := Slice{Family: IPv4, Ports: []SlicePort{{Name: "http", Protocol: TCP, Port: 80}}}
			for i, s := range strings.Fields(test.endpoints) {
				words := strings.Split(s, ":")
				ep := endpoint(i, words[0]+":"+words[1])
				split := func(s string) []string { return strings.FieldsFunc(s, func(r rune) bool { return r == '+' }) }
				ep.ForZones, ep.ForNodes = split(words[2]), split(words[3])
				slice.Endpoints = append(slice.Endpoints, ep)
			}
			u := Choose([]Slice{slice}, "http", TCP, IPv4, test.at)
			if got := describe(u.Cluster); got != test.cluster {
				t.Errorf("Cluster: %q, want %q", got, test.cluster)
			}
			if got := describe(u.Local); got != test.local {
				t.Errorf("Local: %q, want %q", got, test.local)
			}
		})
	}
}

func TestChooseTakesOnlyThePortAskedFor(t *testing.T) {
	ep := Endpoint{Addr: netip.MustParseAddr("10.0.0.1"), Ready: true}
	slices := []Slice{
		{Family: IPv4, Ports: []SlicePort{{"dns", UDP, 53}, {"dns", TCP, 5353}, {"metrics", TCP, 9153}},
			Endpoints: []Endpoint{ep}},
		{Family: IPv6, Ports: []SlicePort{{"dns", UDP, 54}},
			Endpoints: []Endpoint{{Addr: netip.MustParseAddr("2001:db8::1"), Ready: true}}},
	}
	for _, test := range []struct {
		name     string
		protocol Protocol
		family   Family
		want     string
	}{
		{"dns", UDP, IPv4, "10.0.0.1:53"}, {"dns", TCP, IPv4, "10.0.0.1:5353"}, {"dns", UDP, IPv6, "[2001:db8::1]:54"},
	} {
		u := Choose(slices, test.name, test.protocol, test.family, Place{})
		if len(u.Cluster) != 1 || u.Cluster[0].Addr.String() != test.want || len(u.Local) != 0 {
			t.Errorf("%s %s %s: %+v, want %s", test.name, test.protocol, test.family, u, test.want)
		}
	}
	if u := Choose(slices, "", TCP, IPv4, Place{}); len(u.Cluster) != 0 {
		t.Errorf("an unnamed port matched %+v", u)
	}
}
