package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	feedwire "github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// statusServer are the further rows of the status sockets.
func statusServer() []httpRow {
	return []httpRow{
		{"POST", request("POST /v1/status", "Content-Length: 0"), 405, ""},
		{"a body of 1 MiB", request("POST /v1/status", "Content-Length: 1048576") + strings.Repeat("x", 1<<20), 405, ""},
		{"an unknown path", request("GET /v2/status"), 404, ""},
	}
}

// slowStatus are requests that never end, to the status sockets, and what is said before the connection ends.
func slowStatus() []beginning {
	return []beginning{
		{name: "nothing"},
		{"half a line", "GET /v1/sta", "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n" +
			"Connection: close\r\n\r\n400 Bad Request"},
		{name: "headers without an end", send: "GET /v1/status HTTP/1.1\r\nHost: x\r\nA: b"},
	}
}

// feedRows are lines that no speaker would send to the feed, and what the proxy logs of them.
func feedRows() []beginning {
	return []beginning{
		{"no JSON", "hello\n", "read an update: invalid character"},
		{"a list", "[]\n", "cannot unmarshal array"},
		{"a text", "\"x\"\n", "cannot unmarshal string"},
		{"HTTP", "GET / HTTP/1.1\r\n\r\n", "invalid character 'G'"},
		{"a line of 64 MiB", strings.Repeat("x", 64<<20), "token too long"},
		{"lists in lists", strings.Repeat("[", 20000) + "\n", "exceeded max depth"},
		{"a beat, and then half a line", `{"beat":100}` + "\n" + `{"be`, "unexpected end of JSON input"},
		{"a beat below 0", `{"beat":-1}` + "\n", "a beat of -1 ms"},
		{"a beat of a year", `{"beat":31536000000}` + "\n", "a beat of 31536000000 ms"},
		{"a node without a name", `{"dead":[""]}` + "\n", "is not a name of a node"},
		{"a node of 300 letters", `{"dead":["` + strings.Repeat("n", 300) + `"]}` + "\n", "is not a name of a node"},
		{"10,001 dead nodes", `{"dead":["n"` + strings.Repeat(`,"n"`, 10000) + `]}` + "\n", "10001 dead nodes"},
		{"an empty address", `{"gone":[""]}` + "\n", "an empty address"},
		{"an address that is none", `{"gone":["x"]}` + "\n", "unable to parse IP"},
		{"an owner of the other family", `{"former":{"172.26.236.180":["fd00::1"]}}` + "\n", "cannot be an address for"},
		{"an owner with a zone", `{"former":{"fe80::1":["fe80::2%eth0"]}}` + "\n", "cannot be an address for"},
		{"a mapped address", `{"ring":{"::ffff:1.2.3.4":[]}}` + "\n", "cannot be an address for"},
	}
}

// slowFeed are what speakers say that then are silent, or make no sense only together with what they said before, and
// what the proxy logs when it disconnects them.
func slowFeed() []beginning {
	return []beginning{
		{"a beat, and then silence", `{"beat":100}` + "\n", "no message for"},
		{"changes by one who has not said all", `{"changes":true}` + "\n", "has not said all"},
	}
}

// relayFeedRows are lines that no relay would send to the proxy, and what the proxy logs of them.
func relayFeedRows() []beginning {
	return []beginning{
		{"no JSON", "hello\n", "invalid character 'h'"},
		{"a list", "[]\n", "cannot unmarshal array"},
		{"HTTP", "GET / HTTP/1.1\r\n\r\n", "invalid character 'G'"},
		{"a line of 16 KiB", strings.Repeat("x", feedwire.MaxHello), "token too long"},
		{"lists in lists", `{"flows":` + strings.Repeat("[", 15000) + "\n", "exceeded max depth"},
		{"no port", `{"version":1,"ports":{"IPv4":0}}` + "\n", "or 0 is no port"},
		{"an unknown family", `{"version":1,"ports":{"IPX":7484}}` + "\n", `\"IPX\" is no family`},
		{"a port of 32 bits", `{"version":1,"ports":{"IPv4":4294967295}}` + "\n", "cannot unmarshal number 4294967295"},
		{"connections below 0", `{"connections":-1}` + "\n", "-1 connections"},
		{"a drain time below 0", `{"drain":-1}` + "\n", "a drain time of -1ns"},
		{"65 questions", `{"flows":[{}` + strings.Repeat(",{}", feedwire.MaxFlows) + "]}\n", "65 flows, and 64 are the most"},
		{"a question about nothing", `{"flows":[{}]}` + "\n", "a flow from invalid AddrPort"},
		{"a question about two families",
			`{"flows":[{"client":"192.0.2.1:1","at":"[fd00::1]:7484"}]}` + "\n", "a flow from 192.0.2.1:1 to [fd00::1]:7484"},
		{"nothing", "", "i/o timeout"},
		{"half a line", `{"ver`, "decode: unexpected EOF"},
	}
}

// hostileSockets writes to the sockets in the pod, as root there could.
func hostileSockets(t *testing.T, l *lab.Lab) {
	speaker, proxy, relay := l.Agent("speaker", besieged), l.Agent("proxy", besieged), l.Agent("relay", besieged)
	t.Run("feed", func(t *testing.T) { hostileFeed(t, proxy, speaker) })
	t.Run("the relay's feed", func(t *testing.T) { hostileRelayFeed(t, proxy, relay) })
	for _, a := range []*lab.Agent{speaker, proxy, relay} {
		t.Run("status of the "+a.Program, func(t *testing.T) { hostileStatus(t, a) })
	}
}

func hostileFeed(t *testing.T, proxy, speaker *lab.Agent) {
	feed := proxy.Path("/run/landfall/feed.sock")
	for _, row := range feedRows() {
		t.Run(row.name, func(t *testing.T) {
			wantSaidOf(t, feed, row, proxy, "ignoring an invalid message from a reader of the feed", false)
		})
	}
	for _, row := range slowFeed() {
		t.Run(row.name, func(t *testing.T) { wantSaidOf(t, feed, row, proxy, "disconnected a reader of the feed", true) })
	}
	t.Run("100 readers that read nothing", func(t *testing.T) {
		dialMany(t, feed, 100)
		eventually(t, "the speaker is a reader", func() error {
			if counter(t, speaker, "landfall_speaker_gate_usable") != 1 {
				return errors.New("its gate is shut")
			}
			return nil
		})
	})
}

func hostileRelayFeed(t *testing.T, proxy, relay *lab.Agent) {
	feed := proxy.Path(feedwire.Socket)
	for _, row := range relayFeedRows() {
		t.Run(row.name, func(t *testing.T) { wantSaidOf(t, feed, row, proxy, "disconnected the relay", true) })
	}
	t.Run("100 connections that say nothing", func(t *testing.T) {
		dialMany(t, feed, 100)
		if counter(t, relay, "landfall_relay_connected") != 1 {
			t.Error("the relay is not connected any more")
		}
	})
	eventually(t, "the rules lead to the relay", func() error {
		said, err := proxy.Get(t.Context(), "/v1/status?only=default/my-nginx")
		if err == nil && !strings.Contains(said, `"leads": {`) {
			err = errors.New(said)
		}
		return err
	})
}

// wantSaidOf says something to a socket, and waits until an agent has logged that, and with ends until the agent has
// ended the connection.
func wantSaidOf(t *testing.T, socket string, row beginning, a *lab.Agent, line string, ends bool) {
	t.Helper()
	after := len(a.Log())
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, conn); ended <- err }()
	if _, err := io.WriteString(conn, row.send); err != nil {
		t.Fatal(err)
	}
	wantLogged(t, a, after, line, row.comes)
	if ends && lab.TimedOut(<-ended) {
		t.Error("the connection goes on")
	}
}

func dialMany(t *testing.T, socket string, n int) {
	t.Helper()
	for range n {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// hostileStatus sends requests that no client would to the status socket of an agent.
func hostileStatus(t *testing.T, a *lab.Agent) {
	dial := func(t *testing.T) net.Conn {
		conn, err := net.Dial("unix", a.StatusSocket())
		if err == nil {
			err = conn.SetDeadline(time.Now().Add(patience))
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	for _, row := range append(anyServer(), statusServer()...) {
		t.Run(row.name, func(t *testing.T) {
			conn := dial(t)
			go func() { _, _ = io.WriteString(conn, row.send) }()
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			if response.StatusCode != row.code {
				t.Errorf("%s, want %d", response.Status, row.code)
			}
		})
	}
	for _, row := range slowStatus() {
		t.Run("and no more: "+row.name, func(t *testing.T) {
			conn := dial(t)
			if _, err := io.WriteString(conn, row.send); err != nil {
				t.Fatal(err)
			}
			if said, err := io.ReadAll(conn); string(said) != row.comes || err != nil {
				t.Errorf("%q is said, %v, want %q and the end of the connection", said, err, row.comes)
			}
		})
	}
	t.Run("200 connections that say nothing", func(t *testing.T) {
		dialMany(t, a.StatusSocket(), 200)
		eventually(t, "another client is answered", func() error {
			said, err := a.Get(t.Context(), "/v1/status")
			if err == nil && !strings.HasPrefix(said, "{") {
				err = fmt.Errorf("%.200s", said)
			}
			return err
		})
	})
}
