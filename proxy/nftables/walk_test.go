package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/walk"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// packet is the first one of a connection on its way through the node's rules.
type packet struct {
	src, dst netip.AddrPort
	in       string // interface; "" for packets of the node itself
	protocol protocol
	invalid  bool // conntrack finds it so
}

// walker runs the expressions of rules as the kernel would, over elements that tests look into. It
// stops the test at anything that it does not know.
type walker struct {
	walk.Walker
	t     *testing.T
	rules ruleset
	sets  map[string]map[string]string
	local []netip.Addr // the node's own addresses
}

func newWalker(t *testing.T, rules ruleset, local []netip.Addr, services ...*service) *walker {
	w := &walker{t: t, rules: rules, sets: map[string]map[string]string{}, local: local}
	w.reset()
	for _, s := range rules.sets {
		w.sets[s.name] = map[string]string{}
	}
	shared := map[common]bool{}
	for _, s := range services {
		for _, e := range s.shared {
			if !shared[e] {
				w.insert(entry{element: e.element()})
			}
			shared[e] = true
		}
		for _, p := range s.parts {
			for _, e := range p.entries {
				w.insert(e)
			}
		}
	}
	return w
}

// reset forgets what the walker has found in sets.
func (w *walker) reset() {
	w.Walker = walk.Walker{Family: w.rules.family, Name: TableName, Table: w, Local: w.isLocal}
}

func (w *walker) isLocal(addr netip.Addr) bool { return slices.Contains(w.local, addr) }

// Chain implements walk.Table, as do the next three.
func (w *walker) Chain(name string) (rules []nft.Listed, ok bool) {
	c, ok := w.rules.chain(name)
	for _, r := range c.rules {
		rules = append(rules, nft.Listed{Rule: r})
	}
	return rules, ok
}

func (w *walker) Set(name string) (nft.Shape, bool) {
	s, ok := w.rules.set(name)
	return s.definition(w.Family).Shape(), ok
}

func (w *walker) Get(set string, keys ...[]byte) ([]*nft.Element, error) {
	found := make([]*nft.Element, len(keys))
	for i, key := range keys {
		if value, ok := w.sets[set][string(key)]; ok {
			found[i] = &nft.Element{Key: key, Value: []byte(value)}
		}
	}
	return found, nil
}

func (w *walker) Write(set string, e nft.Element, remove bool) {
	switch _, there := w.sets[set][string(e.Key)]; {
	case remove:
		delete(w.sets[set], string(e.Key))
	case !there: // else only its time begins anew
		w.sets[set][string(e.Key)] = string(e.Value)
	}
}

func (w *walker) insert(e entry) {
	set, ok := w.sets[e.setName()]
	if !ok {
		w.t.Fatalf("there is no set %s", e.setName())
	}
	key := string(e.appendKey(nil, w.Family))
	if _, twice := set[key]; twice {
		w.t.Fatalf("element %+v is there twice", e)
	}
	set[key] = string(e.appendValue(nil, w.Family))
	w.reset()
}

// fate walks a new connection through all hooks and returns where it may end and with which
// probability: at a backend, "reject", "drop" or "none" when nothing matched; and whether it is
// masqueraded.
func (w *walker) fate(p packet) (shares map[string]float64, masqueraded bool) {
	host := trace.Host{Route: func(addr netip.Addr) trace.Route {
		if w.isLocal(addr) {
			return trace.RouteLocal
		}
		return trace.RouteOn
	}}
	for _, c := range w.rules.chains {
		if c.hook == (nft.Hook{}) {
			continue
		}
		host.Chains = append(host.Chains, trace.Chain{Hook: c.hook.Number, Priority: c.hook.Priority,
			NAT: c.hook.Kind == "nat", Walk: func(way trace.Way) []trace.Way { return w.Hook(c.hook.Number, c.name, way) }})
	}
	shares = map[string]float64{}
	for _, end := range host.Walk(trace.Packet{Source: p.src, Destination: p.dst, Interface: p.in,
		Protocol: uint8(p.protocol), Invalid: p.invalid}) {
		switch {
		case end.Verdict == trace.Unknown:
			w.t.Fatalf("unknown: %+v", end.Steps())
		case end.Verdict == trace.Drop, end.Verdict == trace.Reject:
			shares[string(end.Verdict)] += end.Chance
		case !end.Translated && end.Destination != p.dst:
			w.t.Fatalf("what was sent to %s goes on to %s, untranslated", p.dst, end.Destination)
		case !end.Translated:
			shares["none"] += end.Chance
		default:
			shares[end.Destination.String()] += end.Chance
			masqueraded = masqueraded || end.Masqueraded
		}
	}
	return shares, masqueraded
}

// establish walks a later packet of a connection that was sent to a backend.
func (w *walker) establish(p packet, backend netip.AddrPort) {
	for _, end := range w.Hook(unix.NF_INET_POST_ROUTING, "remember-postrouting", trace.Way{Chance: 1, Packet: trace.Packet{
		Source: p.src, Sent: p.dst, Destination: backend, Interface: p.in, Protocol: uint8(p.protocol),
		Translated: true, Established: true, Priority: 7}}) {
		if end.Verdict != trace.Undecided || end.Priority != 0 {
			w.t.Fatalf("after the handshake: %+v", end)
		}
	}
}

// walkOf renders a case for the walker, with numbered sets that the case does not need.
func walkOf(t *testing.T, w cases.World, c cases.Case, kept ...need) *walker {
	service, config := serviceOf(w, c)
	service = service.Only(w.Family)
	rendered := newRenderer(w.Family, config).service(service.Key, service)
	return newWalker(t, newRuleset(w.Family, config, neededBy(rendered).with(kept)), c.LocalAddresses(w), rendered)
}

// neededBy returns the numbered sets that Services need.
func neededBy(services ...*service) needs {
	c := newClaims(lb.IPv4, nil)
	for _, s := range services {
		c.count(s, 1)
	}
	return c.needed()
}

// serviceOf plans a case as the mode does.
func serviceOf(w cases.World, c cases.Case) (plan.Service, plan.Config) {
	service, config := c.Plan(w)
	return service, WithAddresses(config, []netip.Addr{w.Node, w.Node2})
}

// packetOf returns the first packet of the case's connection.
func packetOf(w cases.World, c cases.Case) packet {
	protocol, _ := protocolOf(c.Transport())
	return packet{src: netip.AddrPortFrom(c.Source(w), 40000), dst: c.Destination(w), in: c.Interface(),
		protocol: protocol, invalid: c.Invalid}
}

// A client outside costs no lookup of a route, also with policy Local. In the kernel that is the dearest
// of all that the rules look up.
func TestRoutesAreLookedUpForTheNodeAlone(t *testing.T) {
	t.Parallel()
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for from, want := range map[string]bool{"outside": false, "node": true} {
			c := cases.Case{From: from, To: "vip", Service: etpLocal, Backends: twoHere}
			walk := walkOf(t, w, c)
			asked := false
			walk.Walker.Local = func(addr netip.Addr) bool {
				asked = asked || addr == c.Source(w)
				return walk.isLocal(addr)
			}
			if shares, _ := walk.fate(packetOf(w, c)); len(shares) < 2 || asked != want {
				t.Errorf("%s, from %s: ends at %v; looked the source up: %v, want %v", family, from, shares, asked, want)
			}
		}
	}
}

// Every number of backends is spread evenly by random draws.
func TestRandomSpreadIsEven(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 3, 4, 5, 7, 8, 9, 33, 100, seeds.Of(600, 1500)} {
		w := cases.WorldOf(lb.IPv4)
		c := cases.Case{From: "pod", To: "cluster"}
		walk := walkOf(t, w, c)
		at := frontend{addr: addressOf(w.ClusterIP), port: cases.ServicePort, protocol: tcp}
		group := group{id: 77, backends: targets(n)}
		walk.sets["groups"] = map[string]string{}
		walk.insert(entry{element: element{set: setGroups, frontend: at}, to: target{group: 77}})
		for _, e := range group.part(0).entries {
			walk.insert(e)
		}
		shares, _ := walk.fate(packetOf(w, c))
		if len(shares) != n && len(shares) != n+1 {
			t.Errorf("%d backends: %d ends", n, len(shares))
		}
		for end, share := range shares {
			switch even := 1 / float64(n); {
			case end == "reject" && share > 1e-9:
				t.Errorf("%d backends: %g of connections find none", n, share)
			case end != "reject" && (share < even*(1-1e-8) || share > even*(1+1e-8)):
				t.Errorf("%d backends: %s gets %.12f, want %.12f", n, end, share, even)
			}
		}
	}
}

func manyBackends(family lb.Family, n int) []lb.Backend {
	first := addr("10.1.0.0")
	if family == lb.IPv6 {
		first = addr("fd00:1::")
	}
	var all []lb.Backend
	for range n {
		all = append(all, lb.Backend{Addr: netip.AddrPortFrom(first, 8080), Ready: true})
		first = first.Next()
	}
	return all
}

// A ruleset has the same number of rules whatever there is to serve, but for the affinity timeouts.
func TestRulesAreConstant(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		rules := newRuleset(family, seedConfig, nil)
		var counts []string
		total := 0
		for _, c := range rules.chains {
			total += len(c.rules)
			counts = append(counts, fmt.Sprintf("%s %d", c.name, len(c.rules)))
		}
		if total > 260 || len(rules.chains) > 45 {
			t.Errorf("%d rules in %d chains: %s", total, len(rules.chains), strings.Join(counts, ", "))
		}
		t.Logf("%s: %d rules, %d chains, %d sets", family, total, len(rules.chains), len(rules.sets))
	}
}
