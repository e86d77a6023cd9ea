package nftables

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// service is what one Service brings to one family.
type service struct {
	key   lb.Key
	input plan.Service
	parts []part
	// shared are elements that other Services may bring too: they stay as long as one does.
	shared []common
	// seconds is the affinity timeout; 0 for none.
	seconds uint32
}

// part is what one frontend brings.
type part struct {
	frontend
	lingering bool
	entries   []entry
}

// renderer renders for one family.
type renderer struct {
	family lb.Family
	// nodeAddresses are where node ports are served.
	nodeAddresses []netip.Addr
}

// newRenderer takes from the configuration what elements depend on.
func newRenderer(family lb.Family, config plan.Config) renderer {
	r := renderer{family: family, nodeAddresses: slices.Clone(config.NodePortAddresses[family])}
	if loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1}); family == lb.IPv4 && config.LoopbackNodePorts {
		r.nodeAddresses = append(r.nodeAddresses, loopback)
	}
	slices.SortFunc(r.nodeAddresses, netip.Addr.Compare)
	r.nodeAddresses = slices.Compact(r.nodeAddresses)
	return r
}

// service renders a Service whose plan holds only ports of the renderer's family.
func (r renderer) service(key lb.Key, s plan.Service) *service {
	out := &service{key: key, input: s, seconds: uint32(s.AffinityTimeout / time.Second)}
	for _, p := range s.Ports {
		protocol, ok := protocolOf(p.Protocol)
		if !ok {
			continue
		}
		for _, f := range p.Frontends {
			addrs := []netip.Addr{f.Addr}
			if f.Kind == plan.NodePort {
				addrs = r.nodeAddresses
			}
			for _, addr := range addrs {
				at := frontend{addr: addressOf(addr), port: f.Port, protocol: protocol}
				out.put(part{frontend: at, lingering: f.Lingering, entries: r.frontend(at, p, f, s.Scheduler, out.seconds)})
			}
			if f.AnswersPing() {
				out.share(common{addressOf(f.Addr), setEcho})
			}
			if f.Kind == plan.ClusterIP {
				out.share(common{addressOf(f.Addr), setClusterIPs})
			}
		}
		for _, b := range slices.Concat(p.Backends.Cluster, p.Backends.Local) {
			// Endpoints of other nodes come back to themselves from here only when their address is kept.
			if b.Local || p.External == lb.Local {
				out.share(common{addressOf(b.Addr.Addr()), setHairpin})
			}
		}
	}
	for i := range out.parts {
		slices.SortFunc(out.parts[i].entries, inOrder)
	}
	return out
}

// put adds a frontend. Where a Service has the same one twice, as with an external IP that is also
// its VIP, that with source ranges counts.
func (s *service) put(p part) {
	i := slices.IndexFunc(s.parts, func(other part) bool { return other.frontend == p.frontend })
	if i < 0 {
		s.parts = append(s.parts, p)
		return
	}
	restricted := func(p part) bool {
		return slices.ContainsFunc(p.entries, func(e entry) bool { return e.set == setRestricted })
	}
	if restricted(p) && !restricted(s.parts[i]) {
		s.parts[i] = p
	}
}

func (s *service) share(e common) {
	if !slices.Contains(s.shared, e) {
		s.shared = append(s.shared, e)
	}
}

// frontend renders one frontend. One without endpoints brings nothing that leads anywhere: what
// finds no backend is refused.
func (r renderer) frontend(
	at frontend, p plan.Port, f plan.Frontend, scheduler plan.Scheduler, seconds uint32) []entry {
	w := writer{at: at}
	port, samePort := onePort(p.Backends)
	if seconds > 0 {
		// a client is remembered at each frontend by itself; this gives it the same endpoint at all of
		// them
		scheduler = plan.SourceHash
	}
	if r.family == lb.IPv6 && !samePort {
		seconds = 0 // clients can only be remembered with an address; the hash keeps nearly all of them where they are
	}
	if f.Kind != plan.ClusterIP {
		w.add(setExternal)
	}
	if len(f.Sources) > 0 {
		w.add(setRestricted)
		for _, source := range outermost(f.Sources) {
			w.entries = append(w.entries, entry{element: element{
				set: setSourceRanges, frontend: at, source: addressOf(source.Addr()), bits: uint8(source.Bits()),
			}})
		}
	}
	switch {
	case f.Action == plan.Reject:
		return w.entries
	case f.Kind == plan.ClusterIP && f.Action == plan.Drop:
		w.add(setSilent)
	case f.Kind == plan.ClusterIP && f.Action == plan.ToLocal:
		w.backends(p.Backends.Local, scheduler, false)
	case f.Action == plan.ToCluster:
		w.backends(p.Backends.Cluster, scheduler, false)
	default: // external with policy Local: pods and the node itself reach all endpoints
		w.add(setLocal)
		w.backends(p.Backends.Cluster, scheduler, false)
		if f.Action == plan.ToLocal {
			w.backends(p.Backends.Local, scheduler, true)
		}
	}
	if seconds > 0 {
		w.entries = append(w.entries, entry{element: element{set: setAffinity, frontend: at, number: seconds}})
		if r.family == lb.IPv6 {
			w.entries = append(w.entries, entry{element: element{set: setPorts, frontend: at}, to: target{port: port}})
		}
	}
	return w.entries
}

// onePort returns the port that all backends have, and whether there is one.
func onePort(u lb.Usable) (uint16, bool) {
	var port uint16
	for _, b := range slices.Concat(u.Cluster, u.Local) {
		if port != 0 && b.Addr.Port() != port {
			return 0, false
		}
		port = b.Addr.Port()
	}
	return port, true
}

// writer collects the elements of one frontend.
type writer struct {
	at      frontend
	entries []entry
}

func (w *writer) add(set setID) {
	w.entries = append(w.entries, entry{element: element{set: set, frontend: w.at}})
}

// backends adds the choice among backends, under the numbers for policy Local or the others.
func (w *writer) backends(all []lb.Backend, scheduler plan.Scheduler, local bool) {
	targets := make([]target, 0, len(all))
	for _, b := range all {
		targets = append(targets, target{addr: addressOf(b.Addr.Addr()), port: b.Addr.Port()})
	}
	if len(targets) == 0 {
		return
	}
	if method(scheduler) == 0 || len(targets) == 1 {
		w.draws(targets[:min(len(targets), maxBackends)], local)
		return
	}
	class := slotClass(len(targets))
	targets = targets[:min(len(targets), int(class))]
	if scheduled := (entry{element: element{set: setScheduled, frontend: w.at}}); !slices.Contains(w.entries, scheduled) {
		w.entries = append(w.entries, scheduled)
	}
	first := numbers(scheduler, local, class)
	w.entries = slices.Grow(w.entries, int(class))
	for i, place := range slots(scheduler, targets, class) {
		w.number(first+uint32(i), targets[place])
	}
}

func (w *writer) draws(targets []target, local bool) {
	class := drawClass(len(targets))
	switch {
	case class > exactClasses && local:
		w.add(setManyLocal)
	case class > exactClasses:
		w.add(setMany)
	}
	first := numbers(plan.Random, local, class)
	for i, to := range targets {
		w.number(first+uint32(i), to)
	}
}

func (w *writer) number(n uint32, to target) {
	w.entries = append(w.entries, entry{element: element{set: setBackends, frontend: w.at, number: n}, to: to})
}

// outermost leaves out prefixes that lie within others: the kernel refuses ranges that overlap.
func outermost(prefixes []netip.Prefix) []netip.Prefix {
	var outer []netip.Prefix
	for _, p := range prefixes {
		p = p.Masked()
		within := func(other netip.Prefix) bool { return other.Bits() < p.Bits() && other.Masked().Contains(p.Addr()) }
		if !slices.ContainsFunc(prefixes, within) && !slices.Contains(outer, p) {
			outer = append(outer, p)
		}
	}
	return outer
}

// WithAddresses returns config with the node's own addresses as those that serve node ports, in
// families in which config does not limit them. Loopback addresses are left out: connections to
// them cannot be answered.
func WithAddresses(config plan.Config, own []netip.Addr) plan.Config {
	addresses := map[lb.Family][]netip.Addr{}
	for _, addr := range own {
		if !addr.IsLoopback() {
			addresses[lb.FamilyOf(addr)] = append(addresses[lb.FamilyOf(addr)], addr)
		}
	}
	maps.Copy(addresses, config.NodePortAddresses)
	config.NodePortAddresses = addresses
	return config
}
