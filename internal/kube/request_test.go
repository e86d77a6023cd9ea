package kube

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestRequestsOfServices(t *testing.T) {
	for name, test := range map[string]struct {
		annotations map[string]string
		field       string
		metallb     bool
		want        lb.Request
	}{
		"nothing": {nil, "", true, lb.Request{}},
		"own": {map[string]string{
			"landfall.dev/loadBalancerIPs": "192.0.2.1, 2001:db8::1", "landfall.dev/address-pool": "p",
			"landfall.dev/allow-shared-ip":      "k",
			"landfall.dev/addresses-per-family": "2", "landfall.dev/ip-mode": "Proxy", "landfall.dev/when-outside": "move",
		}, "192.0.2.1", true, lb.Request{
			Addresses: []string{"192.0.2.1", "2001:db8::1"}, Pool: "p", Share: "k", Selector: "app=x", PerFamily: "2",
			Mode: "Proxy", WhenOutside: "move",
		}},
		"MetalLB's": {map[string]string{"metallb.io/loadBalancerIPs": "192.0.2.1",
			"metallb.universe.tf/address-pool": "p"}, "", true, lb.Request{Addresses: []string{"192.0.2.1"}, Pool: "p"}},
		"MetalLB's, off": {map[string]string{"metallb.io/loadBalancerIPs": "192.0.2.1",
			"metallb.universe.tf/address-pool": "p"}, "192.0.2.9", false, lb.Request{Addresses: []string{"192.0.2.9"}}},
		"own beside MetalLB's": {map[string]string{"metallb.io/address-pool": "theirs", "landfall.dev/address-pool": "ours"},
			"", true, lb.Request{Pool: "ours",
				Disagreement: `annotation landfall.dev/address-pool is "ours" and annotation metallb.io/address-pool is "theirs"`}},
		"own beside MetalLB's, off": {map[string]string{"metallb.io/address-pool": "theirs",
			"landfall.dev/address-pool": "ours"}, "", false, lb.Request{Pool: "ours"}},
		"both of MetalLB's": {map[string]string{"metallb.io/allow-shared-ip": "a",
			"metallb.universe.tf/allow-shared-ip": "b"},
			"", true, lb.Request{Share: "a", Selector: "app=x",
				Disagreement: `annotation metallb.io/allow-shared-ip is "a" and annotation metallb.universe.tf/allow-shared-ip is "b"`}},
		"the same twice, spelled otherwise": {map[string]string{"metallb.io/loadBalancerIPs": "2001:db8:0::1,192.0.2.1",
			"landfall.dev/loadBalancerIPs": "192.0.2.1, 2001:db8::1"}, "2001:DB8::1", true,
			lb.Request{Addresses: []string{"192.0.2.1", "2001:db8::1"}}},
		"field and annotation": {map[string]string{"landfall.dev/loadBalancerIPs": "192.0.2.1"}, "192.0.2.9", true,
			lb.Request{Addresses: []string{"192.0.2.1"},
				Disagreement: `spec.loadBalancerIP is "192.0.2.9" and annotation landfall.dev/loadBalancerIPs is "192.0.2.1"`}},
		"field and MetalLB's annotation": {map[string]string{"metallb.universe.tf/loadBalancerIPs": "x"}, "192.0.2.9", true,
			lb.Request{Addresses: []string{"x"},
				Disagreement: `spec.loadBalancerIP is "192.0.2.9" and annotation metallb.universe.tf/loadBalancerIPs is "x"`}},
	} {
		_, s := convertRequestingService(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Annotations: test.annotations},
			Spec:       corev1.ServiceSpec{LoadBalancerIP: test.field, Selector: map[string]string{"app": "x"}},
		}, test.metallb)
		if diff := cmp.Diff(test.want, s.Request); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// FuzzRequest checks that whatever annotations and fields hold is read, in words that are short.
func FuzzRequest(f *testing.F) {
	f.Add("192.0.2.1, 2001:db8::1", "192.0.2.1", "192.0.2.1", "p", "60s")
	f.Add(",", ",,", ",", "", "99999999999999h")
	f.Add("\x00", "::ffff:192.0.2.1", "fe80::1%eth0", "\xff", "forever")
	f.Fuzz(func(t *testing.T, ours, theirs, field, pool, quarantine string) {
		key, s := convertRequestingService(&corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{
				"landfall.dev/loadBalancerIPs": ours, "metallb.io/loadBalancerIPs": theirs,
				"metallb.universe.tf/address-pool": pool, lb.AnnotationAnnouncements: ours,
			}},
			Spec: corev1.ServiceSpec{LoadBalancerIP: field, LoadBalancerSourceRanges: []string{ours, theirs},
				ExternalIPs: []string{ours}},
		}, true)
		if key.Name != "a" || len(s.Request.Disagreement) > 1000 {
			t.Errorf("%s: %d bytes of disagreement", key, len(s.Request.Disagreement))
		}
		for _, addr := range s.ExternalIPs {
			if !addr.IsValid() || addr.Zone() != "" {
				t.Errorf("external IP %q of %q", addr, ours)
			}
		}
		if got, invalid := sourceRanges([]string{ours, theirs}); len(got) == 0 || len(invalid) > 400 {
			t.Errorf("source ranges %q and %q admit everybody", ours, theirs)
		}
	})
}

// FuzzParseQuarantine checks that only the word forever keeps addresses forever.
func FuzzParseQuarantine(f *testing.F) {
	for _, seed := range []string{"", "60s", "24h", "0s", "forever", "Forever", "-1ns", "-5m", "99999999999999h",
		"1.5h", "60"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, written string) {
		d, err := parseQuarantine(written)
		if err != nil {
			if d != 0 {
				t.Errorf("%q is refused, and means %v", written, d)
			}
			return
		}
		if forever := d < 0; forever != (written == "forever") {
			t.Errorf("%q means %v", written, d)
		}
		if again, err := parseQuarantine(d.String()); d >= 0 && (err != nil || again != d) {
			t.Errorf("%q means %v, which is read back as %v: %v", written, d, again, err)
		}
	})
}

// TestStatusWriter finds the program beside Landfall's controller that wrote addresses last.
func TestStatusWriter(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	managed := func(manager, subresource, fields string, ago time.Duration) metav1.ManagedFieldsEntry {
		at := metav1.NewTime(now.Add(-ago))
		return metav1.ManagedFieldsEntry{Manager: manager, Subresource: subresource, Time: &at,
			FieldsV1: &metav1.FieldsV1{Raw: []byte(fields)}}
	}
	const addresses = `{"f:status":{"f:loadBalancer":{"f:ingress":{}}}}`
	ours := managed("landfall-controller", "status", addresses, 0)
	for what, c := range map[string]struct {
		managed []metav1.ManagedFieldsEntry
		want    string
	}{
		"nobody": {}, "Landfall": {managed: []metav1.ManagedFieldsEntry{ours}},
		"another": {[]metav1.ManagedFieldsEntry{ours, managed("k3s", "status", addresses, time.Hour)}, "k3s"},
		"two others": {[]metav1.ManagedFieldsEntry{managed("old", "status", addresses, time.Hour),
			managed("new", "status", addresses, time.Minute), managed("older", "status", addresses, 2*time.Hour)}, "new"},
		"other fields": {managed: []metav1.ManagedFieldsEntry{managed("kubectl", "", `{"f:spec":{"f:loadBalancerIP":{}}}`, 0),
			managed("landfall-speaker", "status", `{"f:status":{"f:conditions":{}}}`, 0),
			{Manager: "x", Subresource: "status"}}},
	} {
		_, s := convertRequestingService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{ManagedFields: c.managed},
			Status: corev1.ServiceStatus{LoadBalancer: corev1.LoadBalancerStatus{
				Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.1"}}}}}, false)
		if s.StatusWriter != c.want {
			t.Errorf("%s: %q, want %q", what, s.StatusWriter, c.want)
		}
	}
}
