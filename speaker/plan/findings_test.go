package plan

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/preflight/findingtest"
)

func TestFindings(t *testing.T) {
	free, labelled := lb.Node{}, lb.Node{Labels: labels.Set{LabelExclude: ""}}
	nodes := func(self, other lb.Node) map[string]lb.Node { return map[string]lb.Node{"n": self, "m": other} }
	ipvs := []lb.Interface{{Name: "eth0"}, {Name: "kube-ipvs0", Addresses: []netip.Prefix{
		netip.MustParsePrefix("192.0.2.1/32")}}}
	conflicts := func(vips byte, macs ...string) map[netip.Addr][]ConflictingHost {
		all := map[netip.Addr][]ConflictingHost{}
		for i := range vips {
			for _, mac := range macs {
				vip := netip.AddrFrom4([4]byte{192, 0, 2, i})
				all[vip] = append(all[vip], ConflictingHost{Interface: "eth0", MAC: mac})
			}
		}
		return all
	}
	holding := func(name, addr string, answersAll bool) Host {
		return Host{Interfaces: []lb.Interface{{Name: name, Loopback: name == "lo"}}, AnswersAll: answersAll,
			Holds: map[string][]netip.Addr{name: {netip.MustParseAddr(addr)}}}
	}
	for name, c := range map[string]struct {
		host Host
		want string // the reason and a part of the message
	}{
		"nothing is known": {},
		"cut off": {host: Host{Unreachable: "dial tcp 192.0.2.1:6443: connect: no route to host", Nodes: nodes(free, free)},
			want: "APIServerUnreachable: n does not reach the API server, and knows of no change since: dial tcp 192.0.2.1:6443"},
		"no label":              {host: Host{Nodes: nodes(free, free)}},
		"another node is":       {host: Host{Nodes: nodes(free, labelled)}},
		"this node, on purpose": {host: Host{Nodes: nodes(labelled, free)}, want: "note NodeExcluded: other nodes do"},
		"every node": {host: Host{Nodes: nodes(labelled, labelled)},
			want: "NodeExcluded: speaker.ignoreExcludeLB=true"},
		"every node, is ignored": {host: Host{Nodes: nodes(labelled, labelled), IgnoreExclude: true}},
		"a single node": {host: Host{Nodes: map[string]lb.Node{"n": labelled}},
			want: "NodeExcluded: neither does any other"},
		"mode ipvs":                 {host: Host{Interfaces: ipvs, AnswersAll: true}, want: "ARPNotStrict: strictARP=true"},
		"mode ipvs with strictARP":  {host: Host{Interfaces: ipvs}},
		"mode ipvs without Service": {host: Host{Interfaces: []lb.Interface{{Name: "kube-ipvs0"}}, AnswersAll: true}},
		"alone": {host: Host{Unheard: time.Hour, Ready: 3, Speakers: Speakers{Live: []string{"n"}}, Port: 7947},
			want: "GossipBlocked: has met no other, although speakers on other nodes are ready: open TCP and UDP port 7947"},
		"alone for a while": {host: Host{Unheard: time.Second, Ready: 3, Speakers: Speakers{Live: []string{"n"}}}},
		"some unmet": {host: Host{Unheard: time.Hour, Ready: 5, Speakers: Speakers{Live: []string{"m", "n"}}},
			want: "GossipBlocked: the speaker on n has met 2 of 5 ready speakers, itself included: open TCP"},
		"some missing": {host: Host{Unheard: time.Hour, Ready: 5, Speakers: Speakers{Live: []string{"n"},
			Missing: []string{"a", "b", "c", "d"}}, Port: 7947},
			want: "GossipBlocked: 1 of 5 ready speakers, itself included, and no longer hears a, b, c and 1 more: open TCP"},
		"an address on lo": {host: holding("lo", "192.0.2.10", true),
			want: "AddressOnNode: interface lo of n has 192.0.2.10, so its kernel answers"},
		"an address on lo, which is not answered for": {host: holding("lo", "192.0.2.10", false)},
		"an IPv6 address on lo":                       {host: holding("lo", "2001:db8::10", true)},
		"an IPv6 address on a port": {host: holding("eth0", "2001:db8::10", false),
			want: "AddressOnNode: interface eth0 of n has 2001:db8::10"},
		"several on a port": {host: Host{Interfaces: []lb.Interface{{Name: "eth0"}}, Holds: map[string][]netip.Addr{"eth0": {
			netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3"),
			netip.MustParseAddr("192.0.2.4")}}}, want: "AddressOnNode: has 192.0.2.1, 192.0.2.2, 192.0.2.3 and 1 more, so"},
		"an address that is the Node's": {host: func() Host {
			h := holding("eth0", "192.0.2.10", true)
			h.Nodes = map[string]lb.Node{"n": {Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.10")}}}
			return h
		}()},
		"an address on kube-ipvs0": {host: Host{Interfaces: ipvs, Holds: map[string][]netip.Addr{"kube-ipvs0": {
			netip.MustParseAddr("192.0.2.1")}}}},
		"a conflicting host": {host: Host{Conflicts: conflicts(1, "02:00:00:00:00:09")},
			want: "AddressConflict: 02:00:00:00:00:09 on eth0 of n, uses addresses of Services: 192.0.2.0; give it another"},
		"a virtual router": {host: Host{Conflicts: conflicts(1, "00:00:5e:00:01:33")},
			want: "AddressConflict: 00:00:5e:00:01:33 on eth0 of n (the virtual router 51 of VRRP, such as keepalived)"},
		"another cluster": {host: Host{Conflicts: conflicts(5, "02:00:00:00:00:09")},
			want: "AddressConflict: 192.0.2.0, 192.0.2.1, 192.0.2.2 and 2 more; another cluster or load balancer seems"},
		"a conflicting host, and no speaker is heard": {host: Host{Conflicts: conflicts(2, "02:00:00:00:00:09"), Port: 7947,
			Nodes: nodes(free, free), Speakers: Speakers{Live: []string{"n"}}},
			want: "AddressConflict: a host, 02:00:00:00:00:09 on eth0 of n, uses addresses of Services: 192.0.2.0, 192.0.2.1; " +
				"it may be a node whose speaker this one does not hear: open TCP and UDP port 7947"},
		"a conflicting host of a cluster with one node": {host: Host{Conflicts: conflicts(1, "02:00:00:00:00:09"),
			Nodes: map[string]lb.Node{"n": free}, Speakers: Speakers{Live: []string{"n"}}},
			want: "AddressConflict: a host outside of the cluster, 02:00:00:00:00:09"},
		"another way out": {host: Host{Answering: []string{"eth1"}, Strict: map[string]bool{"eth1": true}, Uplink: "eth0"},
			want: "StrictReversePath: n answers for addresses of Services on eth1, where its kernel drops"},
		"another way out, loose": {host: Host{Answering: []string{"eth1"}, Uplink: "eth0"}},
		"the same way out":       {host: Host{Answering: []string{"eth0"}, Strict: map[string]bool{"eth0": true}, Uplink: "eth0"}},
		"no way out":             {host: Host{Answering: []string{"eth0"}, Strict: map[string]bool{"eth0": true}}},
		"nothing is answered":    {host: Host{Strict: map[string]bool{"eth1": true}, Uplink: "eth0"}},
		"all of it at one place": {host: Host{Nodes: nodes(free, free), Interfaces: ipvs}},
	} {
		c.host.Self = "n"
		findingtest.Check(t, name, Findings(c.host), c.want)
	}

	var macs []string
	for i := range 13 {
		macs = append(macs, fmt.Sprintf("02:00:00:00:00:%02x", i))
	}
	found := Findings(Host{Self: "n", Conflicts: conflicts(255, macs...)})
	if len(found) != maxConflicts+1 || !strings.Contains(found[maxConflicts].Message, "3 more hosts") {
		t.Errorf("13 conflicting hosts: found %v", found)
	}
	subjects := map[string]bool{}
	for _, f := range found {
		subjects[f.Subject] = true
	}
	if len(subjects) != len(found) {
		t.Errorf("13 conflicting hosts have the subjects %v", subjects)
	}
}
