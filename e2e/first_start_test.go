package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// A cluster without a service proxy: pods know the API server by the address of its Service, which
// nobody delivers before Landfall's own proxy has read the Service. They find it all the same.
func TestFirstStartWithoutAServiceProxy(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	service := []string{"KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443"} // as the kubelet sets it
	master := cluster.Master().Addr.String() + ":6443"
	l := labtest.Start(t, cluster, lab.Options{
		Values: map[string]any{"kubernetesServiceHost": "", "apiServers": []string{master},
			"node": map[string]any{"separatePods": true}}, // which share no more than the feed
		Env: map[string][]string{"proxy": service, "speaker": service, "controller": service},
	})
	if err := l.ApplyYAML(t.Context(), poolAndAdvertisement); err != nil {
		t.Fatal(err)
	}
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	wantFoundByHelm(t, l, master)
}

// wantFoundByHelm looks at what helm finds in a cluster that kubeadm made, where the administrator
// has not said it.
func wantFoundByHelm(t *testing.T, l *lab.Lab, master string) {
	t.Helper()
	const podSubnet = "10.244.0.0/16"
	_, err := l.Kube().CoreV1().ConfigMaps("kube-system").Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "kubeadm-config"},
		Data:       map[string]string{"ClusterConfiguration": "networking:\n  podSubnet: " + podSubnet + "\n"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	helm, err := lab.Tool(t.Context(), repository, "helm", func(line string) { t.Log(line) })
	if err != nil {
		t.Fatal(err)
	}
	// Another release than that of the lab, whose objects helm would not take over.
	run := func(verb string, args ...string) (string, error) {
		return l.Exec(t.Context(), l.Cluster().Master().Name, append([]string{helm, verb, "second",
			repository + "/charts/landfall", "--namespace", lab.Namespace, "--set", "crds.enabled=false",
			"--kubeconfig", l.Kubeconfig(), "--dry-run=server"}, args...)...)
	}
	rendered, err := run("template", "--kube-version", "v1.35.4", "--show-only", "templates/node.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set appsv1.DaemonSet
	if err := yaml.Unmarshal([]byte(rendered), &set); err != nil {
		t.Fatal(err)
	}
	wantSecretsNamed(t, l, run)
	wantObstaclesNamed(t, l, run)
	for _, c := range set.Spec.Template.Spec.Containers {
		want := []string{"--api-servers=" + master}
		if c.Name == "proxy" {
			want = append(want, "--cluster-cidr="+podSubnet)
		}
		for _, arg := range want {
			if !slices.Contains(c.Args, arg) {
				t.Errorf("%s: helm has not found %s: %s", c.Name, arg, strings.Join(c.Args, " "))
			}
		}
	}
}

// wantSecretsNamed has helm find BGPPeers with passwords in Secrets that speaker.bgpSecrets lacks:
// it says so, and takes none away that speakers read.
func wantSecretsNamed(t *testing.T, l *lab.Lab, run func(verb string, args ...string) (string, error)) {
	t.Helper()
	for _, name := range []string{"tor", "far"} {
		if err := l.ApplyYAML(t.Context(), `{apiVersion: landfall.dev/v1beta1, kind: BGPPeer, metadata: {name: `+name+`},
  spec: {myASN: 64500, peerASN: 64501, peerAddress: 192.0.2.1, passwordSecret: {name: `+name+`}}}`); err != nil {
			t.Fatal(err)
		}
	}
	want := func(err error, out string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if err != nil || !strings.Contains(out, part) {
				t.Errorf("helm does not say %q: %v: %s", part, err, out[strings.Index(out, "NOTES")+1:])
			}
		}
	}
	out, err := run("install")
	want(err, out, "Secrets that speakers may not read: far, tor.", "--set 'speaker.bgpSecrets={far,tor}'")
	// An earlier release let speakers read one of them.
	role := &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "second-landfall-speaker", Namespace: lab.Namespace,
			Labels: map[string]string{"app.kubernetes.io/managed-by": "Helm"},
			Annotations: map[string]string{"meta.helm.sh/release-name": "second",
				"meta.helm.sh/release-namespace": lab.Namespace}},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets"},
			ResourceNames: []string{"tor", "unused"}, Verbs: []string{"list", "watch"}}},
	}
	if _, err := l.Kube().RbacV1().Roles(lab.Namespace).Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	refusal := "it installs"
	if _, err := run("install"); err != nil {
		refusal = err.Error()
	}
	want(nil, refusal, "speaker.bgpSecrets lacks tor:", "--set 'speaker.bgpSecrets={far,tor}'")
	out, err = run("install", "--set", "speaker.bgpSecrets={tor}")
	want(err, out, "Secrets that speakers may not read: far.", "--set 'speaker.bgpSecrets={far,tor}'")
	if out, err = run("install", "--set", "speaker.bgpSecrets={far,tor}"); err != nil ||
		strings.Contains(out, "may not read") {
		t.Errorf("all Secrets are named: %v: %s", err, out)
	}
}

// wantObstaclesNamed has helm find other load balancers, and that no Node may announce.
func wantObstaclesNamed(t *testing.T, l *lab.Lab, run func(verb string, args ...string) (string, error)) {
	t.Helper()
	const set = `{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: %s, namespace: default, labels: %s},
  spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}},
    spec: {containers: [{name: c, image: c}]}}}}`
	for name, labels := range map[string]string{"svclb-web": "{svccontroller.k3s.cattle.io/svcname: web}",
		"speaker": "{app.kubernetes.io/name: metallb}", "other": "{app: other}"} {
		if err := l.ApplyYAML(t.Context(), fmt.Sprintf(set, name, labels)); err != nil {
			t.Fatal(err)
		}
	}
	notes := func(args ...string) string {
		t.Helper()
		out, err := run("install", append(args, "--set", "speaker.bgpSecrets={far,tor}")...)
		if err != nil {
			t.Fatal(err)
		}
		_, notes, _ := strings.Cut(out, "\nNOTES:")
		return notes
	}
	const excludeLabel = "node.kubernetes.io/exclude-from-external-load-balancers"
	const rivals, excluded = "Another load balancer is at work", "Every node of the cluster has the label"
	if out := notes(); !strings.Contains(out, "ServiceLB of k3s (DaemonSet default/svclb-web)") ||
		!strings.Contains(out, "MetalLB (DaemonSet default/speaker)") || strings.Contains(out, "default/other") ||
		strings.Contains(out, excluded) {
		t.Errorf("helm says %s", out)
	}
	label := []byte(`{"metadata":{"labels":{"` + excludeLabel + `":""}}}`)
	for _, node := range l.Cluster().Nodes {
		_, err := l.Kube().CoreV1().Nodes().Patch(t.Context(), node.Name, types.MergePatchType, label, metav1.PatchOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	if out := notes("--set", "loadBalancerClass=example.com/x"); !strings.Contains(out, excluded) ||
		strings.Contains(out, rivals) {
		t.Errorf("helm says %s", out)
	}
	if out := notes("--set", "speaker.ignoreExcludeLB=true"); strings.Contains(out, excluded) {
		t.Errorf("helm says %s", out)
	}
	wantFindings(t, l)
}

// wantFindings has speaker and proxy tell, of a node, what keeps it from delivering.
func wantFindings(t *testing.T, l *lab.Lab) {
	t.Helper()
	node := l.Cluster().Nodes[1].Name
	mustExec(t, l, node, "sysctl", "-w", "net.ipv4.ip_forward=0")
	excluded := "Node " + node + ": " + node + " announces no address, and neither does any other node"
	for program, want := range map[string][2]string{
		"speaker": {"NodeExcluded", "neither does any other node"},
		"proxy":   {"ForwardingOff", node + " has net.ipv4.ip_forward=0"},
	} {
		eventually(t, "an Event of the "+program+", and its status", func() error {
			events, err := l.Kube().CoreV1().Events("").List(t.Context(), metav1.ListOptions{
				FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + node + ",reason=" + want[0] + ",type=Warning"})
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(events.Items, func(e corev1.Event) bool { return strings.Contains(e.Message, want[1]) }) {
				return fmt.Errorf("no Event with %q among %v", want[1], events.Items)
			}
			status, err := l.Agent(program, node).Run(t.Context(), "status")
			if err == nil && !strings.Contains(status, want[1]) {
				err = fmt.Errorf("the status does not have %q", want[1])
			}
			return err
		})
	}
	// landfallctl ends with an error, as there are problems.
	_, err := l.Exec(t.Context(), l.Cluster().Master().Name, filepath.Join(programFolder(t), "landfallctl"), "status",
		"--kubeconfig="+l.Kubeconfig())
	if err == nil || !strings.Contains(err.Error(), excluded) {
		t.Errorf("landfallctl status lacks %q: %v", excluded, err)
	}
	mustExec(t, l, node, "sysctl", "-w", "net.ipv4.ip_forward=1")
	eventually(t, "the proxy no longer finds it", func() error {
		status, err := l.Agent("proxy", node).Run(t.Context(), "status")
		if err == nil && strings.Contains(status, "ForwardingOff") {
			err = errors.New("it does")
		}
		return err
	})
}
