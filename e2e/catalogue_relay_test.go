package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// relayPort is where the relay accepts what the rules lead to it.
const relayPort = 7484

// relayStreams are what hostile clients send to the relay's own port: what HTTP servers and TLS get, headers of other
// load balancers, requests of other proxies, and noise. The relay resets the connection in each case.
func relayStreams() (rows []beginning) {
	for _, row := range anyServer() {
		rows = append(rows, beginning{name: row.name, send: row.send})
	}
	return append(append(rows, noTLS()...), []beginning{
		{name: "nothing"},
		{name: "the text of the PROXY protocol", send: "PROXY TCP4 10.96.0.1 172.26.236.180 4000 80\r\nGET / HTTP/1.1\r\n" +
			"\r\n"},
		{name: "the PROXY protocol", send: "\r\n\r\n\x00\r\nQUIT\n" +
			"\x21\x11\x00\x0c\x0a\x60\x00\x01\xac\x1a\xec\xb4\x0f\xa0\x00\x50"},
		{name: "a request to connect", send: "CONNECT 10.96.0.1:443 HTTP/1.1\r\nHost: 10.96.0.1:443\r\n\r\n"},
		{name: "SOCKS", send: "\x05\x01\x00\x05\x01\x00\x01\x0a\x60\x00\x01\x01\xbb"},
		{name: "1 MiB of noise", send: strings.Repeat("\xa5", 1<<20)},
	}...)
}

// relayDatagrams are the same for UDP: the rules drop them.
func relayDatagrams() []beginning {
	return []beginning{
		{name: "an empty datagram"},
		{name: "one byte", send: "\x00"},
		{name: "a question for a name", send: "\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01x\x00\x00\x01\x00\x01"},
		{name: "a greeting of QUIC", send: "\xc0\x00\x00\x00\x01\x08\x01\x02\x03\x04\x05\x06\x07\x08\x00" +
			strings.Repeat("\x00", 1185)},
		{name: "60 kB", send: strings.Repeat("x", 60000)},
	}
}

// hostileRelay connects to the relay's own port, to which only the rules lead clients.
func hostileRelay(t *testing.T, l *lab.Lab) {
	relay, proxy := l.Agent("relay", besieged), l.Agent("proxy", besieged)
	eventually(t, "the rules lead to the relay", func() error {
		if counter(t, relay, "landfall_relay_connected") != 1 {
			return errors.New("it is not connected")
		}
		return nil
	})
	addr := nodeAddr(l, besieged)
	for _, at := range []netip.Addr{addr, lab.Twin(addr)} {
		target := netip.AddrPortFrom(at, relayPort).String()
		for _, row := range relayStreams() {
			t.Run("TCP to "+at.String()+"/"+row.name, func(t *testing.T) {
				wantCounted(t, relay, "landfall_relay_refused_total", 1, func() error { return wantReset(t, l, target, row.send) })
			})
		}
		for _, row := range relayDatagrams() {
			t.Run("UDP to "+at.String()+"/"+row.name, func(t *testing.T) {
				conn, err := l.Dial(t.Context(), hostileHost, "udp", target)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				wantCountOf(t, proxy, "landfall_proxy_relay_udp_dropped_total", func() error {
					_, err := io.WriteString(conn, row.send)
					return err
				})
				if err := conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
					t.Fatal(err)
				}
				if n, err := conn.Read(make([]byte, 2000)); !lab.TimedOut(err) {
					t.Errorf("an answer: %d bytes, %v", n, err)
				}
			})
		}
	}
	t.Run("200 connections that say nothing", func(t *testing.T) {
		var open []net.Conn
		wantCounted(t, relay, "landfall_relay_refused_total", 200, func() error {
			conn, err := l.Dial(t.Context(), hostileHost, "tcp", netip.AddrPortFrom(addr, relayPort).String())
			switch {
			case err == nil:
				open = append(open, conn)
			case errors.Is(err, syscall.ECONNRESET): // before the client knows that it is connected
				return nil
			}
			return err
		})
		for _, conn := range open {
			conn.Close()
		}
	})
}

// wantReset returns an error unless a connection on which this is sent is reset, and nothing comes back.
func wantReset(t *testing.T, l *lab.Lab, target, send string) error {
	conn, err := l.Dial(t.Context(), hostileHost, "tcp", target)
	if errors.Is(err, syscall.ECONNRESET) {
		return nil
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, writing := io.WriteString(conn, send)
	said, reading := io.ReadAll(conn)
	if len(said) > 0 || !errors.Is(writing, syscall.ECONNRESET) && !errors.Is(reading, syscall.ECONNRESET) {
		return fmt.Errorf("%q is said, want a reset: %w", said, errors.Join(writing, reading))
	}
	return nil
}
