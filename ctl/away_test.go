package main

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/loop"
)

// TestConnection says each thing once, whatever the number of watches.
func TestConnection(t *testing.T) {
	var out strings.Builder
	log := slog.New(newConnection(&out))
	fails := map[string]*loop.Failures{"nodes": {}, "services": {}, "bgppeers": {}}
	say := func(watch string, err error) {
		fails[watch].Log(log, "waiting for the API server", "the API server answers", err, "server", "https://a:6443",
			"watch", watch)
	}
	refused := errors.New(`failed to list *v1.Node: Get "https://a:6443/api/v1/nodes?limit=500": connection refused`)
	denied := errors.New(`bgppeers.landfall.dev is forbidden: User "eve" cannot list resource "bgppeers" in API group ` +
		`"landfall.dev" at the cluster scope`)
	log.Info("a library says", "error", "nothing of interest")
	for _, step := range []struct {
		watch string
		err   error
		want  string
	}{
		{"nodes", refused, "the API server https://a:6443 does not answer, so nothing is shown until it does: connection " +
			"refused\n"},
		{"services", refused, ""},
		{"bgppeers", denied, "bgppeers are not shown: " + denied.Error() +
			`; this rule allows it: {apiGroups: ["landfall.dev"], resources: ["bgppeers"], verbs: ["list", "watch"]}` + "\n"},
		{"nodes", nil, ""},
		{"services", nil, "the API server answers again\n"},
		{"services", nil, ""},
		{"bgppeers", nil, "bgppeers are shown\n"},
		{"nodes", refused, "the API server https://a:6443 does not answer, so nothing is shown until it does: connection " +
			"refused\n"},
	} {
		out.Reset()
		if say(step.watch, step.err); out.String() != step.want {
			t.Errorf("%s, error %v: %q, want %q", step.watch, step.err, out.String(), step.want)
		}
	}
}
