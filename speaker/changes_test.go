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
		began := time.Now()
		for time.Since(began) < 9995*time.Millisecond {
			c.markService(nginx)
			c.markVIPs([]netip.Addr{vip1})
			time.Sleep(5 * time.Millisecond)
		}
		synctest.Wait()
		if n := len(all); n < 100 || n > 120 {
			t.Errorf("%d steps in 10 s, want ten a second and twenty", n)
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
