package bgp

import "github.com/prometheus/client_golang/prometheus"

var perPeer = []string{"peer"}

// descriptions of the metrics. Counters restart when a peer is configured again.
var (
	upMetric = prometheus.NewDesc("landfall_bgp_session_up", "Whether the session with the peer is established.",
		perPeer, nil)
	flapsMetric = prometheus.NewDesc("landfall_bgp_session_flaps_total", "How often an established session was lost.",
		perPeer, nil)
	announcedMetric = prometheus.NewDesc("landfall_bgp_prefixes_announced", "Prefixes that the peer hears.", perPeer, nil)
	receivedMetric  = prometheus.NewDesc("landfall_bgp_prefixes_received",
		"Prefixes that the peer announces and that are kept to be shown.", perPeer, nil)
	messagesMetric = prometheus.NewDesc("landfall_bgp_messages_total", "Messages to and from the peer.",
		[]string{"peer", "direction"}, nil)
	updatesMetric = prometheus.NewDesc("landfall_bgp_updates_total", "UPDATE messages to and from the peer.",
		[]string{"peer", "direction"}, nil)
	listeningMetric = prometheus.NewDesc("landfall_bgp_listening",
		"Whether peers can connect to the address of --bgp-listen.", nil, nil)
	refusedMetric = prometheus.NewDesc("landfall_bgp_connections_refused_total",
		"Connections to the address of --bgp-listen that were closed at once, as they are of no session.", nil, nil)
	bytesMetric = prometheus.NewDesc("landfall_bgp_bytes_total", "Bytes of messages to and from the peer.",
		[]string{"peer", "direction"}, nil)
)

// Describe implements prometheus.Collector.
func (a *Actor) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{upMetric, flapsMetric, announcedMetric, receivedMetric, messagesMetric,
		updatesMetric, bytesMetric, listeningMetric, refusedMetric} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (a *Actor) Collect(out chan<- prometheus.Metric) {
	if l := a.listener; l != nil {
		out <- prometheus.MustNewConstMetric(listeningMetric, prometheus.GaugeValue, number(l.listening.Load()))
		out <- prometheus.MustNewConstMetric(refusedMetric, prometheus.CounterValue, float64(l.refused.Load()))
	}
	for peer, s := range a.Brief() {
		out <- prometheus.MustNewConstMetric(upMetric, prometheus.GaugeValue, number(s.State == Established), peer)
		out <- prometheus.MustNewConstMetric(flapsMetric, prometheus.CounterValue, float64(s.Flaps), peer)
		out <- prometheus.MustNewConstMetric(announcedMetric, prometheus.GaugeValue, float64(s.Prefixes), peer)
		out <- prometheus.MustNewConstMetric(receivedMetric, prometheus.GaugeValue, float64(s.Received), peer)
		for _, m := range []struct {
			desc    *prometheus.Desc
			in, out uint64
		}{
			{messagesMetric, s.Counters.MessagesIn, s.Counters.MessagesOut},
			{updatesMetric, s.Counters.UpdatesIn, s.Counters.UpdatesOut},
			{bytesMetric, s.Counters.BytesIn, s.Counters.BytesOut},
		} {
			out <- prometheus.MustNewConstMetric(m.desc, prometheus.CounterValue, float64(m.in), peer, "in")
			out <- prometheus.MustNewConstMetric(m.desc, prometheus.CounterValue, float64(m.out), peer, "out")
		}
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
