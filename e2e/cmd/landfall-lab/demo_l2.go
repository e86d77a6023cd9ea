package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

const l2Manifest = `apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec:
  addresses: [172.26.236.180-172.26.236.199]
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec:
  ipAddressPools: [lan]
`

// l2Tale is the worked example: one node at a time answers ARP for the address.
func l2Tale() tale {
	return tale{
		opening:  "A cluster of virtual machines, without a cloud's load balancer",
		cluster:  lab.SeedCluster(),
		manifest: l2Manifest, address: "172.26.236.180",
		client: lab.ClientName,
		// Its chains are those that operators know from kube-proxy.
		values: map[string]any{"proxy": map[string]any{"mode": "iptables"}},
		steps: func(d *story) []step {
			return []step{
				{"", d.showCluster},
				{"A pool of addresses, and a Service that wants one", d.showAddress},
				{"Which node answers for it, and why", d.ownership},
				{"Which nodes have it programmed", d.programmed},
				{"The rules of the Service on k8s-worker-177, which has no pod of it", d.chains},
				{"externalTrafficPolicy: Cluster - any node, any pod", d.anyNode},
				{"externalTrafficPolicy: Local - the client's address is kept", d.localOwner},
				{"The owner's node dies", d.nodeDies},
			}
		},
	}
}

// anyNode sends requests with policy Cluster from both clients.
func (d *story) anyNode(ctx context.Context) error {
	if _, err := d.clusterPolicy(ctx); err != nil {
		return err
	}
	far := d.lab.Spread(ctx, lab.FarClientName, "tcp", d.target(), 20)
	return d.promise(len(far.Failures) == 0, "20 of 20 requests from %s come through the router",
		d.lab.Cluster().Far.Client)
}

// ownership shows who answers for the address: by the Service's condition, and by what the client
// learns on the wire.
func (d *story) ownership(ctx context.Context) error {
	var said string
	err := d.wait(ctx, "an owner of "+d.vip.String(), func(ctx context.Context) (err error) {
		d.owner, said, err = d.announced(ctx)
		return err
	})
	if err != nil {
		return err
	}
	d.line("The Service's condition landfall.dev/Announced: %s", said)
	d.line("")
	words, err := d.nodeStatuses(ctx, d.owner)
	if err != nil {
		return err
	}
	rows := [][]string{{"NODE", "", "WHY"}}
	for _, w := range words {
		rows = append(rows, []string{w.Node, string(w.Reason), w.Message})
	}
	d.table(rows)
	d.line("")
	d.line("Among the nodes that claim the address, the one with the highest hash of (address, node) owns it.")
	mac, node, err := d.answersARP(ctx)
	if err != nil {
		return err
	}
	return d.promise(node == d.owner, "on the wire, %s is at %s: eth0 of %s", d.vip, mac, node)
}

// localOwner switches to policy Local and sends requests again.
func (d *story) localOwner(ctx context.Context) error {
	if err := d.setLocal(ctx); err != nil {
		return err
	}
	// The owner moves if it has no pod.
	err := d.wait(ctx, "an owner with a pod", func(ctx context.Context) (err error) {
		if d.owner, _, err = d.announced(ctx); err != nil {
			return err
		}
		_, onWire, err := d.answersARP(ctx)
		if err == nil && (onWire != d.owner || d.podOn(d.owner) == "") {
			err = fmt.Errorf("%s owns the address, %s answers", d.owner, onWire)
		}
		return err
	})
	if err != nil {
		return err
	}
	d.line("")
	d.line("%s owns %s.", d.owner, d.vip)
	d.line("")
	spread := d.lab.Spread(ctx, d.client, "tcp", d.target(), requests)
	d.spread(spread)
	if err := d.answered(spread, requests); err != nil {
		return err
	}
	pod := d.podOn(d.owner)
	if err := d.promise(spread.Pods[pod] == requests, "all of them by %s, the pod on %s", pod, d.owner); err != nil {
		return err
	}
	client := d.clientAddr()
	return d.promise(spread.Sources[client] == requests, "each with the client's own address, %s", client)
}

// nodeDies cuts the owner off and measures what a client sees.
func (d *story) nodeDies(ctx context.Context) error {
	old := d.owner
	d.line("A client opens a new connection every %d ms. Then %s loses its network at once.",
		probeEvery.Milliseconds(), old)
	d.line("")
	probe := d.lab.StartProbe(ctx, d.client, "tcp", d.target(), probeEvery)
	defer probe.Stop()
	pause(ctx, time.Second)
	if err := d.lab.Cut(ctx, old); err != nil {
		return err
	}
	err := d.waitLong(ctx, "another owner", recovery, func(ctx context.Context) error {
		answer, err := d.lab.Ask(ctx, d.client, "tcp", d.target())
		if err == nil && answer.Node == old {
			err = errors.New("the old owner's pod still answers")
		}
		return err
	})
	if err != nil {
		return err
	}
	pause(ctx, time.Second)
	report := probe.Stop()
	_, d.owner, err = d.answersARP(ctx)
	if err != nil {
		return err
	}
	d.report(report)
	if err := d.promise(d.owner != old && d.podOn(d.owner) != "", "%s answers for %s now", d.owner, d.vip); err != nil {
		return err
	}
	return d.lab.Heal(ctx, old)
}
