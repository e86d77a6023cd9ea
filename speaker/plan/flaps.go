package plan

import (
	"maps"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A VIP that a node announces flapBurst times in a row, as its Service comes and goes, is announced anew no more
// than once in each interval from then on. For a VIP that another node served in between it is moveBurst times: its
// clients send to that node until they hear this one.
const (
	flapBurst = 20
	moveBurst = 5 * flapBurst
)

// Flaps remembers how often VIPs were announced anew. The zero value holds nothing back.
type Flaps struct {
	interval time.Duration
	// until is when a VIP counts as announced for the first time again: each announcement moves it by one interval.
	until  map[netip.Addr]time.Time
	forget time.Time // when VIPs that are past that were last forgotten
	held   int
}

// NewFlaps returns Flaps with an interval; 0 holds nothing back.
func NewFlaps(interval time.Duration) Flaps {
	return Flaps{interval: interval, until: map[netip.Addr]time.Time{}}
}

// Wait returns how long the next announcement of a VIP has to wait; 0 for not at all. moved is set for one that
// another node served in between.
func (f *Flaps) Wait(now time.Time, vip netip.Addr, moved bool) time.Duration {
	burst := time.Duration(flapBurst)
	if moved {
		burst = moveBurst
	}
	until, ok := f.until[vip]
	if !ok {
		return 0
	}
	return max(0, until.Sub(now)-(burst-1)*f.interval)
}

// Announce notes that a VIP is announced now.
func (f *Flaps) Announce(now time.Time, vip netip.Addr) {
	if f.interval == 0 {
		return
	}
	if from := f.until[vip]; from.After(now) {
		f.until[vip] = from.Add(f.interval)
	} else {
		f.until[vip] = now.Add(f.interval)
	}
	if now.Sub(f.forget) > moveBurst*f.interval {
		f.forget = now
		maps.DeleteFunc(f.until, func(_ netip.Addr, until time.Time) bool { return !until.After(now) })
	}
}

// Hold counts an announcement that waits, and Held returns how many did.
func (f *Flaps) Hold()     { f.held++ }
func (f *Flaps) Held() int { return f.held }

// flapping is the refusal of a VIP whose announcement waits.
func flapping(vip netip.Addr) *lb.Refusal {
	return lb.Refuse(lb.ReasonFlapping, "%s: %s", vip, Describe(lb.ReasonFlapping))
}
