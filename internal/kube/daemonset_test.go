package kube

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestAskDaemonSet asks for DaemonSets in all states, and is refused: once, without a second try.
func TestAskDaemonSet(t *testing.T) {
	now := metav1.Now()
	sets := map[string]metav1.ObjectMeta{
		"stays": {}, "theirs": {Finalizers: []string{metav1.FinalizerOrphanDependents}},
		"deleting":  {DeletionTimestamp: &now, Finalizers: []string{metav1.FinalizerDeleteDependents}},
		"orphaning": {DeletionTimestamp: &now, Finalizers: []string{metav1.FinalizerOrphanDependents}},
	}
	codes := map[string]metav1.StatusReason{"forbidden": metav1.StatusReasonForbidden,
		"unauthorized": metav1.StatusReasonUnauthorized, "busy": metav1.StatusReasonServerTimeout,
		"none": metav1.StatusReasonNotFound}
	status := map[string]int{"forbidden": 403, "unauthorized": 401, "busy": 503, "none": 404}
	requests := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		w.Header().Set("Content-Type", "application/json")
		name := r.URL.Path[len("/apis/apps/v1/namespaces/landfall-system/daemonsets/"):]
		if reason, fails := codes[name]; fails {
			w.WriteHeader(status[name])
			json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status: "Failure", Code: int32(status[name]), Reason: reason,
				Details: &metav1.StatusDetails{RetryAfterSeconds: 1}})
			return
		}
		json.NewEncoder(w).Encode(appsv1.DaemonSet{TypeMeta: metav1.TypeMeta{Kind: "DaemonSet", APIVersion: "apps/v1"},
			ObjectMeta: sets[name], Status: appsv1.DaemonSetStatus{NumberReady: 2}})
	}))
	defer server.Close()
	client := newClient(t, server.URL)
	for name, test := range map[string]struct {
		want           lb.DaemonSet
		there          bool
		fails, refused bool
	}{
		"stays":     {want: lb.DaemonSet{Stays: true, Ready: 2}, there: true},
		"theirs":    {want: lb.DaemonSet{Stays: true, Ready: 2}, there: true},
		"deleting":  {want: lb.DaemonSet{Ready: 2}, there: true},
		"orphaning": {want: lb.DaemonSet{Orphans: true, Ready: 2}, there: true},
		"none":      {}, "busy": {fails: true},
		"forbidden": {fails: true, refused: true}, "unauthorized": {fails: true, refused: true},
	} {
		requests = 0
		got, there, err := client.AskDaemonSet(t.Context(), "landfall-system", name)
		if got != test.want || there != test.there || (err != nil) != test.fails || IsRefused(err) != test.refused ||
			requests != 1 {
			t.Errorf("%s: %+v, there %v, %v, after %d requests", name, got, there, err, requests)
		}
	}
}
