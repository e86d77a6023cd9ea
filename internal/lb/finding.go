package lb

// Finding is something about a node, outside of Landfall, that keeps its addresses from clients or
// is likely to.
type Finding struct {
	Refusal
	// Note is set where an administrator may have it so on purpose.
	Note bool `json:"note,omitempty"`
	// Subject tells findings with one reason apart, and stays while the message changes.
	Subject string `json:"-"`
}

// Find returns a Finding with a formatted message.
func Find(reason Reason, format string, args ...any) Finding {
	return Finding{Refusal: *Refuse(reason, format, args...)}
}

// About returns the Finding with a subject.
func (f Finding) About(subject string) Finding {
	f.Subject = subject
	return f
}

// DaemonSet is what started a program on the nodes.
type DaemonSet struct {
	Stays bool // it is there, and not being deleted
	// Orphans is set while it is being deleted without its pods (kubectl delete --cascade=orphan).
	Orphans bool
	Ready   int // on how many nodes its pod is ready
}

// Workload is a Deployment or DaemonSet of Landfall.
type Workload struct {
	Kind, Name string
	// Wanted is how many pods there are to be, Ready how many of the newest version are ready.
	Wanted, Ready int
}

// Reasons around nodes: what a program finds there that keeps traffic from being delivered.
const (
	// the kernel forwards no packets, by its parameter ip_forward or forwarding
	ReasonForwardingOff Reason = "ForwardingOff"
	// a chain of another program drops packets that the node forwards
	ReasonForwardDropped Reason = "ForwardDropped"
	// no pod on the node is in the configured pod network
	ReasonPodNetworkUnmatched Reason = "PodNetworkUnmatched"
	// nodes or pods are in a network of cluster IPs, so that unused cluster IPs there are not refused
	ReasonServiceNetworkShared Reason = "ServiceNetworkShared"
	// the node answers ARP for addresses of Services that kube-proxy has put on an interface
	ReasonARPNotStrict Reason = "ARPNotStrict"
	// an interface of the node has an address of a Service, so its kernel answers ARP or NDP for it
	ReasonAddressOnNode Reason = "AddressOnNode"
	// the speaker does not hear speakers on other nodes that are ready
	ReasonGossipBlocked Reason = "GossipBlocked"
	// the node does not reach the API server
	ReasonAPIServerUnreachable Reason = "APIServerUnreachable"
	// the node's kernel has no route to pods of its own, or of another node
	ReasonPodRouteMissing Reason = "PodRouteMissing"
	// the node's kernel has no room for more connections
	ReasonConntrackFull Reason = "ConntrackFull"
	// nodes of one subnet send packets of different sizes
	ReasonMTUMismatch Reason = "MTUMismatch"
	// a node that announces a Service cannot connect to its endpoints
	ReasonEndpointUnreachable Reason = "EndpointUnreachable"
	// a rule of another program drops or refuses what clients send to a Service
	ReasonClientsDropped Reason = "ClientsDropped"
	// a node that announces a Service has no route back to its clients
	ReasonClientsUnrouted Reason = "ClientsUnrouted"
	// the node's proxy runs, and answers neither the speaker nor landfallctl
	ReasonProxyHangs Reason = "ProxyHangs"
)
