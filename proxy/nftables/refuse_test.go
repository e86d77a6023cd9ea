package nftables

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

func otherPort(_ cases.World, s *lb.Service) {
	for i := range s.Ports {
		s.Ports[i].Port++
	}
}

// Contract clause 9: TCP is refused by a reset, which firewalls let pass that swallow ICMP; all
// else by ICMP.
func TestContract9TCPIsRefusedByAReset(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := cases.WorldOf(family)
			s := cases.NewSite(t, w)
			a := newTestActor(t, s.Node)
			for _, c := range []cases.Case{
				{Backends: []cases.Backend{}, From: "outside", To: "vip"},
				{Service: otherPort, From: "outside", To: "vip"},
				{Backends: []cases.Backend{}, From: "outside", To: "vip", Protocol: lb.UDP},
				{Service: otherPort, From: "outside", To: "vip", Protocol: lb.UDP},
			} {
				service, config := c.Plan(w)
				a.Configure(WithAddresses(config, []netip.Addr{w.Node, w.Node2}))
				a.settle(t, map[lb.Key]plan.Service{service.Key: service})
				if _, _, err := s.Ask(c, cases.Long); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%s: error %v, want a refusal", c.Protocol, err)
				}
				counter := map[lb.Family]string{lb.IPv4: "IcmpOutDestUnreachs", lb.IPv6: "Icmp6OutDestUnreachs"}[family]
				fields := strings.Fields(s.Node.Run(t, "nstat", "-asz", counter))
				if byICMP := fields[2] != "0"; byICMP != (c.Protocol == lb.UDP) {
					t.Errorf("%s: refused by ICMP: %v (%q)", c.Protocol, byICMP, fields)
				}
			}
		})
	}
}

// No process is started: it works where there is no program to start.
func TestNoProcessIsStarted(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := cases.NewSite(t, w)
	a := newTestActor(t, s.Node)
	t.Setenv("PATH", "")
	service, config := three(w, plan.Maglev, 0, "local", "remote")
	a.Configure(config)
	a.settle(t, map[lb.Key]plan.Service{service.Key: service})
	if _, err := a.Apply(t.Context(), true); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Ask(cases.Case{From: "pod", To: "cluster"}, cases.Long); err != nil {
		t.Error(err)
	}
	t.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
}
