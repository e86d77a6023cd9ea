package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Each number of backends has a class of its size, or one that a draw hits with more than even
// chance; no two rules draw the same numbers.
func TestClasses(t *testing.T) {
	for n := 1; n <= maxBackends; n++ {
		class := int(drawClass(n))
		if class < n || n > exactClasses && class >= 2*n || n <= exactClasses && class != n ||
			!slices.Contains(drawClasses(), uint32(class)) {
			t.Fatalf("%d backends have class %d", n, class)
		}
	}
	type span struct{ first, last uint32 }
	var spans []span
	for _, class := range drawClasses() {
		spans = append(spans, span{numbers(plan.Random, class), numbers(plan.Random, class) + class - 1})
	}
	for _, s := range []plan.Scheduler{plan.RoundRobin, plan.SourceHash, plan.DestinationHash, plan.Maglev} {
		for _, class := range plan.SlotSizes {
			spans = append(spans, span{numbers(s, class), numbers(s, class) + class - 1})
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return int(int64(a.first) - int64(b.first)) })
	for i := 1; i < len(spans); i++ {
		if spans[i].first <= spans[i-1].last {
			t.Errorf("numbers %v and %v overlap", spans[i-1], spans[i])
		}
	}
}

const maglevOfThree = "[43 42 42] 537210"

func targets(n int) []target {
	var all []target
	for _, b := range manyBackends(lb.IPv4, n) {
		all = append(all, target{addr: addressOf(b.Addr.Addr()), port: b.Addr.Port()})
	}
	return all
}

// Slots are shared out evenly, and one backend more or less moves few of them.
func TestSlotsAreEvenAndStable(t *testing.T) {
	for _, n := range []int{2, 3, 6, 20, 51, 400} {
		size := plan.SlotSize(n)
		share := float64(size) / float64(n)
		for _, s := range []plan.Scheduler{plan.RoundRobin, plan.Maglev} {
			counts := make([]int, n)
			for _, i := range slots(s, targets(n), nil, size) {
				counts[i]++
			}
			if least, most := slices.Min(counts), slices.Max(counts); float64(most-least) > share*0.06+1 {
				t.Errorf("%s: %d backends in %d slots get %d to %d", s, n, size, least, most)
			}
		}
		all := targets(n + 1)
		before, after := slots(plan.Maglev, all[:n], nil, size), slots(plan.Maglev, all, nil, size)
		moved := 0
		for i := range before {
			if before[i] != after[i] {
				moved++
			}
		}
		// Those of the newcomer have to move; Maglev moves some more.
		if float64(moved) > float64(size)/float64(n+1)+0.25*float64(size) {
			t.Errorf("a backend more than %d moves %d of %d slots", n, moved, size)
		}
	}
}

// The table for these backends shall never change: nodes of different releases have to agree.
// Computed with this code once.
func TestMaglevIsTheSameInAllReleases(t *testing.T) {
	counts, sum := [3]int{}, 0
	for i, b := range slots(plan.Maglev, targets(3), nil, 127) {
		counts[b]++
		sum = (sum*31 + int(b)*(i+1)) % 1_000_003
	}
	if got := fmt.Sprint(counts, " ", sum); got != maglevOfThree {
		t.Errorf("got %s, want %s", got, maglevOfThree)
	}
}

// Keys and values survive the way to the kernel's form and back, in every set and both families.
func TestElementsSurviveEncoding(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		at := addressOf(addr("10.1.2.3"))
		source := addressOf(addr("10.0.0.0"))
		if family == lb.IPv6 {
			at, source = addressOf(addr("2001:db8::3")), addressOf(addr("2001:db8::"))
		}
		f := frontend{addr: at, port: 443, protocol: udp}
		for id := range setNames {
			e := entry{element: element{set: setID(id), frontend: f}}
			switch {
			case e.set.ofGroup():
				e.frontend = frontend{group: 0x12345678}
			case e.set == setNodes:
				e.frontend = frontend{addr: address{2, 0, 0, 0, 0, 1}}
			case e.isShared():
				e.frontend = frontend{addr: at}
			case e.set.leadsToGroup():
				e.to.group = 0x87654321
			}
			switch e.set {
			case setBackends, setHanded:
				e.number, e.to = 30002, target{addr: at}
			case setMixedTCP, setMixedUDP, setMixedSCTP:
				e.number, e.to = 30002, target{addr: at, port: 8080}
			case setRemember:
				e.number = 10800
			case setSourceRanges:
				e.source, e.number = source, 8
			case setAffinity, setNear:
				e.source = at
			case setAffinityPorts:
				e.source, e.to.port = at, 8080
			case setPorts:
				e.to.port = 8080
			}
			testEncoding(t, family, e)
		}
	}
}

func testEncoding(t *testing.T, family lb.Family, e entry) {
	t.Helper()
	of, ok := setOf(e.setName())
	if !ok {
		t.Fatalf("%s is not known as a set of ours", e.setName())
	}
	var held nft.Element
	(netlinkKernel{family: family}).each([]entry{e}, true)(&held)
	if got, err := decode(of, family, held); err != nil || got != e {
		t.Errorf("%s %s: %+v came back as %+v, %v", family, e.setName(), e, got, err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, name := range []string{"cluster-ips", "source-ranges-24", "sources", "hairpin", "backends", "tcp-backends", "ports",
		"remember-60", "affinity", "affinity-ports", "handed", "near", "direct", "groups", "many", stickyMap} {
		f.Add(name, false, make([]byte, 16), make([]byte, 8))
		f.Add(name, true, make([]byte, 40), make([]byte, 20))
	}
	f.Fuzz(func(t *testing.T, name string, six bool, key, value []byte) {
		family := lb.IPv4
		if six {
			family = lb.IPv6
		}
		of, ok := setOf(name)
		if !ok {
			return
		}
		e, err := decode(of, family, nft.Element{Key: key, Value: value})
		if err != nil {
			return
		}
		again, err := decode(of, family, nft.Element{Key: e.appendKey(nil, family),
			Value: e.appendValue(nil, family)})
		if err != nil || again != e {
			t.Errorf("%+v came back as %+v, %v", e, again, err)
		}
	})
}

// Contract clause 1: what others took away, and the kernel does not take back, is not programmed.
func TestContract1LostRulesAreNotProgrammed(t *testing.T) {
	for name, damage := range map[string]func(*fakeKernel){
		"table gone": (*fakeKernel).wipe,
		"rule gone": func(k *fakeKernel) {
			c := k.state.chains["services"]
			c.Rules = c.Rules[1:]
			k.state.chains["services"] = c
		},
		"elements gone": func(k *fakeKernel) { clear(k.state.elements) },
	} {
		t.Run(name, func(t *testing.T) {
			kernels := fakeKernels()
			a := fakeActor(kernels)
			a.Configure(seedConfig)
			s := simpleService(1, 2)
			a.Set(map[lb.Key]plan.Service{s.Key: s})
			settled(t, a)
			if o := a.Outcomes()[s.Key]; o.Err != nil || len(o.Applied.Ports) != 1 {
				t.Fatalf("at first: %+v", o)
			}
			four := kernels[lb.IPv4].(*fakeKernel)
			damage(four)
			four.refuse = func(change) error { return errPoison }
			if _, err := a.Apply(t.Context(), true); !errors.Is(err, errPoison) {
				t.Errorf("error %v", err)
			}
			if o := a.Outcomes()[s.Key]; !errors.Is(o.Err, errPoison) || len(o.Alone) > 0 || len(o.Applied.Ports) > 0 {
				t.Errorf("then: %+v", o)
			}
			four.refuse = nil
			settled(t, a)
			if o := a.Outcomes()[s.Key]; o.Err != nil || len(o.Applied.Ports) != 1 {
				t.Errorf("in the end: %+v", o)
			}
			want := fakeActor(fakeKernels())
			want.Configure(seedConfig)
			want.Set(map[lb.Key]plan.Service{s.Key: s})
			settled(t, want)
			same(t, want, a)
		})
	}
}

// A failure is tried again after 100 ms, 200 ms and so on; what the kernel holds is read from time
// to time.
func TestRetriesAndVerification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		four := newFakeKernel(lb.IPv4)
		started := time.Now()
		var tried []time.Duration
		four.refuse = func(change) error {
			tried = append(tried, time.Since(started))
			if len(tried) < 4 {
				return errPoison
			}
			return nil
		}
		var seen []dialect.Sync
		a := newActor(dialect.Deps{
			Verify:   time.Minute,
			Observe:  func(s dialect.Sync) { seen = append(seen, s) },
			Unusable: map[lb.Family]error{lb.IPv6: errors.New("IPv6 is off")},
		}, map[lb.Family]kernel{lb.IPv4: four})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- a.Run(ctx) }()
		a.Configure(seedConfig)
		synctest.Wait() // else the run that Configure asks for may be the first try, and Begin asks for another one
		a.Set(nil)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		ms := time.Millisecond
		if want := []time.Duration{0, 100 * ms, 300 * ms, 700 * ms}; !slices.Equal(tried, want) {
			t.Errorf("tried after %v, want %v", tried, want)
		}
		four.wipe()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		st, _ := four.load()
		if last := seen[len(seen)-2]; !st.exists || last.Repaired == 0 || !last.Verified {
			t.Errorf("after two minutes the table is there: %v; %+v", st.exists, last)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestAffinityWherePortsDiffer checks that a client of a port whose endpoints listen at different numbers is remembered
// like any other: it comes back to the same one, and once its time is over, or its endpoint is gone, to any.
func TestAffinityWherePortsDiffer(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP, lb.SCTP} {
			w := cases.WorldOf(family)
			c := cases.Case{From: "outside", To: "vip", Protocol: protocol}
			world := func(at ...string) *walker {
				s, config := three(w, plan.Random, time.Hour, at...)
				differ(&s)
				out := newRenderer(family, config).service(s.Key, s.Only(family))
				return newWalker(t, newRuleset(family, config, neededBy(out)), nil, out)
			}
			walk, p := world("local", "local2", "remote"), packetOf(w, c)
			anywhere, _ := walk.fate(p)
			if len(anywhere) != 3 {
				t.Fatalf("%s, %s: a client that is not known ends at %v", family, protocol, anywhere)
			}
			for end := range anywhere {
				clear(walk.sets[stickyMap]) // its time is over
				if shares, _ := walk.fate(p); len(shares) != len(anywhere) {
					t.Errorf("%s, %s: after its time a client ends at %v", family, protocol, shares)
				}
				walk.establish(p, netip.MustParseAddrPort(end))
				if shares, _ := walk.fate(p); shares[end] != 1 {
					t.Errorf("%s, %s: a client of %s ends at %v", family, protocol, end, shares)
				}
			}
			clear(walk.sets[stickyMap])
			walk.establish(p, netip.AddrPortFrom(w.Local, 9999))
			without := world("local2", "remote")
			without.sets[stickyMap] = walk.sets[stickyMap]
			if shares, _ := without.fate(p); len(shares) != 2 {
				t.Errorf("%s, %s: a client whose endpoint is gone ends at %v", family, protocol, shares)
			}
		}
	}
}

// differ has the endpoints of a Service listen at different numbers.
func differ(s *plan.Service) {
	for i := range s.Ports {
		s.Ports[i] = numbered(s.Ports[i])
		b := s.Ports[i].Backends.Cluster
		b[0].Addr = netip.AddrPortFrom(b[0].Addr.Addr(), 9999)
	}
}

// TestOneAddressWithTwoPorts checks that an address that a hand-made EndpointSlice lists with two ports has one of them
// for the clients that are remembered.
func TestOneAddressWithTwoPorts(t *testing.T) {
	t.Parallel()
	s := affineTo("10.1.0.1:8080", "10.1.0.1:8081", "10.1.0.2:8080")
	out := newRenderer(lb.IPv4, plan.Config{}).service(s.Key, s)
	walk := newWalker(t, newRuleset(lb.IPv4, plan.Config{}, neededBy(out)), nil, out) // stops at an element twice
	if shares, _ := walk.fate(visit(1)); len(shares) != 3 {
		t.Errorf("a client that is not known ends at %v", shares)
	}
	walk.establish(visit(1), netip.MustParseAddrPort("10.1.0.1:8081"))
	if shares, _ := walk.fate(visit(1)); shares["10.1.0.1:8080"] != 1 {
		t.Errorf("a client of the address ends at %v", shares)
	}
}
