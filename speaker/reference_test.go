package main

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/internal/reference"
	"github.com/landfall-lb/landfall/speaker/bgp"
)

// TestReference compares docs/reference/speaker.md with what the sources make of it.
func TestReference(t *testing.T) {
	program := ops.Program{Name: name, MetricsBindAddress: "localhost:7481", StatusSocket: "/run/landfall/speaker.sock",
		ProbeSocket: true, Flags: (&flags{}).add}
	metrics := reference.Recorder{newCollector(nil), newPathCollector(nil), newEmptyConnections(nil), &bgp.Actor{}, &keyFile{},
		preflight.Collector("landfall_speaker_node_findings", nil)}
	newPackets(&metrics)
	reference.Page(t, "speaker", `# landfall-speaker

`+"```"+`
kubectl -n landfall-system exec daemonset/landfall-node -c speaker -- landfall-speaker status
`+"```"+`

The speaker announces addresses from its node over ARP, NDP and BGP while the node's kernel delivers them. With the
argument `+"`status`"+` it prints the state of the speaker that runs in the pod ([status](../guide/metrics.md#status)), and with
`+"`alive`"+` it says whether the speaker that serves `+"`--probe-socket`"+` hangs.

`+reference.Program(t, "speaker", program.FlagSet(), metrics...))
}
