package feed

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestAReaderThatHangsIsSeen stops what takes in the speaker's updates, and what tells the speaker, in what they call.
func TestAReaderThatHangsIsSeen(t *testing.T) {
	for _, hears := range []bool{true, false} {
		t.Run(fmt.Sprint("hears=", hears), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hang := make(chan struct{})
				var shut atomic.Bool
				wait := func(here bool) {
					if here && shut.Load() {
						<-hang
					}
				}
				a := New(slog.New(slog.DiscardHandler), "", func() { wait(hears) },
					func() time.Duration { wait(!hears); return 0 })
				a.Update(map[lb.Key][]lb.Delivery{key("web"): {delivery("web", "192.0.2.1", 1)}})
				a.Begin(nil)
				want := func(what string, busy time.Duration) {
					t.Helper()
					synctest.Wait()
					if got := a.Busy(); got < busy || busy == 0 && got != 0 {
						t.Errorf("%s: busy for %v, want %v", what, got, busy)
					}
				}
				ctx, cancel := context.WithCancel(t.Context())
				ours, theirs := net.Pipe()
				r, done := &subscriber{wake: make(chan struct{}, 1)}, make(chan error)
				say := func() { r.poke() }
				if hears { // alone: it hangs with the lock
					go func() { done <- a.hear(ours, r) }()
					say = func() { _, _ = fmt.Fprintln(theirs, `{"dead":["n"]}`) }
				} else {
					go func() { done <- a.write(ctx, ours, r) }()
					go func() { _, _ = io.Copy(io.Discard, theirs) }()
				}
				say()
				time.Sleep(time.Hour)
				want("nothing comes", 0)
				shut.Store(true)
				say()
				time.Sleep(time.Hour)
				want("it hangs", time.Hour-time.Minute)
				close(hang)
				want("it goes on", 0)
				cancel()
				theirs.Close()
				if err := <-done; err != nil {
					t.Error(err)
				}
			})
		})
	}
}
