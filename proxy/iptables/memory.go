package iptables

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// memory is where a port of a Service remembers which endpoints its clients have: a list of the match
// recent for each endpoint. The zero value remembers nobody.
type memory struct {
	family  lb.Family
	timeout time.Duration
	// port is the first by name of the Service's ports whose endpoints have the same addresses, one
	// endpoint each. These ports share their lists, so that a client has one pod at all of them.
	port      string
	byAddress bool // false if an address has several endpoints; then port is alone
}

// memories returns the memory of each port of a Service.
func (r renderer) memories(s plan.Service) []memory {
	memories := make([]memory, len(s.Ports))
	if s.AffinityTimeout == 0 {
		return memories
	}
	shared := make([]string, len(s.Ports)) // the addresses of its endpoints, of each port
	first := map[string]string{}
	for i, p := range s.Ports {
		if p.Family != r.family {
			continue
		}
		m := memory{family: r.family, timeout: s.AffinityTimeout, port: portID(s.Key, p)}
		shared[i], m.byAddress = addressesOf(p.Backends)
		if known, any := first[shared[i]]; m.byAddress && (!any || m.port < known) {
			first[shared[i]] = m.port
		}
		memories[i] = m
	}
	for i, m := range memories {
		if m.byAddress {
			memories[i].port = first[shared[i]]
		}
	}
	return memories
}

// addressesOf returns the addresses of endpoints, equal for the same ones, and whether each of them
// is there once.
func addressesOf(backends lb.Usable) (addresses string, once bool) {
	all := fmt.Appendf(nil, "%d ", len(backends.Cluster))
	for _, set := range [][]lb.Backend{backends.Cluster, backends.Local} {
		for i, b := range set { // sorted by address
			if i > 0 && set[i-1].Addr.Addr() == b.Addr.Addr() {
				return "", false
			}
			address := b.Addr.Addr().As16()
			all = append(all, address[:]...)
		}
	}
	return string(all), true
}

const remembers = "-m recent --set "

// remember matches always, and notes the client in the list of an endpoint.
func (m memory) remember(endpoint netip.AddrPort) string {
	if m.timeout == 0 {
		return ""
	}
	return remembers + m.list(endpoint)
}

// remembered matches a client that was noted less than the timeout ago. A list holds the 100 clients
// that came last, unless the node's administrator has given the kernel's module xt_recent a larger
// ip_list_tot.
func (m memory) remembered(endpoint netip.AddrPort) string {
	return fmt.Sprintf("-m recent --rcheck --seconds %d --reap %s", int(m.timeout/time.Second), m.list(endpoint))
}

func (m memory) list(endpoint netip.AddrPort) string {
	of, mask := endpoint.String(), "255.255.255.255"
	if m.byAddress {
		of = endpoint.Addr().String()
	}
	if m.family == lb.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return fmt.Sprintf("--name %s --mask %s --rsource", prefixClients+hash(m.port+of), mask)
}
