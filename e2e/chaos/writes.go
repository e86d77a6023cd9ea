package chaos

import (
	"sync"
	"time"
)

// writes counts what the run has the API server change.
type writes struct {
	mu sync.Mutex
	at []time.Time
}

// note counts one, now.
func (w *writes) note() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.at = append(w.at, time.Now())
}

// since returns how many there were from a time on, and how many in the second that had most.
func (w *writes) since(t time.Time) (all, most int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first := 0 // of those in the second that ends with this one
	for n, at := range w.at {
		for w.at[first].Before(t) && first < n || at.Sub(w.at[first]) >= time.Second {
			first++
		}
		if !at.Before(t) {
			all++
			most = max(most, n-first+1)
		}
	}
	return all, most
}
