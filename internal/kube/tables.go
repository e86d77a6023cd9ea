package kube

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Services watches the Services that match labelSelector (all if empty). changed is called for each that differs in more than its version.
func Services(c *Client, labelSelector string, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	c.register(resource{client: c.coreREST.CoreV1REST(), name: "services", example: &corev1.Service{}, labelSelector: labelSelector},
		objects[lb.Key, lb.Service, *corev1.Service]{table, convertService})
	return table
}

// LabelledServices watches all Services, with their labels.
func LabelledServices(c *Client, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	c.register(resource{client: c.coreREST.CoreV1REST(), name: "services", example: &corev1.Service{}},
		objects[lb.Key, lb.Service, *corev1.Service]{table, convertLabelledService})
	return table
}

// RequestingServices watches all Services, also with what only the assignment of addresses needs. With metallb, MetalLB's annotations
// count where Landfall's own are not set.
func RequestingServices(c *Client, metallb bool, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	c.register(resource{client: c.coreREST.CoreV1REST(), name: "services", example: &corev1.Service{}},
		objects[lb.Key, lb.Service, *corev1.Service]{table, func(o *corev1.Service) (lb.Key, lb.Service) { return convertRequestingService(o, metallb) }})
	return table
}

// Namespaces watches the Namespaces.
func Namespaces(c *Client, changed func(name string)) *Table[string, lb.Namespace] {
	table := newTable[string, lb.Namespace](nil, changed)
	c.register(resource{client: c.coreREST.CoreV1REST(), name: "namespaces", example: &corev1.Namespace{}},
		objects[string, lb.Namespace, *corev1.Namespace]{table, convertNamespace})
	return table
}

// Nodes watches the Node called name, or all Nodes if it is empty.
func Nodes(c *Client, name string, changed func(name string)) *Table[string, lb.Node] {
	table := newTable[string, lb.Node](nil, changed)
	r := resource{client: c.coreREST.CoreV1REST(), name: "nodes", example: &corev1.Node{}}
	if name != "" {
		r.fieldSelector = fields.OneTermEqualSelector("metadata.name", name).String()
	}
	c.register(r, objects[string, lb.Node, *corev1.Node]{table, convertNode})
	return table
}

// Pools watches the IPAddressPools.
func Pools(c *Client, changed func(name string)) *Table[string, lb.Pool] {
	table := newTable[string, lb.Pool](nil, changed)
	c.register(resource{client: c.landfall, name: "ipaddresspools", example: &v1beta1.IPAddressPool{}},
		objects[string, lb.Pool, *v1beta1.IPAddressPool]{table, convertPool})
	return table
}

// L2Advertisements watches the L2Advertisements.
func L2Advertisements(c *Client, changed func(name string)) *Table[string, lb.L2Advertisement] {
	table := newTable[string, lb.L2Advertisement](nil, changed)
	c.register(resource{client: c.landfall, name: "l2advertisements", example: &v1beta1.L2Advertisement{}},
		objects[string, lb.L2Advertisement, *v1beta1.L2Advertisement]{table, convertL2Advertisement})
	return table
}

// Slices watches the EndpointSlices of all Services that are not headless, by Service. changed gets the Service's key.
func Slices(c *Client, changed func(service lb.Key)) *Table[lb.Key, []lb.Slice] {
	table := newTable[lb.Key, []lb.Slice](nil, changed)
	c.register(resource{
		client: c.coreREST.DiscoveryV1REST(), name: "endpointslices", example: &discoveryv1.EndpointSlice{},
		labelSelector: "!service.kubernetes.io/headless," + discoveryv1.LabelServiceName,
	}, &sliceStore{table: table, services: map[lb.Key]map[lb.Key]lb.Slice{}, owner: map[lb.Key]lb.Key{}})
	return table
}

// sliceStore is the store behind the table of EndpointSlices, which groups them by Service. The reflector calls it from one goroutine.
type sliceStore struct {
	table    *Table[lb.Key, []lb.Slice]
	services map[lb.Key]map[lb.Key]lb.Slice // by Service, then by the slice's own key
	owner    map[lb.Key]lb.Key              // from the slice to its Service, as its label can change
}

func (s *sliceStore) Add(obj any) error {
	slice := convertSlice(obj.(*discoveryv1.EndpointSlice))
	before, had := s.owner[slice.Key]
	if had && before != slice.Service {
		s.remove(slice.Key)
		s.publish(before)
	}
	s.insert(slice)
	s.publish(slice.Service)
	return nil
}

func (s *sliceStore) Update(obj any) error { return s.Add(obj) }

func (s *sliceStore) Delete(obj any) error {
	key := keyOf(obj.(*discoveryv1.EndpointSlice))
	if service, ok := s.owner[key]; ok {
		s.remove(key)
		s.publish(service)
	}
	return nil
}

func (s *sliceStore) Replace(list []any, _ string) error {
	clear(s.services)
	clear(s.owner)
	for _, obj := range list {
		s.insert(convertSlice(obj.(*discoveryv1.EndpointSlice)))
	}
	values := make(map[lb.Key][]lb.Slice, len(s.services))
	for service := range s.services {
		values[service] = s.of(service)
	}
	s.table.replace(values)
	return nil
}

func (s *sliceStore) Resync() error { return nil }

func (s *sliceStore) insert(slice lb.Slice) {
	if s.services[slice.Service] == nil {
		s.services[slice.Service] = map[lb.Key]lb.Slice{}
	}
	s.services[slice.Service][slice.Key] = slice
	s.owner[slice.Key] = slice.Service
}

func (s *sliceStore) remove(key lb.Key) {
	service := s.owner[key]
	delete(s.owner, key)
	delete(s.services[service], key)
	if len(s.services[service]) == 0 {
		delete(s.services, service)
	}
}

// of returns the slices of a Service in a stable order.
func (s *sliceStore) of(service lb.Key) []lb.Slice {
	return slices.SortedFunc(maps.Values(s.services[service]), func(a, b lb.Slice) int { return a.Key.Compare(b.Key) })
}

func (s *sliceStore) publish(service lb.Key) {
	of := s.of(service)
	s.table.put(service, of, len(of) > 0)
}
