package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// tellObjects sends the rows that the API server is to take, all of them before it looks, and
// checks what Landfall answers. What it returns deletes them.
func tellObjects(t *testing.T, l *lab.Lab, file string, rows []badObject) (remove func()) {
	t.Helper()
	for i, row := range rows {
		if err := row.send(t.Context(), t, l, fmt.Sprintf("%s-%d", file, i)); err != nil {
			t.Errorf("%s: %v", row.Name, err)
		}
	}
	for i, row := range rows {
		if *row.Says == (answer{}) {
			continue // it is there for another row
		}
		t.Run(row.Name, func(t *testing.T) {
			object := row.object(t, fmt.Sprintf("%s-%d", file, i))
			eventually(t, "the answer", func() error { return row.Says.given(t.Context(), l, row, object) })
		})
	}
	return func() {
		for i, row := range rows {
			object := row.object(t, fmt.Sprintf("%s-%d", file, i))
			err := row.client(l, object).Delete(context.WithoutCancel(t.Context()), object.GetName(), metav1.DeleteOptions{})
			if err != nil {
				t.Errorf("%s: %v", row.Name, err)
			}
		}
	}
}

// given returns an error while an object does not have the answer.
func (a *answer) given(ctx context.Context, l *lab.Lab, row badObject, object *unstructured.Unstructured) error {
	var seen []string
	matches := func(status, reason, message string) bool {
		seen = append(seen, fmt.Sprintf("%s %s: %.300s", status, reason, message))
		return (a.Status == "" || a.Status == status) && (a.Reason == "" || a.Reason == reason) &&
			strings.Contains(message, a.Message)
	}
	if a.Event {
		events, err := l.Kube().CoreV1().Events(hostileNamespace).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.name=" + object.GetName()})
		if err != nil {
			return err
		}
		for _, e := range events.Items {
			if matches("", e.Reason, e.Message) {
				return nil
			}
		}
		return fmt.Errorf("Events: %q", seen)
	}
	now, err := row.client(l, object).Get(ctx, object.GetName(), metav1.GetOptions{})
	if err != nil {
		return err
	}
	list, kind := "conditions", a.Condition
	if kind == "" {
		list = "nodes"
	}
	entries, _, err := unstructured.NestedSlice(now.Object, "status", list)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		text := func(field string) string { s, _ := entry.(map[string]any)[field].(string); return s }
		if text("type") == kind && matches(text("status"), text("reason"), text("message")) &&
			(a.State == "" || a.State == text("state")) {
			return nil
		}
	}
	return fmt.Errorf("%s: %q", list, seen)
}
