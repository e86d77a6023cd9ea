package plan

import (
	"fmt"
	"net/netip"

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

// within says what of the Nodes and pods lies in a network: of several Nodes, what the one with the least name has;
// "" if nothing does. It does not sort the names, as mostly nothing is found in some 1,000 Nodes.
func within(network netip.Prefix, nodes map[string]lb.Node, pods []netip.Prefix) string {
	var least, what string
	for name, node := range nodes {
		if what != "" && name > least {
			continue
		}
		if of := ofNode(network, name, node); of != "" {
			least, what = name, of
		}
	}
	if what != "" {
		return what
	}
	for _, of := range pods {
		if network.Overlaps(of) {
			return fmt.Sprintf("%s, the network of pods,", of)
		}
	}
	return ""
}

// ofNode says what of a Node lies in a network; "" if nothing does.
func ofNode(network netip.Prefix, name string, node lb.Node) string {
	for _, addrs := range [][]netip.Addr{node.Addresses, node.ExternalAddresses} {
		for _, addr := range addrs {
			if network.Contains(addr) {
				return fmt.Sprintf("%s, an address of the Node %s,", addr, name)
			}
		}
	}
	for _, of := range node.PodCIDRs {
		if network.Overlaps(of) {
			return fmt.Sprintf("%s, the network of pods on the Node %s,", of, name)
		}
	}
	return ""
}
