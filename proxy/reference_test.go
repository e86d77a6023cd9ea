package main

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/internal/reference"
)

// TestReferenceRelay compares docs/reference/relay.md with what the sources make of it.
func TestReferenceRelay(t *testing.T) {
	program := relayProgram(&relayFlags{})
	reference.Page(t, "relay", `# landfall-proxy relay

`+"```"+`
kubectl -n landfall-system exec daemonset/landfall-node -c relay -- landfall-proxy relay status
`+"```"+`

The relay ends TCP connections to Services that ask for it, and tries another backend when one does not answer
([the relay](../guide/relay.md)). It is a process of its own, in a container beside the proxy. With the argument
`+"`status`"+` it prints the state of the relay that runs in the pod. With `+"`ready`"+` it fails until that has taken over
from the relay before ([upgrades](../guide/relay.md#upgrades-without-a-broken-connection)), and `+"`alive`"+` says whether
the relay that serves `+"`--probe-socket`"+` hangs.

`+reference.Program(t, "relay", program.FlagSet(), newRelayCollector(nil)))
}

// TestReference compares docs/reference/proxy.md with what the sources make of it.
func TestReference(t *testing.T) {
	program := ops.Program{Name: name, MetricsBindAddress: "localhost:7482", StatusSocket: "/run/landfall/proxy.sock",
		ProbeSocket: true, Flags: (&flags{}).add}
	metrics := reference.Recorder{newCollector(nil, nil), rescued(nil), rescueDropped(nil), rescueRefused(nil), &relayRules{},
		rescueTargets(nil), newCountersCollector(nil), newLoadsCollector(nil),
		preflight.Collector("landfall_proxy_node_findings", nil)}
	newMetrics(&metrics)
	reference.Page(t, "proxy", `# landfall-proxy

`+"```"+`
kubectl -n landfall-system exec daemonset/landfall-node -c proxy -- landfall-proxy status
`+"```"+`

The proxy programs its node's kernel to forward connections to Services, in place of kube-proxy or beside it. With the
argument `+"`status`"+` it prints the state of the proxy that runs in the pod ([status](../guide/metrics.md#status)), with
`+"`trace`"+` and `+"`flows`"+` what the kernel does with a packet and has in conntrack
([landfallctl](../guide/landfallctl.md#trace)), with `+"`cleanup`"+` it removes all of Landfall's rules from the node, and
with `+"`alive`"+` it says whether the proxy that serves `+"`--probe-socket`"+` hangs.

`+"```\n"+lookUsage+"\n```"+`

`+reference.Program(t, "proxy", program.FlagSet(), metrics...))
}
