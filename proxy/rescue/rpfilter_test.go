package rescue

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestContract5StrictFiltersTakeWhatNodesMove has nodes that reach routers over another interface
// than one another. A strict rp_filter drops what one node moves to the other there, until the
// actor has changed it; what was before comes back with the end of the rescue.
func TestContract5StrictFiltersTakeWhatNodesMove(t *testing.T) {
	const parameters = "/proc/sys/net"
	r, far := newRack(t, 2), nstest.New(t)
	far.Run(t, "ip", "link", "set", "lo", "up")
	far.Run(t, "ip", "addr", "add", "10.9.0.1/32", "dev", "lo")
	far.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0")
	before := []string{"0", "1"} // of the LAN's interfaces
	for i, node := range r.nodes {
		nstest.Veth(t, far, fmt.Sprintf("up%d", i), fmt.Sprintf("10.8.%d.1/24", i), node, "up0",
			fmt.Sprintf("10.8.%d.2/24", i))
		node.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.8.%d.1", i))
		node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=1", "net.ipv4.conf.up0.rp_filter=0",
			"net.ipv4.conf.eth0.rp_filter="+before[i])
	}
	lead := func(to int) {
		far.Run(t, "ip", "route", "replace", v4.vip, "via", fmt.Sprintf("10.8.%d.2", to), "src", "10.9.0.1")
	}
	l := lan{client: far}
	lead(0)
	conns := l.dial(t, v4.vip, 5)
	r.all(t)
	lead(1)
	if _, err := conns[0].Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	until(t, "the packet is dropped", func() bool {
		text := r.nodes[0].Run(t, "nstat", "-asz", "TcpExtIPReversePathFilter")
		fields := strings.Fields(text[strings.Index(text, "TcpExtIPReversePathFilter"):])
		return fields[1] != "0"
	})
	value := func(node *nstest.NS, iface string) string {
		return strings.TrimSpace(node.Run(t, "sysctl", "-n", "net.ipv4.conf."+iface+".rp_filter"))
	}
	for i, node := range r.nodes {
		r.actors[i].parameters, r.actors[i].warn = parameters, func(text string) { t.Error(text) }
		for range 2 {
			node.Do(t, r.actors[i].apply)
		}
		if lan, up := value(node, "eth0"), value(node, "up0"); lan != "2" || up != "0" {
			t.Fatalf("node %d: rp_filter of eth0 is %s, of up0 %s; want 2 and 0", i, lan, up)
		}
	}
	_ = conns[0].SetDeadline(time.Now().Add(20 * time.Second)) // it is sent again
	if _, err := conns[0].Read(make([]byte, 1)); err != nil {
		t.Errorf("a connection whose packet was dropped: %v", err)
	}
	if n := lost(conns); n > 0 {
		t.Errorf("%d of %d connections were lost", n, len(conns))
	}
	r.nodes[1].Run(t, "sysctl", "-qw", "net.ipv4.conf.eth0.rp_filter=0") // its administrator has
	before[1] = "0"
	for i, node := range r.nodes {
		for _, want := range [][]string{{"eth0"}, nil} {
			if i == 1 {
				want = nil
			}
			var reset []string
			node.Do(t, func() (err error) {
				reset, err = ResetFilters(parameters)
				return err
			})
			if now := value(node, "eth0"); now != before[i] || !slices.Equal(reset, want) {
				t.Errorf("node %d: rp_filter of eth0 is %s, want %s; %v were set back", i, now, before[i], reset)
			}
		}
		if out := node.Run(t, "nft", "list", "tables"); strings.Contains(out, settingsTable.Name) {
			t.Errorf("left behind:\n%s", out)
		}
	}
}

// until waits for a condition.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// Only nodes on a ring send from elsewhere than where answers go, and what cannot be set is told
// once.
func TestAStrictFilterIsToldOnce(t *testing.T) {
	a, b := addr("10.0.0.1"), addr("10.0.0.2")
	at := func(link int) links.Neighbor {
		return links.Neighbor{MAC: [6]byte{2, 5: byte(link)}, Link: link, Found: true}
	}
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{a: at(7), b: at(7)}, strict: errors.New("read-only")}
	deps, told := fakeDeps, 0
	deps.Parameters, deps.Warn = "/proc/sys/net", func(string) { told++ }
	actor := newActor(deps, k)
	apply := func(w Desired) {
		t.Helper()
		actor.set(w)
		for range 3 {
			if err := actor.apply(); err != nil {
				t.Fatal(err)
			}
		}
	}
	apply(from("192.0.2.1", "10.0.0.1"))
	if len(k.loosened) > 0 || told > 0 {
		t.Errorf("without a ring: %v, told %d times", k.loosened, told)
	}
	apply(Desired{Ring: map[netip.Addr][]netip.Addr{addr("192.0.2.1"): {a, b}}})
	if !slices.Equal(k.loosened, []int{7, 7, 7}) || told != 1 {
		t.Errorf("on a ring: %v, told %d times", k.loosened, told)
	}
}
