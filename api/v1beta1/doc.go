// Package v1beta1 holds the custom resources of API group landfall.dev.
//
// All kinds are cluster-scoped: addresses belong to the cluster, and an object cannot be overlooked
// for being in the wrong namespace.
//
// +kubebuilder:object:generate=true
// +groupName=landfall.dev
package v1beta1
