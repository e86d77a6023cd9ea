package vrf

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// fakeKernel fails as often as told.
type fakeKernel struct {
	fails int
	left  []string
	lacks bool // it fails so that rules are known to be missing
	sets  int
	vrfs  []lb.Interface // of the last call
}

func (k *fakeKernel) set(_ lb.Family, vrfs []lb.Interface, _ bool) ([]string, error) {
	k.vrfs = vrfs
	if k.sets++; k.fails > 0 {
		k.fails--
		if k.lacks {
			return nil, fmt.Errorf("table: %w", missingError{errors.New("no buffer space")})
		}
		return nil, errors.New("no buffer space")
	}
	return k.left, nil
}

// world is what the actor sees.
type world struct {
	kernel     *fakeKernel
	interfaces []lb.Interface
	listed     bool
	wanted     map[string]bool // nil while they are not known
	// ways are by VRF, and by address in the form of text.
	ways    map[string]links.Way
	asked   int  // for ways
	unknown bool // the kernel does not say which way packets take
	told    map[string]string
	early   bool // States has returned something before it was told
	late    bool // or not yet when it had changed
	changes int
	log     strings.Builder
	clock   time.Time
}

func (w *world) actor() (a *Actor) {
	a = New(Deps{Log: slog.New(slog.NewTextHandler(&w.log, nil)),
		Now: func() time.Time { return w.clock }, Kernel: w.kernel, Marks: DefaultMarks, Families: []lb.Family{lb.IPv4},
		Narrow: true, Interfaces: func() ([]lb.Interface, bool) { return w.interfaces, w.listed },
		Wanted: func() (map[string]bool, bool) { return w.wanted, w.wanted != nil },
		Backends: func() []netip.Addr {
			return []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("10.1.0.3"), netip.MustParseAddr("10.0.0.1")}
		},
		Way: func(vrf string, mark uint32, addr netip.Addr) (links.Way, error) {
			if (vrf == "") != (mark == 0) {
				return links.Way{}, errors.New("a mark without a VRF")
			}
			w.asked++
			if w.unknown {
				return links.Way{}, errors.New("no buffer space")
			}
			return w.ways[vrf+" "+addr.String()], nil
		},
		Tell: func(states map[string]string) { w.told, w.early = states, w.early || a.saysSo(states) },
		Changed: func() {
			w.changes++
			w.late = w.late || !a.saysSo(w.told)
		}})
	return a
}

// saysSo reports whether States returns this.
func (a *Actor) saysSo(states map[string]string) bool {
	got, known := a.States()
	return known && maps.Equal(got, states)
}

func newWorld() *world {
	own := links.Way{Kind: lb.RouteOwn, Link: 3}
	return &world{kernel: &fakeKernel{}, listed: true, wanted: map[string]bool{"red": true}, interfaces: []lb.Interface{device("red", 100),
		{Name: "up0", VRF: "red", Enslaved: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24")}}},
		ways: map[string]links.Way{" 10.1.0.2": own, "red 10.1.0.2": own, " 10.1.0.3": own, "red 10.1.0.3": own,
			" 10.0.0.1": {Kind: lb.RouteOwn, Local: true}}}
}

// What is said of a VRF, and why not that the kernel delivers.
func TestStates(t *testing.T) {
	astray := links.Way{Kind: lb.RouteDefault, Link: 9}
	for _, test := range []struct {
		name   string
		change func(*world)
		want   string
	}{
		{"delivers", func(*world) {}, ""},
		{"down", func(w *world) { w.interfaces[0].Disabled = true }, "the VRF is down"},
		{"no forwarding", func(w *world) { w.interfaces[0].Unforwarded4 = true }, "net.ipv4.conf.red.forwarding is 0"},
		{"no forwarding, and no IPv4 either", func(w *world) {
			w.interfaces[0].Unforwarded4, w.interfaces[1].Addresses = true, nil
		}, ""},
		{"no mark is free", func(w *world) { w.kernel.left = []string{"red"} }, "more VRFs"},
		{"all goes astray", func(w *world) { w.ways["red 10.1.0.2"], w.ways["red 10.1.0.3"] = astray, links.Way{} },
			"take another way"},
		{"one goes its own way", func(w *world) { w.ways["red 10.1.0.2"] = astray }, ""},
		{"no endpoint has a way", func(w *world) { clear(w.ways) }, ""},
		{"only by the default route", func(w *world) {
			for to := range w.ways {
				w.ways[to] = links.Way{Kind: lb.RouteDefault, Link: len(to)}
			}
		}, ""},
	} {
		w := newWorld()
		test.change(w)
		a := w.actor()
		again, err := a.step(t.Context())
		states, known := a.States()
		state, there := states["red"]
		if err != nil || !known || !there || again != lookEvery || test.want == "" && state != "" ||
			!strings.Contains(state, test.want) {
			t.Errorf("%s: %v, %q, again in %s, %v; want %q", test.name, known, states, again, err, test.want)
		}
	}
}

// Rules are for those VRFs alone that a router is in; those of other programs stay as they are.
func TestOnlyWantedVRFs(t *testing.T) {
	w := newWorld()
	w.interfaces = append(w.interfaces, device("other", 200))
	a := w.actor()
	w.wanted = nil
	if _, err := a.step(t.Context()); err != nil || w.kernel.sets > 0 {
		t.Errorf("wrote %d times before it is known which VRFs are wanted: %v", w.kernel.sets, err)
	}
	w.wanted = map[string]bool{"red": true, "not here": true}
	if _, err := a.step(t.Context()); err != nil {
		t.Error(err)
	}
	states, known := a.States()
	if _, ours := states["red"]; !known || !ours || len(states) != 1 || len(w.kernel.vrfs) != 1 {
		t.Errorf("%v, %v; rules for %v, want those for red", known, states, w.kernel.vrfs)
	}
}

// On a node without such a VRF the actor looks once for what an earlier proxy has left, and warns of nothing.
func TestNothingWithoutVRFs(t *testing.T) {
	for _, fails := range []int{0, 9} {
		w := newWorld()
		w.kernel.fails, w.wanted = fails, map[string]bool{"not here": true}
		a := w.actor()
		for range 3 {
			if again, err := a.step(t.Context()); again != 0 || err != nil {
				t.Errorf("again in %s, %v", again, err)
			}
		}
		if _, known := a.States(); !known || w.kernel.sets != 1 || w.log.Len() > 0 {
			t.Errorf("known %v, asked the kernel %d times, logged %q", known, w.kernel.sets, w.log.String())
		}
	}
	w := newWorld()
	a := w.actor()
	if _, err := a.step(t.Context()); err != nil {
		t.Error(err)
	}
	w.wanted, w.kernel.fails = map[string]bool{}, 1
	if _, err := a.step(t.Context()); err == nil {
		t.Error("the rules of a VRF may be left, and it does not try again")
	}
	if _, err := a.step(t.Context()); err != nil || w.kernel.sets != 3 || w.kernel.vrfs != nil {
		t.Errorf("%v, %d calls, the last for %v", err, w.kernel.sets, w.kernel.vrfs)
	}
}

// A kernel that does not say whether the rules are there leaves what was said for as long as a speaker waits for a proxy.
// One that lacks them and does not take them is news at once.
func TestFailuresAreNoNewsAtOnce(t *testing.T) {
	w := newWorld()
	a := w.actor()
	step := func(what string, fails bool, want string, changes int) {
		t.Helper()
		_, err := a.step(t.Context())
		states, known := a.States()
		got := states["red"]
		if !known {
			got = "unknown"
		}
		if (err != nil) != fails || want == "" && got != "" || !strings.Contains(got, want) || w.changes != changes {
			t.Errorf("%s: %v, %q, %d changes; want %q, %d", what, err, got, w.changes, want, changes)
		}
	}
	w.listed = false
	step("before the interfaces are known", false, "unknown", 0)
	if w.listed = true; w.kernel.sets > 0 {
		t.Errorf("wrote %d times before the interfaces are known", w.kernel.sets)
	}
	w.kernel.fails = 9
	step("the first failure", true, "unknown", 0)
	step("the second", true, "unknown", 0)
	step("the third, as the whole proxy waits", true, "no buffer space", 1)
	w.kernel.fails = 0
	step("well", false, "", 2)
	for range 2 { // an end of the failures ends the time
		w.kernel.fails = 9
		step("fails", true, "", 2)
		w.clock = w.clock.Add(hold - 1)
		step("fails for less than the hold", true, "", 2)
		w.kernel.fails = 0
		step("well again", false, "", 2)
	}
	w.kernel.fails = 9
	step("fails", true, "", 2)
	w.interfaces[0].Disabled = true
	step("the VRF goes down meanwhile", true, "the VRF is down", 3)
	w.interfaces[0].Disabled = false
	w.clock = w.clock.Add(hold)
	step("fails for the hold", true, "no buffer space", 4)
	w.kernel.fails = 0
	step("well after the hold", false, "", 5)
	w.kernel.fails, w.kernel.lacks = 1, true
	step("lacks the rules", true, "no buffer space", 6)
	w.interfaces = nil
	step("without a VRF", false, "", 7)
	if w.early || w.late {
		t.Errorf("told after States returned it: %v; before States returns it: %v", w.early, w.late)
	}
}

// The kernel is asked once about each endpoint, and what it said stays while it says nothing.
func TestStraysStay(t *testing.T) {
	w := newWorld()
	w.interfaces, w.wanted["blue"] = append(w.interfaces, device("blue", 200)), true
	w.ways["blue 10.1.0.2"] = links.Way{Kind: lb.RouteOwn, Link: 3}
	a := w.actor()
	step := func(what, want string) {
		t.Helper()
		w.asked = 0
		_, err := a.step(t.Context())
		if states, _ := a.States(); err != nil || !strings.Contains(states["red"], want) ||
			(want == "") != (states["red"] == "") || states["blue"] != "" {
			t.Errorf("%s: %v, %v; want %q for red", what, states, err, want)
		}
	}
	step("well", "")
	if w.asked != 5 { // three endpoints, and the first for each VRF
		t.Errorf("asked %d times", w.asked)
	}
	w.ways["red 10.1.0.2"], w.ways["red 10.1.0.3"] = links.Way{}, links.Way{}
	step("red goes astray", "the endpoint 10.1.0.3 take")
	w.unknown = true
	step("the kernel says nothing", "take another way")
	w.unknown, w.ways[" 10.1.0.2"], w.ways[" 10.1.0.3"] = false, links.Way{}, links.Way{}
	step("no endpoint has a way", "take another way")
	w.interfaces[0].Disabled = true
	step("and down", "the VRF is down")
	w.interfaces[0].Disabled = false
	step("no endpoint has a way, and up", "take another way")
}

// TestKernelRules writes the rules into a real kernel, changes them, repairs them, and removes them. The VM's suite vrf
// shows that they do what they shall.
func TestKernelRules(t *testing.T) {
	ns := nstest.New(t)
	var k *Kernel
	ns.Do(t, func() (err error) { k, err = Open(DefaultMarks); return err })
	defer k.Close()
	set := func(vrfs ...lb.Interface) {
		t.Helper()
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			if left, err := k.set(family, vrfs, true); err != nil || len(left) > 0 {
				t.Fatalf("%s: %v, left %v", family, err, left)
			}
		}
	}
	rules := func(what string, want ...string) {
		t.Helper()
		for _, family := range []string{"-4", "-6"} {
			var got []string
			for line := range strings.Lines(ns.Run(t, "ip", family, "rule")) {
				if rule, ok := strings.CutPrefix(line, "990:"); ok {
					got = append(got, strings.Join(strings.Fields(rule), " "))
				}
			}
			if strings.Join(got, "; ") != strings.Join(want, "; ") {
				t.Errorf("%s: ip %s rule: %q, want %q", what, family, got, want)
			}
		}
	}
	const inward, ours = "from all fwmark 0x70/0x70 lookup main suppress_prefixlength 0 proto 76", " proto 76"
	red, blue := device("red", 100), device("blue", 200)
	ns.Run(t, "ip", "rule", "add", "pref", "990", "fwmark", "0x1/0x1", "lookup", "5") // somebody else's
	ns.Run(t, "ip", "-6", "rule", "add", "pref", "990", "fwmark", "0x1/0x1", "lookup", "5")
	const others = "from all fwmark 0x1/0x1 lookup 5"
	set()
	rules("no VRF", others)
	set(red)
	rules("red", others, inward, "from all fwmark 0x10/0x70 lookup 100"+ours)
	listing := ns.Run(t, "nft", "list", "table", "ip", TableName)
	for _, want := range []string{
		`iifname "red"`, "ct direction original", "ct status dnat", "ct mark set ct mark & 0xffffff9f | 0x00000010",
		"meta mark set meta mark | 0x00000070", "ct direction reply", "ct mark & 0x00000070 == 0x00000010",
		"meta mark set meta mark & 0xffffff9f | 0x00000010", "priority mangle",
	} {
		if !strings.Contains(listing, want) {
			t.Errorf("the table lacks %q:\n%s", want, listing)
		}
	}
	set(blue, red)
	rules("blue comes", others, inward, "from all fwmark 0x10/0x70 lookup 100"+ours, "from all fwmark 0x20/0x70 lookup 200"+ours)
	ns.Run(t, "nft", "flush", "table", "ip", TableName)
	ns.Run(t, "ip", "rule", "del", "pref", "990", "fwmark", "0x10/0x70")
	ns.Run(t, "ip", "-6", "rule", "del", "pref", "990", "fwmark", "0x10/0x70")
	set(blue, red)
	rules("repaired", others, inward, "from all fwmark 0x20/0x70 lookup 200"+ours, "from all fwmark 0x10/0x70 lookup 100"+ours)
	if listing := ns.Run(t, "nft", "list", "table", "ip", TableName); !strings.Contains(listing, `"blue"`) {
		t.Errorf("the table is not repaired:\n%s", listing)
	}
	ns.Run(t, "ip", "rule", "add", "pref", "990", "fwmark", "0x8/0xf", "lookup", "100", "protocol", "76") // by another --vrf-mark
	set(blue)
	rules("red goes", others, inward, "from all fwmark 0x20/0x70 lookup 200"+ours)
	ns.Do(t, func() error { return Cleanup() })
	rules("cleaned up", others)
	if tables := ns.Run(t, "nft", "list", "tables"); strings.Contains(tables, TableName) {
		t.Errorf("left: %s", tables)
	}
}
