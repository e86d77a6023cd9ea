package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/loop/looptest"
)

// TestALoopThatHangsIsSeen stops what tidies up, and what writes listings, beside the assignment of addresses.
func TestALoopThatHangsIsSeen(t *testing.T) {
	for _, c := range []struct {
		name string
		hang func(p *process, wait func())
		busy func(p *process) func() time.Duration
	}{
		{"tidier", func(p *process, wait func()) {
			p.tidier.forgetSessions = func(context.Context, string, []string) error { wait(); return nil }
		}, func(p *process) func() time.Duration { return p.tidier.runner.Busy }},
		{"lister", func(p *process, wait func()) {
			now := p.lister.now
			p.lister.now = func() time.Time { wait(); return now() }
		}, func(p *process) func() time.Duration { return p.lister.runner.Busy }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newProcess(newCluster())
				hang := make(chan struct{})
				var shut atomic.Bool
				c.hang(p, func() {
					if shut.Load() {
						<-hang
					}
				})
				want := func(what string, busy time.Duration) {
					t.Helper()
					synctest.Wait()
					if got := c.busy(p)(); got < busy || busy == 0 && got != 0 {
						t.Errorf("%s: busy for %v, want %v", what, got, busy)
					}
				}
				ctx, end := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- p.lead(ctx) }()
				time.Sleep(time.Hour)
				want("nothing changes", 0)
				shut.Store(true)
				p.cluster.put(lists("web", external))
				p.services.SetSynced(true)
				p.pools.SetSynced(true)
				p.sessions.Replace(map[string][]string{"tor": {"gone"}})
				p.deliver()
				time.Sleep(time.Hour)
				want("it hangs", time.Hour-time.Minute)
				if busy := p.runner.Busy(); busy != 0 {
					t.Errorf("the assignment of addresses waits for it: busy for %v", busy)
				}
				close(hang)
				time.Sleep(time.Minute)
				want("it goes on", 0)
				end()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestLivenessFollowsEachLoop hangs each loop of the controller: one of those whose liveness is watched says so.
func TestLivenessFollowsEachLoop(t *testing.T) {
	config, log := filepath.Join(t.TempDir(), "kubeconfig"), slog.New(slog.DiscardHandler)
	if err := os.WriteFile(config, []byte(`{"clusters":[{"name":"x","cluster":{"server":"http://127.0.0.1:1"}}],
		"contexts":[{"name":"x","context":{"cluster":"x"}}],"current-context":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: config, UserAgent: name, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	kube.Nodes(client, "", func(string) {})
	c, events := newController(deps{parallel: parallel, log: log, now: time.Now}), client.Events(name, "x")
	live := map[string]func() time.Duration{}
	watch(c, client, events, func(loop string, busy func() time.Duration) { live[loop] = busy })
	hung := 0
	for _, part := range []any{c, client, events} {
		for _, p := range looptest.Pulses(part) {
			end := p.Hang(t)
			var says []string
			for loop, busy := range live {
				if busy() >= looptest.Hanging {
					says = append(says, loop)
				}
			}
			if len(says) != 1 {
				t.Errorf("%s of a %T hangs, of which %d say so: %q", p.Path, part, len(says), says)
			}
			end()
			hung++
		}
	}
	if hung != len(live) {
		t.Errorf("%d loops were hung, and %d are watched", hung, len(live))
	}
}
