// Package rescue moves packets of TCP connections that this node does not know to the node that may
// know them, instead of having a pod answer them with a reset: when an address moves to another
// node, its connections are still known to its previous owner. A packet is moved as it is, and the
// other node's connection tracking takes it from there; answers go straight to the client.
//
// docs/design/rescue.md specifies the protocol between the nodes.
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
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// Deps are what an Actor needs.
type Deps struct {
	Log    *slog.Logger
	Kernel Kernel
	// Families are those that this node has.
	Families []lb.Family
	// Ring switches the rings on. Without them a stray packet goes to one node.
	Ring bool
	// Parameters is the folder of the network's kernel parameters, to set rp_filter where it is
	// needed; "" to leave it alone. Warn is called when that is needed and cannot
	// be done, and with "" when it is so no longer.
	Parameters string
	Warn       func(message string)
	// NoTunnel is called with the reason why nodes behind routers are left out, and with "" when they
	// are so no longer; it may be nil.
	NoTunnel func(message string)
	// Confirmed is called with the number that Confirm took; it must not block.
	Confirmed func(number uint64)
	// Direct is set if SetDirect will be called. Until then the tunnel of a predecessor stays.
	Direct bool
	// Limit is how many stray packets for one VIP are moved in a second while their connections are
	// not remembered, at most MaxLimit; 0 for no limit.
	Limit int
}

// lookEvery is how often the actor checks the targets and the rules. It checks more often while it
// waits for the address of a node that it has just asked for: a VIP may be about to move.
const (
	lookEvery = 2 * time.Second
	// lookFailed is how often while a node does not answer that the speaker does not take for dead: it
	// may be this node's link that was away, and connections come with it when it is back.
	lookFailed = 200 * time.Millisecond
	lookSoon   = 20 * time.Millisecond
	soonLooks  = 10
	// linkAway is how long a node keeps the place where it was while there is only a way over routers, and tunnelAway
	// while its tunnel cannot be looked at. After that the node has moved, or the tunnel is gone, and packets for it
	// would get lost that another node may know.
	linkAway   = lb.FlowMemory
	tunnelAway = time.Minute
	// gap is the least time between two steps that changes cause, which may come by the hundred.
	gap = 50 * time.Millisecond
)

// kernel is what an Actor needs of the node; Kernel outside of tests.
type kernel interface {
	load(family lb.Family, all bool) (held, error)
	write(family lb.Family, want *table, have held) error
	edit(family lb.Family, edits []edit) error
	neighbors(lb.Family, []netip.Addr) (map[netip.Addr]links.Neighbor, error)
	// carry makes the tunnel of a family, and uncarry removes it.
	carry(lb.Family, tunnel.Desired) (tunnel.State, error)
	uncarry(lb.Family) error
	loosen(folder string, from []int) (changed []string, err error)
	// remember has the notes of what loosen has changed say the same in the kernel and in noted.
	remember(folder string, noted map[string]int) error
	// tighten sets back what loosen has changed, by the notes in the kernel and in noted, and
	// forgets it.
	tighten(folder string, noted map[string]int) (reset []string, err error)
}

// Actor keeps the rules. Before Begin it leaves the kernel's rules alone: unknown is not absent.
type Actor struct {
	log      *slog.Logger
	kernel   kernel
	families []lb.Family
	ring     bool
	limit    int

	noTunnel func(string)

	parameters string
	warn       func(string)
	filtered   string         // the last error about the parameters
	warned     string         // what warn was last called with
	tightened  bool           // none is set
	noted      map[string]int // what rp_filter was before it was changed, by interface

	runner *loop.Runner
	inbox  actor.Inbox[netip.Addr, *Origins]

	confirmed func(uint64)

	mu      sync.Mutex
	lost    losses
	cluster cluster
	asks    uint64 // the number that Confirm was called with last
	handed  []int

	// The rest belongs to the goroutine that runs step.
	begun   bool
	all     map[netip.Addr]Origins
	nodes   map[netip.Addr]int            // in how many Origins a node is
	changed map[netip.Addr]Origins        // VIPs whose Origins have changed since the tables were made, as they were
	gone    losses                        // as lost was when the tables were made
	written map[lb.Family]*table          // as the kernel has it; it is missing where that is not certain
	sent    map[lb.Family][]netip.Addr    // the nodes that the kernel had when the table was made
	looked  time.Time                     // when the kernel was looked at last
	known   map[netip.Addr]links.Neighbor // nodes as they last were
	asked   map[netip.Addr]int            // how often nodes were looked for of which nothing is known
	away    map[netip.Addr]time.Time      // since when nodes only keep the place where they were
	counted map[netip.Addr]uint64
	floods  map[lb.Family]flood
	failed  loop.Failures
	sure    uint64 // the number that confirmed was called with last

	tunnels map[lb.Family]carrier

	packets atomic.Uint64
	dropped atomic.Uint64
	refused atomic.Uint64
	targets atomic.Int64
}

// New returns an Actor that does nothing before Begin is called.
func New(deps Deps) *Actor { return newActor(deps, deps.Kernel) }

func newActor(deps Deps, k kernel) *Actor {
	a := &Actor{log: deps.Log, kernel: k, families: deps.Families, ring: deps.Ring, limit: deps.Limit,
		parameters: deps.Parameters, warn: deps.Warn, noTunnel: deps.NoTunnel, confirmed: deps.Confirmed,
		all: map[netip.Addr]Origins{}, nodes: map[netip.Addr]int{}, changed: map[netip.Addr]Origins{},
		written: map[lb.Family]*table{}, sent: map[lb.Family][]netip.Addr{},
		known: map[netip.Addr]links.Neighbor{}, asked: map[netip.Addr]int{}, counted: map[netip.Addr]uint64{},
		away:   map[netip.Addr]time.Time{},
		floods: map[lb.Family]flood{}, tunnels: map[lb.Family]carrier{}, noted: map[string]int{},
		tightened: deps.Parameters == "" || !slices.Contains(deps.Families, lb.IPv4)}
	a.cluster.handing.known = !deps.Direct
	a.runner = loop.New(a.step, loop.Options{Gap: gap})
	return a
}

var _ actor.Updater[netip.Addr, *Origins] = (*Actor)(nil)

// Begin takes the Origins of all VIPs.
func (a *Actor) Begin(all map[netip.Addr]*Origins) {
	a.inbox.Begin(all)
	a.runner.Poke()
}

// Update takes the changed Origins of some VIPs; nil for an address that is not a VIP any more.
func (a *Actor) Update(changes map[netip.Addr]*Origins) {
	a.inbox.Update(changes)
	a.runner.Poke()
}

// SetGone takes the dead nodes, whose connections are lost. With cutOff set it may be this node
// that the others do not hear: then a node that does not answer stays a target. It never blocks.
func (a *Actor) SetGone(nodes []netip.Addr, cutOff bool) {
	now := losses{nodes, cutOff}
	a.mu.Lock()
	same := a.lost.equal(now)
	a.lost = now
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

// SetHanded takes the interfaces over which other nodes hand packets over, in order. A strict reverse path
// filter would drop those. It never blocks.
func (a *Actor) SetHanded(links []int) {
	a.mu.Lock()
	same := slices.Equal(a.handed, links)
	a.handed = links
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

func (a *Actor) handedOver() []int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.handed
}

// take takes in what has come, and reports whether there is anything to do.
func (a *Actor) take() bool {
	changes, begun := a.inbox.Take()
	a.begun = a.begun || begun
	for vip, now := range changes {
		before, had := a.all[vip]
		var next Origins
		if now != nil {
			if next = *now; !a.ring {
				next.Ring = nil
			}
			if had && next.equal(before) {
				continue // the speaker says all anew when nodes come or go
			}
		}
		if _, known := a.changed[vip]; !known {
			a.changed[vip] = before
		}
		a.mention(before, -1)
		if now == nil {
			delete(a.all, vip)
			continue
		}
		a.all[vip] = next
		a.mention(next, 1)
	}
	return a.begun
}

// mention counts the nodes of Origins that come (1) or go (-1).
func (a *Actor) mention(o Origins, n int) {
	for _, of := range [][]netip.Addr{o.Previous, o.Ring} {
		for _, node := range of {
			if a.nodes[node] += n; a.nodes[node] == 0 {
				delete(a.nodes, node)
			}
		}
	}
}

func (a *Actor) losses() losses {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lost
}

// Packets returns how many packets were moved.
func (a *Actor) Packets() uint64 { return a.packets.Load() }

// Dropped returns how many packets were above a limit.
func (a *Actor) Dropped() uint64 { return a.dropped.Load() }

// Targets returns to how many nodes packets would be moved.
func (a *Actor) Targets() int { return int(a.targets.Load()) }

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends, and leaves the rules in the kernel.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

func (a *Actor) step(context.Context) (time.Duration, error) {
	number := a.toConfirm() // before what came before it is taken
	if !a.take() {
		return 0, nil
	}
	if rest := a.period() - time.Since(a.looked); rest > 0 && !a.expecting() && a.adjust() {
		a.confirm(number)
		return rest, nil
	}
	err := a.apply()
	if err == nil {
		a.confirm(number)
	}
	a.failed.Log(a.log, "cannot rescue connections of addresses that have moved; trying again",
		"can rescue connections of addresses that have moved again", err)
	switch {
	case a.expecting():
		return lookSoon, err
	case len(a.all) == 0 && a.targets.Load() == 0 && a.tightened && !a.tunneling(): // there is nothing to look after
		return 0, err
	}
	return a.period(), err
}

// period is how long to wait between two looks.
func (a *Actor) period() time.Duration {
	if a.missing() {
		return lookFailed
	}
	return lookEvery
}

// apply makes the kernel hold what is wanted. A family that fails does not hold back the other.
func (a *Actor) apply() error {
	if !a.take() {
		return nil
	}
	if lost := a.losses(); !a.gone.equal(lost) {
		a.gone = lost
		clear(a.sent)
	}
	for vip := range a.changed {
		delete(a.sent, lb.FamilyOf(vip))
	}
	clear(a.changed)
	var errs []error
	for _, family := range a.families {
		if err := a.sync(family); err != nil {
			delete(a.written, family) // what it has is not what is wanted
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	a.countTargets()
	a.looked = time.Now()
	return errors.Join(errs...)
}

func (a *Actor) countTargets() {
	targets := 0
	for _, t := range a.written {
		targets += len(t.targets)
	}
	a.targets.Store(int64(targets))
}

// edit is what differs in the sets for one VIP.
type edit struct {
	vip      netip.Addr
	from, to []netip.Addr // the targets whose set it leaves and enters
	// leaves and joins are the targets that are on its ring no longer, and now.
	leaves, joins []netip.Addr
	// hops are how many nodes packets on its ring passed through, and do; 0 without a ring.
	hops struct{ from, to int }
}

// adjust is apply without a look at the kernel: it suffices where only Origins have changed since
// the last look. It reports whether that was so. Its cost follows what has changed.
func (a *Actor) adjust() bool {
	if !a.take() || !a.gone.equal(a.losses()) || !a.sameCluster() {
		return false
	}
	edits := map[lb.Family][]edit{}
	j := judge{a.known, a.gone, a.away}
	shapes := map[lb.Family]string{}
	for _, family := range a.families {
		t, written := a.written[family]
		if !written {
			return false
		}
		shapes[family] = t.shape()
	}
	for vip := range a.changed {
		for _, of := range [][]netip.Addr{a.all[vip].Previous, a.all[vip].Ring} {
			for _, node := range of {
				if _, known := a.known[node]; !known {
					return false
				}
			}
		}
	}
	if len(a.changed) <= manyChanges {
		a.change(j, edits)
	} else if !a.changeAll(j, edits) {
		return false
	}
	clear(a.changed)
	for _, family := range a.families {
		switch t := a.written[family]; {
		case t.shape() == shapes[family] && !t.crowded &&
			(len(edits[family]) == 0 || a.kernel.edit(family, edits[family]) == nil):
		default:
			delete(a.written, family) // it will be read
		}
	}
	a.countTargets()
	return len(a.written) == len(a.families)
}

// manyChanges is of how many VIPs on the tables are made anew: to change one moves what is behind
// it in sorted lists of all.
const manyChanges = 256

// changeAll makes the tables anew for the targets that there are, and adds what differs. It reports
// whether only sets of VIPs differ; else the tables are as before.
func (a *Actor) changeAll(j judge, edits map[lb.Family][]edit) bool {
	tables := map[lb.Family]*table{}
	for _, family := range a.families {
		was := a.written[family]
		next := choose(family, a.all, j, was.nodes())
		if !slices.Equal(next.peers, was.peers) {
			return false
		}
		next.limit, next.carried, next.segment = was.limit, was.carried, was.segment
		tables[family], edits[family] = next, was.edits(next)
	}
	maps.Copy(a.written, tables)
	return true
}

// change takes the changed Origins into the tables, and adds what differs.
func (a *Actor) change(j judge, edits map[lb.Family][]edit) {
	for vip, before := range a.changed {
		family := lb.FamilyOf(vip)
		t := a.written[family]
		if t == nil {
			continue // the node has no such family
		}
		e := edit{vip: vip}
		aimed, joined := t.of(vip), having(t.onRing, vip)
		e.hops.from = t.hops[vip]
		t.remove(vip, before, j)
		if now, is := a.all[vip]; is {
			t.add(vip, now, j)
			if t.hops[vip] > 0 {
				t.join(vip, now)
			}
		}
		on := having(t.onRing, vip)
		e.leaves, e.joins = without(joined, on), without(on, joined)
		aims := t.of(vip)
		e.from, e.to = without(aimed, aims), without(aims, aimed)
		e.hops.to = t.hops[vip]
		edits[family] = append(edits[family], e)
	}
}

// without returns the elements of all that are not in some.
func without(all, some []netip.Addr) (left []netip.Addr) {
	for _, addr := range all {
		if !slices.Contains(some, addr) {
			left = append(left, addr)
		}
	}
	return left
}

// expecting reports whether a node that was just asked for has not answered yet.
func (a *Actor) expecting() bool {
	for _, n := range a.asked {
		if n < soonLooks {
			return true
		}
	}
	return false
}

// awaits reports whether a node that is not known to be dead was just asked for, and has not answered yet.
func (a *Actor) awaits(node netip.Addr) bool {
	n, asked := a.asked[node]
	return asked && n < soonLooks && !slices.Contains(a.gone.nodes, node)
}

// sync does what apply does for one family. If a write fails, it leaves the table as it is: without
// the table, the kernel would forget which connections were moved.
func (a *Actor) sync(family lb.Family) error {
	want, known := a.written[family]
	have, err := a.kernel.load(family, !known)
	if err != nil {
		return err
	}
	a.count(have)
	a.watchFlood(family, have)
	sent := slices.SortedFunc(maps.Keys(have.sent), netip.Addr.Compare)
	neighbors, err := a.look(family, sent)
	if err != nil {
		return err
	}
	before, unchanged := a.sent[family]
	unchanged = unchanged && known && slices.Equal(before, sent)
	for node, n := range neighbors {
		if a.known[node] != n && (n.Found || n.Failed || n.Routed) {
			a.known[node], unchanged = n, false
		}
	}
	if !unchanged {
		want = choose(family, a.all, judge{neighbors, a.gone, a.away}, sent)
		want.limit = a.limit
	}
	if family == lb.IPv4 {
		a.checkFilters(neighbors)
	}
	if !known && slices.ContainsFunc(sent, a.awaits) {
		return nil // unknown is not absent: what a predecessor has written stays until its nodes can have answered
	}
	a.sent[family] = sent
	if same(family, have, want) && (unchanged || a.holds(family, have, want)) {
		a.written[family] = want
		return nil
	}
	delete(a.written, family)
	if have, err = a.kernel.load(family, true); err != nil {
		return err
	}
	if err := a.kernel.write(family, want, have); err != nil {
		return err
	}
	a.written[family] = want
	delete(a.sent, family)
	a.log.Debug("wrote where connections may be known", "family", family, "nodes", len(want.targets))
	return nil
}

// holds reports whether the sets hold what is wanted: as they were last written, or else as they
// were read.
func (a *Actor) holds(family lb.Family, have held, want *table) bool {
	if before, known := a.written[family]; known {
		return before.equal(want)
	}
	if have.odd() || !maps.EqualFunc(have.rings, want.rings(), slices.Equal) {
		return false
	}
	have.table.limit = want.limit // the rules show it
	have.table.carried, have.table.segment = want.carried, want.segment
	return have.table.equal(want)
}

// look finds out which nodes of a family are reachable: those that Origins name, and those that
// packets were moved to.
func (a *Actor) look(family lb.Family, sent []netip.Addr) (map[netip.Addr]links.Neighbor, error) {
	nodes := slices.Clone(sent)
	for node := range a.nodes {
		if lb.FamilyOf(node) == family {
			nodes = append(nodes, node)
		}
	}
	if a.exchanges(family) {
		nodes = append(nodes, allOf(family, a.nodesNow().handing.far)...)
	}
	slices.SortFunc(nodes, netip.Addr.Compare)
	nodes = slices.Compact(nodes)
	found, err := a.kernel.neighbors(family, nodes)
	if err != nil {
		return nil, err
	}
	a.carry(family, found)
	for _, node := range nodes {
		last, before := a.known[node]
		_, wasAway := a.away[node]
		isAway := a.keepsPlace(family, node, found[node])
		if isAway != wasAway {
			delete(a.sent, family) // rules name its link while it is away
		}
		switch n := found[node]; {
		case isAway, wasAway && n.Failed: // no answer could come while the link was away
			found[node] = last
			delete(a.asked, node)
		case n.Failed:
			last.Failed = true
			found[node] = last // where it was
			delete(a.asked, node)
		case n.Found, n.Routed:
			delete(a.asked, node)
		case before:
			found[node] = last // the kernel forgets a neighbor that it has not needed for long
		default:
			a.asked[node]++
		}
	}
	forgotten := func(node netip.Addr) bool { return lb.FamilyOf(node) == family && !slices.Contains(nodes, node) }
	maps.DeleteFunc(a.asked, func(node netip.Addr, _ int) bool { return forgotten(node) })
	maps.DeleteFunc(a.away, func(node netip.Addr, _ time.Time) bool { return forgotten(node) })
	maps.DeleteFunc(a.known, func(node netip.Addr, _ links.Neighbor) bool { return forgotten(node) })
	maps.DeleteFunc(a.counted, func(node netip.Addr, _ uint64) bool { return forgotten(node) })
	return found, nil
}

// keepsPlace reports whether a node is to stay where it was last: on a link over which there is no way now, as the
// default route answers for a link that is away; or behind a tunnel that could not be looked at. Without its place it
// would be no target, and what is remembered of it would be lost. Where the way over routers leads out of that link, a
// copy would go to the router, and not nowhere: there it keeps none.
func (a *Actor) keepsPlace(family lb.Family, node netip.Addr, n links.Neighbor) bool {
	last, most := a.known[node], linkAway
	if last.Routed {
		most = tunnelAway
	}
	_, was := a.away[node]
	if was && n == (links.Neighbor{}) {
		return true // there is no way at all for a moment, or it has not answered yet
	}
	if !n.Routed || n.Found || !last.Found || n.Link == last.Link || last.Routed && a.tunnels[family].failed == "" {
		delete(a.away, node)
		return false
	}
	if !was {
		a.away[node] = time.Now()
	}
	if time.Since(a.away[node]) < most {
		return true
	}
	delete(a.away, node)
	return false
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
func same(family lb.Family, have held, want *table) bool {
	if len(want.targets) == 0 {
		return !have.exists
	}
	h := headerOf(family)
	return slices.Equal(have.rules, nft.UserData(h.strayRules(want))) &&
		slices.Equal(have.limits, h.limitsOf(want.limit)) &&
		slices.Equal(have.errors, nft.UserData(h.errorRules(want))) &&
		slices.Equal(have.recall, nft.UserData(h.recallRules(want))) &&
		slices.Equal(have.offRing, nft.UserData(h.offRingRules(want))) &&
		slices.Equal(have.segments, nft.UserData(h.segmentRules(want))) &&
		maps.EqualFunc(have.sent, want.targets, func(uint64, []netip.Addr) bool { return true }) &&
		!slices.ContainsFunc(want.nodes(), func(node netip.Addr) bool {
			return !slices.Equal(have.moving[node], h.moving(want, node))
		})
}
