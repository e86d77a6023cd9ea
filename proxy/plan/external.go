package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ExternalIPs says which addresses in spec.externalIPs are served (CVE-2020-8554: whoever may write
// a Service may write any address there).
type ExternalIPs struct {
	// Deny serves none but those in Allowed.
	Deny    bool
	Allowed []netip.Prefix
	// Pools are the addresses that only the controller gives to Services.
	Pools map[string][]lb.Range
	// Networks are those of cluster IPs.
	Networks []netip.Prefix
	// Pods are the networks of the cluster's pods, whose addresses are served only if they are in Allowed.
	// Some network plugins give pods addresses that have nothing to do with spec.podCIDR of their Node.
	Pods []netip.Prefix
	// Nodes have addresses that are served only if they are in Allowed; nil for none.
	Nodes *Nodes
	// APIServers are served only if they are in Allowed too: who takes the API server's port from its clients
	// takes the cluster's control from every node, and keeps the proxies from hearing that it is over.
	APIServers []netip.Addr
	// Own are addresses of the node itself, sorted, which are served only if they are in Allowed, also where the Node
	// does not show them.
	Own []Own
	// Hostless are the network and broadcast addresses of the node's own networks, sorted. What programs send to all
	// hosts of a network is no Service's.
	Hostless []lb.Unassignable
	// Routers are served only if they are in Allowed too: who takes the ports of BGP and BFD from a node's
	// speaker takes the addresses of all Services off that node.
	Routers []netip.Addr
}

// Own is an address of the node itself.
type Own struct {
	Addr      netip.Addr
	Interface string
}

// ParseExternalIPs reads allow, deny, or the networks whose addresses are allowed.
func ParseExternalIPs(text string) (ExternalIPs, error) {
	switch text {
	case "allow":
		return ExternalIPs{}, nil
	case "deny":
		return ExternalIPs{Deny: true}, nil
	}
	e := ExternalIPs{Deny: true}
	for word := range strings.SplitSeq(text, ",") {
		network, err := netip.ParsePrefix(strings.TrimSpace(word))
		if err != nil || network.Addr().Is4In6() {
			return e, fmt.Errorf("%q is neither allow, nor deny, nor a CIDR like 192.0.2.0/24", strings.TrimSpace(word))
		}
		e.Allowed = append(e.Allowed, network.Masked())
	}
	return e, nil
}

// Equal reports whether both serve the same.
func (e ExternalIPs) Equal(other ExternalIPs) bool {
	samePools := len(e.Pools) == len(other.Pools)
	for name, ranges := range e.Pools {
		theirs, ok := other.Pools[name]
		samePools = samePools && ok && slices.Equal(ranges, theirs)
	}
	return samePools && e.Deny == other.Deny && slices.Equal(e.Allowed, other.Allowed) &&
		slices.Equal(e.Networks, other.Networks) && slices.Equal(e.Pods, other.Pods) && e.Nodes.Equal(other.Nodes) &&
		slices.Equal(e.APIServers, other.APIServers) && slices.Equal(e.Routers, other.Routers) &&
		slices.Equal(e.Hostless, other.Hostless) && slices.Equal(e.Own, other.Own)
}

// Refuse returns why no Service is served at an external IP; nil if Services are.
func (e ExternalIPs) Refuse(addr netip.Addr) *lb.Refusal {
	if !addr.IsGlobalUnicast() {
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is no address of one host, but a multicast or "+
			"broadcast address, which programs on the nodes may use", addr)
	}
	if i, found := slices.BinarySearchFunc(e.Hostless, addr, compareHostless); found {
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is no address of one host, but %s of a network "+
			"of the node, which programs on the nodes may use", addr, e.Hostless[i].What)
	}
	for _, network := range e.Networks {
		if network.Contains(addr) {
			return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s lies in %s, the network of cluster IPs", addr,
				network)
		}
	}
	if pool := e.pool(addr); pool != "" {
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s lies in the IPAddressPool %s; a Service of "+
			"type LoadBalancer can request it", addr, pool)
	}
	switch {
	case slices.ContainsFunc(e.Allowed, func(network netip.Prefix) bool { return network.Contains(addr) }):
		return nil
	case e.Deny:
		return lb.Refuse(lb.ReasonExternalIPRefused,
			"spec.externalIPs: the proxy's flag --external-ips does not allow %s", addr)
	}
	if slices.Contains(e.APIServers, addr) {
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is the address of an API server; %s", addr, allow)
	}
	if slices.Contains(e.Routers, addr) {
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is the address of a BGPPeer; %s", addr, allow)
	}
	if why := e.Nodes.refuse(addr); why != nil {
		return why
	}
	if i, found := slices.BinarySearchFunc(e.Own, addr, compareOwn); found {
		return lb.Refuse(lb.ReasonExternalIPRefused,
			"spec.externalIPs: %s is an address of the node, of its interface %s; %s", addr, e.Own[i].Interface, allow)
	}
	for _, network := range e.Pods {
		if network.Contains(addr) {
			return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s lies in %s, the network of pods; %s", addr,
				network, allow)
		}
	}
	return nil
}

func compareOwn(o Own, addr netip.Addr) int { return o.Addr.Compare(addr) }

func compareHostless(u lb.Unassignable, addr netip.Addr) int { return u.Addr.Compare(addr) }

const allow = "the proxy's flag --external-ips can allow it"

// refuse returns why a Service does not get an external IP, whoever else asks for it.
func (c *Claims) refuse(s *claimant, protocol lb.Protocol, f Frontend) *lb.Refusal {
	if why := c.external.Refuse(f.Addr); why != nil {
		return why
	}
	switch holder := c.owners[slot{addr: f.Addr}]; {
	case !holder.bars(s):
	case holder.kind == ClusterIP:
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is the cluster IP of %s", f.Addr, holder.about(s))
	case c.owners[slotOf(protocol, f.Addr, f.Port)].kind == ExternalIP: // else it is the port of the VIP
		return lb.Refuse(lb.ReasonExternalIPRefused, "spec.externalIPs: %s is the load balancer's address of %s", f.Addr,
			holder.about(s))
	}
	if owner, owned := c.nodePortAt(protocol, f); owned && owner.claimant != s {
		return lb.Refuse(lb.ReasonFrontendInUse, "spec.externalIPs: %s/%s is the node port of %s",
			netip.AddrPortFrom(f.Addr, f.Port), protocol.Lower(), owner.about(s))
	}
	return nil
}

// nodePortAt returns who has a frontend at an address of the node as a node port, if anybody has: nobody else gets it
// as an external IP.
func (c *Claims) nodePortAt(protocol lb.Protocol, f Frontend) (owner claim, owned bool) {
	owner, owned = c.owners[slotOf(protocol, netip.Addr{}, f.Port)]
	return owner, owned && c.own[f.Addr]
}
