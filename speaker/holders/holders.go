// Package holders knows which Services hold which VIPs, both ways.
package holders

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// State is what is known. The zero value knows nothing and is ready.
type State struct {
	vips     map[lb.Key][]netip.Addr
	services map[netip.Addr][]lb.Key // sorted
}

// Step takes the VIPs that some Services have now, in the order of their status; none for a Service
// that is gone or not ours. It returns the VIPs that those Services have or had, and the Services
// that have none.
func (s *State) Step(changes map[lb.Key][]netip.Addr) (touched map[netip.Addr]bool, without []lb.Key) {
	touched = map[netip.Addr]bool{}
	for key, now := range changes {
		for _, vip := range s.vips[key] {
			touched[vip] = true
			s.release(key, vip)
		}
		for _, vip := range now {
			touched[vip] = true
			s.hold(key, vip)
		}
		if len(now) == 0 {
			delete(s.vips, key)
			without = append(without, key)
			continue
		}
		if s.vips == nil {
			s.vips = map[lb.Key][]netip.Addr{}
		}
		s.vips[key] = now
	}
	return touched, without
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

// Of returns the Services on a VIP, sorted. Do not change it.
func (s *State) Of(vip netip.Addr) []lb.Key { return s.services[vip] }

// VIPs returns what a Service holds, in the order of its status. Do not change it.
func (s *State) VIPs(key lb.Key) []netip.Addr { return s.vips[key] }

// Held reports whether a Service holds the VIP.
func (s *State) Held(vip netip.Addr) bool { return len(s.services[vip]) > 0 }

// All returns every VIP that is held.
func (s *State) All() []netip.Addr { return slices.Collect(maps.Keys(s.services)) }

// Services returns every Service that holds a VIP.
func (s *State) Services() []lb.Key { return slices.Collect(maps.Keys(s.vips)) }
