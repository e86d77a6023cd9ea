package members

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/hashicorp/memberlist"
)

// alarm says that a node has lost its path to the process of another one.
type alarm struct {
	node string
	born uint64
	by   string
}

// encode returns the message: the version, then string node, varint born, string by.
func (a alarm) encode() []byte {
	b := appendString([]byte{alarmVersion}, a.node)
	return appendString(binary.AppendUvarint(b, a.born), a.by)
}

func decodeAlarm(b []byte) (a alarm, err error) {
	r := reader{rest: b[1:], size: len(b)}
	a = alarm{node: r.string(), born: r.varint(), by: r.string()}
	if r.err == nil && (len(r.rest) > 0 || a.node == "" || a.by == "") {
		r.err = errors.New("an alarm with something more or less than an alarm has")
	}
	return a, r.err
}

// Alarm tells the others at once that this node has lost its path to a process: straight to each, in
// a large cluster to some, and by gossip to all.
func (m *Members) Alarm(node string, born uint64) {
	m.spread(alarm{node: node, born: born, by: m.opts.Self}.encode(), directMembers)
}

// spread sends an alarm or a farewell straight to as many members as given, and to all by gossip if all know its
// version.
func (m *Members) spread(message []byte, direct int) {
	m.mu.Lock()
	ml := m.ml
	var to []*memberlist.Node
	all := true
	for _, n := range m.live {
		if metaOf(n).wire < message[0] {
			all = false
		} else if len(to) < direct {
			to = append(to, n)
		}
	}
	whole := len(to) == len(m.live)
	m.mu.Unlock()
	if ml == nil {
		return
	}
	sendTo(ml, to, message)
	if all && !whole {
		m.pass(message)
		m.rounds.urgent()
	}
}

// alarmed takes in an alarm of another node, and passes it on if it is news.
func (m *Members) alarmed(b []byte) {
	a, err := decodeAlarm(b)
	if err != nil {
		m.opts.Log.Warn("cannot read a gossip message", "error", err)
		return
	}
	if a.node == m.opts.Self || a.by == m.opts.Self || !m.opts.Liveness.Alarmed(a.node, a.born, a.by) {
		return
	}
	m.spread(slices.Clone(b), 0)
}

// Greet has a node told everything that this one says: it may have missed something.
func (m *Members) Greet(node string) {
	m.mu.Lock()
	if m.live[node] != nil {
		m.greet[node] = true
	}
	m.mu.Unlock()
	m.send.Poke()
}

// Address returns where this node speaks gossip; the zero Addr while it does not.
func (m *Members) Address() netip.Addr {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ml == nil {
		return netip.Addr{}
	}
	return m.bind
}

// Ping reports whether the speaker of a node answers gossip: a direct question, for as long as gossip waits for
// the answer to one.
func (m *Members) Ping(node string, addr netip.AddrPort) bool {
	m.mu.Lock()
	ml := m.ml
	m.mu.Unlock()
	if ml == nil {
		return false
	}
	_, err := ml.Ping(node, net.UDPAddrFromAddrPort(addr))
	return err == nil
}
