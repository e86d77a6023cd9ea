package bgp

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// A flood of router solicitations does not become one of router advertisements, each of which goes to all on the link.
func TestSolicitationsAreAnsweredSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, sent := make(chan struct{}, 1), 0
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- advertise(ctx, asked, func() error { sent++; return nil }, func() error { return nil })
		}()
		const lasts = time.Minute
		for range lasts / (10 * time.Millisecond) {
			poke(asked)
			time.Sleep(10 * time.Millisecond)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		const least = int(lasts / askedInterval)
		if most := least + firstAdvertisements; sent < least || sent > most {
			t.Errorf("%d advertisements in %v, want %d to %d", sent, lasts, least, most)
		}
	})
}
