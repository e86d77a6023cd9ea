package report

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// attempt is what became of a write.
type attempt struct {
	key    lb.Key
	status lb.AnnouncedStatus
	at     time.Time // its end
	wrote  bool
	err    error
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
		if asked, ok := r.asked[key]; ok && (status == nil || !alike(*status, asked)) {
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
	if a.err != nil && r.opts.Refused(a.err) {
		return r.rests.ended(key.Namespace, a.at, nil) // the API server has answered
	}
	return r.rests.ended(key.Namespace, a.at, a.err)
}

// isWanted reports whether a write is wanted whose turn it is, and takes it from what waits.
func (r *Reporter) isWanted(key lb.Key, status lb.AnnouncedStatus) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if asked, ok := r.asked[key]; !ok || asked != status {
		return false
	}
	delete(r.asked, key)
	return !time.Now().Before(r.rests.until(key.Namespace))
}

func (r *Reporter) restsUntil(namespace string) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rests.until(namespace)
}

func (r *Reporter) forgetRests(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rests.forget(now)
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
	if c := status.Condition; worthAnEvent(service, status) {
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
