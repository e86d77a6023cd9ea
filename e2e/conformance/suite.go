package conformance

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// groups are the parts of the suite that are run, by the first words of their specs' names.
var groups = []string{
	"Services", "LoadBalancers", "Networking", "Conntrack", "DNS", "EndpointSlice", "Traffic Distribution", "KubeProxy",
}

// prefix begins the names of the specs in these groups.
const prefix = "[sig-network] "

// exclusion says why specs are not run, or fail, by a pattern of their names.
type exclusion struct{ pattern, reason string }

// exclusions are the specs of the groups that are not run. The first that fits a name counts.
var exclusions = []exclusion{
	{`\[Disruptive\]`, "It stops kube-proxy, the API server or a kubelet, by SSH to machines of one provider."},
	{`\[Feature:SCTPConnectivity\]`, "It needs SCTP sockets, which many kernels lack."},
	{`\[Feature:Networking-(IPv4|IPv6|DNS)\]`, "It connects to the Internet."},
	{`\[FeatureGate:RelaxedServiceNameValidation\]`, "Its feature gate is alpha, and off by default."},
	{`\[Feature:Networking-Performance\]`, "It measures with iperf, which the image lacks."},
	{`\[Feature:KubeProxyNFAcct\]`, "It reads a metric of kube-proxy."},
	{`should check kube-proxy urls`, "It reads the HTTP endpoints of kube-proxy."},
	{`DNS configMap nameserver`, "It rewrites the configuration of a CoreDNS that kubeadm has installed."},
	{`should be rejected for evicted pods`, "The kubelets of the cluster do not evict: see cluster.md."},
}

// causes say why specs fail where Landfall is not at fault.
var causes = []exclusion{
	{`switch session affinity for LoadBalancer service with Local traffic policy`, "It wants the pods of three nodes to " +
		"answer one client. An address that is announced by ARP is at one node, which with policy Local serves it with its " +
		"own pods, here one. It fails with kube-proxy too."},
}

// group returns the group that a spec is in, or "".
func group(name string) string {
	rest, ok := strings.CutPrefix(name, prefix)
	i := slices.IndexFunc(groups, func(g string) bool { return strings.HasPrefix(rest, g+" ") })
	if !ok || i < 0 {
		return ""
	}
	return groups[i]
}

// excluded returns why a spec is not run, or "".
func excluded(name string) string { return reason(exclusions, name) }

// reason returns that of the first entry that fits a name, or "".
func reason(list []exclusion, name string) string {
	for _, e := range list {
		if regexp.MustCompile(e.pattern).MatchString(name) {
			return e.reason
		}
	}
	return ""
}

// selection returns the patterns of the names that ginkgo is to run, and to skip: all groups or
// those of a list with commas, and in them the specs that fit a pattern; empty for all.
func selection(focus, pattern string) (run, skip string, err error) {
	chosen := groups
	if focus != "" {
		chosen = strings.Split(focus, ",")
	}
	for _, g := range chosen {
		if !slices.Contains(groups, g) {
			return "", "", fmt.Errorf("focus %q: there are %s", g, strings.Join(groups, ", "))
		}
	}
	run = regexp.QuoteMeta(prefix) + "(" + strings.Join(chosen, "|") + ") "
	if pattern != "" {
		if _, err := regexp.Compile(pattern); err != nil {
			return "", "", fmt.Errorf("specs: %w", err)
		}
		run += ".*(" + pattern + ")"
	}
	skips := []string{}
	for _, e := range exclusions {
		skips = append(skips, e.pattern)
	}
	return run, strings.Join(skips, "|"), nil
}
