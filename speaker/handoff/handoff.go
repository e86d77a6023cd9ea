// Package handoff knows, for each VIP, which other nodes may hold connections to it that this node
// does not know, and says so to the proxy. All is noted all the time, so that the proxy is ready
// before a VIP or its connections move here.
package handoff

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Facts concern all VIPs alike.
type Facts struct {
	Self string
	// Addresses are those of all nodes, this one included; nil when they are as in the step before.
	Addresses map[string][]netip.Addr
	// Foreign are the nodes from which another product announces VIPs over BGP. It counts if Addresses
	// are given.
	Foreign []string
	// Dead are the nodes that have stopped answering, and whose kernels do not answer either.
	Dead []string
	// Booted are the nodes that have booted since this one met them, with the last boot of each: they know
	// no connection from before. When it changes, the step has to have a view of each VIP.
	Booted map[string]uint64
	// Live are the nodes whose speakers live.
	Live []string
	// CutOff is set while this node may be cut off from the others, or was until a moment ago.
	CutOff bool
	// Gates is set if the views say what is unannounced. When it changes, the step has to have a view of
	// each VIP.
	Gates bool
}

// View is what is known of one VIP.
type View struct {
	// Claims are those of the other nodes.
	Claims map[string]plan.Claim
	Owner  string
	// Rival is the other node that was the last to announce the VIP on the LAN while this one answers
	// for it; "" if none was seen to. A node that is cut off has no other news of who has taken over.
	Rival string
	// Announced is set while this node announces the VIP over BGP, Routable while BGP is for the VIP,
	// as far as is known.
	Announced, Routable bool
	// Unannounced says why this node does not announce the VIP yet; nil if the proxy need not know.
	Unannounced *lb.Unannounced
}

// State is what is remembered from one step to the next. The zero value is ready.
type State struct {
	self      string
	addresses map[string][]netip.Addr // also of the nodes in deleted
	// deleted has until when each node counts whose Node was deleted, if its speaker ends now: it hands its VIPs over,
	// and may hold connections, as one that drains.
	deleted map[string]time.Time
	// foreign has until when each node counts from which another product announces, or announced; the
	// zero time for one from which it does so now.
	foreign map[string]time.Time
	dead    []string
	booted  map[string]uint64
	cutOff  bool
	gates   bool
	vips    map[netip.Addr]*vip
	told    bool
}

// vip is what is remembered of one VIP.
type vip struct {
	previous string // owner: the other node that answered for the VIP last; "" if nobody is known
	ring     *ring  // nil unless routers spread the VIP over nodes
	rival    string // that counted in the last step
	// unannounced is what the last step was told of that; the zero value for nothing.
	unannounced lb.Unannounced
}

// Step takes in what is known now of the VIPs that events names, nil for those that no Service
// holds any more. It returns what the proxy is to be told, and reports whether there is anything:
// all at first and when nodes differ, and else what has changed.
func (s *State) Step(now time.Time, f Facts, events map[netip.Addr]*View) (update lb.FeedUpdate, changed bool) {
	all := s.meet(now, f) || !s.told
	if all {
		for addr, v := range s.vips {
			s.arrange(addr, v)
		}
	}
	if s.vips == nil {
		s.vips = map[netip.Addr]*vip{}
	}
	var differing, ended []netip.Addr
	for addr, view := range events {
		v, known := s.vips[addr]
		switch {
		case view != nil:
			if !known {
				v = &vip{}
				s.vips[addr] = v
			}
			answered, spread := v.answered(*view, s.dead), s.spread(now, addr, v, *view)
			awaited := v.awaits(*view)
			if !known || answered || spread || awaited {
				differing = append(differing, addr)
			}
		case known:
			delete(s.vips, addr)
			ended = append(ended, addr)
		}
	}
	s.told = true
	switch {
	case all:
		return s.update(maps.Keys(s.vips)), true
	case len(differing)+len(ended) == 0:
		return update, false
	}
	update = s.update(slices.Values(differing))
	update.Changes, update.Ended = true, ended
	return update, true
}

// meet takes in which nodes there are, and reports whether that differs.
func (s *State) meet(now time.Time, f Facts) (changed bool) {
	changed = f.Self != s.self || !slices.Equal(s.dead, f.Dead) || s.cutOff != f.CutOff || s.gates != f.Gates
	died := slices.Concat(s.dead, f.Dead) // liveness forgets a dead node in the step in which its Node goes
	s.self, s.dead, s.cutOff, s.gates = f.Self, f.Dead, f.CutOff, f.Gates
	if !maps.Equal(s.booted, f.Booted) {
		s.forget(f.Booted)
		s.booted, changed = f.Booted, true
	}
	if s.meetNodes(now, f, died) {
		changed = true
	}
	if f.Addresses != nil && s.meetForeign(now, f.Foreign) {
		changed = true
	}
	before := len(s.foreign)
	maps.DeleteFunc(s.foreign, func(_ string, until time.Time) bool { return !until.IsZero() && now.After(until) })
	return changed || len(s.foreign) != before
}

// meetNodes takes in the nodes' addresses, and reports whether they differ. Those of a node that is deleted while its
// speaker lives stay for as long as proxies remember a silent connection after the speaker has ended, as until then it
// may announce and get connections; unless it dies, or another node has them by now.
func (s *State) meetNodes(now time.Time, f Facts, died []string) (changed bool) {
	if f.Addresses != nil {
		all := maps.Clone(f.Addresses)
		shown := shownBy(all)
		for node, addrs := range s.addresses {
			_, exists := all[node]
			_, known := s.deleted[node]
			reused := slices.ContainsFunc(addrs, func(a netip.Addr) bool { return shown[a] })
			if exists || reused || slices.Contains(died, node) || !known && !slices.Contains(f.Live, node) {
				delete(s.deleted, node)
				continue
			}
			if !known {
				if s.deleted == nil {
					s.deleted = map[string]time.Time{}
				}
				s.deleted[node] = now.Add(lb.FlowMemory)
			}
			all[node] = addrs
		}
		changed = !maps.EqualFunc(s.addresses, all, slices.Equal)
		s.addresses = all
	}
	for node, until := range s.deleted {
		switch {
		case slices.Contains(f.Live, node):
			s.deleted[node] = time.Time{} // it counts from the end of its speaker
		case until.IsZero():
			s.deleted[node] = now.Add(lb.FlowMemory)
		case now.After(until):
			delete(s.deleted, node)
			delete(s.addresses, node)
			changed = true
		}
	}
	return changed
}

// shownBy returns all addresses of some nodes.
func shownBy(nodes map[string][]netip.Addr) map[netip.Addr]bool {
	shown := map[netip.Addr]bool{}
	for _, addrs := range nodes {
		for _, addr := range addrs {
			shown[addr] = true
		}
	}
	return shown
}

// forget takes nodes out of all rings that have booted since the last step. They join again as others do:
// once they announce the VIP, as before that they may lack the rules that pass on what they do not know.
func (s *State) forget(booted map[string]uint64) {
	for node, boot := range booted {
		if s.booted[node] == boot {
			continue
		}
		for _, v := range s.vips {
			if v.ring != nil {
				delete(v.ring.announce, node)
				delete(v.ring.last, node)
			}
		}
	}
}

// meetForeign takes in from which nodes another product announces, and reports whether there are more.
// One from which it does so no more counts for as long as proxies remember a silent connection.
func (s *State) meetForeign(now time.Time, nodes []string) (more bool) {
	if s.foreign == nil {
		s.foreign = map[string]time.Time{}
	}
	for node, until := range s.foreign {
		if until.IsZero() && !slices.Contains(nodes, node) {
			s.foreign[node] = now.Add(lb.FlowMemory)
		}
	}
	for _, node := range nodes {
		_, had := s.foreign[node]
		s.foreign[node], more = time.Time{}, more || !had
	}
	return more
}

// answered notes which other node answered for the VIP last, and reports whether that is another
// one than before. If it is this node that clients turn to, that one may hold connections. What a
// dead node seems to announce, somebody else makes up.
func (v *vip) answered(view View, dead []string) (changed bool) {
	before := v.previous
	var answering []string
	for node, claim := range view.Claims {
		if claim.Answering {
			answering = append(answering, node)
		}
	}
	rival := view.Rival
	if slices.Contains(dead, rival) {
		rival = "" // once it is back it counts anew
	}
	if rival != v.rival && rival != "" {
		v.previous = rival // clients have turned to it
	}
	v.rival = rival
	switch {
	case slices.Contains(answering, view.Owner):
		v.previous = view.Owner
	case len(answering) > 0 && !slices.Contains(answering, v.previous):
		v.previous = slices.Min(answering)
	}
	return v.previous != before
}

// awaits notes why this node does not announce the VIP yet, and reports whether that differs.
func (v *vip) awaits(view View) (changed bool) {
	before := v.unannounced
	v.unannounced = lb.Unannounced{}
	if view.Unannounced != nil {
		v.unannounced = *view.Unannounced
	}
	return v.unannounced != before
}

// update is what the proxy is told of some VIPs: of each, even if nobody is known to have answered
// for it, so that what an earlier speaker said goes on.
func (s *State) update(vips iter.Seq[netip.Addr]) lb.FeedUpdate {
	n := lb.FeedUpdate{Dead: s.dead, CutOff: s.cutOff, Gates: s.gates, Previous: map[netip.Addr][]netip.Addr{},
		Ring: map[netip.Addr][]netip.Addr{}, Unannounced: map[netip.Addr]lb.Unannounced{}}
	n.Gone = s.gone()
	for addr := range vips {
		v := s.vips[addr]
		n.Previous[addr] = []netip.Addr{}
		if from, ok := s.address(v.previous, lb.FamilyOf(addr)); ok {
			n.Previous[addr] = []netip.Addr{from}
		}
		if v.ring != nil {
			n.Ring[addr] = v.ring.next
		}
		if v.unannounced != (lb.Unannounced{}) {
			n.Unannounced[addr] = v.unannounced
		}
	}
	return n
}

// gone returns the addresses of the nodes that are dead, but for those that a Node which is not shows too: its
// connections are not lost with the dead one.
func (s *State) gone() (all []netip.Addr) {
	if len(s.dead) == 0 {
		return nil
	}
	others := maps.Clone(s.addresses)
	for _, node := range s.dead {
		delete(others, node)
	}
	kept := shownBy(others)
	for _, node := range s.dead {
		for _, addr := range s.addresses[node] {
			if !kept[addr] {
				all = append(all, addr)
			}
		}
	}
	return all
}

// address returns a node's first address of a family, unless the node is dead.
func (s *State) address(node string, family lb.Family) (netip.Addr, bool) {
	all := s.addresses[node]
	i := slices.IndexFunc(all, func(a netip.Addr) bool { return lb.FamilyOf(a) == family })
	if i < 0 || slices.Contains(s.dead, node) {
		return netip.Addr{}, false
	}
	return all[i], true
}
