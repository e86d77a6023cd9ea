package kube

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ServicesIn watches the Services of a namespace, or of all if it is empty, with what Landfall has
// written to them.
func ServicesIn(c *Client, namespace string, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	c.register(resource{client: c.rest.core, name: "services", namespace: namespace,
		example: &corev1.Service{}}, objects[lb.Key, lb.Service, *corev1.Service]{table, convertLabelledService})
	return table
}

// NodeFinding is what an Event of a program says of a Node.
type NodeFinding struct {
	Node string
	lb.Finding
	// Gone is set if it is no longer found.
	Gone bool
	// First and Last are when it was reported first, and last.
	First, Last time.Time
}

// NodeFindings watches what Landfall's programs report of Nodes, by the name of the Event. The Node
// is empty in Events of others.
func NodeFindings(c *Client, changed func(event string)) *Table[string, NodeFinding] {
	table := newTable[string, NodeFinding](nil, changed)
	c.register(resource{client: c.rest.core, name: "events", namespace: metav1.NamespaceDefault,
		example: &corev1.Event{}, fieldSelector: "involvedObject.kind=Node"},
		objects[string, NodeFinding, *corev1.Event]{table, convertFinding})
	return table
}

func convertFinding(o *corev1.Event) (string, NodeFinding) {
	if !ownReport(*o) {
		return o.Name, NodeFinding{}
	}
	f := NodeFinding{Node: o.InvolvedObject.Name, First: o.FirstTimestamp.Time, Last: o.LastTimestamp.Time}
	f.Reason, f.Message, f.Note = lb.Reason(o.Reason), o.Message, o.Type != corev1.EventTypeWarning
	f.Message, f.Gone = strings.CutPrefix(f.Message, cured)
	return o.Name, f
}
