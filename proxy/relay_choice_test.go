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
	"github.com/landfall-lb/landfall/proxy/plan"
)

// answerer connects from an address of the client, and returns which backend answers.
func (s relaySite) answerer(t *testing.T, from, to netip.AddrPort) string {
	t.Helper()
	var got []byte
	s.client.Do(t, func() error {
		dialer := net.Dialer{Timeout: time.Minute, LocalAddr: net.TCPAddrFromAddrPort(from)}
		conn, err := dialer.Dial("tcp", to.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		got, err = io.ReadAll(conn)
		return err
	})
	return string(got)
}

// By each scheduler that hashes, and with session affinity, a client has the same backend through the relay and by the
// rules, so a relay that comes or goes moves no client.
func TestRelayChoosesAsTheRules(t *testing.T) {
	t.Parallel()
	s := newRelaySite(t)
	svc, endpoints := s.objects()
	svc.Weights = lb.Weights{{Network: netip.MustParsePrefix("10.0.2.0/24"), Share: 2}}
	feed, socket := s.feed(t)
	const clients = 12
	addrs := map[lb.Family][]netip.Addr{}
	for i := range clients {
		for _, text := range []string{fmt.Sprintf("10.0.0.%d", 10+i), fmt.Sprintf("fd00:0::%d", 10+i)} {
			addr := netip.MustParseAddr(text)
			bits := map[lb.Family]int{lb.IPv4: 24, lb.IPv6: 64}[lb.FamilyOf(addr)]
			addrs[lb.FamilyOf(addr)] = append(addrs[lb.FamilyOf(addr)], addr)
			s.client.Run(t, "ip", "addr", "add", netip.PrefixFrom(addr, bits).String(), "dev", "eth0", "nodad")
		}
	}
	first := uint16(20000)
	for _, scheduler := range []string{"sh", "dh", "maglev", "random"} {
		svc.AffinityTimeout = 0
		if scheduler == "random" {
			svc.AffinityTimeout = time.Hour
		}
		planned := s.scheduled(t, svc, endpoints, scheduler)
		feed.Update(map[lb.Key]*plan.Relayed{svc.Key: plan.RelayTable(planned, plan.Service{})})
		all := func() (answers []string) {
			port := first
			for _, family := range allFamilies {
				for i := range clients {
					for _, to := range []netip.AddrPort{netip.AddrPortFrom(s.vips[family], 80),
						netip.AddrPortFrom(svc.ClusterIPs[slices.Index(allFamilies[:], family)], 80)} {
						port++ // the kernel gives another one to what comes to the relay from the same
						answers = append(answers, s.answerer(t, netip.AddrPortFrom(addrs[family][i], port), to))
					}
				}
			}
			return answers
		}
		r, stop := s.relay(t, feed, socket, 1000)
		relayed := all()
		if n := int(r.Counts()[0].Connections); n != len(relayed) {
			t.Errorf("%s: %d of %d are relayed", scheduler, n, len(relayed))
		}
		stop()
		straight := all()
		if !slices.Equal(relayed, straight) {
			t.Errorf("%s: through the relay\n%v, straight\n%v", scheduler, relayed, straight)
		}
		if kinds := slices.Compact(slices.Sorted(slices.Values(straight))); len(kinds) < 2 {
			t.Errorf("%s: all have %v", scheduler, kinds)
		}
		first += 1000
	}
}

// scheduled has the node's kernel serve a Service by a scheduler.
func (s relaySite) scheduled(t *testing.T, svc lb.Service, endpoints []lb.Slice, scheduler string) plan.Service {
	svc.Scheduler = scheduler
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(t, planned)
	return planned
}
