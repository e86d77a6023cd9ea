package e2e

import (
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// BenchmarkDirectRacksCut cuts the tunnel between the one node to which routers send and another with a pod, again and
// again. It reports for how long new connections were hit: their first packets were lost until the node masqueraded:
// go test -run '^$' -bench DirectRacksCut -benchtime 10x -timeout 30m ./e2e
func BenchmarkDirectRacksCut(b *testing.B) {
	d := startDirectRacks(b)
	d.forward(b, true)
	d.only(b, d.standAlone)
	const far = "k8s-rack-3-1"
	var hit []time.Duration
	for b.Loop() {
		d.wantDirect(b)
		var probes []*lab.Probe
		for _, vip := range d.vips {
			probes = append(probes, d.StartProbe(b.Context(), lab.FarClientName, "tcp", vip, 10*time.Millisecond))
		}
		time.Sleep(300 * time.Millisecond)
		heal := d.cutTunnel(b, d.standAlone, far)
		d.wantAdvice(b, d.standAlone, "without an answer through the tunnel: "+far)
		time.Sleep(300 * time.Millisecond)
		for _, p := range probes {
			report := p.Stop()
			b.Log(report)
			hit = append(hit, report.Hit)
		}
		heal()
	}
	slices.Sort(hit)
	b.ReportMetric(milliseconds(hit[(len(hit)-1)/2]), "ms-hit-p50")
	b.ReportMetric(milliseconds(hit[len(hit)-1]), "ms-hit-max")
	b.ReportMetric(load(b), "load")
}

// BenchmarkDirectRacksAtRest shows the time on a processor of a proxy that asks nodes behind routers whether they
// answer, and has nothing else to do, beside one that masquerades:
// go test -run '^$' -bench DirectRacksAtRest -benchtime 1x -timeout 30m ./e2e
func BenchmarkDirectRacksAtRest(b *testing.B) {
	d := startDirectRacks(b)
	figures := series{}
	for b.Loop() {
		for _, how := range []string{"masqueraded", "direct"} {
			d.forward(b, how == "direct")
			const rest = 30 * time.Second
			used := func() float64 { return metric(b, d.Agent("proxy", d.standAlone), "process_cpu_seconds_total") }
			before := used()
			time.Sleep(rest)
			figures.add(1000*(used()-before)/rest.Seconds(), how+"-ms/s")
		}
	}
	figures.add(load(b), "load")
	figures.report(b)
}
