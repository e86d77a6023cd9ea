package iptables

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/internal/suite"
	"github.com/landfall-lb/landfall/proxy/plan"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func prefixes(list ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, s := range list {
		all = append(all, netip.MustParsePrefix(s))
	}
	return all
}

// endpoints returns one slice of a Service with one port, and endpoints on the nodes that their
// places in the list name.
func endpoints(key lb.Key, portName string, protocol lb.Protocol, port uint16, on map[string][]string) []lb.Slice {
	byFamily := map[lb.Family]*lb.Slice{}
	for node, addrs := range on {
		for _, a := range addrs {
			family := lb.FamilyOf(addr(a))
			if byFamily[family] == nil {
				byFamily[family] = &lb.Slice{
					Key: lb.Key{Namespace: key.Namespace, Name: key.Name + "-" + string(family)}, Service: key, Family: family,
					Ports: []lb.SlicePort{{Name: portName, Protocol: protocol, Port: port}},
				}
			}
			byFamily[family].Endpoints = append(byFamily[family].Endpoints,
				lb.Endpoint{Addr: addr(a), Node: node, Ready: true, Serving: true})
		}
	}
	var all []lb.Slice
	for _, s := range byFamily {
		all = append(all, *s)
	}
	return all
}

// The legacy variant has one lock for the whole machine, and gives up where another program holds it
// for seconds. Network namespaces share nothing that it would have to protect.
func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "landfall-iptables")
	if err != nil {
		panic(err)
	}
	os.Setenv("XTABLES_LOCKFILE", filepath.Join(folder, "lock"))
	code := m.Run()
	os.RemoveAll(folder)
	os.Exit(code)
}

// nsKernel runs iptables in a network namespace.
type nsKernel struct {
	t        testing.TB
	ns       *nstest.NS
	commands Commands
}

func (k nsKernel) Save(ctx context.Context, read func(io.Reader) error) (err error) {
	k.ns.Do(k.t, func() error {
		err = k.commands.Save(ctx, read)
		return nil
	})
	return err
}

func (k nsKernel) Restore(ctx context.Context, input string) (err error) {
	k.ns.Do(k.t, func() error {
		err = k.commands.Restore(ctx, input)
		return nil
	})
	return err
}

func variant(family lb.Family, name string) Commands {
	binary := "iptables-" + name
	if family == lb.IPv6 {
		binary = "ip6tables-" + name
	}
	return Commands{save: binary + "-save", restore: binary + "-restore"}
}

// testActor is an actor whose families tests look into, and whose rounds they run.
type testActor struct {
	suite.Actor
	families []*family
}

// newActor returns an actor without a goroutine: tests call settle.
func newActor(kernels map[lb.Family]Kernel, config plan.Config) *testActor {
	a := actorWith(dialect.Deps{Verify: time.Minute}, kernels)
	a.Configure(config)
	return a
}

func actorWith(deps dialect.Deps, kernels map[lb.Family]Kernel) *testActor {
	a := &testActor{}
	deps.Log = slog.New(slog.DiscardHandler)
	if deps.Changed == nil {
		deps.Changed = func() {}
	}
	deps.Rules = func(name lb.Family, ledger *dialect.Ledger) dialect.Rules {
		rules := Rules(kernels, 0)(name, ledger)
		if rules != nil {
			a.families = append(a.families, rules.(*family))
		}
		return rules
	}
	a.Actor.Actor = dialect.New(deps)
	return a
}

// settle does one round.
func settle(a *testActor, verify bool) error {
	if !a.Begun {
		return errors.New("nothing is wanted")
	}
	_, err := a.Apply(context.Background(), verify)
	return err
}

func plans(services ...plan.Service) map[lb.Key]plan.Service {
	all := map[lb.Key]plan.Service{}
	for _, s := range services {
		all[s.Key] = s
	}
	return all
}
