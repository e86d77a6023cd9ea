package members

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/speaker/liveness"
)

// A speaker that was frozen finds all connections at once by which others looked whether it answers. They are counted,
// and one line tells of them; who speaks another protocol, or is no node, is warned of as before.
func TestEmptyConnectionsOfNodesAreNoWarnings(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	for _, keys := range [][][]byte{nil, {bytes.Repeat([]byte{1}, 32)}} {
		var log lines
		m := New(Options{Self: "a", Bind: fixed(r.peers["a"][0]), Port: testPort(), Born: time.Now(), Keys: keys,
			Log: slog.New(slog.NewTextHandler(&log, nil)), Changed: func([]netip.Addr) {},
			Liveness: liveness.New(liveness.Options{Self: "a", Log: slog.New(slog.DiscardHandler), Changed: func() {}})})
		m.SetPeers(map[string][]netip.Addr{"b": r.peers["b"]})
		ml, err := m.open(r.peers["a"][0])
		if err != nil {
			t.Fatal(err)
		}
		say := func(from, text string, linger int) {
			dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(r.peers[from][0], 0))}
			conn, err := dialer.DialContext(t.Context(), "tcp", netip.AddrPortFrom(r.peers["a"][0], uint16(testPort())).String())
			if err != nil {
				t.Fatal(err)
			}
			if err := conn.(*net.TCPConn).SetLinger(linger); err != nil {
				t.Fatal(err)
			}
			_, err = io.WriteString(conn, text)
			if err := conn.Close(); err != nil {
				t.Error(err)
			}
			if err != nil {
				t.Error(err)
			}
		}
		const graceful, reset = -1, 0
		for range 20 {
			say("b", "", graceful)
			say("b", "", reset)
		}
		// A reset connection may be gone before it is accepted.
		r.eventually("the empty connections are counted", func() bool { return m.Empty() >= 20 })
		say("b", "GET / HTTP/1.1\r\n\r\n", graceful)
		say("c", "", graceful)
		const warning = `level=WARN msg="gossip: discarding stream`
		r.eventually("HTTP and the stranger are warned of", func() bool { return strings.Count(log.text(), warning) == 2 })
		r.eventually("a line tells of the empty ones", func() bool {
			return strings.Count(log.text(), "closed connections without a message") == 1
		})
		if text := log.text(); strings.Count(text, "level=WARN") != 2 {
			t.Errorf("not two warnings:\n%s", text)
		}
		if err := ml.Shutdown(); err != nil {
			t.Error(err)
		}
		r.eventually("no closed connection is remembered", func() bool {
			m.empties.mu.Lock()
			defer m.empties.mu.Unlock()
			return len(m.empties.open) == 0
		})
	}
}

// One line a minute tells how many there were since the last, of a burst all.
func TestEmptyConnectionsAreToldOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lines
		b := &logBridge{log: slog.New(slog.NewTextHandler(&log, nil)), empties: &empties{}}
		find := func(from string) {
			b.empties.add(from)
			defer b.empties.remove(from)
			_, err := io.WriteString(b, `[ERR] memberlist: discarding stream with unacceptable label "": from=`+from)
			if err != nil {
				t.Error(err)
			}
		}
		for range 20 {
			find("10.0.0.1:1")
			find("[fd00::1]:1")
		}
		time.Sleep(emptyDelay + emptyDelay/2)
		for range 50 {
			find("10.0.0.1:1")
			find("[fd00::1]:1")
			time.Sleep(time.Second)
		}
		time.Sleep(emptyEvery)
		find("10.0.0.1:2")
		time.Sleep(emptyEvery)
		for _, want := range []string{"connections=40\n", "connections=100\n", "connections=1\n"} {
			if strings.Count(log.text(), want) != 1 {
				t.Errorf("no line with %q", want)
			}
		}
		if n := strings.Count(log.text(), "\n"); n != 3 {
			t.Errorf("%d lines, want 3", n)
		}
		// The same port later, of a connection that was not empty.
		if _, err := io.WriteString(b, "[ERR] memberlist: failed to receive: EOF from=10.0.0.1:2"); err != nil {
			t.Error(err)
		}
		if strings.Count(log.text(), "level=WARN") != 1 {
			t.Error("a connection with a message is no warning")
		}
	})
}
