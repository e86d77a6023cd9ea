package e2e

import (
	"context"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// The worked example's first pod, which is on worker-178.
var firstPod = netip.MustParseAddrPort("192.168.189.131:80")

// Without Landfall, the lab itself: each host reaches each pod by its own address, TCP and UDP, and
// the pod sees who asks.
func TestLabNetwork(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})
	ctx := t.Context()
	dns := netip.MustParseAddrPort("192.168.177.10:53")
	for _, tc := range []struct {
		from, network string
		target        netip.AddrPort
		pod, source   string
	}{
		{"my-nginx-2", "tcp", firstPod, "my-nginx-1", "192.168.100.1"},
		{"my-nginx-1", "tcp", firstPod, "my-nginx-1", "192.168.189.131"},
		{"k8s-worker-178", "tcp", firstPod, "my-nginx-1", "192.168.189.254"},
		{"k8s-worker-177", "tcp", firstPod, "my-nginx-1", "172.26.236.177"},
		{"my-nginx-1", "udp", dns, "coredns-2", "192.168.189.131"},
		{"k8s-master-176", "udp", dns, "coredns-2", "172.26.236.176"},
	} {
		t.Run(tc.from+"/"+tc.network, func(t *testing.T) {
			answer, err := l.Ask(ctx, tc.from, tc.network, tc.target)
			if err != nil {
				t.Fatal(err)
			}
			if answer.Pod != tc.pod || answer.Client.Addr().String() != tc.source {
				t.Errorf("answer %+v, want pod %s and client %s", answer, tc.pod, tc.source)
			}
		})
	}
	t.Run("HTTP", func(t *testing.T) {
		code, body, err := l.Get(ctx, "k8s-worker-177", "http://192.168.189.131/index.html")
		if err != nil || code != 200 || !strings.Contains(body, `"pod":"my-nginx-1"`) ||
			!strings.Contains(body, "/index.html") {
			t.Errorf("%d %q %v", code, body, err)
		}
	})
	t.Run("clients reach nodes", func(t *testing.T) {
		// Nobody listens: a reset from the right host is the proof of the path.
		for _, client := range []string{lab.ClientName, lab.FarClientName} {
			if _, err := l.Dial(ctx, client, "tcp", "172.26.236.179:9"); err == nil ||
				!strings.Contains(err.Error(), "refused") {
				t.Errorf("from %s: %v, want a refusal", client, err)
			}
		}
	})
	t.Run("cut and heal", func(t *testing.T) { testCut(t, l) })
}

func testCut(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	// From 177 to a pod on 178.
	probe := l.StartProbe(ctx, "k8s-worker-177", "tcp", firstPod, 20*time.Millisecond)
	for _, step := range []struct {
		name string
		do   func(context.Context, string) error
	}{{"cut", l.Cut}, {"unplug", l.Unplug}} {
		if err := step.do(ctx, "k8s-worker-178"); err != nil {
			t.Fatal(err)
		}
		if answer, err := l.Ask(ctx, "k8s-worker-177", "tcp", firstPod); err == nil {
			t.Errorf("%s: still answered: %+v", step.name, answer)
		}
		if err := l.Heal(ctx, "k8s-worker-178"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "answers after "+step.name, func() error {
			_, err := l.Ask(ctx, "k8s-worker-177", "tcp", firstPod)
			return err
		})
	}
	report := probe.Stop()
	t.Log(report)
	if report.Answered == 0 || report.Failed() == 0 || report.Gap < 100*time.Millisecond {
		t.Errorf("the probe did not see the fault: %s", report)
	}
}

// Services, their fixed addresses and the slices that follow the pods.
func TestLabObjects(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	cluster.Services = append(cluster.Services, lab.SeedService())
	l := labtest.Start(t, cluster, lab.Options{NoAgents: true})
	ctx := t.Context()

	svc, err := l.Kube().CoreV1().Services("default").Get(ctx, "my-nginx", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if svc.Spec.ClusterIP != "10.106.189.218" || svc.Spec.Ports[0].NodePort != 31428 {
		t.Errorf("cluster IP %s, node port %d", svc.Spec.ClusterIP, svc.Spec.Ports[0].NodePort)
	}
	kubernetes, err := l.Kube().CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil || kubernetes.Spec.ClusterIP != "10.96.0.1" {
		t.Errorf("default/kubernetes: %v %v", kubernetes.Spec.ClusterIP, err)
	}
	wantEndpoints(t, l, "192.168.100.1 k8s-worker-179 true", "192.168.189.131 k8s-worker-178 true")

	third := lab.Pod{Name: "my-nginx-3", Node: "k8s-worker-177", Addr: netip.MustParseAddr("192.168.177.31"),
		App: "my-nginx", TCP: []uint16{80}}
	if err := l.AddPod(ctx, third); err != nil {
		t.Fatal(err)
	}
	if err := l.SetConditions(ctx, "my-nginx-1", lab.ServingTerminating); err != nil {
		t.Fatal(err)
	}
	if err := l.RemovePod(ctx, "my-nginx-2"); err != nil {
		t.Fatal(err)
	}
	wantEndpoints(t, l, "192.168.177.31 k8s-worker-177 true", "192.168.189.131 k8s-worker-178 false")
	if err := l.AddPod(ctx, third); err == nil {
		t.Error("a second pod of one name was accepted")
	}

	t.Run("API server stops and starts", func(t *testing.T) {
		if err := l.StopAPI(); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Kube().CoreV1().Services("default").Get(ctx, "my-nginx", metav1.GetOptions{}); err == nil {
			t.Error("it still answers")
		}
		if err := l.StartAPI(ctx); err != nil {
			t.Fatal(err)
		}
		wantEndpoints(t, l, "192.168.177.31 k8s-worker-177 true", "192.168.189.131 k8s-worker-178 false")
	})
}

func wantEndpoints(t *testing.T, l *lab.Lab, want ...string) {
	t.Helper()
	list, err := l.Kube().DiscoveryV1().EndpointSlices("default").List(t.Context(),
		metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=my-nginx"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			ready := "false"
			if *e.Conditions.Ready {
				ready = "true"
			}
			got = append(got, e.Addresses[0]+" "+*e.NodeName+" "+ready)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("endpoints %q, want %q", got, want)
	}
}

// Two labs with the same addresses, side by side.
func TestLabsSideBySide(t *testing.T) {
	one := labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})
	two := labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})
	if one.Name() == two.Name() {
		t.Fatalf("both are named %s", one.Name())
	}
	if err := two.RemovePod(t.Context(), "my-nginx-1"); err != nil {
		t.Fatal(err)
	}
	if _, err := two.Ask(t.Context(), "my-nginx-2", "tcp", firstPod); err == nil {
		t.Errorf("%s answers for a pod that it does not have", two.Name())
	}
	if _, err := one.Ask(t.Context(), "my-nginx-2", "tcp", firstPod); err != nil {
		t.Errorf("%s lost a pod to the other lab: %v", one.Name(), err)
	}
}

// A program that is killed leaves its lab behind; the next start removes it, and does not touch the
// labs of living programs.
func TestLeftoversAreRemoved(t *testing.T) {
	if name := os.Getenv("LANDFALL_TEST_ABANDON"); name != "" {
		if _, err := lab.Start(t.Context(), lab.SeedCluster(), lab.Options{Name: name, NoAgents: true}); err != nil {
			t.Fatal(err)
		}
		os.Stdout.WriteString("\nready\n")
		select {}
	}
	living := labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})

	const name = "abandoned"
	cmd := exec.Command(os.Args[0], "-test.run=^TestLeftoversAreRemoved$", "-test.v")
	cmd.Env = append(os.Environ(), "LANDFALL_TEST_ABANDON="+name)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitForLine(t, out, "ready")
	// Once the program is killed, any lab that starts on this machine may remove them.
	if len(namespaces(t, name)) == 0 || len(processesWith(t, "/"+name+"/")) == 0 {
		t.Fatal("the program has nothing that a kill would leave")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed

	labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})
	if left := namespaces(t, name); len(left) > 0 {
		t.Errorf("namespaces left over: %q", left)
	}
	infos, err := lab.List()
	if err != nil || slices.ContainsFunc(infos, func(i lab.Info) bool { return i.Name == name }) {
		t.Errorf("labs %v, %v", infos, err)
	}
	if left := processesWith(t, "/"+name+"/"); len(left) > 0 {
		t.Errorf("processes left over: %q", left)
	}
	if _, err := living.Ask(t.Context(), "my-nginx-2", "tcp", firstPod); err != nil {
		t.Errorf("the living lab was touched: %v", err)
	}
}

// processesWith returns the command lines that contain part.
func processesWith(t *testing.T, part string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, path := range paths {
		line, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(line), part) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

func namespaces(t *testing.T, lab string) []string {
	t.Helper()
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, lab+"-") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// Each change of rules shows, of the kind and in the chain where it happened, and nothing else.
func TestRuleWatch(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})
	ctx := t.Context()
	const node = "k8s-worker-177"
	mustExec(t, l, node, "iptables", "-t", "nat", "-N", "LF-ONE")
	mustExec(t, l, node, "iptables", "-t", "nat", "-A", "LF-ONE", "-j", "RETURN")
	before, err := l.Rules(ctx, node)
	if err != nil {
		t.Fatal(err)
	}
	watch, err := l.WatchRules(ctx, node)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, l, node, "iptables-save")
	mustExec(
		t, l, node, "sh", "-c", `printf '*nat\n:LF-ONE -\n-A LF-ONE -j RETURN\nCOMMIT\n' | iptables-restore --noflush`)
	changes, err := watch.Stop(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range changes {
		verb := "delete"
		if c.Add {
			verb = "add"
		}
		got = append(got, strings.Join([]string{verb, c.What, c.Table, c.Chain}, " "))
	}
	if want := []string{"delete rule nat LF-ONE", "add rule nat LF-ONE"}; !slices.Equal(got, want) {
		t.Errorf("changes %q, want %q", got, want)
	}
	if after, err := l.Rules(ctx, node); err != nil || after != before {
		t.Errorf("rules %q, %v, want those from before: %q", after, err, before)
	}
}

func mustExec(t testing.TB, l *lab.Lab, host string, argv ...string) string {
	t.Helper()
	out, err := l.Exec(t.Context(), host, argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// A description that cannot be built is refused before anything is made.
func TestBadDescription(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the lab makes network namespaces: needs root")
	}
	c := lab.SeedCluster()
	c.Pods = append(c.Pods, lab.Pod{Name: "stray", Node: "nowhere"},
		lab.Pod{Name: "my-nginx-1", Node: "k8s-worker-177", Addr: netip.MustParseAddr("10.0.0.1")})
	_, err := lab.Start(t.Context(), c, lab.Options{})
	if err == nil {
		t.Fatal("it was built")
	}
	for _, want := range []string{`no node "nowhere"`, `"my-nginx-1": empty or used twice`,
		"10.0.0.1 is not in 192.168.177.0/24"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want it to say %q", err, want)
		}
	}
}
