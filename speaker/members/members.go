// Package members is the actor that gossips: it keeps the speakers of a cluster in touch, tells the
// others what this node claims, and knows what each of them claims. Package liveness
// finds out whether a speaker that gossip has lost is dead. It wraps memberlist, of which no type
// leaves the package.
package members

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// leaveTimeout bounds how long a leaving node waits until it has told the others.
const leaveTimeout = 500 * time.Millisecond

// gather is the least time between two messages with changes: what changes meanwhile goes in one.
const gather = 25 * time.Millisecond

// Options of Members.
type Options struct {
	Self string // this node's name
	// Bind returns the address at which gossip is spoken, over UDP and TCP, and which the others are
	// told. It may wait for it.
	Bind func(context.Context) (netip.Addr, error)
	Port int
	// Keys encrypt gossip (AES-GCM), 16, 24 or 32 bytes each: the first one encrypts, all of them
	// decrypt. Without keys gossip is not encrypted. See SetKeys.
	Keys [][]byte
	// Born tells this process from earlier ones on the node: the time of its start.
	Born time.Time
	// Boot is the ID of the boot that this node's kernel is in; "" if that is not known.
	Boot    string
	Profile Profile // the zero value stands for LAN
	// Alone is how long a node calls the others, if they do not answer at all, before it takes itself
	// for the only one.
	Alone    time.Duration
	Liveness Liveness
	Log      *slog.Logger
	// Changed is called with the VIPs of which another node says something else now; nil means that
	// Joined changed, and an empty list that Met did while it was sought. It must not block, and may
	// be called from any goroutine.
	Changed func(vips []netip.Addr)
	// Ended, if not nil, is called after Changed when another node that could announce a VIP, and did,
	// says that it cannot: clients wait for the next. It must not block.
	Ended func()
	// transport and pace replace the network and usualPace in tests.
	transport transport
	pace      pace
}

// Liveness learns from Members which speakers take part, and says which of their claims count. The
// first four methods are called in the order of events and must not block or call Members.
type Liveness interface {
	Joined(plan.Process)
	// Lost takes in that a process has left or stopped answering, and reports whether it had said farewell.
	Lost(plan.Process) (left bool)
	// Farewell takes in that a process ends as planned, and reports whether that is news.
	Farewell(node string, born uint64) bool
	// Alarmed takes in that a node has lost its path to a process, and reports whether that is news.
	Alarmed(node string, born uint64, by string) bool
	// Recalled takes in that other nodes reserve for this one what an earlier process of it, started
	// at born, has announced.
	Recalled(born uint64)
	// Sight returns what counts of the claims of each other node.
	Sight() plan.Sight
}

// Members is the actor.
type Members struct {
	opts   Options
	send   *loop.Runner
	join   *loop.Runner // calls those that are not members
	seek   *loop.Runner // and live ones
	renew  *loop.Runner
	queue  memberlist.TransmitLimitedQueue
	rounds rounds
	// pulses are of memberlist's goroutines while they are here, and beat is when one of them last
	// asked what there is to be said.
	pulses  loop.Pulses
	beat    atomic.Pointer[time.Time]
	keys    *memberlist.Keyring // nil without encryption
	empties empties
	// seeking are the calls to live nodes, and understood counts the whole states that could be read.
	seeking    sync.WaitGroup
	understood atomic.Uint64
	// aged is closed once memberlist counts from the time of this process's start: see age.
	aged    chan struct{}
	ageOnce sync.Once

	mu  sync.Mutex
	own *journal
	// what the last process before this one that announced an address said, from the others; nil if
	// unknown
	previous *page
	past     book                        // of previous and the processes after it, named by when they were started
	book     book                        // of the other nodes
	live     map[string]*memberlist.Node // other nodes
	greet    map[string]bool             // live nodes that were not told everything yet
	peers    map[string][]netip.Addr     // other nodes by name, from the API server; nil while unknown
	former   map[string]bool             // live nodes that were peers
	at       map[netip.Addr]bool         // the addresses of peers
	partial  map[string]int              // how many changes after a gap were known at the last look, by node
	joined   bool
	wasTold  bool                // another node's whole state was read, whoever asked for it
	macs     map[string][]string // of the other nodes, by name, also of those that have gone
	ownMACs  []string
	seeks    time.Time       // since when another speaker has to be heard; the zero time if none has
	sought   time.Time       // when seeks was set, or gossip began
	anew     bool            // seeks was set, and no step has followed yet
	called   map[string]bool // nodes to which a call of seekStep is under way
	strange  map[string]bool // live nodes that the last call did not understand
	lastMet  time.Time       // see Met
	calling  time.Time       // when the first round of calls began
	trouble  string          // why others cannot be joined
	bind     netip.Addr
	ml       *memberlist.Memberlist // nil before and after Run
	stopped  bool
}

var _ actor.Updater[netip.Addr, *plan.Claim] = (*Members)(nil)

// New returns Members that have met no other node. Nothing is opened before Run.
func New(opts Options) *Members {
	if opts.pace == (pace{}) {
		opts.pace = usualPace
		opts.pace.silent = max(opts.Alone, opts.pace.alone)
	}
	if opts.Profile == (Profile{}) {
		opts.Profile = LAN
	}
	m := &Members{
		opts: opts, keys: newKeyring(opts.Keys),
		own:  newJournal(opts.Self, uint64(opts.Born.UnixNano())),
		aged: make(chan struct{}), book: newBook(), past: newBook(),
		live: map[string]*memberlist.Node{}, greet: map[string]bool{},
		macs: map[string][]string{}, former: map[string]bool{}, called: map[string]bool{}, strange: map[string]bool{},
	}
	m.queue.NumNodes = m.size
	m.rounds.interval = opts.Profile.GossipInterval
	m.queue.RetransmitMult = retransmitMult
	m.send = loop.New(m.sendStep, loop.Options{Gap: gather})
	m.join = loop.New(m.joinStep, loop.Options{})
	m.seek = loop.New(m.seekStep, loop.Options{})
	m.renew = loop.New(m.renewStep, loop.Options{})
	return m
}

// size returns how many nodes take part, this one included.
func (m *Members) size() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return 1 + len(m.live)
}

// Begin says all that this node claims.
func (m *Members) Begin(all map[netip.Addr]*plan.Claim) {
	m.say(func(own *journal) map[netip.Addr]*plan.Claim { return own.whole(all) })
}

// Update says what this node claims now of some VIPs; nil takes back what it said.
func (m *Members) Update(changes map[netip.Addr]*plan.Claim) {
	m.say(func(*journal) map[netip.Addr]*plan.Claim { return changes })
}

func (m *Members) say(changes func(own *journal) map[netip.Addr]*plan.Claim) {
	m.mu.Lock()
	news := m.own.set(changes(m.own))
	m.mu.Unlock()
	if news {
		m.send.Poke()
	}
}

// Claims returns what counts, for who sees this, of what the other nodes say of a VIP.
func (m *Members) Claims(vip netip.Addr, seen plan.Sight) map[string]plan.Claim {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.book.claims(vip, seen.Standings)
}

// Restarted reports whether this node's speaker announced the VIP before it was restarted, a moment
// ago.
func (m *Members) Restarted(vip netip.Addr, seen plan.Sight) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.previous == nil || m.previous.born != seen.Previous {
		return false
	}
	_, announced := m.previous.held(vip)
	return announced
}

// Joined reports whether another node has answered a call of this one with all that it knows, or this
// one has called all that it knows of for a while and is alone.
func (m *Members) Joined() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.joined
}

// Busy returns for how long the actor, or the gossip that it runs, has been at one thing.
func (m *Members) Busy() time.Duration {
	return max(m.send.Busy(), m.join.Busy(), m.seek.Busy(), m.renew.Busy(), m.pulses.Busy(), m.speechless())
}

// quiet is how long nothing is asked for by gossip at most, several times a second as a rule, while
// others are live.
const quiet = time.Minute

// speechless returns how long ago gossip last asked what there is to be said, if that is longer ago
// than quiet.
func (m *Members) speechless() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ml == nil || len(m.live) == 0 {
		return 0
	}
	if beat := m.beat.Load(); beat != nil && time.Since(*beat) > quiet {
		return time.Since(*beat)
	}
	return 0
}

// Run takes part until ctx ends; then it sends what is left to be said and takes its leave.
func (m *Members) Run(ctx context.Context) error {
	ml, err := m.start(ctx)
	if ml == nil {
		return err
	}
	m.mu.Lock()
	m.ml, m.sought = ml, time.Now()
	m.mu.Unlock()
	m.send.Poke()
	m.join.Poke()
	m.seek.Poke()
	var group errgroup.Group
	group.Go(func() error { return m.send.Run(ctx) })
	group.Go(func() error { return m.join.Run(ctx) })
	group.Go(func() error { return m.seek.Run(ctx) })
	group.Go(func() error { return m.renew.Run(ctx) })
	err = group.Wait()
	m.seeking.Wait()
	if _, sendErr := m.sendStep(context.Background()); sendErr != nil {
		m.opts.Log.Debug("the last claims were not sent", "error", sendErr)
	}
	m.bid()
	if leaveErr := ml.Leave(leaveTimeout); leaveErr != nil {
		m.opts.Log.Warn("the others may not know that this speaker leaves", "error", leaveErr)
	}
	m.mu.Lock()
	m.ml, m.stopped = nil, true
	m.mu.Unlock()
	if shutErr := ml.Shutdown(); shutErr != nil && err == nil {
		err = fmt.Errorf("end gossip: %w", shutErr)
	}
	return err
}

// start opens the sockets, and retries until it succeeds: the address may appear after the program
// has started, and the port may still be held by the process before.
func (m *Members) start(ctx context.Context) (ml *memberlist.Memberlist, err error) {
	trying, done := context.WithCancel(ctx)
	defer done()
	backoff := loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
	err = loop.Retry(trying, backoff, func(ctx context.Context) bool {
		bind, err := m.opts.Bind(ctx) // each time, as the Node may show another one by now
		if err == nil {
			m.mu.Lock()
			m.bind = bind
			m.mu.Unlock()
			ml, err = m.open(bind)
		}
		if err != nil {
			if ctx.Err() == nil {
				m.opts.Log.Warn("cannot start gossip; retrying", "address", netip.AddrPortFrom(bind, uint16(m.opts.Port)),
					"error", err)
			}
			return false
		}
		done()
		return true
	})
	return ml, err
}

// open opens the sockets and begins to gossip.
func (m *Members) open(bind netip.Addr) (*memberlist.Memberlist, error) {
	c := m.config(bind)
	at := netip.AddrPortFrom(bind, uint16(m.opts.Port))
	aged, err := m.ageing(at, c.Label)
	if err != nil {
		return nil, err
	}
	over := m.opts.transport
	if over == nil {
		if over, err = openNetwork(at, m.keys != nil, m.isNode, &m.empties, m.opts.Log); err != nil {
			return nil, err
		}
	}
	c.Transport = over
	ml, err := memberlist.Create(c)
	switch {
	case err == nil:
		m.age(over, aged)
	case m.opts.transport == nil:
		err = errors.Join(err, over.Shutdown())
	}
	return ml, err
}
