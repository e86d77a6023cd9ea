package e2e

import (
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// guard is something that keeps addresses from being black holes, with a fault that it guards
// against. The damage that the fault does is counted with the guard in place, where there must be
// none, and with it taken out, where there must be some: or else the test of the fault would show
// nothing.
type guard struct {
	name string
	// without are arguments of programs that take the guard out; none if the fault itself goes past it.
	without map[string][]string
	// damage commits the fault on a lab without Services and counts what it does. guarded reports
	// whether the guard is in place.
	damage func(t *testing.T, l *lab.Lab, guarded bool) int
}

var guards = []guard{
	{"gate", map[string][]string{"speaker": {"--gate=none"}}, damageUnprogrammed},
	{"hold", map[string][]string{"speaker": {"--restart-hold=0s"}}, damageKilled},
	{"handover", nil, damageStopped},
	{"rescue", map[string][]string{"proxy": {"--rescue=false"}}, damageMoved},
	// Without a carrier a node has no path to pods elsewhere, and with it BFD soon tells it of the others.
	{"return", map[string][]string{"speaker": {"--return-hold=0s", "--bfd-neighbors=0"},
		"proxy": {"--path-check=off"}}, damageReturned},
}

func TestFaultsShowWithoutTheGuards(t *testing.T) {
	t.Parallel()
	for _, g := range guards {
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			t.Run("in place", func(t *testing.T) {
				t.Parallel()
				if damage := g.damage(t, labWith(t, lab.Options{}), true); damage > 0 {
					t.Errorf("damage: %d", damage)
				}
			})
			t.Run("taken out", func(t *testing.T) {
				t.Parallel()
				l := labWith(t, lab.Options{Args: g.without})
				if damage := g.damage(t, l, false); damage == 0 {
					t.Error("no damage: the fault shows nothing")
				}
			})
		})
	}
}

func seedService(t testing.TB, l *lab.Lab) {
	t.Helper()
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
}

// damageUnprogrammed freezes two proxies, so that their kernels do not hold the rules of a new
// Service, and counts failed connections.
func damageUnprogrammed(t *testing.T, l *lab.Lab, _ bool) int {
	for _, node := range []string{"k8s-worker-178", "k8s-worker-179"} {
		proxy := l.Agent("proxy", node)
		if err := proxy.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = proxy.Signal(syscall.SIGCONT) }()
	}
	seedService(t, l)
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
	time.Sleep(time.Second)
	report := probe.Stop()
	t.Log(report)
	return report.Failed()
}

// damageKilled kills the speaker that answers and starts it again, and counts changes of the owner.
func damageKilled(t *testing.T, l *lab.Lab, _ bool) int {
	seedService(t, l)
	was := answerer(t, l, seedVIP.Addr())
	restart(t, l.Agent("speaker", was), (*lab.Agent).Kill, 1500*time.Millisecond)
	time.Sleep(time.Second)
	if answerer(t, l, seedVIP.Addr()) != was {
		return 1
	}
	return 0
}

// damageStopped ends the speaker that answers for good, by SIGTERM or, without a handover, by
// SIGKILL, while a client that does not know the way asks for it again and again. It counts how
// often that one had to ask twice, which Linux does after a second.
func damageStopped(t *testing.T, l *lab.Lab, guarded bool) int {
	seedService(t, l)
	was := answerer(t, l, seedVIP.Addr())
	ended := make(chan error)
	go func() {
		time.Sleep(200 * time.Millisecond)
		if guarded {
			ended <- l.Agent("speaker", was).Stop()
		} else {
			ended <- l.Agent("speaker", was).Kill()
		}
	}()
	twice := 0
	for began := time.Now(); time.Since(began) < 3*time.Second; {
		_, _ = l.Exec(t.Context(), lab.ClientName, "ip", "neigh", "flush", "to", seedVIP.Addr().String())
		asked := time.Now()
		if _, err := l.Ask(t.Context(), lab.ClientName, "tcp", seedVIP); err != nil ||
			time.Since(asked) > 900*time.Millisecond {
			twice++
		}
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	return twice
}

// damageMoved moves an address by a label, and counts long-lived connections that were lost.
func damageMoved(t *testing.T, l *lab.Lab, _ bool) int {
	seedService(t, l)
	was := answerer(t, l, seedVIP.Addr())
	flows := startFlows(t, l, seedVIP, 20)
	time.Sleep(300 * time.Millisecond)
	patchNode(t, l, was, `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":""}}}`)
	wantAnswererAmong(t, l, seedVIP.Addr(), otherThan(l, was)...)
	time.Sleep(time.Second)
	return flows.stop()
}

// damageReturned pulls the cable of a node that does not own the address and puts it back. It counts
// connections that broke, and how often the node took the address. Without the guard it depends on who
// is heard first, so that the cable is pulled until there is damage, five times at most.
func damageReturned(t *testing.T, l *lab.Lab, guarded bool) int {
	podsBesideAPI(t, l)
	seedService(t, l)
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-3", "my-nginx-4")
	times, damage := 5, 0
	if guarded {
		times = 1
	}
	var c tally
	for c.returns < times && damage == 0 {
		owner := answerer(t, l, seedVIP.Addr())
		returnOf(t, l, absences[0], 3*time.Second, []netip.AddrPort{seedVIP}, &c)
		damage = c.broken + c.failed + c.moved
		for _, node := range without(workers(l), []string{owner}) {
			damage += strings.Count(l.Agent("speaker", node).Log(), "to="+node+" interfaces=[eth0]")
		}
	}
	return damage
}
