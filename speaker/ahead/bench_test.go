package ahead

import (
	"net/netip"
	"testing"
	"time"
)

// BenchmarkStep is a step after the L2 actor has looked, and found nothing new about 512 addresses.
func BenchmarkStep(b *testing.B) {
	found := map[netip.Addr]map[string]string{}
	for i := range 512 {
		found[netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})] = map[string]string{"eth0": "n1"}
	}
	s := &State{}
	s.Step(time.Now(), Facts{Scouted: found, Version: 1}, Events{})
	for b.Loop() {
		s.Step(time.Now(), Facts{Scouted: found, Version: 1}, Events{})
	}
}
