package plan

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// take notes that e has addr.
func (b *Book) take(e *entry, addr netip.Addr) {
	holders := b.holders[addr]
	if len(holders) == 0 {
		b.pools.assigned(addr, 1)
		if _, kept := b.kept.at[addr]; !kept && b.pools.occupied(addr, true) {
			b.freed = true // not free, but those who wait do so for another reason now
		}
	} else {
		b.touch(addr)
	}
	if !hasNamespace(holders, e.Key.Namespace) && b.pools.used(addr, e.Key.Namespace, 1) {
		b.freed = true // likewise
	}
	i, _ := slices.BinarySearchFunc(holders, e, func(x, y *entry) int { return Older(&x.Service, &y.Service) })
	b.holders[addr] = slices.Insert(holders, i, e)
	b.share(addr, e.Request.Share)
	b.freed = b.freed || e.Request.Share != "" // to be shared by those who wait
	for waiter := range b.asking[addr] {
		b.mark(waiter)
	}
}

// drop notes that e, whose sharing key was key, has addr no longer.
func (b *Book) drop(e *entry, addr netip.Addr, key string, now time.Time) {
	holders := slices.DeleteFunc(b.holders[addr], func(h *entry) bool { return h == e })
	b.holders[addr] = holders
	b.unshare(addr, key)
	if !hasNamespace(holders, e.Key.Namespace) {
		b.pools.used(addr, e.Key.Namespace, -1)
		b.freed = true // the namespace has room again
	}
	b.touch(addr)
	if len(holders) > 0 {
		b.freed = true // a port of a shared address may be free
		return
	}
	delete(b.holders, addr)
	b.pools.assigned(addr, -1)
	if _, kept := b.kept.at[addr]; kept {
		// It was to be given, and was never seen to be.
	} else if pool := b.pools.of(addr); pool != nil && pool.Quarantine != 0 {
		b.kept.add(lb.Released{Addr: addr, Service: e.Key, At: now.UTC().Truncate(time.Second)}, b.pools)
	} else {
		b.pools.occupied(addr, false)
	}
	b.freed = true // also by what is kept: it is free for the one that had it
}

// unkeep makes an address free for everybody.
func (b *Book) unkeep(addr netip.Addr) {
	b.kept.remove(addr)
	if len(b.holders[addr]) == 0 {
		b.pools.occupied(addr, false)
		b.freed = true
	}
}

// busy reports whether addr cannot be given to just anybody.
func (b *Book) busy(addr netip.Addr) bool {
	if len(b.holders[addr]) > 0 {
		return true
	}
	_, kept := b.kept.at[addr]
	return kept
}

// touch has all that hold addr decided anew.
func (b *Book) touch(addr netip.Addr) {
	for _, e := range b.holders[addr] {
		b.mark(e)
	}
}

func (b *Book) share(addr netip.Addr, key string) {
	if key == "" {
		return
	}
	if b.shares[key] == nil {
		b.shares[key] = map[netip.Addr]bool{}
	}
	b.shares[key][addr] = true
}

// unshare takes addr from the addresses of key, unless another holder of it has that key.
func (b *Book) unshare(addr netip.Addr, key string) {
	if key == "" || slices.ContainsFunc(b.holders[addr], func(e *entry) bool { return e.Request.Share == key }) {
		return
	}
	delete(b.shares[key], addr)
	if len(b.shares[key]) == 0 {
		delete(b.shares, key)
	}
}

func hasNamespace(entries []*entry, namespace string) bool {
	return slices.ContainsFunc(entries, func(e *entry) bool { return e.Key.Namespace == namespace })
}
