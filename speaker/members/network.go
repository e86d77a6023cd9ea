package members

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/internal/listen"
)

const (
	// maxPacket is the largest packet of UDP.
	maxPacket = 1 << 16
	// receiveBuffer is how much the kernel keeps until it is read, if its limit (net.core.rmem_max)
	// lets it.
	receiveBuffer = 2 << 20
	// maxFromNodes and maxFromOthers bound the connections that others have opened: those from addresses of the
	// cluster's nodes, and the rest, which is everybody while it is unknown which nodes there are. One lasts for
	// milliseconds, and for 2 s if nothing is said.
	maxFromNodes, maxFromOthers = 256, 64
	// readRetry is the wait after a failed read or accept, such as for lack of memory.
	readRetry = 10 * time.Millisecond
)

// network is what memberlist sends and receives over. Its own transport takes a new buffer of 64 KiB
// for each packet; with some hundred packets of 100 bytes a second, the garbage of that costs more
// than all else in gossip.
//
// With encryption it keeps some messages from memberlist that would end the program: see stream and
// versionOf.
type network struct {
	log       *slog.Logger
	encrypted bool
	isNode    func(netip.Addr) bool // whether a node of the cluster has the address
	empties   *empties              // of nodes
	nodes     *listen.Room[net.Conn]
	others    *listen.Room[net.Conn]
	unproven  budget // of others
	ofNodes   budget
	udp       *net.UDPConn
	tcp       *net.TCPListener
	packets   chan *memberlist.Packet
	streams   chan net.Conn
	done      chan struct{}
	end       sync.Once
	readers   sync.WaitGroup
}

var _ memberlist.NodeAwareTransport = (*network)(nil)

// openNetwork opens the sockets. It calls isNode from a goroutine of its own.
func openNetwork(at netip.AddrPort, encrypted bool, isNode func(netip.Addr) bool, empties *empties,
	log *slog.Logger) (*network, error) {
	tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if err != nil {
		return nil, err
	}
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
	if err := udp.SetReadBuffer(receiveBuffer); err != nil {
		log.Debug("gossip: the kernel does not enlarge the buffer for packets", "error", err)
	}
	n := &network{log: log, encrypted: encrypted, isNode: isNode, empties: empties,
		nodes:  listen.NewRoom[net.Conn](maxFromNodes),
		others: listen.NewRoom[net.Conn](maxFromOthers), unproven: budget{most: maxUnproven},
		ofNodes: budget{most: maxOfNodes}, udp: udp, tcp: tcp, packets: make(chan *memberlist.Packet),
		streams: make(chan net.Conn), done: make(chan struct{})}
	n.readers.Go(n.receive)
	n.readers.Go(n.accept)
	return n, nil
}

// receive hands on packets until Shutdown.
func (n *network) receive() {
	buffer := make([]byte, maxPacket)
	for {
		size, from, err := n.udp.ReadFromUDPAddrPort(buffer)
		at := time.Now()
		if err != nil {
			if !n.retry("receive a packet", err) {
				return
			}
			continue
		}
		if size == 0 || n.encrypted && versionOf(buffer[:size]) != encryptionVersion {
			continue
		}
		// memberlist keeps the bytes of some messages.
		packet := &memberlist.Packet{Buf: bytes.Clone(buffer[:size]), From: net.UDPAddrFromAddrPort(from), Timestamp: at}
		select {
		case n.packets <- packet:
		case <-n.done:
			return
		}
	}
}

// accept hands on connections until Shutdown.
func (n *network) accept() {
	for {
		conn, err := n.tcp.AcceptTCP()
		if err != nil {
			if !n.retry("accept a connection", err) {
				return
			}
			continue
		}
		accepted := n.accepted(conn)
		select {
		case n.streams <- accepted:
		case <-n.done:
			_ = accepted.Close()
			return
		}
	}
}

// accepted gives a connection its place, and closes the one that has to leave for it.
func (n *network) accepted(conn *net.TCPConn) net.Conn {
	from := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
	room, budget, node := n.others, &n.unproven, n.isNode(from)
	if node {
		room, budget = n.nodes, &n.ofNodes
	}
	place, out, full := room.Enter(listen.Client(from), conn)
	if full {
		_ = out.Close()
	}
	s := &stream{Conn: conn, looked: !n.encrypted, budget: budget}
	s.leave = func() {
		room.Leave(place)
		budget.give(s.size)
		if node {
			n.empties.remove(conn.RemoteAddr().String())
		}
	}
	if node {
		s.empty = func() { n.empties.add(conn.RemoteAddr().String()) }
	}
	return s
}

// retry waits after an error, and reports whether the sockets are still open.
func (n *network) retry(doing string, err error) bool {
	select {
	case <-n.done:
		return false
	default:
	}
	n.log.Warn("gossip: cannot "+doing, "error", err)
	select {
	case <-n.done:
		return false
	case <-time.After(readRetry):
		return true
	}
}

func (n *network) guarded(conn net.Conn) net.Conn {
	if n.encrypted {
		return &stream{Conn: conn}
	}
	return conn
}

// FinalAdvertiseAddr returns the address that the others are told, which is always given.
func (n *network) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return nil, 0, err
	}
	return addr.AsSlice(), port, nil
}

// WriteToAddress sends a packet and returns when that was.
func (n *network) WriteToAddress(b []byte, to memberlist.Address) (time.Time, error) {
	addr, err := netip.ParseAddrPort(to.Addr)
	if err != nil {
		return time.Time{}, err
	}
	_, err = n.udp.WriteToUDPAddrPort(b, addr)
	return time.Now(), err
}

// WriteTo is WriteToAddress for a bare address.
func (n *network) WriteTo(b []byte, addr string) (time.Time, error) {
	return n.WriteToAddress(b, memberlist.Address{Addr: addr})
}

// DialAddressTimeout opens a connection.
func (n *network) DialAddressTimeout(to memberlist.Address, timeout time.Duration) (net.Conn, error) {
	conn, err := net.DialTimeout("tcp", to.Addr, timeout)
	if err != nil {
		return nil, err
	}
	return n.guarded(conn), nil
}

// DialTimeout is DialAddressTimeout for a bare address.
func (n *network) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return n.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

// PacketCh returns what is received.
func (n *network) PacketCh() <-chan *memberlist.Packet { return n.packets }

// StreamCh returns the connections of others.
func (n *network) StreamCh() <-chan net.Conn { return n.streams }

// Shutdown closes the sockets, and returns when nothing reads from them any more.
func (n *network) Shutdown() error {
	var err error
	n.end.Do(func() {
		close(n.done)
		if err = errors.Join(n.tcp.Close(), n.udp.Close()); err != nil {
			err = fmt.Errorf("close the sockets of gossip: %w", err)
		}
	})
	n.readers.Wait()
	return err
}
