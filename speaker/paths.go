package main

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// lostFor is how long a peer at the most is held down whose path BFD has lost: a peer that goes on
// without BFD, as when its daemon was ended, must not stay unreachable.
const lostFor = 30 * time.Second

// paths are the BFD sessions that watch the paths to BGP peers.
type paths struct {
	by map[string]*watch // by peer
}

type watch struct {
	key      bfd.Key
	profile  bfd.Profile
	failures uint64    // as BFD last counted
	lost     time.Time // until when the peer is held down; zero: it is not
}

// judge notes the paths that BFD has lost or has again. Only a rise of its failures counts: what
// was never up, and what the peer has switched off, says nothing of the w.
func (p *paths) judge(now time.Time, outcomes map[bfd.Key]bfd.Outcome) {
	for _, w := range p.by {
		o, ok := outcomes[w.key]
		switch {
		case !ok:
			continue
		case o.Failures > w.failures:
			w.lost = now.Add(lostFor) // also when it is up again already: the peer has dropped its routes
		case o.State == bfd.Up || o.RemoteState == bfd.AdminDown || !now.Before(w.lost):
			w.lost = time.Time{}
		}
		w.failures = o.Failures
	}
}

// lost are the peers to which the path is lost.
func (p *paths) lost() map[string]bool {
	var lost map[string]bool
	for name, w := range p.by {
		if !w.lost.IsZero() {
			if lost == nil {
				lost = map[string]bool{}
			}
			lost[name] = true
		}
	}
	return lost
}

// again is when a peer need not be held down any more; 0 when none is.
func (p *paths) again(now time.Time) time.Duration {
	var next time.Duration
	for _, w := range p.by {
		if !w.lost.IsZero() {
			// A path that was lost and is back already is let go by the next look.
			next = sooner(next, min(w.lost.Sub(now), time.Second))
		}
	}
	return next
}

// plan takes the sessions that shall be from what is planned for BGP, and tells whether they
// differ.
func (p *paths) plan(book *plan.BGPBook, brief map[string]bgp.Status, interfaces []lb.Interface,
	outcomes map[bfd.Key]bfd.Outcome) (changed bool) {
	next := make(map[string]*watch, len(p.by))
	for name, d := range book.Peers() {
		if d.Profile == nil || d.Refusal != nil {
			continue
		}
		before := p.by[name]
		key, ok := pathKey(book.Sessions()[name], brief[name].Negotiated, before, interfaces)
		if !ok {
			continue
		}
		profile := bfd.Profile{
			TransmitInterval: d.Profile.Transmit, ReceiveInterval: d.Profile.Receive, DetectMultiplier: d.Profile.Multiplier,
			Passive: d.Profile.Passive, MinimumTTL: d.Profile.MinimumTTL,
		}
		if before == nil || before.key != key {
			before = &watch{key: key, failures: outcomes[key].Failures}
			changed = true
		}
		changed = changed || before.profile != profile
		before.profile = profile
		next[name] = before
	}
	changed = changed || len(next) != len(p.by)
	p.by = next
	return changed
}

// pathKey is the BFD session for a BGP session; ok is false as long as the address of an unnumbered
// peer is not known.
func pathKey(s lb.BGPSession, n *bgp.Negotiated, before *watch, interfaces []lb.Interface) (key bfd.Key, ok bool) {
	if s.Interface != "" {
		switch {
		case n != nil:
			return bfd.Key{Peer: n.Peer.Addr().WithZone(s.Interface)}, true
		case before != nil && before.key.Peer.Zone() == s.Interface:
			return before.key, true
		}
		return bfd.Key{}, false
	}
	key = bfd.Key{Peer: s.Addr, Local: s.Source, Multihop: s.MultiHop}
	if before != nil && before.key == key {
		return key, true // also while the interface is gone for a moment
	}
	// A peer of the node's own AS may be several hops away without a word in its specification.
	key.Multihop = s.MultiHop || !onLink(s.Addr, interfaces)
	return key, true
}

func onLink(addr netip.Addr, interfaces []lb.Interface) bool {
	for _, i := range interfaces {
		if _, ok := i.Subnet(addr); ok {
			return true
		}
	}
	return addr.IsLinkLocalUnicast()
}

// desired are the sessions for the actor.
func (p *paths) desired() map[bfd.Key]bfd.Profile {
	sessions := map[bfd.Key]bfd.Profile{}
	for _, name := range sortedKeys(p.by) {
		w := p.by[name]
		if _, taken := sessions[w.key]; !taken { // of two peers at one address, the first by name
			sessions[w.key] = w.profile
		}
	}
	return sessions
}
