package main

import (
	"context"
	"errors"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// writePools writes the status of each pool that differs from what it shows. Counts that it is too
// early for are due again later.
func (c *controller) writePools(ctx context.Context, p plan.Plan,
	pools map[string]lb.Pool) (again time.Duration, err error) {
	maps.DeleteFunc(c.poolWrites, func(name string, w poolWrite) bool {
		// Once the pool shows something else than before the write, it shows the write or what came
		// after.
		shown, ok := pools[name]
		return !ok || !reflect.DeepEqual(shown.Status, w.before)
	})
	maps.DeleteFunc(c.registries, func(name string, _ *registry) bool { _, ok := pools[name]; return !ok })
	early := countEvery - c.now().Sub(c.counted)
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(p.Pools)) {
		pool, status := pools[name], p.Pools[name].Status
		shown := pool.Status
		if w, ok := c.poolWrites[name]; ok {
			shown = w.written
		}
		status.Pending, status.Writer = shown.Pending, shown.Writer
		if _, ok := c.base(pool); ok {
			// All that the write leaves or leaves out counts as reserved by this controller from then on, so another
			// one must catch up before it changes that.
			status.Pending, status.Writer = c.openReservations(name), c.writer
		}
		if shows(shown, status) {
			continue
		}
		if early > 0 && showsConditions(shown, status) {
			again = early
			continue
		}
		c.counted = c.now()
		if err := c.writePool(ctx, pool, status); err != nil && !kube.IsNotFound(err) {
			failed = append(failed, err)
		}
	}
	return again, errors.Join(failed...)
}

// writePool writes a pool's status on the version on which the controller may reserve addresses, if
// there is one: then it may also reserve on the version that this makes.
func (c *controller) writePool(ctx context.Context, pool lb.Pool, status lb.PoolStatus) error {
	shown := pool
	base, ok := c.base(pool)
	if ok {
		pool.Version = base
		r := c.registries[pool.Name] // what the write leaves out may be gone, whether its answer comes or not
		r.reservations = slices.DeleteFunc(slices.Clone(r.reservations), func(have lb.PendingReservation) bool {
			return !slices.ContainsFunc(status.Pending, func(kept lb.PendingReservation) bool {
				return sameReservation(have, kept)
			})
		})
	}
	writeCtx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	version, err := c.status.Pool(writeCtx, pool, status)
	loop.Progress(ctx)
	c.metrics.wrote("pool", err)
	switch {
	case err == nil:
		if r := c.registries[pool.Name]; ok {
			r.version, r.reservations = version, status.Pending
		}
		c.reportPool(shown, status)
		c.poolWrites[pool.Name] = poolWrite{before: shown.Status, written: status}
	case ctx.Err() != nil, kube.IsConflict(err), kube.IsNotFound(err):
	default:
		c.log.Warn("cannot write the status of a pool; trying again", "pool", pool.Name, "error", err)
	}
	return err
}

// reportPool tells when a pool begins or ceases to hand out addresses or to have any; counts are no
// news.
func (c *controller) reportPool(pool lb.Pool, status lb.PoolStatus) {
	about := kube.PoolReference(pool)
	shown := pool.Status.Conditions
	if w, ok := c.poolWrites[pool.Name]; ok {
		shown = w.written.Conditions
	}
	for _, condition := range status.Conditions {
		i := slices.IndexFunc(shown, func(have lb.Condition) bool { return have.Type == condition.Type })
		before := i >= 0 && shown[i].Status
		switch ready := condition.Type == lb.ConditionReady; {
		case i >= 0 && before == condition.Status && (shown[i].Message == condition.Message || !ready):
		case condition.Status != ready && ready, condition.Status && condition.Type == plan.ConditionExhausted:
			c.log.Warn("the pool hands out nothing new", "pool", pool.Name, "reason", condition.Reason, "message",
				condition.Message)
			c.events.Warning(about, condition.Reason, condition.Message)
		case ready, condition.Type == plan.ConditionExhausted && before:
			c.log.Info("the pool hands out addresses", "pool", pool.Name)
			c.events.Normal(about, condition.Reason, condition.Message)
		}
	}
}

// shows reports whether have is what want says.
func shows(have, want lb.PoolStatus) bool {
	return have.AssignedIPv4 == want.AssignedIPv4 && have.AvailableIPv4 == want.AvailableIPv4 &&
		have.AssignedIPv6 == want.AssignedIPv6 && have.AvailableIPv6 == want.AvailableIPv6 &&
		have.QuarantinedIPv4 == want.QuarantinedIPv4 && have.QuarantinedIPv6 == want.QuarantinedIPv6 &&
		slices.Equal(have.Released, want.Released) && slices.Equal(have.Next, want.Next) &&
		slices.EqualFunc(have.Pending, want.Pending, sameReservation) &&
		!slices.ContainsFunc(want.Conditions, func(c lb.Condition) bool { return !slices.Contains(have.Conditions, c) })
}

// showsConditions reports whether all that differs are figures. It does not look at conditions that
// want does not have: they are others'.
func showsConditions(have, want lb.PoolStatus) bool {
	return !slices.ContainsFunc(want.Conditions, func(c lb.Condition) bool {
		return !slices.ContainsFunc(have.Conditions, func(h lb.Condition) bool {
			if c.Type == plan.ConditionExhausted {
				h.Message = c.Message
			}
			return h == c
		})
	})
}
