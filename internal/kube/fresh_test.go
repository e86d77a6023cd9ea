package kube

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func versioned(name, version string) *corev1.Service {
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: version}}
}

var services = corev1.SchemeGroupVersion.WithResource("services")

// atVersion has lists carry the version that latest points to.
func atVersion(core *fake.Clientset, latest *string) {
	core.PrependReactor("list", "services", func(action clienttesting.Action) (bool, runtime.Object, error) {
		o, err := core.Tracker().List(action.GetResource(), corev1.SchemeGroupVersion.WithKind("Service"),
			action.GetNamespace())
		if list, ok := o.(*corev1.ServiceList); ok {
			list.ResourceVersion = *latest
		}
		return true, o, err
	})
}

// TestContract8CatchUpAfterRestore: what the watch showed before etcd was restored has higher
// versions than all that there is now, or than that Service has while others have moved on.
func TestContract8CatchUpAfterRestore(t *testing.T) {
	for _, latest := range []string{"12", "95"} {
		synctest.Test(t, func(t *testing.T) {
			core := fake.NewClientset(versioned("a", "10"), versioned("b", "11"))
			atVersion(core, &latest)
			status := &Status{core: fakeKinds{core}, now: time.Now}
			table := newTable(sameService, func(lb.Key) {})
			k, a := convertService(versioned("a", "90"))
			l, b := convertService(versioned("b", "11"))
			table.replace(map[lb.Key]lb.Service{k: a, l: b})
			done := make(chan error, 1)
			go func() { done <- status.CatchUp(t.Context(), table) }()
			time.Sleep(10 * time.Second)
			select {
			case err := <-done:
				t.Fatalf("version %s of all: took what was there before for what there is: %v", latest, err)
			default:
			}
			a.Version = "10"
			table.put(k, a, true)
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestContract11CatchUpWithABusyService has Services change and the watch show it, so often that by each look the
// table is newer than any list.
func TestContract11CatchUpWithABusyService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		version := 10
		latest := strconv.Itoa(version)
		core := fake.NewClientset(versioned("a", latest), versioned("b", latest))
		atVersion(core, &latest)
		status := &Status{core: fakeKinds{core}, now: time.Now}
		table := newTable(sameService, func(lb.Key) {})
		table.replace(map[lb.Key]lb.Service{})
		change := func(name string) {
			version++
			latest = strconv.Itoa(version)
			if err := core.Tracker().Update(services, versioned(name, latest), "default"); err != nil {
				t.Error(err)
			}
			k, s := convertService(versioned(name, latest))
			table.put(k, s, true)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*listEvery)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- status.CatchUp(ctx, table) }()
		for {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			select {
			case err := <-done:
				if err != nil {
					t.Errorf("it never caught up: %v", err)
				}
				return
			default:
			}
			change("a")
			change("b")
		}
	})
}

// TestContract8CatchUp waits until a watch has delivered all that there was at the beginning.
func TestContract8CatchUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		latest := "12"
		core := fake.NewClientset(versioned("a", "10"), versioned("b", "9"), versioned("gone", "8"))
		atVersion(core, &latest)
		failures := 2
		core.PrependReactor("list", "services", func(clienttesting.Action) (bool, runtime.Object, error) {
			failures--
			return failures >= 0, nil, errors.New("dial: connection refused")
		})
		status := &Status{core: fakeKinds{core}, now: time.Now}
		table := newTable(sameService, func(lb.Key) {})
		done := make(chan error, 1)
		go func() { done <- status.CatchUp(t.Context(), table) }()
		waits := func(why string) {
			t.Helper()
			time.Sleep(10 * time.Second)
			select {
			case err := <-done:
				t.Fatalf("%s: did not wait: %v", why, err)
			default:
			}
		}
		put := func(name, version string) {
			k, s := convertService(versioned(name, version))
			table.put(k, s, true)
		}
		waits("nothing is known")
		put("a", "9") // as text, this is above 10
		put("b", "9")
		waits("a is old")
		if err := core.Tracker().Update(services, versioned("a", "11"), "default"); err != nil {
			t.Fatal(err)
		}
		put("a", "11")
		waits("one is not known")
		if err := core.CoreV1().Services("default").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		waits("the first list has not arrived") // put is no list
		values := table.All()
		table.replace(values)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestCatchUpEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core := fake.NewClientset(versioned("a", "10"))
		status := &Status{core: fakeKinds{core}, now: time.Now}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := status.CatchUp(ctx, newTable(sameService, func(lb.Key) {})); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("returned %v", err)
		}
		core.PrependReactor("list", "services", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, errors.New("dial: connection refused")
		})
		if err := status.CatchUp(ctx, newTable(sameService, func(lb.Key) {})); err == nil {
			t.Error("no error without an API server")
		}
	})
}
