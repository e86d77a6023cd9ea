package dialect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// What fails by itself is tried again after minBackoff, then after twice that, and so on.
const (
	minBackoff = 200 * time.Millisecond
	maxBackoff = 30 * time.Second
	// maxRetries is how many are tried in one round.
	maxRetries = 8
	// maxParting is for how long readiness waits for Services that are written in parts, once all
	// others are written.
	maxParting = 30 * time.Second
)

// family keeps the rules of one address family. One goroutine owns it.
type family struct {
	*Ledger
	name lb.Family
	// rules is nil on a node without this family; unusable then says why.
	rules    Rules
	unusable error
	// turn is the namespace of which a part was written last, turns the Services of which one was, by namespace.
	turn  string
	turns map[string]lb.Key
	// now is when the round has begun; all is set when those that wait for their next try do not.
	now time.Time
	all bool
	// publish tells the outcomes so far.
	publish func()
	// parting is when at first only Services that are written in parts were left.
	parting time.Time
}

func newFamily(name lb.Family, rules func(lb.Family, *Ledger) Rules, unusable error, publish func()) *family {
	f := &family{Ledger: newLedger(), name: name, publish: publish, turns: map[string]lb.Key{}}
	f.rules = rules(name, f.Ledger)
	if f.rules == nil {
		if f.unusable = unusable; unusable == nil {
			f.unusable = fmt.Errorf("this node has no %s", name)
		}
	}
	return f
}

func (f *family) configure(config plan.Config) {
	if f.rules != nil {
		f.rules.Configure(config)
	}
}

// want takes what is wanted for one Service. A family that the node lacks can do nothing for it.
func (f *family) want(key lb.Key, s plan.Service) {
	s = s.Only(f.name)
	if f.rules != nil {
		if failed, ok := f.failed[key]; ok {
			failed.due = time.Time{} // the change may be what it needs
			f.failed[key] = failed
		}
		f.Touch(key)
		f.rules.Want(key, s)
		return
	}
	f.reported[key] = true
	if len(s.Ports) > 0 {
		f.failed[key] = failure{err: f.unusable}
	} else {
		delete(f.failed, key)
	}
}

// weigh takes what is known of the connections of some Services.
func (f *family) weigh(loads map[lb.Key]plan.Load) {
	w, ok := f.rules.(Weigher)
	for key, load := range loads {
		if ok {
			w.Weigh(key, load)
		}
	}
}

// sync makes the kernel hold what is wanted, but for Services that fail by themselves and for all
// but one part of those that are too large for one transaction. With verify, or when it is not
// known, it reads what the kernel holds first. A failure for which no Service is to blame ends it.
func (f *family) sync(ctx context.Context, verify bool) error {
	if f.rules == nil {
		f.tried = true
		return nil
	}
	err := f.rules.Prepare(ctx, verify)
	loop.Progress(ctx)
	if err != nil {
		f.giveUp(err)
		return err
	}
	err = f.write(ctx)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		f.giveUp(err)
		return err
	}
	if len(f.dirty) == 0 {
		f.dirty = map[lb.Key]bool{} // going through a map costs what it once held
	}
	if f.parting.IsZero() {
		f.parting = time.Now()
	}
	if f.tried = f.tried || len(f.unfinished) == 0 || time.Since(f.parting) >= maxParting; !f.tried {
		return nil
	}
	if err := f.rules.Prune(ctx); err != nil {
		return errors.Join(err, f.rules.Recover(ctx))
	}
	return nil
}

// giveUp notes that nothing could be written.
func (f *family) giveUp(err error) {
	f.fail(failure{err: err}, slices.Collect(maps.Keys(f.dirty))...)
}

// write writes the Services that are dirty: first those of which nothing bad is known; then, one by
// one and when it is time, those that failed by themselves; and at last a part of one that is
// too large, so that nobody waits for more than a part.
func (f *family) write(ctx context.Context) error {
	fresh, alone := f.due()
	parts := len(f.unfinished) > 0
	for first := true; first || len(fresh) > 0; first = false { // a repair may be due without any Service
		n, err := f.commit(ctx, fresh)
		if err != nil {
			err = f.recover(ctx, fresh[:n], err, f.bisect)
		}
		if ctx.Err() != nil || err != nil {
			return err
		}
		fresh = fresh[n:]
	}
	if key, ok := f.nextTurn(); ok && parts {
		f.publish() // the others' outcomes do not wait for it
		f.turn, f.turns[key.Namespace] = key.Namespace, key
		alone = append(alone, key)
	}
	for _, key := range alone {
		_, err := f.commit(ctx, []lb.Key{key})
		if err != nil {
			cause := err
			err = f.recover(ctx, []lb.Key{key}, err, func(context.Context, []lb.Key) error {
				f.blame(key, cause)
				return nil
			})
		}
		if ctx.Err() != nil || err != nil {
			return err
		}
	}
	return nil
}

// due returns the Services that are dirty and may be written together, and those that have failed
// by themselves and are to be tried again.
func (f *family) due() (fresh, alone []lb.Key) {
	for _, key := range slices.SortedFunc(maps.Keys(f.dirty), lb.Key.Compare) {
		switch failed := f.failed[key]; {
		case f.unfinished[key]:
		case !failed.alone:
			fresh = append(fresh, key)
		case f.all || len(alone) < maxRetries && !f.now.Before(failed.due):
			alone = append(alone, key)
		}
	}
	return fresh, alone
}

// nextTurn returns the Service of which a part is to be written next: each namespace in turn, and each of its Services,
// so that those of one namespace, however many, hold up no other one's.
func (f *family) nextTurn() (next lb.Key, ok bool) {
	waiting := map[string][]lb.Key{}
	for key := range f.unfinished {
		waiting[key.Namespace] = append(waiting[key.Namespace], key)
	}
	maps.DeleteFunc(f.turns, func(namespace string, _ lb.Key) bool { return waiting[namespace] == nil })
	if len(waiting) == 0 {
		return next, false
	}
	namespace := after(f.turn, slices.Collect(maps.Keys(waiting)), strings.Compare)
	return after(f.turns[namespace], waiting[namespace], lb.Key.Compare), true
}

// after returns which of all comes next after last in order, or else the first.
func after[T any](last T, all []T, compare func(a, b T) int) T {
	isLater := func(a T) bool { return compare(a, last) > 0 }
	return slices.MinFunc(all, func(a, b T) int {
		if isLater(a) != isLater(b) {
			return compare(b, a) // those that are later come first
		}
		return compare(a, b)
	})
}

// commit writes the first n of the named Services, or notes that the first is written in parts, or
// that it is to blame itself.
func (f *family) commit(ctx context.Context, keys []lb.Key) (n int, err error) {
	defer loop.Progress(ctx)
	n, err = f.rules.Commit(ctx, keys)
	switch own := (ownError{}); {
	case errors.Is(err, ErrUnfinished):
		f.part(keys[0], len(keys) == 1)
		return n, nil
	case errors.As(err, &own):
		f.blame(keys[0], own.error)
		return n, nil
	}
	return n, err
}

// part notes that a Service is not finished, and whether a part of it has just been written: then the
// kernel takes rules, whatever was said before.
func (f *family) part(key lb.Key, written bool) {
	failed, ok := f.failed[key]
	passed := written && ok && !failed.alone
	if passed {
		delete(f.failed, key)
	}
	if passed || !f.unfinished[key] {
		f.unfinished[key], f.reported[key] = true, true
	}
}

// recover is for Services whose transaction has failed: the kernel may not hold what it is believed
// to hold, or it takes no rules at all; else it is for next to find out what is wrong with them.
func (f *family) recover(ctx context.Context, keys []lb.Key, cause error,
	next func(context.Context, []lb.Key) error) error {
	if ctx.Err() != nil {
		return cause
	}
	if err := f.rules.Recover(ctx); err != nil {
		return General(errors.Join(cause, err))
	}
	return next(ctx, keys)
}

// bisect writes what can be written of the named Services, and finds out which cannot. It returns
// failures for which none of them is to blame.
func (f *family) bisect(ctx context.Context, keys []lb.Key) error {
	for len(keys) > 0 {
		n, err := f.commit(ctx, keys)
		switch {
		case err == nil:
		case ctx.Err() != nil || isGeneral(err):
			return err
		case n == 0:
			return General(err)
		case n == 1:
			f.blame(keys[0], err)
		default:
			for _, half := range [][]lb.Key{keys[:n/2], keys[n/2 : n]} {
				if err = f.bisect(ctx, half); err != nil {
					return err
				}
			}
		}
		keys = keys[n:]
	}
	return nil
}

// blame notes that a Service fails by itself.
func (f *family) blame(key lb.Key, err error) {
	backoff := f.failed[key].backoff
	if backoff == (loop.Backoff{}) {
		backoff = loop.Backoff{Min: minBackoff, Max: maxBackoff}
	}
	due := f.now.Add(backoff.Next())
	delete(f.unfinished, key)
	f.fail(failure{err: err, alone: true, due: due, backoff: backoff}, key)
}

// failing returns when the next of the Services that fail by themselves is tried again, zero for
// never, and why they fail.
func (f *family) failing() (next time.Time, err error) {
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(f.dirty), lb.Key.Compare) {
		failed := f.failed[key]
		if !failed.alone {
			continue
		}
		errs = append(errs, fmt.Errorf("rules of %s: %w", key, failed.err))
		if next.IsZero() || failed.due.Before(next) {
			next = failed.due
		}
	}
	return next, errors.Join(errs...)
}

// outcome returns what is held of a Service, and why not more. One that is not finished is alone in
// that, unless the kernel takes nothing: others are written between its parts.
func (f *family) outcome(key lb.Key) (plan.Service, failure) {
	if f.rules == nil {
		return plan.Service{}, f.failed[key]
	}
	held, conflict := f.rules.Held(key)
	failed := f.failed[key]
	if failed.err == nil && conflict != nil {
		failed = failure{err: conflict, alone: true}
	}
	failed.alone = failed.alone || failed.err == nil && f.unfinished[key]
	return held, failed
}
