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

// Service is what counts of a Service: the VIPs that it has, in the order of its status, and when it
// was made.
type Service struct {
	VIPs    []netip.Addr
	Created time.Time
}

func (s Service) equal(other Service) bool {
	return slices.Equal(s.VIPs, other.VIPs) && s.Created.Equal(other.Created)
}

// State is what is known. The zero value knows nothing and is ready.
type State struct {
	has      map[lb.Key]Service
	services map[netip.Addr][]lb.Key // sorted
	// surplus are the VIPs beyond the limit: those of the youngest Services.
	surplus map[netip.Addr]bool
	// Limit is how many VIPs are held at most; 0 stands for plan.MaxVIPs.
	Limit int
}

// Step takes what some Services have now; no VIPs for one that is gone or not ours. It returns the
// VIPs that those Services have or had, with those that have become surplus or are so no longer,
// and the Services of which no VIP is held, or not all of them.
func (s *State) Step(changes map[lb.Key]Service) (touched map[netip.Addr]bool, without []lb.Key) {
	touched = map[netip.Addr]bool{}
	differ := false
	for key, now := range changes {
		before := s.has[key]
		differ = differ || !before.equal(now)
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
			s.has = map[lb.Key]Service{}
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

// choose finds out which VIPs are surplus: all nodes come to the same. It adds those that have
// become so, or are so no longer, to touched.
func (s *State) choose(touched map[netip.Addr]bool) {
	surplus := map[netip.Addr]bool{}
	if limit := cmp.Or(s.Limit, plan.MaxVIPs); len(s.services) > limit {
		all := make([]ranked, 0, len(s.services))
		for vip, keys := range s.services {
			all = append(all, s.rank(vip, keys))
		}
		slices.SortFunc(all, ranked.compare)
		for _, r := range all[limit:] {
			surplus[r.vip] = true
		}
	}
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

// ranked is a VIP with the oldest Service that has it.
type ranked struct {
	vip     netip.Addr
	created time.Time
	key     lb.Key
}

func (s *State) rank(vip netip.Addr, keys []lb.Key) (first ranked) {
	for i, key := range keys {
		if r := (ranked{vip, s.has[key].Created, key}); i == 0 || r.compare(first) < 0 {
			first = r
		}
	}
	return first
}

// compare orders VIPs by the age of their Services.
func (r ranked) compare(other ranked) int {
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
