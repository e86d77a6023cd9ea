package relay

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// barrier stops who comes to it while it is shut.
type barrier struct {
	shut atomic.Bool
	open chan struct{}
}

func (b *barrier) pass() {
	if b.shut.Load() {
		<-b.open
	}
}

// barredLog is a log that stops at a barrier.
type barredLog struct {
	slog.Handler
	barrier *barrier
}

func (barredLog) Enabled(context.Context, slog.Level) bool { return true }

func (l barredLog) Handle(context.Context, slog.Record) error {
	l.barrier.pass()
	return nil
}

// barredRelay returns a relay whose loops stop at a barrier. The test runs single loops of it.
func barredRelay(t *testing.T, tune func(*Deps, *barrier)) (*Relay, *barrier) {
	t.Helper()
	b := &barrier{open: make(chan struct{})}
	deps := NewDeps(slog.New(slog.DiscardHandler))
	deps.Overflows = func() (uint64, error) { return 0, nil }
	deps.Memory = func() (used, limit uint64) { return 0, 0 }
	tune(&deps, b)
	r, err := New(Options{Limit: 10, FlowLimit: 10, ServiceFlows: 10, ClientFlows: 10}, deps)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.receivers.close)
	t.Cleanup(r.sockets.close)
	return r, b
}

// TestALoopThatHangsIsSeen stops each loop of the relay in turn.
func TestALoopThatHangsIsSeen(t *testing.T) {
	barLog := func(d *Deps, b *barrier) { d.Log = slog.New(barredLog{slog.DiscardHandler, b}) }
	barClock := func(d *Deps, b *barrier) { d.Now = func() time.Time { b.pass(); return time.Now() } }
	for _, c := range []struct {
		name string
		bar  func(*Deps, *barrier)
		// begin begins a loop, and returns what ends it and waits for its end.
		begin func(t *testing.T, r *Relay) (end func())
	}{
		{"looks at the kernel", func(d *Deps, b *barrier) {
			d.Overflows = func() (uint64, error) { b.pass(); return 0, nil }
		}, func(t *testing.T, r *Relay) func() { return begin(t, r.followKernel) }},
		{"looks at its memory", func(d *Deps, b *barrier) {
			d.Memory = func() (used, limit uint64) { b.pass(); return 0, 0 }
		}, func(t *testing.T, r *Relay) func() { return begin(t, r.watchMemory) }},
		{"tells the proxy", barClock, func(t *testing.T, r *Relay) func() {
			end, _ := beginTalk(t, r)
			return end
		}},
		{"hears the proxy", barLog, func(t *testing.T, r *Relay) func() {
			end, proxy := beginTalk(t, r)
			if _, err := io.WriteString(proxy, `{"version":1000}`+"\n"); err != nil {
				t.Fatal(err)
			}
			return end
		}},
		{"accepts connections", barLog, beginAccept},
		{"receives datagrams", barClock, beginReceive},
		{"hands over connections", func(*Deps, *barrier) {}, beginSweep},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, b := barredRelay(t, c.bar)
				b.shut.Store(true)
				end := c.begin(t, r)
				time.Sleep(time.Hour)
				if busy := r.Busy(); busy < time.Hour-time.Minute {
					t.Errorf("a loop that hangs: busy for %v", busy)
				}
				b.shut.Store(false)
				close(b.open)
				end()
				if busy := r.Busy(); busy != 0 {
					t.Errorf("after its end: busy for %v", busy)
				}
			})
		})
	}
}

// A relay that waits, for connections, the proxy or the time, is not busy.
func TestAnIdleRelayIsNotBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := barredRelay(t, func(*Deps, *barrier) {})
		kernel, memory := begin(t, r.followKernel), begin(t, r.watchMemory)
		talk, proxy := beginTalk(t, r)
		for range 300 {
			if _, err := io.WriteString(proxy, "{}\n"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if busy := r.Busy(); busy != 0 {
				t.Fatalf("busy for %v", busy)
			}
		}
		talk()
		kernel()
		memory()
	})
}

func begin(t *testing.T, loop func(context.Context)) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		loop(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// beginTalk has the relay talk to a proxy, and returns the other end of the connection.
func beginTalk(t *testing.T, r *Relay) (end func(), proxy net.Conn) {
	ours, theirs := net.Pipe()
	go func() { _, _ = io.Copy(io.Discard, theirs) }()
	stop := begin(t, func(ctx context.Context) { _ = r.converse(ctx, ours) })
	return func() {
		stop()
		theirs.Close()
	}, theirs
}

// beginAccept has the relay accept at a socket that does not listen, which fails.
func beginAccept(t *testing.T, r *Relay) (end func()) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	socket, err := newConn(fd)
	if err != nil {
		t.Fatal(err)
	}
	var connections sync.WaitGroup
	wait := begin(t, func(ctx context.Context) { r.accept(ctx, listener{lb.IPv4, 1, socket}, &connections) })
	return func() {
		_ = socket.file.SetReadDeadline(time.Unix(1, 0))
		wait()
		socket.Close()
	}
}

// beginReceive has the relay receive a datagram.
func beginReceive(t *testing.T, r *Relay) (end func()) {
	l, running := r.sockets.listeners()[0], sync.WaitGroup{}
	socket := r.receivers.of(l.family)
	stop := begin(t, func(ctx context.Context) { r.receiveAll(ctx, l, socket, &running) })
	client, err := DialUDP(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), l.port), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.sendParts([]byte("x")); err != nil {
		t.Fatal(err)
	}
	return func() {
		socket.Close()
		stop()
		running.Wait()
	}
}

// beginSweep has the relay hand over a connection that does not pause.
func beginSweep(t *testing.T, r *Relay) (end func()) {
	_, in := pairOfConns(t)
	_, out := pairOfConns(t)
	one := &passed{passage: newPassage(nil, in, out)}
	r.passing.add(one)
	c := &crew{Relay: r}
	wait := begin(t, func(context.Context) {
		if n, err := c.sweep(nil); n != 0 || err != nil {
			t.Errorf("%d connections are handed over, %v", n, err)
		}
	})
	return func() {
		one.abort(unix.ECONNRESET)
		one.pauses()
		wait()
	}
}
