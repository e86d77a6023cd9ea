package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/kube"
)

// wantRefused fails the test unless a run is refused with this reason, and changes nothing.
func (w *fakeWorld) wantRefused(t *testing.T, reason string, run func() error) {
	t.Helper()
	before := w.state(t)
	if err := run(); err == nil || !strings.Contains(err.Error(), reason) {
		t.Errorf("error %v, want one with %q", err, reason)
	}
	if diff := cmp.Diff(before, w.state(t)); diff != "" {
		t.Errorf("something was changed (-want +got):\n%s", diff)
	}
}

// With a Landfall that was installed without its proxy, or with one for some Services only, nobody
// would serve Services once kube-proxy has stopped.
func TestTakeoverNeedsLandfallsProxy(t *testing.T) {
	for command, reason := range map[string]string{
		"{command: [landfall-speaker]}":                                  "without its proxy",
		"{command: [landfall-proxy], args: [--service-proxy-name=mine]}": "service-proxy-name: mine",
	} {
		w := newProxyWorld(t)
		set := w.objects[appsPath+"landfall-system/daemonsets/landfall-node"]
		set["spec"] = clone(t, map[string]any{"selector": map[string]any{"matchLabels": map[string]any{"x": "y"}},
			"template": map[string]any{"spec": yamlMap(t, "{containers: ["+command+"]}")}})
		w.act()
		m := w.takeover(t)
		w.wantRefused(t, reason, func() error { return m.run(t.Context(), m.steps()) })
	}
	// A node on which only the speaker's pod is ready keeps kube-proxy.
	w := newProxyWorld(t)
	pod := w.objects["/api/v1/namespaces/landfall-system/pods/landfall-n2"]
	pod["spec"] = yamlMap(t, "{nodeName: n2, containers: [{command: [landfall-speaker]}]}")
	m := w.takeover(t)
	m.wait = 50 * time.Millisecond
	if err := m.run(t.Context(), m.steps()); err == nil || !strings.Contains(err.Error(), "node n2") {
		t.Errorf("error %v", err)
	}
	if w.objects["/api/v1/namespaces/kube-system/pods/kube-proxy-n2"] == nil {
		t.Error("kube-proxy is gone from n2")
	}
}

// Nodes that join while a takeover goes on are taken over too: kube-proxy's rules would stay there, and
// lead to pods that are gone.
func TestTakeoverTakesNodesThatJoin(t *testing.T) {
	w := newProxyWorld(t)
	join := func(node string) {
		w.put(nodesPath+"/"+node, "{apiVersion: v1, kind: Node, metadata: {name: "+node+", labels: {kubernetes.io/os: linux}}}")
		w.put("/api/v1/namespaces/landfall-system/pods/landfall-"+node, "{metadata: {name: landfall-"+node+
			", labels: {app.kubernetes.io/name: landfall}}, spec: {nodeName: "+node+
			", containers: [{command: [landfall-proxy]}]}, status: {conditions: [{type: Ready, status: \"True\"}]}}")
	}
	w.after = func(what string) {
		spec := w.objects[kubeProxySet]["spec"].(map[string]any)["template"].(map[string]any)["spec"]
		if strings.HasSuffix(what, nodesPath+"/n3") && w.objects[nodesPath+"/n0"] == nil {
			join("n0")
		}
		if text(spec, "nodeSelector", migrate.LabelNode) == "never" && w.objects[nodesPath+"/n4"] == nil {
			join("n4") // and kube-proxy has written its rules there just before
		}
	}
	m := w.takeover(t)
	if err := m.run(t.Context(), m.steps()); err != nil {
		t.Fatal(err)
	}
	if w.cleaned["n0"] != 1 || w.cleaned["n4"] != 1 || w.cleaned["n1"] != 1 {
		t.Errorf("cleanups by node: %v", w.cleaned)
	}
	if taken, err := m.taken(t.Context()); !taken || err != nil {
		t.Errorf("it is not over: %v %v", taken, err)
	}
}

// A permission that is missing is named before anything is done.
func TestMigrationChecksPermissions(t *testing.T) {
	for _, bgp := range []bool{false, true} {
		for _, denied := range []string{"patch daemonsets", "list pods", "patch deployments", "delete ipaddresspools",
			"create l2advertisements"} {
			verb, resource, _ := strings.Cut(denied, " ")
			w := newWorld(t, bgp)
			w.denied = map[string]bool{denied: true}
			w.wantRefused(t, "resources: ["+resource+"], verbs: ["+verb+"]", func() error { return w.apply(t) })
			w.wantRefused(t, "verbs: ["+verb+"]", func() error { return w.undo(t) })
		}
	}
	w := newProxyWorld(t)
	w.denied = map[string]bool{"create pods": true, "patch nodes": true}
	m := w.takeover(t)
	w.wantRefused(t, `{apiGroups: [""], resources: [pods], verbs: [create]} in the namespace kube-system; `+
		`{apiGroups: [""], resources: [nodes], verbs: [patch]}`, func() error { return m.run(t.Context(), m.steps()) })
}

// The kubelet of a node that is down ends no pods: all addresses would be without a speaker while the
// move waits for it.
func TestMigrationRefusesWhileANodeIsDown(t *testing.T) {
	down := yamlMap(t, `{conditions: [{type: Ready, status: Unknown}]}`)
	w := newWorld(t, false)
	w.objects[nodesPath+"/n2"]["status"] = down
	w.wantRefused(t, "not Ready: node n2", func() error { return w.apply(t) })
	p := newProxyWorld(t)
	p.objects[nodesPath+"/n2"]["status"] = down
	m := p.takeover(t)
	p.wantRefused(t, "n2", func() error { return m.run(t.Context(), m.steps()) })
}

// If a speaker of MetalLB does not end, MetalLB announces again at once, before the operator has read the error.
func TestAFailedSwapGivesMetalLBItsAddressesBack(t *testing.T) {
	w := newWorld(t, false)
	before := w.state(t)
	w.stubborn = true
	m := w.move(t)
	m.wait = 20 * time.Millisecond
	m.holdControllerForTest(t)
	if err := m.run(t.Context(), m.steps()[4:6]); err == nil || !strings.Contains(err.Error(), "speaker-n1") {
		t.Fatalf("error %v", err)
	}
	for _, at := range []string{"/apis/metallb.io/v1beta1/namespaces/metallb-system/l2advertisements/lan",
		appsPath + "metallb-system/daemonsets/speaker"} {
		if diff := cmp.Diff(before[at], prune(clone(t, w.objects[at]))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", at, diff)
		}
	}
	w.stubborn = false
	if err := w.move(t).run(t.Context(), m.steps()[4:6]); err != nil {
		t.Errorf("again: %v", err)
	}
}

// Once MetalLB is removed, --undo would leave nobody to announce. And once a cluster has moved, another
// --apply would write over what was edited since.
func TestMigrationIsOver(t *testing.T) {
	w := newWorld(t, false)
	if moved, err := w.move(t).moved(t.Context()); moved || err != nil {
		t.Errorf("at first: %v %v", moved, err)
	}
	w.put("/apis/metallb.io/v1beta1/namespaces/metallb-system/servicel2statuses/l2", `{apiVersion: metallb.io/v1beta1,
		kind: ServiceL2Status, metadata: {name: l2, namespace: metallb-system}, status: {node: n1, serviceName: a,
		serviceNamespace: shop}}`)
	var over []map[string]any // the states in which it says that it is over
	w.after = func(string) {
		moved, err := w.move(t).moved(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if moved {
			w.act()
			over = append(over, w.state(t))
		}
	}
	if err := w.apply(t); err != nil {
		t.Fatal(err)
	}
	for _, state := range over {
		if diff := cmp.Diff(w.state(t), state); diff != "" {
			t.Errorf("it says that it is over before it is (-want +got):\n%s", diff)
		}
	}
	if moved, err := w.move(t).moved(t.Context()); !moved || err != nil {
		t.Errorf("at the end: %v %v", moved, err)
	}
	if gone := w.move(t).plan.Gone(); gone != "" {
		t.Errorf("MetalLB is there: %s", gone)
	}
	for _, at := range []string{appsPath + "metallb-system/daemonsets/speaker",
		"/apis/metallb.io/v1beta1/namespaces/metallb-system/ipaddresspools/lan",
		"/apis/metallb.io/v1beta1/namespaces/metallb-system/l2advertisements/lan"} {
		o := w.objects[at]
		delete(w.objects, at)
		if w.move(t).plan.Gone() == "" {
			t.Errorf("without %s there is nothing to go back to", at)
		}
		w.objects[at] = o
	}
}

// What helm has installed may be half, for another class, or may have other Secrets.
func TestMigrationChecksTheInstallation(t *testing.T) {
	w := newWorld(t, false)
	delete(w.objects, appsPath+"landfall-system/deployments/landfall-controller")
	w.wantRefused(t, "helm has not finished", func() error { return w.apply(t) })

	w = newWorld(t, false)
	controller := w.objects[appsPath+"landfall-system/deployments/landfall-controller"]["spec"].(map[string]any)
	controller["template"] = map[string]any{"spec": yamlMap(t, "{containers: [{args: [--load-balancer-class=y]}]}")}
	w.wantRefused(t, `the loadBalancerClass of Landfall is "y", and that of MetalLB "x"`, func() error { return w.apply(t) })

	const roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/landfall-system/roles/landfall-speaker"
	w = newWorld(t, true)
	w.put(roles, "{metadata: {name: landfall-speaker, labels: {app.kubernetes.io/name: landfall}}, rules: []}")
	w.wantRefused(t, "'speaker.bgpSecrets={tor}'", func() error { return w.apply(t) })

	w = newWorld(t, true)
	w.put(secretPath("landfall-system", "tor"), "{metadata: {name: tor}, data: {password: b3RoZXI=}}")
	w.wantRefused(t, "has another content than metallb-system/tor", func() error { return w.apply(t) })
}

// helm installs into the cluster that was looked at, whatever the current context is.
func TestHelmIsGivenTheSameCluster(t *testing.T) {
	m := newInstaller(nil, kube.UserConfig{Kubeconfig: "/etc/admin.conf", Context: "prod", As: "eve", AsGroups: []string{"sre"}},
		migrateOptions{helm: "helm", chart: "charts/landfall", name: "landfall"}, nil, nil)
	got := strings.Join(m.helmCommand("values.yaml"), " ")
	for _, want := range []string{"--kubeconfig /etc/admin.conf", "--kube-context prod", "--kube-as-user eve",
		"--kube-as-group sre"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
	m.user = kube.UserConfig{}
	if got := strings.Join(m.helmCommand("values.yaml"), " "); strings.Contains(got, "--kube") {
		t.Errorf("without flags: %s", got)
	}
}

// Each address is announced from the node that MetalLB announced it from before another node may: on a
// busy machine seconds pass between two objects, in which that one would answer, and break connections.
func TestAddressesStayOnTheirNodeFromTheFirstMoment(t *testing.T) {
	w := newWorld(t, false)
	w.put("/apis/metallb.io/v1beta1/namespaces/metallb-system/servicel2statuses/l2", `{apiVersion: metallb.io/v1beta1,
		kind: ServiceL2Status, metadata: {name: l2, namespace: metallb-system}, status: {node: n2, serviceName: a,
		serviceNamespace: shop}}`)
	var order []string
	w.after = func(what string) {
		if name, isAd := strings.CutPrefix(what, "PATCH "+landfallPath("L2Advertisement")+"/"); isAd {
			order = append(order, name)
			if name == "lan" {
				w.after = nil
			}
		}
	}
	if err := w.apply(t); err != nil {
		t.Fatal(err)
	}
	if want := []string{"metallb-owner-0-0", "lan"}; !slices.Equal(order, want) {
		t.Errorf("created in the order %v, want %v", order, want)
	}
	pin := w.move(t).plan.Temporary()[0].Spec
	for node, want := range map[string]bool{"n1": false, "n2": true} {
		if got := migrate.Selects(pin["nodeSelectors"], w.objects[nodesPath+"/"+node]); got != want {
			t.Errorf("%s announces for n2: %v", node, got)
		}
	}
}

// A tenant's workloads with the labels of MetalLB's are neither stopped nor waited for, and his pods with their labels
// keep nobody from announcing: not on the way there, nor on the way back.
func TestMigrationWaitsForNoTenant(t *testing.T) {
	for _, bgp := range []bool{false, true} {
		w := newWorld(t, bgp)
		for kind, name := range map[string]string{"DaemonSet": "speaker", "Deployment": "controller"} {
			replicas := map[string]string{"Deployment": "replicas: 1, "}[kind]
			w.put(appsPath+"tenant/"+strings.ToLower(kind)+"s/"+name, "{apiVersion: apps/v1, kind: "+kind+
				", metadata: {name: "+name+", namespace: tenant, generation: 2, labels: {app: metallb, component: "+name+
				"}}, spec: {"+replicas+"selector: {matchLabels: {role: "+name+"}}, template: {spec: {containers: "+
				"[{args: [--lb-class=tenant.example/x]}]}}}}")
			w.put("/api/v1/namespaces/tenant/pods/"+name, "{apiVersion: v1, kind: Pod, metadata: {name: "+name+
				", namespace: tenant, labels: {role: "+name+"}}, spec: {nodeName: n1}, status: {phase: Running}}")
		}
		w.act()
		before := w.state(t)
		quick := func(steps func(*metallbMove) []move) {
			t.Helper()
			m := w.move(t)
			m.wait = 2 * time.Second
			if err := m.run(t.Context(), steps(m)); err != nil {
				t.Errorf("BGP %v: %v", bgp, err)
			}
		}
		quick((*metallbMove).steps)
		w.wantMoved(t, bgp)
		for at, o := range w.state(t) {
			if diff := cmp.Diff(before[at], o); strings.Contains(at, "/tenant/") && diff != "" {
				t.Errorf("%s (-want +got):\n%s", at, diff)
			}
		}
		quick((*metallbMove).undoSteps)
		if diff := cmp.Diff(before, w.state(t)); diff != "" {
			t.Errorf("back at MetalLB (-want +got):\n%s", diff)
		}
	}
}

// A Service that a tenant labels as one that is kept on its node is left alone, and does not keep a move from being
// over: another run would write over what was edited since.
func TestMigrationLeavesALabelThatATenantSet(t *testing.T) {
	const tenant = "/api/v1/namespaces/tenant/services/s"
	w := newWorld(t, false)
	w.put(tenant, "{apiVersion: v1, kind: Service, metadata: {name: s, namespace: tenant, labels: "+
		"{landfall.dev/metallb-owner: n1}}, spec: {type: ClusterIP}, status: {}}")
	w.act()
	if err := w.apply(t); err != nil {
		t.Fatal(err)
	}
	if text(w.objects[tenant], "metadata", "labels", migrate.LabelOwner) != "n1" {
		t.Error("the label of a Service that MetalLB does not serve was changed")
	}
	if moved, err := w.move(t).moved(t.Context()); !moved || err != nil {
		t.Errorf("it is over: %v %v", moved, err)
	}
}

// Speakers of MetalLB that have just started do not know each other, and each answers for all addresses.
// So Landfall announces until they are ready, and only then do they announce.
func TestGoingBackWaitsForSpeakersThatHaveMet(t *testing.T) {
	w := newWorld(t, false)
	before := w.state(t)
	if err := w.apply(t); err != nil {
		t.Fatal(err)
	}
	const ad = l2Path + "namespaces/metallb-system/l2advertisements/lan"
	w.objects[ad]["spec"] = before[ad].(map[string]any)["spec"] // kubectl apply, since the move
	w.slow = "speaker"
	m := w.move(t)
	m.wait = 20 * time.Millisecond
	if err := m.run(t.Context(), m.undoSteps()); err == nil || !strings.Contains(err.Error(), "0 of 3 pods are ready") {
		t.Errorf("error %v", err)
	}
	if len(w.under(landfallPath("L2Advertisement"))) != 1 {
		t.Error("Landfall has withdrawn before MetalLB can announce")
	}
	w.slow = ""
	w.act()
	if err := w.undo(t); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, w.state(t)); diff != "" {
		t.Errorf("back at MetalLB (-want +got):\n%s", diff)
	}
}
