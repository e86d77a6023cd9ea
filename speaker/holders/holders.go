// Package holders knows which Services hold which VIPs, both ways.
package holders

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Service is what counts of a Service: the VIPs that it has, in the order of its status, what its condition Assigned
// says of them, and when it was made.
type Service struct {
	VIPs     []netip.Addr
	Assigned lb.Condition
	Created  time.Time
}

// holder is a Service, with its condition as it was read. It is read only if it is another one than before: 1,000
// Services that share 32 VIPs have 4 MB of them.
type holder struct {
	Service
	says lb.Assigned
}

// ranksAs reports whether the Service's VIPs have the same places as those of another.
func (h holder) ranksAs(other holder) bool {
	return slices.Equal(h.VIPs, other.VIPs) && h.Created.Equal(other.Created) &&
		slices.Equal(h.says.Confirmed, other.says.Confirmed)
}

// State is what is known. The zero value knows nothing and is ready.
type State struct {
	has      map[lb.Key]holder
	services map[netip.Addr][]lb.Key // sorted
	// surplus are the VIPs beyond the limit: see ranked.
	surplus map[netip.Addr]bool
	// order are all VIPs, in their order, and places their elements; nil unless there are more than the limit.
	order  []ranked
	places map[netip.Addr]ranked
	// Limit is how many VIPs are held at most; 0 stands for plan.MaxVIPs.
	Limit int
}

// Step takes what some Services have now; no VIPs for one that is gone or not ours. It returns the
// VIPs that those Services have or had, with those that have become surplus or are so no longer,
// and the Services of which no VIP is held, or not all of them.
func (s *State) Step(changes map[lb.Key]Service) (touched map[netip.Addr]bool, without []lb.Key) {
	touched = map[netip.Addr]bool{}
	differ := false
	for key, service := range changes {
		before := s.has[key]
		now := holder{service, before.says}
		if service.Assigned != before.Assigned {
			now.says = lb.ReadAssigned(service.Assigned)
		}
		differ = differ || !before.ranksAs(now)
		for _, vip := range before.VIPs {
			touched[vip] = true
			s.release(key, vip)
		}
		for _, vip := range now.VIPs {
			touched[vip] = true
			s.hold(key, vip)
		}
		if len(now.VIPs) == 0 {
			delete(s.has, key)
			continue
		}
		if s.has == nil {
			s.has = map[lb.Key]holder{}
		}
		s.has[key] = now
	}
	if differ {
		s.choose(touched)
	}
	for key, now := range changes {
		if len(now.VIPs) == 0 || len(s.Surplus(key)) > 0 {
			without = append(without, key)
		}
	}
	return touched, without
}

// maxMoves is for how many VIPs that change the order is kept up: each costs some memory that moves.
// For more of them it is made anew.
const maxMoves = 64

// choose finds out which VIPs are surplus: all nodes come to the same. It adds those that have
// become so, or are so no longer, to touched, which are the only ones whose Services have changed.
func (s *State) choose(touched map[netip.Addr]bool) {
	limit := cmp.Or(s.Limit, plan.MaxVIPs)
	switch {
	case len(s.services) <= limit:
		s.order, s.places = nil, nil
		s.surplusIs(map[netip.Addr]bool{}, touched)
	case s.order == nil || len(touched) > maxMoves:
		s.sort()
		surplus := make(map[netip.Addr]bool, len(s.order)-limit)
		for _, r := range s.order[limit:] {
			surplus[r.vip] = true
		}
		s.surplusIs(surplus, touched)
	default:
		s.move(limit, touched)
	}
}

func (s *State) surplusIs(surplus, touched map[netip.Addr]bool) {
	for vip := range surplus {
		if !s.surplus[vip] {
			touched[vip] = true
		}
	}
	for vip := range s.surplus {
		if !surplus[vip] {
			touched[vip] = true
		}
	}
	s.surplus = surplus
}

// sort puts all VIPs in order.
func (s *State) sort() {
	s.order, s.places = make([]ranked, 0, len(s.services)), make(map[netip.Addr]ranked, len(s.services))
	for vip, keys := range s.services {
		r := s.rank(vip, keys)
		s.order, s.places[vip] = append(s.order, r), r
	}
	slices.SortFunc(s.order, ranked.compare)
}

// move puts the VIPs that were touched in their places. With as many, others pass the limit.
func (s *State) move(limit int, touched map[netip.Addr]bool) {
	changed := len(touched)
	for vip := range touched {
		if was, ok := s.places[vip]; ok {
			i, _ := slices.BinarySearchFunc(s.order, was, ranked.compare)
			s.order = slices.Delete(s.order, i, i+1)
			delete(s.places, vip)
		}
		delete(s.surplus, vip)
		if keys := s.services[vip]; len(keys) > 0 {
			now := s.rank(vip, keys)
			i, _ := slices.BinarySearchFunc(s.order, now, ranked.compare)
			s.order, s.places[vip] = slices.Insert(s.order, i, now), now
		}
	}
	for vip := range touched {
		if now, ok := s.places[vip]; ok && now.compare(s.order[limit]) >= 0 {
			s.surplus[vip] = true
		}
	}
	for i := max(0, limit-changed); i < min(len(s.order), limit+changed); i++ {
		if vip, beyond := s.order[i].vip, i >= limit; s.surplus[vip] != beyond {
			touched[vip] = true
			if beyond {
				s.surplus[vip] = true
			} else {
				delete(s.surplus, vip)
			}
		}
	}
}

// ranked is a VIP with the first of the Services that have it.
type ranked struct {
	vip netip.Addr
	// confirmed is set if the controller has confirmed that the Service holds the VIP. A tenant who may write the
	// status of Services can make up others, outside of every pool, as many as speakers announce.
	confirmed bool
	created   time.Time
	key       lb.Key
}

func (s *State) rank(vip netip.Addr, keys []lb.Key) (first ranked) {
	for i, key := range keys {
		has := s.has[key]
		r := ranked{vip, slices.Contains(has.says.Confirmed, vip), has.Created, key}
		if i == 0 || r.compare(first) < 0 {
			first = r
		}
	}
	return first
}

// compare puts confirmed VIPs before others, and orders each by the age of their Services.
func (r ranked) compare(other ranked) int {
	if r.confirmed != other.confirmed {
		if r.confirmed {
			return -1
		}
		return 1
	}
	if c := r.created.Compare(other.created); c != 0 {
		return c
	}
	return cmp.Or(r.key.Compare(other.key), r.vip.Compare(other.vip))
}

func (s *State) release(key lb.Key, vip netip.Addr) {
	left := slices.DeleteFunc(s.services[vip], func(k lb.Key) bool { return k == key })
	if len(left) == 0 {
		delete(s.services, vip)
		return
	}
	s.services[vip] = left
}

func (s *State) hold(key lb.Key, vip netip.Addr) {
	if s.services == nil {
		s.services = map[netip.Addr][]lb.Key{}
	}
	if i, found := slices.BinarySearchFunc(s.services[vip], key, lb.Key.Compare); !found {
		s.services[vip] = slices.Insert(s.services[vip], i, key)
	}
}

// Of returns the Services on a VIP that is not surplus, sorted. Do not change it.
func (s *State) Of(vip netip.Addr) []lb.Key {
	if s.surplus[vip] {
		return nil
	}
	return s.services[vip]
}

// Joined reports, for each of the Services on a VIP, whether it joined the others: see lb.Joined.
func (s *State) Joined(vip netip.Addr) []bool {
	keys := s.Of(vip)
	if len(keys) < 2 {
		return make([]bool, len(keys))
	}
	all := make([]lb.Assigned, len(keys))
	for i, key := range keys {
		all[i] = s.has[key].says
	}
	return lb.Joined(vip, keys, all)
}

// VIPs returns what a Service holds, in the order of its status, without what is surplus. Do not
// change it.
func (s *State) VIPs(key lb.Key) []netip.Addr {
	vips := s.has[key].VIPs
	if len(s.surplus) == 0 {
		return vips
	}
	return slices.DeleteFunc(slices.Clone(vips), func(vip netip.Addr) bool { return s.surplus[vip] })
}

// Surplus returns the VIPs that a Service has and that are beyond the limit.
func (s *State) Surplus(key lb.Key) (vips []netip.Addr) {
	if len(s.surplus) == 0 {
		return nil
	}
	for _, vip := range s.has[key].VIPs {
		if s.surplus[vip] {
			vips = append(vips, vip)
		}
	}
	return vips
}

// Beyond returns how many VIPs are beyond the limit.
func (s *State) Beyond() int { return len(s.surplus) }

// Held reports whether a Service holds the VIP, and it is not surplus.
func (s *State) Held(vip netip.Addr) bool { return len(s.Of(vip)) > 0 }

// Count returns how many VIPs Services hold, without those beyond the limit.
func (s *State) Count() int { return len(s.services) - len(s.surplus) }

// All returns every VIP that is held.
func (s *State) All() []netip.Addr {
	all := make([]netip.Addr, 0, len(s.services))
	for vip := range s.services {
		if !s.surplus[vip] {
			all = append(all, vip)
		}
	}
	return all
}

// Services returns every Service that has a VIP.
func (s *State) Services() []lb.Key { return slices.Collect(maps.Keys(s.has)) }
