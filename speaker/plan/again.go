package plan

import "time"

// Sooner returns the lesser of two waits, of which 0 is for ever. A wait b that is over already is
// as short as can be.
func Sooner(a, b time.Duration) time.Duration {
	if b <= 0 {
		b = time.Nanosecond
	}
	if a == 0 || b < a {
		return b
	}
	return a
}
