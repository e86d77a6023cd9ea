package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

func probing(text string) func(*lb.Service) {
	return func(s *lb.Service) {
		var err error
		if s.Probe, err = lb.ParseProbe(text); err != nil {
			s.InvalidProbe = err.Error()
		}
	}
}

var scope = ProbeScope{
	Own: []netip.Addr{addr("10.99.0.1")},
	Others: ExternalIPs{
		Nodes:      NewNodes(map[string]lb.Node{"there": {Name: "there", Addresses: []netip.Addr{addr("192.0.2.9")}}}),
		Networks:   []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12")},
		Pools:      map[string][]lb.Range{"lan": {mustRange("198.51.100.0/24")}},
		APIServers: []netip.Addr{addr("203.0.113.6")},
	},
}

func mustRange(text string) lb.Range {
	r, err := lb.ParseRange(text)
	if err != nil {
		panic(err)
	}
	return r
}

func TestNewProbing(t *testing.T) {
	udp := func(s *lb.Service) { s.Ports[0].Protocol = lb.UDP }
	clusterIP := func(s *lb.Service) { s.Type = lb.ClusterIP }
	waiting := func(s *lb.Service) { s.Ingress = nil }
	twoPorts := func(s *lb.Service) {
		s.Ports = append([]lb.ServicePort{{Name: "dns", Protocol: lb.UDP, Port: 53}}, s.Ports...)
	}
	var many []string
	for i := range MaxProbed + 1 {
		many = append(many, fmt.Sprint(i+1, " there"))
	}
	for _, tt := range []struct {
		name, endpoints string
		change          []func(*lb.Service)
		want            string // the targets
		refused         lb.Reason
		says            string
	}{
		{"nothing is asked", "1 here", nil, "", "", ""},
		{"tcp", "2 there, 1 here", []func(*lb.Service){probing("tcp")}, "1:8080 2:8080", "", ""},
		{"http", "1 here", []func(*lb.Service){probing("http:/a")}, "1:8080", "", ""},
		{"the first TCP port", "1 here", []func(*lb.Service){probing("tcp"), twoPorts}, "1:8080", "", ""},
		{"not ready", "1 here terminating, 2 there", []func(*lb.Service){probing("tcp")}, "2:8080", "", ""},
		{"none is ready", "1 here terminating", []func(*lb.Service){probing("tcp")}, "", "", ""},
		{"no endpoints", "", []func(*lb.Service){probing("tcp")}, "", "", ""},
		{"no value", "1 here", []func(*lb.Service){probing("icmp")}, "", lb.ReasonProbeInvalid,
			`annotation landfall.dev/probe: "icmp": want tcp, or http:`},
		{"UDP alone", "1 here", []func(*lb.Service){probing("tcp"), udp}, "", lb.ReasonProbeInvalid, "protocol TCP"},
		{"another type", "1 here", []func(*lb.Service){probing("tcp"), clusterIP}, "", lb.ReasonProbeInvalid,
			"this one is of type ClusterIP"},
		{"no address yet", "1 here", []func(*lb.Service){probing("tcp"), waiting}, "", "", ""},
		{"as many as can be", strings.Join(many[1:], ", "), []func(*lb.Service){probing("tcp")}, "64", "", ""},
		{"too many", strings.Join(many, ", "), []func(*lb.Service){probing("tcp")}, "", lb.ReasonProbeRefused,
			"65 ready endpoints, and nodes probe at most 64"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, refused := NewProbing(service(tt.change...), slice(tt.endpoints)[:1], scope, 3)
			var targets []string
			for _, a := range p.Targets {
				targets = append(targets, strings.TrimPrefix(a.String(), "192.168.0."))
			}
			got := strings.Join(targets, " ")
			if len(targets) > 9 {
				got = fmt.Sprint(len(targets))
			}
			if got != tt.want || len(targets) > 0 && p.Nodes != 3 {
				t.Errorf("asks %q of %d nodes, want %q", got, p.Nodes, tt.want)
			}
			switch {
			case (refused == nil) != (tt.refused == ""):
				t.Errorf("refused: %v, want %q", refused, tt.refused)
			case refused != nil && (refused.Reason != tt.refused || !strings.Contains(refused.Message, tt.says)):
				t.Errorf("refused: %v, want %s %q", refused, tt.refused, tt.says)
			}
		})
	}
}

// Whoever writes EndpointSlices can name any address, and has no node connect to it.
func TestProbesAskPodsOnly(t *testing.T) {
	asks := func(ep lb.Endpoint) bool {
		all := slice("")
		all[0].Endpoints = []lb.Endpoint{ep}
		p, refused := NewProbing(service(probing("tcp")), all, scope, 1)
		if (refused == nil) != (len(p.Targets) == 1) || refused != nil && refused.Reason != lb.ReasonProbeRefused {
			t.Errorf("%s: refused %v, asks %v", ep.Addr, refused, p.Targets)
		}
		return len(p.Targets) == 1
	}
	if !asks(lb.Endpoint{Addr: addr("192.168.0.1"), Node: "there", Ready: true}) {
		t.Error("a pod is not asked")
	}
	if !asks(lb.Endpoint{Addr: addr("fd00::7"), Node: "there", Ready: true}) {
		t.Error("a pod with IPv6 is not asked")
	}
	if asks(lb.Endpoint{Addr: addr("192.168.0.1"), Ready: true}) {
		t.Error("what is on no node is asked")
	}
	for what, at := range map[string]string{
		"loopback": "127.0.0.1", "loopback of IPv6": "::1", "mapped loopback": "::ffff:127.0.0.1",
		"link-local": "169.254.169.254", "link-local of IPv6": "fe80::1", "unspecified": "0.0.0.0",
		"multicast": "224.0.0.1", "multicast of IPv6": "ff02::1", "broadcast": "255.255.255.255",
		"a Node": "192.0.2.9", "a mapped Node": "::ffff:192.0.2.9", "this node": "10.99.0.1",
		"the API server": "203.0.113.6", "a cluster IP": "10.96.0.1", "a VIP": "198.51.100.7",
	} {
		if asks(lb.Endpoint{Addr: netip.MustParseAddr(at), Node: "there", Ready: true}) {
			t.Errorf("%s is asked: %s", what, at)
		}
	}
}

func leftOut(ends ...string) LeftOut {
	left := LeftOut{}
	for _, end := range ends {
		left[addr("192.168.0."+end)] = "no answer"
	}
	return left
}

func TestAnswering(t *testing.T) {
	for _, tt := range []struct {
		name, endpoints string
		policy          func(*lb.Service)
		left            LeftOut
		cluster, local  string
		ignored         []lb.TrafficPolicy
	}{
		{"none", "1 here, 2 there", cluster, nil, "1 2", "1", nil},
		{"of another Service", "1 here, 2 there", cluster, leftOut("9"), "1 2", "1", nil},
		{"the only one", "1 there", cluster, leftOut("1"), "1", "", []lb.TrafficPolicy{lb.Cluster}},
		{"one of two", "1 there, 2 there", cluster, leftOut("1"), "2", "", nil},
		{"one of three", "1 there, 2 there, 3 there", cluster, leftOut("1"), "2 3", "", nil},
		{"two of three", "1 there, 2 there, 3 there", cluster, leftOut("1", "3"), "1 2 3", "",
			[]lb.TrafficPolicy{lb.Cluster}},
		{"two of four", "1 there, 2 there, 3 there, 4 there", cluster, leftOut("1", "3"), "2 4", "", nil},
		{"all", "1 there, 2 there", cluster, leftOut("1", "2"), "1 2", "", []lb.TrafficPolicy{lb.Cluster}},
		{"Local, its only one", "1 here, 2 there, 3 there", local, leftOut("1"), "2 3", "1", []lb.TrafficPolicy{lb.Local}},
		{"Cluster, its only local one", "1 here, 2 there, 3 there", cluster, leftOut("1"), "2 3", "1", nil},
		{"Local, one of two", "1 here, 2 here, 3 there", local, leftOut("2"), "1 3", "1", nil},
		{"Local, those of others", "1 here, 2 there, 3 there", local, leftOut("2", "3"), "1 2 3", "1",
			[]lb.TrafficPolicy{lb.Cluster}},
		{"terminating ones were not asked", "1 here terminating, 2 here terminating", local, leftOut("1"), "1 2", "1 2", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			whole := New(service(tt.policy), slice(tt.endpoints), here)
			s, ignored := whole.Answering(tt.left)
			if got := ends(s.Ports[0].Backends.Cluster); got != tt.cluster {
				t.Errorf("Cluster: %q, want %q", got, tt.cluster)
			}
			if got := ends(s.Ports[0].Backends.Local); got != tt.local {
				t.Errorf("Local: %q, want %q", got, tt.local)
			}
			if !slices.Equal(ignored, tt.ignored) {
				t.Errorf("ignored for %v, want %v", ignored, tt.ignored)
			}
			if again := New(service(tt.policy), slice(tt.endpoints), here); !whole.Equal(again) {
				t.Error("the plan that it was made from has changed")
			}
		})
	}
}

func cluster(*lb.Service) {}

func ends(all []lb.Backend) string {
	var ends []string
	for _, b := range all {
		ends = append(ends, strings.TrimPrefix(b.Addr.Addr().String(), "192.168.0."))
	}
	return strings.Join(ends, " ")
}

// No answers empty a set, and whatever they are half of each set stays: of any endpoints, left out in any way.
func TestAnsweringKeepsHalf(t *testing.T) {
	const most = 6
	for n := 1; n <= most; n++ {
		var all []string
		for i := range n {
			all = append(all, fmt.Sprint(i+1, []string{" here", " there"}[i%2]))
		}
		whole := New(service(local), slice(strings.Join(all, ", ")), here)
		for bits := range 1 << n {
			var out []string
			for i := range n {
				if bits>>i&1 == 1 {
					out = append(out, fmt.Sprint(i+1))
				}
			}
			s, _ := whole.Answering(leftOut(out...))
			for _, policy := range []lb.TrafficPolicy{lb.Cluster, lb.Local} {
				before, after := whole.Ports[0].Backends.For(policy), s.Ports[0].Backends.For(policy)
				if 2*len(after) < len(before) {
					t.Fatalf("%s of %d without %v: %d are left of %d", policy, n, out, len(after), len(before))
				}
			}
		}
	}
}

// TestRecord writes answers as signs: + for one, - for none, ? for one that is unknown, and a number of seconds
// that pass. What follows is whether the endpoint is left out then.
func TestRecord(t *testing.T) {
	for _, tt := range []struct {
		name, answers string
		out           bool
	}{
		{"never asked", "", false},
		{"one failure is none", "-", false},
		{"two in a row", "--", true},
		{"not in a row", "-+-+-", false},
		{"an unknown one is no failure", "-?", false},
		{"an unknown one is no answer", "-?-", true},
		{"two answers are too few", "--1+1+", true},
		{"three answers at once are too soon", "--1+++", true},
		{"three answers and a while", "--1+1++", false},
		{"unknown ones do not bring back", "--1+1???", true},
		{"a failure in between", "--1+1-+", true},
		{"left out again is held longer", "--1+1++" + "--1+1++", true},
		{"and returns", "--1+1++" + "--1+1+++1+", false},
		{"long ago is forgotten", "--1+1++" + "121--1+1++", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if r := after(tt.answers); (r.Out != "") != tt.out {
				t.Errorf("out: %q, want %v", r.Out, tt.out)
			}
		})
	}
	if r := after("--"); r.Out != "no answer" {
		t.Errorf("it is said %q", r.Out)
	}
	flapping := strings.Repeat("--30+30++", 40)
	if r := after(flapping + "--29+29++"); r.Out == "" {
		t.Error("one that flaps is held less than 30 s")
	}
	if r := after(flapping + "--29+30++"); r.Out != "" {
		t.Error("one that flaps is held more than 30 s")
	}
	if used, out, back := after("-").Wait(100), after("--").Wait(100), after("--+").Wait(100); used != 100 ||
		out != leftOutInterval || back != 100 {
		t.Errorf("waits %v, %v and %v", used, out, back)
	}
}

func after(answers string) (r Record) {
	now := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	seconds := 0
	for _, sign := range answers + " " {
		if sign >= '0' && sign <= '9' {
			seconds = 10*seconds + int(sign-'0')
			continue
		}
		now, seconds = now.Add(time.Duration(seconds)*time.Second), 0
		switch sign {
		case '+':
			r = r.After(now, Answer{})
		case '-':
			r = r.After(now, Answer{Failed: "no answer"})
		case '?':
			r = r.After(now, Answer{Failed: "late", Unknown: true})
		}
	}
	return r
}

func TestProbeInterval(t *testing.T) {
	for _, tt := range []struct {
		targets, ofNode, nodes, share int
		wanted, want                  time.Duration
	}{
		{3, 3, 3, 1, 100 * time.Millisecond, 100 * time.Millisecond},
		{20, 100, 10, 1, 100 * time.Millisecond, 100 * time.Millisecond},
		{64, 64, 3, 1, 100 * time.Millisecond, 320 * time.Millisecond},
		{1, MaxProbedOfNode, 3, 1, 100 * time.Millisecond, 512 * time.Millisecond},
		{3, 3, 100, 1, 100 * time.Millisecond, time.Second},
		{3, 3, 5000, 1, 100 * time.Millisecond, 10 * time.Second},
		{3, 3, 3, 1, time.Second, time.Second},
		{3, 3, 10, 4, 100 * time.Millisecond, 400 * time.Millisecond},
	} {
		p := Probing{Targets: make([]netip.AddrPort, tt.targets), Nodes: tt.nodes}
		got := p.Interval(tt.wanted, tt.ofNode, tt.share)
		if got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
		if detected := 2*got + ConnectTime(got); detected >= 3*got || ConnectTime(got) > time.Second {
			t.Errorf("%v: found after %v", got, detected)
		}
	}
}
