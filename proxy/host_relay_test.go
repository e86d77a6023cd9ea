package main

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
)

// A firewall that drops the relay's port drops it too once a relay that was away is back: the rules must not
// lead there until a look has found out.
func TestAFirewallIsNotForgottenWhileTheRelayIsAway(t *testing.T) {
	b, f := newRelayBench(t)
	b.run()
	f.state = relayfeed.State{Connected: true, Ports: map[lb.Family]uint16{lb.IPv4: 7484}}
	log := slog.New(slog.DiscardHandler)
	h := host{proxy: b.proxy, parameters: kernelParameters{t.TempDir(), log}, log: log, reusePorts: func(bool) {},
		chains: func(context.Context) ([]plan.ForwardChain, error) { return nil, nil },
		inputs: func() ([]plan.ForwardChain, error) {
			return []plan.ForwardChain{{Family: "ip", Table: "filter", Name: "INPUT", Drops: true}}, nil
		},
		routes: func([]netip.Addr) (map[netip.Addr]lb.RouteKind, error) { return nil, nil },
		strict: func() string { return "" }, noTunnel: func() string { return "" }}
	for _, when := range []string{"with a relay", "while it is away"} {
		if h.look(t.Context()); !f.blocked[plan.RelayWay{Family: lb.IPv4, Protocol: lb.UDP}] {
			t.Errorf("%s: the rules may lead to a port that is dropped", when)
		}
		f.state = relayfeed.State{}
	}
}
