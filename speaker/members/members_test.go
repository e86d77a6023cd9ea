package members

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// cable is the real network with a plug that a test can pull.
type cable struct {
	*network
	pulled  atomic.Bool // nothing passes
	hangs   atomic.Bool // nothing passes either, and the kernel is alive
	packets chan *memberlist.Packet
	streams chan net.Conn
}

var errPulled = errors.New("the cable is pulled")

func newCable(t *testing.T, addr netip.AddrPort) *cable {
	transport, err := openNetwork(addr, false, noNode, &empties{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	c := &cable{network: transport, packets: make(chan *memberlist.Packet), streams: make(chan net.Conn)}
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	go func() {
		for {
			select {
			case p := <-transport.PacketCh():
				if c.silent() {
					continue
				}
				select {
				case c.packets <- p:
				case <-done:
					return
				}
			case s := <-transport.StreamCh():
				if c.silent() {
					s.Close()
					continue
				}
				select {
				case c.streams <- s:
				case <-done:
					return
				}
			case <-done:
				return
			}
		}
	}()
	return c
}

func (c *cable) silent() bool { return c.pulled.Load() || c.hangs.Load() }

func (c *cable) PacketCh() <-chan *memberlist.Packet { return c.packets }
func (c *cable) StreamCh() <-chan net.Conn           { return c.streams }

func (c *cable) WriteTo(b []byte, addr string) (time.Time, error) {
	return c.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (c *cable) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if c.silent() {
		return time.Now(), nil // lost on the way, as packets are
	}
	return c.network.WriteToAddress(b, a)
}

func (c *cable) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	return c.DialAddressTimeout(memberlist.Address{Addr: addr}, timeout)
}

func (c *cable) DialAddressTimeout(a memberlist.Address, timeout time.Duration) (net.Conn, error) {
	if c.silent() {
		return nil, errPulled
	}
	return c.network.DialAddressTimeout(a, timeout)
}

// rig is some members on loopback addresses of this process.
type rig struct {
	t       *testing.T
	members map[string]*rigged
	peers   map[string][]netip.Addr
	cables  sync.Map // by address
}

type rigged struct {
	*Members
	alive *liveness.Actor
	cable *cable
	stop  func() // leaves and waits
}

// say makes claims all that the node says.
func (m *rigged) say(claims map[netip.Addr]plan.Claim) { m.Begin(all(claims)) }

func (m *rigged) Live() []string { return m.alive.Sight().Live }
func (m *rigged) Dead() []string { return m.alive.Sight().Dead }

func fixed(addr netip.Addr) func(context.Context) (netip.Addr, error) {
	return func(context.Context) (netip.Addr, error) { return addr, nil }
}

// testPort is one for each test process, so that two of them can run side by side.
func testPort() int { return 20000 + os.Getpid()%20000 }

// rigs counts the rigs of this process: each has addresses of its own, so that tests run side by
// side.
var rigs atomic.Uint32

// newRig makes a rig whose test runs beside others, as all of them wait most of the time.
func newRig(t *testing.T, names ...string) *rig {
	t.Parallel()
	number := byte(rigs.Add(1))
	r := &rig{t: t, members: map[string]*rigged{}, peers: map[string][]netip.Addr{}}
	for i, name := range names {
		r.peers[name] = []netip.Addr{netip.AddrFrom4([4]byte{127, 7, number, byte(i + 1)})}
	}
	return r
}

// setup is how a test runs a member.
type setup struct {
	Options
	liveness liveness.Options
}

// start runs a member, which is not told of the others yet.
func (r *rig) start(name string, tweak ...func(*setup)) *rigged {
	r.t.Helper()
	addr := netip.AddrPortFrom(r.peers[name][0], uint16(testPort()))
	c := newCable(r.t, addr)
	s := setup{
		Options: Options{
			Self: name, Bind: fixed(addr.Addr()), Port: int(addr.Port()), Born: time.Now(),
			Log: slog.New(slog.DiscardHandler), Changed: func([]netip.Addr) {}, transport: c,
			pace: pace{every: 200 * time.Millisecond, alone: 500 * time.Millisecond, silent: time.Second,
				soon: 50 * time.Millisecond},
		},
		liveness: liveness.Options{Self: name, Log: slog.New(slog.DiscardHandler), Changed: func() {}, Probe: r.probe(c)},
	}
	for _, t := range tweak {
		t(&s)
	}
	r.cables.Store(addr.Addr(), c)
	m := &rigged{cable: c}
	s.liveness.Report = func(node string, born uint64) { m.Alarm(node, born) }
	s.liveness.Back = func(node string) { m.Greet(node) }
	m.alive = liveness.New(s.liveness)
	s.Liveness = m.alive
	m.Members = New(s.Options)
	alive := m.alive
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		var group errgroup.Group
		group.Go(func() error { return m.Run(ctx) })
		group.Go(func() error { return alive.Run(ctx) })
		done <- group.Wait()
	}()
	stopped := false
	m.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			r.t.Error(err)
		}
	}
	r.t.Cleanup(m.stop)
	r.members[name] = m
	return m
}

// probe is the real one, but for cables that are pulled.
func (r *rig) probe(own *cable) func(context.Context, netip.AddrPort) bool {
	return func(ctx context.Context, addr netip.AddrPort) bool {
		to, ok := r.cables.Load(addr.Addr())
		if own.pulled.Load() || ok && to.(*cable).pulled.Load() {
			return false
		}
		return liveness.Answers(ctx, addr)
	}
}

// introduce tells a member which others the API server knows.
func (r *rig) introduce(name string) {
	others := map[string][]netip.Addr{}
	for other, addrs := range r.peers {
		if other != name {
			others[other] = addrs
		}
	}
	r.members[name].SetPeers(others)
	r.members[name].alive.Set(others)
}

// cluster starts all, introduces them and waits until they have met.
func (r *rig) cluster(tweak ...func(*setup)) {
	r.t.Helper()
	names := r.names()
	for _, name := range names {
		r.start(name, tweak...)
		r.introduce(name)
	}
	for _, name := range names {
		r.eventually(name+" sees all", func() bool {
			return slices.Equal(r.members[name].Live(), names) &&
				r.members[name].Joined()
		})
	}
}

func (r *rig) names() []string {
	var names []string
	for name := range r.peers {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (r *rig) eventually(what string, f func() bool) {
	r.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatalf("not so: %s", what)
		}
	}
}

func (r *rig) wantClaims(at string, vip netip.Addr, want map[string]plan.Claim) {
	r.t.Helper()
	var d string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if d = cmp.Diff(want, r.members[at].Claims(vip, r.members[at].opts.Liveness.Sight()), cmpopts.EquateEmpty()); d == "" {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("at %s: %s", at, d)
		}
	}
}

func TestThreeMembers(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster()
	a, b, c := r.members["a"], r.members["b"], r.members["c"]

	a.say(map[netip.Addr]plan.Claim{vip1: {}, vip2: {Reason: lb.ReasonNotProgrammed}})
	b.say(map[netip.Addr]plan.Claim{vip1: {Reason: lb.ReasonNoLocalBackends}})
	r.wantClaims("c", vip1, map[string]plan.Claim{"a": {}, "b": {Reason: lb.ReasonNoLocalBackends}})
	r.wantClaims("c", vip2, map[string]plan.Claim{"a": {Reason: lb.ReasonNotProgrammed}})
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Reason: lb.ReasonNoLocalBackends}})

	a.say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
	r.wantClaims("c", vip2, nil)

	// A crash is noticed, and a crashed node's claims count no more.
	started := time.Now()
	a.cable.pulled.Store(true)
	for _, name := range []string{"b", "c"} {
		r.eventually(name+" notices the crash of a",
			func() bool { return slices.Equal(r.members[name].Live(), []string{"b", "c"}) })
	}
	t.Logf("the crash was known to both others after %v", time.Since(started).Round(time.Millisecond))
	r.wantClaims("b", vip1, nil)

	// While it was away, words were said on both sides.
	a.say(map[netip.Addr]plan.Claim{vip1: {Reason: lb.ReasonFeedLost}})
	b.say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	a.cable.pulled.Store(false)
	for _, name := range r.names() {
		r.eventually(name+" sees all again", func() bool { return slices.Equal(r.members[name].Live(), r.names()) })
	}
	r.wantClaims("c", vip1, map[string]plan.Claim{"a": {Reason: lb.ReasonFeedLost}, "b": {Answering: true}})
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Answering: true}})

	// A graceful leave: the last words arrive, then the node is gone for all.
	c.say(map[netip.Addr]plan.Claim{vip1: {Reason: lb.ReasonStopping}})
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Answering: true}, "c": {Reason: lb.ReasonStopping}})
	c.stop()
	for _, name := range []string{"a", "b"} {
		r.eventually(name+" knows that c has left",
			func() bool { return slices.Equal(r.members[name].Live(), []string{"a", "b"}) })
	}
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Answering: true}})
}

// A restarted speaker's old words are void from the moment at which the new process is met.
func TestRestartedMember(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster()
	r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}, vip2: {}})
	r.wantClaims("b", vip2, map[string]plan.Claim{"a": {}})
	r.members["a"].stop()
	r.start("a")
	r.introduce("a")
	r.eventually("a is back", func() bool {
		return r.members["a"].Joined() && slices.Contains(r.members["b"].Live(), "a") &&
			slices.Contains(r.members["c"].Live(), "a")
	})
	r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Reason: lb.ReasonFeedUnknown}})
	for _, name := range []string{"b", "c"} {
		r.wantClaims(name, vip1, map[string]plan.Claim{"a": {Reason: lb.ReasonFeedUnknown}})
		r.wantClaims(name, vip2, nil)
	}
}

// patient has no member take one for lost that gets no processor time for a while: its claims would
// be stale until it speaks again.
func patient(o *setup) {
	o.Profile = Profile{ProbeInterval: 2 * time.Second, ProbeTimeout: time.Second, GossipInterval: LAN.GossipInterval}
}

func TestManyClaimsArriveAtALateJoiner(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.start("a", patient)
	r.start("b", patient)
	r.introduce("a")
	r.introduce("b")
	claims := map[netip.Addr]plan.Claim{}
	for i := range 2000 {
		claims[netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})] = plan.Claim{Answering: i%2 == 0}
	}
	r.members["a"].say(claims)
	r.members["b"].say(claims)
	r.start("c", patient)
	r.introduce("c")
	r.eventually("c has met the others", r.members["c"].Joined)
	for vip, claim := range claims {
		r.wantClaims("c", vip, map[string]plan.Claim{"a": claim, "b": claim})
	}
}

func TestContractNothingIsKnownBeforeJoining(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	joined := make(chan struct{}, 10)
	a := r.start("a", func(o *setup) {
		o.Changed = func([]netip.Addr) {
			select {
			case joined <- struct{}{}:
			default:
			}
		}
	})
	if a.Joined() {
		t.Error("joined before anything was tried")
	}
	// The others are down: after some calls to each of them, a node is joined, alone.
	r.introduce("a")
	<-joined
	if !a.Joined() || !slices.Equal(a.Live(), []string{"a"}) {
		t.Errorf("joined %v with %v", a.Joined(), a.Live())
	}
	// And a node that is called calls back and counts as joined, whether or not it knows which others there are.
	b := r.start("b")
	r.eventually("a calls b by itself, and b sees both",
		func() bool { return b.Joined() && slices.Equal(b.Live(), []string{"a", "b"}) })
	// A cluster of one has nobody to wait for.
	c := r.start("c")
	c.SetPeers(map[string][]netip.Addr{})
	r.eventually("a node without others is joined", c.Joined)
}

func TestEncryption(t *testing.T) {
	key := func(b byte) func(*setup) {
		return func(o *setup) { o.Keys = [][]byte{slices.Repeat([]byte{b}, 32)} }
	}
	r := newRig(t, "a", "b", "c")
	r.start("a", key(1))
	r.start("b", key(1))
	c := r.start("c", key(2))
	for _, name := range r.names() {
		r.introduce(name)
	}
	r.eventually("a and b meet", func() bool { return slices.Equal(r.members["a"].Live(), []string{"a", "b"}) })
	r.eventually("c says whom it cannot join", func() bool { return strings.HasPrefix(c.Trouble(), "a, b: connected") })
	time.Sleep(2 * c.opts.pace.silent)
	if got := c.Live(); !slices.Equal(got, []string{"c"}) || c.Joined() {
		t.Errorf("with another key c sees %v, joined %v: it must not take itself for the only one", got, c.Joined())
	}
}

// TestKeysAreRotatedWithoutAGap replaces the key on one node after the other, while gossip goes on.
func TestKeysAreRotatedWithoutAGap(t *testing.T) {
	old, next := slices.Repeat([]byte{1}, 32), slices.Repeat([]byte{2}, 32)
	r := newRig(t, "a", "b", "c")
	var unread atomic.Int64 // messages for which a member had no key
	log := slog.New(slog.NewTextHandler(writerFunc(func(b []byte) {
		if strings.Contains(strings.ToLower(string(b)), "decrypt") {
			unread.Add(1)
		}
	}), nil))
	for _, name := range r.names() {
		r.start(name, func(o *setup) { o.Keys, o.Log = [][]byte{old}, log })
	}
	for _, name := range r.names() {
		r.introduce(name)
	}
	all := func() bool {
		for _, m := range r.members {
			if !slices.Equal(m.Live(), []string{"a", "b", "c"}) {
				return false
			}
		}
		return true
	}
	r.eventually("all meet", all)
	claims := 0
	for stage, keys := range [][][]byte{{old, next}, {next, old}, {next}} {
		// Later, a message from before a key was removed may still come.
		if n := unread.Load(); n > 0 {
			t.Errorf("%d messages could not be read before stage %d", n, stage)
		}
		for _, name := range r.names() {
			if err := r.members[name].SetKeys(keys); err != nil {
				t.Fatal(err)
			}
			claims++
			vip := netip.AddrFrom4([4]byte{192, 0, 2, byte(claims)})
			r.members[name].Update(map[netip.Addr]*plan.Claim{vip: {}})
			for other, m := range r.members {
				r.eventually(fmt.Sprintf("%s hears of %s from %s", other, vip, name), func() bool {
					_, heard := m.Claims(vip, m.opts.Liveness.Sight())[name]
					return heard || other == name
				})
			}
			r.eventually(fmt.Sprintf("all see all after %s has changed its keys", name), all)
		}
	}
	for _, m := range r.members {
		if got := m.keys.GetKeys(); len(got) != 1 || !slices.Equal(got[0], next) {
			t.Errorf("%d keys are left", len(got))
		}
		if err := m.SetKeys(nil); err == nil {
			t.Error("encryption ends while gossip goes on")
		}
	}
}

func TestParseKeys(t *testing.T) {
	bare := []byte("0123456789abcdef0123456789abcde\xff")
	text := []byte("0123456789abcdef")
	for _, c := range []struct {
		in   string
		want [][]byte
	}{
		{string(bare), [][]byte{bare}},
		{string(bare) + "\n", [][]byte{bare}},
		{"0123456\n89abcdef", [][]byte{[]byte("0123456\n89abcdef")}},
		{"0123456789abcdef\nfedcba9876543210", [][]byte{text, []byte("fedcba9876543210")}}, // base64 as a whole
		{"0123456789abcdef\n0123456789abcd\xff", [][]byte{[]byte("0123456789abcdef\n0123456789abcd\xff")}},
		{"0123456789abcdef\nfedcba987654321", nil}, // a byte is missing, and all together are 32
		{"MDEyMzQ1Njc4\nOWFiY2RlZg==", nil},
		{"MDEyMzQ1Njc4OWFiY2RlZg==\n", [][]byte{text}},
		{"MDEyMzQ1Njc4OWFiY2RlZg==\n" + string(bare) + "\r\n", [][]byte{text, bare}},
		{string(bare) + "\nMDEyMzQ1Njc4OWFiY2RlZg==", [][]byte{bare, text}},
		{string(bare) + "\nshort", nil},
		{string(bare) + "\n\n" + string(bare), nil},
		{"short", nil},
		{"", nil},
	} {
		got, err := ParseKeys([]byte(c.in))
		if !slices.EqualFunc(got, c.want, slices.Equal) || (err == nil) != (c.want != nil) {
			t.Errorf("%q: got %q, %v", c.in, got, err)
		}
	}
}

func TestRunWaitsForItsAddress(t *testing.T) {
	addr := netip.AddrPortFrom(netip.MustParseAddr("127.7.255.9"), uint16(testPort()))
	taken, err := net.Listen("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	warned := make(chan string, 100)
	m := New(Options{
		Self: "a", Bind: fixed(addr.Addr()), Port: int(addr.Port()), Born: time.Now(), Changed: func([]netip.Addr) {},
		Liveness: liveness.New(liveness.Options{}),
		Log:      slog.New(slog.NewTextHandler(writerFunc(func(b []byte) { warned <- string(b) }), nil)),
	})
	m.SetPeers(map[string][]netip.Addr{})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	<-warned
	if m.Joined() {
		t.Error("joined without a socket")
	}
	taken.Close()
	for deadline := time.Now().Add(20 * time.Second); !m.Joined(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not joined after the address became free")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(b []byte) (int, error) {
	f(b)
	return len(b), nil
}

func TestLogBridgeLevels(t *testing.T) {
	var got string
	bridge := log.New(
		&logBridge{log: slog.New(slog.NewTextHandler(writerFunc(func(b []byte) { got = string(b) }), &slog.HandlerOptions{
			Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return a
			},
		}))}, "", 0)
	for _, c := range [][2]string{
		{"[ERR] memberlist: Conflicting address for x", `level=WARN msg="gossip: Conflicting address for x"`},
		{"[ERR] memberlist: Failed fallback TCP ping: timeout",
			`level=DEBUG msg="gossip: Failed fallback TCP ping: timeout"`},
		{"[DEBUG] memberlist: Stream connection from=1.2.3.4", `level=DEBUG msg="gossip: Stream connection from=1.2.3.4"`},
		{"[INFO] memberlist: something", `level=INFO msg="gossip: something"`},
	} {
		bridge.Print(c[0])
		if want := c[1] + "\n"; got != want {
			t.Errorf("%s: got %q, want %q", c[0], got, want)
		}
	}
}

func ExampleParseKeys() {
	_, err := ParseKeys([]byte("secret"))
	fmt.Println(err)
	// Output: line 1: a gossip key is 16, 24 or 32 bytes, bare or in base64; this has 6 bytes
}
