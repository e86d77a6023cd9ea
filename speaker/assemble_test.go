package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/loop/looptest"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/speaker/members"
)

// noServer is a kubeconfig of an API server that is not there.
const noServer = `{"clusters":[{"name":"x","cluster":{"server":"http://127.0.0.1:1"}}],
"contexts":[{"name":"x","context":{"cluster":"x"}}],"current-context":"x"}`

// TestLivenessFollowsEachLoop hangs each loop of a speaker that has all that it may have. An actor that was forgotten is
// missed, too: one that the speaker tells or reads, or a package with one that no speaker runs.
func TestLivenessFollowsEachLoop(t *testing.T) {
	config, log := filepath.Join(t.TempDir(), "kubeconfig"), slog.New(slog.DiscardHandler)
	if err := os.WriteFile(config, []byte(noServer), 0o600); err != nil {
		t.Fatal(err)
	}
	var f flags
	f.add(pflag.NewFlagSet(name, pflag.ContinueOnError))
	client, err := kube.Connect(kube.Options{Kubeconfig: config, UserAgent: name, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	bind, _, err := f.check()
	if err != nil {
		t.Fatal(err)
	}
	s, actors := f.assemble(&ops.Runtime{Log: log, Metrics: prometheus.NewRegistry(), NodeName: "n1"}, client, bind,
		[][]byte{make([]byte, 16)}, members.LAN)
	live := map[string]func() time.Duration{}
	watch(actors, func(loop string, busy func() time.Duration) { live[loop] = busy })
	// Passwords have a loop for each Secret once they run; the liveness of the others says nothing.
	looptest.WantLive(t, actors, live, "passwords", "memory", "pulse", "address")
	looptest.WantActors(t, actors, s.to, s.from)
	looptest.WantPackages(t, ".", actors)
	if actors["plan"] != s.runner {
		t.Error("the planner is not among the actors")
	}
}
