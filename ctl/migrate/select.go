package migrate

import (
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Selects reports whether one of some label selectors selects an object; no selectors select all.
func Selects(selectors any, object map[string]any) bool {
	raw, err := json.Marshal(selectors)
	var list []metav1.LabelSelector
	if err != nil || json.Unmarshal(raw, &list) != nil {
		return false
	}
	set := labels.Set{}
	given, _ := dig(object, "metadata", "labels").(map[string]any)
	for key, value := range given {
		set[key] = fmt.Sprint(value)
	}
	return len(list) == 0 || slices.ContainsFunc(list, func(s metav1.LabelSelector) bool {
		selector, err := metav1.LabelSelectorAsSelector(&s)
		return err == nil && selector.Matches(set)
	})
}

// NotReady says what a Deployment or DaemonSet lacks; "" if all pods are ready. Of a DaemonSet so many
// pods may be missing as nodes are down.
func NotReady(o map[string]any, down int) string {
	number := func(keys ...string) int64 {
		switch n := dig(o, keys...).(type) {
		case float64:
			return int64(n)
		case int64:
			return n
		}
		return 0
	}
	if number("status", "observedGeneration") < number("metadata", "generation") {
		return "its pods are not planned yet"
	}
	want, ready := number("status", "desiredNumberScheduled")-int64(down), number("status", "numberReady")
	if o["kind"] == "Deployment" {
		want, ready = number("spec", "replicas"), number("status", "readyReplicas")
	}
	if ready < want {
		return fmt.Sprintf("%d of %d pods are ready", ready, want)
	}
	return ""
}
