package dialect_test

import (
	"context"
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// kernel holds plans as they are.
type kernel struct {
	held     map[lb.Key]plan.Service
	port     uint16
	refusals int
	hidden   bool
	writes   int
}

func (k *kernel) Refuse(port uint16, times int) { k.port, k.refusals = port, times }
func (k *kernel) Hide(hidden bool)              { k.hidden = hidden }
func (k *kernel) Lose()                         { clear(k.held) }
func (k *kernel) Writes() int                   { return k.writes }

func (k *kernel) Holds(port uint16) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(k.held)), at(port))
}

func at(port uint16) func(plan.Service) bool {
	return func(s plan.Service) bool {
		return slices.ContainsFunc(s.Ports, func(p plan.Port) bool {
			return slices.ContainsFunc(p.Frontends, func(f plan.Frontend) bool { return f.Port == port })
		})
	}
}

func (k *kernel) Rules(_ lb.Family, ledger *dialect.Ledger) dialect.Rules {
	return &rules{Ledger: ledger, kernel: k, want: map[lb.Key]plan.Service{}, held: map[lb.Key]plan.Service{}}
}

// rules are the simplest dialect there can be: it writes at most five Services at once.
type rules struct {
	*dialect.Ledger
	kernel *kernel
	want   map[lb.Key]plan.Service
	held   map[lb.Key]plan.Service // as confirmed
	have   map[lb.Key]plan.Service // in the kernel; nil when that is not known
}

func (r *rules) Configure(plan.Config) {}

func (r *rules) Want(key lb.Key, s plan.Service) {
	if r.want[key] = s; len(s.Ports) == 0 {
		delete(r.want, key)
	}
}

func (r *rules) Prepare(_ context.Context, verify bool) error {
	if r.have != nil && !verify {
		return nil
	}
	if r.kernel.hidden {
		r.have = nil
		return suite.ErrRefused
	}
	known := r.have != nil
	r.have = maps.Clone(r.kernel.held)
	r.Stats.Verified = true
	for key, s := range r.held {
		if reflect.DeepEqual(r.have[key], s) {
			continue
		}
		if known {
			r.Stats.Repaired++
		}
		if err := r.write(map[lb.Key]plan.Service{key: s}); err != nil {
			for key := range r.held {
				if _, ok := r.have[key]; !ok {
					delete(r.held, key)
					r.Lost(key, err)
				}
			}
			return err
		}
	}
	return nil
}

func (r *rules) Commit(ctx context.Context, keys []lb.Key) (int, error) {
	if r.have == nil {
		if err := r.Prepare(ctx, false); err != nil {
			return len(keys), dialect.General(err)
		}
	}
	n := min(5, len(keys))
	changes := map[lb.Key]plan.Service{}
	for _, key := range keys[:n] {
		if s := r.want[key]; !reflect.DeepEqual(r.have[key], s) {
			changes[key] = s
		}
	}
	if err := r.write(changes); err != nil {
		return n, err
	}
	for _, key := range keys[:n] {
		if s, ok := r.want[key]; ok {
			r.held[key] = s
		} else {
			delete(r.held, key)
		}
		r.Done(key)
	}
	return n, nil
}

func (r *rules) write(changes map[lb.Key]plan.Service) error {
	if len(changes) == 0 {
		return nil
	}
	r.Stats.Transactions++
	r.kernel.writes++
	if r.kernel.refusals > 0 &&
		(r.kernel.port == 0 || slices.ContainsFunc(slices.Collect(maps.Values(changes)), at(r.kernel.port))) {
		r.kernel.refusals--
		r.Stats.Failures++
		return suite.ErrRefused
	}
	for key, s := range changes {
		for _, held := range []map[lb.Key]plan.Service{r.kernel.held, r.have} {
			if held[key] = s; len(s.Ports) == 0 {
				delete(held, key)
			}
		}
	}
	return nil
}

// Recover writes something of no Service, as a kernel that takes nothing takes not even that.
func (r *rules) Recover(ctx context.Context) error {
	if err := r.Prepare(ctx, true); err != nil {
		return err
	}
	return r.write(map[lb.Key]plan.Service{{Name: "nobody's"}: {}})
}

func (r *rules) Prune(context.Context) error {
	gone := map[lb.Key]plan.Service{}
	for key := range r.have {
		if _, ok := r.want[key]; !ok {
			gone[key] = plan.Service{}
		}
	}
	return r.write(gone)
}

func (r *rules) Held(key lb.Key) (plan.Service, error) { return r.held[key], nil }
func (r *rules) Size() map[string]int                  { return nil }

func TestSuite(t *testing.T) {
	suite.Run(t, func(lb.Family) suite.Kernel { return &kernel{held: map[lb.Key]plan.Service{}} })
}
