package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/ctl/migrate"
)

const kubeProxySet = appsPath + "kube-system/daemonsets/kube-proxy"

// newProxyWorld returns a cluster in which kube-proxy runs on all nodes, and Landfall's pods do.
func newProxyWorld(t *testing.T) *fakeWorld {
	w := &fakeWorld{t: t, objects: map[string]map[string]any{}}
	for _, node := range fakeNodes {
		w.put(nodesPath+"/"+node, "{apiVersion: v1, kind: Node, metadata: {name: "+node+", labels: {kubernetes.io/os: linux}}}")
		w.put("/api/v1/namespaces/landfall-system/pods/landfall-"+node, "{metadata: {name: landfall-"+node+
			", labels: {app.kubernetes.io/name: landfall}}, spec: {nodeName: "+node+
			", containers: [{command: [landfall-proxy]}, {command: [landfall-speaker]}]}, status: {conditions: [{type: Ready, status: \"True\"}]}}")
	}
	w.put(kubeProxySet, `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: kube-proxy, namespace: kube-system},
		spec: {selector: {matchLabels: {k8s-app: kube-proxy}}, updateStrategy: {type: RollingUpdate},
		template: {spec: {nodeSelector: {kubernetes.io/os: linux}, volumes: [{name: lib-modules}], containers: [
		{image: "kube-proxy:v1", volumeMounts: [{name: lib-modules, mountPath: /lib/modules}]}]}}}}`)
	w.put(appsPath+"landfall-system/daemonsets/landfall-node", `{apiVersion: apps/v1, kind: DaemonSet,
		metadata: {name: landfall-node, namespace: landfall-system, labels: {app.kubernetes.io/name: landfall}},
		spec: {selector: {matchLabels: {x: y}}, template: {spec: {containers: [{command: [landfall-proxy]}]}}}}`)
	w.act()
	return w
}

func (w *fakeWorld) takeover(t *testing.T) *takeover {
	t.Helper()
	raw, err := json.Marshal(w.objects[kubeProxySet])
	if err != nil {
		t.Fatal(err)
	}
	decoded, err := migrate.Decode(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return &takeover{set: migrate.NewWorkload(decoded[0]), nodes: fakeNodes,
		config: migrate.ReadKubeProxy(map[string]any{"clusterCIDR": "10.0.0.0/8", "mode": "ipvs"}),
		installer: installer{choice: migrate.Choices{Namespace: "landfall-system"}, release: "landfall",
			migrator: migrator{server: w, out: io.Discard, wait: 10 * time.Second, pause: time.Millisecond, poll: time.Millisecond},
			ready:    func(context.Context) (string, error) { return "", nil }}}
}

// Whichever write fails, a second run takes over all nodes, and --undo leads to what was there
// before. The cleanup runs on a node only after kube-proxy has ended there.
func TestTakeoverSurvivesAFailureOfEachWrite(t *testing.T) {
	w := newProxyWorld(t)
	before := w.state(t)
	m := w.takeover(t)
	if err := m.run(t.Context(), m.steps()); err != nil {
		t.Fatal(err)
	}
	after, writes := w.state(t), w.writes
	if w.cleaned["n1"] != 1 || w.cleaned["n2"] != 1 || w.cleaned["n3"] != 1 {
		t.Errorf("cleanups by node: %v", w.cleaned)
	}
	if pods := w.under("/api/v1/namespaces/kube-system/pods"); len(pods) > 0 {
		t.Errorf("pods are left: %v", pods)
	}
	for failAt := 1; failAt <= writes; failAt++ {
		for _, back := range []bool{false, true} {
			w := newProxyWorld(t)
			w.failAt = failAt
			m := w.takeover(t)
			if err := m.run(t.Context(), m.steps()); !errors.Is(err, errFake) {
				t.Fatalf("write %d: %v", failAt, err)
			}
			m, want := w.takeover(t), after
			steps := m.steps()
			if back {
				steps, want = m.undoSteps(), before
			}
			if err := m.run(t.Context(), steps); err != nil {
				t.Fatalf("write %d, back %v: %v", failAt, back, err)
			}
			if diff := cmp.Diff(want, w.state(t)); diff != "" {
				t.Errorf("write %d, back %v (-want +got):\n%s", failAt, back, diff)
			}
		}
	}
}

// A node without a ready pod of Landfall keeps kube-proxy.
func TestTakeoverKeepsKubeProxyWhereLandfallIsNotReady(t *testing.T) {
	w := newProxyWorld(t)
	delete(w.objects, "/api/v1/namespaces/landfall-system/pods/landfall-n2")
	m := w.takeover(t)
	m.wait = 50 * time.Millisecond
	err := m.run(t.Context(), m.steps())
	if err == nil || !strings.Contains(err.Error(), "node n2") {
		t.Errorf("error %v", err)
	}
	if w.objects["/api/v1/namespaces/kube-system/pods/kube-proxy-n2"] == nil {
		t.Error("kube-proxy is gone from n2")
	}
	if w.objects["/api/v1/namespaces/kube-system/pods/kube-proxy-n1"] != nil {
		t.Error("kube-proxy is still on n1")
	}
}

// After the IPVS mode the first run of kube-proxy --cleanup fails, and the second succeeds.
func TestTakeoverRunsTheCleanupTwice(t *testing.T) {
	w := newProxyWorld(t)
	w.cleanupFailures = 1
	m := w.takeover(t)
	if err := m.run(t.Context(), m.steps()); err != nil {
		t.Fatal(err)
	}
	if w.cleaned["n1"] != 2 || w.cleaned["n2"] != 2 || w.cleaned["n3"] != 2 {
		t.Errorf("cleanups by node: %v", w.cleaned)
	}
	if pods := w.under("/api/v1/namespaces/kube-system/pods"); len(pods) > 0 {
		t.Errorf("pods are left: %v", pods)
	}
}

// A cleanup that fails twice stops the takeover, and its pod stays to be looked at.
func TestTakeoverStopsWhenTheCleanupFails(t *testing.T) {
	w := newProxyWorld(t)
	w.cleanupFailures = cleanupTries
	m := w.takeover(t)
	if err := m.run(t.Context(), m.steps()); err == nil || !strings.Contains(err.Error(), "kubectl -n kube-system logs") {
		t.Errorf("error %v", err)
	}
	if w.objects["/api/v1/namespaces/kube-system/pods/kube-proxy-n2"] == nil {
		t.Error("the takeover went on")
	}
}

func TestTakeoverPlan(t *testing.T) {
	m := newProxyWorld(t).takeover(t)
	var out bytes.Buffer
	if err := m.show(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"mode ipvs", "clusterCIDR: 10.0.0.0/8 -> proxy.clusterCIDR", "scheduler: round-robin",
		"kube-ipvs0", "3. take over one node after another"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
}
