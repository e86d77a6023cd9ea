package iptables

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// sourcesOf returns who may connect to a port from outside; nil for everybody. VIPs that linger may
// have other sources than those that the Service holds: then it is all of them, which ports share.
func (c *contribution) sourcesOf(p plan.Port) *plan.Sources {
	var all []*plan.Sources
	for _, f := range p.Frontends {
		away := f.Action == plan.Reject || f.Action == plan.Pass && len(p.Backends.Cluster) == 0
		if f.Sources != nil && !away && !slices.Contains(all, f.Sources) {
			all = append(all, f.Sources)
		}
	}
	switch {
	case len(all) == 0:
		return nil
	case len(all) == 1:
		return all[0]
	case slices.Equal(all, c.merged.of):
		return c.merged.sources
	}
	var networks []netip.Prefix
	for _, s := range all {
		networks = append(networks, s.Networks...)
	}
	slices.SortFunc(networks, netip.Prefix.Compare)
	c.merged.of, c.merged.sources = all, &plan.Sources{Networks: slices.Compact(networks)}
	return c.merged.sources
}

// shared returns the chains of sources, which other ports of the Service may bring too.
func (c contribution) shared() chains {
	lists := chains{}
	for _, chain := range c.lists {
		lists[chain] = c.chains[chain]
	}
	return lists
}

// sources adds the chain of a list of networks, and returns its name. What comes from one of them
// returns. All else leaves the table as it came, so that the rules of chainFirewall drop it. The
// ports of a Service share the chain, and none of its rules jumps: iptables-nft follows all jumps
// whenever a rule changes. The name tells lists apart, as ports are written one after the other.
func (c *contribution) sources(key lb.Key, sources *plan.Sources) string {
	if chain, ok := c.lists[sources]; ok {
		return chain
	}
	text := []byte(key.String())
	rules := make([]string, 0, len(sources.Networks)+1)
	for _, network := range sources.Networks {
		text = network.AppendTo(append(text, ' '))
		rules = append(rules, rule{src: network, target: "RETURN"}.String())
	}
	chain := prefixSources + hash(string(text))
	c.chains[chain] = append(rules, rule{comment: key.String() + " other sources", target: "ACCEPT"}.String())
	if c.lists == nil {
		c.lists = map[*plan.Sources]string{}
	}
	c.lists[sources] = chain
	return chain
}
