package nftables

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// rangedService is a Service with many ports and source ranges, all of which each version replaces.
func rangedService(name string, ports, ranges, version int) plan.Service {
	key := lb.Key{Namespace: "default", Name: name}
	svc := lb.Service{
		Key: key, UID: name, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{addr("10.112.0.1"), addr("fd00:112::1")},
		Ingress:    []lb.Ingress{{Addr: addr("203.0.113.1")}, {Addr: addr("2001:db8:113::1")}},
	}
	for i := range ranges {
		i += version % 2 * ranges
		svc.SourceRanges = append(svc.SourceRanges,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 12), byte(i >> 4), byte(i << 4)}), 28))
	}
	for i := range ports {
		svc.Ports = append(svc.Ports, lb.ServicePort{Name: fmt.Sprint("p", i), Protocol: lb.TCP, Port: uint16(1000 + i)})
	}
	slice := lb.Slice{Key: key, Service: key, Family: lb.IPv4, Endpoints: []lb.Endpoint{{Addr: addr("172.16.0.1"),
		Ready: true, Serving: true}}}
	for _, p := range svc.Ports {
		slice.Ports = append(slice.Ports, lb.SlicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
	}
	return plan.New(svc, []lb.Slice{slice}, plan.Node{Name: localNode})
}

// Contract clause 11: what source ranges cost grows with the ranges and with the ports, not with
// both at once.
func TestContract11PortsShareSourceRanges(t *testing.T) {
	s := rangedService("ranged", 200, 1000, 0).Only(lb.IPv4)
	if n := count(newRenderer(lb.IPv4, seedConfig).service(s.Key, s)); n > 1000+200*8+10 {
		t.Errorf("%d elements", n)
	}
}

// A frontend whose ranges are not there, as just after an upgrade, admits nobody.
func TestRestrictedWithoutSourcesAdmitsNobody(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		c := cases.Case{Service: ranged, From: "outside", To: "vip"}
		service, config := serviceOf(w, c)
		out := newRenderer(family, config).service(service.Key, service.Only(family))
		for i := range out.parts {
			out.parts[i].entries = slices.DeleteFunc(out.parts[i].entries,
				func(e entry) bool { return e.set == setSources || e.set == setSourceRanges })
		}
		walk := newWalker(t, newRuleset(family, config, nil), nil, out)
		if shares, _ := walk.fate(packetOf(w, c)); shares["drop"] != 1 {
			t.Errorf("%s: %v", family, shares)
		}
	}
}

// The sets of networks are there while a Service has networks of that length, in the kernel too.
func TestRangesComeAndGo(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	sets := func() (lengths []uint32) {
		st, err := a.tables[0].kernel.load()
		if err != nil || len(st.unknown) > 0 {
			t.Fatalf("%v, unknown %v", err, st.unknown)
		}
		elements := map[uint32]bool{}
		for e := range st.elements {
			if e.set == setSourceRanges {
				elements[e.number] = true
			}
		}
		for name := range st.sets {
			if length, ok := lengthNamed(name); ok {
				if lengths = append(lengths, length); !elements[length] {
					t.Errorf("%s is empty", name)
				}
			}
		}
		slices.Sort(lengths)
		return lengths
	}
	service := func(ranges ...string) map[lb.Key]plan.Service {
		svc := lb.Service{
			Key: lb.Key{Namespace: "default", Name: "a"}, UID: "a", Type: lb.LoadBalancer,
			ClusterIPs: []netip.Addr{addr("10.96.0.7")},
			Ingress:    []lb.Ingress{{Addr: addr("203.0.113.1")}},
			Ports:      []lb.ServicePort{{Protocol: lb.TCP, Port: 80}},
		}
		for _, r := range ranges {
			svc.SourceRanges = append(svc.SourceRanges, netip.MustParsePrefix(r))
		}
		return map[lb.Key]plan.Service{svc.Key: plan.New(svc, nil, plan.Node{Name: localNode})}
	}
	var before needs
	for _, step := range []struct {
		ranges []string
		want   string
	}{
		{nil, "[]"},
		{[]string{"10.0.0.0/8", "10.1.0.0/16"}, "[8 16]"},
		{[]string{"10.1.0.0/16", "128.0.0.0/1", "192.0.2.7/32"}, "[4 16 32]"},
		{[]string{"10.2.0.0/16"}, "[16]"},
		{[]string{"10.2.0.0/16", "0.0.0.0/0"}, "[]"},
		{[]string{"10.2.0.0/17"}, "[20]"},
		{[]string{"10.2.0.0/17", "10.2.128.0/18", "10.2.0.0/20", "192.0.2.4/31"}, "[20 32]"},
		{nil, "[]"},
	} {
		a.settle(t, service(step.ranges...))
		if now := a.tables[0].rules.needs; !slices.Equal(now, now.with(before)) {
			t.Errorf("%v: sets %v at once, before %v", step.ranges, now, before)
		}
		a.trim(t)
		before = a.tables[0].rules.needs
		if got := fmt.Sprint(sets()); got != step.want {
			t.Errorf("%v: sets %v, want %v", step.ranges, got, step.want)
		}
	}
}

// What a tenant writes into source ranges costs each new connection to a restricted frontend of anybody
// few lookups, and contains the same addresses.
func TestContract11LookupsOfSourceRanges(t *testing.T) {
	lengths := map[int]int{4: 8, 16: 32} // by bytes of an address: how many there are at most
	random := rand.New(rand.NewPCG(1, 2))
	for size, most := range lengths {
		found := map[int]bool{}
		for length := 1; length <= 8*size; length++ {
			bytes := make([]byte, size)
			for i := range bytes {
				bytes[i] = byte(random.Uint32())
			}
			addr, _ := netip.AddrFromSlice(bytes)
			network := netip.PrefixFrom(addr, length).Masked()
			parts := split([]netip.Prefix{network})
			if len(parts) > 8 || !slices.IsSortedFunc(parts, netip.Prefix.Compare) {
				t.Errorf("%s becomes %v", network, parts)
			}
			for i, part := range parts {
				found[part.Bits()] = true
				if part != part.Masked() || !network.Contains(part.Addr()) || i > 0 && parts[i-1].Overlaps(part) {
					t.Errorf("%s becomes %v", network, parts)
				}
			}
			if len(parts) != 1<<(parts[0].Bits()-length) {
				t.Errorf("%s becomes %d networks of length %d", network, len(parts), parts[0].Bits())
			}
		}
		if len(found) > most {
			t.Errorf("%d lengths, want %d at most", len(found), most)
		}
	}
	both := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24"), netip.MustParsePrefix("10.0.0.0/25"),
		netip.MustParsePrefix("10.0.0.0/28")}
	if parts := split(both); len(parts) != 9 {
		t.Errorf("%v", parts)
	}
}

// BenchmarkSourceRanges replaces all source ranges of a Service.
func BenchmarkSourceRanges(b *testing.B) {
	for _, size := range []struct{ ports, ranges int }{{2, 1000}, {4, 1000}, {100, 10_000}} {
		b.Run(fmt.Sprintf("%d ports, %d ranges", size.ports, size.ranges), func(b *testing.B) {
			n := dial(b, nstest.New(b))
			a := benchActor(b, 1000, map[lb.Family]kernel{lb.IPv4: netlinkKernel{family: lb.IPv4, socket: n.commands}})
			for i := 0; b.Loop(); i++ {
				s := rangedService("ranged", size.ports, size.ranges, i)
				a.Set(map[lb.Key]plan.Service{s.Key: s})
				if _, err := a.Apply(b.Context(), false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
