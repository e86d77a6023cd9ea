package bgp

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/speaker/plan"
)

const frrInternal = `router bgp 64500
 bgp router-id 10.0.0.2
 neighbor 10.0.0.1 remote-as 64500
`

// Each attribute is seen to arrive, and what is for the other kind of peer is seen not to.
func TestFRRSeesAttributes(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, config string
		change       func(*plan.BGPSession)
		route        plan.Route
		path         string // AS path
		localPref    uint32 // 0 for none
		med          uint32
		communities  string
		large        string
	}{
		{"external", frrExternal, nil, plan.Route{
			LocalPref: 300, MED: 50, HasMED: true, Prepend: 2,
			Communities: []lb.Community{{A: 64500, B: 100}, {A: 65535, B: 65281}, {Large: true, A: 64500, B: 1, C: 2}},
		}, "64500 64500 64500", 0, 50, "64500:100 no-export", "64500:1:2"},
		{"internal", frrInternal, func(d *plan.BGPSession) { d.PeerASN = 64500 }, plan.Route{
			LocalPref: 300, MED: 50, HasMED: true, Prepend: 2,
			Communities: []lb.Community{{Large: true, A: 4200000000, B: 1, C: 2}},
		}, "", 300, 50, "", "4200000000:1:2"},
		{"internal, default preference", frrInternal, func(d *plan.BGPSession) { d.PeerASN = 64500 },
			plan.Route{LocalPref: plan.DefaultLocalPref}, "", 100, 0, "", ""},
		{"graceful shutdown", frrExternal, nil, plan.Route{Communities: []lb.Community{plan.GracefulShutdown}}, "64500", 0, 0,
			"graceful-shutdown", ""},
		{"AS numbers of four octets", strings.ReplaceAll(strings.ReplaceAll(frrExternal, "64501", "4200000001"), "64500",
			"4200000000"),
			func(d *plan.BGPSession) { d.LocalASN, d.PeerASN = 4200000000, 4200000001 }, plan.Route{Prepend: 1},
			"4200000000 4200000000", 0, 0, "", ""},
		{"dynamic, external", frrExternal, func(d *plan.BGPSession) { d.PeerASN, d.Dynamic = 0, lb.ExternalASN },
			plan.Route{LocalPref: 300}, "64500", 0, 0, "", ""},
		{"dynamic, internal", frrInternal, func(d *plan.BGPSession) { d.PeerASN, d.Dynamic = 0, lb.InternalASN },
			plan.Route{LocalPref: 300}, "", 300, 0, "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			r := routertest.FRR(t, l.router, router.Options{Config: test.config})
			a, _ := l.start(t)
			set(a, external(func(d *plan.BGPSession) {
				if test.change != nil {
					test.change(d)
				}
				d.Routes = map[netip.Prefix]plan.Route{netip.MustParsePrefix("192.0.2.1/32"): test.route}
			}))
			eventually(t, a, "in step", synced)
			wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
			p, err := frrPath(t, r, "192.0.2.1/32")
			if err != nil {
				t.Fatal(err)
			}
			pref := uint32(0)
			for _, v := range []*uint32{p.LocalPref, p.LocalPreference} {
				if v != nil {
					pref = *v
				}
			}
			med := uint32(0)
			if p.Metric != nil {
				med = *p.Metric
			}
			path := p.ASPath.String
			if path == "Local" {
				path = ""
			}
			wantPref := test.localPref
			if test.name == "graceful shutdown" {
				pref = wantPref // FRR lowers it by itself, which is what the community is for
			}
			if path != test.path || pref != wantPref || med != test.med || p.Community.String != test.communities ||
				p.LargeCommunity.String != test.large || !p.Valid {
				t.Errorf("path %q, local preference %d, MED %d, communities %q, large %q, valid %v", path, pref, med,
					p.Community.String, p.LargeCommunity.String, p.Valid)
			}
		})
	}
}

// Routes of each family over sessions of each family, with the next hop that FRR sees.
func TestFRRFamiliesAndNextHops(t *testing.T) {
	t.Parallel()
	v6 := netip.MustParseAddr("fd00::2")
	both := []lb.Family{lb.IPv4, lb.IPv6}
	overV6 := "router bgp 64501\n bgp router-id 10.0.0.2\n no bgp ebgp-requires-policy\n no bgp default ipv4-unicast\n " +
		"neighbor fd00::1 remote-as 64500\n%s"
	activate := func(neighbor string, families ...string) string {
		var s strings.Builder
		for _, f := range families {
			fmt.Fprintf(&s, " address-family %s unicast\n  neighbor %s activate\n exit-address-family\n", f, neighbor)
		}
		return s.String()
	}
	for _, test := range []struct {
		name, config string
		change       func(*plan.BGPSession)
		hop4, hop6   string // next hops that FRR sees; "" where there is no route
		held         lb.Family
		reason       lb.Reason
	}{
		{"IPv6 over IPv6", fmt.Sprintf(overV6, activate("fd00::1", "ipv6")),
			func(d *plan.BGPSession) { d.Addr, d.Families = v6, both[1:] }, "", "fd00::1", lb.IPv4, lb.ReasonFamilyNotOffered},
		{"both over IPv4", frrExternal + activate("10.0.0.1", "ipv6"),
			func(d *plan.BGPSession) { d.Families, d.NextHop6 = both, netip.MustParseAddr("fd00::1") }, "10.0.0.1", "fd00::1",
			"",
			""},
		{"both over IPv4 on a node without IPv6", frrExternal + activate("10.0.0.1", "ipv6"),
			func(d *plan.BGPSession) { d.Families = both }, "10.0.0.1", "", lb.IPv6, lb.ReasonNoNextHop},
		{"both over IPv4 with a router that takes one", frrExternal,
			func(d *plan.BGPSession) { d.Families, d.NextHop6 = both, netip.MustParseAddr("fd00::1") }, "10.0.0.1", "", lb.IPv6,
			lb.ReasonFamilyNotOffered},
		{"both over IPv6, IPv4 with an IPv6 next hop",
			fmt.Sprintf(overV6, " neighbor fd00::1 capability extended-nexthop\n"+activate("fd00::1", "ipv4", "ipv6")),
			func(d *plan.BGPSession) { d.Addr, d.Families = v6, both }, "fd00::1", "fd00::1", "", ""},
		{"both over IPv6, IPv4 with an IPv4 next hop", fmt.Sprintf(overV6, activate("fd00::1", "ipv4", "ipv6")),
			func(d *plan.BGPSession) { d.Addr, d.Families, d.NextHop4 = v6, both, netip.MustParseAddr("10.0.0.1") }, "10.0.0.1",
			"fd00::1", "", ""},
		{"both over IPv6, no next hop for IPv4", fmt.Sprintf(overV6, activate("fd00::1", "ipv4", "ipv6")),
			func(d *plan.BGPSession) { d.Addr, d.Families = v6, both }, "", "fd00::1", lb.IPv4, lb.ReasonNoNextHop},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			r := routertest.FRR(t, l.router, router.Options{Config: test.config})
			a, _ := l.start(t)
			set(a, external(func(d *plan.BGPSession) {
				d.Routes = routes("192.0.2.1/32", "fd01::1/128")
				test.change(d)
			}))
			s := eventually(t, a, "in step", synced)
			for family, want := range map[string]string{"ipv4": test.hop4, "ipv6": test.hop6} {
				prefix := map[string]string{"ipv4": "192.0.2.1/32", "ipv6": "fd01::1/128"}[family]
				if want == "" {
					continue
				}
				wantPrefixes(t, r, family, prefix)
				p, err := frrPath(t, r, prefix)
				if err != nil || !p.Valid || !slices.ContainsFunc(p.NextHops, func(h struct {
					IP    string `json:"ip"`
					AFI   string `json:"afi"`
					Scope string `json:"scope"`
				}) bool {
					return h.IP == want
				}) {
					t.Errorf("%s: path %+v, %v; want next hop %s", prefix, p, err, want)
				}
			}
			if test.held == "" && len(s.Held) > 0 || test.held != "" && s.Held[test.held].Reason != test.reason {
				t.Errorf("held: %+v", s.Held)
			}
		})
	}
}

// An unnumbered session finds the router by its advertisements, and the router finds the node.
func TestFRRUnnumbered(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.node.Run(t, "ip", "addr", "flush", "dev", "eth0", "scope", "global")
	l.router.Run(t, "ip", "addr", "flush", "dev", "eth0", "scope", "global")
	r := routertest.FRR(t, l.router, router.Options{Config: `router bgp 64501
 bgp router-id 10.0.0.2
 no bgp ebgp-requires-policy
 neighbor eth0 interface remote-as external
 neighbor eth0 password secret
 address-family ipv6 unicast
  neighbor eth0 activate
 exit-address-family
`})
	a := startAgent(t, l.node)
	set(a, external(func(d *plan.BGPSession) {
		d.Addr, d.Interface, d.Families = netip.Addr{}, "eth0", []lb.Family{lb.IPv4, lb.IPv6}
		d.PeerASN, d.Dynamic, d.Password = 0, lb.ExternalASN, "secret"
		d.Routes = routes("192.0.2.1/32", "fd01::1/128")
	}))
	s := eventually(t, a, "in step", synced)
	if !s.Negotiated.ExtendedNextHop || !s.Negotiated.Peer.Addr().IsLinkLocalUnicast() {
		t.Errorf("negotiated %+v", s.Negotiated)
	}
	wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	wantPrefixes(t, r, "ipv6", "fd01::1/128")
	own := s.Negotiated.Local.Addr().WithZone("").String()
	for _, prefix := range []string{"192.0.2.1/32", "fd01::1/128"} {
		if p, err := frrPath(t, r, prefix); err != nil || !p.Valid || p.NextHops[len(p.NextHops)-1].IP != own {
			t.Errorf("%s: %+v, %v; want next hop %s", prefix, p, err, own)
		}
	}
	routertest.Eventually(t, "routes in the router's kernel", limit, func() error {
		table := l.router.Run(t, "ip", "route", "show", "192.0.2.1") + l.router.Run(t, "ip", "-6", "route", "show", "fd01::1")
		if strings.Count(table, "dev eth0") != 2 {
			return fmt.Errorf("%s", table)
		}
		return nil
	})
	// Nobody takes the node for a default router.
	if table := l.router.Run(t, "ip", "-6", "route", "show", "default"); table != "" {
		t.Errorf("default route: %s", table)
	}
}

func TestUnnumberedSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	a := startAgent(t, l.node)
	unnumbered := func(name string) plan.BGPSession {
		return external(func(d *plan.BGPSession) { d.Addr, d.Interface = netip.Addr{}, name })
	}
	set(a, unnumbered("eth9"))
	eventually(t, a, "no interface", func(s Status) bool {
		return s.Reason == lb.ReasonInterfaceMissing && strings.Contains(s.LastError, "interface eth9")
	})
	set(a, unnumbered("eth0"))
	eventually(t, a, "no router", func(s Status) bool {
		return s.LastError == "no router has advertised itself on interface eth0 yet" && s.State == Idle
	})
}

func TestFRRPasswords(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	routertest.FRR(
		t, l.router,
		router.Options{
			Config: frrExternal + " neighbor 10.0.0.1 password right\n neighbor fd00::1 remote-as 64500\n neighbor fd00::1 " +
				"password right\n address-family ipv6 unicast\n  neighbor fd00::1 activate\n exit-address-family\n"})
	a, _ := l.start(t)
	with := func(password, addr string) plan.BGPSession {
		return external(func(d *plan.BGPSession) {
			d.Password, d.Addr, d.Routes = password, netip.MustParseAddr(addr), routes("192.0.2.1/32")
			if d.Addr.Is6() {
				d.Families = []lb.Family{lb.IPv6}
			}
		})
	}
	for _, addr := range []string{"10.0.0.2", "fd00::2"} {
		for _, wrong := range []string{"wrong", ""} {
			set(a, with(wrong, addr))
			eventually(t, a, "refused", func(s Status) bool {
				return s.State != Established && strings.Contains(s.LastError, "timeout") &&
					strings.Contains(s.LastError, "MD5") == (wrong != "")
			})
		}
		set(a, with("right", addr))
		eventually(t, a, "in step", func(s Status) bool { return s.Synced && s.Negotiated.Peer.Addr().String() == addr })
	}
}

// A session over another router needs multihop, and multihop is what lets packets live that long.
func TestFRRMultihop(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	far := newLAN(t) // its node's namespace is the far end of a second cable
	connectThrough(t, l, far)
	r := routertest.FRR(
		t, far.router,
		router.Options{
			Config: "router bgp 64501\n bgp router-id 10.9.0.2\n no bgp ebgp-requires-policy\n neighbor 10.0.0.1 remote-as " +
				"64500\n neighbor 10.0.0.1 ebgp-multihop 5\n neighbor 10.0.0.1 timers connect 1\n neighbor 10.0.0.1 passive\n"})
	a, _ := l.start(t)
	multihop := func(on bool) plan.BGPSession {
		return external(func(d *plan.BGPSession) {
			d.Addr, d.MultiHop, d.Routes = netip.MustParseAddr("10.9.0.2"), on, routes("192.0.2.1/32")
		})
	}
	set(a, multihop(false))
	eventually(t, a, "out of reach", func(s Status) bool { return s.State != Established && s.LastError != "" })
	set(a, multihop(true))
	eventually(t, a, "in step", synced)
	wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
}

func TestFRRHoldTime(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.FRR(t, l.router, router.Options{Config: frrExternal + " neighbor 10.0.0.1 timers 2 6\n"})
	a, _ := l.start(t)
	for hold, want := range map[time.Duration]time.Duration{30 * time.Second: 6 * time.Second,
		3 * time.Second: 3 * time.Second} {
		set(a, external(func(d *plan.BGPSession) { d.HoldTime = hold }))
		eventually(t, a, "in step", func(s Status) bool { return s.Synced && s.Negotiated.HoldTime == want })
		var answer map[string]struct {
			Hold      int    `json:"bgpTimerHoldTimeMsecs"`
			Keepalive int    `json:"bgpTimerKeepAliveIntervalMsecs"`
			State     string `json:"bgpState"`
		}
		if err := r.JSON(t.Context(), "show bgp neighbors 10.0.0.1 json", &answer); err != nil ||
			answer["10.0.0.1"].Hold != int(want.Milliseconds()) {
			t.Errorf("%v, %v; want a hold time of %v", answer["10.0.0.1"], err, want)
		}
	}
}

// What FRR says of a wrong AS number, on either side, is shown.
func TestFRRWrongASN(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	routertest.FRR(t, l.router, router.Options{Config: frrExternal})
	a, _ := l.start(t)
	set(a, external(func(d *plan.BGPSession) { d.PeerASN = 64999 }))
	eventually(t, a, "our refusal", func(s Status) bool {
		return strings.Contains(
			s.LastError, "sent NOTIFICATION OPEN Message Error/Bad Peer AS: the peer says AS 64501, peerASN is 64999")
	})
	set(a, external(func(d *plan.BGPSession) { d.LocalASN = 64999 }))
	eventually(
		t, a, "its refusal",
		func(s Status) bool { return s.LastError == "received NOTIFICATION OPEN Message Error/Bad Peer AS" })
	set(a, external(func(d *plan.BGPSession) { d.PeerASN, d.Dynamic = 0, lb.InternalASN }))
	eventually(
		t, a, "not internal",
		func(s Status) bool { return strings.Contains(s.LastError, "dynamicASN internal wants ours, 64500") })
}

func TestFRRSourceAddress(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	l.node.Run(t, "ip", "addr", "add", "10.0.0.7/24", "dev", "eth0")
	routertest.FRR(t, l.router, router.Options{Config: strings.ReplaceAll(frrExternal, "10.0.0.1", "10.0.0.7")})
	a, _ := l.start(t)
	set(a, external(func(d *plan.BGPSession) { d.Source = netip.MustParseAddr("10.0.0.7") }))
	s := eventually(t, a, "in step", synced)
	if s.Negotiated.Local.Addr().String() != "10.0.0.7" {
		t.Errorf("negotiated %+v", s.Negotiated)
	}
	set(a, external(func(d *plan.BGPSession) { d.Source = netip.MustParseAddr("10.0.0.8") }))
	eventually(t, a, "not ours", func(s Status) bool {
		return strings.Contains(s.LastError, "cannot assign requested address") && s.Reason == lb.ReasonSourceMissing
	})
}

// A router that opens the sessions itself, as it listens nowhere; and one that both listens and
// connects.
func TestFRRConnects(t *testing.T) {
	t.Parallel()
	neighbor := func(neighbor, remote string) string {
		return fmt.Sprintf("router bgp 64501\n bgp router-id 10.0.0.2\n no bgp ebgp-requires-policy\n neighbor %[1]s %[2]s\n"+
			" neighbor %[1]s password secret\n neighbor %[1]s timers connect 1\n address-family ipv6 unicast\n  neighbor "+
			"%[1]s activate\n exit-address-family\n", neighbor, remote)
	}
	for _, test := range []struct {
		name, listen, config string
		change               func(*plan.BGPSession)
		both                 bool
	}{
		{"IPv4", ":179", neighbor("10.0.0.1", "remote-as 64500"), nil, false},
		{"IPv4, at one address", "10.0.0.1:179", neighbor("10.0.0.1", "remote-as 64500"),
			func(d *plan.BGPSession) { d.Source = netip.MustParseAddr("10.0.0.1") }, false},
		{"IPv6", "[::]:179", neighbor("fd00::1", "remote-as 64500"),
			func(d *plan.BGPSession) { d.Addr = netip.MustParseAddr("fd00::2") }, false},
		{"unnumbered", ":179", neighbor("eth0", "interface remote-as external"),
			func(d *plan.BGPSession) { d.Addr, d.Interface = netip.Addr{}, "eth0" }, false},
		{"both connect", ":179", neighbor("10.0.0.1", "remote-as 64500"), nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			l := newLAN(t)
			r := routertest.FRR(t, l.router, router.Options{Config: test.config, NoListen: !test.both})
			a := startListeningAgent(t, l.node, test.listen)
			d := external(func(d *plan.BGPSession) {
				d.Password, d.Families, d.NextHop6 = "secret", []lb.Family{lb.IPv4, lb.IPv6}, netip.MustParseAddr("fd00::1")
				d.NextHop4, d.Routes = netip.MustParseAddr("10.0.0.1"), routes("192.0.2.1/32", "fd01::1/128")
				if test.change != nil {
					test.change(d)
				}
			})
			set(a, d)
			s := eventually(t, a, "in step", synced)
			if !test.both && !s.Negotiated.Incoming {
				t.Errorf("negotiated %+v", s.Negotiated)
			}
			wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
			wantPrefixes(t, r, "ipv6", "fd01::1/128")
			if test.both {
				for range 5 {
					before := a.Statuses()["tor"].Flaps
					if _, err := r.Ask(t.Context(), "clear bgp *"); err != nil {
						t.Fatal(err)
					}
					eventually(t, a, "back", func(s Status) bool { return s.Synced && s.Flaps > before })
				}
				r.Kill("bgpd")
				eventually(t, a, "lost", func(s Status) bool { return s.State != Established })
				if err := r.Launch(t.Context()); err != nil {
					t.Fatal(err)
				}
				eventually(t, a, "back after a crash", synced)
				wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
			}
			a.Set(nil)
			wantPrefixes(t, r, "ipv4")
		})
	}
}

// The routes of an agent that restarts stay at the router, marked as stale until it has them again;
// those of one that ends for good, or that are not announced again, do not.
func TestFRRGracefulRestart(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.FRR(
		t, l.router,
		router.Options{
			Config: frrExternal + " neighbor 10.0.0.1 graceful-restart-helper\n bgp graceful-restart stalepath-time 60\n"})
	graceful := func(list ...string) plan.BGPSession {
		return external(func(d *plan.BGPSession) { d.GracefulRestart, d.Routes = true, routes(list...) })
	}
	a, stop := l.start(t)
	set(a, graceful("192.0.2.1/32", "192.0.2.2/32"))
	if s := eventually(t, a, "in step", synced); !s.Negotiated.GracefulRestart {
		t.Fatalf("negotiated %+v", s.Negotiated)
	}
	wantPrefixes(t, r, "ipv4", "192.0.2.1/32", "192.0.2.2/32")
	kernel := func(want int) func() error {
		return func() error {
			if table := l.router.Run(t, "ip", "route", "show", "proto", "bgp"); strings.Count(table, "192.0.2.") != want {
				return fmt.Errorf("the router's kernel has\n%s", table)
			}
			return nil
		}
	}
	routertest.Eventually(t, "routes in the kernel", limit, kernel(2))

	stop()
	routertest.Eventually(t, "stale", limit, func() error {
		p, err := frrPath(t, r, "192.0.2.1/32")
		if err == nil && !p.Stale {
			err = fmt.Errorf("path %+v", p)
		}
		return err
	})
	if err := kernel(2)(); err != nil {
		t.Error(err)
	}

	// Watch the kernel's routes while the next agent starts: not one may be missing at any time.
	gone := watchRoutes(t, l, "192.0.2.1")
	a, _ = l.start(t)
	set(a, graceful("192.0.2.1/32"))
	eventually(t, a, "in step", synced)
	wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	routertest.Eventually(t, "not stale", limit, func() error {
		p, err := frrPath(t, r, "192.0.2.1/32")
		if err == nil && p.Stale {
			err = fmt.Errorf("path %+v", p)
		}
		return err
	})
	if lines := gone(); lines != "" {
		t.Errorf("the route of the VIP changed in the router's kernel:\n%s", lines)
	}

	a.Set(nil)
	wantPrefixes(t, r, "ipv4")
	routertest.Eventually(t, "no routes in the kernel", limit, kernel(0))
	if left := a.Statuses(); len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
}

// An agent that crashes says nothing either. Its successor is another process, on another
// connection.
func TestFRRKeepsTheRoutesOfACrashedAgent(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.FRR(t, l.router, router.Options{Config: frrExternal + " neighbor 10.0.0.1 graceful-restart-helper\n"})
	graceful := external(func(d *plan.BGPSession) { d.GracefulRestart, d.Routes = true, routes("192.0.2.1/32") })
	first := startAgent(t, l.node)
	set(first, graceful)
	eventually(t, first, "in step", synced)
	routertest.Eventually(t, "route in the kernel", limit, func() error {
		if l.router.Run(t, "ip", "route", "show", "192.0.2.1") == "" {
			return errors.New("none")
		}
		return nil
	})
	gone := watchRoutes(t, l, "192.0.2.1")
	for range 3 {
		first.kill()
		routertest.Eventually(t, "stale", limit, func() error {
			p, err := frrPath(t, r, "192.0.2.1/32")
			if err == nil && !p.Stale {
				err = fmt.Errorf("path %+v", p)
			}
			return err
		})
		first = startAgent(t, l.node)
		set(first, graceful)
		eventually(t, first, "in step", synced)
		routertest.Eventually(t, "not stale", limit, func() error {
			p, err := frrPath(t, r, "192.0.2.1/32")
			if err == nil && p.Stale {
				err = fmt.Errorf("path %+v", p)
			}
			return err
		})
	}
	if lines := gone(); lines != "" {
		t.Errorf("the route changed in the router's kernel:\n%s", lines)
	}
	// A drain and then power-off, or a crash: there is nothing that could go stale.
	graceful.Routes = nil
	set(first, graceful)
	wantPrefixes(t, r, "ipv4")
	first.kill()
	routertest.Eventually(t, "session lost", limit, func() error {
		answer, err := r.Ask(t.Context(), "show bgp summary")
		if err == nil && !strings.Contains(answer, "Active") && !strings.Contains(answer, "Connect") {
			err = errors.New(answer)
		}
		return err
	})
	wantPrefixes(t, r, "ipv4")
}

// Two routers and two nodes: each router has both nodes as next hops of a VIP in its kernel, and
// follows when one withdraws.
func TestFRRPairWithECMP(t *testing.T) {
	t.Parallel()
	lan := newBridgedLAN(t, "node-1", "node-2", "tor-1", "tor-2")
	var routers []*router.Router
	for i, ns := range []*nstest.NS{lan[2], lan[3]} {
		routers = append(routers, routertest.FRR(t, ns, router.Options{Config: fmt.Sprintf(`router bgp 64501
 bgp router-id 10.0.0.%d
 no bgp ebgp-requires-policy
 neighbor nodes peer-group
 neighbor nodes remote-as external
 bgp listen range 10.0.0.0/24 peer-group nodes
`, i+3)}))
	}
	var agents []*agent
	want := func(i int, list ...string) map[string]plan.BGPSession {
		sessions := map[string]plan.BGPSession{}
		for n := range 2 {
			sessions[fmt.Sprintf("tor-%d", n+1)] = external(func(d *plan.BGPSession) {
				d.LocalASN = 64500 // both nodes: ECMP needs paths of one AS, or the router's leave to mix them
				d.RouterID = netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
				d.Addr, d.Routes = netip.AddrFrom4([4]byte{10, 0, 0, byte(n + 3)}), routes(list...)
			})
		}
		return sessions
	}
	for i := range 2 {
		agents = append(agents, startAgent(t, lan[i]))
		agents[i].Set(want(i, "192.0.2.1/32", "192.0.2.2/32"))
	}
	hops := func(vip string, nodes ...string) {
		t.Helper()
		for _, ns := range lan[2:] {
			routertest.Eventually(t, "next hops of "+vip, limit, func() error {
				table := ns.Run(t, "ip", "route", "show", vip)
				for _, n := range []string{"10.0.0.1", "10.0.0.2"} {
					if slices.Contains(nodes, n) != strings.Contains(table, "via "+n+" ") {
						return fmt.Errorf("%q, want %v", table, nodes)
					}
				}
				return nil
			})
		}
	}
	hops("192.0.2.1", "10.0.0.1", "10.0.0.2")
	// On a planned end the routers move away while the route is still there, and so is who serves what
	// is under way.
	leaving := want(0, "192.0.2.1/32", "192.0.2.2/32")
	for _, s := range leaving {
		s.Routes[netip.MustParsePrefix("192.0.2.1/32")] = plan.Route{Communities: []lb.Community{plan.GracefulShutdown}}
	}
	agents[0].Set(leaving)
	hops("192.0.2.1", "10.0.0.2")
	hops("192.0.2.2", "10.0.0.1", "10.0.0.2")
	for _, r := range routers {
		if answer, err := r.Ask(t.Context(), "show bgp ipv4 unicast 192.0.2.1/32"); err != nil ||
			strings.Count(answer, "from 10.0.0.") != 2 {
			t.Errorf("the router has not kept both paths: %v\n%s", err, answer)
		}
	}
	agents[0].Set(want(0, "192.0.2.2/32"))
	hops("192.0.2.1", "10.0.0.2")
	hops("192.0.2.2", "10.0.0.1", "10.0.0.2")
	agents[1].kill()
	hops("192.0.2.1")
	hops("192.0.2.2", "10.0.0.1")
}

// Faults of the router.
func TestFRRFaults(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.FRR(t, l.router, router.Options{Config: frrExternal})
	a, _ := l.start(t)
	set(a, external(func(d *plan.BGPSession) { d.HoldTime, d.Routes = 3*time.Second, routes("192.0.2.1/32") }))
	eventually(t, a, "in step", synced)

	t.Run("reset", func(t *testing.T) {
		if _, err := r.Ask(t.Context(), "clear bgp *"); err != nil {
			t.Fatal(err)
		}
		s := eventually(t, a, "back", func(s Status) bool { return s.Synced && s.Flaps == 1 })
		if s.LastError != "received NOTIFICATION Cease/Administrative Reset" {
			t.Errorf("last error %q", s.LastError)
		}
		wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	})
	t.Run("soft reset", func(t *testing.T) {
		before := a.Statuses()["tor"].Counters.UpdatesOut
		if _, err := r.Ask(t.Context(), "clear bgp ipv4 unicast 10.0.0.1 in"); err != nil {
			t.Fatal(err)
		}
		eventually(t, a, "sent again", func(s Status) bool { return s.Counters.UpdatesOut == before+1 && s.Flaps == 1 })
	})
	t.Run("crash and restart", func(t *testing.T) {
		r.Kill("bgpd")
		eventually(t, a, "lost", func(s Status) bool { return s.State != Established && s.Flaps == 2 })
		if err := r.Launch(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, a, "back", synced)
		wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	})
	t.Run("frozen", func(t *testing.T) {
		if err := r.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		eventually(t, a, "lost", func(s Status) bool {
			return s.State != Established && strings.Contains(s.LastError, "Hold Timer Expired")
		})
		if err := r.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		eventually(t, a, "back", synced)
		wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	})
	t.Run("flaps", func(t *testing.T) {
		before := a.Statuses()["tor"].Flaps
		for i := range seeds.Of(5, 20) {
			if _, err := r.Ask(t.Context(), "clear bgp *"); err != nil {
				t.Fatal(err)
			}
			eventually(t, a, "back", func(s Status) bool { return s.Synced && s.Flaps == before+i+1 })
		}
		wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	})
	t.Run("BFD", func(t *testing.T) {
		d := external(func(d *plan.BGPSession) {
			d.HoldTime, d.Routes, d.BFDDown = 3*time.Second, routes("192.0.2.1/32"),
				true
		})
		set(a, d)
		wantPrefixes(t, r, "ipv4")
		d.BFDDown = false
		set(a, d)
		wantPrefixes(t, r, "ipv4", "192.0.2.1/32")
	})
}

func TestFRRRoutesAreShownAndNeverUsed(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	routertest.FRR(
		t, l.router,
		router.Options{
			Config: frrExternal + " network 203.0.113.0/24\n no bgp network import-check\n neighbor 10.0.0.1 " +
				"default-originate\n"})
	a, _ := l.start(t)
	set(a, external(nil))
	eventually(t, a, "routes refused", func(s Status) bool {
		return s.Synced && s.Counters.UpdatesIn >= 2 &&
			s.Received == 0
	})
	set(a, external(func(d *plan.BGPSession) { d.AcceptRoutes = true }))
	s := eventually(t, a, "routes shown", func(s Status) bool { return s.Received == 2 })
	if s.Routes[1].Prefix.String() != "203.0.113.0/24" || s.Routes[1].NextHop.String() != "10.0.0.2" ||
		s.Routes[1].ASPath != "64501" || s.Flaps != 0 {
		t.Errorf("status %+v", s)
	}
	if table := l.node.Run(t, "ip", "route"); strings.Contains(table, "203.0.113.0") ||
		strings.Contains(table, "default") {
		t.Errorf("installed:\n%s", table)
	}
}
