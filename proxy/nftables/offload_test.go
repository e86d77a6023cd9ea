package nftables

import (
	"bytes"
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

func TestDeviceEdits(t *testing.T) {
	for name, test := range map[string]struct {
		want, hooked, listed []string
		edits                []deviceEdit
	}{
		"as it is": {want: []string{"b", "a"}, hooked: []string{"a", "b"}, listed: []string{"b", "a"}},
		"at first": {want: []string{"b", "a"},
			edits: []deviceEdit{{name: "a", hook: true, list: true}, {name: "b", hook: true, list: true}}},
		"unwanted": {hooked: []string{"a"}, listed: []string{"a"},
			edits: []deviceEdit{{name: "a", unhook: true, omit: true}}},
		"went":      {listed: []string{"a"}, edits: []deviceEdit{{name: "a", omit: true}}},
		"came back": {want: []string{"a"}, listed: []string{"a"}, edits: []deviceEdit{{name: "a", hook: true}}},
		"renamed": {want: []string{"new"}, hooked: []string{"new"}, listed: []string{"old"},
			edits: []deviceEdit{{name: "new", list: true}, {name: "old", omit: true}}},
		"half removed": {hooked: []string{"a"}, edits: []deviceEdit{{name: "a", unhook: true}}},
	} {
		if got := deviceEdits(test.want, test.hooked, test.listed); !slices.Equal(got, test.edits) {
			t.Errorf("%s: %+v, want %+v", name, got, test.edits)
		}
	}
}

// The rules of a family have the flowtable only where they shall offload, behind all filters of the forward hook, and
// ask for an answer of a connection that is established, translated and assured first. Direct connections leave before.
func TestOffloadRules(t *testing.T) {
	config := seedConfig
	config.Offload, config.OffloadUDP = map[lb.Family]bool{lb.IPv6: true}, true
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, n := range []needs{nil, {{set: setDirect}}} {
			r := newRuleset(family, config, n)
			_, listed := r.set(devicesSet)
			hook, hooked := r.chain(chainOffload)
			if want := family == lb.IPv6; r.offload != want || listed != want || hooked != want {
				t.Fatalf("%s: flowtable %v, set %v, chain %v", family, r.offload, listed, hooked)
			}
			if !r.offload {
				continue
			}
			if hook.hook.Number != unix.NF_INET_FORWARD || hook.hook.Priority <= 100 || len(hook.rules) != 1 {
				t.Errorf("hook %+v with %d rules", hook.hook, len(hook.rules))
			}
			if !slices.ContainsFunc(hook.rules[0].Exprs, func(e expr.Any) bool {
				ct, is := e.(*expr.Ct)
				return is && ct.Key == expr.CtKeyDIRECTION
			}) {
				t.Error("packets of clients are offloaded, whose answers the kernel then sends out where these came in")
			}
			flows, _ := r.chain(chainOffloadFlows)
			var adds, returns, sets []string
			for i, rule := range flows.rules {
				for _, e := range rule.Exprs {
					switch e := e.(type) {
					case *expr.FlowOffload:
						adds = append(adds, e.Flowtable)
					case *expr.Verdict:
						returns = append(returns, flows.rules[i].Comment)
					case *expr.Lookup:
						sets = append(sets, e.SetName)
					}
				}
			}
			wantSets, wantReturns := []string{"external", "cluster-ips", "external", "cluster-ips"}, []string(nil)
			if n != nil {
				wantSets = []string{"direct", "external", "cluster-ips", "direct", "external", "cluster-ips"}
				wantReturns = []string{"direct", "direct"}
			}
			if len(adds) != 4 || !slices.Equal(sets, wantSets) || !slices.Equal(returns, wantReturns) {
				t.Errorf("adds to %v, by %v, returns %v", adds, sets, returns)
			}
		}
	}
}

// The first packets of connections go as they do without.
func TestOffloadChangesNoFirstPacket(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		w := cases.WorldOf(family)
		for _, c := range []cases.Case{{From: "outside", To: "vip"}, {From: "pod", To: "cluster"},
			{From: "outside", To: "vip", Protocol: lb.UDP, Service: etpLocal, Backends: twoHere},
			{From: "outside", To: "nodeport", Backends: onlyThere}} {
			service, config := serviceOf(w, c)
			service = service.Only(family)
			rendered := newRenderer(family, config).service(service.Key, service)
			want, wantMasqueraded := walkOf(t, w, c).fate(packetOf(w, c))
			config.Offload, config.OffloadUDP = map[lb.Family]bool{family: true}, true
			got, masqueraded := newWalker(t, newRuleset(family, config, neededBy(rendered)), c.LocalAddresses(w),
				rendered).fate(packetOf(w, c))
			if !reflect.DeepEqual(got, want) || masqueraded != wantMasqueraded {
				t.Errorf("%s, %s to %s: %v, without offloading %v", family, c.From, c.To, got, want)
			}
		}
	}
}

// Where UDP is left out, no rule offloads it.
func TestOffloadOfTCPAlone(t *testing.T) {
	r := newRuleset(lb.IPv4, plan.Config{Offload: map[lb.Family]bool{lb.IPv4: true}}, nil)
	flows, _ := r.chain(chainOffloadFlows)
	isTCP := expr.Encode(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_TCP))
	for _, rule := range flows.rules {
		if !bytes.HasPrefix(expr.Encode(rule.Exprs), isTCP) {
			t.Errorf("a rule asks for no TCP: %+v", rule)
		}
	}
	if len(flows.rules) != 2 {
		t.Errorf("%d rules", len(flows.rules))
	}
}

// Rules that shall offload, or no longer, are written over those that are there; no others.
func TestOffloadIsSwitched(t *testing.T) {
	kernels := fakeKernels()
	a := newActor(dialect.Deps{}, kernels)
	configure := func(offload map[lb.Family]bool) [2]bool {
		config := seedConfig
		config.Offload = offload
		a.Configure(config)
		a.settle(t, variety())
		return [2]bool{kernels[lb.IPv4].(*fakeKernel).state.offload, kernels[lb.IPv6].(*fakeKernel).state.offload}
	}
	for _, want := range [][2]bool{{}, {true, true}, {false, true}, {}} {
		offload := map[lb.Family]bool{lb.IPv4: want[0], lb.IPv6: want[1]}
		if got := configure(offload); !reflect.DeepEqual(got, want) {
			t.Errorf("flowtables %v, want %v", got, want)
		}
	}
}

// A predecessor's flowtable is noticed by rules that have none.
func TestOffloadIsCompared(t *testing.T) {
	r := newRuleset(lb.IPv4, plan.Config{}, nil)
	have := r.state()
	if right, keep := r.compare(have); !right || !keep {
		t.Errorf("its own state: right %v, keep %v", right, keep)
	}
	have.offload = true
	if right, keep := r.compare(have); right || !keep {
		t.Errorf("with a flowtable: right %v, keep %v", right, keep)
	}
}
