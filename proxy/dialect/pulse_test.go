package dialect_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// slow are rules of which each transaction takes a while.
type slow struct {
	dialect.Rules
	takes func()
}

func (s slow) Commit(ctx context.Context, keys []lb.Key) (int, error) {
	s.takes()
	return s.Rules.Commit(ctx, keys)
}

// TestAWriterThatHangsIsSeen tells a kernel that does not answer from a first load that takes
// hours, in transactions of a minute.
func TestAWriterThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var takes atomic.Value
		takes.Store(func() { time.Sleep(time.Minute) })
		k := &kernel{held: map[lb.Key]plan.Service{}}
		actor := dialect.New(dialect.Deps{Log: slog.New(slog.DiscardHandler), Changed: func() {},
			Rules: func(f lb.Family, ledger *dialect.Ledger) dialect.Rules {
				if f == lb.IPv6 {
					return nil
				}
				return slow{k.Rules(f, ledger), func() { takes.Load().(func())() }}
			}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- actor.Run(ctx) }()
		actor.Configure(plan.Config{})
		all := map[lb.Key]plan.Service{}
		for i := range 1000 {
			key := lb.Key{Namespace: "default", Name: fmt.Sprint(i)}
			all[key] = plan.Service{Key: key, Ports: []plan.Port{{Family: lb.IPv4, Frontends: []plan.Frontend{{Port: 80}}}}}
		}
		actor.Begin(all)
		for range 60 {
			time.Sleep(time.Minute)
			if busy := actor.Busy(); busy == 0 || busy > time.Minute {
				t.Fatalf("a long first load: busy for %v", busy)
			}
		}
		hang := make(chan struct{})
		takes.Store(func() { <-hang })
		time.Sleep(time.Hour)
		if busy := actor.Busy(); busy < time.Hour-2*time.Minute {
			t.Errorf("a kernel that does not answer: busy for %v", busy)
		}
		close(hang)
		synctest.Wait()
		if busy := actor.Busy(); busy != 0 || len(k.held) != len(all) {
			t.Errorf("it holds %d Services, busy for %v", len(k.held), busy)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
