package loads

import "time"

// How many events the actor reads: 20,000 a second, which are some 10,000 connections that come and end,
// take a quarter of a core. What comes faster fills the socket, and what has no place there is made good
// by a listing.
const (
	readEvery = 100 * time.Millisecond
	maxReads  = 2000 // in that time
)

// reading limits how many events are read.
type reading struct {
	since time.Time
	reads int
}

// next notes that an event is read, and returns how long to wait before the next one.
func (r *reading) next(now time.Time) time.Duration {
	if now.Sub(r.since) >= readEvery {
		r.since, r.reads = now, 0
	}
	if r.reads++; r.reads < maxReads {
		return 0
	}
	return r.since.Add(readEvery).Sub(now)
}
