package election

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	coordinationclient "k8s.io/client-go/kubernetes/typed/coordination/v1"
	clienttesting "k8s.io/client-go/testing"

	"github.com/landfall-lb/landfall/internal/loop"
)

// candidate takes part in elections on one fake API server.
type candidate struct {
	leading atomic.Bool
	ending  loop.Pulse
	ended   chan error
	stop    context.CancelFunc
}

// office counts who leads at a time.
type office struct {
	core    *fake.Clientset
	hangs   atomic.Bool // requests for Leases that begin now never end by themselves
	leaders atomic.Int32
	most    atomic.Int32
	log     *slog.Logger
}

func newOffice() *office {
	return &office{core: fake.NewClientset(), log: slog.New(slog.DiscardHandler)}
}

func (o *office) leases() coordinationclient.LeasesGetter { return hanging{o} }

// hanging are the Leases of an API server that may hang.
type hanging struct{ *office }

func (h hanging) Leases(namespace string) coordinationclient.LeaseInterface {
	return hangingLeases{h.core.CoordinationV1().Leases(namespace), h.office}
}

type hangingLeases struct {
	coordinationclient.LeaseInterface
	*office
}

func (h hangingLeases) Get(ctx context.Context, name string, o metav1.GetOptions) (*coordinationv1.Lease, error) {
	if h.hangs.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return h.LeaseInterface.Get(ctx, name, o)
}

func (h hangingLeases) Update(ctx context.Context, lease *coordinationv1.Lease, o metav1.UpdateOptions) (
	*coordinationv1.Lease, error) {
	if h.hangs.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return h.LeaseInterface.Update(ctx, lease, o)
}

// run lets a candidate lead until it may no longer, and then take as long as slow to stop.
func (o *office) run(ctx context.Context, identity string, slow time.Duration) *candidate {
	return o.live(ctx, identity, "", slow)
}

// live does the same for a candidate whose identities begin with life.
func (o *office) live(ctx context.Context, identity, life string, slow time.Duration) *candidate {
	ctx, stop := context.WithCancel(ctx)
	c := &candidate{ended: make(chan error, 1), stop: stop}
	e := Options{Life: life, Namespace: "ns", Name: "lease", Identity: identity, LeaseDuration: 15 * time.Second,
		RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second, Ending: &c.ending}
	go func() {
		c.ended <- run(ctx, o.leases(), o.log, e, func(ctx context.Context) error {
			o.most.Store(max(o.most.Load(), o.leaders.Add(1)))
			c.leading.Store(true)
			<-ctx.Done()
			c.leading.Store(false)
			time.Sleep(slow)
			o.leaders.Add(-1)
			return nil
		})
	}()
	return c
}

func (c *candidate) end(t *testing.T) {
	t.Helper()
	c.stop()
	if err := <-c.ended; err != nil {
		t.Error(err)
	}
}

func TestOneLeadsAndHandsOverAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		a := o.run(t.Context(), "a", 3*time.Second)
		time.Sleep(time.Second)
		b := o.run(t.Context(), "b", 0)
		time.Sleep(time.Minute)
		if !a.leading.Load() || b.leading.Load() {
			t.Fatalf("a leads: %v, b leads: %v", a.leading.Load(), b.leading.Load())
		}
		started := time.Now()
		a.end(t) // takes 3 s, in which b must wait
		if took := time.Since(started); took != 3*time.Second {
			t.Errorf("ended after %v", took)
		}
		time.Sleep(5 * time.Second) // much less than the Lease lasts: it was released
		if !b.leading.Load() {
			t.Error("b does not lead after a has ended")
		}
		b.end(t)
		if o.most.Load() != 1 {
			t.Errorf("%d led at a time", o.most.Load())
		}
		lease, err := o.core.CoordinationV1().Leases("ns").Get(t.Context(), "lease", metav1.GetOptions{})
		if err != nil || *lease.Spec.HolderIdentity != "" {
			t.Errorf("the Lease is not released: %v, %v", lease, err)
		}
	})
}

// A controller that was killed has not released its Lease. Its next life takes over at once, as the container that it
// was in has ended; another candidate waits until the Lease is over.
func TestALifeThatWasKilledIsSucceededAtOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		identity, life string
		leads          bool
	}{
		"the next life":    {"pod_1_b", "pod_1_", true},
		"another pod":      {"pod_2_a", "pod_2_", false},
		"it does not know": {"pod_1_b", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOffice()
				held := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lease"},
					Spec: coordinationv1.LeaseSpec{HolderIdentity: new("pod_1_a"), LeaseDurationSeconds: new(int32(15)),
						RenewTime: new(metav1.NowMicro()), AcquireTime: new(metav1.NowMicro()), LeaseTransitions: new(int32(7))}}
				if _, err := o.core.CoordinationV1().Leases("ns").Create(t.Context(), held, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
				c := o.live(t.Context(), tc.identity, tc.life, 0)
				time.Sleep(time.Second)
				if c.leading.Load() != tc.leads {
					t.Errorf("after a second it leads: %v", c.leading.Load())
				}
				time.Sleep(20 * time.Second)
				if !c.leading.Load() {
					t.Error("it does not lead although the Lease is over")
				}
				c.end(t)
			})
		})
	}
}

// TestLostLeadershipEndsTheWork cuts the leader off: it must stop before others may take over, and
// come back when it can.
func TestLostLeadershipEndsTheWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		var down atomic.Bool
		o.core.PrependReactor("*", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
			return down.Load(), nil, errors.New("dial: connection refused")
		})
		a := o.run(t.Context(), "a", 0)
		time.Sleep(time.Minute)
		if !a.leading.Load() {
			t.Fatal("a does not lead")
		}
		down.Store(true)
		time.Sleep(14 * time.Second)
		if a.leading.Load() {
			t.Error("a still leads although its Lease is about to run out")
		}
		down.Store(false)
		time.Sleep(30 * time.Second)
		if !a.leading.Load() {
			t.Error("a does not lead again")
		}
		a.end(t)
	})
}

// TestALeaderThatIsCutOffEndsBeforeTheNextOneLeads has the API server hang for the leader alone: for as long as that
// tries to renew its Lease, and for longer.
func TestALeaderThatIsCutOffEndsBeforeTheNextOneLeads(t *testing.T) {
	for _, hangs := range []time.Duration{11 * time.Second, 13 * time.Second, 15 * time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			cut := newOffice()
			well := &office{core: cut.core, log: cut.log}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			a := cut.run(ctx, "a", 2*time.Second)
			time.Sleep(time.Minute)
			b := well.run(ctx, "b", 0)
			cut.hangs.Store(true)
			time.AfterFunc(hangs, func() { cut.hangs.Store(false) })
			for i := 0; i < 10_000 && !t.Failed(); i++ {
				if time.Sleep(10 * time.Millisecond); cut.leaders.Load()+well.leaders.Load() > 1 {
					t.Errorf("the API server hangs for %s: both are at work", hangs)
				}
			}
			if cut.leaders.Load()+well.leaders.Load() == 0 {
				t.Errorf("after it hung for %s nobody leads", hangs)
			}
			a.end(t)
			b.end(t)
		})
	}
}

// TestALeaderThatDoesNotEndIsSeen loses the Lease while its work goes on, which the liveness tells until that ends.
func TestALeaderThatDoesNotEndIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		a := o.run(t.Context(), "a", time.Hour)
		time.Sleep(time.Minute)
		if busy := a.ending.Busy(); busy != 0 || !a.leading.Load() {
			t.Errorf("busy for %v, or it does not lead", busy)
		}
		o.hangs.Store(true)
		time.Sleep(time.Minute)
		o.hangs.Store(false)
		if busy := a.ending.Busy(); busy < 30*time.Second || busy > time.Minute {
			t.Errorf("busy for %v a minute after the Lease was lost", busy)
		}
		time.Sleep(time.Hour)
		if busy := a.ending.Busy(); busy != 0 || !a.leading.Load() {
			t.Errorf("busy for %v, or it does not lead again", busy)
		}
		a.end(t)
	})
}

// TestACandidateTriesAgainAfterARequestThatHangs has an API server take a request, and never answer that one.
func TestACandidateTriesAgainAfterARequestThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		o.hangs.Store(true)
		a := o.run(t.Context(), "a", 0)
		time.Sleep(time.Second)
		o.hangs.Store(false)
		time.Sleep(time.Minute)
		if !a.leading.Load() {
			t.Error("it does not lead")
		}
		a.end(t)
	})
}

func TestAFailureOfTheWorkEndsTheElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		broken := errors.New("broken")
		e := Options{Namespace: "ns", Name: "lease", Identity: "a", LeaseDuration: 15 * time.Second,
			RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second, Ending: &loop.Pulse{}}
		err := run(t.Context(), o.core.CoordinationV1(), o.log, e, func(context.Context) error { return broken })
		if !errors.Is(err, broken) {
			t.Errorf("returned %v", err)
		}
	})
}

func TestEndWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		identity, seconds, taken := "other", int32(3600), metav1.NowMicro()
		_, err := o.core.CoordinationV1().Leases("ns").Create(t.Context(), &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "lease"},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: &identity, LeaseDurationSeconds: &seconds, AcquireTime: &taken,
				RenewTime: &taken},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		o.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		a := o.run(t.Context(), "a", 0)
		time.Sleep(10 * time.Second)
		o.hangs.Store(true) // it has nothing to release
		ended := time.Now()
		a.end(t)
		if took := time.Since(ended); took != 0 || log.Len() > 0 {
			t.Errorf("ended after %v, and said %s", took, log.String())
		}
		if o.most.Load() != 0 {
			t.Error("led although another holds the Lease")
		}
	})
}

// TestAConflictKeepsNoLease has the last renewal reach the API server while the Lease is released.
func TestAConflictKeepsNoLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		conflicts := 0
		o.core.PrependReactor("update", "leases", func(a clienttesting.Action) (bool, runtime.Object, error) {
			lease := a.(clienttesting.UpdateAction).GetObject().(*coordinationv1.Lease)
			if *lease.Spec.HolderIdentity != "" || conflicts > 0 {
				return false, nil, nil
			}
			conflicts++
			return true, nil, apierrors.NewConflict(coordinationv1.Resource("leases"), "lease", errors.New("renewed"))
		})
		a := o.run(t.Context(), "a", 0)
		time.Sleep(time.Minute)
		a.end(t)
		lease, err := o.core.CoordinationV1().Leases("ns").Get(t.Context(), "lease", metav1.GetOptions{})
		if err != nil || *lease.Spec.HolderIdentity != "" || conflicts != 1 {
			t.Errorf("after %d conflicts the Lease is not released: %v, %v", conflicts, lease, err)
		}
	})
}

func TestElectionSettingsAreChecked(t *testing.T) {
	o := newOffice()
	err := run(t.Context(), o.core.CoordinationV1(), o.log, Options{Namespace: "ns", Name: "lease", Identity: "a"}, nil)
	if err == nil {
		t.Error("no error for a Lease that lasts 0 s")
	}
}

// TestLeaseFailuresAreSaidOnceInAWhile names what is wrong, such as a missing permission, and does
// not repeat it every 2 s.
func TestLeaseFailuresAreSaidOnceInAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOffice()
		var log strings.Builder
		o.log = slog.New(slog.NewTextHandler(&log, nil))
		o.core.PrependReactor("*", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(coordinationv1.Resource("leases"), "lease", nil)
		})
		a := o.run(t.Context(), "a", 0)
		time.Sleep(70 * time.Second)
		a.end(t)
		if n := strings.Count(log.String(), "forbidden"); n < 2 || n > 4 {
			t.Errorf("said %d times in 70 s:\n%s", n, log.String())
		}
	})
}
