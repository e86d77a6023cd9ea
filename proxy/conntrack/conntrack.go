// Package conntrack cuts flows that still go to backends which are gone. UDP has no end of a
// connection that would do it: a client that keeps its port, such as a DNS resolver, would go on
// hitting a dead address. An association of SCTP lasts for days. And a ping that goes on would be
// answered, or not, as when it began. TCP is left alone: its ends notice.
package conntrack

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const (
	// gap is the least time between two passes.
	gap = 500 * time.Millisecond
	// maxQuestions is how many questions are worth as many walks of the kernel through its table.
	// Instead of more, all flows are listed.
	maxQuestions = 8
	// After a pass the actor rests for so many times as long as it took, within a limit. Flows to
	// backends that are gone are urgent: their client hits a dead address. At a frontend that is new,
	// there are only flows of clients that were there before it, and each Service brings one.
	urgentRest, maxUrgentRest = 4, 2 * time.Second
	freshRest, maxFreshRest   = 1000, 5 * time.Second
)

// Flow is one flow: where the client sent, and who answers. Those of ICMP have no ports.
type Flow struct {
	Protocol uint8 // IANA protocol number
	To, From netip.AddrPort
}

// About says which flows are in question: those of a protocol to To, of which From answers, or, if
// that is not set, anybody. The zero value stands for all.
type About Flow

func (q About) covers(f Flow) bool {
	return q == About{} || q.Protocol == f.Protocol && q.To == f.To && (q.From == f.From || !q.From.IsValid())
}

// Table is the kernel's table of flows.
type Table interface {
	// Delete deletes the flows in question for which gone is true, which it is for all of them unless
	// all flows are in question. It returns how many, as far as the kernel tells.
	Delete(about About, gone func(Flow) bool) (int, error)
}

// Deps are what an Actor needs.
type Deps struct {
	Log   *slog.Logger
	Table Table
	// Local returns the node's own addresses, where node ports are reached.
	Local func() ([]netip.Addr, error)
	// Deleted is told how many flows a pass has cut; may be nil.
	Deleted func(int)
}

// Actor cuts flows.
type Actor struct {
	deps   Deps
	runner *loop.Runner

	mu sync.Mutex
	// applied are the frontends of each Service, by are the Services of each frontend with the
	// addresses that may answer.
	// The addresses are sorted, as those of plan.Port.Serving are.
	applied map[lb.Key]map[destination][]netip.AddrPort
	by      map[destination]map[lb.Key][]netip.AddrPort
	// suspect are the frontends to which there may be flows that have to go, since the last pass that
	// succeeded, by who answers them; fresh are those of them that are new.
	suspect, fresh doubts
	// cutting is set during a pass.
	cutting bool
	// begun is set once what a predecessor may have left is known to be among suspect.
	begun bool
	// relays are where the node's relays answer flows of relayed frontends; nil while that is unknown.
	relays []netip.AddrPort

	// The rest belongs to the goroutine that makes passes: the last one, and the last one about
	// frontends that are new. What is urgent does not put those off.
	last, lastFresh pass
	failures        loop.Failures
}

// pass is when a pass ended, and how long it took.
type pass struct {
	ended time.Time
	took  time.Duration
}

// rest returns for how long there shall be no other one: so many times as long as it took, up to
// most.
func (p pass) rest(times, most time.Duration) time.Duration {
	return min(times*p.took, most) - time.Since(p.ended)
}

// destination is a frontend whose flows are cut; without an address it is a node port. One of ICMP
// stands for the pings to an address: it is there, with itself as who answers, while the node
// answers them.
type destination struct {
	family   lb.Family
	protocol uint8
	at       netip.AddrPort
}

func (f destination) isPing() bool {
	return f.protocol == unix.IPPROTO_ICMP || f.protocol == unix.IPPROTO_ICMPV6
}

func ping(family lb.Family, addr netip.Addr) destination {
	if family == lb.IPv6 {
		return destination{family, unix.IPPROTO_ICMPV6, netip.AddrPortFrom(addr, 0)}
	}
	return destination{family, unix.IPPROTO_ICMP, netip.AddrPortFrom(addr, 0)}
}

// answerers are the backends that answer flows. The zero address is for a flow without one: its
// packets went on as they came.
type answerers map[netip.AddrPort]bool

// doubts are frontends to which there may be flows that have to go.
type doubts map[destination]answerers

// anybody stands for whoever it is, and aRelay among those who may answer for a relay of this node.
var (
	anybody = netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	aRelay  = netip.AddrPortFrom(netip.IPv6Unspecified(), 1)
)

var _ actor.Updater[lb.Key, plan.Service] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	a := &Actor{
		deps: deps, applied: map[lb.Key]map[destination][]netip.AddrPort{}, by: map[destination]map[lb.Key][]netip.AddrPort{},
		suspect: doubts{}, fresh: doubts{},
	}
	a.runner = loop.New(func(context.Context) (time.Duration, error) { return a.step() }, loop.Options{Gap: gap})
	return a
}

// Begin says what the kernel is confirmed to hold for all Services. Until then, a predecessor's
// flows are looked for at every frontend that Update names; from then on a frontend that is new has
// none. It never blocks.
func (a *Actor) Begin(all map[lb.Key]plan.Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.update(all)
	a.begun = true
}

// Update says what the kernel is confirmed to hold now for the Services that it names; a plan
// without ports stands for nothing. It never blocks.
func (a *Actor) Update(changes map[lb.Key]plan.Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.update(changes)
}

func (a *Actor) update(changes map[lb.Key]plan.Service) {
	for key, now := range changes {
		before, after := a.applied[key], destinations(now)
		lists := pairs{}
		for f, allowed := range before {
			gone := lists.missing(allowed, after[f])
			if len(gone) > maxQuestions {
				gone = []netip.AddrPort{anybody} // that asks for all flows, too
			}
			for _, by := range gone {
				if by == aRelay {
					a.suspect.doubtRelays(f, a.relays)
				} else {
					a.suspect.doubt(f, by)
				}
			}
			delete(a.by[f], key)
			if len(a.by[f]) == 0 {
				delete(a.by, f)
			}
		}
		for f, allowed := range after {
			switch {
			case len(before[f]) > 0:
			case !a.begun:
				a.suspect.doubt(f, anybody)
			default: // packets may have gone out as they were, and would go on doing so
				a.fresh.doubt(f, netip.AddrPort{})
			}
			if a.by[f] == nil {
				a.by[f] = map[lb.Key][]netip.AddrPort{}
			}
			a.by[f][key] = allowed
		}
		if len(after) == 0 {
			delete(a.applied, key)
		} else {
			a.applied[key] = after
		}
	}
	if len(a.suspect)+len(a.fresh) > 0 {
		a.runner.Poke()
	}
}

// SetRelays says where the node's relays answer flows of relayed frontends. As long as that is not known, no
// flow is cut that an address of the node answers there. It never blocks.
func (a *Actor) SetRelays(all []netip.AddrPort) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.relays
	a.relays = append([]netip.AddrPort{}, all...)
	slices.SortFunc(a.relays, netip.AddrPort.Compare)
	gone := missing(before, a.relays)
	if before != nil && len(gone) == 0 {
		return
	}
	for f, services := range a.by {
		for _, allowed := range services {
			if contains(allowed, aRelay) {
				a.suspect.doubtRelays(f, gone)
			}
		}
	}
	if len(a.suspect) > 0 {
		a.runner.Poke()
	}
}

// pairs remember which answerers of one list are not in another: the frontends of a port share both.
type pairs map[pair][]netip.AddrPort

// pair are two lists that are not empty, by their first elements and their lengths.
type pair struct {
	before, after *netip.AddrPort
	n, m          int
}

func (p pairs) missing(before, after []netip.AddrPort) []netip.AddrPort {
	if len(before) == 0 || len(after) == 0 {
		return before
	}
	at := pair{&before[0], &after[0], len(before), len(after)}
	gone, known := p[at]
	if !known {
		gone = missing(before, after)
		p[at] = gone
	}
	return gone
}

// missing returns what of before is not in after. Both are sorted.
func missing(before, after []netip.AddrPort) (gone []netip.AddrPort) {
	for _, by := range before {
		for len(after) > 0 && after[0].Compare(by) < 0 {
			after = after[1:]
		}
		if len(after) == 0 || after[0] != by {
			gone = append(gone, by)
		}
	}
	return gone
}

// contains reports whether a sorted list has the answerer.
func contains(sorted []netip.AddrPort, by netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(sorted, by, netip.AddrPort.Compare)
	return found
}

// doubt notes that flows to f may have to go that by answers. Of pings it is not known who does. More answerers than
// there are questions are anybody: a Service may have thousands of frontends, each with thousands of them.
func (d doubts) doubt(f destination, by netip.AddrPort) {
	if f.isPing() {
		by = anybody
	}
	switch all := d[f]; {
	case all == nil:
		d[f] = answerers{by: true}
	case all[anybody] || all[by]:
	case by == anybody || len(all) >= maxQuestions:
		d[f] = answerers{anybody: true}
	default:
		all[by] = true
	}
}

// doubtRelays notes that flows may have to go that relays answer, which are unknown if there are none.
func (d doubts) doubtRelays(f destination, relays []netip.AddrPort) {
	if len(relays) == 0 {
		d.doubt(f, anybody)
	}
	for _, by := range relays {
		if lb.FamilyOf(by.Addr()) == f.family {
			d.doubt(f, by)
		}
	}
}

func (d doubts) add(other doubts) {
	for f, answerers := range other {
		for by := range answerers {
			d.doubt(f, by)
		}
	}
}

// Settled reports whether all flows that have to go are cut, but for those to frontends that are new.
func (a *Actor) Settled() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.suspect) == 0 && !a.cutting
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

// destinations returns the frontends of a plan whose flows are cut, each with the addresses that
// may answer.
func destinations(s plan.Service) map[destination][]netip.AddrPort {
	all := map[destination][]netip.AddrPort{}
	for _, p := range s.Ports {
		var orRelay []netip.AddrPort // the frontends of a port share it
		for _, f := range p.Frontends {
			switch p.Protocol {
			case lb.UDP:
				allowed := p.Serving
				if s.IsRelayed(p, f) {
					if orRelay == nil {
						at, _ := slices.BinarySearchFunc(p.Serving, aRelay, netip.AddrPort.Compare)
						orRelay = slices.Insert(slices.Clone(p.Serving), at, aRelay)
					}
					allowed = orRelay
				}
				all[destination{p.Family, unix.IPPROTO_UDP, netip.AddrPortFrom(f.Addr, f.Port)}] = allowed
			case lb.SCTP:
				all[destination{p.Family, unix.IPPROTO_SCTP, netip.AddrPortFrom(f.Addr, f.Port)}] = p.Serving
			}
			if f.AnswersPing() {
				at := ping(p.Family, f.Addr)
				all[at] = []netip.AddrPort{at.at}
			}
		}
	}
	return all
}

// step makes a pass about what is urgent, and about what is not once enough time has passed. It
// returns how long the rest has to wait.
func (a *Actor) step() (again time.Duration, err error) {
	if urgent := a.last.rest(urgentRest, maxUrgentRest); urgent > 0 {
		return urgent, nil
	}
	fresh := a.lastFresh.rest(freshRest, maxFreshRest)
	if err := a.pass(fresh <= 0); err != nil {
		return 0, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.fresh) > 0 {
		return max(fresh, gap), nil
	}
	return 0, nil
}

// apply makes one pass about all that there is.
func (a *Actor) apply() error { return a.pass(true) }

// pass cuts the flows that have to go. Without all, those to frontends that are new wait.
func (a *Actor) pass(all bool) error {
	a.mu.Lock()
	suspect := a.suspect
	a.suspect = doubts{}
	all = all && len(a.fresh) > 0
	if all {
		suspect.add(a.fresh)
		a.fresh = doubts{}
	}
	allowed := make(map[destination][]netip.AddrPort, len(suspect))
	for f := range suspect {
		allowed[f] = nil
		for _, by := range a.by[f] { // another Service may have taken over what one has left
			if allowed[f] == nil {
				allowed[f] = by
				continue
			}
			allowed[f] = slices.Concat(allowed[f], by)
			slices.SortFunc(allowed[f], netip.AddrPort.Compare)
		}
		if a.relays != nil && contains(allowed[f], aRelay) {
			allowed[f] = slices.DeleteFunc(slices.Concat(allowed[f], a.relays),
				func(by netip.AddrPort) bool { return by == aRelay })
			slices.SortFunc(allowed[f], netip.AddrPort.Compare)
		}
	}
	a.cutting = len(suspect) > 0
	a.mu.Unlock()
	if len(suspect) == 0 {
		return nil
	}
	started := time.Now()
	err := a.cut(suspect, allowed)
	a.last = pass{time.Now(), time.Since(started)}
	if all {
		a.lastFresh = a.last
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cutting = false; err != nil {
		a.suspect.add(suspect)
	}
	a.failures.Log(a.deps.Log, "cannot cut flows to backends that are gone; trying again",
		"flows to backends that are gone are cut again", err)
	return err
}

// cut deletes the flows to frontends in allowed whose answerers are not allowed.
func (a *Actor) cut(suspect doubts, allowed map[destination][]netip.AddrPort) error {
	local := map[netip.Addr]bool{}
	addrs, err := a.deps.Local()
	if err != nil {
		return fmt.Errorf("list the node's addresses: %w", err)
	}
	for _, addr := range addrs {
		local[addr] = true
	}
	var errs []error
	total := 0
	for _, about := range questions(suspect, allowed, local) {
		n, err := a.deps.Table.Delete(about, func(f Flow) bool { return gone(f, allowed, local) })
		if err != nil {
			errs = append(errs, err)
		}
		total += n
	}
	if total > 0 {
		a.deps.Log.Info("cut flows to backends that are gone", "flows", total)
		if a.deps.Deleted != nil {
			a.deps.Deleted(total)
		}
	}
	return errors.Join(errs...)
}

// gone reports whether a flow has to go: to a frontend in allowed, and answered by somebody who may
// not.
func gone(f Flow, allowed map[destination][]netip.AddrPort, local map[netip.Addr]bool) bool {
	to := destination{lb.FamilyOf(f.To.Addr()), f.Protocol, f.To}
	by, ok := allowed[to]
	if to.isPing() {
		answered := f.From.Addr() != f.To.Addr() // by the node: else it was left as it came
		return ok && answered != (len(by) > 0)
	}
	if !ok && local[f.To.Addr()] {
		to.at = netip.AddrPortFrom(netip.Addr{}, f.To.Port())
		by, ok = allowed[to]
	}
	unknown := local[f.From.Addr()] && contains(by, aRelay)
	return ok && !contains(by, f.From) && !unknown
}

// questions returns what to ask to find all flows that have to go. As long as it is known who
// answers them, and they are few, it is about nothing else.
func questions(
	suspect doubts, allowed map[destination][]netip.AddrPort, local map[netip.Addr]bool) []About {
	var all []About
	for f, answerers := range suspect {
		to := []netip.AddrPort{f.at}
		if !f.at.Addr().IsValid() {
			to = nil
			for addr := range local {
				at := netip.AddrPortFrom(addr, f.at.Port())
				if _, other := allowed[destination{f.family, f.protocol, at}]; !other && lb.FamilyOf(addr) == f.family {
					to = append(to, at)
				}
			}
		}
		for by := range answerers {
			if contains(allowed[f], by) {
				continue
			}
			for _, at := range to {
				from := by
				switch {
				case f.isPing():
					from = netip.AddrPort{}
				case by == anybody:
					return []About{{}}
				case !by.IsValid():
					from = at
				}
				all = append(all, About{f.protocol, at, from})
			}
		}
		if len(all) > maxQuestions {
			return []About{{}}
		}
	}
	return all
}
