//go:build vm

package iptables

import (
	"os/exec"
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestVMPacketsThroughIPIP has the cases of TestPackets that end at the pod of another node, with that pod
// behind Calico's IPIP.
func TestVMPacketsThroughIPIP(t *testing.T) {
	if out, err := exec.Command("modprobe", "ipip").CombinedOutput(); err != nil {
		t.Fatalf("modprobe ipip: %v: %s", err, out)
	}
	s := cases.NewSite(t, cases.WorldOf(lb.IPv4))
	received := s.ThroughIPIP(t)
	s.Run(t, cases.Remote(cases.For(lb.IPv4, false)), program(t, s))
	if n := received(); n == 0 {
		t.Error("no packet came through the tunnel")
	} else {
		t.Logf("%d packets came through the tunnel", n)
	}
}
