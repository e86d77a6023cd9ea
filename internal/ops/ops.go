// Package ops holds what all programs share: flags and environment, logs, metrics, health, build
// information and a clean shutdown.
package ops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/otlp"
)

// Version is the version that the linker sets; if it is empty, BuildVersion reports the module's.
var Version string

// Exit codes of a program.
const (
	exitFailed = 1
	exitUsage  = 2
)

// Program describes one of Landfall's binaries.
type Program struct {
	Name    string
	Summary string
	// MetricsBindAddress is the default of --metrics-bind-address; empty serves nothing.
	MetricsBindAddress string
	// StatusSocket is the default of --status-socket; empty if the program has no status.
	StatusSocket string
	// Succeeds reports, as the flags say, whether another process of the program may run before it on the node, and hand
	// over to it: the program then waits for the addresses of metrics that this one has. A program for which it is not
	// nil has the argument ready.
	Succeeds func() bool
	// ProbeSocket says that the program has the flag --probe-socket, and the argument alive.
	ProbeSocket bool
	// Flags registers the program's own flags. It may be nil.
	Flags func(*pflag.FlagSet)
	// Usage is the text of --help between the summary and the flags. It may be empty.
	Usage string
	// Run does the work until ctx ends. SIGTERM and SIGINT end ctx.
	Run func(ctx context.Context, rt *Runtime) error
}

// Runtime holds what Run needs.
type Runtime struct {
	Log        *slog.Logger
	Metrics    *prometheus.Registry
	Kubeconfig string   // path; empty means in-cluster
	APIServers []string // host:port, to try when the configured address does not answer
	NodeName   string
	// Traces takes spans; nil without --otlp-endpoint, which drops them.
	Traces *otlp.Exporter
	// Args are the arguments other than flags.
	Args   []string
	Stdout io.Writer

	stopMetrics func()
	server      *server
}

// Ready adds a check to /readyz: the program is ready when there is a check and none returns an error.
// The check must not block. Whoever reaches the port reads what it returns, but for what is Detailed.
func (rt *Runtime) Ready(name string, check func() error) { rt.server.ready.add(name, check) }

// liveFor is how long a loop may be at one thing without progress before /healthz fails. The
// longest that is known to be legitimate is a command of iptables that waits for the lock of
// another process and is killed after a minute; everything else has bounds of seconds. Twice that
// leaves room for a busy machine, and the kubelet asks for a minute more before it restarts the
// container.
const liveFor = 2 * time.Minute

// Live has /healthz fail while a loop hangs: busy returns for how long it has been at one thing. It
// must not block.
func (rt *Runtime) Live(loop string, busy func() time.Duration) {
	rt.server.live.add(loop, func() error {
		if d := busy(); d >= liveFor {
			return fmt.Errorf("hangs: no progress for %s", d.Round(time.Second))
		}
		return nil
	})
}

// StopMetrics closes the addresses of metrics, which the program's successor on the node waits for.
func (rt *Runtime) StopMetrics() { rt.stopMetrics() }

// ReviewMetrics has review decide who reads metrics, where --metrics-secure is set. Until it is
// called, nobody does. The more nodes the program runs on, the less often it asks about unknown tokens; nodes returns 0
// while that is not known, and is nil for a program that runs on few.
func (rt *Runtime) ReviewMetrics(review Review, nodes func() int) {
	if rt.server.gatekeeper != nil {
		rt.server.gatekeeper.use(review, nodes)
	}
}

// Serve has the metrics server answer GET requests below a path with handler, for those whom review lets. It is wrong
// usage without --metrics-secure.
func (rt *Runtime) Serve(flag string, what Guarded, handler http.Handler, review Review) error {
	if rt.server.gatekeeper == nil {
		return Usagef("--%s needs --metrics-secure, by which the API server says who may see %s", flag, what.Name)
	}
	guard := newGatekeeper(what, handler)
	guard.use(review, nil)
	rt.server.tcp.Handle("GET "+what.URL+"/", guard)
	return nil
}

// Main runs the program with the arguments of the process and returns its exit code.
func Main(p Program) int {
	return p.main(os.Args[1:], os.LookupEnv, os.Stdout, os.Stderr)
}

// environment looks up a variable.
type environment func(name string) (string, bool)

// usageError is a mistake in flags, environment or arguments.
type usageError struct{ error }

// Usagef returns an error that ends the program with the exit code for wrong usage.
func Usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func (p Program) main(args []string, env environment, stdout, stderr io.Writer) int {
	err := p.run(args, env, stdout, stderr)
	switch usage := (usageError{}); {
	case err == nil, errors.Is(err, pflag.ErrHelp):
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "%s: %v (try --help)\n", p.Name, err)
		return exitUsage
	default:
		fmt.Fprintf(stderr, "%s: %v\n", p.Name, err)
		return exitFailed
	}
}

func (p Program) run(args []string, env environment, stdout, stderr io.Writer) error {
	flags, common := p.flags(env)
	flags.SetOutput(io.Discard)
	flags.Usage = func() { p.printUsage(stdout, flags) }
	if err := parse(flags, args, env); err != nil {
		return err
	}
	if common.version {
		fmt.Fprintf(stdout, "%s %s (%s)\n", p.Name, BuildVersion(), runtime.Version())
		return nil
	}
	log, err := newLog(stderr, common.logLevel, common.logFormat)
	if err != nil {
		return err
	}
	rt := &Runtime{
		Log:        log,
		Metrics:    newRegistry(),
		Kubeconfig: common.kubeconfig,
		APIServers: common.apiServers,
		NodeName:   common.nodeName,
		Args:       flags.Args(),
		Stdout:     stdout,
	}
	if p.StatusSocket != "" && slices.Equal(rt.Args, []string{statusArgument}) {
		return printStatus(context.Background(), common.statusSocket, common.statusOnly, stdout)
	}
	if p.Succeeds != nil && slices.Equal(rt.Args, []string{readyArgument}) {
		return printReady(context.Background(), common.statusSocket, stdout)
	}
	if p.ProbeSocket && slices.Equal(rt.Args, []string{aliveArgument}) {
		return printAlive(context.Background(), common.probeSocket, stdout)
	}
	if common.otlpEndpoint != "" {
		if rt.Traces, err = otlp.New(otlp.Options{Endpoint: common.otlpEndpoint, SecretDir: common.otlpSecretDir,
			Program: p.Name, Version: BuildVersion(), Node: rt.NodeName, Log: rt.Log}); err != nil {
			return Usagef("--otlp-endpoint: %w", err)
		}
		rt.Metrics.MustRegister(rt.Traces)
	}
	rt.server = newServer(rt.Log, rt.Metrics)
	return p.serve(rt, common, env)
}

// FlagSet returns the program's flags with their defaults.
func (p Program) FlagSet() *pflag.FlagSet {
	flags, _ := p.flags(func(string) (string, bool) { return "", false })
	return flags
}

func (p Program) flags(env environment) (*pflag.FlagSet, *commonFlags) {
	flags := pflag.NewFlagSet(p.Name, pflag.ContinueOnError)
	flags.SortFlags = false
	common := p.addCommon(flags, env)
	if p.Flags != nil {
		p.Flags(flags)
	}
	return flags, common
}

// serve runs the program and its servers until one fails, the program returns or the process
// receives a signal. A second signal kills the process.
func (p Program) serve(rt *Runtime, common *commonFlags, env environment) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	profiles, err := common.listenPprof()
	if err != nil {
		return err
	}
	addresses, err := common.listen(rt, env)
	if err != nil {
		return err
	}
	listeners, err := openAll(addresses)
	if err != nil && (p.Succeeds == nil || !p.Succeeds() || !errors.Is(err, syscall.EADDRINUSE)) {
		return err
	}
	serverCtx, stopServer := context.WithCancel(context.WithoutCancel(ctx))
	group, groupCtx := errgroup.WithContext(ctx)
	metricsCtx, stopMetrics := context.WithCancel(serverCtx)
	rt.stopMetrics = stopMetrics
	group.Go(func() error {
		if err != nil {
			listeners = openLater(metricsCtx, rt.Log, addresses)
		}
		return rt.server.run(metricsCtx, listeners)
	})
	sockets := map[string]string{statusArgument: common.statusSocket, aliveArgument: common.probeSocket}
	for argument, socket := range sockets {
		if socket != "" {
			group.Go(func() error { rt.server.runLocal(serverCtx, socket, argument); return nil })
		}
	}
	if rt.Traces.On() {
		group.Go(func() error { return rt.Traces.Run(serverCtx) })
	}
	if profiles != nil {
		group.Go(func() error { return rt.server.runPprof(serverCtx, profiles) })
	}
	group.Go(func() error {
		defer stopServer() // serve metrics and health until the work has ended
		return p.Run(groupCtx, rt)
	})
	return group.Wait()
}

// listen returns the addresses of the metrics server, and prepares what it needs to be secure.
func (c *commonFlags) listen(rt *Runtime, env environment) ([]string, error) {
	addresses, err := bindAddresses(c.metricsBindAddress, env)
	if err != nil {
		return nil, err
	}
	if !c.metricsSecure && c.certFile+c.keyFile != "" {
		return nil, Usagef("--metrics-cert-file and --metrics-key-file need --metrics-secure")
	}
	if c.metricsSecure {
		var hosts []string
		for _, address := range addresses {
			host, _, _ := net.SplitHostPort(address)
			hosts = append(hosts, host)
		}
		certificate, err := newCertificate(rt.Log, c.certFile, c.keyFile, hosts)
		if err != nil {
			return nil, err
		}
		rt.server.secure(certificate)
	}
	return addresses, nil
}

type commonFlags struct {
	kubeconfig, nodeName, logLevel, logFormat, metricsBindAddress string
	statusSocket, statusOnly, certFile, keyFile, pprofAddress     string
	otlpEndpoint, otlpSecretDir, probeSocket                      string
	apiServers                                                    []string
	version, metricsSecure                                        bool
}

func (p Program) addCommon(flags *pflag.FlagSet, env environment) *commonFlags {
	var c commonFlags
	host, _ := os.Hostname()
	node, _ := env("NODE_NAME")
	flags.StringVar(&c.kubeconfig, "kubeconfig", "",
		"kubeconfig file for the API server (default: the pod's service account)")
	flags.StringSliceVar(&c.apiServers, "api-servers", nil,
		"host:port of API servers, with commas, to try when the configured address does not answer, as that of the "+
			"Service default/kubernetes while no proxy runs")
	flags.StringVar(&c.nodeName, "node-name", cmp.Or(node, host),
		"name of this node's Node object (default: $NODE_NAME, else the host name)")
	flags.StringVar(&c.logLevel, "log-level", "info", "lowest level to log: debug, info, warn or error")
	flags.StringVar(&c.logFormat, "log-format", "text", "text (key=value) or json (one object on each line)")
	flags.StringVar(&c.metricsBindAddress, "metrics-bind-address", p.MetricsBindAddress,
		"address:port of /metrics, /healthz and /readyz, or several with commas; localhost stands for 127.0.0.1, node for "+
			`$NODE_IP, and no address for all; "" or 0 switches them off`)
	flags.BoolVar(&c.metricsSecure, "metrics-secure", false,
		"serve TLS, and /metrics only to users whom the API server lets get the nonResourceURL /metrics; /healthz and "+
			"/readyz need no token")
	flags.StringVar(&c.certFile, "metrics-cert-file", "",
		"file with the certificate for --metrics-secure, read again when it changes (default: a self-signed one)")
	flags.StringVar(&c.keyFile, "metrics-key-file", "", "file with the key for --metrics-cert-file")
	if p.StatusSocket != "" {
		flags.StringVar(&c.statusSocket, "status-socket", p.StatusSocket,
			`Unix socket of the status, for root only; the argument status prints it; "" switches it off`)
		flags.StringVar(&c.statusOnly, "status-only", "",
			"what of its list the argument status prints: VIPs, with commas, or the namespace/name of a Service; - for "+
				"nothing; connections for counts of those to VIPs (proxy); metrics for the metrics (default: all)")
	}
	if p.ProbeSocket {
		flags.StringVar(&c.probeSocket, "probe-socket", "",
			"Unix socket on which the argument alive, with the same flag, asks whether the running program hangs: clients and "+
				"processes of the node that flood its port of metrics cannot lock out that probe (default: none)")
	}
	flags.StringVar(&c.pprofAddress, "pprof-address", "",
		"loopback address:port that serves Go's profiles below /debug/pprof/ to every process of the node, such as "+
			"localhost:6060 (default: none)")
	flags.StringVar(&c.otlpEndpoint, "otlp-endpoint", "",
		"URL of an OpenTelemetry collector (OTLP over HTTP), such as http://collector:4318, to send traces of Services to "+
			"(default: none)")
	flags.StringVar(&c.otlpSecretDir, "otlp-secret-dir", "",
		"directory with what that collector asks for, as files of a Secret: ca.crt, the authorities of its certificate, and "+
			"headers, a line such as \"Authorization: Bearer TOKEN\" each (default: none)")
	flags.BoolVar(&c.version, "version", false, "print the version and exit")
	return &c
}

// parse sets flags from the arguments, and flags without an argument from the environment.
func parse(flags *pflag.FlagSet, args []string, env environment) error {
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return usageError{err}
	}
	var failed error
	flags.VisitAll(func(f *pflag.Flag) {
		name := EnvName(f.Name)
		value, ok := env(name)
		if f.Changed || !ok || failed != nil {
			return
		}
		if err := flags.Set(f.Name, value); err != nil {
			failed = Usagef("environment variable %s: %w", name, err)
		}
	})
	return failed
}

// EnvName returns the name of the environment variable for a flag: LANDFALL_LOG_LEVEL for
// --log-level.
func EnvName(flag string) string {
	return "LANDFALL_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

func newLog(w io.Writer, level, format string) (*slog.Logger, error) {
	least, err := parseLevel(level)
	if err != nil {
		return nil, err
	}
	options := &slog.HandlerOptions{Level: least}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, Usagef("--log-format: %q is neither text nor json", format)
}

func parseLevel(s string) (slog.Level, error) {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if strings.EqualFold(s, level.String()) {
			return level, nil
		}
	}
	return 0, Usagef("--log-level: %q is none of debug, info, warn, error", s)
}

func (p Program) printUsage(w io.Writer, flags *pflag.FlagSet) {
	fmt.Fprintf(w, "%s %s\n\n", p.Name, p.Summary)
	if p.Usage != "" {
		fmt.Fprintf(w, "%s\n\n", p.Usage)
	}
	fmt.Fprintf(w, "Flags (each also as an environment variable: --log-level is %s):\n%s", EnvName("log-level"),
		flags.FlagUsagesWrapped(120))
}

// BuildVersion returns the version that the linker set, else the version in the module's build
// information.
func BuildVersion() string {
	if Version != "" {
		return Version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
