package relay

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// greeted connects as a client, and returns the name of its backend.
func (g *rig) greeted(client string) (name string, conn net.Conn) {
	g.t.Helper()
	dialer := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(client)}}
	conn, err := dialer.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", g.sockets.ports()[lb.IPv4]))
	if err != nil {
		g.t.Fatal(err)
	}
	text := make([]byte, 1)
	if _, err := io.ReadFull(conn, text); err != nil {
		g.t.Fatal(err)
	}
	return string(text), conn
}

// With session affinity, clients without an open connection keep their backends at the relay's successor, and at the
// next one.
func TestContract6HandOverKeepsClientsThatAreAway(t *testing.T) {
	for _, scheduler := range []plan.Scheduler{plan.RoundRobin, plan.LeastConnections, plan.SourceHash} {
		t.Run(string(scheduler), func(t *testing.T) {
			var backends []netip.AddrPort
			for _, name := range []byte("abcde") {
				backends = append(backends, greeter(t, name))
			}
			sticky := func(r *plan.Relayed) { r.Affinity, r.Scheduler = time.Hour, scheduler }
			patient := func(path string, port uint16) func(*Options) { // no backend is late
				return func(o *Options) {
					handsOver(path, port)(o)
					o.TryAfter, o.ConnectTimeout = time.Hour, time.Hour
				}
			}
			g := newRig(t, patient(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
			g.hearsOf(sticky, backends[:2]...) // later a hash chooses others
			var clients, had []string
			var open []net.Conn
			for i := range 10 {
				clients = append(clients, fmt.Sprintf("127.0.0.%d", 10+i))
				name, conn := g.greeted(clients[i])
				had, open = append(had, name), append(open, conn)
			}
			for _, conn := range open {
				conn.Close()
			}
			g.until("no connection is open", func() bool { return g.open.Load() == 0 })
			for range 2 {
				g.until("it serves successors", func() bool { _, err := os.Stat(g.options.HandOver); return err == nil })
				next := newRig(t, patient(g.options.HandOver, g.sockets.ports()[lb.IPv4]))
				next.hearsOf(sticky, backends...)
				next.until("the successor has taken over", func() bool { return next.Settled() == nil })
				g = next
			}
			for i, client := range slices.Backward(clients) { // the turns and counts of the successor begin anew
				name, conn := g.greeted(client)
				if conn.Close(); name != had[i] {
					t.Errorf("client %s had %s, and got %s", client, had[i], name)
				}
			}
		})
	}
}

// A successor that is told of many Services waits for that, so that it knows those of the clients: not for longer than
// its predecessor waits for it.
func TestContract6ASuccessorThatIsToldForLongKeepsClients(t *testing.T) {
	for _, tt := range []struct {
		name   string
		waited time.Duration
		keeps  bool
	}{
		{"longer than it waits for a word", knownWithin, true},
		{"as long as it may", toldWithin, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			key := lb.Key{Namespace: "shop", Name: "web"}
			m := withAffinity([]lb.Key{key})
			m.Complete = true
			first := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
			first.tell <- m
			first.until("the relay hears of the Service", func() bool { return first.Ready() == nil })
			first.table.rememberHanded([]handedClient{{Service: key, Protocol: lb.UDP, Choices: "dns",
				Client: netip.MustParseAddr("192.0.2.1"), Backend: frontend, Last: time.Now()}})
			first.until("it serves successors", func() bool { _, err := os.Stat(first.options.HandOver); return err == nil })
			next := newRig(t, handsOver(first.options.HandOver, first.sockets.ports()[lb.IPv4]))
			next.tell <- wire.Message{Complete: true, More: true}
			next.until("the successor is told", next.telling.Load)
			next.ahead.Store(int64(tt.waited))
			if tt.keeps {
				time.Sleep(10 * lookEvery) // else it takes over now
			} else {
				next.until("the successor has taken over", func() bool { return next.Settled() == nil })
			}
			m.Complete = false
			next.tell <- m
			next.until("the successor has taken over", func() bool { return next.Settled() == nil && next.Ready() == nil })
			keeps := slices.ContainsFunc(next.table.mostRememberedFirst(),
				func(s *service) bool { return len(s.rememberedSince(time.Time{})) > 0 })
			if keeps != tt.keeps {
				t.Errorf("it remembers the client: %v, want %v", keeps, tt.keeps)
			}
		})
	}
}

// Many clients are handed over, and each is remembered for as long as before.
func TestContract6HandOverOfManyClients(t *testing.T) {
	service := lb.Key{Namespace: "shop", Name: "web"}
	m := withAffinity([]lb.Key{service})
	m.Complete = true
	hear := func(g *rig) {
		g.until("the relay hears of the Service", func() bool {
			select {
			case g.tell <- m:
			case <-time.After(10 * time.Millisecond):
			}
			return g.Ready() == nil
		})
	}
	rememberedBy := func(g *rig) map[string]bool {
		all := map[string]bool{}
		for _, s := range g.table.mostRememberedFirst() {
			for _, one := range s.rememberedSince(time.Time{}) {
				text, err := json.Marshal(one)
				if err != nil {
					t.Fatal(err)
				}
				all[string(text)] = true
			}
		}
		return all
	}
	first := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	hear(first)
	const n, ago = 30*maxHandedClients + 1, time.Minute
	now := time.Now().Round(0) // without the reading of the monotonic clock
	for i := range n {
		first.table.rememberHanded([]handedClient{{Service: service, Protocol: lb.UDP, Choices: "dns",
			Client:  netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}),
			Backend: netip.AddrPortFrom(frontend.Addr(), uint16(i)), Last: now.Add(-ago - time.Duration(i))}})
	}
	want := rememberedBy(first)
	if len(want) != n {
		t.Fatalf("%d are remembered, not %d", len(want), n)
	}
	first.until("it serves successors", func() bool { _, err := os.Stat(first.options.HandOver); return err == nil })
	next := newRig(t, handsOver(first.options.HandOver, first.sockets.ports()[lb.IPv4]))
	hear(next)
	next.until("the successor has taken over", func() bool { return next.Settled() == nil })
	if got := rememberedBy(next); !maps.Equal(got, want) {
		t.Errorf("%d clients came of %d, or others", len(got), len(want))
	}
}

// As many clients as a relay may remember all find room at its successor, in the order in which they come.
func TestContract6AllHandedClientsFindRoom(t *testing.T) {
	now := time.Unix(10_000, 0)
	first, next := newTable(func() time.Time { return now }), newTable(func() time.Time { return now })
	var services []lb.Key
	for i := range 60 { // some namespaces have more Services than others
		services = append(services, lb.Key{Namespace: fmt.Sprint(i % 7 * i % 5), Name: fmt.Sprint(i)})
	}
	first.take(withAffinity(services))
	next.take(withAffinity(services))
	comeTo(first, services)
	if first.remembered.all < maxRememberedTogether*9/10 {
		t.Fatalf("only %d are remembered", first.remembered.all)
	}
	for _, s := range first.mostRememberedFirst() {
		next.rememberHanded(s.rememberedSince(time.Time{}))
	}
	if next.remembered.all != first.remembered.all || !maps.Equal(next.remembered.of, first.remembered.of) {
		t.Errorf("of %d by namespace %v %d found room, %v", first.remembered.all, first.remembered.of, next.remembered.all,
			next.remembered.of)
	}
}

// A successor remembers what it is handed within the same bounds, and nothing for longer than its Service's time.
func TestContract11HandedClientsLeaveRoom(t *testing.T) {
	now := time.Unix(10_000, 0)
	table := newTable(func() time.Time { return now })
	var many []lb.Key
	for i := range 100 {
		many = append(many, lb.Key{Namespace: "many", Name: fmt.Sprint(i)})
	}
	shop, gone := lb.Key{Namespace: "shop", Name: "web"}, lb.Key{Namespace: "shop", Name: "gone"}
	table.take(withAffinity(append(slices.Clone(many), shop)))
	hand := func(key lb.Key, n int, last time.Time) {
		for i := range n {
			table.rememberHanded([]handedClient{{Service: key, Protocol: lb.UDP, Backend: frontend, Last: last,
				Client: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}})
		}
	}
	hand(gone, 10, now)
	hand(shop, 10, now.Add(-time.Hour-returnsWithin))
	if n := table.remembered.all; n != 0 {
		t.Errorf("%d are remembered whose time is over, or of a Service that is gone", n)
	}
	for _, key := range many {
		hand(key, maxRemembered+1, now)
	}
	of := table.remembered.all
	hand(shop, maxRemembered+1, now.Add(time.Hour)) // the clock was set back
	all := table.remembered.all
	if all-of < maxRemembered*3/4 || all-of > maxRemembered || all > maxRememberedTogether {
		t.Errorf("%d are remembered of one namespace, %d of another", of, all-of)
	}
	now = now.Add(time.Hour)
	if table.sweep(); table.remembered.all != 0 {
		t.Errorf("%d are left when their time is over", table.remembered.all)
	}
}

// Clients that come while others are handed over follow. An earlier release's successor does not ask for clients, and
// gets the sockets at once, as before.
func TestContract6HandOverToOneThatWantsNoClients(t *testing.T) {
	g := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	g.hearsOf(func(r *plan.Relayed) { r.Affinity = time.Hour }, echo(t, "a"))
	w, _, _ := g.table.find(target{lb.TCP, frontend})
	early := netip.MustParseAddr("192.0.2.1")
	late := map[bool]netip.Addr{false: netip.MustParseAddr("192.0.2.2"), true: netip.MustParseAddr("192.0.2.3")}
	g.table.rememberSince(w, early, frontend, time.Now().Add(-time.Minute))
	for _, wants := range []bool{false, true} {
		p, _ := playSuccessor(t, g.options.HandOver, successionVersion)
		var came []netip.Addr
		receive := func() (l letter) {
			for {
				l, fds, err := p.receive(time.Minute)
				if err != nil {
					t.Fatal(err)
				}
				closeAll(fds)
				if len(l.Clients) == 0 {
					return l
				}
				for _, c := range l.Clients {
					came = append(came, c.Client)
				}
			}
		}
		if err := p.send(letter{Begin: true, WantsClients: wants}); err != nil {
			t.Fatal(err)
		}
		if l := receive(); len(l.Sockets) == 0 {
			t.Fatalf("in place of sockets %+v came", l)
		}
		g.table.remember(w, late[wants], frontend)
		if err := p.send(letter{Took: true}); err != nil {
			t.Fatal(err)
		}
		if l := receive(); !l.Swept {
			t.Errorf("%+v came", l)
		}
		var want []netip.Addr
		if wants {
			want = []netip.Addr{early, late[false], late[true]}
			slices.SortFunc(came, netip.Addr.Compare)
			came = slices.Compact(came)
		}
		if !slices.Equal(came, want) {
			t.Errorf("wanted: %v: clients %v came", wants, came)
		}
		p.close()
	}
}

// withManyClients returns a relay that remembers more clients than wait in a socket.
func withManyClients(t *testing.T) (g *rig, n int) {
	g = newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), 0))
	g.hearsOf(func(r *plan.Relayed) { r.Affinity = time.Hour }, echo(t, "a"))
	w, _, _ := g.table.find(target{lb.TCP, frontend})
	for ; n < 9000; n++ {
		g.table.rememberSince(w, netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}), frontend,
			time.Now().Add(-time.Minute))
	}
	return g, n
}

// receiveClients receives up to n clients, and returns how many came, and the first letter without any.
func receiveClients(t *testing.T, p *courier, n int) (int, letter) {
	t.Helper()
	came := map[netip.Addr]bool{}
	for len(came) < n {
		l, fds, err := p.receive(time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		closeAll(fds)
		for _, c := range l.Clients {
			came[c.Client] = true
		}
		if len(l.Clients) == 0 {
			return len(came), l
		}
	}
	return len(came), letter{}
}

// A successor that takes the clients too slowly gets the sockets all the same.
func TestContract6AHandOverDoesNotWaitForClients(t *testing.T) {
	within := clientsWithin
	clientsWithin = 10 * time.Millisecond
	defer func() { clientsWithin = within }()
	g, n := withManyClients(t)
	defer g.stop() // before the time is as it was
	p, _ := playSuccessor(t, g.options.HandOver, successionVersion)
	if err := p.send(letter{Begin: true, WantsClients: true}); err != nil {
		t.Fatal(err)
	}
	g.until("the relay goes on", func() bool { return strings.Contains(g.logged.all(), "too slowly") })
	if came, l := receiveClients(t, p, n); len(l.Sockets) == 0 {
		t.Errorf("%d clients and then %+v came", came, l)
	}
	p.close()
}

// courierPair returns both ends of a connection.
func courierPair(t *testing.T) (both []*courier) {
	t.Helper()
	ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range ends {
		file := os.NewFile(uintptr(fd), "")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			t.Fatal(err)
		}
		c, err := newCourier(conn.(*net.UnixConn))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.close)
		both = append(both, c)
	}
	return both
}

// A Service of which there is no time to hand over all clients is the last one the next time, so that the others' come.
func TestContract6ALargeServiceLeavesTimeToHandOverOthers(t *testing.T) {
	g, _ := withManyClients(t)
	small := lb.Key{Namespace: "small", Name: "web"}
	g.table.set(small, &plan.Relayed{Affinity: time.Hour, Ports: []plan.RelayedPort{{Protocol: lb.TCP}}})
	theirs := netip.MustParseAddr("10.9.9.9")
	g.table.rememberSince(way{service: g.table.services[id{small, lb.TCP}], affinity: time.Hour}, theirs, frontend,
		time.Now().Add(-time.Minute))
	both := courierPair(t)
	c := &crew{Relay: g.Relay}
	both[0].wantsClients = true
	came := false
	receive := func(patience time.Duration) bool {
		l, _, err := both[1].receive(patience)
		came = came || slices.ContainsFunc(l.Clients, func(h handedClient) bool { return h.Client == theirs })
		return err == nil
	}
	for range 2 {
		handed := make(chan error)
		go func() { handed <- c.handClients(both[0], time.Now().Add(300*time.Millisecond)) }()
		for range 2 { // and then no more is taken
			if !receive(time.Minute) {
				t.Fatal("no letter comes")
			}
		}
		if err := <-handed; err != nil {
			t.Fatal(err)
		}
	}
	for receive(10 * time.Millisecond) {
	}
	if !came {
		t.Error("the large Service comes first again, and takes all of the time")
	}
}

// After a time that did not suffice all clients are handed over, those included that came before.
func TestHandOverOfClientsBeginsAnew(t *testing.T) {
	g, n := withManyClients(t)
	both := courierPair(t)
	c := &crew{Relay: g.Relay}
	both[0].wantsClients = true
	until := time.Now().Add(10 * time.Millisecond)
	for range 2 { // the second time nothing is left of it
		if err := c.handClients(both[0], until); err != nil {
			t.Error(err)
		}
	}
	var handing sync.WaitGroup
	handing.Go(func() { _ = c.handClients(both[0], time.Now().Add(time.Hour)) })
	if came, l := receiveClients(t, both[1], n); came < n {
		t.Errorf("%d of %d clients and %+v came", came, n, l)
	}
	both[1].close()
	handing.Wait()
}

// The largest clients that may be are as many in a letter as there is room for.
func TestHandedClientsFitIntoALetter(t *testing.T) {
	long := strings.Repeat("x", 63)
	one := handedClient{Service: lb.Key{Namespace: long, Name: long}, Protocol: lb.TCP, Choices: long + "/local/IPv6",
		Client:  netip.MustParseAddr("fe80:1111:1111:1111:1111:1111:1111:1111%" + long[:15]),
		Backend: netip.MustParseAddrPort("[fe80:1111:1111:1111:1111:1111:1111:1111]:65535"),
		Last:    time.Date(2026, 1, 1, 1, 1, 1, 123456789, time.FixedZone("", 3600))}
	text, err := json.Marshal(letter{Clients: slices.Repeat([]handedClient{one}, maxHandedClients)})
	if err != nil || len(text) > maxLetter {
		t.Fatalf("%d bytes, %v", len(text), err)
	}
	if l, err := decodeLetter(text, 0); err != nil || len(l.Clients) != maxHandedClients {
		t.Errorf("%d clients, %v", len(l.Clients), err)
	}
	for name, bad := range map[string]letter{
		"too many":    {Clients: slices.Repeat([]handedClient{one}, maxHandedClients+1)},
		"no protocol": {Clients: []handedClient{{Client: one.Client, Backend: one.Backend}}},
		"no client":   {Clients: []handedClient{{Protocol: lb.UDP, Backend: one.Backend}}},
		"no backend":  {Clients: []handedClient{{Protocol: lb.UDP, Client: one.Client}}},
	} {
		text, err := json.Marshal(bad)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeLetter(text, 0); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
