package report

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// attempt is what became of a write.
type attempt struct {
	key    lb.Key
	status lb.AnnouncedStatus
	at     time.Time // its end
	wrote  bool
	err    error
}

// rest is for how long nothing is written in a namespace after a failure.
type rest struct {
	backoff loop.Backoff
	until   time.Time
}

// errUnwanted is for a write that is not wanted when it is its turn: not any more, or not yet, as its namespace rests.
var errUnwanted = errors.New("not wanted now")

// ask has what is wanted of some Services written, each when it is its turn.
func (r *Reporter) ask(ctx context.Context, keys []lb.Key) {
	writes := make([]func() error, len(keys))
	r.mu.Lock()
	for n, key := range keys {
		i := r.wanted[key]
		i.due, i.writing = false, true
		status := i.status
		r.asked[key] = status
		writes[n] = func() error { return r.turn(ctx, key, status) }
	}
	r.mu.Unlock()
	r.withdraw(r.take()) // what came meanwhile did not find these
	for n, key := range keys {
		r.lanes.Do(key.Namespace, writes[n])
	}
}

// withdraw takes back what waits for its turn where something else is wanted by now: thousands of writes take minutes.
func (r *Reporter) withdraw(changes map[lb.Key]*lb.AnnouncedStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, status := range changes {
		if asked, ok := r.asked[key]; ok && (status == nil || *status != asked) {
			delete(r.asked, key)
		}
	}
}

// turn writes to a Service what is still wanted, and has apply hear of it. Its error is for the lane of the namespace.
func (r *Reporter) turn(ctx context.Context, key lb.Key, status lb.AnnouncedStatus) error {
	a := attempt{key: key, status: status, err: errUnwanted}
	if r.isWanted(key, status) && ctx.Err() == nil {
		a.wrote, a.err = r.write(ctx, key, status)
	}
	a.at = time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = append(r.ended, a)
	r.runner.Poke()
	namespace := r.rests[key.Namespace]
	switch {
	case errors.Is(a.err, errUnwanted):
		if namespace != nil { // which is failing still
			return a.err
		}
	case a.err == nil || r.opts.Refused(a.err):
		delete(r.rests, key.Namespace)
	default:
		if namespace == nil {
			namespace = &rest{backoff: loop.Backoff{Min: minRetry, Max: maxRetry}}
			r.rests[key.Namespace] = namespace
		}
		namespace.until = a.at.Add(namespace.backoff.Next())
		return a.err
	}
	return nil
}

// isWanted reports whether a write is wanted whose turn it is, and takes it from what waits.
func (r *Reporter) isWanted(key lb.Key, status lb.AnnouncedStatus) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if asked, ok := r.asked[key]; !ok || asked != status {
		return false
	}
	delete(r.asked, key)
	namespace := r.rests[key.Namespace]
	return namespace == nil || !time.Now().Before(namespace.until)
}

func (r *Reporter) restsUntil(namespace string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rests := r.rests[namespace]; rests != nil {
		return rests.until
	}
	return time.Time{}
}

// forgetRests forgets failures of long ago: the namespace may be gone.
func (r *Reporter) forgetRests(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.rests, func(_ string, rests *rest) bool { return now.Sub(rests.until) > calm })
}

func (r *Reporter) write(ctx context.Context, key lb.Key, status lb.AnnouncedStatus) (wrote bool, err error) {
	service, exists := r.opts.Service(key) // as it is by now
	if !exists || status.ShownBy(service) {
		return false, errUnwanted
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	if wrote, err = r.opts.Write(ctx, service, status); err != nil || !wrote {
		return false, err
	}
	if c := status.Condition; worthAnEvent(find(service, c.Type), c) {
		r.opts.Event(service, c.Status && c.Reason != lb.ReasonContested, c.Reason, c.Message)
	}
	return true, nil
}

// note takes note of what became of writes.
func (r *Reporter) note() {
	r.mu.Lock()
	ended := r.ended
	r.ended = nil
	r.mu.Unlock()
	var failed error
	for _, a := range ended {
		i := r.wanted[a.key]
		if i == nil { // another node reports by now
			continue
		}
		i.writing = false
		switch {
		case errors.Is(a.err, errUnwanted):
			i.due = true
		case a.err == nil:
			delete(r.failing, a.key)
			i.wroteAt(a)
			i.failures.Log(r.opts.Log, "", "wrote to a Service at last whether its addresses are announced", nil, "service",
				a.key)
		case r.opts.Refused(a.err):
			delete(r.failing, a.key)
			i.due = true
			i.pause(a.at)
			i.failures.Log(r.opts.Log, "cannot write to a Service whether its addresses are announced; trying again", "",
				a.err, "service", a.key)
		default:
			r.failing[a.key], i.due = a.at, true
			failed = fmt.Errorf("report on Service %s: %w", a.key, a.err)
		}
	}
	if failed != nil || len(r.failing) == 0 {
		r.failures.Log(r.opts.Log, "cannot write to Services whether their addresses are announced; trying again",
			"writing to Services again whether their addresses are announced", failed)
	}
}

// wroteAt takes note of a write.
func (i *item) wroteAt(a attempt) {
	i.wrote = &a.status
	if a.wrote {
		i.pause(a.at)
	}
}
