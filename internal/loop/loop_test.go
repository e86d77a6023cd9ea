package loop

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// start runs a Runner over step and returns when each run began, relative to now.
func start(t *testing.T, opts Options, step Step) (runner *Runner, runs *[]time.Duration) {
	t.Helper()
	began := time.Now()
	runs = new([]time.Duration)
	runner = New(func(ctx context.Context) (time.Duration, error) {
		*runs = append(*runs, time.Since(began))
		return step(ctx)
	}, opts)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- runner.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return runner, runs
}

func check(t *testing.T, runs []time.Duration, want ...time.Duration) {
	t.Helper()
	if diff := cmp.Diff(want, runs); diff != "" {
		t.Errorf("runs (-want +got):\n%s", diff)
	}
}

func TestFirstPokeFiresAtOnceAndBurstsAreFolded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runner, runs := start(t, Options{Gap: time.Second}, func(context.Context) (time.Duration, error) { return 0, nil })
		synctest.Wait()
		check(t, *runs)
		time.Sleep(3 * time.Second)
		for range 100 {
			runner.Poke()
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		check(t, *runs, 3*time.Second, 4*time.Second)
	})
}

func TestFailuresAreRetriedWithBackoffAndSoonerWhenPoked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		failures := 4
		runner, runs := start(t, Options{MinBackoff: time.Second, MaxBackoff: 3 * time.Second},
			func(context.Context) (time.Duration, error) {
				if failures--; failures >= 0 {
					return 0, errors.New("no luck")
				}
				return 0, nil
			})
		runner.Poke()
		time.Sleep(8 * time.Second)
		runner.Poke()
		time.Sleep(time.Hour)
		synctest.Wait()
		check(t, *runs, 0, 1*time.Second, 3*time.Second, 6*time.Second, 8*time.Second)

		failures = 1
		runner.Poke()
		time.Sleep(time.Hour)
		synctest.Wait()
		restart := time.Hour + 8*time.Second
		check(t, (*runs)[5:], restart, restart+time.Second)
	})
}

func TestStepAsksToRunAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := 2
		runner, runs := start(t, Options{}, func(context.Context) (time.Duration, error) {
			if left--; left >= 0 {
				return time.Minute, nil
			}
			return 0, nil
		})
		runner.Poke()
		time.Sleep(time.Hour)
		synctest.Wait()
		check(t, *runs, 0, time.Minute, 2*time.Minute)
	})
}

// A runner waits after a run for as many times as long as that took, up to a limit; the first run
// after a calm begins at once.
func TestRunsThatCostMuchFoldMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took := time.Millisecond
		runner, runs := start(t, Options{Rest: 10, MaxRest: 20 * time.Millisecond},
			func(context.Context) (time.Duration, error) {
				time.Sleep(took)
				took = time.Second
				return 0, nil
			})
		for _, after := range []time.Duration{0, time.Millisecond, 499 * time.Millisecond, 9500 * time.Millisecond} {
			time.Sleep(after)
			runner.Poke()
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		check(t, *runs, 0, 11*time.Millisecond, 1031*time.Millisecond, 10*time.Second)
	})
}

// What follows from one thing is done at once. While pokes never end, runs come at their interval,
// and after a calm at once again; PokeNow waits for nothing.
func TestRunsThatNeverEndAreFolded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ms = time.Millisecond
		runner, runs := start(t, Options{Gap: ms, Every: 100 * ms, Burst: 3},
			func(context.Context) (time.Duration, error) { return 0, nil })
		for range 350 {
			runner.Poke()
			time.Sleep(ms)
		}
		synctest.Wait()
		check(t, *runs, 0, 1*ms, 2*ms, 102*ms, 202*ms, 302*ms)
		runner.PokeNow()
		synctest.Wait()
		check(t, (*runs)[6:], 350*ms)
		time.Sleep(time.Hour)
		synctest.Wait()
		*runs = nil
		for range 5 {
			runner.Poke()
			time.Sleep(ms)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		calm := time.Hour + 350*ms
		check(t, *runs, calm, calm+1*ms, calm+2*ms, calm+102*ms)
	})
}

// What comes several times in each interval, but not without an end, never waits.
func TestRunsAtAModerateRateDoNotWait(t *testing.T) {
	const every = 100 * time.Millisecond
	for set, regain := range map[time.Duration]time.Duration{0: every / 4, every / 2: every / 2} {
		synctest.Test(t, func(t *testing.T) {
			runner, runs := start(t, Options{Every: every, Burst: 12, Regain: set},
				func(context.Context) (time.Duration, error) { return 0, nil })
			for i := range 100 {
				for j := range 11 { // one thing has many that follow from it
					runner.Poke()
					synctest.Wait()
					if want := 11*i + j + 1; len(*runs) != want {
						t.Fatalf("%d runs, want %d", len(*runs), want)
					}
				}
				time.Sleep(11 * regain)
			}
		})
	}
}

// What comes at a higher rate than is regained is folded in the end.
func TestRunsAboveTheRateThatIsRegainedAreFolded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const every = 100 * time.Millisecond
		var runs atomic.Int64
		runner, _ := start(t, Options{Every: every, Burst: 12, Regain: every / 2},
			func(context.Context) (time.Duration, error) {
				runs.Add(1)
				return 0, nil
			})
		comes := func(d time.Duration) (ran int64) { // as often as a quarter of every would regain
			before := runs.Load()
			for began := time.Now(); time.Since(began) < d; {
				runner.Poke()
				time.Sleep(every / 4)
			}
			synctest.Wait()
			return runs.Load() - before
		}
		if n := comes(5 * every); n != 20 {
			t.Errorf("%d runs at first, want one for each poke", n)
		}
		comes(10 * every)
		if n := comes(100 * every); n < 99 || n > 101 {
			t.Errorf("%d runs in 100 intervals, want one in each", n)
		}
	})
}

// PokeNow ends the rest after a run that cost much, and is kept until Run is called.
func TestPokeNowEndsARest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runner, runs := start(t, Options{Rest: 20, MaxRest: time.Minute},
			func(context.Context) (time.Duration, error) {
				time.Sleep(time.Second)
				return 0, nil
			})
		runner.PokeNow()
		time.Sleep(500 * time.Millisecond)
		runner.Poke()
		time.Sleep(5 * time.Second)
		runner.PokeNow()
		time.Sleep(time.Hour)
		synctest.Wait()
		check(t, *runs, 0, 5500*time.Millisecond)
	})
}

// What is urgent does not wait, and leaves no debt for what comes after it.
func TestUrgentRunsLeaveNoDebt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const every = 100 * time.Millisecond
		runner, runs := start(t, Options{Every: every, Burst: 20},
			func(context.Context) (time.Duration, error) { return 0, nil })
		for range 500 {
			runner.PokeNow()
			time.Sleep(every / 5)
		}
		synctest.Wait()
		n := len(*runs)
		runner.Poke()
		time.Sleep(every)
		synctest.Wait()
		if n != 500 || len(*runs) != n+1 {
			t.Errorf("%d runs for 500 urgent pokes, and %d within %s of the next", n, len(*runs)-n, every)
		}
	})
}
