// Package feed tells the speaker on this node what the kernel delivers, over a unix socket: one lb.FeedMessage a line, complete at first,
// then what changed. Readers that are slow get fewer, larger changes; they hold up nobody.
package feed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/internal/delta"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Times of the server.
const (
	writeTimeout  = 30 * time.Second // a reader that takes nothing for as long is cut off
	checkInterval = time.Second      // how often to see whether the socket is still there, or free at last
)

// deliveries are what is so, by Service. The slices are never changed.
type deliveries map[lb.Key][]lb.Delivery

// Actor serves the feed.
type Actor struct {
	log  *slog.Logger
	path string

	mu       sync.Mutex
	complete bool
	all      deliveries
	changed  chan struct{} // closed, and replaced, at each change
	readers  int
}

// New returns an Actor for a socket at path. Readers hear nothing before Complete is called.
func New(log *slog.Logger, path string) *Actor {
	return &Actor{log: log, path: path, all: deliveries{}, changed: make(chan struct{})}
}

// Set says all that is so for one Service. It never blocks.
func (a *Actor) Set(service lb.Key, now []lb.Delivery) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch before := a.all[service]; {
	case equal(before, now):
		return
	case len(now) == 0:
		delete(a.all, service)
	default:
		a.all[service] = slices.Clone(now)
	}
	a.wake()
}

// Complete says that everything has been said once, so that readers may be told. It never blocks.
func (a *Actor) Complete() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.complete {
		a.complete = true
		a.wake()
	}
}

// Readers returns how many are connected.
func (a *Actor) Readers() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.readers
}

func (a *Actor) wake() {
	close(a.changed)
	a.changed = make(chan struct{})
}

func equal(a, b []lb.Delivery) bool { return slices.EqualFunc(a, b, same) }

func same(a, b lb.Delivery) bool {
	refusalA, refusalB := a.Refusal, b.Refusal
	a.Refusal, b.Refusal = nil, nil
	return a == b && (refusalA == nil) == (refusalB == nil) && (refusalA == nil || *refusalA == *refusalB)
}

// look returns all deliveries, whether they are complete, and what tells of the next change.
func (a *Actor) look() (all deliveries, complete bool, changed <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.all), a.complete, a.changed
}

// Run serves until ctx ends. Readers are left without a word then: that the proxy ends does not mean that the kernel no longer delivers.
func (a *Actor) Run(ctx context.Context) error {
	said := ""
	for ctx.Err() == nil {
		err := a.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if text := err.Error(); text != said {
			said = text
			a.log.Warn("cannot serve the feed; trying again", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(checkInterval):
		}
	}
	return nil
}

// serve opens the socket and serves until ctx ends, the socket fails, or its file is taken away.
func (a *Actor) serve(ctx context.Context) error {
	listener, err := listen(a.path)
	if err != nil {
		return err
	}
	own, err := os.Stat(a.path)
	if err != nil {
		listener.Close()
		return err
	}
	a.log.Debug("serving the feed", "socket", a.path)
	ctx, cancel := context.WithCancelCause(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer cancel(nil)
	group.Go(func() {
		<-ctx.Done()
		// The file goes with the listener only while it is ours.
		now, err := os.Stat(a.path)
		listener.SetUnlinkOnClose(err == nil && os.SameFile(own, now))
		listener.Close()
	})
	group.Go(func() { watchFile(ctx, a.path, own, cancel) })
	for {
		conn, err := listener.Accept()
		if err != nil {
			cancel(fmt.Errorf("accept: %w", err))
			return context.Cause(ctx)
		}
		group.Go(func() { a.serveReader(ctx, conn) })
	}
}

// watchFile ends serving when somebody removes or replaces the socket's file, as no reader can find us then.
func watchFile(ctx context.Context, path string, own fs.FileInfo, cancel context.CancelCauseFunc) {
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(own, now) {
			cancel(fmt.Errorf("somebody removed the socket %s", path))
			return
		}
	}
}

// listen opens the socket. A file that a killed predecessor left is replaced; a living one is not pushed aside.
func listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	address := &net.UnixAddr{Name: path, Net: "unix"}
	listener, err := net.ListenUnix("unix", address)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return listener, err
	}
	conn, dialErr := net.DialUnix("unix", nil, address)
	if dialErr == nil {
		conn.Close()
		return nil, fmt.Errorf("another proxy serves %s", path)
	}
	if !errors.Is(dialErr, syscall.ECONNREFUSED) {
		return nil, err
	}
	if err := os.Remove(path); err != nil {
		return nil, err
	}
	return net.ListenUnix("unix", address)
}

// serveReader writes to one reader until it goes or ctx ends.
func (a *Actor) serveReader(ctx context.Context, conn net.Conn) {
	a.count(1)
	defer a.count(-1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	defer conn.Close()
	go func() { // ends with conn
		_, _ = io.Copy(io.Discard, conn) // nothing is expected but the end
		cancel()
	}()
	if err := a.write(ctx, conn); err != nil && ctx.Err() == nil {
		a.log.Warn("a reader of the feed is cut off", "error", err)
	}
}

func (a *Actor) count(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.readers += n
}

// write sends everything once it is complete, and each change after.
func (a *Actor) write(ctx context.Context, conn net.Conn) error {
	var told deliveries // nil before the complete message
	encoder := json.NewEncoder(conn)
	for {
		all, complete, changed := a.look()
		if message, news := compose(told, all); complete && news {
			if err := conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
				return err
			}
			if err := encoder.Encode(message); err != nil {
				return err
			}
			told = all
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// compose returns the message that takes a reader from told to all, and whether there is anything to say.
func compose(told, all deliveries) (lb.FeedMessage, bool) {
	change := delta.Diff(told, all, equal)
	message := lb.FeedMessage{Complete: told == nil}
	for _, now := range change.Add {
		message.Deliveries = append(message.Deliveries, now...)
	}
	for service, now := range change.Change {
		inner := delta.Diff(byKey(told[service]), byKey(now), same)
		message.Deliveries = slices.AppendSeq(message.Deliveries, maps.Values(inner.Add))
		message.Deliveries = slices.AppendSeq(message.Deliveries, maps.Values(inner.Change))
		message.Removed = slices.AppendSeq(message.Removed, maps.Keys(inner.Remove))
	}
	for _, before := range change.Remove {
		message.Removed = slices.AppendSeq(message.Removed, maps.Keys(byKey(before)))
	}
	slices.SortFunc(message.Deliveries, lb.Delivery.Compare)
	slices.SortFunc(message.Removed, func(a, b lb.DeliveryKey) int {
		return lb.Delivery{Service: a.Service, VIP: a.VIP}.Compare(lb.Delivery{Service: b.Service, VIP: b.VIP})
	})
	return message, message.Complete || !change.Empty()
}

func byKey(list []lb.Delivery) map[lb.DeliveryKey]lb.Delivery {
	m := make(map[lb.DeliveryKey]lb.Delivery, len(list))
	for _, d := range list {
		m[d.Key()] = d
	}
	return m
}
