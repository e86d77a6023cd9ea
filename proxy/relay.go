package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relay"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// relayArgument is the first argument of the relay, a process of its own beside the proxy.
const relayArgument = "relay"

const relayName = "landfall-relay"

// relayUsage is what --help of the relay says.
const relayUsage = `The argument status prints the state of the running relay as JSON.`

// relayFlags are the relay's.
type relayFlags struct {
	options relay.Options
	port    int
}

func (f *relayFlags) add(set *pflag.FlagSet) {
	o := &f.options
	set.StringVar(&o.Socket, "relay-socket", wire.Socket,
		"Unix socket of the node's proxy, which says what to relay and has the rules lead here")
	set.IntVar(&f.port, "port", 7484,
		"TCP port that accepts what the rules lead here, at all addresses of the node; connections to the port itself are "+
			"reset; 0 takes any free one")
	set.IntVar(&o.Tries, "tries", 3, "how many backends a connection tries at most")
	set.DurationVar(&o.TryAfter, "try-after", 250*time.Millisecond,
		"after which time without an answer of a backend the connection tries another as well; the first answer counts")
	set.DurationVar(&o.ConnectTimeout, "connect-timeout", 10*time.Second,
		"how long a connection waits for an answer of all backends that it tries; then it is reset")
	set.DurationVar(&o.Idle, "idle-timeout", time.Hour,
		"how long both ends of a connection may be silent before it is reset")
	set.DurationVar(&o.Drain, "drain-time", 20*time.Second,
		"how long open connections may go on when the relay ends; then they are reset")
	set.IntVar(&o.Limit, "connections", 10_000,
		"how many connections the node relays at once, as far as the file descriptors suffice, one for each and one for "+
			"each try; the rules send more straight to endpoints")
	set.IntVar(&o.ServiceLimit, "service-connections", 5000,
		"how many of them one Service may have, at most half of them all; the relay resets more")
	set.IntVar(&o.ClientLimit, "client-connections", 1000,
		"how many of those one client may have, an IPv4 address or an IPv6 network of 64 bits; the relay resets more")
	set.BoolVar(&o.AccessLog, "access-log", false,
		"log each connection at its end: client, Service, backends that were tried, bytes, and why it was reset")
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
	case o.Limit < 1 || o.ServiceLimit < 1 || o.ClientLimit < 1:
		return ops.Usagef("--connections, --service-connections and --client-connections: %d, %d and %d are not all above 0",
			o.Limit, o.ServiceLimit, o.ClientLimit)
	}
	o.Port = uint16(f.port)
	return ops.NotNegative("drain-time", o.Drain)
}

func relayProgram(f *relayFlags) ops.Program {
	return ops.Program{
		Name:    relayName,
		Summary: "ends connections to Services on this node, and tries another backend when one does not answer",
		Usage:   relayUsage, MetricsBindAddress: "localhost:7483", StatusSocket: "/run/landfall/relay-status.sock",
		Flags: f.add, Run: f.run,
	}
}

func (f *relayFlags) run(ctx context.Context, rt *ops.Runtime) error {
	if err := f.check(); err != nil {
		return err
	}
	rt.Ready("relay", func() error { return nil }) // the rules do without it, so no pod waits for it
	f.options.Limit = fitting(f.options.Limit, f.options.Tries, rt.Log)
	f.options.ServiceLimit = min(f.options.ServiceLimit, max(f.options.Limit/2, 1))
	f.options.ClientLimit = min(f.options.ClientLimit, max(f.options.ServiceLimit/2, 1))
	// Only who reads metrics with --metrics-secure has the relay ask the API server.
	if client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, Servers: rt.APIServers,
		UserAgent: relayName, Log: rt.Log}); err == nil {
		rt.ReviewMetrics(client.ReviewMetrics)
	}
	r := f.open(ctx, rt.Log)
	if r == nil {
		return nil
	}
	rt.Metrics.MustRegister(newRelayCollector(r))
	rt.Status(func(w io.Writer, _ string) error {
		head := relayHead{Node: rt.NodeName, Ready: r.Ready() == nil, Full: r.Full(), Refused: r.Refused()}
		return ops.WriteStatus(w, head, "services", slices.Values(r.Counts()))
	})
	return r.Run(ctx)
}

// open returns a relay that is listening; nil if ctx ends before the port is free. A relay that is not
// there harms nobody, so it waits and does not fail, which would count as a failure of the proxy's pod.
func (f *relayFlags) open(ctx context.Context, log *slog.Logger) (r *relay.Relay) {
	var failures loop.Failures
	backoff := loop.Backoff{Min: time.Second, Max: time.Second}
	ctx, opened := context.WithCancel(ctx)
	defer opened()
	_ = loop.Retry(ctx, backoff, func(ctx context.Context) bool {
		now, err := relay.New(f.options, relay.NewDeps(log))
		if failures.Log(log, "cannot open the relay's port; trying again", "opened the relay's port", err); err == nil {
			r = now
			opened()
		}
		return err == nil
	})
	return r
}

// fitting returns how many connections the process can have with its file descriptors.
func fitting(asked, tries int, log *slog.Logger) int {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return asked
	}
	fit := relay.Limit(asked, tries, limit.Cur)
	if fit < asked {
		log.Warn("the limit of file descriptors allows fewer connections than --connections", "connections", fit,
			"asked", asked, "descriptors", limit.Cur)
	}
	return fit
}

// relayHead is shown ahead of the list "services".
type relayHead struct {
	Node string `json:"node"`
	// Ready is set while the proxy is connected and has said what to relay.
	Ready bool `json:"ready"`
	// Full is set while new connections go straight to endpoints, as the relay has as many as it may.
	Full bool `json:"full"`
	// Refused counts the connections that were reset at once.
	Refused uint64 `json:"refused"`
}

// relayCollector shows what the relay has counted as metrics.
type relayCollector struct {
	counts  func() []relay.Counted
	refused func() uint64
	ready   func() bool

	full func() bool

	open, connections, tries, retried, failed, failedHere, limited, clientLimited, bytes, reset, connected,
	isFull *prometheus.Desc
}

func newRelayCollector(r *relay.Relay) *relayCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("landfall_relay_"+name, help, labels, nil)
	}
	const of = " The labels are empty for the sum of the Services beyond the first 500."
	return &relayCollector{
		counts: r.Counts, refused: r.Refused, ready: func() bool { return r.Ready() == nil }, full: r.Full,
		open: desc("connections_open", "Open connections of a Service."+of, "namespace", "service"),
		connections: desc("connections_total", "Connections that were accepted for a Service."+of, "namespace",
			"service"),
		tries: desc("tries_total", "Connections to backends that were begun for a Service."+of, "namespace", "service"),
		retried: desc("retried_total",
			"Connections that got a backend after another had failed or was late."+of, "namespace", "service"),
		failed: desc("failed_total", "Connections that got no backend and were reset."+of, "namespace", "service"),
		failedHere: desc("node_failures_total", "Connections to backends of a Service that failed on the node itself, as "+
			"without a free file descriptor or source port; they do not count against the backend."+of, "namespace", "service"),
		clientLimited: desc("client_limited_total", "Connections beyond the limit of one client of a Service, which were "+
			"reset."+of, "namespace", "service"),
		isFull: desc("full",
			"1 while the relay has about as many connections as it may, and new ones go straight to endpoints, else 0."),
		limited: desc("limited_total", "Connections beyond the limit of their Service, which were reset."+of, "namespace",
			"service"),
		bytes: desc("bytes_total", "Bytes of connections that have ended, by direction: sent or received by the client."+of,
			"namespace", "service", "direction"),
		reset: desc("refused_total",
			"Connections that were reset at once: beyond a limit, to the port of the relay itself, or to what is not relayed."),
		connected: desc("connected", "1 while the proxy is connected and has said what to relay, else 0."),
	}
}

// Describe implements prometheus.Collector.
func (c *relayCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.open, c.connections, c.tries, c.retried, c.failed, c.limited, c.bytes, c.reset,
		c.connected, c.failedHere, c.clientLimited, c.isFull} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *relayCollector) Collect(ch chan<- prometheus.Metric) {
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for _, s := range c.counts() {
		namespace, name := s.Service.Namespace, s.Service.Name
		ch <- prometheus.MustNewConstMetric(c.open, prometheus.GaugeValue, float64(s.Open), namespace, name)
		counter(c.connections, s.Connections, namespace, name)
		counter(c.tries, s.Tries, namespace, name)
		counter(c.retried, s.Retried, namespace, name)
		counter(c.failed, s.Failures, namespace, name)
		counter(c.failedHere, s.NodeFailures, namespace, name)
		counter(c.limited, s.Refused, namespace, name)
		counter(c.clientLimited, s.ClientRefused, namespace, name)
		counter(c.bytes, s.Sent, namespace, name, "sent")
		counter(c.bytes, s.Received, namespace, name, "received")
	}
	counter(c.reset, c.refused())
	flag := func(d *prometheus.Desc, is bool) {
		v := 0.0
		if is {
			v = 1
		}
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v)
	}
	flag(c.connected, c.ready())
	flag(c.isFull, c.full())
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

// nodePorts returns the addresses at which the rules serve node ports.
func (f facts) nodePorts() (all []netip.Addr) {
	for _, family := range allFamilies {
		all = append(all, f.config.NodePortAddresses[family]...)
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
		s.Message = fmt.Sprintf("the relay has as many connections as it may (%d): new ones go straight to endpoints, "+
			"until it has room again", st.Connections)
	case st.Connected && len(st.Leads) == 0:
		s.Message = fmt.Sprintf("the rules do not lead to the relay, as the node's findings say, or as it has no address "+
			"for that: connections to %d Services go straight to endpoints", st.Services)
	case len(st.Leads) == 0:
		s.Message = fmt.Sprintf("no relay is connected, or it is not ready: connections to %d Services go straight to "+
			"endpoints", st.Services)
	}
	return s
}
