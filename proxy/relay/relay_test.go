package relay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

var (
	web      = lb.Key{Namespace: "default", Name: "web"}
	frontend = netip.MustParseAddrPort("198.51.100.1:80")
)

// patience is how long something may take that is to happen: long, as machines are busy at times.
const patience = 5 * time.Minute

// rig is a relay with a proxy and backends that tests play, all on the loopback interface.
type rig struct {
	*Relay
	t        *testing.T
	dead     sync.Map // backends that do not answer
	denied   sync.Map // those that refuse
	said     chan wire.Hello
	tell     chan wire.Message
	stop     func()
	original atomic.Pointer[netip.AddrPort]
	mute     atomic.Bool // the proxy answers no questions
	// beforeUDP is called before a socket to a backend is opened, and may fail instead.
	beforeUDP atomic.Pointer[func(netip.AddrPort) error]
	// version is that of the proxy's messages.
	version int
	// remembers is how long the kernel remembers flows of UDP.
	remembers atomic.Int64
	logged    logged
	// scarce has the next look find little memory.
	scarce atomic.Bool
	// ahead is how much later it is for the relay.
	ahead atomic.Int64
}

// logged is what the relay has logged, as JSON.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// all returns all of it.
func (l *logged) all() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// connections returns the lines of the access log, without what differs each time.
func (l *logged) connections(t *testing.T) (all []map[string]any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for text := range strings.Lines(l.text.String()) {
		var line map[string]any
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			t.Fatal(err)
		}
		if line["msg"] != "connection" {
			continue
		}
		for _, key := range []string{"time", "level", "msg", "client", "seconds"} {
			if line[key] == nil {
				t.Errorf("no %q in %s", key, text)
			}
			delete(line, key)
		}
		all = append(all, line)
	}
	return all
}

// newRig returns a running relay. tune changes its options; nil for as they are.
func newRig(t *testing.T, tune func(*Options)) *rig { return newRigOf(t, wire.Version, tune) }

// newRigOf returns one whose proxy is of a version.
func newRigOf(t *testing.T, version int, tune func(*Options)) *rig {
	t.Helper()
	g := &rig{t: t, version: version, said: make(chan wire.Hello, 1000), tell: make(chan wire.Message)}
	g.original.Store(&frontend)
	g.remembers.Store(int64(time.Hour))
	options := Options{Socket: filepath.Join(t.TempDir(), "relay.sock"), Tries: 3, TryAfter: 10 * time.Millisecond,
		ConnectTimeout: 30 * time.Second, Idle: time.Hour, Drain: time.Minute, Limit: 1000, ServiceLimit: 1000,
		ClientLimit: 1000, FlowLimit: 1000, ServiceFlows: 1000, ClientFlows: 1000, UDPIdle: time.Hour}
	if tune != nil {
		tune(&options)
	}
	deps := NewDeps(slog.New(slog.NewJSONHandler(&g.logged, nil)))
	dial := deps.Dial
	deps.Dial = func(ctx context.Context, backend netip.AddrPort, ttl int) (*Conn, error) {
		if _, silent := g.dead.Load(backend); silent {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		if _, denied := g.denied.Load(backend); denied {
			return nil, unix.ECONNREFUSED
		}
		return dial(ctx, backend, ttl)
	}
	dialUDP := deps.DialUDP
	deps.DialUDP = func(backend netip.AddrPort, ttl int) (*Conn, error) {
		if before := g.beforeUDP.Load(); before != nil {
			if err := (*before)(backend); err != nil {
				return nil, err
			}
		}
		return dialUDP(backend, ttl)
	}
	deps.Times = func() (flow, stream time.Duration) {
		d := time.Duration(g.remembers.Load())
		return d, d
	}
	deps.Memory = func() (used, limit uint64) {
		if g.scarce.Swap(false) {
			return 80_001, 100_000
		}
		return 0, 0
	}
	deps.Original = func(*Conn, lb.Family) (netip.AddrPort, error) { return *g.original.Load(), nil }
	deps.Now = func() time.Time { return time.Now().Add(time.Duration(g.ahead.Load())) }
	listener, err := net.Listen("unix", options.Socket)
	if err != nil {
		t.Fatal(err)
	}
	go g.proxy(listener)
	relay, err := New(options, deps)
	for deadline := time.Now().Add(time.Minute); errors.Is(err, ErrNoPredecessor) && time.Now().Before(deadline); {
		time.Sleep(lookEvery)
		relay, err = New(options, deps)
	}
	if err != nil {
		t.Fatal(err)
	}
	g.Relay = relay
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	var once sync.Once
	g.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run: %v", err)
			}
			listener.Close()
		})
	}
	t.Cleanup(g.stop)
	return g
}

// proxy plays the proxy: it passes on what tests tell, and answers who leaves.
func (g *rig) proxy(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		left, answers := make(chan bool, 1), make(chan []wire.Answer, 1000)
		go func() {
			lines := bufio.NewScanner(conn)
			for lines.Scan() {
				var h wire.Hello
				if json.Unmarshal(lines.Bytes(), &h) != nil {
					continue
				}
				if h.Leaving {
					select {
					case left <- true:
					default:
					}
				}
				if len(h.Flows) > 0 && !g.mute.Load() {
					answers <- g.answer(h.Flows)
				}
				g.said <- h
			}
		}()
		go func() {
			defer conn.Close()
			encoder, beat := json.NewEncoder(conn), time.NewTicker(wire.Beat)
			defer beat.Stop()
			for more := false; ; {
				m := wire.Message{More: more}
				select {
				case m = <-g.tell:
					more = m.More
				case m.Answers = <-answers:
				case <-left:
					m.Left = true
				case <-beat.C:
				}
				m.Version = g.version
				if encoder.Encode(m) != nil {
					return
				}
			}
		}()
	}
}

// relayed has the relay know a Service with these backends of TCP.
func (g *rig) relayed(tune func(*plan.Relayed), backends ...netip.AddrPort) {
	g.t.Helper()
	g.relayedOf(lb.TCP, tune, backends...)
}

func (g *rig) relayedOf(protocol lb.Protocol, tune func(*plan.Relayed), backends ...netip.AddrPort) {
	g.t.Helper()
	r := &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: protocol,
		Frontends: []plan.RelayedFrontend{{Addr: frontend}}}}}
	for _, b := range backends {
		r.Ports[0].Cluster = append(r.Ports[0].Cluster, plan.RelayedBackend{Addr: b})
	}
	if tune != nil {
		tune(r)
	}
	_, _, changed := g.table.find(target{lb.TCP, frontend})
	g.tell <- wire.Message{Complete: true, Services: []wire.Service{{Key: web, Relayed: r}}}
	select {
	case <-changed:
	case <-time.After(patience):
		g.t.Fatal("the relay does not hear of the Service")
	}
}

// until waits for a condition.
func (g *rig) until(what string, is func() bool) {
	g.t.Helper()
	for deadline := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			g.t.Fatalf("it never came that %s: %+v", what, g.Counts())
		}
	}
}

// dialRelay connects as a client. A connection may be reset before it returns.
func (g *rig) dialRelay() (*net.TCPConn, error) {
	conn, err := net.DialTCP("tcp4", nil, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(g.sockets.ports()[lb.IPv4])})
	if err != nil {
		return nil, err
	}
	g.t.Cleanup(func() { conn.Close() })
	return conn, conn.SetDeadline(time.Now().Add(patience))
}

// connect connects as a client that is not reset at once.
func (g *rig) connect() *net.TCPConn {
	g.t.Helper()
	conn, err := g.dialRelay()
	if err != nil {
		g.t.Fatal(err)
	}
	return conn
}

// end connects as a client that says nothing, and returns how its connection ends.
func (g *rig) end() error {
	conn, err := g.dialRelay()
	if err == nil {
		_, err = io.ReadAll(conn)
	}
	return err
}

// ask sends a line on a connection of its own, and returns the answer.
func (g *rig) ask(line string) (string, error) {
	g.t.Helper()
	conn, err := g.dialRelay()
	if err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, line); err != nil {
		return "", err
	}
	if err := conn.CloseWrite(); err != nil {
		return "", err
	}
	answer, err := io.ReadAll(conn)
	conn.Close()
	return string(answer), err
}

// backend runs a server of one connection after the other.
func backend(t *testing.T, serve func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// echo answers, once the client has ended what it sends, with a name and what the client has sent.
func echo(t *testing.T, name string) netip.AddrPort {
	return backend(t, func(conn *net.TCPConn) {
		all, err := io.ReadAll(conn)
		if err == nil {
			_, _ = fmt.Fprintf(conn, "%s: %s", name, all)
		}
	})
}

// refusing returns an address where nobody listens.
func refusing(t *testing.T) netip.AddrPort {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

// With one of three backends silent and one refusing, each of many clients is served.
func TestNoClientNotices(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	silent := netip.MustParseAddrPort("127.0.0.1:1")
	g.dead.Store(silent, true)
	g.relayed(nil, echo(t, "a"), silent, refusing(t))
	var clients sync.WaitGroup
	for i := range 100 {
		clients.Go(func() {
			line := fmt.Sprint("hello ", i)
			if got, err := g.ask(line); err != nil || got != "a: "+line {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	clients.Wait()
	g.until("all have ended", func() bool { return g.Counts()[0].Open == 0 })
	if c := g.Counts()[0]; c.Connections != 100 || c.Failures != 0 || c.Retried == 0 || c.Tries <= 100 || c.Sent == 0 ||
		c.Received <= c.Sent || c.Service != web {
		t.Errorf("%+v", c)
	}
}

// A backend that is only late is not given up: with no other, the client waits for it.
func TestLateBackend(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	slow := echo(t, "slow")
	gate, dial := make(chan struct{}), g.deps.Dial
	g.deps.Dial = func(ctx context.Context, b netip.AddrPort, ttl int) (*Conn, error) {
		<-gate
		return dial(ctx, b, ttl)
	}
	g.relayed(nil, slow)
	answered := make(chan string)
	go func() {
		got, err := g.ask("x")
		answered <- fmt.Sprint(got, err)
	}()
	g.until("the client waits", func() bool { return g.Counts()[0].Open == 1 })
	close(gate)
	if got := <-answered; got != "slow: x<nil>" {
		t.Error(got)
	}
}

// A client whose backends all refuse is reset, and not left without an answer.
func TestContract9NoBackendAnswers(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayed(nil, refusing(t), refusing(t))
	if got, err := g.ask("x"); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("%q, %v", got, err)
	}
	g.until("it is counted", func() bool { return g.Counts()[0].Failures == 1 && g.Counts()[0].Open == 0 })
}

// The number of tries is bounded.
func TestTriesAreBounded(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.Tries = 2 })
	g.relayed(nil, refusing(t), refusing(t), refusing(t), refusing(t))
	_, _ = g.ask("x")
	g.until("it is counted", func() bool { return g.Counts()[0].Failures == 1 })
	if c := g.Counts()[0]; c.Tries != 2 {
		t.Errorf("%+v", c)
	}
}

// A reset by either end reaches the other.
func TestResets(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _ = conn.SetLinger(0) }))
	if err := g.end(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the backend reset, and the client got %v", err)
	}
	got := make(chan error, 1)
	g.relayed(nil, backend(t, func(conn *net.TCPConn) {
		_, err := io.ReadAll(conn)
		got <- err
	}))
	conn := g.connect()
	if _, err := io.WriteString(conn, "x"); err != nil {
		t.Fatal(err)
	}
	g.until("it is there", func() bool { return g.Counts()[0].Connections == 2 })
	_ = conn.SetLinger(0)
	conn.Close()
	if err := <-got; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client reset, and the backend got %v", err)
	}
}

// An end that has ended what it sends still receives, in either direction.
func TestHalfClose(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayed(nil, backend(t, func(conn *net.TCPConn) {
		_, _ = io.WriteString(conn, "first")
		_ = conn.CloseWrite()
		all, _ := io.ReadAll(conn)
		if string(all) != "second" {
			t.Errorf("the backend got %q", all)
		}
	}))
	conn := g.connect()
	if all, err := io.ReadAll(conn); string(all) != "first" || err != nil {
		t.Errorf("the client got %q, %v", all, err)
	}
	if _, err := io.WriteString(conn, "second"); err != nil {
		t.Error(err)
	}
	conn.Close()
	g.until("it has ended", func() bool { return g.Counts()[0].Open == 0 })
}

// Large amounts pass unchanged, while the reader is slower than the writer.
func TestMuch(t *testing.T) {
	t.Parallel()
	for name, most := range map[string]int{"spliced": maxPipes, "copied": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			much(t, most)
		})
	}
}

// much passes bytes on with that many pipes.
func much(t *testing.T, pipes int) {
	const size = 32 << 20
	g := newRig(t, nil)
	g.pipes.most = pipes
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
	conn := g.connect()
	go func() {
		_, _ = io.Copy(conn, io.LimitReader(pattern{}, size))
		_ = conn.CloseWrite()
	}()
	n, err := io.Copy(check{t}, conn)
	if n != size || err != nil {
		t.Errorf("%d bytes came back, %v", n, err)
	}
	g.until("it has ended", func() bool { return g.Counts()[0].Open == 0 })
	if c := g.Counts()[0]; c.Sent != size || c.Received != size {
		t.Errorf("%+v", c)
	}
	if made := g.pipes.made; made > min(2, pipes) {
		t.Errorf("%d pipes for one connection", made)
	}
}

// Connections on which nothing is on its way have no pipe, and those whose readers are slow take no more
// than there are: others go on without.
func TestPipesAreFew(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.pipes.most = 4
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
	exchange := func(conn *net.TCPConn) {
		t.Helper()
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	var idle []*net.TCPConn
	for range 50 {
		conn := g.connect()
		exchange(conn)
		idle = append(idle, conn)
	}
	for _, conn := range idle[:10] { // until nobody takes more, as no answer is read
		_ = conn.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		if _, err := io.Copy(conn, pattern{}); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
	}
	for _, conn := range idle[10:] {
		exchange(conn)
	}
	other := g.pipes.of(&service{}, netip.MustParseAddr("127.0.0.1"))
	if one := other.get(); one == nil {
		t.Error("another Service gets no pipe")
	} else {
		other.put(one, true)
	}
	for _, conn := range idle[:10] { // what was held back comes
		_ = conn.CloseWrite()
		if _, err := io.Copy(check{t}, conn); err != nil {
			t.Error(err)
		}
	}
	for _, conn := range idle {
		conn.Close()
	}
	g.until("all have ended", func() bool { return g.Counts()[0].Open == 0 })
	if g.pipes.made > 4 || len(g.pipes.free) != g.pipes.made {
		t.Errorf("%d pipes, %d of them free", g.pipes.made, len(g.pipes.free))
	}
}

// pattern is an endless source, check what takes only that.
type pattern struct{}

func (pattern) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

type check struct{ t *testing.T }

func (c check) Write(p []byte) (int, error) {
	if strings.Trim(string(p), "x") != "" {
		c.t.Error("something else came back")
	}
	return len(p), nil
}

// A connection on which nothing is sent is reset, and one on which something is stays.
func TestIdle(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.Idle = time.Second })
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
	busy, silent := g.connect(), g.connect()
	end := make(chan error)
	go func() {
		_, err := io.ReadAll(silent)
		end <- err
	}()
	answer := make([]byte, 1)
	for done := false; !done; {
		if _, err := busy.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(busy, answer); err != nil {
			t.Fatalf("the busy connection ended: %v", err)
		}
		select {
		case err := <-end:
			done = true
			if !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("the silent connection ended with %v", err)
			}
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// What is beyond the limits of the Service and of the node is reset; what is within goes on.
func TestLimits(t *testing.T) {
	t.Parallel()
	for name, tune := range map[string]func(*Options){
		"of a Service": func(o *Options) { o.ServiceLimit = 2 },
		"of the node":  func(o *Options) { o.Limit = 2 },
		"of a client":  func(o *Options) { o.ClientLimit = 2 },
	} {
		g := newRig(t, tune)
		g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
		within := []*net.TCPConn{g.connect(), g.connect()}
		g.until("two are there", func() bool { return g.Counts()[0].Open == 2 })
		if err := g.end(); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: the third got %v", name, err)
		}
		if c := g.Counts()[0]; g.Refused() != 1 || (c.Refused == 1) != (name == "of a Service") ||
			(c.ClientRefused == 1) != (name == "of a client") {
			t.Errorf("%s: %d are counted, %+v", name, g.Refused(), c)
		}
		for _, conn := range within {
			if _, err := conn.Write([]byte("x")); err != nil {
				t.Error(err)
			}
			if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
				t.Errorf("%s: within it: %v", name, err)
			}
			conn.Close()
		}
		g.until("they have ended", func() bool { return g.Counts()[0].Open == 0 })
		if got, err := g.ask(""); err != nil || got != "" {
			t.Errorf("%s: with room again: %q, %v", name, got, err)
		}
	}
}

// A relay that is about to be full says so, and says when it has room again.
func TestFull(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.Limit = 10 })
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
	var all []*net.TCPConn
	for i := range int64(8) {
		all = append(all, g.connect())
		g.until("it is there", func() bool { return g.open.Load() == i+1 })
	}
	g.says("with room for one", func(h wire.Hello) bool { return h.Connections == 8 && !h.Full })
	all = append(all, g.connect())
	g.says("without room", func(h wire.Hello) bool { return h.Full })
	all[0].Close()
	g.says("with little room", func(h wire.Hello) bool { return h.Connections == 8 && h.Full })
	all[1].Close()
	g.says("with room again", func(h wire.Hello) bool { return h.Connections == 7 && !h.Full })
	if g.Full() || g.Refused() != 0 {
		t.Errorf("full: %v, %d refused", g.Full(), g.Refused())
	}
	g.strained.Store(time.Now().UnixNano())
	g.cross()
	g.says("after it could not accept a connection", func(h wire.Hello) bool { return h.Full })
}

// The access log has a line for each connection and flow: what was tried, who had it, what was passed on, and why it was
// reset.
func TestAccessLog(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.AccessLog = true })
	dead := refusing(t)
	g.denied.Store(dead, true)
	live := echo(t, "a")
	g.relayed(func(r *plan.Relayed) { r.Scheduler = plan.RoundRobin }, dead, live)
	ended := func(n int) []map[string]any {
		var lines []map[string]any
		g.until("it is logged", func() bool { lines = g.logged.connections(t); return len(lines) == n })
		return lines
	}
	if got, err := g.ask("hello"); err != nil || got != "a: hello" {
		t.Errorf("%q, %v", got, err)
	}
	ended(1)
	g.relayed(nil, dead)
	_ = g.end()
	common := map[string]any{"service": map[string]any{"namespace": web.Namespace, "name": web.Name}, "protocol": "TCP",
		"frontend": frontend.String()}
	want := []map[string]any{
		{"tried": []any{dead.String(), live.String()}, "backend": live.String(), "sent": 5.0, "received": 8.0},
		{"tried": []any{dead.String()}, "sent": 0.0, "received": 0.0,
			"error": "no backend answered: " + unix.ECONNREFUSED.Error()},
	}
	for _, line := range want {
		maps.Copy(line, common)
	}
	if d := cmp.Diff(want, ended(2)); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// Bytes are counted while connections and flows are open, as those may be for hours, and each byte once.
func TestBytesAreCountedAsTheyGo(t *testing.T) {
	t.Parallel()
	t.Run("TCP", func(t *testing.T) {
		t.Parallel()
		g := newRig(t, nil)
		g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
		conn, want := g.connect(), uint64(0)
		for _, n := range []int{5, 1 << 20, 7} { // copied, mostly moved, and copied
			failed := make(chan error, 1)
			go func() { _, err := conn.Write(noise[:n]); failed <- err }()
			if _, err := io.CopyN(io.Discard, conn, int64(n)); err != nil {
				t.Fatal(err)
			}
			if err := <-failed; err != nil {
				t.Fatal(err)
			}
			want += uint64(n)
			g.until("the bytes of an open connection are counted", func() bool {
				c := g.Counts()[0]
				return c.Open == 1 && c.Sent == want && c.Received == want
			})
		}
		conn.Close()
		g.until("it has ended", func() bool { return g.Counts()[0].Open == 0 })
		if c := g.Counts()[0]; c.Sent != want || c.Received != want {
			t.Errorf("%+v after the end, want %d bytes", c, want)
		}
	})
	t.Run("UDP", func(t *testing.T) {
		t.Parallel()
		g := newRig(t, func(o *Options) { o.AccessLog = true })
		live := udpEcho(t, "a")
		g.relayedUDP(nil, live)
		client := g.udpClient()
		for i := range uint64(3) {
			client.ask("hello")
			if c := g.Counts()[0]; c.Open != 1 || c.Sent != 5*(i+1) || c.Received != 8*(i+1) {
				t.Errorf("%+v after %d datagrams each way of 5 and 8 bytes", c, i+1)
			}
		}
		g.stop()
		if c := g.Counts()[0]; c.Open != 0 || c.Sent != 15 || c.Received != 24 {
			t.Errorf("%+v after the end", c)
		}
		if lines := g.logged.connections(t); len(lines) != 1 || lines[0]["backend"] != live.String() ||
			lines[0]["sent"] != 15.0 {
			t.Errorf("logged %v", lines)
		}
	})
}

// One Service's connections fill no log: it gets so many lines a second, and the next line says how many it did not
// get. Others get theirs.
func TestContract11TheAccessLogIsBounded(t *testing.T) {
	now := time.Unix(1_000, 0)
	table := newTable(time.Now)
	learn := func(namespace, name string) *service {
		return table.learn(id{lb.Key{Namespace: namespace, Name: name}, lb.TCP})
	}
	one, other := learn("a", "one"), learn("a", "other")
	count := func(s *service, n int) (lines, leftOut int) {
		for range n {
			if left, ok := s.logs(now); ok {
				lines, leftOut = lines+1, leftOut+left
			}
		}
		return lines, leftOut
	}
	if lines, leftOut := count(one, 5*maxLines); lines != maxLines || leftOut != 0 {
		t.Errorf("%d lines, %d left out", lines, leftOut)
	}
	if lines, _ := count(other, 1); lines != 1 {
		t.Error("another Service gets no line")
	}
	now = now.Add(time.Second)
	if lines, leftOut := count(one, 2); lines != 2 || leftOut != 4*maxLines {
		t.Errorf("a second later %d lines, and %d are said to be left out, not %d", lines, leftOut, 4*maxLines)
	}

	all := []*service{one, other}
	for i := range 8 {
		all = append(all, learn("a", fmt.Sprint(i)))
	}
	ofAll := func(n int) (lines, leftOut int) {
		now = now.Add(time.Second)
		for _, s := range all {
			l, o := count(s, n)
			lines, leftOut = lines+l, leftOut+o
		}
		return lines, leftOut
	}
	if lines, _ := ofAll(maxLines); lines != 10*maxLines {
		t.Errorf("%d lines of a namespace that is alone", lines)
	}
	neighbor := learn("b", "one")
	if lines, _ := ofAll(2 * maxLines); lines != maxNamespaceLines {
		t.Errorf("%d lines of ten Services of a namespace that is not alone", lines)
	}
	if lines, _ := count(neighbor, 1); lines != 1 {
		t.Error("another namespace gets no line")
	}
	if lines, leftOut := ofAll(1); lines != 10 || leftOut != 10*2*maxLines-maxNamespaceLines {
		t.Errorf("a second later %d lines, and %d are said to be left out", lines, leftOut)
	}
}

// All Services have one queue of connections that wait to be accepted. Before one of them fills it, the relay asks that
// connections go straight to endpoints, until that is 5 s ago.
func TestContract11AQueueThatGrowsIsLeftToTheRules(t *testing.T) {
	ns := nstest.New(t)
	ns.Run(t, "sysctl", "-qw", "net.core.somaxconn=8")
	now := time.Unix(1_000, 0)
	deps := NewDeps(slog.New(slog.DiscardHandler))
	deps.Now = func() time.Time { return now }
	var r *Relay
	ns.Do(t, func() (err error) {
		r, err = New(Options{Limit: 100, TCPOnly: true}, deps)
		return err
	})
	for _, l := range r.sockets.listeners() {
		t.Cleanup(l.socket.Close)
		to := netip.AddrPortFrom(netip.IPv6Loopback(), l.port)
		if l.family == lb.IPv4 {
			to = netip.MustParseAddrPort(fmt.Sprintf("127.0.0.1:%d", l.port))
		}
		for waiting := range 3 {
			if r.isFull() {
				t.Errorf("%s: full with %d of 8 that wait", l.family, waiting)
			}
			ns.Do(t, func() error {
				conn, err := net.Dial("tcp", to.String())
				if err == nil {
					t.Cleanup(func() { conn.Close() })
				}
				return err
			})
		}
		for deadline := time.Now().Add(time.Minute); !r.isFull(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: never full with 3 of 8 that wait", l.family)
			}
		}
		for range 3 {
			conn, _, err := l.accept()
			if err != nil {
				t.Fatal(err)
			}
			conn.Close()
		}
		if !r.isFull() {
			t.Errorf("%s: not full any more at once", l.family)
		}
		if now = now.Add(strainedFor); r.isFull() {
			t.Errorf("%s: full %s later", l.family, strainedFor)
		}
	}
}

// says waits until the relay says something to the proxy.
func (g *rig) says(what string, is func(wire.Hello) bool) {
	g.t.Helper()
	late := time.After(time.Minute)
	for {
		select {
		case h := <-g.said:
			if is(h) {
				return
			}
		case <-late:
			g.t.Fatalf("%s: it never says so", what)
		}
	}
}

// A client gets the same backend as long as its time lasts and that answers, and else another.
func TestAffinity(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.TryAfter, o.ConnectTimeout = time.Hour, time.Hour })
	backends, names := []netip.AddrPort{}, map[string]netip.AddrPort{}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		b := echo(t, name)
		backends, names[name+": "] = append(backends, b), b
	}
	sticky := func(r *plan.Relayed) { r.Affinity = time.Hour }
	g.relayed(sticky, backends[:1]...)
	if first, err := g.ask(""); err != nil || first != "a: " {
		t.Fatal(first, err)
	}
	g.relayed(sticky, backends...)
	for range 20 {
		if got, err := g.ask(""); err != nil || got != "a: " {
			t.Fatalf("it got %q, %v", got, err)
		}
	}
	g.denied.Store(backends[0], true)
	second, err := g.ask("")
	if err != nil || second == "a: " || names[second] == (netip.AddrPort{}) {
		t.Fatal(second, err)
	}
	g.denied.Clear()
	for range 20 {
		if got, err := g.ask(""); err != nil || got != second {
			t.Fatalf("it got %q after %q, %v", got, second, err)
		}
	}
}

// Backends hear the client's address by either version of the PROXY protocol.
func TestProxyProtocol(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayed(func(r *plan.Relayed) { r.ProxyProtocol = 1 }, echo(t, "a"))
	conn := g.connect()
	from := conn.LocalAddr().(*net.TCPAddr)
	_, _ = io.WriteString(conn, "x")
	_ = conn.CloseWrite()
	want := fmt.Sprintf("a: PROXY TCP4 127.0.0.1 198.51.100.1 %d 80\r\nx", from.Port)
	if got, err := io.ReadAll(conn); string(got) != want || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	g.relayed(func(r *plan.Relayed) { r.ProxyProtocol = 2 }, echo(t, "a"))
	got, err := g.ask("x")
	if want := "a: \r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c\x7f\x00\x00\x01\xc6\x33\x64\x01"; !strings.HasPrefix(got, want) ||
		!strings.HasSuffix(got, "\x00\x50x") || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// What comes before the proxy's word on its frontend waits for it. What is for the relay itself, or for
// nobody, is reset.
func TestUnknownFrontends(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	early := g.connect()
	_, _ = io.WriteString(early, "x")
	_ = early.CloseWrite()
	g.relayed(nil, echo(t, "a"))
	if got, err := io.ReadAll(early); string(got) != "a: x" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	other := netip.MustParseAddrPort("198.51.100.2:80")
	g.original.Store(&other)
	if err := g.end(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("what nobody relays got %v", err)
	}
	own := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), g.sockets.ports()[lb.IPv4])
	g.original.Store(&own)
	if err := g.end(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("what is for the relay itself got %v", err)
	}
}

// A relay that ends accepts connections until the proxy has said that none come any more, and ends those
// that are open in their own time, or when the time for that is over.
func TestDrain(t *testing.T) {
	t.Parallel()
	for _, drain := range []time.Duration{time.Minute, time.Millisecond} {
		g := newRig(t, func(o *Options) { o.Drain = drain })
		g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
		conn := g.connect()
		g.until("it is there", func() bool { return g.Counts()[0].Open == 1 })
		stopped := make(chan struct{})
		go func() { g.stop(); close(stopped) }()
		for h := range g.said {
			if h.Leaving {
				break
			}
		}
		<-g.left
		if drain == time.Millisecond {
			if _, err := io.ReadAll(conn); !errors.Is(err, unix.ECONNRESET) {
				t.Errorf("after the drain time: %v", err)
			}
			<-stopped
			continue
		}
		if _, err := conn.Write([]byte("x")); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
			t.Errorf("while draining: %v", err)
		}
		conn.Close()
		<-stopped
	}
}

// A Service that goes is forgotten when its last connection has ended; one that comes again keeps its
// counts.
func TestServicesComeAndGo(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }))
	conn := g.connect()
	g.until("it is there", func() bool { return len(g.Counts()) == 1 && g.Counts()[0].Open == 1 })
	g.tell <- wire.Message{Services: []wire.Service{{Key: web}}}
	g.until("its frontend is gone", func() bool { _, ok, _ := g.table.find(target{lb.TCP, frontend}); return !ok })
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Errorf("an open connection of a Service that went: %v", err)
	}
	conn.Close()
	g.until("it is forgotten", func() bool { return len(g.Counts()) == 0 })
}

func FuzzDecodeMessage(f *testing.F) {
	f.Add([]byte(`{"complete":true,"services":[{"key":{"namespace":"a","name":"b"},"relayed":{"ports":[{"frontends":` +
		`[{"addr":"192.0.2.1:80"}],"cluster":[{"addr":"10.0.0.1:80","weight":3}]}]}}]}`))
	f.Add([]byte(`{"complete":true,"services":[{"key":{"namespace":"a","name":"b"},"relayed":{"ports":[{"protocol":"UDP",` +
		`"frontends":[{"addr":"192.0.2.1:53"}],"ending":["10.0.0.1:53"]}]}}]}`))
	f.Add([]byte(`{"left":true}`))
	f.Add([]byte(`{"answers":[{"client":"192.0.2.9:5","at":"10.0.0.1:7484","from":"192.0.2.9:5","to":"192.0.2.1:53"}]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := decodeMessage(line)
		if err != nil {
			return
		}
		table := newTable(time.Now)
		table.take(m)
		for at := range table.at {
			if !at.addr.IsValid() {
				t.Errorf("frontend %v", at)
			}
			w, ok, _ := table.find(at)
			if !ok {
				t.Errorf("%s is not found", at.addr)
			}
			_, _ = w.service.choose(table.chooser(w, at.addr, at.addr, func() uint64 { return 1 }), nil)
		}
	})
}
