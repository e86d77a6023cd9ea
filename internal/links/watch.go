package links

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the watch.
const (
	// gap folds the messages that one change of an interface causes into one listing.
	gap = 20 * time.Millisecond
	// resync lists everything even without a message, in case one was lost.
	resync = time.Minute
	// dumpTries is how often a dump that a change interrupts is repeated before the loop backs off.
	dumpTries = 5
)

// Options of a Watcher.
type Options struct {
	// Namespace is the network namespace to watch; netns.None() is the namespace of the calling
	// process. It must be set: the zero value is file descriptor 0.
	Namespace netns.NsHandle
	Log       *slog.Logger
	// Changed is called after a change, from the watcher's goroutine.
	Changed func()
}

// Watcher keeps a list of the interfaces. While the kernel does not answer, it keeps the last list.
type Watcher struct {
	opts   Options
	list   func() ([]lb.Interface, error)
	runner *loop.Runner

	mu         sync.Mutex
	interfaces []lb.Interface
	known      bool
}

// New returns a Watcher. Run starts it.
func New(opts Options) *Watcher {
	w := &Watcher{opts: opts}
	w.list = func() ([]lb.Interface, error) { return list(opts.Namespace) }
	w.runner = loop.New(func(context.Context) (time.Duration, error) { return w.refresh() },
		loop.Options{Gap: gap, MaxBackoff: 5 * time.Second})
	return w
}

// All returns the interfaces sorted by name, and reports whether they have been listed yet. The
// result must not be changed.
func (w *Watcher) All() ([]lb.Interface, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.interfaces, w.known
}

// Busy returns for how long the actor has been at one thing.
func (w *Watcher) Busy() time.Duration { return w.runner.Busy() }

// Run watches until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	var group errgroup.Group
	group.Go(func() error { return w.runner.Run(ctx) })
	group.Go(func() error { return w.subscribe(ctx) })
	return group.Wait()
}

// refresh lists all interfaces, and calls Changed if they differ.
func (w *Watcher) refresh() (time.Duration, error) {
	interfaces, err := w.list()
	if err != nil {
		w.opts.Log.Warn("cannot list the network interfaces; using the last list", "error", err)
		return 0, err
	}
	w.mu.Lock()
	same := w.known && slices.EqualFunc(w.interfaces, interfaces, lb.Interface.Equal)
	w.interfaces, w.known = interfaces, true
	w.mu.Unlock()
	if !same {
		w.opts.Changed()
	}
	return resync, nil
}

// subscribe pokes the loop at each message of the kernel. The loop then lists everything, so a lost
// message (ENOBUFS) costs one more listing and nothing else.
func (w *Watcher) subscribe(ctx context.Context) error {
	backoff := loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
	return loop.Retry(ctx, backoff, func(ctx context.Context) (worked bool) {
		started := time.Now()
		if err := w.receive(ctx); ctx.Err() == nil {
			w.opts.Log.Warn("the subscription to interface changes ended; subscribing again", "error", err)
		}
		return time.Since(started) > time.Minute
	})
}

func (w *Watcher) receive(ctx context.Context) error {
	socket, err := nl.SubscribeAt(w.opts.Namespace, netns.None(), unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_NETCONF,
		unix.RTNLGRP_IPV6_NETCONF)
	if err != nil {
		return fmt.Errorf("subscribe to interface changes: %w", err)
	}
	stop := context.AfterFunc(ctx, socket.Close)
	defer func() {
		if stop() {
			socket.Close()
		}
	}()
	w.runner.Poke() // list what changed before the subscription
	for {
		_, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil, errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.EINTR):
			w.runner.Poke()
		default:
			return fmt.Errorf("receive interface changes: %w", err)
		}
	}
}

// list returns all interfaces of the kernel, their addresses, and whether it forwards. It repeats a
// dump that was interrupted and never uses its result.
func list(ns netns.NsHandle) ([]lb.Interface, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer handle.Close()
	links, err := complete(handle.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	addrs, err := complete(func() ([]netlink.Addr, error) { return handle.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	interfaces := translate(links, addrs)
	ipv4, err := listForwarding(ns, unix.AF_INET)
	if err != nil {
		return nil, err
	}
	ipv6, err := listForwarding(ns, unix.AF_INET6)
	if err != nil {
		return nil, err
	}
	var forced map[int]bool
	if ipv6.off(netconfAll) {
		if forced, err = listForced(ns); err != nil {
			return nil, err
		}
	}
	markForwarding(interfaces, ipv4, ipv6, forced)
	return interfaces, nil
}

// complete repeats a dump until no change interrupts it.
func complete[T any](dump func() ([]T, error)) ([]T, error) {
	var err error
	for range dumpTries {
		var found []T
		if found, err = dump(); err == nil {
			return found, nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, err
		}
	}
	return nil, err
}
