package main

import (
	"context"
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

// A listing that could not be written is tried again after minRelist, up to maxRelist.
const (
	minRelist = 100 * time.Millisecond
	maxRelist = 5 * time.Second
)

// lister writes to Services since when they list their external IPs, those of one address in the order in which it
// hears of them and one after the other: proxies serve who listed an external IP first. It does so beside the
// assignment of addresses, for Services of all classes.
type lister struct {
	deps
	runner   *loop.Runner
	lanes    *loop.Lanes // by namespace
	failures loop.Failures

	mu sync.Mutex
	// changed are the Services that the table tells of since the last step, nil for one that does not lead, and
	// order has them as it told of them first; anew is set at the beginning of a time of leading.
	changed map[lb.Key]bool
	order   []lb.Key
	anew    bool
	ended   []listingWrite

	// What follows belongs to the goroutine that leads, and begins empty with each time of leading.

	// listed are the listings as written, also those that the table does not show yet.
	listed map[lb.Key]writtenListing
	// latest is the latest time of any listing: the next is later, whatever the clocks of controllers say.
	latest int64
	// writing are the writes under way, also those of an earlier time of leading.
	writing map[lb.Key]listingWrite
	// again are the Services whose write failed, and those that are kept behind others: they come before others.
	again      []lb.Key
	failing    map[lb.Key]*pause // whose last write failed
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

// listingWrite is a write of a listing, and what became of it.
type listingWrite struct {
	service lb.Service
	next    lb.Listing
	err     error
}

func newLister(d deps) *lister {
	l := &lister{deps: d, writing: map[lb.Key]listingWrite{}, lanes: loop.NewLanes(d.parallel, max(d.parallel/4, 1))}
	l.runner = loop.New(l.step, loop.Options{Gap: gap})
	return l
}

// run writes listings until ctx ends.
func (l *lister) run(ctx context.Context) error {
	defer l.lanes.Wait()
	return l.runner.Run(ctx)
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

// step begins to write the listings that differ: in the order in which it heard of them and, where it has heard of
// none as it has just begun to lead, those of older Services first.
func (l *lister) step(ctx context.Context) (again time.Duration, err error) {
	if !l.services.Synced() {
		return 0, nil // called again when they are
	}
	l.mu.Lock()
	order, anew, ended := l.order, l.anew, l.ended
	l.changed, l.order, l.anew, l.ended = map[lb.Key]bool{}, nil, false, nil
	l.mu.Unlock()
	if anew {
		l.listed, l.latest, l.again, l.failing = map[lb.Key]writtenListing{}, 0, nil, map[lb.Key]*pause{}
		l.unwritable, l.pauses = unwritable{}, replaces{}
		all := l.services.All()
		for _, s := range all {
			l.latest = max(l.latest, s.Listed.Latest())
		}
		order = slices.SortedFunc(maps.Keys(all), func(a, b lb.Key) int {
			older, younger := all[a], all[b]
			return plan.Older(&older, &younger)
		})
	}
	failed := l.wrote(ctx, ended)
	keys := slices.Concat(failed, l.again, order)
	l.again = nil
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
			delete(l.failing, key)
			delete(l.unwritable, key)
			delete(l.pauses, key)
		} else if len(s.ExternalIPs) > 0 || s.Listed != nil {
			services = append(services, s)
		} else {
			delete(l.failing, key) // there is nothing to write any more
		}
	}
	l.write(ctx, services)
	for _, next := range []time.Duration{due(l.unwritable, l.now(), l.note), due(l.pauses, l.now(), l.note),
		due(l.failing, l.now(), l.note)} {
		if next > 0 {
			again = soonest(again, next)
		}
	}
	return again, nil
}

// wrote takes note of how writes went, and returns the Services whose write is to be tried again.
func (l *lister) wrote(ctx context.Context, ended []listingWrite) (failed []lb.Key) {
	var last error
	for _, w := range ended {
		key := w.service.Key
		delete(l.writing, key)
		switch {
		case kube.IsUnwritable(w.err):
			delete(l.failing, key)
			l.refusedBy(l.unwritable, w.service, w.err)
			l.remain(&w.service, w.next, w.service.Listed)
		case w.err == nil || kube.IsNotFound(w.err) || kube.IsConflict(w.err): // it is gone, or created anew
			delete(l.failing, key)
			delete(l.unwritable, key)
		default:
			if l.failing[key] == nil {
				l.failing[key] = &pause{backoff: loop.Backoff{Min: minRelist, Max: maxRelist}}
			}
			of := l.failing[key]
			of.until, of.waiting = l.now().Add(of.backoff.Next()), true
			delete(l.pauses, key)
			failed, last = append(failed, key), w.err
		}
	}
	if ctx.Err() == nil && (last != nil || len(l.failing) == 0) {
		l.failures.Log(l.log, "cannot write since when Services list their external IPs; trying again",
			"wrote since when Services list their external IPs", last)
	}
	return failed
}

// write begins to write the listings of Services in their order. One that is not written yet keeps those from being
// written that list an address of it, which would come before it; but not one that the API server refuses for
// what it is, which would keep them for ever.
func (l *lister) write(ctx context.Context, services []lb.Service) {
	kept := map[netip.Addr]bool{}
	keep := func(s lb.Service) {
		for _, addr := range s.ExternalIPs {
			kept[addr] = true
		}
	}
	for _, w := range l.writing {
		keep(w.service)
	}
	for _, s := range services {
		before := l.before(&s)
		next := before.Next(&s, max(l.now().UnixMilli(), l.latest+1))
		shown := (next == nil) == (s.Listed == nil) && next.String() == s.Listed.String()
		w, writing := l.writing[s.Key]
		behind := writing || l.failing[s.Key] != nil && l.failing[s.Key].waiting ||
			slices.ContainsFunc(s.ExternalIPs, func(addr netip.Addr) bool { return kept[addr] })
		if !shown && (!l.unwritable.allow(s) || !behind && !l.pauses.allow(s.Key, l.now())) {
			l.remain(&s, next, before)
			continue
		}
		l.listed[s.Key], l.latest = writtenListing{uid: s.UID, Listing: next}, max(l.latest, next.Latest())
		if shown {
			delete(l.failing, s.Key)
		}
		if shown || writing && w.service.UID == s.UID && maps.Equal(w.next, next) {
			continue
		}
		keep(s)
		if behind {
			l.again = append(l.again, s.Key)
			continue
		}
		w = listingWrite{service: s, next: next}
		l.pauses.note(s.Key, l.now())
		l.writing[s.Key] = w
		l.lanes.Do(s.Key.Namespace, func() error {
			w.err = within(ctx, func(ctx context.Context) error { return l.status.List(ctx, s, next) })
			l.mu.Lock()
			l.ended = append(l.ended, w)
			l.mu.Unlock()
			l.runner.Poke()
			return w.err
		})
	}
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
