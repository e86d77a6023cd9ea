package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/across"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// rackSite is a client and three nodes, each of them in a network of its own behind one router, with what the proxy
// runs on each for a Service that is forwarded directly.
type rackSite struct {
	directSite
	router  *nstest.NS
	pods    []*nstest.NS
	objects map[string]lb.Node
	asking  []*across.Actor
	tunnels []*rescue.Actor
}

func newRackSite(t testing.TB) rackSite {
	s := rackSite{router: nstest.New(t), objects: map[string]lb.Node{}}
	s.vips = map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("198.51.100.1"),
		lb.IPv6: netip.MustParseAddr("2001:db8::1")}
	s.router.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
	plug := func(i int) *nstest.NS {
		host := nstest.New(t)
		nstest.Veth(t, host, "eth0", fmt.Sprintf("10.2.%d.1/24", i), s.router, fmt.Sprint("rack", i),
			fmt.Sprintf("10.2.%d.254/24", i))
		host.Run(t, "ip", "addr", "add", fmt.Sprintf("fd02:%d::1/64", i), "dev", "eth0", "nodad")
		s.router.Run(t, "ip", "addr", "add", fmt.Sprintf("fd02:%d::fe/64", i), "dev", fmt.Sprint("rack", i), "nodad")
		host.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.2.%d.254", i))
		host.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("fd02:%d::fe", i))
		return host
	}
	s.client = plug(directClient)
	for i := 1; i <= 3; i++ {
		node, pod := plug(i), nstest.New(t)
		node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
			"net.ipv4.conf.all.rp_filter=1", "net.ipv4.conf.default.rp_filter=1")
		nstest.Veth(t, node, "pod", fmt.Sprintf("10.1.%d.1/24", i), pod, "eth0", fmt.Sprintf("10.1.%d.2/24", i))
		node.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::1/64", i), "dev", "pod", "nodad")
		pod.Run(t, "ip", "addr", "add", fmt.Sprintf("fd01:%d::2/64", i), "dev", "eth0", "nodad")
		pod.Run(t, "ip", "route", "add", "default", "via", fmt.Sprintf("10.1.%d.1", i))
		pod.Run(t, "ip", "-6", "route", "add", "default", "via", fmt.Sprintf("fd01:%d::1", i))
		s.router.Run(t, "ip", "route", "add", fmt.Sprintf("10.1.%d.0/24", i), "via", fmt.Sprintf("10.2.%d.1", i))
		s.router.Run(t, "ip", "route", "add", fmt.Sprintf("fd01:%d::/64", i), "via", fmt.Sprintf("fd02:%d::1", i))
		serveWho(t, pod, fmt.Sprint(i))
		s.nodes, s.pods = append(s.nodes, node), append(s.pods, pod)
		s.objects[siteNode(i)] = lb.Node{Name: siteNode(i), Addresses: []netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("10.2.%d.1", i)), netip.MustParseAddr(fmt.Sprintf("fd02:%d::1", i))}}
	}
	for i := 1; i <= 3; i++ {
		s.run(t, i)
	}
	return s
}

// fit fails unless large packets of a connection arrive. Datagrams may have to be sent again in a size that fits.
func (s rackSite) fit(t *testing.T, f flow) {
	t.Helper()
	size := 50_000
	if f.conn.LocalAddr().Network() == "udp" {
		size = 1440 // larger than what fits into the tunnel, in IPv6
	}
	for try := 0; ; try++ {
		_ = f.conn.SetDeadline(time.Now().Add(5 * time.Second))
		_, err := fmt.Fprintln(f.conn, strings.Repeat("w", size))
		if err == nil {
			_, err = f.in.ReadString('\n')
		}
		if err == nil {
			return
		}
		if try == 3 || size > 1500 {
			t.Fatalf("%d bytes from %s: %v", size, f.conn.LocalAddr(), err)
		}
	}
}

// others returns the addresses of all nodes but one.
func (s rackSite) others(i int) []netip.Addr {
	return otherNodes(s.objects, siteNode(i))
}

// run runs on a node what keeps its tunnel, and what asks the other nodes. No VIP has a ring.
func (s *rackSite) run(t testing.TB, i int) {
	t.Helper()
	var kernel rescue.Kernel
	var line *across.Kernel
	both := []lb.Family{lb.IPv4, lb.IPv6}
	s.nodes[i-1].Do(t, func() (err error) {
		if kernel, err = rescue.Open(tunnel.DefaultPort); err == nil {
			line, err = across.Open(both)
		}
		return err
	})
	self := s.objects[siteNode(i)].Addresses
	keeping := rescue.New(rescue.Deps{Log: slog.New(slog.DiscardHandler), Kernel: kernel, Ring: true, Direct: true,
		Families: both, Parameters: "/proc/sys/net", Warn: func(text string) {
			if text != "" {
				t.Error(text)
			}
		}})
	keeping.Begin(nil)
	keeping.SetNodes(self, s.others(i))
	keeping.SetDirect([]netip.Addr{s.vips[lb.IPv4], s.vips[lb.IPv6]}, s.others(i))
	asking := across.New(across.Deps{Log: slog.New(slog.DiscardHandler), Line: line, Now: time.Now, Changed: func() {}})
	asking.Set(across.Nodes{Self: self, Others: s.others(i)})
	s.tunnels, s.asking = append(s.tunnels, keeping), append(s.asking, asking)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	for _, run := range []func(context.Context) error{keeping.Run, asking.Run} {
		go func() {
			s.nodes[i-1].Do(t, func() error { return run(ctx) }) // interfaces have names there
			done <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		cancel()
		<-done
		<-done
		kernel.Close()
		line.Close()
	})
}

// waitFor waits until node i knows that all addresses of node j answer, or do not.
func (s rackSite) waitFor(t testing.TB, i, j int, want across.State) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		states, right := s.asking[i-1].States(), true
		for _, addr := range s.objects[siteNode(j)].Addresses {
			right = right && states[addr] == want
		}
		if right {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("node %d has found %v of node %d, want %d: %s", i, states, j, want,
				s.nodes[i-1].Run(t, "nft", "list", "ruleset"))
		}
	}
}

// planRack plans the Service for a node by what it knows of the others.
func (s rackSite) planRack(i int) plan.Service {
	near, far := plan.Neighbors(siteNode(i), s.objects, []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("10.2.%d.0/24", i)), netip.MustParsePrefix(fmt.Sprintf("fd02:%d::/64", i))})
	planned := s.planFor(i)
	planned.Handed, planned.Senders = map[netip.Addr]netip.Addr{}, nil
	for _, addr := range s.others(i) {
		planned.Senders = append(planned.Senders, tunnel.MAC(addr))
	}
	neighbors, _ := through(near, far, plan.Share(far, across.MaxNodes), s.asking[i-1].States(), planned.Senders,
		func(netip.Addr) bool { return false })
	for j := 1; j <= 3; j++ {
		for _, to := range neighbors[siteNode(j)] {
			form := "10.1.%d.2"
			if lb.FamilyOf(to) == lb.IPv6 {
				form = "fd01:%d::2"
			}
			planned.Handed[netip.MustParseAddr(fmt.Sprintf(form, j))] = to
		}
	}
	return planned
}

// turn has the router send what is for the VIPs to a node.
func (s rackSite) turn(t testing.TB, i int) {
	t.Helper()
	s.router.Run(t, "ip", "route", "replace", s.vips[lb.IPv4].String(), "via", fmt.Sprintf("10.2.%d.1", i))
	s.router.Run(t, "ip", "route", "replace", s.vips[lb.IPv6].String(), "via", fmt.Sprintf("fd02:%d::1", i))
}

// reach opens 30 connections of each protocol and family, and calls each with every one. It wants answers from all three
// pods.
func (s rackSite) reach(t *testing.T, each func(f flow, pod, seen string)) {
	t.Helper()
	for family, vip := range s.vips {
		for _, network := range []string{"tcp", "udp"} {
			reached := map[string]int{}
			for range 30 {
				f := s.open(t, network, vip)
				pod, seen := f.ask(t)
				reached[pod]++
				each(f, pod, seen)
			}
			if len(reached) != 3 {
				t.Errorf("%s %s: 30 connections reach %v", family, network, reached)
			}
		}
	}
}

// wantSeen fails unless exactly the pods of some nodes see the client's address and port.
func (s rackSite) wantSeen(t *testing.T, what string, direct ...int) {
	t.Helper()
	s.reach(t, func(f flow, pod, seen string) {
		is := slices.ContainsFunc(direct, func(i int) bool { return pod == fmt.Sprint(i) })
		if own := seen == f.conn.LocalAddr().String(); own != is {
			t.Fatalf("%s: pod %s sees the client %s as %s", what, pod, f.conn.LocalAddr(), seen)
		}
	})
}

// newHandingSite is a rack site whose nodes forward a Service directly. Connections come in through the first.
func newHandingSite(t testing.TB) rackSite {
	s := newRackSite(t)
	for i := 1; i <= 3; i++ {
		for j := 1; j <= 3; j++ {
			if i != j {
				s.waitFor(t, i, j, across.Answers)
			}
		}
		s.program(t, i, s.planRack(i))
	}
	s.turn(t, 1)
	return s
}

// Three nodes in three networks forward a Service directly, in both families, TCP and UDP: all pods see the
// client's address and port, no answer passes another node, and all connections go on when routers turn to another
// node. Connections to a node whose tunnel is cut are masqueraded, and handed over again when it is back; an interface
// that is made anew needs no other rules.
func TestDirectForwardingAcrossRouters(t *testing.T) {
	t.Parallel()
	s := newHandingSite(t)
	s.nodes[0].Run(t, "nft", "add table inet seen; "+
		"add chain inet seen forward { type filter hook prerouting priority -400; }; "+
		"add rule inet seen forward iifname eth0 ip saddr 198.51.100.1 counter; "+
		"add rule inet seen forward iifname eth0 ip6 saddr 2001:db8::1 counter; "+
		"add rule inet seen forward iifname eth0 tcp sport 8080 counter; "+
		"add rule inet seen forward iifname eth0 udp sport 8080 counter")
	flows := map[flow]string{}
	s.reach(t, func(f flow, pod, seen string) {
		flows[f] = pod
		if seen != f.conn.LocalAddr().String() {
			t.Fatalf("pod %s sees the client as %s, want %s", pod, seen, f.conn.LocalAddr())
		}
	})
	listing := s.nodes[0].Run(t, "nft", "list", "table", "inet", "seen")
	if n := strings.Count(listing, "counter packets 0 "); n != 4 {
		t.Errorf("answers come back through the node to which the router sends: %s", listing)
	}
	for _, node := range []int{2, 3, 1} {
		s.turn(t, node)
		for f, pod := range flows {
			if now, seen := f.ask(t); now != pod || seen != f.conn.LocalAddr().String() {
				t.Errorf("through node %d, %s is answered by pod %s as %s, before by %s", node, f.conn.LocalAddr(), now, seen, pod)
			}
		}
	}
	for f := range flows {
		s.fit(t, f)
	}
	cut := "add table inet cut; add chain inet cut in { type filter hook prerouting priority -500; }; " +
		"add rule inet cut in udp dport 7948 drop"
	s.nodes[2].Run(t, "nft", cut)
	s.waitFor(t, 1, 3, across.Silent)
	s.program(t, 1, s.planRack(1))
	s.wantSeen(t, "the tunnel to node 3 is cut", 1, 2)
	s.nodes[2].Run(t, "nft", "delete table inet cut")
	s.waitFor(t, 1, 3, across.Answers)
	s.program(t, 1, s.planRack(1))
	s.wantSeen(t, "the tunnel to node 3 is back", 1, 2, 3)
	s.nodes[0].Run(t, "sh", "-c", "ip link del landfall4; ip link del landfall6")
	s.wantSeen(t, "the tunnel was made anew", 1, 2, 3)
}

// What clients send much of to pods of other racks fits into the tunnel: no packet goes in fragments, and no client has
// to be told of a size. Pods that ask for less get less.
func TestUploadsFitIntoTheTunnel(t *testing.T) {
	t.Parallel()
	s := newHandingSite(t)
	s.wantListed(t)
	const small = 1000
	s.pods[2].Run(t, "ip", "route", "replace", "default", "via", "10.1.3.1", "advmss", fmt.Sprint(small))
	s.pods[2].Run(t, "ip", "-6", "route", "replace", "default", "via", "fd01:3::1", "advmss", fmt.Sprint(small))
	s.router.Run(t, "nft", "add table inet seen; "+
		"add chain inet seen passing { type filter hook prerouting priority -500; }; "+
		"add rule inet seen passing ip frag-off & 0x3fff != 0 counter comment fragments; "+
		"add rule inet seen passing icmpv6 type packet-too-big counter comment told; "+
		"add rule inet seen passing udp dport 7948 meta length > 1400 counter comment tunnel")
	count := func(what string) (packets int) {
		t.Helper()
		for line := range strings.Lines(s.router.Run(t, "nft", "list", "table", "inet", "seen")) {
			if _, counted, is := strings.Cut(line, "counter packets "); is && strings.Contains(line, what) {
				_, _ = fmt.Sscan(counted, &packets)
			}
		}
		return packets
	}
	for family, vip := range s.vips {
		sent, fragments, told := map[string]bool{}, count("fragments"), count("told")
		for try := 0; len(sent) < 2; try++ {
			if try == 100 {
				t.Fatalf("%s: 100 connections reach %v", family, sent)
			}
			f := s.open(t, "tcp", vip)
			pod, seen := f.ask(t)
			if pod == "1" || sent[pod] {
				continue
			}
			if seen != f.conn.LocalAddr().String() {
				t.Fatalf("%s: pod %s sees the client as %s", family, pod, seen)
			}
			if size := segmentOf(t, f); pod == "3" && size > small {
				t.Errorf("%s: a pod that asks for %d bytes gets segments of %d", family, small, size)
			}
			before := count("tunnel")
			_ = f.conn.SetDeadline(time.Now().Add(time.Minute))
			if err := send(f); err != nil {
				t.Fatalf("%s: send to pod %s: %v", family, pod, err)
			}
			sent[pod] = true
			if pod == "2" && count("tunnel") == before {
				t.Errorf("%s: what is sent to pod %s does not pass the tunnel", family, pod)
			}
		}
		if fragments, told = count("fragments")-fragments, count("told")-told; fragments+told > 0 {
			t.Errorf("%s: %d fragments, and %d times a client was told that its packets are too big", family, fragments, told)
		}
	}
}

// wantListed fails unless nft prints the rule about segments, and takes what it has printed.
func (s rackSite) wantListed(t *testing.T) {
	t.Helper()
	for family, want := range map[string]string{"ip": "maxseg size set 1410", "ip6": "maxseg size set 1370"} {
		list := "nft list table " + family + " " + tunnel.TableName
		if listing := s.nodes[1].Run(t, "sh", "-c", list); !strings.Contains(listing, want) {
			t.Errorf("%s lacks %q: %s", family, want, listing)
		}
		s.nodes[1].Run(t, "sh", "-c", list+" | nft -c -f -")
	}
}

// segmentOf returns how much a packet of a connection has at most.
func segmentOf(t *testing.T, f flow) (size int) {
	t.Helper()
	raw, err := f.conn.(*net.TCPConn).SyscallConn()
	if err == nil {
		err = errors.Join(raw.Control(func(fd uintptr) {
			size, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG)
		}), err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return size
}

// A rule ahead of the tunnel's that takes all traffic but that of the cluster and its clients, as some VPNs set one,
// leaves questions alone, which name the tunnel, and swallows what is handed over. The node finds that out and
// masquerades, and others hand nothing over to it, as it could not send it back.
func TestContract1ARuleAheadOfTheTunnels(t *testing.T) {
	t.Parallel()
	s := newRackSite(t)
	others := func(state across.State) {
		t.Helper()
		for _, j := range []int{2, 3} {
			s.waitFor(t, 1, j, state)
		}
	}
	others(across.Answers)
	s.waitFor(t, 2, 1, across.Answers)
	for i := 1; i <= 3; i++ {
		s.program(t, i, s.planRack(i))
	}
	s.turn(t, 1)
	s.wantSeen(t, "before", 1, 2, 3)
	nstest.Veth(t, s.nodes[0], "vpn", "192.0.2.1/24", nstest.New(t), "eth0", "192.0.2.2/24")
	s.nodes[0].Run(t, "ip", "route", "add", "throw", "10.0.0.0/8", "table", "52")
	s.nodes[0].Run(t, "ip", "route", "add", "default", "dev", "vpn", "table", "52")
	for _, cluster := range []string{"fd01::/16", "fd02::/16"} {
		s.nodes[0].Run(t, "ip", "route", "add", "throw", cluster, "table", "52")
	}
	s.nodes[0].Run(t, "ip", "-6", "route", "add", "default", "dev", "vpn", "table", "52")
	rule := func(what string) {
		t.Helper()
		for _, family := range []string{"-4", "-6"} {
			s.nodes[0].Run(t, "ip", family, "rule", what, "priority", "5270", "table", "52")
		}
	}
	rule("add")
	others(across.Diverted)
	s.program(t, 1, s.planRack(1))
	s.wantSeen(t, "with a rule ahead", 1)
	s.waitFor(t, 2, 1, across.Silent)
	rule("del")
	others(across.Answers)
	s.waitFor(t, 2, 1, across.Answers)
	s.program(t, 1, s.planRack(1))
	s.wantSeen(t, "the rule is gone", 1, 2, 3)
}

// A node that does not forward the Service directly, as it has not heard of it yet, sends what is handed over to it
// back, and the first node masquerades: no connection is lost, whatever nodes know.
func TestContract1WhatANodeDoesNotKnowComesBack(t *testing.T) {
	t.Parallel()
	s := newRackSite(t)
	for _, j := range []int{2, 3} {
		s.waitFor(t, 1, j, across.Answers)
	}
	s.program(t, 1, s.planRack(1))
	s.program(t, 3, s.planRack(3))
	other := netip.MustParseAddr("198.51.100.9")
	s.tunnels[1].SetDirect([]netip.Addr{other, netip.MustParseAddr("2001:db8::9")}, s.others(2))
	s.waitUntaken(t, 2)
	s.turn(t, 1)
	s.wantSeen(t, "node 2 has not heard of it", 1, 3)
}

// waitUntaken waits until a node's tunnel does not take what is handed over for the VIPs.
func (s rackSite) waitUntaken(t *testing.T, i int) {
	t.Helper()
	for family, vip := range map[string]netip.Addr{"ip": s.vips[lb.IPv4], "ip6": s.vips[lb.IPv6]} {
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
			listing := s.nodes[i-1].Run(t, "nft", "list", "set", family, tunnel.TableName, "direct")
			if !strings.Contains(listing, vip.String()+" ") {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("node %d: %s", i, listing)
			}
		}
	}
}

// Through the tunnel, datagrams that do not fit into a packet reach all pods too, in both families: a client of IPv6 is
// told what fits, and sends smaller fragments.
func TestContract1DatagramsInFragmentsThroughTheTunnel(t *testing.T) {
	t.Parallel()
	newHandingSite(t).wantFragments(t)
}
