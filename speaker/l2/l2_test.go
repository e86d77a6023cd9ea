package l2

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"

	"github.com/landfall-lb/landfall/internal/lb"
)

// segment is what a test sees of a node's interfaces.
type segment struct {
	mu       sync.Mutex
	open     map[string]*socket
	opened   int
	listen   error // fails the next listens
	write    error // fails the next writes
	announce map[string]int
}

func newSegment() *segment { return &segment{open: map[string]*socket{}, announce: map[string]int{}} }

// socket is one interface's end.
type socket struct {
	net.PacketConn
	s      *segment
	i      lb.Interface
	in     chan []byte
	out    chan []byte
	closed chan struct{}
	once   sync.Once
}

func (s *segment) Listen(i lb.Interface) (net.PacketConn, error) { return s.listenOn(i) }

// ListenNDP opens the end of an interface for IPv6; of one name there is one end.
func (s *segment) ListenNDP(i lb.Interface) (NDPSocket, error) { return s.listenOn(i) }

func (c *socket) Join(netip.Addr) (func(), error) { return func() {}, nil }

func (s *segment) listenOn(i lb.Interface) (*socket, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listen != nil {
		return nil, s.listen
	}
	s.opened++
	s.open[i.Name] = &socket{s: s, i: i, in: make(chan []byte), out: make(chan []byte, 100), closed: make(chan struct{})}
	return s.open[i.Name], nil
}

// socket returns the end of an interface, once the actor has opened it.
func (s *segment) socket(name string) *socket {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open[name]
}

func (c *socket) ReadFrom(b []byte) (int, net.Addr, error) {
	select {
	case frame := <-c.in:
		if frame == nil {
			return 0, nil, errors.New("network is down")
		}
		return copy(b, frame), nil, nil
	case <-c.closed:
		return 0, nil, net.ErrClosed
	}
}

func (c *socket) WriteTo(b []byte, _ net.Addr) (int, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.s.write != nil {
		return 0, c.s.write
	}
	var eth ethernet.Frame
	var p arp.Packet
	if eth.UnmarshalBinary(b) == nil && p.UnmarshalBinary(eth.Payload) == nil && p.SenderIP == p.TargetIP {
		c.s.announce[c.i.Name+" "+p.SenderIP.String()+" "+p.SenderHardwareAddr.String()]++
		return len(b), nil
	}
	if f, ok := readNDP(b); ok && f.kind == advertisement && f.destination == allNodes {
		c.s.announce[c.i.Name+" "+f.target.String()+" "+f.given.String()]++
		return len(b), nil
	}
	c.out <- slices.Clone(b)
	return len(b), nil
}

func (c *socket) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// announced returns how many gratuitous packets and unsolicited advertisements there were since the last call, by interface, VIP
// and MAC.
func (s *segment) announced() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.announce
	s.announce = map[string]int{}
	return was
}

func (s *segment) fail(listen, write error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listen, s.write = listen, write
}

type noStats struct{}

func (noStats) Request(string, netip.Addr)    {}
func (noStats) Reply(string, netip.Addr)      {}
func (noStats) Gratuitous(string, netip.Addr) {}
func (noStats) Dropped(string, Drop, int)     {}
func (noStats) Probe(string, bool)            {}
func (noStats) Withdrawn(string, netip.Addr)  {}

func iface(name string, index int, mac byte) lb.Interface {
	return lb.Interface{Name: name, Index: index, MAC: net.HardwareAddr{2, 0, 0, 0, 0, mac}, Up: true}
}

func desire(interfaces []lb.Interface, answers map[netip.Addr]Answer) Desired {
	return Desired{Interfaces: interfaces, Answers: answers}
}

func newTestActor(s *segment, changed func()) *Actor {
	return New(Options{Log: slog.New(slog.DiscardHandler), Listen: s.Listen, Stats: noStats{}, Changed: changed})
}

func wantOutcome(t *testing.T, a *Actor, want map[netip.Addr][]string) {
	t.Helper()
	if d := cmp.Diff(want, a.Outcome().Answering, cmpopts.EquateEmpty(), cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Error(d)
	}
}

func wantAnnounced(t *testing.T, s *segment, want map[string]int) {
	t.Helper()
	if d := cmp.Diff(want, s.announced(), cmpopts.EquateEmpty()); d != "" {
		t.Error(d)
	}
}

// stopServing ends the responders of an actor that was never run.
func stopServing(a *Actor) {
	for _, p := range a.ports {
		p.shut()
	}
}

func TestBurstIsSentOnceAndInFull(t *testing.T) {
	s := newSegment()
	a := newTestActor(s, nil)
	defer stopServing(a)
	interfaces := []lb.Interface{iface("eth0", 2, 1), iface("eth1", 3, 2)}
	a.Set(desire(interfaces, map[netip.Addr]Answer{vip: {On: []string{"eth0", "eth1"}}}))
	now := time.Unix(0, 0)
	if again := a.apply(now); again != burst[1] {
		t.Errorf("the next part of the burst is due in %v, want %v", again, burst[1])
	}
	both := func(n int) map[string]int {
		return map[string]int{"eth0 172.26.236.180 02:00:00:00:00:01": n, "eth1 172.26.236.180 02:00:00:00:00:02": n}
	}
	wantAnnounced(t, s, both(2)) // a request and a reply
	wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0", "eth1"}})
	for range 10 {
		now = now.Add(time.Second)
		a.apply(now)
	}
	wantAnnounced(t, s, both(2*(len(burst)-1)))
	if again := a.apply(now); again != 0 {
		t.Errorf("after the burst there is more to do in %v", again)
	}
	// Saying the same again announces nothing; a new round does.
	a.Set(desire(interfaces, map[netip.Addr]Answer{vip: {On: []string{"eth1", "eth0"}}}))
	a.apply(now)
	wantAnnounced(t, s, nil)
	a.Set(desire(interfaces, map[netip.Addr]Answer{vip: {On: []string{"eth0", "eth1"}, Round: 1}}))
	a.apply(now)
	wantAnnounced(t, s, both(2))
	if s.opened != 2 {
		t.Errorf("%d sockets opened, want 2", s.opened)
	}
}

func TestContract1WithdrawalIsImmediate(t *testing.T) {
	s := newSegment()
	a := newTestActor(s, nil)
	defer stopServing(a)
	other := netip.MustParseAddr("172.26.236.181")
	interfaces := []lb.Interface{iface("eth0", 2, 1)}
	now := time.Unix(0, 0)
	a.Set(desire(interfaces, map[netip.Addr]Answer{vip: {On: []string{"eth0"}}, other: {On: []string{"eth0"}}}))
	a.apply(now)
	s.announced()
	responder := a.ports[place{"eth0", lb.IPv4}].responder.(*arpResponder)
	a.Set(desire(interfaces, map[netip.Addr]Answer{other: {On: []string{"eth0"}}}))
	now = now.Add(burst[1])
	a.apply(now)
	if responder.answers(vip) || !responder.answers(other) {
		t.Errorf("withdrawn VIP is answered: %v, the other one: %v", responder.answers(vip), responder.answers(other))
	}
	wantAnnounced(t, s, map[string]int{"eth0 172.26.236.181 02:00:00:00:00:01": 2})
	wantOutcome(t, a, map[netip.Addr][]string{other: {"eth0"}})
	// While an interface fails, what is withdrawn is withdrawn all the same.
	s.fail(nil, errors.New("no buffer space available"))
	third := netip.MustParseAddr("172.26.236.182")
	a.Set(desire(interfaces, map[netip.Addr]Answer{other: {On: []string{"eth0"}}, third: {On: []string{"eth0"}}}))
	a.apply(now)
	a.Set(desire(interfaces, map[netip.Addr]Answer{third: {On: []string{"eth0"}}}))
	a.apply(now)
	if responder.answers(other) {
		t.Error("a VIP is answered after its withdrawal because announcing another one failed")
	}
	a.Set(desire(interfaces, nil))
	a.apply(now)
	wantOutcome(t, a, nil)
	select {
	case <-s.open["eth0"].closed:
	default:
		t.Error("the socket of an interface without VIPs is open")
	}
}

// A VIP that is held is answered for and not announced, and announced at once when it is held no more. One that is
// announced already goes on to be.
func TestContract11HeldVIPsAreAnsweredFor(t *testing.T) {
	s := newSegment()
	a := newTestActor(s, nil)
	defer stopServing(a)
	interfaces := []lb.Interface{iface("eth0", 2, 1)}
	now := time.Unix(0, 0)
	set := func(held bool) {
		a.Set(desire(interfaces, map[netip.Addr]Answer{vip: {On: []string{"eth0"}, Held: held}}))
		a.apply(now)
	}
	set(true)
	if responder := a.ports[place{"eth0", lb.IPv4}].responder.(*arpResponder); !responder.answers(vip) {
		t.Error("it is not answered for")
	}
	wantAnnounced(t, s, nil)
	wantOutcome(t, a, nil)
	set(false)
	wantAnnounced(t, s, map[string]int{"eth0 172.26.236.180 02:00:00:00:00:01": 2})
	wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0"}})
	now = now.Add(burst[1])
	set(true) // it was withdrawn and wanted again before the actor looked
	wantAnnounced(t, s, map[string]int{"eth0 172.26.236.180 02:00:00:00:00:01": 2})
}

// withdrawals are the VIPs whose counts have ended.
type withdrawals struct {
	noStats
	ended []string
}

func (w *withdrawals) Withdrawn(iface string, vip netip.Addr) {
	w.ended = append(w.ended, iface+" "+vip.String())
}

// Addresses of Services come and go without an end, and what is counted for each must not stay.
func TestCountsEndWithTheVIP(t *testing.T) {
	s, stat := newSegment(), &withdrawals{}
	a := New(Options{Log: slog.New(slog.DiscardHandler), Listen: s.Listen, Stats: stat})
	defer stopServing(a)
	interfaces, eth0 := []lb.Interface{iface("eth0", 2, 1)}, []string{"eth0"}
	other := netip.MustParseAddr("172.26.236.181")
	for _, step := range []struct {
		name    string
		answers map[netip.Addr]Answer
		want    []string
	}{
		{"both are answered for", map[netip.Addr]Answer{vip: {On: eth0}, other: {On: eth0, Held: true}}, nil},
		{"one goes, which was never announced", map[netip.Addr]Answer{vip: {On: eth0}}, []string{"eth0 172.26.236.181"}},
		{"the last goes, and the socket", nil, []string{"eth0 172.26.236.180"}},
		{"nothing is left", nil, nil},
	} {
		a.Set(desire(interfaces, step.answers))
		a.apply(time.Unix(0, 0))
		if !slices.Equal(stat.ended, step.want) {
			t.Errorf("%s: the counts of %v have ended, want %v", step.name, stat.ended, step.want)
		}
		stat.ended = nil
	}
}

func TestOutcomeIsRecordedAfterTheEffect(t *testing.T) {
	s := newSegment()
	changes := 0
	a := newTestActor(s, func() { changes++ })
	defer stopServing(a)
	now := time.Unix(0, 0)
	s.fail(errors.New("operation not permitted"), nil)
	a.Set(desire([]lb.Interface{iface("eth0", 2, 1)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}))
	if again := a.apply(now); again != minRetry {
		t.Errorf("tried again in %v, want %v", again, minRetry)
	}
	wantOutcome(t, a, nil)
	if got := a.Outcome().Problems["eth0"]; got != "listen for ARP: operation not permitted" {
		t.Errorf("problem is %q", got)
	}
	s.fail(nil, errors.New("network is down"))
	now = now.Add(minRetry)
	if again := a.apply(now); again != 2*minRetry {
		t.Errorf("tried again in %v, want %v", again, 2*minRetry)
	}
	wantOutcome(t, a, nil)
	s.fail(nil, nil)
	now = now.Add(2 * minRetry)
	a.apply(now)
	wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0"}})
	if p := a.Outcome().Problems; len(p) > 0 || changes != 3 {
		t.Errorf("problems %v after %d changes, want none after 3", p, changes)
	}
}

func TestInterfacesAreFollowed(t *testing.T) {
	s := newSegment()
	a := newTestActor(s, nil)
	defer stopServing(a)
	now := time.Unix(0, 0)
	answers := map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}
	a.Set(desire([]lb.Interface{iface("eth0", 2, 1)}, answers))
	a.apply(now)
	s.announced()
	port := iface("eth0", 2, 7)
	port.Enslaved = true
	for _, c := range []struct {
		name string
		i    lb.Interface
	}{{"the MAC changes", iface("eth0", 2, 7)}, {"it is a port of a bond", port},
		{"the interface is another one", iface("eth0", 9, 7)}} {
		a.Set(desire([]lb.Interface{c.i}, answers))
		a.apply(now)
		wantAnnounced(t, s, map[string]int{"eth0 172.26.236.180 02:00:00:00:00:07": 2})
		wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0"}})
		if got := s.open["eth0"].i; !got.Equal(c.i) {
			t.Errorf("%s: socket is on %+v", c.name, got)
		}
	}
	// A bond that sends by another port is announced on anew, at its open socket.
	bond := iface("eth0", 9, 7)
	socket := s.open["eth0"]
	for _, port := range []int{3, 4} {
		bond.Port = port
		a.Set(desire([]lb.Interface{bond}, answers))
		a.apply(now)
		wantAnnounced(t, s, map[string]int{"eth0 172.26.236.180 02:00:00:00:00:07": 2})
		a.apply(now)
		wantAnnounced(t, s, nil)
	}
	if s.open["eth0"] != socket {
		t.Error("the socket was closed")
	}
	a.Set(desire(nil, answers))
	a.apply(now)
	wantOutcome(t, a, nil)
	a.Set(desire([]lb.Interface{iface("eth0", 9, 7)}, answers))
	a.apply(now)
	wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0"}})
}

// The loop with time: bursts come by themselves, requests are answered, a socket that fails is
// opened again.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		changed := make(chan struct{}, 100)
		a := newTestActor(s, func() { changed <- struct{}{} })
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		a.Set(desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}))
		<-changed
		time.Sleep(time.Minute)
		wantAnnounced(t, s, map[string]int{"eth0 172.26.236.180 02:00:00:00:00:78": 2 * len(burst)})

		first := s.open["eth0"]
		first.in <- ask(func(q *question) { q.target = netip.MustParseAddr("172.26.236.181") })
		first.in <- ask()
		if reply := <-first.out; net.HardwareAddr(reply[:6]).String() != theirs.String() || len(first.out) != 0 {
			t.Errorf("answered % x and %d more", reply, len(first.out))
		}
		first.in <- nil // the interface goes down
		<-changed
		wantOutcome(t, a, nil)
		<-changed
		wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0"}})
		if s.open["eth0"] == first {
			t.Error("the socket was not opened again")
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		wantOutcome(t, a, nil)
	})
}

// With Repeat, what stays is announced again and again after the burst.
func TestRepeatedAnnouncements(t *testing.T) {
	s := newSegment()
	a, interfaces := newTestActor(s, nil), []lb.Interface{iface("eth0", 2, 1)}
	defer stopServing(a)
	a.opts.Repeat = time.Minute
	now := time.Unix(0, 0)
	a.Set(desire(interfaces, map[netip.Addr]Answer{vip: {On: []string{"eth0"}}}))
	for range burst {
		now = now.Add(a.apply(now))
	}
	s.announced()
	for range 3 {
		again := a.apply(now)
		if len(s.announced()) != 1 {
			t.Error("not announced again when due")
		}
		if again != time.Minute {
			t.Errorf("due again in %v", again)
		}
		now = now.Add(again)
	}
}
