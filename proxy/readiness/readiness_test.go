package readiness

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
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
		writes, opened := map[string]int{}, map[lb.Reason]int{}
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Gone: func(err error) bool { return errors.Is(err, errGone) },
			Opened: func(r lb.Reason) { opened[r]++ },
			Write: func(ctx context.Context, pod lb.Key, gate Gate) error {
				if _, bounded := ctx.Deadline(); !bounded {
					t.Error("a write that may last for ever")
				}
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
