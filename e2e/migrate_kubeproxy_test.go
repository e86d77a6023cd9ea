package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// kubeProxyObjects are kube-proxy's as kubeadm makes them, as far as anything here depends on it.
const kubeProxyObjects = `---
apiVersion: v1
kind: ConfigMap
metadata: {name: kube-proxy, namespace: kube-system}
data:
  config.conf: |
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    clusterCIDR: 192.168.0.0/16
    mode: MODE
    conntrack: {maxPerCore: null, min: null}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system, labels: {k8s-app: kube-proxy}}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  updateStrategy: {type: RollingUpdate}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      hostNetwork: true
      nodeSelector: {kubernetes.io/os: linux}
      tolerations: [{operator: Exists}]
      containers:
      - name: kube-proxy
        image: registry.k8s.io/kube-proxy:v1.35.4
        command: [/usr/local/bin/kube-proxy, --config=/var/lib/kube-proxy/config.conf, --hostname-override=$(NODE_NAME)]
        securityContext: {privileged: true}
        volumeMounts:
        - {name: xtables-lock, mountPath: /run/xtables.lock}
      volumes:
      - {name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}
`

// landfallctl migrate kube-proxy --apply takes a cluster over from real kube-proxies under traffic, with
// helm installing Landfall, and --undo gives it back. No connection breaks and none is refused.
func TestMigrationFromKubeProxy(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"iptables", "nftables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			ours := map[string]string{"iptables": "auto", "nftables": "nftables"}[mode]
			l := labtest.Start(t, lab.SeedCluster(),
				lab.Options{Stopped: true, Values: map[string]any{"proxy": map[string]any{"mode": ours}}})
			helm, err := lab.Tool(t.Context(), l.Repository(), "helm", func(line string) { t.Log(line) })
			if err != nil {
				t.Fatal(err)
			}
			o := &takeover{l: l, kube: mode, ours: l.Agent("proxy", takeoverNode), healthPort: takeoverServices(t, l)}
			for _, n := range l.Cluster().Nodes {
				if n.Name == takeoverNode {
					o.node = n
				}
			}
			leaveToHelm(t, l)
			if err := l.ApplyYAML(t.Context(), strings.Replace(kubeProxyObjects, "MODE", mode, 1)); err != nil {
				t.Fatal(err)
			}
			k := startKubelets(t, l, "", mode)
			migrate := func(flags ...string) string {
				t.Helper()
				step(t, "landfallctl migrate kube-proxy "+strings.Join(flags, " "))
				out, err := l.Exec(t.Context(), l.Cluster().Nodes[0].Name, append([]string{filepath.Join(programFolder(t),
					"landfallctl"), "--kubeconfig", l.Kubeconfig(), "migrate", "kube-proxy", "--pause", "1s", "--helm", helm},
					flags...)...)
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				return out
			}
			if plan := migrate(); !strings.Contains(plan, "clusterCIDR: 192.168.0.0/16 -> proxy.clusterCIDR") {
				t.Errorf("the plan is\n%s", plan)
			}
			clients := o.startClients(t) // which waits for kube-proxy
			t.Log(migrate("--apply", "--chart", filepath.Join(l.Repository(), "charts/landfall")))
			k.wantKubeProxy(t, false)
			o.wantBackendsFollow(t)
			o.wantHealthPorts(t, "Landfall")
			if out := migrate("--apply"); !strings.Contains(out, "Nothing to do") {
				t.Errorf("a second run says\n%s", out)
			}
			wantDefinitionsOf(t, l, "landfall")

			migrate("--undo")
			k.wantKubeProxy(t, true)
			step(t, "Landfall's proxies stop, and their rules go")
			for _, a := range l.Agents("proxy") {
				if err := a.Stop(); err != nil {
					t.Fatal(err)
				}
				if _, err := a.Run(t.Context(), "cleanup"); err != nil {
					t.Fatal(err)
				}
			}
			o.wantNoRules(t, "LF-", "landfall")
			o.wantBackendsFollow(t)
			clients.wantNoneLost(t)
		})
	}
}

// wantKubeProxy fails the test unless kube-proxy runs on all nodes, or on none, where its rules are gone.
func (k *kubelets) wantKubeProxy(t *testing.T, runs bool) {
	t.Helper()
	for _, n := range k.l.Cluster().Nodes {
		eventually(t, fmt.Sprintf("rules of kube-proxy on %s: %v", n.Name, runs), func() error { // it writes them in parts
			rules, err := k.l.Exec(t.Context(), n.Name, "sh", "-c", "iptables-save; ip6tables-save; nft list tables")
			if err != nil {
				return err
			}
			found := strings.Contains(strings.ReplaceAll(rules, "KUBE-FIREWALL", ""), "KUBE-S") ||
				strings.Contains(rules, "table ip kube-proxy")
			if found != runs {
				return fmt.Errorf("%v:\n%s", found, rules)
			}
			return nil
		})
		k.mu.Lock()
		cleaned := k.cleaned[n.Name]
		k.mu.Unlock()
		if !cleaned {
			t.Errorf("kube-proxy --cleanup has not run on %s", n.Name)
		}
	}
	left, err := k.l.Kube().CoreV1().Nodes().List(t.Context(), metav1.ListOptions{LabelSelector: "landfall.dev/migrated"})
	if err != nil || len(left.Items) > 0 {
		t.Errorf("labels on Nodes: %v %v", left.Items, err)
	}
}

// leaveToHelm takes away Landfall's workloads, and gives what else the lab has installed to the release
// that helm is to make. The definitions stay as somebody has applied them by hand.
func leaveToHelm(t *testing.T, l *lab.Lab) {
	t.Helper()
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		"meta.helm.sh/release-name": "landfall", "meta.helm.sh/release-namespace": lab.Namespace}}})
	if err != nil {
		t.Fatal(err)
	}
	given := 0
	eachOfLandfall(t, l, func(kind string, client dynamic.ResourceInterface, name string) error {
		switch kind {
		case "DaemonSet", "Deployment":
			return client.Delete(t.Context(), name, metav1.DeleteOptions{})
		case "CustomResourceDefinition":
			return nil
		}
		given++
		_, err := client.Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
		return err
	})
	if given < 8 {
		t.Fatalf("gave %d objects to helm", given)
	}
}

// eachOfLandfall calls f with each object that the chart makes.
func eachOfLandfall(t *testing.T, l *lab.Lab, f func(kind string, client dynamic.ResourceInterface, name string) error) {
	t.Helper()
	lists, err := l.Kube().Discovery().ServerPreferredResources()
	if err != nil {
		t.Fatal(err)
	}
	lists = discovery.FilteredBy(discovery.SupportsAllVerbs{Verbs: []string{"list", "patch"}}, lists)
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list.APIResources {
			client := l.Dynamic().Resource(gv.WithResource(r.Name))
			found, err := client.List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=landfall"})
			if err != nil {
				t.Fatalf("%s: %v", r.Name, err)
			}
			for _, o := range found.Items {
				one := dynamic.ResourceInterface(client)
				if r.Namespaced {
					one = client.Namespace(o.GetNamespace())
				}
				if err := f(r.Kind, one, o.GetName()); err != nil {
					t.Fatalf("%s %s: %v", r.Kind, o.GetName(), err)
				}
			}
		}
	}
}

// wantDefinitionsOf fails the test unless the custom resource definitions belong to a release.
func wantDefinitionsOf(t *testing.T, l *lab.Lab, release string) {
	t.Helper()
	eventually(t, "helm has the definitions", func() error {
		return definitionsOf(t.Context(), l, release)
	})
}

func definitionsOf(ctx context.Context, l *lab.Lab, release string) error {
	list, err := l.Dynamic().Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
		Resource: "customresourcedefinitions"}).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	found := 0
	for i := range list.Items {
		o, err := meta.Accessor(&list.Items[i])
		if err != nil {
			return err
		}
		if !strings.HasSuffix(o.GetName(), ".landfall.dev") {
			continue
		}
		found++
		if got := o.GetAnnotations()["meta.helm.sh/release-name"]; got != release {
			return fmt.Errorf("%s is of the release %q", o.GetName(), got)
		}
	}
	if found == 0 {
		return errors.New("there are none")
	}
	return nil
}
