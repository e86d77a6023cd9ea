package rescue

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

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
	// rings are what the sets of the rings' lengths hold, by length. After a write that failed a VIP may be in two.
	rings map[int][]netip.Addr
	// hooked are chains with names of ours that are entered elsewhere than ours.
	hooked []string
	// strange and strangeSets are chains and sets that this release does not have. Rules of the first may use sets of
	// ours, and maps of verdicts may lead to chains of ours.
	strange, strangeSets []string
	// left and leftChains are sets and chains of nodes that lack the rest: a release without onRing has removed them, or
	// a write has failed between two transactions.
	left, leftChains []leftover
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
		right = right && both && to.Hook == (nft.Hook{}) && first.Hook == (nft.Hook{})
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
	have.table, have.rings, err = h.read(l, sets, have)
	h.sortSets(sets, &have)
	h.sortChains(chains, &have)
	return have, err
}

// read reads what the sets hold, sorted. A set that is missing is empty, and will be written.
func (h header) read(l nft.Listing, sets map[string]nft.Shape, have held) (table, map[int][]netip.Addr, error) {
	var errs []error
	addresses := func(set nft.Set) []netip.Addr {
		addrs, err := h.readAddresses(l, sets, set)
		errs = append(errs, err)
		return addrs
	}
	t, rings := newTable(), map[int][]netip.Addr{}
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
		rings[hops] = addresses(h.addresses(name))
		for _, vip := range rings[hops] {
			t.hops[vip] = hops
		}
	}
	for node := range have.sent {
		t.targets[node] = addresses(h.vips(node))
	}
	peers, err := readKeys(l, sets, h.peers())
	for _, key := range peers {
		t.peers = append(t.peers, mac(key))
	}
	return *t, rings, errors.Join(append(errs, err)...)
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
	if len(want.targets) > 0 && have.blocked() { // in one transaction, or packets would meet no rules meanwhile
		w := k.writer(family)
		w.whole = true
		if err := w.write(headerOf(family), want, have); !errors.Is(err, unix.EMSGSIZE) {
			return err
		}
	}
	return k.writer(family).write(headerOf(family), want, have)
}

func (w *writer) write(h header, want *table, have held) error {
	if len(want.targets) == 0 {
		if have.exists {
			w.RemoveTable()
		}
		return w.commit()
	}
	w.AddTable()
	written := have.sent
	if have.blocked() {
		w.unblock(have)
		have.rules, have.limits, have.errors, have.segments, written = nil, nil, nil, nil, nil
		have.recall, have.offRing, have.strangeSets = nil, nil, nil
	}
	type sets struct {
		set      nft.Set
		has, add []string
	}
	all := []sets{
		{h.peers(), keysOf(have.table.peers, mac.bytes), keysOf(want.peers, mac.bytes)},
		{h.addresses(setRing), keysOf(have.table.ring, netip.Addr.AsSlice), keysOf(want.ring, netip.Addr.AsSlice)},
	}
	rings := want.rings()
	for _, hops := range want.lengths() {
		all = append(all, sets{h.addresses(ringOf(hops)), keysOf(have.rings[hops], netip.Addr.AsSlice),
			keysOf(rings[hops], netip.Addr.AsSlice)})
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
	w.whole = false
	w.removeStrange(want, have) // now none of our rules uses that
	for _, s := range all {
		w.fill(s.set, nil, missing(s.add, s.has))
	}
	for hops := range have.rings {
		if want.spread[hops] == 0 && !slices.Contains(have.foreign, ringOf(hops)) {
			w.RemoveSet(ringOf(hops))
		}
	}
	for _, node := range dropped(want, have) {
		w.RemoveChain(name(prefixNew, node))
		w.RemoveChain(name(prefixTo, node))
		w.AddSet(h.onRing(node)) // releases before it had none
		for _, set := range []nft.Set{h.vips(node), h.onRing(node), h.flows(node), h.fresh(node)} {
			w.RemoveSet(set.Name)
		}
		w.spill()
	}
	w.removeLeft(want, have)
	return w.commit()
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
