package members

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
)

// meta is what a node says of itself: when its process began, which tells it from the one before on
// the node, so that what that one said is not taken for this one's words; in which boot its kernel is;
// and the MAC addresses under which it may answer, which tell it from conflicting hosts.
type meta struct {
	born uint64 // nanoseconds since 1970; 0 unknown
	boot uint64 // of 40 bits; 0 unknown
	macs []string
	wire byte // the newest version of messages that the node understands; 0 for wireVersion
}

// Sizes in the encoded form: 8 bytes for born, then 6 for each MAC address, then 1 for wire, which
// older speakers overlook. The boot has the form of a MAC address too, of a group: no host has such a
// one, so older speakers may take it for one.
const (
	bornSize = 8
	macSize  = 6
	bootKind = 0x03 // the first byte: a group's address, locally administered
	bootMask = 1<<40 - 1
)

// bootOf returns what tells a boot of a kernel from others, by its ID.
func bootOf(id string) uint64 {
	if id == "" {
		return 0
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(id))
	return max(1, h.Sum64()&bootMask)
}

// encode leaves out MAC addresses that do not fit into limit beside the rest.
func (m meta) encode(limit int) []byte {
	b := binary.BigEndian.AppendUint64(nil, m.born)
	if m.boot != 0 && len(b)+macSize < limit {
		b = append(b, bootKind, byte(m.boot>>32))
		b = binary.BigEndian.AppendUint32(b, uint32(m.boot))
	}
	for _, text := range m.macs {
		if mac, err := net.ParseMAC(text); err == nil && len(mac) == macSize && len(b)+macSize < limit {
			b = append(b, mac...)
		}
	}
	if m.wire != 0 && len(b) < limit {
		b = append(b, m.wire)
	}
	return b
}

func metaOf(n *memberlist.Node) meta {
	if n == nil || len(n.Meta) < bornSize {
		return meta{}
	}
	m := meta{born: binary.BigEndian.Uint64(n.Meta)}
	rest := n.Meta[bornSize:]
	for ; len(rest) >= macSize; rest = rest[macSize:] {
		if rest[0] == bootKind {
			m.boot = uint64(rest[1])<<32 | uint64(binary.BigEndian.Uint32(rest[2:]))
			continue
		}
		m.macs = append(m.macs, net.HardwareAddr(rest[:macSize]).String())
	}
	if len(rest) == 1 {
		m.wire = rest[0]
	}
	return m
}

// compacts reports whether all other nodes of the cluster that are live understand compact
// messages. It needs mu.
func (m *Members) compacts() bool {
	some := false
	for name, n := range m.live {
		switch {
		case !m.knows(name):
		case metaOf(n).wire < compactVersion:
			return false
		default:
			some = true
		}
	}
	return some
}

// SetMACs replaces the MAC addresses under which this node may answer; the first ones are told where there is no room
// for all.
func (m *Members) SetMACs(macs []string) {
	m.mu.Lock()
	same := slices.Equal(m.ownMACs, macs)
	m.ownMACs = macs
	m.mu.Unlock()
	if !same {
		m.renew.Poke()
	}
}

// MACs returns whose the MAC addresses of all nodes of ours are that this one has met, itself
// included.
func (m *Members) MACs() map[string]string {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[string]string{}
	for _, mac := range m.ownMACs {
		all[mac] = m.opts.Self
	}
	for node, macs := range m.macs {
		for _, mac := range macs {
			all[mac] = node
		}
	}
	return all
}

// renewTimeout bounds the wait until the others have been told of new MAC addresses.
const renewTimeout = time.Second

// renewStep tells the others about this node's MAC addresses.
func (m *Members) renewStep(context.Context) (time.Duration, error) {
	m.mu.Lock()
	ml := m.ml
	m.mu.Unlock()
	if ml == nil {
		return 0, nil
	}
	if err := ml.UpdateNode(renewTimeout); err != nil {
		return 0, fmt.Errorf("tell the others about this node's MAC addresses: %w", err)
	}
	return 0, nil
}
