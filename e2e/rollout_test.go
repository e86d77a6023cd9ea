package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestFaultRollingUpdateCluster replaces the pods behind a VIP with policy Cluster, one on each of
// two nodes, again and again.
func TestFaultRollingUpdateCluster(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	pods := map[string]string{"k8s-worker-178": "my-nginx-1", "k8s-worker-179": "my-nginx-2"}
	probe := l.StartProbe(t.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
	for round := range 4 {
		for node, old := range pods {
			next := podOn(l, node, fmt.Sprintf("rolled-%d-%s", round, node[len(node)-3:]), byte(50+round))
			movePod(t, l, old, next, time.Second)
			pods[node] = next.Name
		}
	}
	report := probe.Stop()
	t.Log(report)
	wantNoneLost(t, report)
	if len(report.Pods) != 10 {
		t.Errorf("the pods that answered: %v, want all 10", report.Pods)
	}
}
