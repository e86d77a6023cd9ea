package main

import (
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/neighbors"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
	"github.com/landfall-lb/landfall/speaker/witness"
)

// modelNode is one node of the model: its kernel, its cables, and its speaker, of which the rooms
// and what decides for gossip, for the Lease and for ARP are memory.
type modelNode struct {
	w    *world
	I    int
	Name string

	// The machine.
	Up, Frozen bool
	Plugged    bool // it has a carrier
	Isolated   bool // its switch port forwards nothing
	Deaf, Dumb bool // nothing arrives, nothing leaves: a partition of one way
	Filtered   bool // its gossip is dropped, and nothing else
	NoAPI      bool // it does not reach the API server
	Programmed bool // its kernel delivers the VIP
	Draining   bool
	Late       bool // its gossip is a tick late
	Prompt     bool // it meets those whom it reaches again at once
	OneByOne   bool // its gossip loses one node in a tick

	// The speaker, and what its process remembers.
	Running, Hung bool
	Phase         phase
	Rooms         rooms
	Live          *liveness.State
	Born, seq     uint64
	Said          *plan.Claim
	Gossip        gossiping
	Lease         witness.State
	Wants         witness.Desired
	Asked         time.Time // the API server
	Woke          time.Time
	StopsAt       time.Time // by when a stop that is planned ends
	Known         bool      // what the API server has
	Wire          wiring
	First, Dirty  bool // the speaker has to step

	// Proxy is what the proxy was told, and Target the node to which it moves packets that it does not
	// know.
	Proxy  lb.FeedUpdate
	Target int
}

// seqs keeps the numbers of the changes of each node apart.
const seqs = 1 << 32

// sheets of the cluster that do not change.
var (
	modelVIP      = netip.MustParseAddr("172.26.236.180")
	modelServices = fixed[lb.Key, lb.Service]{nginx: {Key: nginx, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster,
		Ingress: []lb.Ingress{{Addr: modelVIP}}}}
	modelPools = fixed[string, lb.Pool]{"lan": {Name: "lan", Ranges: []lb.Range{{From: modelVIP, To: modelVIP}}}}
	modelAds   = fixed[string, lb.L2Advertisement]{"lan": {Name: "lan"}}
)

// fixed is a table whose content is known to all.
type fixed[K comparable, V any] map[K]V

func (f fixed[K, V]) Get(k K) (V, bool) { v, ok := f[k]; return v, ok }
func (f fixed[K, V]) All() map[K]V      { return f }
func (f fixed[K, V]) Synced() bool      { return true }

func addressOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 26, 236, byte(10 + i)}) }

// modelNodes are the Nodes as the API server has them. A speaker that has started without the API
// server knows none.
type modelNodes struct{ *modelNode }

func (m modelNodes) Synced() bool { return m.Known }

func (m modelNodes) All() map[string]lb.Node {
	all := map[string]lb.Node{}
	for _, n := range m.w.Nodes {
		node := lb.Node{Name: n.Name, Addresses: []netip.Addr{addressOf(n.I)}}
		if n.Draining {
			node.Leaving = lb.ReasonNodeDrained
		}
		all[n.Name] = node
	}
	return all
}

func (m modelNodes) Get(name string) (lb.Node, bool) { n, ok := m.All()[name]; return n, ok }

// boot starts a process of the speaker.
func (n *modelNode) boot() {
	n.Running, n.Hung, n.Born = true, false, n.Born+1
	fresh := newSpeaker(n.Name, options{flapInterval: time.Second}, slog.New(slog.DiscardHandler))
	n.Rooms, n.Phase = copied(&fresh.rooms), fresh.phase
	n.Live = liveness.NewState(n.Name, n.w.hooks.restartHold, 100*time.Millisecond)
	n.seq, n.Said, n.Gossip = seqs*uint64(n.I+1), nil, gossiping{}
	n.Lease, n.Wants, n.Asked, n.Woke = witness.State{}, witness.Desired{}, time.Time{}, time.Time{}
	n.StopsAt, n.Known, n.Wire = time.Time{}, false, wiring{}
	n.First, n.Dirty = true, true
}

// awake reports whether the speaker does anything.
func (n *modelNode) awake() bool { return n.Up && !n.Frozen && n.Running && !n.Hung }

// loop returns the program's own loop with the memory of this node.
func (n *modelNode) loop() *speaker {
	s := &speaker{self: n.Name, log: modelLog, phase: n.Phase, rooms: n.Rooms,
		opts: options{returnHold: n.w.hooks.returnHold}}
	s.changes.poke, s.changes.now = func() {}, func() {}
	s.from = sources{
		services: modelServices, nodes: modelNodes{n}, pools: modelPools, advertisements: modelAds,
		interfaces: n.interfaces, wakes: func() (uint64, time.Time) { return n.Wire.Wakes, n.Woke },
		feed: modelFeed{n}, members: modelGossip{n}, liveness: modelLiveness{n},
		routes: routeSources{peers: fixed[string, lb.Peer]{}, advertisements: fixed[string, lb.BGPAdvertisement]{},
			communities: fixed[string, lb.CommunityNames]{}, profiles: fixed[string, lb.BFDProfile]{},
			passwords: fixed[string, string]{}},
	}
	s.to = sinks{l2: modelL2{n}, report: unread{}, witness: modelWitness{n}, objects: unread{}, neighbors: noNeighbors{},
		routes: routeSinks{bgp: noRouters{}, bfd: noBFD{}}}
	return s
}

var modelLog = slog.New(slog.DiscardHandler)

// step has the speaker step, as often as its own actors have news for it.
func (n *modelNode) step() {
	for turns := 0; n.Dirty && n.awake() && turns < 8; turns++ {
		n.Dirty = false
		s := n.loop()
		s.changes.note(func(d *dirt) {
			d.all, d.peers, d.nodes, d.links = n.First, n.First, n.First, true
			d.vips = map[netip.Addr]bool{modelVIP: true}
		})
		s.step(n.w.Now)
		n.First = n.First && s.phase.waiting != ""
		n.Phase, n.Rooms = s.phase, s.rooms
	}
}

func (n *modelNode) interfaces() ([]lb.Interface, bool) {
	return []lb.Interface{{Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(n.I)}, Up: n.Plugged,
		Addresses: []netip.Prefix{netip.PrefixFrom(addressOf(n.I), 24)}}}, true
}

// modelFeed is the node's proxy.
type modelFeed struct{ *modelNode }

func (f modelFeed) Reason() lb.Reason     { return "" }
func (f modelFeed) Connected() bool       { return true }
func (f modelFeed) Rescued() bool         { return true }
func (modelFeed) VRFs() map[string]string { return nil }
func (modelFeed) Gates() bool             { return false }

func (f modelFeed) Delivery(k lb.DeliveryKey) *lb.Delivery {
	if !f.Programmed && !f.w.hooks.unconfirmed {
		return nil
	}
	return &lb.Delivery{Service: k.Service, VIP: k.VIP, Policy: lb.Cluster, Ready: 1, LocalReady: 1}
}

func (f modelFeed) Tell(u lb.FeedUpdate) {
	if f.w.hooks.noRescue {
		return
	}
	f.Proxy.Apply(u)
	if previous := f.Proxy.Previous[modelVIP]; len(previous) > 0 {
		f.Target = int(previous[0].As4()[3]) - 10
	}
}

// modelLiveness is what became of the speakers that gossip has lost.
type modelLiveness struct{ *modelNode }

func (l modelLiveness) Set(nodes map[string][]netip.Addr) { l.Live.Keep(nodes, l.w.Now) }

func (l modelLiveness) ConfirmAfter(after time.Time) {
	if l.Live.ConfirmAfter(after) {
		l.probe()
	}
}

func (l modelLiveness) Sight() plan.Sight {
	s := plan.Sight{Speakers: l.Live.Speakers(l.w.Now)}
	if l.w.hooks.noMajority {
		s.Majority, s.Half, s.Alone, s.Dead = true, false, false, s.Silent
	}
	return s
}

// modelWitness is how the node uses the Lease.
type modelWitness struct{ *modelNode }

func (m modelWitness) Set(d witness.Desired) {
	same := m.Wants.Tell == d.Tell && m.Wants.Rank == d.Rank && m.Wants.Heed == d.Heed && m.Wants.Says.Same(d.Says)
	m.Wants = d
	if !same {
		m.w.useLease(m.modelNode)
	}
}

func (m modelWitness) Outcome() (lb.Witness, bool) {
	said, fresh := m.Lease.Outcome(m.w.Now, m.Wants)
	return said, fresh && !m.w.hooks.noYield && (!m.Wants.Tell || !m.w.hooks.deafTellers)
}

// Contact says that the API server always answers within a few milliseconds.
func (m modelWitness) Contact() (time.Time, time.Duration) { return m.Asked, 5 * time.Millisecond }

// unread takes what only people read, and what the model has no use for.
type unread struct{}

func (unread) Update(map[lb.Key]*lb.AnnouncedStatus) {}
func (unread) Set(map[string]report.Job)             {}
func (unread) Idle() bool                            { return true }

// noNeighbors is the actor that waits for the kernels of other nodes.
type noNeighbors struct{}

func (noNeighbors) Set(neighbors.Desired) {}

// noRouters are the actors for BGP and BFD of a cluster without routers.
type noRouters struct{}

func (noRouters) Set(map[string]plan.BGPSession)   {}
func (noRouters) Statuses() map[string]bgp.Status  { return nil }
func (noRouters) Brief() map[string]bgp.Status     { return nil }
func (noRouters) Announced(netip.Prefix) []string  { return nil }
func (noRouters) Confirming(netip.Prefix) []string { return nil }

type noBFD struct{}

func (noBFD) Set(map[bfd.Key]bfd.Profile)       {}
func (noBFD) Outcomes() map[bfd.Key]bfd.Outcome { return nil }
func (noBFD) Health() bfd.Health                { return bfd.Health{} }

// wiring is what the actor for ARP knows of the VIP.
type wiring struct {
	Answering bool
	Owned     bool
	Mute      bool
	Wakes     uint64
	Heard     uint64 // wakes that the last decision knew of
	round     int
	Probed    bool
	// Began is when the present announcements began, and Sent how many of them are out.
	Began time.Time
	Sent  int
	// Rival is the other node that was the last to announce the VIP plus 1, since RivalAt; it is answered at
	// Reclaim.
	Rival            int
	RivalAt, Reclaim time.Time
}

// bursts are when a node that answers announces itself, as package l2 does.
var bursts = []time.Duration{0, 500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second}

// rivalLasts is how long a node counts as the last to have announced the VIP.
const rivalLasts = 12 * time.Second

type modelL2 struct{ *modelNode }

func (m modelL2) Set(d l2.Desired) {
	before := m.Wire
	answer, wanted := d.Answers[modelVIP]
	m.Wire.Mute, m.Wire.Heard, m.Wire.Owned = d.Mute, d.Wakes, answer.Owned
	m.Wire.Probed = m.Wire.Probed || len(d.Probes[modelVIP]) > 0
	switch {
	case !wanted:
		m.Wire.Answering = false
	case !m.Wire.Answering && !m.Wire.Mute && m.Plugged:
		m.Wire.Answering, m.Wire.Began, m.Wire.Sent, m.Wire.round = true, m.w.Now, 0, answer.Round
		m.Wire.Rival, m.Wire.Reclaim = 0, time.Time{}
	case m.Wire.round != answer.Round && !m.w.hooks.announceOnce:
		m.Wire.Began, m.Wire.Sent, m.Wire.round, m.Wire.Rival = m.w.Now, 0, answer.Round, 0
	}
	m.w.announce(m.modelNode)
	if before.Answering != m.Wire.Answering || before.Probed != m.Wire.Probed {
		m.Dirty = true
		m.w.answersChanged(m.modelNode)
	}
}

func (m modelL2) Outcome() l2.Outcome {
	o := l2.Outcome{Probed: map[netip.Addr]bool{modelVIP: m.Wire.Probed}}
	if m.Wire.Answering {
		o.Answering = map[netip.Addr][]string{modelVIP: {"eth0"}}
	}
	if m.Wire.Rival > 0 {
		o.Rivals = map[netip.Addr]string{modelVIP: m.w.Nodes[m.Wire.Rival-1].Name}
	}
	return o
}

// answers reports whether the node answers ARP for the VIP now.
func (n *modelNode) answers() bool {
	return n.awake() && n.Plugged && n.Wire.Answering && !n.Wire.Mute && n.Wire.Wakes == n.Wire.Heard
}

// quiet reports whether a planned stop has come to its end.
func (n *modelNode) quiet() bool { return n.loop().quiet() }

// claims returns what counts of what the others say.
func (n *modelNode) claims() map[string]plan.Claim {
	claims := map[string]plan.Claim{}
	if n.w.hooks.heedsNobody && n.answers() {
		return claims
	}
	for node, standing := range n.Live.Standings(n.w.Now) {
		p := n.Gossip.Pages[n.w.index(node)]
		if p == nil {
			continue
		}
		if claim, ok := standing.Counts(p.Claim, p.Point, p.life(standing.Held)); ok {
			claim.Stale = claim.Stale && !n.w.hooks.neverStale
			claims[node] = claim
		}
	}
	return claims
}
