package cases

import (
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// World are the addresses of a node, its pods, one pod on another node, and who connects, in one
// family.
type World struct {
	Family                              lb.Family
	Node, Node2, Outside, Stranger, Pod netip.Addr
	Local, Local2, Remote               netip.Addr // endpoints
	ClusterIP, VIP, VIP2, External      netip.Addr
	Unallocated                         netip.Addr // of the cluster IPs
	Pods, Loopback, ClusterIPs          netip.Prefix
	Pool                                lb.Range // of the VIPs
}

// Names of the nodes, and their zones.
const (
	Here, There         = "here", "there"
	ZoneHere, ZoneThere = "a", "b"
)

// Ports of the table's Service.
const (
	ServicePort, NodePort = 80, 30080
)

// BackendPort returns where the endpoints listen: each protocol has a port of its own, behind one
// port of the Service.
func BackendPort(p lb.Protocol) uint16 {
	return map[lb.Protocol]uint16{lb.TCP: 8080, lb.UDP: 8081, lb.SCTP: 8082}[p]
}

// WorldOf returns the addresses in a family.
func WorldOf(family lb.Family) World {
	at := func(v4, v6 string) netip.Addr {
		if family == lb.IPv6 {
			return netip.MustParseAddr(v6)
		}
		return netip.MustParseAddr(v4)
	}
	net := func(v4, v6 string) netip.Prefix {
		if family == lb.IPv6 {
			return netip.MustParsePrefix(v6)
		}
		return netip.MustParsePrefix(v4)
	}
	w := World{
		Family: family,
		Node:   at("172.31.0.1", "fd31::1"), Node2: at("172.31.0.4", "fd31::4"),
		Outside: at("172.31.0.2", "fd31::2"), Stranger: at("172.31.0.3", "fd31::3"),
		Pod:   at("192.168.3.2", "fd00:10:0:3::2"),
		Local: at("192.168.1.2", "fd00:10:0:1::2"), Local2: at("192.168.1.3", "fd00:10:0:1::3"),
		Remote:    at("192.168.2.2", "fd00:10:0:2::2"),
		ClusterIP: at("10.96.0.40", "fd00:10:96::40"), VIP: at("198.51.100.10", "2001:db8::10"),
		VIP2:        at("198.51.100.11", "2001:db8::11"),
		External:    at("198.51.100.20", "2001:db8::20"),
		Unallocated: at("10.96.0.99", "fd00:10:96::99"), ClusterIPs: net("10.96.0.0/16", "fd00:10:96::/112"),
		Pods: net("192.168.0.0/16", "fd00:10::/48"), Loopback: net("127.0.0.1/32", "::1/128"),
	}
	w.Pool = lb.Range{From: w.VIP, To: w.VIP2}
	return w
}

// Other returns the same in the other family.
func (w World) Other() World {
	if w.Family == lb.IPv4 {
		return WorldOf(lb.IPv6)
	}
	return WorldOf(lb.IPv4)
}

// Endpoint returns the address of local, local2 or remote; not valid for another word.
func (w World) Endpoint(at string) netip.Addr {
	return map[string]netip.Addr{"local": w.Local, "local2": w.Local2, "remote": w.Remote}[at]
}

// Host returns the prefix of one address.
func Host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
