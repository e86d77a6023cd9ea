// Package bgp is the actor that keeps BGP sessions with routers and announces routes over them.
//
// It is a speaker that only announces: it opens connections and listens only where asked to, it
// installs no route that it hears and passes none on, it selects nothing. What a peer shall hear is
// stated whole with Set; each session works out what to send, from what is on the wire already.
// Messages are encoded and decoded by the packet library of GoBGP, of which no type leaves the
// package; docs/guide/bgp.md says why not more of GoBGP is used.
package bgp

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Options of an Actor.
type Options struct {
	Log *slog.Logger
	// Hostname is told to peers that want to know it (FQDN capability); "" for none.
	Hostname string
	// Changed is called after Statuses differs in more than its counters, from several goroutines. It
	// must not block.
	Changed func()
	// Listen is the address and port at which peers may connect (see CheckListen); "" for no socket at
	// all. In each VRF that a session is in, peers may connect to any address at the port.
	Listen string
	// Prepare is called when a session comes up. Its routes, and the end of the RIB, wait until the
	// channel that it returns is closed, which must be soon: a router that has kept routes over a
	// graceful restart waits for them. nil lets them go at once.
	Prepare func() <-chan struct{}
	// Dial opens a connection; nil opens a TCP connection.
	Dial func(context.Context, Target) (net.Conn, error)
	// Discover finds the link-local address of the router on an interface and calls found with it, and
	// with no valid address while it knows none, until ctx ends; nil does so by router advertisements.
	Discover func(ctx context.Context, iface string, found func(netip.Addr)) error

	pulses *loop.Pulses // of the goroutines of sessions, while they do not wait
}

// Actor keeps sessions as desired.
type Actor struct {
	opts     Options
	runner   *loop.Runner
	start    func(func()) // starts a goroutine that Run waits for
	listener *listener    // nil for none

	mu sync.Mutex
	// inside are the listeners in VRFs, and how to end them.
	inside   map[place]inner
	desired  map[string]plan.BGPSession
	applied  bool // the sessions know of desired
	sessions map[string]*session
	ending   map[string]*session // deconfigured, saying goodbye
}

// place is a VRF to listen in: a socket stays bound to the interface that the name had when it was opened.
type place struct {
	vrf   string
	index int
}

type inner struct {
	*listener
	end context.CancelFunc
}

var _ actor.Setter[map[string]plan.BGPSession] = (*Actor)(nil)

// What ends all sessions, as the cause of their contexts.
var (
	errDeconfigured = errors.New("the peer is no longer configured")
	errStopping     = errors.New("the speaker is stopping")
)

// New returns an Actor without sessions.
func New(opts Options) *Actor {
	opts.pulses = &loop.Pulses{}
	if opts.Dial == nil {
		opts.Dial = dial
	}
	if opts.Discover == nil {
		opts.Discover = discover
	}
	if opts.Changed == nil {
		opts.Changed = func() {}
	}
	if opts.Prepare == nil {
		opts.Prepare = func() <-chan struct{} { return nil }
	}
	a := &Actor{opts: opts, sessions: map[string]*session{}, ending: map[string]*session{},
		inside: map[place]inner{}, start: func(f func()) { go f() }}
	a.runner = loop.New(func(ctx context.Context) (time.Duration, error) { a.apply(ctx); return 0, nil }, loop.Options{})
	if opts.Listen != "" {
		a.listener = newListener(a, "")
	}
	return a
}

// Set replaces all sessions and routes, by the name of the peer. The actor keeps desired and what
// is in it. The first Set should wait until all routes are known that a predecessor of this process
// may have announced: a router that kept them over a graceful restart drops those that are not
// announced again right after the session is back.
func (a *Actor) Set(desired map[string]plan.BGPSession) {
	a.mu.Lock()
	a.desired, a.applied = desired, false
	a.mu.Unlock()
	a.runner.Poke()
}

// Busy returns for how long the actor, or one of its sessions, has been at one thing. To wait for a
// peer is none.
func (a *Actor) Busy() time.Duration { return max(a.runner.Busy(), a.opts.pulses.Busy()) }

// Run keeps the sessions until ctx ends. Then sessions with graceful restart end without a word, so
// that their peers keep the routes for a successor; all others are told. For an end for good, Set
// an empty map and wait until Statuses is empty.
func (a *Actor) Run(ctx context.Context) error {
	var running sync.WaitGroup
	a.start = func(f func()) { running.Go(f) }
	if a.listener != nil {
		running.Go(func() { a.listener.run(ctx) })
	}
	err := a.runner.Run(ctx)
	running.Wait()
	return err
}

// apply starts, changes and ends sessions. It does not wait for any of it.
func (a *Actor) apply(ctx context.Context) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.applied = true
	for name, s := range a.sessions {
		if _, ok := a.desired[name]; !ok {
			delete(a.sessions, name)
			a.ending[name] = s
			s.end(errDeconfigured)
		}
	}
	for name, d := range a.desired {
		if s, ok := a.sessions[name]; ok {
			s.set(d)
			continue
		}
		if _, ok := a.ending[name]; ok {
			continue // apply runs again when it has ended
		}
		a.launch(ctx, name, d)
	}
	a.listen(ctx)
	a.refreshAll()
}

// listen has exactly those VRFs listened in that a session is in. It needs mu.
func (a *Actor) listen(ctx context.Context) {
	if a.listener == nil {
		return
	}
	wanted := map[place]bool{}
	for _, d := range a.desired {
		if d.VRF != "" {
			wanted[place{d.VRF, d.VRFIndex}] = true
		}
	}
	for at, l := range a.inside {
		if !wanted[at] {
			l.end()
			delete(a.inside, at)
		}
	}
	for at := range wanted {
		if _, listened := a.inside[at]; listened {
			continue
		}
		own, end := context.WithCancel(ctx)
		l := newListener(a, at.vrf)
		a.inside[at] = inner{l, end}
		a.start(func() { l.run(own) })
	}
}

// refresh makes all listeners look at the passwords again.
func (a *Actor) refresh() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refreshAll()
}

// refreshAll is refresh with mu held.
func (a *Actor) refreshAll() {
	a.listener.refresh()
	for _, l := range a.inside {
		l.refresh()
	}
}

func (a *Actor) launch(ctx context.Context, name string, d plan.BGPSession) {
	s := newSession(name, a.opts, d)
	s.moved = a.refresh
	// The session outlives ctx by its goodbye, and so gets the end of ctx as a cause of its own.
	own, end := context.WithCancelCause(context.WithoutCancel(ctx))
	s.end = end
	unlink := context.AfterFunc(ctx, func() { end(errStopping) })
	a.sessions[name] = s
	a.start(func() {
		s.run(own)
		unlink()
		a.mu.Lock()
		if a.ending[name] == s {
			delete(a.ending, name)
		}
		a.mu.Unlock()
		a.opts.Changed()
		a.runner.Poke()
	})
}

// Statuses returns the state of each session, by peer; those that are saying goodbye are among
// them. None is Synced that has not followed the last Set, or whose name another one bears that
// still says goodbye.
func (a *Actor) Statuses() map[string]Status { return a.statuses(true) }

// Brief returns Statuses without the routes that peers announce, which takes less time.
func (a *Actor) Brief() map[string]Status { return a.statuses(false) }

func (a *Actor) statuses(learned bool) map[string]Status {
	a.mu.Lock()
	sessions, ending := maps.Clone(a.ending), map[string]bool{}
	for name := range a.ending {
		ending[name] = true
	}
	maps.Copy(sessions, a.sessions)
	applied := a.applied
	a.mu.Unlock()
	statuses := make(map[string]Status, len(sessions))
	for name, s := range sessions {
		status := s.snapshot(learned)
		status.Synced = status.Synced && applied && !ending[name]
		statuses[name] = status
	}
	return statuses
}

// Confirming returns the peers that announce the prefix with the own AS in its path, in no order:
// they have taken it from another node.
func (a *Actor) Confirming(prefix netip.Prefix) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var peers []string
	for name, s := range a.sessions {
		if s.confirms(prefix) {
			peers = append(peers, name)
		}
	}
	return peers
}

// Announced returns the peers to which the prefix is announced now, in no order.
func (a *Actor) Announced(prefix netip.Prefix) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var peers []string
	for name, s := range a.sessions {
		if s.announces(prefix) {
			peers = append(peers, name)
		}
	}
	return peers
}
