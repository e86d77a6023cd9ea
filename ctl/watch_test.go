package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// announcedTo returns a Service whose VIPs are announced so.
func announcedTo(announcements string, conditions ...lb.Condition) lb.Service {
	return lb.Service{Type: lb.LoadBalancer, Ingress: []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.10")}},
		Conditions: conditions, Announcements: `{"version":1,"vips":[` + announcements + `]}`}
}

func lines(changes []change) []string {
	var all []string
	for _, c := range changes {
		all = append(all, c.String())
	}
	return all
}

func TestServiceChanges(t *testing.T) {
	const onN1 = `{"vip":"192.0.2.10","reason":"Announced","owner":"n1","protocol":"ARP"}`
	const onN2 = `{"vip":"192.0.2.10","reason":"Announced","owner":"n2","protocol":"ARP"}`
	const nowhere = `{"vip":"192.0.2.10","reason":"NoBackends"}`
	const routed = `{"vip":"192.0.2.10","reason":"Announced","routes":[{"peers":["tor"],"nodes":["n1","n2"],"otherNodes":3}]}`
	assigned := lb.Condition{Type: lb.ConditionAssigned, Status: true, Reason: "Assigned"}
	waits := lb.Condition{Type: lb.ConditionAssigned, Reason: lb.ReasonPoolExhausted, Message: "pool lan is full"}
	silent := lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoBackends, Message: "no endpoint"}
	well := lb.Condition{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced, Message: "from n1"}
	for name, test := range map[string]struct {
		before, now lb.Service
		want        []string
	}{
		"nothing":          {announcedTo(onN1, well), announcedTo(onN1, well), nil},
		"no load balancer": {lb.Service{}, lb.Service{Type: "ClusterIP", Ingress: announcedTo("").Ingress}, nil},
		"new": {lb.Service{}, announcedTo(onN1, assigned, well), []string{
			"Service shop/web: address: none → 192.0.2.10", "Service shop/web: assigned: none → Assigned",
			"Service shop/web: owner 192.0.2.10: none → n1 (Announced)"}},
		"waits": {announcedTo(""), lb.Service{Type: lb.LoadBalancer, Conditions: []lb.Condition{waits}}, []string{
			"Service shop/web: address: 192.0.2.10 → none",
			"Service shop/web: assigned: none → PoolExhausted: pool lan is full"}},
		"moves": {announcedTo(onN1), announcedTo(onN2), []string{"Service shop/web: owner 192.0.2.10: n1 → n2 (Announced)"}},
		"silent": {announcedTo(onN1, well), announcedTo(nowhere, silent), []string{
			"Service shop/web: owner 192.0.2.10: n1 → none (NoBackends): no endpoint"}},
		"another reason": {announcedTo(`{"vip":"192.0.2.10","reason":"NoInterface"}`), announcedTo(nowhere, silent), []string{
			"Service shop/web: announced 192.0.2.10: NoInterface → NoBackends: no endpoint"}},
		"routes": {announcedTo(onN1), announcedTo(routed), []string{"Service shop/web: owner 192.0.2.10: n1 → none (Announced)",
			"Service shop/web: routes 192.0.2.10: none → n1, n2, 3 more to tor (Announced)"}},
		"annotation is broken": {lb.Service{Type: lb.LoadBalancer, Announcements: "{", Conditions: []lb.Condition{well}},
			lb.Service{Type: lb.LoadBalancer, Announcements: "{", Conditions: []lb.Condition{silent}},
			[]string{"Service shop/web: announced: Announced → NoBackends: no endpoint"}},
		"deleted": {announcedTo(onN1, assigned, well), lb.Service{}, []string{"Service shop/web: address: 192.0.2.10 → none",
			"Service shop/web: owner 192.0.2.10: n1 → none"}},
	} {
		if got := lines(serviceChanges(lb.Key{Namespace: "shop", Name: "web"}, test.before, test.now)); !slices.Equal(got,
			test.want) {
			t.Errorf("%s:\n%s\nwant\n%s", name, strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}

func TestOtherChanges(t *testing.T) {
	up := lb.Peer{Status: map[string]lb.PeerNode{"n1": {State: "Established"}, "n2": {State: "Established"}}}
	down := lb.Peer{Status: map[string]lb.PeerNode{"n1": {State: "Active", Reason: lb.ReasonNotEstablished,
		Message: "connection refused"}, "n2": {State: "Established"}}}
	pool := func(status bool, reason lb.Reason) lb.Pool {
		return lb.Pool{Status: lb.PoolStatus{Conditions: []lb.Condition{{Type: lb.ConditionReady, Status: status, Reason: reason}}}}
	}
	found := kube.NodeFinding{Node: "n1", Finding: lb.Find(lb.ReasonForwardingOff, "ip_forward is 0")}
	again := found
	again.Last = again.Last.Add(time.Hour)
	gone := found
	gone.Gone = true
	for name, test := range map[string]struct {
		got  []change
		want string
	}{
		"session": {peerChanges("tor", up, down),
			"BGPPeer tor: session from n1: Established → Active (NotEstablished): connection refused"},
		"new session":  {peerChanges("tor", lb.Peer{}, lb.Peer{Status: map[string]lb.PeerNode{"n1": {State: "Idle"}}}), "BGPPeer tor: session from n1: none → Idle"},
		"same session": {peerChanges("tor", up, up), ""},
		"pool":         {poolChanges("lan", pool(true, "Ready"), pool(false, "Overlap")), "IPAddressPool lan: ready: Ready → Overlap"},
		"drained":      {nodeChanges("n1", lb.Node{}, lb.Node{Leaving: lb.ReasonNodeDrained}), "Node n1: drain: none → NodeDrained"},
		"found":        {findingChanges("e", kube.NodeFinding{}, found), "Node n1: finding: none → ForwardingOff: ip_forward is 0"},
		"mended":       {findingChanges("e", found, gone), "Node n1: finding: ForwardingOff → none: ip_forward is 0"},
		"found twice":  {findingChanges("e", found, again), ""},
		"another's":    {findingChanges("e", kube.NodeFinding{}, kube.NodeFinding{}), ""},
	} {
		if got := strings.Join(lines(test.got), "\n"); got != test.want {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}

// TestWatcher shows what changes after the first list, also while the API server is away, once.
func TestWatcher(t *testing.T) {
	nodes := kubetest.NewTable[string, lb.Node]()
	nodes.Set("n1", lb.Node{Name: "n1"})
	nodes.SetSynced(false)
	var shown []string
	failure := error(nil)
	w := &watcher{poked: make(chan struct{}, 1), begun: func(what string, n int) { shown = append(shown, fmt.Sprint(n, " ", what)) },
		now:  func() time.Time { return time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC) },
		show: func(c change) error { shown = append(shown, c.String()); return failure }}
	follow(w, "Nodes", nodeChanges, func(changed func(string)) table[string, lb.Node] {
		nodes.OnChange(changed)
		return nodes
	}, strings.Compare)
	look := func(want ...string) {
		t.Helper()
		shown = nil
		if err := w.kinds[0](); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(shown, want) {
			t.Errorf("%q, want %q", shown, want)
		}
	}
	look() // no list yet
	nodes.Set("n2", lb.Node{Name: "n2", Leaving: lb.ReasonNodeDrained})
	nodes.SetSynced(true)
	look("2 Nodes")
	look()
	nodes.Set("n2", lb.Node{Name: "n2"})
	nodes.Set("n1", lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained})
	look("Node n1: drain: none → NodeDrained", "Node n2: drain: NodeDrained → none")
	nodes.Delete("n1")
	look("Node n1: drain: NodeDrained → none")
	nodes.Set("n1", lb.Node{Name: "n1"})
	look()
	nodes.Set("n1", lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained})
	failure = errors.New("broken pipe")
	if err := w.run(t.Context()); !errors.Is(err, failure) {
		t.Errorf("output is gone: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.run(ctx); err != nil {
		t.Errorf("interrupted: %v", err)
	}
}

func TestWriteChange(t *testing.T) {
	c := change{Time: time.Date(2026, 5, 1, 12, 0, 3, 0, time.UTC), Kind: "Node", Name: "n1", What: "drain", To: "NodeDrained"}
	for format, want := range map[string]string{
		"":     "12:00:03  Node n1: drain: none → NodeDrained\n",
		"json": `{"time":"2026-05-01T12:00:03Z","kind":"Node","name":"n1","what":"drain","to":"NodeDrained"}` + "\n",
		"yaml": "---\nkind: Node\nname: n1\ntime: \"2026-05-01T12:00:03Z\"\nto: NodeDrained\nwhat: drain\n",
	} {
		var out strings.Builder
		if err := writeChange(&out, format, c); err != nil || out.String() != want {
			t.Errorf("%v %q, want %q", err, out.String(), want)
		}
	}
}
