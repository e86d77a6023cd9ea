package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestHoldSetsFinalizerAndPool checks that the finalizer and the annotation with the pool come and
// go with the addresses, by the same write, and that what others have set stays.
func TestHoldSetsFinalizerAndPool(t *testing.T) {
	one := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	assigned := &lb.Condition{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned}
	theirs := map[string]string{"example.com/theirs": "theirs"}
	with := func(pairs ...string) map[string]string {
		all := map[string]string{"example.com/theirs": "theirs"}
		for i := 0; i < len(pairs); i += 2 {
			all[pairs[i]] = pairs[i+1]
		}
		return all
	}
	for name, test := range map[string]struct {
		finalizers  []string
		annotations map[string]string
		holding     Holding
		want        []string
		wantNotes   map[string]string
	}{
		"assigned": {[]string{"theirs"}, theirs,
			Holding{Addresses: one, Condition: assigned, Pool: "p", Finalizer: FinalizerSet},
			[]string{"theirs", lb.FinalizerCleanup}, with(lb.AnnotationAllocatedFrom, "p")},
		"from MetalLB": {nil, with(lb.AnnotationAllocatedFromOld, "q"),
			Holding{Addresses: one, Condition: assigned, Pool: "p", Finalizer: FinalizerSet},
			[]string{lb.FinalizerCleanup}, with(lb.AnnotationAllocatedFrom, "p", lb.AnnotationAllocatedFromOld, "p")},
		"without the annotation": {nil, theirs, Holding{Addresses: one, Condition: assigned, Finalizer: FinalizerSet},
			[]string{lb.FinalizerCleanup}, theirs},
		"the address goes": {[]string{"theirs", lb.FinalizerCleanup}, with(lb.AnnotationAllocatedFrom, "p"),
			Holding{Finalizer: FinalizerRemoved}, []string{"theirs"}, theirs},
		"deleted": {[]string{lb.FinalizerCleanup, "theirs"}, with(lb.AnnotationAllocatedFrom, "p"),
			Holding{Addresses: one, Condition: assigned, Finalizer: FinalizerRemoved}, []string{"theirs"},
			with(lb.AnnotationAllocatedFrom, "p")},
		"others' finalizer": {[]string{lb.FinalizerCleanup}, theirs, Holding{}, []string{lb.FinalizerCleanup}, theirs},
	} {
		t.Run(name, func(t *testing.T) {
			o := testService()
			o.Finalizers, o.Annotations = test.finalizers, test.annotations
			status, get := newStatus(t, o)
			_, service := convertRequestingService(o, false)
			if err := status.Hold(t.Context(), service, test.holding); err != nil {
				t.Fatal(err)
			}
			got, writes := get()
			slices.Sort(got.Finalizers)
			slices.Sort(test.want)
			if diff := cmp.Diff(test.want, got.Finalizers); diff != "" || writes != 1 {
				t.Errorf("after %d writes, finalizers (-want +got):\n%s", writes, diff)
			}
			if diff := cmp.Diff(test.wantNotes, got.Annotations); diff != "" {
				t.Errorf("annotations (-want +got):\n%s", diff)
			}
			if _, service = convertRequestingService(got, false); !test.holding.Shows(service) {
				t.Error("not shown after it was written")
			}
		})
	}
}

// TestHeadlessAndDeletedServicesHaveNoVIPs has all programs that announce agree on who is down.
func TestHeadlessAndDeletedServicesHaveNoVIPs(t *testing.T) {
	o := testService()
	o.Spec.Type = corev1.ServiceTypeLoadBalancer
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "10.0.0.1"}}
	vips := func() [2]int {
		_, speaker := convertLabelledService(o)
		_, controller := convertRequestingService(o, true)
		return [2]int{len(speaker.VIPs()), len(controller.VIPs())}
	}
	if got := vips(); got != [2]int{1, 1} {
		t.Errorf("%d VIPs", got)
	}
	o.Labels = map[string]string{lb.LabelHeadless: ""}
	if got := vips(); got != [2]int{} {
		t.Errorf("with the label: %d VIPs", got)
	}
	o.Labels, o.DeletionTimestamp = nil, &metav1.Time{}
	if got := vips(); got != [2]int{} {
		t.Errorf("deleted: %d VIPs", got)
	}
}

// TestTakeBack leaves of a Service what others wrote, and its addresses with the word on who
// assigned them, unless they are to go too.
func TestTakeBack(t *testing.T) {
	for _, addresses := range []bool{false, true} {
		o := testService()
		o.Finalizers = []string{"theirs", lb.FinalizerCleanup}
		o.Annotations = map[string]string{"example.com/theirs": "theirs", lb.AnnotationAnnouncements: "data",
			lb.AnnotationAllocatedFrom: "p"}
		status, get := newStatus(t, o)
		var found []lb.Service
		if err := status.EachService(t.Context(), func(s lb.Service) { found = append(found, s) }); err != nil {
			t.Fatal(err)
		}
		if len(found) != 1 {
			t.Fatalf("listed %d Services", len(found))
		}
		if err := status.TakeBack(t.Context(), found[0], true, addresses); err != nil {
			t.Fatal(err)
		}
		want, ingress := map[string]string{"example.com/theirs": "theirs"}, 0
		if !addresses {
			want[lb.AnnotationAllocatedFrom], ingress = "p", len(o.Status.LoadBalancer.Ingress)
		}
		got, _ := get()
		if diff := cmp.Diff(want, got.Annotations); diff != "" {
			t.Errorf("annotations (-want +got):\n%s", diff)
		}
		for _, c := range got.Status.Conditions {
			if strings.HasPrefix(c.Type, lb.DriverName) {
				t.Errorf("left: %v", c)
			}
		}
		if !slices.Equal(got.Finalizers, []string{"theirs"}) || len(got.Status.LoadBalancer.Ingress) != ingress ||
			len(got.Status.Conditions) == 0 {
			t.Errorf("finalizers %v, addresses %v, conditions %v", got.Finalizers, got.Status.LoadBalancer.Ingress,
				got.Status.Conditions)
		}
	}
}

// TestIntrudingServicesAreSeenByProxies before the controller has said anything.
func TestIntrudingServicesAreSeenByProxies(t *testing.T) {
	o := testService()
	o.Spec.Ports = []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}}
	o.Status.Conditions = []metav1.Condition{{Type: lb.ConditionAssigned, Status: metav1.ConditionTrue,
		Reason: string(lb.ReasonAssigned), Message: `10.0.0.1 from pool p (shared by key "k" on 80/TCP)`}}
	for port, want := range map[int32]lb.Intrusion{80: lb.IntrudesNot, 81: lb.Changed} {
		o.Spec.Ports[0].Port = port
		if _, s := convertForwardedService(o); s.Intruding != want {
			t.Errorf("port %d: intruding %v", port, s.Intruding)
		}
	}
}

// TestProbesAreRead by proxies and speakers; what cannot be read keeps nothing from being served.
func TestProbesAreRead(t *testing.T) {
	for text, want := range map[string]string{"": "", "tcp": "tcp", "http:/healthz": "http:/healthz", "icmp": ""} {
		o := testService()
		o.Annotations = map[string]string{lb.AnnotationProbe: text}
		_, forwarded := convertForwardedService(o)
		_, labelled := convertLabelledService(o)
		for _, s := range []lb.Service{forwarded, labelled, convertWholeService(o)} {
			if s.Probe.String() != want || (s.InvalidProbe == "") != (text == want) || len(s.Ingress) == 0 {
				t.Errorf("%q: read %q, invalid %q", text, s.Probe, s.InvalidProbe)
			}
		}
	}
}

// Blanks at the ends of an annotation, which YAML shows to nobody, do not count.
func TestBlanksAroundAnnotations(t *testing.T) {
	o := testService()
	o.Annotations = map[string]string{lb.AnnotationRelay: "true ", lb.AnnotationRelayProxyProtocol: " v2\n",
		lb.AnnotationScheduler: "mh\t", lb.AnnotationFailover: " ", lb.AnnotationForwarding: " direct"}
	_, s := convertForwardedService(o)
	got := []string{s.Relay, s.RelayProxyProtocol, s.Scheduler, s.Failover, s.Forwarding}
	if want := []string{"true", "v2", "mh", "", "direct"}; !slices.Equal(got, want) {
		t.Errorf("read %q, want %q", got, want)
	}
}

// TestContract11StatusesAreReadToALimit, by every program, and written anew by the controller.
func TestContract11StatusesAreReadToALimit(t *testing.T) {
	o := testService()
	_, s := convertForwardedService(o)
	if s.Intruding != lb.IntrudesNot || s.Unread != 0 {
		t.Errorf("as the controller wrote it: %+v", s)
	}
	shown := o.Status.LoadBalancer.Ingress[0]
	o.Status.LoadBalancer.Ingress = nil
	for n := range 255 {
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: fmt.Sprintf("10.9.9.%d", n)})
	}
	o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, shown)
	_, forwarded := convertForwardedService(o)
	_, labelled := convertLabelledService(o)
	_, requesting := convertRequestingService(o, true)
	if forwarded.Intruding != lb.Unconfirmed {
		t.Error("proxies take it for confirmed")
	}
	for _, s := range []lb.Service{forwarded, labelled, requesting} {
		if len(s.Ingress) != lb.MaxAddresses || s.Unread != 256-lb.MaxAddresses ||
			s.Ingress[lb.MaxAddresses-1].Addr.String() != "10.0.0.1" {
			t.Errorf("read %v, and %d not", s.Ingress, s.Unread)
		}
	}
	h := Holding{Condition: &lb.Condition{Type: lb.ConditionAssigned, Status: true, Reason: "Assigned",
		Message: "10.0.0.1 from pool p"}}
	for _, in := range requesting.Ingress {
		h.Addresses = append(h.Addresses, in.Addr)
	}
	if h.Shows(requesting) {
		t.Error("there is nothing to write although the status shows more")
	}
}

// TestHostnamesInAStatusAreCounted, and who wrote them is known.
func TestHostnamesInAStatusAreCounted(t *testing.T) {
	o := testService()
	o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{Hostname: "lb.example.com"}}
	o.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "theirs", Subresource: "status",
		FieldsV1: &metav1.FieldsV1{Raw: []byte(`{"f:status":{"f:loadBalancer":{"f:ingress":{}}}}`)}}}
	if _, s := convertRequestingService(o, false); s.Hostnames != 1 || len(s.Ingress) != 0 || s.StatusWriter != "theirs" {
		t.Errorf("read %d hostnames and %v, written by %q", s.Hostnames, s.Ingress, s.StatusWriter)
	}
}
