package main

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
	"github.com/landfall-lb/landfall/speaker/witness"
)

// table is what the API server has of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Synced() bool
}

// sources are where the speaker reads.
type sources struct {
	services       table[lb.Key, lb.Service]
	slices         table[lb.Key, []lb.Slice] // nil unless the gate looks at endpoints
	nodes          table[string, lb.Node]
	pools          table[string, lb.Pool]
	advertisements table[string, lb.L2Advertisement]
	interfaces     func() ([]lb.Interface, bool)
	feed           feed   // nil unless the gate is the proxy
	members        gossip // live nodes and their claims
	routes         routeSources
	// daemonSet has what started the speaker, by name, as long as it is there to stay; nil when nobody
	// can know.
	daemonSet table[string, bool]
}

type feed interface {
	Reason() lb.Reason
	Connected() bool
	Delivery(lb.DeliveryKey) *lb.Delivery
	Tell(lb.FeedNotice)
}

type gossip interface {
	Set(map[netip.Addr]*lb.Claim)
	SetPeers(map[string][]netip.Addr)
	Live() []string
	Claims(netip.Addr) map[string]lb.Claim
	Former(netip.Addr) bool
	Dead() []string
	Joined() bool
	SetMACs([]string)
	MACs() map[string]bool
	Known() []string
}

// sinks are where the speaker acts.
type sinks struct {
	l2 interface {
		Set(l2.Desired)
		Outcome() l2.Outcome
	}
	report interface {
		Update(map[lb.Key]*lb.AnnouncedStatus)
	}
	witness interface {
		Set(witness.Desired)
		Outcome() (lb.Witness, bool)
	}
	routes  routeSinks
	objects interface {
		Set(map[string]report.Job)
		Idle() bool
	}
	writers writers
}

// speaker is the loop that owns the state: it plans the VIPs of which something has changed, and
// tells the actors.
type speaker struct {
	self  string
	class string // loadBalancerClass of the Services that are ours
	opts  options
	log   *slog.Logger
	from  sources
	to    sinks

	runner *loop.Runner

	// dirty is what has changed since the last step; the actors and watches add to it.
	dirtyMu sync.Mutex
	dirty   dirt

	// mu guards what follows, which only the step changes; the status page and the metrics read it.
	mu           sync.Mutex
	vips         map[lb.Key][]netip.Addr // of each of our Services
	holders      map[netip.Addr][]lb.Key // the Services on each VIP, sorted
	decisions    map[netip.Addr]plan.Decision
	answering    map[netip.Addr][]string  // as the L2 actor last said
	answers      map[netip.Addr]l2.Answer // what it is to answer for, and to probe
	probes       map[netip.Addr][]string
	rounds       map[netip.Addr]int
	conflicts    conflicts
	quorum       quorum
	fresh        map[netip.Addr]time.Time // VIPs that were first seen a moment ago, until when they count as fresh
	formers      formers
	rings        rings
	untold       bool // formers, nodes or VIPs are other ones than the proxy was told of
	stopping     bool
	waiting      string // what the speaker waits for before its first plan; "" once it has planned
	ownerChanges int
	installed    bool // the DaemonSet was there
	routing      routing
}

// options are what an administrator may choose.
type options struct {
	exclude      []string // shell patterns of interfaces that answer only when named
	cordonDrains bool
	convergence  time.Duration // that routers get to choose other routes before a planned withdrawal
	onConflict   lb.OnConflict
}

// dirt names what has to be planned again.
type dirt struct {
	all      bool
	peers    bool            // the nodes to be met
	routes   bool            // all that BGP peers hear
	services map[lb.Key]bool // Services whose set of VIPs may differ, too
	vips     map[netip.Addr]bool
}

func newSpeaker(self, class string, log *slog.Logger) *speaker {
	s := &speaker{
		self: self, class: class, log: log, waiting: "the API server",
		vips: map[lb.Key][]netip.Addr{}, holders: map[netip.Addr][]lb.Key{}, decisions: map[netip.Addr]plan.Decision{},
		answering: map[netip.Addr][]string{}, answers: map[netip.Addr]l2.Answer{}, probes: map[netip.Addr][]string{},
		rounds: map[netip.Addr]int{}, fresh: map[netip.Addr]time.Time{}, routing: newRouting(),
		conflicts: conflicts{served: map[netip.Addr]bool{}}, formers: formers{}, rings: newRings(self), untold: true,
	}
	s.runner = loop.New(func(context.Context) (time.Duration, error) { return s.step(time.Now()), nil }, loop.Options{})
	return s
}

// The marks: each is called from whatever goroutine has learned of a change.

func (s *speaker) mark(f func(*dirt)) {
	s.dirtyMu.Lock()
	f(&s.dirty)
	s.dirtyMu.Unlock()
	s.runner.Poke()
}

func (s *speaker) markAll() { s.mark(func(d *dirt) { d.all = true }) }

// markRoutes takes a change of an object that concerns BGP only.
func (s *speaker) markRoutes(string) { s.mark(func(d *dirt) { d.routes = true }) }

func (s *speaker) markService(key lb.Key) {
	s.mark(func(d *dirt) {
		if d.services == nil {
			d.services = map[lb.Key]bool{}
		}
		d.services[key] = true
	})
}

// markVIPs marks some VIPs; nil stands for all.
func (s *speaker) markVIPs(vips []netip.Addr) {
	s.mark(func(d *dirt) {
		d.all = d.all || vips == nil
		if d.vips == nil {
			d.vips = map[netip.Addr]bool{}
		}
		for _, vip := range vips {
			d.vips[vip] = true
		}
	})
}

// markNode takes a change of a Node: the others are to be met, this one decides whether anything is
// claimed.
func (s *speaker) markNode(name string) {
	if name == s.self {
		s.markAll()
		return
	}
	s.mark(func(d *dirt) { d.peers = true })
}

// markSynced takes that some kind of object is known in full.
func (s *speaker) markSynced() {
	s.mark(func(d *dirt) { d.all, d.peers = true, true })
}

// snapshot copies the decisions, sorted by VIP.
func (s *speaker) snapshot() []plan.Decision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.decisions), func(a, b plan.Decision) int { return a.VIP.Compare(b.VIP) })
}
