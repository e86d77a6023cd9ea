package nftables

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/cases"
)

// Addresses of Services answer ping where they are delivered, and only there; cluster IPs never do.
func TestExternalAddressesAnswerPing(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			w := cases.WorldOf(family)
			s := cases.NewSite(t, w)
			a := newTestActor(t, s.Node)
			for _, tt := range []struct {
				name     string
				c        cases.Case
				off      bool
				answered string // of vip, external, cluster
			}{
				{"policy Cluster", cases.Case{Backends: onlyThere}, false, "vip external"},
				{"policy Local", cases.Case{Service: etpLocal}, false, "vip external"},
				{"policy Local, endpoints elsewhere", cases.Case{Service: etpLocal, Backends: onlyThere}, false, ""},
				{"no endpoints", cases.Case{Backends: []cases.Backend{}}, false, ""},
				{"switched off", cases.Case{}, true, ""},
			} {
				t.Run(tt.name, func(t *testing.T) {
					service, config := tt.c.Plan(w)
					config.AnswerPing = !tt.off
					a.Configure(WithAddresses(config, []netip.Addr{w.Node, w.Node2}))
					a.settle(t, map[lb.Key]Service{service.Key: {Service: service}})
					s.Node.Run(t, "conntrack", "-F")
					for _, to := range []string{"vip", "external", "cluster"} {
						for _, from := range []string{"outside", "pod", "node"} {
							c := cases.Case{From: from, To: to}
							want := strings.Contains(tt.answered, to)
							patience := 200 * time.Millisecond
							if want {
								patience = cases.Long
							}
							if got := s.At[from].Ping(t, c.Destination(w).Addr(), patience); got != want {
								t.Errorf("%s pings the address %s: answered %v, want %v", from, to, got, want)
							}
						}
					}
				})
			}
		})
	}
}
