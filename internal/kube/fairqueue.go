package kube

import (
	"context"
	"slices"
	"sync"
	"time"
)

const (
	slowItem = time.Second // an item that takes as long has held up those of others
	rests    = 3           // times as long others go first then
)

// fairQueue holds what waits, by whom it is for. All take turns. When it is full, those lose of whom most
// waits, so that one cannot displace what is for the others. Those whose last item was slow, as took tells, have a
// turn only where no other has, or a quarter of the time all together. All but next are safe for concurrent use.
type fairQueue[T any] struct {
	most int
	more chan struct{} // has room for one: something may wait

	mu      sync.Mutex
	waiting map[string][]T
	turns   []string // each of waiting once
	length  int
	slow    map[string]bool // those of waiting whose last item was slow
	rest    time.Time       // until when others go before them
}

func newFairQueue[T any](most int) *fairQueue[T] {
	return &fairQueue[T]{most: most, more: make(chan struct{}, 1), waiting: map[string][]T{}, slow: map[string]bool{}}
}

// add adds an item. It never blocks. lost reports whether an item, this one or another, had no place;
// from is for whom it was.
func (q *fairQueue[T]) add(of string, item T) (from string, lost bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if lost = q.length >= q.most; lost {
		if from = q.longest(); len(q.waiting[of])+1 >= len(q.waiting[from]) {
			return of, true
		}
		q.drop(from)
	}
	if len(q.waiting[of]) == 0 {
		q.turns = append(q.turns, of)
	}
	q.waiting[of] = append(q.waiting[of], item)
	q.length++
	select {
	case q.more <- struct{}{}:
	default:
	}
	return from, lost
}

// putBack adds an item that next has returned as the first of those with which it waited. Nothing is lost: one who
// puts back each item before the next one has at most one more than have a place.
func (q *fairQueue[T]) putBack(of string, item T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting[of]) == 0 {
		q.turns = append(q.turns, of)
	}
	q.waiting[of] = slices.Insert(q.waiting[of], 0, item)
	q.length++
}

// took says how long an item took, also one that was put back before.
func (q *fairQueue[T]) took(of string, d time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.slow, of)
	if d >= slowItem {
		q.rest = time.Now().Add(rests * d)
		if len(q.waiting[of]) > 0 {
			q.slow[of] = true
		}
	}
}

// longest returns for whom most waits.
func (q *fairQueue[T]) longest() (of string) {
	for _, candidate := range q.turns {
		if len(q.waiting[candidate]) > len(q.waiting[of]) {
			of = candidate
		}
	}
	return of
}

// drop removes the newest item of one for whom several wait.
func (q *fairQueue[T]) drop(of string) {
	items := q.waiting[of]
	clear(items[len(items)-1:])
	q.waiting[of] = items[:len(items)-1]
	q.length--
}

// next waits for an item and removes it. ok is false once ctx has ended.
func (q *fairQueue[T]) next(ctx context.Context) (item T, ok bool) {
	for ctx.Err() == nil {
		if item, ok = q.take(); ok {
			return item, true
		}
		select {
		case <-ctx.Done():
		case <-q.more:
		}
	}
	return item, false
}

func (q *fairQueue[T]) take() (item T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.length == 0 {
		return item, false
	}
	turn := 0
	if time.Now().Before(q.rest) {
		turn = max(slices.IndexFunc(q.turns, func(of string) bool { return !q.slow[of] }), 0)
	}
	of := q.turns[turn]
	items := q.waiting[of]
	item = items[0]
	clear(items[:1])
	q.turns = slices.Delete(q.turns, turn, turn+1)
	if q.waiting[of] = items[1:]; len(items) > 1 {
		q.turns = append(q.turns, of)
	} else {
		delete(q.waiting, of)
		delete(q.slow, of)
	}
	q.length--
	return item, true
}
