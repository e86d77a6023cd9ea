package rescue

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// cluster is where the nodes are.
type cluster struct {
	known        bool
	self, others []netip.Addr
	handing      handing
}

// handing is what other nodes may hand over through the tunnel.
type handing struct {
	known bool
	// vips are the addresses for which they do. far are the nodes behind routers, with which this node exchanges it.
	vips, far []netip.Addr
}

func (h handing) equal(other handing) bool {
	return h.known == other.known && slices.Equal(h.vips, other.vips) && slices.Equal(h.far, other.far)
}

// carrier is the tunnel of one family, to the nodes behind routers.
type carrier struct {
	// removed is set once it is certain that there is none.
	removed bool
	refused uint64 // packets that it has counted
	failed  string // why there is none; "" if there is one, or none is needed
	used    cluster
}

// SetNodes takes the addresses of this node and of the others, from which packets are taken. It
// never blocks.
func (a *Actor) SetNodes(self, others []netip.Addr) {
	others = slices.Clone(others)
	slices.SortFunc(others, netip.Addr.Compare)
	a.setCluster(func(c *cluster) { c.known, c.self, c.others = true, slices.Clone(self), others })
}

// SetDirect takes the addresses for which this node takes what is handed over through the tunnel, and the nodes
// behind routers, both in order. While there are some of both, there is a tunnel, with or without a ring. What was
// set by a predecessor stays until it is called. It never blocks.
func (a *Actor) SetDirect(vips, far []netip.Addr) {
	a.setCluster(func(c *cluster) { c.handing = handing{true, slices.Clone(vips), slices.Clone(far)} })
}

func (a *Actor) setCluster(change func(*cluster)) {
	a.mu.Lock()
	before := a.cluster
	change(&a.cluster)
	same := a.cluster.equal(before)
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

func (c cluster) equal(other cluster) bool {
	return c.known == other.known && slices.Equal(c.self, other.self) && slices.Equal(c.others, other.others) &&
		c.handing.equal(other.handing)
}

func (a *Actor) nodesNow() cluster {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.cluster
}

// sameCluster reports whether the tunnels that are there were made with the nodes of now.
func (a *Actor) sameCluster() bool {
	now := a.nodesNow()
	for _, family := range a.families {
		c := a.tunnels[family]
		if !c.used.equal(now) && (!c.removed || a.exchanges(family)) {
			return false
		}
	}
	return true
}

// Refused returns how many packets were dropped that came to the tunnels from elsewhere than a node,
// or that no node moves.
func (a *Actor) Refused() uint64 { return a.refused.Load() }

// carry makes the tunnel to those nodes of a family that are behind routers, if rings have such, and
// puts into found how they are reached. The reason why that cannot be done is logged once.
func (a *Actor) carry(family lb.Family, found map[netip.Addr]links.Neighbor) {
	c := a.tunnels[family]
	c.used = a.nodesNow()
	d := tunnel.Desired{}
	for node, n := range found {
		if n.Routed {
			d.Peers = append(d.Peers, node)
			if d.MTU == 0 || n.MTU < d.MTU {
				d.MTU = n.MTU
			}
		}
	}
	slices.SortFunc(d.Peers, netip.Addr.Compare)
	state, err := tunnel.State{}, error(nil)
	switch {
	case len(d.Peers) > 0 && (a.spreads(family) || a.exchanges(family)):
		c.removed = false
		if c.used.known {
			d.Self, _ = of(family, c.used.self)
			d.Nodes = allOf(family, c.used.others)
		}
		d.DirectKnown, d.Direct = c.used.handing.known, allOf(family, c.used.handing.vips)
		state, err = a.kernel.carry(family, d)
		switch {
		case state.Refused >= c.refused:
		case err == nil:
			c.refused = 0 // the rules were written anew
		default:
			state.Refused = c.refused // nothing was counted
		}
		a.refused.Add(state.Refused - c.refused)
		c.refused = state.Refused
	case !c.removed && c.used.handing.known:
		err = a.kernel.uncarry(family)
		if c.removed = err == nil; c.removed {
			c.refused = 0
		}
	}
	for _, node := range d.Peers {
		if found[node] = (links.Neighbor{Link: found[node].Link, Routed: true}); err == nil && state.Link != 0 {
			found[node] = links.Neighbor{MAC: tunnel.MAC(node), Link: state.Link, Found: true, Routed: true, MTU: state.MTU}
		}
	}
	c = a.tell(family, c, err)
	a.tunnels[family] = c
}

// tell says of a failure that is another one than before, and when it is over.
func (a *Actor) tell(family lb.Family, c carrier, err error) carrier {
	text := ""
	if err != nil && !errors.Is(err, errNoTunnel) {
		text = err.Error()
	}
	if text == c.failed {
		return c
	}
	if c.failed = text; text != "" {
		a.log.Warn("cannot pass on connections to nodes behind routers", "family", family, "error", err)
	} else {
		a.log.Info("can pass on connections to nodes behind routers again", "family", family)
	}
	for _, other := range a.families {
		if text == "" && other != family {
			text = a.tunnels[other].failed
		}
	}
	if a.noTunnel != nil {
		a.noTunnel(text)
	}
	return c
}

// errNoTunnel is for a node that shall have none.
var errNoTunnel = errors.New("tunnels are switched off")

// allOf returns the addresses of a family.
func allOf(family lb.Family, addrs []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return lb.FamilyOf(a) != family })
}

// exchanges reports whether nodes behind routers may hand something over for an address of a family.
func (a *Actor) exchanges(family lb.Family) bool {
	h := a.nodesNow().handing
	return len(allOf(family, h.vips)) > 0 && len(allOf(family, h.far)) > 0
}

// tunneling reports whether there are tunnels to look after: nodes exchange something, or one could not be removed.
func (a *Actor) tunneling() bool {
	return slices.ContainsFunc(a.families, func(f lb.Family) bool { return a.exchanges(f) || a.tunnels[f].failed != "" })
}

// of returns the first address of a family.
func of(family lb.Family, addrs []netip.Addr) (netip.Addr, bool) {
	i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return lb.FamilyOf(a) == family })
	if i < 0 {
		return netip.Addr{}, false
	}
	return addrs[i], true
}

// spreads reports whether routers spread an address of a family over nodes.
func (a *Actor) spreads(family lb.Family) bool {
	for vip, o := range a.all {
		if lb.FamilyOf(vip) == family && len(o.Ring) > 0 {
			return true
		}
	}
	return false
}

func (k Kernel) carry(family lb.Family, d tunnel.Desired) (tunnel.State, error) {
	if k.tunnels == nil {
		return tunnel.State{}, errNoTunnel
	}
	return k.tunnels.Set(family, d)
}

func (k Kernel) uncarry(family lb.Family) error {
	if k.tunnels == nil {
		return nil
	}
	return k.tunnels.Remove(family)
}
