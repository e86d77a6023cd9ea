package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// TestHostLooks has a proxy look at its node: at its kernel's parameters, chains of other programs
// and the addresses of pods.
func TestHostLooks(t *testing.T) {
	b := newBench(t)
	folder := t.TempDir()
	set := func(parameter, value string) {
		t.Helper()
		file := filepath.Join(folder, parameter)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755),
			os.WriteFile(file, []byte(value+"\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	var chains []plan.ForwardChain
	var failed, refused error
	var wanted []plan.Acceptance
	var asked []netip.Addr
	kinds, strict, noTunnel := map[netip.Addr]lb.RouteKind{}, "", ""
	h := host{proxy: b.proxy, parameters: kernelParameters{folder, log}, log: log, reusePorts: func(bool) {},
		podNetworks: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		chains: func(context.Context) ([]plan.ForwardChain, error) {
			if failed != nil {
				return nil, failed
			}
			return slices.Clone(chains), nil
		},
		strict:   func() string { return strict },
		noTunnel: func() string { return noTunnel },
		routes: func(pods []netip.Addr) (map[netip.Addr]lb.RouteKind, error) {
			asked = pods
			return kinds, failed
		},
		accept: func(_ context.Context, c plan.ForwardChain, want plan.Acceptance) (bool, error) {
			if len(want.Networks) == 0 || c.HasOwn() {
				return false, nil
			}
			wanted = append(wanted, want)
			if refused == nil {
				chains[0].Rules["FORWARD"] = []plan.ForwardRule{{To: plan.ChainAccept}}
			}
			return refused == nil, refused
		}}
	look := func(wantKnown bool, want ...lb.Reason) {
		t.Helper()
		found, known := h.look(t.Context())
		var reasons []lb.Reason
		for _, f := range found {
			reasons = append(reasons, f.Reason)
		}
		if known != wantKnown || !slices.Equal(reasons, want) {
			t.Errorf("found %v, known %v; want %v, %v", found, known, want, wantKnown)
		}
	}
	look(false)
	b.synced()
	look(true)
	set("ipv4/ip_forward", "1")
	set("ipv6/conf/all/forwarding", "0") // the Node has no pods of that family
	b.put("host", "192.0.2.1", "172.31.0.1", "10.9.0.1")
	look(true) // endpoints on the node's own network are no pods
	b.put("web", "192.0.2.2", "10.200.1.7")
	look(true, lb.ReasonPodNetworkUnmatched)
	h.podNetworks, h.nodeCIDR = nil, true // it is in the Node's
	look(true)
	node, _ := b.nodes.Get("here")
	moved := node
	moved.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.200.2.0/24")}
	b.nodes.Set("here", moved)
	look(true, lb.ReasonPodNetworkUnmatched)
	b.nodes.Set("here", node)
	h.podNetworks, h.nodeCIDR = []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, false
	b.put("api", "192.0.2.3", "10.244.1.7")
	look(true)
	set("ipv4/ip_forward", "0")
	look(true) // its interfaces forward by parameters of their own
	b.own[0].Unforwarded4 = true
	chains = []plan.ForwardChain{{Family: "ip", Table: "filter", Name: "FORWARD", Drops: true}}
	look(true, lb.ReasonForwardingOff, lb.ReasonForwardDropped)
	failed = errors.New("interrupted")
	look(true, lb.ReasonForwardingOff, lb.ReasonForwardDropped) // unknown is not absent
	failed = nil
	chains[0].Rules = map[string][]plan.ForwardRule{"FORWARD": {{Verdict: plan.VerdictAccept}}}
	look(true, lb.ReasonForwardingOff)
	chains[0].Rules = map[string][]plan.ForwardRule{}
	h.parameters.switchOn(forwardingParameters[lb.IPv4])
	look(true, lb.ReasonForwardDropped)
	b.nodes.Set("other", lb.Node{Name: "other", Addresses: []netip.Addr{netip.MustParseAddr("172.31.0.9")}})
	h.acceptForwarded, refused = true, errors.New("no such program")
	look(true, lb.ReasonForwardDropped)
	refused = nil
	look(true) // what it has accepted is looked at before anybody is told
	look(true)
	if len(wanted) != 2 || !slices.Equal(wanted[1].Networks, h.podNetworks) ||
		!slices.Equal(wanted[1].Nodes, []netip.Addr{netip.MustParseAddr("172.31.0.9")}) {
		t.Errorf("wanted %v", wanted)
	}
	chains[0].Rules = map[string][]plan.ForwardRule{}
	failed = errors.New("interrupted")
	look(true)
	failed = nil
	look(true)
	if len(wanted) != 3 {
		t.Errorf("what another removed was not accepted again: %v", wanted)
	}
	strict = "net.ipv4.conf.eth1.rp_filter is 1"
	look(true, lb.ReasonStrictReversePath)
	strict, noTunnel = "", "operation not supported"
	look(true, lb.ReasonTunnelUnavailable)
	noTunnel = ""
	h.proxy.settings.notOffloaded = map[lb.Family]string{lb.IPv6: "no such file or directory", lb.IPv4: "no such file"}
	look(true, lb.ReasonOffloadUnavailable, lb.ReasonOffloadUnavailable)
	h.proxy.settings.notOffloaded = nil
	set("netfilter/nf_conntrack_max", "1000")
	set("netfilter/nf_conntrack_count", "949")
	look(true)
	set("netfilter/nf_conntrack_count", "1001")
	look(true, lb.ReasonConntrackFull)
	set("netfilter/nf_conntrack_count", "5")
	far, pod := netip.MustParseAddr("10.244.7.2"), netip.MustParseAddr("10.244.7.3")
	other := lb.Endpoint{Addr: pod, Node: "other", Ready: true}
	b.slices.Set(lb.Key{Name: "api"}, []lb.Slice{{Endpoints: []lb.Endpoint{other, {Addr: far, Node: "other"},
		{Addr: netip.MustParseAddr("172.31.0.9"), Node: "other"}, {Addr: far.Next().Next(), Node: "unknown"}}}})
	kinds[far] = lb.RouteOwn
	look(true)
	if !slices.Equal(asked, []netip.Addr{far}) {
		t.Errorf("asked for the routes to %v, want one pod of the other node", asked)
	}
	kinds[far] = lb.RouteNone
	look(true, lb.ReasonPodRouteMissing)
	failed = errors.New("no memory")
	look(true, lb.ReasonPodRouteMissing) // unknown is not absent
	failed = nil
	kinds[far] = lb.RouteUnknown
	look(true)
	for i, namespace := range []string{"dev", "prod", "shop"} { // the first namespace is ""
		addr := netip.AddrFrom4([4]byte{10, 244, 8, byte(i)})
		b.slices.Set(lb.Key{Namespace: namespace}, []lb.Slice{{Endpoints: []lb.Endpoint{{Addr: addr, Node: "other"}}}})
		kinds[addr] = lb.RouteNone
	}
	look(true) // what some namespaces say is no finding
	if len(asked) != podsOfNode || asked[0] != far || asked[2] != netip.MustParseAddr("10.244.8.1") {
		t.Errorf("asked for the routes to %v, want a pod of each of %d namespaces", asked, podsOfNode)
	}
	kinds[far] = lb.RouteNone
	look(true, lb.ReasonPodRouteMissing)
	kinds[far] = lb.RouteUnknown
	b.found = func() []lb.Finding { return []lb.Finding{lb.Find(lb.ReasonForwardingOff, "off")} }
	if found := b.status().Findings; len(found) != 1 || found[0].Message != "off" {
		t.Errorf("the status has %v", found)
	}
}

// TestForwardsBySingleInterfaces has kernels whose parameter for all is 0.
func TestForwardsBySingleInterfaces(t *testing.T) {
	at := func(name string, off bool, addrs ...string) lb.Interface {
		i := lb.Interface{Name: name, Unforwarded6: off}
		for _, addr := range addrs {
			i.Addresses = append(i.Addresses, netip.MustParsePrefix(addr))
		}
		return i
	}
	const own = "2001:db8::1/64"
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1"),
		netip.MustParseAddr("2001:db8:1::1")}
	lo := at("lo", true, "2001:db8::1/128")
	lo.Loopback = true
	for name, test := range map[string]struct {
		interfaces []lb.Interface
		want       bool
	}{
		"no interface":                 {nil, false},
		"the uplink":                   {[]lb.Interface{at("eth0", false, own), at("cni0", true, "fd00::1/64")}, true},
		"not the uplink":               {[]lb.Interface{at("eth0", true, own), at("cni0", false, "fd00::1/64")}, false},
		"one of two uplinks":           {[]lb.Interface{at("eth0", false, own), at("eth1", true, "2001:db8:1::1/64")}, false},
		"the node's address is at lo":  {[]lb.Interface{lo, at("eth0", false, "2001:db8:2::1/64")}, false},
		"and another is at the uplink": {[]lb.Interface{lo, at("eth0", false, "2001:db8:1::1/64")}, true},
		"of the other family":          {[]lb.Interface{at("eth0", false, "192.0.2.1/24")}, false},
	} {
		if got := forwardsBy(test.interfaces, addrs, lb.IPv6); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}
