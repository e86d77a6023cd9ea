// Package relay is the relay: it ends clients' connections to Services on the node, and connects each to
// a backend. When one does not answer it tries another, before the client notices.
package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Options are what flags say.
type Options struct {
	Socket string // of the proxy's feed
	Port   uint16 // 0 for any free one
	// TCPOnly leaves UDP to the rules.
	TCPOnly bool
	// Tries is how many backends a connection tries at most, TryAfter after which time without an answer
	// the next is tried as well, ConnectTimeout how long all have together.
	Tries                    int
	TryAfter, ConnectTimeout time.Duration
	// Idle is how long a connection may be silent, Drain how long open connections have when the relay
	// ends.
	Idle, Drain time.Duration
	// Limit is how many connections there are at once, ServiceLimit how many of one Service, ClientLimit
	// how many of one client to one Service.
	Limit, ServiceLimit, ClientLimit int
	// FlowLimit, ServiceFlows and ClientFlows are the same of flows of UDP, and UDPIdle is how long one may be
	// silent.
	FlowLimit, ServiceFlows, ClientFlows int
	UDPIdle                              time.Duration
	// AccessLog logs each connection and flow at its end.
	AccessLog bool
	// HandOver is the unix socket over which a relay hands its sockets and connections to its successor; empty for none.
	HandOver string
}

// Deps are what the relay needs.
type Deps struct {
	Log *slog.Logger
	Now func() time.Time
	// Started is when the process began.
	Started time.Time
	// Dial connects to a backend, and sends with a TTL unless that is 0.
	Dial func(ctx context.Context, backend netip.AddrPort, ttl int) (*Conn, error)
	// DialUDP opens a socket to a backend, with the same TTL.
	DialUDP func(backend netip.AddrPort, ttl int) (*Conn, error)
	// Original returns what a client connected to.
	Original func(*Conn, lb.Family) (netip.AddrPort, error)
	// Times returns after which silence the kernel forgets flows of UDP: those of which one end has been silent or
	// that are new, and streams.
	Times func() (flow, stream time.Duration)
	// Overflows counts the datagrams for which sockets of the node had no room.
	Overflows func() (uint64, error)
	// Memory returns how many bytes the process has, with the kernel's buffers of its sockets, and may have; 0 for any
	// number.
	Memory func() (used, limit uint64)
	// listen opens a port of TCP at all addresses of a family; any free one for 0.
	listen func(lb.Family, uint16) (listener, error)
	// Succeeded is called once a successor accepts connections in the relay's place; may be nil.
	Succeeded func()
}

// NewDeps returns what the relay needs on a node.
func NewDeps(log *slog.Logger) Deps {
	return Deps{Log: log, Now: time.Now, Started: time.Now(), Original: originalDestination, Dial: Dial, DialUDP: DialUDP,
		Times: conntrackTimes, Overflows: overflows, Memory: ownMemory, listen: listenTCP}
}

const (
	// findWithin is how long a connection waits for the proxy's word on its frontend: the rules may lead
	// here a moment before that comes.
	findWithin = 2 * time.Second
	// askWithin is how long a flow of UDP waits for the proxy's word on where it went. Flows that come after the
	// proxy has gone come for plan.RelayLease, and one that restarts may be back by then.
	askWithin = 5 * time.Second
	// maxWaiting is how many connections wait so at once: whoever sends connections here that no frontend is
	// behind shall not take the places of others.
	maxWaiting = 100
	// acceptAfter is how long the relay accepts connections after the rules have stopped leading to it:
	// what they have sent here may still be under way.
	acceptAfter = 300 * time.Millisecond
	// strainedFor is how long the rules do not lead here after the relay could not accept a connection, many waited for
	// that, or memory was scarce.
	strainedFor = 5 * time.Second
	// behindFor is the same of flows of UDP, after so many waited for the proxy's word that others would wait for
	// long, or the kernel had no room for what comes in.
	behindFor = 5 * time.Second
	// reopenEvery is how often the relay tries to open a port of UDP that another program has.
	reopenEvery = time.Second
	// maxReopen is how long it waits at most until it tries again to open a family's port, once the other's is open.
	maxReopen = time.Minute
	// timesEvery is how often the relay looks for how long the kernel remembers flows of UDP, in two small files, and
	// whether it has dropped datagrams.
	timesEvery = time.Second
	// sweepClientsEvery is how often the relay forgets the clients whose session affinity is over.
	sweepClientsEvery = time.Minute
	// headerWithin bounds how long a backend has to take the header of the PROXY protocol.
	headerWithin = 10 * time.Second
)

// Relay is the relay.
type Relay struct {
	options   Options
	deps      Deps
	table     *table
	sockets   sockets
	receivers *receivers
	succession
	pulses loop.Pulses // of its loops, while they do not wait
	// receiving are those of the loops that receive datagrams: one for each family, as it is for every datagram.
	receiving map[lb.Family]*loop.Pulse

	workers   *workers
	pipes     *pipes
	passing   *passing
	flows     *flows
	questions *questions
	idle      atomic.Pointer[idleTimes]
	// flowsWaiting are those that wait for the proxy's word on their frontend. lostSent are the datagrams that no
	// socket to a backend took, lostReceived those that no socket took on the way back, and noPort counts the flows
	// that ended as the node had no free port.
	flowsWaiting, noPort   atomic.Int64
	lostSent, lostReceived atomic.Uint64

	open, refused atomic.Int64
	strained      atomic.Int64  // see strainedFor, in nanoseconds of Unix time
	behind        atomic.Int64  // when many flows of UDP last waited to be taken in, in the same
	full          atomic.Bool   // as last said to the proxy
	crossed       chan struct{} // holds a token once open has crossed high or low
	waiting       atomic.Int64  // for the proxy's word on their frontend
	known         atomic.Bool   // the proxy is connected and has said all
	telling       atomic.Bool   // it is connected, and has said that there is more to come until that is all
	sameVersion   atomic.Bool   // it has shown that it means the same as this relay
	leaving, left chan struct{} // closed when the relay is about to end, and once the rules do not lead here
	leftOnce      sync.Once
}

// New returns a relay that is listening already, or is about to take over from another one on the node. It may be
// called again after an error, such as ErrNoPredecessor.
func New(options Options, deps Deps) (*Relay, error) {
	r := &Relay{options: options, deps: deps, table: newTable(deps.Now),
		sockets:   sockets{handed: make(chan struct{}), lacking: map[lb.Family]string{}},
		receivers: newReceivers(), pipes: newPipes(maxPipes), passing: newPassing(), workers: newWorkers(),
		crossed: make(chan struct{}, 1), leaving: make(chan struct{}), left: make(chan struct{}),
		flows:     newFlows(options.FlowLimit, options.ServiceFlows, options.ClientFlows),
		questions: newQuestions(), succession: newSuccession(),
		receiving: map[lb.Family]*loop.Pulse{lb.IPv4: {}, lb.IPv6: {}}}
	var refused error
	r.predecessor, refused = r.findPredecessor(context.Background())
	if r.alone = deps.Started.Add(HandOverWithin); r.predecessor != nil {
		r.alone = deps.Now().Add(HandOverWithin)
	} else {
		err := r.listen()
		switch {
		case err == nil:
			r.settle()
		case options.HandOver == "" || !errors.Is(err, unix.EADDRINUSE):
			return nil, err
		case errors.Is(refused, errOtherVersion):
			return nil, fmt.Errorf("the relay that is there: %w: %w", refused, err)
		default:
			return nil, errors.Join(fmt.Errorf("%w: %w", ErrNoPredecessor, err), refused)
		}
	}
	if refused != nil {
		deps.Log.Info("not taking over from the relay that is there", "reason", refused)
	}
	r.lookAtTimes()
	return r, nil
}

// listen opens the port of each family that can be opened, or returns why there is none. It opens none while a
// predecessor may have that of the other: what it does not hand over would end with it.
func (r *Relay) listen() error {
	var all []listener
	var failed error
	for _, family := range families {
		l, err := r.listenAt(family)
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		all = append(all, l)
	}
	if len(all) == 0 || errors.Is(failed, unix.EADDRINUSE) && r.mayFollow() {
		for _, l := range all {
			l.socket.Close()
			r.receivers.drop(l.family)
		}
		return failed
	}
	r.sockets.set(all)
	return nil
}

// Ready returns why the relay does not know what to relay; nil if it does.
func (r *Relay) Ready() error {
	if !r.known.Load() {
		return errors.New("the proxy has not said what to relay")
	}
	return nil
}

// Busy returns for how long one of the relay's loops has been at one thing; 0 while all of them wait.
func (r *Relay) Busy() time.Duration {
	longest := r.pulses.Busy()
	for _, p := range r.receiving {
		longest = max(longest, p.Busy())
	}
	return longest
}

// lookAtTimes finds out for how long the kernel remembers flows of UDP. A flow has to end before the kernel forgets
// it.
func (r *Relay) lookAtTimes() {
	flow, stream := r.deps.Times()
	now := idleTimes{flow - flow/6, stream - stream/6}
	if before := r.idle.Swap(&now); before != nil && *before != now {
		r.deps.Log.Info("the kernel remembers flows of UDP for another time", "flow", now.flow, "stream", now.stream)
		for _, f := range r.flows.list() {
			f.hurry()
		}
	}
}

// followKernel looks at them, and at what the kernel has dropped, again and again, until ctx ends. It also has the
// table forget what is over.
func (r *Relay) followKernel(ctx context.Context) {
	look := time.NewTicker(timesEvery)
	defer look.Stop()
	var before losses
	swept := r.deps.Now()
	for first := true; ; first = false {
		end := r.pulses.Begin()
		r.lookAtTimes()
		now := r.losses()
		if !first && now.overflowedSince(before) {
			r.fallBehind()
		}
		before = now
		if at := r.deps.Now(); at.Sub(swept) >= sweepClientsEvery {
			r.table.sweep()
			swept = at
		}
		end()
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
	}
}

// losses are what the kernel has counted so far: the datagrams that it dropped at the relay's sockets, and those for
// which sockets of the node had no room, unless that is unknown.
type losses struct {
	dropped, overflows uint64
	unknown            bool
}

func (r *Relay) losses() losses {
	overflows, err := r.deps.Overflows()
	return losses{r.receivers.dropped(), overflows, err != nil}
}

// overflowedSince reports whether a socket of the relay may have had no room. What was dropped while no socket of the
// node was full had a wrong checksum, which anybody can send, and says nothing about the relay.
func (l losses) overflowedSince(before losses) bool {
	return l.dropped != before.dropped && (l.unknown || before.unknown || l.overflows != before.overflows)
}

// fallBehind notes that the relay cannot take in flows of UDP as fast as they come.
func (r *Relay) fallBehind() {
	was := r.Behind()
	r.behind.Store(r.deps.Now().UnixNano())
	if !was {
		r.cross()
	}
}

// Behind reports whether the relay has asked that new flows of UDP go straight to endpoints, as it takes them in
// more slowly than they come. Nothing is lost while they do: the rules do without a relay.
func (r *Relay) Behind() bool { return r.lately(&r.behind, behindFor) }

// lately reports whether something was less than so long ago, in nanoseconds of Unix time. Once the clock has been set
// back by more it was not: else it would be until the clock is there again.
func (r *Relay) lately(at *atomic.Int64, within time.Duration) bool {
	return r.deps.Now().Sub(time.Unix(0, at.Load())).Abs() < within
}

// high is how many connections the relay has when the rules are to stop leading to it. A tenth of the
// limit is left for those that come before they have. low is how many it has when they lead here again.
func (r *Relay) high() int64 { return int64(r.options.Limit - r.options.Limit/10) }
func (r *Relay) low() int64  { return int64(r.options.Limit - r.options.Limit/5) }

// Full reports whether the relay has asked that new connections go straight to endpoints, as it has about
// as many as it may, or too little time or memory for more.
func (r *Relay) Full() bool { return r.full.Load() }

// isFull returns what Full is to be. The goroutine that tells the proxy calls it. One Service's clients can open
// connections faster than the relay accepts any, or a busy node gives it little time. All Services have one queue, and
// the kernel drops what that has no room for.
func (r *Relay) isFull() bool {
	if slices.ContainsFunc(r.sockets.listeners(), listener.crowded) {
		r.strained.Store(r.deps.Now().UnixNano())
	}
	limit := r.high()
	if r.full.Load() {
		limit = r.low()
	}
	full := r.lately(&r.strained, strainedFor) || r.open.Load() >= limit
	r.full.Store(full)
	return full
}

// admit counts a connection, and reports whether there is room for it; release takes it back.
func (r *Relay) admit() bool {
	n := r.open.Add(1)
	if n == r.high() {
		r.cross()
	}
	if n > int64(r.options.Limit) {
		r.release()
		return false
	}
	return true
}

func (r *Relay) release() {
	if r.open.Add(-1) == r.low()-1 {
		r.cross()
	}
}

func (r *Relay) cross() {
	select {
	case r.crossed <- struct{}{}:
	default:
	}
}
