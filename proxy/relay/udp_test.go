package relay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// answer says for the proxy where flows have gone: to the frontend, from where they came.
func (g *rig) answer(flows []wire.Flow) (answers []wire.Answer) {
	for _, f := range flows {
		a := wire.Answer{Flow: f}
		if to := *g.original.Load(); to.IsValid() {
			a.From, a.To = f.Client, to
		}
		answers = append(answers, a)
	}
	return answers
}

// udpClient is a client with a port of its own.
type udpClient struct {
	*net.UDPConn
	t *testing.T
}

func (g *rig) udpClient() udpClient {
	g.t.Helper()
	conn, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: int(g.sockets.ports()[lb.IPv4])})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { conn.Close() })
	return udpClient{conn, g.t}
}

func (c udpClient) send(text string) {
	c.t.Helper()
	if _, err := c.Write([]byte(text)); err != nil {
		c.t.Fatal(err)
	}
}

// next returns the next answer.
func (c udpClient) next() string {
	c.t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	p := make([]byte, maxDatagram)
	n, err := c.Read(p)
	if err != nil {
		c.t.Fatal(err)
	}
	return string(p[:n])
}

func (c udpClient) ask(text string) string {
	c.t.Helper()
	c.send(text)
	return c.next()
}

// udpBackend runs a server that serves each datagram.
func udpBackend(t *testing.T, serve func(conn *net.UDPConn, from netip.AddrPort, text string)) netip.AddrPort {
	t.Helper()
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go func() {
		p := make([]byte, maxDatagram)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(p)
			if err != nil {
				return
			}
			serve(conn, from, string(p[:n]))
		}
	}()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

// udpEcho answers with a name and what the client has sent.
func udpEcho(t *testing.T, name string) netip.AddrPort {
	return udpBackend(t, func(conn *net.UDPConn, from netip.AddrPort, text string) {
		_, _ = conn.WriteToUDPAddrPort([]byte(name+": "+text), from)
	})
}

// udpRefusing returns an address where nobody listens.
func udpRefusing(t *testing.T) netip.AddrPort {
	t.Helper()
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort()
}

func (g *rig) relayedUDP(tune func(*plan.Relayed), backends ...netip.AddrPort) {
	g.t.Helper()
	g.relayedOf(lb.UDP, tune, backends...)
}

// With two of three backends refusing, each of many clients is answered, and hears of none of that.
func TestUDPNoClientNotices(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"), udpRefusing(t), udpRefusing(t))
	const clients = 50
	for i := range clients {
		c := g.udpClient()
		for _, text := range []string{"hello ", "again "} {
			text += fmt.Sprint(i)
			if got := c.ask(text); got != "a: "+text {
				t.Errorf("%q", got)
			}
		}
	}
	g.until("each is counted", func() bool { return g.Counts()[0].Open == clients })
	if c := g.Counts()[0]; c.Connections != clients || c.Failures != 0 || c.Retried == 0 || c.Tries <= clients ||
		c.Service != web || c.Protocol != lb.UDP {
		t.Errorf("%+v", c)
	}
}

// Of what came before a backend refused nothing is lost, in order, and the number of tries is bounded.
func TestUDPRetries(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.Tries = 2 })
	g.relayedUDP(nil, udpRefusing(t), udpRefusing(t), udpRefusing(t))
	c := g.udpClient()
	c.send("x")
	g.until("it has failed", func() bool { return g.Counts()[0].Failures == 1 && g.Counts()[0].Open == 0 })
	if counts := g.Counts()[0]; counts.Tries != 2 || counts.Retried != 1 {
		t.Errorf("%+v", counts)
	}
	good := udpEcho(t, "a")
	g.relayedUDP(nil, good, udpRefusing(t))
	for range 20 { // some of them meet the one that refuses first, until that is suspect
		c := g.udpClient()
		for _, text := range []string{"1", "2", "3"} {
			c.send(text)
		}
		for _, text := range []string{"1", "2", "3"} {
			if got := c.next(); got != "a: "+text {
				t.Errorf("it got %q as the answer to %s", got, text)
			}
		}
	}
}

// A backend that refuses once it has answered is left for another; so is one that is gone from the list. One that
// ends keeps its flows.
func TestUDPFlowsMove(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	a, b := udpEcho(t, "a"), udpEcho(t, "b")
	g.relayedUDP(nil, a)
	c := g.udpClient()
	if got := c.ask("1"); got != "a: 1" {
		t.Fatal(got)
	}
	g.relayedUDP(func(r *plan.Relayed) { r.Ports[0].Ending = []netip.AddrPort{a} }, b)
	if got := c.ask("2"); got != "a: 2" {
		t.Errorf("of an endpoint that ends: %q", got)
	}
	if got := g.udpClient().ask("1"); got != "b: 1" {
		t.Errorf("a new flow: %q", got)
	}
	g.relayedUDP(nil, b)
	if got := c.ask("3"); got != "b: 3" {
		t.Errorf("once it is gone: %q", got)
	}
	if counts := g.Counts()[0]; counts.Retried != 0 || counts.Open != 2 {
		t.Errorf("%+v", counts)
	}
	var live atomic.Pointer[net.UDPConn]
	dying := udpBackend(t, func(conn *net.UDPConn, from netip.AddrPort, text string) {
		live.Store(conn)
		_, _ = conn.WriteToUDPAddrPort([]byte("c: "+text), from)
	})
	g.relayedUDP(nil, dying)
	if got := c.ask("4"); got != "c: 4" {
		t.Fatal(got)
	}
	live.Load().Close()
	g.relayedUDP(func(r *plan.Relayed) {
		r.Ports[0].Cluster = append(r.Ports[0].Cluster, plan.RelayedBackend{Addr: b})
	}, dying)
	if got := c.ask("5"); got != "b: 5" {
		t.Errorf("once its backend refuses: %q", got)
	}
	g.tell <- wire.Message{Services: []wire.Service{{Key: web}}}
	g.until("its frontend is gone", func() bool { _, ok, _ := g.table.find(target{lb.UDP, frontend}); return !ok })
	c.send("6")
	g.until("the flow ends", func() bool { return len(g.Counts()) == 0 || g.Counts()[0].Open == 1 })
}

// ICMP has no authentication: an error that comes while all is answered is of nothing that the flow has sent, and neither
// moves it nor counts against its backend. One that comes while something waits for an answer does.
func TestContract11ErrorsOfNothingMoveNoFlow(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("raw sockets need root")
	}
	g := newRig(t, nil)
	waits := make(chan bool, 1)
	a := udpBackend(t, func(conn *net.UDPConn, from netip.AddrPort, text string) {
		if text == "wait" {
			waits <- true
			return
		}
		_, _ = conn.WriteToUDPAddrPort([]byte("a: "+text), from)
	})
	g.relayedUDP(nil, a)
	c := g.udpClient()
	c.ask("first")
	g.relayedUDP(nil, a, udpEcho(t, "b"))
	f := g.flows.list()[0]
	f.mu.Lock()
	local, err := f.conn.local()
	f.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		if err := sendUnreachable(local, a); err != nil {
			t.Fatal(err)
		}
		g.until("it has heard of that", func() bool { return !f.hasError(t) })
		if got, want := c.ask(fmt.Sprint(i)), fmt.Sprint("a: ", i); got != want {
			t.Fatalf("%q, not %q", got, want)
		}
	}
	way, _, _ := g.table.find(target{lb.UDP, frontend})
	way.service.mu.Lock()
	if len(way.service.suspects) > 0 || way.service.counts.Retried > 0 {
		t.Errorf("suspect are %v, %+v", way.service.suspects, way.service.counts)
	}
	way.service.mu.Unlock()
	c.send("wait")
	<-waits
	if err := sendUnreachable(local, a); err != nil {
		t.Fatal(err)
	}
	if got := c.next(); got != "b: wait" {
		t.Errorf("once something waits: %q", got)
	}
}

// hasError reports whether the socket to the flow's backend has an error to tell of.
func (f *flow) hasError(t *testing.T) (has bool) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conn == nil {
		return false
	}
	err := f.conn.control(func(fd int) error {
		socket := []unix.PollFd{{Fd: int32(fd)}}
		n, err := unix.Poll(socket, 0)
		has = n > 0
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return has
}

// The next datagram is sent also if it is told of such an error. If something was owed, the backend is given up.
func TestContract11AnErrorOfNothingLosesNoDatagram(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("raw sockets need root")
	}
	got := make(chan string, 1)
	backend := udpBackend(t, func(_ *net.UDPConn, _ netip.AddrPort, text string) { got <- text })
	r := &Relay{table: newTable(time.Now)}
	s := r.table.learn(id{web, lb.UDP})
	for _, owed := range []bool{false, true} {
		conn, err := DialUDP(backend, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		local, err := conn.local()
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := sendUnreachable(local, backend); err != nil {
				t.Fatal(err)
			}
		}
		f := &flow{Relay: r, way: way{service: s}, backend: backend, conn: conn}
		if !f.hasError(t) {
			t.Fatal("the kernel does not tell of the error")
		}
		f.send([]byte("x"), owed)
		if lost := f.conn == nil; lost != owed || len(s.suspects) > 0 != owed || r.lostSent.Load() > 0 {
			t.Errorf("something is owed: %v, the backend is lost: %v, suspect are %v", owed, lost, s.suspects)
		}
		if !owed {
			if text := <-got; text != "x" || f.hasError(t) {
				t.Errorf("the backend gets %q", text)
			}
		}
	}
}

// sendUnreachable sends the node ICMP's word that a datagram could not be delivered, of which it has the header alone.
func sendUnreachable(from, to netip.AddrPort) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	packet := []byte{3, 3, 0, 0, 0, 0, 0, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	packet = append(append(packet, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	for _, n := range []uint16{from.Port(), to.Port(), 8, 0} {
		packet = binary.BigEndian.AppendUint16(packet, n)
	}
	sum := uint32(0)
	for i := 0; i < len(packet); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(packet[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(packet[2:], ^uint16(sum))
	return os.NewSyscallError("sendto", unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: from.Addr().As4()}))
}

// Beyond a limit the flow ends whose client has been silent for longest, and no new one is refused.
func TestUDPLimits(t *testing.T) {
	t.Parallel()
	for name, tune := range map[string]func(*Options){
		"of a Service": func(o *Options) { o.ServiceFlows = 2 },
		"of the node":  func(o *Options) { o.FlowLimit = 2 },
		"of a client":  func(o *Options) { o.ClientFlows = 2 },
	} {
		g := newRig(t, tune)
		var backends atomic.Int64 // sockets of the relay that the backend has seen
		seen := map[netip.AddrPort]bool{}
		g.relayedUDP(nil, udpBackend(t, func(conn *net.UDPConn, from netip.AddrPort, text string) {
			if !seen[from] {
				seen[from] = true
				backends.Add(1)
			}
			_, _ = conn.WriteToUDPAddrPort([]byte(text), from)
		}))
		first, second := g.udpClient(), g.udpClient()
		first.ask("x")
		second.ask("x")
		first.ask("x") // so the second has been silent for longer
		for range 3 {
			third := g.udpClient()
			third.ask("x")
			first.ask("x")
		}
		g.until("two are open", func() bool { return g.Counts()[0].Open == 2 })
		if n := backends.Load(); n != 5 {
			t.Errorf("%s: %d flows were begun for five clients", name, n)
		}
		second.ask("x")
		if n := backends.Load(); n != 6 {
			t.Errorf("%s: the flow that was silent for longest has not ended", name)
		}
		if c := g.Counts()[0]; c.ClientRefused+c.Refused != 4 || (c.ClientRefused == 4) != (name == "of a client") {
			t.Errorf("%s: %+v", name, c)
		}
		if g.Refused() != 0 || g.Full() {
			t.Errorf("%s: %d refused, full: %v", name, g.Refused(), g.Full())
		}
	}
}

// At the node's limit the Service with most flows loses one, and not a small one.
func TestUDPLimitIsFair(t *testing.T) {
	a := newFlows(4, 100, 100)
	small, large := &service{}, &service{}
	add := func(s *service, port uint16) (*flow, *flow) {
		key := wire.Flow{Client: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)}
		f, _ := a.find(key, func() *flow { return &flow{key: key} })
		a.answered(f)
		victim, _ := a.admit(f, s)
		return f, victim
	}
	add(small, 1)
	first, _ := add(large, 2)
	second, _ := add(large, 3)
	add(large, 4)
	a.find(first.key, nil) // its client sends something
	if _, victim := add(small, 5); victim != second {
		t.Errorf("%+v ends", victim)
	}
	if _, victim := add(small, 6); victim == nil || victim.service == small && a.of[large].flows.len() > 2 {
		t.Errorf("%+v ends", victim)
	}
	for _, f := range a.list() {
		a.end(f)
	}
	if len(a.all)+len(a.of)+len(a.asking)+a.open+a.asked > 0 {
		t.Errorf("left: %+v", a)
	}
}

// At the node's limit a tenant with many Services of few flows each loses one of its own, and not a neighbor with one
// Service of more than any of them.
func TestContract11TheLimitOfFlowsIsFairToNamespaces(t *testing.T) {
	for name, proven := range map[string]bool{"proven": true, "new": false} {
		a := newFlows(400, 400, 400)
		port := uint16(0)
		add := func(s *service) (victim *flow) {
			port++
			key := wire.Flow{Client: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), port)}
			f, _ := a.find(key, func() *flow { return &flow{key: key} })
			a.answered(f)
			victim, _ = a.admit(f, s)
			if proven {
				f.answered.Store(true)
				a.find(key, nil)
			}
			return victim
		}
		neighbor := &service{id: id{key: lb.Key{Namespace: "neighbor"}}}
		for range 100 {
			add(neighbor)
		}
		services := make([]*service, 10)
		for i := range services {
			services[i] = &service{id: id{key: lb.Key{Namespace: "tenant", Name: fmt.Sprint(i)}}}
		}
		for i := range 1000 {
			if victim := add(services[i%len(services)]); victim != nil && victim.service == neighbor {
				t.Errorf("%s: a flow of the neighbor ends after %d of the tenant", name, i)
				break
			}
		}
		for _, f := range a.list() {
			a.end(f)
		}
		if len(a.all)+len(a.of)+a.open > 0 {
			t.Errorf("%s: left: %+v", name, a)
		}
	}
}

// No more flows are asked about than may be, in all and of one client.
func TestUDPAskingIsBounded(t *testing.T) {
	a := newFlows(1000, 1000, 1000)
	asked := func(addr string, n int) (made int) {
		for i := range n {
			key := wire.Flow{Client: netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(i+1))}
			if f, _ := a.find(key, func() *flow { return &flow{key: key} }); f != nil {
				made++
			}
		}
		return made
	}
	for i := range maxAsking / maxClientAsking {
		addr := fmt.Sprint("192.0.2.", 10+i)
		if i == 0 {
			addr = "2001:db8::1"
		}
		if got := asked(addr, 1000); got != maxClientAsking {
			t.Errorf("%d of %s are asked about", got, addr)
		}
	}
	if got := asked("192.0.2.3", 1000); got != 0 {
		t.Errorf("beyond the limit of all, %d are asked about", got)
	}
	for _, f := range a.list() {
		a.answered(f)
		a.end(f)
	}
	if got := asked("192.0.2.3", 1); got != 1 {
		t.Error("with room again, none is")
	}
}

// A client gets the same backend with session affinity, from whichever port.
func TestUDPAffinity(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	backends := []netip.AddrPort{udpEcho(t, "a"), udpEcho(t, "b"), udpEcho(t, "c")}
	sticky := func(r *plan.Relayed) { r.Affinity = time.Hour }
	g.relayedUDP(sticky, backends[:1]...)
	if got := g.udpClient().ask(""); got != "a: " {
		t.Fatal(got)
	}
	g.relayedUDP(sticky, backends...)
	for range 10 {
		if got := g.udpClient().ask(""); got != "a: " {
			t.Errorf("it got %q", got)
		}
	}
}

// By least-connections each backend gets as many flows as another.
func TestUDPLeastConnections(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(func(r *plan.Relayed) { r.Scheduler = plan.LeastConnections }, udpEcho(t, "a"), udpEcho(t, "b"),
		udpEcho(t, "c"))
	var got []string
	for range 6 {
		got = append(got, g.udpClient().ask(""))
	}
	if want := []string{"a: ", "b: ", "c: ", "a: ", "b: ", "c: "}; !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// Each datagram to a backend has the header of version 2 of the PROXY protocol, with the client's own address
// and port, and answers have none.
func TestUDPProxyProtocol(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(func(r *plan.Relayed) { r.ProxyProtocol = 2 }, udpEcho(t, "a"))
	c := g.udpClient()
	port := c.LocalAddr().(*net.UDPAddr).Port
	for _, text := range []string{"x", "y"} {
		want := fmt.Sprintf("a: \r\n\r\n\x00\r\nQUIT\n\x21\x12\x00\x0c\x7f\x00\x00\x01\xc6\x33\x64\x01%c%c\x00\x50%s", 0, 0, text)
		want = strings.Replace(want, "\x01\x00\x00\x00\x50", "\x01"+string([]byte{byte(port >> 8), byte(port)})+"\x00\x50", 1)
		if got := c.ask(text); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

// A flow on which nobody sends anything ends, and one on which somebody does goes on.
func TestUDPIdle(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.UDPIdle = time.Second })
	g.relayedUDP(nil, udpEcho(t, "a"))
	busy, silent := g.udpClient(), g.udpClient()
	busy.ask("x")
	silent.ask("x")
	g.until("both are there", func() bool { return g.Counts()[0].Open == 2 })
	g.until("one has ended", func() bool {
		busy.ask("x")
		return g.Counts()[0].Open == 1
	})
	if c := g.Counts()[0]; c.Connections != 2 {
		t.Errorf("%+v", c)
	}
	if got := silent.ask("y"); got != "a: y" {
		t.Error(got)
	}
}

// What comes in at the moment at which its flow ends begins another.
func TestUDPAsItsFlowEnds(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"))
	c := g.udpClient()
	c.ask("x")
	g.flows.mu.Lock()
	for key := range g.flows.all {
		g.flows.all[key] = &flow{Relay: g.Relay, key: key, closed: true}
	}
	g.flows.mu.Unlock()
	if got := c.ask("y"); got != "a: y" {
		t.Error(got)
	}
}

// Nor is one lost that comes in as the first after its frontend was given to another Service.
func TestUDPAsItsFrontendMoves(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"))
	c := g.udpClient()
	c.ask("x")
	moved := wire.Service{Key: lb.Key{Namespace: "default", Name: "another"}, Relayed: &plan.Relayed{
		Ports: []plan.RelayedPort{{Protocol: lb.UDP, Frontends: []plan.RelayedFrontend{{Addr: frontend}},
			Cluster: []plan.RelayedBackend{{Addr: udpEcho(t, "b")}}}}}}
	g.tell <- wire.Message{Complete: true, Services: []wire.Service{moved}}
	g.until("it has moved", func() bool {
		w, ok, _ := g.table.find(target{lb.UDP, frontend})
		return ok && w.service.key == moved.Key
	})
	if got := c.ask("y"); got != "b: y" {
		t.Error(got)
	}
}

// A flow may be silent for as long as the kernel remembers it, less a sixth.
func TestUDPIdleIsTheKernels(t *testing.T) {
	now := time.Unix(1e9, 0)
	r := &Relay{options: Options{UDPIdle: 100 * time.Second},
		table: newTable(time.Now), deps: Deps{Now: func() time.Time { return now }}}
	r.idle.Store(&idleTimes{25 * time.Second, 90 * time.Second})
	f := &flow{Relay: r, began: now, conn: &Conn{}, way: way{service: &service{suspects: map[netip.AddrPort]time.Time{}}}}
	for _, step := range []struct {
		after time.Duration
		want  time.Duration
	}{{time.Second, 25 * time.Second}, {2 * time.Second, 25 * time.Second}, {2100 * time.Millisecond, 90 * time.Second}} {
		now = f.began.Add(step.after)
		f.answer(f.conn, 1)
		if got := f.limit(); got != step.want {
			t.Errorf("after %s: %s", step.after, got)
		}
	}
	r.options.UDPIdle = time.Second
	if got := f.limit(); got != time.Second {
		t.Errorf("with a shorter option: %s", got)
	}
}

// What is for the relay itself, or for nobody, is dropped and counted, and reaches no backend. What the proxy
// does not answer in time is asked again.
func TestUDPUnknownFlows(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayedUDP(nil, udpEcho(t, "a"))
	c := g.udpClient()
	own := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), g.sockets.ports()[lb.IPv4])
	for i, to := range []netip.AddrPort{own, {}, netip.MustParseAddrPort("198.51.100.2:80")} {
		g.original.Store(&to)
		c.send("x")
		g.until("it is dropped", func() bool { return g.Refused() == uint64(i+1) && len(g.flows.list()) == 0 })
	}
	g.original.Store(&frontend)
	g.mute.Store(true)
	c.send("x")
	g.until("it is dropped", func() bool { return g.Refused() == 4 && len(g.flows.list()) == 0 })
	g.mute.Store(false)
	if got := c.ask("y"); got != "a: y" {
		t.Error(got)
	}
	if counts := g.Counts()[0]; counts.Connections != 1 {
		t.Errorf("%+v", counts)
	}
}

// A relay that ends waits for answers that are under way, hangs up before it closes its sockets, and waits no
// longer than the drain time.
func TestUDPDrain(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	answer := make(chan struct{})
	g.relayedUDP(nil, udpBackend(t, func(conn *net.UDPConn, from netip.AddrPort, text string) {
		<-answer
		_, _ = conn.WriteToUDPAddrPort([]byte(text), from)
	}))
	c := g.udpClient()
	c.send("x")
	g.until("it is there", func() bool { return len(g.Counts()) > 0 && g.Counts()[0].Tries == 1 })
	stopped := make(chan struct{})
	go func() { g.stop(); close(stopped) }()
	for h := range g.said {
		if h.Leaving {
			break
		}
	}
	<-g.left
	close(answer)
	if got := c.next(); got != "x" {
		t.Errorf("while draining: %q", got)
	}
	<-stopped
	c.send("y")
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("once it has ended: %v", err)
	}
}

// What the kernel says of a datagram is what the relay has it say with the answer.
func FuzzArrivedAt(f *testing.F) {
	f.Add(answerFrom(netip.MustParseAddr("192.0.2.1")))
	f.Add(answerFrom(netip.MustParseAddr("2001:db8::1")))
	f.Fuzz(func(t *testing.T, control []byte) {
		addr, _, err := arrivedAt(control)
		if (err == nil) != addr.IsValid() {
			t.Errorf("%v, %v", addr, err)
		}
		if err != nil || addr.Is4() { // IPv4 has two addresses there
			return
		}
		if again, _, err := arrivedAt(answerFrom(addr)); err != nil || again != addr {
			t.Errorf("%s became %s, %v", addr, again, err)
		}
	})
}

// An answer comes from the address that the client has sent to, in both families.
func TestUDPAnswersFrom(t *testing.T) {
	for _, text := range []string{"127.0.0.1", "127.0.0.2", "::1"} {
		addr := netip.MustParseAddr(text)
		socket, err := openUDP(lb.FamilyOf(addr), 0)
		if err != nil {
			t.Fatal(err)
		}
		defer socket.Close()
		at, err := socket.local()
		if err != nil {
			t.Fatal(err)
		}
		client, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, at.Port())))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := client.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		d, err := socket.receiveFrom(make([]byte, 10), make([]byte, controlSize))
		if err != nil || d.to != addr || d.n != 1 {
			t.Fatalf("%+v, %v", d, err)
		}
		_, to := sockaddrOf(d.from)
		if err := socket.sendTo([]byte("y"), answerFrom(d.to), to); err != nil {
			t.Fatal(err)
		}
		_ = client.SetReadDeadline(time.Now().Add(time.Minute))
		if n, err := client.Read(make([]byte, 10)); n != 1 || err != nil {
			t.Errorf("from %s: %d, %v", addr, n, err)
		}
	}
}

// The errors that count against a backend are those that it, or what is on the way to it, has made.
func TestWhatCountsAgainstUDPBackends(t *testing.T) {
	for err, want := range map[error]bool{nil: false, unix.ECONNREFUSED: true, unix.EHOSTUNREACH: true,
		unix.ENETUNREACH: true, unix.EACCES: true, unix.EMSGSIZE: false, unix.EAGAIN: false, unix.ENOBUFS: false,
		unix.EPERM: false, os.ErrClosed: false} {
		if got := isBackends(err); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}

// A question without an answer is dropped: the proxy may be away for hours.
func TestContract11QuestionsHaveAnEnd(t *testing.T) {
	q := newQuestions()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for port := range uint16(300) {
		if _, ok := q.ask(ctx, wire.Flow{Client: netip.AddrPortFrom(netip.IPv4Unspecified(), port)}, time.Hour); ok {
			t.Error("an answer came from nowhere")
		}
	}
	if len(q.queue)+len(q.open) > 0 {
		t.Errorf("%d questions are queued, %d open", len(q.queue), len(q.open))
	}
}

// A relay of TCP alone has no port of UDP, and says so.
func TestTCPOnly(t *testing.T) {
	r, err := New(Options{TCPOnly: true}, NewDeps(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	defer r.sockets.close()
	udp := r.receivers
	for _, l := range r.sockets.listeners() {
		if udp.of(l.family) != nil || udp.without()[l.family] != errTCPOnly.Error() {
			t.Errorf("%s: a port of UDP is open, or the relay says %q", l.family, udp.without())
		}
	}
}
