package main

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contract clause 11: what it costs to show a Service grows with its endpoints, and not with their square.
func TestContract11EndpointsAreShownOnce(t *testing.T) {
	var p plan.Port
	for i := range 500_000 {
		b := lb.Backend{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80),
			Ready: true, Local: true}
		p.Backends.Local = append(p.Backends.Local, b)
		if i > 0 {
			p.Backends.Cluster = append(p.Backends.Cluster, b)
		}
	}
	shown := describe(p).Backends
	if last := shown[len(shown)-1]; len(shown) != 500_000 || last.Address != p.Backends.Local[0].Addr || !last.Local {
		t.Errorf("%d endpoints, the last one %+v", len(shown), last)
	}
}
