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
	// Drops is set if the chain drops what no rule accepts, Accepts are those that may accept
	// something.
	Drops   bool
	Accepts []Accept
}

// Accept is what must be true of packets that a rule accepts, as far as it is known.
type Accept struct {
	Chain             string
	Established, ICMP bool
	// Interfaces are the names that packets must come in or go out at; a * stands for what may follow.
	Interfaces []string
}

// chainKubeForward is kube-proxy's, in which it accepts known connections and what it has marked
// itself.
const chainKubeForward = "KUBE-FORWARD"

// otherNetworks begin the names of interfaces that Docker and libvirt make for their own networks.
var otherNetworks = []string{"docker", "br-", "virbr"}

// newOfPods reports whether the rule may accept new connections of pods: whatever it is not known
// to leave out.
func (a Accept) newOfPods() bool {
	return !a.Established && !a.ICMP && a.Chain != chainKubeForward &&
		!slices.ContainsFunc(a.Interfaces, func(name string) bool {
			return slices.ContainsFunc(otherNetworks, func(begin string) bool { return strings.HasPrefix(name, begin) })
		})
}

// Findings says what keeps the node from delivering what its rules say.
func Findings(h Host) []lb.Finding {
	return slices.Concat(h.forwarding(), h.dropped(), h.unmatched())
}

// forwarding looks at the families that pods of the node have.
func (h Host) forwarding() (found []lb.Finding) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if parameter := h.NotForwarding[family]; parameter != "" && h.has(family) {
			found = append(found, lb.Find(lb.ReasonForwardingOff,
				"%s has %s=0, so its kernel forwards no %s packet to a pod: set it to 1 in /etc/sysctl.d", h.Node, parameter,
				family).About(string(family)))
		}
	}
	return found
}

// has reports whether pods of the node have addresses of a family.
func (h Host) has(family lb.Family) bool {
	return slices.ContainsFunc(h.Pods, func(addr netip.Addr) bool { return lb.FamilyOf(addr) == family }) ||
		slices.ContainsFunc(h.PodCIDRs, func(p netip.Prefix) bool { return lb.FamilyOf(p.Addr()) == family })
}

// dropped looks for chains that certainly drop new connections of pods. What is not certain is no
// finding.
func (h Host) dropped() (found []lb.Finding) {
	for _, c := range h.Chains {
		name := fmt.Sprintf("%s %s %s", c.Family, c.Table, c.Name)
		switch {
		case !h.passes(c):
		case c.Table == "firewalld":
			f := lb.Find(lb.ReasonForwardDropped, "firewalld runs on %s (chain %s) and rejects what its zones do not forward: "+
				"put the pod network, and the interfaces of pods, into a zone that forwards, such as trusted", h.Node,
				name).About(name)
			f.Note = true
			found = append(found, f)
		case h.Iptables && c.Table == "filter" && c.Name == "FORWARD":
			// Landfall's rules accept there.
		case c.Drops && !slices.ContainsFunc(c.Accepts, Accept.newOfPods):
			found = append(found, lb.Find(lb.ReasonForwardDropped,
				"on %s the policy of chain %s is drop (as Docker and ufw set it), and no rule there accepts new connections of "+
					"pods; no rule of Landfall can accept what another table drops: accept the pod network there, or set its "+
					"policy to accept%s", h.Node, name, h.orIptables(c)).About(name))
		}
	}
	return slices.CompactFunc(found, func(a, b lb.Finding) bool { return a == b })
}

// passes reports whether packets of pods pass a chain.
func (h Host) passes(c ForwardChain) bool {
	return c.Family != "ip6" && h.has(lb.IPv4) || c.Family != "ip" && h.has(lb.IPv6)
}

// orIptables says that iptables mode helps, if it does.
func (h Host) orIptables(c ForwardChain) string {
	if c.Table == "filter" && c.Name == "FORWARD" && c.Family != "inet" {
		return ", or choose iptables mode"
	}
	return ""
}

// unmatched looks for a pod network that has no pod of the node.
func (h Host) unmatched() (found []lb.Finding) {
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
			found = append(found, lb.Find(lb.ReasonPodNetworkUnmatched,
				"no pod on %s is in the pod network %s (clusterCIDR), but %s is one: connections of pods to cluster IPs are "+
					"masqueraded, and pods see the node's address; set proxy.clusterCIDR to the network of the pods", h.Node,
				strings.Join(networks, ","), slices.Min(seen)).About(string(family)))
		}
	}
	return found
}
