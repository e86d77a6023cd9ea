package main

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// lingers are the frontends of VIPs that were taken from Services, kept working for a while as
// packets may still arrive, unless a Service serves them again.
type lingers struct {
	services map[lb.Key][]lingering
	// due are the ends of lingering, the earliest first: all last equally long.
	due []deadline
	// served counts the Services that serve an address and port.
	served map[destination]int
	// taken is set when something has become served since changed was last called.
	taken bool
}

// lingering are frontends that were withdrawn together.
type lingering struct {
	ports []plan.Port
	until time.Time
}

type deadline struct {
	key lb.Key
	at  time.Time
}

// destination is an address and port that a live plan serves.
type destination struct {
	protocol lb.Protocol
	at       netip.AddrPort
}

func newLingers() lingers {
	return lingers{services: map[lb.Key][]lingering{}, served: map[destination]int{}}
}

// add lets frontends of a Service linger until a time that is not before those of earlier calls.
func (l *lingers) add(key lb.Key, ports []plan.Port, until time.Time) {
	l.services[key] = append(l.services[key], lingering{ports, until})
	l.due = append(l.due, deadline{key, until})
	l.taken = true // it may be served already
}

// live notes that what a Service serves has changed from before to now.
func (l *lingers) live(before, now plan.Service) {
	for f := range destinations(now) {
		if l.served[f]++; l.served[f] == 1 {
			l.taken = true
		}
	}
	for f := range destinations(before) {
		if l.served[f]--; l.served[f] == 0 {
			delete(l.served, f)
		}
	}
}

// destinations yields the addresses and ports of a live plan.
func destinations(s plan.Service) func(yield func(destination) bool) {
	return func(yield func(destination) bool) {
		for _, p := range s.Ports {
			for _, f := range p.Frontends {
				if f.Addr.IsValid() && !yield(destination{p.Protocol, netip.AddrPortFrom(f.Addr, f.Port)}) {
					return
				}
			}
		}
	}
}

// of returns what lingers of a Service.
func (l *lingers) of(key lb.Key) [][]plan.Port {
	var all [][]plan.Port
	for _, one := range l.services[key] {
		all = append(all, one.ports)
	}
	return all
}

// changed ends what has lingered for long enough, and what is served again, and returns the
// Services concerned.
func (l *lingers) changed(now time.Time) []lb.Key {
	var keys []lb.Key
	for len(l.due) > 0 && !now.Before(l.due[0].at) {
		key := l.due[0].key
		l.due = l.due[1:]
		if l.keep(key, func(one lingering) []plan.Port {
			if now.Before(one.until) {
				return one.ports
			}
			return nil
		}) {
			keys = append(keys, key)
		}
	}
	if l.taken {
		l.taken = false
		for key := range l.services {
			if l.keep(key, func(one lingering) []plan.Port { return plan.Yield(one.ports, l.serves) }) {
				keys = append(keys, key)
			}
		}
	}
	for len(l.due) > 0 && !l.waits(l.due[0]) {
		l.due = l.due[1:]
	}
	return keys
}

func (l *lingers) serves(protocol lb.Protocol, addr netip.Addr, port uint16) bool {
	return l.served[destination{protocol, netip.AddrPortFrom(addr, port)}] > 0
}

// waits reports whether something still lingers until a deadline.
func (l *lingers) waits(d deadline) bool {
	for _, one := range l.services[d.key] {
		if one.until.Equal(d.at) {
			return true
		}
	}
	return false
}

// keep reduces what lingers of a Service to what left returns, and reports whether that changed it.
func (l *lingers) keep(key lb.Key, left func(lingering) []plan.Port) bool {
	var kept []lingering
	changed := false
	for _, one := range l.services[key] {
		ports := left(one)
		changed = changed || count(ports) != count(one.ports)
		if len(ports) > 0 {
			kept = append(kept, lingering{ports, one.until})
		}
	}
	if len(kept) == 0 {
		delete(l.services, key)
	} else {
		l.services[key] = kept
	}
	return changed
}

func count(ports []plan.Port) int {
	n := 0
	for _, port := range ports {
		n += len(port.Frontends)
	}
	return n
}

// next returns how long to wait until something stops lingering; 0 when nothing lingers.
func (l *lingers) next(now time.Time) time.Duration {
	if len(l.due) == 0 {
		return 0
	}
	return max(l.due[0].at.Sub(now), time.Millisecond)
}
