package contract

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

var (
	lan      = netip.MustParseAddr("172.26.236.180")
	routed   = netip.MustParseAddr("203.0.113.180")
	idle     = netip.MustParseAddr("172.26.236.181")
	idleTwin = netip.MustParseAddr("fd00:172:26:236::181")
	client   = netip.MustParseAddr("172.26.236.20")
	// Of the first Service.
	clusterIP, webPod = netip.MustParseAddr("10.96.0.7"), netip.MustParseAddr("192.168.177.20")
	began             = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
)

// Ports of them.
var (
	webTCP, webUDP = Port{"tcp", netip.AddrPortFrom(lan, 80)}, Port{"udp", netip.AddrPortFrom(lan, 80)}
	besideTCP      = Port{"tcp", netip.AddrPortFrom(lan, 81)}
	routedTCP      = Port{"tcp", netip.AddrPortFrom(routed, 80)}
	idleTCP        = Port{"tcp", netip.AddrPortFrom(idle, 80)}
	idleUDP, idle6 = Port{"udp", netip.AddrPortFrom(idle, 80)}, Port{"tcp", netip.AddrPortFrom(idleTwin, 80)}
)

// well is a state that nothing is wrong with: two Services on the LAN that share an address, one with policy Local
// behind the router, and one without pods.
func well() Snapshot {
	return Snapshot{
		Nodes:   []string{"n1", "n2"},
		Members: map[string][]string{"n1": {"n1", "n2"}, "n2": {"n1", "n2"}},
		Services: []Service{
			{Name: "web", App: "web", Share: "one", TCP: 80, UDP: 80, Addresses: []netip.Addr{lan}, Endpoints: []netip.Addr{webPod},
				Ready: map[string]int{"n1": 1, "n2": 1}, Announced: true, Reason: "Announced", Owners: map[netip.Addr]string{lan: "n1"}},
			{Name: "local", App: "local", Local: true, BGP: true, TCP: 80, Addresses: []netip.Addr{routed}, Ready: map[string]int{"n2": 1},
				Announced: true, Reason: "Announced", Health: map[string]int{"n1": 503, "n2": 200}},
			{Name: "idle", App: "idle", Reason: "NoBackends", TCP: 80, UDP: 80, Addresses: []netip.Addr{idle, idleTwin}, Ready: map[string]int{}},
			{Name: "beside", App: "beside", Share: "one", TCP: 81, Addresses: []netip.Addr{lan}, Ready: map[string]int{"n2": 1},
				Announced: true, Reason: "Announced", Owners: map[netip.Addr]string{lan: "n1"}},
		},
		Answering: map[netip.Addr][]string{lan: {"n1"}},
		Heard:     map[netip.Addr][]string{lan: {"n1"}},
		Routed:    map[netip.Addr][]string{routed: {"n2"}},
		Asked: map[Port]string{webTCP: "", webUDP: "", besideTCP: "", routedTCP: "", idleTCP: Refused, idleUDP: Refused,
			idle6: Refused, {"udp", idle6.To}: Refused},
		Expected:   map[string][]netip.Addr{"web": {lan}},
		ClusterIPs: []netip.Addr{clusterIP},
		Kernels: map[string]Kernel{
			"n1": {Named: []Port{webTCP, webUDP, besideTCP, idleTCP, addressOnly(lan), {"tcp", netip.AddrPortFrom(clusterIP, 80)}},
				Delivered: map[Port]bool{webTCP: true, webUDP: true, besideTCP: true},
				UDP:       []UDPFlow{{webUDP.To, webPod}, {webUDP.To, lan}}},
			"n2": {Delivered: map[Port]bool{routedTCP: true}},
		},
	}
}

// TestSettledClauses breaks one thing of a good state after the other; the clause that it is about notices.
func TestSettledClauses(t *testing.T) {
	if bad := Unsettled(well()); len(bad) > 0 {
		t.Fatalf("nothing is wrong, and %v", bad)
	}
	free := netip.MustParseAddr("172.26.236.199")
	named := func(p Port) func(*Snapshot) {
		return func(s *Snapshot) { s.Kernels["n2"] = Kernel{Named: []Port{p}, Delivered: s.Kernels["n2"].Delivered} }
	}
	for _, tc := range []struct {
		name, want string
		number     int
		change     func(*Snapshot)
	}{
		{"an agent does not answer", "everything can be seen", 0, func(s *Snapshot) { s.Unknown = []string{"speaker of n1"} }},
		{"a speaker is alone", "speakers see one another", 0, func(s *Snapshot) { s.Members["n1"] = []string{"n1"} }},
		{"two answer on the LAN", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { s.Heard[lan] = []string{"n1", "n2"} }},
		{"a stranger answers on the LAN", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { s.Heard[lan] = []string{"?02:00:00:00:00:01"} }},
		{"none answers", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { delete(s.Answering, lan); delete(s.Heard, lan) }},
		{"the router knows no way", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { delete(s.Routed, routed) }},
		{"a request fails", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { s.Asked[webTCP] = "timeout" }},
		{"a request over UDP fails", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { s.Asked[webUDP] = "timeout" }},
		{"a request fails to another port of an address that answers", "what has ready endpoints is announced by one, and answers", 1,
			func(s *Snapshot) { s.Asked[besideTCP] = "timeout" }},
		{"nobody asked", "what has ready endpoints is announced by one, and answers", 1, func(s *Snapshot) { delete(s.Asked, webTCP) }},
		{"announced without pods", "what has no ready endpoints is announced by none", 1,
			func(s *Snapshot) { s.Answering[s.Services[2].Addresses[0]] = []string{"n1"} }},
		{"Local from a node without a pod", "Local is announced where it has pods", 2,
			func(s *Snapshot) { s.Routed[routed] = []string{"n1", "n2"} }},
		{"an announcer has no rules for a port", "a node that announces has the rules", 3,
			func(s *Snapshot) { delete(s.Kernels["n1"].Delivered, besideTCP) }},
		{"the router leads to a node without rules", "a node that announces has the rules", 3,
			func(s *Snapshot) { delete(s.Kernels["n2"].Delivered, routedTCP) }},
		{"rules are left of a Service", "rules go with their Service", 3, named(Port{"tcp", netip.AddrPortFrom(free, 80)})},
		{"rules are left of a port", "rules go with their Service", 3, named(Port{"tcp", netip.AddrPortFrom(lan, 82)})},
		{"an address is left in a set", "rules go with their Service", 3, named(addressOnly(free))},
		{"rules are left of a cluster IP", "rules go with their Service", 3,
			named(Port{"tcp", netip.AddrPortFrom(clusterIP.Next(), 80)})},
		{"a flow leads to a pod that is gone", "UDP flows end with their backend", 9,
			func(s *Snapshot) { s.Services[0].Endpoints = nil }},
		{"a health port lies", "the health port tells the truth", 4, func(s *Snapshot) { s.Services[1].Health["n1"] = 200 }},
		{"a health port is silent", "the health port tells the truth", 4, func(s *Snapshot) { s.Services[1].Health["n2"] = 0 }},
		{"an address changed", "holders keep their addresses", 8, func(s *Snapshot) { s.Expected["web"] = []netip.Addr{free} }},
		{"an address was taken", "holders keep their addresses", 8, func(s *Snapshot) { s.Services[2].Addresses = nil }},
		{"silence without pods", "without endpoints connections are refused", 9,
			func(s *Snapshot) { s.Asked[idleTCP] = "i/o timeout" }},
		{"silence of one family without pods", "without endpoints connections are refused", 9,
			func(s *Snapshot) { s.Asked[idle6] = "i/o timeout" }},
		{"silence over UDP without pods", "without endpoints connections are refused", 9,
			func(s *Snapshot) { s.Asked[idleUDP] = "i/o timeout" }},
		{"an answer without pods", "without endpoints connections are refused", 9, func(s *Snapshot) { s.Asked[idleTCP] = "" }},
		{"a free address is answered for", "free addresses are silent", 9, func(s *Snapshot) { s.Heard[free] = []string{"n1"} }},
		{"a free address is routed", "free addresses are silent", 9, func(s *Snapshot) { s.Routed[free] = []string{"n1"} }},
		{"the status is false", "the status says what is", 10, func(s *Snapshot) { s.Services[0].Announced = false }},
		{"the status is true in vain", "the status says what is", 10, func(s *Snapshot) { s.Services[2].Announced = true }},
		{"the status gives another reason", "the status says why", 10, func(s *Snapshot) { s.Services[2].Reason = "NoOwner" }},
		{"the status gives no reason", "the status says why", 10, func(s *Snapshot) { s.Services[0].Reason = "" }},
		{"the status names another", "the status says what is", 10, func(s *Snapshot) { s.Services[0].Owners[lan] = "n2" }},
	} {
		s := well()
		tc.change(&s)
		bad := Unsettled(s)
		if !slices.ContainsFunc(bad, func(v Violation) bool { return v.Name == tc.want && v.Clause == tc.number }) {
			t.Errorf("%s: %v, want %q", tc.name, bad, tc.want)
		}
	}
}

// calm is a calm round in which nothing was lost, with a drain and, later, a speaker that was killed.
func calm() Evidence {
	at := func(seconds int) time.Time { return began.Add(time.Duration(seconds) * time.Second) }
	e := Evidence{Round: story.Round{Number: 3, Calm: true}, Settled: well()}
	e.Spans = []Span{
		{Event: story.Event{ID: 1, Kind: story.AddService, Service: "churn-1"}, Began: at(0), Ended: at(1)},
		{Event: story.Event{ID: 2, Kind: story.DrainLabel, Node: "n1"}, Began: at(10), Ended: at(12)},
		{Event: story.Event{ID: 3, Kind: story.Kill, Node: "n1", Program: "speaker"}, Began: at(20), Ended: at(21),
			Back: time.Second, OwnedBefore: []netip.Addr{lan}},
		{Event: story.Event{ID: 4, Kind: story.StopAPI}, Began: at(30), Ended: at(31)},
		{Event: story.Event{ID: 5, Kind: story.HungProxy, Nodes: []string{"n2"}}, Began: at(40), Ended: at(41)},
		{Event: story.Event{ID: 6, Kind: story.RollPod, Service: "web"}, Began: at(50), Ended: at(51), Gone: []string{"web-0"}},
		{Event: story.Event{ID: 7, Kind: story.ShiftClock, Node: "n1", By: time.Hour}, Began: at(60), Ended: at(61)},
	}
	for i := range 65 {
		e.Samples = append(e.Samples,
			Sample{Service: "local", Target: netip.AddrPortFrom(routed, 80), Client: client, Source: client, App: "local", Wanted: "local", Local: true, Pod: "local-0",
				Began: at(i), Ended: at(i)},
			Sample{Service: "web", Target: netip.AddrPortFrom(lan, 80), Client: client, App: "web", Wanted: "web", Pod: "web-0", Began: at(i), Ended: at(i)})
	}
	e.Flows = []Flow{{Service: "web", Pod: "web-0", Began: at(0), Asked: at(50), Broke: at(51), Err: "reset"},
		{Service: "web", Pod: "web-1", Began: at(0), Asked: at(54)}}
	e.Holders = []Holder{{Seen: at(1), Service: "web", Address: lan}, {Seen: at(1), Service: "local", Address: routed},
		{Seen: at(2), Service: "web", Address: lan}}
	return e
}

// affine gives the second Service session affinity.
func affine(e *Evidence) {
	for i := range e.Samples {
		e.Samples[i].Affine = e.Samples[i].Service == "web"
	}
}

func TestSeenClauses(t *testing.T) {
	if bad := Judge(calm()); len(bad) > 0 {
		t.Fatalf("nothing is wrong, and %v", bad)
	}
	lost := func(second int) func(*Evidence) {
		return func(e *Evidence) { e.Samples[2*second].Err = "timeout" }
	}
	for _, tc := range []struct {
		name, want string
		number     int
		change     func(*Evidence)
	}{
		{"a loss after churn alone", "neighbors and churn cost nobody", 11, lost(5)},
		{"a loss in a drain", "planned changes lose nothing", 5, lost(11)},
		{"a loss in a restart", "restarts lose nothing", 6, lost(22)},
		{"a loss without the API server", "nothing is lost without the API server", 7, lost(33)},
		{"a loss when a clock is set", "nothing is lost when a clock is set", 7, lost(62)},
		{"a loss while a proxy hangs", "what is announced answers while proxies hang", 1, lost(42)},
		{"a flow breaks in a drain", "planned changes lose nothing", 5, func(e *Evidence) {
			e.Flows[1].Asked, e.Flows[1].Broke = began.Add(11*time.Second), began.Add(21*time.Second)
		}},
		{"a speaker loses its address", "a speaker that is back in time keeps its addresses", 6,
			func(e *Evidence) { e.Spans[2].Lost = []netip.Addr{lan} }},
		{"a client's address is lost", "Local keeps the client's address", 2,
			func(e *Evidence) { e.Samples[0].Source = netip.MustParseAddr("172.26.236.177") }},
		{"a client's address is lost in direct forwarding", "direct forwarding keeps the client's address", 2,
			func(e *Evidence) { e.Samples[1].Direct = true }},
		{"affinity is lost beside churn", "a client with session affinity keeps its pod", 6, func(e *Evidence) {
			affine(e)
			e.Samples[2*10+1].Pod = "web-1" // the last before the drain
		}},
		{"a node that leaves attracts traffic", "the health port of a node that leaves says so", 4,
			func(e *Evidence) { e.Spans[1].Attractive = []string{"local"} }},
		{"rules are gone before the announcement", "rules outlive announcements", 3,
			func(e *Evidence) { e.Spans[0].Bare = []string{"n1"} }},
		{"two holders", "an address has one holder", 8,
			func(e *Evidence) { e.Holders[1].Address = lan }},
		{"two holders of different keys", "an address has one holder", 8,
			func(e *Evidence) { e.Holders[0].Share, e.Holders[1].Share, e.Holders[1].Address = "a", "b", lan }},
		{"another Service answers", "the right Service answers", 8, func(e *Evidence) { e.Samples[1].App = "local" }},
		{"a state that is not settled", "the status says what is", 10,
			func(e *Evidence) { e.Settled.Services[0].Announced = false }},
	} {
		e := calm()
		tc.change(&e)
		bad := Judge(e)
		if len(bad) != 1 || bad[0].Name != tc.want || bad[0].Clause != tc.number || bad[0].Round != 3 {
			t.Errorf("%s: %v, want one of %q", tc.name, bad, tc.want)
		}
	}
	// The first requests overlap, and either may be the one that is remembered.
	beside := calm()
	affine(&beside)
	for _, later := range []time.Duration{time.Millisecond, time.Second / 2} {
		e, other := beside, beside.Samples[1]
		other.Pod, other.Ended = "web-1", other.Began.Add(later)
		e.Samples = slices.Insert(slices.Clone(e.Samples), 2, other)
		e.Samples[1].Ended = other.Began.Add(time.Second / 4)
		if bad := Judge(e); len(bad) > 0 {
			t.Errorf("affinity beside the first requests, of which one ends after %s: %v", later, bad)
		}
	}
	// So may be a connection that was opened beside them.
	flow := Flow{Service: "web", Target: netip.AddrPortFrom(lan, 80), Client: client, Pod: "web-1"}
	for _, tc := range []struct {
		began time.Time
		want  int
	}{{beside.Samples[1].Began, 0}, {beside.Samples[1].Began.Add(time.Minute), 1}} {
		e := beside
		e.Samples = slices.Clone(e.Samples)
		for i := 3; i < len(e.Samples); i += 2 {
			e.Samples[i].Pod = "web-1"
		}
		flow.Began = tc.began
		e.Flows = append(slices.Clone(e.Flows), flow)
		if bad := Judge(e); len(bad) != tc.want {
			t.Errorf("affinity beside a connection that began at %s: %v", tc.began, bad)
		}
	}
	moved := calm()
	affine(&moved)
	for i := 2*15 + 1; i < len(moved.Samples); i += 2 { // the node is drained meanwhile
		moved.Samples[i].Pod = "web-1"
	}
	if bad := Judge(moved); len(bad) > 0 {
		t.Errorf("affinity on another node: %v", bad)
	}
	relayed := calm()
	relayed.Flows[1] = Flow{Service: "web", Pod: "web-1", Relayed: true, Began: began, Asked: began, Broke: began.Add(time.Second)}
	if bad := Judge(relayed); len(bad) != 1 {
		t.Errorf("a relayed connection broke: %v", bad)
	}
	relayed.Spans = append(relayed.Spans, Span{Event: story.Event{Kind: story.Stop, Program: "relay"}, Began: began.Add(time.Hour)})
	if bad := Judge(relayed); len(bad) > 0 {
		t.Errorf("a relayed connection ended with a relay: %v", bad)
	}
	shared := calm()
	shared.Holders[0].Share, shared.Holders[1].Share, shared.Holders[1].Address = "a", "a", lan
	if bad := Judge(shared); len(bad) > 0 {
		t.Errorf("an address that is shared: %v", bad)
	}
	late := calm()
	late.Spans[2].Lost, late.Spans[2].Back = []netip.Addr{lan}, restartHold
	if bad := Judge(late); len(bad) > 0 {
		t.Errorf("a speaker that came too late: %v", bad)
	}
}

// TestStorms: losses are no violations in a storm; what a node takes that was away alone is one.
func TestStorms(t *testing.T) {
	e := calm()
	e.Round.Calm = false
	e.Samples[10].Err = "timeout"
	cut := Span{Event: story.Event{ID: 9, Kind: story.Cut, Node: "n2"}, Began: began, Ended: began, Took: []netip.Addr{lan}}
	for _, tc := range []struct {
		name  string
		spans []Span
		want  int
	}{
		{"it took what it had not", []Span{cut}, 1},
		{"beside the API server", []Span{cut, {Event: story.Event{Kind: story.StormAPI}}}, 1},
		{"beside another node", []Span{cut, {Event: story.Event{Kind: story.Cut, Node: "n1"}}}, 0},
		{"beside another Service", []Span{cut, {Event: story.Event{Kind: story.Unready, Service: "idle"}}}, 1},
		{"of a Service that came meanwhile", []Span{{Event: cut.Event, Took: []netip.Addr{routed}}}, 0},
		{"of a Service that became ready meanwhile", []Span{cut, {Event: story.Event{Kind: story.Ready, Service: "web"}}}, 0},
		{"its own", []Span{{Event: cut.Event, Took: cut.Took, OwnedBefore: cut.Took}}, 0},
	} {
		e.Spans = tc.spans
		if bad := Judge(e); len(bad) != tc.want || tc.want > 0 && bad[0].Name != "a returning node takes nothing" {
			t.Errorf("%s: %v", tc.name, bad)
		}
	}
}
