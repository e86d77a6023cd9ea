//go:build vm

package vm

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	kernel "github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

const landfallSpeaker = "/landfall/landfall-speaker"

const nodeASN, routerASN int64 = 64512, 64513

// vrfNode is a node with a VRF whose only way leads to a router, and a client behind that. The main table's default route
// leads elsewhere, so that an answer that leaves by it is lost.
type vrfNode struct {
	*node
	router *nstest.NS
	// own is the node's address in the VRF, to the router's.
	own, to netip.Addr
	// vrf are what ip does, with the option dash of the family, to make the VRF.
	vrf  []string
	dash string
}

func newVRFNode(t *testing.T, family lb.Family, peerPort int32) *vrfNode {
	n := &vrfNode{node: &node{Site: cases.NewSite(t, cases.WorldOf(family)), folder: t.TempDir()}, router: nstest.New(t),
		own: netip.MustParseAddr("10.99.0.1"), to: netip.MustParseAddr("10.99.0.2")}
	gateway, far, pool, long, dash := "198.18.5.1", "198.18.5.2", "198.51.100.0/24", "/24", "-4"
	if family == lb.IPv6 {
		n.own, n.to = netip.MustParseAddr("fd99::1"), netip.MustParseAddr("fd99::2")
		gateway, far, pool, long, dash = "fd98::1", "fd98::2", "2001:db8::/112", "/64", "-6"
	}
	client := nstest.New(t)
	nstest.Veth(t, n.Node, "up0", "", n.router, "eth0", n.to.String()+long)
	nstest.Veth(t, n.router, "eth1", gateway+long, client, "eth0", far+long)
	client.Run(t, "ip", "route", "add", "default", "via", gateway)
	n.router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	n.vrf = []string{
		"link add red type vrf table 100", "link set red up", "link set up0 master red", "link set up0 up",
		"addr replace " + n.own.String() + long + " dev up0 nodad", "route replace default via " + n.to.String() + " vrf red",
		// As the kernel's documentation has it. It stays in the table when the VRF goes.
		"route replace unreachable default metric 4278198272 vrf red",
	}
	n.dash = dash
	n.makeVRF(t)
	n.World.Outside, n.At["outside"] = netip.MustParseAddr(far), client
	n.kubeconfig = filepath.Join(n.folder, "kubeconfig")
	svcs, slices := services(n.World)
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, ResourceVersion: "1", UID: "1"}
	}
	kind := func(name string) metav1.TypeMeta {
		return metav1.TypeMeta{Kind: name, APIVersion: "landfall.dev/v1beta1"}
	}
	objects := api{objects: map[string][]runtime.Object{
		"services": svcs, "endpointslices": slices,
		"nodes": {&corev1.Node{TypeMeta: metav1.TypeMeta{Kind: "Node", APIVersion: "v1"}, ObjectMeta: meta(cases.Here),
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: n.World.Node.String()}}}}},
		"ipaddresspools": {&v1beta1.IPAddressPool{TypeMeta: kind("IPAddressPool"), ObjectMeta: meta("lan"),
			Spec: v1beta1.IPAddressPoolSpec{Addresses: []v1beta1.AddressRange{v1beta1.AddressRange(pool)}}}},
		"bgpadvertisements": {&v1beta1.BGPAdvertisement{TypeMeta: kind("BGPAdvertisement"), ObjectMeta: meta("all"),
			Spec: v1beta1.BGPAdvertisementSpec{AggregationLength: new(int32(32)), AggregationLengthV6: new(int32(128))}}},
		"bfdprofiles": {&v1beta1.BFDProfile{TypeMeta: kind("BFDProfile"), ObjectMeta: meta("slow"),
			Spec: v1beta1.BFDProfileSpec{ReceiveInterval: new(int32(500)), TransmitInterval: new(int32(500)),
				DetectMultiplier: new(int32(10))}}},
		"bgppeers": {&v1beta1.BGPPeer{TypeMeta: kind("BGPPeer"), ObjectMeta: meta("tor"),
			Spec: v1beta1.BGPPeerSpec{MyASN: nodeASN, PeerASN: new(routerASN), PeerAddress: n.to.String(), PeerPort: peerPort,
				VRF: "red", BFDProfile: "slow", Password: "secret"}}},
	}}
	n.Node.Do(t, func() error { return objects.serve(t, n.kubeconfig) })
	for _, at := range []string{"local", "remote"} {
		n.echo(t, at)
	}
	return n
}

// makeVRF makes the VRF, in one process that runs other commands of ip first.
func (n *vrfNode) makeVRF(t *testing.T, first ...string) {
	t.Helper()
	batch := filepath.Join(n.folder, "vrf")
	if err := os.WriteFile(batch, []byte(strings.Join(append(first, n.vrf...), "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.Node.Run(t, "ip", n.dash, "-batch", batch)
}

// watched returns since when the router has BFD up, by its clock; "" while it has not.
func (n *vrfNode) watched() string {
	for line := range strings.Lines(n.ask("show", "bfd", "sessions")) {
		if fields := strings.Fields(line); len(fields) > 3 && fields[0] == n.own.String() && fields[2] == "Up" {
			return fields[3]
		}
	}
	return ""
}

// bird runs the router. It connects again soon after BFD was down: by default it waits for a minute, and twice as long
// each time.
func (n *vrfNode) bird(t *testing.T) {
	config := filepath.Join(n.folder, "bird.conf")
	text := fmt.Sprintf(`router id 10.99.0.2;
protocol device { scan time 1; }
protocol direct { %[1]s; }
protocol kernel { %[1]s { export where source = RTS_BGP; }; }
protocol bfd { interface "eth0" { interval 500 ms; multiplier 10; }; }
protocol bgp node { local %[2]s as %[3]d; neighbor %[4]s as %[5]d; password "secret"; bfd on; connect delay time 1;
  connect retry time 2; error wait time 1, 2; %[1]s { import all; export none; }; }
`, strings.ToLower(string(n.World.Family)), n.to, routerASN, n.own, nodeASN)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(n.folder, "bird.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("ip", "netns", "exec", n.router.Name, "bird", "-f", "-c", config, "-s", n.control())
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		log.Close()
		if out, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("bird: %s", out)
		}
	})
}

func (n *vrfNode) control() string { return filepath.Join(n.folder, "bird.sock") }

// ask returns what the router says to a command; "" while it says nothing.
func (n *vrfNode) ask(command ...string) string {
	out, err := exec.Command("birdc", append([]string{"-s", n.control()}, command...)...).CombinedOutput()
	if err != nil {
		return ""
	}
	return string(out)
}

func (n *vrfNode) speaker(t *testing.T) (stop func()) {
	return n.start(t, landfallSpeaker, "--kubeconfig="+n.kubeconfig, "--node-name="+cases.Here,
		"--feed-socket="+filepath.Join(n.folder, "feed.sock"), "--bgp-listen=:179", "--bgp-convergence=0s",
		"--metrics-bind-address=127.0.0.1:7481", "--status-socket="+n.status())
}

func (n *vrfNode) status() string { return filepath.Join(n.folder, "speaker.sock") }

// said returns what the speaker says of itself.
func (n *vrfNode) said() string {
	out, _ := exec.Command("ip", "netns", "exec", n.Node.Name, landfallSpeaker, "status",
		"--status-socket="+n.status()).CombinedOutput()
	return string(out)
}

// hears reports whether the router has routes to both VIPs through the node.
func (n *vrfNode) hears(t *testing.T) bool {
	routes := n.routes(t)
	return strings.Contains(routes, n.World.VIP.String()+" via "+n.own.String()) &&
		strings.Contains(routes, n.World.VIP2.String()+" via "+n.own.String())
}

func (n *vrfNode) routes(t *testing.T) string {
	return n.router.Run(t, "ip", "route") + n.router.Run(t, "ip", "-6", "route")
}

// answered checks that clients behind the router get answers, and that one outside of the VRF does.
func (n *vrfNode) answered(t *testing.T, phase string, kept []net.Conn) {
	t.Helper()
	count := 0
	for range 10 {
		for _, w := range []way{{"outside", "vip", lb.TCP}, {"outside", "vip", lb.UDP}, {"outside", "vip2", lb.TCP},
			{"stranger", "vip", lb.TCP}} {
			_, saw, err := n.Ask(cases.Case{From: w.from, To: w.to, Protocol: w.protocol}, cases.Long)
			switch {
			case err != nil:
				t.Errorf("%s: %s %s to %s: %v", phase, w.protocol, w.from, w.to, err)
			case w.to == "vip2" && saw != n.World.Outside:
				t.Errorf("%s: with policy Local the backend saw %s", phase, saw)
			default:
				count++
			}
		}
	}
	t.Logf("%s: %d of 40 connections got an answer, %d of %d live", phase, count, alive(kept), len(kept))
}

// TestVRF announces VIPs to a router in a VRF. With nftables the speaker opens the session, and with iptables the router
// does.
func TestVRF(t *testing.T) {
	for _, c := range []struct {
		mode   string
		family lb.Family
		port   int32
	}{{"nftables", lb.IPv4, 179}, {"iptables", lb.IPv4, 9}, {"nftables", lb.IPv6, 9}, {"iptables", lb.IPv6, 179}} {
		t.Run(c.mode+" "+string(c.family), func(t *testing.T) {
			n := newVRFNode(t, c.family, c.port)
			stopProxy := n.landfall(t, c.mode)
			n.speaker(t)
			n.bird(t)
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("%s\n%s\n%s\n%s", n.said(), n.ask("show", "protocols", "all", "node"), n.Node.Run(t, "ip", "rule"),
						n.Node.Run(t, "nft", "list", "ruleset"))
				}
			})
			eventually(t, "the router has the routes", func() bool { return n.hears(t) })
			kept := n.open(t)
			n.answered(t, "at first", kept)
			// What docs/guide/bgp.md says of node ports, which nothing depends on.
			t.Logf("a node port at the address in the VRF: %v",
				n.Reach(t, "outside", netip.AddrPortFrom(n.own, cases.NodePort), cases.Long))
			eventually(t, "BFD is up", func() bool { return n.watched() != "" })

			handle, err := netns.GetFromName(n.Node.Name)
			if err != nil {
				t.Fatal(err)
			}
			defer handle.Close()
			gateways, err := kernel.Gateways(handle)
			if !slices.ContainsFunc(gateways, func(g kernel.Gateway) bool { return g.Addr == n.to }) {
				t.Errorf("the gateway in the VRF is not among %v: %v", gateways, err)
			}

			// Somebody's rule is ahead, and sends packets to pods elsewhere.
			dash, table := "-4", "ip"
			if c.family == lb.IPv6 {
				dash, table = "-6", "ip6"
			}
			n.Node.Run(t, "ip", dash, "route", "add", "blackhole", "default", "table", "77")
			n.Node.Run(t, "ip", dash, "rule", "add", "pref", "100", "fwmark", "0x70/0x70", "lookup", "77")
			eventually(t, "the router has no route while the node does not deliver", func() bool {
				return !strings.Contains(n.routes(t), n.World.VIP.String())
			})
			if said := n.said(); !strings.Contains(said, string(lb.ReasonVRFUndelivered)) {
				t.Errorf("the speaker does not say %s: %s", lb.ReasonVRFUndelivered, said)
			}
			n.Node.Run(t, "ip", dash, "rule", "del", "pref", "100")
			eventually(t, "the router has the routes again", func() bool { return n.hears(t) })
			n.answered(t, "without the rule", kept)

			// A proxy that restarts leaves all as it is.
			stopProxy()
			if !n.hears(t) {
				t.Error("the routes are gone while the proxy restarts")
			}
			n.answered(t, "without a proxy", kept)
			stopProxy = n.landfall(t, c.mode)
			eventually(t, "the proxy is ready", func() bool { return n.get(t, "http://127.0.0.1:7482/readyz") != "" })
			n.answered(t, "after the restart", kept)
			if count := alive(kept); count != len(kept) {
				t.Errorf("%d of %d connections live", count, len(kept))
			}

			// One that finds its rules gone writes them.
			n.Node.Run(t, "nft", "delete", "table", table, "landfall-vrf")
			n.Node.Run(t, "ip", dash, "rule", "del", "pref", "990")
			eventually(t, "the proxy has its rules again", func() bool {
				return strings.Contains(n.Node.Run(t, "nft", "list", "tables"), "table "+table+" landfall-vrf") &&
					strings.Contains(n.Node.Run(t, "ip", dash, "rule"), "fwmark 0x70/0x70")
			})
			n.answered(t, "after somebody removed the rules", nil)

			// Sockets follow the VRF, which is made anew before the speaker looks.
			before := ""
			eventually(t, "BFD is still up", func() bool { before = n.watched(); return before != "" })
			n.makeVRF(t, "link del red")
			eventually(t, "BFD is up in the new VRF", func() bool {
				since := n.watched()
				return since != "" && since != before
			})
			eventually(t, "the router has the routes through the new VRF", func() bool { return n.hears(t) })
			n.answered(t, "in the new VRF", nil)

			n.Node.Run(t, "ip", "link", "del", "red")
			eventually(t, "the speaker misses the VRF", func() bool {
				return strings.Contains(n.said(), string(lb.ReasonVRFMissing))
			})
			stopProxy()
			n.Node.Run(t, landfallProxy, "cleanup")
			if err := n.clean(t); err != nil {
				t.Error(err)
			}
			if rules := n.Node.Run(t, "ip", dash, "rule"); strings.Contains(rules, "fwmark") {
				t.Errorf("left: %s", rules)
			}
		})
		time.Sleep(time.Second) // for the ports of programs that have ended
	}
}
