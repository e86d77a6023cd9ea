package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// tracePath is a packet and where it ends.
type tracePath struct {
	// from is a host; service and port are where it goes: vip, cluster, or the name of a node, whose node
	// port it is. Another port than the Service's is one that it does not have.
	from, service, to string
	port              uint16
	network           string
	want              lb.TraceVerdict
	masqueraded       bool
}

// tracePaths are the ways in which packets come to Services and fare there.
func tracePaths() []tracePath {
	const far, near, pod, node, away = lab.FarClientName, lab.ClientName, "coredns-2", "k8s-worker-177", "k8s-worker-178"
	return []tracePath{
		{near, "my-nginx", "vip", 80, "tcp", lb.TraceDelivered, true},
		{near, "my-nginx", "vip", 80, "udp", lb.TraceDelivered, true},
		{far, "my-nginx", "vip", 80, "tcp", lb.TraceDelivered, true},
		{near, "my-nginx", "vip", 0, "ping", lb.TraceAnswered, false},
		{near, "my-nginx", "vip", 81, "tcp", lb.TraceRefused, false},
		{near, "my-nginx", "vip", 81, "udp", lb.TraceRefused, false},
		{near, "local", "vip", 80, "tcp", lb.TraceDelivered, false},
		{far, "local", "vip", 80, "udp", lb.TraceDelivered, false},
		{near, "ranges", "vip", 80, "tcp", lb.TraceDelivered, true},
		{far, "ranges", "vip", 80, "tcp", lb.TraceDropped, false},
		{pod, "ranges", "vip", 80, "tcp", lb.TraceDropped, false},
		{near, "my-nginx", node, 80, "tcp", lb.TraceDelivered, true},
		{near, "local", node, 80, "tcp", lb.TraceDropped, false}, // it has no pod
		{near, "local", away, 80, "tcp", lb.TraceDelivered, false},
		{near, "empty", node, 80, "tcp", lb.TraceRefused, false},
		{pod, "my-nginx", "cluster", 80, "tcp", lb.TraceDelivered, false},
		{pod, "my-nginx", "cluster", 80, "udp", lb.TraceDelivered, false},
		{pod, "my-nginx", "cluster", 81, "tcp", lb.TraceRefused, false},
		{pod, "my-nginx", "vip", 80, "tcp", lb.TraceDelivered, true},
		{pod, "local", "vip", 80, "tcp", lb.TraceDelivered, false},
		{pod, "my-nginx", node, 80, "tcp", lb.TraceDelivered, true},
		{pod, "empty", "cluster", 80, "tcp", lb.TraceRefused, false},
		{pod, "empty", "vip", 80, "udp", lb.TraceRefused, false},
		{node, "my-nginx", "cluster", 80, "tcp", lb.TraceDelivered, true},
		{node, "my-nginx", "vip", 80, "udp", lb.TraceDelivered, true},
		{node, "my-nginx", node, 80, "tcp", lb.TraceDelivered, true},
		{node, "empty", "cluster", 80, "tcp", lb.TraceRefused, false},
		{node, "my-nginx", "cluster", 81, "udp", lb.TraceRefused, false},
	}
}

// TestDayTwoTrace asks landfallctl trace where packets end, and sends them.
func TestDayTwoTrace(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			c := dayTwoCluster()
			c.Pods = c.Pods[:len(c.Pods)-1] // a worker without a pod
			l := labtest.Start(t, c, lab.Options{Values: map[string]any{"proxy": map[string]any{"mode": mode}}})
			if err := l.ServeExec(t.Context()); err != nil {
				t.Fatal(err)
			}
			applied(dualStackPool)(t, l)
			addDayTwoServices(t, l)
			for name, change := range map[string]func(s *lab.Service){
				"ranges": func(*lab.Service) {},
				"empty":  func(s *lab.Service) { s.App = "" },
			} {
				s := lab.SeedService()
				s.Name, s.ClusterIP, s.IPFamilies = name, netip.Addr{}, []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
				s.Ports = []lab.Port{{Name: "tcp", Port: 80}, {Name: "udp", Protocol: "UDP", Port: 80}}
				change(&s)
				if err := l.AddService(t.Context(), s); err != nil {
					t.Fatal(err)
				}
			}
			updateService(t, l, "ranges", func(s *corev1.Service) {
				s.Spec.LoadBalancerSourceRanges = []string{c.LAN.Prefix.String(), lab.TwinPrefix(c.LAN.Prefix).String()}
			})
			eventually(t, "explain shows the health port", func() error {
				code, out := landfallctl(t, l, "explain", "svc", "local", "-o", "wide")
				if code != 0 || !strings.Contains(out, "answers 200 on k8s-worker-178, k8s-worker-179, 503 on k8s-master-176, "+
					"k8s-worker-177\n") {
					return fmt.Errorf("it ends with %d: %s", code, out)
				}
				return nil
			})
			for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
				for _, path := range tracePaths() {
					path.compare(t, l, family)
				}
			}
		})
	}
}

// ends returns where a path begins and ends.
func (p tracePath) ends(t *testing.T, l *lab.Lab, family lb.Family) (from netip.Addr, to netip.AddrPort, err error) {
	t.Helper()
	c := l.Cluster()
	in := func(addr netip.Addr) netip.Addr {
		if family == lb.IPv6 {
			return lab.Twin(addr)
		}
		return addr
	}
	hosts := map[string]netip.Addr{lab.ClientName: in(c.LAN.Client), lab.FarClientName: in(c.Far.Client)}
	for _, n := range c.Nodes {
		hosts[n.Name] = in(n.Addr)
	}
	for _, pod := range c.Pods {
		hosts[pod.Name] = in(pod.Addr)
	}
	s, err := l.Kube().CoreV1().Services("default").Get(t.Context(), p.service, metav1.GetOptions{})
	if err != nil {
		return from, to, err
	}
	port := p.port
	var addrs []string
	switch p.to {
	case "vip":
		for _, in := range s.Status.LoadBalancer.Ingress {
			addrs = append(addrs, in.IP)
		}
	case "cluster":
		addrs = s.Spec.ClusterIPs
	default:
		addrs = []string{hosts[p.to].String()}
		for _, one := range s.Spec.Ports {
			if one.Name == p.network {
				port = uint16(one.NodePort)
			}
		}
	}
	for _, addr := range addrs {
		if a := netip.MustParseAddr(addr); lb.FamilyOf(a) == family {
			return hosts[p.from], netip.AddrPortFrom(a, port), nil
		}
	}
	return from, to, fmt.Errorf("%s has no address of %s", p.service, family)
}

// compare holds what landfallctl says of a path against what becomes of packets.
func (p tracePath) compare(t *testing.T, l *lab.Lab, family lb.Family) {
	name := fmt.Sprintf("%s %s to %s of %s, %d/%s", family, p.from, p.to, p.service, p.port, p.network)
	t.Run(name, func(t *testing.T) {
		eventually(t, "it is as wanted", func() error {
			from, to, err := p.ends(t, l, family)
			if err != nil {
				return err
			}
			argument := to.String() + "/" + p.network
			if p.network == "ping" {
				argument = to.Addr().String() + "/icmp"
			}
			code, out := landfallctl(t, l, "trace", from.String(), argument, "-o", "json")
			var traced struct{ Nodes []lb.Trace }
			if err := json.Unmarshal([]byte(out), &traced); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			well := p.want == lb.TraceDelivered || p.want == lb.TraceAnswered
			if len(traced.Nodes) == 0 || well != (code == 0) || !well && code != 1 {
				return fmt.Errorf("it ends with %d: %s", code, out)
			}
			var backends []netip.Addr
			for _, node := range traced.Nodes {
				for _, way := range node.Ways {
					if way.Verdict != p.want || way.Masqueraded != p.masqueraded {
						return fmt.Errorf("%s: %s, masqueraded %v (%s)", node.Node, way.Verdict, way.Masqueraded, way.Why)
					}
					for _, end := range way.Ends {
						backends = append(backends, end.Address.Addr())
					}
				}
			}
			return p.send(t, l, from, to, backends)
		})
	})
}

// send sends packets, and returns what becomes of them other than wanted.
func (p tracePath) send(t *testing.T, l *lab.Lab, from netip.Addr, to netip.AddrPort, backends []netip.Addr) error {
	t.Helper()
	if p.network == "ping" {
		return l.In(p.from, func() error {
			answered, err := nstest.Ping(to.Addr(), 2*time.Second)
			if err == nil && !answered {
				err = errors.New("the ping has no answer")
			}
			return err
		})
	}
	for range 4 {
		answer, err := l.Ask(t.Context(), p.from, p.network, to)
		got := lb.TraceDelivered
		var late net.Error
		switch {
		case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EPERM): // a node's own datagram
			got = lb.TraceRefused
		case errors.As(err, &late) && late.Timeout():
			got = lb.TraceDropped
		case err != nil:
			return err
		}
		if got != p.want {
			return fmt.Errorf("a packet is %s by %s (%w)", got, answer.Pod, err)
		}
		if got != lb.TraceDelivered {
			return nil
		}
		if !slices.ContainsFunc(l.Pods("my-nginx"), func(pod lab.Pod) bool {
			return pod.Name == answer.Pod && (slices.Contains(backends, pod.Addr) ||
				slices.Contains(backends, lab.Twin(pod.Addr)))
		}) {
			return fmt.Errorf("%s has answered, which is none of %v", answer.Pod, backends)
		}
		// A packet of a node has the node's address before and after it is masqueraded.
		if own := answer.Client.Addr() == from; own == p.masqueraded && !strings.HasPrefix(p.from, "k8s-") {
			return fmt.Errorf("the pod sees %s of the client %s", answer.Client.Addr(), from)
		}
	}
	return nil
}
