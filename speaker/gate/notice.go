package gate

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Set replaces what the proxy is told. It never blocks.
func (f *Feed) Set(n lb.FeedNotice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.notice != nil && sameNotice(*f.notice, n) {
		return
	}
	f.notice = &n
	close(f.told)
	f.told = make(chan struct{})
}

func sameNotice(a, b lb.FeedNotice) bool {
	return slices.Equal(a.Dead, b.Dead) && slices.Equal(a.Gone, b.Gone) &&
		maps.EqualFunc(a.Former, b.Former, slices.Equal) &&
		maps.EqualFunc(a.Ring, b.Ring, slices.Equal)
}

// speak writes each notice to the proxy, and something at least every FeedBeat, until the
// connection fails or ctx ends.
func (f *Feed) speak(ctx context.Context, conn net.Conn) {
	var said *lb.FeedNotice
	encoder := json.NewEncoder(conn)
	ticker := time.NewTicker(lb.FeedBeat)
	defer ticker.Stop()
	for {
		f.mu.Lock()
		notice, changed := f.notice, f.told
		f.mu.Unlock()
		line := lb.FeedNotice{Same: true}
		if notice != said { // each has an address of its own
			line = *notice
		}
		line.Beat = int(lb.FeedBeat.Milliseconds())
		if conn.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil || encoder.Encode(line) != nil {
			conn.Close() // the reader notices, and connects anew
			return
		}
		said = notice
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticker.C:
		}
	}
}
