package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// direct is what the loop knows of direct forwarding.
type direct struct {
	// asking are the Services that ask for it.
	asking map[lb.Key]bool
	// neighbors are the nodes to which packets can be handed, see plan.Node.
	neighbors map[string][]netip.Addr
	// holders are, by VIP and Service, the nodes that may hold connections to the VIP beside those that
	// the speaker names: the other nodes with endpoints, by their addresses of the VIP's family.
	holders map[netip.Addr]map[lb.Key][]netip.Addr
}

func newDirect() direct {
	return direct{asking: map[lb.Key]bool{}, holders: map[netip.Addr]map[lb.Key][]netip.Addr{}}
}

// meet takes in to which nodes packets can be handed, and marks the Services that ask for it as dirty if
// that has changed.
func (p *proxy) meet(nodes map[string]lb.Node, now time.Time) {
	neighbors := plan.Neighbors(p.self, nodes, p.facts.networks)
	if !maps.EqualFunc(neighbors, p.direct.neighbors, slices.Equal) {
		p.direct.neighbors = neighbors
		p.markThose(slices.Collect(maps.Keys(p.direct.asking)), now)
	}
}

// networksOf returns the networks that interfaces are in.
func networksOf(interfaces []lb.Interface) (networks []netip.Prefix) {
	for _, i := range interfaces {
		if !i.Disabled && !i.Loopback && !i.NoARP && len(i.MAC) > 0 && !holdsOthers(i) {
			networks = append(networks, i.Addresses...)
		}
	}
	return networks
}

// nodeFor returns what planning a Service has to know about this node.
func (p *proxy) nodeFor(svc lb.Service) plan.Node {
	node := p.facts.node
	if svc.Forwarding != "" {
		node.Neighbors = p.direct.neighbors
	}
	return node
}

// forward takes in whether the Service is forwarded directly, and why it is not. A packet of a connection
// that the node in the table does not know, as after a change of endpoints, is then looked for at all
// nodes with endpoints, and at those that masqueraded.
func (p *proxy) forward(r *record, svc lb.Service, endpoints []lb.Slice) {
	key := r.live.Key
	r.directRefused = plan.DirectRefused(svc, endpoints, p.facts.node)
	if r.directRefused == "" {
		r.directRefused = plan.NotHanded(r.live, endpoints, p.self)
	}
	if p.direct.asking[key] = true; svc.Forwarding == "" {
		delete(p.direct.asking, key)
	}
	changes := map[netip.Addr]*rescue.Origins{}
	vips := r.live.VIPs
	if !r.live.Direct {
		vips = nil
	}
	for vip, by := range p.direct.holders {
		if by[key] != nil && !slices.Contains(vips, vip) {
			delete(by, key)
			changes[vip] = nil
		}
	}
	for _, vip := range vips {
		now := p.nodesWith(endpoints, lb.FamilyOf(vip))
		if by := p.direct.holders[vip]; by != nil && by[key] != nil && slices.Equal(by[key], now) {
			continue
		} else if by == nil {
			p.direct.holders[vip] = map[lb.Key][]netip.Addr{}
		}
		p.direct.holders[vip][key] = now
		changes[vip] = nil
	}
	for vip := range changes {
		if len(p.direct.holders[vip]) == 0 {
			delete(p.direct.holders, vip)
		}
		if changes[vip] = p.originsOf(vip); changes[vip] == nil {
			delete(changes, vip) // the speaker has not named it yet, or says itself that it has ended
		}
	}
	if p.heard && len(changes) > 0 {
		p.to.rescue.Update(changes)
	}
}

// nodesWith returns the addresses of the other nodes with endpoints, sorted; not nil.
func (p *proxy) nodesWith(endpoints []lb.Slice, family lb.Family) []netip.Addr {
	nodes, addrs := map[string]bool{}, []netip.Addr{}
	for _, slice := range endpoints {
		for _, ep := range slice.Endpoints {
			if ep.Node == "" || ep.Node == p.self || nodes[ep.Node] {
				continue
			}
			nodes[ep.Node] = true
			node, _ := p.from.nodes.Get(ep.Node)
			if i := slices.IndexFunc(node.Addresses, func(a netip.Addr) bool { return lb.FamilyOf(a) == family }); i >= 0 {
				addrs = append(addrs, node.Addresses[i])
			}
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

// originsOf returns the nodes that may hold connections to a VIP; nil for one that the speaker has not
// named. With holders they form a ring, in the order of their addresses from this node on and once round.
func (p *proxy) originsOf(vip netip.Addr) *rescue.Origins {
	origins, known := p.origins[vip]
	if !known {
		return nil
	}
	holders := p.direct.holders[vip]
	if len(holders) == 0 {
		return &origins
	}
	ring := slices.Concat(origins.Ring, origins.Previous)
	for _, key := range slices.SortedFunc(maps.Keys(holders), lb.Key.Compare) {
		ring = append(ring, holders[key]...)
	}
	own := p.facts.node.Addresses
	var distinct []netip.Addr
	for _, addr := range ring { // those that the speaker names come first if there are too many
		if !slices.Contains(own, addr) && !slices.Contains(distinct, addr) && len(distinct) < lb.MaxRing {
			distinct = append(distinct, addr)
		}
	}
	slices.SortFunc(distinct, netip.Addr.Compare)
	if self := slices.IndexFunc(own, func(a netip.Addr) bool { return lb.FamilyOf(a) == lb.FamilyOf(vip) }); self >= 0 {
		i, _ := slices.BinarySearchFunc(distinct, own[self], netip.Addr.Compare)
		distinct = slices.Concat(distinct[i:], distinct[:i])
	}
	return &rescue.Origins{Previous: origins.Previous, Ring: distinct}
}
