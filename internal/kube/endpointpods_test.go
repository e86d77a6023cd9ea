package kube

import (
	"maps"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Names that no pod can have are not shown: the API server takes any text in a targetRef.
func TestPodsOfASliceHaveNamesOfPods(t *testing.T) {
	endpoint := func(addr, kind, name string) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{Addresses: []string{addr}, TargetRef: &corev1.ObjectReference{Kind: kind, Name: name}}
	}
	got := podsOf(&discoveryv1.EndpointSlice{Endpoints: []discoveryv1.Endpoint{
		endpoint("10.0.0.1", "Pod", "web-6b7f-x2x9p"), endpoint("10.0.0.2", "Node", "n1"),
		endpoint("10.0.0.3", "Pod", "\x1b[2Jdelivered"), endpoint("10.0.0.4", "Pod", strings.Repeat("a", 300)),
		{Addresses: []string{"10.0.0.5"}},
	}})
	if want := map[netip.Addr]string{netip.MustParseAddr("10.0.0.1"): "web-6b7f-x2x9p"}; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
