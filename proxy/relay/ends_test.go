package relay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pairOfConns returns both ends of a connection, the second as the relay has it.
func pairOfConns(t *testing.T) (*net.TCPConn, *Conn) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	far, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { far.Close() })
	near, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	file, err := near.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	fd, err := unix.Dup(int(file.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	conn, err := newConn(fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return far.(*net.TCPConn), conn
}

// A reset that the kernel tells the write to a client that does not read is one for the backend too: an end would
// make a whole request of a part.
func TestResetsWhileAWriteWaits(t *testing.T) {
	for range 20 {
		client, in := pairOfConns(t)
		server, out := pairOfConns(t)
		done := make(chan struct{})
		go func() {
			newPassage(newPipes(4).of(&service{}, netip.IPv4Unspecified()), in, out).run(t.Context(), time.Hour)
			in.Close()
			out.Close()
			close(done)
		}()
		if _, err := client.Write([]byte("half of a request")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(server, make([]byte, len("half of a request"))); err != nil {
			t.Fatal(err)
		}
		server.SetWriteDeadline(time.Now().Add(60 * time.Millisecond))
		for chunk := make([]byte, 1<<20); ; {
			if _, err := server.Write(chunk); err != nil {
				break // the client's window is full, and the relay's sockets are
			}
		}
		client.SetLinger(0)
		client.Close()
		server.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := server.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Fatalf("the backend reads %v, want a reset", err)
		}
		<-done
	}
}

// What follows urgent data passes, with and without pipes; the urgent byte itself is left out.
func TestUrgentData(t *testing.T) {
	for _, most := range []int{0, 4} {
		client, in := pairOfConns(t)
		server, out := pairOfConns(t)
		moved := make(chan error, 1)
		go func() {
			err := newMover(out, in, newPipes(most).of(&service{}, netip.IPv4Unspecified())).run()
			out.Close()
			moved <- err
		}()
		sendTo(t, client, "hello ", 0)
		if _, err := io.ReadFull(server, make([]byte, len("hello "))); err != nil {
			t.Fatal(err)
		}
		sendTo(t, client, "!", unix.MSG_OOB)
		sendTo(t, client, "world", 0)
		client.CloseWrite()
		server.SetReadDeadline(time.Now().Add(time.Minute))
		if got, err := io.ReadAll(server); string(got) != "world" || err != nil {
			t.Errorf("with %d pipes: %q, %v", most, got, err)
		}
		if err := <-moved; err != nil {
			t.Errorf("with %d pipes: %v", most, err)
		}
	}
}

// sendTo sends a text with flags.
func sendTo(t *testing.T, conn *net.TCPConn, text string, flags int) {
	t.Helper()
	raw, err := conn.SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) { err = unix.Sendto(int(fd), []byte(text), flags, nil) }), err)
	}
	if err != nil {
		t.Fatal(err)
	}
}
