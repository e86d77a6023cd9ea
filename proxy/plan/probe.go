package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What probes may cost.
const (
	// MaxProbed is how many endpoints of one Service a node asks, MaxProbedOfNode those of all Services.
	// Each has one question under way at most.
	MaxProbed, MaxProbedOfNode = 64, 512
	// Endpoints of one Service are asked so far apart on average, those of all Services so far, and each
	// endpoint's address by so many nodes, whatever they ask there.
	apartInService, apartOnNode, apartAmongNodes = 5 * time.Millisecond, time.Millisecond, 10 * time.Millisecond
	// maxProbeInterval is the longest time between two questions to one endpoint.
	maxProbeInterval = 10 * time.Second
	// maxConnectTime is how long a backend has to take a connection at most, AnswerTime how long it has
	// to answer a request: as long as a kubelet gives it.
	maxConnectTime, AnswerTime = time.Second, time.Second
	// leftOutInterval is the least time between two questions to an endpoint that is left out, until it
	// answers one: conntrack keeps each failed connection for two minutes.
	leftOutInterval = time.Second
)

// Probing is what a node asks for one Service; it asks nothing without targets.
type Probing struct {
	Probe lb.Probe
	// Targets are the endpoints, sorted, each address once.
	Targets []netip.AddrPort
	// Nodes is how many nodes ask them.
	Nodes int
}

// Equal reports whether both ask the same.
func (p Probing) Equal(other Probing) bool {
	return p.Probe == other.Probe && p.Nodes == other.Nodes && slices.Equal(p.Targets, other.Targets)
}

// Interval returns the time between two questions to an endpoint: the one that is wanted, or longer if
// the Service, the node or the cluster would ask too much. ofNode is how many endpoints the node asks. One
// in share questions that the endpoint's address gets may be this one: 1 if nothing else is asked there.
func (p Probing) Interval(wanted time.Duration, ofNode, share int) time.Duration {
	return min(max(wanted, apartInService*time.Duration(len(p.Targets)), apartOnNode*time.Duration(ofNode),
		apartAmongNodes*time.Duration(p.Nodes)*time.Duration(share)), maxProbeInterval)
}

// ConnectTime returns how long a connection may take. Two questions in a row fail within less than
// three intervals, whenever the fault comes.
func ConnectTime(interval time.Duration) time.Duration { return min(interval/5*4, maxConnectTime) }

// ProbeScope says which addresses a node asks: those of pods, as far as can be told. Who may write
// EndpointSlices can name any address there, and shall not have nodes connect in their own name to what is known to be
// none. Which networks pods are in is not known: a network plugin need not go by spec.podCIDRs.
type ProbeScope struct {
	// Own are the node's own addresses.
	Own []netip.Addr
	// Others has what belongs to Nodes, API servers, routers, pools and cluster IPs.
	Others ExternalIPs
}

// Equal reports whether both allow the same.
func (s ProbeScope) Equal(other ProbeScope) bool {
	return slices.Equal(s.Own, other.Own) && s.Others.Equal(other.Others)
}

// Allows reports whether a node asks an endpoint.
func (s ProbeScope) Allows(ep lb.Endpoint) bool {
	return ep.Ready && ep.Node != "" && s.foreign(ep.Addr) == ""
}

// foreign says whose an address is that can be no pod's, "" if it can be one.
func (s ProbeScope) foreign(addr netip.Addr) string {
	addr = addr.Unmap()
	switch {
	case !addr.IsGlobalUnicast():
		return "no unicast address of a network"
	case slices.Contains(s.Own, addr) || s.Others.Nodes.has(addr):
		return "a node's"
	case slices.Contains(s.Others.APIServers, addr):
		return "an API server's"
	case slices.Contains(s.Others.Routers, addr):
		return "a router's"
	case s.Others.pool(addr) != "":
		return "in a pool"
	case slices.ContainsFunc(s.Others.Networks, func(n netip.Prefix) bool { return n.Contains(addr) }):
		return "a cluster IP"
	}
	return ""
}

// has reports whether a Node has an address.
func (n *Nodes) has(addr netip.Addr) bool {
	if n == nil {
		return false
	}
	_, has := n.addresses[addr]
	return has
}

// NewProbing returns what a node asks for a Service: its ready endpoints, at the target of its first TCP
// port. It asks nothing, and says why, if it cannot do as the Service asks.
func NewProbing(svc lb.Service, endpoints []lb.Slice, scope ProbeScope, nodes int) (Probing, *lb.Refusal) {
	if why := svc.RefuseProbe(); why != nil || svc.Probe == (lb.Probe{}) || len(svc.VIPs()) == 0 {
		return Probing{}, why
	}
	none := func(format string, args ...any) (Probing, *lb.Refusal) {
		return Probing{}, lb.Refuse(lb.ReasonProbeRefused, "annotation %s: %.80q: %s; nodes do not probe its endpoints",
			lb.AnnotationProbe, svc.Probe.String(), fmt.Sprintf(format, args...))
	}
	first := slices.IndexFunc(svc.Ports, func(p lb.ServicePort) bool { return p.Protocol == lb.TCP })
	targets, ready := scope.targets(svc.Ports[first], endpoints)
	switch {
	case len(targets) > MaxProbed:
		return none("the Service has %d ready endpoints, and nodes probe at most %d of one Service", len(targets), MaxProbed)
	case len(targets) == 0 && ready > 0:
		return none("none of the %d ready endpoints is a pod with an address of its own, and nodes probe no others", ready)
	}
	return Probing{svc.Probe, targets, nodes}, nil
}

// targets returns the endpoints of a port that are asked, sorted, and how many are ready.
func (s ProbeScope) targets(port lb.ServicePort, endpoints []lb.Slice) (targets []netip.AddrPort, ready int) {
	for _, slice := range endpoints {
		at := slices.IndexFunc(slice.Ports, func(p lb.SlicePort) bool {
			return p.Name == port.Name && p.Protocol == port.Protocol
		})
		if at < 0 {
			continue
		}
		for _, ep := range slice.Endpoints {
			if ep.Ready {
				ready++
			}
			if s.Allows(ep) {
				targets = append(targets, netip.AddrPortFrom(ep.Addr, slice.Ports[at].Port))
			}
		}
	}
	slices.SortFunc(targets, netip.AddrPort.Compare)
	return slices.CompactFunc(targets, func(a, b netip.AddrPort) bool { return a.Addr() == b.Addr() }), ready
}

// LeftOut says of endpoints that do not answer a node's probes why.
type LeftOut map[netip.Addr]string

// Answering returns the plan without the endpoints that do not answer the node's probes. A set of which
// fewer than half would be left stays whole, as Envoy has it (panic threshold), and is named: so a probe
// that is wrong takes no endpoint, and a node with a fault of its own leaves out none.
func (s Service) Answering(left LeftOut) (answering Service, ignored []lb.TrafficPolicy) {
	if len(left) == 0 {
		return s, nil
	}
	answering = s.thinned(func(list []lb.Backend, policy lb.TrafficPolicy) []lb.Backend {
		kept, panics := left.without(list)
		if panics && (policy == lb.Cluster || s.Policy == lb.Local) && !slices.Contains(ignored, policy) {
			ignored = append(ignored, policy)
		}
		return kept
	})
	return answering, ignored
}

// without returns the backends that are not left out; all of them, and panics, if that would be fewer
// than half.
func (left LeftOut) without(all []lb.Backend) (kept []lb.Backend, panics bool) {
	out := func(b lb.Backend) bool { _, is := left[b.Addr.Addr()]; return is && b.Ready }
	if !slices.ContainsFunc(all, out) {
		return all, false
	}
	kept = slices.DeleteFunc(slices.Clone(all), out)
	if 2*len(kept) < len(all) {
		return all, true
	}
	return kept, false
}

// Uses reports whether the plan delivers to an endpoint.
func (s Service) Uses(addr netip.Addr) bool {
	has := func(b lb.Backend) bool { return b.Addr.Addr() == addr }
	return slices.ContainsFunc(s.Ports, func(p Port) bool {
		return slices.ContainsFunc(p.Backends.Cluster, has) || slices.ContainsFunc(p.Backends.Local, has)
	})
}

// When an endpoint is left out, and when it is used again.
const (
	// fall questions in a row that fail have an endpoint left out, rise ones that are answered bring it
	// back, but not before a while has passed since the first answer: probeHold at first, and twice as
	// long with each time that it was left out within probeMemory, up to maxProbeHold.
	fall, rise              = 2, 3
	probeHold, maxProbeHold = time.Second, 30 * time.Second
	probeMemory             = 2 * time.Minute
)

// Answer is what became of one question.
type Answer struct {
	// Failed says why the endpoint did not answer; "" if it did.
	Failed string
	// Unknown is set if the node itself was too slow to tell. Such an answer decides nothing.
	Unknown bool
}

// Record is what a node remembers of an endpoint's answers. The zero value is that of one that has not
// been asked: it is used, as unknown is not absent.
type Record struct {
	// Out says why the endpoint is left out; "" if it is used.
	Out          string
	failed, held int // failures in a row while it is used, and how often it was left out of late
	answered     int // answers in a row while it is left out
	left, until  time.Time
}

// After returns the record after one more answer.
func (r Record) After(now time.Time, a Answer) Record {
	switch {
	case a.Unknown:
	case r.Out == "" && a.Failed == "":
		r.failed = 0
	case r.Out == "":
		if r.failed++; r.failed < fall {
			break
		}
		if now.Sub(r.left) > probeMemory {
			r.held = 0
		}
		r.Out, r.failed, r.answered, r.left, r.held = a.Failed, 0, 0, now, r.held+1
	case a.Failed != "":
		r.answered = 0
	default:
		if r.answered++; r.answered == 1 {
			r.until = now.Add(min(probeHold<<min(r.held-1, 10), maxProbeHold))
		}
		if r.answered >= rise && !now.Before(r.until) {
			r.Out = ""
		}
	}
	return r
}

// Wait returns how long after a question the next one comes.
func (r Record) Wait(interval time.Duration) time.Duration {
	if r.Out != "" && r.answered == 0 {
		return max(interval, leftOutInterval)
	}
	return interval
}
