package main

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop/looptest"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/internal/ops"
)

// noServer is a kubeconfig of an API server that is not there.
const noServer = `{"clusters":[{"name":"x","cluster":{"server":"http://127.0.0.1:1"}}],
"contexts":[{"name":"x","context":{"cluster":"x"}}],"current-context":"x"}`

// records keeps what is logged.
type records struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *records) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(b)
}

func (r *records) has(text string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Contains(r.text.String(), text)
}

// assembled puts a proxy together with all that flags may add. Nothing runs.
func assembled(t *testing.T, log *slog.Logger) *assembly {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(config, []byte(noServer), 0o600); err != nil {
		t.Fatal(err)
	}
	var f flags
	flagSet := pflag.NewFlagSet(name, pflag.ContinueOnError)
	f.add(flagSet)
	if err := flagSet.Parse([]string{"--mode=nftables", "--cluster-cidr=10.244.0.0/16", "--relay", "--service-counters=all",
		"--readiness-gate-timeout=1m", "--feed-socket=" + filepath.Join(dir, "feed"),
		"--relay-socket=" + filepath.Join(dir, "relay")}); err != nil {
		t.Fatal(err)
	}
	set, err := f.settings()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: config, UserAgent: name, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	var a *assembly
	nstest.New(t).Do(t, func() error {
		kernel, err := open(t.Context(), f.mode, log)
		if err != nil {
			return err
		}
		t.Cleanup(kernel.close)
		set.direct, set.offload = map[lb.Family]bool{lb.IPv4: true}, map[lb.Family]bool{lb.IPv4: true}
		a = newAssembly(&f, &ops.Runtime{Log: log, Metrics: prometheus.NewRegistry(), NodeName: "n1"}, client, set, kernel,
			kernelParameters{f.procSysNet, log})
		t.Cleanup(a.close)
		a.read()
		if err := a.write(); err != nil {
			return err
		}
		return a.addOptional()
	})
	return a
}

// TestLivenessFollowsEachLoop hangs each loop of a proxy that has all that it may have. An actor that was forgotten is
// missed, too: one that the proxy tells, or a package with one that no proxy runs.
func TestLivenessFollowsEachLoop(t *testing.T) {
	a := assembled(t, slog.New(slog.DiscardHandler))
	live := map[string]func() time.Duration{}
	a.runs(func(loop string, busy func() time.Duration) { live[loop] = busy })
	looptest.WantLive(t, a.actors, live)
	looptest.WantActors(t, a.actors, a, a.proxy.to)
	if a.actors["plan"] != a.proxy.runner {
		t.Error("the planner is not among the actors")
	}
	looptest.WantPackages(t, ".", a.actors, "relay") // a process of its own
}

// TestTheFeedFollowsThePlannerAndTheWriter hangs each of both: the speaker hears no more of the proxy.
func TestTheFeedFollowsThePlannerAndTheWriter(t *testing.T) {
	for _, loop := range []string{"plan", "rules"} {
		t.Run(loop, func(t *testing.T) {
			var log records
			a := assembled(t, slog.New(slog.NewTextHandler(&log, nil)))
			for _, p := range looptest.Pulses(a.actors[loop]) {
				p.Hang(t)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- a.offer.Run(ctx) }()
			defer func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}()
			a.offer.Update(map[lb.Key][]lb.Delivery{})
			var conn net.Conn
			for deadline := time.Now().Add(time.Minute); !log.has("the proxy hangs"); time.Sleep(time.Millisecond) {
				if conn == nil {
					conn, _ = net.Dial("unix", a.feedSocket)
				}
				if time.Now().After(deadline) {
					t.Fatal("the speaker goes on to hear of the proxy")
				}
			}
			conn.Close()
		})
	}
}
