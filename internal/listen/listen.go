// Package listen opens sockets for servers that hostile clients can reach: a bound on connections
// that no client can use up for the others, and unix sockets that replace those of dead processes.
package listen

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
)

// buffer is how many bytes the kernel holds for a connection in each direction: what a client does
// not read is memory too.
const buffer = 64 << 10

// ownConnections is how many connections the machine itself may have beside all others.
const ownConnections = 16

// Limit returns a listener whose connections take places in a room, which it may share with other
// listeners. The connection that has to leave the room is closed. Connections from the address that they were sent
// to, such as the kubelet's, have a room of their own: clients with enough addresses could fill the other one.
func Limit(l net.Listener, room *Room[net.Conn]) net.Listener {
	return &limited{Listener: l, room: room, own: NewRoom[net.Conn](ownConnections)}
}

type limited struct {
	net.Listener
	room, own *Room[net.Conn]
}

// Accept returns the next connection.
func (l *limited) Accept() (net.Conn, error) {
	accepted, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if tcp, ok := accepted.(*net.TCPConn); ok {
		_ = tcp.SetReadBuffer(buffer)
		_ = tcp.SetWriteBuffer(buffer)
	}
	room := l.room
	if isOwn(accepted) {
		room = l.own
	}
	place, out, full := room.Enter(client(accepted.RemoteAddr()), accepted)
	if full {
		out.Close()
	}
	return &Conn{Conn: accepted, room: room, place: place}, nil
}

// isOwn reports whether a connection comes from the address that it was sent to.
func isOwn(c net.Conn) bool {
	remote, ok := c.RemoteAddr().(*net.TCPAddr)
	local, also := c.LocalAddr().(*net.TCPAddr)
	return ok && also && remote.IP.Equal(local.IP)
}

// Conn is a connection that a listener of Limit has accepted.
type Conn struct {
	net.Conn
	room  *Room[net.Conn]
	place *Place[net.Conn]
}

// Close closes the connection.
func (c *Conn) Close() error {
	c.room.Leave(c.place)
	return c.Conn.Close()
}

// Keep says whether the connection has proved to be of somebody who may have one: it is then closed after all others.
func (c *Conn) Keep(keep bool) { c.room.Keep(c.place, keep) }

// client returns what stands for the machine at the other end of a connection.
func client(address net.Addr) netip.Prefix {
	tcp, ok := address.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	return Client(tcp.AddrPort().Addr())
}

// Client returns what stands for the machine with an address: an IPv4 address, or an IPv6 network
// of 64 bits, of which one machine can use all addresses.
func Client(addr netip.Addr) netip.Prefix {
	addr = addr.Unmap().WithZone("")
	bits := 64
	if addr.Is4() {
		bits = 32
	}
	network, _ := addr.Prefix(bits)
	return network
}

// Unix opens a unix socket that only this user may connect to, unless mode allows more. It replaces
// the file of a process that has ended, and leaves a socket alone that another process serves.
func Unix(path string, mode fs.FileMode) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	listener, err := bind(path, mode)
	if !errors.Is(err, syscall.EADDRINUSE) {
		return listener, err
	}
	other, dialErr := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if dialErr == nil {
		other.Close()
		return nil, fmt.Errorf("another process serves %s", path)
	}
	if !errors.Is(dialErr, syscall.ECONNREFUSED) {
		return nil, err
	}
	if err := os.Remove(path); err != nil {
		return nil, err
	}
	return bind(path, mode)
}

// bind makes the file of the socket with its mode: a change after it exists would come too late for
// whoever connects at once.
func bind(path string, mode fs.FileMode) (*net.UnixListener, error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		if err := raw.Control(func(fd uintptr) { failed = chmodSocket(fd, mode) }); err != nil {
			return err
		}
		return failed
	}}
	listener, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	return listener.(*net.UnixListener), nil
}
