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
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
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
	Kubeconfig string // path; empty means in-cluster
	NodeName   string
	// Args are the arguments other than flags.
	Args   []string
	Stdout io.Writer

	server *server
}

// Handle registers a handler on the metrics address, for status pages.
func (rt *Runtime) Handle(pattern string, handler http.Handler) {
	rt.server.mux.Handle(pattern, handler)
}

// Ready adds a check to /readyz: the program is ready when no check returns an error. The check
// must not block.
func (rt *Runtime) Ready(name string, check func() error) { rt.server.ready.add(name, check) }

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
	flags := pflag.NewFlagSet(p.Name, pflag.ContinueOnError)
	flags.SortFlags = false
	flags.SetOutput(io.Discard)
	flags.Usage = func() { p.printUsage(stdout, flags) }
	common := p.addCommon(flags, env)
	if p.Flags != nil {
		p.Flags(flags)
	}
	if err := parse(flags, args, env); err != nil {
		return err
	}
	if common.version {
		fmt.Fprintf(stdout, "%s %s (%s)\n", p.Name, BuildVersion(), runtime.Version())
		return nil
	}
	level, err := parseLevel(common.logLevel)
	if err != nil {
		return err
	}
	rt := &Runtime{
		Log:        slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level})),
		Metrics:    newRegistry(),
		Kubeconfig: common.kubeconfig,
		NodeName:   common.nodeName,
		Args:       flags.Args(),
		Stdout:     stdout,
	}
	rt.server = newServer(rt.Metrics)
	return p.serve(rt, common.metricsBindAddress)
}

// serve runs the program and its metrics server until one fails, the program returns or the process
// receives a signal. A second signal kills the process.
func (p Program) serve(rt *Runtime, metricsBindAddress string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	listen, err := listenMetrics(metricsBindAddress)
	if err != nil {
		return err
	}
	serverCtx, stopServer := context.WithCancel(context.WithoutCancel(ctx))
	group, groupCtx := errgroup.WithContext(ctx)
	if listen != nil {
		group.Go(func() error { return rt.server.run(serverCtx, listen) })
	}
	group.Go(func() error {
		defer stopServer() // serve metrics and health until the work has ended
		return p.Run(groupCtx, rt)
	})
	return group.Wait()
}

type commonFlags struct {
	kubeconfig, nodeName, logLevel, metricsBindAddress string
	version                                            bool
}

func (p Program) addCommon(flags *pflag.FlagSet, env environment) *commonFlags {
	var c commonFlags
	host, _ := os.Hostname()
	node, _ := env("NODE_NAME")
	flags.StringVar(&c.kubeconfig, "kubeconfig", "",
		"kubeconfig file for the API server (default: the pod's service account)")
	flags.StringVar(&c.nodeName, "node-name", cmp.Or(node, host),
		"name of this node's Node object (default: $NODE_NAME, else the host name)")
	flags.StringVar(&c.logLevel, "log-level", "info", "lowest level to log: debug, info, warn or error")
	flags.StringVar(&c.metricsBindAddress, "metrics-bind-address", p.MetricsBindAddress,
		`address:port of /metrics, /healthz, /readyz and status pages; "" or 0 switches them off`)
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
