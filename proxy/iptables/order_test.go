package iptables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Each table changes at once, but not both together. In between, no connection may meet silence: it
// is delivered, as before or as after, or refused.
func TestContract9NoSilenceBetweenTheTables(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	nobody := []cases.Backend{}
	ranged := func(w cases.World, s *lb.Service) { s.SourceRanges = []netip.Prefix{cases.Host(w.Outside)} }
	states := map[string]cases.Case{
		"endpoints":    {},
		"no endpoints": {Backends: nobody},
		"terminating":  {Backends: []cases.Backend{{At: "local", Serving: true, Terminating: true}}},
		"ranges":       {Service: ranged},
		"none, ranges": {Service: ranged, Backends: nobody},
	}
	for from, before := range states {
		for to, after := range states {
			for _, at := range []string{"vip", "cluster", "nodeport", "external"} {
				k := newFakeKernel()
				a := newActor(map[lb.Family]Kernel{lb.IPv4: k}, seedConfig)
				service, config := before.Plan(w)
				a.Configure(config)
				a.Set(plans(service))
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				recorder := &spy{Kernel: k}
				a.families[0].kernel = recorder
				now, next := k.tables["nat"], k.tables["filter"]
				service, _ = after.Plan(w)
				a.Set(plans(service))
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				for section := range strings.SplitAfterSeq(strings.Join(recorder.writes, ""), "COMMIT\n") {
					lines := strings.Split(strings.TrimSpace(section), "\n")
					var err error
					switch lines[0] {
					case "*nat":
						now, err = change(now, lines[1:len(lines)-1])
					case "*filter":
						next, err = change(next, lines[1:len(lines)-1])
					}
					if err != nil {
						t.Fatal(err)
					}
					walk := walker{t: t, rules: tables{nat: now, filter: next}, local: []netip.Addr{w.Node}}
					ends, _ := walk.fate(packet{
						src: netip.AddrPortFrom(w.Outside, 40000), dst: cases.Case{To: at}.Destination(w), in: "eth0", protocol: lb.TCP,
					})
					if slices.Contains(ends, "none") || slices.Contains(ends, "drop") || len(ends) == 0 {
						t.Errorf("from %s to %s, at %s: ends at %v after\n%s", from, to, at, ends, section)
					}
				}
			}
		}
	}
}
