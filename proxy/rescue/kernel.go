package rescue

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Kernel is this node's.
type Kernel struct {
	links *netlink.Handle // for routes and neighbours
}

// Open opens the way to the kernel.
func Open() (Kernel, error) {
	links, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return Kernel{}, fmt.Errorf("open a netlink socket for neighbours: %w", err)
	}
	return Kernel{links}, nil
}

// Close closes it.
func (k Kernel) Close() { k.links.Close() }

// held is what the kernel has of one family.
type held struct {
	exists bool
	// sent are the nodes of which connections may be remembered, with the packets that were handed to
	// each.
	sent  map[netip.Addr]uint64
	chain int // rules in the chain of strays
	hops  int // as they say
	// table is what the rules were made from, if that was asked for.
	table table
}

func conn() (*nftables.Conn, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return c, nil
}

// load reads what is there; with all, the elements of sets too.
func (Kernel) load(family lb.Family, all bool) (held, error) {
	have := held{sent: map[netip.Addr]uint64{}}
	c, err := conn()
	if err != nil {
		return have, err
	}
	h := headerOf(family)
	tables, err := c.ListTablesOfFamily(h.family)
	if err != nil {
		return have, fmt.Errorf("list tables: %w", err)
	}
	have.exists = slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == tableName })
	if !have.exists {
		return have, nil
	}
	sets, err := c.GetSets(h.table())
	if err != nil {
		return have, fmt.Errorf("list sets: %w", err)
	}
	for _, set := range sets {
		if node, ok := nodeOf(prefixFlows, set.Name); ok {
			have.sent[node] = 0
		}
	}
	for node := range have.sent {
		rules, err := c.GetRules(h.table(), h.to(node))
		if err != nil {
			continue // not there, so the table is written anew
		}
		have.sent[node] = packets(rules)
	}
	if rules, err := c.GetRules(h.table(), h.strays()); err == nil {
		have.chain, have.hops = len(rules), hopsOf(rules)
	}
	if all {
		have.table = h.read(c, have)
	}
	return have, nil
}

// read reads what rules were made from. What cannot be read is as if it were not there, and will be
// written.
func (h header) read(c *nftables.Conn, have held) table {
	t := table{targets: map[netip.Addr][]netip.Addr{}, ring: addressesIn(c, h.ring()), hops: have.hops}
	for node := range have.sent {
		t.targets[node] = addressesIn(c, h.vips(node))
	}
	elements, _ := c.GetSetElements(h.peers())
	for _, e := range elements {
		if len(e.Key) == len(mac{}) {
			t.peers = append(t.peers, mac(e.Key))
		}
	}
	slices.SortFunc(t.peers, mac.compare)
	return t
}

// addressesIn reads a set, sorted.
func addressesIn(c *nftables.Conn, set *nftables.Set) (addrs []netip.Addr) {
	elements, _ := c.GetSetElements(set)
	for _, e := range elements {
		if addr, ok := netip.AddrFromSlice(e.Key); ok {
			addrs = append(addrs, addr)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}

func packets(rules []*nftables.Rule) uint64 {
	var sum uint64
	for _, r := range rules {
		for _, e := range r.Exprs {
			if counter, ok := e.(*expr.Counter); ok {
				sum += counter.Packets
			}
		}
	}
	return sum
}

// most elements in a message
const most = 500

// write makes one family's table as wanted, in one transaction. Connections to targets that stay
// are kept in mind. With before, which is what the table was made from, it writes only what
// differs.
func (Kernel) write(family lb.Family, before *table, want table, have held) error {
	c, err := conn()
	if err != nil {
		return err
	}
	h := headerOf(family)
	if len(want.targets) == 0 {
		if have.exists {
			c.DelTable(h.table())
		}
		return c.Flush()
	}
	var was table
	if before != nil && have.exists {
		was = *before
	} else {
		before = nil
	}
	c.AddTable(h.table())
	nodes := slices.SortedFunc(maps.Keys(want.targets), netip.Addr.Compare)
	var errs []error
	fill := func(set *nftables.Set, was, now []string) {
		errs = append(errs, c.AddSet(set, nil))
		if before == nil {
			c.FlushSet(set)
			was = nil
		}
		for part := range slices.Chunk(missing(now, was), most) {
			errs = append(errs, c.SetDeleteElements(set, part))
		}
		for part := range slices.Chunk(missing(was, now), most) {
			errs = append(errs, c.SetAddElements(set, part))
		}
	}
	fill(h.peers(), keysOf(was.peers, mac.bytes), keysOf(want.peers, mac.bytes))
	fill(h.ring(), keysOf(was.ring, netip.Addr.AsSlice), keysOf(want.ring, netip.Addr.AsSlice))
	for _, node := range nodes {
		fill(h.vips(node), keysOf(was.targets[node], netip.Addr.AsSlice), keysOf(want.targets[node], netip.Addr.AsSlice))
		if _, there := have.sent[node]; there {
			continue
		}
		errs = append(errs, c.AddSet(h.flows(node), nil))
		add(c, h.to(node), h.toRules(node))
	}
	if before == nil || !was.sameRules(want) {
		add(c, h.strays(), h.strayRules(nodes, want))
	}
	for node := range have.sent {
		if _, wanted := want.targets[node]; !wanted {
			c.FlushChain(h.to(node))
			c.DelChain(h.to(node))
			c.DelSet(h.vips(node))
			c.DelSet(h.flows(node))
		}
	}
	return errors.Join(append(errs, c.Flush())...)
}

func keysOf[T any](all []T, bytes func(T) []byte) []string {
	keys := make([]string, len(all))
	for i, one := range all {
		keys[i] = string(bytes(one))
	}
	return keys
}

// missing returns the elements of all that are not among some.
func missing(some, all []string) (elements []nftables.SetElement) {
	among := make(map[string]bool, len(some))
	for _, key := range some {
		among[key] = true
	}
	for _, key := range all {
		if !among[key] {
			elements = append(elements, nftables.SetElement{Key: []byte(key)})
		}
	}
	return elements
}

// add makes a chain with these rules.
func add(c *nftables.Conn, chain *nftables.Chain, rules []exprs) {
	c.AddChain(chain)
	c.FlushChain(chain)
	for _, r := range rules {
		c.AddRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: r})
	}
}

// remove takes a family's table away.
func (Kernel) remove(family lb.Family) error {
	c, err := conn()
	if err != nil {
		return err
	}
	c.AddTable(headerOf(family).table()) // or deleting it may fail
	c.DelTable(headerOf(family).table())
	return c.Flush()
}

// Cleanup removes what is ours.
func Cleanup() error {
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if err := (Kernel{}).remove(family); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// neighbors says what is known of nodes, and sees to it that the kernel finds out whether they are
// there. Those behind a router are left out, as no packet can be handed to them as it is.
func (k Kernel) neighbors(family lb.Family, nodes []netip.Addr) (map[netip.Addr]neighbor, error) {
	number := unix.AF_INET
	if family == lb.IPv6 {
		number = unix.AF_INET6
	}
	list, err := k.links.NeighList(0, number)
	if err != nil {
		return nil, fmt.Errorf("list neighbours: %w", err)
	}
	all := map[netip.Addr]neighbor{}
	for _, node := range nodes {
		routes, err := k.links.RouteGet(node.AsSlice())
		if err != nil || len(routes) != 1 || routes[0].Gw != nil || routes[0].Type != unix.RTN_UNICAST {
			continue
		}
		link := routes[0].LinkIndex
		i := slices.IndexFunc(list, func(n netlink.Neigh) bool {
			return n.LinkIndex == link &&
				n.IP.Equal(net.IP(node.AsSlice()))
		})
		state := netlink.NUD_NONE
		if i >= 0 {
			state = list[i].State
			n := neighbor{gone: state&netlink.NUD_FAILED != 0}
			if len(list[i].HardwareAddr) == len(mac{}) &&
				state&(netlink.NUD_REACHABLE|netlink.NUD_STALE|netlink.NUD_DELAY|netlink.NUD_PROBE|netlink.NUD_PERMANENT) != 0 {
				n.mac, n.there = mac(list[i].HardwareAddr), true
			}
			all[node] = n
		}
		if state&(netlink.NUD_REACHABLE|netlink.NUD_PERMANENT|netlink.NUD_DELAY|netlink.NUD_PROBE) == 0 {
			// As if a packet were to be sent: an address that is not known is asked for, a stale one is
			// probed. The MAC address of zeros is not looked at, but has to be there.
			use := &netlink.Neigh{
				LinkIndex: link, Family: number, IP: node.AsSlice(), State: netlink.NUD_NONE, Flags: netlink.NTF_USE,
				HardwareAddr: make(net.HardwareAddr, len(mac{})),
			}
			if err := k.links.NeighSet(use); err != nil {
				return all, fmt.Errorf("ask for %s: %w", node, err)
			}
		}
	}
	return all, nil
}
