// Package members is the actor that keeps the speakers of a cluster in touch: it knows which nodes
// are live and what each of them claims, and tells them what this node claims. It wraps memberlist,
// of which nothing else sees a type.
package members

import (
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times and sizes of what this package adds to memberlist.
const (
	// joinEvery is how often nodes that are known to the API server and not members are called.
	joinEvery = 3 * time.Second
	// joinAlone is how long a node that has just started goes on calling, every joinSoon, before it
	// believes that it is alone: its network may not be ready yet, and those that start together with
	// it need a moment.
	joinAlone = 2 * time.Second
	joinSoon  = 200 * time.Millisecond
	// joinsAtOnce bounds the calls to nodes that may all be down.
	joinsAtOnce = 16
	// leaveTimeout bounds how long a leaving node waits until it has told the others.
	leaveTimeout = 500 * time.Millisecond
	// messageSize keeps a message in one packet, whatever encryption and labels add.
	messageSize = 1100
	// directMembers is the largest cluster in which each change also goes straight to each member, so
	// that a handover takes milliseconds. A change of one VIP in such a cluster is 128 packets of some
	// 60 bytes; above, gossip alone has to do.
	directMembers = 128
)

// Options of Members.
type Options struct {
	Self string // this node's name
	// Bind returns the address at which gossip is spoken, over UDP and TCP, and which the others are
	// told. It may wait for it.
	Bind func(context.Context) (netip.Addr, error)
	Port int
	// Key encrypts gossip (AES-GCM); 16, 24 or 32 bytes, or none.
	Key []byte
	// Born tells this process from earlier ones on the node: the time of its start.
	Born time.Time
	// Hold is how long what a node answers for is kept for it after its speaker has ended without a
	// word, while the node itself is still there; 0 for not at all.
	Hold time.Duration
	Log  *slog.Logger
	// Changed is called with the VIPs of which another node says something else now; nil means that
	// nodes came or went, or that Joined changed. It must not block, and may be called from any
	// goroutine.
	Changed func(vips []netip.Addr)
	// transport replaces the network in tests.
	transport memberlist.Transport
	// reaches tells whether there is a node, and whether something accepts connections where its
	// speaker should be. Tests replace it.
	reaches func(context.Context, *memberlist.Node) (there, accepts bool)
}

// Members is the actor.
type Members struct {
	opts  Options
	send  *loop.Runner
	join  *loop.Runner
	watch *loop.Runner
	renew *loop.Runner
	queue memberlist.TransmitLimitedQueue

	mu      sync.Mutex
	own     *journal
	book    book                        // of the other nodes
	live    map[string]*memberlist.Node // other nodes
	greet   map[string]bool             // live nodes that were not told everything yet
	fallen  map[string]*memberlist.Node // live nodes of which it is to be found out what has become of them
	held    map[string]hold
	dead    map[string]bool         // nodes that have gone with their kernels
	found   map[string]found        // nodes that were lost and have just come back
	former  hold                    // what this node's speaker answered for in the life before this one
	peers   map[string][]netip.Addr // other nodes by name, from the API server; nil while unknown
	joined  bool
	met     map[string]bool     // nodes that have been members, without those that have left
	macs    map[string][]string // of the other nodes, by name, also of those that have gone
	ownMACs []string
	alone   time.Time // when this node may believe that it is alone; set by the first calls
	bind    netip.Addr
	ml      *memberlist.Memberlist // nil before and after Run
	stopped bool
}

// New returns Members that know nobody. Nothing is opened before Run.
func New(opts Options) *Members {
	if opts.reaches == nil {
		opts.reaches = reaches
	}
	m := &Members{
		opts: opts,
		own:  newJournal(opts.Self, uint64(opts.Born.UnixNano())),
		book: book{}, live: map[string]*memberlist.Node{}, greet: map[string]bool{},
		fallen: map[string]*memberlist.Node{}, held: map[string]hold{}, dead: map[string]bool{}, macs: map[string][]string{},
		met:   map[string]bool{},
		found: map[string]found{},
	}
	m.queue.NumNodes = func() int { return len(m.Live()) }
	m.queue.RetransmitMult = retransmitMult
	m.send = loop.New(m.sendStep, loop.Options{})
	m.join = loop.New(m.joinStep, loop.Options{})
	m.watch = loop.New(m.watchStep, loop.Options{})
	m.renew = loop.New(m.renewStep, loop.Options{})
	return m
}

// ParseKey reads an encryption key from the contents of a file: base64 or the bare bytes, 16, 24 or
// 32 of them.
func ParseKey(b []byte) ([]byte, error) {
	text := strings.TrimSpace(string(b))
	if decoded, err := base64.StdEncoding.DecodeString(text); err == nil && memberlist.ValidateKey(decoded) == nil {
		return decoded, nil
	}
	for _, key := range [][]byte{b, []byte(text)} {
		if memberlist.ValidateKey(key) == nil {
			return key, nil
		}
	}
	return nil, fmt.Errorf("a gossip key is 16, 24 or 32 bytes, bare or in base64; this has %d bytes", len(b))
}

// Set replaces what this node says of some VIPs; nil stands for nothing any more.
func (m *Members) Set(changes map[netip.Addr]*lb.Claim) {
	m.mu.Lock()
	poke := m.own.set(changes)
	m.mu.Unlock()
	if poke {
		m.send.Poke()
	}
}

// SetPeers replaces the nodes that there should be, this one excluded, with their addresses.
func (m *Members) SetPeers(peers map[string][]netip.Addr) {
	m.mu.Lock()
	m.peers = peers
	for node := range m.book { // what nodes said that have left the cluster
		if _, ok := peers[node]; !ok && m.live[node] == nil {
			delete(m.book, node)
		}
	}
	for node := range m.dead {
		if _, ok := peers[node]; !ok {
			delete(m.dead, node)
		}
	}
	for node := range m.macs {
		if _, ok := peers[node]; !ok && m.live[node] == nil {
			delete(m.macs, node)
		}
	}
	for node := range m.met {
		if _, ok := peers[node]; !ok && m.live[node] == nil {
			delete(m.met, node)
		}
	}
	m.mu.Unlock()
	m.join.Poke()
}

// Live returns the names of the live nodes, this one included, sorted. Those whose speakers are
// expected back are among them.
func (m *Members) Live() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	names := append(slices.Collect(maps.Keys(m.live)), m.opts.Self)
	now := time.Now()
	for name, h := range m.held {
		if m.live[name] == nil && now.Before(h.until) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Known returns the names of the nodes that this one sees and of those that it misses: which it has
// met, are nodes of the cluster still, and have not taken their leave. Sorted.
func (m *Members) Known() []string {
	names := m.Live()
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.met {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Claims returns what the other live nodes say of a VIP.
func (m *Members) Claims(vip netip.Addr) map[string]lb.Claim {
	m.mu.Lock()
	defer m.mu.Unlock()
	claims := map[string]lb.Claim{}
	now := time.Now()
	for name, node := range m.live {
		if claim, ok := m.book.claim(name, vip, bornOf(node)); ok {
			claim.Stale = m.found[name].before(m.book[name], vip, now)
			claims[name] = claim
		}
	}
	for name, h := range m.held {
		said, ok := claims[name]
		if claim, held := h.claim(vip, now); held && (!ok || starting(said)) {
			claims[name] = claim
		}
	}
	return claims
}

// Joined tells whether this node has met another one, or has called all that it knows of for a
// while and is alone.
func (m *Members) Joined() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.joined
}

// Run takes part until ctx ends; then it sends what is left to be said and takes its leave.
func (m *Members) Run(ctx context.Context) error {
	ml, err := m.start(ctx)
	if ml == nil {
		return err
	}
	m.mu.Lock()
	m.ml = ml
	m.mu.Unlock()
	m.send.Poke()
	m.join.Poke()
	var group errgroup.Group
	group.Go(func() error { return m.send.Run(ctx) })
	group.Go(func() error { return m.join.Run(ctx) })
	group.Go(func() error { return m.watch.Run(ctx) })
	group.Go(func() error { return m.renew.Run(ctx) })
	err = group.Wait()
	if _, sendErr := m.sendStep(context.Background()); sendErr != nil {
		m.opts.Log.Debug("last words were not sent", "error", sendErr)
	}
	if leaveErr := ml.Leave(leaveTimeout); leaveErr != nil {
		m.opts.Log.Warn("leaving without having told the others", "error", leaveErr)
	}
	m.mu.Lock()
	m.ml, m.stopped = nil, true
	m.mu.Unlock()
	if shutErr := ml.Shutdown(); shutErr != nil && err == nil {
		err = fmt.Errorf("end gossip: %w", shutErr)
	}
	return err
}

// start opens the sockets, again and again until it succeeds: the address may come later than the
// program, and the port may still be held by the one before.
func (m *Members) start(ctx context.Context) (*memberlist.Memberlist, error) {
	bind, err := m.opts.Bind(ctx)
	if ctx.Err() != nil {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the address for gossip: %w", err)
	}
	m.mu.Lock()
	m.bind = bind
	m.mu.Unlock()
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		ml, err := memberlist.Create(m.config(bind))
		if err == nil {
			return ml, nil
		}
		m.opts.Log.Warn("cannot start gossip; trying again", "address", netip.AddrPortFrom(bind, uint16(m.opts.Port)),
			"error", err)
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(wait):
		}
	}
}

// sendStep tells the others what has changed here, and newcomers everything.
func (m *Members) sendStep(context.Context) (time.Duration, error) {
	m.mu.Lock()
	ml := m.ml
	if ml == nil {
		m.mu.Unlock()
		return 0, nil
	}
	changes := update{node: m.own.node, born: m.own.born, entries: m.own.take()}
	var newcomers, others []*memberlist.Node
	for name, node := range m.live {
		if m.greet[name] {
			newcomers = append(newcomers, node)
		} else {
			others = append(others, node)
		}
	}
	clear(m.greet)
	var full update
	if len(newcomers) > 0 {
		full = m.own.full()
	}
	m.mu.Unlock()
	if len(newcomers) > 0 {
		// To a newcomer the page goes in parts, so none of them may say that it is complete. Even an
		// empty one tells of the new process.
		full.floor = 0
		for _, message := range split(full) {
			sendTo(ml, newcomers, message)
		}
	}
	if len(changes.entries) == 0 {
		return 0, nil
	}
	for _, message := range split(changes) {
		m.queue.QueueBroadcast(broadcast(message))
		if len(others) < directMembers {
			sendTo(ml, others, message)
		}
	}
	return 0, nil
}

// sendTo sends a packet to each node. A failure is left to gossip and to the exchange of full
// states.
func sendTo(ml *memberlist.Memberlist, nodes []*memberlist.Node, message []byte) {
	for _, node := range nodes {
		_ = ml.SendBestEffort(node, message)
	}
}

// split encodes an update as messages that fit into packets; at least one.
func split(u update) [][]byte {
	var messages [][]byte
	rest := u.entries
	for {
		part := u
		part.entries = rest
		message := encode(part)
		for len(message) > messageSize && len(part.entries) > 1 {
			part.entries = part.entries[:max(1, len(part.entries)*messageSize/len(message))]
			message = encode(part)
		}
		messages = append(messages, message)
		rest = rest[len(part.entries):]
		if len(rest) == 0 {
			return messages
		}
	}
}

// joinStep calls the nodes that should be members and are not.
func (m *Members) joinStep(ctx context.Context) (time.Duration, error) {
	m.mu.Lock()
	ml, known, bind := m.ml, m.peers != nil, m.bind
	missing := map[string][]netip.Addr{}
	for name, addrs := range m.peers {
		if m.live[name] == nil && len(addrs) > 0 {
			missing[name] = addrs
		}
	}
	m.mu.Unlock()
	if ml == nil || !known {
		return 0, nil
	}
	var group errgroup.Group
	group.SetLimit(joinsAtOnce)
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error { return m.call(ml, bind, name, missing[name]) })
	}
	if err := group.Wait(); err != nil {
		m.opts.Log.Debug("not all nodes can be reached by gossip", "error", err)
	}
	if len(missing) > 0 && m.hope(time.Now()) {
		return joinSoon, nil
	}
	m.meet()
	return joinEvery, nil
}

// hope tells whether a node that has met nobody yet should go on calling before it takes itself for
// the only one.
func (m *Members) hope(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.alone.IsZero() {
		m.alone = now.Add(joinAlone)
	}
	return !m.joined && now.Before(m.alone)
}

// call exchanges states with one node, at the first of its addresses that answers.
func (m *Members) call(ml *memberlist.Memberlist, bind netip.Addr, name string, addrs []netip.Addr) error {
	var err error
	for _, addr := range addrs {
		if addr.Is4() != bind.Is4() {
			continue // gossip is bound to an address of one family
		}
		target := netip.AddrPortFrom(addr, uint16(m.opts.Port)).String()
		if _, err = ml.Join([]string{name + "/" + target}); err == nil {
			m.meet()
			return nil
		}
	}
	return err
}

// meet notes that this node knows the others as well as it can.
func (m *Members) meet() {
	m.mu.Lock()
	was := m.joined
	m.joined = true
	m.mu.Unlock()
	if !was {
		m.opts.Changed(nil)
	}
}
