package relayfeed

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

var (
	web, mail = lb.Key{Namespace: "default", Name: "web"}, lb.Key{Namespace: "default", Name: "mail"}
	own       = map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("192.0.2.1")}
)

// rig is an actor over a kernel that tests play.
type rig struct {
	*Actor
	t    *testing.T
	path string
	busy atomic.Int64

	mu     sync.Mutex
	leased map[plan.RelayWay]netip.AddrPort
	renews int
	fail   error
	// renewing is called, if it is set, each time that a lease has been renewed.
	renewing func()
	// telling is called, if it is set, before it takes note of what it is told.
	telling func()
	// answering is what was told last, how often told; flows are those that the kernel has.
	answering []netip.AddrPort
	told      int
	flows     map[wire.Flow]netip.AddrPort
}

var tcp, udp = plan.RelayWay{Family: lb.IPv4, Protocol: lb.TCP}, plan.RelayWay{Family: lb.IPv4, Protocol: lb.UDP}

func newRig(t *testing.T) *rig { return newRigWith(t, func(*Deps) {}) }

// newRigWith returns a rig whose actor has what tune has changed.
func newRigWith(t *testing.T, tune func(*Deps)) *rig {
	g := &rig{t: t, path: filepath.Join(t.TempDir(), "relay.sock"), leased: map[plan.RelayWay]netip.AddrPort{}}
	deps := Deps{Log: slog.New(slog.DiscardHandler), Path: g.path,
		Busy: func() time.Duration { return time.Duration(g.busy.Load()) },
		Renew: func(way plan.RelayWay, to netip.AddrPort, _ time.Duration) error {
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.fail == nil {
				if way.Protocol == lb.UDP && !slices.Contains(g.answering, to) {
					t.Errorf("flows are led to %s, and cut there", to)
				}
				g.leased[way] = to
				if g.renews++; g.renewing != nil {
					g.renewing()
				}
			}
			return g.fail
		},
		End: func(way plan.RelayWay) error {
			g.mu.Lock()
			defer g.mu.Unlock()
			if g.fail == nil {
				delete(g.leased, way)
			}
			return g.fail
		},
		Original: func(f wire.Flow) (from, to netip.AddrPort, ok bool, err error) {
			g.mu.Lock()
			defer g.mu.Unlock()
			to, ok = g.flows[f]
			return f.Client, to, ok, g.fail
		},
		Answering: func(at []netip.AddrPort) {
			g.mu.Lock()
			telling := g.telling
			g.mu.Unlock()
			if telling != nil {
				telling()
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			g.answering = at
			g.told++
			for way, to := range g.leased {
				if way.Protocol == lb.UDP && !slices.Contains(at, to) {
					t.Errorf("flows are cut at %s, and led there", to)
				}
			}
		}}
	tune(&deps)
	g.Actor = New(deps)
	g.SetAddresses(own, nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return g
}

func (g *rig) until(what string, is func() bool) {
	g.t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			g.t.Fatalf("it never came that %s: %+v", what, g.State())
		}
	}
}

// leads waits until the kernel leads to a port; 0 for none.
func (g *rig) leads(port uint16) {
	g.t.Helper()
	if port == 0 {
		g.leadsOn(port)
		return
	}
	g.leadsOn(port, tcp, udp)
}

// leadsOn waits until the kernel leads to a port on these ways, and on no others.
func (g *rig) leadsOn(port uint16, ways ...plan.RelayWay) {
	g.t.Helper()
	want := map[plan.RelayWay]netip.AddrPort{}
	for _, way := range ways {
		want[way] = netip.AddrPortFrom(own[lb.IPv4], port)
	}
	g.until(fmt.Sprint("the kernel leads to ", want), func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return maps.Equal(g.leased, want)
	})
}

// fakeRelay is a relay that tests play.
type fakeRelay struct {
	t     *testing.T
	conn  net.Conn
	lines *bufio.Scanner
	hello atomic.Pointer[wire.Hello]
}

// join connects a relay, which says the same again and again until it is told to say something else.
func (g *rig) join(h wire.Hello) *fakeRelay {
	g.t.Helper()
	var conn net.Conn
	g.until("the socket is there", func() (ok bool) {
		var err error
		conn, err = net.Dial("unix", g.path)
		return err == nil
	})
	r := &fakeRelay{t: g.t, conn: conn, lines: bufio.NewScanner(conn)}
	r.lines.Buffer(nil, 1<<20)
	r.hello.Store(&h)
	g.t.Cleanup(func() { conn.Close() })
	go func() {
		for json.NewEncoder(conn).Encode(r.hello.Load()) == nil {
			time.Sleep(wire.Beat / 10)
		}
	}()
	return r
}

// leave has the relay say that it leaves.
func (r *fakeRelay) leave() {
	h := *r.hello.Load()
	h.Leaving = true
	r.hello.Store(&h)
}

// next returns the next message that says what a test waits for.
func (r *fakeRelay) next(is func(wire.Message) bool) wire.Message {
	r.t.Helper()
	_ = r.conn.SetReadDeadline(time.Now().Add(time.Minute))
	for r.lines.Scan() {
		var m wire.Message
		if err := json.Unmarshal(r.lines.Bytes(), &m); err != nil {
			r.t.Fatal(err)
		}
		if is(m) {
			return m
		}
	}
	r.t.Fatalf("the feed ended: %v", r.lines.Err())
	return wire.Message{}
}

func hello(port uint16) wire.Hello {
	return wire.Hello{Version: wire.Version, Ports: map[lb.Family]uint16{lb.IPv4: port, lb.IPv6: port}}
}

func relayed(addr string) *plan.Relayed {
	return &plan.Relayed{Ports: []plan.RelayedPort{{Frontends: []plan.RelayedFrontend{{Addr: netip.MustParseAddrPort(addr)}}}}}
}

// A relay hears everything at first and then changes, and the rules lead there only once it has heard
// everything. When it goes they lead nowhere.
func TestContract9OnlyToARelayThatIsThere(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Update(map[lb.Key]*plan.Relayed{web: relayed("192.0.2.9:80")})
	r := g.join(hello(7))
	r.next(func(m wire.Message) bool { return !m.Complete && len(m.Services) == 0 })
	g.leads(0)
	if st := g.State(); st.Connected {
		t.Errorf("before everything is known: %+v", st)
	}
	g.Begin(map[lb.Key]*plan.Relayed{mail: relayed("192.0.2.8:25")})
	m := r.next(func(m wire.Message) bool { return m.Complete })
	if len(m.Services) != 2 || m.Services[0].Key != mail || m.Services[1].Key != web {
		t.Errorf("at first it hears %+v", m)
	}
	g.leads(7)
	g.until("it says so", func() bool { return len(g.State().Leads) == 1 }) // a moment after the kernel
	if st := g.State(); !st.Connected || st.Services != 2 {
		t.Errorf("%+v", st)
	}
	g.Update(map[lb.Key]*plan.Relayed{web: nil, {Name: "never"}: nil})
	m = r.next(func(m wire.Message) bool { return len(m.Services) > 0 })
	if len(m.Services) != 1 || m.Services[0].Key != web || m.Services[0].Relayed != nil {
		t.Errorf("then %+v", m)
	}
	r.conn.Close()
	g.leads(0)
}

// What all Services need comes in lines of a bounded length, and the rules lead to the relay once it has been told the
// last. What changes meanwhile comes too.
func TestContract11AllServicesInSeveralLines(t *testing.T) {
	t.Parallel()
	const services, each = 1000, 100 // more than waits in a socket
	one := &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: lb.TCP,
		Frontends: slices.Repeat(relayed("192.0.2.9:80").Ports[0].Frontends, each)}}}
	large := &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: lb.TCP,
		Frontends: slices.Repeat(one.Ports[0].Frontends, 1+wire.MaxServices/each)}}}
	all := map[lb.Key]*plan.Relayed{web: large}
	for i := range services {
		all[lb.Key{Namespace: "default", Name: fmt.Sprint(i)}] = one
	}
	g := newRig(t)
	g.Begin(all)
	r := g.join(hello(7))
	known, lines := map[lb.Key]*plan.Relayed{}, 0
	for more := true; more || known[mail] == nil; lines++ { // what is new may come after all that there was
		m := r.next(func(m wire.Message) bool { return len(m.Services) > 0 })
		size := 0
		for _, s := range m.Services {
			known[s.Key] = s.Relayed
			size += s.Relayed.Size()
		}
		if size > wire.MaxServices && len(m.Services) > 1 {
			t.Errorf("a line has %d Services of %d", len(m.Services), size)
		}
		if m.Complete != (lines == 0) || m.Complete != (m.NodePorts != nil) {
			t.Errorf("line %d says that it is the first: %v, node ports: %v", lines, m.Complete, m.NodePorts)
		}
		if lines == 0 {
			if st := g.State(); st.Connected {
				t.Errorf("before it knows all: %+v", st)
			}
			g.Update(map[lb.Key]*plan.Relayed{mail: one, web: nil})
		}
		more = m.More
	}
	if len(known) < services+1 || known[mail] == nil || known[web] != nil || lines < services*each/wire.MaxServices {
		t.Errorf("in %d lines it has been told of %d Services: mail: %v, web: %v", lines, len(known), known[mail] != nil,
			known[web] != nil)
	}
	g.leads(7)
	g.Begin(all) // as many changes as that
	for told := 0; told < len(all); {
		m := r.next(func(m wire.Message) bool { return len(m.Services) > 0 })
		if told += len(m.Services); m.Complete || m.More || len(m.Services) > wire.MaxServices/each+1 {
			t.Errorf("a line of changes has %d Services; complete: %v, more: %v", len(m.Services), m.Complete, m.More)
		}
	}
}

// fakeOf returns a relay that has connected, and says nothing more.
func fakeOf() *relay { return &relay{wake: make(chan struct{}, 1), said: hello(7)} }

// largeOf returns some Services of a namespace, each of which fills more than half of a line.
func largeOf(namespace string, services int) map[lb.Key]*plan.Relayed {
	all := map[lb.Key]*plan.Relayed{}
	for i := range services {
		all[lb.Key{Namespace: namespace, Name: fmt.Sprint(i)}] = &plan.Relayed{Ports: []plan.RelayedPort{{
			Frontends: slices.Repeat(relayed("192.0.2.9:80").Ports[0].Frontends, wire.MaxServices/2+1)}}}
	}
	return all
}

// A relay that has connected hears of each Service once, and then that this was all, however fast Services change
// meanwhile.
func TestContract11ARelayIsToldAllWhileServicesChange(t *testing.T) {
	t.Parallel()
	const services = 20
	a := New(Deps{Log: slog.New(slog.DiscardHandler)})
	a.Begin(largeOf("changes", services))
	a.Update(largeOf("stays", services))
	r, known, lines := fakeOf(), map[lb.Key]bool{}, 0
	a.relays[r] = true
	for more := true; more && lines < 100*services; lines++ {
		m := a.news(r)
		for _, s := range m.Services {
			known[s.Key] = true
		}
		if more = m.More; more == (len(known) == 2*services) {
			t.Fatalf("it knows %d of %d Services, and hears that there are more: %v", len(known), 2*services, more)
		}
		a.Update(largeOf("changes", services))
	}
	if lines != 2*services {
		t.Errorf("all that there is comes in %d lines, want %d", lines, 2*services)
	}
}

// What one Service changes is told before the many changes of other namespaces that came before it.
func TestContract11ASmallChangeWaitsForOneServiceOfEachNamespace(t *testing.T) {
	t.Parallel()
	const namespaces, services = 4, 50
	a := New(Deps{Log: slog.New(slog.DiscardHandler)})
	a.Begin(nil)
	r := fakeOf()
	a.relays[r] = true
	if m := a.news(r); !m.Complete || m.More {
		t.Fatalf("at first it hears %+v", m)
	}
	for n := range 5 {
		for i := range namespaces {
			a.Update(largeOf(fmt.Sprint(i), services))
		}
		a.Update(map[lb.Key]*plan.Relayed{web: relayed("192.0.2.9:80")})
		lines := 1
		for ; !slices.ContainsFunc(a.news(r).Services, func(s wire.Service) bool { return s.Key == web }); lines++ {
			if lines == 2*namespaces*services {
				t.Fatal("the relay does not hear of a change")
			}
		}
		if lines > namespaces+1 {
			t.Errorf("change %d: the relay hears of it in line %d, after more than a Service of each namespace", n, lines)
		}
	}
}

// BenchmarkTellAll has a relay be told of as much as a node relays at most.
func BenchmarkTellAll(b *testing.B) {
	one := &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: lb.TCP,
		Frontends: slices.Repeat(relayed("192.0.2.9:80").Ports[0].Frontends, 4),
		Cluster:   slices.Repeat([]plan.RelayedBackend{{Addr: netip.MustParseAddrPort("10.244.11.12:8080")}}, 60)}}}
	a := New(Deps{Log: slog.New(slog.DiscardHandler)})
	a.begun = true
	for i := range plan.MaxRelayedOfNode / 64 {
		a.all[lb.Key{Namespace: "default", Name: fmt.Sprint(i)}] = one
	}
	b.ReportAllocs()
	for range b.N {
		r := fakeOf()
		encoder := json.NewEncoder(io.Discard)
		for more := true; more; {
			m := a.news(r)
			if err := encoder.Encode(m); err != nil {
				b.Fatal(err)
			}
			more = m.More
		}
	}
}

// A relay that leaves hears when the rules do not lead there any more. Its successor takes over at once.
func TestLeaving(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	first := g.join(hello(7))
	g.leads(7)
	second := g.join(hello(8))
	g.leads(8)
	second.leave()
	second.next(func(m wire.Message) bool { return m.Left })
	g.leads(7)
	g.mu.Lock()
	g.fail = errors.New("as the test wants")
	g.mu.Unlock()
	first.leave()
	for range 5 {
		first.next(func(m wire.Message) bool {
			if m.Left {
				t.Error("it is told that it has left while the kernel leads there")
			}
			return true
		})
	}
	g.mu.Lock()
	g.fail = nil
	g.mu.Unlock()
	first.next(func(m wire.Message) bool { return m.Left })
	g.leads(0)
}

// The state says why the rules cannot be made to lead to the relay, as long as that is so.
func TestContract10ALeaseThatCannotBeWrittenIsSaid(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	fail := func(err error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.fail = err
	}
	said := func(want string) {
		t.Helper()
		got := g.State().Unled
		for deadline := time.Now().Add(10 * time.Second); got != want && time.Now().Before(deadline); got = g.State().Unled {
			time.Sleep(time.Millisecond)
		}
		if got != want {
			t.Errorf("said %q, want %q", got, want)
		}
	}
	fail(&fs.PathError{Op: "open", Path: "list", Err: unix.EACCES})
	g.Begin(nil)
	g.join(hello(7))
	said("open list: permission denied")
	fail(nil)
	g.leads(7)
	said("")
}

// A relay that leaves under a proxy that has just started is not told so before the lease of the proxy's
// predecessor is taken back.
func TestLeavingAfterAnotherProxy(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.mu.Lock()
	g.leased[tcp] = netip.MustParseAddrPort("192.0.2.1:7")
	g.mu.Unlock()
	leaving := hello(7)
	leaving.Leaving = true
	g.join(leaving).next(func(m wire.Message) bool { return m.Left })
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.leased) > 0 {
		t.Errorf("%v is leased", g.leased)
	}
}

// The lease is renewed all the time, and not while the proxy hangs, whose word on endpoints is old.
func TestRenewal(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	g.join(hello(7))
	g.leads(7)
	g.until("it is renewed", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.renews > 2
	})
	g.busy.Store(int64(time.Hour))
	g.leads(0)
	g.busy.Store(0)
	g.leads(7)
	g.SetAddresses(nil, nil)
	g.leads(0)
}

// The rules do not lead to a relay that is full, and do again once it has room.
func TestFull(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	r := g.join(hello(7))
	g.leads(7)
	full := hello(7)
	full.Full = true
	r.hello.Store(&full)
	g.leadsOn(7, udp) // whose flows have limits of their own
	if st := g.State(); !st.Full || !st.Connected {
		t.Errorf("%+v", st)
	}
	room := hello(7)
	r.hello.Store(&room)
	g.leads(7)
	if st := g.State(); st.Full {
		t.Errorf("%+v", st)
	}
}

// The rules lead no UDP to a relay that is behind with it, and do again once it is not.
func TestBehind(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	r := g.join(hello(7))
	g.leads(7)
	behind := hello(7)
	behind.Behind = true
	r.hello.Store(&behind)
	g.leadsOn(7, tcp)
	g.answers(7) // the flows that it has
	if st := g.State(); !st.Behind || st.Full {
		t.Errorf("%+v", st)
	}
	again := hello(7)
	r.hello.Store(&again)
	g.leads(7)
	if st := g.State(); st.Behind {
		t.Errorf("%+v", st)
	}
}

// The rules lead UDP to no relay that does not receive it, and do once it does.
func TestContract10WithoutUDP(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	without := hello(7)
	without.NoUDP = map[lb.Family]string{lb.IPv4: "address already in use"}
	r := g.join(without)
	g.leadsOn(7, tcp)
	g.answers()
	if st := g.State(); st.NoUDP[lb.IPv4] != "address already in use" {
		t.Errorf("%+v", st)
	}
	with := hello(7)
	r.hello.Store(&with)
	g.leads(7)
	g.answers(7)
}

// What keeps the relay from a family's port is known, and how many Services have that family.
func TestContract10WithoutAPortOfAFamily(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	at := func(addr string) []plan.RelayedFrontend {
		return []plan.RelayedFrontend{{Addr: netip.MustParseAddrPort(addr)}}
	}
	one := &plan.Relayed{Ports: []plan.RelayedPort{{Frontends: at("192.0.2.9:80")}, {Frontends: at("192.0.2.9:81")}}}
	both := &plan.Relayed{Ports: []plan.RelayedPort{{Frontends: at("0.0.0.0:80")}, {Frontends: at("[::]:80")}}}
	g.Begin(map[lb.Key]*plan.Relayed{{Name: "one"}: one, {Name: "both"}: both})
	without := hello(7)
	without.NoPort = map[lb.Family]string{lb.IPv6: "address already in use"}
	g.join(without)
	g.leads(7)
	st := g.State()
	if st.NoPort[lb.IPv6] != "address already in use" || st.Families[lb.IPv4] != 2 || st.Families[lb.IPv6] != 1 {
		t.Errorf("%+v", st)
	}
}

// Where the rules have to know the relay's ports, they hear of these at once, and lead there when they are written. They
// lead no UDP to a relay, and nothing counts as answering it.
func TestRulesThatKnowThePorts(t *testing.T) {
	t.Parallel()
	logged := make(lines, 100)
	var g *rig
	moved := make(chan map[lb.Family]uint16, 10)
	g = newRigWith(t, func(d *Deps) {
		d.TCPOnly, d.Log = true, slog.New(slog.NewTextHandler(logged, &slog.HandlerOptions{Level: slog.LevelWarn}))
		d.Moved = func() { moved <- g.Ports() }
	})
	g.mu.Lock()
	g.fail = &fs.PathError{Op: "open", Path: "list", Err: unix.ENOENT}
	g.mu.Unlock()
	g.Begin(nil)
	r := g.join(hello(7))
	if got := <-moved; got[lb.IPv4] != 7 {
		t.Errorf("the ports are %v", got)
	}
	g.leadsOn(0)
	g.mu.Lock()
	g.fail = nil // the rules are written
	g.mu.Unlock()
	g.leadsOn(7, tcp)
	r.conn.Close()
	g.leads(0)
	if got := g.Ports(); got[lb.IPv4] != 7 {
		t.Errorf("of a relay that is away the ports are %v", got)
	}
	g.join(hello(8))
	if got := <-moved; got[lb.IPv4] != 8 {
		t.Errorf("of the next one the ports are %v", got)
	}
	g.leadsOn(8, tcp)
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.answering) > 0 || len(moved) > 0 {
		t.Errorf("%v answer UDP, and the ports have changed %d times more", g.answering, len(moved))
	}
	for len(logged) > 0 {
		if line := <-logged; strings.Contains(line, "cannot have") {
			t.Errorf("that the rules are not written yet is logged: %s", line)
		}
	}
}

// Of two relays with different ports, one of which ends for the other, the rules follow the one to which they lead: to
// follow each that says something would have all rules written anew twice a second.
func TestRulesFollowOneRelay(t *testing.T) {
	t.Parallel()
	var moves atomic.Int64
	g := newRigWith(t, func(d *Deps) { d.TCPOnly, d.Moved = true, func() { moves.Add(1) } })
	g.Begin(nil)
	before := g.join(hello(7))
	g.leadsOn(7, tcp)
	next := g.join(hello(8))
	hear := func() {
		for range 3 {
			next.next(func(wire.Message) bool { return true })
		}
	}
	ports := func() uint16 { return g.Ports()[lb.IPv4] }
	g.leadsOn(8, tcp)
	g.until("the rules follow", func() bool { return ports() == 8 })
	hear()
	before.leave()
	hear()
	if n := moves.Load(); n != 2 || ports() != 8 {
		t.Errorf("the ports have changed %d times, and are %d", n, ports())
	}
	next.leave()
	before.hello.Store(&wire.Hello{})
	g.leads(0)
	hear()
	if n := moves.Load(); n != 2 || ports() != 8 {
		t.Errorf("of relays that leave: the ports have changed %d times, and are %d", n, ports())
	}
}

// lines are what is logged.
type lines chan string

func (l lines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// A relay that goes while the rules are made to lead there is one that answers until they do not: what is cut before
// would be led there again, and stay.
func TestARelayGoesWhileItIsLedTo(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	var once sync.Once
	g.mu.Lock()
	g.renewing = func() {
		once.Do(func() {
			g.Actor.mu.Lock()
			defer g.Actor.mu.Unlock()
			clear(g.relays)
			g.elect()
		})
	}
	g.mu.Unlock()
	g.join(hello(7))
	g.until("it has gone", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.renews > 1 && len(g.leased) == 0
	})
	g.answers()
}

// A proxy that ends waits for a relay that ends too, until that has gone and flows are cut, and for none that stays.
func TestContract9AProxyOutlastsItsRelay(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Outlast(t.Context()) // there is none
	g.Begin(nil)
	r := g.join(hello(7))
	g.leads(7)
	g.Outlast(t.Context()) // it stays
	g.leads(7)
	g.answers(7)
	g.mu.Lock()
	g.telling = func() { time.Sleep(5 * outlastEvery) } // as long as whoever cuts flows is busy
	g.mu.Unlock()
	outlasted := make(chan struct{})
	go func() {
		defer close(outlasted)
		g.Outlast(t.Context())
		g.mu.Lock()
		defer g.mu.Unlock()
		if len(g.answering) > 0 || len(g.leased) > 0 {
			t.Errorf("it ends while %v is led to, and %v answers", g.leased, g.answering)
		}
	}()
	r.leave()
	r.next(func(m wire.Message) bool { return m.Left })
	select {
	case <-outlasted:
		t.Error("it ends while the relay has flows")
	case <-time.After(2 * wire.Silence):
	}
	r.conn.Close()
	<-outlasted
}

// A proxy that ends waits for its relay no longer than that has said that it needs, and a relay that lies, or goes on,
// holds up nothing beyond that.
func TestContract6ARelayHoldsUpNoEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		drain, want time.Duration
	}{
		"says nothing":      {0, 30 * time.Second},
		"is done soon":      {time.Second, 11 * time.Second},
		"needs minutes":     {5 * time.Minute, 310 * time.Second},
		"wants days":        {100 * time.Hour, time.Hour},
		"wants the longest": {math.MaxInt64, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := New(Deps{Log: slog.New(slog.DiscardHandler)})
				a.relays[&relay{said: wire.Hello{Leaving: true, Drain: tt.drain}}] = true
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
				defer cancel()
				began := time.Now()
				a.Outlast(ctx)
				if took := time.Since(began); took < tt.want || took > tt.want+2*outlastEvery {
					t.Errorf("it waits for %s, want %s", took, tt.want)
				}
			})
		})
	}
}

// A relay of before there was a version, as it was recorded, gets no connections and hears of no Service: it knows neither
// UDP nor most schedulers. It hears that it may end, and the next release takes over.
func TestContract6ARelayOfAnEarlierRelease(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(map[lb.Key]*plan.Relayed{web: relayed("192.0.2.80:80")})
	recorded, err := os.ReadFile("wire/testdata/relay-without-version.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var says []wire.Hello
	for line := range bytes.Lines(recorded) {
		h, err := wire.DecodeHello(line)
		if err != nil {
			t.Fatal(err)
		}
		says = append(says, h)
	}
	earlier := g.join(says[0])
	g.until("the proxy knows that it is of another release", func() bool { return g.State().OtherRelease })
	earlier.hello.Store(&says[1])
	for range 3 {
		line := earlier.next(func(wire.Message) bool { return true })
		if line.Complete || len(line.Services) > 0 {
			t.Errorf("it hears %+v", line)
		}
	}
	g.leads(0)
	earlier.hello.Store(&says[2])
	earlier.next(func(m wire.Message) bool { return m.Left })
	earlier.conn.Close()
	g.join(hello(7))
	g.leads(7)
	if g.State().OtherRelease {
		t.Error("of another release is still one that has gone")
	}
}

// The rules of a family lead to no relay while something would drop that.
func TestBlocked(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	g.join(hello(7))
	g.leads(7)
	g.SetBlocked(map[plan.RelayWay]bool{udp: true})
	g.leadsOn(7, tcp)
	g.answers()
	g.SetBlocked(map[plan.RelayWay]bool{tcp: true, udp: true})
	g.leads(0)
	g.SetBlocked(map[plan.RelayWay]bool{tcp: true})
	g.leadsOn(7, udp)
	g.answers(7)
	if st := g.State(); !st.Connected || st.Ports[lb.IPv4] != 7 {
		t.Errorf("%+v", st)
	}
	g.SetBlocked(nil)
	g.leads(7)
}

// answers waits until flows are left alone that relays answer at these ports.
func (g *rig) answers(ports ...uint16) {
	g.t.Helper()
	var want []netip.AddrPort
	for _, port := range ports {
		want = append(want, netip.AddrPortFrom(own[lb.IPv4], port))
	}
	g.until(fmt.Sprint("relays answer at ", want), func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return g.told > 0 && slices.Equal(g.answering, want)
	})
}

// Flows to a relay are left alone from before the rules lead there until it is gone, also while it leaves. A
// proxy that has just started does not know for a while that there is none.
func TestAnswering(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	g.Begin(nil)
	r := g.join(hello(7))
	g.leads(7)
	g.answers(7)
	if g.told > 1 {
		t.Error("it was told that there is none")
	}
	r.leave()
	r.next(func(m wire.Message) bool { return m.Left })
	g.leads(0)
	g.answers(7)
	second := g.join(hello(8))
	g.answers(7, 8)
	r.conn.Close()
	g.answers(8)
	second.conn.Close()
	g.answers()

	late := newRig(t)
	late.answers()
	if took := time.Since(late.started); took < plan.RelayLease {
		t.Errorf("a relay has %s to connect", took)
	}
}

// A relay hears where flows went that arrive at its own port; of others, and of those that the kernel does not
// have, that they are nothing.
func TestAnswers(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	flow := func(client, at string) wire.Flow {
		return wire.Flow{Client: netip.MustParseAddrPort(client), At: netip.MustParseAddrPort(at)}
	}
	known, unknown, others, elsewhere := flow("192.0.2.9:5", "192.0.2.1:7"), flow("192.0.2.9:6", "192.0.2.1:7"),
		flow("192.0.2.9:5", "192.0.2.1:8"), flow("192.0.2.9:5", "192.0.2.2:7")
	to := netip.MustParseAddrPort("198.51.100.1:53")
	g.flows = map[wire.Flow]netip.AddrPort{known: to, others: to, elsewhere: to}
	asking := hello(7)
	asking.Flows = []wire.Flow{known, unknown, others, elsewhere}
	r := g.join(asking)
	m := r.next(func(m wire.Message) bool { return len(m.Answers) > 0 })
	want := []wire.Answer{{Flow: known, From: known.Client, To: to}, {Flow: unknown}, {Flow: others}, {Flow: elsewhere}}
	if !slices.Equal(m.Answers[:4], want) {
		t.Errorf("it hears %+v", m.Answers)
	}
}

// A relay that asks and does not listen is cut off.
func TestAsksAndDoesNotListen(t *testing.T) {
	a := New(Deps{Original: func(wire.Flow) (from, to netip.AddrPort, ok bool, err error) { return }})
	r := &relay{wake: make(chan struct{}, 1)}
	flows := make([]wire.Flow, wire.MaxFlows)
	for range maxAnswers / wire.MaxFlows {
		if err := a.answer(r, flows); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.answer(r, flows); err == nil {
		t.Error("the answers have no end")
	}
}

// A relay hears at which addresses node ports are served, and when that changes.
func TestNodePorts(t *testing.T) {
	t.Parallel()
	g := newRig(t)
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	g.SetAddresses(own, addrs)
	g.Begin(nil)
	r := g.join(hello(7))
	if m := r.next(func(m wire.Message) bool { return m.Complete }); !slices.Equal(m.NodePorts, addrs) {
		t.Errorf("at first it hears %v", m.NodePorts)
	}
	g.SetAddresses(own, addrs)
	g.Update(map[lb.Key]*plan.Relayed{web: relayed("192.0.2.9:80")})
	if m := r.next(func(m wire.Message) bool { return len(m.Services) > 0 }); m.NodePorts != nil {
		t.Errorf("with nothing new it hears %v", m.NodePorts)
	}
	for _, now := range [][]netip.Addr{addrs[:1], nil} {
		g.SetAddresses(own, now)
		if m := r.next(func(m wire.Message) bool { return m.NodePorts != nil }); !slices.Equal(m.NodePorts, now) {
			t.Errorf("it hears %v in place of %v", m.NodePorts, now)
		}
	}
}

// One that is silent, says what makes no sense, or is one too many, is cut off.
func TestCutOff(t *testing.T) {
	t.Parallel()
	for name, line := range map[string]string{"silence": "", "nonsense": "hello\n", "a port of no family": `{"ports":{"x":1}}` + "\n",
		"port 0":                 `{"ports":{"IPv4":0}}` + "\n",
		"a flow of two families": `{"flows":[{"client":"192.0.2.1:1","at":"[2001:db8::1]:1"}]}` + "\n",
		"too many flows": `{"flows":[` + strings.Repeat(`{"client":"192.0.2.1:1","at":"192.0.2.1:1"},`, wire.MaxFlows) +
			`{"client":"192.0.2.1:1","at":"192.0.2.1:1"}]}` + "\n",
		"too much": fmt.Sprintf("%*d\n", 2*wire.MaxHello, 1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t)
			g.Begin(nil)
			var conn net.Conn
			g.until("the socket is there", func() (ok bool) {
				var err error
				conn, err = net.Dial("unix", g.path)
				return err == nil
			})
			defer conn.Close()
			_, _ = conn.Write([]byte(line))
			_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
			for lines := bufio.NewScanner(conn); lines.Scan(); {
			}
			if st := g.State(); st.Connected || len(st.Leads) > 0 {
				t.Errorf("%+v", st)
			}
		})
	}
	g := newRig(t)
	g.Begin(nil)
	var all []*fakeRelay
	for range maxRelays {
		all = append(all, g.join(hello(7)))
	}
	for _, r := range all {
		r.next(func(m wire.Message) bool { return m.Complete })
	}
	one, err := net.Dial("unix", g.path)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	_ = one.SetReadDeadline(time.Now().Add(time.Minute))
	if n, err := one.Read(make([]byte, 1)); n != 0 || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one too many reads %d bytes, %v", n, err)
	}
	g.leads(7)
}
