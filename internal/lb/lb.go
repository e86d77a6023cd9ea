// Package lb holds the types that Landfall's programs share: Services, backends, nodes, pools and
// the reasons of refusals.
//
// It has only values and pure functions: no I/O, no clock, no logger. Values are parsed once, when
// they enter a program, and trusted afterwards.
package lb

import (
	"cmp"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// Key names a namespaced object.
type Key struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// String returns namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// SeenFrom names the Service in a message for Services of a namespace: only its own namespace learns
// the name.
func (k Key) SeenFrom(namespace string) string {
	if k.Namespace == namespace {
		return "Service " + k.String()
	}
	return "a Service of another namespace"
}

// Compare orders keys by namespace, then by name.
func (k Key) Compare(other Key) int {
	return cmp.Or(strings.Compare(k.Namespace, other.Namespace), strings.Compare(k.Name, other.Name))
}

// Sum returns a number that tells keys apart where a mistake, which is unlikely, does no harm; never 0.
func (k Key) Sum() uint32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(k.String()))
	return max(h.Sum32(), 1)
}

// Protocol is a transport protocol as the Kubernetes API spells it.
type Protocol string

// The protocols of a Service port.
const (
	TCP  Protocol = "TCP"
	UDP  Protocol = "UDP"
	SCTP Protocol = "SCTP"
)

// Lower returns the protocol in lower case, as rules and chain names spell it.
func (p Protocol) Lower() string { return strings.ToLower(string(p)) }

// Family is an IP address family: "IPv4" or "IPv6", as the Kubernetes API spells it.
type Family string

// The address families.
const (
	IPv4 Family = "IPv4"
	IPv6 Family = "IPv6"
)

// FamilyOf returns the family of addr. IPv4-mapped IPv6 addresses count as IPv6: unmap them first.
func FamilyOf(addr netip.Addr) Family {
	if addr.Is4() {
		return IPv4
	}
	return IPv6
}

// FamilyPolicy is spec.ipFamilyPolicy: whether a Service prefers or requires two families.
type FamilyPolicy string

// The family policies.
const (
	SingleStack      FamilyPolicy = "SingleStack"
	PreferDualStack  FamilyPolicy = "PreferDualStack"
	RequireDualStack FamilyPolicy = "RequireDualStack"
)

// TrafficPolicy says which endpoints a frontend may use: externalTrafficPolicy and
// internalTrafficPolicy.
type TrafficPolicy string

// The traffic policies.
const (
	Cluster TrafficPolicy = "Cluster"
	Local   TrafficPolicy = "Local"
)

// ServiceType is spec.type of a Service.
type ServiceType string

// The Service types.
const (
	ClusterIP    ServiceType = "ClusterIP"
	NodePort     ServiceType = "NodePort"
	LoadBalancer ServiceType = "LoadBalancer"
	ExternalName ServiceType = "ExternalName"
)

// Service is one Service, with the fields that Landfall uses.
type Service struct {
	Key     Key
	UID     string
	Version string // metadata.resourceVersion, for conditional writes
	Created time.Time
	// Deleting is set once the object carries a deletion timestamp, Finalizer while it carries the
	// finalizer FinalizerCleanup. Only the tables of controller and speakers fill them; only the
	// controller's fills Families, FamilyPolicy and Request.
	Deleting, Finalizer bool
	// StatusWriter is the program beside Landfall's controller that last wrote addresses into the
	// status, by its field manager; "" if there is none. Only the controller's table fills it.
	StatusWriter string
	// Intruding says whether the controller has confirmed what the Service holds: see Intrudes. Only the
	// proxies' table fills it.
	Intruding Intrusion
	// Headless is set by the label LabelHeadless, which takes the Service down. Proxies do not see it.
	Headless bool

	Type         ServiceType
	Class        string // spec.loadBalancerClass; "" when unset
	ClusterIPs   []netip.Addr
	Families     []Family     // spec.ipFamilies
	FamilyPolicy FamilyPolicy // spec.ipFamilyPolicy
	// ExternalIPs are addresses that an administrator routes to nodes without Landfall. They hold
	// nothing of a pool.
	ExternalIPs []netip.Addr
	// Unkept counts what the Service has beyond what is kept of it.
	Unkept Unkept
	// Listed is what ConditionExternalIPs says; nil without it. Speakers do not read it.
	Listed Listing
	// AsRequested is ConditionAsRequested; zero without it. Speakers do not read it.
	AsRequested    Condition
	Ports          []ServicePort
	ExternalPolicy TrafficPolicy // Cluster unless the Service says Local
	// Only the proxies' table fills what follows, up to Forwarding.
	InternalPolicy      TrafficPolicy
	SourceRanges        []netip.Prefix // spec.loadBalancerSourceRanges
	InvalidRange        string         // the first of them that cannot be read, quoted; "" if all can
	HealthCheckNodePort uint16         // 0 if there is none
	AffinityTimeout     time.Duration  // session affinity by client IP; 0 if there is none
	Scheduler           string         // annotation landfall.dev/scheduler; "" when unset
	Failover            string         // annotation landfall.dev/external-failover-policy; "" when unset
	Weights             Weights        // annotation landfall.dev/weights
	InvalidWeights      string         // why it cannot be read; "" if it can
	Relay               string         // annotation landfall.dev/relay; "" when unset
	RelayProxyProtocol  string         // annotation landfall.dev/relay-proxy-protocol; "" when unset
	Forwarding          string         // annotation landfall.dev/forwarding; "" when unset

	// Selector is spec.selector as labels.Set.String writes it; "" without one, and for one of more than
	// 256 bytes. Only the proxies' table fills it.
	Selector string
	// Probe is the annotation landfall.dev/probe, InvalidProbe why it cannot be read; "" if it can. Only the
	// tables of proxies and speakers fill them.
	Probe        Probe
	InvalidProbe string

	// Request is what the Service requests from the address pools.
	Request Request
	// Labels are the object's own. Only the tables of controller and speakers fill them, Conditions
	// and Announcements.
	Labels labels.Set
	// OnConflict is the annotation landfall.dev/on-address-conflict, unparsed; only the speakers'
	// table fills it.
	OnConflict string
	// Ingress is status.loadBalancer.ingress: the addresses that the Service holds, as ReadIngress reads
	// them. Unread counts those that it leaves out, and Hostnames the entries that show no address but a hostname.
	Ingress   []Ingress
	Unread    int
	Hostnames int
	// Conditions are those conditions of the status that Landfall owns (type landfall.dev/…), without
	// ConditionExternalIPs.
	Conditions []Condition
	// FalseSince has, by type, since when those conditions are false that are; nil if all are true. Only
	// the controller's table fills it.
	FalseSince map[string]time.Time
	// AllocatedFrom has AnnotationAllocatedFrom and AnnotationAllocatedFromOld, as far as they are
	// set: the pool of the addresses, as MetalLB or Landfall wrote it. Only the controller's table
	// fills it.
	AllocatedFrom map[string]string
	// Announcements is the annotation landfall.dev/announcements, unparsed: see DecodeAnnouncements.
	Announcements string
}

// VIPs returns the addresses of the Service that nodes deliver: all except those of ipMode Proxy;
// none of a Service that is being deleted or is taken down.
func (s *Service) VIPs() []netip.Addr {
	if s.Type != LoadBalancer || s.Deleting || s.Headless {
		return nil
	}
	var vips []netip.Addr
	for _, in := range s.Ingress {
		if in.Mode != IPModeProxy {
			vips = append(vips, in.Addr)
		}
	}
	return vips
}

// Unkept counts ports, external IPs and source ranges that a Service has and that programs do not keep, as they are
// more than one Service may have: see proxy/plan.
type Unkept struct{ Ports, ExternalIPs, SourceRanges int }

// ServicePort is one port of a Service.
type ServicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
	NodePort uint16 // 0 when there is none
}

// Request is what a Service requests, unparsed, so that a refusal can quote it.
type Request struct {
	// Addresses come from the annotation landfall.dev/loadBalancerIPs or spec.loadBalancerIP.
	Addresses []string
	// Pool comes from the annotation landfall.dev/address-pool.
	Pool string
	// Share is the key of Services that share an address, from the annotation
	// landfall.dev/allow-shared-ip.
	Share string
	// Selector is the Service's own selector in a canonical form, if Share is set; "" if it has none.
	Selector string
	// PerFamily comes from the annotation landfall.dev/addresses-per-family.
	PerFamily string
	// Mode comes from the annotation landfall.dev/ip-mode.
	Mode string
	// WhenOutside comes from the annotation landfall.dev/when-outside.
	WhenOutside string
	// Disagreement names two fields or annotations that request different things, with their values;
	// "" if there are none.
	Disagreement string
}

// IPMode is status.loadBalancer.ingress[].ipMode (KEP-1860).
type IPMode string

// The IP modes; the empty mode means VIP. Router is that of KEP-6272: as VIP, but what would be dropped or
// refused because there are no endpoints is routed on.
const (
	IPModeVIP    IPMode = "VIP"
	IPModeProxy  IPMode = "Proxy"
	IPModeRouter IPMode = "Router"
)

// Ingress is one address that a Service holds.
type Ingress struct {
	Addr netip.Addr
	Mode IPMode
}

// Slice is one EndpointSlice of a Service.
type Slice struct {
	Key       Key
	Service   Key
	Family    Family
	Ports     []SlicePort
	Endpoints []Endpoint
	// Weight is the annotation landfall.dev/weight, 1 to 100, 0 if there is none; InvalidWeight is why it
	// cannot be read, "" if it can.
	Weight        uint8
	InvalidWeight string
	// Triggered is the time of the change for which the slice was last written, as its writer reports;
	// zero if unknown.
	Triggered time.Time
	// More is set of the last one in the list of a Service that has more than MaxSlices. That one stands for those
	// that the list does not have, and has nothing else but the Service's key.
	More bool
}

// MaxSlices is how many EndpointSlices one Service may have. Kubernetes' own controller puts 100 endpoints into each,
// so it needs 1,311 for the most endpoints that a proxy serves, 131,072 with one port. There is room for three times as
// many: slices that are filled to a third, or 4,096 of one endpoint. A list of so many takes less time to copy than to
// plan.
const MaxSlices = 4096

// SlicePort is one port that all endpoints of a slice serve.
type SlicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// Endpoint is one endpoint of a slice with its conditions. Unset conditions have the API's
// defaults: ready and serving are true, terminating is false.
type Endpoint struct {
	Addr        netip.Addr
	Node        string // "" when unknown
	Ready       bool
	Serving     bool
	Terminating bool
	// Pod is the name of the pod, of the slice's namespace, behind an endpoint that is neither ready nor
	// terminating; "" if the slice names none, and for other endpoints, where nobody asks.
	Pod string
	// ForZones and ForNodes are the topology hints (KEP-2433, KEP-3015): the zones and nodes whose
	// clients should use the endpoint.
	ForZones []string
	ForNodes []string
}

// Node is one Node object, with the fields that Landfall uses.
type Node struct {
	Name      string
	Addresses []netip.Addr // InternalIP addresses, in the order of the status
	// ExternalAddresses are those of type ExternalIP.
	ExternalAddresses []netip.Addr
	PodCIDRs          []netip.Prefix
	Labels            labels.Set
	// Leaving says why the node is about to leave or must not attract external traffic; "" if it
	// stays.
	Leaving Reason
	// Cordoned is spec.unschedulable: the node takes no new pods.
	Cordoned bool
	// NetworkUnavailable is set while the Node has the condition NetworkUnavailable, NotReady while its
	// condition Ready says otherwise. Without such a condition neither is set.
	NetworkUnavailable, NotReady bool
	// Unassignable are the addresses that the node's speaker reports as unusable for Services; only
	// the controller sets it.
	Unassignable []Unassignable
}

// Pool is one IPAddressPool.
type Pool struct {
	Name       string
	UID        string
	Created    time.Time
	Generation int64
	Version    string // metadata.resourceVersion
	Labels     labels.Set
	Ranges     []Range
	// AutoAssign is false for pools that serve only Services that request them.
	AutoAssign bool
	// Excluded are never assigned.
	Excluded []Range
	// AvoidBuggy excludes IPv4 addresses that end in .0 or .255.
	AvoidBuggy bool
	// Allocation restricts and orders the pool; nil if it serves every Service.
	Allocation *Allocation
	// BadSelector says why a selector of Allocation cannot be read, and selects nothing; nil if all can.
	BadSelector *Refusal
	// PerNamespace limits the addresses of one family that the Services of one namespace hold; 0 for
	// no limit.
	PerNamespace int
	Reservations []Reservation
	// ShareAcross lets Services of different namespaces share an address.
	ShareAcross bool
	// Quarantine is how long a freed address stays reserved for the Service that held it; negative for
	// ever.
	Quarantine time.Duration
	// ProbeAhead is how many of the next free addresses of each family speakers probe ahead often; 0 for
	// none, and see Ahead.
	ProbeAhead int
	// Problem is set when the specification cannot be used although the API server took it.
	Problem *Refusal
	// Status is the status as last written, so that the controller writes it only when it changes.
	Status PoolStatus
	// Since has, by type, since when conditions have their status.
	Since map[string]time.Time
}

// ManyAhead is how many of the next free IPv4 addresses of a pool speakers probe ahead at least, beyond
// Pool.ProbeAhead seldom, for many new Services at once. For each IPv6 address a node has to join a
// multicast group, which costs switches memory, so there are no more of these than are probed often.
const ManyAhead = 512

// Ahead returns how many of the next free addresses of a family speakers probe ahead, often or seldom.
func (p Pool) Ahead(family Family) int {
	if p.ProbeAhead > 0 && family == IPv4 {
		return max(p.ProbeAhead, ManyAhead)
	}
	return p.ProbeAhead
}

// Allocation selects the Services that a pool serves, and orders the pool among others.
type Allocation struct {
	// Priority orders pools, the lowest first and 0 last.
	Priority int
	// Namespaces and NamespaceSelectors are alternatives; every namespace if both are empty.
	Namespaces         []string
	NamespaceSelectors []labels.Selector
	// ServiceSelectors are alternatives; every Service if empty.
	ServiceSelectors []labels.Selector
}

// Reservation keeps addresses of a pool for one Service or, with an empty Name, for the Services of
// a namespace.
type Reservation struct {
	Range           Range
	Namespace, Name string
}

// Released is an address in quarantine for the Service that held it last.
type Released struct {
	Addr    netip.Addr
	Service Key
	At      time.Time // when the Service freed it; whole seconds, UTC
}

// Namespace is one Namespace.
type Namespace struct {
	Name   string
	Labels labels.Set
}

// PendingReservation is a reservation in progress: a controller is about to assign addresses to a
// Service. A pool shows it in status.claims. It is valid for one version of the Service, and ends
// when the Service shows the addresses.
type PendingReservation struct {
	Service      Key
	UID, Version string
	Addresses    []netip.Addr // all addresses that the Service will hold
}

// PoolStatus is the status of an IPAddressPool. Counts are decimal strings, because the size of an
// IPv6 range can exceed an int64.
type PoolStatus struct {
	AssignedIPv4, AssignedIPv6       string
	AvailableIPv4, AvailableIPv6     string
	QuarantinedIPv4, QuarantinedIPv6 string
	// Released are the addresses in quarantine, the newest if there are many, sorted by address.
	Released []Released
	// Pending are the reservations in progress. Writer is the controller that wrote them last; "" if
	// none did.
	Pending []PendingReservation
	Writer  string
	// Next are the addresses that are handed out next, as disjoint ranges in ascending order.
	Next       []Range
	Conditions []Condition
}

// L2Advertisement announces addresses of pools over ARP and NDP.
type L2Advertisement struct {
	Name       string
	Generation int64
	// Pools are pool names; all pools if both Pools and PoolSelectors are empty.
	Pools         []string
	PoolSelectors []labels.Selector
	// ServiceSelectors are alternatives; all Services if empty.
	ServiceSelectors []labels.Selector
	// NodeSelectors are alternatives; all nodes if empty.
	NodeSelectors []labels.Selector
	// Preferred adds weights to nodes; the heaviest node becomes the owner.
	Preferred []Preference
	// BadSelector says why a selector cannot be read, and selects nothing; nil if all can.
	BadSelector *Refusal
	// Interfaces are exact interface names; every suitable interface if empty.
	Interfaces []string
	// Conditions are the conditions as last written.
	Conditions []Condition
}

// Preference adds to the weight of the nodes that it selects.
type Preference struct {
	Weight uint16 // 1 to 100
	Nodes  labels.Selector
}

// Selects reports whether the advertisement selects the pool.
func (a L2Advertisement) Selects(pool Pool) bool {
	if len(a.Pools) == 0 && len(a.PoolSelectors) == 0 {
		return true
	}
	return slices.Contains(a.Pools, pool.Name) ||
		slices.ContainsFunc(a.PoolSelectors, func(s labels.Selector) bool { return s.Matches(pool.Labels) })
}

// Condition is a status condition; the writer keeps the transition time of a status that does not
// change.
type Condition struct {
	Type    string
	Status  bool
	Reason  Reason
	Message string
	// Generation is observedGeneration: the metadata.generation that the condition describes; 0 on
	// objects without one.
	Generation int64
}

// FindCondition returns the condition of a type; ok is false if there is none.
func FindCondition(all []Condition, kind string) (c Condition, ok bool) {
	i := slices.IndexFunc(all, func(c Condition) bool { return c.Type == kind })
	if i < 0 {
		return c, false
	}
	return all[i], true
}

// The condition types on Services and pools.
const (
	// ConditionAssigned on a Service: it holds the addresses that it requests.
	ConditionAssigned = "landfall.dev/Assigned"
	// ConditionAnnounced on a Service: a node answers for each of its addresses.
	ConditionAnnounced = "landfall.dev/Announced"
	// ConditionExternalIPs on a Service: since when it lists what of its external IPs and ports.
	ConditionExternalIPs = "landfall.dev/ExternalIPs"
	// ConditionAsRequested on a Service: false while a node serves it in another way than its annotations request.
	// It is there only then; see proxy/plan.
	ConditionAsRequested = "landfall.dev/AsRequested"
	// ConditionReady on a pool: the controller assigns its addresses.
	ConditionReady = "Ready"
)

// DriverName is the API group, the prefix of annotations and condition types.
const DriverName = "landfall.dev"
