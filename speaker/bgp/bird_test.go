package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// birdConfig is BIRD as 10.0.0.2 and fd00::2; body is what its session with the node says besides
// the addresses' families.
func birdConfig(local, neighbor, channels string) string {
	return fmt.Sprintf(`router id 10.0.0.2;
protocol device {}
protocol direct { ipv4; ipv6; }
protocol kernel k4 { ipv4 { export all; }; merge paths yes; }
protocol kernel k6 { ipv6 { export all; }; merge paths yes; }
protocol bgp node {
	local as %s;
	neighbor %s;
	connect retry time 1;
	error wait time 1, 2;
	%s
}
`, local, neighbor, channels)
}

const (
	birdIPv4 = "ipv4 { import all; export none; };"
	birdIPv6 = "ipv6 { import all; export none; };"
)

// wantBIRD waits until BIRD's full description of a route has all of the words.
func wantBIRD(t testing.TB, r *router.Router, prefix string, words ...string) {
	t.Helper()
	routertest.Eventually(t, prefix, limit, func() error {
		answer, err := r.Ask(t.Context(), "show route all "+prefix)
		for _, word := range words {
			if err == nil && !strings.Contains(answer, word) {
				err = fmt.Errorf("no %q in\n%s", word, answer)
			}
		}
		return err
	})
}

func wantNoBIRD(t testing.TB, r *router.Router, prefix string) {
	t.Helper()
	routertest.Eventually(t, "no "+prefix, limit, func() error {
		if answer, err := r.Ask(t.Context(), "show route "+prefix); err == nil && strings.Contains(answer, "unicast") {
			return fmt.Errorf("%s", answer)
		}
		return nil
	})
}

func TestBIRDSeesAttributes(t *testing.T) {
	t.Parallel()
	full := plan.Route{
		LocalPref: 300, MED: 50, HasMED: true, Prepend: 1,
		Communities: []lb.Community{{A: 64500, B: 100}, {Large: true, A: 4200000000, B: 1, C: 2}},
	}
	for _, test := range []struct {
		name, config string
		change       func(*plan.BGPSession)
		want         []string
	}{
		{"external", birdConfig("64501", "10.0.0.1 as 64500", birdIPv4), nil,
			[]string{"BGP.as_path: 64500 64500", "BGP.next_hop: 10.0.0.1", "BGP.med: 50", "BGP.community: (64500,100)",
				"BGP.large_community: (4200000000, 1, 2)", "BGP.origin: IGP"}},
		{"internal", birdConfig("64500", "10.0.0.1 as 64500", birdIPv4), func(d *plan.BGPSession) { d.PeerASN = 64500 },
			[]string{"BGP.local_pref: 300", "BGP.med: 50", "BGP.as_path: \n"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			r := routertest.BIRD(t, l.router, test.config)
			a, _ := l.start(t)
			set(a, external(func(d *plan.BGPSession) {
				if test.change != nil {
					test.change(d)
				}
				d.Routes = map[netip.Prefix]plan.Route{netip.MustParsePrefix("192.0.2.1/32"): full}
			}))
			eventually(t, a, "in step", synced)
			wantBIRD(t, r, "192.0.2.1/32", test.want...)
			a.Set(nil)
			wantNoBIRD(t, r, "192.0.2.1/32")
		})
	}
}

func TestBIRDFamiliesAndNextHops(t *testing.T) {
	t.Parallel()
	both := []lb.Family{lb.IPv4, lb.IPv6}
	v6 := netip.MustParseAddr("fd00::2")
	for _, test := range []struct {
		name, config string
		change       func(*plan.BGPSession)
		hop4, hop6   string
	}{
		{"both over IPv4", birdConfig("64501", "10.0.0.1 as 64500", birdIPv4+birdIPv6),
			func(d *plan.BGPSession) { d.NextHop6 = netip.MustParseAddr("fd00::1") }, "10.0.0.1", "fd00::1"},
		{"both over IPv6 with extended next hops",
			birdConfig("64501", "fd00::1 as 64500", "ipv4 { import all; export none; extended next hop on; };"+birdIPv6),
			func(d *plan.BGPSession) { d.Addr = v6 }, "fd00::1", "fd00::1"},
		{"both over IPv6 with an IPv4 next hop", birdConfig("64501", "fd00::1 as 64500", birdIPv4+birdIPv6),
			func(d *plan.BGPSession) { d.Addr, d.NextHop4 = v6, netip.MustParseAddr("10.0.0.1") }, "10.0.0.1", "fd00::1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			r := routertest.BIRD(t, l.router, test.config)
			a, _ := l.start(t)
			set(a, external(func(d *plan.BGPSession) {
				d.Families, d.Routes = both, routes("192.0.2.1/32", "fd01::1/128")
				test.change(d)
			}))
			eventually(t, a, "in step", synced)
			wantBIRD(t, r, "192.0.2.1/32", "BGP.next_hop: "+test.hop4, "unicast")
			wantBIRD(t, r, "fd01::1/128", "BGP.next_hop: "+test.hop6, "unicast")
			routertest.Eventually(t, "routes in the kernel", limit, func() error {
				table := l.router.Run(t, "ip", "route", "show", "192.0.2.1") + l.router.Run(t, "ip", "-6", "route", "show",
					"fd01::1")
				if strings.Count(table, "dev eth0") != 2 {
					return fmt.Errorf("%s", table)
				}
				return nil
			})
			set(a, external(func(d *plan.BGPSession) {
				d.Families = both
				test.change(d)
			}))
			wantNoBIRD(t, r, "192.0.2.1/32")
			wantNoBIRD(t, r, "fd01::1/128")
		})
	}
}

func TestBIRDUnnumbered(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.BIRD(t, l.router, `router id 10.0.0.2;
protocol device {}
protocol direct { ipv4; ipv6; }
protocol radv { interface "eth0" { max ra interval 4; }; }
protocol bgp nodes {
	local as 64501;
	neighbor range fe80::/10 external;
	interface "eth0";
	dynamic name "node";
	ipv4 { import all; export none; extended next hop on; };
	ipv6 { import all; export none; };
}
`)
	a := startAgent(t, l.node)
	set(a, external(func(d *plan.BGPSession) {
		d.Addr, d.Interface, d.Families = netip.Addr{}, "eth0", []lb.Family{lb.IPv4, lb.IPv6}
		d.Routes = routes("192.0.2.1/32", "fd01::1/128")
	}))
	s := eventually(t, a, "in step", synced)
	own := s.Negotiated.Local.Addr().WithZone("").String()
	wantBIRD(t, r, "192.0.2.1/32", "BGP.next_hop", own)
	wantBIRD(t, r, "fd01::1/128", "BGP.next_hop", own)
}

func TestBIRDPasswordsAndTimers(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.BIRD(t, l.router, birdConfig("64501", "10.0.0.1 as 64500", `password "right"; hold time 6; `+birdIPv4))
	a, _ := l.start(t)
	with := func(password string) plan.BGPSession {
		return external(func(d *plan.BGPSession) { d.Password, d.Routes = password, routes("192.0.2.1/32") })
	}
	set(a, with("wrong"))
	eventually(t, a, "refused", func(s Status) bool {
		return s.State != Established &&
			strings.Contains(s.LastError, "timeout")
	})
	set(a, with("right"))
	eventually(t, a, "in step", func(s Status) bool { return s.Synced && s.Negotiated.HoldTime.Seconds() == 6 })
	wantBIRD(t, r, "192.0.2.1/32", "BGP.next_hop: 10.0.0.1")
}

// BIRD keeps the routes of an agent that restarts too, and takes a multihop session from afar.
func TestBIRDGracefulRestartAndMultihop(t *testing.T) {
	t.Parallel()
	l, far := newLAN(t), newLAN(t)
	connectThrough(t, l, far)
	r := routertest.BIRD(t, far.router, birdConfig("64501", "10.0.0.1 as 64500",
		"multihop 5; graceful restart aware; passive on; "+birdIPv4))
	graceful := external(func(d *plan.BGPSession) {
		d.Addr, d.MultiHop, d.GracefulRestart, d.Routes = netip.MustParseAddr("10.9.0.2"), true, true, routes("192.0.2.1/32")
	})
	a, stop := l.start(t)
	set(a, graceful)
	eventually(t, a, "in step", synced)
	wantBIRD(t, r, "192.0.2.1/32", "BGP.next_hop: 10.0.0.1")
	stop()
	routertest.Eventually(t, "the restart is seen", limit, func() error {
		answer, err := r.Ask(t.Context(), "show protocols all node")
		if err == nil && !strings.Contains(answer, "Neighbor graceful restart active") {
			err = fmt.Errorf("%s", answer)
		}
		return err
	})
	wantBIRD(t, r, "192.0.2.1/32", "BGP.next_hop: 10.0.0.1")
	a, _ = l.start(t)
	set(a, graceful)
	eventually(t, a, "in step", synced)
	wantBIRD(t, r, "192.0.2.1/32", "BGP.next_hop: 10.0.0.1")
	a.Set(nil)
	wantNoBIRD(t, r, "192.0.2.1/32")
}
