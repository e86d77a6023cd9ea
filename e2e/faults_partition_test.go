package e2e

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// dropGossip cuts a node off from the other speakers, but not from anything else: what arrives is
// dropped (INPUT), what leaves (OUTPUT), or both.
func dropGossip(t *testing.T, l *lab.Lab, node string, chains ...string) {
	t.Helper()
	filterGossip(t, l, node, "-I", chains)
}

// passGossip undoes it.
func passGossip(t *testing.T, l *lab.Lab, node string, chains ...string) {
	t.Helper()
	filterGossip(t, l, node, "-D", chains)
}

func filterGossip(t *testing.T, l *lab.Lab, node, action string, chains []string) {
	t.Helper()
	for _, chain := range chains {
		for _, protocol := range []string{"tcp", "udp"} {
			for _, port := range []string{"--dport", "--sport"} {
				mustExec(t, l, node, "iptables", action, chain, "-p", protocol, port, "7947", "-j", "DROP")
			}
		}
	}
}

// TestFaultPartition cuts off the gossip of the node that answers, and nothing else, in one
// direction and in both. As it is there, the others wait for its speaker as for one that was
// killed. Then two answer, and whoever does forwards, and hands what it does not know to the other:
// no connection is lost. As both sides reach the API server, the one without a majority yields
// after a few seconds.
func TestFaultPartition(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
	for i, chains := range [][]string{{"INPUT"}, {"OUTPUT"}, {"INPUT", "OUTPUT"}} {
		owner := answerer(t, l, seedVIP.Addr())
		began := time.Now()
		probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
		dropGossip(t, l, owner, chains...)
		heir := wantAnswererAmong(t, l, seedVIP.Addr(), otherThan(l, owner)...)
		wantReason(t, l, owner, seedVIP.Addr(), "Yielded")
		// both sides may have written it: each time that happens the next write comes later, after a
		// minute in the end
		if i == 0 {
			wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", "from "+heir)
		}
		passGossip(t, l, owner, chains...)
		waitTogether(t, l)
		if now := answerer(t, l, seedVIP.Addr()); now != heir {
			t.Errorf("%s answers now, although %s served the address well", now, heir)
		}
		report := probe.Stop()
		t.Logf("%v dropped on %s, %s took over: %s", chains, owner, heir, report)
		if wantNoneLost(t, report); t.Failed() {
			t.Log(decidedSince(l, began)) // to place the time of the first failure
		}
	}
}

// TestFaultPartitionWithoutAPIServer does so while neither side can learn of the other:
// both answer, and both forward. When they meet again, the owner on the side of the majority goes
// on.
func TestFaultPartitionWithoutAPIServer(t *testing.T) {
	t.Parallel()
	l := labWith(t, lab.Options{Args: map[string][]string{"speaker": {"--restart-hold=1s"}}})
	seedService(t, l)
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
	owner := answerer(t, l, seedVIP.Addr())
	if err := l.StopAPI(); err != nil {
		t.Fatal(err)
	}
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
	dropGossip(t, l, owner, "INPUT", "OUTPUT")
	var both []string
	eventually(t, "each side answers", func() error {
		if both = answerers(t, l, seedVIP.Addr()); len(both) != 2 || !slices.Contains(both, owner) {
			return fmt.Errorf("those who answer: %v", both)
		}
		return nil
	})
	time.Sleep(2 * time.Second)
	passGossip(t, l, owner, "INPUT", "OUTPUT")
	waitTogether(t, l)
	heir := wantAnswererAmong(t, l, seedVIP.Addr(), without(both, []string{owner})...)
	report := probe.Stop()
	t.Logf("%s was cut off, %v answered, and then %s: %s", owner, both, heir, report)
	// A client that asks for the address meanwhile may turn from one to the other. The one that was
	// cut off refuses what it does not know until it has heard the other announce the address. Nothing
	// may be met by silence.
	if report.Answered == 0 || report.Failed() > report.Failures["connection reset by peer"] {
		t.Errorf("connections were met by silence: %s", report)
	}
	if err := l.StartAPI(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", "from "+heir)
}
