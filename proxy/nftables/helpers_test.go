package nftables

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const localNode = cases.Here

var (
	onlyThere = []cases.Backend{{At: "remote", Ready: true, Serving: true}}
	twoHere   = []cases.Backend{{At: "local", Ready: true, Serving: true}, {At: "local2", Ready: true, Serving: true},
		onlyThere[0]}
)

func etpLocal(_ cases.World, s *lb.Service) { s.ExternalPolicy = lb.Local }

func passed(_ cases.World, s *lb.Service) {
	s.ExternalPolicy, s.Failover = lb.Local, lb.FailoverPassthrough
}
func itpLocal(_ cases.World, s *lb.Service) { s.InternalPolicy = lb.Local }

// ranged has one network of a single address, and a larger one elsewhere.
func ranged(w cases.World, s *lb.Service) {
	s.SourceRanges = []netip.Prefix{cases.Host(w.Outside), netip.PrefixFrom(w.Node2.Next(), w.Node2.BitLen()-8).Masked()}
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// dial opens the way to a namespace.
func dial(t testing.TB, ns *nstest.NS) *Netlink {
	t.Helper()
	var n *Netlink
	ns.Do(t, func() (err error) {
		n, err = Dial()
		return err
	})
	t.Cleanup(n.Close)
	return n
}

// testActor is an actor whose tables tests look into, and whose rounds they run.
type testActor struct {
	suite.Actor
	netlink *Netlink
	tables  []*table
}

// newActor returns an actor over kernels, and for tests that need not know, without a log.
func newActor(deps dialect.Deps, kernels map[lb.Family]kernel) *testActor {
	a := &testActor{}
	deps.Log = slog.New(slog.DiscardHandler)
	deps.Rules = func(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
		if kernels[family] == nil {
			return nil
		}
		t := newTable(family, kernels[family], ledger)
		a.tables = append(a.tables, t)
		return t
	}
	if deps.Changed == nil {
		deps.Changed = func() {}
	}
	a.Actor.Actor = dialect.New(deps)
	return a
}

func inKernel(n *Netlink) map[lb.Family]kernel {
	return map[lb.Family]kernel{lb.IPv4: netlinkKernel{lb.IPv4, n.commands}, lb.IPv6: netlinkKernel{lb.IPv6, n.commands}}
}

// newTestActor returns an actor for both families of a namespace.
func newTestActor(t testing.TB, ns *nstest.NS) *testActor {
	t.Helper()
	n := dial(t, ns)
	a := newActor(dialect.Deps{}, inKernel(n))
	a.netlink = n
	a.Configure(plan.Config{MasqueradeBit: 14})
	return a
}

// settle runs one round of the actor.
func (a *testActor) settle(t testing.TB, services map[lb.Key]plan.Service) dialect.Stats {
	t.Helper()
	a.Set(services)
	st, err := a.Apply(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// trim runs the two verifications after which the numbered sets that no Service needs are gone. They find nothing else
// to do.
func (a *testActor) trim(t testing.TB) {
	t.Helper()
	for range 2 {
		if st, err := a.Apply(t.Context(), true); err != nil || st.Repaired > 0 || st.Changes > 0 {
			t.Errorf("verified: %+v, %v", st, err)
		}
	}
}

var seedConfig = plan.Config{
	Pods: plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("fd00:10::/56")}}, MasqueradeBit: 14, DropInvalid: true, AnswerPing: true, Relay: true,
	RelayUDPRate:    500,
	ServiceNetworks: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:96::/112")},
}

// inFamily returns a Service of IPv4 as one of a family.
func inFamily(family lb.Family, s plan.Service) plan.Service {
	if family == lb.IPv4 {
		return s
	}
	type list struct {
		first *lb.Backend
		n     int
	}
	known := map[list][]lb.Backend{} // what ports share, they go on sharing
	s.Ports = slices.Clone(s.Ports)
	for i := range s.Ports {
		p := &s.Ports[i]
		p.Family, p.Frontends = family, slices.Clone(p.Frontends)
		for j := range p.Frontends {
			p.Frontends[j].Addr = widened(p.Frontends[j].Addr)
		}
		for _, of := range []*[]lb.Backend{&p.Backends.Cluster, &p.Backends.Local} {
			if len(*of) == 0 {
				continue
			}
			this := list{&(*of)[0], len(*of)}
			if known[this] == nil {
				known[this] = slices.Clone(*of)
				for j, b := range *of {
					known[this][j].Addr = netip.AddrPortFrom(widened(b.Addr.Addr()), b.Addr.Port())
				}
			}
			*of = known[this]
		}
	}
	return s
}

// allInFamily returns Services of IPv4 as those of a family.
func allInFamily(family lb.Family, services map[lb.Key]plan.Service) map[lb.Key]plan.Service {
	all := make(map[lb.Key]plan.Service, len(services))
	for key, s := range services {
		all[key] = inFamily(family, s)
	}
	return all
}

// bothFamilies runs a test in each family.
func bothFamilies(t *testing.T, run func(t *testing.T, family lb.Family)) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) { run(t, family) })
	}
}

// widened returns an address of IPv6 that begins with one of IPv4.
func widened(a netip.Addr) netip.Addr {
	var bytes [16]byte
	copy(bytes[:], a.AsSlice())
	return netip.AddrFrom16(bytes)
}

// numbered returns a port with lists of its own, in which each backend says where it listens.
func numbered(p plan.Port) plan.Port {
	for _, list := range []*[]lb.Backend{&p.Backends.Cluster, &p.Backends.Local} {
		*list = slices.Clone(*list)
		for i, b := range *list {
			(*list)[i].Addr = p.At(b)
		}
	}
	p.Number = 0
	return p
}
