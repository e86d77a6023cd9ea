package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/counters"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/probe"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/tunnel"
	"github.com/landfall-lb/landfall/proxy/vrf"
)

// The values of --path-check.
const (
	pathStrict       = "strict"
	pathDefaultRoute = "default-route"
	pathOff          = "off"
)

// The least and the longest --probe-interval.
const minProbeInterval, maxProbeInterval = 50 * time.Millisecond, 10 * time.Second

type flags struct {
	mode, clusterCIDR, detectLocalMode, podBridge, podPrefix string
	nodePortAddresses, serviceCIDRs                          []string
	masqueradeAll                                            bool
	masqueradeBit                                            int
	healthzBindAddress, serviceProxyName, feedSocket         string
	drain                                                    time.Duration
	scheduler, procSysNet, externalIPs                       string
	cleanup, liberal, answerPing, rescue, rescueRing, direct bool
	localhostNodePorts, setIPForward, acceptForwarded        bool
	pathCheck                                                string
	rescueLimit, rescueTunnelPort, namespaceLimit            int
	serviceCounters                                          string
	probeInterval, gateTimeout                               time.Duration
	relay, relayUDP                                          bool
	relayUDPRate                                             int
	flowOffload                                              bool
	relaySocket                                              string
	namespace                                                string
	daemonSets                                               []string
	vrfMark                                                  uint32
}

func (f *flags) add(set *pflag.FlagSet) {
	set.StringVar(
		&f.mode, "mode", "auto",
		"kernel interface for rules: nftables, iptables or auto; auto takes nftables if the kernel supports it (Linux "+
			lb.NftablesSince+" or later), else iptables")
	set.StringVar(&f.clusterCIDR, "cluster-cidr", "",
		"CIDR of the pod network, or one IPv4 and one IPv6 CIDR separated by a comma; used with "+
			"--detect-local-mode=ClusterCIDR (default: none; the proxy cannot tell pods from other clients)")
	set.StringSliceVar(&f.serviceCIDRs, "service-cidr", nil,
		"CIDRs of cluster IPs, besides those in ServiceCIDR objects, which the cluster has from Kubernetes 1.33 on "+
			"(--service-cluster-ip-range of the API server): the proxy refuses external IPs in them and drops connections to "+
			"addresses that no Service has")
	set.StringVar(&f.detectLocalMode, "detect-local-mode", "ClusterCIDR",
		"how the proxy recognises connections from this node's pods, which it does not masquerade: ClusterCIDR, NodeCIDR, "+
			"BridgeInterface or InterfaceNamePrefix")
	set.StringVar(&f.podBridge, "pod-bridge-interface", "",
		"name of the bridge that pods are attached to; required by --detect-local-mode=BridgeInterface")
	set.StringVar(&f.podPrefix, "pod-interface-name-prefix", "",
		"prefix of the names of the pods' interfaces on the node; required by --detect-local-mode=InterfaceNamePrefix")
	set.StringSliceVar(&f.nodePortAddresses, "nodeport-addresses", nil,
		"CIDRs; node ports are served at the node's addresses in them; primary stands for the Node's InternalIPs (default: "+
			"all addresses of the node)")
	set.BoolVar(&f.localhostNodePorts, "iptables-localhost-nodeports", true,
		"in iptables mode, serve node ports at 127.0.0.1 too, which sets the kernel parameter route_localnet; nftables mode "+
			"and IPv6 never do")
	set.BoolVar(&f.masqueradeAll, "masquerade-all", false,
		"masquerade every connection to a cluster IP, also those from pods")
	set.IntVar(&f.masqueradeBit, "masquerade-bit", 14,
		"bit of the packet mark, 0 to 31, that marks packets to masquerade; change it if another program uses the same bit")
	set.StringVar(&f.healthzBindAddress, "healthz-bind-address", "0.0.0.0:10256",
		`address:port of the node's /healthz and /livez; "" or 0 switches them off`)
	set.StringVar(&f.serviceProxyName, "service-proxy-name", "",
		"serve only Services whose label service.kubernetes.io/service-proxy-name has this value (default: only Services "+
			"without the label)")
	set.StringVar(&f.feedSocket, "feed-socket", lb.FeedSocket,
		"Unix socket on which the proxy reports to the speaker what the kernel delivers")
	set.DurationVar(&f.drain, "drain-time", 5*time.Second,
		"how long the rules of an external address stay after its Service lost the address, or its policy became Local, for "+
			"packets in flight")
	set.StringVar(&f.scheduler, "scheduler", string(plan.Random),
		"how the proxy picks a backend for Services without the annotation "+lb.AnnotationScheduler+
			": "+plan.Schedulers+"; iptables mode supports only random")
	set.BoolVar(&f.liberal, "conntrack-tcp-be-liberal", false,
		"let conntrack treat TCP packets outside the window as valid; needed where routes are asymmetric")
	set.BoolVar(&f.answerPing, "answer-ping", true,
		"answer pings to VIPs and external IPs that this node delivers; cluster IPs never answer pings")
	set.StringVar(&f.externalIPs, "external-ips", "allow",
		"addresses in spec.externalIPs that the proxy serves: allow, deny, or CIDRs separated by commas; never those of an "+
			"IPAddressPool or of cluster IPs, and those of Nodes, of the node's own interfaces, of pods, API servers and "+
			"BGPPeers only if a CIDR contains them")
	set.StringVar(&f.pathCheck, "path-check", pathStrict,
		"whether an address needs a way from the kernel to an endpoint, beside its rules: strict (a route that is not the "+
			"default one), default-route (the default route counts too, for networks whose routers know the pods) or off; "+
			"endpoints without a way are left out while others have one")
	set.DurationVar(&f.probeInterval, "probe-interval", probe.DefaultInterval,
		"time between two probes of a backend of a Service with the annotation "+lb.AnnotationProbe+", from "+
			minProbeInterval.String()+" to "+maxProbeInterval.String()+"; longer where there are many endpoints or nodes; 0 "+
			"switches probes off")
	set.IntVar(&f.namespaceLimit, "namespace-limit", 16,
		fmt.Sprintf("how much the Services of one namespace may need together of rules, or of elements in nftables mode: so "+
			"many times as much as one Service may; beyond that, what is new is refused; 0 to %d, where 0 is any number",
			maxNamespaceLimit))
	set.BoolVar(&f.setIPForward, "set-ip-forward", false,
		"switch on the kernel parameter net.ipv4.ip_forward if it is off; without forwarding no packet reaches a pod")
	set.BoolVar(&f.acceptForwarded, "accept-forwarded", false,
		"where the chain FORWARD of iptables drops connections of pods and no other rule accepts any, accept those of "+
			"Services in front of all its rules; needs --cluster-cidr")
	set.StringVar(&f.procSysNet, "proc-sys-net", "/proc/sys/net",
		"directory of the kernel's network parameters; a container whose /proc/sys is read-only mounts the host's elsewhere")
	set.BoolVar(
		&f.rescue, "rescue", true,
		"forward TCP packets of unknown connections to an external address to the nodes that announced the address before, "+
			"so that connections survive when the address moves")
	set.BoolVar(&f.rescueRing, "rescue-ring", true,
		"with --rescue, also forward such packets round the nodes over which routers spread an address (BGP); all nodes "+
			"need the same setting")
	set.BoolVar(&f.direct, "direct-forwarding", false,
		"in nftables mode with --rescue-ring, hand connections to Services with "+lb.AnnotationForwarding+": "+
			lb.ForwardingDirect+" to the nodes of their backends")
	set.BoolVar(&f.flowOffload, "flow-offload", false,
		"in nftables mode, offload established TCP flows to Services, and from Linux "+lb.OffloadUDPSince+
			" on those of UDP, to a flowtable of the kernel, if it has that (CONFIG_NF_FLOW_TABLE): their packets pass no "+
			"rules, of other programs neither; not with --service-counters")
	set.IntVar(
		&f.rescueLimit, "rescue-limit", rescue.DefaultLimit,
		fmt.Sprintf("with --rescue, how many packets of unknown connections the node forwards in a second for each external "+
			"address, and six times as many for all; it drops what is above; 0 to %d, where 0 is no limit", rescue.MaxLimit))
	set.IntVar(
		&f.rescueTunnelPort, "rescue-tunnel-port", tunnel.DefaultPort,
		"with --rescue-ring, UDP port over which nodes forward such packets to nodes behind routers (VXLAN); all nodes need "+
			"the same; 0 leaves out nodes behind routers")
	set.Uint32Var(&f.vrfMark, "vrf-mark", uint32(vrf.DefaultMarks),
		"bits of the packet mark and the connection mark, at least two that are adjacent, that have answers to connections "+
			"from a VRF leave by it; change them if another program uses the same bits; 0 leaves VRFs alone, and speakers "+
			"announce nothing there (default: 0x70)")
	set.StringVar(&f.serviceCounters, "service-counters", string(counters.Off),
		"count packets, bytes, connections and refusals of each Service: off; external (all frontends but cluster IPs); or "+
			"all; up to eight time series for each Service and node; needs Linux 5.7 or later, in iptables mode too")
	set.BoolVar(&f.relay, "relay", false,
		"send connections to Services with the annotation "+lb.AnnotationRelay+
			" to this node's relay, while that is there")
	set.BoolVar(&f.relayUDP, "relay-udp", false,
		"with --relay, send UDP there too, in nftables mode; the relay needs --udp")
	set.IntVar(&f.relayUDPRate, "relay-udp-rate", 1000,
		"with --relay-udp, how many new flows of UDP a second go to the relay from the Services of each "+
			"namespace, a quarter of them at once, and twice as many in all; others go straight to endpoints; 0 for no limit")
	set.DurationVar(&f.gateTimeout, "readiness-gate-timeout", 0,
		"open the readiness gate "+lb.ConditionProgrammed+" of this node's pods once the node's rules deliver to them, and "+
			"after that time in any case; 0 leaves the gate to others")
	set.StringVar(&f.relaySocket, "relay-socket", wire.Socket, "with --relay, Unix socket for the relay")
	set.StringVar(&f.namespace, "namespace", cmp.Or(os.Getenv("POD_NAMESPACE"), "landfall-system"),
		"namespace of --daemonsets (default: $POD_NAMESPACE, else landfall-system)")
	set.StringSliceVar(&f.daemonSets, "daemonsets", nil,
		"DaemonSets in --namespace that run the proxy, its own first; a proxy that stops after its own was deleted, while "+
			"none of the others is there, removes all of Landfall's rules from the node (default: rules always stay)")
	set.BoolVar(&f.cleanup, "cleanup", false,
		"remove all of Landfall's rules from this node and exit; the same as the argument cleanup")
}

const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

func (f *flags) serviceSelector() string {
	if f.serviceProxyName == "" {
		return "!" + labelServiceProxyName
	}
	return labelServiceProxyName + "=" + f.serviceProxyName
}

func (f *flags) healthzAddress() string {
	if f.healthzBindAddress == "0" {
		return ""
	}
	return f.healthzBindAddress
}

// settings reads what the flags say.
func (f *flags) settings() (settings, error) {
	s := settings{masqueradeAll: f.masqueradeAll, masqueradeBit: f.masqueradeBit, drain: f.drain, answerPing: f.answerPing,
		relay: f.relay, relayUDP: f.relayUDP, relayUDPRate: f.relayUDPRate, gateTimeout: f.gateTimeout,
		limit: f.namespaceLimit}
	if err := cmp.Or(
		ops.OneOf("mode", f.mode, modeAuto, modeIptables, modeNftables), ops.NotNegative("drain-time", f.drain),
		ops.NotNegative("readiness-gate-timeout", f.gateTimeout), f.checkRelay(),
		f.checkOffload(), ops.OneOf("path-check", f.pathCheck, pathStrict, pathDefaultRoute, pathOff),
		ops.OneOf("service-counters", f.serviceCounters, string(counters.Off), string(counters.External),
			string(counters.All)),
	); err != nil {
		return s, err
	}
	scheduler, ok := plan.ParseScheduler(f.scheduler)
	if !ok {
		return s, ops.Usagef("--scheduler: %q is none of %s", f.scheduler, plan.Schedulers)
	}
	s.scheduler = scheduler
	var err error
	if s.externalIPs, err = plan.ParseExternalIPs(f.externalIPs); err != nil {
		return s, ops.Usagef("--external-ips: %v", err)
	}
	if f.masqueradeBit < 0 || f.masqueradeBit > 31 {
		return s, ops.Usagef("--masquerade-bit: %d is not between 0 and 31", f.masqueradeBit)
	}
	if err := vrf.Marks(f.vrfMark).Check(); err != nil {
		return s, ops.Usagef("--vrf-mark: %v", err)
	}
	if f.vrfMark&(1<<f.masqueradeBit) != 0 {
		return s, ops.Usagef("--vrf-mark: %#x contains the bit of --masquerade-bit, %d", f.vrfMark, f.masqueradeBit)
	}
	if f.rescueLimit < 0 || f.rescueLimit > rescue.MaxLimit {
		return s, ops.Usagef("--rescue-limit: %d is not between 0 and %d", f.rescueLimit, rescue.MaxLimit)
	}
	if f.namespaceLimit < 0 || f.namespaceLimit > maxNamespaceLimit {
		return s, ops.Usagef("--namespace-limit: %d is not between 0 and %d", f.namespaceLimit, maxNamespaceLimit)
	}
	if f.rescueTunnelPort < 0 || f.rescueTunnelPort > 65535 {
		return s, ops.Usagef("--rescue-tunnel-port: %d is not between 0 and 65535", f.rescueTunnelPort)
	}
	if i := f.probeInterval; i != 0 && (i < minProbeInterval || i > maxProbeInterval) {
		return s, ops.Usagef("--probe-interval: %v is neither 0 nor between %v and %v", i, minProbeInterval, maxProbeInterval)
	}
	if address := f.healthzAddress(); address != "" {
		if _, err := netip.ParseAddrPort(address); err != nil && !strings.HasPrefix(address, ":") {
			return s, ops.Usagef("--healthz-bind-address: %q is not address:port", address)
		}
	}
	if err := f.detector(&s); err != nil {
		return s, err
	}
	if s.acceptForwarded = f.acceptForwarded; f.acceptForwarded && len(s.pods.Prefixes) == 0 {
		return s, ops.Usagef("--accept-forwarded needs --cluster-cidr with --detect-local-mode=ClusterCIDR")
	}
	if s.serviceNetworks, err = serviceCIDRs(f.serviceCIDRs); err != nil {
		return s, err
	}
	return s, f.nodePorts(&s)
}

// The shortest prefixes of --service-cidr. What is larger is no network of cluster IPs, and the rules would drop
// connections to the rest of the world.
const leastServiceBits4, leastServiceBits6 = 8, 32

// serviceCIDRs reads --service-cidr.
func serviceCIDRs(words []string) (networks []netip.Prefix, err error) {
	for _, word := range words {
		network, err := netip.ParsePrefix(strings.TrimSpace(word))
		if err != nil || network.Addr().Is4In6() {
			return nil, ops.Usagef("--service-cidr: %q is not a CIDR", word)
		}
		least := leastServiceBits4
		if network.Addr().Is6() {
			least = leastServiceBits6
		}
		if network.Bits() < least {
			return nil, ops.Usagef("--service-cidr: %s is larger than /%d", network, least)
		}
		networks = append(networks, network.Masked())
	}
	return networks, nil
}

func (f *flags) detector(s *settings) error {
	switch f.detectLocalMode {
	case "ClusterCIDR":
		for cidr := range strings.SplitSeq(f.clusterCIDR, ",") {
			if strings.TrimSpace(cidr) == "" {
				continue // none: pods cannot be told from others
			}
			network, err := netip.ParsePrefix(strings.TrimSpace(cidr))
			if err != nil {
				return ops.Usagef("--cluster-cidr: %q is not a CIDR", cidr)
			}
			s.pods.Prefixes = append(s.pods.Prefixes, network.Masked())
		}
	case "NodeCIDR":
		s.nodeCIDR = true
	case "BridgeInterface":
		if f.podBridge == "" {
			return ops.Usagef("--detect-local-mode=BridgeInterface needs --pod-bridge-interface")
		}
		s.pods.Interface = f.podBridge
	case "InterfaceNamePrefix":
		if f.podPrefix == "" {
			return ops.Usagef("--detect-local-mode=InterfaceNamePrefix needs --pod-interface-name-prefix")
		}
		s.pods.Interface = f.podPrefix + "+"
	default:
		return ops.Usagef("--detect-local-mode: %q is none of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix",
			f.detectLocalMode)
	}
	const longest = unix.IFNAMSIZ - 1
	if len(s.pods.Interface) > longest || strings.ContainsAny(s.pods.Interface, " \t\n/!\"'") {
		return ops.Usagef("%q is not a name of an interface", s.pods.Interface)
	}
	return nil
}

// nodePorts reads --nodeport-addresses. Node ports are reached at 127.0.0.1 too, unless IPv4
// networks are given without it, or --iptables-localhost-nodeports is false.
func (f *flags) nodePorts(s *settings) error {
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	limited := false
	for _, word := range f.nodePortAddresses {
		word = strings.TrimSpace(word)
		if word == "primary" {
			s.primary, limited = true, true
			continue
		}
		network, err := netip.ParsePrefix(word)
		if err != nil {
			return ops.Usagef("--nodeport-addresses: %q is neither a CIDR nor primary", word)
		}
		network = network.Masked()
		s.nodePorts = append(s.nodePorts, network)
		limited = limited || network.Addr().Is4()
		s.loopbackNodePorts = s.loopbackNodePorts || network.Overlaps(loopback)
	}
	s.loopbackNodePorts = f.localhostNodePorts && (s.loopbackNodePorts || !limited)
	return nil
}

// maxNamespaceLimit is more than a node can hold.
const maxNamespaceLimit = 1000

// maxRelayUDPRate is more than a relay can take.
const maxRelayUDPRate = 100_000

func (f *flags) checkOffload() error {
	if f.flowOffload && f.serviceCounters != string(counters.Off) {
		return ops.Usagef("--flow-offload: no rule could count the packets for --service-counters=%s", f.serviceCounters)
	}
	return nil
}

func (f *flags) checkRelay() error {
	if f.relayUDPRate < 0 || f.relayUDPRate > maxRelayUDPRate {
		return ops.Usagef("--relay-udp-rate: %d is not between 0 and %d", f.relayUDPRate, maxRelayUDPRate)
	}
	return nil
}
