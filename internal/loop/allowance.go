package loop

import (
	"cmp"
	"time"
)

// Allowance is how many times something may be done soon: Burst times at once, and one more time for
// each Regain that passes. Once it is used up, Every lies between two times, in which nothing is
// regained: so what comes at a moderate rate does not wait, and what keeps coming is done less often.
// Its zero value, but for these fields, is full.
type Allowance struct {
	Every  time.Duration // 0 for no limit
	Burst  int
	Regain time.Duration // 0 for a quarter of Every
	used   time.Time     // until when what was done so far uses it up, Regain each time
}

// Wait takes that it has just been done, and returns how long to wait before the next time; not
// above 0 for not at all, and never above Every: what was done without waiting, as it was urgent, is no
// debt that others would have to wait for.
func (a *Allowance) Wait(now time.Time) time.Duration {
	if a.Every == 0 {
		return 0
	}
	each := cmp.Or(a.Regain, a.Every/4)
	if a.used.Before(now) {
		a.used = now
	}
	a.used = a.used.Add(each)
	left := now.Add(time.Duration(a.Burst-1) * each)
	if !a.used.After(left) {
		return 0
	}
	a.used = left.Add(a.Every)
	return a.Every
}
