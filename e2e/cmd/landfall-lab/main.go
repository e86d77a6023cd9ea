// Landfall-lab builds a cluster on this machine, as root, from a real API server and network
// namespaces: to look around in, or for the demonstration that "make demo" starts.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/e2e/cluster"
	"github.com/landfall-lb/landfall/e2e/conformance"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
)

const usage = `usage:
  landfall-lab demo [--keep]                show what Landfall does on the cluster of the worked example
  landfall-lab demo-bgp [--keep]            the same behind two routers that speak BGP
  landfall-lab up [--name NAME] [--bare] [--programs DIR]
                                            start that cluster and leave it up; --bare without Landfall
  landfall-lab down [NAME]                  take it down
  landfall-lab cluster [--keep] [--cni bridge|ptp|flannel] [--image FILE]
               [--story helm|guides|migrations|rollouts]
  landfall-lab cluster --story returns [--count N] [--away TIME] [--only WAY]
  landfall-lab cluster --story firsthour [--only REASONS]
                                            start a cluster of real kubelets, and try Landfall:
                                            docs/design/cluster.md
  landfall-lab conformance [--mode nftables|iptables|kube-proxy] [--focus GROUPS] [--specs PATTERN]
               [--nodes N] [ARGUMENTS OF GINKGO]
                                            run upstream's end-to-end suite on such a cluster:
                                            docs/design/conformance.md
  landfall-lab chaos [--seed N] [--minutes M] [--shrink TRIES] [--only EVENTS] [--without GUARD]
               [--keep-going] [--commit NAME]
                                            break a lab at random, and judge it by the contract: docs/chaos.md
  landfall-lab soak [--minutes M] [--report FILE]
                                            churn in a lab, and see that nothing grows: docs/design/soak.md
  landfall-lab list                         list the labs on this machine
  landfall-lab prepare                      fetch and build what tests and labs need on this machine
  landfall-lab prepare vm                   install what "make test-vm" needs: qemu and xz
  landfall-lab tool NAME                    print the path of a tool, built if need be: kube-apiserver, kube-proxy,
                                            helm, controller-gen, golangci-lint, and what a cluster runs
`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
	case err != nil && ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "landfall-lab: interrupted; what was started is gone again")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "landfall-lab:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return flag.ErrHelp
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	name := flags.String("name", "", "")
	bare := flags.Bool("bare", false, "")
	programs := flags.String("programs", "", "")
	cni := flags.String("cni", os.Getenv("CNI"), "")
	image := flags.String("image", "", "")
	mode := flags.String("mode", "nftables", "")
	focus := flags.String("focus", "", "")
	specs := flags.String("specs", "", "")
	nodes := flags.Int("nodes", 0, "")
	version := flags.String("version", "", "")
	story := flags.String("story", "", "")
	count := flags.Int("count", 6, "")
	only := flags.String("only", "", "")
	away := flags.Duration("away", 8*time.Second, "")
	var t trouble
	flags.Uint64Var(&t.seed, "seed", 1, "")
	flags.IntVar(&t.minutes, "minutes", 3, "")
	flags.IntVar(&t.shrink, "shrink", 0, "")
	flags.StringVar(&t.without, "without", "", "")
	flags.StringVar(&t.commit, "commit", "", "")
	flags.BoolVar(&t.onward, "keep-going", false, "")
	report := flags.String("report", "", "")
	keep := flags.Bool("keep", os.Getenv("KEEP") == "1", "")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	self, err := os.Executable() // serves the pods as well
	if err != nil {
		return err
	}
	options := lab.Options{Name: *name, NoAgents: *bare, Programs: *programs, Tool: self}
	switch args[0] {
	case "demo", "demo-bgp":
		return demo(ctx, out, tales[args[0]](), options, *keep)
	case "up":
		return up(ctx, out, options)
	case "cluster":
		return realCluster(ctx, out, cluster.Options{Name: *name, CNI: *cni, Image: *image},
			trial{name: *story, count: *count, away: *away, only: *only, keep: *keep})
	case "conformance":
		return conform(ctx, out, conformance.Options{Mode: *mode, Focus: *focus, Specs: *specs, Args: flags.Args(),
			Landfall: *version, Name: *name, CNI: *cni, Nodes: *nodes})
	case "chaos":
		t.only = *only
		return makeTrouble(ctx, out, t, options)
	case "soak":
		return soak(ctx, out, t.minutes, *report, options)
	case "down":
		return down(ctx, out, flags.Arg(0))
	case "list":
		return list(out)
	case "prepare":
		return prepare(ctx, out, flags.Arg(0))
	case "tool":
		return tool(ctx, out, flags.Arg(0))
	case podserver.Command:
		return servePod(ctx, flags.Arg(0))
	case "help":
		return flag.ErrHelp
	default:
		return fmt.Errorf("no command %q\n%s", args[0], usage)
	}
}

// prepare fetches and builds what is needed and missing, for all but virtual machines or, with what "vm", for these.
func prepare(ctx context.Context, out io.Writer, what string) error {
	switch what {
	case "":
	case "vm":
		return lab.PrepareMachine(ctx, newPrinter(out).progress)
	default:
		return fmt.Errorf("prepare %s: want vm, or nothing", what)
	}
	repo, err := lab.FindRepository(".")
	if err != nil {
		return err
	}
	return lab.Prepare(ctx, repo, newPrinter(out).progress)
}

// tool prints the path of a tool, and what it takes to build it elsewhere.
func tool(ctx context.Context, out io.Writer, name string) error {
	repo, err := lab.FindRepository(".")
	if err != nil {
		return err
	}
	path, err := lab.Tool(ctx, repo, name, newPrinter(os.Stderr).progress)
	if err == nil {
		fmt.Fprintln(out, path)
	}
	return err
}

func servePod(ctx context.Context, config string) error {
	var c podserver.Config
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return err
	}
	return podserver.Run(ctx, c)
}

// up starts the seed cluster and leaves it.
func up(ctx context.Context, out io.Writer, options lab.Options) error {
	p := newPrinter(out)
	options.Progress = p.progress
	cluster := lab.SeedCluster()
	cluster.Services = append(cluster.Services, lab.SeedService())
	l, err := lab.Start(ctx, cluster, options)
	if err != nil {
		return err
	}
	if err := l.Keep(); err != nil {
		return errors.Join(err, l.Close())
	}
	p.section("The lab " + l.Name() + " is up")
	lookAround(p, l)
	return nil
}

// down takes down a lab by name, or the only one that was kept or left over.
func down(ctx context.Context, out io.Writer, name string) error {
	if name == "" {
		labs, err := lab.List()
		if err != nil {
			return err
		}
		labs = slices.DeleteFunc(labs, func(l lab.Info) bool { return l.Alive })
		if len(labs) != 1 {
			return fmt.Errorf("%d labs on this machine that no program uses: say which (landfall-lab list)", len(labs))
		}
		name = labs[0].Name
	}
	if err := lab.Remove(ctx, name); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s is gone\n", name)
	return nil
}

func list(out io.Writer) error {
	labs, err := lab.List()
	for _, l := range labs {
		state := "left over; the next start removes it"
		switch {
		case l.Alive:
			state = "in use by a running program"
		case l.Kept:
			state = "kept"
		}
		fmt.Fprintf(out, "%-10s %s\n", l.Name, state)
	}
	return err
}

// lookAround says how to use a lab that stays.
func lookAround(p *printer, l *lab.Lab) {
	c := l.Cluster()
	rows := [][]string{}
	for _, n := range c.Nodes {
		role := "worker"
		if n.ControlPlane {
			role = "control plane"
		}
		rows = append(rows, []string{n.Name, role, n.Addr.String(), "ip netns exec " + l.Namespace(n.Name) + " bash"})
	}
	for _, pod := range c.Pods {
		rows = append(rows, []string{pod.Name, "pod on " + pod.Node, pod.Addr.String(),
			"ip netns exec " + l.Namespace(pod.Name) + " bash"})
	}
	rows = append(rows,
		[]string{lab.ClientName, "on the nodes' LAN", c.LAN.Client.String(),
			"ip netns exec " + l.Namespace(lab.ClientName) + " bash"},
		[]string{lab.FarClientName, "behind the router", c.Far.Client.String(),
			"ip netns exec " + l.Namespace(lab.FarClientName) + " bash"})
	client, request := lab.ClientName, "172.26.236.180"
	for _, r := range l.Routers() {
		client, request = lab.FarClientName, "203.0.113.180"
		rows = append(rows, []string{r.Name, "router", r.Addr.String(), "vtysh --vty_socket " + r.Dir})
	}
	p.table(rows)
	p.line("")
	onMaster := "ip netns exec " + l.Namespace(c.Nodes[0].Name)
	p.table([][]string{
		{"Status", onMaster + " bin/landfallctl --kubeconfig " + l.Kubeconfig() + " status"},
		{"Objects", onMaster + " kubectl --kubeconfig " + l.Kubeconfig() + " get services,ipaddresspools -A"},
		{"Rules", "ip netns exec " + l.Namespace(c.Nodes[len(c.Nodes)-1].Name) + " nft list ruleset"},
		{"Request", "ip netns exec " + l.Namespace(client) + " curl http://" + request + "/"},
		{"Logs", "ls " + l.LogFolder()},
		{"Take down", "go run ./e2e/cmd/landfall-lab down " + l.Name()},
	})
	p.line("")
	p.line("The kubeconfig works in the nodes' namespaces; agents/ beside it has one for each ServiceAccount.")
}
