package explain

import "github.com/landfall-lb/landfall/internal/lb"

// Entry says what a reason means, and what cures it; Cure is empty for a good reason.
type Entry struct {
	Meaning string `json:"meaning"`
	Cure    string `json:"cure,omitempty"`
}

// Reasons explains every reason of the product.
var Reasons = map[lb.Reason]Entry{
	// Assignment of addresses.
	lb.ReasonAssigned: {Meaning: "The Service holds the addresses that it requests."},
	lb.ReasonNoPool: {"No pool may serve the Service: there is none, or autoAssign, serviceAllocation or the family " +
		"rule " +
		"each of them out.", "kubectl get ipaddresspools -o yaml   # compare with the Service; README.md shows a pool"},
	lb.ReasonPoolExhausted: {"Every pool that may serve the Service is full.",
		"kubectl edit ipaddresspool POOL   # add addresses, or delete Services that hold some"},
	lb.ReasonPoolNotFound: {"The Service requests a pool that does not exist.",
		"kubectl annotate service NAME landfall.dev/address-pool=POOL --overwrite   # kubectl get ipaddresspools"},
	lb.ReasonPoolNotReady: {"The requested pool assigns nothing new, as its condition Ready is not True.",
		"landfallctl explain pool POOL"},
	lb.ReasonAddressInvalid: {"The requested address is not an IP address, or not of a family of the Service.",
		"kubectl annotate service NAME landfall.dev/loadBalancerIPs=ADDRESS --overwrite"},
	lb.ReasonAddressOutside: {"No pool contains the requested address.",
		"kubectl edit ipaddresspool POOL   # add the address, or request one that a pool contains"},
	lb.ReasonAddressTaken: {"Another Service holds the requested address.",
		"request another address, or set the annotation landfall.dev/allow-shared-ip=KEY on both Services"},
	lb.ReasonHeldOutside: {"The Service keeps an address that no pool contains any more.",
		"kubectl edit ipaddresspool POOL   # add the address; or landfall.dev/when-outside=move on the Service"},
	lb.ReasonDuplicate: {"A Service that comes first holds the same address, as after a restored backup.",
		"kubectl annotate service NAME landfall.dev/loadBalancerIPs=ADDRESS --overwrite   # another address for one of " +
			"the two"},
	lb.ReasonForeignAddress: {"Another program wrote the status: an address or a hostname that Landfall did not assign, " +
		"or it removed those that Landfall had assigned.",
		"find the other load balancer, and set spec.loadBalancerClass on one of the two"},
	lb.ReasonPoolOverlaps: {"The pool shares addresses with an older pool, so it assigns none.",
		"kubectl edit ipaddresspool POOL   # take the shared addresses out of one of the two"},
	lb.ReasonPoolInvalid: {"The specification of the object cannot be used.", "kubectl edit ipaddresspool POOL"},
	lb.ReasonPoolReady:   {Meaning: "The object is in use as it is."},
	lb.ReasonNoClusterIP: {"The API server has not given the Service a cluster IP yet.",
		"kubectl describe service NAME"},
	lb.ReasonPoolApart:     {Meaning: "The pool shares no address with another."},
	lb.ReasonPoolAvailable: {Meaning: "The pool has free addresses."},
	lb.ReasonListed:        {Meaning: "The Service has listed its external IPs and ports since the times in the message."},
	lb.ReasonFamilyUnserved: {"No pool has addresses of a family that the Service requires.",
		"add a range of that family to a pool, or set spec.ipFamilyPolicy: PreferDualStack"},
	lb.ReasonRequestInvalid: {"An annotation of the Service cannot be parsed.",
		"kubectl get service NAME -o jsonpath='{.metadata.annotations}'"},
	lb.ReasonRequestsDisagree: {"A field and an annotation of the Service, or two annotations, request different things.",
		"remove one of the two"},
	lb.ReasonAddressExcluded: {"The controller never assigns the requested address: excludedAddresses, --never-assign, " +
		"or a " +
		"Node or gateway uses it.", "request another address"},
	lb.ReasonAddressReserved: {"The requested address is reserved for another Service or namespace.",
		"kubectl edit ipaddresspool POOL   # spec.reservations; or request another address"},
	lb.ReasonAddressKept: {"The requested address is in quarantine: it stays reserved for its last holder for a while.",
		"wait until the quarantine ends, request another address, or shorten spec.quarantine of the pool"},
	lb.ReasonSharingRefused: {"The Service cannot share the requested address with its holder: key, ports, policy " +
		"Local or " +
		"namespace do not fit.", "make landfall.dev/allow-shared-ip equal on both, with different ports"},
	lb.ReasonPoolNotAllowed: {"The pool does not serve this Service, by its serviceAllocation.",
		"kubectl edit ipaddresspool POOL   # spec.serviceAllocation"},
	lb.ReasonQuotaExceeded: {"The namespace holds as many addresses as the pool's addressesPerNamespace allows.",
		"delete a Service of the namespace, or kubectl edit ipaddresspool POOL   # spec.addressesPerNamespace"},

	lb.ReasonTooManySharers: {"As many Services share the requested address as may.",
		"request another address for the Service"},
	lb.ReasonTooManyAddresses: {"The status shows more addresses than a Service can hold: something else wrote them.",
		"kubectl get service NAME -o yaml --show-managed-fields   # who wrote status.loadBalancer"},
	lb.ReasonStatusRefused: {"The API server refuses the Service with what Landfall writes to it: its annotations have " +
		"no room left, or an admission webhook or policy denies the write.",
		"kubectl describe service NAME   # the Event says why; make annotations smaller, or exempt Landfall's users"},

	// Announcements.
	lb.ReasonNoAdvertisement: {"No L2Advertisement or BGPAdvertisement selects the address's pool on the node.",
		"create an L2Advertisement or a BGPAdvertisement that selects the pool; README.md has both"},
	lb.ReasonNoInterface: {"No interface that the L2Advertisement selects has a subnet that contains the address, so " +
		"nobody " +
		"on those links would ask for it.", "take a pool from the subnet of the nodes, name the interfaces in " +
		"spec.interfaces of the L2Advertisement, or announce over BGP"},
	lb.ReasonFeedUnknown: {"The node's proxy has not reported yet which rules its kernel holds.",
		"landfallctl explain node NODE   # does its proxy run?"},
	lb.ReasonFeedLost: {"The node's proxy has been silent for longer than speaker.hold.",
		"kubectl -n landfall-system logs -l 'app.kubernetes.io/component in (node,proxy)' -c proxy --prefix --tail=100"},
	lb.ReasonNotProgrammed: {"The node's kernel does not hold every rule of the address.",
		"kubectl -n landfall-system logs -l 'app.kubernetes.io/component in (node,proxy)' -c proxy --prefix --tail=100"},
	lb.ReasonNoBackends: {"No endpoint of the Service is usable anywhere: no pods, or none is ready.",
		"kubectl get endpointslices -l kubernetes.io/service-name=NAME"},
	lb.ReasonNoLocalBackends: {"externalTrafficPolicy is Local, and no endpoint on the node is usable.",
		"run a ready pod on a node that may announce, or set externalTrafficPolicy: Cluster"},
	lb.ReasonNodeLeaving: {"The node is about to leave the cluster, or drains.",
		"kubectl describe node NODE   # a cordon, a taint (ToBeDeletedByClusterAutoscaler, out-of-service), or no such Node"},
	lb.ReasonNodeDrained: {"The node has the label landfall.dev/drain: it is drained for maintenance.",
		"landfallctl undrain NODE   # when it is back"},
	lb.ReasonNodeExcluded: {"The node has the label node.kubernetes.io/exclude-from-external-load-balancers, as " +
		"kubeadm and " +
		"Talos set it on control planes.",
		"kubectl label node NODE node.kubernetes.io/exclude-from-external-load-balancers-   # or " +
			"speaker.ignoreExcludeLB=true"},
	lb.ReasonStopping: {"The speaker hands its addresses over before it stops.", "wait; it ends within seconds"},
	lb.ReasonNotJoined: {"The speaker has not met the other speakers yet.",
		"open TCP and UDP port 7947 between the nodes"},
	lb.ReasonNotOwner:  {Meaning: "The node can deliver the address; another node owns it."},
	lb.ReasonAnnounced: {Meaning: "The node answers for the address, or announces a route to it."},
	lb.ReasonNoOwner: {"No live node claims the address; nodes give different reasons.",
		"landfallctl explain svc NAME   # the first reason among those of the nodes"},
	lb.ReasonNoAddress: {"The Service holds no address any more.", "landfallctl explain svc NAME"},
	lb.ReasonHeadless: {"The label service.kubernetes.io/headless takes the Service down.",
		"kubectl label service NAME service.kubernetes.io/headless-"},
	lb.ReasonUnheard: {"The node has not reported on the address yet.", "wait some seconds"},
	lb.ReasonNodeUnknown: {"The API server has no Node object of the name that the speaker runs under.",
		"kubectl get nodes"},
	lb.ReasonFamilyUnspoken: {"The speaker does not announce addresses of this family.", "landfallctl explain node NODE"},
	lb.ReasonTooManyVIPs: {"The Services of the cluster have more addresses than the speakers announce, 65,536: those " +
		"that the controller has not confirmed are left out first, and then those of the youngest Services.",
		"delete Services, or have some share an address: landfall.dev/allow-shared-ip"},
	lb.ReasonFlapping: {"The address was announced and withdrawn, or its route changed, so often in a row that the next " +
		"announcement waits: its Service, its labels, or its endpoints come and go.",
		"kubectl get events   # what changes the Service NAME or its pods; speaker.flapInterval is how long it waits"},
	lb.ReasonAnnounceFailed: {"The owner cannot answer on any of its interfaces.",
		"landfallctl explain node NODE   # the problem of the interface"},
	lb.ReasonRelayRefused: {"A proxy does not relay connections to a Service with landfall.dev/relay: its rules serve " +
		"them.",
		"docs/guide/relay.md says what the relay needs; the Event says what is missing"},
	lb.ReasonRelayAway: {"A node's relay is not there, or not ready: connections to Services with landfall.dev/relay go " +
		"straight to endpoints.", "kubectl -n landfall-system logs -l app.kubernetes.io/component=node -c relay" +
		"   # component=relay with relay.ownPods"},
	lb.ReasonRelayFull: {"A node's relay has as many connections as it may, or too little time or memory: new ones go " +
		"straight to endpoints until it has room again.",
		"raise relay.connections or relay.resources, spread the clients over more nodes, or lower relay.udpRate"},
	lb.ReasonRelayWithoutPort: {"A node's relay cannot open its port for IPv4 or IPv6, mostly as another program has " +
		"it: connections of that family to Services with landfall.dev/relay go straight to endpoints there.",
		"end the program that has port 7484 (ss -ltnp), or set another relay.port"},
	lb.ReasonRelayWithoutUDP: {"A node's relay cannot receive UDP, as another program has its port: UDP of Services " +
		"with landfall.dev/relay goes straight to endpoints there.",
		"end the program that has UDP port 7484 (ss -lunp), or set another relay.port"},
	lb.ReasonRelayDropped: {"A chain of another program drops what the rules lead to a node's relay, so connections to " +
		"Services with landfall.dev/relay go straight to endpoints there.",
		"have the firewall of the node accept port 7484 (relay.port), of TCP and UDP"},
	lb.ReasonRelayLeaseFailed: {"A node's proxy cannot write the lease that has its rules lead to the relay, so " +
		"connections to Services with landfall.dev/relay go straight to endpoints there.",
		"let the proxy write /proc/net/xt_recent on the node (SELinux, a read-only /proc), or use proxy.mode=nftables"},
	lb.ReasonDirectRefused: {"A proxy masquerades connections to a Service with landfall.dev/forwarding, or some of " +
		"them: pods do not see the client's address.",
		"docs/guide/proxy.md says what direct forwarding needs; the Event says what is missing"},
	lb.ReasonSchedulerIgnored: {"A proxy cannot choose backends as landfall.dev/scheduler, weights or session affinity " +
		"request.",
		"docs/guide/proxy.md lists the schedulers of each mode"},
	lb.ReasonTooLarge: {"The Service asks for more ports, addresses or endpoints than one Service, or all Services of " +
		"its namespace, may cost the proxies.",
		"split the Service, or delete others of its namespace; docs/guide/proxy.md lists the bounds"},
	lb.ReasonFrontendInUse: {"A Service with an older or stronger right to it uses an address and port of the Service.",
		"change the port, or remove the external IP of the other Service"},
	lb.ReasonExternalIPRefused: {"The nodes do not serve an address in spec.externalIPs.",
		"remove it, or see proxy.externalIPs of the chart"},
	lb.ReasonSourceRefused: {"No entry of spec.loadBalancerSourceRanges contains the client's address, so its " +
		"connection is dropped.", "kubectl edit service NAME   # add the client's network to spec.loadBalancerSourceRanges"},
	lb.ReasonSourceRangeInvalid: {"An entry of spec.loadBalancerSourceRanges cannot be read, and admits nobody.",
		"kubectl edit service NAME   # spec.loadBalancerSourceRanges"},
	lb.ReasonStrictReversePath: {"The node's kernel parameter rp_filter drops packets for addresses of Services: what " +
		"clients behind a router send, or what other nodes pass on.",
		"set net.ipv4.conf.all.rp_filter and that of the interface to 2 in /etc/sysctl.d"},
	lb.ReasonTunnelUnavailable: {"The node cannot pass on connections to nodes behind routers, so some are reset when " +
		"routers move them to another rack.",
		"see the finding for the kernel's reason; the kernel needs the module vxlan"},
	lb.ReasonOffloadUnavailable: {"The node does not offload established flows, as --flow-offload asks, and " +
		"forwards them by its rules.", "see the finding for the reason; it needs nftables mode, and the kernel's modules " +
		"nf_flow_table_inet and nft_flow_offload; or set proxy.flowOffload=false"},
	lb.ReasonProbing: {Meaning: "The owner probes whether another device uses the address; that takes 0.6 s."},
	lb.ReasonProbedAhead: {Meaning: "The node has found that no device uses the address before a Service got it, and " +
		"says nothing of the Service yet."},
	lb.ReasonAddressConflict: {"A device outside the cluster uses the address, so no node announces it.",
		"find the device by its MAC address and give it another address, or take the address out of the pool"},
	lb.ReasonMissing: {"The node's speaker disappeared without leaving the others.",
		"landfallctl explain node NODE"},
	lb.ReasonYielded: {"The node sees no majority of the speakers, and the majority answers for the address.",
		"mend the network between the nodes"},
	lb.ReasonCutOff: {"The node may have been cut off, and takes no address before it has heard another speaker.",
		"mend the network between the nodes"},
	lb.ReasonContested: {"A node announces the address, and a device outside the cluster uses it too: clients reach " +
		"one or " +
		"the other.", "find the device by its MAC address and give it another address"},
	lb.ReasonParting: {"The node that answers should withdraw, and no other node can answer.",
		"landfallctl explain svc NAME   # why the other nodes cannot"},

	// BGP.
	lb.ReasonPeerInvalid:   {"The specification of the peer cannot be used.", "kubectl edit bgppeer PEER"},
	lb.ReasonPeerDuplicate: {"An older BGPPeer has the same address or interface on this node.", "delete one of the two"},
	lb.ReasonEstablished:   {Meaning: "The session is up."},
	lb.ReasonNotEstablished: {"The BGP session is not up.",
		"landfallctl explain peer PEER"},
	lb.ReasonRouteFiltered: {"The session is up, but the router has not taken the route: a filter on it, such as a " +
		"prefix list, rejects it.", "add the pool to the filter for the nodes on the router"},
	lb.ReasonSourceMissing: {"The node does not have the peer's sourceAddress.",
		"kubectl edit bgppeer PEER   # sourceAddress, or nodeSelectors"},
	lb.ReasonSessionTaken: {"The router has one session with one address of the node, and another program, such as " +
		"Calico's BIRD, has that one.",
		"kubectl edit bgppeer PEER   # a sourceAddress that the other program does not use"},
	lb.ReasonInterfaceMissing: {"The node does not have the peer's interface, or it is down.",
		"kubectl edit bgppeer PEER   # interface, or nodeSelectors"},
	lb.ReasonVRFMissing: {"The node has no VRF of the name in the peer's spec.vrf.",
		"kubectl edit bgppeer PEER   # vrf, or nodeSelectors"},
	lb.ReasonVRFUndelivered: {"The node's kernel does not deliver what comes in through the peer's VRF, so the peer " +
		"hears of no address.", "landfallctl explain svc NAME   # it says what is missing"},
	lb.ReasonSecretMissing: {"The Secret with the password does not exist, has no password, or the speakers may not " +
		"read it.",
		"kubectl -n landfall-system get secrets   # and speaker.bgpSecrets of the chart must name it"},
	lb.ReasonSecretElsewhere: {"The Secret with the password is in another namespace than Landfall.",
		"copy the Secret into Landfall's namespace"},
	lb.ReasonProfileMissing: {"The BFDProfile does not exist, so nothing monitors the path.", "kubectl get bfdprofiles"},
	lb.ReasonBFDDown: {"BFD reports that the path to the peer is down.",
		"check the link, and BFD on the router (UDP ports 3784 and 4784)"},
	lb.ReasonFamilyNotOffered: {"The session does not carry routes of the address's family.",
		"activate the family on the router, or set dualStackAddressFamily on the BGPPeer"},
	lb.ReasonNoNextHop: {"The node has no address of the route's family for the peer to send to.",
		"give the node an address of that family"},
	lb.ReasonUnknownPeer: {"An advertisement names a peer that does not exist.", "kubectl get bgppeers"},
	lb.ReasonSelectorInvalid: {"A label selector of a pool, advertisement or peer cannot be read, so it selects nothing.",
		"kubectl explain l2advertisement.spec.nodeSelectors.matchExpressions   # and correct what the message names"},
	lb.ReasonSelectsNoPool: {"An advertisement selects no pool, so it announces nothing.",
		"kubectl edit l2advertisement NAME   # spec.ipAddressPools and ipAddressPoolSelectors; kubectl get ipaddresspools"},
	lb.ReasonSelectsNoNode: {"The nodeSelectors of an advertisement match no Node, so no node announces.",
		"kubectl edit l2advertisement NAME   # spec.nodeSelectors; kubectl get nodes --show-labels"},
	lb.ReasonUnknownPool:        {"An advertisement names a pool that does not exist.", "kubectl get ipaddresspools"},
	lb.ReasonUnknownCommunity:   {"An advertisement uses a name that no Community defines.", "kubectl get communities"},
	lb.ReasonCommunityAmbiguous: {"Community objects define a name differently.", "kubectl get communities -o yaml"},
	lb.ReasonAttributeConflict: {"An older advertisement gives the same prefix another attribute.",
		"make the attributes of both advertisements equal"},
	lb.ReasonAggregateOutside: {"The aggregate reaches beyond the ranges of the pool.",
		"make aggregationLength longer, or the pool's ranges whole"},
	lb.ReasonAggregateLocal: {"The aggregate attracts traffic that policy Local does not let every node deliver.",
		"do not aggregate pools with Services of policy Local"},
	lb.ReasonAttributeUnsent: {"No peer of the advertisement is of the kind that receives the attribute.",
		"localPref goes to internal peers only; use communities or med for external ones"},

	"ProfileInvalid": {"The BFDProfile cannot be used.", "kubectl edit bfdprofile PROFILE"},
	"EchoUnsupported": {"The BFDProfile asks for echo mode, which Landfall does not have.",
		"kubectl edit bfdprofile PROFILE"},

	// What a proxy says of its node.
	"Deliverable": {Meaning: "The node's kernel holds the rules of the address, and delivers to an endpoint."},
	"Serving":     {Meaning: "A node announces each address of the Service."},
	"FailedToStartServiceHealthcheck": {"The proxy cannot listen on the Service's healthCheckNodePort.",
		"find what uses the port on the node: ss -ltnp; or set another spec.healthCheckNodePort"},

	// Nodes.
	lb.ReasonNetworkUnavailable: {"The Node has the condition NetworkUnavailable: its network plugin (CNI) has not set " +
		"up the network, or says so.",
		"kubectl describe node NODE   # and see what the network plugin says there"},
	lb.ReasonNodeNotReady: {"The Node is not ready, and speaker.requireReady has speakers announce from ready nodes only.",
		"kubectl describe node NODE"},
	lb.ReasonNoCarrier: {"An interface that packets have to pass is down or has no carrier.",
		"ip -br link   # on NODE: set it up, or plug in its cable"},
	lb.ReasonForwardingOff: {"The node's kernel forwards no packets.",
		"sysctl -w net.ipv4.ip_forward=1   # on the node, for IPv6 net.ipv6.conf.all.forwarding=1; and in /etc/sysctl.d, " +
			"or for IPv4 proxy.setIPForward=true"},
	lb.ReasonForwardDropped: {"A chain of another program drops packets that the node forwards, as Docker and ufw do.",
		"accept the pod network in that chain, or, if it is iptables' chain FORWARD, set proxy.acceptForwarded=true"},
	lb.ReasonPodNetworkUnmatched: {"No pod of the node is in proxy.clusterCIDR, or in spec.podCIDRs of the Node with " +
		"proxy.detectLocalMode NodeCIDR.", "set proxy.clusterCIDR to the network of the pods"},
	lb.ReasonServiceNetworkShared: {"A network of cluster IPs, of a ServiceCIDR or proxy.serviceCIDR, has addresses of " +
		"nodes or pods too. Connections to cluster IPs there that no Service has are not refused, as they may be for those.",
		"kubectl get servicecidrs   # give Services a network of their own, or correct proxy.serviceCIDR"},
	lb.ReasonARPNotStrict: {"kube-proxy has put Services' addresses on kube-ipvs0, and the kernel answers ARP for them " +
		"on every " +
		"node.", "kubectl -n kube-system edit configmap kube-proxy   # ipvs.strictARP: true, then restart kube-proxy"},
	lb.ReasonAddressOnNode: {"An interface of the node has an address of a Service, so its kernel answers for the " +
		"address, whichever node owns it: keepalived, another load balancer or a person has left it there.",
		"ip -br addr   # on NODE: stop what has set the address there, and remove it with ip addr del"},
	lb.ReasonAPIServerUnreachable: {"The node does not reach the API server: it goes on with what it knew, and shows " +
		"nothing new in conditions.",
		"kubectl cluster-info   # open the way from NODE to this address"},
	lb.ReasonPodRouteMissing: {"The node's kernel has no route to pods, or only the default route, so connections that " +
		"it sends there are lost. Where routers outside know the pods, set proxy.pathCheck=default-route.",
		"kubectl -n kube-system get pods -o wide --field-selector spec.nodeName=NODE   # restart its network plugin's"},
	lb.ReasonProbeFailed: {"The endpoint is ready, but does not answer the probes of one or more nodes " +
		"(landfall.dev/probe). These nodes send it no new connections. The network between NODE and the pod is broken, or " +
		"something there drops packets.",
		"landfallctl explain svc NAME -o wide   # then restart the network plugin's pod on NODE"},
	lb.ReasonProbeIgnored: {"Fewer than half of the Service's endpoints answer the probes of a node, which therefore " +
		"uses all of them. The probe is wrong, or the node is cut off from most pods.",
		"kubectl annotate service NAME landfall.dev/probe=tcp --overwrite   # or a path that pods answer with 200 to 399"},
	lb.ReasonProbePassed: {Meaning: "All endpoints answer the node's probes again, or are not probed any more."},
	lb.ReasonProgrammed: {Meaning: "The readiness gate of a pod is open: the rules of its node deliver to it, and the " +
		"addresses of its Services are announced."},
	lb.ReasonNoService: {Meaning: "The readiness gate of a pod is open, as no Service names the pod as an endpoint."},
	lb.ReasonTimedOut: {"The readiness gate of a pod is open, although the rules of its node did not deliver to it in " +
		"time, or an address of its Services was not announced.",
		"landfallctl explain svc NAME   # of the Services in the message"},
	lb.ReasonProbeInvalid: {"The annotation landfall.dev/probe cannot be read, or the Service has nothing to probe. The " +
		"Service is served without probes.",
		"kubectl annotate service NAME landfall.dev/probe=http:/healthz --overwrite   # or tcp"},
	lb.ReasonProbeRefused: {"Nodes do not probe the endpoints of the Service: there are too many, none is a pod with an " +
		"address of its own, or probes are switched off. The Service is served without probes.",
		"landfallctl explain svc NAME -o wide   # names which; docs/guide/proxy.md has the bounds"},
	lb.ReasonConntrackFull: {"The node's table of connections is full, so its kernel drops new ones.",
		"sysctl -w net.netfilter.nf_conntrack_max=1048576   # on the node, and in /etc/sysctl.d"},
	lb.ReasonMTUMismatch: {"Nodes in one subnet send packets of different sizes: the larger ones are lost.",
		"ip link set dev eth0 mtu 1500   # on each node of the subnet, what the switch has"},
	lb.ReasonEndpointUnreachable: {"A node that announces the Service cannot open TCP connections to its endpoints, so " +
		"clients cannot either: targetPort has a wrong number, a NetworkPolicy or firewall drops them, or the pod network " +
		"does not carry them.",
		"kubectl describe service NAME   # is its TargetPort a port where the pods listen?"},
	lb.ReasonClientsDropped: {"A rule of another program in the node's kernel drops or refuses what clients send to the " +
		"Service, ahead of Landfall's rules or behind them.",
		"nft list ruleset   # on NODE: take the rule away, or accept the address ahead of it"},
	lb.ReasonClientsUnrouted: {"The node has no route to clients that are in none of its own subnets, so replies to " +
		"them are lost.", "ip route   # on NODE: is there a default route?"},
	lb.ReasonProxyHangs: {"The proxy's process runs and answers nobody: it is stopped, or starved of CPU time. The " +
		"kernel goes on with the rules that it has, and after speaker.hold the node announces nothing.",
		"kubectl -n landfall-system get pods -o wide --field-selector spec.nodeName=NODE   # delete the pod there"},
	lb.ReasonGossipBlocked: {"The speaker does not hear speakers on other nodes that are ready: a firewall, or another " +
		"gossip key.", "open TCP and UDP port 7947 between the nodes; all speakers need one gossip key"},
}
