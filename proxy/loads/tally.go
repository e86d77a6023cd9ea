package loads

import (
	"hash/maphash"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// What is remembered. Connections beyond it are not counted.
const (
	maxOpen        = 1 << 19 // of a node, some 40 bytes each
	maxServiceOpen = 1 << 17
)

// tally counts open connections.
type tally struct {
	services map[lb.Key]*service
	at       map[destination]*service
	// open are the connections that are counted, by a hash of protocol, client and destination.
	open map[uint64]connection
	seed maphash.Seed
	// changed are the Services with another load than was told last.
	changed map[*service]bool
}

// service is a Service whose connections are counted.
type service struct {
	key          lb.Key
	destinations []destination
	backends     map[netip.Addr]*backend
	// cost is how much it takes to write the Service's tables, see pace.
	cost int
	// finish is up to where the Service had come with its last load or, queued, will have with the next: see
	// pace.
	finish int
	queued bool
	// open are its connections, fresh those of them that came since the last load was told. loads counts
	// these.
	open, fresh, loads uint32
	told               time.Time
}

// connection is one that is open, and how many loads of its Service had been told when it came.
type connection struct {
	*backend
	loads uint32
}

type backend struct {
	of     *service
	addr   netip.Addr
	open   uint32
	wanted bool // by the plan
}

// destination is what clients connect to; a node port has no address.
type destination struct {
	protocol lb.Protocol
	at       netip.AddrPort
}

func newTally() *tally {
	return &tally{services: map[lb.Key]*service{}, at: map[destination]*service{}, open: map[uint64]connection{},
		seed: maphash.MakeSeed(), changed: map[*service]bool{}}
}

// set takes what the kernel is confirmed to have for a Service. It reports whether there are
// destinations that were not counted before.
func (t *tally) set(key lb.Key, planned plan.Service) (more bool) {
	s := t.services[key]
	if s != nil {
		for _, d := range s.destinations {
			if t.at[d] == s { // else it is another Service's by now
				delete(t.at, d)
			}
		}
	}
	addresses, lists := choices(planned)
	if len(addresses) == 0 {
		if s != nil {
			delete(t.services, key)
			delete(t.changed, s)
		}
		return false
	}
	if s == nil {
		s = &service{key: key, backends: map[netip.Addr]*backend{}}
		t.services[key] = s
	}
	had := map[destination]bool{}
	for _, d := range s.destinations {
		had[d] = true
	}
	s.destinations = destinationsOf(planned)
	for _, d := range s.destinations {
		t.at[d] = s
		more = more || !had[d]
	}
	for addr, b := range s.backends {
		b.wanted = addresses[addr]
		b.forget()
	}
	for addr := range addresses {
		if s.backends[addr] == nil {
			s.backends[addr] = &backend{of: s, addr: addr, wanted: true}
		}
	}
	s.cost = lists + (len(addresses)+len(s.destinations))/64
	return more
}

// choices returns the backends of a Service whose scheduler counts, and how many lists of them its frontends choose
// from: each list of more than one has a table. Ports with the same list share it. There are no backends without a
// table, so that each load has a cost.
func choices(s plan.Service) (addresses map[netip.Addr]bool, lists int) {
	if !s.Scheduler.Counts() {
		return nil, 0
	}
	addresses, tables := map[netip.Addr]bool{}, map[*lb.Backend]bool{}
	add := func(used bool, list []lb.Backend) {
		if !used {
			return
		}
		if len(list) > 1 {
			tables[&list[0]] = true
		}
		for _, b := range list {
			addresses[b.Addr.Addr()] = true
		}
	}
	for _, p := range s.Ports {
		cluster, local := p.Uses()
		add(cluster, p.Backends.Cluster)
		add(local, p.Backends.Local)
	}
	if len(tables) == 0 {
		return nil, 0
	}
	return addresses, len(tables)
}

// destinations returns where connections are counted: addresses, and ports at any address, each once.
func (t *tally) destinations() (addresses []netip.Addr, ports []uint16) {
	for d := range t.at {
		if d.at.Addr().IsValid() {
			addresses = append(addresses, d.at.Addr())
		} else {
			ports = append(ports, d.at.Port())
		}
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	slices.Sort(ports)
	return slices.Compact(addresses), slices.Compact(ports)
}

func destinationsOf(s plan.Service) (all []destination) {
	for _, p := range s.Ports {
		for _, f := range p.Frontends {
			all = append(all, destination{p.Protocol, netip.AddrPortFrom(f.Addr, f.Port)})
		}
	}
	return all
}

// forget drops a backend that is neither wanted nor has connections.
func (b *backend) forget() {
	if !b.wanted && b.open == 0 && b.of.backends[b.addr] == b {
		delete(b.of.backends, b.addr)
	}
}

// take takes in what happens to a connection, and reports whether that makes a Service one with
// another load.
func (t *tally) take(c plan.Tracked) bool {
	id := t.id(c)
	known, ok := t.open[id]
	if c.Open == ok {
		return false
	}
	if !c.Open {
		s := known.of
		delete(t.open, id)
		known.open--
		s.open--
		if known.loads == s.loads && s.fresh > 0 {
			s.fresh--
		}
		known.forget()
		return t.change(s)
	}
	b := t.find(c)
	if b == nil || len(t.open) >= maxOpen || b.of.open >= maxServiceOpen {
		return false
	}
	t.open[id] = connection{b, b.of.loads}
	b.open++
	b.of.open++
	b.of.fresh++
	return t.change(b.of)
}

// find returns the backend of a connection to a Service whose connections are counted; nil if it is
// none, as of one that ends at the relay.
func (t *tally) find(c plan.Tracked) *backend {
	s := t.at[destination{c.Protocol, c.To}]
	if s == nil {
		s = t.at[destination{c.Protocol, netip.AddrPortFrom(netip.Addr{}, c.To.Port())}]
	}
	if s == nil {
		return nil
	}
	return s.backends[c.Backend.Addr()]
}

// change notes that a Service has another load, and reports whether that is news.
func (t *tally) change(s *service) bool {
	if t.changed[s] || t.services[s.key] != s {
		return false
	}
	t.changed[s] = true
	return true
}

func (t *tally) id(c plan.Tracked) uint64 {
	return maphash.Comparable(t.seed, struct {
		protocol   lb.Protocol
		client, to netip.AddrPort
	}{c.Protocol, c.Client, c.To})
}

// renew counts anew, by a listing of all connections that are open. If that fails, all stays as it is.
func (t *tally) renew(list func(each func(plan.Tracked)) error) error {
	open, of := map[uint64]connection{}, map[*service]uint32{}
	err := list(func(c plan.Tracked) {
		if b := t.find(c); b != nil && len(open) < maxOpen && of[b.of] < maxServiceOpen {
			open[t.id(c)] = connection{b, b.of.loads - 1} // of before
			of[b.of]++
		}
	})
	if err != nil {
		return err
	}
	counts := map[*backend]uint32{}
	for _, c := range open {
		counts[c.backend]++
	}
	t.open = open
	for _, s := range t.services {
		s.open, s.fresh = of[s], 0
		for _, b := range s.backends {
			if b.open != counts[b] {
				b.open = counts[b]
				t.change(s)
			}
			b.forget()
		}
	}
	return nil
}

// clear forgets all connections.
func (t *tally) clear() { _ = t.renew(func(func(plan.Tracked)) error { return nil }) }

// load returns what is known of a Service, and notes that it is told. It expects twice as many
// connections as have come and are still open: what comes and ends between two loads weighs nothing, and
// what stays may be as much again before the next load has an effect. With half of that, loads could
// send all to the one and to the other backend by turns, for ever.
func (t *tally) load(s *service, now time.Time) plan.Load {
	l := plan.Load{Open: make(map[netip.Addr]uint32, len(s.backends)), Soon: 2 * s.fresh}
	for addr, b := range s.backends {
		l.Open[addr] = b.open
	}
	s.fresh, s.told = 0, now
	s.loads++
	if delete(t.changed, s); l.Soon > 2 { // fewer make no difference: tables are for at least two backends
		t.changed[s] = true // so many may not come again
	}
	return l
}
