package routes

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// LostFor is how long a peer at the most is held down whose path BFD has lost: a peer that goes on
// without BFD, as when its daemon was ended, must not stay unreachable.
const LostFor = 30 * time.Second

// Settle is how long a BGP session is up before BFD begins to watch its path. FRR (8.4 to 10) takes
// BFD's coming up for a reason to connect, and if a connection of the peer is being opened at that
// moment, it ends the session right after and drops all routes, also those of a graceful restart.
const Settle = time.Second

// Path is what a BFD session watches.
type Path struct {
	// Peer is the peer's address. A link-local one (unnumbered BGP) has its interface as zone.
	Peer netip.Addr
	// Local is the address to send from; not valid when the kernel chooses.
	Local netip.Addr
	// Interface is the only one to send and receive on; "" is any, or the zone of Peer.
	Interface string
	// VRF is the VRF that the path is in; "" for the main routing table.
	VRF string
	// VRFIndex is the index of the VRF's interface, as in [plan.BGPSession].
	VRFIndex int
	Multihop bool
}

// PathState is what BFD says of a path.
type PathState struct {
	Up bool
	// Disabled is set while the peer has switched BFD off.
	Disabled bool
	Failures uint64
	Message  string
}

// paths are the BFD sessions that watch the paths to BGP peers.
type paths struct {
	by  map[string]*watch // by peer
	due time.Time         // when the next session has settled whose path is not watched yet; zero: none
}

type watch struct {
	path     Path
	profile  lb.BFDProfile
	failures uint64    // as BFD last counted
	lost     time.Time // until when the peer is held down; zero: it is not
}

// judge notes the paths that BFD has lost or has again. Only a rise of its failures counts: a path
// that was never up, or on which the peer has switched BFD off, says nothing about the peer.
func (p *paths) judge(now time.Time, states map[Path]PathState) {
	for _, w := range p.by {
		o, ok := states[w.path]
		switch {
		case !ok:
			continue
		case o.Failures > w.failures:
			w.lost = now.Add(LostFor) // also when it is up again already: the peer has dropped its routes
		case o.Up || o.Disabled || !now.Before(w.lost):
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

// again is when a peer need not be held down any more, or a path can be watched; 0 for neither.
func (p *paths) again(now time.Time) time.Duration {
	var next time.Duration
	if !p.due.IsZero() {
		next = p.due.Sub(now)
	}
	for _, w := range p.by {
		if !w.lost.IsZero() {
			// A path that was lost and is back already is let go by the next look.
			next = plan.Sooner(next, min(w.lost.Sub(now), time.Second))
		}
	}
	return next
}

// plan takes the paths that shall be watched from what is planned for BGP, and reports whether they
// differ. A path is watched from the time when its session has settled, and then also while there
// is no session.
func (p *paths) plan(now time.Time, book *plan.BGPBook, seen Seen, interfaces []lb.Interface) (changed bool) {
	next := make(map[string]*watch, len(p.by))
	p.due = time.Time{}
	for name, d := range book.Peers() {
		if d.Profile == nil || d.Refusal != nil {
			continue
		}
		before := p.by[name]
		path, ok := pathTo(book.Sessions()[name], seen.Sessions[name].Peer, before, interfaces)
		if !ok {
			continue
		}
		if before == nil || before.path != path {
			if !p.settled(now, seen.Sessions[name]) {
				continue
			}
			before = &watch{path: path, failures: seen.Paths[path].Failures}
			changed = true
		}
		profile := *d.Profile
		profile.Name = ""
		changed = changed || before.profile != profile
		before.profile = profile
		next[name] = before
	}
	changed = changed || len(next) != len(p.by)
	p.by = next
	return changed
}

// settled reports whether a BGP session has been up for long enough; if not yet, it notes when.
func (p *paths) settled(now time.Time, session Session) bool {
	at := session.up().Add(Settle)
	if session.Established && now.Before(at) && (p.due.IsZero() || at.Before(p.due)) {
		p.due = at
	}
	return session.Established && !now.Before(at)
}

// pathTo is the path that a BGP session takes; ok is false as long as the address of an unnumbered
// peer is not known. peer is its address while the session is established.
func pathTo(s plan.BGPSession, peer netip.Addr, before *watch, interfaces []lb.Interface) (path Path, ok bool) {
	if s.Interface != "" {
		switch {
		case peer.IsValid():
			return Path{Peer: peer.WithZone(s.Interface), VRF: s.VRF, VRFIndex: s.VRFIndex}, true
		case before != nil && before.path.Peer.Zone() == s.Interface && before.path.VRF == s.VRF &&
			before.path.VRFIndex == s.VRFIndex:
			return before.path, true
		}
		return Path{}, false
	}
	path = Path{Peer: s.Addr, Local: s.Source, VRF: s.VRF, VRFIndex: s.VRFIndex, Multihop: s.MultiHop}
	if before != nil && before.path == path {
		return path, true // also while the interface is gone for a moment
	}
	// A peer of the node's own AS may be several hops away without a word in its specification.
	path.Multihop = s.MultiHop || !onLink(s.Addr, s.VRF, interfaces)
	return path, true
}

func onLink(addr netip.Addr, vrf string, interfaces []lb.Interface) bool {
	for _, i := range interfaces {
		if _, ok := i.Subnet(addr); ok && i.VRF == vrf {
			return true
		}
	}
	return addr.IsLinkLocalUnicast()
}

// desired are the sessions for the actor.
func (p *paths) desired() map[Path]lb.BFDProfile {
	sessions := map[Path]lb.BFDProfile{}
	for _, name := range sortedKeys(p.by) {
		w := p.by[name]
		if _, taken := sessions[w.path]; !taken { // of two peers at one address, the first by name
			sessions[w.path] = w.profile
		}
	}
	return sessions
}

// Watch is the path to a peer that BFD watches.
type Watch struct {
	Path Path
	// HoldsDown is set while the loss of the path keeps the BGP session down.
	HoldsDown bool
}

// Watches returns the paths that BFD watches, by peer.
func (s *State) Watches() map[string]Watch {
	all := make(map[string]Watch, len(s.paths.by))
	for name, w := range s.paths.by {
		all[name] = Watch{Path: w.path, HoldsDown: !w.lost.IsZero()}
	}
	return all
}
