package kube

import (
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
)

// fakeKinds are the clients of client-go's fake clientset.
type fakeKinds struct{ kubernetes.Interface }

func (f fakeKinds) Services(namespace string) kind[*corev1.Service, *corev1.ServiceList] {
	return f.CoreV1().Services(namespace)
}

func (f fakeKinds) Nodes() kind[*corev1.Node, *corev1.NodeList] { return f.CoreV1().Nodes() }

func (f fakeKinds) Namespaces() kind[*corev1.Namespace, *corev1.NamespaceList] {
	return f.CoreV1().Namespaces()
}

func (f fakeKinds) Pods(namespace string) kind[*corev1.Pod, *corev1.PodList] {
	return f.CoreV1().Pods(namespace)
}

func (f fakeKinds) ConfigMaps(namespace string) kind[*corev1.ConfigMap, *corev1.ConfigMapList] {
	return f.CoreV1().ConfigMaps(namespace)
}

func (f fakeKinds) Events(namespace string) kind[*corev1.Event, *corev1.EventList] {
	return f.CoreV1().Events(namespace)
}

func (f fakeKinds) Leases(namespace string) kind[*coordinationv1.Lease, *coordinationv1.LeaseList] {
	return f.CoordinationV1().Leases(namespace)
}

func (f fakeKinds) Deployments(namespace string) kind[*appsv1.Deployment, *appsv1.DeploymentList] {
	return f.AppsV1().Deployments(namespace)
}

func (f fakeKinds) DaemonSets(namespace string) kind[*appsv1.DaemonSet, *appsv1.DaemonSetList] {
	return f.AppsV1().DaemonSets(namespace)
}

func (f fakeKinds) TokenReviews() creator[*authenticationv1.TokenReview] {
	return f.AuthenticationV1().TokenReviews()
}

func (f fakeKinds) SubjectAccessReviews() creator[*authorizationv1.SubjectAccessReview] {
	return f.AuthorizationV1().SubjectAccessReviews()
}
