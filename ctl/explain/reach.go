package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// maxConnects is how many endpoints a node connects to, maxTargets to how many ports of VIPs packets of
	// clients are walked: with two clients of each family landfall-proxy takes no more.
	maxConnects = 8
	maxTargets  = 4
)

// Reach is what a node that announces a Service is asked.
type Reach struct {
	// Connect are endpoints to connect to, From clients whose packets to To are walked through the rules.
	Connect []netip.AddrPort
	From    []netip.Addr
	To      []lb.FlowTarget
}

// Reach returns what to ask a node about the Service. Clients are not known: of a family, one is beside the
// VIP, and one beyond any router, both of loadBalancerSourceRanges if there are some. A packet that a rule
// drops from both is not dropped for the client's address.
func (f ServiceFacts) Reach(node string, c Cluster) (r Reach) {
	families := map[lb.Family]bool{}
	for _, vip := range f.Service.VIPs() {
		family := lb.FamilyOf(vip)
		if !families[family] {
			r.From = append(r.From, f.clients(vip, c.Nodes)...)
		}
		families[family] = true
	}
	for _, port := range f.Service.Ports {
		for _, vip := range f.Service.VIPs() {
			if len(r.To) < maxTargets {
				r.To = append(r.To, lb.FlowTarget{Addr: vip, Port: port.Port, Protocol: port.Protocol})
			}
		}
	}
	for _, slice := range f.Slices {
		for _, e := range slice.Endpoints {
			if !e.Ready || !families[lb.FamilyOf(e.Addr)] || f.Service.ExternalPolicy == lb.Local && e.Node != node ||
				c.foreign(e) {
				continue
			}
			for _, port := range slice.Ports {
				to := netip.AddrPortFrom(e.Addr, port.Port)
				if port.Protocol == lb.TCP && port.Port != 0 && f.has(port) && !slices.Contains(r.Connect, to) &&
					len(r.Connect) < maxConnects {
					r.Connect = append(r.Connect, to)
				}
			}
		}
	}
	return r
}

// foreign reports whether an endpoint is no pod as far as is known, but a router, an address of a pool, or a node
// that it does not name: who may write EndpointSlices shall not have nodes connect there in their own name.
func (c Cluster) foreign(e lb.Endpoint) bool {
	for name, n := range c.Nodes {
		if name != e.Node && slices.Contains(n.Addresses, e.Addr) {
			return true
		}
	}
	return !e.Addr.IsGlobalUnicast() ||
		slices.ContainsFunc(c.Peers, func(p lb.Peer) bool { return p.Addr == e.Addr }) ||
		slices.ContainsFunc(c.Pools, func(p lb.Pool) bool {
			return slices.ContainsFunc(p.Ranges, func(r lb.Range) bool { return r.Contains(e.Addr) })
		})
}

// has reports whether the Service has the port of a slice.
func (f ServiceFacts) has(port lb.SlicePort) bool {
	return slices.ContainsFunc(f.Service.Ports, func(p lb.ServicePort) bool {
		return p.Name == port.Name && p.Protocol == port.Protocol
	})
}

// far are clients beyond any router: of networks for documentation (RFC 5737, RFC 3849), which have no route
// of their own.
var far = map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("198.51.100.7"),
	lb.IPv6: netip.MustParseAddr("2001:db8:ffff::7")}

// clients returns two clients of a VIP.
func (f ServiceFacts) clients(vip netip.Addr, nodes map[string]Node) []netip.Addr {
	for _, p := range f.Service.SourceRanges {
		if lb.FamilyOf(p.Addr()) == lb.FamilyOf(vip) && p.Bits() > 0 {
			first, last := p.Masked().Addr(), p.Masked().Addr().Next()
			if !p.Contains(last) {
				last = first
			}
			return []netip.Addr{first, last}
		}
	}
	taken := func(addr netip.Addr) bool {
		return slices.Contains(f.Service.VIPs(), addr) || slices.ContainsFunc(slices.Collect(maps.Values(nodes)),
			func(n Node) bool { return slices.Contains(n.Addresses, addr) })
	}
	near := vip.Next()
	for near.IsValid() && taken(near) {
		near = near.Next()
	}
	if !near.IsValid() {
		near = far[lb.FamilyOf(vip)]
	}
	return []netip.Addr{near, far[lb.FamilyOf(vip)]}
}

// reach checks what the nodes that announce the Service have tried.
func (e explanation) reach() (checks []Check) {
	asked, wrong := 0, 0
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		if r := e.Agents[node].Reach; r != nil {
			asked++
			here := slices.Concat(e.dropped(node, r), e.connected(node, r), e.unrouted(node, r))
			if worst(here) == Wrong {
				wrong++
			}
			if r.Unwalked != "" {
				here = append(here, Check{Level: Unknown, What: "node " + node,
					Text: fmt.Sprintf("%s could not walk what clients send through its rules: %s", node, r.Unwalked)})
			}
			checks = append(checks, here...)
		}
	}
	for i := range checks {
		if wrong < asked && checks[i].Level == Wrong { // clients of the other nodes get through
			checks[i].Level = Warning
		}
	}
	return checks
}

// dropped checks that no rule of another program drops what clients send.
func (e explanation) dropped(node string, r *lb.Reach) []Check {
	type port struct {
		to       netip.AddrPort
		protocol lb.Protocol
	}
	passes, by := map[port]bool{}, map[port]string{}
	var ports []port
	for _, w := range r.Walks {
		if w.NoRoute { // where it would come in is made up, and unrouted says so
			continue
		}
		p := port{w.Packet.Destination, w.Packet.Protocol}
		if !slices.Contains(ports, p) {
			ports = append(ports, p)
		}
		passes[p], by[p] = passes[p] || w.Dropped == "", w.Dropped
	}
	var lost []string
	first := ""
	for _, p := range ports {
		if !passes[p] {
			lost = append(lost, fmt.Sprintf("%s/%s", p.to, p.protocol))
			if first == "" {
				first = by[p]
			}
		}
	}
	if len(lost) == 0 {
		return nil
	}
	check := Check{Level: Wrong, What: "node " + node, Reason: lb.ReasonClientsDropped,
		Text: fmt.Sprintf("%s drops what clients send to %s: %s", node, list(lost, 3), first),
		Cure: "nft list ruleset   # on " + node + ": take the rule away, or accept the address ahead of it"}
	if len(lost) < len(ports) {
		check.Level = Warning
	}
	return []Check{check}
}

// connected checks that a node can connect to the endpoints, as it does for clients.
func (e explanation) connected(node string, r *lb.Reach) []Check {
	var refused, silent []string
	why := ""
	for _, c := range r.Connects {
		switch {
		case c.Refused:
			refused = append(refused, c.Address.String())
		case c.Error != "":
			silent = append(silent, c.Address.String())
			why = c.Error
		}
	}
	failed := len(refused) + len(silent)
	switch {
	case len(r.Connects) == 0:
		return nil
	case failed == 0:
		return []Check{{Level: OK, What: "endpoints", Text: fmt.Sprintf("%s connects to %s", node,
			plural(len(r.Connects), "endpoint"))}}
	}
	check := Check{Level: Wrong, What: "node " + node, Reason: lb.ReasonEndpointUnreachable}
	if failed < len(r.Connects) {
		check.Level = Warning
	}
	if len(refused) > 0 {
		check.Text = fmt.Sprintf("nothing listens at %s: %s is refused by %d of %s; most likely targetPort is not a port of "+
			"the pods", list(refused, 3), node, len(refused), plural(len(r.Connects), "endpoint"))
		check.Cure = fill("kubectl describe service NAME   # is its TargetPort a port where the pods listen?", e.names("")...)
		return []Check{check}
	}
	check.Text = fmt.Sprintf("%s cannot connect to %d of %s, %s (%s): a NetworkPolicy or firewall drops it, or the pod "+
		"network does not carry it", node, len(silent), plural(len(r.Connects), "endpoint"), list(silent, 3), why)
	check.Cure = fmt.Sprintf("kubectl get networkpolicies -n %s   # do they let the nodes in? if so, look at the network "+
		"plugin (CNI)", e.Key.Namespace)
	return []Check{check}
}

// unrouted checks that a node has a route back to clients. A family that ends at the LAN, beside one that does
// not, is most likely meant so.
func (e explanation) unrouted(node string, r *lb.Reach) []Check {
	var lost []string
	families, none := map[lb.Family]bool{}, map[lb.Family]bool{}
	for _, w := range r.Walks {
		from := w.Packet.Source.Addr()
		if families[lb.FamilyOf(from)] = true; !w.NoRoute {
			continue
		}
		none[lb.FamilyOf(from)] = true
		if !slices.Contains(lost, from.String()) {
			lost = append(lost, from.String())
		}
	}
	level := Warning
	switch {
	case len(lost) == 0:
		return nil
	case len(none) < len(families):
		level = Note
	}
	return []Check{{Level: level, What: "node " + node, Reason: lb.ReasonClientsUnrouted,
		Text: fmt.Sprintf("%s has no route back to clients outside of its own subnets, such as %s: replies to them are lost",
			node, strings.Join(lost, ", ")), Cure: "ip route   # on " + node + ": is there a default route?"}}
}
