package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	namespace = "bench"
	target    = "target"
	// sentinels are Services spread evenly among all others, which answer: a start is over when all of
	// them do.
	sentinels = 20
)

// fleet is the Services of a run: the one that is watched, and many others of two endpoints each.
type fleet struct {
	lab       *lab.Lab
	size      int
	addresses map[string]netip.AddrPort // cluster IP and port of the target and the sentinels
	serial    atomic.Int32
}

func newFleet(l *lab.Lab) *fleet { return &fleet{lab: l, addresses: map[string]netip.AddrPort{}} }

// podA and podB are the pods that answer for the target.
const (
	podA = "pod-a"
	podB = "pod-b"
)

func (f *fleet) podAddress(name string) string {
	for _, p := range f.lab.Cluster().Pods {
		if p.Name == name {
			return p.Addr.String()
		}
	}
	return ""
}

func endpoint(address, node string) discoveryv1.Endpoint {
	yes, no := true, false
	return discoveryv1.Endpoint{Addresses: []string{address}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no}}
}

// create makes a Service and its slice, the slice first, so that the Service has endpoints from its
// first moment.
func (f *fleet) create(ctx context.Context, name string, endpoints ...discoveryv1.Endpoint) (netip.AddrPort, error) {
	if err := f.createSlice(ctx, name, endpoints...); err != nil {
		return netip.AddrPort{}, err
	}
	return f.createService(ctx, name)
}

func (f *fleet) createSlice(ctx context.Context, name string, endpoints ...discoveryv1.Endpoint) error {
	return f.createSliceAt(ctx, name, 80, endpoints...)
}

func (f *fleet) createSliceAt(ctx context.Context, name string, port int32, endpoints ...discoveryv1.Endpoint) error {
	_, err := f.lab.Kube().DiscoveryV1().EndpointSlices(namespace).Create(ctx, newSlice(name, port, endpoints...),
		metav1.CreateOptions{})
	return err
}

// newSlice returns the slice of a Service.
func newSlice(name string, port int32, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	protocol, portName := corev1.ProtocolTCP, ""
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: endpoints,
		Ports: []discoveryv1.EndpointPort{{Name: &portName, Protocol: &protocol, Port: &port}},
	}
}

func (f *fleet) createService(ctx context.Context, name string) (netip.AddrPort, error) {
	service, err := f.lab.Kube().CoreV1().Services(namespace).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(service.Spec.ClusterIP + ":80")
}

func (f *fleet) remove(ctx context.Context, name string) error {
	if err := f.lab.Kube().CoreV1().Services(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		return err
	}
	return f.lab.Kube().DiscoveryV1().EndpointSlices(namespace).Delete(ctx, name, metav1.DeleteOptions{})
}

func (f *fleet) createTarget(ctx context.Context) error {
	_, err := f.lab.Kube().CoreV1().Namespaces().Create(ctx,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	f.addresses[target], err = f.create(ctx, target, endpoint(f.podAddress(podA), churnNode))
	return err
}

// grow creates Services until there are n, the target among them.
func (f *fleet) grow(ctx context.Context, n int) error {
	progress(fmt.Sprintf("creating Services: %d to %d", f.size, n))
	etcd := &store{client: f.lab.HTTPClient(f.lab.Cluster().Nodes[0].Name)}
	etcd.client.Timeout = limit
	for i := f.size; i < n-1; i++ {
		clusterIP := netip.AddrFrom4([4]byte{10, 111, byte(i / 250), byte(1 + i%250)})
		if err := etcd.putService(filler(i), clusterIP, f.stranger(i, 0), f.stranger(i, 1)); err != nil {
			return err
		}
	}
	if err := etcd.write(ctx); err != nil {
		return err
	}
	f.size = max(f.size, n-1)
	return f.placeSentinels(ctx)
}

// placeSentinels gives some of the others endpoints that answer.
func (f *fleet) placeSentinels(ctx context.Context) error {
	for i := range min(sentinels, f.size) {
		name := filler(i * f.size / sentinels)
		service, err := f.lab.Kube().CoreV1().Services(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if f.addresses[name], err = netip.ParseAddrPort(service.Spec.ClusterIP + ":80"); err != nil {
			return err
		}
		if err := f.point(ctx, name, endpoint(f.podAddress(podA), churnNode),
			endpoint(f.podAddress(podB), churnNode)); err != nil {
			return err
		}
	}
	return nil
}

func filler(i int) string { return fmt.Sprintf("filler-%05d", i) }

// stranger is an endpoint that no packet is sent to.
func (f *fleet) stranger(i, k int) discoveryv1.Endpoint {
	return endpoint(fmt.Sprintf("10.%d.%d.%d", 200+k, i/250, 1+i%250), bareNode)
}

// point gives a Service other endpoints.
func (f *fleet) point(ctx context.Context, name string, endpoints ...discoveryv1.Endpoint) error {
	patch, err := json.Marshal(map[string]any{"endpoints": endpoints})
	if err != nil {
		return err
	}
	_, err = f.lab.Kube().DiscoveryV1().EndpointSlices(namespace).Patch(ctx, name, types.MergePatchType, patch,
		metav1.PatchOptions{})
	return err
}

// burst changes one endpoint of each of n others.
func (f *fleet) burst(ctx context.Context, n int) error {
	var g errgroup.Group
	g.SetLimit(32)
	k := 2 + int(f.serial.Add(1))%40
	for i := range n {
		i := 1 + i // not the first, which is a sentinel
		if _, sentinel := f.addresses[filler(i)]; sentinel {
			continue
		}
		g.Go(func() error { return f.point(ctx, filler(i), f.stranger(i, 0), f.stranger(i, k)) })
	}
	return g.Wait()
}
