package iptables

import (
	"context"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// maxRules is about how many rules of one Service, in chains that change, one call of
// iptables-restore names: it works through them in less than a second. A single port may have more.
// Each call has a cost that grows with the table, so smaller parts would take much longer in all.
const maxRules = 4000

// How many rules one Service may have in one family. The legacy variant reads and writes them with
// each change of any Service.
const (
	maxServiceRules = 1 << 19
	maxLegacyRules  = 1 << 16
)

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

// parting is a Service that is written port by port.
type parting struct {
	// before is the plan that was last held as a whole.
	before plan.Service
	// ports are what is held of each port, wanted what is wanted of each; nil if that has to be rendered.
	ports, wanted map[string]contribution
}

// byPort returns what a Service brings by port, and what it brings besides under "".
func (r renderer) byPort(s plan.Service) map[string]contribution {
	ports := map[string]contribution{}
	for _, p := range s.Ports {
		if p.Family != r.family {
			continue
		}
		c := contribution{chains: chains{}}
		r.port(&c, s.Key, p, s.AffinityTimeout)
		ports[suffix(s.Key, p)] = c
	}
	c := contribution{chains: chains{}}
	if r.once(&c, s, len(ports) > 0); len(c.entries) > 0 {
		ports[""] = c
	}
	return ports
}

// cost returns how many rules differ. What others have already costs nothing.
func cost(have, want contribution, others chains) int {
	n := 0
	for chain, rules := range want.chains {
		if before := have.chains[chain]; slices.Equal(rules, others[chain]) {
			continue
		} else if len(before) == 0 {
			n += len(rules)
		} else if !slices.Equal(rules, before) {
			n += missing(rules, before) + missing(before, rules)
		}
	}
	for chain := range have.chains {
		if _, ok := want.chains[chain]; !ok {
			n++
		}
	}
	return n
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

// large reports whether a Service has to be written in parts. The legacy variant writes the whole
// table in each call, so there the parts would cost as much as the whole.
func (f *family) large(key lb.Key) bool {
	if f.batch == 0 {
		return false
	}
	want := f.want[key].rules
	return cost(f.held[key].rules, want, nil) > maxRules && !f.intact(want)
}

// applyPart writes some ports of a Service. What it wants stays to be written.
func (f *family) applyPart(ctx context.Context, key lb.Key) error {
	p, ok := f.parted[key]
	if !ok {
		held := f.held[key]
		p = parting{before: held.plan, ports: f.byPort(held.plan)}
	}
	want := f.want[key]
	if p.wanted == nil {
		p.wanted = f.byPort(want.plan)
	}
	ports, now, n := maps.Clone(p.ports), p.wanted, 0
	lists := chains{} // of sources, which ports share
	for _, c := range ports {
		maps.Copy(lists, c.shared())
	}
	for _, id := range slices.Sorted(maps.Keys(union(ports, now))) {
		c, wanted := now[id]
		changes := cost(ports[id], c, lists)
		if n > 0 && n+changes > maxRules {
			break
		}
		if n += changes; wanted {
			ports[id] = c
			maps.Copy(lists, c.shared())
		} else {
			delete(ports, id)
		}
	}
	all := contribution{chains: chains{}}
	for _, id := range slices.Sorted(maps.Keys(ports)) {
		maps.Copy(all.chains, ports[id].chains)
		all.entries = append(all.entries, ports[id].entries...)
	}
	f.want[key] = service{plan: want.plan, rules: all}
	err := f.apply(ctx, []lb.Key{key})
	if f.want[key] = want; len(want.plan.Ports) == 0 {
		delete(f.want, key)
	}
	if err != nil {
		return err
	}
	f.parted[key] = parting{before: p.before, ports: ports, wanted: now}
	f.Touch(key)
	return dialect.ErrUnfinished
}

func union[V any](a, b map[string]V) map[string]V {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}
