// Package rescue moves packets of TCP connections that this node does not know to the node that may
// know them, instead of having a pod answer them with a reset: when an address moves to another
// node, its connections are still known to its previous owner. A packet is moved as it is, and the
// other node's connection tracking takes it from there; answers go straight to the client.
//
// docs/rescue.md specifies the protocol between the nodes.
package rescue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Desired is what the speaker says.
type Desired struct {
	// Previous are the nodes that may hold connections to a VIP, by their addresses of the VIP's
	// family, likeliest first.
	Previous map[netip.Addr][]netip.Addr
	// Ring are the other nodes that may hold connections to a VIP which routers spread over nodes, in
	// the order of the ring from this node on. Previous does not count for a VIP that is here.
	Ring map[netip.Addr][]netip.Addr
	// Gone are nodes that hold nothing any more.
	Gone []netip.Addr
}

// Deps are what an Actor needs.
type Deps struct {
	Log    *slog.Logger
	Kernel Kernel
	// Families are those that this node has.
	Families []lb.Family
	// Ring switches the rings on. Without them a stray packet goes to one node.
	Ring bool
}

// lookEvery is how often the actor sees whether the targets and the rules are still there. It looks
// more often at first for a node that it has just asked for: a VIP may be about to move.
const (
	lookEvery = 2 * time.Second
	lookSoon  = 20 * time.Millisecond
	soonLooks = 10
	// gap is the least time between two looks that changes cause: each costs as much as there are
	// VIPs, and they may come by the hundred.
	gap = 50 * time.Millisecond
)

// kernel is what an Actor needs of the node; Kernel outside of tests.
type kernel interface {
	load(family lb.Family, all bool) (held, error)
	write(family lb.Family, before *table, want table, have held) error
	remove(lb.Family) error
	neighbors(lb.Family, []netip.Addr) (map[netip.Addr]links.Neighbor, error)
}

// Actor keeps the rules. Before Set it leaves what is there: unknown is not absent.
type Actor struct {
	log      *slog.Logger
	kernel   kernel
	families []lb.Family
	ring     bool
	runner   *loop.Runner

	mu      sync.Mutex
	desired *Desired

	// The rest belongs to the goroutine that runs apply.
	written map[lb.Family]table
	have    map[lb.Family]held            // as the kernel was last seen, or has been made since
	looked  time.Time                     // when that was
	known   map[netip.Addr]links.Neighbor // nodes as they last were
	asked   map[netip.Addr]int            // how often nodes were looked for of which nothing is known
	counted map[netip.Addr]uint64
	failed  loop.Failures

	packets atomic.Uint64
	targets atomic.Int64
}

// New returns an Actor that does nothing before Set is called.
func New(deps Deps) *Actor { return newActor(deps, deps.Kernel) }

func newActor(deps Deps, k kernel) *Actor {
	a := &Actor{log: deps.Log, kernel: k, families: deps.Families, ring: deps.Ring, written: map[lb.Family]table{},
		have:  map[lb.Family]held{},
		known: map[netip.Addr]links.Neighbor{}, asked: map[netip.Addr]int{}, counted: map[netip.Addr]uint64{}}
	a.runner = loop.New(a.step, loop.Options{Gap: gap})
	return a
}

var _ actor.Setter[Desired] = (*Actor)(nil)

// Set replaces the desired state. It never blocks.
func (a *Actor) Set(d Desired) {
	if !a.ring {
		d.Ring = nil
	}
	a.mu.Lock()
	a.desired = &d
	a.mu.Unlock()
	a.runner.Poke()
}

// want returns what was set last, nil before.
func (a *Actor) want() *Desired {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.desired
}

// Packets returns how many packets were moved.
func (a *Actor) Packets() uint64 { return a.packets.Load() }

// Targets returns to how many nodes packets would be moved.
func (a *Actor) Targets() int { return int(a.targets.Load()) }

// Run works until ctx ends, and leaves the rules in the kernel.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

func (a *Actor) step(context.Context) (time.Duration, error) {
	if rest := lookEvery - time.Since(a.looked); rest > 0 && !a.expecting() && a.adjust() {
		return rest, nil
	}
	err := a.apply()
	a.failed.Log(a.log, "cannot rescue connections of addresses that have moved; trying again",
		"can rescue connections of addresses that have moved again", err)
	switch {
	case a.idle():
		return 0, err
	case a.expecting():
		return lookSoon, err
	}
	return lookEvery, err
}

// apply makes the kernel hold what is wanted. A family that fails does not hold back the other.
func (a *Actor) apply() error {
	w := a.want()
	if w == nil {
		return nil
	}
	var errs []error
	targets := 0
	for _, family := range a.families {
		n, err := a.sync(family, *w)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
		targets += n
	}
	a.targets.Store(int64(targets))
	a.looked = time.Now()
	return errors.Join(errs...)
}

// adjust is apply without a look at the kernel, for when what is wanted may have changed since the
// last look and nothing else. It reports whether what is known sufficed.
func (a *Actor) adjust() bool {
	w := a.want()
	if w == nil {
		return false
	}
	targets := 0
	for _, family := range a.families {
		before, written := a.written[family]
		have, seen := a.have[family]
		if !written || !seen {
			return false
		}
		sent := slices.SortedFunc(maps.Keys(have.sent), netip.Addr.Compare)
		for _, node := range candidates(family, *w, sent) {
			if _, ok := a.known[node]; !ok {
				return false
			}
		}
		want := choose(family, *w, a.known, sent)
		if !before.equal(want) && a.write(family, &before, want, have) != nil {
			return false
		}
		targets += len(want.targets)
	}
	a.targets.Store(int64(targets))
	return true
}

// write makes the kernel hold a table, and notes that.
func (a *Actor) write(family lb.Family, before *table, want table, have held) error {
	delete(a.have, family)
	if err := a.kernel.write(family, before, want, have); err != nil {
		delete(a.written, family)
		if before != nil {
			return err // the table is not as it is believed to be, so it will be read
		}
		// The cause may be what another program has made of the table. The connections in mind go with
		// it.
		return errors.Join(err, a.kernel.remove(family))
	}
	sent := map[netip.Addr]uint64{}
	for node := range want.targets {
		sent[node] = have.sent[node]
	}
	a.written[family], a.have[family] = want, held{exists: len(want.targets) > 0, sent: sent}
	a.log.Debug("wrote where connections may be known", "family", family, "nodes", len(want.targets))
	return nil
}

// idle reports whether there is nothing to look after.
func (a *Actor) idle() bool {
	w := a.want()
	return w == nil || len(w.Previous) == 0 && len(w.Ring) == 0 && a.targets.Load() == 0
}

// expecting reports whether a node that was asked for may answer any moment.
func (a *Actor) expecting() bool {
	for _, n := range a.asked {
		if n < soonLooks {
			return true
		}
	}
	return false
}

// sync does what apply does for one family, and returns how many targets there are.
func (a *Actor) sync(family lb.Family, w Desired) (int, error) {
	before, known := a.written[family]
	have, err := a.kernel.load(family, !known)
	if err != nil {
		return 0, err
	}
	a.count(have)
	sent := slices.SortedFunc(maps.Keys(have.sent), netip.Addr.Compare)
	nodes := candidates(family, w, sent)
	neighbors, err := a.kernel.neighbors(family, nodes)
	if err != nil {
		return len(have.sent), err
	}
	for _, node := range nodes {
		if n, ok := neighbors[node]; ok && (n.Found || n.Failed) {
			a.known[node] = n
			delete(a.asked, node)
		} else if last, ok := a.known[node]; ok {
			neighbors[node] = last // the kernel forgets a neighbor that it has not needed for long
		} else {
			a.asked[node]++
		}
	}
	maps.DeleteFunc(a.asked, func(node netip.Addr, _ int) bool {
		return lb.FamilyOf(node) == family &&
			!slices.Contains(nodes, node)
	})
	want := choose(family, w, neighbors, sent)
	if !known {
		before = have.table     // by a predecessor, whose work is left alone if it is right
		before.hops = want.hops // the rules show it, which same compares
	}
	if before.equal(want) && same(family, have, want) {
		a.written[family], a.have[family] = want, have
		return len(want.targets), nil
	}
	if err := a.write(family, nil, want, have); err != nil {
		return 0, err
	}
	return len(want.targets), nil
}

// count adds up packets since the last look.
func (a *Actor) count(have held) {
	for node, n := range have.sent {
		before := a.counted[node]
		if n < before {
			before = 0 // it was written anew
		}
		a.packets.Add(n - before)
		a.counted[node] = n
	}
}

// same reports whether the kernel has the rules of a table.
func same(family lb.Family, have held, want table) bool {
	if len(want.targets) == 0 {
		return !have.exists
	}
	return slices.Equal(have.rules, userData(headerOf(family).strayRules(want))) &&
		maps.EqualFunc(have.sent, want.targets, func(uint64, []netip.Addr) bool { return true })
}

// candidates are the nodes of which something has to be known.
func candidates(family lb.Family, w Desired, sent []netip.Addr) []netip.Addr {
	found := map[netip.Addr]bool{}
	for _, of := range []map[netip.Addr][]netip.Addr{w.Previous, w.Ring} {
		for vip, all := range of {
			if lb.FamilyOf(vip) != family {
				continue
			}
			for _, node := range all {
				found[node] = true
			}
		}
	}
	for _, node := range sent {
		found[node] = true
	}
	return slices.SortedFunc(maps.Keys(found), netip.Addr.Compare)
}
