package loop

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestAStepThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang, parts := make(chan struct{}), 0
		runner, _ := start(t, Options{}, func(ctx context.Context) (time.Duration, error) {
			for range parts { // long, but each part ends
				time.Sleep(time.Minute)
				Progress(ctx)
			}
			<-hang
			return 0, nil
		})
		time.Sleep(time.Hour)
		if got := runner.Busy(); got != 0 {
			t.Errorf("at rest: busy for %v", got)
		}
		runner.Poke()
		time.Sleep(time.Hour)
		if got := runner.Busy(); got != time.Hour {
			t.Errorf("a step that hangs: busy for %v", got)
		}
		hang <- struct{}{}
		synctest.Wait()
		if got := runner.Busy(); got != 0 {
			t.Errorf("after the step: busy for %v", got)
		}
		parts = 60
		runner.Poke()
		for range 59 {
			time.Sleep(time.Minute)
			if got := runner.Busy(); got > time.Minute {
				t.Fatalf("a long step that comes further: busy for %v", got)
			}
		}
		close(hang)
		time.Sleep(time.Hour)
		Progress(t.Context()) // outside of a step it says nothing
		if got := runner.Busy(); got != 0 {
			t.Errorf("after the step: busy for %v", got)
		}
	})
}

func TestOneOfManyThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p Pulses
		want := func(what string, busy time.Duration) {
			t.Helper()
			if got := p.Busy(); got != busy {
				t.Errorf("%s: busy for %v, want %v", what, got, busy)
			}
		}
		want("at rest", 0)
		hangs := p.Begin()
		time.Sleep(time.Minute)
		p.Begin()()
		want("one is quick", time.Minute)
		other := p.Begin()
		time.Sleep(time.Minute)
		want("the longest", 2*time.Minute)
		hangs()
		want("the rest", time.Minute)
		other()
		want("at rest again", 0)
	})
}
