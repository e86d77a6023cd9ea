package neighbors

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

var (
	eth0  = lb.Interface{Index: 2, Name: "eth0", Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}
	node2 = links.Unresolved{Addr: netip.MustParseAddr("10.0.0.2"), Link: 2}
	node3 = links.Unresolved{Addr: netip.MustParseAddr("10.0.0.3"), Link: 2}
	nodes = Desired{Interfaces: []lb.Interface{eth0}, Nodes: map[netip.Addr]bool{node2.Addr: true, node3.Addr: false}}
)

// fakeKernel knows no neighbor, and finds those that answer as soon as it asks for them.
type fakeKernel struct {
	mu      sync.Mutex
	missing []links.Unresolved
	hops    []links.Gateway
	answers map[netip.Addr]time.Time // from when on a neighbor answers
	asked   map[netip.Addr]int
	open    int
	fails   map[string]error // the next call of that name fails
	hang    chan struct{}    // if not nil, calls wait until it is closed
}

func (k *fakeKernel) call(name string) error {
	k.mu.Lock()
	hang, err := k.hang, k.fails[name]
	delete(k.fails, name)
	k.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return err
}

func (k *fakeKernel) Unresolved() ([]links.Unresolved, error) {
	if err := k.call("Unresolved"); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.missing), nil
}

func (k *fakeKernel) NextHops() ([]links.Gateway, error) { return k.hops, k.call("NextHops") }

func (k *fakeKernel) Renew(u links.Unresolved) error {
	if err := k.call("Renew"); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.asked[u.Addr]++
	if at, ok := k.answers[u.Addr]; ok && !time.Now().Before(at) {
		k.missing = slices.DeleteFunc(k.missing, func(m links.Unresolved) bool { return m == u })
	}
	return nil
}

func (k *fakeKernel) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.open--
}

// times returns how often the kernel was asked for a neighbor.
func (k *fakeKernel) times(u links.Unresolved) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.asked[u.Addr]
}

// inBubble runs a test with an actor in time that passes only when nobody has anything to do.
func inBubble(t *testing.T, name string, f func(t *testing.T, k *fakeKernel, n *Neighbors)) {
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			k := &fakeKernel{answers: map[netip.Addr]time.Time{}, asked: map[netip.Addr]int{}, fails: map[string]error{}}
			n := New(Options{Log: slog.New(slog.DiscardHandler), Open: func() (Kernel, error) {
				if err := k.call("Open"); err != nil {
					return nil, err
				}
				k.mu.Lock()
				defer k.mu.Unlock()
				k.open++
				return k, nil
			}})
			n.Set(nodes)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- n.Run(ctx) }()
			f(t, k, n)
			time.Sleep(2 * Patience)
			synctest.Wait()
			k.mu.Lock()
			if k.open != 0 {
				t.Errorf("%d ways to the kernel are open at rest", k.open)
			}
			k.mu.Unlock()
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	})
}

// wait fails the test unless what is waited for comes after that time.
func wait(t *testing.T, done <-chan struct{}, want time.Duration) {
	t.Helper()
	began := time.Now()
	<-done
	if took := time.Since(began); took != want {
		t.Errorf("waited for %v, want %v", took, want)
	}
}

func TestResolve(t *testing.T) {
	inBubble(t, "nothing is missing", func(t *testing.T, _ *fakeKernel, n *Neighbors) { wait(t, n.Resolve(), 0) })
	inBubble(t, "a Node answers at once", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing, k.answers[node2.Addr] = []links.Unresolved{node2}, time.Now()
		wait(t, n.Resolve(), lookEvery)
	})
	inBubble(t, "a Node answers the second question", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing, k.answers[node2.Addr] = []links.Unresolved{node2}, time.Now().Add(askEvery)
		wait(t, n.Resolve(), askEvery+lookEvery)
		if got := k.times(node2); got != 2 {
			t.Errorf("asked %d times", got)
		}
	})
	inBubble(t, "a Node never answers", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing = []links.Unresolved{node2}
		wait(t, n.Resolve(), Patience)
		time.Sleep(time.Minute)
		// The last question and the end of the wait are due at the same time.
		if got, most := k.times(node2), int(Patience/askEvery)+1; got < most-1 || got > most {
			t.Errorf("asked %d times, want %d or %d", got, most-1, most)
		}
	})
	inBubble(t, "a dead Node is not waited for", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing = []links.Unresolved{node3}
		wait(t, n.Resolve(), 0)
		if got := k.times(node3); got != 1 {
			t.Errorf("asked %d times", got)
		}
	})
	inBubble(t, "a Node dies meanwhile", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing = []links.Unresolved{node2}
		done := n.Resolve()
		time.Sleep(lookEvery / 2)
		n.Set(Desired{Interfaces: nodes.Interfaces, Nodes: map[netip.Addr]bool{node2.Addr: false}})
		wait(t, done, lookEvery/2)
	})
	inBubble(t, "the kernel hangs", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.hang = make(chan struct{})
		wait(t, n.Resolve(), Patience)
		if n.Busy() != Patience {
			t.Errorf("busy for %v", n.Busy())
		}
		close(k.hang)
	})
	inBubble(t, "two sessions", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing = []links.Unresolved{node2}
		first := n.Resolve()
		time.Sleep(Patience / 2)
		second := n.Resolve()
		wait(t, first, Patience/2)
		wait(t, second, Patience/2)
	})
}

// TestFailuresAreRetried has each call to the kernel fail once.
func TestFailuresAreRetried(t *testing.T) {
	for _, call := range []string{"Open", "Unresolved", "NextHops", "Renew"} {
		inBubble(t, call, func(t *testing.T, k *fakeKernel, n *Neighbors) {
			k.missing, k.answers[node2.Addr] = []links.Unresolved{node2}, time.Now()
			k.fails[call] = errors.New("no")
			want := 2 * lookEvery
			if call == "Renew" {
				want = askEvery + lookEvery
			}
			wait(t, n.Resolve(), want)
		})
	}
}

// TestALinkReturns has the kernel ask for the neighbors behind a link as soon as it is back.
func TestALinkReturns(t *testing.T) {
	inBubble(t, "a link returns", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing, k.answers[node2.Addr] = []links.Unresolved{node2}, time.Now()
		away := eth0
		away.Up = false
		n.Set(Desired{Interfaces: []lb.Interface{away}, Nodes: nodes.Nodes})
		time.Sleep(time.Minute)
		if got := k.times(node2); got != 0 {
			t.Errorf("asked %d times while it was away", got)
		}
		n.Set(nodes)
		synctest.Wait()
		if got := k.times(node2); got != 1 {
			t.Errorf("asked %d times when it was back", got)
		}
	})
}

// TestASilentNextHopDelaysOnce has a session wait for a next hop that never answers, and others not,
// until the kernel has known it or a link has returned.
func TestASilentNextHopDelaysOnce(t *testing.T) {
	router := links.Unresolved{Addr: netip.MustParseAddr("10.0.0.254"), Link: 2}
	silent := func(k *fakeKernel) {
		k.missing, k.hops = []links.Unresolved{router}, []links.Gateway{{Addr: router.Addr, Interface: router.Link}}
	}
	once := func(t *testing.T, k *fakeKernel, n *Neighbors) {
		t.Helper()
		silent(k)
		wait(t, n.Resolve(), Patience)
		time.Sleep(time.Minute)
		before := k.times(router)
		wait(t, n.Resolve(), 0)
		if got := k.times(router); got != before+1 {
			t.Errorf("the kernel is asked for it %d times more, want once", got-before)
		}
	}
	inBubble(t, "two sessions", once)
	inBubble(t, "at the same time", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		silent(k)
		first := n.Resolve()
		time.Sleep(Patience - lookEvery/2)
		second := n.Resolve()
		wait(t, first, lookEvery/2)
		if wait(t, second, lookEvery/2); len(n.waiting) > 0 {
			t.Error("a session waits")
		}
	})
	inBubble(t, "it answered meanwhile", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		once(t, k, n)
		k.missing = nil
		wait(t, n.Resolve(), 0)
		silent(k)
		wait(t, n.Resolve(), Patience)
	})
	inBubble(t, "a link returned meanwhile", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		once(t, k, n)
		away := eth0
		away.Up = false
		n.Set(Desired{Interfaces: []lb.Interface{away}, Nodes: nodes.Nodes})
		n.Set(nodes)
		wait(t, n.Resolve(), Patience)
	})
	inBubble(t, "a link that does not carry yet", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		silent(k)
		away := eth0
		away.Up = false
		n.Set(Desired{Interfaces: []lb.Interface{away}, Nodes: nodes.Nodes})
		n.Set(nodes)
		time.Sleep(time.Minute)
		wait(t, n.Resolve(), Patience) // no session has waited yet
	})
	inBubble(t, "a Node is waited for each time", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		k.missing = []links.Unresolved{node2}
		wait(t, n.Resolve(), Patience)
		time.Sleep(time.Minute)
		wait(t, n.Resolve(), Patience)
	})
	inBubble(t, "there is a bound", func(t *testing.T, k *fakeKernel, n *Neighbors) {
		began := time.Now()
		n.began = map[key]time.Time{}
		for i := range 2 * maxSilent {
			n.began[key{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 2}] = began
		}
		if n.resign(began.Add(Patience)); len(n.silent) != maxSilent {
			t.Errorf("%d are remembered, want %d", len(n.silent), maxSilent)
		}
		n.began = nil
	})
}
