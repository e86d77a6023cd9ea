package contract

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

// A node is cut off alone for 17 seconds from the third on. Clients ask once a second.
func TestABrokenNode(t *testing.T) {
	const others, own = "what a broken node served is answered by others", "a fault of one node costs only what it serves"
	at := func(second int) time.Time { return began.Add(time.Duration(second) * time.Second) }
	spread, pinned, anycast := netip.MustParseAddr("172.26.236.182"), netip.MustParseAddr("172.26.236.183"),
		netip.MustParseAddr("203.0.113.181")
	all := []Service{
		{Name: "spread", App: "spread", Addresses: []netip.Addr{spread}, Ready: map[string]int{"n1": 1, "n2": 1}},
		{Name: "pinned", App: "pinned", Local: true, Addresses: []netip.Addr{pinned}, Ready: map[string]int{"n1": 1, "n2": 1}},
		{Name: "anycast", App: "anycast", BGP: true, Addresses: []netip.Addr{anycast}, Ready: map[string]int{"n1": 1, "n3": 1}},
		{Name: "routed", App: "routed", BGP: true, Local: true, Addresses: []netip.Addr{routed}, Ready: map[string]int{"n1": 1, "n3": 1}},
	}
	cut := Span{Event: story.Event{ID: 9, Kind: story.Cut, Node: "n2", For: 17 * time.Second}, Began: at(3), From: at(3), Until: at(20),
		Ended: at(20), Known: true}
	of := func(kind story.Kind) Span { s := cut; s.Kind = kind; return s }
	churn := Span{Event: story.Event{ID: 8, Kind: story.AddService, Service: "churn-1"}, Began: at(2), Ended: at(2)}
	owning := func(s Span, addrs ...netip.Addr) Span { s.OwnedBefore = addrs; return s }
	for _, tc := range []struct {
		name    string
		calm    bool
		spans   []Span
		lost    string // of which Service
		from    int
		until   int
		change  func([]Service)
		want    string // of which clause; "" for none
		violate int
	}{
		{name: "others take over", spans: []Span{owning(cut, pinned)}, lost: "pinned", from: 3, until: 12},
		{name: "others take over, beside churn", spans: []Span{churn, owning(cut, pinned)}, lost: "pinned", from: 3, until: 14, want: others, violate: 1},
		{name: "nobody takes over", spans: []Span{owning(cut, pinned)}, lost: "pinned", from: 3, until: 30, want: others, violate: 6},
		{name: "nobody takes over from a crash", spans: []Span{owning(of(story.Crash), pinned)}, lost: "pinned", from: 3, until: 30, want: others, violate: 6},
		{name: "nobody takes over without a carrier", spans: []Span{owning(of(story.Unplug), pinned)}, lost: "pinned", from: 3, until: 30, want: others, violate: 6},
		{name: "nobody takes over from a frozen speaker", spans: []Span{owning(of(story.FreezeSpeaker), pinned)}, lost: "pinned", from: 3, until: 30, want: others, violate: 6},
		{name: "a pod of a dead node is asked on", spans: []Span{cut}, lost: "spread", from: 3, until: 30, want: others, violate: 6},
		{name: "a pod of a dead node is asked at first", spans: []Span{cut}, lost: "spread", from: 3, until: 12},
		{name: "lost when it is back", spans: []Span{owning(cut, pinned)}, lost: "pinned", from: 20, until: 22},
		{name: "no other has a pod", spans: []Span{owning(cut, pinned)}, lost: "pinned", from: 3, until: 30,
			change: func(all []Service) { all[1].Ready = map[string]int{"n2": 1} }},
		{name: "beside another fault", spans: []Span{owning(cut, pinned), {Event: story.Event{ID: 10, Kind: story.StormAPI}}}, lost: "pinned", from: 3, until: 30},
		{name: "of another kind", spans: []Span{owning(of(story.Lossy), pinned)}, lost: "pinned", from: 3, until: 30},
		{name: "a planned change", calm: true, spans: []Span{owning(of(story.DrainLabel), pinned)}, lost: "anycast", from: 30, until: 30},
		{name: "it is unknown what the node owned", spans: []Span{{Event: cut.Event, Began: at(3), From: at(3), Until: at(20)}}, lost: "pinned", from: 3, until: 30},

		{name: "another's is lost at once", spans: []Span{cut}, lost: "pinned", from: 4, until: 4, want: own, violate: 1},
		{name: "another's is lost when the node is back", spans: []Span{cut}, lost: "pinned", from: 20, until: 21, want: own, violate: 2},
		{name: "another's is lost, of a Service without a pod there", spans: []Span{cut}, lost: "spread", from: 4, until: 4, want: own, violate: 1,
			change: func(all []Service) { all[0].Ready = map[string]int{"n1": 2} }},
		{name: "another's is lost while packets are lost", spans: []Span{of(story.Lossy)}, lost: "pinned", from: 4, until: 4, want: own, violate: 1},
		{name: "another's is lost while the API server is away", spans: []Span{{Event: story.Event{ID: 9, Kind: story.StormAPI}, Began: at(3), Known: true}}, lost: "pinned", from: 4, until: 4},
		{name: "the router leads to it", spans: []Span{cut}, lost: "anycast", from: 3, until: 30},
		{name: "the router leads to others", spans: []Span{cut}, lost: "routed", from: 5, until: 5, want: own, violate: 1},
		{name: "the router leads to it, with policy Local", spans: []Span{cut}, lost: "routed", from: 3, until: 30,
			change: func(all []Service) { all[3].Ready = map[string]int{"n2": 1} }},
	} {
		e := Evidence{Round: story.Round{Number: 2, Calm: tc.calm}, Spans: tc.spans}
		for _, s := range tc.spans {
			e.Round.Events = append(e.Round.Events, s.Event)
		}
		services := slices.Clone(all)
		if tc.change != nil {
			tc.change(services)
		}
		e.Settled.Services = services
		for _, svc := range services {
			for second := range 31 {
				s := Sample{Service: svc.Name, Wanted: svc.App, App: svc.App, Target: netip.AddrPortFrom(svc.Addresses[0], 80),
					Began: at(second), Ended: at(second)}
				if svc.Name == tc.lost && tc.from <= second && second <= tc.until {
					s.Err, s.Ended = "timeout", at(second+10)
				}
				e.Samples = append(e.Samples, s)
			}
		}
		got := map[string]int{}
		for _, c := range Clauses() {
			if c.Name == others || c.Name == own {
				if n := len(c.Seen(e)); n > 0 {
					got[c.Name] = n
				}
			}
		}
		if len(got) != min(tc.violate, 1) || got[tc.want] != tc.violate {
			t.Errorf("%s: %v, want %d of %q", tc.name, got, tc.violate, tc.want)
		}
	}
}
