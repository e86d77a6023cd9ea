package plan

import (
	"net/netip"
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
	for name, c := range map[string]struct {
		host Host
		want string // the reason and a part of the message
	}{
		"nothing is known":      {},
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
		"alone": {host: Host{Unmet: time.Hour, Port: 7947},
			want: "GossipBlocked: are ready: open TCP and UDP port 7947"},
		"alone for a while":      {host: Host{Unmet: time.Second}},
		"all of it at one place": {host: Host{Nodes: nodes(free, free), Interfaces: ipvs}},
	} {
		c.host.Self = "n"
		findingtest.Check(t, name, Findings(c.host), c.want)
	}
}
