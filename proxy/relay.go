package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relay"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// relayArgument is the first argument of the relay, a process of its own beside the proxy.
const relayArgument = "relay"

const relayName = "landfall-relay"

// relayUsage is what --help of the relay says.
const relayUsage = `The argument status prints the state of the running relay as JSON. The argument ready
fails until it has taken over from its predecessor.`

// relayFlags are the relay's.
type relayFlags struct {
	options relay.Options
	port    int
	udp     bool
}

func (f *relayFlags) add(set *pflag.FlagSet) {
	o := &f.options
	set.StringVar(&o.Socket, "relay-socket", wire.Socket,
		"Unix socket of the node's proxy, which says what to relay and has the rules lead here")
	set.IntVar(&f.port, "port", 7484,
		"port of TCP, and with --udp of UDP, that accepts what the rules lead here, at all addresses of the node; "+
			"connections to the port itself are reset, and datagrams dropped; 0 takes any free one")
	set.BoolVar(&f.udp, "udp", false, "relay UDP too; the proxy needs --relay-udp")
	set.IntVar(&o.Tries, "tries", 3, "how many backends a connection tries at most")
	set.DurationVar(&o.TryAfter, "try-after", 250*time.Millisecond,
		"after which time without an answer of a backend the connection tries another as well; the first answer counts")
	set.DurationVar(&o.ConnectTimeout, "connect-timeout", 10*time.Second,
		"how long a connection waits for an answer of all backends that it tries; then it is reset")
	set.DurationVar(&o.Idle, "idle-timeout", time.Hour,
		"how long both ends of a connection may be silent before it is reset")
	set.DurationVar(&o.Drain, "drain-time", wire.DefaultDrain,
		"how long open connections may go on when the relay ends; then they are reset")
	set.IntVar(&o.Limit, "connections", 10_000,
		"how many connections the node relays at once, as far as the file descriptors suffice, one for each and one for "+
			"each try; the rules send more straight to endpoints")
	set.IntVar(&o.ServiceLimit, "service-connections", 5000,
		"how many of them one Service may have, at most half of them all; the relay resets more")
	set.IntVar(&o.ClientLimit, "client-connections", 1000,
		"how many of those one client may have, an IPv4 address or an IPv6 network of 64 bits; the relay resets more")
	set.IntVar(&o.FlowLimit, "udp-flows", 10_000,
		"how many flows of UDP the node relays at once, as far as a quarter of the file descriptors and half of the ports "+
			"of net.ipv4.ip_local_port_range suffice, one for each; beyond that, one ends of the namespace that has most")
	set.IntVar(&o.ServiceFlows, "service-udp-flows", 5000,
		"how many of them one Service may have, at most half of them all; beyond that, the one ends whose client has been "+
			"silent for longest, of those first that have not sent again after an answer")
	set.IntVar(&o.ClientFlows, "client-udp-flows", 1000,
		"how many of those one client may have, as with --client-connections; beyond that, one ends as with "+
			"--service-udp-flows")
	set.DurationVar(&o.UDPIdle, "udp-idle-timeout", 100*time.Second,
		"how long both ends of a flow of UDP may be silent before it ends, at most five sixths of what the kernel's "+
			"nf_conntrack_udp_timeout and nf_conntrack_udp_timeout_stream say")
	set.StringVar(&o.HandOver, "hand-over-socket", "",
		"Unix socket, in a directory of its own, over which the relay hands its port and its open connections to the next "+
			"relay of the node, which has the same flag and starts before this one ends (default: none)")
	set.BoolVar(&o.AccessLog, "access-log", false,
		"log each connection and flow at its end: client, Service, the backend that had it, those that "+
			"were tried, bytes, and why it was reset")
}

// check returns what is wrong with the flags.
func (f *relayFlags) check() error {
	o := &f.options
	switch {
	case f.port < 0 || f.port > 65535:
		return ops.Usagef("--port: %d is not between 0 and 65535", f.port)
	case o.Tries < 1 || o.Tries > 100:
		return ops.Usagef("--tries: %d is not between 1 and 100", o.Tries)
	case o.TryAfter <= 0 || o.ConnectTimeout < o.TryAfter:
		return ops.Usagef("--try-after: %s is not between 0 and --connect-timeout, %s", o.TryAfter, o.ConnectTimeout)
	case o.Idle < time.Second:
		return ops.Usagef("--idle-timeout: %s is less than 1s", o.Idle)
	case o.UDPIdle < time.Second:
		return ops.Usagef("--udp-idle-timeout: %s is less than 1s", o.UDPIdle)
	case o.FlowLimit < 1 || o.ServiceFlows < 1 || o.ClientFlows < 1:
		return ops.Usagef("--udp-flows, --service-udp-flows and --client-udp-flows: %d, %d and %d are not all above 0",
			o.FlowLimit, o.ServiceFlows, o.ClientFlows)
	case o.Limit < 1 || o.ServiceLimit < 1 || o.ClientLimit < 1:
		return ops.Usagef("--connections, --service-connections and --client-connections: %d, %d and %d are not all above 0",
			o.Limit, o.ServiceLimit, o.ClientLimit)
	}
	o.Port, o.TCPOnly = uint16(f.port), !f.udp
	return ops.NotNegative("drain-time", o.Drain)
}

func relayProgram(f *relayFlags) ops.Program {
	return ops.Program{
		Name:    relayName,
		Summary: "ends connections to Services on this node, and tries another backend when one does not answer",
		Usage:   relayUsage, MetricsBindAddress: "localhost:7483", StatusSocket: "/run/landfall/relay-status.sock",
		ProbeSocket: true, Flags: f.add, Run: f.run, Succeeds: func() bool { return f.options.HandOver != "" },
	}
}

func (f *relayFlags) run(ctx context.Context, rt *ops.Runtime) error {
	if err := f.check(); err != nil {
		return err
	}
	if os.Getenv("GOGC") == "" {
		defer runtime.KeepAlive(make([]byte, spare))
	}
	settled := newSettled()
	rt.Ready("relay", settled.check) // only a predecessor that hands over waits for it: the rules do without a relay
	o := &f.options
	f.fit(rt.Log)
	o.ServiceLimit = min(o.ServiceLimit, max(o.Limit/2, 1))
	o.ClientLimit = min(o.ClientLimit, max(o.ServiceLimit/2, 1))
	o.ServiceFlows = min(o.ServiceFlows, max(o.FlowLimit/2, 1))
	o.ClientFlows = min(o.ClientFlows, max(o.ServiceFlows/2, 1))
	// Only who reads metrics with --metrics-secure has the relay ask the API server.
	if client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, Servers: rt.APIServers,
		UserAgent: relayName, Log: rt.Log}); err == nil {
		rt.ReviewMetrics(client.ReviewMetrics, client.Size)
	}
	deps := relay.NewDeps(rt.Log)
	deps.Succeeded = rt.StopMetrics
	if os.Getenv("GOMEMLIMIT") == "" {
		_, limit := deps.Memory()
		relay.BoundGarbage(limit)
	}
	r := openRelay(ctx, deps.Log, settled, func() (*relay.Relay, error) { return relay.New(f.options, deps) })
	if r == nil {
		return nil
	}
	rt.Live("relay", r.Busy)
	rt.Metrics.MustRegister(newRelayCollector(r))
	rt.Status(func(w io.Writer, _ string) error {
		head := relayHead{Node: rt.NodeName, Ready: r.Ready() == nil, Full: r.Full(), Behind: r.Behind(),
			Refused: r.Refused()}
		return ops.WriteStatus(w, head, "services", slices.Values(r.Counts()))
	})
	return r.Run(ctx)
}

// settled says whether the relay has taken over from its predecessor, as far as it can: it is not before it has looked
// for one.
type settled struct{ atomic.Pointer[func() error] }

func newSettled() *settled {
	s := &settled{}
	starts := func() error { return errors.New("it starts") }
	s.Store(&starts)
	return s
}

func (s *settled) check() error { return (*s.Load())() }

// tried notes what came of looking, which has taken so long so far: nil if the predecessor hands nothing over, and has
// to end first. One that does not serve successors yet would end with its connections if this relay were ready.
func (s *settled) tried(r *relay.Relay, err error, so time.Duration) {
	now := func() error { return nil }
	switch {
	case err == nil:
		now = r.Settled
	case errors.Is(err, relay.ErrNoPredecessor) && so < relay.HandOverWithin:
		now = func() error { return err }
	}
	s.Store(&now)
}

// openRelay returns a relay that is listening, or is about to, made by create; nil if ctx ends before the port is free.
// A relay that is not there harms nobody, so it waits and does not fail, which would count as a failure of the proxy's
// pod.
func openRelay(ctx context.Context, log *slog.Logger, settled *settled,
	create func() (*relay.Relay, error)) (r *relay.Relay) {
	failures := loop.Failures{Repeat: time.Hour}
	backoff := loop.Backoff{Min: time.Second, Max: time.Second}
	began := time.Now()
	ctx, opened := context.WithCancel(ctx)
	defer opened()
	_ = loop.Retry(ctx, backoff, func(context.Context) bool {
		now, err := create()
		if failures.Log(log, "cannot open the relay's port; trying again", "opened the relay's port", err); err == nil {
			r = now
			opened()
		}
		settled.tried(now, err, time.Since(began))
		return err == nil
	})
	return r
}

// fit lowers the limits to what the process can have with its file descriptors, and the node's ports.
func (f *relayFlags) fit(log *slog.Logger) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return
	}
	o := &f.options
	ports := relay.Ports()
	connections, flows := relay.Limits(o.Limit, o.FlowLimit, o.Tries, limit.Cur, ports)
	if connections < o.Limit || flows < o.FlowLimit {
		log.Warn("file descriptors, or the ports of net.ipv4.ip_local_port_range, allow fewer than --connections or "+
			"--udp-flows", "connections", connections, "flows", flows, "descriptors", limit.Cur, "ports", ports)
	}
	o.Limit, o.FlowLimit = connections, flows
}

// relayHead is shown ahead of the list "services".
type relayHead struct {
	Node string `json:"node"`
	// Ready is set while the proxy is connected and has said what to relay.
	Ready bool `json:"ready"`
	// Full is set while new connections go straight to endpoints, as the relay has as many as it may, or too little
	// time or memory for more.
	Full bool `json:"full"`
	// Behind is set while new flows of UDP go straight to endpoints, as the relay takes them in too slowly.
	Behind bool `json:"behind"`
	// Refused counts the connections that were reset at once.
	Refused uint64 `json:"refused"`
}

// relayCollector shows what the relay has counted as metrics.
type relayCollector struct {
	counts  func() []relay.Counted
	refused func() uint64
	ready   func() bool

	full   func() bool
	behind func() bool
	noPort func() uint64
	lost   func() (sent, received uint64)

	open, connections, tries, retried, failed, failedHere, limited, clientLimited, expired, bytes, reset, connected,
	isFull, isBehind, withoutPort, lostDatagrams *prometheus.Desc
}

func newRelayCollector(r *relay.Relay) *relayCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("landfall_relay_"+name, help, labels, nil)
	}
	const of = " The labels namespace and service are empty for the sum of the Services beyond 500, for which " +
		"namespaces take turns."
	perService := func(name, help string, more ...string) *prometheus.Desc {
		return desc(name, help+of, append([]string{"namespace", "service", "protocol"}, more...)...)
	}
	return &relayCollector{
		counts: r.Counts, refused: r.Refused, ready: func() bool { return r.Ready() == nil }, full: r.Full,
		behind: r.Behind, noPort: r.NoPort, lost: r.Lost,
		open: perService("connections_open", "Open connections, or flows of UDP, of a Service."),
		connections: perService("connections_total", "Connections that were accepted, and flows of UDP that came, for a "+
			"Service."),
		tries: perService("tries_total", "Backends that were tried for a Service."),
		retried: perService("retried_total",
			"Connections and flows that got a backend after another had failed or was late."),
		failed: perService("failed_total", "Connections that got no backend and were reset, and flows that got none."),
		failedHere: perService("node_failures_total", "Connections to backends of a Service that failed on the node itself, "+
			"as without a free file descriptor or source port; they do not count against the backend."),
		clientLimited: perService("client_limited_total", "Connections beyond the limit of one client of a Service, which "+
			"were reset, and flows that ended for others of their client."),
		expired: perService("expired_total", "Connections that came with a TTL (IPv6: hop limit) of 1 and were reset, and "+
			"flows that did and ended, as when relays pass them to each other in a circle."),
		isFull: desc("full",
			"1 while the relay has about as many connections as it may, or too little time or memory for more, and new ones go "+
				"straight to endpoints, else 0."),
		isBehind: desc("udp_behind", "1 while the relay takes in new flows of UDP more slowly than they come, and those go "+
			"straight to endpoints, else 0."),
		limited: perService("limited_total", "Connections beyond the limit of their Service or namespace, or that held most "+
			"of its when memory was scarce, which were reset, and flows that ended for others."),
		bytes: perService("bytes_total", "Bytes of connections and flows, as they are passed on, by direction: sent or "+
			"received by the client.", "direction"),
		reset: desc("refused_total", "Connections that were reset, and datagrams that were dropped, at once: beyond a "+
			"limit, to the port of the relay itself, or to what is not relayed."),
		withoutPort: desc("udp_without_port_total", "Flows of UDP that ended as the node had no free port for them "+
			"(net.ipv4.ip_local_port_range)."),
		lostDatagrams: desc("udp_lost_total", "Datagrams of UDP that the kernel dropped at the relay's sockets, which had "+
			"no room, or as their checksum is wrong, by direction: sent or received by the client. Those for the client that "+
			"wait at a flow's socket are counted when the flow ends.", "direction"),
		connected: desc("connected", "1 while the proxy is connected and has said what to relay, else 0."),
	}
}

// Describe implements prometheus.Collector.
func (c *relayCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.open, c.connections, c.tries, c.retried, c.failed, c.limited, c.bytes, c.reset,
		c.connected, c.failedHere, c.clientLimited, c.expired, c.isFull, c.isBehind, c.withoutPort, c.lostDatagrams} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *relayCollector) Collect(ch chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for _, s := range c.counts() {
		labels := []string{s.Service.Namespace, s.Service.Name, string(s.Protocol)}
		ch <- prometheus.MustNewConstMetric(c.open, prometheus.GaugeValue, float64(s.Open), labels...)
		counter(c.connections, s.Connections, labels...)
		counter(c.tries, s.Tries, labels...)
		counter(c.retried, s.Retried, labels...)
		counter(c.failed, s.Failures, labels...)
		counter(c.failedHere, s.NodeFailures, labels...)
		counter(c.limited, s.Refused, labels...)
		counter(c.clientLimited, s.ClientRefused, labels...)
		counter(c.expired, s.Expired, labels...)
		counter(c.bytes, s.Sent, append(labels, "sent")...)
		counter(c.bytes, s.Received, append(labels, "received")...)
	}
	counter(c.reset, c.refused())
	counter(c.withoutPort, c.noPort())
	sent, received := c.lost()
	counter(c.lostDatagrams, sent, "sent")
	counter(c.lostDatagrams, received, "received")
	flag := func(d *prometheus.Desc, is bool) {
		v := 0.0
		if is {
			v = 1
		}
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v)
	}
	flag(c.connected, c.ready())
	flag(c.isFull, c.full())
	flag(c.isBehind, c.behind())
}

// relayRules shows what the rules have counted of the relay's UDP as metrics of the proxy.
type relayRules struct {
	log    *slog.Logger
	counts func() (nftables.RelayCounts, error)

	mu       sync.Mutex // counts has one socket
	failures loop.Failures
}

var (
	relayStraight = prometheus.NewDesc("landfall_proxy_relay_udp_straight_total",
		"Flows of UDP to relayed frontends that went straight to endpoints, as they were beyond --relay-udp-rate.", nil, nil)
	relayUnasked = prometheus.NewDesc("landfall_proxy_relay_udp_dropped_total",
		"Datagrams that were dropped as they came to the relay's port, and to no relayed frontend.", nil, nil)
)

// Describe implements prometheus.Collector.
func (r *relayRules) Describe(ch chan<- *prometheus.Desc) { ch <- relayStraight; ch <- relayUnasked }

// Collect implements prometheus.Collector.
func (r *relayRules) Collect(ch chan<- prometheus.Metric) {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts, err := r.counts()
	if r.failures.Log(r.log, "cannot count what goes to the relay", "", err); err != nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(relayStraight, prometheus.CounterValue, float64(counts.Straight))
	ch <- prometheus.MustNewConstMetric(relayUnasked, prometheus.CounterValue, float64(counts.Dropped))
}

// isRelay reports whether the arguments of the process are those of the relay, and returns them without
// the one that says so.
func isRelay(args []string) (rest []string, ok bool) {
	if len(args) < 2 || args[1] != relayArgument {
		return args, false
	}
	return slices.Concat(args[:1], args[2:]), true
}

// relayed returns what the relay has to know of the named Services, before the rules lead there and until
// they have stopped.
func relayed[V any](p *proxy, keys map[lb.Key]V) map[lb.Key]*plan.Relayed {
	tables := make(map[lb.Key]*plan.Relayed, len(keys))
	for key := range keys {
		r := p.records[key]
		tables[key] = plan.RelayTable(r.planned, r.applied)
	}
	return tables
}

// relayAddresses returns the address of each family by which the rules reach the relay: the Node's own,
// if an interface has it.
func (f facts) relayAddresses(families []lb.Family) map[lb.Family]netip.Addr {
	addresses := map[lb.Family]netip.Addr{}
	for _, addr := range f.node.Addresses {
		family := lb.FamilyOf(addr)
		if _, ok := addresses[family]; !ok && slices.Contains(families, family) && slices.Contains(f.own, addr) {
			addresses[family] = addr
		}
	}
	return addresses
}

// relayTo returns where the relay accepts what the rules lead to it.
func (f facts) relayTo(ports map[lb.Family]uint16) map[lb.Family]netip.AddrPort {
	to := map[lb.Family]netip.AddrPort{}
	for family, addr := range f.relayAddresses(allFamilies[:]) {
		if port := ports[family]; port != 0 {
			to[family] = netip.AddrPortFrom(addr, port)
		}
	}
	return to
}

// nodePorts returns the addresses at which the rules serve node ports: in families in which these are not limited,
// all that the node has.
func (f facts) nodePorts() (all []netip.Addr) {
	addresses := nftables.WithAddresses(f.config, f.own).NodePortAddresses
	for _, family := range allFamilies {
		all = append(all, addresses[family]...)
	}
	return all
}

// relayState describes the relay for the status of the proxy.
type relayState struct {
	relayfeed.State
	Message string `json:"message,omitempty"`
}

func describeRelay(st relayfeed.State) *relayState {
	s := &relayState{State: st}
	switch {
	case st.Full:
		s.Message = fmt.Sprintf("the relay has as many connections as it may (%d open), or too little time or memory "+
			"for more: new ones go straight to endpoints, until it has room again", st.Connections)
	case st.OtherRelease:
		s.Message = fmt.Sprintf("the relay is of another release than the proxy: connections to %d Services go straight to "+
			"endpoints until both are of one", st.Services)
	case st.Connected && len(st.Leads) == 0 && len(st.LeadsUDP) == 0:
		s.Message = fmt.Sprintf("the rules do not lead to the relay, as the node's findings say, or as it has no address "+
			"for that: connections to %d Services go straight to endpoints", st.Services)
	case len(st.Leads) == 0 && len(st.LeadsUDP) == 0:
		s.Message = fmt.Sprintf("no relay is connected, or it is not ready: connections to %d Services go straight to "+
			"endpoints", st.Services)
	}
	return s
}
