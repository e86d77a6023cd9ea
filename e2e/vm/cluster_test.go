//go:build vm

package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/kube"
)

// Paths in the API server.
const (
	pathOfKubeProxy = "/apis/apps/v1/namespaces/kube-system/daemonsets/kube-proxy"
	pathOfLandfall  = "/apis/apps/v1/namespaces/landfall-system/daemonsets/landfall-node"
	podsOfKubeProxy = "/api/v1/namespaces/kube-system/pods"
	podOfLandfall   = "/api/v1/namespaces/landfall-system/pods/landfall-node-" + cases.Here
	pathOfNode      = "/api/v1/nodes/" + cases.Here
)

// cluster is what landfallctl migrate kube-proxy reads and writes of a cluster with one node. It also does what the
// controller of DaemonSets and the kubelet would do: programs start and end on the node as the objects say.
type cluster struct {
	n *node
	// began is called when something has begun on the node.
	began func(what string)
	// stopKubeProxy is nil while kube-proxy does not run; serves says that it has written its rules since it started.
	stopKubeProxy func()
	serves        bool

	mu      sync.Mutex
	objects map[string]map[string]any // by path
}

// newCluster returns a cluster in which kube-proxy is to run as this configuration says.
func newCluster(t *testing.T, n *node, config string, o *corev1.Node) *cluster {
	t.Helper()
	c := &cluster{n: n, began: func(string) {}, objects: map[string]map[string]any{}}
	configMap, object := map[string]any{}, map[string]any{}
	convert(t, corev1.ConfigMap{TypeMeta: metav1.TypeMeta{Kind: "ConfigMap", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-proxy"},
		Data:       map[string]string{"config.conf": config}}, &configMap)
	convert(t, o, &object)
	c.objects["/api/v1/namespaces/kube-system/configmaps/kube-proxy"], c.objects[pathOfNode] = configMap, object
	c.put(t, pathOfKubeProxy, `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  updateStrategy: {type: RollingUpdate}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      nodeSelector: {kubernetes.io/os: linux}
      containers: [{name: kube-proxy, image: kube-proxy, command: [kube-proxy]}]
`)
	return c
}

// convert copies an object as JSON does.
func convert(t *testing.T, from, to any) {
	t.Helper()
	text, err := json.Marshal(from)
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// put creates an object.
func (c *cluster) put(t *testing.T, at, text string) {
	t.Helper()
	var object map[string]any
	if err := yaml.Unmarshal([]byte(text), &object); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.objects[at] = object
}

// installed creates the objects of a Landfall that runs already.
func (c *cluster) installed(t *testing.T) {
	t.Helper()
	const labels = "labels: {app.kubernetes.io/name: landfall}"
	const containers = "containers: [{name: proxy, command: [landfall-proxy]}]"
	c.put(t, pathOfLandfall, `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: landfall-node, namespace: landfall-system, `+labels+`}
spec: {selector: {matchLabels: {app.kubernetes.io/name: landfall}}, template: {spec: {`+containers+`}}}
`)
	c.put(t, podOfLandfall, `
apiVersion: v1
kind: Pod
metadata: {name: landfall-node-`+cases.Here+`, namespace: landfall-system, `+labels+`}
spec: {nodeName: `+cases.Here+`, `+containers+`}
`)
}

// has reports whether the cluster answers a request; the other objects never change.
func (c *cluster) has(r *http.Request) bool {
	if r.URL.Query().Get("watch") != "" {
		return false // nothing follows what changes here
	}
	for _, prefix := range []string{"/version", "/apis/apps/", "/apis/authorization.k8s.io/", "/api/v1/nodes",
		"/api/v1/namespaces/kube-system/", "/api/v1/namespaces/landfall-system/"} {
		if strings.HasPrefix(r.URL.Path, prefix) {
			return true
		}
	}
	return false
}

// kindsOfLists are those of the cluster's lists, by the last part of the path.
var kindsOfLists = map[string]string{"nodes": "NodeList", "pods": "PodList", "daemonsets": "DaemonSetList",
	"deployments": "DeploymentList"}

func (c *cluster) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err == nil && r.URL.Path == "/version" {
		write(w, map[string]any{"gitVersion": "v1.35.4"})
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var answer any
	if err == nil {
		answer, err = c.do(r, body)
	}
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusBadRequest)
	case answer == nil:
		http.NotFound(w, r)
	default:
		write(w, answer)
	}
}

// do reads or writes, and returns the answer; nil if the object does not exist.
func (c *cluster) do(r *http.Request, body []byte) (any, error) {
	at := strings.TrimSuffix(r.URL.Path, "/")
	live, exists := c.objects[at]
	var given map[string]any
	if len(body) > 0 {
		if err := json.Unmarshal(body, &given); err != nil {
			return nil, err
		}
	}
	switch {
	case r.Method == http.MethodGet && kindsOfLists[path.Base(at)] != "":
		return c.list(at, r.URL.Query().Get("labelSelector"))
	case r.Method == http.MethodPost: // a SelfSubjectAccessReview
		return map[string]any{"status": map[string]any{"allowed": true}}, nil
	case r.Method == http.MethodPatch && r.Header.Get("Content-Type") == kube.ApplyPatch:
		c.objects[at] = given
	case !exists:
		return nil, nil
	case r.Method == http.MethodPatch:
		patched := migrate.Apply(live, given)
		if given["spec"] != nil { // who waits for a DaemonSet asks whether its status is of this generation
			metadata := map[string]any{"generation": generation(live) + 1}
			patched = migrate.Apply(patched, map[string]any{"metadata": metadata})
		}
		c.objects[at] = patched
	case r.Method == http.MethodDelete:
		delete(c.objects, at)
	case r.Method != http.MethodGet:
		return nil, fmt.Errorf("%s %s is not known here", r.Method, at)
	}
	if now := c.objects[at]; now != nil {
		return now, nil
	}
	return live, nil // what it was
}

func (c *cluster) list(at, selector string) (any, error) {
	selects, err := labels.Parse(selector)
	if err != nil {
		return nil, err
	}
	items := []any{}
	for _, p := range slices.Sorted(maps.Keys(c.objects)) {
		if path.Dir(p) == at && selects.Matches(labels.Set(labelsOf(c.objects[p]))) {
			items = append(items, c.objects[p])
		}
	}
	version := "v1"
	if strings.HasPrefix(at, "/apis/apps/") {
		version = "apps/v1"
	}
	return map[string]any{"kind": kindsOfLists[path.Base(at)], "apiVersion": version,
		"metadata": map[string]any{"resourceVersion": "1"}, "items": items}, nil
}

func generation(object map[string]any) float64 {
	metadata, _ := object["metadata"].(map[string]any)
	number, _ := metadata["generation"].(float64)
	return number
}

func labelsOf(object map[string]any) map[string]string {
	found := map[string]string{}
	metadata, _ := object["metadata"].(map[string]any)
	all, _ := metadata["labels"].(map[string]any)
	for key, value := range all {
		found[key] = fmt.Sprint(value)
	}
	return found
}

// status writes the status of an object that exists.
func (c *cluster) status(at string, status map[string]any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if live := c.objects[at]; live != nil {
		c.objects[at] = migrate.Apply(live, map[string]any{"status": status})
	}
}

// sync does what the kubelet and the controller of DaemonSets would do next.
func (c *cluster) sync(t *testing.T) {
	t.Helper()
	wanted, observed := c.wantsKubeProxy(t)
	switch {
	case wanted && c.stopKubeProxy == nil:
		c.began("kube-proxy starts")
		c.stopKubeProxy = c.n.kubeProxy(t)
		c.put(t, podsOfKubeProxy+"/kube-proxy-x", `{metadata: {name: kube-proxy-x, labels: {k8s-app: kube-proxy}},
			spec: {nodeName: `+cases.Here+`}, status: {phase: Running}}`)
	case !wanted && c.stopKubeProxy != nil:
		c.stopKubeProxy()
		c.stopKubeProxy, c.serves = nil, false
		c.mu.Lock()
		delete(c.objects, podsOfKubeProxy+"/kube-proxy-x")
		c.mu.Unlock()
		c.began("kube-proxy has stopped")
	}
	c.serves = c.serves || wanted && c.n.synced(t)
	c.count(pathOfKubeProxy, observed, wanted, c.serves)
	ready := c.n.get(t, "http://127.0.0.1:7482/readyz") != ""
	c.count(pathOfLandfall, 0, true, ready)
	c.status(podOfLandfall, map[string]any{"conditions": []any{map[string]any{"type": "Ready",
		"status": map[bool]string{true: "True", false: "False"}[ready]}}})
	c.cleanUp(t)
}

// count writes the status of a generation of a DaemonSet, with a pod on the node or none.
func (c *cluster) count(at string, observed int64, wanted, ready bool) {
	number := map[bool]int{true: 1}
	c.status(at, map[string]any{"observedGeneration": observed, "desiredNumberScheduled": number[wanted],
		"updatedNumberScheduled": number[wanted], "numberReady": number[ready]})
}

// wantsKubeProxy reports whether kube-proxy's DaemonSet has a pod on the node, by what a migration changes of it. It also
// returns the generation of the DaemonSet.
func (c *cluster) wantsKubeProxy(t *testing.T) (wanted bool, observed int64) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	var set appsv1.DaemonSet
	convert(t, c.objects[pathOfKubeProxy], &set)
	pod, has := set.Spec.Template.Spec, labelsOf(c.objects[pathOfNode])
	for key, value := range pod.NodeSelector {
		if has[key] != value {
			return false, set.Generation
		}
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil {
		return true, set.Generation
	}
	terms := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	return slices.ContainsFunc(terms, func(term corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Operator == corev1.NodeSelectorOpNotIn && slices.Contains(e.Values, has[e.Key])
		})
	}), set.Generation
}

// cleanUp runs the pods that a migration creates, to their end.
func (c *cluster) cleanUp(t *testing.T) {
	t.Helper()
	for at, command := range c.created(t) {
		if c.stopKubeProxy != nil {
			t.Error("kube-proxy still runs, and would write its rules again")
		}
		c.began(strings.Join(command, " "))
		argv := append([]string{"netns", "exec", c.n.Node.Name, filepath.Join("/landfall", command[0])}, command[1:]...)
		out, err := exec.Command("ip", argv...).CombinedOutput()
		t.Logf("%s: %v", strings.Join(command, " "), err)
		phase := "Succeeded"
		if err != nil {
			phase = "Failed"
			t.Logf("%s", out[max(0, len(out)-1000):])
		}
		c.status(at, map[string]any{"phase": phase})
	}
}

// created returns the commands of the pods that a migration has created and that did not run yet, by their paths.
func (c *cluster) created(t *testing.T) map[string][]string {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	commands := map[string][]string{}
	for at, object := range c.objects {
		if path.Dir(at) != podsOfKubeProxy || labelsOf(object)[migrate.LabelFrom] != migrate.FromKubeProxy ||
			object["status"] != nil {
			continue
		}
		var pod corev1.Pod
		convert(t, object, &pod)
		if pod.Spec.NodeName != cases.Here || len(pod.Spec.Containers) != 1 {
			t.Errorf("the pod %s is not for this node: %+v", at, pod.Spec)
			continue
		}
		commands[at] = pod.Spec.Containers[0].Command
	}
	return commands
}

// migrate runs landfallctl migrate kube-proxy, with what a cluster does meanwhile, and returns what it prints.
func (c *cluster) migrate(t *testing.T, flags ...string) string {
	t.Helper()
	argv := append([]string{"netns", "exec", c.n.Node.Name, landfallctl, "--kubeconfig=" + c.n.kubeconfig, "migrate",
		"kube-proxy", "--wait=10m", "--pause=1s"}, flags...)
	var out []byte
	ended := make(chan error, 1)
	go func() {
		var err error
		out, err = exec.Command("ip", argv...).CombinedOutput()
		ended <- err
	}()
	for {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatalf("landfallctl migrate kube-proxy %s: %v\n%s", strings.Join(flags, " "), err, out)
			}
			c.sync(t)
			return string(out)
		case <-time.After(500 * time.Millisecond):
			c.sync(t)
		}
	}
}

// marks returns an error if the migration has left a label on the node, or a pod.
func (c *cluster) marks() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for at, object := range c.objects {
		if has := labelsOf(object); has[migrate.LabelNode] != "" || has[migrate.LabelFrom] != "" {
			errs = append(errs, fmt.Errorf("%s has the labels %v", at, has))
		}
	}
	return errors.Join(errs...)
}
