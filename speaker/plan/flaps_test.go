package plan

import (
	"net/netip"
	"testing"
	"time"
)

func TestFlaps(t *testing.T) {
	vip, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	start := time.Unix(1e9, 0)
	for name, test := range map[string]struct {
		interval, gap time.Duration
		moved         bool
		times         int // that it is announced within a minute, at each gap at which it may be
	}{
		"often":              {time.Second, 100 * time.Millisecond, false, flapBurst + 59},
		"as often as it may": {time.Second, time.Second, false, 60},
		"moved to and fro":   {time.Second, 100 * time.Millisecond, true, moveBurst + 59},
		"held for longer":    {10 * time.Second, 100 * time.Millisecond, false, flapBurst + 5},
		"never held":         {0, 100 * time.Millisecond, false, 600},
	} {
		f, times := NewFlaps[netip.Addr](test.interval), 0
		for passed := time.Duration(0); passed < time.Minute; passed += test.gap {
			if f.Wait(start.Add(passed), vip, test.moved) == 0 {
				f.Announce(start.Add(passed), vip)
				times++
			}
		}
		if times != test.times {
			t.Errorf("%s: announced %d times, want %d", name, times, test.times)
		}
		if f.Wait(start, other, false) > 0 {
			t.Errorf("%s: another VIP waits", name)
		}
		later := start.Add(time.Hour)
		if wait := f.Wait(later, vip, false); wait > 0 {
			t.Errorf("%s: after an hour it waits for %v", name, wait)
		}
		if f.Announce(later, other); len(f.of) > 1 {
			t.Errorf("%s: %d VIPs are remembered after an hour", name, len(f.of))
		}
	}
}

// A VIP that has moved to and fro, and then comes and goes here alone, waits for one interval, and not until all its
// moves are forgotten.
func TestFlapsAfterMoves(t *testing.T) {
	vip, now := netip.MustParseAddr("192.0.2.1"), time.Unix(1e9, 0)
	f := NewFlaps[netip.Addr](time.Second)
	for range moveBurst {
		if wait := f.Wait(now, vip, true); wait > 0 {
			t.Fatalf("moved, it waits for %v", wait)
		}
		f.Announce(now, vip)
	}
	for range 3 {
		if wait := f.Wait(now, vip, false); wait != time.Second {
			t.Errorf("it waits for %v", wait)
		}
		now = now.Add(time.Second)
		if wait := f.Wait(now, vip, false); wait != 0 {
			t.Errorf("after an interval it waits for %v", wait)
		}
		f.Announce(now, vip)
	}
}
