package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relay"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// relaySite is a node with three backends, each in a namespace of its own, and a client.
type relaySite struct {
	node, client *nstest.NS
	backends     []*nstest.NS
	vips         map[lb.Family]netip.Addr
	udpRate      int
	mode         string
	// port is the relay's; 0 for any free one.
	port uint16
}

// newIptablesSite returns a site in iptables mode.
func newIptablesSite(t testing.TB) relaySite {
	s := newRelaySite(t)
	s.mode, s.port = modeIptables, 7484
	return s
}

// inBothModes runs a test with a site in each mode.
func inBothModes(t *testing.T, test func(*testing.T, relaySite)) {
	t.Parallel()
	for mode, site := range map[string]func(testing.TB) relaySite{modeNftables: newRelaySite, modeIptables: newIptablesSite} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			test(t, site(t))
		})
	}
}

func newRelaySite(t testing.TB) relaySite {
	s := relaySite{mode: modeNftables, node: nstest.New(t), client: nstest.New(t), vips: map[lb.Family]netip.Addr{
		lb.IPv4: netip.MustParseAddr("198.51.100.1"), lb.IPv6: netip.MustParseAddr("2001:db8::1")}}
	s.node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	join := func(ns *nstest.NS, i int) {
		near, far := fmt.Sprint("to", i), "eth0"
		nstest.Veth(t, s.node, near, fmt.Sprintf("10.0.%d.1/24", i), ns, far, fmt.Sprintf("10.0.%d.2/24", i))
		s.node.Run(t, "ip", "addr", "add", fmt.Sprintf("fd00:%d::1/64", i), "dev", near, "nodad")
		ns.Run(t, "ip", "addr", "add", fmt.Sprintf("fd00:%d::2/64", i), "dev", far, "nodad")
		ns.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.0.%d.1", i))
		ns.Run(t, "ip", "-6", "route", "add", "default", "via", fmt.Sprintf("fd00:%d::1", i))
	}
	join(s.client, 0)
	for i := 1; i <= 3; i++ {
		ns := nstest.New(t)
		join(ns, i)
		ns.Serve(t, ":8080", func(conn net.Conn) { _, _ = io.WriteString(conn, fmt.Sprint(i)) })
		s.backends = append(s.backends, ns)
	}
	return s
}

// objects are a Service with the three backends.
func (s relaySite) objects() (lb.Service, []lb.Slice) {
	svc := lb.Service{Key: lb.Key{Namespace: "default", Name: "web"}, Type: lb.LoadBalancer, Relay: "true",
		ClusterIPs:     []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		Ports:   []lb.ServicePort{{Protocol: lb.TCP, Port: 80, NodePort: 30080}},
		Ingress: []lb.Ingress{{Addr: s.vips[lb.IPv4]}, {Addr: s.vips[lb.IPv6]}}}
	var all []lb.Slice
	for family, form := range map[lb.Family]string{lb.IPv4: "10.0.%d.2", lb.IPv6: "fd00:%d::2"} {
		slice := lb.Slice{Key: svc.Key, Service: svc.Key, Family: family,
			Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
		for i := 1; i <= 3; i++ {
			slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: netip.MustParseAddr(fmt.Sprintf(form, i)), Ready: true,
				Serving: true})
		}
		all = append(all, slice)
	}
	return svc, all
}

// write puts Services into the node's kernel.
func (s relaySite) write(t testing.TB, planned ...plan.Service) {
	t.Helper()
	changed := make(chan struct{}, 1)
	a := dialect.New(dialect.Deps{Log: slog.New(slog.DiscardHandler), Rules: s.rules(t),
		Changed: func() { changed <- struct{}{} }})
	v4, v6 := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	a.Configure(plan.Config{MasqueradeBit: 14, Relay: true, RelayUDPRate: s.udpRate,
		RelayTo:           map[lb.Family]netip.AddrPort{lb.IPv4: netip.AddrPortFrom(v4, s.port), lb.IPv6: netip.AddrPortFrom(v6, s.port)},
		NodePortAddresses: map[lb.Family][]netip.Addr{lb.IPv4: {v4}, lb.IPv6: {v6}}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	a.Begin(byKey(planned))
	for ready := false; !ready; {
		<-changed
		outcomes, all := a.Outcomes()
		for _, o := range outcomes {
			if o.Err != nil {
				t.Error(o.Err)
			}
		}
		ready = all
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// rules returns what writes the rules of the site's mode.
func (s relaySite) rules(t testing.TB) rulesOf {
	t.Helper()
	return rulesIn(t, s.node, s.mode, 0)
}

// rulesIn returns what writes the rules of a mode into a namespace; in iptables mode so many Services at once
// at most, or any number.
func rulesIn(t testing.TB, ns *nstest.NS, mode string, batch int) (write rulesOf) {
	t.Helper()
	ns.Do(t, func() error {
		if mode == modeNftables {
			way, err := nftables.Dial()
			if err == nil {
				t.Cleanup(way.Close)
			}
			write = nftables.Rules(way, nil)
			return err
		}
		kernels := map[lb.Family]iptables.Kernel{}
		for _, family := range allFamilies {
			commands, err := iptables.Detect(t.Context(), family)
			if err != nil {
				return err
			}
			kernels[family] = nsKernel{commands, t, ns}
		}
		write = iptables.Rules(kernels, batch)
		return nil
	})
	return write
}

// lease returns what has the rules lead to a relay, and to none.
func (s relaySite) lease(t testing.TB) (renew func(plan.RelayWay, netip.AddrPort, time.Duration) error,
	end func(plan.RelayWay) error) {
	t.Helper()
	if s.mode == modeNftables {
		var lease *nftables.Lease
		s.node.Do(t, func() (err error) {
			lease, err = nftables.OpenLease()
			return err
		})
		t.Cleanup(lease.Close)
		return lease.Renew, lease.End
	}
	lease := iptables.NewLease()
	return func(way plan.RelayWay, to netip.AddrPort, lasting time.Duration) (err error) {
			s.node.Do(t, func() error { err = lease.Renew(way, to, lasting); return nil })
			return err
		}, func(way plan.RelayWay) (err error) {
			s.node.Do(t, func() error { err = lease.End(way); return nil })
			return err
		}
}

// relay runs a relay on the node, and the proxy's side of it, and returns the relay once the rules lead
// there, and what stops it.
func (s relaySite) relay(t *testing.T, feed *relayfeed.Actor, socket string, limit int) (*relay.Relay, func()) {
	t.Helper()
	deps := relay.NewDeps(slog.New(slog.DiscardHandler))
	dial, dialUDP := deps.Dial, deps.DialUDP
	deps.DialUDP = func(backend netip.AddrPort, ttl int) (conn *relay.Conn, err error) {
		s.node.Do(t, func() error {
			conn, err = dialUDP(backend, ttl)
			return nil
		})
		return conn, err
	}
	deps.Dial = func(ctx context.Context, backend netip.AddrPort, ttl int) (conn *relay.Conn,
		err error) {
		s.node.Do(t, func() error {
			conn, err = dial(ctx, backend, ttl)
			return nil
		})
		return conn, err
	}
	var r *relay.Relay
	s.node.Do(t, func() (err error) {
		r, err = relay.New(relay.Options{Socket: socket, Port: s.port, Tries: 3, TryAfter: 250 * time.Millisecond,
			ConnectTimeout: time.Minute, Idle: time.Hour, Drain: time.Minute, Limit: limit, ServiceLimit: limit,
			ClientLimit: limit, FlowLimit: limit, ServiceFlows: limit, ClientFlows: limit, UDPIdle: time.Hour}, deps)
		return err
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	for len(feed.State().Leads) < 2 || s.mode == modeNftables && len(feed.State().LeadsUDP) < 2 {
		time.Sleep(time.Millisecond)
	}
	if st := feed.State(); !st.Connected || st.Services == 0 {
		t.Errorf("%+v", st)
	}
	return r, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// connect makes connections of the client, and returns how many were answered by each backend, and how
// many failed within a time.
func (s relaySite) connect(t *testing.T, to netip.AddrPort, n int, within time.Duration) (answers map[string]int,
	failed int) {
	t.Helper()
	answers = map[string]int{}
	var mu sync.Mutex
	var clients sync.WaitGroup
	for range n {
		clients.Go(func() {
			var got []byte
			var err error
			s.client.Do(t, func() error {
				dialer := net.Dialer{Timeout: within}
				conn, dialErr := dialer.Dial("tcp", to.String())
				if err = dialErr; err == nil {
					defer conn.Close()
					_ = conn.SetDeadline(time.Now().Add(within))
					got, err = io.ReadAll(conn)
				}
				return nil
			})
			mu.Lock()
			defer mu.Unlock()
			if err != nil || len(got) == 0 {
				failed++
			} else {
				answers[string(got)]++
			}
		})
	}
	clients.Wait()
	return answers, failed
}

// With one of three backends silent, and nobody aware of it, the rules alone lose about a third of the
// connections, and the relay none: at VIPs, cluster IPs and node ports of both families. When the relay
// ends, the rules serve as without it.
func TestContract9OneOfThreeBackendsIsSilent(t *testing.T) {
	inBothModes(t, oneOfThreeBackendsIsSilent)
}

func oneOfThreeBackendsIsSilent(t *testing.T, s relaySite) {
	svc, endpoints := s.objects()
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(t, planned)
	feed, socket := s.feed(t, planned)
	r, stop := s.relay(t, feed, socket, 1000)
	s.backends[2].Run(t, "nft", "add table inet silent; add chain inet silent input "+
		"{ type filter hook input priority 0; }; add rule inet silent input meta l4proto tcp drop")
	const each, patient = 30, time.Minute
	total := 0
	for family, vip := range s.vips {
		node := map[lb.Family]string{lb.IPv4: "10.0.0.1", lb.IPv6: "fd00::1"}[family]
		cluster := svc.ClusterIPs[map[lb.Family]int{lb.IPv4: 0, lb.IPv6: 1}[family]]
		for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip, 80), netip.AddrPortFrom(cluster, 80),
			netip.AddrPortFrom(netip.MustParseAddr(node), 30080)} {
			answers, failed := s.connect(t, to, each, patient)
			total += each
			if failed != 0 || answers["1"] == 0 || answers["2"] == 0 || answers["3"] != 0 {
				t.Errorf("through the relay to %s: %d of %d failed, answers %v", to, failed, each, answers)
			}
		}
	}
	s.node.Do(t, func() error {
		traced, err := traceKernel(t.Context(), "node", lb.TracePacket{Protocol: lb.TCP,
			Source: netip.MustParseAddrPort("10.0.0.2:5000"), Destination: netip.AddrPortFrom(s.vips[lb.IPv4], 80)}, false)
		if err == nil && (len(traced.Ways) != 1 || traced.Ways[0].Verdict != lb.TraceRelayed) {
			err = fmt.Errorf("the trace does not end at the relay: %+v", traced)
		}
		return err
	})
	counted := r.Counts()[0]
	if counted.Connections != uint64(total) || counted.Retried == 0 || counted.Failures != 0 {
		t.Errorf("%d connections, and the relay counts %+v", total, counted)
	}
	stop()
	if st := feed.State(); st.Connected || len(st.Leads) > 0 {
		t.Errorf("after the relay ended: %+v", st)
	}
	for family, vip := range s.vips {
		answers, failed := s.connect(t, netip.AddrPortFrom(vip, 80), each, 2*time.Second)
		if failed == 0 || failed == each || answers["1"] == 0 || answers["2"] == 0 {
			t.Errorf("with rules alone (%s): %d of %d failed, answers %v", family, failed, each, answers)
		}
		t.Logf("%s: %d of %d failed with rules alone, none of %d with the relay", family, failed, each, total)
	}
}

// A relay that is full resets nobody: the rules send new connections straight to endpoints until it has
// room again.
func TestContract9AFullRelayLeavesItToTheRules(t *testing.T) {
	inBothModes(t, aFullRelayLeavesItToTheRules)
}

func aFullRelayLeavesItToTheRules(t *testing.T, s relaySite) {
	svc, endpoints := s.objects()
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(t, planned)
	feed, socket := s.feed(t, planned)
	r, stop := s.relay(t, feed, socket, 20)
	defer stop()
	until := func(what string, is func(relayfeed.State) bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !is(feed.State()); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("it never came that %s: %+v", what, feed.State())
			}
		}
	}
	to := netip.AddrPortFrom(s.vips[lb.IPv4], 80)
	var held []net.Conn
	s.client.Do(t, func() error { // the greeting is read, so each has a backend, and this end stays open
		for !r.Full() {
			conn, err := net.Dial("tcp", to.String())
			if err != nil {
				return err
			}
			held = append(held, conn)
			if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
				return err
			}
		}
		return nil
	})
	until("the rules do not lead to it", func(st relayfeed.State) bool { return st.Full && len(st.Leads) == 0 })
	if len(held) < 18 || len(held) > 20 {
		t.Errorf("it is full with %d connections of 20", len(held))
	}
	before := r.Counts()[0].Connections
	answers, failed := s.connect(t, to, 60, time.Minute)
	if failed > 0 || len(answers) != 3 {
		t.Errorf("while it is full: %d failed, answers %v", failed, answers)
	}
	if now := r.Counts()[0].Connections; now != before || r.Refused() > 0 {
		t.Errorf("while it is full it relays %d more, and resets %d", now-before, r.Refused())
	}
	for _, conn := range held {
		conn.Close()
	}
	until("the rules lead to it again", func(st relayfeed.State) bool { return !st.Full && len(st.Leads) == 2 })
	if _, failed := s.connect(t, to, 10, time.Minute); failed > 0 || r.Counts()[0].Connections != before+10 {
		t.Errorf("with room again: %d failed, and it relays %d more", failed, r.Counts()[0].Connections-before)
	}
}

// A lease that nobody renews ends: a proxy and a relay that were killed together cost new connections for a few
// seconds, and then the rules serve as without a relay.
func TestContract9ALeaseEndsByItself(t *testing.T) { inBothModes(t, aLeaseEndsByItself) }

func aLeaseEndsByItself(t *testing.T, s relaySite) {
	svc, endpoints := s.objects()
	s.write(t, plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true}))
	renew, _ := s.lease(t)
	for _, family := range allFamilies {
		node := map[lb.Family]string{lb.IPv4: "10.0.0.1", lb.IPv6: "fd00::1"}[family]
		to := netip.AddrPortFrom(netip.MustParseAddr(node), max(s.port, 1)) // nobody listens there
		if err := renew(plan.RelayWay{Family: family, Protocol: lb.TCP}, to, plan.RelayLease); err != nil {
			t.Fatal(err)
		}
		vip := netip.AddrPortFrom(s.vips[family], 80)
		if answers, failed := s.connect(t, vip, 3, time.Minute); failed != 3 {
			t.Errorf("%s: while it is leased, %v answer", family, answers)
		}
		failed, deadline := 1, time.Now().Add(time.Minute)
		for failed > 0 && time.Now().Before(deadline) {
			_, failed = s.connect(t, vip, 1, time.Minute)
		}
		if answers, failed := s.connect(t, vip, 20, time.Minute); failed > 0 || len(answers) < 2 {
			t.Errorf("%s: after it, %d of 20 fail, answers %v", family, failed, answers)
		}
	}
}

// Connections that come in at an interface without an address are relayed, as from pods of Calico.
func TestRelayAtInterfacesWithoutAddress(t *testing.T) {
	inBothModes(t, relayAtInterfacesWithoutAddress)
}

func relayAtInterfacesWithoutAddress(t *testing.T, s relaySite) {
	svc, endpoints := s.objects()
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(t, planned)
	feed, socket := s.feed(t, planned)
	r, stop := s.relay(t, feed, socket, 1000)
	defer stop()
	s.node.Run(t, "ip", "addr", "del", "10.0.0.1/24", "dev", "to0")
	s.node.Run(t, "ip", "addr", "add", "10.0.0.1/32", "dev", "lo")
	s.node.Run(t, "ip", "route", "add", "10.0.0.0/24", "dev", "to0", "src", "10.0.0.1")
	if _, failed := s.connect(t, netip.AddrPortFrom(s.vips[lb.IPv4], 80), 10, time.Minute); failed > 0 {
		t.Errorf("%d of 10 failed", failed)
	}
	if n := r.Counts()[0].Connections; n != 10 {
		t.Errorf("%d of 10 are relayed", n)
	}
}

// udpSite is a site with a Service of UDP.
type udpSite struct {
	relaySite
	svc    lb.Service
	feed   *relayfeed.Actor
	socket string
}

// newUDPSite returns a node that relays UDP of a Service with so many of the three backends, of which the third does
// not listen. The rules lead so many flows a second to the relay, 0 for all.
func newUDPSite(t *testing.T, backends, rate int) udpSite {
	s := newRelaySite(t)
	svc, endpoints := s.udpObjects(t)
	for i := range endpoints {
		endpoints[i].Endpoints = endpoints[i].Endpoints[:backends]
	}
	return s.relayingUDP(t, rate, endpoints, svc)
}

// relayingUDP has the node relay UDP of Services with these endpoints.
func (s relaySite) relayingUDP(t *testing.T, rate int, endpoints []lb.Slice, services ...lb.Service) udpSite {
	s.udpRate = rate
	var planned []plan.Service
	for _, svc := range services {
		planned = append(planned, plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true}))
	}
	s.write(t, planned...)
	feed, socket := s.feed(t, planned...)
	return udpSite{s, services[0], feed, socket}
}

// udpObjects are a Service of UDP with the three backends, of which the third does not listen.
func (s relaySite) udpObjects(t *testing.T) (lb.Service, []lb.Slice) {
	svc, endpoints := s.objects()
	svc.Ports = []lb.ServicePort{{Protocol: lb.UDP, Port: 53, NodePort: 30053}}
	for i := range endpoints {
		endpoints[i].Ports = []lb.SlicePort{{Protocol: lb.UDP, Port: 8080}}
	}
	s.echoUDP(t, 0)
	s.echoUDP(t, 1)
	return svc, endpoints
}

// echoUDP has a backend answer over UDP.
func (s relaySite) echoUDP(t *testing.T, i int) {
	t.Helper()
	var conn net.PacketConn
	s.backends[i].Do(t, func() (err error) {
		conn, err = net.ListenPacket("udp", ":8080")
		return err
	})
	t.Cleanup(func() { conn.Close() })
	go func() {
		p := make([]byte, 1500)
		for {
			_, from, err := conn.ReadFrom(p)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(fmt.Append(nil, i+1), from)
		}
	}()
}

// askUDP sends a question on a socket of the client, and returns the answer.
func askUDP(conn net.Conn, within time.Duration) (string, error) {
	if _, err := conn.Write([]byte("?")); err != nil {
		return "", err
	}
	_ = conn.SetReadDeadline(time.Now().Add(within))
	p := make([]byte, 100)
	n, err := conn.Read(p)
	return string(p[:n]), err
}

// dialUDP returns a socket of the client.
func (s relaySite) dialUDP(t *testing.T, to netip.AddrPort) (conn net.Conn) {
	t.Helper()
	s.client.Do(t, func() (err error) {
		conn, err = net.Dial("udp", to.String())
		return err
	})
	t.Cleanup(func() { conn.Close() })
	return conn
}

// With one of three backends of UDP refusing, and nobody aware of it, the rules alone have some clients refused,
// and the relay none: at VIPs, cluster IPs and node ports of both families, from the address that was asked. When
// the relay ends, its flows go straight to endpoints.
func TestContract9OneOfThreeUDPBackendsRefuses(t *testing.T) {
	t.Parallel()
	s := newUDPSite(t, 3, 0)
	r, stop := s.relay(t, s.feed, s.socket, 1000)
	const each = 20
	var held []net.Conn
	for family, vip := range s.vips {
		node := map[lb.Family]string{lb.IPv4: "10.0.0.1", lb.IPv6: "fd00::1"}[family]
		cluster := s.svc.ClusterIPs[map[lb.Family]int{lb.IPv4: 0, lb.IPv6: 1}[family]]
		for _, to := range []netip.AddrPort{netip.AddrPortFrom(vip, 53), netip.AddrPortFrom(cluster, 53),
			netip.AddrPortFrom(netip.MustParseAddr(node), 30053)} {
			answers := map[string]int{}
			for range each {
				conn := s.dialUDP(t, to)
				for range 2 {
					answer, err := askUDP(conn, time.Minute)
					if err != nil {
						t.Errorf("through the relay to %s: %v", to, err)
					}
					answers[answer]++
				}
				held = append(held, conn)
			}
			if answers["1"] == 0 || answers["2"] == 0 || answers["1"]+answers["2"] != 2*each {
				t.Errorf("through the relay to %s: answers %v", to, answers)
			}
		}
	}
	c := r.Counts()[0]
	if c.Protocol != lb.UDP || c.Connections != uint64(len(held)) || c.Retried == 0 || c.Failures != 0 || r.Refused() != 0 {
		t.Errorf("%d flows, and the relay counts %+v", len(held), c)
	}
	stop()
	refused := 0
	for _, conn := range held { // from the same ports
		if _, err := askUDP(conn, 2*time.Second); err != nil { // the kernel refuses some without a word
			refused++
		}
	}
	t.Logf("%d of %d refused with rules alone, none with the relay", refused, len(held))
	if refused == 0 || refused > len(held)/2 {
		t.Errorf("after the relay ended, %d of %d flows are refused", refused, len(held))
	}
}

// With one of three backends on a dead node, no client is lost: the relay hears of it once nobody answers for its
// address.
func TestContract9AUDPBackendOnADeadNode(t *testing.T) {
	t.Parallel()
	s := newUDPSite(t, 3, 0)
	r, stop := s.relay(t, s.feed, s.socket, 1000)
	defer stop()
	s.backends[2].Run(t, "ip", "addr", "flush", "dev", "eth0")
	var clients sync.WaitGroup
	for _, vip := range s.vips {
		for range 10 {
			conn := s.dialUDP(t, netip.AddrPortFrom(vip, 53))
			clients.Go(func() {
				if answer, err := askUDP(conn, time.Minute); err != nil || answer == "3" {
					t.Errorf("%s answers %q, %v", vip, answer, err)
				}
			})
		}
	}
	clients.Wait()
	if c := r.Counts()[0]; c.Retried == 0 || c.Failures != 0 {
		t.Errorf("%+v", c)
	}
}

// A flood of flows to the frontends of UDP of one namespace does not reach the relay beyond the rate, and is answered
// all the same: what is beyond it goes straight to endpoints. Another namespace has its relay. What comes to the
// relay's port itself does not reach it.
func TestContract11TheRulesBoundAFlood(t *testing.T) {
	t.Parallel()
	const rate, frontends, flood, patient = 4, 4, 60, time.Minute
	site := newRelaySite(t)
	svc, endpoints := site.udpObjects(t)
	other := svc
	other.Key.Namespace, other.Ingress = "other", nil
	other.ClusterIPs = []netip.Addr{netip.MustParseAddr("10.96.0.2"), netip.MustParseAddr("fd00:96::2")}
	other.Ports = []lb.ServicePort{{Protocol: lb.UDP, Port: 53}}
	for i := uint16(1); i < frontends; i++ {
		name := fmt.Sprint(i)
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: name, Protocol: lb.UDP, Port: 53 + i})
		for j := range endpoints {
			endpoints[j].Ports = append(endpoints[j].Ports, lb.SlicePort{Name: name, Protocol: lb.UDP, Port: 8080})
		}
	}
	for j := range endpoints {
		endpoints[j].Endpoints = endpoints[j].Endpoints[:2]
	}
	s := site.relayingUDP(t, rate, endpoints, svc, other)
	r, stop := s.relay(t, s.feed, s.socket, 1000)
	defer stop()
	began := time.Now()
	for i := range uint16(flood) {
		vip := netip.AddrPortFrom(s.vips[lb.IPv4], 53+i%frontends)
		if _, err := askUDP(s.dialUDP(t, vip), patient); err != nil {
			t.Error(err)
		}
	}
	relayed, most := r.Counts()[0].Connections, uint64(2*rate+rate*int(time.Since(began)/time.Second+1))
	if relayed == 0 || relayed > most {
		t.Errorf("%d of %d flows are relayed, and %d may be", relayed, flood, most)
	}
	if _, err := askUDP(s.dialUDP(t, netip.AddrPortFrom(other.ClusterIPs[0], 53)), patient); err != nil {
		t.Error(err)
	}
	if counts := r.Counts(); len(counts) != 2 || counts[1].Connections != 1 {
		t.Errorf("with another namespace, %+v are relayed", counts)
	}
	for _, addr := range []string{"10.0.0.1", "fd00::1"} {
		family := lb.FamilyOf(netip.MustParseAddr(addr))
		own := s.dialUDP(t, netip.AddrPortFrom(netip.MustParseAddr(addr), s.feed.State().Ports[family]))
		for range 10 {
			if _, err := own.Write([]byte("x")); err != nil {
				t.Error(err)
			}
		}
	}
	s.node.Do(t, func() error {
		lease, err := nftables.OpenLease()
		if err != nil {
			return err
		}
		defer lease.Close()
		for counts := (nftables.RelayCounts{}); err == nil; counts, err = lease.Counts(allFamilies[:]) {
			if counts.Straight == flood-relayed && counts.Dropped == 20 {
				return nil
			}
			if time.Since(began) > patient {
				t.Fatalf("%+v are counted, with %d relayed", counts, relayed)
			}
		}
		return err
	})
	if n := r.Refused(); n > 0 {
		t.Errorf("%d datagrams have reached the relay", n)
	}
}

// A relay that was killed takes its flows with it: the proxy cuts them, and they go straight to endpoints.
func TestContract9AKilledRelayLosesNoUDPClient(t *testing.T) {
	t.Parallel()
	s := newUDPSite(t, 2, 0)
	conn, err := net.Dial("unix", s.socket) // says that it relays, and has no port open
	for err != nil {                        // the feed opens it in a moment
		time.Sleep(10 * time.Millisecond)
		conn, err = net.Dial("unix", s.socket)
	}
	defer conn.Close()
	go func() { _, _ = io.Copy(io.Discard, conn) }()
	for len(s.feed.State().LeadsUDP) < 2 {
		if _, err := io.WriteString(conn, `{"version":1,"ports":{"IPv4":7484,"IPv6":7484}}`+"\n"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, vip := range s.vips {
		to := s.dialUDP(t, netip.AddrPortFrom(vip, 53))
		if answer, err := askUDP(to, 2*time.Second); err == nil {
			t.Errorf("%s answers %q although nothing is there", vip, answer)
		}
		defer func() {
			var err error
			for range 600 { // the proxy has to notice first
				if _, err = askUDP(to, 100*time.Millisecond); err == nil {
					return
				}
			}
			t.Errorf("%s never answers again from the same port: %v", vip, err)
		}()
	}
	conn.Close()
}

func byKey(all []plan.Service) map[lb.Key]plan.Service {
	services := map[lb.Key]plan.Service{}
	for _, s := range all {
		services[s.Key] = s
	}
	return services
}

// feed runs the proxy's side of the relay.
func (s relaySite) feed(t testing.TB, planned ...plan.Service) (feed *relayfeed.Actor, socket string) {
	t.Helper()
	renew, end := s.lease(t)
	var flows, asked conntrack.Netlink
	s.node.Do(t, func() error {
		var errs [2]error
		flows, errs[0] = conntrack.Open()
		asked, errs[1] = conntrack.Open()
		return errors.Join(errs[:]...)
	})
	own := map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("10.0.0.1"), lb.IPv6: netip.MustParseAddr("fd00::1")}
	cutter := conntrack.New(conntrack.Deps{Log: slog.New(slog.DiscardHandler), Table: flows,
		Local: func() ([]netip.Addr, error) { return slices.Collect(maps.Values(own)), nil }})
	cutter.Begin(byKey(planned))
	socket = filepath.Join(t.TempDir(), "relay.sock")
	feed = relayfeed.New(relayfeed.Deps{Log: slog.New(slog.DiscardHandler), Path: socket,
		Busy: func() time.Duration { return 0 }, Renew: renew, End: end, Answering: cutter.SetRelays,
		TCPOnly: s.mode == modeIptables,
		Original: func(f wire.Flow) (from, to netip.AddrPort, ok bool, err error) {
			return asked.Original(unix.IPPROTO_UDP, f.Client, f.At)
		}})
	feed.SetAddresses(own, slices.Collect(maps.Values(own)))
	tables := map[lb.Key]*plan.Relayed{}
	for _, one := range planned {
		tables[one.Key] = plan.RelayTable(one, plan.Service{})
	}
	feed.Begin(tables)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- feed.Run(ctx) }()
	go func() { done <- cutter.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		flows.Close()
		asked.Close()
	})
	return feed, socket
}
