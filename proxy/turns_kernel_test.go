package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Where the connections of two Services with two backends each alternate, as those of an ingress and of what is behind
// it do, both use both backends, although all Services take turns from one counter.
func TestRoundRobinOfAlternatingServices(t *testing.T) {
	t.Parallel()
	s := newRelaySite(t)
	const services, backends, rounds = 2, 2, 60
	var all []plan.Service
	var vips []string
	for i := range services {
		svc, slices := s.objects()
		svc.Key.Name = fmt.Sprint("web", i)
		svc.Relay, svc.Scheduler = "", "rr"
		vip := netip.AddrFrom4([4]byte{198, 51, 100, byte(1 + i)})
		svc.ClusterIPs = []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(1 + i)})}
		svc.Ports = []lb.ServicePort{{Protocol: lb.TCP, Port: 80}}
		svc.Ingress = []lb.Ingress{{Addr: vip}}
		for j := range slices {
			slices[j].Key, slices[j].Service = svc.Key, svc.Key
			slices[j].Endpoints = slices[j].Endpoints[:backends]
		}
		all = append(all, plan.New(svc, slices, plan.Node{Name: "node"}))
		vips = append(vips, netip.AddrPortFrom(vip, 80).String())
	}
	s.write(t, all...)
	orders := make([]string, services)
	s.client.Do(t, func() error {
		for range rounds {
			for i, vip := range vips {
				conn, err := net.Dial("tcp4", vip)
				if err != nil {
					return err
				}
				who, err := io.ReadAll(conn)
				conn.Close()
				if err != nil {
					return err
				}
				orders[i] += string(who)
			}
		}
		return nil
	})
	for i, order := range orders {
		counts := map[rune]int{}
		for _, who := range order {
			counts[who]++
		}
		t.Logf("%s: %s %v", vips[i], order, counts)
		for _, who := range "12" {
			if n := counts[who]; n < rounds/2-2 || n > rounds/2+2 {
				t.Errorf("%s: %d of %d connections for backend %c", vips[i], n, rounds, who)
			}
		}
	}
}
