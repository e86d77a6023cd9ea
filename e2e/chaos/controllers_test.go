package chaos

import (
	"testing"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// Events are about the controller that leads, and some about another one.
func TestControllerOf(t *testing.T) {
	for _, tc := range []struct{ id, leader, controllers, want int }{
		{1, 0, 2, 0}, {2, 0, 2, 0}, {3, 0, 2, 1}, {1, 1, 2, 1}, {6, 1, 2, 0}, {6, 0, 1, 0},
	} {
		if got := controllerOf(story.Event{ID: tc.id}, tc.leader, tc.controllers); got != tc.want {
			t.Errorf("event %d, %d leads of %d: %d, want %d", tc.id, tc.leader, tc.controllers, got, tc.want)
		}
	}
}

func TestLeads(t *testing.T) {
	const log = `time=2026-01-02T03:04:05.000Z level=INFO msg="waiting to become the leader" lease=ns/controller identity=host_A_1
time=2026-01-02T03:04:06.000Z level=INFO msg="a leader was elected" lease=ns/controller identity=host_A_2 leader=host_B_1
`
	for holder, want := range map[string]bool{"host_A_1": true, "host_A_2": true, "host_B_1": false, "host_A_": false, "": false} {
		if got := leads(log, holder); got != want {
			t.Errorf("%q leads: %v, want %v", holder, got, want)
		}
	}
}
