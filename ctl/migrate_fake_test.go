package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/kube"
)

// fakeWorld is an API server with what a migration reads and writes, and the controllers, kubelets
// and programs that act on it at once.
type fakeWorld struct {
	t       *testing.T
	objects map[string]map[string]any // by path
	// failAt is the number of the write that fails, from 1; 0: none. A write that fails is not done.
	failAt, writes int
	// stubborn pods do not end, and those of slow, a DaemonSet, do not become ready.
	stubborn bool
	slow     string
	// cleaned counts the pods that cleaned a node up; the first cleanupFailures of each node fail.
	cleaned         map[string]int
	cleanupFailures int
	// denied has what the user may not do, as "verb resource".
	denied map[string]bool
	// after is called after each write.
	after func(what string)
}

var errFake = errors.New("the API server is gone")

// clone copies an object as JSON does.
func clone(t *testing.T, o any) map[string]any {
	t.Helper()
	raw, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	var c map[string]any
	if err := json.Unmarshal(raw, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// put adds objects in YAML at a path.
func (w *fakeWorld) put(at, text string) {
	w.t.Helper()
	var o map[string]any
	if err := yaml.Unmarshal([]byte(text), &o); err != nil {
		w.t.Fatal(err)
	}
	w.objects[at] = clone(w.t, o)
}

func (w *fakeWorld) Send(_ context.Context, verb, uri, contentType string, body []byte) ([]byte, error) {
	u, err := url.Parse(uri)
	if err != nil {
		return nil, err
	}
	at, query := u.Path, u.Query()
	if verb == http.MethodGet {
		return w.read(at, query.Get("labelSelector"))
	}
	if query.Get("dryRun") != "" {
		return []byte("{}"), nil
	}
	if at == reviewsPath {
		return w.review(body)
	}
	if w.writes++; w.writes == w.failAt {
		return nil, errFake
	}
	live := w.objects[at]
	var given map[string]any
	if verb == http.MethodPatch {
		if err := json.Unmarshal(body, &given); err != nil {
			return nil, err
		}
	}
	switch {
	case verb == http.MethodDelete:
		delete(w.objects, at)
	case contentType == kube.MergePatch && live == nil:
		return nil, fmt.Errorf("%s: not found", at)
	case contentType == kube.MergePatch:
		w.objects[at] = migrate.Apply(live, given)
	case live != nil: // one manager applies: what it leaves out goes
		live = maps.Clone(live)
		live["spec"], live["data"] = given["spec"], given["data"]
		w.objects[at] = migrate.Apply(live, map[string]any{"metadata": given["metadata"]})
	default:
		w.objects[at] = given
	}
	if w.after != nil {
		w.after(verb + " " + at)
	}
	w.act()
	w.check(verb + " " + at)
	return []byte("{}"), nil
}

// review answers a SelfSubjectAccessReview.
func (w *fakeWorld) review(body []byte) ([]byte, error) {
	var asked struct {
		Spec struct {
			ResourceAttributes struct{ Verb, Resource string } `json:"resourceAttributes"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(body, &asked); err != nil {
		return nil, err
	}
	a := asked.Spec.ResourceAttributes
	return json.Marshal(map[string]any{"status": map[string]any{"allowed": !w.denied[a.Verb+" "+a.Resource]}})
}

func (w *fakeWorld) read(at, selector string) ([]byte, error) {
	if o, ok := w.objects[at]; ok {
		return json.Marshal(o)
	}
	items := []any{}
	for _, p := range slices.Sorted(maps.Keys(w.objects)) {
		inside := path.Dir(p) == at || at == servicesPath && strings.Contains(p, "/services/")
		if inside && w.selects(selector, w.objects[p]) {
			items = append(items, w.objects[p])
		}
	}
	if len(items) == 0 && strings.HasSuffix(path.Dir(at), "s") && selector == "" {
		return nil, nil // an object
	}
	return json.Marshal(map[string]any{"items": items})
}

func (w *fakeWorld) selects(selector string, o map[string]any) bool {
	for term := range strings.SplitSeq(selector, ",") {
		key, want, equal := strings.Cut(term, "=")
		has := text(o, "metadata", "labels", key)
		if term != "" && (equal && has != want || !equal && has == "") {
			return false
		}
	}
	return true
}

var fakeNodes = []string{"n1", "n2", "n3"}

// act has pods, conditions and sessions follow the objects.
func (w *fakeWorld) act() {
	for p, o := range w.objects {
		if !strings.Contains(p, "/apps/v1/") {
			continue
		}
		spec := o["spec"].(map[string]any)
		template := spec["template"].(map[string]any)["spec"].(map[string]any)
		namespace := strings.Split(p, "/")[5]
		pods := 0
		for _, nodeAt := range w.under(nodesPath) {
			node := path.Base(nodeAt)
			labels := w.objects[nodeAt]["metadata"].(map[string]any)["labels"].(map[string]any)
			selector, _ := template["nodeSelector"].(map[string]any)
			wanted := text(labels, migrate.LabelNode) == "" || template["affinity"] == nil
			wanted = wanted && selector[migrate.LabelNode] == nil
			if replicas, ok := spec["replicas"].(float64); ok {
				wanted = replicas > 0 && node == "n1"
			}
			at := "/api/v1/namespaces/" + namespace + "/pods/" + path.Base(p) + "-" + node
			if wanted {
				pods++
			}
			if _, there := w.objects[at]; there && !wanted && !w.stubborn {
				delete(w.objects, at)
			} else if !there && wanted {
				w.objects[at] = clone(w.t, map[string]any{"metadata": map[string]any{"name": path.Base(at),
					"labels": spec["selector"].(map[string]any)["matchLabels"]}, "spec": map[string]any{"nodeName": node}, "status": yamlMap(w.t, `{conditions: [{type: Ready, status: "True"}]}`)})
			}
		}
		ready := pods
		if path.Base(p) == w.slow {
			ready = 0
		}
		o["status"] = map[string]any{"readyReplicas": spec["replicas"], "desiredNumberScheduled": float64(pods),
			"numberReady": float64(ready)}
	}
	for p, o := range w.objects {
		if strings.Contains(p, "kube-proxy-cleanup-") && o["status"] == nil {
			w.cleanUp(o)
		}
		if strings.HasPrefix(p, landfallPath("BGPPeer")+"/") {
			var nodes []any
			for _, node := range fakeNodes {
				if migrate.Selects(o["spec"].(map[string]any)["nodeSelectors"], w.objects[nodesPath+"/"+node]) {
					nodes = append(nodes, map[string]any{"name": node, "state": "Established"})
				}
			}
			o["status"] = map[string]any{"nodes": nodes}
		}
		if strings.Contains(p, "/services/") {
			announced := "False"
			if len(w.under(landfallPath("L2Advertisement")))+len(w.under(landfallPath("BGPAdvertisement"))) > 0 {
				announced = "True"
			}
			o["status"].(map[string]any)["conditions"] = []any{
				map[string]any{"type": "landfall.dev/Announced", "status": announced},
				map[string]any{"type": "landfall.dev/Assigned", "status": "True"}}
		}
	}
}

// cleanUp is a pod that runs kube-proxy --cleanup.
func (w *fakeWorld) cleanUp(pod map[string]any) {
	node := text(pod, "spec", "nodeName")
	if w.objects["/api/v1/namespaces/kube-system/pods/kube-proxy-"+node] != nil {
		w.t.Errorf("kube-proxy still runs on %s, and would write its rules again", node)
	}
	if w.cleaned == nil {
		w.cleaned = map[string]int{}
	}
	w.cleaned[node]++
	phase := "Succeeded"
	if w.cleaned[node] <= w.cleanupFailures {
		phase = "Failed"
	}
	pod["status"] = map[string]any{"phase": phase}
}

func (w *fakeWorld) under(prefix string) (found []string) {
	for p := range w.objects {
		if strings.HasPrefix(p, prefix+"/") {
			found = append(found, p)
		}
	}
	return found
}

// check fails the test if both products act for one address.
func (w *fakeWorld) check(after string) {
	w.t.Helper()
	speakers := map[string]bool{}
	for _, p := range w.under("/api/v1/namespaces/metallb-system/pods") {
		if strings.HasPrefix(path.Base(p), "speaker-") {
			speakers[text(w.objects[p], "spec", "nodeName")] = true
		}
	}
	for _, p := range w.under(l2Path + "namespaces/metallb-system/l2advertisements") {
		muted := migrate.Within(migrate.Mute()["spec"].(map[string]any), w.objects[p]["spec"])
		if len(speakers) > 0 && !muted && len(w.under(landfallPath("L2Advertisement"))) > 0 {
			w.t.Errorf("after %s: MetalLB's speakers announce, and Landfall has an L2Advertisement", after)
		}
	}
	for _, p := range w.under(landfallPath("BGPPeer")) {
		nodes, _ := w.objects[p]["status"].(map[string]any)["nodes"].([]any)
		for _, n := range nodes {
			if node := text(n, "name"); speakers[node] && !strings.Contains(after, nodesPath) {
				w.t.Errorf("after %s: a speaker of MetalLB runs on %s, where Landfall has a session", after, node)
			}
		}
	}
	theirs := w.objects["/api/v1/namespaces/metallb-system/pods/controller-n1"] != nil
	ours := w.objects["/api/v1/namespaces/landfall-system/pods/landfall-controller-n1"] != nil
	if theirs && ours && len(w.under(landfallPath("IPAddressPool"))) > 0 {
		w.t.Errorf("after %s: both controllers run, and Landfall has pools", after)
	}
}

// newWorld returns a cluster with MetalLB and Landfall, which announces nothing.
func newWorld(t *testing.T, bgp bool) *fakeWorld {
	w := &fakeWorld{t: t, objects: map[string]map[string]any{}}
	for _, node := range fakeNodes {
		w.put(nodesPath+"/"+node, "{apiVersion: v1, kind: Node, metadata: {name: "+node+", labels: {kubernetes.io/hostname: "+
			node+"}}, status: {addresses: [{address: 10.0.0.9}]}}")
	}
	const metallb, landfall = appsPath + "metallb-system/", appsPath + "landfall-system/"
	workload := func(kind, name, labels, more string) string {
		return "{apiVersion: apps/v1, kind: " + kind + ", metadata: {name: " + name + ", namespace: metallb-system, labels: {" +
			labels + "}}, spec: {" + more + "selector: {matchLabels: {" + labels +
			"}}, template: {spec: {containers: [{args: [--lb-class=x, --load-balancer-class=x]}], nodeSelector: {kubernetes.io/os: linux}}}}}"
	}
	w.put(metallb+"daemonsets/speaker", workload("DaemonSet", "speaker", "app: metallb, component: speaker",
		"updateStrategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 1}}, "))
	w.put(metallb+"deployments/controller", workload("Deployment", "controller", "app: metallb, component: controller",
		"replicas: 1, "))
	w.put(landfall+"daemonsets/landfall-node", workload("DaemonSet", "landfall-node", "app.kubernetes.io/name: landfall", ""))
	w.put(landfall+"deployments/landfall-controller", workload("Deployment", "landfall-controller",
		"app.kubernetes.io/name: landfall, app.kubernetes.io/component: controller", "replicas: 2, "))
	for i, name := range []string{"a", "b"} {
		w.put("/api/v1/namespaces/shop/services/"+name, fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {name: %s, "+
			"namespace: shop, labels: {app: web}}, spec: {type: LoadBalancer, loadBalancerClass: x}, status: {loadBalancer: "+
			"{ingress: [{ip: 10.0.0.%d}]}}}", name, 100+i))
	}
	const crs = "/apis/metallb.io/v1beta1/namespaces/metallb-system/"
	w.put(crs+"ipaddresspools/lan", "{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: lan, "+
		"namespace: metallb-system}, spec: {addresses: [10.0.0.100-10.0.0.120]}}")
	if !bgp {
		w.put(crs+"l2advertisements/lan", "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: lan, "+
			"namespace: metallb-system}, spec: {ipAddressPools: [lan]}}")
		w.act()
		return w
	}
	w.put(crs+"bgpadvertisements/lan", "{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: lan, "+
		"namespace: metallb-system}, spec: {}}")
	w.put(crs+"bfdprofiles/fast", "{apiVersion: metallb.io/v1beta1, kind: BFDProfile, metadata: {name: fast, "+
		"namespace: metallb-system}, spec: {receiveInterval: 50}}")
	w.put("/apis/metallb.io/v1beta2/namespaces/metallb-system/bgppeers/tor", "{apiVersion: metallb.io/v1beta2, kind: BGPPeer, "+
		"metadata: {name: tor, namespace: metallb-system}, spec: {myASN: 1, peerASN: 2, peerAddress: 10.0.0.1, "+
		"passwordSecret: {name: tor}}}")
	w.put(secretPath("metallb-system", "tor"), "{apiVersion: v1, kind: Secret, type: kubernetes.io/basic-auth, metadata: "+
		"{name: tor, namespace: metallb-system}, data: {password: c2VjcmV0}}")
	w.act()
	return w
}

// yamlMap reads YAML.
func yamlMap(t *testing.T, text string) map[string]any {
	t.Helper()
	var m map[string]any
	if err := yaml.Unmarshal([]byte(text), &m); err != nil {
		t.Fatal(err)
	}
	return clone(t, m)
}
