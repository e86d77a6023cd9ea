package report

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// hanging is an API server on which some writes hang.
type hanging struct {
	server
	hangs func(lb.Key) bool

	count     sync.Mutex
	begun     int // of the writes that hung
	now, most int // how many hang at once
}

func (h *hanging) write(ctx context.Context, service lb.Service, status lb.AnnouncedStatus) (bool, error) {
	h.count.Lock()
	if !h.hangs(service.Key) {
		h.count.Unlock()
		return h.server.write(ctx, service, status)
	}
	h.begun, h.now = h.begun+1, h.now+1
	h.most = max(h.most, h.now)
	h.count.Unlock()
	<-ctx.Done()
	h.count.Lock()
	defer h.count.Unlock()
	h.now--
	return false, ctx.Err()
}

func (h *hanging) setHangs(hangs func(lb.Key) bool) {
	h.count.Lock()
	defer h.count.Unlock()
	h.hangs = hangs
}

// hung returns how many writes have hung since the last time, and how many at once.
func (h *hanging) hung() (begun, most int) {
	h.count.Lock()
	defer h.count.Unlock()
	begun, most = h.begun, h.most
	h.begun, h.most = 0, h.now
	return begun, most
}

// hangingStory runs f beside a Reporter whose writes hang where hangs says so.
func hangingStory(t *testing.T, hangs func(lb.Key) bool, keys []lb.Key, f func(h *hanging, r *Reporter)) {
	synctest.Test(t, func(t *testing.T) {
		h := &hanging{server: server{services: map[lb.Key]lb.Service{}}, hangs: hangs}
		for _, key := range keys {
			h.set(lb.Service{Key: key})
		}
		r := New(Options{Log: slog.New(slog.DiscardHandler), Service: h.get, Write: h.write, Event: h.event,
			Refused: func(err error) bool { return errors.Is(err, errRefused) }})
		r.Begin(nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		time.Sleep(time.Second)
		f(h, r)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func inNamespace(namespace string) func(lb.Key) bool {
	return func(key lb.Key) bool { return key.Namespace == namespace }
}

func nothing(lb.Key) bool { return false }

// numbered returns the keys of Services of some namespaces.
func numbered(namespaces, each int) (keys []lb.Key) {
	for n := range namespaces {
		for i := range each {
			keys = append(keys, lb.Key{Namespace: fmt.Sprint("a", n), Name: fmt.Sprint("web-", i)})
		}
	}
	return keys
}

// A webhook hangs for the Services of a namespace that comes before the others by name.
func TestContract11ANamespaceThatHangsHoldsUpNoOther(t *testing.T) {
	slow := numbered(1, 100)
	hangingStory(t, inNamespace("a0"), append(slow, nginx), func(h *hanging, r *Reporter) {
		for i := range 20 {
			from := fmt.Sprint("n", i)
			for _, key := range slow {
				r.Update(map[lb.Key]*lb.AnnouncedStatus{key: announced(from)})
			}
			time.Sleep(time.Duration(i) * time.Second) // with a write of the others under way, or between two
			h.took()
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced(from)})
			time.Sleep(settleGood + 100*time.Millisecond)
			if got := h.took(); !slices.Contains(got, "write my-nginx: announced from "+from) {
				t.Errorf("%v, and no write to the other Service after %d s", got, i)
			}
			time.Sleep(calm)
		}
		h.hung()
		time.Sleep(time.Hour)
		if begun, most := h.hung(); begun < 60 || begun > 3600/(10+8)+1 || most > 1 {
			t.Errorf("%d writes in an hour, %d at once", begun, most)
		}
		h.setHangs(nothing)
		time.Sleep(writeTimeout + maxRetry)
		for _, key := range slow {
			if service, _ := h.get(key); !announced("n19").ShownBy(service) {
				t.Errorf("%s shows %+v when nothing hangs any more", key, service.Conditions)
			}
		}
	})
}

// One Service alone hangs: others of its namespace, which come after it by name, are written meanwhile.
func TestContract11AServiceThatHangsHoldsUpItsNamespaceForAWhile(t *testing.T) {
	keys := numbered(1, 20)
	hangs := func(key lb.Key) bool { return key == keys[0] }
	hangingStory(t, hangs, keys, func(h *hanging, r *Reporter) {
		for i := range 10 {
			from := fmt.Sprint("n", i)
			for _, key := range keys {
				r.Update(map[lb.Key]*lb.AnnouncedStatus{key: announced(from)})
			}
			time.Sleep(writeTimeout + maxRetry + maxOwnQuiet)
			for _, key := range keys[1:] {
				if service, _ := h.get(key); !announced(from).ShownBy(service) {
					t.Errorf("%s shows %+v, want %s", key, service.Conditions, from)
				}
			}
		}
	})
}

// No write is answered at all, of many namespaces: few are under way at once, and all are written soon after.
func TestContract7AnAPIServerThatHangsGetsFewWrites(t *testing.T) {
	for _, namespaces := range []int{4, 50} {
		keys := numbered(namespaces, 10)
		hangingStory(t, func(lb.Key) bool { return true }, keys, func(h *hanging, r *Reporter) {
			for _, key := range keys {
				r.Update(map[lb.Key]*lb.AnnouncedStatus{key: announced("n1")})
			}
			time.Sleep(time.Hour)
			if _, most := h.hung(); most > maxWrites {
				t.Errorf("%d namespaces: %d writes at once", namespaces, most)
			}
			time.Sleep(time.Hour)
			begun, most := h.hung()
			if at := int(time.Hour / writeTimeout); begun > at*maxWrites/2+maxWrites || most > maxWrites/2 {
				t.Errorf("%d namespaces: %d writes in an hour, %d at once", namespaces, begun, most)
			}
			h.setHangs(nothing)
			time.Sleep(writeTimeout + maxRetry)
			for _, key := range keys {
				if service, _ := h.get(key); !announced("n1").ShownBy(service) {
					t.Errorf("%s shows %+v when nothing hangs any more", key, service.Conditions)
				}
			}
		})
	}
}

// Another node reports while a write waits for its turn behind others.
func TestWhatWaitsForItsTurnIsNotWrittenOnceItIsNotWanted(t *testing.T) {
	keys := numbered(1, 2)
	hangingStory(t, nothing, keys, func(h *hanging, r *Reporter) {
		h.writing = func(key lb.Key) {
			if key == keys[0] {
				r.Update(map[lb.Key]*lb.AnnouncedStatus{keys[1]: nil})
				r.Update(map[lb.Key]*lb.AnnouncedStatus{keys[1]: announced("a")})
				r.Update(map[lb.Key]*lb.AnnouncedStatus{keys[1]: nil})
			}
		}
		r.Update(map[lb.Key]*lb.AnnouncedStatus{keys[0]: announced("a"), keys[1]: announced("a")})
		time.Sleep(time.Minute)
		want(t, &h.server, "write web-0: announced from a", "event web-0: Announced true")
	})
}
