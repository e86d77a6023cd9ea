package plan

import (
	"cmp"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Book knows who holds what, so that a change costs what it touches and not what there is. It is
// told of each change, then asked for a plan, which decides for the Services that the changes
// concern: those that changed, those that share an address with one, and, once something became
// free, those that wait.
type Book struct {
	config     Config
	namespaces map[string]lb.Namespace
	pools      *pools
	entries    map[lb.Key]*entry
	// holders has, for each address that must not be given to a stranger, all that have it.
	holders map[netip.Addr]*sharers
	// shares has the addresses that Services with a sharing key hold, by key, and clock counts their changes.
	shares map[string]*shared
	clock  uint64
	// asking has the Services that wait for an address by name.
	asking map[netip.Addr]map[*entry]bool
	kept   keptAddresses
	// left has who left an address to others last of those that it was given to: clients may know it, even if it
	// was given to none of the others.
	left map[netip.Addr]lb.Key

	// dirty are those to be decided, as far as their own mark still says so. Lists, not maps: a map
	// that was once large takes as long to go through as it did then.
	dirty []*entry
	// waiting are those that lack something, each at its place.
	waiting []*entry
	// freed is set when those who wait may have a chance.
	freed   bool
	summary Summary
}

// entry is one Service.
type entry struct {
	lb.Service
	// held is what it holds: what its status shows or its condition confirms, or what was decided since.
	held []netip.Addr
	// taken is all that nobody else can have because of it: held, and what its status still shows or its
	// condition confirms. Its external IPs are not among it: whoever may edit a Service could keep addresses from all
	// others.
	taken []netip.Addr
	// assigned are the addresses that a decision gave it and that its status need not show yet.
	assigned []netip.Addr
	// fresh are those of them that this book found for it.
	fresh []netip.Addr
	// over is set once it is not ours any more: see left.
	over bool
	// refused and waits are as Refuse has said.
	refused, waits bool
	// terms are those under which it shares addresses. Of the condition that it shows, shown is the
	// reason, named are the addresses that it confirms, and joined has the Services that held some of them first;
	// agreed is set if it was decided on the same terms. after is joined as decided since.
	terms   string
	shown   lb.Reason
	named   []netip.Addr
	agreed  bool
	joined  map[netip.Addr]lb.Key
	after   map[netip.Addr]lb.Key
	decided []netip.Addr // what after is decided for and the Service does not show yet
	asks    []netip.Addr // what it waits for by name, as in Book.asking
	// tried has what was searched for an address to share without finding one, and when.
	tried map[search]uint64
	born  int64 // when it was created, in seconds: numbers are compared faster than times
	dirty bool  // it is in Book.dirty
	place int   // in Book.waiting, counted from 1; 0 when it does not wait
	// reason is what it is counted under in the summary; "" when it is not counted.
	reason lb.Reason
}

// NewBook returns an empty book with room for some Services, to be filled at once. SetPools must be
// called before the first plan.
func NewBook(config Config, services int) *Book {
	b := &Book{
		config: config, entries: make(map[lb.Key]*entry, services), holders: make(map[netip.Addr]*sharers, services),
		shares:  map[string]*shared{},
		asking:  map[netip.Addr]map[*entry]bool{},
		left:    map[netip.Addr]lb.Key{},
		kept:    keptAddresses{at: map[netip.Addr]lb.Released{}, of: map[lb.Key][]netip.Addr{}},
		summary: Summary{Pending: map[lb.Reason]int{}},
	}
	b.pools = newPools(nil, never{})
	return b
}

// SetPools replaces the pools and the nodes, whose addresses and gateways are not handed out.
// Decided anew are those who wait, and those that have to do with a pool that differs in more than
// its status, or with an address that is handed out no more, or again.
func (b *Book) SetPools(pools map[string]lb.Pool, nodes map[string]lb.Node) {
	never := newNever(nodes, b.config.Never)
	changed := b.pools.changed(pools)
	if slices.Equal(never.ranges, b.pools.never.ranges) && len(changed) == 0 {
		return
	}
	before := b.pools
	b.pools = newPools(pools, never)
	b.freed = true
	for addr, holders := range b.holders {
		b.pools.assigned(addr, 1)
		b.pools.occupied(addr, true)
		for i, e := range holders.entries {
			if !hasNamespace(holders.entries[:i], e.Key.Namespace) {
				b.pools.used(addr, e.Key.Namespace, 1)
			}
		}
		if before.never.theirs[addr] != never.theirs[addr] || len(changed) > 0 &&
			(before.containedIn(addr, changed) || b.pools.containedIn(addr, changed)) {
			b.touch(addr)
		}
	}
	for addr := range b.kept.at {
		if len(b.at(addr)) == 0 {
			b.pools.occupied(addr, true)
		}
	}
	b.kept.reschedule(b.pools)
	for _, e := range b.entries {
		e.tried = nil
	}
	if len(changed) == 0 {
		return
	}
	for _, e := range b.entries {
		if e.Request.Pool != "" && changed[e.Request.Pool] {
			b.mark(e)
		}
	}
}

// SetNamespaces replaces the namespaces, by whose labels pools can be restricted.
func (b *Book) SetNamespaces(namespaces map[string]lb.Namespace) {
	b.freed = b.freed || b.pools.selectNamespaces && !reflect.DeepEqual(namespaces, b.namespaces)
	b.namespaces = namespaces
}

// Set tells of a Service that is new or has changed, and of a write to it that it may not show yet.
func (b *Book) Set(s lb.Service, pending Pending, now time.Time) {
	e := b.entries[s.Key]
	if e != nil && e.UID != s.UID {
		b.Delete(s.Key, now)
		e = nil
	}
	if e == nil {
		e = &entry{}
		b.entries[s.Key] = e
	}
	next := b.read(e, s, pending)
	if moved := !e.stands(&next); moved {
		b.move(e, &next, now)
	} else {
		e.become(&next)
	}
	for _, in := range s.Ingress {
		// Not earlier: until its status says that it has the address, another controller must go on
		// keeping it. Nor for who merely shows it.
		if e.knows(in.Addr) {
			b.kept.remove(in.Addr)
		}
	}
	b.mark(e)
}

// Refuse tells whether the API server refused the last write to a Service: then it comes after all others, as it
// may never show an address that another one could have. While it waits for its next write, it takes nothing new.
func (b *Book) Refuse(key lb.Key, refused, waits bool) {
	if e := b.entries[key]; e != nil {
		e.refused, e.waits = refused, waits
	}
}

// read returns e as s and pending tell of it.
func (b *Book) read(e *entry, s lb.Service, pending Pending) entry {
	next := entry{Service: s, born: s.Created.Unix(), over: left(&s, b.config.Class), decided: e.decided, after: e.after}
	next.held, next.taken, next.assigned = holding(&s, pending)
	for _, addr := range e.fresh {
		if slices.Contains(next.assigned, addr) {
			next.fresh = append(next.fresh, addr)
		}
	}
	next.recall()
	// What the condition confirms stays with the Service also where a program has taken it out of the status, until
	// the Service shows a write of ours: otherwise one address could come to be confirmed for two.
	next.taken = union(next.taken, next.named)
	if !pending.of(s) {
		next.held = withConfirmed(next.held, next.named)
	}
	if next.over && Protected(&s) {
		next.taken = union(next.taken, shownAddresses(&s))
	}
	return next
}

// become takes over what was read.
func (e *entry) become(next *entry) {
	next.asks, next.dirty, next.place, next.reason = e.asks, e.dirty, e.place, e.reason
	next.refused, next.waits = e.refused, e.waits
	*e = *next
}

// stands reports whether next concerns no other Service otherwise than e did.
func (e *entry) stands(next *entry) bool {
	return slices.Equal(e.taken, next.taken) && slices.Equal(e.named, next.named) && slices.Equal(e.fresh, next.fresh) &&
		!slices.ContainsFunc(e.named, func(addr netip.Addr) bool { return e.lacks(addr) != next.lacks(addr) }) &&
		e.over == next.over && e.agreed == next.agreed && e.Deleting == next.Deleting && e.Headless == next.Headless &&
		maps.Equal(e.joined, next.joined) && maps.Equal(e.after, next.after) &&
		!slices.ContainsFunc(e.taken, func(addr netip.Addr) bool { return e.settled(addr) != next.settled(addr) }) &&
		e.Request.Share == next.Request.Share && e.Request.Selector == next.Request.Selector &&
		e.ExternalPolicy == next.ExternalPolicy && slices.Equal(e.Ports, next.Ports) &&
		e.Unkept.Ports == next.Unkept.Ports
}

// move has e become what was read, and has those decided anew that this concerns.
func (b *Book) move(e, next *entry, now time.Time) {
	before, named := e.taken, !slices.Equal(e.named, next.named) || !slices.Equal(e.fresh, next.fresh)
	over := e.over != next.over
	gone := without(before, func(addr netip.Addr) bool { return slices.Contains(next.taken, addr) })
	given, alone := b.parting(e, without(gone, func(addr netip.Addr) bool {
		// Never given to it: no write of this version of it has taken place, or may yet.
		return e.UID == next.UID && e.Version == next.Version && slices.Contains(e.fresh, addr)
	}))
	for _, addr := range before {
		b.leave(e, addr)
	}
	b.freed = b.freed || e.Request.Share != "" || next.Request.Share != "" // may let others share
	e.become(next)
	for _, addr := range gone {
		b.lose(e, addr, slices.Contains(given, addr), slices.Contains(alone, addr), now)
	}
	for _, addr := range e.taken {
		if !slices.Contains(before, addr) {
			b.gain(e, addr)
		}
		b.enter(e, addr)
	}
	for _, addr := range union(before, e.taken) {
		b.markFirst(addr)
		if over {
			for waiter := range b.asking[addr] { // its condition says so
				b.mark(waiter)
			}
		}
		if !named && !over {
			continue
		}
		for _, other := range b.at(addr) {
			if !other.knows(addr) {
				b.mark(other)
			}
		}
	}
}

// holding returns what a Service holds, all that is taken because of it, and what is known to be
// assigned to it although its status does not show that yet.
func holding(s *lb.Service, pending Pending) (held, taken, assigned []netip.Addr) {
	if len(s.Ingress) > 0 {
		held = make([]netip.Addr, 0, len(s.Ingress))
	}
	for _, in := range s.Ingress {
		held = append(held, in.Addr)
	}
	taken = union(nil, held) // each once, whatever somebody has written into the status
	if pending.of(*s) {
		// Whether the write took place is not known for sure, so what is shown stays taken as well.
		held = pending.Addresses
		assigned = union(held, pending.Possible)
		taken = union(assigned, taken)
	}
	return held, taken, assigned
}

// withConfirmed adds the confirmed addresses to those that a status shows, of which only so many count together.
func withConfirmed(shown, confirmed []netip.Addr) []netip.Addr {
	all := union(shown, confirmed)
	if len(all) > lb.MaxAddresses {
		all = union(confirmed, shown)[:lb.MaxAddresses]
	}
	return all
}

// union returns the addresses of a, then those of b that are not in a; it changes neither.
func union(a, b []netip.Addr) []netip.Addr {
	if len(a) == 0 && len(b) < 2 {
		return slices.Clip(b)
	}
	all := a[:len(a):len(a)]
	for _, addr := range b {
		if !slices.Contains(all, addr) {
			all = append(all, addr)
		}
	}
	return all
}

// Service returns a Service as Set told of it last.
func (b *Book) Service(key lb.Key) lb.Service {
	if e := b.entries[key]; e != nil {
		return e.Service
	}
	return lb.Service{}
}

// Pool names the pool in whose status an address is reserved: the oldest that contains it; "" when
// none does.
func (b *Book) Pool(addr netip.Addr) string {
	if p := b.pools.of(addr); p != nil {
		return p.Name
	}
	return ""
}

// Delete tells that a Service is gone.
func (b *Book) Delete(key lb.Key, now time.Time) {
	e := b.entries[key]
	if e == nil {
		return
	}
	given, alone := b.parting(e, e.taken)
	delete(b.entries, key)
	for _, addr := range e.taken {
		b.leave(e, addr)
		b.lose(e, addr, slices.Contains(given, addr), slices.Contains(alone, addr), now)
		b.markFirst(addr)
	}
	b.count(e, "")
	b.wait(e, nil, false)
	e.dirty = false
}

// Keep tells of addresses that an earlier controller has seen become free.
func (b *Book) Keep(released []lb.Released) {
	for _, r := range released {
		if !b.busy(r.Addr) {
			b.kept.add(r, b.pools)
			b.pools.occupied(r.Addr, true)
		}
	}
}

// Plan decides for all Services that the changes since the last plan concern.
func (b *Book) Plan(now time.Time) Plan {
	for _, addr := range b.kept.expired(now, b.pools) {
		b.unkeep(addr)
	}
	for _, addr := range b.kept.beyond(b.pools, func(addr netip.Addr) bool { return len(b.at(addr)) > 0 }) {
		b.unkeep(addr)
	}
	p := Plan{Services: make(map[lb.Key]Decision, len(b.dirty)), Pools: make(map[string]PoolPlan, len(b.pools.ordered))}
	for b.freed || len(b.dirty) > 0 {
		for _, e := range b.due() {
			if d, ok := b.decision(e); ok {
				p.Services[e.Key] = d
			}
		}
	}
	for _, pool := range b.pools.ordered {
		p.Pools[pool.Name] = pool.plan(b.kept.list(pool.Name, b.pools), b.busy)
	}
	return p
}

// mark has e decided in the next plan.
func (b *Book) mark(e *entry) {
	if !e.dirty {
		e.dirty = true
		b.dirty = append(b.dirty, e)
	}
}

// due returns those to decide now, oldest first, and after them those that the API server refused.
func (b *Book) due() []*entry {
	if b.freed {
		for _, e := range b.waiting {
			b.mark(e)
		}
	}
	b.freed = false
	due := slices.DeleteFunc(b.dirty, func(e *entry) bool { return !e.dirty }) // deleted meanwhile
	b.dirty = nil
	for _, e := range due {
		e.dirty = false
	}
	slices.SortFunc(due, func(x, y *entry) int {
		return cmp.Or(cmp.Compare(x.turn(), y.turn()), cmp.Compare(x.born, y.born), Older(&x.Service, &y.Service))
	})
	return due
}

// turn is less for those that are decided first.
func (e *entry) turn() int {
	if e.refused {
		return 1
	}
	return 0
}

// decision decides for one Service if it is or was ours.
func (b *Book) decision(e *entry) (Decision, bool) {
	switch {
	case e.Deleting && Protected(&e.Service) &&
		(e.Type != lb.LoadBalancer || Ours(&e.Service, b.config.Class) || asAssigned(&e.Service)):
		b.forget(e)
		return e.farewell(), true
	case e.Deleting && len(e.taken) == 0 && Orphaned(&e.Service, b.config.Class):
		b.forget(e)
		return e.farewell(), true
	case e.Deleting, e.Headless && e.Type == lb.LoadBalancer:
		// It holds what it has until it is gone, or back, and nobody cares for its condition.
	case Ours(&e.Service, b.config.Class) && e.waits:
		b.forget(e)
		b.count(e, lb.ReasonStatusRefused)
		return Decision{}, false
	case Ours(&e.Service, b.config.Class):
		return b.decide(e), true
	case e.over && (len(e.Conditions) > 0 || e.Announcements != ""):
		b.forget(e)
		return e.end(), true
	}
	b.forget(e)
	return Decision{}, false
}

// forget has e wait for nothing and be counted nowhere.
func (b *Book) forget(e *entry) {
	b.count(e, "")
	b.wait(e, nil, false)
}

// Next returns when something becomes free by the mere passing of time; zero when nothing does.
func (b *Book) Next() time.Time { return b.kept.next }
