package main

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// A proxy that ends leaves its rules in the kernel, because another one follows: after a crash, an
// upgrade, a rollback, a restart or a reboot. The last one on a node removes them. It is the last
// one if its DaemonSet was deleted with its pods; what cannot be known counts as not deleted.

// Times of a proxy's end. Together they are shorter than node.terminationGracePeriodSeconds of the
// chart.
const (
	askTimeout = 2 * time.Second        // of each of the two questions whether the DaemonSet is gone
	askEvery   = 200 * time.Millisecond // between attempts to get an answer
	// withdrawTimeout is longer than a speaker takes that was told to end: 10 s with the defaults.
	withdrawTimeout = 12 * time.Second
	cutTimeout      = 3 * time.Second // for the flows of a relay that has ended
	removeTimeout   = 10 * time.Second
	removeEvery     = time.Second // between attempts to remove the rules
)

// presence is what the watch of the proxy's own DaemonSet has shown. A watch goes on after the role
// that allows it was deleted, as helm uninstall does right after it has deleted the DaemonSet.
type presence struct {
	seen     bool // it was there once
	there    bool // it is there, and not being deleted
	orphaned bool // it was last deleted without its pods
}

// next returns what is known after the watch has shown d, or with ok false that there is none.
func (p presence) next(d lb.DaemonSet, ok bool) presence {
	switch {
	case !ok:
		p.there = false // whether its pods stay was shown before
		return p
	case d.Stays:
		return presence{seen: true, there: true}
	}
	return presence{seen: p.seen, orphaned: d.Orphans}
}

// answer is what the API server says of a DaemonSet when it is asked.
type answer int

const (
	noAnswer answer = iota
	refused         // this user may not ask, which the watch could before
	absent
	deleting // with its pods
	orphaning
	there
)

// verdict is whether a proxy that was told to end is the last one on its node.
type verdict int

const (
	unclear verdict = iota // it is worth asking again
	another
	last
)

// decide judges what the watch has shown, and what the API server answers of the DaemonSets that
// run this proxy, or that would run it with other values of the chart.
func decide(watched presence, answers []answer) verdict {
	switch {
	case !watched.seen, watched.orphaned, slices.Contains(answers, there), slices.Contains(answers, orphaning):
		return another
	case len(answers) == 0, slices.Contains(answers, noAnswer):
		return unclear
	case watched.there && slices.Contains(answers, refused):
		return unclear // the watch shows what has happened in a moment, or the role has changed
	}
	return last
}

// departure finds out whether a proxy that was told to end is the last one on its node, and has the
// speaker withdraw all addresses if it is.
type departure struct {
	log *slog.Logger
	// ask asks the API server.
	ask func(context.Context) []answer
	// others returns how many other proxies of Landfall run on this node.
	others func() (int, error)
	// withdraw tells readers of the feed that this node delivers nothing any more; readers returns how
	// many there are.
	withdraw func()
	readers  func() int
	close    func() // ends what others counts

	mu      sync.Mutex
	watched presence
}

// show takes what the watch shows.
func (d *departure) show(set lb.DaemonSet, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watched = d.watched.next(set, ok)
}

func (d *departure) presence() presence {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.watched
}

// leaves reports whether the rules have to go. It returns true only after the speaker has had the
// time to withdraw, and after another look at all of it: in that time a DaemonSet of the same name
// may have been created.
func (d *departure) leaves(ctx context.Context) bool {
	if !d.last(ctx) {
		return false
	}
	d.log.Info("the DaemonSet was deleted, so no proxy will follow on this node; waiting for the speaker to withdraw " +
		"all addresses")
	d.withdraw()
	waiting, cancel := context.WithTimeout(ctx, withdrawTimeout)
	defer cancel()
	for d.readers() > 0 && pause(waiting, askEvery) {
	}
	if !d.last(ctx) {
		d.log.Info("the rules stay: a proxy may follow on this node")
		return false
	}
	return true
}

// last asks until the answer is clear.
func (d *departure) last(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	judged := decide(d.presence(), nil)
	for judged == unclear {
		if judged = decide(d.presence(), d.ask(ctx)); judged == unclear && !pause(ctx, askEvery) {
			break
		}
	}
	if judged != last {
		return false
	}
	n, err := d.others()
	if n > 0 || err != nil {
		d.log.Info("the rules stay: they may be those of another proxy of Landfall on this node", "proxies", n, "error", err)
	}
	return n == 0 && err == nil
}

// pause waits, and reports whether ctx goes on.
func pause(ctx context.Context, length time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(length):
		return true
	}
}

// asker returns a function that asks the API server for DaemonSets by their names.
func asker(client *kube.Client, namespace string, names []string) func(context.Context) []answer {
	return func(ctx context.Context) []answer {
		var answers []answer
		for _, name := range names {
			answers = append(answers, answerOf(client.AskDaemonSet(ctx, namespace, name)))
		}
		return answers
	}
}

func answerOf(d lb.DaemonSet, found bool, err error) answer {
	switch {
	case kube.IsRefused(err):
		return refused
	case err != nil:
		return noAnswer
	case !found:
		return absent
	case d.Stays:
		return there
	case d.Orphans:
		return orphaning
	}
	return deleting
}

// live runs the actors until one fails or ctx ends. They go on while it then asks whether the rules
// have to go, which it returns.
func live(ctx context.Context, leaves func(context.Context) bool,
	runs []func(context.Context) error) (left bool, err error) {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, life := errgroup.WithContext(life)
	for _, run := range runs {
		group.Go(func() error { return run(life) })
	}
	group.Go(func() error {
		defer end()
		select {
		case <-ctx.Done():
			left = leaves(life)
		case <-life.Done():
		}
		return nil
	})
	err = group.Wait()
	return left && err == nil, err
}

// removeAll removes the rules. It tries again for a while: another program may hold the lock of
// iptables.
func removeAll(ctx context.Context, log *slog.Logger, cleanup func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	for {
		err := cleanup(ctx)
		if err == nil {
			log.Info("removed all of Landfall's rules from this node")
			return nil
		}
		if !pause(ctx, removeEvery) {
			return err
		}
		log.Warn("cannot remove all rules; trying again", "error", err)
	}
}
