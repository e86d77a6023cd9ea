package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
	"github.com/landfall-lb/landfall/internal/lb"
)

// setProbe has nodes probe the backends of my-nginx.
func setProbe(t testing.TB, l *lab.Lab, probe string) {
	t.Helper()
	patch := fmt.Sprintf(`{"metadata": {"annotations": {%q: %q}}}`, lb.AnnotationProbe, probe)
	eventually(t, "annotate my-nginx", func() error {
		_, err := l.Kube().CoreV1().Services("default").Patch(t.Context(), "my-nginx", types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		return err
	})
}

// probed waits until the proxy of a node says of which addresses of my-nginx it is that they do not
// answer its probe.
func probed(ctx context.Context, l *lab.Lab, node, probe string, failing ...netip.Addr) error {
	text, err := l.Agent("proxy", node).Get(ctx, "/v1/status")
	if err != nil {
		return err
	}
	var status explain.ProxyStatus
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		return fmt.Errorf("status of %s: %w", node, err)
	}
	at := slices.IndexFunc(status.Services, func(s explain.ProxyService) bool { return s.Service == "default/my-nginx" })
	if at < 0 {
		return fmt.Errorf("%s does not know the Service", node)
	}
	asks := status.Services[at].Probe
	if asks == nil || asks.Probe != probe || asks.Asked == 0 {
		return fmt.Errorf("%s probes %+v", node, asks)
	}
	var got []netip.Addr
	for _, f := range asks.Failing {
		got = append(got, f.Address.Addr())
	}
	if !slices.Equal(got, failing) {
		return fmt.Errorf("%s says of %v that they do not answer, want %v", node, got, failing)
	}
	return nil
}

// wantServiceEvent waits until my-nginx has an Event with this reason and a part of its message.
func wantServiceEvent(t *testing.T, l *lab.Lab, reason lb.Reason, parts ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("Event %s %q", reason, parts), func() error {
		events, err := l.Kube().CoreV1().Events("default").List(t.Context(),
			metav1.ListOptions{FieldSelector: "involvedObject.name=my-nginx"})
		if err != nil {
			return err
		}
		var seen []string
		for _, e := range events.Items {
			seen = append(seen, e.Reason+": "+e.Message)
			if e.Reason == string(reason) &&
				!slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(e.Message, part) }) {
				return nil
			}
		}
		return fmt.Errorf("Events: %q", seen)
	})
}

// TestProbeLeavesOutAPodThatANodeDoesNotReach has the network between the node that answers and one of two
// pods drop what is sent, as a tunnel does that is broken: the pod stays ready, other nodes use it, and the
// node goes on with the other pod, without a loss, in both families.
func TestProbeLeavesOutAPodThatANodeDoesNotReach(t *testing.T) {
	t.Parallel()
	for mode, probe := range map[string]string{"nftables": "tcp", "iptables": "http:/"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			values := map[string]any{"proxy": map[string]any{"mode": mode}}
			leavesOutAPod(t, bootsOnDualStack(t, lab.Options{Values: values}), probe)
		})
	}
}

func leavesOutAPod(t *testing.T, b boots, asks string) {
	if err := b.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.served(t)
	var own, away lab.Pod
	for _, p := range b.Pods("my-nginx") {
		if p.Node == bootNode {
			own = p
		} else {
			away = p
		}
	}
	lost := away.Addr
	drop := func() {
		mustExec(t, b.Lab, bootNode, "nft", "add table inet broken; "+
			"add chain inet broken out { type filter hook postrouting priority 0 ; }; "+
			"add rule inet broken out ip daddr "+lost.String()+" drop; "+
			"add rule inet broken out ip6 daddr "+lab.Twin(lost).String()+" drop")
	}
	answers := func(pods ...string) {
		t.Helper()
		for _, vip := range b.vips {
			wantAnswers(t, b.Lab, b.from, "tcp", vip, pods...)
		}
	}
	setProbe(t, b.Lab, asks)
	for _, node := range workers(b.Lab) {
		eventually(t, node+" probes both", func() error { return probed(t.Context(), b.Lab, node, asks) })
	}
	answers(own.Name, away.Name)
	drop()
	answers(own.Name)
	wantNone := b.probe(t)
	eventually(t, "the node says why", func() error {
		return probed(t.Context(), b.Lab, bootNode, asks, lost, lab.Twin(lost))
	})
	for _, node := range otherThan(b.Lab, bootNode) {
		if err := probed(t.Context(), b.Lab, node, asks); err != nil {
			t.Errorf("another node is concerned: %v", err)
		}
	}
	for _, addr := range []netip.Addr{lost, lab.Twin(lost)} {
		wantServiceEvent(t, b.Lab, lb.ReasonProbeFailed, bootNode, addr.String(), "no answer within")
	}
	ctl := filepath.Join(programFolder(t), "landfallctl")
	eventually(t, "landfallctl names the pod", func() error {
		line, _ := firstLine(t.Context(), b.Lab, ctl, svc("my-nginx")...)
		if !strings.HasPrefix(line, "Service default/my-nginx: "+bootNode+" sends no new connections to "+lost.String()) {
			return fmt.Errorf("it says %q", line)
		}
		return nil
	})
	b.served(t)
	wantNone()

	mustExec(t, b.Lab, bootNode, "nft", "delete table inet broken")
	answers(own.Name, away.Name)
	wantServiceEvent(t, b.Lab, lb.ReasonProbePassed, bootNode)
}

// TestProbeThatIsWrongTakesNothing has nodes ask for a path that no pod answers, under both policies: all pods
// go on, the node goes on to announce, and Events say so. A value that is none is told, and nothing is asked.
func TestProbeThatIsWrongTakesNothing(t *testing.T) {
	t.Parallel()
	b := bootsOverL2(t)
	b.served(t)
	var pods []string
	var addrs []netip.Addr
	for _, p := range b.Pods("my-nginx") {
		pods, addrs = append(pods, p.Name), append(addrs, p.Addr)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	wrong := "http:" + podserver.Missing
	wantAnswers(t, b.Lab, b.from, "tcp", b.vip, pods...)
	probe := b.StartProbe(t.Context(), b.from, "tcp", b.vip, newEvery)
	setProbe(t, b.Lab, wrong)
	for _, node := range workers(b.Lab) {
		eventually(t, node+" says what it asks", func() error {
			return probed(t.Context(), b.Lab, node, wrong, addrs...)
		})
	}
	wantServiceEvent(t, b.Lab, lb.ReasonProbeIgnored, bootNode, "status 404, want 200 to 399", "all are used")
	wantAnswers(t, b.Lab, b.from, "tcp", b.vip, pods...)
	setLocal(t, b.Lab)
	b.served(t)
	setProbe(t, b.Lab, "http:/")
	for _, node := range workers(b.Lab) {
		eventually(t, node+" asks for a path that exists", func() error { return probed(t.Context(), b.Lab, node, "http:/") })
	}
	setProbe(t, b.Lab, "icmp")
	wantServiceEvent(t, b.Lab, lb.ReasonProbeInvalid, bootNode, lb.AnnotationProbe, `"icmp": want tcp, or http: and a path`)
	eventually(t, "the condition names the annotation", func() error {
		s, err := b.Kube().CoreV1().Services("default").Get(t.Context(), "my-nginx", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range s.Status.Conditions {
			if c.Type == lb.ConditionAnnounced && c.Status == metav1.ConditionTrue &&
				strings.Contains(c.Message, lb.AnnotationProbe+`: "icmp": want tcp`) {
				return nil
			}
		}
		return fmt.Errorf("conditions: %+v", s.Status.Conditions)
	})
	b.served(t)
	wantNoneLost(t, probe.Stop())
}

// BenchmarkProbeEject drops what the node that answers sends to one of two pods, again and again, while a
// client opens a connection each 5 ms, and reports after how long the last one began that was lost:
// go test -run '^$' -bench ProbeEject -benchtime 20x -timeout 30m ./e2e
func BenchmarkProbeEject(b *testing.B) {
	l := labtest.Start(b, lab.SeedCluster(), lab.Options{})
	if err := l.ApplyYAML(b.Context(), preferBootNode); err != nil {
		b.Fatal(err)
	}
	if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
		b.Fatal(err)
	}
	const owner = bootNode
	wantAnswererAmong(b, l, seedVIP.Addr(), owner)
	var lost netip.Addr
	for _, p := range l.Pods("my-nginx") {
		if p.Node != owner {
			lost = p.Addr
		}
	}
	exec := func(argv ...string) {
		if _, err := l.Exec(b.Context(), owner, argv...); err != nil {
			b.Fatal(err)
		}
	}
	var hit []time.Duration
	for b.Loop() {
		setProbe(b, l, "tcp")
		eventually(b, "it is probed", func() error { return probed(b.Context(), l, owner, "tcp") })
		time.Sleep(500*time.Millisecond + rand.N(100*time.Millisecond))
		probe := l.StartProbe(b.Context(), lab.ClientName, "tcp", seedVIP, newEvery/2)
		time.Sleep(500 * time.Millisecond)
		exec("nft", "add table ip broken; add chain ip broken out { type filter hook postrouting priority 0 ; }; "+
			"add rule ip broken out ip daddr "+lost.String()+" drop")
		eventually(b, "it is left out", func() error { return probed(b.Context(), l, owner, "tcp", lost) })
		time.Sleep(time.Second)
		hit = append(hit, probe.Stop().Hit)
		exec("nft", "delete table ip broken")
		setProbe(b, l, "") // nothing is remembered of before
	}
	slices.Sort(hit)
	b.ReportMetric(float64(hit[len(hit)/2].Milliseconds()), "ms-p50")
	b.ReportMetric(float64(hit[len(hit)-1].Milliseconds()), "ms-max")
}
