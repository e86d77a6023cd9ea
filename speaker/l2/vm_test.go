//go:build vm

package l2

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// bonded is a node whose interface, a VLAN or a bond, lies on two cables to the switch.
type bonded struct {
	ns    *nstest.NS
	iface string
	actor *Actor
	stats counts

	mu   sync.Mutex
	last lb.Interface // as the watcher has told it
}

// bonded plugs in a node. Its actor follows what the watcher says of the interface.
func (l *lan) bonded(t *testing.T, failOverMAC string, vlan bool) *bonded {
	n := &bonded{ns: nstest.New(t), iface: "bond0"}
	n.ns.Run(t, "ip", "link", "add", "bond0", "type", "bond", "mode", "active-backup", "miimon", "50", "fail_over_mac",
		failOverMAC)
	for _, cable := range []string{"a", "b"} {
		nstest.Veth(t, n.ns, "eth"+cable, "", l.hub, "port"+cable, "")
		l.hub.Run(t, "ip", "link", "set", "port"+cable, "master", "br0")
		n.ns.Run(t, "ip", "link", "set", "eth"+cable, "down")
		n.ns.Run(t, "ip", "link", "set", "eth"+cable, "master", "bond0")
	}
	n.ns.Run(t, "ip", "link", "set", "bond0", "up")
	if vlan {
		n.iface = "bond0.42"
		n.ns.Run(t, "ip", "link", "add", "link", "bond0", "name", n.iface, "type", "vlan", "id", "42")
		n.ns.Run(t, "ip", "link", "set", n.iface, "up")
		l.client.Run(t, "ip", "link", "add", "link", "eth0", "name", "eth0.42", "type", "vlan", "id", "42")
		l.client.Run(t, "ip", "addr", "flush", "dev", "eth0")
		l.client.Run(t, "ip", "addr", "add", "172.26.236.9/24", "dev", "eth0.42")
		l.client.Run(t, "ip", "link", "set", "eth0.42", "up")
	}
	n.ns.Run(t, "ip", "addr", "add", "172.26.236.178/24", "dev", n.iface)
	n.run(t)
	return n
}

// run starts the actor and the watcher.
func (n *bonded) run(t *testing.T) {
	n.actor = New(Options{Self: "here", Log: slog.New(slog.DiscardHandler), Stats: &n.stats,
		Listen: func(i lb.Interface) (conn net.PacketConn, err error) {
			n.ns.Do(t, func() error {
				conn, err = listenARP(i)
				return nil
			})
			return conn, err
		}})
	handle, err := netns.GetFromName(n.ns.Name)
	if err != nil {
		t.Fatal(err)
	}
	var watcher *links.Watcher
	watcher = links.New(links.Options{Namespace: handle, Log: slog.New(slog.DiscardHandler), Changed: func() {
		interfaces, _ := watcher.All()
		n.follow(interfaces)
	}})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = n.actor.Run(ctx) })
	running.Go(func() { _ = watcher.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		handle.Close()
	})
}

func (n *bonded) follow(interfaces []lb.Interface) {
	ours := map[string]string{}
	for _, i := range interfaces {
		ours[i.MAC.String()] = "here"
		if i.Name == n.iface {
			n.mu.Lock()
			n.last = i
			n.mu.Unlock()
		}
	}
	n.actor.Set(Desired{Interfaces: interfaces, Ours: ours,
		Answers: map[netip.Addr]Answer{vip: {On: []string{n.iface}, Owned: true}}})
}

func (n *bonded) now() lb.Interface {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.last
}

// sendsBy returns the port that the bond sends by.
func (n *bonded) sendsBy(t *testing.T) string {
	for _, port := range []string{"etha", "ethb"} {
		if strings.Contains(n.ns.Run(t, "ip", "-d", "-o", "link", "show", "bond0"), "active_slave "+port) {
			return port
		}
	}
	return ""
}

// A VIP on a bond in active-backup mode, or on a VLAN on it, is announced again when the bond sends
// by its other port, and answered for there.
func TestVMAnnouncesAgainAfterTheFailOverOfABond(t *testing.T) {
	for _, c := range []struct {
		name, failOverMAC string
		vlan              bool
	}{
		{"one MAC", "none", false}, {"the MAC of the port", "active", false},
		{"VLAN on it", "none", true}, {"VLAN on it, the MAC of the port", "active", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := newLAN(t)
			n := l.bonded(t, c.failOverMAC, c.vlan)
			eventually(t, "the node answers", func() bool { return len(n.actor.Outcome().Answering) == 1 })
			l.knock(t, vip)
			eventually(t, "the client finds the VIP",
				func() bool { return strings.Contains(l.neighbor(t, vip), n.now().MAC.String()) })
			fails := map[string]func(){
				"as told": func() { n.ns.Run(t, "ip", "link", "set", "bond0", "type", "bond", "active_slave", "ethb") },
				"a cable": func() { l.hub.Run(t, "ip", "link", "set", "portb", "down") },
			}
			for _, why := range []string{"as told", "a cable"} {
				eventually(t, "the burst is over", func() bool { return n.stats.gratuitous.Load() >= int64(len(burst)) })
				before, port := n.now(), n.sendsBy(t)
				n.stats.gratuitous.Store(0)
				fails[why]()
				eventually(t, why+": the bond sends by the other port", func() bool {
					now := n.sendsBy(t)
					return now != "" && now != port
				})
				eventually(t, why+": the watcher has told", func() bool { return n.now().Port != before.Port })
				eventually(t, why+": the VIP is announced", func() bool { return n.stats.gratuitous.Load() > 0 })
				if changed := n.now().MAC.String() != before.MAC.String(); changed != (c.failOverMAC == "active") {
					t.Errorf("%s: the MAC of %s was %s and is %s", why, n.iface, before.MAC, n.now().MAC)
				}
				eventually(t, why+": the client has the MAC",
					func() bool { return strings.Contains(l.neighbor(t, vip), n.now().MAC.String()) })
				l.client.Run(t, "ip", "neigh", "flush", "all")
				l.knock(t, vip)
				eventually(t, why+": the client finds the VIP again",
					func() bool { return strings.Contains(l.neighbor(t, vip), n.now().MAC.String()) })
			}
		})
	}
}
