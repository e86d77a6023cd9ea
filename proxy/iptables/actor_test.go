package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// spy passes calls on to a kernel, counts what is written, and refuses what it is told to refuse.
type spy struct {
	Kernel
	writes []string
	// refuse says whether a restore with this input fails.
	refuse func(input string) error
	// after is called after each restore; may be nil.
	after func()
	// failSaves is how many of the next calls of Save fail.
	failSaves int
}

func (s *spy) Save(ctx context.Context, read func(io.Reader) error) error {
	if s.failSaves > 0 {
		s.failSaves--
		return errors.New("the save is refused")
	}
	return s.Kernel.Save(ctx, read)
}

func (s *spy) Restore(ctx context.Context, input string) error {
	if s.refuse != nil {
		if err := s.refuse(input); err != nil {
			return err
		}
	}
	s.writes = append(s.writes, input)
	err := s.Kernel.Restore(ctx, input)
	if s.after != nil {
		s.after()
	}
	return err
}

func refuseWith(part string) func(string) error {
	return func(input string) error {
		if strings.Contains(input, part) {
			return fmt.Errorf("no rule with %s", part)
		}
		return nil
	}
}

// random returns a Service numbered n in one of many shapes.
func random(r *rand.Rand, n int) plan.Service {
	key := lb.Key{Namespace: "test", Name: fmt.Sprintf("svc-%d", n)}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer,
		ClusterIPs: []netip.Addr{addr(fmt.Sprintf("10.96.1.%d", n+1)), addr(fmt.Sprintf("fd00:96::%d", n+1))},
		Ports: []lb.ServicePort{
			{Name: "a", Protocol: lb.TCP, Port: 80, NodePort: uint16(30000 + n)}, {Name: "b", Protocol: lb.UDP, Port: 53},
		}[:1+r.IntN(2)],
		ExternalPolicy: pick(r, lb.Cluster, lb.Local), InternalPolicy: pick(r, lb.Cluster, lb.Local),
		HealthCheckNodePort: uint16(32000 + n),
	}
	for i := range r.IntN(3) {
		svc.Ingress = append(svc.Ingress, lb.Ingress{Addr: addr(fmt.Sprintf("198.51.100.%d", 3*n+i))},
			lb.Ingress{Addr: addr(fmt.Sprintf("2001:db8::%x", 3*n+i))})
	}
	if r.IntN(3) == 0 {
		svc.SourceRanges = prefixes("203.0.113.0/24", "2001:db8:1::/64")
	}
	if r.IntN(3) == 0 {
		svc.AffinityTimeout = pick(r, time.Minute, time.Hour)
	}
	on := map[string][]string{}
	for i := range r.IntN(5) {
		node := pick(r, "here", "there")
		on[node] = append(on[node], fmt.Sprintf("192.168.%d.%d", n, i+1), fmt.Sprintf("fd00:10::%x:%x", n, i+1))
	}
	var all []lb.Slice
	for i, p := range svc.Ports {
		for _, s := range endpoints(key, p.Name, p.Protocol, p.Port+8000, on) {
			s.Key.Name += fmt.Sprint(i)
			all = append(all, s)
		}
	}
	out := plan.New(svc, all, plan.Node{Name: "here"})
	if r.IntN(2) == 0 {
		out.Sole = out.VIPs
	}
	return out
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

func kernels(t *testing.T, kind string) map[lb.Family]Kernel {
	ns := nstest.New(t)
	return map[lb.Family]Kernel{
		lb.IPv4: &spy{Kernel: nsKernel{t, ns, variant(lb.IPv4, kind)}},
		lb.IPv6: &spy{Kernel: nsKernel{t, ns, variant(lb.IPv6, kind)}},
	}
}

func writes(all map[lb.Family]Kernel) int {
	n := 0
	for _, k := range all {
		n += len(k.(*spy).writes)
	}
	return n
}

// Adding, changing and deleting Services in any order ends in the rules of a fresh start, and a
// restart over right rules writes nothing.
func TestContract6RandomStoriesEndAsAFreshStart(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("%s/%d", kind, seed), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, 1))
				old := kernels(t, kind)
				a := newActor(old, seedConfig)
				final := map[lb.Key]plan.Service{}
				a.Set(nil)
				for range 25 {
					for range 1 + r.IntN(3) {
						s := random(r, r.IntN(8))
						if r.IntN(4) == 0 {
							s = plan.Service{Key: s.Key}
						}
						final[s.Key] = s
						a.Set(plans(s))
					}
					if err := settle(a, r.IntN(5) == 0); err != nil {
						t.Fatal(err)
					}
				}
				fresh := kernels(t, kind)
				b := newActor(fresh, seedConfig)
				b.Set(final)
				if err := settle(b, false); err != nil {
					t.Fatal(err)
				}
				for family := range old {
					if d := cmp.Diff(listing(t, fresh[family]), listing(t, old[family])); d != "" {
						t.Errorf("%s: not as after a fresh start (-fresh +got):\n%s", family, d)
					}
				}
				before := writes(old)
				restarted := newActor(old, seedConfig)
				restarted.Set(final)
				if err := settle(restarted, false); err != nil {
					t.Fatal(err)
				}
				if err := settle(restarted, true); err != nil {
					t.Fatal(err)
				}
				if n := writes(old) - before; n != 0 {
					t.Errorf("a restart over right rules wrote %d times:\n%s", n, old[lb.IPv4].(*spy).writes)
				}
			})
		}
	}
}

// What a predecessor left for Services that are gone goes; what is right stays untouched.
func TestContract6RestartRemovesOnlyLeftovers(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	old := kernels(t, "nft")
	a := newActor(old, seedConfig)
	all := plans(random(r, 0), random(r, 1), random(r, 2))
	a.Set(all)
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	gone := lb.Key{Namespace: "test", Name: "svc-1"}
	delete(all, gone)
	b := newActor(old, seedConfig)
	b.Set(all)
	if err := settle(b, false); err != nil {
		t.Fatal(err)
	}
	for family, k := range old {
		last := k.(*spy).writes[len(k.(*spy).writes)-1]
		for line := range strings.Lines(last) {
			if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, "-I") || strings.HasPrefix(line, ":") {
				t.Errorf("%s: wrote %s", family, line)
			}
		}
		if strings.Contains(listing(t, k), gone.String()) {
			t.Errorf("%s: rules of %s are still there", family, gone)
		}
	}
}

// One Service whose rules the kernel refuses does not hold back others, at the start as well as
// later, and is applied once it can be.
func TestPoisonedServiceHoldsBackNobody(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	ks := kernels(t, "nft")
	v4 := ks[lb.IPv4].(*spy)
	services := map[lb.Key]plan.Service{}
	for n := range 6 {
		s := random(r, n)
		services[s.Key] = s
	}
	poisoned := lb.Key{Namespace: "test", Name: "svc-4"}
	v4.refuse = refuseWith("-d 10.96.1.5/32")
	a := newActor(ks, seedConfig)
	a.Set(services)
	if err := settle(a, false); err == nil || !strings.Contains(err.Error(), poisoned.String()) {
		t.Fatalf("error %v does not name %s", err, poisoned)
	}
	check := func(wantBad bool) {
		t.Helper()
		outcomes := a.Outcomes()
		if !a.Tried {
			t.Error("not all have been tried")
		}
		for key, o := range outcomes {
			if bad := o.Err != nil; bad != (wantBad && key == poisoned) {
				t.Errorf("outcome of %s: %v", key, o.Err)
			}
		}
		if o := outcomes[poisoned]; wantBad && len(o.Applied.Only(lb.IPv4).Ports) != 0 {
			t.Error("what the kernel refused counts as applied")
		}
		if o := outcomes[poisoned]; !wantBad && len(o.Applied.Ports) != len(services[poisoned].Ports) {
			t.Error("not applied")
		}
	}
	check(true)
	other := random(r, 6)
	a.Set(plans(other))
	if err := settle(a, false); err == nil {
		t.Fatal("the refused rules count as applied")
	}
	if o, ok := a.Outcomes()[other.Key]; !ok || o.Err != nil {
		t.Errorf("a new Service is held back: %v", o.Err)
	}
	v4.refuse = nil
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	check(false)
}

// While a Service's rules cannot be written after a restart, what the predecessor left for it goes
// on serving.
func TestContract6PredecessorsRulesStayWhileOursAreRefused(t *testing.T) {
	key := lb.Key{Namespace: "default", Name: "my-nginx"}
	ks := kernels(t, "nft")
	v4 := ks[lb.IPv4].(*spy)
	a := newActor(ks, seedConfig)
	a.Set(seed(func(*lb.Service) {}))
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	before := listing(t, v4)
	v4.refuse = refuseWith("LF-SVL-BEPXDJBUHFCSYIC3")
	b := newActor(ks, seedConfig)
	b.Set(seed(func(s *lb.Service) { s.ExternalPolicy = lb.Local }))
	for range 3 {
		if err := settle(b, false); err == nil {
			t.Fatal("nothing was refused")
		}
	}
	if d := cmp.Diff(before, listing(t, v4)); d != "" {
		t.Errorf("the rules changed (-before +after):\n%s", d)
	}
	if o := b.Outcomes()[key]; o.Err == nil || len(o.Applied.Ports) != 0 {
		t.Errorf("outcome %+v: the predecessor's rules are not what is wanted", o)
	}
	v4.refuse = nil
	if err := settle(b, false); err != nil {
		t.Fatal(err)
	}
	if got := listing(t, v4); !strings.Contains(got, "-j LF-SVL-BEPXDJBUHFCSYIC3") {
		t.Errorf("rules:\n%s", got)
	}
}

// When iptables does not work at all, all Services say so, nothing is bisected, and nothing is
// claimed to be known.
func TestFailureThatIsNoServicesFault(t *testing.T) {
	ks := kernels(t, "nft")
	v4 := ks[lb.IPv4].(*spy)
	calls := 0
	v4.refuse = func(string) error { calls++; return errors.New("no lock") }
	a := newActor(ks, seedConfig)
	services := seed(func(*lb.Service) {})
	a.Set(services)
	if err := settle(a, false); err == nil {
		t.Fatal("no error")
	}
	if calls > 2 {
		t.Errorf("%d attempts in one round", calls)
	}
	for key, o := range a.Outcomes() {
		if o.Err == nil {
			t.Errorf("%s: no error", key)
		}
	}
	if a.Tried {
		t.Error("all are said to have been tried although nothing could be written")
	}
	v4.refuse = nil
	v4.failSaves = 1
	if err := settle(a, false); err != nil { // the save happened in the round before
		t.Log(err)
		if err := settle(a, false); err != nil {
			t.Fatal(err)
		}
	}
	for key, o := range a.Outcomes() {
		if o.Err != nil || len(o.Applied.Ports) == 0 {
			t.Errorf("%s: %+v", key, o)
		}
	}
}

// Rules that others delete come back at the next verification; foreign rules in our chains go,
// those in the built-in chains stay.
func TestContract6DriftIsRepaired(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			ks := kernels(t, kind)
			a := newActor(ks, seedConfig)
			a.Set(seed(func(*lb.Service) {}))
			if err := settle(a, false); err != nil {
				t.Fatal(err)
			}
			want := listing(t, ks[lb.IPv4])
			for _, damage := range []string{
				"*nat\n-F LF-SERVICES\nCOMMIT\n",
				"*nat\n-D LF-SVC-BEPXDJBUHFCSYIC3 3\nCOMMIT\n",
				"*nat\n-F PREROUTING\n-F OUTPUT\n-F LF-NODEPORTS\n-F LF-SERVICES\n-X LF-NODEPORTS\nCOMMIT\n",
				"*filter\n-F\n-I LF-SERVICES 1 -j ACCEPT\nCOMMIT\n",
				"*filter\n-F LF-VIPS-34\nCOMMIT\n",
				"*filter\n-F LF-VIPS\n-D FORWARD 5\nCOMMIT\n",
				"*nat\n-I LF-SERVICES 2 -j ACCEPT\n-A LF-SERVICES -j ACCEPT\nCOMMIT\n",
				"*nat\n-D LF-SERVICES 1\n-A LF-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"default/kubernetes:https " +
					"cluster IP\" -m tcp --dport 443 -j LF-SVC-NPX46M4PTMTKRN6Y\nCOMMIT\n",
				"*nat\n-D PREROUTING 1\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n",
				"*nat\n-D PREROUTING -j KUBE-SERVICES\n-I PREROUTING 1 -j KUBE-SERVICES\nCOMMIT\n",
			} {
				k := ks[lb.IPv4].(*spy)
				if err := k.Kernel.Restore(t.Context(), damage); err != nil {
					t.Fatal(err)
				}
				if listing(t, k) == want {
					t.Fatalf("no damage from %q", damage)
				}
				for i, repairs := range []bool{true, false} {
					stats, err := a.Apply(t.Context(), true)
					if err != nil || (stats.Repaired > 0) != repairs {
						t.Errorf("look %d after %q: %v, %d repairs", i, damage, err, stats.Repaired)
					}
				}
				got := strings.ReplaceAll(listing(t, k), "-A PREROUTING -j KUBE-SERVICES\n", "")
				if d := cmp.Diff(want, got); d != "" {
					t.Errorf("after %q (-want +got):\n%s", damage, d)
				}
			}
			if got := listing(t, ks[lb.IPv4]); !strings.Contains(got, "LF-SERVICES\n-A PREROUTING -j KUBE-SERVICES\n") {
				t.Errorf("our hook is not ahead of kube-proxy's, or that is gone:\n%s", got)
			}
		})
	}
}

// Damage that cannot be repaired is not hidden: Services whose rules are gone are no longer
// applied, the others are.
func TestContract1LostRulesAreNotProgrammed(t *testing.T) {
	ks := kernels(t, "nft")
	v4 := ks[lb.IPv4].(*spy)
	a := newActor(ks, seedConfig)
	a.Set(seed(func(*lb.Service) {}))
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	a.Outcomes()
	if err := v4.Kernel.Restore(t.Context(), "*nat\n-F LF-SVC-BEPXDJBUHFCSYIC3\nCOMMIT\n"); err != nil {
		t.Fatal(err)
	}
	v4.refuse = func(string) error { return errors.New("no lock") }
	if err := settle(a, true); err == nil {
		t.Fatal("no error")
	}
	outcomes := a.Outcomes()
	nginx := lb.Key{Namespace: "default", Name: "my-nginx"}
	if o := outcomes[nginx]; o.Err == nil || len(o.Applied.Ports) != 0 {
		t.Errorf("my-nginx: %+v", o)
	}
	if len(outcomes) != 1 {
		t.Errorf("%d outcomes, want that of my-nginx only", len(outcomes))
	}
	v4.refuse = nil
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	if o := a.Outcomes()[nginx]; o.Err != nil || len(o.Applied.Ports) != 1 {
		t.Errorf("my-nginx after the repair: %+v", o)
	}
}
