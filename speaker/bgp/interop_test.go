package bgp

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// limit is how long something may take that is to happen: long, as machines are slow at times.
const limit = 20 * time.Second

// lan is a node and a router on one cable: .1 and ::1 are the node's, .2 and ::2 the router's.
type lan struct{ node, router *nstest.NS }

func newLAN(t testing.TB) lan {
	l := lan{nstest.New(t), nstest.New(t)}
	nstest.Veth(t, l.node, "eth0", "10.0.0.1/24", l.router, "eth0", "10.0.0.2/24")
	l.node.Run(t, "ip", "addr", "add", "fd00::1/64", "dev", "eth0", "nodad")
	l.router.Run(t, "ip", "addr", "add", "fd00::2/64", "dev", "eth0", "nodad")
	return l
}

// start runs an actor in the node's namespace until the test, or the returned function, ends it.
func (l lan) start(t testing.TB) (*Actor, func()) {
	a := New(Options{
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Hostname: "node-1",
		Dial: func(ctx context.Context, target Target) (conn net.Conn, err error) {
			l.node.Do(t, func() error { conn, err = dial(ctx, target); return nil })
			return conn, err
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
		}
	}
	t.Cleanup(stop)
	return a, stop
}

// external is a session with an external router.
func external(change func(*plan.BGPSession)) plan.BGPSession {
	d := plan.BGPSession{
		LocalASN: 64500, PeerASN: 64501, Addr: netip.MustParseAddr("10.0.0.2"), Port: 179,
		RouterID: netip.MustParseAddr("10.0.0.1"),
		HoldTime: 9 * time.Second, ConnectTime: time.Second, Families: []lb.Family{lb.IPv4},
	}
	if change != nil {
		change(&d)
	}
	return d
}

func routes(list ...string) map[netip.Prefix]plan.Route {
	m := map[netip.Prefix]plan.Route{}
	for _, s := range list {
		m[netip.MustParsePrefix(s)] = plan.Route{LocalPref: plan.DefaultLocalPref}
	}
	return m
}

// speaker is an actor, here or in a process of its own.
type speaker interface {
	Set(map[string]plan.BGPSession)
	Statuses() map[string]Status
}

func set(a speaker, d plan.BGPSession) { a.Set(map[string]plan.BGPSession{"tor": d}) }

// eventually waits for f to find nothing wrong with the status of the session.
func eventually(t testing.TB, a speaker, what string, f func(Status) bool) Status {
	t.Helper()
	var last Status
	routertest.Eventually(t, what, limit, func() error {
		last = a.Statuses()["tor"]
		if !f(last) {
			return fmt.Errorf("status %+v", last)
		}
		return nil
	})
	return last
}

func synced(s Status) bool { return s.Synced }

// path is what FRR shows of a route.
type path struct {
	ASPath struct {
		String string `json:"string"`
	} `json:"aspath"`
	Metric          *uint32                 `json:"metric"`
	LocalPref       *uint32                 `json:"locPrf"`
	LocalPreference *uint32                 `json:"localPref"`
	Origin          string                  `json:"origin"`
	Valid           bool                    `json:"valid"`
	Stale           bool                    `json:"stale"`
	Community       struct{ String string } `json:"community"`
	LargeCommunity  struct{ String string } `json:"largeCommunity"`
	NextHops        []struct {
		IP    string `json:"ip"`
		AFI   string `json:"afi"`
		Scope string `json:"scope"`
	} `json:"nexthops"`
}

// frrPath returns the only path that FRR has for a prefix.
func frrPath(t testing.TB, r *router.Router, prefix string) (path, error) {
	t.Helper()
	family := "ipv4"
	if strings.Contains(prefix, ":") {
		family = "ipv6"
	}
	var answer struct {
		Paths []path `json:"paths"`
	}
	if err := r.JSON(t.Context(), "show bgp "+family+" unicast "+prefix+" json", &answer); err != nil {
		return path{}, err
	}
	if len(answer.Paths) != 1 {
		return path{}, fmt.Errorf("%d paths for %s", len(answer.Paths), prefix)
	}
	return answer.Paths[0], nil
}

// frrPrefixes returns all prefixes of a family that FRR has.
func frrPrefixes(t testing.TB, r *router.Router, family string) []string {
	t.Helper()
	var answer struct {
		Routes map[string]any `json:"routes"`
	}
	if err := r.JSON(t.Context(), "show bgp "+family+" unicast json", &answer); err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(answer.Routes))
}

// wantPrefixes waits until FRR has exactly these prefixes.
func wantPrefixes(t testing.TB, r *router.Router, family string, want ...string) {
	t.Helper()
	slices.Sort(want)
	routertest.Eventually(t, "prefixes", limit, func() error {
		if got := frrPrefixes(t, r, family); !slices.Equal(got, want) {
			return fmt.Errorf("FRR has %q, want %q", got, want)
		}
		return nil
	})
}

const frrExternal = `router bgp 64501
 bgp router-id 10.0.0.2
 no bgp ebgp-requires-policy
 neighbor 10.0.0.1 remote-as 64500
 neighbor 10.0.0.1 timers connect 1
`

func TestFRRHearsAndForgetsRoutes(t *testing.T) {
	l := newLAN(t)
	r := routertest.FRR(t, l.router, router.Options{Config: frrExternal})
	a, stop := l.start(t)
	set(a, external(func(d *plan.BGPSession) { d.Routes = routes("192.0.2.1/32", "192.0.2.2/32", "198.51.100.0/24") }))
	s := eventually(t, a, "in step", synced)
	wantPrefixes(t, r, "ipv4", "192.0.2.1/32", "192.0.2.2/32", "198.51.100.0/24")
	p, err := frrPath(t, r, "192.0.2.1/32")
	if err != nil || p.ASPath.String != "64500" || p.Origin != "IGP" || !p.Valid || p.NextHops[0].IP != "10.0.0.1" {
		t.Errorf("path %+v, %v", p, err)
	}
	if n := s.Negotiated; n.PeerASN != 64501 || n.HoldTime != 9*time.Second || n.KeepaliveTime != 3*time.Second ||
		!n.FourOctetASN ||
		n.PeerID.String() != "10.0.0.2" || s.Prefixes != 3 || s.Counters.UpdatesOut != 1 {
		t.Errorf("status %+v, negotiated %+v", s, s.Negotiated)
	}
	if peers := a.Announced(netip.MustParsePrefix("192.0.2.1/32")); !slices.Equal(peers, []string{"tor"}) {
		t.Errorf("announced to %v", peers)
	}
	var summary struct {
		IPv4 struct {
			Peers map[string]struct{ Hostname string } `json:"peers"`
		} `json:"ipv4Unicast"`
	}
	if err := r.JSON(t.Context(), "show bgp summary json", &summary); err != nil ||
		summary.IPv4.Peers["10.0.0.1"].Hostname != "node-1" {
		t.Errorf("summary %+v, %v", summary, err)
	}
	if sockets := l.node.Run(t, "ss", "-Hltn"); sockets != "" {
		t.Errorf("the node listens:\n%s", sockets)
	}
	set(a, external(func(d *plan.BGPSession) { d.Routes = routes("192.0.2.2/32", "192.0.2.3/32") }))
	wantPrefixes(t, r, "ipv4", "192.0.2.2/32", "192.0.2.3/32")
	stop()
	wantPrefixes(t, r, "ipv4")
	if got := a.Statuses()["tor"]; got.State != Idle || got.Prefixes != 0 {
		t.Errorf("after the end: %+v", got)
	}
}

// connectThrough makes the router of l a plain forwarder to another cable, at whose end is the
// router of far, as 10.9.0.2.
func connectThrough(t testing.TB, l, far lan) {
	nstest.Veth(t, l.router, "eth1", "10.9.0.1/24", far.router, "eth1", "10.9.0.2/24")
	l.router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	l.node.Run(t, "ip", "route", "add", "10.9.0.0/24", "via", "10.0.0.2")
	far.router.Run(t, "ip", "addr", "flush", "dev", "eth0")
	far.router.Run(t, "ip", "route", "add", "10.0.0.0/24", "via", "10.9.0.1")
}

// watchRoutes records changes of the router's routes to addr until the returned function is called,
// which returns them.
func watchRoutes(t testing.TB, l lan, addr string) func() string {
	monitor := exec.Command("ip", "-n", l.router.Name, "-o", "monitor", "route")
	var out bytes.Buffer
	monitor.Stdout = &out
	if err := monitor.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // until it listens
	return func() string {
		monitor.Process.Signal(syscall.SIGTERM) // a background job of a shell ignores an interrupt
		monitor.Wait()
		var lines []string
		for line := range strings.Lines(out.String()) {
			if strings.Contains(line, addr) {
				lines = append(lines, line)
			}
		}
		return strings.Join(lines, "")
	}
}

// newBridgedLAN joins hosts by a switch; their addresses are 10.0.0.1/24 and so on.
func newBridgedLAN(t testing.TB, names ...string) []*nstest.NS {
	bridge := nstest.New(t)
	bridge.Run(t, "ip", "link", "add", "br0", "type", "bridge")
	bridge.Run(t, "ip", "link", "set", "br0", "up")
	var hosts []*nstest.NS
	for i, name := range names {
		host := nstest.New(t)
		nstest.Veth(t, host, "eth0", fmt.Sprintf("10.0.0.%d/24", i+1), bridge, name, "")
		bridge.Run(t, "ip", "link", "set", name, "master", "br0")
		hosts = append(hosts, host)
	}
	return hosts
}
