package charts

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// annotationGossipKey is on the pods that hold a speaker.
const annotationGossipKey = "checksum/gossip-key"

// TestGossipKeyChecksum has the pods of speakers, and no others, roll out when the key in the Secret is
// another: one that the chart has made, and one's own. An upgrade that keeps the key rolls out nothing.
func TestGossipKeyChecksum(t *testing.T) {
	t.Parallel()
	keys := new(sync.Map) // by the name of the Secret
	kubeconfig := clusterWithSecrets(t, keys)
	upgrade := func(set ...string) rendered {
		args := []string{"template", "landfall", "landfall", "--namespace", "landfall-system", "--set-json", clusterCIDR,
			"--kube-version", kubeVersion, "--dry-run=server", "--is-upgrade", "--kubeconfig", kubeconfig}
		for _, s := range set {
			args = append(args, "--set-json", s)
		}
		text, err := run(t, args...)
		if err != nil {
			t.Fatal(err)
		}
		return decode(t, text)
	}
	sum := func(objects rendered, name string) string {
		return as[appsv1.DaemonSet](t, objects, "DaemonSet "+name).Spec.Template.Annotations[annotationGossipKey]
	}

	first := upgrade()
	made := string(as[corev1.Secret](t, first, "Secret landfall-gossip").Data["key"])
	if sum(first, "landfall-node") == "" || made == "" {
		t.Errorf("at first the checksum is %q, the key %q", sum(first, "landfall-node"), made)
	}
	keys.Store("landfall-gossip", made)
	second := upgrade()
	if kept := string(as[corev1.Secret](t, second, "Secret landfall-gossip").Data["key"]); kept != made ||
		sum(second, "landfall-node") != sum(first, "landfall-node") {
		t.Errorf("an upgrade has key %q and checksum %q, after %q and %q", kept, sum(second, "landfall-node"), made,
			sum(first, "landfall-node"))
	}
	keys.Store("landfall-gossip", "another\n"+made)
	if again := sum(upgrade(), "landfall-node"); again == "" || again == sum(first, "landfall-node") {
		t.Errorf("with another key the checksum is %q, as before", again)
	}

	const own = `speaker.gossip.existingSecret="mine"`
	if unread := sum(upgrade(own), "landfall-node"); unread != "" {
		t.Errorf("without the Secret the checksum is %q", unread)
	}
	keys.Store("mine", "a")
	before := sum(upgrade(own), "landfall-node")
	keys.Store("mine", "b")
	if after := sum(upgrade(own), "landfall-node"); before == "" || after == "" || after == before {
		t.Errorf("one's own key: checksums %q and %q", before, after)
	}

	apart := upgrade("node.separatePods=true", `node.podAnnotations={"mine":"1"}`)
	for name, with := range map[string]bool{"landfall-proxy": false, "landfall-speaker": true} {
		annotations := as[appsv1.DaemonSet](t, apart, "DaemonSet "+name).Spec.Template.Annotations
		if (annotations[annotationGossipKey] != "") != with || annotations["mine"] != "1" {
			t.Errorf("%s: annotations %v", name, annotations)
		}
	}
	if plain := sum(upgrade("speaker.gossip.encrypt=false"), "landfall-node"); plain != "" {
		t.Errorf("without encryption the checksum is %q", plain)
	}
}

// looked are the kinds that templates look up, by group version.
var looked = map[string]map[string]string{
	"v1":                           {"secrets": "Secret", "configmaps": "ConfigMap", "nodes": "Node"},
	"apps/v1":                      {"daemonsets": "DaemonSet"},
	"discovery.k8s.io/v1":          {"endpointslices": "EndpointSlice"},
	"rbac.authorization.k8s.io/v1": {"roles": "Role"},
	"landfall.dev/v1beta1":         {"bgppeers": "BGPPeer"},
}

// clusterWithSecrets serves what helm asks an API server for that has only these gossip keys, and returns
// a kubeconfig for it.
func clusterWithSecrets(t *testing.T, keys *sync.Map) (kubeconfig string) {
	type object = map[string]any
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer, status := object(nil), http.StatusOK
		path := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/apis/"), "/api/")
		name, inSecrets := strings.CutPrefix(path, "v1/namespaces/landfall-system/secrets/")
		key, exists := keys.Load(name)
		switch kinds := looked[path]; {
		case kinds != nil:
			var resources []object
			for plural, kind := range kinds {
				resources = append(resources, object{"name": plural, "kind": kind, "namespaced": kind != "Node",
					"verbs": []string{"get", "list"}})
			}
			answer = object{"kind": "APIResourceList", "groupVersion": path, "resources": resources}
		case inSecrets && exists:
			answer = object{"kind": "Secret", "apiVersion": "v1", "data": object{"key": []byte(key.(string))}}
		case slices.Contains([]string{"daemonsets", "nodes", "bgppeers"}, filepath.Base(path)):
			answer = object{"kind": "List", "apiVersion": "v1", "items": []any{}}
		default:
			answer, status = object{"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}, http.StatusNotFound
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(answer)
	}))
	t.Cleanup(server.Close)
	config, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "c",
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{"server": server.URL}}},
		"contexts": []any{map[string]any{"name": "c", "context": map[string]any{"cluster": "c", "user": "u"}}},
		"users":    []any{map[string]any{"name": "u", "user": map[string]any{}}},
	})
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err == nil {
		err = os.WriteFile(kubeconfig, config, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}
