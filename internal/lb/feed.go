package lb

import "net/netip"

// FeedMessage is one line (JSON, ended by a newline) that a proxy writes to its speaker over the
// feed's socket. The first message of a connection is complete; the proxy sends it when it knows
// what the kernel holds. Later messages are changes.
type FeedMessage struct {
	// Complete is set if Deliveries has every delivery; otherwise Deliveries and Removed are changes.
	Complete   bool          `json:"complete,omitempty"`
	Deliveries []Delivery    `json:"deliveries,omitempty"`
	Removed    []DeliveryKey `json:"removed,omitempty"`
	// Waiting is set, with only Beat beside it, while a started proxy does not know the whole cluster
	// yet, as without an API server. The kernel still holds the rules of the previous proxy, so the
	// previous proxy's last report stays valid.
	Waiting bool `json:"waiting,omitempty"`
	// Rescued is the Number of the speaker's latest update, once this node passes on connections by
	// that update and by all before it: the kernel has the rules, and has found the nodes that they
	// name. It is 0 until then.
	Rescued uint64 `json:"rescued,omitempty"`
	// VRFs are the VRFs on the node. Each has the reason why the kernel does not deliver what comes in
	// through it; "" if it does. Every message but those with Waiting says it anew.
	VRFs map[string]string `json:"vrfs,omitempty"`
	// Gates is set if pods on the node have readiness gates that wait for announcements: the speaker
	// is to say FeedUpdate.Unannounced. Every message but those with Waiting says it anew.
	Gates bool `json:"gates,omitempty"`
	// Beat is the longest time until the next message, in milliseconds, even if that has no content; 0
	// promises none. See FeedSilence.
	Beat int `json:"beat,omitempty"`
}

// DeliveryKey names a Delivery: one VIP of one Service.
type DeliveryKey struct {
	Service Key        `json:"service"`
	VIP     netip.Addr `json:"vip"`
}

// Key returns the delivery's key.
func (d Delivery) Key() DeliveryKey { return DeliveryKey{Service: d.Service, VIP: d.VIP} }

// FeedSocket is the default path of the feed's socket.
const FeedSocket = "/run/landfall/feed.sock"
