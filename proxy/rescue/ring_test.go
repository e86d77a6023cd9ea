package rescue

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nft"
)

func TestChooseOnARing(t *testing.T) {
	vip1, vip2 := addr("192.0.2.1"), addr("192.0.2.2")
	a, b, c := addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.3")
	all := map[netip.Addr]links.Neighbor{a: there(1), b: there(2), c: there(3)}
	type nodes = map[netip.Addr][]netip.Addr
	many := nodes{vip1: {a}}
	for i := range byte(lb.MaxRing + 4) {
		many[vip1] = append(many[vip1], netip.AddrFrom4([4]byte{10, 0, 1, i}))
	}
	for _, test := range []struct {
		name      string
		w         Desired
		neighbors map[netip.Addr]links.Neighbor
		targets   nodes
		ring      []netip.Addr
		hops      []int
		peers     []byte
	}{
		{"the next one, and as many hops as there are nodes", Desired{Ring: nodes{vip1: {b, c, a}}}, all, nodes{b: {vip1}},
			[]netip.Addr{vip1}, []int{3}, nil},
		{"one that is gone", Desired{Ring: nodes{vip1: {b, c, a}}, Gone: []netip.Addr{b}}, all, nodes{c: {vip1}},
			[]netip.Addr{vip1}, []int{2}, nil},
		{"one that does not answer yet", Desired{Ring: nodes{vip1: {b, c}}}, map[netip.Addr]links.Neighbor{c: there(3)},
			nodes{c: {vip1}}, []netip.Addr{vip1}, []int{2}, nil},
		{"each by its own length", Desired{Ring: nodes{vip1: {b}, vip2: {b, c}}}, all, nodes{b: {vip1, vip2}},
			[]netip.Addr{vip1, vip2}, []int{1, 2}, nil},
		{"none there", Desired{Ring: nodes{vip1: {b, c}}}, nil, nodes{}, nil, nil, nil},
		{"the ring, not a previous owner", Desired{Previous: nodes{vip1: {a}}, Ring: nodes{vip1: {b}}}, all, nodes{b: {vip1}},
			[]netip.Addr{vip1}, []int{1}, nil},
		{"a previous owner where the ring is empty", Desired{Previous: nodes{vip1: {a}}, Ring: nodes{vip1: nil}}, all,
			nodes{a: {vip1}}, nil, nil, []byte{1}},
		{"both kinds side by side", Desired{Previous: nodes{vip1: {b}}, Ring: nodes{vip2: {b, c}}}, all,
			nodes{b: {vip1, vip2}},
			[]netip.Addr{vip2}, []int{2}, []byte{2}},
		{"no further than this", Desired{Ring: many}, all, nodes{a: {vip1}}, []netip.Addr{vip1}, []int{maxHops}, nil},
	} {
		got := choose(lb.IPv4, test.w.all(), judge{neighbors: test.neighbors, lost: losses{nodes: test.w.Gone}}, nil)
		var peers []byte
		for _, peer := range got.peers {
			peers = append(peers, peer[5])
		}
		var hops []int
		for _, vip := range got.ring {
			hops = append(hops, got.hops[vip])
		}
		if d := cmp.Diff(test.targets, got.targets, cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty()); d != "" ||
			!slices.Equal(got.ring, test.ring) || !slices.Equal(hops, test.hops) || !slices.Equal(peers, test.peers) {
			t.Errorf("%s: ring %v, %v hops, peers %v; targets (-want +got):\n%s", test.name, got.ring, hops, peers, d)
		}
	}
}

// rack is a client and nodes of which each has an actor.
type rack struct {
	lan
	nodes  []*nstest.NS
	actors []*Actor
	macs   []string
}

func newRack(t *testing.T, n int) *rack {
	t.Helper()
	r := &rack{}
	r.client, r.nodes = newHosts(t, n)
	for _, node := range r.nodes {
		r.actors = append(r.actors, rescuer(t, node))
		r.macs = append(r.macs, macOf(t, node))
	}
	return r
}

// around is a ring of nodes by number, for both VIPs.
func around(numbers ...int) Desired {
	w := Desired{Ring: map[netip.Addr][]netip.Addr{}}
	for _, i := range numbers {
		for _, at := range []addresses{v4, v6} {
			node := addr(strings.TrimSuffix(at.a, "1") + strconv.Itoa(i+1))
			w.Ring[addr(at.vip)] = append(w.Ring[addr(at.vip)], node)
		}
	}
	return w
}

// set tells a node's actor what it shall have, and waits until it has it.
func (r *rack) set(t *testing.T, i int, w Desired) {
	t.Helper()
	r.actors[i].set(w)
	r.wait(t, i, w)
}

// wait lets a node's actor apply until it moves packets to the first node for each VIP.
func (r *rack) wait(t *testing.T, i int, w Desired) {
	t.Helper()
	done := func() bool {
		r.nodes[i].Do(t, r.actors[i].apply)
		for _, of := range []map[netip.Addr][]netip.Addr{w.Ring, w.Previous} {
			for vip, nodes := range of {
				written := r.actors[i].written[lb.FamilyOf(vip)]
				if written == nil || !slices.Contains(written.targets[nodes[0]], vip) {
					return false
				}
			}
		}
		return true
	}
	for deadline := time.Now().Add(patience); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("node %d has %+v, want %+v", i, r.actors[i].written, w)
		}
	}
}

// all gives each node the ring of all others.
func (r *rack) all(t *testing.T) {
	t.Helper()
	for i := range r.nodes {
		var next []int
		for k := 1; k < len(r.nodes); k++ {
			next = append(next, (i+k)%len(r.nodes))
		}
		r.set(t, i, around(next...))
	}
}

// packets is how many packets all nodes have moved.
func (r *rack) packets(t *testing.T) (sum int) {
	t.Helper()
	for i, node := range r.nodes {
		node.Do(t, r.actors[i].apply)
		sum += int(r.actors[i].Packets())
	}
	return sum
}

// A connection is found wherever it is, and it goes on if what it goes through changes.
func TestContract5ConnectionsAreFoundRoundTheRing(t *testing.T) {
	r := newRack(t, 5)
	r.point(t, v4.vip, r.macs[3])
	conns := r.dial(t, v4.vip, 5)
	r.point(t, v4.vip, r.macs[0])
	if n := lost(conns); n != len(conns) {
		t.Fatalf("%d of %d connections are lost without a ring: the test shows nothing", n, len(conns))
	}
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		held := make([][]net.Conn, len(r.nodes))
		for i := range r.nodes {
			r.point(t, at.vip, r.macs[i])
			held[i] = r.dial(t, at.vip, 10)
		}
		for to := range r.nodes {
			r.point(t, at.vip, r.macs[to])
			for from, conns := range held {
				if n := lost(conns) + lost(conns); n > 0 {
					t.Errorf("%s: %d connections of node %d were lost at node %d", at.vip, n, from, to)
				}
			}
		}
	}
	// One that sits between is taken out.
	r.point(t, v4.vip, r.macs[4])
	conns = r.dial(t, v4.vip, 10)
	r.point(t, v4.vip, r.macs[0])
	if n := lost(conns); n > 0 {
		t.Errorf("%d connections were lost", n)
	}
	r.nodes[1].Run(t, "ip", "link", "set", "eth0", "down")
	w := around(1, 2, 3, 4)
	w.Gone = []netip.Addr{addr("10.0.0.2"), addr("fd00::2")}
	r.actors[0].set(w)
	r.nodes[0].Do(t, r.actors[0].apply)
	if n := lost(conns); n > 0 {
		t.Errorf("%d connections were lost when a node between was gone", n)
	}
}

// What no node knows goes round once, back to where it came from, and is refused once.
func TestContract9WhatNoNodeOnARingKnowsIsRefused(t *testing.T) {
	r := newRack(t, 4)
	r.all(t)
	for _, family := range []string{"ip", "ip6"} { // as with policy Local and no endpoint here
		r.nodes[3].Run(t, "nft", "flush", "chain", family, "test", "pre")
		r.nodes[3].Run(t, "nft", "add", "rule", family, "test", "pre", family, "daddr",
			map[string]string{"ip": v4.vip, "ip6": v6.vip}[family], "drop")
	}
	for _, at := range []addresses{v4, v6} {
		r.point(t, at.vip, r.macs[2])
		conns := r.dial(t, at.vip, 5)
		r.nodes[2].Run(t, "conntrack", "-F")
		r.point(t, at.vip, r.macs[0])
		before, resets, repeated := r.packets(t), r.resets(t), r.counted(t, "TcpRetransSegs")
		if n := refused(conns); n != len(conns) {
			t.Errorf("%d of %d connections were refused that no node knows", n, len(conns))
		}
		repeated = r.counted(t, "TcpRetransSegs") - repeated // as on a busy machine; what is remembered goes further
		n, once := r.packets(t)-before, len(conns)*len(r.nodes)
		if n < once || n > once+repeated*(len(r.nodes)+recalls) {
			t.Errorf("%s: %d packets were moved for %d connections among %d nodes, and %d that were repeated", at.vip, n,
				len(conns), len(r.nodes), repeated)
		}
		if n := r.resets(t) - resets; n != len(conns) {
			t.Errorf("%s: %d resets for %d connections", at.vip, n, len(conns))
		}
	}
}

// A packet that comes with the TTL of a longer ring than there is goes round once.
func TestContract11AMarkedPacketGoesRoundOnce(t *testing.T) {
	r := newRack(t, 3)
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		for _, ttl := range []int{spent + len(r.nodes) + 1, spent + maxHops, spentInDoubt + len(r.nodes) + 1,
			spentInDoubt + maxHops} {
			r.point(t, at.vip, r.macs[2])
			conns := r.dial(t, at.vip, 1)
			r.nodes[2].Run(t, "conntrack", "-F")
			r.point(t, at.vip, r.macs[0])
			before := r.packets(t)
			sendWith(t, conns[0], ttl)
			time.Sleep(100 * time.Millisecond)                                    // the client sends again after 200 ms
			if n := r.packets(t) - before; n == 0 || n > 2*len(r.nodes)+recalls { // once more if it is sent again meanwhile
				t.Errorf("%s: a packet with a TTL of %d was moved %d times among %d nodes", at.vip, ttl, n, len(r.nodes))
			}
			reset(t, conns[0])
		}
	}
}

// sendWith sends a byte with a TTL.
func sendWith(t *testing.T, conn net.Conn, ttl int) {
	t.Helper()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		if addr(conn.RemoteAddr().(*net.TCPAddr).IP.String()).Is4() {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, ttl)
		} else {
			failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, ttl)
		}
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
}

// resets is how many the client has been sent.
func (l lan) resets(t testing.TB) int {
	t.Helper()
	return l.counted(t, "TcpEstabResets")
}

// counted is one of the counters of the client's kernel.
func (l lan) counted(t testing.TB, counter string) (n int) {
	t.Helper()
	for line := range strings.Lines(l.client.Run(t, "nstat", "-asz", counter)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == counter {
			n, _ = strconv.Atoi(fields[1])
		}
	}
	return n
}

// A proxy that starts anew leaves alone what is right, nft can read it, and it is repaired.
func TestContract6ARingOutlivesTheProxyAndIsRepaired(t *testing.T) {
	r := newRack(t, 3)
	r.all(t)
	node := r.nodes[0]
	handles := func() string {
		return node.Run(t, "nft", "-a", "list", "chain", "ip", tableName, chainStrays) + node.Run(t, "nft", "-a", "list",
			"chain", "ip6", tableName, chainStrays)
	}
	right := handles()
	r.actors[0] = rescuer(t, node)
	r.set(t, 0, around(1, 2))
	if now := handles(); now != right {
		t.Errorf("what was right was written anew:\n%s\nit was\n%s", now, right)
	}
	for _, family := range []string{"ip", "ip6"} {
		text := node.Run(t, "nft", "list", "table", family, tableName)
		node.Run(t, "nft", "delete", "table", family, tableName)
		writeRules(t, node, text)
	}
	check := func(what string) {
		t.Helper()
		for _, at := range []addresses{v4, v6} {
			r.point(t, at.vip, r.macs[2])
			conns := r.dial(t, at.vip, 5)
			r.point(t, at.vip, r.macs[0])
			if n := lost(conns); n > 0 {
				t.Errorf("%s: %d connections were lost", what, n)
			}
		}
	}
	check("as nft has written it")
	node.Run(t, "nft", "flush", "set", "ip", tableName, setRing)
	node.Run(t, "nft", "flush", "chain", "ip", tableName, chainStrays)
	node.Run(t, "nft", "delete", "table", "ip6", tableName)
	r.set(t, 0, around(1, 2))
	check("repaired")
}

// Nodes that think differently of the ring do not send packets round for ever, with or without
// connections in mind.
func TestContract9RingsThatDisagreeEnd(t *testing.T) {
	for name, views := range map[string][]Desired{
		"to and fro":           {around(1), around(0), around(0, 1), around(0)},
		"backward and forward": {around(1, 2, 3), around(0, 3, 2), around(3, 0, 1), around(2, 1, 0)},
		"a previous owner":     {from(v4.vip, "10.0.0.2", v6.vip, "fd00::2"), around(0, 2), around(1), around(0)},
		"previous owners and a ring": {from(v4.vip, "10.0.0.2", v6.vip, "fd00::2"),
			from(v4.vip, "10.0.0.3", v6.vip, "fd00::3"),
			around(0), around(0)},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRack(t, 4)
			for i := range r.nodes {
				r.set(t, i, views[i])
			}
			for _, at := range []addresses{v4, v6} {
				for first := range r.nodes[:2] {
					r.point(t, at.vip, r.macs[3])
					conns := r.dial(t, at.vip, 2)
					for _, node := range r.nodes {
						node.Run(t, "conntrack", "-F")
					}
					writeRules(t, r.nodes[3], silent) // which does not know them either
					before := r.packets(t)
					r.point(t, at.vip, r.macs[first])
					for range 2 { // the second finds them in mind
						for _, conn := range conns {
							_, _ = conn.Write([]byte("x"))
						}
						time.Sleep(50 * time.Millisecond)
					}
					if n := r.packets(t) - before; n > 8*len(conns)*(maxHops+4) {
						t.Errorf("%s from node %d on: %d packets for %d connections", at.vip, first, n, len(conns))
					}
					writeRules(t, r.nodes[3], loud)
				}
			}
		})
	}
}

// Rules that have a pod's connections refused without a word, so that the client goes on sending,
// and that end this.
var (
	silent = fmt.Sprintf(
		"table ip quiet { chain pre { type filter hook postrouting priority 300; ip saddr %[1]s drop; }; };"+
			"table ip6 quiet { chain pre { type filter hook postrouting priority 300; ip6 saddr %[2]s drop; }; }", v4.vip,
		v6.vip)
	loud = "delete table ip quiet; delete table ip6 quiet"
)

// far puts a client behind the rack's, which becomes a router that spreads the VIPs over nodes.
func (r *rack) far(t *testing.T) (client *nstest.NS, spread func(nodes ...int)) {
	t.Helper()
	client = nstest.New(t)
	router := r.client
	nstest.Veth(t, router, "far0", "10.9.0.1/24", client, "eth0", "10.9.0.2/24")
	router.Run(t, "ip", "addr", "add", "fd09::1/64", "dev", "far0", "nodad")
	client.Run(t, "ip", "addr", "add", "fd09::2/64", "dev", "eth0", "nodad")
	client.Run(t, "ip", "route", "add", "default", "via", "10.9.0.1")
	client.Run(t, "ip", "route", "add", "default", "via", "fd09::1")
	router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
		"net.ipv4.fib_multipath_hash_policy=1", "net.ipv6.fib_multipath_hash_policy=1")
	for _, node := range r.nodes {
		node.Run(t, "ip", "route", "add", "default", "via", "10.0.0.9")
		node.Run(t, "ip", "route", "add", "default", "via", "fd00::9")
	}
	return client, func(nodes ...int) {
		for _, at := range []addresses{v4, v6} {
			args := []string{"route", "replace", at.vip}
			for _, i := range nodes {
				args = append(args, "nexthop", "via", strings.TrimSuffix(at.a, "1")+strconv.Itoa(i+1))
			}
			router.Run(t, "ip", args...)
		}
	}
}

// New and long-lived connections go on while a router changes the nodes that it spreads them over.
func TestContract5ARouterThatChangesItsNodesLosesNothing(t *testing.T) {
	r := newRack(t, 4)
	client, spread := r.far(t)
	r.all(t)
	spread(0, 1, 2, 3)
	dial := func(vip string) (net.Conn, error) {
		var conn net.Conn
		var err error
		client.Do(t, func() error {
			conn, err = net.DialTimeout("tcp", net.JoinHostPort(vip, "80"), patience)
			return nil
		})
		return conn, err
	}
	var held []net.Conn
	for _, at := range []addresses{v4, v6} {
		for range 40 {
			conn, err := dial(at.vip)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			held = append(held, conn)
		}
	}
	stop, done := make(chan struct{}), make(chan []error)
	for _, at := range []addresses{v4, v6} {
		go func() {
			var errs []error
			for {
				select {
				case <-stop:
					done <- errs
					return
				default:
				}
				conn, err := dial(at.vip)
				if err == nil {
					if n := lost([]net.Conn{conn}); n > 0 {
						err = fmt.Errorf("a new connection from %s was lost", conn.LocalAddr())
					}
					conn.Close()
				}
				if err != nil {
					errs = append(errs, err)
				}
			}
		}()
	}
	for range 5 {
		for _, nodes := range [][]int{{0, 1, 2}, {1, 2}, {0, 1, 2, 3}, {3}, {0, 3}, {0, 1, 2, 3}} {
			spread(nodes...)
			if n := lost(held); n > 0 {
				t.Errorf("%d of %d connections were lost when the nodes became %v", n, len(held), nodes)
			}
		}
	}
	close(stop)
	for range 2 {
		for _, err := range <-done {
			t.Error(err)
		}
	}
	if n := r.packets(t); n < len(held) {
		t.Errorf("only %d packets were moved: the test shows nothing", n)
	}
}

// A node on the way that knows an old connection of the same ports does not keep what belongs to
// the one of now.
func TestContract5AnOldConnectionOfTheSamePortsIsNotTakenForIt(t *testing.T) {
	r := newRack(t, 4)
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		for old := range r.nodes {
			r.point(t, at.vip, r.macs[old])
			reset(t, r.dialFrom(t, 1080, at.vip))
		}
		r.point(t, at.vip, r.macs[3])
		conn := r.dialFrom(t, 1080, at.vip)
		for to := range r.nodes {
			r.point(t, at.vip, r.macs[to])
			if n := lost([]net.Conn{conn}); n > 0 {
				t.Errorf("%s: the connection was lost at node %d", at.vip, to)
			}
		}
		// Nodes that do not know it do not overrule the one that may.
		r.nodes[3].Run(t, "conntrack", "-F")
		r.point(t, at.vip, r.macs[0])
		r.wantNoReset(t, conn)
		reset(t, conn)
	}
}

// What is written in steps is in the kernel as if it had been written at once.
func TestContract6StepsEndWhereOneWriteDoes(t *testing.T) {
	r := newRack(t, 4)
	node, actor := r.nodes[0], r.actors[0]
	r.set(t, 0, around(1, 2, 3)) // so that all are known
	r.set(t, 0, around(2, 3, 1))
	r.set(t, 0, around(3, 1, 2))
	random := rand.New(rand.NewPCG(1, 2))
	sufficed := 0
	for range 40 {
		// Each node has a VIP that stays, so that mostly the rules do, too.
		pairs := []string{"10.0.0.201", "10.0.0.2", "10.0.0.202", "10.0.0.3", "10.0.0.203", "10.0.0.4",
			"fd00::201", "fd00::2", "fd00::202", "fd00::3", "fd00::203", "fd00::4"}
		for range random.IntN(20) {
			last := strconv.Itoa(random.IntN(30) + 100)
			pairs = append(pairs, "10.0.0."+last, "10.0.0."+strconv.Itoa(2+random.IntN(3)), "fd00::"+last,
				"fd00::"+strconv.Itoa(2+random.IntN(3)))
		}
		w := from(pairs...)
		others := []int{1, 2, 3}
		random.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
		w.Ring = around(others[:min(3, random.IntN(9))]...).Ring
		actor.set(w)
		node.Do(t, func() error {
			if actor.adjust() {
				sufficed++
			} else if err := actor.apply(); err != nil {
				return err
			}
			for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
				have, err := actor.kernel.load(family, true)
				if err != nil {
					return err
				}
				want := choose(family, actor.all, judge{neighbors: actor.known},
					slices.SortedFunc(maps.Keys(have.sent), netip.Addr.Compare))
				have.table.limit, want.limit = actor.limit, actor.limit // which same compares
				if !same(family, have, want) || have.exists && !have.table.equal(want) {
					t.Errorf("%s: targets %v, peers %v, ring %v; want %v, %v, %v", family, have.table.targets, have.table.peers,
						have.table.ring, want.targets, want.peers, want.ring)
				}
			}
			return nil
		})
	}
	if sufficed < 10 {
		t.Errorf("only %d changes needed no look at the kernel", sufficed)
	}
}

// The ring has a switch of its own: without it a node has no rules for rings, and moves packets to
// the previous owner alone.
func TestTheRingHasASwitch(t *testing.T) {
	for _, on := range []bool{true, false} {
		r := newRack(t, 3)
		node := r.nodes[0]
		r.actors[0] = rescuerWith(t, node, on)
		w := from(v4.vip, "10.0.0.3", v6.vip, "fd00::3")
		w.Ring = around(1, 2).Ring
		next := from(v4.vip, "10.0.0.3", v6.vip, "fd00::3")
		if on {
			next = around(1, 2)
		}
		r.actors[0].set(w)
		r.wait(t, 0, next)
		r.set(t, 1, around(2, 0)) // a node whose ring is on, in both cases
		for _, at := range []addresses{v4, v6} {
			family := map[addresses]string{v4: "ip", v6: "ip6"}[at]
			rules := node.Run(t, "nft", "list", "chain", family, tableName, chainStrays)
			if got := strings.Contains(rules, "@"+setRing) || strings.Contains(rules, `"ring`); got != on {
				t.Errorf("ring on %v, and %s has rules for it: %v\n%s", on, family, got, rules)
			}
			for holder, found := range map[int]bool{1: on, 2: true} {
				r.point(t, at.vip, r.macs[holder])
				conns := r.dial(t, at.vip, 5)
				r.point(t, at.vip, r.macs[0])
				if n := lost(conns); (n == 0) != found {
					t.Errorf("ring on %v: %s: %d of %d connections of node %d were lost", on, at.vip, n, len(conns), holder)
				}
			}
		}
	}
}

// A node whose ring is switched off, and that remembers connections from before, does not send
// round for ever what comes to it on the ring of others.
func TestContract9ANodeWithoutARingEndsOthers(t *testing.T) {
	r := newRack(t, 3)
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		r.point(t, at.vip, r.macs[0])
		reset(t, r.dialFrom(t, 1080, at.vip)) // to node 0, packets of the next one are in doubt
		r.point(t, at.vip, r.macs[1])
		conn := r.dialFrom(t, 1080, at.vip)
		r.point(t, at.vip, r.macs[2])
		if n := lost([]net.Conn{conn}); n > 0 { // node 2 remembers that it is behind node 0
			t.Fatalf("%s: the connection was lost", at.vip)
		}
		with := r.actors[2]
		r.actors[2] = rescuerWith(t, r.nodes[2], false)
		r.actors[2].set(around(0, 1))
		r.nodes[2].Do(t, r.actors[2].apply)
		family := lb.FamilyOf(addr(at.vip))
		if got := r.actors[2].written[family]; len(got.ring) > 0 || len(got.targets) == 0 {
			t.Fatalf("node 2 has %+v: the test shows nothing", got)
		}
		writeRules(t, r.nodes[2], silent)
		r.nodes[1].Run(t, "conntrack", "-F")
		before := r.packets(t)
		r.point(t, at.vip, r.macs[0])
		_, _ = conn.Write([]byte("x"))
		time.Sleep(500 * time.Millisecond) // in which one that goes round is moved thousands of times
		if n := r.packets(t) - before; n == 0 || n > 20*2*(maxHops+4) {
			t.Errorf("%s: %d packets were moved for what was sent a few times", at.vip, n)
		}
		writeRules(t, r.nodes[2], loud)
		reset(t, conn)
		r.actors[2] = with
		r.set(t, 2, around(0, 1))
	}
}

// A node may remember where it moved a connection that had the addresses and ports of one of now, and that another node
// knew. On a ring the one of now is found all the same: wherever it is, wherever it arrives, whoever remembers what.
func TestContract5WhatIsRememberedOfOldPortsMisleadsNobody(t *testing.T) {
	r := newRack(t, 3)
	for i := range r.nodes { // so that each can remember each other
		for k := range r.nodes {
			if k != i {
				r.set(t, i, around(k))
			}
		}
	}
	r.all(t)
	port := 1100
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		address := func(i int) netip.Addr { return addr(strings.TrimSuffix(at.a, "1") + strconv.Itoa(i+1)) }
		for _, memory := range []func(netip.Addr) nft.Set{h.flows, h.fresh} {
			for holder := range r.nodes {
				for misled := range r.nodes {
					to := 3 - holder - misled // the other one
					if misled == holder {
						continue
					}
					port++
					r.point(t, at.vip, r.macs[holder])
					conn := r.dialFrom(t, port, at.vip)
					writeRules(t, r.nodes[misled], fmt.Sprintf("add element %s %s %s { %s . %d . %s . 80 }", nftFamily(h),
						tableName, memory(address(to)).Name, at.client, port, at.vip))
					for arrival := range r.nodes {
						r.point(t, at.vip, r.macs[arrival])
						if n := lost([]net.Conn{conn}); n > 0 {
							t.Errorf("%s: the connection of node %d was lost at node %d, as node %d remembers that node %d had it",
								at.vip, holder, arrival, misled, to)
							break
						}
					}
					reset(t, conn)
				}
			}
		}
	}
}

// A packet that meets the rules while the next node of its VIP changes, which the kernel looks up in one set after the
// other, is not refused.
func TestContract5APacketAmidAChangeOfTheRingIsNotRefused(t *testing.T) {
	r := newRack(t, 3)
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		r.point(t, at.vip, r.macs[2])
		conn := r.dialFrom(t, 1090, at.vip)
		next := fmt.Sprintf("element %s %s %s { %s }", nftFamily(h), tableName, h.vips(addr(at.b)).Name, at.vip)
		writeRules(t, r.nodes[0], "delete "+next)
		r.point(t, at.vip, r.macs[0])
		r.wantNoReset(t, conn)
		writeRules(t, r.nodes[0], "add "+next)
		if n := lost([]net.Conn{conn}); n > 0 {
			t.Errorf("%s: the connection was lost", at.vip)
		}
		reset(t, conn)
	}
}

// Where a connection has gone is remembered by each node on its way. If one of these has left the ring since, the
// packet goes there all the same, and on from there to the node that knows the connection; which may be the one that
// has left.
func TestContract5ANodeThatHasLeftTheRingIsAskedAllTheSame(t *testing.T) {
	for name, leave := range map[string]func(*testing.T, *rack){
		"one on the way": func(t *testing.T, r *rack) {
			r.set(t, 0, around(2, 3))
			r.set(t, 2, around(3, 0))
			r.set(t, 3, around(0, 2))
		},
		"the holder": func(t *testing.T, r *rack) {
			r.set(t, 0, around(1, 2))
			r.set(t, 1, around(2, 0))
			r.set(t, 2, around(0, 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRack(t, 4)
			r.all(t)
			const holder = 3
			conns := map[string]net.Conn{}
			found := func(arrival int) {
				t.Helper()
				for vip, conn := range conns {
					r.point(t, vip, r.macs[arrival])
					for range 2 {
						if n := lost([]net.Conn{conn}); n > 0 {
							t.Errorf("%s: the connection was lost at node %d", vip, arrival)
						}
					}
				}
			}
			for _, at := range []addresses{v4, v6} {
				r.point(t, at.vip, r.macs[holder])
				conns[at.vip] = r.dial(t, at.vip, 1)[0]
			}
			found(0)
			leave(t, r)
			for arrival := range r.nodes {
				found(arrival)
			}
		})
	}
}

// A release that knows nothing of the rings of targets has removed a target, and left the set of
// its ring behind. That goes, or is filled anew, and no rule is written anew for it: meanwhile
// there would be no rescue.
func TestContract6ASetThatIsLeftOfATargetGoes(t *testing.T) {
	r := newRack(t, 3)
	r.all(t)
	node := r.nodes[0]
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		third := addr(strings.TrimSuffix(at.a, "1") + "3")
		listing := func() string {
			text := node.Run(t, "nft", "-a", "list", "table", nftFamily(h), tableName)
			return stripCounters(text[strings.Index(text, "chain"):])
		}
		left := func(target netip.Addr) {
			set := h.onRing(target).Name
			writeRules(t, node, fmt.Sprintf("add set %[1]s %[2]s %[3]s { type %[4]s; }; add element %[1]s %[2]s %[3]s { %[5]s }",
				nftFamily(h), tableName, set, map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}[nftFamily(h)], at.client))
		}
		check := func(what string, ring ...int) {
			t.Helper()
			r.actors[0] = rescuer(t, node)
			r.set(t, 0, around(ring...))
			have, err := r.actors[0].kernel.load(h.family, true)
			if err != nil {
				t.Fatal(err)
			}
			if have.table.limit = r.actors[0].limit; !have.table.equal(r.actors[0].written[h.family]) {
				t.Errorf("%s: the kernel has %+v, want %+v", what, have.table, r.actors[0].written[h.family])
			}
		}
		before := listing()
		left(addr(at.client))
		check("of a node that is none any more", 1, 2)
		if now := listing(); now != before {
			t.Errorf("rules were written anew:\n%s\nit was\n%s", now, before)
		}
		left(third)
		check("of a node that is a target again", 2, 1)
		check("as before", 1, 2)
	}
}

// A target of a release that knows nothing of its rings goes in the transaction in which it gets
// the set of these.
func TestContract6ATargetOfAnOlderReleaseGoes(t *testing.T) {
	r := newRack(t, 3)
	r.all(t)
	node := r.nodes[0]
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		writeRules(t, node, fmt.Sprintf("flush chain %[1]s %[2]s strays; flush chain %[1]s %[2]s %[3]s; delete chain %[1]s %[2]s "+
			"%[3]s; delete set %[1]s %[2]s %[4]s", nftFamily(h), tableName, chainOffRing, h.onRing(addr(at.b)).Name))
	}
	w := around(2)
	w.Gone = []netip.Addr{addr("10.0.0.2"), addr("fd00::2")}
	r.actors[0] = rescuer(t, node)
	r.set(t, 0, w)
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		target := hex.EncodeToString(addr(at.b).AsSlice())
		if text := node.Run(t, "nft", "list", "table", nftFamily(h), tableName); strings.Contains(text, "-"+target) {
			t.Errorf("%s is left:\n%s", at.b, text)
		}
	}
}

// A node that has booted may be on the ring before it has rules. A connection that was moved past it while it was away
// does not go there.
func TestContract5WhatIsRememberedPassesANodeWithoutRules(t *testing.T) {
	r := newRack(t, 3)
	for i := range r.nodes {
		r.set(t, i, around((i+1)%3, (i+2)%3))
	}
	r.set(t, 0, around(2)) // as node 1 is away
	conns := map[string]net.Conn{}
	for _, at := range []addresses{v4, v6} {
		r.point(t, at.vip, r.macs[2])
		conns[at.vip] = r.dial(t, at.vip, 1)[0]
	}
	found := func(what string) {
		t.Helper()
		for vip, conn := range conns {
			r.point(t, vip, r.macs[0])
			for range 2 {
				if n := lost([]net.Conn{conn}); n > 0 {
					t.Errorf("%s: the connection is lost %s", vip, what)
				}
			}
		}
	}
	found("while a node is away")
	r.nodes[1].Run(t, "conntrack", "-F")
	r.nodes[1].Run(t, "nft", "delete", "table", "ip", tableName)
	r.nodes[1].Run(t, "nft", "delete", "table", "ip6", tableName)
	r.set(t, 0, around(1, 2))
	found("once it is back")
}

// On a ring with as many nodes as a packet may ask, there is no room for a way in order after one by memory: the latter
// is all there is.
func TestMemoryIsFollowedOnALongRing(t *testing.T) {
	vip := addr("192.0.2.1")
	for _, n := range []int{maxHops - spare, maxHops - spare + 1, maxHops + 4} {
		var ring []netip.Addr
		neighbors := map[netip.Addr]links.Neighbor{}
		for i := range n {
			node := netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)})
			ring, neighbors[node] = append(ring, node), there(byte(i))
		}
		got := choose(lb.IPv4, map[netip.Addr]Origins{vip: {Ring: ring}}, judge{neighbors: neighbors}, nil)
		if _, inOrder := got.onRing[ring[0]]; inOrder != (n+spare <= maxHops) {
			t.Errorf("%d other nodes: on the ring %v", n, got.onRing)
		}
	}
}

// Two nodes that had a VIP one after the other are each other's previous owner. What neither knows goes to and fro as
// often as round a ring at most, whatever TTL the client gives it, and however often it comes.
func TestContract11TwoOwnersDoNotKeepAPacketGoing(t *testing.T) {
	r := newRack(t, 2)
	r.set(t, 0, from(v4.vip, "10.0.0.2", v6.vip, "fd00::2"))
	r.set(t, 1, from(v4.vip, "10.0.0.1", v6.vip, "fd00::1"))
	for i, node := range r.nodes {
		node.Do(t, r.actors[i].apply)
		writeRules(t, node, silent)
	}
	for _, at := range []addresses{v4, v6} {
		moved := 0
		for round := range 6 {
			before := r.packets(t)
			frame := ack(r.macs[round%2], at.vip, 1)
			withTTL(frame, 255)
			r.send(t, func(yield func([]byte) bool) { yield(frame) })
			time.Sleep(100 * time.Millisecond)
			n := r.packets(t) - before
			if n > maxHops {
				t.Errorf("%s: packet %d was moved %d times", at.vip, round, n)
			}
			moved = max(moved, n)
		}
		if moved < 2 {
			t.Errorf("%s: no packet was moved there and back: the test shows nothing", at.vip)
		}
	}
}

// A node without rules for the VIP forwards what is moved to it, and its router may send that back: the packet comes with
// a TTL that steps over the end. It ends all the same.
func TestContract11APacketThatIsRoutedBackEnds(t *testing.T) {
	r := newRack(t, 3)
	router := r.nodes[2]
	for _, node := range r.nodes[1:] {
		node.Run(t, "nft", "flush", "ruleset")
		node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.conf.all.rp_filter=0",
			"net.ipv4.conf.eth0.rp_filter=0", "net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.eth0.send_redirects=0")
	}
	for _, at := range []addresses{v4, v6} {
		third := strings.TrimSuffix(at.a, "1") + "3"
		r.nodes[1].Run(t, "ip", "route", "replace", at.vip, "via", third)
		router.Run(t, "ip", "route", "replace", at.vip, "via", at.a)
	}
	for what, w := range map[string]Desired{
		"a previous owner": from(v4.vip, "10.0.0.2", v6.vip, "fd00::2"),
		"a ring":           around(1),
	} {
		r.set(t, 0, w)
		for i, at := range []addresses{v4, v6} {
			before := r.packets(t)
			r.send(t, func(yield func([]byte) bool) { yield(ack(r.macs[0], at.vip, i)) })
			time.Sleep(200 * time.Millisecond)
			if n := r.packets(t) - before; n == 0 || n > maxHops {
				t.Errorf("%s, %s: one packet was moved %d times", what, at.vip, n)
			}
			// An error about what no node knows comes back once, of 43 times that its TTL has room for.
			frame := errorAbout(r.macs[0], at.vip)
			withTTL(frame, 128)
			wantArrivals(t, r.lan, r.nodes[:1], 1, frame, []int{2})
		}
	}
}

// withTTL gives a frame another TTL or hop limit.
func withTTL(frame []byte, ttl byte) {
	const ethernet, ipv4Header = 14, 20
	ip := frame[ethernet:]
	if ip[0]>>4 == 6 {
		ip[7] = ttl
		return
	}
	ip[8], ip[10], ip[11] = ttl, 0, 0
	binary.BigEndian.PutUint16(ip[10:], checksum(ip[:ipv4Header]))
}
