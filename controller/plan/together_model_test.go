package plan

import (
	"fmt"
	"net/netip"
	"strconv"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The model of reservations (see controller/reserve.go): two addresses, and two controllers that
// both lead all the time. Services come and go, watches deliver late and in any order between
// objects, writes of Services arrive at any time or never, answers get lost, controllers crash and
// lose all that they remember, others edit the Services and the pool: each of it as often as it
// likes. The model trusts neither clocks nor the Lease.
//
// Versions are only ever asked whether they are the present one, so the model has no numbers of
// them. What can be of no effect any more is dropped, and controllers are in no order. So there are
// finitely many states, and all of them are explored. One goroutine does it all, so the race
// detector, with which it takes thrice the time, is kept out.

// togetherServices is the number of Services.
const togetherServices = 2

// What is known of an object's version.
const (
	unknown = iota
	stale   // it has changed since
	current
)

// tService is a Service as a controller sees it or as it is.
type tService struct {
	version uint8
	addr    int8 // 0: none
}

// tReservation is a reservation, and also a write that a controller remembers. It is for the
// version of the Service that its owner sees.
type tReservation struct {
	there    bool
	addr     int8
	possible uint8 // bits of addresses of earlier writes to the same version
	adopted  bool
}

type tReservations [togetherServices]tReservation

type tController struct {
	cache        [togetherServices]tService
	base         uint8         // version of the pool on which it may reserve
	fresh        bool          // it sees the pool as it is
	foreign      tReservations // what it sees of the pool, if it may not reserve
	reservations tReservations // what it has reserved, if it may
	writes       tReservations
}

type together struct {
	api          [togetherServices]tService
	flying       [togetherServices]uint8 // bits of addresses of writes to the present version that may still arrive
	writer       int8                    // of the pool, from 1; 0 for one that is no more
	reservations tReservations           // of the pool, for present versions
	ctl          [2]tController
}

// flaw is what a controller of the model does wrong.
type flaw int

const (
	flawless         flaw = iota
	actsOnForeign         // takes another's reservations for its own
	keepsAdopted          // goes on with what another had reserved once
	writesUnasked         // writes Services although the reservation was refused
	reservesAnywhere      // reserves on what it sees of the pool, without catching up with Services
)

type explorer struct {
	edits     bool // others edit Services and the pool
	flaw      flaw
	decisions map[decisionKey][togetherServices]int8
}

type decisionKey struct {
	cache  [togetherServices]tService
	writes tReservations
}

func bit(addr int8) uint8 { return 1 << addr }

// decide is the plan that the controllers really use.
func (e *explorer) decide(c *tController) [togetherServices]int8 {
	k := decisionKey{c.cache, c.writes}
	for s := range k.writes { // what the plan does not see
		k.writes[s].adopted = false
		if k.cache[s].version == current {
			k.cache[s].version = stale
		}
	}
	if known, ok := e.decisions[k]; ok {
		return known
	}
	in := modelInput{
		Pools: map[string]lb.Pool{"p": {Name: "p", AutoAssign: true,
			Ranges: []lb.Range{{From: modelAddr(1), To: modelAddr(2)}}}},
		Services: map[lb.Key]lb.Service{}, Pending: map[lb.Key]Pending{},
	}
	for i, s := range c.cache {
		if s.version == unknown {
			continue
		}
		// The one of the higher number is the older, so that both orders occur.
		service := lb.Service{Key: key(strconv.Itoa(i)), UID: "u", Version: "1", Created: at(9 - i), Type: lb.LoadBalancer,
			Families: []lb.Family{lb.IPv4}}
		if s.addr > 0 {
			service.Ingress = []lb.Ingress{{Addr: modelAddr(s.addr)}}
		}
		in.Services[service.Key] = service
		w := c.writes[i]
		if !w.there {
			continue
		}
		p := Pending{UID: "u", Version: service.Version}
		if w.addr > 0 {
			p.Addresses = []netip.Addr{modelAddr(w.addr)}
		}
		for addr := int8(1); addr <= 2; addr++ {
			if w.possible&bit(addr) != 0 {
				p.Possible = append(p.Possible, modelAddr(addr))
			}
		}
		in.Pending[service.Key] = p
	}
	var decided [togetherServices]int8
	for k, d := range assignModel(in).Services {
		i, _ := strconv.Atoi(k.Name)
		if len(d.Addresses) > 0 {
			decided[i] = int8(d.Addresses[0].As4()[3])
		}
	}
	e.decisions[k] = decided
	return decided
}

// serviceChanged notes that Service s has another version.
//
//go:norace
func (m *together) serviceChanged(s int) {
	m.flying[s], m.reservations[s] = 0, tReservation{}
	for i := range m.ctl {
		c := &m.ctl[i]
		c.foreign[s] = tReservation{} // no version that the Service will have again
		if c.cache[s].version == current {
			c.cache[s].version = stale
		}
	}
}

// poolChanged notes that the pool has another version.
//
//go:norace
func (m *together) poolChanged() {
	for i := range m.ctl {
		c := &m.ctl[i]
		c.fresh = false
		if c.base == current {
			c.base = stale
		}
	}
}

// seeService has the controller see Service s as it is.
//
//go:norace
func (m *together) seeService(i, s int) (news bool) {
	c := &m.ctl[i]
	if c.cache[s] == m.api[s] {
		return false
	}
	c.cache[s], c.writes[s], c.reservations[s] = m.api[s], tReservation{}, tReservation{}
	return true
}

// seePool has the controller see the pool as it is, see base in controller/reserve.go.
//
//go:norace
func (m *together) seePool(i int) (news bool) {
	c := &m.ctl[i]
	if c.fresh {
		return false
	}
	c.fresh = true
	if c.base == stale && m.writer == int8(i+1) {
		c.base = current
	}
	if c.base != current {
		c.base, c.reservations, c.foreign = unknown, tReservations{}, m.reservations
	}
	return true
}

// catchUp is catchUpWithOthers: the pool as it was seen, all Services as they are.
//
//go:norace
func (e *explorer) catchUp(m together, i int) together {
	for s := range m.api {
		m.seeService(i, s)
	}
	c := &m.ctl[i]
	c.reservations = tReservations{}
	for s, reservation := range c.foreign {
		w := &c.writes[s]
		if w.adopted && e.flaw != keepsAdopted {
			*w = tReservation{}
		}
		if !reservation.there {
			continue
		}
		if !w.there {
			*w = reservation
			w.adopted = true
		} else {
			w.possible |= (reservation.possible | bit(reservation.addr)) &^ bit(w.addr)
		}
	}
	if e.flaw == actsOnForeign {
		c.reservations = c.foreign
	}
	c.foreign = tReservations{}
	c.base = stale
	if c.fresh {
		c.base = current
	}
	return m
}

// crash has another in the place of controller i, that knows nothing.
//
//go:norace
func (m *together) crash(i int) {
	m.ctl[i] = tController{cache: m.ctl[i].cache}
	if m.writer == int8(i+1) {
		m.writer = 0
	}
}

// step is one pass of controller i, with all that can come of it. Writes that change no address are
// left out: to others they are edits.
//
//go:norace
func (e *explorer) step(all []together, m together, i int) []together {
	c := &m.ctl[i]
	decided := e.decide(c)
	var sends tReservations
	var reserved [togetherServices]bool
	reservations := c.reservations
	needs := false
	for s, shown := range c.cache {
		addr, w := decided[s], c.writes[s]
		if addr == shown.addr {
			continue
		}
		send := tReservation{there: true, addr: addr, possible: w.possible &^ bit(addr)}
		if w.there && w.addr != addr {
			send.possible |= bit(w.addr)
		}
		sends[s], reserved[s] = send, reservations[s] == send
		if !reserved[s] {
			reservations[s], needs = send, true
		}
	}
	if e.flaw == reservesAnywhere && c.fresh {
		c.base = current
	}
	if needs && c.base == current {
		m.poolChanged()
		for s := range reservations {
			m.reservations[s] = tReservation{}
			if c.cache[s].version == current {
				m.reservations[s] = reservations[s]
			}
		}
		m.writer = int8(i + 1)
		all = append(all, m) // the answer is lost, or the controller ends here
		c.base, c.fresh, c.reservations = current, true, reservations
	}
	for s, send := range sends {
		if !send.there || c.reservations[s] != send && e.flaw != writesUnasked {
			continue
		}
		c.writes[s] = send
		if c.cache[s].version == current {
			m.flying[s] |= bit(send.addr)
		}
	}
	return append(all, m)
}

// next returns all that can happen next. What a controller is shown concerns no one but itself, so
// that is put off until it acts or the object changes again.
//
//go:norace
func (e *explorer) next(all []together, m together) []together {
	add := func(ms []together, change func(*together)) {
		for _, n := range ms {
			change(&n)
			all = append(all, n)
		}
	}
	for s := range m.api {
		shown := shownOrNot([]together{m}, func(n *together) bool { return n.seeService(0, s) },
			func(n *together) bool { return n.seeService(1, s) })
		put := func(to tService) {
			add(shown, func(n *together) {
				n.serviceChanged(s)
				n.api[s] = to
			})
		}
		if m.api[s].version == unknown {
			put(tService{version: current})
			continue
		}
		if e.edits {
			put(m.api[s])
		}
		put(tService{})
		for addr := int8(1); addr <= 2; addr++ {
			if m.flying[s]&bit(addr) != 0 {
				put(tService{version: current, addr: addr})
			}
		}
	}
	shown := shownOrNot([]together{m}, func(n *together) bool { return n.seePool(0) },
		func(n *together) bool { return n.seePool(1) })
	if e.edits { // this also stands for counts that another controller writes
		add(shown, (*together).poolChanged)
	}
	for i := range m.ctl {
		crashed := m
		crashed.crash(i)
		for _, n := range shownOrNot([]together{crashed}, func(n *together) bool { return n.seePool(i) }) {
			all = append(all, e.catchUp(n, i))
		}
		for _, n := range shown {
			if n.ctl[i].base == unknown && e.flaw != reservesAnywhere { // it does so when it has to, or when it begins
				all = append(all, e.catchUp(n, i))
				continue
			}
			for _, n := range shownOrNot([]together{n}, func(n *together) bool { return n.seeService(i, 0) },
				func(n *together) bool { return n.seeService(i, 1) }) {
				all = e.step(all, n, i)
			}
		}
	}
	return all
}

// shownOrNot returns the states with and without each of what can be seen.
//
//go:norace
func shownOrNot(ms []together, sights ...func(*together) (news bool)) []together {
	for _, see := range sights {
		for _, n := range ms {
			if see(&n) {
				ms = append(ms[:len(ms):len(ms)], n)
			}
		}
	}
	return ms
}

// broken says what must never be, in a state and in the way to it.
//
//go:norace
func (m *together) broken(before *together) string {
	for i, s := range m.api {
		for j, other := range m.api[:i] {
			if s.addr > 0 && s.addr == other.addr {
				return fmt.Sprintf("services %d and %d both hold .%d", j, i, s.addr)
			}
		}
		if was := before.api[i]; was.addr > 0 && s.version > 0 && s.addr != was.addr {
			return fmt.Sprintf("service %d held .%d and then .%d", i, was.addr, s.addr)
		}
	}
	return ""
}

// togetherState is a state in few bytes, the same for two states that differ by the order of
// controllers only.
type togetherState [3]uint64

// packer puts small numbers into a word.
type packer struct {
	word uint64
	bits int
}

//go:norace
func (p *packer) add(n uint8, bits int) {
	p.word |= uint64(n) << p.bits
	p.bits += bits
}

//go:norace
func (p *packer) service(s tService) { p.add(s.version|uint8(s.addr)<<2, 4) }

//go:norace
func (p *packer) reservation(c tReservation) {
	p.add(one(c.there)|uint8(c.addr)<<1|c.possible>>1<<3|one(c.adopted)<<5, 6)
}

//go:norace
func one(set bool) uint8 {
	if set {
		return 1
	}
	return 0
}

//go:norace
func (c *tController) pack() uint64 {
	var p packer
	for s := range togetherServices {
		p.service(c.cache[s])
		p.reservation(c.foreign[s])
		p.reservation(c.reservations[s])
		p.reservation(c.writes[s])
	}
	p.add(c.base, 2)
	p.add(one(c.fresh), 1)
	return p.word
}

//go:norace
func (m *together) pack() togetherState {
	a, b := m.ctl[0].pack(), m.ctl[1].pack()
	writer := uint8(m.writer)
	if a > b {
		a, b = b, a
		if writer > 0 {
			writer = 3 - writer
		}
	}
	var p packer
	for s := range togetherServices {
		p.service(m.api[s])
		p.add(m.flying[s], 3)
		p.reservation(m.reservations[s])
	}
	p.add(writer, 2)
	return togetherState{p.word, a, b}
}

// explore goes through all states until one is broken, and tells how many there were.
//
//go:norace
func (e *explorer) explore() (states int, broken string) {
	e.decisions = map[decisionKey][togetherServices]int8{}
	var start together
	seen := map[togetherState]struct{}{start.pack(): {}}
	var next []together
	for queue := []together{start}; len(queue) > 0; {
		m := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		next = e.next(next[:0], m)
		for _, n := range next {
			if why := n.broken(&m); why != "" {
				return len(seen), fmt.Sprintf("%s:\n%+v\n%+v", why, m, n)
			}
			k := n.pack()
			if _, ok := seen[k]; !ok {
				seen[k] = struct{}{}
				queue = append(queue, n)
			}
		}
	}
	return len(seen), ""
}

// TestContract8ModelTogether explores every state that the model can reach; with -short, those
// without edits by others.
func TestContract8ModelTogether(t *testing.T) {
	e := explorer{edits: !testing.Short()}
	states, broken := e.explore()
	if broken != "" {
		t.Fatal(broken)
	}
	t.Logf("%d states, %d decisions", states, len(e.decisions))
}

// TestContract8ModelTogetherFindsFlaws has controllers break each rule of the protocol: the model
// can fail.
func TestContract8ModelTogetherFindsFlaws(t *testing.T) {
	for f := actsOnForeign; f <= reservesAnywhere; f++ {
		e := explorer{edits: true, flaw: f}
		states, broken := e.explore()
		if broken == "" {
			t.Errorf("flaw %d goes unseen in %d states", f, states)
		} else {
			t.Logf("flaw %d: seen after %d states", f, states)
		}
	}
}
