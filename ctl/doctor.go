package main

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

func doctorCommand(o *options) *cobra.Command {
	node := ""
	cmd := &cobra.Command{
		Use: "doctor", Short: "Examine the cluster: what is in Landfall's way before an install, and what is wrong after it",
		Long: "Examine the cluster: what is in Landfall's way before an install, and what is wrong after it. The first " +
			"line is the worst thing. It asks the programs of all nodes, or of one.",
		Example: "  landfallctl doctor\n  landfallctl doctor --node n1\n  landfallctl doctor -o json | jq -r .verdict",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDoctor(cmd.Context(), *o, node, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&node, "node", "", "examine only the node with this `name`")
	complete(cmd, "node", func(string) []string { return o.namesNow(nodeNames) })
	o.addOutput(cmd, "json", "yaml", "wide")
	return cmd
}

func runDoctor(ctx context.Context, o options, node string, stdout io.Writer) error {
	return runExplain(ctx, o, stdout, func(ctx context.Context, g *gatherer) (explain.Verdict, error) {
		return examine(ctx, g, node)
	})
}

// rivals are label selectors of other load balancers' pods.
var rivals = map[string][]string{
	"MetalLB":          {"app.kubernetes.io/name=metallb", "app=metallb"},
	"ServiceLB of k3s": {"svccontroller.k3s.cattle.io/svcname"},
	"kube-vip":         {"app.kubernetes.io/name in (kube-vip,kube-vip-ds,kube-vip-cloud-provider)"},
	"PureLB":           {"app=purelb"},
	"OpenELB":          {"app=openelb-controller"},
}

// examine examines a node, or all if it is empty.
func examine(ctx context.Context, g *gatherer, node string) (explain.Verdict, error) {
	d := explain.DoctorFacts{Version: g.server.Version, Namespace: g.opts.home()}
	also := []func(context.Context) error{
		func(ctx context.Context) (err error) {
			d.Services, err = g.client.AllServices(ctx)
			return g.unread("services", err)
		},
		func(ctx context.Context) error {
			pods, err := g.client.PodsWith(ctx, "", "k8s-app=kube-proxy")
			d.KubeProxy = len(pods) > 0
			return g.unread(explain.OtherPods, err)
		},
		func(ctx context.Context) error {
			pods, err := g.client.PodsWith(ctx, "",
				"app.kubernetes.io/name=landfall,app.kubernetes.io/component=controller")
			d.Another = slices.ContainsFunc(pods, func(p kube.PodState) bool { return p.Namespace != d.Namespace })
			return g.unread(explain.OtherPods, err)
		},
		func(ctx context.Context) (err error) {
			d.Mode, d.StrictARP, err = kubeProxyMode(ctx, g.client)
			return g.unread("configmaps", err)
		},
	}
	var mu sync.Mutex
	for name, selectors := range rivals {
		for _, selector := range selectors {
			also = append(also, func(ctx context.Context) error {
				pods, err := g.client.PodsWith(ctx, "", selector)
				mu.Lock()
				defer mu.Unlock()
				if len(pods) > 0 && !slices.Contains(d.Others, name) {
					d.Others = append(d.Others, name)
				}
				return g.unread(explain.OtherPods, err)
			})
		}
	}
	if err := g.read(ctx, also...); err != nil {
		return explain.Verdict{}, err
	}
	slices.Sort(d.Others)
	labels, err := g.client.NamespaceLabels(ctx, d.Namespace)
	if err := g.unread("namespaces", err); err != nil {
		return explain.Verdict{}, err
	}
	d.PodSecurity = labels["pod-security.kubernetes.io/enforce"]
	if g.cluster.Installed && len(g.cluster.Agents) == 0 {
		if d.Refused, err = g.client.RefusedPod(ctx, d.Namespace); g.unread("events", err) != nil {
			return explain.Verdict{}, err
		}
	}
	if node != "" {
		g.ask(ctx, []string{node}, nil, nothing)
		return explain.DoctorNode(g.cluster, d, node), nil
	}
	g.ask(ctx, slices.Collect(maps.Keys(g.cluster.Agents)), nil, nothing)
	return explain.Doctor(g.cluster, d), nil
}

// kubeProxyMode reads the configuration that kubeadm makes for kube-proxy.
func kubeProxyMode(ctx context.Context, client *kube.Client) (mode string, strictARP bool, err error) {
	text, found, err := client.ConfigMapValue(ctx, lb.Key{Namespace: "kube-system", Name: "kube-proxy"}, "config.conf")
	if err != nil || !found {
		return "", false, err
	}
	var config struct {
		Mode string `json:"mode"`
		IPVS struct {
			StrictARP bool `json:"strictARP"`
		} `json:"ipvs"`
	}
	if err := yaml.Unmarshal([]byte(text), &config); err != nil {
		return "", false, errors.New("the ConfigMap kube-system/kube-proxy is not YAML")
	}
	return config.Mode, config.IPVS.StrictARP, nil
}
