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

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
)

var errRefused = errors.New("annotations: too long")

var (
	nginx = lb.Key{Namespace: "default", Name: "my-nginx"}
	dns   = lb.Key{Namespace: "kube-system", Name: "dns"}
)

func announced(from string) *lb.AnnouncedStatus {
	return &lb.AnnouncedStatus{
		Condition: lb.Condition{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced,
			Message: "announced from " + from},
		Announcements: "from " + from,
	}
}

func silent(reason lb.Reason, message string) *lb.AnnouncedStatus {
	return &lb.AnnouncedStatus{Condition: lb.Condition{Type: lb.ConditionAnnounced, Reason: reason, Message: message}}
}

// server is an API server that keeps conditions.
type server struct {
	mu       sync.Mutex
	services map[lb.Key]lb.Service
	fail     error
	refuses  map[lb.Key]bool // errRefused is the answer to each write to those
	writing  func(lb.Key)    // called before each write; nil for none
	log      []string        // writes and Events
}

func (s *server) get(k lb.Key) (lb.Service, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	service, ok := s.services[k]
	return service, ok
}

func (s *server) write(_ context.Context, service lb.Service, status lb.AnnouncedStatus) (bool, error) {
	if s.writing != nil {
		s.writing(service.Key)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != nil {
		return false, s.fail
	}
	if s.refuses[service.Key] {
		s.log = append(s.log, "refuse "+service.Key.Name)
		return false, errRefused
	}
	s.services[service.Key] = showing(service.Key, status)
	s.log = append(s.log, fmt.Sprintf("write %s: %s", service.Key.Name, status.Condition.Message))
	return true, nil
}

func (s *server) event(service lb.Service, good bool, reason lb.Reason, _ string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, fmt.Sprintf("event %s: %s %v", service.Key.Name, reason, good))
}

func (s *server) set(service lb.Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.services[service.Key] = service
}

// showing returns a Service that shows a status.
func showing(key lb.Key, status lb.AnnouncedStatus) lb.Service {
	return lb.Service{Key: key, Announcements: status.Announcements,
		Conditions: []lb.Condition{status.Condition, lb.Serving(status.Condition)}}
}

func (s *server) setFail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = err
}

func (s *server) setRefuses(key lb.Key, refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuses = map[lb.Key]bool{key: refuses}
}

func (s *server) took() []string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.log
	s.log = nil
	return was
}

// story runs f beside a Reporter that has begun and is past the gap after its first run, so that it
// takes in the first update at once.
func story(t *testing.T, f func(t *testing.T, s *server, r *Reporter)) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{services: map[lb.Key]lb.Service{nginx: {Key: nginx}, dns: {Key: dns}}}
		r := New(Options{Log: slog.New(slog.DiscardHandler), Service: s.get, Write: s.write, Event: s.event,
			Refused: func(err error) bool { return errors.Is(err, errRefused) }})
		r.Begin(nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		time.Sleep(time.Second)
		f(t, s, r)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func want(t *testing.T, s *server, lines ...string) {
	t.Helper()
	if d := cmp.Diff(lines, s.took(), cmpopts.EquateEmpty()); d != "" {
		t.Error(d)
	}
}

func TestContract10AChangeIsWrittenOnceItHasLasted(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
		want(t, s)
		time.Sleep(settleGood)
		want(t, s, "write my-nginx: announced from a", "event my-nginx: Announced true")
		for range 100 {
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
			time.Sleep(time.Second)
		}
		want(t, s) // no write when unchanged

		// A handover passes through "nobody" in a moment; only its end is written.
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: silent(lb.ReasonNoOwner, "nobody")})
		time.Sleep(settleBad / 2)
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("b")})
		time.Sleep(time.Minute)
		want(t, s, "write my-nginx: announced from b", "event my-nginx: Announced true")

		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: silent(lb.ReasonNoBackends, "no endpoints")})
		time.Sleep(time.Minute)
		want(t, s, "write my-nginx: no endpoints", "event my-nginx: NoBackends false")
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: silent(lb.ReasonNoBackends, "no endpoints, in other words")})
		time.Sleep(time.Minute)
		want(t, s, "write my-nginx: no endpoints, in other words") // no Event for the same reason

		// What another node reports is not written.
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("c")})
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: nil})
		time.Sleep(time.Minute)
		want(t, s)
	})
}

// TestWhatComesDuringAWriteCounts has something else to say of the second of two Services of a namespace
// while the first is written: writing thousands takes minutes, and old owners must not be shown then.
func TestWhatComesDuringAWriteCounts(t *testing.T) {
	second := lb.Key{Namespace: nginx.Namespace, Name: "second"}
	words := announced("a")
	words.Condition.Message = "in other words"
	for what, c := range map[string]struct {
		news       *lb.AnnouncedStatus
		once, want []string // once are those at once
	}{
		"another node reports": {nil, nil, nil},
		"another owner": {announced("b"), nil,
			[]string{"write second: announced from b", "event second: Announced true"}},
		"other words": {words, []string{"write second: announced from a", "event second: Announced true"},
			[]string{"write second: in other words", "event second: Announced true"}},
	} {
		story(t, func(t *testing.T, s *server, r *Reporter) {
			s.set(lb.Service{Key: second})
			s.writing = func(key lb.Key) {
				if key == nginx {
					r.Update(map[lb.Key]*lb.AnnouncedStatus{second: c.news})
				}
			}
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a"), second: announced("a")})
			time.Sleep(settleGood)
			t.Log(what)
			want(t, s, append([]string{"write my-nginx: announced from a", "event my-nginx: Announced true"}, c.once...)...)
			time.Sleep(time.Minute)
			want(t, s, c.want...)
		})
	}
}

func TestWhatTheServiceShowsIsNotWrittenAgain(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		s.set(showing(nginx, *announced("a")))
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")}) // after a restart of the speaker
		r.Update(map[lb.Key]*lb.AnnouncedStatus{{Namespace: "gone", Name: "gone"}: announced("a")})
		time.Sleep(time.Minute)
		want(t, s)
		s.set(lb.Service{Key: nginx}) // somebody took it away
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
		time.Sleep(time.Minute)
		want(t, s, "write my-nginx: announced from a", "event my-nginx: Announced true")
	})
}

// TestNonsenseInTheAnnotationIsWrittenOver has a tenant edit the annotation, which no condition
// shows.
func TestNonsenseInTheAnnotationIsWrittenOver(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		edited := showing(nginx, *announced("a"))
		edited.Announcements = "nonsense"
		s.set(edited)
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
		time.Sleep(time.Minute)
		want(t, s, "write my-nginx: announced from a") // and no Event: the condition is the same
		if got, _ := s.get(nginx); got.Announcements != "from a" {
			t.Errorf("the annotation is %q", got.Announcements)
		}
	})
}

func TestContract7WithoutAPIServerReportsWait(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		s.setFail(errors.New("connection refused"))
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
		time.Sleep(time.Hour)
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("b")})
		r.Update(map[lb.Key]*lb.AnnouncedStatus{dns: announced("c")})
		want(t, s)
		s.setFail(nil)
		time.Sleep(time.Minute)
		want(t, s, "write dns: announced from c", "event dns: Announced true", "write my-nginx: announced from b",
			"event my-nginx: Announced true")
	})
}

// Two nodes that each take themselves for the reporter, as in a partition, write ever more seldom.
func TestWritersThatDisagreeCalmDown(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		writes := 0
		for range 600 {
			s.set(showing(nginx, *announced("the other side")))
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
			time.Sleep(time.Second)
			if slices.Contains(s.took(), "write my-nginx: announced from a") {
				writes++
			}
		}
		if writes < 5 || writes > 20 {
			t.Errorf("%d writes in ten minutes", writes)
		}
	})
}

// TestAnAPIServerThatHangsIsNoHang has thousands of writes wait for an API server that does not
// answer: each has an end, so the loop is alive.
func TestAnAPIServerThatHangsIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := New(Options{Log: slog.New(slog.DiscardHandler), Event: func(lb.Service, bool, lb.Reason, string) {},
			Service: func(k lb.Key) (lb.Service, bool) { return lb.Service{Key: k}, true },
			Refused: func(error) bool { return false },
			Write: func(ctx context.Context, _ lb.Service, _ lb.AnnouncedStatus) (bool, error) {
				<-ctx.Done()
				return false, errors.New("no answer")
			}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- r.Run(ctx) }()
		all := map[lb.Key]*lb.AnnouncedStatus{}
		for i := range 1000 {
			all[lb.Key{Namespace: "default", Name: fmt.Sprint(i)}] = announced("node-1")
		}
		r.Begin(all)
		for range 3600 {
			time.Sleep(time.Second)
			if busy := r.Busy(); busy > writeTimeout {
				t.Fatalf("busy for %v", busy)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// What this node has written is still there, and the truth has changed: nobody disagrees, so the Service does
// not say for long what is so no more, however often it has changed.
func TestContract10WhatThisNodeWroteIsNotWrongForLong(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		for range 10 {
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: silent(lb.ReasonNoBackends, "none")})
			time.Sleep(9 * time.Second)
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
			time.Sleep(9 * time.Second)
			if service, _ := s.get(nginx); !announced("a").ShownBy(service) {
				t.Fatalf("the Service shows %+v", service.Conditions)
			}
		}
	})
}

// The words of a report change all the time, as where a device makes up MAC addresses. What it says is written as soon
// as it has lasted, and other words for it seldom, and without an Event.
func TestContract10OtherWordsHoldNothingUp(t *testing.T) {
	contested := func(words string) *lb.AnnouncedStatus {
		status := announced("a")
		status.Condition.Reason, status.Condition.Message = lb.ReasonContested, "in use by "+words+", too"
		return status
	}
	conflict := func(words string) *lb.AnnouncedStatus {
		return silent(lb.ReasonAddressConflict, "in use by "+words)
	}
	for name, say := range map[string]func(words string) *lb.AnnouncedStatus{
		"contested": contested, "conflict": conflict,
	} {
		t.Run(name, func(t *testing.T) {
			story(t, func(t *testing.T, s *server, r *Reporter) {
				writes, events := 0, 0
				for i := range 400 {
					r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: say(fmt.Sprint(i))})
					time.Sleep(1500 * time.Millisecond)
					for _, line := range s.took() {
						if strings.HasPrefix(line, "write ") {
							writes++
						} else {
							events++
						}
					}
					if i == 1 && (writes == 0 || events == 0) {
						t.Error("nothing is written in 3 s")
					}
				}
				if events != 1 || writes < 5 || writes > 20 {
					t.Errorf("%d writes and %d Events in ten minutes", writes, events)
				}
			})
		})
	}
}

// The API server is back after an hour: what waits is written soon.
func TestContract10WhatWaitsForTheAPIServerIsWrittenSoon(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		s.setFail(errors.New("connection refused"))
		r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced("a")})
		time.Sleep(time.Hour)
		s.setFail(nil)
		time.Sleep(maxRetry + time.Second)
		if service, _ := s.get(nginx); maxRetry > 8*time.Second || !announced("a").ShownBy(service) {
			t.Errorf("retries are up to %s apart; the Service shows %+v", maxRetry, service.Conditions)
		}
	})
}

// An API server refuses what is written to a Service whose annotations leave no room. That holds up no other
// Service, and is tried again more and more seldom.
func TestContract11ARefusedServiceHoldsUpNoOther(t *testing.T) {
	story(t, func(t *testing.T, s *server, r *Reporter) {
		beside := lb.Key{Namespace: dns.Namespace, Name: "metrics"}
		s.set(lb.Service{Key: beside})
		s.setRefuses(dns, true)
		r.Update(map[lb.Key]*lb.AnnouncedStatus{dns: announced("n1")})
		time.Sleep(time.Minute)
		if refused := len(s.took()); refused < 2 || refused > 7 {
			t.Errorf("refused %d times in a minute", refused)
		}
		for i := range 20 {
			from := fmt.Sprint("n", i)
			r.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: announced(from), beside: announced(from), dns: announced("n1")})
			time.Sleep(settleGood + 100*time.Millisecond)
			got := s.took()
			for _, other := range []lb.Key{nginx, beside} {
				if !slices.Contains(got, "write "+other.Name+": announced from "+from) {
					t.Errorf("%v, and no write to %s", got, other)
				}
			}
			time.Sleep(calm)
		}
		s.setRefuses(dns, false)
		s.took()
		time.Sleep(maxQuiet)
		if got := s.took(); !slices.Contains(got, "write dns: announced from n1") {
			t.Errorf("%v: what was refused is not tried again", got)
		}
	})
}
