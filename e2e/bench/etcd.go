package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/scheme"
)

// store writes objects to etcd as the API server keeps them. The API server takes longer for a new Service
// the more there are, and minutes for some 10,000; its watches tell of these as of any others.
type store struct {
	client *http.Client // from where etcd runs
	puts   []any
}

// objectsAtOnce is how many objects a transaction of etcd has at most (--max-txn-ops).
const objectsAtOnce = 128

// put keeps an object for the next write.
func (s *store) put(key string, object runtime.Object) error {
	var value bytes.Buffer
	if err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(object, &value); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	s.puts = append(s.puts, map[string]any{"requestPut": map[string][]byte{"key": []byte("/registry/" + key),
		"value": value.Bytes()}})
	return nil
}

// write writes what was put.
func (s *store) write(ctx context.Context) error {
	for len(s.puts) > 0 {
		n := min(len(s.puts), objectsAtOnce)
		body, err := json.Marshal(map[string]any{"success": s.puts[:n]})
		if err != nil {
			return err
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://127.0.0.1:2379/v3/kv/txn",
			bytes.NewReader(body))
		if err != nil {
			return err
		}
		answer, err := s.client.Do(request)
		if err != nil {
			return err
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("etcd: %s: %.200s", answer.Status, text)
		}
		s.puts = s.puts[n:]
	}
	return nil
}

// putService puts a Service, what reserves its cluster IP, and its slice.
func (s *store) putService(name string, clusterIP netip.Addr, endpoints ...discoveryv1.Endpoint) error {
	meta := metav1.ObjectMeta{Name: name, Namespace: namespace, UID: uuid.NewUUID(),
		CreationTimestamp: metav1.NewTime(time.Now())}
	inside, single := corev1.ServiceInternalTrafficPolicyCluster, corev1.IPFamilyPolicySingleStack
	service := &corev1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: meta,
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: clusterIP.String(),
			ClusterIPs: []string{clusterIP.String()}, SessionAffinity: corev1.ServiceAffinityNone,
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, IPFamilyPolicy: &single, InternalTrafficPolicy: &inside,
			Ports: []corev1.ServicePort{{Protocol: corev1.ProtocolTCP, Port: 80, TargetPort: intstr.FromInt32(80)}}}}
	reservation := &networkingv1.IPAddress{
		TypeMeta: metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "IPAddress"},
		ObjectMeta: metav1.ObjectMeta{Name: clusterIP.String(), UID: uuid.NewUUID(),
			CreationTimestamp: meta.CreationTimestamp,
			Labels: map[string]string{networkingv1.LabelIPAddressFamily: string(corev1.IPv4Protocol),
				networkingv1.LabelManagedBy: "ipallocator.k8s.io"}},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{Resource: "services",
			Namespace: namespace, Name: name}}}
	slice := newSlice(name, 80, endpoints...)
	slice.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
	slice.Namespace, slice.UID, slice.CreationTimestamp = namespace, uuid.NewUUID(), meta.CreationTimestamp
	for key, object := range map[string]runtime.Object{
		"endpointslices/" + namespace + "/" + name: slice,
		"ipaddresses/" + clusterIP.String():        reservation,
		"services/specs/" + namespace + "/" + name: service,
	} {
		if err := s.put(key, object); err != nil {
			return err
		}
	}
	return nil
}
