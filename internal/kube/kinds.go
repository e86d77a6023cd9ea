package kube

import (
	"context"
	"fmt"
	"net/http"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/gentype"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
)

// kinds are the clients of the built-in kinds that Landfall's programs use. client-go's clientset has
// those of all kinds: 9 MB of a program's file, of which 5 MiB are resident, and 1 MiB of other memory.
type kinds interface {
	Services(namespace string) kind[*corev1.Service, *corev1.ServiceList]
	Nodes() kind[*corev1.Node, *corev1.NodeList]
	Namespaces() kind[*corev1.Namespace, *corev1.NamespaceList]
	Pods(namespace string) kind[*corev1.Pod, *corev1.PodList]
	ConfigMaps(namespace string) kind[*corev1.ConfigMap, *corev1.ConfigMapList]
	Events(namespace string) kind[*corev1.Event, *corev1.EventList]
	Leases(namespace string) kind[*coordinationv1.Lease, *coordinationv1.LeaseList]
	Deployments(namespace string) kind[*appsv1.Deployment, *appsv1.DeploymentList]
	DaemonSets(namespace string) kind[*appsv1.DaemonSet, *appsv1.DaemonSetList]
	TokenReviews() creator[*authenticationv1.TokenReview]
	SubjectAccessReviews() creator[*authorizationv1.SubjectAccessReview]
}

// kind is the client of one kind in one namespace.
type kind[O, L any] interface {
	creator[O]
	Get(ctx context.Context, name string, options metav1.GetOptions) (O, error)
	List(ctx context.Context, options metav1.ListOptions) (L, error)
	Update(ctx context.Context, object O, options metav1.UpdateOptions) (O, error)
	Patch(ctx context.Context, name string, patch types.PatchType, body []byte, options metav1.PatchOptions,
		subresources ...string) (O, error)
	Delete(ctx context.Context, name string, options metav1.DeleteOptions) error
}

// creator is the client of a kind of which objects are only created.
type creator[O any] interface {
	Create(ctx context.Context, object O, options metav1.CreateOptions) (O, error)
}

// restKinds are the REST clients of each API group.
type restKinds struct {
	core, apps, authentication, authorization, coordination, discovery, networking rest.Interface
}

// scheme knows the kinds of these groups.
var scheme = newScheme()

// parameters encodes options of requests.
var parameters = runtime.NewParameterCodec(scheme)

func newScheme() *runtime.Scheme {
	s := runtime.NewScheme()
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	for _, add := range []func(*runtime.Scheme) error{appsv1.AddToScheme, authenticationv1.AddToScheme,
		authorizationv1.AddToScheme, coordinationv1.AddToScheme, corev1.AddToScheme, discoveryv1.AddToScheme,
		networkingv1.AddToScheme} {
		if err := add(s); err != nil {
			panic(fmt.Errorf("register Kubernetes' types: %w", err)) // two types of one name
		}
	}
	return s
}

// newKinds returns clients that share a limit of requests.
func newKinds(config *rest.Config, httpClient *http.Client) (*restKinds, error) {
	config = rest.CopyConfig(config)
	config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(config.QPS, config.Burst)
	config.NegotiatedSerializer = rest.CodecFactoryForGeneratedClient(scheme, serializer.NewCodecFactory(scheme)).
		WithoutConversion()
	var k restKinds
	for _, group := range []struct {
		client  *rest.Interface
		version schema.GroupVersion
	}{
		{&k.core, corev1.SchemeGroupVersion}, {&k.apps, appsv1.SchemeGroupVersion},
		{&k.authentication, authenticationv1.SchemeGroupVersion}, {&k.authorization, authorizationv1.SchemeGroupVersion},
		{&k.coordination, coordinationv1.SchemeGroupVersion}, {&k.discovery, discoveryv1.SchemeGroupVersion},
		{&k.networking, networkingv1.SchemeGroupVersion},
	} {
		config.GroupVersion, config.APIPath = &group.version, "/apis"
		if group.version.Group == "" {
			config.APIPath = "/api"
		}
		client, err := rest.RESTClientForConfigAndClient(config, httpClient)
		if err != nil {
			return nil, err
		}
		*group.client = client
	}
	return &k, nil
}

// of returns the client of a kind.
func of[O, L any, PO interface {
	*O
	runtime.Object
	metav1.Object
}, PL interface {
	*L
	runtime.Object
}](client rest.Interface, resource, namespace string) kind[PO, PL] {
	return gentype.NewClientWithList[PO, PL](resource, client, parameters, namespace, func() PO { return new(O) },
		func() PL { return new(L) })
}

func (k *restKinds) Services(namespace string) kind[*corev1.Service, *corev1.ServiceList] {
	return of[corev1.Service, corev1.ServiceList](k.core, "services", namespace)
}

func (k *restKinds) Nodes() kind[*corev1.Node, *corev1.NodeList] {
	return of[corev1.Node, corev1.NodeList](k.core, "nodes", "")
}

func (k *restKinds) Namespaces() kind[*corev1.Namespace, *corev1.NamespaceList] {
	return of[corev1.Namespace, corev1.NamespaceList](k.core, "namespaces", "")
}

func (k *restKinds) Pods(namespace string) kind[*corev1.Pod, *corev1.PodList] {
	return of[corev1.Pod, corev1.PodList](k.core, "pods", namespace)
}

func (k *restKinds) ConfigMaps(namespace string) kind[*corev1.ConfigMap, *corev1.ConfigMapList] {
	return of[corev1.ConfigMap, corev1.ConfigMapList](k.core, "configmaps", namespace)
}

func (k *restKinds) Events(namespace string) kind[*corev1.Event, *corev1.EventList] {
	return of[corev1.Event, corev1.EventList](k.core, "events", namespace)
}

func (k *restKinds) Leases(namespace string) kind[*coordinationv1.Lease, *coordinationv1.LeaseList] {
	return of[coordinationv1.Lease, coordinationv1.LeaseList](k.coordination, "leases", namespace)
}

func (k *restKinds) Deployments(namespace string) kind[*appsv1.Deployment, *appsv1.DeploymentList] {
	return of[appsv1.Deployment, appsv1.DeploymentList](k.apps, "deployments", namespace)
}

func (k *restKinds) DaemonSets(namespace string) kind[*appsv1.DaemonSet, *appsv1.DaemonSetList] {
	return of[appsv1.DaemonSet, appsv1.DaemonSetList](k.apps, "daemonsets", namespace)
}

func (k *restKinds) TokenReviews() creator[*authenticationv1.TokenReview] {
	return gentype.NewClient("tokenreviews", k.authentication, parameters, "",
		func() *authenticationv1.TokenReview { return new(authenticationv1.TokenReview) })
}

func (k *restKinds) SubjectAccessReviews() creator[*authorizationv1.SubjectAccessReview] {
	return gentype.NewClient("subjectaccessreviews", k.authorization, parameters, "",
		func() *authorizationv1.SubjectAccessReview { return new(authorizationv1.SubjectAccessReview) })
}
