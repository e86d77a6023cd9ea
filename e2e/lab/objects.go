package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
	applydiscovery "k8s.io/client-go/applyconfigurations/discovery/v1"
)

// fieldManager is who the lab is to the API server.
const fieldManager = "landfall-lab"

// sliceManager is the value of the label that says who writes an EndpointSlice.
const sliceManager = fieldManager + ".landfall.dev"

// createObjects creates the Nodes and Services of the description.
func (l *Lab) createObjects(ctx context.Context) error {
	for _, n := range l.cluster.Nodes {
		if err := l.createNode(ctx, n); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	for _, s := range l.cluster.Services {
		if err := l.AddService(ctx, s); err != nil {
			return err
		}
	}
	// The API server is ready before it has made its own Service.
	return WaitFor(ctx, l.progress, "default/kubernetes", 20*time.Second, func(ctx context.Context) error {
		if _, err := l.kube.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{}); err != nil {
			return err
		}
		_, err := l.kube.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
		return err
	})
}

func (l *Lab) createNode(ctx context.Context, n Node) error {
	labels := map[string]string{"kubernetes.io/hostname": n.Name, "kubernetes.io/os": "linux"}
	var taints []corev1.Taint
	if n.ControlPlane {
		// As kubeadm does it: no VIP is announced from there.
		labels["node-role.kubernetes.io/control-plane"] = ""
		labels["node.kubernetes.io/exclude-from-external-load-balancers"] = ""
		taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}
	}
	maps.Copy(labels, n.Labels)
	nodes := l.kube.CoreV1().Nodes()
	node, err := nodes.Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: labels},
		Spec: corev1.NodeSpec{PodCIDR: l.cluster.podCIDR(n).Masked().String(),
			PodCIDRs: strings.Split(joined(l.cluster.prefixes(l.cluster.podCIDR(n))), ","), Taints: taints},
	}, metav1.CreateOptions{FieldManager: fieldManager})
	if err != nil {
		return err
	}
	// The API server marks a new Node as not ready, for a node controller to clear, which the lab does
	// not have.
	node.Spec.Taints = taints
	if node, err = nodes.Update(ctx, node, metav1.UpdateOptions{FieldManager: fieldManager}); err != nil {
		return err
	}
	for _, addr := range l.cluster.Addresses(n.Addr) {
		node.Status.Addresses = append(node.Status.Addresses,
			corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr.String()})
	}
	node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeHostName, Address: n.Name})
	node.Status.Conditions = []corev1.NodeCondition{{
		Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "the lab says so",
		LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now(),
	}}
	_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{FieldManager: fieldManager})
	return err
}

// RemoveNode deletes the Node object of a node. Its programs and pods stay, for the caller to end.
func (l *Lab) RemoveNode(ctx context.Context, name string) error {
	return l.kube.CoreV1().Nodes().Delete(ctx, name, metav1.DeleteOptions{})
}

// AddNode creates the object again, after [Lab.RemoveNode].
func (l *Lab) AddNode(ctx context.Context, name string) error {
	n, ok := l.nodes[name]
	if !ok {
		return fmt.Errorf("no node %q", name)
	}
	return l.createNode(ctx, n)
}

// AddService creates a Service, and its EndpointSlice from the pods of its app.
func (l *Lab) AddService(ctx context.Context, s Service) error {
	object := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, Annotations: s.Annotations},
		Spec: corev1.ServiceSpec{
			Type:                  corev1.ServiceType(s.Type),
			ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicy(s.ExternalTrafficPolicy),
			IPFamilies:            s.IPFamilies,
		},
	}
	if s.App != "" {
		object.Spec.Selector = map[string]string{"run": s.App}
	}
	if len(s.IPFamilies) == 2 {
		object.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyRequireDualStack)
	}
	if s.Affinity {
		object.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	if s.ClusterIP.IsValid() {
		object.Spec.ClusterIP = s.ClusterIP.String()
	}
	for _, p := range s.Ports {
		object.Spec.Ports = append(object.Spec.Ports, corev1.ServicePort{
			Name: p.Name, Protocol: corev1.Protocol(p.Protocol), Port: int32(p.Port),
			TargetPort: intstr.FromInt32(int32(p.target())), NodePort: int32(p.NodePort),
		})
	}
	if err := l.ensureNamespace(ctx, s.Namespace); err != nil {
		return err
	}
	if _, err := l.kube.CoreV1().Services(s.Namespace).Create(ctx, object,
		metav1.CreateOptions{FieldManager: fieldManager}); err != nil {
		return fmt.Errorf("service %s/%s: %w", s.Namespace, s.Name, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.services[s.Namespace+"/"+s.Name] = s
	return l.writeSlice(ctx, s)
}

// RemoveService deletes a Service that [Lab.AddService] created, with its EndpointSlice.
func (l *Lab) RemoveService(ctx context.Context, namespace, name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.services, namespace+"/"+name)
	return errors.Join(
		l.kube.CoreV1().Services(namespace).Delete(ctx, name, metav1.DeleteOptions{}),
		l.kube.DiscoveryV1().EndpointSlices(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{
			LabelSelector: discoveryv1.LabelServiceName + "=" + name + "," + discoveryv1.LabelManagedBy + "=" + sliceManager,
		}))
}

func (l *Lab) ensureNamespace(ctx context.Context, name string) error {
	_, err := l.kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{FieldManager: fieldManager})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// writeSlices writes the EndpointSlices of all Services that select app. The caller holds l.mu.
func (l *Lab) writeSlices(ctx context.Context, app string) error {
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(l.services)) {
		if s := l.services[key]; s.App == app && app != "" {
			errs = append(errs, l.writeSlice(ctx, s))
		}
	}
	return errors.Join(errs...)
}

// writeSlice writes what the endpoint controller would: a slice for each family, with all pods of
// the Service's app. The caller holds l.mu.
func (l *Lab) writeSlice(ctx context.Context, s Service) error {
	if s.App == "" {
		return nil
	}
	var errs []error
	for _, family := range s.families() {
		errs = append(errs, l.writeSliceOf(ctx, s, family))
	}
	return errors.Join(errs...)
}

func (l *Lab) writeSliceOf(ctx context.Context, s Service, family corev1.IPFamily) error {
	slice := applydiscovery.EndpointSlice(sliceName(s.Name, family), s.Namespace).
		WithLabels(map[string]string{discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: sliceManager}).
		WithAddressType(discoveryv1.AddressType(family))
	for _, p := range s.Ports {
		slice.WithPorts(
			applydiscovery.EndpointPort().WithName(p.Name).WithProtocol(corev1.Protocol(p.protocol())).WithPort(
				int32(p.target())))
	}
	for _, name := range slices.Sorted(maps.Keys(l.pods)) {
		pod := l.pods[name]
		if pod.App != s.App {
			continue
		}
		slice.WithEndpoints(applydiscovery.Endpoint().WithAddresses(pod.address(family).String()).WithNodeName(pod.Node).
			WithTargetRef(applycore.ObjectReference().WithKind("Pod").WithNamespace(s.Namespace).WithName(pod.Name)).
			WithConditions(applydiscovery.EndpointConditions().WithReady(pod.conditions.Ready).
				WithServing(pod.conditions.Serving).WithTerminating(pod.conditions.Terminating)))
	}
	_, err := l.kube.DiscoveryV1().EndpointSlices(s.Namespace).Apply(ctx, slice,
		metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	if err != nil {
		return fmt.Errorf("endpoints of %s/%s: %w", s.Namespace, s.Name, err)
	}
	return nil
}

func sliceName(service string, family corev1.IPFamily) string {
	return service + "-lab-" + strings.ToLower(string(family))
}

// families returns the families that the Service's cluster IPs are of.
func (s Service) families() []corev1.IPFamily {
	if len(s.IPFamilies) == 0 {
		return []corev1.IPFamily{corev1.IPv4Protocol}
	}
	return s.IPFamilies
}

func (p Port) protocol() string { return cmp.Or(p.Protocol, "TCP") }

func (p Port) target() uint16 { return cmp.Or(p.Target, p.Port) }
