package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// attack is what somebody does at rate for a while.
type attack struct {
	name string
	// prepare returns what is done again and again, with the number of the time. It may be nil: then run does all.
	prepare func(t *testing.T, a *attacker) func(i int) error
	run     func(t *testing.T, a *attacker)
	// events is how many frames each does.
	events int
}

// attacker is where attacks come from: the host on the LAN, which is a router and a node too if it has to be.
type attacker struct {
	l      *lab.Lab
	wire   *wire
	macs   []net.HardwareAddr // of the nodes
	owner  net.HardwareAddr   // of the node that answers for the bystander
	record *recording
}

// attackRate is the most frames in a second, and attackLasts how long each attack takes: LANDFALL_ATTACK says
// otherwise, such as 10s.
const (
	attackRate  = 25_000
	attackLasts = 3 * time.Second
)

// cpuOfAttack is how much processor time an attack may cost each agent for each frame, on top of a share of the time
// that it takes: as much as reading and leaving a frame, several times over.
const (
	cpuOfFrame  = 100 * time.Microsecond
	cpuMeantime = 0.5
)

// victims are the addresses that are attacked. The bystanders have others.
var (
	victimVIP  = netip.MustParseAddr("172.26.236.181")
	victimVIP6 = lab.Twin(victimVIP)
)

// TestContract11AttacksCostBystandersNothing has a machine of the LAN, a router and who has recorded gossip send what
// they can, at rate. Meanwhile clients use a Service over L2 and one over BGP, which lose nothing; the nodes that
// answer stay the same; and no agent ends, grows or uses processor time without a bound. It runs alone: the floods
// would take the processors from other labs.
func TestContract11AttacksCostBystandersNothing(t *testing.T) {
	l := startCatalogue(t)
	victim := lab.Service{Namespace: "default", Name: "victim", App: "my-nginx", Type: "LoadBalancer",
		Ports: []lab.Port{{Port: 80}}}
	if err := l.AddService(t.Context(), victim); err != nil {
		t.Fatal(err)
	}
	wantAddresses(t, l, "victim", victimVIP.String())
	a := &attacker{l: l, wire: openWire(t, l, hostileHost)}
	for _, n := range l.Cluster().Nodes {
		a.macs = append(a.macs, nodeMAC(t, l, n.Name))
	}
	a.record = recordGossip(t, l)
	owner := answerer(t, l, seedVIP.Addr())
	a.owner = nodeMAC(t, l, owner)
	began := agentsNow(t, l)
	bystanders := startBystanders(t, l)
	lasts := duration(t, "LANDFALL_ATTACK", attackLasts)
	for _, row := range attacks() {
		t.Run(row.name, func(t *testing.T) {
			before := processorTime(t, l)
			from := time.Now()
			n := a.launch(t, row, lasts)
			took := time.Since(from)
			t.Logf("%d frames in %v: %.0f a second", n, took.Round(time.Millisecond), float64(n)/took.Seconds())
			allowed := time.Duration(n)*cpuOfFrame + time.Duration(cpuMeantime*float64(took)) + time.Second
			for name, used := range processorTime(t, l) {
				if used -= before[name]; used > allowed {
					t.Errorf("%s has used %v of processor time, want at most %v", name, used, allowed)
				} else if used > took/10 {
					t.Logf("%s has used %v of processor time", name, used)
				}
			}
		})
	}
	if now := answerer(t, l, seedVIP.Addr()); now != owner {
		t.Errorf("%s answers for %s, and %s did", now, seedVIP.Addr(), owner)
	}
	bystanders.wantUnbroken(t)
	wantUnharmed(t, l, began)
}

// lateAnswer is how a probe counts an answer that came after the first packet was sent again.
const lateAnswer = "late, packets were sent again"

// wantUnbroken is wantLossless, but that packets may be sent again: one kernel carries the whole LAN, and drops some of
// a flood before it looks at them.
func (b *bystanders) wantUnbroken(t *testing.T) {
	t.Helper()
	for _, p := range b.probes {
		report := p.Stop()
		t.Logf("new connections: %s", report)
		if late := report.Failures[lateAnswer]; report.Failed() > late || late > report.Sent/20 {
			t.Errorf("new connections were lost: %s", report)
		}
	}
	for _, f := range b.flows {
		if lost := f.stop(); lost > 0 {
			t.Errorf("%d long-lived connections were lost", lost)
		}
	}
}

// launch runs an attack and returns how many frames it was.
func (a *attacker) launch(t *testing.T, row attack, lasts time.Duration) (n int) {
	if row.run != nil {
		row.run(t, a)
		return row.events
	}
	do := row.prepare(t, a)
	began := time.Now()
	for time.Since(began) < lasts {
		if due := time.Duration(n) * time.Second / attackRate; time.Since(began) < due {
			time.Sleep(time.Millisecond)
			continue
		}
		_ = do(n) // a full queue, say: the next one follows
		n++
	}
	return n
}

// processorTime returns how much each speaker and proxy has used.
func processorTime(t *testing.T, l *lab.Lab) map[string]time.Duration {
	t.Helper()
	used := map[string]time.Duration{}
	for _, program := range []string{"speaker", "proxy"} {
		for _, a := range l.Agents(program) {
			used[a.Name()] = time.Duration(counter(t, a, "process_cpu_seconds_total") * float64(time.Second))
		}
	}
	return used
}

// turns sends frames in turn.
func turns(frames func(a *attacker) [][]byte) func(*testing.T, *attacker) func(int) error {
	return func(_ *testing.T, a *attacker) func(int) error {
		all := frames(a)
		return func(i int) error { return a.wire.send(all[i%len(all)]) }
	}
}

func attacks() []attack {
	return slices.Concat(neighborAttacks(), gossipAttacks(), routerAttacks())
}

// made returns a MAC address that no device has.
func made(i int) net.HardwareAddr {
	return net.HardwareAddr{2, 0xad, byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}
}

func neighborAttacks() []attack {
	return []attack{
		{name: "malformed ARP", prepare: turns(func(a *attacker) (frames [][]byte) {
			for _, row := range brokenARP(a.wire.own, a.owner) {
				copy(row.frame, broadcast)
				frames = append(frames, row.frame)
			}
			return frames
		})},
		{name: "malformed NDP", prepare: turns(func(a *attacker) (frames [][]byte) {
			for _, row := range brokenNDP(a.wire.own, a.owner, victimVIP6) {
				copy(row.frame[6:], a.wire.own) // with a node's address the switch would send us what is for the node
				frames = append(frames, row.frame)
			}
			return frames
		})},
		{name: "router advertisements", prepare: turns(func(a *attacker) (frames [][]byte) {
			for i := range 256 {
				frames = append(frames, advertisementOfRouter(made(i), byte(i)))
			}
			return frames
		})},
		{name: "probes for every address", prepare: turns(func(a *attacker) (frames [][]byte) {
			for i := range 256 {
				target := netip.AddrFrom4([4]byte{172, 26, 236, byte(181 + i%9)}) // of the pool, but the bystander's
				frames = append(frames, ethernetFrame(broadcast, made(i), 0x0806,
					arpPayload(made(i), netip.IPv4Unspecified(), target, nil)))
			}
			return frames
		})},
		{name: "announcements in the name of other nodes", prepare: turns(func(a *attacker) (frames [][]byte) {
			for _, mac := range a.macs { // from the attacker's own port, or the switch would send it what is for the nodes
				frames = append(frames, ethernetFrame(broadcast, a.wire.own, 0x0806,
					arpPayload(mac, victimVIP, victimVIP, nil)))
			}
			return frames
		})},
		{name: "announcements of made-up devices", prepare: turns(func(a *attacker) (frames [][]byte) {
			for i := range 1024 {
				frames = append(frames, ethernetFrame(broadcast, made(i), 0x0806,
					arpPayload(made(i), victimVIP, victimVIP, nil)))
			}
			return frames
		})},
		{name: "SYNs to the port of gossip", prepare: turns(func(a *attacker) (frames [][]byte) {
			target := netip.AddrPortFrom(netip.MustParseAddr("172.26.236.177"), gossipPort)
			node := a.macs[1]
			for port := range uint16(4096) {
				frames = append(frames, ethernetFrame(node, a.wire.own, 0x0800, ipPacket(protoTCP, target.Addr(),
					tcpSegment(hostileIP, target, 20000+port, syn, nil), nil)))
			}
			return frames
		})},
		{name: "echo requests", prepare: turns(func(a *attacker) (frames [][]byte) {
			for id := range uint16(256) {
				frames = append(frames, ethernetFrame(a.macs[1], a.wire.own, 0x0800, ipPacket(protoICMP,
					netip.MustParseAddr("172.26.236.177"), icmpMessage(8, 0, id, make([]byte, 56)), nil)))
			}
			return frames
		})},
	}
}

// advertisementOfRouter returns a router advertisement (RFC 4861 section 4.2) of one that is no default router, so
// that kernels go on as they are.
func advertisementOfRouter(from net.HardwareAddr, last byte) []byte {
	all := netip.MustParseAddr("ff02::1")
	source := netip.AddrFrom16([16]byte{0xfe, 0x80, 15: last})
	body := make([]byte, 16)
	body[0], body[4] = 134, 64
	ip := make([]byte, 40)
	ip[0], ip[6], ip[7] = 6<<4, 58, 255
	binary.BigEndian.PutUint16(ip[4:], uint16(len(body)))
	copy(ip[8:], source.AsSlice())
	copy(ip[24:], all.AsSlice())
	binary.BigEndian.PutUint16(body[2:], checksum6(ip, body))
	return ethernetFrame(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, from, 0x86dd, append(ip, body...))
}

// recording is gossip as it passed on the wire: packets, and what each connection said.
type recording struct {
	packets [][]byte
	streams [][]byte
}

// recordGossip records what a speaker says while it stops and starts.
func recordGossip(t *testing.T, l *lab.Lab) *recording {
	t.Helper()
	const node = "k8s-worker-178"
	w := openWire(t, l, node)
	var mu sync.Mutex
	r, streams := &recording{}, map[uint16]*bytes.Buffer{}
	go func() {
		b := make([]byte, 1<<16+14) // a segment as the kernel offloads it
		for {
			n, _, err := w.conn.ReadFrom(b)
			if err != nil {
				return
			}
			mu.Lock()
			r.take(bytes.Clone(b[:n]), streams)
			mu.Unlock()
		}
	}()
	a := l.Agent("speaker", node)
	if err := a.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	if err := a.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "packets and connections are recorded", func() error {
		mu.Lock()
		defer mu.Unlock()
		if len(r.packets) < 20 || len(streams) == 0 {
			return fmt.Errorf("%d packets, %d connections", len(r.packets), len(streams))
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	copied := &recording{packets: slices.Clone(r.packets)}
	for _, s := range streams {
		copied.streams = append(copied.streams, bytes.Clone(s.Bytes()))
	}
	return copied
}

// take notes what is gossip of a frame.
func (r *recording) take(frame []byte, streams map[uint16]*bytes.Buffer) {
	if len(frame) < 14+20+20 || frame[12] != 8 || frame[13] != 0 {
		return
	}
	ip := frame[14:]
	header, total := int(ip[0]&15)*4, int(binary.BigEndian.Uint16(ip[2:]))
	if total > len(ip) || header+8 > total {
		return
	}
	body := ip[header:total]
	from, to := binary.BigEndian.Uint16(body), binary.BigEndian.Uint16(body[2:])
	switch {
	case ip[9] == protoUDP && to == gossipPort:
		r.packets = append(r.packets, body[8:])
	case ip[9] == protoTCP && to == gossipPort && len(body) >= 20:
		if said := body[int(body[12]>>4)*4:]; len(said) > 0 {
			if streams[from] == nil {
				streams[from] = &bytes.Buffer{}
			}
			streams[from].Write(said)
		}
	}
}

func gossipAttacks() []attack {
	target := netip.AddrPortFrom(netip.MustParseAddr("172.26.236.177"), gossipPort).String()
	return []attack{
		{name: "recorded gossip", prepare: func(t *testing.T, a *attacker) func(int) error {
			conn, err := a.l.Dial(t.Context(), hostileHost, "udp", target)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			return func(i int) error {
				_, err := conn.Write(a.record.packets[i%len(a.record.packets)])
				return err
			}
		}},
		{name: "recorded exchanges of states", events: 200, run: func(t *testing.T, a *attacker) {
			for i := range 200 {
				conn, err := a.l.Dial(t.Context(), hostileHost, "tcp", target)
				if err != nil {
					continue
				}
				_ = conn.SetDeadline(time.Now().Add(time.Second))
				_, _ = conn.Write(a.record.streams[i%len(a.record.streams)])
				_, _ = io.Copy(io.Discard, io.LimitReader(conn, 1))
				conn.Close()
			}
		}},
		{name: "noise for gossip", prepare: func(t *testing.T, a *attacker) func(int) error {
			conn, err := a.l.Dial(t.Context(), hostileHost, "udp", target)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			noise := label("landfall", bytes.Repeat([]byte{1}, 200))
			return func(int) error {
				_, err := conn.Write(noise)
				return err
			}
		}},
	}
}

func routerAttacks() []attack {
	session := func(t *testing.T, a *attacker, send func(conn net.Conn) error) {
		conn := hostilePeers()[0].keep(t, a.l)
		defer conn.Close()
		if err := conn.SetWriteDeadline(time.Now().Add(3 * time.Second)); err != nil {
			t.Fatal(err)
		}
		// Who is read at a pace does not get rid of all.
		if err := send(conn); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Logf("the speaker takes no more: %v", err)
		}
	}
	full := attributesOf(originIGP, asPath, nextHopOf)
	return []attack{
		{name: "20,000 wishes for routes", events: 20000, run: func(t *testing.T, a *attacker) {
			session(t, a, func(conn net.Conn) error {
				_, err := conn.Write(bytes.Repeat(bgpMessage(bgpRefresh, []byte{0, 1, 0, 1}), 20000))
				return err
			})
		}},
		{name: "100,000 routes", events: 100_000, run: func(t *testing.T, a *attacker) {
			session(t, a, func(conn net.Conn) error {
				var all []byte
				for i := range 500 {
					var routes []byte
					for k := range 200 {
						n := i*200 + k
						routes = append(routes, 32, 100, byte(64+n>>16), byte(n>>8), byte(n))
					}
					all = append(all, bgpUpdateOf(nil, full, routes)...)
				}
				_, err := conn.Write(all)
				return err
			})
		}},
		{name: "a route that flaps", events: 50_000, run: func(t *testing.T, a *attacker) {
			flap := append(bgpUpdateOf(nil, full, hostileNLRI), bgpUpdateOf(hostileNLRI, nil, nil)...)
			session(t, a, func(conn net.Conn) error {
				_, err := conn.Write(bytes.Repeat(flap, 25_000))
				return err
			})
		}},
		{name: "a session that flaps", events: 30, run: func(t *testing.T, a *attacker) {
			for range 30 {
				conn, err := a.l.Dial(t.Context(), hostileHost, "tcp", "172.26.236.177:179")
				if err != nil {
					continue
				}
				_ = conn.SetDeadline(time.Now().Add(100 * time.Millisecond))
				_ = hostilePeers()[0].reach(conn, atEstablished)
				conn.Close()
			}
		}},
	}
}
