package report

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// objectRig runs an Objects and notes what it writes, when.
type objectRig struct {
	*Objects
	began time.Time

	mu    sync.Mutex // guards what follows
	wrote []string
	fail  error
	hangs string // the objects to which writes hang
}

func inObjects(t *testing.T, f func(r *objectRig)) {
	synctest.Test(t, func(t *testing.T) {
		r := &objectRig{Objects: NewObjects(slog.New(slog.DiscardHandler)), began: time.Now()}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- r.Run(ctx) }()
		f(r)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func (r *objectRig) want(contents ...string) {
	jobs := map[string]Job{}
	for _, content := range contents {
		jobs[content[:1]] = Job{Content: content, Do: func(ctx context.Context) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			if strings.Contains(r.hangs, content[:1]) {
				r.mu.Unlock()
				<-ctx.Done()
				r.mu.Lock()
				return ctx.Err()
			}
			r.wrote = append(r.wrote, time.Since(r.began).Round(100*time.Millisecond).String()+" "+content)
			return r.fail
		}}
	}
	r.Set(jobs)
}

func (r *objectRig) check(t *testing.T, want ...string) {
	t.Helper()
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Sort(r.wrote)
	if !slices.Equal(r.wrote, want) {
		t.Errorf("wrote %q, want %q", r.wrote, want)
	}
	r.wrote = nil
}

// take returns what was written since the last time.
func (r *objectRig) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	wrote := r.wrote
	r.wrote = nil
	return wrote
}

func (r *objectRig) failWith(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = err
}

func (r *objectRig) setHangs(objects string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.hangs = objects
}

func TestObjectsWritesWhatLasts(t *testing.T) {
	inObjects(t, func(r *objectRig) {
		r.want("a1", "b1")
		time.Sleep(200 * time.Millisecond)
		r.want("a2", "b1") // a1 did not last
		time.Sleep(400 * time.Millisecond)
		r.check(t, "300ms b1", "500ms a2")
		for range 5 {
			r.want("a2", "b1") // what was written and does not show yet is not written again at once
			time.Sleep(time.Second)
		}
		r.check(t)
		r.want() // it shows
		if !r.Idle() {
			t.Error("not idle")
		}
		time.Sleep(time.Minute)
		r.check(t)
		r.want("a2") // somebody has changed it
		time.Sleep(time.Second)
		r.check(t, "1m5.9s a2")
		time.Sleep(11 * time.Second)
		r.check(t, "1m15.9s a2") // it still does not show
	})
}

func TestObjectsIsSlowerWithWhatKeepsChanging(t *testing.T) {
	inObjects(t, func(r *objectRig) {
		for i := range 600 {
			r.want([]string{"a1", "a2"}[i/5%2])
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		r.mu.Lock()
		defer r.mu.Unlock()
		if n := len(r.wrote); n < 10 || n > 20 {
			t.Errorf("%d writes in a minute", n)
		}
	})
}

func TestObjectsTriesAgainAndGoesOnPastAFailure(t *testing.T) {
	inObjects(t, func(r *objectRig) {
		r.failWith(errors.New("conflict"))
		r.want("a1", "b1")
		time.Sleep(time.Second)
		r.check(t, "300ms a1", "300ms b1")
		r.failWith(nil)
		time.Sleep(time.Second)
		r.check(t, "1.3s a1", "1.3s b1")
		r.failWith(context.DeadlineExceeded)
		r.want("a2", "b2")
		time.Sleep(2 * time.Second)
		r.check(t, "2.3s a2", "2.3s b2", "3.3s a2", "3.3s b2")
	})
}

// An administrator's webhook hangs for one object: changes of another are written as ever, before, during and after a
// write to the first.
func TestContract11AnObjectThatHangsHoldsUpNoOther(t *testing.T) {
	inObjects(t, func(r *objectRig) {
		r.setHangs("a")
		for i := range 20 {
			b := fmt.Sprint("b", i)
			r.want("a1", b)
			time.Sleep(time.Second + time.Duration(i)*100*time.Millisecond)
			if got := r.take(); len(got) != 1 || !strings.HasSuffix(got[0], " "+b) {
				t.Errorf("wrote %q, want %s within a second", got, b)
			}
			r.want("a1") // b shows it
			time.Sleep(objectCalm + time.Second)
		}
		r.setHangs("")
		time.Sleep(writeTimeout + maxRetry)
		if got := r.take(); len(got) != 1 || !strings.HasSuffix(got[0], " a1") {
			t.Errorf("wrote %q when nothing hangs any more", got)
		}
	})
}

// Many objects hang: once that is known, they leave room for the others.
func TestContract11ManyObjectsThatHangLeaveRoom(t *testing.T) {
	inObjects(t, func(r *objectRig) {
		r.setHangs("abcdefgh")
		hang := []string{"a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1"}
		r.want(hang...)
		time.Sleep(3 * writeTimeout)
		for i := range 20 {
			z := fmt.Sprint("z", i)
			r.want(append(hang, z)...)
			time.Sleep(time.Second)
			if got := r.take(); len(got) != 1 || !strings.HasSuffix(got[0], " "+z) {
				t.Errorf("wrote %q, want %s within a second", got, z)
			}
			r.want(hang...)
			time.Sleep(time.Minute)
		}
	})
}

// What waits for its turn, as others hang, is written as it is wanted by then.
func TestObjectsWritesWhatIsWantedByThen(t *testing.T) {
	inObjects(t, func(r *objectRig) {
		r.setHangs("abcd")
		r.want("a1", "b1", "c1", "d1", "x1", "y1", "z1")
		time.Sleep(time.Second)
		r.want("x2", "z1")
		time.Sleep(writeTimeout)
		r.check(t, "10.3s x2", "10.3s z1")
	})
}
