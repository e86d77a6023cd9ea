package main

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The rules offload in the families in which the kernel can; of the others the node says why they do not.
func TestOffloadWhereTheKernelCan(t *testing.T) {
	for _, c := range []struct {
		what     string
		mode     string
		refusing lb.Family
		asked    int
		offload  []lb.Family
		not      map[lb.Family]string
	}{
		{"it can", modeNftables, "", 2, []lb.Family{lb.IPv4, lb.IPv6}, nil},
		{"in one family", modeNftables, lb.IPv6, 2, []lb.Family{lb.IPv4}, map[lb.Family]string{lb.IPv6: "no such file"}},
		{"iptables mode", modeIptables, "", 0, nil, map[lb.Family]string{lb.IPv4: "iptables mode", lb.IPv6: "iptables mode"}},
	} {
		asked, s := 0, settings{}
		s.prepareOffload(c.mode, allFamilies[:], func(family lb.Family) error {
			if asked++; family == c.refusing {
				return unix.ENOENT
			}
			return nil
		})
		if got := slices.Sorted(maps.Keys(s.offload)); !slices.Equal(got, c.offload) || asked != c.asked ||
			len(s.notOffloaded) != len(c.not) {
			t.Errorf("%s: offloads %v, not %v; asked %d times", c.what, got, s.notOffloaded, asked)
		}
		for family, why := range c.not {
			if !strings.HasPrefix(s.notOffloaded[family], why) {
				t.Errorf("%s: %s is not offloaded because of %q, want %q", c.what, family, s.notOffloaded[family], why)
			}
		}
	}
}
