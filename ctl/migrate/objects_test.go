package migrate

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const metallbObjects = `
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan, namespace: metallb-system, labels: {zone: a}}
spec:
  addresses: [172.26.236.180-172.26.236.199]
  avoidBuggyIPs: true
  serviceAllocation: {priority: 50, namespaces: [web], odd: 1}
  somethingNew: 7
---
apiVersion: v1
kind: List
items:
- apiVersion: metallb.io/v1beta1
  kind: L2Advertisement
  metadata: {name: lan, namespace: metallb-system}
  spec: {ipAddressPools: [lan], interfaces: [eth0]}
- apiVersion: v1
  kind: Service
  metadata: {name: stray, namespace: web}
  status: {loadBalancer: {ingress: [{ip: 10.0.0.9}]}}
- apiVersion: v1
  kind: Service
  metadata: {name: fine, namespace: web}
  status: {loadBalancer: {ingress: [{ip: 172.26.236.180}]}}
- apiVersion: metallb.io/v1beta1
  kind: ServiceL2Status
  metadata: {name: l2-x}
- apiVersion: metallb.io/v1beta1
  kind: AddressPool
  metadata: {name: old}
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan, namespace: other}
spec: {addresses: [10.1.0.0/24]}
`

func TestMigrate(t *testing.T) {
	objects, err := Decode(strings.NewReader(metallbObjects))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Convert(objects).Print(&out); err != nil {
		t.Fatal(err)
	}
	want := `# IPAddressPool lan: spec.serviceAllocation.odd (1) has no equivalent and is left out
# IPAddressPool lan: spec.somethingNew (7) has no equivalent and is left out
# IPAddressPool lan is in namespaces metallb-system and other; Landfall's objects are cluster-scoped, so only the first is converted: rename one
# AddressPool old has no equivalent
# Service web/stray holds 10.0.0.9, which no pool contains: it keeps the address, but no node will announce it
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata:
  labels:
    zone: a
  name: lan
spec:
  addresses:
  - 172.26.236.180-172.26.236.199
  avoidBuggyIPs: true
  serviceAllocation:
    namespaces:
    - web
    priority: 50
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata:
  name: lan
spec:
  interfaces:
  - eth0
  ipAddressPools:
  - lan
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestMigrateKeepsSharing sets spec.sharing only where Services of two namespaces share an address.
// A speaker reads only the Secrets that the chart's value names.
func TestMigrateNamesTheSecretsOfBGP(t *testing.T) {
	var all string
	for peer, secret := range map[string]string{"a": "tor", "b": "far", "c": "tor"} {
		all += "---\n{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: " + peer +
			"}, spec: {passwordSecret: {name: " + secret + ", namespace: metallb-system}}}\n"
	}
	all += "---\n{apiVersion: metallb.io/v1beta2, kind: BGPPeer, metadata: {name: open}, spec: {}}\n"
	objects, err := Decode(strings.NewReader(all))
	if err != nil {
		t.Fatal(err)
	}
	notes := Convert(objects).Notes
	if len(notes) != 1 || !strings.Contains(notes[0], "speaker.bgpSecrets={far,tor}") {
		t.Errorf("%q", notes)
	}
}

func TestMigrateKeepsSharing(t *testing.T) {
	const shared = `
apiVersion: v1
kind: List
items:
- {apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: across}, spec: {addresses: [10.0.0.0/24]}}
- {apiVersion: metallb.io/v1beta1, kind: IPAddressPool, metadata: {name: within}, spec: {addresses: [10.1.0.0/24]}}
- apiVersion: v1
  kind: Service
  metadata: {name: web, namespace: a, annotations: {metallb.universe.tf/allow-shared-ip: k}}
  status: {loadBalancer: {ingress: [{ip: 10.0.0.7}]}}
- apiVersion: v1
  kind: Service
  metadata: {name: dns, namespace: b, annotations: {metallb.io/allow-shared-ip: k}}
  status: {loadBalancer: {ingress: [{ip: 10.0.0.7}]}}
- apiVersion: v1
  kind: Service
  metadata: {name: one, namespace: a, annotations: {metallb.io/allow-shared-ip: q}}
  status: {loadBalancer: {ingress: [{ip: 10.1.0.1}]}}
- apiVersion: v1
  kind: Service
  metadata: {name: two, namespace: a, annotations: {metallb.io/allow-shared-ip: q}}
  status: {loadBalancer: {ingress: [{ip: 10.1.0.1}]}}
`
	objects, err := Decode(strings.NewReader(shared))
	if err != nil {
		t.Fatal(err)
	}
	m := Convert(objects)
	if got := []any{m.Objects[0].Spec["sharing"], m.Objects[1].Spec["sharing"]}; got[0] != "cluster" || got[1] != nil {
		t.Errorf("sharing of the pools: %v", got)
	}
	want := []string{"IPAddressPool across: Services of the namespaces a, b share 10.0.0.7, so spec.sharing is cluster: " +
		"everybody who knows a sharing key can join an address of this pool"}
	if diff := cmp.Diff(want, m.Notes); diff != "" {
		t.Errorf("notes (-want +got):\n%s", diff)
	}
}

// A session with disableMP carries what one without dualStackAddressFamily does.
func TestMigrateDisableMP(t *testing.T) {
	objects, err := Decode(strings.NewReader(`
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor}
spec: {myASN: 1, peerASN: 2, peerAddress: 192.0.2.1, disableMP: true, dualStackAddressFamily: true}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: plain}
spec: {myASN: 1, peerASN: 2, peerAddress: 192.0.2.2, disableMP: false, dualStackAddressFamily: true}
`))
	if err != nil {
		t.Fatal(err)
	}
	c := Convert(objects)
	if want := []string{"BGPPeer tor: spec.disableMP is left out, as Landfall has no such field and needs none: a session " +
		"carries routes of the family of its addresses only, unless dualStackAddressFamily is true; that contradicts " +
		"disableMP here, and is left out too"}; !slices.Equal(c.Notes, want) {
		t.Errorf("notes %q, want %q", c.Notes, want)
	}
	for _, o := range c.Objects {
		if _, has := o.Spec["disableMP"]; has || (o.Spec["dualStackAddressFamily"] == true) != (o.Metadata.Name == "plain") {
			t.Errorf("%s: %v", o.Metadata.Name, o.Spec)
		}
	}
}
