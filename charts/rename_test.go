package charts

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// daemonSet is what a cluster has of an installed release.
type daemonSet struct{ name, release, component string }

// kubeadmConfig is what kubeadm notes of a cluster, in part.
const kubeadmConfig = "networking:\n  podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12,fd00:96::/112\n"

// serve answers what helm asks an API server of a cluster that kubeadm made, in which there are DaemonSets and
// nothing else, and returns a kubeconfig for it.
func serve(t *testing.T, sets ...daemonSet) (kubeconfig string) {
	t.Helper()
	return serveAlso(t, nil, sets...)
}

// serveAlso also has other objects, by path.
func serveAlso(t *testing.T, more map[string]any, sets ...daemonSet) (kubeconfig string) {
	t.Helper()
	var items []map[string]any
	for _, s := range sets {
		containers := []map[string]any{{"name": s.component}}
		if s.component == "node" {
			containers = []map[string]any{{"name": "proxy"}, {"name": "speaker"}}
		}
		items = append(items, map[string]any{"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": map[string]any{
			"name": s.name, "namespace": "landfall-system",
			"labels":      map[string]string{"app.kubernetes.io/component": s.component},
			"annotations": map[string]string{"meta.helm.sh/release-name": s.release},
		}, "spec": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": containers}}}})
	}
	resource := func(name, kind string, namespaced bool) metav1.APIResource {
		return metav1.APIResource{Name: name, Kind: kind, Namespaced: namespaced, Verbs: metav1.Verbs{"get", "list"}}
	}
	answers := map[string]any{
		"/version": map[string]string{"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
		"/api":     metav1.APIVersions{Versions: []string{"v1"}},
		"/api/v1": metav1.APIResourceList{GroupVersion: "v1", APIResources: []metav1.APIResource{
			resource("configmaps", "ConfigMap", true), resource("secrets", "Secret", true), resource("nodes", "Node", false),
			resource("services", "Service", true)}},
		"/apis/apps/v1/namespaces/landfall-system/daemonsets": map[string]any{"apiVersion": "apps/v1",
			"kind": "DaemonSetList", "items": items},
		"/api/v1/namespaces/kube-system/configmaps/kubeadm-config": map[string]any{"apiVersion": "v1", "kind": "ConfigMap",
			"metadata": map[string]any{"name": "kubeadm-config", "namespace": "kube-system"},
			"data":     map[string]string{"ClusterConfiguration": kubeadmConfig}},
		"/apis/apps/v1/daemonsets": map[string]any{"apiVersion": "apps/v1", "kind": "DaemonSetList", "items": items},
	}
	var groups metav1.APIGroupList
	for group, of := range map[string][]metav1.APIResource{
		"apps":                      {resource("daemonsets", "DaemonSet", true), resource("deployments", "Deployment", true)},
		"discovery.k8s.io":          {resource("endpointslices", "EndpointSlice", true)},
		"rbac.authorization.k8s.io": {resource("roles", "Role", true)},
	} {
		version := metav1.GroupVersionForDiscovery{GroupVersion: group + "/v1", Version: "v1"}
		groups.Groups = append(groups.Groups, metav1.APIGroup{Name: group, Versions: []metav1.GroupVersionForDiscovery{version},
			PreferredVersion: version})
		answers["/apis/"+group+"/v1"] = metav1.APIResourceList{GroupVersion: group + "/v1",
			APIResources: of}
	}
	answers["/apis"] = groups
	maps.Copy(answers, more)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer, ok := answers[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			answer = metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure",
				Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound}
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, fmt.Appendf(nil, `{"apiVersion": "v1", "kind": "Config", "current-context": "x",
"clusters": [{"name": "x", "cluster": {"server": %q}}], "users": [{"name": "x", "user": {}}],
"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}]}`, server.URL), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

// TestRenamesAreRefused has an upgrade fail that would rename the DaemonSet of the proxy, and says
// what to do; the proxy itself copes with node.separatePods.
func TestRenamesAreRefused(t *testing.T) {
	t.Parallel()
	installed := daemonSet{"landfall-node", "landfall", "node"}
	for name, test := range map[string]struct {
		there []daemonSet
		args  []string
		want  []string // of the error; nil for none
	}{
		"the same name":      {[]daemonSet{installed}, []string{"--is-upgrade"}, nil},
		"separate pods":      {[]daemonSet{installed}, []string{"--is-upgrade", "--set", "node.separatePods=true"}, nil},
		"back to one pod":    {[]daemonSet{{"landfall-proxy", "landfall", "proxy"}}, []string{"--is-upgrade"}, nil},
		"the first install":  {[]daemonSet{installed}, []string{"--set", "fullnameOverride=lf"}, nil},
		"of another release": {[]daemonSet{{"other-node", "other", "node"}}, []string{"--is-upgrade"}, nil},
		"the speaker's own":  {[]daemonSet{{"other-speaker", "landfall", "speaker"}}, []string{"--is-upgrade"}, nil},
		"nothing is cleaned up": {[]daemonSet{installed},
			[]string{"--is-upgrade", "--set", "fullnameOverride=lf,cleanup.enabled=false"}, nil},
		"fullnameOverride": {[]daemonSet{installed}, []string{"--is-upgrade", "--set", "fullnameOverride=lf"},
			[]string{"renames DaemonSet landfall-node to lf-node", "--set fullnameOverride=landfall,",
				"kubectl -n landfall-system delete daemonset landfall-node --cascade=orphan"}},
		"of separate pods": {[]daemonSet{{"landfall-proxy", "landfall", "proxy"}},
			[]string{"--is-upgrade", "--set", "fullnameOverride=lf,node.separatePods=true"},
			[]string{"renames DaemonSet landfall-proxy to lf-proxy", "--set fullnameOverride=landfall,"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := run(t, append([]string{"template", "landfall", "landfall", "--namespace", "landfall-system",
				"--dry-run=server", "--kube-version", kubeVersion, "--kubeconfig", serve(t, test.there...), "--set-json", clusterCIDR}, test.args...)...)
			if (err != nil) != (test.want != nil) {
				t.Fatalf("got %v, want %q", err, test.want)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q", err, want)
				}
			}
		})
	}
}

// TestAClassInUseIsKept has an upgrade fail that changes loadBalancerClass while Landfall announces Services of the class
// before: their class cannot be changed, so all of them would go off the air.
func TestAClassInUseIsKept(t *testing.T) {
	t.Parallel()
	service := func(name, class, status string) map[string]any {
		spec := map[string]any{"type": "LoadBalancer"}
		if class != "" {
			spec["loadBalancerClass"] = class
		}
		return map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"name": name, "namespace": "shop"},
			"spec": spec, "status": map[string]any{"conditions": []any{map[string]any{"type": "landfall.dev/Announced",
				"status": status}}}}
	}
	for name, test := range map[string]struct {
		class    string // of the Deployment
		services []any
		args     []string
		want     string // in the error; "" for none
	}{
		"the same": {"x", []any{service("web", "x", "True")}, []string{"--is-upgrade", "--set", "loadBalancerClass=x"}, ""},
		"none is announced": {"", []any{service("web", "", "False"), service("dns", "x", "True")},
			[]string{"--is-upgrade", "--set", "loadBalancerClass=y"}, ""},
		"a first install": {"", []any{service("web", "", "True")}, []string{"--set", "loadBalancerClass=y"}, ""},
		"on purpose": {"", []any{service("web", "", "True")},
			[]string{"--is-upgrade", "--set", "loadBalancerClass=y,changeLoadBalancerClass=true"}, ""},
		"set": {"", []any{service("web", "", "True"), service("dns", "", "True")},
			[]string{"--is-upgrade", "--set", "loadBalancerClass=y"}, `loadBalancerClass changes from "" to "y", and Landfall ` +
				"would withdraw the addresses of 2 Services, such as shop/web"},
		"changed": {"x", []any{service("web", "x", "True")}, []string{"--is-upgrade"},
			`loadBalancerClass changes from "x" to "", and Landfall would withdraw the addresses of 1 Service`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			there := map[string]any{
				"/apis/apps/v1/namespaces/landfall-system/deployments/landfall-controller": map[string]any{
					"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": "landfall-controller"},
					"spec": map[string]any{"template": map[string]any{"spec": map[string]any{"containers": []any{
						map[string]any{"name": "other"}, map[string]any{"name": "controller", "args": []string{
							"--v", "--load-balancer-class=" + test.class}}}}}}},
				"/api/v1/services": map[string]any{"apiVersion": "v1", "kind": "ServiceList", "items": test.services},
			}
			_, err := run(t, append([]string{"template", "landfall", "landfall", "--namespace", "landfall-system",
				"--dry-run=server", "--kube-version", kubeVersion, "--kubeconfig", serveAlso(t, there), "--set-json", clusterCIDR},
				test.args...)...)
			if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// TestServiceCIDROfKubeadm finds the networks of cluster IPs where the API server has no ServiceCIDRs, unless they are
// given.
func TestServiceCIDROfKubeadm(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ version, value, want string }{
		{"v1.31.0", "", "--service-cidr=10.96.0.0/12,fd00:96::/112\n"},
		{"v1.32.9+k3s1", "", "--service-cidr=10.96.0.0/12,fd00:96::/112\n"},
		{"v1.32.0", "10.43.0.0/16", "--service-cidr=10.43.0.0/16\n"},
		{"v1.33.0", "", ""},
		{"v1.35.4", "10.43.0.0/16", "--service-cidr=10.43.0.0/16\n"},
	} {
		t.Run(test.version+" "+test.value, func(t *testing.T) {
			t.Parallel()
			out, err := run(t, "template", "landfall", "landfall", "--namespace", "landfall-system", "--dry-run=server",
				"--kube-version", test.version, "--kubeconfig", serve(t), "--set", "proxy.serviceCIDR="+test.value)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out, test.want) || test.want == "" && strings.Contains(out, "--service-cidr") {
				t.Errorf("no %q", test.want)
			}
		})
	}
}
