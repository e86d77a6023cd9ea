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
)

// Kernel is this node's. It is not safe for concurrent use.
type Kernel struct {
	conn *nfnetlink.Conn
	near *links.Neighbors
}

// Open opens the way to the kernel, in the network namespace of the calling thread.
func Open() (Kernel, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return Kernel{}, err
	}
	near, err := links.OpenNeighbors()
	if err != nil {
		conn.Close()
		return Kernel{}, err
	}
	return Kernel{conn, near}, nil
}

// Close closes it.
func (k Kernel) Close() {
	k.conn.Close()
	k.near.Close()
}

// held is what the kernel has of one family.
type held struct {
	exists bool
	// sent are the nodes of which connections may be remembered, with the packets that were moved to
	// each.
	sent map[netip.Addr]uint64
	// rules are those of the chain of stray packets, see nft.Rule.UserData.
	rules []string
	// table is what the sets hold, if that was asked for.
	table table
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
	have := held{sent: map[netip.Addr]uint64{}}
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
	have.rules = chains[chainStrays].Rules
	for set := range sets {
		node, ok := nodeOf(prefixFlows, set)
		if !ok {
			continue
		}
		if to := chains[name(prefixTo, node)]; slices.Equal(to.Rules, userData(h.toRules(node))) {
			have.sent[node] = to.Packets
		}
	}
	if !all {
		return have, nil
	}
	have.table, err = h.read(l, sets, have)
	return have, err
}

func userData(rules []nft.Rule) []string {
	all := make([]string, len(rules))
	for i, r := range rules {
		all[i] = r.UserData()
	}
	return all
}

// read reads what the sets hold, sorted. A set that is missing is empty, and will be written.
func (h header) read(l nft.Listing, sets map[string]nft.Shape, have held) (table, error) {
	var errs []error
	read := func(set nft.Set) (keys [][]byte) {
		if sets[set.Name] == set.Shape() {
			errs = append(errs, l.Elements(set.Name, func(e nft.Element) {
				if len(e.Key) == int(set.KeyLength) {
					keys = append(keys, bytes.Clone(e.Key))
				}
			}))
		}
		slices.SortFunc(keys, bytes.Compare)
		return keys
	}
	addresses := func(set nft.Set) (addrs []netip.Addr) {
		for _, key := range read(set) {
			addr, _ := netip.AddrFromSlice(key)
			addrs = append(addrs, addr)
		}
		return addrs
	}
	t := table{targets: map[netip.Addr][]netip.Addr{}, ring: addresses(h.ring())}
	for node := range have.sent {
		t.targets[node] = addresses(h.vips(node))
	}
	for _, key := range read(h.peers()) {
		t.peers = append(t.peers, mac(key))
	}
	return t, errors.Join(errs...)
}

// write makes one family's table as wanted, in one transaction. Connections to targets that stay
// are kept in mind. With before, which is what the sets hold, it writes only what differs.
func (k Kernel) write(family lb.Family, before *table, want table, have held) error {
	h := headerOf(family)
	b := nft.NewBatch(h.table())
	if len(want.targets) == 0 {
		if have.exists {
			b.RemoveTable()
		}
		return b.Commit(k.conn)
	}
	var was table
	if before != nil && have.exists {
		was = *before
	} else {
		before = nil
	}
	b.AddTable()
	fill := func(set nft.Set, was, now []string) {
		b.AddSet(set)
		if before == nil {
			b.FlushSet(set.Name)
			was = nil
		}
		b.RemoveElements(set.Name, missing(now, was))
		b.AddElements(set.Name, missing(was, now))
	}
	fill(h.peers(), keysOf(was.peers, mac.bytes), keysOf(want.peers, mac.bytes))
	fill(h.ring(), keysOf(was.ring, netip.Addr.AsSlice), keysOf(want.ring, netip.Addr.AsSlice))
	for _, node := range want.nodes() {
		fill(h.vips(node), keysOf(was.targets[node], netip.Addr.AsSlice), keysOf(want.targets[node], netip.Addr.AsSlice))
		if _, there := have.sent[node]; there {
			continue
		}
		b.AddSet(h.flows(node))
		replace(b, name(prefixTo, node), nft.Hook{}, h.toRules(node))
	}
	if before == nil || !was.sameRules(want) {
		replace(b, chainStrays, strayHook, h.strayRules(want))
	}
	for node := range have.sent {
		if _, wanted := want.targets[node]; !wanted {
			b.RemoveRules(name(prefixTo, node))
			b.RemoveChain(name(prefixTo, node))
			b.RemoveSet(h.vips(node).Name)
			b.RemoveSet(h.flows(node).Name)
		}
	}
	return b.Commit(k.conn)
}

func keysOf[T any](all []T, bytes func(T) []byte) []string {
	keys := make([]string, len(all))
	for i, one := range all {
		keys[i] = string(bytes(one))
	}
	return keys
}

// missing passes on the keys of all that are not among some.
func missing(some, all []string) func(*nft.Element) bool {
	among := make(map[string]bool, len(some))
	for _, key := range some {
		among[key] = true
	}
	return func(next *nft.Element) bool {
		for len(all) > 0 {
			key := all[0]
			if all = all[1:]; !among[key] {
				next.Key = append(next.Key[:0], key...)
				return true
			}
		}
		return false
	}
}

// replace makes a chain have these rules.
func replace(b *nft.Batch, chain string, hook nft.Hook, rules []nft.Rule) {
	b.AddChain(chain, hook)
	b.RemoveRules(chain)
	for _, r := range rules {
		b.AddRule(chain, r)
	}
}

// remove removes a family's table.
func (k Kernel) remove(family lb.Family) error { return remove(k.conn, family) }

func remove(conn *nfnetlink.Conn, family lb.Family) error {
	b := nft.NewBatch(headerOf(family).table())
	b.RemoveTable()
	if err := b.Commit(conn); !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// Cleanup removes what is ours.
func Cleanup() error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if err := remove(conn, family); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// neighbors returns what is known of nodes, and has the kernel find out whether they are there. It
// leaves out those behind a router, as no packet can be moved to them as it is.
func (k Kernel) neighbors(family lb.Family, nodes []netip.Addr) (map[netip.Addr]links.Neighbor, error) {
	return k.near.Look(family, nodes)
}
