package lab

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/landfall-lb/landfall/e2e/lab/podserver"
)

func TestSeedCluster(t *testing.T) {
	c := SeedCluster()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if got := c.Master().Name; got != "k8s-master-176" {
		t.Errorf("master %s", got)
	}
	if got := c.Nodes[3].Gateway().String(); got != "192.168.100.254" {
		t.Errorf("gateway %s", got)
	}
}

// Every interface that a plan refers to by its far end is cabled there, under a name that the
// kernel takes.
func TestPlanNode(t *testing.T) {
	c := SeedCluster()
	own, others := planNode(c, c.Nodes[1]).commands(func(host string) string { return "x-" + host })
	wantOwn := []string{
		"link set lo up",
		"link add cni0 address 02:00:00:00:00:fe type bridge forward_delay 0 stp_state 0",
		"link set cni0 up",
		"link add eth0 type veth peer name " + portName("k8s-worker-177", "eth0") + " netns x-switch",
		"link set eth0 up",
		"addr add 172.26.236.177/24 broadcast + dev eth0",
		"addr add 192.168.177.254/24 broadcast + dev cni0",
		"route add default via 172.26.236.1",
		"route add 192.168.176.0/24 via 172.26.236.176",
		"route add 192.168.189.0/24 via 172.26.236.178",
		"route add 192.168.100.0/24 via 172.26.236.179",
	}
	if diff := cmp.Diff(wantOwn, own); diff != "" {
		t.Errorf("in the node (-want +got):\n%s", diff)
	}
	port := portName("k8s-worker-177", "eth0")
	wantSwitch := map[string][]string{"switch": {"link set " + port + " master lan", "link set " + port + " up"}}
	if diff := cmp.Diff(wantSwitch, others); diff != "" {
		t.Errorf("elsewhere (-want +got):\n%s", diff)
	}
}

// With two families each address, network and route has its twin.
func TestPlanNodeDualStack(t *testing.T) {
	c := SeedCluster()
	c.DualStack = true
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	own, _ := planNode(c, c.Nodes[1]).commands(func(host string) string { return "x-" + host })
	want := []string{
		"addr add 172.26.236.177/24 broadcast + dev eth0",
		"addr add fd00:172:26:236::177/64 nodad dev eth0",
		"addr add 192.168.177.254/24 broadcast + dev cni0",
		"addr add fd00:192:168:177::254/64 nodad dev cni0",
		"route add default via 172.26.236.1",
		"route add default via fd00:172:26:236::1",
		"route add 192.168.176.0/24 via 172.26.236.176",
		"route add fd00:192:168:176::/64 via fd00:172:26:236::176",
	}
	if diff := cmp.Diff(want, own[5:5+len(want)]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := joined(c.prefixes(c.PodNetwork)); got != "192.168.0.0/16,fd00:192:168::/48" {
		t.Errorf("pod networks %s", got)
	}
	c.PodNetwork = netip.MustParsePrefix("192.168.0.0/15")
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "192.168.0.0/15") {
		t.Errorf("a network without a twin: %v", err)
	}
}

func TestPortNames(t *testing.T) {
	seen := map[string]string{}
	for _, host := range []string{"client", "router", "k8s-worker-177", "k8s-worker-178", "a-pod-with-a-very-long-name-1",
		"a-pod-with-a-very-long-name-2"} {
		for _, iface := range []string{"eth0", "eth1"} {
			name := portName(host, iface)
			if len(name) > 15 || seen[name] != "" {
				t.Errorf("%s/%s: %q (%d characters, also of %q)", host, iface, name, len(name), seen[name])
			}
			seen[name] = host
		}
	}
}

func TestCommandLine(t *testing.T) {
	for _, tc := range []struct {
		name string
		c    command
		run  string
		want string
	}{
		{"plain", command{Argv: []string{"true"}}, "", "ip netns exec ns true"},
		{"own /run", command{Argv: []string{"true"}}, "/r", "ip netns exec ns sh -c SCRIPT sh /r /run -- true"},
		{
			"volumes and privileges",
			command{Argv: []string{"p", "--x"}, Mounts: []mount{{From: "/v", To: "/run/v"}}, Privileges: []string{"--no-new-privs"}},
			"/r", "ip netns exec ns sh -c SCRIPT sh /r /run /v /run/v -- setpriv --no-new-privs p --x",
		},
	} {
		got := strings.ReplaceAll(strings.Join(tc.c.argv("ns", tc.run), " "), mountScript, "SCRIPT")
		if got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

func TestPrivileges(t *testing.T) {
	node := corev1.Container{SecurityContext: &corev1.SecurityContext{
		RunAsUser: new(int64(0)), AllowPrivilegeEscalation: new(false),
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"},
			Add: []corev1.Capability{"NET_ADMIN", "CAP_NET_RAW"}},
	}}
	user := corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{RunAsUser: new(int64(65532))}}
	for _, tc := range []struct {
		name string
		pod  corev1.PodSpec
		c    corev1.Container
		want string
	}{
		{"nothing said", corev1.PodSpec{}, corev1.Container{}, ""},
		{"root with two capabilities", user, node, "--no-new-privs --inh-caps=-all --bounding-set=-all,+net_admin,+net_raw"},
		{"the pod's user", user, corev1.Container{}, "--reuid=65532 --regid=65532 --clear-groups"},
	} {
		if got := strings.Join(privileges(tc.pod, tc.c), " "); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

func TestContainerEnv(t *testing.T) {
	c := corev1.Container{Env: []corev1.EnvVar{
		{
			Name:      "NODE_NAME",
			ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}},
		{Name: "WHERE", Value: "on $(NODE_NAME)"},
	}}
	node := SeedCluster().Nodes[0]
	env, err := containerEnv(c, node, account{})
	if err != nil || !slices.Equal(env, []string{"NODE_NAME=k8s-master-176", "WHERE=on k8s-master-176"}) {
		t.Errorf("%q %v", env, err)
	}
	c.Env[0].ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{}}
	if _, err := containerEnv(c, node, account{}); err == nil || !strings.Contains(err.Error(), "NODE_NAME") {
		t.Errorf("a source that the lab does not know: %v", err)
	}
}

func TestReadinessURL(t *testing.T) {
	c := corev1.Container{Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: 7481}}}
	node := SeedCluster().Nodes[2]
	for _, tc := range []struct {
		port intstr.IntOrString
		want string
	}{
		{intstr.FromInt32(7482), "http://172.26.236.178:7482/readyz"},
		{intstr.FromString("metrics"), "http://172.26.236.178:7481/readyz"},
		{intstr.FromString("other"), ""},
	} {
		c.ReadinessProbe = &corev1.Probe{
			ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: tc.port}}}
		if got, err := readinessURL(c, node); got != tc.want || (err == nil) != (tc.want != "") {
			t.Errorf("%s: %q, %v, want %q", tc.port.String(), got, err, tc.want)
		}
	}
	c.ReadinessProbe.HTTPGet = &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromInt32(7482), Host: "127.0.0.1",
		Scheme: corev1.URISchemeHTTPS}
	if got, err := readinessURL(c, node); got != "https://127.0.0.1:7482/readyz" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestParseChart(t *testing.T) {
	c, err := parseChart(strings.NewReader(`---
# a comment alone
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: pools}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: node}
spec: {template: {spec: {containers: [{name: proxy, command: [landfall-proxy]}]}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: node}
`))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.crds) != 1 || len(c.others) != 2 || len(c.daemonSets) != 1 ||
		c.daemonSets[0].Spec.Template.Spec.Containers[0].Name != "proxy" {
		t.Errorf("%+v", c)
	}
	if _, err := parseChart(strings.NewReader("a: [")); err == nil {
		t.Error("damaged YAML was taken")
	}
}

func TestParseMonitor(t *testing.T) {
	got := parseMonitor(`add table ip nat
create chain ip nat LF-X
add rule ip nat LF-X ip saddr 1.2.3.4 counter packets 0 bytes 0 return
# new generation 3 by process 18083 (iptables)
delete rule ip nat LF-X handle 2
add table ip landfall-lab-canary-1
`)
	for i := range got {
		got[i].Text = ""
	}
	want := []RuleChange{
		{Add: true, What: "table", Table: "nat"},
		{Add: true, What: "chain", Table: "nat", Chain: "LF-X"},
		{Add: true, What: "rule", Table: "nat", Chain: "LF-X"},
		{Add: false, What: "rule", Table: "nat", Chain: "LF-X"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// timeout is an error as the net package has it.
type timeout struct{ error }

func (timeout) Timeout() bool   { return true }
func (timeout) Temporary() bool { return false }

func TestSummarise(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	answer := podserver.Answer{Pod: "a", Client: netip.MustParseAddrPort("10.0.0.1:1234")}
	ok := func(began, ended int) outcome { return outcome{began: at(began), ended: at(ended), answer: answer} }
	failed := func(began, ended int) outcome {
		return outcome{began: at(began), ended: at(ended), err: &net.OpError{Op: "read", Err: timeout{errors.New("slow")}}}
	}
	resent := func(began, ended int) outcome {
		return outcome{began: at(began), ended: at(ended), answer: answer, resent: 1}
	}
	for _, tc := range []struct {
		name                   string
		outcomes               []outcome
		answered, slow, failed int
		gap                    time.Duration
	}{
		{"nothing", nil, 0, 0, 0, 0},
		{"steady", []outcome{ok(0, 1), ok(10, 11), ok(20, 21)}, 3, 0, 0, 10 * time.Millisecond},
		{"a hole", []outcome{ok(0, 1), failed(10, 400), ok(500, 501), ok(510, 511)}, 3, 0, 1, 500 * time.Millisecond},
		{"a first packet lost", []outcome{ok(0, 1), ok(300, 301), resent(10, 1010), resent(20, 1020)}, 4, 2, 0,
			709 * time.Millisecond},
		{"packets lost for seconds", []outcome{ok(0, 1), ok(300, 301), resent(10, 3010)}, 2, 0, 1, 300 * time.Millisecond},
		{"a busy machine", []outcome{ok(0, 1), ok(300, 301), ok(10, 3010)}, 3, 1, 0, 2709 * time.Millisecond},
		{"never again", []outcome{ok(0, 1), failed(10, 500), failed(300, 800)}, 1, 0, 2, 299 * time.Millisecond},
		{"never", []outcome{failed(0, 500), failed(100, 600)}, 0, 0, 2, 100 * time.Millisecond},
	} {
		r := summarise(tc.outcomes)
		if r.Answered != tc.answered || r.Slow != tc.slow || r.Failed() != tc.failed || r.Gap != tc.gap {
			t.Errorf("%s: %s; want %d answered, %d slow, %d failed, gap %v", tc.name, r, tc.answered, tc.slow, tc.failed, tc.gap)
		}
		if late := tc.name == "a busy machine"; late != (len(r.Late) == 1) {
			t.Errorf("%s: late %v", tc.name, r.Late)
		}
		if r.Failed() > 0 && r.Failures["timeout of read"]+r.Failures["late, packets were sent again"] != r.Failed() {
			t.Errorf("%s: failures %v", tc.name, r.Failures)
		}
	}
}

func TestPackagesOf(t *testing.T) {
	if got := packagesOf(debianPackages, []string{"nft", "etcd", "nft"}); !slices.Equal(got,
		[]string{"etcd-server", "nftables"}) {
		t.Errorf("%q", got)
	}
}

func TestToolVersion(t *testing.T) {
	dir := t.TempDir()
	x := tool{Folder: "x", Module: "example.com/x"}
	if err := os.Mkdir(filepath.Join(dir, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		"module m\n\nrequire example.com/x v1.2.3\n":                                              "v1.2.3",
		"module m\n\nrequire (\n\texample.com/xy v9.9.9\n\texample.com/x v0.1.0 // indirect\n)\n": "v0.1.0",
		"module m\n": "",
	} {
		if err := os.WriteFile(filepath.Join(dir, "x", "go.mod"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := x.version(dir); got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

// Only processes with the very mark of a lab are found, and a damaged mark finds none.
func TestMarkedProcesses(t *testing.T) {
	if pids, err := markedProcesses(tokenVariable + "=nobody-has-this-mark"); err != nil || len(pids) > 0 {
		t.Errorf("%v %v", pids, err)
	}
	if _, err := markedProcesses(""); err == nil {
		t.Error("the empty mark was taken")
	}
}

// Programs that are missing are installed; where they cannot be, the error names them and their
// packages.
func TestEnsurePrograms(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	t.Setenv("KUBEBUILDER_ASSETS", "")
	silent := func(string) {}
	program := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"ip", "iptables", "conntrack", "setpriv"} {
		program(name, "")
	}
	err := ensurePrograms(t.Context(), debianPackages, silent)
	if err == nil || err.Error() != "missing programs etcd, nft: install the packages etcd-server nftables" {
		t.Errorf("without apt-get: %v", err)
	}
	program("apt-get", `echo "E: Unable to locate package etcd-server"; exit 100`)
	err = ensurePrograms(t.Context(), debianPackages, silent)
	if err == nil || !strings.Contains(err.Error(), "install the packages etcd-server nftables") ||
		!strings.Contains(err.Error(), "Unable to locate") {
		t.Errorf("with an apt-get that fails: %v", err)
	}
	// One that finds the packages only after an update.
	program("apt-get", `cd `+bin+`
case "$*" in
*update*) : >updated ;;
*"install -y --no-install-recommends etcd-server nftables")
	[ -e updated ] || exit 100
	for p in etcd nft; do echo >$p; /bin/chmod +x $p; done ;;
esac`)
	if err := ensurePrograms(t.Context(), debianPackages, silent); err != nil {
		t.Errorf("with an apt-get that works: %v", err)
	}
}

func TestWaitFor(t *testing.T) {
	silent := func(string) {}
	calls := 0
	err := WaitFor(t.Context(), silent, "a thing", time.Minute, func(context.Context) error {
		if calls++; calls < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if err != nil || calls != 3 {
		t.Errorf("%d calls, %v", calls, err)
	}
	err = WaitFor(t.Context(), silent, "a thing", time.Millisecond,
		func(context.Context) error { return errors.New("reason") })
	if err == nil || !strings.Contains(err.Error(), "a thing: not there after") ||
		!strings.HasSuffix(err.Error(), "reason") {
		t.Errorf("too late: %v", err)
	}
	err = WaitFor(t.Context(), silent, "a thing", time.Hour,
		func(context.Context) error { return permanent{errors.New("hopeless")} })
	if err == nil || err.Error() != "a thing: hopeless" {
		t.Errorf("permanent: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := WaitFor(ctx, silent, "a thing", time.Hour,
		func(context.Context) error { return errors.New("no") }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
