package lab

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/nstest"
)

func withToR(t ToR, dual bool) Cluster {
	c := SeedCluster()
	c.ToR, c.DualStack = t, dual
	return c
}

func TestPlanToR(t *testing.T) {
	c := withToR(ToR{Kind: FRR, Count: 2, ASN: 64501, NodeASN: 64500}, true)
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, h := range planLAN(c) {
		names = append(names, h.Name)
	}
	if diff := cmp.Diff([]string{"switch", "tor-1", "tor-2", "client", "far-client"}, names); diff != "" {
		t.Errorf("hosts (-want +got):\n%s", diff)
	}
	want := []string{
		"route add default nexthop via 198.51.100.1 nexthop via 198.51.100.2",
		"route add default nexthop via fd00:198:51:100::1 nexthop via fd00:198:51:100::2",
	}
	if diff := cmp.Diff(want, c.defaultRoutes(c.gateways(c.Far))); diff != "" {
		t.Errorf("ways out (-want +got):\n%s", diff)
	}
}

func TestBadToR(t *testing.T) {
	for _, test := range []struct {
		tor  ToR
		want string
	}{
		{ToR{Count: 1}, "want FRR or BIRD"},
		{ToR{Kind: "Cisco", Count: 1, ASN: 1, NodeASN: 1}, "Cisco"},
		{ToR{Kind: FRR, Count: 3, ASN: 1, NodeASN: 1}, "count 3"},
		{ToR{Kind: BIRD, Count: 1, ASN: 1}, "AS numbers 1 and 0"},
	} {
		if err := withToR(test.tor, false).Validate(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.tor, err, test.want)
		}
	}
}

// The routers take what is written for them, without a complaint, and know all nodes.
func TestToRConfigurations(t *testing.T) {
	for _, test := range []struct {
		name string
		tor  ToR
		dual bool
	}{
		{"eBGP", ToR{ASN: 64501, NodeASN: 64500}, false},
		{"iBGP", ToR{ASN: 64500, NodeASN: 64500}, true},
		{"all options", ToR{ASN: 4200000001, NodeASN: 4200000000, BFD: 50 * time.Millisecond, HoldTime: 9 * time.Second,
			Password: "secret"}, true},
	} {
		for _, kind := range []string{FRR, BIRD} {
			t.Run(kind+" "+test.name, func(t *testing.T) {
				t.Parallel()
				ns := nstest.New(t)
				ns.Run(t, "ip", "link", "add", torLAN, "type", "bridge")
				tor := test.tor
				tor.Kind, tor.Count = kind, 2
				c := withToR(tor, test.dual)
				neighbors := len(c.Nodes) * len(c.Addresses(c.LAN.Router))
				if kind == BIRD {
					r := routertest.BIRD(t, ns, c.birdConfig(1).Config)
					protocols, err := r.Ask(t.Context(), "show protocols")
					if got := strings.Count(protocols, " BGP "); err != nil || got != neighbors {
						t.Errorf("%v: %d neighbors, want %d:\n%s", err, got, neighbors, protocols)
					}
					return
				}
				r := routertest.FRR(t, ns, c.frrConfig(1))
				running, err := r.Ask(t.Context(), "show running-config")
				if got := strings.Count(running, " peer-group nodes\n"); err != nil || got != neighbors {
					t.Errorf("%v: %d neighbors, want %d:\n%s", err, got, neighbors, running)
				}
				if logs := r.Logs(); strings.Contains(logs, "Unknown command") || strings.Contains(logs, "% ") {
					t.Errorf("complaints:\n%s", logs)
				}
				if want := fmt.Sprintf("transmit-interval %d", tor.BFD.Milliseconds()); tor.BFD != 0 &&
					!strings.Contains(running, want) {
					t.Errorf("no %q in\n%s", want, running)
				}
			})
		}
	}
}
