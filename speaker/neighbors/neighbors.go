// Package neighbors is the actor that has the kernel find the other Nodes and the next hops of
// routes (ARP, RFC 826; NDP, RFC 4861) when this node may not have been able to ask for them.
//
// While a link is away, the kernel goes on asking for the neighbors behind it. A question that began
// then may fail just after the link is back, and with it all packets that wait for the answer: their
// senders learn that the host is unreachable. So when a link returns, or a BGP session comes up, the
// kernel asks such neighbors anew, and the routes of the new session wait for the answers.
package neighbors

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the actor.
const (
	// Patience is how long neighbors are waited for at the most. A switch port that forwards answers
	// within milliseconds.
	Patience = time.Second
	// askEvery is how often a neighbor is asked for that does not answer.
	askEvery = 200 * time.Millisecond
	// lookEvery is how soon the kernel is looked at again while answers are missing.
	lookEvery = 20 * time.Millisecond
)

// maxSilent bounds how many next hops are remembered that do not answer.
const maxSilent = 1024

// Desired says which neighbors count.
type Desired struct {
	Interfaces []lb.Interface // all that the node has
	// Nodes are the addresses of the other Nodes, true for those that live. The answers of the others
	// are not waited for.
	Nodes map[netip.Addr]bool
}

// Kernel is the kernel's table of neighbors, and what of its routes concerns them.
type Kernel interface {
	Unresolved() ([]links.Unresolved, error)
	NextHops() ([]links.Gateway, error)
	Renew(links.Unresolved) error
	Close()
}

// Options of an actor.
type Options struct {
	Log *slog.Logger
	// Open opens the way to the kernel for as long as answers are waited for; nil opens netlink.
	Open func() (Kernel, error)
}

// Neighbors is the actor.
type Neighbors struct {
	opts   Options
	runner *loop.Runner

	mu      sync.Mutex
	desired Desired
	known   bool                   // Set was called
	waiting map[chan struct{}]bool // to be closed when all is found
	gaveUp  bool                   // a session has waited for as long as it does
	back    bool                   // an interface has returned

	// Only apply touches what follows.
	kernel   Kernel // nil while nobody waits
	nextHops []links.Gateway
	asked    map[key]time.Time
	began    map[key]time.Time // when a next hop was first awaited
	// silent are next hops that are no Nodes, and for which a session has waited in vain: none does
	// again, until the kernel knows them or an interface returns.
	silent   map[key]bool
	failures loop.Failures
}

var _ actor.Setter[Desired] = (*Neighbors)(nil)

// New returns an actor; nothing is asked before Run.
func New(opts Options) *Neighbors {
	if opts.Open == nil {
		opts.Open = open
	}
	n := &Neighbors{opts: opts, waiting: map[chan struct{}]bool{}}
	n.runner = loop.New(func(context.Context) (time.Duration, error) { return n.apply(time.Now()), nil }, loop.Options{})
	return n
}

// Set replaces which neighbors count. If an interface has returned, they are asked for.
func (n *Neighbors) Set(d Desired) {
	n.mu.Lock()
	back := n.known && returned(n.desired.Interfaces, d.Interfaces)
	n.desired, n.known, n.back = d, true, n.back || back
	n.mu.Unlock()
	if back {
		n.resolve(false)
	}
}

// Resolve has the kernel ask anew for the neighbors that it does not find, and returns a channel
// that is closed once it knows them all, or after Patience. It never blocks. It is called when a
// session has come up: the links work then.
func (n *Neighbors) Resolve() <-chan struct{} { return n.resolve(true) }

func (n *Neighbors) resolve(session bool) <-chan struct{} {
	done := make(chan struct{})
	n.mu.Lock()
	n.waiting[done] = true
	n.mu.Unlock()
	time.AfterFunc(Patience, func() { // also if the kernel hangs
		n.mu.Lock()
		n.gaveUp = n.gaveUp || session && n.waiting[done]
		n.mu.Unlock()
		n.release(done)
	})
	n.runner.Poke()
	return done
}

func (n *Neighbors) release(waiting ...chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, done := range waiting {
		if n.waiting[done] {
			delete(n.waiting, done)
			close(done)
		}
	}
}

// Busy returns for how long the actor has been at one thing.
func (n *Neighbors) Busy() time.Duration { return n.runner.Busy() }

// Run asks until ctx ends.
func (n *Neighbors) Run(ctx context.Context) error {
	defer n.rest()
	return n.runner.Run(ctx)
}

// apply looks at the kernel while answers are waited for, and returns when to look again; 0 for not
// before the next Resolve.
func (n *Neighbors) apply(now time.Time) time.Duration {
	n.mu.Lock()
	desired, waiting := n.desired, slices.Collect(maps.Keys(n.waiting))
	gaveUp, back := n.gaveUp, n.back
	n.gaveUp, n.back = false, false
	n.mu.Unlock()
	if back {
		n.silent = nil
	} else if gaveUp {
		n.resign(now)
	}
	if len(waiting) == 0 {
		n.rest()
		return 0
	}
	missing, err := n.look(now, desired)
	n.failures.Log(n.opts.Log, "cannot have the kernel ask for the other nodes and gateways; retrying",
		"the kernel asks for the other nodes and gateways again", err)
	if err == nil && missing == 0 {
		n.release(waiting...)
	}
	return lookEvery
}

// look returns how many answers are missing, and has the kernel ask.
func (n *Neighbors) look(now time.Time, desired Desired) (missing int, err error) {
	if n.kernel == nil {
		if n.kernel, err = n.opts.Open(); err != nil {
			return 0, err
		}
		n.asked, n.began = map[key]time.Time{}, map[key]time.Time{}
	}
	unresolved, err := n.kernel.Unresolved()
	if err != nil {
		return 0, err
	}
	n.heed(unresolved)
	if len(unresolved) == 0 {
		return 0, nil
	}
	if n.nextHops == nil {
		if n.nextHops, err = n.kernel.NextHops(); err != nil {
			return 0, err
		}
	}
	var failed []error
	for _, q := range choose(desired, n.nextHops, unresolved, n.silent) {
		if q.awaited {
			missing++
		}
		_, isNode := desired.Nodes[q.Addr]
		if _, known := n.began[q.key()]; q.awaited && !isNode && !known {
			n.began[q.key()] = now
		}
		if last, asked := n.asked[q.key()]; asked && now.Sub(last) < askEvery {
			continue
		}
		if err := n.kernel.Renew(q.Unresolved); err != nil {
			failed = append(failed, err)
		}
		n.asked[q.key()] = now
	}
	return missing, errors.Join(failed...)
}

// heed forgets what the kernel knows, or asks for no longer, of those that did not answer.
func (n *Neighbors) heed(unresolved []links.Unresolved) {
	if len(n.began)+len(n.silent) == 0 {
		return
	}
	still := make(map[key]bool, len(unresolved))
	for _, u := range unresolved {
		still[question{Unresolved: u}.key()] = true
	}
	maps.DeleteFunc(n.began, func(k key, _ time.Time) bool { return !still[k] })
	maps.DeleteFunc(n.silent, func(k key, _ bool) bool { return !still[k] })
}

// resign notes the next hops for which a session has waited in vain.
func (n *Neighbors) resign(now time.Time) {
	for k, since := range n.began {
		if now.Sub(since) < Patience/2 || len(n.silent) >= maxSilent {
			continue
		}
		if n.silent == nil {
			n.silent = map[key]bool{}
		}
		n.silent[k] = true
	}
}

// rest closes the way to the kernel.
func (n *Neighbors) rest() {
	if n.kernel != nil {
		n.kernel.Close()
	}
	n.kernel, n.nextHops, n.asked, n.began = nil, nil, nil, nil
}

// netlinked is the Kernel of the process's network namespace.
type netlinked struct{ *links.Neighbors }

func open() (Kernel, error) {
	table, err := links.OpenNeighbors()
	if err != nil {
		return nil, err
	}
	return netlinked{table}, nil
}

// NextHops returns the next hops of all routes.
func (netlinked) NextHops() ([]links.Gateway, error) { return links.NextHops(netns.None()) }
