package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/neighbors"
	"github.com/landfall-lb/landfall/speaker/partition"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
	"github.com/landfall-lb/landfall/speaker/witness"
)

// The rig runs speakers, loop and plan included, in one process: what is around them is made of
// fakes that behave like the real actors, and a wire that notes at each moment who answers for
// what.

const (
	w177 = "k8s-worker-177"
	w178 = "k8s-worker-178"
	w179 = "k8s-worker-179"
)

var (
	vip1  = netip.MustParseAddr("172.26.236.180")
	vip2  = netip.MustParseAddr("172.26.236.181")
	vip6  = netip.MustParseAddr("2001:db8:236::180")
	nginx = lb.Key{Namespace: "default", Name: "my-nginx"}
	other = lb.Key{Namespace: "default", Name: "other"}
)

// api is the API server that all speakers of a rig watch.
type api struct {
	services       *kubetest.Table[lb.Key, lb.Service]
	slices         *kubetest.Table[lb.Key, []lb.Slice]
	nodes          *kubetest.Table[string, lb.Node]
	pools          *kubetest.Table[string, lb.Pool]
	advertisements *kubetest.Table[string, lb.L2Advertisement]

	peers       *kubetest.Table[string, lb.Peer]
	bgpAds      *kubetest.Table[string, lb.BGPAdvertisement]
	communities *kubetest.Table[string, lb.CommunityNames]
	profiles    *kubetest.Table[string, lb.BFDProfile]
	passwords   *kubetest.Table[string, string]
}

// rig is a cluster of speakers.
type rig struct {
	t     testing.TB
	api   api
	nodes map[string]*fakeNode
	wire  *wire

	leaseMu sync.Mutex
	lease   *lb.Witness
	renewed time.Time
}

// leaseLasts is how long what the Lease says counts after it was renewed, as in package witness.
const leaseLasts = 8 * time.Second

// wire notes who answers.
type wire struct {
	mu      sync.Mutex
	answers map[netip.Addr]map[string]bool
	least   map[netip.Addr]int // the least number of nodes that answered at any moment
	ever    map[string]bool    // those that answered at any moment since ever was emptied, as "node vip"
}

func (w *wire) set(node string, answers map[netip.Addr]l2.Answer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for vip := range answers {
		if w.answers[vip] == nil {
			w.answers[vip] = map[string]bool{}
		}
	}
	for vip, nodes := range w.answers {
		if _, ok := answers[vip]; ok {
			nodes[node] = true
			w.ever[node+" "+vip.String()] = true
		} else {
			delete(nodes, node)
		}
		if least, ok := w.least[vip]; ok {
			w.least[vip] = min(least, len(nodes))
		}
	}
}

// watch begins to note the least number of nodes that answer for the VIP.
func (w *wire) watch(vip netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.least[vip] = len(w.answers[vip])
}

// forget begins to note anew who answers at any moment, from now on.
func (w *wire) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.ever)
}

func (w *wire) answered(node string, vip netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ever[node+" "+vip.String()]
}

func (w *wire) who(vip netip.Addr) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.answers[vip]))
}

// fakeNode is one speaker with the fakes around it.
type fakeNode struct {
	vrfs  map[string]string // as its proxy says
	gates bool              // its proxy asks for what is not announced
	*speaker
	rig *rig

	mu          sync.Mutex
	live        bool
	joined      bool
	claims      map[netip.Addr]plan.Claim
	decided     int // how many decisions about VIPs there were
	peers       map[string][]netip.Addr
	outcome     map[netip.Addr][]string
	rounds      map[netip.Addr]int
	owned       map[netip.Addr]bool // as the actor for ARP and NDP was told
	macs        []string
	sees        func(node string) bool // nil: all
	waits       bool                   // for those that it does not see
	apiless     bool                   // cannot read the Lease
	cutOff      bool                   // from the kernels of the others, too
	unheard     bool                   // has read the Lease only once
	seeks       bool
	met, woke   time.Time
	wakes       uint64
	muted       bool // as the actor for ARP and NDP is told
	probed      map[netip.Addr]bool
	conflicting map[netip.Addr][]plan.ConflictingHost
	ours        map[string]string
	rivals      map[netip.Addr]string
	dead        []string      // as gossip finds
	named       []string      // the other Nodes, as liveness was last told
	confirmed   time.Time     // after which moment it was last asked whether they are silent still
	update      lb.FeedUpdate // as the proxy was last told
	passing     bool          // it passes on connections by that, or would if it were told
	slow        bool          // probing takes until finish is called
	mute        bool          // its interface takes no packets
	gate        lb.Reason
	deliveries  map[lb.DeliveryKey]lb.Delivery
	reports     map[lb.Key]lb.AnnouncedStatus
	interfaces  []lb.Interface
	daemonSet   *kubetest.Table[string, lb.DaemonSet]
	awaited     []string // the nodes that the actor for neighbors is told to wait for, sorted
	routers     *fakeRouters
	bfd         *fakeBFD
	objects     *fakeObjects
	cancel      context.CancelFunc
	done        chan error
}

func newRig(t testing.TB) *rig {
	r := &rig{
		t: t, nodes: map[string]*fakeNode{},
		wire: &wire{answers: map[netip.Addr]map[string]bool{}, least: map[netip.Addr]int{},
			ever: map[string]bool{}},
		api: api{
			services: kubetest.NewTable[lb.Key, lb.Service](), slices: kubetest.NewTable[lb.Key, []lb.Slice](),
			nodes: kubetest.NewTable[string, lb.Node](),
			pools: kubetest.NewTable[string, lb.Pool](), advertisements: kubetest.NewTable[string, lb.L2Advertisement](),
			peers: kubetest.NewTable[string, lb.Peer](), bgpAds: kubetest.NewTable[string, lb.BGPAdvertisement](),
			communities: kubetest.NewTable[string, lb.CommunityNames](),
			profiles:    kubetest.NewTable[string, lb.BFDProfile](), passwords: kubetest.NewTable[string, string](),
		},
	}
	r.api.pools.Set("lan", lb.Pool{Name: "lan",
		Ranges: []lb.Range{{From: vip1, To: netip.MustParseAddr("172.26.236.199")},
			{From: vip6, To: netip.MustParseAddr("2001:db8:236::199")}}})
	r.api.advertisements.Set("lan", lb.L2Advertisement{Name: "lan"})
	for i, name := range []string{w177, w178, w179} {
		addr := netip.AddrFrom4([4]byte{172, 26, 236, byte(177 + i)})
		r.api.nodes.Set(name, lb.Node{Name: name, Addresses: []netip.Addr{addr}})
		r.add(name, netip.PrefixFrom(addr, 24))
	}
	r.follow()
	return r
}

// add adds a node with an address on the LAN, and one for IPv6.
func (r *rig) add(name string, addr netip.Prefix) *fakeNode {
	low, wide := addr.Addr().As4(), vip6.As16()
	copy(wide[13:], []byte{1, low[2], low[3]})
	n := &fakeNode{
		speaker: newSpeaker(name, options{flapInterval: time.Second}, slog.New(slog.DiscardHandler)), rig: r,
		joined: true, passing: true, claims: map[netip.Addr]plan.Claim{}, outcome: map[netip.Addr][]string{},
		rounds:     map[netip.Addr]int{},
		deliveries: map[lb.DeliveryKey]lb.Delivery{}, reports: map[lb.Key]lb.AnnouncedStatus{},
		interfaces: []lb.Interface{{Index: 2, Name: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, low[2], low[3]}, Up: true,
			Addresses: []netip.Prefix{addr, netip.PrefixFrom(netip.AddrFrom16(wide), 64)}}},
	}
	n.from = sources{
		services: r.api.services, nodes: r.api.nodes, pools: r.api.pools, advertisements: r.api.advertisements,
		interfaces: func() ([]lb.Interface, bool) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.interfaces, n.interfaces != nil
		},
		wakes: func() (uint64, time.Time) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.wakes, n.woke
		},
		feed: fakeFeed{n}, members: fakeGossip{n}, liveness: fakeLiveness{n},
		routes: routeSources{
			peers: r.api.peers, advertisements: r.api.bgpAds, communities: r.api.communities, profiles: r.api.profiles,
			passwords: r.api.passwords, namespace: "landfall-system",
		},
	}
	n.routers = &fakeRouters{node: n, up: map[string]bool{}, heard: map[string]map[netip.Prefix]plan.Route{}}
	n.bfd = &fakeBFD{node: n, outcomes: map[bfd.Key]bfd.Outcome{}}
	n.objects = &fakeObjects{node: n, jobs: map[string]report.Job{}}
	n.to = sinks{
		l2: fakeL2{n}, report: fakeReport{n}, witness: &fakeWitness{fakeNode: n},
		routes: routeSinks{bgp: n.routers, bfd: n.bfd}, objects: n.objects, writers: n.objects.writers(),
		neighbors: fakeNeighbors{n},
	}
	n.daemonSet = kubetest.NewTable[string, lb.DaemonSet]()
	n.daemonSet.Set("landfall-node", lb.DaemonSet{Stays: true})
	n.opts.convergence, n.opts.returnHold = 3*time.Second, partition.ReturnHold
	r.nodes[name] = n
	return n
}

// follow has each speaker told of what changes at the API server.
func (r *rig) follow() {
	for _, n := range r.nodes {
		r.api.services.OnChange(n.changes.markService)
		r.api.slices.OnChange(n.changes.markService)
		r.api.nodes.OnChange(func(node string) { n.changes.markNode(node == n.self) })
		r.api.pools.OnChange(func(string) { n.changes.markAll() })
		r.api.advertisements.OnChange(func(string) { n.changes.markAll() })
		r.api.peers.OnChange(n.changes.markRoutes)
		r.api.bgpAds.OnChange(n.changes.markRoutes)
		r.api.communities.OnChange(n.changes.markRoutes)
		r.api.profiles.OnChange(n.changes.markRoutes)
		r.api.passwords.OnChange(n.changes.markRoutes)
	}
}

func (r *rig) start(names ...string) {
	for _, name := range names {
		n := r.nodes[name]
		ctx, cancel := context.WithCancel(context.Background())
		n.mu.Lock()
		n.live, n.cancel, n.done = true, cancel, make(chan error, 1)
		n.mu.Unlock()
		go func() { n.done <- n.runner.Run(ctx) }()
		n.changes.markSynced()
		r.tellAll(nil)
	}
	synctest.Wait()
}

// crash ends a speaker without a word.
func (r *rig) crash(name string) {
	n := r.nodes[name]
	n.cancel()
	if err := <-n.done; err != nil {
		r.t.Error(err)
	}
	n.mu.Lock()
	n.live = false
	n.mu.Unlock()
	r.wire.set(name, nil)
	r.tellAll(nil)
	synctest.Wait()
}

func (r *rig) end() {
	for _, name := range slices.Sorted(maps.Keys(r.nodes)) {
		if n := r.nodes[name]; n.live {
			r.crash(name)
		}
	}
}

func (r *rig) tellAll(vips []netip.Addr) {
	for _, n := range r.nodes {
		n.changes.markVIPs(vips)
	}
}

// service makes a Service with VIPs that every node can deliver.
func (r *rig) service(key lb.Key, vips ...netip.Addr) {
	for _, n := range r.nodes {
		for _, vip := range vips {
			n.deliver(lb.Delivery{Service: key, VIP: vip, Policy: lb.Cluster, Ready: 2, LocalReady: 1})
		}
	}
	s := lb.Service{Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster}
	for _, vip := range vips {
		s.Ingress = append(s.Ingress, lb.Ingress{Addr: vip})
	}
	r.api.services.Set(key, s)
	synctest.Wait()
}

func (n *fakeNode) set(f func(*fakeNode)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(n)
}

// carrier plugs the node's first interface in, or pulls it out.
func (n *fakeNode) carrier(up bool) {
	n.set(func(n *fakeNode) {
		n.interfaces = slices.Clone(n.interfaces)
		n.interfaces[0].Up = up
	})
}

func sortedNames(names ...string) []string {
	slices.Sort(names)
	return names
}

func (n *fakeNode) deliver(d lb.Delivery) {
	n.mu.Lock()
	before, ok := n.deliveries[d.Key()]
	n.deliveries[d.Key()] = d
	n.mu.Unlock()
	n.changes.markVIPs([]netip.Addr{d.VIP})
	if ok && before.Deliverable() == "" && d.Deliverable() != "" {
		n.runner.PokeNow()
	}
}

func (n *fakeNode) setGate(reason lb.Reason) {
	n.mu.Lock()
	n.gate = reason
	n.mu.Unlock()
	n.changes.markVIPs(nil)
	synctest.Wait()
}

func (n *fakeNode) claim(vip netip.Addr) (plan.Claim, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, ok := n.claims[vip]
	return c, ok
}

func (n *fakeNode) reported(key lb.Key) (lb.Condition, bool) {
	status, ok := n.wrote(key)
	return status.Condition, ok
}

func (n *fakeNode) wrote(key lb.Key) (lb.AnnouncedStatus, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	status, ok := n.reports[key]
	return status, ok
}

type fakeFeed struct{ *fakeNode }

func (f fakeFeed) Reason() lb.Reason {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gate
}

func (f fakeFeed) VRFs() map[string]string { return f.vrfs }

func (f fakeFeed) Gates() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gates
}

// Rescued is true at once, or once answer was called.
func (f fakeFeed) Rescued() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.passing
}

// answer has the proxy of a node pass on connections by all that it was told.
func (n *fakeNode) answer() {
	n.mu.Lock()
	n.passing = true
	n.mu.Unlock()
	n.changes.markVIPs([]netip.Addr{})
	synctest.Wait()
}

func (f fakeFeed) Connected() bool { return f.Reason() == "" }

func (f fakeFeed) Delivery(k lb.DeliveryKey) *lb.Delivery {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d, ok := f.deliveries[k]; ok {
		return &d
	}
	return nil
}

type fakeGossip struct{ *fakeNode }

func (g fakeGossip) Begin(all map[netip.Addr]*plan.Claim) { g.Update(all) }

func (g fakeGossip) Update(changes map[netip.Addr]*plan.Claim) {
	g.mu.Lock()
	g.decided += len(changes)
	var changed []netip.Addr
	ended := false
	for vip, claim := range changes {
		old, ok := g.fakeNode.claims[vip]
		ended = ended || claim != nil && old.Answering && old.Reason == "" && (!claim.Answering || claim.Reason != "")
		switch {
		case claim == nil && ok:
			delete(g.fakeNode.claims, vip)
			changed = append(changed, vip)
		case claim != nil && (!ok || old != *claim):
			g.fakeNode.claims[vip] = *claim
			changed = append(changed, vip)
		}
	}
	g.mu.Unlock()
	if len(changed) == 0 {
		return
	}
	for name, n := range g.rig.nodes {
		if name != g.self {
			n.changes.markVIPs(changed)
			if ended {
				n.runner.PokeNow()
			}
		}
	}
}

func (g fakeGossip) SetPeers(peers map[string][]netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fakeNode.peers = peers
}

// fakeLiveness sees the nodes whose speakers run and that it is connected with.
type fakeLiveness struct{ *fakeNode }

func (g fakeLiveness) Set(others map[string][]netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.named = slices.Sorted(maps.Keys(others))
}

// ConfirmAfter finds at once that those that are silent are so still.
func (g fakeLiveness) ConfirmAfter(after time.Time) {
	g.mu.Lock()
	news := after.After(g.confirmed)
	g.confirmed = after
	g.mu.Unlock()
	if news {
		g.runner.Poke()
	}
}

func (g fakeLiveness) Sight() plan.Sight {
	g.mu.Lock()
	silent, cut, sees, waits, confirmed := slices.Clone(g.dead), g.cutOff, g.sees, g.waits, g.confirmed
	g.mu.Unlock()
	live := []string{g.self}
	for name, n := range g.rig.nodes {
		n.mu.Lock()
		switch {
		case name == g.self:
		case n.live && (sees == nil || sees(name)):
			live = append(live, name)
		case (cut || n.cutOff || n.cancel == nil) && !slices.Contains(silent, name):
			silent = append(silent, name)
		}
		n.mu.Unlock()
	}
	slices.Sort(live)
	slices.Sort(silent)
	all := slices.Sorted(maps.Keys(g.rig.nodes))
	if waits {
		return plan.Sight{Speakers: plan.SpeakersOf(g.self, live, all, all, nil)}
	}
	s := plan.Sight{Speakers: plan.SpeakersOf(g.self, live, live, all, silent)}
	s.Confirmed = confirmed
	return s
}

func (g fakeGossip) Claims(vip netip.Addr, _ plan.Sight) map[string]plan.Claim {
	g.mu.Lock()
	sees := g.sees
	g.mu.Unlock()
	claims := map[string]plan.Claim{}
	for name, n := range g.rig.nodes {
		n.mu.Lock()
		if c, ok := n.claims[vip]; ok && n.live && name != g.self && (sees == nil || sees(name)) {
			claims[name] = c
		}
		n.mu.Unlock()
	}
	return claims
}

func (g fakeGossip) SetMACs(macs []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fakeNode.macs = macs
}

func (g fakeGossip) MACs() map[string]string {
	all := map[string]string{}
	for name, n := range g.rig.nodes {
		n.mu.Lock()
		for _, mac := range n.macs {
			all[mac] = name
		}
		n.mu.Unlock()
	}
	return all
}

func (f fakeFeed) Tell(n lb.FeedUpdate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.update.Apply(n)
}

func (g fakeGossip) Restarted(netip.Addr, plan.Sight) bool { return false }

func (g fakeGossip) Joined() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.joined
}

// Seek has the node exchange states with another one that it sees, which takes a moment.
func (g fakeGossip) Seek(since time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	on := !since.IsZero()
	if on && !g.seeks {
		time.AfterFunc(20*time.Millisecond, g.seek)
	}
	g.seeks = on
}

func (g fakeGossip) seek() {
	began := time.Now().Add(-20 * time.Millisecond)
	alone := len(fakeLiveness(g).Sight().Live) == 1
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.seeks {
		return
	}
	if !alone {
		g.met = began
		g.runner.Poke()
	}
	time.AfterFunc(200*time.Millisecond, g.seek)
}

func (g fakeGossip) Met() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.met
}

func (g fakeGossip) Trouble() string { return "" }

type fakeNeighbors struct{ *fakeNode }

func (f fakeNeighbors) Set(d neighbors.Desired) {
	var awaited []string
	for name, node := range f.rig.api.nodes.All() {
		if slices.ContainsFunc(node.Addresses, func(addr netip.Addr) bool { return d.Nodes[addr] }) {
			awaited = append(awaited, name)
		}
	}
	slices.Sort(awaited)
	f.set(func(n *fakeNode) { n.awaited = awaited })
}

type fakeL2 struct{ *fakeNode }

func (f fakeL2) Set(d l2.Desired) {
	f.mu.Lock()
	outcome := map[netip.Addr][]string{}
	f.owned = map[netip.Addr]bool{}
	for vip, answer := range d.Answers {
		f.owned[vip] = answer.Owned
		if !f.mute && (!d.Mute || f.outcome[vip] != nil) {
			outcome[vip] = answer.On
		}
		f.fakeNode.rounds[vip] = answer.Round
	}
	probed := map[netip.Addr]bool{}
	for vip := range d.Probes {
		if !f.slow {
			probed[vip] = true
		}
	}
	same := maps.EqualFunc(f.outcome, outcome, slices.Equal) && maps.Equal(f.probed, probed)
	f.probed, f.ours, f.muted = probed, d.Ours, d.Mute
	f.fakeNode.outcome = outcome
	muted := f.mute || d.Mute
	f.mu.Unlock()
	if muted {
		d.Answers = nil
	}
	f.rig.wire.set(f.self, d.Answers)
	if !same {
		f.runner.Poke()
	}
}

func (f fakeL2) Outcome() l2.Outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	return l2.Outcome{Answering: f.outcome, Probed: f.probed, ConflictingHosts: f.conflicting, Rivals: f.rivals}
}

// fakeWitness keeps what a node makes of the Lease, which all nodes share.
type fakeWitness struct {
	*fakeNode
	desired witness.Desired
	asked   time.Time
	asking  bool
}

// ask has the API server answer, once a second.
func (f *fakeWitness) ask() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.asking || !f.desired.Heed && !f.desired.Tell {
		return
	}
	f.asking = true
	if !f.apiless && f.live {
		f.asked = time.Now()
		if f.desired.Tell && f.desired.Rank == 0 {
			f.rig.leaseMu.Lock()
			f.rig.renewed = f.asked
			f.rig.leaseMu.Unlock()
		}
		f.runner.Poke()
	}
	time.AfterFunc(time.Second, func() {
		f.mu.Lock()
		f.asking = false
		f.mu.Unlock()
		f.ask()
	})
}

func (f *fakeWitness) Contact() (asked time.Time, took time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked, 5 * time.Millisecond
}

func (f *fakeWitness) Set(d witness.Desired) {
	f.mu.Lock()
	f.desired = d
	apiless := f.apiless
	f.mu.Unlock()
	f.ask()
	if apiless || !d.Tell || d.Rank > 0 {
		return
	}
	f.rig.leaseMu.Lock()
	same := f.rig.lease != nil && f.rig.lease.Same(d.Says)
	f.rig.lease, f.rig.renewed = &d.Says, time.Now()
	f.rig.leaseMu.Unlock()
	if !same {
		for _, n := range f.rig.nodes {
			n.runner.Poke()
		}
	}
}

func (f *fakeWitness) Outcome() (lb.Witness, bool) {
	f.mu.Lock()
	heed := f.desired.Heed && !f.apiless && !f.unheard
	f.mu.Unlock()
	f.rig.leaseMu.Lock()
	defer f.rig.leaseMu.Unlock()
	if !heed || f.rig.lease == nil || time.Since(f.rig.renewed) >= leaseLasts {
		return lb.Witness{}, false
	}
	return *f.rig.lease, true
}

type fakeReport struct{ *fakeNode }

func (f fakeReport) Update(changes map[lb.Key]*lb.AnnouncedStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, status := range changes {
		delete(f.reports, key)
		if status != nil {
			f.reports[key] = *status
		}
	}
}

func (r *rig) wantAnswers(what string, vip netip.Addr, want ...string) {
	r.t.Helper()
	if got := r.wire.who(vip); !slices.Equal(got, want) {
		r.t.Errorf("%s: %v answer for %s, want %v", what, got, vip, want)
	}
}

// stop ends a speaker as SIGTERM does.
func (r *rig) stop(name string) {
	n := r.nodes[name]
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		done <- live(
			ctx, n.speaker, []func(context.Context) error{func(ctx context.Context) error { <-ctx.Done(); return nil }})
	}()
	cancel()
	if err := <-done; err != nil {
		r.t.Error(err)
	}
}

func inRig(t *testing.T, f func(r *rig)) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		defer r.end()
		f(r)
	})
}

// wholeStatus is what /v1/status shows.
type wholeStatus struct {
	status
	VIPs []vipStatus `json:"vips"`
}

func (s *speaker) whole(t *testing.T) wholeStatus {
	t.Helper()
	var text bytes.Buffer
	var got wholeStatus
	if err := errors.Join(s.writeStatus(&text, ""), json.Unmarshal(text.Bytes(), &got)); err != nil {
		t.Fatal(err)
	}
	return got
}
