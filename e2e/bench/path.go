package main

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Addresses of a path: a client with many, so that no connection meets what conntrack remembers of one
// before; the node; and the pods. The node has both networks on links of its own, without a bridge.
const (
	clientSide  = "10.99.0.1/16"
	clientPeer  = "10.99.0.2"
	podSide     = "192.168.250.1/24"
	clients     = 32
	firstPort   = 2000
	socketLimit = 2 * time.Second
)

// measure is what is measured of a path.
type measure int

const (
	firstPackets   measure = iota // a SYN from the client until it is dropped in front of the pod
	newConnections                // from the client's SYN to its RST, with one byte in each direction
	roundTrips                    // one byte in each direction over a connection that stands
	bulk                          // from the client to the pod, over a connection that stands
	measures
)

// How much one measurement does, some milliseconds each.
const (
	firstsAtOnce      = 300
	connectionsAtOnce = 100
	roundTripsAtOnce  = 300
	bulkAtOnce        = 4 << 20
	bulkChunk         = 64 << 10
)

// timing is what a unit took: a connection, a round trip, a byte. In seconds.
type timing struct{ cpu, wall float64 }

// path is a node between a client and pods. Its methods must run on a thread inside of inside.
type path struct {
	outsidePlan
	client   netns.NsHandle
	listener int
	pods     netns.NsHandle
	raw      int // socket for packets with a header of our own, in the client's namespace
	serial   int
	standing map[netip.Addr][2]int // connections: the client's end and the pod's
	buffer   []byte
}

// newPath connects a node to a client and to a namespace with its pods, which exist until the program
// ends.
func newPath(plan outsidePlan, node string) (*path, error) {
	p := &path{outsidePlan: plan, standing: map[netip.Addr][2]int{}, buffer: make([]byte, bulkChunk)}
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends in another namespace
		failed <- p.build(node)
	}()
	return p, <-failed
}

func (p *path) build(name string) (err error) {
	node, err := netns.GetFromName(name)
	if err != nil {
		return err
	}
	defer node.Close()
	if p.pods, err = netns.New(); err != nil {
		return err
	}
	var own []string
	for _, pod := range outsidePods {
		own = append(own, pod+"/24")
	}
	if err := cable(p.pods, node, "pods", podSide, own); err != nil {
		return fmt.Errorf("pods: %w", err)
	}
	if p.listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return err
	}
	err = errors.Join(unix.Bind(p.listener, &unix.SockaddrInet4{Port: loadPort}), unix.Listen(p.listener, 4096),
		limitSocket(p.listener))
	if err != nil {
		return err
	}
	if err := dropFirsts(); err != nil {
		return err
	}
	if p.client, err = netns.New(); err != nil {
		return err
	}
	if p.raw, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
		return err
	}
	own = nil
	for i := range clients {
		own = append(own, p.source(i).String()+"/16")
	}
	if err := cable(p.client, node, "clients", clientSide, own); err != nil {
		return fmt.Errorf("clients: %w", err)
	}
	return nil
}

// source is the i-th address of the client.
func (p *path) source(i int) netip.Addr {
	a := netip.MustParseAddr(clientPeer).As4()
	a[3] += byte(i)
	return netip.AddrFrom4(a)
}

// cable connects a namespace to a node's, which is its default gateway.
func cable(host, node netns.NsHandle, name, gateway string, addrs []string) error {
	inside, err := netlink.NewHandleAt(host)
	if err != nil {
		return err
	}
	defer inside.Close()
	outside, err := netlink.NewHandleAt(node)
	if err != nil {
		return err
	}
	defer outside.Close()
	const own = "eth0"
	if err := inside.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: own}, PeerName: name,
		PeerNamespace: netlink.NsFd(node)}); err != nil {
		return err
	}
	if err := errors.Join(setUp(outside, name, gateway), setUp(inside, "lo"), setUp(inside, own, addrs...)); err != nil {
		return err
	}
	to, err := netlink.ParseAddr(gateway)
	if err != nil {
		return err
	}
	return inside.RouteAdd(&netlink.Route{Gw: to.IP})
}

func setUp(h *netlink.Handle, name string, addrs ...string) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	for _, text := range addrs {
		addr, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		if err := h.AddrAdd(link, addr); err != nil {
			return err
		}
	}
	return h.LinkSetUp(link)
}

// inside calls f on a thread in the client's namespace.
func (p *path) inside(f func() error) error {
	failed := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(p.client); err != nil {
			failed <- err
			return
		}
		failed <- f()
	}()
	return <-failed
}

// pin keeps the thread on one processor.
func pin() error {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return err
	}
	for i := range 1024 {
		if all.IsSet(i) {
			one.Zero()
			one.Set(i)
		}
	}
	return unix.SchedSetaffinity(0, &one)
}

// measure enters the client's namespace with the thread, and leaves it there.
func (p *path) measure(m measure, to netip.Addr) (timing, error) {
	if err := netns.Set(p.client); err != nil {
		return timing{}, err
	}
	ends, err := p.stand(to) // also for what does not use it: so neighbors are known
	if err != nil {
		return timing{}, err
	}
	var do func() error
	units := 0
	switch m {
	case firstPackets:
		do, units = func() error { return p.firsts(to, firstsAtOnce) }, firstsAtOnce
	case newConnections:
		do, units = func() error { return p.connections(to, connectionsAtOnce) }, connectionsAtOnce
	case roundTrips:
		do, units = func() error { return p.roundTrips(ends) }, roundTripsAtOnce
	case bulk:
		do, units = func() error { return p.bulk(ends) }, bulkAtOnce
	}
	cpu, wall := threadTime(), time.Now()
	err = do()
	return timing{cpu: (threadTime() - cpu) / float64(units), wall: time.Since(wall).Seconds() / float64(units)}, err
}

// threadTime is the thread's processor time, in seconds. It contains what the kernel does with packets
// as the thread sends them.
func threadTime() float64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano()).Seconds()
}

func limitSocket(fd int) error {
	tv := unix.NsecToTimeval(socketLimit.Nanoseconds())
	return errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv))
}

// next is the address and port of the next connection.
func (p *path) next() netip.AddrPort {
	p.serial++
	return netip.AddrPortFrom(p.source(p.serial%clients), uint16(firstPort+p.serial/clients%(65536-firstPort)))
}

// open connects to an address, and returns both ends.
func (p *path) open(to netip.Addr) (ends [2]int, err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ends, err
	}
	from := p.next()
	source := unix.SockaddrInet4{Addr: from.Addr().As4(), Port: int(from.Port())}
	err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		limitSocket(fd), unix.Bind(fd, &source),
		again(func() error { return unix.Connect(fd, &unix.SockaddrInet4{Addr: to.As4(), Port: loadPort}) }))
	if err != nil {
		unix.Close(fd)
		return ends, fmt.Errorf("connect: %w", err)
	}
	var peer int
	err = again(func() (err error) {
		peer, _, err = unix.Accept4(p.listener, unix.SOCK_CLOEXEC)
		return err
	})
	if err != nil {
		unix.Close(fd)
		return ends, fmt.Errorf("accept: %w", err)
	}
	return [2]int{fd, peer}, nil
}

// drain closes connections that come to stand after their client has given up, so that the pod takes none
// of them for the next.
func (p *path) drain() {
	wait := unix.NsecToTimespec((100 * time.Millisecond).Nanoseconds())
	for {
		n, err := unix.Ppoll([]unix.PollFd{{Fd: int32(p.listener), Events: unix.POLLIN}}, &wait, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n != 1 {
			return
		}
		if fd, _, err := unix.Accept4(p.listener, unix.SOCK_CLOEXEC); err == nil {
			unix.Close(fd)
		}
	}
}

// connections opens connections one after the other, sends a byte over each and back, and resets it.
func (p *path) connections(to netip.Addr, n int) error {
	for range n {
		ends, err := p.open(to)
		if err != nil {
			return err
		}
		err = p.exchange(ends)
		unix.Close(ends[0])
		unix.Close(ends[1])
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *path) exchange(ends [2]int) error {
	return errors.Join(p.pass(ends[0], ends[1], 1), p.pass(ends[1], ends[0], 1))
}

// pass sends n bytes from one end, and reads them at the other.
func (p *path) pass(from, to, n int) error {
	count := 0
	send := func() (err error) {
		count, err = unix.Write(from, p.buffer[:n])
		return err
	}
	if err := again(send); err != nil || count != n {
		return fmt.Errorf("sent %d of %d bytes: %w", count, n, err)
	}
	receive := func() (err error) {
		count, err = unix.Read(to, p.buffer)
		return err
	}
	for ; n > 0; n -= count {
		if err := again(receive); err != nil || count == 0 {
			return fmt.Errorf("%d bytes are missing: %w", n, err)
		}
	}
	return nil
}

// again repeats a system call that a signal of Go's scheduler interrupts. A repeated connect goes on
// waiting.
func again(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// stand returns a connection that stays.
func (p *path) stand(to netip.Addr) ([2]int, error) {
	ends, ok := p.standing[to]
	if ok {
		return ends, nil
	}
	ends, err := p.open(to)
	if err != nil {
		return ends, err
	}
	for _, fd := range ends {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 4*bulkChunk),
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 4*bulkChunk))
	}
	p.standing[to] = ends
	return ends, err
}

func (p *path) roundTrips(ends [2]int) error {
	for range roundTripsAtOnce {
		if err := p.exchange(ends); err != nil {
			return err
		}
	}
	return nil
}

func (p *path) bulk(ends [2]int) error {
	for range bulkAtOnce / bulkChunk {
		if err := p.pass(ends[0], ends[1], bulkChunk); err != nil {
			return err
		}
	}
	return nil
}
