package gate

import (
	"context"
	"encoding/json"
	"net"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// told is what the proxy is to be told.
type told struct {
	all       *lb.FeedUpdate // nil before Tell
	listening bool           // a proxy is connected, and was told all up to news
	news      *lb.FeedUpdate // nil for none
	more      chan struct{}  // closed, and replaced, when there is news
	number    uint64         // of the last line with news
	rescued   uint64         // the number that the proxy answered last
}

// Rescued reports whether the proxy has answered that this node passes on connections by all that
// Tell was given. A proxy of an earlier release never does.
func (f *Feed) Rescued() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.told.answered()
}

func (t *told) answered() bool {
	return t.listening && t.news == nil && t.number > 0 && t.rescued == t.number
}

// Tell has the proxy told what update says, beside what it was told before. It never blocks.
//
// It is neither Set nor Update of internal/actor, as an update is the line that goes to the proxy.
// It says all the first time and then what has changed of VIPs, and each time all dead nodes. In
// one line the proxy sees a node's death and what that changes for VIPs at the same moment.
func (f *Feed) Tell(update lb.FeedUpdate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.told.all == nil {
		f.told.all = &lb.FeedUpdate{}
	}
	f.told.all.Apply(update)
	if !f.told.listening {
		return
	}
	if f.told.news == nil {
		f.told.news = &lb.FeedUpdate{Changes: true}
	}
	f.told.news.Apply(update)
	close(f.told.more)
	f.told.more = make(chan struct{})
}

// next returns the line to write, and what is closed when there is more. A proxy that does not
// listen yet is told all.
func (f *Feed) next() (line lb.FeedUpdate, more <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t := &f.told
	switch {
	case !t.listening && t.all != nil:
		line.Apply(*t.all)
	case t.news != nil:
		line = *t.news
	default:
		line.Same = true
	}
	if !line.Same {
		t.number++
		line.Number = t.number
	}
	t.listening, t.news = true, nil
	line.Beat = int(lb.FeedBeat.Milliseconds())
	return line, t.more
}

func (f *Feed) stopTelling() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.told.listening, f.told.news = false, nil
}

// speak writes what the proxy is to be told, and something at least every FeedBeat, until the
// connection fails or ctx ends.
func (f *Feed) speak(ctx context.Context, conn net.Conn) {
	encoder := json.NewEncoder(conn)
	ticker := time.NewTicker(lb.FeedBeat)
	defer ticker.Stop()
	defer f.stopTelling()
	for {
		end := f.pulses.Begin()
		line, more := f.next()
		failed := conn.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil || encoder.Encode(line) != nil
		if end(); failed {
			conn.Close() // the reader notices, and connects anew
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-more:
		case <-ticker.C:
		}
	}
}
