package nftables

import (
	gocmp "cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// relayPort is where the relay of the tests listens.
const relayPort = 7486

// Each case of the table, with a Service that is relayed. Without a relay it ends where it would end
// anyway. With one, what would end at an endpoint ends at the relay, except for SCTP, for the node itself,
// for pods where the policy is Local, and for what comes in through a VRF.
func TestContract9RelayedOrAsWithout(t *testing.T) {
	t.Parallel()
	relayed := 0
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range cases.For(family, true) {
			if c.Sticky {
				continue // the relay has its own memory
			}
			service, config := serviceOf(w, c)
			service, config.Relay = service.Only(family), true
			service.Relay = true
			service.Ports = slices.Clone(service.Ports)
			for i := range service.Ports {
				service.Ports[i].Relay = service.Ports[i].Protocol != lb.SCTP
			}
			rendered := newRenderer(family, config).service(service.Key, service)
			walk := newWalker(t, newRuleset(family, config, neededBy(rendered)), c.LocalAddresses(w), rendered)
			straight, _ := walk.fate(packetOf(w, c))
			if _, ends := walkOf(t, w, c).fate(packetOf(w, c)); ends != c.SNAT {
				t.Fatalf("%s/%s: the walk itself is wrong", family, c.Name)
			}
			for end := range straight {
				if !slices.Contains(c.Ends(w), end) {
					t.Errorf("%s/%s: without a relay it ends at %s, want %v", family, c.Name, end, c.Ends(w))
				}
			}
			want := straight
			known := config.Pods.Interface != "" || len(config.Pods.Prefixes) > 0
			pod := known && (c.From == "pod" || c.From == "local")
			toBackend := slices.ContainsFunc(c.Ends(w), func(end string) bool { return strings.Contains(end, ":") })
			if toBackend && c.Transport() != lb.SCTP && c.Interface() != "" &&
				(!pod || c.To == "cluster" || service.Policy != lb.Local) {
				want = map[string]float64{netip.AddrPortFrom(w.Node, relayPort).String(): 1}
				relayed++
			}
			relay := map[string]string{}
			for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
				relay[string(relayElement(protocol).Key)] = string(appendPort(w.Node.AsSlice(), relayPort))
			}
			walk.sets[relayMap] = relay
			walk.reset()
			got, masqueraded := walk.fate(packetOf(w, c))
			if d := cmp.Diff(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got))); d != "" {
				t.Errorf("%s/%s: with a relay it ends (-want +got):\n%s", family, c.Name, d)
			}
			if len(want) == 1 && len(straight) != 1 && masqueraded {
				t.Errorf("%s/%s: what goes to the relay is masqueraded", family, c.Name)
			}
			config.VRFInterfaces = []string{"red", gocmp.Or(c.Interface(), "up0")}
			walk = newWalker(t, newRuleset(family, config, neededBy(rendered)), c.LocalAddresses(w), rendered)
			walk.sets[relayMap] = relay
			got, _ = walk.fate(packetOf(w, c))
			if d := cmp.Diff(slices.Sorted(maps.Keys(straight)), slices.Sorted(maps.Keys(got))); d != "" {
				t.Errorf("%s/%s: from a VRF it ends (-want +got):\n%s", family, c.Name, d)
			}
		}
	}
	if relayed < 40 {
		t.Errorf("only %d cases are relayed", relayed)
	}
}

// What is leased is in the kernel for as long as it is leased, renewed any number of times, and taken
// back at once.
func TestLease(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	a.Configure(bothAddresses(seedConfig))
	a.settle(t, variety())
	var lease *Lease
	ns.Do(t, func() (err error) {
		lease, err = OpenLease()
		return err
	})
	defer lease.Close()
	held := func(family string) string { return ns.Run(t, "nft", "list", "map", family, TableName, relayMap) }
	leased := func(way plan.RelayWay, name string) bool {
		return strings.Contains(ns.Run(t, "nft", "list", "set", name, TableName, relayLeased), way.Protocol.Lower()+" timeout")
	}
	for _, way := range plan.RelayWays {
		to := map[lb.Family]string{lb.IPv4: "192.0.2.1:7486", lb.IPv6: "[2001:db8::1]:7486"}[way.Family]
		name := map[lb.Family]string{lb.IPv4: "ip", lb.IPv6: "ip6"}[way.Family]
		if err := lease.End(way); err != nil {
			t.Errorf("end without a lease: %v", err)
		}
		at := netip.MustParseAddrPort(to)
		for range 3 {
			if err := lease.Renew(way, at, time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		if got := held(name); !strings.Contains(got, way.Protocol.Lower()+" timeout 1h expires") ||
			!strings.Contains(got, at.Addr().String()+" . 7486") {
			t.Errorf("%s holds %s", name, got)
		}
		if !leased(way, name) {
			t.Errorf("%s does not count %s as leased", name, way.Protocol)
		}
		if st := a.settle(t, variety()); st.Repaired != 0 {
			t.Errorf("the table takes the lease for a change by others: %+v", st)
		}
		if err := lease.End(way); err != nil {
			t.Fatal(err)
		}
		if got := held(name); strings.Contains(got, "7486") {
			t.Errorf("%s still holds %s", name, got)
		}
		if leased(way, name) {
			t.Errorf("%s still counts %s as leased", name, way.Protocol)
		}
		if err := lease.Renew(way, at, time.Millisecond); err != nil {
			t.Fatal(err)
		}
		for strings.Contains(held(name), "7486") {
			time.Sleep(time.Millisecond) // it ends by itself
		}
		if err := lease.Renew(way, at, time.Hour); err != nil {
			t.Errorf("renew what has ended: %v", err)
		}
		if err := lease.End(way); err != nil {
			t.Fatal(err)
		}
	}
	if err := lease.Renew(plan.RelayWay{Family: lb.IPv6, Protocol: lb.UDP}, netip.MustParseAddrPort("192.0.2.1:1"), time.Hour); err == nil {
		t.Error("an address of another family is leased")
	}
}

// A Service that asks for the relay where the rules have none is written without.
func TestRelayWithoutRules(t *testing.T) {
	config := bothAddresses(seedConfig)
	config.Relay = false
	s := plan.Service{}
	for _, s = range variety() {
		if s.Relay {
			break
		}
	}
	if !s.Relay {
		t.Fatal("no Service is relayed")
	}
	for _, p := range newRenderer(lb.IPv4, config).service(s.Key, s.Only(lb.IPv4)).parts {
		for _, e := range p.entries {
			if e.set == setRelayed {
				t.Errorf("%+v", e)
			}
		}
	}
}
