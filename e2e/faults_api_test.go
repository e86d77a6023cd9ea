package e2e

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// podsBesideAPI moves the pods of the seed cluster to the node of the API server, so that they
// survive what is done to the workers.
func podsBesideAPI(t testing.TB, l *lab.Lab) {
	t.Helper()
	for _, pod := range []string{"my-nginx-3", "my-nginx-4"} {
		if err := l.AddPod(t.Context(), podOn(l, "k8s-master-176", pod, pod[9])); err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
		if err := l.RemovePod(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
}

// apiAway is for how long the API server is away in each of the parts of a test: a second, or as
// LANDFALL_API_AWAY says, such as 1m.
func apiAway(t *testing.T) time.Duration {
	t.Helper()
	return duration(t, "LANDFALL_API_AWAY", time.Second)
}

// TestFaultWithoutAPIServer commits faults while the API server is away: everything that the nodes
// know goes on, and when it is back the status shows what has happened.
func TestFaultWithoutAPIServer(t *testing.T) {
	t.Parallel()
	away := apiAway(t)
	// A hold in which a proxy starts also on a busy machine, and that is over before the next part, so that a proxy that
	// waits is seen to be waited for.
	const hold = 8 * time.Second
	l := startProductWith(t, lab.Options{Args: map[string][]string{"speaker": {"--hold=" + hold.String()}}})
	podsBesideAPI(t, l)
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-3", "my-nginx-4")
	first := answerer(t, l, seedVIP.Addr())
	rules := seedRules(t, l, first)
	run := startTraffic(t, l, seedVIP)
	if err := l.StopAPI(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(away)
	// A proxy that starts now knows nothing, and touches nothing.
	other, killed := l.Agent("proxy", worker(l, first)), time.Now()
	if err := errors.Join(other.Kill(), other.Start()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(max(away, time.Until(killed.Add(hold+time.Second))))
	if now := answerer(t, l, seedVIP.Addr()); now != first {
		t.Errorf("%s answers, it was %s, and nothing but the API server and another node's proxy has gone", now, first)
	}
	run.wantLossless(t)
	if now := seedRules(t, l, first); now != rules {
		t.Errorf("the rules of my-nginx were:\n%s\nthey are:\n%s", rules, now)
	}

	run = startTraffic(t, l, seedVIP)
	if err := l.Agent("speaker", first).Stop(); err != nil {
		t.Fatal(err)
	}
	second := wantAnswererAmong(t, l, seedVIP.Addr(), without(workers(l), []string{first})...)
	time.Sleep(away)
	run.wantLossless(t)

	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
	crash(t, l, second)
	third := wantAnswererAmong(t, l, seedVIP.Addr(), without(workers(l), []string{first, second})...)
	time.Sleep(time.Second)
	report := probe.Stop()
	t.Logf("%s crashed without an API server: %s", second, report)
	if report.Gap > crashBound {
		t.Errorf("no node took over for %v", report.Gap)
	}
	run = startTraffic(t, l, seedVIP)
	time.Sleep(away)
	run.wantLossless(t)

	if err := l.StartAPI(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", "from "+third)
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String())
	revive(t, l, second)
	if err := l.Agent("speaker", first).Start(); err != nil {
		t.Fatal(err)
	}
	waitTogether(t, l)
	if now := answerer(t, l, seedVIP.Addr()); now != third {
		t.Errorf("%s served the address well, but %s took it over", third, now)
	}
}

// TestFaultEtcdRestored puts etcd back to an older state: no address changes, no rule of what was
// there then goes, no connection is lost.
func TestFaultEtcdRestored(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	podsBesideAPI(t, l)
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-3", "my-nginx-4")
	if err := l.SnapshotEtcd(t.Context()); err != nil {
		t.Fatal(err)
	}
	later := lab.SeedService()
	later.Name, later.ClusterIP, later.Ports[0].NodePort = "later", netip.Addr{}, 0
	if err := l.AddService(t.Context(), later); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "later", "172.26.236.181")
	owner := answerer(t, l, seedVIP.Addr())
	rules := seedRules(t, l, owner)

	run := startTraffic(t, l, seedVIP)
	if err := l.RestoreEtcd(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Second)
	run.wantLossless(t)
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String())
	if now := answerer(t, l, seedVIP.Addr()); now != owner {
		t.Errorf("%s answers, it was %s", now, owner)
	}
	if now := seedRules(t, l, owner); now != rules {
		t.Errorf("the rules of my-nginx were:\n%s\nthey are:\n%s", rules, now)
	}
	// What comes now is served, although all versions are lower than what the programs have seen.
	later.Name = "after"
	restored := time.Now()
	if err := l.AddService(t.Context(), later); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "after", "172.26.236.181")
	t.Logf("a new Service was announced after %v", time.Since(restored))
	wantAddresses(t, l, "my-nginx", seedVIP.Addr().String())
}

// seedRules are the rules of a node that are about the seed Service.
func seedRules(t *testing.T, l *lab.Lab, node string) string {
	t.Helper()
	all, err := l.Rules(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(all) {
		if strings.Contains(line, "default/my-nginx") || strings.Contains(line, seedVIP.Addr().String()) {
			found = append(found, line)
		}
	}
	return strings.Join(found, "")
}
