package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// relayed and notRelayed are the values of lb.AnnotationRelay that are no list of ports.
const relayed, notRelayed = "true", "false"

// proxyProtocols are the values of lb.AnnotationRelayProxyProtocol.
var proxyProtocols = map[string]int{"": 0, "v1": 1, "v2": 2}

// Relayed is what the node's relay has to know of a Service. It is also what the proxy sends the relay,
// as JSON.
type Relayed struct {
	Ports []RelayedPort `json:"ports"`
	// Affinity is how long a client address gets the same backend after its last connection; 0 for no
	// session affinity.
	Affinity time.Duration `json:"affinity,omitempty"`
	// Fresh is set if a client whose time of session affinity is over gets a backend at random: Scheduler has then
	// chosen for it by its address, as long as it was unknown.
	Fresh bool `json:"fresh,omitempty"`
	// Scheduler chooses among backends, by the relay's own counts if it counts; "" for Random.
	Scheduler Scheduler `json:"scheduler,omitempty"`
	// ProxyProtocol is the version of the PROXY protocol for backends, 1 or 2; 0 for none.
	ProxyProtocol int `json:"proxyProtocol,omitempty"`
}

// Size returns how many frontends and endpoints there are, those of each port counted, and one more; 1 for nil.
func (r *Relayed) Size() int {
	n := 1
	if r != nil {
		for _, p := range r.Ports {
			n += len(p.Frontends) + len(p.Cluster) + len(p.Local) + len(p.Ending)
		}
	}
	return n
}

// RelayedPort is one port of a relayed Service in one address family, of TCP or UDP.
type RelayedPort struct {
	Name      string            `json:"name,omitempty"`
	Protocol  lb.Protocol       `json:"protocol"`
	Frontends []RelayedFrontend `json:"frontends"`
	// Cluster and Local are the backends of the frontends with that policy.
	Cluster []RelayedBackend `json:"cluster,omitempty"`
	Local   []RelayedBackend `json:"local,omitempty"`
	// Ending are endpoints that get no new flows, but keep those that they have: others than the backends,
	// of a port of UDP. Connections of TCP end by themselves.
	Ending []netip.AddrPort `json:"ending,omitempty"`
}

// RelayWay is what the rules lead to the relay, or do not: one protocol in one address family.
type RelayWay struct {
	Family   lb.Family
	Protocol lb.Protocol
}

// RelayWays are all that there can be.
var RelayWays = []RelayWay{{lb.IPv4, lb.TCP}, {lb.IPv6, lb.TCP}, {lb.IPv4, lb.UDP}, {lb.IPv6, lb.UDP}}

// RelayedFrontend is what clients connect to. A node port has the unspecified address of its family.
type RelayedFrontend struct {
	Addr  netip.AddrPort `json:"addr"`
	Local bool           `json:"local,omitempty"`
	// Going is set if the frontend is not wanted any more, but the kernel may still lead from it to the
	// relay. Another Service that wants it comes first.
	Going bool `json:"going,omitempty"`
	// ExternalIP is set for one that yields to a node port of the same number at an address of the node.
	ExternalIP bool `json:"externalIP,omitempty"`
}

// RelayedBackend is an endpoint. Its weight is 1 to 100; 0 counts as 1.
type RelayedBackend struct {
	Addr   netip.AddrPort `json:"addr"`
	Weight uint8          `json:"weight,omitempty"`
}

// IsRelayed reports whether the rules send connections to a frontend of the port to the relay: those to
// ports that ask for it, where an endpoint may be used.
func (s Service) IsRelayed(p Port, f Frontend) bool {
	return s.Relay && p.Relay && (f.Action == ToCluster || f.Action == ToLocal)
}

// asksForRelay reports whether the value of lb.AnnotationRelay asks for the relay, rightly or not.
func asksForRelay(value string) bool { return value != "" && value != notRelayed }

// isRelayed reports whether a Service asks for the relay at a port: "true" does for all ports of TCP and UDP,
// and other values name them, as in "https, 8443". Version 1 of the PROXY protocol has no UDP.
func isRelayed(svc lb.Service, p lb.ServicePort) bool {
	return isRelayable(p) && (p.Protocol != lb.UDP || proxyProtocols[svc.RelayProxyProtocol] != 1) &&
		(svc.Relay == relayed ||
			slices.ContainsFunc(relayedNames(svc.Relay), func(name string) bool { return isNamed(name, p) }))
}

// isRelayable reports whether a relay can serve a port.
func isRelayable(p lb.ServicePort) bool { return p.Protocol == lb.TCP || p.Protocol == lb.UDP }

// maxRelayList is how many bytes a list of ports has at most. It is gone through for each port, and what is kept of
// an annotation is little more.
const maxRelayList = 250

// relayedNames returns the names and numbers of ports in a value of lb.AnnotationRelay.
func relayedNames(value string) []string {
	names := strings.Split(value, ",")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
	}
	return names
}

func isNamed(name string, p lb.ServicePort) bool {
	return name != "" && name == p.Name || name == strconv.Itoa(int(p.Port))
}

// unknownPort returns the first name in a value of lb.AnnotationRelay that no port of the Service has which can
// be relayed; ok is false if there is none.
func unknownPort(svc lb.Service) (name string, ok bool) {
	if svc.Relay == relayed {
		return "", false
	}
	for _, name := range relayedNames(svc.Relay) {
		if !slices.ContainsFunc(svc.Ports, func(p lb.ServicePort) bool { return isRelayable(p) && isNamed(name, p) }) {
			return name, true
		}
	}
	return "", false
}

// AnyRelayed reports whether RelayTable returns something.
func AnyRelayed(desired, applied Service) bool {
	return slices.ContainsFunc([]Service{desired, applied}, func(s Service) bool {
		return slices.ContainsFunc(s.Ports, func(p Port) bool {
			return slices.ContainsFunc(p.Frontends, func(f Frontend) bool { return s.IsRelayed(p, f) })
		})
	})
}

// RelayTable returns what the relay has to know of a Service: what is wanted, and, of frontends that
// are not wanted any more, what the kernel is confirmed to hold, as it may still lead to the relay. It
// returns nil if nothing is relayed.
func RelayTable(desired, applied Service) *Relayed {
	had := map[relayedAt]bool{}
	ports := append(desired.relayedPorts(had, false), applied.relayedPorts(had, true)...)
	if len(ports) == 0 {
		return nil
	}
	from := desired
	if !desired.Relay {
		from = applied
	}
	table := &Relayed{Ports: ports, Affinity: from.AffinityTimeout, Scheduler: from.Scheduler,
		ProxyProtocol: from.ProxyProtocol}
	if table.Scheduler == Random {
		table.Scheduler = ""
	}
	if table.Scheduler == "" && from.AffinityTimeout > 0 { // for clients that the relay does not remember
		table.Scheduler, table.Fresh = SourceHash, true
	}
	return table
}

// relayedAt is a frontend.
type relayedAt struct {
	protocol lb.Protocol
	addr     netip.AddrPort
}

// relayedPorts returns the ports with relayed frontends that had does not have, and adds these to it.
func (s Service) relayedPorts(had map[relayedAt]bool, going bool) (ports []RelayedPort) {
	for _, p := range s.Ports {
		var frontends []RelayedFrontend
		for _, f := range p.Frontends {
			addr := f.Addr
			if f.Kind == NodePort {
				addr = map[lb.Family]netip.Addr{lb.IPv4: netip.IPv4Unspecified(), lb.IPv6: netip.IPv6Unspecified()}[p.Family]
			}
			at := relayedAt{p.Protocol, netip.AddrPortFrom(addr, f.Port)}
			if s.IsRelayed(p, f) && !had[at] {
				had[at] = true
				frontends = append(frontends, RelayedFrontend{Addr: at.addr, Local: f.Action == ToLocal,
					Going: going || f.Lingering, ExternalIP: f.Kind == ExternalIP})
			}
		}
		if len(frontends) == 0 {
			continue
		}
		port := RelayedPort{Name: p.Name, Protocol: p.Protocol, Frontends: frontends}
		if slices.ContainsFunc(frontends, func(f RelayedFrontend) bool { return !f.Local }) {
			port.Cluster = p.relayed(p.Backends.Cluster)
		}
		if slices.ContainsFunc(frontends, func(f RelayedFrontend) bool { return f.Local }) {
			port.Local = p.relayed(p.Backends.Local)
		}
		port.Ending = p.ending(port)
		ports = append(ports, port)
	}
	return ports
}

// ending returns the endpoints that still serve and are no backends of the relayed port.
func (p Port) ending(of RelayedPort) (all []netip.AddrPort) {
	backends := map[netip.AddrPort]bool{}
	for _, b := range slices.Concat(of.Cluster, of.Local) {
		backends[b.Addr] = true
	}
	for _, at := range p.Serving {
		if !backends[at] {
			all = append(all, at)
		}
	}
	return all
}

func (p Port) relayed(from []lb.Backend) []RelayedBackend {
	to := make([]RelayedBackend, len(from))
	for i, b := range from {
		to[i] = RelayedBackend{p.At(b), b.Weight}
	}
	return to
}

// RelayIgnored says why a proxy does not relay connections to a Service as the Service asks for, "" if
// it does. hasRelay is set if the node's rules can send connections to a relay.
func RelayIgnored(svc lb.Service, hasRelay bool) string {
	asks := asksForRelay(svc.Relay)
	_, known := proxyProtocols[svc.RelayProxyProtocol]
	unknown, wrong := unknownPort(svc)
	switch {
	case asks && len(svc.Relay) > maxRelayList:
		return fmt.Sprintf("annotation %s: %.80q is longer than %d bytes; write true for all ports, or split the "+
			"Service; connections are not relayed", lb.AnnotationRelay, svc.Relay, maxRelayList)
	case !asks && svc.RelayProxyProtocol != "":
		return fmt.Sprintf("annotation %s: it needs annotation %s: \"true\"; backends get no PROXY protocol",
			lb.AnnotationRelayProxyProtocol, lb.AnnotationRelay)
	case !asks:
		return ""
	case !hasRelay:
		return fmt.Sprintf("annotation %s: this node has no relay (value relay.enabled of the chart), or can have none "+
			"in iptables mode, as the proxy's log says; connections go straight to endpoints", lb.AnnotationRelay)
	case !known:
		return fmt.Sprintf("annotation %s: %.80q is neither v1 nor v2; connections are not relayed",
			lb.AnnotationRelayProxyProtocol, svc.RelayProxyProtocol)
	case !slices.ContainsFunc(svc.Ports, isRelayable):
		return fmt.Sprintf("annotation %s: only TCP and UDP are relayed, and the Service has no port of these",
			lb.AnnotationRelay)
	case wrong && unknown == "":
		return fmt.Sprintf("annotation %s: %.80q has a comma too many; connections are not relayed", lb.AnnotationRelay,
			svc.Relay)
	case wrong:
		return fmt.Sprintf("annotation %s: %.80q is neither true, false nor the name or number of a port of TCP or UDP "+
			"of the Service; connections are not relayed", lb.AnnotationRelay, unknown)
	}
	return ""
}

// RelayLeavesUDP says why the relay leaves the UDP ports of a relayed Service to the rules; "" if it does not. tcpOnly
// is set if the node relays no UDP, iptables if it is in a mode that cannot.
func RelayLeavesUDP(svc lb.Service, planned Service, tcpOnly, iptables bool) string {
	asks := func(p lb.ServicePort) bool {
		svc := svc
		svc.RelayProxyProtocol = ""
		return p.Protocol == lb.UDP && isRelayed(svc, p)
	}
	switch {
	case !planned.Relay || !slices.ContainsFunc(svc.Ports, asks):
		return ""
	case proxyProtocols[svc.RelayProxyProtocol] == 1:
		return fmt.Sprintf("annotation %s: v1 of the PROXY protocol has no UDP, so UDP goes straight to endpoints; v2 has it",
			lb.AnnotationRelayProxyProtocol)
	case iptables:
		return fmt.Sprintf("annotation %s: only proxies in nftables mode relay UDP; it goes straight to endpoints",
			lb.AnnotationRelay)
	case tcpOnly:
		return fmt.Sprintf("annotation %s: UDP goes straight to endpoints, as the node does not relay it "+
			"(value relay.udp of the chart), or its kernel cannot limit it, as the proxy's log says", lb.AnnotationRelay)
	}
	return ""
}

// RelayLeavesVRFs says that connections from VRFs are not relayed although the Service is, "" if the node has no VRF
// that a router is in.
func RelayLeavesVRFs(planned Service, node Node) string {
	if !planned.Relay || len(planned.VIPs) == 0 || !node.VRFs {
		return ""
	}
	return fmt.Sprintf("annotation %s: connections that come in through a VRF go straight to endpoints, as the relay's "+
		"sockets are in none", lb.AnnotationRelay)
}

// RelayLease is for how long the rules lead to the relay, unless the proxy renews that.
const RelayLease = 3 * time.Second

// maxRelayed is how many pairs of port and endpoint a relayed Service has at most: the relay is told all of
// them at each change.
const maxRelayed = 4096

// MaxRelayedTogether is how many frontends and endpoints the relayed Services of a namespace have at most, those of
// each port counted, and a quarter more of those that grow: relay and proxy hold all of them.
const MaxRelayedTogether = 1 << 18

// MaxRelayedOfNode is the same of all namespaces.
const MaxRelayedOfNode = 1 << 20

// RelayNeeds returns how many of these the relay is told of a Service.
func RelayNeeds(s Service) (n int) {
	for _, p := range s.Ports {
		var cluster, local int
		for _, f := range p.Frontends {
			switch {
			case !s.IsRelayed(p, f):
				continue
			case f.Action == ToLocal:
				local = len(p.Backends.Local)
			default:
				cluster = len(p.Backends.Cluster)
			}
			n++
		}
		n += cluster + local
		if cluster+local > 0 {
			n += max(0, len(p.Serving)-cluster-local) // those that end, about
		}
	}
	return n
}

// RefuseRelayFor says what has no room for a Service of which the relay would be told so much.
func RefuseRelayFor(needs int, lack Lack, of *Shares) string {
	if lack == NodeFull {
		return fmt.Sprintf("annotation %s: the Service has %d frontends and endpoints, those of each port counted, for "+
			"which the node has no room: of the %d of new Services that it relays for all namespaces, one gets at most "+
			"%d times as many as are then left for others; connections go straight to endpoints", lb.AnnotationRelay, needs,
			of.forNew(), partOfNew)
	}
	return fmt.Sprintf("annotation %s: the Service has %d frontends and endpoints, those of each port counted, and with "+
		"the other relayed ones of its namespace more than the %d that are relayed together; connections go straight to "+
		"endpoints", lb.AnnotationRelay, needs, of.Limit())
}

// RefuseRelay says why a node does not relay connections to a Service with these endpoints, "" if it does.
// The relay connects as the node itself. So it connects to pods only: at another node, a VIP or a cluster
// IP its connections could come to a relay again, and again, and the node's own daemons may trust them.
func RefuseRelay(endpoints []lb.Slice, scope ProbeScope) string {
	if n := deliveries(endpoints); n > maxRelayed {
		return fmt.Sprintf("annotation %s: the Service has %d pairs of port and endpoint, and at most %d are relayed; "+
			"connections go straight to endpoints", lb.AnnotationRelay, n, maxRelayed)
	}
	for _, slice := range endpoints {
		for _, ep := range slice.Endpoints {
			if whose := scope.foreign(ep.Addr); whose != "" {
				return fmt.Sprintf("annotation %s: the endpoint %s is %s, and the relay connects only to pods with an address "+
					"of their own; connections go straight to endpoints", lb.AnnotationRelay, ep.Addr, whose)
			}
		}
	}
	return ""
}
