package relay

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

const (
	// maxRemembered is how many clients a Service's session affinity remembers. Others get the backend
	// that their address chooses.
	maxRemembered = 10_000
	// maxLines is how many lines of the access log a Service gets in a second: its clients decide how many connections
	// end, and the node's logs are everybody's.
	maxLines = 100
	// suspectFor is how long a backend that did not answer is tried last.
	suspectFor = 5 * time.Second
)

// table is what the proxy has said, and what is known of the Services that it named. It is safe for
// concurrent use. Each Service has a lock of its own, so what one costs holds up no other: mu is held while
// ways are looked up or replaced, and comes before a Service's.
type table struct {
	now func() time.Time

	mu       sync.Mutex
	services map[id]*service
	// at are the ways of each frontend, the one that counts first: a frontend that moves is two Services'
	// for a moment.
	at map[target][]way
	// nodePorts are the addresses at which the node serves node ports.
	nodePorts map[netip.Addr]bool
	changed   chan struct{} // closed when the next message is taken in
	// version counts the messages that were taken in.
	version atomic.Uint64
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

// service is what is relayed of a Service in one protocol. It is safe for concurrent use, but for what belongs
// to the table.
type service struct {
	id
	plan.Relayed                   // of the table, as tables are
	tables       map[string]*slots // see slotsOf

	mu      sync.Mutex
	removed bool
	counts  Counts
	// open are the connections of each backend, those included that it has not answered yet.
	open map[netip.AddrPort]uint32
	// turns are when each backend has its next turn, and when that was that was taken last, at no backend.
	turns map[turn]float64
	// clients counts the open connections of each client.
	clients map[netip.Addr]int
	// remembered are the backends of clients, by port and client, with session affinity.
	remembered map[remembering]remembered
	swept      time.Time
	suspects   map[netip.AddrPort]time.Time
	// logged are the lines of the access log in the second that began at loggedIn, and leftOut those that it did not get
	// since its last line.
	logged, leftOut int
	loggedIn        time.Time
}

type remembering struct {
	choices string
	client  netip.Addr
}

type remembered struct {
	backend netip.AddrPort
	last    time.Time
}

// way is where a frontend leads.
type way struct {
	service *service
	choices
	// ending are endpoints that keep the flows that they have.
	ending []netip.AddrPort
	// going and externalIP are the frontend's.
	going, externalIP bool
	// affinity and the next two are the Service's.
	affinity      time.Duration
	scheduler     plan.Scheduler
	proxyProtocol int
}

func newTable(now func() time.Time) *table {
	return &table{now: now, services: map[id]*service{}, at: map[target][]way{},
		nodePorts: map[netip.Addr]bool{}, changed: make(chan struct{})}
}

// take takes a message of the proxy in.
func (t *table) take(m wire.Message) {
	if !m.Complete && len(m.Services) == 0 && m.NodePorts == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if m.NodePorts != nil {
		clear(t.nodePorts)
		for _, addr := range m.NodePorts {
			t.nodePorts[addr] = true
		}
	}
	if m.Complete {
		named := map[lb.Key]bool{}
		for _, s := range m.Services {
			named[s.Key] = true
		}
		for which := range t.services {
			if !named[which.key] {
				t.set(which.key, nil)
			}
		}
	}
	for _, s := range m.Services {
		t.set(s.Key, s.Relayed)
	}
	t.version.Add(1)
	close(t.changed)
	t.changed = make(chan struct{})
}

// set replaces what is relayed of a Service. What was counted and learned of it stays.
func (t *table) set(key lb.Key, relayed *plan.Relayed) {
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
			s.Relayed, s.tables = plan.Relayed{}, nil
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
	for _, p := range s.Ports {
		all := map[bool]choices{false: choicesOf(p, false, s.tables), true: choicesOf(p, true, s.tables)}
		for _, f := range p.Frontends {
			t.add(f.Addr, way{service: s, choices: all[f.Local], ending: p.Ending, affinity: s.Affinity,
				scheduler: s.Scheduler, proxyProtocol: s.ProxyProtocol, going: f.Going, externalIP: f.ExternalIP})
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
	s := &service{id: which, clients: map[netip.Addr]int{}, remembered: map[remembering]remembered{},
		suspects: map[netip.AddrPort]time.Time{}, open: map[netip.AddrPort]uint32{}, turns: map[turn]float64{}}
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
	s.clients[clientOf(client)]++
	s.open[backend]++
	return s
}

// remove notes whether the Service is relayed no more.
func (s *service) remove(removed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removed = removed
}

// forgive forgets the suspects that are no backends, as endpoints that end are tried no more, and the turns of
// those that have none.
func (s *service) forgive(backends map[netip.AddrPort]bool, turns map[turn]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.suspects {
		if !backends[b] {
			delete(s.suspects, b)
		}
	}
	for one := range s.turns {
		if !turns[one] {
			delete(s.turns, one)
		}
	}
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
	}
}

// ended counts the end of a connection, and what else more counts.
func (t *table) ended(s *service, more Counts) {
	s.mu.Lock()
	more.Open--
	s.counts.add(more)
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

// admit counts a connection, and reports whether the Service and its client may have it; close takes it back.
func (s *service) admit(from netip.Addr, limit, clientLimit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	client := clientOf(from)
	switch {
	case s.counts.Open >= limit:
		s.counts.Refused++
		return false
	case s.clients[client] >= clientLimit:
		s.counts.ClientRefused++
		return false
	}
	s.counts.Open++
	s.counts.Connections++
	s.clients[client]++
	return true
}

// clientOf returns what counts as one client: an IPv4 address, or the network of 64 bits of an IPv6
// address, in which a host may have any number of addresses.
func clientOf(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return addr
	}
	network, _ := addr.WithZone("").Prefix(64)
	return network.Addr()
}

// close counts what became of a connection.
func (t *table) close(s *service, from netip.Addr, end ended) {
	s.leaves(clientOf(from))
	t.ended(s, Counts{Sent: end.sent, Received: end.received})
}

// leaves counts a client's connection no more.
func (s *service) leaves(client netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients[client]--; s.clients[client] == 0 {
		delete(s.clients, client)
	}
}

// count counts something.
func (s *service) count(more Counts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.add(more)
}

// logs reports whether the Service gets one more line of the access log, and how many it has not got before.
func (s *service) logs(now time.Time) (leftOut int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if second := now.Truncate(time.Second); !second.Equal(s.loggedIn) {
		s.logged, s.loggedIn = 0, second
	}
	if s.logged == maxLines {
		s.leftOut++
		return 0, false
	}
	s.logged++
	leftOut, s.leftOut = s.leftOut, 0
	return leftOut, true
}

// keeps reports whether a flow to a backend may go on.
func (w way) keeps(backend netip.AddrPort) bool {
	return slices.Contains(w.ending, backend) || w.has(backend)
}

// connected counts the tries of a connection, and those of them that failed on this node.
func (s *service) connected(tries, failedHere int, ok bool) {
	more := Counts{Tries: uint64(tries), NodeFailures: uint64(failedHere)}
	switch {
	case !ok:
		more.Failures++
	case tries > 1:
		more.Retried++
	}
	s.count(more)
}

// choose chooses a backend after those that were tried, and counts the connection there. Only what chooses by
// such counts or takes turns holds up others meanwhile, of the same Service: a draw among many backends takes a while.
func (s *service) choose(c chooser, tried []netip.AddrPort) (backend netip.AddrPort, ok bool) {
	if !c.remembers() {
		backend, ok = c.next(tried)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.remembers() {
		c.open, c.turns = s.open, s.turns
		backend, ok = c.next(tried)
	}
	if ok {
		s.open[backend]++
	}
	return backend, ok
}

// leave counts a connection to a backend no longer.
func (s *service) leave(backend netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[backend]--; s.open[backend] == 0 {
		delete(s.open, backend)
	}
}

// suspect notes that a backend did not answer, and has others be tried first for a while.
func (t *table) suspect(s *service, backend netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.suspects[backend] = t.now().Add(suspectFor)
}

// trust notes that a backend did answer.
func (s *service) trust(backend netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.suspects, backend)
}

// chooser returns what chooses for a client's connection to a frontend.
func (t *table) chooser(w way, client, frontend netip.AddrPort, random func() uint64) chooser {
	s, now := w.service, t.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	var suspects map[netip.AddrPort]bool // most have none
	for b, until := range s.suspects {
		if now.Before(until) {
			if suspects == nil {
				suspects = map[netip.AddrPort]bool{}
			}
			suspects[b] = true
		} else {
			delete(s.suspects, b)
		}
	}
	c := chooser{choices: w.choices, scheduler: w.scheduler, client: client, frontend: frontend, draw: random}
	if suspects != nil {
		c.isSuspect = func(b netip.AddrPort) bool { return suspects[b] }
	}
	if m, ok := s.remembered[w.remembering(client.Addr())]; ok && now.Sub(m.last) < w.affinity {
		c.first = m.backend
	}
	return c
}

func (w way) remembering(client netip.Addr) remembering { return remembering{w.name, client} }

// remember notes which backend a client got. Of a Service with too many clients it first forgets those
// whose time is over.
func (t *table) remember(w way, client netip.Addr, backend netip.AddrPort) {
	s := w.service
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.affinity == 0 {
		clear(s.remembered)
		return
	}
	now, who := t.now(), w.remembering(client)
	if _, ok := s.remembered[who]; !ok && len(s.remembered) >= maxRemembered {
		if now.Sub(s.swept) < time.Second { // it takes a while
			return
		}
		s.swept = now
		for other, m := range s.remembered {
			if now.Sub(m.last) >= w.affinity {
				delete(s.remembered, other)
			}
		}
		if len(s.remembered) >= maxRemembered {
			return
		}
	}
	s.remembered[who] = remembered{backend, now}
}
