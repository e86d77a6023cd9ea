package preflight

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestTellsOnceAndAgain tells of what is found, again after a while, and not of what stays unknown.
func TestTellsOnceAndAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		off, dropped := lb.Find(lb.ReasonForwardingOff, "off"), lb.Find(lb.ReasonForwardDropped, "dropped")
		var mu sync.Mutex
		var found []lb.Finding
		var known bool
		var told []string
		set := func(know bool, all ...lb.Finding) {
			mu.Lock()
			defer mu.Unlock()
			found, known = all, know
		}
		p := New(Options{Log: slog.New(slog.DiscardHandler), Now: time.Now, Brief: []lb.Reason{lb.ReasonAPIServerUnreachable},
			Look: func(context.Context) ([]lb.Finding, bool) {
				mu.Lock()
				defer mu.Unlock()
				return found, known
			},
			Tell: func(f lb.Finding, gone bool) {
				mu.Lock()
				defer mu.Unlock()
				told = append(told, f.Message)
				if gone {
					told[len(told)-1] = "no " + f.Message
				}
			}})
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		want := func(what string, found int, messages ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(told, messages) || len(p.Found()) != found {
				t.Errorf("%s: told %q, want %q; found %v", what, told, messages, p.Found())
			}
			told = nil
		}
		time.Sleep(time.Minute)
		want("nothing is known", 0)
		set(true, off)
		time.Sleep(2 * every)
		want("found", 1, "off")
		set(true, dropped, off)
		time.Sleep(2 * every)
		want("more is found", 2, "dropped")
		set(false)
		time.Sleep(2 * every)
		want("unknown is not absent", 2)
		set(true, off)
		time.Sleep(Repeat + every)
		want("one goes, the other stays", 1, "no dropped", "off")
		more := off
		more.Message = "off and more"
		set(true, more)
		time.Sleep(2 * every)
		want("another message is no other finding", 1)
		time.Sleep(Repeat)
		want("told again, as it is now", 1, "no off", "off and more")
		other := off.About("IPv6")
		set(true, off, other)
		time.Sleep(2 * every)
		want("another subject", 2, "off")
		set(true, other)
		time.Sleep(2 * every)
		want("one subject is mended", 1, "no off and more")
		set(true)
		time.Sleep(2 * every)
		want("mended", 0, "no off")
		set(true, off)
		time.Sleep(2 * every)
		want("it comes back", 1, "off")
		away := lb.Find(lb.ReasonAPIServerUnreachable, "away")
		set(true, off, away)
		time.Sleep(every)
		want("away at one look", 2)
		set(true, off)
		time.Sleep(every)
		want("and back at the next", 1)
		set(true, off, away)
		time.Sleep(2 * every)
		want("away for longer", 2, "away")
		set(true, off)
		time.Sleep(every)
		want("and back", 1, "no away")
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestALookEnds has a look hang that heeds its context: it ends after a while, the next one begins,
// and the end of the actor ends that one too.
func TestALookEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := make(chan time.Time, 2)
		p := New(Options{Log: slog.New(slog.DiscardHandler), Now: time.Now,
			Look: func(ctx context.Context) ([]lb.Finding, bool) {
				began <- time.Now()
				<-ctx.Done()
				return nil, true
			}})
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- p.Run(ctx) }()
		first, second := <-began, <-began
		if took := second.Sub(first); took != lookTimeout+every {
			t.Errorf("the next look began %v after the first, want %v", took, lookTimeout+every)
		}
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
