package relay

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What a relay and its successor on the node say to each other: letters of JSON, each a packet of a unix socket
// (SOCK_SEQPACKET), with sockets and pipes (SCM_RIGHTS). The successor says hello, and is answered with a hello or a
// refusal. It says when the relay shall begin. Then it gets letters with sockets and connections, and answers each with
// Took, by which they become its own. Before and after, it gets letters with the clients that session affinity
// remembers, if it has asked for them, and answers none of these. After Swept it has all that could be handed over so
// far. It says Ready once the proxy knows it.
//
// Took is what both go by, and a relay that waits no longer closes its end for reading first: from then on the kernel
// refuses the answer, and what came before is still there to read. So a connection goes on in exactly one of the two,
// also if one of them hangs or dies.

// successionVersion is that of the letters. Whoever changes what they mean counts it up: relays of two versions hand
// nothing over.
const successionVersion = 1

const (
	// maxLetter is how many bytes a letter has at most, maxFiles how many sockets and pipes, and maxHanded how many
	// connections, of which each has four of these at most.
	maxLetter, maxFiles, maxHanded = 64 << 10, 128, 32
	// maxHandedTries is how many of the backends that were tried are told.
	maxHandedTries = 8
)

// meetTries is how often a successor tries to meet a relay whose socket is there: it may be left over.
const meetTries = 10

// stepWithin is how long either end waits for the other's next letter. It is longer in tests, whose machines are busy.
var stepWithin = 5 * time.Second

// letter is one message.
type letter struct {
	// Version is set in a hello.
	Version int `json:"version,omitempty"`
	// Refused says why there is nothing to have.
	Refused string `json:"refused,omitempty"`
	// Begin asks for the sockets of Port (0 for any), unless NoSockets is set, and for the connections.
	Begin     bool   `json:"begin,omitempty"`
	Port      uint16 `json:"port,omitempty"`
	NoSockets bool   `json:"noSockets,omitempty"`
	// WantsClients asks for the clients that session affinity remembers.
	WantsClients bool `json:"wantsClients,omitempty"`
	// Clients are some of them.
	Clients []handedClient `json:"clients,omitempty"`
	// Sockets are those that listen; the successor opens its own if they are none.
	Sockets     []handedSocket     `json:"sockets,omitempty"`
	Connections []handedConnection `json:"connections,omitempty"`
	Swept       bool               `json:"swept,omitempty"`
	// Took is set once the successor has what the last letter handed over.
	Took  bool `json:"took,omitempty"`
	Ready bool `json:"ready,omitempty"`
}

// handedSocket is a socket that accepts connections, or receives UDP.
type handedSocket struct {
	Family lb.Family `json:"family"`
	UDP    bool      `json:"udp,omitempty"`
}

// handedConnection is a connection, with the sockets of client and backend, and the pipes that have something.
type handedConnection struct {
	Service  lb.Key           `json:"service"`
	Client   netip.AddrPort   `json:"client"`
	Frontend netip.AddrPort   `json:"frontend"`
	Backend  netip.AddrPort   `json:"backend"`
	Tried    []netip.AddrPort `json:"tried,omitempty"`
	Began    time.Time        `json:"began"`
	// Sent and Received were moved so far. OutEnded and BackEnded are set if the client, or the backend, has ended what
	// it sends.
	Sent      uint64 `json:"sent,omitempty"`
	Received  uint64 `json:"received,omitempty"`
	OutEnded  bool   `json:"outEnded,omitempty"`
	BackEnded bool   `json:"backEnded,omitempty"`
	// Out and Back are how many bytes are in the pipes to the backend, and to the client.
	Out  int `json:"out,omitempty"`
	Back int `json:"back,omitempty"`
}

// files returns how many sockets and pipes the connection has.
func (h handedConnection) files() int {
	n := 2
	for _, left := range []int{h.Out, h.Back} {
		if left > 0 {
			n++
		}
	}
	return n
}

// decodeLetter reads a letter that came with so many files.
func decodeLetter(text []byte, files int) (l letter, err error) {
	if err := json.Unmarshal(text, &l); err != nil {
		return l, fmt.Errorf("decode: %w", err)
	}
	want := len(l.Sockets)
	for _, s := range l.Sockets {
		if s.Family != lb.IPv4 && s.Family != lb.IPv6 {
			return l, fmt.Errorf("%q is no family", s.Family)
		}
	}
	if len(l.Connections) > maxHanded || len(l.Sockets) > 4 {
		return l, fmt.Errorf("%d connections and %d sockets are too many", len(l.Connections), len(l.Sockets))
	}
	if len(l.Clients) > maxHandedClients || len(l.Clients) > 0 && files > 0 {
		return l, fmt.Errorf("%d clients and %d sockets and pipes in one letter", len(l.Clients), files)
	}
	for _, c := range l.Clients {
		if !c.isValid() {
			return l, fmt.Errorf("a client that cannot be: %+v", c)
		}
	}
	for _, c := range l.Connections {
		want += c.files()
		if c.Out < 0 || c.Back < 0 || c.Out > maxChunk || c.Back > maxChunk || c.OutEnded && c.Out > 0 ||
			c.BackEnded && c.Back > 0 || len(c.Tried) > maxHandedTries ||
			!c.Client.IsValid() || !c.Frontend.IsValid() || !c.Backend.IsValid() {
			return l, fmt.Errorf("a connection that cannot be: %+v", c)
		}
	}
	if want != files {
		return l, fmt.Errorf("%d sockets and pipes came, and %d are told", files, want)
	}
	return l, nil
}

// courier carries letters. One goroutine receives, and any may send.
type courier struct {
	conn *net.UnixConn
	mu   sync.Mutex // of who sends
	text [maxLetter]byte
	oob  [1 << 10]byte
	// ready is set once the other end has said so.
	ready bool
	// wantsClients is set if the other end has asked for them. clientsSince is from when on a Service's are that it does
	// not have, and clientsLeft the Service at which the time was over.
	wantsClients bool
	clientsSince map[*service]time.Time
	clientsLeft  *service
}

// newCourier takes over a connection to a process of the same user.
func newCourier(conn *net.UnixConn) (*courier, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		conn.Close()
		return nil, err
	}
	var peer *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, failed); err == nil && int(peer.Uid) != os.Geteuid() {
		err = fmt.Errorf("process %d is user %d's", peer.Pid, peer.Uid)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return &courier{conn: conn, clientsSince: map[*service]time.Time{}}, nil
}

func (c *courier) close() { c.conn.Close() }

// closeRead refuses what the other end sends from now on.
func (c *courier) closeRead() { _ = c.conn.CloseRead() }

// send sends a letter, and descriptors, which stay the caller's.
func (c *courier) send(l letter, fds ...int) error {
	return c.sendUntil(time.Now().Add(stepWithin), l, fds...)
}

// sendUntil sends a letter while it can be sent before a time. A letter is a packet: it goes as a whole, or not at all.
func (c *courier) sendUntil(until time.Time, l letter, fds ...int) error {
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if len(text) > maxLetter || len(fds) > maxFiles {
		return fmt.Errorf("a letter of %d bytes and %d files", len(text), len(fds))
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.conn.SetWriteDeadline(until); err != nil {
		return err
	}
	_, _, err = c.conn.WriteMsgUnix(text, oob, nil)
	return err
}

// receive waits for a letter; for any time if within is 0. The descriptors are the caller's.
func (c *courier) receive(within time.Duration) (l letter, fds []int, err error) {
	until := time.Time{}
	if within > 0 {
		until = time.Now().Add(within)
	}
	if err := c.conn.SetReadDeadline(until); err != nil {
		return l, nil, err
	}
	n, oobn, flags, _, err := c.conn.ReadMsgUnix(c.text[:], c.oob[:])
	if err != nil {
		return l, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(c.oob[:oobn])
	for _, m := range messages {
		some, bad := unix.ParseUnixRights(&m)
		fds, err = append(fds, some...), errors.Join(err, bad)
	}
	switch {
	case err != nil:
	case n == 0 && oobn == 0:
		err = io.EOF
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("a letter is too long, or this process may not have what came with it")
	default:
		l, err = decodeLetter(c.text[:n], len(fds))
	}
	if err != nil {
		closeAll(fds)
		return l, nil, err
	}
	c.ready = c.ready || l.Ready
	return l, fds, nil
}

// hand hands something over. Without an error it is the successor's, and with one it is still the caller's.
func (c *courier) hand(l letter, fds []int) error {
	err := c.send(l, fds...)
	for err == nil {
		var answer letter
		if answer, _, err = c.receive(stepWithin); answer.Took {
			return nil
		}
	}
	c.closeRead() // from now on there is no answer but those that have come
	for {
		answer, _, failed := c.receive(stepWithin)
		if answer.Took {
			return nil
		}
		if failed != nil {
			return fmt.Errorf("the successor does not take what it gets: %w", err)
		}
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// meet connects to the relay that there is; nil if there is none.
func meet(path string) (*courier, error) {
	var conn *net.UnixConn
	var err error
	for range meetTries { // a socket that is bound refuses until it listens
		conn, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if !errors.Is(err, unix.ECONNREFUSED) {
			break
		}
		time.Sleep(lookEvery)
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return newCourier(conn)
}

// errLocked is the error of locking what another relay of the node has locked.
var errLocked = errors.New("another relay of the node serves successors")

// lockAt locks the socket for successors, which has a directory that only this user may look into. Only the relay that
// has the lock may open the socket. The lock ends when it is closed, or its process ends.
func lockAt(path string) (*os.File, error) {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("directory %s is open to others: it needs mode 0700", dir)
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return lock, nil
	}
	lock.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errLocked
	}
	return nil, fmt.Errorf("lock %s: %w", lock.Name(), err)
}

// listenAt opens the socket for successors. It replaces one that is left over of a process that has ended.
func listenAt(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
}
