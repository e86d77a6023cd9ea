package main

import (
	"strings"
	"testing"
)

// Two lives of one pod have names of their own that begin alike. Of programs that are not in a pod nothing is known.
func TestCandidate(t *testing.T) {
	first, life := candidate("pod-a", "1-2")
	second, again := candidate("pod-a", "1-2")
	if first == second || life != again || !strings.HasPrefix(first, life) || !strings.HasPrefix(second, life) {
		t.Errorf("%q of %q, %q of %q", first, life, second, again)
	}
	if other, of := candidate("pod-a", "1-3"); strings.HasPrefix(other, life) || of == life {
		t.Errorf("another pod of that name is %q of %q", other, of)
	}
	if identity, of := candidate("host", ""); of != "" || !strings.HasPrefix(identity, "host_") {
		t.Errorf("outside of a pod it is %q of %q", identity, of)
	}
}
