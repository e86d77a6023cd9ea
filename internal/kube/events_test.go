package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/leaktest"
)

var webReference = ServiceReference(lb.Service{Key: lb.Key{Namespace: "shop", Name: "web"}, UID: "uid-1"})

// runEvents runs a sender on core while f runs.
func runEvents(t *testing.T, core *fake.Clientset, f func(*Events)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		events := newEvents(fakeKinds{core}, slog.New(slog.DiscardHandler), "landfall-controller", "pod-1")
		ended := make(chan error)
		go func() { ended <- events.Run(ctx) }()
		f(events)
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func sentEvents(t *testing.T, core *fake.Clientset) map[string]corev1.Event {
	t.Helper()
	list, err := core.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]corev1.Event{}
	for _, e := range list.Items {
		all[e.Reason+": "+e.Message] = e
	}
	return all
}

func TestEvents(t *testing.T) {
	core := fake.NewClientset()
	runEvents(t, core, func(e *Events) {
		e.Normal(webReference, lb.ReasonAssigned, "10.0.0.1 from pool p")
		e.Warning(PoolReference(lb.Pool{Name: "p", UID: "uid-2"}), lb.ReasonPoolOverlaps, "it overlaps")
		e.Warning(PeerReference(lb.Peer{Name: "n1", UID: "uid-3"}), lb.ReasonNoOwner, "nobody")
	})
	got := sentEvents(t, core)
	if len(got) != 3 {
		t.Fatalf("sent %d Events: %v", len(got), got)
	}
	e := got["Assigned: 10.0.0.1 from pool p"]
	about := corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: "shop", Name: "web", UID: "uid-1"}
	if e.Namespace != "shop" || e.InvolvedObject != about || e.Type != corev1.EventTypeNormal ||
		e.Source.Component != "landfall-controller" || e.Source.Host != "pod-1" {
		t.Errorf("of a Service: %+v", e)
	}
	e = got["Overlapping: it overlaps"]
	about = corev1.ObjectReference{APIVersion: "landfall.dev/v1beta1", Kind: "IPAddressPool", Name: "p", UID: "uid-2"}
	if e.Namespace != metav1.NamespaceDefault || e.InvolvedObject != about || e.Type != corev1.EventTypeWarning {
		t.Errorf("of a pool: %+v", e)
	}
}

func TestRepeatedEventsBecomeACount(t *testing.T) {
	core := fake.NewClientset()
	runEvents(t, core, func(e *Events) {
		for range 5 {
			e.Warning(webReference, lb.ReasonPoolExhausted, "full")
			time.Sleep(time.Second)
		}
	})
	got := sentEvents(t, core)
	if e := got["PoolExhausted: full"]; len(got) != 1 || e.Count != 5 {
		t.Errorf("sent %v", got)
	}
}

func TestAnObjectGetsEventsAtALowRate(t *testing.T) {
	core := fake.NewClientset()
	runEvents(t, core, func(e *Events) {
		for i := range 500 {
			e.Warning(webReference, lb.ReasonPoolExhausted, fmt.Sprint(i))
		}
	})
	if n := len(core.Actions()); n > 50 {
		t.Errorf("%d writes for 500 Events of one object", n)
	}
}

// TestAMonthOfEvents sends Events about objects that come and go for a simulated month, in which the API server is away
// for six hours each day: nothing stays in the queue, and each Event has its turn.
func TestAMonthOfEvents(t *testing.T) {
	core := fake.NewClientset()
	var away atomic.Bool
	core.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
		if away.Load() {
			return true, nil, errors.New("connection refused")
		}
		return false, nil, nil
	})
	sent := 0
	runEvents(t, core, func(e *Events) {
		size := func() map[string]int {
			synctest.Wait()
			return leaktest.Entries(e.queue)
		}
		before := size()
		for turn := range 30 * 4 {
			away.Store(turn%4 == 1)
			for _, namespace := range []string{"shop", fmt.Sprint("space-", turn)} {
				e.Normal(ServiceReference(lb.Service{Key: lb.Key{Namespace: namespace, Name: fmt.Sprint("web-", turn)}}),
					lb.ReasonAssigned, "10.0.0.1 from pool p")
				sent++
			}
			if time.Sleep(6 * time.Hour); away.Load() && size()[".waiting"] == 0 {
				t.Error("nothing waits while the API server is away")
			}
		}
		leaktest.Compare(t, before, size())
	})
	if got := len(core.Actions()); got < sent {
		t.Errorf("%d writes for %d Events", got, sent)
	}
}

// TestEventsWaitForTheAPIServer tells an API server that cannot be reached from one that says no.
func TestEventsWaitForTheAPIServer(t *testing.T) {
	for name, test := range map[string]struct {
		failure  error
		attempts int
		sent     []string
	}{
		"unreachable": {errors.New("dial: connection refused"), 4, []string{"Assigned: a", "Assigned: b"}},
		"refused":     {apierrors.NewForbidden(corev1.Resource("events"), "", nil), 2, []string{"Assigned: b"}},
	} {
		t.Run(name, func(t *testing.T) {
			core := fake.NewClientset()
			attempts, failures := 0, 2
			if name == "refused" {
				failures = 1
			}
			core.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
				attempts++
				return attempts <= failures, nil, test.failure
			})
			runEvents(t, core, func(e *Events) {
				e.Normal(webReference, lb.ReasonAssigned, "a")
				e.Normal(webReference, lb.ReasonAssigned, "b")
				time.Sleep(time.Minute)
			})
			got := sentEvents(t, core)
			for _, want := range test.sent {
				if _, ok := got[want]; !ok {
					t.Errorf("%q was not sent", want)
				}
			}
			if len(got) != len(test.sent) || attempts != test.attempts {
				t.Errorf("sent %v in %d attempts, want %d", got, attempts, test.attempts)
			}
		})
	}
}

// Contract clause 11: a namespace that fills the queue costs the others no Event, nor those of objects
// without a namespace.
func TestContract11OneNamespaceCostsNoEventOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 60
		core := fake.NewClientset()
		e := newEvents(fakeKinds{core}, slog.New(slog.DiscardHandler), "landfall-controller", "pod-1")
		e.queue = newFairQueue[*unsent](most)
		about := func(namespace string, i int) Reference {
			return ServiceReference(lb.Service{Key: lb.Key{Namespace: namespace, Name: fmt.Sprint("service-", i)}})
		}
		for i := range 3 * most {
			e.Warning(about("noisy", i), lb.ReasonPoolExhausted, fmt.Sprint("noise ", i))
		}
		for i := range 20 {
			e.Normal(about("shop", i), lb.ReasonAssigned, fmt.Sprint(i))
		}
		e.Warning(PoolReference(lb.Pool{Name: "p"}), lb.ReasonPoolOverlaps, "of a pool")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- e.Run(ctx) }()
		synctest.Wait()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		got := sentEvents(t, core)
		for i := range 20 {
			if _, ok := got[fmt.Sprint("Assigned: ", i)]; !ok {
				t.Errorf("the Event of Service %d is lost", i)
			}
		}
		if _, ok := got["Overlapping: of a pool"]; !ok {
			t.Error("the pool's Event is lost")
		}
		if len(got) != most {
			t.Errorf("%d Events were sent, want %d", len(got), most)
		}
	})
}

// Contract clause 11: a namespace whose Events nobody answers, as a webhook that takes them hangs, costs the others
// none of theirs, and loses none of its own.
func TestContract11ANamespaceThatHangsHoldsUpNoEventOfOthers(t *testing.T) {
	const each = 20
	core := fake.NewClientset()
	var hangs atomic.Bool
	var others atomic.Int32
	hangs.Store(true)
	core.PrependReactor("*", "events", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetNamespace() != "hangs" {
			others.Add(1)
			return false, nil, nil
		} else if !hangs.Load() {
			return false, nil, nil
		}
		time.Sleep(eventTimeout)
		return true, nil, context.DeadlineExceeded
	})
	runEvents(t, core, func(e *Events) {
		about := func(namespace string, i int) Reference {
			return ServiceReference(lb.Service{Key: lb.Key{Namespace: namespace, Name: fmt.Sprint("service-", i)}})
		}
		for range 3 {
			e.Warning(about("hangs", 0), lb.ReasonPoolExhausted, "full")
		}
		for i := range each {
			e.Normal(about("shop", i), lb.ReasonAssigned, fmt.Sprint(i))
		}
		e.Warning(PoolReference(lb.Pool{Name: "p"}), lb.ReasonPoolOverlaps, "of a pool")
		time.Sleep(time.Minute)
		if got := others.Load(); got != each+1 {
			t.Errorf("%d Events of others were sent, want %d", got, each+1)
		}
		hangs.Store(false)
		time.Sleep(time.Minute)
	})
	if got := sentEvents(t, core); len(got) != each+2 || got["PoolExhausted: full"].Count != 3 {
		t.Errorf("at last there are %v", got)
	}
}

// TestEventsNeverBlock has nobody send, and then an end while an attempt is made again and again.
func TestEventsNeverBlock(t *testing.T) {
	core := fake.NewClientset()
	core.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("dial: connection refused")
	})
	runEvents(t, core, func(e *Events) {
		for range 3 * eventQueue {
			e.Normal(webReference, lb.ReasonAssigned, "a")
		}
		time.Sleep(5 * time.Minute)
	})
}

func TestAnAPIServerThatHangsIsNoHangOfEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core := fake.NewClientset()
		core.PrependReactor("create", "events", func(clienttesting.Action) (bool, runtime.Object, error) {
			time.Sleep(eventTimeout) // as an API server that does not answer
			return true, nil, context.DeadlineExceeded
		})
		e := newEvents(fakeKinds{core}, slog.New(slog.DiscardHandler), "landfall-proxy", "n1")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- e.Run(ctx) }()
		e.Warning(Reference{Kind: "Service", Namespace: "default", Name: "web"}, "Reason", "message")
		for range 3600 {
			time.Sleep(time.Second)
			if busy := e.Busy(); busy > eventTimeout+maxEventRetry {
				t.Fatalf("busy for %v", busy)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestAWatchThatHangsIsSeen has somebody who is told of a change never return.
func TestAWatchThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		w := &watch{}
		c := &Client{watches: []*watch{{}, w}}
		p := &Passwords{followed: map[string]*followed{"other": {watch: &watch{}}, "hangs": {watch: w}}}
		store := reportingStore{TransformingStore: blocking{hang: hang}, watch: w, client: c}
		go func() { _ = store.Add(nil) }()
		time.Sleep(time.Hour)
		if busy, also := c.Busy(), p.Busy(); busy != time.Hour || also != time.Hour {
			t.Errorf("busy for %v, with passwords for %v", busy, also)
		}
		close(hang)
		synctest.Wait()
		if busy, also := c.Busy(), p.Busy(); busy != 0 || also != 0 {
			t.Errorf("busy for %v, with passwords for %v", busy, also)
		}
	})
}

type blocking struct {
	cache.TransformingStore
	hang chan struct{}
}

func (b blocking) Add(any) error {
	<-b.hang
	return nil
}
