package main

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
)

// While Services keep coming, steps are folded; what clients wait for is not.
func TestStepsAreFolded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c changes
		var all []bool
		runner := loop.New(func(context.Context) (time.Duration, error) {
			all = append(all, c.take().all)
			return 0, nil
		}, often())
		c.poke, c.now = runner.Poke, runner.PokeNow
		go func() { _ = runner.Run(t.Context()) }()
		keepComing := func(d time.Duration) (steps int) {
			before, began := len(all), time.Now()
			for time.Since(began) < d {
				c.markService(nginx)
				c.markVIPs([]netip.Addr{vip1})
				time.Sleep(5 * time.Millisecond)
			}
			synctest.Wait()
			return len(all) - before
		}
		if n := keepComing(time.Second); n < 60 || n > 90 {
			t.Errorf("%d steps in the first second, want sixty, what is regained meanwhile, and few more", n)
		}
		if n := keepComing(9995 * time.Millisecond); n < 90 || n > 110 {
			t.Errorf("%d steps in the 10 s after that, want ten a second", n)
		}
		for name, mark := range map[string]func(){"all": c.markAll, "all VIPs": func() { c.markVIPs(nil) },
			"links": c.markLinks, "a node": func() { c.markNode(true) }, "a list": c.markSynced} {
			before := len(all)
			mark()
			synctest.Wait()
			if len(all) != before+1 {
				t.Errorf("%s: %d steps, want one at once", name, len(all)-before)
			}
		}
	})
}
