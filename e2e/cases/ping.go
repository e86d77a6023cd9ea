package cases

import (
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// CheckPings fails the test unless addresses of Services answer ping where they are delivered, and
// only there; cluster IPs never do. Nobody refuses a ping to another address, as that would be an
// answer too. program puts a case into the node's kernel.
func (s *Site) CheckPings(t *testing.T, program func(*testing.T, Case)) {
	on := func(_ World, c *plan.Config) { c.AnswerPing = true }
	off := func(_ World, c *plan.Config) { c.AnswerPing = false }
	// A ping that is not answered goes on, and ends as "host unreachable".
	s.Node.Run(t, "nft", `
		table inet refusals {
			counter seen {}
			chain output {
				type filter hook output priority 0
				icmp type destination-unreachable icmp code port-unreachable counter name seen
				icmpv6 type destination-unreachable icmpv6 code port-unreachable counter name seen
			}
		}`)
	refusals := func(t *testing.T) string { return s.Node.Run(t, "nft", "reset", "counter", "inet", "refusals", "seen") }
	for _, tt := range []struct {
		c        Case
		answered string // of vip, external, cluster
	}{
		{Case{Name: "policy Cluster", Config: on, Backends: onlyThere}, "vip external"},
		{Case{Name: "policy Local", Config: on, Service: etpLocal}, "vip external"},
		{Case{Name: "policy Local, endpoints elsewhere", Config: on, Service: etpLocal, Backends: onlyThere}, ""},
		{Case{Name: "no endpoints", Config: on, Backends: []Backend{}}, ""},
		{Case{Name: "switched off", Config: off}, ""},
	} {
		t.Run(tt.c.Name, func(t *testing.T) {
			program(t, tt.c)
			s.Node.Run(t, "conntrack", "-F")
			refusals(t)
			for _, to := range []string{"vip", "external", "cluster"} {
				if to == "cluster" && !strings.Contains(refusals(t), "packets 0 ") {
					t.Errorf("pings to the addresses before were refused")
				}
				for _, from := range []string{"outside", "pod", "node"} {
					c := Case{From: from, To: to}
					want := strings.Contains(tt.answered, to)
					patience := 200 * time.Millisecond
					if want {
						patience = Long
					}
					if got := s.At[from].Ping(t, c.Destination(s.World).Addr(), patience); got != want {
						t.Errorf("%s pings the address %s: answered %v, want %v", from, to, got, want)
					}
				}
			}
		})
	}
}
