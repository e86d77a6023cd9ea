package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// EachService implements services.
func (c *cluster) EachService(_ context.Context, yield func(lb.Service)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err, _ := c.failing(lb.Key{}); err != nil {
		return err
	}
	for _, s := range c.services {
		yield(s)
	}
	return nil
}

// TakeBack implements services.
func (c *cluster) TakeBack(_ context.Context, given lb.Service, finalizer, addresses bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err, _ := c.failing(given.Key); err != nil {
		return err
	}
	s := c.services[given.Key]
	h := kube.Holding{}
	for _, in := range s.Ingress {
		if !addresses {
			h.Addresses = append(h.Addresses, in.Addr)
		}
	}
	if finalizer {
		h.Finalizer = kube.FinalizerRemoved
	}
	show(&s, h)
	s.Announcements = ""
	c.store(s)
	c.writes = append(c.writes, "service "+s.Key.Name)
	return nil
}

// wrote returns a Service with all that Landfall writes.
func wrote(name string) lb.Service {
	s := service(name)
	s.Finalizer, s.Announcements = true, "data"
	s.AllocatedFrom = map[string]string{lb.AnnotationAllocatedFrom: "p"}
	s.Ingress = []lb.Ingress{{Addr: netip.MustParseAddr("10.0.0.1")}}
	s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Status: true}, {Type: lb.ConditionAnnounced, Status: true},
		lb.Serving(lb.Condition{Status: true})}
	return s
}

// TestCleanup takes back what Landfall wrote, also while a speaker writes it again and the API
// server fails, and leaves others' Services alone.
func TestCleanup(t *testing.T) {
	for _, addresses := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			theirs, waits, internal := wrote("theirs"), wrote("waits"), wrote("internal")
			theirs.Class = "other"
			waits.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonNoPool}}
			waits.Announcements, waits.Ingress = "", nil
			internal.Type, internal.Ingress, internal.Announcements = lb.ClusterIP, nil, "(left over)"
			for _, s := range []lb.Service{wrote("ours"), theirs, waits, internal, service("never")} {
				c.put(s)
			}
			c.fail(refused, nil, refused, refused)
			ended := make(chan struct{})
			go func() { // a speaker that ends after 5 s
				defer close(ended)
				for range 5 {
					time.Sleep(time.Second)
					c.announce("ours", true)
				}
			}()
			cleaner := cleaner{services: c, addresses: addresses, log: slog.New(slog.DiscardHandler)}
			if err := cleaner.run(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-ended
			for _, name := range []string{"ours", "internal", "waits"} {
				s := c.services[key(name)]
				if len(s.Conditions) > 0 || s.Announcements != "" || s.Finalizer != (name == "waits") {
					t.Errorf("%s shows %v, %q, finalizer %v", name, s.Conditions, s.Announcements, s.Finalizer)
				}
			}
			ours := c.services[key("ours")]
			if (len(ours.Ingress) == 0) != addresses || (len(ours.AllocatedFrom) == 0) != addresses {
				t.Errorf("holds %v of %v", ours.Ingress, ours.AllocatedFrom)
			}
			if s := c.services[key("theirs")]; len(s.Conditions) != 3 || !s.Finalizer || s.Announcements == "" {
				t.Errorf("another class's: %+v", s)
			}
			c.written()
			if err := cleaner.run(t.Context()); err != nil || len(c.written()) > 0 {
				t.Errorf("again: %v, or something was written", err)
			}
		})
	}
}

// TestCleanupEnds has a controller that goes on, an API server that is away, and a person who
// interrupts.
func TestCleanupEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.put(wrote("a"))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for ctx.Err() == nil {
				time.Sleep(cleanupEvery / 2)
				c.put(wrote("a"))
			}
		}()
		cleaner := cleaner{services: c, log: slog.New(slog.DiscardHandler)}
		began := time.Now()
		err := cleaner.run(ctx)
		if err == nil || !strings.Contains(err.Error(), "still running?") || time.Since(began) > cleanupTimeout+time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		cancel()
		if err := cleaner.run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("interrupted: %v", err)
		}
		<-ended
	})
}
