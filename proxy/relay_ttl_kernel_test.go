package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relay"
)

// bothObjects are a Service of TCP and UDP with two backends, which answer both.
func (s relaySite) bothObjects(t *testing.T) (lb.Service, []lb.Slice) {
	svc, endpoints := s.objects()
	udp, _ := s.udpObjects(t)
	svc.Ports = append(svc.Ports, udp.Ports...)
	svc.Ports[0].Name, svc.Ports[1].Name = "tcp", "udp"
	for i := range endpoints {
		endpoints[i].Endpoints = endpoints[i].Endpoints[:2]
		endpoints[i].Ports = []lb.SlicePort{{Name: "tcp", Protocol: lb.TCP, Port: 8080},
			{Name: "udp", Protocol: lb.UDP, Port: 8080}}
	}
	return svc, endpoints
}

// sendWithTTL has a node send with a TTL, and with the same hop limit.
func sendWithTTL(t *testing.T, ns *nstest.NS, ttl int) {
	t.Helper()
	ns.Run(t, "sysctl", "-qw", fmt.Sprint("net.ipv4.ip_default_ttl=", ttl),
		fmt.Sprint("net.ipv6.conf.eth0.hop_limit=", ttl))
}

// expired returns how many connections or flows relays have counted, and how many of them had no TTL left.
func expired(protocol lb.Protocol, relays ...*relay.Relay) (all, expired uint64) {
	for _, r := range relays {
		for _, c := range r.Counts() {
			if c.Protocol == protocol {
				all += c.Connections
				expired += c.Expired
			}
		}
	}
	return all, expired
}

// Backends see the client's TTL, less one, as behind a router: of a client that is far away too. Who comes with
// the last one is reset, or gets no answer.
func TestContract11TheRelayTakesOneFromTheTTL(t *testing.T) {
	t.Parallel()
	s := newRelaySite(t)
	svc, endpoints := s.bothObjects(t)
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(t, planned)
	feed, socket := s.feed(t, planned)
	r, stop := s.relay(t, feed, socket, 1000)
	defer stop()
	const patient = 10 * time.Second
	for _, ttl := range []int{255, 40, 2} {
		sendWithTTL(t, s.client, ttl)
		for _, ns := range s.backends {
			ns.Run(t, "nft", fmt.Sprintf("table inet ttl; delete table inet ttl; table inet ttl { chain input { "+
				"type filter hook input priority 0; meta l4proto { tcp, udp } ip ttl != %[1]d drop; "+
				"meta l4proto { tcp, udp } ip6 hoplimit != %[1]d drop; }; }", ttl-1))
		}
		for _, vip := range s.vips {
			if answers, failed := s.connect(t, netip.AddrPortFrom(vip, 80), 1, patient); failed > 0 {
				t.Errorf("TCP to %s with TTL %d: answers %v, %d failed", vip, ttl, answers, failed)
			}
			if _, err := askUDP(s.dialUDP(t, netip.AddrPortFrom(vip, 53)), patient); err != nil {
				t.Errorf("UDP to %s with TTL %d: %v", vip, ttl, err)
			}
		}
	}
	sendWithTTL(t, s.client, 1)
	for _, ns := range s.backends {
		ns.Run(t, "nft", "delete table inet ttl")
	}
	for _, vip := range s.vips {
		if answers, failed := s.connect(t, netip.AddrPortFrom(vip, 80), 1, patient); failed != 1 {
			t.Errorf("TCP to %s with TTL 1: answers %v", vip, answers)
		}
		if answer, err := askUDP(s.dialUDP(t, netip.AddrPortFrom(vip, 53)), time.Second); err == nil {
			t.Errorf("UDP to %s with TTL 1: answer %q", vip, answer)
		}
	}
	for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
		if _, n := expired(protocol, r); n != 2 {
			t.Errorf("%s: %d of 2 are counted", protocol, n)
		}
	}
}

// Two relays that have one another as backend pass a connection, and a datagram, to each other as often as its TTL
// says, and then it ends.
// A SYN cookie, which keeps nothing of the SYN, makes no difference.
func TestContract11ACircleOfRelaysEnds(t *testing.T) {
	t.Parallel()
	for name, cookies := range map[string]int{"without SYN cookies": 0, "with SYN cookies alone": 2} {
		t.Run(name, func(t *testing.T) { aCircleOfRelaysEnds(t, cookies) })
	}
}

func aCircleOfRelaysEnds(t *testing.T, cookies int) {
	const ttl, patient = 20, 20 * time.Second
	sites := [2]relaySite{newRelaySite(t), newRelaySite(t)}
	nstest.Veth(t, sites[0].node, "peer", "10.9.0.1/24", sites[1].node, "peer", "10.9.0.2/24")
	addrs := [2][2]netip.Addr{}
	relays := [2]*relay.Relay{}
	for i, s := range sites {
		addrs[i] = [2]netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.9.0.%d", i+1)),
			netip.MustParseAddr(fmt.Sprintf("fd00:9::%d", i+1))}
		s.node.Run(t, "ip", "addr", "add", addrs[i][1].String()+"/64", "dev", "peer", "nodad")
		s.node.Run(t, "sysctl", "-qw", fmt.Sprint("net.ipv4.tcp_syncookies=", cookies))
	}
	for i, s := range sites {
		svc, endpoints := s.bothObjects(t)
		svc.Ingress = []lb.Ingress{{Addr: addrs[i][0]}, {Addr: addrs[i][1]}}
		for j := range endpoints {
			other := addrs[1-i][slices.Index([]lb.Family{lb.IPv4, lb.IPv6}, endpoints[j].Family)]
			endpoints[j].Endpoints = []lb.Endpoint{{Addr: other, Ready: true, Serving: true}}
			endpoints[j].Ports[0].Port, endpoints[j].Ports[1].Port = 80, 53
		}
		planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
		s.write(t, planned)
		feed, socket := s.feed(t, planned)
		r, stop := s.relay(t, feed, socket, 1000)
		defer stop()
		relays[i] = r
	}
	s := sites[0]
	sendWithTTL(t, s.client, ttl)
	for i, addr := range addrs[0] {
		var conn net.Conn
		s.client.Do(t, func() (err error) {
			conn, err = net.Dial("tcp", netip.AddrPortFrom(addr, 80).String())
			return err
		})
		_ = conn.SetDeadline(time.Now().Add(patient))
		if n, err := io.Copy(io.Discard, conn); n > 0 || err == nil {
			t.Errorf("%s: %d bytes, %v", addr, n, err)
		}
		conn.Close()
		if all, n := expired(lb.TCP, relays[:]...); all != uint64(ttl*(i+1)) || n != uint64(i+1) {
			t.Errorf("%s: after %d connections, %d are relayed, and %d expired", addr, i+1, all, n)
		}
		if answer, err := askUDP(s.dialUDP(t, netip.AddrPortFrom(addr, 53)), time.Second); err == nil {
			t.Errorf("%s: answer %q", addr, answer)
		}
		var all, ended uint64
		for deadline := time.Now().Add(patient); ended != uint64(i+1) && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
			all, ended = expired(lb.UDP, relays[:]...)
		}
		if all != uint64((ttl-1)*(i+1)) || ended != uint64(i+1) { // a flow counts once it is admitted
			t.Errorf("%s: after %d datagrams, %d are relayed, and %d expired", addr, i+1, all, ended)
		}
	}
}
