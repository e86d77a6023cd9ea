// Package relayfeed tells the relay on this node which connections it gets and which backends there
// are, over a unix socket, and has the rules lead to the relay as long as it is there.
package relayfeed

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
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
	// Renew has the rules lead to the relay for a while, End to none. Renew fails with fs.ErrNotExist as long as the
	// rules are not written.
	Renew func(way plan.RelayWay, to netip.AddrPort, lasting time.Duration) error
	End   func(way plan.RelayWay) error
	// Original returns where a flow of UDP came from and went to before the rules led it to the relay; ok is
	// false if they did not.
	Original func(wire.Flow) (from, to netip.AddrPort, ok bool, err error)
	// Answering is told where relays that are there receive UDP, in order, each time that changes. It is not
	// known before the first time.
	Answering func([]netip.AddrPort)
	// TCPOnly is set if no rules lead UDP to a relay.
	TCPOnly bool
	// Moved is called when Actor.Ports has changed; may be nil.
	Moved func()
}

// Actor serves the feed, and keeps the lease.
type Actor struct {
	deps   Deps
	wake   chan struct{} // holds a token while the lease may have to change
	pulses loop.Pulses   // of the lease, and of who talks to a relay

	mu        sync.Mutex
	begun     bool
	all       map[lb.Key]*plan.Relayed
	addresses map[lb.Family]netip.Addr
	nodePorts []netip.Addr
	// blocked are the ways on which something else drops what the rules would lead to a relay.
	blocked map[plan.RelayWay]bool
	relays  map[*relay]bool
	// current is the relay that said its ports last and knows all Services; nil while there is none.
	current *relay
	leased  map[plan.RelayWay]netip.AddrPort
	// unled is why the rules cannot be made to lead to it; nil where they can.
	unled error
	// ports are those of the relay to which the rules lead, or of the last one that has said them.
	ports map[lb.Family]uint16
	// answering is what Deps.Answering was told; nil before. started is when the actor was made.
	answering []netip.AddrPort
	started   time.Time

	asking sync.Mutex // held by who asks Deps.Original
	asked  loop.Failures
}

// relay is one connection.
type relay struct {
	// changed are the Services that it has to be told of; nil before it is told of all. due has the same by namespaces,
	// the oldest change first, and turns are the namespaces that have some. So those that change much, or have many, hold
	// up no other. untold are those of which it hears before the rules lead there.
	changed map[lb.Key]bool
	due     map[string][]lb.Key
	turns   []string
	untold  map[lb.Key]bool
	moved   bool // the addresses of node ports have changed since
	wake    chan struct{}
	said    wire.Hello
	heard   bool // it has said something
	told    bool // all Services
	left    bool // the rules do not lead to it, after it has said that it leaves
	answers []wire.Answer
}

// maxAnswers is how many answers wait for a relay. One that asks more and does not listen is disconnected.
const maxAnswers = 128 * wire.MaxFlows

var _ actor.Updater[lb.Key, *plan.Relayed] = (*Actor)(nil)

// New returns an Actor.
func New(deps Deps) *Actor {
	return &Actor{deps: deps, wake: make(chan struct{}, 1), all: map[lb.Key]*plan.Relayed{}, relays: map[*relay]bool{},
		leased: map[plan.RelayWay]netip.AddrPort{}, started: time.Now()}
}

// Busy returns for how long the actor has been at one thing: a change of the lease, or a message.
func (a *Actor) Busy() time.Duration { return a.pulses.Busy() }

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

// SetBlocked says on which ways the rules shall lead to no relay, as something else would drop what they
// lead there. It never blocks.
func (a *Actor) SetBlocked(ways map[plan.RelayWay]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !maps.Equal(a.blocked, ways) {
		a.blocked = maps.Clone(ways)
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
				r.note(key)
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
	// OtherRelease is set while a relay of another release is connected, and none of this one is ready.
	OtherRelease bool `json:"otherRelease,omitempty"`
	// Full is set while it has as many connections as it may, or too little time or memory for more, and new ones go
	// straight to endpoints.
	Full bool `json:"full,omitempty"`
	// Behind is set while new flows of UDP go straight to endpoints, as it takes them in too slowly.
	Behind bool `json:"behind,omitempty"`
	// Leads are the addresses to which the rules lead connections, by family, and LeadsUDP those for flows of
	// UDP; none where they go straight to endpoints.
	Leads    map[lb.Family]netip.AddrPort `json:"leads,omitempty"`
	LeadsUDP map[lb.Family]netip.AddrPort `json:"leadsUDP,omitempty"`
	// Ports are those where the relay accepts connections.
	Ports map[lb.Family]uint16 `json:"ports,omitempty"`
	// NoPort says why it has none of a family, where it has not.
	NoPort map[lb.Family]string `json:"noPort,omitempty"`
	// NoUDP says why it receives no UDP at one of them, where it does not.
	NoUDP map[lb.Family]string `json:"noUDP,omitempty"`
	// Unled says why the proxy cannot have the rules lead to the relay, where it cannot.
	Unled string `json:"unled,omitempty"`
	// Services are relayed, UDP of them with a port of UDP, Families of them in each family, and Connections are open.
	Services    int               `json:"services"`
	UDP         int               `json:"udp"`
	Families    map[lb.Family]int `json:"families,omitempty"`
	Connections int               `json:"connections"`
}

// State returns what is so.
func (a *Actor) State() State {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := State{Connected: a.current != nil, Leads: map[lb.Family]netip.AddrPort{},
		LeadsUDP: map[lb.Family]netip.AddrPort{}, Services: len(a.all), Families: map[lb.Family]int{}}
	for way, to := range a.leased {
		map[lb.Protocol]map[lb.Family]netip.AddrPort{lb.TCP: st.Leads, lb.UDP: st.LeadsUDP}[way.Protocol][way.Family] = to
	}
	if a.unled != nil {
		st.Unled = a.unled.Error()
	}
	for _, r := range a.all {
		if slices.ContainsFunc(r.Ports, func(p plan.RelayedPort) bool { return p.Protocol == lb.UDP }) {
			st.UDP++
		}
		has := map[lb.Family]bool{}
		for _, p := range r.Ports {
			for _, f := range p.Frontends {
				has[lb.FamilyOf(f.Addr.Addr())] = true
			}
		}
		for family := range has {
			st.Families[family]++
		}
	}
	for r := range a.relays {
		st.OtherRelease = st.OtherRelease || a.current == nil && r.heard && !r.understands()
	}
	if a.current != nil {
		said := a.current.said
		st.Ports, st.NoPort, st.NoUDP = maps.Clone(said.Ports), maps.Clone(said.NoPort), maps.Clone(said.NoUDP)
		st.Full, st.Behind, st.Connections = a.current.said.Full, a.current.said.Behind, a.current.said.Connections
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

// Ports returns at which ports the relay accepts connections, or did if it is away. What it returns does not change.
func (a *Actor) Ports() map[lb.Family]uint16 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ports
}

func (r *relay) ready() bool {
	return r.understands() && r.told && len(r.said.Ports) > 0 && !r.said.Leaving
}

// understands reports whether the relay has shown that it means the same as this proxy.
func (r *relay) understands() bool { return r.said.Version == wire.Version }

// takes reports whether the rules may lead to the relay on a way: it listens there.
func (a *Actor) takes(r *relay, way plan.RelayWay) bool {
	return r.understands() && r.said.Ports[way.Family] != 0 &&
		(way.Protocol != lb.UDP || r.said.NoUDP[way.Family] == "" && !a.deps.TCPOnly)
}

// write sends all Services once they and the relay's version are known, each change after, and a beat.
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
		if err := a.say(conn, encoder, r); err != nil {
			return err
		}
	}
}

// say sends a relay what it has not been told.
func (a *Actor) say(conn net.Conn, encoder *json.Encoder, r *relay) error {
	defer a.pulses.Begin()()
	message := a.news(r)
	if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if err := encoder.Encode(message); err != nil {
		return err
	}
	if !message.More {
		a.told(r)
	}
	return nil
}

// told notes that a relay has been told all that news has returned.
func (a *Actor) told(r *relay) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.told || r.changed == nil {
		return
	}
	r.told = true
	if r.ready() {
		a.current = r
	}
	a.elect()
}

// news returns what a relay has not been told, as much of it as a line has; the next line is due then. At first that is
// of all Services, and there are more until the relay has been told once of each, whatever changes meanwhile.
func (a *Actor) news(r *relay) (m wire.Message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m.Version, m.Left = wire.Version, r.left
	m.Answers, r.answers = r.answers, nil
	if !a.begun || !r.understands() {
		return m
	}
	if m.Complete = r.changed == nil; m.Complete {
		r.changed, r.due, r.untold = make(map[lb.Key]bool, len(a.all)), map[string][]lb.Key{}, map[lb.Key]bool{}
		for key := range a.all {
			r.note(key)
			r.untold[key] = true
		}
	}
	if m.Complete || r.moved {
		m.NodePorts = append([]netip.Addr{}, a.nodePorts...)
	}
	for size := 0; len(r.turns) > 0; {
		key := r.due[r.turns[0]][0]
		if size += a.all[key].Size(); size > wire.MaxServices && len(m.Services) > 0 {
			poke(r.wake)
			break
		}
		m.Services = append(m.Services, wire.Service{Key: key, Relayed: a.all[key]})
		r.strike(key)
	}
	m.More = len(r.untold) > 0
	r.moved = false
	slices.SortFunc(m.Services, func(x, y wire.Service) int { return x.Key.Compare(y.Key) })
	return m
}

// note notes a Service that the relay has to be told of.
func (r *relay) note(key lb.Key) {
	if r.changed[key] {
		return
	}
	r.changed[key] = true
	if len(r.due[key.Namespace]) == 0 {
		r.turns = append(r.turns, key.Namespace)
	}
	r.due[key.Namespace] = append(r.due[key.Namespace], key)
}

// strike notes that the relay is told of the Service whose turn it is. Then it is the next namespace's turn.
func (r *relay) strike(key lb.Key) {
	delete(r.changed, key)
	delete(r.untold, key)
	r.turns = r.turns[1:]
	if r.due[key.Namespace] = r.due[key.Namespace][1:]; len(r.due[key.Namespace]) > 0 {
		r.turns = append(r.turns, key.Namespace)
	} else {
		delete(r.due, key.Namespace)
	}
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
		if err := a.heed(r, lines.Bytes()); err != nil {
			return err
		}
	}
}

// heed takes in a line of a relay, and answers what that asks.
func (a *Actor) heed(r *relay, line []byte) error {
	defer a.pulses.Begin()()
	h, err := wire.DecodeHello(line)
	if err != nil {
		return err
	}
	a.take(r, h)
	return a.answer(r, h.Flows)
}

// answer answers what a relay has asked about flows. It tells a relay only of those that arrive at its own
// port of the node's address. The kernel's failure is no answer: the relay asks again with the flow's next packet.
func (a *Actor) answer(r *relay, flows []wire.Flow) error {
	if len(flows) == 0 {
		return nil
	}
	answers := make([]wire.Answer, 0, len(flows))
	at := map[netip.AddrPort]bool{}
	a.mu.Lock()
	for family, port := range r.said.Ports {
		at[netip.AddrPortFrom(a.addresses[family], port)] = true
	}
	a.mu.Unlock()
	a.asking.Lock()
	for _, f := range flows {
		answer := wire.Answer{Flow: f}
		if at[f.At] {
			from, to, ok, err := a.deps.Original(f)
			a.asked.Log(a.deps.Log, "cannot find out where a flow of UDP went to", "", err)
			if ok && err == nil {
				answer.From, answer.To = from, to
			}
		}
		answers = append(answers, answer)
	}
	a.asking.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(r.answers)+len(answers) > maxAnswers {
		return fmt.Errorf("it asks and does not listen: %d answers wait for it", len(r.answers))
	}
	r.answers = append(r.answers, answers...)
	poke(r.wake)
	return nil
}

func (a *Actor) take(r *relay, h wire.Hello) {
	if a.moves(r, h) && a.deps.Moved != nil {
		a.deps.Moved()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	was := r.ready()
	if h.Full != r.said.Full || h.Behind != r.said.Behind || !maps.Equal(h.NoUDP, r.said.NoUDP) {
		poke(a.wake)
	}
	if h.Version != r.said.Version {
		poke(r.wake)
	}
	if h.Version != wire.Version && (!r.heard || r.understands()) {
		a.deps.Log.Warn("the relay is of another release: connections go straight to endpoints", "version", h.Version,
			"proxy", wire.Version)
	}
	leaving := h.Leaving || r.said.Leaving
	r.said, r.heard = h, true
	r.said.Leaving = leaving
	if !was && r.ready() {
		a.current = r
	}
	if was != r.ready() || leaving && !r.left {
		a.elect()
	}
}

// moves takes over the ports of a relay, unless the rules lead to another one, and reports whether they are others than
// those of the last one.
func (a *Actor) moves(r *relay, h wire.Hello) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	isOther := h.Leaving || a.current != nil && a.current != r
	if isOther || len(h.Ports) == 0 || maps.Equal(h.Ports, a.ports) {
		return false
	}
	a.ports = h.Ports
	return true
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
		end := a.pulses.Begin()
		err := a.lease()
		end()
		failures.Log(a.deps.Log, "cannot have the rules lead to the relay; trying again", "the rules lead to the relay again",
			err)
	}
}

// tell tells Deps.Answering of relays that have come, and of those that have gone if gone is set: of these
// once the rules do not lead there any more, as to leads they do. A relay that leaves answers until it closes the
// connection. What is not there when the proxy starts may be about to connect.
func (a *Actor) tell(gone bool, leads map[plan.RelayWay]netip.AddrPort) {
	a.mu.Lock()
	now := []netip.AddrPort{}
	if !gone {
		now = append(now, a.answering...)
	}
	for way, to := range leads {
		if way.Protocol == lb.UDP {
			now = append(now, to)
		}
	}
	for r := range a.relays {
		for family, port := range r.said.Ports {
			addr, ok := a.addresses[family]
			way := plan.RelayWay{Family: family, Protocol: lb.UDP}
			if ok && a.takes(r, way) && !a.blocked[way] {
				now = append(now, netip.AddrPortFrom(addr, port))
			}
		}
	}
	slices.SortFunc(now, netip.AddrPort.Compare)
	now = slices.Compact(now)
	early := a.answering == nil && len(now) == 0 && time.Since(a.started) < plan.RelayLease+wire.Silence
	if early || a.answering != nil && slices.Equal(now, a.answering) {
		a.mu.Unlock()
		return
	}
	a.mu.Unlock()
	a.deps.Answering(now)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answering = now // not before: Outlast goes by it
}

// Outlast waits for relays that end with the proxy, as those of one pod do: until the rules lead to none, and
// Deps.Answering has been told of none. It returns also when ctx ends, when those that are there have not said
// within a moment that they leave, as they then wait for the next proxy, and once a relay has been there for
// longer than it may. Run has to go on meanwhile.
func (a *Actor) Outlast(ctx context.Context) {
	began := time.Now()
	var most time.Duration
	// Within wire.Silence each that is there has said something.
	for a.ending(time.Since(began) < wire.Silence) && ctx.Err() == nil {
		if most = max(most, a.patience()); time.Since(began) > most {
			a.deps.Log.Warn("the relay goes on after its drain time; not waiting for it", "waited", most)
			return
		}
		time.Sleep(outlastEvery)
	}
}

// Bounds of what Outlast waits for a relay: its drain time and so much more, in which it leaves the rules and answers
// what waits, and this at most.
const (
	beyondDrain = 10 * time.Second
	maxOutlast  = time.Hour
)

// patience returns for how long a proxy that ends waits for the relays that are there.
func (a *Actor) patience() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	longest := time.Duration(0)
	for r := range a.relays {
		longest = max(longest, cmp.Or(r.said.Drain, wire.DefaultDrain))
	}
	return min(longest, maxOutlast-beyondDrain) + beyondDrain
}

// outlastEvery is how often Outlast looks.
const outlastEvery = 20 * time.Millisecond

// ending reports whether a relay is about to end, or flows may still be led to one that has. All that are there may
// be about to if any is set.
func (a *Actor) ending(anyMay bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for r := range a.relays {
		if anyMay || r.said.Leaving {
			return true
		}
	}
	return len(a.relays) == 0 && len(a.answering) > 0
}

// lease makes the rules lead where they should, once.
func (a *Actor) lease() error {
	a.mu.Lock()
	want := map[plan.RelayWay]netip.AddrPort{}
	if a.current != nil && a.deps.Busy() < stuckAfter {
		for _, way := range plan.RelayWays {
			port := a.current.said.Ports[way.Family]
			addr, reachable := a.addresses[way.Family]
			full := a.current.said.Full
			if way.Protocol == lb.UDP { // whose flows have limits of their own
				full = a.current.said.Behind
			}
			if a.takes(a.current, way) && reachable && !full && !a.blocked[way] {
				want[way] = netip.AddrPortFrom(addr, port)
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
	var unled error
	a.tell(false, want) // before flows come there
	for _, way := range plan.RelayWays {
		to, wanted := want[way]
		if !wanted {
			continue
		}
		err := a.deps.Renew(way, to, plan.RelayLease)
		if err != nil {
			delete(want, way)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			errs, unled = append(errs, err), cmp.Or(unled, err)
		}
	}
	ended := true
	for _, way := range plan.RelayWays {
		_, leads := want[way]
		to, led := before[way]
		if leads || !led && len(leaving) == 0 { // what leaves may have a lease of the proxy's predecessor
			continue
		}
		if err := a.deps.End(way); err != nil {
			errs, ended = append(errs, err), false
			if led {
				want[way] = to // try again
			}
		}
	}
	if ended {
		a.tell(true, want)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !maps.Equal(a.leased, want) {
		a.deps.Log.Info("where the rules lead relayed connections", "relay", want)
	}
	a.leased, a.unled = want, unled
	for _, r := range leaving {
		if r.left = ended; ended {
			poke(r.wake)
		}
	}
	return errors.Join(errs...)
}
