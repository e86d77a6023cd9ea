package kube

import (
	"cmp"
	"slices"
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

// NodeFindings watches what Landfall's programs report of Nodes, by the name of the Event: the latest of each Node.
func NodeFindings(c *Client, changed func(event string)) *Table[string, NodeFinding] {
	table := newTable[string, NodeFinding](nil, changed)
	c.register(resource{client: c.rest.core, name: "events", namespace: metav1.NamespaceDefault,
		example: &corev1.Event{}, fieldSelector: "involvedObject.kind=Node"},
		&findings{objects: objects[string, NodeFinding, *corev1.Event]{table, convertFinding}, nodes: map[string][]string{}})
	return table
}

// Bounds of what is kept of Nodes: whoever may create Events in that namespace may make up any number.
const (
	// maxOfNode is how many Events of a Node are kept. Its two programs send 74 within the hour that the API server keeps
	// them, as record.EventCorrelator has it.
	maxOfNode = 100
	// maxFindings is how many Events are kept of all Nodes.
	maxFindings = 5000
)

// findings is the store behind NodeFindings. It leaves out Events of others.
type findings struct {
	objects[string, NodeFinding, *corev1.Event]
	nodes map[string][]string // the Events of each Node, the latest last
	kept  int                 // how many these are
}

// note takes an Event for the latest of its Node. It returns the one that has to go for it, "" if none has.
func (f *findings) note(event, node string) string {
	f.nodes[node] = append(f.nodes[node], event)
	f.kept++
	switch {
	case len(f.nodes[node]) > maxOfNode:
	case f.kept > maxFindings:
		for other, events := range f.nodes {
			if len(events) > len(f.nodes[node]) {
				node = other
			}
		}
	default:
		return ""
	}
	out := f.nodes[node][0]
	f.forget(out, node)
	return out
}

func (f *findings) forget(event, node string) {
	events := f.nodes[node]
	i := slices.Index(events, event)
	if i < 0 {
		return
	}
	f.kept--
	if f.nodes[node] = slices.Delete(events, i, i+1); len(f.nodes[node]) == 0 {
		delete(f.nodes, node)
	}
}

func (f *findings) Add(obj any) error {
	event, found := f.convert(obj.(*corev1.Event))
	before, _ := f.table.Get(event)
	f.forget(event, before.Node)
	f.table.put(event, found, found.Node != "")
	if found.Node != "" {
		f.table.put(f.note(event, found.Node), NodeFinding{}, false)
	}
	return nil
}

func (f *findings) Update(obj any) error { return f.Add(obj) }

func (f *findings) Delete(obj any) error {
	event, _ := f.convert(obj.(*corev1.Event))
	before, _ := f.table.Get(event)
	f.forget(event, before.Node)
	f.table.put(event, NodeFinding{}, false)
	return nil
}

func (f *findings) Replace(list []any, _ string) error {
	entries := make([]*entry[string, NodeFinding], 0, len(list))
	for _, obj := range list {
		entries = append(entries, f.entry(obj))
	}
	slices.SortFunc(entries, func(a, b *entry[string, NodeFinding]) int {
		return cmp.Or(a.value.Last.Compare(b.value.Last), strings.Compare(a.key, b.key))
	})
	f.nodes, f.kept = map[string][]string{}, 0
	values := map[string]NodeFinding{}
	for _, e := range entries {
		if e.value.Node != "" {
			values[e.key] = e.value
			delete(values, f.note(e.key, e.value.Node))
		}
	}
	f.table.replace(values)
	return nil
}

// convertFinding returns no Node for Events of others.
func convertFinding(o *corev1.Event) (string, NodeFinding) {
	if !ownReport(*o) {
		return o.Name, NodeFinding{}
	}
	f := NodeFinding{Node: o.InvolvedObject.Name, First: o.FirstTimestamp.Time, Last: o.LastTimestamp.Time}
	f.Reason, f.Message, f.Note = lb.Reason(o.Reason), o.Message, o.Type != corev1.EventTypeWarning
	f.Message, f.Gone = strings.CutPrefix(f.Message, cured)
	f.Message = lb.Shortened(f.Message, maxFound)
	return o.Name, f
}
