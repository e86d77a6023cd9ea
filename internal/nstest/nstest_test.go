package nstest

import (
	"net"
	"testing"
)

func TestNamespacesAreJoinedAndSeparate(t *testing.T) {
	a, b := New(t), New(t)
	Veth(t, a, "eth0", "198.51.100.1/24", b, "eth0", "198.51.100.2/24")
	var listener net.Listener
	a.Do(t, func() (err error) {
		listener, err = net.Listen("tcp", "198.51.100.1:0")
		return err
	})
	defer listener.Close()
	b.Do(t, func() error {
		conn, err := net.Dial("tcp", listener.Addr().String())
		if err == nil {
			conn.Close()
		}
		return err
	})
	if _, err := net.Listen("tcp", "198.51.100.1:0"); err == nil {
		t.Error("a socket outside the namespace can bind the namespace's address")
	}
}
