package migrate

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// tenantsPrograms are what a tenant can create in a namespace of his own.
const tenantsPrograms = `---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: speaker, namespace: tenant, labels: {app: metallb, component: speaker}, ownerReferences: [
  {kind: Thing, name: mine, controller: true}]}
spec: {selector: {matchLabels: {x: y}}, template: {spec: {nodeSelector: {no-such: label}, containers: [
  {name: frr, args: [--lb-class=tenant.example/x, --frrk8s-namespace=tenant]}]}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: controller, namespace: tenant, labels: {app: metallb, component: controller}}
spec: {selector: {matchLabels: {x: y}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: frr, namespace: tenant-b, labels: {app: frr-k8s}}
spec: {selector: {matchLabels: {x: y}}}
`

// Every tenant can label workloads as MetalLB's are. Only those in MetalLB's namespace decide what a plan is.
func TestPlanBelievesMetalLBsNamespace(t *testing.T) {
	const ad = pool + "---\n{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: a, namespace: m}}\n"
	p := plan(t, ad+tenantsPrograms, cidr, Choices{})
	wantSaid(t, "blockers", p.Blockers)
	var workloads []string
	for _, w := range append(p.Controllers, p.Speakers...) {
		workloads = append(workloads, w.String())
	}
	want := []string{"Deployment m/metallb-controller", "DaemonSet m/metallb-speaker"}
	if diff := cmp.Diff(want, workloads); diff != "" {
		t.Errorf("MetalLB's workloads (-want +got):\n%s", diff)
	}
	if class := p.Values["loadBalancerClass"]; class != "lb.example/metallb" {
		t.Errorf("the class is %v", class)
	}
	edge := []any{map[string]any{"matchLabels": map[string]any{"edge": "yes"}}}
	if diff := cmp.Diff(edge, normal(p.Announcing()[0].Spec["nodeSelectors"])); diff != "" {
		t.Errorf("the advertisement is for the nodes (-want +got):\n%s", diff)
	}
	notes := strings.Join(p.Notes, "\n")
	if want := "workloads in tenant, tenant-b have the labels of MetalLB's programs"; !strings.Contains(notes, want) {
		t.Errorf("no %q in the notes:\n%s", want, notes)
	}

	p = plan(t, ad+tenantsPrograms, cidr, Choices{MetalLBNamespace: "other"})
	blockers := strings.Join(p.Blockers, "\n")
	if want := "is not found in the namespace other by their labels"; !strings.Contains(blockers, want) ||
		!strings.Contains(blockers, "workloads in m, tenant, tenant-b") {
		t.Errorf("no %q and who else in the blockers:\n%s", want, blockers)
	}
	if gone := p.Gone(); !strings.Contains(gone, "in the namespace other") {
		t.Errorf("nothing to go back to: %q", gone)
	}
}

// frr-k8s may be in another namespace than MetalLB, as in OpenShift: MetalLB's speaker knows in which.
func TestPlanFindsFRRK8s(t *testing.T) {
	const frr = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: frr-k8s, namespace: NAMESPACE, labels: {app: frr-k8s}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: speaker, namespace: m, labels: {app: metallb, component: speaker}}
spec: {template: {spec: {containers: [SPEAKER]}}}
`
	for speaker, namespace := range map[string]string{
		"{args: []}": "m", "{args: [--frrk8s-namespace=openshift-frr-k8s]}": "openshift-frr-k8s",
		"{env: [{name: FRRK8S_NAMESPACE, value: frr-k8s-system}]}":                                  "frr-k8s-system",
		"{env: [{name: FRRK8S_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}]}": "m",
	} {
		for _, at := range []string{"m", "openshift-frr-k8s", "frr-k8s-system", "tenant"} {
			yaml := strings.NewReplacer("NAMESPACE", at, "SPEAKER", speaker).Replace(frr)
			objects, err := Decode(strings.NewReader(yaml))
			if err != nil {
				t.Fatal(err)
			}
			p := PlanMetalLB(objects, nil, Choices{MetalLBNamespace: "m"})
			if found := len(p.Speakers) == 2; found != (at == namespace || at == "m") {
				t.Errorf("speaker %s, frr-k8s in %s: %v", speaker, at, p.Speakers)
			}
		}
	}
}

func TestMetalLBNamespace(t *testing.T) {
	in := func(kind, group, namespace string) Object {
		return Object{APIVersion: group + "/v1beta1", Kind: kind, Metadata: Metadata{Name: "a", Namespace: namespace}}
	}
	own, frr := in("IPAddressPool", "metallb.io", "lb"), in("FRRConfiguration", "frrk8s.metallb.io", "frr")
	tenants := in("L2Advertisement", "metallb.io", "tenant")
	for name, test := range map[string]struct {
		objects     []Object
		named, want string
		err         string
	}{
		"that of its objects":    {[]Object{own, frr, own}, "", "lb", ""},
		"without objects":        {[]Object{frr}, "", "metallb-system", ""},
		"beside what it reports": {[]Object{own, in("ServiceL2Status", "metallb.io", "tenant")}, "", "lb", ""},
		"as the user says":       {[]Object{own, tenants}, "lb", "lb", ""},
		"without objects, named": {nil, "lb", "lb", ""},
		"of several": {[]Object{tenants, own}, "", "",
			"in the namespaces lb, tenant, and MetalLB reads only those in its own: name it with --metallb-namespace"},
	} {
		got, err := MetalLBNamespace(test.objects, test.named)
		if got != test.want || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}

// MetalLB does not read objects in other namespaces than its own, so nobody announces by them.
func TestPlanLeavesOutObjectsOfOtherNamespaces(t *testing.T) {
	p := plan(t, pool+`---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: theirs, namespace: tenant}
spec: {addresses: [198.51.100.0/24]}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: bgpextras, namespace: tenant}, data: {extras: x}}
`, cidr, Choices{})
	wantSaid(t, "blockers", p.Blockers)
	if pools := p.Pools(); len(pools) != 1 || pools[0].Metadata.Name != "p" {
		t.Errorf("pools %v", pools)
	}
	notes := strings.Join(p.Notes, "\n")
	if !strings.Contains(notes, "objects of MetalLB's kinds in tenant are left out") {
		t.Errorf("notes:\n%s", notes)
	}
}
