package explain

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestWaiting finds the Services that wait for a pool, by what the controller says.
func TestWaiting(t *testing.T) {
	service := func(name string, reason lb.Reason, message string) lb.Service {
		return lb.Service{Key: lb.Key{Namespace: "shop", Name: name}, Type: lb.LoadBalancer,
			Conditions: []lb.Condition{{Type: lb.ConditionAssigned, Reason: reason, Message: message}}}
	}
	got := Waiting([]lb.Service{
		service("b", lb.ReasonPoolExhausted, "pool lan is full"), service("a", lb.ReasonPoolExhausted, `pools "wan", "lan" are full`),
		service("c", lb.ReasonPoolExhausted, "pool lan2 is full"), service("d", lb.ReasonNoPool, "pool lan"),
	}, "", "lan")
	if len(got) != 2 || got[0].Name != "a" || got[1].Name != "b" {
		t.Errorf("got %v", got)
	}
}

// TestDoctor has one fault after the other, and what the first line says.
func TestDoctor(t *testing.T) {
	for name, test := range map[string]struct {
		fault func(w *world, d *DoctorFacts)
		level Level
		line  string
	}{
		"nothing": {func(*world, *DoctorFacts) {}, OK, "nothing is wrong: 2 nodes"},
		"before":  {func(w *world, _ *DoctorFacts) { *w = world{Cluster: Cluster{Nodes: w.Nodes()}} }, OK, "Landfall is not installed, and"},
		"old":     {func(_ *world, d *DoctorFacts) { d.Version = "v1.30.2" }, Wrong, "Kubernetes v1.30.2 is too old"},
		"k3s":     {func(_ *world, d *DoctorFacts) { d.Version = "v1.33.1+k3s1" }, OK, "nothing is wrong"},
		"Pod Security": {func(_ *world, d *DoctorFacts) { d.PodSecurity = "baseline" }, Wrong,
			"namespace landfall-system enforces Pod Security baseline"},
		"strictARP": {func(_ *world, d *DoctorFacts) { d.KubeProxy, d.Mode = true, "ipvs" }, Wrong,
			"kube-proxy runs in mode ipvs without strictARP"},
		"strictARP is set": {func(_ *world, d *DoctorFacts) { d.KubeProxy, d.Mode, d.StrictARP = true, "ipvs", true }, OK, "nothing"},
		"MetalLB":          {func(_ *world, d *DoctorFacts) { d.Others = []string{"MetalLB"} }, Warning, "MetalLB also gives addresses"},
		"MetalLB and a class": {func(w *world, d *DoctorFacts) { d.Others, w.Class = []string{"MetalLB"}, "x"; d.Services = nil },
			OK, "nothing"},
		"exclude label": {func(w *world, _ *DoctorFacts) {
			for name, n := range w.Nodes() {
				n.Labels = labels.Set{labelExclude: ""}
				w.Nodes()[name] = n
			}
		}, Wrong, "every node has the label node.kubernetes.io/exclude"},
		"drained": {func(w *world, _ *DoctorFacts) {
			w.Nodes()["n2"] = Node{Node: lb.Node{Name: "n2", Leaving: lb.ReasonNodeDrained}, Ready: true}
		}, OK, "nothing is wrong"},
		"not ready": {func(w *world, _ *DoctorFacts) {
			w.Nodes()["n2"] = Node{Node: lb.Node{Name: "n2"}, NotReady: "no kubelet"}
		}, Warning, "not ready: n2: no kubelet"},
		"no controller": {func(w *world, _ *DoctorFacts) { w.Controllers = nil }, Wrong, "the controller does not run"},
		"no speaker":    {func(w *world, _ *DoctorFacts) { w.Agents = nil }, Wrong, "speaker and proxy run on no node"},
		"no speaker may start": {func(w *world, d *DoctorFacts) {
			w.Agents, d.Refused = nil, `pods "landfall-node-x" is forbidden: exceeded quota`+strings.Repeat("x", 300)
		}, Wrong, `speaker and proxy run on no node, so no address is announced: pods "landfall-node-x" is forbidden`},
		"Pod Security by default": {func(w *world, d *DoctorFacts) {
			w.Agents, d.Refused = nil, `pods "landfall-node-x" is forbidden: violates PodSecurity "restricted:latest"`
		}, Wrong, "the API server enforces Pod Security by default, and namespace landfall-system sets no level"},
		"versions": {func(w *world, _ *DoctorFacts) {
			a := w.Agents["n2"]
			a.Speaker.Image, a.Proxy.Image = "landfall:2", "landfall:2"
			w.Agents["n2"] = a
		}, Warning, "the nodes run different versions"},
		"gossip":     {func(w *world, _ *DoctorFacts) { w.Agents["n1"].Said.Members.Live = []string{"n1"} }, Wrong, "n1: its speaker does not hear"},
		"forwarding": {func(w *world, _ *DoctorFacts) { w.find("n2", lb.ReasonForwardingOff, "n2 has ip_forward=0") }, Wrong, "n2 has ip_forward=0"},
		"conntrack": {func(w *world, _ *DoctorFacts) { w.find("n2", lb.ReasonConntrackFull, "the table of n2 is full") }, Wrong,
			"the table of n2 is full (ConntrackFull)"},
		"pod route": {func(w *world, _ *DoctorFacts) {
			w.find("n2", lb.ReasonPodRouteMissing, "n2 has no route to the pods on n1")
		},
			Wrong, "n2 has no route to the pods on n1 (PodRouteMissing)"},
		"the API server comes first": {func(w *world, _ *DoctorFacts) {
			w.find("n1", lb.ReasonForwardingOff, "n1 has ip_forward=0")
			w.find("n2", lb.ReasonAPIServerUnreachable, "n2 does not reach the API server")
		}, Wrong, "n2 does not reach the API server (APIServerUnreachable)"},
		"MTU": {func(w *world, _ *DoctorFacts) { w.sizes(1500, 9000) }, Warning,
			"interface eth0 of n1 has MTU 1500, and that of n2 in the same subnet 192.0.2.0/24 has 9000: packets of the larger " +
				"size are lost (MTUMismatch)"},
		"MTU of bridges that have one subnet on all nodes": {func(w *world, _ *DoctorFacts) {
			for name, n := range w.Nodes() {
				n.Addresses = []netip.Addr{netip.MustParseAddr("198.51.100.1")}
				w.Nodes()[name] = n
			}
			w.sizes(1500, 9000)
		}, OK, "nothing is wrong"},
		"one MTU":             {func(w *world, _ *DoctorFacts) { w.sizes(9000, 9000) }, OK, "nothing is wrong"},
		"an MTU that is told": {func(w *world, _ *DoctorFacts) { w.sizes(9000, 0) }, OK, "nothing is wrong"},
		"full": {func(w *world, _ *DoctorFacts) { w.Pools[0].Status.AvailableIPv4 = "0" }, Warning,
			"pool lan: it is full, so the next Service gets no address: IPv4 1 assigned, 0 free (PoolExhausted)"},
		"no pool": {func(w *world, _ *DoctorFacts) { w.Pools = nil }, Wrong, "there is no IPAddressPool"},
		"waiting": {func(w *world, d *DoctorFacts) {
			d.Services[0].Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonPoolExhausted,
				Message: "all addresses of pool lan are held"}}
		}, Wrong, "pool lan: it is full, and shop/web waits"},
		"not announced": {func(_ *world, d *DoctorFacts) {
			d.Services[0].Conditions[1] = lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoInterface, Message: "no interface"}
		}, Wrong, "Service shop/web: no interface (NoInterface)"},
		"peer": {func(w *world, _ *DoctorFacts) { w.overBGP(lb.Peer{PeerASN: 64513, Status: down("connection refused")}) }, Wrong,
			"BGP session with tor (192.0.2.254) from n1, n2 is down"},
		"may not list pods": {func(w *world, _ *DoctorFacts) {
			w.Unread, w.Agents, w.Controllers, w.Leader = []Unread{{"pods", "you may not list pods", "grant"}}, nil, nil, ""
		}, Unknown, "nothing is wrong: 2 nodes; not checked: you may not list pods"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			d := DoctorFacts{Version: "v1.35.4", Namespace: "landfall-system", Services: []lb.Service{w.Service}}
			test.fault(&w, &d)
			if v := Doctor(w.Cluster, d); v.Level != test.level || !strings.HasPrefix(v.Line, "Cluster: "+test.line) {
				t.Errorf("%s: %q\nwant %s: %q", v.Level, v.Line, test.level, test.line)
			}
		})
	}
}

// sizes has n1 and n2 send packets of these sizes in one subnet.
func (w *world) sizes(n1, n2 int) {
	for node, mtu := range map[string]int{"n1": n1, "n2": n2} {
		a := w.Agents[node]
		said := SpeakerStatus{Node: node}
		if a.Said != nil {
			said = *a.Said
		}
		addr := netip.MustParsePrefix("192.0.2." + node[1:] + "/24")
		said.Interfaces = []Interface{{Name: "lo", Up: true, MTU: 65536, Addresses: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}},
			{Name: "eth0", Up: true, MTU: mtu, Addresses: []netip.Prefix{addr}}}
		a.Said = &said
		w.Agents[node] = a
	}
}

// What is well is said without a name twice and in English.
func TestWhatIsWell(t *testing.T) {
	w := well()
	var session PeerStatus
	if err := json.Unmarshal([]byte(`{"name": "tor", "uptime": "5m", "session": {"state": "Established", "prefixes": 2}}`),
		&session); err != nil {
		t.Fatal(err)
	}
	if check := w.session("n1", session); check.Text != "Established for 5m, 2 routes announced" {
		t.Errorf("a session: %q", check.Text)
	}
	checks := w.pools([]lb.Service{w.Service})
	if len(checks) != 1 || checks[0].What != "pool lan" || !strings.HasPrefix(checks[0].Text, "assigns addresses") {
		t.Errorf("a pool: %+v", checks)
	}
}

// The class of a Service cannot be changed: a cure that changes Landfall's takes all of its Services off the air.
func TestDoctorKeepsTheClassOfWhatIsServed(t *testing.T) {
	for name, test := range map[string]struct {
		fault func(w *world, d *DoctorFacts)
		level Level
		line  string
		cure  string // begins with
	}{
		"another load balancer, and Services": {func(_ *world, d *DoctorFacts) { d.Others = []string{"MetalLB"} }, Warning,
			"MetalLB also gives addresses", "remove the other one"},
		"another load balancer, and no Service yet": {func(_ *world, d *DoctorFacts) {
			d.Others, d.Services[0].Conditions = []string{"MetalLB"}, nil
			d.Services[0].Type = "ClusterIP"
		}, Warning, "MetalLB also gives addresses", "helm upgrade … --set loadBalancerClass=landfall.dev/landfall "},
		"another load balancer, and Services that may not be read": {func(w *world, d *DoctorFacts) {
			d.Others, d.Services = []string{"MetalLB"}, nil
			w.Unread = []Unread{{"services", "you may not list services", "grant"}}
		}, Warning, "MetalLB also gives addresses", "remove the other one"},
		"the class was set": {func(w *world, _ *DoctorFacts) { w.Class = "landfall.dev/landfall" }, Wrong,
			"1 Service without a class still says that Landfall announces it, which serves class landfall.dev/landfall: shop/web",
			"helm upgrade … --set loadBalancerClass=   #"},
		"the class was changed": {func(w *world, d *DoctorFacts) {
			w.Class = "y"
			d.Services[0].Class = "x"
			d.Services = append(d.Services, d.Services[0])
		}, Wrong, "2 Services of class x still say that Landfall announces them, which serves class y: shop/web",
			"helm upgrade … --set loadBalancerClass=x   #"},
		"the class was removed": {func(_ *world, d *DoctorFacts) { d.Services[0].Class = "x" }, Wrong,
			"1 Service of class x still says that Landfall announces it, which serves Services without a class: shop/web",
			"helm upgrade … --set loadBalancerClass=x   #"},
		"another Landfall runs": {func(w *world, d *DoctorFacts) { w.Class, d.Another = "y", true }, OK, "nothing is wrong", ""},
		"whether another Landfall runs is not known": {func(w *world, _ *DoctorFacts) {
			w.Class, w.Unread = "y", []Unread{{OtherPods, "you may not list pods", "grant"}}
		}, Unknown, "nothing is wrong", "grant"},
		"of another load balancer": {func(w *world, d *DoctorFacts) {
			w.Class, d.Services[0].Conditions = "y", nil
		}, OK, "nothing is wrong", ""},
		"the class is not known": {func(w *world, d *DoctorFacts) {
			d.Services[0].Class, w.Controllers = "x", nil
		}, Wrong, "the controller does not run", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			d := DoctorFacts{Version: "v1.35.4", Namespace: "landfall-system", Services: []lb.Service{w.Service}}
			test.fault(&w, &d)
			if v := Doctor(w.Cluster, d); v.Level != test.level || !strings.HasPrefix(v.Line, "Cluster: "+test.line) ||
				!strings.HasPrefix(v.Cure, test.cure) {
				t.Errorf("%s: %q, %q\nwant %s: %q, %q", v.Level, v.Line, v.Cure, test.level, test.line, test.cure)
			}
		})
	}
}

// A proxy that is gone leaves its rules, which come ahead of kube-proxy's and follow no change.
func TestDoctorNamesNodesWithoutTheProxyBesideKubeProxy(t *testing.T) {
	without := func(w *world, names ...string) {
		for _, name := range names {
			a := w.Agents[name]
			a.Proxy, a.Delivers = Program{}, nil
			w.Agents[name] = a
		}
	}
	for name, test := range map[string]struct {
		fault func(w *world)
		level Level
		text  string
	}{
		"on all nodes": {func(*world) {}, Note, "runs in mode nftables beside Landfall's proxy, which comes first: it can go"},
		"a narrower node.nodeSelector": {func(w *world) { delete(w.Agents, "n2") }, Warning, "kube-proxy runs in mode nftables on n2 " +
			"without Landfall's proxy: rules of an earlier one may still come first there, and follow no change of Services"},
		"of separate pods": {func(w *world) { without(w, "n1") }, Warning, "kube-proxy runs in mode nftables on n1 without Landfall's proxy: "},
		"a Windows node": {func(w *world) {
			w.Nodes()["n2"] = Node{Node: lb.Node{Name: "n2", Labels: labels.Set{"kubernetes.io/os": "windows"}}, Ready: true}
			delete(w.Agents, "n2")
		}, Note, "runs in mode nftables beside"},
		"on no node": {func(w *world) {
			without(w, "n1", "n2")
			w.NoProxy = true
		}, Note, "runs in mode nftables, and Landfall's proxy on no node: if it ever ran, its rules may still come first"},
		"pods may not be listed": {func(w *world) {
			w.Agents, w.Unread = nil, []Unread{{"pods", "you may not list pods", "grant"}}
		}, Note, "runs in mode nftables beside"},
	} {
		w := well()
		test.fault(&w)
		got := w.kubeProxy(DoctorFacts{KubeProxy: true, Mode: "nftables"})
		cured := strings.Contains(got.Cure, "landfall-proxy cleanup") || strings.Contains(got.Text, "landfall-proxy cleanup")
		if got.Level != test.level || !strings.HasPrefix(got.Text, test.text) ||
			cured != (got.Level == Warning || w.NoProxy) {
			t.Errorf("%s: %+v, want %s: %q", name, got, test.level, test.text)
		}
	}
}

// A node that is drained may announce all the same: doctor does not say the opposite.
func TestDoctorKnowsWhatADrainedNodeAnnounces(t *testing.T) {
	w := well()
	w.drainedAlone()
	w.Nodes()["n2"] = Node{Node: lb.Node{Name: "n2", Leaving: lb.ReasonNodeDrained}, Ready: true}
	var got []string
	for _, check := range w.allNodes() {
		if check.What == "drained" {
			got = append(got, check.Text)
		}
	}
	want := []string{"no address is announced from n2 until landfallctl undrain NODE",
		"n1 is drained, and announces only what no other node delivers: 2 addresses, of Services shop/dns, shop/web"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestDoctorNode leaves out what concerns other nodes alone.
func TestDoctorNode(t *testing.T) {
	excluded := func(w *world, name string) {
		n := w.Nodes()[name]
		n.Labels = labels.Set{labelExclude: ""}
		w.Nodes()[name] = n
	}
	for name, test := range map[string]struct {
		fault func(w *world, d *DoctorFacts)
		level Level
		line  string
	}{
		"nothing":        {func(*world, *DoctorFacts) {}, OK, "nothing is wrong"},
		"before":         {func(w *world, _ *DoctorFacts) { *w = world{Cluster: Cluster{Nodes: w.Nodes()}} }, OK, "Landfall is not installed, and"},
		"no such node":   {func(w *world, _ *DoctorFacts) { delete(w.Nodes(), "n1") }, Wrong, "there is no such Node"},
		"old":            {func(_ *world, d *DoctorFacts) { d.Version = "v1.30.2" }, Wrong, "Kubernetes v1.30.2 is too old"},
		"its finding":    {func(w *world, _ *DoctorFacts) { w.find("n1", lb.ReasonForwardingOff, "n1 has ip_forward=0") }, Wrong, "n1 has ip_forward=0"},
		"another's":      {func(w *world, _ *DoctorFacts) { w.find("n2", lb.ReasonForwardingOff, "n2 has ip_forward=0") }, OK, "nothing"},
		"deaf":           {func(w *world, _ *DoctorFacts) { w.Agents["n1"].Said.Members.Live = []string{"n1"} }, Wrong, "n1: its speaker does not hear"},
		"no programs":    {func(w *world, _ *DoctorFacts) { delete(w.Agents, "n1") }, Wrong, "the speaker on n1 does not run: it has no pod"},
		"excluded":       {func(w *world, _ *DoctorFacts) { excluded(w, "n1") }, OK, "nothing is wrong"},
		"other excluded": {func(w *world, _ *DoctorFacts) { excluded(w, "n2") }, OK, "nothing is wrong"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			d := DoctorFacts{Version: "v1.35.4", Namespace: "landfall-system", Services: []lb.Service{w.Service}}
			test.fault(&w, &d)
			if v := DoctorNode(w.Cluster, d, "n1"); v.Level != test.level || !strings.HasPrefix(v.Line, "Node n1: "+test.line) {
				t.Errorf("%s: %q\nwant %s: %q", v.Level, v.Line, test.level, test.line)
			}
		})
	}
}
