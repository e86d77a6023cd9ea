package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// change is a Service with what it shall show.
type change struct {
	service      lb.Service
	holding      kube.Holding
	reservations map[string]lb.PendingReservation // by pool, for what it adds
	// replaced are addresses that others wrote into the status and that this change takes out of it.
	replaced []netip.Addr
	// emptied is set where it adds addresses to a status that others have emptied.
	emptied bool
	// pool is that of the first address; "" if none contains it.
	pool string
	// deleted is set for a Service that is being deleted and loses its finalizer.
	deleted bool
}

// changes returns what must be written, oldest Services first. A write is decided on the Service as
// the book knows it, also where the table has a newer one: it will then be refused, and decided
// anew.
func (c *controller) changes(p plan.Plan) []change {
	var changes []change
	for key, decision := range p.Services {
		s := c.book.Service(key)
		h := c.holding(decision)
		if h.Finalizer != kube.FinalizerRemoved {
			delete(c.withdrawals, key) // the next end has a wait of its own
		}
		if w, ok := c.writes[key]; c.writing[key] || ok && w.done || !ok && h.Shows(s) {
			continue // a Service that was written is decided anew once the write has ended, or is seen
		}
		if h.Finalizer == kube.FinalizerRemoved && announced(s) && !c.withdrawals.allow(key, s.UID, c.now()) {
			continue
		}
		if !c.unwritable.allow(s) || !c.failing.allow(s) {
			continue
		}
		ch := change{service: s, holding: h, replaced: decision.Replaced, pool: decision.Pool, deleted: s.Deleting,
			emptied: emptied(s, h)}
		if ch.paced() && !c.replaces.allow(key, c.now()) {
			continue
		}
		changes = append(changes, ch)
	}
	slices.SortFunc(changes, func(a, b change) int { return plan.Older(&a.service, &b.service) })
	return changes
}

// paced reports whether the change replaces what somebody else wrote, which he may write again.
func (c change) paced() bool { return len(c.replaced)+c.service.Unread > 0 || c.emptied }

// emptied reports whether h gives a Service addresses that somebody has taken out of its status, or put a hostname in
// the place of: what Landfall writes shows all that its condition confirms.
func emptied(s lb.Service, h kube.Holding) bool {
	lacks := func(addrs []netip.Addr) bool {
		return slices.ContainsFunc(addrs, func(addr netip.Addr) bool {
			return !slices.ContainsFunc(s.Ingress, func(in lb.Ingress) bool { return in.Addr == addr })
		})
	}
	return lacks(h.Addresses) && (s.Hostnames > 0 && len(s.Ingress) == 0 ||
		slices.ContainsFunc(s.Conditions, func(c lb.Condition) bool {
			return c.Type == lb.ConditionAssigned && lacks(lb.Confirmed(c))
		}))
}

// holding returns what a Service shall show.
func (c *controller) holding(d plan.Decision) kube.Holding {
	h := kube.Holding{Addresses: d.Addresses, Mode: d.Mode, Condition: d.Condition}
	if c.allocatedFrom {
		h.Pool = d.Pool
	}
	switch {
	case d.Protect:
		h.Finalizer = kube.FinalizerSet
	case d.Release:
		h.Finalizer = kube.FinalizerRemoved
	}
	return h
}

// serviceWrite is a write of a Service that is under way, and what became of it.
type serviceWrite struct {
	change
	term           int
	decided, ended time.Time
	err            error
}

// A write that failed, or that the API server refused as the Service has changed, is tried again when the Service is
// seen in another version, and after minRewrite up to maxRewrite.
const (
	minRewrite = 100 * time.Millisecond
	maxRewrite = 5 * time.Second
)

// errNotSent is a write that has waited for others of its namespace for so long that it was not sent.
var errNotSent = errors.New("other writes of the namespace take too long")

// writeServices begins to write all changes. All of them come from one plan, so their order does not matter for who
// holds what. It waits for none of them: an admission webhook may keep the writes of a namespace for as long as
// they may take, and others go on. A write that is under way may have taken place or not, so its Service holds the
// addresses of both, its reservations stay, and the Service is not written again.
func (c *controller) writeServices(ctx context.Context, changes []change) {
	for _, ch := range changes {
		// Noted before it is sent: the book gives its addresses to no other Service until the controller
		// sees this one again, whether the write succeeds or not.
		c.writes[ch.service.Key] = write{
			Pending: plan.Pending{UID: ch.service.UID, Version: ch.service.Version, Addresses: ch.holding.Addresses,
				Possible: c.possible(ch)},
			failures:     c.writes[ch.service.Key].failures,
			reservations: c.keepReservations(ch),
			only:         !c.writes[ch.service.Key].Covers(ch.service),
		}
		c.writing[ch.service.Key] = true
		w := serviceWrite{change: ch, term: c.terms, decided: c.deciding}
		waiting, end := context.WithTimeout(ctx, writeTimeout)
		c.lanes.Do(ch.service.Key.Namespace, func() error {
			defer end()
			if w.err = errNotSent; waiting.Err() == nil {
				w.err = within(ctx, func(ctx context.Context) error { return c.status.Hold(ctx, ch.service, ch.holding) })
			}
			w.ended = c.now()
			c.mu.Lock()
			c.ended = append(c.ended, w)
			c.mu.Unlock()
			c.runner.Poke()
			if kube.IsConflict(w.err) || kube.IsNotFound(w.err) || kube.IsUnwritable(w.err) {
				return nil // the API server has answered
			}
			return w.err
		})
	}
}

// heed takes note of the writes that have ended since the last step.
func (c *controller) heed(ctx context.Context) {
	c.mu.Lock()
	ended := c.ended
	c.ended = nil
	c.mu.Unlock()
	for _, w := range ended {
		key := w.service.Key
		delete(c.writing, key)
		if w.term != c.terms {
			c.again[key] = true // what it may have done is known by its reservation
			continue
		}
		c.room = true
		c.wrote(ctx, w)
	}
}

// wrote takes note of how a write went, and tells of it if it changed something.
func (c *controller) wrote(ctx context.Context, ended serviceWrite) {
	ch, err, key := ended.change, ended.err, ended.service.Key
	if !errors.Is(err, errNotSent) {
		c.metrics.wrote("service", err)
	}
	switch {
	case !ch.paced():
	case kube.IsConflict(err), kube.IsUnwritable(err), errors.Is(err, errNotSent):
		c.replaces.missed(key, c.now())
	default:
		c.replaces.note(key, c.now())
	}
	w, ok := c.writes[key]
	if current := ok && w.Covers(ch.service); !current {
		// The Service was seen in a newer version, or is gone: that says whether the write took place.
		if err == nil {
			c.report(ended)
		}
		c.again[key] = true
		return
	}
	switch {
	case kube.IsUnwritable(err):
		if w.only {
			delete(c.writes, key) // it did not take place, and so reserves nothing
		}
		c.again[key] = true // others may have its address
		c.refusedBy(c.unwritable, ch.service, err)
		return
	case err == nil, kube.IsNotFound(err):
		w.done = true // nothing to do but wait until the watch shows it
		delete(c.failing, key)
	default:
		c.failing.failed(ch.service, c.now(), loop.Backoff{Min: minRewrite, Max: maxRewrite})
		if errors.Is(err, errNotSent) && w.only {
			delete(c.writes, key) // likewise
			return
		}
	}
	switch {
	case err == nil:
		delete(c.unwritable, key)
		w.log(c.log, key, nil)
		c.report(ended)
	case w.done, ctx.Err() != nil, errors.Is(err, errNotSent):
	case kube.IsConflict(err):
		c.log.Debug("the Service has changed since it was read: deciding again", "service", key)
	default:
		w.log(c.log, key, err)
	}
	c.writes[key] = w
}

// refusedBy takes note that the API server refuses a Service with what Landfall writes to it.
func (d *deps) refusedBy(u unwritable, s lb.Service, err error) {
	if u.refused(s, d.now()) {
		d.log.Warn("the API server refuses the status of a Service", "service", s.Key, "error", err)
		d.events.Warning(kube.ServiceReference(s), lb.ReasonStatusRefused,
			fmt.Sprintf("the API server refuses what Landfall writes to this Service: %.300s", err))
	}
}

// traceAssigned tells of the addresses that a Service has got by a write.
func (c *controller) traceAssigned(ch serviceWrite) {
	if c.trace == nil || ch.deleted {
		return
	}
	for _, addr := range ch.holding.Addresses {
		if !slices.ContainsFunc(ch.service.Ingress, func(in lb.Ingress) bool { return in.Addr == addr }) {
			c.trace(lb.Span{Service: ch.service.Key, UID: ch.service.UID, VIP: addr, Name: lb.SpanAssigned, Start: ch.decided,
				End: ch.ended, Attributes: []lb.SpanAttribute{{Key: "landfall.pool", Value: ch.pool},
					{Key: "landfall.service.created", Value: ch.service.Created.UTC().Format(time.RFC3339)}}})
		}
	}
}

// log logs how the write of a Service's status went, a row of failures once.
func (w *write) log(log *slog.Logger, key lb.Key, err error) {
	w.failures.Log(log, "cannot write the status of a Service; trying again", "wrote the status of a Service at last", err,
		"service", key)
}

// replacedMessage says what was removed from a Service's status, or added to it again, and which program wrote
// to it if the API server knows.
func replacedMessage(s lb.Service, addrs []netip.Addr) string {
	var did string
	switch {
	case len(addrs) > 0:
		did = fmt.Sprintf("removed %v from the status: Landfall did not assign it", addrs)
	case s.Hostnames > 0:
		did = "removed a hostname from the status: Landfall did not assign it"
	default:
		did = "the status lacked addresses that Landfall assigned: added them"
	}
	by := "another load balancer"
	if s.StatusWriter != "" {
		by = fmt.Sprintf("%.80q, the program that wrote it,", s.StatusWriter)
	}
	return fmt.Sprintf("%s; check whether %s serves this Service", did, by)
}

// report logs a change of decision that was written, and sends the Event and the span.
func (c *controller) report(ch serviceWrite) {
	c.traceAssigned(ch)
	about := kube.ServiceReference(ch.service)
	condition := ch.holding.Condition
	if len(ch.replaced) > 0 || ch.emptied {
		message := replacedMessage(ch.service, ch.replaced)
		c.log.Warn("replaced what another program wrote into the status", "service", ch.service.Key, "addresses",
			ch.replaced, "hostnames", ch.service.Hostnames, "program", ch.service.StatusWriter)
		c.events.Warning(about, lb.ReasonForeignAddress, message)
	}
	if ch.service.Unread > 0 {
		message := fmt.Sprintf("the status showed %d addresses more than the %d that a Service can hold; removed them",
			ch.service.Unread, lb.MaxAddresses)
		c.log.Warn("removed addresses from a status that shows too many", "service", ch.service.Key, "addresses",
			ch.service.Unread, "program", ch.service.StatusWriter)
		c.events.Warning(about, lb.ReasonTooManyAddresses, message)
	}
	switch {
	case ch.deleted:
		c.log.Info("nobody announces the deleted Service: removed its finalizer", "service", ch.service.Key)
	case condition == nil:
		c.log.Info("took all of Landfall's addresses and conditions off the Service", "service", ch.service.Key)
	case condition.Status:
		c.log.Info("the Service has its address", "service", ch.service.Key, "address", condition.Message)
		c.events.Normal(about, condition.Reason, condition.Message)
	default:
		c.log.Warn("the Service lacks an address", "service", ch.service.Key, "reason", condition.Reason, "message",
			condition.Message)
		c.events.Warning(about, condition.Reason, condition.Message)
	}
}
