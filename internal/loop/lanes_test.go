package loop

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// lanesTest calls Do with things that last until they are told to end.
type lanesTest struct {
	lanes *Lanes
	began []string
	ends  map[string]chan error
}

func (l *lanesTest) do(names ...string) {
	for _, name := range names {
		end := make(chan error)
		l.ends[name] = end
		owner, _, _ := strings.Cut(name, "/")
		l.lanes.Do(owner, func() error {
			l.lanes.mu.Lock()
			l.began = append(l.began, name)
			l.lanes.mu.Unlock()
			return <-end
		})
		synctest.Wait()
	}
}

func (l *lanesTest) end(err error, names ...string) {
	for _, name := range names {
		l.ends[name] <- err
		synctest.Wait()
	}
}

func (l *lanesTest) want(t *testing.T, what string, began ...string) {
	t.Helper()
	slices.Sort(l.began)
	if !slices.Equal(l.began, began) {
		t.Errorf("%s: %q began, want %q", what, l.began, began)
	}
	l.began = nil
}

func TestLanes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lanesTest{lanes: NewLanes(4, 2), ends: map[string]chan error{}}
		l.do("a/1", "a/2", "a/3", "a/4", "b/1", "b/2", "b/3", "c/1")
		l.want(t, "two of each owner, four of all", "a/1", "a/2", "b/1", "b/2")
		l.end(nil, "b/1", "b/2")
		l.want(t, "in turns", "b/3", "c/1")
		l.end(errors.New("no"), "a/1", "a/2")
		l.want(t, "one at a time of who fails", "a/3")
		l.do("d/1", "d/2")
		l.want(t, "there is room", "d/1")
		l.end(errors.New("no"), "d/1", "b/3", "c/1")
		l.want(t, "half of the room is for those who fail", "d/2")
		l.do("b/4", "c/2", "e/1")
		l.want(t, "the other half is not", "e/1")
		l.end(nil, "d/2", "a/3", "e/1")
		l.want(t, "who does not fail any more is as the others", "a/4", "b/4", "c/2")
		ended := false
		go func() {
			l.lanes.Wait()
			ended = true
		}()
		l.end(nil, "b/4", "a/4")
		if ended {
			t.Error("ended while one runs")
		}
		if l.end(nil, "c/2"); !ended {
			t.Error("not ended while none runs")
		}
		if l := l.lanes; len(l.waiting)+len(l.turns)+len(l.busy)+len(l.failing)+l.suspect > 0 {
			t.Errorf("left: %v %v %v %v %d", l.waiting, l.turns, l.busy, l.failing, l.suspect)
		}
		fails := func() error { return errors.New("no") }
		for i := range maxFailing {
			l.lanes.Do(fmt.Sprint(i), fails)
		}
		l.lanes.Wait()
		l.lanes.Do("0", fails)
		l.lanes.Wait()
		if n := len(l.lanes.failing); n != maxFailing {
			t.Errorf("%d owners are remembered, want %d: one of them has failed again", n, maxFailing)
		}
		for i := range 5 {
			l.lanes.Do(fmt.Sprint(maxFailing+i), fails)
		}
		l.lanes.Wait()
		if n := len(l.lanes.failing); n > maxFailing {
			t.Errorf("%d owners are remembered", n)
		}
	})
}

// What hangs and then succeeds leaves room for others' things like what fails.
func TestLanesOfWhoIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lanesTest{lanes: NewLanes(4, 2), ends: map[string]chan error{}}
		l.do("a/1", "a/2", "a/3", "a/4", "b/1", "b/2", "b/3", "b/4")
		l.want(t, "two of each owner", "a/1", "a/2", "b/1", "b/2")
		time.Sleep(tooSlow)
		l.end(nil, "a/1", "a/2", "b/1", "b/2")
		l.want(t, "one at a time of who is slow", "a/3", "b/3")
		l.do("c/1", "c/2")
		l.want(t, "there is room for others", "c/1", "c/2")
		l.end(nil, "a/3", "c/1", "c/2")
		l.do("a/5")
		l.want(t, "who is quick again is as the others", "a/4", "a/5")
		l.end(nil, "b/3", "a/4", "a/5", "b/4")
		l.lanes.Wait()
	})
}

// Owners whose things hang for the first time share half of the room, beyond one place for each.
func TestFewOwnersDoNotFillTheLanes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lanesTest{lanes: NewLanes(8, 3), ends: map[string]chan error{}}
		l.do("a/1", "a/2", "a/3", "b/1", "b/2", "b/3", "c/1", "c/2")
		l.want(t, "four beyond the first of each", "a/1", "a/2", "a/3", "b/1", "b/2", "b/3", "c/1")
		l.do("d/1", "d/2")
		l.want(t, "there is room for one who has nothing under way", "d/1")
		l.end(nil, "d/1")
		l.want(t, "one after the other", "d/2")
		l.end(nil, "a/1")
		l.want(t, "in the place of one of many", "c/2")
		l.end(nil, "a/2", "a/3", "b/1", "b/2", "b/3", "c/1", "c/2", "d/2")
		l.lanes.Wait()
	})
}
