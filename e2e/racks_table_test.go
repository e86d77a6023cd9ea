package e2e

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// rackRow is what a change has cost.
type rackRow struct {
	name     string
	lost, of int // long-lived connections
	new      lab.Report
}

// lastOfRack is the change after which a rack's router answers that there is no way, until the spine has told it of one.
const lastOfRack = "drain of the rack's last"

func wantNoFlowLost(t *testing.T, rows []rackRow) {
	t.Helper()
	for _, row := range rows {
		if row.name == lastOfRack {
			delete(row.new.Failures, unix.EHOSTUNREACH.Error())
		}
		if row.lost > 0 || len(row.new.Failures) > 0 {
			t.Errorf("%s: %d of %d connections were lost, of new ones %v", row.name, row.lost, row.of, row.new.Failures)
		}
	}
}

// rackRun has changes happen under long-lived connections.
type rackRun struct {
	*lab.Lab
	t     testing.TB
	flows []*rackFlow
	rows  []rackRow
}

// rackTable lets happen what happens to nodes, the last a crash.
func rackTable(t testing.TB, l *lab.Lab) (rows []rackRow) {
	t.Helper()
	r := rackRun{Lab: l, t: t, flows: openFlows(t, l, rackFlows)}
	r.planned()
	r.update(r.flows[0].pod)
	r.crash()
	return r.rows
}

func (r *rackRun) step(name string, happen func()) {
	r.t.Helper()
	probe := r.StartProbe(r.t.Context(), lab.ClientName, "tcp", bgpVIP, 20*time.Millisecond)
	before, row := moved(r.t, r.Lab), rackRow{name: name, of: len(r.flows)}
	happen()
	for range 2 { // the second time nodes remember the connections
		lost := use(r.flows)
		r.flows, row.lost = flowsWithout(r.flows, lost), row.lost+len(lost)
		if len(lost) > 0 {
			r.t.Logf("%s: the first that was lost, to %s: %v", name, lost[0].pod, lost[0].err)
		}
		time.Sleep(time.Second)
	}
	row.new = probe.Stop()
	r.t.Logf("%s: %d of %d lost, %d packets moved; new connections: %s", name, row.lost, row.of, moved(r.t, r.Lab)-before,
		row.new)
	r.rows = append(r.rows, row)
	r.flows = append(r.flows, openFlows(r.t, r.Lab, rackFlows-len(r.flows))...)
}

// planned are the changes that somebody wants.
func (r *rackRun) planned() {
	r.t.Helper()
	all := workers(r.Lab)
	const node, mate, other = "k8s-rack-2-1", "k8s-rack-2-2", "k8s-rack-3-2"
	drain := func(node string, is bool) {
		taints := "null"
		if is {
			taints = `[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]`
		}
		patchNode(r.t, r.Lab, node, `{"spec":{"taints":`+taints+`}}`)
	}
	r.step("drain", func() {
		drain(node, true)
		wantInRacks(r.t, r.Lab, otherNames(all, node)...)
	})
	r.step(lastOfRack, func() {
		drain(mate, true)
		wantInRacks(r.t, r.Lab, otherNames(all, node, mate)...)
	})
	r.step("join of both", func() {
		drain(mate, false)
		drain(node, false)
		wantInRacks(r.t, r.Lab, all...)
	})
	r.step("drain of the last node", func() {
		drain(other, true)
		wantInRacks(r.t, r.Lab, otherNames(all, other)...)
	})
	r.step("join of it", func() {
		drain(other, false)
		wantInRacks(r.t, r.Lab, all...)
	})
	r.step("upgrade of all agents", func() {
		for _, node := range all {
			restart(r.t, r.Agent("speaker", node), (*lab.Agent).Stop, 300*time.Millisecond)
			restart(r.t, r.Agent("proxy", node), (*lab.Agent).Stop, 300*time.Millisecond)
		}
		wantInRacks(r.t, r.Lab, all...)
	})
	r.step("speaker stopped for good", func() {
		if err := r.Agent("speaker", other).Stop(); err != nil {
			r.t.Fatal(err)
		}
		wantInRacks(r.t, r.Lab, otherNames(all, other)...)
	})
	r.step("speaker back", func() {
		if err := r.Agent("speaker", other).Start(); err != nil {
			r.t.Fatal(err)
		}
		wantInRacks(r.t, r.Lab, all...)
	})
}

// update replaces a pod, as a rolling update does on each node. The connections to the pod end with it.
func (r *rackRun) update(pod string) {
	r.t.Helper()
	next := podOn(r.Lab, r.nodeOf(pod), pod+"-next", 60)
	r.flows = slices.DeleteFunc(r.flows, func(f *rackFlow) bool { return f.pod == pod })
	r.step("update of a pod, of others'", func() {
		if err := r.AddPod(r.t.Context(), next); err != nil {
			r.t.Fatal(err)
		}
		eventually(r.t, "its node delivers to the next", func() error {
			return deliversTo(r.t, r.Agent("proxy", next.Node), next.Addr)
		})
		if err := r.SetConditions(r.t.Context(), pod, lab.ServingTerminating); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(time.Second)
		if err := r.RemovePod(r.t.Context(), pod); err != nil {
			r.t.Fatal(err)
		}
		wantInRacks(r.t, r.Lab, workers(r.Lab)...)
	})
}

func (r *rackRun) nodeOf(pod string) string {
	for _, p := range r.Pods("my-nginx") {
		if p.Name == pod {
			return p.Node
		}
	}
	return ""
}

// own returns the connections of each node: those that it knows, as it translates them, and those that end at its pod.
func (r *rackRun) own() map[string][]*rackFlow {
	r.t.Helper()
	found := map[string][]*rackFlow{}
	for _, node := range workers(r.Lab) {
		known := map[clientPort]bool{}
		for _, vip := range bgpVIPs(r.Lab) {
			family := map[bool]string{true: "ipv4", false: "ipv6"}[vip.Addr().Is4()]
			// Its count goes to the other stream, which may stand in the middle of a line.
			listing, err := r.Exec(r.t.Context(), node, "sh", "-c", fmt.Sprintf(
				"conntrack -L -f %s -p tcp --orig-dst %s 2>/dev/null", family, vip.Addr()))
			if err != nil {
				r.t.Fatal(err)
			}
			for _, port := range establishedPorts(listing) {
				known[clientPort{vip.Addr(), port}] = true
			}
		}
		for _, f := range r.flows {
			if known[portOf(f.conn)] || r.nodeOf(f.pod) == node {
				found[node] = append(found[node], f)
			}
		}
	}
	return found
}

// clientPort is a client's port of a connection to a VIP. Connections to another VIP may have the same.
type clientPort struct {
	vip  netip.Addr
	port int
}

func portOf(c net.Conn) clientPort {
	return clientPort{c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(), c.LocalAddr().(*net.TCPAddr).Port}
}

// establishedPorts returns the clients' ports of the connections that stand, of what "conntrack -L" prints.
func establishedPorts(listing string) (ports []int) {
	for line := range strings.Lines(listing) {
		_, after, _ := strings.Cut(line, "sport=") // the first is the client's
		port := 0
		if _, err := fmt.Sscanf(after, "%d", &port); err == nil && strings.Contains(line, "ESTABLISHED") {
			ports = append(ports, port)
		}
	}
	return ports
}

// crash takes away the node with the most connections: routers with one hash may leave a node of a rack without any.
func (r *rackRun) crash() {
	r.t.Helper()
	own := r.own()
	crashing := slices.MaxFunc(slices.Sorted(maps.Keys(own)), func(a, b string) int { return len(own[a]) - len(own[b]) })
	r.t.Logf("%d of %d connections are those of the node that crashes", len(own[crashing]), len(r.flows))
	r.flows = flowsWithout(r.flows, own[crashing])
	for _, program := range []string{"speaker", "proxy"} {
		if err := r.Agent(program, crashing).Kill(); err != nil {
			r.t.Fatal(err)
		}
	}
	r.step("crash, of other nodes'", func() {
		if err := r.Cut(r.t.Context(), crashing); err != nil {
			r.t.Fatal(err)
		}
		r.tellRouters(crashing)
		wantInRacks(r.t, r.Lab, otherNames(workers(r.Lab), crashing)...)
	})
	// New connections to the dead node fail until the routers know.
	r.rows[len(r.rows)-1].new.Failures = nil
}

// tellRouters ends the sessions of a node, which routers else do when the hold time is over.
func (r *rackRun) tellRouters(node string) {
	c := r.Cluster()
	for _, router := range r.Routers() {
		for _, n := range c.Nodes {
			if n.Name != node || !strings.HasPrefix(n.Addr.String(), router.Addr.String()[:len("172.26.3.")]) {
				continue
			}
			sessions := c.Addresses(n.Addr)
			if c.CNI == lab.CalicoBGP {
				sessions = append(sessions, c.Addresses(n.SpeakerAddr())...)
			}
			for _, addr := range sessions {
				ask(r.t, router, "clear bgp "+addr.String())
			}
		}
	}
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

// addressed is a connection between two addresses.
type addressed struct {
	net.Conn
	local, remote string
}

func (c addressed) LocalAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.local))
}

func (c addressed) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.remote))
}

// Two connections from one port of a client, to the VIPs of both families, are not one.
func TestAConnectionIsKnownByItsVIPToo(t *testing.T) {
	t.Parallel()
	known := map[clientPort]bool{}
	for _, port := range establishedPorts(`tcp 6 86397 ESTABLISHED src=198.51.100.20 dst=203.0.113.180 sport=40000 dport=80 src=192.168.177.20 dst=172.26.1.2 sport=80 dport=41234 [ASSURED] mark=0 use=1
tcp 6 12 TIME_WAIT src=198.51.100.20 dst=203.0.113.180 sport=40002 dport=80 src=192.168.177.20 dst=172.26.1.2 sport=80 dport=41235 [ASSURED] mark=0 use=1
`) {
		known[clientPort{bgpVIP.Addr(), port}] = true
	}
	for c, want := range map[addressed]bool{
		{local: "198.51.100.20:40000", remote: bgpVIP.String()}:          true,
		{local: "[fd00:198:51:100::20]:40000", remote: bgpVIP6.String()}: false,
		{local: "198.51.100.20:40002", remote: bgpVIP.String()}:          false,
	} {
		if got := known[portOf(c)]; got != want {
			t.Errorf("%s to %s is known: %v, want %v", c.local, c.remote, got, want)
		}
	}
}
