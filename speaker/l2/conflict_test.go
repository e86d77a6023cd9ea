package l2

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/speaker/plan"
)

func TestWhatShowsThatAnARPAddressIsUsed(t *testing.T) {
	other := netip.MustParseAddr("172.26.236.181")
	for _, c := range []struct {
		name    string
		frame   []byte
		answers bool
		want    bool
	}{
		{"its answer to a probe", ask(func(q *question) {
			q.op, q.sender, q.target, q.to = arp.OperationReply, vip, netip.IPv4Unspecified(), own
		}), false, true},
		{"its announcement", ask(func(q *question) { q.sender = vip }), true, true},
		{"its question for somebody else", ask(func(q *question) { q.sender, q.target = vip, client }), true, true},
		{"its own probe while we probe", ask(func(q *question) { q.sender = netip.IPv4Unspecified() }), false, true},
		{"its probe for what we answer for, which our answer ends",
			ask(func(q *question) { q.sender = netip.IPv4Unspecified() }), true, false},
		{"a question for it", ask(), true, false},
		{"a question for it while we probe", ask(), false, false},
		{"the use of another address", ask(func(q *question) { q.sender = other }), true, false},
		{"our own words, sent back by somebody", ask(func(q *question) { q.sender, q.mac = vip, own }), true, false},
		{"a MAC address of a group", ask(func(q *question) { q.sender, q.mac = vip, ethernet.Broadcast }), true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			frame, ok := readARP(c.frame)
			wantUse(t, frame, ok, own, vip, c.answers, c.want, theirs)
		})
	}
}

// wantUse looks whether a frame that could be read shows that the device with a MAC address uses a
// VIP.
func wantUse(
	t *testing.T, f frame, read bool, own net.HardwareAddr, vip netip.Addr, answers, want bool, mac net.HardwareAddr) {
	t.Helper()
	if !read {
		t.Fatal("cannot be read")
	}
	used, by, ok := f.uses(own, func(asked netip.Addr) (bool, bool) { return answers, asked == vip })
	if ok != want || ok && (used != vip || !bytes.Equal(by, mac)) {
		t.Errorf("%v at %v: %v, want %v", used, by, ok, want)
	}
}

func TestWhatShowsThatAnNDPAddressIsUsed(t *testing.T) {
	g := group(t, vip6)
	advertised, err := advertise(clientMAC, vip6, false, allNodes, multicastMAC(allNodes))
	if err != nil {
		t.Fatal(err)
	}
	mine, err := advertise(ownMAC, vip6, false, allNodes, multicastMAC(allNodes))
	if err != nil {
		t.Fatal(err)
	}
	probe := solicit{source: netip.IPv6Unspecified(), destination: g, target: vip6, to: multicastMAC(g)}
	ours, err := probeNDP(ownMAC, vip6)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		frame   []byte
		answers bool
		want    bool
	}{
		{"its advertisement", advertised, false, true},
		{"its advertisement against ours", advertised, true, true},
		{"our own", mine, true, false},
		{"its own probe while we probe", probe.frame(t), false, true},
		{"its probe for what we answer for", probe.frame(t), true, false},
		{"our own probe", ours, false, false},
		{"its question for somebody else", solicit{source: vip6, destination: g, target: client6, to: multicastMAC(g),
			option: true}.frame(t), true, true},
		{"a question for it", solicit{source: client6, destination: g, target: vip6, to: multicastMAC(g),
			option: true}.frame(t), false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			frame, ok := readNDP(c.frame)
			wantUse(t, frame, ok, ownMAC, vip6, c.answers, c.want, clientMAC)
		})
	}
}

// The bytes of the questions, written out: RFC 5227 section 2.1.1, RFC 4862 section 5.4.2.
func TestProbeBytes(t *testing.T) {
	frame, err := probeARP(own, vip)
	if err != nil {
		t.Fatal(err)
	}
	want := []byte{
		0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 0x78, 0x08, 0x06, 0, 1, 0x08, 0x00, 6, 4, 0, 1,
		2, 0, 0, 0, 0, 0x78, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 172, 26, 236, 180, // nobody asks, so that no cache changes
	}
	if d := cmp.Diff(want, frame[:42]); d != "" {
		t.Error(d)
	}
	frame, err = probeNDP(ownMAC, vip6)
	if err != nil {
		t.Fatal(err)
	}
	read, ok := readNDP(frame)
	if read.Destination.String() != "33:33:ff:00:01:80" {
		t.Errorf("to %v", read.Destination)
	}
	if !ok || read.kind != solicitation || !read.source.IsUnspecified() || read.destination != group(t, vip6) ||
		read.target != vip6 || len(frame) > ethernetHeader+ipv6Header+ndpHeader {
		t.Errorf("%+v", read)
	}
}

func FuzzUses(f *testing.F) {
	f.Add(ask(func(q *question) { q.sender = vip }))
	advertised, err := advertise(clientMAC, vip6, false, allNodes, multicastMAC(allNodes))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(advertised)
	f.Fuzz(func(t *testing.T, b []byte) {
		known := func(addr netip.Addr) (answered, listens bool) { return addr == vip, addr == vip || addr == vip6 }
		check := func(used netip.Addr, mac net.HardwareAddr, ok bool) {
			if _, known := known(used); ok && (!known || len(mac) != 6 || mac[0]&1 == 1 || bytes.Equal(mac, own)) {
				t.Fatalf("%v at %v", used, mac)
			}
		}
		if frame, ok := readARP(b); ok {
			check(frame.uses(own, known))
		}
		if frame, ok := readNDP(b); ok {
			check(frame.uses(own, known))
		}
	})
}

// probes takes the questions that an interface has sent.
func (c *socket) probes() (n int) {
	for {
		select {
		case frame := <-c.out:
			if f, ok := readARP(frame); ok && f.SenderIP.IsUnspecified() && f.Operation == arp.OperationRequest {
				n++
			}
		default:
			return n
		}
	}
}

func conflicts(macs ...string) map[netip.Addr][]plan.ConflictingHost {
	var list []plan.ConflictingHost
	for _, mac := range macs {
		list = append(list, plan.ConflictingHost{Interface: "eth0", MAC: mac})
	}
	if list == nil {
		return nil
	}
	return map[netip.Addr][]plan.ConflictingHost{vip: list}
}

func wantConflicts(t *testing.T, what string, a *Actor, want map[netip.Addr][]plan.ConflictingHost) {
	t.Helper()
	if d := cmp.Diff(want, a.Outcome().ConflictingHosts, cmpopts.EquateEmpty(),
		cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Errorf("%s: %s", what, d)
	}
}

// run starts an actor on fake sockets that ends with the test.
func run(t *testing.T, s *segment) *Actor {
	a := newTestActor(s, nil)
	done := make(chan error)
	ctx := t.Context()
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return a
}

func TestProbing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := run(t, s)
		eth0 := iface("eth0", 2, 0x78)
		probing := Desired{Interfaces: []lb.Interface{eth0}, Probes: map[netip.Addr][]string{vip: {"eth0"}}}
		a.Set(probing)
		synctest.Wait()
		if a.Outcome().Probed[vip] {
			t.Error("probed before anybody could answer")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if n := s.open["eth0"].probes(); n != probeCount || !a.Outcome().Probed[vip] {
			t.Errorf("%d probes, probed: %v", n, a.Outcome().Probed)
		}
		wantAnnounced(t, s, nil)

		// Somebody uses it after all. It is looked after for as long as it does, and no longer.
		use := ask(func(q *question) { q.op, q.sender, q.to = arp.OperationReply, vip, own })
		s.open["eth0"].in <- use
		synctest.Wait()
		wantConflicts(t, "at once", a, conflicts(theirs.String()))
		time.Sleep(probeAgain + time.Second)
		if n := s.open["eth0"].probes(); n != probeCount {
			t.Errorf("%d probes in the second row", n)
		}
		s.open["eth0"].in <- use
		time.Sleep(sightingLasts - time.Second)
		wantConflicts(t, "after its second answer", a, conflicts(theirs.String()))
		time.Sleep(2 * time.Second)
		wantConflicts(t, "long after that", a, nil)

		// One that is ours after all is none.
		s.open["eth0"].in <- use
		synctest.Wait()
		wantConflicts(t, "once more", a, conflicts(theirs.String()))
		probing.Ours = map[string]string{theirs.String(): "other"}
		a.Set(probing)
		synctest.Wait()
		wantConflicts(t, "of ours", a, nil)
		s.open["eth0"].in <- use
		synctest.Wait()
		wantConflicts(t, "of ours, again", a, nil)
	})
}

// What is answered for is defended, at most once in an interval, and not against our own.
func TestDefence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := run(t, s)
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}}})
		a.Set(d)
		time.Sleep(time.Minute)
		s.announced()
		use := ask(func(q *question) { q.sender = vip })
		for range 50 { // 5 s
			s.open["eth0"].in <- use
			time.Sleep(100 * time.Millisecond)
		}
		key := "eth0 " + vip.String() + " " + own.String()
		wantAnnounced(t, s, map[string]int{key: 2}) // both forms of one announcement
		wantConflicts(t, "while it sends", a, conflicts(theirs.String()))
		for range 10 {
			s.open["eth0"].in <- use
			time.Sleep(time.Second)
		}
		wantAnnounced(t, s, map[string]int{key: 2})
		time.Sleep(sightingLasts)
		wantAnnounced(t, s, map[string]int{key: 2}) // against what came in the interval
		wantConflicts(t, "when it is silent", a, nil)

		d.Ours = map[string]string{theirs.String(): "other"}
		a.Set(d)
		s.open["eth0"].in <- use
		time.Sleep(time.Second)
		wantAnnounced(t, s, nil)
	})
}

// A VIP that leaves the node for a moment keeps its conflicting hosts, and is not looked for
// meanwhile. They end with time, whether it comes back or not.
func TestConflictsOutlastAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := run(t, s)
		probing := Desired{Interfaces: []lb.Interface{iface("eth0", 2, 0x78)},
			Probes: map[netip.Addr][]string{vip: {"eth0"}}}
		other := Desired{Interfaces: probing.Interfaces, Probes: map[netip.Addr][]string{vip.Next(): {"eth0"}}}
		use := ask(func(q *question) { q.op, q.sender, q.to = arp.OperationReply, vip, own })
		for name, away := range map[string]Desired{
			"nothing is left":        {Interfaces: probing.Interfaces},
			"another address stays":  other,
			"the interface is gone":  {},
			"the interface is muted": {Interfaces: probing.Interfaces, Mute: true},
		} {
			a.Set(probing)
			synctest.Wait()
			s.socket("eth0").in <- use
			synctest.Wait()
			wantConflicts(t, name+": seen", a, conflicts(theirs.String()))
			a.Set(away)
			time.Sleep(probeAgain + time.Second)
			wantConflicts(t, name+": while it is away", a, conflicts(theirs.String()))
			a.Set(probing)
			synctest.Wait()
			wantConflicts(t, name+": when it is back", a, conflicts(theirs.String()))
			a.Set(away)
			time.Sleep(sightingLasts)
			synctest.Wait()
			wantConflicts(t, name+": long after", a, nil)
		}
	})
}

// Whoever makes up MAC addresses does not fill the memory.
func TestConflictingHostsAreBounded(t *testing.T) {
	s := sightings{}
	at := place{"eth0", lb.IPv4}
	for i := range 100 {
		s.note(at, vip, net.HardwareAddr{2, 0, 0, 0, 1, byte(i)}.String(), time.Unix(0, 0))
	}
	if n := len(s.conflicts()[vip]); n != hostsKept {
		t.Errorf("%d are kept", n)
	}
}

// The device that was seen first comes first for as long as it is seen, whatever others there are: it is the one that
// people are told of.
func TestTheFirstConflictingHostComesFirst(t *testing.T) {
	s := sightings{}
	at := place{"eth0", lb.IPv4}
	first := "02:00:00:00:09:09"
	s.note(at, vip, first, time.Unix(-1, 0))
	for i := range 60 {
		now := time.Unix(int64(i), 0)
		s.forget(now, nil)
		s.note(at, vip, first, now)
		s.note(at, vip, net.HardwareAddr{2, 0, 0, 0, 1, byte(100 - i)}.String(), now)
		s.note(place{"eth1", lb.IPv4}, vip, net.HardwareAddr{2, 0, 0, 0, 0, byte(i)}.String(), now)
		if got := s.conflicts()[vip]; len(got) < 3 || got[0].MAC != first {
			t.Fatalf("after %d s: %v", i, got)
		}
	}
}

// Where nothing can be sent, nothing can be found out: that must not keep the address from other
// interfaces for ever.
func TestProbingWhereNothingCanBeSent(t *testing.T) {
	s := newSegment()
	a := newTestActor(s, nil)
	defer stopServing(a)
	s.fail(nil, net.ErrClosed)
	a.Set(Desired{Interfaces: []lb.Interface{iface("eth0", 2, 0x78)}, Probes: map[netip.Addr][]string{vip: {"eth0"}}})
	a.apply(time.Now())
	if o := a.Outcome(); !o.Probed[vip] || o.Problems["eth0"] == "" {
		t.Errorf("%+v", o)
	}
}

// A real kernel holds the addresses: it is seen by a probe, and later by what it sends.
func TestForeignHolder(t *testing.T) {
	l := newLAN(t)
	n := l.node(t, "172.26.236.178/24")
	free, free6 := netip.MustParseAddr("172.26.236.190"), netip.MustParseAddr("2001:db8::190")
	l.client.Run(t, "ip", "-6", "addr", "add", "2001:db8::9/64", "dev", "eth0", "nodad")
	l.client.Run(t, "ip", "addr", "add", vip.String()+"/24", "dev", "eth0")
	l.client.Run(t, "ip", "-6", "addr", "add", vip6.String()+"/64", "dev", "eth0", "nodad")
	mac := macOf(t, l.client)

	n.probe(vip, vip6, free, free6)
	eventually(t, "all are probed", func() bool { return len(n.actor.Outcome().Probed) == 4 })
	want := []plan.ConflictingHost{{Interface: "eth0", MAC: mac}}
	got := n.actor.Outcome().ConflictingHosts
	if !slices.Equal(got[vip], want) || !slices.Equal(got[vip6], want) || len(got) != 2 {
		t.Errorf("conflicting hosts %v, want %v at %s and %s", got, want, vip, vip6)
	}

	// What is answered for is taken by somebody who does not ask.
	n.answerFor(free, free6)
	eventually(t, "the node answers", func() bool { return len(n.actor.Outcome().Answering) == 2 })
	l.client.Run(t, "ip", "addr", "add", free.String()+"/24", "dev", "eth0")
	l.client.Run(t, "ip", "-6", "addr", "add", free6.String()+"/64", "dev", "eth0", "nodad")
	send(t, l.client, free, netip.MustParseAddr("172.26.236.77"))
	send(t, l.client, free6, netip.MustParseAddr("2001:db8::77"))
	eventually(t, "the node sees it", func() bool {
		got := n.actor.Outcome().ConflictingHosts
		return slices.Equal(got[free], want) && slices.Equal(got[free6], want)
	})
}

func macOf(t *testing.T, ns *nstest.NS) (mac string) {
	t.Helper()
	ns.Do(t, func() error {
		i, err := net.InterfaceByName("eth0")
		if err == nil {
			mac = i.HardwareAddr.String()
		}
		return err
	})
	return mac
}

// send has a host look for another one, from one of its addresses.
func send(t *testing.T, ns *nstest.NS, from, to netip.Addr) {
	t.Helper()
	ns.Do(t, func() error {
		conn, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
			net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, _ = conn.Write([]byte("knock"))
		return nil
	})
}
