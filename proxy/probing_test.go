package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// fakeProber has what it was told, and tells what the test says.
type fakeProber struct {
	asks    map[lb.Key]plan.Probing
	updates int
	news    map[lb.Key]plan.LeftOut
}

func (f *fakeProber) Begin(all map[lb.Key]plan.Probing) {
	f.asks = map[lb.Key]plan.Probing{}
	f.Update(all)
}

func (f *fakeProber) Update(changes map[lb.Key]plan.Probing) {
	f.updates++
	maps.Copy(f.asks, changes)
}

func (f *fakeProber) take() map[lb.Key]plan.LeftOut {
	news := f.news
	f.news = nil
	return news
}

// fails says which endpoints of a Service do not answer.
func (f *fakeProber) fails(service string, addrs ...string) {
	left := plan.LeftOut{}
	for _, a := range addrs {
		left[netip.MustParseAddr(a)] = "connect: no answer within 80ms"
	}
	f.news = map[lb.Key]plan.LeftOut{key(service): left}
}

type probeBench struct {
	*bench
	*fakeProber
	events []string
}

func newProbeBench(t *testing.T) *probeBench {
	b := &probeBench{newBench(t), &fakeProber{}, nil}
	b.from.probes, b.to.probes = b.take, b.fakeProber
	b.to.probed = func(s lb.Service, reason lb.Reason, message string) {
		b.events = append(b.events, strings.Join([]string{s.Key.Name, string(reason), message}, " "))
	}
	return b
}

// ask puts a Service with a probe.
func (b *probeBench) ask(name, vip, probe string, policy lb.TrafficPolicy, endpoints ...string) {
	b.put(name, vip, endpoints...)
	svc, _ := b.services.Get(key(name))
	var err error
	svc.ExternalPolicy = policy
	if svc.Probe, err = lb.ParseProbe(probe); err != nil {
		svc.InvalidProbe = err.Error()
	}
	b.services.Set(key(name), svc)
}

func (b *probeBench) settle() {
	b.t.Helper()
	b.runAlone()
	b.rules.confirm()
	b.runAlone()
}

func (b *probeBench) backends(name string) string {
	var all []string
	for _, backend := range b.rules.wanted[key(name)].Ports[0].Backends.Cluster {
		all = append(all, backend.Addr.Addr().String())
	}
	return strings.Join(all, " ")
}

func (b *probeBench) expectBackends(what, name, want string) {
	b.t.Helper()
	if got := b.backends(name); got != want {
		b.t.Errorf("%s: the rules deliver to %q, want %q", what, got, want)
	}
}

func TestLeavesOutWhatDoesNotAnswer(t *testing.T) {
	b := newProbeBench(t)
	b.ask("web", "192.0.2.1", "tcp", lb.Cluster, "10.200.1.2", "10.200.1.3", "10.200.1.4")
	b.put("plain", "192.0.2.2", "10.200.1.2", "10.200.1.3")
	b.synced()
	b.run()
	b.settle()
	if len(b.asks) != 1 || len(b.asks[key("web")].Targets) != 3 || b.asks[key("web")].Nodes != 1 {
		t.Fatalf("asks %v", b.asks)
	}
	b.expectBackends("unknown is not absent", "web", "10.200.1.2 10.200.1.3 10.200.1.4")
	told := b.updates
	b.order = nil
	b.fails("web", "10.200.1.3")
	b.settle()
	b.expectBackends("one fails", "web", "10.200.1.2 10.200.1.4")
	b.expectBackends("it asked for no probe", "plain", "10.200.1.2 10.200.1.3")
	b.expectDelivery("web", "192.0.2.1", "2")
	if want := []string{"feed web", "rules web"}; !slices.Equal(b.order[:2], want) {
		t.Errorf("order %v, want %v first", b.order, want)
	}
	if b.updates != told {
		t.Error("the prober was told anew of what has not changed")
	}
	b.fails("web")
	b.settle()
	b.expectBackends("it answers", "web", "10.200.1.2 10.200.1.3 10.200.1.4")
	b.ask("web", "192.0.2.1", "", lb.Cluster, "10.200.1.2")
	b.settle()
	if len(b.asks[key("web")].Targets) > 0 {
		t.Errorf("without the annotation, asks %v", b.asks)
	}
	b.ask("web", "192.0.2.1", "tcp", lb.Cluster, "10.200.1.2")
	b.settle()
	b.delete("web")
	b.settle()
	if len(b.asks[key("web")].Targets) > 0 || len(b.probed)+len(b.leftOut) > 0 {
		t.Errorf("of a Service that is gone, asks %v and remembers %v %v", b.asks, b.probed, b.leftOut)
	}
}

// A probe that is wrong for all endpoints takes none of them, and no claim.
func TestContract1AWrongProbeTakesNothing(t *testing.T) {
	for _, policy := range []lb.TrafficPolicy{lb.Cluster, lb.Local} {
		b := newProbeBench(t)
		b.ask("web", "192.0.2.1", "http:/nowhere", policy, "10.200.1.2", "10.200.1.3")
		b.synced()
		b.run()
		b.settle()
		b.fails("web", "10.200.1.2", "10.200.1.3")
		b.settle()
		b.expectBackends("all fail", "web", "10.200.1.2 10.200.1.3")
		b.expectDelivery("web", "192.0.2.1", "2")
		if got := b.health.state.Services[key("web")].Local[lb.IPv4]; policy == lb.Local && got != 2 {
			t.Errorf("the health port counts %d", got)
		}
		b.clock = b.clock.Add(probeSettle)
		b.run()
		if len(b.events) != 1 || !strings.HasPrefix(b.events[0], "web ProbeIgnored here: 2 of 2 endpoints do not answer the "+
			`probe "http:/nowhere" (10.200.1.2:8080: connect: no answer within 80ms; 10.200.1.3:8080: `) {
			t.Errorf("%s: events %q", policy, b.events)
		}
		want := `
# HELP landfall_proxy_probe_endpoints_left_out Endpoints to which this node sends no new connections, as they do not answer its probes.
# TYPE landfall_proxy_probe_endpoints_left_out gauge
landfall_proxy_probe_endpoints_left_out 0
# HELP landfall_proxy_probe_services_ignored Services of which this node uses endpoints that do not answer its probes, as fewer than half would be left.
# TYPE landfall_proxy_probe_services_ignored gauge
landfall_proxy_probe_services_ignored 1
`
		if err := testutil.CollectAndCompare(newCollector(b.proxy, func() int { return 1 }), strings.NewReader(want),
			"landfall_proxy_probe_endpoints_left_out", "landfall_proxy_probe_services_ignored"); err != nil {
			t.Error(err)
		}
		b.fails("web", "10.200.1.2")
		b.settle()
		b.expectBackends("one fails", "web", "10.200.1.3")
		b.expectDelivery("web", "192.0.2.1", "1")
	}
}

// Events come a while after a change, at most one in ten seconds, and say what is so then.
func TestProbesAreTold(t *testing.T) {
	b := newProbeBench(t)
	b.ask("web", "192.0.2.1", "tcp", lb.Cluster, "10.200.1.2", "10.200.1.3", "10.200.1.4")
	b.synced()
	b.run()
	b.settle()
	expect := func(what string, want ...string) {
		t.Helper()
		if len(b.events) != len(want) {
			t.Fatalf("%s: %q, want %q", what, b.events, want)
		}
		for i := range want {
			if !strings.HasPrefix(b.events[i], want[i]) {
				t.Errorf("%s: %q, want %q", what, b.events[i], want[i])
			}
		}
		b.events = nil
	}
	pass := func(d time.Duration) time.Duration {
		b.clock = b.clock.Add(d)
		return b.runAlone()
	}
	b.fails("web", "10.200.1.2")
	b.settle()
	expect("at once")
	if again := pass(0); again != probeSettle {
		t.Errorf("again after %v", again)
	}
	pass(probeSettle)
	expect("after a while", `web ProbeFailed here: sends no new connections to 1 of 3 endpoints, which do not answer the `+
		`probe "tcp": 10.200.1.2:8080: connect: no answer within 80ms`)
	for range 100 { // it flaps
		b.fails("web")
		b.settle()
		b.fails("web", "10.200.1.2")
		b.settle()
	}
	pass(time.Minute)
	expect("as before")
	b.fails("web")
	b.settle()
	pass(2 * time.Second)
	expect("back", "web ProbePassed here: ")
	b.fails("web", "10.200.1.3")
	b.settle()
	pass(2 * time.Second)
	expect("too soon")
	if again := pass(time.Second); again != probeQuiet-3*time.Second {
		t.Errorf("again after %v", again)
	}
	pass(probeQuiet)
	expect("lost again", "web ProbeFailed here: ")
	b.ask("web", "192.0.2.1", "", lb.Cluster, "10.200.1.2", "10.200.1.3")
	b.settle()
	pass(probeQuiet)
	expect("no probe any more", "web ProbePassed here: ")
	if again := pass(0); again != 0 || len(b.telling) > 0 {
		t.Errorf("again after %v, of %v", again, b.telling)
	}
}

// A probe that cannot be made is told, and its Service served.
func TestRefusedProbesAreTold(t *testing.T) {
	b := newProbeBench(t)
	b.ask("web", "192.0.2.1", "icmp", lb.Cluster, "10.200.1.2")
	b.ask("host", "192.0.2.2", "tcp", lb.Cluster, "172.31.0.1")
	b.synced()
	b.run()
	b.settle()
	b.expectDelivery("web", "192.0.2.1", "1")
	b.expectDelivery("host", "192.0.2.2", "1")
	want := []string{
		"host ProbeRefused here: annotation landfall.dev/probe: \"tcp\": none of the 1 ready endpoints is a pod with an " +
			"address of its own, and nodes probe no others; nodes do not probe its endpoints",
		"web ProbeInvalid here: annotation landfall.dev/probe: \"icmp\": want tcp, or http: and a path, as in http:/healthz; " +
			"nodes do not probe its endpoints",
	}
	slices.Sort(b.warnings)
	if !slices.Equal(b.warnings, want) {
		t.Errorf("warnings %q", b.warnings)
	}
	b.to.probes, b.from.probes = nil, nil
	b.warnings = nil
	b.ask("web", "192.0.2.1", "tcp", lb.Cluster, "10.200.1.2")
	b.settle()
	if len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "ProbeRefused") ||
		!strings.Contains(b.warnings[0], "--probe-interval=0") {
		t.Errorf("warnings %q", b.warnings)
	}
	b.expectDelivery("web", "192.0.2.1", "1")
}

// What may be asked follows Nodes and API servers.
func TestProbesFollowTheCluster(t *testing.T) {
	b := newProbeBench(t)
	b.ask("web", "192.0.2.1", "tcp", lb.Cluster, "10.200.1.2", "10.200.1.3")
	b.synced()
	b.run()
	b.settle()
	expect := func(what string, want int) {
		t.Helper()
		b.runAlone()
		if got := len(b.asks[key("web")].Targets); got != want {
			t.Errorf("%s: asks %d, want %d", what, got, want)
		}
	}
	expect("pods", 2)
	b.nodes.Set("there", lb.Node{Name: "there", Addresses: []netip.Addr{netip.MustParseAddr("10.200.1.3")}})
	b.markNode("there")
	expect("a Node", 1)
	if got := b.asks[key("web")].Nodes; got != 2 {
		t.Errorf("%d nodes ask", got)
	}
	servers := lb.Slice{Service: apiServers, Family: lb.IPv4, Endpoints: []lb.Endpoint{
		{Addr: netip.MustParseAddr("10.200.1.2"), Ready: true}}}
	b.slices.Set(apiServers, []lb.Slice{servers})
	b.markEndpoints(apiServers)
	expect("an API server", 0)
	b.nodes.Delete("there")
	b.slices.Delete(apiServers)
	b.markEndpoints(apiServers)
	b.markNode("there")
	expect("pods again", 2)
}

// One more Service than a node asks about waits until there is room.
func TestProbesHaveABudget(t *testing.T) {
	b := newProbeBench(t)
	var addrs []string
	for i := range plan.MaxProbed {
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, 200, 1, byte(i + 2)}).String())
	}
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i"}
	for i, name := range names {
		b.ask(name, netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}).String(), "tcp", lb.Cluster, addrs...)
	}
	b.synced()
	b.run()
	b.settle()
	if n := len(b.asks[key("i")].Targets); n > 0 || len(b.warnings) != 1 ||
		!strings.Contains(b.warnings[0], "i ProbeRefused here: ") {
		t.Errorf("the ninth Service: asks %d, warnings %q", n, b.warnings)
	}
	b.delete("c")
	b.settle()
	b.settle()
	if n := len(b.asks[key("i")].Targets); n != plan.MaxProbed {
		t.Errorf("after one is gone, asks %d", n)
	}
	if advice := b.records[key("i")].advice; len(advice) > 0 {
		t.Errorf("it is still said %v", advice)
	}
}

// Another namespace's Service takes the place of one of those that have all.
func TestContract11ProbesAreSharedAmongNamespaces(t *testing.T) {
	b := newProbeBench(t)
	var addrs []string
	for i := range plan.MaxProbed {
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, 200, 1, byte(i + 2)}).String())
	}
	for i := range 8 {
		b.ask(string(rune('a'+i)), netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}).String(), "tcp", lb.Cluster, addrs...)
	}
	b.synced()
	b.run()
	b.settle()
	other := lb.Key{Namespace: "other", Name: "web"}
	svc, _ := b.services.Get(key("a"))
	all, _ := b.slices.Get(key("a"))
	one := all[0]
	one.Service, one.Endpoints = other, one.Endpoints[:3]
	svc.Key, svc.UID, svc.Ingress = other, "other", []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.100")}}
	svc.ClusterIPs = []netip.Addr{netip.MustParseAddr("10.96.255.1")}
	b.services.Set(other, svc)
	b.slices.Set(other, []lb.Slice{one})
	b.mark(other)
	b.settle()
	b.settle()
	asked := 0
	for _, p := range b.asks {
		asked += len(p.Targets)
	}
	if n := len(b.asks[other].Targets); n != 3 || asked != 7*plan.MaxProbed+3 || len(b.warnings) != 1 ||
		!strings.Contains(b.warnings[0], "a ProbeRefused here: ") {
		t.Errorf("it is asked %d, all are asked %d, warnings %q", n, asked, b.warnings)
	}
}

// A Service that became too large keeps what it had: endpoints that are probed, and are left out or come
// back.
func TestTooLargeAndProbed(t *testing.T) {
	b, f := newProbeBench(t), &fakePath{known: true}
	b.from.path, b.to.targets = f.take, f
	b.ask("web", "192.0.2.1", "tcp", lb.Cluster, "10.200.1.2", "10.200.1.3", "10.200.1.4", "10.200.1.5")
	b.synced()
	b.run()
	b.settle()
	b.fails("web", "10.200.1.3")
	b.settle()
	svc, _ := b.services.Get(key("web"))
	for i := range 9000 {
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: fmt.Sprint(i), Protocol: lb.TCP, Port: uint16(1000 + i)})
	}
	b.services.Set(key("web"), svc)
	all, _ := b.slices.Get(key("web"))
	for i := range plan.MaxProbed {
		all[0].Endpoints = append(slices.Clone(all[0].Endpoints), lb.Endpoint{Node: "here", Ready: true, Serving: true,
			Addr: netip.AddrFrom4([4]byte{10, 200, 2, byte(i)})})
	}
	b.slices.Set(key("web"), all)
	b.mark(key("web"))
	b.settle()
	if b.rules.wanted[key("web")].Excess == nil {
		t.Fatal("it is not too large")
	}
	b.expectBackends("too large", "web", "10.200.1.2 10.200.1.4 10.200.1.5")
	if n := len(b.asks[key("web")].Targets); n != 4 {
		t.Errorf("asks %d endpoints", n)
	}
	b.fails("web", "10.200.1.4")
	b.settle()
	b.expectBackends("another one fails", "web", "10.200.1.2 10.200.1.3 10.200.1.5")
	f.lose(noRoute, "web", "10.200.1.5")
	b.settle()
	b.expectBackends("a route is gone", "web", "10.200.1.2 10.200.1.3")
}
