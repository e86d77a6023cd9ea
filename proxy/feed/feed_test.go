package feed

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/listen"
)

func delivery(service, vip string, ready int) lb.Delivery {
	return lb.Delivery{Service: lb.Key{Namespace: "default", Name: service}, VIP: netip.MustParseAddr(vip),
		Policy: lb.Cluster, Ready: ready}
}

// running is an actor that serves in the background until the test ends or stop is called.
type running struct {
	*Actor
	changes chan struct{} // holds a token after the update has changed
	stop    func()
}

func start(t *testing.T, path string, prepare ...func(*Actor)) running {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	changes := make(chan struct{}, 1)
	a := New(slog.New(slog.DiscardHandler), path, func() {
		select {
		case changes <- struct{}{}:
		default:
		}
	}, func() time.Duration { return 0 })
	for _, f := range prepare {
		f(a)
	}
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stopped := false
	r := running{a, changes, func() {
		if !stopped {
			stopped = true
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}}
	t.Cleanup(r.stop)
	return r
}

// reader is a speaker's end of the feed.
type reader struct {
	t    *testing.T
	conn net.Conn
	in   *bufio.Scanner
}

func dial(t *testing.T, path string) *reader {
	t.Helper()
	for {
		conn, err := net.Dial("unix", path)
		if err == nil {
			t.Cleanup(func() { conn.Close() })
			in := bufio.NewScanner(conn)
			in.Buffer(nil, 16<<20)
			return &reader{t, conn, in}
		}
		if t.Context().Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (r *reader) next() lb.FeedMessage {
	r.t.Helper()
	if !r.in.Scan() {
		r.t.Fatalf("the feed ended: %v", r.in.Err())
	}
	var m lb.FeedMessage
	if err := json.Unmarshal(r.in.Bytes(), &m); err != nil {
		r.t.Fatal(err)
	}
	if m.Beat != int(lb.FeedBeat.Milliseconds()) {
		r.t.Errorf("a message promises a beat of %d ms", m.Beat)
	}
	m.Beat = 0
	return m
}

func (r *reader) expect(want lb.FeedMessage) {
	r.t.Helper()
	if d := cmp.Diff(want, r.next(), cmpopts.EquateComparable(netip.Addr{})); d != "" {
		r.t.Errorf("message (-want +got):\n%s", d)
	}
}

// expectSilence fails the test if anything is said within a moment.
func (r *reader) expectSilence() {
	r.t.Helper()
	if err := r.conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		r.t.Fatal(err)
	}
	if n, err := r.conn.Read(make([]byte, 1)); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		r.t.Fatalf("read %d bytes, error %v; want silence", n, err)
	}
	if err := r.conn.SetReadDeadline(time.Time{}); err != nil {
		r.t.Fatal(err)
	}
}

func key(service string) lb.Key { return lb.Key{Namespace: "default", Name: service} }

func TestContract1FeedIsCompleteOrSilent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "feed.sock")
	a := start(t, path)
	a.Update(nil) // the cluster is known, and without any Service
	early := dial(t, path)
	one, two := delivery("one", "192.0.2.1", 1), delivery("two", "192.0.2.2", 2)
	a.Update(map[lb.Key][]lb.Delivery{key("one"): {one}})
	a.Update(map[lb.Key][]lb.Delivery{key("two"): {two}})
	early.expectSilence()
	a.Begin(nil)
	complete := lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{one, two}}
	early.expect(complete) // had to wait, and hears nothing partial
	late := dial(t, path)
	late.expect(complete)

	refused := one
	refused.Refusal = lb.Refuse(lb.ReasonNotProgrammed, "no lock")
	a.Update(map[lb.Key][]lb.Delivery{key("one"): {refused}})
	early.expect(lb.FeedMessage{Deliveries: []lb.Delivery{refused}})
	a.Update(map[lb.Key][]lb.Delivery{key("one"): {refused}}) // no news
	moved := delivery("two", "192.0.2.3", 2)
	a.Update(map[lb.Key][]lb.Delivery{key("two"): {moved}})
	early.expect(lb.FeedMessage{Deliveries: []lb.Delivery{moved}, Removed: []lb.DeliveryKey{two.Key()}})
	a.Update(map[lb.Key][]lb.Delivery{key("two"): nil})
	early.expect(lb.FeedMessage{Removed: []lb.DeliveryKey{moved.Key()}})
	early.conn.Close()
}

// A proxy that waits for the API server says that much, and no more once it goes to work.
func TestContract7AProxyThatWaitsSaysSo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	r := dial(t, path)
	r.expect(lb.FeedMessage{Waiting: true})
	dial(t, path).expect(lb.FeedMessage{Waiting: true})
	a.Update(map[lb.Key][]lb.Delivery{})
	r.expectSilence()
	a.Begin(nil)
	r.expect(lb.FeedMessage{Complete: true})
}

// An empty node has something to say too: that it delivers nothing.
func TestCompleteAndEmpty(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Begin(nil)
	dial(t, path).expect(lb.FeedMessage{Complete: true})
}

// A reader that does not read holds up neither the proxy nor other readers, and catches up with
// what is so in the end.
func TestSlowReader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Begin(nil)
	slow, quick := dial(t, path), dial(t, path)
	slow.expect(lb.FeedMessage{Complete: true})
	quick.expect(lb.FeedMessage{Complete: true})
	long := strings.Repeat("x", 10_000)
	for i := range 2_000 { // far more than socket buffers hold
		d := delivery("one", "192.0.2.1", i)
		d.Refusal = lb.Refuse(lb.ReasonNotProgrammed, "%s", long)
		a.Update(map[lb.Key][]lb.Delivery{key("one"): {d}})
	}
	for _, r := range []*reader{quick, slow} {
		for r.next().Deliveries[0].Ready != 1999 {
		}
	}
}

// When the proxy ends, readers see the end of the connection and no word before it.
func TestContract6StoppingSaysNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Update(map[lb.Key][]lb.Delivery{key("one"): {delivery("one", "192.0.2.1", 1)}})
	a.Begin(nil)
	r := dial(t, path)
	r.next()
	a.stop()
	if r.in.Scan() || r.in.Err() != nil {
		t.Errorf("a last word: %q, error %v", r.in.Bytes(), r.in.Err())
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// A proxy that is about to remove its rules takes back all it has said, and says nothing else after
// that, whatever is planned; new readers hear it too.
func TestContract3WithdrawComesFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	one := delivery("one", "192.0.2.1", 1)
	a.Update(map[lb.Key][]lb.Delivery{key("one"): {one}})
	a.Begin(nil)
	r := dial(t, path)
	r.next()
	a.Withdraw()
	said := r.next()
	for len(said.Removed) == 0 && len(said.Deliveries) == 0 { // a beat
		said = r.next()
	}
	if d := cmp.Diff(lb.FeedMessage{Removed: []lb.DeliveryKey{one.Key()}}, said,
		cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Errorf("message (-want +got):\n%s", d)
	}
	a.Update(map[lb.Key][]lb.Delivery{key("two"): {delivery("two", "192.0.2.2", 1)}})
	a.Begin(map[lb.Key][]lb.Delivery{key("one"): {one}})
	r.expect(lb.FeedMessage{}) // the beat
	dial(t, path).expect(lb.FeedMessage{Complete: true})
}

// Even a proxy that has never known the cluster does: the speaker still trusts the one before it.
func TestContract3WithdrawBeforeAllIsKnown(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	r := dial(t, path)
	r.expect(lb.FeedMessage{Waiting: true})
	a.Withdraw()
	for !r.next().Complete { // it may say once more that it waits
	}
}

// The file that a killed proxy leaves is in nobody's way; a living proxy is not pushed aside, and
// is succeeded when it ends.
func TestContract6SocketOfAPredecessor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	living := start(t, path)
	living.Update(map[lb.Key][]lb.Delivery{key("living"): {delivery("living", "192.0.2.1", 1)}})
	living.Begin(nil)
	if got := dial(t, path).next(); len(got.Deliveries) != 1 {
		t.Fatalf("got %+v", got)
	}
	if _, err := listen.Unix(path, 0o600); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("error %v while another one serves", err)
	}
	successor := start(t, path)
	successor.Begin(nil)
	living.stop()
	dial(t, path).expect(lb.FeedMessage{Complete: true})
}

// A socket whose file was removed comes back.
func TestRemovedSocketComesBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Begin(nil)
	dial(t, path).next()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	dial(t, path).expect(lb.FeedMessage{Complete: true})
}

// A reader hears of VRFs with the first complete message, and of each change.
func TestVRFsAreTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	one := delivery("one", "192.0.2.1", 1)
	a.SetVRFs(map[string]string{"red": ""})
	a.Begin(map[lb.Key][]lb.Delivery{key("one"): {one}})
	r := dial(t, path)
	r.expect(lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{one}, VRFs: map[string]string{"red": ""}})
	a.SetVRFs(map[string]string{"red": ""})
	r.expectSilence()
	for _, vrfs := range []map[string]string{{"red": "the VRF is down"}, {"red": "", "blue": ""}, nil} {
		a.SetVRFs(vrfs)
		r.expect(lb.FeedMessage{VRFs: vrfs})
	}
}

// A reader hears with each message that pods of the node have readiness gates.
func TestGatesAreTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path, (*Actor).AskUnannounced)
	a.Begin(nil)
	r := dial(t, path)
	r.expect(lb.FeedMessage{Complete: true, Gates: true})
	r.expect(lb.FeedMessage{Gates: true}) // the beat
}
