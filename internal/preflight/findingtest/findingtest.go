// Package findingtest compares findings with what a test wants.
package findingtest

import (
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Check wants one finding, or none for an empty text: its reason, with "note " before it if it is one,
// a colon, and a part of its message.
func Check(t *testing.T, name string, found []lb.Finding, want string) {
	t.Helper()
	var all strings.Builder
	for _, f := range found {
		if f.Note {
			all.WriteString("note ")
		}
		all.WriteString(string(f.Reason) + ": " + f.Message + "\n")
	}
	got := all.String()
	reason, part, _ := strings.Cut(want, ": ")
	if want == "" && got != "" || !strings.HasPrefix(got, reason) || !strings.Contains(got, part) ||
		strings.Count(got, "\n") > 1 {
		t.Errorf("%s: found %q, want %q", name, got, want)
	}
}
