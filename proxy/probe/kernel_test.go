package probe

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// network is a node with a prober and three pods in namespaces of their own, each with IPv4 and IPv6.
type network struct {
	*Actor
	node    *nstest.NS
	pods    []*nstest.NS
	changed chan struct{}
	left    plan.LeftOut
}

const pods, podPort = 3, 8080

// podAddrs are the addresses of a pod, the first of them is 1.
func podAddrs(pod int) [2]netip.Addr {
	return [2]netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.1.%d.2", pod)),
		netip.MustParseAddr(fmt.Sprintf("fd00:1:%d::2", pod))}
}

// targets are all pods, at their addresses of both families.
func targets() plan.Probing {
	p := plan.Probing{Probe: lb.Probe{Kind: lb.ProbeTCP}, Nodes: 1}
	for pod := 1; pod <= pods; pod++ {
		for _, addr := range podAddrs(pod) {
			p.Targets = append(p.Targets, netip.AddrPortFrom(addr, podPort))
		}
	}
	return p
}

func newNetwork(t testing.TB) *network {
	n := &network{node: nstest.New(t), changed: make(chan struct{}, 1)}
	for i := range pods {
		pod := nstest.New(t)
		v4, v6 := fmt.Sprintf("10.1.%d.", i+1), fmt.Sprintf("fd00:1:%d::", i+1)
		name := fmt.Sprint("pod", i+1)
		nstest.Veth(t, n.node, name, v4+"1/24", pod, "eth0", v4+"2/24")
		n.node.Run(t, "ip", "addr", "add", v6+"1/64", "dev", name, "nodad")
		pod.Run(t, "ip", "addr", "add", v6+"2/64", "dev", "eth0", "nodad")
		pod.Run(t, "nft", "add table inet test; add chain inet test in { type filter hook input priority 0 ; }")
		pod.Serve(t, fmt.Sprint("[::]:", podPort), func(net.Conn) {})
		n.pods = append(n.pods, pod)
	}
	var dialer net.Dialer
	n.Actor = New(Deps{Now: time.Now, Interval: DefaultInterval, Phase: rand.N[time.Duration], Agent: "test",
		Dial: func(ctx context.Context, to netip.AddrPort) (conn net.Conn, err error) {
			n.node.Do(t, func() error {
				conn, err = dialer.DialContext(ctx, "tcp", to.String())
				return nil
			})
			return conn, err
		},
		Counted: func(Result) {}, Changed: n.note})
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	t.Cleanup(func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *network) note() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// until waits until exactly the endpoints are left out of which want is true.
func (n *network) until(t testing.TB, what string, want func(netip.Addr) bool) {
	t.Helper()
	for deadline := time.After(time.Minute); ; {
		if left, changed := n.Take()[key]; changed {
			n.left = left
		}
		if !slices.ContainsFunc(targets().Targets, func(a netip.AddrPort) bool {
			_, out := n.left[a.Addr()]
			return out != want(a.Addr())
		}) {
			return
		}
		select {
		case <-n.changed:
		case <-deadline:
			t.Fatalf("%s: still %v", what, n.left)
		}
	}
}

func none(netip.Addr) bool { return false }

// TestFollowsTheKernel breaks the way to one pod of three in each way, and mends it.
func TestFollowsTheKernel(t *testing.T) {
	n := newNetwork(t)
	n.Begin(map[lb.Key]plan.Probing{key: targets()})
	broken := podAddrs(2)
	isV4 := func(addr netip.Addr) bool { return addr == broken[0] }
	isV6 := func(addr netip.Addr) bool { return addr == broken[1] }
	both := func(addr netip.Addr) bool { return isV4(addr) || isV6(addr) }
	node := func(command string) func() {
		return func() { n.node.Run(t, "ip", strings.Fields(command)...) }
	}
	pod := func(rules string) func() { return func() { n.pods[1].Run(t, "nft", rules) } }
	for _, fault := range []struct {
		name       string
		make, mend func()
		lost       func(netip.Addr) bool
		says       string
	}{
		{"the route is gone", node("route del 10.1.2.0/24"), node("route add 10.1.2.0/24 dev pod2"), isV4,
			"connect: network is unreachable"},
		{"the IPv6 route is gone", node("-6 route del fd00:1:2::/64"), node("-6 route add fd00:1:2::/64 dev pod2"), isV6,
			"connect: network is unreachable"},
		{"packets are dropped", pod("add rule inet test in tcp dport 8080 drop"), pod("flush chain inet test in"), both,
			"connect: no answer within 80ms"},
		{"connections are refused", pod("add rule inet test in tcp dport 8080 reject with tcp reset"),
			pod("flush chain inet test in"), both, "connect: connection refused"},
	} {
		n.until(t, "before "+fault.name, none)
		for again := 20; ; again-- { // on a busy machine an answer may be late just before the fault
			fault.make()
			n.until(t, fault.name, fault.lost)
			said := slices.Sorted(maps.Values(n.left))
			fault.mend()
			n.until(t, "after "+fault.name, none)
			if said = slices.Compact(said); slices.Equal(said, []string{fault.says}) {
				break
			}
			if again == 0 {
				t.Errorf("%s: it is said %q, want %q", fault.name, said, fault.says)
				break
			}
		}
	}
}

// BenchmarkEject has one of three pods drop packets, at any time of the interval, and reports how long it takes
// until the prober leaves it out, the start of nft included: go test -run '^$' -bench Eject -benchtime 100x
// ./proxy/probe
func BenchmarkEject(b *testing.B) {
	n := newNetwork(b)
	n.Begin(map[lb.Key]plan.Probing{})
	lost := podAddrs(2)
	isLost := func(addr netip.Addr) bool { return addr == lost[0] || addr == lost[1] }
	var took []time.Duration
	for b.Loop() {
		n.Update(map[lb.Key]plan.Probing{key: targets()}) // without a memory of what was before
		time.Sleep(3*DefaultInterval + rand.N(DefaultInterval))
		began := time.Now()
		n.pods[1].Run(b, "nft", "add rule inet test in tcp dport 8080 drop")
		n.until(b, "packets are dropped", isLost)
		took = append(took, time.Since(began))
		n.pods[1].Run(b, "nft", "flush chain inet test in")
		n.Update(map[lb.Key]plan.Probing{key: {}})
		n.until(b, "not asked", none)
	}
	slices.Sort(took)
	at := func(share float64) float64 {
		return float64(took[min(len(took)-1, int(share*float64(len(took))))].Microseconds()) / 1000
	}
	b.ReportMetric(at(0.5), "ms-p50")
	b.ReportMetric(at(0.99), "ms-p99")
	b.ReportMetric(at(1), "ms-max")
}
