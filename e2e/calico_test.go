package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestBesideCalicoBGP has Calico's BIRD of each node and Landfall's speaker speak with the same router, in both
// families, from two addresses of the node. Both announce; whatever happens to one of them leaves the other's sessions
// and routes alone, and no client behind the router loses a connection.
func TestBesideCalicoBGP(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, kind string
	}{
		{"FRR, from another address of the node", lab.FRR},
		{"BIRD, from another address of the node to a loopback", lab.BIRD},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			cluster := lab.SeedCluster()
			cluster.DualStack, cluster.CNI = true, lab.CalicoBGP
			cluster.ToR = lab.ToR{Kind: test.kind, Count: 1, ASN: 64501, NodeASN: 64500}
			b := besideCalico{labtest.Start(t, cluster, lab.Options{})}
			if err := b.ApplyYAML(t.Context(), fmt.Sprintf(bgpPool, `, "fd00:203:0:113::180-fd00:203:0:113::199"`)); err != nil {
				t.Fatal(err)
			}
			service := lab.SeedService()
			service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
			if err := b.AddService(t.Context(), service); err != nil {
				t.Fatal(err)
			}
			b.wantPodRoutes(t, b.Cluster().Nodes...)
			if test.kind == lab.FRR {
				b.sameAddress(t)
			}
			b.peers(t)
			back(t, b.Lab)
			for _, vip := range bgpVIPs(b.Lab) {
				for _, from := range []string{lab.FarClientName, bgpNode} {
					wantAnswers(t, b.Lab, from, "tcp", vip, "my-nginx-1", "my-nginx-2")
				}
			}
			b.play(t)
		})
	}
}

type besideCalico struct{ *lab.Lab }

// peers makes the BGPPeers as docs/guide/beside-cni.md has it: a BIRD has a loopback for them.
func (b besideCalico) peers(t *testing.T) {
	t.Helper()
	c := b.Cluster()
	var objects strings.Builder
	for _, n := range c.Nodes {
		from, to := n.SpeakerAddr(), c.SpeakerPeer()
		for family, ends := range map[string][2]netip.Addr{"v4": {from, to}, "v6": {lab.Twin(from), lab.Twin(to)}} {
			fmt.Fprintf(&objects, "---\napiVersion: landfall.dev/v1beta1\nkind: BGPPeer\nmetadata: {name: tor-%s-%s}\nspec: "+
				"{myASN: %d, peerASN: %d, sourceAddress: %q, peerAddress: %q, ebgpMultiHop: %v, enableGracefulRestart: true, "+
				"nodeSelectors: [{matchLabels: {kubernetes.io/hostname: %s}}]}\n", n.Name, family, c.ToR.NodeASN, c.ToR.ASN,
				ends[0], ends[1], to != c.LAN.Router, n.Name)
		}
	}
	if err := b.ApplyYAML(t.Context(), objects.String()); err != nil {
		t.Fatal(err)
	}
}

// wantPodRoutes waits until the router sends to exactly these nodes what is for their pods.
func (b besideCalico) wantPodRoutes(t *testing.T, nodes ...lab.Node) {
	t.Helper()
	eventually(t, "the router has the routes to pods", func() error {
		for _, n := range b.Cluster().Nodes {
			want := slices.ContainsFunc(nodes, func(with lab.Node) bool { return with.Name == n.Name })
			for block, via := range map[netip.Prefix]netip.Addr{n.PodNetwork.Masked(): n.Addr,
				lab.TwinPrefix(n.PodNetwork): lab.Twin(n.Addr)} {
				hops, err := b.Routers()[0].NextHops(t.Context(), block)
				if err != nil || want != slices.Equal(hops, []netip.Addr{via}) {
					return fmt.Errorf("%s goes to %v, %w", block, hops, err)
				}
			}
		}
		return nil
	})
}

// sameAddress has the speakers ask for sessions from the addresses that Calico has its own from. They leave the router
// alone and say why; Calico's sessions and routes stay.
func (b besideCalico) sameAddress(t *testing.T) {
	c := b.Cluster()
	router, changes := b.Routers()[0], b.watch(t)
	peers := b.Dynamic().Resource(bgpAdvertisements.GroupVersion().WithResource("bgppeers"))
	established := func() map[string]int {
		found := map[string]int{}
		for _, n := range c.Nodes {
			for _, addr := range []netip.Addr{n.Addr, lab.Twin(n.Addr)} {
				var neighbors map[string]struct{ ConnectionsEstablished, ConnectionsDropped int }
				if err := json.Unmarshal([]byte(ask(t, router, fmt.Sprintf("show bgp neighbors %s json", addr))),
					&neighbors); err != nil {
					t.Fatal(err)
				}
				for _, n := range neighbors {
					found[addr.String()] = n.ConnectionsEstablished + n.ConnectionsDropped
				}
			}
		}
		return found
	}
	before := established()
	if err := b.ApplyYAML(t.Context(), bgpPeers(c, ", enableGracefulRestart: true")); err != nil {
		t.Fatal(err)
	}
	for _, peer := range []string{"tor-1", "tor-1-v6"} {
		eventually(t, "the status of "+peer+" says that the session is another program's", func() error {
			o, err := peers.Get(t.Context(), peer, metav1.GetOptions{})
			if err != nil {
				return err
			}
			nodes, _, _ := unstructured.NestedSlice(o.Object, "status", "nodes")
			for _, node := range nodes {
				reason, _, _ := unstructured.NestedString(node.(map[string]any), "reason")
				if reason != string(lb.ReasonSessionTaken) {
					return fmt.Errorf("it shows %v", nodes)
				}
			}
			if len(nodes) != len(c.Nodes) {
				return fmt.Errorf("it shows %v", nodes)
			}
			return nil
		})
	}
	_, out := landfallctl(t, b.Lab, "explain", "peer", "tor-1")
	if !strings.Contains(out, "SessionTaken") || !strings.Contains(out, "sourceAddress") {
		t.Errorf("explain says:\n%s", out)
	}
	time.Sleep(5 * time.Second) // the speakers try again
	if after := established(); !maps.Equal(before, after) {
		t.Errorf("the router's sessions were established %v times, and are %v", before, after)
	}
	if seen := changes(); len(seen) > 0 {
		t.Errorf("the router changed routes: %q", seen)
	}
	for _, peer := range []string{"tor-1", "tor-1-v6"} {
		if err := peers.Delete(t.Context(), peer, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// watch watches the routes of the router's kernel. What it returns ends that, and returns the changes.
func (b besideCalico) watch(t *testing.T) func() []string {
	t.Helper()
	var ends []func() []string
	for _, family := range []string{"-4", "-6"} {
		end, err := b.Routers()[0].WatchRoutes(t.Context(), family)
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, end)
	}
	return func() (changes []string) {
		for _, end := range ends {
			changes = append(changes, end()...)
		}
		return changes
	}
}

// play has things happen to one program after the other, under connections.
func (b besideCalico) play(t *testing.T) {
	pods := func(change string) bool {
		return strings.Contains(change, "192.168.") || strings.Contains(change, "fd00:192:168:")
	}
	vips := func(change string) bool {
		return strings.Contains(change, "203.0.113.") || strings.Contains(change, "fd00:203:")
	}
	none := func(string) bool { return false }
	step := func(name string, mayChange func(string) bool, happen func(*testing.T)) {
		t.Run(name, func(t *testing.T) {
			changes := b.watch(t)
			var flows []*flows
			for _, vip := range bgpVIPs(b.Lab) {
				flows = append(flows, startFlowsFrom(t, b.Lab, lab.FarClientName, vip, 40))
			}
			probes := startFar(t, b.Lab)
			happen(t)
			time.Sleep(time.Second)
			wantNoneLostFar(t, probes)
			for _, f := range flows {
				if lost := f.stop(); lost > 0 {
					t.Errorf("%d of 40 long-lived connections were lost", lost)
				}
			}
			for _, change := range changes() {
				if !mayChange(change) {
					t.Errorf("the router changed the route %s", change)
				}
			}
			back(t, b.Lab)
			b.wantPodRoutes(t, b.Cluster().Nodes...)
		})
	}
	step("Landfall drains a node", vips, func(t *testing.T) {
		patchNode(t, b.Lab, bgpNode, excluded(true))
		away(t, b.Lab)
		patchNode(t, b.Lab, bgpNode, excluded(false))
		back(t, b.Lab)
	})
	restarts := func(end func(*lab.Agent) error) func(*testing.T) {
		return func(t *testing.T) {
			restart(t, b.Agent("speaker", bgpNode), end, 500*time.Millisecond)
			time.Sleep(2 * time.Second)
		}
	}
	step("the speaker stops", none, restarts((*lab.Agent).Stop))
	step("the speaker crashes", none, restarts((*lab.Agent).Kill))
	bird := b.Calico(bgpNode)
	crash := none
	if b.Cluster().ToR.Kind == lab.FRR {
		// FRR offers Calico to keep its routes, but is itself none that restarts by default. Then BIRD drops its own from the
		// node's kernel until it has heard them again, and Landfall withdraws what the node does not deliver.
		crash = vips
	}
	step("Calico crashes", crash, func(t *testing.T) {
		bird.Kill("")
		time.Sleep(500 * time.Millisecond)
		if err := bird.Launch(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
	})
	// Without its routes to the pods of others the node delivers no more, and Landfall withdraws it too.
	step("Calico withdraws", func(change string) bool { return pods(change) || vips(change) }, func(t *testing.T) {
		sessions := []string{"tor1_ipv4", "tor1_ipv6"}
		tell := func(command string) {
			for _, session := range sessions {
				if _, err := bird.Ask(t.Context(), command+" "+session); err != nil {
					t.Fatal(err)
				}
			}
		}
		tell("disable")
		away(t, b.Lab)
		var others []lab.Node
		for _, n := range b.Cluster().Nodes {
			if n.Name != bgpNode {
				others = append(others, n)
			}
		}
		b.wantPodRoutes(t, others...)
		tell("enable")
		back(t, b.Lab)
	})
}
