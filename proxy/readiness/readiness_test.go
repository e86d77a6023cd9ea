package readiness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var errGone = errors.New("gone")

// Each gate is opened once, whatever fails beside it.
func TestOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := map[string][]error{"fails": {errors.New("refused"), errors.New("refused")}, "gone": {errGone}}
		writes, opened, mu := map[string]int{}, map[lb.Reason]int{}, sync.Mutex{}
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Gone: func(err error) bool { return errors.Is(err, errGone) },
			Opened: func(r lb.Reason) { opened[r]++ },
			Write: func(ctx context.Context, pod lb.Key, gate Gate) error {
				if _, bounded := ctx.Deadline(); !bounded {
					t.Error("a write that may last for ever")
				}
				mu.Lock()
				defer mu.Unlock()
				writes[pod.Name+" "+gate.UID]++
				if rest := answers[pod.Name]; len(rest) > 0 {
					answers[pod.Name] = rest[1:]
					return rest[0]
				}
				return nil
			}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		set := func(uid string, names ...string) {
			wanted := map[lb.Key]Gate{}
			for _, name := range names {
				wanted[lb.Key{Name: name}] = Gate{uid, plan.Opening{Reason: lb.ReasonProgrammed}}
			}
			a.Set(wanted)
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		set("1", "works", "fails", "gone")
		set("1", "works", "fails", "gone") // as it is at each step until the watch shows it
		set("2", "works")
		set("2")
		set("2", "works")
		want := map[string]int{"works 1": 1, "fails 1": 3, "gone 1": 1, "works 2": 2}
		if diff := cmp.Diff(want, writes); diff != "" {
			t.Errorf("writes (-want +got):\n%s", diff)
		}
		if got := slices.Collect(maps.Values(opened)); !slices.Equal(got, []int{4}) {
			t.Errorf("counted %v, want four", opened)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// The planner says what shall be open with each of its steps. A gate that the API server refuses is not tried as often.
func TestRefusedGatesAreNotTriedWithEachStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		writes := 0
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Gone: func(error) bool { return false }, Opened: func(lb.Reason) {},
			Write: func(context.Context, lb.Key, Gate) error { writes++; return errors.New("refused") }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		for range 6000 { // a minute
			a.Set(map[lb.Key]Gate{{Name: "new"}: {"1", plan.Opening{Reason: lb.ReasonProgrammed}}})
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if writes < 3 || writes > 20 {
			t.Errorf("%d writes in a minute", writes)
		}
	})
}

// A webhook that hangs for pods of some namespaces holds up the gates of no other: it is a while before they are known
// to hang, and from then on there is always room.
func TestContract11NamespacesThatHangHoldUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, opened, mu, most, now := time.Now(), map[string]time.Duration{}, sync.Mutex{}, 0, 0
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Gone: func(error) bool { return false }, Opened: func(lb.Reason) {},
			Write: func(ctx context.Context, pod lb.Key, _ Gate) error {
				mu.Lock()
				now++
				most = max(most, now)
				mu.Unlock()
				if pod.Namespace >= "n" {
					<-ctx.Done()
				}
				mu.Lock()
				defer mu.Unlock()
				now--
				if ctx.Err() == nil {
					opened[pod.Namespace+pod.Name] = time.Since(began)
				}
				return ctx.Err()
			}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		wanted := map[lb.Key]Gate{}
		add := func(pods int, namespaces ...string) {
			wanted = maps.Clone(wanted)
			for _, namespace := range namespaces {
				for i := range pods {
					wanted[lb.Key{Namespace: namespace, Name: fmt.Sprint(i)}] = Gate{"1", plan.Opening{Reason: lb.ReasonProgrammed}}
				}
			}
			a.Set(wanted)
			synctest.Wait()
		}
		add(100, "n")
		add(10, "a")
		time.Sleep(time.Minute)
		add(100, "o", "p", "q", "r")
		time.Sleep(time.Minute)
		add(10, "b")
		time.Sleep(time.Hour)
		mu.Lock()
		for namespace, at := range map[string]time.Duration{"a": 0, "b": 2 * time.Minute} {
			for i := range 10 {
				if got, ok := opened[fmt.Sprint(namespace, i)]; got != at || !ok {
					t.Errorf("gate %d of namespace %s is opened after %v (%v), want %v", i, namespace, got, ok, at)
				}
			}
		}
		if most > maxWrites {
			t.Errorf("%d writes at once", most)
		}
		mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if now != 0 {
			t.Errorf("%d writes are under way after the end", now)
		}
	})
}

// A gate that waits behind others that hang is not opened once it is wanted no more, as the pod is not ready any more,
// and is if it is wanted again.
func TestGatesThatAreWantedNoMoreMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mu, tried, well := sync.Mutex{}, map[string]int{}, make(chan struct{})
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Gone: func(error) bool { return false }, Opened: func(lb.Reason) {},
			Write: func(ctx context.Context, pod lb.Key, _ Gate) error {
				mu.Lock()
				tried[pod.Name]++
				mu.Unlock()
				<-well
				return nil
			}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		set := func(names ...string) {
			wanted := map[lb.Key]Gate{}
			for _, name := range names {
				wanted[lb.Key{Namespace: "hangs", Name: name}] = Gate{"1", plan.Opening{Reason: lb.ReasonProgrammed}}
			}
			a.Set(wanted)
			synctest.Wait()
		}
		set("0", "1", "2", "3") // maxOfNamespace
		set("0", "1", "2", "3", "ends", "returns")
		set("0", "1", "2", "3")
		close(well)
		synctest.Wait()
		set("returns")
		time.Sleep(time.Hour)
		mu.Lock()
		want := map[string]int{"0": 1, "1": 1, "2": 1, "3": 1, "returns": 1}
		if diff := cmp.Diff(want, tried); diff != "" {
			t.Error(diff)
		}
		mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
