package view

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

var began = time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)

// service makes a Service with one address that is announced.
func service(name string, change ...func(*lb.Service)) lb.Service {
	s := lb.Service{
		Key: lb.Key{Namespace: "shop", Name: name}, Type: lb.LoadBalancer, Created: began,
		Ingress: []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.10")}},
		Conditions: []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned},
			{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced}},
	}
	announced(lb.Announcement{Reason: lb.ReasonAnnounced, Owner: "n1", Protocol: "ARP", Interfaces: []string{"eth0"}})(&s)
	for _, f := range change {
		f(&s)
	}
	return s
}

// announced has the speakers say this of the first address.
func announced(a lb.Announcement) func(*lb.Service) {
	return func(s *lb.Service) {
		a.VIP = s.Ingress[0].Addr
		s.Announcements = lb.EncodeAnnouncements([]lb.Announcement{a})
	}
}

// condition replaces a condition; a false one is so for an hour.
func condition(kind string, status bool, reason lb.Reason, message string) func(*lb.Service) {
	return func(s *lb.Service) {
		var others []lb.Condition
		for _, c := range s.Conditions {
			if c.Type != kind {
				others = append(others, c)
			}
		}
		s.Conditions = others
		if reason != "" {
			s.Conditions = append(others, lb.Condition{Type: kind, Status: status, Reason: reason, Message: message})
		}
		if !status {
			s.FalseSince = map[string]time.Time{kind: began.Add(time.Hour)}
		}
	}
}

func TestProblemsOfServices(t *testing.T) {
	hour := began.Add(time.Hour)
	for name, test := range map[string]struct {
		change func(*lb.Service)
		want   string // reason, message and time
	}{
		"well":           {func(*lb.Service) {}, ""},
		"not processed":  {condition(lb.ConditionAssigned, false, "", ""), "Unheard the controller has not processed it yet 12:00"},
		"no address":     {condition(lb.ConditionAssigned, false, lb.ReasonPoolExhausted, "full"), "PoolExhausted full 13:00"},
		"no speaker":     {condition(lb.ConditionAnnounced, false, "", ""), "Unheard no speaker has reported on it yet 12:00"},
		"not announced":  {condition(lb.ConditionAnnounced, false, lb.ReasonNoBackends, "none"), "NoBackends none 13:00"},
		"contested":      {condition(lb.ConditionAnnounced, true, lb.ReasonContested, "00:11"), "Contested 00:11"},
		"headless":       {func(s *lb.Service) { s.Headless = true; s.Conditions = nil }, ""},
		"being deleted":  {func(s *lb.Service) { s.Deleting = true; s.Conditions = nil }, ""},
		"of mode Proxy":  {func(s *lb.Service) { s.Ingress[0].Mode = lb.IPModeProxy; s.Conditions = s.Conditions[:1] }, ""},
		"broken by hand": {func(s *lb.Service) { s.Announcements = "{" }, "Unheard annotation landfall.dev/announcements"},
	} {
		t.Run(name, func(t *testing.T) {
			s := New("")
			one := service("web", test.change)
			s.SetService(one.Key, one, true)
			got := ""
			for _, r := range s.Page(Query{Limit: 10}).Rows {
				if p := r.Problem; p != nil {
					got = fmt.Sprintf("%s %s", p.Reason, p.Message)
					if !p.Since.IsZero() {
						got += p.Since.Format(" 15:04")
					}
				}
			}
			if !strings.HasPrefix(got, test.want) || (test.want == "") != (got == "") {
				t.Errorf("%q, want %q", got, test.want)
			}
			if wrong := s.Overview(hour).Wrong; (wrong == 0) != (test.want == "") {
				t.Errorf("the overview counts %d problems", wrong)
			}
		})
	}
}

func TestRowsThatAQuerySelects(t *testing.T) {
	s := New("")
	s.SetFacts(Facts{Pools: map[string]lb.Pool{"lan": {Name: "lan", Ranges: []lb.Range{mustRange("192.0.2.0/24")}}}})
	for i := range 25 {
		one := service(fmt.Sprintf("web-%02d", i))
		if i == 3 {
			condition(lb.ConditionAnnounced, false, lb.ReasonNoBackends, "none")(&one)
			one.Announcements = ""
		}
		if i == 4 {
			announced(lb.Announcement{Reason: lb.ReasonAnnounced, Routes: []lb.RouteAnnouncement{
				{Peers: []string{"tor-1"}, Nodes: []string{"n2", "n3"}}}})(&one)
		}
		s.SetService(one.Key, one, true)
	}
	other := service("elsewhere", func(s *lb.Service) { s.Class = "other" })
	s.SetService(other.Key, other, true)
	for name, test := range map[string]struct {
		query Query
		want  string // total, offset, and the names of the rows
	}{
		"all":              {Query{Limit: 2}, "25 0 web-00 web-01"},
		"second page":      {Query{Offset: 2, Limit: 2}, "25 2 web-02 web-03"},
		"beyond the end":   {Query{Offset: 1000, Limit: 10}, "25 20 web-20 web-21 web-22 web-23 web-24"},
		"before the begin": {Query{Offset: -5, Limit: 1}, "25 0 web-00"},
		"by name":          {Query{Text: " WEB-07 ", Limit: 5}, "1 0 web-07"},
		"by namespace":     {Query{Text: "shop/web-1", Limit: 2}, "10 0 web-10 web-11"},
		"by reason":        {Query{Text: "nobackends", Limit: 5}, "1 0 web-03"},
		"by peer":          {Query{Text: "tor-1", Limit: 5}, "1 0 web-04"},
		"by address":       {Query{Text: "192.0.2.10", Limit: 1}, "25 0 web-00"},
		"by node":          {Query{Node: "n3", Limit: 5}, "1 0 web-04"},
		"by owner":         {Query{Node: "n1", Limit: 1}, "23 0 web-00"},
		"wrong":            {Query{Wrong: true, Limit: 5}, "1 0 web-03"},
		"none":             {Query{Text: "nothing", Limit: 5}, "0 0"},
	} {
		page := s.Page(test.query)
		got := fmt.Sprintf("%d %d", page.Total, page.Offset)
		for _, r := range page.Rows {
			got += " " + r.Name
			if len(r.Addresses) != 1 || r.Addresses[0].Pool != "lan" {
				t.Errorf("%s: addresses of %s: %+v", name, r.Name, r.Addresses)
			}
		}
		if got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

func mustRange(s string) lb.Range {
	r, err := lb.ParseRange(s)
	if err != nil {
		panic(err)
	}
	return r
}

func TestOverview(t *testing.T) {
	s := New("")
	pool := lb.Pool{Name: "lan", Ranges: []lb.Range{mustRange("192.0.2.0/29"), mustRange("2001:db8::/64")},
		Since: map[string]time.Time{"Exhausted": began.Add(time.Minute)},
		Status: lb.PoolStatus{AssignedIPv4: "3", AvailableIPv4: "4", AssignedIPv6: "0",
			AvailableIPv6:   "18446744073709551616",
			QuarantinedIPv4: "1",
			Conditions: []lb.Condition{{Type: lb.ConditionReady, Status: true, Reason: lb.ReasonPoolReady},
				{Type: "Exhausted", Status: true, Reason: lb.ReasonPoolExhausted, Message: "none is left"}}}}
	found := func(reason lb.Reason, at time.Duration, gone bool) Finding {
		return Finding{Node: "n1", Finding: lb.Find(reason, "words"), Gone: gone, Since: began, Last: began.Add(at)}
	}
	note := found(lb.ReasonMTUMismatch, 0, false)
	note.Note = true
	s.SetFacts(Facts{
		Pools: map[string]lb.Pool{"lan": pool, "new": {Name: "new", Created: began}},
		Nodes: map[string]lb.Node{"n1": {Name: "n1"}, "n2": {Name: "n2", Leaving: lb.ReasonNodeDrained, Cordoned: true}},
		Peers: map[string]lb.PeerSessions{"tor": {Name: "tor", Addr: netip.MustParseAddr("192.0.2.254"), PeerASN: 64512, BFD: true,
			Sessions: []lb.PeerSession{{Node: "n1", PeerNode: lb.PeerNode{State: "Established", Message: "BFD is Up"}},
				{Node: "n2", PeerNode: lb.PeerNode{State: "Idle", Reason: lb.ReasonNotEstablished}, Since: began.Add(2 * time.Minute)},
				{Node: "n3", PeerNode: lb.PeerNode{State: "Idle", Reason: lb.ReasonNotEstablished}, Since: began.Add(time.Minute)}}}},
		Findings: []Finding{found(lb.ReasonForwardingOff, 0, false), found(lb.ReasonConntrackFull, 0, false),
			found(lb.ReasonConntrackFull, 0, true), found(lb.ReasonARPNotStrict, -time.Hour, false), note},
	})
	well := service("web")
	routed := service("api", announced(lb.Announcement{Reason: lb.ReasonAnnounced, Routes: []lb.RouteAnnouncement{
		{Peers: []string{"tor"}, Nodes: []string{"n1", "n2"}, OtherNodes: 40}}}))
	down := service("old", condition(lb.ConditionAnnounced, false, lb.ReasonNoBackends, "no endpoint"))
	for _, one := range []lb.Service{well, routed, down} {
		s.SetService(one.Key, one, true)
	}
	want := Overview{
		Services: 3, Addresses: 3, Wrong: 5, Unnamed: 1, Reasons: map[lb.Reason]int{lb.ReasonNoBackends: 1},
		Problems: []Problem{
			{Kind: "IPAddressPool", Name: "lan", Reason: "PoolExhausted", Message: "none is left", Since: began.Add(time.Minute)},
			{Kind: "BGPPeer", Name: "tor", Node: "n2", MoreNodes: 1, Reason: "NotEstablished", Message: "Idle: not up yet",
				Since: began.Add(time.Minute)},
			{Kind: "IPAddressPool", Name: "new", Reason: "Unheard", Message: "the controller has not processed it yet", Since: began},
			{Kind: "Node", Name: "n1", Reason: "ForwardingOff", Message: "words", Since: began},
			{Kind: "Service", Namespace: "shop", Name: "old", Reason: "NoBackends", Message: "no endpoint", Since: began.Add(time.Hour)},
		},
		Pools: []Pool{
			{Name: "lan", Ready: true, Reason: "Ready", Families: []Usage{
				{Family: lb.IPv4, Used: "3", Free: "4", Quarantined: "1", UsedPart: 0.375, QuarantinedPart: 0.125},
				{Family: lb.IPv6, Used: "0", Free: "18446744073709551616", Quarantined: "0"}}},
			{Name: "new", Reason: "Unheard", Families: []Usage{}},
		},
		Nodes: []Node{
			{Name: "n1", Owned: 2, Routed: 1, Sessions: 1, Up: 1, Findings: 1},
			{Name: "n2", Routed: 1, Sessions: 1, Leaving: lb.ReasonNodeDrained, Cordoned: true},
		},
		Peers: []Peer{{Name: "tor", At: "192.0.2.254", ASN: 64512, BFD: true, Up: 1, Total: 3, Sessions: []Session{
			{Node: "n2", State: "Idle", Reason: "NotEstablished", Since: began.Add(2 * time.Minute)},
			{Node: "n3", State: "Idle", Reason: "NotEstablished", Since: began.Add(time.Minute)},
			{Node: "n1", State: "Established", Message: "BFD is Up"}}}},
	}
	if diff := cmp.Diff(want, s.Overview(began.Add(time.Minute))); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestOverviewIsBounded has every Service, session and node in trouble.
func TestOverviewIsBounded(t *testing.T) {
	s := New("")
	f := Facts{Peers: map[string]lb.PeerSessions{}}
	p := lb.PeerSessions{Name: "tor"}
	for i := range 500 {
		p.Sessions = append(p.Sessions, lb.PeerSession{Node: fmt.Sprint(i), PeerNode: lb.PeerNode{State: "Idle", Reason: "Why"}})
		one := service(fmt.Sprint(i), condition(lb.ConditionAnnounced, false, lb.ReasonNoBackends, "none"))
		s.SetService(one.Key, one, true)
	}
	f.Peers["tor"] = p
	s.SetFacts(f)
	o := s.Overview(began)
	if o.Wrong != 501 || len(o.Problems) != maxProblems || len(o.Peers[0].Sessions) != maxSessions || o.Peers[0].Total != 500 ||
		o.Reasons[lb.ReasonNoBackends] != 500 {
		t.Errorf("%d problems, %d listed, %d of %d sessions, reasons %v", o.Wrong, len(o.Problems), len(o.Peers[0].Sessions),
			o.Peers[0].Total, o.Reasons)
	}
}

// TestManyChangesEndAsOneLook has a State that is told of each change say what one says that sees only
// the end.
func TestManyChangesEndAsOneLook(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 0))
		s, all := New(""), map[lb.Key]lb.Service{}
		for range 100 {
			one := service(fmt.Sprint(random.IntN(12)), randomChange(random))
			gone := random.IntN(4) == 0
			if gone {
				delete(all, one.Key)
			} else {
				all[one.Key] = one
			}
			s.SetService(one.Key, one, !gone)
		}
		want := New("")
		want.SetServices(all)
		if diff := cmp.Diff(want.Overview(began), s.Overview(began)); diff != "" {
			t.Fatalf("seed %d: overview (-one look +many changes):\n%s", seed, diff)
		}
		if diff := cmp.Diff(want.Page(Query{Limit: 100}), s.Page(Query{Limit: 100}), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Fatalf("seed %d: rows (-one look +many changes):\n%s", seed, diff)
		}
		if len(want.owned) != len(s.owned) || len(want.routed) != len(s.routed) || len(want.reasons) != len(s.reasons) {
			t.Fatalf("seed %d: counts are left over: %v %v %v", seed, s.owned, s.routed, s.reasons)
		}
	}
}

func randomChange(random *rand.Rand) func(*lb.Service) {
	changes := []func(*lb.Service){
		func(*lb.Service) {},
		announced(lb.Announcement{Reason: lb.ReasonAnnounced, Owner: "n2", Protocol: "ARP"}),
		announced(lb.Announcement{Reason: lb.ReasonAnnounced, OtherNodes: 3, Routes: []lb.RouteAnnouncement{
			{Peers: []string{"a"}, Nodes: []string{"n1", "n2"}}, {Peers: []string{"b"}, Nodes: []string{"n2"}}}}),
		condition(lb.ConditionAnnounced, false, lb.ReasonNoBackends, "none"),
		condition(lb.ConditionAssigned, false, lb.ReasonNoPool, "none"),
		func(s *lb.Service) { s.Deleting = true },
		func(s *lb.Service) { s.Type = lb.ClusterIP },
		func(s *lb.Service) { s.Class = "other" },
	}
	return changes[random.IntN(len(changes))]
}

// TestTenantsTextIsBounded has a Service with as much in its annotation as a program keeps.
func TestTenantsTextIsBounded(t *testing.T) {
	var routes []lb.RouteAnnouncement
	for range 8 {
		routes = append(routes, lb.RouteAnnouncement{Peers: []string{strings.Repeat("a", 253)}, Nodes: []string{strings.Repeat("b", 253)}})
	}
	one := service("web", announced(lb.Announcement{Reason: lb.ReasonAnnounced, Routes: routes}))
	if r := newRow(one); len(r.text) > maxText {
		t.Errorf("a search looks at %d bytes", len(r.text))
	}
}

// BenchmarkChange has one of n Services change and the page be made anew: the sum must not grow with n
// but for the search.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 10_000} {
		s, f := benchState(n, 100)
		s.SetFacts(f)
		up, down := service("web-7"), service("web-7", condition(lb.ConditionAnnounced, false, lb.ReasonNoBackends, "none"))
		b.Run(fmt.Sprintf("services=%d/change", n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				one := up
				if i%2 == 0 {
					one = down
				}
				s.SetService(one.Key, one, true)
			}
		})
		b.Run(fmt.Sprintf("services=%d/overview", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.Overview(began)
			}
		})
		b.Run(fmt.Sprintf("services=%d/page", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.Page(Query{Text: "web-7", Limit: 50})
			}
		})
	}
}

// benchState has n Services, each announced over ARP and over BGP from eight of the nodes.
func benchState(n, nodes int) (*State, Facts) {
	s := New("")
	f := Facts{Nodes: map[string]lb.Node{}, Peers: map[string]lb.PeerSessions{}, Pools: map[string]lb.Pool{}}
	all := map[lb.Key]lb.Service{}
	for i := range nodes {
		name := fmt.Sprintf("node-%03d", i)
		f.Nodes[name] = lb.Node{Name: name}
	}
	for i := range n {
		a := lb.Announcement{Reason: lb.ReasonAnnounced, Owner: fmt.Sprintf("node-%03d", i%nodes), Protocol: "ARP",
			Routes: []lb.RouteAnnouncement{{Peers: []string{"tor-1", "tor-2"}, OtherNodes: nodes - 8}}}
		for j := range 8 {
			a.Routes[0].Nodes = append(a.Routes[0].Nodes, fmt.Sprintf("node-%03d", (i+j)%nodes))
		}
		one := service(fmt.Sprintf("web-%d", i), announced(a))
		all[one.Key] = one
	}
	s.SetServices(all)
	return s, f
}
