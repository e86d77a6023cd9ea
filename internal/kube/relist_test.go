package kube

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/intstr"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"
)

// fullAPI is an API server of a large cluster. It streams its lists, which are encoded once, and then ends the watch.
type fullAPI struct {
	*stormAPI
	lists map[string][]byte // by resource; of other resources there are no objects
	sent  int               // bytes
}

// newFullAPI returns one with so many Services, ten endpoints of each in a slice, and so many nodes.
func newFullAPI(tb testing.TB, services, nodes int) *fullAPI {
	tb.Helper()
	a := &fullAPI{stormAPI: newStormAPI(), lists: map[string][]byte{}}
	close(a.end)
	list := func(resource string, count int, numbered func(i int) runtime.Object) {
		a.lists[resource] = streamed(tb, count, numbered)
		tb.Logf("%d %s: %.1f MB", count, resource, float64(len(a.lists[resource]))/1e6)
	}
	list("services", services, fullService)
	list("endpointslices", services, fullSlice)
	list("nodes", nodes, fullNode)
	return a
}

// RoundTrip answers a request.
func (a *fullAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	list, ok := a.lists[path.Base(r.URL.Path)]
	switch query := r.URL.Query(); {
	case !ok:
		return a.stormAPI.RoundTrip(r)
	case query.Get("sendInitialEvents") == "": // the client could not read the stream
		return a.answer(r, http.StatusInternalServerError, nil, false), nil
	}
	a.sent += len(list)
	response := a.answer(r, http.StatusOK, list, true)
	response.Header.Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	return response, nil
}

// streamed returns the events of a streamed list as the API server encodes them, the last of which ends the list.
func streamed(tb testing.TB, count int, numbered func(i int) runtime.Object) []byte {
	tb.Helper()
	info, _ := runtime.SerializerInfoForMediaType(serializer.NewCodecFactory(scheme).SupportedMediaTypes(),
		runtime.ContentTypeProtobuf)
	var stream bytes.Buffer
	frames := info.StreamSerializer.Framer.NewFrameWriter(&stream)
	send := func(event apiwatch.EventType, object runtime.Object) {
		kinds, _, err := scheme.ObjectKinds(object)
		if err != nil {
			tb.Fatal(err)
		}
		object.GetObjectKind().SetGroupVersionKind(kinds[0])
		raw, err := runtime.Encode(info.Serializer, object)
		if err != nil {
			tb.Fatal(err)
		}
		message := &metav1.WatchEvent{Type: string(event), Object: runtime.RawExtension{Raw: raw}}
		if err := info.StreamSerializer.Encode(message, frames); err != nil {
			tb.Fatal(err)
		}
	}
	for i := range count {
		send(apiwatch.Added, numbered(i))
	}
	end := numbered(0)
	meta := end.(metav1.Object)
	meta.SetResourceVersion("1")
	meta.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	send(apiwatch.Bookmark, end)
	return stream.Bytes()
}

// fullMeta returns the metadata of an object as they are in a cluster, with what field managers left.
func fullMeta(name, namespace, fields string, labels map[string]string) metav1.ObjectMeta {
	at := metav1.NewTime(time.Unix(1_760_000_000, 0))
	return metav1.ObjectMeta{Name: name, Namespace: namespace, UID: "5b0b1c9e-8a35-4c2f-9d43-0f6f2a1f7a11",
		ResourceVersion: "1", Generation: 1, CreationTimestamp: at, Labels: labels,
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kube-controller-manager", Operation: "Update",
			APIVersion: "v1", Time: &at, FieldsType: "FieldsV1", FieldsV1: &metav1.FieldsV1{Raw: []byte(fields)}}}}
}

// fullService returns a Service of type LoadBalancer that is announced.
func fullService(i int) runtime.Object {
	name := fmt.Sprintf("web-%05d", i)
	fields := `{"f:metadata":{"f:annotations":{".":{},"f:kubectl.kubernetes.io/last-applied-configuration":{}},` +
		`"f:labels":{".":{},"f:app":{}}},"f:spec":{"f:allocateLoadBalancerNodePorts":{},"f:externalTrafficPolicy":{},` +
		`"f:internalTrafficPolicy":{},"f:ports":{".":{},"k:{\"port\":80,\"protocol\":\"TCP\"}":{".":{},"f:name":{},` +
		`"f:port":{},"f:protocol":{},"f:targetPort":{}}},"f:selector":{},"f:sessionAffinity":{},"f:type":{}},` +
		`"f:status":{"f:conditions":{},"f:loadBalancer":{"f:ingress":{}}}}`
	s := &corev1.Service{ObjectMeta: fullMeta(name, "shop", fields, map[string]string{"app": name})}
	applied := `{"apiVersion":"v1","kind":"Service","metadata":{"annotations":{},"labels":{"app":%q},"name":%q,` +
		`"namespace":"shop"},"spec":{"ports":[{"name":"http","port":80,"targetPort":8080}],"selector":{"app":%q},` +
		`"type":"LoadBalancer"}}`
	s.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: fmt.Sprintf(applied, name, name, name)}
	address, vip := fmt.Sprintf("10.96.%d.%d", i>>8, i&255), fmt.Sprintf("203.0.%d.%d", i>>8, i&255)
	s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, ClusterIP: address, ClusterIPs: []string{address},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, Selector: map[string]string{"app": name},
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster, SessionAffinity: corev1.ServiceAffinityNone,
		Ports: []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80,
			TargetPort: intstr.FromInt32(8080), NodePort: int32(30000 + i%2768)}}}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip, IPMode: new(corev1.LoadBalancerIPModeVIP)}}
	for _, condition := range []string{"Announced", "Serving"} {
		s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{Type: "landfall.dev/" + condition,
			Status: metav1.ConditionTrue, Reason: condition, LastTransitionTime: s.CreationTimestamp,
			Message: vip + " is announced from node-0500"})
	}
	return s
}

// fullSlice returns the EndpointSlice of a Service with ten endpoints on ten of 1,000 nodes.
func fullSlice(i int) runtime.Object {
	service := fmt.Sprintf("web-%05d", i)
	fields := `{"f:addressType":{},"f:endpoints":{},"f:metadata":{"f:annotations":{},"f:generateName":{},"f:labels":{` +
		`".":{},"f:app":{},"f:endpointslice.kubernetes.io/managed-by":{},"f:kubernetes.io/service-name":{}},` +
		`"f:ownerReferences":{".":{},"k:{\"uid\":\"5b0b1c9e-8a35-4c2f-9d43-0f6f2a1f7a11\"}":{}}},"f:ports":{}}`
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: fullMeta(service+"-x7k2p",
		"shop", fields, map[string]string{"app": service, discoveryv1.LabelServiceName: service,
			discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"})}
	s.Ports = []discoveryv1.EndpointPort{{Name: new("http"), Protocol: new(corev1.ProtocolTCP), Port: new(int32(8080))}}
	for e := range 10 {
		node := (i*10 + e) % 1000
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+node>>8, node&255, 2+i/100%250)},
			NodeName:   new(fmt.Sprintf("node-%04d", node)),
			Conditions: discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "shop",
				UID: "0d7d9bb0-1c0c-47c4-a7cf-5a4f3b9be210", Name: fmt.Sprintf("%s-6d4cf56db6-%05d", service, e)}})
	}
	return s
}

// fullNode returns a Node of some 5 KiB, most of which are the names of its images.
func fullNode(i int) runtime.Object {
	name := fmt.Sprintf("node-%04d", i)
	n := &corev1.Node{ObjectMeta: fullMeta(name, "", `{"f:status":{"f:conditions":{},"f:images":{}}}`,
		map[string]string{corev1.LabelHostname: name, corev1.LabelArchStable: "amd64"})}
	address := fmt.Sprintf("10.0.%d.%d", i>>8, i&255)
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue,
		LastHeartbeatTime: n.CreationTimestamp, LastTransitionTime: n.CreationTimestamp, Reason: "KubeletReady"}}
	for image := range 28 {
		repository := fmt.Sprintf("registry.example.com/shop/component-%02d", image)
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{SizeBytes: 50 << 20,
			Names: []string{repository + "@sha256:" + strings.Repeat("0f", 32), repository + ":v1.2.3"}})
	}
	return n
}

// BenchmarkRelist has the watches of a speaker and those of a proxy read their lists again, one after the other, as
// after a restart of the API server: 10,000 Services with a VIP and ten endpoints each, and 1,000 Nodes. Nothing has
// changed. The fake API server costs a few milliseconds.
func BenchmarkRelist(b *testing.B) {
	const services, nodes = 10_000, 1_000
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // each watch ends at once
	b.Cleanup(klog.ClearLogger)
	api := newFullAPI(b, services, nodes)
	for i, c := range agents(b, api) {
		name := []string{"speaker", "proxy"}[i]
		told := 0
		c.onSync = append(c.onSync, func() { told++ })
		relist := func() {
			for _, w := range c.watches {
				if err := w.reflector.ListAndWatchWithContext(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		}
		relist()
		if told != len(c.watches) {
			b.Fatalf("%s: %d of %d watches have a list", name, told, len(c.watches))
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			api.sent = 0
			before, n := processorTime(), 0
			for b.Loop() {
				relist()
				n++
			}
			b.ReportMetric(float64(api.sent)/float64(n), "received-B/op")
			b.ReportMetric(float64((processorTime()-before).Nanoseconds())/float64(n), "cpu-ns/op")
		})
	}
}

// processorTime is what this process has had.
func processorTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
