package plan

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Book knows who holds what, so that a change costs what it touches and not what there is. It is told of each change, then asked
// for a plan, which decides for the Services that the changes concern: those that changed, those that share an address with
// one, and, once something became free, those that wait.
type Book struct {
	config     Config
	namespaces map[string]lb.Namespace
	pools      *pools
	entries    map[lb.Key]*entry
	// holders has, for each address that must not be given to a stranger, all that have it, oldest first.
	holders map[netip.Addr][]*entry
	// shares has the addresses that Services with a sharing key hold, by key.
	shares map[string]map[netip.Addr]bool
	// asking has the Services that wait for an address by name.
	asking map[netip.Addr]map[*entry]bool
	kept   keptAddresses

	dirty, waiting map[*entry]bool
	// freed is set when those who wait may have a chance.
	freed   bool
	summary Summary
}

// Summary counts the Services that are ours.
type Summary struct {
	Assigned int               // those that have what they ask for
	Pending  map[lb.Reason]int // the others
}

// entry is one Service.
type entry struct {
	lb.Service
	// held is what it holds: what its status shows, or what was decided since.
	held []netip.Addr
	// taken is all that nobody else can have because of it: held, what its status still shows, and what others route to it.
	taken []netip.Addr
	asks  []netip.Addr // what it waits for by name, as in Book.asking
	// reason is what it is counted under in the summary; "" when it is not counted.
	reason lb.Reason
}

// NewBook returns an empty book. SetPools must be called before the first plan.
func NewBook(config Config) *Book {
	b := &Book{
		config: config, entries: map[lb.Key]*entry{}, holders: map[netip.Addr][]*entry{}, shares: map[string]map[netip.Addr]bool{},
		asking: map[netip.Addr]map[*entry]bool{}, dirty: map[*entry]bool{}, waiting: map[*entry]bool{},
		kept:    keptAddresses{at: map[netip.Addr]lb.Released{}, of: map[lb.Key][]netip.Addr{}},
		summary: Summary{Pending: map[lb.Reason]int{}},
	}
	b.pools = newPools(nil, nil)
	return b
}

// SetPools replaces the pools and the nodes, whose addresses are not handed out. All Services are decided anew, unless nothing
// differs but the pools' statuses and the rest of the nodes.
func (b *Book) SetPools(pools map[string]lb.Pool, nodes map[string]lb.Node) {
	never := append(nodeAddresses(nodes), others(b.config.Never)...)
	if slices.Equal(never, b.pools.never) && b.pools.same(pools) {
		return
	}
	b.pools = newPools(pools, never)
	for addr, holders := range b.holders {
		b.pools.assigned(addr, 1)
		b.pools.occupied(addr, true)
		for i, e := range holders {
			if !hasNamespace(holders[:i], e.Key.Namespace) {
				b.pools.used(addr, e.Key.Namespace, 1)
			}
		}
	}
	for addr := range b.kept.at {
		if len(b.holders[addr]) == 0 {
			b.pools.occupied(addr, true)
		}
	}
	b.kept.reschedule(b.pools)
	for _, e := range b.entries {
		b.dirty[e] = true
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
	before, key := e.taken, e.Request.Share
	b.freed = b.freed || key != "" || s.Request.Share != "" // whatever has changed may let others share
	e.Service = s
	e.held, e.taken = holding(&s, pending)
	for _, addr := range e.taken {
		if !slices.Contains(before, addr) {
			b.take(e, addr)
		}
	}
	for _, addr := range before {
		if !slices.Contains(e.taken, addr) {
			b.drop(e, addr, key, now)
		} else if key != s.Request.Share {
			b.unshare(addr, key)
			b.share(addr, s.Request.Share)
		}
		b.touch(addr) // ports and keys decide whether the others may share it
	}
	for _, in := range s.Ingress {
		// Not earlier: until its status says that it has the address, another controller must go on keeping it.
		b.kept.remove(in.Addr)
	}
	b.dirty[e] = true
}

// holding returns what a Service holds and all that is taken because of it.
func holding(s *lb.Service, pending Pending) (held, taken []netip.Addr) {
	if len(s.Ingress) > 0 {
		held = make([]netip.Addr, 0, len(s.Ingress))
	}
	for _, in := range s.Ingress {
		held = append(held, in.Addr)
	}
	taken = held
	if pending.UID != "" && pending.Covers(*s) {
		// Whether the write took place is not known for sure, so what is shown stays taken as well.
		held = pending.Addresses
		taken = union(held, taken)
	}
	return held, union(taken, s.ExternalIPs)
}

// union returns the addresses of a, then those of b that are not in a; it changes neither.
func union(a, b []netip.Addr) []netip.Addr {
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

// Delete tells that a Service is gone.
func (b *Book) Delete(key lb.Key, now time.Time) {
	e := b.entries[key]
	if e == nil {
		return
	}
	delete(b.entries, key)
	for _, addr := range e.taken {
		b.drop(e, addr, e.Request.Share, now)
	}
	b.count(e, "")
	b.wait(e, nil, false)
	delete(b.dirty, e)
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
	p := Plan{Services: make(map[lb.Key]Decision, len(b.dirty)), Pools: make(map[string]PoolPlan, len(b.pools.ordered))}
	for b.freed || len(b.dirty) > 0 {
		for _, e := range b.due() {
			if d, ok := b.decision(e); ok {
				p.Services[e.Key] = d
			}
		}
	}
	for _, pool := range b.pools.ordered {
		p.Pools[pool.Name] = pool.plan(b.kept.list(pool.Name, b.pools))
	}
	return p
}

// due returns those to decide now, oldest first.
func (b *Book) due() []*entry {
	due := make([]*entry, 0, len(b.dirty))
	for e := range b.dirty {
		due = append(due, e)
	}
	if b.freed {
		for e := range b.waiting {
			if !b.dirty[e] {
				due = append(due, e)
			}
		}
	}
	b.freed = false
	clear(b.dirty)
	slices.SortFunc(due, func(x, y *entry) int { return Older(&x.Service, &y.Service) })
	return due
}

// decision decides for one Service if it is or was ours.
func (b *Book) decision(e *entry) (Decision, bool) {
	switch {
	case e.Deleting:
		// It holds what it has until it is gone, and nobody cares for its condition.
	case Ours(&e.Service, b.config.Class):
		return b.decide(e), true
	case e.Type != lb.LoadBalancer && len(e.Conditions) > 0:
		// Once ours. A Service of another class is left alone, even one that shows our conditions: they may be those of
		// another controller like this one, and an API server does not let a class change.
		b.settled(e)
		return Decision{}, true
	}
	b.settled(e)
	return Decision{}, false
}

func (b *Book) settled(e *entry) {
	b.count(e, "")
	b.wait(e, nil, false)
}

// Summary counts the Services by what was decided last.
func (b *Book) Summary() Summary {
	return Summary{Assigned: b.summary.Assigned, Pending: maps.Clone(b.summary.Pending)}
}

// Next returns when something becomes free by the mere passing of time; zero when nothing does.
func (b *Book) Next() time.Time { return b.kept.next }

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
		b.dirty[waiter] = true
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

// busy tells whether addr cannot be given to just anybody.
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
		b.dirty[e] = true
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

// count puts e under another reason in the summary, "" for none.
func (b *Book) count(e *entry, reason lb.Reason) {
	switch e.reason {
	case "":
	case lb.ReasonAssigned:
		b.summary.Assigned--
	default:
		if b.summary.Pending[e.reason]--; b.summary.Pending[e.reason] == 0 {
			delete(b.summary.Pending, e.reason)
		}
	}
	switch e.reason = reason; reason {
	case "":
	case lb.ReasonAssigned:
		b.summary.Assigned++
	default:
		b.summary.Pending[reason]++
	}
}

// wait notes whether e waits for something, and for which addresses by name.
func (b *Book) wait(e *entry, asks []netip.Addr, waits bool) {
	for _, addr := range e.asks {
		delete(b.asking[addr], e)
		if len(b.asking[addr]) == 0 {
			delete(b.asking, addr)
		}
	}
	e.asks = nil
	if !waits {
		delete(b.waiting, e)
		return
	}
	b.waiting[e] = true
	e.asks = asks
	for _, addr := range asks {
		if b.asking[addr] == nil {
			b.asking[addr] = map[*entry]bool{}
		}
		b.asking[addr][e] = true
	}
}

func hasNamespace(entries []*entry, namespace string) bool {
	return slices.ContainsFunc(entries, func(e *entry) bool { return e.Key.Namespace == namespace })
}
