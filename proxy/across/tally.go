package across

import "net/netip"

// State is what is known of a node behind a router.
type State int

// The states. A node is Silent if it has not answered, and Unknown before that can be said. It is Diverted while this
// node's kernel would send elsewhere what is handed over to it.
const (
	Unknown State = iota
	Answers
	Silent
	Diverted
)

const (
	// losses is how many questions in a row a node may leave without an answer.
	losses = 3
	// again is how many it has to answer in a row after that.
	again = 3
)

// Nonce is what an answer has to repeat.
type Nonce [16]byte

// tally is what is known of one node. It begins as the zero value.
type tally struct {
	state State
	// asked is set while the question with nonce has no answer.
	asked bool
	nonce Nonce
	// row counts the last questions in a row that were answered, or, below zero, that were not.
	row int
}

// ask notes that a question is about to go out. That the one before has no answer by now counts, however late
// this comes: after a pause of this program the node is not the one that was silent.
func (t *tally) ask(nonce Nonce) {
	if t.asked {
		t.row = min(t.row, 0) - 1
		if t.row <= -losses {
			t.state = Silent
		}
	}
	t.asked, t.nonce = true, nonce
}

// answer takes an answer, and reports whether it is one to the last question.
func (t *tally) answer(nonce Nonce) bool {
	if !t.asked || t.nonce != nonce {
		return false
	}
	t.asked = false
	if t.row = max(t.row, 0) + 1; t.state == Unknown || t.row >= again {
		t.state = Answers
	}
	return true
}

// divert notes that the last question was not sent, as the tunnel is not the way to the node.
func (t *tally) divert() { t.state, t.asked, t.row = Diverted, false, 0 }

// missing reports whether a node's first answer has not come yet.
func (t *tally) missing() bool { return t.asked && t.state == Unknown }

// Nodes are the addresses of this node, and of those to ask.
type Nodes struct{ Self, Others []netip.Addr }
