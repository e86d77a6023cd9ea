package migrate

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// decodeOne reads an object in YAML.
func decodeOne(t *testing.T, text string) Object {
	t.Helper()
	objects, err := Decode(strings.NewReader(text))
	if err != nil || len(objects) != 1 {
		t.Fatalf("%v %v", objects, err)
	}
	return objects[0]
}

// Who would undo in the middle what a migration does is named, and stops it until it is paused.
func TestKeeper(t *testing.T) {
	for metadata, want := range map[string]string{
		"": "",
		"ownerReferences: [{kind: MetalLB, name: metallb, controller: true}]":                 "the controller of MetalLB metallb",
		"ownerReferences: [{kind: MetalLB, name: metallb}]":                                   "",
		"annotations: {argocd.argoproj.io/tracking-id: 'apps:apps/DaemonSet:m/speaker'}":      "Argo CD (apps)",
		"labels: {argocd.argoproj.io/instance: apps}":                                         "Argo CD (apps)",
		"labels: {kustomize.toolkit.fluxcd.io/name: infra}":                                   "Flux (infra)",
		"labels: {helm.toolkit.fluxcd.io/name: metallb}":                                      "Flux (metallb)",
		"annotations: {objectset.rio.cattle.io/id: metallb-agent}":                            "Rancher (metallb-agent)",
		"labels: {addonmanager.kubernetes.io/mode: Reconcile}":                                "the add-on manager",
		"labels: {app.kubernetes.io/managed-by: Helm, app.kubernetes.io/instance: metallb}":   "",
		"labels: {addonmanager.kubernetes.io/mode: EnsureExists}, annotations: {other: text}": "",
	} {
		o := decodeOne(t, "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: speaker, "+metadata+"}}")
		if got := Keeper(o); got != want {
			t.Errorf("%s: got %q, want %q", metadata, got, want)
		}
		w := NewWorkload(o)
		if got := Paused([]Workload{w}, Choices{}); (got != "") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("%s: said %q", metadata, got)
		}
		if got := Paused([]Workload{w}, Choices{KeepersPaused: true}); got != "" {
			t.Errorf("%s: paused, and said %q", metadata, got)
		}
	}
}

// Passwords in raw configuration of FRR do not get into a plan, which is shown to others.
func TestPlanShowsNoPasswords(t *testing.T) {
	c := Convert([]Object{decodeOne(t, `{apiVersion: v1, kind: ConfigMap, metadata: {name: bgpextras, namespace: m}, data:
		{extras: "router bgp 64512\n neighbor 10.0.0.1 password hunter2\n neighbor 10.0.0.2 PASSWORD 8 hunter2\nkey chain c\n
		 key 1\n key-string hunter2\n"}}`)})
	if len(c.Losses) != 1 || strings.Contains(c.Losses[0], "hunter2") || !strings.Contains(c.Losses[0], "router bgp 64512") {
		t.Errorf("%q", c.Losses)
	}
}

// Talos starts kube-proxy with flags alone.
func TestKubeProxyFlags(t *testing.T) {
	set := func(command string) Workload {
		return NewWorkload(decodeOne(t, "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: kube-proxy}, spec: {template: "+
			"{spec: {containers: [{command: ["+command+"]}]}}}}"))
	}
	config, ok := KubeProxyFlags(set(`/usr/local/bin/kube-proxy, --cluster-cidr=10.244.0.0/16, --conntrack-max-per-core=0,
		--hostname-override=$(NODE_NAME), --kubeconfig=/etc/kubernetes/kubeconfig, --proxy-mode=nftables, --masquerade-all,
		"--nodeport-addresses=10.0.0.0/8,fd00::/8", --iptables-masquerade-bit=13, --no-such=1`))
	want := map[string]any{"clusterCIDR": "10.244.0.0/16", "mode": "nftables", "hostnameOverride": "$(NODE_NAME)",
		"conntrack": map[string]any{"maxPerCore": 0.0}, "nftables": map[string]any{"masqueradeAll": true},
		"nodePortAddresses": []any{"10.0.0.0/8", "fd00::/8"}, "iptables": map[string]any{"masqueradeBit": 13.0},
		"--no-such": "1"}
	if diff := cmp.Diff(want, config); !ok || diff != "" {
		t.Errorf("%v (-want +got):\n%s", ok, diff)
	}
	k := PlanKubeProxy(config, set(""), Choices{})
	if len(k.Blockers) > 0 || len(k.Unknown) != 1 || k.Unknown[0] != "--no-such" || k.Mode != "nftables" {
		t.Errorf("%+v", k)
	}
	if _, ok := KubeProxyFlags(set("kube-proxy, --config=/var/lib/kube-proxy/config.conf")); ok {
		t.Error("the name of a file was read as its content")
	}
	// Every flag leads to a field that is known.
	for flag, field := range fieldOfFlag {
		if ruleFor(strings.Replace(field, "SECTION", "nftables", 1)) == nil {
			t.Errorf("--%s: no field %s", flag, field)
		}
	}
}

// Without a pod network Landfall's proxy does not start, and the takeover would wait for it in vain.
func TestTakeoverNeedsThePodNetwork(t *testing.T) {
	for _, c := range []struct {
		config  map[string]any
		choices Choices
		blocked bool
	}{
		{config: map[string]any{}, blocked: true},
		{config: map[string]any{"detectLocalMode": "ClusterCIDR"}, blocked: true},
		{config: map[string]any{"clusterCIDR": "10.244.0.0/16"}},
		{config: map[string]any{"detectLocalMode": "InterfaceNamePrefix"}},
		{config: map[string]any{}, choices: Choices{ClusterCIDR: "10.244.0.0/16"}},
	} {
		k := PlanKubeProxy(c.config, Workload{}, c.choices)
		if (len(k.Blockers) > 0) != c.blocked {
			t.Errorf("%v: %v", c.config, k.Blockers)
		}
		if c.choices.ClusterCIDR != "" && dig(k.Values, "proxy", "clusterCIDR") != c.choices.ClusterCIDR {
			t.Errorf("values %v", k.Values)
		}
	}
}

// Distributions without a DaemonSet of kube-proxy are named.
func TestKubeProxyElsewhere(t *testing.T) {
	for version, want := range map[string]string{"v1.33.1+k3s1": "k3s.md", "v1.33.1+rke2r1": "rke2.md", "v1.33.1": ""} {
		node := decodeOne(t, "{apiVersion: v1, kind: Node, metadata: {name: n}, status: {nodeInfo: {kubeletVersion: "+version+"}}}")
		if got := Elsewhere([]Object{node}); (got != "") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q", version, got)
		}
	}
}
