package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// fakeRequests is told what to write.
type fakeRequests struct {
	wanted map[lb.Key]plan.ConditionWrite
	told   int
}

func (f *fakeRequests) Set(wanted map[lb.Key]plan.ConditionWrite) {
	f.wanted, f.told = wanted, f.told+1
}

// A scheduler that the mode does not have becomes a condition of the Service, of which one node takes care.
func TestContract10NotAsRequestedIsACondition(t *testing.T) {
	b, requests := newBench(t), &fakeRequests{}
	b.to.requests, b.mode = requests, modeIptables
	b.synced()
	there := lb.Node{Name: "there", Addresses: []netip.Addr{netip.MustParseAddr("172.31.0.2")}}
	b.nodes.Set("there", there)
	b.put("web", "198.51.100.1", "10.200.1.1")
	ask := func(scheduler string, shown lb.Condition) {
		svc, _ := b.services.Get(key("web"))
		svc.Scheduler, svc.AsRequested = scheduler, shown
		b.services.Set(key("web"), svc)
		b.mark(key("web"))
		b.runAlone()
	}
	expect := func(what, want string) {
		t.Helper()
		got := "nothing"
		if w, ok := requests.wanted[key("web")]; ok {
			got = fmt.Sprint(w.Want.Type, " ", w.Want.Status, " ", w.Want.Reason, " ", w.Want.Message)
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s: to write %q, want %q", what, got, want)
		}
	}
	b.run()
	expect("with no request", "nothing")
	ask("lc", lb.Condition{})
	const text = `here: annotation landfall.dev/scheduler: "lc" needs a proxy in nftables mode; in iptables mode ` +
		"connections are spread at random"
	expect("a scheduler of the other mode", "landfall.dev/AsRequested false SchedulerIgnored "+text)
	shown, told := requests.wanted[key("web")].Want, requests.told
	ask("lc", shown)
	expect("once it is shown", "nothing")
	b.run()
	b.run()
	if requests.told != told+1 {
		t.Errorf("told %d times, want once", requests.told-told)
	}
	ask("", shown)
	expect("with no request any more", " false")
	other := shown
	other.Message = "there: no lc"
	ask("lc", other)
	expect("what another node says", "nothing")
	b.nodes.Delete("there")
	b.nodesChanged.Store(true)
	b.run()
	expect("once that node is gone", "landfall.dev/AsRequested false SchedulerIgnored here: ")
	b.delete("web")
	b.run()
	expect("once the Service is gone", "nothing")
	if n := len(b.requests.concerned); n > 0 {
		t.Errorf("%d Services concern it", n)
	}
}
