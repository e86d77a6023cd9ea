package migrate

import (
	"fmt"
	"strconv"
	"strings"
)

// fieldOfFlag has the field of kube-proxy's configuration that each of its flags sets. SECTION is that
// of its mode.
var fieldOfFlag = map[string]string{
	"bind-address": "bindAddress", "bind-address-hard-fail": "bindAddressHardFail", "cluster-cidr": "clusterCIDR",
	"config-sync-period": "configSyncPeriod", "detect-local-mode": "detectLocalMode",
	"healthz-bind-address": "healthzBindAddress", "hostname-override": "hostnameOverride",
	"metrics-bind-address": "metricsBindAddress", "nodeport-addresses": "nodePortAddresses",
	"oom-score-adj": "oomScoreAdj", "pod-bridge-interface": "detectLocal.bridgeInterface",
	"pod-interface-name-prefix": "detectLocal.interfaceNamePrefix", "profiling": "enableProfiling",
	"proxy-mode": "mode", "masquerade-all": "SECTION.masqueradeAll", "iptables-masquerade-bit": "iptables.masqueradeBit",
	"iptables-localhost-nodeports": "iptables.localhostNodePorts", "iptables-sync-period": "iptables.syncPeriod",
	"iptables-min-sync-period": "iptables.minSyncPeriod", "ipvs-exclude-cidrs": "ipvs.excludeCIDRs",
	"ipvs-scheduler": "ipvs.scheduler", "ipvs-strict-arp": "ipvs.strictARP", "ipvs-sync-period": "ipvs.syncPeriod",
	"ipvs-min-sync-period": "ipvs.minSyncPeriod", "ipvs-tcp-timeout": "ipvs.tcpTimeout",
	"ipvs-tcpfin-timeout": "ipvs.tcpFinTimeout", "ipvs-udp-timeout": "ipvs.udpTimeout",
	"conntrack-max-per-core": "conntrack.maxPerCore", "conntrack-min": "conntrack.min",
	"conntrack-tcp-be-liberal":          "conntrack.tcpBeLiberal",
	"conntrack-tcp-timeout-close-wait":  "conntrack.tcpCloseWaitTimeout",
	"conntrack-tcp-timeout-established": "conntrack.tcpEstablishedTimeout",
	"conntrack-udp-timeout":             "conntrack.udpTimeout",
	"conntrack-udp-timeout-stream":      "conntrack.udpStreamTimeout",
}

// ofConnection are flags by which kube-proxy finds the API server or logs.
var ofConnection = []string{"kubeconfig", "master", "kube-api-burst", "kube-api-content-type", "kube-api-qps", "v",
	"vmodule", "logtostderr", "alsologtostderr", "feature-gates", "log-", "logging-", "write-config-to", "show-hidden",
	"cleanup", "init-only"}

// KubeProxyFlags returns the configuration that the flags of kube-proxy's pods are, as where Talos
// starts it; ok is false where they name a file.
func KubeProxyFlags(w Workload) (config map[string]any, ok bool) {
	config = map[string]any{}
	section := "iptables"
	if mode, _ := w.Flag("proxy-mode"); mode == "nftables" {
		section = mode
	}
	for _, text := range w.words() {
		name, value, has := strings.Cut(strings.TrimLeft(text, "-"), "=")
		switch field := fieldOfFlag[name]; {
		case name == "config":
			return nil, false
		case !strings.HasPrefix(text, "-"):
		case field == "" && oneOf(name, ofConnection):
		case field == "":
			set(config, "--"+name, value) // shown as not known
		case !has:
			set(config, strings.Replace(field, "SECTION", section, 1), true)
		default:
			set(config, strings.Replace(field, "SECTION", section, 1), typed(field, value))
		}
	}
	return config, true
}

// words are the command and the arguments of a workload's first container.
func (w Workload) words() (all []string) {
	containers, _ := w.template["containers"].([]any)
	for _, c := range containers[:min(1, len(containers))] {
		for _, key := range []string{"command", "args"} {
			words, _ := dig(c, key).([]any)
			for _, word := range words {
				all = append(all, fmt.Sprint(word))
			}
		}
	}
	return all
}

func oneOf(name string, prefixes []string) bool {
	for _, p := range prefixes {
		if name == p || strings.HasSuffix(p, "-") && strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

// typed returns the value of a flag as the configuration has it.
func typed(field, value string) any {
	switch {
	case field == "nodePortAddresses" || field == "ipvs.excludeCIDRs":
		var list []any
		for part := range strings.SplitSeq(value, ",") {
			list = append(list, part)
		}
		return list
	case strings.HasSuffix(field, "Bit") || field == "conntrack.maxPerCore" || field == "conntrack.min":
		if n, err := strconv.ParseFloat(value, 64); err == nil {
			return n
		}
	case value == "true" || value == "false":
		return value == "true"
	}
	return value
}

func set(config map[string]any, field string, value any) {
	section, key, nested := strings.Cut(field, ".")
	if !nested {
		config[field] = value
		return
	}
	inner, _ := config[section].(map[string]any)
	if inner == nil {
		inner = map[string]any{}
		config[section] = inner
	}
	inner[key] = value
}

// Elsewhere says where kube-proxy runs in a distribution that has no DaemonSet of it; "" if the nodes
// are of none that is known.
func Elsewhere(nodes []Object) string {
	for _, o := range nodes {
		version, _ := dig(o.Status, "nodeInfo", "kubeletVersion").(string)
		switch {
		case strings.Contains(version, "+k3s"):
			return "k3s runs kube-proxy inside its own process: docs/guide/k3s.md says how to take over"
		case strings.Contains(version, "+rke2"):
			return "RKE2 runs kube-proxy as static pods: docs/guide/rke2.md says how to take over"
		}
	}
	return ""
}
