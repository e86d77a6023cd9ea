package kube

import (
	"context"

	"github.com/landfall-lb/landfall/internal/lb"
)

// AsRequested replaces lb.ConditionAsRequested of a Service; a condition without a type takes it away. It names no
// version of the Service: writers of other conditions are not disturbed, and the next writer of this one sees what
// is there. A Service of that name that was created anew is not touched.
func (s *Status) AsRequested(ctx context.Context, service lb.Service, c lb.Condition) error {
	written := removedCondition(lb.ConditionAsRequested)
	if c.Type != "" {
		// The time goes along each time the condition is new: without it, the API server refuses one that is not there.
		written = s.conditionPatch([]lb.Condition{service.AsRequested}, c)
	}
	return s.patchService(ctx, service, statusPatch{Status: patchedStatus{Conditions: []any{written}}})
}
