package relay

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"sync"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// choices are what the frontends of a port with one policy choose from.
type choices struct {
	name string
	// memory is the name by which session affinity remembers clients, that of the first by name of the choices with the
	// same policy that have the same backends: a client has one backend at all of these. port is that of all backends; 0
	// if they differ.
	memory   string
	port     uint16
	backends []plan.RelayedBackend
	slots    *slots // nil without a table
}

// slots are the table of a list whose scheduler hashes, the same as in nftables mode. It is safe for concurrent
// use.
type slots struct {
	backends []plan.RelayedBackend
	size     uint32
	fill     sync.Once
	filled   []uint16
}

// table returns the table, which is filled when it is first needed.
func (s *slots) table() []uint16 {
	if s == nil {
		return nil
	}
	s.fill.Do(func() {
		onePort := onePort(s.backends)
		hashes, weights := make([]uint64, len(s.backends)), make([]uint8, len(s.backends))
		for i, b := range s.backends {
			var addr [16]byte
			copy(addr[:], b.Addr.Addr().AsSlice())
			port := b.Addr.Port()
			if onePort {
				port = 0
			}
			hashes[i], weights[i] = plan.HashBackend(addr, port), max(b.Weight, 1)
		}
		s.filled = plan.Slots(plan.Maglev, hashes, weights, s.size)
	})
	return s.filled
}

// onePort reports whether all backends have the same port: then it does not count.
func onePort(backends []plan.RelayedBackend) bool {
	return !slices.ContainsFunc(backends, func(b plan.RelayedBackend) bool {
		return b.Addr.Port() != backends[0].Addr.Port()
	})
}

// keyOf returns what a table depends on.
func keyOf(backends []plan.RelayedBackend) string {
	onePort := onePort(backends)
	var key []byte
	for _, b := range backends {
		addr := b.Addr.Addr().As16()
		key = append(append(key, addr[:]...), b.Weight)
		if !onePort {
			key = binary.BigEndian.AppendUint16(key, b.Addr.Port())
		}
	}
	return string(key)
}

// slotsOf returns the tables of what is relayed of a Service, by keyOf. Those of before that do stay. Lists with the
// same backends at different ports share one.
func slotsOf(relayed *plan.Relayed, before map[string]*slots) map[string]*slots {
	if !relayed.Scheduler.Hashes() {
		return nil
	}
	all := map[string]*slots{}
	for _, p := range relayed.Ports {
		for _, backends := range [][]plan.RelayedBackend{p.Cluster, p.Local} {
			if len(backends) > 1 {
				all[keyOf(backends)] = &slots{backends: backends, size: plan.SlotSize(shares(backends))}
			}
		}
	}
	largest := plan.LargestSlots(func(largest uint32) (total int) {
		for _, s := range all {
			total += int(min(s.size, largest))
		}
		return total
	})
	for key, s := range all {
		if s.size = min(s.size, largest); len(s.backends) > int(s.size) {
			delete(all, key) // at random, as by the rules: each backend gets connections
			continue
		}
		if had := before[key]; had != nil && had.size == s.size {
			all[key] = had
		}
	}
	return all
}

// shares returns how many shares a table has at least, each backend's in proportion to its weight.
func shares(backends []plan.RelayedBackend) int {
	total, same := 0, true
	for _, b := range backends {
		total += int(max(b.Weight, 1))
		same = same && b.Weight == backends[0].Weight
	}
	if same {
		return len(backends)
	}
	return total
}

// choicesOf returns those of the frontends of a port with a policy.
func choicesOf(p plan.RelayedPort, local bool, tables map[string]*slots) choices {
	l := choices{name: p.Name, backends: p.Cluster}
	if local { // others have other backends
		l = choices{name: p.Name + "/local", backends: p.Local}
	}
	if len(l.backends) > 0 && l.backends[0].Addr.Addr().Is6() {
		l.name += "/IPv6" // the families of a port have other backends, which take turns by themselves
	}
	if tables != nil {
		l.slots = tables[keyOf(l.backends)]
	}
	if len(l.backends) > 0 && onePort(l.backends) {
		l.port = l.backends[0].Addr.Port()
	}
	l.memory = l.name
	return l
}

// shareMemories has choices with the same backends remember clients together, and notes the names of the memories by
// those of the choices.
func shareMemories(all []*choices, names map[string]string) {
	first := map[string]string{}
	for _, l := range all {
		key := keyOf(l.backends)
		if name, ok := first[key]; !ok || l.name < name {
			first[key] = l.name
		}
	}
	for _, l := range all {
		l.memory = first[keyOf(l.backends)]
		names[l.name] = l.memory
	}
}

// has reports whether a backend is among them.
func (l choices) has(backend netip.AddrPort) bool {
	return slices.ContainsFunc(l.backends, func(b plan.RelayedBackend) bool { return b.Addr == backend })
}
