package kube

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// listPage is how many Services a request lists, so that a large cluster's do not come at once.
const listPage = 500

// EachService calls yield with each Service as it is stored now, as controllers read them.
func (s *Status) EachService(ctx context.Context, yield func(lb.Service)) error {
	options := metav1.ListOptions{Limit: listPage}
	for {
		list, err := s.core.Services(metav1.NamespaceAll).List(ctx, options)
		if err != nil {
			return fmt.Errorf("list Services: %w", err)
		}
		for i := range list.Items {
			_, service := convertRequestingService(&list.Items[i], false)
			yield(service)
		}
		if options.Continue = list.Continue; options.Continue == "" {
			return nil
		}
	}
}

// TakeBack removes Landfall's conditions and the annotation with the announcements from a Service,
// with finalizer also lb.FinalizerCleanup, and with addresses what the Service holds. Addresses
// that stay keep the annotation that says who assigned them.
func (s *Status) TakeBack(ctx context.Context, service lb.Service, finalizer, addresses bool) error {
	var patch statusPatch
	if service.Listed != nil {
		patch.Status.Conditions = append(patch.Status.Conditions, removedCondition(lb.ConditionExternalIPs))
	}
	if service.AsRequested.Type != "" {
		patch.Status.Conditions = append(patch.Status.Conditions, removedCondition(lb.ConditionAsRequested))
	}
	for _, c := range service.Conditions {
		patch.Status.Conditions = append(patch.Status.Conditions, removedCondition(c.Type))
	}
	if service.Announcements != "" {
		patch.Metadata.annotate(lb.AnnotationAnnouncements, "")
	}
	if finalizer {
		patch.Metadata.finalize(FinalizerRemoved)
	}
	if addresses {
		patch.Status.LoadBalancer = &patchedLoadBalancer{}
		for name := range service.AllocatedFrom {
			patch.Metadata.annotate(name, "")
		}
	}
	return s.patchService(ctx, service, patch)
}
