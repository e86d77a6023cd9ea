package iptables

import (
	"cmp"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// relayPort is where the relay of the tests listens.
const relayPort = 7486

// leasedWalker walks through rules whose lease is as a test says.
type leasedWalker struct {
	walker
	share float64
}

func (w leasedWalker) Recent(list string, client netip.Addr) (float64, error) {
	if strings.HasPrefix(list, leases) {
		return w.share, nil
	}
	return w.walker.Recent(list, client)
}

// Each case of the table, with a Service that is relayed. Without a relay it ends where it would end
// anyway. With one, what would end at an endpoint ends at the relay, except for UDP and SCTP, for the node itself,
// for pods where the policy is Local, and for what comes in through a VRF.
func TestContract9RelayedOrAsWithout(t *testing.T) {
	relayed := 0
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range cases.For(family, false) {
			service, config := c.Plan(w)
			config.Relay = true
			config.RelayTo = map[lb.Family]netip.AddrPort{family: netip.AddrPortFrom(w.Node, relayPort)}
			service.Relay = true
			service.Ports = slices.Clone(service.Ports)
			for i := range service.Ports {
				service.Ports[i].Relay = true
			}
			for _, way := range []struct {
				leased float64
				vrf    bool
			}{{0, false}, {1, false}, {1, true}} {
				if config.VRFInterfaces = nil; way.vrf {
					config.VRFInterfaces = []string{"red", cmp.Or(c.Interface(), "up0")}
				}
				r := renderer{config, family}
				rules := r.ruleset([]contribution{r.service(service)})
				for _, leg := range c.Legs() {
					walk := leasedWalker{walker{t: t, hooks: r.hooks(), rules: rules, local: c.LocalAddresses(w)}, way.leased}
					want, masqueraded := c.Ends(w), c.SNAT
					known := config.Pods.Interface != "" || len(config.Pods.Prefixes) > 0
					pod := known && (c.From == "pod" || c.From == "local")
					toBackend := slices.ContainsFunc(want, func(end string) bool { return strings.Contains(end, ":") })
					if way.leased == 1 && !way.vrf && toBackend && c.Transport() == lb.TCP && c.Interface() != "" &&
						(!pod || leg.To == "cluster" || service.Policy != lb.Local) {
						want, masqueraded = []string{netip.AddrPortFrom(w.Node, relayPort).String()}, false
						relayed++
					}
					ends, got := walk.through(walk, packet{src: netip.AddrPortFrom(c.Source(w), 40000), dst: leg.Destination(w),
						in: c.Interface(), protocol: c.Transport(), invalid: c.Invalid})
					if !slices.Equal(ends, want) || got != masqueraded {
						t.Errorf("%s/%s, %+v: ends at %v, masqueraded %v; want %v, %v", family, c.Name, way, ends, got, want, masqueraded)
					}
				}
			}
		}
	}
	if relayed < 40 {
		t.Errorf("only %d cases are relayed", relayed)
	}
}

// Where /proc is read-only, as in some containers, no lease could be written, and the probe says so.
func TestProbeRelayWhereProcIsReadOnly(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
				commands := variant(family, kind)
				var err error
				ns.Do(t, func() error {
					if err := readOnlyProc(); err != nil {
						return err
					}
					err = ProbeRelay(t.Context(), nsKernel{t, ns, commands}, family)
					return nil
				})
				if !errors.Is(err, unix.EROFS) {
					t.Errorf("%s: the probe says %v", family, err)
				}
				if left := ns.Run(t, commands.save); strings.Contains(left, "PROBE") {
					t.Errorf("%s: the probe leaves %s", family, left)
				}
			}
		})
	}
}

// readOnlyProc has the calling thread see /proc read-only.
func readOnlyProc() error {
	return errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("/proc", "/proc", "", unix.MS_BIND, ""),
		unix.Mount("", "/proc", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
}

// What is leased leads to the relay until its time is over, renewed any number of times, and is taken back at
// once, whoever has leased it. A lease without a rule is none, and one for another address or port does not count.
func TestLease(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			kernels := map[lb.Family]Kernel{}
			for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
				kernels[family] = nsKernel{t, ns, variant(family, kind)}
			}
			to := map[lb.Family]netip.AddrPort{lb.IPv4: netip.MustParseAddrPort("192.0.2.1:7486"),
				lb.IPv6: netip.MustParseAddrPort("[2001:db8::1]:7486")}
			config := seedConfig
			config.Relay, config.RelayTo = true, to
			for family, k := range kernels {
				ns.Do(t, func() error { return ProbeRelay(t.Context(), k, family) })
				if left := ns.Run(t, variant(family, kind).save); strings.Contains(left, "PROBE") {
					t.Errorf("%s: the probe leaves %s", family, left)
				}
			}
			lease := NewLease()
			do := func(f func() error) (err error) {
				t.Helper()
				ns.Do(t, func() error {
					err = f()
					return nil
				})
				return err
			}
			way := func(family lb.Family) plan.RelayWay { return plan.RelayWay{Family: family, Protocol: lb.TCP} }
			renew := func(l *Lease, family lb.Family, to netip.AddrPort) error {
				t.Helper()
				return do(func() error { return l.Renew(way(family), to, plan.RelayLease) })
			}
			for family, at := range to {
				if err := renew(lease, family, at); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: without rules: %v", family, err)
				}
				if err := do(func() error { return lease.End(way(family)) }); err != nil {
					t.Errorf("%s: end without rules: %v", family, err)
				}
			}
			a := newActor(kernels, config)
			a.Set(seed(func(*lb.Service) {}))
			if err := settle(a, false); err != nil {
				t.Fatal(err)
			}
			held := func(family lb.Family) string {
				return ns.Run(t, "cat", "/proc/net/xt_recent/"+leaseOf(to[family]))
			}
			for family, at := range to {
				for range 3 {
					if err := renew(lease, family, at); err != nil {
						t.Fatal(err)
					}
				}
				if got := held(family); strings.Count(got, "src=") != 1 {
					t.Errorf("%s: the list has %q", family, got)
				}
			}
			if err := settle(a, true); err != nil || a.families[0].Stats.Repaired+a.families[1].Stats.Repaired > 0 {
				t.Errorf("the rules take the lease for a change by others: %v", err)
			}
			other := NewLease() // the next proxy's
			for family := range to {
				if err := do(func() error { return other.End(way(family)) }); err != nil || held(family) != "" {
					t.Errorf("%s: after its end the list has %q, %v", family, held(family), err)
				}
			}
			for family, at := range to {
				if err := renew(lease, family, at); err != nil {
					t.Fatal(err)
				}
				moved := netip.AddrPortFrom(at.Addr(), 7487)
				if err := renew(other, family, moved); !errors.Is(err, fs.ErrNotExist) || held(family) != "" {
					t.Errorf("%s: leased for another port: %v, the list of this one has %q", family, err, held(family))
				}
			}
			if err := do(func() error {
				return lease.Renew(plan.RelayWay{Family: lb.IPv4, Protocol: lb.UDP}, to[lb.IPv4], time.Second)
			}); err == nil {
				t.Error("UDP is leased")
			}
			if err := renew(lease, lb.IPv6, to[lb.IPv4]); err == nil {
				t.Error("an address of another family is leased")
			}
		})
	}
}

// A Service that asks for the relay where the rules have none is written without.
func TestRelayWithoutRules(t *testing.T) {
	s := seed(func(svc *lb.Service) { svc.Relay = "true" })[lb.Key{Namespace: "default", Name: "my-nginx"}]
	s.Relay = true
	for _, relay := range []bool{false, true} {
		config, leads := seedConfig, false
		config.Relay = relay
		for _, rules := range (renderer{config, lb.IPv4}).service(s).chains {
			leads = leads || slices.ContainsFunc(rules, func(rule string) bool { return target(rule) == chainRelay })
		}
		if leads != relay {
			t.Errorf("with a relay: %v, rules lead there: %v", relay, leads)
		}
	}
}
