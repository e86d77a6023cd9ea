package dialect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// family keeps the rules of one address family. One goroutine owns it.
type family struct {
	*Ledger
	name lb.Family
	// rules is nil on a node without this family; unusable then says why.
	rules    Rules
	unusable error
}

func newFamily(name lb.Family, rules func(lb.Family, *Ledger) Rules, unusable error) *family {
	f := &family{Ledger: newLedger(), name: name}
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

// sync makes the kernel hold what is wanted. With verify, or when it is not known, it reads what
// the kernel holds first. A failure for which no Service is to blame ends it.
func (f *family) sync(ctx context.Context, verify bool) error {
	if f.rules == nil {
		f.tried = true
		return nil
	}
	if err := f.rules.Prepare(ctx, verify); err != nil {
		f.giveUp(err)
		return err
	}
	err := f.write(ctx)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case isGeneral(err):
		f.giveUp(err)
		return err
	}
	if len(f.dirty) == 0 {
		f.dirty = map[lb.Key]bool{} // going through a map costs what it once held
	}
	f.tried = true
	if pruneErr := f.rules.Prune(ctx); pruneErr != nil {
		err = errors.Join(err, pruneErr, f.rules.Recover(ctx))
	}
	return err
}

// giveUp notes that nothing could be written.
func (f *family) giveUp(err error) {
	f.fail(failure{err: err}, slices.Collect(maps.Keys(f.dirty))...)
}

// write writes the Services that are dirty: those that failed by themselves one by one, so that
// they do not hold up the others.
func (f *family) write(ctx context.Context) error {
	var fresh, alone []lb.Key
	for _, key := range slices.SortedFunc(maps.Keys(f.dirty), lb.Key.Compare) {
		if f.failed[key].alone {
			alone = append(alone, key)
		} else {
			fresh = append(fresh, key)
		}
	}
	var errs []error
	for first := true; first || len(fresh) > 0; first = false { // a repair may be due without any Service
		n, err := f.rules.Commit(ctx, fresh)
		if err != nil {
			err = f.recover(ctx, fresh[:n], err, f.bisect)
		}
		if ctx.Err() != nil || isGeneral(err) {
			return err
		}
		errs = append(errs, err)
		fresh = fresh[n:]
	}
	for _, key := range alone {
		_, err := f.rules.Commit(ctx, []lb.Key{key})
		if err != nil {
			cause := err
			err = f.recover(ctx, []lb.Key{key}, err, func(context.Context, []lb.Key) error { return f.blame(key, cause) })
		}
		if ctx.Err() != nil || isGeneral(err) {
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
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

// bisect writes what can be written of the named Services, and finds out which cannot.
func (f *family) bisect(ctx context.Context, keys []lb.Key) error {
	var errs []error
	for len(keys) > 0 {
		n, err := f.rules.Commit(ctx, keys)
		switch {
		case err == nil:
		case ctx.Err() != nil || isGeneral(err):
			return err
		case n == 0:
			return General(err)
		case n == 1:
			errs = append(errs, f.blame(keys[0], err))
		default:
			for _, half := range [][]lb.Key{keys[:n/2], keys[n/2 : n]} {
				if err = f.bisect(ctx, half); ctx.Err() != nil || isGeneral(err) {
					return err
				}
				errs = append(errs, err)
			}
		}
		keys = keys[n:]
	}
	return errors.Join(errs...)
}

// blame notes that a Service fails by itself.
func (f *family) blame(key lb.Key, err error) error {
	f.fail(failure{err: err, alone: true}, key)
	return fmt.Errorf("rules of %s: %w", key, err)
}

// outcome returns what is held of a Service, and why not more.
func (f *family) outcome(key lb.Key) (plan.Service, failure) {
	if f.rules == nil {
		return plan.Service{}, f.failed[key]
	}
	held, conflict := f.rules.Held(key)
	failed := f.failed[key]
	if failed.err == nil && conflict != nil {
		failed = failure{err: conflict, alone: true}
	}
	return held, failed
}
