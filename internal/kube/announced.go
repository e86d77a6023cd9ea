package kube

import (
	"context"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Announced writes whether and from where the addresses of the Service are announced: the
// conditions Announced and Serving, and the annotation with the same as data. All go into one patch
// of the subresource status, which may change annotations too, so a change is one write and one
// event of watches. It reports whether it wrote: what the Service shows already is not written.
// Writers of other conditions are not disturbed, so it takes no lock on the object's version; a
// Service of that name that was created anew is not touched.
func (s *Status) Announced(ctx context.Context, service lb.Service, a lb.AnnouncedStatus) (wrote bool, err error) {
	if a.ShownBy(service) {
		return false, nil
	}
	var patch statusPatch
	for _, c := range []lb.Condition{a.Condition, lb.Serving(a.Condition)} {
		if !hasCondition(service.Conditions, c) {
			patch.Status.Conditions = append(patch.Status.Conditions, s.conditionPatch(service.Conditions, c))
		}
	}
	if service.Announcements != a.Announcements {
		patch.Metadata.annotate(lb.AnnotationAnnouncements, a.Announcements)
	}
	return true, s.patchService(ctx, service, patch)
}
