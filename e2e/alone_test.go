package e2e

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// The speaker without a proxy: with the gate "none" it announces by endpoints alone, and says so.
func TestSpeakerWithoutProxy(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(),
		lab.Options{Values: map[string]any{"proxy": map[string]any{"enabled": false}}})
	if len(l.Agents("proxy")) > 0 || len(l.Agents("speaker")) != len(l.Cluster().Nodes) {
		t.Fatalf("%d proxies, %d speakers", len(l.Agents("proxy")), len(l.Agents("speaker")))
	}
	if err := l.ApplyYAML(t.Context(), poolAndAdvertisement); err != nil {
		t.Fatal(err)
	}
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	status, err := l.Agent("speaker", ownerOf(t, l)).Get(t.Context(), "/v1/status")
	if err != nil || !strings.Contains(status, "endpoints only") {
		t.Errorf("the status does not say what the gate checks: %v\n%s", err, status)
	}
}

// The proxy without a speaker: Services work, and no node announces them.
func TestProxyWithoutSpeaker(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(),
		lab.Options{Values: map[string]any{"speaker": map[string]any{"enabled": false}}})
	if len(l.Agents("speaker")) > 0 {
		t.Fatal("there are speakers")
	}
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	wantAnswers(t, l, "my-nginx-1", "tcp", seedClusterIP, "my-nginx-1", "my-nginx-2")
	wantAnswers(t, l, lab.ClientName, "tcp", seedNodePort, "my-nginx-1", "my-nginx-2")
}

var errSameNode = errors.New("the same one answers")

// macOf returns the MAC address that the near client finds for the VIP when it asks anew; "" if
// no node answers.
func macOf(t testing.TB, l *lab.Lab) string {
	t.Helper()
	_, _ = l.Exec(t.Context(), lab.ClientName, "ip", "neigh", "flush", "to", seedVIP.Addr().String())
	_, _ = l.Ask(t.Context(), lab.ClientName, "tcp", seedVIP)
	fields := strings.Fields(mustExec(t, l, lab.ClientName, "ip", "neigh", "show", "to", seedVIP.Addr().String()))
	if i := slices.Index(fields, "lladdr"); i >= 0 {
		return fields[i+1]
	}
	return ""
}

// Contract 7: without an API server everything known goes on, failover between nodes included.
func TestContract7StaticallyStable(t *testing.T) { inEachMode(t, testStaticallyStable) }

func testStaticallyStable(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
	rules := ourRules(t, l, "k8s-worker-177")
	if err := l.StopAPI(); err != nil {
		t.Fatal(err)
	}
	probe := l.StartProbe(ctx, lab.ClientName, "tcp", seedVIP, 10*time.Millisecond)
	time.Sleep(3 * time.Second)
	if report := probe.Stop(); report.Answered == 0 || report.Failed() > 0 {
		t.Errorf("without the API server: %s", report)
	}
	answerer := macOf(t, l)
	for _, a := range l.Agents("speaker") {
		if strings.Contains(mustExec(t, l, a.Node, "ip", "link", "show", "eth0"), answerer) {
			if err := a.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "another node answers", func() error {
		if now := macOf(t, l); now == "" || now == answerer {
			return errSameNode
		}
		return nil
	})
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
	if now := ourRules(t, l, "k8s-worker-177"); len(without(rules, now))+len(without(now, rules)) > 0 {
		t.Errorf("rules changed: gone %q, new %q", without(rules, now), without(now, rules))
	}
	if err := l.StartAPI(ctx); err != nil {
		t.Fatal(err)
	}
	wantAddresses(t, l, "my-nginx", "172.26.236.180")
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
}
