package bfd

import (
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Outcome is what is so of one session.
type Outcome struct {
	State, RemoteState     State
	Diagnostic             Diagnostic // why the session last changed
	RemoteDiagnostic       Diagnostic
	Since                  time.Time // when State became what it is
	Discriminator          uint32
	RemoteDiscriminator    uint32        // zero while the peer is not heard
	TransmitInterval       time.Duration // between our packets, as agreed, before jitter
	DetectionTime          time.Duration // of silence that ends the session; zero while the peer is not heard
	RemoteTransmitInterval time.Duration // what the peer would like to send at (Desired Min TX)
	RemoteReceiveInterval  time.Duration // what it puts up with (Required Min RX)
	RemoteMultiplier       uint8
	RemoteDemand           bool // the peer is in Demand mode and wants no periodic packets
	Ups                    uint64
	// Failures counts how often the session was lost: from Up to Down, other than by administration on
	// either side (RFC 5882 section 4.2). A rise is when to bring the routes over this peer down.
	Failures uint64
	// LastDown is how the session was last lost, or nil.
	LastDown *Loss
	// Refused says why there is no such session, Ignored what of its profile it runs without.
	Refused, Ignored *lb.Refusal
	// Problem is why packets can neither come nor go; it is tried again all the time.
	Problem        string
	Sent, Received uint64 // packets
}

// Loss is how a session went from Up to another state.
type Loss struct {
	At               time.Time
	Diagnostic       Diagnostic
	RemoteDiagnostic Diagnostic
	// Administrative tells that one side took the session down on purpose, which says nothing of the
	// path.
	Administrative bool
}

// shown is an Outcome with its live counters.
type shown struct {
	key      Key
	outcome  Outcome
	counters *counters
}

type counters struct{ sent, received atomic.Uint64 }

// show publishes what is so of all sessions that shall be.
func (e *engine) show() {
	all := make([]shown, 0, len(e.sessions)+len(e.refused))
	for _, s := range e.sessions {
		if !s.leaving {
			all = append(all, shown{key: s.key, outcome: e.outcome(s), counters: &s.counters})
		}
	}
	for key, refused := range e.refused {
		all = append(all, shown{key: key, outcome: Outcome{State: AdminDown, RemoteState: Down, Refused: refused},
			counters: &counters{}})
	}
	e.worker.shown.Store(&all)
	e.worker.opts.Changed()
}

func (e *engine) outcome(s *session) Outcome {
	m := &s.machine
	_, ignored := m.profile.Check()
	o := Outcome{
		State: m.state, RemoteState: m.remoteState, Diagnostic: m.diag, RemoteDiagnostic: m.remoteDiag, Since: s.since,
		Discriminator: m.discr, RemoteDiscriminator: m.remoteDiscr,
		TransmitInterval: m.txInterval(), DetectionTime: m.detectionTime(),
		RemoteTransmitInterval: m.remoteMinTx, RemoteReceiveInterval: m.remoteMinRx, RemoteMultiplier: m.remoteMult,
		RemoteDemand: m.remoteDemand,
		Ups:          s.ups, Failures: s.failures, LastDown: s.lastDown, Ignored: ignored, Problem: e.problem(s),
	}
	if m.remoteDiscr == 0 {
		o.RemoteReceiveInterval = 0 // the value is a default; the peer has not sent one
	}
	return o
}
