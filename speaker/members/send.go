package members

import (
	"context"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
)

// Sizes of what is sent.
const (
	// messageSize keeps a message in one packet, whatever encryption and labels add.
	messageSize = 1100
	// directMembers is the largest cluster in which each change also goes straight to each member, so
	// that an address moves within milliseconds. A change of one VIP in such a cluster is 128 packets
	// of some 60 bytes; in larger clusters changes travel by gossip alone.
	directMembers = 128
	// maxState bounds a whole state: memberlist refuses one of more than 20 MiB.
	maxState = 16 << 20
	// joinState is up to which size a node that joins is told everything as wireVersion.
	joinState = 1 << 20
)

// explicitSize estimates how long updates are as wireVersion, less than twice as long as they are.
func explicitSize(updates []update) (size int) {
	const ofEntry = 10 // flags, address, seq, words and weight; 22 for IPv6
	for _, u := range updates {
		size += ofEntry * len(u.entries)
		for _, number := range u.row.cells {
			if number != 0 {
				size += ofEntry
			}
		}
	}
	return size
}

// state encodes what this node and the others say, as far as it fits and a reader takes it: of more,
// half of the others are left out, and again, until it does. Others come in any order, so that the
// next state has others. A node that says too much for any state is left out of all.
func state(own update, others []update, compact bool, limit int) []byte {
	tooMany := func(u update) bool { return len(u.entries) > maxVIPs }
	others = slices.DeleteFunc(others, tooMany)
	for {
		all := append([]update{own}, others...)
		if !compact && len(others) > 0 && explicitSize(all) > 2*limit {
			others = others[:len(others)/2] // that need not be written out first
			continue
		}
		message, readable := []byte(nil), true
		if compact {
			all[0] = own.compacted()
			e := newCompactEncoder(all)
			if n := len(others); n > 0 && (!fits(len(all), len(e.vips)) || max(len(e.vips), len(e.claims)) > maxIndexed) {
				others = others[:n/2]
				continue
			}
			message = e.encode(all)
			readable = suits(len(e.patterns), len(e.vips), len(message))
		} else {
			for i, u := range all {
				all[i] = u.explicit()
			}
			all = slices.DeleteFunc(all, tooMany)
			message = encode(all...)
		}
		if readable && len(message) <= limit || len(others) == 0 {
			return message
		}
		others = others[:len(others)/2]
	}
}

// sendStep tells the others what has changed here, and newcomers everything.
func (m *Members) sendStep(context.Context) (time.Duration, error) {
	m.mu.Lock()
	ml := m.ml
	if ml == nil {
		m.mu.Unlock()
		return 0, nil
	}
	changes := update{node: m.own.node, born: m.own.born, entries: m.own.take()}
	var newcomers, others []*memberlist.Node
	for name, node := range m.live {
		if m.greet[name] {
			newcomers = append(newcomers, node)
		} else {
			others = append(others, node)
		}
	}
	clear(m.greet)
	var own greeting
	if len(newcomers) > 0 {
		own = m.own.greet(m.compacts(), len(m.live))
	}
	m.mu.Unlock()
	if len(newcomers)+len(others) == 0 {
		m.queue.Reset() // nobody takes from it; who comes is told everything
		return 0, nil
	}
	if len(newcomers) > 0 {
		for _, message := range own.encode() {
			sendTo(ml, newcomers, message)
		}
	}
	if len(changes.entries) == 0 {
		return 0, nil
	}
	for _, message := range split(changes) {
		m.pass(message)
		if len(others) < directMembers {
			sendTo(ml, others, message)
		}
	}
	return 0, nil
}

// greeting is what a newcomer is told: the whole page, in one packet if that is possible. In parts,
// none of them may say that it is complete. Even an empty one announces the new process.
//
// In a large cluster that would be nodes times VIPs for each newcomer. It has the page from the one
// that it has joined, and needs only the changes that this one may not have heard.
type greeting struct {
	page    update
	compact bool    // the newcomer understands it
	large   bool    // the cluster is
	recent  []entry // the last changes
}

func (j *journal) greet(compact bool, others int) greeting {
	return greeting{page: j.unsorted(), compact: compact, large: others >= directMembers, recent: j.recent}
}

// encode returns the messages.
func (g greeting) encode() [][]byte {
	full := g.page
	sortEntries(full.entries)
	if g.compact {
		if message := encodeCompact(full.compacted()); len(message) <= messageSize {
			return [][]byte{message}
		}
		if g.large {
			full.entries = g.recent
		}
	}
	full.floor = 0
	return split(full)
}

// sendTo sends a packet to each node. A failure is left to gossip and to the exchange of full
// states.
func sendTo(ml *memberlist.Memberlist, nodes []*memberlist.Node, message []byte) {
	for _, node := range nodes {
		_ = ml.SendBestEffort(node, message)
	}
}

// split encodes an update as messages that fit into packets; at least one.
func split(u update) [][]byte {
	var messages [][]byte
	rest := u.entries
	for {
		part := u
		part.entries = rest
		message := encode(part)
		for len(message) > messageSize && len(part.entries) > 1 {
			part.entries = part.entries[:max(1, len(part.entries)*messageSize/len(message))]
			message = encode(part)
		}
		messages = append(messages, message)
		rest = rest[len(part.entries):]
		if len(rest) == 0 {
			return messages
		}
	}
}
