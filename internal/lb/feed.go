package lb

import "net/netip"

// FeedMessage is one line (JSON, ended by a newline) that a proxy writes to its speaker over the
// feed's socket. The first message of a connection is complete and is sent only once the proxy
// knows what the kernel holds; the others are changes to it.
type FeedMessage struct {
	// Complete is set when Deliveries is all there is; otherwise Deliveries and Removed change what
	// was said before.
	Complete   bool          `json:"complete,omitempty"`
	Deliveries []Delivery    `json:"deliveries,omitempty"`
	Removed    []DeliveryKey `json:"removed,omitempty"`
	// Waiting is set, with Beat and nothing else, while the proxy has started and does not know the
	// whole cluster yet, as without an API server: the kernel has what a predecessor has programmed,
	// so what that one said goes on counting.
	Waiting bool `json:"waiting,omitempty"`
	// Beat is how long it takes, in milliseconds, until the next message comes, even one without
	// content; 0 for no promise. See FeedSilence.
	Beat int `json:"beat,omitempty"`
}

// DeliveryKey names a Delivery: one VIP of one Service.
type DeliveryKey struct {
	Service Key        `json:"service"`
	VIP     netip.Addr `json:"vip"`
}

// Key returns the delivery's key.
func (d Delivery) Key() DeliveryKey { return DeliveryKey{Service: d.Service, VIP: d.VIP} }

// FeedSocket is where a proxy offers its feed unless told otherwise.
const FeedSocket = "/run/landfall/feed.sock"
