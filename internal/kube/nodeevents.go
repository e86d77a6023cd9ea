package kube

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// cured begins the message of an Event about what is no longer found on a node.
const cured = "no longer: "

// maxFound is how long the message of a Finding may be: the same with cured before it, by which the two are told to be
// about one thing.
const maxFound = maxEventMessage - len(cured)

// Finding reports what was found on a Node, or with gone that it is no longer found. It never
// blocks.
func (e *Events) Finding(node string, f lb.Finding, gone bool) {
	f.Message = lb.Shortened(f.Message, maxFound)
	switch about := NodeReference(node); {
	case gone:
		e.Normal(about, f.Reason, cured+f.Message)
	case f.Note:
		e.Normal(about, f.Reason, f.Message)
	default:
		e.Warning(about, f.Reason, f.Message)
	}
}

// maxName is how long the name of a Node may be, and maxReason the reason of an Event: those of programs are shorter.
const maxName, maxReason = 253, 128

// ownReport reports whether an Event says of itself that a speaker or proxy sent it about its own Node.
// Only these report of Nodes. The chart's policy node-events has the API server refuse that to others; it
// may be switched off, so a diagnosis asks the programs themselves where they answer.
func ownReport(e corev1.Event) bool {
	by := e.Source.Component
	return (by == "landfall-speaker" || by == "landfall-proxy") && e.ReportingController == by &&
		e.Source.Host == e.InvolvedObject.Name && len(e.Source.Host) <= maxName && len(e.Reason) <= maxReason
}

// NodeWarning is what a program has found on a Node.
type NodeWarning struct {
	Node string
	// By is the program, such as landfall-speaker, and At when it last said so.
	By string
	At time.Time
	lb.Refusal
}

// NodeWarnings returns what Landfall's programs have warned of on Nodes since a time and have not
// taken back, in the order of the Nodes.
func (c *Client) NodeWarnings(ctx context.Context, since time.Time) ([]NodeWarning, error) {
	list, err := c.core.Events(metav1.NamespaceDefault).List(ctx,
		metav1.ListOptions{FieldSelector: "involvedObject.kind=Node", ResourceVersion: "0"})
	if err != nil {
		return nil, c.looked(err, "list", "", "events", metav1.NamespaceDefault)
	}
	return nodeWarnings(list.Items, since), nil
}

func nodeWarnings(events []corev1.Event, since time.Time) []NodeWarning {
	latest := map[string]corev1.Event{}
	for _, e := range events {
		if !ownReport(e) || e.LastTimestamp.Time.Before(since) {
			continue
		}
		about := e.InvolvedObject.Name + " " + e.Reason + " " + lb.Shortened(strings.TrimPrefix(e.Message, cured), maxFound)
		// Of two in one second the later one is the one with the later name, which has its time.
		if before, ok := latest[about]; !ok || before.LastTimestamp.Before(&e.LastTimestamp) ||
			before.LastTimestamp.Equal(&e.LastTimestamp) && before.Name < e.Name {
			latest[about] = e
		}
	}
	var warnings []NodeWarning
	for _, about := range slices.Sorted(maps.Keys(latest)) {
		if e := latest[about]; e.Type == corev1.EventTypeWarning {
			warnings = append(warnings, NodeWarning{e.InvolvedObject.Name, e.Source.Component, e.LastTimestamp.Time,
				lb.Refusal{Reason: lb.Reason(e.Reason), Message: lb.Shortened(e.Message, maxFound)}})
		}
	}
	// Whoever may create Events in this namespace may make up any number.
	if more := len(warnings) - maxWarnings; more > 0 {
		warnings = warnings[:maxWarnings]
		warnings[maxWarnings-1].Message += fmt.Sprintf(" (and %d more warnings)", more)
	}
	return warnings
}

// maxWarnings is how many warnings are returned at most.
const maxWarnings = 1000
