package kube

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestNodeWarnings keeps what was warned of last and not taken back.
func TestNodeWarnings(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	event := func(node, component, kind, message string, ago time.Duration) corev1.Event {
		return corev1.Event{InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: node},
			Source: corev1.EventSource{Component: component, Host: node}, ReportingController: component,
			Type: kind, Reason: "ForwardingOff", Message: message,
			LastTimestamp: metav1.NewTime(now.Add(-ago))}
	}
	events := []corev1.Event{
		event("b", "landfall-proxy", "Warning", "off", time.Minute),
		event("a", "landfall-proxy", "Warning", "off", time.Minute),
		event("c", "landfall-proxy", "Warning", "cured", time.Minute),
		event("c", "landfall-proxy", "Normal", "no longer: cured", 0),
		event("d", "landfall-proxy", "Normal", "no longer: back", time.Minute),
		event("d", "landfall-proxy", "Warning", "back", 0),
		event("e", "landfall-speaker", "Normal", "a note", 0),
		event("f", "landfall-proxy", "Warning", "long ago", time.Hour),
		event("g", "kubelet", "Warning", "another's", 0),
		event("h", "landfall-controller", "Warning", "which reports of no Node", 0),
		event("i", "landfall-proxy", "Warning", "of another node", 0),
		event("j", "landfall-proxy", "Warning", "through another reporter", 0),
	}
	events[len(events)-2].Source.Host = "b"
	events[len(events)-1].ReportingController = "kubelet"
	off := lb.Refusal{Reason: "ForwardingOff", Message: "off"}
	ago := now.Add(-time.Minute)
	want := []NodeWarning{{"a", "landfall-proxy", ago, off}, {"b", "landfall-proxy", ago, off},
		{"d", "landfall-proxy", now, lb.Refusal{Reason: "ForwardingOff", Message: "back"}}}
	for range 2 {
		if got := nodeWarnings(events, now.Add(-40*time.Minute)); !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
		slices.Reverse(events)
	}
}

// A flood of made-up Events does not flood a terminal.
func TestNodeWarningsHaveABound(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	var events []corev1.Event
	for i := range maxWarnings + 7 {
		events = append(events, corev1.Event{InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "n"}, Reason: "R",
			Source: corev1.EventSource{Component: "landfall-proxy", Host: "n"}, ReportingController: "landfall-proxy",
			Type: "Warning", Message: strconv.Itoa(i),
			LastTimestamp: metav1.NewTime(now)})
	}
	got := nodeWarnings(events, now.Add(-time.Minute))
	if last := got[len(got)-1].Message; len(got) != maxWarnings || !strings.HasSuffix(last, " (and 7 more warnings)") {
		t.Errorf("%d warnings, the last: %s", len(got), last)
	}
}

func TestRefusedPod(t *testing.T) {
	event := func(message string, at int64) corev1.Event {
		return corev1.Event{Message: message, LastTimestamp: metav1.Unix(at, 0)}
	}
	for _, test := range []struct {
		events []corev1.Event
		want   string
	}{
		{nil, ""},
		{[]corev1.Event{event("Error creating: quota", 1)}, "quota"},
		{[]corev1.Event{event("(combined from similar events): Error creating: Pod Security", 2),
			event("Error creating: quota", 1)}, "Pod Security"},
		{[]corev1.Event{event("something else", 1)}, ""},
	} {
		if got := refusedPod(test.events); got != test.want {
			t.Errorf("%v: %q, want %q", test.events, got, test.want)
		}
	}
}
