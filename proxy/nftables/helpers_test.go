package nftables

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/cases"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const localNode = cases.Here

var (
	onlyThere = []cases.Backend{{At: "remote", Ready: true, Serving: true}}
	twoHere   = []cases.Backend{{At: "local", Ready: true, Serving: true}, {At: "local2", Ready: true, Serving: true},
		onlyThere[0]}
)

func etpLocal(_ cases.World, s *lb.Service) { s.ExternalPolicy = lb.Local }
func itpLocal(_ cases.World, s *lb.Service) { s.InternalPolicy = lb.Local }
func ranged(w cases.World, s *lb.Service)   { s.SourceRanges = []netip.Prefix{cases.Host(w.Outside)} }

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

// newTestActor returns an actor for both families of a namespace.
func newTestActor(t testing.TB, ns *nstest.NS) *Actor {
	t.Helper()
	a := New(Deps{Log: slog.New(slog.DiscardHandler), Kernel: dial(t, ns), Changed: func() {}})
	a.Configure(plan.Config{MasqueradeBit: 14})
	return a
}

// settle runs one round of the actor.
func (a *Actor) settle(t testing.TB, services map[lb.Key]Service) stats {
	t.Helper()
	a.SetServices(services)
	if !a.take() {
		t.Fatal("the actor does not know what is wanted")
	}
	st, err := a.apply(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

var seedConfig = plan.Config{
	Pods: plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("fd00:10::/56")}}, MasqueradeBit: 14, DropInvalid: true, AnswerPing: true,
	ServiceNetworks: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00:10:96::/112")},
}
