package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// directSite is a LAN with a client and three nodes, each with a pod in a network of its own.
type directSite struct {
	client *nstest.NS
	nodes  []*nstest.NS
	vips   map[lb.Family]netip.Addr
	macs   []lb.MAC // of the nodes
}

const (
	directClient = 100     // the last part of the client's addresses
	much         = 100_000 // bytes, of which pods send so many if asked
	large        = "large" // begins a datagram that is to be answered with as many bytes
)

func newDirectSite(t *testing.T) directSite {
	s := directSite{vips: map[lb.Family]netip.Addr{
		lb.IPv4: netip.MustParseAddr("198.51.100.1"), lb.IPv6: netip.MustParseAddr("2001:db8::1")}}
	sw := nstest.New(t)
	sw.Run(t, "ip", "link", "add", "lan", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
	sw.Run(t, "ip", "link", "set", "lan", "up")
	plug := func(number int) *nstest.NS {
		host, port := nstest.New(t), fmt.Sprint("port", number)
		nstest.Veth(t, host, "eth0", fmt.Sprintf("10.0.0.%d/24", number), sw, port, "")
		host.Run(t, "ip", "addr", "add", fmt.Sprintf("fd00::%d/64", number), "dev", "eth0", "nodad")
		sw.Run(t, "ip", "link", "set", port, "master", "lan")
		return host
	}
	s.client = plug(directClient)
	for i := 1; i <= 3; i++ {
		node := plug(i)
		node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
			"net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.eth0.send_redirects=0")
		pod := nstest.New(t)
		nstest.Veth(t, node, "pod", fmt.Sprintf("10.1.%d.1/24", i), pod, "eth0", fmt.Sprintf("10.1.%d.2/24", i))
		node.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::1/64", i), "dev", "pod", "nodad")
		pod.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::2/64", i), "dev", "eth0", "nodad")
		pod.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.1.%d.1", i))
		pod.Run(t, "ip", "-6", "route", "add", "default", "via", fmt.Sprintf("fd01:%d::1", i))
		serveWho(t, pod, fmt.Sprint(i))
		s.nodes = append(s.nodes, node)
		node.Do(t, func() error {
			eth0, err := net.InterfaceByName("eth0")
			if err == nil {
				s.macs = append(s.macs, lb.MAC(eth0.HardwareAddr))
			}
			return err
		})
	}
	for i, node := range s.nodes {
		for j := 1; j <= 3; j++ {
			if j != i+1 {
				node.Run(t, "ip", "route", "add", fmt.Sprintf("10.1.%d.0/24", j), "via", fmt.Sprintf("10.0.0.%d", j))
				node.Run(t, "ip", "-6", "route", "add", fmt.Sprintf("fd01:%d::/64", j), "via", fmt.Sprintf("fd00::%d", j))
			}
		}
	}
	return s
}

// serveWho answers each line and datagram with a name and the address that it came from.
func serveWho(t testing.TB, ns *nstest.NS, name string) {
	ns.Serve(t, ":8080", func(c net.Conn) {
		for lines := bufio.NewScanner(c); lines.Scan(); {
			if lines.Text() == "much" {
				_, _ = c.Write(make([]byte, much))
				continue
			}
			fmt.Fprintf(c, "%s %s\n", name, c.RemoteAddr())
		}
	})
	ns.Do(t, func() error {
		conn, err := net.ListenPacket("udp", ":8080")
		if err != nil {
			return err
		}
		t.Cleanup(func() { conn.Close() })
		go func() {
			for buf := make([]byte, 1<<16); ; {
				n, from, err := conn.ReadFrom(buf)
				if err != nil {
					return
				}
				answer := fmt.Appendf(nil, "%s %s %d", name, from, n)
				if n > len(answer) && bytes.HasPrefix(buf, []byte(large)) { // an answer of the same size
					answer = append(answer, bytes.Repeat([]byte(" "), n-1-len(answer))...)
				}
				_, _ = conn.WriteTo(append(answer, '\n'), from)
			}
		}()
		return nil
	})
}

// through has the client send what is for VIPs to a node, as its answer to ARP or a router's route would.
func (s directSite) through(t *testing.T, node int) {
	t.Helper()
	s.client.Run(t, "ip", "route", "replace", s.vips[lb.IPv4].String(), "via", fmt.Sprint("10.0.0.", node))
	s.client.Run(t, "ip", "-6", "route", "replace", s.vips[lb.IPv6].String(), "via", fmt.Sprint("fd00::", node))
}

// siteNode is the name of a node by its number.
func siteNode(i int) string { return fmt.Sprint("node-", i) }

// planFor plans the Service for a node. Packets are handed to all nodes but those that are far.
func (s directSite) planFor(i int, far ...int) plan.Service {
	svc := lb.Service{Key: lb.Key{Namespace: "default", Name: "web"}, Type: lb.LoadBalancer, Forwarding: "direct",
		ClusterIPs:     []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00:96::1")},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		Ports:   []lb.ServicePort{{Name: "t", Protocol: lb.TCP, Port: 80}, {Name: "u", Protocol: lb.UDP, Port: 80}},
		Ingress: []lb.Ingress{{Addr: s.vips[lb.IPv4]}, {Addr: s.vips[lb.IPv6]}}}
	node := plan.Node{Name: siteNode(i), Senders: s.macs, Direct: map[lb.Family]bool{lb.IPv4: true, lb.IPv6: true}}
	nodes := map[string]lb.Node{}
	var endpoints []lb.Slice
	for family, form := range map[lb.Family]string{lb.IPv4: "10.1.%d.2", lb.IPv6: "fd01:%d::2"} {
		slice := lb.Slice{Key: svc.Key, Service: svc.Key, Family: family, Ports: []lb.SlicePort{
			{Name: "t", Protocol: lb.TCP, Port: 8080}, {Name: "u", Protocol: lb.UDP, Port: 8080}}}
		for j := 1; j <= 3; j++ {
			slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: netip.MustParseAddr(fmt.Sprintf(form, j)),
				Node: siteNode(j), Ready: true, Serving: true})
			nodes[siteNode(j)] = lb.Node{Addresses: []netip.Addr{netip.MustParseAddr(fmt.Sprint("10.0.0.", j)),
				netip.MustParseAddr(fmt.Sprint("fd00::", j))}}
		}
		endpoints = append(endpoints, slice)
	}
	for _, j := range far {
		delete(nodes, siteNode(j))
	}
	node.Neighbors, _ = plan.Neighbors(node.Name, nodes, []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"),
		netip.MustParsePrefix("fd00::/64")})
	return plan.New(svc, endpoints, node)
}

// program writes the Service into a node's kernel.
func (s directSite) program(t testing.TB, i int, planned plan.Service) {
	t.Helper()
	s.programAs(t, i, planned, siteConfig())
}

func siteConfig() plan.Config {
	return plan.Config{MasqueradeBit: 14, DropInvalid: true, Pods: plan.Detector{Prefixes: []netip.Prefix{
		netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd01::/16")}}}
}

func (s directSite) programAs(t testing.TB, i int, planned plan.Service, config plan.Config) {
	t.Helper()
	var way *nftables.Netlink
	s.nodes[i-1].Do(t, func() (err error) {
		way, err = nftables.Dial()
		return err
	})
	defer way.Close()
	a := dialect.New(dialect.Deps{Log: slog.New(slog.DiscardHandler), Rules: nftables.Rules(way, nil), Changed: func() {}})
	a.Configure(config)
	a.Begin(map[lb.Key]plan.Service{planned.Key: planned})
	if _, err := a.Apply(t.Context(), false); err != nil {
		t.Fatal(err)
	}
}

// flow is a connection of the client.
type flow struct {
	conn net.Conn
	in   *bufio.Reader
}

func (s directSite) open(t testing.TB, network string, vip netip.Addr) flow {
	t.Helper()
	return openFrom(t, s.client, network, vip)
}

func openFrom(t testing.TB, client *nstest.NS, network string, vip netip.Addr) flow {
	t.Helper()
	var f flow
	client.Do(t, func() error {
		conn, err := (&net.Dialer{Timeout: time.Minute}).Dial(network, netip.AddrPortFrom(vip, 80).String())
		if err == nil {
			t.Cleanup(func() { conn.Close() })
			f = flow{conn, bufio.NewReader(conn)}
		}
		return err
	})
	return f
}

// ask returns which pod answers, and as whom it sees the client. A datagram may be lost, as one that waits
// for a neighbor's address beside others: it is sent again.
func (f flow) ask(t testing.TB) (pod, seen string) {
	t.Helper()
	for try := 0; ; try++ {
		_ = f.conn.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(f.conn, "who\n"); err != nil {
			t.Fatal(err)
		}
		line, err := f.in.ReadString('\n')
		if err == nil {
			fields := strings.Fields(line)
			return fields[0], fields[1]
		}
		if try == 10 || f.conn.LocalAddr().Network() != "udp" {
			t.Fatalf("%s: %v", f.conn.LocalAddr(), err)
		}
	}
}

// newForwardingSite is a site whose three nodes forward the Service, with a client that comes through the first.
func newForwardingSite(t *testing.T) directSite {
	t.Helper()
	s := newDirectSite(t)
	for i := 1; i <= 3; i++ {
		s.program(t, i, s.planFor(i))
	}
	s.through(t, 1)
	return s
}

// Three nodes forward a Service directly, in both families, TCP and UDP: all pods are reached through one
// node, each sees the client's own address and port, and no answer passes a node other than the pod's.
// When the client turns to another node, all connections go on: the nodes choose the same backends.
func TestDirectForwarding(t *testing.T) {
	t.Parallel()
	s := newForwardingSite(t)
	s.nodes[0].Run(t, "nft", "add table inet seen; "+
		"add chain inet seen forward { type filter hook prerouting priority -400; }; "+
		"add rule inet seen forward iifname eth0 ip saddr 198.51.100.1 counter; "+
		"add rule inet seen forward iifname eth0 ip6 saddr 2001:db8::1 counter; "+
		"add rule inet seen forward iifname eth0 tcp sport 8080 counter; "+
		"add rule inet seen forward iifname eth0 udp sport 8080 counter")
	flows := map[flow]string{}
	for family, vip := range s.vips {
		for _, network := range []string{"tcp", "udp"} {
			reached := map[string]int{}
			for range 40 {
				f := s.open(t, network, vip)
				pod, seen := f.ask(t)
				flows[f] = pod
				reached[pod]++
				if seen != f.conn.LocalAddr().String() {
					t.Fatalf("%s %s: pod %s sees the client as %s, want %s", family, network, pod, seen, f.conn.LocalAddr())
				}
			}
			if len(reached) != 3 {
				t.Errorf("%s %s: 40 connections reach %v", family, network, reached)
			}
		}
	}
	listing := s.nodes[0].Run(t, "nft", "list", "table", "inet", "seen")
	if n := strings.Count(listing, "counter packets 0 "); n != 4 {
		t.Errorf("answers come back through the node to which the client sends: %s", listing)
	}
	for _, node := range []int{2, 3, 1} {
		s.through(t, node)
		for f, pod := range flows {
			if now, seen := f.ask(t); now != pod || seen != f.conn.LocalAddr().String() {
				t.Errorf("through node %d, %s is answered by pod %s as %s, before by %s", node, f.conn.LocalAddr(), now, seen, pod)
			}
		}
	}
}

// Connections to endpoints of a node to which no packets are handed are masqueraded, and so are those that
// a node without rules sends back. None fails, and all pods are reached.
func TestDirectFallsBackToMasquerading(t *testing.T) {
	t.Parallel()
	s := newDirectSite(t)
	s.program(t, 1, s.planFor(1, 3)) // node 3 is far
	s.program(t, 3, s.planFor(3))    // node 2 has no rules
	s.nodes[1].Run(t, "ip", "route", "add", s.vips[lb.IPv4].String(), "via", "10.0.0.1")
	s.nodes[1].Run(t, "ip", "-6", "route", "add", s.vips[lb.IPv6].String(), "via", "fd00::1")
	s.through(t, 1)
	for family, vip := range s.vips {
		for _, network := range []string{"tcp", "udp"} {
			reached := map[string]int{}
			for range 40 {
				f := s.open(t, network, vip)
				pod, seen := f.ask(t)
				reached[pod]++
				at := netip.MustParseAddrPort(seen).Addr()
				if own := at == netip.MustParseAddrPort(f.conn.LocalAddr().String()).Addr(); own != (pod == "1") {
					t.Fatalf("%s %s: pod %s sees the client %s as %s", family, network, pod, f.conn.LocalAddr(), seen)
				}
			}
			if len(reached) != 3 {
				t.Errorf("%s %s: 40 connections reach %v", family, network, reached)
			}
		}
	}
}

// rescue runs the rescue on a node, as the proxy does for a Service that is forwarded directly, and waits until it
// knows the next node of the ring in both families.
func (s directSite) rescue(t *testing.T, i int) {
	t.Helper()
	node := s.nodes[i-1]
	all := map[netip.Addr]*rescue.Origins{}
	for family, form := range map[lb.Family]string{lb.IPv4: "10.0.0.%d", lb.IPv6: "fd00::%d"} {
		ring := &rescue.Origins{Direct: true}
		for k := 1; k < len(s.nodes); k++ {
			ring.Ring = append(ring.Ring, netip.MustParseAddr(fmt.Sprintf(form, 1+(i-1+k)%len(s.nodes))))
		}
		all[s.vips[family]] = ring
	}
	var kernel rescue.Kernel
	node.Do(t, func() (err error) {
		kernel, err = rescue.Open(0)
		return err
	})
	a := rescue.New(rescue.Deps{Log: slog.New(slog.DiscardHandler), Kernel: kernel, Ring: true,
		Families: []lb.Family{lb.IPv4, lb.IPv6}})
	a.Begin(all)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = a.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		kernel.Close()
	})
	for deadline := time.Now().Add(30 * time.Second); a.Targets() < len(all); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("node %d knows %d next nodes", i, a.Targets())
		}
	}
}

// A router finds the answers of pods too large for the way to a client, and tells the node that announces the VIP.
// The pod's node learns of it, and the pod sends less.
func TestDirectErrorsReachTheSender(t *testing.T) {
	t.Parallel()
	s := newDirectSite(t)
	far, router := nstest.New(t), s.client
	nstest.Veth(t, far, "eth0", "10.9.0.2/24", router, "far0", "10.9.0.1/24")
	far.Run(t, "ip", "addr", "add", "fd09::2/64", "dev", "eth0", "nodad")
	router.Run(t, "ip", "addr", "add", "fd09::1/64", "dev", "far0", "nodad")
	router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
		"net.ipv4.conf.all.send_redirects=0", "net.ipv4.conf.eth0.send_redirects=0")
	// The client asks for segments as large as its link takes, and sends smaller ones.
	far.Run(t, "ip", "route", "add", "default", "via", "10.9.0.1", "mtu", "lock", "900", "advmss", "1460")
	far.Run(t, "ip", "-6", "route", "add", "default", "via", "fd09::1", "mtu", "lock", "1280", "advmss", "1440")
	router.Run(t, "ip", "link", "set", "far0", "mtu", "1300")
	for i, node := range s.nodes {
		node.Run(t, "ip", "route", "add", "10.9.0.0/24", "via", fmt.Sprint("10.0.0.", directClient))
		node.Run(t, "ip", "route", "add", "fd09::/64", "via", fmt.Sprint("fd00::", directClient))
		s.program(t, i+1, s.planFor(i+1))
		s.rescue(t, i+1)
	}
	s.through(t, 1)
	for family, vip := range s.vips {
		reached := map[string]bool{}
		for range 20 {
			f := openFrom(t, far, "tcp", vip)
			pod, _ := f.ask(t)
			reached[pod] = true
			_ = f.conn.SetDeadline(time.Now().Add(30 * time.Second))
			_, err := io.WriteString(f.conn, "much\n")
			if err == nil {
				_, err = io.CopyN(io.Discard, f.in, much)
			}
			if err != nil {
				t.Fatalf("%s: much of pod %s: %v", family, pod, err)
			}
		}
		if len(reached) != 3 {
			t.Errorf("%s: 20 connections reach %v", family, reached)
		}
	}
}

// exchange sends a datagram of some size and wants an answer as large. It is sent again while the client learns what
// fits into the path; an answer to an earlier one is passed over.
func (f flow) exchange(t testing.TB, size int) (pod, seen string) {
	t.Helper()
	datagram := []byte(large + strings.Repeat("-", size-len(large)-1) + "\n")
	for try := 0; ; try++ {
		_ = f.conn.SetDeadline(time.Now().Add(3 * time.Second))
		_, err := f.conn.Write(datagram)
		for buf := make([]byte, 1<<16); err == nil; {
			var n int
			if n, err = f.conn.Read(buf); err == nil && n == size {
				fields := strings.Fields(string(buf[:n]))
				if fields[2] != fmt.Sprint(size) {
					t.Fatalf("of %d bytes, %s arrived", size, fields[2])
				}
				return fields[0], fields[1]
			}
		}
		if try == 3 {
			t.Fatalf("%d bytes from %s: %v", size, f.conn.LocalAddr(), err)
		}
	}
}

// Datagrams that do not fit into a packet reach all pods in fragments, from the client's own address, and so do the
// answers.
func TestContract1DirectDatagramsInFragments(t *testing.T) {
	t.Parallel()
	s := newForwardingSite(t)
	s.nodes[1].Run(t, "nft", "add table inet seen; "+
		"add chain inet seen in { type filter hook prerouting priority -500; }; "+
		"add rule inet seen in ip ttl 218 ip frag-off & 0x3fff != 0 counter; "+
		"add rule inet seen in ip6 hoplimit 218 exthdr frag exists counter")
	s.wantFragments(t)
	if listing := s.nodes[1].Run(t, "nft", "list", "table", "inet", "seen"); strings.Contains(listing, "packets 0 ") {
		t.Errorf("no fragments are handed over: %s", listing)
	}
}

// Where less fits on the way to a pod's node than clients send, nothing is swallowed: clients are told what fits (RFC
// 1191, RFC 8201), and what they send then arrives, be it over TCP, in one packet or in fragments.
func TestContract1DirectClientsAreToldWhatFits(t *testing.T) {
	t.Parallel()
	s := newForwardingSite(t)
	for j := 2; j <= 3; j++ {
		s.nodes[0].Run(t, "ip", "route", "add", fmt.Sprint("10.0.0.", j), "dev", "eth0", "mtu", "1400")
		s.nodes[0].Run(t, "ip", "-6", "route", "add", fmt.Sprint("fd00::", j), "dev", "eth0", "mtu", "1400")
	}
	s.wantFragments(t)
	for family, vip := range s.vips {
		for range 10 {
			f := s.open(t, "tcp", vip)
			_ = f.conn.SetDeadline(time.Now().Add(30 * time.Second))
			_, err := fmt.Fprintln(f.conn, strings.Repeat("w", 50_000))
			if err == nil {
				_, err = f.in.ReadString('\n')
			}
			if err != nil {
				t.Fatalf("%s: 50 kB: %v", family, err)
			}
		}
	}
	if told := s.client.Run(t, "nstat", "-asz", "IcmpInDestUnreachs", "Icmp6InPktTooBigs"); strings.Contains(told, " 0 ") {
		t.Errorf("the client was not told: %s", told)
	}
}

// wantFragments exchanges large datagrams with all three pods in both families.
func (s directSite) wantFragments(t *testing.T) {
	t.Helper()
	for family, vip := range s.vips {
		reached := map[string]bool{}
		for try := 0; len(reached) < 3; try++ {
			if try == 60 {
				t.Fatalf("%s: 60 flows reach %v", family, reached)
			}
			f := s.open(t, "udp", vip)
			for _, size := range []int{1000, 1473, 3000, 20_000, 60_000} { // the first may be smaller than the MTU
				pod, seen := f.exchange(t, size)
				if seen != f.conn.LocalAddr().String() {
					t.Fatalf("%s: %d bytes: pod %s sees the client as %s, want %s", family, size, pod, seen, f.conn.LocalAddr())
				}
				reached[pod] = true
			}
			// The first packet of a flow is a large one.
			f = s.open(t, "udp", vip)
			if pod, seen := f.exchange(t, 4000); seen != f.conn.LocalAddr().String() {
				t.Fatalf("%s: pod %s sees the client as %s, want %s", family, pod, seen, f.conn.LocalAddr())
			}
		}
	}
}
