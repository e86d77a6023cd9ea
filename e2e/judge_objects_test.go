package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

// objects writes what the cases are about to the API server.
type objects struct {
	kube   kubernetes.Interface
	world  cases.World
	serial uint16
}

const judgeNamespace = "test"

// put makes a case's Service and slice the only ones, but for the marker, and returns where the
// marker answers once they are known.
func (o *objects) put(t *testing.T, c judged) netip.AddrPort {
	t.Helper()
	ctx := t.Context()
	service, slice := c.objects(o.world)
	services, endpoints := o.kube.CoreV1().Services(judgeNamespace), o.kube.DiscoveryV1().EndpointSlices(judgeNamespace)
	for _, err := range []error{services.Delete(ctx, service.Name, metav1.DeleteOptions{}),
		endpoints.Delete(ctx, slice.Name, metav1.DeleteOptions{})} {
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
	}
	status := service.Status
	created, err := services.Create(ctx, service, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("Service: %v", err)
	}
	if created.Status = status; len(status.LoadBalancer.Ingress) > 0 {
		if _, err = services.UpdateStatus(ctx, created, metav1.UpdateOptions{}); err != nil {
			t.Fatalf("status: %v", err)
		}
	}
	if _, err := endpoints.Create(ctx, slice, metav1.CreateOptions{}); err != nil {
		t.Fatalf("slice: %v", err)
	}
	return o.mark(t)
}

// mark gives the marker another port. It answers there once a proxy knows it from its Service and
// its slice, of which each comes after what was written to the same kind before.
func (o *objects) mark(t *testing.T) netip.AddrPort {
	t.Helper()
	o.serial++
	addr := o.world.ClusterIP.Next()
	c := cases.Case{Service: func(_ cases.World, s *lb.Service) {
		s.Key.Name, s.Type, s.ClusterIPs, s.ExternalIPs, s.Ingress = "marker-"+strings.ToLower(string(o.world.Family)),
			lb.ClusterIP, []netip.Addr{addr}, nil, nil
		s.Ports = []lb.ServicePort{{Name: fmt.Sprint("m", o.serial), Protocol: lb.TCP, Port: 1000 + o.serial}}
	}, Backends: []cases.Backend{{At: "local", Ready: true, Serving: true}}}
	service, slice := judged{Case: c}.objects(o.world)
	slice.Name, slice.Labels[discoveryv1.LabelServiceName] = service.Name, service.Name
	slice.Ports = slice.Ports[:1]
	slice.Ports[0].Name = &service.Spec.Ports[0].Name
	services, endpoints := o.kube.CoreV1().Services(judgeNamespace), o.kube.DiscoveryV1().EndpointSlices(judgeNamespace)
	old, err := services.Get(t.Context(), service.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		if _, err = services.Create(t.Context(), service, metav1.CreateOptions{}); err == nil {
			_, err = endpoints.Create(t.Context(), slice, metav1.CreateOptions{})
		}
	} else if err == nil {
		old.Spec.Ports = service.Spec.Ports
		if _, err = services.Update(t.Context(), old, metav1.UpdateOptions{}); err == nil {
			_, err = endpoints.Update(t.Context(), slice, metav1.UpdateOptions{})
		}
	}
	if err != nil {
		t.Fatalf("marker: %v", err)
	}
	return netip.AddrPortFrom(addr, 1000+o.serial)
}

// putNode makes the node one of a zone.
func (o *objects) putNode(t *testing.T, zone string) {
	t.Helper()
	nodes := o.kube.CoreV1().Nodes()
	node, err := nodes.Get(t.Context(), cases.Here, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		node, err = nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: cases.Here}},
			metav1.CreateOptions{})
	}
	if err == nil {
		node.Labels = map[string]string{}
		if zone != "" {
			node.Labels[corev1.LabelTopologyZone] = zone
		}
		node, err = nodes.Update(t.Context(), node, metav1.UpdateOptions{})
	}
	if err == nil {
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: o.world.Node.String()}}
		_, err = nodes.UpdateStatus(t.Context(), node, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Fatalf("node: %v", err)
	}
}

// objects returns the case as Kubernetes has it.
func (c judged) objects(w cases.World) (*corev1.Service, *discoveryv1.EndpointSlice) {
	svc, all := c.Objects(w)
	service := toService(svc)
	slice := toSlice(all[0])
	if c.change != nil {
		c.change(w, service, slice)
	}
	return service, slice
}

// text are the case's objects in one line, to see whether two cases have the same. A Service that remembers its clients
// is the same for nobody.
func (c judged) text(w cases.World) string {
	service, slice := c.objects(w)
	if service.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		service.Name += c.Name
	}
	text, err := json.Marshal([]any{service, slice})
	if err != nil {
		panic(err) // of our own making
	}
	return string(text)
}

func toService(svc lb.Service) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: judgeNamespace, Name: svc.Key.Name}}
	s.Spec.Type = corev1.ServiceType(svc.Type)
	internal := corev1.ServiceInternalTrafficPolicy(svc.InternalPolicy)
	s.Spec.InternalTrafficPolicy = &internal
	external := svc.Type == lb.LoadBalancer || svc.Type == lb.NodePort
	allocate := slices.ContainsFunc(svc.Ports, func(p lb.ServicePort) bool { return p.NodePort != 0 })
	for _, p := range svc.Ports {
		port := corev1.ServicePort{Name: p.Name, Protocol: corev1.Protocol(p.Protocol), Port: int32(p.Port)}
		if external {
			port.NodePort = int32(p.NodePort)
		}
		s.Spec.Ports = append(s.Spec.Ports, port)
	}
	if svc.Type == lb.LoadBalancer {
		s.Spec.AllocateLoadBalancerNodePorts = &allocate
		for _, in := range svc.Ingress {
			entry := corev1.LoadBalancerIngress{IP: in.Addr.String()}
			if in.Mode != "" {
				mode := corev1.LoadBalancerIPMode(in.Mode)
				entry.IPMode = &mode
			}
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, entry)
		}
		for _, r := range svc.SourceRanges {
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, r.String())
		}
	}
	if external || len(svc.ExternalIPs) > 0 {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicy(svc.ExternalPolicy)
	}
	for _, a := range svc.ExternalIPs {
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, a.String())
	}
	for _, a := range svc.ClusterIPs {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, a.String())
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, corev1.IPFamily(lb.FamilyOf(a)))
	}
	policy := corev1.IPFamilyPolicySingleStack
	if len(svc.ClusterIPs) == 2 {
		policy = corev1.IPFamilyPolicyRequireDualStack
	}
	s.Spec.IPFamilyPolicy = &policy
	if len(s.Spec.ClusterIPs) > 0 {
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	}
	if svc.AffinityTimeout > 0 {
		seconds := int32(svc.AffinityTimeout / time.Second)
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	return s
}

func toSlice(in lb.Slice) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: judgeNamespace, Name: in.Key.Name,
			Labels: map[string]string{discoveryv1.LabelServiceName: in.Service.Name}},
		AddressType: discoveryv1.AddressType(in.Family),
	}
	for _, p := range in.Ports {
		protocol, port := corev1.Protocol(p.Protocol), int32(p.Port)
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &protocol, Port: &port})
	}
	for _, e := range in.Endpoints {
		to := discoveryv1.Endpoint{
			Addresses: []string{e.Addr.String()}, NodeName: &e.Node,
			Conditions: discoveryv1.EndpointConditions{Ready: &e.Ready, Serving: &e.Serving, Terminating: &e.Terminating},
		}
		if len(e.ForZones)+len(e.ForNodes) > 0 {
			to.Hints = &discoveryv1.EndpointHints{}
			for _, z := range e.ForZones {
				to.Hints.ForZones = append(to.Hints.ForZones, discoveryv1.ForZone{Name: z})
			}
			for _, n := range e.ForNodes {
				to.Hints.ForNodes = append(to.Hints.ForNodes, discoveryv1.ForNode{Name: n})
			}
		}
		s.Endpoints = append(s.Endpoints, to)
	}
	return s
}
