package feed

import (
	"bufio"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestTheBeatFollowsTheLoops has a speaker hear nothing of a proxy whose loops hang, also after it
// has connected again, and all of it once they go on.
func TestTheBeatFollowsTheLoops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var busy atomic.Int64
		a := New(slog.New(slog.DiscardHandler), "", func() {}, func() time.Duration { return time.Duration(busy.Load()) })
		a.Update(map[lb.Key][]lb.Delivery{key("web"): {delivery("web", "192.0.2.1", 1)}})
		a.Begin(nil)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		connect := func() *atomic.Int64 {
			ours, theirs := net.Pipe()
			go a.serveReader(ctx, ours)
			heard := new(atomic.Int64)
			go func() {
				for lines := bufio.NewScanner(theirs); lines.Scan(); {
					var m lb.FeedMessage
					if err := json.Unmarshal(lines.Bytes(), &m); err != nil || heard.Load() == 0 && len(m.Deliveries) != 1 {
						t.Errorf("%s: %v", lines.Text(), err)
					}
					heard.Add(1)
				}
			}()
			return heard
		}
		first := connect()
		busy.Store(int64(stuckAfter - 1))
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		before := first.Load()
		if before < int64(time.Minute/lb.FeedBeat) {
			t.Errorf("%d messages in a minute", before)
		}
		busy.Store(int64(stuckAfter))
		second := connect()
		time.Sleep(time.Hour)
		synctest.Wait()
		if first.Load() != before || second.Load() != 0 {
			t.Errorf("a proxy that hangs says %d and %d messages", first.Load()-before, second.Load())
		}
		busy.Store(0)
		time.Sleep(lb.FeedSilence(int(lb.FeedBeat.Milliseconds())))
		synctest.Wait()
		if first.Load() == before || second.Load() == 0 {
			t.Error("a proxy that goes on is not heard")
		}
		cancel()
		synctest.Wait()
	})
}
