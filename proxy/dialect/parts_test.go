package dialect_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// inParts are rules that write one Service in parts of a second each.
type inParts struct {
	dialect.Rules
	large lb.Key
	// last is set when the next part is the last one, down while the kernel takes nothing.
	last, down *atomic.Bool
}

var errDown = errors.New("no rules at all")

func (r inParts) Recover(ctx context.Context) error {
	if r.down.Load() {
		return errDown
	}
	return r.Rules.Recover(ctx)
}

func (r inParts) Commit(ctx context.Context, keys []lb.Key) (int, error) {
	if r.down.Load() {
		return len(keys), errDown
	}
	switch i := slices.Index(keys, r.large); {
	case i > 0:
		return r.Rules.Commit(ctx, keys[:i])
	case i < 0 || r.last.Load() && len(keys) == 1:
		return r.Rules.Commit(ctx, keys)
	case len(keys) == 1:
		time.Sleep(time.Second)
	}
	return 1, dialect.ErrUnfinished
}

// TestContract11AnUnfinishedServiceHoldsUpNobody is about a Service whose last part never comes, as
// when it changes faster than it is written. What /healthz and readiness go by follows the others.
func TestContract11AnUnfinishedServiceHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last, down atomic.Bool
		large := lb.Key{Namespace: "default", Name: "large"}
		k := &kernel{held: map[lb.Key]plan.Service{}}
		actor := dialect.New(dialect.Deps{Log: slog.New(slog.DiscardHandler), Changed: func() {},
			Rules: func(f lb.Family, ledger *dialect.Ledger) dialect.Rules {
				if f == lb.IPv6 {
					return nil
				}
				return inParts{k.Rules(f, ledger), large, &last, &down}
			}})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- actor.Run(ctx) }()
		service := func(key lb.Key, port uint16) plan.Service {
			return plan.Service{Key: key, Ports: []plan.Port{{Family: lb.IPv4, Frontends: []plan.Frontend{{Port: port}}}}}
		}
		all := map[lb.Key]plan.Service{large: service(large, 1)}
		for i := range 12 {
			key := lb.Key{Namespace: "default", Name: fmt.Sprint("small-", i)}
			all[key] = service(key, 80)
		}
		known := map[lb.Key]plan.Outcome{}
		check := func(when string, tried, failing bool, alone ...lb.Family) {
			t.Helper()
			outcomes, all := actor.Outcomes()
			maps.Copy(known, outcomes)
			if o := known[large]; all != tried || (o.Err != nil) != failing || !slices.Equal(o.Alone, alone) {
				t.Errorf("%s: all tried: %v, alone in %v, error %v; want %v, %v, %v", when, all, o.Alone, o.Err, tried, alone,
					failing)
			}
		}
		actor.Configure(plan.Config{})
		actor.Begin(all)
		time.Sleep(2500 * time.Millisecond)
		check("at first", false, false, lb.IPv4)
		if len(known) != len(all) || len(k.held) != len(all)-1 {
			t.Errorf("%d outcomes, %d Services are held", len(known), len(k.held))
		}
		time.Sleep(time.Minute)
		check("after a minute", true, false, lb.IPv4)
		down.Store(true)
		time.Sleep(10 * time.Second)
		check("while the kernel takes nothing", true, true)
		down.Store(false)
		time.Sleep(time.Minute)
		check("when it takes parts again", true, false, lb.IPv4)
		last.Store(true)
		time.Sleep(time.Minute)
		check("at last", true, false)
		if len(k.held) != len(all) || len(known[large].Applied.Ports) != 1 {
			t.Errorf("%d Services are held, of the large one %+v", len(k.held), known[large].Applied)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// endless are rules for Services that are never written to the end.
type endless struct {
	dialect.Rules
	part func(lb.Key)
}

func (r endless) Commit(_ context.Context, keys []lb.Key) (int, error) {
	switch len(keys) {
	case 0:
		return 0, nil
	case 1:
		r.part(keys[0])
	}
	return 1, dialect.ErrUnfinished
}

// Contract clause 11: many Services of one namespace that are written in parts have every other part together if
// another namespace has one such Service, and each of them its turn.
func TestContract11NamespacesTakeTurnsWithParts(t *testing.T) {
	const many = 250
	ctx, cancel := context.WithCancel(t.Context())
	all, other := map[lb.Key]plan.Service{}, lb.Key{Namespace: "other", Name: "only"}
	for i := range many {
		key := lb.Key{Namespace: "default", Name: fmt.Sprint("service-", i)}
		all[key] = plan.Service{Key: key}
	}
	all[other] = plan.Service{Key: other}
	written := map[lb.Key]int{}
	rules := endless{part: func(key lb.Key) {
		if written[key]++; len(written) > many && written[other] >= many {
			cancel()
		}
	}}
	actor := dialect.New(dialect.Deps{Log: slog.New(slog.DiscardHandler), Changed: func() {},
		Rules: func(f lb.Family, ledger *dialect.Ledger) dialect.Rules {
			if f == lb.IPv6 {
				return nil
			}
			rules.Rules = (&kernel{held: map[lb.Key]plan.Service{}}).Rules(f, ledger)
			return rules
		}})
	actor.Configure(plan.Config{})
	actor.Begin(all)
	if _, err := actor.Apply(ctx, false); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	for key := range all {
		if n := written[key]; key != other && n > 2 {
			t.Errorf("%s: %d parts, while that of the other namespace had %d", key, n, written[other])
		}
	}
}
