package tunnel

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Kernel is the way to this node's tunnels. It is not safe for concurrent use.
type Kernel struct {
	conn        *nfnetlink.Conn
	links       links.Tunnels
	port        uint16
	least, most byte
	// diverted are the families in which nothing can be sent back, as the kernel has another way to aliases.
	diverted map[lb.Family]bool
}

// Open opens the way to the kernel, in the network namespace of the calling thread. Only packets
// with a TTL from least to most come in.
func Open(port uint16, least, most byte) (*Kernel, error) {
	tunnels, err := links.OpenTunnels()
	if err != nil {
		return nil, err
	}
	conn, err := nfnetlink.Open()
	if err != nil {
		tunnels.Close()
		return nil, err
	}
	return &Kernel{conn, tunnels, port, least, most, map[lb.Family]bool{}}, nil
}

// Close closes it. The tunnels stay.
func (k *Kernel) Close() {
	k.conn.Close()
	k.links.Close()
}

// Set makes a family's tunnel as it shall be. The rules come before the interface, which takes no
// packet without them.
func (k *Kernel) Set(family lb.Family, d Desired) (State, error) {
	s, err := k.set(family, d)
	if err != nil {
		err = fmt.Errorf("tunnel %s: %w", lb.TunnelName(family), err)
	}
	return s, err
}

func (k *Kernel) set(family lb.Family, d Desired) (s State, err error) {
	h := headerOf(family)
	adopt := !d.Self.IsValid()
	if adopt {
		found := false
		if d.Self, found, err = k.links.Self(lb.TunnelName(family), network); err != nil {
			return s, err
		}
		if !found {
			return s, errors.New("the addresses of the nodes are not known yet")
		}
	}
	if s.Refused, err = k.setRules(h, d, adopt); err != nil {
		return s, fmt.Errorf("write the rules: %w", err)
	}
	want := tunnelOf(family)
	want.Port, want.Self, want.Peers, want.MTU = k.port, d.Self, d.Peers, mtu(family, d.MTU)
	want.Alias = apart(d.Peers)
	state, err := k.links.Set(want)
	s.Link, s.MTU = state.Link, state.MTU
	if err == nil && state.Diverted != k.diverted[family] {
		k.diverted[family] = state.Diverted
		_, err = k.setRules(h, d, adopt)
	}
	return s, err
}

// tunnelOf returns what does not depend on the cluster.
func tunnelOf(family lb.Family) links.Tunnel {
	return links.Tunnel{Family: family, Name: lb.TunnelName(family), Network: network, Routes: routes, MAC: MAC,
		Aliases: aliases(family)}
}

// contents are elements of sets: keys, with values where the set is a map.
type contents map[string]map[string]string

// contents returns what the sets shall hold, and which of them keep what else they have. Without senders, while they
// are diverted, no question is answered: nodes do not hand over what could not be sent back.
func (h header) contents(d Desired, adopt, diverted bool) (want contents, keep map[string]bool) {
	want = contents{setNodes: {}, setDirect: {}, setSenders: {}, setMACs: {}}
	for _, node := range slices.Concat(d.Nodes, d.Peers) {
		want[setNodes][string(node.AsSlice())] = ""
	}
	for _, vip := range d.Direct {
		want[setDirect][string(vip.AsSlice())] = ""
	}
	alias := apart(d.Peers)
	for _, node := range d.Peers {
		if at := alias(node); at.IsValid() && !diverted {
			mac := MAC(node)
			want[setSenders][string(mac[:])], want[setMACs][string(mac[:])] = string(at.AsSlice()), ""
		}
	}
	return want, map[string]bool{setNodes: adopt, setDirect: !d.DirectKnown}
}

// setRules writes the rules, and returns how many packets they have refused. With adopt the nodes
// that are there stay.
func (k *Kernel) setRules(h header, d Desired, adopt bool) (refused uint64, err error) {
	l := nft.Listing{Conn: k.conn, Table: h.table()}
	var sets map[string]nft.Shape
	var chains map[string]nft.Chain
	var have contents
	err = nfnetlink.Complete(func() (err error) {
		have = contents{setNodes: {}, setDirect: {}, setSenders: {}, setMACs: {}}
		exists, err := l.Exists()
		if err != nil || !exists {
			return err
		}
		if sets, err = l.Sets(); err != nil {
			return err
		}
		if chains, err = l.Chains(); err != nil {
			return err
		}
		for _, set := range h.sets() {
			if sets[set.Name] != set.Shape() {
				continue
			}
			err := l.Elements(set.Name, func(e nft.Element) { have[set.Name][string(e.Key)] = string(e.Value) })
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	want, keep := h.contents(d, adopt, k.diverted[h.family])
	for set := range keep {
		if keep[set] {
			maps.Copy(want[set], have[set])
		}
	}
	bounds := limits{port: k.port, least: k.least, most: k.most}
	if len(want[setDirect]) > 0 {
		bounds.segment = segment(h.family, d.MTU)
	}
	wanted := h.chains(bounds)
	b := nft.NewBatch(h.table())
	b.AddTable()
	right := !slices.ContainsFunc(h.sets(), func(s nft.Set) bool { return sets[s.Name] != s.Shape() })
	for _, c := range wanted {
		right = right && chains[c.name].Hook == c.hook && slices.Equal(chains[c.name].Rules, nft.UserData(c.rules))
	}
	if !right {
		b.RemoveTable()
		b.AddTable()
		for _, s := range h.sets() {
			b.AddSet(s)
		}
		for _, c := range wanted {
			b.AddChain(c.name, c.hook)
		}
		for _, c := range wanted {
			for _, r := range c.rules {
				b.AddRule(c.name, r)
			}
		}
	}
	changed := !right
	for _, s := range h.sets() {
		if !right {
			clear(have[s.Name])
		}
		missing, extra := difference(want[s.Name], have[s.Name]), difference(have[s.Name], want[s.Name])
		b.RemoveElements(s.Name, next(extra))
		b.AddElements(s.Name, next(missing))
		changed = changed || len(missing)+len(extra) > 0
	}
	if !changed {
		return chains[chainRefused].Packets, nil
	}
	return chains[chainRefused].Packets, b.Commit(k.conn)
}

// difference returns the elements of a that are not in b, in order.
func difference(a, b map[string]string) (all []nft.Element) {
	for _, key := range slices.Sorted(maps.Keys(a)) {
		if value, is := b[key]; !is || value != a[key] {
			e := nft.Element{Key: []byte(key)}
			if a[key] != "" {
				e.Value = []byte(a[key])
			}
			all = append(all, e)
		}
	}
	return all
}

// next returns what gives one element after the other.
func next(all []nft.Element) func(*nft.Element) bool {
	return func(e *nft.Element) bool {
		if len(all) == 0 {
			return false
		}
		*e, all = all[0], all[1:]
		return true
	}
}

// Remove removes a family's tunnel, if it is there, and nothing else.
func (k *Kernel) Remove(family lb.Family) error {
	if err := k.remove(family); err != nil {
		return fmt.Errorf("tunnel %s: %w", lb.TunnelName(family), err)
	}
	return nil
}

func (k *Kernel) remove(family lb.Family) error {
	if err := k.links.Remove(tunnelOf(family)); err != nil {
		return err
	}
	b := nft.NewBatch(headerOf(family).table())
	b.RemoveTable()
	if err := b.Commit(k.conn); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

// Cleanup removes what is ours.
func Cleanup() error {
	k, err := Open(0, 0, 0)
	if err != nil {
		return err
	}
	defer k.Close()
	return errors.Join(k.Remove(lb.IPv4), k.Remove(lb.IPv6))
}
