package relay

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
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

// A relay that hands over may have one family's port alone, as another program had the other's. Its successor does not
// begin with the other one: it would count as ready, and the relay would end with its connections. But not for ever, as
// the port may be another program's.
func TestContract6OnePortIsNoReasonNotToFollow(t *testing.T) {
	now, patience := time.Now(), stepWithin
	silent := func(*testing.T, *courier) {}
	for _, test := range []struct {
		name     string
		handOver bool
		played   func(*testing.T, *courier) // how the predecessor answers; nil for none
		started  time.Duration              // before now
		listens  bool
		want     []error
	}{
		{"without a hand-over", false, nil, 0, true, nil},
		{"nobody serves successors yet", true, nil, 0, false, []error{ErrNoPredecessor}},
		{"nor later", true, nil, HandOverWithin, true, nil},
		{"it drops who comes", true, func(_ *testing.T, p *courier) { p.close() }, 0, false, []error{ErrNoPredecessor}},
		{"it says nothing", true, silent, 0, false, []error{ErrNoPredecessor, os.ErrDeadlineExceeded}},
		{"another version refuses", true, func(t *testing.T, p *courier) {
			if err := p.send(letter{Version: successionVersion + 1, Refused: "no"}); err != nil {
				t.Error(err)
			}
		}, 0, false, []error{errOtherVersion}},
		{"another version", true, func(t *testing.T, p *courier) {
			if err := p.send(letter{Version: successionVersion + 1}); err != nil {
				t.Error(err)
			}
		}, 0, false, []error{errOtherVersion}},
	} {
		t.Run(test.name, func(t *testing.T) {
			deps := NewDeps(slog.New(slog.DiscardHandler))
			deps.Now, deps.Started = func() time.Time { return now }, now.Add(-test.started)
			deps.listen = oneFamily(t)
			options := Options{TCPOnly: true, Limit: 10}
			if test.handOver {
				options.HandOver = filepath.Join(t.TempDir(), "handover.sock")
			}
			if test.name == "it says nothing" {
				stepWithin = time.Millisecond
				defer func() { stepWithin = patience }()
			}
			if test.played != nil {
				playPredecessor(t, options.HandOver, test.played)
			}
			r, err := New(options, deps)
			if test.listens {
				if err != nil || len(r.sockets.ports()) != 1 {
					t.Errorf("%v, it listens at %v", err, r.sockets.ports())
				}
				return
			}
			if r != nil || !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("a relay: %t, %v", r != nil, err)
			}
			for _, want := range test.want {
				if !errors.Is(err, want) {
					t.Errorf("%v, want %v", err, want)
				}
			}
			if errors.Is(err, ErrNoPredecessor) && errors.Is(err, errOtherVersion) {
				t.Errorf("it waits for a relay that will hand nothing over: %v", err)
			}
		})
	}
}

// A successor that got no sockets waits for all ports of its predecessor, for a while.
func TestContract6ASuccessorWithoutSocketsWaitsForAllPorts(t *testing.T) {
	now := time.Now()
	deps := NewDeps(slog.New(slog.DiscardHandler))
	deps.Now, deps.Started = func() time.Time { return now }, now.Add(-time.Hour)
	deps.listen = oneFamily(t)
	path := filepath.Join(t.TempDir(), "handover.sock")
	playPredecessor(t, path, func(t *testing.T, p *courier) {
		if err := p.send(letter{Version: successionVersion}); err != nil {
			t.Error(err)
		}
	})
	r, err := New(Options{TCPOnly: true, Limit: 10, HandOver: path}, deps)
	if err != nil || r.predecessor == nil {
		t.Fatalf("it follows nobody: %v", err)
	}
	defer r.predecessor.close()
	if err := r.listen(); !errors.Is(err, unix.EADDRINUSE) || len(r.sockets.ports()) > 0 {
		t.Errorf("%v, it listens at %v", err, r.sockets.ports())
	}
	now = now.Add(HandOverWithin)
	if err := r.listen(); err != nil || len(r.sockets.ports()) != 1 {
		t.Errorf("later: %v, it listens at %v", err, r.sockets.ports())
	}
}

// agreesToHandOver answers a successor up to the letter with which it begins, which it returns.
func agreesToHandOver(t *testing.T, p *courier) letter {
	if _, _, err := p.receive(time.Minute); err != nil {
		t.Error(err)
	}
	if err := p.send(letter{Version: successionVersion}); err != nil {
		t.Error(err)
	}
	l, _, err := p.receive(time.Minute)
	if err != nil || !l.Begin {
		t.Errorf("it begins: %+v, %v", l, err)
	}
	return l
}

// A successor whose predecessor drops it half way is not settled: it asks again for the connections, and is once it has
// them. It has sockets already, or opens its own.
func TestContract6ASuccessorThatIsDroppedAsksAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "handover.sock")
	deps := NewDeps(slog.New(slog.DiscardHandler))
	deps.listen = func(lb.Family, uint16) (listener, error) {
		return listener{}, os.NewSyscallError("bind", unix.EADDRINUSE)
	}
	var r *Relay
	began, next := make(chan letter), make(chan struct{})
	playPredecessor(t, path, func(t *testing.T, p *courier) {
		began <- agreesToHandOver(t, p)
		<-next // somebody is there who answers the next time
		p.close()
	})
	r, err := New(Options{TCPOnly: true, Limit: 10, HandOver: path, Socket: t.TempDir() + "/none"}, deps)
	if err != nil || r.predecessor == nil {
		t.Fatalf("it follows nobody: %v", err)
	}
	r.known.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	if l := <-began; l.NoSockets {
		t.Error("it does not ask for sockets at first")
	}
	swept := make(chan struct{})
	playPredecessor(t, path, func(t *testing.T, p *courier) {
		l := agreesToHandOver(t, p)
		if r.Settled() == nil || l.NoSockets {
			t.Errorf("before it has all it is settled: %v; it asks for sockets: %v", r.Settled() == nil, !l.NoSockets)
		}
		close(swept)
		for _, l := range []letter{{}, {Swept: true}} {
			if err := p.send(l); err != nil {
				t.Error(err)
			}
		}
	})
	close(next)
	if <-r.settled; !isClosed(swept) {
		t.Error("it is settled, and has not asked again")
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A successor whose predecessor dies half way has all that there is once nobody has the lock of those who hand over.
func TestContract6ASuccessorOfOneThatDiesIsSoonReady(t *testing.T) {
	path := filepath.Join(t.TempDir(), "own", "handover.sock")
	lock, err := lockAt(path)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	deps := NewDeps(slog.New(slog.DiscardHandler))
	deps.listen = func(lb.Family, uint16) (listener, error) {
		return listener{}, os.NewSyscallError("bind", unix.EADDRINUSE)
	}
	began := make(chan struct{})
	playPredecessor(t, path, func(t *testing.T, p *courier) {
		agreesToHandOver(t, p)
		os.Remove(path) // nobody listens
		close(began)
		p.close()
	})
	r, err := New(Options{TCPOnly: true, Limit: 10, HandOver: path, Socket: t.TempDir() + "/none"}, deps)
	if err != nil || r.predecessor == nil {
		t.Fatalf("it follows nobody: %v", err)
	}
	r.known.Store(true)
	r.alone = r.alone.Add(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	<-began
	if r.nobodyServes() || r.Settled() == nil {
		t.Error("it is settled while somebody may hand over")
	}
	lock.Close()
	<-r.settled // in an hour without it
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// oneFamily opens the port of IPv6; another process has that of IPv4.
func oneFamily(t *testing.T) func(lb.Family, uint16) (listener, error) {
	return func(family lb.Family, _ uint16) (listener, error) {
		if family == lb.IPv4 {
			return listener{}, os.NewSyscallError("bind", unix.EADDRINUSE)
		}
		return deaf(t, family, 6), nil
	}
}

// playPredecessor answers the hello of a successor.
func playPredecessor(t *testing.T, path string, answers func(*testing.T, *courier)) {
	t.Helper()
	l, err := listenAt(path)
	if err != nil {
		t.Fatal(err)
	}
	played := make(chan struct{})
	t.Cleanup(func() { l.Close(); <-played })
	go func() {
		defer close(played)
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		p, err := newCourier(conn)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(p.close)
		answers(t, p)
	}()
}
