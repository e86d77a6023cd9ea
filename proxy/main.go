// landfall-proxy programs this node's kernel to forward connections to Services, and reports what
// the kernel delivers.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

const name = "landfall-proxy"

// reasonHealthPort is the Event that kube-proxy has for a health port that cannot be opened.
const reasonHealthPort lb.Reason = "FailedToStartServiceHealthcheck"

func main() {
	if args, ok := isRelay(os.Args); ok {
		os.Args = args
		os.Exit(ops.Main(relayProgram(&relayFlags{})))
	}
	if known, err := look(os.Args[1:], os.Stdout); known {
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
		return
	}
	var f flags
	metrics, statusSocket := "localhost:7482", "/run/landfall/proxy.sock"
	if slices.Contains(os.Args, "cleanup") || slices.Contains(os.Args, "--cleanup") {
		metrics, statusSocket = "", "" // where a proxy may still be running
	}
	os.Exit(ops.Main(ops.Program{
		Name: name,
		Summary: "programs this node's kernel to forward connections to Services, and reports what the kernel " +
			"delivers",
		MetricsBindAddress: metrics,
		StatusSocket:       statusSocket,
		ProbeSocket:        true,
		Flags:              f.add,
		Usage:              lookUsage,
		Run:                f.run,
	}))
}

// gcPercent has garbage collected earlier than usual: most of the memory is held for good, and a
// proxy runs on every node.
const gcPercent = 25

// spare is memory that counts for the collector, and nothing touches, so that the kernel gives none
// for it. Without it a proxy that holds little collects garbage after each 2 MiB, many times a second
// while Services come, and a relay after some hundred connections.
const spare = 16 << 20

// fold is how events are read that keep coming. Some hundred changes at once wait for nothing.
var fold = kube.Fold{Every: 100 * time.Millisecond, Burst: 250}

func (f *flags) run(ctx context.Context, rt *ops.Runtime) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
		defer runtime.KeepAlive(make([]byte, spare))
	}
	if f.cleanup || slices.Equal(rt.Args, []string{"cleanup"}) {
		if err := cleanup(ctx, kernelParameters{f.procSysNet, rt.Log}); err != nil {
			return fmt.Errorf("clean up: %w", err)
		}
		rt.Log.Info("removed all of Landfall's rules from this node")
		return nil
	}
	left, err := f.serve(ctx, rt)
	if err != nil || !left {
		return err
	}
	if err := removeAll(context.WithoutCancel(ctx), rt.Log, func(ctx context.Context) error {
		return cleanup(ctx, kernelParameters{f.procSysNet, rt.Log})
	}); err != nil {
		return fmt.Errorf("remove the rules: %w", err)
	}
	return nil
}

// serve serves until ctx ends, and reports whether the rules have to go then.
func (f *flags) serve(ctx context.Context, rt *ops.Runtime) (left bool, err error) {
	set, err := f.settings()
	if err != nil {
		return false, err
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, Servers: rt.APIServers, UserAgent: name,
		Log: rt.Log, Fold: fold})
	if err != nil {
		return false, err
	}
	set.apiServers = client.Servers()
	kernel, err := open(ctx, f.mode, rt.Log)
	if err != nil {
		return false, err
	}
	defer kernel.close()
	parameters := kernelParameters{f.procSysNet, rt.Log}
	f.prepare(ctx, &set, parameters, kernel)
	a := newAssembly(f, rt, client, set, kernel, parameters)
	defer a.close()
	a.read()
	if err := a.write(); err != nil {
		return false, err
	}
	if err := a.addOptional(); err != nil {
		return false, err
	}
	a.show()
	return live(ctx, a.leaves, a.runs(rt.Live))
}

// ready tells why the proxy does not do its work yet, or nil when it does.
func (p *proxy) ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.waiting != "":
		return fmt.Errorf("waiting for %s", p.waiting)
	case !p.complete:
		return errors.New("the kernel has not confirmed the rules yet")
	}
	return nil
}
