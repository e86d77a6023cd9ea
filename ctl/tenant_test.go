package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// tenants are namespaces that sort ahead of Landfall's and behind it.
var tenants = []string{"aaa", "shop"}

// podAlike is a pod on node n0 that claims to be all of Landfall.
func podAlike(namespace string) string {
	return fmt.Sprintf(`{"metadata":{"name":"landfall-node-0","namespace":%q,
		"labels":{"app.kubernetes.io/component":"node","landfall.dev/dashboard":"deployer"}},
		"spec":{"nodeName":"n0","containers":[{"name":"speaker","command":["landfall-speaker","--ignore-exclude-lb=true"]},
		{"name":"proxy","command":["landfall-proxy","--service-proxy-name=theirs"]},
		{"name":"controller","command":["landfall-controller","--load-balancer-class=theirs"]}]},
		"status":{"phase":"Running","containerStatuses":[{"name":"speaker","ready":true,"state":{"running":
		{"startedAt":"2026-01-01T00:00:00Z"}}},{"name":"proxy","ready":true,"state":{"running":{}}},
		{"name":"controller","ready":true,"state":{"running":{}}}]}}`, namespace)
}

// withTenant adds a tenant's pod that looks like Landfall's.
func (f fakeCluster) withTenant(namespace string) fakeCluster {
	all := strings.TrimSuffix(f.objects["/api/v1/pods"], "]}")
	if !strings.HasSuffix(all, "[") {
		all += ","
	}
	f.objects["/api/v1/pods"] = all + podAlike(namespace) + "]}"
	f.objects["/api/v1/namespaces/"+namespace+"/pods"] = `{"items":[` + podAlike(namespace) + `]}`
	f.objects["/apis/coordination.k8s.io/v1/namespaces/"+namespace+"/leases/landfall-controller"] = leaseOf("theirs")
	f.objects["/apis/coordination.k8s.io/v1/namespaces/landfall-system/leases/landfall-controller"] = leaseOf("ours")
	return f
}

func leaseOf(holder string) string {
	return fmt.Sprintf(`{"metadata":{"name":"landfall-controller"},"spec":{"holderIdentity":"%s_1",
		"renewTime":"2999-01-01T00:00:00.000000Z","leaseDurationSeconds":15}}`, holder)
}

// fakeHomeless is a cluster in which Landfall's namespace has no pod.
func fakeHomeless() fakeCluster {
	f := fakeWell(1)
	f.objects[podsPath], f.objects["/api/v1/pods"] = `{"items":[]}`, `{"items":[]}`
	return f
}

// A node whose connections pass it is not drained because a tenant's pod on it says that it has none.
func TestDrainAsksNoTenant(t *testing.T) {
	for _, tenant := range tenants {
		g := fakeWell(2).withTenant(tenant).connected(t, &agents{})
		g.exec = func(_ context.Context, pod lb.Key, container string, _ ...string) ([]byte, error) {
			switch {
			case pod.Namespace != "landfall-system":
				t.Errorf("%s was asked", pod)
				return []byte(`{"answering":0,"total":0}`), nil
			case container == "speaker":
				return []byte(`{"answering":1}`), nil
			}
			return []byte(`{"total":4,"services":[{"service":"shop/web","count":4}]}`), nil
		}
		if err := g.read(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 2 { // again, once its pods may be others
			if got := g.drainState(t.Context(), "n0"); got.Connections != 4 || got.Answering != 1 || len(got.Services) != 1 {
				t.Errorf("with a pod in %s: %+v", tenant, got)
			}
			g.stale = true
		}
	}
}

// What a tenant's pod says of itself decides neither which class, which proxies nor which controller is Landfall's.
func TestTenantIsNotBelieved(t *testing.T) {
	for _, tenant := range tenants {
		f := fakeWell(2).withTenant(tenant)
		programs := &agents{nodes: 2}
		ask := programs.exec
		g := f.connected(t, programs)
		g.exec = func(ctx context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
			if pod.Namespace != "landfall-system" {
				t.Errorf("%s was asked", pod)
			}
			return ask(ctx, pod, container, command...)
		}
		v, err := explainService(t.Context(), g, "shop/web")
		if err != nil || v.Level != explain.OK {
			t.Errorf("explain with a pod in %s: %v %+v", tenant, err, v)
		}
		c := g.cluster
		if c.Class != "" || c.ProxyName != "" || c.IgnoreExclude || len(c.Controllers) != 0 || c.Leader != "ours" {
			t.Errorf("with a pod in %s: class %q, proxies %q, %v, leader %q", tenant, c.Class, c.ProxyName, c.Controllers,
				c.Leader)
		}
		if v, err = examine(t.Context(), g, ""); err != nil || !slices.ContainsFunc(v.Checks, func(c explain.Check) bool {
			return c.What == "Pod Security" && strings.Contains(c.Text, "landfall-system")
		}) {
			t.Errorf("doctor with a pod in %s: %v %+v", tenant, err, v)
		}
		w, err := read(t.Context(), g.client, g.server, g.opts)
		if err != nil || w.class != "" || len(w.refused) != 0 {
			t.Errorf("status with a pod in %s: %v class %q, %v", tenant, err, w.class, w.refused)
		}
	}
}

// The chart's operators may run commands in Landfall's namespace alone: a tenant's pod ends no command of theirs.
func TestTenantRefusesNothing(t *testing.T) {
	for _, tenant := range tenants {
		d, err := parseDestination("svc/shop/web")
		if err != nil {
			t.Fatal(err)
		}
		p := &proxies{answer: func(node string) (any, error) { return delivered(node, false, "10.0.0.2:8080"), nil }}
		g := fakeTraced(t, p, func(f *fakeCluster) { f.withTenant(tenant) })
		g.exec = func(ctx context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
			if pod.Namespace != "landfall-system" {
				return nil, &kube.Denied{Verb: "create", Resource: "pods/exec", Namespace: pod.Namespace,
					Err: errors.New("forbidden")}
			}
			return p.exec(ctx, pod, container, command...)
		}
		r, err := tracePacket(t.Context(), g, traceFlags{allNodes: true}, end("203.0.113.7:0"), d)
		if err != nil || len(r.Nodes) != 3 {
			t.Errorf("with a pod in %s: %v, answers of %d nodes", tenant, err, len(r.Nodes))
		}
	}
}

// Without a pod in Landfall's namespace nothing is well, nothing is drained, and the user learns how to name another
// namespace; with its name, landfallctl asks there.
func TestLandfallElsewhere(t *testing.T) {
	elsewhere := fakeHomeless().withTenant("kube-system")
	several := fakeHomeless().withTenant("kube-system").withTenant("shop")
	none, unseen := fakeHomeless(), fakeHomeless()
	unseen.refused["/api/v1/pods"] = true
	const lost = "no pod of Landfall is in namespace landfall-system"
	for name, test := range map[string]struct {
		kubeconfig, hint string
		status           int // the exit code of landfallctl status
	}{
		"in another": {elsewhere.serve(t), lost + "; pods in kube-system look like it: if it is installed there, " +
			"say --landfall-namespace kube-system", 2},
		"in two others":  {several.serve(t), lost + "; pods in kube-system, shop look like it: say --landfall-namespace", 2},
		"nowhere":        {none.serve(t), lost + ", and none in another one looks like it", 0},
		"not to be seen": {unseen.serve(t), lost + "; if it is installed in another one, say --landfall-namespace", 2},
	} {
		for line, want := range map[string]int{
			"doctor": 1, "doctor --node n0": 1, "explain svc shop/web": 1, "explain node n0": 1, "version": 0,
			"status": test.status, "drain n0": 2, "drain n0 --no-wait": 2, "flows 192.0.2.10": 2,
			"trace 203.0.113.7 svc/shop/web:80": 2, "dashboard": 2,
		} {
			code, stdout, stderr := run(append(strings.Fields(line), "--kubeconfig", test.kubeconfig)...)
			first, _, _ := strings.Cut(stdout+stderr, "\n")
			if line == "version" || line == "status" {
				first = stdout + stderr
			}
			if code != want || strings.Contains(first, test.hint) == (line == "status" && want == 0) {
				t.Errorf("%s: %s: exit code %d, want %d: %q is not in %s", name, line, code, want, test.hint, stdout+stderr)
			}
		}
	}
	there := append(strings.Fields("--landfall-namespace kube-system --kubeconfig"), elsewhere.serve(t))
	for line, want := range map[string]string{"version": "3 containers", "status": "Nothing is wrong.",
		"explain reason SecretMissing": "Cure: kubectl -n kube-system get secrets",
		"explain reason FeedUnknown":   "landfallctl --landfall-namespace kube-system explain node",
		"explain node n0":              "the speaker on n0 did not answer: pod kube-system/landfall-node-0"} {
		_, stdout, stderr := run(append(strings.Fields(line), there...)...)
		if !strings.Contains(stdout+stderr, want) || strings.Contains(stdout, "landfall-system") {
			t.Errorf("%s in kube-system: %q is not in %s", line, want, stdout+stderr)
		}
	}
	code, stdout, _ := run("__complete", "status", "--kubeconfig", several.serve(t), "--landfall-namespace", "")
	if code != 0 || !strings.HasPrefix(stdout, "kube-system\nshop\n") {
		t.Errorf("completion: %d %q", code, stdout)
	}
}

// A user who may list the pods of Landfall's namespace alone needs no more.
func TestPodsOfOneNamespace(t *testing.T) {
	f := fakeWell(2)
	f.refused["/api/v1/pods"] = true
	kubeconfig := f.serve(t)
	for _, line := range []string{"status", "status --landfall-namespace=", "explain pool lan"} {
		code, stdout, stderr := run(append(strings.Fields(line), "--kubeconfig", kubeconfig)...)
		if code != 0 {
			t.Errorf("%s: exit code %d: %s%s", line, code, stdout, stderr)
		}
	}
	g := f.connected(t, &agents{nodes: 2})
	if v, err := examine(t.Context(), g, ""); err != nil || !slices.ContainsFunc(v.Checks, func(c explain.Check) bool {
		return c.What == explain.OtherPods && c.Level == explain.Unknown
	}) || !strings.Contains(v.Line, "the controller does not run") {
		t.Errorf("doctor: %v %+v", err, v)
	}
	g = f.connected(t, &agents{nodes: 2})
	if v, err := explainService(t.Context(), g, "shop/web"); err != nil || v.Level != explain.OK ||
		len(g.cluster.Unread) != 0 || len(g.cluster.Agents) != 2 {
		t.Errorf("%v %+v", err, v)
	}
}

// Where somebody has objects of MetalLB's kinds in another namespace, the user says which is MetalLB's.
func TestMigrationAsksForMetalLBsNamespace(t *testing.T) {
	f := fakeWell(1)
	pool := func(namespace, addresses string) string {
		return fmt.Sprintf(`{"metadata":{"name":"lan","namespace":%q},"spec":{"addresses":[%q]}}`, namespace, addresses)
	}
	f.objects["/apis/metallb.io/v1beta1/ipaddresspools"] = `{"kind":"IPAddressPoolList","apiVersion":"metallb.io/v1beta1",
		"items":[` + pool("aaa", "198.51.100.0/24") + "," + pool("lb", "192.0.2.0/24") + `]}`
	kubeconfig := f.serve(t)
	for _, also := range []string{"", "--apply", "--undo"} {
		args := strings.Fields("migrate metallb --kubeconfig " + kubeconfig + " " + also)
		code, stdout, stderr := run(args...)
		if code != 2 || stdout != "" || !strings.Contains(stderr, "in the namespaces aaa, lb") ||
			!strings.Contains(stderr, "--metallb-namespace") {
			t.Errorf("%s: exit code %d: %s%s", also, code, stdout, stderr)
		}
	}
	code, stdout, stderr := run("migrate", "metallb", "--kubeconfig", kubeconfig, "--metallb-namespace", "lb",
		"-o", "objects")
	if code != 0 || !strings.Contains(stdout, "192.0.2.0/24") || strings.Contains(stdout, "198.51.100.0/24") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
}
