package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// nsKernel runs iptables in a network namespace.
type nsKernel struct {
	iptables.Kernel
	t  testing.TB
	ns *nstest.NS
}

func (k nsKernel) Save(ctx context.Context, read func(io.Reader) error) (err error) {
	k.ns.Do(k.t, func() error { err = k.Kernel.Save(ctx, read); return nil })
	return err
}

func (k nsKernel) Restore(ctx context.Context, input string) (err error) {
	k.ns.Do(k.t, func() error { err = k.Kernel.Restore(ctx, input); return nil })
	return err
}

// traced is a node with rules of one mode.
type traced struct {
	*cases.Site
	actor *dialect.Actor
	begun bool
	nft   bool
}

func newTraced(t *testing.T, w cases.World, mode string) *traced {
	t.Helper()
	s := &traced{Site: cases.NewSite(t, w), nft: mode == modeNftables}
	deps := dialect.Deps{Log: slog.New(slog.DiscardHandler), Changed: func() {}}
	if s.nft {
		var way *nftables.Netlink
		s.Node.Do(t, func() (err error) { way, err = nftables.Dial(); return err })
		t.Cleanup(way.Close)
		deps.Rules = nftables.Rules(way, nil)
	} else {
		// The lock of the legacy variant is the machine's; network namespaces share nothing.
		t.Setenv("XTABLES_LOCKFILE", filepath.Join(t.TempDir(), "lock"))
		kernels := map[lb.Family]iptables.Kernel{}
		s.Node.Do(t, func() error {
			commands, err := iptables.Detect(t.Context(), w.Family)
			kernels[w.Family] = nsKernel{commands, t, s.Node}
			return err
		})
		deps.Rules = iptables.Rules(kernels, 0)
	}
	s.actor = dialect.New(deps)
	return s
}

// program makes the node's rules what the case's plan asks for.
func (s *traced) program(t *testing.T, c cases.Case) {
	t.Helper()
	service, config := c.Plan(s.World)
	if s.nft {
		config = nftables.WithAddresses(config, []netip.Addr{s.World.Node, s.World.Node2})
	}
	s.apply(t, config, service)
}

func (s *traced) apply(t *testing.T, config plan.Config, service plan.Service) {
	t.Helper()
	s.actor.Configure(config)
	if services := map[lb.Key]plan.Service{service.Key: service}; s.begun {
		s.actor.Update(services)
	} else {
		s.actor.Begin(services)
		s.begun = true
	}
	if _, err := s.actor.Apply(t.Context(), false); err != nil {
		t.Fatal(err)
	}
}

// trace walks the case's first packet through the rules in the kernel.
func (s *traced) trace(t *testing.T, c cases.Case) (result lb.Trace) {
	t.Helper()
	return s.packet(t, lb.TracePacket{Source: netip.AddrPortFrom(c.Source(s.World), 0), Destination: c.Destination(s.World),
		Protocol: c.Transport()})
}

func (s *traced) packet(t *testing.T, p lb.TracePacket) (result lb.Trace) {
	t.Helper()
	s.Node.Do(t, func() (err error) {
		result, err = traceKernel(t.Context(), "here", p, false)
		return err
	})
	return result
}

// seen returns what a trace says in the words of the table.
func seen(t *testing.T, result lb.Trace) (ends []string, snat bool) {
	t.Helper()
	total := 0.0
	for _, way := range result.Ways {
		total += way.Share
		switch way.Verdict {
		case lb.TraceDelivered:
			snat = snat || way.Masqueraded
			for _, end := range way.Ends {
				ends = append(ends, end.Address.String())
			}
		case lb.TraceDropped:
			ends = append(ends, "drop")
		case lb.TraceRefused:
			ends = append(ends, "reject")
		case lb.TraceUntouched:
			ends = append(ends, "none")
		default:
			ends = append(ends, fmt.Sprintf("%+v", way))
		}
	}
	if math.Abs(total-1) > 1e-6 {
		t.Errorf("the ways have a probability of %v", total)
	}
	slices.Sort(ends)
	return ends, snat
}

// What the trace says of each case is what the case's packets meet: the same rules, in a real kernel, in
// both modes and families. Each dialect's TestPackets sends the same packets.
func TestTraceSaysWherePacketsEnd(t *testing.T) {
	for _, mode := range []string{modeNftables, modeIptables} {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			t.Run(fmt.Sprint(mode, "/", family), func(t *testing.T) {
				s := newTraced(t, cases.WorldOf(family), mode)
				for i, c := range cases.For(family, s.nft) {
					// A packet of no connection is none that a trace is of. In iptables mode each chain is a command,
					// and one case in six has to do.
					if c.Invalid || !s.nft && i%6 != 0 {
						continue
					}
					t.Run(c.Name, func(t *testing.T) { s.check(t, c) })
				}
			})
		}
	}
}

func (s *traced) check(t *testing.T, c cases.Case) {
	w := s.World
	s.program(t, c)
	if c.Own {
		defer s.own(t)()
	}
	for _, leg := range c.Legs() {
		result := s.trace(t, leg)
		ends, snat := seen(t, result)
		if c.Scheduler == plan.SourceHash || c.Scheduler == plan.Maglev {
			// The client's hash decides for one of them.
			if len(ends) != 1 || !slices.Contains(c.Ends(w), ends[0]) {
				t.Errorf("to %s: ends at %v, want one of %v", leg.To, ends, c.Ends(w))
			}
		} else if !slices.Equal(ends, c.Ends(w)) {
			t.Errorf("to %s: ends at %v, want %v: %+v", leg.To, ends, c.Ends(w), result)
		}
		if snat != c.SNAT {
			t.Errorf("to %s: masqueraded %v, want %v", leg.To, snat, c.SNAT)
		}
		for _, way := range result.Ways {
			if silent := way.Verdict == lb.TraceDropped || way.Verdict == lb.TraceRefused; silent && way.Why == "" {
				t.Errorf("to %s: the rules do not say why: %+v", leg.To, way.Steps)
			}
		}
	}
}

// own gives the node the VIP, and returns what takes it away. The kernel adds the route to an address of
// IPv6 a little later.
func (s *traced) own(t *testing.T) func() {
	vip := cases.Host(s.World.VIP).String()
	s.Node.Run(t, "ip", "addr", "add", vip, "dev", "lo")
	for deadline := time.Now().Add(cases.Long); ; time.Sleep(time.Millisecond) {
		var path links.Path
		s.Node.Do(t, func() (err error) { path, _, err = links.PathTo(s.World.VIP); return err })
		if path.Local {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the node never gets %s", vip)
		}
	}
	return func() { s.Node.Run(t, "ip", "addr", "del", vip, "dev", "lo") }
}

// The same with real packets, for one case of each kind.
func TestTraceBesidePackets(t *testing.T) {
	kinds := []string{"1 pod to ClusterIP", "10 ITP Local, pod", "16 no endpoints, VIP on the node",
		"20 source ranges, unlisted", "20 source ranges, listed", "20 source ranges and node port",
		"20 source ranges and external IP", "23 second VIP", "24 ipMode Proxy"}
	for _, mode := range []string{modeNftables, modeIptables} {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			t.Run(fmt.Sprint(mode, "/", family), func(t *testing.T) {
				s := newTraced(t, cases.WorldOf(family), mode)
				all := cases.For(family, s.nft)
				some := slices.DeleteFunc(all, func(c cases.Case) bool { return !slices.Contains(kinds, c.Name) })
				if len(some) != len(kinds) {
					t.Fatalf("%d cases, want %d", len(some), len(kinds))
				}
				for _, c := range some {
					t.Run(c.Name, func(t *testing.T) {
						s.check(t, c)
						if c.Own {
							defer s.own(t)()
						}
						s.Forget(t)
						s.Check(t, c)
					})
				}
				t.Run("affinity", func(t *testing.T) { s.affinity(t) })
			})
		}
	}
}

// affinity checks that the trace knows the backend that a client is sent to from its first connection
// on.
func (s *traced) affinity(t *testing.T) {
	c := cases.Case{From: "outside", To: "vip", Service: func(_ cases.World, svc *lb.Service) {
		svc.AffinityTimeout = 3 * time.Hour
	}}
	s.program(t, c)
	if ends, _ := seen(t, s.trace(t, c)); len(ends) != 2 {
		t.Fatalf("a new client ends at %v, want two", ends)
	}
	s.Forget(t)
	got, _, err := s.Ask(c, cases.Long)
	if err != nil {
		t.Fatal(err)
	}
	if ends, _ := seen(t, s.trace(t, c)); !slices.Equal(ends, []string{got}) {
		t.Errorf("a client that was sent to %s ends at %v", got, ends)
	}
}

// A port that the Service does not have, a ping, a backend without a route and a firewall of others.
func TestTraceOfWhatIsNotDelivered(t *testing.T) {
	for _, mode := range []string{modeNftables, modeIptables} {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			t.Run(fmt.Sprint(mode, "/", family), func(t *testing.T) {
				w := cases.WorldOf(family)
				s := newTraced(t, w, mode)
				c := cases.Case{From: "outside", To: "vip", Config: func(_ cases.World, config *plan.Config) { config.AnswerPing = true }}
				s.program(t, c)
				first := func(to netip.AddrPort, protocol lb.Protocol) lb.TraceWay {
					t.Helper()
					result := s.packet(t, lb.TracePacket{Source: netip.AddrPortFrom(w.Outside, 0), Destination: to,
						Protocol: protocol})
					if len(result.Ways) == 0 {
						t.Fatalf("no way: %+v", result)
					}
					return result.Ways[0]
				}
				vip := netip.AddrPortFrom(w.VIP, cases.ServicePort)
				if got := first(netip.AddrPortFrom(w.VIP, 81), lb.TCP); got.Verdict != lb.TraceRefused ||
					!strings.Contains(got.Why, "port or protocol that no Service has") {
					t.Errorf("another port: %+v", got)
				}
				if got := first(netip.AddrPortFrom(w.VIP, 0), lb.TraceICMP); got.Verdict != lb.TraceAnswered {
					t.Errorf("ping: %+v", got)
				}
				ip := map[lb.Family]string{lb.IPv4: "-4", lb.IPv6: "-6"}[family]
				s.Node.Run(t, "ip", ip, "route", "add", "blackhole", cases.Host(w.Remote).String(), "metric", "1", "table", "local")
				result := s.packet(t, lb.TracePacket{Source: netip.AddrPortFrom(w.Outside, 0), Destination: vip, Protocol: lb.TCP})
				lost := slices.IndexFunc(result.Ways, func(way lb.TraceWay) bool { return way.Verdict == lb.TraceUnroutable })
				if lost < 0 || result.Ways[lost].Ends[0].Address.Addr() != w.Remote || result.Ways[lost].Share != 0.5 {
					t.Errorf("without a route to a backend: %+v", result)
				}
				s.Node.Run(t, "ip", ip, "route", "del", "blackhole", cases.Host(w.Remote).String(), "metric", "1", "table", "local")
				s.Node.Run(t, "nft", "add table inet wall; add chain inet wall f { type filter hook forward priority 10; policy drop; }")
				if got := first(vip, lb.TCP); got.Verdict != lb.TraceDropped ||
					got.Why != "the chain inet wall f drops what the node forwards to pods" {
					t.Errorf("a firewall of others: %+v", got)
				}
			})
		}
	}
}

// The trace walks the chains of other programs that filter, as far as it can tell what they do.
func TestTraceWalksChainsOfOthers(t *testing.T) {
	const pre = "type filter hook prerouting priority -350"
	for name, c := range map[string]struct {
		hook, rules string // of the chain inet wall c, a ; between rules
		ends        string // such as drop and reject; "" if it is delivered
		noted       bool   // the walk says that it leaves the chain out
	}{
		"a port":                   {hook: pre, rules: "tcp dport 80 drop", ends: "drop"},
		"another port":             {hook: pre, rules: "tcp dport 81 drop; tcp dport { 82, 1000-2000 } drop"},
		"ports":                    {hook: pre, rules: "tcp dport { 22, 70-90 } drop", ends: "drop"},
		"the VIP":                  {hook: pre, rules: "ip daddr VIP counter log prefix \"x\" drop", ends: "drop"},
		"other clients":            {hook: pre, rules: "ip saddr 203.0.113.0/24 drop"},
		"all but those of a LAN":   {hook: pre, rules: "ip saddr != 10.99.0.0/16 drop", ends: "drop"},
		"the interface":            {hook: pre, rules: "iif LINK drop", ends: "drop"},
		"another interface":        {hook: pre, rules: "iif lo drop; iifname \"nothing*\" drop"},
		"a policy":                 {hook: pre + "; policy drop", rules: "tcp dport 22 accept", ends: "drop"},
		"a policy, and accepted":   {hook: pre + "; policy drop", rules: "tcp dport 80 accept; tcp sport 8080 accept"},
		"a chain":                  {hook: pre, rules: "jump sub; drop", ends: "drop"},
		"a chain that accepts":     {hook: pre, rules: "meta l4proto tcp jump sub; tcp sport 8080 accept; drop"},
		"known connections":        {hook: "type filter hook prerouting priority -150", rules: "ct state new drop", ends: "drop"},
		"ahead of tracking":        {hook: pre, rules: "ct state new drop"},
		"states":                   {hook: "type filter hook prerouting priority -150", rules: "ct state vmap { established : accept, invalid : drop }"},
		"a verdict of a map":       {hook: pre, rules: "tcp dport vmap { 80 : accept }; drop", noted: true},
		"after the translation":    {hook: "type filter hook forward priority 0", rules: "tcp dport 80 drop"},
		"to the pods":              {hook: "type filter hook forward priority 0", rules: "tcp dport 8080 reject with tcp reset", ends: "reject"},
		"what may be accepted":     {hook: pre, rules: "meta pkttype host accept; drop", noted: true},
		"what only may be dropped": {hook: pre, rules: "meta pkttype broadcast drop; tcp dport 80 drop", ends: "drop"},
		"a rate":                   {hook: pre, rules: "limit rate over 100/second drop"},
		"up to a rate":             {hook: pre, rules: "limit rate 100/second accept; drop", noted: true},
		"what the walk makes up":   {hook: pre, rules: "ip length < 100 accept; drop", noted: true},
		"a meter":                  {hook: pre, rules: "add @seen { ip saddr limit rate over 9/second } drop"},
	} {
		t.Run(name, func(t *testing.T) {
			w := cases.WorldOf(lb.IPv4)
			s := newTraced(t, w, modeNftables)
			s.program(t, cases.Case{From: "outside", To: "vip"})
			p := lb.TracePacket{Source: netip.AddrPortFrom(w.Outside, 0), Protocol: lb.TCP,
				Destination: netip.AddrPortFrom(w.VIP, cases.ServicePort)}
			in := s.packet(t, p).Packet.Interface
			table := "add table inet wall; add set inet wall seen { type ipv4_addr; flags dynamic; }; add chain inet wall sub; " +
				"add rule inet wall sub meta l4proto tcp tcp dport 80 SUB; add chain inet wall c { " + c.hook + "; }"
			for rule := range strings.SplitSeq(c.rules, "; ") {
				table += "; add rule inet wall c " + rule
			}
			sub := "counter"
			if name == "a chain that accepts" {
				sub = "accept"
			}
			s.Node.Run(t, "nft", strings.NewReplacer("VIP", w.VIP.String(), "LINK", in, "SUB", sub).Replace(table))
			result := s.packet(t, p)
			ends, _ := seen(t, result)
			if delivered := !slices.Contains(ends, "drop") && !slices.Contains(ends, "reject"); delivered != (c.ends == "") ||
				!delivered && !slices.Equal(ends, []string{c.ends}) {
				t.Errorf("it ends at %v, want %q: %+v", ends, c.ends, result)
			}
			if !slices.Equal(result.Notes, []string{"not walked: rules of other programs in inet wall c (2)"}) == c.noted {
				t.Errorf("notes %q, noted %v", result.Notes, c.noted)
			}
			patience := cases.Long
			if c.ends != "" {
				patience = cases.Short
			}
			if _, _, err := s.Ask(cases.Case{From: "outside", To: "vip"}, patience); (err == nil) != (c.ends == "") && !c.noted {
				t.Errorf("a connection ends with %v, want %q", err, c.ends)
			}
			if c.ends == "" {
				return
			}
			steps := result.Ways[0].Steps
			if last := steps[len(steps)-1]; !last.Foreign || !strings.Contains(result.Ways[0].Why, "chain inet wall c, which another") {
				t.Errorf("the way says %q, by %+v", result.Ways[0].Why, last)
			}
		})
	}
}

// On a node without rules the trace says so.
func TestTraceWithoutRules(t *testing.T) {
	s := &traced{Site: cases.NewSite(t, cases.WorldOf(lb.IPv4))}
	result := s.trace(t, cases.Case{From: "outside", To: "vip"})
	if len(result.Rules) > 0 || len(result.Ways) != 1 || result.Ways[0].Verdict != lb.TraceUntouched ||
		!slices.Contains(result.Notes, "this node has no rules of Landfall for IPv4") {
		t.Errorf("%+v", result)
	}
	if out := s.Node.Run(t, "nft", "list", "tables"); out != "" {
		t.Errorf("the trace has made %s", out)
	}
}

// Rules of iptables-nft are rules of nftables; their matches are not all known.
func TestTraceWalksIptables(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := newTraced(t, w, modeNftables)
	s.program(t, cases.Case{From: "outside", To: "vip"})
	for rule, dropped := range map[string]bool{
		"-d VIP -j DROP":                                        true,
		"-p tcp --dport 80 -j DROP":                             true,
		"-p tcp --dport 81 -j DROP":                             false,
		"-d VIP -m comment --comment ours -j DROP":              false, // a match that may be any
		"-m conntrack --ctstate ESTABLISHED -d VIP -j DROP":     false,
		"-p tcp -m multiport --dports 1:90 -j DROP":             false,
		"-i nothing -j DROP":                                    false,
		"-d VIP -j LOG":                                         false,
		"-p udp -j DROP":                                        false,
		"! -s 10.99.0.0/16 -p tcp -m tcp --dport 80:81 -j DROP": true,
	} {
		argv := append([]string{"-t", "mangle", "-A", "PREROUTING"},
			strings.Fields(strings.ReplaceAll(rule, "VIP", w.VIP.String()))...)
		s.Node.Run(t, "iptables-nft", argv...)
		result := s.packet(t, lb.TracePacket{Source: netip.AddrPortFrom(w.Outside, 0), Protocol: lb.TCP,
			Destination: netip.AddrPortFrom(w.VIP, cases.ServicePort)})
		if got := droppedBy(result); (got != "") != dropped {
			t.Errorf("%s: dropped by %q, want %v: %+v", rule, got, dropped, result)
		}
		s.Node.Run(t, "iptables-nft", "-t", "mangle", "-F")
	}
}

// Packets of one request are walked through the same rules, which are read once: what is changed meanwhile counts
// for the next request.
func TestTracesOfOneRequestShareTheRules(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	for _, mode := range []string{modeNftables, modeIptables} {
		t.Run(mode, func(t *testing.T) {
			s := newTraced(t, w, mode)
			s.program(t, cases.Case{From: "outside", To: "vip"})
			s.Node.Run(t, "nft", "add table ip wall; add chain ip wall pre { type filter hook prerouting priority -300; }; "+
				"add rule ip wall pre tcp dport 80 drop")
			to := netip.AddrPortFrom(w.VIP, cases.ServicePort)
			packets := []lb.TracePacket{{Source: netip.AddrPortFrom(w.Outside, 0), Destination: to, Protocol: lb.TCP},
				{Source: netip.AddrPortFrom(w.Stranger, 0), Destination: to, Protocol: lb.TCP},
				{Source: netip.AddrPortFrom(w.Outside, 0), Destination: netip.AddrPortFrom(w.VIP, 81), Protocol: lb.TCP}}
			var walked []string
			s.Node.Do(t, func() error {
				return tracePackets(t.Context(), "here", packets, false, func(traced lb.Trace) {
					if walked = append(walked, droppedBy(traced)); len(walked) == 1 {
						s.Node.Run(t, "nft", "delete table ip wall")
					}
				})
			})
			wall := "rule 1 of the chain ip wall pre, which another program has"
			if want := []string{wall, wall, ""}; !slices.Equal(walked, want) {
				t.Errorf("dropped by %q, want %q", walked, want)
			}
			if after := s.packet(t, packets[0]); droppedBy(after) != "" {
				t.Errorf("the next request still has %q", droppedBy(after))
			}
		})
	}
}

// What landfallctl asks of a node: whether endpoints accept connections, and what rules of others drop.
func TestReachTriesWhatClientsMeet(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := newTraced(t, w, modeNftables)
	s.program(t, cases.Case{From: "outside", To: "vip"})
	port := cases.BackendPort(lb.TCP)
	ask := func(args ...string) (r lb.Reach, err error) {
		t.Helper()
		s.Node.Do(t, func() error {
			var out any
			if out, err = lookReach(t.Context(), args); err == nil {
				r = out.(lb.Reach)
			}
			return nil
		})
		return r, err
	}
	listens := netip.AddrPortFrom(w.Local, port)
	var connects []lb.ReachConnect
	silent, here := netip.AddrPortFrom(w.Remote, port), netip.MustParseAddrPort("[::1]:9")
	s.Node.Run(t, "nft", "add table ip silent; add chain ip silent out { type filter hook output priority 0; }; "+
		"add rule ip silent out ip daddr "+silent.Addr().String()+" drop")
	s.Node.Do(t, func() error {
		connects = connectAll([]netip.AddrPort{listens, netip.AddrPortFrom(w.Local, port+100), silent, here})
		return nil
	})
	if want := []lb.ReachConnect{{Address: listens},
		{Address: netip.AddrPortFrom(w.Local, port+100), Error: "connection refused", Refused: true},
		{Address: silent, Error: "no answer within 150ms"},
		{Address: here, Error: "connection refused", Refused: true}}; !slices.Equal(connects, want) {
		t.Errorf("connections %+v, want %+v", connects, want)
	}
	walk := []string{"--from=" + w.Outside.String(), "--from=2001:db8::1",
		"--to=" + netip.AddrPortFrom(w.VIP, cases.ServicePort).String() + "/TCP"}
	r, err := ask(walk...)
	switch {
	case err != nil:
		t.Fatal(err)
	case len(r.Walks) != 1 || r.Walks[0].Dropped != "" || r.Walks[0].NoRoute:
		t.Errorf("packets %+v", r.Walks)
	}
	s.Node.Run(t, "nft", "add table ip wall; add chain ip wall pre { type filter hook prerouting priority -300; }; "+
		"add rule ip wall pre tcp dport 80 drop")
	if r, err = ask(walk...); err != nil || len(r.Walks) != 1 ||
		r.Walks[0].Dropped != "rule 1 of the chain ip wall pre, which another program has" {
		t.Errorf("behind a rule of another program: %+v, %v", r, err)
	}
	for _, bad := range [][]string{{}, {"--connect=10.0.0.1"}, {"--from=here", "--to=10.0.0.1:80"}, {"--from=10.0.0.2", "--to=:80"},
		{"--from=10.0.0.2", "--to=10.0.0.1"}, slices.Repeat([]string{"--connect=" + listens.String()}, maxReach+1)} {
		if _, err := ask(bad...); err == nil {
			t.Errorf("reach takes %q", bad)
		}
	}
}
