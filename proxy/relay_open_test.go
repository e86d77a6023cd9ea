package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/relay"
)

// A relay that is ready has its predecessor ended, and with it the connections that this does not hand over. So while the
// predecessor may soon do so, the relay is not ready; but where none does, the port would never be free.
func TestContract6ARelayThatMayTakeOverSoonIsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			err  error
			from time.Duration // when it is ready
		}{
			{fmt.Errorf("%w: %w", relay.ErrNoPredecessor, unix.EADDRINUSE), relay.HandOverWithin},
			{unix.EADDRINUSE, 0},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			s, began, tries := newSettled(), time.Now(), 0
			var logged strings.Builder
			done := make(chan *relay.Relay)
			go func() {
				done <- openRelay(ctx, slog.New(slog.NewTextHandler(&logged, nil)), s, func() (*relay.Relay, error) {
					tries++
					return nil, fmt.Errorf("%w, try %d", test.err, tries)
				})
			}()
			for range 100 {
				synctest.Wait()
				waits := time.Since(began) < test.from
				if err := s.check(); (err != nil) != waits || waits && !errors.Is(err, relay.ErrNoPredecessor) {
					t.Errorf("%v, after %s: %v", test.err, time.Since(began), err)
				}
				time.Sleep(time.Second)
			}
			cancel()
			if r := <-done; r != nil {
				t.Error("there is a relay")
			}
			if n := strings.Count(logged.String(), "\n"); tries < 100 || n != 1 {
				t.Errorf("%v: %d tries in 100 s, of which it logs %d: %s", test.err, tries, n, logged.String())
			}
		}
	})
}
