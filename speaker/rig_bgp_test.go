package main

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
)

// fakeRouters are the routers of one node, and the actor that speaks to them: what is Set is heard
// after a moment by those that are up.
type fakeRouters struct {
	node *fakeNode

	mu      sync.Mutex
	sets    int
	desired map[string]plan.BGPSession
	flushed bool
	up      map[string]bool
	local   netip.Addr // of the sessions; not valid: it is not told
	since   map[string]time.Time
	heard   map[string]map[netip.Prefix]plan.Route
	log     []string // what each peer has heard, in order
	changes uint64   // how often what they hear has changed
}

const flushTime = time.Millisecond

func (f *fakeRouters) Set(desired map[string]plan.BGPSession) {
	f.mu.Lock()
	f.sets++
	f.desired, f.flushed = desired, false
	f.mu.Unlock()
	time.AfterFunc(flushTime, f.flush)
}

func (f *fakeRouters) flush() {
	f.mu.Lock()
	f.flushed = true
	for name := range f.heard {
		if _, ok := f.desired[name]; !ok {
			delete(f.heard, name)
			f.note("%s is left", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.desired)) {
		d := f.desired[name]
		if !f.up[name] || d.BFDDown {
			if _, was := f.heard[name]; was {
				f.note("%s is lost", name)
			}
			delete(f.heard, name)
			continue
		}
		if f.heard[name] == nil {
			f.heard[name] = map[netip.Prefix]plan.Route{}
		}
		f.update(name, d.Routes)
	}
	f.mu.Unlock()
	f.node.runner.Poke()
}

func (f *fakeRouters) update(name string, routes map[netip.Prefix]plan.Route) {
	heard := f.heard[name]
	for _, p := range slices.SortedFunc(maps.Keys(routes), netip.Prefix.Compare) {
		if was, ok := heard[p]; !ok || !was.Equal(routes[p]) {
			f.note("%s +%s lp %d %v", name, p, routes[p].LocalPref, routes[p].Communities)
			heard[p] = routes[p]
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(heard), netip.Prefix.Compare) {
		if _, ok := routes[p]; !ok {
			f.note("%s -%s", name, p)
			delete(heard, p)
		}
	}
}

func (f *fakeRouters) note(format string, args ...any) {
	f.changes++
	f.log = append(f.log, fmt.Sprintf(format, args...))
}

// told returns what the peers have heard since it was last asked.
func (f *fakeRouters) told() string {
	synctest.Wait()
	time.Sleep(2 * flushTime)
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	log := strings.Join(f.log, "; ")
	f.log = nil
	return log
}

// connect makes a router come or go.
func (f *fakeRouters) connect(name string, up bool) {
	f.mu.Lock()
	f.up[name] = up
	if f.since == nil {
		f.since = map[string]time.Time{}
	}
	f.since[name] = time.Now()
	f.mu.Unlock()
	f.flush()
	synctest.Wait()
}

func (f *fakeRouters) Statuses() map[string]bgp.Status { return f.Brief() }

func (f *fakeRouters) Brief() map[string]bgp.Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	statuses := map[string]bgp.Status{}
	for name, d := range f.desired {
		s := bgp.Status{State: bgp.Idle, Since: f.since[name], Reason: lb.ReasonNotEstablished,
			LastError: "connection refused"}
		switch {
		case f.heard[name] != nil:
			s = bgp.Status{State: bgp.Established, Since: f.since[name], Synced: f.flushed, Prefixes: len(f.heard[name]),
				Heard: f.changes, Local: f.local}
		case d.BFDDown:
			s.Reason, s.LastError = lb.ReasonBFDDown, "BFD says that the path to the peer is lost"
		}
		statuses[name] = s
	}
	if !f.flushed {
		for name := range f.heard { // still saying goodbye
			if _, ok := statuses[name]; !ok {
				statuses[name] = bgp.Status{State: bgp.Established}
			}
		}
	}
	return statuses
}

func (f *fakeRouters) Announced(p netip.Prefix) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var peers []string
	for name, heard := range f.heard {
		if _, ok := heard[p]; ok {
			peers = append(peers, name)
		}
	}
	return peers
}

// Confirming returns none: the routers announce nothing.
func (*fakeRouters) Confirming(netip.Prefix) []string { return nil }

// fakeBFD has the sessions that it is told to have in the state that the test wants.
type fakeBFD struct {
	node *fakeNode

	mu       sync.Mutex
	desired  map[bfd.Key]bfd.Profile
	sets     int
	outcomes map[bfd.Key]bfd.Outcome
}

func (f *fakeBFD) Set(sessions map[bfd.Key]bfd.Profile) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.desired = sessions
	f.sets++
	for key := range f.outcomes {
		if _, ok := sessions[key]; !ok {
			delete(f.outcomes, key)
		}
	}
	for key := range sessions {
		if _, ok := f.outcomes[key]; !ok {
			f.outcomes[key] = bfd.Outcome{State: bfd.Down}
		}
	}
}

func (f *fakeBFD) Outcomes() map[bfd.Key]bfd.Outcome {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.outcomes)
}

func (f *fakeBFD) Health() bfd.Health {
	return bfd.Health{RealTime: true, MemoryLocked: true, Dropped: map[bfd.Drop]uint64{}}
}

func (f *fakeBFD) change(key bfd.Key, change func(*bfd.Outcome)) {
	f.mu.Lock()
	o := f.outcomes[key]
	change(&o)
	f.outcomes[key] = o
	f.mu.Unlock()
	f.node.runner.Poke()
	synctest.Wait()
}

// fakeObjects writes into the tables that the speakers read, as the API server does.
type fakeObjects struct {
	node *fakeNode

	mu     sync.Mutex
	jobs   map[string]report.Job
	events []string
}

func (f *fakeObjects) Set(jobs map[string]report.Job) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.jobs = jobs
}

func (f *fakeObjects) Idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.jobs) == 0
}

// write does all that is to be written.
func (f *fakeObjects) write() {
	f.mu.Lock()
	jobs := f.jobs
	f.mu.Unlock()
	for _, job := range jobs {
		if err := job.Do(context.Background()); err != nil {
			f.node.rig.t.Error(err)
		}
	}
	synctest.Wait()
}

func (f *fakeObjects) writers() writers {
	api := f.node.rig.api
	return writers{
		peerNode: func(_ context.Context, peer, node string, word *lb.PeerNode) error {
			p, _ := api.peers.Get(peer)
			p.Status = maps.Clone(p.Status)
			if p.Status == nil {
				p.Status = map[string]lb.PeerNode{}
			}
			delete(p.Status, node)
			if word != nil {
				p.Status[node] = *word
			}
			api.peers.Set(peer, p)
			return nil
		},
		advertisement: func(_ context.Context, ad lb.BGPAdvertisement, c lb.Condition) (bool, error) {
			ad.Conditions = []lb.Condition{c}
			api.bgpAds.Set(ad.Name, ad)
			return true, nil
		},
		l2Advertisement: func(_ context.Context, ad lb.L2Advertisement, c lb.Condition) (bool, error) {
			ad.Conditions = []lb.Condition{c}
			api.advertisements.Set(ad.Name, ad)
			return true, nil
		},
		event: func(p lb.Peer, good bool, reason lb.Reason, message string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.events = append(f.events, fmt.Sprintf("%s %v %s %s", p.Name, good, reason, message))
		},
	}
}

// tor makes a router that all nodes speak to, and announces all pools to it.
func (r *rig) tor(name, address string, change func(*lb.Peer)) {
	p := lb.Peer{
		Name: name, LocalASN: 64500, PeerASN: 64501, Addr: netip.MustParseAddr(address), Port: 179,
		HoldTime:    90 * time.Second,
		ConnectTime: 10 * time.Second,
	}
	if change != nil {
		change(&p)
	}
	for _, n := range r.nodes {
		n.routers.connect(name, true)
	}
	r.api.peers.Set(name, p)
	if _, ok := r.api.bgpAds.Get("all"); !ok {
		r.api.bgpAds.Set("all", lb.BGPAdvertisement{Name: "all", AggregationLength: 32, AggregationLengthV6: 128})
	}
	synctest.Wait()
	time.Sleep(2 * flushTime)
	synctest.Wait()
}
