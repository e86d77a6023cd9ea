package iptables

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// One call of iptables-restore names at most maxRules rules of a Service that change, and others wait for
// it. Some rules take the kernel a hundred times as long as others: one with session affinity is compared
// with all lists of clients. So a part has as many rules as are written in partTime, but minRules: each
// call has a cost that grows with the table, so smaller parts would take much longer in all.
const (
	maxRules = 4000
	minRules = 500
	partTime = 100 * time.Millisecond
)

// maxBatchRules is about how many rules that change one call names for all of its Services.
const maxBatchRules = 10_000

// How many rules one Service may have in one family. The legacy variant reads and writes them with
// each change of any Service. The nft variant has the kernel follow all jumps with each change.
const (
	MaxServiceRules = 1 << 17
	MaxLegacyRules  = 1 << 16
)

// Needs returns how many rules a Service needs at most, in both families.
func Needs(s plan.Service) int {
	return renderer{family: lb.IPv4}.count(s) + renderer{family: lb.IPv6}.count(s)
}

// count returns how many rules a Service needs at most.
func (r renderer) count(s plan.Service) int {
	const perPort, perFrontend = 8, 8
	n, lists := 0, map[*plan.Sources]bool{nil: true}
	for _, p := range s.Ports {
		if p.Family != r.family {
			continue
		}
		n += perPort
		for _, f := range p.Frontends {
			if n += perFrontend; !lists[f.Sources] {
				lists[f.Sources], n = true, n+len(f.Sources.Networks)
			}
		}
		cluster, local := len(p.Backends.Cluster), len(p.Backends.Local)
		n += cluster + local + 2*max(cluster, local)
		if s.AffinityTimeout > 0 {
			n += cluster + local
		}
	}
	return n
}

// parting is a Service that is written in parts.
type parting struct {
	// before is the plan that was last held as a whole.
	before plan.Service
	// ports are what is held of each port.
	ports map[string]contribution
}

// byPort returns what a Service brings by port, and what it brings besides under "".
func (r renderer) byPort(s plan.Service, before chains) map[string]contribution {
	ports, memories := map[string]contribution{}, r.memories(s)
	for i, p := range s.Ports {
		if p.Family != r.family {
			continue
		}
		c := contribution{chains: chains{}, before: before}
		r.port(&c, s, p, memories[i])
		c.before = nil
		ports[suffix(s.Key, p)] = c
	}
	c := contribution{chains: chains{}}
	if r.once(&c, s, len(ports) > 0); len(c.entries) > 0 {
		ports[""] = c
	}
	return ports
}

// together returns what ports bring.
func together(ports map[string]contribution) contribution {
	all := contribution{chains: chains{}}
	for _, id := range slices.Sorted(maps.Keys(ports)) {
		maps.Copy(all.chains, ports[id].chains)
		all.entries = append(all.entries, ports[id].entries...)
	}
	return all
}

// cost returns how many rules differ.
func cost(have, want contribution) int {
	n := 0
	for chain, rules := range want.chains {
		before, there := have.chains[chain]
		n += edited(before, rules, there)
	}
	for chain, rules := range have.chains {
		if _, ok := want.chains[chain]; !ok {
			n += 1 + len(rules)
		}
	}
	return n
}

// edited returns how many rules of a chain differ.
func edited(have, want []string, there bool) int {
	switch {
	case !there:
		return len(want)
	case isOne(have, want) || slices.Equal(have, want):
		return 0
	}
	return missing(want, have) + missing(have, want)
}

// missing returns how many rules are not among others.
func missing(rules, others []string) int {
	there := make(map[string]bool, len(others))
	for _, r := range others {
		there[r] = true
	}
	n := 0
	for _, r := range rules {
		if !there[r] {
			n++
		}
	}
	return n
}

// isOne reports whether two lists are one.
func isOne(a, b []string) bool { return len(a) > 0 && len(a) == len(b) && &a[0] == &b[0] }

// large reports whether a Service has to be written in parts. The legacy variant writes the whole
// table in each call, so there the parts would cost as much as the whole.
func (f *family) large(key lb.Key) bool {
	if f.batch == 0 {
		return false
	}
	held, ok := f.held[key]
	want, most := f.want[key], f.once
	if held.ports != nil || want.ports != nil {
		most = f.portion
	}
	return cost(held.rules, want.rules) > most && (ok || !f.intact(want.rules))
}

// applyPart writes a part of a Service. What it wants stays to be written.
func (f *family) applyPart(ctx context.Context, key lb.Key) error {
	p, ok := f.parted[key]
	if !ok {
		held := f.held[key]
		p = parting{before: held.plan, ports: held.ports}
		if p.ports == nil {
			p.ports = f.byPort(held.plan, held.rules.chains)
		}
	}
	want := f.want[key]
	p.before = p.before.Within(want.plan) // what goes amid parts is not held, even if it is wanted again
	if want.ports == nil {
		want.ports = f.byPort(want.plan, want.rules.chains)
	}
	ports, most := maps.Clone(p.ports), portion{size: f.portion}
	lists := chains{} // of sources, which ports share
	for _, c := range ports {
		maps.Copy(lists, c.shared())
	}
	for _, id := range slices.Sorted(maps.Keys(union(ports, want.ports))) {
		c, wanted := want.ports[id]
		next, done := toward(ports[id], c, lists, &most)
		if ports[id] = next; !done {
			break
		}
		if maps.Copy(lists, c.shared()); !wanted {
			delete(ports, id)
		}
	}
	f.parted[key] = p // what a predecessor has left for the others of its ports stays
	f.want[key] = service{plan: want.plan, rules: together(ports)}
	started := time.Now()
	f.dividing = true
	err := f.apply(ctx, []lb.Key{key})
	f.dividing = false
	f.portion = max(f.least, nextPortion(f.portion, most.used, time.Since(started)))
	if f.want[key] = want; len(want.plan.Ports) == 0 {
		delete(f.want, key)
	}
	if err != nil {
		if !ok {
			delete(f.parted, key)
		}
		return err
	}
	f.parted[key] = parting{before: p.before, ports: ports}
	f.Touch(key)
	return dialect.ErrUnfinished
}

// portion is how many rules a part may name, and how many it names so far.
type portion struct{ size, used int }

// take reports whether some more rules have a place in the part. The first ones always have.
func (p *portion) take(n int) bool {
	if p.used > 0 && p.used+n > p.size {
		return false
	}
	p.used += n
	return true
}

// nextPortion returns how many rules the next part may name after one that might name size and named used.
func nextPortion(size, used int, took time.Duration) int {
	switch {
	case took > partTime:
		size = min(size, int(float64(used)*partTime.Seconds()/took.Seconds()))
	case took < partTime/2 && used >= size/2:
		size *= 2
	}
	return min(size, maxRules)
}

// toward returns what a port brings after a part of the way from have to want, and whether that is all of
// it. The rules deliver at each point of the way, as they did before or as they shall: what other rules
// jump to comes first and goes last. Lists are there already.
func toward(have, want contribution, lists chains, most *portion) (next contribution, done bool) {
	next = contribution{chains: chains{}, entries: have.entries, lists: have.lists}
	maps.Copy(next.chains, have.chains)
	wanted := leavesFirst(want.chains)
	for _, there := range []bool{false, true} { // what is new, and then what changes
		for _, chain := range wanted {
			before, had := have.chains[chain]
			n := edited(before, want.chains[chain], had)
			if had != there || had && n == 0 {
				continue
			}
			if list, listed := lists[chain]; listed && slices.Equal(list, want.chains[chain]) {
				n = 0
			}
			if !most.take(n) {
				return next, false
			}
			next.chains[chain] = want.chains[chain]
		}
	}
	if !slices.Equal(have.entries, want.entries) {
		if !most.take(len(want.entries)) {
			return next, false
		}
		next.entries = want.entries
	}
	for _, chain := range slices.Backward(leavesFirst(have.chains)) {
		if _, stays := want.chains[chain]; stays {
			continue
		}
		if !most.take(1 + len(have.chains[chain])) {
			return next, false
		}
		delete(next.chains, chain)
	}
	return want, true
}

// leavesFirst returns the names of chains so that a chain comes after those to which it jumps.
func leavesFirst(of chains) []string {
	height := func(chain string) int {
		for i, prefix := range []string{prefixSourceRange, prefixExternal, prefixCluster, prefixLocal} {
			if strings.HasPrefix(chain, prefix) {
				return -i
			}
		}
		return -4 // endpoints and lists of sources jump to none of the Service
	}
	return slices.SortedFunc(maps.Keys(of), func(a, b string) int {
		return cmp.Or(cmp.Compare(height(a), height(b)), cmp.Compare(a, b))
	})
}

func union[V any](a, b map[string]V) map[string]V {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}
