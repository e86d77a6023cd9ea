package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// traffic is what runs while something happens: new connections all the time, and long-lived ones
// that send a byte now and then.
type traffic struct {
	l     *lab.Lab
	probe *lab.Probe
	flows *flows
}

const (
	newEvery  = 10 * time.Millisecond
	longLived = 100
)

// startTraffic begins with the long-lived connections, so that all of them stand when it returns.
// New ones come from another client: their many ports are those of long-lived ones before long, and
// a node that has seen a connection end takes a packet of the next one with the same port for a
// late one.
func startTraffic(t *testing.T, l *lab.Lab, target netip.AddrPort) *traffic {
	t.Helper()
	f := startFlows(t, l, target, longLived)
	return &traffic{l: l, flows: f, probe: l.StartProbe(t.Context(), lab.FarClientName, "tcp", target, newEvery)}
}

// stop ends the traffic and reports on it: new connections, and how many of the long-lived ones
// were lost.
func (r *traffic) stop(t *testing.T) (lab.Report, int) {
	t.Helper()
	report, lost := r.probe.Stop(), r.flows.stop()
	t.Logf("new connections: %s; long-lived: %d of %d lost", report, lost, longLived)
	return report, lost
}

// wantLossless ends the traffic and fails the test if a connection failed or was lost.
func (r *traffic) wantLossless(t *testing.T) {
	t.Helper()
	report, lost := r.stop(t)
	wantNoneLost(t, report)
	if lost > 0 {
		t.Errorf("%d long-lived connections were lost", lost)
	}
}

// wantNoneLost fails the test if a connection failed.
func wantNoneLost(t *testing.T, report lab.Report) {
	t.Helper()
	if report.Answered == 0 || report.Failed() > 0 {
		t.Errorf("new connections were lost: %s", report)
	}
}

// decidedSince returns what the speakers have logged since then about nodes and owners.
func decidedSince(l *lab.Lab, begin time.Time) string {
	var b strings.Builder
	for _, a := range l.Agents("speaker") {
		fmt.Fprintf(&b, "%s:\n%s", a.Node, logSince(a, begin, "owner", "answers", "dead", "partition", "joined", "lost"))
	}
	return b.String()
}

// logSince returns what an agent has logged since then, of the lines with one of the words.
func logSince(a *lab.Agent, begin time.Time, words ...string) string {
	var b strings.Builder
	first := "time=" + begin.UTC().Format("2006-01-02T15:04:05.000Z")
	for line := range strings.Lines(a.Log()) {
		if strings.HasPrefix(line, "time=") && line >= first && containsAny(line, words...) {
			b.WriteString(line)
		}
	}
	return b.String()
}

func containsAny(text string, words ...string) bool {
	return slices.ContainsFunc(words, func(word string) bool { return strings.Contains(text, word) })
}

// flows are long-lived connections. One is lost when it gets no answer within a few seconds, or is
// cut off.
type flows struct {
	cancel context.CancelFunc
	group  sync.WaitGroup
	lost   atomic.Int32
}

func startFlows(t *testing.T, l *lab.Lab, target netip.AddrPort, n int) *flows {
	t.Helper()
	return startFlowsFrom(t, l, lab.ClientName, target, n)
}

func startFlowsFrom(t *testing.T, l *lab.Lab, from string, target netip.AddrPort, n int) *flows {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	f := &flows{cancel: cancel}
	t.Cleanup(func() { cancel(); f.group.Wait() })
	for i := range n {
		conn, err := l.Dial(ctx, from, "tcp", target.String())
		if err != nil {
			t.Fatalf("long-lived connection %d: %v", i, err)
		}
		f.group.Go(func() {
			defer conn.Close()
			if err := lab.Talk(ctx, conn); err != nil {
				f.lost.Add(1)
				t.Logf("%s: connection %s to %s: %v", time.Now().Format("15:04:05.000"), conn.LocalAddr(), target, err)
			}
		})
	}
	return f
}

func (f *flows) stop() int {
	f.cancel()
	f.group.Wait()
	return int(f.lost.Load())
}

// vipView is what a speaker's /v1/status says of one VIP.
type vipView struct {
	VIP       netip.Addr `json:"vip"`
	Owner     string     `json:"owner"`
	Answering []string   `json:"answering"`
}

// views returns what a node's speaker says of each VIP.
func views(ctx context.Context, l *lab.Lab, node string) (map[netip.Addr]vipView, error) {
	text, err := l.Agent("speaker", node).Get(ctx, "/v1/status")
	if err != nil {
		return nil, err
	}
	var status struct {
		VIPs []vipView `json:"vips"`
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return nil, fmt.Errorf("status of %s: %w", node, err)
	}
	found := map[netip.Addr]vipView{}
	for _, v := range status.VIPs {
		found[v.VIP] = v
	}
	return found, nil
}

// answerers returns the nodes that answer for a VIP now, of those whose speakers run.
func answerers(t testing.TB, l *lab.Lab, vip netip.Addr) []string {
	t.Helper()
	var nodes []string
	for _, a := range l.Agents("speaker") {
		if !a.Running() {
			continue
		}
		seen, err := views(t.Context(), l, a.Node)
		if err == nil && len(seen[vip].Answering) > 0 {
			nodes = append(nodes, a.Node)
		}
	}
	return nodes
}

// answerer waits until exactly one node answers for a VIP, and returns it.
func answerer(t testing.TB, l *lab.Lab, vip netip.Addr) (node string) {
	t.Helper()
	eventually(t, "one node answers for "+vip.String(), func() error {
		nodes := answerers(t, l, vip)
		if len(nodes) != 1 {
			return fmt.Errorf("those who answer: %v", nodes)
		}
		node = nodes[0]
		return nil
	})
	return node
}

// wantAnswererAmong waits until exactly one node answers, one of the given ones, and returns it.
func wantAnswererAmong(t testing.TB, l *lab.Lab, vip netip.Addr, want ...string) (node string) {
	t.Helper()
	eventually(t, fmt.Sprintf("one of %v answers for %s", want, vip), func() error {
		nodes := answerers(t, l, vip)
		if len(nodes) != 1 || len(without(nodes, want)) > 0 {
			return fmt.Errorf("those who answer: %v", nodes)
		}
		node = nodes[0]
		return nil
	})
	return node
}

// otherThan returns the nodes but one.
func otherThan(l *lab.Lab, node string) []string {
	var nodes []string
	for _, n := range l.Cluster().Nodes {
		if n.Name != node {
			nodes = append(nodes, n.Name)
		}
	}
	return nodes
}

// worker returns a node that is neither the given one nor that of the API server.
func worker(l *lab.Lab, not string) string {
	for _, n := range l.Cluster().Nodes {
		if n.Name != not && !n.ControlPlane {
			return n.Name
		}
	}
	return ""
}

// workers returns the nodes that take part in external load balancing: all but those of the control
// plane, as kubeadm labels them.
func workers(l *lab.Lab) []string {
	var nodes []string
	for _, n := range l.Cluster().Nodes {
		if !n.ControlPlane {
			nodes = append(nodes, n.Name)
		}
	}
	return nodes
}

func patchNode(t testing.TB, l *lab.Lab, node, patch string) {
	t.Helper()
	eventually(t, "patch "+node, func() error {
		_, err := l.Kube().CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, []byte(patch),
			metav1.PatchOptions{})
		return err
	})
}

func setLocal(t testing.TB, l *lab.Lab) {
	t.Helper()
	updateService(
		t, l, "my-nginx", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal })
}

// movePod plays one step of a rolling update as deployments and kubelets do it: the new pod is
// ready, then the old one terminates, still serving for its grace period, and is gone after it. On a busy machine nodes
// hear late of the new one, which has more time before its readiness counts in a Deployment.
func movePod(t *testing.T, l *lab.Lab, from string, to lab.Pod, grace time.Duration) {
	t.Helper()
	if err := l.AddPod(t.Context(), to); err != nil {
		t.Fatal(err)
	}
	for _, a := range l.Agents("proxy") {
		eventually(t, a.Node+" delivers to "+to.Name, func() error { return deliversTo(t, a, to.Addr) })
	}
	if err := l.SetConditions(t.Context(), from, lab.ServingTerminating); err != nil {
		t.Fatal(err)
	}
	time.Sleep(grace)
	if err := l.RemovePod(t.Context(), from); err != nil {
		t.Fatal(err)
	}
}

// deliversTo returns an error unless the kernel of a proxy's node has an endpoint of the worked example's Service.
func deliversTo(t testing.TB, proxy *lab.Agent, endpoint netip.Addr) error {
	text, err := proxy.Get(t.Context(), "/v1/status?only=default/my-nginx")
	if err != nil {
		return err
	}
	var status struct {
		Services []struct {
			State string
			Ports []struct {
				Backends []struct{ Address netip.AddrPort }
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return err
	}
	for _, s := range status.Services {
		for _, p := range s.Ports {
			for _, b := range p.Backends {
				if s.State == "applied" && b.Address.Addr() == endpoint {
					return nil
				}
			}
		}
	}
	return fmt.Errorf("it shows %+v", status)
}

// podOn describes a pod of my-nginx on a node, at the given last byte of the node's pod network.
func podOn(l *lab.Lab, node, name string, last byte) lab.Pod {
	for _, n := range l.Cluster().Nodes {
		if n.Name == node {
			b := n.PodNetwork.Addr().As4()
			b[3] = last
			return lab.Pod{Name: name, Node: node, Addr: netip.AddrFrom4(b), App: "my-nginx", TCP: []uint16{80},
				UDP: []uint16{80}}
		}
	}
	return lab.Pod{}
}

// restart ends an agent and starts it again after a pause.
func restart(t testing.TB, a *lab.Agent, end func(*lab.Agent) error, pause time.Duration) {
	t.Helper()
	if err := end(a); err != nil {
		t.Fatal(err)
	}
	time.Sleep(pause)
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	if err := a.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// labWith starts the seed cluster with a pool and its advertisement.
func labWith(t *testing.T, options lab.Options) *lab.Lab {
	t.Helper()
	l := labtest.Start(t, lab.SeedCluster(), options)
	if err := l.ApplyYAML(t.Context(), poolAndAdvertisement); err != nil {
		t.Fatal(err)
	}
	return l
}

// askUDP sends n datagrams from one source port and counts those without an answer, and answers of
// another pod than the given one.
func askUDP(t *testing.T, l *lab.Lab, from, target netip.AddrPort, pod string, n int) (lost, wrong int) {
	t.Helper()
	ns, err := netns.GetFromName(l.Namespace(lab.ClientName))
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	var conn *net.UDPConn
	opened := make(chan error)
	go func() { // a thread of its own, which ends with the goroutine: it is in another namespace
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			opened <- err
			return
		}
		var err error
		conn, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(target))
		opened <- err
	}()
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	buf := make([]byte, 2048)
	for range n {
		_ = conn.SetDeadline(time.Now().Add(time.Second))
		if _, err := conn.Write([]byte("hello")); err != nil {
			lost++
			continue
		}
		size, err := conn.Read(buf)
		if err != nil {
			lost++
			continue
		}
		var answer struct{ Pod string }
		if json.Unmarshal(buf[:size], &answer) != nil || answer.Pod != pod {
			wrong++
		}
		time.Sleep(10 * time.Millisecond)
	}
	return lost, wrong
}
