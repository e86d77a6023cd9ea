package plan

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
)

// tenant returns a Service with a cluster IP of its own, created so many seconds after the first.
func tenant(name string, created int, change ...func(*lb.Service)) lb.Service {
	namespace, name, _ := strings.Cut(name, "/")
	return service(append([]func(*lb.Service){func(s *lb.Service) {
		s.Key = lb.Key{Namespace: namespace, Name: name}
		s.UID, s.Created = name, time.Unix(int64(1000+created), 0)
		s.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 1, name[0]})}
		s.Type, s.Ingress, s.Ports[0].NodePort = lb.ClusterIP, nil, 0
	}}, change...)...)
}

func vip(ip string) func(*lb.Service) {
	return func(s *lb.Service) { s.Type, s.Ingress = lb.LoadBalancer, []lb.Ingress{{Addr: addr(ip)}} }
}

func intruding(how lb.Intrusion) func(*lb.Service) { return func(s *lb.Service) { s.Intruding = how } }

func external(ips ...string) func(*lb.Service) {
	return func(s *lb.Service) {
		for _, ip := range ips {
			s.ExternalIPs = append(s.ExternalIPs, addr(ip))
		}
	}
}

func listedAt(addr string, at int64, port string, since int64) func(*lb.Service) {
	return func(s *lb.Service) { s.Listed = lb.Listing{addr: at, port: since} }
}

func at(port uint16) func(*lb.Service) { return func(s *lb.Service) { s.Ports[0].Port = port } }

func onNodePort(port uint16) func(*lb.Service) {
	return func(s *lb.Service) { s.Type, s.Ports[0].NodePort = lb.NodePort, port }
}

// grants returns what each Service gets beside its cluster IP, and what not and why.
func grants(claims *Claims, plans []Service) string {
	var lines []string
	for _, p := range plans {
		p = claims.Grant(p)
		for line := range strings.SplitSeq(show(p), "\n") {
			if line != "" && !strings.HasPrefix(line, "ClusterIP 10.96.1.") && !strings.HasPrefix(line, "ClusterIP [") {
				lines = append(lines, p.Key.Name+": "+line)
			}
		}
		for _, d := range p.Denied {
			lines = append(lines, fmt.Sprintf("%s: %s: %s", p.Key.Name, d.Reason, d.Message))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// in6 returns the IPv6 address that stands for one of IPv4.
func in6(addr netip.Addr) netip.Addr {
	if addr.Is6() {
		return addr
	}
	four := addr.As4()
	return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 0, 0x64, 12: four[0], 13: four[1], 14: four[2], 15: four[3]})
}

func all6(addrs []netip.Addr) (all []netip.Addr) {
	for _, addr := range addrs {
		all = append(all, in6(addr))
	}
	return all
}

func prefixes6(prefixes []netip.Prefix) (all []netip.Prefix) {
	for _, p := range prefixes {
		if p.Addr().Is4() {
			p = netip.PrefixFrom(in6(p.Addr()), p.Bits()+96)
		}
		all = append(all, p)
	}
	return all
}

var text4 = regexp.MustCompile(`(\d+\.\d+\.\d+\.\d+)([:/]\d+)?`)

// textIn6 returns lines about IPv4 as they are about IPv6.
func textIn6(text string) string {
	text = text4.ReplaceAllStringFunc(text, func(found string) string {
		if at, err := netip.ParseAddrPort(found); err == nil {
			return netip.AddrPortFrom(in6(at.Addr()), at.Port()).String()
		}
		if p, err := netip.ParsePrefix(found); err == nil {
			return netip.PrefixFrom(in6(p.Addr()), p.Bits()+96).String()
		}
		return in6(netip.MustParseAddr(found)).String()
	})
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func servicesIn6(services []lb.Service) (all []lb.Service) {
	for _, s := range services {
		s.ClusterIPs, s.ExternalIPs = all6(s.ClusterIPs), all6(s.ExternalIPs)
		s.Ingress = slices.Clone(s.Ingress)
		for i := range s.Ingress {
			s.Ingress[i].Addr = in6(s.Ingress[i].Addr)
		}
		listed := s.Listed
		s.Listed = nil
		for what, at := range listed {
			if addr, err := netip.ParseAddr(what); err == nil {
				what = in6(addr).String()
			}
			if s.Listed == nil {
				s.Listed = lb.Listing{}
			}
			s.Listed[what] = at
		}
		all = append(all, s)
	}
	return all
}

func (e ExternalIPs) in6() ExternalIPs {
	e.Networks, e.Allowed, e.Pods = prefixes6(e.Networks), prefixes6(e.Allowed), prefixes6(e.Pods)
	e.APIServers, e.Routers = all6(e.APIServers), all6(e.Routers)
	pools := map[string][]lb.Range{}
	for name, ranges := range e.Pools {
		for _, r := range ranges {
			pools[name] = append(pools[name], lb.Range{From: in6(r.From), To: in6(r.To)})
		}
	}
	e.Pools, e.Own = pools, slices.Clone(e.Own)
	for i := range e.Own {
		e.Own[i].Addr = in6(e.Own[i].Addr)
	}
	if e.Nodes != nil {
		e.Nodes = nodes6
	}
	return e
}

// contested are Nodes, and nodes6 the same in IPv6.
var contested = map[string]lb.Node{"a": {Addresses: []netip.Addr{addr("172.31.0.1")}},
	"b": {Addresses: []netip.Addr{addr("172.31.0.2"), addr("2001:db8::2")},
		ExternalAddresses: []netip.Addr{addr("198.51.100.2")},
		PodCIDRs:          []netip.Prefix{netip.MustParsePrefix("10.244.2.0/24")}}}

var nodes6 = func() *Nodes {
	nodes := map[string]lb.Node{}
	for name, n := range contested {
		n.Addresses, n.ExternalAddresses, n.PodCIDRs = all6(n.Addresses), all6(n.ExternalAddresses), prefixes6(n.PodCIDRs)
		nodes[name] = n
	}
	return NewNodes(nodes)
}()

func TestContract11WhoGetsAFrontend(t *testing.T) {
	pools := map[string][]lb.Range{"lan": {{From: addr("192.0.2.0"), To: addr("192.0.2.99")}}}
	nodes := NewNodes(contested)
	for _, tt := range []struct {
		name     string
		external ExternalIPs
		services []lb.Service
		want     string
	}{
		{"a VIP before an older external IP", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")), tenant("dev/x", 1, external("192.0.2.1"))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: FrontendInUse: spec.externalIPs: 192.0.2.1:80/tcp is held by a Service of another namespace`},
		{"another port of a VIP that no pool has, listed nobody knows when", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")), tenant("dev/x", 1, external("192.0.2.1"), at(81))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: 192.0.2.1 is the load balancer's address of a Service of another namespace`},
		{"another port of a VIP, listed after its Service was created", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")),
				tenant("dev/x", 1, external("192.0.2.1"), at(81), listedAt("192.0.2.1", 1_000_000, "81/TCP", 1_009_000))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: 192.0.2.1 is the load balancer's address of a Service of another namespace`},
		{"another port of a VIP, listed before its Service was created, also where a list allows the address",
			ExternalIPs{Deny: true, Allowed: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")),
				tenant("dev/x", 1, external("192.0.2.1"), at(81), listedAt("192.0.2.1", 1_000_000, "81/TCP", 1_008_999))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: 192.0.2.1 is the load balancer's address of a Service of another namespace`},
		{"the same port as a younger VIP", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")),
				tenant("dev/x", 1, external("192.0.2.1"), listedAt("192.0.2.1", 1_000_000, "80/TCP", 1_000_000))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: FrontendInUse: spec.externalIPs: 192.0.2.1:80/tcp is held by a Service of another namespace`},
		{"another port of a VIP that the holder's namespace lists after one that is refused it", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 1, vip("192.0.2.1")),
				tenant("dev/x", 2, external("192.0.2.1"), at(81), listedAt("192.0.2.1", 1_002_000, "81/TCP", 1_002_000)),
				tenant("shop/h3", 3, external("192.0.2.1"), at(81), listedAt("192.0.2.1", 1_003_000, "81/TCP", 1_003_000))},
			`h3: ExternalIP 192.0.2.1:81/tcp Cluster
web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: 192.0.2.1 is the load balancer's address of a Service of another namespace`},
		{"another port of a VIP for which two ask that are refused it", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 1, vip("192.0.2.1")), tenant("dev/x", 2, external("192.0.2.1"), at(81)),
				tenant("dev/y", 3, external("192.0.2.1"), at(81))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: 192.0.2.1 is the load balancer's address of a Service of another namespace
y: ExternalIPRefused: spec.externalIPs: 192.0.2.1 is the load balancer's address of a Service of another namespace`},
		{"the same within a namespace", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")), tenant("shop/x", 1, external("192.0.2.1"), at(81))},
			"web: LoadBalancer 192.0.2.1:80/tcp Cluster\nx: ExternalIP 192.0.2.1:81/tcp Cluster"},
		{"the same with a pool", ExternalIPs{Pools: pools},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1")), tenant("dev/x", 1, external("192.0.2.1"), at(81))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: 192.0.2.1 lies in the IPAddressPool lan; a Service of type LoadBalancer can request it`},
		{"the owner's name within a namespace", ExternalIPs{},
			[]lb.Service{tenant("dev/web", 9, vip("192.0.2.1")), tenant("dev/x", 1, external("192.0.2.1"))},
			`web: LoadBalancer 192.0.2.1:80/tcp Cluster
x: FrontendInUse: spec.externalIPs: 192.0.2.1:80/tcp is held by Service dev/web`},
		{"a cluster IP, without ServiceCIDRs", ExternalIPs{},
			[]lb.Service{tenant("kube-system/dns", 9, at(53)), tenant("dev/x", 1, external("10.96.1.100"), at(9153))},
			"x: ExternalIPRefused: spec.externalIPs: 10.96.1.100 is the cluster IP of a Service of another namespace"},
		{"the network of cluster IPs", ExternalIPs{Networks: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}},
			[]lb.Service{tenant("dev/x", 1, external("10.96.9.9"))},
			"x: ExternalIPRefused: spec.externalIPs: 10.96.9.9 lies in 10.96.0.0/16, the network of cluster IPs"},
		{"deny", ExternalIPs{Deny: true}, []lb.Service{tenant("dev/x", 1, external("198.51.100.1"))},
			"x: ExternalIPRefused: spec.externalIPs: the proxy's flag --external-ips does not allow 198.51.100.1"},
		{"some", ExternalIPs{Deny: true, Allowed: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/31")}},
			[]lb.Service{tenant("dev/x", 1, external("198.51.100.1", "198.51.100.2"))},
			`x: ExternalIP 198.51.100.1:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: the proxy's flag --external-ips does not allow 198.51.100.2`},
		{"the older external IP", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, external("198.51.100.1")), tenant("z/z", 1, external("198.51.100.1"))},
			`a: FrontendInUse: spec.externalIPs: 198.51.100.1:80/tcp is in use by a Service of another namespace
z: ExternalIP 198.51.100.1:80/tcp Cluster`},
		{"the external IP that an older Service lists later", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, external("198.51.100.1"), listedAt("198.51.100.1", 1000, "80/TCP", 1000)),
				tenant("z/z", 1, external("198.51.100.1"), listedAt("198.51.100.1", 2000, "80/TCP", 500))},
			`a: ExternalIP 198.51.100.1:80/tcp Cluster
z: FrontendInUse: spec.externalIPs: 198.51.100.1:80/tcp is in use by a Service of another namespace`},
		{"the external IP to which an older Service adds the port", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, external("198.51.100.1"), listedAt("198.51.100.1", 1000, "80/TCP", 1000)),
				tenant("z/z", 1, external("198.51.100.1"), listedAt("198.51.100.1", 500, "80/TCP", 2000))},
			`a: ExternalIP 198.51.100.1:80/tcp Cluster
z: FrontendInUse: spec.externalIPs: 198.51.100.1:80/tcp is in use by a Service of another namespace`},
		{"the external IP that the controller has not seen an older Service list", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, external("198.51.100.1"), listedAt("198.51.100.1", 1000, "80/TCP", 1000)),
				tenant("z/z", 1, external("198.51.100.1", "198.51.100.2"), listedAt("198.51.100.2", 500, "80/TCP", 500))},
			`a: ExternalIP 198.51.100.1:80/tcp Cluster
z: ExternalIP 198.51.100.2:80/tcp Cluster
z: FrontendInUse: spec.externalIPs: 198.51.100.1:80/tcp is in use by a Service of another namespace`},
		{"the older VIP", ExternalIPs{}, []lb.Service{tenant("a/a", 9, vip("192.0.2.1")), tenant("z/z", 1, vip("192.0.2.1"))},
			`a: FrontendInUse: status.loadBalancer: 192.0.2.1:80/tcp is held by a Service of another namespace
z: LoadBalancer 192.0.2.1:80/tcp Cluster`},
		{"the younger VIP, whose port the older took", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, vip("192.0.2.1")),
				tenant("a/z", 1, vip("192.0.2.1"), intruding(lb.Changed))},
			`a: LoadBalancer 192.0.2.1:80/tcp Cluster
z: FrontendInUse: status.loadBalancer: 192.0.2.1:80/tcp is held by Service a/a`},
		{"the younger VIP, whose holder changed its ports, and an older Service that merely shows it", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, vip("192.0.2.1"), intruding(lb.ChangedAfterOthers)),
				tenant("a/z", 1, vip("192.0.2.1"), intruding(lb.Unconfirmed))},
			`a: LoadBalancer 192.0.2.1:80/tcp Cluster
z: FrontendInUse: status.loadBalancer: 192.0.2.1:80/tcp is held by Service a/a`},
		{"the younger VIP, whose holder and one that joined it changed their ports", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, vip("192.0.2.1"), intruding(lb.Changed)),
				tenant("a/z", 1, vip("192.0.2.1"), intruding(lb.ChangedAfterOthers))},
			`a: LoadBalancer 192.0.2.1:80/tcp Cluster
z: FrontendInUse: status.loadBalancer: 192.0.2.1:80/tcp is held by Service a/a`},
		{"the older external IP, of a Service with a VIP that nobody confirmed", ExternalIPs{},
			[]lb.Service{tenant("a/a", 9, external("198.51.100.1")),
				tenant("z/z", 1, external("198.51.100.1"), intruding(lb.Unconfirmed))},
			`a: FrontendInUse: spec.externalIPs: 198.51.100.1:80/tcp is in use by a Service of another namespace
z: ExternalIP 198.51.100.1:80/tcp Cluster`},
		{"the older node port", ExternalIPs{}, []lb.Service{tenant("a/a", 9, onNodePort(30080)),
			tenant("z/z", 1, onNodePort(30080))},
			`a: FrontendInUse: node port 30080/tcp is in use by a Service of another namespace
z: NodePort 30080/tcp Cluster`},
		{"the node's own address with a node port", ExternalIPs{}, []lb.Service{tenant("shop/web", 9, onNodePort(30080)),
			tenant("dev/x", 1, external("172.31.0.1"), at(30080))},
			`web: NodePort 30080/tcp Cluster
x: FrontendInUse: spec.externalIPs: 172.31.0.1:30080/tcp is the node port of a Service of another namespace`},
		{"the node's own address with a health check node port", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, vip("192.0.2.1"), local), tenant("dev/x", 1, external("172.31.0.1"), at(32000))},
			`web: LoadBalancer 192.0.2.1:80/tcp Local
x: FrontendInUse: spec.externalIPs: 172.31.0.1:32000/tcp is the node port of a Service of another namespace`},
		{"the node's own address with one's own node port, which another listed before", ExternalIPs{},
			[]lb.Service{tenant("shop/web", 9, onNodePort(30080), external("172.31.0.1"), at(30080)),
				tenant("dev/x", 1, external("172.31.0.1"), at(30080))},
			`web: FrontendInUse: spec.externalIPs: 172.31.0.1:30080/tcp is kept for the node port of this Service
web: NodePort 30080/tcp Cluster
x: FrontendInUse: spec.externalIPs: 172.31.0.1:30080/tcp is the node port of a Service of another namespace`},
		{"the node's own address with another port", ExternalIPs{}, []lb.Service{tenant("shop/web", 9, onNodePort(30080)),
			tenant("dev/x", 1, external("172.31.0.1"), at(443))},
			"web: NodePort 30080/tcp Cluster\nx: ExternalIP 172.31.0.1:443/tcp Cluster"},
		{"the address of a Node", ExternalIPs{Nodes: nodes}, []lb.Service{tenant("dev/x", 1, external("172.31.0.2"), at(22))},
			"x: ExternalIPRefused: spec.externalIPs: 172.31.0.2 is an address of the Node b; " +
				"the proxy's flag --external-ips can allow it"},
		{"the external address of a Node", ExternalIPs{Nodes: nodes},
			[]lb.Service{tenant("dev/x", 1, external("198.51.100.2"), at(10250))},
			"x: ExternalIPRefused: spec.externalIPs: 198.51.100.2 is an address of the Node b; " +
				"the proxy's flag --external-ips can allow it"},
		{"an API server", ExternalIPs{APIServers: []netip.Addr{netip.MustParseAddr("172.31.0.9")}},
			[]lb.Service{tenant("dev/x", 1, external("172.31.0.9"), at(6443))},
			"x: ExternalIPRefused: spec.externalIPs: 172.31.0.9 is the address of an API server; the proxy's flag " +
				"--external-ips can allow it"},
		{"an API server that is allowed", ExternalIPs{Deny: true, APIServers: []netip.Addr{netip.MustParseAddr("172.31.0.9")},
			Allowed: []netip.Prefix{netip.MustParsePrefix("172.31.0.9/32")}},
			[]lb.Service{tenant("dev/x", 1, external("172.31.0.9"), at(6443))},
			"x: ExternalIP 172.31.0.9:6443/tcp Cluster"},
		{"no address of one host", ExternalIPs{Allowed: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}},
			[]lb.Service{tenant("dev/x", 1, external("239.192.0.1", "255.255.255.255"), at(67))},
			"x: ExternalIPRefused: spec.externalIPs: 239.192.0.1 is no address of one host, but a multicast or " +
				"broadcast address, which programs on the nodes may use\n" +
				"x: ExternalIPRefused: spec.externalIPs: 255.255.255.255 is no address of one host, but a multicast or " +
				"broadcast address, which programs on the nodes may use"},
		{"no address of one host in a network of the node", ExternalIPs{Deny: true,
			Allowed:  []netip.Prefix{netip.MustParsePrefix("172.31.0.0/16")},
			Hostless: lb.HostlessOf(netip.MustParsePrefix("172.31.0.1/24"))},
			[]lb.Service{tenant("dev/x", 1, external("172.31.0.0", "172.31.0.255", "172.31.1.0"), at(67))},
			"x: ExternalIP 172.31.1.0:67/tcp Cluster\n" +
				"x: ExternalIPRefused: spec.externalIPs: 172.31.0.0 is no address of one host, but the network address of a " +
				"network of the node, which programs on the nodes may use\n" +
				"x: ExternalIPRefused: spec.externalIPs: 172.31.0.255 is no address of one host, but the broadcast address of " +
				"a network of the node, which programs on the nodes may use"},
		{"an address of the node that its Node does not show",
			ExternalIPs{Own: []Own{{addr("10.0.0.5"), "eth1"}, {addr("10.0.0.7"), "eth2"}}},
			[]lb.Service{tenant("dev/x", 1, external("10.0.0.6", "10.0.0.7"), at(22))},
			"x: ExternalIP 10.0.0.6:22/tcp Cluster\nx: ExternalIPRefused: spec.externalIPs: 10.0.0.7 is an address of the " +
				"node, of its interface eth2; the proxy's flag --external-ips can allow it"},
		{"an address of the node that is allowed", ExternalIPs{Deny: true, Own: []Own{{addr("10.0.0.5"), "eth1"}},
			Allowed: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}},
			[]lb.Service{tenant("dev/x", 1, external("10.0.0.5"), at(22))}, "x: ExternalIP 10.0.0.5:22/tcp Cluster"},
		{"a VIP that is an address of the node", ExternalIPs{Own: []Own{{addr("10.0.0.5"), "eth1"}}},
			[]lb.Service{tenant("shop/web", 1, vip("10.0.0.5"))}, "web: LoadBalancer 10.0.0.5:80/tcp Cluster"},
		{"the gateway of pods", ExternalIPs{Nodes: nodes}, []lb.Service{tenant("dev/x", 1, external("10.244.2.1"))},
			"x: ExternalIPRefused: spec.externalIPs: 10.244.2.1 lies in 10.244.2.0/24, the network of pods on the Node b; " +
				"the proxy's flag --external-ips can allow it"},
		{"the address of a pod that is in the pod network of no Node",
			ExternalIPs{Nodes: nodes, Pods: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}},
			[]lb.Service{tenant("dev/x", 1, external("10.244.9.9", "10.245.0.1"))},
			"x: ExternalIP 10.245.0.1:80/tcp Cluster\n" +
				"x: ExternalIPRefused: spec.externalIPs: 10.244.9.9 lies in 10.244.0.0/16, the network of pods; " +
				"the proxy's flag --external-ips can allow it"},
		{"the address of a Node that is listed",
			ExternalIPs{Deny: true, Nodes: nodes, Allowed: []netip.Prefix{netip.MustParsePrefix("172.31.0.2/32")}},
			[]lb.Service{tenant("dev/x", 1, external("172.31.0.2", "172.31.0.3"))},
			`x: ExternalIP 172.31.0.2:80/tcp Cluster
x: ExternalIPRefused: spec.externalIPs: the proxy's flag --external-ips does not allow 172.31.0.3`},
		{"an address beside Nodes", ExternalIPs{Nodes: nodes}, []lb.Service{tenant("dev/x", 1, external("172.31.0.9"))},
			"x: ExternalIP 172.31.0.9:80/tcp Cluster"},
		{"a Node's address as a VIP", ExternalIPs{Nodes: nodes}, []lb.Service{tenant("shop/web", 1, vip("172.31.0.2"))},
			"web: LoadBalancer 172.31.0.2:80/tcp Cluster"},
		{"its own VIP is no refusal", ExternalIPs{Pools: pools},
			[]lb.Service{tenant("shop/web", 1, vip("192.0.2.1"), external("192.0.2.1"))},
			"web: LoadBalancer 192.0.2.1:80/tcp Cluster"},
	} {
		for _, order := range []string{"", ", reversed", ", twice", ", IPv6", ", IPv6, reversed"} {
			if strings.HasPrefix(order, ", IPv6") && strings.HasPrefix(tt.name, "no address of one host") {
				continue // IPv6 has no broadcast, and other addresses for multicast
			}
			t.Run(tt.name+order, func(t *testing.T) {
				services, external, want, own := slices.Clone(tt.services), tt.external, tt.want, addr("172.31.0.1")
				if strings.HasPrefix(order, ", IPv6") {
					services, external, want, own = servicesIn6(services), external.in6(), textIn6(want), in6(own)
				}
				if order = strings.TrimPrefix(order, ", IPv6"); order == ", reversed" {
					slices.Reverse(services)
				} else if order == ", twice" {
					services = append(services, services...)
				}
				claims := NewClaims()
				claims.Configure(external, []netip.Addr{own})
				var plans []Service
				for _, s := range services {
					endpoints := slice("1 here")
					p := New(s, endpoints, here)
					claims.Set(p)
					if plans = append(plans, p); len(plans) > len(tt.services) {
						plans = plans[1:]
					}
				}
				if d := cmp.Diff(want, grants(claims, plans)); d != "" {
					t.Errorf("grants (-want +got):\n%s", d)
				}
			})
		}
	}
}

// Whoever asks for a frontend, the Service that has it is not even planned again. It is the loser
// that is concerned when the owner goes.
func TestContract11TheWinnerIsNotTouched(t *testing.T) {
	claims := NewClaims()
	web, x := New(tenant("shop/web", 9, vip("192.0.2.1")), nil, here), New(tenant("dev/x", 1,
		external("192.0.2.1", "198.51.100.1")), nil, here)
	if keys, _ := claims.Set(web); len(keys) != 0 {
		t.Errorf("concerned %v", keys)
	}
	before := claims.Grant(web)
	if keys, _ := claims.Set(x); slices.Contains(keys, x.Key) {
		t.Errorf("concerned %v", keys)
	}
	if d := cmp.Diff(before, claims.Grant(web), cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})); d != "" {
		t.Errorf("the winner's plan changed:\n%s", d)
	}
	if keys, _ := claims.Set(Service{Key: web.Key}); !slices.Equal(keys, []lb.Key{x.Key}) {
		t.Errorf("the owner has gone, and %v are concerned", keys)
	}
	if got := claims.Grant(x); len(got.Denied) != 0 {
		t.Errorf("denied %v", got.Denied)
	}
	if keys, _ := claims.Set(New(tenant("kube-system/c", 9, func(s *lb.Service) {
		s.ClusterIPs = []netip.Addr{addr("198.51.100.1")}
		s.Ports[0].Port = 53
	}), nil, here)); !slices.Equal(keys, []lb.Key{x.Key}) {
		t.Errorf("a cluster IP has come, and %v are concerned", keys)
	}
	if keys := claims.Configure(ExternalIPs{Deny: true}, nil); !slices.Equal(keys, []lb.Key{x.Key}) {
		t.Errorf("the flag has changed, and %v are concerned", keys)
	}
	if keys := claims.Configure(ExternalIPs{Deny: true}, nil); len(keys) != 0 {
		t.Errorf("nothing has changed, and %v are concerned", keys)
	}
}

// A Service that changes a port keeps its addresses: those that are refused one of them as an external IP are
// refused it as before, and not even named. If somebody else gets it, they are told, and those alone are planned at
// once that may be served there.
func TestContract11WatchersOfAnAddressAreLeftInPeace(t *testing.T) {
	clusterIP := func(ip string) func(*lb.Service) {
		return func(s *lb.Service) { s.ClusterIPs = []netip.Addr{addr(ip)} }
	}
	gone := func(key string) Service { return Service{Key: tenant(key, 0).Key} }
	planned := func(s lb.Service) Service { return New(s, nil, here) }
	networks := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}
	for _, tt := range []struct {
		name             string
		external         ExternalIPs
		before, now      []Service
		concerned, tells string
	}{
		{"a cluster IP whose Service changes its ports", ExternalIPs{},
			[]Service{planned(tenant("dev/z", 1))}, []Service{planned(tenant("dev/z", 1, at(81)))}, "", ""},
		{"a VIP whose Service changes its ports", ExternalIPs{},
			[]Service{planned(tenant("dev/z", 1, vip("10.96.1.122")))},
			[]Service{planned(tenant("dev/z", 1, vip("10.96.1.122"), at(81)))}, "", ""},
		{"a node port that another one follows", ExternalIPs{},
			[]Service{planned(tenant("dev/z", 1, onNodePort(8080), clusterIP("10.96.0.1")))},
			[]Service{planned(tenant("dev/z", 1, onNodePort(8082), clusterIP("10.96.0.1")))}, "own", "rival"},
		{"a cluster IP that another Service gets", ExternalIPs{},
			[]Service{planned(tenant("dev/z", 1)), planned(tenant("dev/y", 2, clusterIP("10.96.1.122")))},
			[]Service{gone("dev/z")}, "y", "first loser"},
		{"a cluster IP that is free", ExternalIPs{}, []Service{planned(tenant("dev/z", 1))}, []Service{gone("dev/z")},
			"first", "loser"},
		{"a cluster IP that is free, of a known network", ExternalIPs{Networks: networks},
			[]Service{planned(tenant("dev/z", 1))}, []Service{gone("dev/z")}, "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			claims := NewClaims()
			claims.Configure(tt.external, []netip.Addr{addr("172.31.0.1")})
			for i, name := range []string{"first", "loser"} {
				claims.Set(planned(tenant("shop/"+name, 5+i, external("10.96.1.122"), at(8080), clusterIP("10.96.9.1"))))
			}
			for i, name := range []string{"own", "rival"} {
				claims.Set(planned(tenant("shop/"+name, 7+i, external("172.31.0.1"), at(8080), clusterIP("10.96.9.2"))))
			}
			for _, p := range tt.before {
				claims.Set(p)
			}
			named := map[bool][]string{}
			for _, p := range tt.now {
				concerned, told := claims.Set(p)
				for _, key := range concerned {
					named[true] = append(named[true], key.Name)
				}
				for _, key := range told {
					named[false] = append(named[false], key.Name)
				}
			}
			for is, want := range map[bool]string{true: tt.concerned, false: tt.tells} {
				slices.Sort(named[is])
				if got := strings.Join(slices.Compact(named[is]), " "); got != want {
					t.Errorf("concerned %v: %s, want %s", is, got, want)
				}
			}
		})
	}
}

// Of thousands of frontends that a Service is refused the plan keeps the first ones, and the first one at each VIP,
// which the speaker is told of. The others it counts.
func TestContract11WhatIsRefusedIsKeptInFewWords(t *testing.T) {
	const vips, ports, ips = 3, 64, 200
	var addresses, listed []string
	for i := range vips {
		addresses = append(addresses, netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}).String())
	}
	for i := range ips {
		listed = append(listed, netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + i)}).String())
	}
	ask := func(name string, created int) Service {
		return New(tenant(name, created, vip(addresses[0]), external(listed...), func(s *lb.Service) {
			for _, a := range addresses[1:] {
				s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr(a)})
			}
			s.Ports = nil
			for i := range ports {
				s.Ports = append(s.Ports, lb.ServicePort{Name: fmt.Sprint("p", i), Protocol: lb.TCP, Port: uint16(1000 + i)})
			}
		}), nil, here)
	}
	claims := NewClaims()
	claims.Set(ask("shop/web", 1))
	loser := ask("dev/x", 9)
	claims.Set(loser)
	loser = claims.Grant(loser)
	refused, text := 0, 0
	for _, d := range loser.Denied {
		refused, text = refused+1+d.More, text+len(d.Message)
	}
	if refused != ports*(vips+ips) || text > 2000 {
		t.Errorf("%d frontends are refused, in %d bytes", refused, text)
	}
	for _, a := range addresses {
		if why := loser.deniedAt(addr(a)); why == nil || !strings.Contains(why.Message, a+":1000/tcp") {
			t.Errorf("%s is refused, as %v", a, why)
		}
	}
	if again := claims.Grant(ask("dev/x", 9)); !slices.Equal(again.Denied, loser.Denied) {
		t.Errorf("asked again, %v", again.Denied)
	}
}

// What an address that is refused as an external IP lets linger goes on.
func TestContract3ARefusedExternalIPServesNothing(t *testing.T) {
	claims := NewClaims()
	claims.Set(New(tenant("dev/x", 1, external("192.0.2.1")), nil, here))
	if !claims.Serves(lb.TCP, addr("192.0.2.1"), 80) || claims.Serves(lb.UDP, addr("192.0.2.1"), 80) {
		t.Error("not served as asked")
	}
	claims.Configure(ExternalIPs{Deny: true}, nil)
	if claims.Serves(lb.TCP, addr("192.0.2.1"), 80) {
		t.Error("served although it is refused")
	}
}

// Stories of Services that come, change and go end as if only the last state had ever been, and all
// whose grants change on the way are named.
func TestContract11ClaimsDoNotDependOnTheWay(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 11))
		claims, plans, shown := NewClaims(), map[lb.Key]Service{}, map[lb.Key]string{}
		got := map[lb.Key]Service{}
		rules := []ExternalIPs{{}, {Deny: true}, {Pools: map[string][]lb.Range{"a": {{From: addr("192.0.2.1"),
			To: addr("192.0.2.1")}}}}}
		rule, own, ipv6 := rules[0], []netip.Addr(nil), seed%2 == 1
		for range 40 {
			var concerned, told []lb.Key
			if r.IntN(8) == 0 {
				rule = rules[r.IntN(len(rules))]
				own = []netip.Addr{addr("172.31.0.1")}
				if ipv6 {
					rule, own = rule.in6(), all6(own)
				}
				concerned = claims.Configure(rule, own)
			} else {
				tenants := []lb.Service{randomTenant(r)}
				if ipv6 {
					tenants = servicesIn6(tenants)
				}
				p := New(tenants[0], slice("1 here"), here)
				if r.IntN(4) == 0 {
					p = Service{Key: p.Key}
				}
				concerned, told = claims.Set(p)
				concerned = append(concerned, p.Key)
				plans[p.Key] = p
			}
			for key, p := range plans {
				now, gets := grants(claims, []Service{p})+fmt.Sprint(claims.Grant(p).Sole), claims.Grant(p)
				switch differs := now != shown[key]; {
				case !differs || slices.Contains(concerned, key):
				case !slices.Contains(told, key):
					t.Fatalf("seed %d: %s changed from %q to %q, and was not named", seed, key, shown[key], now)
				case !samePorts(gets.Ports, got[key].Ports):
					t.Fatalf("seed %d: %s gets other frontends, %q after %q, and was to be told only", seed, key, now, shown[key])
				}
				shown[key], got[key] = now, gets
			}
		}
		fresh, all := NewClaims(), []Service{}
		fresh.Configure(rule, own)
		for _, p := range plans {
			fresh.Set(p)
			all = append(all, p)
		}
		if d := cmp.Diff(grants(fresh, all), grants(claims, all)); d != "" {
			t.Fatalf("seed %d: grants (-fresh +got):\n%s", seed, d)
		}
		for _, p := range all {
			claims.Set(Service{Key: p.Key})
		}
		if n := len(claims.claiming) + len(claims.owners) + len(claims.waiting) + len(claims.watching) +
			len(claims.externals); n != 0 {
			t.Fatalf("seed %d: %d things are remembered of Services that are gone", seed, n)
		}
	}
}

func randomTenant(r *rand.Rand) lb.Service {
	name := string(rune('a' + r.IntN(5)))
	addresses := []string{"192.0.2.1", "192.0.2.2", "172.31.0.1", "10.96.1.97", "10.96.1.98"}
	var change []func(*lb.Service)
	if r.IntN(2) == 0 {
		change = append(change, vip(addresses[r.IntN(2)]))
	}
	for range r.IntN(3) {
		one := addresses[r.IntN(len(addresses))]
		change = append(change, external(one))
		if r.IntN(2) == 0 {
			change = append(change, listedAt(one, int64(999_999+1000*r.IntN(5)), "80/TCP", 1))
		}
	}
	if r.IntN(3) == 0 {
		change = append(change, onNodePort(uint16(80+r.IntN(2))))
	}
	namespace := "ns/"
	if name >= "d" {
		namespace = "other/"
	}
	return tenant(namespace+name, r.IntN(3), append(change, at(uint16(80+r.IntN(2))))...)
}

func TestParseExternalIPs(t *testing.T) {
	for text, want := range map[string]string{
		"allow": "", "deny": "", "192.0.2.0/24": "", "192.0.2.0/24, 2001:db8::/32": "",
		"":                       `"" is neither allow, nor deny, nor a CIDR like 192.0.2.0/24`,
		"allow,192.0.2.0/24":     `"allow" is neither allow, nor deny, nor a CIDR like 192.0.2.0/24`,
		"::ffff:192.0.2.0/120":   `"::ffff:192.0.2.0/120" is neither allow, nor deny, nor a CIDR like 192.0.2.0/24`,
		"192.0.2.1":              `"192.0.2.1" is neither allow, nor deny, nor a CIDR like 192.0.2.0/24`,
		"192.0.2.0/24,192.0.2.1": `"192.0.2.1" is neither allow, nor deny, nor a CIDR like 192.0.2.0/24`,
	} {
		_, err := ParseExternalIPs(text)
		if got := fmt.Sprint(err); want != "" && got != want || want == "" && err != nil {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

func BenchmarkClaims(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			claims := NewClaims()
			plan := func(i, port int) Service {
				return New(service(func(s *lb.Service) {
					s.Key.Name = fmt.Sprint(i)
					s.ClusterIPs[0] = netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
					s.Ingress[0].Addr = netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
					s.Ports[0].Port, s.Ports[0].NodePort = uint16(port), uint16(i+1)
				}), nil, here)
			}
			for i := range n {
				claims.Set(plan(i, 80))
			}
			changes := []Service{plan(0, 80), plan(0, 81)}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				claims.Set(changes[i%2])
				claims.Grant(changes[i%2])
			}
		})
	}
}

// BenchmarkClaimsOfAWatchedService changes one port of a Service whose cluster IP 100 others list among 16,000 external
// IPs each, and plans all that are concerned.
func BenchmarkClaimsOfAWatchedService(b *testing.B) {
	claims, plans := NewClaims(), map[lb.Key]Service{}
	z := tenant("dev/z", 1, onNodePort(30080))
	listed := []string{z.ClusterIPs[0].String()}
	for i := range maxFrontends - 1000 {
		listed = append(listed, netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}).String())
	}
	for i := range 100 {
		p := New(tenant(fmt.Sprint("dev/x", i), 2+i, external(listed...), at(uint16(30080+i))), nil, here)
		plans[p.Key] = p
		claims.Set(p)
	}
	claims.Set(New(z, nil, here))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		z.Ports = slices.Clone(z.Ports)
		z.Ports[0].Port = uint16(81 + i%2)
		concerned, _ := claims.Set(New(z, nil, here))
		for _, key := range concerned {
			claims.Grant(plans[key])
		}
	}
}

// A Service awaits those that keep a frontend from it: at the same port, at any port of the address, or as the node port.
func TestAwaits(t *testing.T) {
	for _, c := range []struct {
		what         string
		first, later []func(*lb.Service)
		want         bool
	}{
		{"the same VIP and port", []func(*lb.Service){vip("192.0.2.1")}, []func(*lb.Service){vip("192.0.2.1")}, true},
		{"another port of the VIP", []func(*lb.Service){vip("192.0.2.1")},
			[]func(*lb.Service){external("192.0.2.1"), at(81)}, true},
		{"a node port", []func(*lb.Service){onNodePort(30000)},
			[]func(*lb.Service){external("10.0.0.1"), at(30000)}, true},
		{"another VIP", []func(*lb.Service){vip("192.0.2.1")}, []func(*lb.Service){vip("192.0.2.2")}, false},
	} {
		claims := NewClaims()
		first, later := tenant("x/a", 0, c.first...), tenant("y/b", 1, c.later...)
		claims.Set(New(first, nil, here))
		claims.Set(New(later, nil, here))
		for other, want := range map[lb.Key]bool{first.Key: c.want, later.Key: false} {
			if got := claims.Awaits(later.Key, func(key lb.Key) bool { return key == other }); got != want {
				t.Errorf("%s: awaits %s: %v", c.what, other, got)
			}
		}
	}
}
