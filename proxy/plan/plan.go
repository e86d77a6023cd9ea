// Package plan decides what a node's kernel shall do for one Service. It is pure: values in, values
// out.
package plan

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Node is what planning has to know about the node that it plans for.
type Node struct {
	Name      string
	Zone      string // "" when unknown
	Addresses []netip.Addr
	// Scheduler is for Services that do not ask for one.
	Scheduler Scheduler
	// Relay is set if the node's rules can send connections to a relay.
	Relay bool
	// RelayTCPOnly leaves UDP to the rules.
	RelayTCPOnly bool
	// Neighbors are the addresses of the other nodes to which the node can hand packets as they are, by
	// the nodes' names. They are there only for Services that ask for direct forwarding.
	Neighbors map[string][]netip.Addr
	// Far says of the nodes behind routers whether packets are handed to them through the tunnel, and why not.
	Far map[FarNode]Unhanded
	// Senders are the MAC addresses of nodes that may hand packets over to this one, in order.
	Senders []lb.MAC
	// VRFs is set while Config.VRFInterfaces has any.
	VRFs bool
	// Direct says in which families the node's rules can hand packets over.
	Direct map[lb.Family]bool
}

// Kind says which field of a Service a frontend comes from.
type Kind string

// The kinds of frontends.
const (
	ClusterIP    Kind = "ClusterIP"
	ExternalIP   Kind = "ExternalIP"
	LoadBalancer Kind = "LoadBalancer" // a VIP
	NodePort     Kind = "NodePort"
)

// Action says what to do with a connection to a frontend.
type Action string

// The actions.
const (
	// ToCluster delivers to the port's Backends.Cluster.
	ToCluster Action = "Cluster"
	// ToLocal delivers to Backends.Local. On frontends other than the ClusterIP, policy Local concerns
	// who comes from outside only: pods and the node itself get Backends.Cluster, with ToLocal as with
	// Drop.
	ToLocal Action = "Local"
	// Reject refuses, as no endpoint is usable anywhere.
	Reject Action = "Reject"
	// Drop is silent, as the policy is Local and only other nodes have usable endpoints: whoever
	// balances in front shall try those.
	Drop Action = "Drop"
	// Pass routes who comes from outside on, as if the node did not know the address, since no endpoint is
	// usable for them and the Service asks for that: see passes. Pods and the node itself get
	// Backends.Cluster, as with Drop.
	Pass Action = "Pass"
)

// Frontend is an address and port that clients connect to; the protocol is that of its Port.
type Frontend struct {
	Kind Kind
	Addr netip.Addr // zero for a NodePort, which is reached at the node's own addresses
	Port uint16
	// Action is for connections from outside the cluster; see ToLocal for those from inside.
	Action Action
	// Sources are who may connect; nil for everybody.
	Sources *Sources
	// Lingering marks a VIP that was taken from the Service, and is kept working while packets may
	// still arrive.
	Lingering bool
}

// Sources are the networks whose clients may connect to the VIPs of a Service in one family: masked,
// ordered, each once. All frontends of a plan share one, so that what a Service costs grows with its
// ranges, and not with its ranges times its ports and addresses.
type Sources struct{ Networks []netip.Prefix }

// AnswersPing reports whether the frontend's address answers echo requests on this node: an address
// of the Service's own that is delivered from here to who comes from outside. One that is not stays
// silent, as who pings it wants to know just that.
func (f Frontend) AnswersPing() bool {
	return (f.Kind == LoadBalancer || f.Kind == ExternalIP) && (f.Action == ToCluster || f.Action == ToLocal)
}

// Port is one port of a Service in one address family.
type Port struct {
	Family   lb.Family
	Name     string
	Protocol lb.Protocol
	// External is the policy of all frontends but the ClusterIP.
	External lb.TrafficPolicy
	// Relay is set if the Service asks for the relay at this port.
	Relay    bool
	Backends lb.Usable
	// Number is the port at which all Backends listen; these have port 0 then, and ports with the same
	// endpoints share their lists, so that what a Service costs does not grow with its ports times its
	// endpoints. It is 0 where the Backends say it themselves: see At.
	Number uint16
	// Serving are all endpoints that still serve, including terminating ones that get no new
	// connections: flows to them may go on. A port of TCP has none, as its flows are not cut.
	Serving   []netip.AddrPort
	Frontends []Frontend
}

// Uses reports which of the backends its frontends choose from.
func (p Port) Uses() (cluster, local bool) {
	for _, f := range p.Frontends {
		switch {
		case f.Action == Reject, f.Kind == ClusterIP && f.Action == Drop:
		case f.Kind == ClusterIP && f.Action == ToLocal:
			local = true
		default: // with policy Local, pods and the node itself reach all endpoints
			cluster = true
			local = local || f.Action == ToLocal
		}
	}
	return cluster, local
}

// Service is what the kernel shall do for one Service.
type Service struct {
	Key lb.Key
	Age
	// Listing says since when the Service lists its external IPs.
	Listing lb.Listing
	Ports   []Port
	// Denied are the frontends that the Service asks for and does not get, the first ones of each reason.
	Denied []Denied
	// Excess says why the Service is too large to be planned, in which case it has no ports; nil if it
	// is not.
	Excess *TooLarge
	// Policy is the external traffic policy.
	Policy lb.TrafficPolicy
	// VIPs are the addresses that the Service holds and the nodes have to deliver, without lingering
	// ones.
	VIPs []netip.Addr
	// Sole are those of the VIPs that have no other use: what comes there for a port or protocol that
	// no Service has is refused. Claims.Grant sets them.
	Sole []netip.Addr
	// HealthPort is the healthCheckNodePort; 0 when the Service needs none.
	HealthPort uint16
	// Affinity is set when the Service asks for session affinity.
	Affinity bool
	// AffinityTimeout is how long a client address gets the same backend after its last new connection
	// to a port, in whole seconds; 0 for no affinity.
	AffinityTimeout time.Duration
	// Places are what it has for that in the kernel's memory.
	Places Places
	// Scheduler is what the Service asks for, or else the node's default.
	Scheduler Scheduler
	// Relay has connections to ports with Relay end at the node's relay, while that is there;
	// ProxyProtocol is the version of the PROXY protocol that it speaks to backends, 1 or 2, and 0 for none.
	Relay         bool
	ProxyProtocol int
	// Direct has connections from outside to VIPs that are for an endpoint of another node handed to
	// that node as they are, as far as Handed has the endpoint; it is then the address of its node.
	// Others are masqueraded.
	Direct bool
	Handed map[netip.Addr]netip.Addr
	// Senders are Node.Senders, if Direct is set.
	Senders []lb.MAC
}

// Denied is a frontend that a Service asks for and does not get, and why.
type Denied struct {
	Kind     Kind
	Addr     netip.Addr
	Port     uint16
	Protocol lb.Protocol
	lb.Refusal
	// More counts the frontends after this one that are refused for the same reason and not kept.
	More int
}

// MaxDenied is how many refused frontends of each reason a plan keeps, besides the first one at each VIP. A tenant can
// ask for thousands, and have each node write a sentence about every one.
const MaxDenied = 5

// deny notes a frontend that the Service does not get. Of frontends that are refused in the same words it keeps one.
func (s *Service) deny(d Denied) {
	kept, last, first := 0, 0, d.Kind == LoadBalancer // whether it is the first one at its VIP
	for i, other := range s.Denied {
		if other.Reason == d.Reason {
			kept, last = kept+1, i
		}
		if other.Message == d.Message {
			return
		}
		first = first && (other.Kind != LoadBalancer || other.Addr != d.Addr)
	}
	if kept < MaxDenied || first {
		s.Denied = append(s.Denied, d)
	} else {
		s.Denied[last].More++
	}
}

// CountFrontends returns how many frontends a plan has.
func (s Service) CountFrontends() (n int) {
	for _, p := range s.Ports {
		n += len(p.Frontends)
	}
	return n
}

// New plans a Service and its EndpointSlices for a node.
func New(svc lb.Service, endpoints []lb.Slice, node Node) Service {
	denied, excess := bound(&svc, endpoints)
	s := Service{
		Denied:   slices.Clip(denied),
		Excess:   excess,
		Key:      svc.Key,
		Age:      Age{Intruding: svc.Intruding, Created: svc.Created.Unix(), UID: svc.UID},
		Listing:  svc.Listed,
		Policy:   svc.ExternalPolicy,
		VIPs:     slices.Compact(slices.SortedFunc(slices.Values(svc.VIPs()), netip.Addr.Compare)),
		Affinity: svc.AffinityTimeout > 0, AffinityTimeout: svc.AffinityTimeout,
	}
	s.Scheduler = schedulerFor(svc, node)
	if svc.Type == lb.ExternalName || excess != nil {
		return s
	}
	if node.Relay && RelayIgnored(svc, node.Relay) == "" {
		s.Relay, s.ProxyProtocol = asksForRelay(svc.Relay), proxyProtocols[svc.RelayProxyProtocol]
	}
	s.forwardDirectly(svc, endpoints, node)
	s.HealthPort = healthPort(svc)
	sources := map[lb.Family]*Sources{}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		sources[family] = newSources(svc.SourceRanges, s.VIPs, family, node)
	}
	choose := newChooser(endpoints, lb.Place{Node: node.Name, Zone: node.Zone})
	if s.Scheduler.Weighted() {
		choose.weights = lb.NewWeigher(svc.Weights)
	}
	for _, clusterIP := range svc.ClusterIPs {
		for _, port := range svc.Ports {
			p := newPort(svc, s.VIPs, clusterIP, port, choose, sources)
			p.Relay = p.Relay && (p.Protocol != lb.UDP || !node.RelayTCPOnly)
			s.Ports = append(s.Ports, p)
		}
	}
	return s
}

func newPort(
	svc lb.Service, vips []netip.Addr, clusterIP netip.Addr, port lb.ServicePort, choose chooser,
	sources map[lb.Family]*Sources) Port {
	family := lb.FamilyOf(clusterIP)
	chosen := choose.port(port, family)
	p := Port{
		Family:   family,
		Name:     port.Name,
		Protocol: port.Protocol,
		External: svc.ExternalPolicy,
		Relay:    isRelayed(svc, port),
		Backends: chosen.backends,
		Number:   chosen.number,
		Serving:  chosen.serving,
	}
	internal, external := action(p.Backends, svc.InternalPolicy), action(p.Backends, svc.ExternalPolicy)
	routed := func(asked bool) Action { // of addresses that routers may know another way to, and so not of node ports
		if asked && (external == Drop || external == Reject) {
			return Pass
		}
		return external
	}
	p.Frontends = append(p.Frontends, Frontend{Kind: ClusterIP, Addr: clusterIP, Port: port.Port, Action: internal})
	for _, addr := range svc.ExternalIPs {
		if lb.FamilyOf(addr) == family {
			p.Frontends = append(p.Frontends, Frontend{Kind: ExternalIP, Addr: addr, Port: port.Port,
				Action: routed(passes(svc))})
		}
	}
	for _, vip := range vips {
		if lb.FamilyOf(vip) == family {
			p.Frontends = append(p.Frontends, Frontend{
				Kind: LoadBalancer, Addr: vip, Port: port.Port, Action: routed(passes(svc) || isRouter(svc, vip)),
				Sources: sources[family],
			})
		}
	}
	if port.NodePort != 0 && hasNodePorts(svc) {
		p.Frontends = append(p.Frontends, Frontend{Kind: NodePort, Port: port.NodePort, Action: external})
	}
	return p
}

func hasNodePorts(svc lb.Service) bool { return svc.Type == lb.NodePort || svc.Type == lb.LoadBalancer }

// healthPort returns the healthCheckNodePort that a Service uses; 0 if it needs none.
func healthPort(svc lb.Service) uint16 {
	if svc.Type == lb.LoadBalancer && svc.ExternalPolicy == lb.Local {
		return svc.HealthCheckNodePort
	}
	return 0
}

// passes reports whether a Service asks for KEP-6272 at all its external addresses: what would be dropped
// or refused only because there are no endpoints goes the way that routing has for it, to another node, cluster or
// site.
func passes(svc lb.Service) bool { return svc.Failover == lb.FailoverPassthrough }

// isRouter reports whether the status asks for KEP-6272 at one VIP.
func isRouter(svc lb.Service, vip netip.Addr) bool {
	return slices.Contains(svc.Ingress, lb.Ingress{Addr: vip, Mode: lb.IPModeRouter})
}

func action(usable lb.Usable, policy lb.TrafficPolicy) Action {
	switch {
	case len(usable.Cluster) == 0:
		return Reject
	case policy != lb.Local:
		return ToCluster
	case len(usable.Local) == 0:
		return Drop
	}
	return ToLocal
}

// newSources returns who may connect to the VIPs of one family, nil for everybody. A node that may
// connect can do so with a VIP as its own source address, as it has when the VIP is on one of its
// interfaces.
func newSources(ranges []netip.Prefix, vips []netip.Addr, family lb.Family, node Node) *Sources {
	var allowed []netip.Prefix
	nodeAllowed := false
	for _, r := range ranges {
		if lb.FamilyOf(r.Addr()) != family {
			continue
		}
		if r.Bits() == 0 {
			return nil
		}
		allowed = append(allowed, r.Masked())
		nodeAllowed = nodeAllowed || slices.ContainsFunc(node.Addresses, r.Contains)
	}
	if allowed == nil {
		return nil
	}
	for _, vip := range vips {
		if nodeAllowed && lb.FamilyOf(vip) == family {
			allowed = append(allowed, netip.PrefixFrom(vip, vip.BitLen()))
		}
	}
	slices.SortFunc(allowed, netip.Prefix.Compare)
	return &Sources{Networks: slices.Compact(allowed)}
}

// serving returns the endpoints of a port that serve, whether or not they get new connections.
func serving(places []place) []netip.AddrPort {
	var addrs []netip.AddrPort
	for _, at := range places {
		for _, ep := range at.endpoints {
			if ep.Ready || ep.Serving {
				addrs = append(addrs, netip.AddrPortFrom(ep.Addr, at.number))
			}
		}
	}
	if !slices.IsSortedFunc(addrs, netip.AddrPort.Compare) {
		slices.SortFunc(addrs, netip.AddrPort.Compare)
	}
	return slices.Compact(addrs)
}

// Only returns the plan reduced to one address family. One that has no other shares its ports.
func (s Service) Only(family lb.Family) Service {
	other := func(p Port) bool { return p.Family != family }
	if !slices.ContainsFunc(s.Ports, other) {
		return s
	}
	s.Ports = slices.DeleteFunc(slices.Clone(s.Ports), other)
	return s
}

// SoleOf returns the addresses in Sole that are of one family; none of a family without ports.
func (s Service) SoleOf(family lb.Family) []netip.Addr {
	if !slices.ContainsFunc(s.Ports, func(p Port) bool { return p.Family == family }) {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.Sole), func(a netip.Addr) bool { return lb.FamilyOf(a) != family })
}

// Families returns the address families of the plan's ports.
func (s Service) Families() []lb.Family {
	var families []lb.Family
	for _, p := range s.Ports {
		if !slices.Contains(families, p.Family) {
			families = append(families, p.Family)
		}
	}
	return families
}

// same reports whether two ports stand for the same port of the Service.
func (p Port) same(other Port) bool {
	return p.Family == other.Family && p.Name == other.Name && p.Protocol == other.Protocol
}

// At returns where a backend of the port listens.
func (p Port) At(b lb.Backend) netip.AddrPort {
	if p.Number != 0 {
		return netip.AddrPortFrom(b.Addr.Addr(), p.Number)
	}
	return b.Addr
}

func (p Port) id() portID { return portID{p.Family, p.Name, p.Protocol} }
