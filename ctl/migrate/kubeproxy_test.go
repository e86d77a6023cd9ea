package migrate

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

// leaves returns the paths of all fields of a type of kube-proxy's.
func leaves(path string, t reflect.Type) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	// metav1.Duration and what other packages define below the rule for a section are single values.
	if t.Kind() != reflect.Struct || !strings.HasSuffix(t.PkgPath(), "kube-proxy/config/v1alpha1") {
		return []string{path}
	}
	var all []string
	for field := range t.Fields() {
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if options == "inline" && name == "" {
			continue // apiVersion and kind
		}
		all = append(all, leaves(strings.TrimPrefix(path+"."+name, "."), field.Type)...)
	}
	return all
}

// Every field of kube-proxy's configuration has a rule, and every rule a field: what a new version
// adds fails here.
func TestKubeProxyRulesAreComplete(t *testing.T) {
	fields := leaves("", reflect.TypeFor[v1alpha1.KubeProxyConfiguration]())
	if len(fields) < 35 {
		t.Fatalf("only %d fields: %v", len(fields), fields)
	}
	used := map[string]bool{}
	for _, field := range fields {
		r := ruleFor(field)
		if r == nil {
			t.Errorf("no rule for %s", field)
			continue
		}
		used[r.field] = true
		if r.why == "" {
			t.Errorf("%s: no reason", field)
		}
	}
	for _, r := range rules {
		if !used[r.field] {
			t.Errorf("the rule for %s is for no field", r.field)
		}
	}
}

func TestReadKubeProxy(t *testing.T) {
	for _, test := range []struct {
		name, config string
		values       string
		lines        []string // Field: Chart or the beginning of Why
		notes        []string
	}{
		{
			name: "as kubeadm writes it",
			config: `
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 0, kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 192.168.0.0/16
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: false, tcpEstablishedTimeout: null}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
healthzBindAddress: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, scheduler: "", strictARP: false}
mode: ""
nodePortAddresses: null
`,
			values: "proxy: {clusterCIDR: 192.168.0.0/16, masqueradeAll: false, conntrackTCPBeLiberal: false}",
			lines: []string{"bindAddress: not needed", "bindAddressHardFail: not needed", "clientConnection: not needed",
				"clusterCIDR: proxy.clusterCIDR", "conntrack.tcpBeLiberal: proxy.conntrackTCPBeLiberal",
				"iptables.masqueradeAll: proxy.masqueradeAll", "ipvs.strictARP: not needed"},
		},
		{
			name: "nftables",
			config: `{mode: nftables, detectLocalMode: BridgeInterface, detectLocal: {bridgeInterface: cni0},
				iptables: {masqueradeBit: 3}, nftables: {masqueradeBit: 7}, healthzBindAddress: "127.0.0.1:10256"}`,
			values: `proxy: {mode: nftables, detectLocalMode: BridgeInterface, podBridgeInterface: cni0, masqueradeBit: 7,
				nodePortAddresses: [primary], healthzBindAddress: "127.0.0.1:10256"}`,
			lines: []string{"detectLocal.bridgeInterface: proxy.podBridgeInterface", "detectLocalMode: proxy.detectLocalMode",
				"healthzBindAddress: proxy.healthzBindAddress", "iptables.masqueradeBit: not in use", "mode: mapped",
				"nftables.masqueradeBit: proxy.masqueradeBit"},
			notes: []string{"proxy.nodePortAddresses is [primary]"},
		},
		{
			name: "ipvs",
			config: `{mode: ipvs, clusterCIDR: "10.0.0.0/8", ipvs: {scheduler: sh, excludeCIDRs: [10.9.0.0/16]},
				iptables: {masqueradeBit: 3, localhostNodePorts: true}, nodePortAddresses: [10.0.0.0/8]}`,
			values: `proxy: {clusterCIDR: "10.0.0.0/8", scheduler: source-hash, masqueradeBit: 3,
				nodePortAddresses: [10.0.0.0/8]}`,
			lines: []string{"clusterCIDR: proxy.clusterCIDR", "iptables.localhostNodePorts: not in use",
				"iptables.masqueradeBit: proxy.masqueradeBit", "ipvs.excludeCIDRs: not needed", "ipvs.scheduler: mapped",
				"mode: mapped", "nodePortAddresses: proxy.nodePortAddresses"},
			notes: []string{"is source-hash", "kube-ipvs0"}, // nodes before Linux 5.13 could not run nftables mode
		},
		{
			name:   "a scheduler of IPVS that counts connections",
			config: `{mode: ipvs, ipvs: {scheduler: wlc}}`,
			values: "proxy: {scheduler: weighted-least-connections}",
			lines:  []string{"ipvs.scheduler: mapped", "mode: mapped"},
			notes:  []string{"IPVS' scheduler wlc is weighted-least-connections", "kube-ipvs0"},
		},
		{
			name:   "a scheduler of IPVS that only IPVS has",
			config: `{mode: ipvs, ipvs: {scheduler: lblc}}`,
			values: "{}", lines: []string{"ipvs.scheduler: mapped", "mode: mapped"},
			notes: []string{"lblc has no equivalent: Landfall picks a backend at random; set proxy.scheduler for the nearest, " +
				"destination-hash", "kube-ipvs0"},
		},
		{
			name:   "another scheduler of IPVS that only IPVS has",
			config: `{mode: ipvs, ipvs: {scheduler: twos}}`,
			values: "{}", lines: []string{"ipvs.scheduler: mapped", "mode: mapped"},
			notes: []string{"twos has no equivalent: Landfall picks a backend at random; set proxy.scheduler for the nearest, " +
				"weighted-least-connections", "kube-ipvs0"},
		},
		{
			name:   "a scheduler that nobody knows",
			config: `{mode: ipvs, ipvs: {scheduler: novel}}`,
			values: "{}", lines: []string{"ipvs.scheduler: mapped", "mode: mapped"},
			notes: []string{"novel has no equivalent: Landfall picks a backend at random", "kube-ipvs0"},
		},
		{
			name:   "userspace, of Kubernetes before 1.26",
			config: `{mode: userspace, clusterCIDR: "10.0.0.0/8", iptables: {masqueradeBit: 3}}`,
			values: `{proxy: {clusterCIDR: "10.0.0.0/8"}, relay: {enabled: true}}`,
			lines:  []string{"clusterCIDR: proxy.clusterCIDR", "iptables.masqueradeBit: not in use", "mode: mapped"},
			notes: []string{"in iptables mode, which relays TCP only. relay.enabled runs it, for Services that ask for it: " +
				"kubectl -n NAMESPACE annotate service NAME landfall.dev/relay=true", "round-robin for turns"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var config, want map[string]any
			if err := yaml.Unmarshal([]byte(test.config), &config); err != nil {
				t.Fatal(err)
			}
			if err := yaml.Unmarshal([]byte(test.values), &want); err != nil {
				t.Fatal(err)
			}
			k := ReadKubeProxy(config)
			if diff := cmp.Diff(normal(want), normal(k.Values)); diff != "" {
				t.Errorf("values (-want +got):\n%s", diff)
			}
			var lines []string
			for _, s := range k.Settings {
				line := s.Field + ": " + s.Chart
				if s.Chart == "" {
					line = s.Field + ": " + s.Why
				}
				if i := slices.IndexFunc(test.lines, func(w string) bool { return strings.HasPrefix(line, w) }); i >= 0 {
					line = test.lines[i]
				}
				lines = append(lines, line)
			}
			if diff := cmp.Diff(test.lines, lines); diff != "" {
				t.Errorf("settings (-want +got):\n%s", diff)
			}
			if len(k.Notes) != len(test.notes) {
				t.Errorf("notes %q", k.Notes)
			}
			for i, n := range test.notes {
				if i < len(k.Notes) && !strings.Contains(k.Notes[i], n) {
					t.Errorf("note %q, want %q", k.Notes[i], n)
				}
			}
			if len(k.Unknown) > 0 {
				t.Errorf("unknown %v", k.Unknown)
			}
		})
	}
}

// Where a node's kernel is too old for nftables mode, the plan says that a scheduler has no effect there.
func TestOldKernelsAreNoted(t *testing.T) {
	var nodes []Object
	for _, release := range []string{"5.10.0-32-amd64", "6.1.0-56-amd64", "5.13.0", "5.4.0-200-generic", ""} {
		nodes = append(nodes, decodeOne(t, "{apiVersion: v1, kind: Node, metadata: {name: n"+release+
			`}, status: {nodeInfo: {kernelVersion: "`+release+`"}}}`))
	}
	for _, c := range []struct {
		config map[string]any
		want   string
	}{
		{map[string]any{"mode": "ipvs"}, "2 of 5 nodes are older than Linux 5.13, and choose backends at random: " +
			"n5.10.0-32-amd64 (Linux 5.10.0-32-amd64), n5.4.0-200-generic (Linux 5.4.0-200-generic)"},
		{map[string]any{"mode": "ipvs", "ipvs": map[string]any{"scheduler": "lblc"}}, ""}, // is random everywhere
		{map[string]any{"mode": "iptables"}, ""},
	} {
		k := ReadKubeProxy(c.config)
		before := len(k.Notes)
		k.NoteOldKernels(nodes)
		if got := strings.Join(k.Notes[before:], "\n"); got != c.want {
			t.Errorf("%v: %q, want %q", c.config, got, c.want)
		}
	}
}

func TestReadKubeProxyNamesWhatItDoesNotKnow(t *testing.T) {
	k := ReadKubeProxy(map[string]any{"mode": "ebpf", "novel": "x", "iptables": map[string]any{"also": true}})
	if diff := cmp.Diff([]string{"iptables.also", "novel"}, k.Unknown); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(k.Notes) != 1 || !strings.Contains(k.Notes[0], "mode ebpf") {
		t.Errorf("notes %q", k.Notes)
	}
}

// The plan says which Services list external IPs that Landfall does not serve, or that one node may not.
func TestExternalIPsAreNoted(t *testing.T) {
	node := func(name, addresses string) Object {
		return decodeOne(t, "{apiVersion: v1, kind: Node, metadata: {name: "+name+"}, status: {addresses: ["+addresses+"]}}")
	}
	service := func(name, spec string) Object {
		return decodeOne(t, "{apiVersion: v1, kind: Service, metadata: {name: "+name+", namespace: shop}, spec: {"+spec+"}}")
	}
	nodes := []Object{
		node("n1", `{type: InternalIP, address: 172.18.0.2}, {type: InternalIP, address: "fd00::2"}, `+
			"{type: Hostname, address: n1}"),
		node("n2", "{type: InternalIP, address: 172.18.0.3}, {type: ExternalIP, address: 198.51.100.3}"),
	}
	many := []Object{}
	for name := range strings.FieldsSeq("g f e d c b a") {
		many = append(many, service(name, "externalIPs: [203.0.113.9]"))
	}
	const ofNodes, interfaces = "no external IP that is an address of a Node: ", "an address of one of its interfaces, " +
		"which the API does not show: "
	for name, c := range map[string]struct {
		services []Object
		want     []string
	}{
		"none": {[]Object{service("web", "type: ClusterIP"),
			service("away", "type: ExternalName, externalIPs: [172.18.0.2]")}, nil},
		"of Nodes": {[]Object{service("web", `externalIPs: [172.18.0.2, "fd00:0::2"]`),
			service("api", "externalIPs: [198.51.100.3]")},
			[]string{ofNodes + "shop/api 198.51.100.3 (Node n2); shop/web 172.18.0.2 (Node n1) fd00::2 (Node n1). List"}},
		"both": {[]Object{service("web", `externalIPs: [172.18.0.3, 203.0.113.10, "2001:db8::7"]`)},
			[]string{ofNodes + "shop/web 172.18.0.3 (Node n2). List", interfaces + "shop/web 203.0.113.10 2001:db8::7. Look"}},
		"seven Services": {many, []string{interfaces + "shop/a 203.0.113.9; shop/b 203.0.113.9; shop/c 203.0.113.9; " +
			"shop/d 203.0.113.9; shop/e 203.0.113.9; and 2 more. Look"}},
		"no address": {[]Object{service("web", "externalIPs: [x, 7]")}, nil},
		"seven addresses": {[]Object{service("web",
			"externalIPs: [10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5, 10.0.0.6, 10.0.0.7]")},
			[]string{interfaces + "shop/web 10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5 and 2 more. Look"}},
	} {
		var k KubeProxy
		k.NoteExternalIPs(c.services, nodes)
		same := slices.EqualFunc(k.Notes, c.want, strings.Contains)
		if !same {
			t.Errorf("%s: %q, want %q", name, k.Notes, c.want)
		}
	}
}
