package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Another Service has taken over many frontends of one. What is held of it is found out in one pass over them, and not
// in one for each.
func TestContract11WhatIsHeldCostsTheFrontends(t *testing.T) {
	const frontends = 500
	loser, winner := lb.Key{Namespace: "a", Name: "loser"}, lb.Key{Namespace: "a", Name: "winner"}
	s := &service{key: loser, input: plan.Service{Key: loser, Ports: []plan.Port{{Family: lb.IPv4, Protocol: lb.TCP}}}}
	table := &table{applied: map[lb.Key]*service{loser: s}}
	table.family, table.owners = lb.IPv4, map[frontend]*service{}
	table.nodeAddresses = []netip.Addr{netip.MustParseAddr("172.31.0.1"), netip.MustParseAddr("172.31.0.2")}
	add := func(kind plan.Kind, addr netip.Addr, port uint16, owner lb.Key) {
		p := part{frontend: frontend{addr: addressOf(addr), port: port, protocol: tcp}, kind: kind}
		s.parts = append(s.parts, p)
		table.owners[p.frontend] = &service{key: owner}
	}
	ports := &s.input.Ports[0].Frontends
	for i := range frontends + 1 {
		addr := netip.AddrFrom4([4]byte{11, 0, byte(i >> 8), byte(i)})
		*ports = append(*ports, plan.Frontend{Kind: plan.ExternalIP, Addr: addr, Port: 80})
		add(plan.ExternalIP, addr, 80, map[bool]lb.Key{true: loser, false: winner}[i == frontends])
	}
	*ports = append(*ports, plan.Frontend{Kind: plan.NodePort, Port: 30080}, plan.Frontend{Kind: plan.NodePort, Port: 30081})
	for i, addr := range table.nodeAddresses {
		add(plan.NodePort, addr, 30080, map[int]lb.Key{0: loser, 1: winner}[i])
		add(plan.NodePort, addr, 30081, loser)
	}
	held, err := table.Held(loser)
	var left []string
	for _, f := range held.Ports[0].Frontends {
		left = append(left, fmt.Sprintf("%s %s:%d", f.Kind, f.Addr, f.Port))
	}
	if want := []string{"ExternalIP 11.0.1.244:80", "NodePort invalid IP:30081"}; !slices.Equal(left, want) {
		t.Errorf("held are %q, want %q", left, want)
	}
	if said := err.Error(); strings.Count(said, "is in use by another Service") != 5 || !strings.Contains(said, "and 496 more") {
		t.Errorf("it says %q", said)
	}
	allocations := testing.AllocsPerRun(1, func() { _, _ = table.Held(loser) })
	if allocations > frontends {
		t.Errorf("%.0f allocations for %d frontends", allocations, frontends)
	}
}
