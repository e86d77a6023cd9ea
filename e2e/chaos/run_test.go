package chaos

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// A round that violates a clause about the state settles for two minutes first. What is reported begins a minute before
// the round all the same.
func TestTheReportHoldsTheRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{}
		round := func(_ context.Context, r story.Round) (e contract.Evidence, took time.Duration, err error) {
			for _, event := range r.Events {
				j.add("begin %s", event)
			}
			if r.Number == 3 {
				e.Settled.Unknown = []string{"nothing is seen"}
				time.Sleep(settleTime)
			}
			time.Sleep(50 * time.Second)
			return e, settleTime, nil
		}
		var since time.Time
		decisions := func(at time.Time) string {
			since = at
			return "what the agents say"
		}
		told := story.Generate(1, Cast(), 5)
		began := time.Now()
		got, err := tell(t.Context(), Options{Story: told}, j, round, decisions)
		if err != nil || len(got.Told.Rounds) != 3 || len(got.Violations) != 1 {
			t.Fatalf("%+v, %v", got, err)
		}
		for n, want := range []bool{false, true, true, false} { // the second begins 50 s before the third
			if text := told.Rounds[n].Events[0].String(); strings.Contains(got.Journal, text) != want {
				t.Errorf("round %d is reported: %v, want %v", n+1, !want, want)
			}
		}
		if want := began.Add(40 * time.Second); !since.Equal(want) || !strings.HasSuffix(got.Journal, "what the agents say") {
			t.Errorf("what the agents say is from %v on, want %v", since.Sub(began), want.Sub(began))
		}
	})
}

// A run lasts as long as it was asked to, however long its rounds take, and tells what a story of so many rounds tells.
func TestARunLastsItsTime(t *testing.T) {
	for _, each := range []time.Duration{7 * time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			round := func(context.Context, story.Round) (contract.Evidence, time.Duration, error) {
				time.Sleep(each)
				return contract.Evidence{}, 0, nil
			}
			const length = 10 * time.Minute
			got, err := tell(t.Context(), Options{Story: story.New(3), Length: length}, &journal{}, round, nil)
			if err != nil || got.Length < length || got.Length >= length+each {
				t.Errorf("rounds of %v took %v, %v", each, got.Length, err)
			}
			if want := story.Generate(3, Cast(), len(got.Told.Rounds)); !reflect.DeepEqual(got.Told, want) {
				t.Errorf("%+v was told, want %+v", got.Told, want)
			}
		})
	}
}

// A round that fails is judged and reported like the others, and is the last.
func TestTheReportHoldsARoundThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{}
		failed := errors.New("it ended by itself")
		round := func(_ context.Context, r story.Round) (e contract.Evidence, took time.Duration, err error) {
			j.add("begin round %d", r.Number)
			e.Samples = make([]contract.Sample, 1)
			if r.Number == 3 {
				e.Settled.Unknown, err = []string{"nothing is seen"}, failed
			}
			return e, 0, err
		}
		decisions := func(time.Time) string { return "what the agents say" }
		got, err := tell(t.Context(), Options{Story: story.Generate(1, Cast(), 5), KeepGoing: true}, j, round, decisions)
		if !errors.Is(err, failed) || !strings.Contains(err.Error(), "round 3") {
			t.Error(err)
		}
		if len(got.Told.Rounds) != 3 || got.Samples != 3 || len(got.Violations) != 1 {
			t.Errorf("%+v", got)
		}
		for _, want := range []string{"begin round 3", "it ended by itself", "what the agents say"} {
			if !strings.Contains(got.Journal, want) {
				t.Errorf("%q is not in the journal: %s", want, got.Journal)
			}
		}
		if text := Report(Result{Told: got.Told, Journal: got.Journal}); !strings.HasSuffix(text, got.Journal) {
			t.Errorf("without a violation the report is %s", text)
		}
	})
}

// A round that is interrupted is not judged: what is not well had no time to get well.
func TestAnInterruptedRoundIsNotJudged(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	round := func(_ context.Context, r story.Round) (e contract.Evidence, took time.Duration, err error) {
		if r.Number == 2 {
			cancel()
			e.Settled.Unknown = []string{"context canceled"}
		}
		return e, 0, nil
	}
	got, err := tell(ctx, Options{Story: story.Generate(1, Cast(), 5)}, &journal{}, round, func(time.Time) string { return "" })
	if !errors.Is(err, context.Canceled) || len(got.Told.Rounds) != 1 || len(got.Violations) > 0 {
		t.Errorf("%+v, %v", got, err)
	}
}
