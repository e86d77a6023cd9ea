package walk

import (
	"fmt"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Kernel is a table of the kernel. Its rules are read once, its elements one by one: a walk costs as
// much with ten thousand Services as with one.
type Kernel struct {
	listing nft.Listing
	chains  map[string]nft.ListedChain
	sets    map[string]nft.Shape
	found   map[string]*nft.Element
}

var _ Table = (*Kernel)(nil)

// Read reads a table's rules; there is false if the kernel has no such table.
func Read(conn *nfnetlink.Conn, t nft.Table) (k *Kernel, there bool, err error) {
	k = &Kernel{listing: nft.Listing{Conn: conn, Table: t}, found: map[string]*nft.Element{}}
	err = nfnetlink.Complete(func() (err error) {
		if there, err = k.listing.Exists(); err != nil || !there {
			return err
		}
		if k.sets, err = k.listing.Sets(); err != nil {
			return err
		}
		k.chains, err = k.listing.Rules()
		return err
	})
	if err != nil {
		return nil, there, fmt.Errorf("read table %s: %w", t.Name, err)
	}
	return k, there, nil
}

// Untouched returns the table as it is before any packet: what one removes, the next finds.
func (k *Kernel) Untouched() *Kernel {
	fresh := *k
	fresh.found = map[string]*nft.Element{}
	return &fresh
}

// Hooks returns the chains that the kernel enters.
func (k *Kernel) Hooks() map[string]nft.Hook {
	hooks := map[string]nft.Hook{}
	for name, c := range k.chains {
		if c.Hook != (nft.Hook{}) {
			hooks[name] = c.Hook
		}
	}
	return hooks
}

// Chain implements Table.
func (k *Kernel) Chain(name string) ([]nft.Listed, bool) {
	c, ok := k.chains[name]
	return c.Rules, ok
}

// Set implements Table.
func (k *Kernel) Set(name string) (nft.Shape, bool) {
	s, ok := k.sets[name]
	return s, ok
}

// Get implements Table.
func (k *Kernel) Get(set string, keys ...[]byte) ([]*nft.Element, error) {
	if len(keys) > 1 {
		return k.listing.Get(set, keys...)
	}
	name := set + "\x00" + string(keys[0])
	if e, ok := k.found[name]; ok {
		return []*nft.Element{e}, nil
	}
	found, err := k.listing.Get(set, keys...)
	if err == nil {
		k.found[name] = found[0]
	}
	return found, err
}

// Write implements Table: the walk changes nothing in the kernel.
func (k *Kernel) Write(set string, e nft.Element, remove bool) {
	if remove {
		k.found[set+"\x00"+string(e.Key)] = nil
	}
}
