package plan

import (
	"hash/fnv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The condition AsRequested of a Service is one, and each node may have something to say there: nodes run in other
// modes, and lack other things. So one node says it for all, the first one to write it, which its message names first.
// It alone corrects the condition, and takes it away once it serves the Service as requested; the next node then says
// what it has to. What a node said that is no Node of the cluster any more, any node replaces or takes away.

const (
	// maxRequestText is how many bytes a message has at most, as in an Event.
	maxRequestText = 1024
	// turnOf is how much later, for each Node of the cluster, the last node writes what all may write, and lastTurn the
	// most of that. Before its turn, a node has mostly seen that another one has written.
	turnOf, lastTurn = 500 * time.Millisecond, time.Minute
)

// ConditionWrite is what a node has to write of the condition AsRequested of a Service.
type ConditionWrite struct {
	// UID is of the Service, Shown what it shows.
	UID   string
	Shown lb.Condition
	// Want is what it shall show; without a type, nothing.
	Want lb.Condition
	// Turn is how long the node waits before, as others may write the same.
	Turn time.Duration
}

// AsRequested returns what a node has to write of a Service, of whose requests it refuses some; ok is false if that
// is nothing. exists reports whether there is a Node of a name, and nodes is how many there are.
func AsRequested(self string, svc lb.Service, refused []lb.Refusal, exists func(string) bool, nodes int) (
	w ConditionWrite, ok bool) {
	w = ConditionWrite{UID: svc.UID, Shown: svc.AsRequested, Want: notAsRequested(self, refused)}
	author, _, _ := strings.Cut(w.Shown.Message, ": ")
	switch {
	case w.Shown == w.Want:
		return w, false
	case w.Shown.Type == "":
	case author == self:
		return w, true
	case exists(author):
		return w, false
	}
	w.Turn = turn(self, svc.Key, nodes)
	return w, true
}

// notAsRequested returns the condition for what a node refuses; zero if that is nothing.
func notAsRequested(self string, refused []lb.Refusal) (c lb.Condition) {
	var sentences []string
	for _, r := range refused {
		if c.Type == "" {
			c = lb.Condition{Type: lb.ConditionAsRequested, Reason: r.Reason}
		}
		sentences = append(sentences, r.Message)
	}
	if c.Type != "" {
		c.Message = lb.Shortened(self+": "+strings.Join(sentences, "; "), maxRequestText)
	}
	return c
}

// turn is the node's own for each Service, so that not one node writes for all Services.
func turn(self string, key lb.Key, nodes int) time.Duration {
	last := min(time.Duration(nodes)*turnOf, lastTurn)
	if nodes < 2 {
		return 0
	}
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(self + "\x00" + key.String()))
	return time.Duration(hash.Sum64()%1000) * last / 1000
}
