package lb

import "fmt"

// Reason says in one CamelCase word why something is refused, left out or not announced.
// Conditions, Events, metrics and the command line show the same word.
type Reason string

// Reasons around the assignment of addresses.
const (
	ReasonAssigned      Reason = "Assigned"      // the Service holds the addresses that it requests
	ReasonNoPool        Reason = "NoPool"        // no pool may serve the Service
	ReasonPoolExhausted Reason = "PoolExhausted" // every pool that may serve the Service is full
	ReasonPoolNotFound  Reason = "PoolNotFound"  // the requested pool does not exist
	ReasonPoolNotReady  Reason = "PoolNotReady"  // the requested pool assigns nothing new
	// the requested address is not an address, or not of a family of the Service
	ReasonAddressInvalid Reason = "AddressInvalid"
	ReasonAddressOutside Reason = "AddressOutside" // no pool contains the requested address
	ReasonAddressTaken   Reason = "AddressTaken"   // another Service holds the requested address
	ReasonHeldOutside    Reason = "HeldOutside"    // the Service keeps an address that no pool contains any more
	ReasonDuplicate      Reason = "Duplicate"      // a Service that comes first holds the same address
	// another program wrote addresses or a hostname into the status, or removed what Landfall assigned
	ReasonForeignAddress Reason = "ForeignAddress"
	// the status shows more addresses than a Service can hold
	ReasonTooManyAddresses Reason = "TooManyAddresses"
	// the API server refuses the Service with what Landfall writes to it
	ReasonStatusRefused  Reason = "StatusRefused"
	ReasonPoolOverlaps   Reason = "Overlapping"    // the pool shares addresses with an older pool
	ReasonPoolInvalid    Reason = "Invalid"        // an address range of the pool cannot be parsed
	ReasonPoolReady      Reason = "Ready"          // the pool assigns addresses
	ReasonNoClusterIP    Reason = "NoClusterIP"    // the API server has not given the Service a cluster IP yet
	ReasonFamilyUnserved Reason = "FamilyUnserved" // no pool has addresses of a family that the Service requires

	ReasonRequestInvalid Reason = "RequestInvalid" // an annotation of the Service cannot be parsed
	// a field and an annotation of the Service, or two annotations, request different things
	ReasonRequestsDisagree Reason = "RequestsDisagree"

	ReasonAddressExcluded Reason = "AddressExcluded" // the controller never assigns the requested address
	ReasonAddressReserved Reason = "AddressReserved" // the requested address is reserved for others
	ReasonAddressKept     Reason = "AddressKept"     // the requested address is in quarantine for its last holder
	ReasonSharingRefused  Reason = "SharingRefused"  // the Service cannot share the requested address with its holder
	ReasonTooManySharers  Reason = "TooManySharers"  // as many Services share the requested address as can share one
	ReasonPoolNotAllowed  Reason = "PoolNotAllowed"  // the pool does not serve this Service
	ReasonQuotaExceeded   Reason = "QuotaExceeded"   // the namespace holds as many addresses as the pool's quota allows
	ReasonPoolApart       Reason = "Apart"           // the pool shares no address with another
	ReasonPoolAvailable   Reason = "Available"       // the pool has free addresses
	ReasonListed          Reason = "Listed"          // since when the Service lists its external IPs
)

// Reasons around announcements: why a node does not claim a VIP, or claims it and does not own it.
const (
	ReasonNoAdvertisement Reason = "NoAdvertisement" // no advertisement selects the VIP's pool on this node
	ReasonNoInterface     Reason = "NoInterface"     // no suitable interface has a subnet that contains the VIP
	ReasonFeedUnknown     Reason = "FeedUnknown"     // the node's proxy has not reported yet what the kernel holds
	ReasonFeedLost        Reason = "FeedLost"        // the node's proxy has been silent for longer than the hold
	ReasonNotProgrammed   Reason = "NotProgrammed"   // the kernel does not hold every frontend of the VIP
	ReasonNoBackends      Reason = "NoBackends"      // no endpoint is usable anywhere
	ReasonNoLocalBackends Reason = "NoLocalBackends" // policy Local, and no endpoint on this node is usable
	ReasonNodeLeaving     Reason = "NodeLeaving"     // the node is about to leave the cluster
	ReasonNodeDrained     Reason = "NodeDrained"     // the node has the label landfall.dev/drain
	ReasonNodeExcluded    Reason = "NodeExcluded"    // the node has the label exclude-from-external-load-balancers
	ReasonStopping        Reason = "Stopping"        // the speaker hands its addresses over before it stops
	ReasonNotJoined       Reason = "NotJoined"       // the speaker has not met the other speakers yet
	ReasonNotOwner        Reason = "NotOwner"        // another node that claims the VIP owns it
	ReasonAnnounced       Reason = "Announced"       // this node answers for the VIP
	ReasonNoOwner         Reason = "NoOwner"         // no live node claims the VIP
	ReasonNoAddress       Reason = "NoAddress"       // the Service holds no address any more
	ReasonHeadless        Reason = "Headless"        // a label takes the Service down
	ReasonUnheard         Reason = "Unheard"         // the node has not reported on the VIP yet
	ReasonNodeUnknown     Reason = "NodeUnknown"     // the API server has no Node object of this node
	ReasonFamilyUnspoken  Reason = "FamilyUnspoken"  // the speaker does not announce addresses of this family
	ReasonAnnounceFailed  Reason = "AnnounceFailed"  // the owner cannot answer on any of its interfaces

	// the Node has the condition NetworkUnavailable: its network plugin has not set up the network
	ReasonNetworkUnavailable Reason = "NetworkUnavailable"
	// the Node is not ready, and the speakers announce from ready nodes only
	ReasonNodeNotReady Reason = "NodeNotReady"
	// an interface that packets have to pass is down or has no carrier
	ReasonNoCarrier Reason = "NoCarrier"

	// the Services of the cluster have more VIPs than speakers tell one another of
	ReasonTooManyVIPs Reason = "TooManyVIPs"

	// a proxy cannot choose backends in the way that the Service asks for
	ReasonSchedulerIgnored Reason = "SchedulerIgnored"
	// the annotation that asks for a probe cannot be read, or the Service has nothing to probe
	ReasonProbeInvalid Reason = "ProbeInvalid"
	// nodes do not probe the backends of the Service: there are too many, or none that may be asked
	ReasonProbeRefused Reason = "ProbeRefused"
	// a node sends no new connections to a backend that does not answer its probes
	ReasonProbeFailed Reason = "ProbeFailed"
	// fewer than half of the backends answer a node's probes, so the node uses all of them
	ReasonProbeIgnored Reason = "ProbeIgnored"
	// the backends answer a node's probes again
	ReasonProbePassed Reason = "ProbePassed"
	// a proxy does not relay connections to a Service that asks for it; its rules serve them
	ReasonRelayRefused Reason = "RelayRefused"
	// a node's relay is not there, so connections to Services that ask for it go straight to endpoints
	ReasonRelayAway Reason = "RelayAway"
	// a node's relay has as many connections as it may, or too little time or memory, so new ones go straight to endpoints
	ReasonRelayFull Reason = "RelayFull"
	// a node's relay cannot open its port of one family, IPv4 or IPv6, so what comes over that to Services that ask for
	// it goes straight to endpoints
	ReasonRelayWithoutPort Reason = "RelayWithoutPort"
	// a node's relay cannot receive UDP, as another program has its port, so UDP to Services that ask for it
	// goes straight to endpoints
	ReasonRelayWithoutUDP Reason = "RelayWithoutUDP"
	// a chain of another program drops what the rules lead to a node's relay, so they lead straight to
	// endpoints
	ReasonRelayDropped Reason = "RelayDropped"
	// a proxy cannot write the lease that has its rules lead to the node's relay, so they lead straight to endpoints
	ReasonRelayLeaseFailed Reason = "RelayLeaseFailed"
	// a proxy does not hand over connections to a Service that asks for it, or not to all nodes; it
	// masquerades them
	ReasonDirectRefused Reason = "DirectRefused"
	// a Service with an older or stronger right to it uses a frontend of the Service
	ReasonFrontendInUse Reason = "FrontendInUse"
	// the nodes do not serve an address in spec.externalIPs
	ReasonExternalIPRefused Reason = "ExternalIPRefused"
	// ReasonTooLarge: the Service has more ports, addresses, endpoints or source ranges than one
	// Service may, or than its namespace has room for.
	ReasonTooLarge Reason = "TooLarge"
	// ReasonSourceRangeInvalid: an entry of spec.loadBalancerSourceRanges cannot be read, and admits
	// nobody.
	ReasonSourceRangeInvalid Reason = "SourceRangeInvalid"
	// no entry of spec.loadBalancerSourceRanges contains the client's address
	ReasonSourceRefused Reason = "SourceRefused"
	// a node drops packets for addresses of Services by its kernel parameter rp_filter: what other nodes
	// move to it, or what clients behind a router send
	ReasonStrictReversePath Reason = "StrictReversePath"
	// a node cannot pass on connections to the nodes of its rings that are behind routers
	ReasonTunnelUnavailable Reason = "TunnelUnavailable"
	// a node cannot offload established flows to a flowtable, and forwards them by its rules
	ReasonOffloadUnavailable Reason = "OffloadUnavailable"
	// the VIP was announced so often in a row that its next announcement waits
	ReasonFlapping Reason = "Flapping"
	// the owner probes whether another device uses the VIP, before its first announcement
	ReasonProbing Reason = "Probing"
	// the node has found that no device uses the address, before a Service got it
	ReasonProbedAhead Reason = "ProbedAhead"
	// a conflicting host uses the VIP, so no node announces it
	ReasonAddressConflict Reason = "AddressConflict"
	// the node's speaker disappeared without leaving the cluster of speakers
	ReasonMissing Reason = "Missing"
	// the other side of a partition, with a majority of the speakers, answers for the VIP
	ReasonYielded Reason = "Yielded"
	// the node may have been cut off, and takes no VIP before it has heard another speaker
	ReasonCutOff Reason = "CutOff"
	// a node announces the VIP, and a conflicting host uses it too
	ReasonContested Reason = "Contested"
)

// Refusal is a Reason with a sentence that explains it: what was refused, its value, and what would
// be valid.
type Refusal struct {
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

// Error returns the sentence.
func (r *Refusal) Error() string { return r.Message }

// Refuse returns a Refusal with a formatted message.
func Refuse(reason Reason, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Reasons around BGP: why a node has no session with a peer, or does not announce a route to it.
const (
	ReasonPeerInvalid Reason = "PeerInvalid" // the specification of the peer cannot be used
	// an older BGPPeer has the same address or interface on this node
	ReasonPeerDuplicate  Reason = "PeerDuplicate"
	ReasonEstablished    Reason = "Established"    // the session is up
	ReasonNotEstablished Reason = "NotEstablished" // the session is not up
	ReasonRouteFiltered  Reason = "RouteFiltered"  // the router has not taken a route; landfallctl says so
	ReasonSourceMissing  Reason = "SourceMissing"  // the node does not have the peer's sourceAddress
	// the peer has another session with the address, such as that of another program of the node
	ReasonSessionTaken     Reason = "SessionTaken"
	ReasonInterfaceMissing Reason = "InterfaceMissing" // the node does not have the peer's interface, or it is down
	ReasonVRFMissing       Reason = "VRFMissing"       // the node has no VRF of the name in the peer's spec.vrf
	// the node's kernel does not deliver what comes in through the peer's VRF
	ReasonVRFUndelivered   Reason = "VRFUndelivered"
	ReasonSecretMissing    Reason = "SecretMissing"    // the Secret with the password does not exist, or has no password
	ReasonSecretElsewhere  Reason = "SecretElsewhere"  // the Secret with the password is in another namespace
	ReasonProfileMissing   Reason = "ProfileMissing"   // the BFDProfile does not exist, so nothing monitors the path
	ReasonBFDDown          Reason = "BFDDown"          // BFD reports that the path to the peer is down
	ReasonFamilyNotOffered Reason = "FamilyNotOffered" // the session does not carry routes of the VIP's family
	// the node has no address of the route's family for the peer to send to
	ReasonNoNextHop          Reason = "NoNextHop"
	ReasonUnknownPeer        Reason = "UnknownPeer"        // an advertisement names a peer that does not exist
	ReasonUnknownPool        Reason = "UnknownPool"        // an advertisement names a pool that does not exist
	ReasonSelectorInvalid    Reason = "SelectorInvalid"    // a label selector cannot be read, and selects nothing
	ReasonSelectsNoPool      Reason = "SelectsNoPool"      // an advertisement selects no pool
	ReasonSelectsNoNode      Reason = "SelectsNoNode"      // the nodeSelectors of an advertisement match no Node
	ReasonUnknownCommunity   Reason = "UnknownCommunity"   // an advertisement uses a name that no Community object defines
	ReasonCommunityAmbiguous Reason = "CommunityAmbiguous" // Community objects define a name differently
	// an older advertisement gives the same prefix another attribute
	ReasonAttributeConflict Reason = "AttributeConflict"
	ReasonAggregateOutside  Reason = "AggregateOutside" // the aggregate reaches beyond the ranges of the pool
	// the aggregate attracts traffic that policy Local does not let every node deliver
	ReasonAggregateLocal Reason = "AggregateLocal"
	// no peer of the advertisement is of the kind that receives the attribute
	ReasonAttributeUnsent    Reason = "AttributeUnsent"
	ReasonAdvertisementReady Reason = "Ready" // the speakers can do all that the advertisement asks for
)
