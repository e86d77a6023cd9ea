// Package l2 is the actor that answers ARP and NDP for VIPs and announces them when this node takes
// over.
//
// No interface needs to carry a VIP: the kernel does not own it and so never answers by itself, and
// answering ends at once when a VIP is taken out of what is desired.
package l2

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// burst says when after taking over a VIP it is announced. A Linux host heeds the first one at
// once, even inside its lock time; the others are for packets lost and for devices that were busy.
// The last two come when a node that was cut off and still answered has yielded, which it does
// without a word.
var burst = []time.Duration{0, 100 * time.Millisecond, 300 * time.Millisecond, time.Second, 2 * time.Second,
	5 * time.Second, 10 * time.Second}

// Waits between attempts to open or to send on an interface that fails.
const (
	minRetry = 100 * time.Millisecond
	maxRetry = 5 * time.Second
)

// Each look goes through all VIPs. While announcements of many are due one after the other, or other
// devices send all the time, there is one look in each interval. What is desired does not wait for it.
const interval = 80 * time.Millisecond

// Desired is all that shall be answered.
type Desired struct {
	// Interfaces are those that the node has.
	Interfaces []lb.Interface
	Answers    map[netip.Addr]Answer
	// Probes names the interfaces on which it is to be found out whether a VIP that is not answered
	// for has another holder.
	Probes map[netip.Addr][]string
	// Ahead are the addresses that Services get next, and how it is found out that nobody uses them.
	Ahead map[netip.Addr]plan.Scout
	// Ours says whose the MAC addresses are of all nodes that run a speaker. A device with another one
	// is a conflicting host.
	Ours map[string]string
	// Mute has the actor answer and announce nothing for now, whatever else is desired.
	Mute bool
	// Wakes is how often the process has woken up, as far as this was decided with the knowledge. The
	// actor sends nothing while Options.Wakes says something else.
	Wakes uint64
}

// Answer says where a VIP is answered for.
type Answer struct {
	On []string // names of interfaces
	// Round makes the VIP be announced again when it changes.
	Round int
	// Owned is set where this node answers for good, and not only until another does: if another node
	// of ours announces the VIP, it is announced again. Without it, it is then announced no more.
	Owned bool
	// Held has the VIP answered for and not announced for now, unless it is already.
	Held bool
}

// Stats counts what passes. Its methods are called from several goroutines and must not block.
type Stats interface {
	Request(iface string, vip netip.Addr)    // somebody asked for a VIP that this node answers for
	Reply(iface string, vip netip.Addr)      // and was answered
	Gratuitous(iface string, vip netip.Addr) // an unasked announcement went out
	Withdrawn(iface string, vip netip.Addr)  // the VIP is answered for no longer
	Dropped(iface string, why Drop, n int)   // n packets were left without an answer
	Probe(iface string, ahead bool)          // a question went out whether a device uses an address
}

// Options of an Actor.
type Options struct {
	Self string // this node's name
	Log  *slog.Logger
	// Listen opens a socket for ARP on an interface; nil opens a packet socket.
	Listen func(lb.Interface) (net.PacketConn, error)
	// ListenNDP is the same for NDP.
	ListenNDP func(lb.Interface) (NDPSocket, error)
	// Repeat is how often a VIP is announced again while it stays, for switches that forget where a
	// quiet address is; 0 for never.
	Repeat time.Duration
	// AheadRate is how many questions a second go out at most for addresses that no Service has yet; 0
	// for none.
	AheadRate float64
	Stats     Stats
	// Wakes returns how often the process has woken up after it was frozen; nil for never.
	Wakes func() uint64
	// Changed is called after Outcome differs, from the actor's goroutine.
	Changed func()
}

// Outcome is what is really so.
type Outcome struct {
	// Answering are the interfaces on which each VIP is answered for and was announced at least once,
	// sorted.
	Answering map[netip.Addr][]string
	// Problems says what is wrong with an interface.
	Problems map[string]string
	// Probed are those of the VIPs to be probed whose probing has come to an end once on each of their
	// interfaces.
	Probed map[netip.Addr]bool
	// ConflictingHosts are the devices that use a VIP which is answered for or probed, or was a moment
	// ago, as they were seen lately; the one that was seen first comes first.
	ConflictingHosts map[netip.Addr][]plan.ConflictingHost
	// Rivals are the other nodes of ours that were the last to announce VIPs which this one answers
	// for, a moment ago.
	Rivals map[netip.Addr]string
	// Scouted names for each address of Desired.Ahead, by interface, the node of ours that has lately
	// asked for it on that LAN; an address that a device uses is left out. What another node than this
	// one has found out it has to say itself.
	Scouted map[netip.Addr]map[string]string
	// Version counts the outcomes that differ; 0 is none yet.
	Version uint64
}

// equal reports whether two outcomes are equal but for what is answered for and scouted.
func (o Outcome) equal(other Outcome) bool {
	return maps.Equal(o.Problems, other.Problems) &&
		maps.Equal(o.Probed, other.Probed) && maps.Equal(o.Rivals, other.Rivals) &&
		maps.EqualFunc(o.ConflictingHosts, other.ConflictingHosts, slices.Equal)
}

// Actor keeps responders and announcements as desired.
type Actor struct {
	opts   Options
	runner *loop.Runner
	pulses loop.Pulses  // of the goroutines that read
	serve  func(func()) // starts a goroutine that Run waits for

	mu      sync.Mutex
	desired Desired
	wanted  map[place]*work // what is desired, by place
	sets    uint64          // how often something was desired
	outcome Outcome
	broken  map[responder]error // those whose serve has ended
	seen    sightings
	rivals  rivals
	heard   rivals // the nodes of ours that were heard to ask for addresses that no Service has

	awake atomic.Pointer[wakefulness] // what was last applied
	// Only apply touches what follows.
	ports map[place]*port
	// published says of the last outcome how many ports there were, whether no other device was seen, and how
	// many nodes Scouted names.
	published struct {
		ports   int
		quiet   bool
		scouted int
	}
	reclaims allowance
	ahead    allowance
	against  bounds
}

// place is where VIPs of one family are answered for.
type place struct {
	iface  string
	family lb.Family
}

func (p place) compare(other place) int {
	return cmp.Or(strings.Compare(p.iface, other.iface), strings.Compare(string(p.family), string(other.family)))
}

var _ actor.Setter[Desired] = (*Actor)(nil)

// New returns an Actor that answers for nothing.
func New(opts Options) *Actor {
	if opts.Listen == nil {
		opts.Listen = listenARP
	}
	if opts.ListenNDP == nil {
		opts.ListenNDP = listenNDP
	}
	if opts.Wakes == nil {
		opts.Wakes = func() uint64 { return 0 }
	}
	a := &Actor{opts: opts, ports: map[place]*port{}, broken: map[responder]error{}, seen: sightings{},
		rivals: rivals{}, serve: func(f func()) { go f() },
		reclaims: allowance{rate: reclaimRate, most: reclaimsKept}, against: newBounds(),
		ahead: allowance{rate: opts.AheadRate, most: probeCount}}
	a.awake.Store(&wakefulness{})
	often := loop.Bulk()
	often.Every, often.Burst, often.Regain = interval, 25, interval
	a.runner = loop.New(func(context.Context) (time.Duration, error) { return a.apply(time.Now()), nil }, often)
	return a
}

// Set replaces what shall be answered. The actor keeps d.
func (a *Actor) Set(d Desired) {
	wanted := byPlace(d)
	a.mu.Lock()
	a.desired, a.wanted = d, wanted
	a.sets++
	a.mu.Unlock()
	a.runner.PokeNow()
}

// Outcome returns what is really so. Do not change what is returned.
func (a *Actor) Outcome() Outcome {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.outcome
}

// Busy returns for how long the actor, or one of its readers, has been at one thing.
func (a *Actor) Busy() time.Duration { return max(a.runner.Busy(), a.pulses.Busy()) }

// Run answers until ctx ends; then nothing is answered any more.
func (a *Actor) Run(ctx context.Context) error {
	var serving sync.WaitGroup
	a.serve = func(f func()) { serving.Go(f) }
	err := a.runner.Run(ctx)
	for _, p := range a.ports {
		p.shut()
	}
	clear(a.ports)
	serving.Wait()
	a.publish(time.Now())
	return err
}

// apply makes what is there equal to what is desired, as far as it is possible now, sends what is
// due of the bursts, and returns when there is more to do; 0 means not before something changes.
func (a *Actor) apply(now time.Time) time.Duration {
	a.mu.Lock()
	desired, wanted, broken, sets := a.desired, a.wanted, a.broken, a.sets
	a.broken = map[responder]error{}
	a.seen.forget(now, desired.Ours)
	seen := a.seen.copy()
	rivals, heard := a.rivals, a.heard
	a.rivals, a.heard = nil, nil // and the next one has the actor woken anew
	a.mu.Unlock()
	if a.awake.Load().wakes != desired.Wakes {
		for _, p := range a.ports {
			clear(p.ahead) // nobody has listened for a while
			p.scoutedFor = 0
		}
	}
	for at, p := range a.ports {
		if err, ok := broken[p.responder]; ok && p.responder != nil {
			a.opts.Log.Warn("cannot answer on an interface", "interface", at.iface, "error", err)
			p.fail(now, err)
		}
	}
	for at, p := range a.ports {
		i, ok := find(desired.Interfaces, at.iface)
		// A port is tied to the interface's index and MAC: another interface of that name, or another
		// MAC, is a new one. What is seen of it depends on whether it has a master.
		if !ok || wanted[at].empty() || i.Index != p.i.Index || i.MAC.String() != p.i.MAC.String() ||
			i.Enslaved != p.i.Enslaved {
			p.shut()
			delete(a.ports, at)
		} else if i.Port != p.i.Port {
			p.i.Port = i.Port
			p.repeat(now)
		}
	}
	for at, p := range a.ports {
		if p.responder != nil && p.heeds != sets {
			p.withdraw(wanted[at])
			p.heeds = sets
		}
	}
	a.awake.Store(&wakefulness{mute: desired.Mute, wakes: desired.Wakes}) // what is not ours any more is withdrawn
	next := seen.end()
	for _, at := range slices.SortedFunc(maps.Keys(wanted), place.compare) {
		i, ok := find(desired.Interfaces, at.iface)
		if !ok {
			continue // the plan will follow
		}
		if a.ports[at] == nil {
			a.ports[at] = &port{i: i, family: at.family, vips: map[netip.Addr]*announcement{}, awake: a.isAwake,
				probes: map[netip.Addr]*probing{}, ahead: map[netip.Addr]*scouting{}, stat: a.opts.Stats,
				backoff: loop.Backoff{Min: minRetry, Max: maxRetry}}
		}
		a.ports[at].claimed(rivals[at], wanted[at], &a.against.rivals, now)
		next = earlier(next, a.applyPort(a.ports[at], wanted[at], noticed{seen[at], heard[at]}, now))
	}
	a.publish(now)
	if next.IsZero() {
		return 0
	}
	return max(next.Sub(now), time.Millisecond)
}

// noticed is what was noticed on one interface: devices that use addresses, and which nodes of ours
// ask for addresses that no Service has.
type noticed struct {
	seen  seenOn
	heard map[netip.Addr]string
}

// applyPort brings one interface up to date and returns when it is to be looked at again; the zero
// time means never.
func (a *Actor) applyPort(p *port, w *work, noticed noticed, now time.Time) time.Time {
	p.calm = false
	if now.Before(p.retryAt) {
		return p.retryAt
	}
	if p.responder == nil {
		opened, err := a.open(p)
		if err != nil {
			a.opts.Log.Warn("cannot answer on an interface", "interface", p.i.Name, "error", err)
			p.fail(now, err)
			return p.retryAt
		}
		p.responder = opened
		a.serve(func() {
			err := opened.serve()
			a.mu.Lock()
			a.broken[opened] = err
			a.mu.Unlock()
			a.runner.Poke()
		})
		p.withdraw(w)
	}
	if !a.isAwake() {
		return time.Time{} // what is desired is about to change
	}
	p.reclaim(w, &a.reclaims, now)
	next, err := p.announce(w, now, a.opts.Repeat)
	next = earlier(next, p.rivalDue(now))
	if err == nil {
		err = p.defend(w, noticed.seen, &a.against.defenses, now)
	}
	if err == nil {
		var due time.Time
		due, err = p.probe(w, noticed.seen, &a.against.questions, now)
		next = earlier(next, due)
	}
	if err == nil && a.opts.AheadRate > 0 {
		var due time.Time
		due, err = p.scout(w, noticed, &a.ahead, now)
		next = earlier(next, due)
	}
	if err != nil {
		a.opts.Log.Warn("cannot announce on an interface", "interface", p.i.Name, "error", err)
		p.delay(now, err)
		return p.retryAt
	}
	p.problem, p.retryAt = nil, time.Time{}
	p.backoff.Reset()
	return next
}

func (a *Actor) open(p *port) (responder, error) {
	given := around{stat: a.opts.Stats, seen: a.seenOn(p), awake: a.isAwake, pulses: &a.pulses}
	if p.family == lb.IPv6 {
		return newNDPResponder(p.i, a.opts.ListenNDP, given)
	}
	return newARPResponder(p.i, a.opts.Listen, given)
}

// publish makes the outcome known, if it differs.
func (a *Actor) publish(now time.Time) {
	before := a.Outcome()
	outcome := Outcome{Problems: map[string]string{}, Rivals: map[netip.Addr]string{}, Scouted: before.Scouted,
		Version: before.Version}
	for _, at := range slices.SortedFunc(maps.Keys(a.ports), place.compare) {
		p := a.ports[at]
		if p.problem != nil {
			outcome.Problems[at.iface] = p.problem.Error()
		}
		for vip, v := range p.vips {
			if rival := v.rival.current(now); rival != "" {
				outcome.Rivals[vip] = rival
			}
		}
	}
	var answers, found bool
	outcome.Answering, answers = a.answering(before.Answering)
	a.mu.Lock()
	outcome.Probed, outcome.ConflictingHosts = a.probed(a.desired.Probes), a.seen.conflicts()
	if !a.calm() {
		outcome.Scouted, found = a.scouted(now)
	}
	differs := answers || found || !before.equal(outcome)
	if differs {
		outcome.Version++
	}
	a.outcome = outcome
	a.mu.Unlock()
	if differs && a.opts.Changed != nil {
		a.opts.Changed()
	}
}

// answering returns on which interfaces each VIP is answered for, given what was said before, and whether
// that differs. Where nothing does, it is the same map.
func (a *Actor) answering(before map[netip.Addr][]string) (now map[netip.Addr][]string, differs bool) {
	count, was := 0, 0
	for at, p := range a.ports {
		count += len(p.vips)
		for vip := range p.vips {
			differs = differs || !slices.Contains(before[vip], at.iface)
		}
	}
	for _, names := range before {
		was += len(names)
	}
	if !differs && count == was {
		return before, false
	}
	now = make(map[netip.Addr][]string, len(before))
	for _, at := range slices.SortedFunc(maps.Keys(a.ports), place.compare) {
		for vip := range a.ports[at].vips {
			if was := before[vip]; len(was) == 1 && was[0] == at.iface && now[vip] == nil {
				now[vip] = was[:1:1] // most are answered for on one interface
			} else {
				now[vip] = append(now[vip], at.iface)
			}
		}
	}
	return now, true
}

func find(interfaces []lb.Interface, name string) (lb.Interface, bool) {
	i := slices.IndexFunc(interfaces, func(i lb.Interface) bool { return i.Name == name })
	if i < 0 {
		return lb.Interface{}, false
	}
	return interfaces[i], true
}
