package preflight

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
)

// collector shows what was found at the time of asking.
type collector struct {
	desc  *prometheus.Desc
	found func() []lb.Finding
}

// Collector returns a metric of what a Preflight has found, by reason, without its notes.
func Collector(name string, found func() []lb.Finding) prometheus.Collector {
	return collector{prometheus.NewDesc(name,
		"What keeps traffic from this node, outside of Landfall, by reason; Events on the Node name it.", []string{"reason"},
		nil), found}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	counts := map[lb.Reason]int{}
	for _, f := range c.found() {
		if !f.Note {
			counts[f.Reason]++
		}
	}
	for reason, n := range counts {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n), string(reason))
	}
}
