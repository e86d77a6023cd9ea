package rescue

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// lan is a client and two nodes, each of which delivers the VIPs to a pod of its own.
type lan struct {
	client, a, b *nstest.NS
	macA, macB   string
}

// Addresses of the lan by family.
type addresses struct{ client, a, b, vip string }

var (
	v4 = addresses{"10.0.0.9", "10.0.0.1", "10.0.0.2", "10.0.0.100"}
	v6 = addresses{"fd00::9", "fd00::1", "fd00::2", "fd00::100"}
)

func newLAN(t testing.TB) lan {
	t.Helper()
	client, nodes := newHosts(t, 2)
	return lan{client: client, a: nodes[0], b: nodes[1], macA: macOf(t, nodes[0]), macB: macOf(t, nodes[1])}
}

// newHosts makes a client (10.0.0.9, fd00::9) and nodes (10.0.0.1 and so on, fd00::1 and so on),
// each of which delivers the VIPs to a pod of its own.
func newHosts(t testing.TB, n int) (client *nstest.NS, nodes []*nstest.NS) {
	t.Helper()
	sw := nstest.New(t)
	sw.Run(t, "ip", "link", "add", "lan", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
	sw.Run(t, "ip", "link", "set", "lan", "up")
	plug := func(number int) *nstest.NS {
		host, port := nstest.New(t), fmt.Sprintf("port%d", number)
		nstest.Veth(t, host, "eth0", fmt.Sprintf("10.0.0.%d/24", number), sw, port, "")
		host.Run(t, "ip", "addr", "add", fmt.Sprintf("fd00::%d/64", number), "dev", "eth0", "nodad")
		sw.Run(t, "ip", "link", "set", port, "master", "lan")
		return host
	}
	client = plug(9)
	for i := range n {
		node := plug(i + 1)
		nodes = append(nodes, node)
		deliver(t, node, i, v4.vip, v6.vip)
	}
	return client, nodes
}

// deliver has a node deliver the VIPs to a pod of its own.
func deliver(t testing.TB, node *nstest.NS, i int, vip4, vip6 string) {
	t.Helper()
	pod := nstest.New(t)
	nstest.Veth(t, node, "pod0", fmt.Sprintf("10.1.%d.1/24", i), pod, "eth0", fmt.Sprintf("10.1.%d.2/24", i))
	node.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::1/64", i), "dev", "pod0", "nodad")
	pod.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::2/64", i), "dev", "eth0", "nodad")
	pod.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.1.%d.1", i))
	pod.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("fd01:%d::1", i))
	node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
		"net.ipv4.conf.all.rp_filter=1")
	writeRules(t, node, fmt.Sprintf(`
		table ip test {
			chain pre { type nat hook prerouting priority -101; ip daddr %[2]s tcp dport 80 dnat to 10.1.%[1]d.2:80; }
			chain tidy { type filter hook forward priority -1; ct state invalid drop; }
		}
		table ip6 test {
			chain pre { type nat hook prerouting priority -101; ip6 daddr %[3]s tcp dport 80 dnat to [fd01:%[1]d::2]:80; }
			chain tidy { type filter hook forward priority -1; ct state invalid drop; }
		}`, i, vip4, vip6))
	pod.Serve(t, ":80", func(conn net.Conn) { _, _ = io.Copy(conn, conn) }) // the same byte for each
}

func macOf(t testing.TB, ns *nstest.NS) (mac string) {
	ns.Do(t, func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			mac = i.HardwareAddr.String()
		}
		return err
	})
	return mac
}

func writeRules(t testing.TB, ns *nstest.NS, text string) {
	t.Helper()
	ns.Do(t, func() error {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s", err, out)
		}
		return nil
	})
}

// point lets the client send what is for the VIP to a node, as if that had announced it.
func (l lan) point(t testing.TB, vip, mac string) {
	l.client.Run(t, "ip", "neigh", "replace", vip, "lladdr", mac, "dev", "eth0")
}

func (l lan) dial(t testing.TB, vip string, n int) (conns []net.Conn) {
	t.Helper()
	for range n {
		var conn net.Conn
		l.client.Do(t, func() (err error) {
			for range 10 { // the first packets may meet addresses that are still to be resolved
				if conn, err = net.DialTimeout("tcp", net.JoinHostPort(vip, "80"), 5*time.Second); err == nil {
					break
				}
				time.Sleep(500 * time.Millisecond)
			}
			return err
		})
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
	}
	return conns
}

// patience is far longer than anything takes that happens at all.
const patience = 30 * time.Second

// lost counts connections that do not work any more.
func lost(conns []net.Conn) (n int) {
	for _, conn := range conns {
		if use(conn) != nil {
			n++
		}
	}
	return n
}

// refused counts connections that are answered with a reset.
func refused(conns []net.Conn) (n int) {
	for _, conn := range conns {
		if errors.Is(use(conn), unix.ECONNRESET) {
			n++
		}
	}
	return n
}

// use sends something over a connection and waits for its echo.
func use(conn net.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 1))
	return err
}

// rescuer is an actor for a node.
func rescuer(t testing.TB, node *nstest.NS) *Actor {
	t.Helper()
	return rescuerWith(t, node, true)
}

// rescuerWith is an actor with or without the ring.
func rescuerWith(t testing.TB, node *nstest.NS, ring bool) *Actor {
	t.Helper()
	var kernel Kernel
	node.Do(t, func() (err error) {
		kernel, err = Open(tunnel.DefaultPort)
		return err
	})
	t.Cleanup(kernel.Close)
	return New(Deps{Log: slog.New(slog.DiscardHandler), Kernel: kernel, Families: []lb.Family{lb.IPv4, lb.IPv6},
		Ring: ring, Limit: DefaultLimit})
}

// want lets an actor apply until it has as many targets.
func want(t testing.TB, node *nstest.NS, a *Actor, w Desired, targets int) {
	t.Helper()
	a.set(w)
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		node.Do(t, a.apply)
		if a.Targets() == targets {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d targets, want %d", a.Targets(), targets)
		}
	}
}

func from(pairs ...string) Desired {
	w := Desired{Previous: map[netip.Addr][]netip.Addr{}}
	for i := 0; i < len(pairs); i += 2 {
		w.Previous[netip.MustParseAddr(pairs[i])] = []netip.Addr{netip.MustParseAddr(pairs[i+1])}
	}
	return w
}

func TestContract5ConnectionsSurviveAMove(t *testing.T) {
	l := newLAN(t)
	for _, at := range []addresses{v4, v6} {
		l.point(t, at.vip, l.macA)
		without := l.dial(t, at.vip, 10)
		l.point(t, at.vip, l.macB)
		if n := lost(without); n != len(without) {
			t.Fatalf("%d of %d connections are lost in a move without a rescue: the test shows nothing", n, len(without))
		}
	}
	ra, rb := rescuer(t, l.a), rescuer(t, l.b)
	// Each would move packets to the other, as either node may know a connection.
	want(t, l.a, ra, from(v4.vip, v4.b, v6.vip, v6.b), 2)
	want(t, l.b, rb, from(v4.vip, v4.a, v6.vip, v6.a), 2)
	for _, at := range []addresses{v4, v6} {
		l.point(t, at.vip, l.macA)
		old := l.dial(t, at.vip, 50)
		idle := l.dial(t, at.vip, 5)
		l.point(t, at.vip, l.macB)
		if n := lost(old) + lost(old); n > 0 {
			t.Errorf("%d of %d connections were lost", n, len(old))
		}
		newer := l.dial(t, at.vip, 50)
		l.point(t, at.vip, l.macA) // and back
		if n := lost(old) + lost(newer) + lost(idle); n > 0 {
			t.Errorf("%d connections were lost on the way back", n)
		}
		// Closing works the same way.
		l.point(t, at.vip, l.macB)
		for _, conn := range old {
			conn.Close()
		}
		established := func() string {
			return l.a.Run(t, "conntrack", "-L", "-p", "tcp", "-d", at.vip, "--state", "ESTABLISHED", "-f",
				map[bool]string{true: "ipv4", false: "ipv6"}[at == v4])
		}
		for deadline := time.Now().Add(patience); strings.Count(established(), "ESTABLISHED") > len(idle)+
			10; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("connections that were closed are still there:\n%s", established())
				break
			}
		}
	}
	l.b.Do(t, rb.apply)
	if rb.Packets() < 200 {
		t.Errorf("%d packets are said to have been moved", rb.Packets())
	}
}

// What no node knows is refused, and does not go round between nodes that would each move it to the
// other.
func TestContract9UnknownConnectionsAreRefused(t *testing.T) {
	l := newLAN(t)
	l.point(t, v4.vip, l.macA)
	conns := l.dial(t, v4.vip, 5)
	ra, rb := rescuer(t, l.a), rescuer(t, l.b)
	want(t, l.a, ra, from(v4.vip, v4.b), 1)
	want(t, l.b, rb, from(v4.vip, v4.a), 1)
	l.a.Run(t, "conntrack", "-F")
	// which does not know them either
	writeRules(
		t, l.a, "flush chain ip test pre\nadd rule ip test pre ip daddr 10.0.0.100 tcp dport 80 dnat to 10.1.0.2:81")
	l.point(t, v4.vip, l.macB)
	if n := refused(conns); n != len(conns) {
		t.Errorf("%d of %d connections were refused that no node knows", n, len(conns))
	}
	l.b.Do(t, rb.apply)
	if rb.Packets() > 50 {
		t.Errorf("%d packets were moved for %d connections: they go round", rb.Packets(), len(conns))
	}
}

// Connections to a node that is gone are refused, whether the speaker says so or the kernel finds
// out; the rules go with the last target.
func TestContract9ConnectionsOfADeadNodeAreRefused(t *testing.T) {
	for _, told := range []bool{true, false} {
		l := newLAN(t)
		l.b.Run(t, "sysctl", "-qw", "net.ipv4.neigh.eth0.base_reachable_time_ms=500",
			"net.ipv4.neigh.eth0.delay_first_probe_time=1", "net.ipv4.neigh.eth0.retrans_time_ms=100")
		l.point(t, v4.vip, l.macA)
		conns := l.dial(t, v4.vip, 5)
		rb := rescuer(t, l.b)
		want(t, l.b, rb, from(v4.vip, v4.a), 1)
		l.point(t, v4.vip, l.macB)
		if n := lost(conns); n > 0 {
			t.Fatalf("%d connections were lost", n)
		}
		l.a.Run(t, "ip", "link", "set", "eth0", "down")
		w := from(v4.vip, v4.a)
		if told {
			w = Desired{Gone: w.Previous[netip.MustParseAddr(v4.vip)]}
		}
		want(t, l.b, rb, w, 0)
		if n := lost(conns); n != len(conns) {
			t.Errorf("told %v: %d of %d connections were lost", told, n, len(conns))
		}
		if out := l.b.Run(t, "nft", "list", "tables"); strings.Contains(out, tableName) {
			t.Errorf("left behind:\n%s", out)
		}
	}
}

// A proxy that starts anew, or whose rules another program removes, has them as before; and nft can
// read them.
func TestContract6RulesOutliveTheProxyAndAreRepaired(t *testing.T) {
	l := newLAN(t)
	l.point(t, v4.vip, l.macA)
	conns := l.dial(t, v4.vip, 5)
	want(t, l.b, rescuer(t, l.b), from(v4.vip, v4.a, v6.vip, v6.a), 2)
	l.point(t, v4.vip, l.macB)
	if n := lost(conns); n > 0 {
		t.Fatalf("%d connections were lost", n)
	}
	handles := func() string {
		return l.b.Run(t, "nft", "-a", "list", "chain", "ip", tableName, chainStrays) + l.b.Run(t, "nft", "-a", "list",
			"chain", "ip6", tableName, chainStrays)
	}
	right := handles()
	want(t, l.b, rescuer(t, l.b), from(v4.vip, v4.a, v6.vip, v6.a), 2)
	if now := handles(); now != right {
		t.Errorf("what was right was written anew:\n%s", now)
	}
	// The next one has a speaker that does not know where the VIP has been.
	next := rescuer(t, l.b)
	want(t, l.b, next, Desired{}, 2)
	if n := lost(conns); n > 0 {
		t.Errorf("%d connections were lost with a new proxy", n)
	}
	time.Sleep(200 * time.Millisecond) // the last of their packets, delayed acknowledgements, are through
	for _, family := range []string{"ip", "ip6"} {
		text := l.b.Run(t, "nft", "list", "table", family, tableName)
		l.b.Run(t, "nft", "delete", "table", family, tableName)
		writeRules(t, l.b, text)
		l.b.Run(t, "nft", "flush", "chain", family, tableName, chainStrays)
	}
	want(t, l.b, next, from(v4.vip, v4.a, v6.vip, v6.a), 2)
	if n := lost(conns); n > 0 {
		t.Errorf("%d connections were lost after a repair", n)
	}
	l.b.Do(t, Cleanup)
	l.b.Do(t, Cleanup)
	if out := l.b.Run(t, "nft", "list", "tables"); strings.Contains(out, tableName) {
		t.Errorf("left behind:\n%s", out)
	}
}

// A proxy that starts while the kernel knows nothing of the nodes, as after a link was away, leaves what it finds as it
// is until they can have answered: without rules, pods would reset what they do not know.
func TestContract5AProxyThatStartsWaitsForItsNodes(t *testing.T) {
	r := newRack(t, 2)
	node, w := r.nodes[0], around(1)
	r.set(t, 0, w)
	next := rescuer(t, node)
	next.set(w)
	node.Run(t, "ip", "neigh", "flush", "all")
	for i := 0; next.Targets() < 2; i++ {
		if i > 200 {
			t.Fatalf("%d targets", next.Targets())
		}
		node.Do(t, next.apply)
		for _, at := range []addresses{v4, v6} {
			out := node.Run(t, "nft", "list", "set", nftFamily(headerOf(lb.FamilyOf(addr(at.vip)))), tableName, setRing)
			if !strings.Contains(out, at.vip) {
				t.Fatalf("after look %d %s is not on a ring any more", i, at.vip)
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// A node that knows an old connection of the same ports does not keep what belongs to the one of
// now, which the previous owner knows.
func TestContract5AnOldConnectionIsNotTakenForAMovedOne(t *testing.T) {
	l := newLAN(t)
	ra, rb := rescuer(t, l.a), rescuer(t, l.b)
	want(t, l.a, ra, from(v4.vip, v4.b, v6.vip, v6.b), 2)
	want(t, l.b, rb, from(v4.vip, v4.a, v6.vip, v6.a), 2)
	for _, at := range []addresses{v4, v6} {
		l.point(t, at.vip, l.macB)
		reset(t, l.dialFrom(t, 1080, at.vip))
		l.point(t, at.vip, l.macA)
		conn := l.dialFrom(t, 1080, at.vip)
		l.point(t, at.vip, l.macB)
		if n := lost([]net.Conn{conn}); n > 0 {
			t.Errorf("%s: the connection was lost", at.vip)
		}
		// The node that does not know it does not overrule the one that may.
		l.a.Run(t, "conntrack", "-F")
		l.wantNoReset(t, conn)
		reset(t, conn)
	}
}

// dialFrom opens a connection from a port, and makes sure that it works. Its sequence numbers are
// out of the window of one from the same port before: where they begin advances by one each 64 ns,
// and that window has 64 KiB.
func (l lan) dialFrom(t testing.TB, port int, vip string) net.Conn {
	t.Helper()
	time.Sleep(50 * time.Millisecond)
	var conn net.Conn
	l.client.Do(t, func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}, Timeout: patience}
		conn, err = d.Dial("tcp", net.JoinHostPort(vip, "80"))
		return err
	})
	if n := lost([]net.Conn{conn}); n > 0 {
		t.Fatalf("a new connection to %s was lost", vip)
	}
	return conn
}

// wantNoReset sends something over a connection and fails the test if it is answered with a reset.
func (l lan) wantNoReset(t testing.TB, conn net.Conn) {
	t.Helper()
	resets := l.resets(t)
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if n := l.resets(t) - resets; n != 0 {
		t.Errorf("%s: %d resets of a connection that a node may know", conn.RemoteAddr(), n)
	}
}

// reset ends a connection with a reset, after which its port is free.
func reset(t testing.TB, conn net.Conn) {
	t.Helper()
	if err := conn.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// TestContract11ManyAddressesAreWritten has more VIPs than a socket's buffer takes in one
// transaction, all of which are in the kernel in the end, and what was remembered before as well.
func TestContract11ManyAddressesAreWritten(t *testing.T) {
	r := newRack(t, 3)
	node, actor := r.nodes[0], r.actors[0]
	// The buffer is the kernel's default, as where it must not be larger.
	fd := int(reflect.ValueOf(actor.kernel.(Kernel).conn).Elem().FieldByName("fd").Int())
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 106_496); err != nil {
		t.Fatal(err)
	}
	r.set(t, 0, around(1, 2))
	w := around(1, 2)
	few := len(w.Ring)
	for i := range 8000 {
		b := []byte{byte(i >> 8), byte(i)}
		w.Ring[netip.AddrFrom4([4]byte{172, 20, b[0], b[1]})] = w.Ring[addr(v4.vip)]
		w.Ring[netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 14: b[0], 15: b[1]})] = w.Ring[addr(v6.vip)]
	}
	count := func(what string, want int) {
		t.Helper()
		for family, vip := range map[lb.Family]string{lb.IPv4: v4.vip, lb.IPv6: v6.vip} {
			have, err := actor.kernel.load(family, true)
			if err != nil {
				t.Fatal(err)
			}
			next := have.table.targets[w.Ring[addr(vip)][0]]
			if len(have.table.ring) != want || len(next) != want {
				t.Errorf("%s, %s: %d VIPs on rings, %d to the next node, want %d", what, family, len(have.table.ring), len(next),
					want)
			}
		}
	}
	apply := func() error { return actor.apply() }
	node.Run(t, "nft", "add", "element", "ip", tableName, name(prefixFlows, w.Ring[addr(v4.vip)][0]),
		"{ 10.0.0.9 . 1 . 10.0.0.100 . 80 }")
	actor.set(w)
	node.Do(t, apply)
	count("by a look", few/2+8000)
	actor.set(around(1, 2))
	node.Do(t, func() error {
		if !actor.adjust() {
			t.Error("taking them out needs a look")
		}
		return nil
	})
	count("taken out", few/2)
	actor.set(w)
	node.Do(t, func() error {
		if !actor.adjust() {
			t.Error("bringing them back needs a look")
		}
		return nil
	})
	count("brought back", few/2+8000)
	// A successor finds it as it is; another one finds sets that are not ours in the place of ours.
	for what, spoil := range map[string]func(){
		"a successor": func() {},
		"foreign sets": func() {
			for _, chain := range []string{chainStrays, chainErrors} {
				node.Run(t, "nft", "flush", "chain", "ip", tableName, chain)
			}
			node.Run(t, "nft", "delete", "set", "ip", tableName, setRing)
			node.Run(t, "nft", "add", "set", "ip", tableName, setRing, "{ type ether_addr; }")
		},
	} {
		spoil()
		actor = rescuer(t, node)
		actor.set(w)
		node.Do(t, apply)
		count(what, few/2+8000)
	}
	if out := node.Run(t, "nft", "list", "table", "ip", tableName); !strings.Contains(out,
		"10.0.0.9 . 1 . 10.0.0.100 . 80") {
		t.Error("a connection that was remembered is forgotten")
	}
}

// TestContract6ConnectionsOutliveAnotherRelease checks that a proxy whose rules are others than its
// predecessor's keeps what is remembered for nodes that no address aims at any more.
func TestContract6ConnectionsOutliveAnotherRelease(t *testing.T) {
	r := newRack(t, 3)
	node := r.nodes[0]
	w := around(1, 2)
	r.set(t, 0, w)
	aimed := w.Ring[addr(v4.vip)][0]
	const flow = "10.0.0.9 . 1 . 10.0.0.100 . 80"
	node.Run(t, "nft", "add", "element", "ip", tableName, name(prefixFlows, aimed), "{ "+flow+" }")
	for _, chain := range []string{name(prefixTo, aimed), name(prefixNew, aimed)} {
		node.Run(t, "nft", "add", "rule", "ip", tableName, chain, "counter")
	}
	actor := rescuer(t, node)
	for range 2 {
		actor.set(around(2))
		node.Do(t, func() error { return actor.apply() })
	}
	have, err := actor.kernel.load(lb.IPv4, true)
	if err != nil {
		t.Fatal(err)
	}
	right := slices.Equal(have.moving[aimed], headerOf(lb.IPv4).moving(&have.table, aimed))
	if vips, kept := have.table.targets[aimed]; !kept || len(vips) > 0 || !right {
		t.Errorf("%s is kept: %t, with VIPs %v; its rules are right: %t", aimed, kept, vips, right)
	}
	if out := node.Run(t, "nft", "list", "set", "ip", tableName, name(prefixFlows, aimed)); !strings.Contains(out, flow) {
		t.Errorf("a connection that was remembered is forgotten:\n%s", out)
	}
}

// TestContract11ManyTargetsAreWritten has as many targets as there may be, all of which come and go
// within what a socket's buffer takes where it must not be larger than the kernel's default, as in
// user namespaces.
func TestContract11ManyTargetsAreWritten(t *testing.T) {
	node := nstest.New(t)
	var k Kernel
	node.Do(t, func() (err error) {
		k, err = Open(0)
		return err
	})
	t.Cleanup(k.Close)
	fd := int(reflect.ValueOf(k.conn).Elem().FieldByName("fd").Int())
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 106_496); err != nil { // it doubles that
		t.Fatal(err)
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		node := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }
		vip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 20, byte(i >> 8), byte(i)}) }
		if family == lb.IPv6 {
			node = func(i int) netip.Addr { return netip.AddrFrom16([16]byte{0xfd, 15: byte(i)}) }
			vip = func(i int) netip.Addr { return netip.AddrFrom16([16]byte{0x20, 1, 14: byte(i >> 8), 15: byte(i)}) }
		}
		all, j := map[netip.Addr]Origins{}, judge{neighbors: map[netip.Addr]links.Neighbor{}}
		for i := range maxTargets + maxDirect {
			j.neighbors[node(i)] = there(byte(i))
		}
		for i := range maxTargets + maxDirect { // with rings of each length
			var ring []netip.Addr
			for n := range i%maxHops + 1 {
				ring = append(ring, node((i+n)%len(j.neighbors)))
			}
			all[vip(i)] = Origins{Ring: ring, Direct: i >= maxTargets}
		}
		full := choose(family, all, j, nil)
		if len(full.targets) != maxTargets+maxDirect {
			t.Fatalf("%d targets", len(full.targets))
		}
		few := choose(family, map[netip.Addr]Origins{vip(0): all[vip(0)]}, j, nil)
		for _, want := range []*table{few, full, few} {
			have, err := k.load(family, true)
			if err != nil {
				t.Fatal(err)
			}
			if err := k.write(family, want, have); err != nil {
				t.Fatalf("%s: %v", family, err)
			}
			if have, err = k.load(family, true); err != nil {
				t.Fatal(err)
			}
			if !same(family, have, want) || !have.table.equal(want) {
				t.Errorf("%s: the kernel has other rules than those of %d targets", family, len(want.targets))
			}
		}
	}
}
