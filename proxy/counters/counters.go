// Package counters counts packets, bytes, connections and refusals of Services, in nftables tables of
// its own that both modes have beside their rules. The kernel counts; the proxy reads what it has
// counted when somebody asks.
//
// Each frontend has an element in four sets: attempts, which a connection meets before anybody
// translates it, and connections, received and sent, which it meets after. What was not translated
// was refused. docs/guide/metrics.md says what it costs.
package counters

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Deps are what an Actor needs.
type Deps struct {
	Log    *slog.Logger
	Kernel Kernel
	// Families are those that this node has.
	Families []lb.Family
	// Scope says what is counted; it is not Off.
	Scope Scope
	// Now is the clock.
	Now func() time.Time
}

// kernel is what an Actor needs of the node; Kernel outside of tests.
type kernel interface {
	prepare(lb.Family, map[place]bool) (added [kinds][]place, err error)
	edit(lb.Family, *edit) error
	read(lb.Family, []place, func(place, kind, nft.Count)) error
	readAll(lb.Family, []place, func(place, kind, nft.Count)) error
}

// reading is one of the kernel's ways to read.
type reading = func(lb.Family, []place, func(place, kind, nft.Count)) error

// Counts are what was counted of a Service since it appeared.
type Counts struct {
	// Connections are those that were sent to a backend.
	Connections uint64 `json:"connections"`
	// Packets and bytes from clients and to them. The kernel may have merged several packets of a
	// connection into one (GRO).
	PacketsReceived uint64 `json:"packetsReceived"`
	BytesReceived   uint64 `json:"bytesReceived"`
	PacketsSent     uint64 `json:"packetsSent"`
	BytesSent       uint64 `json:"bytesSent"`
	// Refused are connections that were not sent to a backend.
	Refused map[lb.Reason]uint64 `json:"refused,omitempty"`
	// Uncounted is how many frontends are not counted, as there are too many.
	Uncounted int `json:"uncounted,omitempty"`
}

// service is a Service that is counted.
type service struct {
	Counts
	places map[place]lb.Reason
}

// counter is what is known of the elements of a place.
type counter struct {
	owner lb.Key
	last  [kinds]nft.Count
	// unsettled are attempts that were read and have not become connections yet; below 0 if a
	// connection was read before its attempt.
	unsettled int64
}

// gap is the least time between two changes of the tables. Nothing waits for counters.
const gap = 200 * time.Millisecond

// What was read from the kernel serves those who ask for all Services for rest, and for restShare times
// as long as reading took: reading takes one part in restShare of a core at most.
const (
	rest      = 5 * time.Second
	restShare = 20
)

// Actor keeps the tables, and reads them.
type Actor struct {
	deps   Deps
	kernel kernel
	runner *loop.Runner
	inbox  actor.Inbox[lb.Key, plan.Service]

	// mu guards what follows, and the kernel.
	mu       sync.Mutex
	services map[lb.Key]*service
	places   map[place]*counter
	held     map[string]int     // how many of places each namespace has
	prepared map[lb.Family]bool // the kernel holds the elements of all places
	fresh    time.Time          // until when what was read of all Services serves
	failure  error
	failures loop.Failures
}

var _ actor.Updater[lb.Key, plan.Service] = (*Actor)(nil)

// New returns an Actor that does nothing before Begin is called.
func New(deps Deps) *Actor { return newActor(deps, deps.Kernel) }

func newActor(deps Deps, k kernel) *Actor {
	a := &Actor{deps: deps, kernel: k, services: map[lb.Key]*service{}, places: map[place]*counter{},
		held: map[string]int{}, prepared: map[lb.Family]bool{}}
	a.runner = loop.New(a.step, loop.Options{Gap: gap})
	return a
}

// Begin takes what the kernel holds of all Services. It never blocks.
func (a *Actor) Begin(all map[lb.Key]plan.Service) {
	a.inbox.Begin(all)
	a.runner.Poke()
}

// Update takes what the kernel holds now of some Services; without ports one is gone. It never
// blocks.
func (a *Actor) Update(changes map[lb.Key]plan.Service) {
	a.inbox.Update(changes)
	a.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Close closes the way to the kernel. The actor must not run any more.
func (a *Actor) Close() { a.deps.Kernel.Close() }

// Run keeps the tables until ctx ends. They stay then: connections go on, and so does counting.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

func (a *Actor) step(context.Context) (time.Duration, error) {
	changes, ok := a.inbox.Take()
	if !ok {
		return 0, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	err := a.apply(changes)
	a.failure = err
	a.failures.Log(a.deps.Log, "cannot count what Services get; trying again", "Services are counted again", err)
	return 0, err
}

// apply takes changes over, and has the kernel count what they ask for. What was counted at a place
// is read before the place goes, or counts for something else.
func (a *Actor) apply(changes map[lb.Key]plan.Service) error {
	edits := map[lb.Family]*edit{}
	for _, f := range a.deps.Families {
		edits[f] = new(edit)
	}
	var touched []place
	wanted := map[lb.Key]*service{}
	for key, s := range changes {
		w := &service{}
		w.places, w.Uncounted = places(s, a.deps.Scope)
		maps.DeleteFunc(w.places, func(p place, _ lb.Reason) bool { return edits[p.family] == nil })
		wanted[key] = w
		if old := a.services[key]; old != nil {
			for p, reason := range old.places {
				if now, stays := w.places[p]; !stays || now != reason {
					touched = append(touched, p)
				}
			}
		}
		for p := range w.places {
			if c := a.places[p]; c != nil && c.owner != key {
				touched = append(touched, p)
			}
		}
	}
	errs := []error{a.collect(touched, a.kernel.read)}
	for key, w := range wanted { // first, so that a place that moves to another Service stays
		for p := range w.places {
			if c := a.places[p]; c != nil {
				a.hold(c.owner, -1)
				a.hold(key, 1)
				c.owner = key
			}
		}
	}
	for key, w := range wanted {
		a.replace(key, w, edits)
	}
	for _, f := range a.deps.Families {
		if err := a.write(f, edits[f]); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f, err))
		}
	}
	return errors.Join(errs...)
}

// replace makes a Service what is wanted.
func (a *Actor) replace(key lb.Key, w *service, edits map[lb.Family]*edit) {
	old := a.services[key]
	if old != nil {
		uncounted := w.Uncounted
		w.Counts = old.Counts
		w.Uncounted = uncounted
		for p := range old.places {
			if c := a.places[p]; c != nil && c.owner == key && !has(w.places, p) {
				delete(a.places, p)
				a.hold(key, -1)
				edits[p.family].all(p, false)
			}
		}
	}
	for p := range w.places {
		switch {
		case a.places[p] != nil:
		case len(a.places) >= MaxTotal, len(a.places) >= MaxTotal/2 && a.held[key.Namespace] >= MaxOfNamespace:
			delete(w.places, p)
			w.Uncounted++
		default:
			a.places[p] = &counter{owner: key}
			a.hold(key, 1)
			edits[p.family].all(p, true)
		}
	}
	if len(w.places) == 0 && w.Uncounted == 0 {
		delete(a.services, key)
		return
	}
	a.services[key] = w
}

// hold notes that a Service has so many places more.
func (a *Actor) hold(key lb.Key, n int) {
	if a.held[key.Namespace] += n; a.held[key.Namespace] == 0 {
		delete(a.held, key.Namespace)
	}
}

func has[K comparable, V any](m map[K]V, key K) bool {
	_, ok := m[key]
	return ok
}

// write makes a family's table as wanted: all of it if it is not known what it holds.
func (a *Actor) write(family lb.Family, e *edit) error {
	if a.prepared[family] {
		err := a.kernel.edit(family, e)
		if a.prepared[family] = err == nil; err == nil {
			return nil
		}
	}
	want := map[place]bool{}
	for p := range a.places {
		if p.family == family {
			want[p] = true
		}
	}
	added, err := a.kernel.prepare(family, want)
	for k := range kinds {
		for _, p := range added[k] { // they begin anew
			a.places[p].last[k] = nft.Count{}
		}
	}
	a.prepared[family] = err == nil
	return err
}

// collect reads what was counted at some places. If it cannot, the tables are made anew, and what was
// read last stays.
func (a *Actor) collect(some []place, read reading) error {
	by := map[lb.Family][]place{}
	for _, p := range some {
		if a.prepared[p.family] && a.places[p] != nil {
			by[p.family] = append(by[p.family], p)
		}
	}
	var errs []error
	for family, at := range by {
		if err := read(family, at, a.fold); err != nil {
			a.prepared[family] = false
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// fold adds what was counted at a place since the last time to its Service. A counter that is lower
// than it was has begun anew behind our back.
func (a *Actor) fold(p place, k kind, now nft.Count) {
	c := a.places[p]
	if c == nil {
		return // it is about to be removed
	}
	s := a.services[c.owner]
	more := now
	if last := c.last[k]; now.Packets >= last.Packets && now.Bytes >= last.Bytes {
		more = nft.Count{Packets: now.Packets - last.Packets, Bytes: now.Bytes - last.Bytes}
	}
	c.last[k] = now
	switch k {
	case attempts:
		c.unsettled += int64(more.Packets)
	case connections:
		s.Connections += more.Packets
		if c.unsettled -= int64(more.Packets); c.unsettled > 0 {
			refused := maps.Clone(s.Refused) // others may read the one that was given to them
			if refused == nil {
				refused = map[lb.Reason]uint64{}
			}
			refused[s.places[p]] += uint64(c.unsettled)
			s.Refused, c.unsettled = refused, 0
		}
	case received:
		s.PacketsReceived += more.Packets
		s.BytesReceived += more.Bytes
	case sent:
		s.PacketsSent += more.Packets
		s.BytesSent += more.Bytes
	}
}

// Of returns what was counted of one Service; ok is false if it is not counted.
func (a *Actor) Of(key lb.Key) (c Counts, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.services[key]
	if s == nil {
		return c, false
	}
	a.refresh(slices.Collect(maps.Keys(s.places)), a.kernel.read)
	return s.Counts, true
}

// All returns what was counted of all Services, as it was a few seconds ago at most, and why it may be
// older.
func (a *Actor) All() (map[lb.Key]Counts, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if began := a.deps.Now(); !began.Before(a.fresh) {
		a.refresh(slices.Collect(maps.Keys(a.places)), a.kernel.readAll)
		ended := a.deps.Now()
		a.fresh = ended.Add(max(rest, restShare*ended.Sub(began)))
	}
	all := make(map[lb.Key]Counts, len(a.services))
	for key, s := range a.services {
		all[key] = s.Counts
	}
	return all, a.failure
}

// refresh reads some places. Where that fails, the step repairs what is missing.
func (a *Actor) refresh(some []place, read reading) {
	if err := a.collect(some, read); err != nil {
		a.failure = err
		a.runner.Poke()
	}
}
