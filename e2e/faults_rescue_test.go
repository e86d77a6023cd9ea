package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestFaultMovesLoseNothing moves an address in each planned way, with a new connection every 5 ms
// and long-lived ones that were opened before any of the moves: packets that arrive at a node which
// does not know their connection are handed to the one that does. The new connections come from
// another client, as their many ports are those of long-lived ones before long, and a node that has
// seen a connection end takes a packet of the next one with the same port for a late one.
func TestFaultMovesLoseNothing(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	wantAnswers(t, l, lab.ClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
	const exclude = `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`
	ways := []struct {
		name       string
		begin, end func(node string)
	}{
		{"label",
			func(node string) { patchNode(t, l, node, fmt.Sprintf(exclude, `""`)) },
			func(node string) { patchNode(t, l, node, fmt.Sprintf(exclude, "null")) }},
		{"drain",
			func(node string) {
				patchNode(t, l, node, `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`)
			},
			func(node string) { patchNode(t, l, node, `{"spec":{"taints":null}}`) }},
		{"speaker stopped for good",
			func(node string) {
				if err := l.Agent("speaker", node).Stop(); err != nil {
					t.Fatal(err)
				}
			},
			func(node string) {
				if err := l.Agent("speaker", node).Start(); err != nil {
					t.Fatal(err)
				}
			}},
		{"speaker and proxy upgraded",
			func(node string) {
				restart(t, l.Agent("speaker", node), (*lab.Agent).Stop, 300*time.Millisecond)
				restart(t, l.Agent("proxy", node), (*lab.Agent).Stop, 300*time.Millisecond)
			},
			func(string) {}},
	}
	all := startFlows(t, l, seedVIP, longLived)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			for range 3 {
				was := answerer(t, l, seedVIP.Addr())
				own := startFlows(t, l, seedVIP, 20) // only known to this owner
				probe := l.StartProbe(t.Context(), lab.FarClientName, "tcp", seedVIP, 5*time.Millisecond)
				time.Sleep(300 * time.Millisecond)
				way.begin(was)
				heir := wantAnswererAmong(t, l, seedVIP.Addr(), otherThan(l, was)...)
				time.Sleep(1500 * time.Millisecond)
				way.end(was)
				eventually(t, "the speaker of "+was+" is there",
					func() error { return l.Agent("speaker", was).WaitReady(t.Context()) })
				time.Sleep(500 * time.Millisecond)
				report, lost := probe.Stop(), own.stop()
				t.Logf("%s to %s: %s; long-lived: %d of 20 lost", was, heir, report, lost)
				if report.Failed() > 0 || report.Answered == 0 || lost > 0 {
					t.Errorf("connections were lost: %s; long-lived: %d of 20", report, lost)
				}
			}
		})
	}
	if lost := all.stop(); lost > 0 {
		t.Errorf("%d of %d connections that saw all moves were lost", lost, longLived)
	}
}
