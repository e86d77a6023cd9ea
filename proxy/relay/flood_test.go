package relay

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// A flow whose client has sent again after an answer ends after all that have not, even if it has been silent for
// longer: of a client, of a Service and of the node.
func TestContract11AFloodEndsTheUnprovenFirst(t *testing.T) {
	t.Parallel()
	for name, limits := range map[string][3]int{"of the node": {4, 100, 100}, "of a Service": {100, 4, 100},
		"of a client": {100, 100, 4}} {
		a, s := newFlows(limits[0], limits[1], limits[2]), &service{}
		port := uint16(0)
		add := func() (f, victim *flow) {
			port++
			key := wire.Flow{Client: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)}
			f, _ = a.find(key, func() *flow { return &flow{key: key} })
			a.answered(f)
			victim, _ = a.admit(f, s)
			return f, victim
		}
		proven, _ := add()
		proven.answered.Store(true)
		a.find(proven.key, nil)
		asked, _ := add() // answered, and not heard of again
		asked.answered.Store(true)
		repeated, _ := add() // sends again, and has no answer
		a.find(repeated.key, nil)
		ended := map[*flow]bool{}
		for range 100 {
			if _, victim := add(); victim != nil {
				ended[victim] = true
			}
		}
		if ended[proven] || !ended[asked] || !ended[repeated] {
			t.Fatalf("%s: ended: the proven one %v, the others %v and %v", name, ended[proven], ended[asked], ended[repeated])
		}
		for _, f := range a.list() {
			f.answered.Store(true)
			a.find(f.key, nil)
		}
		a.find(proven.key, nil)
		if _, victim := add(); victim == nil || victim == proven || !victim.proven {
			t.Errorf("%s: with proven ones alone, %+v ends", name, victim)
		}
		for _, f := range a.list() {
			a.end(f)
		}
		if len(a.all)+len(a.of)+a.open > 0 {
			t.Errorf("%s: left: %+v", name, a)
		}
	}
}

// At the node's limit the flood of one Service ends its own flows, and not those of a larger one whose clients have
// proved themselves, nor the few new ones of a small one.
func TestContract11AFloodEndsItsOwnFlows(t *testing.T) {
	a := newFlows(20, 100, 100)
	port := uint16(0)
	add := func(s *service, proven bool) (victim *flow) {
		port++
		key := wire.Flow{Client: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)}
		f, _ := a.find(key, func() *flow { return &flow{key: key} })
		a.answered(f)
		victim, _ = a.admit(f, s)
		if f.answered.Store(proven); proven {
			a.find(key, nil)
		}
		return victim
	}
	large, small, flooded := &service{}, &service{}, &service{}
	for range 10 {
		add(large, true)
	}
	add(small, false)
	for range 100 {
		if victim := add(flooded, false); victim != nil && victim.service != flooded {
			t.Fatalf("a flow of another Service ends: large %v", victim.service == large)
		}
	}
}

// While one flow waits for its backend to be chosen and its socket to be opened, and its client goes on sending,
// others are served.
func TestContract11ChoosingHoldsUpNobody(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	slow, hold, held := udpEcho(t, "slow"), make(chan struct{}), make(chan struct{}, 1)
	before := func(backend netip.AddrPort) error {
		if backend == slow {
			held <- struct{}{}
			<-hold
		}
		return nil
	}
	g.beforeUDP.Store(&before)
	g.relayedUDP(nil, slow)
	c := g.udpClient()
	c.send("1")
	<-held
	c.send("2")
	g.relayedUDP(func(r *plan.Relayed) { r.Ports[0].Ending = []netip.AddrPort{slow} }, udpEcho(t, "fast"))
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for range 3 {
			if got := g.udpClient().ask("x"); got != "fast: x" {
				t.Errorf("another client got %q", got)
			}
		}
	}()
	select {
	case <-answered:
	case <-time.After(20 * time.Second):
		t.Error("others wait for it")
	}
	close(hold)
	<-answered
	for _, want := range []string{"1", "2"} {
		if got := c.next(); got != "slow: "+want {
			t.Errorf("it got %q, not the answer to %s", got, want)
		}
	}
}

// Choosing among the endpoints of one Service holds up no other Service, nor the same one where nothing is counted.
func TestContract11ChoosingHoldsNoLock(t *testing.T) {
	table := newTable(time.Now)
	of := func(name, at string, scheduler plan.Scheduler) wire.Service {
		return wire.Service{Key: lb.Key{Name: name}, Relayed: &plan.Relayed{Scheduler: scheduler, Ports: []plan.RelayedPort{{
			Protocol: lb.UDP, Frontends: []plan.RelayedFrontend{{Addr: netip.MustParseAddrPort(at)}},
			Cluster: []plan.RelayedBackend{{Addr: frontend}}}}}}
	}
	table.take(wire.Message{Services: []wire.Service{of("a", "192.0.2.1:53", ""), of("b", "192.0.2.2:53", plan.LeastConnections)}})
	way := func(at string) way {
		w, _, _ := table.find(target{lb.UDP, netip.MustParseAddrPort(at)})
		return w
	}
	a := way("192.0.2.1:53")
	c := table.chooser(a, frontend, frontend, func() uint64 { return 1 })
	drawing, hold, chosen := make(chan struct{}), make(chan struct{}), make(chan struct{})
	c.draw = func() uint64 {
		close(drawing)
		<-hold
		return 1
	}
	go func() {
		defer close(chosen)
		a.service.choose(c, nil)
	}()
	<-drawing
	others := make(chan struct{})
	go func() {
		defer close(others)
		for _, at := range []string{"192.0.2.1:53", "192.0.2.2:53"} {
			w := way(at)
			if _, ok := w.service.choose(table.chooser(w, frontend, frontend, func() uint64 { return 1 }), nil); !ok {
				t.Errorf("%s: there is no backend", at)
			}
		}
	}()
	select {
	case <-others:
	case <-time.After(20 * time.Second):
		t.Error("others wait for it")
	}
	close(hold)
	<-chosen
	<-others
}

// A relay whose questions are not answered as fast as flows come asks the proxy to lead none there, before it has to
// drop any.
func TestContract11ARelayThatIsBehindSaysSo(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"))
	g.mute.Store(true)
	asked := 0
	ask := func(n int) {
		for range n {
			i := asked
			asked++
			from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 1, byte(i / maxClientAsking)}), 0)
			conn, err := net.DialUDP("udp4", net.UDPAddrFromAddrPort(from),
				&net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(g.sockets.ports()[lb.IPv4])})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			udpClient{conn, t}.send("x")
		}
	}
	ask(behindAt - 1)
	g.until("as many are asked about", func() bool {
		g.flows.mu.Lock()
		defer g.flows.mu.Unlock()
		return g.flows.asked == behindAt-1
	})
	if g.Behind() {
		t.Error("it is behind already")
	}
	ask(1)
	for behind := false; !behind; {
		select {
		case h := <-g.said:
			behind = h.Behind
		case <-time.After(time.Minute):
			t.Fatal("it does not say that it is behind")
		}
	}
	g.until("it is no longer", func() bool { return !g.Behind() })
	if n := g.Refused(); n > behindAt {
		t.Errorf("%d datagrams were dropped", n)
	}
}

// A relay that was full, or behind, before the node's clock was set back is so no longer.
func TestTheClockIsSetBack(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &Relay{deps: Deps{Now: func() time.Time { return now }}, options: Options{Limit: 10}}
	r.strained.Store(now.UnixNano())
	r.fallBehind()
	if now = now.Add(time.Second); !r.Behind() || !r.isFull() {
		t.Errorf("after a second: behind %v, full %v", r.Behind(), r.isFull())
	}
	if now = now.Add(-time.Minute); r.Behind() || r.isFull() {
		t.Errorf("a minute before: behind %v, full %v", r.Behind(), r.isFull())
	}
}

// Flows to what no Service has wait for the proxy's word on it, at most so many, and others are asked about
// meanwhile.
func TestContract11FlowsOfNoFrontendHaveABoundOfTheirOwn(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"))
	nobodys := netip.MustParseAddrPort("198.51.100.2:80")
	g.original.Store(&nobodys)
	for range 2 * maxWaiting {
		g.udpClient().send("x")
	}
	g.until("they wait, and are not asked about any more", func() bool {
		g.flows.mu.Lock()
		defer g.flows.mu.Unlock()
		if g.flows.asked == 0 && len(g.flows.all) > maxWaiting {
			t.Errorf("%d wait", len(g.flows.all))
		}
		return g.flows.asked == 0 && len(g.flows.all) > 0
	})
	g.original.Store(&frontend)
	if got := g.udpClient().ask("y"); got != "a: y" {
		t.Error(got)
	}
}

// When the kernel comes to remember flows for a shorter time, those that are there end in time, too.
func TestUDPIdleFollowsTheKernel(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"))
	g.udpClient().ask("x")
	g.until("it is there", func() bool { return g.Counts()[0].Open == 1 })
	g.remembers.Store(int64(time.Second))
	g.until("it has ended", func() bool { return g.Counts()[0].Open == 0 })
}

// udpOfAnother has another program have the relay's port of UDP, in IPv4.
func udpOfAnother(t *testing.T) *net.UDPConn {
	t.Helper()
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{Port: relayPort})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// Where another program has the port of UDP, TCP goes on, the proxy hears why there is no UDP, and there is as soon
// as the port is free.
func TestContract10APortThatAnotherHas(t *testing.T) {
	t.Parallel()
	if !alone(t) {
		return
	}
	other := udpOfAnother(t)
	g := newRig(t, func(o *Options) { o.Port = relayPort })
	defer other.Close()
	g.relayed(nil, echo(t, "a"))
	if got, err := g.ask("x"); err != nil || got != "a: x" {
		t.Errorf("TCP: %q, %v", got, err)
	}
	h := <-g.said
	for h.Ports == nil { // it has not heard of the proxy's version yet
		h = <-g.said
	}
	if h.Ports[lb.IPv4] != g.sockets.ports()[lb.IPv4] || h.NoUDP[lb.IPv4] == "" || h.NoUDP[lb.IPv6] != "" {
		t.Errorf("it says %+v", h)
	}
	other.Close()
	g.until("it says that it has the port", func() bool { return (<-g.said).NoUDP[lb.IPv4] == "" })
	g.relayedUDP(nil, udpEcho(t, "a"))
	if got := g.udpClient().ask("x"); got != "a: x" {
		t.Error(got)
	}
}

// A node without a free port of UDP is counted, and no backend is blamed or tried in vain.
func TestUDPWithoutAPort(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	none := func(netip.AddrPort) error { return errNoPort }
	g.beforeUDP.Store(&none)
	g.relayedUDP(nil, udpEcho(t, "a"), udpEcho(t, "a"))
	c := g.udpClient()
	c.send("x")
	g.until("it has ended", func() bool { return g.Counts()[0].Failures == 1 && len(g.flows.list()) == 0 })
	if c := g.Counts()[0]; c.Tries != 1 || c.NodeFailures != 1 || g.NoPort() != 1 {
		t.Errorf("%+v, %d without a port", c, g.NoPort())
	}
	g.beforeUDP.Store(nil)
	if got := c.ask("y"); got != "a: y" {
		t.Error(got)
	}
}

// The kernel's own error where all ports are taken is that.
func TestTheKernelsErrorWithoutAPort(t *testing.T) {
	ns := nstest.New(t)
	ns.Run(t, "ip", "link", "set", "lo", "up")
	ns.Run(t, "sysctl", "-qw", "net.ipv4.ip_local_port_range=50000 50003")
	for _, backend := range []string{"127.0.0.1:53", "[::1]:53"} {
		ns.Do(t, func() error {
			var err error
			for range 5 {
				var conn *Conn
				if conn, err = DialUDP(netip.MustParseAddrPort(backend), 0); err != nil {
					break
				}
				defer conn.Close()
			}
			if !errors.Is(err, errNoPort) || !failedHere(err) {
				t.Errorf("%s: %v", backend, err)
			}
			return nil
		})
	}
}

// What a socket has no room for is counted.
func TestUDPLosses(t *testing.T) {
	t.Parallel()
	receiver, err := openUDP(lb.IPv4, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := receivers{open: map[lb.Family]*Conn{}, lacking: map[lb.Family]string{}}
	all.set(lb.IPv4, receiver, nil)
	defer all.close()
	at, err := receiver.local()
	if err != nil {
		t.Fatal(err)
	}
	sender, err := DialUDP(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port()), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	const size, most = 1 << 14, 4096
	sent, received := 0, 0
	for ; all.dropped() == 0; sent++ {
		if sent == most {
			t.Fatal("the socket takes all")
		}
		if err := sender.sendParts(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
	}
	_ = receiver.file.SetReadDeadline(time.Now().Add(time.Second))
	for {
		if _, err := receiver.receiveFrom(make([]byte, size), make([]byte, controlSize)); err != nil {
			break
		}
		received++
	}
	if lost := int(all.dropped()); lost != sent-received {
		t.Errorf("%d of %d came, and %d are lost", received, sent, lost)
	}
}
