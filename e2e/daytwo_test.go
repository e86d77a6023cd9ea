package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// landfallctl runs landfallctl on the control plane's node as an administrator, and returns its exit
// code and what it writes.
func landfallctl(t *testing.T, l *lab.Lab, args ...string) (code int, out string) {
	t.Helper()
	return landfallctlAs(t, l, l.Kubeconfig(), args...)
}

// landfallctlAs does so with a kubeconfig.
func landfallctlAs(t *testing.T, l *lab.Lab, kubeconfig string, args ...string) (code int, out string) {
	t.Helper()
	argv := append([]string{filepath.Join(programFolder(t), "landfallctl"), "--kubeconfig", kubeconfig, "--request-timeout",
		"30s"}, args...)
	out, err := l.Exec(t.Context(), l.Cluster().Master().Name, argv...)
	if ended, ok := errors.AsType[*exec.ExitError](err); ok && ended.Exited() {
		return ended.ExitCode(), out
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0, out
}

// dayTwoServices are a Service of each policy with TCP and UDP. Each worker has a pod of theirs.
var dayTwoServices = []string{"my-nginx", "local"}

// dayTwoCluster is the seed cluster in two families, with a pod that speaks UDP too on each worker.
func dayTwoCluster() lab.Cluster {
	c := lab.SeedCluster()
	c.DualStack = true
	for i := range c.Pods {
		if c.Pods[i].App == "my-nginx" {
			c.Pods[i].UDP = []uint16{80}
		}
	}
	c.Pods = append(c.Pods, lab.Pod{Name: "my-nginx-3", Node: "k8s-worker-177",
		Addr: netip.MustParseAddr("192.168.177.20"), App: "my-nginx", TCP: []uint16{80}, UDP: []uint16{80}})
	return c
}

// addDayTwoServices creates the Services, and returns the addresses of each.
func addDayTwoServices(t *testing.T, l *lab.Lab) map[string][]netip.AddrPort {
	t.Helper()
	vips := map[string][]netip.AddrPort{}
	for _, name := range dayTwoServices {
		s := lab.SeedService()
		s.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
		s.Ports = []lab.Port{{Name: "tcp", Port: 80}, {Name: "udp", Protocol: "UDP", Port: 80}}
		if name == "local" {
			s.Name, s.ClusterIP, s.ExternalTrafficPolicy = name, netip.Addr{}, "Local"
		}
		if err := l.AddService(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" has an address of each family", func() error {
			addrs, err := addressesOf(t.Context(), l, name)
			if err == nil && len(addrs) != 2 {
				err = fmt.Errorf("it has %v", addrs)
			}
			vips[name] = nil
			for _, addr := range addrs {
				vips[name] = append(vips[name], netip.AddrPortFrom(netip.MustParseAddr(addr), 80))
			}
			return err
		})
	}
	return vips
}

const (
	// perAddress is how many connections stand to each address and protocol.
	perAddress = 4
	// dayTwoEvery is the pace of new connections to each address and protocol.
	dayTwoEvery = 25 * time.Millisecond
)

// dayTwoTraffic is traffic of TCP and UDP to all addresses: new connections and standing ones.
type dayTwoTraffic struct {
	probes map[string]*lab.Probe
	tcp    map[netip.AddrPort]*flows
	udp    map[netip.AddrPort]*datagrams
}

func startDayTwoTraffic(t *testing.T, l *lab.Lab, vips map[string][]netip.AddrPort) dayTwoTraffic {
	t.Helper()
	r := dayTwoTraffic{map[string]*lab.Probe{}, map[netip.AddrPort]*flows{}, map[netip.AddrPort]*datagrams{}}
	for name, addrs := range vips {
		for _, to := range addrs {
			r.tcp[to] = startFlows(t, l, to, perAddress)
			r.udp[to] = startDatagrams(t, l, to, perAddress)
			for _, network := range []string{"tcp", "udp"} {
				r.probes[fmt.Sprintf("%s at %s over %s", name, to, network)] = l.StartProbe(t.Context(), lab.FarClientName,
					network, to, dayTwoEvery)
			}
		}
	}
	return r
}

// endStanding ends the standing connections, and fails the test if one was lost.
func (r dayTwoTraffic) endStanding(t *testing.T) {
	t.Helper()
	for to, f := range r.tcp {
		if lost := f.stop(); lost > 0 {
			t.Errorf("%d of %d connections to %s were lost", lost, perAddress, to)
		}
	}
	for to, f := range r.udp {
		if sent, lost := f.stop(); lost > 0 || sent == 0 {
			t.Errorf("%d of %d datagrams of standing clients to %s had no answer", lost, sent, to)
		}
	}
}

// endNew ends the new connections, and fails the test if one was lost. moves is how often routers
// have changed a route: see wantNoneLostFar.
func (r dayTwoTraffic) endNew(t *testing.T, moves int) {
	t.Helper()
	for name, p := range r.probes {
		report := p.Stop()
		t.Logf("new connections, %s: %s", name, report)
		unreachable := report.Failures["network is unreachable"]
		if report.Answered == 0 || report.Failed() > unreachable || unreachable > moves {
			t.Errorf("%s: new connections were lost: %s", name, report)
		}
	}
}

// datagrams are clients that send from the same port again and again.
type datagrams struct {
	cancel     context.CancelFunc
	group      sync.WaitGroup
	sent, lost atomic.Int32
}

func startDatagrams(t *testing.T, l *lab.Lab, to netip.AddrPort, n int) *datagrams {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	d := &datagrams{cancel: cancel}
	for range n {
		conn, err := l.Dial(ctx, lab.ClientName, "udp", to.String())
		if err != nil {
			t.Fatal(err)
		}
		d.group.Go(func() {
			defer conn.Close()
			d.talk(ctx, conn)
		})
	}
	return d
}

func (d *datagrams) talk(ctx context.Context, conn net.Conn) {
	buf := make([]byte, 2048)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for ctx.Err() == nil {
		d.sent.Add(1)
		_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
		_, err := conn.Write([]byte("hello"))
		if err == nil {
			_, err = conn.Read(buf)
		}
		if err != nil {
			d.lost.Add(1)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

func (d *datagrams) stop() (sent, lost int) {
	d.cancel()
	d.group.Wait()
	return int(d.sent.Load()), int(d.lost.Load())
}

// TestDayTwoDrain drains one node after the other while clients come, and have come, to Services of
// both policies over TCP and UDP in both families, and gives each back. No connection is lost, and
// landfallctl says what it waits for.
func TestDayTwoDrain(t *testing.T) {
	t.Parallel()
	for _, how := range []struct {
		name  string
		start func(t *testing.T) *lab.Lab
	}{{"L2", func(t *testing.T) *lab.Lab {
		l := labtest.Start(t, dayTwoCluster(), lab.Options{})
		applied(dualStackPool)(t, l)
		return l
	}}, {"BGP", func(t *testing.T) *lab.Lab {
		c := dayTwoCluster()
		c.ToR = lab.ToR{Kind: lab.FRR, Count: 2, ASN: 64513, NodeASN: 64512}
		l := labtest.Start(t, c, lab.Options{})
		applied(fmt.Sprintf(bgpPool, `, "fd00:203:0:113::180-fd00:203:0:113::199"`)+bgpPeers(c, ""))(t, l)
		return l
	}}} {
		t.Run(how.name, func(t *testing.T) {
			t.Parallel()
			l := how.start(t)
			if err := l.ServeExec(t.Context()); err != nil {
				t.Fatal(err)
			}
			vips := addDayTwoServices(t, l)
			dayTwoReady(t, l, vips)
			for range 2 {
				drainUnderTraffic(t, l, vips)
			}
		})
	}
}

// dayTwoReady waits until all workers announce the addresses, or may, and clients get answers.
func dayTwoReady(t *testing.T, l *lab.Lab, vips map[string][]netip.AddrPort) {
	t.Helper()
	for _, name := range dayTwoServices {
		for _, to := range vips[name] {
			if l.Cluster().ToR.Count > 0 {
				wantRouted(t, l, to.Addr(), workers(l)...)
			} else {
				answerer(t, l, to.Addr())
			}
			eventually(t, fmt.Sprintf("%s answers at %s", name, to), func() error {
				for _, network := range []string{"tcp", "udp"} {
					for _, client := range []string{lab.ClientName, lab.FarClientName} {
						if _, err := l.Ask(t.Context(), client, network, to); err != nil {
							return err
						}
					}
				}
				return nil
			})
		}
	}
}

// drainUnderTraffic drains the node that answers for the first address, or any with BGP.
func drainUnderTraffic(t *testing.T, l *lab.Lab, vips map[string][]netip.AddrPort) {
	t.Helper()
	l2 := l.Cluster().ToR.Count == 0
	node, passing := workers(l)[1], 1 // a router spreads connections over all nodes
	if l2 {
		node, passing = answerer(t, l, vips["my-nginx"][0].Addr()), 0
		for _, addrs := range vips {
			for _, to := range addrs {
				if answerer(t, l, to.Addr()) == node {
					passing += perAddress
				}
			}
		}
	}
	run := startDayTwoTraffic(t, l, vips)
	time.Sleep(300 * time.Millisecond)

	eventually(t, "drain names the standing connections", func() error { // a busy node may not answer in time
		code, out := landfallctl(t, l, "drain", node, "--timeout", "10s")
		if code != 1 || !strings.Contains(out, node+" is not drained yet: ") ||
			!strings.Contains(out, "  Service default/") || !containsAny(out, l.Cluster().LAN.Client.String()+": ",
			lab.Twin(l.Cluster().LAN.Client).String()+": ") ||
			!strings.Contains(out, "landfallctl undrain "+node) {
			return fmt.Errorf("it ends with %d:\n%s", code, out)
		}
		return nil
	})
	type state struct {
		Done                           bool
		Answering, Routes, Connections int
		Unknown                        string
	}
	var left state
	eventually(t, "drain -o json says what is left", func() error {
		code, out := landfallctl(t, l, "drain", node, "--timeout", "10s", "-o", "json")
		left = state{}
		// What drain writes on the way comes first, as both outputs are one here.
		err := json.Unmarshal([]byte(out[max(0, strings.Index(out, "{")):]), &left)
		if err != nil || code != 1 || left.Done || left.Unknown != "" {
			return errors.Join(err, fmt.Errorf("it ends with %d:\n%s", code, out))
		}
		return nil
	})
	if left.Answering != 0 || left.Routes != 0 || left.Connections < passing ||
		l2 && left.Connections != passing {
		t.Errorf("left on %s: %+v, want %d connections, and nothing announced", node, left, passing)
	}
	wantFlowsOf(t, l, node, l2)
	run.endStanding(t)

	bar := filepath.Join(programFolder(t), "landfallctl") + " --kubeconfig " + l.Kubeconfig() + " drain " + node +
		" --timeout 1m"
	terminal := mustExec(t, l, l.Cluster().Master().Name, "script", "-qec", bar, "/dev/null")
	if !strings.Contains(terminal, "["+strings.Repeat("#", 24)+"] 0 connections, ") ||
		!strings.Contains(terminal, node+" is drained: ") {
		t.Errorf("the bar of drain does not end full:\n%q", terminal)
	}
	if line, _ := firstLine(t.Context(), l, filepath.Join(programFolder(t), "landfallctl"), "explain", "node",
		node); !strings.Contains(line, "(NodeDrained)") {
		t.Errorf("explain node: %s", line)
	}

	if code, out := landfallctl(t, l, "undrain", node); code != 0 {
		t.Errorf("undrain ends with %d: %s", code, out)
	}
	eventually(t, node+" may announce again", func() error {
		code, out := landfallctl(t, l, "explain", "node", node)
		if code != 0 {
			return fmt.Errorf("explain node ends with %d: %s", code, out)
		}
		n, err := l.Kube().CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
		if _, has := n.Labels["landfall.dev/drain"]; err == nil && has {
			err = errors.New("it has its label")
		}
		return err
	})
	dayTwoReady(t, l, vips)
	run.endNew(t, 2)
}

// wantFlowsOf compares what landfallctl flows says of a drained node: over L2, all connections to VIPs
// that it has come by way of another node.
func wantFlowsOf(t *testing.T, l *lab.Lab, node string, l2 bool) {
	t.Helper()
	seen, rescued := 0, 0
	for _, name := range dayTwoServices {
		var f struct {
			Total int
			Flows []struct {
				Node, State, Protocol string
				RescuedBy             []string
				Pod                   string
			}
		}
		eventually(t, "all nodes say which connections they have", func() error { // a busy one may not, in time
			code, out := landfallctl(t, l, "flows", name, "-o", "json", "--limit", "10000")
			if err := json.Unmarshal([]byte(out), &f); err != nil || code != 0 {
				return errors.Join(err, fmt.Errorf("flows ends with %d: %s", code, out))
			}
			return nil
		})
		if f.Total < 2*perAddress {
			t.Errorf("flows %s: %d connections, want at least those that stand, %d", name, f.Total, 2*perAddress)
		}
		for _, flow := range f.Flows {
			if flow.Node != node || flow.State != "ESTABLISHED" {
				continue
			}
			seen++
			if len(flow.RescuedBy) > 0 {
				rescued++
			}
		}
	}
	if seen == 0 || l2 && rescued != seen || rescued == 0 {
		t.Errorf("flows: of %d open connections on %s, %d are rescued", seen, node, rescued)
	}
}

// follower is a program that writes lines for as long as it runs.
type follower struct {
	l    *lab.Lab
	name string
}

// follow starts landfallctl with arguments, which go on until the lab ends.
func follow(t *testing.T, l *lab.Lab, name string, args ...string) follower {
	t.Helper()
	line := "echo pid $$; exec " + filepath.Join(programFolder(t), "landfallctl") + " --kubeconfig " + l.Kubeconfig() + " " +
		strings.Join(args, " ")
	if err := l.Run(name, l.Cluster().Master().Name, "sh", "-c", line); err != nil {
		t.Fatal(err)
	}
	return follower{l, name}
}

// text returns all that it has written.
func (f follower) text() string {
	return f.l.Logs(100_000)[f.name]
}

// wait waits for a line that has all these parts.
func (f follower) wait(t *testing.T, parts ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s: a line with %q", f.name, parts), func() error {
		for line := range strings.Lines(f.text()) {
			has := true
			for _, part := range parts {
				has = has && strings.Contains(line, part)
			}
			if has {
				return nil
			}
		}
		return fmt.Errorf("it has written:\n%s", f.text())
	})
}

// TestDayTwoWatch follows a cluster over a restart of the API server: what has changed meanwhile is
// shown after it.
func TestDayTwoWatch(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	text, asJSON := follow(t, l, "watch", "watch"), follow(t, l, "watch-json", "watch", "-o", "json")
	for _, what := range []string{"1 IPAddressPools", "4 Nodes", "BGPPeers", "findings on Nodes"} {
		text.wait(t, "watching", what)
	}
	text.wait(t, "watching", "Services")
	first := answerer(t, l, seedVIP.Addr())
	// By force, as no pods are in this lab's API server: landfallctl cannot tell who else could announce.
	if code, out := landfallctl(t, l, "drain", first, "--force", "--no-wait"); code != 0 {
		t.Fatalf("drain: %s", out)
	}
	second := wantAnswererAmong(t, l, seedVIP.Addr(), without(workers(l), []string{first})...)
	text.wait(t, "Service default/my-nginx: owner 172.26.236.180: "+first+" → "+second)
	text.wait(t, "Node "+first+": drain: none → NodeDrained")

	if err := l.StopAPI(); err != nil {
		t.Fatal(err)
	}
	text.wait(t, "the API server https://", "does not answer, so nothing is shown until it does: dial tcp ")
	if err := l.Agent("speaker", second).Stop(); err != nil {
		t.Fatal(err)
	}
	third := wantAnswererAmong(t, l, seedVIP.Addr(), without(workers(l), []string{first, second})...)
	if err := l.StartAPI(t.Context()); err != nil {
		t.Fatal(err)
	}
	text.wait(t, "the API server answers again")
	text.wait(t, "Service default/my-nginx: owner 172.26.236.180: "+second+" → "+third)
	created("fresh", nil)(t, l)
	text.wait(t, "Service default/fresh: address", "none → 172.26.236.181")
	created("refused", fromPool("nowhere"))(t, l)
	text.wait(t, "Service default/refused: assigned: none → PoolNotFound: ")
	applied(`
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: away}
spec: {myASN: 64512, peerASN: 64513, peerAddress: 172.26.236.1}
`)(t, l)
	text.wait(t, "BGPPeer away: session from "+third+": none → Idle (NotEstablished): ", "connection refused")
	on("sysctl", "-qw", "net.ipv4.ip_forward=0")(t, l)
	text.wait(t, "Node "+third+": finding: none → ForwardingOff: ")
	on("sysctl", "-qw", "net.ipv4.ip_forward=1")(t, l)
	text.wait(t, "Node "+third+": finding: ForwardingOff → none: ")
	asJSON.wait(t, `"what":"owner"`, `"from":"`+second+`","to":"`+third+`"`)
	asJSON.wait(t, `"name":"fresh"`, `"what":"address"`)
	lines := bufio.NewScanner(strings.NewReader(asJSON.text()))
	for lines.Scan() {
		if line := lines.Text(); strings.HasPrefix(line, "{") && !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
	pid, _, _ := strings.Cut(strings.TrimPrefix(text.text(), "pid "), "\n")
	mustExec(t, l, l.Cluster().Master().Name, "kill", "-INT", pid)
	eventually(t, "watch ends", func() error {
		if _, err := l.Exec(t.Context(), l.Cluster().Master().Name, "kill", "-0", pid); err == nil {
			return errors.New("it runs")
		}
		return nil
	})
}
