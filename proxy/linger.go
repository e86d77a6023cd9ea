package main

import (
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// What lingers of one Service at most, beyond what it gave up last.
const (
	maxWithdrawals = 64
	maxLingering   = 1 << 14 // frontends
)

// lingers are the frontends of VIPs that were taken from Services, kept working for a while as
// packets may still arrive, unless a Service serves them again.
type lingers struct {
	services map[lb.Key][]*plan.Lingering
	at       plan.LingeringAt // the same
	// policies are the Services whose policy became Local, and until when nodes without an endpoint go
	// on as with policy Cluster.
	policies map[lb.Key]time.Time
	// due are the ends of lingering, the earliest first: all last equally long.
	due []deadline
	// added is what lingers since a moment ago, and some Service may serve already.
	added []*plan.Lingering
}

type deadline struct {
	key lb.Key
	at  time.Time
}

func newLingers() lingers {
	return lingers{services: map[lb.Key][]*plan.Lingering{}, at: plan.LingeringAt{}, policies: map[lb.Key]time.Time{}}
}

// add lets frontends of a Service linger until a time that is not before those of earlier calls.
func (l *lingers) add(key lb.Key, ports []plan.Port, until time.Time) {
	one := &plan.Lingering{Key: key, Ports: ports, Until: until}
	all := append(l.services[key], one)
	l.services[key] = newest(all)
	for _, ended := range all[:len(all)-len(l.services[key])] {
		l.at.Remove(ended)
	}
	l.at.Add(one)
	l.due = append(l.due, deadline{key, until})
	l.added = append(l.added, one)
}

// newest returns the last withdrawals, as many as a Service may have lingering: the earlier ones end
// before their time. The last one counts whatever its size, which plans bound.
func newest(all []*plan.Lingering) []*plan.Lingering {
	first, frontends := len(all), 0
	for first > 0 && len(all)-first < maxWithdrawals {
		if frontends += count(all[first-1].Ports); frontends > maxLingering && first < len(all) {
			break
		}
		first--
	}
	return slices.Clone(all[first:])
}

// addPolicy lets the policy Cluster of a Service linger until a time that is not before those of
// earlier calls.
func (l *lingers) addPolicy(key lb.Key, until time.Time) {
	l.policies[key] = until
	l.due = append(l.due, deadline{key, until})
}

// policy reports whether the policy Cluster of a Service lingers.
func (l *lingers) policy(key lb.Key) bool {
	_, lingers := l.policies[key]
	return lingers
}

// of returns what lingers of a Service.
func (l *lingers) of(key lb.Key) [][]plan.Port {
	var all [][]plan.Port
	for _, one := range l.services[key] {
		all = append(all, one.Ports)
	}
	return all
}

// changed ends what has lingered for long enough, and what some Service serves again, and returns
// the Services concerned.
func (l *lingers) changed(now time.Time, claims *plan.Claims) []lb.Key {
	var keys []lb.Key
	for len(l.due) > 0 && !now.Before(l.due[0].at) {
		key := l.due[0].key
		l.due = l.due[1:]
		ended := l.keep(key, func(one *plan.Lingering) []plan.Port {
			if now.Before(one.Until) {
				return one.Ports
			}
			return nil
		})
		if until, ok := l.policies[key]; ok && !now.Before(until) {
			delete(l.policies, key)
			ended = true
		}
		if ended {
			keys = append(keys, key)
		}
	}
	keys = append(keys, l.yield(claims)...)
	for len(l.due) > 0 && !l.waits(l.due[0]) {
		l.due = l.due[1:]
	}
	return keys
}

// yield ends what some Service serves again, and returns the Services concerned. It looks only where somebody has come
// to serve: all that lingers, as of one tenant, may be a hundred thousand frontends.
func (l *lingers) yield(claims *plan.Claims) (keys []lb.Key) {
	taken, all := claims.Taken(l.at)
	looks, services := map[*plan.Lingering]bool{}, map[lb.Key]bool{}
	for _, one := range slices.Concat(taken, l.added) {
		looks[one], services[one.Key] = true, true
	}
	l.added = nil
	if all {
		for key := range l.services {
			services[key] = true
		}
	}
	for key := range services {
		if l.keep(key, func(one *plan.Lingering) []plan.Port {
			if all || looks[one] {
				return plan.Yield(one.Ports, claims.Serves)
			}
			return one.Ports
		}) {
			keys = append(keys, key)
		}
	}
	return keys
}

// waits reports whether something still lingers until a deadline.
func (l *lingers) waits(d deadline) bool {
	if until, ok := l.policies[d.key]; ok && until.Equal(d.at) {
		return true
	}
	for _, one := range l.services[d.key] {
		if one.Until.Equal(d.at) {
			return true
		}
	}
	return false
}

// keep reduces what lingers of a Service to what left returns, and reports whether that changed it.
func (l *lingers) keep(key lb.Key, left func(*plan.Lingering) []plan.Port) bool {
	var kept []*plan.Lingering
	changed := false
	for _, one := range l.services[key] {
		ports := left(one)
		if count(ports) != count(one.Ports) {
			changed = true
			l.at.Remove(one)
			one.Ports = ports
			l.at.Add(one)
		}
		if len(ports) > 0 {
			kept = append(kept, one)
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
