package chaos

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// fakeProgram runs, or has ended.
type fakeProgram struct{ running bool }

func (*fakeProgram) Name() string    { return "n1-proxy" }
func (p *fakeProgram) Running() bool { return p.running }
func (p *fakeProgram) Start() error  { p.running = true; return nil }

// A program that ends of what it should bear is started again, which hides nothing.
func TestBore(t *testing.T) {
	undone := 0
	undo := func() error { undone++; return nil }
	ended := &fakeProgram{}
	if err := bore(ended, "on a full disk", undo); err == nil || !strings.Contains(err.Error(), "n1-proxy ended on a full disk") ||
		!ended.running || undone > 0 {
		t.Errorf("one that ended: %v, running: %v, undone: %d", err, ended.running, undone)
	}
	if err := bore(&fakeProgram{running: true}, "on a full disk", undo); err != nil || undone != 1 {
		t.Errorf("one that runs: %v, undone: %d", err, undone)
	}
}

// A health port has to say 503, soon: it may be late by a moment, and neither silent nor late by ten seconds.
func TestSaysNo(t *testing.T) {
	for name, tc := range map[string]struct {
		first, then int
		after       time.Duration
		ok          bool
	}{
		"at once":  {http.StatusServiceUnavailable, http.StatusServiceUnavailable, 0, true},
		"soon":     {http.StatusOK, http.StatusServiceUnavailable, 2 * time.Second, true},
		"too late": {http.StatusOK, http.StatusServiceUnavailable, 10 * time.Second, false},
		"silent":   {0, 0, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				err := saysNo(t.Context(), "503", func(context.Context) int {
					if time.Since(began) < tc.after {
						return tc.first
					}
					return tc.then
				})
				if (err == nil) != tc.ok {
					t.Error(err)
				}
			})
		})
	}
}
