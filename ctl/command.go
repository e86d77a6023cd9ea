package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

// options are the flags of all commands.
type options struct {
	user    kube.UserConfig
	timeout time.Duration
	// class is the spec.loadBalancerClass to look at; if classSet is not set, that of the controller's
	// flags.
	class    string
	classSet bool
	output   string
	files    []string
	// landfall is the namespace of Landfall's programs; "" for the default.
	landfall string
}

// home is the namespace of Landfall's programs. Pods elsewhere may be a tenant's, and are neither asked nor believed.
func (o options) home() string { return cmp.Or(o.landfall, defaultNamespace) }

const long = `landfallctl shows what Landfall does in a cluster, and says why something is not reachable.

It needs the API server alone, and asks Landfall's programs on the nodes through it (pods/exec). What it may not
read it names, with the RBAC rule that allows it. It looks for Landfall's pods in the namespace landfall-system, or that
of --landfall-namespace.

Exit codes: 0 nothing is wrong, 1 something is wrong, 2 landfallctl cannot tell (usage, no answer, no permission).`

// newCommand returns the root command of the program called name.
func newCommand(name string) *cobra.Command {
	o := &options{}
	root := &cobra.Command{
		Use: "landfallctl", Short: "shows what Landfall does in a cluster, and why something is not reachable", Long: long,
		Version:      fmt.Sprintf("%s (%s)", ops.BuildVersion(), runtime.Version()),
		SilenceUsage: true, SilenceErrors: true,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) { o.classSet = cmd.Flags().Changed("load-balancer-class") },
	}
	if strings.HasPrefix(filepath.Base(name), "kubectl-") {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl landfall"}
	}
	flags := root.PersistentFlags()
	flags.StringVar(&o.user.Kubeconfig, "kubeconfig", "",
		"kubeconfig `file` (default: the files in $KUBECONFIG, else ~/.kube/config, else the pod's service account)")
	flags.StringVar(&o.user.Context, "context", "", "`name` of the context in the kubeconfig (default: the current one)")
	flags.StringVar(&o.user.Cluster, "cluster", "",
		"`name` of the cluster in the kubeconfig (default: that of the context)")
	flags.StringVar(&o.user.User, "user", "", "`name` of the user in the kubeconfig (default: that of the context)")
	flags.StringVarP(&o.user.Namespace, "namespace", "n", "",
		"`namespace` of Services that are named without one (default: that of the context)")
	flags.StringVar(&o.user.As, "as", "", "`user` to impersonate")
	flags.StringArrayVar(&o.user.AsGroups, "as-group", nil, "`group` to impersonate, may be repeated")
	o.timeout = 15 * time.Second
	flags.Var((*timeoutFlag)(&o.timeout), "request-timeout",
		"how long to wait for answers; a number without a unit is in seconds, 0 is for ever")
	flags.StringVar(&o.class, "load-balancer-class", "",
		"spec.loadBalancerClass of the Services to look at (default: that of Landfall's controller)")
	flags.StringVar(&o.landfall, "landfall-namespace", defaultNamespace,
		"`namespace` of Landfall's programs: pods of other namespaces are not asked")
	root.AddCommand(statusCommand(o), explainCommand(o), doctorCommand(o), verifyCommand(o), migrateCommand(o),
		importCommand(o), versionCommand(o), drainCommand(o), undrainCommand(o), watchCommand(o), bundleCommand(o),
		traceCommand(o), flowsCommand(o), dashboardCommand(o))
	root.SetHelpCommand(helpCommand())
	complete(root, "context", func(string) []string { names, _ := o.user.Contexts(); return names })
	complete(root, "landfall-namespace", func(string) []string {
		return o.namesNow(func(ctx context.Context, _ options, client *kube.Client) []string {
			found, _ := lookalikeNamespaces(ctx, client)
			return found
		})
	})
	return root
}

// helpCommand is cobra's, but a name that is none of the commands is an error.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Show the help of a command",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			of, _, err := cmd.Root().Find(args)
			if err != nil {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			var names []string
			for _, c := range of.Commands() {
				if c.IsAvailableCommand() {
					names = append(names, cobra.CompletionWithDesc(c.Name(), c.Short))
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			of, more, err := cmd.Root().Find(args)
			if err != nil || of.HasAvailableSubCommands() && len(more) > 0 {
				return fmt.Errorf("%q is no command: %s --help lists them", strings.Join(args, " "),
					cmp.Or(of, cmd.Root()).CommandPath())
			}
			of.InitDefaultHelpFlag()
			of.SetOut(cmd.OutOrStdout())
			return of.Help()
		},
	}
}

// timeoutFlag is --request-timeout, written as for kubectl: 30s, 30, or 0 for no limit.
type timeoutFlag time.Duration

// forever is longer than any command runs.
const forever = timeoutFlag(math.MaxInt64)

func (f *timeoutFlag) Set(text string) error {
	if _, err := strconv.ParseUint(text, 10, 32); err == nil {
		text += "s"
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return fmt.Errorf("%q is no time such as 30s, 2m or 0", text)
	}
	if *f = timeoutFlag(d); d == 0 {
		*f = forever
	}
	return nil
}

func (f *timeoutFlag) String() string {
	if *f == forever {
		return "0"
	}
	return time.Duration(*f).String()
}

func (*timeoutFlag) Type() string { return "duration" }

// nameOf takes the kind off a name that is written as kubectl get -o name does, such as node/n1.
func nameOf(written string, kinds ...string) string {
	if kind, name, ok := strings.Cut(written, "/"); ok && slices.Contains(kinds, kind) {
		return name
	}
	return written
}

// arguments wants as many arguments as the command's usage names.
func arguments(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == n {
			return nil
		}
		return fmt.Errorf("%d arguments, not %d: usage: %s", len(args), n, cmd.UseLine())
	}
}

// addOutput gives a command the flag --output.
func (o *options) addOutput(cmd *cobra.Command, formats ...string) {
	cmd.Flags().StringVarP(&o.output, "output", "o", "", "output `format`: "+strings.Join(formats, ", ")+
		" (default: text)")
	complete(cmd, "output", func(string) []string { return formats })
	inner := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if o.output == "" || slices.Contains(formats, o.output) {
			return inner(cmd, args)
		}
		return fmt.Errorf("--output: %q is none of %s", o.output, strings.Join(formats, ", "))
	}
}

// addAllNamespaces gives a command the flag --all-namespaces. What it returns is the namespace of the
// Services to show: that of -n, or "" for all.
func (o *options) addAllNamespaces(cmd *cobra.Command) func() string {
	all := cmd.Flags().BoolP("all-namespaces", "A", false,
		"show Services of all namespaces, which is the default without -n")
	return func() string {
		if *all {
			return ""
		}
		return o.user.Namespace
	}
}

// complete completes the values of a flag.
func complete(cmd *cobra.Command, flag string, values func(begun string) []string) {
	err := cmd.RegisterFlagCompletionFunc(flag,
		func(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return values(begun), cobra.ShellCompDirectiveNoFileComp
		})
	if err != nil {
		panic(err) // the flag is not there
	}
}

func (o *options) addFiles(cmd *cobra.Command, what string) {
	cmd.Flags().StringArrayVarP(&o.files, "filename", "f", nil, "`file` "+what+"; - reads standard input")
}

// connect returns a client, after the API server has answered, and what it says of itself.
func (o *options) connect(ctx context.Context) (*kube.Client, kube.Server, error) {
	client, err := kube.Connect(kube.Options{User: &o.user, UserAgent: "landfallctl", Log: slog.New(slog.DiscardHandler),
		QPS: 1000, Burst: 1000})
	if err != nil {
		return nil, kube.Server{}, err
	}
	server, err := client.Server(ctx)
	return client, server, o.late(ctx, client, err)
}

// late names the time-out where it is the reason of an error.
func (o *options) late(ctx context.Context, client *kube.Client, err error) error {
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("no answer from the API server %s within %s", client.Host(), o.timeout)
	}
	return err
}

func statusCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use: "status", Short: "Show pools, addresses, the node that announces each address, and problems",
		Example: "  landfallctl status\n  landfallctl status -n shop -o wide\n" +
			"  landfallctl status -o json | jq -r '.problems[]'",
		Args: cobra.NoArgs,
	}
	namespace := o.addAllNamespaces(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runStatus(cmd.Context(), *o, namespace(), cmd.OutOrStdout())
	}
	o.addOutput(cmd, "json", "yaml", "wide")
	return cmd
}

func runStatus(ctx context.Context, o options, namespace string, stdout io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, server, err := o.connect(ctx)
	if err != nil {
		return err
	}
	w, err := read(ctx, client, server, o)
	if err != nil {
		return o.late(ctx, client, err)
	}
	maps.DeleteFunc(w.services, func(key lb.Key, _ lb.Service) bool {
		return namespace != "" && key.Namespace != namespace
	})
	r := newReport(w)
	if err := r.write(stdout, o.output); err != nil {
		return err
	}
	switch {
	case len(r.problems) > 0:
		return errWrong
	case len(r.refused) > 0:
		return errUnable
	}
	return nil
}

func versionCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use: "version", Short: "Show the versions of landfallctl, the API server and Landfall's programs",
		Example: "  landfallctl version\n  landfallctl version --client",
		Args:    cobra.NoArgs,
	}
	client := cmd.Flags().Bool("client", false, "ask no API server")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return runVersion(cmd.Context(), *o, *client, cmd.OutOrStdout())
	}
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

// versions is what landfallctl version shows.
type versions struct {
	Client    string `json:"client"`
	APIServer string `json:"apiServer,omitempty"`
	// Images are those of Landfall's containers, with the number of them.
	Images  map[string]int `json:"images,omitempty"`
	NotRead string         `json:"notRead,omitempty"`
}

func runVersion(ctx context.Context, o options, clientOnly bool, stdout io.Writer) error {
	v := versions{Client: ops.BuildVersion()}
	if !clientOnly {
		ctx, cancel := context.WithTimeout(ctx, o.timeout)
		defer cancel()
		client, server, err := o.connect(ctx)
		if err != nil {
			return errors.Join(write(stdout, o.output, v, v.text()), err)
		}
		v.APIServer, v.Images = server.Version, map[string]int{}
		pods, err := landfallPods(ctx, client, o.home())
		if err != nil {
			v.NotRead = err.Error()
		}
		for _, p := range pods {
			for _, c := range p.Containers {
				if program(c) != "" {
					v.Images[c.Image]++
				}
			}
		}
	}
	return write(stdout, o.output, v, v.text())
}

func importCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use: "import NAME -f FILE", Short: "Print an IPAddressPool for a list of addresses",
		Long: "Print an IPAddressPool NAME for a list. Each line has an address, CIDR or range, and optionally " +
			"NAMESPACE/SERVICE to reserve it for.",
		Example: "  printf '192.0.2.10 shop/web\\n192.0.2.32/28\\n' | landfallctl import lan -f -",
		Args:    arguments(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runImport(args[0], *o, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	o.addFiles(cmd, "with the list")
	o.addOutput(cmd, "json", "yaml")
	return cmd
}
