package kube

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// reportOf is an Event that a proxy sends about its Node.
func reportOf(node, name, message string, at int64) *corev1.Event {
	return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: node},
		Source:         corev1.EventSource{Component: "landfall-proxy", Host: node}, ReportingController: "landfall-proxy",
		Type: "Warning", Reason: "ForwardingOff", Message: message, LastTimestamp: metav1.Unix(at, 0)}
}

func newFindings() *findings {
	table := newTable[string, NodeFinding](nil, func(string) {})
	return &findings{objects: objects[string, NodeFinding, *corev1.Event]{table, convertFinding}, nodes: map[string][]string{}}
}

// TestContract11EventsAboutNodesHaveABound has whoever may create Events make up any number, of any size.
func TestContract11EventsAboutNodesHaveABound(t *testing.T) {
	byList, byWatch := newFindings(), newFindings()
	honest := reportOf("honest", "honest", "off", 1)
	events := []*corev1.Event{honest, {ObjectMeta: metav1.ObjectMeta{Name: "another's"}}}
	for i := range 2 * maxOfNode {
		events = append(events, reportOf("flooder", fmt.Sprintf("flooder-%03d", i), strings.Repeat("x", 100_000), int64(i)))
	}
	for i := range maxFindings {
		events = append(events, reportOf(fmt.Sprint("made-up-", i/7), fmt.Sprintf("z-%05d", i), "no", int64(1000+i)))
	}
	events = append(events, reportOf(strings.Repeat("n", maxName+1), "long name", "no", 1e6))
	var list []any
	for i, e := range events {
		list = append(list, events[len(events)-1-i])
		if err := byWatch.Add(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := byList.Replace(list, ""); err != nil {
		t.Fatal(err)
	}
	for how, f := range map[string]*findings{"list": byList, "watch": byWatch} {
		all := f.table.All()
		of := map[string]int{}
		for _, one := range all {
			of[one.Node]++
			if len(one.Message) > maxFound {
				t.Fatalf("%s: a message of %d bytes", how, len(one.Message))
			}
		}
		if len(all) != maxFindings || f.kept != maxFindings || of["flooder"] > maxOfNode || of["honest"] != 1 || of[""] > 0 {
			t.Errorf("%s: %d Events, %d of the flooder, %d of the honest Node, %d of none", how, len(all), of["flooder"],
				of["honest"], of[""])
		}
		if _, ok := all[fmt.Sprintf("flooder-%03d", 2*maxOfNode-1)]; !ok {
			t.Errorf("%s: the latest of the flooder is missing", how)
		}
	}
}

// TestEventsAboutNodesComeAndGo keeps count where they change hands.
func TestEventsAboutNodesComeAndGo(t *testing.T) {
	f := newFindings()
	for _, e := range []*corev1.Event{reportOf("a", "1", "off", 1), reportOf("a", "1", "off", 2), reportOf("a", "2", "off", 2)} {
		_ = f.Update(e)
	}
	if len(f.table.All()) != 2 || f.kept != 2 {
		t.Errorf("%v, %d", f.table.All(), f.kept)
	}
	_ = f.Update(reportOf("b", "1", "off", 3))
	another := reportOf("a", "2", "off", 3)
	another.ReportingController = "kubelet"
	_ = f.Update(another)
	if all := f.table.All(); len(all) != 1 || all["1"].Node != "b" || f.kept != 1 || len(f.nodes) != 1 {
		t.Errorf("%v, %v, %d", all, f.nodes, f.kept)
	}
	_ = f.Delete(reportOf("c", "1", "", 4))
	_ = f.Delete(another)
	if len(f.table.All()) != 0 || f.kept != 0 || len(f.nodes) != 0 {
		t.Errorf("%v, %v, %d", f.table.All(), f.nodes, f.kept)
	}
}

// TestLongFindings are sent within the bound of the policy, also where the correlator puts words before them, and what is
// no longer found is still told to be what was found.
func TestLongFindings(t *testing.T) {
	text := strings.Repeat("é", 4000)
	e := newEvents(nil, nil, "landfall-proxy", "n1")
	finding := lb.Finding{Refusal: lb.Refusal{Reason: "ForwardingOff", Message: text}}
	e.Finding("n1", finding, false)
	e.Finding("n1", finding, true)
	var sent []corev1.Event
	for range 2 {
		next, _ := e.queue.next(t.Context())
		event := next.event
		if most := len("(combined from similar events): ") + len(event.Message); most > 1024 {
			t.Errorf("%d bytes", most)
		}
		sent = append(sent, *event)
	}
	_, found := convertFinding(&sent[0])
	_, gone := convertFinding(&sent[1])
	if found.Message == "" || found.Message != gone.Message || found.Gone || !gone.Gone {
		t.Errorf("%+v\n%+v", found, gone)
	}
	if got := nodeWarnings(sent, time.Time{}); len(got) > 0 {
		t.Errorf("what is no longer found is warned of: %v", got)
	}
	if got := nodeWarnings([]corev1.Event{*reportOf("n1", "1", text, 1)}, time.Time{}); len(got) != 1 ||
		len(got[0].Message) > maxFound {
		t.Errorf("a warning of another version: %d bytes", len(got[0].Message))
	}
}
