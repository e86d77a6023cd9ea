package plan

import (
	"fmt"
	"net/netip"
	"strconv"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The model of the protocol between controllers and the API server: three Services, two addresses,
// two controllers of which one leads at a time. Everything that can happen happens in every order:
// Services come, go and change, watches deliver late and out of order between objects, writes land
// late, are refused or get lost with or without effect, leaders crash and hand over. What the model
// takes for granted: no write of a leader that has ended lands after the next has caught up (a
// write times out after 10 s, a Lease after 15 s).
const (
	modelServices    = 3
	modelControllers = 2
)

// modelService is a Service as stored or as cached; the zero value is none.
type modelService struct {
	version int8 // 0: does not exist
	addr    int8 // 0: none
	said    bool // has a condition
}

// modelWrite is one that is decided and whose fate is unknown.
type modelWrite struct {
	version, addr int8 // version 0: no write
	flying        bool
	done          bool // answered: it took place
}

type model struct {
	api     [modelServices]modelService
	gone    [modelServices]bool // does not come back
	touched bool
	leader  int8
	// cache and writes are the leader's; the others have nothing that they act on.
	cache  [modelServices]modelService
	writes [modelServices]modelWrite
	turns  int8 // terms that have begun
}

func (m model) lead(leader int8) model {
	m.leader, m.cache, m.writes = leader, m.api, [modelServices]modelWrite{}
	m.turns++
	return m
}

// seen is what a pass depends on: the rest of the state is out of the controller's sight.
type seen struct {
	cache  [modelServices]modelService
	writes [modelServices]modelWrite
}

// passes remembers what a pass over the same sight has come to: the plan is pure.
type passes map[seen]seen

// step is what the controller does in one pass, with the plan that it really uses.
func (p passes) step(m model) model {
	before := seen{m.cache, m.writes}
	after, ok := p[before]
	if !ok {
		m = m.step()
		p[before] = seen{m.cache, m.writes}
		return m
	}
	m.cache, m.writes = after.cache, after.writes
	return m
}

func (m model) step() model {
	in := modelInput{
		Pools: map[string]lb.Pool{"p": {Name: "p", AutoAssign: true,
			Ranges: []lb.Range{{From: modelAddr(1), To: modelAddr(2)}}}},
		Services: map[lb.Key]lb.Service{}, Pending: map[lb.Key]Pending{},
	}
	for i, c := range m.cache {
		if c.version == 0 {
			m.writes[i] = modelWrite{}
			continue
		}
		s := lb.Service{Key: key(strconv.Itoa(i)), UID: "u", Version: fmt.Sprint(c.version), Created: at(i),
			Type: lb.LoadBalancer, Families: []lb.Family{lb.IPv4}}
		if c.addr > 0 {
			s.Ingress = []lb.Ingress{{Addr: modelAddr(c.addr)}}
		}
		in.Services[s.Key] = s
		if w := m.writes[i]; w.version == c.version {
			p := Pending{UID: "u", Version: s.Version}
			if w.addr > 0 {
				p.Addresses = []netip.Addr{modelAddr(w.addr)}
			}
			in.Pending[s.Key] = p
		} else {
			m.writes[i] = modelWrite{}
		}
	}
	p := assignModel(in)
	for i, c := range m.cache {
		d, ok := p.Services[key(strconv.Itoa(i))]
		var addr int8
		if ok && len(d.Addresses) > 0 {
			addr = int8(d.Addresses[0].As4()[3])
		}
		w := m.writes[i]
		if !ok || w.flying || w.done || w.version == 0 && addr == c.addr && c.said {
			continue
		}
		m.writes[i] = modelWrite{version: c.version, addr: addr, flying: true}
	}
	return m
}

func modelAddr(n int8) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}) }

// next returns all that can happen next.
func (p passes) next(all []model, m model) []model {
	flying := false
	for i := range modelServices {
		s, w := m.api[i], m.writes[i]
		if s.version == 0 && !m.gone[i] {
			n := m
			n.api[i] = modelService{version: 1}
			all = append(all, n)
		}
		if s.version > 0 && i == 0 { // one that goes is enough
			n := m
			n.api[i], n.gone[i] = modelService{}, true
			all = append(all, n)
		}
		if s.version > 0 && !m.touched {
			n := m
			n.api[i].version++
			n.touched = true
			all = append(all, n)
		}
		if m.cache[i] != s {
			n := m
			n.cache[i] = s
			all = append(all, n)
		}
		if !w.flying {
			continue
		}
		flying = true
		for _, answered := range []bool{true, false} {
			n := m
			n.writes[i].flying = false
			if s.version == w.version { // else it is refused
				n.api[i] = modelService{version: s.version + 1, addr: w.addr, said: true}
				n.writes[i].done = answered
			}
			all = append(all, n)
		}
		n := m // lost on its way
		n.writes[i].flying = false
		all = append(all, n)
	}
	all = append(all, p.step(m))
	if !flying && m.turns < 2 {
		for leader := range int8(modelControllers) {
			all = append(all, m.lead(leader))
		}
	}
	return all
}

// broken says what must never be, in a state and in the way to it.
func (m model) broken(before model) string {
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

// TestContract8Model explores every state that the model can reach.
func TestContract8Model(t *testing.T) {
	start := model{}.lead(0)
	p, found := passes{}, map[model]struct{}{start: {}}
	var next []model
	for queue := []model{start}; len(queue) > 0; {
		m := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		next = p.next(next[:0], m)
		for _, n := range next {
			if why := n.broken(m); why != "" {
				t.Fatalf("%s:\n%+v\n%+v", why, m, n)
			}
			if _, ok := found[n]; !ok {
				found[n] = struct{}{}
				queue = append(queue, n)
			}
		}
	}
	t.Logf("%d states", len(found))
}
