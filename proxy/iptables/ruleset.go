package iptables

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	newConnections = "-m conntrack --ctstate NEW"
	// untracked matches messages of neighbor discovery and of groups: connection tracking leaves them out, so they are
	// never new.
	untracked = "-m conntrack --ctstate UNTRACKED"
)

// hooks are the jumps that we have in the built-in chains, in their order.
func (r renderer) hooks() tables {
	jump := func(comment, match, target string) string {
		return rule{match: match, comment: comment, target: target}.hook()
	}
	portals := jump("landfall service portals", "", chainServices)
	firewall := jump("landfall load balancer firewall", newConnections, chainFirewall)
	forward := jump("landfall forwarding rules", "", chainForward)
	services := jump("landfall service portals", newConnections, chainServices)
	external := jump("landfall externally-visible service portals", newConnections, chainExternal)
	healthPorts := jump("landfall health check service ports", "", chainNodePorts)
	vips := jump("landfall: port or protocol that no Service has at a VIP", newConnections, chainVIPs)
	t := tables{
		nat: chains{
			"PREROUTING":  {r.outsidePortals(portals)},
			"OUTPUT":      {portals},
			"POSTROUTING": {jump("landfall postrouting rules", "", chainPostrouting)},
		},
		filter: chains{
			// What has no endpoint is refused before the firewall could drop it in silence.
			"INPUT":   {healthPorts, external, firewall},
			"FORWARD": {forward, services, external, firewall, vips},
			"OUTPUT":  {services, external, firewall, vips}, // a node that connects is refused as fast as anybody
		},
	}
	if r.family == lb.IPv6 {
		t.filter["FORWARD"] = append(t.filter["FORWARD"], rule{protocol: "IPV6-ICMP", match: untracked, target: chainVIPs,
			comment: "landfall: neighbor discovery to a VIP"}.String())
	}
	if r.loopbackNodePorts() {
		martians := jump("landfall: packets from outside never reach 127.0.0.0/8", "", chainMartians)
		t.filter["INPUT"] = append(t.filter["INPUT"], martians)
		t.filter["OUTPUT"] = append(t.filter["OUTPUT"], martians)
	}
	return t
}

// outsidePortals returns the jump for packets that come in. With route_localnet the kernel lets in those for
// 127.0.0.0/8, and the rules for node ports would lead them past what drops them.
func (r renderer) outsidePortals(portals string) string {
	if !r.loopbackNodePorts() {
		return portals
	}
	return rule{dst: r.loopback(), notDst: true, comment: "landfall service portals", target: chainServices}.String()
}

// base returns our own chains with the rules that do not depend on any Service. What comes after
// those that do is left to last.
func (r renderer) base() tables {
	mark := r.mark()
	t := tables{
		nat: chains{
			chainServices:   {},
			chainNodePorts:  {},
			chainMasquerade: {rule{target: "MARK --set-xmark " + mark + "/" + mark}.String()},
			chainPostrouting: {
				rule{match: "-m mark ! --mark " + mark + "/" + mark, target: "RETURN"}.String(),
				// The mark goes, so that a packet that comes by again inside a tunnel is not masqueraded twice.
				rule{target: "MARK --set-xmark " + mark + "/0x0"}.String(),
				rule{comment: "landfall service traffic requiring SNAT", target: "MASQUERADE --random-fully"}.String(),
			},
		},
		filter: chains{
			chainServices: {},
			// Tenants choose how many of these a packet meets: what is served goes by.
			chainExternal: {
				rule{comment: "landfall: served by somebody", match: "-m conntrack --ctstate DNAT", target: "RETURN"}.String()},
			chainNodePorts: {},
			chainFirewall:  {},
			chainRefuse: {
				rule{protocol: lb.TCP, target: r.refuse(lb.TCP)}.String(),
				rule{target: r.refuse(lb.UDP)}.String(),
			},
			chainClusterIPs: {},
			chainVIPs: {
				rule{comment: "landfall: served by somebody", match: "-m conntrack --ctstate DNAT", target: "RETURN"}.String(),
				rule{comment: "landfall: addresses of the node", match: toLocalAddress, target: "RETURN"}.String(),
				r.echoRequests(rule{comment: "landfall: pings", target: "RETURN"}),
			},
			chainForward: {
				rule{comment: "landfall service traffic", match: "-m mark --mark " + mark + "/" + mark, target: "ACCEPT"}.String(),
				rule{comment: "landfall replies", match: "-m conntrack --ctstate RELATED,ESTABLISHED", target: "ACCEPT"}.String(),
			},
		},
	}
	if r.config.AnswerPing {
		// Addresses of Services are in a chain of their own, which only pings walk through.
		t.nat[chainServices] = []string{
			r.echoRequests(rule{comment: "landfall: addresses of Services answer ping", target: chainEcho})}
		t.nat[chainEcho] = []string{}
	}
	if r.config.Relay {
		t.nat[chainRelay] = r.relay()
	}
	if r.config.SetRouteLocalnet && r.family == lb.IPv4 {
		t.filter[chainLocalnet] = []string{}
	}
	if r.config.DropInvalid {
		t.filter[chainForward] = slices.Insert(t.filter[chainForward], 0,
			rule{match: "-m conntrack --ctstate INVALID", target: "DROP"}.String())
	}
	if r.loopbackNodePorts() {
		t.filter[chainMartians] = []string{rule{
			src: r.loopback(), notSrc: true, dst: r.loopback(), comment: "block incoming localnet connections",
			match: "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", target: "DROP",
		}.String()}
	}
	return t
}

// echoRequests renders a rule for the questions of pings.
func (r renderer) echoRequests(to rule) string {
	to.protocol, to.match = "ICMP", "-m icmp --icmp-type 8"
	if r.family == lb.IPv6 {
		to.protocol, to.match = "IPV6-ICMP", "-m icmp6 --icmpv6-type 128"
	}
	return to.String()
}

// hook renders a jump from a built-in chain: there the connection state is matched first.
func (r rule) hook() string {
	s := ""
	if r.match != "" {
		s = r.match + " "
		r.match = ""
	}
	return s + r.String()
}

// last returns the rules that come after all Services' ones in a chain.
func (r renderer) last(at place) []string {
	var rules []string
	switch at {
	case place{filter: true, chain: chainServices}:
		for _, p := range r.config.ServiceNetworks { // still for one of them, after all translation
			if lb.FamilyOf(p.Addr()) == r.family {
				rules = append(rules, r.clusterIPs(p.Masked()),
					rule{dst: p.Masked(), comment: "landfall: cluster IP that no Service has", match: notToLocalAddress,
						target: "DROP"}.String())
			}
		}
		if len(rules) == 0 { // the networks are not known
			rules = append(rules, r.clusterIPs(netip.Prefix{}))
		}
		return rules
	case place{chain: chainServices}:
	default:
		return nil
	}
	for _, at := range r.nodePortAddresses() {
		at.comment, at.target = "landfall service node ports; NOTE: this must be the last rule in this chain", chainNodePorts
		rules = append(rules, at.String())
	}
	return rules
}

// clusterIPs renders the jump to what refuses connections to cluster IPs.
func (r renderer) clusterIPs(network netip.Prefix) string {
	return rule{dst: network, comment: "landfall: port or protocol that a cluster IP does not have",
		match: notToLocalAddress, target: chainClusterIPs}.String()
}
