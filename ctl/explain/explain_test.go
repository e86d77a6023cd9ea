package explain

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

var vip = netip.MustParseAddr("192.0.2.10")

// world is a cluster of two nodes with one Service, of which everything is well.
type world struct {
	Cluster
	ServiceFacts
}

func mustRange(s string) lb.Range {
	r, err := lb.ParseRange(s)
	if err != nil {
		panic(err)
	}
	return r
}

func well() world {
	running := Program{There: true, Running: true, Ready: true}
	nodes := []NodeVIP{
		{Node: "n1", Reason: lb.ReasonAnnounced, Message: "this node answers for the address", Claims: true, Answering: true},
		{Node: "n2", Reason: lb.ReasonNotOwner, Message: "the node can deliver; n1 owns the address", Claims: true},
	}
	c := Cluster{
		Installed: true,
		Pools: []lb.Pool{{Name: "lan", Ranges: []lb.Range{mustRange("192.0.2.0/28")}, AutoAssign: true, Status: lb.PoolStatus{
			AssignedIPv4: "1", AvailableIPv4: "15",
			Conditions: []lb.Condition{{Type: lb.ConditionReady, Status: true, Reason: lb.ReasonPoolReady, Message: "in use"}},
		}}},
		L2:    []lb.L2Advertisement{{Name: "all"}},
		Nodes: map[string]Node{}, Agents: map[string]Agent{},
		Controllers: map[string]Program{"landfall-controller-1": running}, Leader: "landfall-controller-1",
	}
	key := lb.Key{Namespace: "shop", Name: "web"}
	for _, name := range []string{"n1", "n2"} {
		c.Nodes[name] = Node{Node: lb.Node{Name: name, Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}, Ready: true}
		said := &SpeakerStatus{Node: name, VIPs: []SpeakerVIP{{VIP: vip, Owner: "n1", Nodes: nodes}},
			Interfaces: []Interface{{Name: "eth0", Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("192.0.2.1/24")}}}}
		said.Gate.Kind, said.Gate.Connected = "proxy", true
		said.Members.Joined, said.Members.Live = true, []string{"n1", "n2"}
		c.Agents[name] = Agent{Node: name, Speaker: running, Proxy: running, Said: said,
			Delivers: &ProxyStatus{Node: name, Mode: "nftables", Ready: true, Services: []ProxyService{{
				Service: key.String(), State: "applied", VIPs: []ProxyVIP{{VIP: vip, Programmed: true, Ready: 2, LocalReady: 1}},
			}}}}
	}
	return world{c, ServiceFacts{
		Key: key, Found: true,
		Service: lb.Service{Key: key, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster, Ingress: []lb.Ingress{{Addr: vip}},
			Conditions: []lb.Condition{
				{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned, Message: "192.0.2.10 from pool lan"},
				{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced,
					Message: "192.0.2.10 is announced from n1 (ARP on eth0)"},
			}},
		Slices: []lb.Slice{{Service: key, Family: lb.IPv4, Endpoints: []lb.Endpoint{
			{Addr: netip.MustParseAddr("10.0.1.2"), Node: "n1", Ready: true, Serving: true},
			{Addr: netip.MustParseAddr("10.0.2.2"), Node: "n2", Ready: true, Serving: true}}}},
	}}
}

// announced sets what the condition Announced says.
func (w *world) announced(status bool, reason lb.Reason, message string) {
	w.Service.Conditions[1] = lb.Condition{Type: lb.ConditionAnnounced, Status: status, Reason: reason, Message: message}
	if status {
		return
	}
	for name, a := range w.Agents {
		var nodes []NodeVIP
		for node := range w.Nodes() {
			nodes = append(nodes, NodeVIP{Node: node, Reason: reason, Message: message})
		}
		a.Said.VIPs[0] = SpeakerVIP{VIP: vip, Nodes: nodes}
		w.Agents[name] = a
	}
}

// Nodes returns the Nodes: a field of that name is in Cluster.
func (w *world) Nodes() map[string]Node { return w.Cluster.Nodes }

func (w *world) unassigned(reason lb.Reason, message string) {
	w.Service.Ingress = nil
	w.Service.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Reason: reason, Message: message}}
}

// unasked has the speaker of another node unheard by n1, and out of landfallctl's reach.
func (w *world) unasked(node, why string) {
	w.Agents["n1"].Said.Members.Live = []string{"n1"}
	a := w.Agents[node]
	a.Said, a.Speaker.Unanswered = nil, why
	w.Agents[node] = a
}

// relay has the Service ask for the relay, which serves it on both nodes, but for what a test changes.
func (w *world) relay(tune func(n1 *ProxyStatus)) {
	w.Service.Relay = "true"
	for _, node := range []string{"n1", "n2"} {
		w.Agents[node].Delivers.Services[0].Relayed = true
		w.Agents[node].Delivers.Relay = &ProxyRelay{Connected: true, Connections: 3,
			Leads: map[lb.Family]netip.AddrPort{lb.IPv4: netip.MustParseAddrPort("192.0.2.1:7484")}}
	}
	tune(w.Agents["n1"].Delivers)
}

func (w *world) find(node string, reason lb.Reason, message string) {
	w.Agents[node].Delivers.Findings = append(w.Agents[node].Delivers.Findings, lb.Find(reason, "%s", message))
}

func (w *world) withhold(reason lb.Reason, message string, vips int) {
	w.Agents["n1"].Said.Withheld = []Withheld{{VIP: vip, Count: vips, Refusal: *lb.Refuse(reason, "%s", message)}}
}

// probe has a node say what its probes have found.
func (w *world) probe(node, said string) {
	if err := json.Unmarshal([]byte(said), &w.Agents[node].Delivers.Services[0].Probe); err != nil {
		panic(err)
	}
}

// reach has a node say what its clients meet.
func (w *world) reach(node, said string) {
	a := w.Agents[node]
	if err := json.Unmarshal([]byte(said), &a.Reach); err != nil {
		panic(err)
	}
	w.Agents[node] = a
}

// proxyHangs has the proxy of a node answer neither its speaker nor landfallctl; lost is set if the speaker no
// longer counts on what it said.
func (w *world) proxyHangs(node string, lost bool) {
	a := w.Agents[node]
	a.Delivers, a.Proxy.Unanswered, a.Said.Gate.Connected = nil, "no answer within 5s", false
	if lost {
		a.Said.Gate.Reason = lb.ReasonFeedLost
	}
	w.Agents[node] = a
}

// said adds to what the speaker of n1 says.
func (w *world) said(more string) {
	if err := json.Unmarshal([]byte(more), w.Agents["n1"].Said); err != nil {
		panic(err)
	}
}

// drainedAlone drains n1, which goes on announcing two addresses.
func (w *world) drainedAlone() {
	w.Nodes()["n1"] = Node{Node: lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained}, Ready: true}
	w.said(`{"answering": 2, "parting": {"count": 2, "services": ["shop/dns", "shop/web"]}}`)
}

// overBGP has the Service announced to one peer from both nodes.
func (w *world) overBGP(p lb.Peer) {
	w.L2 = nil
	w.BGP = []lb.BGPAdvertisement{{Name: "all"}}
	p.Name, p.Addr, p.Port, p.LocalASN = "tor", netip.MustParseAddr("192.0.2.254"), 179, 64512
	w.Peers = []lb.Peer{p}
}

// returned has both nodes announce the VIP to a router that announces so many other VIPs back.
func (w *world) returned(others int) {
	up := lb.PeerNode{State: "Established"}
	w.overBGP(lb.Peer{PeerASN: 64513, Status: map[string]lb.PeerNode{"n1": up, "n2": up}})
	for _, a := range w.Agents {
		said := fmt.Sprintf(`{"bgp": {"peers": [{"name": "tor", "session": {"state": "Established", "returned": %d}}]},
			"vips": [{"vip": "192.0.2.10", "routes": {"prefixes": ["192.0.2.10/32"], "peers": ["tor"]},
			"nodes": [{"node": "n1", "reason": "Announced", "answering": true}]}]}`, others)
		if err := json.Unmarshal([]byte(said), a.Said); err != nil {
			panic(err)
		}
	}
}

func down(message string) map[string]lb.PeerNode {
	s := lb.PeerNode{State: "Idle", Reason: lb.ReasonNotEstablished, Message: message}
	return map[string]lb.PeerNode{"n1": s, "n2": s}
}

const noSession = "no node announces 192.0.2.10: the node has no established BGP session that carries the address"

// TestServiceNamesTheCauseFirst has one fault after the other, and what the first line says.
func TestServiceNamesTheCauseFirst(t *testing.T) {
	for name, test := range map[string]struct {
		fault func(w *world)
		level Level
		// line begins the verdict after "Service shop/web: ", cure is a part of the cure.
		line, cure string
	}{
		"nothing": {func(*world) {}, OK, "192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"another's conflict": {func(w *world) { w.find("n1", lb.ReasonAddressConflict, "192.0.2.99 is in use") }, OK,
			"192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"relayed": {func(w *world) { w.relay(func(*ProxyStatus) {}) }, OK,
			"192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"not relayed": {func(w *world) {
			w.relay(func(n1 *ProxyStatus) {
				n1.Relay, n1.Services[0].Relayed, n1.Services[0].Advice = nil, false, "this node has no relay"
			})
		}, Warning, "connections go straight to endpoints on n1: this node has no relay (RelayRefused)", "docs/guide/relay.md"},
		"not as requested": {func(w *world) {
			w.Service.AsRequested = lb.Condition{Type: lb.ConditionAsRequested, Reason: lb.ReasonSchedulerIgnored,
				Message: "n2: no lc in iptables mode"}
		}, Warning, "n2: no lc in iptables mode (SchedulerIgnored)", "docs/guide/proxy.md"},
		"relay away": {func(w *world) {
			w.relay(func(n1 *ProxyStatus) { n1.Relay = &ProxyRelay{Message: "no relay is connected"} })
		}, Warning, "connections go straight to endpoints on n1: no relay is connected (RelayAway)", "-c relay"},
		"relay crashed": {func(w *world) {
			w.relay(func(n1 *ProxyStatus) { n1.Relay = &ProxyRelay{Message: "no relay is connected"} })
			n1 := w.Agents["n1"]
			n1.Relay = Program{There: true, Why: "CrashLoopBackOff"}
			w.Agents["n1"] = n1
		}, Warning, "connections go straight to endpoints on n1: the container relay does not run: CrashLoopBackOff", "-c relay"},
		"relay full": {func(w *world) {
			w.relay(func(n1 *ProxyStatus) { n1.Relay.Leads, n1.Relay.Full, n1.Relay.Message = nil, true, "it is full" })
		}, Warning, "connections go straight to endpoints on n1: it is full (RelayFull)", "relay.connections"},
		"relay behind a firewall": {func(w *world) {
			w.relay(func(n1 *ProxyStatus) { n1.Relay.Leads = nil })
			w.find("n1", lb.ReasonRelayDropped, "on n1 the chain ip filter INPUT drops new connections to TCP port 7484")
		}, Warning, "on n1 the chain ip filter INPUT drops", "7484"},
		"the relay lacks the port of a family that the Service has": {func(w *world) {
			w.relay(func(*ProxyStatus) {})
			w.Service.Families = []lb.Family{lb.IPv4, lb.IPv6}
			w.find("n1", lb.ReasonRelayWithoutPort, "the relay of n1 cannot open its port for IPv6")
		}, Warning, "the relay of n1 cannot open its port for IPv6 (RelayWithoutPort)", "ss -ltnp"},
		"the relay lacks the port of a family that the Service has not": {func(w *world) {
			w.relay(func(*ProxyStatus) {})
			w.Service.Families = []lb.Family{lb.IPv4}
			w.find("n1", lb.ReasonRelayWithoutPort, "the relay of n1 cannot open its port for IPv6")
		}, OK, "192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"a lease of the relay that cannot be written": {func(w *world) {
			w.relay(func(n1 *ProxyStatus) { n1.Relay.Leads = nil })
			w.find("n1", lb.ReasonRelayLeaseFailed, "the proxy of n1 cannot write the lease")
		}, Warning, "the proxy of n1 cannot write the lease (RelayLeaseFailed)", "xt_recent"},
		"endpoints answer": {func(w *world) { w.reach("n1", `{"connects": [{"address": "10.0.1.2:80"}]}`) }, OK,
			"192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"endpoints refuse": {func(w *world) {
			w.reach("n1", `{"connects": [{"address": "10.0.1.2:80", "error": "connection refused", "refused": true},
				{"address": "10.0.2.2:80", "error": "connection refused", "refused": true}]}`)
		}, Wrong, "nothing listens at 10.0.1.2:80, 10.0.2.2:80: n1 is refused by 2 of 2 endpoints; most likely targetPort is " +
			"not a port of the pods (EndpointUnreachable)", "kubectl describe service web -n shop"},
		"an endpoint refuses": {func(w *world) {
			w.reach("n1", `{"connects": [{"address": "10.0.1.2:80", "error": "connection refused", "refused": true},
				{"address": "10.0.2.2:80"}]}`)
		}, Warning, "nothing listens at 10.0.1.2:80: n1 is refused by 1 of 2 endpoints; most likely", "TargetPort"},
		"endpoints are silent": {func(w *world) {
			w.reach("n1", `{"connects": [{"address": "10.0.1.2:80", "error": "no answer within 1s"}]}`)
		}, Wrong, "n1 cannot connect to 1 of 1 endpoint, 10.0.1.2:80 (no answer within 1s): a NetworkPolicy or firewall",
			"kubectl get networkpolicies -n shop"},
		"endpoints refuse one of two nodes": {func(w *world) {
			w.reach("n1", `{"connects": [{"address": "10.0.1.2:80", "error": "connection refused", "refused": true}]}`)
			w.reach("n2", `{"connects": [{"address": "10.0.1.2:80"}]}`)
		}, Warning, "nothing listens at 10.0.1.2:80: n1 is refused by 1 of 1 endpoint", "TargetPort"},
		"clients are dropped": {func(w *world) {
			w.reach("n1", `{"walks": [
				{"packet": {"source": "192.0.2.11:1", "destination": "192.0.2.10:80", "protocol": "TCP"}, "dropped": "rule 1"},
				{"packet": {"source": "198.51.100.7:1", "destination": "192.0.2.10:80", "protocol": "TCP"}, "dropped": "rule 1"}]}`)
		}, Wrong, "n1 drops what clients send to 192.0.2.10:80/TCP: rule 1 (ClientsDropped)", "on n1"},
		"some clients are dropped": {func(w *world) {
			w.reach("n1", `{"walks": [
				{"packet": {"source": "192.0.2.11:1", "destination": "192.0.2.10:80", "protocol": "TCP"}},
				{"packet": {"source": "198.51.100.7:1", "destination": "192.0.2.10:80", "protocol": "TCP"}, "dropped": "rule 1"}]}`)
		}, OK, "192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"clients of one port are dropped": {func(w *world) {
			w.reach("n1", `{"walks": [{"packet": {"destination": "192.0.2.10:80", "protocol": "TCP"}},
				{"packet": {"destination": "192.0.2.10:443", "protocol": "TCP"}, "dropped": "rule 1"}]}`)
		}, Warning, "n1 drops what clients send to 192.0.2.10:443/TCP: rule 1", "on n1"},
		"no way back": {func(w *world) {
			w.reach("n1", `{"walks": [{"packet": {"source": "198.51.100.7:1", "destination": "192.0.2.10:80",
				"protocol": "TCP"}, "noRoute": true}]}`)
		}, Warning, "n1 has no route back to clients outside of its own subnets, such as 198.51.100.7: replies to them are " +
			"lost (ClientsUnrouted)", "default route"},
		"no way back in one of two families": {func(w *world) {
			w.reach("n1", `{"walks": [{"packet": {"source": "198.51.100.7:1", "destination": "192.0.2.10:80", "protocol": "TCP"}},
				{"packet": {"source": "[2001:db8::7]:1", "destination": "[2001:db8::10]:80", "protocol": "TCP"}, "noRoute": true}]}`)
		}, OK, "192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"the proxy hangs": {func(w *world) { w.proxyHangs("n1", false) }, Wrong,
			"the proxy on n1 hangs: it runs, and answers neither the speaker nor landfallctl, so changes of Services do not reach " +
				"the kernel, and the speaker announces nothing soon (ProxyHangs)", "delete the pod"},
		"all proxies hang": {func(w *world) {
			w.announced(false, lb.ReasonFeedLost, "no node announces 192.0.2.10: the proxy has been silent")
			w.proxyHangs("n1", true)
			w.proxyHangs("n2", true)
		}, Wrong, "the proxy on n1 hangs: it runs, and answers neither the speaker nor landfallctl, so the speaker announces " +
			"nothing (ProxyHangs)", "delete the pod"},
		"a proxy that cannot be asked does not hang": {func(w *world) {
			w.proxyHangs("n1", false)
			a := w.Agents["n1"]
			a.Proxy.Unanswered = "dial unix /run/landfall/proxy.sock: connect: no such file or directory"
			w.Agents["n1"] = a
		}, OK, "192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"another's proxy hangs": {func(w *world) { w.proxyHangs("n2", true) }, OK,
			"192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"another's relay": {func(w *world) { w.find("n1", lb.ReasonRelayAway, "the relay of n1 is not there") }, OK,
			"192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints", ""},
		"absent":        {func(w *world) { w.Found = false }, Wrong, "there is no such Service", "kubectl get services"},
		"not installed": {func(w *world) { w.Installed = false }, Wrong, "Landfall is not installed", "install"},
		"type": {func(w *world) { w.Service.Type = lb.ClusterIP }, Wrong, "it is of type ClusterIP",
			`kubectl patch service web -n shop`},
		"class": {func(w *world) { w.Service.Class = "metallb" }, Wrong,
			"spec.loadBalancerClass metallb gives it to another load balancer", "--load-balancer-class metallb"},
		"no class": {func(w *world) { w.Class = "landfall" }, Wrong, "it has no spec.loadBalancerClass", "landfall"},
		"deleted":  {func(w *world) { w.Service.Deleting = true }, Wrong, "it is being deleted", "finalizers"},
		"headless": {func(w *world) { w.Service.Headless = true }, Wrong,
			"the label service.kubernetes.io/headless takes it down on all nodes (Headless)", "kubectl label service web -n shop"},
		"another proxy": {func(w *world) { w.Service.Labels = labels.Set{labelProxyName: "cilium"} }, Wrong,
			"the label service.kubernetes.io/service-proxy-name=cilium gives it to another service proxy",
			"kubectl label service web -n shop service.kubernetes.io/service-proxy-name-"},
		"proxies with a name, and a Service without": {func(w *world) { w.ProxyName = "edge" }, Wrong,
			"Landfall's proxies serve only Services with the label service.kubernetes.io/service-proxy-name=edge " +
				"(proxy.serviceProxyName), and it has none", "helm upgrade … --set proxy.serviceProxyName=   # or kubectl label " +
				"service web -n shop service.kubernetes.io/service-proxy-name=edge"},
		"proxies with a name, and a Service with another": {func(w *world) {
			w.ProxyName, w.Service.Labels = "edge", labels.Set{labelProxyName: "cilium"}
		}, Wrong, "Landfall's proxies serve only Services with the label service.kubernetes.io/service-proxy-name=edge " +
			"(proxy.serviceProxyName), and it has \"cilium\"", "=edge --overwrite"},
		"proxies with a name, and a Service with it": {func(w *world) {
			w.ProxyName, w.Service.Labels = "edge", labels.Set{labelProxyName: "edge"}
		}, OK, "192.0.2.10 is announced from n1", ""},
		"no controller": {func(w *world) {
			w.unassigned("", "")
			w.Service.Conditions = nil
			w.Controllers = map[string]Program{"c": {There: true, Why: "CrashLoopBackOff"}}
		}, Wrong, "the controller does not run, so no Service gets an address: c: CrashLoopBackOff", "kubectl"},
		"no leader": {func(w *world) {
			w.unassigned("", "")
			w.Service.Conditions, w.Leader = nil, ""
		}, Wrong, "no controller leads", "logs"},
		"pool full": {func(w *world) { w.unassigned(lb.ReasonPoolExhausted, "pool lan is full") }, Wrong,
			"pool lan is full (PoolExhausted)", "kubectl edit ipaddresspool lan"},
		"quarantine": {func(w *world) { w.unassigned(lb.ReasonAddressKept, "192.0.2.9 is kept for shop/old") }, Wrong,
			"192.0.2.9 is kept for shop/old (AddressKept)", "quarantine"},
		"no advertisement": {func(w *world) { w.L2 = nil; w.announced(false, lb.ReasonNoAdvertisement, "no one") }, Wrong,
			"no L2Advertisement or BGPAdvertisement selects pool lan and this Service, so no node announces 192.0.2.10 " +
				"(NoAdvertisement)", "BGPAdvertisement"},
		"wrong subnet": {func(w *world) { w.announced(false, lb.ReasonNoInterface, "no node announces 192.0.2.10: no interface") },
			Wrong, "no node announces 192.0.2.10: no interface (NoInterface)", "subnet"},
		"no endpoints": {func(w *world) { w.Slices = nil; w.announced(false, lb.ReasonNoBackends, "no") }, Wrong,
			"it has no endpoints, so clients are refused", "kubectl get endpointslices -n shop"},
		"unready": {func(w *world) {
			for i := range w.Slices[0].Endpoints {
				w.Slices[0].Endpoints[i].Ready = false
			}
			w.announced(false, lb.ReasonNoBackends, "no")
		}, Wrong, "none of its 2 endpoints is ready", "kubectl get endpointslices"},
		"no speaker": {func(w *world) {
			for name, a := range w.Agents {
				w.Agents[name] = Agent{Node: name, Speaker: Program{There: true, Why: "ImagePullBackOff"}, Proxy: a.Proxy}
			}
		}, Wrong, "no speaker runs", "pods"},
		"not reported": {func(w *world) { w.Service.Conditions = w.Service.Conditions[:1] }, Wrong,
			"no speaker has reported on it yet", "logs"},
		"proxy down": {func(w *world) {
			w.announced(false, lb.ReasonFeedLost, "the proxy is silent")
			for name, a := range w.Agents {
				a.Proxy = Program{There: true, Why: "CrashLoopBackOff"}
				a.Delivers, a.Said.Gate.Reason = nil, lb.ReasonFeedLost
				w.Agents[name] = a
			}
		}, Wrong, "the proxy on n1 does not run: CrashLoopBackOff", "spec.nodeName=n1"},
		"kernel": {func(w *world) {
			w.announced(false, lb.ReasonNotProgrammed, "not programmed")
			for _, a := range w.Agents {
				a.Delivers.Services[0].VIPs[0] = ProxyVIP{VIP: vip, Reason: lb.ReasonNotProgrammed, Message: "the kernel refused them"}
			}
		}, Wrong, "n1 does not deliver 192.0.2.10: the kernel refused them (NotProgrammed)", "logs"},
		"a node has the address": {func(w *world) {
			w.find("n2", lb.ReasonAddressOnNode, "interface lo of n2 has 192.0.2.1, 192.0.2.10, so its kernel answers")
		}, Wrong, "interface lo of n2 has 192.0.2.1, 192.0.2.10, so its kernel answers (AddressOnNode)", "ip addr del"},
		"a node has the addresses of others": {func(w *world) {
			w.find("n2", lb.ReasonAddressOnNode, "interface lo of n2 has 192.0.2.1, 192.0.2.100, so its kernel answers")
		}, OK, "192.0.2.10 is announced from n1", ""},
		"a targetPort that no container has": {func(w *world) {
			w.Service.Ports = []lb.ServicePort{{Name: "web", Port: 80, Protocol: "TCP"}}
			w.announced(false, lb.ReasonNoBackends, "no endpoint is usable on any node")
		}, Wrong, "its endpoints have no port for web 80/TCP, so clients are refused there: targetPort names a port that no " +
			"container of the pods has (NoBackends)", "kubectl get endpointslices -n shop"},
		"one targetPort of two that no container has": {func(w *world) {
			w.Service.Ports = []lb.ServicePort{{Name: "web", Port: 80, Protocol: "TCP"}, {Name: "dns", Port: 53, Protocol: "UDP"}}
			w.Slices[0].Ports = []lb.SlicePort{{Name: "web", Protocol: "TCP", Port: 8080}, {Name: "dns", Protocol: "TCP", Port: 53}}
		}, Warning, "its endpoints have no port for dns 53/UDP, so clients", "endpointslices"},
		"ports that the endpoints have": {func(w *world) {
			w.Service.Ports = []lb.ServicePort{{Port: 80, Protocol: "TCP"}}
			w.Slices[0].Ports = []lb.SlicePort{{Protocol: "TCP", Port: 8080}}
		}, OK, "192.0.2.10 is announced from n1", ""},
		"endpoints without nodes, policy Local": {func(w *world) {
			w.Service.ExternalPolicy = lb.Local
			for i := range w.Slices[0].Endpoints {
				w.Slices[0].Endpoints[i].Node = ""
			}
			w.announced(false, lb.ReasonNoLocalBackends, "no usable endpoint on this node")
		}, Wrong, "none of its 2 ready endpoints has a nodeName in its EndpointSlice", "endpointslices"},
		"one node is out on purpose, and the speaker of the other hangs": {func(w *world) {
			w.announced(false, lb.ReasonNoOwner, "NodeExcluded on n1, Missing on n2")
			n1, n2 := w.Agents["n1"], w.Agents["n2"]
			n1.Said.VIPs[0].Nodes = []NodeVIP{{Node: "n1", Reason: lb.ReasonNodeExcluded, Message: "label"},
				{Node: "n2", Reason: lb.ReasonMissing, Message: "its speaker has stopped answering"}}
			n2.Said, n2.Speaker.Unanswered = nil, "no answer within 5s"
			w.Agents["n2"] = n2
		}, Wrong, "n2 does not announce 192.0.2.10: its speaker has stopped answering (Missing)", "explain node n2"},
		"one node is out on purpose, and the other is gone": {func(w *world) {
			w.announced(false, lb.ReasonNoOwner, "NodeExcluded on n1, Missing on n2")
			w.Agents["n1"].Said.VIPs[0].Nodes = []NodeVIP{{Node: "n1", Reason: lb.ReasonNodeExcluded, Message: "label"},
				{Node: "n2", Reason: lb.ReasonMissing, Message: "it has stopped"}}
			w.Agents["n2"] = Agent{Node: "n2", Speaker: Program{There: true, Why: "NodeLost"}}
		}, Wrong, "n1 does not announce 192.0.2.10: label (NodeExcluded)", "label"},
		"all nodes are drained": {func(w *world) {
			w.announced(true, lb.ReasonParting, "192.0.2.10 is announced from n1, although that node should not")
			for node := range w.Nodes() {
				w.Nodes()[node] = Node{Node: lb.Node{Name: node, Leaving: lb.ReasonNodeDrained}, Ready: true}
			}
			for _, a := range w.Agents {
				a.Said.VIPs[0].Nodes = []NodeVIP{
					{Node: "n1", Reason: lb.ReasonNodeDrained, Message: "drained", Answering: true},
					{Node: "n2", Reason: lb.ReasonNodeDrained, Message: "drained"}}
			}
		}, Warning, "192.0.2.10 is announced from n1, although that node should not (Parting)", "landfallctl undrain n1"},
		"one node is out, and the kernel of the other": {func(w *world) {
			w.announced(false, lb.ReasonNotProgrammed, "not programmed")
			for _, a := range w.Agents {
				a.Said.VIPs[0].Nodes = []NodeVIP{{Node: "n1", Reason: lb.ReasonNodeExcluded, Message: "label"},
					{Node: "n2", Reason: lb.ReasonNotProgrammed, Message: "not programmed"}}
			}
		}, Wrong, "n2 does not announce 192.0.2.10: not programmed (NotProgrammed)", "logs"},
		"one node is out on purpose, and the other has no network": {func(w *world) {
			w.announced(false, lb.ReasonNoOwner, "NodeExcluded on n1, NetworkUnavailable on n2")
			for _, a := range w.Agents {
				a.Said.VIPs[0].Nodes = []NodeVIP{{Node: "n1", Reason: lb.ReasonNodeExcluded, Message: "label"},
					{Node: "n2", Reason: lb.ReasonNetworkUnavailable, Message: "no CNI"}}
			}
		}, Wrong, "n2 does not announce 192.0.2.10: no CNI (NetworkUnavailable)", "describe node n2"},
		"forwarding": {func(w *world) { w.find("n1", lb.ReasonForwardingOff, "n1 has ip_forward=0") }, Wrong,
			"n1 has ip_forward=0 (ForwardingOff)", "sysctl"},
		"only an Event says so": {func(w *world) {
			w.Warnings = []NodeWarning{{"n3", *lb.Refuse(lb.ReasonForwardDropped, "n3 drops")}}
		}, Wrong, "n3 drops (ForwardDropped)", "proxy.acceptForwarded"},
		"an Event of a node that says otherwise now": {func(w *world) {
			w.Warnings = []NodeWarning{{"n1", *lb.Refuse(lb.ReasonForwardDropped, "n1 drops")}}
		}, OK, "192.0.2.10 is announced from n1", ""},
		"probe failed": {func(w *world) {
			w.probe("n1", `{"probe": "tcp", "asked": 3, "failing": [{"address": "10.0.2.2:80", "error": "connect: no answer"}]}`)
		}, Warning, `n1 sends no new connections to 10.0.2.2:80, which does not answer its probe "tcp": connect: no answer ` +
			`(ProbeFailed)`, "plugin's pod on n1"},
		"probe ignored": {func(w *world) {
			w.probe("n1", `{"probe": "http:/a", "asked": 1, "failing": [{"address": "10.0.2.2:80", "error": "status 404", `+
				`"used": true}]}`)
		}, Warning, `10.0.2.2:80 does not answer the probe "http:/a" of n1, which uses it, as fewer than half of the ` +
			`endpoints would be left: status 404 (ProbeIgnored)`, "landfall.dev/probe"},
		"probe passed": {func(w *world) { w.probe("n1", `{"probe": "tcp", "asked": 2}`) }, OK,
			"192.0.2.10 is announced from n1", ""},
		"contested": {func(w *world) { w.announced(true, lb.ReasonContested, "in use by 02:00:00:00:00:01, too") }, Warning,
			"in use by 02:00:00:00:00:01, too (Contested)", "MAC"},
		"one node is out": {func(w *world) {
			w.Agents["n2"].Said.VIPs[0].Nodes[1].Reason = lb.ReasonNodeExcluded
		}, OK, "192.0.2.10 is announced from n1", ""},
		"stale condition": {func(w *world) {
			for _, a := range w.Agents {
				a.Said.VIPs[0].Nodes = []NodeVIP{{Node: "n1", Reason: lb.ReasonStopping, Message: "it stops"}}
			}
		}, Wrong, "n1 does not announce 192.0.2.10: it stops (Stopping)", "wait"},
		"sources": {func(w *world) { w.Service.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")} }, OK,
			"192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints; only for clients in 198.51.100.0/24", ""},
		"may not ask": {func(w *world) {
			w.Unread = []Unread{{"nodes' programs", "you may not create pods/exec", "grant it"}}
		}, OK, "192.0.2.10 is announced from n1 (ARP on eth0); 2 endpoints; not checked: you may not create pods/exec", "grant"},

		"session refused": {func(w *world) {
			w.overBGP(lb.Peer{PeerASN: 64513, Status: down("dial: connection refused")})
			w.announced(false, lb.ReasonNotEstablished, noSession)
		}, Wrong, "BGP session with tor (192.0.2.254) from n1, n2 is down: 192.0.2.254 refuses the connection",
			"neighbor"},
		"wrong ASN": {func(w *world) {
			w.overBGP(lb.Peer{PeerASN: 64513, Status: down("received NOTIFICATION OPEN Message Error/Bad Peer AS")})
			w.announced(false, lb.ReasonNotEstablished, noSession)
		}, Wrong, "BGP session with tor (192.0.2.254) from n1, n2 is down: the AS numbers differ", "peerASN"},
		"wrong password": {func(w *world) {
			w.overBGP(lb.Peer{PeerASN: 64513, Password: "x", Status: down("dial: i/o timeout")})
			w.announced(false, lb.ReasonNotEstablished, noSession)
		}, Wrong, "BGP session with tor (192.0.2.254) from n1, n2 is down: 192.0.2.254 does not answer: most likely the MD5 " +
			"passwords differ", "password"},
		"hold time": {func(w *world) {
			w.overBGP(lb.Peer{PeerASN: 64513, Status: down("received NOTIFICATION OPEN Message Error/Unacceptable Hold Time")})
			w.announced(false, lb.ReasonNotEstablished, noSession)
		}, Wrong, "BGP session with tor (192.0.2.254) from n1, n2 is down: the router does not accept the hold time",
			"holdTime"},
		"filtered by the router": {func(w *world) { w.returned(3) }, Wrong,
			"tor (192.0.2.254) has not taken the route to 192.0.2.10/32: it announces 3 other routes of Landfall's back to the " +
				"nodes, but not this one (RouteFiltered)", "show bgp ipv4 unicast 192.0.2.10/32"},
		"not announced back, as its communities may have it": {func(w *world) {
			w.returned(3)
			w.BGP[0].Communities = []string{"no-export"}
		}, OK, "192.0.2.10 is announced", ""},
		"taken by the router": {func(w *world) {
			w.returned(4)
			w.Agents["n2"].Said.VIPs[0].Routes.Confirming = []string{"tor"}
		}, OK, "192.0.2.10 is announced", ""},
		"a router that announces nothing back": {func(w *world) { w.returned(0) }, OK, "192.0.2.10 is announced", ""},
		"one node": {func(w *world) {
			w.returned(3)
			w.Agents["n2"].Said.VIPs[0].Routes.Peers = nil
		}, OK, "192.0.2.10 is announced", ""},
		"filtered by one of two routers": {func(w *world) {
			w.returned(3)
			w.Peers = append(w.Peers, w.Peers[0])
			w.Peers[1].Name = "tor-2"
			for _, a := range w.Agents {
				a.Said.VIPs[0].Routes.Peers = []string{"tor", "tor-2"}
			}
			w.Agents["n1"].Said.VIPs[0].Routes.Confirming = []string{"tor-2"}
		}, Warning, "tor (192.0.2.254) has not taken the route", "filter"},
		"no peer": {func(w *world) {
			w.overBGP(lb.Peer{})
			w.Peers = nil
			w.announced(false, lb.ReasonNotEstablished, noSession)
		},
			Wrong, "no BGPPeer exists", "bgppeers"},
		"one session of two": {func(w *world) {
			w.overBGP(lb.Peer{PeerASN: 64513, Status: map[string]lb.PeerNode{"n1": {State: "Established"},
				"n2": {State: "Idle", Reason: lb.ReasonNotEstablished, Message: "connection refused"}}})
		}, Warning, "BGP session with tor (192.0.2.254) from n2 is down", "neighbor"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			test.fault(&w)
			v := Service(w.Cluster, w.ServiceFacts)
			if v.Level != test.level || !strings.HasPrefix(v.Line, "Service shop/web: "+test.line) {
				t.Errorf("%s: %q\nwant %s: %q", v.Level, v.Line, test.level, test.line)
			}
			if !strings.Contains(v.Cure, test.cure) || (v.Cure == "") != (test.cure == "") {
				t.Errorf("cure %q, want %q", v.Cure, test.cure)
			}
		})
	}
}

// TestPeerBeyondTheSubnet tells a time to live from a password.
func TestPeerBeyondTheSubnet(t *testing.T) {
	w := well()
	w.overBGP(lb.Peer{PeerASN: 64513, Status: down("i/o timeout")})
	v := Peer(w.Cluster, "tor")
	if want := "drops the packets: it expects an MD5 password or another TTL"; !strings.Contains(v.Line, want) {
		t.Errorf("%q, want %q", v.Line, want)
	}
	w.Peers[0].Addr = netip.MustParseAddr("203.0.113.1")
	v = Peer(w.Cluster, "tor")
	if want := "203.0.113.1 is in no subnet of the node"; !strings.Contains(v.Line, want) || !strings.Contains(v.Cure, "ebgpMultiHop") {
		t.Errorf("%q, %q, want %q", v.Line, v.Cure, want)
	}
}

// A roll-out that waits for a speaker that does not hear the others never reaches the next node, so the cure for keys that
// differ has a second way, and its price.
func TestSpeakersWithDifferentKeysAreAllReplaced(t *testing.T) {
	w := well()
	w.Agents["n1"].Said.Members.Live = []string{"n1"}
	w.Agents["n1"].Said.Members.Trouble = ": n2: connected, but " + otherKey
	v := NodeName(w.Cluster, "n1").In("lb")
	for _, want := range []string{"kubectl -n lb rollout restart daemonset   # ", "kubectl -n lb delete pod -l " +
		"'app.kubernetes.io/component in (node,speaker)'", "at once"} {
		if !strings.Contains(v.Cure, want) {
			t.Errorf("%q is not in the cure %q", want, v.Cure)
		}
	}
}

// TestGossipPort names the port that the speakers have.
func TestGossipPort(t *testing.T) {
	for port, want := range map[string]string{"": "port 7947 between", "17947": "port 17947 between"} {
		w := well()
		w.GossipPort, w.Agents["n1"].Said.Members.Live = port, []string{"n1"}
		w.find("n2", lb.ReasonGossipBlocked, "the speaker on n2 has met no other")
		for subject, v := range map[string]Verdict{"node n1": NodeName(w.Cluster, "n1"), "node n2": NodeName(w.Cluster, "n2"),
			"doctor": Doctor(w.Cluster, DoctorFacts{Version: "v1.35.4"})} {
			if v.Reason != lb.ReasonGossipBlocked || !strings.Contains(v.Cure, want) {
				t.Errorf("%s, --bind-port %q: %s, cure %q", subject, port, v.Line, v.Cure)
			}
		}
	}
}

// TestNode explains a node, and TestPool a pool, with one fault after the other.
func TestNode(t *testing.T) {
	for name, test := range map[string]struct {
		fault func(w *world)
		level Level
		line  string
	}{
		"nothing":   {func(*world) {}, OK, "announces and delivers"},
		"absent":    {func(w *world) { delete(w.Nodes(), "n1") }, Wrong, "there is no such Node"},
		"not ready": {func(w *world) { w.Nodes()["n1"] = Node{NotReady: "kubelet stopped"} }, Wrong, "it is not ready: kubelet"},
		"no pod":    {func(w *world) { w.Agents["n1"] = Agent{} }, Wrong, "the speaker on n1 does not run: it has no pod"},
		"waits":     {func(w *world) { w.Agents["n1"].Said.Waiting = "pools" }, Wrong, "the speaker on n1 announces nothing yet"},
		"may not read": {func(w *world) {
			w.Agents["n1"].Said.Waiting = `the list of Nodes: nodes is forbidden: User "a" cannot list resource "nodes"`
		}, Wrong, "the speaker on n1 announces nothing yet: it waits for the list of Nodes: nodes is forbidden: User"},
		"deaf": {func(w *world) { w.Agents["n1"].Said.Members.Live = []string{"n1"} }, Wrong,
			"its speaker does not hear the ready speakers on n2 (GossipBlocked)"},
		"not joined": {func(w *world) {
			w.Agents["n1"].Said.Members.Live, w.Agents["n1"].Said.Members.Joined = []string{"n1"}, false
		}, Wrong, "its speaker has not met that of n2"},
		"another key": {func(w *world) {
			said := w.Agents["n1"].Said
			said.Members.Live, said.Members.Joined = []string{"n1"}, false
			said.Members.Trouble = ": n2: connected, but no exchange of states: a different --gossip-key-file, a newer version, " +
				"or a speaker that hangs"
		}, Wrong, "its speaker reaches that of n2, but they do not understand each other: most likely their gossip keys differ"},
		"hangs": {func(w *world) {
			said, n2 := w.Agents["n1"].Said, w.Agents["n2"]
			said.Members.Live = []string{"n1"}
			said.Members.Trouble = ": n2: connected, but no exchange of states: a different --gossip-key-file, a newer version, " +
				"or a speaker that hangs"
			n2.Said, n2.Speaker.Unanswered = nil, "no answer within 5s"
			w.Agents["n2"] = n2
		}, Wrong, "the speakers on n2 hang, or their nodes are cut off: they answer neither n1 nor landfallctl (Missing)"},
		"cannot be asked, refused": {func(w *world) {
			w.unasked("n2", "error dialing backend: dial tcp 10.0.0.2:10250: connect: connection refused")
		}, Wrong,
			"its speaker does not hear those on n2, and landfallctl cannot ask them why; n2: " +
				"error dialing backend: dial tcp 10.0.0.2:10250: connect: connection refused (Missing)"},
		"cannot be asked, no route": {func(w *world) {
			w.unasked("n2", "error dialing backend: dial tcp 10.0.0.2:10250: connect: no route to host")
		}, Wrong,
			"its speaker does not hear those on n2, and landfallctl cannot ask them why; n2: " +
				"error dialing backend: dial tcp 10.0.0.2:10250: connect: no route to host (Missing)"},
		"cannot be asked, TLS": {func(w *world) {
			w.unasked("n2", "error dialing backend: tls: failed to verify certificate: x509: certificate has expired")
		}, Wrong,
			"its speaker does not hear those on n2, and landfallctl cannot ask them why; n2: " +
				"error dialing backend: tls: failed to verify certificate: x509: certificate has expired (Missing)"},
		"cannot be asked, forbidden": {func(w *world) { w.unasked("n2", "unable to upgrade connection: Forbidden (user=kube-apiserver)") }, Wrong,
			"its speaker does not hear those on n2, and landfallctl cannot ask them why; n2: " +
				"unable to upgrade connection: Forbidden (user=kube-apiserver) (Missing)"},
		"silent": {func(w *world) {
			a := w.Agents["n1"]
			a.Said, a.Speaker.Unanswered = nil, "no answer within 5s"
			w.Agents["n1"] = a
		}, Unknown, "announces and delivers; not checked: the speaker on n1 did not answer: no answer within 5s"},
		"forwarding": {func(w *world) { w.find("n1", lb.ReasonForwardingOff, "n1 has ip_forward=0") }, Wrong, "n1 has ip_forward=0"},
		"drained": {func(w *world) {
			w.Nodes()["n1"] = Node{Node: lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained}, Ready: true}
		}, Warning, "it announces no address, as it is drained (NodeDrained)"},
		"drained, and the only one": {func(w *world) {
			w.drainedAlone()
		}, Warning, "it is drained, and announces only what no other node delivers: 2 addresses, of Services shop/dns, shop/web " +
			"(NodeDrained)"},
		"drained, and hands over": {func(w *world) {
			w.Nodes()["n1"] = Node{Node: lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained}, Ready: true}
			w.said(`{"bgp": {"peers": [{"name": "tor", "session": {"state": "Established", "prefixes": 1}}]}}`)
		}, Warning, "it is drained, and announces 1 address until other nodes have taken over (NodeDrained)"},
		"drained, and a router is away": {func(w *world) {
			w.Nodes()["n1"] = Node{Node: lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained}, Ready: true}
			w.said(`{"bgp": {"leaving": 2}}`)
		}, Warning, "it is drained, and announces 2 addresses to its routers once they are back, until other nodes do (NodeDrained)"},
		"drained, and one of two routers is away": {func(w *world) {
			w.Nodes()["n1"] = Node{Node: lb.Node{Name: "n1", Leaving: lb.ReasonNodeDrained}, Ready: true}
			w.said(`{"bgp": {"leaving": 2, "peers": [{"name": "tor", "session": {"state": "Established", "prefixes": 1}}]}}`)
		}, Warning, "it is drained, and announces 1 address until other nodes have taken over, and 1 address more to its routers " +
			"once they are back (NodeDrained)"},
		"it leaves, and is the only one": {func(w *world) {
			w.drainedAlone()
			w.Nodes()["n1"] = Node{Node: lb.Node{Name: "n1", Leaving: lb.ReasonNodeLeaving}, Ready: true}
		}, Warning, "it is about to leave the cluster, and announces only what no other node delivers: 2 addresses, of"},
		"another's": {func(w *world) { w.find("n2", lb.ReasonForwardingOff, "n2 has ip_forward=0") }, OK, "announces and"},
		"no carrier": {func(w *world) {
			w.withhold(lb.ReasonNoCarrier, "interface eth1 of n1 is down or has no carrier", 1)
		}, Wrong, "it does not announce 192.0.2.10: interface eth1 of n1 is down or has no carrier (NoCarrier)"},
		"no network": {func(w *world) {
			w.withhold(lb.ReasonNetworkUnavailable, "n1: the Node has the condition", 3)
		}, Wrong, "it does not announce 192.0.2.10 and 2 more: n1: the Node has the condition (NetworkUnavailable)"},
		"not ready, which counts": {func(w *world) {
			w.Nodes()["n1"] = Node{NotReady: "kubelet stopped"}
			w.withhold(lb.ReasonNodeNotReady, "n1: the Node is not ready", 1)
		}, Wrong, "it is not ready: kubelet stopped (NodeNotReady)"},
		"a reason of the Service": {func(w *world) {
			w.announced(false, lb.ReasonNoLocalBackends, "no endpoint on this node")
		}, OK, "announces and"},
		"interface": {func(w *world) { w.Agents["n1"].Said.Interfaces[0].Problem = "no MAC" }, Warning, "interface eth0: no MAC"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			test.fault(&w)
			if v := NodeName(w.Cluster, "n1"); v.Level != test.level || !strings.HasPrefix(v.Line, "Node n1: "+test.line) {
				t.Errorf("%s: %q\nwant %s: %q", v.Level, v.Line, test.level, test.line)
			}
		})
	}
}

func TestPool(t *testing.T) {
	waiting := []lb.Key{{Namespace: "shop", Name: "new"}}
	for name, test := range map[string]struct {
		fault   func(w *world)
		waiting []lb.Key
		level   Level
		line    string
	}{
		"nothing": {func(*world) {}, nil, OK, "assigns addresses; IPv4 1 assigned, 15 free"},
		"absent":  {func(w *world) { w.Pools = nil }, nil, Wrong, "there is no such IPAddressPool"},
		"full": {func(w *world) { w.Pools[0].Status.AvailableIPv4 = "0" }, nil, Warning,
			"it is full, so the next Service gets no address"},
		"full and waited for": {func(w *world) { w.Pools[0].Status.AvailableIPv4 = "0" }, waiting, Wrong,
			"it is full, and shop/new waits for an address"},
		"overlaps": {func(w *world) {
			w.Pools[0].Status.Conditions[0] = lb.Condition{Type: lb.ConditionReady, Reason: lb.ReasonPoolOverlaps, Message: "overlaps wan"}
		}, nil, Wrong, "overlaps wan (Overlapping)"},
		"no advertisement": {func(w *world) { w.L2 = nil }, nil, Wrong, "no L2Advertisement or BGPAdvertisement selects it"},
		"no controller": {func(w *world) { w.Pools[0].Status.Conditions, w.Controllers = nil, nil }, nil, Wrong,
			"the controller does not run"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			test.fault(&w)
			v := Pool(w.Cluster, "lan", test.waiting)
			if v.Level != test.level || !strings.HasPrefix(v.Line, "IPAddressPool lan: "+test.line) {
				t.Errorf("%s: %q\nwant %s: %q", v.Level, v.Line, test.level, test.line)
			}
		})
	}
}

func TestIPWithoutService(t *testing.T) {
	free := netip.MustParseAddr("192.0.2.12")
	for name, test := range map[string]struct {
		addr  string
		fault func(p *lb.Pool)
		level Level
		line  string
	}{
		"free":    {"192.0.2.12", func(*lb.Pool) {}, OK, "no Service holds it; in pool lan: free"},
		"outside": {"198.51.100.1", func(*lb.Pool) {}, Wrong, "no pool contains it"},
		"node":    {"192.0.2.1", func(*lb.Pool) {}, OK, "it is an address of Node n"},
		"quarantine": {"192.0.2.12", func(p *lb.Pool) {
			p.Status.Released = []lb.Released{{Addr: free, Service: lb.Key{Namespace: "shop", Name: "old"}}}
		}, OK, "no Service holds it; in pool lan: in quarantine for shop/old"},
		"excluded": {"192.0.2.12", func(p *lb.Pool) { p.Excluded = []lb.Range{mustRange("192.0.2.12/32")} }, OK,
			"no Service holds it; in pool lan: spec.excludedAddresses"},
		"reserved": {"192.0.2.12", func(p *lb.Pool) {
			p.Reservations = []lb.Reservation{{Range: mustRange("192.0.2.12/32"), Namespace: "shop"}}
		}, OK, "no Service holds it; in pool lan: spec.reservations keeps it for shop/"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			test.fault(&w.Pools[0])
			v := IP(w.Cluster, netip.MustParseAddr(test.addr))
			if v.Level != test.level || !strings.HasPrefix(v.Line, "IP "+test.addr+": "+test.line) {
				t.Errorf("%s: %q\nwant %s: %q", v.Level, v.Line, test.level, test.line)
			}
		})
	}
}

func TestReasonName(t *testing.T) {
	if v, ok := ReasonName("nointerface"); !ok || !strings.HasPrefix(v.Line, "NoInterface: ") || v.Cure == "" {
		t.Errorf("%v %v", v, ok)
	}
	if _, ok := ReasonName("Nonsense"); ok {
		t.Error("explains nonsense")
	}
}

// What the nodes' kernels have counted is added up, refusals by reason.
func TestTraffic(t *testing.T) {
	w := well()
	for i, name := range []string{"n1", "n2"} {
		w.Agents[name].Delivers.Services[0].Counters = &Counters{Connections: 3, BytesReceived: 100, BytesSent: 1000,
			Refused: map[lb.Reason]uint64{lb.ReasonSourceRefused: uint64(1 - i)}}
	}
	const want = "6 connections, 200 bytes received, 2000 sent on n1, n2; 1 refused: SourceRefused"
	if got := explanation(w).traffic(); got.Text != want || got.Level != Note {
		t.Errorf("%s: %q, want %q", got.Level, got.Text, want)
	}
}

// TestUnreadIsNotAbsent takes nothing that could not be read for something that is not there.
func TestUnreadIsNotAbsent(t *testing.T) {
	for _, kind := range []string{"bgpadvertisements", "bgppeers", "configmaps", "endpointslices", "events", "ipaddresspools",
		"l2advertisements", "leases", "namespaces", "nodes", "nodes' programs", "pods", OtherPods, "services"} {
		w := well()
		d := DoctorFacts{Version: "v1.35.4", Namespace: "landfall-system", Services: []lb.Service{w.Service}}
		switch kind {
		case "endpointslices":
			w.Slices = nil
		case "ipaddresspools":
			w.Pools = nil
		case "l2advertisements":
			w.L2 = nil
		case "leases":
			w.Leader = ""
		case "nodes":
			w.Cluster.Nodes = nil
		case "pods":
			w.Agents, w.Controllers, w.Leader = nil, nil, ""
		case "services":
			d.Services = nil
		}
		w.Unread = []Unread{{kind, "you may not list " + kind, "grant it"}}
		for subject, v := range map[string]Verdict{"svc": Service(w.Cluster, w.ServiceFacts), "node": NodeName(w.Cluster, "n1"),
			"pool": Pool(w.Cluster, "lan", nil), "ip": IP(w.Cluster, netip.MustParseAddr("192.0.2.11")),
			"peer": Peer(w.Cluster, "tor"), "doctor": Doctor(w.Cluster, d), "doctor --node": DoctorNode(w.Cluster, d, "n1")} {
			if subject == "peer" && kind != "bgppeers" {
				continue // there is none
			}
			if v.Level.Worse(Unknown) || !strings.Contains(v.Line, "you may not list "+kind) || v.Cure != "grant it" {
				t.Errorf("%s without %s: %s: %s; %s", subject, kind, v.Level, v.Line, v.Cure)
			}
			if strings.HasPrefix(subject, "doctor") && v.Level != Unknown {
				t.Errorf("%s without %s: %s", subject, kind, v.Level)
			}
		}
	}
}

// TestReachAsksForWhatClientsMeet looks at the endpoints, ports and clients that a node is asked about.
func TestReachAsksForWhatClientsMeet(t *testing.T) {
	ports := []lb.ServicePort{{Name: "http", Port: 80, Protocol: lb.TCP}, {Name: "dns", Port: 53, Protocol: lb.UDP}}
	for name, test := range map[string]struct {
		change func(w *world)
		want   string
	}{
		"a Service": {func(*world) {}, "connect [10.0.1.2:8080 10.0.2.2:8080] from [192.0.2.11 198.51.100.7] " +
			"to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"Local": {func(w *world) { w.Service.ExternalPolicy = lb.Local },
			"connect [10.0.1.2:8080] from [192.0.2.11 198.51.100.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"endpoints that are not ready": {func(w *world) { w.Slices[0].Endpoints[0].Ready = false },
			"connect [10.0.2.2:8080] from [192.0.2.11 198.51.100.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"source ranges": {func(w *world) {
			w.Service.SourceRanges = []netip.Prefix{netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("10.9.1.7/24")}
		}, "connect [10.0.1.2:8080 10.0.2.2:8080] from [10.9.1.0 10.9.1.1] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"one source": {func(w *world) { w.Service.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.9.1.7/32")} },
			"connect [10.0.1.2:8080 10.0.2.2:8080] from [10.9.1.7 10.9.1.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"a node beside the VIP": {func(w *world) {
			w.Cluster.Nodes["n3"] = Node{Node: lb.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.11")}}}
		}, "connect [10.0.1.2:8080 10.0.2.2:8080] from [192.0.2.12 198.51.100.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"endpoints that are no pods": {func(w *world) {
			w.Cluster.Nodes["n3"] = Node{Node: lb.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.33")}}}
			w.Cluster.Peers = append(w.Cluster.Peers, lb.Peer{Addr: netip.MustParseAddr("192.0.2.1")})
			for addr, node := range map[string]string{"192.0.2.1": "n1", "192.0.2.10": "n1", "192.0.2.33": "n1", "169.254.169.254": ""} {
				w.Slices[0].Endpoints = append(w.Slices[0].Endpoints, lb.Endpoint{Addr: netip.MustParseAddr(addr), Node: node,
					Ready: true})
			}
		}, "connect [10.0.1.2:8080 10.0.2.2:8080] from [192.0.2.11 198.51.100.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"an endpoint on its node's network": {func(w *world) {
			w.Cluster.Nodes["n3"] = Node{Node: lb.Node{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.33")}}}
			w.Slices[0].Endpoints = []lb.Endpoint{{Addr: netip.MustParseAddr("192.0.2.33"), Node: "n3", Ready: true}}
		}, "connect [192.0.2.33:8080] from [192.0.2.11 198.51.100.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
		"two families and many ports": {func(w *world) {
			w.Service.Ingress = append(w.Service.Ingress, lb.Ingress{Addr: netip.MustParseAddr("2001:db8:1::10")})
			w.Service.Ports = slices.Concat(ports, ports, ports)
		}, "connect [10.0.1.2:8080 10.0.2.2:8080] from [192.0.2.11 198.51.100.7 2001:db8:1::11 2001:db8:ffff::7] " +
			"to [192.0.2.10:80/TCP [2001:db8:1::10]:80/TCP 192.0.2.10:53/UDP [2001:db8:1::10]:53/UDP]"},
		"many endpoints": {func(w *world) {
			for i := range byte(20) {
				w.Slices[0].Endpoints = append(w.Slices[0].Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 3, i}),
					Ready: i >= 15})
			}
		}, "connect [10.0.1.2:8080 10.0.2.2:8080 10.0.3.15:8080 10.0.3.16:8080 10.0.3.17:8080 10.0.3.18:8080 10.0.3.19:8080] " +
			"from [192.0.2.11 198.51.100.7] to [192.0.2.10:80/TCP 192.0.2.10:53/UDP]"},
	} {
		t.Run(name, func(t *testing.T) {
			w := well()
			w.Service.Ports = ports
			w.Slices[0].Ports = []lb.SlicePort{{Name: "http", Port: 8080, Protocol: lb.TCP},
				{Name: "dns", Port: 5353, Protocol: lb.UDP}, {Name: "metrics", Port: 9090, Protocol: lb.TCP}}
			test.change(&w)
			r := w.Reach("n1", w.Cluster)
			if got := fmt.Sprintf("connect %v from %v to %v", r.Connect, r.From, r.To); got != test.want {
				t.Errorf("it asks to %s,\nwant %s", got, test.want)
			}
		})
	}
}

// A node that relays one of a Service's families alone does not count as one that relays it.
func TestRelayOfOneFamily(t *testing.T) {
	both := []lb.Family{lb.IPv4, lb.IPv6}
	for _, test := range []struct {
		families []lb.Family
		reason   lb.Reason
		want     string
	}{
		{both, lb.ReasonRelayWithoutPort, "connections go straight to endpoints on n1: no IPv6 here"},
		{both, lb.ReasonRelayDropped, "connections go straight to endpoints on n1: no IPv6 here"},
		{both, lb.ReasonRelayAway, "connections end at the relays of n1, n2, which have 6 connections of all Services"},
		{both, lb.ReasonForwardDropped, "connections end at the relays of n1, n2, which have 6 connections of all Services"},
		{both[:1], lb.ReasonRelayWithoutPort, "connections end at the relays of n1, n2, which have 6 connections of all Services"},
	} {
		w := well()
		w.relay(func(*ProxyStatus) {})
		w.Service.Families = test.families
		w.find("n1", test.reason, "no IPv6 here")
		if check := explanation(w).relay(); check.Text != test.want {
			t.Errorf("%s, %v: %+v, want %q", test.reason, test.families, check, test.want)
		}
	}
}

// A Service with UDP alone is relayed as long as flows are: a relay that is full takes no connections, but flows.
func TestRelayLeads(t *testing.T) {
	at := map[lb.Family]netip.AddrPort{lb.IPv4: netip.MustParseAddrPort("192.0.2.1:7484")}
	r := &ProxyRelay{Full: true, LeadsUDP: at}
	tcp, udp := lb.ServicePort{Port: 53, Protocol: lb.TCP}, lb.ServicePort{Port: 53, Protocol: lb.UDP}
	for _, test := range []struct {
		ports []lb.ServicePort
		want  int
	}{{nil, 0}, {[]lb.ServicePort{udp}, 1}, {[]lb.ServicePort{tcp}, 0}, {[]lb.ServicePort{udp, tcp}, 0}} {
		if got := r.leads(test.ports); len(got) != test.want {
			t.Errorf("%v: %v", test.ports, got)
		}
	}
}
