package lab

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/e2e/router"
)

// Kinds of ToR routers.
const (
	FRR  = "FRR"
	BIRD = "BIRD"
)

// ToR describes the routers at the top of the nodes' rack, which speak BGP with all nodes and stand
// between them and the far client. The zero value is a plain router that speaks nothing.
type ToR struct {
	// Kind is [FRR] or [BIRD]; empty for the plain router.
	Kind string
	// Count is 1, or 2 for a pair: hosts tor-1 and tor-2, both of which clients and nodes spread their
	// connections over. In a cluster of racks each has so many.
	Count int
	// ASN is the routers' AS number, NodeASN the nodes'. The same number makes it iBGP. Racks have
	// numbers of their own, from ASN on.
	ASN, NodeASN uint32
	// BFD is the interval of BFD's packets, three of which must be missing until a node counts as
	// lost; 0 for no BFD.
	BFD time.Duration
	// HoldTime is what the routers propose, in whole seconds; 0 for 90 s.
	HoldTime time.Duration
	// Password is the key of TCP's MD5 signatures; empty for none.
	Password string
	// Unnumbered has the links between racks and spine do without addresses (RFC 5549); only with
	// [Cluster.Racks].
	Unnumbered bool
}

func (t ToR) holdTime() time.Duration { return cmp.Or(t.HoldTime, 90*time.Second) }

// torCables are the interfaces of a ToR router.
const torLAN, torFar = "eth0", "eth1"

// torName names a ToR router, the first of which is 0.
func torName(i int) string { return fmt.Sprintf("tor-%d", i+1) }

// gateways returns the ways out of a segment: the plain router, or all ToR routers, at addresses
// that follow one another.
func (c Cluster) gateways(segment Network) []netip.Addr {
	all := []netip.Addr{segment.Router}
	if c.Racks > 0 && (segment == c.LAN || segment == c.Far) {
		return all // the spine
	}
	for len(all) < c.ToR.Count {
		all = append(all, all[len(all)-1].Next())
	}
	return all
}

// validate returns what is wrong with the description of the routers.
func (t ToR) validate() error {
	if t.Kind == "" {
		if t != (ToR{}) {
			return errors.New("ToR: no Kind: want FRR or BIRD")
		}
		return nil
	}
	var errs []error
	if t.Kind != FRR && t.Kind != BIRD {
		errs = append(errs, fmt.Errorf("ToR: kind %q: want FRR or BIRD", t.Kind))
	}
	if t.Count < 1 || t.Count > 2 {
		errs = append(errs, fmt.Errorf("ToR: count %d: want 1 or 2", t.Count))
	}
	if t.ASN == 0 || t.NodeASN == 0 {
		errs = append(errs, fmt.Errorf("ToR: AS numbers %d and %d: want both", t.ASN, t.NodeASN))
	}
	return errors.Join(errs...)
}

// frrConfig returns the configurations of zebra, bgpd and bfdd (empty for none) of a ToR router.
func (c Cluster) frrConfig(i int) router.Options {
	t := c.ToR
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("debug bgp neighbor-events")
	line("debug bgp graceful-restart")
	line("debug bgp bfd")
	if c.CNI == CalicoBGP {
		c.frrPods(line)
	}
	line("router bgp %d", c.torASN(i))
	line(" bgp log-neighbor-changes")
	line(" bgp router-id %s", c.torAddress(i))
	line(" no bgp ebgp-requires-policy")
	line(" no bgp default ipv4-unicast")
	line(" neighbor nodes peer-group")
	line(" neighbor nodes remote-as %d", t.NodeASN)
	hold := int(t.holdTime().Seconds())
	line(" neighbor nodes timers %d %d", hold/3, hold)
	line(" neighbor nodes timers connect 1")
	line(" neighbor nodes passive")
	if t.Password != "" {
		line(" neighbor nodes password %s", t.Password)
	}
	if t.BFD != 0 {
		line(" neighbor nodes bfd profile nodes")
	}
	for _, n := range c.torNodes(i) {
		for _, addr := range c.speakerAddrs(n) {
			line(" neighbor %s peer-group nodes", addr)
			line(" neighbor %s description %s", addr, n.Name)
		}
	}
	neighbors := []string{"nodes"}
	if c.CNI == CalicoBGP {
		c.frrCalico(i, line)
		neighbors = append(neighbors, "calico")
	}
	if c.Racks > 0 {
		spine, _, _ := link(i)
		line(" bgp bestpath as-path multipath-relax")
		neighbors = append(neighbors, c.fabric(line, toSpine, c.Addresses(spine), c.spineASN())...)
	}
	c.families(line, neighbors)
	o := router.Options{Config: b.String(), Zebra: "hostname " + torName(i)}
	if t.BFD != 0 {
		ms := t.BFD.Milliseconds()
		o.BFD = fmt.Sprintf("debug bfd peer\nbfd\n profile nodes\n  transmit-interval %d\n  receive-interval %d\n"+
			"  detect-multiplier 3\n", ms, ms)
	}
	return o
}

// birdConfig returns BIRD's configuration of a ToR router.
func (c Cluster) birdConfig(i int) router.Options {
	t := c.ToR
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("router id %s;", c.gateways(c.LAN)[i])
	line("log stderr all;")
	line("protocol device {}")
	line("protocol direct { ipv4; ipv6; }")
	line("protocol kernel { ipv4 { import none; export where source = RTS_BGP; }; merge paths on limit 16; }")
	line("protocol kernel { ipv6 { import none; export where source = RTS_BGP; }; merge paths on limit 16; }")
	// What other routers do by themselves (RFC 8326).
	line("filter nodes { if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; }")
	if t.BFD != 0 {
		line(`protocol bfd { interface "%s" { interval %d ms; multiplier 3; }; }`, torLAN, t.BFD.Milliseconds())
	}
	hold := int(t.holdTime().Seconds())
	for at, n := range c.Nodes {
		for family, addr := range c.speakerAddrs(n) {
			v4 := "ipv4 { import filter nodes; export none; };"
			name := fmt.Sprintf("node%d_v4", at)
			if addr.Is6() {
				v4 = "ipv4 { import filter nodes; export none; extended next hop on; };"
				name = fmt.Sprintf("node%d_v6", at)
			}
			line("protocol bgp %s { # %s", name, n.Name)
			line(" neighbor %s as %d;", addr, t.NodeASN)
			if c.CNI == CalicoBGP {
				line(" local %s as %d;", c.Addresses(routerLoopback)[family], t.ASN)
				line(" multihop;")
			} else {
				line(" local as %d;", t.ASN)
				line(" direct;")
			}
			line(" passive on;")
			line(" hold time %d;", hold)
			line(" error wait time 1, 2;")
			if t.Password != "" {
				line(" password \"%s\";", t.Password)
			}
			if t.BFD != 0 {
				line(" bfd on;")
			}
			line(" %s", v4)
			if c.DualStack {
				line(" ipv6 { import filter nodes; export none; };")
			}
			line("}")
		}
	}
	if c.CNI == CalicoBGP {
		c.birdCalico(line)
	}
	return router.Options{Config: b.String()}
}

// Router is a ToR router of a lab. What it answers to commands, and how it is restarted and frozen,
// is its [router.Router]'s.
type Router struct {
	*router.Router
	// Name is the host's name, Addr its address on the nodes' LAN, Dir where its programs have their
	// sockets and logs.
	Name string
	Addr netip.Addr
	Dir  string

	lab *Lab
}

// Routers returns the ToR routers, in the order of their names.
func (l *Lab) Routers() []*Router { return l.routers }

// startRouters starts the routers' programs in hosts that are there.
func (l *Lab) startRouters(ctx context.Context) error {
	if l.cluster.Racks > 0 {
		if err := l.startSpine(ctx); err != nil {
			return err
		}
	}
	for i := range l.cluster.routers() {
		addr := l.cluster.torAddress(i)
		start, o := router.StartFRR, l.cluster.frrConfig(i)
		if l.cluster.ToR.Kind == BIRD {
			start, o = router.StartBIRD, l.cluster.birdConfig(i)
		}
		name := torName(i)
		o.Namespace, o.Dir, o.Env = l.state.namespace(name), l.state.path(name), []string{l.state.mark}
		o.RealTime = l.cluster.ToR.BFD != 0
		if err := os.Mkdir(o.Dir, 0o755); err != nil {
			return err
		}
		r, err := start(ctx, o)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		l.routers = append(l.routers, &Router{Router: r, Name: name, Addr: addr, Dir: o.Dir, lab: l})
	}
	return nil
}

// NextHops returns where the router's kernel sends packets for exactly this prefix, in order: none
// without a route that BGP has made.
func (r *Router) NextHops(ctx context.Context, prefix netip.Prefix) ([]netip.Addr, error) {
	family := "-4"
	if prefix.Addr().Is6() {
		family = "-6"
	}
	out, err := r.lab.Exec(ctx, r.Name, "ip", family, "-json", "route", "show", "exact", prefix.String())
	if err != nil {
		return nil, err
	}
	type hop struct {
		Gateway netip.Addr `json:"gateway"`
		Via     struct {
			Host netip.Addr `json:"host"`
		} `json:"via"`
	}
	var routes []struct {
		hop
		NextHops []hop `json:"nexthops"`
	}
	if err := json.Unmarshal([]byte(out), &routes); err != nil {
		return nil, fmt.Errorf("%s: %s: %w", r.Name, out, err)
	}
	var hops []netip.Addr
	for _, route := range routes {
		for _, h := range append(route.NextHops, route.hop) {
			if addr := h.Gateway; addr.IsValid() {
				hops = append(hops, addr)
			} else if addr := h.Via.Host; addr.IsValid() {
				hops = append(hops, addr)
			}
		}
	}
	slices.SortFunc(hops, netip.Addr.Compare)
	return hops, nil
}

// Nodes returns the nodes that the router's kernel spreads packets for this prefix over, in the
// order of their names.
func (r *Router) Nodes(ctx context.Context, prefix netip.Prefix) ([]string, error) {
	hops, err := r.NextHops(ctx, prefix)
	if err != nil {
		return nil, err
	}
	var nodes []string
	for _, hop := range hops {
		at := slices.IndexFunc(r.lab.cluster.Nodes,
			func(n Node) bool { return slices.Contains(r.lab.cluster.speakerAddrs(n), hop) })
		if at < 0 {
			return nil, fmt.Errorf("%s: %s goes by %s, which is no node", r.Name, prefix, hop)
		}
		nodes = append(nodes, r.lab.cluster.Nodes[at].Name)
	}
	slices.Sort(nodes)
	return nodes, nil
}

// Freeze stops the router's programs for a while, as when its processor has no time for them. Its
// kernel goes on forwarding.
func (r *Router) Freeze(ctx context.Context, length time.Duration) error {
	if err := r.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	select {
	case <-time.After(length):
	case <-ctx.Done():
	}
	return r.Signal(syscall.SIGCONT)
}

// WatchRoutes watches the routes of a family (-4 or -6) in the router's kernel. What it returns
// ends that, and returns the changes, in the words of "ip monitor".
func (r *Router) WatchRoutes(ctx context.Context, family string) (func() []string, error) {
	var seen bytes.Buffer
	cmd := r.lab.prepare(ctx, command{Host: r.Name, Argv: []string{"ip", "-oneline", family, "monitor", "route"}})
	cmd.Stdout = &seen
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() []string {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait() // it ends by the signal
		return slices.Collect(strings.Lines(seen.String()))
	}, nil
}
