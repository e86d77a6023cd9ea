// Package gate knows what this node's data plane delivers: from the feed of Landfall's proxy, or,
// next to another proxy, from the endpoints alone.
package gate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// writeTimeout bounds how long the proxy may take to listen.
const writeTimeout = 5 * time.Second

// attempts are the waits between attempts to connect to the proxy. A proxy that restarts is back in
// a moment, and connecting to a socket costs nothing.
var attempts = loop.Backoff{Min: 50 * time.Millisecond, Max: time.Second}

// Options of a Feed.
type Options struct {
	// Dial connects to the proxy.
	Dial func(context.Context) (net.Conn, error)
	// Hold is how long the proxy's last report counts after its connection is lost.
	Hold time.Duration
	Log  *slog.Logger
	// Changed is called with the VIPs of which the proxy says something else now; nil means all, and
	// an empty list that Rescued has become true. It must not block.
	Changed func(vips []netip.Addr)
	// Ended, if not nil, is called after Changed when the proxy has ended to deliver a VIP that it still
	// names: clients wait for that. It must not block.
	Ended func()
}

// DialUnix returns a Dial function for a unix socket.
func DialUnix(path string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}
}

// Feed is the actor that listens to the proxy.
type Feed struct {
	opts Options

	mu         sync.Mutex
	deliveries map[lb.DeliveryKey]lb.Delivery
	vrfs       map[string]string
	gates      bool      // the proxy wants to know what is unannounced
	reason     lb.Reason // why the deliveries cannot be used
	connected  bool      // and a complete message has come over this connection
	hold       *time.Timer
	pulses     loop.Pulses // while it takes in a message, and while it tells something
	told       told
}

// NewFeed returns a Feed that knows nothing. It connects once Run is called.
func NewFeed(opts Options) *Feed {
	return &Feed{opts: opts, reason: lb.ReasonFeedUnknown, told: told{more: make(chan struct{})}}
}

// Reason says why the deliveries cannot be used: ReasonFeedUnknown before the proxy's first report,
// ReasonFeedLost when it has been away for longer than the hold, and "" when they can.
func (f *Feed) Reason() lb.Reason {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reason
}

// Connected reports whether the proxy is there now and has said all it knows.
func (f *Feed) Connected() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.connected
}

// Delivery returns what the proxy last said of a VIP of a Service, or nil.
func (f *Feed) Delivery(k lb.DeliveryKey) *lb.Delivery {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, ok := f.deliveries[k]
	if !ok {
		return nil
	}
	return &d
}

// VRFs returns what the proxy last said of the VRFs on the node: why the kernel does not deliver what comes in through
// one, or "". The caller must not change it.
func (f *Feed) VRFs() map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.vrfs
}

// Gates reports whether the proxy wants to hear of lb.FeedUpdate.Unannounced.
func (f *Feed) Gates() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gates
}

// Busy returns for how long the actor has been at one thing.
func (f *Feed) Busy() time.Duration { return f.pulses.Busy() }

// Run listens until ctx ends.
func (f *Feed) Run(ctx context.Context) error {
	defer f.stopHold()
	waiting := false // and it was logged: once, not at each attempt
	return loop.Retry(ctx, attempts, func(ctx context.Context) (heard bool) {
		heard, err := f.listen(ctx)
		switch {
		case ctx.Err() != nil:
		case heard:
			waiting = false
			f.opts.Log.Warn("lost the feed of the proxy; its last report still counts for a while", "hold", f.opts.Hold,
				"error", err)
		case !waiting:
			waiting = true
			f.opts.Log.Info("waiting for the feed of the proxy", "error", err)
		}
		return heard
	})
}

// listen connects once and takes in messages until the connection ends. It reports whether there
// was a complete message.
func (f *Feed) listen(ctx context.Context) (heard bool, err error) {
	conn, err := f.opts.Dial(ctx)
	if err != nil {
		return false, fmt.Errorf("connect to the proxy: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var silence time.Duration
	var speaking sync.WaitGroup
	defer speaking.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	speaking.Go(func() { f.speak(ctx, conn) })
	err = read(conn, func(m lb.FeedMessage) {
		defer f.pulses.Begin()()
		if m.Waiting {
			f.wait()
		} else {
			if !heard {
				f.opts.Log.Info("the proxy reports what it delivers", "deliveries", len(m.Deliveries))
			}
			heard = true
			f.take(m)
		}
		if m.Beat > 0 {
			silence = lb.FeedSilence(m.Beat)
		}
		if silence > 0 {
			_ = conn.SetReadDeadline(time.Now().Add(silence)) // fails only once the connection has, which reading tells
		}
	})
	f.lost()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("the proxy has been silent for %s: %w", silence, err)
	}
	return heard, err
}

// read decodes messages until the stream ends, which is an error too. The first one that does not
// only say that the proxy waits has to be complete.
func read(r io.Reader, take func(lb.FeedMessage)) error {
	decoder := json.NewDecoder(r)
	for first := true; ; {
		var m lb.FeedMessage
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return errors.New("the proxy has closed the feed")
		} else if err != nil {
			return fmt.Errorf("read the feed: %w", err)
		}
		if first && !m.Waiting && !m.Complete {
			return errors.New("read the feed: the first message is not complete")
		}
		first = first && m.Waiting
		take(m)
	}
}

// wait has what an earlier proxy said go on: a new one is there, which leaves the kernel as it is
// until it knows the cluster.
func (f *Feed) wait() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.endHold() {
		f.opts.Log.Info(
			"the proxy has restarted and waits for the API server; the last report of the one before it still counts")
	}
}

// take makes a message known.
func (f *Feed) take(m lb.FeedMessage) {
	f.mu.Lock()
	f.connected = true
	f.endHold()
	wasUsable := f.reason == ""
	f.reason = ""
	known := f.deliveries
	if !wasUsable {
		known = nil // it is too old to stand for anything
	}
	deliveries, changed, ended := merge(known, m)
	f.deliveries = deliveries
	elsewhere := !maps.Equal(f.vrfs, m.VRFs) || f.gates != m.Gates
	f.vrfs, f.gates = m.VRFs, m.Gates
	answered := f.told.answered()
	f.told.rescued = m.Rescued
	answered = f.told.answered() && !answered
	f.mu.Unlock()
	switch {
	case !wasUsable || elsewhere:
		f.opts.Changed(nil)
	case len(changed) > 0:
		f.opts.Changed(changed)
	case answered:
		f.opts.Changed([]netip.Addr{})
	}
	if ended && f.opts.Ended != nil {
		f.opts.Ended()
	}
}

// merge returns the deliveries after a message, the VIPs of which something else is said, and whether one
// of them was delivered and is not now. Of what the proxy does not know yet the old delivery stays.
func merge(old map[lb.DeliveryKey]lb.Delivery, m lb.FeedMessage) (
	deliveries map[lb.DeliveryKey]lb.Delivery, vips []netip.Addr, ended bool) {
	deliveries = old
	changed := map[netip.Addr]bool{}
	if m.Complete || old == nil {
		deliveries = make(map[lb.DeliveryKey]lb.Delivery, len(m.Deliveries))
	}
	for _, d := range m.Deliveries {
		before, ok := old[d.Key()]
		if ok && d.Unknown && before.Policy == d.Policy {
			d = before
		}
		if !ok || !before.Equal(d) {
			changed[d.VIP] = true
			ended = ended || ok && before.Deliverable() == "" && d.Deliverable() != ""
		}
		deliveries[d.Key()] = d
	}
	for _, k := range m.Removed {
		if _, ok := deliveries[k]; ok {
			changed[k.VIP] = true
			delete(deliveries, k)
		}
	}
	if m.Complete {
		for k := range old {
			if _, ok := deliveries[k]; !ok {
				changed[k.VIP] = true
			}
		}
	}
	return deliveries, slices.SortedFunc(maps.Keys(changed), netip.Addr.Compare), ended
}

// lost starts the hold after a connection has ended.
func (f *Feed) lost() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.connected = false
	if f.reason != "" || f.hold != nil {
		return
	}
	var hold *time.Timer
	hold = time.AfterFunc(f.opts.Hold, func() {
		f.mu.Lock()
		over := f.hold == hold // no message came in between
		if over {
			f.reason, f.hold = lb.ReasonFeedLost, nil
		}
		f.mu.Unlock()
		if over {
			f.opts.Log.Warn("the proxy has been away for longer than the hold: the speaker withdraws every address", "hold",
				f.opts.Hold)
			f.opts.Changed(nil)
		}
	})
	f.hold = hold
}

func (f *Feed) stopHold() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.endHold()
}

// endHold ends the hold and reports whether there was one. It needs mu.
func (f *Feed) endHold() bool {
	if f.hold == nil {
		return false
	}
	f.hold.Stop()
	f.hold = nil
	return true
}
