package iptables

import (
	"cmp"
	"maps"
	"slices"
)

const newConnections = "-m conntrack --ctstate NEW"

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
	t := tables{
		nat: chains{
			"PREROUTING":  {portals},
			"OUTPUT":      {portals},
			"POSTROUTING": {jump("landfall postrouting rules", "", chainPostrouting)},
		},
		filter: chains{
			// What has no endpoint is refused before the firewall could drop it in silence.
			"INPUT":   {healthPorts, external, firewall},
			"FORWARD": {forward, services, external, firewall},
			"OUTPUT":  {services, external, firewall}, // a node that connects is refused as fast as anybody
		},
	}
	if r.loopbackNodePorts() {
		martians := jump("landfall: packets from outside never reach 127.0.0.0/8", "", chainMartians)
		t.filter["INPUT"] = append(t.filter["INPUT"], martians)
		t.filter["OUTPUT"] = append(t.filter["OUTPUT"], martians)
	}
	return t
}

// base returns our own chains with the rules that do not depend on any Service. The node port jump, which has to be the last
// rule of its chain, is left to ruleset.
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
			chainServices:  {},
			chainExternal:  {},
			chainNodePorts: {},
			chainFirewall:  {},
			chainForward: {
				rule{comment: "landfall service traffic", match: "-m mark --mark " + mark + "/" + mark, target: "ACCEPT"}.String(),
				rule{comment: "landfall replies", match: "-m conntrack --ctstate RELATED,ESTABLISHED", target: "ACCEPT"}.String(),
			},
		},
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

// hook renders a jump from a built-in chain: there the connection state is matched first.
func (r rule) hook() string {
	s := ""
	if r.match != "" {
		s = r.match + " "
		r.match = ""
	}
	return s + r.String()
}

// ruleset returns all of our chains for the given Services.
func (r renderer) ruleset(services []contribution) tables {
	t := r.base()
	byChain := map[bool]map[string][]entry{false: {}, true: {}}
	for _, c := range services {
		maps.Copy(t.nat, c.chains)
		for _, e := range c.entries {
			byChain[e.filter][e.chain] = append(byChain[e.filter][e.chain], e)
		}
	}
	for filter, entries := range byChain {
		into := t.nat
		if filter {
			into = t.filter
		}
		for chain, list := range entries {
			slices.SortFunc(list, func(a, b entry) int { return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.rule, b.rule)) })
			for _, e := range list {
				into[chain] = append(into[chain], e.rule)
			}
			into[chain] = unique(into[chain])
		}
	}
	for _, at := range r.nodePortAddresses() {
		at.comment, at.target = "landfall service node ports; NOTE: this must be the last rule in this chain", chainNodePorts
		t.nat[chainServices] = append(t.nat[chainServices], at.String())
	}
	return t
}

// unique drops repetitions, which two Services with the same address and port would cause.
func unique(rules []string) []string {
	seen := make(map[string]bool, len(rules))
	return slices.DeleteFunc(rules, func(rule string) bool {
		repeated := seen[rule]
		seen[rule] = true
		return repeated
	})
}
