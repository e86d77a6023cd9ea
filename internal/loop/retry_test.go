package loop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestBackoff(t *testing.T) {
	b := Backoff{Min: time.Second, Max: 3 * time.Second}
	var waits []time.Duration
	for range 4 {
		waits = append(waits, b.Next())
	}
	b.Reset()
	waits = append(waits, b.Next())
	if want := []time.Duration{1e9, 2e9, 3e9, 3e9, 1e9}; !slices.Equal(waits, want) {
		t.Errorf("waits %v, want %v", waits, want)
	}
}

// TestRetry checks that attempts come after ever longer waits, and after the shortest once one has
// worked for a while.
func TestRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 6500*time.Millisecond)
		defer cancel()
		began := time.Now()
		var at []time.Duration
		err := Retry(ctx, Backoff{Min: time.Second, Max: 2 * time.Second}, func(context.Context) bool {
			at = append(at, time.Since(began))
			return len(at) == 3
		})
		if want := []time.Duration{0, 1e9, 3e9, 4e9, 6e9}; err != nil || !slices.Equal(at, want) {
			t.Errorf("attempts at %v, error %v, want %v", at, err, want)
		}
	})
}

// TestFailures checks that the log tells of a row of failures once, of another kind of failure in
// it after a minute, and of its end.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		drop := func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}
		log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: drop}))
		var f Failures
		for _, step := range []struct {
			after time.Duration
			err   error
		}{
			{0, nil},
			{0, errors.New("no")},
			{0, errors.New("no")},
			{0, fmt.Errorf("dial: %w", context.Canceled)},
			{59 * time.Second, errors.New("never")},
			{time.Second, errors.New("no")},
			{0, errors.New("never")},
			{time.Second, errors.New("no")},
			{time.Hour, errors.New("never")},
			{0, nil},
			{0, nil},
			{0, errors.New("never")},
			{0, nil},
			{0, errors.New("no")},
		} {
			time.Sleep(step.after)
			f.Log(log, "cannot write", "writing again", step.err, "to", "disk")
		}
		want := []string{
			`level=WARN msg="cannot write" error=no to=disk`,
			`level=WARN msg="cannot write" error=never to=disk`,
			`level=INFO msg="writing again" to=disk`,
			`level=WARN msg="cannot write" error=never to=disk`,
			`level=INFO msg="writing again" to=disk`,
			`level=WARN msg="cannot write" error=no to=disk`,
		}
		if got := strings.Split(strings.TrimSpace(out.String()), "\n"); !slices.Equal(got, want) {
			t.Errorf("logged %q, want %q", got, want)
		}
	})
}

// TestFailuresOfManyMessages checks that an outage in which each attempt fails in its own words is
// logged once a minute.
func TestFailuresOfManyMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		var f Failures
		for i := range 150 {
			f.Log(log, "cannot read", "reading again", fmt.Errorf("port %d", i))
			time.Sleep(time.Second)
		}
		want := []string{`"cannot read" error="port 0"`, `"cannot read" error="port 60"`, `"cannot read" error="port 120"`}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		for i, line := range lines {
			_, lines[i], _ = strings.Cut(line, "msg=")
		}
		if !slices.Equal(lines, want) {
			t.Errorf("logged %q, want %q", lines, want)
		}
	})
}

// TestFailuresCutsMessages checks that a long message is cut between characters.
func TestFailuresCutsMessages(t *testing.T) {
	for _, c := range []struct{ message, want string }{
		{strings.Repeat("é", 500), strings.Repeat("é", 500)},
		{strings.Repeat("é", 501), strings.Repeat("é", 500) + "... (1 more characters)"},
		{strings.Repeat("x", 9999), strings.Repeat("x", 500) + "... (9499 more characters)"},
	} {
		var got string
		log := slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == "error" {
					got = a.Value.String()
				}
				return a
			},
		}))
		var f Failures
		f.Log(log, "cannot write", "writing again", errors.New(c.message))
		if got != c.want {
			t.Errorf("logged %q, want %q", got, c.want)
		}
	}
}

// TestFailuresRepeat checks that a long row of failures is logged at most that often, also where
// each message is another one.
func TestFailuresRepeat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		f := Failures{Repeat: 10 * time.Second}
		for i := range 25 {
			f.Log(log, "cannot read", "reading again", fmt.Errorf("port %d", i/2))
			time.Sleep(time.Second)
		}
		f.Log(log, "cannot read", "reading again", nil)
		f.Log(log, "cannot read", "reading again", errors.New("anew"))
		want := []string{`"cannot read" error="port 0"`, `"cannot read" error="port 5"`, `"cannot read" error="port 10"`,
			`"reading again"`, `"cannot read" error=anew`}
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		for i, line := range lines {
			_, lines[i], _ = strings.Cut(line, "msg=")
		}
		if !slices.Equal(lines, want) {
			t.Errorf("logged %q, want %q", lines, want)
		}
	})
}
