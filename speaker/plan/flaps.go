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

// Flaps remembers how often VIPs, or the routes for prefixes, were announced anew. The zero value holds nothing back.
type Flaps[K netip.Addr | netip.Prefix] struct {
	interval time.Duration
	of       map[K]flap
	forget   time.Time // when VIPs that count as announced for the first time again were last forgotten
	held     int
}

// flap is what is remembered of one VIP.
type flap struct {
	// until is when it counts as announced for the first time again: each announcement moves it by one interval.
	until time.Time
	last  time.Time // when it was last announced
}

// NewFlaps returns Flaps with an interval; 0 holds nothing back.
func NewFlaps[K netip.Addr | netip.Prefix](interval time.Duration) Flaps[K] {
	return Flaps[K]{interval: interval, of: map[K]flap{}}
}

// Wait returns how long the next announcement of a VIP has to wait; 0 for not at all. moved is set for one that
// another node served in between.
func (f *Flaps[K]) Wait(now time.Time, vip K, moved bool) time.Duration {
	burst := time.Duration(flapBurst)
	if moved {
		burst = moveBurst
	}
	v, ok := f.of[vip]
	if !ok {
		return 0
	}
	// One that has moved more often than others may be announced waits for no more than an interval, too.
	return max(0, min(v.until.Sub(now)-(burst-1)*f.interval, v.last.Add(f.interval).Sub(now)))
}

// Announce notes that a VIP is announced now.
func (f *Flaps[K]) Announce(now time.Time, vip K) {
	if f.interval == 0 {
		return
	}
	from := now
	if until := f.of[vip].until; until.After(now) {
		from = until
	}
	f.of[vip] = flap{from.Add(f.interval), now}
	if now.Sub(f.forget) > moveBurst*f.interval {
		f.forget = now
		maps.DeleteFunc(f.of, func(_ K, v flap) bool { return !v.until.After(now) })
	}
}

// Hold counts an announcement that waits, and Held returns how many did.
func (f *Flaps[K]) Hold()     { f.held++ }
func (f *Flaps[K]) Held() int { return f.held }

// flapping is the refusal of a VIP whose announcement waits.
func flapping(vip netip.Addr) *lb.Refusal {
	return lb.Refuse(lb.ReasonFlapping, "%s: %s", vip, Describe(lb.ReasonFlapping))
}
