package listen

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// echo accepts connections and answers one byte with one, until the test ends.
func echo(t *testing.T, l net.Listener) {
	t.Helper()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	t.Cleanup(func() { l.Close() })
}

func dial(t *testing.T, from string, l net.Listener) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if !answers(c) {
		t.Fatalf("a new connection from %s is not served", from)
	}
	return c
}

// answers reports whether the server still serves the connection.
func answers(c net.Conn) bool {
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := c.Write([]byte{1}); err != nil {
		return false
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err == nil
}

func TestAFullListenerClosesTheOldestOfTheGreediestClient(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	room := NewRoom[net.Conn](4)
	l := Limit(inner, room)
	echo(t, l)
	kubelet := dial(t, "127.0.0.1", l)
	var hostile []net.Conn
	for range 20 {
		hostile = append(hostile, dial(t, "127.0.0.2", l))
	}
	if !answers(kubelet) {
		t.Error("a client with many connections closed another client's")
	}
	for i, c := range hostile {
		if got, want := answers(c), i >= 16; got != want {
			t.Errorf("connection %d of 20 is served: %v, want %v", i+1, got, want)
		}
	}
	// Room comes back when connections end.
	for _, c := range hostile {
		c.Close()
	}
	for room.Len() > 0 { // the server closes them a moment later
		time.Sleep(time.Millisecond)
	}
	again := dial(t, "127.0.0.3", l)
	for range 2 {
		dial(t, "127.0.0.3", l)
	}
	if !answers(again) || !answers(kubelet) {
		t.Error("closed connections are still counted")
	}
}

// A client that has proved who it is keeps its connections, whoever floods the room: the same client, or many. It keeps no
// more than four against others.
func TestContract11ARoomIsLeftLastByWhatIsKept(t *testing.T) {
	for _, clients := range []int{1, 100} {
		room, out := NewRoom[int](16), map[int]bool{}
		enter := func(client, thing int) *Place[int] {
			place, left, full := room.Enter(Client(netip.AddrFrom4([4]byte{10, 0, 0, byte(client)})), thing)
			if full {
				out[left] = true
			}
			return place
		}
		var places []*Place[int]
		for i := range 6 {
			places = append(places, enter(0, i))
			room.Keep(places[i], true)
		}
		for i := range 200 {
			enter(i%clients, 100+i)
		}
		for i := range 6 {
			if out[i] != (i >= maxKept) {
				t.Errorf("%d clients: thing %d has left: %v", clients, i, out[i])
			}
		}
		room.Keep(places[0], false) // what was refused, and what has left, is kept no more
		room.Leave(places[1])
		enter(0, 300)
		for i := range 200 {
			enter(i%clients, 400+i)
		}
		if !out[0] || out[2] || out[3] || len(room.kept) != 1 {
			t.Errorf("%d clients: left are %v %v %v, kept are %v", clients, out[0], out[2], out[3], room.kept)
		}
	}
}

// Clients with more addresses than there are places close no connection of the machine itself, which has an end too.
func TestContract11ManyClientsLeaveTheKubeletItsPlace(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := Limit(inner, NewRoom[net.Conn](4))
	echo(t, l)
	kubelet := dial(t, "127.0.0.1", l)
	for i := range 20 {
		dial(t, fmt.Sprintf("127.0.1.%d", i+1), l)
	}
	if !answers(kubelet) {
		t.Error("clients with many addresses closed the kubelet's connection")
	}
	for range ownConnections {
		dial(t, "127.0.0.1", l)
	}
	if answers(kubelet) {
		t.Error("the machine's own connections have no bound")
	}
}

func TestClientIsANetworkOf64Bits(t *testing.T) {
	for address, want := range map[string]string{
		"10.0.0.1": "10.0.0.1/32", "::ffff:10.0.0.1": "10.0.0.1/32", "2001:db8::1:2:3:4": "2001:db8::/64",
	} {
		if got := Client(netip.MustParseAddr(address)).String(); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}

func TestUnixSocketsArePrivateAndReplaceDeadOnes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "status.sock")
	first, err := Unix(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := Unix(path, 0o600); err == nil || errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a socket that another process serves: %v", err)
	}
	first.SetUnlinkOnClose(false)
	first.Close()
	second, err := Unix(path, 0o600)
	if err != nil {
		t.Fatalf("the socket of a process that has ended: %v", err)
	}
	second.Close()
}
