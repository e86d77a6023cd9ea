package members

import (
	"encoding/binary"
	"errors"
	"slices"
)

// farewell says that a process ends as planned, and has handed over. memberlist tells of members that have left as of
// those that have stopped answering.
type farewell struct {
	node string
	born uint64
}

// encode returns the message: the version, then string node, varint born.
func (f farewell) encode() []byte {
	return binary.AppendUvarint(appendString([]byte{farewellVersion}, f.node), f.born)
}

func decodeFarewell(b []byte) (f farewell, err error) {
	r := reader{rest: b[1:], size: len(b)}
	f = farewell{node: r.string(), born: r.varint()}
	if r.err == nil && (len(r.rest) > 0 || f.node == "" || f.born == 0) {
		r.err = errors.New("a farewell with something more or less than a farewell has")
	}
	return f, r.err
}

// bid says farewell to the others. Who misses it takes this node for one that was lost.
func (m *Members) bid() {
	m.spread(farewell{node: m.opts.Self, born: uint64(m.opts.Born.UnixNano())}.encode(), directMembers)
}

// parted takes in a farewell of another node, and passes it on if it is news.
func (m *Members) parted(b []byte) {
	f, err := decodeFarewell(b)
	if err != nil {
		m.opts.Log.Warn("cannot read a gossip message", "error", err)
		return
	}
	if f.node != m.opts.Self && m.opts.Liveness.Farewell(f.node, f.born) {
		m.spread(slices.Clone(b), 0)
	}
}
