package lab

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// flannel's VXLAN: a device on each node, and of each other node its address, its MAC address and
// where that is.
func TestPlanVXLAN(t *testing.T) {
	c := SeedCluster()
	c.CNI, c.Nodes = VXLAN, c.Nodes[:2]
	h := planNode(c, c.Nodes[1])
	want := []string{
		"addr add 172.26.236.177/24 broadcast + dev eth0",
		"addr add 192.168.177.254/24 broadcast + dev cni0",
		"route add default via 172.26.236.1",
		"link add flannel.1 address 02:00:00:01:ec:b1 mtu 1430 type vxlan id 1 dstport 8472 local 172.26.236.177 " +
			"dev eth0 nolearning",
		"addr add 192.168.177.0/32 dev flannel.1",
		"link set flannel.1 up",
		"neigh add 192.168.176.0 lladdr 02:00:00:01:ec:b0 dev flannel.1 nud permanent",
		"route add 192.168.176.0/24 via 192.168.176.0 dev flannel.1 onlink",
	}
	if diff := cmp.Diff(want, h.Config); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"fdb append 02:00:00:01:ec:b0 dev flannel.1 dst 172.26.236.176"}, h.FDB); diff != "" {
		t.Errorf("forwarding database (-want +got):\n%s", diff)
	}
	if len(h.Rules) != 1 || !strings.Contains(h.Rules[0], "! -s 192.168.0.0/16 -d 192.168.177.0/24 -j RETURN") {
		t.Errorf("rules %q", h.Rules)
	}
}

// Calico's: no bridge, a route for each pod, and a Node whose podCIDR is not where its pods are.
func TestPlanCalico(t *testing.T) {
	c := SeedCluster()
	c.CNI, c.DualStack, c.Nodes = Calico, true, c.Nodes[:3]
	node, pod := c.Nodes[2], c.Pods[0]
	h := planNode(c, node)
	if len(h.Bridges)+len(h.FDB) > 0 || h.Sysctls["ipv4/conf/all/rp_filter"] != "1" || len(h.Rules) != 2 {
		t.Errorf("%+v", h)
	}
	if want := "route add blackhole 192.168.189.0/24"; !slices.Contains(h.Config, want) {
		t.Errorf("%q is not in %q", want, h.Config)
	}
	if cidr := c.podCIDR(node); cidr.Contains(pod.Addr) {
		t.Errorf("the Node has %s, and a pod %s", cidr, pod.Addr)
	}
	own, others := planPod(c, pod, node).commands(func(host string) string { return "x-" + host })
	w := workload(pod)
	wantOwn := []string{
		"link set lo up",
		"link add eth0 type veth peer name " + w + " netns x-k8s-worker-178",
		"link set eth0 up",
		"addr add 192.168.189.131/32 dev eth0",
		"route add 169.254.1.1 dev eth0 scope link",
		"route add default via 169.254.1.1 dev eth0",
		"addr add fd00:192:168:189::131/128 nodad dev eth0",
		"route add default via fe80::ecee:eeff:feee:eeee dev eth0",
	}
	if diff := cmp.Diff(wantOwn, own); diff != "" {
		t.Errorf("in the pod (-want +got):\n%s", diff)
	}
	wantOthers := map[string][]string{"k8s-worker-178": {
		"link set " + w + " address ee:ee:ee:ee:ee:ee", "link set " + w + " up", "route add 192.168.189.131/32 dev " + w,
		"route add fd00:192:168:189::131/128 dev " + w, "link set " + w + " up"}}
	if diff := cmp.Diff(wantOthers, others); diff != "" {
		t.Errorf("on the node (-want +got):\n%s", diff)
	}
	if err := c.Validate(); err == nil || strings.Contains(err.Error(), "CNI") { // pods of a node that was left out
		t.Errorf("a network that is known: %v", err)
	}
	c.CNI = "cilium"
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), `CNI "cilium"`) {
		t.Errorf("another network: %v", err)
	}
	if len(w) != 15 || !strings.HasPrefix(w, "cali") {
		t.Errorf("interface %s", w)
	}
}

// With IPIP, IPv4 alone goes through a tunnel, which has no link layer.
func TestPlanCalicoIPIP(t *testing.T) {
	c := SeedCluster()
	c.CNI, c.DualStack, c.Nodes = CalicoIPIP, true, c.Nodes[:2]
	h := planNode(c, c.Nodes[1])
	for _, want := range []string{
		"addr add 192.168.177.0/32 dev tunl0",
		"route add 192.168.176.0/24 encap ip id 0 dst 172.26.236.176 dev tunl0",
		"route add fd00:192:168:176::/64 via fd00:172:26:236::176",
	} {
		if !slices.Contains(h.Config, want) {
			t.Errorf("%q is not in %q", want, h.Config)
		}
	}
	if len(h.FDB) > 0 || len(h.Rules) != 2 || !strings.Contains(h.Rules[0], "-o tunl0 ") ||
		strings.Contains(h.Rules[1], "tunl0") {
		t.Errorf("entries %q, rules %q", h.FDB, h.Rules)
	}
}
