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
	// changed are the Services that the table tells of since the last step, nil for one that does not lead;
	// anew is set at the beginning of a time of leading.
	changed map[lb.Key]bool
	anew    bool

	// What follows belongs to the goroutine that leads, and begins empty with each time of leading.

	// listed are the listings as written, also those that the table does not show yet.
	listed map[lb.Key]writtenListing
	// latest is the latest time of any listing: the next is later, whatever the clocks of controllers say.
	latest int64
}

type writtenListing struct {
	uid string
	lb.Listing
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
	l.changed, l.anew = changed, true
}

// serviceChanged says that a Service has changed.
func (l *lister) serviceChanged(key lb.Key) {
	l.note(key)
	l.runner.Poke()
}

func (l *lister) note(key lb.Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed != nil {
		l.changed[key] = true
	}
}

// step writes the listings that differ, those of older Services first.
func (l *lister) step(ctx context.Context) (again time.Duration, err error) {
	if !l.services.Synced() {
		return 0, nil // called again when they are
	}
	l.mu.Lock()
	keys, anew := l.changed, l.anew
	l.changed, l.anew = map[lb.Key]bool{}, false
	l.mu.Unlock()
	if anew {
		l.listed, l.latest = map[lb.Key]writtenListing{}, 0
		for key, s := range l.services.All() {
			keys[key], l.latest = true, max(l.latest, s.Listed.Latest())
		}
	}
	var services []lb.Service
	for key := range keys {
		s, ok := l.services.Get(key)
		if !ok {
			delete(l.listed, key)
		} else if len(s.ExternalIPs) > 0 || s.Listed != nil {
			services = append(services, s)
		}
	}
	slices.SortFunc(services, func(a, b lb.Service) int { return plan.Older(&a, &b) })
	err = l.write(ctx, services)
	l.failures.Log(l.log, "cannot write since when Services list their external IPs; trying again",
		"wrote since when Services list their external IPs", err)
	return 0, ignoreEnd(ctx, err)
}

// write writes the listings of Services in their order. One that cannot be written keeps those from being
// written that list an address of it, which would come before it.
func (l *lister) write(ctx context.Context, services []lb.Service) error {
	var failed []error
	kept := map[netip.Addr]bool{}
	for _, s := range services {
		next := l.next(&s)
		if (next == nil) == (s.Listed == nil) && next.String() == s.Listed.String() {
			continue
		}
		if !slices.ContainsFunc(s.ExternalIPs, func(addr netip.Addr) bool { return kept[addr] }) {
			err := within(ctx, func(ctx context.Context) error { return l.status.List(ctx, s, next) })
			loop.Progress(ctx)
			if err == nil || kube.IsNotFound(err) || kube.IsConflict(err) { // it is gone, or created anew
				continue
			}
			failed = append(failed, err)
		}
		for _, addr := range s.ExternalIPs {
			kept[addr] = true
		}
		l.note(s.Key)
	}
	return errors.Join(failed...)
}

// next returns what a Service shall show. What the table shows counts, as another controller may have written
// it, and then what this one wrote.
func (l *lister) next(s *lb.Service) lb.Listing {
	before := lb.Listing{}
	if ours := l.listed[s.Key]; ours.uid == s.UID {
		maps.Copy(before, ours.Listing)
	}
	maps.Copy(before, s.Listed)
	next := before.Next(s, max(l.now().UnixMilli(), l.latest+1))
	l.latest = max(l.latest, next.Latest())
	l.listed[s.Key] = writtenListing{s.UID, next}
	return next
}
