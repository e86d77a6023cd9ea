package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// SharedNetwork is a network of cluster IPs that has addresses of nodes or pods too.
type SharedNetwork struct {
	Network netip.Prefix
	What    string // lies in it
}

// OnlyServices returns those of the networks of cluster IPs in which no Node and no pod is known to be, and the
// others with what lies in them: a packet to an address there that no Service has may be for a node or a pod. Pods
// are the configured networks of pods.
func OnlyServices(networks []netip.Prefix, nodes map[string]lb.Node, pods []netip.Prefix) (
	unshared []netip.Prefix, shared []SharedNetwork) {
	for _, network := range networks {
		if what := within(network, nodes, pods); what != "" {
			shared = append(shared, SharedNetwork{network, what})
		} else {
			unshared = append(unshared, network)
		}
	}
	return unshared, shared
}

// within says what of the Nodes and pods lies in a network; "" if nothing does.
func within(network netip.Prefix, nodes map[string]lb.Node, pods []netip.Prefix) string {
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		node := nodes[name]
		for _, addr := range slices.Concat(node.Addresses, node.ExternalAddresses) {
			if network.Contains(addr) {
				return fmt.Sprintf("%s, an address of the Node %s,", addr, name)
			}
		}
		for _, of := range node.PodCIDRs {
			if network.Overlaps(of) {
				return fmt.Sprintf("%s, the network of pods on the Node %s,", of, name)
			}
		}
	}
	for _, of := range pods {
		if network.Overlaps(of) {
			return fmt.Sprintf("%s, the network of pods,", of)
		}
	}
	return ""
}
