package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// forget makes the kernel forget clients whose backend their group no longer has, and, in groups
// that have new backends, some of those that keep new clients from them.
func (t *table) forget() error {
	if !t.moved.loses && len(t.moved.gains) == 0 || !t.known {
		return nil
	}
	clients, err := t.kernel.clients()
	if err != nil {
		return fmt.Errorf("read the clients with session affinity: %w", err)
	}
	valid, held := map[uint32]affine{}, map[uint32]int{}
	for _, c := range clients {
		if _, ok := valid[c.group]; !ok {
			valid[c.group] = affineOf(t.have.parts[frontend{group: c.group}])
		}
		held[c.group]++
	}
	var gone []client
	for _, c := range clients {
		group := valid[c.group]
		crowded := held[c.group] > group.places/2
		if !group.backends[c.to] || crowded && t.moved.gains[c.group][group.prefers(c.place)] {
			gone = append(gone, c)
		}
	}
	for batch := range slices.Chunk(gone, maxOperations) {
		if t.commit(change{forget: batch}) == nil {
			continue
		}
		for _, c := range batch { // one of them may have timed out in the meantime
			if err := t.commit(change{forget: []client{c}}); err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove a client from session affinity: %w", err)
			}
		}
	}
	t.moved = moved{}
	return nil
}

// affine are the backends of a group to which clients may be remembered, and how many places it
// has.
type affine struct {
	backends map[address]bool
	places   int
}

func affineOf(entries []entry) affine {
	var a affine
	for _, e := range entries {
		if e.set == setAffinity {
			if a.backends == nil {
				a.backends = map[address]bool{}
			}
			n, _ := places(splitOf(e.number))
			a.backends[e.source], a.places = true, int(n)
		}
	}
	return a
}

// prefers returns the backend that a place prefers, by rendezvous hashing: of new backends, each
// gets its fair part of the places, and all others stay as they are.
func (a affine) prefers(place uint32) (best address) {
	most := uint64(0)
	for b := range a.backends {
		if h := mix(target{addr: b}.hash() + uint64(place)*0x9e3779b97f4a7c15); h >= most {
			best, most = b, h
		}
	}
	return best
}
