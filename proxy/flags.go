package main

import (
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/plan"
)

type flags struct {
	mode, clusterCIDR, detectLocalMode, podBridge, podPrefix string
	nodePortAddresses                                        []string
	masqueradeAll                                            bool
	masqueradeBit                                            int
	healthzBindAddress, serviceProxyName, feedSocket         string
	drain                                                    time.Duration
	scheduler, procSysNet                                    string
	cleanup, liberal, answerPing, rescue                     bool
}

func (f *flags) add(set *pflag.FlagSet) {
	set.StringVar(
		&f.mode, "mode", "auto",
		"how rules are written: nftables, iptables, or auto for nftables where the kernel can (Linux 5.13 or later), else "+
			"iptables")
	set.StringVar(&f.clusterCIDR, "cluster-cidr", "",
		"the pods' network, or one of each family with a comma between them; with --detect-local-mode=ClusterCIDR")
	set.StringVar(&f.detectLocalMode, "detect-local-mode", "ClusterCIDR",
		"how to tell connections from pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix")
	set.StringVar(&f.podBridge, "pod-bridge-interface", "", "the pods' bridge; with --detect-local-mode=BridgeInterface")
	set.StringVar(&f.podPrefix, "pod-interface-name-prefix", "",
		"what names of the pods' interfaces start with; with --detect-local-mode=InterfaceNamePrefix")
	set.StringSliceVar(&f.nodePortAddresses, "nodeport-addresses", nil,
		"networks of the node's addresses that serve node ports, or primary for the Node's InternalIPs (default: all "+
			"addresses)")
	set.BoolVar(&f.masqueradeAll, "masquerade-all", false, "masquerade all that goes to a cluster IP")
	set.IntVar(&f.masqueradeBit, "masquerade-bit", 14, "bit of the packet mark that asks for masquerading, 0 to 31")
	set.StringVar(&f.healthzBindAddress, "healthz-bind-address", "0.0.0.0:10256",
		`address:port that serves the node's /healthz and /livez; "" or 0 serves none`)
	set.StringVar(&f.serviceProxyName, "service-proxy-name", "",
		"serve only Services whose label service.kubernetes.io/service-proxy-name has this value (default: those without "+
			"that label)")
	set.StringVar(&f.feedSocket, "feed-socket", lb.FeedSocket,
		"unix socket where the speaker learns what the kernel delivers")
	set.DurationVar(&f.drain, "drain-time", 5*time.Second,
		"how long an external address works on after it was taken from its Service")
	set.StringVar(&f.scheduler, "scheduler", string(plan.Random),
		"how a backend is chosen for Services without the annotation "+lb.AnnotationScheduler+
			": random, round-robin, source-hash or maglev; iptables can only random")
	set.BoolVar(&f.liberal, "conntrack-tcp-be-liberal", false,
		"let conntrack take TCP packets outside of the window for valid, for networks with asymmetric routes")
	set.BoolVar(&f.answerPing, "answer-ping", true,
		"answer pings to VIPs and external IPs that this node delivers; cluster IPs never answer")
	set.StringVar(&f.procSysNet, "proc-sys-net", "/proc/sys/net",
		"folder of the kernel's network parameters, for containers that see /proc/sys read-only")
	set.BoolVar(
		&f.rescue, "rescue", true,
		"hand packets of TCP connections to an external address that this node does not know to the node that announced it "+
			"before")
	set.BoolVar(&f.cleanup, "cleanup", false,
		"remove all rules of Landfall from this node and exit, as the argument cleanup does")
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
	s := settings{masqueradeAll: f.masqueradeAll, masqueradeBit: f.masqueradeBit, drain: f.drain, answerPing: f.answerPing}
	switch f.mode {
	case modeAuto, modeIptables, modeNftables:
	default:
		return s, ops.Usagef("--mode: %q is none of auto, iptables, nftables", f.mode)
	}
	scheduler, ok := plan.ParseScheduler(f.scheduler)
	if !ok {
		return s, ops.Usagef("--scheduler: %q is none of random, round-robin, source-hash, maglev", f.scheduler)
	}
	s.scheduler = scheduler
	if f.masqueradeBit < 0 || f.masqueradeBit > 31 {
		return s, ops.Usagef("--masquerade-bit: %d is not between 0 and 31", f.masqueradeBit)
	}
	if f.drain < 0 {
		return s, ops.Usagef("--drain-time: %s is negative", f.drain)
	}
	if address := f.healthzAddress(); address != "" {
		if _, err := netip.ParseAddrPort(address); err != nil && !strings.HasPrefix(address, ":") {
			return s, ops.Usagef("--healthz-bind-address: %q is not address:port", address)
		}
	}
	if err := f.detector(&s); err != nil {
		return s, err
	}
	return s, f.nodePorts(&s)
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
// networks are given without it.
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
	s.loopbackNodePorts = s.loopbackNodePorts || !limited
	return nil
}
