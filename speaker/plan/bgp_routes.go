package plan

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxCommunities bounds the communities of one route, so that they fit into a message.
const maxCommunities = 255

// advertisement is a BGPAdvertisement that can be used as it is, or not.
type advertisement struct {
	lb.BGPAdvertisement
	index       int
	communities []lb.Community
	problem     *lb.Refusal
	// peers are the sessions that hear it, sorted. If there are none, refused says why the node has no session with a
	// peer that it names; nil if it names none that selects the node.
	peers   []string
	refused *lb.Refusal
}

func (a *advertisement) names(peer string) bool {
	return len(a.Peers) == 0 || slices.Contains(a.Peers, peer)
}

// refusedPeer says why the node has no session with the first peer that the advertisement names and the node refuses.
func (a *advertisement) refusedPeer(peers map[string]PeerDecision) *lb.Refusal {
	for _, peer := range slices.Sorted(maps.Keys(peers)) {
		if why := peers[peer].Refusal; why != nil && a.names(peer) {
			return lb.Refuse(why.Reason, "BGPPeer %s: %s", peer, why.Message)
		}
	}
	return nil
}

// routes collects what each peer hears.
type routes struct {
	self     string
	pools    []announcedPool // by name
	sessions map[string]BGPSession
	// shut says why the node delivers nothing of a family that comes from a peer.
	shut   map[way]*lb.Refusal
	found  map[string]map[netip.Prefix]int // by peer; what is announced for a prefix, as an index of mixes
	mixes  []mix
	joined map[joining]int // which mix a mix becomes
}

// way is where packets of a family come from.
type way struct {
	peer   string
	family lb.Family
}

// announcedPool is a pool with its advertisements, oldest first.
type announcedPool struct {
	lb.Pool
	ads []*advertisement
}

// mix is what prefixes are announced for. Many prefixes share one; the first is for nothing.
type mix struct {
	ads []*advertisement // oldest first
	// steady is set when a prefix is announced for at least one VIP that is not in graceful shutdown.
	steady bool
}

// joining is a mix that an advertisement of one more VIP joins.
type joining struct {
	mix, advertisement int
	steady             bool
}

// newRoutes collects for the sessions of a decision.
func newRoutes(f Facts, b BGPFacts, d bgpDecision, size int) *routes {
	sessions := d.Sessions
	r := &routes{self: f.Self, sessions: sessions, shut: map[way]*lb.Refusal{},
		found: make(map[string]map[netip.Prefix]int, len(sessions)), mixes: make([]mix, 1), joined: map[joining]int{}}
	peers := slices.Sorted(maps.Keys(sessions))
	for _, name := range peers {
		r.found[name] = make(map[netip.Prefix]int, size)
		through := refuseThrough(f.Self, b, sessions[name].VRF)
		for _, family := range sessions[name].Families {
			refusal := through
			if refusal == nil {
				refusal = refuseUplink(f, sessions[name], b.Locals[name], family)
			}
			if refusal != nil {
				r.shut[way{name, family}] = refusal
			}
		}
	}
	var ads []*advertisement
	for _, ad := range advertisementsByAge(b.Advertisements) {
		if f.Node == nil || !anyMatches(ad.NodeSelectors, f.Node.Labels) {
			continue
		}
		a := &advertisement{BGPAdvertisement: ad, index: len(ads)}
		a.communities, a.problem = resolve(ad, b.Communities)
		for _, peer := range peers {
			if a.names(peer) {
				a.peers = append(a.peers, peer)
			}
		}
		if len(a.peers) == 0 {
			a.refused = a.refusedPeer(d.Peers)
		}
		ads = append(ads, a)
	}
	for _, name := range slices.Sorted(maps.Keys(f.Pools)) {
		p := announcedPool{Pool: f.Pools[name]}
		for _, a := range ads {
			if a.SelectsPool(p.Pool) {
				p.ads = append(p.ads, a)
			}
		}
		r.pools = append(r.pools, p)
	}
	return r
}

// join returns the mix that m becomes when a VIP is announced by an advertisement.
func (r *routes) join(m int, a *advertisement, steady bool) int {
	key := joining{m, a.index, steady}
	if to, ok := r.joined[key]; ok {
		return to
	}
	next := mix{ads: r.mixes[m].ads, steady: r.mixes[m].steady || steady}
	if !slices.Contains(next.ads, a) {
		next.ads = slices.SortedFunc(slices.Values(append(slices.Clone(next.ads), a)),
			func(a, b *advertisement) int { return cmp.Compare(a.index, b.index) })
	}
	to := slices.IndexFunc(r.mixes, func(o mix) bool { return o.steady == next.steady && slices.Equal(o.ads, next.ads) })
	if to < 0 {
		to = len(r.mixes)
		r.mixes = append(r.mixes, next)
	}
	r.joined[key] = to
	return to
}

// advertisementsByAge sorts so that the older of two that disagree comes first.
func advertisementsByAge(ads map[string]lb.BGPAdvertisement) []lb.BGPAdvertisement {
	return slices.SortedFunc(maps.Values(ads), func(a, b lb.BGPAdvertisement) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name))
	})
}

// resolve looks up the communities of an advertisement. One that is not known stops the
// advertisement: a community often says that a route must not go too far.
func resolve(ad lb.BGPAdvertisement, objects map[string]lb.CommunityNames) ([]lb.Community, *lb.Refusal) {
	var list []lb.Community
	for _, written := range ad.Communities {
		c, refusal := resolveOne(written, objects)
		if refusal != nil {
			return nil, refusal
		}
		list = append(list, c)
	}
	return list, nil
}

func resolveOne(written string, objects map[string]lb.CommunityNames) (lb.Community, *lb.Refusal) {
	if strings.Contains(written, ":") {
		c, err := lb.ParseCommunity(written)
		if err != nil {
			return c, lb.Refuse(lb.ReasonUnknownCommunity, "%v", err)
		}
		return c, nil
	}
	if c, ok := wellKnown[written]; ok {
		return c, nil
	}
	var found []string
	var value lb.Community
	for _, name := range slices.Sorted(maps.Keys(objects)) {
		c, ok := objects[name].Values[written]
		switch {
		case !ok:
			continue
		case len(found) > 0 && c != value:
			return c,
				lb.Refuse(
					lb.ReasonCommunityAmbiguous, "community %s is %s in Community %s and %s in Community %s; delete one of them",
					written, value, found[0], c, name)
		}
		found, value = append(found, name), c
	}
	if len(found) == 0 {
		return value, lb.Refuse(lb.ReasonUnknownCommunity, "no Community object defines the name %s", written)
	}
	return value, nil
}

// selects reports whether an advertisement is for the VIP on this node.
func (r *routes) selects(in BGPInput) bool {
	for _, p := range r.pools {
		if contains(p.Pool, in.VIP) && slices.ContainsFunc(p.ads, func(a *advertisement) bool { return a.selects(in) }) {
			return true
		}
	}
	return false
}

func (a *advertisement) selects(in BGPInput) bool {
	return len(a.ServiceSelectors) == 0 ||
		slices.ContainsFunc(tenants(in.Holders), func(h Holder) bool { return anyMatches(a.ServiceSelectors, h.Labels) })
}

// add announces a VIP, and says so in v, or why not. With kept set, peers with graceful restart
// hear it as ever.
func (r *routes) add(in BGPInput, v *BGPVIP, kept bool) {
	pool, selected, leaving := "", false, false
	for _, p := range r.pools {
		if !contains(p.Pool, in.VIP) {
			continue
		}
		pool = cmp.Or(pool, p.Name)
		for _, a := range p.ads {
			if a.selects(in) {
				selected = true
				leaving = r.announce(in, a, p.Pool, v, kept) || leaving
			}
		}
	}
	switch {
	case pool == "":
		v.refuse(lb.Refuse(lb.ReasonNoAdvertisement, "no IPAddressPool contains %s", in.VIP))
	case !selected:
		v.refuse(lb.Refuse(lb.ReasonNoAdvertisement, "no BGPAdvertisement selects IPAddressPool %s, the Service and node %s",
			pool, r.self))
	case len(v.Prefixes) == 0:
		v.Leaving = false
		if v.Refusal == nil && len(v.Obstacles) > 0 {
			// What may end by itself comes first: pods wait for that.
			first := max(0, slices.IndexFunc(v.Obstacles, func(o BGPObstacle) bool { return !configured(o.Reason) }))
			v.Refusal = &lb.Refusal{Reason: v.Obstacles[first].Reason, Message: v.Obstacles[first].Message}
		}
	}
	v.Leaving = v.Leaving && leaving
	slices.SortFunc(v.Prefixes, netip.Prefix.Compare)
}

func contains(pool lb.Pool, addr netip.Addr) bool {
	for _, r := range pool.Ranges {
		if r.Contains(addr) {
			return true
		}
	}
	return false
}

func (v *BGPVIP) refuse(refusal *lb.Refusal) {
	v.Refusal, v.Leaving = refusal, false
}

// announce announces a VIP by one advertisement, and reports whether some peer hears that it is
// about to go.
func (r *routes) announce(in BGPInput, a *advertisement, pool lb.Pool, v *BGPVIP, kept bool) (leaving bool) {
	obstacle := func(peer string, refusal *lb.Refusal) {
		v.Obstacles = append(v.Obstacles, BGPObstacle{VIP: in.VIP, Advertisement: a.Name, Peer: peer, Reason: refusal.Reason,
			Message: refusal.Message})
	}
	prefix := a.Aggregate(in.VIP)
	refusal := a.problem
	if refusal == nil {
		refusal = outside(prefix, in.VIP, pool)
	}
	if refusal == nil && len(a.peers) == 0 {
		refusal = cmp.Or(a.refused,
			lb.Refuse(lb.ReasonUnknownPeer, "BGPAdvertisement %s names no BGPPeer that selects node %s", a.Name, r.self))
	}
	if refusal != nil {
		obstacle("", refusal)
		return false
	}
	family := lb.FamilyOf(in.VIP)
	for _, peer := range a.peers {
		if !slices.Contains(r.sessions[peer].Families, family) {
			obstacle(peer, lb.Refuse(lb.ReasonFamilyNotOffered,
				"the session with BGPPeer %s does not carry %s routes; set dualStackAddressFamily, or add a peer with an %s "+
					"address", peer, family, family))
			continue
		}
		refusal := r.shut[way{peer, family}]
		if refusal != nil && (refusal.Reason != lb.ReasonForwardingOff || !onNode(in.Holders)) {
			obstacle(peer, refusal)
			continue
		}
		steady := v.Refusal == nil || kept && r.sessions[peer].GracefulRestart
		if !steady && !v.Leaving {
			continue
		}
		leaving = leaving || !steady
		r.found[peer][prefix] = r.join(r.found[peer][prefix], a, steady)
		if !slices.Contains(v.Prefixes, prefix) {
			v.Prefixes = append(v.Prefixes, prefix)
		}
	}
	return leaving
}

// refuseThrough says why the node must not attract traffic through a VRF.
func refuseThrough(self string, b BGPFacts, vrf string) *lb.Refusal {
	if vrf == "" || b.TrustVRFs {
		return nil
	}
	problem, known := b.VRFs[vrf]
	switch {
	case !known:
		return lb.Refuse(lb.ReasonVRFUndelivered, "the proxy on %s does not say whether it delivers what comes in through "+
			"VRF %s; it does so from the release on that has --vrf-mark", self, vrf)
	case problem != "":
		return lb.Refuse(lb.ReasonVRFUndelivered, "%s does not deliver what comes in through VRF %s: %s", self, vrf, problem)
	}
	return nil
}

// refuseUplink says why the node must not attract packets of a family from a peer: its kernel does not forward what
// comes in at the link to the peer.
func refuseUplink(f Facts, s BGPSession, local netip.Addr, family lb.Family) *lb.Refusal {
	if !f.CheckForwarding {
		return nil
	}
	if s.Source.IsValid() {
		local = s.Source
	}
	for _, source := range []netip.Addr{{}, local} { // its interface counts if none leads to the peer
		unforwarded := ""
		for _, i := range f.Interfaces {
			switch {
			case !isUplink(i, s.VRF, s.Interface, s.Addr, source):
			case i.Forwards(family):
				return nil
			default:
				unforwarded = i.Name
			}
		}
		if unforwarded != "" {
			return lb.Refuse(lb.ReasonForwardingOff,
				"the kernel of %s forwards no %s packets that come in at %s, where the router sends them", f.Self, family,
				unforwarded)
		}
	}
	return nil
}

// IsUplink reports whether the interface leads to one of the peers. locals are the addresses on the node of sessions.
func IsUplink(i lb.Interface, peers map[string]lb.Peer, locals map[string]netip.Addr) bool {
	for name, p := range peers {
		if isUplink(i, p.VRF, p.Interface, p.Addr, p.Source) || isUplink(i, p.VRF, p.Interface, p.Addr, locals[name]) {
			return true
		}
	}
	return false
}

// isUplink reports whether the interface leads to a peer in a VRF: by its name, by an address of the peer in one of its
// subnets, or by the address that the session has on the node, to which also a router further away sends. An address on
// a dummy, or on a VRF itself, says nothing of where packets come in.
func isUplink(i lb.Interface, vrf, name string, peer, source netip.Addr) bool {
	if i.Loopback || i.VRF != vrf {
		return false
	}
	if name != "" {
		return i.Name == name
	}
	_, near := i.Subnet(peer)
	return near || !i.Dummy && i.Table == 0 &&
		slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Addr() == source })
}

// outside refuses an aggregate that attracts traffic for addresses that are not the pool's.
func outside(prefix netip.Prefix, vip netip.Addr, pool lb.Pool) *lb.Refusal {
	if prefix.IsSingleIP() {
		return nil
	}
	aggregate, err := lb.ParseRange(prefix.String())
	if err != nil {
		return lb.Refuse(lb.ReasonAggregateOutside, "%v", err)
	}
	for _, r := range pool.Ranges {
		if r.Contains(vip) && r.Contains(aggregate.From) && r.Contains(aggregate.To) {
			return nil
		}
	}
	return lb.Refuse(lb.ReasonAggregateOutside,
		"%s, the aggregate for %s, reaches beyond the ranges of IPAddressPool %s; use a longer aggregationLength, or a "+
			"range that contains it", prefix, vip, pool.Name)
}

// routes returns what a peer hears.
func (r *routes) routes(peer string) map[netip.Prefix]Route {
	made := make([]Route, len(r.mixes))
	for i, m := range r.mixes[1:] {
		made[i+1] = m.route()
	}
	all := make(map[netip.Prefix]Route, len(r.found[peer]))
	for prefix, m := range r.found[peer] {
		all[prefix] = made[m]
	}
	return all
}

// route joins the attributes of advertisements: communities are added up, of the others the oldest
// that sets one decides.
func (o mix) route() Route {
	route := Route{LocalPref: DefaultLocalPref}
	prefSet := false
	for _, a := range o.ads {
		if a.LocalPref != nil && !prefSet {
			route.LocalPref, prefSet = *a.LocalPref, true
		}
		if a.MED != nil && !route.HasMED {
			route.MED, route.HasMED = *a.MED, true
		}
		if route.Prepend == 0 {
			route.Prepend = a.Prepend
		}
		route.Communities = append(route.Communities, a.communities...)
	}
	if !o.steady {
		route.LocalPref = 0 // RFC 8326 section 4.2
		route.Communities = append(route.Communities, GracefulShutdown)
	}
	slices.SortFunc(route.Communities, lb.Community.Compare)
	route.Communities = slices.Compact(route.Communities)
	if len(route.Communities) > maxCommunities {
		route.Communities = route.Communities[:maxCommunities]
	}
	return route
}
