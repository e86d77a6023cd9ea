package kube

import (
	"encoding/json"
	"maps"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// FuzzConvert reads whatever an API server may hold, of laxer rules than those of today too, as objects of each kind:
// nothing ends a program, and what a tenant wrote is kept to a limit.
func FuzzConvert(f *testing.F) {
	for _, seed := range []string{
		`{"metadata":{"name":"web","namespace":"shop","annotations":{"landfall.dev/weights":"a=1",
		"landfall.dev/probe":"http"}},
		"spec":{"type":"LoadBalancer","clusterIPs":["10.96.0.1","None"],"externalIPs":["192.0.2.9"],"ipFamilies":["IPv4"],
		"ports":[{"port":80,"nodePort":30080,"protocol":"TCP"}],"sessionAffinity":"ClientIP",
		"sessionAffinityConfig":{"clientIP":{}},
		"loadBalancerSourceRanges":["10.0.0.0/8","::ffff:10.0.0.0/104"]},
		"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.1"}]},
		"conditions":[{"type":"landfall.dev/Assigned","status":"True",
		"message":"192.0.2.1 from pool p"},{"type":"landfall.dev/ExternalIPs","message":"since 1: 192.0.2.9"}]}}`,
		`{"metadata":{"labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"name":"","port":80}],
		"endpoints":[{"addresses":["10.1.0.1"],"conditions":{},"hints":{"forZones":[{"name":"a"}]}},{"addresses":[]}]}`,
		`{"metadata":{"name":"n1"},"spec":{"podCIDRs":["10.1.0.0/24"],"taints":[{"key":"x"}]},
		"status":{"addresses":[{"type":"InternalIP","address":"192.0.2.7"}],
		"conditions":[{"type":"Ready","status":"True"}]}}`,
		`{"metadata":{"name":"p"},"spec":{"addresses":["192.0.2.0/24"],"reservations":[{"addresses":"192.0.2.9"}],
		"serviceAllocation":{"namespaceSelectors":[{"matchExpressions":[{"key":"a","operator":"x"}]}]}},
		"status":{"next":["192.0.2.1-192.0.2.2"],"claims":[{"addresses":["x"]}],"released":[{"address":"192.0.2.3"}]}}`,
		`{"metadata":{"name":"tor"},"spec":{"peerAddress":"192.0.2.1","passwordSecret":{"name":"s"},"holdTime":"90s",
		"communities":[{"value":"1:2"}]},"status":{"nodes":[{"name":"n1","state":"Idle"}]}}`,
		`{"metadata":{"name":"shop","labels":{"team":"a"}}}`,
		`{"metadata":{"name":"kubernetes"},"spec":{"cidrs":["10.96.0.0/12","fd00:10:96::/112"]}}`,
		`{"metadata":{"name":"speaker","deletionTimestamp":"2026-01-02T03:04:05Z","finalizers":["orphan"]},
		"status":{"numberReady":-1}}`,
		`{"spec":{"preferredNodes":[{"weight":1,"nodeSelector":{"matchLabels":{"a":"b"}}}],"communities":["1:2"]}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		as(data, func(o *corev1.Service) {
			for _, convert := range []func(*corev1.Service) (lb.Key, lb.Service){
				convertForwardedService, convertLabelledService,
				func(o *corev1.Service) (lb.Key, lb.Service) { return convertRequestingService(o, true) }} {
				_, s := convert(o)
				if len(s.Ingress) > lb.MaxAddresses || len(s.Ports) > maxKeptPorts || len(s.ExternalIPs) > maxKeptExternalIPs ||
					len(s.Labels) > maxKeptLabels || len(s.Announcements) > lb.MaxAnnouncementsSize {
					t.Errorf("%s is kept as %+v", data, s)
				}
				if len(o.Spec.LoadBalancerSourceRanges) > 0 && len(s.SourceRanges) == 0 && s.InternalPolicy != "" {
					t.Errorf("%s admits everybody", data)
				}
			}
			convertWholeService(o)
		})
		as(data, func(o *discoveryv1.EndpointSlice) {
			for _, e := range convertSlice(o).Endpoints {
				if !e.Addr.IsValid() {
					t.Errorf("%s has an endpoint without an address", data)
				}
			}
		})
		as(data, func(o *corev1.Node) {
			if _, n := convertNode(o); len(n.Addresses) > maxNodeAddresses || len(n.ExternalAddresses) > maxNodeAddresses {
				t.Errorf("%s has %d addresses", data, len(n.Addresses)+len(n.ExternalAddresses))
			}
		})
		as(data, func(o *corev1.Namespace) {
			if name, n := convertNamespace(o); name != o.Name || n.Name != o.Name || !maps.Equal(n.Labels, o.Labels) {
				t.Errorf("%s is namespace %s, %+v", data, name, n)
			}
		})
		as(data, func(o *appsv1.DaemonSet) {
			if d := convertDaemonSet(o); d.Stays != (o.DeletionTimestamp == nil) || d.Stays && d.Orphans {
				t.Errorf("%s is read as %+v", data, d)
			}
		})
		as(data, func(o *v1beta1.IPAddressPool) { convertPool(o); convertAnnouncedPool(o); convertPoolRanges(o) })
		as(data, func(o *v1beta1.BGPPeer) { convertSessions(o); convertRouter(o) })
		as(data, func(o *v1beta1.BGPAdvertisement) { convertBGPAdvertisement(o) })
		as(data, func(o *v1beta1.L2Advertisement) {
			if _, ad := convertL2Advertisement(o); len(ad.NodeSelectors) != len(o.Spec.NodeSelectors) {
				t.Errorf("%s has %d selectors", data, len(ad.NodeSelectors))
			}
		})
		as(data, func(o *networkingv1.ServiceCIDR) {
			_, networks := convertServiceNetworks(o)
			for _, p := range networks {
				if p != p.Masked() || !p.IsValid() {
					t.Errorf("%s has the network %s", data, p)
				}
			}
		})
		as(data, func(o *v1beta1.BFDProfile) { convertBFDProfile(o) })
		as(data, func(o *v1beta1.Community) { convertCommunity(o) })
		as(data, func(o *corev1.Event) { convertFinding(o) })
		as(data, func(o *corev1.Pod) { convertPod(o); convertGatedPod(o) })
	})
}

// as reads data as an object, if it is one.
func as[T any](data []byte, take func(*T)) {
	o := new(T)
	if json.Unmarshal(data, o) == nil {
		take(o)
	}
}
