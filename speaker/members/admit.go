package members

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/hashicorp/memberlist"
)

// maxUnknown is how many others take part at most, and of how many there are claims before they do,
// while it is unknown which nodes the cluster has.
const maxUnknown = 1 << 10

var errTooMany = errors.New("too many members while the nodes of the cluster are unknown")

// admission decides who may become a member, as far as memberlist asks. Who is refused is not lost:
// its Node may come later than its speaker, and joinStep then calls it.
type admission struct{ m *Members }

// NotifyAlive returns an error if a member is not to be heard of. memberlist calls with its own
// lock held.
func (a admission) NotifyAlive(n *memberlist.Node) error {
	defer a.m.pulses.Begin()()
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	return a.m.admits(n)
}

// admits needs mu.
func (m *Members) admits(n *memberlist.Node) error {
	addrs, known := m.peers[n.Name]
	live := m.live[n.Name]
	switch {
	case n.Name == m.opts.Self:
		return nil // memberlist does not let others speak for it
	case !speaksAlike(n):
		return fmt.Errorf("it speaks the versions %d, from %d to %d, and %d, from %d to %d", n.PCur, n.PMin, n.PMax,
			n.DCur, n.DMin, n.DMax)
	case m.peers == nil && live == nil && len(m.live) >= maxUnknown:
		return errTooMany
	case m.peers == nil:
		return nil
	case known:
		addr, _ := netip.AddrFromSlice(n.Addr)
		at := netip.AddrPortFrom(addr.Unmap(), n.Port)
		if len(addrs) > 0 && !slices.Contains(addrs, at.Addr()) || int(n.Port) != m.opts.Port {
			return fmt.Errorf("%s is none of this node's addresses %v with port %d", at, addrs, m.opts.Port)
		}
		return nil
	case m.former[n.Name] && live.Port == n.Port && live.Addr.Equal(n.Addr):
		return nil
	}
	return errors.New("the cluster has no such node")
}

// speaksAlike reports whether a member speaks the versions that this node speaks, of memberlist's protocol and of the
// messages in it. As long as one member does not, memberlist lets no two of them exchange states.
func speaksAlike(n *memberlist.Node) bool {
	const protocol, messages = memberlist.ProtocolVersion2Compatible, 0 // as memberlist.DefaultLANConfig has them
	return n.PCur == protocol && n.PMin <= protocol && protocol <= n.PMax &&
		n.DCur == messages && n.DMin <= messages && messages <= n.DMax
}

// knows reports whether a node is one of the cluster, or was one until its Node was deleted and
// still takes part: of others nothing is kept. While the nodes are unknown, those are known of
// which something was kept. It needs mu.
func (m *Members) knows(node string) bool {
	if m.peers == nil {
		return m.live[node] != nil || m.book.pages[node] != nil
	}
	_, known := m.peers[node]
	return known || m.former[node]
}

// SetPeers says which other nodes the cluster has, with their addresses. Nodes that have left the
// cluster are forgotten, once their speakers have ended too.
func (m *Members) SetPeers(peers map[string][]netip.Addr) {
	m.mu.Lock()
	for node := range m.live {
		_, was := m.peers[node]
		if _, is := peers[node]; is {
			delete(m.former, node)
		} else if was {
			m.former[node] = true
		}
	}
	m.peers = peers
	m.at = map[netip.Addr]bool{}
	for _, addrs := range peers {
		for _, addr := range addrs {
			m.at[addr] = true
		}
	}
	for node := range m.book.pages {
		if !m.knows(node) {
			delete(m.book.pages, node)
		}
	}
	for node := range m.macs {
		if !m.knows(node) {
			delete(m.macs, node)
		}
	}
	for node, n := range m.live {
		if m.knows(node) {
			m.macs[node] = metaOf(n).macs
		}
	}
	m.mu.Unlock()
	m.join.Poke()
	m.seek.Poke()
}

// isNode reports whether a node of the cluster has the address.
func (m *Members) isNode(addr netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at[addr]
}
