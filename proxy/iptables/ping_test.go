package iptables

import (
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

func TestExternalAddressesAnswerPing(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			t.Parallel() // they wait for silence most of the time
			s := cases.NewSite(t, cases.WorldOf(family))
			s.CheckPings(t, program(t, s))
		})
	}
}
