package kube

import (
	"context"
	"maps"
	"net/netip"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/landfall-lb/landfall/internal/lb"
)

// EndpointPods returns the names of the pods behind the addresses of a Service's endpoints. Endpoints that
// are no pods have no entry.
func (c *Client) EndpointPods(ctx context.Context, service lb.Key) (map[netip.Addr]string, error) {
	options := metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service.Name}
	slices, err := listIn(ctx, c, c.rest.discovery, "discovery.k8s.io", "endpointslices", service.Namespace,
		options, &discoveryv1.EndpointSliceList{},
		func(l *discoveryv1.EndpointSliceList) []discoveryv1.EndpointSlice { return l.Items }, podsOf)
	pods := map[netip.Addr]string{}
	for _, some := range slices {
		maps.Copy(pods, some)
	}
	return pods, err
}

func podsOf(o *discoveryv1.EndpointSlice) map[netip.Addr]string {
	pods := map[netip.Addr]string{}
	for _, e := range o.Endpoints {
		// The API server takes any text for the name, and whoever writes the slice is believed.
		if e.TargetRef == nil || e.TargetRef.Kind != "Pod" || len(validation.IsDNS1123Subdomain(e.TargetRef.Name)) > 0 {
			continue
		}
		for _, address := range e.Addresses {
			if addr, err := lb.ParseAddr(address); err == nil {
				pods[addr] = e.TargetRef.Name
			}
		}
	}
	return pods
}
