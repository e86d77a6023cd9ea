package main

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/internal/reference"
)

// TestReference compares docs/reference/controller.md with what the sources make of it.
func TestReference(t *testing.T) {
	program := ops.Program{Name: name, MetricsBindAddress: "localhost:7480", ProbeSocket: true, Flags: (&options{}).add}
	var metrics reference.Recorder
	newMetrics(&metrics)
	reference.Page(t, "controller", `# landfall-controller

`+"```"+`
kubectl -n landfall-system logs deployment/landfall-controller
`+"```"+`

The controller assigns addresses from pools to Services. The replica that leads has the metrics of pools and Services.
With the argument `+"`cleanup`"+` it takes back what Landfall wrote to Services ([uninstall](../guide/install.md#uninstall)).
With the argument `+"`alive`"+` it says whether the controller that serves `+"`--probe-socket`"+` hangs.

`+reference.Program(t, "controller", program.FlagSet(), metrics...))
}
