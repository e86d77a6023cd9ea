package kube

import (
	"errors"
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// A health server asks the client what is refused, for which it locks itself and then each watch, while
// watches fail and ask the client how many nodes there are.
func TestFailedWatchAsksForNodesUnlocked(t *testing.T) {
	for what, err := range map[string]error{"ended": nil, "failed": errors.New("connection refused")} {
		c := &Client{log: slog.New(slog.DiscardHandler)}
		w := c.watch(resource{name: "nodes", example: &corev1.Node{}}, nil)
		w.size = func() int {
			if !w.mu.TryLock() {
				t.Errorf("%s: asks while it is locked", what)
				return 3
			}
			w.mu.Unlock()
			return 3
		}
		w.failed(err)
	}
}
