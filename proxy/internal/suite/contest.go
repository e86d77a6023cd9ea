package suite

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contest is a frontend that several Services ask for.
type Contest struct {
	Name   string
	Family lb.Family
	// Plans are what the Services get, in an order that depends on nothing.
	Plans []plan.Service
	// To is where a client from outside connects to, Own the node's address, End where the connection
	// ends: at a backend, or "" when at none.
	To       netip.AddrPort
	Own      netip.Addr
	Protocol lb.Protocol
	End      string
}

// rival is a Service that asks for a frontend, with one backend of its own.
type rival struct {
	name    string
	created int // seconds
	change  func(a at, s *lb.Service)
}

// at are the addresses of one family.
type at struct{ dns, vip, free, external, own netip.Addr }

var addressesOf = map[lb.Family]at{
	lb.IPv4: {addr("10.96.0.10"), addr("192.0.2.1"), addr("192.0.2.9"), addr("198.51.100.1"), addr("172.31.0.1")},
	lb.IPv6: {addr("fd00:96::10"), addr("2001:db8::1"), addr("2001:db8::9"), addr("2001:db8:1::1"), addr("fd00:31::1")},
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func holds(vip func(at) netip.Addr) func(at, *lb.Service) {
	return func(a at, s *lb.Service) {
		s.Type, s.Ingress = lb.LoadBalancer, []lb.Ingress{{Addr: vip(a)}}
	}
}

func lists(ip func(at) netip.Addr, port uint16) func(at, *lb.Service) {
	return func(a at, s *lb.Service) { s.ExternalIPs, s.Ports[0].Port = []netip.Addr{ip(a)}, port }
}

// since lists the external IP, as the controller has seen at that time.
func since(milliseconds int64) func(at, *lb.Service) {
	return func(a at, s *lb.Service) {
		lists(theExternal, 80)(a, s)
		s.Listed = lb.Listing{a.external.String(): milliseconds, "80/TCP": 1}
	}
}

func nodePort(port uint16) func(at, *lb.Service) {
	return func(_ at, s *lb.Service) { s.Type, s.Ports[0].NodePort = lb.NodePort, port }
}

func theVIP(a at) netip.Addr      { return a.vip }
func theDNS(a at) netip.Addr      { return a.dns }
func theFree(a at) netip.Addr     { return a.free }
func theExternal(a at) netip.Addr { return a.external }
func theOwn(a at) netip.Addr      { return a.own }

func isDNS(a at, s *lb.Service) { s.ClusterIPs, s.Ports[0].Port = []netip.Addr{a.dns}, 53 }

// contests lists each contest with the name of the Service that wins, "" if none is served.
var contests = []struct {
	name   string
	rivals []rival
	to     func(at) netip.Addr
	port   uint16
	winner string
}{
	{"a VIP before an external IP", []rival{{"shop/web", 9, holds(theVIP)}, {"dev/x", 1, lists(theVIP, 80)}},
		theVIP, 80, "shop/web"},
	{"a cluster IP before an external IP", []rival{{"kube-system/dns", 9, isDNS}, {"dev/x", 1, lists(theDNS, 53)}},
		theDNS, 53, "kube-system/dns"},
	{"another port of a cluster IP", []rival{{"kube-system/dns", 9, isDNS}, {"dev/x", 1, lists(theDNS, 9153)}},
		theDNS, 9153, ""},
	{"a cluster IP before a VIP", []rival{{"kube-system/dns", 9, isDNS}, {"dev/x", 1, func(a at, s *lb.Service) {
		holds(theDNS)(a, s)
		s.Ports[0].Port = 53
	}}}, theDNS, 53, "kube-system/dns"},
	{"the older of two external IPs", []rival{{"a/new", 9, lists(theExternal, 80)}, {"z/old", 1,
		lists(theExternal, 80)}}, theExternal, 80, "z/old"},
	{"the external IP that was listed first", []rival{{"a/old", 1, since(2000)}, {"z/new", 9, since(1000)}},
		theExternal, 80, "z/new"},
	{"an external IP that is listed before one that has just been added", []rival{{"a/old", 1,
		lists(theExternal, 80)}, {"z/new", 9, since(1000)}}, theExternal, 80, "z/new"},
	{"the lesser UID of two external IPs", []rival{{"a/z", 5, lists(theExternal, 80)}, {"b/a", 5,
		lists(theExternal, 80)}}, theExternal, 80, "b/a"},
	{"the older of two VIPs", []rival{{"a/new", 9, holds(theVIP)}, {"z/old", 1, holds(theVIP)}}, theVIP, 80, "z/old"},
	{"the older of two node ports", []rival{{"a/new", 9, nodePort(30080)}, {"z/old", 1, nodePort(30080)}},
		theOwn, 30080, "z/old"},
	{"a node port before an external IP", []rival{{"shop/web", 9, nodePort(30080)}, {"dev/x", 1,
		lists(theOwn, 30080)}}, theOwn, 30080, "shop/web"},
	{"an external IP that is the node's", []rival{{"dev/x", 1, lists(theOwn, 8443)}}, theOwn, 8443, "dev/x"},
	{"a free address of a pool", []rival{{"dev/x", 1, lists(theFree, 80)}}, theFree, 80, ""},
	{"its own VIP with source ranges", []rival{{"shop/web", 1, func(a at, s *lb.Service) {
		holds(theVIP)(a, s)
		s.ExternalIPs = []netip.Addr{a.vip}
		s.SourceRanges = []netip.Prefix{netip.PrefixFrom(a.free, a.free.BitLen())}
	}}}, theVIP, 80, ""},
}

// Contests returns all contests in both families, with the Services in both orders.
func Contests() []Contest {
	var all []Contest
	for family, addresses := range addressesOf {
		for _, c := range contests {
			for _, order := range []string{"", ", reversed"} {
				rivals := slices.Clone(c.rivals)
				if order != "" {
					slices.Reverse(rivals)
				}
				contest := Contest{Name: string(family) + "/" + c.name + order, Family: family,
					To: netip.AddrPortFrom(c.to(addresses), c.port), Own: addresses.own, Protocol: lb.TCP}
				claims := plan.NewClaims()
				claims.Configure(plan.ExternalIPs{Pools: map[string][]lb.Range{"lan": {{From: addresses.vip,
					To: addresses.free}}}}, []netip.Addr{addresses.own})
				var asked []plan.Service
				for _, r := range rivals {
					number := byte(slices.IndexFunc(c.rivals, func(o rival) bool { return o.name == r.name }) + 1)
					s, backend := r.plan(family, addresses, number)
					claims.Set(s)
					asked = append(asked, s)
					if r.name == c.winner {
						contest.End = backend.String()
					}
				}
				for _, s := range asked {
					contest.Plans = append(contest.Plans, claims.Grant(s))
				}
				all = append(all, contest)
			}
		}
	}
	return all
}

func (r rival) plan(family lb.Family, a at, number byte) (plan.Service, netip.AddrPort) {
	namespace, name, _ := strings.Cut(r.name, "/")
	key := lb.Key{Namespace: namespace, Name: name}
	clusterIP, backend := netip.AddrFrom4([4]byte{10, 96, 1, number}), netip.AddrFrom4([4]byte{192, 168, 0, number})
	if family == lb.IPv6 {
		clusterIP, backend = netip.AddrFrom16([16]byte{0xfd, 0x96, 15: number}), netip.AddrFrom16([16]byte{0xfd, 15: number})
	}
	s := lb.Service{
		Key: key, UID: key.Name, Created: time.Unix(int64(r.created), 0), Type: lb.ClusterIP, ExternalPolicy: lb.Cluster,
		InternalPolicy: lb.Cluster, ClusterIPs: []netip.Addr{clusterIP},
		Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
	}
	r.change(a, &s)
	slice := lb.Slice{Service: key, Family: family, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}},
		Endpoints: []lb.Endpoint{{Addr: backend, Ready: true, Serving: true}}}
	return plan.New(s, []lb.Slice{slice}, plan.Node{Name: "here"}), netip.AddrPortFrom(backend, 8080)
}
