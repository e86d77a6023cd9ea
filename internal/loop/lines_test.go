package loop

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestLines(t *testing.T) {
	now := time.Unix(1000, 0)
	var l Lines
	admit := func(what string, n, wantLines, wantLeftOut int) {
		t.Helper()
		lines, leftOut := 0, 0
		for range n {
			if left, ok := l.Admit(now, 3); ok {
				lines, leftOut = lines+1, leftOut+left
			}
		}
		if lines != wantLines || leftOut != wantLeftOut {
			t.Errorf("%s: %d lines, and %d are said to be left out, want %d and %d", what, lines, leftOut, wantLines,
				wantLeftOut)
		}
	}
	admit("the first second", 10, 3, 0)
	now = now.Add(time.Second - 1)
	admit("the same second", 1, 0, 0)
	now = now.Add(1)
	admit("the next second", 2, 2, 8)
	now = now.Add(time.Hour)
	admit("much later", 10, 3, 0)
	now = now.Add(-2 * time.Hour)
	admit("after the clock was set back", 1, 1, 7)
}

// However many goroutines log, a second has as many lines as it may have.
func TestLinesOfManyGoroutines(t *testing.T) {
	now := time.Unix(1000, 0)
	var l Lines
	var all sync.WaitGroup
	var lines atomic.Int64
	for range 8 {
		all.Go(func() {
			for range 1000 {
				if _, ok := l.Admit(now, 50); ok {
					lines.Add(1)
				}
			}
		})
	}
	all.Wait()
	if left, ok := l.Admit(now.Add(time.Second), 50); lines.Load() != 50 || !ok || left != 8*1000-50 {
		t.Errorf("%d lines, and %d are said to be left out", lines.Load(), left)
	}
}
