package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// chains are rules by chain, each in the form of iptables-save without the leading -A and chain.
type chains map[string][]string

// tables are the chains of the tables that we write.
type tables struct{ nat, filter chains }

// entry is a rule that a Service has in a chain that Services share.
type entry struct {
	place
	rule string
}

// contribution is what one Service brings to the rules of one family.
type contribution struct {
	chains  chains // in nat
	entries []entry
	// before are the Service's chains as they were rendered last: those of endpoints that are the same are kept.
	before chains
	// lists are the chains of sources, which ports share.
	lists map[*plan.Sources]string
	// merged is the last list that was made of several.
	merged struct {
		of      []*plan.Sources
		sources *plan.Sources
	}
}

// renderer renders for one address family.
type renderer struct {
	config plan.Config
	family lb.Family
}

func (r renderer) mark() string { return fmt.Sprintf("0x%x", uint32(1)<<r.config.MasqueradeBit) }

// loopback returns the addresses that stay within the machine.
func (r renderer) loopback() netip.Prefix {
	if r.family == lb.IPv4 {
		return netip.MustParsePrefix("127.0.0.0/8")
	}
	return netip.MustParsePrefix("::1/128")
}

func (r renderer) loopbackNodePorts() bool { return r.config.LoopbackNodePorts && r.family == lb.IPv4 }

// fromPod completes m to match connections from pods, or, with not, from elsewhere. ok is false
// when these cannot be told apart.
func (r renderer) fromPod(m rule, not bool) (_ rule, ok bool) {
	if r.config.Pods.Interface != "" {
		m.in, m.notIn = r.config.Pods.Interface, not
		return m, true
	}
	for _, p := range r.config.Pods.Prefixes {
		if lb.FamilyOf(p.Addr()) == r.family {
			m.src, m.notSrc = p.Masked(), not
			return m, true
		}
	}
	return m, false
}

// service renders what a Service brings. Ports of the other family are left out.
func (r renderer) service(s plan.Service) contribution { return r.again(s, nil) }

// again renders a Service whose chains were rendered before.
func (r renderer) again(s plan.Service, before chains) contribution {
	c := contribution{chains: chains{}, before: before}
	memories := r.memories(s)
	for i, p := range s.Ports {
		if p.Family == r.family {
			r.port(&c, s, p, memories[i])
		}
	}
	r.once(&c, s, len(c.entries) > 0)
	c.before = nil
	return c
}

// entries renders what a Service brings to the chains that Services share.
func (r renderer) entries(s plan.Service) []entry {
	var c contribution
	for _, p := range s.Ports {
		if p.Family == r.family {
			for _, f := range p.Frontends {
				r.frontend(&c, s.Key, p, f)
			}
		}
	}
	r.once(&c, s, len(c.entries) > 0)
	return c.entries
}

// once renders what a Service with ports brings besides them: connections to its health check node
// port pass, and those to its VIPs that no rule has translated are refused.
func (r renderer) once(c *contribution, s plan.Service, ports bool) {
	if !ports {
		return
	}
	if s.HealthPort != 0 {
		c.put(place{filter: true, chain: chainNodePorts}, rule{
			protocol: lb.TCP, comment: s.Key.String() + " health check node port", port: s.HealthPort, target: "ACCEPT",
		})
	}
	for _, vip := range s.SoleOf(r.family) {
		c.put(place{filter: true, chain: chainVIPs}, rule{dst: host(vip), target: chainRefuse})
	}
}

// put adds a rule to a chain that Services share.
func (c *contribution) put(at place, r rule) { c.putIn(at, at.chain, r) }

// putIn adds a rule about an address to one of the chains whose names begin with name, and to which the chain at leads.
func (c *contribution) putIn(at place, name string, r rule) {
	var jump string
	root := at
	switch {
	case r.dst.IsValid() && !r.notDst && r.dst.IsSingleIP():
		at.chain, jump = byAddress(name, r.dst.Addr())
	case !at.filter && r.port != 0:
		at.chain, jump = byPort(at.chain, r.protocol, r.port)
	}
	if jump != "" {
		c.entries = append(c.entries, entry{root, jump})
	}
	c.entries = append(c.entries, entry{at, r.String()})
}

func (r renderer) port(c *contribution, s plan.Service, p plan.Port, m memory) {
	key := s.Key
	name, end := portName(key, p.Name), suffix(key, p)
	add := func(chain string, rules ...rule) {
		for _, rule := range rules {
			c.chains[chain] = append(c.chains[chain], rule.String())
		}
	}
	usesCluster, usesLocal, isExternal, isRelayed := false, false, false, false
	for _, f := range p.Frontends {
		r.frontend(c, key, p, f)
		switch {
		case f.Action == plan.Reject, f.Action == plan.Pass && len(p.Backends.Cluster) == 0:
			continue
		case f.Kind != plan.ClusterIP:
			isExternal, usesCluster = true, true // pods and the node itself reach all endpoints
		}
		isRelayed = isRelayed || f.Kind != plan.ClusterIP && r.isRelayed(s, p, f)
		usesCluster = usesCluster || f.Action == plan.ToCluster
		usesLocal = usesLocal || f.Action == plan.ToLocal
	}
	if sources := c.sourcesOf(p); sources != nil {
		add(prefixSourceRange+end, rule{comment: name + " source ranges", target: c.sources(key, sources)},
			rule{comment: name + " " + words(plan.LoadBalancer), target: prefixExternal + end})
	}
	if isExternal {
		add(prefixExternal+end, r.external(p, name, end, isRelayed)...)
	}
	used := map[netip.AddrPort]string{}
	if usesCluster {
		use(used, key, p, p.Backends.Cluster)
		add(prefixCluster+end, r.pick(used, s, p, m, plan.ToCluster)...)
	}
	if usesLocal {
		use(used, key, p, p.Backends.Local)
		add(prefixLocal+end, r.pick(used, s, p, m, plan.ToLocal)...)
	}
	for endpoint, chain := range used {
		remember := m.remember(endpoint)
		if rules := c.before[chain]; len(rules) == 2 && strings.Contains(rules[1], remembers) == (remember != "") &&
			strings.Contains(rules[1], remember) {
			c.chains[chain] = rules
			continue
		}
		// Without comments, as these are half of all rules: the rules that jump here name the Service.
		deliver := rule{protocol: p.Protocol, portless: true, match: remember,
			target: "DNAT --to-destination " + endpoint.String()}
		add(chain, rule{src: host(endpoint.Addr()), target: chainMasquerade}, deliver) // hairpin: the pod must not see itself
	}
}

// use notes the endpoints that have chains, with their names.
func use(used map[netip.AddrPort]string, key lb.Key, p plan.Port, backends []lb.Backend) {
	for _, b := range backends {
		if at := p.At(b); used[at] == "" {
			used[at] = endpointChain(key, p, at)
		}
	}
}

// frontend renders where connections to a frontend go.
func (r renderer) frontend(c *contribution, key lb.Key, p plan.Port, f plan.Frontend) {
	name, end := portName(key, p.Name), suffix(key, p)
	m := rule{protocol: p.Protocol, port: f.Port}
	if f.Kind != plan.NodePort {
		m.dst = host(f.Addr)
	}
	put := func(filter bool, chain, comment, target string, m rule) {
		m.comment, m.target = comment, target
		c.put(place{filter, chain}, m)
	}
	refusals, target := chainExternal, prefixExternal+end
	switch {
	case f.Kind == plan.ClusterIP:
		// What no rule has translated is for a port or a protocol that the Service does not have.
		c.put(place{filter: true, chain: chainClusterIPs}, rule{dst: m.dst, target: chainRefuse})
		refusals, target = chainServices, prefixCluster+end
		if f.Action == plan.ToLocal {
			target = prefixLocal + end
		}
	case f.Sources != nil:
		target = prefixSourceRange + end
	}
	switch f.Action {
	case plan.Pass:
		if len(p.Backends.Cluster) == 0 {
			return
		}
	case plan.Reject:
		for _, m := range r.nodePortMatches(f, m) {
			put(true, refusals, name+" has no endpoints", r.refuse(p.Protocol), m)
		}
		return
	case plan.Drop:
		for _, m := range r.nodePortMatches(f, m) {
			put(true, refusals, name+" has no local endpoints", "DROP", m)
		}
		if f.Kind == plan.ClusterIP {
			return
		}
	}
	if r.config.AnswerPing && f.AnswersPing() {
		c.put(place{chain: chainEcho}, rule{dst: host(f.Addr), target: "REDIRECT"})
	}
	chain, in := chainServices, chainServices
	switch f.Kind {
	case plan.NodePort:
		chain = chainNodePorts
	case plan.ExternalIP:
		in = chainExternalIPs
	}
	m.comment, m.target = fmt.Sprintf("%s %s", name, words(f.Kind)), target
	c.putIn(place{chain: chain}, in, m)
	if f.Sources != nil && f.Action != plan.Pass { // what is routed on is not translated either
		put(true, chainFirewall, name+" traffic not accepted by "+prefixSourceRange+end, "DROP", m)
	}
}

// words is how the comment of a rule calls a kind of frontend.
func words(k plan.Kind) string {
	switch k {
	case plan.ClusterIP:
		return "cluster IP"
	case plan.ExternalIP:
		return "external IP"
	case plan.LoadBalancer:
		return "loadbalancer IP"
	}
	return "node port"
}

// nodePortMatches returns what m matches at the addresses where the frontend is served: m itself
// unless it is a node port's.
func (r renderer) nodePortMatches(f plan.Frontend, m rule) []rule {
	if f.Kind != plan.NodePort {
		return []rule{m}
	}
	var matches []rule
	for _, at := range r.nodePortAddresses() {
		m.dst, m.notDst, m.match = at.dst, at.notDst, at.match
		matches = append(matches, m)
	}
	return matches
}

// nodePortAddresses returns matches for the node's own addresses at which node ports are served.
func (r renderer) nodePortAddresses() []rule {
	addrs, limited := r.config.NodePortAddresses[r.family]
	switch {
	case limited:
		var matches []rule
		for _, addr := range slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare) {
			matches = append(matches, rule{dst: host(addr)})
		}
		return slices.CompactFunc(matches, func(a, b rule) bool { return a.dst == b.dst })
	case r.loopbackNodePorts():
		return []rule{{match: toLocalAddress}}
	default:
		return []rule{{dst: r.loopback(), notDst: true, match: toLocalAddress}}
	}
}

// refuse is the target that tells a client at once. A reset also passes firewalls that swallow
// ICMP.
func (r renderer) refuse(p lb.Protocol) string {
	switch {
	case p == lb.TCP:
		return "REJECT --reject-with tcp-reset"
	case r.family == lb.IPv4:
		return "REJECT --reject-with icmp-port-unreachable"
	}
	return "REJECT --reject-with icmp6-port-unreachable"
}

func (r renderer) external(p plan.Port, name, end string, isRelayed bool) []rule {
	about := name + " external destinations"
	var relay []rule
	if isRelayed {
		relay = []rule{{comment: about + " to the relay", target: chainRelay}}
	}
	if p.External != lb.Local {
		return append(relay, rule{comment: "masquerade traffic for " + about, target: chainMasquerade},
			rule{comment: about, target: prefixCluster + end})
	}
	var rules []rule
	if m, ok := r.fromPod(rule{comment: "pod traffic for " + about, target: prefixCluster + end}, false); ok {
		rules = append(rules, m)
	}
	rules = append(rules,
		rule{comment: "masquerade LOCAL traffic for " + about, match: fromLocalAddress, target: chainMasquerade},
		rule{comment: "route LOCAL traffic for " + about, match: fromLocalAddress, target: prefixCluster + end})
	if len(p.Backends.Local) > 0 {
		rules = append(append(rules, relay...), rule{comment: about, target: prefixLocal + end})
	}
	return rules
}

// pick renders the choice among backends: the one that the client had before, with affinity; else
// one of n, then one of n-1, and so on.
func (r renderer) pick(chains map[netip.AddrPort]string, s plan.Service, p plan.Port, clients memory,
	set plan.Action) []rule {
	name, backends := portName(s.Key, p.Name), p.Backends.Cluster
	if set == plan.ToLocal {
		backends = p.Backends.Local
	}
	var rules []rule
	for _, f := range p.Frontends {
		if f.Kind != plan.ClusterIP || f.Action != set {
			continue
		}
		if r.isRelayed(s, p, f) {
			rules = append(rules, rule{dst: host(f.Addr), protocol: p.Protocol, comment: name + " cluster IP to the relay",
				port: f.Port, target: chainRelay})
		}
		m := rule{dst: host(f.Addr), protocol: p.Protocol, comment: name + " cluster IP", port: f.Port,
			target: chainMasquerade}
		if r.config.MasqueradeAll {
			rules = append(rules, m)
		} else if m, ok := r.fromPod(m, true); ok {
			rules = append(rules, m)
		}
	}
	to := func(b lb.Backend) rule {
		return rule{comment: fmt.Sprintf("%s -> %s", name, p.At(b)), target: chains[p.At(b)]}
	}
	if s.AffinityTimeout > 0 {
		for _, b := range backends {
			m := to(b)
			m.match = clients.remembered(p.At(b))
			rules = append(rules, m)
		}
	}
	for i, b := range backends {
		m := to(b)
		if left := len(backends) - i; left > 1 {
			m.match = oneIn(left)
		}
		rules = append(rules, m)
	}
	return rules
}
