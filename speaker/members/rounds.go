package members

import (
	"sync"
	"time"
)

const (
	// calmRounds is how many rounds of gossip pass on no claims after one that did, in a cluster where
	// each change also goes straight to every member: gossip is only for those that have missed it.
	// While changes keep coming every round would send packets.
	calmRounds = 3
	// crowd is how many messages wait at most for that.
	crowd = 32
)

// rounds say in which rounds of gossip claims are passed on. Its methods are safe for concurrent use.
type rounds struct {
	interval time.Duration // of the rounds

	mu    sync.Mutex
	began time.Time // the last round that passed on claims
	all   bool      // the next does
}

// urgent has the next round pass on what there is.
func (r *rounds) urgent() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = true
}

// passes reports whether claims are passed on now. A round asks once for each node that it picks.
func (r *rounds) passes(now time.Time, members, waiting int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	since := now.Sub(r.began)
	switch {
	case since < r.interval/2: // the same round
		return true
	case r.all, members > directMembers, waiting > crowd, since > calmRounds*r.interval+r.interval/2:
		r.began, r.all = now, false
		return true
	}
	return false
}
