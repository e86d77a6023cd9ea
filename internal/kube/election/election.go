// Package election has one of several processes lead at a time. It is a package of its own because
// client-go's election links the clients of all kinds of Kubernetes objects, which only the
// controller has to bear.
package election

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Options say which Lease decides who leads.
type Options struct {
	Namespace, Name string
	// Identity must differ between all candidates, also between two lives of one pod.
	Identity string
	// Life is how identities of all lives of this candidate begin, where a new one begins only after the last has
	// ended: it takes over from that one at once. "" if that is not so.
	Life string
	// Others may take over LeaseDuration after the last renewal; a leader that could not renew for
	// RenewDeadline stops leading; RetryPeriod is the time between attempts. They must decrease in
	// this order.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// Ending is the pulse of the time from when leadership is lost until lead has returned; it must be set.
	Ending *loop.Pulse
}

// Lead calls lead whenever this candidate is the leader, until ctx ends or lead returns an error.
// The context of lead ends when leadership is lost or ctx ends. The Lease is released only after
// lead has returned, so that two never lead at a time.
func Lead(ctx context.Context, client *kube.Client, log *slog.Logger, e Options,
	lead func(context.Context) error) error {
	leases, err := coordinationv1.NewForConfigAndClient(client.Config())
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	return run(ctx, leases, log, e, lead)
}

func run(ctx context.Context, leases coordinationv1.LeasesGetter, log *slog.Logger, e Options,
	lead func(context.Context) error) error {
	log = log.With("lease", e.Namespace+"/"+e.Name, "identity", e.Identity)
	inherit(ctx, leases, log, e)
	for ctx.Err() == nil {
		log.Info("waiting to become the leader")
		t := term{ctx: ctx, log: log, lead: lead, ended: make(chan struct{})}
		if err := t.run(leases, e); err != nil {
			return err
		}
	}
	return nil
}

// inherit releases the Lease of this candidate's last life, which was killed: no other would take over before
// LeaseDuration is over. If that fails, this one waits for it, too.
func inherit(ctx context.Context, leases coordinationv1.LeasesGetter, log *slog.Logger, e Options) {
	if e.Life == "" {
		return
	}
	last, err := release(ctx, leases, e, func(holder string) bool { return strings.HasPrefix(holder, e.Life) })
	switch {
	case last == "": // the election tells what keeps it from the Lease
	case err != nil:
		log.Warn("cannot release the Lease of this pod's last controller; waiting until it is over", "holder", last,
			"error", err)
	default:
		log.Info("released the Lease of this pod's last controller, which was killed", "holder", last)
	}
}

// release gives the Lease back, within RetryPeriod, if its holder is the one that is asked for, and returns who that
// was.
func release(ctx context.Context, leases coordinationv1.LeasesGetter, e Options, of func(holder string) bool) (
	holder string, err error) {
	ctx, cancel := context.WithTimeout(ctx, e.RetryPeriod)
	defer cancel()
	api := leases.Leases(e.Namespace)
	err = retry.RetryOnConflict(retry.DefaultRetry, func() error { // with a renewal that was under way
		holder = ""
		lease, err := api.Get(ctx, e.Name, metav1.GetOptions{})
		if err != nil || lease.Spec.HolderIdentity == nil || !of(*lease.Spec.HolderIdentity) {
			return err
		}
		holder = *lease.Spec.HolderIdentity
		lease.Spec.HolderIdentity = new("")
		_, err = api.Update(ctx, lease, metav1.UpdateOptions{})
		return err
	})
	if apierrors.IsNotFound(err) {
		return "", nil
	}
	return holder, err
}

// term is one candidacy: waiting, leading, and the end of both.
type term struct {
	ctx  context.Context // ends the candidacy
	log  *slog.Logger
	lead func(context.Context) error

	mu      sync.Mutex
	leading bool
	over    bool          // no leading begins any more
	ended   chan struct{} // closed when lead has returned
	err     error         // what lead returned
}

// run takes part in the election until the leadership ends. The elector has a context of its own, so that the Lease
// is renewed as long as lead is at work; and no logger, as it would repeat every failure every RetryPeriod. It does not
// release the Lease (ReleaseOnCancel), as it would do so before it tells lead that leadership is lost, and may wait
// for the API server meanwhile, until after another leads.
func (t *term) run(leases coordinationv1.LeasesGetter, e Options) error {
	electorCtx, stop := context.WithCancel(klog.NewContext(context.WithoutCancel(t.ctx), klog.Logger{}))
	defer stop()
	lock := &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: e.Namespace, Name: e.Name},
		Client:     leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: e.Identity},
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &reportingLock{Interface: lock, timeout: e.RenewDeadline, log: t.log,
			failures: loop.Failures{Repeat: repeatAfter}},
		LeaseDuration: e.LeaseDuration, RenewDeadline: e.RenewDeadline, RetryPeriod: e.RetryPeriod,
		Name: e.Name,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(held context.Context) { t.leads(held, stop) },
			OnStoppedLeading: func() {},
			OnNewLeader:      func(identity string) { t.log.Info("a leader was elected", "leader", identity) },
		},
	})
	if err != nil {
		return fmt.Errorf("leader election: %w", err)
	}
	unwatch := context.AfterFunc(t.ctx, func() { t.giveUp(stop) })
	defer unwatch()
	elector.Run(electorCtx)
	err = t.end(e.Ending)
	if !elector.IsLeader() { // it holds no Lease, as far as it knows
		return err
	}
	own := func(holder string) bool { return holder == e.Identity }
	if _, err := release(context.WithoutCancel(t.ctx), leases, e, own); err != nil {
		t.log.Warn("cannot release the Lease; another candidate leads once it is over", "error", err)
	}
	return err
}

// leads runs lead while held lasts, then ends the candidacy.
func (t *term) leads(held context.Context, stop func()) {
	t.mu.Lock()
	if t.over || held.Err() != nil {
		t.mu.Unlock()
		return
	}
	t.leading = true
	t.mu.Unlock()

	ctx, cancel := context.WithCancel(t.ctx)
	defer cancel()
	defer context.AfterFunc(held, cancel)()
	t.err = t.lead(ctx)
	close(t.ended)
	stop()
}

// giveUp ends the candidacy of one that is not leading; one that is leads to the end first.
func (t *term) giveUp(stop func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	if !t.leading {
		stop()
	}
}

// end waits until lead has returned, if it was called. One that never does keeps this candidate from all further
// elections.
func (t *term) end(pulse *loop.Pulse) error {
	t.mu.Lock()
	t.over = true
	leading := t.leading
	t.mu.Unlock()
	if !leading {
		return nil
	}
	if t.ctx.Err() == nil {
		t.log.Info("no longer the leader")
	}
	defer pulse.Begin()()
	<-t.ended
	return t.err
}

// repeatAfter is the least time between two reports of one failure.
const repeatAfter = 30 * time.Second

// reportingLock says why the Lease cannot be read or written, at most once in a while, and bounds each attempt, which
// the elector does only while it leads. The elector calls it from one goroutine.
type reportingLock struct {
	resourcelock.Interface
	timeout  time.Duration
	log      *slog.Logger
	failures loop.Failures
}

func (l *reportingLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	record, raw, err := l.Interface.Get(ctx)
	return record, raw, l.report(err)
}

func (l *reportingLock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	return l.report(l.Interface.Create(ctx, record))
}

func (l *reportingLock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	return l.report(l.Interface.Update(ctx, record))
}

// report passes the error on. That there is no Lease yet, that another candidate was faster or that
// the term ends is the normal course.
func (l *reportingLock) report(err error) error {
	failure := err
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		failure = nil
	}
	l.failures.Log(l.log, "cannot use the Lease", "the Lease can be used again", failure)
	return err
}
