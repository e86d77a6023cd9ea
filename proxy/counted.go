package main

import (
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/counters"
)

// counters returns the actor that counts what Services get; nil without --service-counters, which
// removes the tables that a predecessor has left.
func (f *flags) counters(families []lb.Family, log *slog.Logger) (*counters.Actor, error) {
	if f.serviceCounters == string(counters.Off) {
		if err := counters.Cleanup(); err != nil {
			log.Debug("cannot remove the tables of counters", "error", err)
		}
		return nil, nil
	}
	kernel, err := counters.Open()
	if err != nil {
		return nil, err
	}
	return counters.New(counters.Deps{Log: log, Kernel: kernel, Families: families,
		Scope: counters.Scope(f.serviceCounters), Now: time.Now}), nil
}

// countersCollector shows what was counted, at the time of asking.
type countersCollector struct {
	all                                          func() (map[lb.Key]counters.Counts, error)
	connections, packets, bytes, refused, up, no *prometheus.Desc
}

func newCountersCollector(all func() (map[lb.Key]counters.Counts, error)) *countersCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prefix+name, help, labels, nil)
	}
	return &countersCollector{
		all: all,
		connections: desc("service_connections_total", "Connections to the Service that were sent to an endpoint.",
			"service"),
		packets: desc("service_packets_total", "Packets of the Service's connections from clients (received) and to them "+
			"(sent).", "service", "direction"),
		bytes: desc("service_bytes_total", "Bytes of these packets, IP headers included.", "service", "direction"),
		refused: desc("service_refused_connections_total", "Attempts to connect that were refused or dropped, by reason.",
			"service", "reason"),
		up: desc("service_counters_up", "1 while the kernel counts and the counters can be read, else 0."),
		no: desc("service_frontends_uncounted", "Frontends that are not counted, as there are too many."),
	}
}

func (c *countersCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.connections, c.packets, c.bytes, c.refused, c.up, c.no} {
		ch <- d
	}
}

func (c *countersCollector) Collect(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	const received, sent = "received", "sent"
	all, err := c.all()
	uncounted := 0
	for key, n := range all {
		service := key.String()
		count(c.connections, n.Connections, service)
		count(c.packets, n.PacketsReceived, service, received)
		count(c.packets, n.PacketsSent, service, sent)
		count(c.bytes, n.BytesReceived, service, received)
		count(c.bytes, n.BytesSent, service, sent)
		for reason, n := range n.Refused {
			count(c.refused, n, service, string(reason))
		}
		uncounted += n.Uncounted
	}
	up := 1.0
	if err != nil {
		up = 0
	}
	ch <- prometheus.MustNewConstMetric(c.up, prometheus.GaugeValue, up)
	ch <- prometheus.MustNewConstMetric(c.no, prometheus.GaugeValue, float64(uncounted))
}
