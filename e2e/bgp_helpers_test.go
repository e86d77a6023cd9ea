package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// The addresses of Services over BGP are in no segment: only the routers know the way.
var (
	bgpVIP  = netip.MustParseAddrPort("203.0.113.180:80")
	bgpVIP6 = netip.MustParseAddrPort("[fd00:203:0:113::180]:80")
)

const bgpPool = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: routed}
spec: {addresses: [203.0.113.180-203.0.113.199%s]}
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: routed}
spec: {ipAddressPools: [routed]}
---
apiVersion: landfall.dev/v1beta1
kind: BFDProfile
metadata: {name: fast}
spec: {transmitInterval: 50, receiveInterval: 50, detectMultiplier: 3}
`

// bgpPeers are the objects for the lab's ToR routers: a session for each router, and each family of
// the cluster. spec is added to each.
func bgpPeers(c lab.Cluster, spec string) string {
	var b strings.Builder
	router := c.LAN.Router
	for i := 1; i <= c.ToR.Count; i++ {
		addrs := map[string]netip.Addr{"": router}
		if c.DualStack {
			addrs["-v6"] = lab.Twin(router)
		}
		for suffix, addr := range addrs {
			fmt.Fprintf(
				&b,
				"---\napiVersion: landfall.dev/v1beta1\nkind: BGPPeer\nmetadata: {name: tor-%d%s}\nspec: {myASN: %d, peerASN: "+
					"%d, peerAddress: \"%s\"%s}\n",
				i, suffix, c.ToR.NodeASN, c.ToR.ASN, addr, spec)
		}
		router = router.Next()
	}
	return b.String()
}

// startBGP starts the seed cluster behind ToR routers, with sessions to all of them and the Service
// of the worked example, and waits until all workers are in the routers' kernels.
func startBGP(t testing.TB, tor lab.ToR, dual bool, spec string) *lab.Lab {
	t.Helper()
	return startBGPWith(t, lab.Options{}, tor, dual, spec)
}

func startBGPWith(t testing.TB, options lab.Options, tor lab.ToR, dual bool, spec string) *lab.Lab {
	t.Helper()
	cluster := lab.SeedCluster()
	cluster.ToR, cluster.DualStack = tor, dual
	l := labtest.Start(t, cluster, options)
	more := ""
	if dual {
		more = `, "fd00:203:0:113::180-fd00:203:0:113::199"`
	}
	if err := l.ApplyYAML(t.Context(), fmt.Sprintf(bgpPool, more)+bgpPeers(cluster, spec)); err != nil {
		t.Fatal(err)
	}
	service := lab.SeedService()
	if dual {
		service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	for _, vip := range bgpVIPs(l) {
		wantRouted(t, l, vip.Addr(), workers(l)...)
	}
	return l
}

// bgpVIPs are the addresses of my-nginx.
func bgpVIPs(l *lab.Lab) []netip.AddrPort {
	if l.Cluster().DualStack {
		return []netip.AddrPort{bgpVIP, bgpVIP6}
	}
	return []netip.AddrPort{bgpVIP}
}

// host is the prefix of one address.
func host(vip netip.Addr) netip.Prefix { return netip.PrefixFrom(vip, vip.BitLen()) }

// routed reports whether the kernels of all routers spread a prefix over exactly these nodes, in
// the order of their names.
func routed(t testing.TB, l *lab.Lab, prefix netip.Prefix, nodes ...string) error {
	t.Helper()
	var errs []error
	for _, r := range l.Routers() {
		got, err := r.Nodes(t.Context(), prefix)
		if err == nil && !slices.Equal(got, nodes) {
			err = fmt.Errorf("%s sends %s to %v, want %v", r.Name, prefix, got, nodes)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// wantRouted waits until all routers spread an address over exactly these nodes.
func wantRouted(t testing.TB, l *lab.Lab, vip netip.Addr, nodes ...string) {
	t.Helper()
	nodes = slices.Sorted(slices.Values(nodes))
	eventually(t, fmt.Sprintf("%s is routed to %v", vip, nodes), func() error { return routed(t, l, host(vip), nodes...) })
}

// wantSessions waits until all routers have established sessions of both families with bgpNode, of
// which they show all of this. Routes alone do not tell: those of a session that is down may be
// kept, stale.
func wantSessions(t testing.TB, l *lab.Lab, shown ...string) {
	t.Helper()
	shown = append(shown, "BGP state = Established")
	eventually(t, fmt.Sprintf("sessions with %s: %q", bgpNode, shown), func() error {
		for _, r := range l.Routers() {
			for _, node := range []string{"172.26.236.177", "fd00:172:26:236::177"} {
				out := ask(t, r, "show bgp neighbors "+node)
				for _, want := range shown {
					if !strings.Contains(out, want) {
						return fmt.Errorf("%s: no %q in %s", r.Name, want, out)
					}
				}
			}
		}
		return nil
	})
}

// startFar begins new connections from the client behind the routers to each address of the
// Service.
func startFar(t testing.TB, l *lab.Lab) []*lab.Probe {
	t.Helper()
	var probes []*lab.Probe
	for _, vip := range bgpVIPs(l) {
		probes = append(probes, l.StartProbe(t.Context(), lab.FarClientName, "tcp", vip, newEvery))
	}
	return probes
}

// wantNoneLostFar ends the probes and fails the test if a connection failed.
func wantNoneLostFar(t *testing.T, probes []*lab.Probe) {
	t.Helper()
	for i, p := range probes {
		report := p.Stop()
		t.Logf("client %d: %s", i+1, report)
		if report.Answered == 0 || report.Failed() > 0 {
			t.Errorf("new connections were lost: %s", report)
		}
	}
}

// longestHit ends the probes and returns for how long connections were hit.
func longestHit(t testing.TB, probes []*lab.Probe) (hit time.Duration) {
	t.Helper()
	for i, p := range probes {
		report := p.Stop()
		t.Logf("client %d: %s", i+1, report)
		hit = max(hit, report.Hit)
	}
	return hit
}

// watched reports whether the routers see all workers over BFD.
func watched(t testing.TB, l *lab.Lab) error {
	t.Helper()
	command, up := "show bfd peers brief", "up"
	if l.Cluster().ToR.Kind == lab.BIRD {
		command, up = "show bfd sessions", "Up"
	}
	for _, r := range l.Routers() {
		for _, n := range l.Cluster().Nodes {
			found := false
			for line := range strings.Lines(ask(t, r, command)) {
				fields := strings.Fields(line)
				found = found || slices.Contains(fields, n.Addr.String()) && slices.Contains(fields, up)
			}
			if !found {
				return fmt.Errorf("%s does not see %s", r.Name, n.Name)
			}
		}
	}
	return nil
}

// ask gives a router a command, and fails the test if it does not take it.
func ask(t testing.TB, r *lab.Router, command string) string {
	t.Helper()
	out, err := r.Ask(t.Context(), command)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// watchRoutes watches the routes to the Service's addresses in the routers' kernels. What it
// returns ends that, and returns the changes.
func watchRoutes(t testing.TB, l *lab.Lab) func() []string {
	t.Helper()
	var ends []func() []string
	for _, r := range l.Routers() {
		for _, family := range []string{"-4", "-6"} {
			end, err := r.WatchRoutes(t.Context(), family)
			if err != nil {
				t.Fatal(err)
			}
			ends = append(ends, end)
		}
	}
	return func() (changes []string) {
		for i, end := range ends {
			for _, line := range end() {
				if strings.Contains(line, "203.0.113.") || strings.Contains(line, "fd00:203:0:113:") {
					changes = append(changes, l.Routers()[i/2].Name+": "+line)
				}
			}
		}
		return changes
	}
}

// sessionsSince returns what happened to the sessions of a node since then, as FRR and the node's
// speaker have logged it: which came first, the end of BGP or of BFD, and why.
func sessionsSince(l *lab.Lab, node string, begin time.Time) string {
	var b strings.Builder
	i := slices.IndexFunc(l.Cluster().Nodes, func(n lab.Node) bool { return n.Name == node })
	addr := l.Cluster().Nodes[i].Addr
	for _, r := range l.Routers() {
		fmt.Fprintf(&b, "%s about %s:\n%s", r.Name, node, r.Since(begin, func(line string) bool {
			about := strings.Contains(line, addr.String()) || strings.Contains(line, lab.Twin(addr).String())
			return about && containsAny(line, "state-change", "session-", "bfd state", "ADJCHANGE", "went from",
				"connection closed", "graceful restart", "End-of-RIB", "NOTIFICATION")
		}))
	}
	fmt.Fprintf(&b, "the speaker of %s:\n%s", node,
		logSince(l.Agent("speaker", node), begin, "BFD", "BGP", "peer=", "starting", "stopping"))
	return b.String()
}
