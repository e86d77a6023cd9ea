package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
)

// rackFlows is how many long-lived connections the tables of racks are about.
const rackFlows = 2000

// startRacks starts three racks of two workers, and waits until the spine spreads the addresses of
// my-nginx over them.
func startRacks(t testing.TB, tor lab.ToR, dual bool, policy string, values map[string]any) *lab.Lab {
	t.Helper()
	cluster := lab.RackCluster(3, 2, rackRouters(tor))
	cluster.DualStack = dual
	service := lab.SeedService()
	service.ExternalTrafficPolicy = policy
	return startInRacks(t, cluster, service, values)
}

// rackRouters has ToR routers be FRR, with the AS numbers of the lab.
func rackRouters(tor lab.ToR) lab.ToR {
	tor.Kind, tor.ASN, tor.NodeASN = lab.FRR, 64501, 64500
	return tor
}

// startInRacks starts a cluster in racks with one Service, in all families, and waits as startRacks.
func startInRacks(t testing.TB, cluster lab.Cluster, service lab.Service, values map[string]any) *lab.Lab {
	t.Helper()
	l := labtest.Start(t, cluster, lab.Options{Values: values})
	more := ""
	if cluster.DualStack {
		more = `, "fd00:203:0:113::180-fd00:203:0:113::199"`
	}
	objects := fmt.Sprintf(bgpPool, more) + rackPeers(cluster)
	if err := l.ApplyYAML(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
	if cluster.DualStack {
		service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	wantInRacks(t, l, workers(l)...)
	return l
}

// rackPeers returns the BGPPeers: one for each router and family, and beside Calico's BIRD one for each node as well.
func rackPeers(c lab.Cluster) string {
	var objects strings.Builder
	peer := func(name, selector, more string, rack int, addr netip.Addr) {
		fmt.Fprintf(&objects, "---\napiVersion: landfall.dev/v1beta1\nkind: BGPPeer\nmetadata: {name: %s}\n"+
			"spec: {myASN: %d, peerASN: %d, peerAddress: %q, nodeSelectors: [{matchLabels: {%s}}]%s}\n",
			name, c.ToR.NodeASN, c.ToR.ASN+uint32(rack)-1, addr, selector, more)
	}
	for rack := 1; rack <= c.Racks; rack++ {
		router := netip.AddrFrom4([4]byte{172, 26, byte(rack), 0})
		for i := range c.ToR.Count {
			router = router.Next()
			for k, addr := range c.Addresses(router) {
				name := fmt.Sprintf("rack-%d-%d-%d", rack, i, k)
				if c.CNI != lab.CalicoBGP {
					peer(name, fmt.Sprintf("rack: \"%d\"", rack), "", rack, addr)
					continue
				}
				for _, n := range c.Nodes {
					if n.Rack == rack {
						peer(name+"-"+n.Name, "kubernetes.io/hostname: "+n.Name,
							fmt.Sprintf(", sourceAddress: %q", c.Addresses(n.SpeakerAddr())[k]), rack, addr)
					}
				}
			}
		}
	}
	return objects.String()
}

// wantInRacks waits until the ToR routers spread the addresses over exactly these nodes, each over
// those of its rack, and the spine over their racks.
func wantInRacks(t testing.TB, l *lab.Lab, nodes ...string) {
	t.Helper()
	c := l.Cluster()
	tors := map[int]int{} // by rack, how many the spine may use
	for _, n := range c.Nodes {
		if slices.Contains(nodes, n.Name) {
			tors[n.Rack] = c.ToR.Count
		}
	}
	ways := 0
	for _, n := range tors {
		ways += n
	}
	check := func(vip netip.Addr) error {
		hops, err := l.Spine().NextHops(t.Context(), host(vip))
		if err != nil || len(hops) != ways {
			return fmt.Errorf("the spine sends %s to %v, want %d routers: %w", vip, hops, ways, err)
		}
		for i, r := range l.Routers() {
			rack := i/c.ToR.Count + 1
			if tors[rack] == 0 {
				continue
			}
			var want []string
			for _, n := range c.Nodes {
				if n.Rack == rack && slices.Contains(nodes, n.Name) {
					want = append(want, n.Name)
				}
			}
			slices.Sort(want)
			if got, err := r.Nodes(t.Context(), host(vip)); err != nil || !slices.Equal(got, want) {
				return fmt.Errorf("%s sends %s to %v, want %v: %w", r.Name, vip, got, want, err)
			}
		}
		return nil
	}
	eventually(t, fmt.Sprintf("routes to %v", nodes), func() error {
		var errs []error
		for _, vip := range bgpVIPs(l) {
			errs = append(errs, check(vip.Addr()))
		}
		return errors.Join(errs...)
	})
}

// rackFlow is a long-lived connection, and the pod that it leads to.
type rackFlow struct {
	conn net.Conn
	in   *bufio.Reader
	pod  string
	err  error // of the last use
}

// openFlows opens connections from behind the spine.
func openFlows(t testing.TB, l *lab.Lab, n int) []*rackFlow {
	t.Helper()
	return openFlowsFrom(t, l, lab.FarClientName, n, bgpVIPs(l)...)
}

// openFlowsFrom opens connections from a host.
func openFlowsFrom(t testing.TB, l *lab.Lab, host string, n int, vips ...netip.AddrPort) []*rackFlow {
	t.Helper()
	flows := make([]*rackFlow, n)
	for i := range flows {
		conn, err := l.Dial(t.Context(), host, "tcp", vips[i%len(vips)].String())
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		t.Cleanup(func() { conn.Close() })
		flows[i] = &rackFlow{conn: conn, in: bufio.NewReader(conn)}
	}
	if lost := use(flows); len(lost) > 0 {
		t.Fatalf("%d of %d connections do not work at first", len(lost), n)
	}
	return flows
}

// use sends a line over each connection, and returns those that were lost.
func use(flows []*rackFlow) (lost []*rackFlow) {
	var mu sync.Mutex
	var group sync.WaitGroup
	work := make(chan *rackFlow)
	for range 64 {
		group.Go(func() {
			for f := range work {
				if f.err = f.use(); f.err != nil {
					mu.Lock()
					lost = append(lost, f)
					mu.Unlock()
				}
			}
		})
	}
	for _, f := range flows {
		work <- f
	}
	close(work)
	group.Wait()
	return lost
}

func (f *rackFlow) use() error {
	_ = f.conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := f.conn.Write([]byte("\n")); err != nil {
		return err
	}
	line, err := f.in.ReadBytes('\n')
	if err != nil {
		return err
	}
	var answer podserver.Answer
	if err := json.Unmarshal(line, &answer); err != nil {
		return err
	}
	f.pod = answer.Pod
	return nil
}

// flowsWithout returns the connections that are not among the lost ones.
func flowsWithout(flows, lost []*rackFlow) []*rackFlow {
	return slices.DeleteFunc(slices.Clone(flows), func(f *rackFlow) bool { return slices.Contains(lost, f) })
}

// TestContract5RacksLoseNothing drains, joins, updates and upgrades nodes in racks that only routers join,
// and breaks none of the connections; a crash breaks those of its own node only.
func TestContract5RacksLoseNothing(t *testing.T) {
	for _, policy := range []string{"Local", "Cluster"} {
		t.Run(policy, func(t *testing.T) {
			wantNoFlowLost(t, rackTable(t, startRacks(t, lab.ToR{Count: 1}, false, policy, nil)))
		})
	}
}

// TestContract5RacksWithTwoRoutersLoseNothing does so in two families, with two ToR routers in each
// rack, with and without addresses between them and the spine.
func TestContract5RacksWithTwoRoutersLoseNothing(t *testing.T) {
	for _, row := range []struct {
		name, policy string
		unnumbered   bool
	}{{"Local", "Local", true}, {"Cluster", "Cluster", true}, {"Local, numbered", "Local", false}} {
		t.Run(row.name, func(t *testing.T) {
			tor := lab.ToR{Count: 2, Unnumbered: row.unnumbered}
			wantNoFlowLost(t, rackTable(t, startRacks(t, tor, true, row.policy, nil)))
		})
	}
}

// TestContract5RacksInIptablesModeLoseNothing does so with one such router in each rack, and proxies in iptables mode.
func TestContract5RacksInIptablesModeLoseNothing(t *testing.T) {
	values := map[string]any{"proxy": map[string]any{"mode": "iptables"}}
	for _, policy := range []string{"Local", "Cluster"} {
		t.Run(policy, func(t *testing.T) {
			wantNoFlowLost(t, rackTable(t, startRacks(t, lab.ToR{Count: 1, Unnumbered: true}, true, policy, values)))
		})
	}
}

// TestContract5RacksBesideCalicoLoseNothing does so where Calico's BIRD of each node speaks with the same pair of
// routers, which spread the pods' routes between racks.
func TestContract5RacksBesideCalicoLoseNothing(t *testing.T) {
	cluster := lab.RackCluster(3, 2, rackRouters(lab.ToR{Count: 2}))
	cluster.DualStack, cluster.CNI = true, lab.CalicoBGP
	for _, policy := range []string{"Local", "Cluster"} {
		t.Run(policy, func(t *testing.T) {
			service := lab.SeedService()
			service.ExternalTrafficPolicy = policy
			wantNoFlowLost(t, rackTable(t, startInRacks(t, cluster, service, nil)))
		})
	}
}

// BenchmarkRacks shows how many long-lived connections each change costs, without and with the
// tunnel between racks.
func BenchmarkRacks(b *testing.B) {
	for _, port := range []int{0, 7948} {
		b.Run(fmt.Sprintf("port-%d", port), func(b *testing.B) {
			values := map[string]any{"proxy": map[string]any{"rescueTunnelPort": port}}
			figures := series{}
			for b.Loop() {
				inTurn(b, func(t testing.TB) {
					for _, row := range rackTable(t, startRacks(t, lab.ToR{Count: 1}, false, "Local", values)) {
						figures.add(100*float64(row.lost)/float64(row.of), "%lost/"+strings.ReplaceAll(row.name, " ", "-"))
					}
				})
			}
			figures.report(b)
		})
	}
}
