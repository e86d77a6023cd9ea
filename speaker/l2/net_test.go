package l2

import (
	"context"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// lan is a switch with a client and nodes, each in a namespace of its own.
type lan struct {
	client *nstest.NS
	hub    *nstest.NS
	nodes  int
	ours   map[string]string // MAC addresses of the nodes
}

// newLAN makes a LAN whose test runs beside others, as all of them wait most of the time.
func newLAN(t *testing.T) *lan {
	t.Parallel()
	l := &lan{client: nstest.New(t), hub: nstest.New(t), ours: map[string]string{}}
	l.hub.Run(t, "ip", "link", "add", "br0", "type", "bridge")
	l.hub.Run(t, "ip", "link", "set", "br0", "up")
	l.plug(t, l.client, "172.26.236.9/24")
	// The kernel gives up on an address after three questions in a row, which need not be a second
	// apart.
	for _, family := range []string{"ipv4", "ipv6"} {
		l.client.Run(t, "sysctl", "-q", "-w", "net."+family+".neigh.eth0.retrans_time_ms=200")
	}
	return l
}

func (l *lan) plug(t *testing.T, ns *nstest.NS, addr string) {
	l.nodes++
	port := "port" + string(rune('0'+l.nodes))
	nstest.Veth(t, ns, "eth0", addr, l.hub, port, "")
	l.hub.Run(t, "ip", "link", "set", port, "master", "br0")
}

type counts struct{ requests, replies, gratuitous, notOurs atomic.Int64 }

func (c *counts) Request(string, netip.Addr)    { c.requests.Add(1) }
func (c *counts) Reply(string, netip.Addr)      { c.replies.Add(1) }
func (c *counts) Gratuitous(string, netip.Addr) { c.gratuitous.Add(1) }
func (c *counts) Probe(string, bool)            {}
func (c *counts) Withdrawn(string, netip.Addr)  {}
func (c *counts) Dropped(_ string, why Drop, packets int) {
	if why == dropNotOurs {
		c.notOurs.Add(int64(packets))
	}
}

// node is a machine on the LAN whose actor runs until the test ends.
type node struct {
	lan   *lan
	ns    *nstest.NS
	i     lb.Interface
	actor *Actor
	stats counts
}

func (l *lan) node(t *testing.T, addr string) *node {
	n := &node{ns: nstest.New(t), lan: l}
	l.plug(t, n.ns, addr)
	n.i = n.iface(t)
	l.ours[n.i.MAC.String()] = n.i.MAC.String()
	n.actor = New(Options{Self: n.i.MAC.String(), AheadRate: 50, Log: slog.New(slog.DiscardHandler), Stats: &n.stats,
		Listen: func(i lb.Interface) (conn net.PacketConn, err error) {
			n.ns.Do(t, func() error {
				conn, err = listenARP(i)
				return nil
			})
			return conn, err
		}, ListenNDP: func(i lb.Interface) (conn NDPSocket, err error) {
			n.ns.Do(t, func() error {
				conn, err = listenNDP(i)
				return nil
			})
			return inside{conn, n.ns, t}, err
		}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- n.actor.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n
}

// inside joins groups in a namespace.
type inside struct {
	NDPSocket
	ns *nstest.NS
	t  *testing.T
}

func (s inside) Join(group netip.Addr) (leave func(), err error) {
	s.ns.Do(s.t, func() error {
		leave, err = s.NDPSocket.Join(group)
		return nil
	})
	return leave, err
}

// iface reads what the kernel says of the node's eth0.
func (n *node) iface(t *testing.T) lb.Interface {
	i := lb.Interface{Name: "eth0", Up: true}
	n.ns.Do(t, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		i.Index, i.MAC = link.Attrs().Index, link.Attrs().HardwareAddr
		return nil
	})
	return i
}

func (n *node) answerFor(vips ...netip.Addr) { n.answer(false, vips...) }

func (n *node) answer(owned bool, vips ...netip.Addr) {
	answers := map[netip.Addr]Answer{}
	for _, v := range vips {
		answers[v] = Answer{On: []string{"eth0"}, Owned: owned}
	}
	n.actor.Set(Desired{Interfaces: []lb.Interface{n.i}, Answers: answers, Ours: maps.Clone(n.lan.ours)})
}

// probe has the node ask who holds the VIPs.
func (n *node) probe(vips ...netip.Addr) {
	probes := map[netip.Addr][]string{}
	for _, v := range vips {
		probes[v] = []string{"eth0"}
	}
	n.actor.Set(Desired{Interfaces: []lb.Interface{n.i}, Probes: probes, Ours: maps.Clone(n.lan.ours)})
}

// knock makes the client's kernel look for the address; that nobody listens there does not matter.
func (l *lan) knock(t *testing.T, addr netip.Addr) {
	l.client.Do(t, func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 9)))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("knock")) // fails once the kernel has given up on the address
		return nil
	})
}

// neighbor returns the client's entry for the address, such as "dev eth0 lladdr 02:… REACHABLE".
func (l *lan) neighbor(t *testing.T, addr netip.Addr) string {
	return strings.TrimSpace(l.client.Run(t, "ip", "-4", "neigh", "show", addr.String()))
}

// Contract clause 11: an owner announces its VIPs again after another node has announced them, and the client's
// kernel, which had listened to that one, is back at once.
func TestContract11ClientsAreLedBack(t *testing.T) {
	l := newLAN(t)
	l.client.Run(t, "ip", "addr", "add", "2001:db8::9/64", "dev", "eth0", "nodad")
	owner, other := l.node(t, "172.26.236.178/24"), l.node(t, "172.26.236.179/24")
	at := func(n *node, vip netip.Addr) bool {
		return strings.Contains(l.client.Run(t, "ip", "neigh", "show", vip.String()), n.i.MAC.String())
	}
	owner.answer(true, vip, vip6)
	eventually(t, "the owner has announced all that it has to say", func() bool {
		return owner.stats.gratuitous.Load() >= int64(3*len(burst)) // ARP has two forms, NDP has one
	})
	for _, vip := range []netip.Addr{vip, vip6} {
		eventually(t, "the client finds "+vip.String()+" at the owner", func() bool {
			l.knock(t, vip)
			return at(owner, vip)
		})
	}
	other.answerFor(vip, vip6)
	eventually(t, "the owner has announced both again", func() bool {
		rivals := other.actor.Outcome().Rivals
		return rivals[vip] == owner.i.MAC.String() && rivals[vip6] == owner.i.MAC.String()
	})
	for _, vip := range []netip.Addr{vip, vip6} {
		eventually(t, "the client is back at the owner of "+vip.String(), func() bool { return at(owner, vip) })
	}
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so: %s", what)
		}
	}
}

func TestClientResolvesAndFollowsATakeover(t *testing.T) {
	l := newLAN(t)
	first, second := l.node(t, "172.26.236.178/24"), l.node(t, "172.26.236.179/24")
	at := func(n *node) func() bool {
		return func() bool { return strings.Contains(l.neighbor(t, vip), n.i.MAC.String()) }
	}

	first.answerFor(vip)
	eventually(t, "the first node answers", func() bool { return len(first.actor.Outcome().Answering) == 1 })
	l.knock(t, vip)
	eventually(t, "the client finds the VIP at the first node", at(first))

	// Make before break: the second announces while the first still answers.
	before := second.stats.requests.Load()
	second.answerFor(vip)
	eventually(t, "the client follows the gratuitous announcement", at(second))
	if asked := second.stats.requests.Load() - before; asked != 0 {
		t.Errorf("the client asked %d times: it did not follow by announcement alone", asked)
	}
	first.answerFor()
	eventually(t, "the first node has stopped", func() bool { return len(first.actor.Outcome().Answering) == 0 })
	// It may have heard the first node's burst, and so owes it silence until it owns the VIP.
	second.answer(true, vip)
	eventually(t, "the burst is over", func() bool { return second.stats.gratuitous.Load() >= int64(2*len(burst)) })
	if !at(second)() {
		t.Errorf("the client has %q, want the second node", l.neighbor(t, vip))
	}

	// The kernel of a node never answers by itself, and a withdrawn VIP gets no answer at all.
	second.answerFor()
	eventually(t, "the second node has stopped", func() bool { return len(second.actor.Outcome().Answering) == 0 })
	l.client.Run(t, "ip", "neigh", "flush", "all")
	l.knock(t, vip)
	eventually(t, "the client finds nobody", func() bool { return strings.Contains(l.neighbor(t, vip), "FAILED") })
}

func TestContract1NoAnswerForWhatIsNotOwned(t *testing.T) {
	l := newLAN(t)
	n := l.node(t, "172.26.236.178/24")
	other := netip.MustParseAddr("172.26.236.181")
	n.answerFor(vip)
	eventually(t, "the node answers", func() bool { return len(n.actor.Outcome().Answering) == 1 })
	l.knock(t, other)
	eventually(t, "the client finds nobody at an address that no node owns",
		func() bool { return strings.Contains(l.neighbor(t, other), "FAILED") })
	if n.stats.notOurs.Load() == 0 {
		t.Error("the node did not see the client's questions, so this test shows nothing")
	}
	if got := n.stats.replies.Load(); got != 0 {
		t.Errorf("%d answers to questions for another address", got)
	}
}

func TestClientFollowsAChangedMAC(t *testing.T) {
	l := newLAN(t)
	n := l.node(t, "172.26.236.178/24")
	n.answerFor(vip)
	eventually(t, "the node answers", func() bool { return len(n.actor.Outcome().Answering) == 1 })
	l.knock(t, vip)
	eventually(t, "the client finds the VIP",
		func() bool { return strings.Contains(l.neighbor(t, vip), n.i.MAC.String()) })
	n.ns.Run(t, "ip", "link", "set", "eth0", "address", "02:00:00:00:00:99")
	n.i = n.iface(t)
	n.answerFor(vip)
	eventually(t, "the client has the new MAC",
		func() bool { return strings.Contains(l.neighbor(t, vip), "02:00:00:00:00:99") })
	l.client.Run(t, "ip", "neigh", "flush", "all")
	l.knock(t, vip)
	eventually(t, "questions are answered with the new MAC",
		func() bool { return strings.Contains(l.neighbor(t, vip), "02:00:00:00:00:99") })
}

func TestAnswersAgainAfterTheInterfaceWasDown(t *testing.T) {
	l := newLAN(t)
	n := l.node(t, "172.26.236.178/24")
	n.answerFor(vip)
	eventually(t, "the node answers", func() bool { return len(n.actor.Outcome().Answering) == 1 })
	n.ns.Run(t, "ip", "link", "set", "eth0", "down")
	eventually(t, "the node knows that it does not answer", func() bool { return len(n.actor.Outcome().Answering) == 0 })
	n.ns.Run(t, "ip", "link", "set", "eth0", "up")
	eventually(t, "the node answers again by itself", func() bool { return len(n.actor.Outcome().Answering) == 1 })
	l.knock(t, vip)
	eventually(t, "the client finds the VIP",
		func() bool { return strings.Contains(l.neighbor(t, vip), n.i.MAC.String()) })
}
