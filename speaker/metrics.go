package main

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/l2"
)

// packets counts what the L2 actor sees and sends.
type packets struct {
	requests, replies, gratuitous, dropped, probes *prometheus.CounterVec
}

func newPackets(registry prometheus.Registerer) *packets {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "landfall_speaker_" + name, Help: help}, labels)
		registry.MustRegister(c)
		return c
	}
	return &packets{
		requests:   counter("arp_requests_total", "ARP requests for VIPs that this node answers for.", "interface", "vip"),
		replies:    counter("arp_replies_total", "ARP replies sent.", "interface", "vip"),
		gratuitous: counter("gratuitous_total", "Unasked announcements sent.", "interface", "vip"),
		probes: counter("arp_probes_total",
			"Questions sent whether a device uses an address: for a new VIP, or ahead, before a Service has the address.",
			"interface", "ahead"),
		dropped: counter("arp_dropped_total",
			"ARP and NDP packets left without an answer; with the reason overrun, as the kernel had no room for them.",
			"interface", "reason"),
	}
}

func (p *packets) Request(iface string, vip netip.Addr) {
	p.requests.WithLabelValues(iface, vip.String()).Inc()
}

func (p *packets) Reply(iface string, vip netip.Addr) {
	p.replies.WithLabelValues(iface, vip.String()).Inc()
}

func (p *packets) Gratuitous(iface string, vip netip.Addr) {
	p.gratuitous.WithLabelValues(iface, vip.String()).Inc()
}

func (p *packets) Withdrawn(iface string, vip netip.Addr) {
	for _, c := range []*prometheus.CounterVec{p.requests, p.replies, p.gratuitous} {
		c.DeleteLabelValues(iface, vip.String())
	}
}

func (p *packets) Dropped(iface string, why l2.Drop, n int) {
	p.dropped.WithLabelValues(iface, string(why)).Add(float64(n))
}

func (p *packets) Probe(iface string, ahead bool) {
	p.probes.WithLabelValues(iface, strconv.FormatBool(ahead)).Inc()
}

// newEmptyConnections shows how many connections other nodes have closed without a message.
func newEmptyConnections(count func() uint64) prometheus.CounterFunc {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "landfall_speaker_gossip_empty_connections_total",
		Help: "Connections to the port of gossip that other nodes have closed without a message.",
	}, func() float64 { return float64(count()) })
}

// collector shows the speaker's state as metrics at the time of asking, so that nothing is left
// over from what was.
type collector struct {
	s                                               *speaker
	announced, claims, reasons, conflicts           *prometheus.Desc
	members, missing, majority, feedUsable, changes *prometheus.Desc
	mtu, ahead, aheadClear, neighbors, neighborsUp  *prometheus.Desc
	held                                            *prometheus.Desc
}

func newCollector(s *speaker) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("landfall_speaker_"+name, help, labels, nil)
	}
	return &collector{
		s: s,
		announced: desc(
			"announced", "1 for each VIP and Service that this node answers for, or that BGP peers hear of from it.", "vip",
			"service"),
		claims:     desc("claims", "VIPs by why this node does not claim them; Claimed for those that it does.", "reason"),
		reasons:    desc("vip_reason", "1 for each VIP and why this node does or does not announce it.", "vip", "reason"),
		missing:    desc("members_missing", "Nodes whose speaker disappeared without leaving."),
		majority:   desc("majority", "1 while this node sees a majority of the speakers that it has met."),
		members:    desc("members", "Live nodes that run a speaker, this one included."),
		feedUsable: desc("gate_usable", "1 while the speaker can trust what its readiness source reports."),
		changes:    desc("owner_changes_total", "Changes of a VIP's owner, as this node saw them."),
		held: desc("held_announcements_total", "Announcements that had to wait, as the VIP was announced, or its "+
			"route changed, too often in a row (--flap-interval).", "protocol"),
		ahead: desc("addresses_ahead", "Addresses that Services get next and that this node may announce."),
		aheadClear: desc("addresses_ahead_clear",
			"Of these, those that a node has probed lately without an answer, so that a Service answers at once."),
		neighbors:   desc("neighbors", "Speakers that this one watches with BFD."),
		neighborsUp: desc("neighbors_up", "Of these, those to which the path is up."),
		conflicts: desc(
			"address_conflict",
			"1 for each conflicting host: a device outside the cluster that uses a VIP, as this node sees it.",
			"vip", "interface", "mac"),
		mtu: desc("subnet_mtu_bytes", "MTU of the interface by which this node is in a subnet. It must be that of all nodes "+
			"there.", "subnet", "interface"),
	}
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.announced, c.claims, c.reasons, c.members, c.missing, c.majority, c.feedUsable,
		c.changes, c.conflicts, c.mtu, c.ahead, c.aheadClear, c.neighbors, c.neighborsUp, c.held} {
		ch <- d
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	answering := c.s.to.l2.Outcome().Answering
	claims := map[lb.Reason]int{"Claimed": 0}
	for _, d := range c.s.snapshot() {
		claims[cmp.Or(d.Obstacle(), "Claimed")]++
		if w, ok := d.Node(c.s.self); ok {
			gauge(c.reasons, 1, d.VIP.String(), string(w.Reason))
		}
		for _, host := range d.ConflictingHosts {
			gauge(c.conflicts, 1, d.VIP.String(), host.Interface, host.MAC)
		}
		if len(answering[d.VIP]) == 0 && len(d.Routed.Peers) == 0 {
			continue
		}
		for _, key := range d.Services {
			gauge(c.announced, 1, d.VIP.String(), key.String())
		}
	}
	c.s.mu.Lock()
	beyond := c.s.rooms.holders.Beyond()
	c.s.mu.Unlock()
	if beyond > 0 {
		claims[lb.ReasonTooManyVIPs] = beyond
	}
	for reason, n := range claims {
		gauge(c.claims, float64(n), string(reason))
	}
	members := c.s.membersStatus()
	gauge(c.members, float64(len(members.Live)))
	gauge(c.missing, float64(len(members.Missing)))
	gauge(c.majority, truth(members.Majority))
	gauge(c.feedUsable, truth(c.s.from.feed == nil || c.s.from.feed.Reason() == ""))
	c.s.mu.Lock()
	changes := c.s.rooms.ownership.OwnerChanges()
	heldL2, heldRoutes := c.s.rooms.ownership.Held(), c.s.rooms.routes.Held()
	wanted, clear := c.s.rooms.ahead.Counts(c.s.self)
	c.s.mu.Unlock()
	if c.s.beats != nil {
		watched, up := c.s.beats.counts(c.s.to.routes.bfd.Outcomes())
		gauge(c.neighbors, float64(watched))
		gauge(c.neighborsUp, float64(up))
	}
	gauge(c.ahead, float64(wanted))
	gauge(c.aheadClear, float64(clear))
	ch <- prometheus.MustNewConstMetric(c.changes, prometheus.CounterValue, float64(changes))
	ch <- prometheus.MustNewConstMetric(c.held, prometheus.CounterValue, float64(heldL2), "l2")
	ch <- prometheus.MustNewConstMetric(c.held, prometheus.CounterValue, float64(heldRoutes), "bgp")
	interfaces, _ := c.s.from.interfaces()
	for _, one := range mtus(interfaces, c.s.from.nodes.All()) {
		gauge(c.mtu, float64(one.bytes), one.subnet.String(), one.name)
	}
}

// subnetMTU is what an interface sends at most into a subnet.
type subnetMTU struct {
	subnet netip.Prefix
	name   string
	bytes  int
}

// maxSubnets bounds the metric of MTUs.
const maxSubnets = 64

// mtus lists the subnets in which this node and other Nodes are.
func mtus(interfaces []lb.Interface, nodes map[string]lb.Node) (all []subnetMTU) {
	for _, i := range interfaces {
		seen := map[netip.Prefix]bool{}
		for _, p := range i.Addresses {
			subnet := p.Masked()
			if !i.Up || i.MTU == 0 || seen[subnet] || len(all) == maxSubnets || !shared(p, nodes) {
				continue
			}
			seen[subnet] = true
			all = append(all, subnetMTU{subnet, i.Name, i.MTU})
		}
	}
	return all
}

// shared reports whether another Node has an address in the subnet of an address.
func shared(own netip.Prefix, nodes map[string]lb.Node) bool {
	for _, n := range nodes {
		if slices.ContainsFunc(n.Addresses, func(a netip.Addr) bool { return a != own.Addr() && own.Contains(a) }) {
			return true
		}
	}
	return false
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
