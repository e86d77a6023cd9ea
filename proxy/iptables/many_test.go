package iptables

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// A Service may have more than a thousand endpoints, and a change of one costs no more lines than
// it must.
func TestManyEndpoints(t *testing.T) {
	const many = 1200
	key := lb.Key{Namespace: "test", Name: "many"}
	svc := lb.Service{
		Key: key, Type: lb.ClusterIP, ClusterIPs: []netip.Addr{addr("10.96.0.1")},
		Ports:          []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
	}
	planned := func(last int) plan.Service {
		var at []string
		for i := range many - 1 {
			at = append(at, fmt.Sprintf("10.1.%d.%d", i/250, i%250+1))
		}
		at = append(at, fmt.Sprintf("10.2.0.%d", last))
		return plan.New(svc, endpoints(key, "", lb.TCP, 8080, map[string][]string{"there": at}), plan.Node{Name: "here"})
	}
	kernel := &spy{Kernel: nsKernel{t, nstest.New(t), variant(lb.IPv4, "nft")}}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
	for i, last := range []int{1, 2} {
		a.Set(plans(planned(last)))
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
		rules := listing(t, kernel)
		if n := strings.Count(rules, "-j DNAT"); n != many {
			t.Fatalf("change %d: %d endpoints in the kernel, want %d", i, n, many)
		}
		if !strings.Contains(rules, fmt.Sprintf("--to-destination 10.2.0.%d:8080", last)) {
			t.Errorf("change %d: not there", i)
		}
	}
	if lines := strings.Count(kernel.writes[len(kernel.writes)-1], "\n"); lines > 30 {
		t.Errorf("a change of one endpoint took %d lines", lines)
	}
}
