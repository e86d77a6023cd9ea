package loop

import (
	"sync"
	"time"
)

// Lines bounds how many lines are logged in a second, where others decide how often there is something to log. The zero
// value is ready for use. It is safe for concurrent use.
type Lines struct {
	mu      sync.Mutex
	began   time.Time // the present second
	n       int       // lines in it
	leftOut int       // since the last line
}

// Admit reports whether one more line may be logged now, where a second may have so many, and how many were left out
// before it.
func (l *Lines) Admit(now time.Time, most int) (leftOut int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.began).Abs() >= time.Second { // or the clock was set back
		l.began, l.n = now, 0
	}
	if l.n == most {
		l.leftOut++
		return 0, false
	}
	l.n++
	leftOut, l.leftOut = l.leftOut, 0
	return leftOut, true
}
