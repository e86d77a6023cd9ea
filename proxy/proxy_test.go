package main

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// fakeRules takes plans and confirms them when the test says so.
type fakeRules struct {
	log      *[]string
	config   plan.Config
	wanted   map[lb.Key]plan.Service
	outcomes map[lb.Key]plan.Outcome
	tried    bool
	sets     int
	// configured counts the calls of Configure.
	configured int
}

func (f *fakeRules) Configure(c plan.Config) {
	f.config = c
	f.configured++
}

func (f *fakeRules) Begin(s map[lb.Key]plan.Service) { f.Update(s) }

func (f *fakeRules) Update(s map[lb.Key]plan.Service) {
	f.sets++
	maps.Copy(f.wanted, s)
	for key := range s {
		*f.log = append(*f.log, "rules "+key.Name)
	}
}

func (f *fakeRules) Outcomes() (map[lb.Key]plan.Outcome, bool) {
	o := f.outcomes
	f.outcomes = map[lb.Key]plan.Outcome{}
	return o, f.tried
}

// confirm lets the kernel hold all that is wanted.
func (f *fakeRules) confirm() {
	for key, s := range f.wanted {
		f.outcomes[key] = plan.Outcome{Applied: s}
	}
	f.tried = true
}

type fakeFlows struct{ applied map[lb.Key]plan.Service }

func (f *fakeFlows) Begin(s map[lb.Key]plan.Service) { f.applied = maps.Clone(s) }

func (f *fakeFlows) Update(s map[lb.Key]plan.Service) { maps.Copy(f.applied, s) }

type fakeHealth struct {
	state     healthState
	addresses map[lb.Family][]netip.Addr
}

type healthState struct {
	Services map[lb.Key]health.Service
	health.Node
}

func (f *fakeHealth) Begin(all map[lb.Key]health.Service) { f.Update(all) }

func (f *fakeHealth) Update(changes map[lb.Key]health.Service) {
	for key, s := range changes {
		f.state.Services[key] = s
		if len(s.Local) == 0 {
			delete(f.state.Services, key)
		}
	}
}

func (f *fakeHealth) SetNode(n health.Node)                     { f.state.Node = n }
func (f *fakeHealth) SetAddresses(a map[lb.Family][]netip.Addr) { f.addresses = a }

type fakeFeed struct {
	log      *[]string
	all      map[lb.DeliveryKey]lb.Delivery
	updated  bool
	complete bool
}

func (f *fakeFeed) Begin(all map[lb.Key][]lb.Delivery) {
	clear(f.all)
	f.Update(all)
	f.complete = true
}

func (f *fakeFeed) Update(changes map[lb.Key][]lb.Delivery) {
	f.updated = true
	for key, deliveries := range changes {
		*f.log = append(*f.log, "feed "+key.Name)
		maps.DeleteFunc(f.all, func(k lb.DeliveryKey, _ lb.Delivery) bool { return k.Service == key })
		for _, d := range deliveries {
			f.all[d.Key()] = d
		}
	}
}

// fakeRescue has what it was told; nil before that.
type fakeRescue struct {
	wanted  map[netip.Addr]rescue.Origins
	confirm uint64
	handed  []int
	direct  []netip.Addr
	far     []netip.Addr
	updates int
}

func (f *fakeRescue) Begin(all map[netip.Addr]*rescue.Origins) {
	f.wanted = map[netip.Addr]rescue.Origins{}
	f.Update(all)
}

func (f *fakeRescue) Update(changes map[netip.Addr]*rescue.Origins) {
	f.updates++
	for vip, o := range changes {
		if o == nil {
			delete(f.wanted, vip)
		} else {
			f.wanted[vip] = *o
		}
	}
}

func (f *fakeRescue) SetGone([]netip.Addr, bool) {}

func (f *fakeRescue) SetNodes(_, _ []netip.Addr) {}

func (f *fakeRescue) SetHanded(links []int) { f.handed = links }

func (f *fakeRescue) SetDirect(vips, far []netip.Addr) { f.direct, f.far = vips, far }

func (f *fakeRescue) Confirm(number uint64) { f.confirm = number }

// bench is a proxy among fakes, with a clock of its own.
type bench struct {
	*proxy
	t        *testing.T
	clock    time.Time
	services *kubetest.Table[lb.Key, lb.Service]
	slices   *kubetest.Table[lb.Key, []lb.Slice]
	nodes    *kubetest.Table[string, lb.Node]
	networks *kubetest.Table[string, []netip.Prefix]
	pools    *kubetest.Table[string, []lb.Range]
	routers  *kubetest.Table[string, lb.Router]
	own      []lb.Interface
	rules    *fakeRules
	flows    *fakeFlows
	health   *fakeHealth
	feed     *fakeFeed
	update   lb.FeedUpdate // all that the speaker says
	heard    lb.FeedUpdate // of it, by the proxy
	mute     bool          // there is no speaker
	rescue   fakeRescue
	warnings []string
	latency  []time.Duration
	// programmed are latencies from a change's own time
	programmed []time.Duration
	order      []string // of what was told to feed and rules
}

func newBench(t *testing.T, change ...func(*settings)) *bench {
	b := &bench{
		t: t, clock: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC),
		services: kubetest.NewTable[lb.Key, lb.Service](), slices: kubetest.NewTable[lb.Key, []lb.Slice](),
		nodes:    kubetest.NewTable[string, lb.Node](),
		networks: kubetest.NewTable[string, []netip.Prefix](),
		pools:    kubetest.NewTable[string, []lb.Range](),
		routers:  kubetest.NewTable[string, lb.Router](),
		own: []lb.Interface{{Index: 7, Name: "eth0", Up: true, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Addresses: []netip.Prefix{
			netip.MustParsePrefix("172.31.0.1/24"), netip.MustParsePrefix("10.9.0.1/24")}}},
		flows:  &fakeFlows{applied: map[lb.Key]plan.Service{}},
		health: &fakeHealth{state: healthState{Services: map[lb.Key]health.Service{}}},
	}
	b.rules = &fakeRules{log: &b.order, wanted: map[lb.Key]plan.Service{}, outcomes: map[lb.Key]plan.Outcome{}}
	b.feed = &fakeFeed{log: &b.order, all: map[lb.DeliveryKey]lb.Delivery{}}
	set := settings{drain: 5 * time.Second, masqueradeBit: 14}
	for _, f := range change {
		f(&set)
	}
	b.proxy = newProxy("here", set, []lb.Family{lb.IPv4, lb.IPv6}, slog.New(slog.DiscardHandler),
		func() time.Time { return b.clock })
	b.from = sources{services: b.services, slices: b.slices, nodes: b.nodes,
		interfaces: func() ([]lb.Interface, bool) { return b.own, true }, update: b.hear, networks: b.networks,
		pools: b.pools, routers: b.routers}
	b.to = sinks{
		rules: b.rules, flows: b.flows, health: b.health, feed: b.feed, rescue: &b.rescue,
		warn: func(s lb.Service, reason lb.Reason, message string) {
			b.warnings = append(b.warnings, fmt.Sprint(s.Key.Name, " ", reason, " ", message))
		},
		latency:    func(d time.Duration) { b.latency = append(b.latency, d) },
		programmed: func(d time.Duration) { b.programmed = append(b.programmed, d) },
	}
	for _, table := range b.tables() {
		table.SetSynced(false) // until the test calls synced
	}
	b.nodes.Set("here", lb.Node{Name: "here", Addresses: []netip.Addr{netip.MustParseAddr("172.31.0.1")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.200.1.0/24")}})
	return b
}

// hear is what the feed's actor offers.
func (b *bench) hear() (news lb.FeedUpdate, ok bool) {
	if b.mute {
		return news, false
	}
	news = b.update.Since(b.heard)
	news.Number = b.update.Number
	b.heard = b.update
	return news, true
}

// run does one step and returns when the next is due.
// run makes a step with whatever the facts are made of as it is now.
func (b *bench) run() time.Duration {
	b.t.Helper()
	b.markFacts()
	return b.runAlone()
}

// runAlone makes a step after changes of Services and slices alone.
func (b *bench) runAlone() time.Duration {
	b.t.Helper()
	again, err := b.step(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return again
}

func (b *bench) tables() []interface{ SetSynced(bool) } {
	return []interface{ SetSynced(bool) }{b.services, b.slices, b.nodes, b.networks, b.pools,
		b.routers}
}

func (b *bench) synced() {
	for _, table := range b.tables() {
		table.SetSynced(true)
	}
}

// clusterIP returns an address that the API server could have given to a Service of this name.
func clusterIP(name string) netip.Addr {
	h := fnv.New32()
	h.Write([]byte(name))
	n := h.Sum32()
	return netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)})
}

func key(name string) lb.Key { return lb.Key{Namespace: "default", Name: name} }

// put creates or changes a Service with a VIP and ready endpoints on this node.
func (b *bench) put(name, vip string, endpoints ...string) {
	b.services.Set(key(name), lb.Service{
		Key: key(name), UID: name, Type: lb.LoadBalancer, ExternalPolicy: lb.Local, InternalPolicy: lb.Cluster,
		HealthCheckNodePort: 32000,
		ClusterIPs:          []netip.Addr{clusterIP(name)},
		Ports:               []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
		Ingress:             []lb.Ingress{{Addr: netip.MustParseAddr(vip)}},
	})
	slice := lb.Slice{Service: key(name), Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for _, e := range endpoints {
		slice.Endpoints = append(slice.Endpoints,
			lb.Endpoint{Addr: netip.MustParseAddr(e), Node: "here", Ready: true, Serving: true})
	}
	b.slices.Set(key(name), []lb.Slice{slice})
	b.mark(key(name))
}

func (b *bench) delete(name string) {
	b.services.Delete(key(name))
	b.slices.Delete(key(name))
	b.mark(key(name))
}

// delivery returns what the feed says of a VIP, as "local counts", "refused" or "".
func (b *bench) delivery(name, vip string) string {
	d, ok := b.feed.all[lb.DeliveryKey{Service: key(name), VIP: netip.MustParseAddr(vip)}]
	switch {
	case !ok:
		return ""
	case d.Refusal != nil:
		return "refused"
	}
	return fmt.Sprint(d.LocalReady)
}

func (b *bench) expectDelivery(name, vip, want string) {
	b.t.Helper()
	if got := b.delivery(name, vip); got != want {
		b.t.Errorf("the feed says %q of %s, want %q", got, vip, want)
	}
}

// frontends returns the VIPs of which the rules of a Service are wanted; lingering ones end in a
// question mark.
func (b *bench) frontends(name string) string {
	var all []string
	for _, p := range b.rules.wanted[key(name)].Ports {
		for _, f := range p.Frontends {
			if f.Kind == plan.LoadBalancer {
				all = append(all, f.Addr.String()+map[bool]string{true: "?"}[f.Lingering])
			}
		}
	}
	return strings.Join(all, " ")
}

func (b *bench) expectFrontends(name, want string) {
	b.t.Helper()
	if got := b.frontends(name); got != want {
		b.t.Errorf("rules of %s for %q, want %q", name, got, want)
	}
}

func TestContract7NothingIsWrittenBeforeAllIsKnown(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	for _, know := range []func(){
		func() {}, func() { b.services.SetSynced(true) },
		func() { b.services.SetSynced(false); b.slices.SetSynced(true) },
	} {
		know()
		b.run()
		if b.rules.sets != 0 || b.feed.complete || len(b.feed.all) > 0 || b.feed.updated {
			t.Fatalf("%d writes, feed %v, told anything %v", b.rules.sets, b.feed.all, b.feed.updated)
		}
		if b.ready() == nil {
			t.Error("ready")
		}
	}
	b.synced()
	b.run()
	if len(b.rules.wanted) != 1 || b.feed.complete || !b.feed.updated {
		t.Errorf("wanted %v, feed complete %v, told anything %v", b.rules.wanted, b.feed.complete, b.feed.updated)
	}
}

func TestNodeCIDRWaitsForTheNode(t *testing.T) {
	b := newBench(t, func(s *settings) { s.nodeCIDR = true })
	node, _ := b.nodes.Get("here")
	b.nodes.Delete("here")
	b.synced()
	b.run()
	if b.rules.sets != 0 {
		t.Fatal("wrote without knowing the pods' network")
	}
	b.nodes.Set("here", node)
	b.run()
	if !reflect.DeepEqual(b.rules.config.Pods.Prefixes, node.PodCIDRs) {
		t.Errorf("pods' networks %v", b.rules.config.Pods.Prefixes)
	}
}

func TestContract1OnlyWhatIsConfirmedIsSaid(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	b.expectDelivery("web", "192.0.2.1", "refused")
	if b.health.state.Services[key("web")].Local[lb.IPv4] != 0 {
		t.Error("the health port counts what the kernel does not have")
	}
	b.clock = b.clock.Add(time.Second)
	b.rules.confirm()
	b.run()
	b.expectDelivery("web", "192.0.2.1", "1")
	if !b.feed.complete || b.ready() != nil || b.health.state.Services[key("web")].Local[lb.IPv4] != 1 {
		t.Errorf("complete %v, ready %v, health %v", b.feed.complete, b.ready(), b.health.state)
	}
	if !slices.Equal(b.latency, []time.Duration{time.Second}) {
		t.Errorf("latency %v", b.latency)
	}
	if _, ok := b.flows.applied[key("web")]; !ok {
		t.Error("conntrack was not told")
	}
}

// The health port goes when the policy becomes Cluster, and comes back with Local.
func TestContract4HealthPortFollowsThePolicy(t *testing.T) {
	b := newBench(t)
	b.synced()
	for i, policy := range []lb.TrafficPolicy{lb.Local, lb.Cluster, lb.Local} {
		b.put("web", "192.0.2.1", "10.200.1.2")
		svc, _ := b.services.Get(key("web"))
		svc.ExternalPolicy = policy
		b.services.Set(key("web"), svc)
		b.run()
		b.rules.confirm()
		b.run()
		got, open := b.health.state.Services[key("web")]
		if open != (policy == lb.Local) || open && (got.Port != 32000 || got.Local[lb.IPv4] != 1) {
			t.Errorf("step %d, policy %s: %+v, open %v", i, policy, got, open)
		}
	}
}

// Contract 4, too: what goes counts no more at once, what comes counts once it is confirmed, and
// nothing flaps in between.
func TestContract4CountsFollowEndpoints(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2", "10.200.1.3")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.put("web", "192.0.2.1", "10.200.1.3", "10.200.1.4")
	b.order = nil
	b.run()
	b.expectDelivery("web", "192.0.2.1", "1")
	if got := b.health.state.Services[key("web")].Local[lb.IPv4]; got != 1 {
		t.Errorf("health counts %d", got)
	}
	if want := []string{"feed web", "rules web"}; !slices.Equal(b.order, want) {
		t.Errorf("order %v, want %v", b.order, want)
	}
	b.rules.confirm()
	b.run()
	b.expectDelivery("web", "192.0.2.1", "2")
}

func TestContract3VIPsOutliveTheirAnnouncement(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(b *bench)
		live string // the VIP after
	}{
		{"Service deleted", func(b *bench) { b.delete("web") }, ""},
		{"VIP changed", func(b *bench) { b.put("web", "192.0.2.2", "10.200.1.2") }, "192.0.2.2 "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t)
			b.put("web", "192.0.2.1", "10.200.1.2")
			b.synced()
			b.run()
			b.rules.confirm()
			b.run()
			tt.do(b)
			if again := b.run(); again != 5*time.Second {
				t.Errorf("next step in %s", again)
			}
			b.expectDelivery("web", "192.0.2.1", "")
			b.expectFrontends("web", tt.live+"192.0.2.1?")
			b.rules.confirm()
			b.clock = b.clock.Add(5*time.Second - 1)
			b.run()
			b.expectFrontends("web", tt.live+"192.0.2.1?")
			b.clock = b.clock.Add(1)
			if again := b.run(); again != 0 {
				t.Errorf("next step in %s", again)
			}
			b.expectFrontends("web", strings.TrimSpace(tt.live))
			b.rules.confirm()
			b.run()
			if _, known := b.records[key("web")]; known != (tt.live != "") {
				t.Errorf("known: %v", known)
			}
		})
	}
}

// A VIP that comes back, to its Service or to another one, does not linger any more.
func TestLingeringYieldsToTheLiving(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	b.rules.confirm()
	b.delete("web")
	b.run()
	b.expectFrontends("web", "192.0.2.1?")
	b.put("other", "192.0.2.1", "10.200.1.9")
	b.run()
	b.expectFrontends("web", "")
	b.expectFrontends("other", "192.0.2.1")
	b.delete("other")
	b.run()
	b.expectFrontends("other", "192.0.2.1?")
	b.put("other", "192.0.2.1", "10.200.1.9")
	b.run()
	b.expectFrontends("other", "192.0.2.1")
	// The other way round: the VIP is taken over first.
	b.put("web", "192.0.2.7", "10.200.1.2")
	b.run()
	b.put("other", "192.0.2.7", "10.200.1.9")
	b.run()
	b.delete("web")
	b.run()
	b.expectFrontends("web", "")
	b.expectFrontends("other", "192.0.2.7 192.0.2.1?")
}

func TestContract10FailuresAreSaid(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	for range 3 { // tried again and again
		b.rules.outcomes[key("web")] = plan.Outcome{Applied: plan.Service{Key: key("web")}, Err: errors.New("no lock"),
			Alone: []lb.Family{lb.IPv4, lb.IPv6}}
		b.rules.tried = true
		b.clock = b.clock.Add(time.Hour)
		b.run()
	}
	b.expectDelivery("web", "192.0.2.1", "refused")
	if want := []string{"web NotProgrammed here: the kernel refused the rules: no lock"}; !slices.Equal(b.warnings,
		want) {
		t.Errorf("warnings %q, want %q", b.warnings, want)
	}
	if st := slices.Collect(b.proxy.services())[0]; st.State != stateFailed ||
		st.VIPs[0].Reason != lb.ReasonNotProgrammed ||
		!strings.Contains(st.VIPs[0].Message, "no lock") {
		t.Errorf("status %+v", st)
	}
	if !b.health.state.Unapplied[lb.IPv4].IsZero() {
		t.Error("one Service's own failure makes the node unhealthy")
	}
	b.rules.confirm()
	b.run()
	b.expectDelivery("web", "192.0.2.1", "1")
}

// Contract clause 11: neither does a Service that is written in parts for longer than that.
func TestContract11AnUnfinishedServiceIsNotStale(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	b.rules.outcomes[key("web")] = plan.Outcome{Applied: plan.Service{Key: key("web")}, Alone: []lb.Family{lb.IPv4}}
	b.clock = b.clock.Add(time.Hour)
	b.run()
	if got := b.health.state.Unapplied[lb.IPv4]; !got.IsZero() {
		t.Errorf("unapplied since %s", got)
	}
	if st := slices.Collect(b.proxy.services())[0]; st.State != statePending {
		t.Errorf("status %+v", st)
	}
}

// A Service that changes faster than the kernel's writer writes never has its newest plan in the kernel. Its oldest
// change that the kernel lacks is young all the same: else the node would turn away the traffic of all Services.
func TestContract11AServiceThatNeverRestsIsNotStale(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	oldest := func() time.Duration { return b.clock.Sub(b.health.state.Unapplied[lb.IPv4]) }
	change := func(i int) {
		b.put("web", "192.0.2.1", fmt.Sprintf("10.200.1.%d", 3+i))
		b.clock = b.clock.Add(time.Second)
		b.run()
	}
	for i := range 100 {
		before := maps.Clone(b.rules.wanted)
		change(i)
		for k, s := range before {
			b.rules.outcomes[k] = plan.Outcome{Applied: s}
		}
		b.run()
		if oldest() > 4*time.Second {
			t.Fatalf("after %d changes in as many seconds, each of which the kernel has a second later, the oldest waits for %s",
				i, oldest())
		}
	}
	// It waits once the kernel has no more of them.
	for i := range 100 {
		change(100 + i)
	}
	if oldest() < 100*time.Second {
		t.Errorf("the kernel has had nothing for 100 s, and the oldest change waits for %s", oldest())
	}
	b.rules.confirm()
	b.run()
	if got := b.health.state.Unapplied[lb.IPv4]; !got.IsZero() {
		t.Errorf("unapplied since %s although all is confirmed", got)
	}
}

// A failure that is no Service's own makes the node unhealthy in the end.
func TestUnappliedChangesAreTold(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	start := b.clock
	b.synced()
	b.run()
	b.clock = b.clock.Add(time.Minute)
	b.rules.outcomes[key("web")] = plan.Outcome{Applied: plan.Service{Key: key("web")}, Err: errors.New("no lock")}
	b.put("web", "192.0.2.1", "10.200.1.3") // a newer change does not make it younger
	b.run()
	if got := b.health.state.Unapplied; got[lb.IPv4] != start || !got[lb.IPv6].IsZero() {
		t.Errorf("unapplied %v, want IPv4 since %s", got, start)
	}
	b.rules.confirm()
	b.run()
	if got := b.health.state.Unapplied[lb.IPv4]; !got.IsZero() {
		t.Errorf("unapplied since %s although all is confirmed", got)
	}
}

func TestContract4LeavingNode(t *testing.T) {
	b := newBench(t)
	b.synced()
	b.run()
	if !b.health.state.Known || b.health.state.Leaving != "" {
		t.Errorf("health %+v", b.health.state)
	}
	node, _ := b.nodes.Get("here")
	node.Leaving = lb.ReasonNodeLeaving
	b.nodes.Set("here", node)
	b.run()
	if b.health.state.Leaving != lb.ReasonNodeLeaving {
		t.Errorf("health %+v", b.health.state)
	}
	b.nodes.Delete("here")
	b.run()
	if b.health.state.Known || b.health.state.Leaving != lb.ReasonNodeLeaving {
		t.Errorf("the Node was deleted; health %+v", b.health.state)
	}
}

func TestNodePortAddresses(t *testing.T) {
	at := func(addrs ...string) []netip.Addr {
		all := []netip.Addr{}
		for _, a := range addrs {
			all = append(all, netip.MustParseAddr(a))
		}
		return all
	}
	for _, tt := range []struct {
		flag     string
		want     map[lb.Family][]netip.Addr
		loopback bool
	}{
		{"", nil, true},
		{"10.0.0.0/8", map[lb.Family][]netip.Addr{lb.IPv4: at("10.9.0.1")}, false},
		{"172.31.0.0/16,127.0.0.0/8", map[lb.Family][]netip.Addr{lb.IPv4: at("172.31.0.1")}, true},
		{"192.0.2.0/24", map[lb.Family][]netip.Addr{lb.IPv4: at()}, false},
		{"primary", map[lb.Family][]netip.Addr{lb.IPv4: at("172.31.0.1")}, false},
		{"2001:db8::/32", map[lb.Family][]netip.Addr{lb.IPv6: at()}, true},
	} {
		f := flags{mode: "auto", detectLocalMode: "ClusterCIDR", externalIPs: "allow", serviceCounters: "off",
			pathCheck: pathStrict, localhostNodePorts: true, nodePortAddresses: strings.Split(tt.flag, ",")}
		if tt.flag == "" {
			f.nodePortAddresses = nil
		}
		set, err := f.settings()
		if err != nil {
			t.Fatal(err)
		}
		b := newBench(t, func(s *settings) { *s = set })
		b.synced()
		b.run()
		if got := b.rules.config; !reflect.DeepEqual(got.NodePortAddresses, tt.want) || got.LoopbackNodePorts != tt.loopback {
			t.Errorf("%q: addresses %v, loopback %v; want %v, %v", tt.flag, got.NodePortAddresses, got.LoopbackNodePorts,
				tt.want, tt.loopback)
		}
		if !reflect.DeepEqual(b.health.addresses, tt.want) {
			t.Errorf("%q: health ports at %v", tt.flag, b.health.addresses)
		}
	}
}

// leftovers are what kube-proxy in mode ipvs and a node-local DNS cache leave on a node: n
// addresses of Services.
func leftovers(n int) []lb.Interface {
	ipvs := lb.Interface{Name: "kube-ipvs0", Disabled: true, NoARP: true}
	for i := range n {
		v4 := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		v6 := netip.AddrFrom16([16]byte{0xfd, 0x96, 14: byte(i >> 8), 15: byte(i)})
		ipvs.Addresses = append(ipvs.Addresses, netip.PrefixFrom(v4, 32), netip.PrefixFrom(v6, 128))
	}
	return []lb.Interface{ipvs,
		{Name: "nodelocaldns", Up: true, NoARP: true, Addresses: []netip.Prefix{
			netip.MustParsePrefix("169.254.20.10/32"), netip.MustParsePrefix("10.96.0.10/32")}},
		{Name: "off", Disabled: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.7.0.1/24")}},
		{Name: "nocarrier", Addresses: []netip.Prefix{netip.MustParsePrefix("10.8.0.1/24")}}}
}

// Node ports are served at the node's own addresses, in both modes.
func TestNodePortsAreNotServedAtLeftovers(t *testing.T) {
	v6 := lb.Interface{Name: "eth1", Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("2001:db8::7/64"),
		netip.MustParsePrefix("fe80::1/64")}}
	lo := lb.Interface{Name: "lo", Up: true, Loopback: true, Addresses: []netip.Prefix{
		netip.MustParsePrefix("127.0.0.1/8"), netip.MustParsePrefix("::1/128")}}
	for _, tt := range []struct {
		name   string
		change func(*settings)
		extra  []lb.Interface
		v4, v6 string
	}{
		{"nftables", func(s *settings) { s.allAddresses = true }, leftovers(400), "[10.8.0.1 10.9.0.1 172.31.0.1]",
			"[2001:db8::7]"},
		{"nftables, and an address in a VRF", func(s *settings) { s.allAddresses = true }, []lb.Interface{{Name: "up0",
			VRF: "red", Up: true, Enslaved: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.99.0.1/24")}}},
			"[10.9.0.1 10.99.0.1 172.31.0.1]", "[2001:db8::7]"},
		{"iptables", func(s *settings) { s.loopbackNodePorts = true }, leftovers(400),
			"[10.8.0.1 10.9.0.1 172.31.0.1 127.0.0.1]", "[2001:db8::7]"},
		{"iptables, not at 127.0.0.1", func(*settings) {}, leftovers(400), "[10.8.0.1 10.9.0.1 172.31.0.1]",
			"[2001:db8::7]"},
		{"iptables, an interface that is down", func(*settings) {}, leftovers(1)[2:],
			"[10.8.0.1 10.9.0.1 172.31.0.1]", "[2001:db8::7]"},
		{"iptables, kube-router's", func(*settings) {}, []lb.Interface{{Name: "kube-dummy-if", Up: true, NoARP: true,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.96.0.1/32"), netip.MustParsePrefix("fd96::1/128")}}},
			"[10.9.0.1 172.31.0.1]", "[2001:db8::7]"},
		{"iptables, no leftovers", func(*settings) {}, leftovers(1)[3:], "[]", "[]"},
		{"limited", func(s *settings) {
			s.allAddresses = true
			s.nodePorts = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
		}, leftovers(400), "[10.8.0.1 10.9.0.1]", "[]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, tt.change)
			b.own = slices.Concat(b.own, []lb.Interface{lo, v6}, tt.extra)
			b.synced()
			b.run()
			at := b.rules.config.NodePortAddresses
			if got4, got6 := fmt.Sprint(at[lb.IPv4]), fmt.Sprint(at[lb.IPv6]); got4 != tt.v4 || got6 != tt.v6 {
				t.Errorf("node ports at %s and %s, want %s and %s", got4, got6, tt.v4, tt.v6)
			}
		})
	}
}

// The interfaces of pods come and go, with link-local addresses and with the gateway's: no step is
// made for them, and one made all the same plans nothing.
func TestInterfacesOfPodsPlanNothing(t *testing.T) {
	pokes := 0
	changed := ifAddressesChange(func() { pokes++ })
	b := newBench(t, func(s *settings) { s.allAddresses = true })
	gateway := netip.MustParsePrefix("10.200.1.1/32")
	veth := func(n int) lb.Interface {
		return lb.Interface{Index: n, Name: fmt.Sprint("veth", n), Up: true,
			Addresses: []netip.Prefix{gateway, netip.MustParsePrefix(fmt.Sprintf("fe80::%d/64", n))}}
	}
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.own = append(b.own, veth(1))
	changed(b.own)
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	sets, configured := b.rules.sets, b.rules.configured
	for n := range 5 {
		b.own = append(b.own, veth(n+2))
		changed(b.own)
		b.run()
	}
	changed(b.own[:len(b.own)-2])
	if pokes != 1 || b.rules.sets != sets || b.rules.configured != configured {
		t.Errorf("%d pokes, %d updates and %d configurations for interfaces of pods", pokes, b.rules.sets-sets,
			b.rules.configured-configured)
	}
	b.own[0].Addresses = b.own[0].Addresses[:1]
	changed(b.own)
	b.run()
	if pokes != 2 || b.rules.configured != configured+1 {
		t.Errorf("an address of the node has gone: %d pokes, %d configurations", pokes, b.rules.configured)
	}
	if changed(leftovers(3)); pokes != 3 {
		t.Error("other interfaces made no step")
	}
	if changed(append(leftovers(3), lb.Interface{Name: "up0", VRF: "red"})); pokes != 4 {
		t.Error("an interface in a VRF made no step")
	}
}

// kube-proxy's flag for node ports at 127.0.0.1, with its name and default.
func TestLocalhostNodePorts(t *testing.T) {
	for arguments, want := range map[string]bool{
		"": true, "--iptables-localhost-nodeports": true, "--iptables-localhost-nodeports=false": false,
		"--iptables-localhost-nodeports=false --nodeport-addresses=127.0.0.0/8": false,
		"--nodeport-addresses=10.0.0.0/8":                                       false,
	} {
		var f flags
		set := pflag.NewFlagSet("", pflag.ContinueOnError)
		f.add(set)
		if err := set.Parse(strings.Fields(arguments)); err != nil {
			t.Fatal(err)
		}
		s, err := f.settings()
		if err != nil || s.loopbackNodePorts != want {
			t.Errorf("%q: node ports at 127.0.0.1: %v, want %v (%v)", arguments, s.loopbackNodePorts, want, err)
		}
	}
}

func TestBadFlags(t *testing.T) {
	for flag, change := range map[string]func(*flags){
		"--scheduler: \"best\"":                 func(f *flags) { f.scheduler = "best" },
		"--mode: \"ipvs\"":                      func(f *flags) { f.mode = "ipvs" },
		"--rescue-limit: -1":                    func(f *flags) { f.rescueLimit = -1 },
		"--namespace-limit: -1":                 func(f *flags) { f.namespaceLimit = -1 },
		"--flow-offload: no rule could count":   func(f *flags) { f.flowOffload, f.serviceCounters = true, "external" },
		"--path-check: \"on\"":                  func(f *flags) { f.pathCheck = "on" },
		"--rescue-tunnel-port: 65536":           func(f *flags) { f.rescueTunnelPort = 65536 },
		"--masquerade-bit":                      func(f *flags) { f.masqueradeBit = 32 },
		"--drain-time":                          func(f *flags) { f.drain = -1 },
		"--cluster-cidr: \"10.0.0.0/33\"":       func(f *flags) { f.clusterCIDR = "10.0.0.0/8,10.0.0.0/33" },
		"--service-cidr: \"10.96.0.0\"":         func(f *flags) { f.serviceCIDRs = []string{"fd00:96::/112", "10.96.0.0"} },
		"--service-cidr: 0.0.0.0/0 is larger":   func(f *flags) { f.serviceCIDRs = []string{"0.0.0.0/0"} },
		"--service-cidr: ::/0 is larger":        func(f *flags) { f.serviceCIDRs = []string{"::/0"} },
		"--detect-local-mode: \"x\"":            func(f *flags) { f.detectLocalMode = "x" },
		"needs --pod-bridge-interface":          func(f *flags) { f.detectLocalMode = "BridgeInterface" },
		"needs --pod-interface-name-prefix":     func(f *flags) { f.detectLocalMode = "InterfaceNamePrefix" },
		"\"a b\" is not a name of an interface": func(f *flags) { f.detectLocalMode, f.podBridge = "BridgeInterface", "a b" },
		"--nodeport-addresses: \"x\"":           func(f *flags) { f.nodePortAddresses = []string{"x"} },
		"--external-ips: \"10.0.0.0\"":          func(f *flags) { f.externalIPs = "192.0.2.0/24, 10.0.0.0" },
		"--external-ips: \"\"":                  func(f *flags) { f.externalIPs = "" },
		"--healthz-bind-address: \"localhost\"": func(f *flags) { f.healthzBindAddress = "localhost" },
	} {
		f := flags{mode: "auto", detectLocalMode: "ClusterCIDR", healthzBindAddress: "0.0.0.0:10256", externalIPs: "allow",
			serviceCounters: "off", pathCheck: pathStrict}
		change(&f)
		if _, err := f.settings(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("error %v does not say %q", err, flag)
		}
	}
}

// setPolicy changes the external policy of a Service, and moves its endpoints to another node.
func (b *bench) setPolicy(name string, policy lb.TrafficPolicy) {
	svc, _ := b.services.Get(key(name))
	svc.ExternalPolicy = policy
	b.services.Set(key(name), svc)
	b.mark(key(name))
}

func (b *bench) moveEndpoints(name string) {
	all, _ := b.slices.Get(key(name))
	for _, s := range all {
		for i := range s.Endpoints {
			s.Endpoints[i].Node = "there"
		}
	}
	b.mark(key(name))
}

// The policy becomes Local on a node without endpoints: the speaker and the health port hear it at
// once, and the rules go on until what is in flight has come.
func TestContract3RulesOutliveTheChangeToLocal(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.moveEndpoints("web")
	b.setPolicy("web", lb.Cluster)
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	vip := lb.DeliveryKey{Service: key("web"), VIP: netip.MustParseAddr("192.0.2.1")}
	expect := func(when string, deliverable lb.Reason, action plan.Action) {
		t.Helper()
		d := b.feed.all[vip]
		if got := d.Deliverable(); got != deliverable {
			t.Errorf("%s: the feed says %q, want %q", when, got, deliverable)
		}
		for _, f := range b.rules.wanted[key("web")].Ports[0].Frontends {
			if f.Kind == plan.LoadBalancer && f.Action != action {
				t.Errorf("%s: the rules %s, want %s", when, f.Action, action)
			}
		}
	}
	expect("policy Cluster", "", plan.ToCluster)
	b.setPolicy("web", lb.Local)
	if again := b.run(); again <= 0 || again > 5*time.Second {
		t.Errorf("the next step is due in %s", again)
	}
	expect("at once", lb.ReasonNoLocalBackends, plan.ToCluster)
	b.rules.confirm()
	b.run()
	if h := b.health.state.Services[key("web")]; h.Port != 32000 || h.Local[lb.IPv4] != 0 {
		t.Errorf("health %+v", h)
	}
	b.clock = b.clock.Add(3 * time.Second)
	b.setPolicy("web", lb.Cluster)
	b.run()
	expect("policy Cluster again", "", plan.ToCluster)
	b.setPolicy("web", lb.Local)
	b.clock = b.clock.Add(3 * time.Second)
	b.run()
	expect("3 s after the last change", lb.ReasonNoLocalBackends, plan.ToCluster)
	b.clock = b.clock.Add(5 * time.Second)
	if again := b.run(); again != 0 {
		t.Errorf("after the drain time there is a step due in %s", again)
	}
	expect("after the drain time", lb.ReasonNoLocalBackends, plan.Drop)
	b.delete("web")
	b.run()
	b.rules.confirm()
	b.run()
	b.clock = b.clock.Add(time.Minute)
	b.run()
	b.rules.confirm()
	b.run()
	if len(b.records) != 0 || len(b.lingers.policies) != 0 {
		t.Errorf("%d records, %d policies are kept", len(b.records), len(b.lingers.policies))
	}
}

// Stories of random changes, confirmations and failures end in the plans of a fresh start, whatever
// the order and however often told.
func TestRandomStoriesEndAsAFreshStart(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 3))
		b := newBench(t)
		b.synced()
		for range 60 {
			name := fmt.Sprint("svc-", r.IntN(4))
			switch r.IntN(6) {
			case 0:
				b.delete(name)
			case 1:
				b.rules.confirm()
			case 2:
				b.rules.outcomes[key(name)] = plan.Outcome{Applied: b.rules.wanted[key(name)], Err: errors.New("no"),
					Alone: []lb.Family{lb.IPv4, lb.IPv6}[:r.IntN(3)]}
			default:
				b.put(name, fmt.Sprint("192.0.2.", r.IntN(3)), fmt.Sprint("10.200.1.", r.IntN(3)+2))
				if r.IntN(2) == 0 {
					b.moveEndpoints(name)
				}
				b.setPolicy(name, []lb.TrafficPolicy{lb.Local, lb.Cluster}[r.IntN(2)])
			}
			b.clock = b.clock.Add(time.Duration(r.IntN(3000)) * time.Millisecond)
			for range r.IntN(3) {
				b.run()
			}
		}
		b.clock = b.clock.Add(time.Minute)
		b.run()
		b.clock = b.clock.Add(time.Minute)
		b.run()
		b.rules.confirm()
		b.run()
		fresh := newBench(t)
		fresh.services.Replace(b.services.All())
		fresh.slices.Replace(b.slices.All())
		fresh.synced()
		fresh.run()
		fresh.rules.confirm()
		fresh.run()
		maps.DeleteFunc(b.rules.wanted, func(_ lb.Key, s plan.Service) bool { return len(s.Ports) == 0 })
		same := cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, netip.Prefix{})
		if d := cmp.Diff(fresh.rules.wanted, b.rules.wanted, same); d != "" {
			t.Errorf("seed %d: plans (-fresh +got):\n%s", seed, d)
		}
		if d := cmp.Diff(fresh.feed.all, b.feed.all, same); d != "" {
			t.Errorf("seed %d: feed (-fresh +got):\n%s", seed, d)
		}
		if d := cmp.Diff(fresh.health.state, b.health.state, same); d != "" {
			t.Errorf("seed %d: health (-fresh +got):\n%s", seed, d)
		}
		if len(b.records) != len(fresh.records) {
			t.Errorf("seed %d: %d records, want %d", seed, len(b.records), len(fresh.records))
		}
	}
}

func TestTheZoneOfTheNodeIsFollowed(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2", "10.200.1.3")
	web, _ := b.slices.Get(key("web"))
	web[0].Endpoints[0].ForZones = []string{"a"}
	web[0].Endpoints[1].ForZones = []string{"b"}
	b.synced()
	for zone, want := range map[string]int{"": 2, "a": 1, "c": 2} {
		node, _ := b.nodes.Get("here")
		node.Labels = labels.Set{labelZone: zone}
		b.nodes.Set("here", node)
		b.run()
		if got := b.rules.wanted[key("web")].Ports[0].Backends; len(got.Cluster) != want || len(got.Local) != 2 {
			t.Errorf("zone %q: %d endpoints for policy Cluster and %d for Local, want %d and 2", zone, len(got.Cluster),
				len(got.Local), want)
		}
	}
}

// The time from a pod's change to its rules, by the clock of whoever wrote the slice.
func TestProgrammingTime(t *testing.T) {
	b := newBench(t)
	change := func(ago time.Duration, endpoints ...string) {
		b.put("web", "192.0.2.1", endpoints...)
		web, _ := b.slices.Get(key("web"))
		web[0].Triggered = b.clock.Add(-ago)
		b.run()
		b.rules.confirm()
		b.clock = b.clock.Add(time.Second)
		b.run()
	}
	b.synced()
	change(time.Hour, "10.200.1.2") // before the proxy began
	change(500*time.Millisecond, "10.200.1.2", "10.200.1.3")
	change(500*time.Millisecond, "10.200.1.2", "10.200.1.3") // changes no rule
	b.mark(key("web"))
	b.run()
	if want := []time.Duration{1500 * time.Millisecond}; !slices.Equal(b.programmed, want) {
		t.Errorf("%v, want %v", b.programmed, want)
	}
}

// What a Service asks for and does not get is said once, and counted while it is so.
// A source range that cannot be read is said.
func TestContract10InvalidSourceRangesAreSaid(t *testing.T) {
	b := newBench(t)
	b.synced()
	b.put("web", "198.51.100.1", "10.200.1.1")
	svc, _ := b.services.Get(key("web"))
	svc.InvalidRange = `"::ffff:10.0.0.0/104"`
	b.services.Set(key("web"), svc)
	for range 2 {
		b.mark(key("web"))
		b.run()
	}
	want := `web SourceRangeInvalid here: spec.loadBalancerSourceRanges: "::ffff:10.0.0.0/104" is no network of IPv4 ` +
		"or IPv6, and admits nobody"
	if got := strings.Join(b.warnings, "; "); got != want {
		t.Errorf("warned %q, want %q", got, want)
	}
}

func TestContract10UnknownSchedulersAreSaid(t *testing.T) {
	b := newBench(t)
	b.mode = modeIptables
	b.synced()
	ask := func(scheduler string) {
		t.Helper()
		b.put("web", "198.51.100.1", "10.200.1.1")
		svc, _ := b.services.Get(key("web"))
		svc.Scheduler = scheduler
		b.services.Set(key("web"), svc)
		for range 2 {
			b.mark(key("web"))
			b.run()
		}
	}
	for _, tt := range []struct {
		scheduler, mode, want string
	}{
		{"", modeIptables, ""},
		{"random", modeIptables, ""},
		{
			"best", modeIptables,
			`web SchedulerIgnored here: annotation landfall.dev/scheduler: "best" is none of ` + plan.Schedulers +
				"; connections are spread at random"},
		{
			"maglev", modeIptables,
			`web SchedulerIgnored here: annotation landfall.dev/scheduler: "maglev" needs a proxy in nftables mode; in iptables mode connections are spread at random`},
		{"maglev", modeNftables, ""},
		{"rr", modeNftables, ""},
		{"wlc", modeNftables, ""},
		{"wlc", modeIptables, `web SchedulerIgnored here: annotation landfall.dev/scheduler: "wlc" needs a proxy in nftables ` +
			"mode; in iptables mode connections are spread at random"},
	} {
		b.mode, b.warnings = tt.mode, nil
		ask(tt.scheduler)
		if got := strings.Join(b.warnings, "; "); got != tt.want {
			t.Errorf("%q in mode %s: warned %q, want %q", tt.scheduler, tt.mode, got, tt.want)
		}
		counted := 0
		if tt.want != "" {
			counted = 1
		}
		if n := b.counts.advised[true]; n != counted {
			t.Errorf("%q in mode %s: %d Services counted, want %d", tt.scheduler, tt.mode, n, counted)
		}
	}
	b.delete("web")
	b.run()
}

func TestContract10WeightsOfSlicesAreSaid(t *testing.T) {
	const ignored = "web SchedulerIgnored here: annotation landfall.dev/weight of EndpointSlice default/web-1: "
	b := newBench(t)
	b.synced()
	for _, tt := range []struct {
		scheduler string
		slice     lb.Slice
		want      string
	}{
		{"wrr", lb.Slice{Weight: 7}, ""},
		{"rr", lb.Slice{Weight: 7}, ignored +
			"the scheduler round-robin has no weights; ask for one that does with annotation landfall.dev/scheduler: wrr"},
		{"wrr", lb.Slice{InvalidWeight: `"0": want a weight from 1 to 100`}, ignored +
			`"0": want a weight from 1 to 100; its endpoints have the weight 1`},
		{"wrr", lb.Slice{}, ""},
	} {
		b.mode, b.warnings = modeNftables, nil
		b.put("web", "198.51.100.1", "10.200.1.1")
		svc, _ := b.services.Get(key("web"))
		svc.Scheduler = tt.scheduler
		b.services.Set(key("web"), svc)
		endpoints, _ := b.slices.Get(key("web"))
		endpoints = slices.Clone(endpoints)
		endpoints[0].Key = key("web-1")
		endpoints[0].Weight, endpoints[0].InvalidWeight = tt.slice.Weight, tt.slice.InvalidWeight
		b.slices.Set(key("web"), endpoints)
		b.mark(key("web"))
		b.run()
		if got := strings.Join(b.warnings, "; "); got != tt.want {
			t.Errorf("%s, %+v: warned %q, want %q", tt.scheduler, tt.slice, got, tt.want)
		}
	}
}

// The metrics count each Service as what it is, whatever it was before.
func TestCountsFollowServices(t *testing.T) {
	b := newBench(t)
	b.synced()
	check := func(states map[string]int, external int) {
		t.Helper()
		for _, state := range []string{stateApplied, statePending, stateFailed} {
			if got := b.counts.states[state]; got != states[state] {
				t.Errorf("%d Services are %s, want %d", got, state, states[state])
			}
		}
		if got := b.counts.noLocal[policyExternal]; got != external {
			t.Errorf("%d Services without local endpoints, want %d", got, external)
		}
	}
	for i := range 3 {
		b.put("web", "198.51.100.1", fmt.Sprintf("10.200.1.%d", i+1))
		b.put("api", "198.51.100.2", "10.200.1.9")
		if i == 1 {
			of, _ := b.slices.Get(key("web"))
			slice := of[0]
			slice.Endpoints[0].Node = "there"
		}
		b.run()
		check(map[string]int{statePending: 2 - min(i, 1), stateApplied: min(i, 1)}, i%2)
		b.rules.confirm()
		b.run()
		check(map[string]int{stateApplied: 2}, i%2)
	}
	b.delete("web")
	for range 2 { // its address lingers at first
		b.run()
		b.rules.confirm()
		b.run()
		b.clock = b.clock.Add(time.Minute)
	}
	check(map[string]int{stateApplied: 1}, 0)
}

// TestAPlannerThatHangsIsSeen has the loop deadlocked on what it reads.
func TestAPlannerThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		hang := make(chan struct{})
		interfaces := b.from.interfaces
		b.from.interfaces = func() ([]lb.Interface, bool) { <-hang; return interfaces() }
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- b.runner.Run(ctx) }()
		b.synced()
		b.runner.Poke()
		time.Sleep(time.Hour)
		if busy := b.runner.Busy(); busy != time.Hour {
			t.Errorf("busy for %v", busy)
		}
		close(hang)
		synctest.Wait()
		if busy := b.runner.Busy(); busy != 0 {
			t.Errorf("busy for %v", busy)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// Contract clauses 10 and 11: a Service that becomes too large is told so, keeps what it had, and
// changes nothing for others; it is served anew when it fits.
func TestContract11TooLargeIsToldAndKept(t *testing.T) {
	b := newBench(t)
	b.synced()
	b.put("web", "198.51.100.1", "10.200.1.1")
	b.put("other", "198.51.100.2", "10.200.2.1")
	b.run()
	b.rules.confirm()
	b.run()
	small, _ := b.services.Get(key("web"))
	large := small
	large.Ports = slices.Clone(small.Ports)
	for i := range 9000 {
		large.Ports = append(large.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.UDP, Port: uint16(i + 1)})
	}
	before := b.records[key("web")].planned
	b.services.Set(key("web"), large)
	b.warnings = nil
	for range 3 {
		b.mark(key("web"))
		b.run()
		b.rules.confirm()
		b.run()
	}
	r := b.records[key("web")]
	if !plan.SameRules(before, r.planned, lb.IPv4) || r.pending() || r.state() != stateFailed {
		t.Errorf("planned %d ports, pending %v, state %s", len(r.planned.Ports), r.pending(), r.state())
	}
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "web TooLarge here: ") {
		t.Errorf("warnings %q", b.warnings)
	}
	if d := r.deliveries[0]; d.Refusal == nil || !strings.HasPrefix(d.Refusal.Message, "the Service is too large: ") {
		t.Errorf("delivery %+v", d)
	}
	if d := b.records[key("other")].deliveries[0]; d.Refusal != nil {
		t.Errorf("the other: %+v", d)
	}
	b.services.Set(key("web"), small)
	b.mark(key("web"))
	b.run()
	if r := b.records[key("web")]; r.planned.Excess != nil || !plan.SameRules(before, r.planned, lb.IPv4) {
		t.Errorf("afterwards: %v", r.planned.Excess)
	}
}

// Contract clauses 10 and 11: a Service with more EndpointSlices than it may have keeps the endpoints that it had and
// that are listed, says so, and has all when they are no longer too many.
func TestContract11TooManySlicesAreToldAndKept(t *testing.T) {
	b := newBench(t)
	b.put("web", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.synced()
	b.confirmed()
	had, _ := b.slices.Get(key("web"))
	first, second := had[0], had[0]
	first.Endpoints, second.Endpoints = had[0].Endpoints[:1], slices.Clone(had[0].Endpoints[1:])
	second.Endpoints[0].Addr = netip.MustParseAddr("10.200.1.9")
	set := func(all ...lb.Slice) plan.Service {
		b.slices.Set(key("web"), all)
		b.markEndpoints(key("web"))
		b.confirmed()
		return b.records[key("web")].planned
	}
	b.warnings = nil
	for range 3 { // the second one may be another each time
		second.Endpoints[0].Addr = second.Endpoints[0].Addr.Next()
		s := set(first, second, lb.Slice{Service: key("web"), More: true})
		if all := s.Endpoints(); len(all) != 1 || !all[first.Endpoints[0].Addr] {
			t.Errorf("it delivers to %v", all)
		}
	}
	const said = "it has more than the 4096 EndpointSlices that one Service may have"
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "web TooLarge here: "+said) {
		t.Errorf("warnings %q", b.warnings)
	}
	d := b.records[key("web")].deliveries[0]
	if d.Refusal == nil || !strings.HasPrefix(d.Refusal.Message, "the Service is too large: "+said) {
		t.Errorf("delivery %+v", d)
	}
	if s := set(first, second); s.Excess != nil || len(s.Endpoints()) != 2 {
		t.Errorf("afterwards: %v, %v", s.Excess, s.Endpoints())
	}
}

// The facts of the node are read when something has changed of which they are made, and not with
// each Service.
func TestFactsAreReadWhenTheyChange(t *testing.T) {
	b := newBench(t)
	b.synced()
	reads := 0
	interfaces := b.from.interfaces
	b.from.interfaces = func() ([]lb.Interface, bool) {
		reads++
		return interfaces()
	}
	b.runAlone() // the first step needs no mark
	for i := range 3 {
		b.put("web", fmt.Sprintf("198.51.100.%d", i+1), "10.200.1.1")
		b.runAlone()
		b.rules.confirm()
		b.runAlone()
	}
	if reads != 1 || len(b.records[key("web")].planned.Ports) == 0 {
		t.Errorf("%d reads", reads)
	}
	b.markNode("here")
	b.runAlone()
	if reads != 2 {
		t.Errorf("%d reads after a Node has changed", reads)
	}
	b.nodes.SetSynced(false) // as before the lists have come
	b.markFacts()
	b.runAlone()
	b.nodes.SetSynced(true)
	b.runAlone()
	if reads != 4 || b.waiting != "" {
		t.Errorf("%d reads while a list is missing, waiting for %q", reads, b.waiting)
	}
}

// Contract clause 11: a Service that is too large for the kernel's writer follows its source ranges
// and its slices all the same; one that was ready before is used again. Once it fits, it is served as
// asked.
func TestContract11TooLargeForTheKernelFollows(t *testing.T) {
	b := newBench(t)
	b.synced()
	b.put("web", "198.51.100.1", "10.200.1.1", "10.200.1.2")
	b.run()
	b.rules.confirm()
	b.run()
	refuse := func() {
		applied := b.records[key("web")].applied
		if b.rules.wanted[key("web")].Excess != nil {
			t.Fatal("nothing new was tried")
		}
		b.rules.outcomes[key("web")] = plan.Outcome{Applied: applied, Alone: []lb.Family{lb.IPv4},
			Err: plan.TooLarge{Elements: 200_000, Limit: 131_072}}
		b.run() // takes in the refusal
		b.run() // plans what it had
		b.rules.confirm()
		b.run()
	}
	check := func(what string, sources string, backends ...string) {
		t.Helper()
		r := b.records[key("web")]
		var got []string
		for _, backend := range r.applied.Ports[0].Backends.Cluster {
			got = append(got, backend.Addr.Addr().String())
		}
		f := r.applied.Ports[0].Frontends[1]
		if !slices.Equal(got, backends) || f.Sources == nil || fmt.Sprint(f.Sources.Networks) != sources {
			t.Errorf("%s: backends %v, sources %v", what, got, f.Sources)
		}
		if d := r.deliveries[0]; d.Refusal == nil || !strings.HasPrefix(d.Refusal.Message, "the Service is too large: ") {
			t.Errorf("%s: delivery %+v", what, d)
		}
	}
	ranges := func(text string) {
		svc, _ := b.services.Get(key("web"))
		svc.SourceRanges = []netip.Prefix{netip.MustParsePrefix(text)}
		b.services.Set(key("web"), svc)
		b.mark(key("web"))
	}
	ranges("203.0.113.0/24")
	b.run()
	refuse()
	check("at first", "[203.0.113.0/24]", "10.200.1.1", "10.200.1.2")
	ranges("203.0.113.8/29")
	b.run()
	refuse()
	check("narrowed", "[203.0.113.8/29]", "10.200.1.1", "10.200.1.2")

	all, _ := b.slices.Get(key("web"))
	some := slices.Clone(all)
	some[0].Endpoints = append(slices.Clone(all[0].Endpoints[1:]),
		lb.Endpoint{Addr: netip.MustParseAddr("10.200.1.3"), Node: "here", Ready: true, Serving: true})
	b.slices.Set(key("web"), some)
	b.mark(key("web"))
	b.run()
	refuse()
	check("one endpoint has gone, one has come", "[203.0.113.8/29]", "10.200.1.2")
	b.slices.Set(key("web"), all)
	b.mark(key("web"))
	b.run()
	refuse()
	check("it is back", "[203.0.113.8/29]", "10.200.1.1", "10.200.1.2")

	b.slices.Set(key("web"), some)
	b.mark(key("web"))
	b.run()
	b.rules.confirm()
	b.run()
	r := b.records[key("web")]
	if d := r.deliveries[0]; d.Refusal != nil || d.Ready != 2 || r.fit != nil {
		t.Errorf("it fits: %+v", d)
	}
}
