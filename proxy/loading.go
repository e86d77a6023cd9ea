package main

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/proxy/loads"
)

// loadsCollector shows what counting connections for schedulers has done, at the time of asking.
type loadsCollector struct {
	counts                              func() loads.Counts
	open, events, lost, listings, tells *prometheus.Desc
}

func newLoadsCollector(counts func() loads.Counts) *loadsCollector {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+"scheduler_"+name, help, nil, nil)
	}
	return &loadsCollector{
		counts:   counts,
		open:     desc("connections", "Open connections to Services whose scheduler counts them."),
		events:   desc("events_total", "Events of such connections that the kernel has reported."),
		lost:     desc("events_lost_total", "How often the kernel could not report events; then connections are listed."),
		listings: desc("listings_total", "How often all connections were listed, to make good what events did not say."),
		tells:    desc("updates_total", "How often the tables of a Service were computed from its connections."),
	}
}

// Describe implements prometheus.Collector.
func (c *loadsCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.open, c.events, c.lost, c.listings, c.tells} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *loadsCollector) Collect(ch chan<- prometheus.Metric) {
	n := c.counts()
	ch <- prometheus.MustNewConstMetric(c.open, prometheus.GaugeValue, float64(n.Open))
	for d, n := range map[*prometheus.Desc]uint64{c.events: n.Events, c.lost: n.Lost, c.listings: n.Listings,
		c.tells: n.Loads} {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n))
	}
}
