package relay

import (
	"context"
	"log/slog"
	"maps"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// deaf returns a listener at which no connection comes.
func deaf(t *testing.T, family lb.Family, port uint16) listener {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	socket, err := newConn(fd)
	if err != nil {
		t.Fatal(err)
	}
	_ = socket.file.SetReadDeadline(time.Unix(1, 0))
	return listener{family, port, socket}
}

// A relay whose port of one family another program has opens it once that is free. It asks ever less often, at most once a
// minute, and says so once. A successor that has its sockets does so in its place.
func TestAFamilyWhosePortAnotherHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logged
		deps := NewDeps(slog.New(slog.NewTextHandler(&log, nil)))
		deps.Overflows = func() (uint64, error) { return 0, nil }
		deps.Memory = func() (used, limit uint64) { return 0, 0 }
		var tries atomic.Int64
		var free atomic.Bool
		deps.listen = func(family lb.Family, port uint16) (listener, error) {
			if family == lb.IPv4 {
				return deaf(t, family, 4), nil
			}
			if tries.Add(1); !free.Load() {
				return listener{}, os.NewSyscallError("bind", unix.EADDRINUSE)
			}
			return deaf(t, family, 6), nil
		}
		r, err := New(Options{Socket: t.TempDir() + "/none", TCPOnly: true, Limit: 10}, deps)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		want := func(what string, least, most int, ports map[lb.Family]uint16, warned, told int) {
			t.Helper()
			synctest.Wait()
			n := int(tries.Swap(0))
			if n < least || n > most || !maps.Equal(r.sockets.ports(), ports) {
				t.Errorf("%s: %d tries, ports %v", what, n, r.sockets.ports())
			}
			if a, b := strings.Count(log.all(), "cannot open the relay's port"),
				strings.Count(log.all(), "opened the relay's port"); a != warned || b != told {
				t.Errorf("%s: it logs %s", what, log.all())
			}
			if why := r.sockets.without()[lb.IPv6]; (why == "") != (len(ports) == 2) {
				t.Errorf("%s: the proxy hears that it lacks the port of IPv6 as %q", what, why)
			}
		}
		one, both := map[lb.Family]uint16{lb.IPv4: 4}, map[lb.Family]uint16{lb.IPv4: 4, lb.IPv6: 6}
		time.Sleep(time.Minute)
		want("a minute", 5, 10, one, 1, 0)
		time.Sleep(10 * time.Minute)
		want("ten minutes", 9, 11, one, 1, 0)
		handed := r.sockets.handed
		r.sockets.handing.Lock()
		close(handed)
		r.sockets.handing.Unlock()
		time.Sleep(5 * time.Minute)
		want("a successor has the sockets", 0, 0, one, 1, 0)
		r.sockets.handing.Lock()
		r.sockets.handed = make(chan struct{}) // it has died
		r.sockets.handing.Unlock()
		free.Store(true)
		time.Sleep(maxReopen)
		want("the port is free", 1, 1, both, 1, 1)
		time.Sleep(5 * time.Minute)
		want("it has it", 0, 0, both, 1, 1)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A node without IPv6 does not get any: the relay neither asks again nor says so.
func TestANodeOfOneFamily(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logged
		deps := NewDeps(slog.New(slog.NewTextHandler(&log, nil)))
		var tries atomic.Int64
		deps.listen = func(family lb.Family, port uint16) (listener, error) {
			if family == lb.IPv4 {
				return deaf(t, family, 4), nil
			}
			tries.Add(1)
			return listener{}, os.NewSyscallError("socket", unix.EAFNOSUPPORT)
		}
		r, err := New(Options{Socket: t.TempDir() + "/none", TCPOnly: true, Limit: 10}, deps)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.Run(ctx) }()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if n := tries.Load(); n > 2 || strings.Contains(log.all(), "family") || len(r.sockets.without()) > 0 {
			t.Errorf("%d tries, it logs %s and says %v", n, log.all(), r.sockets.without())
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
