package plan

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Claims decides which Service serves each frontend if several ask for the same one, and which
// externalIPs are served at all. Precedes has the order. A Service that joins or leaves never
// changes what a Service before it serves.
//
// Claims is not safe for concurrent use.
type Claims struct {
	external ExternalIPs
	own      map[netip.Addr]bool
	claiming map[lb.Key]*claimant
	// owners serve a frontend; waiting have asked for it too.
	owners  map[slot]claim
	waiting map[slot][]claim
	// watching have an external IP that depends on whether it is a cluster IP or a VIP.
	watching map[netip.Addr]map[*claimant]bool
	// externals are the Services with externalIPs.
	externals map[*claimant]bool
	// taken are the slots that somebody may have come to serve since Taken was last called; all is set if these may be
	// any.
	taken []slot
	all   bool
}

// slot is what only one Service can have: an address and port for one protocol. A node port has no
// address. The slot of a whole address has neither port nor protocol.
type slot struct {
	addr     netip.Addr
	port     uint16
	protocol uint8
}

// claimant is a Service with what it asks for.
type claimant struct {
	Age
	listing lb.Listing
	key     lb.Key
	ports   []Port
	vips    []netip.Addr
	health  uint16 // the healthCheckNodePort
}

// claim is a Service's wish to have a slot.
type claim struct {
	*claimant
	kind Kind
	// since is since when the Service lists an external IP; 0 if it is unknown, or no external IP.
	since int64
}

// precedes reports whether a claim comes before another for the same slot. Who has listed an external IP for
// longer is its holder, however old the Services are. Whose listing the controller has not seen comes last.
func (c claim) precedes(other claim) bool {
	if c.kind == ExternalIP && other.kind == ExternalIP && c.since != other.since {
		return other.since == 0 || c.since != 0 && c.since < other.since
	}
	return Precedes(c.kind, c.Age, other.kind, other.Age)
}

// Age orders Services: the older one was created earlier. UIDs decide between Services of the same
// second. Names do not count, because tenants choose them. At a VIP, a Service whose addresses or ports
// the controller has not confirmed comes after others.
type Age struct {
	Intruding lb.Intrusion // see lb.Service
	Created   int64        // Unix time in seconds, the resolution of the API
	UID       string
}

// Compare orders Services by age, the oldest first.
func (a Age) Compare(b Age) int {
	return cmp.Or(cmp.Compare(a.Intruding, b.Intruding), cmp.Compare(a.Created, b.Created), cmp.Compare(a.UID, b.UID))
}

// rank orders kinds by how firmly a frontend belongs to its Service. The API server assigns cluster
// IPs and node ports, and the controller VIPs. Everybody who may write a Service writes external
// IPs. A VIP comes before a node port, because the administrator who puts a node's address into a
// pool gives it to the pool.
func (k Kind) rank() int {
	return slices.Index([]Kind{ClusterIP, LoadBalancer, NodePort, ExternalIP}, k)
}

// Precedes reports whether a frontend of one kind, of a Service of one age, comes before another
// with the same address and port.
func Precedes(kind Kind, age Age, otherKind Kind, otherAge Age) bool {
	if kind != LoadBalancer {
		age.Intruding, otherAge.Intruding = lb.IntrudesNot, lb.IntrudesNot
	}
	return cmp.Or(cmp.Compare(kind.rank(), otherKind.rank()), age.Compare(otherAge)) < 0
}

// NewClaims returns Claims that no Service has made.
func NewClaims() *Claims {
	return &Claims{
		claiming: map[lb.Key]*claimant{}, owners: map[slot]claim{}, waiting: map[slot][]claim{},
		watching: map[netip.Addr]map[*claimant]bool{}, externals: map[*claimant]bool{},
	}
}

// Configure sets which externalIPs are served, and the node's own addresses. It returns the
// Services for which Grant may return something else than before.
func (c *Claims) Configure(external ExternalIPs, own []netip.Addr) []lb.Key {
	ownSet := make(map[netip.Addr]bool, len(own))
	for _, addr := range own {
		ownSet[addr] = true
	}
	if c.external.Equal(external) && maps.Equal(c.own, ownSet) {
		return nil
	}
	before := c.external
	c.external, c.own, c.all = external, ownSet, true
	var keys []lb.Key
	for key, s := range c.claiming {
		if c.externals[s] || !slices.Equal(before.soleVIPs(s.vips), external.soleVIPs(s.vips)) {
			keys = append(keys, key)
		}
	}
	return keys
}

// Set takes all that a Service asks for; a plan without ports ends its claims. It returns the other
// Services for which Grant may return something else than before: concerned may get other frontends, and told are
// refused the same ones, maybe for the sake of another Service.
func (c *Claims) Set(s Service) (concerned, told []lb.Key) {
	before := c.claiming[s.Key]
	if before != nil && before.Age == s.Age && before.health == s.HealthPort &&
		maps.Equal(before.listing, s.Listing) && slices.EqualFunc(before.ports, s.Ports, sameFrontends) {
		before.ports, before.vips = s.Ports, s.VIPs
		return nil, nil
	}
	touched := map[slot]claim{} // with the owners before
	if before != nil {
		c.remove(before, touched)
	}
	if len(s.Ports) > 0 {
		c.add(&claimant{Age: s.Age, listing: s.Listing, key: s.Key, ports: s.Ports, vips: s.VIPs,
			health: s.HealthPort}, touched)
	}
	gains := c.settle(touched)
	delete(gains, s.Key)
	for key, gains := range gains {
		if gains {
			concerned = append(concerned, key)
		} else {
			told = append(told, key)
		}
	}
	return concerned, told
}

// settle gives the slots to which claims have come or gone to the first of those that ask for them. It returns the
// Services for which that changes something: true for those that may get other frontends.
func (c *Claims) settle(touched map[slot]claim) map[lb.Key]bool {
	gains := map[lb.Key]bool{}
	tell := func(claims ...claim) {
		for _, one := range claims {
			if !gains[one.key] {
				gains[one.key] = false // named all the same
			}
		}
	}
	c.electAll(touched)
	for at, was := range touched {
		now := c.owners[at]
		if was.same(now) {
			continue
		}
		if at == (slot{addr: at.addr}) {
			c.settleAddress(at.addr, was, now, gains)
			continue
		}
		if now.claimant != nil {
			c.taken = append(c.taken, at)
		}
		for _, owner := range []claim{was, now} {
			if owner.claimant != nil {
				gains[owner.key] = true
			}
		}
		tell(c.waiting[at]...)
		if at.addr.IsValid() {
			continue
		}
		for own := range c.own { // where it is the node port that decides about external IPs
			of := slot{own, at.port, at.protocol}
			if owner := c.owners[of]; owner.claimant != nil {
				gains[owner.key], c.taken = true, append(c.taken, of)
			}
			tell(c.waiting[of]...)
		}
	}
	return gains
}

// electAll elects the owners of slots that are touched. The holder of an address decides about its external IPs, and so
// comes before their ports, of which it may touch more.
func (c *Claims) electAll(touched map[slot]claim) {
	var others []netip.Addr
	for at := range touched {
		if at == (slot{addr: at.addr}) {
			if c.elect(at); !touched[at].same(c.owners[at]) {
				others = append(others, at.addr)
			}
		}
	}
	for _, addr := range others {
		for s := range c.watching[addr] {
			for _, at := range s.portsAt(addr) {
				if len(c.waiting[at]) > 0 {
					c.touch(at, touched)
				}
			}
		}
	}
	for at := range touched {
		whole := slot{addr: at.addr}
		if _, turned := touched[whole]; at != whole && (turned || c.owners[at].claimant == nil) {
			c.elect(at) // where claims only came, add has found the first
		}
	}
}

// settleAddress adds to gains the Services with an external IP that has another holder than before, as a cluster IP
// or VIP.
func (c *Claims) settleAddress(addr netip.Addr, was, now claim, gains map[lb.Key]bool) {
	if len(c.watching[addr]) == 0 || c.external.Refuse(addr) != nil {
		return // nobody gets it, whoever holds it
	}
	for s := range c.watching[addr] {
		gained := gains[s.key]
		if was.bars(s) != now.bars(s) {
			for _, at := range s.portsAt(addr) {
				if c.owners[at].claimant == s {
					gained, c.taken = true, append(c.taken, at)
				}
			}
		}
		gains[s.key] = gained
	}
}

// bars reports whether the holder of an address, as a cluster IP or VIP, keeps it from a Service that asks for it as an
// external IP. Who has a VIP has all of it against other tenants: its clients may try another port or protocol, as for
// HTTP/3. That somebody listed the address before says nothing: a tenant may list what others get tomorrow.
func (c claim) bars(s *claimant) bool {
	return c.claimant != nil && (c.kind == ClusterIP || c.key.Namespace != s.key.Namespace)
}

// portsAt returns the slots that the Service may ask for at one of its external IPs.
func (s *claimant) portsAt(addr netip.Addr) (all []slot) {
	for _, p := range s.ports {
		i := slices.IndexFunc(p.Frontends, func(f Frontend) bool { return f.Kind == ExternalIP })
		if i >= 0 && p.Family == lb.FamilyOf(addr) {
			all = append(all, slotOf(p.Protocol, addr, p.Frontends[i].Port))
		}
	}
	return all
}

// same reports whether two claims are the same one to all others.
func (c claim) same(other claim) bool {
	if c.claimant == nil || other.claimant == nil {
		return c.claimant == other.claimant
	}
	return c.key == other.key && c.kind == other.kind && c.Created == other.Created
}

// sameFrontends reports whether two ports ask for the same frontends.
func sameFrontends(a, b Port) bool {
	return a.Protocol == b.Protocol && slices.EqualFunc(a.Frontends, b.Frontends, func(a, b Frontend) bool {
		return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port
	})
}

// Awaits reports whether a Service asks for a frontend that one of some others keeps from it.
func (c *Claims) Awaits(key lb.Key, others func(lb.Key) bool) bool {
	s := c.claiming[key]
	keeps := func(at slot) bool {
		owner := c.owners[at]
		return owner.claimant != nil && owner.claimant != s && others(owner.key)
	}
	return s != nil && slices.ContainsFunc(s.ports, func(p Port) bool {
		return slices.ContainsFunc(p.Frontends, func(f Frontend) bool {
			return keeps(slotOf(p.Protocol, f.Addr, f.Port)) || keeps(slot{addr: f.Addr}) ||
				keeps(slotOf(p.Protocol, netip.Addr{}, f.Port)) // the node port, at the node's own addresses
		})
	})
}

// Taken returns what of all that lingers is at a frontend that somebody may have come to serve since the last call.
// With all set that may be anything.
func (c *Claims) Taken(lingering LingeringAt) (at []*Lingering, all bool) {
	for _, taken := range c.taken {
		at = append(at, lingering[taken]...)
	}
	all = c.all
	c.taken, c.all = nil, false
	return at, all
}

// Serves reports whether some Service serves an address and port.
func (c *Claims) Serves(protocol lb.Protocol, addr netip.Addr, port uint16) bool {
	owner, ok := c.owners[slotOf(protocol, addr, port)]
	return ok && (owner.kind != ExternalIP || c.refuse(owner.claimant, protocol, Frontend{Addr: addr, Port: port}) == nil)
}

func (c *Claims) add(s *claimant, touched map[slot]claim) {
	c.claiming[s.key] = s
	for at, wish := range s.slots() {
		c.touch(at, touched)
		owner, owned := c.owners[at]
		switch {
		case owned && c.precedes(at, wish, owner):
			c.owners[at], c.waiting[at] = wish, append(c.waiting[at], owner)
		case owned || len(c.waiting[at]) > 0:
			c.waiting[at] = append(c.waiting[at], wish)
		default:
			c.owners[at] = wish
		}
	}
	for addr := range s.external() {
		if c.watching[addr] == nil {
			c.watching[addr] = map[*claimant]bool{}
		}
		c.watching[addr][s], c.externals[s] = true, true
	}
}

func (c *Claims) remove(s *claimant, touched map[slot]claim) {
	delete(c.claiming, s.key)
	delete(c.externals, s)
	for at := range s.slots() {
		c.touch(at, touched)
		if c.owners[at].claimant == s {
			delete(c.owners, at)
		} else {
			c.wait(at, slices.DeleteFunc(c.waiting[at], func(other claim) bool { return other.claimant == s }))
		}
	}
	for addr := range s.external() {
		delete(c.watching[addr], s)
		if len(c.watching[addr]) == 0 {
			delete(c.watching, addr)
		}
	}
}

// touch notes a slot, with its owner, before a claim comes or goes.
func (c *Claims) touch(at slot, touched map[slot]claim) {
	if _, ok := touched[at]; !ok {
		touched[at] = c.owners[at]
	}
}

// precedes reports whether a claim comes before another for a slot. Those that the holder of the address keeps from it
// come last.
func (c *Claims) precedes(at slot, a, b claim) bool {
	if a.kind == ExternalIP && b.kind == ExternalIP {
		if holder := c.owners[slot{addr: at.addr}]; holder.bars(a.claimant) != holder.bars(b.claimant) {
			return holder.bars(b.claimant)
		}
	}
	return a.precedes(b)
}

// elect makes the first of those that ask for a slot its owner.
func (c *Claims) elect(at slot) {
	waiting, first, i := c.waiting[at], c.owners[at], -1
	for j, wish := range waiting {
		if first.claimant == nil || c.precedes(at, wish, first) {
			first, i = wish, j
		}
	}
	if i < 0 {
		return
	}
	if owner, owned := c.owners[at]; owned {
		waiting[i] = owner
	} else {
		c.wait(at, slices.Delete(waiting, i, i+1))
	}
	c.owners[at] = first
}

func (c *Claims) wait(at slot, waiting []claim) {
	if len(waiting) == 0 {
		delete(c.waiting, at)
	} else {
		c.waiting[at] = waiting
	}
}

// slots returns what the Service asks for, each slot with the first kind that asks for it. A cluster IP and a VIP take
// the whole address from other Services' external IPs, and the health check node port is a node port.
func (s *claimant) slots() map[slot]claim {
	slots := map[slot]claim{}
	if s.health != 0 {
		slots[slotOf(lb.TCP, netip.Addr{}, s.health)] = claim{claimant: s, kind: NodePort}
	}
	for _, p := range s.ports {
		for _, f := range p.Frontends {
			at := slotOf(p.Protocol, f.Addr, f.Port)
			if wish, ok := slots[at]; !ok || f.Kind.rank() < wish.kind.rank() {
				wish = claim{claimant: s, kind: f.Kind}
				if f.Kind == ExternalIP {
					wish.since = s.listing.Since(f.Addr, p.Protocol, f.Port)
				}
				slots[at] = wish
			}
			whole := slot{addr: f.Addr}
			if wish, ok := slots[whole]; f.Kind.takesAddress() && (!ok || f.Kind.rank() < wish.kind.rank()) {
				slots[whole] = claim{claimant: s, kind: f.Kind}
			}
		}
	}
	return slots
}

func (k Kind) takesAddress() bool { return k == ClusterIP || k == LoadBalancer }

// external returns the Service's external IPs, some of them several times.
func (s *claimant) external() iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, p := range s.ports {
			for _, f := range p.Frontends {
				if f.Kind == ExternalIP && !yield(f.Addr) {
					return
				}
			}
		}
	}
}

func slotOf(protocol lb.Protocol, addr netip.Addr, port uint16) slot {
	at := slot{addr: addr, port: port}
	switch protocol {
	case lb.TCP:
		at.protocol = 6
	case lb.UDP:
		at.protocol = 17
	case lb.SCTP:
		at.protocol = 132
	}
	return at
}

// Grant returns the plan that was last Set with only the frontends that the Service gets, and with
// its Sole. The other frontends are in its Denied, except those that the Service has by another
// name: an external IP that is also its VIP.
func (c *Claims) Grant(s Service) Service {
	claimant := c.claiming[s.Key]
	if claimant == nil {
		return s
	}
	s.Sole = slices.DeleteFunc(c.external.soleVIPs(s.VIPs), s.passes)
	shared := true
	for i, p := range s.Ports {
		var kept []Frontend
		for at, f := range p.Frontends {
			got, refusal := c.grant(claimant, p.Protocol, f)
			if !got && kept == nil {
				kept = slices.Clone(p.Frontends[:at])
				if kept == nil {
					kept = []Frontend{}
				}
			}
			if got && kept != nil {
				kept = append(kept, f)
			}
			if refusal != nil {
				s.deny(Denied{Kind: f.Kind, Addr: f.Addr, Port: f.Port, Protocol: p.Protocol,
					Refusal: *refusal})
			}
		}
		if kept == nil {
			continue
		}
		if shared {
			s.Ports, shared = slices.Clone(s.Ports), false
		}
		s.Ports[i].Frontends = kept
	}
	return s
}

// passes reports whether the node routes on what comes to an address of the Service for some port.
func (s Service) passes(addr netip.Addr) bool {
	return slices.ContainsFunc(s.Ports, func(p Port) bool {
		return slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return f.Addr == addr && f.Action == Pass })
	})
}

// grant reports whether a Service gets a frontend, and if it does not and should know, why.
func (c *Claims) grant(s *claimant, protocol lb.Protocol, f Frontend) (got bool, why *lb.Refusal) {
	if f.Kind == ExternalIP {
		if own := c.owners[slotOf(protocol, f.Addr, f.Port)]; own.claimant == s && own.kind != ExternalIP {
			return false, nil
		}
		if why = c.refuse(s, protocol, f); why != nil {
			return false, why
		}
	}
	owner := c.owners[slotOf(protocol, f.Addr, f.Port)]
	_, nodePort := c.nodePortAt(protocol, f)
	switch {
	case owner.claimant == s:
		return owner.kind == f.Kind, nil
	case f.Kind == ExternalIP && owner.kind == ExternalIP && nodePort: // its own, so the owner is refused, too
		return false, lb.Refuse(lb.ReasonFrontendInUse, "%s %s/%s is kept for the node port of this Service",
			f.Kind.field(), netip.AddrPortFrom(f.Addr, f.Port), protocol.Lower())
	case f.Kind == NodePort:
		return false, lb.Refuse(lb.ReasonFrontendInUse, "node port %d/%s is in use by %s", f.Port, protocol.Lower(),
			owner.about(s))
	}
	return false, lb.Refuse(lb.ReasonFrontendInUse, "%s %s/%s is %s", f.Kind.field(),
		netip.AddrPortFrom(f.Addr, f.Port), protocol.Lower(), owner.uses(s))
}

// field says where in a Service a frontend of this kind comes from.
func (k Kind) field() string {
	switch k {
	case ClusterIP:
		return "spec.clusterIPs:"
	case ExternalIP:
		return "spec.externalIPs:"
	}
	return "status.loadBalancer:"
}

// uses says what the frontend is to its owner, for the eyes of another Service's owner.
func (c claim) uses(reader *claimant) string {
	switch c.kind {
	case ClusterIP:
		return "the cluster IP of " + c.about(reader)
	case LoadBalancer:
		return "held by " + c.about(reader)
	}
	return "in use by " + c.about(reader)
}

// about names the owner.
func (c claim) about(reader *claimant) string { return c.key.SeenFrom(reader.key.Namespace) }
