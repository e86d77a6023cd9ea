package relay

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// questions are the flows about which the proxy is asked. It is safe for concurrent use.
type questions struct {
	wake chan struct{} // holds a token while some are to be sent

	mu    sync.Mutex
	open  map[wire.Flow]chan wire.Answer
	queue []wire.Flow // of them, those that are to be sent
}

func newQuestions() *questions {
	return &questions{wake: make(chan struct{}, 1), open: map[wire.Flow]chan wire.Answer{}}
}

// ask returns what the proxy says about a flow; ok is false if it says nothing within a time.
func (q *questions) ask(ctx context.Context, about wire.Flow, within time.Duration) (a wire.Answer, ok bool) {
	answer := make(chan wire.Answer, 1)
	q.mu.Lock()
	q.open[about] = answer
	q.queue = append(q.queue, about)
	q.mu.Unlock()
	q.poke()
	late := time.NewTimer(within)
	defer late.Stop()
	select {
	case a = <-answer:
		ok = true
	case <-ctx.Done():
	case <-late.C:
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.open[about] == answer {
		delete(q.open, about)
	}
	if !ok { // while the proxy is away, nothing else takes it out of the queue
		q.queue = slices.DeleteFunc(q.queue, func(f wire.Flow) bool { return f == about })
	}
	return a, ok
}

func (q *questions) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// next returns what to send.
func (q *questions) next() (flows []wire.Flow) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.queue) > 0 && len(flows) < wire.MaxFlows {
		f := q.queue[0]
		q.queue = q.queue[1:]
		if q.open[f] != nil {
			flows = append(flows, f)
		}
	}
	if len(q.queue) > 0 {
		q.poke()
	}
	return flows
}

// again has all be sent again, to another proxy.
func (q *questions) again() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queue = nil
	for f := range q.open {
		q.queue = append(q.queue, f)
	}
}

// take takes answers in.
func (q *questions) take(answers []wire.Answer) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, a := range answers {
		if answer := q.open[a.Flow]; answer != nil {
			delete(q.open, a.Flow)
			answer <- a
		}
	}
}
