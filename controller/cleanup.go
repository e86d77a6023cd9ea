package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// Passes of a cleanup are this far apart, and it ends after so many that found nothing: speakers
	// that have not ended yet write their conditions again.
	cleanupEvery  = time.Second
	cleanupPasses = 3
	// A cleanup that takes longer has failed: pods take up to 30 s to end.
	cleanupTimeout = 2 * time.Minute
	// A Service that shows the annotation or the finalizer without a condition after so many passes that took it back is
	// written by somebody else: speakers and the controller write a condition along with it.
	maxTakenBack = 3
	// maxNamed is how many Services a line of the log names.
	maxNamed = 10
)

// services is what kube.Status offers a cleanup.
type services interface {
	EachService(ctx context.Context, yield func(lb.Service)) error
	TakeBack(ctx context.Context, service lb.Service, finalizer, addresses bool) error
}

// installation is what kube.Installation offers a cleanup.
type installation interface {
	Pods(context.Context) ([]kube.InstalledPod, error)
	Leader(context.Context) (holder, version string, err error)
	Delete(context.Context) error
}

// cleaner takes back what Landfall wrote to the Services of a class, and deletes what its programs
// created in their namespace.
type cleaner struct {
	services     services
	installation installation
	class        string
	// addresses has the addresses taken back too. Without it they stay, as the statuses are the only
	// record of who holds what: the next Landfall or MetalLB goes on with them.
	addresses bool
	log       *slog.Logger
	// takenBack are the Services from which the last pass took the annotation or the finalizer without a condition.
	takenBack map[lb.Key]takenBack
	// protected are the Services of other classes that carry the finalizer, as the last pass saw them.
	protected []lb.Key
}

// takenBack is what was taken from a Service, by so many passes.
type takenBack struct {
	passes                int
	annotation, finalizer bool
}

// run waits until Landfall has ended, and then takes back until nobody writes any more. It may be
// repeated, and ended at any time.
func (c *cleaner) run(ctx context.Context) error {
	if err := c.awaitEnd(ctx); err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	total := 0
	c.takenBack = map[lb.Key]takenBack{}
	for quiet := 0; quiet < cleanupPasses; {
		written, err := c.pass(ctx)
		switch total += written; {
		case err != nil:
			quiet = 0
			c.log.Warn("cannot clean up everything; trying again", "error", err)
		case written > 0:
			quiet = 0
		default:
			quiet++
		}
		if quiet == cleanupPasses {
			break
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				err = ctx.Err() // somebody interrupts
			} else if err == nil {
				err = errors.New("somebody goes on writing to them: are a controller and speakers of Landfall still running?")
			}
			return fmt.Errorf("clean up Services: %w", err)
		case <-time.After(cleanupEvery):
		}
	}
	for key, taken := range c.takenBack {
		if taken.passes > maxTakenBack {
			c.log.Warn("somebody else goes on writing to a Service what Landfall writes; remove it once that has ended",
				append([]any{"service", key}, taken.names()...)...)
		}
	}
	if n := len(c.protected); n > 0 {
		slices.SortFunc(c.protected, lb.Key.Compare)
		c.log.Warn("Services of another load balancer class carry Landfall's finalizer, and stay when they are deleted, "+
			"unless another Landfall serves that class; run the cleanup for their class", "services", n,
			"some", c.protected[:min(n, maxNamed)])
	}
	c.log.Info("took back what Landfall wrote to Services", "writes", total)
	return nil
}

// pass takes back what it finds, and returns how many Services it wrote that only Landfall writes. Leases and the
// ConfigMap go in each pass, as a speaker may have been about to write them.
func (c *cleaner) pass(ctx context.Context) (written int, err error) {
	var found []lb.Service
	c.protected = nil
	if err := c.services.EachService(ctx, func(s lb.Service) {
		if plan.Protected(&s) && !plan.Written(&s, c.class) {
			c.protected = append(c.protected, s.Key)
		}
		switch {
		case plan.Written(&s, c.class), plan.Orphaned(&s, c.class):
			found = append(found, s)
		case s.Listed != nil || s.AsRequested.Type != "": // these have no class: only they are taken back
			found = append(found, lb.Service{Key: s.Key, UID: s.UID, Listed: s.Listed, AsRequested: s.AsRequested})
		}
	}); err != nil {
		return 0, err
	}
	errs := make([]error, len(found)+1)
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, s := range found {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, writeTimeout)
			defer cancel()
			finalizer := plan.Protected(&s) || plan.Orphaned(&s, c.class)
			errs[i] = c.services.TakeBack(ctx, s, finalizer, c.addresses && plan.Written(&s, c.class))
			if kube.IsNotFound(errs[i]) || kube.IsConflict(errs[i]) {
				errs[i] = nil // it is gone, or created anew
			}
			return nil
		})
	}
	_ = group.Wait() // no task returns an error
	for i, s := range found {
		if errs[i] == nil && !c.writtenByOthers(s) {
			written++
		}
	}
	errs[len(found)] = c.installation.Delete(ctx)
	return written, errors.Join(errs...)
}

// writtenByOthers counts that a Service was taken back, and reports whether somebody else writes to it again and again.
func (c *cleaner) writtenByOthers(s lb.Service) bool {
	if len(s.Conditions) > 0 || s.Listed != nil || s.AsRequested.Type != "" {
		delete(c.takenBack, s.Key)
		return false
	}
	taken := takenBack{passes: c.takenBack[s.Key].passes + 1, annotation: s.Announcements != "", finalizer: s.Finalizer}
	c.takenBack[s.Key] = taken
	return taken.passes > maxTakenBack
}

// names names for the log what was taken.
func (t takenBack) names() (names []any) {
	if t.annotation {
		names = append(names, "annotation", lb.AnnotationAnnouncements)
	}
	if t.finalizer {
		names = append(names, "finalizer", lb.FinalizerCleanup)
	}
	return names
}
