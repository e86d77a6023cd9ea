package kube

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// A node that was cut off must not wait for as long again until it hears what has changed. The test takes a minute for
// never.
func TestAConnectionThatIsCutOffIsGivenUp(t *testing.T) {
	for name, asks := range map[string]bool{"a watch": false, "a request": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node, server := nstest.New(t), nstest.New(t)
			nstest.Veth(t, node, "eth0", "192.0.2.1/24", server, "eth0", "192.0.2.2/24")
			var listener net.Listener
			server.Do(t, func() (err error) {
				listener, err = net.Listen("tcp", "192.0.2.2:6443")
				return err
			})
			defer listener.Close()
			var conn net.Conn
			node.Do(t, func() (err error) { // on this thread: DialContext would begin in a goroutine
				conn, err = newDialer(slog.Default(), "192.0.2.2:6443", nil).dial(t.Context(), "tcp", "192.0.2.2:6443")
				return err
			})
			defer conn.Close()
			accepted, err := listener.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer accepted.Close()
			conn.SetReadDeadline(time.Now().Add(10 * time.Second))
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("a connection to a server that says nothing: %v", err) // its kernel answers
			}
			server.Run(t, "ip", "link", "set", "eth0", "down")
			if asks {
				if _, err := conn.Write([]byte("?")); err != nil {
					t.Fatal(err)
				}
			}
			conn.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("after a minute: %v", err)
			}
		})
	}
}
