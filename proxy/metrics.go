package main

import (
	"maps"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/proxy/iptables"
)

// metrics count what the actors do.
type metrics struct {
	duration, programming prometheus.Histogram
	failures, flows       prometheus.Counter
	lines                 prometheus.Counter
	verified              prometheus.Gauge
}

func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "landfall_proxy_sync_duration_seconds", Help: "Time of one round of writing rules, those without anything to write included.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
		}),
		programming: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "landfall_proxy_programming_latency_seconds", Help: "Time from a change that came from the API server to its rules being confirmed by the kernel.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 17),
		}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_sync_failures_total", Help: "Writes of rules that the kernel refused."}),
		lines:    prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_written_lines_total", Help: "Lines handed to iptables-restore."}),
		flows:    prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_flows_cut_total", Help: "UDP flows cut because their backend or frontend is gone."}),
		verified: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "landfall_proxy_rules_last_verified_timestamp_seconds", Help: "When the rules were last found, or made, as they should be by a look at the kernel.",
		}),
	}
	registry.MustRegister(m.duration, m.programming, m.failures, m.lines, m.flows, m.verified)
	return m
}

func (m *metrics) sync(s iptables.Sync) {
	m.duration.Observe(s.Duration.Seconds())
	m.failures.Add(float64(s.Failures))
	m.lines.Add(float64(s.Lines))
	if s.Verified {
		m.verified.SetToCurrentTime()
	}
}

func (m *metrics) latency(d time.Duration) { m.programming.Observe(d.Seconds()) }

func (m *metrics) cut(n int) { m.flows.Add(float64(n)) }

// collector shows the proxy's state as metrics at the time of asking.
type collector struct {
	p                                        *proxy
	readers                                  func() int
	services, vips, pending, speakers, ready *prometheus.Desc
}

func newCollector(p *proxy, readers func() int) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("landfall_proxy_"+name, help, labels, nil)
	}
	return &collector{
		p: p, readers: readers,
		services: desc("services", "Services by whether their newest rules are in the kernel.", "state"),
		vips:     desc("vips", "VIPs by why this node cannot deliver them; Deliverable for those that it can.", "reason"),
		pending:  desc("oldest_unapplied_change_age_seconds", "Age of the oldest change that is not in the kernel; 0 when all are.", "family"),
		speakers: desc("feed_readers", "Speakers that are connected to the feed."),
		ready:    desc("ready", "1 once the kernel has confirmed the rules of all Services."),
	}
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.services, c.vips, c.pending, c.speakers, c.ready} {
		ch <- d
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	c.p.mu.Lock()
	oldest, complete, now := c.p.unapplied(), c.p.complete, c.p.now()
	states, vips := maps.Clone(c.p.counts.states), maps.Clone(c.p.counts.vips)
	c.p.mu.Unlock()
	for _, state := range []string{stateApplied, statePending, stateFailed} {
		gauge(c.services, float64(states[state]), state)
	}
	for reason, n := range vips {
		gauge(c.vips, float64(n), string(reason))
	}
	for family, since := range oldest {
		age := 0.0
		if !since.IsZero() {
			age = now.Sub(since).Seconds()
		}
		gauge(c.pending, age, string(family))
	}
	gauge(c.speakers, float64(c.readers()))
	whole := 0.0
	if complete {
		whole = 1
	}
	gauge(c.ready, whole)
}
