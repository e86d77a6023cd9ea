package loop

import "time"

// Allowance is how many times something may be done soon: Burst times at once, and one more time for
// each Every that passes. Its zero value, but for these two, is full.
type Allowance struct {
	Every time.Duration // 0 for no limit
	Burst int
	used  time.Time // until when what was done so far uses it up, one Every each time
}

// Wait takes that it has just been done, and returns how long to wait before the next time; not
// above 0 for not at all, and never above Every: what was done without waiting, as it was urgent, is no
// debt that others would have to wait for.
func (a *Allowance) Wait(now time.Time) time.Duration {
	if a.Every == 0 {
		return 0
	}
	if a.used.Before(now) {
		a.used = now
	}
	a.used = a.used.Add(a.Every)
	if most := now.Add(time.Duration(a.Burst) * a.Every); a.used.After(most) {
		a.used = most
	}
	return a.used.Sub(now) - time.Duration(a.Burst-1)*a.Every
}
