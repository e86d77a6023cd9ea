package rescue

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

const parameters = "/proc/sys/net"

func filterIn(t *testing.T, node *nstest.NS, iface string) string {
	t.Helper()
	return strings.TrimSpace(node.Run(t, "sysctl", "-n", "net.ipv4.conf."+iface+".rp_filter"))
}

// strictNode is a node with a strict filter on lan, and a default route over another interface.
func strictNode(t *testing.T) (node *nstest.NS, k Kernel, lan int) {
	t.Helper()
	node, far := nstest.New(t), nstest.New(t)
	nstest.Veth(t, far, "up0", "10.8.0.1/24", node, "up0", "10.8.0.2/24")
	nstest.Veth(t, far, "lan", "10.0.0.2/24", node, "lan", "10.0.0.1/24")
	node.Run(t, "ip", "route", "add", "default", "via", "10.8.0.1")
	node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.up0.rp_filter=0",
		"net.ipv4.conf.lan.rp_filter=1")
	node.Do(t, func() (err error) {
		if k, err = Open(0); err != nil {
			return err
		}
		i, err := net.InterfaceByName("lan")
		if err == nil {
			lan = i.Index
		}
		return err
	})
	t.Cleanup(k.Close)
	return node, k, lan
}

// TestContract11TheFilterIsStrictAgainWithoutARing: what was set for rings is set back with the
// last of them, also by a successor, and not while nodes of a ring just do not answer. So it is
// where somebody has flushed the note of what was there before.
func TestContract11TheFilterIsStrictAgainWithoutARing(t *testing.T) {
	node, k, _ := strictNode(t)
	ring := Desired{Ring: map[netip.Addr][]netip.Addr{addr("192.0.2.1"): {addr("10.0.0.2")}}}
	deps := Deps{Log: slog.New(slog.DiscardHandler), Families: []lb.Family{lb.IPv4}, Ring: true, Parameters: parameters,
		Warn: func(text string) { t.Error(text) }}
	for _, tt := range []struct {
		name  string
		story string // flush, look, down (and up again), restart
	}{
		{"the same proxy", "down"},
		{"a successor", "down restart"},
		{"flushed", "flush"},
		{"flushed, and noted again", "flush look"},
		{"flushed, and a successor", "flush look restart"},
		{"a successor, and flushed", "restart look flush"},
		{"flushed twice", "flush look flush look restart"},
	} {
		a := newActor(deps, k)
		a.set(ring)
		until(t, "the filter is loose", func() bool {
			node.Do(t, a.apply)
			return filterIn(t, node, "lan") == "2"
		})
		for step := range strings.FieldsSeq(tt.story) {
			switch step {
			case "flush":
				node.Run(t, "nft", "flush", "ruleset")
			case "look":
				node.Do(t, a.apply)
			case "down":
				node.Run(t, "ip", "link", "set", "lan", "down")
				node.Do(t, a.apply)
				if now := filterIn(t, node, "lan"); now != "2" {
					t.Errorf("%s: while the link is away the filter is %s", tt.name, now)
				}
				node.Run(t, "ip", "link", "set", "lan", "up")
			case "restart":
				a = newActor(deps, k)
				a.set(ring)
			}
		}
		a.set(Desired{})
		node.Do(t, a.apply)
		if now := filterIn(t, node, "lan"); now != "1" {
			t.Errorf("%s: the filter is %s without a ring", tt.name, now)
		}
		if out := node.Run(t, "nft", "list", "tables"); strings.Contains(out, filter.Table) {
			t.Errorf("%s: left behind:\n%s", tt.name, out)
		}
		node.Run(t, "sysctl", "-qw", "net.ipv4.conf.lan.rp_filter=1")
	}
}

// TestContract11AnAdministratorsFilterIsKeptWithoutANote: what the proxy remembers without a note in
// the kernel holds only while the parameter is as the proxy has set it, and ends with the last ring.
func TestContract11AnAdministratorsFilterIsKeptWithoutANote(t *testing.T) {
	node, k, _ := strictNode(t)
	set := func(value string) { node.Run(t, "sysctl", "-qw", "net.ipv4.conf.lan.rp_filter="+value) }
	ring := Desired{Ring: map[netip.Addr][]netip.Addr{addr("192.0.2.1"): {addr("10.0.0.2")}}}
	a := newActor(Deps{Log: slog.New(slog.DiscardHandler), Families: []lb.Family{lb.IPv4}, Ring: true,
		Parameters: parameters, Warn: func(text string) { t.Error(text) }}, k)
	look := func(want Desired) {
		t.Helper()
		a.set(want)
		node.Do(t, a.apply)
	}
	expect := func(when, want string) {
		t.Helper()
		if now := filterIn(t, node, "lan"); now != want {
			t.Errorf("%s: the filter is %s, want %s", when, now, want)
		}
	}
	until(t, "the filter is loose", func() bool {
		look(ring)
		return filterIn(t, node, "lan") == "2"
	})
	node.Run(t, "nft", "flush", "ruleset")
	set("0")
	look(ring)
	set("2")
	look(Desired{})
	expect("set by an administrator after the flush", "2")
	set("1")
	look(ring)
	look(Desired{})
	expect("set back", "1")
	set("2")
	look(ring)
	look(Desired{})
	expect("set by an administrator before the ring", "2")
}

// TestContract11OneFilterWithoutANoteKeepsNoOtherLoose: what the proxy remembers is set back, also
// where it cannot be noted again after a flush.
func TestContract11OneFilterWithoutANoteKeepsNoOtherLoose(t *testing.T) {
	node, k, lan := strictNode(t)
	nstest.Veth(t, nstest.New(t), "eth0", "10.7.0.2/24", node, "lan2", "10.7.0.1/24")
	// With all=1, the 0 of lan2 is strict too.
	node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=1", "net.ipv4.conf.lan2.rp_filter=0")
	noted := map[string]int{}
	node.Do(t, func() error {
		lan2, err := net.InterfaceByName("lan2")
		if err != nil {
			return err
		}
		if _, err := k.loosen(parameters, []int{lan, lan2.Index}); err != nil {
			return err
		}
		return k.remember(parameters, noted)
	})
	if len(noted) != 2 {
		t.Fatalf("noted %v: the test shows nothing", noted)
	}
	node.Run(t, "nft", "flush", "ruleset") // and then something of another kind is in the way of one note
	node.Run(t, "nft", "add", "table", "ip", filter.Table)
	node.Run(t, "nft", "add", "set", "ip", filter.Table, "rp-filter-was-1", "{ type ether_addr; }")
	a := newActor(Deps{Log: slog.New(slog.DiscardHandler), Families: []lb.Family{lb.IPv4}, Ring: true,
		Parameters: parameters, Warn: func(text string) { t.Error(text) }}, k)
	a.noted = noted
	a.set(Desired{})
	node.Do(t, a.apply)
	for iface, want := range map[string]string{"lan": "1", "lan2": "0"} {
		if now := filterIn(t, node, iface); now != want {
			t.Errorf("the filter of %s is %s, want %s", iface, now, want)
		}
	}
}

// TestContract11AnAdministratorsFilterIsLeftAlone: what is set back is what was there when Landfall
// changed it last, and nothing is where it could not change it.
func TestContract11AnAdministratorsFilterIsLeftAlone(t *testing.T) {
	node, k, lan := strictNode(t)
	set := func(value string) { node.Run(t, "sysctl", "-qw", "net.ipv4.conf.lan.rp_filter="+value) }
	loosen := func(folder string) (err error) {
		node.Do(t, func() error {
			_, err = k.loosen(folder, []int{lan})
			return nil
		})
		return err
	}
	reset := func(what, want string) {
		t.Helper()
		node.Do(t, func() error {
			_, err := ResetFilters(parameters)
			return err
		})
		if now := filterIn(t, node, "lan"); now != want {
			t.Errorf("%s: the filter is %s, want %s", what, now, want)
		}
	}
	for _, values := range [][2]string{{"0", "1"}, {"1", "0"}} { // with all=1, 0 is strict too
		node.Run(t, "sysctl", "-qw", "net.ipv4.conf.all.rp_filter=1")
		for _, value := range values {
			set(value)
			if err := loosen(parameters); err != nil {
				t.Fatal(err)
			}
		}
		reset("set by an administrator in between", values[1])
	}
	// A folder in which the value can be opened, but not be 2.
	folder := t.TempDir()
	for iface, parameter := range map[string]string{"all": "conf/all/rp_filter", "lan": "ip_forward_update_priority"} {
		dir := filepath.Join(folder, "ipv4", "conf", iface)
		if err := errors.Join(os.MkdirAll(dir, 0o755),
			os.Symlink(filepath.Join(parameters, "ipv4", parameter), filepath.Join(dir, "rp_filter"))); err != nil {
			t.Fatal(err)
		}
	}
	set("1")
	if err := loosen(folder); err == nil {
		t.Error("what cannot be set was set")
	}
	set("2")
	reset("it could not be set", "2")
}

// TestAMissingInterfaceIsNoTrouble: there is no Event about an interface that has just gone.
func TestAMissingInterfaceIsNoTrouble(t *testing.T) {
	node, k, lan := strictNode(t)
	other := t.TempDir() // without parameters of lan
	dir := filepath.Join(other, "ipv4", "conf", "all")
	if err := errors.Join(os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "rp_filter"), []byte("1\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	node.Do(t, func() error {
		for _, c := range []struct {
			folder string
			link   int
		}{{parameters, 12345}, {other, lan}, {t.TempDir(), lan}} {
			if set, err := k.loosen(c.folder, []int{c.link}); err != nil || len(set) > 0 {
				t.Errorf("interface %d: set %v, %v", c.link, set, err)
			}
		}
		return nil
	})
}

// TestContract5StrictFiltersTakeWhatNodesMove has nodes that reach routers over another interface
// than one another. A strict rp_filter drops what one node moves to the other there, until the
// actor has changed it; what was before comes back with the end of the rescue.
func TestContract5StrictFiltersTakeWhatNodesMove(t *testing.T) {
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
	value := func(node *nstest.NS, iface string) string { return filterIn(t, node, iface) }
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
		if out := node.Run(t, "nft", "list", "tables"); strings.Contains(out, filter.Table) {
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

// What nodes hand over needs a loose filter too, also where no VIP has a ring, as with all endpoints on one
// node.
func TestFiltersTakeWhatNodesHandOver(t *testing.T) {
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{}}
	deps := fakeDeps
	deps.Parameters, deps.Warn = "/proc/sys/net", func(string) {}
	actor := newActor(deps, k)
	apply := func(handed ...int) {
		t.Helper()
		actor.SetHanded(handed)
		actor.set(Desired{})
		if err := actor.apply(); err != nil {
			t.Fatal(err)
		}
	}
	apply(7, 9)
	if !slices.Equal(k.loosened, []int{7, 9}) || k.tightened != 0 {
		t.Errorf("handed over: %v, set back %d times", k.loosened, k.tightened)
	}
	apply()
	if len(k.loosened) != 2 || k.tightened != 1 {
		t.Errorf("no more: %v, set back %d times", k.loosened, k.tightened)
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
	if len(k.loosened) > 0 || told > 0 || k.tightened != 3 { // which fails, and is tried again
		t.Errorf("without a ring: %v, told %d times, set back %d times", k.loosened, told, k.tightened)
	}
	apply(Desired{Ring: map[netip.Addr][]netip.Addr{addr("192.0.2.1"): {a, b}}})
	if !slices.Equal(k.loosened, []int{7, 7, 7}) || told != 1 {
		t.Errorf("on a ring: %v, told %d times", k.loosened, told)
	}
}

// TestAFilterIsNotSetBackWithoutItsNotes: while the notes cannot be read, it is unknown what is to be set
// back. It is tried again, said once for each, and is no reason to warn of a strict filter.
func TestAFilterIsNotSetBackWithoutItsNotes(t *testing.T) {
	a := addr("10.0.0.1")
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{a: {Link: 7, Found: true}}, forgetful: errors.New("busy")}
	var said strings.Builder
	deps := fakeDeps
	deps.Log = slog.New(slog.NewTextHandler(&said, nil))
	deps.Parameters, deps.Warn = "/proc/sys/net", func(text string) { t.Errorf("warned: %s", text) }
	actor := newActor(deps, k)
	for _, want := range []Desired{{Ring: map[netip.Addr][]netip.Addr{addr("192.0.2.1"): {a}}}, {}} {
		actor.set(want)
		for range 2 {
			if err := actor.apply(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !slices.Equal(k.loosened, []int{7, 7}) || k.tightened != 0 || strings.Count(said.String(), "busy") != 2 {
		t.Errorf("loosened %v, set back %d times:\n%s", k.loosened, k.tightened, said.String())
	}
	k.forgetful = nil
	if err := actor.apply(); err != nil || k.tightened != 1 {
		t.Errorf("set back %d times, %v", k.tightened, err)
	}
}
