package requested

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

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var errGone = errors.New("gone")

// writer takes writes, by the time since the test began.
type writer struct {
	mu     sync.Mutex
	began  time.Time
	writes []string
	answer func(ctx context.Context, service lb.Key) error
}

func (w *writer) write(ctx context.Context, service lb.Key, write plan.ConditionWrite) error {
	w.mu.Lock()
	w.writes = append(w.writes, fmt.Sprint(time.Since(w.began), " ", service, " ", write.Want.Message))
	w.mu.Unlock()
	if _, bounded := ctx.Deadline(); !bounded {
		return errors.New("a write that may last for ever")
	}
	if w.answer != nil {
		return w.answer(ctx, service)
	}
	return nil
}

// run runs an actor in a bubble.
func run(t *testing.T, w *writer, story func(set func(map[lb.Key]plan.ConditionWrite))) {
	synctest.Test(t, func(t *testing.T) {
		w.began = time.Now()
		a := New(Deps{Log: slog.New(slog.DiscardHandler), Now: time.Now, Write: w.write,
			Gone: func(err error) bool { return errors.Is(err, errGone) }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		story(func(wanted map[lb.Key]plan.ConditionWrite) { a.Set(maps.Clone(wanted)); synctest.Wait() })
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func says(message string, turn time.Duration) plan.ConditionWrite {
	return plan.ConditionWrite{UID: "1", Turn: turn, Want: lb.Condition{Type: lb.ConditionAsRequested, Message: message}}
}

func (w *writer) want(t *testing.T, want ...string) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.Equal(w.writes, want) {
		t.Errorf("writes %q, want %q", w.writes, want)
	}
}

// A node waits for its turn, writes once, and rests after.
func TestWrites(t *testing.T) {
	key := lb.Key{Namespace: "default", Name: "web"}
	w := &writer{}
	run(t, w, func(set func(map[lb.Key]plan.ConditionWrite)) {
		set(map[lb.Key]plan.ConditionWrite{key: says("a", 3*time.Second)})
		time.Sleep(2 * time.Second)
		set(map[lb.Key]plan.ConditionWrite{}) // another node has written
		time.Sleep(8 * time.Second)
		w.want(t)
		set(map[lb.Key]plan.ConditionWrite{key: says("b", 3*time.Second)})
		time.Sleep(time.Minute)
		set(map[lb.Key]plan.ConditionWrite{key: says("b", 3*time.Second)})
		time.Sleep(time.Minute)
		w.want(t, "13s default/web b")
		for range 600 { // a minute in which it changes all the time
			set(map[lb.Key]plan.ConditionWrite{key: says("c", 0)})
			time.Sleep(50 * time.Millisecond)
			set(map[lb.Key]plan.ConditionWrite{key: says("d", 0)})
			time.Sleep(50 * time.Millisecond)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := len(w.writes); n < 6 || n > 8 {
			t.Errorf("%d writes: %q", n, w.writes)
		}
	})
}

// What fails is tried again after the rest, and ever more rarely; what is for a Service that is gone is not.
func TestRetries(t *testing.T) {
	fails, gone := lb.Key{Namespace: "a", Name: "fails"}, lb.Key{Namespace: "b", Name: "gone"}
	w := &writer{answer: func(_ context.Context, service lb.Key) error {
		if service == gone {
			return errGone
		}
		return errors.New("refused")
	}}
	run(t, w, func(set func(map[lb.Key]plan.ConditionWrite)) {
		set(map[lb.Key]plan.ConditionWrite{fails: says("x", 0)})
		time.Sleep(80 * time.Second)
		w.want(t, "0s a/fails x", "20s a/fails x", "1m0s a/fails x")
		time.Sleep(time.Hour)
		w.mu.Lock()
		if n := len(w.writes); n < 7 || n > 9 {
			t.Errorf("%d writes in an hour: %q", n, w.writes)
		}
		w.writes, w.began = nil, time.Now()
		w.mu.Unlock()
		set(map[lb.Key]plan.ConditionWrite{gone: says("y", 0)})
		time.Sleep(time.Hour)
		w.want(t, "0s b/gone y")
	})
}

// A webhook that hangs for Services of one namespace holds up those of no other.
func TestContract11ANamespaceThatHangsHoldsUpNoOther(t *testing.T) {
	w := &writer{answer: func(ctx context.Context, service lb.Key) error {
		if service.Namespace == "hangs" {
			<-ctx.Done()
		}
		return ctx.Err()
	}}
	run(t, w, func(set func(map[lb.Key]plan.ConditionWrite)) {
		wanted := map[lb.Key]plan.ConditionWrite{}
		for i := range 50 {
			wanted[lb.Key{Namespace: "hangs", Name: fmt.Sprint(i)}] = says("x", 0)
		}
		set(wanted)
		time.Sleep(time.Minute)
		wanted[lb.Key{Namespace: "other", Name: "web"}] = says("y", 0)
		set(wanted)
		w.mu.Lock()
		defer w.mu.Unlock()
		if !slices.Contains(w.writes, "1m0s other/web y") {
			t.Errorf("not written: %q", w.writes)
		}
	})
}
