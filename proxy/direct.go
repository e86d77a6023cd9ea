package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/across"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// direct is what the loop knows of direct forwarding.
type direct struct {
	// asking are the Services that ask for it, held are the VIPs with holders of each.
	asking map[lb.Key]bool
	held   map[lb.Key][]netip.Addr
	// neighbors are the nodes to which packets can be handed, left says of those behind routers why not, and
	// senders are those from which they come: see plan.Node.
	neighbors map[string][]netip.Addr
	left      map[plan.FarNode]plan.Unhanded
	senders   []lb.MAC
	// far are the addresses behind routers that plan.Share gives, in order, and asks those of them to which each
	// Service has something handed over if they answer.
	far  []netip.Addr
	asks map[lb.Key][]netip.Addr
	// asked has for each of these how many Services do.
	asked map[netip.Addr]int
	// others are the addresses of all other nodes, in order.
	others []netip.Addr
	// serves are the addresses, by Service, that the rules in the kernel forward directly; fresh is set if the
	// tunnel has not been told of them.
	serves map[lb.Key][]netip.Addr
	fresh  bool
	// links are the interfaces to other nodes.
	links []int
	// holders are, by VIP and Service, the nodes that may hold connections to the VIP beside those that
	// the speaker names, by their addresses of the VIP's family: the other nodes with endpoints, and those
	// that had some, each until a time.
	holders map[netip.Addr]map[lb.Key]holding
	// counts has for each VIP of how many Services a node is a holder: so a change of one that shares the VIP with
	// many costs what it changes.
	counts map[netip.Addr]*holderCounts
	// changed are the VIPs with other holders than the rescue was told, and listens is set if others may have to be
	// told from where packets are handed over: both once in a step, however many Services bring that about.
	changed map[netip.Addr]bool
	listens bool
	// due are the Services of which nodes are asked until a time, and when the first of these has come;
	// each Service once, the earliest first.
	due []deadline
}

// holding are nodes, and until when they are asked; zero while they have endpoints.
type holding map[netip.Addr]time.Time

func newDirect() direct {
	return direct{asking: map[lb.Key]bool{}, held: map[lb.Key][]netip.Addr{},
		holders: map[netip.Addr]map[lb.Key]holding{},
		counts:  map[netip.Addr]*holderCounts{}, changed: map[netip.Addr]bool{}, asked: map[netip.Addr]int{},
		asks: map[lb.Key][]netip.Addr{}, serves: map[lb.Key][]netip.Addr{}, fresh: true}
}

// next returns how long to wait until a node need not be asked any more; 0 when none is to be forgotten.
func (d *direct) next(now time.Time) time.Duration {
	if len(d.due) == 0 {
		return 0
	}
	return max(d.due[0].at.Sub(now), time.Millisecond)
}

// meet takes in to which nodes packets can be handed and which MAC addresses nodes have, and marks the
// Services that ask for it as dirty if that has changed.
func (p *proxy) meet(nodes map[string]lb.Node, now time.Time) {
	near, far := plan.Neighbors(p.self, nodes, p.facts.networks)
	neighbors, left, senders := near, map[plan.FarNode]plan.Unhanded(nil), p.direct.senders
	if p.to.senders != nil {
		senders = p.to.senders.Known()
	}
	share := plan.Share(far, across.MaxNodes)
	if p.to.across != nil {
		neighbors, left = through(near, far, share, p.to.across.States(), senders, p.isLeftOut(near, far))
	}
	if !maps.EqualFunc(neighbors, p.direct.neighbors, slices.Equal) || !slices.Equal(senders, p.direct.senders) ||
		!maps.Equal(left, p.direct.left) || !slices.Equal(share, p.direct.far) {
		p.direct.fresh = p.direct.fresh || !slices.Equal(share, p.direct.far)
		p.direct.neighbors, p.direct.left, p.direct.senders, p.direct.far = neighbors, left, senders, share
		p.markThose(slices.Collect(maps.Keys(p.direct.asking)), now)
	}
	p.direct.links = linksTo(p.facts.lans, near)
	p.direct.others = otherNodes(nodes, p.self)
	slices.SortFunc(p.direct.others, netip.Addr.Compare)
	p.direct.listens = true
}

// through returns to which addresses packets can be handed with what the nodes behind routers of this node's share have
// answered, and why not to others. The rules have to know a node's frames, in which packets may come back. A silent
// node may have leftOut this one.
func through(near, far map[string][]netip.Addr, share []netip.Addr, states map[netip.Addr]across.State,
	senders []lb.MAC, leftOut func(netip.Addr) bool) (
	neighbors map[string][]netip.Addr, left map[plan.FarNode]plan.Unhanded) {
	why := func(a netip.Addr) plan.Unhanded {
		_, shared := slices.BinarySearchFunc(share, a, netip.Addr.Compare)
		switch state := states[a]; {
		case !shared:
			return plan.TooMany
		case state == across.Silent && leftOut(a):
			return plan.Unshared
		case state == across.Silent:
			return plan.Silent
		case state == across.Diverted:
			return plan.Diverted
		case state == across.Answers && slices.Contains(senders, lb.MAC(tunnel.MAC(a))):
			return plan.Handed
		}
		return plan.Unasked
	}
	return plan.Reached(near, far, why, tunnel.Alias)
}

// isLeftOut returns what reports whether a far node exchanges no packets with this one, as there are too many nodes.
// The networks of other nodes are not known, and are taken for as long as those of this one.
func (p *proxy) isLeftOut(near, far map[string][]netip.Addr) func(netip.Addr) bool {
	own := p.facts.node.Addresses
	all := slices.Concat(own, slices.Concat(slices.Collect(maps.Values(near))...),
		slices.Concat(slices.Collect(maps.Values(far))...))
	return func(node netip.Addr) bool {
		self := slices.IndexFunc(own, func(a netip.Addr) bool { return lb.FamilyOf(a) == lb.FamilyOf(node) })
		if self < 0 || len(all) <= across.MaxNodes {
			return false
		}
		var networks []netip.Prefix
		for _, addrs := range far {
			if slices.Contains(addrs, node) {
				networks = alike(addrs, own, p.facts.networks)
			}
		}
		return plan.IsLeftOut(own[self], networks, all, across.MaxNodes)
	}
}

// alike returns networks of some addresses that are as long as those of this node.
func alike(addrs, own []netip.Addr, networks []netip.Prefix) (all []netip.Prefix) {
	for _, network := range networks {
		if !slices.ContainsFunc(own, network.Contains) {
			continue
		}
		for _, addr := range addrs {
			if lb.FamilyOf(addr) == lb.FamilyOf(network.Addr()) {
				all = append(all, netip.PrefixFrom(addr, network.Bits()))
			}
		}
	}
	return all
}

// serve tells the tunnel for which addresses this node takes what is handed over, once it is known what the kernel
// has. What comes for others goes back, and its sender masquerades it.
func (p *proxy) serve() {
	if !p.direct.fresh || !p.complete || len(p.settings.direct) == 0 {
		return
	}
	p.direct.fresh = false
	var vips, far []netip.Addr
	for _, of := range p.direct.serves {
		vips = append(vips, of...)
	}
	slices.SortFunc(vips, netip.Addr.Compare)
	if vips = slices.Compact(vips); len(vips) > 0 && p.to.across != nil {
		far = p.direct.far
	}
	p.to.rescue.SetDirect(vips, far)
}

// confirmed takes in what the kernel has of a Service: also an address that it has lost and that its rules still serve.
func (d *direct) confirmed(s plan.Service) {
	vips := s.DirectVIPs()
	if slices.Equal(vips, d.serves[s.Key]) {
		return
	}
	if d.fresh, d.serves[s.Key] = true, vips; len(vips) == 0 {
		delete(d.serves, s.Key)
	}
}

// listen has those told who need to know from where packets are handed over, while some are.
func (p *proxy) listen() {
	links := p.direct.links
	if len(p.direct.holders) == 0 {
		links = nil
	}
	p.to.rescue.SetHanded(links)
	if p.to.across != nil {
		all := slices.SortedFunc(maps.Keys(p.direct.asked), netip.Addr.Compare)
		p.to.across.Set(across.Nodes{Self: p.facts.node.Addresses, Others: all})
	}
	if p.to.senders == nil {
		return
	}
	var others []netip.Addr
	if len(p.direct.asking) > 0 {
		others = p.direct.others
	}
	p.to.senders.Set(others)
}

// lansOf returns the interfaces over which packets can be handed to other nodes.
func lansOf(interfaces []lb.Interface) (lans []lb.Interface) {
	for _, i := range interfaces {
		if !i.Disabled && !i.Loopback && !i.NoARP && len(i.MAC) > 0 && !holdsOthers(i) {
			lans = append(lans, i)
		}
	}
	return lans
}

// networksOf returns the networks that interfaces are in.
func networksOf(interfaces []lb.Interface) (networks []netip.Prefix) {
	for _, i := range interfaces {
		networks = append(networks, i.Addresses...)
	}
	return networks
}

// linksTo returns the interfaces, by their indexes and in order, in whose networks there are neighbors.
func linksTo(lans []lb.Interface, neighbors map[string][]netip.Addr) (links []int) {
	for _, i := range lans {
		for _, addrs := range neighbors {
			if !slices.Contains(links, i.Index) && slices.ContainsFunc(addrs, func(a netip.Addr) bool {
				_, near := i.Subnet(a)
				return near
			}) {
				links = append(links, i.Index)
			}
		}
	}
	slices.Sort(links)
	return links
}

// macsOf returns what looks up the MAC addresses of nodes. Behind a router a node has that of the tunnel,
// through which it moves packets here.
func macsOf(near *links.Neighbors) func([]netip.Addr) (map[netip.Addr]lb.MAC, error) {
	return func(nodes []netip.Addr) (map[netip.Addr]lb.MAC, error) {
		macs := map[netip.Addr]lb.MAC{}
		for _, family := range allFamilies {
			of := slices.DeleteFunc(slices.Clone(nodes), func(a netip.Addr) bool { return lb.FamilyOf(a) != family })
			if len(of) == 0 {
				continue
			}
			found, err := near.Look(family, of)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", family, err)
			}
			for addr, n := range found {
				if n.Routed {
					macs[addr] = tunnel.MAC(addr)
				} else if n.Found {
					macs[addr] = n.MAC
				}
			}
		}
		return macs, nil
	}
}

// nodeFor returns what planning a Service has to know about this node.
func (p *proxy) nodeFor(svc lb.Service) plan.Node {
	node := p.facts.node
	if svc.Forwarding != "" {
		node.Neighbors, node.Far, node.Senders = p.direct.neighbors, p.direct.left, p.direct.senders
	}
	return node
}

// forward takes in whether the Service is forwarded directly, and why it is not. A packet of a connection
// that the node in the table does not know, as after a change of endpoints, is then looked for at all
// nodes with endpoints, and at those that masqueraded. tellDirect tells others of that.
func (p *proxy) forward(r *record, svc lb.Service, endpoints []lb.Slice, now time.Time) {
	key, asked := r.live.Key, len(p.direct.asking)
	r.directRefused = plan.DirectRefused(svc, endpoints, p.facts.node)
	if r.directRefused == "" {
		r.directRefused = cmp.Or(plan.NotHanded(r.live, endpoints, p.nodeFor(svc)),
			plan.NotHandedFromVRFs(r.live, p.facts.node))
	}
	if p.direct.asking[key] = true; svc.Forwarding == "" {
		delete(p.direct.asking, key)
	}
	changed, counts := p.direct.changed, p.direct.counts
	had := p.direct.held[key]
	for _, vip := range had {
		if !slices.Contains(r.live.VIPs, vip) {
			counts[vip].drop(p.direct.holders[vip][key])
			delete(p.direct.holders[vip], key)
			changed[vip] = true
		}
	}
	var held []netip.Addr
	next, nodes := time.Time{}, map[lb.Family][]netip.Addr{}
	for _, vip := range r.live.VIPs {
		by := p.direct.holders[vip]
		holders, holds := by[key]
		var with []netip.Addr
		if r.live.Direct {
			family := lb.FamilyOf(vip)
			if nodes[family] == nil {
				nodes[family] = p.nodesWith(endpoints, family)
			}
			with = nodes[family]
			if by == nil {
				by = map[lb.Key]holding{}
				p.direct.holders[vip], counts[vip] = by, newHolderCounts()
			}
			if !holds {
				holders, changed[vip] = holding{}, true
				by[key] = holders
			}
		}
		if holders.hold(with, now, counts[vip]) {
			changed[vip] = true
		}
		for _, until := range holders {
			if !until.IsZero() && (next.IsZero() || until.Before(next)) {
				next = until
			}
		}
		if len(holders) == 0 && !r.live.Direct {
			if delete(by, key); holds {
				changed[vip] = true
			}
			continue
		}
		held = append(held, vip)
	}
	if len(held)+len(had) > 0 {
		p.direct.remind(key, next)
	}
	if p.direct.held[key] = held; held == nil {
		delete(p.direct.held, key)
	}
	if p.ask(r, endpoints) || len(p.direct.asking) != asked {
		p.direct.listens = true
	}
}

// tellDirect tells others once what forward and meet have found in a step.
func (p *proxy) tellDirect() {
	changed := p.direct.changed
	if len(changed) > 0 {
		p.direct.changed = map[netip.Addr]bool{}
		p.tellHolders(changed)
	}
	if len(changed) > 0 || p.direct.listens {
		p.direct.listens = false
		p.listen()
	}
}

// ask notes which nodes behind routers have endpoints of a Service, and reports whether others do than before.
func (p *proxy) ask(r *record, endpoints []lb.Slice) (changed bool) {
	var nodes []netip.Addr
	if r.live.Direct && len(r.live.VIPs) > 0 {
		for _, family := range r.families {
			for _, node := range p.nodesWith(endpoints, family) {
				if _, far := slices.BinarySearchFunc(p.direct.far, node, netip.Addr.Compare); far {
					nodes = append(nodes, node)
				}
			}
		}
	}
	before := p.direct.asks[r.live.Key]
	if changed = !slices.Equal(nodes, before); changed {
		for _, node := range before {
			countNode(p.direct.asked, node, -1)
		}
		for _, node := range nodes {
			countNode(p.direct.asked, node, 1)
		}
	}
	if p.direct.asks[r.live.Key] = nodes; len(nodes) == 0 {
		delete(p.direct.asks, r.live.Key)
	}
	return changed
}

// holderCounts have for each node of how many Services it has endpoints now, and of how many it had some before.
type holderCounts struct{ now, before map[netip.Addr]int }

func newHolderCounts() *holderCounts {
	return &holderCounts{map[netip.Addr]int{}, map[netip.Addr]int{}}
}

// countNode counts a node so many times more. One that is counted no more is left out.
func countNode(counts map[netip.Addr]int, node netip.Addr, more int) {
	if counts[node] += more; counts[node] == 0 {
		delete(counts, node)
	}
}

// drop takes away what a Service counts for.
func (c *holderCounts) drop(h holding) {
	for node, until := range h {
		if until.IsZero() {
			countNode(c.now, node, -1)
		} else {
			countNode(c.before, node, -1)
		}
	}
}

// hold notes and counts which nodes have endpoints of a Service, and reports whether other nodes are to be asked
// than before. A node that has none any more may hold connections for as long as nodes remember a silent one.
func (h holding) hold(with []netip.Addr, now time.Time, counts *holderCounts) (changed bool) {
	for _, node := range with {
		if until, known := h[node]; !known || !until.IsZero() {
			if known {
				countNode(counts.before, node, -1)
			}
			h[node], changed = time.Time{}, true
			countNode(counts.now, node, 1)
		}
	}
	for node, until := range h {
		switch {
		case slices.Contains(with, node):
		case until.IsZero():
			h[node], changed = now.Add(lb.FlowMemory), true
			countNode(counts.now, node, -1)
			countNode(counts.before, node, 1)
		case !now.Before(until):
			delete(h, node)
			changed = true
			countNode(counts.before, node, -1)
		}
	}
	return changed
}

// remind has a Service be marked as dirty at a time, and at no other; at zero never.
func (d *direct) remind(key lb.Key, at time.Time) {
	i := slices.IndexFunc(d.due, func(other deadline) bool { return other.key == key })
	if i >= 0 {
		if d.due[i].at.Equal(at) {
			return
		}
		d.due = slices.Delete(d.due, i, i+1)
	}
	if !at.IsZero() {
		i, _ = slices.BinarySearchFunc(d.due, at, func(other deadline, at time.Time) int { return other.at.Compare(at) })
		d.due = slices.Insert(d.due, i, deadline{key, at})
	}
}

// expire marks the Services as dirty of which a node need not be asked any more.
func (p *proxy) expire(now time.Time) {
	var keys []lb.Key
	for len(p.direct.due) > 0 && !now.Before(p.direct.due[0].at) {
		keys = append(keys, p.direct.due[0].key)
		p.direct.due = p.direct.due[1:]
	}
	p.markThose(keys, now)
}

// tellHolders tells the rescue which nodes may hold connections to some VIPs.
func (p *proxy) tellHolders(vips map[netip.Addr]bool) {
	changes := map[netip.Addr]*rescue.Origins{}
	for vip := range vips {
		if len(p.direct.holders[vip]) == 0 {
			delete(p.direct.holders, vip)
			delete(p.direct.counts, vip)
		}
		if o := p.originsOf(vip); o != nil { // else the speaker has not named it yet, or says itself that it has ended
			changes[vip] = o
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
	if len(p.direct.holders[vip]) == 0 {
		return &origins
	}
	// If there are too many, those come first that new connections are handed to.
	now := slices.SortedFunc(maps.Keys(p.direct.counts[vip].now), netip.Addr.Compare)
	before := slices.SortedFunc(maps.Keys(p.direct.counts[vip].before), netip.Addr.Compare)
	own := p.facts.node.Addresses
	var distinct []netip.Addr
	for _, addr := range slices.Concat(now, origins.Ring, origins.Previous, before) {
		if !slices.Contains(own, addr) && !slices.Contains(distinct, addr) && len(distinct) < lb.MaxRing {
			distinct = append(distinct, addr)
		}
	}
	slices.SortFunc(distinct, netip.Addr.Compare)
	if self := slices.IndexFunc(own, func(a netip.Addr) bool { return lb.FamilyOf(a) == lb.FamilyOf(vip) }); self >= 0 {
		i, _ := slices.BinarySearchFunc(distinct, own[self], netip.Addr.Compare)
		distinct = slices.Concat(distinct[i:], distinct[:i])
	}
	return &rescue.Origins{Previous: origins.Previous, Ring: distinct, Direct: true}
}
