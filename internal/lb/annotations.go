package lb

// Annotations of a Service, but for AnnotationWeight.
const (
	AnnotationAddresses = "landfall.dev/loadBalancerIPs"
	AnnotationPool      = "landfall.dev/address-pool"
	// AnnotationScheduler sets how proxies choose a backend for a new connection, by the name that
	// Landfall or IPVS has for it.
	AnnotationScheduler = "landfall.dev/scheduler"
	// AnnotationWeights gives backends weights, by their nodes, addresses or networks:
	// "worker-1=3, 192.0.2.0/28=2".
	AnnotationWeights = "landfall.dev/weights"
	// AnnotationWeight, on an EndpointSlice, is the weight of its endpoints that AnnotationWeights of the
	// Service does not name.
	AnnotationWeight = "landfall.dev/weight"
	// AnnotationFailover says what a node without usable endpoints does with connections to the external
	// addresses of a Service. FailoverPassthrough has it route them on, as if it did not know the address
	// (KEP-6272, which has an ipMode for it: see IPModeRouter).
	AnnotationFailover = "landfall.dev/external-failover-policy"
	// AnnotationProbe has nodes ask the backends of the Service: see [ParseProbe].
	AnnotationProbe = "landfall.dev/probe"
	// AnnotationRelay asks for the relay: "true" has the nodes' relay end connections to the Service,
	// and try another backend when the first does not answer. A list, as "https, 8443", asks for it at
	// these ports.
	AnnotationRelay = "landfall.dev/relay"
	// AnnotationRelayProxyProtocol has the relay tell backends the client's address, by version v1 or v2
	// of the PROXY protocol.
	AnnotationRelayProxyProtocol = "landfall.dev/relay-proxy-protocol"
	// AnnotationForwarding says how connections from outside to a Service with policy Cluster reach
	// endpoints on other nodes. ForwardingDirect has nodes hand packets over as they are: pods see the
	// client's address, and answer the client directly.
	AnnotationForwarding = "landfall.dev/forwarding"
	// AnnotationShare holds a key: Services with the same key share addresses if their ports do not
	// collide.
	AnnotationShare = "landfall.dev/allow-shared-ip"
	// AnnotationPerFamily requests this many addresses of each family, from 1 to 16.
	AnnotationPerFamily = "landfall.dev/addresses-per-family"
	// AnnotationMode requests an ipMode, VIP or Proxy.
	AnnotationMode = "landfall.dev/ip-mode"
	// AnnotationWhenOutside sets what to do when no pool contains the address any more: keep or move.
	AnnotationWhenOutside = "landfall.dev/when-outside"
	// AnnotationAllocatedFrom names the pool of the Service's addresses, where MetalLB's users look
	// for it.
	AnnotationAllocatedFrom = "metallb.io/ip-allocated-from-pool"
	// AnnotationAllocatedFromOld is its name in older versions of MetalLB.
	AnnotationAllocatedFromOld = "metallb.universe.tf/ip-allocated-from-pool"
	// AnnotationOnConflict sets what to do when a conflicting host uses the address: refuse or
	// announce.
	AnnotationOnConflict = "landfall.dev/on-address-conflict"
)

// FailoverPassthrough is the one value of AnnotationFailover.
const FailoverPassthrough = "Passthrough"

// ForwardingDirect is the one value of AnnotationForwarding.
const ForwardingDirect = "direct"

// FinalizerCleanup keeps a deleted Service until its addresses are announced no more
// (KEP-980). The API server's other load balancer controllers use it too.
const FinalizerCleanup = "service.kubernetes.io/load-balancer-cleanup"

// LabelDrain on a Node has it give away its VIPs, whatever its value, as landfallctl drain does.
const LabelDrain = "landfall.dev/drain"

// LabelAnnouncedBy on a Node says that another product, its value, announces VIPs from the node over
// BGP. The node may hold connections to them, so it is in the rings of all VIPs that BGP is for. A
// migration sets it.
const LabelAnnouncedBy = "landfall.dev/announced-by"

// LabelPreStopSleep on a Namespace, whatever its value, has the API server add a sleep to containers of
// new pods without a preStop hook, by a policy of the chart.
const LabelPreStopSleep = "landfall.dev/pre-stop-sleep"

// LabelWaitUntilProgrammed on a Namespace, whatever its value, has the API server add the readiness gate
// ConditionProgrammed to new pods, by a policy of the chart.
const LabelWaitUntilProgrammed = "landfall.dev/wait-until-programmed"

// LabelDashboard on a pod of the controller says that it serves the dashboard, and names the ServiceAccount
// in its namespace that may see it.
const LabelDashboard = "landfall.dev/dashboard-account"

// LabelHeadless on a Service has service proxies ignore it, whatever its value.
const LabelHeadless = "service.kubernetes.io/headless"
