package main

import (
	"maps"
	"math/big"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// metrics are the controller's. Those of pools and Services come from the last plan, and only from the controller that leads.
type metrics struct {
	writes    *prometheus.CounterVec
	conflicts prometheus.Counter
	duration  prometheus.Histogram
	last      lastPlan
}

func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "landfall_controller_writes_total",
			Help: "Writes of statuses, by kind (service, pool) and result (ok, conflict, error).",
		}, []string{"kind", "result"}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "landfall_controller_conflicts_total",
			Help: "Writes that were refused because the object had changed meanwhile; they are decided anew.",
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "landfall_controller_assign_duration_seconds",
			Help:    "Time to decide for all Services.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}),
	}
	registry.MustRegister(m.writes, m.conflicts, m.duration, &m.last)
	return m
}

// planned takes note of a plan.
func (m *metrics) planned(p plan.Plan, took time.Duration) {
	m.duration.Observe(took.Seconds())
	m.last.set(p)
}

// forget drops what only a leader knows.
func (m *metrics) forget() { m.last.set(plan.Plan{}) }

// wrote counts a write.
func (m *metrics) wrote(kind string, err error) {
	switch {
	case err == nil:
		m.writes.WithLabelValues(kind, "ok").Inc()
	case kube.IsConflict(err):
		m.writes.WithLabelValues(kind, "conflict").Inc()
		m.conflicts.Inc()
	default:
		m.writes.WithLabelValues(kind, "error").Inc()
	}
}

var (
	descTotal = prometheus.NewDesc("landfall_controller_addresses",
		"Addresses in a pool.", []string{"pool", "family"}, nil)
	descAssigned = prometheus.NewDesc("landfall_controller_addresses_assigned",
		"Addresses of a pool that Services hold.", []string{"pool", "family"}, nil)
	descReady = prometheus.NewDesc("landfall_controller_pool_ready",
		"1 if the pool hands out addresses.", []string{"pool", "reason"}, nil)
	descServices = prometheus.NewDesc("landfall_controller_services",
		"Services that have the addresses that they ask for.", nil, nil)
	descPending = prometheus.NewDesc("landfall_controller_services_pending",
		"Services that do not have the addresses that they ask for.", []string{"reason"}, nil)
)

// lastPlan turns the last plan into metrics when they are asked for.
type lastPlan struct {
	mu   sync.Mutex
	plan plan.Plan
}

func (l *lastPlan) set(p plan.Plan) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.plan = p
}

// Describe implements prometheus.Collector.
func (l *lastPlan) Describe(descs chan<- *prometheus.Desc) {
	for _, desc := range []*prometheus.Desc{descTotal, descAssigned, descReady, descServices, descPending} {
		descs <- desc
	}
}

// Collect implements prometheus.Collector.
func (l *lastPlan) Collect(out chan<- prometheus.Metric) {
	l.mu.Lock()
	p := l.plan
	l.mu.Unlock()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	for name, pool := range p.Pools {
		for family, usage := range pool.Families {
			total, _ := new(big.Float).SetInt(usage.Total).Float64()
			gauge(descTotal, total, name, string(family))
			gauge(descAssigned, float64(usage.Assigned), name, string(family))
		}
		for _, condition := range pool.Status.Conditions {
			ready := 0.0
			if condition.Status {
				ready = 1
			}
			gauge(descReady, ready, name, string(condition.Reason))
		}
	}
	if p.Services == nil {
		return
	}
	assigned, pending := countServices(slices.Collect(maps.Values(p.Services)))
	gauge(descServices, float64(assigned))
	for reason, n := range pending {
		gauge(descPending, float64(n), string(reason))
	}
}

// countServices counts those that have what they ask for, and the others by reason.
func countServices(decisions []plan.Decision) (assigned int, pending map[lb.Reason]int) {
	pending = map[lb.Reason]int{}
	for _, d := range decisions {
		switch {
		case d.Condition == nil:
		case d.Condition.Status:
			assigned++
		default:
			pending[d.Condition.Reason]++
		}
	}
	return assigned, pending
}
