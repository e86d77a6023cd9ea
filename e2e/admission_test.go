package e2e

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// A webhook refuses every write to the status of one Service, with the code and the reason of a conflict. The
// address that the controller wanted to give it is free for another Service, and its owner hears why. Once the
// webhook is gone, and the Service has changed, it is written.
func TestContract11AnAdmissionWebhookKeepsNoAddress(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{})
	webhooks := l.Kube().AdmissionregistrationV1().ValidatingWebhookConfigurations()
	if _, err := webhooks.Create(t.Context(), refuseStatus(t, l, "denied"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	createService(t, l, "denied", nil)
	// The API server takes the webhook up a moment after it was created: until then it does not refuse.
	eventually(t, "the webhook refuses", func() error {
		_, err := l.Kube().CoreV1().Services("default").Patch(t.Context(), "denied", "application/merge-patch+json",
			[]byte(`{"status":{}}`), metav1.PatchOptions{}, "status")
		return refused(err, "denied the request")
	})
	if err := l.ApplyYAML(t.Context(), pool("small", "172.26.236.180-172.26.236.180")); err != nil {
		t.Fatal(err)
	}
	wantEvent(t, l, "denied", "StatusRefused", `admission webhook "status.example.com" denied the request: not here`)
	createService(t, l, "other", nil) // younger, and behind by name within the same second
	wantAddresses(t, l, "other", "172.26.236.180")

	if err := webhooks.Delete(t.Context(), "status", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	wantCondition(t, l, "denied", "landfall.dev/Assigned", "False", "PoolExhausted", "")
}

// refuseStatus serves a webhook beside the API server that refuses the status of a Service.
func refuseStatus(t *testing.T, l *lab.Lab, service string) *admissionregistrationv1.ValidatingWebhookConfiguration {
	t.Helper()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: review.Request.Name != service,
			Result: &metav1.Status{Code: http.StatusConflict, Reason: metav1.StatusReasonConflict, Message: "not here"}}
		_ = json.NewEncoder(w).Encode(review)
	}))
	err := l.In(l.Cluster().Master().Name, func() (err error) {
		server.Listener, err = (&net.ListenConfig{}).Listen(context.WithoutCancel(t.Context()), "tcp", "127.0.0.1:9443")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	return &admissionregistrationv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "status"},
		Webhooks: []admissionregistrationv1.ValidatingWebhook{{
			Name: "status.example.com", AdmissionReviewVersions: []string{"v1"},
			SideEffects: new(admissionregistrationv1.SideEffectClassNone),
			ClientConfig: admissionregistrationv1.WebhookClientConfig{
				URL:      new("https://127.0.0.1:9443/"),
				CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
			},
			Rules: []admissionregistrationv1.RuleWithOperations{{
				Operations: []admissionregistrationv1.OperationType{admissionregistrationv1.Update},
				Rule: admissionregistrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
					Resources: []string{"services/status"}},
			}},
		}},
	}
}
