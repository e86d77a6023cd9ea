package main

import (
	"math/big"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// metrics are the controller's. Those of pools and Services come from the last plan, and only from
// the controller that leads.
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
			Help: "Status writes, by kind (service, pool) and result (ok, conflict, error).",
		}, []string{"kind", "result"}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "landfall_controller_conflicts_total",
			Help: "Status writes that the API server refused because the object had changed; the controller decides again.",
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "landfall_controller_assign_duration_seconds",
			Help:    "Time to decide for all Services that a change concerns.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8),
		}),
	}
	registry.MustRegister(m.writes, m.conflicts, m.duration, &m.last)
	return m
}

// planned takes note of a plan.
func (m *metrics) planned(pools map[string]plan.PoolPlan, services plan.Summary, took time.Duration) {
	m.duration.Observe(took.Seconds())
	m.last.set(pools, &services)
}

// forget drops what only a leader knows.
func (m *metrics) forget() { m.last.set(nil, nil) }

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
	mu       sync.Mutex
	pools    map[string]plan.PoolPlan
	services *plan.Summary // nil for one that does not lead
}

func (l *lastPlan) set(pools map[string]plan.PoolPlan, services *plan.Summary) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pools, l.services = pools, services
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
	pools, services := l.pools, l.services
	l.mu.Unlock()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	for name, pool := range pools {
		for family, usage := range pool.Families {
			total, _ := new(big.Float).SetInt(usage.Total).Float64()
			gauge(descTotal, total, name, string(family))
			gauge(descAssigned, float64(usage.Assigned), name, string(family))
		}
		for _, condition := range pool.Status.Conditions {
			if condition.Type != lb.ConditionReady {
				continue
			}
			ready := 0.0
			if condition.Status {
				ready = 1
			}
			gauge(descReady, ready, name, string(condition.Reason))
		}
	}
	if services == nil {
		return
	}
	gauge(descServices, float64(services.Assigned))
	for reason, n := range services.Pending {
		gauge(descPending, float64(n), string(reason))
	}
}
