package main

import (
	"cmp"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// forwardingParameters let the kernel forward packets, below /proc/sys/net.
var forwardingParameters = map[lb.Family]string{lb.IPv4: "ipv4/ip_forward", lb.IPv6: "ipv6/conf/all/forwarding"}

// host looks at what decides on this node, beside the rules, whether connections arrive.
type host struct {
	proxy      *proxy
	parameters kernelParameters
	// podNetworks are what tells pods from others; none with other ways than by network.
	podNetworks []netip.Prefix
	log         *slog.Logger
	chains      func() ([]nft.ForwardChain, error)
	failures    loop.Failures
	last        plan.Host // what was known at the last look; belongs to the actor that looks
}

// look returns what keeps this node from delivering; it knows nothing before the proxy has all that
// it needs.
func (h *host) look() (found []lb.Finding, known bool) {
	from := h.proxy.from
	node, ok := from.nodes.Get(h.proxy.self)
	interfaces, listed := from.interfaces()
	if !ok || !listed || !from.slices.Synced() {
		return nil, false
	}
	facts := plan.Host{
		Node: node.Name, Iptables: h.proxy.mode == modeIptables, PodNetworks: h.podNetworks, PodCIDRs: node.PodCIDRs,
		NotForwarding: map[lb.Family]string{}, Pods: podsOf(node, localAddresses(interfaces), from.slices.All()),
	}
	for family, parameter := range forwardingParameters {
		switch text, err := os.ReadFile(filepath.Join(h.parameters.folder, parameter)); {
		case err != nil && !errors.Is(err, fs.ErrNotExist) && h.last.NotForwarding[family] != "":
			facts.NotForwarding[family] = h.last.NotForwarding[family]
		case err == nil && strings.TrimSpace(string(text)) == "0":
			facts.NotForwarding[family] = "net." + strings.ReplaceAll(parameter, "/", ".")
		}
	}
	chains, err := h.chains()
	h.failures.Log(h.log, "cannot list the chains of other programs", "listed the chains of other programs", err)
	if err != nil {
		facts.Chains = h.last.Chains // unknown is not absent
	}
	for _, c := range chains {
		chain := plan.ForwardChain{Family: c.Family, Table: c.Table, Name: c.Name, Drops: c.Drops}
		for _, a := range c.Accepts {
			chain.Accepts = append(chain.Accepts, plan.Accept(a))
		}
		facts.Chains = append(facts.Chains, chain)
	}
	slices.SortFunc(facts.Chains, func(a, b plan.ForwardChain) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Table, b.Table), cmp.Compare(a.Name, b.Name))
	})
	h.last = facts
	return plan.Findings(facts), true
}

// podsOf returns the endpoints on a node that have addresses of their own.
func podsOf(node lb.Node, own []netip.Addr, all map[lb.Key][]lb.Slice) []netip.Addr {
	hosts := map[netip.Addr]bool{}
	for _, addr := range slices.Concat(node.Addresses, own) {
		hosts[addr] = true
	}
	pods := map[netip.Addr]bool{}
	for _, of := range all {
		for _, slice := range of {
			for _, e := range slice.Endpoints {
				if e.Node == node.Name && !hosts[e.Addr] {
					pods[e.Addr] = true
				}
			}
		}
	}
	addrs := make([]netip.Addr, 0, len(pods))
	for addr := range pods {
		addrs = append(addrs, addr)
	}
	return addrs
}

// forwardChains lists the chains of all programs that see forwarded packets.
func forwardChains() (chains []nft.ForwardChain, err error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	err = nfnetlink.Complete(func() (err error) {
		chains, err = nft.ForwardChains(conn)
		return err
	})
	return chains, err
}
