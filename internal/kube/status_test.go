package kube

import (
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

var (
	before = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	now    = before.Add(time.Hour)
)

// testService shows an address in a mode of its own, a condition of ours and one of somebody else.
func testService() *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "uid-1", ResourceVersion: "7"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer},
		Status: corev1.ServiceStatus{
			LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
				{IP: "10.0.0.1", IPMode: new(corev1.LoadBalancerIPModeProxy)},
			}},
			Conditions: []metav1.Condition{
				{Type: "example.com/Theirs", Status: metav1.ConditionTrue, Reason: "Theirs",
					LastTransitionTime: metav1.NewTime(before)},
				{Type: lb.ConditionAssigned, Status: metav1.ConditionTrue, Reason: "Assigned", Message: "10.0.0.1 from pool p",
					LastTransitionTime: metav1.NewTime(before)},
			},
		},
	}
}

// newStatus returns a writer on a fake API server that holds o, and a function that returns what it
// holds and how many patches came.
func newStatus(t *testing.T, o *corev1.Service) (*Status, func() (*corev1.Service, int)) {
	core := fake.NewClientset(o)
	return &Status{core: fakeKinds{core}, now: func() time.Time { return now }}, func() (*corev1.Service, int) {
		t.Helper()
		got, err := core.CoreV1().Services(o.Namespace).Get(t.Context(), o.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, action := range core.Actions() {
			if action.GetVerb() == "patch" {
				n++
				if action.GetSubresource() != "status" {
					t.Errorf("patched %q, want the status", action.GetSubresource())
				}
			}
		}
		return got, n
	}
}

func TestAnnouncedTouchesNothingElse(t *testing.T) {
	o := testService()
	o.Annotations = map[string]string{"example.com/theirs": "theirs"}
	status, get := newStatus(t, o)
	_, service := convertLabelledService(o)
	said := func(is bool, reason lb.Reason, message, data string) lb.AnnouncedStatus {
		return lb.AnnouncedStatus{Announcements: data,
			Condition: lb.Condition{Type: lb.ConditionAnnounced, Status: is, Reason: reason, Message: message}}
	}
	first := said(true, lb.ReasonAnnounced, "10.0.0.1 is announced from a", "data a")
	later := now.Add(time.Hour)
	for i, step := range []struct {
		status lb.AnnouncedStatus
		at     time.Time // of the last transition
		wrote  bool
	}{
		{first, now, true},
		{first, now, false},
		// another message is no transition
		{said(true, lb.ReasonAnnounced, "10.0.0.1 is announced from b", "data b"), now, true},
		{said(true, lb.ReasonAnnounced, "10.0.0.1 is announced from b", "data c"), now, true},
		{said(false, lb.ReasonNoOwner, "nobody", ""), later, true},
	} {
		if wrote, err := status.Announced(t.Context(), service, step.status); err != nil || wrote != step.wrote {
			t.Fatalf("step %d: wrote %v, %v", i, wrote, err)
		}
		got, _ := get()
		want := o.DeepCopy()
		for _, c := range []lb.Condition{step.status.Condition, lb.Serving(step.status.Condition)} {
			want.Status.Conditions = append(want.Status.Conditions, metav1.Condition{Type: c.Type,
				Status: conditionStatus(c.Status), Reason: string(c.Reason), Message: c.Message,
				LastTransitionTime: metav1.NewTime(step.at)})
		}
		if step.status.Announcements != "" {
			want.Annotations[lb.AnnotationAnnouncements] = step.status.Announcements
		}
		if diff := cmp.Diff(byType(want.Status.Conditions), byType(got.Status.Conditions)); diff != "" {
			t.Errorf("step %d: conditions (-want +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(want.Status.LoadBalancer, got.Status.LoadBalancer); diff != "" {
			t.Errorf("step %d: addresses (-want +got):\n%s", i, diff)
		}
		if diff := cmp.Diff(want.Annotations, got.Annotations); diff != "" {
			t.Errorf("step %d: annotations (-want +got):\n%s", i, diff)
		}
		_, service = convertLabelledService(got)
		status.now = func() time.Time { return later }
	}
}

// TestHoldWithoutAddressesRemovesAnnouncements checks that a Service which loses its last address
// says no more who announces it, by the same write.
func TestHoldWithoutAddressesRemovesAnnouncements(t *testing.T) {
	o := testService()
	o.Annotations = map[string]string{"example.com/theirs": "theirs", lb.AnnotationAnnouncements: "data"}
	waits := lb.Condition{Type: lb.ConditionAssigned, Reason: lb.ReasonPoolExhausted}
	for _, holding := range []Holding{{}, {Condition: &waits}} {
		status, get := newStatus(t, o)
		_, service := convertRequestingService(o, false)
		if err := status.Hold(t.Context(), service, holding); err != nil {
			t.Fatal(err)
		}
		got, writes := get()
		if diff := cmp.Diff(map[string]string{"example.com/theirs": "theirs"}, got.Annotations); diff != "" || writes != 1 {
			t.Errorf("after %d writes, annotations (-want +got):\n%s", writes, diff)
		}
		// Where only the annotation is left, there is something to write.
		_, service = convertRequestingService(got, false)
		if !holding.Shows(service) {
			t.Error("not shown after it was written")
		}
		if service.Announcements = "left"; holding.Shows(service) {
			t.Error("an annotation that is left is not seen")
		}
	}
}

// TestList writes a condition beside those of others, whatever has changed since the Service was read, and
// reads it as proxies and the controller do. What decides about addresses leaves it alone.
func TestList(t *testing.T) {
	want := lb.Listing{"198.51.100.1": 1000, "80/TCP": 2000}
	status, get := newStatus(t, testService())
	_, service := convertRequestingService(testService(), false)
	before := len(testService().Status.Conditions)
	service.Version = "older"
	if err := status.List(t.Context(), service, want); err != nil {
		t.Fatal(err)
	}
	got, _ := get()
	_, read := convertRequestingService(got, false)
	_, forwarded := convertForwardedService(got)
	if !maps.Equal(read.Listed, want) || !maps.Equal(forwarded.Listed, want) || len(got.Status.Conditions) != before+1 {
		t.Errorf("read %v and %v of %v", read.Listed, forwarded.Listed, got.Status.Conditions)
	}
	if condition := byType(got.Status.Conditions)[lb.ConditionExternalIPs]; condition.LastTransitionTime.IsZero() ||
		condition.Reason != string(lb.ReasonListed) {
		t.Errorf("wrote %+v", condition)
	}
	if err := status.Hold(t.Context(), read, Holding{}); err != nil {
		t.Fatal(err)
	}
	got, _ = get()
	if _, read = convertRequestingService(got, false); !maps.Equal(read.Listed, want) || len(read.Conditions) != 0 {
		t.Errorf("an assignment left %v and %v", read.Listed, read.Conditions)
	}
	if err := status.TakeBack(t.Context(), read, false, false); err != nil {
		t.Fatal(err)
	}
	got, _ = get()
	if _, read = convertRequestingService(got, false); read.Listed != nil {
		t.Errorf("a cleanup left %v", read.Listed)
	}
	read.Listed = want
	if err := status.List(t.Context(), read, nil); err != nil {
		t.Error(err)
	}
	// An API server refuses a condition without a time, which one that was there when it was read would have kept.
	if err := status.List(t.Context(), read, want); err != nil {
		t.Error(err)
	}
	got, _ = get()
	if condition := byType(got.Status.Conditions)[lb.ConditionExternalIPs]; condition.LastTransitionTime.IsZero() {
		t.Errorf("after somebody removed it, wrote %+v", condition)
	}
}

// TestAsRequested writes the condition that nodes share, and reads it as proxies and the controller do. What decides
// about addresses leaves it alone.
func TestAsRequested(t *testing.T) {
	want := lb.Condition{Type: lb.ConditionAsRequested, Reason: lb.ReasonSchedulerIgnored, Message: "node-1: random"}
	status, get := newStatus(t, testService())
	_, service := convertForwardedService(testService())
	before := len(testService().Status.Conditions)
	if err := status.AsRequested(t.Context(), service, want); err != nil {
		t.Fatal(err)
	}
	got, _ := get()
	_, read := convertRequestingService(got, false)
	_, forwarded := convertForwardedService(got)
	if read.AsRequested != want || forwarded.AsRequested != want || convertWholeService(got).AsRequested != want ||
		len(got.Status.Conditions) != before+1 {
		t.Errorf("read %v and %v of %v", read.AsRequested, forwarded.AsRequested, got.Status.Conditions)
	}
	since := byType(got.Status.Conditions)[lb.ConditionAsRequested].LastTransitionTime
	want.Message = "node-1: random, as before"
	if err := status.AsRequested(t.Context(), forwarded, want); err != nil {
		t.Fatal(err)
	}
	got, _ = get()
	if c := byType(got.Status.Conditions)[lb.ConditionAsRequested]; c.Message != want.Message || since.IsZero() ||
		!c.LastTransitionTime.Equal(&since) {
		t.Errorf("wrote %+v", c)
	}
	if err := status.Hold(t.Context(), read, Holding{}); err != nil {
		t.Fatal(err)
	}
	got, _ = get()
	if _, read = convertRequestingService(got, false); read.AsRequested != want || len(read.Conditions) != 0 {
		t.Errorf("an assignment left %v and %v", read.AsRequested, read.Conditions)
	}
	if err := status.AsRequested(t.Context(), read, lb.Condition{}); err != nil {
		t.Fatal(err)
	}
	if got, _ = get(); byType(got.Status.Conditions)[lb.ConditionAsRequested].Type != "" {
		t.Errorf("left %v", got.Status.Conditions)
	}
	if err := status.AsRequested(t.Context(), lb.Service{Key: read.Key, UID: read.UID}, want); err != nil {
		t.Fatal(err)
	}
	got, _ = get()
	_, read = convertRequestingService(got, false)
	if err := status.TakeBack(t.Context(), read, false, false); err != nil {
		t.Fatal(err)
	}
	got, _ = get()
	if _, read = convertRequestingService(got, false); read.AsRequested.Type != "" {
		t.Errorf("a cleanup left %v", read.AsRequested)
	}
}

// TestContract8CreatedAnew tells a patch of a Service that is gone, and whose name another one has, from one that
// the API server refuses for what would come of it.
func TestContract8CreatedAnew(t *testing.T) {
	_, service := convertRequestingService(testService(), false)
	for _, name := range []string{"uid", "annotations"} {
		core := fake.NewClientset(testService())
		core.PrependReactor("patch", "services", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, "web", field.ErrorList{
				field.Invalid(field.NewPath("metadata", name), "uid-1", validation.FieldImmutableErrorMsg)})
		})
		status := &Status{core: fakeKinds{core}, now: time.Now}
		for _, err := range []error{status.List(t.Context(), service, lb.Listing{"80/TCP": 1}),
			status.TakeBack(t.Context(), service, false, false)} {
			if gone := name == "uid"; IsNotFound(err) != gone || IsUnwritable(err) == gone || IsConflict(err) {
				t.Errorf("%s: gone %v, unwritable %v: %v", name, IsNotFound(err), IsUnwritable(err), err)
			}
		}
	}
}

// TestContract11Admission tells what admission refused from all else that may go wrong with a write, in the words of
// the API server: a webhook answers with whatever code, reason and causes it likes.
func TestContract11Admission(t *testing.T) {
	_, service := convertRequestingService(testService(), false)
	answer := func(code int32, reason metav1.StatusReason, message string, causes ...metav1.StatusCause) error {
		return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason,
			Message: message, Details: &metav1.StatusDetails{Causes: causes}}}
	}
	const denied = `admission webhook "no.example.com" denied the request`
	services := schema.GroupResource{Resource: "services"}
	for name, test := range map[string]struct {
		err        error
		unwritable bool
	}{
		"without a reason": {answer(400, "", denied+" without explanation"), true},
		"forbidden":        {answer(403, metav1.StatusReasonForbidden, denied+": not here"), true},
		"a code alone":     {answer(403, "", denied+": not here"), true},
		"as a conflict":    {answer(409, metav1.StatusReasonConflict, denied+": not now"), true},
		"as not found":     {answer(404, metav1.StatusReasonNotFound, denied+": what?"), true},
		"as created anew": {answer(422, metav1.StatusReasonInvalid, denied+": immutable",
			metav1.StatusCause{Field: "metadata.uid"}), true},
		"a webhook is out of reach": {apierrors.NewInternalError(errors.New(`failed calling webhook "no.example.com": ` +
			`failed to call webhook: Post "https://no.default.svc:443/?timeout=10s": dial tcp: connection refused`)), true},
		"a policy": {apierrors.NewForbidden(services, "web",
			errors.New("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no")), true},
		"a role is missing": {apierrors.NewForbidden(services, "web",
			errors.New(`User "landfall" cannot patch resource "services/status" in API group ""`)), false},
		"an error of the API server": {apierrors.NewInternalError(errors.New("etcdserver: leader changed")), false},
		"a connection":               {errors.New("failed calling webhook: connection refused"), false},
	} {
		core := fake.NewClientset(testService())
		core.PrependReactor("patch", "services",
			func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, test.err })
		err := (&Status{core: fakeKinds{core}, now: time.Now}).List(t.Context(), service, lb.Listing{"80/TCP": 1})
		if IsUnwritable(err) != test.unwritable || IsNotFound(err) || IsConflict(err) {
			t.Errorf("%s: unwritable %v, gone %v, conflict %v: %v", name, IsUnwritable(err), IsNotFound(err),
				IsConflict(err), err)
		}
	}
}

func byType(conditions []metav1.Condition) map[string]metav1.Condition {
	all := map[string]metav1.Condition{}
	for _, c := range conditions {
		c.LastTransitionTime = metav1.NewTime(c.LastTransitionTime.UTC())
		all[c.Type] = c
	}
	return all
}

func TestHold(t *testing.T) {
	assigned := lb.Condition{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned, Message: "two"}
	addrs := func(s ...string) (addrs []netip.Addr) {
		for _, a := range s {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		return addrs
	}
	for name, test := range map[string]struct {
		holding    Holding
		ingress    []corev1.LoadBalancerIngress
		conditions []string
	}{
		"another address": {
			Holding{Addresses: addrs("10.0.0.1", "fd00::1"), Condition: &assigned},
			[]corev1.LoadBalancerIngress{{IP: "10.0.0.1", IPMode: new(corev1.LoadBalancerIPModeProxy)}, {IP: "fd00::1"}},
			[]string{"example.com/Theirs=Theirs", "landfall.dev/Assigned=Assigned"},
		},
		"a refusal": {
			Holding{Addresses: addrs("10.0.0.1"), Condition: &lb.Condition{Type: lb.ConditionAssigned,
				Reason: lb.ReasonDuplicate}},
			[]corev1.LoadBalancerIngress{{IP: "10.0.0.1", IPMode: new(corev1.LoadBalancerIPModeProxy)}},
			[]string{"example.com/Theirs=Theirs", "landfall.dev/Assigned=Duplicate"},
		},
		"nothing of ours": {Holding{}, nil, []string{"example.com/Theirs=Theirs"}},
	} {
		t.Run(name, func(t *testing.T) {
			status, get := newStatus(t, testService())
			_, service := convertLabelledService(testService())
			if test.holding.Shows(service) {
				t.Error("shown already?")
			}
			if err := status.Hold(t.Context(), service, test.holding); err != nil {
				t.Fatal(err)
			}
			got, _ := get()
			if diff := cmp.Diff(test.ingress, got.Status.LoadBalancer.Ingress); diff != "" {
				t.Errorf("addresses (-want +got):\n%s", diff)
			}
			var conditions []string
			for _, c := range got.Status.Conditions {
				conditions = append(conditions, c.Type+"="+c.Reason)
			}
			if diff := cmp.Diff(test.conditions, conditions); diff != "" {
				t.Errorf("conditions (-want +got):\n%s", diff)
			}
			if _, service := convertLabelledService(got); !test.holding.Shows(service) {
				t.Errorf("not shown after it was written: %+v", service)
			}
		})
	}
}

// TestContract8HoldNamesTheVersion keeps a second controller, or a lagging watch, from overwriting
// what it has not seen.
func TestContract8HoldNamesTheVersion(t *testing.T) {
	_, service := convertLabelledService(testService())
	var metadata struct {
		Metadata struct{ UID, ResourceVersion string }
	}
	core := fake.NewClientset(testService())
	core.PrependReactor("patch", "services", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if err := json.Unmarshal(action.(clienttesting.PatchAction).GetPatch(), &metadata); err != nil {
			t.Error(err)
		}
		return true, nil, apierrors.NewConflict(corev1.Resource("services"), "web", nil)
	})
	status := &Status{core: fakeKinds{core}, now: time.Now}
	err := status.Hold(t.Context(), service, Holding{})
	if !IsConflict(err) || IsNotFound(err) {
		t.Errorf("error %v is not told as a conflict", err)
	}
	if metadata.Metadata.UID != "uid-1" || metadata.Metadata.ResourceVersion != "7" {
		t.Errorf("the patch is for %+v", metadata.Metadata)
	}
	metadata.Metadata.ResourceVersion = ""
	_, _ = status.Announced(t.Context(), service, lb.AnnouncedStatus{Condition: lb.Condition{Type: lb.ConditionAnnounced}})
	if metadata.Metadata.UID != "uid-1" || metadata.Metadata.ResourceVersion != "" {
		t.Errorf(
			"the patch of another status is for %+v; a version would make writers of different statuses fail for nothing",
			metadata.Metadata)
	}
}

// poolAPI holds one pool.
type poolAPI struct {
	t        *testing.T
	pool     v1beta1.IPAddressPool
	conflict bool
	reads    int
}

func (a *poolAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	switch r.Method + " " + r.URL.Path {
	case "GET /apis/landfall.dev/v1beta1/ipaddresspools/p":
		a.reads++
	case "PUT /apis/landfall.dev/v1beta1/ipaddresspools/p/status":
		if a.conflict {
			w.WriteHeader(http.StatusConflict)
			_ = json.NewEncoder(w).Encode(
				apierrors.NewConflict(v1beta1.GroupVersion.WithResource("ipaddresspools").GroupResource(), "p", nil).Status())
			return
		}
		if err := json.NewDecoder(r.Body).Decode(&a.pool); err != nil {
			a.t.Error(err)
		}
	default:
		http.NotFound(w, r)
		return
	}
	_ = json.NewEncoder(w).Encode(a.pool)
}

func TestPoolStatusKeepsWhatIsNotOurs(t *testing.T) {
	theirs := metav1.Condition{Type: "example.com/Theirs", Status: metav1.ConditionTrue, Reason: "Theirs",
		LastTransitionTime: metav1.NewTime(before)}
	api := &poolAPI{t: t, pool: v1beta1.IPAddressPool{
		TypeMeta:   metav1.TypeMeta{APIVersion: "landfall.dev/v1beta1", Kind: "IPAddressPool"},
		ObjectMeta: metav1.ObjectMeta{Name: "p", ResourceVersion: "7"},
		Spec:       v1beta1.IPAddressPoolSpec{Addresses: []v1beta1.AddressRange{"10.0.0.0/24"}},
		Status:     v1beta1.IPAddressPoolStatus{AssignedIPv4: "1", Conditions: []metav1.Condition{theirs}},
	}}
	server := httptest.NewServer(api)
	defer server.Close()
	client, err := landfallClient(&rest.Config{Host: server.URL}, http.DefaultClient)
	if err != nil {
		t.Fatal(err)
	}
	status := &Status{landfall: client, now: func() time.Time { return now }}
	write := lb.PoolStatus{
		AssignedIPv4: "2", AvailableIPv4: "254", AssignedIPv6: "0", AvailableIPv6: "18446744073709551616", Writer: "me",
		Pending: []lb.PendingReservation{{Service: lb.Key{Namespace: "ns", Name: "s"}, UID: "u", Version: "5",
			Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}},
		Conditions: []lb.Condition{{Type: lb.ConditionReady, Status: true, Reason: lb.ReasonPoolReady,
			Message: "hands out addresses", Generation: 3}},
	}
	read := lb.Pool{Name: "p", Version: "7"}
	if version, err := status.Pool(t.Context(), read, write); err != nil || version != "7" {
		t.Fatal(version, err)
	}
	want := v1beta1.IPAddressPoolStatus{
		AssignedIPv4: "2", AvailableIPv4: "254", AssignedIPv6: "0", AvailableIPv6: "18446744073709551616", Writer: "me",
		Claims: []v1beta1.AddressClaim{{Namespace: "ns", Name: "s", UID: "u", ResourceVersion: "5",
			Addresses: []string{"10.0.0.1"}}},
		Conditions: []metav1.Condition{theirs, {
			Type: lb.ConditionReady, Status: metav1.ConditionTrue, Reason: "Ready", Message: "hands out addresses",
			ObservedGeneration: 3,
			LastTransitionTime: metav1.NewTime(now),
		}},
	}
	got := api.pool.Status
	for i := range got.Conditions {
		got.Conditions[i].LastTransitionTime = metav1.NewTime(got.Conditions[i].LastTransitionTime.UTC())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if api.pool.ResourceVersion != "7" {
		t.Errorf("written on version %q", api.pool.ResourceVersion)
	}
	_, pool := convertPool(&api.pool)
	write.Conditions = append([]lb.Condition{{Type: theirs.Type, Status: true, Reason: "Theirs"}}, write.Conditions...)
	if diff := cmp.Diff(write, pool.Status, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
	if _, err := status.Pool(t.Context(), lb.Pool{Name: "q", Version: "7"}, write); !IsNotFound(err) {
		t.Errorf("a pool that is gone: %v", err)
	}
	if _, err := status.Pool(t.Context(), lb.Pool{Name: "p", Version: "6"}, write); !IsConflict(err) {
		t.Errorf("a pool that was read earlier: %v", err)
	}
	api.conflict = true
	if _, err := status.Pool(t.Context(), read, write); !IsConflict(err) {
		t.Errorf("a pool that has changed: %v", err)
	}
}

// A pool is not read before a write on the version that the last write has made. If it has changed all the same, the
// next write reads it, and an older one is told from a newer one.
func TestPoolStatusIsReadOnce(t *testing.T) {
	api := &poolAPI{t: t, pool: v1beta1.IPAddressPool{
		TypeMeta:   metav1.TypeMeta{APIVersion: "landfall.dev/v1beta1", Kind: "IPAddressPool"},
		ObjectMeta: metav1.ObjectMeta{Name: "p", ResourceVersion: "7"}}}
	server := httptest.NewServer(api)
	defer server.Close()
	client, err := landfallClient(&rest.Config{Host: server.URL}, http.DefaultClient)
	if err != nil {
		t.Fatal(err)
	}
	status := &Status{landfall: client, now: time.Now}
	write := func(reads int) error {
		t.Helper()
		api.reads = 0
		_, err := status.Pool(t.Context(), lb.Pool{Name: "p", Version: "7"}, lb.PoolStatus{Writer: "me"})
		if api.reads != reads {
			t.Errorf("%d reads, want %d", api.reads, reads)
		}
		return err
	}
	for _, reads := range []int{1, 0, 0} {
		if err := write(reads); err != nil {
			t.Fatal(err)
		}
	}
	api.conflict, api.pool.ResourceVersion = true, "8"
	if err := write(1); !IsConflict(err) || errors.Is(err, ErrWentBack) {
		t.Errorf("a newer pool: %v", err)
	}
	api.conflict, api.pool.ResourceVersion = false, "7"
	for reads := 1; reads >= 0; reads-- {
		if err := write(reads); err != nil {
			t.Fatal(err)
		}
	}
	api.conflict, api.pool.ResourceVersion = true, "6"
	if err := write(1); !errors.Is(err, ErrWentBack) {
		t.Errorf("an older pool: %v", err)
	}
}
