package migrate

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

const metallbPrograms = `---
apiVersion: apps/v1
kind: Deployment
metadata: {name: metallb-controller, namespace: m, labels: {app.kubernetes.io/name: metallb, app.kubernetes.io/component: controller}}
spec: {selector: {matchLabels: {a: b}}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: metallb-speaker, namespace: m, labels: {app.kubernetes.io/name: metallb, app.kubernetes.io/component: speaker}}
spec: {selector: {matchLabels: {c: d}}, template: {spec: {nodeSelector: {edge: "yes", kubernetes.io/os: linux}, containers: [
  {args: [--lb-class=lb.example/metallb, --ignore-exclude-lb]}]}}}
---
{apiVersion: v1, kind: Node, metadata: {name: n1, labels: {kubernetes.io/hostname: h1}}, status: {addresses: [{address: 192.0.2.7}, {address: n1}]}}
`

// plan plans with MetalLB's programs, and with its namespace m unless the choices name another.
func plan(t *testing.T, yaml string, proxy map[string]any, c Choices) Plan {
	t.Helper()
	objects, err := Decode(strings.NewReader(metallbPrograms + yaml))
	if err != nil {
		t.Fatal(err)
	}
	if c.Namespace = "landfall-system"; c.MetalLBNamespace == "" {
		c.MetalLBNamespace = "m"
	}
	return PlanMetalLB(objects, proxy, c)
}

const pool = "---\n{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: p, namespace: m}, " +
	"spec: {addresses: [192.0.2.0/24]}}\n"

var cidr = map[string]any{"clusterCIDR": "10.0.0.0/8"}

// wantSaid fails the test unless each text is in one of the lines, and there are no other lines.
func wantSaid(t *testing.T, what string, lines []string, texts ...string) {
	t.Helper()
	if len(lines) != len(texts) {
		t.Errorf("%s: %q, want %q", what, lines, texts)
		return
	}
	for i, text := range texts {
		if !strings.Contains(lines[i], text) {
			t.Errorf("%s: %q, want %q", what, lines[i], text)
		}
	}
}

// What cannot be taken over is named, and stops --apply until the user consents.
func TestPlanNamesLosses(t *testing.T) {
	const objects = pool + `---
{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: red, namespace: m}, spec: {myASN: 1, peerASN: 2, vrf: red}}
---
{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: main, namespace: m}, spec: {myASN: 1, peerASN: 2, vrf: ""}}
---
{apiVersion: metallb.io/v1beta1, kind: BFDProfile, metadata: {name: echo, namespace: m}, spec: {echoMode: true, echoInterval: 50, detectMultiplier: 3}}
---
{apiVersion: v1, kind: ConfigMap, metadata: {name: bgpextras, namespace: m}, data: {extras: "route-map X"}}
`
	p := plan(t, objects, cidr, Choices{})
	wantSaid(t, "losses", p.Losses, "BFDProfile echo: spec.echoMode",
		`m/bgpextras is not taken over: it has raw configuration of FRR, which Landfall does `+
			`not run: "route-map X"`)
	wantSaid(t, "blockers", p.Blockers, "--accept-losses")
	p = plan(t, objects, cidr, Choices{AcceptLosses: true})
	wantSaid(t, "blockers with consent", p.Blockers)
	var names []string
	for _, o := range p.Objects {
		names = append(names, o.Kind+" "+o.Metadata.Name)
	}
	want := []string{"IPAddressPool p", "BFDProfile echo", "BGPPeer main", "BGPPeer red"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]any{"detectMultiplier": 3.0}, normal(p.Objects[1].Spec)); diff != "" {
		t.Errorf("BFDProfile (-want +got):\n%s", diff)
	}
	if vrf := p.Objects[3].Spec["vrf"]; vrf != "red" {
		t.Errorf("the peer's VRF is %v", vrf)
	}
}

func TestPlanValues(t *testing.T) {
	const peers = pool + `---
{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: tor, namespace: m}, spec: {myASN: 1, peerASN: 2, passwordSecret: {name: s, namespace: other}}}
---
{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: a, namespace: m}}
`
	p := plan(t, peers, cidr, Choices{})
	wantSaid(t, "blockers", p.Blockers, "--copy-secrets")
	want := map[string]any{
		"loadBalancerClass": "lb.example/metallb",
		"speaker":           map[string]any{"ignoreExcludeLB": true, "bgpSecrets": []any{"s"}},
		"proxy":             map[string]any{"clusterCIDR": "10.0.0.0/8"},
	}
	if diff := cmp.Diff(want, p.Values); diff != "" {
		t.Errorf("values (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]SecretCopy{{"other", "s"}}, p.Secrets); diff != "" {
		t.Errorf("Secrets (-want +got):\n%s", diff)
	}
	if !p.NodeByNode {
		t.Error("speakers with BGP alone are swapped all at once")
	}
	p = plan(t, pool, nil, Choices{})
	wantSaid(t, "without a pod network", p.Blockers, "--cluster-cidr")
	p = plan(t, pool, nil, Choices{WithoutProxy: true})
	wantSaid(t, "without a proxy", p.Blockers)
	if diff := cmp.Diff(map[string]any{"enabled": false}, p.Values["proxy"]); diff != "" {
		t.Errorf("proxy (-want +got):\n%s", diff)
	}
	p = plan(t, pool, map[string]any{"detectLocalMode": "NodeCIDR"}, Choices{})
	wantSaid(t, "a mode that needs no pod network", p.Blockers)
}

// preferredNodeSelectors are taken as they are, and speakers stay on the nodes that MetalLB's had.
func TestPlanL2(t *testing.T) {
	const objects = pool + `---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: a, namespace: m, annotations: {landfall.dev/migration-undo: '{"spec":{"nodeSelectors":null}}'}}
spec:
  nodeSelectors: [{matchLabels: {landfall.dev/migrated: never}}]
  preferredNodeSelectors:
  - {weight: 7, preference: {matchLabels: {rack: a}}}
---
apiVersion: metallb.io/v1beta1
kind: ServiceL2Status
metadata: {name: l2-1, namespace: m}
status: {node: n1, serviceName: web, serviceNamespace: shop, interfaces: [{name: eth1}]}
---
apiVersion: metallb.io/v1beta1
kind: ServiceL2Status
metadata: {name: l2-0, namespace: m, labels: {metallb.io/node: n2, metallb.io/service-name: web,
  metallb.io/service-namespace: shop}}
---
{apiVersion: v1, kind: Node, metadata: {name: n2, labels: {kubernetes.io/hostname: h2}}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {type: LoadBalancer, loadBalancerClass: lb.example/metallb}
status: {loadBalancer: {ingress: [{ip: 192.0.2.9}]}}
---
apiVersion: v1
kind: Service
metadata: {name: others, namespace: shop}
spec: {type: LoadBalancer}
status: {loadBalancer: {ingress: [{ip: 192.0.2.10}]}}
`
	p := plan(t, objects, cidr, Choices{})
	wantSaid(t, "blockers", p.Blockers)
	edge := map[string]any{"matchLabels": map[string]any{"edge": "yes"}}
	prefer := map[string]any{"weight": 7.0, "nodeSelector": map[string]any{"matchLabels": map[string]any{"rack": "a"}}}
	want := map[string]any{"nodeSelectors": []any{edge}, "preferredNodes": []any{prefer}}
	if diff := cmp.Diff(want, normal(p.Announcing()[0].Spec)); diff != "" {
		t.Errorf("the advertisement, as it was before an interrupted run (-want +got):\n%s", diff)
	}
	if len(p.Held) != 1 || len(p.Pins) != 1 || p.Pins[0].Hostname != "h1" {
		t.Errorf("held %v, pins %v", p.Held, p.Pins)
	}
	pinned := p.Temporary()
	if len(pinned) != 1 {
		t.Fatalf("temporary advertisements: %v", pinned)
	}
	owner := []any{map[string]any{"matchLabels": map[string]any{LabelOwner: "h1"}}}
	if diff := cmp.Diff(owner, normal(pinned[0].Spec["serviceSelectors"])); diff != "" {
		t.Errorf("the temporary advertisement is for (-want +got):\n%s", diff)
	}
	if preferred, _ := pinned[0].Spec["preferredNodes"].([]any); len(preferred) != 11 {
		t.Errorf("it prefers %v", preferred)
	}
	if p.NodeByNode {
		t.Error("addresses on Layer 2 are swapped node by node")
	}
}

// Every tenant can give Services the label with which a run that was interrupted keeps them on their nodes. It
// counts on those that MetalLB serves, and with the name of a node: each value costs time in which nobody announces.
func TestPlanPinsNoServiceForItsLabel(t *testing.T) {
	const ad = pool + "---\n{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: a, namespace: m}}\n"
	service := func(name, owner, kind, address string) string {
		return fmt.Sprintf("---\n{apiVersion: v1, kind: Service, metadata: {name: %s, namespace: shop, labels: {%s: %s}}, "+
			"spec: {type: %s, loadBalancerClass: lb.example/metallb}, status: {loadBalancer: {ingress: [%s]}}}\n",
			name, LabelOwner, owner, kind, address)
	}
	p := plan(t, ad+service("pinned", "h1", "LoadBalancer", "{ip: 192.0.2.1}")+service("waits", "h1", "LoadBalancer", "")+
		service("internal", "h2", "ClusterIP", "")+service("elsewhere", "h3", "LoadBalancer", "{ip: 192.0.2.2}"),
		cidr, Choices{})
	want := []Pin{{Service: lb.Key{Namespace: "shop", Name: "pinned"}, Hostname: "h1"}}
	if diff := cmp.Diff(want, p.Pins); diff != "" {
		t.Errorf("pins (-want +got):\n%s", diff)
	}
	if pinned := p.Temporary(); len(pinned) != 1 {
		t.Errorf("%d advertisements for one node", len(pinned))
	}
}

// Landfall answers for addresses outside the nodes' subnets only on interfaces that are named:
// MetalLB says which it answers on.
func TestPlanNamesInterfaces(t *testing.T) {
	const far = `---
{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: far, namespace: m}, spec: {addresses: [203.0.113.0/24]}}
---
{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: a, namespace: m}}
---
{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: b, namespace: m}, spec: {interfaces: [eth0]}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {type: LoadBalancer, loadBalancerClass: lb.example/metallb}, status: {loadBalancer: {ingress: [{ip: 203.0.113.9}]}}}
`
	const status = `---
{apiVersion: metallb.io/v1beta1, kind: ServiceL2Status, metadata: {name: l2-1, namespace: m}, status: {node: n1, serviceName: web, serviceNamespace: shop, interfaces: [{name: eth2}, {name: eth1}]}}
`
	p := plan(t, far, cidr, Choices{})
	wantSaid(t, "blockers", p.Blockers, "give --l2-interfaces")
	for name, test := range map[string]struct {
		objects string
		choices Choices
		want    []any
	}{
		"as MetalLB says":  {far + status, Choices{}, []any{"eth1", "eth2"}},
		"as the user says": {far + status, Choices{Interfaces: []string{"bond0"}}, []any{"bond0"}},
	} {
		p := plan(t, test.objects, cidr, test.choices)
		wantSaid(t, name, p.Blockers)
		ads := p.Announcing()
		if diff := cmp.Diff(test.want, ads[0].Spec["interfaces"]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff([]any{"eth0"}, ads[1].Spec["interfaces"]); diff != "" {
			t.Errorf("%s: an advertisement that names its own (-want +got):\n%s", name, diff)
		}
	}
}

// An address that is announced over BGP alone asks for no interfaces.
func TestPlanNamesNoInterfacesForBGP(t *testing.T) {
	const both = `---
{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: lan, namespace: m, labels: {on: lan}}, spec: {addresses: [10.0.0.200-10.0.0.210]}}
---
{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: routed, namespace: m}, spec: {addresses: [203.0.113.0/24]}}
---
{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: b, namespace: m}, spec: {ipAddressPools: [routed]}}
---
{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, spec: {type: LoadBalancer, loadBalancerClass: lb.example/metallb}, status: {loadBalancer: {ingress: [{ip: 203.0.113.9}]}}}
---
{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: a, namespace: m}, spec: `
	for name, test := range map[string]struct {
		spec string
		want string // the blocker
	}{
		"by name":       {"{ipAddressPools: [lan]}}", ""},
		"by label":      {"{ipAddressPoolSelectors: [{matchLabels: {on: lan}}]}}", ""},
		"of all pools":  {"{}}", "give --l2-interfaces"},
		"of the other":  {"{ipAddressPools: [lan, routed]}}", "give --l2-interfaces"},
		"of every pool": {"{ipAddressPoolSelectors: [{}]}}", "give --l2-interfaces"},
	} {
		p := plan(t, both+test.spec, cidr, Choices{})
		if test.want == "" {
			wantSaid(t, name, p.Blockers)
		} else {
			wantSaid(t, name, p.Blockers, test.want)
		}
	}
}

func TestPlanWithoutMetalLB(t *testing.T) {
	p := PlanMetalLB(nil, cidr, Choices{MetalLBNamespace: "metallb-system"})
	wantSaid(t, "blockers", p.Blockers, "MetalLB's controller (Deployment) or speaker (DaemonSet) is not found",
		"there are no objects")
}

// What a move over BGP does to established connections depends on whether Landfall's proxies are there,
// and on how many nodes they ask.
func TestNotesOfAMoveOverBGP(t *testing.T) {
	objects := []Object{
		decodeOne(t, "{apiVersion: metallb.io/v1beta1, kind: BGPAdvertisement, metadata: {name: a, namespace: m}}"),
		decodeOne(t, "{apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: a, namespace: m}, spec: {addresses: "+
			"[192.0.2.0/24]}}"),
	}
	said := func(nodes int, c Choices) string {
		all := slices.Clone(objects)
		for i := range nodes {
			all = append(all, decodeOne(t, fmt.Sprintf("{apiVersion: v1, kind: Node, metadata: {name: n%d}}", i)))
		}
		c.MetalLBNamespace = "m"
		p := PlanMetalLB(all, nil, c)
		return strings.Join(p.Notes, "\n")
	}
	for _, c := range []struct {
		nodes   int
		choices Choices
		breaks  bool
	}{{nodes: 17}, {nodes: 18, breaks: true}, {nodes: 3, choices: Choices{WithoutProxy: true}, breaks: true}} {
		if got := said(c.nodes, c.choices); strings.Contains(got, "break") != c.breaks {
			t.Errorf("%d nodes, %+v: %s", c.nodes, c.choices, got)
		}
	}
}

// FRR's BFD and Landfall's want the same ports.
func TestNoteOfFRR(t *testing.T) {
	for containers, noted := range map[string]bool{"{name: speaker}, {name: frr}": true, "{name: speaker}": false} {
		p := PlanMetalLB([]Object{decodeOne(t, "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: speaker, namespace: m, "+
			"labels: {app: metallb, component: speaker}}, spec: {template: {spec: {containers: ["+containers+"]}}}}")},
			nil, Choices{MetalLBNamespace: "m"})
		if got := strings.Join(p.Notes, "\n"); strings.Contains(got, "speaker.bfdNeighbors=0") != noted {
			t.Errorf("containers %s: %s", containers, got)
		}
	}
}
