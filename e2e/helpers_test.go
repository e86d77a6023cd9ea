package e2e

import (
	"bufio"
	"io"
	"strings"
	"testing"
	"time"
)

// patience is how long something may take that is to happen: long, as machines are slow at times.
const patience = time.Minute

// eventually calls f until it succeeds and fails the test with its last error.
func eventually(t testing.TB, what string, f func() error) {
	t.Helper()
	if err := within(patience, f); err != nil {
		t.Fatalf("%s: not within %v: %v", what, patience, err)
	}
}

// within calls f until it succeeds, for so long, and returns its last error.
func within(limit time.Duration, f func() error) error {
	deadline := time.Now().Add(limit)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// waitForLine reads r up to a line.
func waitForLine(t *testing.T, r io.Reader, line string) {
	t.Helper()
	var seen strings.Builder
	for s := bufio.NewScanner(r); s.Scan(); {
		if s.Text() == line {
			return
		}
		seen.WriteString(s.Text() + "\n")
	}
	t.Fatalf("ended without the line %q:\n%s", line, seen.String())
}
