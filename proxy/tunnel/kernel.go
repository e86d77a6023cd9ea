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
	return &Kernel{conn, tunnels, port, least, most}, nil
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
	s.Link, s.MTU, err = k.links.Set(want)
	return s, err
}

// tunnelOf returns what does not depend on the cluster.
func tunnelOf(family lb.Family) links.Tunnel {
	return links.Tunnel{Family: family, Name: lb.TunnelName(family), Network: network, Routes: routes, MAC: MAC}
}

// setRules writes the rules, and returns how many packets they have refused. With adopt the nodes
// that are there stay.
func (k *Kernel) setRules(h header, d Desired, adopt bool) (refused uint64, err error) {
	want := map[string]bool{}
	for _, node := range slices.Concat(d.Nodes, d.Peers) {
		want[string(node.AsSlice())] = true
	}
	l := nft.Listing{Conn: k.conn, Table: h.table()}
	var sets map[string]nft.Shape
	var chains map[string]nft.Chain
	have := map[string]bool{}
	err = nfnetlink.Complete(func() (err error) {
		exists, err := l.Exists()
		if err != nil || !exists {
			return err
		}
		if sets, err = l.Sets(); err != nil {
			return err
		}
		if chains, err = l.Chains(); err != nil || sets[setNodes] != h.nodes().Shape() {
			return err
		}
		clear(have)
		return l.Elements(setNodes, func(e nft.Element) { have[string(e.Key)] = true })
	})
	if err != nil {
		return 0, err
	}
	b := nft.NewBatch(h.table())
	b.AddTable()
	right := sets[setNodes] == h.nodes().Shape()
	for _, c := range h.chains(k.port, k.least, k.most) {
		right = right && chains[c.name].Hook == c.hook && slices.Equal(chains[c.name].Rules, nft.UserData(c.rules))
	}
	if !right {
		b.RemoveTable()
		b.AddTable()
		b.AddSet(h.nodes())
		for _, c := range h.chains(k.port, k.least, k.most) {
			b.AddChain(c.name, c.hook)
			for _, r := range c.rules {
				b.AddRule(c.name, r)
			}
		}
		if adopt {
			maps.Copy(want, have)
		}
		clear(have)
	}
	var extra []string
	for key := range have {
		if !want[key] && !adopt {
			extra = append(extra, key)
		}
		delete(want, key)
	}
	if right && len(want)+len(extra) == 0 {
		return chains[chainRefused].Packets, nil
	}
	b.AddElements(setNodes, nft.Keys(slices.Sorted(maps.Keys(want))...))
	b.RemoveElements(setNodes, nft.Keys(extra...))
	return chains[chainRefused].Packets, b.Commit(k.conn)
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
