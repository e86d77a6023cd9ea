package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

const bgpManifest = `apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: routed}
spec:
  addresses: [203.0.113.180-203.0.113.199]
---
apiVersion: landfall.dev/v1beta1
kind: BFDProfile
metadata: {name: fast}
spec: {transmitInterval: 50, receiveInterval: 50, detectMultiplier: 3}
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor-1}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.26.236.1, bfdProfile: fast, enableGracefulRestart: true}
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor-2}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.26.236.2, bfdProfile: fast, enableGracefulRestart: true}
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: routed}
spec:
  ipAddressPools: [routed]
`

// routeWords pick the heading and the routes from a router's table.
var routeWords = []string{"Network  ", "203.0.113.", "172.26.236.17"}

// drained is the node that is taken out of service, and whose agent is restarted: it has no pod of
// the Service.
const drained = "k8s-worker-177"

// bgpTale is the worked example behind two routers, which spread connections over all nodes that
// deliver the address.
func bgpTale() tale {
	cluster := lab.SeedCluster()
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 2, ASN: 64501, NodeASN: 64500, BFD: 50 * time.Millisecond}
	return tale{
		opening:  "A cluster of virtual machines behind two top-of-rack routers",
		cluster:  cluster,
		manifest: bgpManifest, address: "203.0.113.180",
		client: lab.FarClientName,
		steps: func(d *story) []step {
			return []step{
				{"", d.showCluster},
				{"A pool of addresses, the routers, and a Service that wants an address", d.showAddress},
				{"What the routers see of the nodes", d.sessions},
				{"Which nodes have the address programmed", d.programmed},
				{"Where the routers send it", d.routes},
				{"externalTrafficPolicy: Cluster - any node, any pod", d.allNodes},
				{"externalTrafficPolicy: Local - the client's address is kept", d.localNodes},
				{"A node is drained, and comes back", d.drain},
				{"A speaker is upgraded", d.upgrade},
				{"A node dies", d.routeDies},
			}
		},
	}
}

// sessions shows the routers' sessions with the nodes.
func (d *story) sessions(ctx context.Context) error {
	nodes := len(d.lab.Cluster().Nodes)
	for _, r := range d.lab.Routers() {
		err := d.wait(ctx, "the sessions of "+r.Name, func(ctx context.Context) error {
			var summary struct {
				IPv4 struct {
					Peers map[string]struct {
						State string `json:"state"`
					} `json:"peers"`
				} `json:"ipv4Unicast"`
			}
			var bfd []struct {
				Status string `json:"status"`
			}
			if err := errors.Join(r.JSON(ctx, "show bgp summary json", &summary),
				r.JSON(ctx, "show bfd peers json", &bfd)); err != nil {
				return err
			}
			up, watched := 0, 0
			for _, p := range summary.IPv4.Peers {
				if p.State == "Established" {
					up++
				}
			}
			for _, p := range bfd {
				if p.Status == "up" {
					watched++
				}
			}
			if up != nodes || watched != nodes {
				return fmt.Errorf("%d sessions of BGP and %d of BFD are up", up, watched)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	if err := d.show(ctx, "show bgp summary", "Neighbor", "172.26."); err != nil {
		return err
	}
	if err := d.show(ctx, "show bfd peers brief", "Session", "172.26."); err != nil {
		return err
	}
	return d.promise(true, "both routers have a session with each of the %d nodes, and watch each by BFD, 3 × 50 ms",
		nodes)
}

// show prints those lines of the first router's answer that have one of the words.
func (d *story) show(ctx context.Context, command string, words ...string) error {
	r := d.lab.Routers()[0]
	answer, err := r.Ask(ctx, command)
	if err != nil {
		return err
	}
	d.line("%s# %s", r.Name, command)
	for line := range strings.Lines(answer) {
		if len(words) == 0 || slices.ContainsFunc(words, func(w string) bool { return strings.Contains(line, w) }) {
			d.line("  %s", strings.TrimRight(line, " \n"))
		}
	}
	d.line("")
	return nil
}

func (d *story) prefix() netip.Prefix { return netip.PrefixFrom(d.vip, d.vip.BitLen()) }

// routed waits until both routers' kernels spread the address over exactly these nodes.
func (d *story) routed(ctx context.Context, nodes ...string) error {
	for _, r := range d.lab.Routers() {
		err := d.wait(ctx, fmt.Sprintf("routes of %s to %v", r.Name, nodes), func(ctx context.Context) error {
			got, err := r.Nodes(ctx, d.prefix())
			if err == nil && !slices.Equal(got, nodes) {
				err = fmt.Errorf("they lead to %v", got)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// kernelRoute prints the route in the first router's kernel.
func (d *story) kernelRoute(ctx context.Context) error {
	r := d.lab.Routers()[0]
	out, err := d.lab.Exec(ctx, r.Name, "ip", "route", "show", "exact", d.prefix().String())
	if err != nil {
		return err
	}
	d.line("%s# ip route show %s", r.Name, d.vip)
	for line := range strings.Lines(out) {
		d.line("  %s", strings.TrimSpace(line))
	}
	d.line("")
	return nil
}

func (d *story) workers() []string {
	var nodes []string
	for _, n := range d.lab.Cluster().Nodes {
		if !n.ControlPlane {
			nodes = append(nodes, n.Name)
		}
	}
	return nodes
}

// withPod are the nodes that have a pod of the Service.
func (d *story) withPod() []string {
	return slices.DeleteFunc(d.workers(), func(n string) bool { return d.podOn(n) == "" })
}

// routes shows the address in the routers' tables.
func (d *story) routes(ctx context.Context) error {
	if err := d.routed(ctx, d.workers()...); err != nil {
		return err
	}
	if err := d.show(ctx, "show bgp ipv4 unicast", routeWords...); err != nil {
		return err
	}
	if err := d.kernelRoute(ctx); err != nil {
		return err
	}
	return d.promise(true, "both routers spread %s over the %d workers that claim it; the control plane stays out", d.vip,
		len(d.workers()))
}

// allNodes sends requests with policy Cluster.
func (d *story) allNodes(ctx context.Context) error {
	spread, err := d.clusterPolicy(ctx)
	if err != nil {
		return err
	}
	through := map[string]bool{}
	for a := range spread.Sources {
		if node, _, ok := strings.Cut(strings.Trim(d.whose(a), " ()"), ","); ok || node != "" {
			through[node] = true
		}
	}
	return d.promise(len(through) == len(d.workers()), "they have come through all %d workers", len(through))
}

// localNodes switches the policy and sends requests again.
func (d *story) localNodes(ctx context.Context) error {
	if err := d.setLocal(ctx); err != nil {
		return err
	}
	if err := d.routed(ctx, d.withPod()...); err != nil {
		return err
	}
	d.line("")
	if err := d.kernelRoute(ctx); err != nil {
		return err
	}
	var spread lab.Spread
	err := d.wait(ctx, "answers to the client's own address", func(ctx context.Context) error {
		if spread = d.lab.Spread(ctx, d.client, "tcp", d.target(), 1); spread.Sources[d.clientAddr()] != 1 {
			return fmt.Errorf("sources %v", spread.Sources)
		}
		return nil
	})
	if err != nil {
		return err
	}
	spread = d.lab.Spread(ctx, d.client, "tcp", d.target(), requests)
	d.spread(spread)
	if err := d.answered(spread, requests); err != nil {
		return err
	}
	if err := d.promise(len(spread.Pods) == len(d.withPod()), "the routers send to the nodes with a pod only, %s",
		strings.Join(d.withPod(), " and ")); err != nil {
		return err
	}
	if err := d.promise(spread.Sources[d.clientAddr()] == requests, "each with the client's own address, %s",
		d.clientAddr()); err != nil {
		return err
	}
	_, err = d.lab.Kube().CoreV1().Services("default").Patch(ctx, "my-nginx", types.MergePatchType,
		[]byte(`{"spec":{"externalTrafficPolicy":"Cluster"}}`), metav1.PatchOptions{})
	if err != nil {
		return err
	}
	return d.routed(ctx, d.workers()...)
}

// exclude takes the drained node out of external load balancing, or back in.
func (d *story) exclude(ctx context.Context, yes bool) error {
	value := "null"
	if yes {
		value = `""`
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":%s}}}`, value)
	_, err := d.lab.Kube().CoreV1().Nodes().Patch(ctx, drained, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// drain takes a node out of service and back in, while a client opens connections.
func (d *story) drain(ctx context.Context) error {
	d.line("A client opens a new connection every %d ms. %s gets the label exclude-from-external-load-balancers.",
		probeEvery.Milliseconds(), drained)
	d.line("Policy is Cluster again.")
	d.line("")
	probe := d.lab.StartProbe(ctx, d.client, "tcp", d.target(), probeEvery)
	defer probe.Stop()
	if err := d.exclude(ctx, true); err != nil {
		return err
	}
	show := "show bgp ipv4 unicast " + d.prefix().String()
	err := d.wait(ctx, "GRACEFUL_SHUTDOWN at "+d.lab.Routers()[0].Name, func(ctx context.Context) error {
		if answer, err := d.lab.Routers()[0].Ask(ctx, show); err != nil || !strings.Contains(answer, "graceful-shutdown") {
			return fmt.Errorf("no community graceful-shutdown (%w)", err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := d.show(ctx, show, "from", "localpref", "Community"); err != nil {
		return err
	}
	others := slices.DeleteFunc(d.workers(), func(n string) bool { return n == drained })
	if err := d.routed(ctx, others...); err != nil {
		return err
	}
	pause(ctx, 500*time.Millisecond)
	if err := d.kernelRoute(ctx); err != nil {
		return err
	}
	if err := d.exclude(ctx, false); err != nil {
		return err
	}
	if err := d.routed(ctx, d.workers()...); err != nil {
		return err
	}
	pause(ctx, 300*time.Millisecond)
	return d.lossless(probe, 4)
}

// lossless ends a probe and promises that nothing was lost. A handshake that is under way in the
// very millisecond in which a router changes its routes may be reset: at most one for each of the
// changes.
func (d *story) lossless(probe *lab.Probe, changes int) error {
	report := probe.Stop()
	d.report(report)
	resets := report.Failures["connection reset by peer"]
	if resets > 0 && resets <= changes && resets == report.Failed() {
		return d.promise(true, "no connection met silence; %d was reset in its handshake, at the moment of a change", resets)
	}
	if report.Failed() > 0 {
		return d.promise(false, "no connection is lost: %v", report.Failures)
	}
	return d.promise(true, "no connection was lost")
}

// upgrade restarts a speaker.
func (d *story) upgrade(ctx context.Context) error {
	d.line("The speaker on %s ends, and a new one starts half a second later.", drained)
	d.line("")
	var ends []func() []string
	for _, r := range d.lab.Routers() {
		end, err := r.WatchRoutes(ctx, "-4")
		if err != nil {
			return err
		}
		ends = append(ends, end)
	}
	probe := d.lab.StartProbe(ctx, d.client, "tcp", d.target(), probeEvery)
	defer probe.Stop()
	agent := d.lab.Agent("speaker", drained)
	if err := agent.Stop(); err != nil {
		return err
	}
	if err := d.show(ctx, "show bgp ipv4 unicast", routeWords...); err != nil {
		return err
	}
	pause(ctx, 500*time.Millisecond)
	if err := agent.Start(); err != nil {
		return err
	}
	if err := agent.WaitReady(ctx); err != nil {
		return err
	}
	pause(ctx, time.Second)
	var changes []string
	for _, end := range ends {
		for _, line := range end() {
			if strings.Contains(line, d.vip.String()) {
				changes = append(changes, line)
			}
		}
	}
	if err := d.lossless(probe, 0); err != nil {
		return err
	}
	if len(changes) > 0 {
		return d.promise(false, "the routers' kernels stay as they are; changes: %q", changes)
	}
	return d.promise(
		true,
		"the routers kept its routes meanwhile, marked stale (S, graceful restart), and their kernels stayed as they were")
}

// routeDies cuts a node off and measures what a client sees.
func (d *story) routeDies(ctx context.Context) error {
	d.line("%s loses its network at once.", drained)
	d.line("")
	probe := d.lab.StartProbe(ctx, d.client, "tcp", d.target(), probeEvery)
	defer probe.Stop()
	pause(ctx, time.Second)
	if err := d.lab.Cut(ctx, drained); err != nil {
		return err
	}
	others := slices.DeleteFunc(d.workers(), func(n string) bool { return n == drained })
	if err := d.routed(ctx, others...); err != nil {
		return err
	}
	pause(ctx, time.Second)
	report := probe.Stop()
	d.report(report)
	if err := d.show(ctx, "show bfd peers brief", "Session", "172.26."); err != nil {
		return err
	}
	if err := d.kernelRoute(ctx); err != nil {
		return err
	}
	if err := d.promise(report.Gap < recovery, "both routers have noticed by BFD, and go around %s", drained); err != nil {
		return err
	}
	return d.lab.Heal(ctx, drained)
}
