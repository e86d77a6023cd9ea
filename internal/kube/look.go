package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// This file reads objects once, for a program that answers a question and ends.

// Denied is a request that the API server refuses this user, with the rule that would allow it.
type Denied struct {
	Verb, Group, Resource, Namespace string
	Err                              error
}

// Error says what is not allowed, and the rule that allows it.
func (d *Denied) Error() string {
	return fmt.Sprintf("%s; this rule allows it: %s", d.message(), d.Rule())
}

// message is the API server's own, which names the user.
func (d *Denied) message() string {
	var status apierrors.APIStatus
	if errors.As(d.Err, &status) && status.Status().Message != "" {
		return status.Status().Message
	}
	return d.Err.Error()
}

// Unwrap returns the API server's error.
func (d *Denied) Unwrap() error { return d.Err }

// Rule returns the RBAC rule that allows the request, in YAML on one line.
func (d *Denied) Rule() string {
	return fmt.Sprintf("{apiGroups: [%q], resources: [%q], verbs: [%q]}", d.Group, d.Resource, d.Verb)
}

// Unreachable is an API server that does not answer.
type Unreachable struct {
	Host string
	Err  error
}

// Error is one line.
func (u *Unreachable) Error() string {
	return fmt.Sprintf("the API server %s does not answer: %v", u.Host, u.Err)
}

// Unwrap returns the cause.
func (u *Unreachable) Unwrap() error { return u.Err }

// looked turns an error of a request into one of those above.
func (c *Client) looked(err error, verb, group, resource, namespace string) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsForbidden(err):
		return &Denied{Verb: verb, Group: group, Resource: resource, Namespace: namespace, Err: err}
	case errors.As(err, new(net.Error)), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return &Unreachable{Host: c.host, Err: cause(err)}
	}
	return fmt.Errorf("%s %s: %w", verb, resource, err)
}

// cause is what went wrong with a connection, without the URL.
func cause(err error) error {
	var asURL *url.Error
	if errors.As(err, &asURL) {
		err = asURL.Err
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return op
	}
	return err
}

// Server is what the API server says of itself.
type Server struct {
	Version string // such as v1.35.4
	// Now is the API server's time, to a second: this machine's clock may differ.
	Now time.Time
}

// Server asks the API server for its version and its time.
func (c *Client) Server(ctx context.Context) (Server, error) {
	base, _, err := rest.DefaultServerUrlFor(c.config)
	if err != nil {
		return Server{}, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return Server{}, err
	}
	response, err := c.http.Do(request)
	if err != nil {
		return Server{}, &Unreachable{Host: c.host, Err: cause(err)}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 1<<16))
	var version struct {
		GitVersion string `json:"gitVersion"`
	}
	switch {
	case err != nil:
		return Server{}, &Unreachable{Host: c.host, Err: err}
	case response.StatusCode == http.StatusUnauthorized:
		return Server{}, fmt.Errorf("the API server %s does not accept the credentials: %s", c.host, response.Status)
	case response.StatusCode != http.StatusOK:
		// Who may not see the version may see the rest.
	default:
		if err := yaml.Unmarshal(body, &version); err != nil {
			return Server{}, fmt.Errorf("the API server %s does not answer like one: %w", c.host, err)
		}
	}
	now, err := http.ParseTime(response.Header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return Server{Version: version.GitVersion, Now: now}, nil
}

// OneService reads a Service with all fields; found is false if there is none.
func (c *Client) OneService(ctx context.Context, key lb.Key) (s lb.Service, found bool, err error) {
	var o corev1.Service
	err = c.rest.core.Get().Namespace(key.Namespace).Resource("services").Name(key.Name).Do(ctx).Into(&o)
	if apierrors.IsNotFound(err) {
		return lb.Service{}, false, nil
	}
	if err != nil {
		return lb.Service{}, false, c.looked(err, "get", "", "services", key.Namespace)
	}
	return convertWholeService(&o), true, nil
}

// convertWholeService fills what any program reads.
func convertWholeService(o *corev1.Service) lb.Service {
	_, s := convertRequestingService(o, true)
	_, forwarded := convertForwardedService(o)
	s.Intruding, s.InternalPolicy = forwarded.Intruding, forwarded.InternalPolicy
	s.SourceRanges, s.InvalidRange = forwarded.SourceRanges, forwarded.InvalidRange
	s.HealthCheckNodePort, s.AffinityTimeout = forwarded.HealthCheckNodePort, forwarded.AffinityTimeout
	s.Weights, s.InvalidWeights = forwarded.Weights, forwarded.InvalidWeights
	s.Failover, s.Probe, s.InvalidProbe = forwarded.Failover, forwarded.Probe, forwarded.InvalidProbe
	s.Relay, s.RelayProxyProtocol = forwarded.Relay, forwarded.RelayProxyProtocol
	s.Scheduler, s.OnConflict = forwarded.Scheduler, o.Annotations[lb.AnnotationOnConflict]
	return s
}

// AllServices reads all Services, as speakers read them.
func (c *Client) AllServices(ctx context.Context) ([]lb.Service, error) {
	return list(ctx, c, c.rest.core, "", "services", metav1.ListOptions{}, &corev1.ServiceList{},
		func(l *corev1.ServiceList) []corev1.Service { return l.Items },
		func(o *corev1.Service) lb.Service { _, s := convertLabelledService(o); return s })
}

// ServicesNamed returns the Services of a name in all namespaces, in order.
func (c *Client) ServicesNamed(ctx context.Context, name string) ([]lb.Key, error) {
	named, err := list(ctx, c, c.rest.core, "", "services", metav1.ListOptions{FieldSelector: "metadata.name=" + name},
		&corev1.ServiceList{}, func(l *corev1.ServiceList) []corev1.Service { return l.Items },
		func(o *corev1.Service) lb.Key { return lb.Key{Namespace: o.Namespace, Name: o.Name} })
	named = slices.DeleteFunc(named, func(key lb.Key) bool { return key.Name != name })
	slices.SortFunc(named, lb.Key.Compare)
	return named, err
}

// ServicesAt returns the Services of type LoadBalancer whose status has an address, in order.
func (c *Client) ServicesAt(ctx context.Context, addr netip.Addr) ([]lb.Key, error) {
	services, err := c.AllServices(ctx)
	if err != nil {
		return nil, err
	}
	var holders []lb.Key
	for _, s := range services {
		if s.Type == lb.LoadBalancer && slices.ContainsFunc(s.Ingress, func(in lb.Ingress) bool { return in.Addr == addr }) {
			holders = append(holders, s.Key)
		}
	}
	slices.SortFunc(holders, lb.Key.Compare)
	return holders, nil
}

// SlicesOf reads the EndpointSlices of a Service.
func (c *Client) SlicesOf(ctx context.Context, service lb.Key) ([]lb.Slice, error) {
	options := metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=" + service.Name}
	return listIn(ctx, c, c.rest.discovery, "discovery.k8s.io", "endpointslices", service.Namespace, options,
		&discoveryv1.EndpointSliceList{},
		func(l *discoveryv1.EndpointSliceList) []discoveryv1.EndpointSlice { return l.Items }, convertSlice)
}

// AllPools reads the IPAddressPools. Nothing is an error here and below if the API server does not
// know the kind: installed is false.
func (c *Client) AllPools(ctx context.Context) (pools []lb.Pool, installed bool, err error) {
	pools, err = list(ctx, c, c.landfall, v1beta1.GroupVersion.Group, "ipaddresspools", metav1.ListOptions{},
		&v1beta1.IPAddressPoolList{}, func(l *v1beta1.IPAddressPoolList) []v1beta1.IPAddressPool { return l.Items },
		func(o *v1beta1.IPAddressPool) lb.Pool { _, p := convertPool(o); return p })
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	return pools, err == nil, err
}

// AllL2Advertisements reads the L2Advertisements.
func (c *Client) AllL2Advertisements(ctx context.Context) ([]lb.L2Advertisement, error) {
	return list(ctx, c, c.landfall, v1beta1.GroupVersion.Group, "l2advertisements", metav1.ListOptions{},
		&v1beta1.L2AdvertisementList{}, func(l *v1beta1.L2AdvertisementList) []v1beta1.L2Advertisement { return l.Items },
		func(o *v1beta1.L2Advertisement) lb.L2Advertisement { _, a := convertL2Advertisement(o); return a })
}

// AllBGPAdvertisements reads the BGPAdvertisements.
func (c *Client) AllBGPAdvertisements(ctx context.Context) ([]lb.BGPAdvertisement, error) {
	return list(ctx, c, c.landfall, v1beta1.GroupVersion.Group, "bgpadvertisements", metav1.ListOptions{},
		&v1beta1.BGPAdvertisementList{}, func(l *v1beta1.BGPAdvertisementList) []v1beta1.BGPAdvertisement { return l.Items },
		func(o *v1beta1.BGPAdvertisement) lb.BGPAdvertisement { _, a := convertBGPAdvertisement(o); return a })
}

// AllBGPPeers reads the BGPPeers.
func (c *Client) AllBGPPeers(ctx context.Context) ([]lb.Peer, error) {
	return list(ctx, c, c.landfall, v1beta1.GroupVersion.Group, "bgppeers", metav1.ListOptions{},
		&v1beta1.BGPPeerList{}, func(l *v1beta1.BGPPeerList) []v1beta1.BGPPeer { return l.Items },
		func(o *v1beta1.BGPPeer) lb.Peer { _, p := convertBGPPeer(o); return p })
}

// IsAbsent reports whether an error says that the API server does not have what was asked for.
func IsAbsent(err error) bool { return apierrors.IsNotFound(err) }

// NodeState is a Node with what its kubelet reports.
type NodeState struct {
	lb.Node
	// Ready is false if the node's kubelet does not report that it is; NotReady says why.
	Ready    bool
	NotReady string
	Kubelet  string // version
}

// AllNodes reads the Nodes.
func (c *Client) AllNodes(ctx context.Context) ([]NodeState, error) {
	return list(ctx, c, c.rest.core, "", "nodes", metav1.ListOptions{}, &corev1.NodeList{},
		func(l *corev1.NodeList) []corev1.Node { return l.Items }, func(o *corev1.Node) NodeState {
			_, n := convertNode(o)
			state := NodeState{Node: n, NotReady: "its kubelet has not reported yet", Kubelet: o.Status.NodeInfo.KubeletVersion}
			for _, condition := range o.Status.Conditions {
				if condition.Type == corev1.NodeReady {
					state.Ready = condition.Status == corev1.ConditionTrue
					state.NotReady = cmp.Or(condition.Message, condition.Reason)
				}
			}
			return state
		})
}

// PodState is one pod, with what a diagnosis reads.
type PodState struct {
	lb.Key
	Node, Phase string
	Labels      map[string]string
	Containers  []Container
}

// Container is one container of a pod.
type Container struct {
	Name, Image string
	// Command has the command and its arguments, as in the pod's specification.
	Command []string
	Ready   bool
	// Running is set while the process is there; Waiting says why it is not, such as
	// CrashLoopBackOff.
	Running  bool
	Waiting  string
	Restarts int
	Started  time.Time // of the process that is there; the zero time without one
}

// PodsWith reads the pods in a namespace, or in all if it is empty, that a label selector selects.
func (c *Client) PodsWith(ctx context.Context, namespace, selector string) ([]PodState, error) {
	return listIn(ctx, c, c.rest.core, "", "pods", namespace, metav1.ListOptions{LabelSelector: selector},
		&corev1.PodList{}, func(l *corev1.PodList) []corev1.Pod { return l.Items }, convertPod)
}

func convertPod(o *corev1.Pod) PodState {
	p := PodState{Key: lb.Key{Namespace: o.Namespace, Name: o.Name}, Node: o.Spec.NodeName, Phase: string(o.Status.Phase),
		Labels: o.Labels}
	for _, spec := range o.Spec.Containers {
		one := Container{Name: spec.Name, Image: spec.Image,
			Command: append(append([]string{}, spec.Command...), spec.Args...), Waiting: "it has not been started yet"}
		for _, status := range o.Status.ContainerStatuses {
			if status.Name != spec.Name {
				continue
			}
			one.Ready, one.Running, one.Restarts = status.Ready, status.State.Running != nil, int(status.RestartCount)
			switch state := status.State; {
			case state.Running != nil:
				one.Waiting, one.Started = "", state.Running.StartedAt.Time
			case state.Waiting != nil:
				one.Waiting = strings.TrimSuffix(state.Waiting.Reason+": "+state.Waiting.Message, ": ")
			case state.Terminated != nil:
				one.Waiting = fmt.Sprintf("ended with status %d", state.Terminated.ExitCode)
			}
		}
		p.Containers = append(p.Containers, one)
	}
	return p
}

// LeaseState is who holds a Lease.
type LeaseState struct {
	Holder  string
	Renewed time.Time
	// Duration is how long the Lease holds after it was renewed.
	Duration time.Duration
}

// OneLease reads a Lease; found is false if there is none.
func (c *Client) OneLease(ctx context.Context, key lb.Key) (state LeaseState, found bool, err error) {
	lease, err := c.core.Leases(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return LeaseState{}, false, nil
	}
	if err != nil {
		return LeaseState{}, false, c.looked(err, "get", "coordination.k8s.io", "leases", key.Namespace)
	}
	return leaseState(lease), true, nil
}

func leaseState(lease *coordinationv1.Lease) LeaseState {
	state := LeaseState{Holder: deref(lease.Spec.HolderIdentity),
		Duration: time.Duration(deref(lease.Spec.LeaseDurationSeconds)) * time.Second}
	if lease.Spec.RenewTime != nil {
		state.Renewed = lease.Spec.RenewTime.Time
	}
	return state
}

// NamespaceLabels reads the labels of a Namespace; none if it does not exist.
func (c *Client) NamespaceLabels(ctx context.Context, name string) (map[string]string, error) {
	o, err := c.core.Namespaces().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, c.looked(err, "get", "", "namespaces", "")
	}
	return o.Labels, nil
}

// RefusedPod says why the API server lately refused a pod of a DaemonSet in a namespace; "" if it did not.
func (c *Client) RefusedPod(ctx context.Context, namespace string) (string, error) {
	list, err := c.core.Events(namespace).List(ctx,
		metav1.ListOptions{FieldSelector: "involvedObject.kind=DaemonSet,reason=FailedCreate", ResourceVersion: "0"})
	if err != nil {
		return "", c.looked(err, "list", "", "events", namespace)
	}
	return refusedPod(list.Items), nil
}

func refusedPod(events []corev1.Event) string {
	if len(events) == 0 {
		return ""
	}
	latest := slices.MaxFunc(events, func(a, b corev1.Event) int { return a.LastTimestamp.Compare(b.LastTimestamp.Time) })
	_, why, _ := strings.Cut(latest.Message, "Error creating: ")
	return why
}

// ConfigMapValue reads one key of a ConfigMap; found is false without it.
func (c *Client) ConfigMapValue(ctx context.Context, key lb.Key, name string) (value string, found bool, err error) {
	o, err := c.core.ConfigMaps(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, c.looked(err, "get", "", "configmaps", key.Namespace)
	}
	value, found = o.Data[name]
	return value, found, nil
}

func list[L runtime.Object, O, V any](ctx context.Context, c *Client, client rest.Interface, group, resource string,
	options metav1.ListOptions, into L, items func(L) []O, convert func(*O) V) ([]V, error) {
	return listIn(ctx, c, client, group, resource, "", options, into, items, convert)
}

func listIn[L runtime.Object, O, V any](ctx context.Context, c *Client, client rest.Interface,
	group, resource, namespace string, options metav1.ListOptions, into L, items func(L) []O,
	convert func(*O) V) ([]V, error) {
	options.ResourceVersion = "0" // what the API server holds in memory is fresh enough, and cheap
	request := client.Get().Resource(resource).VersionedParams(&options, metav1.ParameterCodec).MaxRetries(0)
	if namespace != "" {
		request = request.Namespace(namespace)
	}
	if err := request.Do(ctx).Into(into); err != nil {
		return nil, c.looked(err, "list", group, resource, namespace)
	}
	objects := items(into)
	converted := make([]V, len(objects))
	for i := range objects {
		converted[i] = convert(&objects[i])
	}
	return converted, nil
}
