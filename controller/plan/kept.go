package plan

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxReleasedSize bounds the kept addresses that a pool's status lists, the newest, in bytes: every node that announces
// hears of each change of the status. A controller that takes over knows only of those.
const maxReleasedSize = 64 << 10

// releasedSize returns what one takes in the status, and is never too little.
func releasedSize(r lb.Released) int {
	const names = len(`{"address":"","namespace":"","name":"","at":"2006-01-02T15:04:05Z"},`)
	return names + len(r.Addr.String()) + len(r.Service.Namespace) + len(r.Service.Name)
}

// keptList is what is kept of a pool.
type keptList struct {
	newest []lb.Released // sorted by address
	counts map[lb.Family]int
}

// keptAddresses are free addresses that are kept for the Services that held them last.
type keptAddresses struct {
	at map[netip.Addr]lb.Released
	of map[lb.Key][]netip.Addr
	// crowded are the namespaces for which more may be kept than their quotas have room for.
	crowded map[string]bool
	// next is not after the moment when the first of them is free for everybody; zero when none ever
	// is.
	next time.Time
	// lists are by pool; nil when they are to be made anew.
	lists map[string]keptList
	// excess is what namespaces keep beyond their shares, by pool; nil when it is to be made anew.
	excess map[poolFamily]excess
}

// excess is what namespaces keep of a pool beyond their shares, in the order in which it is given to others, and how
// much of it is of each.
type excess struct {
	addrs []netip.Addr
	of    map[string]int
}

type poolFamily struct {
	pool   *pool
	family lb.Family
}

func (k *keptAddresses) add(r lb.Released, ps *pools) {
	k.remove(r.Addr)
	k.at[r.Addr], k.excess = r, nil
	k.of[r.Service] = append(k.of[r.Service], r.Addr)
	k.crowd(r.Service.Namespace)
	k.lists = nil
	k.until(r, ps)
}

func (k *keptAddresses) remove(addr netip.Addr) {
	r, ok := k.at[addr]
	if !ok {
		return
	}
	delete(k.at, addr)
	k.lists, k.excess = nil, nil
	if left := slices.DeleteFunc(k.of[r.Service], func(a netip.Addr) bool { return a == addr }); len(left) > 0 {
		k.of[r.Service] = left
	} else {
		delete(k.of, r.Service)
	}
}

// until takes into account when r is free for everybody, and returns it; false when it never is.
func (k *keptAddresses) until(r lb.Released, ps *pools) (time.Time, bool) {
	end, ok := keptUntil(r, ps)
	if ok && (k.next.IsZero() || end.Before(k.next)) {
		k.next = end
	}
	return end, ok
}

// keptUntil returns when r is free for everybody, and false when it never is.
func keptUntil(r lb.Released, ps *pools) (time.Time, bool) {
	p := ps.of(r.Addr)
	switch {
	case p == nil:
		return r.At, true
	case p.Quarantine < 0:
		return time.Time{}, false
	}
	return r.At.Add(p.Quarantine), true
}

// reschedule works next out anew, after a change of pools.
func (k *keptAddresses) reschedule(ps *pools) {
	k.next, k.lists, k.excess = time.Time{}, nil, nil
	for _, r := range k.at {
		k.until(r, ps)
		k.crowd(r.Service.Namespace)
	}
}

// expired returns what is free for everybody now.
func (k *keptAddresses) expired(now time.Time, ps *pools) []netip.Addr {
	if k.next.IsZero() || now.Before(k.next) {
		return nil
	}
	k.next = time.Time{}
	var free []netip.Addr
	for addr, r := range k.at {
		if end, ok := keptUntil(r, ps); ok && !now.Before(end) {
			free = append(free, addr)
		} else {
			k.until(r, ps)
		}
	}
	return free
}

// list returns what is kept of a pool.
func (k *keptAddresses) list(pool string, ps *pools) keptList {
	if k.lists == nil {
		all := map[string][]lb.Released{}
		for addr, r := range k.at {
			if p := ps.of(addr); p != nil {
				all[p.Name] = append(all[p.Name], r)
			}
		}
		k.lists = make(map[string]keptList, len(all))
		for name, list := range all {
			counts := map[lb.Family]int{}
			for _, r := range list {
				counts[lb.FamilyOf(r.Addr)]++
			}
			k.lists[name] = keptList{newest(list), counts}
		}
	}
	return k.lists[pool]
}

func newest(list []lb.Released) []lb.Released {
	size := 0
	for i, r := range byAge(list) {
		if size += releasedSize(r); size > maxReleasedSize {
			list = slices.Clone(list[:i])
			break
		}
	}
	slices.SortFunc(list, func(a, b lb.Released) int { return a.Addr.Compare(b.Addr) })
	return list
}

// crowd notes that a namespace has more addresses, or may have fewer.
func (k *keptAddresses) crowd(namespace string) {
	if k.crowded == nil {
		k.crowded = map[string]bool{}
	}
	k.crowded[namespace] = true
}

// beyond returns what is kept for namespaces beyond their quotas, the oldest of it: what a namespace holds
// and what is kept for it are together no more than the quota of a pool. Otherwise a tenant with a quota of
// one address, who creates and deletes Services, could have all addresses of a pool kept for it.
func (k *keptAddresses) beyond(ps *pools, held func(netip.Addr) bool) (beyond []netip.Addr) {
	if len(k.crowded) == 0 {
		return nil
	}
	var of []lb.Released
	for addr, r := range k.at {
		if k.crowded[r.Service.Namespace] && !held(addr) {
			of = append(of, r)
		}
	}
	k.crowded = nil
	kept := map[*pool]map[namespaceFamily]int{}
	for _, r := range byAge(of) {
		over := false
		where := namespaceFamily{r.Service.Namespace, lb.FamilyOf(r.Addr)}
		ps.containing(r.Addr, func(p *pool) bool {
			over = over || p.PerNamespace > 0 && p.byNamespace[where]+kept[p][where] >= p.PerNamespace
			return true
		})
		if over {
			beyond = append(beyond, r.Addr)
			continue
		}
		ps.containing(r.Addr, func(p *pool) bool {
			if kept[p] == nil {
				kept[p] = map[namespaceFamily]int{}
			}
			kept[p][where]++
			return true
		})
	}
	return beyond
}

// byAge returns the list with what was freed last first.
func byAge(list []lb.Released) []lb.Released {
	slices.SortFunc(list, func(a, b lb.Released) int {
		return cmp.Or(b.At.Compare(a.At), a.Addr.Compare(b.Addr))
	})
	return list
}

// keptShare is what a namespace keeps in quarantine although Services of others find nothing free: one of so many
// addresses of a pool, and one address in any case. A pool with a quota for each namespace needs no share.
const keptShare = 8

// beyondShare returns what namespaces keep of a pool beyond their shares: first what the namespace keeps that has
// most, and of that what was freed first.
func (k *keptAddresses) beyondShare(p *pool, family lb.Family) excess {
	s := p.spaces[family]
	if s == nil || p.PerNamespace > 0 || !s.usage.Total.IsInt64() {
		return excess{}
	}
	where := poolFamily{p, family}
	if known, ok := k.excess[where]; ok {
		return known
	}
	share := max(int(s.usage.Total.Int64()/keptShare), 1)
	var list []lb.Released
	for addr, r := range k.at {
		if lb.FamilyOf(addr) == family && s.offers(addr) {
			list = append(list, r)
		}
	}
	has := map[string]int{} // of each namespace, from its newest on
	rank := make(map[netip.Addr]int, len(list))
	for _, r := range byAge(list) {
		has[r.Service.Namespace]++
		rank[r.Addr] = has[r.Service.Namespace]
	}
	list = slices.DeleteFunc(list, func(r lb.Released) bool { return rank[r.Addr] <= share })
	slices.SortFunc(list, func(a, b lb.Released) int {
		return cmp.Or(cmp.Compare(rank[b.Addr], rank[a.Addr]), a.At.Compare(b.At), a.Addr.Compare(b.Addr))
	})
	beyond := excess{make([]netip.Addr, 0, len(list)), map[string]int{}}
	for _, r := range list {
		beyond.addrs = append(beyond.addrs, r.Addr)
		beyond.of[r.Service.Namespace]++
	}
	if k.excess == nil {
		k.excess = map[poolFamily]excess{}
	}
	k.excess[where] = beyond
	return beyond
}

// fromQuarantine adds to found an address that a namespace other than that of e keeps beyond its share. Otherwise a
// tenant who creates and deletes Services could keep a whole pool from others.
func (b *Book) fromQuarantine(e *entry, candidates []*pool, family lb.Family,
	found []netip.Addr) ([]netip.Addr, bool) {
	for _, p := range candidates {
		beyond := b.kept.beyondShare(p, family)
		if beyond.of[e.Key.Namespace] == len(beyond.addrs) {
			continue // nothing of others, however many Services of the namespace wait
		}
		for _, addr := range beyond.addrs {
			if b.kept.at[addr].Service.Namespace != e.Key.Namespace && len(b.at(addr)) == 0 && !slices.Contains(found, addr) {
				return append(slices.Clip(found), addr), true
			}
		}
	}
	return nil, false
}
