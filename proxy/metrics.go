package main

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/probe"
)

// metrics count what the actors do. The names are kube-proxy's, with landfall_proxy_ in place of
// kubeproxy_.
type metrics struct {
	duration, full, partial prometheus.Histogram
	programming, network    prometheus.Histogram
	// Counters of failures: of calls of iptables-restore, those among them that named only what had
	// changed, and of transactions.
	restores, partialRestores, transactions prometheus.Counter
	lines, elements, flows                  prometheus.Counter
	services, endpoints                     prometheus.Counter
	verified, synced, queued                prometheus.Gauge
	rules                                   *prometheus.GaugeVec
	healthz, livez, probes, gates           *prometheus.CounterVec
}

func newMetrics(registry prometheus.Registerer) *metrics {
	const rounds = "sync_proxy_rules_"
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: buckets})
		registry.MustRegister(h)
		return h
	}
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + name, Help: help})
		registry.MustRegister(c)
		return c
	}
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help})
		registry.MustRegister(g)
		return g
	}
	answers := func(path string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "proxy_" + path + "_total",
			Help: "Answers on /" + path + "."}, []string{"code"})
		registry.MustRegister(c)
		return c
	}
	short := prometheus.ExponentialBuckets(0.001, 2, 15)
	m := &metrics{
		duration: histogram(rounds+"duration_seconds",
			"Duration of one round of writing rules, rounds with nothing to write included.", short),
		full: histogram("sync_full_proxy_rules_duration_seconds",
			"Duration of a round that compared all rules with the kernel's.", short),
		partial: histogram("sync_partial_proxy_rules_duration_seconds",
			"Duration of a round that wrote only what had changed.",
			short),
		programming: histogram("programming_latency_seconds",
			"Time from receiving a change from the API server until the kernel confirmed its rules.",
			prometheus.ExponentialBuckets(0.001, 2, 17)),
		network: histogram("network_programming_duration_seconds",
			"Time from a change of a pod, by the EndpointSlice's annotation, until the kernel confirmed its rules.",
			slices.Concat(prometheus.ExponentialBuckets(0.001, 2, 8), prometheus.LinearBuckets(0.25, 0.25, 3),
				prometheus.LinearBuckets(1, 1, 59),
				prometheus.LinearBuckets(60, 5, 12), prometheus.LinearBuckets(120, 30, 7))),
		restores: counter(rounds+"iptables_restore_failures_total", "Calls of iptables-restore that failed."),
		partialRestores: counter(rounds+"iptables_partial_restore_failures_total",
			"Calls of iptables-restore that failed and named only what had changed."),
		transactions: counter(rounds+"nftables_sync_failures_total", "Transactions that the kernel refused."),
		lines:        counter(rounds+"iptables_lines_total", "Lines handed to iptables-restore."),
		elements:     counter(rounds+"nftables_elements_total", "Elements added to and removed from nftables."),
		services:     counter(rounds+"service_changes_total", "Changes of Services received from the API server."),
		endpoints:    counter(rounds+"endpoint_changes_total", "Changes of EndpointSlices received from the API server."),
		flows: counter("conntrack_reconciler_deleted_entries_total",
			"Flows deleted from conntrack because their backend or frontend is gone."),
		verified: gauge("rules_last_verified_timestamp_seconds",
			"When the kernel's rules were last read and found, or made, equal to the desired ones."),
		synced: gauge(rounds+"last_timestamp_seconds", "When the last round ended without an error."),
		queued: gauge(rounds+"last_queued_timestamp_seconds", "When the last change was received from the API server."),
		rules: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + rounds + "iptables_total",
			Help: "Landfall's rules in iptables."},
			[]string{"table"}),
		healthz: answers("healthz"), livez: answers("livez"),
		probes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "probes_total",
			Help: "Probes of backends by result: passed, refused, timeout, status, failed, or too-late where the node itself " +
				"was too slow to tell."}, []string{"result"}),
	}
	m.gates = prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "readiness_gates_opened_total",
		Help: "Readiness gates of pods that were opened, by reason: Programmed, NoService or TimedOut."}, []string{"reason"})
	registry.MustRegister(m.rules, m.probes, m.gates)
	return m
}

// prefix begins the names of all metrics.
const prefix = "landfall_proxy_"

func (m *metrics) iptables(s dialect.Sync) {
	m.lines.Add(float64(s.Changes))
	m.restores.Add(float64(s.Failures))
	m.partialRestores.Add(float64(s.Partial))
	for table, n := range s.Rules {
		m.rules.WithLabelValues(table).Set(float64(n))
	}
	m.sync(s.Duration, s.Verified, s.Err)
}

func (m *metrics) nftables(s dialect.Sync) {
	m.elements.Add(float64(s.Changes))
	m.transactions.Add(float64(s.Failures))
	m.sync(s.Duration, s.Verified, s.Err)
}

func (m *metrics) sync(took time.Duration, verified bool, err error) {
	m.duration.Observe(took.Seconds())
	if verified {
		m.full.Observe(took.Seconds())
		m.verified.SetToCurrentTime()
	} else {
		m.partial.Observe(took.Seconds())
	}
	if err == nil {
		m.synced.SetToCurrentTime()
	}
}

// counting counts changes of one kind on their way.
func (m *metrics) counting(changes prometheus.Counter, changed func(lb.Key)) func(lb.Key) {
	return func(key lb.Key) {
		changes.Inc()
		m.queued.SetToCurrentTime()
		changed(key)
	}
}

// answered counts an answer on /healthz or /livez.
func (m *metrics) answered(path string, code int) {
	vec := m.livez
	if path == "/healthz" {
		vec = m.healthz
	}
	vec.WithLabelValues(strconv.Itoa(code)).Inc()
}

func (m *metrics) asked(result probe.Result) { m.probes.WithLabelValues(string(result)).Inc() }

func (m *metrics) opened(reason lb.Reason) { m.gates.WithLabelValues(string(reason)).Inc() }

func (m *metrics) programmed(d time.Duration) { m.network.Observe(d.Seconds()) }

func (m *metrics) latency(d time.Duration) { m.programming.Observe(d.Seconds()) }

func (m *metrics) cut(n int) { m.flows.Add(float64(n)) }

// collector shows the proxy's state as metrics at the time of asking.
type collector struct {
	p                                        *proxy
	readers                                  func() int
	services, vips, pending, speakers, ready *prometheus.Desc
	changes, noLocal, advised, unreached     *prometheus.Desc
	leftOut, ignored                         *prometheus.Desc
}

func newCollector(p *proxy, readers func() int) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+name, help, labels, nil)
	}
	return &collector{
		p: p, readers: readers,
		services: desc("services", "Services by state: applied, pending or failed.", "state"),
		vips:     desc("vips", "VIPs by the reason why this node cannot deliver them, or Deliverable.", "reason"),
		unreached: desc("endpoints_without_path",
			"Endpoints of Services with external addresses that this node's kernel does not reach, by reason.", "reason"),
		leftOut: desc("probe_endpoints_left_out",
			"Endpoints to which this node sends no new connections, as they do not answer its probes."),
		ignored: desc("probe_services_ignored",
			"Services of which this node uses endpoints that do not answer its probes, as fewer than half would be left."),
		pending: desc("oldest_unapplied_change_age_seconds",
			"Age of the oldest change that the kernel has not confirmed; 0 when there is none.", "family"),
		speakers: desc("feed_readers", "Speakers connected to the feed."),
		changes:  desc("sync_proxy_rules_changes_pending", "Services with changes that the kernel has not confirmed."),
		noLocal: desc("sync_proxy_rules_no_local_endpoints_total",
			"Services whose policy Local drops connections on this node, because only other nodes have endpoints.",
			"traffic_policy"),
		advised: desc(
			"services_not_as_asked",
			"Services with a setting that this proxy does not follow; Events and the status name it."),
		ready: desc("ready", "1 once all Services have been written for the first time, else 0."),
	}
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.services, c.vips, c.pending, c.speakers, c.ready, c.changes, c.unreached,
		c.noLocal,
		c.advised, c.leftOut, c.ignored} {
		ch <- d
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	c.p.mu.Lock()
	oldest, complete, now := c.p.unapplied(), c.p.complete, c.p.now()
	states, vips, unreached := maps.Clone(c.p.counts.states), maps.Clone(c.p.counts.vips),
		maps.Clone(c.p.counts.unreached)
	internal, external, advised := c.p.counts.noLocal[policyInternal], c.p.counts.noLocal[policyExternal],
		c.p.counts.advised[true]
	changes := len(c.p.unconfirmed)
	leftOut, ignored := c.p.countProbes()
	c.p.mu.Unlock()
	for reason, n := range unreached {
		gauge(c.unreached, float64(n), string(reason))
	}
	gauge(c.changes, float64(changes))
	gauge(c.noLocal, float64(internal), policyInternal)
	gauge(c.noLocal, float64(external), policyExternal)
	gauge(c.advised, float64(advised))
	gauge(c.leftOut, float64(leftOut))
	gauge(c.ignored, float64(ignored))
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
