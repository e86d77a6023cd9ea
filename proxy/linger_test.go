package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contract clause 11: what lingers of one Service has a bound, in withdrawals and in frontends, and
// what it gave up last lingers in any case.
func TestContract11LingeringIsBounded(t *testing.T) {
	for _, tt := range []struct {
		name                     string
		withdrawals, size, wants int
	}{
		{"a few", 10, 5, 10},
		{"many withdrawals", 1000, 1, maxWithdrawals},
		{"many frontends", 10, maxLingering / 4, 4},
		{"large ones", 3, maxLingering + 1, 1},
	} {
		l, now := newLingers(), time.Now()
		for i := range tt.withdrawals {
			ports := []plan.Port{{Frontends: make([]plan.Frontend, tt.size)}}
			ports[0].Frontends[0].Port = uint16(i)
			l.add(key("web"), ports, now.Add(time.Duration(i)))
		}
		of := l.of(key("web"))
		if len(of) != tt.wants {
			t.Fatalf("%s: %d withdrawals linger, want %d", tt.name, len(of), tt.wants)
		}
		if last := of[len(of)-1][0].Frontends[0].Port; int(last) != tt.withdrawals-1 {
			t.Errorf("%s: the last that lingers is %d", tt.name, last)
		}
		if l.changed(now.Add(time.Hour), plan.NewClaims()); len(l.services)+len(l.due) != 0 {
			t.Errorf("%s: %d and %d are left", tt.name, len(l.services), len(l.due))
		}
	}
}

// vipPorts returns a port for each of n ports of an address.
func vipPorts(addr netip.Addr, n int) (ports []plan.Port) {
	for i := range n {
		ports = append(ports, plan.Port{Protocol: lb.TCP, Frontends: []plan.Frontend{{Kind: plan.LoadBalancer, Addr: addr,
			Port: uint16(i + 1)}}})
	}
	return ports
}

// Contract clause 11: what lingers of a tenant costs the changes of others nothing.
func TestContract11LingeringCostsOthersNothing(t *testing.T) {
	costs := func(services int) float64 {
		l, claims, now := newLingers(), plan.NewClaims(), time.Now()
		addr := netip.MustParseAddr("192.0.2.0")
		for i := range services {
			addr = addr.Next()
			l.add(key(fmt.Sprint("tenant", i)), vipPorts(addr, 10), now.Add(time.Minute))
		}
		l.changed(now, claims)
		other, has := plan.Service{Key: key("other"), Ports: vipPorts(netip.MustParseAddr("198.51.100.1"), 1)}, true
		return testing.AllocsPerRun(10, func() {
			next := other
			if has = !has; has {
				next.Ports = nil
			}
			claims.Set(next)
			if keys := l.changed(now, claims); len(keys) != 0 {
				t.Errorf("%v linger no more", keys)
			}
		})
	}
	if few, many := costs(1), costs(1000); many > few+2 {
		t.Errorf("another Service's change takes %v allocations beside 10 frontends that linger, %v beside 10,000", few,
			many)
	}
}

// Whatever Services come and go, what one of them serves lingers no more, and the rest lingers on.
func TestOnlyWhatIsServedStopsLingering(t *testing.T) {
	type frontend struct {
		service  lb.Key
		protocol lb.Protocol
		addr     netip.Addr
		port     uint16
	}
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		ports := func(kinds ...plan.Kind) (all []plan.Port) {
			for range 1 + r.IntN(2) {
				f := plan.Frontend{Kind: kinds[r.IntN(len(kinds))], Addr: addrs[r.IntN(2)], Port: uint16(80 + r.IntN(2))}
				if f.Kind == plan.NodePort {
					f.Addr = netip.Addr{}
				}
				all = append(all, plan.Port{Protocol: []lb.Protocol{lb.TCP, lb.UDP}[r.IntN(2)], Family: lb.IPv4,
					Frontends: []plan.Frontend{f}})
			}
			return all
		}
		l, claims, now := newLingers(), plan.NewClaims(), time.Now()
		want := map[frontend]bool{}
		for step := range 60 {
			for range 1 + r.IntN(2) {
				service := lb.Key{Namespace: fmt.Sprint(r.IntN(2)), Name: fmt.Sprint(r.IntN(4))}
				switch r.IntN(8) {
				case 0:
					claims.Configure(plan.ExternalIPs{Deny: r.IntN(2) == 0}, addrs[:r.IntN(2)])
				case 1, 2, 3:
					gone := ports(plan.LoadBalancer)
					l.add(service, gone, now.Add(time.Hour))
					for _, p := range gone {
						want[frontend{service, p.Protocol, p.Frontends[0].Addr, p.Frontends[0].Port}] = true
					}
				case 4:
					claims.Set(plan.Service{Key: service})
				default:
					claims.Set(plan.Service{Key: service, Age: plan.Age{Created: int64(r.IntN(3)), UID: service.String()},
						Ports: ports(plan.LoadBalancer, plan.ExternalIP, plan.ExternalIP, plan.NodePort, plan.ClusterIP)})
				}
			}
			l.changed(now, claims)
			maps.DeleteFunc(want, func(f frontend, _ bool) bool { return claims.Serves(f.protocol, f.addr, f.port) })
			got := map[frontend]bool{}
			for service := range l.services {
				for _, p := range slices.Concat(l.of(service)...) {
					for _, f := range p.Frontends {
						got[frontend{service, p.Protocol, f.Addr, f.Port}] = true
					}
				}
			}
			if !maps.Equal(got, want) {
				t.Fatalf("seed %d, step %d: %v linger, want %v", seed, step, got, want)
			}
		}
		if l.changed(now.Add(time.Hour), claims); len(l.services)+len(l.at)+len(l.due) != 0 {
			t.Fatalf("seed %d: in the end %v linger, at %v, until %v", seed, l.services, l.at, l.due)
		}
	}
}
