package rescue

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// Addresses of the racks: of node i those of rack i, behind a router.
var (
	far4 = addresses{vip: "203.0.113.100", client: "10.9.0.2"}
	far6 = addresses{vip: "2001:db8:ffff::100", client: "fd09::2"}
)

func rackAddress(i int) string  { return fmt.Sprintf("10.2.%d.1", i) }
func rackAddress6(i int) string { return fmt.Sprintf("fd02:%d::1", i) }

// racks is a client and nodes, each of them behind the same router.
type racks struct {
	rack
	router *nstest.NS
	turn   func(node int) // the router to a node, for the VIPs
}

func newRacks(t *testing.T, n int) *racks {
	t.Helper()
	router := nstest.New(t)
	r := &racks{router: router}
	router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	plug := func(port, at, gateway, at6, gateway6 string) *nstest.NS {
		host := nstest.New(t)
		nstest.Veth(t, host, "eth0", at+"/24", router, port, gateway+"/24")
		host.Run(t, "ip", "addr", "add", at6+"/64", "dev", "eth0", "nodad")
		router.Run(t, "ip", "addr", "add", gateway6+"/64", "dev", port, "nodad")
		host.Run(t, "ip", "route", "add", "default", "via", gateway)
		host.Run(t, "ip", "route", "add", "default", "via", gateway6)
		return host
	}
	r.client = plug("far0", far4.client, "10.9.0.1", far6.client, "fd09::1")
	for i := range n {
		gateway, gateway6 := fmt.Sprintf("10.2.%d.254", i), fmt.Sprintf("fd02:%d::fe", i)
		node := plug(fmt.Sprintf("rack%d", i), rackAddress(i), gateway, rackAddress6(i), gateway6)
		deliver(t, node, i, far4.vip, far6.vip)
		r.nodes, r.actors = append(r.nodes, node), append(r.actors, rackRescuer(t, node))
	}
	r.turn = func(node int) {
		router.Run(t, "ip", "route", "replace", far4.vip, "via", rackAddress(node))
		router.Run(t, "ip", "route", "replace", far6.vip, "via", rackAddress6(node))
	}
	return r
}

// rackRescuer is an actor that may set rp_filter, which is strict on all nodes.
func rackRescuer(t *testing.T, node *nstest.NS) *Actor {
	t.Helper()
	a := rescuer(t, node)
	a.parameters, a.warn = parameters, func(text string) { t.Error(text) }
	return a
}

// meet tells each node's actor of all nodes, and of the ring of all others.
func (r *racks) meet(t *testing.T) {
	t.Helper()
	for i := range r.nodes {
		w := Desired{Ring: map[netip.Addr][]netip.Addr{}}
		var others []netip.Addr
		for k := 1; k < len(r.nodes); k++ {
			next := (i + k) % len(r.nodes)
			w.Ring[addr(far4.vip)] = append(w.Ring[addr(far4.vip)], addr(rackAddress(next)))
			w.Ring[addr(far6.vip)] = append(w.Ring[addr(far6.vip)], addr(rackAddress6(next)))
			others = append(others, addr(rackAddress(next)), addr(rackAddress6(next)))
		}
		r.actors[i].SetNodes([]netip.Addr{addr(rackAddress(i)), addr(rackAddress6(i))}, others)
		r.set(t, i, w)
	}
}

// Connections are found in racks behind routers, whichever node a router turns to; also with large
// packets, and without a packet that disappears without a word.
func TestContract5ConnectionsAreFoundInOtherRacks(t *testing.T) {
	r := newRacks(t, 4)
	point := r.turn
	point(3)
	conns := r.dial(t, far4.vip, 5)
	point(0)
	if n := lost(conns); n != len(conns) {
		t.Fatalf("%d of %d connections are lost without a ring: the test shows nothing", n, len(conns))
	}
	point(0)
	old := slices.Concat(r.dial(t, far4.vip, 2), r.dial(t, far6.vip, 2))
	r.meet(t)
	held := make([][]net.Conn, len(r.nodes))
	for i := range r.nodes {
		point(i)
		held[i] = slices.Concat(r.dial(t, far4.vip, 5), r.dial(t, far6.vip, 5))
	}
	for to := range r.nodes {
		point(to)
		for from, conns := range held {
			if n := lost(conns) + lost(conns); n > 0 {
				t.Errorf("%d connections of node %d were lost at node %d", n, from, to)
			}
		}
	}
	for _, conn := range held[0] { // whose clients know what fits into the tunnel
		size, err := segment(conn)
		if bound := 1430 - 60; err != nil || strings.Contains(conn.RemoteAddr().String(), "[") == (size > bound) {
			t.Errorf("to %s go segments of %d bytes: %v", conn.RemoteAddr(), size, err)
		}
	}
	for to, conns := range map[int][]net.Conn{1: held[3], 3: old} { // which old ones do not
		point(to)
		for _, conn := range conns {
			if err := echo(conn, 300_000); err != nil {
				t.Errorf("of much data to %s by way of node %d: %v", conn.RemoteAddr(), to, err)
			}
		}
	}
}

// segment returns how much a packet of a connection has at most.
func segment(conn net.Conn) (size int, err error) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	err = errors.Join(err, raw.Control(func(fd uintptr) {
		size, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
	}))
	return size, err
}

// echo sends much and waits until it has come back.
func echo(conn net.Conn, size int) error {
	_ = conn.SetDeadline(time.Now().Add(patience))
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(make([]byte, size))
		sent <- err
	}()
	buffer := make([]byte, 64<<10)
	for got := 0; got < size; {
		n, err := conn.Read(buffer)
		if got += n; err != nil {
			return fmt.Errorf("after %d bytes: %w", got, err)
		}
	}
	return <-sent
}

// The tunnel takes no packet that is not from a node, and none that no node moves.
func TestContract11TheTunnelRefusesStrangers(t *testing.T) {
	r := newRacks(t, 3)
	r.meet(t)
	refused := func() uint64 {
		r.nodes[0].Do(t, r.actors[0].apply)
		return r.actors[0].Refused()
	}
	if n := refused(); n != 0 {
		t.Errorf("%d packets were refused before any came", n)
	}
	// A packet out of the air: what it contains does not matter.
	marked := func(from *nstest.NS, ttl, flags byte, to string) {
		t.Helper()
		from.Do(t, func() error {
			conn, err := net.Dial("udp", net.JoinHostPort(rackAddress(0), strconv.Itoa(tunnel.DefaultPort)))
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write(frame(ttl, flags, addr(to)))
			return err
		})
	}
	send := func(from *nstest.NS, flags byte, to string) { t.Helper(); marked(from, 210, flags, to) }
	const pod, syn, ack = "10.1.0.2", 2, 16
	send(r.client, ack, far4.vip)
	wait := func(n uint64, what string) {
		t.Helper()
		for deadline := time.Now().Add(patience); refused() < n; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d packets were refused, want %d", what, refused(), n)
			}
		}
	}
	wait(1, "from a stranger")
	send(r.nodes[1], syn, far4.vip)
	wait(2, "a new connection, from a node")
	// What nodes do move gets to VIPs only. The second packet shows that the first has been looked at.
	writeRules(t, r.nodes[0], "table ip seen { chain to { type filter hook forward priority -2; ip daddr "+pod+
		" tcp flags & (syn|ack) != 0 counter; }; }")
	seen := func() bool {
		return !strings.Contains(r.nodes[0].Run(t, "nft", "list", "table", "ip", "seen"), "packets 0 ")
	}
	send(r.nodes[1], ack, pod)
	send(r.nodes[1], syn, pod)
	wait(3, "to a pod")
	if seen() {
		t.Error("a packet out of the tunnel got to a pod that it was addressed to")
	}
	// Neither does what nodes hand over for direct forwarding, a mark that a stranger may set too.
	marked(r.client, lb.HandedTTL, syn, far4.vip)
	wait(4, "handed over by a stranger")
	marked(r.nodes[1], lb.HandedTTL, syn, pod)
	marked(r.nodes[1], lb.HandedTTL-1, syn, far4.vip)
	wait(5, "come back, for an address that is not forwarded directly")
	if seen() {
		t.Error("a packet that was handed over got to a pod that it was addressed to")
	}
}

// frame is VXLAN with a TCP packet to node 0, from node 1.
func frame(ttl, flags byte, dest netip.Addr) []byte {
	to, from := tunnel.MAC(addr(rackAddress(0))), tunnel.MAC(addr(rackAddress(1)))
	vxlan := []byte{0x08, 0, 0, 0, 0, 7948 >> 8, 7948 & 255, 0}
	ethernet := slices.Concat(to[:], from[:], []byte{0x08, 0x00})
	ip := append([]byte{0x45, 0, 0, 40, 0, 0, 0x40, 0, ttl, 6, 0, 0, 10, 9, 0, 2}, dest.AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(ip[i])<<8 | uint32(ip[i+1])
	}
	sum = sum&0xffff + sum>>16
	sum = ^(sum&0xffff + sum>>16)
	ip[10], ip[11] = byte(sum>>8), byte(sum)
	tcp := []byte{4, 0, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 255, 255, 0, 0, 0, 0}
	return slices.Concat(vxlan, ethernet, ip, tcp)
}

// The tunnel is there only while a ring has a node behind a router, another program's interface
// stays, and what another program removes is made anew.
func TestContract6TheTunnelIsRepairedAndLeavesNothing(t *testing.T) {
	r := newRacks(t, 3)
	point := r.turn
	r.meet(t)
	check := func(what string) {
		t.Helper()
		point(2)
		conns := slices.Concat(r.dial(t, far4.vip, 2), r.dial(t, far6.vip, 2))
		point(0)
		if n := lost(conns); n > 0 {
			t.Errorf("%s: %d connections were lost", what, n)
		}
	}
	check("at first")
	node := r.nodes[0]
	broadcasts := func() {
		t.Helper()
		if way := node.Run(t, "ip", "route", "get", "255.255.255.255"); !strings.Contains(way, "dev eth0") {
			t.Errorf("what a program broadcasts leaves by %s", way)
		}
	}
	broadcasts()
	listing := func() string {
		return node.Run(t, "ip", "-o", "link", "show", "type", "vxlan") + node.Run(t, "nft", "-a", "list", "ruleset")
	}
	for _, table := range []string{tableName, tunnel.TableName} { // nft prints what it can read
		for _, family := range []string{"ip", "ip6"} {
			text := node.Run(t, "nft", "list", "table", family, table)
			writeRules(t, node, "delete table "+family+" "+table+"\n"+text)
		}
	}
	check("as nft has written it")
	node.Do(t, r.actors[0].apply)
	quiet := listing()
	node.Do(t, r.actors[0].apply)
	if now := stripCounters(listing()); now != stripCounters(quiet) {
		t.Errorf("written anew, though it was right:\n%s\nit was\n%s", now, quiet)
	}
	for what, command := range map[string]string{
		"the interfaces": "ip link del landfall4; ip link del landfall6",
		"set down":       "ip link set landfall4 down; ip link set landfall6 down",
		"the rules":      "nft delete table ip landfall-tunnel; nft flush chain ip6 landfall-tunnel port",
		"the routing":    "ip rule del pref 7948; ip -6 rule del pref 7948; ip route flush table 7948; ip -6 route flush table 7948",
		"neighbors":      "ip neigh flush nud permanent dev landfall4; ip -6 neigh flush nud permanent dev landfall6",
		"the MTU":        "ip link set landfall4 mtu 1280; ip link set landfall6 mtu 1280",
	} {
		node.Run(t, "sh", "-c", command)
		node.Do(t, r.actors[0].apply)
		check(what + " repaired")
	}
	// A proxy that starts without the API server goes on with the tunnel that is there.
	r.actors[0] = rackRescuer(t, node)
	w := Desired{Ring: map[netip.Addr][]netip.Addr{addr(far4.vip): {addr(rackAddress(1)), addr(rackAddress(2))},
		addr(far6.vip): {addr(rackAddress6(1)), addr(rackAddress6(2))}}}
	r.set(t, 0, w)
	check("after a restart")
	node.Run(t, "ip", "link", "del", "landfall4")
	node.Run(t, "ip", "link", "del", "landfall6")
	for _, alias := range []netip.Addr{tunnel.Alias(addr(rackAddress(1))), tunnel.Alias(addr(rackAddress6(1)))} {
		if way := node.Run(t, "sh", "-c", "ip route get "+alias.String()+" 2>&1 || true"); !strings.Contains(way, "No route to host") {
			t.Errorf("without its interface an alias is found by %s", way)
		}
	}
	r.actors[0].set(Desired{})
	node.Do(t, r.actors[0].apply)
	broadcasts()
	left := listing()
	for _, of := range [][]string{{"rule"}, {"route", "show", "table", "all"}} {
		left += node.Run(t, "ip", of...) + node.Run(t, "ip", append([]string{"-6"}, of...)...)
	}
	for _, ours := range []string{"landfall", "7948"} {
		if strings.Contains(left, ours) {
			t.Errorf("%s is left behind:\n%s", ours, left)
		}
	}
	node.Run(t, "ip", "link", "add", "landfall4", "type", "bridge")
	r.actors[0].set(w)
	node.Do(t, r.actors[0].apply)
	r.actors[0].set(Desired{})
	node.Do(t, r.actors[0].apply)
	node.Run(t, "ip", "link", "show", "landfall4")
}

// stripCounters leaves out what packets change.
func stripCounters(text string) string {
	var kept []string
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "expires") && !strings.Contains(line, "counter") && !strings.Contains(line, "elements") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}
