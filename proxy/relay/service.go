package relay

import (
	"hash/maphash"
	"maps"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const (
	// maxRemembered is how many clients a Service's session affinity remembers. Others get the backend
	// that their address chooses.
	maxRemembered = 10_000
	// maxRememberedTogether is how many those of all Services remember, of some 170 bytes each, and minRemembered how many
	// each may of a namespace that has its part of these, while there is room for more than maxRemembered.
	maxRememberedTogether, minRemembered = 250_000, 64
	// returnsWithin is how much longer the relay knows a client whose time of session affinity is over, while less than
	// half of maxRememberedTogether are remembered: it gets any backend then, and not that of its address for ever.
	returnsWithin = 24 * time.Hour
	// maxLines is how many lines of the access log a Service gets in a second, and maxNamespaceLines how many those of a
	// namespace get that is not alone: clients decide how many connections end, and the node's logs are everybody's.
	maxLines, maxNamespaceLines = 100, 400
	// suspectFor is how long a backend that did not answer is tried last.
	suspectFor = 5 * time.Second
)

// service is what is relayed of a Service in one protocol. It is safe for concurrent use, but for what belongs
// to the table.
type service struct {
	id
	namespace    *namespace
	plan.Relayed                   // of the table, as tables are
	tables       map[string]*slots // see slotsOf
	memories     map[string]string // see shareMemories

	mu      sync.Mutex
	removed bool
	counts  Counts
	// open are the connections of each backend, those included that it has not answered yet.
	open map[netip.AddrPort]uint32
	// turns are when each backend has its next turn, and when that was that was taken last, at no backend.
	turns map[turn]float64
	// clients counts the open connections of each client.
	clients map[netip.Addr]int
	// remembered are the backends of clients, by memory and client, with session affinity.
	remembered map[remembering]remembered
	// mostRemembered is how many of these there have been at a sweep since the map was made: it has memory for as many.
	mostRemembered int
	swept          time.Time
	suspects       map[netip.AddrPort]time.Time
	// lines are those of the access log, and leftOut how many its namespace has not let through since the last one.
	lines   loop.Lines
	leftOut int
}

type remembering struct {
	memory string // of choices
	client netip.Addr
}

type remembered struct {
	backend netip.AddrPort
	last    time.Time
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

// admit counts a connection, and reports whether the Service and its client may have it. See Relay.admitTo.
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

// close takes back what admitTo has counted.
func (t *table) close(s *service, from netip.Addr) {
	s.namespace.open.Add(-1)
	s.leaves(clientOf(from))
	t.ended(s)
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
	leftOut, ok = s.lines.Admit(now, maxLines)
	if s.leftOut += leftOut; ok && !s.namespace.isAlone() {
		if _, ok = s.namespace.lines.Admit(now, maxNamespaceLines); !ok {
			s.leftOut++
		}
	}
	if !ok {
		return 0, false
	}
	leftOut, s.leftOut = s.leftOut, 0
	return leftOut, true
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
	m, known := s.remembered[w.remembering(client.Addr())]
	switch {
	case !known || w.affinity == 0:
	case now.Sub(m.last) < w.affinity:
		c.first = m.backend
		if w.port != 0 { // the client may have got it at another port
			c.first = netip.AddrPortFrom(m.backend.Addr(), w.port)
		}
	case w.fresh:
		c.scheduler, c.slots = plan.Random, nil
		c.draw = t.fresh(client.Addr(), w.affinity)
	}
	return c
}

// fresh returns what draws for a client whose time of session affinity is over. Connections that begin together draw
// the same, at each port: nothing is remembered of a client before it is connected. After that time it draws anew.
func (t *table) fresh(client netip.Addr, affinity time.Duration) func() uint64 {
	type turn struct {
		client netip.Addr
		number int64
	}
	seed := maphash.Comparable(t.seed, turn{client, t.now().UnixNano() / int64(affinity)})
	return rand.NewPCG(seed, 0).Uint64
}

func (w way) remembering(client netip.Addr) remembering { return remembering{w.memory, client} }

// remember notes which backend a client has just got.
func (t *table) remember(w way, client netip.Addr, backend netip.AddrPort) {
	t.rememberSince(w, client, backend, t.now())
}

// rememberSince notes which backend a client got with a connection of that time, unless it has had a newer one. Of a
// Service with too many clients it first forgets those whose time is over.
func (t *table) rememberSince(w way, client netip.Addr, backend netip.AddrPort, connected time.Time) {
	s := w.service
	s.mu.Lock()
	defer s.mu.Unlock()
	before := len(s.remembered)
	defer func() { t.remembered.add(s, len(s.remembered)-before) }()
	if w.affinity == 0 {
		if before > 0 {
			s.remembered = map[remembering]remembered{}
		}
		return
	}
	now, who := t.now(), w.remembering(client)
	had, ok := s.remembered[who]
	if s.removed || ok && had.last.After(connected) {
		return
	}
	if !ok && before >= t.remembered.room(s) {
		if now.Sub(s.swept) < time.Second { // it takes a while
			return
		}
		if s.sweep(now, w.affinity); len(s.remembered) >= t.remembered.room(s) {
			return
		}
	}
	s.remembered[who] = remembered{backend, connected}
}

// memory counts the clients that are remembered: all, and those of the Services of each namespace.
type memory struct {
	mu  sync.Mutex
	all int
	of  map[string]int
}

// add counts clients of a Service.
func (m *memory) add(s *service, n int) {
	if n == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all += n
	if m.of[s.key.Namespace] += n; m.of[s.key.Namespace] == 0 {
		delete(m.of, s.key.Namespace)
	}
}

// room is how many clients a Service may have remembered at the moment. Once those of its namespace are four times as
// many as there is room for still, it may have minRemembered, and of the last room none: that is for other namespaces.
func (m *memory) room(s *service) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	left := maxRememberedTogether - m.all
	switch {
	case m.of[s.key.Namespace] < 4*left:
		return maxRemembered
	case left > maxRemembered:
		return minRemembered
	}
	return 0
}

// isHalfFull reports whether at least half as many clients are remembered as may be.
func (m *memory) isHalfFull() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all >= maxRememberedTogether/2
}

// sweep forgets the clients of a Service, which is locked, whose newest connection began so long ago. A map keeps the
// memory of what is deleted from it, so once fewer than half are left of the most that there were, they get a new one.
func (s *service) sweep(now time.Time, after time.Duration) {
	s.swept = now
	s.mostRemembered = max(s.mostRemembered, len(s.remembered))
	for who, m := range s.remembered {
		if now.Sub(m.last) >= after {
			delete(s.remembered, who)
		}
	}
	if n := len(s.remembered); n < s.mostRemembered/2 {
		left := make(map[remembering]remembered, n)
		maps.Copy(left, s.remembered)
		s.remembered, s.mostRemembered = left, n
	}
}

// sweep forgets the clients of all Services whose time is over, those of returnsWithin ago if there is room for more.
func (t *table) sweep() {
	longer := returnsWithin
	if t.remembered.isHalfFull() {
		longer = 0
	}
	t.mu.Lock()
	all := make(map[*service]time.Duration, len(t.services))
	for _, s := range t.services {
		all[s] = s.Affinity
	}
	t.mu.Unlock()
	for s, affinity := range all {
		s.mu.Lock()
		before := len(s.remembered)
		if affinity > 0 {
			affinity += longer
		}
		s.sweep(t.now(), affinity)
		t.remembered.add(s, len(s.remembered)-before)
		s.mu.Unlock()
	}
}
