package members

import (
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// TestGossipThatHangsIsSeen stops what takes in messages, and what asks for them.
func TestGossipThatHangsIsSeen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang := make(chan struct{})
		alive := liveness.New(liveness.Options{Self: "a", Log: slog.New(slog.DiscardHandler), Changed: func() {}})
		m := New(Options{Self: "a", Born: time.Now(), Liveness: alive, Log: slog.New(slog.DiscardHandler),
			Changed: func([]netip.Addr) { <-hang }})
		want := func(what string, busy time.Duration) {
			t.Helper()
			synctest.Wait()
			if got := m.Busy(); got != busy {
				t.Errorf("%s: busy for %v, want %v", what, got, busy)
			}
		}
		m.ml = &memberlist.Memberlist{} // it runs
		time.Sleep(time.Hour)
		want("alone", 0)
		events{m}.NotifyJoin(&memberlist.Node{Name: "b", Addr: []byte{10, 0, 0, 2}})
		for range 100 {
			time.Sleep(quiet / 2)
			want("asked now and then", 0)
			delegate{m}.GetBroadcasts(0, 1000)
		}
		other := newJournal("b", 1)
		other.set(map[netip.Addr]*plan.Claim{netip.MustParseAddr("192.0.2.1"): {}})
		go delegate{m}.NotifyMsg(encode(other.full()))
		time.Sleep(quiet)
		want("a message is not taken in", quiet)
		close(hang)
		want("it is in the end", 0)
		time.Sleep(time.Hour)
		want("nobody asks any more", time.Hour+quiet)
		events{m}.NotifyLeave(&memberlist.Node{Name: "b"})
		want("alone again", 0)
	})
}
