// Package dialect keeps the rules in the kernel as the proxy wants them. It decides when to read
// what the kernel holds, which Services share a transaction, and which of them are to blame when
// one fails; nftables and iptables read, render and write.
package dialect

import (
	"context"
	"errors"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Rules are the rules of one address family in one dialect. One goroutine uses them. They note in
// their Ledger what the kernel has confirmed, and what it has lost.
type Rules interface {
	// Configure takes what all rules depend on. It touches the Services that need other rules by that.
	Configure(plan.Config)
	// Want takes what is wanted for one Service, reduced to this family; a plan without ports removes
	// it. Other Services that it concerns are touched.
	Want(lb.Key, plan.Service)
	// Prepare makes sure that it is known what the kernel holds. With verify it reads that in any
	// case, and notes what others have changed.
	Prepare(ctx context.Context, verify bool) error
	// Commit writes what is wanted for the first n of the named Services, and any repair that is due,
	// in one transaction: for as many as are worth one, and for n of 0 only when no repair will be due
	// after it. It may put the keys into another order. An error says that what is wanted for none of
	// the n is confirmed.
	//
	// A Service that is too large for one transaction, or for others to wait for it, is written in
	// parts, one for each call that names it alone; n is 1 then and the error ErrUnfinished. When
	// others are named after it, nothing is written for it. Each part leaves rules that deliver.
	Commit(ctx context.Context, keys []lb.Key) (n int, err error)
	// Recover finds out, after a transaction has failed, what the kernel holds, and whether it takes
	// rules at all.
	Recover(ctx context.Context) error
	// Prune removes what no Service wants, after all of them have been tried.
	Prune(ctx context.Context) error
	// Held returns the plan that the kernel is confirmed to hold for a Service, without ports when
	// there is none, and an error when frontends of it are served for another Service.
	Held(lb.Key) (plan.Service, error)
	// Size returns how many rules there are by table; nil when rules do not depend on Services.
	Size() map[string]int
}

// A Weigher are Rules that can spread connections by how many there are.
type Weigher interface {
	// Weigh takes what is known of the connections of a Service. It touches the Service if the rules for
	// it are otherwise as wanted.
	Weigh(lb.Key, plan.Load)
}

// Stats say what has been done.
type Stats struct {
	// Transactions were sent, Failures of them failed; Partial failures are those of transactions that
	// named only what had changed.
	Transactions, Failures, Partial int
	// Changes are the elements, or lines, that were written.
	Changes int
	// Repaired counts what others had changed.
	Repaired int
	// Verified is set when what the kernel holds was read.
	Verified bool
}

func (s *Stats) add(other Stats) {
	s.Transactions += other.Transactions
	s.Failures += other.Failures
	s.Partial += other.Partial
	s.Changes += other.Changes
	s.Repaired += other.Repaired
	s.Verified = s.Verified || other.Verified
}

// A Ledger says of one family which Services have to be written, and which of them failed and why.
type Ledger struct {
	Stats Stats

	dirty    map[lb.Key]bool
	failed   map[lb.Key]failure
	reported map[lb.Key]bool
	// unfinished are Services that are written in parts, with some still to come.
	unfinished map[lb.Key]bool
	tried      bool
}

// failure is why a Service is not applied.
type failure struct {
	err   error
	alone bool // the Service fails by itself, while others can be applied
	// due is when one that fails alone is tried again, backoff how long it waits after the next time.
	due     time.Time
	backoff loop.Backoff
}

func newLedger() *Ledger {
	return &Ledger{dirty: map[lb.Key]bool{}, failed: map[lb.Key]failure{}, reported: map[lb.Key]bool{},
		unfinished: map[lb.Key]bool{}}
}

// Touch notes that a Service has to be written.
func (l *Ledger) Touch(key lb.Key) { l.dirty[key] = true }

// Dirty returns the Services that have to be written. It must not be changed.
func (l *Ledger) Dirty() map[lb.Key]bool { return l.dirty }

// Done notes that the kernel has confirmed what is wanted for a Service.
func (l *Ledger) Done(key lb.Key) {
	delete(l.failed, key)
	delete(l.dirty, key)
	delete(l.unfinished, key)
	l.reported[key] = true
}

// Same notes that the kernel has confirmed for a Service what it had confirmed before, as far as
// others have to hear of it.
func (l *Ledger) Same(key lb.Key) { delete(l.dirty, key) }

// Lost notes that the kernel no longer holds what it had confirmed for a Service.
func (l *Ledger) Lost(key lb.Key, err error) {
	l.dirty[key] = true
	l.fail(failure{err: err}, key)
}

// Failed reports whether the last attempt to write a Service failed.
func (l *Ledger) Failed(key lb.Key) bool {
	_, failed := l.failed[key]
	return failed
}

// Tried reports whether all Services that were wanted at first have been tried.
func (l *Ledger) Tried() bool { return l.tried }

func (l *Ledger) fail(f failure, keys ...lb.Key) {
	for _, key := range keys {
		l.failed[key], l.reported[key] = f, true
	}
}

// ErrUnfinished says that a part of a Service is written, and that more is to come.
var ErrUnfinished = errors.New("only a part is written so far")

// Own returns err as one for which the Service itself is to blame, whatever the kernel holds.
func Own(err error) error { return ownError{err} }

type ownError struct{ error }

func (e ownError) Unwrap() error { return e.error }

// General returns err as one for which no Service is to blame.
func General(err error) error {
	if err == nil {
		return nil
	}
	return generalError{err}
}

type generalError struct{ error }

func (e generalError) Unwrap() error { return e.error }

func isGeneral(err error) bool { return errors.As(err, new(generalError)) }
