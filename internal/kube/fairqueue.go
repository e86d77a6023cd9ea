package kube

import (
	"context"
	"sync"
)

// fairQueue holds what waits, by whom it is for. All take turns. When it is full, those lose of whom most
// waits, so that one cannot displace what is for the others. All but next are safe for concurrent use.
type fairQueue[T any] struct {
	most int
	more chan struct{} // has room for one: something may wait

	mu      sync.Mutex
	waiting map[string][]T
	turns   []string // each of waiting once
	length  int
}

func newFairQueue[T any](most int) *fairQueue[T] {
	return &fairQueue[T]{most: most, more: make(chan struct{}, 1), waiting: map[string][]T{}}
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
	of := q.turns[0]
	items := q.waiting[of]
	item = items[0]
	clear(items[:1])
	q.turns = q.turns[1:]
	if q.waiting[of] = items[1:]; len(items) > 1 {
		q.turns = append(q.turns, of)
	} else {
		delete(q.waiting, of)
	}
	q.length--
	return item, true
}
