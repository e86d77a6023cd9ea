package bgp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Waits before attempts to connect. They double from the least up to the session's ConnectTime;
// after a session that was established, only up to maxFlapWait, so that a router that restarts is
// served soon, and so is one that another program of the node leaves.
const (
	minWait     = 250 * time.Millisecond
	maxFlapWait = 2 * time.Second
	// calm is how long a session must have been up for its loss to count as the first.
	calm = 30 * time.Second
	// routerLasts is how long the router on an interface counts as such after an advertisement of its own,
	// whoever else advertises: three times what routers with unnumbered sessions take (FRR, 10 s).
	routerLasts = 30 * time.Second
)

// session is one peer: its goroutine makes one attempt after the other to speak with it, until it
// is ended.
type session struct {
	name string
	opts Options
	log  *slog.Logger
	end  context.CancelCauseFunc // ends the goroutine, with errDeconfigured or errStopping
	// routes is poked when what the peer shall hear, or another option that can change in place,
	// differs.
	routes chan struct{}
	// redo is poked when a waiting session should try again.
	redo chan struct{}
	// incoming has connections that the peer has opened, until over is closed.
	incoming chan net.Conn
	over     chan struct{}
	moved    func() // called when router may be another one; it must not block

	mu      sync.Mutex
	desired plan.BGPSession
	// version counts the values of desired, flushedVersion is the one that the peer has heard; -1 for
	// none.
	version, flushedVersion int
	router                  netip.Addr // found on the interface of an unnumbered session
	routerHeard             time.Time  // when it last advertised itself
	successor               netip.Addr // another one, that has advertised itself since
	succession              *time.Timer
	trouble                 error // why none can be found
	// ends the current attempt, with a *changeError or errBFDDown; nil between attempts
	abort   context.CancelCauseFunc
	status  Status
	heard   map[netip.Prefix]announced // what the peer has heard over the current connection
	learned map[netip.Prefix]ReceivedRoute
	// returned are prefixes that the peer announces with this AS in their path.
	returned map[netip.Prefix]struct{}
	// failures are those since the session was last established or changed, told what the peer has
	// said since. Only run uses what failures points to; others replace it.
	failures *loop.Failures
	told     error

	restarted bool // a session was established since the speaker started; only run touches it

	pace pace
}

var errBFDDown = errors.New("BFD says that the path to the peer is lost")

// changeError ends a connection because of an option that only a new one can have.
type changeError struct {
	what string
	// foreign is set when the peer or our identity is another one, so that nothing of the old session
	// may outlive it.
	foreign bool
}

func (e *changeError) Error() string { return "configuration changed: " + e.what }

func newSession(name string, opts Options, d plan.BGPSession) *session {
	if opts.pulses == nil {
		opts.pulses = &loop.Pulses{}
	}
	s := &session{
		name: name, opts: opts, log: opts.Log.With("peer", name), desired: d,
		routes: make(chan struct{}, 1), redo: make(chan struct{}, 1), incoming: make(chan net.Conn),
		over: make(chan struct{}), moved: func() {},
		status: Status{State: Idle, Since: time.Now(), Reason: lb.ReasonNotEstablished}, flushedVersion: -1,
		failures: &loop.Failures{}, pace: newPace(),
	}
	s.succession = time.AfterFunc(routerLasts, s.succeed)
	s.succession.Stop()
	return s
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// set replaces what is desired. What can change in place does; otherwise the current connection
// ends.
func (s *session) set(d plan.BGPSession) {
	s.mu.Lock()
	before := s.desired
	s.desired = d
	s.version++
	change := difference(before, d)
	if change != nil {
		s.failures, s.told = &loop.Failures{}, nil
	}
	abort := s.abort
	s.mu.Unlock()
	switch {
	case d.BFDDown && !before.BFDDown && abort != nil:
		abort(errBFDDown)
	case change != nil && abort != nil:
		abort(change)
	}
	if change != nil || before.BFDDown && !d.BFDDown {
		poke(s.redo)
	}
	poke(s.routes)
}

// difference returns the options that differ and that a connection cannot change, or nil.
func difference(a, b plan.BGPSession) *changeError {
	for _, option := range []struct {
		what    string
		same    bool
		foreign bool
	}{
		{"AS number", a.LocalASN == b.LocalASN && a.PeerASN == b.PeerASN && a.Dynamic == b.Dynamic, true},
		{"peer address", a.Addr == b.Addr && a.Port == b.Port && a.Interface == b.Interface && a.VRF == b.VRF, true},
		{"interface of the VRF", a.VRFIndex == b.VRFIndex, false},
		{"router ID", a.RouterID == b.RouterID, true},
		{"graceful restart", a.GracefulRestart == b.GracefulRestart, true},
		{"source address", a.Source == b.Source, false},
		{"hold time", a.HoldTime == b.HoldTime, false},
		{"password", a.Password == b.Password, false},
		{"multihop", a.MultiHop == b.MultiHop, false},
		{"address families", slices.Equal(a.Families, b.Families), false},
	} {
		if !option.same {
			return &changeError{option.what, option.foreign}
		}
	}
	return nil
}

func (s *session) want() plan.BGPSession {
	d, _ := s.wantVersion()
	return d
}

func (s *session) wantVersion() (plan.BGPSession, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.desired, s.version
}

// run keeps the session until ctx ends.
func (s *session) run(ctx context.Context) {
	var discovery sync.WaitGroup
	defer discovery.Wait()
	watched, stop := "", func() {}
	defer func() { stop() }()
	backoff := loop.Backoff{Min: minWait}
	var due time.Time     // when to connect next
	var incoming net.Conn // what the peer has opened before
	defer func() {
		close(s.over)
		if incoming != nil {
			incoming.Close()
		}
	}()
	for ctx.Err() == nil {
		if d := s.want(); d.Interface != watched {
			stop()
			stop = s.watchInterface(ctx, &discovery, d.Interface)
			watched = d.Interface
		}
		up, err := s.try(ctx, incoming)
		if ctx.Err() != nil {
			return
		}
		most := max(s.want().ConnectTime, minWait)
		var taken *takenError
		switch {
		case up >= calm:
			backoff.Reset()
		case up > 0, errors.As(err, &taken):
			most = min(most, maxFlapWait)
		}
		var change *changeError
		if errors.As(err, &change) {
			incoming = nil
			continue // at once
		}
		if incoming == nil || up > 0 { // what the peer begins, and what comes to nothing, does not put off what we do
			backoff.Max = most
			d := min(backoff.Next(), most)
			due = time.Now().Add(d*3/4 + rand.N(d/2))
		}
		incoming = s.pause(ctx, due)
	}
}

// watchInterface looks for the router on an interface until the returned function is called.
func (s *session) watchInterface(ctx context.Context, group *sync.WaitGroup, iface string) (stop func()) {
	s.mu.Lock()
	s.router, s.successor, s.trouble = netip.Addr{}, netip.Addr{}, nil
	s.mu.Unlock()
	s.moved()
	if iface == "" {
		return func() {}
	}
	ctx, stop = context.WithCancel(ctx)
	group.Go(func() {
		_ = loop.Retry(ctx, loop.Backoff{Min: time.Second, Max: time.Second}, func(ctx context.Context) (worked bool) {
			if err := s.opts.Discover(ctx, iface, s.found); err != nil && ctx.Err() == nil {
				s.mu.Lock()
				s.router, s.trouble = netip.Addr{}, err // a session that is up may go on
				s.mu.Unlock()
				s.moved()
				poke(s.redo)
			}
			return false
		})
	})
	return stop
}

// found takes the address of the router on the interface; not valid as long as there is none. Anybody on the link
// can say to be a router: another one takes no session from the first, nor the place of one that advertises itself.
func (s *session) found(addr netip.Addr) {
	now := time.Now()
	s.mu.Lock()
	before, abort, until := s.router, s.abort, s.routerHeard.Add(routerLasts)
	if addr.IsValid() && before.IsValid() && addr != before && (s.status.State == Established || now.Before(until)) {
		if !s.successor.IsValid() {
			s.successor = addr
			s.succession.Reset(until.Sub(now))
		}
		s.mu.Unlock()
		return
	}
	s.router, s.routerHeard, s.successor, s.trouble = addr, now, netip.Addr{}, nil
	s.mu.Unlock()
	s.turned(before, addr, abort)
}

// succeed has the successor take the place of a router that no longer advertises itself: the successor's next
// advertisement may be minutes away.
func (s *session) succeed() {
	now := time.Now()
	s.mu.Lock()
	before, addr, abort := s.router, s.successor, s.abort
	due := addr.IsValid() && s.status.State != Established && !now.Before(s.routerHeard.Add(routerLasts))
	if due {
		s.router, s.routerHeard, s.successor = addr, now, netip.Addr{}
	}
	s.mu.Unlock()
	if due {
		s.turned(before, addr, abort)
	}
}

// turned has the session go on with the router that was found.
func (s *session) turned(before, addr netip.Addr, abort context.CancelCauseFunc) {
	if addr != before {
		s.moved()
	}
	if abort != nil && before.IsValid() && addr != before {
		abort(&changeError{what: "the router on the interface is " + addr.String()})
	}
	if addr != before || !addr.IsValid() {
		poke(s.redo)
	}
}

// target returns where the session is had now; its address is not valid as long as that of an
// unnumbered peer is not known.
func (s *session) target() Target {
	s.mu.Lock()
	defer s.mu.Unlock()
	return targetOf(s.desired, s.router)
}

// offer passes on a connection that the peer has opened, and returns false when the session has
// ended. It does not wait: the session's goroutine always listens.
func (s *session) offer(conn net.Conn) bool {
	select {
	case s.incoming <- conn:
		return true
	case <-s.over:
		return false
	}
}

// pause waits until it is due to connect, until there is another reason to go on, or for a
// connection of the peer, which it returns.
func (s *session) pause(ctx context.Context, due time.Time) net.Conn {
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-s.redo:
	case conn := <-s.incoming:
		return conn
	}
	return nil
}

// try makes one attempt and keeps the session as long as it lasts: with the connection that the
// peer has opened, if there is one. It returns how long the session was established, and why it
// ended.
func (s *session) try(ctx context.Context, incoming net.Conn) (up time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	select {
	case <-s.redo: // what it was for is in what is desired now
	default:
	}
	s.succeed() // it may be due since before the last session ended
	s.mu.Lock()
	d, router, trouble := s.desired, s.router, s.trouble
	s.abort = cancel
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.abort = nil
		s.mu.Unlock()
	}()
	if reason, err := obstacle(d, router, trouble); err != nil {
		if incoming != nil {
			incoming.Close()
		}
		s.failed(reason, err)
		return 0, s.hold(ctx)
	}
	s.enter(Connect)
	return newAttempt(s, d, targetOf(d, router)).run(ctx, incoming)
}

// obstacle returns what the session lacks before anybody can connect.
func obstacle(d plan.BGPSession, router netip.Addr, trouble error) (lb.Reason, error) {
	switch {
	case d.BFDDown:
		return lb.ReasonBFDDown, errBFDDown
	case d.Interface == "" || router.IsValid():
		return "", nil
	case trouble != nil:
		return lb.ReasonInterfaceMissing, trouble
	}
	return lb.ReasonNotEstablished, fmt.Errorf("no router has advertised itself on interface %s yet", d.Interface)
}

// hold waits for what the session needs before it can connect. Meanwhile it is Idle, and refuses
// what the peer opens (RFC 4271 section 8.2.2).
func (s *session) hold(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.redo:
			return &changeError{what: "what was waited for is there"}
		case conn := <-s.incoming:
			conn.Close()
		}
	}
}
