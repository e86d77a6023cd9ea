package rescue

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// Kernel is this node's. It is not safe for concurrent use.
type Kernel struct {
	conn    *nfnetlink.Conn
	near    *links.Neighbors
	tunnels *tunnel.Kernel
}

// Open opens the way to the kernel, in the network namespace of the calling thread. port is the UDP
// port of the tunnels to nodes behind routers; 0 for none.
func Open(port uint16) (Kernel, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return Kernel{}, err
	}
	near, err := links.OpenNeighbors()
	if err != nil {
		conn.Close()
		return Kernel{}, err
	}
	k := Kernel{conn: conn, near: near}
	if port != 0 {
		if k.tunnels, err = tunnel.Open(port, floor, spent+maxHops); err != nil {
			k.Close()
			return Kernel{}, err
		}
	}
	return k, nil
}

// Close closes it.
func (k Kernel) Close() {
	k.conn.Close()
	k.near.Close()
	if k.tunnels != nil {
		k.tunnels.Close()
	}
}

// held is what the kernel has of one family.
type held struct {
	exists bool
	// sent are the nodes of which connections may be remembered, with the packets that were moved to
	// each.
	sent map[netip.Addr]uint64
	// moving are the rules of the two chains of each.
	moving map[netip.Addr][]string
	// rules are those of the chain of stray packets, see nft.Rule.UserData; errors those of the chain of
	// ICMP errors, segments those of the chain that bounds segments.
	rules, errors, segments []string
	// recall and offRing are those of the chains that follow what is remembered.
	recall, offRing []string
	// limits are those of the chains of limits, one after the other. dropped is how many packets were
	// above one, and flooded for which VIPs, in the last minute.
	limits  []string
	dropped uint64
	flooded []netip.Addr
	// What follows is there if that was asked for: what the sets hold, and the names of those that are
	// in the way of ours.
	table   table
	foreign []string
	// strange are chains that this release does not have. Their rules may use sets of ours.
	strange []string
	// left and leftChains are sets and chains of nodes that lack the rest: a release without onRing has removed them, or
	// a write has failed between two transactions.
	left, leftChains []leftover
}

// leftover is a set or a chain of a node that is not a target.
type leftover struct {
	node netip.Addr
	name string
}

// load reads what is there; with all, the elements of sets too.
func (k Kernel) load(family lb.Family, all bool) (have held, err error) {
	h := headerOf(family)
	err = nfnetlink.Complete(func() (err error) {
		have, err = h.load(nft.Listing{Conn: k.conn, Table: h.table()}, all)
		return err
	})
	if err != nil {
		return have, fmt.Errorf("read the table %s: %w", tableName, err)
	}
	return have, nil
}

func (h header) load(l nft.Listing, all bool) (held, error) {
	have := held{sent: map[netip.Addr]uint64{}, moving: map[netip.Addr][]string{}}
	exists, err := l.Exists()
	if have.exists = exists; err != nil || !exists {
		return have, err
	}
	sets, err := l.Sets()
	if err != nil {
		return have, err
	}
	chains, err := l.Chains()
	if err != nil {
		return have, err
	}
	have.rules, have.segments = chains[chainStrays].Rules, chains[chainSegments].Rules
	have.errors = chains[chainErrors].Rules
	have.recall, have.offRing = chains[chainRecall].Rules, chains[chainOffRing].Rules
	for _, name := range limitChains {
		have.limits = append(have.limits, chains[name].Rules...)
	}
	if have.dropped = chains[chainOver].Packets; have.dropped > 0 {
		if have.flooded, err = h.readAddresses(l, sets, h.timed(setFlooded, floodedFor)); err != nil {
			return have, err
		}
	}
	for set := range sets {
		node, ok := h.nodeOf(prefixFlows, set)
		if !ok {
			continue
		}
		to, right := chains[name(prefixTo, node)]
		first, both := chains[name(prefixNew, node)]
		right = right && both
		for _, set := range []nft.Set{h.vips(node), h.flows(node), h.fresh(node)} {
			right = right && sets[set.Name] == set.Shape()
		}
		if !right {
			continue // what it remembers cannot be kept
		}
		have.sent[node] = to.Packets + first.Packets
		have.moving[node] = slices.Concat(to.Rules, first.Rules)
	}
	if !all {
		return have, nil
	}
	have.table, err = h.read(l, sets, have)
	have.foreign, have.left = h.foreign(sets, have)
	have.strange, have.leftChains = h.strange(chains, have)
	return have, err
}

// foreign are the sets with names of ours that are not as we make them, and those of VIPs for a
// node that lacks the rest. left are the other sets of such nodes.
func (h header) foreign(sets map[string]nft.Shape, have held) (names []string, left []leftover) {
	ours := map[string]nft.Shape{}
	for _, set := range append(h.limitSets(), h.peers(), h.addresses(setRing)) {
		ours[set.Name] = set.Shape()
	}
	for name, shape := range sets {
		node, set, is := h.ofTarget(name)
		if is {
			ours[name] = set.Shape()
		}
		if _, is := hopsOf(name); is {
			ours[name] = h.addresses(name).Shape()
		}
		should, known := ours[name]
		_, whole := have.sent[node]
		switch {
		case known && shape != should, is && !whole && name == h.vips(node).Name:
			names = append(names, name)
		case is && !whole:
			left = append(left, leftover{node, name})
		}
	}
	return names, left
}

// ofTarget returns the set of a target that has a name.
func (h header) ofTarget(text string) (node netip.Addr, set nft.Set, ok bool) {
	for prefix, of := range map[string]func(netip.Addr) nft.Set{
		prefixVIPs: h.vips, prefixOnRing: h.onRing, prefixFlows: h.flows, prefixFresh: h.fresh,
	} {
		if node, ok = h.nodeOf(prefix, text); ok {
			return node, of(node), true
		}
	}
	return node, set, false
}

// strange are the chains that are none of ours. left are those of nodes that lack the rest.
func (h header) strange(chains map[string]nft.Chain, have held) (names []string, left []leftover) {
	ours := append([]string{chainErrors, chainRecall, chainOffRing, chainStrays, chainSegments}, limitChains...)
	for chain := range chains {
		node, is := h.nodeOf(prefixTo, chain)
		if !is {
			node, is = h.nodeOf(prefixNew, chain)
		}
		_, whole := have.sent[node]
		switch {
		case is && !whole:
			left = append(left, leftover{node, chain})
		case !is && !slices.Contains(ours, chain):
			names = append(names, chain)
		}
	}
	return names, left
}

// read reads what the sets hold, sorted. A set that is missing is empty, and will be written.
func (h header) read(l nft.Listing, sets map[string]nft.Shape, have held) (table, error) {
	var errs []error
	addresses := func(set nft.Set) []netip.Addr {
		addrs, err := h.readAddresses(l, sets, set)
		errs = append(errs, err)
		return addrs
	}
	t := newTable()
	t.ring = addresses(h.addresses(setRing))
	for name := range sets {
		if node, is := h.nodeOf(prefixOnRing, name); is {
			if vips := addresses(h.onRing(node)); len(vips) > 0 {
				t.onRing[node] = vips
			}
		}
		hops, is := hopsOf(name)
		if !is {
			continue
		}
		for _, vip := range addresses(h.addresses(name)) {
			t.hops[vip] = hops
			t.spread[hops]++
		}
	}
	for node := range have.sent {
		t.targets[node] = addresses(h.vips(node))
	}
	peers, err := readKeys(l, sets, h.peers())
	for _, key := range peers {
		t.peers = append(t.peers, mac(key))
	}
	return *t, errors.Join(append(errs, err)...)
}

func (h header) readAddresses(l nft.Listing, sets map[string]nft.Shape, set nft.Set) (addrs []netip.Addr, err error) {
	keys, err := readKeys(l, sets, set)
	for _, key := range keys {
		addr, _ := netip.AddrFromSlice(key)
		addrs = append(addrs, addr)
	}
	return addrs, err
}

func readKeys(l nft.Listing, sets map[string]nft.Shape, set nft.Set) (keys [][]byte, err error) {
	if sets[set.Name] == set.Shape() {
		err = l.Elements(set.Name, func(e nft.Element) {
			if len(e.Key) == int(set.KeyLength) {
				keys = append(keys, bytes.Clone(e.Key))
			}
		})
	}
	slices.SortFunc(keys, bytes.Compare)
	return keys, err
}

// write makes one family's table as wanted: what is missing first, then the rules, and then what is
// too much, so that each transaction leaves rules that are right. What the kernel remembers of
// connections to targets that stay is kept.
func (k Kernel) write(family lb.Family, want *table, have held) error {
	h := headerOf(family)
	w := k.writer(family)
	if len(want.targets) == 0 {
		if have.exists {
			w.RemoveTable()
		}
		return w.commit()
	}
	w.AddTable()
	written := have.sent
	if len(have.foreign) > 0 {
		w.RemoveRules("") // which may use sets that are to go
		have.rules, have.limits, have.errors, have.segments, written = nil, nil, nil, nil, nil
		have.recall, have.offRing = nil, nil
	}
	for _, name := range have.foreign {
		w.RemoveSet(name)
	}
	type sets struct {
		set      nft.Set
		has, add []string
	}
	all := []sets{
		{h.peers(), keysOf(have.table.peers, mac.bytes), keysOf(want.peers, mac.bytes)},
		{h.addresses(setRing), keysOf(have.table.ring, netip.Addr.AsSlice), keysOf(want.ring, netip.Addr.AsSlice)},
	}
	for _, hops := range want.lengths() {
		all = append(all, sets{h.addresses(ringOf(hops)), keysOf(have.table.long(hops), netip.Addr.AsSlice),
			keysOf(want.long(hops), netip.Addr.AsSlice)})
	}
	h.writeLimits(w.Batch, want.limit, have)
	for _, node := range want.nodes() {
		all = append(all, sets{h.vips(node), keysOf(have.table.targets[node], netip.Addr.AsSlice),
			keysOf(want.targets[node], netip.Addr.AsSlice)},
			sets{h.onRing(node), keysOf(have.table.onRing[node], netip.Addr.AsSlice),
				keysOf(want.onRing[node], netip.Addr.AsSlice)})
		if _, there := written[node]; !there || !slices.Equal(have.moving[node], h.moving(want, node)) {
			w.AddSet(h.flows(node))
			w.AddSet(h.fresh(node))
			w.replace(name(prefixTo, node), nft.Hook{}, h.toRules(node, want.carried[node]))
			w.replace(name(prefixNew, node), nft.Hook{}, h.newRules(node, want.carried[node]))
		}
	}
	for _, s := range all {
		w.AddSet(s.set)
		w.fill(s.set, missing(s.has, s.add), nil)
	}
	for _, chain := range []struct { // those that strays lead to are first
		name string
		hook nft.Hook
		have []string
		want []nft.Rule
	}{
		{chainErrors, nft.Hook{}, have.errors, h.errorRules(want)},
		{chainRecall, nft.Hook{}, have.recall, h.recallRules(want)},
		{chainOffRing, nft.Hook{}, have.offRing, h.offRingRules(want)},
		{chainStrays, strayHook, have.rules, h.strayRules(want)},
		{chainSegments, segmentHook, have.segments, h.segmentRules(want)},
	} {
		if !slices.Equal(chain.have, nft.UserData(chain.want)) {
			w.replace(chain.name, chain.hook, chain.want)
		}
	}
	w.removeChains(have.strange) // now none of our rules leads there
	for _, s := range all {
		w.fill(s.set, nil, missing(s.add, s.has))
	}
	for _, hops := range have.table.lengths() {
		if want.spread[hops] == 0 && !slices.Contains(have.foreign, ringOf(hops)) {
			w.RemoveSet(ringOf(hops))
		}
	}
	for node := range have.sent {
		if _, wanted := want.targets[node]; !wanted {
			for _, chain := range []string{name(prefixNew, node), name(prefixTo, node)} {
				w.RemoveRules(chain)
				w.RemoveChain(chain)
			}
			w.AddSet(h.onRing(node)) // releases before it had none
			for _, set := range []nft.Set{h.vips(node), h.onRing(node), h.flows(node), h.fresh(node)} {
				w.RemoveSet(set.Name)
			}
			w.spill()
		}
	}
	w.removeLeft(want, have)
	return w.commit()
}

// removeLeft removes what is left of nodes that are no targets.
func (w *writer) removeLeft(want *table, have held) {
	wanted := func(l leftover) bool {
		_, wanted := want.targets[l.node]
		return wanted
	}
	var chains []string
	for _, l := range slices.DeleteFunc(slices.Clone(have.leftChains), wanted) {
		chains = append(chains, l.name)
	}
	w.removeChains(chains)
	for _, l := range slices.DeleteFunc(slices.Clone(have.left), wanted) {
		w.RemoveSet(l.name)
		w.spill()
	}
}

// removeChains removes chains, of which one may lead to another.
func (w *writer) removeChains(names []string) {
	for _, name := range names {
		w.RemoveRules(name)
		w.spill()
	}
	for _, name := range names {
		w.RemoveChain(name)
		w.spill()
	}
}

// writeLimits makes the chains of limits as wanted. What was counted of a VIP goes on.
func (h header) writeLimits(b *nft.Batch, limit int, have held) {
	for _, set := range h.limitSets() {
		b.AddSet(set)
	}
	if slices.Equal(have.limits, h.limitsOf(limit)) {
		return
	}
	all := h.limitRules(limit)
	for _, chain := range limitChains {
		replace(b, chain, nft.Hook{}, all[chain])
	}
}

// limitsOf returns what load reads of the chains of limits.
func (h header) limitsOf(limit int) (all []string) {
	for _, chain := range limitChains {
		all = append(all, nft.UserData(h.limitRules(limit)[chain])...)
	}
	return all
}

// edit changes elements of the sets only.
func (k Kernel) edit(family lb.Family, edits []edit) error {
	h := headerOf(family)
	w := k.writer(family)
	add, remove := map[string][]string{}, map[string][]string{}
	for _, e := range edits {
		key := string(e.vip.AsSlice())
		for _, node := range e.to {
			name := h.vips(node).Name
			add[name] = append(add[name], key)
		}
		for _, node := range e.from {
			name := h.vips(node).Name
			remove[name] = append(remove[name], key)
		}
		for _, node := range e.joins {
			name := h.onRing(node).Name
			add[name] = append(add[name], key)
		}
		for _, node := range e.leaves {
			name := h.onRing(node).Name
			remove[name] = append(remove[name], key)
		}
		if e.hops.from == e.hops.to {
			continue
		}
		if e.hops.from > 0 {
			remove[ringOf(e.hops.from)] = append(remove[ringOf(e.hops.from)], key)
		} else {
			add[setRing] = append(add[setRing], key)
		}
		if e.hops.to > 0 {
			add[ringOf(e.hops.to)] = append(add[ringOf(e.hops.to)], key)
		} else {
			remove[setRing] = append(remove[setRing], key)
		}
	}
	for set, keys := range add {
		w.fill(nft.Set{Name: set}, keys, nil)
	}
	for set, keys := range remove {
		w.fill(nft.Set{Name: set}, nil, keys)
	}
	return w.commit()
}

func keysOf[T any](all []T, bytes func(T) []byte) []string {
	keys := make([]string, len(all))
	for i, one := range all {
		keys[i] = string(bytes(one))
	}
	return keys
}

// missing returns the keys of all that are not among some.
func missing(some, all []string) (left []string) {
	among := make(map[string]bool, len(some))
	for _, key := range some {
		among[key] = true
	}
	for _, key := range all {
		if !among[key] {
			left = append(left, key)
		}
	}
	return left
}

// replace makes a chain have these rules.
func replace(b *nft.Batch, chain string, hook nft.Hook, rules []nft.Rule) {
	b.AddChain(chain, hook)
	b.RemoveRules(chain)
	for _, r := range rules {
		b.AddRule(chain, r)
	}
}

// moving returns what load reads of the chains of a target.
func (h header) moving(t *table, node netip.Addr) []string {
	return nft.UserData(slices.Concat(h.toRules(node, t.carried[node]), h.newRules(node, t.carried[node])))
}

// Cleanup removes what is ours.
func Cleanup() error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	return errors.Join(nft.Remove(conn, tableName), tunnel.Cleanup())
}

// neighbors returns what is known of nodes, and has the kernel find out whether they are there.
func (k Kernel) neighbors(family lb.Family, nodes []netip.Addr) (map[netip.Addr]links.Neighbor, error) {
	return k.near.Look(family, nodes)
}
