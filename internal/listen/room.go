package listen

import (
	"container/list"
	"net/netip"
	"sync"
)

// maxKept is how many things of a client stay while there are others.
const maxKept = 4

// Room holds a bounded number of things that belong to clients. When one more comes, the oldest of
// the client that has the most leaves: a client that takes much loses its own, and not those of
// others. A thing that is kept leaves only after all others. It is safe for concurrent use.
type Room[T any] struct {
	limit int

	mu      sync.Mutex
	things  list.List // of *Place[T], the oldest first
	clients map[netip.Prefix]int
	kept    map[netip.Prefix]int
}

// Place is what a thing has in a Room.
type Place[T any] struct {
	client netip.Prefix
	thing  T
	at     *list.Element // nil once it has left
	kept   bool
}

// NewRoom returns a Room for that many things.
func NewRoom[T any](limit int) *Room[T] {
	return &Room[T]{limit: limit, clients: map[netip.Prefix]int{}, kept: map[netip.Prefix]int{}}
}

// Enter adds a thing. It returns the thing that had to leave, if full is set.
func (r *Room[T]) Enter(client netip.Prefix, thing T) (place *Place[T], out T, full bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	place = &Place[T]{client: client, thing: thing}
	place.at = r.things.PushBack(place)
	r.clients[client]++
	if r.things.Len() <= r.limit {
		return place, out, false
	}
	var excess *Place[T]
	for at := r.things.Front(); at != nil; at = at.Next() {
		if p := at.Value.(*Place[T]); !p.kept && (excess == nil || r.clients[p.client] > r.clients[excess.client]) {
			excess = p
		}
	}
	r.leave(excess)
	return place, excess.thing, true
}

// Leave takes a thing away; it may have left already.
func (r *Room[T]) Leave(place *Place[T]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leave(place)
}

// Keep says whether a thing is to stay while there are others to leave; that counts for four things of a client.
func (r *Room[T]) Keep(place *Place[T], keep bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if place.at != nil && (!keep || r.kept[place.client] < maxKept) {
		r.keep(place, keep)
	}
}

func (r *Room[T]) keep(place *Place[T], keep bool) {
	switch {
	case place.kept == keep:
	case keep:
		r.kept[place.client]++
	default:
		if r.kept[place.client]--; r.kept[place.client] == 0 {
			delete(r.kept, place.client)
		}
	}
	place.kept = keep
}

func (r *Room[T]) leave(place *Place[T]) {
	if place.at == nil {
		return
	}
	r.things.Remove(place.at)
	place.at = nil
	r.keep(place, false)
	if r.clients[place.client]--; r.clients[place.client] == 0 {
		delete(r.clients, place.client)
	}
}

// Len returns how many things there are.
func (r *Room[T]) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.things.Len()
}
