package e2e

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		Values: map[string]any{"kubernetesServiceHost": "", "apiServers": []string{master}},
		Env:    map[string][]string{"proxy": service, "speaker": service, "controller": service},
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
	rendered := mustExec(t, l, l.Cluster().Master().Name, helm, "template", "second",
		repository+"/charts/landfall", "--namespace", lab.Namespace, "--kube-version", "v1.35.4", "--set", "crds.enabled=false",
		"--kubeconfig", l.Kubeconfig(), "--dry-run=server", "--show-only", "templates/node.yaml")
	var set appsv1.DaemonSet
	if err := yaml.Unmarshal([]byte(rendered), &set); err != nil {
		t.Fatal(err)
	}
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
