package charts

import (
	"reflect"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
)

// A node writes one condition of its pods. What else a pod's status has, now or in a later release, is the kubelet's:
// resourceClaimStatuses, for instance, give a node the claims that are named there.
func TestANodeWritesNothingElseOfAPodsStatus(t *testing.T) {
	t.Parallel()
	objects := render(t, "readinessGate.enabled=true")
	policy := as[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy landfall-node-pods")
	var rules strings.Builder
	for _, v := range policy.Spec.Validations {
		rules.WriteString(v.Expression + " ")
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[corev1.PodStatus]()) {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		rule := "object.status.?" + name + " == oldObject.status.?" + name + " "
		if name != "conditions" && !strings.Contains(rules.String(), rule) {
			t.Errorf("a node may change status.%s of its pods", name)
		}
	}
}
