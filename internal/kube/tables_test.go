package kube

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

func slice(name, service string, addrs ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(80))}},
	}
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
	}
	return s
}

func TestSlicesAreGroupedByService(t *testing.T) {
	var changed []string
	store := newSliceStore(lb.MaxSlices, func(k lb.Key) { changed = append(changed, k.Name) })
	table := store.table
	check := func(step, service string, want []string, changes ...string) {
		t.Helper()
		var got []string
		of, _ := table.Get(lb.Key{Namespace: "default", Name: service})
		for _, s := range of {
			got = append(got, s.Key.Name)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: slices of %s (-want +got):\n%s", step, service, diff)
		}
		if diff := cmp.Diff(changes, changed); diff != "" {
			t.Errorf("%s: changes (-want +got):\n%s", step, diff)
		}
		changed = nil
	}
	store.Replace([]any{slice("a-2", "a", "10.0.0.2"), slice("a-1", "a", "10.0.0.1")}, "1")
	check("list", "a", []string{"a-1", "a-2"}, "a")
	store.Update(slice("a-1", "a", "10.0.0.1"))
	check("no change", "a", []string{"a-1", "a-2"})
	store.Update(slice("a-1", "b", "10.0.0.1"))
	check("moved away", "a", []string{"a-2"}, "a", "b")
	check("moved here", "b", []string{"a-1"})
	store.Delete(slice("a-1", "b"))
	check("last one deleted", "b", nil, "b")
	store.Delete(slice("a-1", "b"))
	check("deleted twice", "b", nil)
	streamed, err := store.Transformer()(slice("c-1", "c", "10.0.0.3"))
	if err != nil {
		t.Fatal(err)
	}
	store.Replace([]any{streamed}, "2")
	if !cmp.Equal(changed, []string{"c", "a"}) {
		t.Errorf("relist: changes %v", changed)
	}
}

func TestConvertSlice(t *testing.T) {
	o := slice("s", "svc", "192.168.1.1", "192.168.1.2", "not an address")
	o.Endpoints[1].NodeName = new("n1")
	o.Endpoints[1].Conditions = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true),
		Terminating: new(true)}
	o.Endpoints[1].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "b"}},
		ForNodes: []discoveryv1.ForNode{{Name: "n1"}}}
	for _, ready := range []bool{true, false} {
		o.Endpoints = append(o.Endpoints, discoveryv1.Endpoint{Addresses: []string{"192.168.1.3"},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &ready},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Name: "svc-0"}})
	}
	o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: nil, Port: new(int32(1))},
		discoveryv1.EndpointPort{Name: new("all")})
	for i, port := range []int32{-1, 0, 65536, 65616, math.MaxInt32} { // all of which the API server takes
		o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: new(fmt.Sprint("p", i)), Port: new(port)})
	}
	o.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-05-01T12:00:00.25Z"}
	want := lb.Slice{
		Triggered: time.Date(2026, 5, 1, 12, 0, 0, 250_000_000, time.UTC), Key: lb.Key{Namespace: "default", Name: "s"},
		Service: lb.Key{Namespace: "default", Name: "svc"}, Family: lb.IPv4,
		Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 80}},
		Endpoints: []lb.Endpoint{
			{Addr: netip.MustParseAddr("192.168.1.1"), Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("192.168.1.2"), Node: "n1", Serving: true, Terminating: true,
				ForZones: []string{"a", "b"}, ForNodes: []string{"n1"}},
			{Addr: netip.MustParseAddr("192.168.1.3"), Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("192.168.1.3"), Pod: "svc-0"},
		},
	}
	if diff := cmp.Diff(want, convertSlice(o), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("slice (-want +got):\n%s", diff)
	}
}

func TestWeightOfASlice(t *testing.T) {
	for text, want := range map[string]lb.Slice{
		"7":                          {Weight: 7},
		"70%":                        {InvalidWeight: `"70%": want a weight from 1 to 100`},
		strings.Repeat("7", 100_000): {InvalidWeight: `"` + strings.Repeat("7", 80) + `": want a weight from 1 to 100`},
	} {
		o := slice("s", "svc", "192.168.1.1")
		o.Annotations = map[string]string{lb.AnnotationWeight: text}
		if got := convertSlice(o); got.Weight != want.Weight || got.InvalidWeight != want.InvalidWeight {
			t.Errorf("%.20q: %d, %q, want %d, %q", text, got.Weight, got.InvalidWeight, want.Weight, want.InvalidWeight)
		}
	}
}

func TestConvertService(t *testing.T) {
	o := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "my-nginx",
			Annotations: map[string]string{lb.AnnotationAddresses: "192.0.2.1, 2001:db8::1",
				lb.AnnotationAnnouncements: "data"}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, ClusterIPs: []string{"None"}, LoadBalancerIP: "192.0.2.9",
			LoadBalancerSourceRanges: []string{" 10.1.2.3/8", "rubbish"}, SessionAffinity: corev1.ServiceAffinityClientIP,
		},
		Status: corev1.ServiceStatus{
			LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{{IP: "192.0.2.1"},
				{Hostname: "elsewhere"}, {IP: "192.0.2.2", IPMode: new(corev1.LoadBalancerIPModeProxy)}}},
			Conditions: []metav1.Condition{{Type: "other/Thing"}, {Type: lb.ConditionAssigned, Status: metav1.ConditionTrue}},
		},
	}
	_, requesting := convertRequestingService(o, false)
	if diff := cmp.Diff([]string{"192.0.2.1", "2001:db8::1"}, requesting.Request.Addresses); diff != "" {
		t.Errorf("request: %s", diff)
	}
	_, labelled := convertLabelledService(o)
	for _, s := range []lb.Service{requesting, labelled} {
		if len(s.Conditions) != 1 || s.Announcements != "data" {
			t.Errorf("shown: %+v, %q", s.Conditions, s.Announcements)
		}
	}
	_, s := convertForwardedService(o)
	if len(s.ClusterIPs) != 0 || len(s.Ingress) != 2 || s.AffinityTimeout.Hours() != 3 || s.InternalPolicy != lb.Cluster {
		t.Errorf("service: %+v", s)
	}
	if len(s.Conditions) != 0 || s.Announcements != "" {
		t.Errorf("a proxy is woken by what is written to Services: %+v, %q", s.Conditions, s.Announcements)
	}
	if got := s.VIPs(); len(got) != 1 || got[0] != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("VIPs %v, want only the one that is not in mode Proxy", got)
	}
	if got := fmt.Sprint(s.SourceRanges); got != "[10.0.0.0/8 0.0.0.0/32 ::/128]" {
		t.Errorf("source ranges %v, want the readable one, and nobody for the other", got)
	}
}

// An IPv4 network in the form of an IPv6 one admits nobody, and is named.
func TestSourceRangesOfNoFamily(t *testing.T) {
	for _, test := range []struct{ ranges, want, invalid string }{
		{"10.0.0.0/8,2001:db8::1/32", "[10.0.0.0/8 2001:db8::/32]", ""},
		{"::ffff:10.0.0.0/104", "[0.0.0.0/32 ::/128]", `"::ffff:10.0.0.0/104"`},
		{"::ffff:0:0/96,10.0.0.0/8,fe80::%eth0/64", "[10.0.0.0/8 0.0.0.0/32 ::/128]", `"::ffff:0:0/96"`},
	} {
		got, invalid := sourceRanges(strings.Split(test.ranges, ","))
		if fmt.Sprint(got) != test.want || invalid != test.invalid {
			t.Errorf("%s: %v, invalid %s; want %s, %s", test.ranges, got, invalid, test.want, test.invalid)
		}
	}
}

// What tenants write into annotations takes no more memory in each program than it can mean.
func TestContract11AnnotationsAreKeptToALimit(t *testing.T) {
	const services, size = 100, 100_000
	named := []string{lb.AnnotationScheduler, lb.AnnotationFailover, lb.AnnotationRelay, lb.AnnotationRelayProxyProtocol,
		lb.AnnotationForwarding, lb.AnnotationWeights, lb.AnnotationProbe, lb.AnnotationOnConflict, lb.AnnotationAddresses,
		lb.AnnotationPool, lb.AnnotationShare, lb.AnnotationPerFamily, lb.AnnotationMode, lb.AnnotationWhenOutside,
		lb.AnnotationAllocatedFrom, lb.AnnotationAnnouncements}
	inUse := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for _, name := range named {
		for _, text := range []string{"x", "n/", "a,", " , ,", "http:/", "\x00"} {
			keep := make([]lb.Service, 0, 3*services)
			before := inUse()
			for range services {
				o := testService()
				value := strings.Repeat(text, size/len(text))
				if name == lb.AnnotationWeights {
					value += "=3"
				}
				o.Annotations = map[string]string{name: value}
				_, forwarded := convertForwardedService(o)
				_, labelled := convertLabelledService(o)
				_, requesting := convertRequestingService(o, true)
				keep = append(keep, forwarded, labelled, requesting)
			}
			if used := int64(inUse()-before) / services; used > size/2 {
				t.Errorf("%s of %d bytes %q: %d bytes are kept of each Service", name, size, text, used)
			}
			runtime.KeepAlive(keep)
		}
	}
	long := strings.Repeat("k", size)
	if keptKey(long+"a") == keptKey(long+"b") || keptKey(long) != keptKey(strings.Clone(long)) {
		t.Error("keys that differ are taken for one, or equal ones for two")
	}
}

// A Service of 1.5 MB, the most that the API server stores, costs each program less than that.
func TestContract11ListsAreKeptToALimit(t *testing.T) {
	const services = 4
	inUse := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for name, change := range map[string]func(*corev1.Service){
		"labels": func(o *corev1.Service) {
			o.Labels = map[string]string{}
			for i := range 10_000 {
				o.Labels[fmt.Sprintf("%060d.example.com/%060d", i, i)] = fmt.Sprint(i)
			}
		},
		"external IPs": func(o *corev1.Service) {
			for i := range 100_000 {
				o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, fmt.Sprintf("11.%d.%d.%d", i>>16, i>>8&255, i&255))
			}
		},
		"source ranges": func(o *corev1.Service) {
			for i := range 80_000 {
				o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges,
					fmt.Sprintf("11.%d.%d.%d/32", i>>16, i>>8&255, i&255))
			}
		},
		"ports": func(o *corev1.Service) {
			for i := range 50_000 {
				o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(i + 1), Protocol: "TCP"})
			}
		},
	} {
		for program, convert := range map[string]func(*corev1.Service) (lb.Key, lb.Service){
			"proxy": convertForwardedService, "speaker": convertLabelledService,
			"controller": func(o *corev1.Service) (lb.Key, lb.Service) { return convertRequestingService(o, true) },
		} {
			keep := make([]lb.Service, 0, services)
			before := inUse()
			for range services {
				o := testService()
				change(o)
				_, s := convert(o)
				keep = append(keep, s)
			}
			if used := (int64(inUse()) - int64(before)) / services; used > 1_100_000 {
				t.Errorf("%s: %d bytes of %s are kept of each Service", program, used, name)
			}
			runtime.KeepAlive(keep)
		}
	}
}

// What is left out is counted, and of source ranges a family that is all left out is still there.
func TestWhatIsNotKept(t *testing.T) {
	o := testService()
	o.Labels, o.Spec.LoadBalancerSourceRanges = map[string]string{}, nil
	for i := range maxKeptLabels + 1 {
		o.Labels[fmt.Sprintf("l%03d", i)] = ""
	}
	o.Spec.Ports = make([]corev1.ServicePort, maxKeptPorts+2)
	o.Spec.ExternalIPs = slices.Repeat([]string{"198.51.100.1"}, maxKeptExternalIPs+3)
	o.Spec.LoadBalancerSourceRanges = append(slices.Repeat([]string{"10.0.0.0/8"}, maxKeptRanges+5), "2001:db8::/32")
	_, s := convertForwardedService(o)
	if want := (lb.Unkept{Ports: 2, ExternalIPs: 3, SourceRanges: 4}); s.Unkept != want {
		t.Errorf("not kept: %+v, want %+v", s.Unkept, want)
	}
	if last := s.SourceRanges[len(s.SourceRanges)-1]; last.String() != "2001:db8::/32" || s.InvalidRange != "" {
		t.Errorf("the last range is %s, invalid is %q", last, s.InvalidRange)
	}
	_, s = convertLabelledService(o)
	if _, has := s.Labels["l128"]; has || len(s.Labels) != maxKeptLabels {
		t.Errorf("%d labels, l128 is there: %v", len(s.Labels), has)
	}
}

// TestAnnotationOfATenantIsNotKept checks that no more of the annotation is kept than a speaker
// writes, and that one is still seen where it must be replaced or removed.
func TestAnnotationOfATenantIsNotKept(t *testing.T) {
	written := lb.EncodeAnnouncements([]lb.Announcement{{VIP: netip.MustParseAddr("192.0.2.1"),
		Reason: lb.ReasonNoBackends}})
	largest, huge := strings.Repeat("x", lb.MaxAnnouncementsSize), strings.Repeat("x", lb.MaxAnnouncementsSize+1)
	for _, test := range []struct {
		kind  corev1.ServiceType
		value string
		want  string // "" where anything else is fine that is short
	}{
		{corev1.ServiceTypeLoadBalancer, written, written},
		{corev1.ServiceTypeLoadBalancer, largest, largest},
		{corev1.ServiceTypeLoadBalancer, huge, ""},
		{corev1.ServiceTypeClusterIP, written, ""},
		{corev1.ServiceTypeNodePort, huge, ""},
	} {
		o := testService()
		o.Spec.Type, o.Annotations = test.kind, map[string]string{lb.AnnotationAnnouncements: test.value}
		_, labelled := convertLabelledService(o)
		_, requesting := convertRequestingService(o, false)
		for _, s := range []lb.Service{labelled, requesting} {
			got := s.Announcements
			if test.want != "" && got == test.want {
				continue
			}
			if _, err := lb.DecodeAnnouncements(got); test.want != "" || got == "" || len(got) > 40 || err == nil {
				t.Errorf("%s with %d bytes: %.60q is kept, read with error %v", test.kind, len(test.value), got, err)
			}
			if (Holding{}).Shows(lb.Service{Announcements: got}) {
				t.Errorf("%s with %d bytes: the annotation is not seen any more", test.kind, len(test.value))
			}
		}
		delete(o.Annotations, lb.AnnotationAnnouncements)
		if _, s := convertLabelledService(o); s.Announcements != "" {
			t.Errorf("%s without the annotation: %q", test.kind, s.Announcements)
		}
	}
}

func TestConvertNode(t *testing.T) {
	now := metav1.Now()
	for _, test := range []struct {
		name    string
		change  func(*corev1.Node)
		leaving lb.Reason
	}{
		{"stays", func(*corev1.Node) {}, ""},
		{"cordoned only", func(n *corev1.Node) { n.Spec.Unschedulable = true }, ""},
		{"drained", func(n *corev1.Node) { n.Labels = map[string]string{lb.LabelDrain: ""} }, lb.ReasonNodeDrained},
		{"drained and deleted", func(n *corev1.Node) {
			n.Labels, n.DeletionTimestamp = map[string]string{lb.LabelDrain: ""}, &now
		}, lb.ReasonNodeLeaving},
		{"autoscaler", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: taintAutoscaler}} }, lb.ReasonNodeLeaving},
		{"out of service", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: taintOutOfService}} },
			lb.ReasonNodeLeaving},
		{"deleted", func(n *corev1.Node) { n.DeletionTimestamp = &now }, lb.ReasonNodeLeaving},
	} {
		o := &corev1.Node{
			Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "n"},
				{Type: corev1.NodeInternalIP, Address: "192.0.2.7"}, {Type: corev1.NodeExternalIP, Address: "198.51.100.7"}}}}
		test.change(o)
		if _, n := convertNode(o); n.Leaving != test.leaving || len(n.Addresses) != 1 || len(n.ExternalAddresses) != 1 {
			t.Errorf("%s: %+v", test.name, n)
		}
	}
}

func TestConvertNodeBoundsAddresses(t *testing.T) {
	o := &corev1.Node{}
	for i := range 40_000 {
		addr := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()
		o.Status.Addresses = append(o.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr},
			corev1.NodeAddress{Type: corev1.NodeExternalIP, Address: addr})
	}
	if _, n := convertNode(o); len(n.Addresses) != maxNodeAddresses || len(n.ExternalAddresses) != maxNodeAddresses {
		t.Errorf("%d and %d addresses", len(n.Addresses), len(n.ExternalAddresses))
	}
}

// TestConvertConditions reads the conditions of a Node; without one, nothing speaks against it.
func TestConvertConditions(t *testing.T) {
	for _, test := range []struct {
		condition             corev1.NodeConditionType
		status                corev1.ConditionStatus
		unavailable, notReady bool
	}{
		{"", "", false, false},
		{corev1.NodeNetworkUnavailable, corev1.ConditionTrue, true, false},
		{corev1.NodeNetworkUnavailable, corev1.ConditionFalse, false, false},
		{corev1.NodeNetworkUnavailable, corev1.ConditionUnknown, false, false},
		{corev1.NodeReady, corev1.ConditionTrue, false, false},
		{corev1.NodeReady, corev1.ConditionFalse, false, true},
		{corev1.NodeReady, corev1.ConditionUnknown, false, true},
	} {
		o := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
			{Type: test.condition, Status: test.status}}}}
		if _, n := convertNode(o); n.NetworkUnavailable != test.unavailable || n.NotReady != test.notReady {
			t.Errorf("%s %s: %+v", test.condition, test.status, n)
		}
	}
}

func TestConvertPoolKeepsGoodRangesAndNamesTheBadOne(t *testing.T) {
	_, p := convertPool(
		&v1beta1.IPAddressPool{
			Spec: v1beta1.IPAddressPoolSpec{Addresses: []v1beta1.AddressRange{"192.0.2.0/30", "2001:db8::9-2001:db8::1"}}})
	if len(p.Ranges) != 1 || p.Problem == nil ||
		p.Problem.Message != `spec.addresses[1]: range "2001:db8::9-2001:db8::1" ends before it starts` || !p.AutoAssign {
		t.Errorf("pool: %+v, problem %v", p, p.Problem)
	}
}

// A selector that cannot be read selects nothing, and the object says which and why.
func TestSelectorsThatCannotBeReadSelectNothing(t *testing.T) {
	bad := metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "k", Operator: "Near"}}}
	good := metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
	all := []metav1.LabelSelector{good, bad}
	pool := func(a v1beta1.ServiceAllocation) *lb.Refusal {
		_, p := convertPool(&v1beta1.IPAddressPool{Spec: v1beta1.IPAddressPoolSpec{ServiceAllocation: &a}})
		return p.BadSelector
	}
	l2 := func(s v1beta1.L2AdvertisementSpec) *lb.Refusal {
		_, a := convertL2Advertisement(&v1beta1.L2Advertisement{Spec: s})
		return a.BadSelector
	}
	routed := func(s v1beta1.BGPAdvertisementSpec) *lb.Refusal {
		_, a := convertBGPAdvertisement(&v1beta1.BGPAdvertisement{Spec: s})
		return a.BadSelector
	}
	_, peer := convertBGPPeer(&v1beta1.BGPPeer{Spec: v1beta1.BGPPeerSpec{NodeSelectors: all}})
	if s := peer.NodeSelectors; len(s) != 2 || !s[0].Matches(labels.Set{"a": "b"}) || s[1].Empty() || s[1].Matches(nil) {
		t.Errorf("selectors: %v", s)
	}
	for field, got := range map[string]*lb.Refusal{
		"serviceAllocation.namespaceSelectors[1]": pool(v1beta1.ServiceAllocation{NamespaceSelectors: all}),
		"serviceAllocation.serviceSelectors[1]":   pool(v1beta1.ServiceAllocation{ServiceSelectors: all}),
		"ipAddressPoolSelectors[1]":               l2(v1beta1.L2AdvertisementSpec{IPAddressPoolSelectors: all}),
		"serviceSelectors[1]":                     l2(v1beta1.L2AdvertisementSpec{ServiceSelectors: all}),
		"nodeSelectors[1]":                        l2(v1beta1.L2AdvertisementSpec{NodeSelectors: all}),
		"preferredNodes[0].nodeSelector": l2(v1beta1.L2AdvertisementSpec{
			PreferredNodes: []v1beta1.PreferredNode{{Weight: 1, NodeSelector: bad}}}),
		"ipAddressPoolSelectors[0]": routed(v1beta1.BGPAdvertisementSpec{IPAddressPoolSelectors: all[1:]}),
		"serviceSelectors[0]":       routed(v1beta1.BGPAdvertisementSpec{ServiceSelectors: all[1:]}),
		"nodeSelectors[0]":          routed(v1beta1.BGPAdvertisementSpec{NodeSelectors: all[1:]}),
		"nodeSelectors[1] ":         peer.BadSelector,
	} {
		field = strings.TrimSpace(field)
		want := lb.Refuse(lb.ReasonSelectorInvalid, "spec.%s selects nothing: \"Near\" is not a valid label selector operator; "+
			"operators are In and NotIn with values, Exists and DoesNotExist without", field)
		if got == nil || *got != *want {
			t.Errorf("%s: %v, want %v", field, got, want)
		}
	}
	if l2(v1beta1.L2AdvertisementSpec{NodeSelectors: all[:1]}) != nil {
		t.Error("a selector that can be read is called bad")
	}
	long := metav1.LabelSelector{MatchLabels: map[string]string{strings.Repeat("k", 70000): "b"}}
	if got := l2(v1beta1.L2AdvertisementSpec{NodeSelectors: []metav1.LabelSelector{long}}); len(got.Message) > 300 {
		t.Errorf("a message of %d bytes", len(got.Message))
	}
}

// TestAStatusIsNoChange has pools come and change: what differs in the status alone is told apart,
// as speakers plan all addresses anew for a changed pool.
func TestAStatusIsNoChange(t *testing.T) {
	pool := func(generation int64, used string) *v1beta1.IPAddressPool {
		p := &v1beta1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "lan", Generation: generation,
			ResourceVersion: used}}
		p.Status.AssignedIPv4 = used
		return p
	}
	var told []string
	tell := func(what string) func(string) { return func(name string) { told = append(told, what+" "+name) } }
	table := newStatusTable(poolSpec, tell("changed"), tell("status"))
	store := objects[string, lb.Pool, *v1beta1.IPAddressPool]{table, convertPool}
	check := func(step string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, told); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step, diff)
		}
		told = nil
	}
	list := func(of ...any) {
		if err := store.Replace(of, ""); err != nil {
			t.Fatal(err)
		}
	}
	list(pool(1, "1"))
	check("new", "changed lan")
	list(pool(1, "1"))
	check("listed again")
	list(pool(1, "12"))
	check("another status in a list", "status lan")
	_ = store.Update(pool(1, "123"))
	check("another status", "status lan")
	if p, _ := table.Get("lan"); p.Version != "123" {
		t.Errorf("the table has version %s", p.Version)
	}
	_ = store.Update(pool(2, "1234"))
	check("another specification", "changed lan")
	_ = store.Delete(pool(2, "1234"))
	check("gone", "changed lan")
	table.noted = nil
	list(pool(1, "1"))
	told = nil
	list(pool(1, "12"))
	check("nobody wants to hear of the status")
}

// TestAStatusOfWhatIsAnnouncedIsNoChange does so with the tables of BGPPeers and advertisements, into whose
// statuses speakers write.
func TestAStatusOfWhatIsAnnouncedIsNoChange(t *testing.T) {
	lan := metav1.ObjectMeta{Name: "lan"}
	ready := func(reason string) []metav1.Condition {
		return []metav1.Condition{{Type: lb.ConditionReady, Status: metav1.ConditionTrue, Reason: reason}}
	}
	// Each row returns what puts an object with a number in its specification, and a word in its status.
	for name, follow := range map[string]func(c *Client, changed, status func(string)) func(number int32, word string){
		"BGPPeers": func(c *Client, changed, status func(string)) func(int32, string) {
			table := BGPPeers(c, changed, status)
			return func(number int32, word string) {
				name, p := convertBGPPeer(&v1beta1.BGPPeer{ObjectMeta: lan, Spec: v1beta1.BGPPeerSpec{PeerPort: number},
					Status: v1beta1.BGPPeerStatus{Nodes: []v1beta1.BGPPeerNode{{Name: "n1", State: word}}}})
				table.put(name, p, true)
			}
		},
		"BGPAdvertisements": func(c *Client, changed, status func(string)) func(int32, string) {
			table := BGPAdvertisements(c, changed, status)
			return func(number int32, word string) {
				name, a := convertBGPAdvertisement(&v1beta1.BGPAdvertisement{ObjectMeta: lan,
					Spec:   v1beta1.BGPAdvertisementSpec{ASPathPrepend: number},
					Status: v1beta1.BGPAdvertisementStatus{Conditions: ready(word)}})
				table.put(name, a, true)
			}
		},
		"L2Advertisements": func(c *Client, changed, status func(string)) func(int32, string) {
			table := L2Advertisements(c, changed, status)
			return func(number int32, word string) {
				name, a := convertL2Advertisement(&v1beta1.L2Advertisement{ObjectMeta: lan,
					Spec:   v1beta1.L2AdvertisementSpec{Interfaces: []string{fmt.Sprint("eth", number)}},
					Status: v1beta1.L2AdvertisementStatus{Conditions: ready(word)}})
				table.put(name, a, true)
			}
		},
	} {
		var told []string
		tell := func(what string) func(string) { return func(name string) { told = append(told, what+" "+name) } }
		put := follow(newClient(t, "http://127.0.0.1:1"), tell("changed"), tell("status"))
		for _, step := range []struct {
			name   string
			number int32
			word   string
			want   []string
		}{
			{"new", 1, "A", []string{"changed lan"}},
			{"the same", 1, "A", nil},
			{"another status", 1, "B", []string{"status lan"}},
			{"another specification", 2, "B", []string{"changed lan"}},
			{"another specification and status", 3, "C", []string{"changed lan"}},
		} {
			told = nil
			put(step.number, step.word)
			if diff := cmp.Diff(step.want, told); diff != "" {
				t.Errorf("%s: %s (-want +got):\n%s", name, step.name, diff)
			}
		}
	}
}

// TestProxiesDoNotHearOfHeadless has proxies ask the API server for Services and EndpointSlices without the label
// service.kubernetes.io/headless, in lists and in watches. Speakers hear of such Services: they say why none is
// announced.
func TestProxiesDoNotHearOfHeadless(t *testing.T) {
	for _, test := range []struct {
		name     string
		follow   func(c *Client)
		labels   labels.Set // of an object that is followed
		headless bool       // whether it is followed with the label too
	}{
		{"Services", func(c *Client) { Services(c, "", func(lb.Key) {}) }, nil, false},
		{"Services of one proxy", func(c *Client) { Services(c, "proxy=ours", func(lb.Key) {}) },
			labels.Set{"proxy": "ours"}, false},
		{"Slices", func(c *Client) { Slices(c, func(lb.Key) {}) }, labels.Set{discoveryv1.LabelServiceName: "web"}, false},
		{"LabelledServices", func(c *Client) { LabelledServices(c, func(lb.Key) {}) }, nil, true},
	} {
		asked := make(chan url.Values, 100)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			query := r.URL.Query()
			asked <- query
			switch {
			case query.Has("sendInitialEvents"):
				http.NotFound(w, r)
			case query.Has("watch"):
				<-r.Context().Done()
			default:
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, `{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[]}`)
			}
		}))
		client := newClient(t, server.URL)
		test.follow(client)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- client.Run(ctx) }()
		for range 3 { // a list as a watch, a list as the server streams none, and a watch from there on
			query := <-asked
			selector, err := labels.Parse(query.Get("labelSelector"))
			if err != nil {
				t.Fatal(err)
			}
			taken := labels.Merge(test.labels, labels.Set{corev1.IsHeadlessService: ""})
			if !selector.Matches(test.labels) || selector.Matches(taken) != test.headless {
				t.Errorf("%s: asks for what matches %q", test.name, selector)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		server.Close()
	}
}
