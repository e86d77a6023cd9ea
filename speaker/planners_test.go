package main

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/neighbors"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// passedOn is after which time what some speakers claim has reached the others in a [town].
const passedOn = 50 * time.Millisecond

// town is what the speakers of a large cluster share in one process: gossip, which has one copy of all
// claims, and what the API server and the proxies say.
type town struct {
	*rig
	names      []string // sorted
	api        fixed[string, lb.Node]
	services   fixed[lb.Key, lb.Service]
	deliveries map[lb.DeliveryKey]lb.Delivery
	macs       map[string]string

	mu      sync.Mutex
	live    []string                             // sorted
	claims  map[netip.Addr]map[string]plan.Claim // by node
	news    map[netip.Addr]bool                  // VIPs of which claims have changed and are not passed on yet
	changes int                                  // of claims, in all
}

// resident is one speaker of a town.
type resident struct {
	fakeGossip
	*town
}

func newTown(t testing.TB, nodes, vips int) *town {
	c := &town{rig: newRig(t), api: fixed[string, lb.Node]{}, services: fixed[lb.Key, lb.Service]{},
		deliveries: map[lb.DeliveryKey]lb.Delivery{}, macs: map[string]string{},
		claims: map[netip.Addr]map[string]plan.Claim{}, news: map[netip.Addr]bool{}}
	clear(c.nodes)
	pools := fixed[string, lb.Pool]{"lan": {Name: "lan",
		Ranges: []lb.Range{{From: netip.MustParseAddr("172.26.0.0"), To: netip.MustParseAddr("172.26.200.255")}}}}
	for i := range vips {
		d := lb.Delivery{Service: lb.Key{Namespace: "default", Name: fmt.Sprint("s", i)}, VIP: vipOf(i),
			Policy: lb.Cluster, Ready: 2}
		c.deliveries[d.Key()] = d
		c.services[d.Service] = lb.Service{Key: d.Service, Type: lb.LoadBalancer, Ingress: []lb.Ingress{{Addr: d.VIP}}}
		c.claims[d.VIP] = map[string]plan.Claim{}
	}
	for i := range nodes {
		name, addr := fmt.Sprintf("k8s-worker-%04d", i), netip.AddrFrom4([4]byte{172, 26, 201 + byte(i>>8), byte(i)})
		c.names = append(c.names, name)
		c.api[name] = lb.Node{Name: name, Addresses: []netip.Addr{addr}}
		n := c.add(name, netip.PrefixFrom(addr, 16))
		c.macs[n.interfaces[0].MAC.String()] = name
		r := resident{fakeGossip{n}, c}
		n.deliveries = c.deliveries
		n.from.nodes, n.from.services, n.from.pools, n.from.members, n.from.liveness = c.api, c.services, pools, r, r
		n.to.report, n.to.neighbors = nothing{}, nothing{}
	}
	c.live = c.names
	return c
}

func vipOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 26, byte(i >> 8), byte(i)}) }

// nothing takes what a speaker tells actors that have no part in the story.
type nothing struct{}

func (nothing) Set(neighbors.Desired)                   {}
func (nothing) Update(map[lb.Key]*lb.AnnouncedStatus)   {}
func (r resident) Set(map[string][]netip.Addr)          {}
func (r resident) SetPeers(map[string][]netip.Addr)     {}
func (r resident) SetMACs([]string)                     {}
func (r resident) MACs() map[string]string              { return r.town.macs }
func (r resident) ConfirmAfter(time.Time)               {}
func (r resident) Begin(all map[netip.Addr]*plan.Claim) { r.Update(all) }
func (r resident) Claims(vip netip.Addr, _ plan.Sight) (others map[string]plan.Claim) {
	r.town.mu.Lock()
	defer r.town.mu.Unlock()
	others = maps.Clone(r.town.claims[vip])
	delete(others, r.self)
	return others
}

func (r resident) Sight() plan.Sight {
	r.town.mu.Lock()
	live := r.town.live
	r.town.mu.Unlock()
	var dead []string
	for _, node := range r.names {
		if _, is := slices.BinarySearch(live, node); !is {
			dead = append(dead, node)
		}
	}
	return plan.Sight{Speakers: plan.SpeakersOf(r.self, slices.Clone(live), slices.Clone(live), r.names, dead)}
}

// Update passes on what a speaker claims, with what others do in the same moment.
func (r resident) Update(changes map[netip.Addr]*plan.Claim) {
	r.town.mu.Lock()
	defer r.town.mu.Unlock()
	first := len(r.news) == 0
	for vip, claim := range changes {
		before, had := r.town.claims[vip][r.self]
		switch {
		case claim == nil && had:
			delete(r.town.claims[vip], r.self)
		case claim == nil || had && before == *claim:
			continue
		default:
			r.town.claims[vip][r.self] = *claim
		}
		r.news[vip] = true
		r.town.changes++
	}
	if first && len(r.news) > 0 {
		time.AfterFunc(passedOn, r.pass)
	}
}

func (c *town) pass() {
	c.mu.Lock()
	vips, live := slices.Collect(maps.Keys(c.news)), c.live
	clear(c.news)
	c.mu.Unlock()
	for _, name := range live {
		c.nodes[name].changes.markVIPs(vips)
	}
}

// open starts all speakers at once.
func (c *town) open() {
	for _, name := range c.names {
		n := c.nodes[name]
		ctx, cancel := context.WithCancel(context.Background())
		n.live, n.cancel, n.done = true, cancel, make(chan error, 1)
		n.changes.markSynced()
		go func() { n.done <- n.runner.Run(ctx) }()
	}
}

// lose has the others find out that a node is dead.
func (c *town) lose(name string) {
	n := c.nodes[name]
	n.cancel()
	<-n.done
	n.live = false
	c.wire.set(name, nil)
	c.mu.Lock()
	c.live = slices.DeleteFunc(slices.Clone(c.live), func(other string) bool { return other == name })
	for _, claims := range c.claims {
		delete(claims, name)
	}
	live := c.live
	c.mu.Unlock()
	for _, other := range live {
		c.nodes[other].changes.markAll()
	}
}

// owners returns who answers for each VIP, and fails the test unless it is one node for each.
func (c *town) owners(t *testing.T, when string) map[netip.Addr]string {
	t.Helper()
	owners, wrong := map[netip.Addr]string{}, 0
	for vip := range c.claims {
		who := c.wire.who(vip)
		if len(who) != 1 {
			if wrong++; wrong == 1 {
				t.Errorf("%s: %v answer for %s", when, who, vip)
			}
			continue
		}
		owners[vip] = who[0]
	}
	if wrong > 1 {
		t.Errorf("%s: so it is for %d addresses of %d", when, wrong, len(c.claims))
	}
	return owners
}

// TestPlannersAgree runs the speakers' loops of a whole cluster, each with its plans, on claims that they
// share: with LANDFALL_SCALE_NODES=200 and LANDFALL_SCALE_VIPS=1000 of as many nodes and VIPs. They agree on
// one owner of each VIP, at rest they decide nothing, and a crash moves the VIPs of the node that crashed only.
func TestPlannersAgree(t *testing.T) {
	nodes, vips := 24, 100
	if n, err := strconv.Atoi(os.Getenv("LANDFALL_SCALE_NODES")); err == nil {
		nodes = n
	}
	if n, err := strconv.Atoi(os.Getenv("LANDFALL_SCALE_VIPS")); err == nil {
		vips = n
	}
	synctest.Test(t, func(t *testing.T) { planners(t, nodes, vips) })
}

func planners(t *testing.T, nodes, vips int) {
	before := heap()
	c := newTown(t, nodes, vips)
	defer func() {
		for _, name := range c.live {
			c.nodes[name].cancel()
			<-c.nodes[name].done
		}
	}()
	t.Log("| what | nodes | VIPs | processor time, all | per node | changes of claims | memory, all |")
	measured := func(what string, do func()) (changes int) {
		cpu := cpuTime()
		c.mu.Lock()
		changes = c.changes
		c.mu.Unlock()
		do()
		time.Sleep(time.Minute)
		synctest.Wait()
		cpu = cpuTime() - cpu
		c.mu.Lock()
		changes = c.changes - changes
		c.mu.Unlock()
		t.Logf("| %s | %d | %d | %.1f s | %.1f ms | %d | %d MiB |", what, nodes, vips, cpu.Seconds(),
			float64(cpu.Microseconds())/1000/float64(nodes), changes, (heap()-before)>>20)
		return changes
	}
	measured("all start", c.open)
	owners := c.owners(t, "after the start")
	if t.Failed() {
		return
	}
	for vip, owner := range owners {
		if want := plan.Winner(vip, c.names); owner != want {
			t.Fatalf("%s answers for %s; want %s", owner, vip, want)
		}
	}
	if n := measured("at rest, a minute", func() {}); n > 0 {
		t.Errorf("at rest, claims changed %d times", n)
	}
	lost := owners[vipOf(0)]
	measured("a node crashes", func() { c.lose(lost) })
	after := c.owners(t, "after the crash")
	moved := 0
	for vip, owner := range owners {
		switch want := plan.Winner(vip, c.live); {
		case owner != lost && after[vip] != owner:
			t.Errorf("%s went from %s to %s, and neither has crashed", vip, owner, after[vip])
		case after[vip] != want:
			t.Errorf("%s answers for %s after the crash; want %s", after[vip], vip, want)
		case owner == lost:
			moved++
		}
	}
	t.Logf("of %d addresses %d moved", vips, moved)
}
