// Package feed tells the speaker on this node what the kernel delivers, over a unix socket: one
// lb.FeedMessage a line, complete at first, then what changed. Readers that are slow get fewer,
// larger changes; they hold up nobody.
package feed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/listen"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Times of the server.
const (
	writeTimeout = 30 * time.Second // a reader that takes nothing for as long is cut off
	// stuckAfter is how long the proxy's loops may be at one thing before readers hear nothing more.
	// It is longer than any part of a step takes, even on a busy machine; only iptables may wait
	// longer for the lock of another process, and what a reader was told counts on for a while.
	stuckAfter    = 30 * time.Second
	checkInterval = time.Second // how often to see whether the socket is still there, or free at last
)

// deliveries are what is so, by Service. The slices are never changed.
type deliveries map[lb.Key][]lb.Delivery

// Actor serves the feed.
type Actor struct {
	log     *slog.Logger
	path    string
	changed func()
	busy    func() time.Duration
	pulses  loop.Pulses // while it takes an update, and while it tells a reader something

	wasStuck atomic.Bool

	mu      sync.Mutex
	updated bool // the cluster is known
	begun   bool
	left    bool // Withdraw was called
	all     deliveries
	vrfs    map[string]string
	gates   bool
	readers map[*subscriber]bool
	// speaker is the reader that said all last; nil when that one is gone. said is what it has said,
	// and heard what of it about VIPs Heard has not returned yet.
	speaker     *subscriber
	said, heard lb.FeedUpdate
	// taken counts the updates that were taken in, and rescued of how many of them Rescued has said
	// that the kernel has what follows.
	taken, rescued uint64
}

// subscriber is one connection.
type subscriber struct {
	// changed are the Services of which it has to hear.
	changed map[lb.Key]bool
	// wake holds a token while there may be something to say.
	wake chan struct{}
	// number is that of the latest update from this reader, and taken is a.taken with it.
	number, taken uint64
}

func (r *subscriber) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

var _ actor.Updater[lb.Key, []lb.Delivery] = (*Actor)(nil)

// New returns an Actor for a socket at path.
// changed is called when Heard may return something else; it must not block. busy returns for how
// long the loops that plan and write rules have been at one thing: while they hang, readers hear
// nothing, not even that the proxy is there.
func New(log *slog.Logger, path string, changed func(), busy func() time.Duration) *Actor {
	return &Actor{log: log, path: path, changed: changed, busy: busy, all: deliveries{},
		readers: map[*subscriber]bool{}, heard: lb.FeedUpdate{Changes: true}}
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.pulses.Busy() }

// Begin says all that is so for all Services, which readers hear from now on. It never blocks.
func (a *Actor) Begin(all map[lb.Key][]lb.Delivery) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.update(all)
	a.begun = true
	a.poke()
}

// Update says all that is so for the Services that it names. Before the first call, readers hear
// that the cluster is not known yet, so that the kernel is left as it is: what a predecessor has
// said goes on counting. From then on until Begin they hear nothing. It never blocks.
func (a *Actor) Update(changes map[lb.Key][]lb.Delivery) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.update(changes)
}

// Withdraw has readers hear that this node delivers nothing any more, whatever Begin and Update say:
// the proxy is about to take its rules away. It never blocks.
func (a *Actor) Withdraw() {
	a.mu.Lock()
	defer a.mu.Unlock()
	nothing := make(map[lb.Key][]lb.Delivery, len(a.all))
	for service := range a.all {
		nothing[service] = nil
	}
	a.update(nothing)
	a.begun, a.left = true, true
	a.poke()
}

func (a *Actor) update(changes map[lb.Key][]lb.Delivery) {
	if a.left {
		return
	}
	a.updated = true
	changed := false
	for service, now := range changes {
		switch before := a.all[service]; {
		case slices.EqualFunc(before, now, lb.Delivery.Equal):
			continue
		case len(now) == 0:
			delete(a.all, service)
		default:
			a.all[service] = slices.Clone(now)
		}
		changed = true
		for r := range a.readers {
			if r.changed != nil { // else it hears everything first
				r.changed[service] = true
			}
		}
	}
	if changed {
		a.poke()
	}
}

func (a *Actor) poke() {
	for r := range a.readers {
		r.poke()
	}
}

// SetVRFs says of the VRFs on the node why the kernel does not deliver what comes in through one; "" if it does. The
// actor keeps the map. It never blocks.
func (a *Actor) SetVRFs(vrfs map[string]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !maps.Equal(a.vrfs, vrfs) {
		a.vrfs = vrfs
		a.poke()
	}
}

func (a *Actor) through() map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.vrfs
}

// AskUnannounced has the speaker say which VIPs this node does not announce yet. It must be called before Run.
func (a *Actor) AskUnannounced() { a.gates = true }

// Readers returns how many are connected.
func (a *Actor) Readers() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.readers)
}

// news returns what has become of Services since a reader was last asked for: of all of them at
// first. complete is false before Begin, and waiting then reports whether the cluster is not known.
func (a *Actor) news(r *subscriber) (now deliveries, complete, waiting bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.begun {
		return nil, false, !a.updated
	}
	if r.changed == nil {
		r.changed = map[lb.Key]bool{}
		return maps.Clone(a.all), true, false
	}
	now = make(deliveries, len(r.changed))
	for key := range r.changed {
		now[key] = a.all[key]
	}
	r.changed = map[lb.Key]bool{}
	return now, true, false
}

// Run serves until ctx ends. Readers are left without a word then: that the proxy ends does not
// mean that the kernel no longer delivers.
func (a *Actor) Run(ctx context.Context) error {
	var failures loop.Failures
	return loop.Retry(ctx, loop.Backoff{Min: checkInterval, Max: checkInterval}, func(ctx context.Context) bool {
		err := a.serve(ctx)
		if ctx.Err() == nil {
			failures.Log(a.log, "cannot serve the feed; trying again", "", err)
		}
		return false
	})
}

// serve opens the socket and serves until ctx ends, the socket fails, or its file is taken away.
func (a *Actor) serve(ctx context.Context) error {
	listener, err := listen.Unix(a.path, 0o600)
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

// watchFile ends serving when somebody removes or replaces the socket's file, as no reader can find
// us then.
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
			cancel(fmt.Errorf("another process removed the socket %s", path))
			return
		}
	}
}

// serveReader writes to one reader until it goes or ctx ends.
func (a *Actor) serveReader(ctx context.Context, conn net.Conn) {
	r := &subscriber{wake: make(chan struct{}, 1)}
	r.poke()
	a.count(r, true)
	defer a.leave(r)
	defer a.count(r, false)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	defer conn.Close()
	go func() { // ends with conn
		if err := a.hear(conn, r); err != nil && ctx.Err() == nil {
			a.log.Warn("disconnected a reader of the feed", "error", err)
		}
		cancel()
	}()
	if err := a.write(ctx, conn, r); err != nil && ctx.Err() == nil {
		a.log.Warn("disconnected a reader of the feed", "error", err)
	}
}

func (a *Actor) count(r *subscriber, there bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if there {
		a.readers[r] = true
	} else {
		delete(a.readers, r)
	}
}

// write sends everything once it is complete, and each change after.
func (a *Actor) write(ctx context.Context, conn net.Conn, r *subscriber) error {
	t := &telling{conn: conn, reader: r, encoder: json.NewEncoder(conn)}
	beat := time.NewTicker(lb.FeedBeat)
	defer beat.Stop()
	for {
		due := false
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		case <-beat.C:
			due = true
		}
		if err := a.tell(t, due); err != nil {
			return err
		}
	}
}

// telling is what a reader was told over its connection.
type telling struct {
	conn     net.Conn
	reader   *subscriber
	encoder  *json.Encoder
	told     deliveries // nil before the complete message
	answered uint64
	vrfs     map[string]string
}

// tell tells a reader what is new; if a beat is due, also that nothing is.
func (a *Actor) tell(t *telling, due bool) error {
	defer a.pulses.Begin()()
	if a.stuck() {
		return nil
	}
	now, complete, waiting := a.news(t.reader)
	if !complete && !waiting {
		return nil
	}
	message, news := lb.FeedMessage{Waiting: true}, true
	if complete {
		message, news = compose(t.told, now)
		message.Rescued = a.answer(t.reader)
		message.VRFs, message.Gates = a.through(), a.gates
		news = news || message.Rescued != t.answered || !maps.Equal(message.VRFs, t.vrfs)
		t.answered, t.vrfs = message.Rescued, message.VRFs
	}
	if news || due {
		message.Beat = int(lb.FeedBeat.Milliseconds())
		if err := t.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return err
		}
		if err := t.encoder.Encode(message); err != nil {
			return err
		}
	}
	if !complete {
		return nil
	}
	if t.told == nil {
		t.told = deliveries{}
	}
	maps.Copy(t.told, now)
	maps.DeleteFunc(now, func(_ lb.Key, d []lb.Delivery) bool { return len(d) > 0 })
	for key := range now {
		delete(t.told, key)
	}
	return nil
}

// stuck reports whether the proxy hangs, and logs it.
func (a *Actor) stuck() bool {
	busy := a.busy()
	stuck := busy >= stuckAfter
	if a.wasStuck.Swap(stuck) != stuck {
		if stuck {
			a.log.Error("the proxy hangs: the speaker hears no more of it", "busy", busy.Round(time.Second))
		} else {
			a.log.Info("the proxy goes on: the speaker hears of it again")
		}
	}
	return stuck
}

// compose returns the message that tells a reader what is so now for some Services, of which it was
// told before, and whether there is anything to say.
func compose(told, now deliveries) (lb.FeedMessage, bool) {
	message := lb.FeedMessage{Complete: told == nil}
	for service, after := range now {
		before, now := byKey(told[service]), byKey(after)
		for key, d := range now {
			if was, ok := before[key]; !ok || !was.Equal(d) {
				message.Deliveries = append(message.Deliveries, d)
			}
			delete(before, key)
		}
		message.Removed = slices.AppendSeq(message.Removed, maps.Keys(before))
	}
	slices.SortFunc(message.Deliveries, lb.Delivery.Compare)
	slices.SortFunc(message.Removed, func(a, b lb.DeliveryKey) int {
		return lb.Delivery{Service: a.Service, VIP: a.VIP}.Compare(lb.Delivery{Service: b.Service, VIP: b.VIP})
	})
	return message, message.Complete || len(message.Deliveries)+len(message.Removed) > 0
}

func byKey(list []lb.Delivery) map[lb.DeliveryKey]lb.Delivery {
	m := make(map[lb.DeliveryKey]lb.Delivery, len(list))
	for _, d := range list {
		m[d.Key()] = d
	}
	return m
}
