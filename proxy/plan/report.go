package plan

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Report says what the node delivers of a Service: for each VIP, and for its health port. It never
// says more than the kernel is confirmed to hold (applied), nor more than is still wanted
// (desired), so an endpoint counts only if it is in both. failure is why the last attempt to apply
// desired did not succeed; nil while it is merely under way. A VIP of which the kernel reaches no
// usable endpoint is refused.
func Report(desired, applied Service, failure error, path Path) []lb.Delivery {
	r := reporter{desired: desired, applied: applied, failure: failure, path: path, held: map[portID]int{},
		same: make([]uint8, len(desired.Ports)), at: map[netip.Addr][]int{}, heldAt: map[netip.Addr]int{}}
	for i, p := range applied.Ports {
		r.held[p.id()] = i
		for _, f := range p.Frontends {
			if f.Kind == LoadBalancer {
				r.heldAt[f.Addr]++
			}
		}
	}
	for i, p := range desired.Ports {
		for _, f := range p.Frontends {
			if at := r.at[f.Addr]; f.Kind == LoadBalancer && (len(at) == 0 || at[len(at)-1] != i) {
				r.at[f.Addr] = append(at, i)
			}
		}
	}
	var deliveries []lb.Delivery
	for _, vip := range desired.VIPs {
		deliveries = append(deliveries, r.deliver(vip))
	}
	return deliveries
}

// reporter reports on the VIPs of a Service. What VIPs have in common it finds out once.
type reporter struct {
	desired, applied Service
	failure          error
	path             Path
	// held are the ports of applied; at are those of desired at each VIP, by their places.
	held map[portID]int
	at   map[netip.Addr][]int
	// heldAt counts the frontends of applied at each VIP.
	heldAt map[netip.Addr]int
	// same remembers which ports of desired are as in applied, but for their frontends.
	same     []uint8
	backends sameBackends
	// last are the ports that were counted last.
	last    []int
	counted lb.Delivery
	// pathless is why none of them is reached, as far as the policy allows them.
	pathless *lb.Refusal
}

const (
	isSame = 1 + iota
	isOther
)

func (r *reporter) deliver(vip netip.Addr) lb.Delivery {
	d := lb.Delivery{Service: r.desired.Key, VIP: vip, Policy: r.desired.Policy}
	if d.Refusal = r.desired.deniedAt(vip); d.Refusal == nil {
		d.Refusal = r.refusal(vip)
	}
	if d.Refusal != nil {
		return d
	}
	if want := r.at[vip]; r.last == nil || !slices.Equal(want, r.last) {
		r.last = want
		r.counted, r.pathless = r.count(want)
	}
	if d.Refusal = r.pathless; d.Refusal != nil {
		return d
	}
	d.Ready, d.Serving = r.counted.Ready, r.counted.Serving
	d.LocalReady, d.LocalServing, d.OnNode = r.counted.LocalReady, r.counted.LocalServing, r.counted.OnNode
	return d
}

// count counts the endpoints of some ports, and says why the kernel reaches none of those that the
// policy allows, if that is so.
func (r *reporter) count(ports []int) (d lb.Delivery, pathless *lb.Refusal) {
	var cluster, local counter
	for _, i := range ports {
		p := r.desired.Ports[i]
		j, ok := r.held[p.id()]
		if !ok {
			continue
		}
		held := r.applied.Ports[j]
		// What comes from outside reaches the set of the policy that the kernel follows now.
		reached := listed{held, held.Backends.For(held.External)}
		local.add(listed{p, p.Backends.Local}, reached)
		if r.desired.Policy == lb.Local {
			reached.list = held.Backends.Cluster // where else there are endpoints, whether or not this node sends there
		}
		cluster.add(listed{p, p.Backends.Cluster}, reached)
	}
	d.Ready, d.Serving = cluster.counts()
	d.LocalReady, d.LocalServing = local.counts()
	allowed := cluster
	if r.desired.Policy == lb.Local {
		allowed = local
	}
	d.OnNode = r.path.onNode(allowed)
	return d, r.path.refuse(allowed)
}

// deniedAt returns why the Service does not get a port of its VIP; nil if it gets all of them. The
// ports that it gets are in the kernel all the same.
func (s Service) deniedAt(vip netip.Addr) *lb.Refusal {
	for _, d := range s.Denied {
		if d.Kind == LoadBalancer && d.Addr == vip {
			return &d.Refusal
		}
	}
	return nil
}

func (r *reporter) refusal(vip netip.Addr) *lb.Refusal {
	want, have := r.at[vip], r.heldAt[vip]
	switch {
	case r.desired.Excess != nil && (!r.desired.Excess.Together || len(want) == 0):
		return lb.Refuse(lb.ReasonNotProgrammed, "the Service is too large: %v", *r.desired.Excess)
	case len(want) == 0:
		return lb.Refuse(lb.ReasonNotProgrammed,
			"the Service has no %s cluster IP, or no ports, so nothing can be programmed for %s", lb.FamilyOf(vip), vip)
	case errors.As(r.failure, new(TooLarge)) && !r.programmed(vip):
		return lb.Refuse(lb.ReasonNotProgrammed, "the Service is too large: %v", r.failure)
	case r.failure != nil && !r.programmed(vip):
		return lb.Refuse(lb.ReasonNotProgrammed, "the kernel refused the rules for %s: %v", vip, r.failure)
	case have == 0:
		return lb.Refuse(lb.ReasonNotProgrammed, "the kernel has not confirmed the rules for %s yet", vip)
	}
	return nil // what was programmed stays so while a newer plan is under way
}

// programmed reports whether the kernel holds what is wanted for a VIP.
func (r *reporter) programmed(vip netip.Addr) bool {
	others := r.heldAt[vip]
	for _, i := range r.at[vip] {
		p := r.desired.Ports[i]
		j, ok := r.held[p.id()]
		if !ok {
			return false
		}
		held := r.applied.Ports[j]
		if r.same[i] == 0 {
			r.same[i] = isOther
			if p.External == held.External && r.backends.of(p, held) {
				r.same[i] = isSame
			}
		}
		var lists sameSources
		want, have := frontendsAt(p, vip), frontendsAt(held, vip)
		if r.same[i] != isSame || !lists.frontends(want, have) {
			return false
		}
		others -= len(have)
	}
	return others == 0
}

func frontendsAt(p Port, vip netip.Addr) []Frontend {
	var frontends []Frontend
	for _, f := range p.Frontends {
		if f.Kind == LoadBalancer && f.Addr == vip {
			frontends = append(frontends, f)
		}
	}
	return frontends
}

// Health returns, for each address family in which the Service needs a health server, how many
// ready endpoints of this node the rules in the kernel deliver to. Endpoints count by address: two
// ports of one pod are one.
func Health(desired, applied Service, path Path) map[lb.Family]int {
	if desired.HealthPort == 0 {
		return nil
	}
	held := make(map[portID]int, len(applied.Ports))
	for i, p := range applied.Ports {
		held[p.id()] = i
	}
	counts := map[lb.Family]int{}
	for _, family := range desired.Families() {
		var local counter
		for _, p := range desired.Only(family).Ports {
			if i, ok := held[p.id()]; ok && applied.Ports[i].External == lb.Local {
				local.add(listed{p, p.Backends.Local}, listed{applied.Ports[i], applied.Ports[i].Backends.Local})
			}
		}
		if counts[family], _ = local.counts(); path.refuse(local) != nil {
			counts[family] = 0
		}
	}
	return counts
}

// counter counts endpoints by address. Lists of the same addresses as the ones before count once.
type counter struct {
	ready, serving  map[netip.Addr]bool
	wanted, reached listed
}

// listed are backends of a port.
type listed struct {
	Port
	list []lb.Backend
}

func (l listed) first() uint16 { return l.At(l.list[0]).Port() }

// add counts the wanted backends that are also reached.
func (c *counter) add(wanted, reached listed) {
	if c.ready == nil {
		c.ready, c.serving = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	}
	if sameAddresses(c.wanted.list, wanted.list) && sameAddresses(c.reached.list, reached.list) &&
		(c.wanted.first() == c.reached.first()) == (wanted.first() == reached.first()) {
		return
	}
	c.wanted, c.reached = wanted, reached
	held := make(map[netip.AddrPort]bool, len(reached.list))
	for _, b := range reached.list {
		held[reached.At(b)] = true
	}
	for _, b := range wanted.list {
		switch {
		case !held[wanted.At(b)]:
		case b.Ready:
			c.ready[b.Addr.Addr()] = true
		default:
			c.serving[b.Addr.Addr()] = true
		}
	}
}

// sameAddresses reports whether two lists differ in one port number at most.
func sameAddresses(a, b []lb.Backend) bool {
	if len(a) == 0 || len(a) != len(b) {
		return false
	}
	if sameList(a, b) {
		return true
	}
	for i, x := range a {
		y := b[i]
		if x.Addr.Addr() != y.Addr.Addr() || x.Ready != y.Ready || x.Addr.Port() != a[0].Addr.Port() ||
			y.Addr.Port() != b[0].Addr.Port() {
			return false
		}
	}
	return true
}

func (c *counter) counts() (ready, serving int) {
	for addr := range c.serving {
		if !c.ready[addr] {
			serving++
		}
	}
	return len(c.ready), serving
}
