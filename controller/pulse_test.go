package main

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
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
