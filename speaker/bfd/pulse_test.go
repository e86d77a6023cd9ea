package bfd

import (
	"context"
	"encoding/json"
	"io"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestAnEngineThatHangsReportsNothing stops the engine at a packet that it sends.
func TestAnEngineThatHangsReportsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, hang := newCloud(), make(chan struct{})
		stops := false
		c.fate = func(_, _ netip.Addr, _ Packet) (time.Duration, bool) {
			if stops {
				<-hang
			}
			return ms, false
		}
		a := c.node(t, left)
		a.Set(map[Key]Profile{toRight: {TransmitInterval: 50 * ms, ReceiveInterval: 50 * ms, DetectMultiplier: 3}})
		ran, done := make(chan error), make(chan error)
		var told atomic.Int64
		go func() { done <- report(a.worker, nil, ran, func(answer) { told.Add(1) }) }()
		want := func(what string, reports int, busy time.Duration) {
			t.Helper()
			synctest.Wait()
			n := int(told.Swap(0))
			if got := a.busy(); n != reports || got < busy || busy == 0 && got != 0 {
				t.Errorf("%s: %d reports, busy for %v, want %d and %v", what, n, got, reports, busy)
			}
		}
		time.Sleep(10 * time.Minute)
		want("it works", int(10*time.Minute/counting), 0)
		c.mu.Lock()
		stops = true
		c.mu.Unlock()
		time.Sleep(time.Minute)
		told.Store(0)
		time.Sleep(time.Hour)
		want("it hangs", 0, time.Hour)
		close(hang)
		time.Sleep(time.Minute)
		want("it works again", int(time.Minute/counting), 0)
		ran <- nil
		<-done
	})
}

// TestAProcessThatHangsIsSeen has the process take no order, say nothing, and say something that the actor does not take
// in.
func TestAProcessThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		var shut atomic.Bool
		a := New(Options{Changed: func() {
			if shut.Load() {
				<-hang
			}
		}})
		want := func(what string, busy time.Duration) {
			t.Helper()
			synctest.Wait()
			if got := a.Busy(); got < busy || busy == 0 && got != 0 {
				t.Errorf("%s: busy for %v, want %v", what, got, busy)
			}
		}
		time.Sleep(time.Hour)
		want("without a process", 0)
		stdout, says := io.Pipe()
		done := make(chan error)
		go func() { done <- a.listen(stdout) }()
		encoder := json.NewEncoder(says)
		say := func(outcomes ...answered) {
			if err := encoder.Encode(answer{Health: &Health{}, Outcomes: outcomes}); err != nil {
				t.Error(err)
			}
		}
		for range 100 {
			time.Sleep(counting)
			want("it counts", 0)
			say()
		}
		time.Sleep(time.Hour)
		want("it says nothing", time.Hour)
		say()
		want("it goes on", 0)
		shut.Store(true)
		say(answered{Key: toRight})
		time.Sleep(time.Hour)
		want("what it says is not taken in", time.Hour)
		close(hang)
		synctest.Wait()
		want("it is in the end", 0)
		says.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
		time.Sleep(time.Hour)
		want("the process has ended", 0)

		orders, stdin := io.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		ordered := make(chan struct{})
		go func() {
			defer close(ordered)
			a.order(ctx, stdin, nil, ended)
		}()
		time.Sleep(time.Hour)
		want("it takes no order", time.Hour)
		go func() { _, _ = io.Copy(io.Discard, orders) }()
		want("it takes orders", 0)
		close(ended)
		<-ordered
		cancel()
	})
}
