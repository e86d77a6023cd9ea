package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// metallbKinds are the kinds that MetalLB serves, with the version that its own objects have.
var metallbKinds = map[string]string{
	"IPAddressPool": "v1beta1", "L2Advertisement": "v1beta1", "BGPAdvertisement": "v1beta1", "BGPPeer": "v1beta2",
	"BFDProfile":      "v1beta1",
	"ServiceL2Status": "v1beta1",
}

// metallbCRDs describes MetalLB's kinds as far as an API server needs it to store them: any content
// will do. The kind Community is left out, as in clusters with an older MetalLB.
func metallbCRDs() string {
	var all strings.Builder
	for _, kind := range slices.Sorted(maps.Keys(metallbKinds)) {
		plural := strings.ToLower(kind) + "s"
		if kind == "ServiceL2Status" {
			plural = "servicel2statuses"
		}
		fmt.Fprintf(&all, `---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[2]s.metallb.io}
spec:
  group: metallb.io
  scope: Namespaced
  names: {kind: %[1]s, plural: %[2]s}
  versions:
  - name: %[3]s
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`, kind, plural, metallbKinds[kind])
	}
	return all.String()
}

const metallbObjects = `---
apiVersion: v1
kind: Namespace
metadata: {name: metallb-system}
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan, namespace: metallb-system, labels: {zone: a}}
spec: {addresses: [172.26.236.180-172.26.236.199], avoidBuggyIPs: true}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: lan, namespace: metallb-system}
spec: {ipAddressPools: [lan]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor, namespace: metallb-system}
spec: {myASN: 64512, peerASN: 64513, peerAddress: 172.26.236.1, disableMP: true}
---
apiVersion: metallb.io/v1beta1
kind: ServiceL2Status
metadata: {name: l2-abcde, namespace: metallb-system}
`

// A cluster whose Services have addresses from MetalLB moves to Landfall's objects as
// docs/guide/migrate-metallb.md says, and no address changes.
func TestMigrationFromMetalLBKeepsAddresses(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Stopped: true})
	ctx := t.Context()
	if err := l.AddService(ctx, lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"one": "172.26.236.185", "my-nginx": "172.26.236.180", "three": "172.26.236.199"}
	for name, addr := range want {
		if name != "my-nginx" {
			createService(t, l, name, nil)
		}
		s, err := l.Kube().CoreV1().Services("default").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: addr}}
		if _, err := l.Kube().CoreV1().Services("default").UpdateStatus(ctx, s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	kept := func(when string) {
		t.Helper()
		held, err := holdings(ctx, l)
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(held, want) {
			t.Fatalf("%s: held %v, want %v", when, held, want)
		}
	}
	if err := l.ApplyYAML(ctx, metallbCRDs()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the API server serves MetalLB's kinds", func() error { return l.ApplyYAML(ctx, metallbObjects) })

	// 1. Translate.
	master := l.Cluster().Nodes[0].Name
	ctl := filepath.Join(programFolder(t), "landfallctl")
	out, err := l.Exec(ctx, master, ctl, "--kubeconfig", l.Kubeconfig(), "migrate", "metallb", "-o", "objects")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out, "# BGPPeer tor: spec.disableMP is left out, as Landfall has no such field") {
		t.Errorf("the output does not name what is left out:\n%s", out)
	}
	// 2. Install. The chart is there already, and nothing of it runs.
	if err := l.ApplyYAML(ctx, out); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	kept("before anything of Landfall runs")
	start := func(program string) {
		t.Helper()
		for _, a := range l.Agents(program) {
			if err := cmp.Or(a.Start()); err != nil {
				t.Fatal(err)
			}
		}
	}
	// The proxies, which are in the same pods as the speakers.
	start("proxy")
	// 3. The controller.
	start("controller")
	for _, name := range slices.Sorted(maps.Keys(want)) {
		wantCondition(t, l, name, "landfall.dev/Assigned", "True", "Assigned", want[name]+" from pool lan")
	}
	kept("with the controller")
	// 4. The speakers.
	start("speaker")
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", want["my-nginx"]+" is announced from")
	kept("with the speakers")
	// A newcomer gets what is free.
	createService(t, l, "new", nil)
	wantAddresses(t, l, "new", "172.26.236.181")
}
