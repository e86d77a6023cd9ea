package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Host is what a proxy sees of its node that decides whether the rules deliver.
type Host struct {
	Node string
	// Iptables is set in iptables mode, whose rules accept in the chain FORWARD of the table filter.
	Iptables bool
	// NotForwarding are the kernel parameters by which the kernel forwards no packets.
	NotForwarding map[lb.Family]string
	Chains        []ForwardChain
	// PodNetworks are the configured ones; none if pods are told from others in another way.
	PodNetworks []netip.Prefix
	// Pods are the endpoints on this node without those that use the node's network, PodCIDRs those of
	// the Node.
	Pods     []netip.Addr
	PodCIDRs []netip.Prefix
}

// ForwardChain is a chain of any program that sees the packets that the node forwards.
type ForwardChain struct {
	Family, Table, Name string
	// Drops is set if the chain drops what its rules do not accept, Jumps are the chains that its
	// rules jump to.
	Drops bool
	Jumps []string
}

// acceptors begin the names of chains in which network plug-ins and kube-proxy accept the packets
// of pods.
var acceptors = []string{"ANTREA-", "CILIUM_", "CNI-FORWARD", "FLANNEL-FWD", "KUBE-FORWARD", "KUBE-ROUTER-", "LF-",
	"WEAVE-", "cali-"}

// Findings says what keeps the node from delivering what its rules say.
func Findings(h Host) []lb.Finding {
	return slices.Concat(h.forwarding(), h.dropped(), h.unmatched())
}

// forwarding looks at the families that pods of the node have.
func (h Host) forwarding() (found []lb.Finding) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		of := func(addr netip.Addr) bool { return lb.FamilyOf(addr) == family }
		used := slices.ContainsFunc(h.Pods, of) ||
			slices.ContainsFunc(h.PodCIDRs, func(p netip.Prefix) bool { return of(p.Addr()) })
		if parameter := h.NotForwarding[family]; parameter != "" && used {
			found = append(found, lb.Find(lb.ReasonForwardingOff,
				"%s has %s=0, so its kernel forwards no %s packet to a pod: set it to 1 in /etc/sysctl.d", h.Node, parameter,
				family))
		}
	}
	return found
}

func (h Host) dropped() (found []lb.Finding) {
	for _, c := range h.Chains {
		accepted := h.Iptables && c.Table == "filter" && c.Name == "FORWARD" ||
			slices.ContainsFunc(c.Jumps, func(to string) bool {
				return slices.ContainsFunc(acceptors, func(begin string) bool { return strings.HasPrefix(to, begin) })
			})
		name := fmt.Sprintf("%s %s %s", c.Family, c.Table, c.Name)
		switch {
		case c.Table == "firewalld":
			f := lb.Find(lb.ReasonForwardDropped, "firewalld runs on %s (chain %s) and rejects what its zones do not forward: "+
				"put the pod network, and the interfaces of pods, into a zone that forwards, such as trusted", h.Node, name)
			f.Note = true
			found = append(found, f)
		case c.Drops && !accepted:
			found = append(found, lb.Find(lb.ReasonForwardDropped,
				"on %s the policy of chain %s is drop (as Docker and ufw set "+
					"it), and no rule of Landfall can accept what another table drops: accept the pod network there, or set its "+
					"policy to accept, or choose iptables mode", h.Node, name))
		}
	}
	return slices.CompactFunc(found, func(a, b lb.Finding) bool { return a == b })
}

// unmatched looks for a pod network that has no pod of the node.
func (h Host) unmatched() []lb.Finding {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		var networks, seen []string
		matched := false
		within := func(addr netip.Addr) bool {
			return slices.ContainsFunc(h.PodNetworks, func(p netip.Prefix) bool { return p.Contains(addr) })
		}
		for _, p := range h.PodNetworks {
			if lb.FamilyOf(p.Addr()) == family {
				networks = append(networks, p.String())
			}
		}
		for _, addr := range h.Pods {
			if lb.FamilyOf(addr) == family {
				matched = matched || within(addr)
				seen = append(seen, addr.String())
			}
		}
		if len(networks) > 0 && len(seen) > 0 && !matched {
			return []lb.Finding{lb.Find(lb.ReasonPodNetworkUnmatched,
				"no pod on %s is in the pod network %s (clusterCIDR), but %s is one: connections of pods to cluster IPs are "+
					"masqueraded, and pods see the node's address; set proxy.clusterCIDR to the network of the pods", h.Node,
				strings.Join(networks, ","), slices.Min(seen))}
		}
	}
	return nil
}
