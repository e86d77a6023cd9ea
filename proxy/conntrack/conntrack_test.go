package conntrack

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// fake is a table of flows, written "client's destination answered by".
type fake struct {
	flows []string
	err   error
}

func (f *fake) DeleteUDP(family lb.Family, gone func(Flow) bool) (int, error) {
	if f.err != nil {
		err := f.err
		f.err = nil
		return 0, err
	}
	before := len(f.flows)
	f.flows = slices.DeleteFunc(f.flows, func(s string) bool {
		to, from, _ := strings.Cut(s, " ")
		flow := Flow{netip.MustParseAddrPort(to), netip.MustParseAddrPort(from)}
		return lb.FamilyOf(flow.To.Addr()) == family && gone(flow)
	})
	return before - len(f.flows), nil
}

func newActor(table Table) *Actor {
	return New(Deps{
		Log: slog.New(slog.DiscardHandler), Table: table,
		Local: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("172.31.0.1")}, nil },
	})
}

// dns returns a UDP Service as the kernel holds it; each backend is address:port, or the same with an ! for one that terminates
// and gets no new connections, but still serves.
func dns(name string, vip string, backends ...string) plan.Service {
	key := lb.Key{Namespace: "default", Name: name}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		Ports:      []lb.ServicePort{{Name: "dns", Protocol: lb.UDP, Port: 53, NodePort: 30053}, {Name: "tcp", Protocol: lb.TCP, Port: 53}},
		Ingress:    []lb.Ingress{{Addr: netip.MustParseAddr(vip)}},
	}
	var all []lb.Slice
	for _, b := range backends {
		at, terminating := strings.CutSuffix(b, "!")
		to := netip.MustParseAddrPort(at)
		all = append(all, lb.Slice{
			Service: key, Family: lb.IPv4, Ports: []lb.SlicePort{{Name: "dns", Protocol: lb.UDP, Port: to.Port()}},
			Endpoints: []lb.Endpoint{{Addr: to.Addr(), Ready: !terminating, Serving: true, Terminating: terminating}},
		})
	}
	return plan.New(svc, all, plan.Node{})
}

func set(a *Actor, services ...plan.Service) {
	all := map[lb.Key]plan.Service{}
	for _, s := range services {
		all[s.Key] = s
	}
	a.Set(all)
}

var before = []string{
	"10.96.0.10:53 192.168.1.2:5353",    // at the cluster IP
	"10.96.0.10:53 192.168.1.3:5353",    // the other backend
	"192.0.2.1:53 192.168.1.3:5353",     // at the VIP
	"172.31.0.1:30053 192.168.1.3:5353", // at the node port
	"172.31.9.9:30053 192.168.1.3:5353", // the same port of another machine
	"10.96.0.10:53 10.96.0.10:53",       // never translated
	"10.96.0.10:54 192.168.1.3:5353",    // another port
	"192.168.1.3:5353 192.168.1.3:5353", // straight to the pod
	"[fd00::10]:53 [fd00::99]:53",       // another family
}

func TestContract9FlowsToGoneBackendsAreCut(t *testing.T) {
	for _, tt := range []struct {
		name string
		now  plan.Service
		cut  []int // of before
	}{
		{"nothing changed", dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353"), nil},
		{"a backend has come", dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353", "192.168.1.4:5353"), nil},
		{"a backend is gone", dns("dns", "192.0.2.1", "192.168.1.2:5353"), []int{1, 2, 3, 5}},
		{"a backend terminates and still serves", dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353!"), nil},
		{"all backends are gone", dns("dns", "192.0.2.1"), []int{0, 1, 2, 3, 5}},
		{"the target port changed", dns("dns", "192.0.2.1", "192.168.1.2:5354", "192.168.1.3:5354"), []int{0, 1, 2, 3, 5}},
		{"the VIP changed", dns("dns", "192.0.2.2", "192.168.1.2:5353", "192.168.1.3:5353"), []int{2}},
		{"the Service is gone", plan.Service{Key: lb.Key{Namespace: "default", Name: "dns"}}, []int{0, 1, 2, 3, 5}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table := &fake{flows: []string{}}
			a := newActor(table)
			set(a, dns("dns", "192.0.2.1", "192.168.1.2:5353", "192.168.1.3:5353"))
			if err := a.apply(); err != nil {
				t.Fatal(err)
			}
			table.flows = slices.Clone(before)
			table.err = errors.New("interrupted")
			set(a, tt.now)
			if err := a.apply(); (err == nil) != (tt.cut == nil) {
				t.Fatalf("error %v: without one nothing is tried again, and nothing has to be where nothing can have to go", err)
			}
			if err := a.apply(); err != nil {
				t.Fatal(err)
			}
			var want []string
			for i, f := range before {
				if !slices.Contains(tt.cut, i) {
					want = append(want, f)
				}
			}
			if d := cmp.Diff(want, table.flows); d != "" {
				t.Errorf("flows left (-want +got):\n%s", d)
			}
		})
	}
}

// A VIP that moves to another Service has that Service's backends, in whatever order the two are confirmed.
func TestFrontendMovesBetweenServices(t *testing.T) {
	one := dns("one", "192.0.2.1", "192.168.1.2:5353")
	two := dns("two", "192.0.2.1", "192.168.1.9:5353")
	for _, order := range [][]plan.Service{{{Key: one.Key}, two}, {two, {Key: one.Key}}} {
		table := &fake{}
		a := newActor(table)
		set(a, one)
		for _, s := range order {
			set(a, s)
		}
		table.flows = []string{"192.0.2.1:53 192.168.1.2:5353", "192.0.2.1:53 192.168.1.9:5353"}
		if err := a.apply(); err != nil {
			t.Fatal(err)
		}
		if want := []string{"192.0.2.1:53 192.168.1.9:5353"}; !slices.Equal(table.flows, want) {
			t.Errorf("left %q, want %q", table.flows, want)
		}
	}
}

// What came in while nobody answered went out as it was, and goes on doing so until it is cut.
func TestFlowsFromBeforeThereWasABackend(t *testing.T) {
	table := &fake{}
	a := newActor(table)
	for _, s := range []plan.Service{dns("dns", "192.0.2.1"), dns("dns", "192.0.2.1", "192.168.1.2:5353")} {
		table.flows = []string{"10.96.0.10:53 10.96.0.10:53", "192.0.2.1:53 192.0.2.1:53", "192.0.2.2:53 192.0.2.2:53"}
		set(a, s)
		if err := a.apply(); err != nil {
			t.Fatal(err)
		}
		if want := []string{"192.0.2.2:53 192.0.2.2:53"}; !slices.Equal(table.flows, want) {
			t.Errorf("left %q, want %q", table.flows, want)
		}
	}
}

// Services without UDP cost nothing.
func TestTCPNeedsNoPass(t *testing.T) {
	s := dns("web", "192.0.2.1", "192.168.1.2:5353")
	s.Ports = s.Ports[1:]
	a := newActor(&fake{err: errors.New("not to be called")})
	set(a, s)
	if err := a.apply(); err != nil {
		t.Error(err)
	}
}

// The kernel's own table: exactly the flows that are meant go.
func TestKernelTable(t *testing.T) {
	ns := nstest.New(t)
	for i, f := range []string{
		"-p udp -d 10.96.0.10 --dport 53 -r 192.168.1.2 --reply-port-src 5353",
		"-p udp -d 10.96.0.10 --dport 53 -r 192.168.1.3 --reply-port-src 5353",
		"-p tcp -d 10.96.0.10 --dport 53 -r 192.168.1.3 --reply-port-src 5353 --state ESTABLISHED",
		"-p udp -d fd00::10 --dport 53 -r fd00::3 --reply-port-src 5353",
	} {
		client := "172.31.0.2"
		if strings.Contains(f, "fd00") {
			client = "fd31::2"
		}
		args := strings.Fields(fmt.Sprintf("-I %s -s %s --sport %d -q %s --reply-port-dst %d -t 100", f, client, 4000+i, client, 4000+i))
		ns.Run(t, "conntrack", args...)
	}
	var handle *netlink.Handle
	ns.Do(t, func() (err error) {
		handle, err = netlink.NewHandle(unix.NETLINK_NETFILTER)
		return err
	})
	t.Cleanup(handle.Close)
	gone := func(f Flow) bool { return f.From.Addr() == netip.MustParseAddr("192.168.1.3") || f.To.Addr().Is6() }
	for family, want := range map[lb.Family]int{lb.IPv4: 1, lb.IPv6: 1} {
		if n, err := (Netlink{handle}).DeleteUDP(family, gone); err != nil || n != want {
			t.Errorf("%s: deleted %d, error %v, want %d", family, n, err, want)
		}
	}
	left := ns.Run(t, "conntrack", "-L", "-o", "extended")
	for _, part := range []string{"src=192.168.1.2", "tcp"} {
		if !strings.Contains(left, part) {
			t.Errorf("%s is gone too:\n%s", part, left)
		}
	}
	if strings.Contains(left, "udp") && strings.Contains(left, "src=192.168.1.3 dst=172.31.0.2 sport=5353 dport=4001") {
		t.Errorf("still there:\n%s", left)
	}
}
