// Package routertest starts routers for tests.
package routertest

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// FRR starts FRR in a namespace until the test ends.
func FRR(t testing.TB, ns *nstest.NS, o router.Options) *router.Router {
	t.Helper()
	return Start(t, ns, router.StartFRR, o)
}

// BIRD starts BIRD in a namespace until the test ends.
func BIRD(t testing.TB, ns *nstest.NS, config string) *router.Router {
	t.Helper()
	return Start(t, ns, router.StartBIRD, router.Options{Config: config})
}

// Start starts a router of either kind in a namespace until the test ends. One that is not
// installed fails the test.
func Start(t testing.TB, ns *nstest.NS, start func(context.Context,
	router.Options) (*router.Router, error), o router.Options) *router.Router {
	t.Helper()
	o.Namespace, o.Dir = ns.Name, dir(t)
	r, err := start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the router's logs:\n%s", r.Logs())
		}
		r.Close()
	})
	return r
}

// dir returns a folder with a path short enough for sockets.
func dir(t testing.TB) string {
	d, err := os.MkdirTemp("", "lfr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(d); err != nil {
			t.Error(err)
		}
	})
	return d
}

// Eventually calls f until it succeeds, and fails the test with its last error if that takes longer
// than limit.
func Eventually(t testing.TB, what string, limit time.Duration, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
	}
}
