package bfd

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// keeper is what Actor and worker have in common.
type keeper interface {
	Set(map[Key]Profile)
	Run(context.Context) error
	Outcomes() map[Key]Outcome
	Health() Health
}

// running is an actor that runs in a namespace.
type running struct {
	keeper
	t       testing.TB
	changed chan struct{}
	stop    func() // ends Run and waits for it; may be called again
}

// start runs a worker in a namespace until the test ends. Its thread does the given things first.
func start(t testing.TB, ns *nstest.NS, opts Options, first ...func() error) *running {
	return startWorker(t, ns, workerOptions{Options: opts}, first...)
}

func startWorker(t testing.TB, ns *nstest.NS, opts workerOptions, first ...func() error) *running {
	t.Helper()
	var handle netns.NsHandle
	ns.Do(t, func() (err error) { handle, err = netns.Get(); return err })
	t.Cleanup(func() { handle.Close() })
	opts.open = func() (wire, error) {
		if err := netns.Set(handle); err != nil { // on the engine's thread, which ends with it
			return nil, err
		}
		for _, do := range first {
			if err := do(); err != nil {
				return nil, err
			}
		}
		return newKernel()
	}
	return begin(t, ns, opts.Options, func(o Options) keeper {
		opts.Options = o
		return newWorker(opts)
	})
}

// startProcess runs an Actor, and so a process, in a namespace until the test ends.
func startProcess(t testing.TB, ns *nstest.NS, opts Options) (_ *running, pid func() int) {
	t.Helper()
	var child atomic.Pointer[os.Process]
	r := begin(t, ns, opts, func(opts Options) keeper {
		p := New(opts)
		p.onThread = func(start func(*exec.Cmd) error, cmd *exec.Cmd) error {
			ns.Do(t, func() error { return start(cmd) })
			child.Store(cmd.Process)
			return nil
		}
		return p
	})
	return r, func() int { return child.Load().Pid }
}

func begin(t testing.TB, ns *nstest.NS, opts Options, build func(Options) keeper) *running {
	r := &running{t: t, changed: make(chan struct{}, 1)}
	if _, benchmark := t.(*testing.B); !benchmark {
		opts.Log = slog.New(slog.NewTextHandler(t.Output(), nil)).With("in", ns.Name)
	}
	opts.Changed = func() {
		select {
		case r.changed <- struct{}{}:
		default:
		}
	}
	r.keeper = build(opts)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := r.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	r.stop = func() { cancel(); <-ended }
	t.Cleanup(r.stop)
	return r
}

// until waits for the outcome of a session to be as wished.
func (r *running) until(key Key, what string, ok func(Outcome) bool) Outcome {
	r.t.Helper()
	timeout := time.After(longest)
	for {
		if o, found := r.Outcomes()[key]; found && ok(o) {
			return o
		}
		select {
		case <-r.changed:
		case <-timeout:
			r.t.Fatalf("%s: not %s: %+v; %+v", key, what, r.Outcomes()[key], r.Health())
		}
	}
}

func isUp(o Outcome) bool { return o.State == Up }

// settled reports whether the session goes at its own timers, and not still at those of its start.
func settled(o Outcome) bool { return o.State == Up && o.RemoteState == Up && o.DetectionTime < slow }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// sturdy outlives that the threads of a test wait for one another on a busy machine.
var sturdy = Profile{TransmitInterval: 50 * ms, ReceiveInterval: 50 * ms, DetectMultiplier: 15}

var fast = Profile{TransmitInterval: 50 * time.Millisecond, ReceiveInterval: 50 * time.Millisecond}

// cable joins two new namespaces, 192.0.2.1 and 2001:db8::1 to 192.0.2.2 and 2001:db8::2.
func cable(t *testing.T) (a, b *nstest.NS) {
	t.Helper()
	a, b = nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	for ns, cidr := range map[*nstest.NS]string{a: "2001:db8::1/64", b: "2001:db8::2/64"} {
		ns.Run(t, "ip", "addr", "add", cidr, "dev", "eth0", "nodad")
		ns.Run(t, "ip", "addr", "add", map[*nstest.NS]string{a: "fe80::1/64", b: "fe80::2/64"}[ns], "dev", "eth0", "nodad")
	}
	return a, b
}

func TestSessionsOverACable(t *testing.T) {
	a, b := cable(t)
	left, right := start(t, a, Options{}), start(t, b, Options{})
	keys := map[Key]Key{
		{Peer: addr("192.0.2.2")}:    {Peer: addr("192.0.2.1"), Local: addr("192.0.2.2"), Interface: "eth0"},
		{Peer: addr("2001:db8::2")}:  {Peer: addr("2001:db8::1"), Interface: "eth0"},
		{Peer: addr("fe80::2%eth0")}: {Peer: addr("fe80::1"), Local: addr("fe80::2"), Interface: "eth0"},
		{Peer: addr("192.0.2.2"), Local: addr("192.0.2.1"), Multihop: true}: {Peer: addr("192.0.2.1"), Multihop: true},
	}
	lefts, rights := map[Key]Profile{}, map[Key]Profile{}
	for l, r := range keys {
		lefts[l], rights[r] = sturdy, sturdy
	}
	left.Set(lefts)
	right.Set(rights)
	for l, r := range keys {
		left.until(l, "settled", settled)
		right.until(r, "settled", settled)
	}
	left.stop()
	for _, r := range keys {
		o := right.until(r, "down", func(o Outcome) bool { return o.State == Down })
		if o.RemoteState != AdminDown || o.RemoteDiagnostic != AdministrativelyDown || o.Diagnostic != NeighborSignaledDown ||
			o.Failures != 0 || !o.LastDown.Administrative {
			t.Errorf("%s: planned stop seen as %+v", r, o)
		}
	}
	if h := right.Health(); len(h.Dropped) > 0 || h.Lost > 0 {
		t.Errorf("%+v", h)
	}
}

// TestTheVRFIsMadeAnew has a session in a VRF that is deleted and made anew. An interface stands for the VRF.
func TestTheVRFIsMadeAnew(t *testing.T) {
	a, b := cable(t)
	left, right := start(t, a, Options{}), start(t, b, Options{})
	there := Key{Peer: addr("192.0.2.1")}
	right.Set(map[Key]Profile{there: sturdy})
	session := func() Key {
		key := Key{Peer: addr("192.0.2.2"), VRF: "eth0"}
		a.Do(t, func() error {
			vrf, err := net.InterfaceByName(key.VRF)
			if err == nil {
				key.VRFIndex = vrf.Index
			}
			return err
		})
		return key
	}
	before := session()
	left.Set(map[Key]Profile{before: sturdy})
	left.until(before, "up", isUp)
	a.Run(t, "ip", "link", "del", "eth0")
	a.Run(t, "ip", "link", "add", "other0", "type", "veth", "peer", "eth1") // so that the index is another one
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	after := session()
	if after == before {
		t.Fatal("the interface has the index of before")
	}
	left.Set(map[Key]Profile{after: sturdy})
	left.until(after, "up again", isUp)
}

// A pod of the node, whose packets have not passed a router either, does not end a session in its peer's
// name.
func TestContract11APodEndsNoSession(t *testing.T) {
	a, b := cable(t)
	pod := nstest.New(t)
	nstest.Veth(t, a, "veth0", "10.244.0.1/24", pod, "eth0", "10.244.0.2/24")
	a.Run(t, "ip", "addr", "add", "fd00:244::1/64", "dev", "veth0", "nodad")
	pod.Run(t, "ip", "addr", "add", "fd00:244::2/64", "dev", "eth0", "nodad")
	for _, parameter := range []string{"all", "veth0"} { // as distributions have it, or not
		a.Run(t, "sysctl", "-q", "-w", "net.ipv4.conf."+parameter+".rp_filter=0")
	}
	for _, test := range []struct{ peer, local, gateway string }{
		{"192.0.2.2", "192.0.2.1", "10.244.0.1"}, {"2001:db8::2", "2001:db8::1", "fd00:244::1"},
	} {
		ours, theirs := Key{Peer: addr(test.peer)}, Key{Peer: addr(test.local)}
		node, router := start(t, a, Options{}), start(t, b, Options{})
		node.Set(map[Key]Profile{ours: sturdy})
		router.Set(map[Key]Profile{theirs: sturdy})
		node.until(ours, "settled", settled)
		bits := strconv.Itoa(ours.Peer.BitLen())
		pod.Run(t, "ip", "addr", "add", test.peer+"/"+bits, "dev", "lo", "nodad")
		pod.Run(t, "ip", "route", "add", test.local+"/"+bits, "via", test.gateway)
		var forged link
		pod.Do(t, func() error {
			w, err := newKernel()
			if err == nil {
				forged, err = w.dial(Key{Peer: addr(test.local), Local: addr(test.peer)}, 0, rand.Uint32)
			}
			return err
		})
		waitFor(t, "forged packets are dropped", func() bool {
			for _, state := range []State{Down, AdminDown} {
				packet := Packet{State: state, DetectMultiplier: 3, MyDiscriminator: 9}
				if err := forged.send(packet.append(nil)); err != nil {
					t.Fatal(err)
				}
			}
			return node.Health().Dropped[dropInterface] > 20 || node.Outcomes()[ours].LastDown != nil
		})
		if o := node.Outcomes()[ours]; o.State != Up || o.LastDown != nil {
			t.Errorf("%s: the session was ended: %+v", test.peer, o)
		}
		forged.close()
		node.stop()
		router.stop()
	}
}

// TestWhatIsOnTheWire looks at packets as a peer's kernel does.
func TestWhatIsOnTheWire(t *testing.T) {
	a, b := cable(t)
	for name, key := range map[string]Key{
		"IPv4":          {Peer: addr("192.0.2.2")},
		"IPv4 multihop": {Peer: addr("192.0.2.2"), Local: addr("192.0.2.1"), Multihop: true},
		"IPv6":          {Peer: addr("2001:db8::2"), Local: addr("2001:db8::1"), Interface: "eth0"},
		"link-local":    {Peer: addr("fe80::2%eth0"), Local: addr("fe80::1")},
	} {
		var w *kernel
		b.Do(t, func() (err error) { w, err = newKernel(); return errors.Join(err, w.listen(key.listener())) })
		us := start(t, a, Options{})
		began := time.Now() // before Set: the engine's thread may send before Set returns
		us.Set(map[Key]Profile{key: {}})
		var got []datagram
		for len(got) == 0 {
			w.wait(time.Now().Add(20 * time.Second))
			got, _ = w.receive(time.Now())
			if time.Since(began) > 20*time.Second {
				t.Fatalf("%s: nothing comes", name)
			}
		}
		d := got[0]
		if d.ttl != 255 || d.device == 0 || d.to != key.Peer.WithZone("") || d.listener != key.listener() ||
			key.Local.IsValid() && d.from != key.Local {
			t.Errorf("%s: %+v", name, d)
		}
		if d.at.Before(began) || d.at.After(time.Now()) {
			t.Errorf("%s: began at %v, arrived at %v, now %v", name, began, d.at, time.Now())
		}
		want := Packet{State: Down, DetectMultiplier: 3, DesiredMinTx: time.Second, RequiredMinRx: 300 * ms}
		p, drop := decode(d.payload)
		if p.MyDiscriminator == 0 || drop != dropNone {
			t.Errorf("%s: %+v, dropped: %v", name, p, drop)
		}
		if p.MyDiscriminator = 0; p != want {
			t.Errorf("%s: %+v", name, p)
		}
		us.stop()
		w.close()
	}
}

// loopback returns a wire, and a link to it.
func loopback(t *testing.T) (*kernel, link) {
	key := Key{Peer: addr("127.0.0.1")}
	var w *kernel
	var l link
	nstest.New(t).Do(t, func() (err error) {
		if w, err = newKernel(); err != nil {
			return err
		}
		if err = w.listen(key.listener()); err == nil {
			l, err = w.dial(key, 0, func() uint32 { return 1 })
		}
		return err
	})
	t.Cleanup(func() { l.close(); w.close() })
	waitFor(t, "the kernel to stamp packets", func() bool { // which it begins with a while after the first asks for it
		_ = l.send(sample)
		sent := time.Now()
		time.Sleep(ms)
		got, _ := w.receive(time.Now())
		return len(got) == 1 && got[0].at.Before(sent)
	})
	return w, l
}

// TestArrivalIsKeptWhilePacketsWait reads packets long after they came, and after others were lost.
func TestArrivalIsKeptWhilePacketsWait(t *testing.T) {
	w, l := loopback(t)
	if l.sourcePort() < minSourcePort {
		t.Errorf("source port %d", l.sourcePort())
	}
	w.receive(time.Now())
	if err := l.send(sample); err != nil {
		t.Fatal(err)
	}
	sent := time.Now()
	w.wait(time.Now().Add(20 * time.Second))
	time.Sleep(50 * ms)
	got, horizon := w.receive(time.Now())
	if len(got) != 1 || got[0].at.After(sent) || got[0].lost || horizon.Before(sent) {
		t.Errorf("sent until %v, received %+v, horizon %v", sent, got, horizon)
	}

	if err := unix.SetsockoptInt(w.sockets[0].fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0); err != nil {
		t.Fatal(err)
	}
	for range 100 {
		_ = l.send(sample)
	}
	w.wait(time.Now().Add(20 * time.Second))
	got, _ = w.receive(time.Now())
	_ = l.send(sample) // which tells of those before it that found no room
	w.wait(time.Now().Add(20 * time.Second))
	after, _ := w.receive(time.Now())
	if len(got) == 0 || len(got) > 50 || len(after) != 1 || !after[0].lost {
		t.Errorf("of 100 packets %d came, then %+v", len(got), after)
	}
}

func TestArrival(t *testing.T) {
	drained, now := epoch, epoch.Add(100*ms)
	for _, test := range []struct {
		name string
		age  time.Duration
		want time.Time
	}{
		{"just now", 0, now},
		{"a while ago", 30 * ms, now.Add(-30 * ms)},
		{"the clock was set forward", time.Hour, drained},
		{"the clock was set back", -time.Hour, now},
	} {
		if got := arrival(now, test.age, drained); !got.Equal(test.want) {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// TestOverload has more packets waiting than are taken at once: the horizon is that of the last one
// taken.
func TestOverload(t *testing.T) {
	w, l := loopback(t)
	for range batch + 1 {
		_ = l.send(sample)
	}
	now := time.Now()
	got, horizon := w.receive(now)
	if len(got) != batch || !horizon.Equal(got[batch-1].at) || !horizon.Before(now) {
		t.Errorf("%d packets, horizon %v before now", len(got), now.Sub(horizon))
	}
	if got, horizon = w.receive(now); len(got) != 1 || !horizon.Equal(now) {
		t.Errorf("then %d packets, horizon %v before now", len(got), now.Sub(horizon))
	}
}

// TestTroubleOnTheCable takes away what a session stands on, and gives it back.
func TestTroubleOnTheCable(t *testing.T) {
	a, b := cable(t)
	us, them := start(t, a, Options{}), start(t, b, Options{})
	key := Key{Peer: addr("192.0.2.2"), Local: addr("192.0.2.1"), Interface: "eth0"}
	them.Set(map[Key]Profile{toLeft: fast})
	problem := func(text string) func(Outcome) bool {
		return func(o Outcome) bool { return strings.Contains(o.Problem, text) }
	}

	a.Run(t, "ip", "addr", "del", "192.0.2.1/24", "dev", "eth0")
	us.Set(map[Key]Profile{key: fast})
	us.until(key, "without its address", problem("bind to 192.0.2.1"))
	a.Run(t, "ip", "addr", "add", "192.0.2.1/24", "dev", "eth0")
	us.until(key, "up", isUp)

	a.Run(t, "ip", "link", "del", "eth0")
	us.until(key, "without its interface", problem("eth0"))
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	us.until(key, "up on the new interface", func(o Outcome) bool { return isUp(o) && o.Problem == "" })
	them.until(toLeft, "up", isUp)

	a.Run(t, "ip", "link", "set", "eth0", "down")
	them.until(toLeft, "down", func(o Outcome) bool { return o.State == Down })
	us.until(key, "down", func(o Outcome) bool { return o.State == Down })
	a.Run(t, "ip", "link", "set", "eth0", "up")
	us.until(key, "up again", isUp)
}

func TestPortInUse(t *testing.T) {
	a, b := cable(t)
	var other *kernel
	a.Do(t, func() (err error) { other, err = newKernel(); return errors.Join(err, other.listen(listener{})) })
	us, them := start(t, a, Options{}), start(t, b, Options{})
	us.Set(map[Key]Profile{toRight: fast})
	them.Set(map[Key]Profile{toLeft: fast})
	us.until(
		toRight, "without its port",
		func(o Outcome) bool { return o.Problem == "listen on UDP port 3784: address already in use" })
	other.close()
	us.until(toRight, "up", func(o Outcome) bool { return isUp(o) && o.Problem == "" })
}

// TestAcrossARouter has packets travel further than the sessions allow, and then not.
func TestAcrossARouter(t *testing.T) {
	a, b := behindRouter(t)
	us, them := start(t, a, Options{}), start(t, b, Options{})
	single, multi := Key{Peer: addr("198.51.100.2")}, Key{Peer: addr("198.51.100.2"), Multihop: true}
	us.Set(map[Key]Profile{single: fast, multi: fast})
	them.Set(map[Key]Profile{{Peer: addr("192.0.2.1")}: fast, {Peer: addr("192.0.2.1"), Multihop: true}: fast})
	us.until(multi, "up", isUp)
	us.until(single, "told that it is too far",
		func(o Outcome) bool { return strings.Contains(o.Problem, "TTL 254") && o.State == Down })
}

// TestJunk is for what anybody may send to the port.
func TestJunk(t *testing.T) {
	a, b := cable(t)
	us, them := start(t, a, Options{}), start(t, b, Options{})
	us.Set(map[Key]Profile{toRight: sturdy})
	them.Set(map[Key]Profile{toLeft: sturdy})
	us.until(toRight, "settled", settled)
	var l link
	b.Do(t, func() (err error) {
		l, err = new(kernel).dial(toLeft, 0, func() uint32 { return 77 })
		return err
	})
	defer l.close()
	random := rand.New(rand.NewPCG(1, 2))
	waitFor(t, "the junk to be counted", func() bool {
		for range 500 { // as many as the socket has room for, also while the engine gets no processor
			junk := slices.Clone(sample)
			for range random.IntN(6) {
				junk[random.IntN(len(junk))] = byte(random.Uint32())
			}
			_ = l.send(junk[:random.IntN(len(junk)+1)])
		}
		h, n := us.Health(), uint64(0)
		for _, count := range h.Dropped {
			n += count
		}
		return n > 15000 && h.Dropped[dropShort] > 0 && h.Dropped[dropNoSession] > 0
	})
	if o := us.Outcomes()[toRight]; o.State != Up || o.Failures > 0 {
		t.Errorf("%+v; %+v", o, us.Health())
	}
}

// Sockets for VRFs and the one for the rest share a port, in whichever order they come, and another program's is seen all
// the same. Any device does for a VRF here.
func TestPortsInVRFs(t *testing.T) {
	a, _ := cable(t)
	for _, v6 := range []bool{false, true} {
		main, red, blue := listener{v6: v6}, listener{v6: v6, vrf: "eth0"}, listener{v6: v6, vrf: "lo"}
		a.Do(t, func() error {
			for _, order := range [][]listener{{main, red}, {red, main}, {red, main, blue}} {
				k, err := newKernel()
				if err != nil {
					return err
				}
				for _, l := range order {
					if err := k.listen(l); err != nil {
						t.Errorf("%v, of %v: %v", l, order, err)
					}
				}
				other, err := newKernel()
				if err != nil {
					return err
				}
				if err := other.listen(main); !errors.Is(err, unix.EADDRINUSE) {
					t.Errorf("%v: another program took the port as well: %v", order, err)
				}
				other.close()
				k.close()
			}
			robbed, err := newKernel()
			if err != nil {
				return err
			}
			defer robbed.close()
			if err := robbed.listen(main); err != nil {
				return err
			}
			// The other program shares, as FRR's does.
			if err := unix.SetsockoptInt(robbed.sockets[0].fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				return err
			}
			k, err := newKernel()
			if err != nil {
				return err
			}
			defer k.close()
			if err := k.listen(red); err != nil {
				t.Errorf("in a VRF beside another program: %v", err)
			}
			if err := k.listen(main); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("another program's port is taken: %v", err)
			}
			return nil
		})
	}
}
