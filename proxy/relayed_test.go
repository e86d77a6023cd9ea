package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
)

// fakeRelay has what the relay's feed was told.
type fakeRelay struct {
	all       map[lb.Key]*plan.Relayed
	begun     bool
	addresses map[lb.Family]netip.Addr
	nodePorts []netip.Addr
	blocked   map[plan.RelayWay]bool
	state     relayfeed.State
}

func (f *fakeRelay) Begin(all map[lb.Key]*plan.Relayed) {
	f.Update(all)
	f.begun = true
}

func (f *fakeRelay) Update(changes map[lb.Key]*plan.Relayed) {
	for key, relayed := range changes {
		if f.all[key] = relayed; relayed == nil {
			delete(f.all, key)
		}
	}
}

func (f *fakeRelay) SetAddresses(addresses map[lb.Family]netip.Addr, nodePorts []netip.Addr) {
	f.addresses, f.nodePorts = addresses, nodePorts
}
func (f *fakeRelay) SetBlocked(ways map[plan.RelayWay]bool) { f.blocked = ways }

func (f *fakeRelay) State() relayfeed.State {
	st := f.state
	st.Services = len(f.all)
	return st
}

// newRelayBench returns a proxy with a relay, and a Service that asks for it.
func newRelayBench(t *testing.T) (*bench, *fakeRelay) {
	b := newBench(t, func(s *settings) { s.relay, s.drain = true, 0 })
	f := &fakeRelay{all: map[lb.Key]*plan.Relayed{}}
	b.to.relay = f
	b.synced()
	b.put("web", "198.51.100.1", "10.0.0.1")
	b.relayed("web", "true")
	return b, f
}

// relayed sets the annotation of a Service.
func (b *bench) relayed(name, value string) {
	svc, _ := b.services.Get(key(name))
	svc.Relay = value
	b.services.Set(key(name), svc)
	b.mark(key(name))
}

// The relay knows a Service before the rules lead there, and until the kernel has confirmed that they do
// not.
func TestRelayIsToldBeforeTheRules(t *testing.T) {
	b, f := newRelayBench(t)
	b.run()
	if f.all[key("web")] == nil || f.begun {
		t.Fatalf("before the rules are written it knows %v, all of it: %v", f.all, f.begun)
	}
	if !b.rules.wanted[key("web")].Relay {
		t.Error("the rules do not lead to it")
	}
	want := map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("172.31.0.1")}
	if d := cmp.Diff(want, f.addresses, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Errorf("addresses (-want +got):\n%s", d)
	}
	b.rules.confirm()
	b.run()
	if !f.begun || f.all[key("web")] == nil {
		t.Errorf("once all is written: %v, it knows %v", f.begun, f.all)
	}
	b.relayed("web", "false")
	b.run()
	if b.rules.wanted[key("web")].Relay || f.all[key("web")] == nil {
		t.Errorf("while the rules are changed: they lead to it: %v, it knows %v", b.rules.wanted[key("web")].Relay, f.all)
	}
	b.rules.confirm()
	b.run()
	if len(f.all) > 0 {
		t.Errorf("at the end it knows %v", f.all)
	}
	b.relayed("web", "true")
	b.run()
	b.rules.confirm()
	b.run()
	b.delete("web")
	b.run()
	if f.all[key("web")] == nil {
		t.Error("it forgets a deleted Service before its rules are gone")
	}
	b.rules.confirm()
	b.run()
	if len(f.all) > 0 {
		t.Errorf("of a deleted Service it knows %v", f.all)
	}
}

// Who asks for a relay that this proxy does not have is told so, and served by the rules.
func TestContract10RelayIsRefusedWithAReason(t *testing.T) {
	for _, mode := range []string{modeIptables, modeNftables} {
		const want = "this node has no relay"
		b := newBench(t)
		b.mode = mode
		b.synced()
		b.put("web", "198.51.100.1", "10.0.0.1")
		b.relayed("web", "true")
		b.run()
		if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "web RelayRefused ") ||
			!strings.Contains(b.warnings[0], want) {
			t.Errorf("%s: told %q", mode, b.warnings)
		}
		if planned := b.rules.wanted[key("web")]; planned.Relay || len(planned.Ports) != 1 {
			t.Errorf("%s: %+v", mode, planned)
		}
	}
}

// TestAKernelWithoutLimitsRelaysNoUDP leaves out UDP alone where the kernel refuses the rules that limit it, and no
// rule asks for a limit then.
func TestAKernelWithoutLimitsRelaysNoUDP(t *testing.T) {
	for _, c := range []struct {
		what     string
		udp      bool
		rate     int
		refusing lb.Family
		asked    int
		wantUDP  bool
		wantRate int
	}{
		{"it has them", true, 500, "", 2, true, 500},
		{"it has none", true, 500, lb.IPv4, 1, false, 0},
		{"it has none for one family", true, 500, lb.IPv6, 2, false, 0},
		{"no limit is asked for", true, 0, lb.IPv4, 0, true, 0},
		{"no UDP is relayed", false, 500, lb.IPv4, 0, false, 0},
	} {
		asked, s := 0, settings{relay: true, relayUDP: c.udp, relayUDPRate: c.rate}
		s.prepareRelayUDP(slog.New(slog.DiscardHandler), allFamilies[:], func(family lb.Family) error {
			if asked++; family == c.refusing {
				return unix.ENOENT
			}
			return nil
		})
		if !s.relay || s.relayUDP != c.wantUDP || s.relayUDPRate != c.wantRate || asked != c.asked {
			t.Errorf("%s: relays %v, UDP %v, %d a second; asked %d times", c.what, s.relay, s.relayUDP, s.relayUDPRate, asked)
		}
	}
}

// The rules of iptables mode know where the relay is, as soon as it has said its ports, and lead no UDP there.
func TestRelayInIptablesMode(t *testing.T) {
	b, f := newRelayBench(t)
	b.mode = modeIptables
	b.settings.relayUDP = false // see prepareKernel
	var ports map[lb.Family]uint16
	b.from.relayPorts = func() map[lb.Family]uint16 { return ports }
	svc, _ := b.services.Get(key("web"))
	svc.Ports = append(svc.Ports, lb.ServicePort{Name: "dns", Protocol: lb.UDP, Port: 53})
	svc.Scheduler = "lc"
	b.services.Set(key("web"), svc)
	b.mark(key("web"))
	b.run()
	if to := b.rules.config.RelayTo; len(to) > 0 || !b.rules.config.Relay {
		t.Errorf("before the relay is there, the rules lead to %v", to)
	}
	ports = map[lb.Family]uint16{lb.IPv4: 7484, lb.IPv6: 7484}
	b.markFacts()
	b.run()
	want := map[lb.Family]netip.AddrPort{lb.IPv4: netip.MustParseAddrPort("172.31.0.1:7484")}
	if got := b.rules.config.RelayTo; !maps.Equal(got, want) {
		t.Errorf("the rules lead to %v, not %v", got, want)
	}
	if node := netip.MustParseAddr("172.31.0.1"); !slices.Contains(f.nodePorts, node) {
		t.Errorf("node ports at %v", f.nodePorts)
	}
	if len(b.warnings) != 2 || !strings.Contains(b.warnings[0], "but for those that the relay ends") ||
		!strings.Contains(b.warnings[1], "only proxies in nftables mode relay UDP") {
		t.Errorf("told %q", b.warnings)
	}
}

// The relayed Services of a namespace have room together: one that comes when there is none is served by the rules, and
// relayed once there is. Other namespaces have room of their own.
func TestContract11RelayedServicesOfANamespaceHaveRoomTogether(t *testing.T) {
	b, f := newRelayBench(t)
	web, next, other := key("web"), key("next"), lb.Key{Namespace: "other", Name: "web"}
	b.run()
	b.relayShares = plan.NewWholeShares(plan.RelayNeeds(b.records[web].live)+1, 0)
	b.mark(web)
	b.run()
	b.put("next", "198.51.100.2", "10.0.0.2")
	b.relayed("next", "true")
	b.putLike(web, other, "10.96.7.7")
	b.run()
	want := func(what string, keys ...lb.Key) {
		t.Helper()
		for _, k := range []lb.Key{web, next, other} {
			if is := slices.Contains(keys, k); b.rules.wanted[k].Relay != is || is && f.all[k] == nil {
				t.Errorf("%s: %s is relayed: %v, the relay knows %v", what, k, b.rules.wanted[k].Relay, f.all[k])
			}
		}
	}
	want("with two in one namespace", web, other)
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "next RelayRefused ") ||
		!strings.Contains(b.warnings[0], "that are relayed together") {
		t.Errorf("told %q", b.warnings)
	}
	if planned := b.rules.wanted[next]; len(planned.Ports) != 1 {
		t.Errorf("the rules do not serve the second one: %+v", planned)
	}
	b.relayed("web", "false")
	b.run()
	b.run()
	want("once the first does not ask for it", next, other)
	b.relayed("web", "true")
	b.run()
	want("once it asks again", next, other)
	b.delete("next")
	b.run()
	b.rules.confirm()
	b.run()
	want("once the second is deleted", web, other)
}

// putLike puts a Service that differs from another one in its cluster IP, and has no other address.
func (b *bench) putLike(one, other lb.Key, clusterIP string) {
	svc, _ := b.services.Get(one)
	svc.Key, svc.UID, svc.ClusterIPs = other, other.String(), []netip.Addr{netip.MustParseAddr(clusterIP)}
	svc.Ingress, svc.Ports = nil, slices.Clone(svc.Ports)
	endpoints, _ := b.slices.Get(one)
	for i := range svc.Ports {
		svc.Ports[i].NodePort = 0
	}
	b.services.Set(other, svc)
	b.slices.Set(other, endpoints)
	b.mark(other)
}

// The relayed Services of all namespaces have room together, of which one gets no more than leaves some for others.
func TestContract11NamespacesShareTheRelay(t *testing.T) {
	b, f := newRelayBench(t)
	web, other := key("web"), lb.Key{Namespace: "other", Name: "web"}
	b.run()
	b.relayShares = plan.NewWholeShares(1000, 7) // six of new Services, of which one namespace gets four
	b.mark(web)
	b.run()
	b.putLike(web, other, "10.96.7.7")
	b.run()
	if !b.rules.wanted[web].Relay || b.rules.wanted[other].Relay || len(f.all) != 1 {
		t.Errorf("two namespaces: web is relayed: %v, other: %v; the relay knows %d", b.rules.wanted[web].Relay,
			b.rules.wanted[other].Relay, len(f.all))
	}
	if len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "RelayRefused") ||
		!strings.Contains(b.warnings[0], "for which the node has no room: of the 6 of new Services that it relays for all namespaces") {
		t.Errorf("told %q", b.warnings)
	}
	b.relayed("web", "false")
	b.run()
	b.run()
	if b.rules.wanted[web].Relay || !b.rules.wanted[other].Relay || f.all[other] == nil {
		t.Errorf("once the first does not ask for it the other is relayed: %v", b.rules.wanted[other].Relay)
	}
}

// A Service that grows beyond the room of its namespace at the relay is served by the rules, and its room is for others.
// It is relayed again once there is room for all of it.
func TestContract11WhatIsRelayedNoMoreKeepsNoRoom(t *testing.T) {
	b, _ := newRelayBench(t)
	web, next := key("web"), key("next")
	b.run()
	b.relayShares = plan.NewWholeShares(2*plan.RelayNeeds(b.records[web].live)-1, 0)
	b.mark(web)
	b.run()
	b.put("next", "198.51.100.2", "10.0.0.2")
	b.relayed("next", "true")
	want := func(what string, webIs, nextIs bool) {
		t.Helper()
		for range 3 { // each is planned, and then who waits
			b.run()
			b.rules.confirm()
		}
		if a, c := b.rules.wanted[web].Relay, b.rules.wanted[next].Relay; a != webIs || c != nextIs {
			t.Errorf("%s: web is relayed: %v, next: %v; they need %d and %d of %d", what, a, c, b.records[web].relayNeeds,
				b.records[next].relayNeeds, b.relayShares.Limit())
		}
	}
	want("there is room for one", true, false)
	b.put("web", "198.51.100.1", "10.0.0.1", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7")
	b.relayed("web", "true")
	want("web has grown", false, true)
	b.put("web", "198.51.100.1", "10.0.0.1")
	b.relayed("web", "true")
	want("web is as small as before", false, true)
	b.delete("next")
	want("next is deleted", true, false)
}

// A Service that is relayed stays so while it changes, as in a rolling update, although its namespace is full. If that
// takes more than there is, it is as before when it needs no more than before: no younger one has taken its place.
func TestContract11ARollKeepsItsPlaceAtTheRelay(t *testing.T) {
	b, _ := newRelayBench(t)
	b.run()
	needs := plan.RelayNeeds(b.records[key("web")].live)
	b.relayShares = plan.NewWholeShares(2*needs, 0)
	put := func(name string, created int64, address string, endpoints ...string) {
		b.put(name, address, endpoints...)
		svc, _ := b.services.Get(key(name))
		svc.Created = time.Unix(created, 0)
		b.services.Set(key(name), svc)
		b.relayed(name, "true")
	}
	want := func(what string, relayed ...string) {
		t.Helper()
		for range 3 { // each is planned, and then who waits
			b.run()
			b.rules.confirm()
		}
		for _, name := range []string{"web", "api", "late"} {
			if is := b.rules.wanted[key(name)].Relay; is != slices.Contains(relayed, name) {
				t.Errorf("%s: %s is relayed: %v; it needs %d", what, name, is, b.records[key(name)].relayNeeds)
			}
		}
	}
	put("web", 1000, "198.51.100.1", "10.0.0.1")
	b.run()
	put("api", 2000, "198.51.100.2", "10.0.0.2")
	b.run()
	put("late", 3000, "198.51.100.3", "10.0.0.3")
	want("there is room for two", "web", "api")
	put("web", 1000, "198.51.100.1", "10.0.0.1", "10.0.0.4")
	want("the oldest rolls", "web", "api")
	put("web", 1000, "198.51.100.1", "10.0.0.4")
	want("it has done so", "web", "api")
	put("web", 1000, "198.51.100.1", "10.0.0.4", "10.0.0.5", "10.0.0.6")
	want("it grows too much", "api")
	put("web", 1000, "198.51.100.1", "10.0.0.4")
	want("it is as before", "web", "api")
	put("web", 1000, "198.51.100.1")
	want("it has no endpoint", "web", "api")
	put("web", 1000, "198.51.100.1", "10.0.0.7")
	want("it has one again", "web", "api")
	put("web", 1000, "198.51.100.1", "10.0.0.4", "10.0.0.5", "10.0.0.6")
	want("it grows too much again", "api")
	put("web", 1000, "198.51.100.1")
	want("it has no endpoint, and waits for none", "web", "api")
	b.relayed("web", "false")
	want("it does not ask for the relay", "api", "late")
}

// After a start, Services are relayed that had grown beyond the room of their namespace before, as far as they might.
// One that comes later is not.
func TestContract6WhatHadGrownIsRelayedAfterAStart(t *testing.T) {
	b := newBench(t, func(s *settings) { s.relay, s.drain = true, 0 })
	b.to.relay = &fakeRelay{all: map[lb.Key]*plan.Relayed{}}
	put := func(name, address string, endpoints ...string) {
		b.put(name, address, endpoints...)
		b.relayed(name, "true")
	}
	put("a", "198.51.100.1", "10.0.0.1", "10.0.0.2", "10.0.0.3")
	put("b", "198.51.100.2", "10.0.0.1", "10.0.0.2", "10.0.0.3")
	const needs = 8
	b.relayShares = plan.NewWholeShares(2*needs-1, 0)
	b.synced()
	b.run()
	for _, name := range []string{"a", "b"} {
		if r := b.records[key(name)]; !b.rules.wanted[key(name)].Relay || r.relayNeeds != needs {
			t.Errorf("%s is not relayed after a start; it needs %d", name, r.relayNeeds)
		}
	}
	b.delete("b")
	b.run()
	put("c", "198.51.100.3", "10.0.0.1")
	put("d", "198.51.100.4", "10.0.0.1", "10.0.0.2") // as much as one with a place might grow
	b.run()
	if !b.rules.wanted[key("c")].Relay || b.rules.wanted[key("d")].Relay {
		t.Errorf("later c is relayed: %v, and d: %v; they need %d and %d", b.rules.wanted[key("c")].Relay,
			b.rules.wanted[key("d")].Relay, b.records[key("c")].relayNeeds, b.records[key("d")].relayNeeds)
	}
}

// What Services may have grown into is theirs after a start only once those of other namespaces have their places.
func TestContract6AStartTakesNoPlaceOfAnotherNamespace(t *testing.T) {
	b := newBench(t, func(s *settings) { s.relay, s.drain = true, 0 })
	b.to.relay = &fakeRelay{all: map[lb.Key]*plan.Relayed{}}
	other := lb.Key{Namespace: "other", Name: "web"}
	b.put("a", "198.51.100.1", "10.0.0.1", "10.0.0.2", "10.0.0.3")
	b.put("b", "198.51.100.2", "10.0.0.1")
	b.relayed("a", "true")
	b.relayed("b", "true")
	b.putLike(key("a"), other, "10.96.7.7")
	b.relayShares = plan.NewWholeShares(10, 20)
	b.synced()
	b.run()
	for who, want := range map[lb.Key]bool{key("a"): true, key("b"): false, other: true} {
		if got := b.rules.wanted[who].Relay; got != want {
			t.Errorf("%s needs %d and is relayed: %v, want %v", who, b.records[who].relayNeeds, got, want)
		}
	}
}

// At a start the oldest Services of a namespace get the room at the relay, whatever they are called, with a bound of the
// rules or without.
func TestContract6TheOldestGetRoomAtTheRelay(t *testing.T) {
	for _, oldest := range []string{"a", "z"} {
		for _, limit := range []int{0, 1 << 20} {
			b := newBench(t, room(limit), func(s *settings) { s.relay, s.drain = true, 0 })
			b.to.relay = &fakeRelay{all: map[lb.Key]*plan.Relayed{}}
			for i, name := range []string{"a", "z"} {
				b.put(name, []string{"198.51.100.1", "198.51.100.2"}[i], "10.0.0.1")
				b.relayed(name, "true")
				svc, _ := b.services.Get(key(name))
				if svc.Created = time.Unix(2000, 0); name == oldest {
					svc.Created = time.Unix(1000, 0)
				}
				b.services.Set(key(name), svc)
			}
			b.relayShares = plan.NewWholeShares(5, 0)
			b.synced()
			b.run()
			for _, name := range []string{"a", "z"} {
				if is := b.rules.wanted[key(name)].Relay; is != (name == oldest) {
					t.Errorf("limit %d, %s is the oldest: %s is relayed: %v", limit, oldest, name, is)
				}
			}
		}
	}
}

// A Service with an endpoint that is no pod's is not relayed, and is again without it: relays of two nodes
// would call each other.
func TestContract10RelayConnectsToPodsOnly(t *testing.T) {
	b, f := newRelayBench(t)
	b.put("web", "198.51.100.1", "10.0.0.1", "172.31.0.1") // the node's own
	b.relayed("web", "true")
	b.run()
	if len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "the endpoint 172.31.0.1 is a node's") {
		t.Errorf("told %q", b.warnings)
	}
	if planned := b.rules.wanted[key("web")]; planned.Relay || len(planned.Ports) != 1 || len(f.all) > 0 {
		t.Errorf("%+v, the relay knows %v", planned, f.all)
	}
	b.put("web", "198.51.100.1", "10.0.0.1")
	b.relayed("web", "true")
	b.run()
	if !b.rules.wanted[key("web")].Relay || f.all[key("web")] == nil {
		t.Errorf("without that endpoint it is not relayed")
	}
}

// Who is relayed hears that connections from a VRF are not, as long as a router is in one.
func TestContract10RelayLeavesVRFs(t *testing.T) {
	b, _ := newRelayBench(t)
	b.own = append(b.own, lb.Interface{Name: "red", VRF: "red", Table: 100},
		lb.Interface{Name: "up0", VRF: "red", Enslaved: true})
	b.run()
	if len(b.warnings) > 0 {
		t.Errorf("without a router in it: told %q", b.warnings)
	}
	b.routers.Set("tor", lb.Router{VRF: "red"})
	b.run()
	if len(b.warnings) != 1 || !strings.HasPrefix(b.warnings[0], "web RelayRefused ") ||
		!strings.Contains(b.warnings[0], "come in through a VRF go straight to endpoints") ||
		!slices.Equal(b.rules.config.VRFInterfaces, []string{"red", "up0"}) {
		t.Errorf("told %q, in VRFs %q", b.warnings, b.rules.config.VRFInterfaces)
	}
	if !b.rules.wanted[key("web")].Relay {
		t.Error("others are not relayed")
	}
	b.routers.Delete("tor")
	b.run()
	if advice := b.records[key("web")].advice; len(advice) > 0 {
		t.Errorf("the router has gone: %v", advice)
	}
}

// The status says what is relayed, and that connections go straight to endpoints while no relay is there.
func TestRelayStatus(t *testing.T) {
	b, _ := newRelayBench(t)
	b.run()
	b.rules.confirm()
	b.run()
	var text strings.Builder
	if err := b.writeStatus(&text, ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"relayed": true`, `"connected": false`, "connections to 1 Services go straight to endpoints"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the status lacks %s:\n%s", want, &text)
		}
	}
}

// Where a chain of another program drops what the rules would lead to the relay, they do not lead there, and
// the node says so. What is unknown stays as it was.
func TestContract9RelayBehindAFirewall(t *testing.T) {
	b, f := newRelayBench(t)
	b.run()
	f.state = relayfeed.State{Connected: true, Ports: map[lb.Family]uint16{lb.IPv4: 7484}}
	log := slog.New(slog.DiscardHandler)
	chains := []plan.ForwardChain{{Family: "ip", Table: "filter", Name: "INPUT", Drops: true}}
	var failed error
	h := host{proxy: b.proxy, parameters: kernelParameters{t.TempDir(), log}, log: log, reusePorts: func(bool) {},
		chains: func(context.Context) ([]plan.ForwardChain, error) { return nil, nil },
		inputs: func() ([]plan.ForwardChain, error) { return chains, failed },
		routes: func([]netip.Addr) (map[netip.Addr]lb.RouteKind, error) { return nil, nil },
		strict: func() string { return "" }, noTunnel: func() string { return "" }}
	look := func(want ...lb.Reason) {
		t.Helper()
		found, _ := h.look(t.Context())
		var reasons []lb.Reason
		for _, one := range found {
			reasons = append(reasons, one.Reason)
		}
		if !slices.Equal(reasons, want) || len(f.blocked) != 2*len(want) {
			t.Errorf("found %v, not %v, and the rules are kept from %v", reasons, want, f.blocked)
		}
	}
	look(lb.ReasonRelayDropped)
	chains, failed = nil, errors.New("interrupted")
	look(lb.ReasonRelayDropped)
	failed = nil
	look()
	f.state = relayfeed.State{}
	look() // it may restart
	if found, _ := h.look(t.Context()); len(found) != 1 || found[0].Reason != lb.ReasonRelayAway {
		t.Errorf("without a relay: %v", found)
	}
}

func TestIsRelay(t *testing.T) {
	for _, test := range []struct {
		args []string
		rest string
		is   bool
	}{
		{[]string{"landfall-proxy", "relay", "status"}, "landfall-proxy status", true},
		{[]string{"landfall-proxy", "status"}, "landfall-proxy status", false},
		{[]string{"landfall-proxy", "--relay"}, "landfall-proxy --relay", false},
		{[]string{"landfall-proxy"}, "landfall-proxy", false},
	} {
		if rest, is := isRelay(test.args); strings.Join(rest, " ") != test.rest || is != test.is {
			t.Errorf("%v: %v, %v", test.args, rest, is)
		}
	}
}
