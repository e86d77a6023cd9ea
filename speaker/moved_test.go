package main

import (
	"context"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// The others refuse a speaker at an address that its Node does not show. Once it shows other ones for good, the speaker
// ends, so that it begins anew at one of those.
func TestASpeakerWhoseNodeHasMovedEnds(t *testing.T) {
	old, wide, next := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.9.0.1")
	type table = *kubetest.Table[string, lb.Node]
	show := func(addrs ...netip.Addr) func(table) {
		return func(nodes table) { nodes.Set(w177, lb.Node{Name: w177, Addresses: addrs}) }
	}
	for name, c := range map[string]struct {
		bound netip.Addr
		first func(table)
		after time.Duration
		then  func(table)
		ends  bool
	}{
		"the same":                   {bound: old, first: show(old, wide), ends: false},
		"another order":              {bound: old, first: show(wide, old), ends: false},
		"another address":            {bound: old, first: show(next, wide), ends: true},
		"not bound yet":              {first: show(next), ends: false},
		"no address":                 {bound: old, first: show(), ends: false},
		"the Node is deleted":        {bound: old, first: func(nodes table) { nodes.Delete(w177) }, ends: false},
		"another one for a moment":   {bound: old, first: show(next), after: 28 * time.Second, then: show(old), ends: false},
		"none, and then another one": {bound: old, first: show(), after: time.Minute, then: show(next), ends: true},
		"another one, twice for a moment": {bound: old, first: show(next), after: 28 * time.Second, then: func(nodes table) {
			show(old)(nodes)
			time.Sleep(28 * time.Second)
			show(next)(nodes)
			time.Sleep(28 * time.Second)
			show(old)(nodes)
		}, ends: false},
		"another one, then none": {bound: old, first: show(next), after: 28 * time.Second, then: show(), ends: false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				nodes := kubetest.NewTable[string, lb.Node]()
				var log strings.Builder
				m := moved{self: w177, nodes: nodes, log: slog.New(slog.NewTextHandler(&log, nil)),
					address: func() netip.Addr { return c.bound }}
				c.first(nodes)
				go func() {
					if c.then != nil {
						time.Sleep(c.after)
						c.then(nodes)
					}
				}()
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
				defer cancel()
				err := m.Run(ctx)
				if (err != nil) != c.ends || (log.Len() > 0) != c.ends {
					t.Errorf("ended with %v, logged %q", err, log.String())
				}
				if err != nil && !strings.Contains(err.Error(), "10.9.0.1") {
					t.Errorf("%v", err)
				}
			})
		})
	}
}
