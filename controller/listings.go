package main

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// lister writes to Services since when they list their external IPs, in the order in which it hears of them
// and one after the other: proxies serve who listed an external IP first. It does so beside the assignment of
// addresses, for Services of all classes.
type lister struct {
	deps
	runner   *loop.Runner
	failures loop.Failures

	mu sync.Mutex
	// changed are the Services that the table tells of since the last step, nil for one that does not lead, and
	// order has them as it told of them first; anew is set at the beginning of a time of leading.
	changed map[lb.Key]bool
	order   []lb.Key
	anew    bool

	// What follows belongs to the goroutine that leads, and begins empty with each time of leading.

	// listed are the listings as written, also those that the table does not show yet.
	listed map[lb.Key]writtenListing
	// latest is the latest time of any listing: the next is later, whatever the clocks of controllers say.
	latest int64
	// again are the Services whose write failed, and those that are kept behind them: they come before others.
	again      []lb.Key
	unwritable unwritable
	// pauses are between the writes of one Service, so that one that never rests keeps nobody else waiting.
	pauses replaces
}

type writtenListing struct {
	uid string
	lb.Listing
	// waits is set for one that is not written as the Service is now: what it has dropped since is not in it.
	waits bool
}

func newLister(d deps) *lister {
	l := &lister{deps: d}
	l.runner = loop.New(l.step, loop.Options{Gap: gap, MaxBackoff: 5 * time.Second})
	return l
}

// begin begins a time of leading, or begins it anew, and end ends it.
func (l *lister) begin() { l.remember(map[lb.Key]bool{}) }
func (l *lister) end()   { l.remember(nil) }

func (l *lister) remember(changed map[lb.Key]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed, l.order, l.anew = changed, nil, true
}

// serviceChanged says that a Service has changed.
func (l *lister) serviceChanged(key lb.Key) {
	l.note(key)
	l.runner.Poke()
}

func (l *lister) note(key lb.Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed != nil && !l.changed[key] {
		l.changed[key], l.order = true, append(l.order, key)
	}
}

// step writes the listings that differ: in the order in which it heard of them and, where it has heard of none as
// it has just begun to lead, those of older Services first.
func (l *lister) step(ctx context.Context) (again time.Duration, err error) {
	if !l.services.Synced() {
		return 0, nil // called again when they are
	}
	l.mu.Lock()
	keys, anew := append(l.again, l.order...), l.anew
	l.changed, l.order, l.anew, l.again = map[lb.Key]bool{}, nil, false, nil
	l.mu.Unlock()
	if anew {
		l.listed, l.latest, l.unwritable, l.pauses = map[lb.Key]writtenListing{}, 0, unwritable{}, replaces{}
		all := l.services.All()
		for _, s := range all {
			l.latest = max(l.latest, s.Listed.Latest())
		}
		keys = slices.SortedFunc(maps.Keys(all), func(a, b lb.Key) int {
			older, younger := all[a], all[b]
			return plan.Older(&older, &younger)
		})
	}
	var services []lb.Service
	seen := make(map[lb.Key]bool, len(keys))
	for _, key := range keys {
		if seen[key] {
			continue
		}
		seen[key] = true
		s, ok := l.services.Get(key)
		if !ok {
			delete(l.listed, key)
			delete(l.unwritable, key)
			delete(l.pauses, key)
		} else if len(s.ExternalIPs) > 0 || s.Listed != nil {
			services = append(services, s)
		}
	}
	err = l.write(ctx, services)
	l.failures.Log(l.log, "cannot write since when Services list their external IPs; trying again",
		"wrote since when Services list their external IPs", err)
	for _, next := range []time.Duration{due(l.unwritable, l.now(), l.note), due(l.pauses, l.now(), l.note)} {
		if next > 0 {
			again = soonest(again, next)
		}
	}
	return again, ignoreEnd(ctx, err)
}

// write writes the listings of Services in their order. One that cannot be written keeps those from being
// written that list an address of it, which would come before it; but not one that the API server refuses for
// what it is, which would keep them for ever.
func (l *lister) write(ctx context.Context, services []lb.Service) error {
	var failed []error
	kept := map[netip.Addr]bool{}
	for _, s := range services {
		before := l.before(&s)
		next := before.Next(&s, max(l.now().UnixMilli(), l.latest+1))
		shown := (next == nil) == (s.Listed == nil) && next.String() == s.Listed.String()
		behind := slices.ContainsFunc(s.ExternalIPs, func(addr netip.Addr) bool { return kept[addr] })
		if !shown && (!l.unwritable.allow(s) || !behind && !l.pauses.allow(s.Key, l.now())) {
			l.remain(&s, next, before)
			continue
		}
		l.listed[s.Key], l.latest = writtenListing{uid: s.UID, Listing: next}, max(l.latest, next.Latest())
		if shown {
			continue
		}
		if !behind {
			err := within(ctx, func(ctx context.Context) error { return l.status.List(ctx, s, next) })
			loop.Progress(ctx)
			if kube.IsUnwritable(err) {
				l.refusedBy(l.unwritable, s, err)
				l.remain(&s, next, s.Listed)
				continue
			}
			if err == nil || kube.IsNotFound(err) || kube.IsConflict(err) { // it is gone, or created anew
				delete(l.unwritable, s.Key)
				continue
			}
			failed = append(failed, err)
			delete(l.pauses, s.Key) // that all are tried again is the loop's
		}
		for _, addr := range s.ExternalIPs {
			kept[addr] = true
		}
		l.again = append(l.again, s.Key)
	}
	return errors.Join(failed...)
}

// before returns what a Service lists so far. What the table shows counts, as another controller may have written
// it, and then what this one wrote. What a Service has dropped that waits is new again, although it is shown.
func (l *lister) before(s *lb.Service) lb.Listing {
	ours := l.listed[s.Key]
	switch {
	case ours.uid != s.UID:
		return s.Listed
	case ours.waits:
		return ours.Listing
	}
	before := lb.Listing{}
	maps.Copy(before, ours.Listing)
	maps.Copy(before, s.Listed)
	return before
}

// remain takes note that next is not written now. What is new in it, and so differs from before, gets the time
// at which it is: others may be listed until then, and nobody comes before them later.
func (l *lister) remain(s *lb.Service, next, before lb.Listing) {
	maps.DeleteFunc(next, func(item string, since int64) bool { return before[item] != since })
	l.listed[s.Key] = writtenListing{s.UID, next, true}
}
