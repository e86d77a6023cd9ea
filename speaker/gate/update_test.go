package gate

import (
	"bufio"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The proxy is told of dead nodes, and again after a new connection.
func TestTheProxyIsToldOfDeadNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conns := make(chan net.Conn)
		f := NewFeed(Options{Log: slog.New(slog.DiscardHandler), Changed: func([]netip.Addr) {},
			Dial: func(ctx context.Context) (net.Conn, error) {
				ours, theirs := net.Pipe()
				select {
				case conns <- theirs:
					return ours, nil
				case <-ctx.Done():
					return nil, ctx.Err()
				}
			}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		heard := func(in *bufio.Reader, want string) {
			t.Helper()
			if line, err := in.ReadString('\n'); err != nil || line != want+"\n" {
				t.Errorf("the proxy hears %q, %v; want %q", line, err, want)
			}
		}
		proxy := <-conns
		in := bufio.NewReader(proxy)
		heard(in, `{"same":true,"beat":2000}`) // it is there, and does not know anything yet
		f.Tell(lb.FeedUpdate{})
		heard(in, `{"beat":2000,"number":1}`)
		f.Tell(lb.FeedUpdate{Changes: true, Dead: []string{"a", "b"}})
		heard(in, `{"beat":2000,"number":2,"changes":true,"dead":["a","b"]}`)
		f.Tell(lb.FeedUpdate{Changes: true, Dead: []string{"b"}})
		heard(in, `{"beat":2000,"number":3,"changes":true,"dead":["b"]}`)
		proxy.Close()
		proxy = <-conns
		in = bufio.NewReader(proxy)
		heard(in, `{"beat":2000,"number":4,"dead":["b"]}`)
		vip, node := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("172.26.236.177")
		other := netip.MustParseAddr("192.0.2.2")
		f.Tell(lb.FeedUpdate{Changes: true, Previous: map[netip.Addr][]netip.Addr{vip: {node}}})
		heard(in, `{"beat":2000,"number":5,"changes":true,"former":{"192.0.2.1":["172.26.236.177"]}}`)
		// Two that come while the proxy does not read are one.
		f.Tell(lb.FeedUpdate{Changes: true, Previous: map[netip.Addr][]netip.Addr{other: {node}}})
		synctest.Wait()
		f.Tell(lb.FeedUpdate{Changes: true, Previous: map[netip.Addr][]netip.Addr{vip: {}}})
		f.Tell(lb.FeedUpdate{Changes: true, Ended: []netip.Addr{other}})
		heard(in, `{"beat":2000,"number":6,"changes":true,"former":{"192.0.2.2":["172.26.236.177"]}}`)
		heard(in, `{"beat":2000,"number":7,"changes":true,"ended":["192.0.2.2"],"former":{"192.0.2.1":[]}}`)
		proxy.Close()
		proxy = <-conns
		in = bufio.NewReader(proxy)
		heard(in, `{"beat":2000,"number":8,"former":{"192.0.2.1":[]}}`)
		heard(in, `{"same":true,"beat":2000}`) // a moment later
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestTheProxyAnswers: Rescued is true while the proxy has answered with the number of the last
// update, over the same connection.
func TestTheProxyAnswers(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		rescued := func(when string, want bool) {
			t.Helper()
			if changes(); f.Rescued() != want {
				t.Errorf("%s: rescued %v", when, !want)
			}
		}
		conn := p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Rescued: 7})
		rescued("nothing was told", false)
		f.Tell(lb.FeedUpdate{})
		rescued("no answer yet", false)
		p.say(conn, lb.FeedMessage{})
		rescued("a proxy of an earlier release", false)
		p.say(conn, lb.FeedMessage{Rescued: 1})
		if got := changes(); len(got) != 1 || got[0] == nil || len(got[0]) != 0 {
			t.Errorf("told of %v, want once of no address", got)
		}
		rescued("answered", true)
		p.say(conn, lb.FeedMessage{Rescued: 1, Deliveries: []lb.Delivery{delivery(vip1, 1)}})
		rescued("something else is said", true)
		f.Tell(lb.FeedUpdate{Changes: true, Dead: []string{"a"}})
		rescued("told more", false)
		p.say(conn, lb.FeedMessage{Rescued: 1})
		rescued("the answer to what was told before", false)
		p.say(conn, lb.FeedMessage{Rescued: 2})
		rescued("answered again", true)
		conn.Close()
		rescued("the proxy is gone", false)
		conn = p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Rescued: 2})
		rescued("another proxy, with an answer to something else", false)
		p.say(conn, lb.FeedMessage{Rescued: 3})
		rescued("another proxy has answered", true)
	})
}

// A proxy that hangs keeps its socket open. It is left after a while, and what it said counts for
// the hold.
func TestAProxyThatHangsIsNoticed(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		conn := p.accept()
		beat := int(lb.FeedBeat.Milliseconds())
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}, Beat: beat})
		changes()
		for range 10 { // it lives, and has nothing to say
			time.Sleep(lb.FeedBeat)
			p.say(conn, lb.FeedMessage{Beat: beat})
		}
		want(t, f, "", true)
		time.Sleep(lb.FeedSilence(beat) - time.Second)
		want(t, f, "", true)
		time.Sleep(2 * time.Second)
		want(t, f, "", false)
		p.accept() // the kernel accepts, the proxy says nothing
		time.Sleep(28 * time.Second)
		want(t, f, "", false)
		if got := changes(); got != nil {
			t.Errorf("told of changes: %v", got)
		}
		time.Sleep(2 * time.Second)
		want(t, f, lb.ReasonFeedLost, false)
	})
}

// A proxy of a version that promises no beat may be silent.
func TestAProxyWithoutABeatMayBeSilent(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		conn := p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}})
		time.Sleep(time.Hour)
		want(t, f, "", true)
	})
}

// A proxy that has started anew without an API server leaves the kernel as it is: what the one
// before it said counts while it lives.
func TestContract7AProxyThatWaitsHoldsWhatWasSaid(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		beat := int(lb.FeedBeat.Milliseconds())
		waits := func(conn net.Conn, times int) {
			for range times {
				p.say(conn, lb.FeedMessage{Waiting: true, Beat: beat})
				time.Sleep(lb.FeedBeat)
			}
		}
		conn := p.accept()
		waits(conn, 10) // it has said nothing yet that could count
		want(t, f, lb.ReasonFeedUnknown, false)
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}, Beat: beat})
		time.Sleep(time.Second)
		conn.Close()
		changes()
		conn = p.accept()
		waits(conn, 100)
		want(t, f, "", false)
		if got := changes(); got != nil {
			t.Errorf("told of changes: %v", got)
		}
		conn.Close()
		time.Sleep(31 * time.Second)
		want(t, f, lb.ReasonFeedLost, false)
	})
}
