package witness

import (
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// State is what a node knows of the Lease, and decides whose turn it is to renew it. It is a value
// without a clock: each method is given the time. The zero value knows nothing and is ready.
type State struct {
	known   bool // version is what was read or written last
	version string
	said    lb.Witness
	renewed time.Time // when the Lease was last seen to be written, by this node's clock
	told    time.Time // when this node last wrote, or tried to
	// foreign is what those have written last that do not count this node, while it renews the Lease itself,
	// and heard when that was seen.
	foreign lb.Witness
	heard   time.Time
}

// Saw takes in what the Lease says, and whether it was written since it was last looked at. Only that
// shows that a majority is at work now: clocks differ, and the Lease stays when those who wrote it
// have gone. Of those who renew it in turn with this node each counts this one.
func (s *State) Saw(now time.Time, d Desired, said lb.Witness, version string) {
	switch news := s.known && version != s.version; {
	case news && d.Tell && !slices.Contains(said.Live, d.Says.Node):
		s.foreign, s.heard = said, now
	case news && d.Heed:
		s.heard = time.Time{} // the newest counts
		fallthrough
	case news, !s.known && d.Tell: // those before this one get their time
		s.renewed = now
	}
	s.known, s.version, s.said = true, version, said
}

// Rest takes in that the node leaves the Lease alone: what it has read shows nothing later on.
func (s *State) Rest() { s.known, s.renewed, s.heard = false, time.Time{}, time.Time{} }

// Due returns how long a node that renews the Lease waits until it reads it for that; 0 for not at all.
func (s *State) Due(now time.Time, d Desired) time.Duration {
	if due := s.told.Add(tellEvery); s.known && now.Before(due) && s.said.Same(d.Says) {
		return due.Sub(now)
	}
	return max(0, s.told.Add(tellSoon).Sub(now))
}

// Turn returns how long it is until a node that has just read the Lease renews it, if none before it in
// rank does; 0 for now.
func (s *State) Turn(now time.Time, d Desired) time.Duration {
	if d.Rank == 0 || s.said.Node == d.Says.Node {
		return 0
	}
	return max(0, s.renewed.Add(tellEvery+time.Duration(d.Rank)*stepIn).Sub(now))
}

// Tried takes in that the node has tried to renew the Lease, Wrote that it has done so.
func (s *State) Tried(now time.Time) { s.told = now }

// Wrote is described at Tried.
func (s *State) Wrote(now time.Time, says lb.Witness, version string) {
	s.version, s.said, s.renewed = version, says, now
}

// Version returns the version of the Lease that was read or written last.
func (s *State) Version() string { return s.version }

// Outcome returns what those say that see a majority, and whether they have said it lately and the node
// is to heed it. One that renews the Lease itself hears those that do not count it.
func (s *State) Outcome(now time.Time, d Desired) (said lb.Witness, fresh bool) {
	if !s.heard.IsZero() && now.Before(s.heard.Add(lasts)) {
		return s.foreign, true
	}
	return s.said, d.Heed && !s.renewed.IsZero() && now.Before(s.renewed.Add(lasts))
}
