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
func (f *Feed) Set(n lb.FeedUpdate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.update != nil && sameUpdate(*f.update, n) {
		return
	}
	f.update = &n
	close(f.told)
	f.told = make(chan struct{})
}

func sameUpdate(a, b lb.FeedUpdate) bool {
	return slices.Equal(a.Dead, b.Dead) && slices.Equal(a.Gone, b.Gone) &&
		maps.EqualFunc(a.Previous, b.Previous, slices.Equal) &&
		maps.EqualFunc(a.Ring, b.Ring, slices.Equal)
}

// speak writes each update to the proxy, and something at least every FeedBeat, until the
// connection fails or ctx ends.
func (f *Feed) speak(ctx context.Context, conn net.Conn) {
	var said *lb.FeedUpdate
	encoder := json.NewEncoder(conn)
	ticker := time.NewTicker(lb.FeedBeat)
	defer ticker.Stop()
	for {
		f.mu.Lock()
		update, changed := f.update, f.told
		f.mu.Unlock()
		line := lb.FeedUpdate{Same: true}
		if update != said { // each has an address of its own
			line = *update
		}
		line.Beat = int(lb.FeedBeat.Milliseconds())
		if conn.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil || encoder.Encode(line) != nil {
			conn.Close() // the reader notices, and connects anew
			return
		}
		said = update
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-ticker.C:
		}
	}
}
