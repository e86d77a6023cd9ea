// Command landfallctl shows what Landfall does in a cluster, and what is wrong. As kubectl-landfall
// it is a plugin of kubectl.
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
  landfallctl status    pools, addresses, who announces them, and what is wrong; exits with 1 when something is
  landfallctl migrate metallb [-f FILE]...
                        Landfall's equivalent of MetalLB's objects, in the cluster or in files, and what has none
  landfallctl import NAME -f FILE
                        an IPAddressPool for a list: on each line an address, CIDR or range, and NAMESPACE/SERVICE to reserve it

Without --kubeconfig it uses the service account of the pod it runs in, else $KUBECONFIG, else ~/.kube/config.`

type options struct {
	class   string
	timeout time.Duration
	files   []string
}

func main() {
	var o options
	os.Exit(ops.Main(ops.Program{
		Name:    "landfallctl",
		Summary: "shows what Landfall does in a cluster, and what is wrong.",
		Usage:   usage,
		Flags: func(f *pflag.FlagSet) {
			f.StringVar(&o.class, "load-balancer-class", "",
				"the class that the controller serves (default: Services without a class)")
			f.StringArrayVarP(&o.files, "filename", "f", nil, "file to read for migrate and import; - for the standard input")
			f.DurationVar(&o.timeout, "timeout", 15*time.Second, "how long to wait for the API server")
		},
		Run: func(ctx context.Context, rt *ops.Runtime) error { return run(ctx, rt, o) },
	}))
}

func run(ctx context.Context, rt *ops.Runtime, o options) error {
	if len(rt.Args) == 0 {
		return ops.Usagef("say what to do: landfallctl status, migrate or import")
	}
	switch rt.Args[0] {
	case "status":
		return runStatus(ctx, rt, o)
	case "migrate":
		return runMigrate(ctx, rt, o)
	case "import":
		return runImport(rt, o)
	}
	return ops.Usagef("%q is no command of landfallctl; there are: status, migrate, import", rt.Args[0])
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
		return fmt.Errorf("%d of what should be well is not", n)
	}
	return nil
}

// kubeconfig returns the path to use: what was asked for, else what kubectl would use outside of a
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
