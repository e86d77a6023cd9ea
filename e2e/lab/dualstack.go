package lab

import (
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"
)

// ServiceNetwork6 is where the API server of a cluster with two families takes cluster IPs of IPv6
// from.
var ServiceNetwork6 = netip.MustParsePrefix("fd00:10:96::/112")

// Twin returns the IPv6 address that goes with an IPv4 address in a cluster with two families,
// written with the same digits: fd00:172:26:236::177 goes with 172.26.236.177.
func Twin(addr netip.Addr) netip.Addr {
	twin := netip.MustParseAddr("fd00::").As16()
	for i, b := range addr.As4() {
		digits, _ := strconv.ParseUint(strconv.Itoa(int(b)), 16, 16)
		at := 2 + 2*i
		if i == 3 {
			at = 14
		}
		twin[at], twin[at+1] = byte(digits>>8), byte(digits)
	}
	return netip.AddrFrom16(twin)
}

// TwinPrefix returns the IPv6 network that the twins of a network's addresses are in. Its length
// must be 8, 16 or 24.
func TwinPrefix(p netip.Prefix) netip.Prefix {
	return netip.PrefixFrom(Twin(p.Masked().Addr()), 16+2*p.Bits())
}

// Addresses returns an address, and its twin if the cluster has two families.
func (c Cluster) Addresses(addr netip.Addr) []netip.Addr {
	if c.DualStack {
		return []netip.Addr{addr, Twin(addr)}
	}
	return []netip.Addr{addr}
}

// prefixes returns a network, and its twin if the cluster has two families.
func (c Cluster) prefixes(p netip.Prefix) []netip.Prefix {
	if c.DualStack {
		return []netip.Prefix{p.Masked(), TwinPrefix(p)}
	}
	return []netip.Prefix{p.Masked()}
}

// serviceNetworks returns where cluster IPs come from.
func (c Cluster) serviceNetworks() []netip.Prefix {
	if c.DualStack {
		return []netip.Prefix{c.ServiceNetwork.Masked(), ServiceNetwork6}
	}
	return []netip.Prefix{c.ServiceNetwork.Masked()}
}

// networks returns the networks that hosts have addresses in.
func (c Cluster) networks() []netip.Prefix {
	all := []netip.Prefix{c.LAN.Prefix, c.Far.Prefix, c.PodNetwork}
	for _, n := range c.Nodes {
		all = append(all, n.PodNetwork)
	}
	return all
}

// address returns a pod's address of a family.
func (p Pod) address(family corev1.IPFamily) netip.Addr {
	if family == corev1.IPv6Protocol {
		return Twin(p.Addr)
	}
	return p.Addr
}
