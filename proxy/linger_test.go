package main

import (
	"testing"
	"time"

	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contract clause 11: what lingers of one Service has a bound, in withdrawals and in frontends, and
// what it gave up last lingers in any case.
func TestContract11LingeringIsBounded(t *testing.T) {
	for _, tt := range []struct {
		name                     string
		withdrawals, size, wants int
	}{
		{"a few", 10, 5, 10},
		{"many withdrawals", 1000, 1, maxWithdrawals},
		{"many frontends", 10, maxLingering / 4, 4},
		{"large ones", 3, maxLingering + 1, 1},
	} {
		l, now := newLingers(), time.Now()
		for i := range tt.withdrawals {
			ports := []plan.Port{{Frontends: make([]plan.Frontend, tt.size)}}
			ports[0].Frontends[0].Port = uint16(i)
			l.add(key("web"), ports, now.Add(time.Duration(i)))
		}
		of := l.of(key("web"))
		if len(of) != tt.wants {
			t.Fatalf("%s: %d withdrawals linger, want %d", tt.name, len(of), tt.wants)
		}
		if last := of[len(of)-1][0].Frontends[0].Port; int(last) != tt.withdrawals-1 {
			t.Errorf("%s: the last that lingers is %d", tt.name, last)
		}
		if l.changed(now.Add(time.Hour), plan.NewClaims()); len(l.services)+len(l.due) != 0 {
			t.Errorf("%s: %d and %d are left", tt.name, len(l.services), len(l.due))
		}
	}
}
