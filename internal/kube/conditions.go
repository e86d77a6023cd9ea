package kube

import (
	"context"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Conditions is like Condition for several of them in one write; those that the Service shows
// already are left out.
func (s *Status) Conditions(ctx context.Context, service lb.Service,
	conditions ...lb.Condition) (wrote bool, err error) {
	var patches []any
	for _, c := range conditions {
		if !hasCondition(service.Conditions, c) {
			patches = append(patches, s.conditionPatch(service.Conditions, c))
		}
	}
	if len(patches) == 0 {
		return false, nil
	}
	return true, s.patchService(ctx, service, statusPatch{Status: patchedStatus{Conditions: patches}})
}
