package lb

import "fmt"

// Reason is why something is refused, left out or not announced, in the form that conditions,
// Events, metrics and the command line show.
type Reason string

// Reasons around the assignment of addresses.
const (
	ReasonAssigned       Reason = "Assigned"       // the Service holds the addresses that it asks for
	ReasonNoPool         Reason = "NoPool"         // there is no pool that could serve the Service
	ReasonPoolExhausted  Reason = "PoolExhausted"  // every pool that could serve is full
	ReasonPoolNotFound   Reason = "PoolNotFound"   // the pool asked for does not exist
	ReasonPoolNotReady   Reason = "PoolNotReady"   // the pool asked for hands out nothing new
	ReasonAddressInvalid Reason = "AddressInvalid" // what was asked for is no address, or none of the Service's families
	ReasonAddressOutside Reason = "AddressOutside" // the address asked for is in no pool
	ReasonAddressTaken   Reason = "AddressTaken"   // another Service holds the address asked for
	ReasonHeldOutside    Reason = "HeldOutside"    // the Service keeps an address that no pool contains any more
	ReasonDuplicate      Reason = "Duplicate"      // an older Service holds the same address
	ReasonPoolOverlaps   Reason = "Overlapping"    // the pool shares addresses with an older one
	ReasonPoolInvalid    Reason = "Invalid"        // an address range of the pool cannot be read
	ReasonPoolReady      Reason = "Ready"          // the pool hands out addresses
	ReasonNoClusterIP    Reason = "NoClusterIP"    // the API server has not given the Service a cluster IP yet
	ReasonFamilyUnserved Reason = "FamilyUnserved" // no pool has addresses of a family that the Service requires

	ReasonRequestInvalid  Reason = "RequestInvalid"  // an annotation of the Service cannot be read
	ReasonAddressExcluded Reason = "AddressExcluded" // the address asked for is never handed out
	ReasonAddressReserved Reason = "AddressReserved" // the address asked for is reserved for others
	ReasonAddressKept     Reason = "AddressKept"     // the address asked for is kept for the Service that held it last
	ReasonSharingRefused  Reason = "SharingRefused"  // the Service cannot share the address asked for with its holder
	ReasonPoolNotAllowed  Reason = "PoolNotAllowed"  // the pool does not serve this Service
	ReasonQuotaExceeded   Reason = "QuotaExceeded"   // the namespace holds as many addresses as the pool allows it
	ReasonPoolApart       Reason = "Apart"           // the pool shares no address with another
	ReasonPoolAvailable   Reason = "Available"       // the pool has addresses left
)

// Reasons around announcements: why a node does not claim a VIP, or claims it and does not own it.
const (
	ReasonNoAdvertisement Reason = "NoAdvertisement" // no advertisement selects the VIP's pool on this node
	ReasonNoInterface     Reason = "NoInterface"     // no suitable interface has a subnet that contains the VIP
	ReasonFeedUnknown     Reason = "FeedUnknown"     // the node's proxy has not said yet what is programmed
	ReasonFeedLost        Reason = "FeedLost"        // the node's proxy has been silent for longer than the hold
	ReasonNotProgrammed   Reason = "NotProgrammed"   // the kernel does not hold every frontend of the VIP
	ReasonNoBackends      Reason = "NoBackends"      // no endpoint is usable anywhere
	ReasonNoLocalBackends Reason = "NoLocalBackends" // policy Local and no endpoint on this node is usable
	ReasonNodeLeaving     Reason = "NodeLeaving"     // the node is about to go
	ReasonNodeExcluded    Reason = "NodeExcluded"    // the node carries the label exclude-from-external-load-balancers
	ReasonStopping        Reason = "Stopping"        // the speaker is handing over before it ends
	ReasonNotJoined       Reason = "NotJoined"       // the speaker does not know the other speakers yet
	ReasonNotOwner        Reason = "NotOwner"        // another claiming node owns the VIP
	ReasonAnnounced       Reason = "Announced"       // this node answers for the VIP
	ReasonNoOwner         Reason = "NoOwner"         // no live node claims the VIP
	ReasonNoAddress       Reason = "NoAddress"       // the Service holds no address any more
	ReasonUnheard         Reason = "Unheard"         // the node has not said anything of the VIP yet
	ReasonNodeUnknown     Reason = "NodeUnknown"     // the API server has no Node object of this node
	ReasonFamilyUnspoken  Reason = "FamilyUnspoken"  // the speaker does not announce addresses of this family
	ReasonAnnounceFailed  Reason = "AnnounceFailed"  // the owner cannot answer on any of its interfaces

	// a proxy does not choose backends in the way that the Service asks for
	ReasonSchedulerIgnored Reason = "SchedulerIgnored"
	// the owner asks whether somebody else uses the VIP, before it is first announced
	ReasonProbing Reason = "Probing"
	// a device that is no node of ours uses the VIP, so it is not announced
	ReasonAddressConflict Reason = "AddressConflict"
	// the node's speaker has stopped answering the others without taking its leave
	ReasonMissing Reason = "Missing"
	// a majority of the speakers, which the node does not see, answers for the VIP
	ReasonYielded Reason = "Yielded"
	// the VIP is announced, and a device that is no node of ours uses it too
	ReasonContested Reason = "Contested"
)

// Refusal is a Reason with the sentence that explains it: what was refused, the value, and what
// would be right.
type Refusal struct {
	Reason  Reason `json:"reason"`
	Message string `json:"message"`
}

// Error returns the sentence.
func (r *Refusal) Error() string { return r.Message }

// Refuse makes a Refusal with a formatted message.
func Refuse(reason Reason, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Reasons around BGP: why a node has no session with a peer, or a peer does not hear a route.
const (
	ReasonPeerInvalid Reason = "PeerInvalid" // the peer's specification cannot be used
	// an older BGPPeer is for the same address or interface on this node
	ReasonPeerDuplicate    Reason = "PeerDuplicate"
	ReasonEstablished      Reason = "Established"      // the session is up
	ReasonNotEstablished   Reason = "NotEstablished"   // the session is not up
	ReasonSourceMissing    Reason = "SourceMissing"    // the node does not have the peer's sourceAddress
	ReasonInterfaceMissing Reason = "InterfaceMissing" // the node does not have the peer's interface, or it is down
	ReasonSecretMissing    Reason = "SecretMissing"    // the Secret with the password is not there, or has none
	ReasonSecretElsewhere  Reason = "SecretElsewhere"  // the Secret with the password is in another namespace
	ReasonProfileMissing   Reason = "ProfileMissing"   // the BFDProfile is not there, so that nothing watches the path
	ReasonBFDDown          Reason = "BFDDown"          // BFD says that the path to the peer is lost
	ReasonFamilyNotOffered Reason = "FamilyNotOffered" // the session does not carry routes of the VIP's family
	// the node has no address of the route's family for the peer to send to
	ReasonNoNextHop          Reason = "NoNextHop"
	ReasonUnknownPeer        Reason = "UnknownPeer"        // an advertisement names a peer that is not there
	ReasonUnknownPool        Reason = "UnknownPool"        // an advertisement names a pool that is not there
	ReasonUnknownCommunity   Reason = "UnknownCommunity"   // an advertisement uses a name that no Community object defines
	ReasonCommunityAmbiguous Reason = "CommunityAmbiguous" // Community objects define a name differently
	// an older advertisement gives the same prefix another attribute
	ReasonAttributeConflict Reason = "AttributeConflict"
	ReasonAggregateOutside  Reason = "AggregateOutside" // the aggregate reaches beyond the ranges of the pool
	// the aggregate attracts traffic that policy Local does not let every node deliver
	ReasonAggregateLocal Reason = "AggregateLocal"
	// no peer of the kind that hears the attribute hears the advertisement
	ReasonAttributeUnsent    Reason = "AttributeUnsent"
	ReasonAdvertisementReady Reason = "Ready" // all that the advertisement asks for can be done
)
