package nftables

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// service is what one Service brings to one family.
type service struct {
	key   lb.Key
	input plan.Service
	parts []part
	// places are those of frontends in parts; nil until they are needed, see part.
	places map[frontend]int
	// shared are elements that other Services may bring too: they stay as long as one does.
	shared []common
	// memory is how its groups remember clients.
	memory memory
	// needs are the numbered sets that its elements are in.
	needs []need
	// weighed is set if the kernel has confirmed the same plan with another load.
	weighed bool
	// refusal says why the Service is not written; nil if it is. Its parts have no entries then.
	refusal error
}

// part is what one frontend or group brings.
type part struct {
	frontend
	kind      plan.Kind
	lingering bool
	entries   []entry
}

// renderer renders for one family.
type renderer struct {
	family lb.Family
	// nodeAddresses are where node ports are served.
	nodeAddresses []netip.Addr
	// relay is set if the rules have the set of relayed frontends.
	relay bool
	// loads are what is known of the connections of Services whose scheduler counts.
	loads map[lb.Key]plan.Load
	// taken reports whether a group has this number; may be nil.
	taken func(id uint32) bool
}

// newRenderer takes from the configuration what elements depend on.
func newRenderer(family lb.Family, config plan.Config) renderer {
	r := renderer{family: family, relay: config.Relay,
		nodeAddresses: slices.Clone(config.NodePortAddresses[family])}
	if loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1}); family == lb.IPv4 && config.LoopbackNodePorts {
		r.nodeAddresses = append(r.nodeAddresses, loopback)
	}
	slices.SortFunc(r.nodeAddresses, netip.Addr.Compare)
	r.nodeAddresses = slices.Compact(r.nodeAddresses)
	return r
}

// service renders a Service whose plan holds only ports of the renderer's family.
func (r renderer) service(key lb.Key, s plan.Service) *service {
	taken := map[uint32]bool{}
	choices := r.choices(key, s, taken)
	lists := r.sourceLists(key, s, taken)
	out := &service{key: key, input: s, memory: memoryOf(s.AffinityTimeout, remembering(choices), s.Places)}
	if out.refusal = r.refusal(s, choices, lists); out.refusal == nil {
		out.needs = needsOf(out.memory, lists)
		if slices.ContainsFunc(choices, func(c choice) bool { return c.cluster != nil && c.cluster.direct }) {
			out.needs = append(out.needs, need{set: setDirect})
		}
	}
	for _, l := range lists {
		out.parts = append(out.parts, out.sources(l))
	}
	seen, places, shared := map[*group]bool{}, map[frontend]int{}, map[common]bool{}
	share := func(e common) {
		if !shared[e] {
			shared[e], out.shared = true, append(out.shared, e)
		}
	}
	var last [2][]lb.Backend // of ports with this policy: most share theirs
	var policy lb.TrafficPolicy
	for i, p := range s.Ports {
		protocol, ok := protocolOf(p.Protocol)
		if !ok {
			continue
		}
		for _, g := range []*group{choices[i].cluster, choices[i].local} {
			if g != nil && !seen[g] {
				seen[g] = true
				out.parts = append(out.parts, out.group(g))
			}
		}
		for _, f := range p.Frontends {
			addrs := []netip.Addr{f.Addr}
			if f.Kind == plan.NodePort {
				addrs = r.nodeAddresses
			}
			is := traits{relayed: r.relay && s.IsRelayed(p, f), direct: s.IsDirect(p, f)}
			for _, addr := range addrs {
				at := frontend{addr: addressOf(addr), port: f.Port, protocol: protocol}
				out.put(places, part{frontend: at, kind: f.Kind, lingering: f.Lingering,
					entries: out.frontend(at, f, choices[i], listOf(lists, f.Sources), is)})
			}
			if f.AnswersPing() {
				share(common{addressOf(f.Addr), setEcho})
			}
			if f.Kind == plan.ClusterIP {
				share(common{addressOf(f.Addr), setClusterIPs})
			}
		}
		for j, list := range [][]lb.Backend{p.Backends.Cluster, p.Backends.Local} {
			if isOne(list, last[j]) && p.External == policy {
				continue
			}
			last[j] = list
			for _, b := range list {
				// Endpoints of other nodes come back to themselves from here only when their address is kept.
				if b.Local || p.External == lb.Local {
					share(common{addressOf(b.Addr.Addr()), setHairpin})
				}
			}
		}
		policy = p.External
	}
	for _, mac := range s.Senders {
		at := common{set: setNodes}
		copy(at.addr[:], mac[:])
		share(at)
	}
	for _, vip := range s.SoleOf(r.family) {
		share(common{addressOf(vip), setVIPs})
	}
	for i := range out.parts {
		slices.SortFunc(out.parts[i].entries, inOrder)
	}
	return out
}

// put adds a frontend, and notes its place. If a Service has the same one twice, as with a node
// port at an address that is also its VIP, the kind that comes first counts.
func (s *service) put(places map[frontend]int, p part) {
	i, twice := places[p.frontend]
	switch {
	case !twice:
		places[p.frontend] = len(s.parts)
		s.parts = append(s.parts, p)
	case plan.Precedes(p.kind, s.input.Age, s.parts[i].kind, s.input.Age):
		s.parts[i] = p
	}
}

// Needs returns how many elements a Service needs at most, in both families and with one address of the node.
func Needs(s plan.Service) (n int) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		r, taken := renderer{family: family, nodeAddresses: []netip.Addr{{}}}, map[uint32]bool{}
		if of := s.Only(family); len(of.Ports) > 0 {
			n += r.count(of, r.choices(s.Key, of, taken), r.sourceLists(s.Key, of, taken))
		}
	}
	return n
}

// refusal says why a Service is too large; nil if it is not.
func (r renderer) refusal(s plan.Service, choices []choice, lists []sourceList) error {
	if n := r.count(s, choices, lists); n > MaxElements {
		return plan.TooLarge{Elements: n, Limit: MaxElements}
	}
	return nil
}

// count returns how many elements a Service needs at most.
func (r renderer) count(s plan.Service, choices []choice, lists []sourceList) (elements int) {
	const flags = 10 // elements of a frontend at most
	groups := map[*group]bool{nil: true}
	for i, p := range s.Ports {
		for _, g := range []*group{choices[i].cluster, choices[i].local} {
			if !groups[g] {
				groups[g], elements = true, elements+g.size(s.AffinityTimeout > 0)
			}
		}
		for _, f := range p.Frontends {
			if f.Kind == plan.NodePort {
				elements += flags * len(r.nodeAddresses)
			} else {
				elements += flags
			}
		}
	}
	for _, l := range lists {
		elements += len(l.networks)
	}
	return elements
}

func (s *service) group(g *group) part {
	if s.refusal != nil {
		return part{frontend: frontend{group: g.id}}
	}
	p := g.part(s.memory)
	if g.direct {
		p.entries = append(p.entries, s.handed(g)...)
	}
	return p
}

// traits are what of a Service concerns only some of its frontends.
type traits struct{ relayed, direct bool }

// frontend renders one frontend. One without endpoints brings nothing that leads anywhere: what
// finds no backend is refused.
func (s *service) frontend(at frontend, f plan.Frontend, c choice, sources uint32, is traits) []entry {
	w := writer{at: at}
	if s.refusal != nil || f.Action == plan.Pass && c.cluster == nil {
		return nil
	}
	if f.Kind != plan.ClusterIP {
		w.add(setExternal)
	}
	if is.relayed {
		w.add(setRelayed)
		if at.protocol == udp {
			w.leadsTo(setRelayOwners, s.namespace())
		}
	}
	if sources != 0 {
		w.add(setRestricted)
		w.leadsTo(setSources, sources)
	}
	switch {
	case f.Action == plan.Reject:
		return w.entries
	case f.Kind == plan.ClusterIP && f.Action == plan.Drop:
		w.add(setSilent)
	case f.Kind == plan.ClusterIP && f.Action == plan.ToLocal:
		w.chooses(setGroups, c.local)
	case f.Action == plan.ToCluster:
		w.chooses(setGroups, c.cluster)
		if is.direct {
			w.chooses(setDirect, c.cluster)
		}
	default: // external with policy Local: pods and the node itself reach all endpoints
		w.add(setLocal)
		if f.Action == plan.Pass {
			w.add(setPassed)
		}
		w.chooses(setGroups, c.cluster)
		if f.Action == plan.ToLocal {
			w.chooses(setLocalGroups, c.local)
		}
	}
	if c.port != 0 {
		w.entries = append(w.entries, entry{element: element{set: setPorts, frontend: at}, to: target{port: c.port}})
	}
	return w.entries
}

// namespace returns the number of the Service's namespace. That two have the same harms nobody but them.
func (s *service) namespace() uint32 {
	return renderer{}.number(lb.Key{Namespace: s.key.Namespace}, "", "", map[uint32]bool{})
}

// onePort returns the port that all backends have, and whether there is one.
func onePort(p plan.Port) (uint16, bool) {
	port := p.Number
	if port != 0 {
		return port, true
	}
	for _, list := range [][]lb.Backend{p.Backends.Cluster, p.Backends.Local} {
		for _, b := range list {
			if port != 0 && b.Addr.Port() != port {
				return 0, false
			}
			port = b.Addr.Port()
		}
	}
	return port, true
}

// writer collects the elements of one frontend or group.
type writer struct {
	at      frontend
	entries []entry
}

func (w *writer) add(set setID) {
	w.entries = append(w.entries, entry{element: element{set: set, frontend: w.at}})
}

// chooses leads to a group.
func (w *writer) chooses(set setID, g *group) {
	if g != nil {
		w.leadsTo(set, g.id)
	}
}

func (w *writer) leadsTo(set setID, group uint32) {
	w.entries = append(w.entries, entry{element: element{set: set, frontend: w.at}, to: target{group: group}})
}

func (w *writer) number(set setID, n uint32, to target) {
	w.entries = append(w.entries, entry{element: element{set: set, frontend: w.at, number: n}, to: to})
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
