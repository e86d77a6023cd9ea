package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/kube"
)

// migrateOptions are the flags of landfallctl migrate.
type migrateOptions struct {
	choices             migrate.Choices
	apply, undo         bool
	chart, helm, name   string
	values, set         []string
	wait, pause         time.Duration
	kubeProxyNamespace  string
	kubeProxyConfigName string
	kubeProxyDaemonSet  string
}

func (f *migrateOptions) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.BoolVar(&f.apply, "apply", false, "carry the plan out, step by step; may be given again after an interruption")
	flags.BoolVar(&f.undo, "undo", false, "go back, from wherever --apply has come to")
	flags.StringVar(&f.chart, "chart", "", "`chart` that helm installs with --apply; empty: Landfall is installed already")
	flags.StringArrayVar(&f.values, "values", nil,
		"`file` of values that helm gets after those of the plan, may be repeated")
	flags.StringArrayVar(&f.set, "set", nil, "`value` for helm, such as image.tag=v1, may be repeated")
	flags.StringVar(&f.helm, "helm", "helm", "`program` helm")
	flags.StringVar(&f.name, "release", "landfall", "`name` of helm's release")
	flags.DurationVar(&f.wait, "wait", 2*time.Minute, "how long to wait for each thing with --apply and --undo")
	flags.DurationVar(&f.pause, "pause", 5*time.Second, "how long to wait between two nodes")
	flags.BoolVar(&f.choices.KeepersPaused, "keepers-paused", false,
		"go on although an operator, Argo CD or the like keeps the other product's workloads: it is paused")
	flags.StringVar(&f.kubeProxyNamespace, "kube-proxy-namespace", "kube-system", "`namespace` of kube-proxy")
	flags.StringVar(&f.kubeProxyConfigName, "kube-proxy-configmap", "kube-proxy", "`name` of kube-proxy's ConfigMap")
	cmd.MarkFlagsMutuallyExclusive("apply", "undo")
}

func migrateCommand(o *options) *cobra.Command {
	parent := &cobra.Command{Use: "migrate", DisableFlagsInUseLine: true,
		Short: "Move a cluster from another product to Landfall, or back",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return fmt.Errorf("%q is none of kube-proxy, metallb", args[0])
		}}
	parent.AddCommand(metallbCommand(o), kubeProxyCommand(o))
	return parent
}

func metallbCommand(o *options) *cobra.Command {
	var f migrateOptions
	cmd := &cobra.Command{
		Use: "metallb [-f FILE]...", Short: "Plan the move from MetalLB, carry it out, or go back",
		Long: "Plan the move from MetalLB: the objects and Helm values of Landfall, what cannot be taken over and why, and " +
			"the steps. --apply carries them out; each step is checked before the next begins. --undo goes back.\n\nWith -f, " +
			"print Landfall's equivalent of MetalLB's objects in files.",
		Example: "  landfallctl migrate metallb\n  landfallctl migrate metallb -o values > values.yaml\n" +
			"  landfallctl migrate metallb --apply --chart charts/landfall --copy-secrets",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.choices.Namespace = o.home()
			return runMetalLB(cmd.Context(), *o, f, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	o.addFiles(cmd, "with MetalLB's objects, may be repeated (default: the cluster)")
	o.addOutput(cmd, "objects", "values")
	f.add(cmd)
	cmd.MarkFlagsMutuallyExclusive("filename", "apply")
	cmd.MarkFlagsMutuallyExclusive("filename", "undo")
	flags := cmd.Flags()
	flags.StringVar(&f.choices.MetalLBNamespace, "metallb-namespace", "",
		"`namespace` of MetalLB (default: that of its objects, or metallb-system without any)")
	cmd.MarkFlagsMutuallyExclusive("filename", "metallb-namespace")
	flags.BoolVar(&f.choices.CopySecrets, "copy-secrets", false,
		"copy the Secrets with passwords of BGP sessions to Landfall's namespace")
	flags.BoolVar(&f.choices.AcceptLosses, "accept-losses", false, "go on without what cannot be taken over")
	flags.BoolVar(&f.choices.WithoutProxy, "without-proxy", false, "install no proxy: another service proxy stays alone")
	flags.StringVar(&f.choices.ClusterCIDR, "cluster-cidr", "", "pod network, as `CIDR` or one of each family, where "+
		"kube-proxy's configuration does not say it")
	flags.StringSliceVar(&f.choices.Interfaces, "l2-interfaces", nil,
		"`interfaces` that answer for addresses outside the nodes' subnets (default: those that MetalLB answers on)")
	return cmd
}

// runMetalLB plans the move from MetalLB, and carries it out if asked to.
func runMetalLB(ctx context.Context, o options, f migrateOptions, stdin io.Reader, stdout io.Writer) error {
	if len(o.files) > 0 {
		if o.output == "values" {
			return errors.New("-o values needs the cluster, and not -f")
		}
		objects, err := fromFiles(o.files, stdin)
		if err != nil {
			return err
		}
		conversion := migrate.Convert(objects)
		if len(conversion.Objects) == 0 {
			return errors.New("found no MetalLB objects (API group metallb.io)")
		}
		return conversion.Print(stdout)
	}
	move, err := readMetalLB(ctx, o, f, stdout)
	if err != nil {
		return err
	}
	p := move.plan
	switch {
	case f.undo:
		if gone := p.Gone(); gone != "" {
			return fmt.Errorf("nothing was done: there is no MetalLB to go back to, as %s; Landfall's objects stay", gone)
		}
		return move.run(ctx, move.undoSteps())
	case o.output == "objects":
		return p.Print(stdout)
	case o.output == "values":
		return printYAML(stdout, p.Values)
	case f.apply && len(p.Blockers) == 0:
		if done, err := move.moved(ctx); done || err != nil {
			if err == nil {
				_, err = fmt.Fprintln(stdout, "Nothing to do: the cluster has moved, and Landfall's objects are yours to edit. "+
					"Once landfallctl status finds nothing wrong, remove MetalLB; until then --undo goes back.")
			}
			return err
		}
		if err := move.run(ctx, move.steps()); err != nil {
			return err
		}
		return move.farewell(ctx)
	}
	if err := move.show(stdout); err != nil {
		return err
	}
	if len(p.Blockers) > 0 && f.apply {
		return fmt.Errorf("nothing was done: %s", strings.Join(p.Blockers, "; "))
	}
	return nil
}

func printYAML(w io.Writer, value any) error {
	text, err := yaml.Marshal(value)
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

// metallbResources are the paths of what a plan reads.
var metallbResources = []string{
	"/apis/metallb.io/v1beta1/ipaddresspools", "/apis/metallb.io/v1beta1/l2advertisements",
	"/apis/metallb.io/v1beta1/bgpadvertisements", "/apis/metallb.io/v1beta2/bgppeers",
	"/apis/metallb.io/v1beta1/bfdprofiles", "/apis/metallb.io/v1beta1/communities",
	"/apis/metallb.io/v1beta1/servicel2statuses", "/apis/frrk8s.metallb.io/v1beta1/frrconfigurations",
	servicesPath, nodesPath, "/apis/apps/v1/deployments", "/apis/apps/v1/daemonsets",
}

// readMetalLB reads the cluster, and plans.
func readMetalLB(ctx context.Context, o options, f migrateOptions, stdout io.Writer) (*metallbMove, error) {
	reading, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, _, err := o.connect(reading)
	if err != nil {
		return nil, err
	}
	var objects []migrate.Object
	for _, path := range metallbResources {
		if objects, err = readObjects(reading, client, objects, path); err != nil {
			return nil, o.late(reading, client, err)
		}
	}
	f.choices.MetalLBNamespace, err = migrate.MetalLBNamespace(objects, f.choices.MetalLBNamespace)
	if err != nil {
		return nil, err
	}
	// The raw configuration of FRR.
	extras := "/api/v1/namespaces/" + f.choices.MetalLBNamespace + "/configmaps/bgpextras"
	if objects, err = readObjects(reading, client, objects, extras); err != nil {
		return nil, o.late(reading, client, err)
	}
	kubeProxy, err := readKubeProxy(reading, client, f)
	if err != nil {
		return nil, o.late(reading, client, err)
	}
	for _, object := range objects {
		if object.Kind == "DaemonSet" && object.Metadata.Namespace == f.kubeProxyNamespace &&
			object.Metadata.Name == "kube-proxy" && kubeProxy == nil { // without a ConfigMap, its flags are all
			kubeProxy, _ = migrate.KubeProxyFlags(migrate.NewWorkload(object))
		}
	}
	var proxy map[string]any
	if kubeProxy != nil {
		proxy, _ = migrate.ReadKubeProxy(kubeProxy).Values["proxy"].(map[string]any)
		delete(proxy, "healthzBindAddress") // kube-proxy keeps it
	}
	plan := migrate.PlanMetalLB(objects, proxy, f.choices)
	return &metallbMove{installer: newInstaller(client, o.user, f, stdout, plan.Values), plan: plan}, nil
}

// readObjects adds the objects at a path, if the API server has it.
func readObjects(ctx context.Context, client *kube.Client, objects []migrate.Object, path string) ([]migrate.Object,
	error) {
	raw, err := client.Raw(ctx, path)
	if err != nil {
		return nil, err
	}
	more, err := migrate.Decode(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return append(objects, more...), nil
}

// readKubeProxy returns kube-proxy's configuration; nil if there is none in the cluster.
func readKubeProxy(ctx context.Context, client *kube.Client, f migrateOptions) (map[string]any, error) {
	path := "/api/v1/namespaces/" + f.kubeProxyNamespace + "/configmaps/" + f.kubeProxyConfigName
	found, err := readObjects(ctx, client, nil, path)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	for _, key := range slices.Sorted(maps.Keys(found[0].Data)) { // config.conf from kubeadm, others' have other names
		written := found[0].Data[key]
		if key != "config.conf" && !strings.Contains(written, "kind: KubeProxyConfiguration") {
			continue
		}
		var config map[string]any
		if err := yaml.Unmarshal([]byte(written), &config); err != nil {
			return nil, fmt.Errorf("ConfigMap %s/%s: %s: %w", f.kubeProxyNamespace, f.kubeProxyConfigName, key, err)
		}
		return config, nil
	}
	return nil, nil
}

// landfallReady says which of Landfall's workloads has not all its pods ready.
func landfallReady(ctx context.Context, client *kube.Client, namespace string) (string, error) {
	workloads, err := client.Workloads(ctx, namespace, ourLabels)
	if err != nil {
		return "", err
	}
	if len(workloads) == 0 {
		return "there are none in the namespace " + namespace, nil
	}
	var missing []string
	for _, w := range workloads {
		if w.Ready < w.Wanted {
			missing = append(missing, fmt.Sprintf("%s %s: %d of %d pods are ready", w.Kind, w.Name, w.Ready, w.Wanted))
		}
	}
	return strings.Join(missing, ", "), nil
}
