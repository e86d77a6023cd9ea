package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
				if f.use() != nil {
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

// TestContract5RacksLoseNothing drains, joins and upgrades nodes in racks that only routers join,
// and breaks none of the connections; a crash breaks those of its own node only.
func TestContract5RacksLoseNothing(t *testing.T) {
	for _, policy := range []string{"Local", "Cluster"} {
		t.Run(policy, func(t *testing.T) {
			wantNoFlowLost(t, rackTable(t, startRacks(t, lab.ToR{Count: 1}, false, policy, nil), policy == "Local"))
		})
	}
}

// TestContract5RacksWithTwoRoutersLoseNothing does so in two families, with two ToR routers in each
// rack, and no addresses between them and the spine.
func TestContract5RacksWithTwoRoutersLoseNothing(t *testing.T) {
	wantNoFlowLost(t, rackTable(t, startRacks(t, lab.ToR{Count: 2, Unnumbered: true}, true, "Local", nil), true))
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
			wantNoFlowLost(t, rackTable(t, startInRacks(t, cluster, service, nil), policy == "Local"))
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
					for _, row := range rackTable(t, startRacks(t, lab.ToR{Count: 1}, false, "Local", values), true) {
						figures.add(100*float64(row.lost)/float64(row.of), "%lost/"+strings.ReplaceAll(row.name, " ", "-"))
					}
				})
			}
			figures.report(b)
		})
	}
}

// rackRow is what a change has cost.
type rackRow struct {
	name     string
	lost, of int // long-lived connections
	new      lab.Report
}

func wantNoFlowLost(t *testing.T, rows []rackRow) {
	t.Helper()
	for _, row := range rows {
		// A router that has lost its last way answers so until the spine has told it of another.
		delete(row.new.Failures, unix.EHOSTUNREACH.Error())
		if row.lost > 0 || len(row.new.Failures) > 0 {
			t.Errorf("%s: %d of %d connections were lost, of new ones %v", row.name, row.lost, row.of, row.new.Failures)
		}
	}
}

// rackTable lets happen what happens to nodes, the last a crash if connections are those of the node
// that has the pod.
func rackTable(t testing.TB, l *lab.Lab, local bool) (rows []rackRow) {
	t.Helper()
	all := workers(l)
	flows := openFlows(t, l, rackFlows)
	const node, mate, other = "k8s-rack-2-1", "k8s-rack-2-2", "k8s-rack-3-2"
	step := func(name string, happen func()) {
		t.Helper()
		probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", bgpVIP, 20*time.Millisecond)
		before, row := moved(t, l), rackRow{name: name, of: len(flows)}
		happen()
		for range 2 { // the second time nodes remember the connections
			lost := use(flows)
			flows, row.lost = flowsWithout(flows, lost), row.lost+len(lost)
			time.Sleep(time.Second)
		}
		row.new = probe.Stop()
		t.Logf("%s: %d of %d lost, %d packets moved; new connections: %s", name, row.lost, row.of, moved(t, l)-before,
			row.new)
		rows = append(rows, row)
		flows = append(flows, openFlows(t, l, rackFlows-len(flows))...)
	}
	const drained = `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`
	step("drain", func() {
		patchNode(t, l, node, drained)
		wantInRacks(t, l, otherNames(all, node)...)
	})
	step("drain of the rack's last", func() {
		patchNode(t, l, mate, drained)
		wantInRacks(t, l, otherNames(all, node, mate)...)
	})
	step("join of both", func() {
		patchNode(t, l, mate, `{"spec":{"taints":null}}`)
		patchNode(t, l, node, `{"spec":{"taints":null}}`)
		wantInRacks(t, l, all...)
	})
	step("upgrade of all agents", func() {
		for _, node := range all {
			restart(t, l.Agent("speaker", node), (*lab.Agent).Stop, 300*time.Millisecond)
			restart(t, l.Agent("proxy", node), (*lab.Agent).Stop, 300*time.Millisecond)
		}
		wantInRacks(t, l, all...)
	})
	step("speaker stopped for good", func() {
		if err := l.Agent("speaker", other).Stop(); err != nil {
			t.Fatal(err)
		}
		wantInRacks(t, l, otherNames(all, other)...)
	})
	step("speaker back", func() {
		if err := l.Agent("speaker", other).Start(); err != nil {
			t.Fatal(err)
		}
		wantInRacks(t, l, all...)
	})
	if !local {
		return rows
	}
	// Routers with one hash may leave a node of a rack without connections: that with the most crashes.
	by := map[string]int{}
	for _, f := range flows {
		by[f.pod]++
	}
	busiest := slices.MaxFunc(slices.Collect(maps.Keys(by)), func(a, b string) int { return by[a] - by[b] })
	crashing := strings.Replace(busiest, "my-nginx", "k8s-rack", 1)
	isOwn := func(f *rackFlow) bool { return f.pod == busiest }
	crashed := slices.DeleteFunc(slices.Clone(flows), isOwn)
	t.Logf("%d of %d connections are those of the node that crashes", len(flows)-len(crashed), len(flows))
	flows = crashed
	for _, program := range []string{"speaker", "proxy"} {
		if err := l.Agent(program, crashing).Kill(); err != nil {
			t.Fatal(err)
		}
	}
	step("crash, of other nodes'", func() {
		if err := l.Cut(t.Context(), crashing); err != nil {
			t.Fatal(err)
		}
		for _, r := range l.Routers() { // which else find out when the hold time is over
			for _, n := range l.Cluster().Nodes {
				if n.Name != crashing || !strings.HasPrefix(n.Addr.String(), r.Addr.String()[:len("172.26.3.")]) {
					continue
				}
				sessions := l.Cluster().Addresses(n.Addr)
				if l.Cluster().CNI == lab.CalicoBGP {
					sessions = append(sessions, l.Cluster().Addresses(n.SpeakerAddr())...)
				}
				for _, addr := range sessions {
					ask(t, r, "clear bgp "+addr.String())
				}
			}
		}
		wantInRacks(t, l, otherNames(all, crashing)...)
	})
	// New connections to the dead node fail until the routers know.
	rows[len(rows)-1].new.Failures = nil
	return rows
}

// moved is how many packets all nodes have passed on.
func moved(t testing.TB, l *lab.Lab) (sum int) {
	t.Helper()
	for _, a := range l.Agents("proxy") {
		if !a.Running() {
			continue
		}
		text, err := a.Get(t.Context(), "/metrics")
		if err != nil {
			continue
		}
		for line := range strings.Lines(text) {
			var n float64
			if _, err := fmt.Sscanf(line, "landfall_proxy_rescued_packets_total %g", &n); err == nil {
				sum += int(n)
			}
		}
	}
	return sum
}

func otherNames(all []string, but ...string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(n string) bool { return slices.Contains(but, n) })
}
