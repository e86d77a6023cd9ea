package cases

import (
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// CheckPings fails the test unless addresses of Services answer ping where they are delivered, and
// only there; cluster IPs never do. program puts a case into the node's kernel.
func (s *Site) CheckPings(t *testing.T, program func(*testing.T, Case)) {
	on := func(_ World, c *plan.Config) { c.AnswerPing = true }
	off := func(_ World, c *plan.Config) { c.AnswerPing = false }
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
			for _, to := range []string{"vip", "external", "cluster"} {
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
