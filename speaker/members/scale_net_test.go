package members

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/plan"
)

const (
	// simLatency is how long a packet is under way on the simulated network, if it says nothing else.
	simLatency = 200 * time.Microsecond
	// simSocket is how many packets wait for a node's process; what comes beyond is lost, as at a socket.
	simSocket = 8192
	simPort   = 7946
)

// simNet is a network in memory, in the time of testing/synctest, that counts what it carries.
type simNet struct {
	latency time.Duration // of a packet
	mu      sync.Mutex
	ports   map[netip.Addr]*simPorts
	side    map[netip.Addr]int  // of a partition
	down    map[netip.Addr]bool // machines that are off
	crashed map[netip.Addr]bool // processes that are gone without a word; their machines are there
	// broken are paths between two machines that carry nothing.
	broken map[[2]netip.Addr]bool
	sent   traffic
}

// traffic is what a network has carried.
type traffic struct {
	packets, bytes       int // over UDP, without what IP and UDP add
	streams, streamBytes int // over TCP
	probes               int // of kernels
	lost                 int // packets for which a socket had no room
}

func (t traffic) minus(o traffic) traffic {
	return traffic{t.packets - o.packets, t.bytes - o.bytes, t.streams - o.streams, t.streamBytes - o.streamBytes,
		t.probes - o.probes, t.lost - o.lost}
}

func newSimNet() *simNet {
	return &simNet{latency: simLatency, ports: map[netip.Addr]*simPorts{}, side: map[netip.Addr]int{},
		down: map[netip.Addr]bool{}, crashed: map[netip.Addr]bool{}}
}

func (n *simNet) count(f func(*traffic)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(&n.sent)
}

func (n *simNet) traffic() traffic {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sent
}

// reach returns the process at an address, nil if none runs, and whether packets get to its machine.
func (n *simNet) reach(from, to netip.Addr) (*simPorts, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	ok := !n.down[from] && !n.down[to] && n.side[from] == n.side[to] && !n.broken[[2]netip.Addr{from, to}] &&
		!n.broken[[2]netip.Addr{to, from}] && !n.crashed[from]
	if n.crashed[to] {
		return nil, ok
	}
	return n.ports[to], ok
}

// crash ends the process at an address, or what the network sees of it.
func (n *simNet) crash(addr netip.Addr, is bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.crashed[addr] = is
}

func (n *simNet) isCrashed(addr netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.crashed[addr]
}

// simPorts are the sockets of one process.
type simPorts struct {
	net     *simNet
	addr    netip.Addr
	packets chan *memberlist.Packet
	streams chan net.Conn
	done    chan struct{}
	end     sync.Once
}

var _ transport = (*simPorts)(nil)

func (p *simPorts) inject(packet *memberlist.Packet) {
	select {
	case p.packets <- packet:
	case <-p.done:
	}
}

func (n *simNet) open(addr netip.Addr) *simPorts {
	p := &simPorts{net: n, addr: addr, packets: make(chan *memberlist.Packet, simSocket),
		streams: make(chan net.Conn, 64), done: make(chan struct{})}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ports[addr] = p
	return p
}

func (p *simPorts) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return p.addr.AsSlice(), simPort, nil
}

func (p *simPorts) WriteToAddress(b []byte, to memberlist.Address) (time.Time, error) {
	addr, err := netip.ParseAddrPort(to.Addr)
	if err != nil {
		return time.Time{}, err
	}
	if p.net.isCrashed(p.addr) {
		return time.Now(), nil
	}
	p.net.count(func(t *traffic) { t.packets++; t.bytes += len(b) })
	other, ok := p.net.reach(p.addr, addr.Addr())
	if !ok || other == nil {
		return time.Now(), nil // lost on the way
	}
	packet := &memberlist.Packet{Buf: append([]byte(nil), b...), From: net.UDPAddrFromAddrPort(
		netip.AddrPortFrom(p.addr, simPort))}
	time.AfterFunc(p.net.latency, func() {
		packet.Timestamp = time.Now()
		select {
		case other.packets <- packet:
		default:
			p.net.count(func(t *traffic) { t.lost++ })
		}
	})
	return time.Now(), nil
}

func (p *simPorts) WriteTo(b []byte, addr string) (time.Time, error) {
	return p.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (p *simPorts) DialAddressTimeout(to memberlist.Address, timeout time.Duration) (net.Conn, error) {
	return p.DialTimeout(to.Addr, timeout)
}

func (p *simPorts) DialTimeout(to string, timeout time.Duration) (net.Conn, error) {
	addr, err := netip.ParseAddrPort(to)
	if err != nil {
		return nil, err
	}
	other, ok := p.net.reach(p.addr, addr.Addr())
	if !ok {
		time.Sleep(timeout)
		return nil, syscall.ETIMEDOUT
	}
	time.Sleep(2 * p.net.latency)
	if other == nil {
		return nil, syscall.ECONNREFUSED
	}
	own, theirs := net.Pipe()
	// A pipe has no buffer: what is written waits for ever for an end that goes before it reads.
	if err := own.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	select {
	case other.streams <- &simStream{theirs, p.net}:
		p.net.count(func(t *traffic) { t.streams++ })
		return &simStream{own, p.net}, nil
	case <-other.done:
		return nil, syscall.ECONNREFUSED
	}
}

func (p *simPorts) PacketCh() <-chan *memberlist.Packet { return p.packets }
func (p *simPorts) StreamCh() <-chan net.Conn           { return p.streams }

func (p *simPorts) Shutdown() error {
	p.end.Do(func() {
		p.net.mu.Lock()
		defer p.net.mu.Unlock()
		if p.net.ports[p.addr] == p {
			delete(p.net.ports, p.addr)
		}
		close(p.done)
	})
	return nil
}

type simStream struct {
	net.Conn
	net *simNet
}

func (s *simStream) Write(b []byte) (int, error) {
	s.net.count(func(t *traffic) { t.streamBytes += len(b) })
	return s.Conn.Write(b)
}

// RemoteAddr is one that memberlist can log.
func (s *simStream) RemoteAddr() net.Addr { return &net.TCPAddr{} }

// simNode is the gossip of one speaker: the actors of the program.
type simNode struct {
	name  string
	addr  netip.Addr
	gone  bool // its machine is off
	alive *liveness.Actor
	*Members
	cancel context.CancelFunc
	done   chan struct{}
}

// simCluster is the gossip of a whole cluster.
type simCluster struct {
	net   *simNet
	nodes []*simNode
	// profile is how fast gossip is; the zero value stands for LAN.
	profile Profile
	// filtered has packet filters drop what is for kernels, and not gossip.
	filtered bool
}

func simAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}) }

func newSimCluster(nodes int) *simCluster {
	c := &simCluster{net: newSimNet()}
	for i := range nodes {
		c.nodes = append(c.nodes, &simNode{name: simName(i), addr: simAddr(i)})
	}
	return c
}

// start runs the speaker of a node, which the API server has told of all nodes of the cluster.
func (c *simCluster) start(n *simNode) {
	ports := c.net.open(n.addr)
	log, profile := slog.New(slog.DiscardHandler), cmp.Or(c.profile, LAN)
	probe := func(_ context.Context, to netip.AddrPort) bool {
		if !c.net.isCrashed(n.addr) {
			c.net.count(func(t *traffic) { t.probes++ })
		}
		if _, ok := c.net.reach(n.addr, to.Addr()); ok && !c.filtered &&
			2*c.net.latency < profile.ProbeTimeout {
			time.Sleep(2 * c.net.latency)
			return true
		}
		time.Sleep(profile.ProbeTimeout)
		return false
	}
	var m *Members
	n.alive = liveness.New(liveness.Options{Self: n.name, Hold: 5 * time.Second, Log: log, Changed: func() {}, Probe: probe,
		ProbeInterval: profile.ProbeInterval,
		Report:        func(node string, born uint64) { m.Alarm(node, born) }, Back: func(node string) { m.Greet(node) },
		Ping: func(node string, addr netip.AddrPort) bool { return m.Ping(node, addr) }})
	m = New(Options{Self: n.name, Bind: fixed(n.addr), Port: simPort, Born: time.Now(), Alone: 40 * time.Second,
		Profile: c.profile, Liveness: n.alive, Log: log, Changed: func([]netip.Addr) {}, transport: ports})
	n.Members = m
	peers := make(map[string][]netip.Addr, len(c.nodes))
	for _, other := range c.nodes {
		if other != n {
			peers[other.name] = []netip.Addr{other.addr}
		}
	}
	m.SetPeers(peers)
	n.alive.Set(peers)
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel, n.done = cancel, make(chan struct{})
	alive, done := n.alive, n.done
	go func() {
		var group errgroup.Group
		group.Go(func() error { return m.Run(ctx) })
		group.Go(func() error { return alive.Run(ctx) })
		_ = group.Wait()
		close(done)
	}()
}

// kill ends the speaker of a node without a word.
func (c *simCluster) kill(n *simNode) {
	c.net.crash(n.addr, true)
	n.gone = true
}

// bury ends what is left of a speaker that was killed, so that it can be started again.
func (c *simCluster) bury(n *simNode) {
	n.stop()
	n.gone = false
	c.net.crash(n.addr, false)
}

// stop ends the speaker of a node as planned.
func (n *simNode) stop() {
	n.cancel()
	<-n.done
}

// crash switches the machine of a node off.
func (c *simCluster) crash(n *simNode) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	n.gone, c.net.down[n.addr] = true, true
}

// part cuts the cluster in two: the first few nodes, and the others.
func (c *simCluster) part(few int) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	for i, n := range c.nodes {
		c.net.side[n.addr] = 0
		if i < few {
			c.net.side[n.addr] = 1
		}
	}
}

// end stops everything, without the words of a leave.
func (c *simCluster) end() {
	for _, n := range c.nodes {
		c.crash(n)
	}
	for _, n := range c.nodes {
		n.cancel()
	}
	for _, n := range c.nodes {
		<-n.done
	}
	time.Sleep(5 * time.Second) // memberlist does not wait for its own calls
}

func (c *simCluster) wait() time.Duration {
	time.Sleep(5 * time.Second)
	return 5 * time.Second
}

// all returns after which time something is so on all nodes whose machines are on, or most if it is not.
func (c *simCluster) all(most time.Duration, is func(n *simNode) bool) time.Duration {
	began, at := time.Now(), 0
	for time.Since(began) < most {
		for at < len(c.nodes) && (c.nodes[at].gone || is(c.nodes[at])) {
			at++
		}
		if at == len(c.nodes) {
			return time.Since(began)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return most
}

// sees reports whether a node has so many members beside it, and a page of each.
func (n *simNode) sees(others int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.live) != others || !n.joined {
		return false
	}
	for name := range n.live {
		if n.book.pages[name] == nil {
			return false
		}
	}
	return true
}

// hears reports whether a node knows what all its members say of the VIPs: that they claim them.
func (n *simNode) hears(vips []netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name := range n.live {
		p := n.book.pages[name]
		if p == nil {
			return false
		}
		for _, vip := range vips {
			if _, ok := p.get(vip); !ok {
				return false
			}
		}
	}
	return true
}

// say has all nodes claim VIPs within so long, each at a time of its own.
func (c *simCluster) say(within time.Duration, vips []netip.Addr) {
	claims := claimsOf(vips)
	for i, n := range c.nodes {
		if !n.gone {
			time.AfterFunc(within*time.Duration(i)/time.Duration(len(c.nodes)), func() { n.Update(claims) })
		}
	}
	time.Sleep(within)
}

func claimsOf(vips []netip.Addr) map[netip.Addr]*plan.Claim {
	claims := map[netip.Addr]*plan.Claim{}
	for _, vip := range vips {
		claims[vip] = &plan.Claim{}
	}
	return claims
}

func simName(i int) string { return fmt.Sprintf("k8s-worker-%04d", i) }
