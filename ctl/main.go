// Command landfallctl shows what Landfall does in a cluster and which problems it has. Installed as
// kubectl-landfall it is a kubectl plugin.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/ops"
)

const usage = `Usage:
  landfallctl status    Show pools, addresses, the node that announces each address, and problems.
                        Exits with 1 if there is a problem.
  landfallctl migrate metallb [-f FILE]...
                        Print Landfall's equivalent of MetalLB's objects, which it reads from the cluster or from files.
                        Comments at the top list what has no equivalent.
  landfallctl import NAME -f FILE
                        Print an IPAddressPool NAME for a list. Each line has an address, CIDR or range, and optionally
                        NAMESPACE/SERVICE to reserve it for.

Without --kubeconfig, landfallctl uses the service account of its pod, else $KUBECONFIG, else ~/.kube/config.`

type options struct {
	class   string
	timeout time.Duration
	files   []string
}

func main() {
	var o options
	os.Exit(ops.Main(ops.Program{
		Name:    "landfallctl",
		Summary: "shows what Landfall does in a cluster and which problems it has",
		Usage:   usage,
		Flags: func(f *pflag.FlagSet) {
			f.StringVar(&o.class, "load-balancer-class", "",
				"spec.loadBalancerClass of the Services to show, as Landfall is configured (default: Services without one)")
			f.StringArrayVarP(&o.files, "filename", "f", nil, "file that migrate or import reads; - reads standard input")
			f.DurationVar(&o.timeout, "timeout", 15*time.Second, "how long to wait for an answer of the API server")
		},
		Run: func(ctx context.Context, rt *ops.Runtime) error { return run(ctx, rt, o) },
	}))
}

func run(ctx context.Context, rt *ops.Runtime, o options) error {
	if len(rt.Args) == 0 {
		return ops.Usagef("no command given; commands are status, migrate and import")
	}
	switch rt.Args[0] {
	case "status":
		return runStatus(ctx, rt, o)
	case "migrate":
		return runMigrate(ctx, rt, o)
	case "import":
		return runImport(rt, o)
	}
	return ops.Usagef("unknown command %q; commands are status, migrate and import", rt.Args[0])
}

func runStatus(ctx context.Context, rt *ops.Runtime, o options) error {
	if len(rt.Args) > 1 {
		return ops.Usagef("status takes no arguments, not %q", rt.Args[1])
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: kubeconfig(rt.Kubeconfig), UserAgent: "landfallctl", Log: rt.Log})
	if err != nil {
		return err
	}
	w, err := read(ctx, client, o)
	if err != nil {
		return err
	}
	r := newReport(w)
	if err := r.print(rt.Stdout); err != nil {
		return err
	}
	if n := len(r.problems); n > 0 {
		return fmt.Errorf("problems found: %d", n)
	}
	return nil
}

// kubeconfig returns the path to use: the one asked for, else the one that kubectl uses outside a
// pod.
func kubeconfig(asked string) string {
	if asked != "" || os.Getenv("KUBERNETES_SERVICE_HOST") != "" {
		return asked
	}
	if path := os.Getenv("KUBECONFIG"); path != "" {
		return path
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	path := filepath.Join(home, ".kube", "config")
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}
