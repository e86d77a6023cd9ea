package plan

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// BGPBook keeps what was last planned over BGP, so that a plan costs what has changed. The zero
// value is ready. It holds values only; what it says is what decideBGP says of all VIPs.
type BGPBook struct {
	sessions map[string]BGPSession
	peers    map[string]PeerDecision
	vips     map[netip.Addr]BGPVIP
	inside   map[netip.Prefix]map[netip.Addr]bool // the VIPs of each aggregate
}

// Sessions returns what the actor shall have. Do not change it: a plan that changes something makes
// a new map.
func (k *BGPBook) Sessions() map[string]BGPSession { return k.sessions }

// Peers returns the decision for each peer that selects the node.
func (k *BGPBook) Peers() map[string]PeerDecision { return k.peers }

// VIP returns the decision for a VIP.
func (k *BGPBook) VIP(vip netip.Addr) BGPVIP { return k.vips[vip] }

// VIPs returns the decision for each VIP. The caller must not change the map.
func (k *BGPBook) VIPs() map[netip.Addr]BGPVIP { return k.vips }

// PlanAll plans everything anew. Changed reports whether Sessions differ. Peers hear anew of a prefix only if mayAmend,
// which is called once for each such prefix, says so.
func (k *BGPBook) PlanAll(f Facts, b BGPFacts, inputs []BGPInput, mayAmend func(netip.Prefix) bool) (changed bool) {
	d := decideBGP(f, b, inputs)
	k.amend(d, mayAmend)
	k.peers, k.vips, k.inside = d.Peers, d.VIPs, map[netip.Prefix]map[netip.Addr]bool{}
	for vip, v := range d.VIPs {
		k.enter(vip, v)
	}
	return k.take(d.Sessions)
}

// Plan plans the VIPs in dirty, of which input says what is known, and none if they are gone, and
// those that share an aggregate with one of them. It returns the VIPs that it has planned. Between
// two calls of it, only BFDDown may differ in b, and nothing in f. For mayAmend see PlanAll.
func (k *BGPBook) Plan(f Facts, b BGPFacts, dirty map[netip.Addr]bool, input func(netip.Addr) (BGPInput, bool),
	mayAmend func(netip.Prefix) bool) (planned map[netip.Addr]bool, changed bool) {
	planned = maps.Clone(dirty)
	if planned == nil {
		planned = map[netip.Addr]bool{}
	}
	before := map[netip.Prefix]bool{}
	for vip := range dirty {
		k.siblings(k.vips[vip].Prefixes, planned)
	}
	d := k.decide(f, b, planned, input)
	for grown := true; grown; { // into aggregates that others are in already
		n := len(planned)
		for _, v := range d.VIPs {
			k.siblings(v.Prefixes, planned)
		}
		if grown = len(planned) > n; grown {
			d = k.decide(f, b, planned, input)
		}
	}
	k.amend(d, mayAmend)
	for vip := range planned {
		for _, p := range k.vips[vip].Prefixes {
			before[p] = true
			delete(k.inside[p], vip)
		}
		delete(k.vips, vip)
	}
	for vip, v := range d.VIPs {
		if k.vips == nil {
			k.vips, k.inside = map[netip.Addr]BGPVIP{}, map[netip.Prefix]map[netip.Addr]bool{}
		}
		k.vips[vip] = v
		k.enter(vip, v)
	}
	k.peers = d.Peers
	for name, s := range d.Sessions {
		s.Routes = amended(k.sessions[name].Routes, before, s.Routes)
		d.Sessions[name] = s
	}
	return planned, k.take(d.Sessions)
}

func (k *BGPBook) decide(f Facts, b BGPFacts, vips map[netip.Addr]bool,
	input func(netip.Addr) (BGPInput, bool)) bgpDecision {
	inputs := make([]BGPInput, 0, len(vips))
	for vip := range vips {
		if in, ok := input(vip); ok {
			inputs = append(inputs, in)
		}
	}
	return decideBGP(f, b, inputs)
}

// amend leaves what peers hear of a prefix as it is where they may not hear of it anew yet: tenants change what their
// routes are announced with as often as they like. What ends, or is about to, never waits.
func (k *BGPBook) amend(d bgpDecision, mayAmend func(netip.Prefix) bool) {
	waits := map[netip.Prefix]bool{} // or not, for each that is amended
	for name, s := range d.Sessions {
		before, known := k.sessions[name]
		for prefix, route := range s.Routes {
			_, asked := waits[prefix]
			was, had := before.Routes[prefix]
			if same := had && was.Equal(route); known && !asked && !same && !route.leaving() {
				waits[prefix] = !mayAmend(prefix)
			}
		}
	}
	for prefix, waits := range waits {
		if !waits {
			continue
		}
		for name, s := range d.Sessions {
			was, ok := k.sessions[name].Routes[prefix]
			switch route, is := s.Routes[prefix]; {
			case !is || route.leaving():
			case ok:
				s.Routes[prefix] = was
			default:
				delete(s.Routes, prefix)
			}
		}
	}
	for vip, v := range d.VIPs {
		for _, prefix := range v.Prefixes {
			if waits[prefix] {
				v.Obstacles = append(v.Obstacles, BGPObstacle{VIP: vip, Reason: lb.ReasonFlapping,
					Message: "what peers hear of " + prefix.String() + " changes too often; the last change waits"})
				d.VIPs[vip] = v
			}
		}
	}
}

// Within returns the VIPs that are announced by a prefix.
func (k *BGPBook) Within(prefix netip.Prefix) []netip.Addr {
	if prefix.IsSingleIP() {
		return []netip.Addr{prefix.Addr()}
	}
	return slices.Collect(maps.Keys(k.inside[prefix]))
}

// siblings adds the VIPs that are announced by one of the prefixes.
func (k *BGPBook) siblings(prefixes []netip.Prefix, to map[netip.Addr]bool) {
	for _, p := range prefixes {
		for vip := range k.inside[p] {
			to[vip] = true
		}
	}
}

// enter notes in which aggregates a VIP is.
func (k *BGPBook) enter(vip netip.Addr, v BGPVIP) {
	for _, p := range v.Prefixes {
		if p.IsSingleIP() {
			continue
		}
		if k.inside[p] == nil {
			k.inside[p] = map[netip.Addr]bool{}
		}
		k.inside[p][vip] = true
	}
}

// amended returns all routes where those for the prefixes gone are replaced by now; the same map if
// that changes nothing.
func amended(
	all map[netip.Prefix]Route, gone map[netip.Prefix]bool, now map[netip.Prefix]Route) map[netip.Prefix]Route {
	same := all != nil
	for p := range gone {
		_, was := all[p]
		_, is := now[p]
		same = same && was == is
	}
	for p, route := range now {
		was, ok := all[p]
		same = same && ok && was.Equal(route)
	}
	if same {
		return all
	}
	next := maps.Clone(all)
	if next == nil {
		next = make(map[netip.Prefix]Route, len(now))
	}
	for p := range gone {
		delete(next, p)
	}
	maps.Copy(next, now)
	return next
}

// take makes sessions those that shall be, and reports whether they differ. Equal ones stay the
// same map.
func (k *BGPBook) take(sessions map[string]BGPSession) (changed bool) {
	if maps.EqualFunc(k.sessions, sessions, sameSession) {
		return false
	}
	k.sessions = sessions
	return true
}

func sameSession(a, b BGPSession) bool {
	routes, others := a.Routes, b.Routes
	a.Routes, b.Routes = nil, nil
	if !reflect.DeepEqual(a, b) {
		return false
	}
	// amended has looked for differences already.
	return reflect.ValueOf(routes).Pointer() == reflect.ValueOf(others).Pointer() ||
		maps.EqualFunc(routes, others, Route.Equal)
}

// Routed is what has become of a VIP over BGP on this node.
type Routed struct {
	// Peers hear of the VIP, sorted.
	Peers []string
	// Refusal says why no peer hears of it, or why those that do soon hear of it no more; nil when all
	// is well, and when no BGPAdvertisement is for the VIP.
	Refusal *lb.Refusal
	// Lingers is set while the planned end of the VIP's announcement is not over, also while no peer is there to hear
	// it.
	Lingers bool
	// Unknown is set, alone, before the first plan: a BGPAdvertisement may be for the VIP.
	Unknown bool
}

// Routed returns what has become of the VIP if these peers hear of it.
func (v BGPVIP) Routed(peers []string) Routed {
	slices.Sort(peers)
	switch {
	case !v.Selected:
		return Routed{Lingers: v.Lingers}
	case v.Refusal != nil:
		return Routed{Peers: peers, Refusal: v.Refusal, Lingers: v.Lingers}
	case len(peers) == 0:
		return Routed{Refusal: lb.Refuse(lb.ReasonNotEstablished,
			"no established BGP session carries the address")}
	}
	return Routed{Peers: peers}
}

// steady reports whether peers hear of the VIP and go on to.
func (r Routed) steady() bool { return len(r.Peers) > 0 && r.Refusal == nil }

// claim adds to what the node says to the others.
func (r Routed) claim(c *Claim) {
	c.Routes = NewPeerNames(r.Peers...)
	if r.Refusal != nil {
		c.Unrouted = r.Refusal.Reason
	}
}
