package relay

import (
	"hash/maphash"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// table is what the proxy has said, and what is known of the Services that it named. It is safe for
// concurrent use. Each Service has a lock of its own, so what one costs holds up no other: mu is held while
// ways are looked up or replaced, and comes before a Service's.
type table struct {
	now func() time.Time

	mu         sync.Mutex
	services   map[id]*service
	namespaces namespaces
	// at are the ways of each frontend, the one that counts first: a frontend that moves is two Services'
	// for a moment.
	at map[target][]way
	// nodePorts are the addresses at which the node serves node ports.
	nodePorts map[netip.Addr]bool
	// named are the Services that the proxy has told of while it tells of all; nil after. It belongs to take.
	named   map[lb.Key]bool
	changed chan struct{} // closed when the next message is taken in
	// version counts the messages that were taken in.
	version atomic.Uint64
	// remembered counts the clients that Services have remembered.
	remembered memory
	seed       maphash.Seed // see fresh
}

// id names what is relayed of a Service in one protocol. Nothing of the one concerns the other.
type id struct {
	key      lb.Key
	protocol lb.Protocol
}

// target is a frontend.
type target struct {
	protocol lb.Protocol
	addr     netip.AddrPort
}

// way is where a frontend leads.
type way struct {
	service *service
	choices
	// ending are endpoints that keep the flows that they have.
	ending []netip.AddrPort
	// going and externalIP are the frontend's.
	going, externalIP bool
	// affinity and the next three are the Service's.
	affinity      time.Duration
	fresh         bool
	scheduler     plan.Scheduler
	proxyProtocol int
}

func newTable(now func() time.Time) *table {
	return &table{now: now, services: map[id]*service{}, namespaces: newNamespaces(), at: map[target][]way{},
		nodePorts: map[netip.Addr]bool{}, changed: make(chan struct{}), remembered: memory{of: map[string]int{}},
		seed: maphash.MakeSeed()}
}

// take takes a message of the proxy in, and reports whether with it the proxy has told of all Services. One goroutine
// calls it. Who looks something up waits for one Service at most.
func (t *table) take(m wire.Message) (all bool) {
	if !m.Complete && len(m.Services) == 0 && m.NodePorts == nil {
		return false
	}
	if m.NodePorts != nil {
		t.setNodePorts(m.NodePorts)
	}
	if m.Complete {
		t.named = map[lb.Key]bool{}
	}
	for _, s := range m.Services {
		if t.named != nil {
			t.named[s.Key] = true
		}
		t.set(s.Key, s.Relayed)
	}
	if all = t.named != nil && !m.More; all {
		for _, key := range t.others(t.named) {
			t.set(key, nil)
		}
		t.named = nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.version.Add(1)
	close(t.changed)
	t.changed = make(chan struct{})
	return all
}

func (t *table) setNodePorts(all []netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.nodePorts)
	for _, addr := range all {
		t.nodePorts[addr] = true
	}
}

// others returns the Services that are known and not among some.
func (t *table) others(than map[lb.Key]bool) (all []lb.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for which := range t.services {
		if !than[which.key] {
			all = append(all, which.key)
		}
	}
	return all
}

// set replaces what is relayed of a Service. What was counted and learned of it stays.
func (t *table) set(key lb.Key, relayed *plan.Relayed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
		part := relayed
		if relayed != nil {
			only := *relayed
			only.Ports = slices.DeleteFunc(slices.Clone(relayed.Ports),
				func(p plan.RelayedPort) bool { return p.Protocol != protocol })
			if part = &only; len(only.Ports) == 0 {
				part = nil
			}
		}
		t.setPart(id{key, protocol}, part)
	}
}

func (t *table) setPart(which id, relayed *plan.Relayed) {
	s := t.services[which]
	if s != nil {
		for _, p := range s.Ports {
			for _, f := range p.Frontends {
				t.remove(f.Addr, s)
			}
		}
	}
	if relayed == nil {
		if s != nil {
			s.Relayed, s.tables = plan.Relayed{Affinity: s.Affinity}, nil // it may come back, and has remembered clients
			s.remove(true)
			t.forget(s)
		}
		return
	}
	if s == nil {
		s = t.learn(which)
	}
	s.Relayed, s.tables = *relayed, slotsOf(relayed, s.tables)
	s.remove(false)
	backends, turns := map[netip.AddrPort]bool{}, map[turn]bool{}
	s.memories = map[string]string{}
	lists := map[bool][]*choices{} // by whether the policy is Local: one list may change without the other
	for _, local := range []bool{false, true} {
		for _, p := range s.Ports {
			l := choicesOf(p, local, s.tables)
			lists[local] = append(lists[local], &l)
		}
		if s.Affinity > 0 {
			shareMemories(lists[local], s.memories)
		}
	}
	for i, p := range s.Ports {
		all := map[bool]*choices{false: lists[false][i], true: lists[true][i]}
		for _, f := range p.Frontends {
			t.add(f.Addr, way{service: s, choices: *all[f.Local], ending: p.Ending, affinity: s.Affinity,
				fresh: s.Fresh, scheduler: s.Scheduler, proxyProtocol: s.ProxyProtocol, going: f.Going, externalIP: f.ExternalIP})
		}
		for _, l := range all {
			turns[turn{choices: l.name}] = s.Scheduler.Turns()
			for _, b := range l.backends {
				backends[b.Addr] = true
				turns[turn{l.name, b.Addr}] = s.Scheduler.Turns()
			}
		}
	}
	s.forgive(backends, turns)
}

// learn makes a Service known.
func (t *table) learn(which id) *service {
	s := &service{id: which, namespace: t.namespaces.join(which), clients: map[netip.Addr]int{},
		remembered: map[remembering]remembered{}, suspects: map[netip.AddrPort]time.Time{},
		open: map[netip.AddrPort]uint32{}, turns: map[turn]float64{}}
	t.services[which] = s
	return s
}

// adopt counts a connection of the relay's predecessor, whatever the limits are. The proxy may not have told of its
// Service, or not relay it any more.
func (t *table) adopt(which id, client netip.Addr, backend netip.AddrPort) *service {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.services[which]
	if s == nil {
		s = t.learn(which)
		s.removed = true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.Open++
	s.namespace.open.Add(1)
	s.clients[clientOf(client)]++
	s.open[backend]++
	return s
}

// add adds a way of a frontend. One that is wanted comes before one that goes, and else the newer one.
func (t *table) add(frontend netip.AddrPort, w way) {
	at := target{w.service.protocol, frontend}
	ways := t.at[at]
	i := slices.IndexFunc(ways, func(other way) bool { return !w.going || other.going })
	if i < 0 {
		i = len(ways)
	}
	t.at[at] = slices.Insert(ways, i, w)
}

// remove removes the ways of a frontend to a Service, and leaves those to others.
func (t *table) remove(frontend netip.AddrPort, s *service) {
	at := target{s.protocol, frontend}
	ways := slices.DeleteFunc(t.at[at], func(w way) bool { return w.service == s })
	if t.at[at] = ways; len(ways) == 0 {
		delete(t.at, at)
	}
}

// forget drops a removed Service once it has no connections.
func (t *table) forget(s *service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.removed && s.counts.Open == 0 && t.services[s.id] == s {
		delete(t.services, s.id)
		t.namespaces.leave(s)
		t.remembered.add(s, -len(s.remembered))
		clear(s.remembered)
	}
}

// ended counts the end of a connection.
func (t *table) ended(s *service) {
	s.mu.Lock()
	s.counts.Open--
	removed := s.removed
	s.mu.Unlock()
	if removed {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.forget(s)
	}
}

// find returns where a frontend leads, and what is closed when that may change.
func (t *table) find(to target) (w way, ok bool, changed <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ways := t.at[to]; len(ways) > 0 {
		w, ok = ways[0], true
	}
	if t.nodePorts[to.addr.Addr()] && (!ok || w.externalIP) {
		everywhere := netip.IPv4Unspecified()
		if to.addr.Addr().Is6() {
			everywhere = netip.IPv6Unspecified()
		}
		if ways := t.at[target{to.protocol, netip.AddrPortFrom(everywhere, to.addr.Port())}]; len(ways) > 0 {
			w, ok = ways[0], true
		}
	}
	return w, ok, t.changed
}

// keeps reports whether a flow to a backend may go on.
func (w way) keeps(backend netip.AddrPort) bool {
	return slices.Contains(w.ending, backend) || w.has(backend)
}
