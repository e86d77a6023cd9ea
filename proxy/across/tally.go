package across

import (
	"net/netip"
	"slices"
	"time"
)

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
	// open are the questions without an answer, the last one last, of which at was the time. Of a node that answers these
	// are all since its last answer, as one may take longer than the time to the next question. Else it is the last one.
	open []Nonce
	at   time.Time
	// row counts the last questions in a row that were answered, or, below zero, that were not.
	row int
}

// ask notes that a question is about to go out. That the one before has no answer by now counts, however late
// this comes: after a pause of this program the node is not the one that was silent.
func (t *tally) ask(nonce Nonce, now time.Time) {
	if len(t.open) > 0 {
		t.row = min(t.row, 0) - 1
		if t.row <= -losses {
			t.state = Silent
		}
	}
	if t.state != Answers {
		t.open = t.open[:0]
	}
	t.open, t.at = append(t.open, nonce), now
}

// answer takes an answer, and reports whether it is one to an open question.
func (t *tally) answer(nonce Nonce) bool {
	if !slices.Contains(t.open, nonce) {
		return false
	}
	t.open = t.open[:0]
	if t.row = max(t.row, 0) + 1; t.state == Unknown || t.row >= again {
		t.state = Answers
	}
	return true
}

// divert notes that the last question was not sent, as the tunnel is not the way to the node.
func (t *tally) divert() { t.state, t.open, t.row = Diverted, t.open[:0], 0 }

// missing reports whether a node's first answer has not come yet.
func (t *tally) missing() bool { return len(t.open) > 0 && t.state == Unknown }

// late reports whether a node that answers owes an answer.
func (t *tally) late() bool { return len(t.open) > 0 && t.state == Answers }

// Nodes are the addresses of this node, and of those to ask.
type Nodes struct{ Self, Others []netip.Addr }
