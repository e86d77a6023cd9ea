package plan

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Nodes knows the addresses of the cluster's nodes and of their pods. An external IP that is one of
// them would take ports of the node's own daemons, such as sshd and the kubelet, or of a pod, on
// all nodes.
type Nodes struct {
	addresses map[netip.Addr]string // the Node that has it
	pods      map[netip.Prefix]string
	lengths   []int // of the prefixes in pods
	count     int
}

// NewNodes returns what is known of the Nodes of the cluster.
func NewNodes(all map[string]lb.Node) *Nodes {
	n := &Nodes{addresses: map[netip.Addr]string{}, pods: map[netip.Prefix]string{}, count: len(all)}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		node := all[name]
		for _, addr := range slices.Concat(node.Addresses, node.ExternalAddresses) {
			n.addresses[addr] = name
		}
		for _, network := range node.PodCIDRs {
			n.pods[network.Masked()] = name
			if !slices.Contains(n.lengths, network.Bits()) {
				n.lengths = append(n.lengths, network.Bits())
			}
		}
	}
	slices.Sort(n.lengths)
	return n
}

// Count returns how many Nodes there are.
func (n *Nodes) Count() int { return n.count }

// Equal reports whether both know the same.
func (n *Nodes) Equal(other *Nodes) bool {
	return n == other ||
		n != nil && other != nil && maps.Equal(n.addresses, other.addresses) && maps.Equal(n.pods, other.pods)
}

// Moved returns the addresses that are a Node's now and were not before, or the other way round.
func (n *Nodes) Moved(before *Nodes) map[netip.Addr]bool {
	moved := map[netip.Addr]bool{}
	for _, pair := range [][2]*Nodes{{n, before}, {before, n}} {
		for addr := range pair[0].addresses {
			if _, has := pair[1].addresses[addr]; !has {
				moved[addr] = true
			}
		}
	}
	return moved
}

// refuse returns why no Service is served at an address; nil if no Node has it.
func (n *Nodes) refuse(addr netip.Addr) *lb.Refusal {
	if n == nil {
		return nil
	}
	if node, has := n.addresses[addr]; has {
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is an address of the Node %s; %s", addr, node,
			allow)
	}
	for _, bits := range n.lengths {
		network, err := addr.Prefix(bits) // an error for a length of the other family
		if node, has := n.pods[network]; err == nil && has {
			return lb.Refuse(lb.ReasonExternalIPRefused,
				"spec.externalIPs: %s lies in %s, the network of pods on the Node %s; %s",
				addr, network, node, allow)
		}
	}
	return nil
}
