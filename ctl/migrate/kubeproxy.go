package migrate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A Setting is one field of kube-proxy's configuration that has a value.
type Setting struct {
	// Field is its path, Value its value in JSON's words.
	Field, Value string
	// Chart is the chart value that takes it; "" if none needs to.
	Chart string
	// Why says what happens to it.
	Why string
}

// rule says what happens to a field of kube-proxy's configuration, and to all fields below it.
type rule struct {
	field string
	// chart is the chart value that takes the field as it is.
	chart string
	why   string
	// mode is the mode of kube-proxy in which the field has an effect; "" for all.
	mode string
}

const (
	noPeriods = "not needed: Landfall writes each change at once and watches the kernel for others' changes"
	noWindows = "not needed: it is for Windows; Landfall's proxy runs on Linux nodes only: leave kube-proxy on others"
	noTimeout = "not needed without IPVS: connection tracking has its own (net.netfilter.nf_conntrack_*_timeout*)"
	bySysctl  = "not taken: Landfall sets kube-proxy's default, and keeps a node's higher limit or shorter time-out"
)

// rules has every field of KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1).
var rules = []rule{
	{field: "featureGates", why: "not needed: these are kube-proxy's own"},
	{field: "clientConnection", why: "not needed: Landfall's pods use their service accounts; where the Service " +
		"default/kubernetes is no way to the API server, set kubernetesServiceHost"},
	{field: "logging", why: "not needed: see logLevel and logFormat"},
	{field: "hostnameOverride", why: "not needed: Kubernetes tells each pod the name of its node"},
	{field: "bindAddress", why: "not needed: Landfall's proxy serves both families and reads the node's addresses"},
	{field: "healthzBindAddress", chart: "proxy.healthzBindAddress", why: "taken"},
	{field: "metricsBindAddress", why: "not needed: metrics are at proxy.metricsPort, where metrics.listen says"},
	{field: "bindAddressHardFail", why: "not needed: a port that is taken is an Event, and is tried again"},
	{field: "enableProfiling", why: "not needed: see the flag --pprof-address in proxy.extraArgs"},
	{field: "showHiddenMetricsForVersion", why: "not needed: there are no hidden metrics"},
	{field: "mode", why: "mapped to proxy.mode"},
	{field: "iptables.masqueradeBit", chart: "proxy.masqueradeBit", why: "taken", mode: "iptables"},
	{field: "iptables.masqueradeAll", chart: "proxy.masqueradeAll", why: "taken", mode: "iptables"},
	{field: "iptables.localhostNodePorts", chart: "proxy.iptablesLocalhostNodePorts", why: "taken", mode: "iptables"},
	{field: "iptables.syncPeriod", why: noPeriods},
	{field: "iptables.minSyncPeriod", why: noPeriods},
	{field: "ipvs.syncPeriod", why: noPeriods},
	{field: "ipvs.minSyncPeriod", why: noPeriods},
	{field: "ipvs.scheduler", why: "mapped to proxy.scheduler", mode: "ipvs"},
	{field: "ipvs.excludeCIDRs", why: "not needed: Landfall writes no virtual servers and touches none. Before the " +
		"cleanup, note those in these CIDRs: kube-proxy --cleanup flushes all", mode: "ipvs"},
	{field: "ipvs.strictARP", why: "not needed once the cleanup has removed kube-ipvs0, for which the kernel answers ARP"},
	{field: "ipvs.tcpTimeout", why: noTimeout},
	{field: "ipvs.tcpFinTimeout", why: noTimeout},
	{field: "ipvs.udpTimeout", why: noTimeout},
	{field: "nftables.masqueradeBit", chart: "proxy.masqueradeBit", why: "taken", mode: "nftables"},
	{field: "nftables.masqueradeAll", chart: "proxy.masqueradeAll", why: "taken", mode: "nftables"},
	{field: "nftables.syncPeriod", why: noPeriods},
	{field: "nftables.minSyncPeriod", why: noPeriods},
	{field: "winkernel", why: noWindows},
	{field: "detectLocalMode", chart: "proxy.detectLocalMode", why: "taken"},
	{field: "detectLocal.bridgeInterface", chart: "proxy.podBridgeInterface", why: "taken"},
	{field: "detectLocal.interfaceNamePrefix", chart: "proxy.podInterfaceNamePrefix", why: "taken"},
	{field: "clusterCIDR", chart: "proxy.clusterCIDR", why: "taken"},
	{field: "nodePortAddresses", chart: "proxy.nodePortAddresses", why: "taken"},
	{field: "oomScoreAdj", why: "not needed: node.priorityClassName (system-node-critical) sets it"},
	{field: "conntrack.maxPerCore", why: bySysctl + " (32768 a core: net.netfilter.nf_conntrack_max)"},
	{field: "conntrack.min", why: bySysctl + " (131072: net.netfilter.nf_conntrack_max)"},
	{field: "conntrack.tcpEstablishedTimeout", why: bySysctl + " (24h: nf_conntrack_tcp_timeout_established)"},
	{field: "conntrack.tcpCloseWaitTimeout", why: bySysctl + " (1h: nf_conntrack_tcp_timeout_close_wait)"},
	{field: "conntrack.tcpBeLiberal", chart: "proxy.conntrackTCPBeLiberal", why: "taken"},
	{field: "conntrack.udpTimeout", why: bySysctl + " (nf_conntrack_udp_timeout)"},
	{field: "conntrack.udpStreamTimeout", why: bySysctl + " (nf_conntrack_udp_timeout_stream)"},
	{field: "configSyncPeriod", why: "not needed: Landfall watches, and lists again when a watch ends"},
	{field: "portRange", why: "not needed: it has no effect in kube-proxy either"},
	{field: "windowsRunAsService", why: noWindows},
}

// KubeProxy is what kube-proxy's configuration means for Landfall.
type KubeProxy struct {
	// Mode is kube-proxy's: iptables, nftables, ipvs or, until Kubernetes 1.25, userspace.
	Mode string
	// Values are the chart values, from the top.
	Values map[string]any
	// Settings are the fields that have a value, in the order of their names.
	Settings []Setting
	// Unknown are fields that no version known here has.
	Unknown []string
	Notes   []string
	// Blockers must be solved before anything is done.
	Blockers []string
}

// PlanKubeProxy plans a takeover from a kube-proxy with this configuration in the pods of set.
func PlanKubeProxy(config map[string]any, set Workload, c Choices) KubeProxy {
	k := ReadKubeProxy(config)
	if c.ClusterCIDR != "" {
		k.proxy()["clusterCIDR"] = c.ClusterCIDR
	}
	mode, _ := k.proxy()["detectLocalMode"].(string)
	if cidr, _ := k.proxy()["clusterCIDR"].(string); cidr == "" && (mode == "" || mode == "ClusterCIDR") {
		k.Blockers = append(k.Blockers, "kube-proxy's configuration does not say the pod network, without which Landfall's "+
			"proxy does not start: give --cluster-cidr")
	}
	if keeper := Paused([]Workload{set}, c); keeper != "" {
		k.Blockers = append(k.Blockers, keeper)
	}
	return k
}

// ReadKubeProxy maps kube-proxy's configuration.
func ReadKubeProxy(config map[string]any) KubeProxy {
	k := KubeProxy{Mode: "iptables", Values: map[string]any{}}
	if mode, _ := config["mode"].(string); mode != "" {
		k.Mode = mode
	}
	k.walk("", config)
	proxy := k.proxy()
	switch k.Mode {
	case "nftables":
		// The chains of Landfall's iptables mode may come after kube-proxy's nftables table.
		proxy["mode"] = "nftables"
		if proxy["nodePortAddresses"] == nil {
			proxy["nodePortAddresses"] = []any{"primary"}
			k.note("kube-proxy's nftables mode serves node ports at the node's primary addresses only, if nodePortAddresses " +
				"is empty: proxy.nodePortAddresses is [primary]")
		}
	case "ipvs":
		k.readScheduler(config, proxy)
		k.note("until kube-proxy --cleanup has run on a node, its interface kube-ipvs0 has the addresses of all Services: " +
			"set ipvs.strictARP, or the node's kernel answers ARP for addresses that another node announces")
	case "userspace":
		k.set("relay.enabled", true)
		k.note("kube-proxy's userspace mode tried another backend when one did not answer. Landfall's relay does " +
			"that, with proxy.mode auto in nftables mode or, on older kernels, in iptables mode, which relays TCP only. " +
			"relay.enabled runs it, for Services that ask for it: " +
			"kubectl -n NAMESPACE annotate service NAME landfall.dev/relay=true")
		k.note("kube-proxy's userspace mode took backends in turn, and Landfall draws them at random: set " +
			"proxy.scheduler, or the annotation landfall.dev/scheduler of Services, to round-robin for turns")
	case "iptables":
	default:
		k.note("mode %s is not known here, and is taken for iptables", k.Mode)
	}
	if len(proxy) == 0 {
		delete(k.Values, "proxy")
	}
	return k
}

func (k *KubeProxy) note(format string, args ...any) {
	k.Notes = append(k.Notes, fmt.Sprintf(format, args...))
}

func (k *KubeProxy) proxy() map[string]any {
	proxy, _ := k.Values["proxy"].(map[string]any)
	if proxy == nil {
		proxy = map[string]any{}
		k.Values["proxy"] = proxy
	}
	return proxy
}

// schedulers are those of IPVS that Landfall has too.
var schedulers = map[string]string{"rr": "round-robin", "wrr": "weighted-round-robin", "sh": "source-hash",
	"mh": "source-hash", "dh": "destination-hash", "lc": "least-connections", "wlc": "weighted-least-connections",
	"sed": "shortest-expected-delay", "nq": "never-queue"}

// nearest has, for IPVS' other schedulers, the one of Landfall that comes nearest, and how it differs.
var nearest = map[string]string{
	"lblc":  "destination-hash, where an address of the Service keeps its backend even if that is overloaded",
	"lblcr": "destination-hash, where an address of the Service has one backend, not a set of them",
	"fo":    "destination-hash, where an address of the Service has one backend while it is there, but not the heaviest",
	"ovf":   "weighted-least-connections, which fills all backends alike, not one after the other",
	"twos":  "weighted-least-connections, which compares all backends, not two drawn at random",
}

func (k *KubeProxy) readScheduler(config, proxy map[string]any) {
	scheduler, _ := dig(config, "ipvs", "scheduler").(string)
	if scheduler == "" {
		scheduler = "rr"
	}
	if ours, ok := schedulers[scheduler]; ok {
		// The mode stays auto: nftables mode, which alone has the scheduler, may fail on an older kernel.
		proxy["scheduler"] = ours
		k.note("IPVS' scheduler %s is %s, which Landfall has in nftables mode only. proxy.mode auto takes that mode where "+
			"the kernel has what it needs, from Linux %s on; elsewhere connections are spread at random", scheduler, ours,
			lb.NftablesSince)
		return
	}
	hint := ""
	if near, ok := nearest[scheduler]; ok {
		hint = "; set proxy.scheduler for the nearest, " + near
	}
	k.note("IPVS' scheduler %s has no equivalent: Landfall picks a backend at random%s", scheduler, hint)
}

// NoteOldKernels adds a note if a scheduler has no effect on some of these nodes, as their kernels are too old for
// nftables mode.
func (k *KubeProxy) NoteOldKernels(nodes []Object) {
	proxy, _ := k.Values["proxy"].(map[string]any)
	if scheduler, _ := proxy["scheduler"].(string); scheduler == "" {
		return
	}
	var old []string
	for _, o := range nodes {
		release, _ := dig(o.Status, "nodeInfo", "kernelVersion").(string)
		if lb.BeforeNftables(release) {
			old = append(old, fmt.Sprintf("%s (Linux %s)", o.Metadata.Name, release))
		}
	}
	if len(old) > 0 {
		slices.Sort(old)
		k.note("%d of %d nodes are older than Linux %s, and choose backends at random: %s", len(old), len(nodes),
			lb.NftablesSince, strings.Join(old, ", "))
	}
}

// walk takes all fields with a value.
func (k *KubeProxy) walk(path string, config map[string]any) {
	for _, name := range slices.Sorted(maps.Keys(config)) {
		field, value := path+name, config[name]
		if field == "apiVersion" || field == "kind" || empty(value) {
			continue
		}
		r := ruleFor(field)
		if inner, isMap := value.(map[string]any); r == nil && isMap {
			k.walk(field+".", inner)
			continue
		}
		if r == nil {
			k.Unknown = append(k.Unknown, field)
			continue
		}
		s := Setting{Field: field, Value: fmt.Sprint(value), Chart: r.chart, Why: r.why}
		if !k.inMode(*r) {
			s.Chart, s.Why = "", "not in use: kube-proxy runs in mode "+k.Mode
		} else if r.chart != "" {
			k.set(r.chart, value)
		}
		k.Settings = append(k.Settings, s)
	}
}

// inMode reports whether a field has an effect. IPVS masquerades as the section iptables says.
func (k *KubeProxy) inMode(r rule) bool {
	return r.mode == "" || r.mode == k.Mode || k.Mode == "ipvs" && strings.HasPrefix(r.field, "iptables.masquerade")
}

// ruleFor returns the rule of a field, or of the section that it is in; nil without one.
func ruleFor(field string) *rule {
	for i, r := range rules {
		if field == r.field || strings.HasPrefix(field, r.field+".") {
			return &rules[i]
		}
	}
	return nil
}

func (k *KubeProxy) set(chart string, value any) {
	section, key, _ := strings.Cut(chart, ".")
	values, _ := k.Values[section].(map[string]any)
	if values == nil {
		values = map[string]any{}
		k.Values[section] = values
	}
	values[key] = value
}

// empty reports whether a value says what a missing one says. kube-proxy writes its configuration
// out with such values.
func empty(value any) bool {
	switch v := value.(type) {
	case nil:
		return true
	case string:
		return v == "" || v == "0s"
	case float64:
		return false // a number that is written counts, as masqueradeBit 0 does
	case []any:
		return len(v) == 0
	case map[string]any:
		for _, inner := range v {
			if !empty(inner) {
				return false
			}
		}
		return true
	}
	return false
}
