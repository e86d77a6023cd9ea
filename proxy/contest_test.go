package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// list creates a Service of type ClusterIP that lists external IPs.
func (b *bench) list(name string, created time.Time, port uint16, ips ...string) {
	b.put(name, "192.0.2.99", "10.200.1.66")
	svc, _ := b.services.Get(key(name))
	svc.Type, svc.Ingress, svc.Created, svc.HealthCheckNodePort = lb.ClusterIP, nil, created, 0
	svc.Ports = []lb.ServicePort{{Protocol: lb.TCP, Port: port}}
	for _, ip := range ips {
		svc.ExternalIPs = append(svc.ExternalIPs, netip.MustParseAddr(ip))
	}
	b.services.Set(key(name), svc)
	b.mark(key(name))
}

// dualStack gives a Service a cluster IP of IPv6 too.
func (b *bench) dualStack(name string) {
	svc, _ := b.services.Get(key(name))
	svc.ClusterIPs = append(slices.Clone(svc.ClusterIPs), netip.MustParseAddr("fd00:96::1"))
	b.services.Set(key(name), svc)
	b.mark(key(name))
}

// A tenant that lists another's VIP and a cluster IP gets an Event, once. The owners are not
// touched, not even in what the feed says; and when one of them goes, the tenant gets what is free.
func TestContract11ATenantsExternalIPsHarmNobody(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.put("dns", "192.0.2.3", "10.200.1.3")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.expectDelivery("web", "192.0.2.1", "1")
	b.order = nil
	b.list("aaa", time.Time{}.Add(-time.Hour), 80, "192.0.2.1", clusterIP("dns").String(), "198.51.100.7")
	b.run()
	if want := []string{"feed aaa", "rules aaa"}; !slices.Equal(b.order, want) {
		t.Errorf("the owners were touched: %v", b.order)
	}
	b.rules.confirm()
	b.run()
	b.expectDelivery("web", "192.0.2.1", "1")
	if want := "aaa FrontendInUse here: spec.externalIPs: 192.0.2.1:80/tcp is held by Service default/web\n" +
		"aaa ExternalIPRefused here: spec.externalIPs: " + clusterIP("dns").String() +
		" is the cluster IP of Service default/dns"; strings.Join(b.warnings, "\n") != want {
		t.Errorf("Events:\n%s\nwant\n%s", strings.Join(b.warnings, "\n"), want)
	}
	external := func() string {
		var all []string
		for _, p := range b.rules.wanted[key("aaa")].Ports {
			for _, f := range p.Frontends {
				if f.Kind == plan.ExternalIP {
					all = append(all, f.Addr.String())
				}
			}
		}
		return strings.Join(all, " ")
	}
	if got := external(); got != "198.51.100.7" {
		t.Errorf("served at %s", got)
	}
	if n := b.counts.advised[true]; n != 1 {
		t.Errorf("%d Services counted that do not get what they ask for", n)
	}
	b.mark(key("aaa"))
	b.run()
	if len(b.warnings) != 2 {
		t.Errorf("warned again: %v", b.warnings)
	}
	b.delete("web")
	b.run()
	if got := external(); got != "192.0.2.1 198.51.100.7" {
		t.Errorf("the owner has gone, and the tenant is served at %s", got)
	}
	if got := b.frontends("web"); got != "" {
		t.Errorf("what the tenant serves lingers: %s", got)
	}
}

// Two Services have one VIP and port in their status, as of a cache that lags. The younger one is
// told, and the older one's report stays as it is.
func TestContract11TheOlderHolderOfAVIPGoesOn(t *testing.T) {
	b := newBench(t)
	b.put("zzz", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	b.order = nil
	b.put("aaa", "192.0.2.1", "10.200.1.3")
	svc, _ := b.services.Get(key("aaa"))
	svc.Created = svc.Created.Add(time.Hour)
	b.services.Set(key("aaa"), svc)
	b.run()
	if want := []string{"feed aaa", "rules aaa"}; !slices.Equal(b.order, want) {
		t.Errorf("the owner was touched: %v", b.order)
	}
	b.rules.confirm()
	b.run()
	b.expectDelivery("zzz", "192.0.2.1", "1")
	b.expectDelivery("aaa", "192.0.2.1", "refused")
	b.expectFrontends("aaa", "")
	b.expectFrontends("zzz", "192.0.2.1")
	b.delete("zzz")
	b.run()
	b.rules.confirm()
	b.run()
	b.expectFrontends("aaa", "192.0.2.1")
	b.expectDelivery("aaa", "192.0.2.1", "1")
}

// An old Service that adds an external IP does not take its port from a younger one that serves it: not before
// the controller has seen it list the address, not after, and not from a proxy that starts.
func TestContract11TheHolderOfAnExternalIPGoesOn(t *testing.T) {
	for _, family := range []struct{ address, another string }{
		{"198.51.100.7", "198.51.100.8"}, {"2001:db8:51::7", "2001:db8:51::8"}} {
		t.Run(family.address, func(t *testing.T) { theHolderGoesOn(t, family.address, family.another) })
	}
}

func theHolderGoesOn(t *testing.T, address, another string) {
	list := func(b *bench, name string, created time.Time, listed lb.Listing, ips ...string) {
		b.list(name, created, 80, ips...)
		svc, _ := b.services.Get(key(name))
		svc.Listed = listed
		svc.ClusterIPs = append(slices.Clone(svc.ClusterIPs), netip.AddrFrom16([16]byte{0: 0xfd, 15: name[0]}))
		b.services.Set(key(name), svc)
	}
	frontend := netip.AddrPortFrom(netip.MustParseAddr(address), 80).String()
	old := time.Time{}.Add(-time.Hour)
	holder, first := lb.Listing{address: 5000, "80/TCP": 5000}, lb.Listing{another: 1000, "80/TCP": 1000}
	later := lb.Listing{another: 1000, "80/TCP": 1000, address: 6000}
	b := newBench(t)
	list(b, "aaa", old, first, another)
	list(b, "zzz", time.Time{}, holder, address)
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	check := func(b *bench) {
		t.Helper()
		b.rules.confirm()
		b.run()
		for name, want := range map[string]bool{"zzz": true, "aaa": false} {
			if got := b.rules.wanted[key(name)].Serves(lb.TCP, netip.MustParseAddr(address), 80); got != want {
				t.Errorf("%s serves the external IP: %v", name, got)
			}
		}
		if want := "aaa FrontendInUse here: spec.externalIPs: " + frontend + "/tcp is in use by Service default/zzz"; len(
			b.warnings) != 1 || b.warnings[0] != want {
			t.Errorf("Events %v", b.warnings)
		}
	}
	for _, listed := range []lb.Listing{first, later} {
		b.order = nil
		list(b, "aaa", old, listed, another, address)
		b.run()
		if slices.Contains(b.order, "rules zzz") || slices.Contains(b.order, "feed zzz") {
			t.Errorf("the holder was touched: %v", b.order)
		}
		check(b)
	}
	started := newBench(t)
	list(started, "aaa", old, later, another, address)
	list(started, "zzz", time.Time{}, holder, address)
	started.synced()
	started.run()
	check(started)
}

// Pools and the flag refuse external IPs as soon as they are known. A change of them plans only the
// Services that list some.
func TestExternalIPsFollowPoolsAndFlag(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.list("x", time.Time{}, 80, "192.0.2.50")
	b.synced()
	b.pools.SetSynced(false)
	b.run()
	if b.waiting != "the IPAddressPools" || b.rules.sets != 0 {
		t.Errorf("waiting for %q, %d writes", b.waiting, b.rules.sets)
	}
	b.pools.SetSynced(true)
	b.run()
	b.rules.confirm()
	b.run()
	serves := func() bool {
		return b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr("192.0.2.50"), 80)
	}
	if !serves() {
		t.Error("not served although nothing is against it")
	}
	b.order = nil
	b.pools.Set("lan", []lb.Range{{From: netip.MustParseAddr("192.0.2.9"), To: netip.MustParseAddr("192.0.2.99")}})
	b.run()
	if serves() || len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "IPAddressPool lan") {
		t.Errorf("served: %v, Events %v", serves(), b.warnings)
	}
	if slices.Contains(b.order, "rules web") {
		t.Error("another Service was planned again")
	}
	b.pools.Delete("lan")
	b.run()
	if !serves() {
		t.Error("not served although the pool has gone")
	}
}

// Ports that no Service has are refused at the VIPs of Services, as long as a pool contains the VIP
// and no Node has it. What a Node or a pool changes of that concerns those Services alone.
func TestContract9PortsAreRefusedAtVIPsOfPools(t *testing.T) {
	vip := netip.MustParseAddr("192.0.2.1")
	b := newBench(t)
	b.nodes.OnChange(b.markNode)
	b.put("web", vip.String(), "10.200.1.2")
	b.put("other", "192.0.2.200", "10.200.1.3")
	b.synced()
	refused := func(want bool) {
		t.Helper()
		b.run()
		b.rules.confirm()
		b.run()
		if slices.Contains(b.rules.wanted[key("web")].Sole, vip) != want {
			t.Errorf("refused: %v", !want)
		}
		b.expectDelivery("web", vip.String(), "1")
	}
	refused(false)
	b.order = nil
	b.pools.Set("lan", []lb.Range{{From: netip.MustParseAddr("192.0.2.0"), To: netip.MustParseAddr("192.0.2.99")}})
	refused(true)
	b.nodes.Set("there", lb.Node{Name: "there", Addresses: []netip.Addr{vip}})
	refused(false)
	b.nodes.Delete("there")
	refused(true)
	if slices.Contains(b.order, "rules other") {
		t.Error("another Service was planned again")
	}
	b.delete("web") // its frontends stay for a while, but who has the address next is not known
	b.run()
	if len(b.rules.wanted[key("web")].Sole) > 0 {
		t.Error("refused although the Service has gone")
	}
	b.expectFrontends("web", vip.String()+"?")
}

// TestContract11ATenantTakesNoPortOfANode: an external IP that is an address of any Node is refused
// as soon as the Node is known, and served once an administrator has listed it.
func TestContract11ATenantTakesNoPortOfANode(t *testing.T) {
	const address = "172.31.0.9"
	node := lb.Node{Name: "there", Addresses: []netip.Addr{netip.MustParseAddr(address)}}
	b := newBench(t)
	b.nodes.OnChange(b.markNode)
	b.list("x", time.Time{}, 10250, address)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.nodes.SetSynced(false)
	b.run()
	if b.waiting != "the Nodes" || b.rules.sets != 0 {
		t.Errorf("waiting for %q, %d writes", b.waiting, b.rules.sets)
	}
	b.nodes.SetSynced(true)
	serves := func(want bool) {
		t.Helper()
		b.order = nil
		b.run()
		b.rules.confirm()
		b.run()
		if b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(address), 10250) != want {
			t.Errorf("served: %v", !want)
		}
	}
	serves(true)
	b.nodes.Set("there", node)
	serves(false)
	if slices.Contains(b.order, "rules web") {
		t.Error("another Service was planned again")
	}
	if len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "ExternalIPRefused here: spec.externalIPs: "+address+
		" is an address of the Node there") {
		t.Errorf("Events %v", b.warnings)
	}
	node.Labels = map[string]string{"a": "b"}
	b.nodes.Set("there", node)
	serves(false)
	if slices.Contains(b.order, "rules x") {
		t.Errorf("a label of a Node caused %v", b.order)
	}
	b.settings.externalIPs.Allowed = []netip.Prefix{netip.MustParsePrefix(address + "/32")}
	serves(true)
	b.settings.externalIPs.Allowed = nil
	serves(false)
	b.nodes.Delete("there")
	serves(true)
}

// A tenant that lists the address of an API server, or of the load balancer in front of it, does not take its
// port on all nodes, from kubelets and from the proxies themselves.
func TestContract11ATenantTakesNoPortOfAnAPIServer(t *testing.T) {
	const server, balancer = "192.168.7.1", "192.168.7.100"
	b := newBench(t, func(s *settings) { s.apiServers = []netip.Addr{netip.MustParseAddr(balancer)} })
	b.list("x", time.Time{}, 6443, server, balancer)
	b.synced()
	serves := func(address string, want bool) {
		t.Helper()
		b.run()
		b.rules.confirm()
		b.run()
		if b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(address), 6443) != want {
			t.Errorf("%s is served: %v", address, !want)
		}
	}
	serves(server, true) // none has said that it is one
	serves(balancer, false)
	b.slices.Set(apiServers, []lb.Slice{{Service: apiServers, Family: lb.IPv4,
		Endpoints: []lb.Endpoint{{Addr: netip.MustParseAddr(server), Ready: true, Serving: true}}}})
	b.markEndpoints(apiServers)
	serves(server, false)
	serves(balancer, false)
	if said := strings.Join(b.warnings, "\n"); !strings.Contains(said, "ExternalIPRefused here: spec.externalIPs: "+server+
		" is the address of an API server") {
		t.Errorf("Events %v", b.warnings)
	}
	b.settings.externalIPs.Allowed = []netip.Prefix{netip.MustParsePrefix(server + "/32")}
	b.markFacts()
	serves(server, true)
}

// A tenant that lists the address of a router does not take the ports of BGP and BFD there, by which it would
// end all sessions of all nodes.
func TestContract11ATenantTakesNoPortOfARouter(t *testing.T) {
	const router, other = "192.0.2.1", "192.0.2.2"
	b := newBench(t)
	b.list("x", time.Time{}, 179, router, other)
	b.routers.Set("tor", lb.Router{Addr: netip.MustParseAddr(router)})
	b.synced()
	b.routers.SetSynced(false)
	b.run()
	if b.waiting != "the BGPPeers" || b.rules.sets != 0 {
		t.Errorf("waiting for %q, %d writes", b.waiting, b.rules.sets)
	}
	b.routers.SetSynced(true)
	serves := func(address string, want bool) {
		t.Helper()
		b.run()
		b.rules.confirm()
		b.run()
		if b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(address), 179) != want {
			t.Errorf("%s is served: %v", address, !want)
		}
	}
	serves(router, false)
	serves(other, true)
	if said := strings.Join(b.warnings, "\n"); !strings.Contains(said, "ExternalIPRefused here: spec.externalIPs: "+router+
		" is the address of a BGPPeer") {
		t.Errorf("Events %v", b.warnings)
	}
	b.routers.Set("second", lb.Router{Addr: netip.MustParseAddr(other)})
	b.markFacts()
	serves(other, false)
	b.routers.Delete("tor")
	b.markFacts()
	serves(router, true)
}

// Service networks are known from the flag where the API server has no ServiceCIDRs (Kubernetes before 1.33), in both
// families, and together with ServiceCIDRs where it has them.
func TestContract11ExternalIPsInServiceNetworksOfTheFlag(t *testing.T) {
	for name, c := range map[string]struct {
		given   []string
		objects []string
		want    []string
	}{
		"neither":     {},
		"the flag":    {[]string{" 10.96.0.0/12", "fd00:96::1/112"}, nil, []string{"10.96.0.0/12", "fd00:96::/112"}},
		"objects":     {nil, []string{"10.96.0.0/12", "fd00:96::/112"}, []string{"10.96.0.0/12", "fd00:96::/112"}},
		"one of each": {[]string{"10.96.0.0/12"}, []string{"fd00:96::/112"}, []string{"10.96.0.0/12", "fd00:96::/112"}},
		"one of them twice": {[]string{"10.96.0.0/12"}, []string{"10.96.0.0/12", "fd00:96::/112"},
			[]string{"10.96.0.0/12", "fd00:96::/112"}},
	} {
		given, err := serviceCIDRs(c.given)
		if err != nil {
			t.Fatal(err)
		}
		b := newBench(t, func(s *settings) { s.serviceNetworks = given })
		var objects, want []netip.Prefix
		for _, cidr := range c.objects {
			objects = append(objects, netip.MustParsePrefix(cidr))
		}
		for _, cidr := range c.want {
			want = append(want, netip.MustParsePrefix(cidr))
		}
		if len(objects) > 0 {
			b.networks.Set("kubernetes", objects)
		}
		addresses := []string{"10.100.1.1", "fd00:96::99"}
		b.list("x", time.Time{}, 53, addresses...)
		b.dualStack("x")
		b.synced()
		b.run()
		if got := b.rules.config.ServiceNetworks; !slices.Equal(got, want) {
			t.Errorf("%s: the rules know %v, want %v", name, got, want)
		}
		said := strings.Join(b.warnings, "\n")
		for _, address := range addresses {
			served := b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(address), 53)
			told := strings.Contains(said, address+" lies in ")
			if refused := len(want) > 0; served == refused || told != refused {
				t.Errorf("%s: %s served: %v, Events %v", name, address, served, b.warnings)
			}
		}
	}
}

// A Service network that a Node or a pod is in refuses external IPs as others do. Connections to unused addresses
// there are not refused, as long as the Node is there: they may be for it.
func TestContract11AServiceNetworkThatANodeIsIn(t *testing.T) {
	given, err := serviceCIDRs([]string{"10.96.0.0/12", "172.27.0.0/16"})
	if err != nil {
		t.Fatal(err)
	}
	b := newBench(t, func(s *settings) { s.serviceNetworks = given })
	b.nodes.OnChange(b.markNode)
	b.list("x", time.Time{}, 53, "172.27.7.7")
	b.synced()
	check := func(want []netip.Prefix) {
		t.Helper()
		b.run()
		if got := b.rules.config.ServiceNetworks; !slices.Equal(got, want) {
			t.Errorf("the rules refuse in %v, want %v", got, want)
		}
		if b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr("172.27.7.7"), 53) {
			t.Error("an external IP in the network is served")
		}
	}
	check(given)
	b.nodes.Set("there", lb.Node{Name: "there", Addresses: []netip.Addr{netip.MustParseAddr("172.27.0.9")}})
	check(given[:1])
	b.nodes.Delete("there")
	check(given)
	b.nodes.Set("there", lb.Node{Name: "there", PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.100.0.0/24")}})
	check(given[1:])
}

// No tenant takes what clients on the node's network send to all its hosts, whatever --external-ips allows.
func TestContract11ATenantTakesNoBroadcast(t *testing.T) {
	b := newBench(t, func(s *settings) {
		s.externalIPs = plan.ExternalIPs{Deny: true, Allowed: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}
	})
	pokes := 0
	changed := ifAddressesChange(func() { pokes++ })
	move := func(bits int) {
		b.own = []lb.Interface{{Index: 2, Name: "eth0", Up: true,
			Addresses: []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("192.0.2.9"), bits)}}}
		changed(b.own)
		b.markFacts()
		b.run()
	}
	b.list("x", time.Time{}, 67, "192.0.2.0", "192.0.2.15", "192.0.2.255")
	b.synced()
	for i, c := range []struct {
		bits int
		want string
	}{{24, "192.0.2.15"}, {28, "192.0.2.255"}, {31, "192.0.2.0 192.0.2.15 192.0.2.255"}} {
		move(c.bits)
		var got []string
		for _, addr := range []string{"192.0.2.0", "192.0.2.15", "192.0.2.255"} {
			if b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(addr), 67) {
				got = append(got, addr)
			}
		}
		if strings.Join(got, " ") != c.want || pokes != i+1 {
			t.Errorf("in a network of %d bits, served at %v, want %s; %d pokes", c.bits, got, c.want, pokes)
		}
	}
}

// The first and last address of a network are refused only where the node reaches hosts of it.
func TestHostlessAddressesOfInterfaces(t *testing.T) {
	network := []netip.Prefix{netip.MustParsePrefix("203.0.113.5/24")}
	for _, c := range []struct {
		on   lb.Interface
		want int
	}{
		{lb.Interface{Name: "eth0", Up: true}, 2},
		{lb.Interface{Name: "eth0"}, 2}, // without carrier
		{lb.Interface{Name: "eth0", Disabled: true}, 0},
		{lb.Interface{Name: "lo", Up: true, Loopback: true}, 0},
		{lb.Interface{Name: "dummy0", Up: true, NoARP: true}, 2},
		{lb.Interface{Name: "kube-ipvs0", Up: true, NoARP: true}, 0},
		{lb.Interface{Name: "nodelocaldns", Up: true, NoARP: true}, 0},
	} {
		c.on.Addresses = network
		if got := hostless([]lb.Interface{c.on}); len(got) != c.want {
			t.Errorf("%+v: %v", c.on, got)
		}
	}
}

// A Service with many addresses makes one Event of a bounded length.
func TestEventsOfManyFrontendsAreShort(t *testing.T) {
	b := newBench(t, func(s *settings) { s.externalIPs.Deny = true })
	var ips []string
	for i := range 200 {
		ips = append(ips, netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}).String())
	}
	b.list("x", time.Time{}, 80, ips...)
	b.synced()
	b.run()
	if len(b.warnings) != 1 || len(b.warnings[0]) > 1024 || !strings.HasSuffix(b.warnings[0], "; and 195 more") {
		t.Errorf("%d Events: %v", len(b.warnings), b.warnings)
	}
}

// No tenant takes a pod's port by an external IP, where the pod networks of the Nodes are not where the
// pods are, as with Calico.
func TestContract11ExternalIPsOfPods(t *testing.T) {
	const address = "10.244.9.9"
	b := newBench(t, func(s *settings) {
		s.pods = plan.Detector{Prefixes: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}}
	})
	b.list("x", time.Time{}, 80, address)
	b.synced()
	b.run()
	if b.rules.wanted[key("x")].Serves(lb.TCP, netip.MustParseAddr(address), 80) {
		t.Error("served")
	}
	if len(b.warnings) != 1 || !strings.Contains(b.warnings[0], "ExternalIPRefused here: spec.externalIPs: "+address+
		" lies in 10.244.0.0/16, the network of pods") {
		t.Errorf("Events %v", b.warnings)
	}
}
