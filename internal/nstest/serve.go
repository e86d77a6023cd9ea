package nstest

import (
	"net"
	"testing"
)

// Serve accepts TCP connections to an address of the namespace until the test ends. It calls answer for
// each on a goroutine, and closes the connection after.
func (ns *NS) Serve(t testing.TB, address string, answer func(net.Conn)) {
	t.Helper()
	var listener net.Listener
	ns.Do(t, func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	})
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				answer(conn)
			}()
		}
	}()
}
