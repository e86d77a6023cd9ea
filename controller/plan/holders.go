package plan

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// take notes that e has addr.
func (b *Book) take(e *entry, addr netip.Addr) {
	b.gain(e, addr)
	b.enter(e, addr)
}

// gain counts that e, which does not hold addr yet, is about to.
func (b *Book) gain(e *entry, addr netip.Addr) {
	others := b.at(addr)
	if len(others) == 0 {
		b.pools.assigned(addr, 1)
		if _, kept := b.kept.at[addr]; !kept && b.pools.occupied(addr, true) {
			b.freed = true // not free, but those who wait do so for another reason now
		}
	}
	if !hasNamespace(others, e.Key.Namespace) {
		b.freed = b.pools.used(addr, e.Key.Namespace, 1) || b.freed // likewise
		b.kept.crowd(e.Key.Namespace)
	}
	b.freed = b.freed || e.Request.Share != "" // to be shared by those who wait
	for waiter := range b.asking[addr] {
		b.mark(waiter)
	}
	b.markJoined(e, addr)
}

// parting returns those of addrs that e holds by right, so that clients may know them, and of these those that nobody
// else holds by right. It is to be asked before e leaves them: who merely shows one may have it once e is gone.
func (b *Book) parting(e *entry, addrs []netip.Addr) (given, alone []netip.Addr) {
	for _, addr := range addrs {
		if !b.rightful(e, addr) {
			continue
		}
		given = append(given, addr)
		if !b.owned(addr, e) {
			alone = append(alone, addr)
		}
	}
	return given, alone
}

// lose counts that e, which held addr, does so no longer. Clients may know the address if it was given to e; alone is
// set if it was given to none of the others.
func (b *Book) lose(e *entry, addr netip.Addr, given, alone bool, now time.Time) {
	others := b.at(addr)
	if !hasNamespace(others, e.Key.Namespace) {
		b.pools.used(addr, e.Key.Namespace, -1)
	}
	// What is free now: the address, also for the one that it is kept for, a port of it, or room for the
	// namespace.
	b.freed = true
	b.markJoined(e, addr)
	if len(others) > 0 {
		if alone {
			b.keep(addr, e.Key, now)
		} else if given {
			b.left[addr] = e.Key
		}
		return
	}
	last := e.Key
	if !given {
		last, given = b.left[addr]
	}
	delete(b.left, addr)
	b.pools.assigned(addr, -1)
	if r, kept := b.kept.at[addr]; kept {
		b.kept.crowd(r.Service.Namespace) // beyond its quota if need be, now that nobody holds it
	} else if !given || !b.keep(addr, last, now) {
		b.pools.occupied(addr, false)
	}
}

// keep keeps addr for the Service that it was given to last, and reports whether its pool says so. What is kept already
// was to be given, and was never seen to be.
func (b *Book) keep(addr netip.Addr, last lb.Key, now time.Time) bool {
	pool := b.pools.of(addr)
	if pool == nil || pool.Quarantine == 0 {
		return false
	}
	if _, kept := b.kept.at[addr]; !kept {
		b.kept.add(lb.Released{Addr: addr, Service: last, At: now.UTC().Truncate(time.Second)}, b.pools)
	}
	return true
}

// unkeep makes an address free for everybody.
func (b *Book) unkeep(addr netip.Addr) {
	b.kept.remove(addr)
	b.freed = true
	if len(b.at(addr)) == 0 {
		b.pools.occupied(addr, false)
	}
}

// busy reports whether addr cannot be given to just anybody.
func (b *Book) busy(addr netip.Addr) bool {
	if len(b.at(addr)) > 0 {
		return true
	}
	_, kept := b.kept.at[addr]
	return kept
}

// touch has all that hold addr decided anew.
func (b *Book) touch(addr netip.Addr) {
	for _, e := range b.at(addr) {
		b.mark(e)
	}
}

// shared are the addresses that Services with one sharing key hold.
type shared struct {
	at      map[netip.Addr]uint64 // when that which holds an address changed last, by Book.clock
	changed uint64                // the latest of these
}

// share notes that what holds addr has changed, and that Services with the key are among that.
func (b *Book) share(addr netip.Addr, key string) {
	if key == "" {
		return
	}
	of := b.shares[key]
	if of == nil {
		of = &shared{at: map[netip.Addr]uint64{}}
		b.shares[key] = of
	}
	b.clock++
	of.at[addr], of.changed = b.clock, b.clock
}

// unshare notes that a Service with the key has left addr: that may let others in, or be the last with the key.
func (b *Book) unshare(addr netip.Addr, key string) {
	left, last := false, ""
	for _, e := range b.at(addr) {
		if !e.over && e.Request.Share != last { // most have one key
			last = e.Request.Share
			left = left || last == key
			b.share(addr, last)
		}
	}
	if of := b.shares[key]; of != nil && !left {
		delete(of.at, addr)
		if len(of.at) == 0 {
			delete(b.shares, key)
		}
	}
}

func hasNamespace(entries []*entry, namespace string) bool {
	return slices.ContainsFunc(entries, func(e *entry) bool { return e.Key.Namespace == namespace })
}
