package nftables

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// forget makes the kernel forget clients whose backend their group no longer has.
func (t *table) forget() error {
	if !t.stale || !t.known {
		return nil
	}
	clients, err := t.kernel.clients()
	if err != nil {
		return fmt.Errorf("read the clients with session affinity: %w", err)
	}
	valid := map[uint32]map[address]bool{}
	var gone []client
	for _, c := range clients {
		backends, ok := valid[c.group]
		if !ok {
			backends = affine(t.have.parts[frontend{group: c.group}])
			valid[c.group] = backends
		}
		if !backends[c.to] {
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
	t.stale = false
	return nil
}

// affine returns the backends of a group to which clients may be remembered.
func affine(entries []entry) map[address]bool {
	backends := map[address]bool{}
	for _, e := range entries {
		if e.set == setAffinity {
			backends[e.source] = true
		}
	}
	return backends
}
