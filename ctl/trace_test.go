package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

func end(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func TestParseDestination(t *testing.T) {
	for _, test := range []struct {
		text string
		want destination
		bad  string
	}{
		{"192.0.2.10:80", destination{end: end("192.0.2.10:80")}, ""},
		{"192.0.2.10", destination{end: end("192.0.2.10:0")}, ""},
		{"192.0.2.10:53/udp", destination{end: end("192.0.2.10:53"), protocol: lb.UDP}, ""},
		{"192.0.2.10/ICMP", destination{end: end("192.0.2.10:0"), protocol: lb.TraceICMP}, ""},
		{"[2001:db8::1]:80/TCP", destination{end: end("[2001:db8::1]:80"), protocol: lb.TCP}, ""},
		{"2001:db8::1", destination{end: end("[2001:db8::1]:0")}, ""},
		{"::ffff:192.0.2.10", destination{end: end("192.0.2.10:0")}, ""},
		{"svc/web", destination{service: "web"}, ""},
		{"svc/shop/web", destination{service: "shop/web"}, ""},
		{"svc/shop/web:http", destination{service: "shop/web", port: "http"}, ""},
		{"svc/shop/web:53/udp", destination{service: "shop/web", port: "53", protocol: lb.UDP}, ""},
		{"svc/web:/icmp", destination{service: "web", protocol: lb.TraceICMP}, ""},
		{"web", destination{}, "nor svc/[NAMESPACE/]NAME"},
		{"", destination{}, "neither an IP address"},
		{"svc/", destination{}, "is not svc/"},
		{"svc/a/b/c", destination{}, "is not svc/"},
		{"svc//web", destination{}, "is not svc/"},
		{"192.0.2.10:80/http", destination{}, `protocol "http" is none of`},
		{"svc/web:80/x", destination{}, `protocol "x" is none of`},
		{"192.0.2.10:99999", destination{}, "neither an IP address"},
		{"fe80::1%eth0", destination{}, "has a zone"},
	} {
		got, err := parseDestination(test.text)
		if test.bad != "" {
			if err == nil || !strings.Contains(err.Error(), test.bad) {
				t.Errorf("%q: %v, want an error with %q", test.text, err, test.bad)
			}
			continue
		}
		if err != nil || got != test.want {
			t.Errorf("%q is %+v, %v; want %+v", test.text, got, err, test.want)
		}
	}
}

// FuzzTraceArguments checks that whatever is written is read as one thing or refused, and that what
// travels to the nodes is read there as it was here.
func FuzzTraceArguments(f *testing.F) {
	for _, s := range []string{"192.0.2.10:80/udp", "svc/shop/web:http", "[2001:db8::1]:443", "svc/a", ":80/tcp", "::1", "/"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if d, err := parseDestination(s); err == nil {
			if (d.service == "") != d.end.IsValid() {
				t.Errorf("%q is both a Service and an address, or neither: %+v", s, d)
			}
			if again, err := lb.ParseEnd(lb.EndText(d.end)); d.end.IsValid() && (err != nil || again != d.end) {
				t.Errorf("%q comes back as %s, %v", s, again, err)
			}
		}
		if target, err := lb.ParseFlowTarget(s); err == nil {
			if again, err := lb.ParseFlowTarget(target.String()); err != nil || again != target {
				t.Errorf("%q comes back as %+v, %v", s, again, err)
			}
		}
	})
}

func web() lb.Service {
	addr := netip.MustParseAddr
	return lb.Service{Key: lb.Key{Namespace: "shop", Name: "web"}, Type: lb.LoadBalancer,
		ClusterIPs: []netip.Addr{addr("10.96.0.5"), addr("fd00::5")}, ExternalIPs: []netip.Addr{addr("198.51.100.1")},
		Ingress: []lb.Ingress{{Addr: addr("192.0.2.10")}},
		Ports: []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: lb.UDP, Port: 53}},
		Announcements: lb.EncodeAnnouncements([]lb.Announcement{
			{VIP: addr("192.0.2.10"), Reason: lb.ReasonAnnounced, Owner: "n1", Protocol: "ARP"}})}
}

func TestDestinationOfAService(t *testing.T) {
	for _, test := range []struct {
		to     string
		family lb.Family
		want   string
	}{
		{"svc/shop/web", lb.IPv4, "192.0.2.10:80 TCP"},
		{"svc/shop/web", lb.IPv6, "[fd00::5]:80 TCP"},
		{"svc/shop/web:dns", lb.IPv4, "192.0.2.10:53 UDP"},
		{"svc/shop/web:53", lb.IPv4, "192.0.2.10:53 UDP"},
		{"svc/shop/web:53/tcp", lb.IPv4, "192.0.2.10:53 TCP"}, // to see it refused
		{"svc/shop/web:81", lb.IPv4, "192.0.2.10:81 TCP"},
		{"svc/shop/web:/icmp", lb.IPv4, "192.0.2.10:0 ICMP"},
		{"svc/shop/web:nonsense", lb.IPv4, "the Service shop/web has no port nonsense"},
		{"10.96.0.5", lb.IPv4, "10.96.0.5:80 TCP"},
		{"10.96.0.5/udp", lb.IPv4, "10.96.0.5:53 UDP"},
		{"10.96.0.5/sctp", lb.IPv4, "the Service shop/web has no port SCTP"},
	} {
		d, err := parseDestination(test.to)
		if err != nil {
			t.Fatal(err)
		}
		end, protocol, err := d.at(web(), test.family)
		got := fmt.Sprintf("%s %s", end, protocol)
		if err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%s in %s: %s, want %s", test.to, test.family, got, test.want)
		}
	}
}

func TestServiceAt(t *testing.T) {
	a, b := web(), web()
	b.Key.Name, b.Ports, b.ClusterIPs = "sharing", []lb.ServicePort{{Protocol: lb.TCP, Port: 443}}, nil
	for _, test := range []struct{ to, want string }{
		{"192.0.2.10:80", "shop/web"}, {"192.0.2.10:443", "shop/sharing"}, {"192.0.2.10:1", "shop/web"},
		{"198.51.100.1:443", "shop/sharing"}, {"10.96.0.5:443", "shop/web"}, {"203.0.113.1:80", ""},
	} {
		s, found, err := serviceAt([]lb.Service{a, b}, end(test.to), "")
		if got := s.Key.String(); err != nil || found != (test.want != "") || found && got != test.want {
			t.Errorf("%s is of %s, %v, want %q", test.to, got, err, test.want)
		}
	}
	if _, _, err := serviceAt(nil, end("203.0.113.1:0"), ""); err == nil {
		t.Error("an address of no Service needs no port")
	}
}

func delivered(node string, masqueraded bool, backends ...string) lb.Trace {
	t := lb.Trace{Node: node, Rules: []string{"ip landfall"}, Packet: lb.TracePacket{Interface: "eth0"},
		Ways: []lb.TraceWay{{Verdict: lb.TraceDelivered, Share: 1, Masqueraded: masqueraded, Steps: []lb.TraceStep{
			{Hook: "prerouting", Table: "ip landfall", Chain: "services", Rule: 2, Handle: 9, Text: "goto external"}}}}}
	for _, b := range backends {
		t.Ways[0].Ends = append(t.Ways[0].Ends, lb.TraceEnd{Address: end(b), Share: 1 / float64(len(backends))})
	}
	return t
}

func ended(node string, verdict lb.TraceVerdict, why string) lb.Trace {
	return lb.Trace{Node: node, Ways: []lb.TraceWay{{Verdict: verdict, Share: 1, Why: why}}}
}

func TestTraceText(t *testing.T) {
	r := traced{Service: "shop/web", Packet: lb.TracePacket{Source: end("203.0.113.7:0"), Destination: end("192.0.2.10:80"),
		Protocol: lb.TCP}, Nodes: []lb.Trace{
		delivered("n1", true, "10.0.0.2:8080", "10.0.0.3:8080"), delivered("n2", true, "10.0.0.2:8080", "10.0.0.3:8080"),
		ended("n3", lb.TraceDropped, "source ranges"),
	}, Pods: map[netip.Addr]string{netip.MustParseAddr("10.0.0.2"): "web-1"},
		Unanswered: []silent{{"n4", "no answer within 5s"}}}
	r.Nodes[1].Ways[0].Steps[0].Handle = 11 // handles differ everywhere
	r.Verdict = r.line()
	want := `203.0.113.7 to 192.0.2.10:80/TCP (Service shop/web): delivered to 2 backends, masqueraded on n1, n2; dropped: source ranges on n3

n1, n2 (in at eth0; rules: ip landfall)
  100 % delivered to 2 backends, masqueraded
    50 %  10.0.0.2:8080  web-1
    50 %  10.0.0.3:8080  -
    prerouting  ip landfall  services  2  goto external

n3 (sent by the node itself; rules: none)
  100 % dropped: source ranges

no answer from n4: no answer within 5s
`
	if d := cmp.Diff(want, r.text(false)); d != "" {
		t.Error(d)
	}
	if wide := r.text(true); !strings.Contains(wide, "2 (handle 9)") {
		t.Errorf("wide has no handles:\n%s", wide)
	}
}

func TestTraceOutcome(t *testing.T) {
	for _, test := range []struct {
		name  string
		r     traced
		wrong bool
		said  string
	}{
		{"delivered", traced{Nodes: []lb.Trace{delivered("n1", false, "10.0.0.2:80")}}, false, ""},
		{"a ping", traced{Nodes: []lb.Trace{ended("n1", lb.TraceAnswered, "")}}, false, ""},
		{"dropped on one of two", traced{Nodes: []lb.Trace{delivered("n1", false, "10.0.0.2:80"),
			ended("n2", lb.TraceDropped, "")}}, true, ""},
		{"no rule", traced{Nodes: []lb.Trace{ended("n1", lb.TraceUntouched, "")}}, true, ""},
		{"unknown", traced{Nodes: []lb.Trace{ended("n1", lb.TraceUnknown, "x")}}, false, "n1: a rule cannot be evaluated: x"},
		{"unanswered", traced{Nodes: []lb.Trace{delivered("n1", false, "10.0.0.2:80")}, Unanswered: []silent{{"n2", "y"}}},
			false, "no answer from n2: y"},
		{"dropped, and unanswered", traced{Nodes: []lb.Trace{ended("n1", lb.TraceRefused, "")},
			Unanswered: []silent{{"n2", "y"}}}, true, ""},
	} {
		err := test.r.outcome()
		said := ""
		if err != nil && !errors.Is(err, errWrong) {
			said = err.Error()
		}
		if errors.Is(err, errWrong) != test.wrong || said != test.said {
			t.Errorf("%s: %v", test.name, err)
		}
	}
}

// proxies answer for landfall-proxy in the pods of fakeWell.
type proxies struct {
	mu     sync.Mutex
	asked  map[string][]string // arguments by pod
	answer func(node string) (any, error)
}

func (p *proxies) exec(_ context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if container != "proxy" || command[0] != "landfall-proxy" {
		return nil, fmt.Errorf("%s was asked %q", container, command)
	}
	if p.asked == nil {
		p.asked = map[string][]string{}
	}
	p.asked[pod.Name] = command[1:]
	answer, err := p.answer("n" + strings.TrimPrefix(pod.Name, "landfall-node-"))
	if err != nil {
		return nil, err
	}
	return json.Marshal(answer)
}

const fakeWeb = `{"metadata":{"name":"web","namespace":"shop","annotations":{"landfall.dev/announcements":` +
	`"{\"version\":1,\"vips\":[{\"vip\":\"192.0.2.10\",\"reason\":\"Announced\",\"owner\":\"n1\",\"protocol\":\"ARP\"}]}"}},
	"spec":{"type":"LoadBalancer","clusterIPs":["10.96.0.5"],"ports":[{"name":"http","port":80,"nodePort":30080}]},
	"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.10"}]}}}`

// fakeTraced is a cluster of which three nodes answer.
func fakeTraced(t *testing.T, p *proxies, change ...func(*fakeCluster)) *gatherer {
	t.Helper()
	f := fakeWell(3)
	f.objects[servicePath], f.objects["/api/v1/services"] = fakeWeb, `{"items":[`+fakeWeb+`]}`
	f.objects["/api/v1/nodes"] = `{"items":[{"metadata":{"name":"n0"},"spec":{"podCIDRs":["10.0.0.0/24"]},"status":{"addresses":
		[{"type":"InternalIP","address":"172.16.0.1"}]}},{"metadata":{"name":"n1"}},{"metadata":{"name":"n2"}}]}`
	f.objects["/api/v1/pods"] = strings.Replace(f.objects["/api/v1/pods"], `{"items":[`,
		`{"items":[{"metadata":{"name":"x"},"spec":{"nodeName":"n2"},"status":{"phase":"Running","podIP":"10.0.0.77"}},
		{"metadata":{"name":"y"},"spec":{"nodeName":"n2"},"status":{"phase":"Failed","podIP":"10.0.0.9"}},`, 1)
	f.objects["/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices"] = `{"items":[{"metadata":{"name":"web-1",
		"namespace":"shop"},"addressType":"IPv4","endpoints":[{"addresses":["10.0.0.2"],"targetRef":{"kind":"Pod",
		"name":"web-abc"}}]}]}`
	for _, c := range change {
		c(&f)
	}
	o := options{user: kube.UserConfig{Kubeconfig: f.serve(t)}}
	client, server, err := o.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	g := newGatherer(client, server, o)
	g.exec = p.exec
	return g
}

// TestTraceAsksWhoMeetsThePacket asks the node that sends a packet, else those that announce the address,
// else all.
func TestTraceAsksWhoMeetsThePacket(t *testing.T) {
	for _, test := range []struct {
		name, from, to string
		flags          traceFlags
		asked          []string
		arguments      string
	}{
		{"a VIP", "203.0.113.7", "svc/shop/web", traceFlags{}, []string{"landfall-node-1"},
			"trace --from=203.0.113.7 --to=192.0.2.10:80 --protocol=TCP"},
		{"from a pod", "10.0.0.9:4000", "192.0.2.10", traceFlags{}, []string{"landfall-node-0"},
			"trace --from=10.0.0.9:4000 --to=192.0.2.10:80 --protocol=TCP"},
		{"from a pod with an address of another node's podCIDR", "10.0.0.77", "192.0.2.10", traceFlags{},
			[]string{"landfall-node-2"}, "trace --from=10.0.0.77 --to=192.0.2.10:80 --protocol=TCP"},
		{"a node port", "203.0.113.7", "172.16.0.1:30080", traceFlags{in: "eth1"}, []string{"landfall-node-0"},
			"trace --from=203.0.113.7 --to=172.16.0.1:30080 --protocol=TCP --in-interface=eth1"},
		{"nobody announces it", "203.0.113.7", "192.0.2.99:53/udp", traceFlags{},
			[]string{"landfall-node-0", "landfall-node-1", "landfall-node-2"},
			"trace --from=203.0.113.7 --to=192.0.2.99:53 --protocol=UDP"},
		{"all nodes", "203.0.113.7", "svc/shop/web", traceFlags{allNodes: true},
			[]string{"landfall-node-0", "landfall-node-1", "landfall-node-2"},
			"trace --from=203.0.113.7 --to=192.0.2.10:80 --protocol=TCP"},
		{"one node", "203.0.113.7", "svc/shop/web", traceFlags{nodes: []string{"n2"}}, []string{"landfall-node-2"},
			"trace --from=203.0.113.7 --to=192.0.2.10:80 --protocol=TCP"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := &proxies{answer: func(node string) (any, error) { return delivered(node, false, "10.0.0.2:8080"), nil }}
			d, err := parseDestination(test.to)
			if err != nil {
				t.Fatal(err)
			}
			source, err := lb.ParseEnd(test.from)
			if err != nil {
				t.Fatal(err)
			}
			r, err := tracePacket(t.Context(), fakeTraced(t, p), test.flags, source, d)
			if err != nil {
				t.Fatal(err)
			}
			if got := sortedKeys(p.asked); !slices.Equal(got, test.asked) || len(r.Nodes) != len(got) {
				t.Errorf("%v were asked, want %v; answers of %d", got, test.asked, len(r.Nodes))
			}
			for pod, arguments := range p.asked {
				if got := strings.Join(arguments, " "); got != test.arguments {
					t.Errorf("%s was asked %q, want %q", pod, got, test.arguments)
				}
			}
		})
	}
}

// TestTraceNamesWhoDoesNotAnswer goes on with the other nodes, and says of a missing permission which rule
// grants it.
func TestTraceNamesWhoDoesNotAnswer(t *testing.T) {
	d, err := parseDestination("svc/shop/web")
	if err != nil {
		t.Fatal(err)
	}
	from, all := end("203.0.113.7:0"), traceFlags{allNodes: true}
	p := &proxies{answer: func(node string) (any, error) {
		switch node {
		case "n0":
			return nil, errors.New("pod landfall-system/landfall-node-0 does not answer: no answer within 5s")
		case "n2":
			return nil, errors.New("landfall-proxy: unknown flag: --from (try --help)")
		}
		return delivered(node, false, "10.0.0.2:8080"), nil
	}}
	r, err := tracePacket(t.Context(), fakeTraced(t, p), all, from, d)
	want := []silent{{"n0", "pod landfall-system/landfall-node-0 does not answer: no answer within 5s"},
		{"n2", "its landfall-proxy is older than landfallctl: it has no trace"}}
	if err != nil || len(r.Nodes) != 1 || !slices.Equal(r.Unanswered, want) ||
		r.Pods[netip.MustParseAddr("10.0.0.2")] != "web-abc" {
		t.Errorf("%v %+v", err, r)
	}
	r, err = tracePacket(t.Context(), fakeTraced(t, p), traceFlags{nodes: []string{"n1", "n9"}}, from, d)
	if err != nil || len(r.Unanswered) != 1 || r.Unanswered[0].Node != "n9" {
		t.Errorf("an unknown node: %v %+v", err, r.Unanswered)
	}
	p.answer = func(string) (any, error) {
		return nil, &kube.Denied{Verb: "create", Resource: "pods/exec", Namespace: "landfall-system", Err: errors.New("forbidden")}
	}
	_, err = tracePacket(t.Context(), fakeTraced(t, p), all, from, d)
	if err == nil || !strings.Contains(err.Error(), `resources: ["pods/exec"], verbs: ["create"]`) {
		t.Errorf("without pods/exec: %v", err)
	}
	// Who may not list Nodes and EndpointSlices gets an answer all the same.
	p.answer = func(node string) (any, error) { return delivered(node, false, "10.0.0.2:8080"), nil }
	g := fakeTraced(t, p, func(f *fakeCluster) {
		f.refused["/api/v1/nodes"] = true
		f.refused["/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices"] = true
	})
	if r, err = tracePacket(t.Context(), g, traceFlags{}, from, d); err != nil || len(r.Nodes) != 1 || len(r.Notes) != 2 ||
		!strings.Contains(strings.Join(r.Notes, "\n"), `{apiGroups: [""], resources: ["nodes"], verbs: ["list"]}`) {
		t.Errorf("without nodes: %v %+v", err, r)
	}
}

func TestFlows(t *testing.T) {
	flow := func(client, to, backend string) lb.Flow {
		return lb.Flow{Protocol: lb.TCP, Client: end(client), To: end(to), Backend: end(backend), State: "ESTABLISHED", Expires: 60}
	}
	p := &proxies{answer: func(node string) (any, error) {
		switch node {
		case "n0": // had the address before
			return lb.Flows{Node: node, Total: 2, Flows: []lb.Flow{flow("203.0.113.8:1", "192.0.2.10:80", "10.0.0.2:8080"),
				flow("10.0.0.9:1", "192.0.2.10:80", "10.0.0.2:8080")},
				Counts: []lb.FlowCount{{Backend: end("10.0.0.2:8080"), State: "ESTABLISHED", Count: 2}}}, nil
		case "n1":
			return lb.Flows{Node: node, Total: 1000, Accounted: true,
				Flows: []lb.Flow{flow("203.0.113.7:1", "192.0.2.10:80", "10.0.0.2:8080")},
				Counts: []lb.FlowCount{{Backend: end("10.0.0.2:8080"), State: "ESTABLISHED", Count: 900},
					{Backend: end("10.0.0.3:8080"), State: "TIME_WAIT", Count: 100}}}, nil
		}
		return nil, errors.New("no answer within 5s")
	}}
	f, err := gatherFlows(t.Context(), fakeTraced(t, p), "web", nil, 3)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(p.asked["landfall-node-0"], " "); got !=
		"flows --limit=3 --to=192.0.2.10:80/TCP --to=10.96.0.5:80/TCP --to=:30080/TCP" {
		t.Errorf("asked %s", got)
	}
	want := `Service shop/web: 1002 connections on 2 nodes

BACKEND        POD      STATE        CONNECTIONS  NODES
10.0.0.2:8080  web-abc  ESTABLISHED  902          n1 (900), n0 (2)
10.0.0.3:8080  -        TIME_WAIT    100          n1 (100)

CLIENT         TO                 BACKEND        POD      NODE  STATE        RESCUED BY
10.0.0.9:1     192.0.2.10:80/tcp  10.0.0.2:8080  web-abc  n0    ESTABLISHED  -
203.0.113.7:1  192.0.2.10:80/tcp  10.0.0.2:8080  web-abc  n1    ESTABLISHED  -
203.0.113.8:1  192.0.2.10:80/tcp  10.0.0.2:8080  web-abc  n0    ESTABLISHED  n1
and 999 more connections; --limit shows more

no answer from n2: no answer within 5s
`
	if d := cmp.Diff(want, f.text(false)); d != "" {
		t.Error(d)
	}
	wide := f.text(true)
	if !strings.Contains(wide, "EXPIRES") || !strings.Contains(wide, "60s") {
		t.Errorf("wide lacks columns:\n%s", wide)
	}
	one, err := gatherFlows(t.Context(), fakeTraced(t, p), "192.0.2.10", []string{"n0"}, 1)
	if err != nil || one.Of != "192.0.2.10 (Service shop/web)" || one.Total != 2 || len(one.Flows) != 1 {
		t.Errorf("of an address: %v %+v", err, one)
	}
	if _, err := gatherFlows(t.Context(), fakeTraced(t, p), "nobody", nil, 1); err == nil ||
		err.Error() != "there is no Service shop/nobody" {
		t.Errorf("of a Service that is not there: %v", err)
	}
	if d := cmp.Diff([]silent{{"n2", "no answer within 5s"}}, f.Unanswered, cmpopts.EquateEmpty()); d != "" {
		t.Error(d)
	}
}
