// Package relayfeed tells the relay on this node which connections it gets and which backends there
// are, over a unix socket, and has the rules lead to the relay as long as it is there.
package relayfeed

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/listen"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// Times of the server.
const (
	renewEvery   = time.Second
	writeTimeout = 10 * time.Second
	// stuckAfter is how long the proxy's loops may be at one thing before the rules stop leading to the
	// relay, whose endpoints may be those of before.
	stuckAfter = 30 * time.Second
)

// maxRelays is how many relays may be connected at once: one, and its successor.
const maxRelays = 4

// Deps are what the actor needs.
type Deps struct {
	Log  *slog.Logger
	Path string // of the socket
	// Busy returns for how long the loops that plan and write rules have been at one thing.
	Busy func() time.Duration
	// Renew has the rules of a family lead to the relay for a while, End to none.
	Renew func(family lb.Family, to netip.AddrPort, lasting time.Duration) error
	End   func(family lb.Family) error
}

// Actor serves the feed, and keeps the lease.
type Actor struct {
	deps  Deps
	wake  chan struct{} // holds a token while the lease may have to change
	pulse loop.Pulse

	mu        sync.Mutex
	begun     bool
	all       map[lb.Key]*plan.Relayed
	addresses map[lb.Family]netip.Addr
	nodePorts []netip.Addr
	// blocked are the families in which something else drops what the rules would lead to a relay.
	blocked map[lb.Family]bool
	relays  map[*relay]bool
	// current is the relay that said its ports last and knows all Services; nil while there is none.
	current *relay
	leased  map[lb.Family]netip.AddrPort
}

// relay is one connection.
type relay struct {
	changed map[lb.Key]bool // nil before it has been told all
	moved   bool            // the addresses of node ports have changed since
	wake    chan struct{}
	said    wire.Hello
	told    bool // all Services
	left    bool // the rules do not lead to it, after it has said that it leaves
}

var _ actor.Updater[lb.Key, *plan.Relayed] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	return &Actor{deps: deps, wake: make(chan struct{}, 1), all: map[lb.Key]*plan.Relayed{}, relays: map[*relay]bool{},
		leased: map[lb.Family]netip.AddrPort{}}
}

// Busy returns for how long the lease has been at one change.
func (a *Actor) Busy() time.Duration { return a.pulse.Busy() }

// SetAddresses says which address of each family the node has for the relay, and at which addresses it
// serves node ports. The rules of a family without one lead to no relay. It never blocks.
func (a *Actor) SetAddresses(addresses map[lb.Family]netip.Addr, nodePorts []netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.addresses = addresses
	poke(a.wake)
	if slices.Equal(a.nodePorts, nodePorts) {
		return
	}
	a.nodePorts = slices.Clone(nodePorts)
	for r := range a.relays {
		r.moved = true
		poke(r.wake)
	}
}

// SetBlocked says in which families the rules shall lead to no relay, as something else would drop what
// they lead there. It never blocks.
func (a *Actor) SetBlocked(families map[lb.Family]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !maps.Equal(a.blocked, families) {
		a.blocked = maps.Clone(families)
		poke(a.wake)
	}
}

// Begin says what is relayed, all of it, which relays hear from now on. It never blocks.
func (a *Actor) Begin(all map[lb.Key]*plan.Relayed) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.update(all)
	a.begun = true
	for r := range a.relays {
		poke(r.wake)
	}
}

// Update says what is relayed of the Services that it names; nil for nothing. It never blocks.
func (a *Actor) Update(changes map[lb.Key]*plan.Relayed) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.update(changes)
}

func (a *Actor) update(changes map[lb.Key]*plan.Relayed) {
	for key, now := range changes {
		before := a.all[key]
		switch {
		case now == nil && before == nil:
			continue
		case now == nil:
			delete(a.all, key)
		default:
			a.all[key] = now
		}
		for r := range a.relays {
			if r.changed != nil {
				r.changed[key] = true
				poke(r.wake)
			}
		}
	}
}

func poke(wake chan struct{}) {
	select {
	case wake <- struct{}{}:
	default:
	}
}

// State is what is so of the relay.
type State struct {
	// Connected is set while a relay is connected and knows all Services.
	Connected bool `json:"connected"`
	// Full is set while it has as many connections as it may, and new ones go straight to endpoints.
	Full bool `json:"full,omitempty"`
	// Leads are the addresses to which the rules lead, by family; none where connections go straight to
	// endpoints.
	Leads map[lb.Family]netip.AddrPort `json:"leads,omitempty"`
	// Ports are those where the relay accepts connections.
	Ports map[lb.Family]uint16 `json:"ports,omitempty"`
	// Services are relayed, and Connections are open.
	Services    int `json:"services"`
	Connections int `json:"connections"`
}

// State returns what is so.
func (a *Actor) State() State {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := State{Connected: a.current != nil, Leads: maps.Clone(a.leased), Services: len(a.all)}
	if a.current != nil {
		st.Ports = maps.Clone(a.current.said.Ports)
		st.Full, st.Connections = a.current.said.Full, a.current.said.Connections
	}
	return st
}

// Run serves until ctx ends. The lease is left to end by itself: a proxy that restarts renews it in
// time.
func (a *Actor) Run(ctx context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { a.keep(ctx) })
	var failures loop.Failures
	return loop.Retry(ctx, loop.Backoff{Min: time.Second, Max: time.Second}, func(ctx context.Context) bool {
		err := a.serve(ctx)
		if ctx.Err() == nil {
			failures.Log(a.deps.Log, "cannot serve the relay's feed; trying again", "", err)
		}
		return false
	})
}

func (a *Actor) serve(ctx context.Context) error {
	listener, err := listen.Unix(a.deps.Path, 0o600)
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	defer group.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group.Go(func() { <-ctx.Done(); listener.Close() })
	for {
		conn, err := listener.Accept()
		if err != nil {
			return err
		}
		group.Go(func() { a.serveRelay(ctx, conn) })
	}
}

// serveRelay talks to one relay until it goes or ctx ends.
func (a *Actor) serveRelay(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	r := &relay{wake: make(chan struct{}, 1)}
	if !a.join(r) {
		return
	}
	poke(r.wake)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var group sync.WaitGroup
	defer group.Wait()
	defer a.leave(r)
	group.Go(func() {
		defer cancel()
		if err := a.hear(conn, r); err != nil && ctx.Err() == nil {
			a.deps.Log.Warn("disconnected the relay", "error", err)
		}
	})
	if err := a.write(ctx, conn, r); err != nil && ctx.Err() == nil {
		a.deps.Log.Warn("disconnected the relay", "error", err)
	}
	cancel()
}

func (a *Actor) join(r *relay) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.relays) == maxRelays {
		return false
	}
	a.relays[r] = true
	return true
}

func (a *Actor) leave(r *relay) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.relays, r)
	a.elect()
}

// elect chooses the relay to which the rules lead: one that is ready. A ready one is kept, unless
// another has become ready, which is its successor.
func (a *Actor) elect() {
	if r := a.current; r != nil && (!a.relays[r] || !r.ready()) {
		a.current = nil
	}
	if a.current == nil {
		for r := range a.relays {
			if r.ready() {
				a.current = r
			}
		}
	}
	poke(a.wake)
}

func (r *relay) ready() bool { return r.told && len(r.said.Ports) > 0 && !r.said.Leaving }

// write sends all Services once they are known, each change after, and a beat.
func (a *Actor) write(ctx context.Context, conn net.Conn, r *relay) error {
	encoder, beat := json.NewEncoder(conn), time.NewTicker(wire.Beat)
	defer beat.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		case <-beat.C:
		}
		message := a.news(r)
		if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
		if err := encoder.Encode(message); err != nil {
			return err
		}
		if message.Complete {
			a.told(r)
		}
	}
}

func (a *Actor) told(r *relay) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r.told = true
	if r.ready() {
		a.current = r
	}
	a.elect()
}

// news returns what a relay has not been told: all at first.
func (a *Actor) news(r *relay) (m wire.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m.Left = r.left
	if !a.begun {
		return m
	}
	m.Complete = r.changed == nil
	if m.Complete {
		for key, relayed := range a.all {
			m.Services = append(m.Services, wire.Service{Key: key, Relayed: relayed})
		}
	}
	for key := range r.changed {
		m.Services = append(m.Services, wire.Service{Key: key, Relayed: a.all[key]})
	}
	if m.Complete || r.moved {
		m.NodePorts = append([]netip.Addr{}, a.nodePorts...)
	}
	r.changed, r.moved = map[lb.Key]bool{}, false
	slices.SortFunc(m.Services, func(x, y wire.Service) int { return x.Key.Compare(y.Key) })
	return m
}

// hear takes in what a relay says until it goes or is silent for too long.
func (a *Actor) hear(conn net.Conn, r *relay) error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, wire.MaxHello)
	for {
		if err := conn.SetReadDeadline(time.Now().Add(wire.Silence)); err != nil {
			return err
		}
		if !lines.Scan() {
			return lines.Err()
		}
		h, err := wire.DecodeHello(lines.Bytes())
		if err != nil {
			return err
		}
		a.take(r, h)
	}
}

func (a *Actor) take(r *relay, h wire.Hello) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := r.ready()
	if h.Full != r.said.Full {
		poke(a.wake)
	}
	leaving := h.Leaving || r.said.Leaving
	r.said = h
	r.said.Leaving = leaving
	if !was && r.ready() {
		a.current = r
	}
	if was != r.ready() || leaving && !r.left {
		a.elect()
	}
}

// keep has the rules lead to the relay, and renews that, until ctx ends.
func (a *Actor) keep(ctx context.Context) {
	renew := time.NewTicker(renewEvery)
	defer renew.Stop()
	var failures loop.Failures
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.wake:
		case <-renew.C:
		}
		end := a.pulse.Begin()
		err := a.lease()
		end()
		failures.Log(a.deps.Log, "cannot have the rules lead to the relay; trying again", "the rules lead to the relay again",
			err)
	}
}

// lease makes the rules lead where they should, once.
func (a *Actor) lease() error {
	a.mu.Lock()
	want := map[lb.Family]netip.AddrPort{}
	if a.current != nil && !a.current.said.Full && a.deps.Busy() < stuckAfter {
		for family, port := range a.current.said.Ports {
			if addr, ok := a.addresses[family]; ok && !a.blocked[family] {
				want[family] = netip.AddrPortFrom(addr, port)
			}
		}
	}
	before := maps.Clone(a.leased)
	var leaving []*relay
	for r := range a.relays {
		if r.said.Leaving && !r.left {
			leaving = append(leaving, r)
		}
	}
	a.mu.Unlock()
	var errs []error
	for family, to := range want {
		if err := a.deps.Renew(family, to, wire.Lease); err != nil {
			errs = append(errs, err)
			delete(want, family)
		}
	}
	ended := true
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		_, leads := want[family]
		to, led := before[family]
		if leads || !led && len(leaving) == 0 { // what leaves may have a lease of the proxy's predecessor
			continue
		}
		if err := a.deps.End(family); err != nil {
			errs, ended = append(errs, err), false
			if led {
				want[family] = to // try again
			}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !maps.Equal(a.leased, want) {
		a.deps.Log.Info("where the rules lead relayed connections", "relay", want)
	}
	a.leased = want
	for _, r := range leaving {
		if r.left = ended; ended {
			poke(r.wake)
		}
	}
	return errors.Join(errs...)
}
