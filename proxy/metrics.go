package main

import (
	"maps"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nftables"
)

// metrics count what the actors do.
type metrics struct {
	duration, programming prometheus.Histogram
	network               prometheus.Histogram
	failures, flows       prometheus.Counter
	lines, elements       prometheus.Counter
	verified              prometheus.Gauge
}

func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "landfall_proxy_sync_proxy_rules_duration_seconds", Help: "Time of one round of writing rules, those without anything to write included.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
		}),
		programming: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "landfall_proxy_programming_latency_seconds", Help: "Time from a change that came from the API server to its rules being confirmed by the kernel.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 17),
		}),
		network: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "landfall_proxy_network_programming_duration_seconds",
			Help: "Time from a change of a pod, as the EndpointSlice says, to its rules being confirmed by the kernel.",
			Buckets: slices.Concat(prometheus.ExponentialBuckets(0.001, 2, 8), prometheus.LinearBuckets(0.25, 0.25, 3), prometheus.LinearBuckets(1, 1, 59),
				prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7)),
		}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_sync_proxy_rules_failures_total", Help: "Writes of rules that the kernel refused."}),
		lines:    prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_sync_proxy_rules_iptables_lines_total", Help: "Lines handed to iptables-restore."}),
		elements: prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_sync_proxy_rules_nftables_elements_total", Help: "Elements added to and removed from nftables."}),
		flows:    prometheus.NewCounter(prometheus.CounterOpts{Name: "landfall_proxy_conntrack_reconciler_deleted_entries_total", Help: "UDP flows cut because their backend or frontend is gone."}),
		verified: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "landfall_proxy_rules_last_verified_timestamp_seconds", Help: "When the rules were last found, or made, as they should be by a look at the kernel.",
		}),
	}
	registry.MustRegister(m.duration, m.programming, m.network, m.failures, m.lines, m.elements, m.flows, m.verified)
	return m
}

func (m *metrics) iptables(s iptables.Sync) {
	m.lines.Add(float64(s.Lines))
	m.sync(s.Duration, s.Failures, s.Verified)
}

func (m *metrics) nftables(s nftables.Sync) {
	m.elements.Add(float64(s.Operations))
	m.sync(s.Duration, s.Failures, s.Verified)
}

func (m *metrics) sync(took time.Duration, failures int, verified bool) {
	m.duration.Observe(took.Seconds())
	m.failures.Add(float64(failures))
	if verified {
		m.verified.SetToCurrentTime()
	}
}

func (m *metrics) programmed(d time.Duration) { m.network.Observe(d.Seconds()) }

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
