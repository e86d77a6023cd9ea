package lb

import "fmt"

// Reason is why something is refused, left out or not announced, in the form that conditions, Events, metrics and the command line show.
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
	ReasonUnheard         Reason = "Unheard"         // the node has not said anything of the VIP yet
	ReasonNodeUnknown     Reason = "NodeUnknown"     // the API server has no Node object of this node
	ReasonFamilyUnspoken  Reason = "FamilyUnspoken"  // the speaker does not announce addresses of this family
	ReasonAnnounceFailed  Reason = "AnnounceFailed"  // the owner cannot answer on any of its interfaces
)

// Refusal is a Reason with the sentence that explains it: what was refused, the value, and what would be right.
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
