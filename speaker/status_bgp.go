package main

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/routes"
)

// bgpStatus is what /v1/status shows of BGP.
type bgpStatus struct {
	// Waiting names what is needed before sessions are opened; absent once it is there.
	Waiting string       `json:"waiting,omitempty"`
	Peers   []peerStatus `json:"peers"`
	// Leaving counts the VIPs whose announcement is about to end, also while no peer is there to hear them: one that
	// comes back hears them again.
	Leaving int `json:"leaving,omitempty"`
	// BFD is what holds for all BFD sessions; absent without any.
	BFD *bfdHealth `json:"bfd,omitempty"`
}

type peerStatus struct {
	Name string `json:"name"`
	// Refusal says why there is no session, Warning what it cannot do that was asked for.
	Refusal *lb.Refusal `json:"refusal,omitempty"`
	Warning *lb.Refusal `json:"warning,omitempty"`
	Session *bgp.Status `json:"session,omitempty"`
	// Uptime is for how long the session has been in its state.
	Uptime string      `json:"uptime,omitempty"`
	BFD    *pathStatus `json:"bfd,omitempty"`
}

// pathStatus is a BFD session, in words.
type pathStatus struct {
	Session          string      `json:"session"`
	State            string      `json:"state"`
	RemoteState      string      `json:"remoteState"`
	Since            time.Time   `json:"since,omitzero"`
	Diagnostic       string      `json:"diagnostic"`
	RemoteDiagnostic string      `json:"remoteDiagnostic"`
	TransmitInterval string      `json:"transmitInterval"`
	DetectionTime    string      `json:"detectionTime"`
	RemoteTransmit   string      `json:"remoteTransmitInterval"`
	RemoteReceive    string      `json:"remoteReceiveInterval"`
	RemoteMultiplier uint8       `json:"remoteMultiplier"`
	Failures         uint64      `json:"failures"`
	Refused          *lb.Refusal `json:"refused,omitempty"`
	Ignored          *lb.Refusal `json:"ignored,omitempty"`
	Problem          string      `json:"problem,omitempty"`
	LastDown         *lastDown   `json:"lastDown,omitempty"`
	// HoldsDown is set while the loss of the path keeps the BGP session down.
	HoldsDown bool `json:"holdsDown,omitempty"`
}

type lastDown struct {
	At               time.Time `json:"at"`
	Diagnostic       string    `json:"diagnostic"`
	RemoteDiagnostic string    `json:"remoteDiagnostic"`
	Administrative   bool      `json:"administrative"`
}

type bfdHealth struct {
	RealTime     bool   `json:"realTime"`
	MemoryLocked bool   `json:"memoryLocked"`
	Problem      string `json:"problem,omitempty"`
	LatestWake   string `json:"latestWake"`
	Lost         uint64 `json:"lost"`
}

// routeStatus says how the node announces a VIP over BGP.
type routeStatus struct {
	Prefixes []netip.Prefix `json:"prefixes,omitempty"`
	// Peers hear of the VIP.
	Peers []string `json:"peers,omitempty"`
	// Confirming are the peers that announce the prefix back, and so have taken it from another node.
	Confirming []string           `json:"confirming,omitempty"`
	Leaving    bool               `json:"leaving,omitempty"`
	Refusal    *lb.Refusal        `json:"refusal,omitempty"`
	Obstacles  []plan.BGPObstacle `json:"obstacles,omitempty"`
}

func (s *speaker) bgpStatus() bgpStatus {
	statuses, outcomes := s.to.routes.bgp.Statuses(), s.to.routes.bfd.Outcomes()
	s.mu.Lock()
	defer s.mu.Unlock()
	st := bgpStatus{Waiting: s.rooms.routes.Waiting(), Peers: []peerStatus{}}
	for _, v := range s.rooms.routes.VIPs() {
		if v.Lingers {
			st.Leaving++
		}
	}
	peers, watches := s.rooms.routes.Peers(), s.rooms.routes.Watches()
	for _, name := range slices.Sorted(maps.Keys(peers)) {
		d := peers[name]
		p := peerStatus{Name: name, Refusal: d.Refusal, Warning: d.Warning}
		if session, ok := statuses[name]; ok {
			p.Session, p.Uptime = &session, time.Since(session.Since).Round(time.Second).String()
		}
		if w, ok := watches[name]; ok {
			p.BFD = describePath(w, outcomes[bfd.Key(w.Path)])
		}
		st.Peers = append(st.Peers, p)
	}
	if len(watches) > 0 {
		h := s.to.routes.bfd.Health()
		st.BFD = &bfdHealth{RealTime: h.RealTime, MemoryLocked: h.MemoryLocked, Problem: h.Problem,
			LatestWake: h.LatestWake.String(), Lost: h.Lost}
	}
	return st
}

func describePath(w routes.Watch, o bfd.Outcome) *pathStatus {
	p := &pathStatus{
		Session: bfd.Key(w.Path).String(), State: o.State.String(), RemoteState: o.RemoteState.String(), Since: o.Since,
		Diagnostic: o.Diagnostic.String(), RemoteDiagnostic: o.RemoteDiagnostic.String(),
		TransmitInterval: o.TransmitInterval.String(), DetectionTime: o.DetectionTime.String(),
		RemoteTransmit: o.RemoteTransmitInterval.String(), RemoteReceive: o.RemoteReceiveInterval.String(),
		RemoteMultiplier: o.RemoteMultiplier,
		Failures:         o.Failures, Refused: o.Refused, Ignored: o.Ignored, Problem: o.Problem, HoldsDown: w.HoldsDown,
	}
	if o.LastDown != nil {
		p.LastDown = &lastDown{
			At: o.LastDown.At, Diagnostic: o.LastDown.Diagnostic.String(),
			RemoteDiagnostic: o.LastDown.RemoteDiagnostic.String(),
			Administrative:   o.LastDown.Administrative,
		}
	}
	return p
}

// routeStatus returns what becomes of a VIP over BGP; nil without a BGPAdvertisement for it. The
// caller holds the lock.
func (s *speaker) routeStatus(vip netip.Addr) *routeStatus {
	v := s.rooms.routes.VIPs()[vip]
	if !v.Selected {
		return nil
	}
	routed := s.rooms.routes.Routed(vip)
	var confirming []string
	for _, p := range v.Prefixes {
		confirming = append(confirming, s.to.routes.bgp.Confirming(p)...)
	}
	slices.Sort(confirming)
	return &routeStatus{Prefixes: v.Prefixes, Peers: routed.Peers, Confirming: slices.Compact(confirming),
		Leaving: v.Leaving, Refusal: routed.Refusal, Obstacles: v.Obstacles}
}

// pathCollector shows the BFD sessions as metrics.
type pathCollector struct {
	s                                      *speaker
	up, failures, packets, detection       *prometheus.Desc
	realTime, latestWake, dropped, overrun *prometheus.Desc
}

func newPathCollector(s *speaker) *pathCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("landfall_bfd_"+name, help, labels, nil)
	}
	return &pathCollector{
		s:  s,
		up: desc("session_up", "Whether the BFD session with the BGP peer is Up.", "peer"),
		failures: desc("session_failures_total", "How often the path to the peer was lost, other than by administration.",
			"peer"),
		packets: desc("packets_total", "BFD packets to and from the peer.", "peer", "direction"),
		detection: desc(
			"detection_seconds", "Silence after which the path to the peer counts as lost; 0 while the peer is not heard.",
			"peer"),
		realTime:   desc("real_time", "1 if the BFD process has real-time priority and its memory locked."),
		latestWake: desc("latest_wake_seconds", "The longest that the BFD process was late for anything."),
		dropped:    desc("dropped_packets_total", "BFD packets that were ignored, by reason.", "reason"),
		overrun:    desc("socket_overruns_total", "How often a socket lost packets because its buffer was full."),
	}
}

// Describe implements prometheus.Collector.
func (c *pathCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.failures, c.packets, c.detection, c.realTime, c.latestWake, c.dropped,
		c.overrun} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *pathCollector) Collect(ch chan<- prometheus.Metric) {
	put := func(d *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, v, labels...)
	}
	keys := map[string]bfd.Key{}
	c.s.mu.Lock()
	for name, w := range c.s.rooms.routes.Watches() {
		keys[name] = bfd.Key(w.Path)
	}
	c.s.mu.Unlock()
	if len(keys) == 0 {
		return
	}
	outcomes, health := c.s.to.routes.bfd.Outcomes(), c.s.to.routes.bfd.Health()
	for name, key := range keys {
		o := outcomes[key]
		put(c.up, prometheus.GaugeValue, number(o.State == bfd.Up), name)
		put(c.failures, prometheus.CounterValue, float64(o.Failures), name)
		put(c.packets, prometheus.CounterValue, float64(o.Received), name, "in")
		put(c.packets, prometheus.CounterValue, float64(o.Sent), name, "out")
		put(c.detection, prometheus.GaugeValue, o.DetectionTime.Seconds(), name)
	}
	put(c.realTime, prometheus.GaugeValue, number(health.RealTime && health.MemoryLocked))
	put(c.latestWake, prometheus.GaugeValue, health.LatestWake.Seconds())
	put(c.overrun, prometheus.CounterValue, float64(health.Lost))
	for reason, n := range health.Dropped {
		put(c.dropped, prometheus.CounterValue, float64(n), reason.String())
	}
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
