package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// absence is a way in which a node goes away for a while and comes back.
type absence struct {
	name        string
	leave, back func(t testing.TB, l *lab.Lab, node string)
	// routed reports whether routers go on sending to the node.
	routed bool
}

var absences = []absence{
	{name: "link", leave: unplug, back: heal},
	{name: "switch port", back: heal, leave: func(t testing.TB, l *lab.Lab, node string) {
		t.Helper()
		if err := l.Cut(t.Context(), node); err != nil {
			t.Fatal(err)
		}
	}},
	frozen("frozen", "speaker", "proxy"),
	frozen("frozen speaker", "speaker"),
	frozen("frozen proxy", "proxy"),
	{name: "rebooted", back: revive, leave: func(t testing.TB, l *lab.Lab, node string) {
		t.Helper()
		unplug(t, l, node)
		for _, program := range []string{"speaker", "proxy"} {
			if err := errors.Join(l.Agent(program, node).Kill(), l.Agent(program, node).Boot()); err != nil {
				t.Fatal(err)
			}
		}
		for _, forget := range [][]string{{"nft", "flush", "ruleset"}, {"conntrack", "-F"}} {
			if _, err := l.Exec(t.Context(), node, forget...); err != nil {
				t.Fatal(err)
			}
		}
	}},
}

func unplug(t testing.TB, l *lab.Lab, node string) {
	t.Helper()
	if err := l.Unplug(t.Context(), node); err != nil {
		t.Fatal(err)
	}
}

func heal(t testing.TB, l *lab.Lab, node string) {
	t.Helper()
	if err := l.Heal(t.Context(), node); err != nil {
		t.Fatal(err)
	}
}

// frozen stops programs of the node, as a hypervisor or a full disk does, and has them go on.
func frozen(name string, programs ...string) absence {
	signal := func(sig syscall.Signal) func(testing.TB, *lab.Lab, string) {
		return func(t testing.TB, l *lab.Lab, node string) {
			t.Helper()
			for _, program := range programs {
				if err := l.Agent(program, node).Signal(sig); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return absence{name: name, leave: signal(syscall.SIGSTOP), back: signal(syscall.SIGCONT),
		routed: !slices.Contains(programs, "speaker")}
}

// returns are how often each absence is tried, and for how long: once and for long enough that the
// node and the others hold one another for dead; or as LANDFALL_RETURNS and LANDFALL_AWAY say, such
// as 9 and 8s. LANDFALL_ABSENCE names one of them, which is then the only one. With LANDFALL_BFD, such
// as 300ms, routers do not lose other nodes where the machine is busy.
func returns(t *testing.T) (times int, away time.Duration) {
	t.Helper()
	times = 1
	if text, set := os.LookupEnv("LANDFALL_RETURNS"); set {
		var err error
		if times, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	return times, duration(t, "LANDFALL_AWAY", 3*time.Second)
}

// duration is what a variable of the environment says, such as 8s.
func duration(t testing.TB, variable string, otherwise time.Duration) time.Duration {
	t.Helper()
	text, set := os.LookupEnv(variable)
	if !set {
		return otherwise
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// tally counts connections through addresses that a node which came back did not own: long-lived ones,
// of both policies, and new ones; and the addresses that have another owner afterwards.
type tally struct{ returns, long, broken, requests, failed, moved int }

// add counts a probe and so many flows. moves is how often routers have changed their route, for which
// FRR refuses a request each: see [wantNoneLostFar].
func (c *tally) add(t testing.TB, what string, target netip.AddrPort, f *flows, of int, p *lab.Probe, moves int) {
	t.Helper()
	report, broken := p.Stop(), f.stop()
	t.Logf("%s away and back, %s: %s; long-lived: %d of %d lost", what, target.Addr(), report, broken, of)
	c.long, c.broken = c.long+of, c.broken+broken
	c.requests += report.Sent
	c.failed += report.Failed() - min(report.Failures["network is unreachable"], moves)
}

func (c *tally) String() string {
	return fmt.Sprintf("%d of %d long-lived and %d of %d new connections broke over %d returns", c.broken, c.long,
		c.failed, c.requests, c.returns)
}

func (c *tally) judge(t testing.TB) {
	t.Helper()
	t.Log(c)
	if c.broken+c.failed > 0 {
		t.Errorf("%d connections broke", c.broken+c.failed)
	}
	if c.moved > 0 {
		t.Errorf("%d addresses moved from nodes that served them well", c.moved)
	}
}

// localService is a Service of policy Local beside [lab.SeedService], with a pod on each worker.
func localService(t testing.TB, l *lab.Lab) {
	t.Helper()
	for i, node := range workers(l) {
		pod := podOn(l, node, "local-"+strconv.Itoa(i), byte(90+i))
		pod.App = "local"
		if err := l.AddPod(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.AddService(t.Context(), lab.Service{Namespace: "default", Name: "local", App: "local",
		Type: "LoadBalancer", ExternalTrafficPolicy: "Local", Ports: []lab.Port{{Port: 80}},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}}); err != nil {
		t.Fatal(err)
	}
}

// nextVIP is the address that [localService] gets after [lab.SeedService].
func nextVIP(vip netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(vip.Addr().Next(), vip.Port())
}

// TestContract11AReturningNodeHarmsNobody lets a node go away and come back, with long-lived and new
// connections to addresses of both families and policies that others own and whose pods are on others.
func TestContract11AReturningNodeHarmsNobody(t *testing.T) {
	t.Parallel()
	l := startDualStack(t, lab.Options{})
	podsBesideAPI(t, l)
	service := lab.SeedService()
	service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	targets := []netip.AddrPort{seedVIP, seedVIP6}
	for _, target := range targets {
		wantAnswers(t, l, lab.ClientName, "tcp", target, "my-nginx-3", "my-nginx-4")
	}
	localService(t, l)
	targets = append(targets, nextVIP(seedVIP), nextVIP(seedVIP6))
	for _, target := range targets[2:] {
		eventually(t, "the Local Service answers", func() error {
			_, err := l.Ask(t.Context(), lab.ClientName, "tcp", target)
			return err
		})
	}
	times, away := returns(t)
	var c tally
	for _, a := range absences {
		if only, set := os.LookupEnv("LANDFALL_ABSENCE"); set && only != a.name {
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			for range times {
				returnOf(t, l, a, away, targets, &c)
			}
			t.Logf("so far, with %s: %s", a.name, &c)
		})
	}
	c.judge(t)
}

// returnOf has the node that owns the fewest of the addresses go away and come back, and counts
// connections to the others.
func returnOf(t *testing.T, l *lab.Lab, a absence, away time.Duration, all []netip.AddrPort, c *tally) {
	t.Helper()
	const each = 20
	before := c.broken + c.failed + c.moved
	owned := map[string][]netip.AddrPort{}
	for _, target := range all {
		owner := answerer(t, l, target.Addr())
		owned[owner] = append(owned[owner], target)
	}
	node := slices.MinFunc(workers(l), func(a, b string) int { return len(owned[a]) - len(owned[b]) })
	delete(owned, node)
	var targets []netip.AddrPort
	var owners []string
	for owner, some := range owned {
		for _, target := range some {
			targets, owners = append(targets, target), append(owners, owner)
		}
	}
	var long []*flows
	var probes []*lab.Probe
	for _, target := range targets {
		long = append(long, startFlows(t, l, target, each))
		probes = append(probes, l.StartProbe(t.Context(), lab.FarClientName, "tcp", target, 4*newEvery))
	}
	time.Sleep(300 * time.Millisecond)
	a.leave(t, l, node)
	time.Sleep(away)
	back := time.Now()
	a.back(t, l, node)
	waitTogether(t, l)
	time.Sleep(time.Until(back.Add(4 * time.Second)))
	for i, target := range targets {
		c.add(t, a.name+" of "+node, target, long[i], each, probes[i], 0)
		if now := answerers(t, l, target.Addr()); !slices.Equal(now, owners[i:i+1]) {
			t.Logf("%v answer for %s, which %s served well", now, target.Addr(), owners[i])
			c.moved++
		}
	}
	c.returns++
	if c.broken+c.failed+c.moved > before {
		t.Log(decidedSince(l, back.Add(-away)))
	}
}

// returnsOverBGP lets the node of faults come back from each absence, with connections that were
// opened while it was away: routers move some of them to it, which it does not know.
func returnsOverBGP(t *testing.T, l *lab.Lab) {
	const each = 40
	localService(t, l)
	vips := bgpVIPs(l)
	for _, vip := range vips {
		wantRouted(t, l, nextVIP(vip).Addr(), workers(l)...)
		vips = append(vips, nextVIP(vip))
	}
	spread := func(nodes []string) {
		for _, vip := range vips {
			wantRouted(t, l, vip.Addr(), nodes...)
		}
	}
	times, gone := returns(t)
	// A client that uses its ports again may meet what a node remembers of an older connection: see the limits in
	// docs/design/rescue.md. At this rate, 54 returns take fewer ports than it has.
	const every = 2 * newEvery
	var c tally
	for i, a := range absences {
		if _, all := os.LookupEnv("LANDFALL_RETURNS"); !all && i > 0 && i < len(absences)-1 {
			continue // by default only a link, and a reboot
		}
		if only, set := os.LookupEnv("LANDFALL_ABSENCE"); set && only != a.name {
			continue
		}
		for range times {
			a.leave(t, l, bgpNode)
			if !a.routed {
				spread(without(workers(l), []string{bgpNode}))
			}
			time.Sleep(gone)
			var long []*flows
			var probes []*lab.Probe
			for _, vip := range vips {
				long = append(long, startFlowsFrom(t, l, lab.FarClientName, vip, each))
				probes = append(probes, l.StartProbe(t.Context(), lab.FarClientName, "tcp", vip, every))
			}
			a.back(t, l, bgpNode)
			spread(workers(l))
			time.Sleep(time.Second)
			for i, vip := range vips {
				c.add(t, a.name+" of "+bgpNode, vip, long[i], each, probes[i], 2)
			}
			c.returns++
		}
		t.Logf("so far, with %s: %s", a.name, &c)
	}
	c.judge(t)
}
