package relay

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

func TestMain(m *testing.M) {
	stepWithin, knownWithin, toldWithin, clientsWithin = time.Minute, time.Minute, 2*time.Minute, time.Minute
	os.Exit(m.Run())
}

// relayPort is none that a kernel gives to who asks for any.
const relayPort = 7484

// alone runs a test as a process in a network namespace of its own, where nobody takes a port between the end of one
// socket and the beginning of the next, and reports whether this is that process.
func alone(t *testing.T) bool {
	t.Helper()
	const inside = "LANDFALL_TEST_ALONE"
	if os.Getenv(inside) != "" {
		return true
	}
	out := nstest.New(t).Run(t, "env", inside+"=1", os.Args[0], "-test.count=1", "-test.v", "-test.run", "^"+t.Name()+"$")
	if !strings.Contains(out, "--- PASS: "+t.Name()) {
		t.Error(out)
	}
	return false
}

// handsOver has a rig hand over at a path.
func handsOver(path string, port uint16) func(*Options) {
	return func(o *Options) { o.HandOver, o.Port, o.TCPOnly = path, port, false }
}

// successor starts a relay that takes over from another one with the same backends, and waits until it has.
func (g *rig) successor(t *testing.T, backends ...netip.AddrPort) *rig {
	t.Helper()
	g.until("it serves successors", func() bool { _, err := os.Stat(g.options.HandOver); return err == nil })
	next := newRig(t, handsOver(g.options.HandOver, g.sockets.ports()[lb.IPv4]))
	if next.predecessor == nil {
		t.Fatal("the successor has found no predecessor")
	}
	next.hears(backends...)
	next.until("the successor has taken over", func() bool { return next.Settled() == nil })
	return next
}

// hears has the relay know a Service. On a busy machine it may connect to the proxy again, so it is told until it does.
func (g *rig) hears(backends ...netip.AddrPort) {
	g.t.Helper()
	g.hearsOf(nil, backends...)
}

func (g *rig) hearsOf(tune func(*plan.Relayed), backends ...netip.AddrPort) {
	g.t.Helper()
	r := &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: lb.TCP, Frontends: []plan.RelayedFrontend{{Addr: frontend}}}}}
	for _, b := range backends {
		r.Ports[0].Cluster = append(r.Ports[0].Cluster, plan.RelayedBackend{Addr: b})
	}
	if tune != nil {
		tune(r)
	}
	g.until("the relay hears of the Service", func() bool {
		select {
		case g.tell <- wire.Message{Complete: true, Services: []wire.Service{{Key: web, Relayed: r}}}:
		case <-time.After(10 * time.Millisecond):
		}
		_, ok, _ := g.table.find(target{lb.TCP, frontend})
		return ok && g.Ready() == nil
	})
}

// noise is what streams are cut from.
var noise = func() []byte {
	bytes := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(bytes)
	return bytes
}()

// streamOf returns the bytes of a stream.
func streamOf(seed, n int) []byte { return noise[seed : seed+n] }

// stream writes one in uneven pieces, and calls half once half of it is written.
func stream(w io.Writer, seed, n int, half func()) error {
	sizes := rand.New(rand.NewPCG(uint64(seed), 1))
	for all := streamOf(seed, n); len(all) > 0; {
		before := len(all)
		piece := all[:min(before, 1+sizes.IntN(64<<10))]
		if _, err := w.Write(piece); err != nil {
			return fmt.Errorf("%d bytes before the end: %w", before, err)
		}
		if all = all[len(piece):]; before > n/2 && len(all) <= n/2 {
			half()
		}
	}
	return nil
}

func sum(all []byte) string {
	h := sha256.Sum256(all)
	return hex.EncodeToString(h[:])
}

// longServer sends a stream, of which it holds back the second half until it may go on, and once the client has ended what it sends, the sum of that.
func longServer(t *testing.T, n int, goOn <-chan struct{}) netip.AddrPort {
	return backend(t, func(conn *net.TCPConn) {
		var hearing sync.WaitGroup
		var heard []byte
		hearing.Go(func() { heard, _ = io.ReadAll(conn) })
		if stream(conn, 7, n, func() { <-goOn }) != nil {
			return
		}
		hearing.Wait()
		_, _ = io.WriteString(conn, sum(heard))
	})
}

// longClient sends a stream, of which it holds back the second half until it may go on, and checks what comes. Of its
// kinds one ends what it sends before, and one reads nothing before.
func longClient(conn *net.TCPConn, kind, seed, n int, halfway func(), goOn <-chan struct{}) error {
	const endsBefore, readsAfter = 0, 1
	var reading sync.WaitGroup
	var got []byte
	var readErr error
	reading.Go(func() {
		if kind == readsAfter {
			<-goOn
		}
		got, readErr = io.ReadAll(conn)
	})
	sendN := n
	if kind == endsBefore {
		sendN = n / 2
	}
	var err error
	if kind == endsBefore {
		if err = stream(conn, seed, sendN, func() {}); err == nil {
			err = conn.CloseWrite()
		}
		halfway()
	} else {
		err = stream(conn, seed, sendN, func() { halfway(); <-goOn })
		err = errors.Join(err, conn.CloseWrite())
	}
	reading.Wait()
	if err = errors.Join(err, readErr); err != nil {
		return fmt.Errorf("kind %d, %d bytes read: %w", kind, len(got), err)
	}
	if want := string(streamOf(7, n)) + sum(streamOf(seed, sendN)); string(got) != want {
		return fmt.Errorf("kind %d: %d bytes came, of %d, and they are not those that were sent", kind, len(got), len(want))
	}
	return nil
}

// TestHandOverBreaksNoConnection hands 200 long connections from relay to relay, three times, with bytes under way both
// ways: in sockets whose reader does not read, in pipes and in the middle of a stream. Of a third of them the client has
// ended what it sends. Every byte comes, once, and in order.
func TestHandOverBreaksNoConnection(t *testing.T) {
	const connections, size = 200, 256 << 10
	goOn, ends := make(chan struct{}), make(chan error, connections)
	server := longServer(t, size, goOn)
	first := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	first.hears(server)
	var halfway sync.WaitGroup
	for i := range connections {
		conn := first.connect()
		halfway.Add(1)
		go func() { ends <- longClient(conn, i%3, i, size, sync.OnceFunc(halfway.Done), goOn) }()
	}
	halfway.Wait()
	second := first.successor(t, server)
	third := second.successor(t, server)
	if n := third.open.Load(); n != connections {
		t.Errorf("the third relay has %d connections, want %d", n, connections)
	}
	close(goOn) // what is held back moves while the fourth relay takes over, or before
	fourth := third.successor(t, server)
	for range connections {
		if err := <-ends; err != nil {
			t.Error(err)
		}
	}
	for _, old := range []*rig{first, second, third} {
		old.until("it has no connection", func() bool { return old.open.Load() == 0 })
	}
	if answer, err := fourth.ask("?"); err != nil || len(answer) != size+64 {
		t.Errorf("a new connection: %d bytes, %v", len(answer), err)
	}
	var sent uint64
	for _, g := range []*rig{first, second, third, fourth} {
		g.stop()
		for _, c := range g.Counts() {
			sent += c.Sent
		}
	}
	// A third of them, 67, have sent half.
	if want := uint64(1 + size*connections - 67*size/2); sent != want {
		t.Errorf("the relays have counted %d bytes, want %d", sent, want)
	}
	if t.Failed() {
		for i, g := range []*rig{first, second, third, fourth} {
			t.Logf("relay %d: %s", i, g.logged.text.String())
		}
	}
}

// A connection whose reader does not read has bytes in a pipe, which the successor gets too.
func TestHandOverOfBytesInPipes(t *testing.T) {
	const size = 1 << 20
	server := backend(t, func(conn *net.TCPConn) {
		for range 8 {
			_, _ = conn.Write(noise)
		}
	})
	first := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	first.hears(server)
	client := first.connect()
	if err := client.SetReadBuffer(16 << 10); err != nil {
		t.Fatal(err)
	}
	first.until("a pipe has bytes that nobody takes", func() bool { // this successor dies, and the next one lives
		p, _ := playSuccessor(t, first.options.HandOver, successionVersion)
		defer p.close()
		l := begins(p)
		return len(l.Connections) == 1 && l.Connections[0].Back > 0
	})
	first.successor(t, server)
	if first.until("it has no connection", func() bool { return first.open.Load() == 0 }); t.Failed() {
		return
	}
	got, err := io.ReadAll(client)
	client.Close() // else the successor waits for it to end
	if err != nil || len(got) != 8*size {
		t.Fatalf("%d bytes came, %v", len(got), err)
	}
	for i := range 8 {
		if string(got[i*size:(i+1)*size]) != string(noise) {
			t.Fatal("other bytes came than were sent")
		}
	}
}

// With session affinity, a client that has an open connection keeps its backend at the relay's successor.
func TestHandOverKeepsClientsAtTheirBackends(t *testing.T) {
	var backends []netip.AddrPort
	for _, name := range []byte("abcde") {
		backends = append(backends, greeter(t, name))
	}
	sticky := func(r *plan.Relayed) { r.Affinity = time.Hour }
	patient := func(path string, port uint16) func(*Options) { // no backend is late
		return func(o *Options) {
			handsOver(path, port)(o)
			o.TryAfter, o.ConnectTimeout = time.Hour, time.Hour
		}
	}
	first := newRig(t, patient(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	first.hearsOf(sticky, backends...)
	greeting := func(conn *net.TCPConn) string {
		name := make([]byte, 1)
		if _, err := io.ReadFull(conn, name); err != nil {
			t.Fatal(err)
		}
		return string(name)
	}
	open := first.connect()
	defer open.Close() // before the relays are stopped, which wait for it
	want := greeting(open)
	first.until("it serves successors", func() bool { _, err := os.Stat(first.options.HandOver); return err == nil })
	next := newRig(t, patient(first.options.HandOver, first.sockets.ports()[lb.IPv4]))
	next.hearsOf(sticky, backends...)
	next.until("the successor has taken over", func() bool { return next.Settled() == nil })
	for range 20 {
		conn := next.connect()
		if got := greeting(conn); got != want {
			t.Fatalf("the client of %s got %s", want, got)
		}
		conn.Close()
	}
}

// Of the connections that are handed over the newest says which backend its client has, and none for longer than the
// Service's time.
func TestAdoptedConnectionsAreRemembered(t *testing.T) {
	now := time.Unix(10_000, 0)
	table := newTable(func() time.Time { return now })
	s := table.learn(id{web, lb.TCP})
	w := way{service: s, affinity: time.Hour}
	client := netip.MustParseAddrPort("192.0.2.1:1")
	a, b := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:1")
	for _, step := range []struct {
		backend   netip.AddrPort
		connected time.Duration // before now
		want      netip.AddrPort
	}{
		{a, 2 * time.Hour, netip.AddrPort{}},
		{b, time.Minute, b},
		{a, 2 * time.Minute, b},
		{a, 0, a},
	} {
		table.rememberSince(w, client.Addr(), step.backend, now.Add(-step.connected))
		if got := table.chooser(w, client, frontend, nil).first; got != step.want {
			t.Errorf("%+v: %v", step, got)
		}
	}
}

// playSuccessor plays one until it has asked for what there is.
func playSuccessor(t *testing.T, path string, version int) (*courier, letter) {
	t.Helper()
	var p *courier
	for deadline := time.Now().Add(time.Minute); p == nil; time.Sleep(time.Millisecond) {
		var err error
		if p, err = meet(path); err != nil || time.Now().After(deadline) {
			t.Fatal("no relay serves successors", err)
		}
	}
	t.Cleanup(p.close)
	if err := p.send(letter{Version: version}); err != nil {
		t.Fatal(err)
	}
	answer, _, err := p.receive(time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	return p, answer
}

// begins takes the sockets, and returns what comes then, which it does not take.
func begins(p *courier) letter {
	_ = p.send(letter{Begin: true})
	_, fds, _ := p.receive(time.Minute)
	closeAll(fds)
	_ = p.send(letter{Took: true})
	l, fds, _ := p.receive(time.Minute)
	closeAll(fds)
	return l
}

// A successor that dies, wherever it is, or hangs, costs no connection that it has not taken: all go on with the relay
// that was there, and new ones do.
func TestHandOverToASuccessorThatDies(t *testing.T) {
	server := echo(t, "a")
	g := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	g.hears(server)
	const connections = 40 // more than one letter has
	var clients []*net.TCPConn
	for range connections {
		client := g.connect()
		clients = append(clients, client)
		if _, err := io.WriteString(client, "before "); err != nil {
			t.Fatal(err)
		}
	}
	g.until("all have a backend", func() bool { return len(g.passing.list()) == connections })
	steps := []struct {
		name string
		dies func(p *courier)
	}{
		{"before it begins", func(*courier) {}},
		{"before it takes the sockets", func(p *courier) {
			_ = p.send(letter{Begin: true})
			_, fds, _ := p.receive(time.Minute)
			closeAll(fds)
		}},
		{"before it takes connections", func(p *courier) {
			if l := begins(p); len(l.Connections) != maxHanded {
				t.Errorf("%d connections come, want %d", len(l.Connections), maxHanded)
			}
		}},
	}
	for _, step := range steps {
		p, answer := playSuccessor(t, g.options.HandOver, successionVersion)
		if answer.Version != successionVersion || answer.Refused != "" {
			t.Fatalf("%s: %+v", step.name, answer)
		}
		step.dies(p)
		p.close()
		if answer, err := g.ask("new"); answer != "a: new" || err != nil {
			t.Errorf("a new connection after a successor died %s: %q, %v", step.name, answer, err)
		}
	}
	for _, client := range clients {
		if _, err := io.WriteString(client, "after"); err != nil {
			t.Fatal(err)
		}
		if err := client.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if answer, err := io.ReadAll(client); string(answer) != "a: before after" || err != nil {
			t.Fatalf("%q, %v", answer, err)
		}
	}
}

// A relay without a port of UDP leaves that to its successor once it has handed over.
func TestHandOverWithoutUDP(t *testing.T) {
	if !alone(t) {
		return
	}
	other := udpOfAnother(t)
	path := filepath.Join(t.TempDir(), "own", "handover.sock")
	server := echo(t, "a")
	first := newRig(t, handsOver(path, relayPort))
	first.hears(server)
	if first.receivers.of(lb.IPv4) != nil {
		t.Fatal("the relay has a port that another program has")
	}
	second := first.successor(t, server)
	other.Close()
	if isOurs, err := first.reopenUDP(first.sockets.listeners()[0], first.sockets.handed); isOurs {
		t.Errorf("the predecessor opens the port, which is its successor's (%v)", err)
	}
	second.until("the successor has the port", func() bool { return second.receivers.of(lb.IPv4) != nil })
	if first.receivers.of(lb.IPv4) != nil {
		t.Error("the predecessor has the port too")
	}
}

// After a hand-over that failed, the relay that accepts connections goes on serving successors, and the other one, which
// is there too, does not disturb it. Once that has ended, the other one has its port and serves them.
func TestHandOverThatFailedLeavesOneSocket(t *testing.T) {
	if !alone(t) {
		return
	}
	path := filepath.Join(t.TempDir(), "own", "handover.sock")
	server := echo(t, "a")
	first := newRig(t, handsOver(path, relayPort))
	first.hears(server)
	socket := func() (info os.FileInfo) {
		first.until("a relay serves successors", func() bool {
			var err error
			info, err = os.Stat(path)
			return err == nil
		})
		return info
	}
	socket()
	second := newRig(t, handsOver(path, relayPort)) // it waits for the proxy
	if second.predecessor == nil {
		t.Fatal("the second relay has found no predecessor")
	}
	second.predecessor.close()
	second.alone = time.Time{} // it does not ask again
	second.hears(server)
	second.until("it has given up", func() bool { return second.Settled() == nil })
	before := socket()
	time.Sleep(2 * reopenEvery) // in which it would disturb
	if now := socket(); !os.SameFile(before, now) || !now.ModTime().Equal(before.ModTime()) {
		t.Error("there is another socket for successors")
	}
	if answer, err := first.ask("x"); answer != "a: x" || err != nil {
		t.Errorf("the first relay: %q, %v", answer, err)
	}
	first.stop()
	second.until("the second relay accepts connections", func() bool { return len(second.sockets.ports()) > 0 })
	third := second.successor(t, server)
	if answer, err := third.ask("x"); answer != "a: x" || err != nil {
		t.Errorf("the third relay: %q, %v", answer, err)
	}
}

// A relay that starts while another one takes over finds no predecessor, as the one before serves one successor, and that
// one none before it has all. It is told that one may be there in a moment, and then takes over in its turn.
func TestHandOverToOneThatStartsTooSoon(t *testing.T) {
	if !alone(t) {
		return
	}
	server := echo(t, "a")
	first := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), relayPort))
	first.hears(server)
	client := first.connect()
	first.until("the connection has a backend", func() bool { return len(first.passing.list()) == 1 })
	first.until("it serves successors", func() bool { _, err := os.Stat(first.options.HandOver); return err == nil })
	second := newRig(t, handsOver(first.options.HandOver, relayPort)) // it waits for the proxy
	if second.predecessor == nil {
		t.Fatal("the second relay has found no predecessor")
	}
	if _, err := New(second.options, second.deps); !errors.Is(err, ErrNoPredecessor) || !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a relay that starts meanwhile: %v", err)
	}
	second.hears(server)
	third := newRig(t, handsOver(first.options.HandOver, relayPort))
	if third.predecessor == nil {
		t.Fatal("the third relay has found no predecessor")
	}
	third.hears(server)
	third.until("it has taken over", func() bool { return third.Settled() == nil })
	first.stop()
	second.stop()
	if _, err := io.WriteString(client, "x"); err != nil {
		t.Fatal(err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(client); string(answer) != "a: x" || err != nil {
		t.Errorf("%q, %v", answer, err)
	}
	// Another program that has the port hands nothing over, and nor does a relay without the flag.
	options := third.options
	options.HandOver = ""
	if _, err := New(options, third.deps); errors.Is(err, ErrNoPredecessor) || !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a relay that takes nothing over: %v", err)
	}
}

// A successor of another version is refused, and gets nothing.
func TestHandOverToAnotherVersion(t *testing.T) {
	g := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	_, answer := playSuccessor(t, g.options.HandOver, successionVersion+1)
	if answer.Refused == "" {
		t.Errorf("the relay answers %+v", answer)
	}
}

// A relay that hangs hands nothing over, and its successor waits for the port, as without a hand-over. What it takes too
// late to tell goes on with the relay that was there.
func TestHandOverAnswersThatComeTooLate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "own", "handover.sock")
	lock, err := lockAt(path)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	l, err := listenAt(path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	successor, err := meet(path)
	if err != nil {
		t.Fatal(err)
	}
	defer successor.close()
	conn, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	old, err := newCourier(conn)
	if err != nil {
		t.Fatal(err)
	}
	defer old.close()
	if err := successor.send(letter{Took: true}); err != nil {
		t.Fatal(err)
	}
	old.closeRead()
	if err := successor.send(letter{Took: true}); !errors.Is(err, unix.EPIPE) {
		t.Errorf("an answer after the other has stopped waiting: %v, want EPIPE", err)
	}
	if answer, _, err := old.receive(time.Minute); !answer.Took || err != nil {
		t.Errorf("an answer before that: %+v, %v", answer, err)
	}
	if _, _, err := old.receive(time.Minute); err == nil {
		t.Error("more came")
	}
}

// Letters that cannot be are refused, and leave no descriptor open.
func FuzzDecodeLetter(f *testing.F) {
	f.Add([]byte(`{"version":1}`), 0)
	f.Add([]byte(`{"sockets":[{"family":"IPv4"},{"family":"IPv4","udp":true}]}`), 2)
	f.Add([]byte(`{"connections":[{"client":"192.0.2.1:1","frontend":"192.0.2.2:2","backend":"192.0.2.3:3","out":5}]}`), 3)
	f.Add([]byte(`{"clients":[{"service":{"namespace":"a","name":"b"},"protocol":"TCP","choices":"c","client":"192.0.2.1",`+
		`"backend":"192.0.2.3:3","last":"2026-01-01T00:00:00Z"}]}`), 0)
	f.Fuzz(func(t *testing.T, text []byte, files int) {
		l, err := decodeLetter(text, files)
		if err == nil && (len(l.Connections) > maxHanded || files > maxFiles || len(l.Clients) > maxHandedClients) {
			t.Errorf("%d connections, %d clients, %d files", len(l.Connections), len(l.Clients), files)
		}
	})
}
