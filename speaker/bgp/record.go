package bgp

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// What happens to a session is recorded here, after it has happened: each message and each state. A
// session that hangs does so here, at the latest.

// enter records the state on the way up.
func (s *session) enter(state State) {
	defer s.opts.pulses.Begin()()
	s.mu.Lock()
	same := s.status.State == state
	if !same {
		s.status.State, s.status.Since = state, time.Now()
	}
	s.mu.Unlock()
	if !same {
		s.opts.Changed()
	}
}

// meets records the node's address of a connection, ahead of the state that tells of it.
func (s *session) meets(local netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Local = local
}

func (s *session) state() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.State
}

// established records that the session is up.
func (s *session) established(c *connection) {
	defer s.opts.pulses.Begin()()
	n := c.n
	s.mu.Lock()
	s.status.State, s.status.Since = Established, time.Now()
	s.status.Reason = ""
	s.status.Negotiated, s.status.Local = &n, n.Local.Addr()
	s.heard = map[netip.Prefix]announced{}
	s.flushedVersion = -1
	s.failures, s.told = &loop.Failures{}, nil
	s.mu.Unlock()
	s.log.Info("BGP session established", "address", n.Peer, "incoming", n.Incoming, "asn", n.PeerASN, "holdTime",
		n.HoldTime, "families", n.Families,
		"gracefulRestart", n.GracefulRestart)
	s.opts.Changed()
}

func (s *session) renegotiated(n Negotiated) {
	defer s.opts.pulses.Begin()()
	s.mu.Lock()
	s.status.Negotiated = &n
	s.mu.Unlock()
	s.opts.Changed()
}

// lost records the end of an established connection.
func (s *session) lost(err error) {
	s.mu.Lock()
	s.status.Flaps++
	s.mu.Unlock()
	s.down(reasonOf(err), err)
	s.log.Warn("BGP session lost", "error", err)
}

func reasonOf(err error) lb.Reason {
	taken, said := (*takenError)(nil), (*peerError)(nil)
	switch {
	case errors.Is(err, errBFDDown):
		return lb.ReasonBFDDown
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return lb.ReasonSourceMissing
	case errors.As(err, &taken), errors.As(err, &said) && said.code == bgp.BGP_ERROR_CEASE && said.subcode == subCollision:
		return lb.ReasonSessionTaken
	}
	return lb.ReasonNotEstablished
}

// failed records an attempt that came to nothing.
func (s *session) failed(reason lb.Reason, err error) {
	s.mu.Lock()
	failures, told := s.failures, s.told
	s.mu.Unlock()
	failures.Log(s.log, "BGP session cannot be established", "", err)
	if told != nil && errors.Is(err, errClosed) {
		err, reason = told, reasonOf(told)
	}
	s.down(reason, err)
}

func (s *session) down(reason lb.Reason, err error) {
	defer s.opts.pulses.Begin()()
	now := time.Now()
	s.mu.Lock()
	if s.status.State != Idle {
		s.status.State, s.status.Since = Idle, now
	}
	s.status.Reason = reason
	if p := (*peerError)(nil); errors.As(err, &p) {
		s.told = p
	}
	if !errors.Is(err, context.Canceled) {
		s.status.LastError, s.status.LastErrorAt = err.Error(), now
	}
	s.status.Negotiated, s.status.Held = nil, nil
	s.heard, s.learned, s.returned = nil, nil, nil
	s.flushedVersion = -1
	s.mu.Unlock()
	s.opts.Changed()
}

func (s *session) count(f func(*Counters)) {
	defer s.opts.pulses.Begin()()
	s.mu.Lock()
	f(&s.status.Counters)
	s.mu.Unlock()
}

// flushed records what the peer has heard, as of that version of what it shall.
func (s *session) flushed(out outgoing, version int, held map[lb.Family]lb.Refusal) {
	defer s.opts.pulses.Begin()()
	s.mu.Lock()
	changed := len(out.messages) > 0 || s.flushedVersion != s.version && version == s.version ||
		!maps.Equal(held, s.status.Held)
	maps.Copy(s.heard, out.set)
	for _, p := range out.gone {
		delete(s.heard, p)
	}
	if len(out.set)+len(out.gone) > 0 {
		s.status.Heard++
	}
	s.status.Held = held
	s.flushedVersion = version
	s.mu.Unlock()
	if changed {
		s.opts.Changed()
	}
}

// forget makes the next flush send all routes of a family again.
func (s *session) forget(f lb.Family) {
	defer s.opts.pulses.Begin()()
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.heard {
		if lb.FamilyOf(p.Addr()) == f {
			s.heard[p] = announced{} // equal to no route, and yet to be withdrawn if it is not wanted
		}
	}
}

// learn records changes to what the peer announces.
func (s *session) learn(changes map[netip.Prefix]ReceivedRoute) {
	if len(changes) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.learned == nil {
		s.learned = map[netip.Prefix]ReceivedRoute{}
	}
	for p, r := range changes {
		if !r.NextHop.IsValid() {
			delete(s.learned, p)
		} else if _, known := s.learned[p]; known || len(s.learned) < maxLearned {
			s.learned[p] = r.bounded()
		}
	}
}

// returns records which routes of the own AS the peer announces.
func (s *session) returns(changes map[netip.Prefix]ReceivedRoute, asn uint32) {
	own := strconv.FormatUint(uint64(asn), 10)
	s.mu.Lock()
	defer s.mu.Unlock()
	for p, r := range changes {
		switch _, known := s.returned[p]; {
		case !r.NextHop.IsValid() || !slices.Contains(strings.Fields(r.ASPath), own):
			delete(s.returned, p)
		case !known && len(s.returned) < maxReturned:
			if s.returned == nil {
				s.returned = map[netip.Prefix]struct{}{}
			}
			s.returned[p] = struct{}{}
		}
	}
}

// confirms reports whether the peer announces the prefix with this AS in its path.
func (s *session) confirms(p netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.returned[p]
	return ok
}

func (s *session) unlearn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.learned = nil
}

// snapshot returns the status with what it summarizes, and with some of what the peer announces if
// learned is set.
func (s *session) snapshot(learned bool) Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	status.Synced = status.State == Established && s.flushedVersion == s.version
	status.Prefixes = len(s.heard)
	status.Received, status.Returned = len(s.learned), len(s.returned)
	if !learned {
		return status
	}
	for _, p := range slices.SortedFunc(maps.Keys(s.learned), netip.Prefix.Compare) {
		if len(status.Routes) == maxShown {
			break
		}
		status.Routes = append(status.Routes, s.learned[p])
	}
	return status
}

// announces reports whether the peer has heard of the prefix.
func (s *session) announces(p netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.heard[p]
	return ok
}
